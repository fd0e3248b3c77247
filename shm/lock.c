/* The run directory and the kernel locks that say who is alive (shm/segment.h). */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "shm/segment.h"

#define SOCKET_PATH_MAX 107 /* sun_path without its NUL */
#define LONGEST_FILE 16     /* "/k3-computed.ctl" */

static int own_dir(const char *path, bool create, struct k3_err *err)
{
    struct stat st;

    if (create && mkdir(path, 0700) != 0 && errno != EEXIST)
        return k3_refuse(err, -errno, "run directory %s: cannot be made: %s", path,
                         strerror(errno));
    if (lstat(path, &st) != 0) {
        if (errno == ENOENT)
            return k3_fail(err, -ENOENT, "run directory %s: not there", path);
        return k3_refuse(err, -errno, "run directory %s: %s", path, strerror(errno));
    }
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0)
        return k3_refuse(
            err, -EPERM,
            "run directory %s: mode %04o owner %u, must be a directory of mode 0700 and owner %u",
            path, (unsigned)(st.st_mode & 07777), (unsigned)st.st_uid, (unsigned)geteuid());
    return 0;
}

int k3_rundir(char *out, size_t len, const char *instance, bool create, struct k3_err *err)
{
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    char parent[512];
    int rc = k3_instance_check(instance, err), n;

    if (rc < 0)
        return rc;
    if (xdg && xdg[0] == '/')
        n = snprintf(parent, sizeof(parent), "%s/k3", xdg);
    else
        n = snprintf(parent, sizeof(parent), "/tmp/k3-%u", (unsigned)geteuid());
    if (n < 0 || (size_t)n >= sizeof(parent) ||
        (size_t)n + 1 + strlen(instance) + LONGEST_FILE > SOCKET_PATH_MAX ||
        (size_t)n + 1 + strlen(instance) >= len)
        return k3_refuse(
            err, -ENAMETOOLONG,
            "run directory %.200s/%s: too long for a socket's path, at most %d characters fit (see "
            "XDG_RUNTIME_DIR, --instance)",
            parent, instance, SOCKET_PATH_MAX - LONGEST_FILE);
    snprintf(out, len, "%s/%s", parent, instance);
    rc = own_dir(parent, create, err);
    return rc < 0 ? rc : own_dir(out, create, err);
}

static void lock_path(char *out, size_t len, const char *rundir, const char *daemon)
{
    snprintf(out, len, "%s/%s.lock", rundir, daemon);
}

static void nap_ms(long ms)
{
    nanosleep(&(struct timespec){ 0, ms * 1000000 }, NULL);
}

static void read_lock_text(int fd, uint32_t *generation, long *pid)
{
    char text[64];
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    unsigned g = 0;
    long p = 0;

    text[n > 0 ? n : 0] = 0;
    if (sscanf(text, "%u %ld", &g, &p) < 1)
        g = 0;
    *generation = g;
    *pid = p;
}

int k3_lock_take(int *fd, uint32_t *generation, const char *rundir, const char *daemon,
                 struct k3_err *err)
{
    char path[640], text[64];
    long pid = 0;
    uint32_t gen = 0;
    int f = -1, n;

    *fd = -1;
    lock_path(path, sizeof(path), rundir, daemon);
    for (int tries = 0; tries < 50; tries++) {
        struct stat named, ours;

        if (f < 0)
            f = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f < 0)
            return k3_fail(err, -errno, "lock %s: %s", path, strerror(errno));
        if (flock(f, LOCK_EX | LOCK_NB) == 0) {
            /* `k3-run down` may have removed the file between our open and our lock. */
            if (fstat(f, &ours) == 0 && stat(path, &named) == 0 && ours.st_ino == named.st_ino)
                goto locked;
            close(f);
            f = -1;
            continue;
        }
        if (errno != EWOULDBLOCK && errno != EINTR) {
            n = k3_fail(err, -errno, "lock %s: %s", path, strerror(errno));
            close(f);
            return n;
        }
        nap_ms(10); /* a prober holds it shared for a moment */
    }
    if (f >= 0) {
        read_lock_text(f, &gen, &pid);
        close(f);
    }
    return k3_refuse(
        err, -EBUSY,
        "%s: already running in this instance as pid %ld (lock %s); choose another --instance",
        daemon, pid, path);
locked:
    read_lock_text(f, &gen, &pid);
    gen = gen == UINT32_MAX ? 1 : gen + 1;
    n = snprintf(text, sizeof(text), "%" PRIu32 " %ld\n", gen, (long)getpid());
    if (pwrite(f, text, (size_t)n, 0) != n || ftruncate(f, n) != 0) {
        n = k3_fail(err, errno ? -errno : -EIO, "lock %s: cannot write the generation: %s", path,
                    strerror(errno));
        close(f);
        return n;
    }
    *fd = f;
    *generation = gen;
    return 0;
}

void k3_lock_drop(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

bool k3_lock_alive(const char *rundir, const char *daemon)
{
    char path[640];
    bool alive = false;
    int fd;

    lock_path(path, sizeof(path), rundir, daemon);
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    if (flock(fd, LOCK_SH | LOCK_NB) != 0)
        alive = errno == EWOULDBLOCK;
    close(fd);
    return alive;
}
