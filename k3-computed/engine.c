/* k3-computed/engine.c: the life of a request, one pass after the other (engine.h). */
#include "k3-computed/engine_private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t now_ns(const struct k3_engine *e)
{
    return e->o.now_ns ? e->o.now_ns(e->o.arg) : k3_now_ns();
}

/* At most two of a sequence: the last row, and the first generated position of a request that comes with generated ids. */
static uint32_t max_logits(uint32_t n_sequences, uint32_t batch_rows)
{
    uint64_t n = 2ull * n_sequences;

    return n < batch_rows ? (uint32_t)n : batch_rows;
}

uint64_t k3_engine_bytes(const struct k3_config *c, uint32_t ctx, uint32_t n_sequences, uint32_t batch_rows)
{
    return n_sequences * (k3_state_bytes(c, ctx) + ctx * sizeof(uint32_t) + sizeof(struct k3_seq) + sizeof(struct k3_outcome)) +
           (uint64_t)max_logits(n_sequences, batch_rows) * c->vocab * sizeof(float) + k3_sampler_bytes(c->vocab) +
           k3_vocab_bytes(c->vocab) + c->vocab / 8 +
           batch_rows * (sizeof(struct k3_row) + sizeof(struct k3_tracer_row));
}

int k3_engine_open(struct k3_engine **out, const struct k3_engine_opts *opts, struct k3_err *err)
{
    struct k3_engine *e = calloc(1, sizeof(*e));
    pthread_condattr_t monotonic;
    size_t n_logits;
    int rc;

    if (!e)
        return k3_fail(err, -ENOMEM, "no memory for the engine");
    e->o = *opts;
    if (e->o.kept_bytes_max == 0)
        e->o.kept_bytes_max = K3_KEPT_BYTES_MAX;
    e->queue_tail = &e->queue_head;
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &monotonic);
    pthread_cond_init(&e->work, &monotonic);
    pthread_condattr_destroy(&monotonic);

    rc = k3_seqs_open(&e->slots, opts->n_sequences, &opts->m->cfg, opts->ctx, err);
    if (rc == 0)
        rc = k3_prefix_open(&e->prefix, opts->n_snapshots, &opts->m->cfg, opts->ctx, err);
    if (rc == 0)
        rc = k3_sampler_new(&e->sampler, opts->m->cfg.vocab, err);
    if (rc == 0)
        rc = k3_walk_new(&e->walk, err);
    if (rc < 0)
        goto fail;
    n_logits = (size_t)max_logits(opts->n_sequences, opts->batch_rows) * opts->m->cfg.vocab;
    e->rows = calloc(opts->batch_rows, sizeof(*e->rows));
    e->row_names = calloc(opts->batch_rows, sizeof(*e->row_names));
    e->logits = malloc(n_logits * sizeof(*e->logits));
    e->allowed = calloc(opts->m->cfg.vocab / 64 + 1, sizeof(*e->allowed));
    e->outcome = calloc(opts->n_sequences, sizeof(*e->outcome));
    e->guess = calloc((size_t)opts->m->cfg.n_experts + 1, sizeof(*e->guess));
    e->guessed = calloc((size_t)opts->m->cfg.n_experts + 1, sizeof(*e->guessed));
    if (!e->rows || !e->row_names || !e->logits || !e->allowed || !e->outcome || !e->guess || !e->guessed) {
        rc = k3_fail(err, -ENOMEM, "no memory for %zu logits", n_logits);
        goto fail;
    }
    memset(e->logits, 0, n_logits * sizeof(*e->logits)); /* touched now: out of memory belongs to the start */
    *out = e;
    return 0;
fail:
    k3_engine_close(e);
    return rc;
}

