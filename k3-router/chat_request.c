#include "k3-router/chat_reader.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOOL_NAME_BYTES_MAX 256u

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

void k3_chat_request_free(struct k3_chat_request *q)
{
    for (size_t i = 0; i < q->n_owned; i++)
        free(q->owned[i]);
    free(q->owned);
    *q = (struct k3_chat_request){ 0 };
}

/* ---- tools ---- */

static void check_tool_name(struct k3_chat_reader *r, struct k3_text name)
{
    if (name.len_bytes == 0)
        k3_chat_bad(r, "empty");
    if (name.len_bytes > TOOL_NAME_BYTES_MAX)
        k3_chat_bad(r, "%zu characters; at most %u", name.len_bytes, TOOL_NAME_BYTES_MAX);
    for (size_t i = 0; i < name.len_bytes && r->rc == 0; i++) {
        char c = name.bytes[i];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        if (!letter && (i == 0 || !((c >= '0' && c <= '9') || c == '-')))
            k3_chat_bad(r, "\"%s\" is no name of a tool: letters, digits, _ and -, with a letter or _ first",
                        k3_chat_quote(r, name));
    }
}

static void keep_tool_name(struct k3_chat_reader *r, struct k3_text name)
{
    if (r->rc == 0 && r->n_tools == r->cap_tools) {
        size_t cap = r->cap_tools ? 2 * r->cap_tools : 16;
        struct k3_text *more = reallocarray(r->tool, cap, sizeof(*more));
        if (more) {
            r->tool = more;
            r->cap_tools = cap;
        } else {
            k3_chat_no_memory(r);
        }
    }
    if (r->rc == 0)
        r->tool[r->n_tools++] = name;
}

