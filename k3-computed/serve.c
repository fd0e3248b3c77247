/* k3-computed/serve.c: requests of computed.sock as JSON (ipc/msg.h), the loop of the daemon. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "k3-computed/computed.h"

#define FETCH_GRACE_NS 500000000ull

/* ---- fields of a request ----------------------------------------------------------------------------------------------- */

static int get_id(const cJSON *request, char *id, struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, "id");
    const char *text = cJSON_GetStringValue(field);

    if (!text || strlen(text) != K3_ID_LEN || strspn(text, "0123456789abcdefABCDEF") != K3_ID_LEN)
        return k3_refuse(err, -EINVAL, "id %.40s: it must be %d hex digits", text ? text : "(none)", K3_ID_LEN);
    for (size_t i = 0; i <= K3_ID_LEN; i++)
        id[i] = (char)tolower((unsigned char)text[i]);
    return 0;
}

static bool whole(const cJSON *item, double max)
{
    return cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble <= max &&
           item->valuedouble == floor(item->valuedouble);
}

/* max < 2^53.  Without the field: *out = otherwise, or refused when otherwise is NULL. */
static int get_uint(const cJSON *request, const char *name, uint64_t max, const uint64_t *otherwise, uint64_t *out,
                    struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, name);

    if (!field && otherwise) {
        *out = *otherwise;
        return 0;
    }
    if (!field)
        return k3_refuse(err, -EINVAL, "%s is missing: a whole number from 0 to %llu", name, (unsigned long long)max);
    if (!whole(field, (double)max))
        return k3_refuse(err, -EINVAL, "%s is %g: it must be a whole number from 0 to %llu", name,
                         cJSON_GetNumberValue(field), (unsigned long long)max);
    *out = (uint64_t)field->valuedouble;
    return 0;
}

static int get_double(const cJSON *request, const char *name, double *out, struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, name);

    if (!cJSON_IsNumber(field))
        return k3_refuse(err, -EINVAL, "%s is %s", name, field ? "not a number" : "missing: a number is needed");
    *out = field->valuedouble;
    return 0;
}

/* On success *out (NULL when empty) is the caller's, to be freed. */
static int get_ids(const cJSON *request, const char *name, bool needed, const uint32_t **out, uint32_t *n_out,
                   struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, name), *item;
    uint32_t *ids;
    size_t n = 0;

    *out = NULL;
    *n_out = 0;
    if (!field && !needed)
        return 0;
    if (!cJSON_IsArray(field))
        return k3_refuse(err, -EINVAL, "%s is %s", name, field ? "not an array" : "missing: an array of ids is needed");
    cJSON_ArrayForEach(item, field) {
        if (!whole(item, UINT32_MAX))
            return k3_refuse(err, -EINVAL, "%s[%zu] is %s: it must be a token id", name, n,
                             cJSON_IsNumber(item) ? "not a whole number from 0 on" : "not a number");
        if (++n > K3_MAX_ID_BYTES / sizeof(uint32_t))
            return k3_refuse(err, -E2BIG, "%s has more than %zu ids", name, K3_MAX_ID_BYTES / sizeof(uint32_t));
    }
    if (n == 0)
        return 0;
    *out = ids = malloc(n * sizeof(*ids));
    if (!ids)
        return k3_fail(err, -ENOMEM, "no memory for %zu ids", n);
    cJSON_ArrayForEach(item, field)
        ids[(*n_out)++] = (uint32_t)item->valuedouble;
    return 0;
}

/* Without the field *out stays as it is. */
static int maybe_double(const cJSON *request, const char *name, double *out, struct k3_err *err)
{
    return cJSON_GetObjectItemCaseSensitive(request, name) ? get_double(request, name, out, err) : 0;
}

/* [[id, value],..].  p->bias is the caller's, to be freed, also after a failure. */
static int get_bias(const cJSON *request, struct k3_sampling *p, struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, "logit_bias"), *item;
    struct k3_bias *bias;

    if (!field)
        return 0;
    if (!cJSON_IsArray(field) || cJSON_GetArraySize(field) > (int)K3_BIASES_MAX)
        return k3_refuse(err, -EINVAL, "logit_bias is not an array of at most %u pairs", K3_BIASES_MAX);
    p->bias = bias = calloc((size_t)cJSON_GetArraySize(field) + 1, sizeof(*bias));
    if (!bias)
        return k3_fail(err, -ENOMEM, "no memory for logit_bias");
    cJSON_ArrayForEach(item, field) {
        const cJSON *id = cJSON_GetArrayItem(item, 0), *value = cJSON_GetArrayItem(item, 1);

        if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 2 || !whole(id, UINT32_MAX) || !cJSON_IsNumber(value))
            return k3_refuse(err, -EINVAL, "logit_bias[%u] is no pair of a token id and a number", p->n_bias);
        bias[p->n_bias++] = (struct k3_bias){ (uint32_t)id->valuedouble, value->valuedouble };
    }
    return 0;
}

