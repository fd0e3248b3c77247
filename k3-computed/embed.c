/* k3-computed/embed.c: embedding rows, the one thing that computed reads from a weight file by itself (14 KB a token). */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-computed/ops.h"
#include "k3-computed/shm_source.h"

struct k3_embed {
    const struct k3_model *m;
    int fd;
    size_t row_bytes;
    uint8_t *row;
};

int k3_embed_open(struct k3_embed **out, const struct k3_model *m, struct k3_err *err)
{
    const char *path = m->files[m->embed_file].path;
    struct k3_embed *e = calloc(1, sizeof(*e));
    int rc = 0;

    if (!e)
        return k3_fail(err, -ENOMEM, "no memory for embedding rows");
    e->m = m;
    e->row_bytes = m->cfg.hidden * k3_dtype_bytes(m->embed_dtype);
    e->row = malloc(e->row_bytes);
    e->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (e->fd < 0)
        rc = k3_fail(err, -errno, "open %s for embedding rows: %s", path, strerror(errno));
    else if (!e->row)
        rc = k3_fail(err, -ENOMEM, "no memory for an embedding row of %zu bytes", e->row_bytes);
    if (rc < 0) {
        k3_embed_close(e);
        return rc;
    }
    (void)posix_fadvise(e->fd, 0, 0, POSIX_FADV_RANDOM); /* no read-ahead; only a hint */
    *out = e;
    return 0;
}

void k3_embed_close(struct k3_embed *e)
{
    if (!e)
        return;
    if (e->fd >= 0)
        close(e->fd);
    free(e->row);
    free(e);
}

int k3_embed_row(struct k3_embed *e, uint32_t token, float *out, struct k3_err *err)
{
    const char *path = e->m->files[e->m->embed_file].path;
    uint64_t off_bytes = e->m->embed_off_bytes + (uint64_t)token * e->row_bytes;
    size_t n_got = 0;

    if (token >= e->m->cfg.vocab)
        return k3_refuse(err, -EINVAL, "token id %u: the vocabulary has ids 0 to %u", token, e->m->cfg.vocab - 1);
    while (n_got < e->row_bytes) {
        ssize_t n = pread(e->fd, e->row + n_got, e->row_bytes - n_got, (off_t)(off_bytes + n_got));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return k3_untrusted(err, -EIO, "embedding row %u: read of %zu bytes at %llu of %s: %s (errno %d)", token,
                                e->row_bytes, (unsigned long long)off_bytes, path, strerror(errno), errno);
        if (n == 0)
            return k3_untrusted(err, -EIO, "embedding row %u: %s ends at %llu, %zu bytes at %llu are needed", token, path,
                                (unsigned long long)(off_bytes + n_got), e->row_bytes, (unsigned long long)off_bytes);
        n_got += (size_t)n;
    }
    k3_widen(out, e->row, e->m->embed_dtype, e->m->cfg.hidden);
    return 0;
}
