/* A line of --json-lines: a body as /v1/chat/completions takes it, or {"prompt": TEXT}. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/lines.h"

#define ID_BYTES_MAX 256u
#define STOP_BYTES_MAX 1024u
#define N_STOPS_MAX 16u

static int bad(struct k3_err *err, const char *name, const char *want)
{
    return k3_refuse(err, -EINVAL, "%s: must be %s", name, want);
}

static int get_number(const struct k3_json *o, const char *name, double min, double max, double *out, struct k3_err *err)
{
    const struct k3_json *v = k3_json_value(o, name);
    double d;

    if (!v)
        return 0;
    d = v->type == K3_JSON_NUMBER ? strtod(v->text.bytes, NULL) : NAN;
    if (!(d >= min && d <= max))
        return k3_refuse(err, -EINVAL, "%s: must be a number from %.10g to %.10g", name, min, max);
    *out = d;
    return 0;
}

/* *given stays as it is when there is no such member. */
static int get_whole(const struct k3_json *o, const char *name, uint64_t min, uint64_t max, uint64_t *out, bool *given,
                     struct k3_err *err)
{
    const struct k3_json *v = k3_json_value(o, name);

    if (!v)
        return 0;
    if (v->type != K3_JSON_NUMBER || k3_parse_u64(v->text.bytes, min, max, out) < 0)
        return k3_refuse(err, -EINVAL, "%s: must be a whole number from %llu to %llu", name, (unsigned long long)min,
                         (unsigned long long)max);
    *given = true;
    return 0;
}

static int get_sampling(const struct k3_json *o, struct k3_prompt *p, struct k3_err *err)
{
    uint64_t n = 0;
    bool given = false, many = false;
    int rc = get_number(o, "temperature", 0, 100, &p->temperature, err);

    if (rc == 0)
        rc = get_number(o, "top_p", 1e-9, 1, &p->top_p, err);
    if (rc == 0)
        rc = get_number(o, "min_p", 0, 1, &p->min_p, err);
    if (rc == 0)
        rc = get_whole(o, "top_k", 0, 1u << 30, &n, &given, err);
    if (rc == 0 && given)
        p->top_k = (uint32_t)n;
    if (rc == 0)
        rc = get_whole(o, "seed", 0, UINT64_MAX, &p->seed, &p->seeded, err);
    if (rc == 0)
        rc = get_whole(o, "max_tokens", 1, 1u << 24, &p->max_tokens, &many, err);
    if (rc == 0)
        rc = get_whole(o, "max_completion_tokens", 1, 1u << 24, &p->max_tokens, &many, err);
    return rc;
}

static int add_stop(struct k3_line_body *b, const struct k3_json *v, struct k3_err *err)
{
    if (b->n_stop == N_STOPS_MAX || v->type != K3_JSON_STRING || v->text.len_bytes == 0 ||
        v->text.len_bytes > STOP_BYTES_MAX || memchr(v->text.bytes, 0, v->text.len_bytes))
        return bad(err, "stop", "a text or at most 16, each of 1 to 1024 bytes and without NUL");
    b->stop[b->n_stop] = strndup(v->text.bytes, v->text.len_bytes);
    if (!b->stop[b->n_stop])
        return k3_fail(err, -ENOMEM, "no memory");
    b->n_stop++;
    return 0;
}

static int get_stops(struct k3_line_body *b, const struct k3_json *o, struct k3_prompt *p, struct k3_err *err)
{
    const struct k3_json *v = k3_json_value(o, "stop");
    int rc = 0;

    if (!v)
        return 0;
    if (v->type == K3_JSON_ARRAY)
        for (v = v->child; v && rc == 0; v = v->next)
            rc = add_stop(b, v, err);
    else
        rc = add_stop(b, v, err);
    p->stop = (const char *const *)b->stop;
    p->n_stop = b->n_stop;
    return rc;
}

static int get_id(struct k3_line_body *b, const struct k3_json *o, struct k3_err *err)
{
    const struct k3_json *v = k3_json_value(o, "id");

    if (!v)
        return 0;
    if ((v->type != K3_JSON_STRING && v->type != K3_JSON_NUMBER) || v->text.len_bytes > ID_BYTES_MAX)
        return bad(err, "id", "a text or a number of at most 256 bytes");
    if (k3_json_write(&b->id, v, K3_JSON_SORTED) < 0 || k3_buf_append(&b->id, "", 1) < 0)
        return k3_fail(err, -ENOMEM, "no memory");
    return 0;
}

