/* The weight files: opened once, direct where the file system can. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "k3-trunkd/trunkd.h"

/* Some file systems take O_DIRECT at open and refuse it at the first read. */
static bool direct_works(int fd, uint32_t align_bytes)
{
    void *page;
    ssize_t n;

    if (posix_memalign(&page, align_bytes, align_bytes) != 0)
        return false;
    do
        n = pread(fd, page, align_bytes, 0);
    while (n < 0 && errno == EINTR);
    n = n < 0 ? -errno : n;
    free(page);
    return n != -EINVAL;
}

static int open_one(struct k3_trunkd *d, uint32_t i, struct k3_err *err)
{
    const struct k3_file *f = &d->model->files[i];
    struct k3_tfile *t = &d->files[i];
    struct stat st;

    if (strcmp(d->opt.direct, "off") != 0) {
        t->fd = open(f->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        t->direct = t->fd >= 0 && direct_works(t->fd, d->layout.align_bytes);
        if (!t->direct && strcmp(d->opt.direct, "on") == 0 && (t->fd >= 0 || errno == EINVAL))
            return k3_refuse(err, -EINVAL,
                             "%s: its file system refuses O_DIRECT, which --direct on asks for",
                             f->path);
        if (!t->direct && t->fd >= 0) {
            close(t->fd);
            t->fd = -1;
        }
    }
    if (t->fd < 0)
        t->fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (t->fd < 0)
        return k3_refuse(err, -errno, "%s: %s", f->path, strerror(errno));
    if (fstat(t->fd, &st) != 0)
        return k3_fail(err, -errno, "%s: %s", f->path, strerror(errno));
    if (st.st_size < 0 || (uint64_t)st.st_size != f->len_bytes)
        return k3_refuse(err, -ESTALE,
                         "%s: %" PRIi64 " bytes, was %" PRIu64 " when its header was read", f->path,
                         (int64_t)st.st_size, f->len_bytes);
    d->n_files_used++;
    if (t->direct)
        atomic_fetch_add_explicit(&d->n_files_direct, 1, memory_order_relaxed);
    return 0;
}

int k3_tfiles_open(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_model *m = d->model;
    int rc = 0;

    d->files = calloc(m->n_files ? m->n_files : 1, sizeof(*d->files));
    if (!d->files)
        return k3_fail(err, -ENOMEM, "no memory for %zu files", m->n_files);
    for (size_t i = 0; i < m->n_files; i++)
        d->files[i].fd = -1;
    for (size_t i = 0; i < m->n_matrices && rc == 0; i++)
        if (d->files[m->matrices[i].file].fd < 0)
            rc = open_one(d, m->matrices[i].file, err);
    for (size_t i = 0; i < m->n_residents && rc == 0; i++)
        if (d->files[m->residents[i].file].fd < 0)
            rc = open_one(d, m->residents[i].file, err);
    return rc;
}

void k3_tfiles_close(struct k3_trunkd *d)
{
    for (size_t i = 0; d->files && i < d->model->n_files; i++)
        if (d->files[i].fd >= 0)
            close(d->files[i].fd);
    free(d->files);
    d->files = NULL;
}

int k3_tfile_check(const struct k3_trunkd *d, uint32_t file)
{
    struct stat st;

    if (fstat(d->files[file].fd, &st) != 0)
        return errno;
    /* Another size is another file than the one whose digest computed agreed to. */
    return st.st_size >= 0 && (uint64_t)st.st_size == d->model->files[file].len_bytes ? 0 : ESTALE;
}

void k3_tfile_set_buffered(struct k3_trunkd *d, uint32_t file)
{
    struct k3_tfile *t = &d->files[file];
    int flags = fcntl(t->fd, F_GETFL);

    if (flags >= 0)
        (void)fcntl(t->fd, F_SETFL, flags & ~O_DIRECT);
    if (t->direct) {
        t->direct = false;
        atomic_fetch_sub_explicit(&d->n_files_direct, 1, memory_order_relaxed);
        k3_log(K3_LOG_WARN, "trunk_buffered", "file=%s reason=\"a read refused O_DIRECT\"",
               d->model->files[file].path);
    }
}

int k3_tfile_read(struct k3_trunkd *d, uint32_t file, uint64_t off_bytes, uint64_t len_bytes,
                  struct k3_scratch *scratch, const uint8_t **out, struct k3_err *err)
{
    const char *path = d->model->files[file].path;
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
        ssize_t n = pread(d->files[file].fd, scratch->base + from, span - from,
                          (off_t)(first + from));

        if (n < 0 && (errno == EINTR || errno == EAGAIN) && n_idle++ < 100)
            continue;
        if (n < 0 && errno == EINVAL && d->files[file].direct) {
            k3_tfile_set_buffered(d, file);
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
