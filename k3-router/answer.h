/* k3-router/answer.h: from generated ids to what a person sees: the channels and calls of a chat answer, or the plain
 * text of a raw one; whole characters; stop texts. */
#ifndef K3_ROUTER_ANSWER_H
#define K3_ROUTER_ANSWER_H

#include <stdbool.h>

#include "ipc/err.h"
#include "k3-router/chat.h"
#include "k3-router/stop.h"

enum k3_answer_mode { K3_ANSWER_CHAT, K3_ANSWER_RAW, K3_ANSWER_IDS };

struct k3_answer_call { struct k3_buf name, arguments; bool complete; }; /* arguments: JSON when complete */

/* An id that has text.  Its text begins at at_bytes of its channel's, or in the middle of the character there. */
struct k3_answer_id { size_t index, at_bytes, at_chars; };
struct k3_answer_ids { struct k3_answer_id *id; size_t n, cap, n_taken; };

struct k3_answer {
    const struct k3_tokenizer *t; /* NULL only with K3_ANSWER_IDS: there is no text then */
    enum k3_answer_mode mode;
    struct k3_out out;            /* chat */
    struct k3_utf8_stream utf8;   /* raw, ids */
    struct k3_stop stop;
    struct k3_buf text, thinking; /* all of it */
    struct k3_buf scratch, shown;
    struct k3_answer_call *call;  /* all that began; those that are not complete are none */
    size_t n_calls, n_complete;
    struct k3_answer_ids ids[2];  /* by enum k3_channel, when they are wanted */
    bool wants_ids;
    size_t n_fed, fed_bytes, fed_chars; /* ids; response text, of which the stop texts may hold back the end */
    k3_out_fn *fn;                /* told of every new text; may be NULL */
    k3_call_fn *call_fn;          /* told of calls; may be NULL */
    void *arg;
};
/* thinking: the generation prompt has opened the think channel.  stop texts are borrowed; they apply to the response. */
void k3_answer_open(struct k3_answer *a, const struct k3_tokenizer *t, enum k3_answer_mode mode, bool thinking,
                    const char *const *stop, size_t n_stop, k3_out_fn *fn, void *arg);
/* Calls are wanted, at most max_calls of them (0: none); fn (may be NULL) gets the arg of open.  Before the first id; chat. */
void k3_answer_calls(struct k3_answer *a, uint32_t max_calls, k3_call_fn *fn);
/* It is wanted which ids make the texts.  Before the first id. */
void k3_answer_want_ids(struct k3_answer *a);
/* The next one of a channel of whose text something has been shown, and so with the next; NULL: no more so far.  When all of an
 * answer has been shown, what was taken piece by piece is what would be taken now. */
const struct k3_answer_id *k3_answer_take_id(struct k3_answer *a, enum k3_channel channel);
/* 1 after a stop text, 0, or negative. */
int k3_answer_feed(struct k3_answer *a, uint32_t id);
int k3_answer_finish(struct k3_answer *a); /* once, when no more ids come */
void k3_answer_close(struct k3_answer *a);

#endif
