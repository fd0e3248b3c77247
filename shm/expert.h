/* shm/expert.h: expert slots lent by k3-expertd to k3-computed.  design.md section 4.
 *
 * Control segment "expert": new with every generation of expertd.  Three single-producer single-consumer rings:
 *   request     computed -> expertd   demand or prefetch of (layer, expert)
 *   completion  expertd -> computed   slot, where the six tensors lie in it, status
 *   release     computed -> expertd   slot no longer used
 * Ring rules are those of style.md section 3 (T/T', H/H'); indices run freely, one writer per line.
 * Credit: computed never has more demands sent and not released than there are slots, and every ring has more entries
 * than slots; so every demand can be given a slot and no push ever blocks.  A PREFETCH takes no credit and gets no
 * completion; it is dropped when no slot is free or the ring is more than half full.
 *
 * Attach.  computed fills b.held[0..n_held) with the slots that it holds (completed, not yet released), then n_held, then
 * stores b.attach (release, A) and rings.  expertd, on a new attach number (acquire, A'): forgets every queued demand
 * of other attach numbers, makes the held slots lent and all other lent slots free, then stores a.attached (release).
 * Entries carry the attach number of computed; either side drops stale ones.  Between A and the answer computed sends
 * nothing.  A new computed attaches with n_held = 0.  After expertd died, the living computed first pops what the old
 * completion ring still holds, then attaches to the new segment with what it holds and sends its unanswered demands
 * again.  An index, slot or request that cannot be makes expertd publish a new control segment (same generation), which
 * computed sees as a restart.
 *
 * Data segment "expertdata": struct k3_arena_head with one record per slot, then the slots.
 *   slot record      expertd    layer, expert, off[], plain; then state = READY (release) after the bytes
 * expertd dies: its successor takes the segment over when the digest and slot size agree.  READY slots stay; lent flags
 * stay until the next attach says which are really held; READING slots are renewed (k3_seg_renew) before reuse (an arena of
 * hugetlb memory in which a READING slot is not whole 2 MiB pages is not taken over).  A record
 * is EMPTY while its fields change and READING before the first read is submitted, so a successor can trust it after
 * a death at any instruction.  When digest, size or number of slots differ, a new segment takes the name; a living
 * computed keeps the old one mapped until it has released what it holds of it, and does not list that in b.held. */
#ifndef K3_SHM_EXPERT_H
#define K3_SHM_EXPERT_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "model/model.h"
#include "shm/bell.h"
#include "shm/data.h"
#include "shm/segment.h"

#define K3_EXPERT_MAGIC 0x6b336578u
#define K3_EXPERT_VERSION 2u

enum k3_expert_kind { K3_DEMAND = 0, K3_PREFETCH = 1 };
struct k3_expert_req {
    uint64_t attach;
    uint32_t id; /* chosen by computed */
    uint16_t layer, expert;
    uint16_t kind; /* enum k3_expert_kind */
    uint16_t pad[3];
};
struct k3_expert_cpl {
    uint64_t attach;
    uint32_t id;
    uint32_t slot;
    int32_t status; /* 0, or negative errno: the expert could not be read and no slot was lent */
    uint16_t layer, expert;
    uint32_t off_bytes[K3_EXPERT_TENSORS]; /* of w1 packed, w1 scale, w2 packed, w2 scale, w3 packed, w3 scale */
    uint64_t file_off_bytes;               /* on error: where */
    uint32_t file;
    uint32_t hit; /* 1 = was resident */
};
struct k3_expert_rel {
    uint64_t attach;
    uint32_t slot;
    uint32_t pad;
};
static_assert(sizeof(struct k3_expert_req) == 24 && sizeof(struct k3_expert_cpl) == 64 &&
              sizeof(struct k3_expert_rel) == 16, "protocol");

struct k3_ring_index { /* n_entries is a power of two, kept privately by both sides */
    alignas(K3_LINE) _Atomic uint32_t tail; /* producer: T */
    alignas(K3_LINE) _Atomic uint32_t head; /* consumer: H */
};

