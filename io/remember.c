/* What was measured of drives, in one small text file:
 *
 *     k3 devices 1
 *     KEY DEPTH BLOCK_BYTES BYTES_PER_S BYTES_PER_S_DEPTH1 SECONDS_SINCE_1970
 *
 * It is a cache: whatever is wrong with it, the answer is to measure. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "io/calibrate.h"

#define HEAD "k3 devices 1\n"
#define TEXT_MAX (256u << 10)
#define DAY_S 86400
#define LOCK_TRIES 300 /* of 10 ms: longer than one measures */
#define FILES_MAX 64

struct line {
    char key[sizeof(((struct k3_device *)0)->key)];
    struct k3_io_rate rate;
    int64_t at_s;
};

/* One line of n bytes, without its end. */
static bool parse_line(const char *text, size_t n, struct line *out)
{
    char copy[320];
    int end = 0;

    if (n >= sizeof(copy) || memchr(text, '\0', n))
        return false;
    memcpy(copy, text, n);
    copy[n] = '\0';
    *out = (struct line){ .at_s = 0 };
    if (sscanf(copy, "%95s %9" SCNu32 " %9" SCNu32 " %lf %lf %18" SCNd64 "%n", out->key, &out->rate.depth,
               &out->rate.block_bytes, &out->rate.bytes_per_s, &out->rate.bytes_per_s_depth1, &out->at_s, &end) != 6 ||
        copy[end] != '\0')
        return false;
    out->rate.remembered = true;
    return out->rate.depth >= 1 && out->rate.depth <= 256 && out->rate.block_bytes >= 65536 &&
           out->rate.block_bytes <= 1u << 29 && out->rate.block_bytes % 4096 == 0 &&
           isfinite(out->rate.bytes_per_s) && out->rate.bytes_per_s > 0 &&
           isfinite(out->rate.bytes_per_s_depth1) && out->rate.bytes_per_s_depth1 >= 0;
}

static bool fresh(const struct line *l, int64_t now_s)
{
    return l->at_s <= now_s + DAY_S && l->at_s >= now_s - (int64_t)K3_IO_RATE_DAYS * DAY_S;
}

int k3_io_rates_find(const char *text, const char *key, int64_t now_s, struct k3_io_rate *out)
{
    const char *at = text;
    int rc = -ENOENT;
    struct line l;

    if (*text == '\0')
        return -ENOENT;
    if (strncmp(text, HEAD, strlen(HEAD)) != 0)
        return -EPROTO;
    for (at += strlen(HEAD); *at;) {
        const char *end = strchr(at, '\n');

        if (!end || !parse_line(at, (size_t)(end - at), &l))
            return -EPROTO;
        if (strcmp(l.key, key) == 0) {
            rc = fresh(&l, now_s) ? 0 : -ENOENT;
            if (rc == 0)
                *out = l.rate;
        }
        at = end + 1;
    }
    return rc;
}

char *k3_io_rates_with(const char *text, const char *key, const struct k3_io_rate *r, int64_t now_s)
{
    struct k3_io_rate none;
    const char *at = text;
    char *out = NULL;
    size_t n;
    FILE *f = open_memstream(&out, &n);
    struct line l;

    if (!f)
        return NULL;
    fputs(HEAD, f);
    if (*text && k3_io_rates_find(text, "", now_s, &none) != -EPROTO)
        for (at += strlen(HEAD); *at; at = strchr(at, '\n') + 1) {
            size_t len = strcspn(at, "\n");

            if (parse_line(at, len, &l) && fresh(&l, now_s) && strcmp(l.key, key) != 0)
                fprintf(f, "%.*s\n", (int)len, at);
        }
    fprintf(f, "%s %" PRIu32 " %" PRIu32 " %.0f %.0f %" PRId64 "\n", key, r->depth, r->block_bytes, r->bytes_per_s,
            r->bytes_per_s_depth1, now_s);
    if (fclose(f) != 0) {
        free(out);
        return NULL;
    }
    return out;
}

/* ---- the file ---- */

/* The directory, made if it can be; false when there is no home. */
static bool cache_dir(char *out, size_t out_bytes)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;

    if (cache && *cache == '/') {
        n = snprintf(out, out_bytes, "%s/k3", cache);
    } else if (home && *home == '/') {
        n = snprintf(out, out_bytes, "%s/.cache", home);
        if (n < 0 || (size_t)n >= out_bytes)
            return false;
        (void)mkdir(out, 0700);
        n = snprintf(out, out_bytes, "%s/.cache/k3", home);
    } else {
        return false;
    }
    if (n < 0 || (size_t)n + 32 >= out_bytes)
        return false;
    (void)mkdir(out, 0700);
    return true;
}

