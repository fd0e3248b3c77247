#include "constrain/grammar.h"
#include "k3-router/chat_request.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOOL_NAME_BYTES_MAX 256u
#define QUOTE_BYTES 40u

/* After the first fault the rest does nothing; at() says where we are, so q->param names the member at fault. */
struct reader {
    struct k3_chat_request *q;
    struct k3_err *err;
    int rc;
    char quoted[QUOTE_BYTES + 4];
    struct k3_text *tool; /* names of all tools so far */
    size_t n_tools, cap_tools;
};

static const char *const members[] = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "thinking",
    "chat_template_kwargs", "functions", "function_call", "add_generation_prompt", "continue_final_message",
};

bool k3_chat_request_has(struct k3_text member)
{
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++)
        if (k3_text_is(member, members[i]))
            return true;
    return false;
}

__attribute__((format(printf, 2, 3))) static void at(struct reader *r, const char *fmt, ...)
{
    va_list ap;

    if (r->rc < 0)
        return;
    va_start(ap, fmt);
    vsnprintf(r->q->param, sizeof(r->q->param), fmt, ap);
    va_end(ap);
}

__attribute__((format(printf, 2, 3))) static void bad(struct reader *r, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    if (r->rc < 0)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    r->rc = k3_refuse(r->err, -EINVAL, "%s: %s", r->q->param, text);
}

/* What a client wrote, short and printable, for an error. */
static const char *quote(struct reader *r, struct k3_text t)
{
    size_t n = t.len_bytes;

    if (n > QUOTE_BYTES)
        for (n = QUOTE_BYTES; n > 0 && ((uint8_t)t.bytes[n] & 0xc0) == 0x80; n--)
            ;
    for (size_t i = 0; i < n; i++)
        r->quoted[i] = (uint8_t)t.bytes[i] < 0x20 || t.bytes[i] == 0x7f ? '?' : t.bytes[i];
    strcpy(r->quoted + n, n < t.len_bytes ? "..." : "");
    return r->quoted;
}

/* ---- memory ---- */

static void no_memory(struct reader *r)
{
    if (r->rc == 0)
        r->rc = k3_fail(r->err, -ENOMEM, "chat request: no memory");
}

/* q frees p; p may be NULL. */
static void own(struct reader *r, void *p)
{
    struct k3_chat_request *q = r->q;

    if (!p)
        return;
    if (q->n_owned == q->cap_owned) {
        size_t cap = q->cap_owned ? 2 * q->cap_owned : 64;
        void **more = reallocarray(q->owned, cap, sizeof(*more));
        if (!more) {
            free(p);
            no_memory(r);
            return;
        }
        q->owned = more;
        q->cap_owned = cap;
    }
    q->owned[q->n_owned++] = p;
}

/* n zeroed elements; NULL after a failure, and for 0 elements. */
static void *many(struct reader *r, size_t n, size_t size_bytes)
{
    void *p;

    if (r->rc < 0 || n == 0)
        return NULL;
    p = calloc(n, size_bytes);
    if (!p)
        no_memory(r);
    own(r, p);
    return r->rc < 0 ? NULL : p;
}

static struct k3_text json_text(struct reader *r, const struct k3_json *v, enum k3_json_style style)
{
    struct k3_buf b = { 0 };

    if (r->rc == 0 && k3_json_write(&b, v, style) < 0)
        no_memory(r);
    own(r, b.bytes);
    return r->rc < 0 ? (struct k3_text){ 0 } : (struct k3_text){ b.bytes, b.len_bytes };
}

void k3_chat_request_free(struct k3_chat_request *q)
{
    for (size_t i = 0; i < q->n_owned; i++)
        free(q->owned[i]);
    free(q->owned);
    *q = (struct k3_chat_request){ 0 };
}

/* ---- members ---- */

/* A string, or absent or null: then empty. */
static struct k3_text optional_string(struct reader *r, const struct k3_json *v)
{
    if (!v || v->type == K3_JSON_NULL)
        return (struct k3_text){ 0 };
    if (v->type != K3_JSON_STRING) {
        bad(r, "not a string");
        return (struct k3_text){ 0 };
    }
    return v->text;
}

/* true or false, or absent or null: then otherwise. */
static bool optional_bool(struct reader *r, const struct k3_json *v, bool otherwise)
{
    if (!v || v->type == K3_JSON_NULL)
        return otherwise;
    if (v->type != K3_JSON_FALSE && v->type != K3_JSON_TRUE)
        bad(r, "neither true nor false");
    return v->type == K3_JSON_TRUE;
}

