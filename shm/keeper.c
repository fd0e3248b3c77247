#include "shm/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ANSWER_S 2       /* a keeper that is stopped must not stop us */
#define AGAIN_MS 100     /* between two looks for a new keeper */
#define STACK_BYTES (128u << 10)

union control { /* room for one descriptor, aligned */
    struct cmsghdr head;
    char space[CMSG_SPACE(sizeof(int))];
};

int k3_keeper_send(int sock, const struct k3_keeper_msg *m, int fd)
{
    struct iovec v = { (void *)(uintptr_t)m, sizeof(*m) };
    union control c;
    struct msghdr h = { .msg_iov = &v, .msg_iovlen = 1 };
    ssize_t n;

    if (fd >= 0) {
        memset(&c, 0, sizeof(c));
        h.msg_control = &c;
        h.msg_controllen = sizeof(c.space);
        c.head.cmsg_level = SOL_SOCKET;
        c.head.cmsg_type = SCM_RIGHTS;
        c.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&c.head), &fd, sizeof(fd));
    }
    do
        n = sendmsg(sock, &h, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : 0;
}

/* The first descriptor that came; all others are closed, and then it is true. */
static bool take_descriptors(struct msghdr *h, int *fd)
{
    bool extra = false;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
        size_t n = c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS
                       ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int)
                       : 0;

        for (size_t i = 0; i < n; i++) {
            int one;

            memcpy(&one, CMSG_DATA(c) + i * sizeof(one), sizeof(one));
            if (*fd < 0) {
                *fd = one;
            } else {
                close(one);
                extra = true;
            }
        }
    }
    return extra;
}

int k3_keeper_recv(int sock, struct k3_keeper_msg *m, int *fd)
{
    struct iovec v = { m, sizeof(*m) };
    union control c;
    struct msghdr h = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &c,
                        .msg_controllen = sizeof(c.space) };
    bool extra;
    ssize_t n;

    *fd = -1;
    memset(&c, 0, sizeof(c));
    do
        n = recvmsg(sock, &h, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    extra = take_descriptors(&h, fd);
    if (n == 0 && *fd < 0 && !extra)
        return -EPIPE;
    if (n != (ssize_t)sizeof(*m) || (h.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || extra ||
        k3_keeper_check(m) < 0) {
        if (*fd >= 0)
            close(*fd);
        *fd = -1;
        return -EPROTO;
    }
    return 0;
}

int k3_keeper_check(const struct k3_keeper_msg *m)
{
    size_t len = strnlen(m->name, sizeof(m->name));

    if (m->magic != K3_KEEPER_MAGIC || m->version != K3_KEEPER_VERSION ||
        m->op < K3_KEEPER_STORE || m->op > K3_KEEPER_DROP || m->len_bytes > INT64_MAX ||
        len == 0 || len == sizeof(m->name))
        return -EPROTO;
    for (size_t i = 0; i < len; i++)
        if (m->name[i] < 'a' || m->name[i] > 'z')
            return -EPROTO;
    for (size_t i = len; i < sizeof(m->name); i++)
        if (m->name[i])
            return -EPROTO;
    return 0;
}

/* ---- one request ---- */

static int connect_keeper(const char *rundir)
{
    const struct timeval limit = { ANSWER_S, 0 };
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    struct ucred peer;
    socklen_t len = sizeof(peer);
    int s, n = snprintf(a.sun_path, sizeof(a.sun_path), "%s/" K3_KEEPER_SOCK, rundir);

    if (n < 0 || (size_t)n >= sizeof(a.sun_path))
        return -ECONNREFUSED;
    s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0)
        return -errno;
    /* Before connect, which waits as well when nobody accepts. */
    (void)setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    (void)setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(s, (struct sockaddr *)&a, sizeof(a)) != 0 ||
        getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.uid != geteuid()) {
        close(s);
        return -ECONNREFUSED;
    }
    return s;
}

/* *got (may be NULL) and *len: of a FETCH. */
static int ask(int sock, enum k3_keeper_op op, const char *what, uint64_t len_bytes, int fd,
               int *got, uint64_t *len)
{
    struct k3_keeper_msg m = { .magic = K3_KEEPER_MAGIC, .version = K3_KEEPER_VERSION, .op = op,
                               .len_bytes = len_bytes };
    int rc, came = -1;

    snprintf(m.name, sizeof(m.name), "%s", what);
    rc = k3_keeper_send(sock, &m, fd);
    if (rc == 0)
        rc = k3_keeper_recv(sock, &m, &came);
    if (rc < 0)
        return -ECONNREFUSED;
    rc = m.op == op && m.status <= 0 && m.status > -4096 ? m.status : -EPROTO;
    if (rc == 0 && got && came < 0)
        rc = -EPROTO;
    if (rc == 0 && got) {
        *got = came;
        *len = m.len_bytes;
    } else if (came >= 0) {
        close(came);
    }
    return rc;
}

