/* Fields of a request body.  Each is honoured, or refused with its name in "param" (docs/user/serving.md has the table). */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/http.h"

#define STOP_BYTES_MAX 1024u
#define EXACT 9007199254740992.0 /* 2^53: up to here a double has every whole number */

size_t k3_http_count_values(const char *text, size_t len_bytes)
{
    bool string = false;
    size_t n = 1;

    for (size_t i = 0; i < len_bytes; i++) {
        char c = text[i];

        if (string && c == '\\')
            i++;
        else if (c == '"')
            string = !string;
        else if (!string)
            n += c == ',' || c == '[' || c == '{';
    }
    return n;
}

int k3_http_body(struct k3_http_req *q, struct k3_json_doc *doc)
{
    struct k3_err err = K3_ERR_INIT;
    size_t n = k3_http_count_values(q->body.bytes, q->body.len_bytes);
    int rc = -EINVAL;

    if (n > K3_HTTP_VALUES_MAX) {
        k3_http_error(q, 413, NULL, "body_too_large", "the body has about %zu JSON values; at most %u", n, K3_HTTP_VALUES_MAX);
    } else if ((rc = k3_json_parse(doc, q->body.len_bytes ? q->body.bytes : "", q->body.len_bytes, &err)) < 0) {
        k3_http_error(q, rc == -ENOMEM ? 503 : 400, NULL, rc == -ENOMEM ? NULL : "invalid_json", "the body: %s", err.text);
    } else if (doc->node[0].type != K3_JSON_OBJECT) {
        k3_http_error(q, 400, NULL, "invalid_json", "the body must be a JSON object");
        k3_json_free(doc);
        rc = -EINVAL;
    }
    return rc;
}

int k3_http_field_refused(struct k3_http_req *q, const char *name, const char *want)
{
    k3_http_error(q, 400, name, "invalid_value", "%s: must be %s", name, want);
    return -EINVAL;
}

int k3_http_get_bool(struct k3_http_req *q, const struct k3_json *o, const char *name, bool *out)
{
    const struct k3_json *v = k3_json_value(o, name);

    if (!v)
        return 0;
    if (v->type != K3_JSON_TRUE && v->type != K3_JSON_FALSE)
        return k3_http_field_refused(q, name, "true or false");
    *out = v->type == K3_JSON_TRUE;
    return 0;
}

int k3_http_get_number(struct k3_http_req *q, const struct k3_json *o, const char *name, double min, double max, double *out)
{
    const struct k3_json *v = k3_json_value(o, name);
    char want[80];
    double d;

    if (!v)
        return 0;
    d = v->type == K3_JSON_NUMBER ? strtod(v->text.bytes, NULL) : NAN;
    if (!(d >= min && d <= max)) {
        snprintf(want, sizeof(want), "a number from %.10g to %.10g", min, max);
        return k3_http_field_refused(q, name, want);
    }
    *out = d;
    return 0;
}

/* 12, 12.0 and 1.2e1 are the same number in JSON. */
static bool whole(const struct k3_json *v, int64_t *out)
{
    char *end;
    double d;

    if (v->type != K3_JSON_NUMBER)
        return false;
    errno = 0;
    *out = strtoll(v->text.bytes, &end, 10);
    if (!*end)
        return errno == 0;
    d = strtod(v->text.bytes, NULL);
    if (!(fabs(d) <= EXACT) || d != floor(d))
        return false;
    *out = (int64_t)d;
    return true;
}

int k3_http_get_whole(struct k3_http_req *q, const struct k3_json *o, const char *name, int64_t min, int64_t max, int64_t *out)
{
    const struct k3_json *v = k3_json_value(o, name);
    char want[80];
    int64_t n;

    if (!v)
        return 0;
    if (!whole(v, &n) || n < min || n > max) {
        snprintf(want, sizeof(want), "a whole number from %lld to %lld", (long long)min, (long long)max);
        return k3_http_field_refused(q, name, want);
    }
    *out = n;
    return 0;
}

int k3_http_get_ids(struct k3_http_req *q, const struct k3_json *array, const char *name, uint32_t n_vocab, struct k3_ids *out)
{
    char want[80];
    int64_t id;

    for (const struct k3_json *v = array->child; v; v = v->next) {
        if (!whole(v, &id) || id < 0 || id >= n_vocab) {
            snprintf(want, sizeof(want), "an array of token ids from 0 to %u", n_vocab - 1);
            return k3_http_field_refused(q, name, want);
        }
        if (k3_ids_push(out, (uint32_t)id) < 0) {
            k3_http_error(q, 503, NULL, NULL, "no memory for the ids");
            return -ENOMEM;
        }
    }
    return 0;
}

static bool listed(const char *const *list, struct k3_text key)
{
    for (; list && *list; list++)
        if (k3_text_is(key, *list))
            return true;
    return false;
}