void k3_engine_close(struct k3_engine *e)
{
    if (!e)
        return;
    k3_requests_free(&e->requests);
    k3_seqs_close(&e->slots);
    k3_prefix_close(&e->prefix);
    k3_sampler_free(e->sampler);
    free(e->rows);
    free(e->row_names);
    free(e->logits);
    free(e->outcome);
    free(e->allowed);
    k3_walk_free(e->walk);
    free(e->guess);
    free(e->guessed);
    pthread_cond_destroy(&e->changed);
    pthread_cond_destroy(&e->work);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

/* ---- the life of a request; all with the lock held -------------------------------------------------------------------- */

static void slot_release(struct k3_seq *s)
{
    struct k3_request *r = s->request;

    k3_engine_leave(s);
    s->request = NULL;
    s->dirty = true;
    r->slot = NULL;
    if (r->forgotten)
        k3_request_free(r);
}

static void queue_remove(struct k3_engine *e, struct k3_request *r)
{
    struct k3_request **p = &e->queue_head;

    while (*p != r)
        p = &(*p)->queue_next;
    *p = r->queue_next;
    if (!*p)
        e->queue_tail = p;
    r->queue_next = NULL;
    e->n_queued--;
}

/* The one place where a request ends.  Of a sequence in the running pass only the events end now; its rows stay in the pass,
 * and the state is let go with it.  When nobody is left in the pass it is aborted.  May free a forgotten r. */
static void request_end(struct k3_engine *e, struct k3_request *r, enum k3_end end)
{
    if (r->phase == K3_QUEUED && !r->slot)
        queue_remove(e, r);
    r->phase = K3_ENDED;
    r->end = end;
    r->ended_ns = now_ns(e);
    if (end == K3_END_CANCELLED)
        k3_stat_add(e->o.stats, K3_CS_CANCELLED, 1);
    if (end == K3_END_ERROR)
        k3_stat_add(e->o.stats, K3_CS_FAILED, 1);
    if (r->slot && e->in_pass && r->slot->n_rows) {
        if (--e->n_live == 0)
            atomic_store(e->o.abort, true);
    } else if (r->slot) {
        slot_release(r->slot);
    }
    pthread_cond_broadcast(&e->changed);
}

static void request_fail(struct k3_engine *e, struct k3_request *r, int code, const char *message)
{
    r->code = code;
    snprintf(r->message, sizeof(r->message), "%s", message);
    request_end(e, r, K3_END_ERROR);
}

static void engine_admit(struct k3_engine *e)
{
    k3_engine_ended(e);
    while (e->queue_head) {
        struct k3_request *r = e->queue_head;
        struct k3_seq *s = k3_engine_begin(e, r);

        if (!s)
            return;
        queue_remove(e, r);
        r->phase = K3_PREFILL;
        r->slot = s;
        s->request = r;
        s->last_pass = e->n_passes; /* no privilege over those who wait already */
        s->admitted = ++e->n_admitted;
    }
}

static void engine_end_all(struct k3_engine *e)
{
    static const char text[] = "k3-computed is shutting down; submit again with the ids generated so far";

    while (e->queue_head)
        request_fail(e, e->queue_head, K3_EXIT_NO_PEER, text);
    for (uint32_t i = 0; i < e->slots.n; i++)
        if (e->slots.slot[i].request)
            request_fail(e, e->slots.slot[i].request, K3_EXIT_NO_PEER, text);
}

static void engine_gauges(struct k3_engine *e)
{
    uint64_t n_running = 0, n_positions = 0;

    for (uint32_t i = 0; i < e->slots.n; i++)
        if (e->slots.slot[i].request) {
            n_running++;
            n_positions += e->slots.slot[i].n_done;
        }
    k3_stat_set(e->o.stats, K3_CS_RUNNING, n_running);
    k3_stat_set(e->o.stats, K3_CS_QUEUED, e->n_queued);
    k3_stat_set(e->o.stats, K3_CS_POSITIONS, n_positions);
    k3_engine_prefix_gauges(e);
}

/* ---- one pass --------------------------------------------------------------------------------------------------------- */

static bool is_logits_row(const struct k3_request *r, uint32_t position)
{
    return r->logits && !r->has_logits && position == r->n_prompt - 1;
}

static bool is_last_row(const struct k3_request *r, uint32_t position)
{
    return position == k3_request_n_run(r) - 1;
}

static void pass_rows(struct k3_engine *e)
{
    uint32_t n = 0;

    e->n_live = 0;
    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];
        struct k3_request *r = s->request;

        for (uint32_t k = 0; k < s->n_rows; k++) {
            uint32_t position = s->n_done + k;

            e->row_names[n] = (struct k3_tracer_row){ (uint32_t)s->admitted, position };
            e->rows[n++] = (struct k3_row){ .state = s->state, .token = r->ids[position], .position = position,
                                            .want_logits = is_logits_row(r, position) || is_last_row(r, position) };
        }
        if (s->n_rows)
            k3_engine_points(e, s, e->rows + (n - s->n_rows));
        e->n_live += s->n_rows ? 1 : 0;
    }
    e->n_rows = n;
    e->n_most = e->n_live > e->n_most ? e->n_live : e->n_most;
    k3_stat_set(e->o.stats, K3_CS_MOST, e->n_most);
}

