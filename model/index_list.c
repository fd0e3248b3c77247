/* model.safetensors.index.json: which file holds which tensor.  The headers say it all; the list only serves to find
 * shards that were exchanged or come from another checkpoint.  60 MB of JSON, read through a window. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/index_private.h"
#include "model/scan.h"

#define WINDOW_BYTES (256u << 10)

/* Returns 0 to go on, 1 to end well, negative to end. */
typedef int visit_fn(void *arg, const char *tensor, const char *file, struct k3_err *err);

struct visitor {
    visit_fn *visit;
    void *arg;
    struct k3_err *err;
};

static int visit_one(void *arg, const char *tensor, const char *file)
{
    struct visitor *v = arg;
    int rc = v->visit(v->arg, tensor, k3_index_base_name(file), v->err);

    return rc < 0 ? -ECANCELED : rc; /* visit has filled err */
}

static int walk(struct k3_scan *s, visit_fn *visit, void *arg, struct k3_err *err)
{
    char key[64];
    int rc = k3_scan_want(s, '{');

    if (rc < 0 || k3_scan_is(s, '}'))
        return rc;
    do {
        if ((rc = k3_scan_string(s, key, sizeof(key), NULL)) < 0 || (rc = k3_scan_want(s, ':')) < 0)
            return rc;
        rc = strcmp(key, "weight_map") ? k3_scan_skip(s) : k3_scan_strings(s, visit_one, &(struct visitor){ visit, arg, err });
        if (rc != 0)
            return rc;
    } while (k3_scan_is(s, ','));
    rc = k3_scan_want(s, '}');
    return rc == 0 && k3_scan_peek(s) != -1 ? -EPROTO : rc;
}

static int walk_list(const char *path, visit_fn *visit, void *arg, struct k3_err *err)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), rc; /* a FIFO would wait for its writer */
    struct stat st;
    char *window = malloc(WINDOW_BYTES);
    struct k3_scan s;

    if (fd < 0)
        rc = k3_refuse(err, -errno, "open %s: %s", path, strerror(errno));
    else if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        rc = k3_refuse(err, -EINVAL, "%s is not a regular file", path);
    else if (!window)
        rc = k3_fail(err, -ENOMEM, "no memory to read %s", path);
    else {
        k3_scan_fd(&s, fd, window, WINDOW_BYTES);
        rc = walk(&s, visit, arg, err);
        if (rc < 0 && rc != -ECANCELED)
            rc = k3_refuse(err, rc == -EIO ? -EIO : -EINVAL,
                           "%s %s at byte %" PRIu64 "; it must map tensor names to files under weight_map", path,
                           rc == -EIO ? "cannot be read" : "is not a list of tensors", k3_scan_at(&s));
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    }
    free(window);
    if (fd >= 0)
        close(fd);
    return rc;
}

static int check_one(void *arg, const char *tensor, const char *file, struct k3_err *err)
{
    const struct k3_index *ix = arg;
    const struct k3_tensor *t = k3_index_find(ix, tensor);

    if (t) {
        const char *base = k3_index_base_name(ix->files[t->file].path);

        if (!strcmp(base, file))
            return 0;
        return k3_refuse(err, -EINVAL, "tensor %s is in %s, but %s puts it in %s (shards exchanged or of another model?)",
                         tensor, ix->files[t->file].path, ix->list_path, file);
    }
    for (size_t i = 0; i < ix->n_files; i++)
        if (!strcmp(k3_index_base_name(ix->files[i].path), file))
            return k3_refuse(err, -EINVAL, "%s has no tensor %s, but %s puts it there (a shard of another model?)",
                             ix->files[i].path, tensor, ix->list_path);
    return 0; /* that file is not here: a partial download, or shards that text inference does not need */
}

int k3_index_list_check(const struct k3_index *ix, struct k3_err *err)
{
    return ix->list_path ? walk_list(ix->list_path, check_one, (void *)ix, err) : 0;
}

struct wanted {
    const char *name;
    char *out;
    size_t len_bytes;
};

static int find_one(void *arg, const char *tensor, const char *file, struct k3_err *err)
{
    struct wanted *w = arg;

    (void)err;
    if (strcmp(tensor, w->name))
        return 0;
    snprintf(w->out, w->len_bytes, "%s", file);
    return 1;
}

bool k3_index_listed_in(const struct k3_index *ix, const char *name, char *out, size_t len_bytes)
{
    struct wanted w = { name, out, len_bytes };

    return ix->list_path && walk_list(ix->list_path, find_one, &w, NULL) == 1;
}
