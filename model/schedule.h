/* model/schedule.h: where each piece lies in the trunk stream or in the pinned area (design.md sections 2, 3).
 * trunkd and computed both build the layout and compare its digest; nothing is negotiated per layer.
 *
 * Stream positions of one pass.  Unpinned pieces follow in schedule order.  A piece that continues the previous
 * unpinned piece in the same file continues it in the stream too (they form a run and are read as one).  Every run
 * owns whole pages of A bytes and starts in its first page at (file offset mod A); so direct reads land in place, and
 * reads, which are cut at page boundaries, never write the same page.  P, the length of a pass, is a multiple of A.
 * Piece i of pass n starts at n * P + start[i].
 *
 * Pinned pieces lie in the pinned area: whole pages of their own each, at (file offset mod A) in the first.
 *
 * Data segment:  head (struct k3_trunk_data of shm/trunk.h, piece flags, resident area) rounded up to 2 MiB
 *                | pinned area, rounded up to 2 MiB | ring, whole 2 MiB pages */
#ifndef K3_MODEL_SCHEDULE_H
#define K3_MODEL_SCHEDULE_H

#include "model/model.h"

#define K3_HUGE_BYTES (2u << 20)
#define K3_PAGE_BYTES 4096u

struct k3_layout {
    uint32_t align_bytes; /* A */
    uint64_t pass_bytes;  /* P; 0 when all is pinned */
    uint64_t ring_bytes;  /* whole 2 MiB pages, at least one; present (one page) even when P is 0 */
    uint64_t flags_off, resident_off, pinned_off, pinned_bytes, ring_off, data_bytes; /* in the data segment */
    uint64_t pinned_payload_bytes; /* sum of len_bytes of pinned pieces */
    size_t n_pieces, n_pinned;
    uint64_t *start; /* per piece: position in the pass, or offset in the data segment when pinned */
    uint8_t *pinned; /* per piece: 1 = pinned */
    uint8_t digest[32]; /* model digest + A + ring size + P + pinned set + starts */
};

/* Chooses pins for a budget: router gates first, then the other pieces spread evenly over the pass by bytes,
 * one piece at a time until the next would not fit.  pinned: m->n_pieces bytes, written 0/1.  The budget is never
 * exceeded: a piece costs the whole pages that it owns (0.05% more than its bytes for K3).  A budget of at least the
 * whole trunk in such pages pins everything. */
void k3_pins_choose(const struct k3_model *m, uint32_t align_bytes, uint64_t budget_bytes, uint8_t *pinned);

/* Builds the layout for a given pinned set.  Refused: ring_bytes not a multiple of 2 MiB or smaller than twice
 * the largest row block (a row; for kv_b a head).  On success release with k3_layout_free(). */
int k3_layout_build(struct k3_layout *out, const struct k3_model *m, uint32_t align_bytes, uint64_t ring_bytes,
                    const uint8_t *pinned, struct k3_err *err);
void k3_layout_free(struct k3_layout *l);

/* A direct-I/O alignment that suits every file that the schedule reads: at least 4096 (statx STATX_DIOALIGN). */
uint32_t k3_model_dio_align(const struct k3_model *m);

#endif
