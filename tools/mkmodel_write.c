/* Writes a plan to disk.  One thread makes bytes, this one writes them: two buffers in turn.  Written pages are sent to
 * the disk and dropped as we go, so that making 23 GB neither fills the page cache nor ends in one long sync. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "ipc/parse.h"
#include "tools/mkmodel.h"

#define SLICE_BYTES (1u << 20)   /* of a tensor, made at once; a multiple of 64 */
#define BUFFER_BYTES (8u << 20)
#define N_BUFFERS 3
#define LUMP_BYTES (64u << 20)   /* sent to the disk at once */

struct buffer {
    uint8_t *data;
    size_t len_bytes;
    bool full;
};

struct maker { /* the thread that fills buffers with one shard after another */
    const struct k3_mk_plan *p;
    uint32_t shard;
    struct buffer buf[N_BUFFERS];
    pthread_mutex_t lock;
    pthread_cond_t moved;
    bool stop;
};

struct out {
    const struct k3_mk_plan *p;
    char *tmp; /* the directory while it is being made */
    uint64_t done_bytes, all_bytes;
    uint32_t done_shards;
    struct timespec began, last_said;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    interrupted = sig;
}

static double since(const struct timespec *t)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - t->tv_sec) + (double)(now.tv_nsec - t->tv_nsec) / 1e9;
}

/* A line after two seconds and every two from then on; on a terminal it overwrites itself. */
static void progress(struct out *o, bool end)
{
    char done[K3_SIZE_TEXT], all[K3_SIZE_TEXT], bytes[96] = "the headers alone";
    double s = since(&o->began);
    bool tty = isatty(STDERR_FILENO);

    if (s < 2 || (!end && since(&o->last_said) < 2))
        return;
    clock_gettime(CLOCK_MONOTONIC, &o->last_said);
    if (o->all_bytes)
        snprintf(bytes, sizeof(bytes), "%s of %s, %.2f GB/s", k3_size_text(done, o->done_bytes),
                 k3_size_text(all, o->all_bytes), (double)o->done_bytes / 1e9 / s);
    fprintf(stderr, "%swrote %u of %u shard%s, %s%s", tty ? "\r" : "", o->done_shards, o->p->n_shards,
            o->p->n_shards == 1 ? "" : "s", bytes, !tty || end ? "\n" : "   ");
}

/* Waits for a buffer to be full or empty.  false: stop. */
static bool wait_for(struct maker *k, struct buffer *b, bool full)
{
    pthread_mutex_lock(&k->lock);
    while (b->full != full && !k->stop)
        pthread_cond_wait(&k->moved, &k->lock);
    pthread_mutex_unlock(&k->lock);
    return b->full == full;
}

static void mark(struct maker *k, struct buffer *b, bool full)
{
    pthread_mutex_lock(&k->lock);
    b->full = full;
    pthread_cond_broadcast(&k->moved);
    pthread_mutex_unlock(&k->lock);
}

static void *make(void *arg)
{
    struct maker *k = arg;
    const struct k3_mk_shard *s = k->p->shards + k->shard;
    size_t at = 0;
    struct buffer *b = k->buf;

    if (!wait_for(k, b, false))
        return NULL;
    b->len_bytes = 0;
    for (size_t i = 0; i < s->n; i++) {
        const struct k3_mk_tensor *t = k->p->tensors + k->p->order[s->first + i];

        for (uint64_t off = 0; off < t->len_bytes; off += SLICE_BYTES) {
            size_t n = t->len_bytes - off < SLICE_BYTES ? (size_t)(t->len_bytes - off) : SLICE_BYTES;

            if (BUFFER_BYTES - b->len_bytes < n) {
                mark(k, b, true);
                b = k->buf + ++at % N_BUFFERS;
                if (!wait_for(k, b, false))
                    return NULL;
                b->len_bytes = 0;
            }
            k3_mk_fill(k->p, t, off, n, b->data + b->len_bytes);
            b->len_bytes += n;
        }
    }
    mark(k, b, true);
    return NULL;
}

static int write_all(int fd, const void *data, size_t n, uint64_t off, const char *path, struct k3_err *err)
{
    const uint8_t *p = data;

    while (n) {
        ssize_t w = pwrite(fd, p, n, (off_t)off);

        if (interrupted)
            return k3_fail(err, -EINTR, "interrupted; nothing was made");
        if (w < 0 && errno == EINTR)
            continue;
        if (w <= 0)
            return k3_fail(err, w < 0 ? -errno : -EIO, "writing %s at byte %" PRIu64 ": %s", path, off,
                           strerror(w < 0 ? errno : EIO));
        p += w;
        n -= (size_t)w;
        off += (uint64_t)w;
    }
    return 0;
}

