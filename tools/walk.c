/* Several threads, each with one item: direct reads into its own buffer, the sum, the caller's function.  Results leave
 * in order, so no thread begins an item that is more than a window ahead. */
#include "tools/walk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "model/crc32c.h"
#include "model/schedule.h"

#define READ_BYTES (8u << 20) /* of one read at most */
#define TICK_MS 200

struct file {
    int fd;
    _Atomic bool direct;
};
struct slot {
    struct k3_walk_result r;
    uint64_t len_bytes;
    bool there, skipped;
};
struct state {
    const struct k3_walk *w;
    struct file *files;
    uint32_t align_bytes;
    uint64_t buf_bytes;
    struct slot *slot;
    size_t n_slots;
    pthread_mutex_t lock;
    pthread_cond_t news, room;
    size_t next, delivered;
    bool quit;
};

/* ---- files ---- */

static int open_files(struct state *s, struct k3_err *err)
{
    const struct k3_model *m = s->w->m;

    s->files = calloc(m->n_files ? m->n_files : 1, sizeof(*s->files));
    if (!s->files)
        return k3_fail(err, -ENOMEM, "no memory for %zu files", m->n_files);
    for (size_t i = 0; i < m->n_files; i++)
        s->files[i].fd = -1;
    for (size_t i = 0; i < m->n_files; i++) {
        int fd = open(m->files[i].path, O_RDONLY | O_CLOEXEC | O_DIRECT);

        atomic_init(&s->files[i].direct, fd >= 0);
        if (fd < 0)
            fd = open(m->files[i].path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return k3_refuse(err, -errno, "%s: %s", m->files[i].path, strerror(errno));
        s->files[i].fd = fd;
    }
    return 0;
}

static void close_files(struct state *s)
{
    for (size_t i = 0; s->files && i < s->w->m->n_files; i++)
        if (s->files[i].fd >= 0)
            close(s->files[i].fd);
    free(s->files);
}

/* ---- one item ---- */

/* Whole pages around [off, off + len) to buf, which has room for them; *out is where the bytes are. */
static int read_range(struct state *s, uint16_t file, uint64_t off_bytes, uint64_t len_bytes, uint8_t *buf,
                      const uint8_t **out)
{
    struct file *f = &s->files[file];
    uint64_t a = s->align_bytes, first = off_bytes - off_bytes % a, need = off_bytes - first + len_bytes;
    uint64_t span = (need + a - 1) / a * a, got = 0;

    while (got < need) {
        uint64_t from = got - got % a, want = span - from < READ_BYTES ? span - from : READ_BYTES;
        ssize_t n = pread(f->fd, buf + from, want, (off_t)(first + from));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EINVAL && atomic_exchange(&f->direct, false)) {
            int flags = fcntl(f->fd, F_GETFL);

            if (flags >= 0)
                (void)fcntl(f->fd, F_SETFL, flags & ~O_DIRECT);
            continue;
        }
        if (n < 0)
            return -errno;
        if (from + (uint64_t)n <= got)
            return -ENODATA;
        if (!atomic_load_explicit(&f->direct, memory_order_relaxed))
            (void)posix_fadvise(f->fd, (off_t)(first + from), n, POSIX_FADV_DONTNEED);
        got = from + (uint64_t)n;
    }
    *out = buf + (off_bytes - first);
    return 0;
}

/* Parts that touch in the file are read as one; the bytes of all end up one behind the other. */
static int read_item(struct state *s, const struct k3_sum_item *item, uint8_t *buf, const uint8_t **bytes,
                     struct k3_walk_result *r)
{
    uint8_t *end = buf; /* of what is there */

