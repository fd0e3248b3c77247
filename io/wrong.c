/* Which copy of a file it is whose bytes are wrong. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "io/files.h"
#include "model/crc32c.h"

#define BUF_BYTES (1u << 20)

/* By its own descriptor: the file's may be direct, and these ranges begin anywhere. */
static bool is_right(const char *path, const uint64_t *off_bytes, const uint64_t *len_bytes, uint32_t n, uint32_t want,
                     uint8_t *buf)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint32_t crc = 0;
    bool all = fd >= 0;

    for (uint32_t i = 0; i < n && all; i++)
        for (uint64_t at = 0; at < len_bytes[i] && all;) {
            size_t most = len_bytes[i] - at < BUF_BYTES ? (size_t)(len_bytes[i] - at) : BUF_BYTES;
            ssize_t got = pread(fd, buf, most, (off_t)(off_bytes[i] + at));

            if (got < 0 && errno == EINTR)
                continue;
            all = got > 0;
            if (all) {
                crc = k3_crc32c(crc, buf, (size_t)got);
                at += (uint64_t)got;
            }
        }
    if (fd >= 0) {
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    return all && crc == want;
}

uint32_t k3_io_wrong_copies(struct k3_io_files *fs, size_t file, const uint64_t *off_bytes, const uint64_t *len_bytes,
                            uint32_t n, uint32_t crc, uint64_t now_ns)
{
    struct k3_io_file *f = &fs->file[file];
    uint8_t *buf = f->n_copies > 1 ? malloc(BUF_BYTES) : NULL;
    uint32_t wrong = 0;

    for (uint32_t c = 0; buf && c < f->n_copies; c++)
        if (!is_right(f->copy[c].path, off_bytes, len_bytes, n, crc, buf)) {
            wrong |= 1u << c;
            (void)k3_io_set_bad(fs, file, c, now_ns);
        }
    free(buf);
    return wrong;
}