static int on_layer(void *arg, uint32_t layer, uint32_t n_layers)
{
    struct k3_engine *e = arg;
    uint64_t now = k3_now_ns();

    (void)n_layers;
    pthread_mutex_lock(&e->lock);
    if (layer > 0) { /* moving mean over about eight layers */
        uint64_t took_ns = now - e->layer_start_ns;

        e->layer_ns = e->layer_ns ? e->layer_ns - e->layer_ns / 8 + took_ns / 8 : took_ns;
    }
    e->layer = layer;
    e->layer_start_ns = now;
    e->progress_seq++;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    k3_stat_set(e->o.stats, K3_CS_LAYER, layer);
    if (e->o.tick)
        e->o.tick(e->o.arg);
    return atomic_load(e->o.abort) ? -ECANCELED : 0;
}

/* ---- trace and prefetch ---- */

static void on_route(void *arg, uint32_t layer, uint32_t row, const uint16_t *ids, const float *weights, uint32_t n)
{
    struct k3_engine *e = arg;

    (void)weights;
    (void)n;
    k3_tracer_route(e->o.tracer, layer, row, ids);
}

/* The best guess of every row first, then the second best, each expert once. */
static void announce(struct k3_engine *e, uint32_t layer, const uint16_t *ids, uint32_t n_rows, uint32_t k)
{
    uint32_t n = 0;

    memset(e->guessed, 0, e->o.m->cfg.n_experts);
    for (uint32_t i = 0; i < e->o.prefetch; i++)
        for (uint32_t row = 0; row < n_rows; row++) {
            uint16_t id = ids[(size_t)row * k + i];

            if (!e->guessed[id])
                e->guess[n++] = id;
            e->guessed[id] = 1;
        }
    e->o.source->prefetch(e->o.source->self, layer, e->guess, n);
}

static void on_look(void *arg, uint32_t layer, const uint16_t *ids, uint32_t n_rows, uint32_t k)
{
    struct k3_engine *e = arg;

    if (e->o.tracer)
        k3_tracer_look(e->o.tracer, layer, ids, k);
    if (e->o.prefetch)
        announce(e, layer, ids, n_rows, k);
}

/* The next token of an answer, among the ids that its constraint allows, and its log probabilities where nobody looks before the
 * token is published. */
static int draw_token(struct k3_engine *e, struct k3_request *r, const float *logits, struct k3_outcome *o)
{
    uint32_t n_answer = r->n_ids - r->n_prompt, n = r->sampling.n_logprobs;
    struct k3_sampling how = r->sampling;
    const float *adjusted;
    int rc = 0;

    if (r->constraint) {
        rc = k3_constraint_mask(r->constraint, e->walk, e->allowed);
        how.allowed = e->allowed;
    }
    if (rc < 0)
        return k3_fail(&o->err, rc, "no memory for the constraint of token %u", n_answer);
    adjusted = k3_sampler_adjust(e->sampler, logits, &how, r->ids + r->n_prompt, n_answer);
    rc = k3_sampler_pick(e->sampler, adjusted, &how, n_answer, &o->token, &o->err);
    if (rc < 0)
        return rc;
    if (n)
        k3_sampler_logprobs(e->sampler, logits, o->token, r->logprobs + (size_t)(n_answer - r->n_given) * n, n);
    if (r->constraint && (rc = k3_constraint_take(r->constraint, e->walk, o->token)) <= 0) {
        if (rc == 0)
            k3_bug("id %u is in the mask of a constraint that does not take it", o->token);
        return k3_fail(&o->err, rc, "no memory for the constraint of token %u", n_answer);
    }
    o->has_token = true;
    return 0;
}

