/* k3-computed/events.c: a request and its checks, its event log as JSON, the table of all requests (engine.h). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "k3-computed/engine.h"

static int check_ids(const char *what, const uint32_t *ids, uint32_t n, uint32_t vocab, struct k3_err *err)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] >= vocab)
            return k3_refuse(err, -EINVAL, "%s[%u] is %u: the vocabulary has %u ids, 0 to %u", what, i, ids[i], vocab,
                             vocab - 1);
    return 0;
}

int k3_submit_check(const struct k3_submit *s, uint32_t vocab, uint32_t ctx, struct k3_err *err)
{
    uint64_t n_ids = (uint64_t)s->n_prompt + s->n_generated + s->n_stop;
    int rc;

    if (n_ids * sizeof(uint32_t) > K3_MAX_ID_BYTES)
        return k3_refuse(err, -E2BIG, "%llu ids in one request: at most %zu", (unsigned long long)n_ids,
                         K3_MAX_ID_BYTES / sizeof(uint32_t));
    if (s->n_prompt == 0)
        return k3_refuse(err, -EINVAL, "prompt_ids is empty: at least one id is needed");
    rc = check_ids("prompt_ids", s->prompt, s->n_prompt, vocab, err);
    if (rc == 0)
        rc = check_ids("generated_ids", s->generated, s->n_generated, vocab, err);
    if (rc == 0)
        rc = check_ids("stop_ids", s->stop, s->n_stop, vocab, err);
    if (rc < 0)
        return rc;
    if (s->n_stop > K3_MAX_STOP_IDS)
        return k3_refuse(err, -EINVAL, "%u stop_ids: at most %u", s->n_stop, K3_MAX_STOP_IDS);
    for (uint32_t i = 0; i < s->n_points; i++)
        if (s->point[i] <= (i ? s->point[i - 1] : 0) || s->point[i] > s->n_prompt)
            return k3_refuse(err, -EINVAL, "snapshot_points[%u] is %u: they must ascend from 1 to the prompt's %u ids", i,
                             s->point[i], s->n_prompt);
    if (s->max_tokens == 0)
        return k3_refuse(err, -EINVAL, "max_tokens is 0: at least 1");
    if (s->n_generated > s->max_tokens)
        return k3_refuse(err, -EINVAL, "%u generated_ids are more than max_tokens %u", s->n_generated, s->max_tokens);
    if (s->n_prompt >= ctx)
        return k3_refuse(err, -E2BIG, "the prompt has %u ids, --ctx is %u: no room for an answer; start with a larger --ctx",
                         s->n_prompt, ctx);
    if ((uint64_t)s->n_prompt + s->max_tokens > ctx)
        return k3_refuse(err, -E2BIG, "prompt %u + max_tokens %u = %llu ids, --ctx is %u: give max_tokens %u at most, or "
                         "start with a larger --ctx", s->n_prompt, s->max_tokens,
                         (unsigned long long)s->n_prompt + s->max_tokens, ctx, ctx - s->n_prompt);
    return k3_sampling_check(&s->sampling, vocab, err);
}

/* Of the tokens that this submit can still bring. */
static uint64_t logprobs_bytes(const struct k3_submit *sub)
{
    return ((uint64_t)sub->max_tokens - sub->n_generated) * sub->sampling.n_logprobs * sizeof(struct k3_logprob);
}

uint64_t k3_request_bytes(const struct k3_submit *sub, uint32_t vocab)
{
    return sizeof(struct k3_request) +
           ((uint64_t)sub->n_prompt + sub->max_tokens + sub->n_stop + 1) * sizeof(uint32_t) +
           sub->sampling.n_bias * sizeof(struct k3_bias) + logprobs_bytes(sub) +
           (sub->logits ? (uint64_t)vocab * sizeof(float) : 0) +
           (sub->constraint ? k3_constraint_bytes(sub->constraint) : 0);
}

/* A sampling of the request's own. */
static bool copy_sampling(struct k3_request *r, const struct k3_submit *sub)
{
    struct k3_bias *bias = NULL;

    r->sampling = sub->sampling;
    r->sampling.bias = NULL;
    if (sub->sampling.n_bias && !(bias = malloc(sub->sampling.n_bias * sizeof(*bias))))
        return false;
    if (bias)
        memcpy(bias, sub->sampling.bias, sub->sampling.n_bias * sizeof(*bias));
    r->sampling.bias = bias;
    r->logprobs = logprobs_bytes(sub) ? malloc(logprobs_bytes(sub)) : NULL;
    return r->logprobs || !logprobs_bytes(sub);
}