/* What is sampled freely cannot be promised: refused rather than hoped for. */
static int check_chat(const struct k3_chat_request *q, struct k3_err *err)
{
    if (q->opts.format != K3_CHAT_TEXT)
        return bad(err, "response_format", "text; --json-lines has no other");
    if (q->opts.tool_choice == K3_CHAT_TOOLS_REQUIRED)
        return bad(err, "tool_choice", "auto or none; --json-lines has no other");
    return 0;
}

static int get_messages(struct k3_line_body *b, const struct k3_router *r, const struct k3_json *o, struct k3_prompt *p,
                        struct k3_err *err)
{
    struct k3_chat_opts defaults = { .thinking = r->thinking, .effort = r->gen.effort };
    int rc = r->mode == K3_ANSWER_CHAT ? 0 : bad(err, "messages", "absent with --raw; give \"prompt\"");

    if (rc == 0)
        rc = k3_chat_request_read(&b->chat, o, &defaults, err);
    if (rc == 0)
        rc = check_chat(&b->chat, err);
    if (rc == 0)
        rc = k3_chat_request_render(&b->chat, r->chat, &p->ids, err);
    p->thinking = b->chat.starts_thinking;
    p->max_calls = b->chat.max_calls;
    if (rc == -EINVAL)
        err->exit_status = K3_EXIT_REFUSED;
    return rc;
}

/* Every member is one that is honoured.  "model" says nothing here: there is one. */
static int check_members(const struct k3_json *o, bool chat, struct k3_err *err)
{
    static const char *const known[] = { "id", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p",
                                         "top_k", "min_p", "seed", "stop" };

    for (const struct k3_json *v = o->child; v; v = v->next) {
        bool found = chat && k3_chat_request_has(v->key);
        for (size_t i = 0; i < sizeof(known) / sizeof(known[0]) && !found; i++)
            found = k3_text_is(v->key, known[i]);
        if (!found)
            return k3_refuse(err, -EINVAL, "\"%.*s\": --json-lines%s does not know it",
                             (int)(v->key.len_bytes < 64 ? v->key.len_bytes : 64), v->key.bytes, chat ? "" : " with \"prompt\"");
    }
    return 0;
}

int k3_line_body(struct k3_line_body *b, const struct k3_router *r, const char *text, size_t len_bytes, struct k3_prompt *p,
                 struct k3_err *err)
{
    const struct k3_json *o, *prompt;
    int rc;

    *b = (struct k3_line_body){ 0 };
    rc = k3_json_parse(&b->doc, len_bytes ? text : "", len_bytes, err);
    if (rc < 0)
        return rc;
    o = b->doc.node;
    if (o->type != K3_JSON_OBJECT)
        return k3_refuse(err, -EINVAL, "a JSON object is expected");
    prompt = k3_json_value(o, "prompt");
    rc = get_id(b, o, err);
    if (rc == 0 && (prompt != NULL) == (k3_json_value(o, "messages") != NULL))
        rc = k3_refuse(err, -EINVAL, "either \"messages\" or \"prompt\" is expected");
    if (rc == 0)
        rc = check_members(o, !prompt, err);
    if (rc == 0)
        rc = get_sampling(o, p, err);
    if (rc == 0)
        rc = get_stops(b, o, p, err);
    if (rc < 0)
        return rc;
    if (!prompt)
        return get_messages(b, r, o, p, err);
    if (prompt->type != K3_JSON_STRING)
        return bad(err, "prompt", "a text");
    rc = k3_router_check_prompt(prompt->text.bytes, prompt->text.len_bytes, 0, "prompt", err);
    return rc < 0 ? rc : k3_exchange_prompt(r, prompt->text.bytes, prompt->text.len_bytes, &p->ids, err);
}

void k3_line_body_free(struct k3_line_body *b)
{
    k3_chat_request_free(&b->chat);
    k3_json_free(&b->doc);
    for (size_t i = 0; i < b->n_stop; i++)
        free(b->stop[i]);
    k3_buf_free(&b->id);
    *b = (struct k3_line_body){ 0 };
}
