/* What the drive gives: direct reads of the trunk's bytes with nothing in between. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "model/schedule.h"
#include "tools/bench.h"

struct span {
    int fd;
    uint64_t first, end; /* in the file; whole blocks of A */
};
struct k3_bench_raw {
    const struct k3_model *m;
    struct k3_bench_raw_opts o;
    struct io_uring ring;
    bool ring_open;
    struct span *span;
    size_t n_spans, at_span;
    uint64_t at_bytes, to_bytes, huge_bytes; /* next place in the file, and in memory */
    struct k3_seg memory; /* a memfd: it has no name */
};

/* One span for each file that the schedule reads: from its first to its last byte of the trunk. */
static int open_spans(struct k3_bench_raw *r, struct k3_err *err)
{
    const struct k3_model *m = r->m;
    uint64_t a = k3_model_dio_align(m);
    char block[K3_SIZE_TEXT], all[K3_SIZE_TEXT];

    r->span = calloc(m->n_files ? m->n_files : 1, sizeof(*r->span));
    if (!r->span)
        return k3_fail(err, -ENOMEM, "no memory for %zu files", m->n_files);
    for (size_t f = 0; f < m->n_files; f++) {
        struct span s = { -1, UINT64_MAX, 0 };

        for (size_t i = 0; i < m->n_pieces; i++) {
            const struct k3_piece *p = &m->pieces[i];

            if (m->matrices[p->matrix].file != f)
                continue;
            s.first = p->off_bytes < s.first ? p->off_bytes : s.first;
            s.end = p->off_bytes + p->len_bytes > s.end ? p->off_bytes + p->len_bytes : s.end;
        }
        if (s.end == 0)
            continue;
        s.first -= s.first % a;
        s.end -= s.end % a; /* a read past the end of the file is not one of the drive */
        if (s.end < s.first + r->o.block_bytes)
            continue;
        s.fd = open(m->files[f].path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (s.fd < 0)
            return k3_refuse(err, -errno, "%s: %s; the raw rate needs direct reads", m->files[f].path, strerror(errno));
        r->span[r->n_spans++] = s;
    }
    if (r->n_spans == 0)
        return k3_refuse(err, -ENODATA, "one read of --io-block is %s, and no file has that much of the trunk's %s: too small to "
                         "measure a drive with; %smake a larger model: k3-mkmodel --released --layers 8 --experts 64 --out DIR",
                         k3_size_text(block, r->o.block_bytes), k3_size_text(all, m->trunk_bytes),
                         m->trunk_bytes < K3_CALIBRATE_MIN_BYTES ? "" : "give a smaller one, or ");
    r->at_bytes = r->span[0].first;
    return 0;
}

static int open_memory(struct k3_bench_raw *r, struct k3_err *err)
{
    uint64_t n = (uint64_t)r->o.depth * r->o.block_bytes;
    int rc;

    n = n > r->o.memory_bytes ? n : r->o.memory_bytes;
    n = (n + K3_HUGE_BYTES - 1) / K3_HUGE_BYTES * K3_HUGE_BYTES;
    rc = k3_seg_create_from(&r->memory, "bench", "raw", n, K3_MEM_MEMFD, -1, err);
    if (rc == 0)
        r->huge_bytes = k3_seg_collapse(r->memory.base, n);
    return rc;
}

int k3_bench_raw_open(struct k3_bench_raw **out, const struct k3_model *m, const struct k3_bench_raw_opts *o,
                      struct k3_err *err)
{
    struct k3_bench_raw *r = calloc(1, sizeof(*r));
    int rc;

    if (!r)
        return k3_fail(err, -ENOMEM, "no memory");
    r->m = m;
    r->o = *o;
    r->memory = (struct k3_seg)K3_SEG_INIT;
    rc = open_spans(r, err);
    if (rc == 0)
        rc = open_memory(r, err);
    if (rc == 0) {
        rc = io_uring_queue_init(o->depth, &r->ring, 0);
        r->ring_open = rc == 0;
        if (rc < 0)
            k3_refuse(err, rc, "io_uring is not to be had here (%s), so there is no raw rate to compare with",
                      strerror(-rc));
    }
    if (rc < 0)
        k3_bench_raw_close(r);
    else
        *out = r;
    return rc;
}

void k3_bench_raw_close(struct k3_bench_raw *r)
{
    if (!r)
        return;
    if (r->ring_open)
        io_uring_queue_exit(&r->ring);
    for (size_t i = 0; i < r->n_spans; i++)
        close(r->span[i].fd);
    k3_seg_close(&r->memory);
    free(r->span);
    free(r);
}

uint64_t k3_bench_raw_huge_bytes(const struct k3_bench_raw *r, uint64_t *of_bytes)
{
    *of_bytes = r->memory.len_bytes;
    return r->huge_bytes;
}

static void submit(struct k3_bench_raw *r)
{
    const struct span *s = &r->span[r->at_span];
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);

    if (!sqe)
        k3_bug("more than %u reads in flight", r->o.depth);
    if (r->at_bytes + r->o.block_bytes > s->end) {
        r->at_span = (r->at_span + 1) % r->n_spans;
        s = &r->span[r->at_span];
        r->at_bytes = s->first;
    }
    if (r->to_bytes + r->o.block_bytes > r->memory.len_bytes)
        r->to_bytes = 0;
    io_uring_prep_read(sqe, s->fd, r->memory.base + r->to_bytes, r->o.block_bytes, r->at_bytes);
    r->at_bytes += r->o.block_bytes;
    r->to_bytes += r->o.block_bytes;
}

int k3_bench_raw_run(struct k3_bench_raw *r, double seconds, double *bytes_per_s, struct k3_err *err)
{
    uint64_t t0 = k3_now_ns(), until_ns = t0 + (uint64_t)(seconds * 1e9), bytes = 0;
    uint32_t in_flight = 0;
    int rc = 0;

    for (; in_flight < r->o.depth; in_flight++)
        submit(r);
    while (in_flight > 0) {
        struct io_uring_cqe *cqe;
        unsigned head, n = 0;
        int got = io_uring_submit_and_wait(&r->ring, 1);

        if (got < 0 && got != -EINTR && got != -EAGAIN && got != -EBUSY)
            return k3_fail(err, got, "io_uring: %s", strerror(-got));
        io_uring_for_each_cqe (&r->ring, head, cqe) {
            n++;
            in_flight--;
            if (cqe->res < 0 && cqe->res != -EINTR && rc == 0)
                rc = k3_fail(err, cqe->res, "direct read of %u bytes: %s", r->o.block_bytes, strerror(-cqe->res));
            bytes += cqe->res > 0 ? (uint64_t)cqe->res : 0;
            if (rc == 0 && !k3_bench_stop && k3_now_ns() < until_ns) {
                submit(r);
                in_flight++;
            }
        }
        io_uring_cq_advance(&r->ring, n);
    }
    *bytes_per_s = (double)bytes / ((double)(k3_now_ns() - t0) / 1e9);
    if (rc == 0 && k3_bench_stop)
        rc = k3_fail(err, -ECANCELED, "stopped");
    return rc;
}