static int get_points(const cJSON *request, struct k3_submit *s, struct k3_err *err)
{
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, "snapshot_points"), *item;

    if (field && !cJSON_IsArray(field))
        return k3_refuse(err, -EINVAL, "snapshot_points is not an array");
    cJSON_ArrayForEach(item, field) {
        if (s->n_points == K3_MAX_POINTS)
            return k3_refuse(err, -E2BIG, "more than %u snapshot_points", K3_MAX_POINTS);
        if (!whole(item, UINT32_MAX))
            return k3_refuse(err, -EINVAL, "snapshot_points[%u] is not a whole number from 0 on", s->n_points);
        s->point[s->n_points++] = (uint32_t)item->valuedouble;
    }
    return 0;
}

static int get_adjustments(const cJSON *request, struct k3_sampling *p, struct k3_err *err)
{
    static const uint64_t none = UINT64_MAX;
    uint64_t top = none;
    int rc = maybe_double(request, "presence_penalty", &p->presence_penalty, err);

    p->repeat_penalty = 1;
    if (rc == 0)
        rc = maybe_double(request, "frequency_penalty", &p->frequency_penalty, err);
    if (rc == 0)
        rc = maybe_double(request, "repeat_penalty", &p->repeat_penalty, err);
    if (rc == 0 && !(p->repeat_penalty > 0))
        rc = k3_refuse(err, -EINVAL, "repeat_penalty %g: it must lie above 0", p->repeat_penalty);
    if (rc == 0)
        rc = get_uint(request, "logprobs", K3_TOP_LOGPROBS_MAX, &none, &top, err);
    p->n_logprobs = rc == 0 && top != none ? (uint32_t)top + 1 : 0;
    return rc < 0 ? rc : get_bias(request, p, err);
}

static int get_sampling(const cJSON *request, struct k3_sampling *p, struct k3_err *err)
{
    const char *seed = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(request, "seed"));
    uint64_t top_k;
    int rc = get_double(request, "temperature", &p->temperature, err);

    if (rc == 0)
        rc = get_double(request, "top_p", &p->top_p, err);
    if (rc == 0)
        rc = get_double(request, "min_p", &p->min_p, err);
    if (rc == 0)
        rc = get_uint(request, "top_k", UINT32_MAX, NULL, &top_k, err);
    if (rc < 0)
        return rc;
    p->top_k = (uint32_t)top_k;
    if (!seed || k3_parse_u64(seed, 0, UINT64_MAX, &p->seed) < 0)
        return k3_refuse(err, -EINVAL, "seed %.40s: it must be a string with a decimal number below 2^64",
                         seed ? seed : "(none)");
    return get_adjustments(request, p, err);
}

/* ---- commands ---------------------------------------------------------------------------------------------------------- */

int k3_computed_submit_parse(const cJSON *request, struct k3_submit *s, struct k3_err *err)
{
    const cJSON *logits = cJSON_GetObjectItemCaseSensitive(request, "logits");
    uint64_t max_tokens = 0;
    int rc;

    *s = (struct k3_submit){ .logits = cJSON_IsTrue(logits) };
    rc = get_id(request, s->id, err);
    if (rc == 0)
        rc = get_ids(request, "prompt_ids", true, &s->prompt, &s->n_prompt, err);
    if (rc == 0)
        rc = get_ids(request, "generated_ids", false, &s->generated, &s->n_generated, err);
    if (rc == 0)
        rc = get_ids(request, "stop_ids", false, &s->stop, &s->n_stop, err);
    if (rc == 0)
        rc = get_uint(request, "max_tokens", UINT32_MAX, NULL, &max_tokens, err);
    if (rc == 0)
        rc = get_sampling(request, &s->sampling, err);
    if (rc == 0)
        rc = get_points(request, s, err);
    if (rc == 0 && logits && !cJSON_IsBool(logits))
        rc = k3_refuse(err, -EINVAL, "logits is neither true nor false");
    s->max_tokens = (uint32_t)max_tokens;
    if (rc < 0)
        k3_computed_submit_free(s);
    return rc;
}

