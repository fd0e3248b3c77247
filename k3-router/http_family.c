/* What the daemons say: whether they can be asked, models, health, metrics, statistics. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/members.h"
#include "ipc/msg.h"
#include "ipc/stats_json.h"
#include "shm/segment.h"
#include "tools/ctl.h"
#include "k3-router/http.h"

#define INFO_MS 5000
#define LOOK_NS 200000000l /* while k3-computed is not known */
#define LOOKS_KNOWN 10u    /* times that, once it is */

const struct k3_stat_def k3_http_stat_defs[K3_N_HS] = {
    [K3_HS_REQUESTS] = { "requests", "count", "HTTP requests", K3_COUNTER },
    [K3_HS_REFUSED] = { "requests_refused", "count", "answered with 400 to 499, but for 429", K3_COUNTER },
    [K3_HS_FAILED] = { "requests_failed", "count", "answered with 500 or more", K3_COUNTER },
    [K3_HS_BUSY] = { "requests_busy", "count", "answered with 429: the queue was full", K3_COUNTER },
    [K3_HS_GONE] = { "clients_gone", "count", "clients that left before their reply was whole", K3_COUNTER },
    [K3_HS_CUT] = { "connections_cut", "count", "connections that sent too slowly", K3_COUNTER },
    [K3_HS_ANSWERS] = { "answers", "count", "answers that were begun", K3_COUNTER },
    [K3_HS_PROMPT] = { "prompt_tokens", "count", "tokens of their prompts", K3_COUNTER },
    [K3_HS_GENERATED] = { "generated_tokens", "count", "tokens of the answers", K3_COUNTER },
    [K3_HS_CONNECTIONS] = { "connections", "count", "open connections", K3_GAUGE },
    [K3_HS_QUEUED] = { "answers_queued", "count", "requests that wait for their turn", K3_GAUGE },
    [K3_HS_RUNNING] = { "answers_running", "count", "answers that are being made", K3_GAUGE },
    [K3_HS_SECONDS] = { "answer_time_ns", "ns", "time of an answer, without its wait in the queue", K3_HISTOGRAM },
    [K3_HS_FIRST] = { "first_token_time_ns", "ns", "time to the first token, without the wait in the queue", K3_HISTOGRAM },
};

/* ---- k3-computed ---- */

static double number_of(const cJSON *o, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);

    return cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble < 1e15 ? v->valuedouble : 0;
}

static bool ask_peer(const struct k3_http *h, struct k3_http_peer *out)
{
    struct k3_client *c = NULL;
    cJSON *request = cJSON_CreateObject(), *reply = NULL;
    const cJSON *digest, *kernels;

    *out = (struct k3_http_peer){ .known = false };
    cJSON_AddStringToObject(request, "cmd", "info");
    if (k3_client_open(&c, h->r->rundir, "k3-computed.ctl", NULL) == 0 &&
        k3_client_call(c, request, INFO_MS, &reply, NULL) == 0 && number_of(reply, "ctx") >= 1) {
        out->known = true;
        out->ctx = (uint64_t)number_of(reply, "ctx");
        out->sequences = (uint64_t)number_of(reply, "sequences");
        out->batch_rows = (uint64_t)number_of(reply, "batch_rows");
        out->vocab = (uint64_t)number_of(reply, "vocab");
        out->layers = (uint64_t)number_of(reply, "layers");
        out->layers_model = (uint64_t)number_of(reply, "layers_model");
        out->threads = (uint64_t)number_of(reply, "threads");
        out->state_bytes = (uint64_t)number_of(reply, "state_bytes");
        out->buffer_bytes = (uint64_t)number_of(reply, "buffer_bytes");
        out->thread_bytes = (uint64_t)number_of(reply, "thread_bytes");
        kernels = cJSON_GetObjectItemCaseSensitive(reply, "kernels");
        snprintf(out->kernels, sizeof(out->kernels), "%s", cJSON_IsString(kernels) ? kernels->valuestring : "");
        digest = cJSON_GetObjectItemCaseSensitive(reply, "model_digest");
        snprintf(out->digest, sizeof(out->digest), "%s", cJSON_IsString(digest) ? digest->valuestring : "");
    }
    cJSON_Delete(reply);
    cJSON_Delete(request);
    k3_client_close(c);
    return out->known;
}

