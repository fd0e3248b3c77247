#include "k3-router/chat.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The words of the format.  Each is one segment; its ids are kept. */
enum word {
    W_MESSAGE, W_THINK, W_RESPONSE, W_ROLE, W_NAME, W_TYPE, W_EQUALS, W_QUOTE, W_SYSTEM, W_USER, W_ASSISTANT,
    W_THINKING_EFFORT, W_RESPONSE_FORMAT, W_TOOL_DECLARE, W_TOOL_CHOICE, W_TOOLS, W_CALL, W_ARGUMENT, W_JSON, W_TOOL,
    W_TOOL_IS, W_INDEX, W_KEY, W_NULL, W_BOOLEAN, W_NUMBER, W_STRING, W_ARRAY, W_OBJECT, N_WORDS
};
static const char *const words[N_WORDS] = {
    "message", "think", "response", " role", " name", " type", "=\"", "\"", "system", "user", "assistant",
    "thinking-effort", "response-format", "tool-declare", "tool-choice", "tools", "call", "argument", "json", "tool",
    " tool", " index", " key", "null", "boolean", "number", "string", "array", "object",
};
static const enum word role_word[K3_N_CHAT_ROLES] = { W_SYSTEM, W_USER, W_ASSISTANT, W_TOOL };
static const enum word type_word[] = {
    [K3_JSON_NULL] = W_NULL,     [K3_JSON_FALSE] = W_BOOLEAN, [K3_JSON_TRUE] = W_BOOLEAN,  [K3_JSON_NUMBER] = W_NUMBER,
    [K3_JSON_STRING] = W_STRING, [K3_JSON_ARRAY] = W_ARRAY,   [K3_JSON_OBJECT] = W_OBJECT,
};

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
static const char json_tail[] = "\n```";
static const char tools_head[] = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
static const char more_tools_head[] =
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all existing "
    "and extended tools.\nHere are the specs for the extended tools.\n\n```json\n";
static const char must_call_body[] =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
static const char must_not_call_body[] =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";

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

static bool is_nothing(struct k3_text t)
{
    /* Text that is not UTF-8 is left to the encoder, which refuses it with the place. */
    return k3_utf8_check(t.bytes, t.len_bytes) == t.len_bytes && k3_text_is_blank(t);
}

static void put_index(struct render *r, size_t index)
{
    char digits[24];

    snprintf(digits, sizeof(digits), "%zu", index);
    put_attribute(r, W_INDEX, digits, strlen(digits));
}

static void put_call(struct render *r, const struct k3_chat_call *c, size_t index)
{
    put_marker(r, K3_SP_OPEN);
    put_word(r, W_CALL);
    put_attribute(r, W_TOOL_IS, c->tool.bytes, c->tool.len_bytes);
    put_index(r, index);
    put_marker(r, K3_SP_SEP);
    for (size_t i = 0; i < c->n_arguments; i++) {
        const struct k3_chat_argument *a = &c->arguments[i];
        put_marker(r, K3_SP_OPEN);
        put_word(r, W_ARGUMENT);
        put_attribute(r, W_KEY, a->key.bytes, a->key.len_bytes);
        put_attribute_word(r, W_TYPE, type_word[a->type]);
        put_marker(r, K3_SP_SEP);
        put_text(r, a->value.bytes, a->value.len_bytes);
        close_tag(r, W_ARGUMENT);
    }
    if (c->json.len_bytes) {
        put_marker(r, K3_SP_OPEN);
        put_word(r, W_JSON);
        put_attribute_word(r, W_TYPE, W_OBJECT);
        put_marker(r, K3_SP_SEP);
        put_text(r, c->json.bytes, c->json.len_bytes);
        close_tag(r, W_JSON);
    }
    close_tag(r, W_CALL);
}

static void put_parts(struct render *r, const struct k3_chat_message *m)
{
    for (size_t i = 0; i < m->n_parts; i++)
        put_text(r, m->parts[i].bytes, m->parts[i].len_bytes);
}

