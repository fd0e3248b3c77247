/* k3ctl verify: makes k3.sums, or compares a checkpoint with it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "model/crc32c.h"
#include "tools/ctl.h"
#include "tools/walk.h"

#define THREADS 4
#define FLUSH_NS 1000000000ull

struct verify {
    struct k3_model *m;
    struct k3_progress progress;
    /* check */
    struct k3_sums *sums;
    uint64_t n_bad;
    char first_bad[700];
    /* make */
    FILE *out;
    uint32_t crc; /* of the text so far */
    uint64_t flushed_ns;
    const char *path;
};

static uint64_t items_bytes(const struct k3_model *m, size_t first, size_t end)
{
    struct k3_sum_item item;
    uint64_t bytes = 0;

    for (size_t i = first; i < end; i++)
        if (k3_sums_item(m, i, &item) == 0)
            bytes += item.len_bytes;
    return bytes;
}

static int tick(void *arg, uint64_t done_bytes, struct k3_err *err)
{
    struct verify *v = arg;

    (void)err;
    k3_progress_tick(&v->progress, done_bytes);
    return 0;
}

static int walk(struct verify *v, size_t first, int (*result)(void *, const struct k3_walk_result *, struct k3_err *),
                const char *what, struct k3_err *err)
{
    size_t end = k3_sums_n_items(v->m);
    uint64_t before = items_bytes(v->m, 0, first);
    struct k3_walk w = { .m = v->m, .first = first, .end = end, .n_threads = THREADS, .arg = v, .result = result,
                         .tick = tick };
    int rc;

    k3_progress_begin(&v->progress, "k3ctl", what, before + items_bytes(v->m, first, end), before);
    rc = k3_walk(&w, err);
    k3_progress_end(&v->progress);
    return rc;
}

/* ---- check ---- */

static uint32_t sum_of(const struct k3_sums *s, const struct k3_sum_item *item)
{
    const uint32_t *of = item->kind == K3_SUM_PIECE      ? s->piece
                         : item->kind == K3_SUM_RESIDENT ? s->resident
                         : item->kind == K3_SUM_EXPERT   ? s->expert
                                                         : s->embed;

    return of[item->i];
}

static int check_one(void *arg, const struct k3_walk_result *r, struct k3_err *err)
{
    struct verify *v = arg;
    char name[K3_SUMS_LINE_BYTES], text[700];
    struct k3_sum_item item;
    int rc = k3_sums_item(v->m, r->item, &item);

    if (rc < 0)
        return k3_fail(err, rc, "item %zu has no place", r->item);
    if (r->status == 0 && r->crc == sum_of(v->sums, &item))
        return 0;
    k3_sums_name(v->m, r->item, name);
    if (r->status < 0)
        snprintf(text, sizeof(text), "%s at %" PRIu64 " (%s): %s", v->m->files[r->file].path, r->off_bytes, name,
                 r->status == -ENODATA ? "the file ends before" : strerror(-r->status));
    else
        snprintf(text, sizeof(text), "%s at %" PRIu64 " (%s): %" PRIu64 " bytes have CRC %08x, " K3_SUMS_NAME " says %08x",
                 v->m->files[r->file].path, r->off_bytes, name, item.len_bytes, r->crc, sum_of(v->sums, &item));
    k3_progress_end(&v->progress);
    printf("bad: %s\n", text);
    fflush(stdout);
    if (v->n_bad++ == 0)
        memcpy(v->first_bad, text, sizeof(text));
    return 0;
}

static int check(struct verify *v, const struct k3_model_opts *mo, struct k3_err *err)
{
    size_t n = k3_sums_n_items(v->m);
    int rc = k3_sums_open(&v->sums, v->m, mo, K3_SUMS_ALL, err);

    if (rc == -ENOENT)
        return k3_refuse(err, rc, "%s/" K3_SUMS_NAME " is not there: nothing to compare with; \"k3ctl verify --model %s --make\" "
                         "makes it from the files as they are", mo->dirs[0], mo->dirs[0]);
    if (rc == 0)
        rc = walk(v, 0, check_one, "checked", err);
    if (rc < 0)
        return rc;
    if (v->n_bad)
        return k3_untrusted(err, -EBADMSG, "%" PRIu64 " of %zu parts of %s are not what " K3_SUMS_NAME
                            " says, the first: %.600s; fetch these files again", v->n_bad, n, mo->dirs[0], v->first_bad);
    printf("%s: %zu trunk pieces, %zu resident tensors, %zu experts and %zu embedding blocks are what " K3_SUMS_NAME
           " says (%.3f GB)\n", mo->dirs[0], v->m->n_pieces, v->m->n_residents, k3_sums_n_experts(v->m),
           k3_sums_n_embed(v->m), (double)items_bytes(v->m, 0, n) * 1e-9);
    return 0;
}

