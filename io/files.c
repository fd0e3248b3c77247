#include "io/files.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int k3_io_files_open(struct k3_io_files *fs, size_t n_files, struct k3_err *err)
{
    *fs = (struct k3_io_files){ .n_files = n_files };
    fs->file = calloc(n_files ? n_files : 1, sizeof(*fs->file));
    return fs->file ? 0 : k3_fail(err, -ENOMEM, "no memory for %zu files", n_files);
}

void k3_io_files_close(struct k3_io_files *fs)
{
    for (size_t i = 0; fs->file && i < fs->n_files; i++) {
        for (uint32_t c = 0; c < fs->file[i].n_copies; c++) {
            if (fs->file[i].copy[c].fd >= 0)
                close(fs->file[i].copy[c].fd);
            free(fs->file[i].copy[c].path);
        }
        free(fs->file[i].copy);
    }
    free(fs->file);
    free(fs->drive);
    *fs = (struct k3_io_files){ 0 };
}

/* ---- opening ---- */

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

static int drive_of(struct k3_io_files *fs, const char *path, uint32_t *out, struct k3_err *err)
{
    struct k3_io_drive *more;
    struct k3_device about;
    int rc = k3_device_of(path, NULL, &about, err);
    uint32_t i;

    if (rc < 0)
        return rc;
    for (i = 0; i < fs->n_drives; i++)
        if (strcmp(fs->drive[i].about.key, about.key) == 0 && (*about.name || fs->drive[i].about.dev == about.dev))
            break; /* partitions of one drive; where there is no drive only the same file system */
    *out = i;
    if (i < fs->n_drives)
        return 0;
    more = reallocarray(fs->drive, fs->n_drives + 1, sizeof(*more));
    if (!more)
        return k3_fail(err, -ENOMEM, "no memory for %u drives", fs->n_drives + 1);
    fs->drive = more;
    memset(&fs->drive[i], 0, sizeof(fs->drive[i]));
    fs->drive[i].about = about;
    fs->n_drives++;
    return 0;
}