static void read_tool(struct k3_chat_reader *r, const struct k3_json *t, const char *where, size_t i)
{
    const struct k3_json *f = k3_json_get(t, "function"), *v;

    k3_chat_at(r, "%s[%zu]", where, i);
    if (t->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_at(r, "%s[%zu].type", where, i);
    v = k3_json_get(t, "type");
    if (!v || v->type != K3_JSON_STRING)
        k3_chat_bad(r, "missing; \"function\" is the only type of tool");
    else if (!k3_text_is(v->text, "function"))
        k3_chat_bad(r, "\"%s\"; \"function\" is the only type of tool", k3_chat_quote(r, v->text));
    k3_chat_at(r, "%s[%zu].function", where, i);
    if (!f || f->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "missing, or not an object");
    k3_chat_at(r, "%s[%zu].function.name", where, i);
    v = k3_json_get(f, "name");
    if (!v || v->type != K3_JSON_STRING)
        k3_chat_bad(r, "missing, or not a string");
    if (r->rc == 0)
        check_tool_name(r, v->text);
    if (r->rc == 0)
        keep_tool_name(r, v->text);
    k3_chat_at(r, "%s[%zu].function.description", where, i);
    k3_chat_optional_string(r, k3_json_get(f, "description"));
    k3_chat_at(r, "%s[%zu].function.parameters", where, i);
    v = k3_json_value(f, "parameters");
    if (v && v->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_at(r, "%s[%zu].function.strict", where, i);
    k3_chat_optional_bool(r, k3_json_get(f, "strict"), false);
}

/* The declaration as the prompt has it; empty when there are no tools. */
static struct k3_text read_tools(struct k3_chat_reader *r, const struct k3_json *tools, const char *where)
{
    size_t i = 0;

    k3_chat_at(r, "%s", where);
    if (!tools || tools->type == K3_JSON_NULL)
        return (struct k3_text){ 0 };
    if (tools->type != K3_JSON_ARRAY)
        k3_chat_bad(r, "not an array");
    else
        for (const struct k3_json *t = tools->child; t && r->rc == 0; t = t->next)
            read_tool(r, t, where, i++);
    return tools->n ? k3_chat_json_text(r, tools, K3_JSON_SORTED) : (struct k3_text){ 0 };
}

/* One name, one tool: also across the lists. */
static void check_tool_names(struct k3_chat_reader *r)
{
    struct k3_chat_request *q = r->q;

    k3_chat_own(r, r->tool);
    if (r->rc < 0)
        return;
    q->tool = r->tool;
    q->n_tools = r->n_tools;
    if (q->n_tools)
        qsort(r->tool, q->n_tools, sizeof(*r->tool), k3_chat_by_name);
    k3_chat_at(r, "tools");
    for (size_t i = 1; i < q->n_tools; i++)
        if (k3_chat_by_name(&r->tool[i - 1], &r->tool[i]) == 0)
            k3_chat_bad(r, "two tools are called \"%s\"", k3_chat_quote(r, r->tool[i]));
}

/* ---- messages ---- */

static void read_part(struct k3_chat_reader *r, const struct k3_json *p, size_t i, size_t k, struct k3_text *out)
{
    const struct k3_json *type = k3_json_get(p, "type"), *text = k3_json_get(p, "text");

    k3_chat_at(r, "messages[%zu].content[%zu]", i, k);
    if (p->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_at(r, "messages[%zu].content[%zu].type", i, k);
    if (!type || type->type != K3_JSON_STRING)
        k3_chat_bad(r, "missing, or not a string");
    else if (!k3_text_is(type->text, "text"))
        k3_chat_bad(r, "\"%s\" parts are not supported, only \"text\"", k3_chat_quote(r, type->text));
    k3_chat_at(r, "messages[%zu].content[%zu].text", i, k);
    if (!text || text->type != K3_JSON_STRING)
        k3_chat_bad(r, "missing, or not a string");
    else
        *out = text->text;
}

/* A string, an array of text parts or, where it may, nothing. */
static void read_content(struct k3_chat_reader *r, const struct k3_json *c, size_t i, bool may_be_absent, struct k3_chat_message *m)
{
    size_t k = 0;
    struct k3_text *part;

    k3_chat_at(r, "messages[%zu].content", i);
    if (!c || c->type == K3_JSON_NULL) {
        if (!may_be_absent)
            k3_chat_bad(r, "missing");
        return;
    }
    if (c->type != K3_JSON_STRING && c->type != K3_JSON_ARRAY) {
        k3_chat_bad(r, "neither a string nor an array of parts");
        return;
    }
    m->n_parts = c->type == K3_JSON_ARRAY ? c->n : 1;
    m->parts = part = k3_chat_many(r, m->n_parts, sizeof(*part));
    if (!part)
        return;
    if (c->type == K3_JSON_STRING)
        *part = c->text;
    else
        for (const struct k3_json *p = c->child; p && r->rc == 0; p = p->next, k++)
            read_part(r, p, i, k, &part[k]);
}

static void read_object(struct k3_chat_reader *r, const struct k3_json *o, struct k3_chat_call *call)
{
    struct k3_chat_argument *a;

    if (o->type != K3_JSON_OBJECT) {
        k3_chat_bad(r, "JSON, but no object");
        return;
    }
    call->arguments = a = k3_chat_many(r, o->n, sizeof(*a));
    for (const struct k3_json *v = o->child; a && v && r->rc == 0; v = v->next, a++) {
        a->key = v->key;
        a->type = v->type;
        a->value = v->type == K3_JSON_STRING ? v->text : k3_chat_json_text(r, v, K3_JSON_SPACED);
        call->n_arguments++;
    }
}

/* An object, or a string that holds one; a string that is no JSON at all goes into the prompt as it is. */
static void read_arguments(struct k3_chat_reader *r, const struct k3_json *v, struct k3_chat_call *call)
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
            k3_chat_bad(r, "neither an object nor a string");
        return;
    }
    if (k3_text_is_blank(v->text))
        return;
    rc = k3_json_parse(&d, v->text.bytes, v->text.len_bytes, &why);
    if (rc == -ENOMEM) {
        k3_chat_no_memory(r);
    } else if (rc < 0) {
        call->json = v->text;
    } else {
        k3_chat_own(r, d.node);
        k3_chat_own(r, d.text);
        if (r->rc == 0)
            read_object(r, d.node, call);
    }
}

static void read_call(struct k3_chat_reader *r, const struct k3_json *c, size_t i, size_t k, struct k3_chat_call *call)
{
    const struct k3_json *f = k3_json_get(c, "function"), *v;

    k3_chat_at(r, "messages[%zu].tool_calls[%zu]", i, k);
    if (c->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_at(r, "messages[%zu].tool_calls[%zu].type", i, k);
    v = k3_json_value(c, "type");
    if (v && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "function")))
        k3_chat_bad(r, "only \"function\" is known");
    k3_chat_at(r, "messages[%zu].tool_calls[%zu].id", i, k);
    call->id = k3_chat_optional_string(r, k3_json_get(c, "id"));
    k3_chat_at(r, "messages[%zu].tool_calls[%zu].function", i, k);
    if (!f || f->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "missing, or not an object");
    k3_chat_at(r, "messages[%zu].tool_calls[%zu].function.name", i, k);
    call->tool = k3_chat_optional_string(r, k3_json_get(f, "name"));
    if (call->tool.len_bytes == 0)
        k3_chat_bad(r, "missing or empty");
    k3_chat_at(r, "messages[%zu].tool_calls[%zu].function.arguments", i, k);
    if (r->rc == 0)
        read_arguments(r, k3_json_get(f, "arguments"), call);
}

