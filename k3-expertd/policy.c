#include "k3-expertd/policy.h"

#include <stdlib.h>
#include <string.h>

/* lru: the slot whose expert has not been demanded for the longest time.  One ring through all slots and a sentinel
 * (number n_slots): sentinel.next is the newest, sentinel.prev the oldest. */
struct lru {
    uint32_t n_slots;
    struct { uint32_t prev, next; } at[];
};

static void *lru_create(uint32_t n_slots, uint32_t n_keys)
{
    struct lru *l = malloc(sizeof(*l) + ((size_t)n_slots + 1) * sizeof(l->at[0]));

    (void)n_keys;
    if (!l)
        return NULL;
    l->n_slots = n_slots;
    for (uint32_t i = 0; i <= n_slots; i++) {
        l->at[i].next = i == n_slots ? 0 : i + 1;
        l->at[i].prev = i == 0 ? n_slots : i - 1;
    }
    return l;
}

static void lru_newest(void *self, uint32_t slot, uint32_t key)
{
    struct lru *l = self;
    uint32_t end = l->n_slots;

    (void)key;
    l->at[l->at[slot].prev].next = l->at[slot].next;
    l->at[l->at[slot].next].prev = l->at[slot].prev;
    l->at[slot].next = l->at[end].next;
    l->at[slot].prev = end;
    l->at[l->at[end].next].prev = slot;
    l->at[end].next = slot;
}

static uint32_t lru_victim(void *self, bool (*may)(void *arg, uint32_t slot), void *arg)
{
    struct lru *l = self;

    for (uint32_t i = l->at[l->n_slots].prev; i != l->n_slots; i = l->at[i].prev)
        if (may(arg, i))
            return i;
    return K3_NO_SLOT;
}

static const struct k3_policy_ops lru = { "lru", lru_create, free, lru_newest, lru_newest, lru_victim };
static const struct k3_policy_ops *const policies[] = { &lru, &k3_policy_lfru };

const struct k3_policy_ops *k3_policy_find(const char *name)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++)
        if (strcmp(policies[i]->name, name) == 0)
            return policies[i];
    return NULL;
}

const char *k3_policy_names(void)
{
    static char names[128];

    if (!names[0])
        for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
            if (i)
                strcat(names, ", ");
            strcat(names, policies[i]->name);
        }
    return names;
}