/* ---- make ---- */

static int put(struct verify *v, const char *text, size_t n, struct k3_err *err)
{
    v->crc = k3_crc32c(v->crc, text, n);
    if (fwrite(text, 1, n, v->out) != n)
        return k3_fail(err, -errno, "writing %s: %s", v->path, strerror(errno));
    return 0;
}

static int make_one(void *arg, const struct k3_walk_result *r, struct k3_err *err)
{
    struct verify *v = arg;
    char name[K3_SUMS_LINE_BYTES], line[K3_SUMS_LINE_BYTES + 10];
    uint64_t now = k3_now_ns();
    int rc;

    k3_sums_name(v->m, r->item, name);
    if (r->status < 0)
        return k3_untrusted(err, r->status, "%s at %" PRIu64 " (%s): %s", v->m->files[r->file].path, r->off_bytes, name,
                            strerror(-r->status));
    rc = put(v, line, (size_t)snprintf(line, sizeof(line), "%s %08x\n", name, r->crc), err);
    if (rc == 0 && now - v->flushed_ns > FLUSH_NS) { /* what a later run finds if this one is stopped */
        v->flushed_ns = now;
        if (fflush(v->out) != 0)
            rc = k3_fail(err, -errno, "writing %s: %s", v->path, strerror(errno));
    }
    return rc;
}

static bool later(int64_t s, uint32_t ns, int64_t than_s, uint32_t than_ns)
{
    return s > than_s || (s == than_s && ns > than_ns);
}

/* The text of an earlier run is of use only when no shard was written since it began: since the file was made, where the
 * file system says when that was. */
static bool shards_are_older(const struct k3_model *m, int part_fd)
{
    struct statx x;
    struct statx_timestamp began;

    if (statx(part_fd, "", AT_EMPTY_PATH, STATX_BTIME | STATX_MTIME, &x) != 0)
        return false;
    began = x.stx_mask & STATX_BTIME && later(x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec, x.stx_btime.tv_sec, x.stx_btime.tv_nsec)
                ? x.stx_btime : x.stx_mtime;
    for (size_t i = 0; i < m->n_files; i++) {
        struct stat st;

        if (stat(m->files[i].path, &st) != 0 ||
            later(st.st_mtim.tv_sec, (uint32_t)st.st_mtim.tv_nsec, began.tv_sec, began.tv_nsec))
            return false;
    }
    return true;
}

/* Size and time of every shard, as a sum: whether one was written while they were read. */
static uint32_t state_of_shards(const struct k3_model *m)
{
    uint32_t crc = 0;

    for (size_t i = 0; i < m->n_files; i++) {
        struct stat st;
        uint64_t what[4] = { i, 0, 0, 0 };

        if (stat(m->files[i].path, &st) == 0) {
            what[1] = (uint64_t)st.st_size;
            what[2] = (uint64_t)st.st_mtim.tv_sec;
            what[3] = (uint64_t)st.st_mtim.tv_nsec;
        }
        crc = k3_crc32c(crc, what, sizeof(what));
    }
    return crc;
}

/* The first item that has no line yet; the file ends behind the last that has one. */
static int begin_part(struct verify *v, int fd, size_t *first, struct k3_err *err)
{
    uint64_t end_bytes = 0;
    struct stat st;
    char head[128];
    int rc = 0;

    *first = 0;
    if (fstat(fd, &st) != 0)
        return k3_fail(err, -errno, "%s: %s", v->path, strerror(errno));
    if (st.st_size > 0 && shards_are_older(v->m, fd))
        rc = k3_sums_resume(fd, v->m, first, &end_bytes, &v->crc, err);
    if (rc == 0 && (ftruncate(fd, (off_t)end_bytes) != 0 || lseek(fd, 0, SEEK_END) < 0))
        rc = k3_fail(err, -errno, "%s: %s", v->path, strerror(errno));
    if (rc == 0 && end_bytes == 0) {
        v->crc = 0;
        rc = put(v, head, (size_t)k3_sums_head(v->m, head, sizeof(head)), err);
    }
    if (rc == 0 && *first)
        fprintf(stderr, "k3ctl: %s has %zu of %zu lines: going on from there\n", v->path, *first, k3_sums_n_items(v->m));
    return rc;
}