static void read_calls(struct k3_chat_reader *r, const struct k3_json *calls, size_t i, struct k3_chat_message *m)
{
    struct k3_chat_call *call;
    size_t k = 0;

    k3_chat_at(r, "messages[%zu].tool_calls", i);
    if (!calls)
        return;
    if (calls->type != K3_JSON_ARRAY)
        k3_chat_bad(r, "not an array");
    else if (m->role != K3_CHAT_ASSISTANT)
        k3_chat_bad(r, "only an assistant message has calls");
    m->calls = call = k3_chat_many(r, calls->n, sizeof(*call));
    m->n_calls = call ? calls->n : 0;
    for (const struct k3_json *c = calls->child; call && c && r->rc == 0; c = c->next, k++)
        read_call(r, c, i, k, &call[k]);
}

static void read_reasoning(struct k3_chat_reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    static const char *const name[] = { "reasoning_content", "reasoning" };

    for (int k = 0; k < 2 && r->rc == 0; k++) {
        struct k3_text text;
        k3_chat_at(r, "messages[%zu].%s", i, name[k]);
        text = k3_chat_optional_string(r, k3_json_get(o, name[k]));
        if (text.len_bytes && m->role != K3_CHAT_ASSISTANT)
            k3_chat_bad(r, "only an assistant message has reasoning");
        if (m->reasoning.len_bytes == 0)
            m->reasoning = text;
    }
}

/* Members that carry something for the model which this format has no place for. */
static void refuse_members(struct k3_chat_reader *r, const struct k3_json *o, size_t i)
{
    static const char *const name[] = { "function_call", "audio", "images", "refusal" };

    for (size_t k = 0; k < sizeof(name) / sizeof(name[0]) && r->rc == 0; k++) {
        k3_chat_at(r, "messages[%zu].%s", i, name[k]);
        if (k3_json_value(o, name[k]))
            k3_chat_bad(r, "not supported");
    }
    k3_chat_at(r, "messages[%zu].prefix", i);
    if (k3_chat_optional_bool(r, k3_json_get(o, "prefix"), false))
        k3_chat_bad(r, "not supported; \"partial\": true on the last message continues it");
}

static enum k3_chat_role read_role(struct k3_chat_reader *r, const struct k3_json *v)
{
    static const struct { const char *name; enum k3_chat_role role; } known[] = {
        { "system", K3_CHAT_SYSTEM }, { "developer", K3_CHAT_SYSTEM }, { "user", K3_CHAT_USER },
        { "assistant", K3_CHAT_ASSISTANT }, { "tool", K3_CHAT_TOOL },
    };

