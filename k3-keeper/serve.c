/* From options to a socket, the loop, and back. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "k3-keeper/keeper.h"

const struct k3_stat_def k3_keeper_stats[K3_PS_N] = {
    [K3_PS_SEGMENTS] = { "segments", "count", "data segments that are kept", K3_GAUGE },
    [K3_PS_BYTES] = { "kept_bytes", "bytes", "length of all kept segments", K3_GAUGE },
    [K3_PS_STORES] = { "stores", "count", "segments handed over", K3_COUNTER },
    [K3_PS_FETCHES] = { "fetches", "count", "requests for a segment", K3_COUNTER },
    [K3_PS_DROPS] = { "drops", "count", "requests to let go of a segment", K3_COUNTER },
    [K3_PS_REFUSED] = { "refused", "count", "connections of other users and messages that cannot be", K3_COUNTER },
};

static void info(void *arg, cJSON *reply)
{
    struct k3_keeper *k = arg;
    cJSON *list = cJSON_AddArrayToObject(reply, "segments");

    pthread_mutex_lock(&k->lock);
    for (int i = 0; i < K3_KEEPER_SEGS; i++)
        if (k->keep.seg[i].name[0]) {
            cJSON *s = cJSON_CreateObject();

            cJSON_AddStringToObject(s, "name", k->keep.seg[i].name);
            cJSON_AddNumberToObject(s, "bytes", (double)k->keep.seg[i].len_bytes);
            cJSON_AddItemToArray(list, s);
        }
    pthread_mutex_unlock(&k->lock);
}

static void wake(void *arg)
{
    struct k3_keeper *k = arg;

    (void)eventfd_write(k->wake_fd, 1);
}

static int open_socket(struct k3_keeper *k, struct k3_err *err)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int n = snprintf(a.sun_path, sizeof(a.sun_path), "%s/" K3_KEEPER_SOCK, k3_daemon_rundir(k->daemon));

    if (n < 0 || (size_t)n >= sizeof(a.sun_path))
        return k3_fail(err, -ENAMETOOLONG, "socket in %s: the path is too long", k3_daemon_rundir(k->daemon));
    unlink(a.sun_path); /* left by a killed predecessor: we hold its lock */
    k->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* The mode is set before there is a name, so at no moment can somebody else connect. */
    if (k->listen_fd < 0 || fchmod(k->listen_fd, 0600) != 0 ||
        bind(k->listen_fd, (struct sockaddr *)&a, sizeof(a)) != 0)
        return k3_fail(err, -errno, "socket %s: %s", a.sun_path, strerror(errno));
    snprintf(k->path, sizeof(k->path), "%s", a.sun_path);
    if (listen(k->listen_fd, 16) != 0)
        return k3_fail(err, -errno, "socket %s: %s", a.sun_path, strerror(errno));
    return 0;
}

int k3_keeper_open(struct k3_keeper *k, struct k3_err *err)
{
    int rc;

    k->listen_fd = k->wake_fd = -1;
    for (int i = 0; i < K3_KEEPER_CLIENTS; i++)
        k->client[i] = -1;
    rc = k3_daemon_open(&k->daemon, K3_KEEPER_NAME, &k->opt, k3_keeper_stats, K3_PS_N, NULL, info, k, err);
    if (rc < 0)
        return rc;
    k->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (k->wake_fd < 0)
        return k3_fail(err, -errno, "eventfd: %s", strerror(errno));
    /* The first of an instance has nothing to wait for. */
    if (k3_daemon_generation(k->daemon) > 1)
        k->keep.settled_ns = k3_now_ns() + K3_KEEPER_SETTLE_NS;
    k3_daemon_on_stop(k->daemon, wake, k);
    return open_socket(k, err);
}

static void count(struct k3_keeper *k, enum k3_keeper_stat id)
{
    k3_stat_add(k3_daemon_stats(k->daemon), id, 1);
}