    for (uint32_t k = 0; k < item->n_parts;) {
        const struct k3_sum_part *p = &item->part[k];
        uint64_t len_bytes = p->len_bytes, used = (uint64_t)(end - buf);
        const uint8_t *at = NULL;
        int rc;

        for (k++; k < item->n_parts && item->part[k].file == p->file &&
                  item->part[k].off_bytes == p->off_bytes + len_bytes; k++)
            len_bytes += item->part[k].len_bytes;
        rc = read_range(s, p->file, p->off_bytes, len_bytes,
                        buf + (used + s->align_bytes - 1) / s->align_bytes * s->align_bytes, &at);
        if (rc < 0) {
            r->file = p->file;
            r->off_bytes = p->off_bytes;
            return rc;
        }
        if (used == 0) {
            *bytes = at;
            end = buf + (at - buf) + len_bytes;
        } else {
            memmove(end, at, len_bytes);
            end += len_bytes;
        }
    }
    return 0;
}

static void one_item(struct state *s, size_t i, uint8_t *buf, struct slot *out)
{
    struct k3_sum_item item;
    const uint8_t *bytes = buf;

    *out = (struct slot){ .r = { .item = i } };
    out->r.status = k3_sums_item(s->w->m, i, &item);
    out->len_bytes = item.len_bytes;
    if (out->r.status == 0)
        out->r.status = read_item(s, &item, buf, &bytes, &out->r);
    if (out->r.status < 0)
        return;
    out->r.crc = k3_crc32c(0, bytes, item.len_bytes);
    out->r.file = item.part[0].file;
    out->r.off_bytes = item.part[0].off_bytes;
    if (s->w->bytes)
        out->r.status = s->w->bytes(s->w->arg, &item, i, bytes, out->r.crc);
}

/* ---- threads ---- */

