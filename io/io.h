/* io/io.h: many reads in flight, two ways: io_uring, and threads of pread where io_uring is not to be had (measured to
 * tie, spec/io.md 2; the ring spares the threads).  One thread submits, waits and reaps.  A request belongs to the
 * queue from submit until it is handed back; its buffer must stay mapped that long. */
#ifndef K3_IO_IO_H
#define K3_IO_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

struct k3_io_req {
    int fd;
    uint32_t len_bytes;
    uint8_t *buf;
    uint64_t off_bytes;
    int32_t res; /* bytes read, or negative errno */
    uint64_t submit_ns; /* the owner's */
    struct k3_io_req *next;
};

struct k3_io_range {
    uint8_t *base;
    uint64_t len_bytes;
};

struct k3_io;
struct k3_io_ops {
    const char *name; /* "io_uring", "pread" */
    /* Queues; never fails.  At most `depth` requests are with the queue at a time. */
    void (*submit)(struct k3_io *io, struct k3_io_req *req);
    /* Hands over what is queued.  What the kernel does not take now stays for the next flush or wait. */
    void (*flush)(struct k3_io *io);
    /* Flushes, waits for at least one completion or timeout_ns, returns all that are there as a list in *done (NULL:
     * none).  Negative errno: the queue is broken. */
    int (*wait)(struct k3_io *io, uint64_t timeout_ns, struct k3_io_req **done);
    /* What has completed, without a wait and without a flush. */
    void (*reap)(struct k3_io *io, struct k3_io_req **done);
    /* As k3_io_register(); NULL: cannot. */
    uint64_t (*registers)(struct k3_io *io, const struct k3_io_range *range, size_t n);
    /* Frees io.  What is in flight may still land in its buffers (pread: waits for it); what no thread has begun is
     * not read any more. */
    void (*close)(struct k3_io *io);
};
struct k3_io {
    const struct k3_io_ops *ops;
    unsigned depth;
    unsigned n_threads; /* pread only */
};

/* how: "auto", "uring" or "pread".  efd: -1, or an eventfd that is written whenever a read has completed.  On success
 * *out is the caller's, to be released with k3_io_close().  why (may be NULL) gets the reason when auto had to fall
 * back to pread, else "".  Refused: "uring" where the kernel gives none. */
int k3_io_open(struct k3_io **out, const char *how, unsigned depth, int efd, char why[64], struct k3_err *err);
void k3_io_close(struct k3_io *io); /* NULL is fine */
/* Registers memory that reads land in, so that its pages need not be looked up for every read; what was registered
 * before is dropped.  The first ranges matter most.  Returns the bytes that are registered: 0 where there is no io_uring
 * or RLIMIT_MEMLOCK does not allow it, and reads go on as before.  The pages stay in memory, and reads go to them even
 * when the file behind the mapping has been punched: register after that (spec/io.md 7). */
uint64_t k3_io_register(struct k3_io *io, const struct k3_io_range *range, size_t n);

/* The two behind it.  Negative errno when the kernel refuses (ENOSYS, EPERM, ENOMEM). */
int k3_io_uring_open(struct k3_io **out, unsigned depth, int efd);
int k3_io_pread_open(struct k3_io **out, unsigned depth, int efd);

#endif
