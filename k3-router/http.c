/* --http: start, serve, end. */
#include "k3-router/http.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define CONNECTION_BYTES 65536u /* head of a request at most, less what libmicrohttpd needs */
#define BACKLOG 128
#define STOP_NS 6000000000ull   /* for running answers to say that they end; k3-run kills after 8 s */
#define FLUSH_NS 500000000ull   /* for what was said to leave */

static int refuse_open_door(const struct k3_http *h, struct k3_err *err)
{
    if (h->addr.loopback || h->keys.n)
        return 0;
    return k3_refuse(err, -EACCES, "--http %s: anybody in the network could ask; give --api-key-file FILE, or listen on 127.0.0.1",
                     h->r->opt.http);
}

static int listen_on(struct k3_http *h, struct k3_err *err)
{
    const struct sockaddr *sa = (const struct sockaddr *)&h->addr.sa;
    int one = 1, fd = socket(h->addr.sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return k3_refuse(err, -errno, "--http %s: %s", h->r->opt.http, strerror(errno));
    h->listen_fd = fd;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (h->addr.sa.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
    h->addr.len = sizeof(h->addr.sa);
    if (bind(fd, sa, h->addr.sa.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)) != 0 ||
        listen(fd, BACKLOG) != 0 || getsockname(fd, (struct sockaddr *)&h->addr.sa, &h->addr.len) != 0)
        return k3_refuse(err, -errno, "--http %s: %s", h->r->opt.http, errno == EADDRINUSE ? "another program listens there"
                         : strerror(errno));
    k3_http_addr_text(&h->addr, h->addr_text, sizeof(h->addr_text));
    return 0;
}

/* Connections, and a socket of each answer to k3-computed. */
static void allow_descriptors(void)
{
    struct rlimit l;

    if (getrlimit(RLIMIT_NOFILE, &l) == 0 && l.rlim_cur < l.rlim_max) {
        l.rlim_cur = l.rlim_max;
        setrlimit(RLIMIT_NOFILE, &l);
    }
}

static int start_mhd(struct k3_http *h, struct k3_err *err)
{
    const struct k3_router_opts *o = &h->r->opt;

    h->mhd = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL,
                              k3_http_access, h,
                              MHD_OPTION_LISTEN_SOCKET, h->listen_fd,
                              MHD_OPTION_CONNECTION_LIMIT, (unsigned)o->connections,
                              MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)o->client_timeout_s,
                              MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES,
                              MHD_OPTION_NOTIFY_COMPLETED, k3_http_completed, h,
                              MHD_OPTION_NOTIFY_CONNECTION, k3_http_connection, h,
                              MHD_OPTION_URI_LOG_CALLBACK, k3_http_line, h,
                              MHD_OPTION_END);
    if (!h->mhd)
        return k3_fail(err, -EAGAIN, "--http %s: libmicrohttpd does not start: %s", o->http, strerror(errno));
    h->listen_fd = -1;
    return 0;
}

static int start_threads(struct k3_http *h, struct k3_err *err)
{
    pthread_t *thread[] = { &h->watch, &h->peer_thread, &h->prepare[0], &h->prepare[1] };
    void *(*fn[])(void *) = { k3_http_watch_thread, k3_http_peer_thread, k3_http_prepare_thread, k3_http_prepare_thread };

    for (; h->n_threads < 4; h->n_threads++)
        if (pthread_create(thread[h->n_threads], NULL, fn[h->n_threads], h) != 0)
            return k3_fail(err, -EAGAIN, "--http: a thread cannot be started");
    return 0;
}

static void name_model(struct k3_http *h)
{
    const struct k3_router *r = h->r;
    char *path = realpath(r->model_dir, NULL);
    const char *slash = path ? strrchr(path, '/') : NULL;

    snprintf(h->name, sizeof(h->name), "%s", r->opt.served_name ? r->opt.served_name : slash && slash[1] ? slash + 1 : "k3");
    free(path);
}

static void info(void *arg, cJSON *reply)
{
    struct k3_http *h = arg;

    cJSON_AddStringToObject(reply, "address", h->addr_text);
    cJSON_AddStringToObject(reply, "model", h->r->model_dir);
    cJSON_AddStringToObject(reply, "served_name", h->name);
    cJSON_AddBoolToObject(reply, "api_keys", h->keys.n > 0);
}

/* ---- the end ---- */

static bool wait_until(struct k3_http *h, uint64_t until, bool (*over)(const struct k3_http *))
{
    static const struct timespec pause = { 0, 20000000 };
    bool done = false;

    while (!done && k3_now_ns() < until) {
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&h->lock);
        done = over(h);
        pthread_mutex_unlock(&h->lock);
    }
    return done;
}

static bool nothing_runs(const struct k3_http *h)
{
    return h->n_running == 0 && h->n_reserved == 0 && !h->prepare_head;
}