/* Draws the tokens of a finished pass.  Reads nothing of a request that other threads change. */
static void draw(struct k3_engine *e)
{
    static const struct k3_sampling greedy = { .temperature = 0, .top_p = 1 };
    const float *logits = e->logits;

    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];
        struct k3_outcome *o = &e->outcome[i];

        *o = (struct k3_outcome){ 0 };
        for (uint32_t position = s->n_done; position < s->n_done + s->n_rows; position++) {
            struct k3_request *r = s->request;
            bool last = is_last_row(r, position) && !r->complete;
            uint32_t unused;

            if (!is_logits_row(r, position) && !is_last_row(r, position))
                continue;
            if (o->rc == 0)
                o->rc = last ? draw_token(e, r, logits, o)
                             : k3_sampler_pick(e->sampler, logits, &greedy, r->n_ids - r->n_prompt, &unused, &o->err);
            if (o->rc == 0 && is_logits_row(r, position)) {
                memcpy(r->logits, logits, r->n_logits * sizeof(*logits)); /* nobody looks before has_logits */
                o->has_logits = true;
            }
            logits += e->o.m->cfg.vocab;
        }
    }
}

static void publish_one(struct k3_engine *e, struct k3_seq *s, const struct k3_outcome *o, uint64_t now)
{
    struct k3_request *r = s->request;
    uint32_t n_prompt_left = r->n_prompt > s->n_done ? r->n_prompt - s->n_done : 0;

    k3_stat_add(e->o.stats, K3_CS_PROMPT_TOKENS, s->n_rows < n_prompt_left ? s->n_rows : n_prompt_left);
    s->n_done += s->n_rows;
    if (r->phase == K3_ENDED) { /* cancelled during the pass */
        slot_release(s);
        return;
    }
    if (o->rc < 0) {
        s->spoilt = true;
        request_fail(e, r, o->err.exit_status, o->err.text);
        return;
    }
    r->has_logits |= o->has_logits;
    if (o->has_token) {
        r->ids[r->n_ids++] = o->token;
        r->phase = K3_DECODE;
        k3_stat_add(e->o.stats, K3_CS_TOKENS, 1);
        if (r->last_token_ns)
            k3_stat_hist(e->o.stats, K3_CS_TOKEN_TIME, now - r->last_token_ns);
        r->last_token_ns = now;
    }
    if (!(r->complete ? r->has_logits : o->has_token))
        return;
    /* The stop id is a token of the answer like any other, and then ends it. */
    if (r->n_ids > r->n_prompt && k3_request_is_stop(r, r->ids[r->n_ids - 1])) {
        r->stop_id = r->ids[r->n_ids - 1];
        request_end(e, r, K3_END_STOP);
    } else if (r->n_ids - r->n_prompt >= r->max_tokens) {
        request_end(e, r, K3_END_LENGTH);
    }
}

static void engine_publish(struct k3_engine *e)
{
    uint64_t now = k3_now_ns();

    for (uint32_t i = 0; i < e->slots.n; i++)
        if (e->slots.slot[i].n_rows)
            publish_one(e, &e->slots.slot[i], &e->outcome[i], now);
    pthread_cond_broadcast(&e->changed);
}

/* The pass failed: the state of its sequences is spoilt (pass.h), those of others is not. */
static void pass_failed(struct k3_engine *e, int rc, const struct k3_err *err)
{
    bool stopping = atomic_load(e->o.stop);

    if (rc != -ECANCELED)
        k3_log_err(err, "pass_failed");
    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];

        if (!s->n_rows)
            continue;
        s->spoilt = true;
        if (s->request->phase == K3_ENDED)
            slot_release(s);
        else if (!stopping) /* else engine_end_all says why */
            request_fail(e, s->request, err->exit_status ? err->exit_status : K3_EXIT_FAILED,
                         err->text[0] ? err->text : "the pass was abandoned");
    }
}

static void pass_stats(struct k3_engine *e)
{
    struct k3_pass_times t;
    uint64_t wait_ns;

    k3_pass_times(e->o.pass, &t);
    wait_ns = t.trunk_wait_ns + t.expert_wait_ns;
    k3_stat_add(e->o.stats, K3_CS_PASSES, 1);
    k3_stat_add(e->o.stats, K3_CS_PASS_ROWS, e->n_rows);
    k3_stat_add(e->o.stats, K3_CS_PASS_NS, t.total_ns);
    k3_stat_add(e->o.stats, K3_CS_TRUNK_WAIT_NS, t.trunk_wait_ns);
    k3_stat_add(e->o.stats, K3_CS_EXPERT_WAIT_NS, t.expert_wait_ns);
    k3_stat_add(e->o.stats, K3_CS_ARITHMETIC_NS, t.total_ns > wait_ns ? t.total_ns - wait_ns : 0);
    k3_stat_add(e->o.stats, K3_CS_DISTINCT_EXPERTS, t.distinct_experts);
    k3_stat_hist(e->o.stats, K3_CS_PASS_TIME, t.total_ns);
}

