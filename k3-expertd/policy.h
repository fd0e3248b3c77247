/* k3-expertd/policy.h: whom to evict.  A policy sees which expert (key) sits in which slot and when it is demanded; it
 * knows nothing of reads, lending or shared memory, so that it can be replayed on a trace. */
#ifndef K3_EXPERTD_POLICY_H
#define K3_EXPERTD_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define K3_NO_SLOT UINT32_MAX

struct k3_policy_ops {
    const char *name;
    /* n_keys: experts are numbered 0..n_keys-1, layer by layer, so that the demands of one pass ascend.  NULL when out of
     * memory. */
    void *(*create)(uint32_t n_slots, uint32_t n_keys);
    void (*destroy)(void *self); /* NULL is fine */
    /* The expert `key` was given `slot`; what the slot held before is gone. */
    void (*admitted)(void *self, uint32_t slot, uint32_t key);
    /* The expert `key` in `slot` was demanded. */
    void (*touched)(void *self, uint32_t slot, uint32_t key);
    /* The slot to empty, among those for which may(arg, slot) is true; K3_NO_SLOT when there is none. */
    uint32_t (*victim)(void *self, bool (*may)(void *arg, uint32_t slot), void *arg);
};

/* lfru (policy_lfru.c) by frequency alone with another half-life, in passes, for experiments; 0: the policy itself. */
void *k3_lfru_create(uint32_t n_slots, uint32_t n_keys, double half_life);
extern const struct k3_policy_ops k3_policy_lfru;

/* NULL when there is no policy of that name. */
const struct k3_policy_ops *k3_policy_find(const char *name);
/* The names there are, separated by ", ". */
const char *k3_policy_names(void);

#endif
