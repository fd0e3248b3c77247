/* The server side of ipc/msg.h.
 *
 * nng 1.5.2 has a flaw that a daemon must not inherit: when a peer closes its connection before the
 * handshake is over (a client killed at the wrong moment; a client that gave up on a stopped
 * daemon), the listener treats that as its own end and never accepts again, while connections still
 * seem to succeed.  So a keeper thread looks at the listener's error count once a second; when it
 * moved, it makes one connection of its own, and when that does not arrive it makes the listener
 * anew. */
#include <errno.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "ipc/msg.h"

#ifdef __SANITIZE_ADDRESS__
/* nng 1.5.2 never frees a listener that is closed while a connection waits in it: about 13 KB each
 * time that the keeper had to act.  Without this the address sanitizer would fail whatever test
 * makes that happen. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:listen_anew\n";
}
#endif

#define LOOK_NS 1000000000u
#define PROBE_NS 1000000000u

struct context {
    struct k3_server *server;
    nng_ctx ctx;
    nng_aio *aio;
    pthread_t thread;
    bool has_thread;
};
struct k3_server {
    nng_socket sock;
    nng_listener listener;
    bool has_sock, has_keeper;
    char path[640];
    k3_serve_fn *fn;
    void *arg;
    pthread_t keeper;
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool leave;          /* under lock */
    unsigned n_busy;     /* under lock; requests received and not yet answered */
    uint64_t n_accepted; /* under lock; connections that passed the handshake */
    unsigned n_contexts;
    struct context context[];
};

static nng_msg *answer(struct k3_server *s, nng_msg *request)
{
    cJSON *reply = cJSON_CreateObject(), *root;
    const char *cmd;
    char *text = NULL;
    nng_msg *out = NULL;

    root = k3_msg_parse(nng_msg_body(request), nng_msg_len(request), &cmd, reply);
    nng_msg_free(request);
    if (root) {
        s->fn(s->arg, cmd, root, reply);
        if (!cJSON_HasObjectItem(reply, "ok"))
            cJSON_AddBoolToObject(reply, "ok", true);
        cJSON_Delete(root);
    }
    text = cJSON_PrintUnformatted(reply);
    cJSON_Delete(reply);
    if (nng_msg_alloc(&out, 0) == 0 &&
        nng_msg_append(
            out,
            text ? text
                 : "{\"ok\":false,\"error\":\"out of memory\",\"code\":1,\"errno\":\"ENOMEM\"}",
            text ? strlen(text) : 65) != 0) {
        nng_msg_free(out);
        out = NULL;
    }
    cJSON_free(text);
    return out;
}

static void count_busy(struct k3_server *s, int by)
{
    pthread_mutex_lock(&s->lock);
    s->n_busy += (unsigned)by;
    pthread_cond_broadcast(&s->news);
    pthread_mutex_unlock(&s->lock);
}

static void *serve(void *arg)
{
    struct context *c = arg;

    for (;;) {
        nng_msg *reply;
        int rc;

        nng_ctx_recv(c->ctx, c->aio);
        nng_aio_wait(c->aio);
        rc = nng_aio_result(c->aio);
        if (rc == NNG_ECLOSED || rc == NNG_ECANCELED)
            return NULL;
        if (rc != 0)
            continue;
        count_busy(c->server, 1);
        reply = answer(c->server, nng_aio_get_msg(c->aio));
        if (reply) { /* else the client's timeout tells it */
            nng_aio_set_msg(c->aio, reply);
            nng_ctx_send(c->ctx, c->aio);
            nng_aio_wait(c->aio);
            if (nng_aio_result(c->aio) != 0)
                nng_msg_free(reply);
        }
        count_busy(c->server, -1);
    }
}

static void accepted(nng_pipe p, nng_pipe_ev ev, void *arg)
{
    struct k3_server *s = arg;

    (void)p;
    (void)ev;
    pthread_mutex_lock(&s->lock);
    s->n_accepted++;
    pthread_cond_broadcast(&s->news);
    pthread_mutex_unlock(&s->lock);
}

static int listen_anew(struct k3_server *s)
{
    char url[700];
    int rc;

    snprintf(url, sizeof(url), "ipc://%s", s->path);
    rc = nng_listener_create(&s->listener, s->sock, url);
    if (rc == 0)
        rc = nng_listener_set_int(s->listener, NNG_OPT_IPC_PERMISSIONS, 0600);
    /* Twice the limit gets in, so that a message a little too large is answered and not just cut
     * off. */
    if (rc == 0)
        rc = nng_listener_set_size(s->listener, NNG_OPT_RECVMAXSZ, 2 * (size_t)K3_MSG_MAX);
    if (rc == 0)
        rc = nng_listener_start(s->listener, 0);
    return rc;
}

/* Errors that our listener has counted so far (closed connections are among them). */
static uint64_t listener_errors(const struct k3_server *s)
{
    nng_stat *root;
    uint64_t n = 0;

    if (nng_stats_get(&root) != 0)
        return 0;
    for (nng_stat *l = nng_stat_child(root); l; l = nng_stat_next(l)) {
        bool ours = false;
        uint64_t other = 0;

        if (strncmp(nng_stat_name(l), "listener", 8) != 0)
            continue;
        for (nng_stat *e = nng_stat_child(l); e; e = nng_stat_next(e)) {
            if (strcmp(nng_stat_name(e), "id") == 0)
                ours = nng_stat_value(e) == (uint64_t)nng_listener_id(s->listener);
            else if (strcmp(nng_stat_name(e), "other") == 0)
                other = nng_stat_value(e);
        }
        if (ours)
            n = other;
    }
    nng_stats_free(root);
    return n;
}

