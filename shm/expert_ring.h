/* shm/expert_ring.h: one end of one ring of shm/expert.h, and the layout of the control segment; used by both sides.
 *
 *   field      writer     order
 *   entry[i]   producer   plain; ordered by T and H
 *   tail       producer   T  store-release after entry[tail] is filled;  T' load-acquire (consumer)
 *   head       consumer   H  store-release after entry[head] is copied;  H' load-acquire (producer)
 * Each end keeps the index that it alone stores privately as well, and never reads it back: what lies in the segment
 * is input, not truth. */
#ifndef K3_SHM_EXPERT_RING_H
#define K3_SHM_EXPERT_RING_H

#include "shm/expert.h"

struct k3_expert_ring {
    struct k3_ring_index *shm;
    uint8_t *entry;
    uint32_t n_entries, entry_bytes;
    uint32_t mine; /* tail of a producer, head of a consumer */
};

/* n_entries must be a power of two.  The end goes on where its predecessor (a dead peer's end) stopped. */
void k3_expert_ring_producer(struct k3_expert_ring *r, struct k3_ring_index *shm, void *entry, uint32_t n_entries,
                             uint32_t entry_bytes);
void k3_expert_ring_consumer(struct k3_expert_ring *r, struct k3_ring_index *shm, void *entry, uint32_t n_entries,
                             uint32_t entry_bytes);
/* 0; -EAGAIN when full (push) or empty (pop); -EPROTO when the peer's index cannot be. */
int k3_expert_ring_push(struct k3_expert_ring *r, const void *entry);
int k3_expert_ring_pop(struct k3_expert_ring *r, void *entry);
/* A producer's view of how many entries wait to be consumed; -EPROTO. */
int64_t k3_expert_ring_fill(const struct k3_expert_ring *r);

/* Fills n_entries and all offsets of c from c->n_slots, and returns the length of the control segment. */
uint64_t k3_expert_ctl_layout(struct k3_expert_ctl *c);
/* First slot in the data segment, and the segment's whole length (a multiple of 2 MiB).  -EOVERFLOW. */
int k3_arena_layout(uint32_t n_slots, uint64_t slot_bytes, uint64_t *slots_off_bytes, uint64_t *data_bytes);

/* What one side needs of a mapped control segment: checked copies of its numbers, and its three ring ends. */
struct k3_expert_ends {
    struct k3_expert_ctl *ctl; /* lines a and b are used in place */
    uint32_t *held;
    uint32_t n_slots, generation;
    uint64_t slot_bytes, data_bytes, slots_off_bytes;
    struct k3_data_place data;
    struct k3_expert_ring req, cpl, rel;
};
/* Checks magic, version and every number of the segment before use (-EPROTO names the first that is wrong).  owner:
 * the ends of expertd, else those of computed. */
int k3_expert_ends_open(struct k3_expert_ends *e, const struct k3_seg *seg, bool owner, struct k3_err *err);
/* True when the head of a data segment is an arena of this size and digest. */
bool k3_arena_matches(const struct k3_seg *data, uint32_t n_slots, uint64_t slot_bytes, uint64_t data_bytes,
                      const uint8_t digest[32]);

#endif
