/* Thinking, tool_choice and response_format of a chat body. */
#include <errno.h>
#include <stdlib.h>

#include "constrain/grammar.h"
#include "k3-router/chat_reader.h"

/* Names of other servers are taken for the nearest that K3 has (spec/text.md 3.7). */
static const char *effort_of(struct k3_chat_reader *r, const struct k3_json *v)
{
    static const char *const known[][2] = { { "low", "low" },     { "high", "high" },     { "max", "max" },
                                            { "minimal", "low" }, { "medium", "high" },   { "xhigh", "max" } };

    if (v->type != K3_JSON_STRING) {
        k3_chat_bad(r, "not a string");
        return NULL;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (k3_text_is(v->text, known[i][0]))
            return known[i][1];
    k3_chat_bad(r, "\"%s\"; low, high or max", k3_chat_quote(r, v->text));
    return NULL;
}

/* Returns whether it says that thinking is on or off. */
static bool read_template_kwargs(struct k3_chat_reader *r, const struct k3_json *o, struct k3_chat_opts *opts)
{
    static const char *const known[] = { "thinking", "enable_thinking", "thinking_effort", "preserve_thinking" };
    static const char where[] = "chat_template_kwargs";
    const struct k3_json *a = k3_json_value(o, "thinking"), *b = k3_json_value(o, "enable_thinking"), *v;

    k3_chat_at(r, "%s", where);
    if (!o)
        return false;
    if (o->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_only_members(r, o, where, known, sizeof(known) / sizeof(known[0]));
    k3_chat_at(r, "%s.thinking", where);
    opts->thinking = k3_chat_optional_bool(r, a, opts->thinking);
    k3_chat_at(r, "%s.enable_thinking", where);
    if (a && b && a->type != b->type)
        k3_chat_bad(r, "is not what \"thinking\" beside it says");
    opts->thinking = k3_chat_optional_bool(r, b, opts->thinking);
    k3_chat_at(r, "%s.preserve_thinking", where);
    if (!k3_chat_optional_bool(r, k3_json_get(o, "preserve_thinking"), true))
        k3_chat_bad(r, "false; K3 always keeps the thinking of earlier turns");
    k3_chat_at(r, "%s.thinking_effort", where);
    v = k3_json_get(o, "thinking_effort");
    if (v)
        opts->effort = v->type == K3_JSON_NULL ? NULL : effort_of(r, v); /* null: no effort message */
    return a || b;
}

/* Moonshot's own form. */
static void read_thinking_object(struct k3_chat_reader *r, const struct k3_json *o, struct k3_chat_opts *opts)
{
    static const char *const known[] = { "type", "effort", "keep" };
    const struct k3_json *v;

    k3_chat_at(r, "thinking");
    if (!o)
        return;
    if (o->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_only_members(r, o, "thinking", known, sizeof(known) / sizeof(known[0]));
    k3_chat_at(r, "thinking.type");
    v = k3_json_value(o, "type");
    opts->thinking = !v || (v->type == K3_JSON_STRING && k3_text_is(v->text, "enabled"));
    if (!opts->thinking && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "disabled")))
        k3_chat_bad(r, "enabled or disabled");
    k3_chat_at(r, "thinking.effort");
    v = k3_json_value(o, "effort");
    if (v)
        opts->effort = effort_of(r, v);
    k3_chat_at(r, "thinking.keep");
    v = k3_json_value(o, "keep");
    if (v && (v->type != K3_JSON_STRING || !k3_text_is(v->text, "all")))
        k3_chat_bad(r, "only \"all\": K3 always keeps the thinking of earlier turns");
}

/* The later of these wins: chat_template_kwargs, reasoning_effort, thinking.  An effort alone switches thinking on, except
 * against an express switch in chat_template_kwargs. */
void k3_chat_read_thinking(struct k3_chat_reader *r, const struct k3_json *body, struct k3_chat_opts *opts)
{
    bool said = read_template_kwargs(r, k3_json_value(body, "chat_template_kwargs"), opts);
    const struct k3_json *v = k3_json_value(body, "reasoning_effort");

    k3_chat_at(r, "reasoning_effort");
    if (v && v->type == K3_JSON_STRING && k3_text_is(v->text, "none")) {
        opts->thinking = false;
    } else if (v) {
        opts->effort = effort_of(r, v);
        opts->thinking = said ? opts->thinking : true;
    }
    read_thinking_object(r, k3_json_value(body, "thinking"), opts);
}

/* Whether an answer can be held to it is known before anything is queued. */
static void check_schema(struct k3_chat_reader *r)
{
    struct k3_text text = k3_chat_json_text(r, r->q->schema, K3_JSON_SPACED);
    struct k3_grammar *g = NULL;
    struct k3_err why = K3_ERR_INIT;
    int rc = r->rc < 0 ? r->rc : k3_grammar_schema(&g, text.bytes, text.len_bytes, &why);

    k3_grammar_free(g);
    if (rc == -ENOMEM)
        k3_chat_no_memory(r);
    else if (rc < 0 && r->rc == 0)
        r->rc = k3_refuse(r->err, -EINVAL, "%s: %s", r->q->param, why.text);
}

static void read_schema(struct k3_chat_reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "name", "description", "schema", "strict" };
    static const char where[] = "response_format.json_schema";
    struct k3_chat_request *q = r->q;

    k3_chat_at(r, "%s", where);
    if (!o || o->type != K3_JSON_OBJECT) {
        k3_chat_bad(r, "missing, or not an object");
        return;
    }
    k3_chat_only_members(r, o, where, known, sizeof(known) / sizeof(known[0]));
    k3_chat_at(r, "%s.name", where);
    if (k3_chat_optional_string(r, k3_json_get(o, "name")).len_bytes == 0)
        k3_chat_bad(r, "missing or empty");
    k3_chat_at(r, "%s.description", where);
    k3_chat_optional_string(r, k3_json_get(o, "description"));
    k3_chat_at(r, "%s.strict", where);
    q->schema_strict = k3_chat_optional_bool(r, k3_json_get(o, "strict"), false);
    k3_chat_at(r, "%s.schema", where);
    q->schema = k3_json_get(o, "schema");
    if (!q->schema || q->schema->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "missing, or not an object");
    if (r->rc == 0)
        check_schema(r);
    if (r->rc == 0)
        q->opts.schema = k3_chat_json_text(r, q->schema, K3_JSON_SORTED);
}