/* Of a finished pass: a row attends to its own position and all before it. */
static uint64_t kv_bytes(const struct k3_engine *e)
{
    uint64_t n_positions = 0;

    for (uint32_t i = 0; i < e->n_rows; i++)
        n_positions += e->rows[i].position + 1ull;
    return n_positions * k3_state_kv_bytes(&e->o.m->cfg);
}

int k3_engine_step(struct k3_engine *e)
{
    struct k3_pass_hooks hooks = { .arg = e, .progress = on_layer };
    struct k3_err err = K3_ERR_INIT;
    bool traced;
    uint64_t now;
    int rc;

    pthread_mutex_lock(&e->lock);
    k3_requests_expire(&e->requests, now_ns(e));
    if (atomic_load(e->o.stop)) {
        engine_end_all(e);
        engine_gauges(e);
        pthread_mutex_unlock(&e->lock);
        return -ECANCELED;
    }
    engine_admit(e);
    engine_gauges(e);
    if (k3_seqs_plan(&e->slots, e->o.batch_rows) == 0) {
        pthread_mutex_unlock(&e->lock);
        return 0;
    }
    pass_rows(e);
    e->n_passes++;
    e->in_pass = true;
    e->layer = 0;
    e->pass_start_ns = e->layer_start_ns = k3_now_ns();
    e->pass_start_bytes = atomic_load_explicit(&e->o.meter->bytes, memory_order_relaxed);
    e->progress_seq++;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);

    k3_engine_prepare(e);
    traced = e->o.tracer && k3_tracer_begin(e->o.tracer, e->n_passes, e->row_names, e->n_rows, &hooks.look_k);
    if (traced)
        hooks.route = on_route;
    if (hooks.look_k < e->o.prefetch)
        hooks.look_k = e->o.prefetch;
    hooks.look = on_look;
    rc = k3_pass_run(e->o.pass, e->o.source, e->rows, e->n_rows, e->logits, &hooks, &err);
    if (traced)
        k3_tracer_end(e->o.tracer, rc == 0 ? K3_TRACE_DONE : K3_TRACE_FAILED);
    if (rc == 0) {
        k3_stat_add(e->o.stats, K3_CS_KV_BYTES, kv_bytes(e));
        draw(e);
    }
    k3_engine_kept(e, rc == 0);

    pthread_mutex_lock(&e->lock);
    now = k3_now_ns();
    e->in_pass = false;
    e->bytes_per_s = k3_engine_bytes_per_s(
        atomic_load_explicit(&e->o.meter->bytes, memory_order_relaxed) - e->pass_start_bytes, now - e->pass_start_ns);
    for (uint32_t i = 0; i < e->slots.n; i++)
        if (e->slots.slot[i].n_rows)
            e->slots.slot[i].last_pass = e->n_passes;
    if (rc == 0)
        engine_publish(e);
    else
        pass_failed(e, rc, &err);
    /* Lower the flag of a cancelled pass, but never that of a stop, for which *stop is stored first. */
    atomic_store(e->o.abort, false);
    if (atomic_load(e->o.stop))
        atomic_store(e->o.abort, true);
    pass_stats(e);
    k3_stat_set(e->o.stats, K3_CS_LAYER, 0);
    engine_gauges(e);
    pthread_mutex_unlock(&e->lock);
    if (e->o.tick)
        e->o.tick(e->o.arg);
    return 1;
}

void k3_engine_run(struct k3_engine *e)
{
    int rc;

    while ((rc = k3_engine_step(e)) >= 0) {
        if (rc > 0)
            continue;
        pthread_mutex_lock(&e->lock);
        if (!e->queue_head && !atomic_load(e->o.stop)) {
            struct timespec tick = k3_engine_in_ns(K3_TICK_NS);

            pthread_cond_timedwait(&e->work, &e->lock, &tick);
        }
        pthread_mutex_unlock(&e->lock);
        if (e->o.tick)
            e->o.tick(e->o.arg);
    }
}

