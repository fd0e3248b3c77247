/* k3-computed/source.h: where the pass gets its weights from.  The one implementation of the program is shm_source.c (trunk
 * stream, expert rings, embedding rows from the file).  Tests have one that reads files directly. */
#ifndef K3_COMPUTED_SOURCE_H
#define K3_COMPUTED_SOURCE_H

#include <stdint.h>

#include "ipc/err.h"
#include "model/model.h"
#include "shm/expert.h"
#include "shm/trunk.h"

struct k3_source {
    void *self;
    const struct k3_model *m;
    const float *resident; /* the resident area, fp32; offsets are k3_resident.pos / 4 */
    uint64_t block_bytes;  /* largest row block to ask for, unless one row (kv_b: one head) is larger */
    /* Row blocks in schedule order; see k3_trunk_reader_rows/_done/_next_pass in shm/trunk.h. */
    int (*rows)(void *self, uint32_t piece, uint32_t row, uint32_t n_rows, const void **rows, struct k3_err *err);
    void (*done)(void *self); /* with the oldest block */
    /* How many rows from (piece, row) on are there without waiting.  Only so many may be asked for while blocks are held, of
     * which there are K3_TRUNK_HELD at most; with none held `rows` waits.  The member may be NULL: nothing ever is. */
    uint32_t (*ready)(void *self, uint32_t piece, uint32_t row);
    int (*next_pass)(void *self, struct k3_err *err);
    int (*failed_pass)(void *self, struct k3_err *err); /* after an error: begin anew with the next pass */
    /* Experts of one layer, ascending; see k3_expert_client_* in shm/expert.h. */
    int (*experts_begin)(void *self, uint32_t layer, const uint16_t *experts, uint32_t n, struct k3_err *err);
    int (*expert_next)(void *self, struct k3_expert_view *out, struct k3_err *err);
    void (*expert_release)(void *self, const struct k3_expert_view *v);
    void (*experts_abandon)(void *self);
    /* Experts of a layer to come, the likeliest first: a hint, without answer.  The member may be NULL. */
    void (*prefetch)(void *self, uint32_t layer, const uint16_t *experts, uint32_t n);
    /* A whole piece that is pinned and in memory now, else NULL; valid until the next call of rows.  The member may be NULL. */
    const void *(*pinned)(void *self, uint32_t piece);
    int (*embed)(void *self, uint32_t token, float *out, struct k3_err *err); /* hidden floats */
};

#endif