static void *reader(void *arg)
{
    struct state *s = arg;
    uint8_t *buf = mmap(NULL, s->buf_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (buf != MAP_FAILED)
        (void)madvise(buf, s->buf_bytes, MADV_HUGEPAGE); /* contiguous where it can be had (spec/io.md 1) */
    pthread_mutex_lock(&s->lock);
    while (!s->quit && s->next < s->w->end) {
        size_t i = s->next;
        struct slot *slot = &s->slot[i % s->n_slots], result;

        if (i >= s->delivered + s->n_slots) {
            pthread_cond_wait(&s->room, &s->lock);
            continue;
        }
        s->next++;
        pthread_mutex_unlock(&s->lock);
        if (s->w->skip && s->w->skip[i])
            result = (struct slot){ .skipped = true };
        else if (buf == MAP_FAILED)
            result = (struct slot){ .r = { .item = i, .status = -ENOMEM } };
        else
            one_item(s, i, buf, &result);
        pthread_mutex_lock(&s->lock);
        *slot = result;
        slot->there = true;
        pthread_cond_signal(&s->news);
    }
    pthread_mutex_unlock(&s->lock);
    if (buf != MAP_FAILED)
        munmap(buf, s->buf_bytes);
    return NULL;
}

static int deliver(struct state *s, struct k3_err *err)
{
    const struct k3_walk *w = s->w;
    uint64_t done_bytes = 0;
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    while (rc == 0 && s->delivered < w->end) {
        struct slot *slot = &s->slot[s->delivered % s->n_slots];

        if (slot->there) {
            struct slot result = *slot;

            slot->there = false;
            s->delivered++;
            pthread_cond_broadcast(&s->room);
            pthread_mutex_unlock(&s->lock);
            rc = result.skipped ? 0 : w->result(w->arg, &result.r, err);
            done_bytes += result.len_bytes;
        } else {
            struct timespec until;

            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_nsec += TICK_MS * 1000000;
            until.tv_sec += until.tv_nsec / 1000000000;
            until.tv_nsec %= 1000000000;
            pthread_cond_timedwait(&s->news, &s->lock, &until);
            pthread_mutex_unlock(&s->lock);
        }
        if (rc == 0 && w->tick)
            rc = w->tick(w->arg, done_bytes, err);
        pthread_mutex_lock(&s->lock);
    }
    s->quit = true;
    pthread_cond_broadcast(&s->room);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static uint64_t largest_item(const struct k3_walk *w)
{
    uint64_t largest = w->m->expert_bytes > K3_SUMS_EMBED_BYTES ? w->m->expert_bytes : K3_SUMS_EMBED_BYTES;

    for (size_t i = 0; i < w->m->n_residents; i++) {
        uint64_t n = (uint64_t)w->m->residents[i].n * k3_dtype_bytes(w->m->residents[i].dtype);

        largest = n > largest ? n : largest;
    }
    return largest > K3_PIECE_BYTES ? largest : K3_PIECE_BYTES;
}

int k3_walk(const struct k3_walk *w, struct k3_err *err)
{
    struct state s = { .w = w, .n_slots = 4 * (size_t)w->n_threads, .next = w->first, .delivered = w->first,
                       .align_bytes = k3_model_dio_align(w->m), .lock = PTHREAD_MUTEX_INITIALIZER,
                       .news = PTHREAD_COND_INITIALIZER, .room = PTHREAD_COND_INITIALIZER };
    pthread_t *threads = calloc(w->n_threads, sizeof(*threads));
    unsigned n = 0;
    int rc = open_files(&s, err);

    /* All bytes together, then the part that is read last with its page slack, and the same for rounding. */
    s.buf_bytes = (largest_item(w) + 4 * (uint64_t)s.align_bytes + K3_HUGE_BYTES) / K3_HUGE_BYTES * K3_HUGE_BYTES;
    s.slot = calloc(s.n_slots, sizeof(*s.slot));
    if (rc == 0 && (!threads || !s.slot))
        rc = k3_fail(err, -ENOMEM, "no memory for %u reading threads", w->n_threads);
    for (; rc == 0 && n < w->n_threads; n++) {
        int e = pthread_create(&threads[n], NULL, reader, &s);

        if (e && n == 0)
            rc = k3_fail(err, -e, "cannot start a thread: %s", strerror(e));
        if (e)
            break;
    }
    if (rc == 0)
        rc = deliver(&s, err);
    while (n > 0)
        pthread_join(threads[--n], NULL);
    close_files(&s);
    free(threads);
    free(s.slot);
    return rc;
}

int k3_sync_dir(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = fd < 0 || fsync(fd) != 0 ? -errno : 0;

    if (fd >= 0)
        close(fd);
    return rc;
}

/* ---- progress ---- */

#define QUIET_NS 2000000000ull
#define TERMINAL_NS 500000000ull
#define LINE_NS 10000000000ull

void k3_progress_begin(struct k3_progress *p, const char *program, const char *what, uint64_t total_bytes,
                       uint64_t skipped_bytes)
{
    *p = (struct k3_progress){ .program = program, .what = what, .total_bytes = total_bytes,
                               .skipped_bytes = skipped_bytes, .began_ns = k3_now_ns() };
}

void k3_progress_tick(struct k3_progress *p, uint64_t done_bytes)
{
    bool terminal = isatty(STDERR_FILENO) == 1;
    uint64_t now = k3_now_ns(), all = p->skipped_bytes + done_bytes;
    double rate = (double)done_bytes / ((double)(now - p->began_ns) * 1e-9);

    if (now - p->began_ns < QUIET_NS || (p->shown && now - p->shown_ns < (terminal ? TERMINAL_NS : LINE_NS)))
        return;
    p->shown = true;
    p->shown_ns = now;
    fprintf(stderr, "%s%s: %s %.1f of %.1f GB, %.2f GB/s, %.0f s left%s", terminal ? "\r\033[K" : "", p->program, p->what,
            (double)all * 1e-9, (double)p->total_bytes * 1e-9, rate * 1e-9,
            rate > 0 && p->total_bytes > all ? (double)(p->total_bytes - all) / rate : 0.0, terminal ? "" : "\n");
}

void k3_progress_end(struct k3_progress *p)
{
    if (p->shown && isatty(STDERR_FILENO) == 1)
        fputs("\r\033[K", stderr);
    p->shown = false;
}