void *k3_http_peer_thread(void *arg)
{
    static const struct timespec look = { 0, LOOK_NS };
    struct k3_http *h = arg;
    unsigned n = 0;
    bool leaving = false;

    while (!leaving) {
        struct k3_http_peer now;

        /* One that does not answer keeps what it has said: it is busy, or being restarted as it was. */
        if (n == 0 && k3_lock_alive(h->r->rundir, "k3-computed") && ask_peer(h, &now)) {
            pthread_mutex_lock(&h->lock);
            h->peer = now;
            pthread_mutex_unlock(&h->lock);
            n = LOOKS_KNOWN;
        }
        n -= n > 0;
        k3_http_machine_ask(h, k3_now_ns());
        nanosleep(&look, NULL);
        pthread_mutex_lock(&h->lock);
        leaving = h->leaving;
        pthread_mutex_unlock(&h->lock);
    }
    return NULL;
}

/* ---- is it ready? ---- */

static bool member_ready(const struct k3_http *h, const char *name, char *why, size_t len)
{
    const char *rundir = h->r->rundir, *instance = h->r->instance;
    struct k3_stats s;
    uint32_t state = K3_READY;
    char reason[1024];
    int code;

    if (!k3_lock_alive(rundir, name)) {
        if (!k3_member_given_up(rundir, name, &code)) {
            snprintf(why, len, "%s is not running; it is being started, or start it with: run/k3-run up --instance %s", name,
                     instance);
            return false;
        }
        k3_member_last_error(reason, sizeof(reason), rundir, name);
        snprintf(why, len, "%s has failed: %.400s; when that is mended: run/k3-run restart %s --instance %s", name,
                 reason[0] ? reason : "its log says no reason", name, instance);
        return false;
    }
    if (k3_stats_open(&s, instance, name, NULL) == 0) {
        state = atomic_load_explicit(&s.page->state, memory_order_relaxed);
        k3_stats_close(&s);
    }
    if (state == K3_READY)
        return true;
    snprintf(why, len, "%s is %s", name, k3_daemon_state_name(state));
    return false;
}

int k3_http_family_ready(const struct k3_http *h, char *why, size_t len)
{
    static const char *const weights[] = { "k3-trunkd", "k3-expertd", "k3-computed" };

    if (h->stopping || k3_daemon_draining(h->daemon)) {
        snprintf(why, len, "the server is %s", h->stopping ? "stopping" : "draining");
        return -EAGAIN;
    }
    for (size_t i = 0; i < sizeof(weights) / sizeof(weights[0]); i++)
        if (!member_ready(h, weights[i], why, len))
            return -EAGAIN;
    if (h->peer.known && h->peer.vocab < k3_tokenizer_n_vocab(h->r->t)) {
        snprintf(why, len, "k3-computed runs a model of %llu ids, the tokenizer of this server has %u",
                 (unsigned long long)h->peer.vocab, k3_tokenizer_n_vocab(h->r->t));
        return -EAGAIN;
    }
    return 0;
}

void k3_http_get_health(struct k3_http_req *q)
{
    char why[800];
    int rc;

    pthread_mutex_lock(&q->h->lock);
    rc = k3_http_family_ready(q->h, why, sizeof(why));
    pthread_mutex_unlock(&q->h->lock);
    if (rc < 0) {
        k3_http_error(q, 503, NULL, NULL, "%s", why);
        return;
    }
    k3_buf_puts(&q->out, "{\"status\":\"ok\"}\n");
    k3_http_reply(q, 200, "application/json");
}

/* ---- models ---- */

static int put_model(struct k3_http_req *q, struct k3_buf *b)
{
    const struct k3_http *h = q->h;
    uint64_t ctx;
    int rc = k3_buf_puts(b, "{\"id\":");

    pthread_mutex_lock(&q->h->lock);
    ctx = h->peer.ctx;
    pthread_mutex_unlock(&q->h->lock);
    rc |= k3_buf_json(b, h->name, strlen(h->name));
    rc |= k3_buf_printf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"k3\"", (long long)h->created);
    if (ctx)
        rc |= k3_buf_printf(b, ",\"max_model_len\":%llu,\"context_length\":%llu", (unsigned long long)ctx, (unsigned long long)ctx);
    rc |= k3_buf_printf(b, ",\"meta\":{\"n_vocab\":%u}}", k3_tokenizer_n_vocab(h->r->t));
    return rc;
}

