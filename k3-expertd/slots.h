/* k3-expertd/slots.h: the state of every slot, who waits for it and who has it.  No I/O; tested alone.
 *
 *   EMPTY   -> READING   demand or prefetch given a slot               give
 *   READY   -> READING   the same, by eviction (through EMPTY)          give
 *   READING -> READY     all bytes arrived                              k3_slots_loaded
 *   READING -> EMPTY     error, retries spent                           k3_slots_failed
 *   READY, lent n        n completions not yet released; never a victim lend, k3_slots_release, k3_slots_attach
 *   expertd dies: READY slots stay (k3_slots_adopt); READING ones are EMPTY after their bytes were renewed.
 *   computed dies: the next attach says what is held; the rest of what was lent is free.
 *
 * The shared records mirror the states, in an order that a successor can trust at any instruction: a record is EMPTY
 * while its fields change, READING before the first read is submitted, READY only after the last byte. */
#ifndef K3_EXPERTD_SLOTS_H
#define K3_EXPERTD_SLOTS_H

#include "k3-expertd/policy.h"
#include "shm/expert.h"

struct k3_want { /* one demand */
    uint32_t id;
    uint16_t layer, expert;
    uint64_t seen_ns;
};
enum k3_answer {
    K3_ANSWER_HIT,    /* lent at once: slot is set */
    K3_ANSWER_JOINED, /* being read already: it will be lent when loaded */
    K3_ANSWER_READ,   /* the caller starts the read into slot now */
    K3_ANSWER_QUEUED, /* no slot free: k3_slots_retry will find it one */
    K3_ANSWER_KNOWN,  /* prefetch: resident or being read */
    K3_ANSWER_DROPPED /* prefetch: no slot free */
};
struct k3_given {
    enum k3_answer answer;
    uint32_t slot;
    bool evicted;    /* READ: another expert had to go */
    bool prefetched; /* HIT or JOINED: first demand of an expert that a prefetch brought */
};

struct k3_slots;
/* rec: n_slots shared records, which must all be EMPTY or be adopted right after.  Experts are (layer < n_layers,
 * expert < n_experts).   *out is the caller's, to be released with k3_slots_close(). */
int k3_slots_open(struct k3_slots **out, struct k3_slot_record *rec, uint32_t n_slots, uint32_t n_layers,
                  uint32_t n_experts, const struct k3_policy_ops *policy, struct k3_err *err);
void k3_slots_close(struct k3_slots *s);

/* Take-over of a READY record.  False when the expert is out of range or already in another slot: the slot is EMPTY
 * then.  Once for each slot at most; k3_slots_adopted() follows the last. */
bool k3_slots_adopt(struct k3_slots *s, uint32_t slot, uint32_t layer, uint32_t expert, const uint32_t *off_bytes,
                    uint32_t lent);
void k3_slots_adopted(struct k3_slots *s);

/* 0, or -EPROTO when there are more demands waiting than slots (the client broke its credit). */
int k3_slots_demand(struct k3_slots *s, const struct k3_want *w, struct k3_given *out);
void k3_slots_prefetch(struct k3_slots *s, uint32_t layer, uint32_t expert, struct k3_given *out);
/* Gives the oldest queued demand its slot, if one can be had now.  False when none is queued or it must go on
 * waiting.  *w is the demand; *out as from k3_slots_demand, never QUEUED. */
bool k3_slots_retry(struct k3_slots *s, struct k3_want *w, struct k3_given *out);

/* The read into a READING slot has ended well. */
void k3_slots_loaded(struct k3_slots *s, uint32_t slot, const uint32_t *off_bytes);
/* Takes one waiter of a slot: of a READY one it is lent the slot, of a READING one (before k3_slots_failed) not. */
bool k3_slots_take_waiter(struct k3_slots *s, uint32_t slot, struct k3_want *w);
/* The read has ended badly; all waiters must have been taken. */
void k3_slots_failed(struct k3_slots *s, uint32_t slot);

/* -EPROTO when the slot is none or not lent. */
int k3_slots_release(struct k3_slots *s, uint32_t slot);
/* A new attach: forgets all waiting demands; lent is what `held` says, and nothing else.  Returns the number of held
 * entries that could not be (not READY); they are ignored. */
uint32_t k3_slots_attach(struct k3_slots *s, const uint32_t *held, uint32_t n_held);

uint32_t k3_slots_n_ready(const struct k3_slots *s);
uint32_t k3_slots_n_lent(const struct k3_slots *s); /* slots with at least one completion not released */
uint32_t k3_slots_n_queued(const struct k3_slots *s);
void k3_slots_expert(const struct k3_slots *s, uint32_t slot, uint32_t *layer, uint32_t *expert);
const uint32_t *k3_slots_offsets(const struct k3_slots *s, uint32_t slot);

#endif
