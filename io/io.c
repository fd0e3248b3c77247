#include "io/io.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int k3_io_open(struct k3_io **out, const char *how, unsigned depth, int efd, char why[64], struct k3_err *err)
{
    int rc = -ENOSYS;

    if (why)
        why[0] = '\0';
    if (strcmp(how, "pread") != 0) {
        rc = k3_io_uring_open(out, depth, efd);
        if (rc < 0 && strcmp(how, "uring") == 0)
            return k3_refuse(err, rc, "--io uring: the kernel refuses io_uring: %s; try --io auto or pread",
                             strerror(-rc));
        if (rc < 0 && why)
            snprintf(why, 64, "%s", strerror(-rc));
    }
    if (rc < 0) {
        rc = k3_io_pread_open(out, depth, efd);
        if (rc < 0)
            return k3_fail(err, rc, "cannot start threads for pread: %s", strerror(-rc));
    }
    return 0;
}

uint64_t k3_io_register(struct k3_io *io, const struct k3_io_range *range, size_t n)
{
    return io->ops->registers ? io->ops->registers(io, range, n) : 0;
}

void k3_io_close(struct k3_io *io)
{
    if (io)
        io->ops->close(io);
}