static void put_assistant(struct render *r, const struct k3_chat_message *m, bool thinking)
{
    open_message(r, W_ASSISTANT, &m->name);
    if (thinking) {
        open_tag(r, W_THINK);
        if (!is_nothing(m->reasoning))
            put_text(r, m->reasoning.bytes, m->reasoning.len_bytes);
        close_tag(r, W_THINK);
    }
    open_tag(r, W_RESPONSE);
    put_parts(r, m);
    close_tag(r, W_RESPONSE);
    if (m->n_calls) {
        open_tag(r, W_TOOLS);
        for (size_t i = 0; i < m->n_calls; i++)
            put_call(r, &m->calls[i], i + 1);
        close_tag(r, W_TOOLS);
    }
    close_message(r);
}

/* A message that the answer goes on from: nothing that is still to be written is closed. */
static void put_partial(struct render *r, const struct k3_chat_message *m, bool thinking)
{
    bool answers = !k3_chat_starts_in_think(m, thinking);

    open_message(r, W_ASSISTANT, &m->name);
    if (thinking) {
        open_tag(r, W_THINK);
        if (!is_nothing(m->reasoning))
            put_text(r, m->reasoning.bytes, m->reasoning.len_bytes);
        if (answers)
            close_tag(r, W_THINK);
    }
    if (answers)
        open_tag(r, W_RESPONSE);
    put_parts(r, m);
}

bool k3_chat_starts_in_think(const struct k3_chat_message *last, bool thinking)
{
    size_t n_bytes = 0;

    for (size_t i = 0; last && last->partial && i < last->n_parts; i++)
        n_bytes += last->parts[i].len_bytes;
    return thinking && n_bytes == 0;
}

/* ---- where prompts part ---- */

/* Does a message begin at `at` with this role, and this type (N_WORDS: any or none)?  Only the renderer places markers, so what
 * a client sends can look like none of it. */
static bool is_message(const struct k3_chat *c, const struct k3_ids *p, size_t at, enum word role, enum word type)
{
    const enum word head[] = { W_MESSAGE, W_ROLE, W_EQUALS, role, W_QUOTE, W_TYPE, W_EQUALS, type, W_QUOTE };
    size_t n = sizeof(head) / sizeof(head[0]) - (type == N_WORDS ? 4 : 0);

    if (at >= p->n || p->id[at++] != k3_tokenizer_base(c->t) + K3_SP_OPEN)
        return false;
    for (size_t i = 0; i < n; i++) {
        const struct k3_ids *w = &c->word[head[i]];

        if (w->n > p->n - at || memcmp(p->id + at, w->id, w->n * sizeof(*w->id)) != 0)
            return false;
        at += w->n;
    }
    return true;
}

uint32_t k3_chat_points(const struct k3_chat *c, const struct k3_ids *prompt, uint32_t out[K3_CHAT_POINTS])
{
    size_t at = 0, system = 0, history = 0;
    uint32_t n = 0;

    for (size_t i = 0; i < prompt->n; i++) {
        if (prompt->id[i] != k3_tokenizer_base(c->t) + K3_SP_END_OF_MSG)
            continue;
        if (is_message(c, prompt, at, W_SYSTEM, W_TOOL_CHOICE) || is_message(c, prompt, at, W_SYSTEM, W_RESPONSE_FORMAT))
            break; /* the history has ended */
        if (at == system && is_message(c, prompt, at, W_SYSTEM, N_WORDS))
            system = i + 1;
        history = at = i + 1;
    }
    if (system >= K3_POINT_SYSTEM_IDS && system < history)
        out[n++] = (uint32_t)system;
    if (history)
        out[n++] = (uint32_t)history;
    return n;
}

/* ---- results of calls ---- */

/* Results behind an assistant message: its calls in the order of their ids, and how many results have been rendered since. */
struct results {
    const struct k3_chat_message *caller;
    const struct k3_chat_call **by_id; /* made with the first result */
    size_t n_done;
};
struct result { const struct k3_chat_message *m; size_t call; };

static int compare_ids(struct k3_text a, struct k3_text b)
{
    if (a.len_bytes != b.len_bytes)
        return a.len_bytes < b.len_bytes ? -1 : 1;
    return a.len_bytes ? memcmp(a.bytes, b.bytes, a.len_bytes) : 0;
}

