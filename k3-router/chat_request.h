/* k3-router/chat_request.h: the members of a body of POST /v1/chat/completions that make the prompt, checked and put into
 * the shape that chat.c renders (spec/text.md 3, 5.1, 5.10).
 *
 * The order of a request:
 *   k3_json_parse(&doc, body)                   -EINVAL, -EILSEQ: 400
 *   k3_chat_request_read(&q, doc.node, ...)     -EINVAL: 400 with err.text and q.param
 *   k3_chat_request_render(&q, chat, &ids, ..)  the same
 *   k3_answer_open(.., q.starts_thinking, ..), k3_answer_calls(.., q.max_calls, ..)
 *   k3_chat_request_free(&q), k3_json_free(&doc)
 *
 * Honoured here, so the server must take no notice of them: k3_chat_request_has().  How to sample is the server's. */
#ifndef K3_ROUTER_CHAT_REQUEST_H
#define K3_ROUTER_CHAT_REQUEST_H

#include "k3-router/chat.h"

#define K3_PARAM_BYTES 160
struct k3_chat_request {
    struct k3_chat_message *message;
    size_t n_messages;
    struct k3_chat_opts opts;
    bool starts_thinking;          /* the channel that the prompt leaves open */
    uint32_t max_calls;            /* 0: tool_choice none; 1: parallel_tool_calls false; else UINT32_MAX */
    const struct k3_text *tool;    /* the names of all declared tools, in byte order */
    size_t n_tools;
    const struct k3_json *schema;  /* response_format json_schema, else NULL */
    bool schema_strict;            /* what the client said; absent: false; both are held to */
    struct k3_text named_tool;     /* tool_choice names it; else empty */
    char param[K3_PARAM_BYTES];    /* after -EINVAL: the member at fault, "messages[2].content[0].type" */
    void **owned;                  /* private: all that has to be freed */
    size_t n_owned, cap_owned;
};
/* body is borrowed and must outlive q.  defaults: thinking and effort where the request says nothing.  Fills *q, which is to
 * be freed in any case.  0, -EINVAL (the client's fault) or -ENOMEM. */
int k3_chat_request_read(struct k3_chat_request *q, const struct k3_json *body, const struct k3_chat_opts *defaults,
                         struct k3_err *err);
/* Appends the prompt's ids.  0, -EINVAL or -ENOMEM as above. */
int k3_chat_request_render(struct k3_chat_request *q, const struct k3_chat *c, struct k3_ids *out, struct k3_err *err);
/* What the ids of the answer are held to (constrain/constraint.h), as JSON: a response_format, a call that must come.  Nothing is
 * appended when there is neither.  0 or -ENOMEM.  chat_constraint.c */
int k3_chat_request_constraint(const struct k3_chat_request *q, const struct k3_tokenizer *t, struct k3_buf *out);
void k3_chat_request_free(struct k3_chat_request *q);

/* Is this member of the body one that is read here? */
bool k3_chat_request_has(struct k3_text member);

#endif
