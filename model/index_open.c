/* Finds the shards of the given directories and reads their headers, leaving no page cache behind. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/index_private.h"

#define HEADER_MAX_BYTES (100u << 20) /* what the safetensors library accepts; the released model has 0.8 MB */

static int read_all(int fd, void *to, size_t len_bytes, uint64_t off_bytes)
{
    uint8_t *p = to;

    while (len_bytes) {
        ssize_t n = pread(fd, p, len_bytes, (off_t)off_bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -ENODATA;
        p += n;
        len_bytes -= (size_t)n;
        off_bytes += (uint64_t)n;
    }
    return 0;
}

struct buffer {
    char *p;
    size_t cap;
};

/* The JSON of a header into b; *read_bytes: with its length before it. */
static int read_json(const struct k3_file *f, int fd, struct buffer *b, uint64_t *read_bytes, struct k3_err *err)
{
    uint8_t le[8];
    uint64_t n = 0;
    int rc;

    if (f->len_bytes < 8)
        return k3_refuse(err, -EINVAL, "%s has %" PRIu64 " bytes; a safetensors file has at least 8 (truncated?)",
                         f->path, f->len_bytes);
    if ((rc = read_all(fd, le, sizeof(le), 0)) < 0)
        return k3_fail(err, rc, "%s: reading its header: %s", f->path, strerror(-rc));
    for (int i = 0; i < 8; i++)
        n |= (uint64_t)le[i] << (8 * i);
    if (n > f->len_bytes - 8)
        return k3_refuse(err, -EINVAL, "%s: header length %" PRIu64 " is beyond the file, which has %" PRIu64
                         " bytes (truncated, or not safetensors)", f->path, n, f->len_bytes);
    if (n > HEADER_MAX_BYTES)
        return k3_refuse(err, -EINVAL, "%s: header length %" PRIu64 " is above the limit of %u bytes", f->path, n,
                         HEADER_MAX_BYTES);
    if (n > b->cap) {
        free(b->p);
        b->p = malloc(n);
        b->cap = b->p ? n : 0;
        if (!b->p)
            return k3_fail(err, -ENOMEM, "no memory for a header of %" PRIu64 " bytes", n);
    }
    *read_bytes = 8 + n;
    if ((rc = read_all(fd, b->p, n, 8)) < 0)
        return k3_fail(err, rc, "%s: reading its header: %s", f->path, strerror(-rc));
    return 0;
}

/* The whole header of a regular file into b.  RANDOM: no read-ahead past the header.  DONTNEED drops whole pages only, so
 * the end is rounded up. */
static int read_header(struct k3_file *f, struct buffer *b, uint64_t *read_bytes, struct k3_err *err)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;

    *read_bytes = 8;
    if (fd < 0)
        return k3_refuse(err, -errno, "open %s: %s", f->path, strerror(errno));
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    rc = read_json(f, fd, b, read_bytes, err);
    posix_fadvise(fd, 0, (off_t)((*read_bytes + 4095) & ~4095ull), POSIX_FADV_DONTNEED);
    close(fd);
    return rc;
}

/* Two versions of a shard would give other bits with every read that goes to the other one. */
static int check_copy(struct k3_file *f, char *path, uint64_t len_bytes, struct k3_err *err)
{
    static const char todo[] = "a shard must be the same in all directories: copy it again or leave one out";
    struct k3_file copy = { .path = path, .len_bytes = len_bytes };
    struct buffer a = { NULL, 0 }, b = { NULL, 0 };
    uint64_t a_bytes, b_bytes;
    int rc;

    if (f->len_bytes != len_bytes)
        return k3_refuse(err, -EINVAL, "%s has %" PRIu64 " bytes, but %s has %" PRIu64 "; %s", f->path, f->len_bytes,
                         path, len_bytes, todo);
    rc = read_header(f, &a, &a_bytes, err);
    if (rc == 0)
        rc = read_header(&copy, &b, &b_bytes, err);
    if (rc == 0 && (a_bytes != b_bytes || memcmp(a.p, b.p, a_bytes - 8) != 0))
        rc = k3_refuse(err, -EINVAL, "%s and %s have different headers; %s", f->path, path, todo);
    free(a.p);
    free(b.p);
    return rc;
}

static int read_headers(struct k3_index *ix, struct k3_err *err)
{
    struct buffer b = { NULL, 0 };
    int rc = 0;

    for (size_t i = 0; i < ix->n_files && rc == 0; i++) {
        uint64_t read_bytes;

        rc = read_header(&ix->files[i], &b, &read_bytes, err);
        if (rc == 0)
            rc = k3_index_parse_header(ix, (uint16_t)i, b.p, read_bytes - 8, read_bytes, ix->files[i].len_bytes, err);
    }
    free(b.p);
    return rc;
}

static bool is_shard(const char *name)
{
    static const char suffix[] = ".safetensors";
    size_t n = strlen(name);

    return n >= sizeof(suffix) && name[0] != '.' && !strcmp(name + n - (sizeof(suffix) - 1), suffix);
}