static int by_id(const void *x, const void *y)
{
    const struct k3_chat_call *a = *(const struct k3_chat_call *const *)x, *b = *(const struct k3_chat_call *const *)y;
    int d = compare_ids(a->id, b->id);

    return d ? d : (a > b) - (a < b);
}

static int sort_ids(struct results *s)
{
    size_t n = s->caller ? s->caller->n_calls : 0;

    if (s->by_id || n == 0)
        return 0;
    s->by_id = calloc(n, sizeof(*s->by_id));
    if (!s->by_id)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        s->by_id[i] = &s->caller->calls[i];
    qsort(s->by_id, n, sizeof(*s->by_id), by_id);
    return 0;
}

/* "NAME:POSITION", counted from 0: the id that vLLM makes up for a call without one.  n_calls when it is none. */
static size_t find_position(const struct k3_chat_message *caller, struct k3_text id)
{
    const char *colon = memrchr(id.bytes, ':', id.len_bytes), *end = id.bytes + id.len_bytes;
    size_t at = 0;

    if (!colon || colon + 1 == end || (colon[1] == '0' && colon + 2 < end))
        return caller->n_calls;
    for (const char *p = colon + 1; p < end; p++) {
        if (*p < '0' || *p > '9' || at >= caller->n_calls)
            return caller->n_calls;
        at = at * 10 + (size_t)(*p - '0');
    }
    if (at >= caller->n_calls ||
        compare_ids(caller->calls[at].tool, (struct k3_text){ id.bytes, (size_t)(colon - id.bytes) }) != 0)
        return caller->n_calls;
    return at;
}

/* The first call that id names; n_calls when none does. */
static size_t find_call(const struct results *s, struct k3_text id)
{
    size_t n = s->caller ? s->caller->n_calls : 0, lo = 0, hi = n;

    if (n == 0 || id.len_bytes == 0)
        return n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (compare_ids(s->by_id[mid]->id, id) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo < n && compare_ids(s->by_id[lo]->id, id) == 0)
        return (size_t)(s->by_id[lo] - s->caller->calls);
    return find_position(s->caller, id);
}

static int by_call(const void *x, const void *y)
{
    const struct result *a = x, *b = y;

    if (a->call != b->call)
        return a->call < b->call ? -1 : 1;
    return (a->m > b->m) - (a->m < b->m); /* they lie in one array, in the order in which they came */
}

static void put_result(struct render *r, struct results *s, const struct result *q, bool resolved, size_t at)
{
    const struct k3_chat_message *m = q->m;
    struct k3_text name = resolved ? s->caller->calls[q->call].tool : m->tool.len_bytes ? m->tool : m->name;

    if (name.len_bytes == 0 && s->caller && s->n_done < s->caller->n_calls)
        name = s->caller->calls[s->n_done].tool;
    if (name.len_bytes == 0 && r->rc == 0)
        r->rc = k3_refuse(r->err, -EINVAL, "messages[%zu]: a tool result that no call before it belongs to", at);
    put_marker(r, K3_SP_OPEN);
    put_word(r, W_MESSAGE);
    put_attribute_word(r, W_ROLE, W_TOOL);
    put_attribute(r, W_TOOL_IS, name.bytes, name.len_bytes);
    put_index(r, ++s->n_done);
    put_marker(r, K3_SP_SEP);
    put_parts(r, m);
    close_message(r);
}

/* A run of results.  When all of them name their calls they are put into the order of the calls; else they stay. */
static void put_results(struct render *r, struct results *s, const struct k3_chat_message *m, size_t n, size_t at)
{
    struct result *q = calloc(n, sizeof(*q));
    bool resolved = s->caller != NULL;

    if ((!q || sort_ids(s) < 0) && r->rc == 0)
        r->rc = k3_fail(r->err, -ENOMEM, "chat: no memory for the results of tools");
    for (size_t i = 0; i < n && r->rc == 0; i++) {
        q[i] = (struct result){ &m[i], find_call(s, m[i].call_id) };
        resolved = resolved && q[i].call < s->caller->n_calls;
    }
    if (resolved && r->rc == 0)
        qsort(q, n, sizeof(*q), by_call);
    for (size_t i = 0; i < n && r->rc == 0; i++)
        put_result(r, s, &q[i], resolved, at + (size_t)(q[i].m - m));
    free(q);
}

