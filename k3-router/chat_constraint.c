/* From a chat request to the constraint of its answer, as k3-computed takes it. */
#include "k3-router/chat_request.h"

#include <errno.h>

static int put_controls(struct k3_buf *b, const struct k3_tokenizer *t)
{
    static const struct { const char *name; uint32_t above; } control[] = {
        { "eos", K3_SP_EOS }, { "end_of_msg", K3_SP_END_OF_MSG }, { "open", K3_SP_OPEN }, { "close", K3_SP_CLOSE }, { "sep", K3_SP_SEP },
    };
    int rc = 0;

    for (size_t i = 0; i < sizeof(control) / sizeof(control[0]) && rc == 0; i++)
        rc = k3_buf_printf(b, "%s\"%s\":%u", i ? "," : "\"control\":{", control[i].name, k3_tokenizer_base(t) + control[i].above);
    return rc ? rc : k3_buf_puts(b, "}");
}

static int put_tools(struct k3_buf *b, const struct k3_chat_request *q)
{
    const struct k3_text *tool = q->named_tool.len_bytes ? &q->named_tool : q->tool;
    size_t n = q->named_tool.len_bytes ? 1 : q->n_tools;
    int rc = k3_buf_puts(b, ",\"tools\":[");

    for (size_t i = 0; i < n && rc == 0; i++) {
        if (i)
            rc = k3_buf_puts(b, ",");
        if (rc == 0)
            rc = k3_buf_json(b, tool[i].bytes, tool[i].len_bytes);
    }
    return rc ? rc : k3_buf_printf(b, "],\"must_call\":%s,\"one_call\":%s", q->opts.tool_choice == K3_CHAT_TOOLS_REQUIRED ? "true" : "false",
                                   q->max_calls == 1 ? "true" : "false");
}

/* The schema travels as text: cJSON would lose digits and the order of equal keys.  Its members keep the client's order. */
static int put_schema(struct k3_buf *b, const struct k3_json *schema)
{
    struct k3_buf text = { 0 };
    int rc = k3_json_write(&text, schema, K3_JSON_SPACED);

    if (rc == 0)
        rc = k3_buf_puts(b, ",\"format\":\"json_schema\",\"schema\":");
    if (rc == 0)
        rc = k3_buf_json(b, text.bytes, text.len_bytes);
    k3_buf_free(&text);
    return rc;
}

int k3_chat_request_constraint(const struct k3_chat_request *q, const struct k3_tokenizer *t, struct k3_buf *out)
{
    int rc;

    if (q->opts.format == K3_CHAT_TEXT && q->opts.tool_choice != K3_CHAT_TOOLS_REQUIRED)
        return 0;
    rc = k3_buf_printf(out, "{\"start\":\"%s\",", q->starts_thinking ? "think" : "response");
    if (rc == 0)
        rc = put_controls(out, t);
    if (rc == 0 && q->n_tools && q->opts.tool_choice != K3_CHAT_TOOLS_NONE)
        rc = put_tools(out, q);
    if (rc == 0 && q->opts.format == K3_CHAT_JSON_SCHEMA)
        rc = put_schema(out, q->schema);
    if (rc == 0 && q->opts.format == K3_CHAT_JSON_OBJECT)
        rc = k3_buf_puts(out, ",\"format\":\"json_object\"");
    return rc ? rc : k3_buf_puts(out, "}");
}
