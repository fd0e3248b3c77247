/* The weight files: opened once, direct where the file system can. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-trunkd/trunkd.h"

static int open_one(struct k3_trunkd *d, uint32_t i, struct k3_err *err)
{
    const struct k3_file *f = &d->model->files[i];
    const char *paths[1 + K3_IO_COPIES_MAX] = { f->path };
    size_t n = 1;

    if (d->files.file[i].n_copies > 0)
        return 0;
    for (uint32_t c = 0; c < f->n_copies && c < K3_IO_COPIES_MAX; c++)
        paths[n++] = f->copies[c];
    return k3_io_files_add(&d->files, i, paths, n, f->len_bytes, d->opt.direct, d->layout.align_bytes, err);
}

int k3_tfiles_open(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_model *m = d->model;
    int rc = k3_io_files_open(&d->files, m->n_files, err);

    for (size_t i = 0; i < m->n_matrices && rc == 0; i++)
        rc = open_one(d, m->matrices[i].file, err);
    for (size_t i = 0; i < m->n_residents && rc == 0; i++)
        rc = open_one(d, m->residents[i].file, err);
    if (rc < 0)
        return rc;
    k3_io_files_rates(&d->files, d->opt.io_depth, d->opt.io_block_bytes);
    d->block_bytes = k3_io_files_block_bytes(&d->files);
    return 0;
}

void k3_tfiles_close(struct k3_trunkd *d)
{
    k3_io_files_close(&d->files);
}

void k3_tfile_set_buffered(struct k3_trunkd *d, uint32_t file, uint32_t copy)
{
    if (k3_io_set_buffered(&d->files, file, copy))
        k3_log(K3_LOG_WARN, "trunk_buffered", "file=%s reason=\"a read refused O_DIRECT\"",
               d->files.file[file].copy[copy].path);
}

int k3_tfile_next(struct k3_trunkd *d, uint32_t file, uint32_t copy, uint32_t tried, int errnum)
{
    uint64_t now_ns = k3_now_ns();
    bool news = k3_io_set_bad(&d->files, file, copy, now_ns);
    int next = k3_io_choose(&d->files, file, tried, false, now_ns);

    if (next >= 0 && news)
        k3_log(K3_LOG_WARN, "copy_failed", "file=%s errno=%d text=\"%s\" then=%s", d->files.file[file].copy[copy].path,
               errnum, strerror(errnum), d->files.file[file].copy[next].path);
    return next;
}

static int read_copy(struct k3_trunkd *d, uint32_t file, uint32_t copy, uint64_t off_bytes,
                     uint64_t len_bytes, struct k3_scratch *scratch, const uint8_t **out,
                     struct k3_err *err)
{
    const struct k3_io_copy *f = &d->files.file[file].copy[copy];
    const char *path = f->path;
    uint64_t a = d->layout.align_bytes, first = off_bytes - off_bytes % a,
             need = off_bytes - first + len_bytes;
    uint64_t span = (need + a - 1) / a * a, got = 0;
    int n_idle = 0;

    if (scratch->len_bytes < span) {
        void *p;

        if (posix_memalign(&p, a, span) != 0)
            return k3_fail(err, -ENOMEM, "no memory to read %" PRIu64 " bytes of %s", span, path);
        free(scratch->base);
        *scratch = (struct k3_scratch){ p, span };
    }
    while (got < need) {
        uint64_t from = got - got % a; /* a direct read begins at a page */
        ssize_t n = pread(f->fd, scratch->base + from, span - from, (off_t)(first + from));

        if (n < 0 && (errno == EINTR || errno == EAGAIN) && n_idle++ < 100)
            continue;
        if (n < 0 && errno == EINVAL && f->direct) {
            k3_tfile_set_buffered(d, file, copy);
            continue;
        }
        if (n < 0)
            return k3_fail(err, -errno, "%s: reading %" PRIu64 " bytes at %" PRIu64 ": %s", path,
                           len_bytes, off_bytes, strerror(errno));
        if (from + (uint64_t)n <= got)
            return k3_fail(err, -ENODATA,
                           "%s: ends at %" PRIu64 ", but a tensor lies at %" PRIu64 " with %" PRIu64
                           " bytes",
                           path, first + got, off_bytes, len_bytes);
        got = from + (uint64_t)n;
    }
    *out = scratch->base + (off_bytes - first);
    return 0;
}

int k3_tfile_read(struct k3_trunkd *d, uint32_t file, uint64_t off_bytes, uint64_t len_bytes,
                  struct k3_scratch *scratch, const uint8_t **out, struct k3_err *err)
{
    int copy = k3_io_choose(&d->files, file, 0, false, k3_now_ns()), rc = -ENODATA;
    uint32_t tried = 0;

    while (copy >= 0) {
        rc = read_copy(d, file, (uint32_t)copy, off_bytes, len_bytes, scratch, out, err);
        if (rc == 0 || rc == -ENOMEM)
            break;
        tried |= 1u << copy;
        copy = k3_tfile_next(d, file, (uint32_t)copy, tried, -rc);
    }
    return rc;
}