static bool nothing_to_send(const struct k3_http *h)
{
    for (const struct k3_http_conn *c = h->conns; c; c = c->next)
        if (c->req && c->req->phase != K3_HTTP_READING)
            return false;
    return true;
}

/* Streams get an error and their end; the journals stay as they are, so that --resume can go on. */
static void stop(struct k3_http *h)
{
    struct k3_http_job *j;

    /* Nobody can connect any more; libmicrohttpd may look at the descriptor until it is stopped. */
    h->listen_fd = MHD_quiesce_daemon(h->mhd);
    if (h->listen_fd >= 0)
        shutdown(h->listen_fd, SHUT_RDWR);
    pthread_mutex_lock(&h->lock);
    h->stopping = true;
    j = h->queue_head;
    h->queue_head = NULL;
    h->queue_tail = &h->queue_head;
    h->n_queued = 0;
    pthread_mutex_unlock(&h->lock);
    while (j) {
        struct k3_http_job *next = j->next;
        k3_http_job_drop(j, false);
        j = next;
    }
    if (!wait_until(h, k3_now_ns() + STOP_NS, nothing_runs))
        k3_log(K3_LOG_WARN, "answers_left", "text=\"k3-computed does not answer; its answers can be resumed\"");
    wait_until(h, k3_now_ns() + FLUSH_NS, nothing_to_send);
}

/* libmicrohttpd must not be stopped while a connection is suspended. */
static void let_go(struct k3_http *h)
{
    pthread_mutex_lock(&h->lock);
    h->leaving = true;
    for (struct k3_http_conn *c = h->conns; c; c = c->next)
        if (c->req && !c->req->ended) {
            atomic_store(&c->req->gone, true);
            k3_http_wake(c->req);
        }
    pthread_cond_broadcast(&h->news);
    pthread_mutex_unlock(&h->lock);
}

static void close_all(struct k3_http *h)
{
    pthread_t thread[] = { h->watch, h->peer_thread, h->prepare[0], h->prepare[1] };

    if (h->mhd)
        let_go(h);
    pthread_mutex_lock(&h->lock);
    h->leaving = true;
    pthread_cond_broadcast(&h->news);
    pthread_mutex_unlock(&h->lock);
    for (unsigned i = 0; i < h->n_threads; i++)
        pthread_join(thread[i], NULL);
    if (h->mhd)
        MHD_stop_daemon(h->mhd);
    if (h->listen_fd >= 0)
        close(h->listen_fd);
    k3_http_keys_free(&h->keys);
    k3_http_flow_free(&h->flow);
}

static void serve(struct k3_http *h)
{
    static const struct timespec tick = { 0, 50000000 };

    k3_log(K3_LOG_INFO, "listening", "address=%s model=%s keys=%zu", h->addr_text, h->name, h->keys.n);
    k3_daemon_ready(h->daemon);
    while (!k3_daemon_stopping(h->daemon))
        nanosleep(&tick, NULL);
    stop(h);
}

int k3_router_http(struct k3_router *r, struct k3_err *err)
{
    struct k3_http h = { .r = r, .listen_fd = -1, .half_bytes = ((size_t)r->opt.http_mb << 20) / 2, .created = time(NULL), .lock = PTHREAD_MUTEX_INITIALIZER,
                         .news = PTHREAD_COND_INITIALIZER };
    struct k3_daemon_opts daemon = r->opt.daemon;
    int rc = k3_http_addr_parse(&h.addr, r->opt.http, err);

    h.prepare_tail = &h.prepare_head;
    h.queue_tail = &h.queue_head;
    daemon.instance = r->instance;
    name_model(&h);
    if (rc == 0 && r->opt.api_key_file)
        rc = k3_http_keys_load(&h.keys, r->opt.api_key_file, err);
    if (rc == 0)
        rc = refuse_open_door(&h, err);
    if (rc == 0)
        rc = k3_daemon_open(&h.daemon, "k3-router", &daemon, k3_http_stat_defs, K3_N_HS, NULL, info, &h, err);
    if (rc == 0)
        rc = listen_on(&h, err);
    allow_descriptors();
    mallopt(M_MMAP_THRESHOLD, 1 << 20); /* else what one large body took stays for ever */
    if (rc == 0)
        k3_http_orphans(r);
    if (rc == 0)
        rc = start_mhd(&h, err);
    if (rc == 0)
        rc = start_threads(&h, err);
    if (rc == 0)
        serve(&h);
    if (rc < 0 && h.daemon) {
        k3_log_err(err, "router_stopped"); /* where k3-run looks for the reason; once is enough */
        err->text[0] = 0;
    }
    k3_daemon_ctl_end(h.daemon);
    close_all(&h);
    k3_daemon_close(h.daemon);
    return rc;
}