/* Takes full buffers until the shard's data is written. */
static int take(struct out *o, struct maker *k, int fd, uint64_t off, const char *path, struct k3_err *err)
{
    uint64_t left = o->p->shards[k->shard].data_bytes, dropped = off, sent = off;
    int rc = 0;

    for (size_t at = 0; left && rc == 0; at++) {
        struct buffer *b = k->buf + at % N_BUFFERS;
        size_t n;

        wait_for(k, b, true);
        n = b->len_bytes;
        rc = write_all(fd, b->data, n, off, path, err);
        mark(k, b, false);
        if (rc < 0)
            break;
        off += n;
        left -= n;
        o->done_bytes += n;
        if (off - sent >= LUMP_BYTES) {
            sync_file_range(fd, (off_t)sent, (off_t)(off - sent), SYNC_FILE_RANGE_WRITE);
            if (sent > dropped) { /* the lump before: mostly written by now; wait for the rest, drop it */
                sync_file_range(fd, (off_t)dropped, (off_t)(sent - dropped),
                                SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
                posix_fadvise(fd, (off_t)dropped, (off_t)(sent - dropped), POSIX_FADV_DONTNEED);
                dropped = sent;
            }
            sent = off;
        }
        progress(o, false);
    }
    return rc;
}

static int write_data(struct out *o, uint32_t shard, int fd, uint64_t off, const char *path, struct k3_err *err)
{
    struct maker k = { .p = o->p, .shard = shard, .lock = PTHREAD_MUTEX_INITIALIZER,
                       .moved = PTHREAD_COND_INITIALIZER };
    pthread_t thread;
    int rc = 0;

    for (int i = 0; i < N_BUFFERS && rc == 0; i++)
        if (!(k.buf[i].data = malloc(BUFFER_BYTES)))
            rc = k3_fail(err, -ENOMEM, "no memory for buffers");
    if (rc == 0 && (rc = -pthread_create(&thread, NULL, make, &k)) < 0)
        k3_fail(err, rc, "cannot start a thread: %s", strerror(-rc));
    if (rc == 0) {
        rc = take(o, &k, fd, off, path, err);
        pthread_mutex_lock(&k.lock);
        k.stop = true;
        pthread_cond_broadcast(&k.moved);
        pthread_mutex_unlock(&k.lock);
        pthread_join(thread, NULL);
    }
    for (int i = 0; i < N_BUFFERS; i++)
        free(k.buf[i].data);
    return rc;
}

static int write_shard(struct out *o, uint32_t shard, struct k3_err *err)
{
    char name[64], path[4096], *header = NULL;
    size_t header_bytes;
    int fd, rc = k3_mk_header(o->p, shard, &header, &header_bytes, err);

    if (rc < 0)
        return rc;
    k3_mk_shard_name(o->p, shard, name);
    snprintf(path, sizeof(path), "%s/%s", o->tmp, name);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        free(header);
        return k3_fail(err, -errno, "create %s: %s", path, strerror(errno));
    }
    rc = write_all(fd, header, header_bytes, 0, path, err);
    if (rc == 0 && o->p->opts.sparse && ftruncate(fd, (off_t)(header_bytes + o->p->shards[shard].data_bytes)) < 0)
        rc = k3_fail(err, -errno, "%s: length %" PRIu64 ": %s", path, header_bytes + o->p->shards[shard].data_bytes,
                     strerror(errno));
    if (rc == 0 && !o->p->opts.sparse && o->p->shards[shard].data_bytes)
        rc = write_data(o, shard, fd, header_bytes, path, err);
    if (close(fd) < 0 && rc == 0)
        rc = k3_fail(err, -errno, "writing %s: %s", path, strerror(errno));
    free(header);
    return rc;
}

static int write_texts(struct out *o, struct k3_err *err)
{
    char path[4096], *json = NULL;
    int rc = k3_mk_config_json(&o->p->opts.cfg, o->p->opts.flat, &json, err);
    FILE *f;

    if (rc < 0)
        return rc;
    snprintf(path, sizeof(path), "%s/config.json", o->tmp);
    f = fopen(path, "wxe");
    rc = f ? fputs(json, f) : -1;
    free(json);
    if ((f && fclose(f) != 0) || rc < 0)
        return k3_fail(err, -EIO, "writing %s: %s", path, strerror(errno));
    snprintf(path, sizeof(path), "%s/model.safetensors.index.json", o->tmp);
    f = fopen(path, "wxe");
    rc = f ? k3_mk_list(o->p, f) : -1;
    if ((f && fclose(f) != 0) || rc < 0)
        return k3_fail(err, -EIO, "writing %s: %s", path, strerror(errno));
    return 0;
}

