/* k3-router/tokenizer.h: text to token ids and back (spec/text.md 1).  tokenizer.c reads the two files and drives; split.c
 * cuts text into pieces, bpe.c merges the bytes of one piece.
 *
 * Ids 0..base-1 are the ranks of tiktoken.model, base..base+255 the special ids.  Two modes: text, in which no special
 * id can ever come out whatever the text says, and special, in which the spellings of special ids become those ids.
 * Everything that a user, a client or a tool wrote goes through text mode.
 *
 * A tokenizer is constant once open; any number of threads may use it at once. */
#ifndef K3_ROUTER_TOKENIZER_H
#define K3_ROUTER_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "text/buf.h"

#define K3_N_SPECIALS 256u
/* Where the ids that the chat format needs lie above base. */
enum { K3_SP_BOS = 0, K3_SP_EOS = 1, K3_SP_END_OF_MSG = 2, K3_SP_OPEN = 3, K3_SP_CLOSE = 4, K3_SP_SEP = 5 };

struct k3_tokenizer;

/* Reads DIR/tiktoken.model and DIR/tokenizer_config.json.  Refused (exit 2, with the line): what parse refuses, and a
 * config whose names of base+2 .. base+5 are not the four markers of K3's chat format.  On success *out is the caller's;
 * k3_tokenizer_close() accepts NULL. */
int k3_tokenizer_open(struct k3_tokenizer **out, const char *dir, struct k3_err *err);
/* The same from memory, without the check of the four markers.  config_json may be NULL: all special ids then have
 * reserved names.  The *_name strings are for error texts. */
int k3_tokenizer_parse(struct k3_tokenizer **out, const char *ranks, size_t ranks_bytes, const char *ranks_name,
                       const char *config_json, size_t config_bytes, const char *config_name, struct k3_err *err);
void k3_tokenizer_close(struct k3_tokenizer *t);

uint32_t k3_tokenizer_base(const struct k3_tokenizer *t);    /* number of ranks */
uint32_t k3_tokenizer_n_vocab(const struct k3_tokenizer *t); /* base + 256 */

/* Appends the ids of text.  -EILSEQ (exit 2, with the byte offset) when it is not UTF-8. */
int k3_tokenizer_encode(const struct k3_tokenizer *t, const char *text, size_t len_bytes, struct k3_ids *out,
                        struct k3_err *err);
int k3_tokenizer_encode_special(const struct k3_tokenizer *t, const char *text, size_t len_bytes, struct k3_ids *out,
                                struct k3_err *err);

/* The bytes of one id (a special id: its spelling); NULL when there is no such id.  Owned by the tokenizer. */
const char *k3_tokenizer_bytes(const struct k3_tokenizer *t, uint32_t id, size_t *len_bytes);
/* Appends the bytes of ids, as they are: they need not be UTF-8 (see utf8.h).  Special ids are left out unless
 * with_specials.  -EINVAL (exit 2) names an id that there is not. */
int k3_tokenizer_decode(const struct k3_tokenizer *t, const uint32_t *ids, size_t n, int with_specials,
                        struct k3_buf *out, struct k3_err *err);

/* ---- split.c: chunks and pieces ---- */
struct k3_split;
int k3_split_open(struct k3_split **out, struct k3_err *err);
void k3_split_close(struct k3_split *s);
typedef int k3_piece_fn(void *arg, const char *piece, size_t len_bytes);
/* Calls fn for every piece of text, in order; stops at its first negative return.  text must be valid UTF-8.  One
 * substring of the chunking, without looking for chunks. */
int k3_split_pieces(const struct k3_split *s, const char *text, size_t len_bytes, k3_piece_fn *fn, void *arg,
                    struct k3_err *err);
/* Length in bytes of the first substring of text that the reference encodes on its own (spec/text.md 1.6). *slice_left
 * is the number of code points left in the current slice; start with 0. */
size_t k3_split_chunk(const char *text, size_t len_bytes, size_t *slice_left);

#endif
