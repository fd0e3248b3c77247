/* ipc/reserve.c: the promises of the instances on this machine (memory.h). */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/memory.h"
#include "ipc/parse.h"

#define HEAD "k3 plan 1\npromised "

uint64_t k3_reserve_parse(const char *text)
{
    uint64_t n;
    char number[32];
    size_t len;

    if (strncmp(text, HEAD, strlen(HEAD)) != 0)
        return 0;
    text += strlen(HEAD);
    len = strspn(text, "0123456789");
    if (len == 0 || len >= sizeof(number) || text[len] != '\n')
        return 0;
    memcpy(number, text, len);
    number[len] = 0;
    return k3_parse_u64(number, 0, (uint64_t)1 << 60, &n) == 0 ? n : 0;
}

static int lock(int fd, int how)
{
    int rc;

    do
        rc = flock(fd, how);
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? 0 : -errno;
}

static void file_name(char *out, size_t len, const char *dir, const char *instance)
{
    snprintf(out, len, "%s/k3.%u.%s.plan", dir, (unsigned)geteuid(), instance);
}

/* True while the name leads to what fd is. */
static bool is_current(int fd, const char *path)
{
    struct stat a, b;

    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static int take(struct k3_reservation *r, const char *instance, struct k3_err *err)
{
    int rc = 0;

    for (int i = 0; i < 10; i++) { /* a look at whether it is held holds it, for an instant */
        rc = lock(r->fd, LOCK_EX | LOCK_NB);
        if (rc != -EWOULDBLOCK)
            break;
        usleep(20000);
    }
    if (rc == -EWOULDBLOCK)
        return k3_refuse(err, -EBUSY, "instance \"%s\" is in use: its reservation %s is held; choose another --instance, or "
                         "stop it with: k3-run down --instance %s", instance, r->path, instance);
    if (rc < 0)
        return k3_fail(err, rc, "cannot lock %s: %s", r->path, strerror(-rc));
    return 0;
}

int k3_reserve_open(struct k3_reservation *r, const char *dir, const char *instance, struct k3_err *err)
{
    int rc = -EAGAIN;

    *r = (struct k3_reservation)K3_RESERVATION_INIT;
    file_name(r->path, sizeof(r->path), dir, instance);
    for (int i = 0; i < 10 && rc == -EAGAIN; i++) { /* `down` may remove it between open and lock */
        r->fd = open(r->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0644);
        if (r->fd < 0)
            return k3_fail(err, -errno, "cannot make %s: %s", r->path, strerror(errno));
        rc = take(r, instance, err);
        if (rc == 0 && !is_current(r->fd, r->path))
            rc = -EAGAIN;
        if (rc < 0)
            k3_reserve_close(r, false);
    }
    return rc == -EAGAIN ? k3_fail(err, rc, "%s is removed again and again", r->path) : rc;
}

int k3_reserve_adopt(struct k3_reservation *r, int fd, const char *dir, const char *instance, struct k3_err *err)
{
    int rc;

    *r = (struct k3_reservation){ .fd = fd };
    file_name(r->path, sizeof(r->path), dir, instance);
    rc = take(r, instance, err);
    if (rc == 0 && !is_current(fd, r->path))
        rc = k3_refuse(err, -EINVAL, "--reserve-fd %d: is not %s, or that was just removed; try again", fd, r->path);
    if (rc < 0)
        r->fd = -1;
    return rc;
}

void k3_reserve_clean(const char *dir, const char *instance)
{
    struct k3_reservation r = K3_RESERVATION_INIT;

    file_name(r.path, sizeof(r.path), dir, instance);
    r.fd = open(r.path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (r.fd >= 0)
        k3_reserve_close(&r, lock(r.fd, LOCK_EX | LOCK_NB) == 0);
}

int k3_reserve_begin(int *fd, const char *dir, struct k3_err *err)
{
    int rc;

    *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return k3_fail(err, -errno, "cannot open %s: %s", dir, strerror(errno));
    rc = lock(*fd, LOCK_EX);
    if (rc == 0)
        return 0;
    k3_reserve_end(fd);
    return k3_fail(err, rc, "cannot lock %s: %s", dir, strerror(-rc));
}

void k3_reserve_end(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

int k3_reserve_write(struct k3_reservation *r, uint64_t promised_bytes, struct k3_err *err)
{
    char text[80];
    int n = snprintf(text, sizeof(text), HEAD "%" PRIu64 "\n", promised_bytes);

    /* A reader who looks between the two sees nothing promised, but he would have to hold the directory's lock. */
    if (ftruncate(r->fd, 0) != 0 || pwrite(r->fd, text, (size_t)n, 0) != n || fchmod(r->fd, 0644) != 0)
        return k3_fail(err, errno ? -errno : -EIO, "cannot write %s: %s", r->path, strerror(errno));
    return 0;
}

void k3_reserve_close(struct k3_reservation *r, bool remove)
{
    if (r->fd < 0)
        return;
    if (remove && is_current(r->fd, r->path))
        unlink(r->path);
    close(r->fd);
    r->fd = -1;
}

/* ---- what others have been promised ------------------------------------------------------------------------------- */

static size_t read_some(const char *path, char *out, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    size_t n = 0;
    ssize_t got;

    out[0] = 0;
    if (fd < 0)
        return 0;
    while (n < cap - 1 && (got = read(fd, out + n, cap - 1 - n)) > 0)
        n += (size_t)got;
    out[n] = 0;
    close(fd);
    return n;
}

/* "k3.<uid>.<instance>.plan": fills both. */
static bool plan_name(const char *name, uid_t *uid, char instance[33])
{
    unsigned long u = 0;
    const char *p = name + 3;
    size_t len;

    if (strncmp(name, "k3.", 3) != 0 || !isdigit((unsigned char)*p))
        return false;
    for (; isdigit((unsigned char)*p) && u < 1ul << 32; p++)
        u = u * 10 + (unsigned long)(*p - '0');
    if (*p++ != '.' || u > UINT32_MAX)
        return false;
    len = strcspn(p, ".");
    if (len < 1 || len > 32 || strcmp(p + len, ".plan") != 0)
        return false;
    memcpy(instance, p, len);
    instance[len] = 0;
    *uid = (uid_t)u;
    return true;
}

/* The promise of a file that belongs to the user whom its name says, and whose lock somebody holds. */
static uint64_t living_promise(const char *path, uid_t uid)
{
    char text[128] = "";
    struct stat st;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    uint64_t n = 0;

    if (fd < 0)
        return 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == uid &&
        lock(fd, LOCK_SH | LOCK_NB) == -EWOULDBLOCK) {
        ssize_t got = pread(fd, text, sizeof(text) - 1, 0);

        text[got > 0 ? got : 0] = 0;
        n = k3_reserve_parse(text);
    }
    close(fd);
    return n;
}

uint64_t k3_reserve_promised(const char *dir, const char *instance)
{
    char path[256];

    file_name(path, sizeof(path), dir, instance);
    return living_promise(path, geteuid());
}

/* Segments of an instance, in bytes that are really there.  *data: the large ones are among them. */
static uint64_t segment_bytes(const char *dir, uid_t uid, const char *instance, bool *data)
{
    char prefix[64], path[512];
    uint64_t sum = 0;
    struct dirent *e;
    DIR *d = opendir(dir);

    *data = false;
    snprintf(prefix, sizeof(prefix), "k3.%u.%s.", (unsigned)uid, instance);
    while (d && (e = readdir(d))) {
        struct stat st;

        if (strncmp(e->d_name, prefix, strlen(prefix)) != 0 || strcmp(e->d_name + strlen(prefix), "plan") == 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        *data = *data || strstr(e->d_name, "data");
        if (lstat(path, &st) == 0)
            sum += (uint64_t)st.st_blocks * 512;
    }
    if (d)
        closedir(d);
    return sum;
}

/* Is it one of the instance's: k3-something with --instance NAME? */
static bool is_member(const char *dir, const char *instance)
{
    char path[640], text[8192];
    size_t n, len = strlen(instance) + 1;

    snprintf(path, sizeof(path), "%s/comm", dir);
    read_some(path, text, sizeof(text));
    if (strncmp(text, "k3-", 3) != 0)
        return false;
    snprintf(path, sizeof(path), "%s/cmdline", dir);
    n = read_some(path, text, sizeof(text));
    for (size_t i = 0; i < n; i += strlen(text + i) + 1)
        if (strcmp(text + i, "--instance") == 0 && i + 11 + len <= n + 1 && strcmp(text + i + 11, instance) == 0)
            return true;
    return false;
}

/* Private and shared memory of an instance's processes.  Shared memory lies in more than one of them: the largest counts. */
static void process_bytes(const char *root, uid_t uid, const char *instance, uint64_t *private, uint64_t *shared)
{
    char path[512], text[8192];
    struct dirent *e;
    struct stat st;
    DIR *d;

    *private = *shared = 0;
    snprintf(path, sizeof(path), "%s/proc", root);
    d = opendir(path);
    while (d && (e = readdir(d))) {
        uint64_t n;

        if (!isdigit((unsigned char)e->d_name[0]))
            continue;
        snprintf(path, sizeof(path), "%s/proc/%.32s", root, e->d_name);
        if (stat(path, &st) != 0 || st.st_uid != uid || !is_member(path, instance))
            continue;
        snprintf(path, sizeof(path), "%s/proc/%.32s/status", root, e->d_name);
        read_some(path, text, sizeof(text));
        n = k3_meminfo_bytes(text, "RssAnon");
        *private += n != K3_MEMORY_NONE ? n : 0;
        n = k3_meminfo_bytes(text, "RssShmem");
        if (n != K3_MEMORY_NONE && n > *shared)
            *shared = n;
    }
    if (d)
        closedir(d);
}

uint64_t k3_reserve_others(const char *root, const char *dir, const char *instance, uint32_t *n)
{
    uint64_t sum = 0;
    struct dirent *e;
    DIR *d = opendir(dir);

    *n = 0;
    while (d && (e = readdir(d))) {
        uint64_t promised, segments, private, shared, taken;
        char path[512], name[33];
        bool data;
        uid_t uid;

        if (!plan_name(e->d_name, &uid, name) || (uid == geteuid() && strcmp(name, instance) == 0))
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        promised = living_promise(path, uid);
        if (promised == 0)
            continue;
        ++*n;
        segments = segment_bytes(dir, uid, name, &data);
        process_bytes(root, uid, name, &private, &shared);
        /* A ring is mapped twice and counts twice in a process, so its file is the better witness, if it has one. */
        taken = private + (data || segments > shared ? segments : shared);
        if (taken < promised && __builtin_add_overflow(sum, promised - taken, &sum))
            sum = UINT64_MAX / 2;
    }
    if (d)
        closedir(d);
    return sum;
}
