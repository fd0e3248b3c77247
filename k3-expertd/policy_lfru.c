/* lfru: the slot whose expert is demanded in the fewest passes, lately.  docs/cache-policy.md has the measurements.
 *
 * The clock counts rounds.  The demands of a pass ascend, so a key that does not begins a new round.  The weight of an
 * expert is the sum over its demands of 2^-(age / half-life), ages in rounds.  All weights shrink alike, so what is kept is
 * log2(weight) + now / half-life, which stands still between demands.  It is kept for every expert, also while it has no
 * slot: without that memory an expert that returns looks new, and a cache smaller than a round never hits.
 *
 * In the middle of a round one part of the slots has had its turn and the other has not.  What has not is credited with one
 * round, so that both are compared at the same age.  Of equal ones the latest demanded goes: its next turn is the farthest.
 * (By the usual rule, the oldest first, a cache smaller than a round loses each expert just before its turn.)
 *
 * Where a cache holds a little more than one round, lru may be better: what returns of the last round is told by recency
 * alone.  Which of both it is depends on the text, so two shadows (tables of who would be in the cache, without bytes) play
 * lru and frequency all the time, and slots are ranked by the rule whose shadow has more hits, lately.
 *
 * The slots are a binary heap, the next to go on top: O(log n) for a demand; O(k log k) for a victim when the k first may
 * not go.  The credits change with the round, and then the heap is built anew: O(n), at most once in n / REBUILD demands. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "k3-expertd/policy.h"

#define HALF_LIFE 32.0   /* rounds */
#define LATELY 0.875     /* what a shadow's hits are worth one round later */
#define ONE 1048576.0    /* a doubling of weight in units of score; rounded, so that equal pasts are equal */
#define EDGE 1.25        /* by which lru may be behind where it is the likelier one: one round fits, two do not */
#define REBUILD 16u

struct lfru_slot {
    int64_t rank; /* as it was when the heap was built or the slot demanded; the least goes first */
    uint64_t at;  /* number of its last demand; 0 never */
    uint64_t round;
    int64_t score;
    uint32_t place; /* in heap */
};
struct shadow {
    const struct k3_policy_ops *ops;
    void *policy;
    uint32_t *slot_of, *key_of; /* slot_of[key], or K3_NO_SLOT */
    uint32_t n_used;
    double hits;
};
struct lfru {
    uint32_t n_slots;
    double half;
    bool mixed;             /* lru where that is better; false: frequency always */
    struct shadow shadow[2]; /* of mixed: lru, frequency */
    bool by_recency;        /* what the ranks are */
    double *kept;           /* of each key: log2(weight) + now / half; -INFINITY: never demanded */
    struct lfru_slot *slot;
    uint32_t *heap;         /* slots; the children of heap[i] are heap[2i + 1] and heap[2i + 2] */
    uint32_t *open;         /* of victim(): places in heap whose parents may not go; a heap as well */
    uint64_t now, round;    /* demands, rounds so far */
    uint64_t round_at, n_before; /* demand with which the round began; length of the round before */
    uint64_t built_at, built_round;
    uint32_t key_before;
};

static bool shadow_open(struct shadow *s, const struct k3_policy_ops *ops, void *policy, uint32_t n_slots, uint32_t n_keys)
{
    s->ops = ops;
    s->policy = policy;
    s->slot_of = malloc(((size_t)n_keys + 1) * sizeof(*s->slot_of));
    s->key_of = malloc(((size_t)n_slots + 1) * sizeof(*s->key_of));
    if (s->slot_of)
        memset(s->slot_of, 0xff, n_keys * sizeof(*s->slot_of));
    return s->policy && s->slot_of && s->key_of;
}

static void shadow_close(struct shadow *s)
{
    if (s->policy)
        s->ops->destroy(s->policy);
    free(s->slot_of);
    free(s->key_of);
}

static bool any(void *arg, uint32_t slot)
{
    (void)arg;
    (void)slot;
    return true;
}

static void shadow_demand(struct shadow *s, uint32_t key, uint32_t n_slots)
{
    uint32_t slot = s->slot_of[key];

    if (slot != K3_NO_SLOT) {
        s->hits += 1;
        s->ops->touched(s->policy, slot, key);
        return;
    }
    if (s->n_used < n_slots) {
        slot = s->n_used++;
    } else {
        slot = s->ops->victim(s->policy, any, NULL);
        s->slot_of[s->key_of[slot]] = K3_NO_SLOT;
    }
    s->key_of[slot] = key;
    s->slot_of[key] = slot;
    s->ops->admitted(s->policy, slot, key);
}

static void lfru_destroy(void *self)
{
    struct lfru *l = self;

    if (!l)
        return;
    shadow_close(&l->shadow[0]);
    shadow_close(&l->shadow[1]);
    free(l->kept);
    free(l->slot);
    free(l->heap);
    free(l->open);
    free(l);
}