/* The file's text; "" when there is none.  The caller frees it. */
static char *read_text(const char *dir)
{
    char path[4096 + 64], *text = calloc(1, TEXT_MAX + 1);
    size_t got = 0;
    ssize_t n = 0;
    int fd;

    snprintf(path, sizeof(path), "%s/devices", dir);
    fd = text ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    while (fd >= 0 && got < TEXT_MAX && (n = read(fd, text + got, TEXT_MAX - got)) > 0)
        got += (size_t)n;
    if (fd >= 0)
        close(fd);
    if (text && (got == TEXT_MAX || strlen(text) != got))
        memcpy(text, "?", 2); /* too long, or zeros in it: damaged */
    return text;
}

static int find(const char *dir, const char *key, struct k3_io_rate *out)
{
    char *text = read_text(dir);
    int rc = text ? k3_io_rates_find(text, key, (int64_t)time(NULL), out) : -ENOMEM;

    free(text);
    return rc == 0 ? 0 : -ENOENT;
}

static void write_new(const char *dir, const char *key, const struct k3_io_rate *r)
{
    char path[4096 + 64], temporary[4096 + 64], *old = read_text(dir),
         *text = old ? k3_io_rates_with(old, key, r, (int64_t)time(NULL)) : NULL;
    size_t len = text ? strlen(text) : 0;
    int fd = -1;
    bool whole = false;

    snprintf(path, sizeof(path), "%s/devices", dir);
    snprintf(temporary, sizeof(temporary), "%s/devices.%d", dir, (int)getpid());
    if (text)
        fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0) {
        whole = write(fd, text, len) == (ssize_t)len;
        whole = close(fd) == 0 && whole;
        if (!whole || rename(temporary, path) != 0)
            (void)unlink(temporary);
    }
    free(old);
    free(text);
}

/* -1 when it cannot be had: then one measures without it. */
static int lock(const char *dir)
{
    char path[4096 + 64];
    int fd;

    snprintf(path, sizeof(path), "%s/devices.lock", dir);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
    for (int i = 0; fd >= 0 && i < LOCK_TRIES && flock(fd, LOCK_EX | LOCK_NB) != 0; i++)
        nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    return fd;
}

int k3_io_rate_remembered(const struct k3_device *dev, struct k3_io_rate *out)
{
    char dir[4096];

    return cache_dir(dir, sizeof(dir)) ? find(dir, dev->key, out) : -ENOENT;
}

int k3_io_rate_get(const char *const *files, size_t n, struct k3_io_rate *out, struct k3_err *err)
{
    struct k3_device dev;
    char dir[4096];
    bool home;
    int rc, fd;

    *out = (struct k3_io_rate){ .depth = K3_IO_DEPTH_DEFAULT, .block_bytes = K3_IO_BLOCK_DEFAULT };
    if (n == 0)
        return k3_fail(err, -ENODATA, "no file to measure a drive with");
    rc = k3_device_of(files[0], NULL, &dev, err);
    if (rc < 0)
        return rc;
    home = cache_dir(dir, sizeof(dir));
    if (home && find(dir, dev.key, out) == 0)
        return 0;
    fd = home ? lock(dir) : -1;
    rc = home && find(dir, dev.key, out) == 0 ? 1 : k3_calibrate(files, n, K3_CALIBRATE_NS, out, err);
    if (rc == 0 && home)
        write_new(dir, dev.key, out);
    if (fd >= 0)
        close(fd);
    return rc < 0 ? rc : 0;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);

    return n > m && name[0] != '.' && strcmp(name + n - m, end) == 0;
}

int k3_io_rate_of_dir(const char *dir, struct k3_io_rate *out, struct k3_err *err)
{
    char *files[FILES_MAX];
    struct stat here, st;
    struct dirent *e;
    size_t n = 0;
    DIR *d;
    int rc;

    *out = (struct k3_io_rate){ .depth = K3_IO_DEPTH_DEFAULT, .block_bytes = K3_IO_BLOCK_DEFAULT };
    d = opendir(dir);
    if (!d || fstat(dirfd(d), &here) != 0) {
        rc = k3_refuse(err, -errno, "%s: %s", dir, strerror(errno));
        if (d)
            closedir(d);
        return rc;
    }
    while (n < FILES_MAX && (e = readdir(d)))
        if ((ends_with(e->d_name, ".safetensors") || ends_with(e->d_name, ".k3pack")) &&
            fstatat(dirfd(d), e->d_name, &st, 0) == 0 && S_ISREG(st.st_mode) && st.st_dev == here.st_dev &&
            asprintf(&files[n], "%s/%s", dir, e->d_name) >= 0)
            n++;
    closedir(d);
    rc = n ? k3_io_rate_get((const char *const *)files, n, out, err)
           : k3_fail(err, -ENODATA, "no weight file of its own drive in %s", dir);
    while (n > 0)
        free(files[--n]);
    return rc;
}