static void accept_one(struct k3_keeper *k)
{
    struct ucred peer;
    socklen_t len = sizeof(peer);
    int s = accept4(k->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (s < 0)
        return;
    if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.uid != geteuid()) {
        k3_log(K3_LOG_WARN, "client_refused", "uid=%u", (unsigned)peer.uid);
        count(k, K3_PS_REFUSED);
        close(s);
        return;
    }
    for (int i = 0; i < K3_KEEPER_CLIENTS; i++)
        if (k->client[i] < 0) {
            k->client[i] = s;
            return;
        }
    count(k, K3_PS_REFUSED);
    close(s);
}

static void set_gauges(struct k3_keeper *k)
{
    uint64_t n = 0, bytes = 0;

    for (int i = 0; i < K3_KEEPER_SEGS; i++) {
        n += k->keep.seg[i].name[0] != 0;
        bytes += k->keep.seg[i].len_bytes;
    }
    k3_stat_set(k3_daemon_stats(k->daemon), K3_PS_SEGMENTS, n);
    k3_stat_set(k3_daemon_stats(k->daemon), K3_PS_BYTES, bytes);
}

/* False when the client is to be let go. */
static bool answer_one(struct k3_keeper *k, int sock)
{
    static const char *const op_name[] = { "", "store", "store_absent", "fetch", "drop" };
    struct k3_keeper_msg m;
    int fd, out, rc = k3_keeper_recv(sock, &m, &fd);

    if (rc == -EAGAIN)
        return true;
    if (rc == -EPROTO)
        count(k, K3_PS_REFUSED);
    if (rc < 0)
        return false;
    count(k, m.op == K3_KEEPER_FETCH ? K3_PS_FETCHES : m.op == K3_KEEPER_DROP ? K3_PS_DROPS : K3_PS_STORES);
    pthread_mutex_lock(&k->lock);
    out = k3_keep_answer(&k->keep, &m, fd, k3_now_ns());
    pthread_mutex_unlock(&k->lock);
    set_gauges(k);
    k3_log(K3_LOG_DEBUG, op_name[m.op], "name=%s bytes=%" PRIu64 " status=%d", m.name, m.len_bytes, m.status);
    return k3_keeper_send(sock, &m, out) == 0; /* who does not take its answer is let go */
}

int k3_keeper_serve(struct k3_keeper *k, struct k3_err *err)
{
    k3_daemon_ready(k->daemon);
    while (!k3_daemon_stopping(k->daemon)) {
        struct pollfd p[2 + K3_KEEPER_CLIENTS] = { { k->wake_fd, POLLIN, 0 }, { k->listen_fd, POLLIN, 0 } };

        for (int i = 0; i < K3_KEEPER_CLIENTS; i++)
            p[2 + i] = (struct pollfd){ k->client[i], POLLIN, 0 };
        k3_daemon_beat(k->daemon);
        if (poll(p, 2 + K3_KEEPER_CLIENTS, K3_TICK_NS / 1000000) < 0 && errno != EINTR)
            return k3_fail(err, -errno, "poll: %s", strerror(errno));
        for (int i = 0; i < K3_KEEPER_CLIENTS; i++)
            if (k->client[i] >= 0 && p[2 + i].revents && !answer_one(k, k->client[i])) {
                close(k->client[i]);
                k->client[i] = -1;
            }
        if (p[1].revents)
            accept_one(k);
    }
    return 0;
}

void k3_keeper_close(struct k3_keeper *k)
{
    if (k->daemon)
        k3_daemon_ctl_end(k->daemon);
    for (int i = 0; i < K3_KEEPER_CLIENTS; i++)
        if (k->client[i] >= 0)
            close(k->client[i]);
    if (k->path[0])
        unlink(k->path);
    if (k->listen_fd >= 0)
        close(k->listen_fd);
    k3_keep_close(&k->keep);
    k3_daemon_close(k->daemon);
    if (k->wake_fd >= 0)
        close(k->wake_fd);
}
