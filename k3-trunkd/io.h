/* k3-trunkd/io.h: asynchronous reads, two ways: io_uring, and a few threads of pread where io_uring
 * is not to be had. One thread submits and waits.  A request belongs to the backend from submit
 * until wait returns it. */
#ifndef K3_TRUNKD_IO_H
#define K3_TRUNKD_IO_H

#include <stdint.h>

struct k3_tio_req {
    int fd;
    uint32_t len_bytes;
    uint8_t *buf;
    uint64_t off_bytes;
    int32_t res; /* bytes read, or negative errno */
    uint64_t submit_ns;
    struct k3_tio_req *next;
};

struct k3_tio;
struct k3_tio_ops {
    const char *name; /* "io_uring", "pread" */
    /* Queues; never fails.  At most `depth` requests are with the backend at a time. */
    void (*submit)(struct k3_tio *io, struct k3_tio_req *req);
    /* Hands over what is queued, waits for at least one completion or timeout_ns, returns all that
     * are there as a list in *done (NULL: none).  Negative errno: the backend is broken. */
    int (*wait)(struct k3_tio *io, uint64_t timeout_ns, struct k3_tio_req **done);
    /* Frees io.  What is in flight may still land in its buffers (pread: waits for it). */
    void (*close)(struct k3_tio *io);
};
struct k3_tio {
    const struct k3_tio_ops *ops;
    unsigned depth;
};

/* Negative errno when the kernel refuses (ENOSYS, EPERM, ENOMEM). */
int k3_tio_uring_open(struct k3_tio **out, unsigned depth);
int k3_tio_pread_open(struct k3_tio **out, unsigned depth);

#endif
