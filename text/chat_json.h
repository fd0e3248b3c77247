/* text/chat_json.h: JSON as the chat format needs it (spec/text.md 1.9, 3.5).
 *
 * cJSON makes every number a double, ends a string at NUL, takes the first of two equal keys and refuses a lone surrogate.
 * A prompt needs all digits of an integer, whole strings, the last of equal keys in the place of the first, and U+FFFD for a
 * lone surrogate; so bodies that become prompts are read here. */
#ifndef K3_TEXT_CHAT_JSON_H
#define K3_TEXT_CHAT_JSON_H

#include <stdbool.h>
#include <stddef.h>

#include "ipc/err.h"
#include "text/buf.h"

struct k3_text { const char *bytes; size_t len_bytes; }; /* borrowed; {0} is empty */

enum k3_json_type {
    K3_JSON_NULL, K3_JSON_FALSE, K3_JSON_TRUE, K3_JSON_NUMBER, K3_JSON_STRING, K3_JSON_ARRAY, K3_JSON_OBJECT
};
struct k3_json {
    enum k3_json_type type;
    struct k3_text key;  /* of a member of an object */
    struct k3_text text; /* string: its characters, which may hold NUL; number: as it was written.  A NUL stands behind both */
    size_t n;            /* children */
    const struct k3_json *child, *next;
};
#define K3_JSON_DEPTH_MAX 256

struct k3_json_doc { struct k3_json *node; char *text; }; /* node[0] is the root; {0} is none */
/* Strict JSON (RFC 8259) in valid UTF-8, nothing behind it, at most K3_JSON_DEPTH_MAX deep.  -EINVAL or -EILSEQ with the byte
 * offset (exit 2), -ENOMEM.  On success the caller owns *d. */
int k3_json_parse(struct k3_json_doc *d, const char *bytes, size_t len_bytes, struct k3_err *err);
void k3_json_free(struct k3_json_doc *d);

/* The member of an object; NULL when o is NULL or no object, or has no such member. */
const struct k3_json *k3_json_get(const struct k3_json *o, const char *key);
/* The same, but null counts as absent. */
const struct k3_json *k3_json_value(const struct k3_json *o, const char *key);
bool k3_text_is(struct k3_text t, const char *text);
/* Nothing but white space, as Python's str.strip() has it; t must be valid UTF-8. */
bool k3_text_is_blank(struct k3_text t);

/* Text as Python's json.dumps(ensure_ascii=False) writes it.  SORTED: keys in byte order, "," and ":"; SPACED: keys as they
 * came, ", " and ": ".  0 or -ENOMEM. */
enum k3_json_style { K3_JSON_SORTED, K3_JSON_SPACED };
int k3_json_write(struct k3_buf *out, const struct k3_json *v, enum k3_json_style style);
/* The inside of a JSON string: text escaped, without the quotes. */
int k3_json_escape(struct k3_buf *out, const char *text, size_t len_bytes);

#endif