void k3_computed_submit_free(struct k3_submit *s)
{
    free((void *)(uintptr_t)s->prompt); /* const for everybody else */
    free((void *)(uintptr_t)s->generated);
    free((void *)(uintptr_t)s->stop);
    free((void *)(uintptr_t)s->sampling.bias);
    k3_constraint_free(s->constraint);
    *s = (struct k3_submit){ .n_prompt = 0 };
}

static int submit(struct k3_computed *c, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    const cJSON *wanted = cJSON_GetObjectItemCaseSensitive(request, "model_digest");
    char digest[65];
    struct k3_submit s;
    bool known = false;
    int rc;

    k3_computed_digest(c, digest);
    cJSON_AddStringToObject(reply, "model", c->model_path);
    cJSON_AddStringToObject(reply, "model_digest", digest);
    if (wanted && (!cJSON_IsString(wanted) || strcmp(wanted->valuestring, digest) != 0))
        return k3_refuse(err, -ESTALE, "model_digest %.40s: this is %s, whose digest is %.8s", /* ids mean nothing here */
                         cJSON_IsString(wanted) ? wanted->valuestring : "(no string)", c->model_path, digest);
    rc = k3_computed_submit_parse(request, &s, err);
    if (rc < 0)
        return rc;
    rc = k3_computed_constrain(c, request, &s, err);
    if (rc == 0)
        rc = k3_engine_submit(c->engine, &s, k3_daemon_draining(c->daemon), &known, err);
    k3_computed_submit_free(&s);
    if (rc < 0)
        return rc;
    cJSON_AddBoolToObject(reply, "known", known);
    cJSON_AddBoolToObject(reply, "whole_model", c->model->cfg.n_layers == c->model->cfg.n_layers_model);
    cJSON_AddNumberToObject(reply, "generation", k3_daemon_generation(c->daemon));
    return 0;
}

static int poll(struct k3_computed *c, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    static const uint64_t zero, absent = UINT64_MAX;
    uint64_t from, progress_from, wait_ms;
    char id[K3_ID_LEN + 1];
    int rc = get_id(request, id, err);

    if (rc == 0)
        rc = get_uint(request, "from", UINT32_MAX, &zero, &from, err);
    if (rc == 0)
        rc = get_uint(request, "progress_from", 1ull << 52, &absent, &progress_from, err);
    if (rc == 0)
        rc = get_uint(request, "wait_ms", UINT32_MAX, &zero, &wait_ms, err);
    if (rc < 0)
        return rc;
    return k3_engine_poll(c->engine, id, (uint32_t)from, progress_from == absent ? -1 : (int64_t)progress_from,
                          (uint32_t)wait_ms, reply, err);
}

void k3_computed_answer(void *arg, const char *cmd, const cJSON *request, cJSON *reply)
{
    struct k3_computed *c = arg;
    struct k3_err err = K3_ERR_INIT;
    char id[K3_ID_LEN + 1];
    int rc;

    if (strcmp(cmd, "submit") == 0)
        rc = submit(c, request, reply, &err);
    else if (strcmp(cmd, "poll") == 0)
        rc = poll(c, request, reply, &err);
    else if (strcmp(cmd, "cancel") != 0 && strcmp(cmd, "forget") != 0)
        rc = k3_refuse(&err, -ENOSYS, "unknown command %.40s: there are submit, poll, cancel and forget", cmd);
    else if ((rc = get_id(request, id, &err)) == 0)
        rc = strcmp(cmd, "cancel") == 0 ? k3_engine_cancel(c->engine, id, &err) : k3_engine_forget(c->engine, id, &err);
    if (rc < 0)
        k3_reply_error(reply, &err);
}

void k3_computed_gates(const struct k3_computed *c, uint32_t *n_pinned, uint32_t *n)
{
    const struct k3_model *m = c->model;
    const struct k3_layout *l = k3_shm_source_layout(c->source);

    *n_pinned = *n = 0;
    for (uint32_t layer = m->cfg.first_dense ? m->cfg.first_dense : 1; layer < m->cfg.n_layers; layer++) {
        int64_t index = k3_model_matrix(m, (int)layer, K3_W_ROUTER);
        bool pinned = index >= 0;

        for (uint32_t i = 0; pinned && i < m->matrices[index].n_pieces; i++)
            pinned = l->pinned[m->matrices[index].first_piece + i];
        *n += 1;
        *n_pinned += pinned;
    }
}

