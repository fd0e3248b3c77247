#include "text/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int k3_file_read_fd(struct k3_buf *out, int fd, const char *name, size_t max_bytes, struct k3_err *err)
{
    char block[65536];
    size_t total = 0;
    ssize_t n;

    while ((n = read(fd, block, sizeof(block))) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return k3_fail(err, -errno, "%s: %s", name, strerror(errno));
        total += (size_t)n;
        if (total > max_bytes)
            return k3_refuse(err, -EFBIG, "%s: more than %zu bytes", name, max_bytes);
        if (k3_buf_append(out, block, (size_t)n) < 0)
            return k3_fail(err, -ENOMEM, "%s: no memory after %zu bytes", name, total);
    }
    return 0;
}

int k3_file_read(struct k3_buf *out, const char *path, size_t max_bytes, struct k3_err *err)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), rc; /* a FIFO would wait for its writer */
    struct stat st;

    if (fd < 0)
        return k3_refuse(err, -errno, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        rc = k3_refuse(err, -EINVAL, "%s: not a file", path);
    else
        rc = k3_file_read_fd(out, fd, path, max_bytes, err);
    close(fd);
    return rc;
}
