/* k3-pack.  The bytes of a piece are on the disk before the table says that they are, and the file gets its name last. */
#include "tools/pack.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "model/crc32c.h"
#include "model/sums.h"
#include "tools/walk.h"

#define THREADS 4
#define SAVE_BYTES (256u << 20) /* what is written between two states of the table, at most */
#define SAVE_NS 5000000000ull

struct pack {
    const struct k3_pack_opts *o;
    struct k3_model *m;
    struct k3_sums *sums; /* NULL: none */
    struct k3_pack_header h;
    struct k3_pack_entry *table;
    uint8_t *keep; /* by item of the walk: written by an earlier run */
    char *path, *part;
    int fd;
    uint64_t done_bytes, kept_bytes, unsaved_bytes, saved_ns;
    struct k3_progress progress;
    pthread_mutex_t lock;
    int write_errno; /* of the first write that failed */
};

/* Items are pieces, then residents; entries residents, then pieces. */
static size_t entry_of(const struct pack *p, size_t item)
{
    return item < p->m->n_pieces ? p->m->n_residents + item : item - p->m->n_pieces;
}

static size_t n_items(const struct pack *p)
{
    return p->m->n_pieces + p->m->n_residents;
}

static bool is_no_room(int errnum)
{
    return errnum == ENOSPC || errnum == EDQUOT || errnum == EFBIG;
}

static int write_all(int fd, const void *data, size_t n, uint64_t off_bytes)
{
    const uint8_t *p = data;

    while (n) {
        ssize_t w = pwrite(fd, p, n, (off_t)off_bytes);

        if (w < 0 && errno == EINTR)
            continue;
        if (w <= 0)
            return w < 0 ? -errno : -EIO;
        p += w;
        n -= (size_t)w;
        off_bytes += (uint64_t)w;
    }
    return 0;
}

/* ---- room ---- */

static uint64_t free_bytes(const struct pack *p)
{
    struct statvfs v;

    return fstatvfs(p->fd, &v) == 0 && v.f_blocks ? (uint64_t)v.f_bavail * v.f_frsize : UINT64_MAX;
}

static int no_room(const struct pack *p, uint64_t missing_bytes, const char *why, struct k3_err *err)
{
    uint64_t left = free_bytes(p);
    char has[64] = "";

    (void)unlink(p->part); /* what was begun may be what fills it */
    if (left != UINT64_MAX)
        snprintf(has, sizeof(has), ", %.3f GB (%" PRIu64 " bytes) are free there", (double)left * 1e-9, left);
    return k3_refuse(err, -ENOSPC, "%.3f GB (%" PRIu64 " bytes) are needed in %s for the packed trunk%s%s%s: make room, or "
                     "give another --out; nothing was left there", (double)missing_bytes * 1e-9, missing_bytes, p->o->out,
                     has, why ? ": " : "", why ? why : "");
}

/* Takes all blocks at once, so that the disk cannot fill up while this is written. */
static int take_room(struct pack *p, struct k3_err *err)
{
    uint64_t left = free_bytes(p), has;
    struct stat st;

    if (fstat(p->fd, &st) != 0)
        return k3_fail(err, -errno, "%s: %s", p->part, strerror(errno));
    has = (uint64_t)st.st_blocks * 512;
    if (left != UINT64_MAX && has < p->h.file_bytes && p->h.file_bytes - has > left)
        return no_room(p, p->h.file_bytes - has, NULL, err);
    if (fallocate(p->fd, 0, 0, (off_t)p->h.file_bytes) == 0)
        return 0;
    if (is_no_room(errno))
        return no_room(p, p->h.file_bytes - (has < p->h.file_bytes ? has : 0), strerror(errno), err);
    if (ftruncate(p->fd, (off_t)p->h.file_bytes) != 0) /* a file system that cannot reserve */
        return is_no_room(errno) ? no_room(p, p->h.file_bytes, strerror(errno), err)
                                 : k3_fail(err, -errno, "%s: %s", p->part, strerror(errno));
    return 0;
}

/* ---- state ---- */

static int save(struct pack *p, struct k3_err *err)
{
    int rc = fdatasync(p->fd) != 0 ? -errno : 0;

    if (rc == 0)
        rc = write_all(p->fd, p->table, (size_t)p->h.n_entries * sizeof(*p->table), sizeof(p->h));
    (void)posix_fadvise(p->fd, 0, 0, POSIX_FADV_DONTNEED);
    p->unsaved_bytes = 0;
    p->saved_ns = k3_now_ns();
    if (rc < 0)
        return is_no_room(-rc) ? no_room(p, p->h.file_bytes, strerror(-rc), err)
                               : k3_fail(err, rc, "writing %s: %s", p->part, strerror(-rc));
    return 0;
}