/* ---- the whole ---- */

static const struct k3_text none;

static void put_messages(struct render *r, const struct k3_chat_message *m, size_t n, bool thinking)
{
    struct results s = { 0 };
    size_t run;

    for (size_t i = 0; i < n && r->rc == 0; i += run) {
        run = 1;
        switch (m[i].role) {
        case K3_CHAT_TOOL:
            while (i + run < n && m[i + run].role == K3_CHAT_TOOL)
                run++;
            put_results(r, &s, &m[i], run, i);
            break;
        case K3_CHAT_ASSISTANT:
            free(s.by_id);
            s = (struct results){ .caller = &m[i] };
            put_assistant(r, &m[i], thinking);
            break;
        default:
            if (m[i].tools.len_bytes) {
                internal_system(r, W_TOOL_DECLARE, more_tools_head, m[i].tools, json_tail);
                break;
            }
            open_message(r, role_word[m[i].role], &m[i].name);
            put_parts(r, &m[i]);
            close_message(r);
        }
    }
    free(s.by_id);
}

static int check_render(const struct k3_chat_message *m, size_t n, const struct k3_chat_opts *o, struct k3_err *err)
{
    if (o->thinking && o->effort && strcmp(o->effort, "low") != 0 && strcmp(o->effort, "high") != 0 &&
        strcmp(o->effort, "max") != 0)
        return k3_refuse(err, -EINVAL, "thinking effort \"%s\": low, high or max", o->effort);
    for (size_t i = 0; i < n; i++) {
        if ((unsigned)m[i].role >= K3_N_CHAT_ROLES)
            return k3_refuse(err, -EINVAL, "messages[%zu]: role %u; system, user, assistant or tool", i, m[i].role);
        if (m[i].partial && (i + 1 < n || m[i].role != K3_CHAT_ASSISTANT || m[i].n_calls))
            return k3_refuse(err, -EINVAL, "messages[%zu]: only the last message, of the assistant and without calls, can be "
                                           "partial", i);
    }
    return 0;
}

int k3_chat_render(const struct k3_chat *c, const struct k3_chat_message *messages, size_t n,
                   const struct k3_chat_opts *opts, struct k3_ids *out, struct k3_err *err)
{
    struct render r = { c, out, err, check_render(messages, n, opts, err) };
    const struct k3_chat_message *last = n && messages[n - 1].partial ? &messages[n - 1] : NULL;

    if (r.rc < 0)
        return r.rc;
    if (opts->tools.len_bytes)
        internal_system(&r, W_TOOL_DECLARE, tools_head, opts->tools, json_tail);
    if (opts->thinking && opts->effort)
        internal_system(&r, W_THINKING_EFFORT, effort_head, (struct k3_text){ opts->effort, strlen(opts->effort) },
                        effort_tail);
    put_messages(&r, messages, last ? n - 1 : n, opts->thinking);
    if (opts->tool_choice != K3_CHAT_TOOLS_AUTO)
        internal_system(&r, W_TOOL_CHOICE,
                        opts->tool_choice == K3_CHAT_TOOLS_NONE ? must_not_call_body : must_call_body, none, "");
    if (opts->format == K3_CHAT_JSON_OBJECT)
        internal_system(&r, W_RESPONSE_FORMAT, json_object_body, none, "");
    else if (opts->format == K3_CHAT_JSON_SCHEMA)
        internal_system(&r, W_RESPONSE_FORMAT, json_schema_head, opts->schema, json_tail);
    if (last) {
        put_partial(&r, last, opts->thinking);
    } else if (!opts->no_generation_prompt) {
        open_message(&r, W_ASSISTANT, NULL);
        open_tag(&r, opts->thinking ? W_THINK : W_RESPONSE);
    }
    return r.rc;
}
