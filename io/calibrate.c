#include "io/calibrate.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"
#include "ipc/daemon.h"
#include "ipc/parse.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define PAGE 4096u
#define HUGE_BYTES (2u << 20)
#define IN_FLIGHT_MAX (64u << 20)
#define EXTENT_MIN (4u << 20)
#define FILES_MAX 64
#define DEPTH_MAX 64
#define CELL_NS 15000000ull
#define WAIT_NS 100000000ull
#define STUCK_NS 10000000000ull /* a read that takes longer will not come */

struct extent {
    int fd;
    uint64_t off_bytes, len_bytes;
};
struct bench {
    int fd[FILES_MAX];
    size_t n_fds;
    struct extent *extent;
    size_t n_extents, at;
    uint64_t at_bytes, total_bytes;
    uint8_t *buf;
    struct k3_io *io;
    struct k3_io_req req[DEPTH_MAX];
    struct k3_io_req *idle;
    unsigned n_out;
    uint64_t until_ns;
};

/* ---- what to read ---- */

static int add_extent(struct bench *b, int fd, uint64_t from, uint64_t to)
{
    struct extent *more;

    from = (from + PAGE - 1) / PAGE * PAGE;
    to = to / PAGE * PAGE;
    if (to < from + EXTENT_MIN)
        return 0;
    more = reallocarray(b->extent, b->n_extents + 1, sizeof(*more));
    if (!more)
        return -ENOMEM;
    b->extent = more;
    b->extent[b->n_extents++] = (struct extent){ fd, from, to - from };
    b->total_bytes += to - from;
    return 0;
}

/* The parts of a file that are no holes: a hole reads faster than any drive (spec/io.md 8). */
static int add_extents(struct bench *b, int fd, uint64_t len_bytes)
{
    uint64_t at = 0;
    int rc = 0;

    while (at < len_bytes && rc == 0 && b->n_extents < 10000) {
        off_t from = lseek(fd, (off_t)at, SEEK_DATA), to;

        if (from < 0)
            return errno == ENXIO ? 0 : -errno;
        to = lseek(fd, from, SEEK_HOLE);
        if (to < 0 || (uint64_t)to > len_bytes)
            to = (off_t)len_bytes;
        if (to <= from)
            break;
        rc = add_extent(b, fd, (uint64_t)from, (uint64_t)to);
        at = (uint64_t)to;
    }
    return rc;
}

static int open_files(struct bench *b, const char *const *files, size_t n, struct k3_err *err)
{
    char has[K3_SIZE_TEXT], needs[K3_SIZE_TEXT];
    struct k3_device dev;
    int rc = k3_device_of(files[0], NULL, &dev, err);

    if (rc == 0 && dev.memory)
        rc = k3_fail(err, -EOPNOTSUPP, "%s lies in memory", files[0]);
    for (size_t i = 0; i < n && i < FILES_MAX && rc == 0; i++) {
        int fd = open(files[i], O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK);
        struct stat st;

        if (fd < 0)
            return k3_fail(err, errno == EINVAL ? -EOPNOTSUPP : -errno, "open %s for direct reads: %s", files[i],
                           strerror(errno));
        b->fd[b->n_fds++] = fd;
        if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
            return k3_fail(err, -EINVAL, "%s is not a regular file", files[i]);
        rc = add_extents(b, fd, (uint64_t)st.st_size);
        if (rc < 0)
            k3_fail(err, rc, "%s: looking for its holes: %s", files[i], strerror(-rc));
    }
    if (rc == 0 && b->total_bytes < K3_CALIBRATE_MIN_BYTES)
        rc = k3_fail(err, -ENODATA, "too little data to measure with: %s in pieces of at least 4 MiB without holes, and %s "
                     "are needed (the files are small, or sparse)", k3_size_text(has, b->total_bytes),
                     k3_size_text(needs, K3_CALIBRATE_MIN_BYTES));
    return rc;
}

