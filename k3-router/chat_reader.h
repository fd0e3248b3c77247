/* k3-router/chat_reader.h: what the readers of a chat body share (chat_request.c, chat_options.c). */
#ifndef K3_ROUTER_CHAT_READER_H
#define K3_ROUTER_CHAT_READER_H

#include "k3-router/chat_request.h"

#define K3_CHAT_QUOTE_BYTES 40u

/* After the first fault the rest does nothing; k3_chat_at says where we are, so q->param names the member at fault. */
struct k3_chat_reader {
    struct k3_chat_request *q;
    struct k3_err *err;
    int rc;
    char quoted[K3_CHAT_QUOTE_BYTES + 4];
    struct k3_text *tool; /* names of all tools so far */
    size_t n_tools, cap_tools;
};

void k3_chat_at(struct k3_chat_reader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void k3_chat_bad(struct k3_chat_reader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* What a client wrote, short and printable, for an error; until the next call. */
const char *k3_chat_quote(struct k3_chat_reader *r, struct k3_text t);
void k3_chat_no_memory(struct k3_chat_reader *r);
/* q frees p; p may be NULL. */
void k3_chat_own(struct k3_chat_reader *r, void *p);
/* n zeroed elements, which q frees; NULL after a failure, and for 0 elements. */
void *k3_chat_many(struct k3_chat_reader *r, size_t n, size_t size_bytes);
/* v as text, which q frees. */
struct k3_text k3_chat_json_text(struct k3_chat_reader *r, const struct k3_json *v, enum k3_json_style style);
/* A string, or absent or null: then empty. */
struct k3_text k3_chat_optional_string(struct k3_chat_reader *r, const struct k3_json *v);
/* true or false, or absent or null: then otherwise. */
bool k3_chat_optional_bool(struct k3_chat_reader *r, const struct k3_json *v, bool otherwise);
/* Every member of o is one of the n known; where: the path of o. */
void k3_chat_only_members(struct k3_chat_reader *r, const struct k3_json *o, const char *where, const char *const *known, size_t n);
/* For qsort and bsearch of struct k3_text. */
int k3_chat_by_name(const void *x, const void *y);

/* chat_options.c: members of the body beside messages and tools, into r->q. */
void k3_chat_read_tool_choice(struct k3_chat_reader *r, const struct k3_json *body);
void k3_chat_read_thinking(struct k3_chat_reader *r, const struct k3_json *body, struct k3_chat_opts *opts);
void k3_chat_read_response_format(struct k3_chat_reader *r, const struct k3_json *o);

#endif
