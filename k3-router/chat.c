#include "k3-router/chat.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The words of the format.  Each is one segment; its ids are kept. */
enum word {
    W_MESSAGE, W_THINK, W_RESPONSE, W_ROLE, W_NAME, W_TYPE, W_EQUALS, W_QUOTE, W_SYSTEM, W_USER, W_ASSISTANT,
    W_THINKING_EFFORT, W_RESPONSE_FORMAT, N_WORDS
};
static const char *const words[N_WORDS] = {
    "message", "think", "response", " role", " name", " type", "=\"", "\"", "system", "user", "assistant",
    "thinking-effort", "response-format",
};
static const enum word role_word[K3_N_CHAT_ROLES] = { W_SYSTEM, W_USER, W_ASSISTANT };

/* Bodies of the internal system messages: constants of the protocol (spec/text.md 3.4). */
static const char effort_head[] =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=";
static const char effort_tail[] = "`.";
static const char json_object_body[] =
    "The system is invoked with `response_format=json_object`.\nYour response must be raw JSON data without markdown "
    "code blocks (```json) or any additional formatting.";
static const char json_schema_head[] =
    "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without markdown "
    "code blocks (```json) or any additional formatting.\nThe JSON data must match the following schema:\n```json\n";
static const char json_schema_tail[] = "\n```";

struct k3_chat {
    const struct k3_tokenizer *t;
    struct k3_ids word[N_WORDS];
};

/* Where a rendering goes.  After the first failure the rest does nothing, so callers look once, at the end. */
struct render {
    const struct k3_chat *c;
    struct k3_ids *out;
    struct k3_err *err;
    int rc;
};

int k3_chat_open(struct k3_chat **out, const struct k3_tokenizer *t, struct k3_err *err)
{
    struct k3_chat *c = calloc(1, sizeof(*c));
    int rc = c ? 0 : k3_fail(err, -ENOMEM, "chat: no memory");

    if (c)
        c->t = t;
    for (int i = 0; i < N_WORDS && rc == 0; i++)
        rc = k3_tokenizer_encode(t, words[i], strlen(words[i]), &c->word[i], err);
    if (rc < 0) {
        k3_chat_close(c);
        return rc;
    }
    *out = c;
    return 0;
}

void k3_chat_close(struct k3_chat *c)
{
    if (!c)
        return;
    for (int i = 0; i < N_WORDS; i++)
        k3_ids_free(&c->word[i]);
    free(c);
}

static void put_marker(struct render *r, uint32_t above)
{
    if (r->rc == 0 && (r->rc = k3_ids_push(r->out, k3_tokenizer_base(r->c->t) + above)) < 0)
        k3_fail(r->err, r->rc, "chat: no memory for the prompt");
}

static void put_word(struct render *r, enum word w)
{
    if (r->rc == 0 && (r->rc = k3_ids_append(r->out, r->c->word[w].id, r->c->word[w].n)) < 0)
        k3_fail(r->err, r->rc, "chat: no memory for the prompt");
}

static void put_text(struct render *r, const char *bytes, size_t len_bytes)
{
    if (r->rc == 0)
        r->rc = k3_tokenizer_encode(r->c->t, bytes, len_bytes, r->out, r->err);
}

/* Four segments: key, =", escaped value, ". */
static void put_attribute(struct render *r, enum word key, const char *value, size_t len_bytes)
{
    struct k3_buf escaped = { 0 };
    int rc = 0;

    for (size_t i = 0; i < len_bytes && rc == 0; i++)
        rc = value[i] == '&'   ? k3_buf_puts(&escaped, "&amp;")
             : value[i] == '"' ? k3_buf_puts(&escaped, "&quot;")
                               : k3_buf_append(&escaped, &value[i], 1);
    if (rc < 0 && r->rc == 0)
        r->rc = k3_fail(r->err, rc, "chat: no memory for an attribute");
    put_word(r, key);
    put_word(r, W_EQUALS);
    put_text(r, escaped.bytes, escaped.len_bytes);
    put_word(r, W_QUOTE);
    k3_buf_free(&escaped);
}

static void put_attribute_word(struct render *r, enum word key, enum word value)
{
    put_word(r, key);
    put_word(r, W_EQUALS);
    put_word(r, value);
    put_word(r, W_QUOTE);
}

static void open_tag(struct render *r, enum word tag)
{
    put_marker(r, K3_SP_OPEN);
    put_word(r, tag);
    put_marker(r, K3_SP_SEP);
}

