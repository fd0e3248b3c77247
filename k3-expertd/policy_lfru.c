/* lfru: the slot whose expert has been demanded least, where a demand counts half as much after every half-life.
 *
 * The weight of an expert at time t (in demands of all experts) is the sum of 2^-((t - t_i) / half) over its demands t_i.
 * All weights shrink alike, so their order changes only with a demand: what is kept is log2(weight) + t / half, which
 * stands still in between.  It is kept for every expert, also while it has no slot: without that memory an expert that
 * returns looks new, and a cache smaller than one token's demands never hits (docs/cache-policy.md).
 *
 * The slots are a binary heap with the least on top: O(log n) for a demand; O(k log k) for a victim when the k least may
 * not go. */
#include <math.h>
#include <stdlib.h>

#include "k3-expertd/policy.h"

struct lfru {
    uint32_t n_slots;
    double half, now;
    double *kept;   /* of each key; -INFINITY: never demanded */
    double *score;  /* of each slot: that of the key in it */
    uint32_t *heap; /* slots; the children of heap[i] are heap[2i + 1] and heap[2i + 2] */
    uint32_t *at;   /* of each slot: where it is in heap */
    uint32_t *open; /* of victim(): places in heap whose parents may not go; a heap as well */
};

static void lfru_destroy(void *self)
{
    struct lfru *l = self;

    if (!l)
        return;
    free(l->kept);
    free(l->score);
    free(l->heap);
    free(l->at);
    free(l->open);
    free(l);
}

void *k3_lfru_create(uint32_t n_slots, uint32_t n_keys, double half_life)
{
    struct lfru *l = calloc(1, sizeof(*l));

    if (!l)
        return NULL;
    l->n_slots = n_slots;
    l->half = half_life;
    l->kept = malloc(((size_t)n_keys + 1) * sizeof(*l->kept));
    l->score = malloc(((size_t)n_slots + 1) * sizeof(*l->score));
    l->heap = malloc(((size_t)n_slots + 1) * sizeof(*l->heap));
    l->at = malloc(((size_t)n_slots + 1) * sizeof(*l->at));
    l->open = malloc(((size_t)n_slots + 1) * sizeof(*l->open));
    if (!l->kept || !l->score || !l->heap || !l->at || !l->open) {
        lfru_destroy(l);
        return NULL;
    }
    for (uint32_t i = 0; i < n_keys; i++)
        l->kept[i] = -INFINITY;
    for (uint32_t i = 0; i < n_slots; i++) {
        l->score[i] = -INFINITY;
        l->heap[i] = l->at[i] = i;
    }
    return l;
}

static void *lfru_create(uint32_t n_slots, uint32_t n_keys, uint32_t token_demands)
{
    return k3_lfru_create(n_slots, n_keys, K3_LFRU_HALF_LIFE * (token_demands ? token_demands : 1));
}

/* Slots that were never given an expert are equal: the lower number goes first. */
static bool less(const struct lfru *l, uint32_t a, uint32_t b)
{
    return l->score[a] < l->score[b] || (l->score[a] == l->score[b] && a < b);
}

static void put(struct lfru *l, uint32_t i, uint32_t slot)
{
    l->heap[i] = slot;
    l->at[slot] = i;
}

static void lfru_demanded(void *self, uint32_t slot, uint32_t key)
{
    struct lfru *l = self;
    double x = ++l->now / l->half, old = l->kept[key];
    uint32_t i = l->at[slot];

    l->kept[key] = l->score[slot] = isinf(old) ? x : x + log2(1 + exp2(old - x));
    for (; i > 0 && less(l, slot, l->heap[(i - 1) / 2]); i = (i - 1) / 2)
        put(l, i, l->heap[(i - 1) / 2]);
    for (;;) {
        uint64_t child = 2 * (uint64_t)i + 1;

        if (child + 1 < l->n_slots && less(l, l->heap[child + 1], l->heap[child]))
            child++;
        if (child >= l->n_slots || less(l, slot, l->heap[child]))
            break;
        put(l, i, l->heap[child]);
        i = (uint32_t)child;
    }
    put(l, i, slot);
}

static void open_push(struct lfru *l, uint32_t *n, uint64_t place)
{
    uint32_t i = (*n)++;

    for (; i > 0 && less(l, l->heap[place], l->heap[l->open[(i - 1) / 2]]); i = (i - 1) / 2)
        l->open[i] = l->open[(i - 1) / 2];
    l->open[i] = (uint32_t)place;
}

static uint32_t open_pop(struct lfru *l, uint32_t *n)
{
    uint32_t top = l->open[0], last = l->open[--*n];
    uint64_t i = 0, child;

    while ((child = 2 * i + 1) < *n) {
        if (child + 1 < *n && less(l, l->heap[l->open[child + 1]], l->heap[l->open[child]]))
            child++;
        if (less(l, l->heap[last], l->heap[l->open[child]]))
            break;
        l->open[i] = l->open[child];
        i = child;
    }
    l->open[i] = last;
    return top;
}

static uint32_t lfru_victim(void *self, bool (*may)(void *arg, uint32_t slot), void *arg)
{
    struct lfru *l = self;
    uint32_t n = 0;

    if (l->n_slots)
        open_push(l, &n, 0);
    while (n) {
        uint32_t place = open_pop(l, &n);

        if (may(arg, l->heap[place]))
            return l->heap[place];
        for (uint64_t child = 2 * (uint64_t)place + 1; child <= 2 * (uint64_t)place + 2; child++)
            if (child < l->n_slots)
                open_push(l, &n, child);
    }
    return K3_NO_SLOT;
}

const struct k3_policy_ops k3_policy_lfru = { "lfru",        lfru_create,   lfru_destroy,
                                              lfru_demanded, lfru_demanded, lfru_victim };