void k3_engine_wait_fetched(struct k3_engine *e, uint64_t timeout_ns)
{
    struct timespec until = k3_engine_in_ns(timeout_ns);

    pthread_mutex_lock(&e->lock);
    while (k3_requests_unfetched(&e->requests) && pthread_cond_timedwait(&e->changed, &e->lock, &until) == 0)
        ;
    pthread_mutex_unlock(&e->lock);
}

/* ---- what the server's threads call ------------------------------------------------------------------------------------ */

/* An answer whose given ids end it already; only its logits may be missing. */
static void submit_complete(struct k3_engine *e, struct k3_request *r)
{
    bool stop = r->n_given && k3_request_is_stop(r, r->ids[r->n_ids - 1]);

    r->complete = stop || r->n_given >= r->max_tokens;
    if (!r->complete || r->logits)
        return;
    r->stop_id = stop ? r->ids[r->n_ids - 1] : 0;
    request_end(e, r, stop ? K3_END_STOP : K3_END_LENGTH);
}

int k3_engine_submit(struct k3_engine *e, struct k3_submit *sub, bool draining, bool *known, struct k3_err *err)
{
    struct k3_request *r = NULL;
    uint64_t kept_bytes;
    int rc;

    pthread_mutex_lock(&e->lock);
    *known = k3_requests_find(&e->requests, sub->id) != NULL;
    if (*known) {
        pthread_mutex_unlock(&e->lock);
        return 0;
    }
    rc = k3_submit_check(sub, e->o.m->cfg.vocab, e->o.ctx, err);
    kept_bytes = e->requests.kept_bytes + (rc == 0 ? k3_request_bytes(sub, e->o.m->cfg.vocab) : 0);
    if (rc == 0 && k3_request_bytes(sub, e->o.m->cfg.vocab) > e->o.kept_bytes_max)
        rc = k3_refuse(err, -E2BIG, "the request would keep %llu bytes, the limit is %llu (--requests-mb): ask for fewer tokens%s",
                       (unsigned long long)k3_request_bytes(sub, e->o.m->cfg.vocab), (unsigned long long)e->o.kept_bytes_max,
                       sub->sampling.n_logprobs ? " or fewer logprobs" : "");
    if (rc == 0 && (draining || atomic_load(e->o.stop)))
        rc = k3_fail(err, -ESHUTDOWN, "no new requests are taken: it is %s", draining
                     ? "draining, until it is started anew (run/k3-run restart computed)" : "shutting down");
    if (rc == 0 && e->n_queued >= K3_MAX_QUEUED)
        rc = k3_fail(err, -EAGAIN, "%u requests are queued, the limit is %u: try again later", e->n_queued,
                     K3_MAX_QUEUED);
    if (rc == 0 && kept_bytes > e->o.kept_bytes_max)
        rc = k3_fail(err, -EAGAIN, "%u requests would keep %llu bytes, the limit is %llu: forget ended ones",
                     e->requests.n + 1, (unsigned long long)kept_bytes, (unsigned long long)e->o.kept_bytes_max);
    if (rc == 0)
        rc = k3_request_new(&r, sub, e->o.m->cfg.vocab, err);
    if (rc == 0) {
        k3_requests_add(&e->requests, r);
        *e->queue_tail = r;
        e->queue_tail = &r->queue_next;
        e->n_queued++;
        k3_stat_add(e->o.stats, K3_CS_REQUESTS, 1);
        submit_complete(e, r);
        k3_stat_set(e->o.stats, K3_CS_QUEUED, e->n_queued);
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int k3_engine_cancel(struct k3_engine *e, const char *id, struct k3_err *err)
{
    struct k3_request *r;

    pthread_mutex_lock(&e->lock);
    r = k3_requests_find(&e->requests, id);
    if (r && r->phase != K3_ENDED)
        request_end(e, r, K3_END_CANCELLED);
    pthread_mutex_unlock(&e->lock);
    return r ? 0 : k3_engine_unknown(id, "", err);
}

int k3_engine_forget(struct k3_engine *e, const char *id, struct k3_err *err)
{
    struct k3_request *r;

    pthread_mutex_lock(&e->lock);
    r = k3_requests_find(&e->requests, id);
    if (r && r->phase != K3_ENDED)
        request_end(e, r, K3_END_CANCELLED);
    if (r)
        k3_requests_remove(&e->requests, r);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    return r ? 0 : k3_engine_unknown(id, "", err);
}