int k3_request_new(struct k3_request **out, struct k3_submit *sub, uint32_t vocab, struct k3_err *err)
{
    struct k3_request *r = calloc(1, sizeof(*r));

    if (!r)
        goto no_memory;
    r->ids = malloc(((size_t)sub->n_prompt + sub->max_tokens) * sizeof(*r->ids));
    r->stop = malloc((sub->n_stop + (size_t)1) * sizeof(*r->stop));
    r->logits = sub->logits ? malloc((size_t)vocab * sizeof(*r->logits)) : NULL;
    if (!r->ids || !r->stop || (sub->logits && !r->logits) || !copy_sampling(r, sub))
        goto no_memory;
    memcpy(r->id, sub->id, sizeof(r->id));
    memcpy(r->ids, sub->prompt, sub->n_prompt * sizeof(*r->ids));
    if (sub->n_generated)
        memcpy(r->ids + sub->n_prompt, sub->generated, sub->n_generated * sizeof(*r->ids));
    if (sub->n_stop)
        memcpy(r->stop, sub->stop, sub->n_stop * sizeof(*r->stop));
    r->n_prompt = sub->n_prompt;
    r->n_given = sub->n_generated;
    r->n_ids = sub->n_prompt + sub->n_generated;
    r->n_stop = sub->n_stop;
    r->max_tokens = sub->max_tokens;
    r->n_logits = vocab;
    memcpy(r->point, sub->point, sizeof(r->point));
    r->n_points = sub->n_points;
    r->kept_bytes = k3_request_bytes(sub, vocab);
    r->constraint = sub->constraint;
    sub->constraint = NULL;
    *out = r;
    return 0;
no_memory:
    k3_request_free(r);
    return k3_fail(err, -ENOMEM, "no memory for a request of %u + %u ids", sub->n_prompt,
                   sub->max_tokens);
}

void k3_request_free(struct k3_request *r)
{
    if (!r)
        return;
    free(r->ids);
    free(r->stop);
    free(r->logits);
    free(r->logprobs);
    free((void *)(uintptr_t)r->sampling.bias); /* const for everybody else */
    k3_constraint_free(r->constraint);
    free(r);
}

bool k3_request_is_stop(const struct k3_request *r, uint32_t token)
{
    for (uint32_t i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token)
            return true;
    return false;
}

uint32_t k3_request_n_events(const struct k3_request *r)
{
    return (r->has_logits ? 1 : 0) + (r->n_ids - r->n_prompt - r->n_given) + (r->phase == K3_ENDED ? 1 : 0);
}

uint32_t k3_request_n_told(const struct k3_request *r, uint32_t from)
{
    uint32_t n = k3_request_n_events(r);

    return r->logprobs && from < n && n - from > K3_POLL_LOGPROBS_MAX ? from + K3_POLL_LOGPROBS_MAX : n;
}

/* Little endian float32, as the floats lie in memory on x86-64.  The caller frees; NULL without memory. */
static char *base64(const float *x, size_t n)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *in = (const unsigned char *)x;
    size_t n_in = n * sizeof(float), j = 0;
    char *out = malloc((n_in + 2) / 3 * 4 + 1);

    if (!out)
        return NULL;
    for (size_t i = 0; i < n_in; i += 3) {
        uint32_t v = (uint32_t)in[i] << 16;

        if (i + 1 < n_in)
            v |= (uint32_t)in[i + 1] << 8;
        if (i + 2 < n_in)
            v |= in[i + 2];
        out[j++] = digit[v >> 18];
        out[j++] = digit[v >> 12 & 63];
        out[j++] = i + 1 < n_in ? digit[v >> 6 & 63] : '=';
        out[j++] = i + 2 < n_in ? digit[v & 63] : '=';
    }
    out[j] = 0;
    return out;
}

static void end_event(const struct k3_request *r, cJSON *e)
{
    static const char *const reason[] = { NULL, "stop", "length", "cancelled", NULL };

    if (r->end == K3_END_ERROR) {
        cJSON_AddStringToObject(e, "type", "error");
        cJSON_AddNumberToObject(e, "code", r->code);
        cJSON_AddStringToObject(e, "message", r->message);
        return;
    }
    cJSON_AddStringToObject(e, "type", "done");
    cJSON_AddStringToObject(e, "reason", reason[r->end]);
    if (r->end == K3_END_STOP)
        cJSON_AddNumberToObject(e, "stop_id", r->stop_id);
}

