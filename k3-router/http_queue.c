/* The queue of answers: who has a place, whose turn it is, who leaves. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "k3-router/http.h"

#define AUTO_PARALLEL_MAX 24u /* k3-computed answers 32 polls at once */

static unsigned parallel(const struct k3_http *h)
{
    uint64_t n = h->r->opt.parallel ? h->r->opt.parallel : h->peer.sequences;

    return n == 0 ? 1 : h->r->opt.parallel || n <= AUTO_PARALLEL_MAX ? (unsigned)n : AUTO_PARALLEL_MAX;
}

static void unqueue(struct k3_http *h, struct k3_http_job *j)
{
    struct k3_http_job **p = &h->queue_head;

    while (*p != j)
        p = &(*p)->next;
    *p = j->next;
    if (!*p)
        h->queue_tail = p;
    j->next = NULL;
    h->n_queued--;
}

void k3_http_dispatch(struct k3_http *h)
{
    pthread_attr_t attr;
    pthread_t thread;

    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    while (h->queue_head && h->n_running < parallel(h) && !h->stopping) {
        struct k3_http_job *j = h->queue_head;
        enum k3_http_phase phase = j->q->phase;

        j->q->phase = K3_HTTP_RUNNING;
        j->state = K3_HTTP_JOB_RUNS;
        if (pthread_create(&thread, &attr, k3_http_job_thread, j) != 0) { /* the next tick tries again */
            j->q->phase = phase;
            j->state = K3_HTTP_JOB_WAITS;
            break;
        }
        unqueue(h, j);
        h->n_running++;
    }
    pthread_attr_destroy(&attr);
}

void k3_http_unqueue(struct k3_http_job *first)
{
    struct k3_http *h = first->q->h;

    for (unsigned i = 0; i < first->c.n; i++) {
        struct k3_http_job *j = &first[i];

        if (j->state != K3_HTTP_JOB_WAITS)
            continue;
        unqueue(h, j);
        j->state = K3_HTTP_JOB_ENDED;
        first->n_left--;
        j->next = h->left;
        h->left = j;
    }
    pthread_cond_broadcast(&h->news);
}

void k3_http_job_leave(struct k3_http_req *q)
{
    struct k3_http_job *first = q->job;

    if (!first || q->h->stopping) /* whoever stops has all that wait */
        return;
    k3_http_unqueue(first);
    if (first->n_left)
        return; /* those that run see that it has gone */
    atomic_store(&first->closed, true);
    q->phase = K3_HTTP_ENDED;
    q->end = "client_gone";
    q->job = NULL;
}

int k3_http_reserve(struct k3_http_req *q, unsigned n)
{
    struct k3_http *h = q->h;
    unsigned n_before, most;
    char why[800];
    int rc;

    pthread_mutex_lock(&h->lock);
    rc = k3_http_family_ready(h, why, sizeof(why));
    n_before = h->n_running + h->n_queued + h->n_reserved;
    most = parallel(h) + h->r->opt.queue;
    if (rc < 0) {
        k3_http_error(q, 503, NULL, NULL, "%s", why);
    } else if (n > most) {
        k3_http_error(q, 400, "n", "invalid_value", "n: must be at most %u: this server runs %u answers at once and lets %u wait", most,
                      parallel(h), h->r->opt.queue);
        rc = -EINVAL;
    } else if (n_before + n > most) {
        q->retry_after_s = h->answer_s > 1 ? h->answer_s < 3600 ? (unsigned)h->answer_s : 3600 : 1;
        k3_http_error(q, 429, NULL, "queue_full", "%u answers are running and %u requests wait; the limit is %u: try again later",
                      h->n_running, h->n_queued, h->r->opt.queue);
        rc = -EAGAIN;
    } else {
        h->n_reserved += n;
    }
    pthread_mutex_unlock(&h->lock);
    return rc;
}

/* Seconds to the first token, by the passes and answers so far; negative: nothing is known. */
static double first_token_s(const struct k3_http_job *j)
{
    const struct k3_http *h = j->q->h;
    double rows = h->peer.batch_rows ? (double)h->peer.batch_rows : 1, ahead, passes, pass_ns;
    struct k3_stats s;

    if (k3_stats_open(&s, h->r->instance, "k3-computed", NULL) < 0)
        return -1;
    passes = (double)k3_stats_value(&s, "passes");
    pass_ns = (double)k3_stats_value(&s, "pass_ns");
    k3_stats_close(&s);
    ahead = (double)(h->n_running + h->n_queued + 1) - parallel(h);
    if (passes < 1 || (ahead > 0 && h->answer_s <= 0))
        return -1;
    return (ahead > 0 ? ahead / parallel(h) * h->answer_s : 0) + ((double)j->ask.prompt.n + rows - 1) / rows * pass_ns / passes / 1e9;
}

void k3_http_enqueue(struct k3_http_job *first)
{
    struct k3_http_req *q = first->q;
    struct k3_http *h = q->h;

    pthread_mutex_lock(&h->lock);
    h->n_reserved -= first->c.n;
    q->refs++;
    q->job = first;
    q->n_prompt = first->ask.prompt.n;
    q->eta_s = first_token_s(first);
    q->phase = K3_HTTP_QUEUED;
    if (first->c.stream) {
        q->stream = true;
        q->status = 200;
        q->type = "text/event-stream";
    }
    for (unsigned i = 0; i < first->c.n; i++) {
        struct k3_http_job *j = &first[i];

        *h->queue_tail = j;
        h->queue_tail = &j->next;
        h->n_queued++;
        if (j->c.stream)
            k3_http_send(q, j->piece.bytes, j->piece.len_bytes);
        j->piece.len_bytes = 0;
    }
    k3_http_dispatch(h);
    pthread_mutex_unlock(&h->lock);
}

/* The one whose progress is told: the first that runs. */
static const struct k3_http_job *running(const struct k3_http_job *first)
{
    for (unsigned i = 0; i < first->c.n; i++)
        if (first[i].state == K3_HTTP_JOB_RUNS)
            return &first[i];
    return NULL;
}

void k3_http_job_line(const struct k3_http_req *q, char *out, size_t len)
{
    const struct k3_http_job *first = q->job, *j = running(first);
    unsigned before = 0;
    size_t n = 0;

    if (!j) {
        for (const struct k3_http_job *i = q->h->queue_head; i && i->first != first; i = i->next)
            before++;
        snprintf(out, len, "queued, %u before it, %u running", before, q->h->n_running);
        return;
    }
    if (first->c.n > 1)
        n = (size_t)snprintf(out, len, "answer %u of %u: ", j->index + 1, first->c.n);
    n += (size_t)snprintf(out + n, len - n, "%s", j->progress.phase[0] ? j->progress.phase : "starting");
    if (j->progress.layers > 0)
        n += (size_t)snprintf(out + n, len - n, " layer %.0f/%.0f", j->progress.layer, j->progress.layers);
    n += (size_t)snprintf(out + n, len - n, " tokens %zu", j->progress.n_tokens);
    if (j->progress.bytes_per_s > 0)
        n += (size_t)snprintf(out + n, len - n, " %.2f GB/s", j->progress.bytes_per_s / 1e9);
    if (j->progress.eta_s >= 1)
        n += (size_t)snprintf(out + n, len - n, " ETA %.0f s", j->progress.eta_s);
    if (j->progress.waiting[0])
        snprintf(out + n, len - n, " waiting for %s", j->progress.waiting);
}