static int once(const char *rundir, enum k3_keeper_op op, const char *what, uint64_t len_bytes,
                int fd, int *got, uint64_t *len)
{
    int sock = connect_keeper(rundir), rc;

    if (sock < 0)
        return sock;
    rc = ask(sock, op, what, len_bytes, fd, got, len);
    close(sock);
    return rc;
}

int k3_keeper_store(const char *rundir, const struct k3_seg *s, const char *what, bool if_absent)
{
    return once(rundir, if_absent ? K3_KEEPER_STORE_ABSENT : K3_KEEPER_STORE, what, s->len_bytes,
                s->fd, NULL, NULL);
}

int k3_keeper_fetch(const char *rundir, const char *what, int *fd, uint64_t *len_bytes)
{
    *fd = -1;
    return once(rundir, K3_KEEPER_FETCH, what, 0, -1, fd, len_bytes);
}

int k3_keeper_drop(const char *rundir, const char *what)
{
    return once(rundir, K3_KEEPER_DROP, what, 0, -1, NULL, NULL);
}

/* ---- the guard ---- */

struct k3_guard {
    pthread_t thread;
    int fd, stop_fd;
    uint64_t len_bytes;
    bool owner;
    char rundir[512], what[40];
};

/* True when the guard is to end. */
static bool stopped(const struct k3_guard *g, int sock, int timeout_ms)
{
    struct pollfd p[2] = { { g->stop_fd, POLLIN, 0 }, { sock, POLLIN | POLLRDHUP, 0 } };

    (void)poll(p, sock < 0 ? 1 : 2, timeout_ms);
    return p[0].revents != 0;
}

static void *guard(void *arg)
{
    struct k3_guard *g = arg;

    for (;;) {
        int sock = connect_keeper(g->rundir);

        if (sock >= 0 && ask(sock, g->owner ? K3_KEEPER_STORE : K3_KEEPER_STORE_ABSENT, g->what,
                             g->len_bytes, g->fd, NULL, NULL) == 0) {
            bool stop = stopped(g, sock, -1); /* until the keeper is gone */

            close(sock);
            if (stop)
                return NULL;
        } else if (sock >= 0) {
            close(sock);
        }
        if (stopped(g, -1, AGAIN_MS))
            return NULL;
    }
}

int k3_guard_open(struct k3_guard **out, const char *rundir, const struct k3_seg *s,
                  const char *what, bool owner, struct k3_err *err)
{
    struct k3_guard *g = calloc(1, sizeof(*g));
    pthread_attr_t attr;
    int rc = 0;

    *out = NULL;
    if (!g)
        return k3_fail(err, -ENOMEM, "segment %s: no memory for its guard", s->name);
    g->len_bytes = s->len_bytes;
    g->owner = owner;
    snprintf(g->what, sizeof(g->what), "%s", what);
    snprintf(g->rundir, sizeof(g->rundir), "%s", rundir);
    g->stop_fd = eventfd(0, EFD_CLOEXEC);
    g->fd = fcntl(s->fd, F_DUPFD_CLOEXEC, 0);
    if (g->stop_fd < 0 || g->fd < 0)
        rc = -errno;
    if (rc == 0) {
        pthread_attr_init(&attr);
        (void)pthread_attr_setstacksize(&attr, STACK_BYTES); /* smaller than allowed: the default */
        rc = -pthread_create(&g->thread, &attr, guard, g);
        pthread_attr_destroy(&attr);
    }
    if (rc < 0) {
        if (g->fd >= 0)
            close(g->fd);
        if (g->stop_fd >= 0)
            close(g->stop_fd);
        free(g);
        return k3_fail(err, rc, "segment %s: its guard cannot start: %s", s->name, strerror(-rc));
    }
    *out = g;
    return 0;
}

void k3_guard_close(struct k3_guard *g)
{
    if (!g)
        return;
    while (eventfd_write(g->stop_fd, 1) != 0 && errno == EINTR)
        ;
    pthread_join(g->thread, NULL);
    close(g->fd);
    close(g->stop_fd);
    free(g);
}
