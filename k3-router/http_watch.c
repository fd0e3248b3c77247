/* The thread that watches connections: deadlines for what a client sends, clients that have gone, and a word to those that
 * wait.  Ten times a second, under the lock; a descriptor in the list is open, since libmicrohttpd takes a connection out of it
 * before it closes. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "k3-router/http.h"

#define TICK_NS 100000000l
#define BODY_BYTES_PER_S 16384u /* slower than this a body may not be */

/* What has been due for too long, or NULL. */
static const char *overdue(const struct k3_http *h, const struct k3_http_conn *c, uint64_t now)
{
    uint64_t limit = h->r->opt.client_timeout_s * 1000000000ull;
    const struct k3_http_req *q = c->req;

    if (!q)
        return now - (c->line_ns ? c->line_ns : c->idle_ns) > limit ? c->line_ns ? "header" : "request" : NULL;
    if (q->phase == K3_HTTP_READING)
        return now - q->body_ns > limit + q->body_bytes / BODY_BYTES_PER_S * 1000000000ull ? "body" : NULL;
    return NULL;
}

/* The other end has closed, or will send nothing more.  Bytes of a further request are no such sign. */
static bool has_gone(const struct k3_http_conn *c)
{
    struct pollfd p = { c->fd, POLLRDHUP, 0 };

    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

static void say_something(struct k3_http_req *q, uint64_t now)
{
    uint64_t ping = q->h->r->opt.ping_s * 1000000000ull;
    char line[200], text[256];

    if (q->stream && ping && now - q->out_ns >= ping) {
        k3_http_job_line(q, line, sizeof(line));
        k3_http_send(q, text, (size_t)snprintf(text, sizeof(text), ": %s\n\n", line));
    } else if (!q->stream && now - (q->sending ? q->out_ns : q->start_ns) >= K3_HTTP_PATIENCE_NS) {
        if (!q->sending) {
            q->status = 200;
            q->type = "application/json";
        }
        k3_http_send(q, "\n", 1); /* wakes it: libmicrohttpd then asks for the head */
    }
}

static void look_at(struct k3_http *h, struct k3_http_conn *c, uint64_t now)
{
    const char *late = overdue(h, c, now);
    struct k3_http_req *q = c->req;

    if (late && !c->cut) {
        c->cut = true;
        shutdown(c->fd, SHUT_RDWR);
        k3_http_count(h, K3_HS_CUT, 1);
        k3_log(K3_LOG_DEBUG, "connection_cut", "why=%s", late);
    }
    if (!q || q->phase == K3_HTTP_READING)
        return;
    if (!q->ended && !atomic_load(&q->gone)) {
        if (has_gone(c))
            atomic_store(&q->gone, true);
        else if (q->job)
            say_something(q, now);
    }
    if (atomic_load(&q->gone) && q->phase != K3_HTTP_PREPARING) { /* whose thread has it just now, and wakes it */
        k3_http_job_leave(q);
        k3_http_wake(q);
    }
}

void *k3_http_watch_thread(void *arg)
{
    static const struct timespec tick = { 0, TICK_NS };
    struct k3_http *h = arg;
    bool leaving = false;

    while (!leaving) {
        struct k3_stats *s = k3_daemon_stats(h->daemon);
        uint64_t now;

        pthread_mutex_lock(&h->lock);
        now = k3_now_ns(); /* not before: the times that it is compared with are in its past */
        for (struct k3_http_conn *c = h->conns, *next; c; c = next) {
            next = c->next;
            look_at(h, c, now);
        }
        k3_http_dispatch(h);
        k3_stat_set(s, K3_HS_CONNECTIONS, h->n_conns);
        k3_stat_set(s, K3_HS_QUEUED, h->n_queued);
        k3_stat_set(s, K3_HS_RUNNING, h->n_running);
        leaving = h->leaving;
        pthread_mutex_unlock(&h->lock);
        k3_daemon_beat(h->daemon);
        nanosleep(&tick, NULL);
    }
    return NULL;
}