static int check_space(struct out *o, const char *parent, struct k3_err *err)
{
    struct statvfs v;
    uint64_t free_bytes, need_bytes;
    char left[K3_SIZE_TEXT], need[K3_SIZE_TEXT];

    o->all_bytes = o->p->opts.sparse ? 0 : o->p->total_bytes;
    if (statvfs(parent, &v) < 0)
        return k3_refuse(err, -errno, errno == ENOENT ? "%s: %s: --out makes one directory, in one that is there already"
                                                      : "%s: %s", parent, strerror(errno));
    free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    need_bytes = o->all_bytes + o->p->n_tensors * 300;
    if (need_bytes > free_bytes)
        return k3_refuse(err, -ENOSPC, "%s has %s free, the model needs %s%s", parent, k3_size_text(left, free_bytes),
                         k3_size_text(need, need_bytes), o->p->opts.sparse ? "" : " (--sparse needs only its headers)");
    return 0;
}

static void announce(const struct out *o, const char *to)
{
    char size[K3_SIZE_TEXT];

    fprintf(stderr, "k3-mkmodel: writing %s of weights%s in %u shard%s to %s\n", k3_size_text(size, o->p->total_bytes),
            o->p->opts.sparse ? " as holes" : "", o->p->n_shards, o->p->n_shards == 1 ? "" : "s", to);
}

static void remove_tmp(struct out *o)
{
    static const char *const texts[] = { "config.json", "model.safetensors.index.json" };
    char path[4096], name[64];

    for (uint32_t i = 0; i < o->p->n_shards + 2; i++) {
        if (i < o->p->n_shards)
            k3_mk_shard_name(o->p, i, name);
        snprintf(path, sizeof(path), "%s/%s", o->tmp, i < o->p->n_shards ? name : texts[i - o->p->n_shards]);
        unlink(path);
    }
    rmdir(o->tmp);
}

static int write_dir(struct out *o, const char *out, struct k3_err *err)
{
    int rc = 0;

    if (mkdir(o->tmp, 0755) < 0)
        return k3_refuse(err, -errno, "mkdir %s: %s", o->tmp, strerror(errno));
    for (uint32_t i = 0; i < o->p->n_shards && rc == 0; i++) {
        rc = interrupted ? k3_fail(err, -EINTR, "interrupted; nothing was made") : write_shard(o, i, err);
        o->done_shards += rc == 0;
        progress(o, false);
    }
    if (rc == 0)
        rc = write_texts(o, err);
    if (rc == 0 && renameat2(AT_FDCWD, o->tmp, AT_FDCWD, out, RENAME_NOREPLACE) < 0)
        rc = k3_fail(err, -errno, "rename %s to %s: %s", o->tmp, out, strerror(errno));
    if (rc < 0)
        remove_tmp(o);
    progress(o, true);
    return rc;
}

int k3_mk_write(const struct k3_mk_plan *p, const char *out, struct k3_err *err)
{
    struct out o = { .p = p };
    struct sigaction act = { .sa_handler = on_signal }, old_int, old_term;
    char parent[2048], base[2048], clean[2048];
    struct stat st;
    size_t n = strlen(out);
    int rc;

    if (n == 0 || n >= sizeof(clean) - 64)
        return k3_refuse(err, -EINVAL, "--out \"%.60s\" must be a directory name of 1 to %zu bytes", out,
                         sizeof(clean) - 65);
    strcpy(clean, out);
    while (n > 1 && clean[n - 1] == '/')
        clean[--n] = '\0';
    if (lstat(clean, &st) == 0)
        return k3_refuse(err, -EEXIST, "%s is there already; k3-mkmodel overwrites nothing", clean);
    strcpy(parent, clean);
    strcpy(base, clean);
    if ((rc = check_space(&o, dirname(parent), err)) < 0)
        return rc;
    strcpy(parent, clean);
    if (asprintf(&o.tmp, "%s/.%s.tmp-%d", dirname(parent), basename(base), (int)getpid()) < 0)
        return k3_fail(err, -ENOMEM, "no memory for a name");
    announce(&o, clean);
    clock_gettime(CLOCK_MONOTONIC, &o.began);
    o.last_said = o.began;
    interrupted = 0;
    sigaction(SIGINT, &act, &old_int);
    sigaction(SIGTERM, &act, &old_term);
    rc = write_dir(&o, clean, err);
    sigaction(SIGINT, &old_int, NULL);
    sigaction(SIGTERM, &old_term, NULL);
    free(o.tmp);
    return rc;
}
