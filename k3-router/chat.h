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
#include "text/chat_json.h"
#include "k3-router/tokenizer.h"
#include "text/utf8.h"

enum k3_chat_role { K3_CHAT_SYSTEM, K3_CHAT_USER, K3_CHAT_ASSISTANT, K3_CHAT_TOOL, K3_N_CHAT_ROLES };

/* The type attribute of an argument, by the JSON type of its value; true and false are both boolean. */
struct k3_chat_argument {
    struct k3_text key;
    enum k3_json_type type;
    struct k3_text value; /* string: raw; else JSON in the SPACED style */
};
struct k3_chat_call {
    struct k3_text id, tool; /* id is optional: results name it */
    const struct k3_chat_argument *arguments;
    size_t n_arguments;
    struct k3_text json;     /* arguments that are no JSON, as they came; then n_arguments is 0 */
};
struct k3_chat_message {
    enum k3_chat_role role;
    struct k3_text name;         /* optional */
    const struct k3_text *parts; /* each is a segment of its own */
    size_t n_parts;
    struct k3_text reasoning;    /* assistant only, like calls and partial */
    const struct k3_chat_call *calls;
    size_t n_calls;
    struct k3_text call_id;      /* tool: the call that this is the result of */
    struct k3_text tool;         /* tool: its name where call_id names no call */
    struct k3_text tools;        /* system: declares these tools (JSON, SORTED) and has no parts */
    bool partial;                /* the last message: the answer goes on where its text ends (spec/text.md 3.13) */
};

enum k3_chat_format { K3_CHAT_TEXT, K3_CHAT_JSON_OBJECT, K3_CHAT_JSON_SCHEMA };
enum k3_chat_tool_choice { K3_CHAT_TOOLS_AUTO, K3_CHAT_TOOLS_NONE, K3_CHAT_TOOLS_REQUIRED };
struct k3_chat_opts {
    bool thinking;
    const char *effort;          /* "low", "high" or "max"; NULL = no effort message */
    enum k3_chat_format format;
    struct k3_text schema;       /* JSON_SCHEMA: JSON, SORTED (spec/text.md 3.5) */
    bool no_generation_prompt;
    struct k3_text tools;        /* empty, or an array in JSON, SORTED */
    enum k3_chat_tool_choice tool_choice;
};

/* A renderer: the fixed segments, encoded once.  t is borrowed and must outlive it.  Constant once open: any number of threads
 * may render at once. */
struct k3_chat;
int k3_chat_open(struct k3_chat **out, const struct k3_tokenizer *t, struct k3_err *err);
void k3_chat_close(struct k3_chat *c);
/* Appends the prompt's ids to out.  Results of calls are put into the order of the calls first (spec/text.md 3.6).  -EINVAL
 * names the message that cannot be rendered. */
int k3_chat_render(const struct k3_chat *c, const struct k3_chat_message *messages, size_t n,
                   const struct k3_chat_opts *opts, struct k3_ids *out, struct k3_err *err);

/* Lengths of beginnings of a rendered prompt that later prompts are likely to share, ascending (spec/text.md 3.10): the system
 * messages that it begins with, where they are K3_POINT_SYSTEM_IDS or more; and the whole history, without what is said for this
 * request alone (tool choice, response format, generation prompt).  Returns how many. */
#define K3_CHAT_POINTS 2u
#define K3_POINT_SYSTEM_IDS 256u
uint32_t k3_chat_points(const struct k3_chat *c, const struct k3_ids *prompt, uint32_t out[K3_CHAT_POINTS]);

/* The channel that the prompt leaves open, for the parser: think, or else response.  last: the last message, or NULL. */
bool k3_chat_starts_in_think(const struct k3_chat_message *last, bool thinking);

/* ---- parse_out.c ---- */
enum k3_channel { K3_OUT_THINK, K3_OUT_RESPONSE };
/* Whole characters of one channel, in order.  A negative return stops the feed with that code. */
typedef int k3_out_fn(void *arg, enum k3_channel channel, const char *text, size_t len_bytes);

/* The id that was fed as number `index` (from 0) has text in this channel, which comes next there, perhaps later. */
typedef int k3_out_id_fn(void *arg, enum k3_channel channel, size_t index);

/* Calls, in order; index counts from 0.
 *   BEGIN       text: the name of the tool
 *   ARGUMENTS   text: more of the arguments; all of a call's together are one JSON object
 *   END         the call is complete
 *   LOST        the call will not be completed and is none; what came of it is void */
enum k3_call_event { K3_CALL_BEGIN, K3_CALL_ARGUMENTS, K3_CALL_END, K3_CALL_LOST };
typedef int k3_call_fn(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes);

#define K3_TAG_IDS_MAX 64u
#define K3_LONG_TAG_IDS_MAX 2048u /* of a call or an argument: names and keys are the client's */
enum k3_out_state {
    K3_OUT_IN_THINK, K3_OUT_BETWEEN, K3_OUT_IN_RESPONSE, K3_OUT_IN_TOOLS, K3_OUT_IN_CALL, K3_OUT_IN_VALUE, K3_OUT_END
};
enum k3_out_value { K3_VALUE_DROPPED, K3_VALUE_STRING, K3_VALUE_JSON, K3_VALUE_WHOLE };
struct k3_out {
    const struct k3_tokenizer *t; /* borrowed */
    k3_out_fn *fn;
    k3_call_fn *call_fn; /* NULL: calls are dropped */
    k3_out_id_fn *id_fn; /* NULL: nobody asks which ids make the text */
    size_t n_fed;
    struct k3_ids tag_index; /* for id_fn: of the ids of `tag` */
    void *arg;
    enum k3_out_state state;
    bool first;          /* no id seen yet */
    uint32_t marker;     /* OPEN or CLOSE while a tag is being read, else 0 */
    uint32_t n_tag_ids;
    uint32_t n_dropped;  /* special ids that stood where none belongs */
    uint32_t max_calls, n_begun, n_complete;
    bool call_told;      /* the call that is being read has had its BEGIN */
    bool call_whole;     /* its arguments came in one json element */
    uint32_t n_arguments;
    enum k3_out_value kind; /* IN_VALUE: what becomes of its text */
    struct k3_buf tag;   /* bytes of the tag so far */
    struct k3_buf text;  /* scratch */
    struct k3_buf value; /* text of a value that must be complete before it can be told */
    struct k3_buf json;  /* scratch: arguments to tell */
    struct k3_utf8_stream utf8;
};
/* thinking: which channel the generation prompt has opened. */
void k3_out_open(struct k3_out *o, const struct k3_tokenizer *t, bool thinking, k3_out_fn *fn, void *arg);
/* To be told of calls, at most max_calls complete ones.  Call it before the first id. */
void k3_out_calls(struct k3_out *o, uint32_t max_calls, k3_call_fn *fn);
/* To be told which ids the texts come from.  Call it before the first id. */
void k3_out_ids(struct k3_out *o, k3_out_id_fn *fn);
int k3_out_feed(struct k3_out *o, uint32_t id);
/* No more ids: what was held back comes out.  To be called once. */
int k3_out_finish(struct k3_out *o);
void k3_out_close(struct k3_out *o);

#endif