static int open_copy(struct k3_io_files *fs, struct k3_io_copy *c, uint64_t len_bytes, const char *direct,
                     uint32_t align_bytes, struct k3_err *err)
{
    struct stat st;

    if (strcmp(direct, "off") != 0) {
        c->fd = open(c->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        c->direct = c->fd >= 0 && direct_works(c->fd, align_bytes);
        if (!c->direct && strcmp(direct, "on") == 0 && (c->fd >= 0 || errno == EINVAL))
            return k3_refuse(err, -EINVAL, "--direct on: %s: its file system refuses O_DIRECT; use --direct auto or off", c->path);
        if (!c->direct && c->fd >= 0) {
            close(c->fd);
            c->fd = -1;
        }
    }
    if (c->fd < 0)
        c->fd = open(c->path, O_RDONLY | O_CLOEXEC);
    if (c->fd < 0)
        return k3_refuse(err, -errno, "%s: %s", c->path, strerror(errno));
    if (fstat(c->fd, &st) != 0)
        return k3_fail(err, -errno, "%s: %s", c->path, strerror(errno));
    if (st.st_size < 0 || (uint64_t)st.st_size != len_bytes)
        return k3_refuse(err, -ESTALE, "%s: %" PRIi64 " bytes, was %" PRIu64 " when its header was read", c->path,
                         (int64_t)st.st_size, len_bytes);
    if (!c->direct)
        (void)posix_fadvise(c->fd, 0, 0, POSIX_FADV_RANDOM);
    fs->n_used++;
    atomic_fetch_add_explicit(&fs->n_direct, c->direct, memory_order_relaxed);
    return drive_of(fs, c->path, &c->drive, err);
}

int k3_io_files_add(struct k3_io_files *fs, size_t i, const char *const *paths, size_t n_paths, uint64_t len_bytes,
                    const char *direct, uint32_t align_bytes, struct k3_err *err)
{
    struct k3_io_file *f = &fs->file[i];
    int rc = 0;

    if (n_paths > K3_IO_COPIES_MAX)
        return k3_refuse(err, -E2BIG, "%s is in %zu directories; at most %d can be used", paths[0], n_paths,
                         K3_IO_COPIES_MAX);
    f->copy = calloc(n_paths, sizeof(*f->copy));
    if (!f->copy)
        return k3_fail(err, -ENOMEM, "no memory for %zu copies of a file", n_paths);
    f->len_bytes = len_bytes;
    for (size_t c = 0; c < n_paths && rc == 0; c++) {
        f->copy[c] = (struct k3_io_copy){ .path = strdup(paths[c]), .fd = -1 };
        f->n_copies++;
        rc = f->copy[c].path ? open_copy(fs, &f->copy[c], len_bytes, direct, align_bytes, err)
                             : k3_fail(err, -ENOMEM, "no memory for a file name");
    }
    return rc;
}

/* ---- depth and block ---- */

static void rate_of(struct k3_io_files *fs, uint32_t drive)
{
    const char *paths[64];
    struct k3_io_drive *d = &fs->drive[drive];
    size_t n = 0;

    for (size_t i = 0; i < fs->n_files && n < 64; i++)
        for (uint32_t c = 0; c < fs->file[i].n_copies && n < 64; c++)
            if (fs->file[i].copy[c].drive == drive)
                paths[n++] = fs->file[i].copy[c].path;
    if (k3_io_rate_get(paths, n, &d->rate, NULL) < 0)
        d->rate_from = "default";
    else
        d->rate_from = d->rate.remembered ? "remembered" : "measured";
}

void k3_io_files_rates(struct k3_io_files *fs, uint32_t depth, uint64_t block_bytes)
{
    for (uint32_t i = 0; i < fs->n_drives; i++) {
        struct k3_io_drive *d = &fs->drive[i];

        if (!depth || !block_bytes)
            rate_of(fs, i);
        else
            d->rate_from = "given";
        if (depth)
            d->rate.depth = depth;
        if (block_bytes)
            d->rate.block_bytes = (uint32_t)block_bytes;
    }
}

uint32_t k3_io_files_depth(const struct k3_io_files *fs)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < fs->n_drives; i++)
        n += fs->drive[i].rate.depth;
    return n ? n : 1;
}

uint32_t k3_io_files_block_bytes(const struct k3_io_files *fs)
{
    uint32_t most = 0;

    for (uint32_t i = 0; i < fs->n_drives; i++)
        most = fs->drive[i].rate.block_bytes > most ? fs->drive[i].rate.block_bytes : most;
    return most ? most : K3_IO_BLOCK_DEFAULT;
}

/* ---- which copy ---- */

int k3_io_choose(const struct k3_io_files *fs, size_t file, uint32_t tried, bool need_room, uint64_t now_ns)
{
    const struct k3_io_file *f = &fs->file[file];
    uint64_t best_bytes = UINT64_MAX;
    bool any_good = false;
    int best = -1;

    for (uint32_t c = 0; c < f->n_copies; c++)
        any_good |= !(tried >> c & 1) && f->copy[c].bad_until_ns <= now_ns;
    for (uint32_t c = 0; c < f->n_copies; c++) {
        const struct k3_io_drive *d = &fs->drive[f->copy[c].drive];

        /* A good copy whose drive is busy is waited for, sooner than that a bad one is asked. */
        if (tried >> c & 1 || (any_good && f->copy[c].bad_until_ns > now_ns) ||
            (need_room && d->in_flight >= d->rate.depth) || d->in_flight_bytes >= best_bytes)
            continue;
        best = (int)c;
        best_bytes = d->in_flight_bytes;
    }
    return best;
}

void k3_io_sent(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t len_bytes)
{
    struct k3_io_drive *d = &fs->drive[fs->file[file].copy[copy].drive];

    d->in_flight++;
    d->in_flight_bytes += len_bytes;
}

