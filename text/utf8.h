/* text/utf8.h: checking UTF-8, walking over it, and putting it together from token bytes (spec/text.md 1.8). */
#ifndef K3_TEXT_UTF8_H
#define K3_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text/buf.h"

/* Offset of the first byte that does not belong to a well-formed sequence; len_bytes when all is well. */
size_t k3_utf8_check(const void *text, size_t len_bytes);

/* Length of the sequence that this lead byte of checked text begins. */
static inline size_t k3_utf8_len(uint8_t lead)
{
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}
/* The code point at p, in checked text. */
uint32_t k3_utf8_at(const uint8_t *p);
/* White_Space of Unicode; python: also U+001C to U+001F, as str.isspace() has it. */
bool k3_utf8_is_space(uint32_t cp, bool python);

/* Puts characters together from the bytes of successive tokens.  Bytes that can never become a character give one U+FFFD
 * for each maximal ill-formed subsequence; an incomplete tail (1 to 3 bytes) is kept until it is complete or flushed. */
struct k3_utf8_stream {
    uint8_t tail[4];
    uint8_t n, need; /* bytes in the tail, continuation bytes still missing */
    uint8_t lo, hi;  /* what the next one may be */
};
int k3_utf8_feed(struct k3_utf8_stream *s, const void *bytes, size_t len_bytes, struct k3_buf *out);
int k3_utf8_flush(struct k3_utf8_stream *s, struct k3_buf *out); /* the tail, if any, becomes one U+FFFD */

#endif