/* Every member of o is one of the n known; where: the path of o. */
static void only_members(struct reader *r, const struct k3_json *o, const char *where, const char *const *known, size_t n)
{
    for (const struct k3_json *m = o->child; m && r->rc == 0; m = m->next) {
        size_t i = 0;
        while (i < n && !k3_text_is(m->key, known[i]))
            i++;
        if (i == n) {
            at(r, "%s.%s", where, quote(r, m->key));
            bad(r, "not known here");
        }
    }
}

/* ---- tools ---- */

static void check_tool_name(struct reader *r, struct k3_text name)
{
    if (name.len_bytes == 0)
        bad(r, "empty");
    if (name.len_bytes > TOOL_NAME_BYTES_MAX)
        bad(r, "%zu characters; at most %u", name.len_bytes, TOOL_NAME_BYTES_MAX);
    for (size_t i = 0; i < name.len_bytes && r->rc == 0; i++) {
        char c = name.bytes[i];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        if (!letter && (i == 0 || !((c >= '0' && c <= '9') || c == '-')))
            bad(r, "\"%s\" is no name of a tool: letters, digits, _ and -, with a letter or _ first", quote(r, name));
    }
}

static void keep_tool_name(struct reader *r, struct k3_text name)
{
    if (r->rc == 0 && r->n_tools == r->cap_tools) {
        size_t cap = r->cap_tools ? 2 * r->cap_tools : 16;
        struct k3_text *more = reallocarray(r->tool, cap, sizeof(*more));
        if (more) {
            r->tool = more;
            r->cap_tools = cap;
        } else {
            no_memory(r);
        }
    }
    if (r->rc == 0)
        r->tool[r->n_tools++] = name;
}