static int finish(struct verify *v, const char *dir, const char *path, struct k3_err *err)
{
    char line[64];
    int n = snprintf(line, sizeof(line), "end %zu %08x\n", 2 + k3_sums_n_items(v->m), v->crc);

    if (fwrite(line, 1, (size_t)n, v->out) != (size_t)n || fflush(v->out) != 0 || fsync(fileno(v->out)) != 0 ||
        rename(v->path, path) != 0 || k3_sync_dir(dir) < 0)
        return k3_fail(err, -errno, "writing %s: %s", path, strerror(errno));
    return 0;
}

static int make(struct verify *v, const char *dir, bool replace, struct k3_err *err)
{
    char *path = NULL, *part = NULL;
    uint32_t before = state_of_shards(v->m);
    size_t first = 0;
    int fd = -1, rc = 0;

    if (asprintf(&path, "%s/" K3_SUMS_NAME, dir) < 0 || asprintf(&part, "%s/" K3_SUMS_NAME ".part", dir) < 0) {
        rc = k3_fail(err, -ENOMEM, "no memory for a file name");
        goto out;
    }
    v->path = part;
    if (!replace && access(path, F_OK) == 0) { /* of a damaged file it would make right ones */
        rc = k3_refuse(err, -EEXIST, "%s is there already; \"k3ctl verify --model %s\" compares with it; --replace makes it anew "
                       "from the files as they are, damaged ones too", path, dir);
        goto out;
    }
    fd = open(part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd < 0) {
        rc = k3_refuse(err, -errno, "%s cannot be written: %s", part, strerror(errno));
        goto out;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        rc = k3_refuse(err, -EBUSY, "%s is being written by another k3ctl verify --make", part);
        goto out;
    }
    v->out = fdopen(fd, "r+");
    if (!v->out) {
        rc = k3_fail(err, -errno, "%s: %s", part, strerror(errno));
        goto out;
    }
    fd = -1;
    rc = begin_part(v, fileno(v->out), &first, err);
    if (rc == 0)
        rc = walk(v, first, make_one, "summed", err);
    if (rc == 0 && state_of_shards(v->m) != before) {
        (void)unlink(part); /* a time in the past may have been given to it: nothing to go on from */
        rc = k3_untrusted(err, -ESTALE, "a shard of %s was written while it was read: no sums were made; run it again when the "
                          "files are complete", dir);
    }
    if (rc == 0)
        rc = finish(v, dir, path, err);
    if (rc == 0)
        printf("%s: sums of %zu trunk pieces, %zu resident tensors, %zu experts and %zu embedding blocks\n", path,
               v->m->n_pieces, v->m->n_residents, k3_sums_n_experts(v->m), k3_sums_n_embed(v->m));
out:
    if (v->out)
        fclose(v->out);
    if (fd >= 0)
        close(fd);
    free(path);
    free(part);
    return rc;
}

int k3_ctl_verify(const struct k3_ctl_opt *o, struct k3_err *err)
{
    char running[4096];
    const char *dir = o->model;
    struct k3_model_opts mo = { .dirs = &dir, .n_dirs = 1, .n_layers = o->n_layers, .want_experts = true,
                                .no_pack = true };
    struct verify v = { .out = NULL };
    int rc = 0;

    if (o->replace && !o->make)
        return k3_refuse(err, -EINVAL, "--replace goes with verify --make");
    if (!dir) {
        uint32_t n_layers;

        rc = k3_ctl_model(o, running, sizeof(running), &n_layers, err);
        if (rc < 0)
            return rc;
        dir = running;
        if (mo.n_layers == 0)
            mo.n_layers = n_layers;
    }
    rc = k3_model_open(&v.m, &mo, err);
    if (rc == 0)
        rc = o->make ? make(&v, dir, o->replace, err) : check(&v, &mo, err);
    k3_sums_free(v.sums);
    k3_model_close(v.m);
    return rc;
}