void k3_io_back(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t len_bytes, int64_t res)
{
    struct k3_io_drive *d = &fs->drive[fs->file[file].copy[copy].drive];

    d->in_flight--;
    d->in_flight_bytes -= len_bytes;
    atomic_fetch_add_explicit(&d->reads, 1, memory_order_relaxed);
    if (res > 0)
        atomic_fetch_add_explicit(&d->read_bytes, (uint64_t)res, memory_order_relaxed);
}

bool k3_io_set_buffered(struct k3_io_files *fs, size_t file, uint32_t copy)
{
    struct k3_io_copy *c = &fs->file[file].copy[copy];
    int flags = fcntl(c->fd, F_GETFL);

    if (flags >= 0)
        (void)fcntl(c->fd, F_SETFL, flags & ~O_DIRECT);
    if (!c->direct)
        return false;
    c->direct = false;
    atomic_fetch_sub_explicit(&fs->n_direct, 1, memory_order_relaxed);
    return true;
}

bool k3_io_set_bad(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t now_ns)
{
    struct k3_io_copy *c = &fs->file[file].copy[copy];
    bool news = c->bad_until_ns <= now_ns;

    c->bad_until_ns = now_ns + K3_IO_BAD_NS;
    return news;
}

int k3_io_check(struct k3_io_files *fs, size_t file, uint64_t now_ns)
{
    struct k3_io_file *f = &fs->file[file];
    int err = 0;
    bool good = false;

    for (uint32_t c = 0; c < f->n_copies; c++) {
        struct stat st;
        int e = fstat(f->copy[c].fd, &st) != 0 ? errno : 0;

        /* Another size is another file than the one whose digest computed agreed to. */
        if (e == 0 && (st.st_size < 0 || (uint64_t)st.st_size != f->len_bytes))
            e = ESTALE;
        if (e == 0) {
            good = true;
            continue;
        }
        f->copy[c].bad_until_ns = now_ns + K3_IO_BAD_NS;
        err = e;
    }
    return good ? 0 : err;
}

/* ---- info ---- */

void k3_io_files_info(const struct k3_io_files *fs, uint64_t block_bytes, struct cJSON *reply)
{
    cJSON *drives = cJSON_AddArrayToObject(reply, "drives");

    cJSON_AddNumberToObject(reply, "io_depth", k3_io_files_depth(fs));
    cJSON_AddNumberToObject(reply, "io_block_bytes", (double)block_bytes);
    cJSON_AddStringToObject(reply, "io_rate_from", fs->n_drives ? fs->drive[0].rate_from : "default");
    for (uint32_t i = 0; i < fs->n_drives && drives; i++) {
        const struct k3_io_drive *d = &fs->drive[i];
        cJSON *o = cJSON_CreateObject();
        uint32_t n_files = 0;

        for (size_t f = 0; f < fs->n_files; f++)
            for (uint32_t c = 0; c < fs->file[f].n_copies; c++)
                n_files += fs->file[f].copy[c].drive == i;
        cJSON_AddStringToObject(o, "name", *d->about.name ? d->about.name : d->about.key);
        cJSON_AddStringToObject(o, "fs", d->about.fs);
        cJSON_AddNumberToObject(o, "numa_node", d->about.numa_node);
        cJSON_AddNumberToObject(o, "files", n_files);
        cJSON_AddNumberToObject(o, "depth", d->rate.depth);
        cJSON_AddNumberToObject(o, "block_bytes", d->rate.block_bytes);
        cJSON_AddNumberToObject(o, "bytes_per_s", d->rate.bytes_per_s);
        cJSON_AddStringToObject(o, "rate_from", d->rate_from);
        cJSON_AddNumberToObject(o, "reads", (double)atomic_load_explicit(&d->reads, memory_order_relaxed));
        cJSON_AddNumberToObject(o, "read_bytes", (double)atomic_load_explicit(&d->read_bytes, memory_order_relaxed));
        cJSON_AddItemToArray(drives, o);
    }
}