static void read_tool(struct reader *r, const struct k3_json *t, const char *where, size_t i)
{
    const struct k3_json *f = k3_json_get(t, "function"), *v;

    at(r, "%s[%zu]", where, i);
    if (t->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    at(r, "%s[%zu].type", where, i);
    v = k3_json_get(t, "type");
    if (!v || v->type != K3_JSON_STRING)
        bad(r, "missing; \"function\" is the only type of tool");
    else if (!k3_text_is(v->text, "function"))
        bad(r, "\"%s\"; \"function\" is the only type of tool", quote(r, v->text));
    at(r, "%s[%zu].function", where, i);
    if (!f || f->type != K3_JSON_OBJECT)
        bad(r, "missing, or not an object");
    at(r, "%s[%zu].function.name", where, i);
    v = k3_json_get(f, "name");
    if (!v || v->type != K3_JSON_STRING)
        bad(r, "missing, or not a string");
    if (r->rc == 0)
        check_tool_name(r, v->text);
    if (r->rc == 0)
        keep_tool_name(r, v->text);
    at(r, "%s[%zu].function.description", where, i);
    optional_string(r, k3_json_get(f, "description"));
    at(r, "%s[%zu].function.parameters", where, i);
    v = k3_json_value(f, "parameters");
    if (v && v->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    at(r, "%s[%zu].function.strict", where, i);
    optional_bool(r, k3_json_get(f, "strict"), false);
}

/* The declaration as the prompt has it; empty when there are no tools. */
static struct k3_text read_tools(struct reader *r, const struct k3_json *tools, const char *where)
{
    size_t i = 0;

    at(r, "%s", where);
    if (!tools || tools->type == K3_JSON_NULL)
        return (struct k3_text){ 0 };
    if (tools->type != K3_JSON_ARRAY)
        bad(r, "not an array");
    else
        for (const struct k3_json *t = tools->child; t && r->rc == 0; t = t->next)
            read_tool(r, t, where, i++);
    return tools->n ? json_text(r, tools, K3_JSON_SORTED) : (struct k3_text){ 0 };
}

static int by_name(const void *x, const void *y)
{
    const struct k3_text *a = x, *b = y;
    int d = memcmp(a->bytes, b->bytes, a->len_bytes < b->len_bytes ? a->len_bytes : b->len_bytes);

    return d ? d : (a->len_bytes > b->len_bytes) - (a->len_bytes < b->len_bytes);
}

/* One name, one tool: also across the lists. */
static void check_tool_names(struct reader *r)
{
    struct k3_chat_request *q = r->q;

    own(r, r->tool);
    if (r->rc < 0)
        return;
    q->tool = r->tool;
    q->n_tools = r->n_tools;
    if (q->n_tools)
        qsort(r->tool, q->n_tools, sizeof(*r->tool), by_name);
    at(r, "tools");
    for (size_t i = 1; i < q->n_tools; i++)
        if (by_name(&r->tool[i - 1], &r->tool[i]) == 0)
            bad(r, "two tools are called \"%s\"", quote(r, r->tool[i]));
}

/* ---- messages ---- */

static void read_part(struct reader *r, const struct k3_json *p, size_t i, size_t k, struct k3_text *out)
{
    const struct k3_json *type = k3_json_get(p, "type"), *text = k3_json_get(p, "text");

    at(r, "messages[%zu].content[%zu]", i, k);
    if (p->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    at(r, "messages[%zu].content[%zu].type", i, k);
    if (!type || type->type != K3_JSON_STRING)
        bad(r, "missing, or not a string");
    else if (!k3_text_is(type->text, "text"))
        bad(r, "\"%s\" parts are not supported, only \"text\"", quote(r, type->text));
    at(r, "messages[%zu].content[%zu].text", i, k);
    if (!text || text->type != K3_JSON_STRING)
        bad(r, "missing, or not a string");
    else
        *out = text->text;
}

/* A string, an array of text parts or, where it may, nothing. */
static void read_content(struct reader *r, const struct k3_json *c, size_t i, bool may_be_absent, struct k3_chat_message *m)
{
    size_t k = 0;
    struct k3_text *part;

    at(r, "messages[%zu].content", i);
    if (!c || c->type == K3_JSON_NULL) {
        if (!may_be_absent)
            bad(r, "missing");
        return;
    }
    if (c->type != K3_JSON_STRING && c->type != K3_JSON_ARRAY) {
        bad(r, "neither a string nor an array of parts");
        return;
    }
    m->n_parts = c->type == K3_JSON_ARRAY ? c->n : 1;
    m->parts = part = many(r, m->n_parts, sizeof(*part));
    if (!part)
        return;
    if (c->type == K3_JSON_STRING)
        *part = c->text;
    else
        for (const struct k3_json *p = c->child; p && r->rc == 0; p = p->next, k++)
            read_part(r, p, i, k, &part[k]);
}

static void read_object(struct reader *r, const struct k3_json *o, struct k3_chat_call *call)
{
    struct k3_chat_argument *a;

    if (o->type != K3_JSON_OBJECT) {
        bad(r, "JSON, but no object");
        return;
    }
    call->arguments = a = many(r, o->n, sizeof(*a));
    for (const struct k3_json *v = o->child; a && v && r->rc == 0; v = v->next, a++) {
        a->key = v->key;
        a->type = v->type;
        a->value = v->type == K3_JSON_STRING ? v->text : json_text(r, v, K3_JSON_SPACED);
        call->n_arguments++;
    }
}

/* An object, or a string that holds one; a string that is no JSON at all goes into the prompt as it is. */
static void read_arguments(struct reader *r, const struct k3_json *v, struct k3_chat_call *call)
{
    struct k3_json_doc d;
    struct k3_err why = K3_ERR_INIT;
    int rc;

    if (!v || v->type == K3_JSON_NULL)
        return;
    if (v->type != K3_JSON_STRING) {
        if (v->type == K3_JSON_OBJECT)
            read_object(r, v, call);
        else
            bad(r, "neither an object nor a string");
        return;
    }
    if (k3_text_is_blank(v->text))
        return;
    rc = k3_json_parse(&d, v->text.bytes, v->text.len_bytes, &why);
    if (rc == -ENOMEM) {
        no_memory(r);
    } else if (rc < 0) {
        call->json = v->text;
    } else {
        own(r, d.node);
        own(r, d.text);
        if (r->rc == 0)
            read_object(r, d.node, call);
    }
}

static void read_call(struct reader *r, const struct k3_json *c, size_t i, size_t k, struct k3_chat_call *call)
{
    const struct k3_json *f = k3_json_get(c, "function"), *v;

    at(r, "messages[%zu].tool_calls[%zu]", i, k);
    if (c->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    at(r, "messages[%zu].tool_calls[%zu].type", i, k);
    v = k3_json_value(c, "type");
    if (v && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "function")))
        bad(r, "only \"function\" is known");
    at(r, "messages[%zu].tool_calls[%zu].id", i, k);
    call->id = optional_string(r, k3_json_get(c, "id"));
    at(r, "messages[%zu].tool_calls[%zu].function", i, k);
    if (!f || f->type != K3_JSON_OBJECT)
        bad(r, "missing, or not an object");
    at(r, "messages[%zu].tool_calls[%zu].function.name", i, k);
    call->tool = optional_string(r, k3_json_get(f, "name"));
    if (call->tool.len_bytes == 0)
        bad(r, "missing or empty");
    at(r, "messages[%zu].tool_calls[%zu].function.arguments", i, k);
    if (r->rc == 0)
        read_arguments(r, k3_json_get(f, "arguments"), call);
}

static void read_calls(struct reader *r, const struct k3_json *calls, size_t i, struct k3_chat_message *m)
{
    struct k3_chat_call *call;
    size_t k = 0;

    at(r, "messages[%zu].tool_calls", i);
    if (!calls)
        return;
    if (calls->type != K3_JSON_ARRAY)
        bad(r, "not an array");
    else if (m->role != K3_CHAT_ASSISTANT)
        bad(r, "only an assistant message has calls");
    m->calls = call = many(r, calls->n, sizeof(*call));
    m->n_calls = call ? calls->n : 0;
    for (const struct k3_json *c = calls->child; call && c && r->rc == 0; c = c->next, k++)
        read_call(r, c, i, k, &call[k]);
}

static void read_reasoning(struct reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    static const char *const name[] = { "reasoning_content", "reasoning" };

    for (int k = 0; k < 2 && r->rc == 0; k++) {
        struct k3_text text;
        at(r, "messages[%zu].%s", i, name[k]);
        text = optional_string(r, k3_json_get(o, name[k]));
        if (text.len_bytes && m->role != K3_CHAT_ASSISTANT)
            bad(r, "only an assistant message has reasoning");
        if (m->reasoning.len_bytes == 0)
            m->reasoning = text;
    }
}

/* Members that carry something for the model which this format has no place for. */
static void refuse_members(struct reader *r, const struct k3_json *o, size_t i)
{
    static const char *const name[] = { "function_call", "audio", "images", "refusal" };

    for (size_t k = 0; k < sizeof(name) / sizeof(name[0]) && r->rc == 0; k++) {
        at(r, "messages[%zu].%s", i, name[k]);
        if (k3_json_value(o, name[k]))
            bad(r, "not supported");
    }
    at(r, "messages[%zu].prefix", i);
    if (optional_bool(r, k3_json_get(o, "prefix"), false))
        bad(r, "not supported; \"partial\": true on the last message continues it");
}

static enum k3_chat_role read_role(struct reader *r, const struct k3_json *v)
{
    static const struct { const char *name; enum k3_chat_role role; } known[] = {
        { "system", K3_CHAT_SYSTEM }, { "developer", K3_CHAT_SYSTEM }, { "user", K3_CHAT_USER },
        { "assistant", K3_CHAT_ASSISTANT }, { "tool", K3_CHAT_TOOL },
    };

    if (!v || v->type != K3_JSON_STRING) {
        bad(r, "missing, or not a string");
        return K3_CHAT_USER;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (k3_text_is(v->text, known[i].name))
            return known[i].role;
    bad(r, "\"%s\"; system, developer, user, assistant or tool", quote(r, v->text));
    return K3_CHAT_USER;
}

static void read_message_tools(struct reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    const struct k3_json *tools = k3_json_value(o, "tools");
    char where[64];

    snprintf(where, sizeof(where), "messages[%zu].tools", i);
    at(r, "%s", where);
    if (tools && m->role != K3_CHAT_SYSTEM)
        bad(r, "only a system message can declare tools");
    m->tools = read_tools(r, tools, where);
}

static bool has_text(const struct k3_chat_message *m)
{
    for (size_t k = 0; k < m->n_parts; k++)
        if (m->parts[k].len_bytes)
            return true;
    return false;
}

static void read_tool_result(struct reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    at(r, "messages[%zu].id", i);
    m->call_id = optional_string(r, k3_json_get(o, "id"));
    at(r, "messages[%zu].tool", i);
    m->tool = optional_string(r, k3_json_get(o, "tool"));
    at(r, "messages[%zu].tool_call_id", i);
    if (k3_json_value(o, "tool_call_id"))
        m->call_id = optional_string(r, k3_json_get(o, "tool_call_id"));
    if (m->call_id.len_bytes == 0 && m->tool.len_bytes == 0)
        bad(r, "missing; a tool message names the call that it answers");
}

static void read_message(struct reader *r, const struct k3_json *o, size_t i, bool last, struct k3_chat_message *m)
{
    at(r, "messages[%zu]", i);
    if (o->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    at(r, "messages[%zu].role", i);
    m->role = read_role(r, k3_json_get(o, "role"));
    at(r, "messages[%zu].name", i);
    m->name = optional_string(r, k3_json_get(o, "name"));
    refuse_members(r, o, i);
    read_message_tools(r, o, i, m);
    read_reasoning(r, o, i, m);
    read_content(r, k3_json_get(o, "content"), i, m->role == K3_CHAT_ASSISTANT || m->tools.len_bytes, m);
    at(r, "messages[%zu].tools", i);
    if (m->tools.len_bytes && has_text(m))
        bad(r, "a message that declares tools has no content");
    read_calls(r, k3_json_value(o, "tool_calls"), i, m);
    if (m->role == K3_CHAT_TOOL)
        read_tool_result(r, o, i, m);
    at(r, "messages[%zu].partial", i);
    m->partial = optional_bool(r, k3_json_get(o, "partial"), false);
    if (m->partial && (!last || m->role != K3_CHAT_ASSISTANT || m->n_calls))
        bad(r, "only for the last message, when it is the assistant's and has no calls");
}

static void read_messages(struct reader *r, const struct k3_json *v)
{
    struct k3_chat_request *q = r->q;
    size_t i = 0;

    at(r, "messages");
    if (!v || v->type != K3_JSON_ARRAY) {
        bad(r, "missing, or not an array");
        return;
    }
    if (v->n == 0)
        bad(r, "empty");
    q->message = many(r, v->n, sizeof(*q->message));
    q->n_messages = q->message ? v->n : 0;
    for (const struct k3_json *m = v->child; q->message && m && r->rc == 0; m = m->next, i++)
        read_message(r, m, i, !m->next, &q->message[i]);
}

/* ---- options ---- */

/* Names of other servers are taken for the nearest that K3 has (spec/text.md 3.7). */
static const char *effort_of(struct reader *r, const struct k3_json *v)
{
    static const char *const known[][2] = { { "low", "low" },     { "high", "high" },     { "max", "max" },
                                            { "minimal", "low" }, { "medium", "high" },   { "xhigh", "max" } };

    if (v->type != K3_JSON_STRING) {
        bad(r, "not a string");
        return NULL;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (k3_text_is(v->text, known[i][0]))
            return known[i][1];
    bad(r, "\"%s\"; low, high or max", quote(r, v->text));
    return NULL;
}

/* Returns whether it says that thinking is on or off. */
static bool read_template_kwargs(struct reader *r, const struct k3_json *o, struct k3_chat_opts *opts)
{
    static const char *const known[] = { "thinking", "enable_thinking", "thinking_effort", "preserve_thinking" };
    static const char where[] = "chat_template_kwargs";
    const struct k3_json *a = k3_json_value(o, "thinking"), *b = k3_json_value(o, "enable_thinking"), *v;

    at(r, "%s", where);
    if (!o)
        return false;
    if (o->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    only_members(r, o, where, known, sizeof(known) / sizeof(known[0]));
    at(r, "%s.thinking", where);
    opts->thinking = optional_bool(r, a, opts->thinking);
    at(r, "%s.enable_thinking", where);
    if (a && b && a->type != b->type)
        bad(r, "is not what \"thinking\" beside it says");
    opts->thinking = optional_bool(r, b, opts->thinking);
    at(r, "%s.preserve_thinking", where);
    if (!optional_bool(r, k3_json_get(o, "preserve_thinking"), true))
        bad(r, "false; K3 always keeps the thinking of earlier turns");
    at(r, "%s.thinking_effort", where);
    v = k3_json_get(o, "thinking_effort");
    if (v)
        opts->effort = v->type == K3_JSON_NULL ? NULL : effort_of(r, v); /* null: no effort message */
    return a || b;
}

/* Moonshot's own form. */
static void read_thinking_object(struct reader *r, const struct k3_json *o, struct k3_chat_opts *opts)
{
    static const char *const known[] = { "type", "effort", "keep" };
    const struct k3_json *v;

    at(r, "thinking");
    if (!o)
        return;
    if (o->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    only_members(r, o, "thinking", known, sizeof(known) / sizeof(known[0]));
    at(r, "thinking.type");
    v = k3_json_value(o, "type");
    opts->thinking = !v || (v->type == K3_JSON_STRING && k3_text_is(v->text, "enabled"));
    if (!opts->thinking && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "disabled")))
        bad(r, "enabled or disabled");
    at(r, "thinking.effort");
    v = k3_json_value(o, "effort");
    if (v)
        opts->effort = effort_of(r, v);
    at(r, "thinking.keep");
    v = k3_json_value(o, "keep");
    if (v && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "all")))
        bad(r, "only \"all\": K3 always keeps the thinking of earlier turns");
}

/* The later of these wins: chat_template_kwargs, reasoning_effort, thinking.  An effort alone switches thinking on, except
 * against an express switch in chat_template_kwargs. */
static void read_thinking(struct reader *r, const struct k3_json *body, struct k3_chat_opts *opts)
{
    bool said = read_template_kwargs(r, k3_json_value(body, "chat_template_kwargs"), opts);
    const struct k3_json *v = k3_json_value(body, "reasoning_effort");

    at(r, "reasoning_effort");
    if (v && v->type == K3_JSON_STRING && k3_text_is(v->text, "none")) {
        opts->thinking = false;
    } else if (v) {
        opts->effort = effort_of(r, v);
        opts->thinking = said ? opts->thinking : true;
    }
    read_thinking_object(r, k3_json_value(body, "thinking"), opts);
}

/* Whether an answer can be held to it is known before anything is queued. */
static void check_schema(struct reader *r)
{
    struct k3_text text = json_text(r, r->q->schema, K3_JSON_SPACED);
    struct k3_grammar *g = NULL;
    struct k3_err why = K3_ERR_INIT;
    int rc = r->rc < 0 ? r->rc : k3_grammar_schema(&g, text.bytes, text.len_bytes, &why);

    k3_grammar_free(g);
    if (rc == -ENOMEM)
        no_memory(r);
    else if (rc < 0 && r->rc == 0)
        r->rc = k3_refuse(r->err, -EINVAL, "%s: %s", r->q->param, why.text);
}

static void read_schema(struct reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "name", "description", "schema", "strict" };
    static const char where[] = "response_format.json_schema";
    struct k3_chat_request *q = r->q;

    at(r, "%s", where);
    if (!o || o->type != K3_JSON_OBJECT) {
        bad(r, "missing, or not an object");
        return;
    }
    only_members(r, o, where, known, sizeof(known) / sizeof(known[0]));
    at(r, "%s.name", where);
    if (optional_string(r, k3_json_get(o, "name")).len_bytes == 0)
        bad(r, "missing or empty");
    at(r, "%s.description", where);
    optional_string(r, k3_json_get(o, "description"));
    at(r, "%s.strict", where);
    q->schema_strict = optional_bool(r, k3_json_get(o, "strict"), false);
    at(r, "%s.schema", where);
    q->schema = k3_json_get(o, "schema");
    if (!q->schema || q->schema->type != K3_JSON_OBJECT)
        bad(r, "missing, or not an object");
    if (r->rc == 0)
        check_schema(r);
    if (r->rc == 0)
        q->opts.schema = json_text(r, q->schema, K3_JSON_SORTED);
}

static void read_response_format(struct reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "type", "json_schema" };
    const struct k3_json *type = k3_json_get(o, "type");

    at(r, "response_format");
    if (!o)
        return;
    if (o->type != K3_JSON_OBJECT)
        bad(r, "not an object");
    only_members(r, o, "response_format", known, sizeof(known) / sizeof(known[0]));
    at(r, "response_format.type");
    if (!type || type->type != K3_JSON_STRING) {
        bad(r, "missing, or not a string");
    } else if (k3_text_is(type->text, "json_object")) {
        r->q->opts.format = K3_CHAT_JSON_OBJECT;
    } else if (k3_text_is(type->text, "json_schema")) {
        r->q->opts.format = K3_CHAT_JSON_SCHEMA;
        read_schema(r, k3_json_get(o, "json_schema"));
    } else if (!k3_text_is(type->text, "text")) {
        bad(r, "\"%s\"; text, json_object or json_schema", quote(r, type->text));
    }
}

/* {"type":"function","function":{"name":NAME}}: this tool must be called.  The prompt says it as `required` does. */
static void read_named_choice(struct reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "type", "function" };
    const struct k3_json *type = k3_json_get(o, "type"), *name = k3_json_get(k3_json_get(o, "function"), "name");
    struct k3_chat_request *q = r->q;

    only_members(r, o, "tool_choice", known, 2);
    at(r, "tool_choice.type");
    if (!type || type->type != K3_JSON_STRING || !k3_text_is(type->text, "function"))
        bad(r, "\"function\" is the only type of tool");
    at(r, "tool_choice.function.name");
    if (!name || name->type != K3_JSON_STRING) {
        bad(r, "missing, or not a string");
        return;
    }
    q->named_tool = name->text;
    q->opts.tool_choice = K3_CHAT_TOOLS_REQUIRED;
    if (r->rc == 0 && !(q->n_tools && bsearch(&name->text, q->tool, q->n_tools, sizeof(*q->tool), by_name)))
        bad(r, "no tool is called \"%s\"", quote(r, name->text));
}