static bool contradicts(const struct pack *p, const struct k3_sum_item *item, uint32_t crc, uint32_t *want)
{
    if (!p->sums)
        return false;
    *want = item->kind == K3_SUM_PIECE ? p->sums->piece[item->i] : p->sums->resident[item->i];
    return crc != *want;
}

/* Whether what an earlier run copied is of these shards: a model may have been replaced by another of the same shape. */
static int is_of_these(const struct pack *p, const struct k3_pack_entry *old, struct k3_err *err)
{
    size_t n = p->h.n_entries, differs;
    uint32_t *crc = calloc(n ? n : 1, sizeof(*crc));
    uint8_t *have = calloc(n ? n : 1, 1);
    int rc = crc && have ? 0 : k3_fail(err, -ENOMEM, "no memory for the state of %zu pieces", n);

    for (size_t i = 0; i < n && rc == 0; i++) {
        crc[i] = old[i].crc;
        have[i] = old[i].done == 1;
    }
    if (rc == 0)
        rc = k3_pack_sample(p->m, crc, have, &differs, err);
    free(crc);
    free(have);
    return rc < 0 ? rc : rc == 0;
}

/* What an earlier run wrote and what still has its CRC. */
static int keep_what_is_there(struct pack *p, const struct k3_pack_entry *old, struct k3_err *err)
{
    uint8_t *buf = malloc(K3_PIECE_BYTES);
    uint64_t seen = 0;

    if (!buf)
        return k3_fail(err, -ENOMEM, "no memory for a piece");
    k3_progress_begin(&p->progress, "k3-pack", "of an earlier run checked", p->h.file_bytes, 0);
    for (size_t item = 0; item < n_items(p); item++) {
        struct k3_pack_entry *e = &p->table[entry_of(p, item)];
        const struct k3_pack_entry *was = &old[entry_of(p, item)];
        uint32_t crc, sum;
        struct k3_sum_item what;
        int rc;

        if (was->done != 1 || was->off_bytes != e->off_bytes || was->len_bytes != e->len_bytes)
            continue;
        rc = k3_crc32c_file(p->fd, e->off_bytes, e->len_bytes, buf, K3_PIECE_BYTES, &crc);
        seen += e->len_bytes;
        (void)posix_fadvise(p->fd, (off_t)e->off_bytes, (off_t)e->len_bytes, POSIX_FADV_DONTNEED);
        k3_progress_tick(&p->progress, seen);
        if (rc < 0 || crc != was->crc || k3_sums_item(p->m, item, &what) < 0 ||
            contradicts(p, &what, crc, &sum)) /* then the shard decides, once more */
            continue;
        e->crc = crc;
        e->done = 1;
        p->keep[item] = 1;
        p->kept_bytes += e->len_bytes;
    }
    k3_progress_end(&p->progress);
    free(buf);
    return 0;
}

/* Header and table of an earlier run, if it was about the very same: to be freed; NULL otherwise. */
static struct k3_pack_entry *read_old(const struct pack *p)
{
    size_t n = (size_t)p->h.n_entries * sizeof(*p->table);
    struct k3_pack_header h;
    struct k3_pack_entry *old;

    if (pread(p->fd, &h, sizeof(h), 0) != (ssize_t)sizeof(h) ||
        h.header_crc != k3_crc32c(0, &h, offsetof(struct k3_pack_header, header_crc)) ||
        (memcmp(h.magic, K3_PACK_PART_MAGIC, 8) && memcmp(h.magic, K3_PACK_MAGIC, 8)) || h.version != p->h.version ||
        h.n_entries != p->h.n_entries || h.data_off_bytes != p->h.data_off_bytes || h.file_bytes != p->h.file_bytes ||
        h.n_layers != p->h.n_layers || memcmp(h.digest, p->h.digest, sizeof(h.digest)))
        return NULL;
    old = malloc(n ? n : 1);
    if (old && pread(p->fd, old, n, sizeof(h)) != (ssize_t)n) {
        free(old);
        old = NULL;
    }
    return old;
}