static void close_tag(struct render *r, enum word tag)
{
    put_marker(r, K3_SP_CLOSE);
    put_word(r, tag);
    put_marker(r, K3_SP_SEP);
}

static void open_message(struct render *r, enum word role, const struct k3_text *name)
{
    put_marker(r, K3_SP_OPEN);
    put_word(r, W_MESSAGE);
    put_attribute_word(r, W_ROLE, role);
    if (name && name->len_bytes)
        put_attribute(r, W_NAME, name->bytes, name->len_bytes);
    put_marker(r, K3_SP_SEP);
}

static void close_message(struct render *r)
{
    close_tag(r, W_MESSAGE);
    put_marker(r, K3_SP_END_OF_MSG);
}

/* A message of the system to itself; the body is one segment, put together from up to three strings. */
static void internal_system(struct render *r, enum word kind, const char *head, struct k3_text middle, const char *tail)
{
    struct k3_buf body = { 0 };

    if (k3_buf_puts(&body, head) < 0 || k3_buf_append(&body, middle.bytes, middle.len_bytes) < 0 ||
        k3_buf_puts(&body, tail) < 0)
        r->rc = r->rc ? r->rc : k3_fail(r->err, -ENOMEM, "chat: no memory for a body");
    put_marker(r, K3_SP_OPEN);
    put_word(r, W_MESSAGE);
    put_attribute_word(r, W_ROLE, W_SYSTEM);
    put_attribute_word(r, W_TYPE, kind);
    put_marker(r, K3_SP_SEP);
    put_text(r, body.bytes, body.len_bytes);
    close_message(r);
    k3_buf_free(&body);
}

/* Reasoning of nothing but white space counts as none. */
static bool is_blank(struct k3_text t)
{
    const uint8_t *p = (const uint8_t *)t.bytes;

    if (k3_utf8_check(t.bytes, t.len_bytes) < t.len_bytes)
        return false; /* the encoder will refuse it, with the place */
    for (size_t i = 0; i < t.len_bytes; i += k3_utf8_len(p[i]))
        if (!k3_utf8_is_space(k3_utf8_at(p + i), true))
            return false;
    return true;
}

static void put_message(struct render *r, const struct k3_chat_message *m, bool thinking)
{
    open_message(r, role_word[m->role], &m->name);
    if (m->role == K3_CHAT_ASSISTANT && thinking) {
        open_tag(r, W_THINK);
        if (!is_blank(m->reasoning))
            put_text(r, m->reasoning.bytes, m->reasoning.len_bytes);
        close_tag(r, W_THINK);
    }
    if (m->role == K3_CHAT_ASSISTANT)
        open_tag(r, W_RESPONSE);
    for (size_t i = 0; i < m->n_parts; i++)
        put_text(r, m->parts[i].bytes, m->parts[i].len_bytes);
    if (m->role == K3_CHAT_ASSISTANT)
        close_tag(r, W_RESPONSE);
    close_message(r);
}

int k3_chat_render(const struct k3_chat *c, const struct k3_chat_message *messages, size_t n,
                   const struct k3_chat_opts *opts, struct k3_ids *out, struct k3_err *err)
{
    struct render r = { c, out, err, 0 };
    const char *effort = opts->thinking ? opts->effort : NULL;

    if (effort && strcmp(effort, "low") != 0 && strcmp(effort, "high") != 0 && strcmp(effort, "max") != 0)
        return k3_refuse(err, -EINVAL, "thinking effort \"%s\": low, high or max", effort);
    if (effort)
        internal_system(&r, W_THINKING_EFFORT, effort_head, (struct k3_text){ effort, strlen(effort) }, effort_tail);
    for (size_t i = 0; i < n && r.rc == 0; i++) {
        if ((unsigned)messages[i].role >= K3_N_CHAT_ROLES)
            return k3_refuse(err, -EINVAL, "message %zu: role %u; system, user or assistant", i, messages[i].role);
        put_message(&r, &messages[i], opts->thinking);
    }
    if (opts->format == K3_CHAT_JSON_OBJECT)
        internal_system(&r, W_RESPONSE_FORMAT, json_object_body, (struct k3_text){ 0 }, "");
    else if (opts->format == K3_CHAT_JSON_SCHEMA)
        internal_system(&r, W_RESPONSE_FORMAT, json_schema_head, opts->schema, json_schema_tail);
    if (!opts->no_generation_prompt) {
        open_message(&r, W_ASSISTANT, NULL);
        open_tag(&r, opts->thinking ? W_THINK : W_RESPONSE);
    }
    return r.rc;
}