static void read_tool_choice(struct reader *r, const struct k3_json *body)
{
    const struct k3_json *v = k3_json_value(body, "tool_choice");
    struct k3_chat_request *q = r->q;

    at(r, "parallel_tool_calls");
    q->max_calls = optional_bool(r, k3_json_get(body, "parallel_tool_calls"), true) ? UINT32_MAX : 1;
    at(r, "tool_choice");
    if (!v)
        return;
    if (v->type == K3_JSON_OBJECT) {
        read_named_choice(r, v);
    } else if (v->type != K3_JSON_STRING) {
        bad(r, "not a string");
    } else if (k3_text_is(v->text, "none")) {
        q->opts.tool_choice = K3_CHAT_TOOLS_NONE;
        q->max_calls = 0;
    } else if (k3_text_is(v->text, "required")) {
        q->opts.tool_choice = K3_CHAT_TOOLS_REQUIRED;
        if (r->n_tools == 0)
            bad(r, "required, but no tools are declared");
    } else if (!k3_text_is(v->text, "auto")) {
        bad(r, "\"%s\"; auto, none or required", quote(r, v->text));
    }
}

static void refuse_old_members(struct reader *r, const struct k3_json *body)
{
    static const char *const old[] = { "functions", "function_call" };

    for (size_t i = 0; i < 2; i++) {
        at(r, "%s", old[i]);
        if (k3_json_value(body, old[i]))
            bad(r, "not supported; use tools and tool_choice");
    }
    at(r, "add_generation_prompt");
    if (!optional_bool(r, k3_json_get(body, "add_generation_prompt"), true))
        bad(r, "false is not supported");
    at(r, "continue_final_message");
    if (optional_bool(r, k3_json_get(body, "continue_final_message"), false))
        bad(r, "not supported; \"partial\": true on the last message continues it");
}