int k3_http_known(struct k3_http_req *q, const struct k3_json *o, const char *const *honoured, const char *const *ignored)
{
    char name[80];

    for (const struct k3_json *v = o->child; v; v = v->next) {
        if (listed(honoured, v->key) || listed(ignored, v->key) || listed(k3_http_ignored_fields, v->key))
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)(v->key.len_bytes < 64 ? v->key.len_bytes : 64), v->key.bytes);
        k3_http_error(q, 400, name, "unknown_parameter", "%s: this server does not know it", name);
        return -EINVAL;
    }
    return 0;
}

/* ---- what completions have in common ---- */

const char *const k3_http_common_fields[] = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream",
    "stream_options", "n", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repeat_penalty",
    "repetition_penalty", NULL
};
/* They say who asks, or how a service is to bill and cache; nothing of the answer depends on them. */
const char *const k3_http_ignored_fields[] = {
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "cache_prompt", "timings_per_token", "return_progress", NULL
};

/* "1234" and nothing else, so that no two names mean the same id (of two equal ones the parser keeps the last). */
static bool id_of(struct k3_text name, uint32_t n_vocab, uint32_t *id)
{
    uint64_t n = 0;

    if (name.len_bytes == 0 || name.len_bytes > 9 || (name.len_bytes > 1 && name.bytes[0] == '0'))
        return false;
    for (size_t i = 0; i < name.len_bytes; i++) {
        if (name.bytes[i] < '0' || name.bytes[i] > '9')
            return false;
        n = 10 * n + (uint64_t)(name.bytes[i] - '0');
    }
    *id = (uint32_t)n;
    return n < n_vocab;
}

/* {"id":bias,..} becomes [[id,bias],..] (ipc/msg.h). */
static int get_bias(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    const struct k3_json *bias = k3_json_value(o, "logit_bias");
    struct k3_buf b = { 0 };
    char want[120];
    int rc = 0;

    if (!bias || (bias->type == K3_JSON_OBJECT && bias->n == 0))
        return 0;
    snprintf(want, sizeof(want), "an object of at most %u token ids from \"0\" to \"%u\" with numbers from -%g to %g",
             K3_HTTP_BIASES_MAX, k3_tokenizer_n_vocab(q->h->r->t) - 1, K3_HTTP_BIAS_MOST, K3_HTTP_BIAS_MOST);
    if (bias->type != K3_JSON_OBJECT || bias->n > K3_HTTP_BIASES_MAX)
        return k3_http_field_refused(q, "logit_bias", want);
    for (const struct k3_json *v = bias->child; v; v = v->next) {
        double value = v->type == K3_JSON_NUMBER ? strtod(v->text.bytes, NULL) : NAN;
        uint32_t id;

        if (!id_of(v->key, k3_tokenizer_n_vocab(q->h->r->t), &id) || !(fabs(value) <= K3_HTTP_BIAS_MOST)) {
            k3_buf_free(&b);
            return k3_http_field_refused(q, "logit_bias", want);
        }
        rc |= k3_buf_printf(&b, "%s[%u,%.17g]", b.len_bytes ? "," : "[", id, value);
    }
    if (rc || k3_buf_append(&b, "]", 2) < 0) {
        k3_buf_free(&b);
        k3_http_error(q, 503, NULL, NULL, "no memory");
        return -ENOMEM;
    }
    c->logit_bias = b.bytes;
    c->params.logit_bias = b.bytes;
    return 0;
}

static int get_adjustments(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    struct k3_ask_params *p = &c->params;
    int rc = k3_http_get_number(q, o, "presence_penalty", -2, 2, &p->presence_penalty);

    if (rc == 0)
        rc = k3_http_get_number(q, o, "frequency_penalty", -2, 2, &p->frequency_penalty);
    if (rc == 0)
        rc = k3_http_get_number(q, o, "repetition_penalty", 0.01, 10, &p->repeat_penalty); /* vLLM's name for it */
    if (rc == 0)
        rc = k3_http_get_number(q, o, "repeat_penalty", 0.01, 10, &p->repeat_penalty);
    return rc < 0 ? rc : get_bias(q, o, c);
}

int k3_http_get_chat_logprobs(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    bool wanted = false;
    int64_t top = 0;
    int rc = k3_http_get_bool(q, o, "logprobs", &wanted);

    if (rc == 0)
        rc = k3_http_get_whole(q, o, "top_logprobs", 0, K3_TOP_LOGPROBS_MAX, &top);
    if (rc == 0 && top && !wanted)
        rc = k3_http_field_refused(q, "top_logprobs", "absent or 0 without \"logprobs\": true");
    c->params.n_logprobs = wanted ? (uint32_t)top + 1 : 0;
    return rc;
}

int k3_http_get_text_logprobs(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    const struct k3_json *v = k3_json_value(o, "logprobs");
    int64_t top = 0;
    int rc = k3_http_get_whole(q, o, "top_logprobs", 0, 0, &top); /* of chats */

    if (rc < 0 || !v || v->type == K3_JSON_FALSE)
        return rc;
    rc = k3_http_get_whole(q, o, "logprobs", 0, K3_HTTP_TEXT_LOGPROBS_MAX, &top);
    c->params.n_logprobs = (uint32_t)top + 1;
    return rc;
}