struct k3_expert_line_a { /* written by expertd */
    alignas(K3_LINE) _Atomic uint64_t attached;
    _Atomic uint32_t bell, sleepers; /* bell: a completion or attached moved; sleepers: on b.bell */
};
struct k3_expert_line_b { /* written by computed */
    alignas(K3_LINE) _Atomic uint64_t attach;
    _Atomic uint32_t bell, sleepers; /* bell: a request, a release or attach moved; sleepers: on a.bell */
    uint32_t n_held;
};
struct k3_expert_ctl {
    uint32_t magic, version;
    uint32_t generation;
    uint32_t n_slots, n_entries; /* n_entries: power of two > n_slots, of each ring */
    uint32_t pad;
    uint64_t slot_bytes, data_bytes, slots_off; /* slots_off: first slot in the data segment, 2 MiB aligned */
    uint64_t req_off, cpl_off, rel_off, held_off; /* arrays in this segment; held: uint32_t[n_slots] */
    struct k3_data_place data; /* where the data segment is */
    uint8_t model_digest[32];
    struct k3_expert_line_a a;
    struct k3_expert_line_b b;
    struct k3_ring_index req, cpl, rel;
};

#define K3_ARENA_MAGIC 0x6b336172u
enum k3_slot_state { K3_SLOT_EMPTY = 0, K3_SLOT_READING = 1, K3_SLOT_READY = 2 };
struct k3_slot_record { /* 64 bytes, written by expertd alone */
    _Atomic uint32_t state; /* enum k3_slot_state */
    uint32_t lent;          /* number of completions not yet released */
    uint16_t layer, expert;
    uint32_t off_bytes[K3_EXPERT_TENSORS];
    uint32_t pad[7];
};
static_assert(sizeof(struct k3_slot_record) == 64, "protocol");
struct k3_arena_head {
    uint32_t magic, version;
    uint32_t n_slots, pad;
    uint64_t slot_bytes;
    uint8_t model_digest[32];
    /* then struct k3_slot_record[n_slots] at offset 4096 */
};
#define K3_ARENA_RECORDS_OFF 4096u

/* ---- computed's side (shm/expert_client.c) ---------------------------------------------------------------------- */

struct k3_expert_client;
struct k3_expert_view { /* one lent expert */
    const uint8_t *tensor[K3_EXPERT_TENSORS];
    uint32_t slot, layer, expert;
    bool hit;
};

/* Waits for an expertd of this instance (at most timeout_ns), compares the model digest, maps, attaches. */
int k3_expert_client_open(struct k3_expert_client **out, const char *instance, const char *rundir,
                          const struct k3_model *m, uint32_t generation, uint64_t timeout_ns, struct k3_err *err);
void k3_expert_client_close(struct k3_expert_client *c);
uint32_t k3_expert_client_slots(const struct k3_expert_client *c);
/* Declares the experts of one layer, ascending.  Demands leave in that order as credit allows; the rest follow as
 * slots are released.  The list is copied.  -EBUSY while the layer before has experts to come; views of it may still be
 * held. */
int k3_expert_client_begin(struct k3_expert_client *c, uint32_t layer, const uint16_t *experts, uint32_t n,
                           struct k3_err *err);
/* The next expert in list order, waiting for it.  Survives a death of expertd.  -EIO with words and exit 4 when it
 * could not be read (call k3_expert_client_abandon then); -ECANCELED when stop became true; -ENOENT after the last;
 * -EDEADLK when the caller holds every slot itself; -EPROTO when expertd broke the protocol (the next call attaches
 * anew); -ESTALE (exit 2) when the new expertd serves another checkpoint. */
int k3_expert_client_next(struct k3_expert_client *c, struct k3_expert_view *out, struct k3_err *err);
/* The expert returned by next is no longer used.  Nothing happens when it was released before. */
void k3_expert_client_release(struct k3_expert_client *c, const struct k3_expert_view *v);
/* Drops what is left of the layer: waits for outstanding demands and releases them, and every view that is still
 * held.  Does not wait for a dead expertd. */
void k3_expert_client_abandon(struct k3_expert_client *c);
/* Announces experts that layer `layer` will probably want, the likeliest first; no answer comes. */
void k3_expert_client_prefetch(struct k3_expert_client *c, uint32_t layer, const uint16_t *experts, uint32_t n);
void k3_expert_client_set_stop(struct k3_expert_client *c, _Atomic bool *stop);
struct k3_expert_client_counts { uint64_t demands, hits, waits, wait_ns, reattached, errors; };
void k3_expert_client_counts(const struct k3_expert_client *c, struct k3_expert_client_counts *out);

#endif
