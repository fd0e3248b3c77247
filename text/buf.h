/* text/buf.h: a growing byte buffer and a growing list of token ids.  Text may hold NUL bytes, so it always travels
 * with its length and never as a C string. */
#ifndef K3_TEXT_BUF_H
#define K3_TEXT_BUF_H

#include <stddef.h>
#include <stdint.h>

struct k3_buf { char *bytes; size_t len_bytes, cap_bytes; }; /* {0} is empty */
struct k3_ids { uint32_t *id; size_t n, cap; };              /* {0} is empty */

/* All return 0 or -ENOMEM; a buffer that could not grow keeps what it had. */
int k3_buf_append(struct k3_buf *b, const void *bytes, size_t len_bytes);
int k3_buf_puts(struct k3_buf *b, const char *text);
int k3_buf_printf(struct k3_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A JSON string with its quotes: non-ASCII stays as it is; text must be valid UTF-8. */
int k3_buf_json(struct k3_buf *b, const char *text, size_t len_bytes);
int k3_buf_json_ids(struct k3_buf *b, const struct k3_ids *ids); /* [1,2,3] */
void k3_buf_free(struct k3_buf *b);

int k3_ids_push(struct k3_ids *v, uint32_t id);
int k3_ids_append(struct k3_ids *v, const uint32_t *id, size_t n);
void k3_ids_free(struct k3_ids *v);

#endif