static int add_stop(struct k3_http_req *q, struct k3_http_common *c, const struct k3_json *v)
{
    if (c->n_stop == K3_HTTP_STOPS_MAX || v->type != K3_JSON_STRING || v->text.len_bytes == 0 ||
        v->text.len_bytes > STOP_BYTES_MAX || memchr(v->text.bytes, 0, v->text.len_bytes))
        return k3_http_field_refused(q, "stop", "a text or at most 16, each of 1 to 1024 bytes and without NUL");
    c->stop[c->n_stop] = strndup(v->text.bytes, v->text.len_bytes);
    if (!c->stop[c->n_stop]) {
        k3_http_error(q, 503, NULL, NULL, "no memory");
        return -ENOMEM;
    }
    c->n_stop++;
    return 0;
}

static int get_stops(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    const struct k3_json *v = k3_json_value(o, "stop");
    int rc = 0;

    if (!v)
        return 0;
    if (v->type != K3_JSON_ARRAY)
        return add_stop(q, c, v);
    for (v = v->child; v && rc == 0; v = v->next)
        rc = add_stop(q, c, v);
    return rc;
}

static int get_stream(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    static const char *const known[] = { "include_usage", "include_obfuscation", NULL };
    const struct k3_json *options = k3_json_value(o, "stream_options");
    int rc = k3_http_get_bool(q, o, "stream", &c->stream);

    if (rc < 0 || !options)
        return rc;
    if (options->type != K3_JSON_OBJECT || !c->stream)
        return k3_http_field_refused(q, "stream_options", "an object, and only with \"stream\": true");
    rc = k3_http_known(q, options, known, NULL);
    return rc < 0 ? rc : k3_http_get_bool(q, options, "include_usage", &c->include_usage);
}

/* -1 means no limit, as in llama.cpp. */
static int get_max(struct k3_http_req *q, const struct k3_json *o, const char *name, uint64_t *out)
{
    int64_t n = 0;
    int rc = k3_http_get_whole(q, o, name, -1, 1 << 24, &n);

    if (rc == 0 && n == 0 && k3_json_value(o, name))
        rc = k3_http_field_refused(q, name, "at least 1, or -1 for no limit");
    if (rc == 0 && n)
        *out = n < 0 ? UINT64_MAX : (uint64_t)n;
    return rc;
}

static int get_model(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    const struct k3_json *v = k3_json_value(o, "model");
    struct k3_text name = { q->h->name, strlen(q->h->name) };
    struct k3_buf b = { 0 };

    if (v && (v->type != K3_JSON_STRING || v->text.len_bytes > 256))
        return k3_http_field_refused(q, "model", "a text of at most 256 bytes");
    if (v && v->text.len_bytes)
        name = v->text;
    if (k3_buf_json(&b, name.bytes, name.len_bytes) < 0 || k3_buf_append(&b, "", 1) < 0) {
        k3_buf_free(&b);
        k3_http_error(q, 503, NULL, NULL, "no memory");
        return -ENOMEM;
    }
    c->model = b.bytes;
    return 0;
}

int k3_http_get_common(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c)
{
    const struct k3_generation *g = &q->h->r->gen;
    struct k3_ask_params *p = &c->params;
    int64_t top_k = g->top_k, seed = 0, n = 1;
    int rc;

    *c = (struct k3_http_common){ .params = { .temperature = g->temperature, .top_p = g->top_p, .min_p = g->min_p } };
    rc = get_model(q, o, c);
    if (rc == 0)
        rc = get_stream(q, o, c);
    if (rc == 0)
        rc = get_max(q, o, "max_tokens", &p->max_tokens);
    if (rc == 0)
        rc = get_max(q, o, "max_completion_tokens", &p->max_tokens); /* this one wins */
    if (rc == 0)
        rc = k3_http_get_number(q, o, "temperature", 0, 100, &p->temperature);
    if (rc == 0)
        rc = k3_http_get_number(q, o, "top_p", 1e-9, 1, &p->top_p);
    if (rc == 0)
        rc = k3_http_get_number(q, o, "min_p", 0, 1, &p->min_p);
    if (rc == 0)
        rc = k3_http_get_whole(q, o, "top_k", -1, 1 << 30, &top_k);
    if (rc == 0)
        rc = k3_http_get_whole(q, o, "seed", INT64_MIN, INT64_MAX, &seed);
    if (rc == 0)
        rc = get_stops(q, o, c);
    if (rc == 0)
        rc = k3_http_get_whole(q, o, "n", 1, K3_HTTP_CHOICES_MAX, &n);
    if (rc == 0)
        rc = get_adjustments(q, o, c);
    c->n = (unsigned)n;
    p->top_k = top_k < 0 ? 0 : (uint32_t)top_k;
    p->seed = (uint64_t)seed;
    c->seeded = k3_json_value(o, "seed") != NULL;
    return rc;
}

void k3_http_common_free(struct k3_http_common *c)
{
    for (size_t i = 0; i < c->n_stop; i++)
        free(c->stop[i]);
    free(c->model);
    free(c->logit_bias);
    *c = (struct k3_http_common){ .n_stop = 0 };
}