    if (!v || v->type != K3_JSON_STRING) {
        k3_chat_bad(r, "missing, or not a string");
        return K3_CHAT_USER;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (k3_text_is(v->text, known[i].name))
            return known[i].role;
    k3_chat_bad(r, "\"%s\"; system, developer, user, assistant or tool", k3_chat_quote(r, v->text));
    return K3_CHAT_USER;
}

static void read_message_tools(struct k3_chat_reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    const struct k3_json *tools = k3_json_value(o, "tools");
    char where[64];

    snprintf(where, sizeof(where), "messages[%zu].tools", i);
    k3_chat_at(r, "%s", where);
    if (tools && m->role != K3_CHAT_SYSTEM)
        k3_chat_bad(r, "only a system message can declare tools");
    m->tools = read_tools(r, tools, where);
}

static bool has_text(const struct k3_chat_message *m)
{
    for (size_t k = 0; k < m->n_parts; k++)
        if (m->parts[k].len_bytes)
            return true;
    return false;
}

static void read_tool_result(struct k3_chat_reader *r, const struct k3_json *o, size_t i, struct k3_chat_message *m)
{
    k3_chat_at(r, "messages[%zu].id", i);
    m->call_id = k3_chat_optional_string(r, k3_json_get(o, "id"));
    k3_chat_at(r, "messages[%zu].tool", i);
    m->tool = k3_chat_optional_string(r, k3_json_get(o, "tool"));
    k3_chat_at(r, "messages[%zu].tool_call_id", i);
    if (k3_json_value(o, "tool_call_id"))
        m->call_id = k3_chat_optional_string(r, k3_json_get(o, "tool_call_id"));
    if (m->call_id.len_bytes == 0 && m->tool.len_bytes == 0)
        k3_chat_bad(r, "missing; a tool message names the call that it answers");
}

static void read_message(struct k3_chat_reader *r, const struct k3_json *o, size_t i, bool last, struct k3_chat_message *m)
{
    k3_chat_at(r, "messages[%zu]", i);
    if (o->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_at(r, "messages[%zu].role", i);
    m->role = read_role(r, k3_json_get(o, "role"));
    k3_chat_at(r, "messages[%zu].name", i);
    m->name = k3_chat_optional_string(r, k3_json_get(o, "name"));
    refuse_members(r, o, i);
    read_message_tools(r, o, i, m);
    read_reasoning(r, o, i, m);
    read_content(r, k3_json_get(o, "content"), i, m->role == K3_CHAT_ASSISTANT || m->tools.len_bytes, m);
    k3_chat_at(r, "messages[%zu].tools", i);
    if (m->tools.len_bytes && has_text(m))
        k3_chat_bad(r, "a message that declares tools has no content");
    read_calls(r, k3_json_value(o, "tool_calls"), i, m);
    if (m->role == K3_CHAT_TOOL)
        read_tool_result(r, o, i, m);
    k3_chat_at(r, "messages[%zu].partial", i);
    m->partial = k3_chat_optional_bool(r, k3_json_get(o, "partial"), false);
    if (m->partial && (!last || m->role != K3_CHAT_ASSISTANT || m->n_calls))
        k3_chat_bad(r, "only for the last message, when it is the assistant's and has no calls");
}

static void read_messages(struct k3_chat_reader *r, const struct k3_json *v)
{
    struct k3_chat_request *q = r->q;
    size_t i = 0;

    k3_chat_at(r, "messages");
    if (!v || v->type != K3_JSON_ARRAY) {
        k3_chat_bad(r, "missing, or not an array");
        return;
    }
    if (v->n == 0)
        k3_chat_bad(r, "empty");
    q->message = k3_chat_many(r, v->n, sizeof(*q->message));
    q->n_messages = q->message ? v->n : 0;
    for (const struct k3_json *m = v->child; q->message && m && r->rc == 0; m = m->next, i++)
        read_message(r, m, i, !m->next, &q->message[i]);
}

static void refuse_old_members(struct k3_chat_reader *r, const struct k3_json *body)
{
    static const char *const old[] = { "functions", "function_call" };

    for (size_t i = 0; i < 2; i++) {
        k3_chat_at(r, "%s", old[i]);
        if (k3_json_value(body, old[i]))
            k3_chat_bad(r, "not supported; use tools and tool_choice");
    }
    k3_chat_at(r, "add_generation_prompt");
    if (!k3_chat_optional_bool(r, k3_json_get(body, "add_generation_prompt"), true))
        k3_chat_bad(r, "false is not supported");
    k3_chat_at(r, "continue_final_message");
    if (k3_chat_optional_bool(r, k3_json_get(body, "continue_final_message"), false))
        k3_chat_bad(r, "not supported; \"partial\": true on the last message continues it");
}

int k3_chat_request_read(struct k3_chat_request *q, const struct k3_json *body, const struct k3_chat_opts *defaults,
                         struct k3_err *err)
{
    struct k3_chat_reader r = { .q = q, .err = err };
    const struct k3_chat_message *last;

    *q = (struct k3_chat_request){ .opts = { .thinking = defaults->thinking, .effort = defaults->effort } };
    if (body->type != K3_JSON_OBJECT)
        return k3_refuse(err, -EINVAL, "the body is not a JSON object");
    refuse_old_members(&r, body);
    q->opts.tools = read_tools(&r, k3_json_get(body, "tools"), "tools");
    read_messages(&r, k3_json_get(body, "messages"));
    check_tool_names(&r);
    k3_chat_read_tool_choice(&r, body);
    k3_chat_read_thinking(&r, body, &q->opts);
    k3_chat_read_response_format(&r, k3_json_value(body, "response_format"));
    if (r.rc == 0) {
        last = &q->message[q->n_messages - 1];
        q->starts_thinking = k3_chat_starts_in_think(last, q->opts.thinking);
        k3_chat_at(&r, "response_format");
        if (q->opts.format != K3_CHAT_TEXT && last->partial && has_text(last))
            k3_chat_bad(&r, "not together with a partial message that has content");
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
