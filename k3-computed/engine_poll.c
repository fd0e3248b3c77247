/* k3-computed/engine_poll.c: what a poll answers: events, and how far the pass is (engine.h). */
#include <errno.h>

#include "k3-computed/engine_private.h"

int k3_engine_unknown(const char *id, const char *advice, struct k3_err *err)
{
    return k3_fail(err, -ENOENT, "unknown id %s: it was forgotten, or k3-computed was restarted%s", id, advice);
}

/* Weights of one pass: the trunk, and of the experts as many as the rows can route to. */
static uint64_t pass_bytes(const struct k3_engine *e)
{
    const struct k3_config *c = &e->o.m->cfg;
    uint64_t n_experts = (uint64_t)e->n_rows * c->top_k, n_moe = 0;

    for (uint32_t layer = 0; layer < c->n_layers; layer++)
        n_moe += k3_layer_is_dense(c, layer) ? 0 : 1;
    if (n_experts > c->n_experts)
        n_experts = c->n_experts;
    return e->o.m->trunk_bytes + n_moe * n_experts * e->o.m->expert_bytes;
}

/* Seconds until the next token, from the moving time of a layer; lm_head counts as one more.  < 0: not known. */
static double eta_s(const struct k3_engine *e, const struct k3_request *r)
{
    const struct k3_seq *s = r->slot;
    uint64_t n_steps = e->o.m->cfg.n_layers + 1ull, n_left = 0, past_ns;
    uint32_t n_rows = s && s->n_rows ? s->n_rows : 1, n_ids_left;

    if (!s || !e->layer_ns)
        return -1;
    n_ids_left = k3_request_n_run(r) - s->n_done;
    if (e->in_pass && s->n_rows) {
        n_left = n_steps - e->layer;
        n_ids_left -= s->n_rows;
    }
    n_left += n_steps * ((n_ids_left + (uint64_t)n_rows - 1) / n_rows);
    past_ns = e->in_pass ? k3_now_ns() - e->layer_start_ns : 0;
    if (past_ns > e->layer_ns)
        past_ns = e->layer_ns;
    return (double)(n_left * e->layer_ns > past_ns ? n_left * e->layer_ns - past_ns : 0) * 1e-9;
}

static uint32_t queue_ahead(const struct k3_engine *e, const struct k3_request *r)
{
    uint32_t n = 0;

    for (const struct k3_request *q = e->queue_head; q && q != r; q = q->queue_next)
        n++;
    return n;
}

static void add_progress(const struct k3_engine *e, const struct k3_request *r, cJSON *reply)
{
    static const char *const phase[] = { "queued", "prefill", "decode" };
    static const char *const waiting[] = { "none", "trunk", "expert" };
    uint32_t waits = e->in_pass ? atomic_load_explicit(&e->o.meter->waiting, memory_order_relaxed) : K3_WAIT_NONE;
    uint64_t bytes = atomic_load_explicit(&e->o.meter->bytes, memory_order_relaxed) - e->pass_start_bytes;
    uint64_t past_ns = k3_now_ns() - e->pass_start_ns;
    cJSON *p = cJSON_AddObjectToObject(reply, "progress");
    double eta = eta_s(e, r);

    cJSON_AddNumberToObject(p, "seq", (double)e->progress_seq);
    cJSON_AddStringToObject(p, "phase", phase[r->phase]);
    cJSON_AddNumberToObject(p, "layer", e->in_pass ? e->layer : 0);
    cJSON_AddNumberToObject(p, "layers", e->o.m->cfg.n_layers);
    cJSON_AddNumberToObject(p, "rows", e->in_pass ? e->n_rows : 0);
    cJSON_AddNumberToObject(p, "position", r->slot ? r->slot->n_done : 0);
    cJSON_AddNumberToObject(p, "positions", k3_request_n_run(r));
    cJSON_AddNumberToObject(p, "bytes", e->in_pass ? (double)bytes : 0);
    cJSON_AddNumberToObject(p, "bytes_pass", (double)pass_bytes(e));
    /* The first tenth of a second says little: the rate of the last pass is better. */
    cJSON_AddNumberToObject(p, "bytes_per_s", (double)(e->in_pass && (past_ns > 100000000ull || !e->bytes_per_s)
                                                       ? k3_engine_bytes_per_s(bytes, past_ns) : e->bytes_per_s));
    if (eta < 0)
        cJSON_AddNullToObject(p, "eta_s");
    else
        cJSON_AddNumberToObject(p, "eta_s", eta);
    cJSON_AddStringToObject(p, "waiting", waiting[waits <= K3_WAIT_EXPERT ? waits : K3_WAIT_NONE]);
    if (r->phase == K3_QUEUED)
        cJSON_AddNumberToObject(p, "ahead", queue_ahead(e, r));
}

static bool has_news(const struct k3_engine *e, const struct k3_request *r, uint32_t from, int64_t progress_from)
{
    return r->phase == K3_ENDED || k3_request_n_events(r) > from ||
           (progress_from >= 0 && e->progress_seq > (uint64_t)progress_from);
}

int k3_engine_poll(struct k3_engine *e, const char *id, uint32_t from, int64_t progress_from, uint32_t wait_ms,
                   cJSON *reply, struct k3_err *err)
{
    static const char *const state[] = { "queued", "prefill", "decode", "ended" };
    struct k3_request *r;
    struct timespec until;
    cJSON *events;
    int rc = 0;

    pthread_mutex_lock(&e->lock);
    if (wait_ms > K3_POLL_WAIT_MAX_MS)
        wait_ms = K3_POLL_WAIT_MAX_MS;
    if (e->n_polls_waiting >= K3_POLLS_WAITING_MAX && wait_ms > 100)
        wait_ms = 100;
    until = k3_engine_in_ns(wait_ms * 1000000ull);
    e->n_polls_waiting++;
    /* Found anew after every wait: it may have been forgotten meanwhile. */
    while ((r = k3_requests_find(&e->requests, id)) && !has_news(e, r, from, progress_from) && rc == 0)
        rc = pthread_cond_timedwait(&e->changed, &e->lock, &until);
    e->n_polls_waiting--;
    if (!r) {
        pthread_mutex_unlock(&e->lock);
        return k3_engine_unknown(id, "; submit it again", err);
    }
    events = cJSON_AddArrayToObject(reply, "events");
    rc = events ? k3_request_events(r, from, events) : -ENOMEM;
    cJSON_AddNumberToObject(reply, "next", k3_request_n_told(r, from));
    cJSON_AddStringToObject(reply, "state", state[r->phase]);
    cJSON_AddNumberToObject(reply, "cached", r->n_cached);
    if (r->phase != K3_ENDED) {
        add_progress(e, r, reply);
    } else if (rc == 0 && !r->fetched && k3_request_n_told(r, from) == k3_request_n_events(r)) {
        r->fetched = true;
        pthread_cond_broadcast(&e->changed);
    }
    cJSON_AddNumberToObject(reply, "generation", e->o.generation);
    pthread_mutex_unlock(&e->lock);
    return rc < 0 ? k3_fail(err, rc, "no memory for the events of %s", id) : 0;
}