/* The file of that base name among the first n, or -1. */
static long known(const struct k3_index *ix, size_t n, const char *base)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(k3_index_base_name(ix->files[i].path), base))
            return (long)i;
    return -1;
}

/* i_known: the same shard in an earlier device, or -1.  device: it is to be read from here, too. */
static int add_shard(struct k3_index *ix, const char *dir, const char *name, long i_known, bool device,
                     struct k3_err *err)
{
    char *path;
    struct stat st;
    int rc;

    if (asprintf(&path, "%s/%s", dir, name) < 0)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    if (stat(path, &st) < 0)
        rc = k3_refuse(err, -errno, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = k3_refuse(err, -EINVAL, "%s is not a regular file", path);
    else if (i_known < 0)
        rc = k3_index_add_file(ix, path, (uint64_t)st.st_size, st.st_dev, st.st_ino, err);
    else if (ix->files[i_known].dev == st.st_dev && ix->files[i_known].ino == st.st_ino)
        rc = 0; /* a link to the same file is no second drive */
    else if ((rc = check_copy(&ix->files[i_known], path, (uint64_t)st.st_size, err)) == 0 && device)
        rc = k3_index_add_copy(ix, (size_t)i_known, path, err);
    free(path);
    return rc;
}

/* device: what is known gets a copy; the model directory only gives what no device has. */
static int scan_dir(struct k3_index *ix, const char *dir, bool device, struct k3_err *err)
{
    DIR *d = opendir(dir);
    size_t n_before = ix->n_files, n_shards = 0;
    bool pack = false;
    int rc = 0;

    if (!d)
        return k3_refuse(err, -errno, "%s directory %s: %s", device ? "device" : "model", dir, strerror(errno));
    while (rc == 0) {
        struct dirent *e;

        errno = 0;
        e = readdir(d);
        if (!e) {
            if (errno)
                rc = k3_fail(err, -errno, "%s directory %s: %s", device ? "device" : "model", dir, strerror(errno));
            break;
        }
        pack |= !strncmp(e->d_name, "trunk.k3pack", 12); /* a half-written one is refused by pack.c */
        if (!is_shard(e->d_name))
            continue;
        n_shards++;
        rc = add_shard(ix, dir, e->d_name, known(ix, n_before, e->d_name), device, err);
    }
    closedir(d);
    if (rc == 0 && device && n_shards == 0 && !pack)
        return k3_refuse(err, -ENOENT,
                         "device directory %s holds no *.safetensors file and no trunk.k3pack; copy shards there, or leave "
                         "it out", dir);
    if (rc == 0 && !ix->list_path) {
        if (asprintf(&ix->list_path, "%s/model.safetensors.index.json", dir) < 0) {
            ix->list_path = NULL;
            return k3_fail(err, -ENOMEM, "no memory for a file name");
        }
        if (access(ix->list_path, F_OK) < 0) {
            free(ix->list_path);
            ix->list_path = NULL;
        }
    }
    return rc;
}

/* The devices come before the last of dirs; that one may be named as a device, too. */
static int check_devices(const char *const *dirs, size_t n_dirs, struct k3_err *err)
{
    for (size_t i = 1; i + 1 < n_dirs; i++)
        for (size_t k = 0; k < i; k++) {
            struct stat a, b;

            if (stat(dirs[i], &a) == 0 && stat(dirs[k], &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
                return k3_refuse(err, -EINVAL, "device directories %s and %s are the same; name it once", dirs[k],
                                 dirs[i]);
        }
    return 0;
}

static int by_base_name(const void *a, const void *b)
{
    return strcmp(k3_index_base_name(((const struct k3_file *)a)->path),
                  k3_index_base_name(((const struct k3_file *)b)->path));
}

int k3_index_open(struct k3_index **out, const char *const *dirs, size_t n_dirs, struct k3_err *err)
{
    struct k3_index *ix = k3_index_new();
    int rc = ix ? 0 : k3_fail(err, -ENOMEM, "no memory for an index");

    if (rc == 0)
        rc = check_devices(dirs, n_dirs, err);
    for (size_t i = 0; i < n_dirs && rc == 0; i++)
        rc = scan_dir(ix, dirs[i], i + 1 < n_dirs, err);
    if (rc == 0 && ix->n_files == 0)
        rc = k3_refuse(err, -ENOENT, "no *.safetensors file in %s; a model directory holds config.json and the shards",
                       n_dirs ? dirs[n_dirs - 1] : "(no directory given)");
    if (rc == 0) {
        qsort(ix->files, ix->n_files, sizeof(*ix->files), by_base_name);
        rc = read_headers(ix, err);
    }
    if (rc == 0)
        rc = k3_index_sort(ix, err);
    if (rc == 0)
        rc = k3_index_list_check(ix, err);
    if (rc < 0) {
        k3_index_close(ix);
        return rc;
    }
    *out = ix;
    return 0;
}