static int trace(struct k3_computed *c, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    const char *action = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(request, "action"));
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(request, "file");
    const char *file = cJSON_GetStringValue(field);
    const cJSON *look = cJSON_GetObjectItemCaseSensitive(request, "lookahead");
    uint32_t n_pinned, n_gates;
    int rc;

    if (!action || (strcmp(action, "start") && strcmp(action, "stop")))
        return k3_refuse(err, -EINVAL, "trace %.40s: there are start and stop", action ? action : "(no action)");
    if ((field && !file) || (look && !cJSON_IsBool(look)))
        return k3_refuse(err, -EINVAL, "trace: file must be a string, lookahead true or false");
    if (strcmp(action, "stop") == 0)
        return k3_tracer_stop(c->tracer, file, reply, err);
    if (!file)
        return k3_refuse(err, -EINVAL, "trace start: file is missing");
    if (cJSON_IsTrue(look)) {
        k3_computed_gates(c, &n_pinned, &n_gates);
        if (n_pinned == 0)
            return k3_refuse(err, -ENODATA, "look-ahead needs the router gate of a layer before its turn, and of %u gates none is "
                             "pinned: give k3-trunkd more --trunk-gb (gates are pinned first)", n_gates);
        cJSON_AddNumberToObject(reply, "gates", n_gates);
        cJSON_AddNumberToObject(reply, "gates_pinned", n_pinned);
    }
    rc = k3_tracer_start(c->tracer, file, cJSON_IsTrue(look), err);
    if (rc == 0)
        k3_log(K3_LOG_INFO, "trace_started", "file=\"%s\"", file);
    return rc;
}

int k3_computed_ctl(void *arg, const char *cmd, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    if (strcmp(cmd, "trace") == 0)
        return trace(arg, request, reply, err);
    return k3_refuse(err, -ENOSYS, "k3-computed knows no command \"%.40s\"", cmd);
}

/* ---- the loop ---------------------------------------------------------------------------------------------------------- */

void k3_computed_notice(void *arg, const char *event, const char *text)
{
    struct k3_computed *c = arg;

    k3_log(K3_LOG_WARN, strcmp(event, "trunkd_back") == 0 ? "trunkd_reattached" : event, "%s", text);
    k3_daemon_beat(c->daemon);
}

/* The generation in the stats page of expertd; 0 when it has none just now. */
static uint32_t expertd_generation(const struct k3_computed *c)
{
    struct k3_stats s = { .seg = K3_SEG_INIT };
    uint32_t generation = 0;

    if (k3_stats_open(&s, k3_daemon_instance(c->daemon), "k3-expertd", NULL) == 0) {
        generation = s.page->generation;
        k3_stats_close(&s);
    }
    return generation;
}

void k3_computed_tick(void *arg)
{
    struct k3_computed *c = arg;
    struct k3_stats *s = k3_daemon_stats(c->daemon);
    struct k3_shm_counts n;

    k3_shm_source_counts(c->source, &n);
    k3_stat_set(s, K3_CS_TRUNK_WAITS, n.trunk.waits);
    k3_stat_set(s, K3_CS_RING_ROW_BYTES, n.trunk.ring_bytes);
    k3_stat_set(s, K3_CS_PINNED_ROW_BYTES, n.trunk.pinned_bytes);
    k3_stat_set(s, K3_CS_TRUNK_REATTACHED, n.trunk.reattached);
    k3_stat_set(s, K3_CS_EXPERT_DEMANDS, n.expert.demands);
    k3_stat_set(s, K3_CS_EXPERT_HITS, n.expert.hits);
    k3_stat_set(s, K3_CS_EXPERT_REATTACHED, n.expert.reattached);
    if (n.expert.reattached != c->seen_expertd)
        k3_log(K3_LOG_WARN, "expertd_reattached", "generation=%u", expertd_generation(c));
    c->seen_expertd = n.expert.reattached;
    k3_daemon_beat(c->daemon);
}

int k3_computed_serve(struct k3_computed *c, struct k3_err *err)
{
    int rc = k3_server_open(&c->server, k3_daemon_rundir(c->daemon), "computed.sock", K3_CONTEXTS, k3_computed_answer, c,
                            err);
    uint32_t n_pinned, n_gates;

    if (rc < 0)
        return rc;
    k3_computed_gates(c, &n_pinned, &n_gates);
    if (c->opt.prefetch && n_pinned < n_gates)
        k3_log(K3_LOG_WARN, "prefetch_without_gates", "pinned=%u of=%u text=\"the experts of the other layers are not guessed: "
               "give k3-trunkd more --trunk-gb\"", n_pinned, n_gates);
    k3_daemon_ready(c->daemon);
    k3_engine_run(c->engine);
    k3_engine_wait_fetched(c->engine, FETCH_GRACE_NS); /* so that clients hear why their answers end */
    return 0;
}
