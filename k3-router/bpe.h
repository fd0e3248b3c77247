/* k3-router/bpe.h: the table of ranks and the merge of one piece (spec/text.md 1.5). */
#ifndef K3_ROUTER_BPE_H
#define K3_ROUTER_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "text/buf.h"
#include "model/ranks.h"

#define K3_NO_RANK UINT32_MAX

/* Token i is bytes[off[i] .. off[i + 1]).  slot: open addressing, 0 = empty, else id + 1. */
struct k3_ranks {
    char *bytes;
    uint32_t *off;
    uint32_t n;
    uint32_t longest_bytes;
    uint32_t *slot, *hash; /* hash[i] of the token in slot[i], so that most misses compare no bytes */
    uint32_t mask;
};

/* Fills slot, hash, mask, longest_bytes from bytes, off and n.  0, -ENOMEM, or -EEXIST with the two ids that are the same bytes
 * in *a < *b, or -ENOENT with the byte that is no token in *a. */
int k3_ranks_build(struct k3_ranks *r, uint32_t *a, uint32_t *b);
void k3_ranks_free(struct k3_ranks *r);
uint32_t k3_ranks_find(const struct k3_ranks *r, const char *bytes, size_t len_bytes); /* or K3_NO_RANK */

/* Appends the ids of one piece, which is not empty.  O(n log n).  0 or -ENOMEM. */
int k3_bpe_encode(const struct k3_ranks *r, const char *piece, size_t len_bytes, struct k3_ids *out);
/* The merge alone, without the look-up of the whole piece; heap: the form for long pieces.  For tests of one against
 * the other. */
int k3_bpe_merge(const struct k3_ranks *r, const char *piece, size_t len_bytes, int heap, struct k3_ids *out);

#endif