void k3_chat_read_response_format(struct k3_chat_reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "type", "json_schema" };
    const struct k3_json *type = k3_json_get(o, "type");

    k3_chat_at(r, "response_format");
    if (!o)
        return;
    if (o->type != K3_JSON_OBJECT)
        k3_chat_bad(r, "not an object");
    k3_chat_only_members(r, o, "response_format", known, sizeof(known) / sizeof(known[0]));
    k3_chat_at(r, "response_format.type");
    if (!type || type->type != K3_JSON_STRING) {
        k3_chat_bad(r, "missing, or not a string");
    } else if (k3_text_is(type->text, "json_object")) {
        r->q->opts.format = K3_CHAT_JSON_OBJECT;
    } else if (k3_text_is(type->text, "json_schema")) {
        r->q->opts.format = K3_CHAT_JSON_SCHEMA;
        read_schema(r, k3_json_get(o, "json_schema"));
    } else if (!k3_text_is(type->text, "text")) {
        k3_chat_bad(r, "\"%s\"; text, json_object or json_schema", k3_chat_quote(r, type->text));
    }
}

/* {"type":"function","function":{"name":NAME}}: this tool must be called.  The prompt says it as `required` does. */
static void read_named_choice(struct k3_chat_reader *r, const struct k3_json *o)
{
    static const char *const known[] = { "type", "function" };
    const struct k3_json *type = k3_json_get(o, "type"), *name = k3_json_get(k3_json_get(o, "function"), "name");
    struct k3_chat_request *q = r->q;

    k3_chat_only_members(r, o, "tool_choice", known, 2);
    k3_chat_at(r, "tool_choice.type");
    if (!type || type->type != K3_JSON_STRING || !k3_text_is(type->text, "function"))
        k3_chat_bad(r, "\"function\" is the only type of tool");
    k3_chat_at(r, "tool_choice.function.name");
    if (!name || name->type != K3_JSON_STRING) {
        k3_chat_bad(r, "missing, or not a string");
        return;
    }
    q->named_tool = name->text;
    q->opts.tool_choice = K3_CHAT_TOOLS_REQUIRED;
    if (r->rc == 0 && !(q->n_tools && bsearch(&name->text, q->tool, q->n_tools, sizeof(*q->tool), k3_chat_by_name)))
        k3_chat_bad(r, "no tool is called \"%s\"", k3_chat_quote(r, name->text));
}

void k3_chat_read_tool_choice(struct k3_chat_reader *r, const struct k3_json *body)
{
    const struct k3_json *v = k3_json_value(body, "tool_choice");
    struct k3_chat_request *q = r->q;

    k3_chat_at(r, "parallel_tool_calls");
    q->max_calls = k3_chat_optional_bool(r, k3_json_get(body, "parallel_tool_calls"), true) ? UINT32_MAX : 1;
    k3_chat_at(r, "tool_choice");
    if (!v)
        return;
    if (v->type == K3_JSON_OBJECT) {
        read_named_choice(r, v);
    } else if (v->type != K3_JSON_STRING) {
        k3_chat_bad(r, "not a string");
    } else if (k3_text_is(v->text, "none")) {
        q->opts.tool_choice = K3_CHAT_TOOLS_NONE;
        q->max_calls = 0;
    } else if (k3_text_is(v->text, "required")) {
        q->opts.tool_choice = K3_CHAT_TOOLS_REQUIRED;
        if (r->n_tools == 0)
            k3_chat_bad(r, "required, but no tools are declared");
    } else if (!k3_text_is(v->text, "auto")) {
        k3_chat_bad(r, "\"%s\"; auto, none or required", k3_chat_quote(r, v->text));
    }
}