static int begin(struct pack *p, struct k3_err *err)
{
    struct k3_pack_header part;
    struct k3_pack_entry *old = NULL;
    struct stat st;
    int rc;

    p->fd = open(p->part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (p->fd < 0)
        return k3_refuse(err, -errno, "%s cannot be written: %s", p->part, strerror(errno));
    if (fstat(p->fd, &st) != 0 || !S_ISREG(st.st_mode))
        return k3_refuse(err, -EINVAL, "%s is not a regular file: remove it", p->part);
    if (flock(p->fd, LOCK_EX | LOCK_NB) != 0)
        return k3_refuse(err, -EBUSY, "%s is being written by another k3-pack", p->part);
    p->keep = calloc(n_items(p) ? n_items(p) : 1, 1);
    if (!p->keep)
        return k3_fail(err, -ENOMEM, "no memory for the state of %zu pieces", n_items(p));
    old = read_old(p);
    if (old && (rc = is_of_these(p, old, err)) <= 0) {
        free(old);
        old = NULL;
        if (rc < 0)
            return rc;
        fprintf(stderr, "k3-pack: %s has another model of the same shape: begun anew\n", p->part);
    }
    if (old) {
        rc = keep_what_is_there(p, old, err);
        free(old);
        if (rc < 0)
            return rc;
        if (p->kept_bytes)
            fprintf(stderr, "k3-pack: %s has %.3f of %.3f GB already: going on from there\n", p->part,
                    (double)p->kept_bytes * 1e-9, (double)p->h.file_bytes * 1e-9);
    } else if (ftruncate(p->fd, 0) != 0) {
        return k3_fail(err, -errno, "%s: %s", p->part, strerror(errno));
    }
    if ((rc = take_room(p, err)) < 0)
        return rc;
    part = p->h;
    memcpy(part.magic, K3_PACK_PART_MAGIC, sizeof(part.magic));
    k3_pack_seal(&part, p->table);
    rc = write_all(p->fd, &part, sizeof(part), 0);
    if (rc < 0)
        return is_no_room(-rc) ? no_room(p, p->h.file_bytes, strerror(-rc), err)
                               : k3_fail(err, rc, "writing %s: %s", p->part, strerror(-rc));
    return save(p, err);
}

/* ---- the copy ---- */

static int copy_one(void *arg, const struct k3_sum_item *item, size_t i, const void *bytes, uint32_t crc)
{
    struct pack *p = arg;
    uint32_t want;
    int rc;

    if (contradicts(p, item, crc, &want))
        return -EBADMSG;
    rc = write_all(p->fd, bytes, item->len_bytes, p->table[entry_of(p, i)].off_bytes);
    if (rc < 0) {
        pthread_mutex_lock(&p->lock);
        if (!p->write_errno)
            p->write_errno = -rc;
        pthread_mutex_unlock(&p->lock);
    }
    return rc;
}

static int copied(void *arg, const struct k3_walk_result *r, struct k3_err *err)
{
    struct pack *p = arg;
    struct k3_pack_entry *e = &p->table[entry_of(p, r->item)];
    char name[K3_SUMS_LINE_BYTES];
    struct k3_sum_item item;
    uint32_t want = 0;
    int write_errno;

    pthread_mutex_lock(&p->lock);
    write_errno = p->write_errno;
    pthread_mutex_unlock(&p->lock);
    if (write_errno)
        return is_no_room(write_errno) ? no_room(p, p->h.file_bytes, strerror(write_errno), err)
                                       : k3_fail(err, -write_errno, "writing %s: %s", p->part, strerror(write_errno));
    if (r->status < 0) {
        (void)save(p, NULL);
        k3_sums_name(p->m, r->item, name);
        if (r->status != -EBADMSG || k3_sums_item(p->m, r->item, &item) < 0)
            return k3_untrusted(err, r->status, "%s at %" PRIu64 " (%s): %s; what is copied is kept in %s",
                                p->m->files[r->file].path, r->off_bytes, name,
                                r->status == -ENODATA ? "the file ends before" : strerror(-r->status), p->part);
        (void)contradicts(p, &item, r->crc, &want);
        return k3_untrusted(err, r->status, "%s at %" PRIu64 " (%s): CRC %08x, " K3_SUMS_NAME " says %08x: the file is "
                            "damaged; fetch it again, then k3-pack goes on (what is copied is kept in %s)",
                            p->m->files[r->file].path, r->off_bytes, name, r->crc, want, p->part);
    }
    e->crc = r->crc;
    e->done = 1;
    p->unsaved_bytes += e->len_bytes;
    return p->unsaved_bytes >= SAVE_BYTES || k3_now_ns() - p->saved_ns > SAVE_NS ? save(p, err) : 0;
}

static int tick(void *arg, uint64_t done_bytes, struct k3_err *err)
{
    struct pack *p = arg;

    (void)err;
    k3_progress_tick(&p->progress, done_bytes);
    return 0;
}

static int copy(struct pack *p, struct k3_err *err)
{
    struct k3_walk w = { .m = p->m, .end = n_items(p), .skip = p->keep, .n_threads = THREADS, .arg = p, .bytes = copy_one,
                         .result = copied, .tick = tick };
    int rc;

    k3_progress_begin(&p->progress, "k3-pack", "copied", p->h.file_bytes, p->kept_bytes);
    rc = k3_walk(&w, err);
    k3_progress_end(&p->progress);
    return rc;
}

static int finish(struct pack *p, struct k3_err *err)
{
    int rc;

    if (fdatasync(p->fd) != 0)
        return k3_fail(err, -errno, "writing %s: %s", p->part, strerror(errno));
    k3_pack_seal(&p->h, p->table);
    rc = write_all(p->fd, p->table, (size_t)p->h.n_entries * sizeof(*p->table), sizeof(p->h));
    if (rc == 0)
        rc = write_all(p->fd, &p->h, sizeof(p->h), 0);
    if (rc == 0 && fsync(p->fd) != 0)
        rc = -errno;
    if (rc < 0)
        return k3_fail(err, rc, "writing %s: %s", p->part, strerror(-rc));
    if (rename(p->part, p->path) != 0)
        return k3_fail(err, -errno, "renaming %s: %s", p->part, strerror(errno));
    rc = k3_sync_dir(p->o->out);
    return rc < 0 ? k3_fail(err, rc, "%s: %s", p->o->out, strerror(-rc)) : 0;
}

/* ---- from the beginning ---- */

/* 1: a complete one of this model is there. */
static int look(struct pack *p, struct k3_err *err)
{
    const char *dirs[2] = { p->o->model, p->o->out };
    struct k3_model_opts mo = { .dirs = dirs, .n_dirs = 2, .n_layers = p->o->n_layers };
    struct k3_model *m;
    struct stat st;
    int rc;

    if (stat(p->o->out, &st) != 0 || !S_ISDIR(st.st_mode))
        return k3_refuse(err, -ENOTDIR, "--out %s: must be a directory that is there: mount its drive and make it with mkdir; "
                         "k3-pack does not make it, since without the drive it would fill the one below", p->o->out);
    if (access(p->path, F_OK) != 0)
        return 0;
    rc = k3_model_open(&m, &mo, err);
    if (rc < 0)
        return rc;
    rc = k3_pack_check_source(m, &mo, err);
    if (rc == 0 && p->sums)
        rc = k3_pack_check_sums(m, p->sums, err);
    k3_model_close(m);
    return rc < 0 ? rc : 1;
}

static int open_sums(struct pack *p, const struct k3_model_opts *mo, struct k3_err *err)
{
    struct k3_err sums_err = K3_ERR_INIT;
    int rc = k3_sums_open(&p->sums, p->m, mo, K3_SUMS_TRUNK, &sums_err);

    if (rc == -ENOENT)
        return 0;
    if (rc < 0 && err)
        *err = sums_err;
    return rc;
}

static int pack(struct pack *p, struct k3_err *err)
{
    int rc;

    if ((rc = begin(p, err)) < 0 || (rc = copy(p, err)) < 0)
        return rc;
    return finish(p, err);
}

int k3_pack_write(const struct k3_pack_opts *o, struct k3_pack_done *done, struct k3_err *err)
{
    struct pack p = { .o = o, .fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER };
    struct k3_model_opts mo = { .dirs = &o->model, .n_dirs = 1, .n_layers = o->n_layers, .no_pack = true };
    int rc = k3_model_open(&p.m, &mo, err);

    *done = (struct k3_pack_done){ 0 };
    if (rc == 0 && (asprintf(&p.path, "%s/" K3_PACK_NAME, o->out) < 0 || asprintf(&p.part, "%s/" K3_PACK_PART, o->out) < 0))
        rc = k3_fail(err, -ENOMEM, "no memory for a file name");
    if (rc == 0)
        rc = k3_pack_plan(p.m, &p.h, &p.table, err);
    if (rc == 0)
        rc = open_sums(&p, &mo, err);
    if (rc == 0)
        rc = look(&p, err);
    done->was_there = rc == 1;
    if (rc == 0)
        rc = pack(&p, err);
    if (rc >= 0) {
        done->file_bytes = p.h.file_bytes;
        done->kept_bytes = p.kept_bytes;
        done->n_matrices = p.m->n_matrices;
        done->n_residents = p.m->n_residents;
        done->with_sums = p.sums != NULL;
    }
    if (p.fd >= 0)
        close(p.fd);
    k3_sums_free(p.sums);
    k3_model_close(p.m);
    free(p.table);
    free(p.keep);
    free(p.path);
    free(p.part);
    return rc < 0 ? rc : 0;
}