void *k3_lfru_create(uint32_t n_slots, uint32_t n_keys, double half_life)
{
    struct lfru *l = calloc(1, sizeof(*l));

    if (!l)
        return NULL;
    l->n_slots = n_slots;
    l->half = half_life > 0 ? half_life : HALF_LIFE;
    l->mixed = half_life <= 0;
    l->kept = malloc(((size_t)n_keys + 1) * sizeof(*l->kept));
    l->slot = calloc((size_t)n_slots + 1, sizeof(*l->slot));
    l->heap = malloc(((size_t)n_slots + 1) * sizeof(*l->heap));
    l->open = malloc(((size_t)n_slots + 1) * sizeof(*l->open));
    if (!l->kept || !l->slot || !l->heap || !l->open ||
        (l->mixed && (!shadow_open(&l->shadow[0], k3_policy_find("lru"), k3_policy_find("lru")->create(n_slots, n_keys),
                                   n_slots, n_keys) ||
                      !shadow_open(&l->shadow[1], &k3_policy_lfru, k3_lfru_create(n_slots, n_keys, HALF_LIFE), n_slots,
                                   n_keys)))) {
        lfru_destroy(l);
        return NULL;
    }
    for (uint32_t i = 0; i < n_keys; i++)
        l->kept[i] = -INFINITY;
    for (uint32_t i = 0; i < n_slots; i++) {
        l->slot[i].score = l->slot[i].rank = INT64_MIN / 2;
        l->heap[i] = l->slot[i].place = i;
    }
    return l;
}

static void *lfru_create(uint32_t n_slots, uint32_t n_keys)
{
    return k3_lfru_create(n_slots, n_keys, 0);
}

/* a goes before b. */
static bool before(const struct lfru *l, uint32_t a, uint32_t b)
{
    const struct lfru_slot *x = &l->slot[a], *y = &l->slot[b];

    if (x->rank != y->rank)
        return x->rank < y->rank;
    return x->at != y->at ? x->at > y->at : a < b;
}

static void rank(struct lfru *l, struct lfru_slot *s)
{
    if (l->by_recency)
        s->rank = (int64_t)s->at;
    else
        s->rank = s->score + (s->round < l->round ? (int64_t)(ONE / l->half) : 0);
}

static void put(struct lfru *l, uint32_t i, uint32_t slot)
{
    l->heap[i] = slot;
    l->slot[slot].place = i;
}

static void sift_down(struct lfru *l, uint32_t i, uint32_t slot)
{
    for (;;) {
        uint64_t child = 2 * (uint64_t)i + 1;

        if (child + 1 < l->n_slots && before(l, l->heap[child + 1], l->heap[child]))
            child++;
        if (child >= l->n_slots || before(l, slot, l->heap[child]))
            break;
        put(l, i, l->heap[child]);
        i = (uint32_t)child;
    }
    put(l, i, slot);
}

static void build(struct lfru *l)
{
    double edge = l->n_slots > l->n_before && l->n_slots < 2 * l->n_before ? EDGE : 1;

    l->by_recency = l->mixed && l->shadow[0].hits * edge >= l->shadow[1].hits && edge * l->shadow[0].hits > 0;
    l->built_at = l->now;
    l->built_round = l->round;
    for (uint32_t i = 0; i < l->n_slots; i++)
        rank(l, &l->slot[i]);
    for (uint32_t i = l->n_slots / 2; i-- > 0;)
        sift_down(l, i, l->heap[i]);
}

static void tick(struct lfru *l, uint32_t key)
{
    l->now++;
    if (key <= l->key_before || l->now == 1) {
        l->n_before = l->now - l->round_at;
        l->round_at = l->now;
        l->round++;
        l->shadow[0].hits *= LATELY;
        l->shadow[1].hits *= LATELY;
    }
    l->key_before = key;
    for (int i = 0; l->mixed && i < 2; i++)
        shadow_demand(&l->shadow[i], key, l->n_slots);
}

static void lfru_demanded(void *self, uint32_t slot, uint32_t key)
{
    struct lfru *l = self;
    struct lfru_slot *s = &l->slot[slot];
    double old = l->kept[key], x;
    uint32_t i = s->place;

    tick(l, key);
    x = (double)l->round / l->half;
    l->kept[key] = isinf(old) ? x : x + log2(1 + exp2(old - x));
    s->score = llrint(l->kept[key] * ONE);
    s->round = l->round;
    s->at = l->now;
    rank(l, s);
    for (; i > 0 && before(l, slot, l->heap[(i - 1) / 2]); i = (i - 1) / 2)
        put(l, i, l->heap[(i - 1) / 2]);
    sift_down(l, i, slot);
}

static void open_push(struct lfru *l, uint32_t *n, uint64_t place)
{
    uint32_t i = (*n)++;

    for (; i > 0 && before(l, l->heap[place], l->heap[l->open[(i - 1) / 2]]); i = (i - 1) / 2)
        l->open[i] = l->open[(i - 1) / 2];
    l->open[i] = (uint32_t)place;
}

static uint32_t open_pop(struct lfru *l, uint32_t *n)
{
    uint32_t top = l->open[0], last = l->open[--*n];
    uint64_t i = 0, child;

    while ((child = 2 * i + 1) < *n) {
        if (child + 1 < *n && before(l, l->heap[l->open[child + 1]], l->heap[l->open[child]]))
            child++;
        if (before(l, l->heap[last], l->heap[l->open[child]]))
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

    if (l->built_round != l->round && l->now - l->built_at >= l->n_slots / REBUILD)
        build(l);
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