/* Waits, at most wait_ns, until more than n_accepted connections have come or the server ends. Lock
 * held. */
static void wait_news(struct k3_server *s, uint64_t wait_ns, uint64_t n_accepted)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(wait_ns / 1000000000u);
    until.tv_nsec += (long)(wait_ns % 1000000000u);
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    while (!s->leave && s->n_accepted <= n_accepted)
        if (pthread_cond_timedwait(&s->news, &s->lock, &until) == ETIMEDOUT)
            break;
}

/* One connection of our own, with the handshake of a REQ peer.  True when it arrived. */
static bool probe(struct k3_server *s)
{
    static const char handshake[8] = { 0, 'S', 'P', 0, 0, 0x30, 0, 0 };
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    uint64_t before;
    bool arrived = false;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 || strlen(s->path) >= sizeof(a.sun_path)) {
        if (fd >= 0)
            close(fd);
        return true; /* nothing was learned */
    }
    strcpy(a.sun_path, s->path);
    pthread_mutex_lock(&s->lock);
    before = s->n_accepted;
    pthread_mutex_unlock(&s->lock);
    if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 &&
        send(fd, handshake, sizeof(handshake), MSG_NOSIGNAL) == (ssize_t)sizeof(handshake)) {
        pthread_mutex_lock(&s->lock);
        wait_news(s, PROBE_NS, before);
        arrived = s->leave || s->n_accepted > before;
        pthread_mutex_unlock(&s->lock);
    }
    close(fd);
    return arrived;
}

static void *keep(void *arg)
{
    struct k3_server *s = arg;
    uint64_t errors = 0;

    pthread_mutex_lock(&s->lock);
    while (!s->leave) {
        wait_news(s, LOOK_NS, UINT64_MAX);
        if (s->leave)
            break;
        pthread_mutex_unlock(&s->lock);
        if (listener_errors(s) != errors) {
            if (!probe(s)) {
                int rc;

                nng_listener_close(s->listener);
                unlink(s->path);
                rc = listen_anew(s);
                k3_log(rc == 0 ? K3_LOG_WARN : K3_LOG_ERROR, "socket_renewed",
                       "path=%s text=\"%s\"", s->path,
                       rc == 0 ? "a connection broke in its handshake" : nng_strerror(rc));
            }
            errors = listener_errors(s);
        }
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int k3_server_open(struct k3_server **out, const char *rundir, const char *name,
                   unsigned n_contexts, k3_serve_fn *fn, void *arg, struct k3_err *err)
{
    struct k3_server *s = calloc(1, sizeof(*s) + n_contexts * sizeof(struct context));
    pthread_condattr_t attr;
    int rc;

    *out = NULL;
    if (!s)
        return k3_fail(err, -ENOMEM, "socket %s: no memory", name);
    s->fn = fn;
    s->arg = arg;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->news, &attr);
    pthread_condattr_destroy(&attr);
    snprintf(s->path, sizeof(s->path), "%s/%s", rundir, name);
    unlink(s->path); /* left by a killed predecessor: the caller holds the daemon's lock, so nobody
                        serves it */
    rc = nng_rep0_open(&s->sock);
    s->has_sock = rc == 0;
    if (rc == 0)
        rc = nng_pipe_notify(s->sock, NNG_PIPE_EV_ADD_POST, accepted, s);
    for (unsigned i = 0; i < n_contexts && rc == 0; i++) {
        struct context *c = &s->context[i];

        s->n_contexts++;
        c->server = s;
        rc = nng_ctx_open(&c->ctx, s->sock);
        if (rc == 0)
            rc = nng_aio_alloc(&c->aio, NULL, NULL);
        if (rc == 0) {
            rc = pthread_create(&c->thread, NULL, serve, c) == 0 ? 0 : NNG_ENOMEM;
            c->has_thread = rc == 0;
        }
    }
    if (rc == 0)
        rc = listen_anew(s);
    if (rc == 0) {
        rc = pthread_create(&s->keeper, NULL, keep, s) == 0 ? 0 : NNG_ENOMEM;
        s->has_keeper = rc == 0;
    }
    if (rc != 0) {
        k3_server_close(s);
        return k3_fail(err, -EIO, "socket %s/%s: %s", rundir, name, nng_strerror(rc));
    }
    *out = s;
    return 0;
}

void k3_server_close(struct k3_server *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->leave = true;
    pthread_cond_broadcast(&s->news);
    while (s->n_busy > 0) /* who asked for the shutdown wants its answer; the threads are joined
                             below in any case */
        pthread_cond_wait(&s->news, &s->lock);
    pthread_mutex_unlock(&s->lock);
    if (s->has_keeper)
        pthread_join(s->keeper, NULL);
    if (s->has_sock)
        nng_close(s->sock); /* ends every waiting receive */
    for (unsigned i = 0; i < s->n_contexts; i++) {
        if (s->context[i].has_thread)
            pthread_join(s->context[i].thread, NULL);
        if (s->context[i].aio)
            nng_aio_free(s->context[i].aio);
    }
    if (s->has_sock)
        unlink(s->path);
    pthread_cond_destroy(&s->news);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