static void reply_json(struct k3_http_req *q, int rc)
{
    if (rc || k3_buf_puts(&q->out, "\n"))
        k3_http_error(q, 500, NULL, NULL, "no memory for the reply");
    else
        k3_http_reply(q, 200, "application/json");
}

void k3_http_get_models(struct k3_http_req *q)
{
    int rc = k3_buf_puts(&q->out, "{\"object\":\"list\",\"data\":[");

    rc |= put_model(q, &q->out);
    rc |= k3_buf_puts(&q->out, "]}");
    reply_json(q, rc);
}

void k3_http_get_model(struct k3_http_req *q, const char *id)
{
    if (strcmp(id, q->h->name) == 0)
        reply_json(q, put_model(q, &q->out));
    else
        k3_http_error(q, 404, "model", "model_not_found", "there is no such model; this server has \"%s\"", q->h->name);
}

void k3_http_get_props(struct k3_http_req *q)
{
    const struct k3_generation *g = &q->h->r->gen;
    struct k3_http_peer peer;
    int rc;

    pthread_mutex_lock(&q->h->lock);
    peer = q->h->peer;
    pthread_mutex_unlock(&q->h->lock);
    rc = k3_buf_printf(&q->out, "{\"default_generation_settings\":{\"n_ctx\":%llu,\"params\":{\"temperature\":%.10g,\"top_p\":%.10g,"
                       "\"top_k\":%u,\"min_p\":%.10g}},\"total_slots\":%llu,\"model_path\":", (unsigned long long)peer.ctx,
                       g->temperature, g->top_p, g->top_k, g->min_p, (unsigned long long)peer.sequences);
    rc |= k3_buf_json(&q->out, q->h->name, strlen(q->h->name));
    rc |= k3_buf_printf(&q->out, ",\"chat_template\":\"\",\"modalities\":{\"vision\":false,\"audio\":false},\"build_info\":\"k3 %s\"}",
                        K3_VERSION);
    reply_json(q, rc);
}

/* ---- statistics: as k3ctl has them ---- */

static void ctl_of(const struct k3_http *h, struct k3_ctl_opt *o)
{
    *o = (struct k3_ctl_opt){ .instance = h->r->instance };
    snprintf(o->rundir, sizeof(o->rundir), "%s", h->r->rundir);
}

void k3_http_get_metrics(struct k3_http_req *q)
{
    struct k3_ctl_sample s[K3_CTL_DAEMONS];
    struct k3_ctl_names names;
    struct k3_ctl_opt o;
    uint32_t n = 0;
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);

    ctl_of(q->h, &o);
    k3_ctl_with_pages(&names, &o);
    for (uint32_t i = 0; i < names.n; i++)
        if (k3_ctl_sample(&s[n], &o, names.name[i], NULL) == 0)
            n++;
    if (f)
        k3_ctl_prometheus(f, &o, s, n);
    for (uint32_t i = 0; i < n; i++)
        k3_ctl_sample_free(&s[i]);
    if (!f || fclose(f) != 0 || k3_buf_append(&q->out, text, len) < 0)
        k3_http_error(q, 500, NULL, NULL, "no memory for the reply");
    else
        k3_http_reply(q, 200, "text/plain; version=0.0.4");
    free(text);
}

void k3_http_get_stats(struct k3_http_req *q)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_ctl_opt o;
    cJSON *root;
    char *text;

    ctl_of(q->h, &o);
    root = k3_ctl_stats_all(&o, &err);
    if (root)
        k3_http_machine_add(q->h, root);
    text = root ? cJSON_PrintUnformatted(root) : NULL;
    if (!text || k3_buf_puts(&q->out, text) < 0)
        k3_http_error(q, 500, NULL, NULL, "%s", err.code ? err.text : "no memory for the reply");
    else
        reply_json(q, 0);
    cJSON_free(text);
    cJSON_Delete(root);
}
