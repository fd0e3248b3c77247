#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <time.h>

#include "ipc/err.h"
#include "io/io.h"

#define REG_BYTES ((uint64_t)1 << 30) /* the kernel's limit of one buffer */
#define REGS_MAX 16384u               /* and of their number */

struct uring_io {
    struct k3_io io;
    struct io_uring ring;
    struct iovec *reg; /* registered buffers */
    unsigned n_regs;
};

/* The registered buffer that holds all of it, or -1. */
static int reg_of(const struct uring_io *u, const uint8_t *buf, uint64_t len_bytes)
{
    for (unsigned i = 0; i < u->n_regs; i++) {
        const uint8_t *base = u->reg[i].iov_base;

        if (buf >= base && buf < base + u->reg[i].iov_len)
            return (uint64_t)(base + u->reg[i].iov_len - buf) >= len_bytes ? (int)i : -1;
    }
    return -1;
}

static void uring_submit(struct k3_io *io, struct k3_io_req *req)
{
    struct uring_io *u = (struct uring_io *)io;
    /* Every request with the backend has at most one entry, and there are as many entries as
     * requests. */
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    int reg = reg_of(u, req->buf, req->len_bytes);

    if (!sqe)
        k3_bug("more than %u reads submitted", io->depth);
    if (reg >= 0)
        io_uring_prep_read_fixed(sqe, req->fd, req->buf, req->len_bytes, req->off_bytes, reg);
    else
        io_uring_prep_read(sqe, req->fd, req->buf, req->len_bytes, req->off_bytes);
    io_uring_sqe_set_data(sqe, req);
}

static void uring_flush(struct k3_io *io)
{
    struct uring_io *u = (struct uring_io *)io;

    if (io_uring_sq_ready(&u->ring))
        (void)io_uring_submit(&u->ring);
}

/* Everything that has completed, as a list; returns how many entries that were. */
static unsigned take_done(struct uring_io *u, struct k3_io_req **done)
{
    struct k3_io_req **tail = done;
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;

    *done = NULL;
    io_uring_for_each_cqe (&u->ring, head, cqe) {
        struct k3_io_req *req = io_uring_cqe_get_data(cqe);

        if (req) { /* NULL: the timeout entry of kernels without IORING_FEAT_EXT_ARG */
            req->res = cqe->res;
            req->next = NULL;
            *tail = req;
            tail = &req->next;
        }
        n++;
    }
    io_uring_cq_advance(&u->ring, n);
    return n;
}

static void uring_reap(struct k3_io *io, struct k3_io_req **done)
{
    (void)take_done((struct uring_io *)io, done);
}

static int uring_wait(struct k3_io *io, uint64_t timeout_ns, struct k3_io_req **done)
{
    struct uring_io *u = (struct uring_io *)io;
    struct __kernel_timespec ts = { (int64_t)(timeout_ns / 1000000000u),
                                    (long long)(timeout_ns % 1000000000u) };
    struct io_uring_cqe *cqe;
    unsigned n;
    int rc;

    rc = io_uring_submit_and_wait_timeout(&u->ring, &cqe, 1, &ts, NULL);
    n = take_done(u, done);
    if (rc >= 0 || n > 0 || rc == -ETIME || rc == -EINTR)
        return 0;
    if (rc == -EAGAIN || rc == -EBUSY) { /* the kernel is short of memory: entries stay queued */
        nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
        return 0;
    }
    return rc;
}

/* All of the ranges, in buffers of at most 1 GiB. */
static uint64_t register_all(struct uring_io *u, const struct k3_io_range *range, size_t n)
{
    uint64_t bytes = 0;
    unsigned n_regs = 0;

    for (size_t i = 0; i < n; i++)
        n_regs += (unsigned)((range[i].len_bytes + REG_BYTES - 1) / REG_BYTES);
    if (n_regs == 0 || n_regs > REGS_MAX || !(u->reg = calloc(n_regs, sizeof(*u->reg))))
        return 0;
    for (size_t i = 0; i < n; i++)
        for (uint64_t at = 0; at < range[i].len_bytes; at += REG_BYTES) {
            uint64_t left = range[i].len_bytes - at;

            u->reg[u->n_regs++] =
                (struct iovec){ range[i].base + at, left < REG_BYTES ? left : REG_BYTES };
            bytes += left < REG_BYTES ? left : REG_BYTES;
        }
    if (io_uring_register_buffers(&u->ring, u->reg, u->n_regs) == 0)
        return bytes;
    free(u->reg);
    u->reg = NULL;
    u->n_regs = 0;
    return 0;
}

static uint64_t uring_register(struct k3_io *io, const struct k3_io_range *range, size_t n)
{
    struct uring_io *u = (struct uring_io *)io;
    uint64_t bytes = 0;

    /* An entry that was prepared for a buffer must reach the kernel while there is that buffer. */
    if (u->n_regs) {
        uring_flush(io);
        (void)io_uring_unregister_buffers(&u->ring);
    }
    free(u->reg);
    u->reg = NULL;
    u->n_regs = 0;
    for (; n > 0 && bytes == 0; n--)
        bytes = register_all(u, range, n);
    return bytes;
}

static void uring_close(struct k3_io *io)
{
    struct uring_io *u = (struct uring_io *)io;

    io_uring_queue_exit(&u->ring);
    free(u->reg);
    free(u);
}

static const struct k3_io_ops uring_ops = { "io_uring", uring_submit, uring_flush, uring_wait, uring_reap,
                                            uring_register, uring_close };

int k3_io_uring_open(struct k3_io **out, unsigned depth, int efd)
{
    struct uring_io *u = calloc(1, sizeof(*u));
    struct io_uring_probe *probe;
    int rc;

    if (!u)
        return -ENOMEM;
    rc = io_uring_queue_init(2 * depth, &u->ring, 0); /* room for timeout entries of old kernels */
    if (rc < 0) {
        free(u);
        return rc;
    }
    probe = io_uring_get_probe_ring(&u->ring);
    rc = probe && io_uring_opcode_supported(probe, IORING_OP_READ) ? 0 : -EOPNOTSUPP;
    io_uring_free_probe(probe);
    if (rc == 0 && efd >= 0)
        rc = io_uring_register_eventfd(&u->ring, efd);
    if (rc < 0) {
        uring_close(&u->io);
        return rc;
    }
    u->io.ops = &uring_ops;
    u->io.depth = depth;
    *out = &u->io;
    return 0;
}