/* Physically contiguous where the kernel can (spec/io.md 1). */
static int open_buffer(struct bench *b, struct k3_err *err)
{
    uint8_t *p = mmap(NULL, IN_FLIGHT_MAX + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *first;

    if (p == MAP_FAILED)
        return k3_fail(err, -ENOMEM, "no memory to measure a drive with");
    first = (uint8_t *)(((uintptr_t)p + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES);
    if (first > p)
        munmap(p, (size_t)(first - p));
    munmap(first + IN_FLIGHT_MAX, (size_t)(p + HUGE_BYTES - first));
    b->buf = first;
    (void)madvise(first, IN_FLIGHT_MAX, MADV_HUGEPAGE);
    for (size_t i = 0; i < IN_FLIGHT_MAX; i += PAGE)
        first[i] = 1;
    (void)madvise(first, IN_FLIGHT_MAX, MADV_COLLAPSE);
    return 0;
}

static void bench_close(struct bench *b)
{
    if (b->n_out > 0)
        return; /* the kernel still writes into buf: all stays */
    k3_io_close(b->io);
    if (b->buf)
        munmap(b->buf, IN_FLIGHT_MAX);
    for (size_t i = 0; i < b->n_fds; i++)
        close(b->fd[i]);
    free(b->extent);
    free(b);
}

/* ---- one cell ---- */

static void send_next(struct bench *b, uint32_t block_bytes)
{
    struct k3_io_req *q = b->idle;
    struct extent *e = &b->extent[b->at];

    if (b->at_bytes + block_bytes > e->len_bytes) {
        b->at = (b->at + 1) % b->n_extents;
        b->at_bytes = 0;
        e = &b->extent[b->at]; /* each has at least the largest block */
    }
    b->idle = q->next;
    q->fd = e->fd;
    q->off_bytes = e->off_bytes + b->at_bytes;
    q->len_bytes = block_bytes;
    q->buf = b->buf + (size_t)(q - b->req) * block_bytes;
    b->at_bytes += block_bytes;
    b->n_out++;
    b->io->ops->submit(b->io, q);
}

/* Waits once; adds what came to *bytes.  The number of reads that came back, or negative errno. */
static int take(struct bench *b, uint64_t *bytes)
{
    struct k3_io_req *done, *next;
    int n = 0, rc = b->io->ops->wait(b->io, WAIT_NS, &done);

    for (; done; done = next) {
        next = done->next;
        if (done->res < 0 && done->res != -EINTR && done->res != -EAGAIN)
            rc = done->res;
        *bytes += done->res > 0 ? (uint64_t)done->res : 0;
        done->next = b->idle;
        b->idle = done;
        b->n_out--;
        n++;
    }
    return rc < 0 ? rc : n;
}

/* Reads with that many in flight: until the queue has been through once, then for CELL_NS, in which it counts. */
static int measure(struct bench *b, struct k3_io_cell *cell)
{
    uint64_t from_ns = 0, last_ns = k3_now_ns(), bytes = 0, drained = 0;
    unsigned n_back = 0, n_counted = 0;
    int rc = 0;

    b->idle = NULL;
    for (unsigned i = cell->depth; i-- > 0;) {
        b->req[i].next = b->idle;
        b->idle = &b->req[i];
    }
    while (rc >= 0) {
        while (b->idle)
            send_next(b, cell->block_bytes);
        rc = take(b, &bytes);
        if (rc <= 0) {
            if (rc == 0 && k3_now_ns() - last_ns > STUCK_NS)
                rc = -ETIMEDOUT;
            continue;
        }
        last_ns = k3_now_ns();
        n_back += (unsigned)rc;
        if (n_back <= cell->depth) {
            from_ns = last_ns;
            bytes = 0;
            continue;
        }
        n_counted += (unsigned)rc;
        if ((last_ns - from_ns >= CELL_NS && n_counted >= cell->depth) || last_ns >= b->until_ns)
            break;
    }
    if (rc >= 0 && last_ns > from_ns && n_counted >= cell->depth) {
        double rate = (double)bytes * 1e9 / (double)(last_ns - from_ns);

        if (rate > cell->bytes_per_s)
            cell->bytes_per_s = rate;
    }
    while (b->n_out > 0 && k3_now_ns() - last_ns < STUCK_NS) {
        unsigned n_out = b->n_out;

        if (take(b, &drained) < 0 && b->n_out == n_out)
            break;
    }
    return rc < 0 ? rc : b->n_out ? -ETIMEDOUT : 0;
}

/* ---- the grid ---- */

/* More in flight does not slow a drive down: what looks like it is noise. */
static double rate_up_to(const struct k3_io_cell *cell, size_t n, double bytes)
{
    double most = 0;

    for (size_t i = 0; i < n; i++)
        if ((double)cell[i].depth * cell[i].block_bytes <= bytes && cell[i].bytes_per_s > most)
            most = cell[i].bytes_per_s;
    return most;
}

bool k3_io_rate_choose(const struct k3_io_cell *cell, size_t n, struct k3_io_rate *out)
{
    double best = rate_up_to(cell, n, HUGE_VAL), least_bytes = best * (double)K3_CALIBRATE_LATE_NS / 1e9, picked = 0;
    const struct k3_io_cell *pick = NULL;

    for (size_t i = 0; i < n; i++) {
        double bytes = (double)cell[i].depth * cell[i].block_bytes;
        bool enough = bytes >= least_bytes;

        if (cell[i].bytes_per_s <= 0 || rate_up_to(cell, n, bytes) < 0.97 * best)
            continue;
        /* Enough in flight before too little; then the least that is enough, or the most that is too little; and of
         * equals the one with fewer reads. */
        if (!pick || (enough && picked < least_bytes) ||
            (enough == (picked >= least_bytes) && (enough ? bytes < picked : bytes > picked)) ||
            (bytes == picked && cell[i].block_bytes > pick->block_bytes)) {
            pick = &cell[i];
            picked = bytes;
        }
    }
    if (!pick)
        return false;
    *out = (struct k3_io_rate){ .depth = pick->depth, .block_bytes = pick->block_bytes,
                                .bytes_per_s = rate_up_to(cell, n, picked) };
    for (size_t i = 0; i < n; i++)
        if (cell[i].depth == 1 && cell[i].block_bytes == pick->block_bytes)
            out->bytes_per_s_depth1 = cell[i].bytes_per_s;
    return true;
}

bool k3_io_rate_enough(const struct k3_io_cell *cell, size_t n)
{
    double best = rate_up_to(cell, n, HUGE_VAL), most_bytes = 0;

    for (size_t i = 0; i < n; i++) {
        double bytes = (double)cell[i].depth * cell[i].block_bytes;

        if (cell[i].bytes_per_s > 0 && bytes > most_bytes)
            most_bytes = bytes;
    }
    return most_bytes >= 16 << 20 || (best > 0 && most_bytes >= 4 * best * (double)K3_CALIBRATE_LATE_NS / 1e9);
}

static int measure_grid(struct bench *b, struct k3_io_rate *out, struct k3_err *err)
{
    static const uint32_t blocks[] = { 1u << 20, 4u << 20 };
    struct k3_io_cell cell[2 * 7];
    double rate = 0;
    size_t n = 0;
    int rc = 0;

    for (uint32_t bytes = blocks[0]; bytes <= IN_FLIGHT_MAX; bytes *= 2) /* what a slow drive can be asked comes first */
        for (size_t k = 0; k < 2; k++)
            if (bytes >= blocks[k])
                cell[n++] = (struct k3_io_cell){ bytes / blocks[k], blocks[k], 0 };
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < n && rc == 0; i++) {
            /* Through once, once more, and empty again. */
            double cost_ns = rate > 0 ? 3e9 * cell[i].depth * cell[i].block_bytes / rate : 0;

            if (k3_now_ns() + (uint64_t)cost_ns > b->until_ns)
                break;
            rc = measure(b, &cell[i]);
            rate = cell[i].bytes_per_s > rate ? cell[i].bytes_per_s : rate;
        }
    if (rc < 0)
        return k3_fail(err, rc == -EINVAL ? -EOPNOTSUPP : rc, "measuring the drive: %s", strerror(-rc));
    if (!k3_io_rate_enough(cell, n))
        return k3_fail(err, -ETIME, "the machine or the drive is too busy to be measured in %llu ms",
                       (unsigned long long)(K3_CALIBRATE_NS / 1000000));
    (void)k3_io_rate_choose(cell, n, out);
    return 0;
}

int k3_calibrate(const char *const *files, size_t n, uint64_t max_ns, struct k3_io_rate *out,
                 struct k3_err *err)
{
    struct bench *b = calloc(1, sizeof(*b));
    int rc;

    *out = (struct k3_io_rate){ .depth = K3_IO_DEPTH_DEFAULT, .block_bytes = K3_IO_BLOCK_DEFAULT };
    if (!b)
        return k3_fail(err, -ENOMEM, "no memory to measure a drive with");
    b->until_ns = k3_now_ns() + max_ns;
    rc = n ? open_files(b, files, n, err) : k3_fail(err, -ENODATA, "no file to measure a drive with");
    if (rc == 0)
        rc = open_buffer(b, err);
    if (rc == 0)
        rc = k3_io_open(&b->io, "auto", DEPTH_MAX, -1, NULL, err);
    if (rc == 0) /* not always the same bytes: a drive has a cache, too */
        b->at = (size_t)(k3_now_ns() / 1000 % b->n_extents);
    if (rc == 0)
        rc = measure_grid(b, out, err);
    bench_close(b);
    return rc;
}