int k3_chat_request_read(struct k3_chat_request *q, const struct k3_json *body, const struct k3_chat_opts *defaults,
                         struct k3_err *err)
{
    struct reader r = { .q = q, .err = err };
    const struct k3_chat_message *last;

    *q = (struct k3_chat_request){ .opts = { .thinking = defaults->thinking, .effort = defaults->effort } };
    if (body->type != K3_JSON_OBJECT)
        return k3_refuse(err, -EINVAL, "the body is not a JSON object");
    refuse_old_members(&r, body);
    q->opts.tools = read_tools(&r, k3_json_get(body, "tools"), "tools");
    read_messages(&r, k3_json_get(body, "messages"));
    check_tool_names(&r);
    read_tool_choice(&r, body);
    read_thinking(&r, body, &q->opts);
    read_response_format(&r, k3_json_value(body, "response_format"));
    if (r.rc == 0) {
        last = &q->message[q->n_messages - 1];
        q->starts_thinking = k3_chat_starts_in_think(last, q->opts.thinking);
        at(&r, "response_format");
        if (q->opts.format != K3_CHAT_TEXT && last->partial && has_text(last))
            bad(&r, "not together with a partial message that has content");
    }
    if (r.rc == 0) {
        q->param[0] = 0;
    }
    return r.rc;
}

int k3_chat_request_render(struct k3_chat_request *q, const struct k3_chat *c, struct k3_ids *out, struct k3_err *err)
{
    int rc = k3_chat_render(c, q->message, q->n_messages, &q->opts, out, err);

    if (rc < 0 && rc != -ENOMEM) {
        strcpy(q->param, "messages");
        rc = -EINVAL;
    }
    return rc;
}