static int logits_event(const struct k3_request *r, cJSON *e)
{
    char *text = base64(r->logits, r->n_logits);
    bool ok = text && cJSON_AddStringToObject(e, "type", "logits") && cJSON_AddNumberToObject(e, "n", r->n_logits) &&
              cJSON_AddStringToObject(e, "base64", text);

    free(text);
    return ok ? 0 : -ENOMEM;
}

/* [logprob of the token, id, logprob, id, logprob..], as text: a node for each number is not needed here.  Nine digits give
 * every float back. */
static int logprobs_field(const struct k3_request *r, uint32_t n, cJSON *e)
{
    const struct k3_logprob *p = r->logprobs + (size_t)n * r->sampling.n_logprobs;
    char text[(K3_TOP_LOGPROBS_MAX + 1) * 40];
    size_t len = (size_t)snprintf(text, sizeof(text), "[%.9g", (double)p[0].value);

    for (uint32_t i = 1; i < r->sampling.n_logprobs; i++)
        len += (size_t)snprintf(text + len, sizeof(text) - len, ",%u,%.9g", p[i].id, (double)p[i].value);
    snprintf(text + len, sizeof(text) - len, "]");
    return cJSON_AddRawToObject(e, "logprobs", text) ? 0 : -ENOMEM;
}

int k3_request_events(const struct k3_request *r, uint32_t from, cJSON *array)
{
    uint32_t n = k3_request_n_told(r, from), n_logits = r->has_logits ? 1 : 0;
    uint32_t n_tokens = r->n_ids - r->n_prompt - r->n_given;

    for (uint32_t i = from; i < n; i++) {
        cJSON *e = cJSON_CreateObject();

        if (!e || !cJSON_AddItemToArray(array, e)) {
            cJSON_Delete(e);
            return -ENOMEM;
        }
        cJSON_AddNumberToObject(e, "i", i);
        if (i < n_logits) {
            if (logits_event(r, e) < 0)
                return -ENOMEM;
        } else if (i - n_logits < n_tokens) {
            uint32_t index = r->n_given + (i - n_logits);

            cJSON_AddStringToObject(e, "type", "token");
            cJSON_AddNumberToObject(e, "token", r->ids[r->n_prompt + index]);
            cJSON_AddNumberToObject(e, "index", index);
            if (r->logprobs && logprobs_field(r, i - n_logits, e) < 0)
                return -ENOMEM;
        } else {
            end_event(r, e);
        }
    }
    return 0;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static uint32_t bucket_of(const char *id)
{
    uint32_t h = 2166136261u; /* FNV-1a */

    for (; *id; id++)
        h = (h ^ (unsigned char)*id) * 16777619u;
    return h % K3_BUCKETS;
}

struct k3_request *k3_requests_find(const struct k3_requests *t, const char *id)
{
    struct k3_request *r = t->bucket[bucket_of(id)];

    while (r && strcmp(r->id, id) != 0)
        r = r->bucket_next;
    return r;
}

void k3_requests_add(struct k3_requests *t, struct k3_request *r)
{
    struct k3_request **b = &t->bucket[bucket_of(r->id)];

    r->bucket_next = *b;
    *b = r;
    t->kept_bytes += r->kept_bytes;
    t->n++;
}

void k3_requests_remove(struct k3_requests *t, struct k3_request *r)
{
    struct k3_request **p = &t->bucket[bucket_of(r->id)];

    while (*p && *p != r)
        p = &(*p)->bucket_next;
    if (!*p)
        k3_bug("request %s is not in the table", r->id);
    *p = r->bucket_next;
    t->kept_bytes -= r->kept_bytes;
    t->n--;
    if (r->slot)
        r->forgotten = true; /* the pass that runs still reads it */
    else
        k3_request_free(r);
}

void k3_requests_expire(struct k3_requests *t, uint64_t now_ns)
{
    for (uint32_t b = 0; b < K3_BUCKETS; b++)
        for (struct k3_request *r = t->bucket[b], *next; r; r = next) {
            next = r->bucket_next;
            if (r->phase == K3_ENDED && now_ns - r->ended_ns >= K3_KEEP_NS)
                k3_requests_remove(t, r);
        }
}

bool k3_requests_unfetched(const struct k3_requests *t)
{
    for (uint32_t b = 0; b < K3_BUCKETS; b++)
        for (const struct k3_request *r = t->bucket[b]; r; r = r->bucket_next)
            if (r->phase == K3_ENDED && !r->fetched)
                return true;
    return false;
}

void k3_requests_free(struct k3_requests *t)
{
    for (uint32_t b = 0; b < K3_BUCKETS; b++)
        while (t->bucket[b]) {
            struct k3_request *r = t->bucket[b];

            r->slot = NULL;
            k3_requests_remove(t, r);
        }
}
