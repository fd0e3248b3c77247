/* constrain/vocab.h: the bytes of every text id, sorted, so that all ids that begin alike are looked at once. */
#ifndef K3_CONSTRAIN_VOCAB_H
#define K3_CONSTRAIN_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

/* Entry i, in byte order: id[i], bytes[off[i] .. off[i + 1]), of which the first alike[i] are those of entry i - 1. */
struct k3_vocab {
    uint32_t n, longest_bytes;
    uint32_t *id, *at; /* at: by id, its entry */
    uint32_t *off;
    uint16_t *alike;
    char *bytes;
};

/* DIR/tiktoken.model.  Refused (exit 2): a file that is not there or not in that form, the same token twice, a byte that is no
 * token.  k3_vocab_free accepts NULL. */
int k3_vocab_open(struct k3_vocab **out, const char *dir, struct k3_err *err);
/* The same from memory; name for texts. */
int k3_vocab_parse(struct k3_vocab **out, const char *ranks, size_t len_bytes, const char *name, struct k3_err *err);
void k3_vocab_free(struct k3_vocab *v);
/* What it takes at most for a vocabulary of so many ids of usual length, reading the file included. */
uint64_t k3_vocab_bytes(uint32_t n_vocab);
static inline const char *k3_vocab_token(const struct k3_vocab *v, uint32_t id, size_t *len_bytes)
{
    uint32_t i = v->at[id];

    *len_bytes = v->off[i + 1] - v->off[i];
    return v->bytes + v->off[i];
}

/* Sets the bit of every id that a machine takes whole.  step: from the state behind `level` bytes to that behind level + 1, which
 * replaces whatever was there; false: the byte is not allowed. */
typedef bool k3_step_fn(void *arg, uint32_t level, uint8_t byte);
void k3_vocab_walk(const struct k3_vocab *v, k3_step_fn *step, void *arg, uint64_t *allowed);

static inline void k3_bit_set(uint64_t *bits, uint32_t i)
{
    bits[i / 64] |= 1ull << i % 64;
}
static inline bool k3_bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> i % 64 & 1;
}

#endif
