/* k3-router/chat.h: the chat format XTML in both directions (spec/text.md 3).  chat.c renders messages to prompt ids;
 * parse_out.c takes the generated ids apart.
 *
 * Every segment is encoded on its own, and only the renderer itself places the four marker ids: whatever a message, a
 * name or a body holds goes through text mode. */
#ifndef K3_ROUTER_CHAT_H
#define K3_ROUTER_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "k3-router/tokenizer.h"
#include "k3-router/utf8.h"

struct k3_text { const char *bytes; size_t len_bytes; }; /* borrowed; {0} is empty */

enum k3_chat_role { K3_CHAT_SYSTEM, K3_CHAT_USER, K3_CHAT_ASSISTANT, K3_N_CHAT_ROLES };
struct k3_chat_message {
    enum k3_chat_role role;
    struct k3_text name;         /* optional */
    const struct k3_text *parts; /* each is a segment of its own */
    size_t n_parts;
    struct k3_text reasoning;    /* assistant only */
};

enum k3_chat_format { K3_CHAT_TEXT, K3_CHAT_JSON_OBJECT, K3_CHAT_JSON_SCHEMA };
struct k3_chat_opts {
    bool thinking;
    const char *effort;          /* "low", "high" or "max"; NULL = no effort message */
    enum k3_chat_format format;
    struct k3_text schema;       /* JSON_SCHEMA: keys sorted, compact (spec/text.md 3.5) */
    bool no_generation_prompt;
};

/* A renderer: the fixed segments, encoded once.  t is borrowed and must outlive it. */
struct k3_chat;
int k3_chat_open(struct k3_chat **out, const struct k3_tokenizer *t, struct k3_err *err);
void k3_chat_close(struct k3_chat *c);
/* Appends the prompt's ids to out. */
int k3_chat_render(const struct k3_chat *c, const struct k3_chat_message *messages, size_t n,
                   const struct k3_chat_opts *opts, struct k3_ids *out, struct k3_err *err);

/* ---- parse_out.c ---- */
enum k3_channel { K3_OUT_THINK, K3_OUT_RESPONSE };
/* Whole characters of one channel, in order.  A negative return stops the feed with that code. */
typedef int k3_out_fn(void *arg, enum k3_channel channel, const char *text, size_t len_bytes);

#define K3_TAG_IDS_MAX 64u
enum k3_out_state { K3_OUT_IN_THINK, K3_OUT_BETWEEN, K3_OUT_IN_RESPONSE, K3_OUT_IN_TOOLS, K3_OUT_END };
struct k3_out {
    const struct k3_tokenizer *t; /* borrowed */
    k3_out_fn *fn;
    void *arg;
    enum k3_out_state state;
    bool first;          /* no id seen yet */
    uint32_t marker;     /* OPEN or CLOSE while a tag is being read, else 0 */
    uint32_t n_tag_ids;
    uint32_t n_dropped;  /* special ids that stood where none belongs */
    struct k3_buf tag;   /* bytes of the tag so far */
    struct k3_buf text;  /* scratch */
    struct k3_utf8_stream utf8;
};
/* thinking: which channel the generation prompt has opened. */
void k3_out_open(struct k3_out *o, const struct k3_tokenizer *t, bool thinking, k3_out_fn *fn, void *arg);
int k3_out_feed(struct k3_out *o, uint32_t id);
/* No more ids: what was held back comes out.  To be called once. */
int k3_out_finish(struct k3_out *o);
void k3_out_close(struct k3_out *o);

#endif
