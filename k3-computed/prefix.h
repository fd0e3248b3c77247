/* k3-computed/prefix.h: states of beginnings that were computed before, so that a conversation goes on without computing its
 * history again.  A state cannot be rolled back, so a beginning is of use only whole: its ids are compared, every one.
 *
 * The store has a fixed number of snapshots, each a state of --ctx positions with the ids that it is of.  When all are taken the
 * least recently used one gives way.  Beside them every slot that has no sequence (engine.h) holds what its last one left; that
 * costs nothing, and a request that goes on from there takes the slot over as it is.
 *
 *   what is kept                                     when                                               where
 *   the points that a submit names                   in the pass that runs over them (pass.h, keep)     snapshot
 *   progress: what all whole passes have computed    after each pass of an unfinished prompt, and       one snapshot of the
 *                                                    every K3_PREFIX_STEP tokens of an answer           sequence, moved on
 *   where an answer began that goes on from a slot   when it begins                                     snapshot, if there are two
 *   what an ended sequence leaves                    at its end, if no pass was cut short               its slot
 *   the same, when another sequence needs the slot   then: slot and snapshot change places              snapshot
 *
 * A pass that is cut short spoils the state of its slot: then its points and its progress are what is left.  Progress never
 * takes the place of a beginning of the same ids, which may serve others, and goes when the sequence ends whole.
 *
 * All of it belongs to the engine's thread; nothing here blocks, allocates or fails once it is open. */
#ifndef K3_COMPUTED_PREFIX_H
#define K3_COMPUTED_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "k3-computed/pass.h"

#define K3_SNAPSHOTS_MAX 1024u
#define K3_PREFIX_STEP 64u /* tokens; a copy of 0.5 GB every 64 is under 1% of the fastest decoding */

struct k3_snapshot {
    struct k3_state *state;
    uint32_t *ids;    /* room for --ctx */
    uint32_t n;       /* ids and positions; 0: empty */
    uint64_t used;    /* stamp of the last use */
    uint64_t of;      /* the sequence that it was taken of (k3_seq.admitted), or 0 */
    bool progress;    /* of that sequence, which moves it on */
    uint32_t n_busy;  /* it is being filled or read: it does not give way */
    uint32_t n_coming; /* a pass fills it: the ids are there, and n will be this */
};
struct k3_prefix {
    struct k3_snapshot *item;
    uint32_t n;
    uint64_t stamp;   /* the last one given */
};

/* States and ids of n snapshots, with all their pages.  On failure what is there is freed by k3_prefix_close. */
int k3_prefix_open(struct k3_prefix *p, uint32_t n, const struct k3_config *c, uint32_t ctx, struct k3_err *err);
void k3_prefix_close(struct k3_prefix *p);
uint64_t k3_prefix_bytes(const struct k3_config *c, uint32_t ctx, uint32_t n);

/* The longest one with at most n_max ids, all equal to those of `ids`; NULL: none. */
struct k3_snapshot *k3_prefix_find(const struct k3_prefix *p, const uint32_t *ids, uint32_t n_max);
/* The one of exactly these ids, coming ones included, or NULL. */
struct k3_snapshot *k3_prefix_exact(const struct k3_prefix *p, const uint32_t *ids, uint32_t n);
/* The one to fill next: empty, else the least recently used one that is not busy.  Those that `but` begins with do not give way
 * (n_but 0: all do).  NULL: none.  It is still what it was. */
struct k3_snapshot *k3_prefix_room(const struct k3_prefix *p, const uint32_t *but, uint32_t n_but);
/* The progress of a sequence, or NULL. */
struct k3_snapshot *k3_prefix_progress(const struct k3_prefix *p, uint64_t of);
void k3_prefix_clear(struct k3_snapshot *s);
/* A pass is to make its state that of these ids: busy, and no longer what it was, until k3_prefix_settle. */
void k3_prefix_begin(struct k3_snapshot *s, const uint32_t *ids, uint32_t n, uint64_t of);
/* false: it did not come to that. */
void k3_prefix_settle(struct k3_prefix *p, struct k3_snapshot *s, bool filled);
/* It has just been used. */
void k3_prefix_touch(struct k3_prefix *p, struct k3_snapshot *s);

#endif
