/* tools/sim_replay.c: what a cache of a given size would have done with the demands of a trace. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim.h"

#define NONE UINT32_MAX

static int no_memory(const char *what, size_t n, struct k3_err *err)
{
    return k3_fail(err, -ENOMEM, "no memory for %s of %zu", what, n);
}

/* ---- demands ---- */

static void add_group(struct k3_demands *d, const struct k3_trace *t, const struct k3_trace_layer *l, uint8_t *wanted,
                      uint8_t *known)
{
    const struct k3_trace_pass *p = &t->pass[l->pass];
    uint32_t n_experts = t->head.n_experts, k = t->head.top_k;

    memset(wanted, 0, n_experts);
    for (uint32_t r = 0; r < p->n_rows; r++)
        if (t->row[p->first_row + r].counted)
            for (uint32_t i = 0; i < k; i++)
                wanted[t->ids[l->ids + (size_t)r * k + i]] = 1;
    for (uint32_t e = 0; e < n_experts; e++)
        if (wanted[e]) {
            uint32_t key = l->layer * n_experts + e;

            d->key[d->n++] = key;
            d->n_distinct += !known[key];
            known[key] = 1;
        }
    d->group[d->n_groups++] = (struct k3_demand_group){ .pass = l->pass, .layer = l->layer, .end = d->n };
}

int k3_demands_build(struct k3_demands *out, const struct k3_trace *t, struct k3_err *err)
{
    uint32_t n_keys = t->head.n_layers * t->head.n_experts;
    struct k3_demands d = { .n_keys = n_keys, .top_k = t->head.top_k };
    uint8_t *wanted = calloc((size_t)t->head.n_experts + 1, 1), *known = calloc((size_t)n_keys + 1, 1);

    d.key = malloc((t->n_ids + 1) * sizeof(*d.key));
    d.group = malloc((t->n_layers + 1) * sizeof(*d.group));
    if (!wanted || !known || !d.key || !d.group) {
        free(wanted);
        free(known);
        k3_demands_free(&d);
        return no_memory("demands", t->n_ids, err);
    }
    for (size_t i = 0; i < t->n_passes; i++) {
        const struct k3_trace_pass *p = &t->pass[i];
        size_t n_rows = 0;

        if (i == (t->n_passes + 1) / 2)
            d.half = d.n;
        for (uint32_t r = 0; r < p->n_rows; r++)
            n_rows += t->row[p->first_row + r].counted;
        d.n_rows += n_rows;
        d.n_passes += n_rows > 0;
        for (uint32_t l = 0; n_rows && l < p->n_layers; l++)
            add_group(&d, t, &t->layer[p->first_layer + l], wanted, known);
    }
    if (t->n_passes < 2)
        d.half = d.n;
    free(wanted);
    free(known);
    *out = d;
    return 0;
}

void k3_demands_free(struct k3_demands *d)
{
    free(d->key);
    free(d->group);
    memset(d, 0, sizeof(*d));
}

/* ---- the daemon's policies ---- */

struct slots {
    const struct k3_policy_ops *ops;
    void *policy;
    uint32_t *slot_of; /* key -> slot */
    uint32_t *key_of;
    uint8_t *lent;
    uint32_t *order;   /* lent slots, in the order of their demands */
    uint32_t n_slots, n_used, n_order, first_order;
};

static bool not_lent(void *arg, uint32_t slot)
{
    return !((struct slots *)arg)->lent[slot];
}

static void release_oldest(struct slots *s)
{
    s->lent[s->order[s->first_order++]] = 0;
}

static void lend(struct slots *s, uint32_t slot)
{
    s->lent[slot] = 1;
    s->order[s->n_order++] = slot;
}

/* true: it was there. */
static bool demand(struct slots *s, uint32_t key)
{
    uint32_t slot = s->slot_of[key];

    if (slot != NONE) {
        s->ops->touched(s->policy, slot, key);
        lend(s, slot);
        return true;
    }
    if (s->n_used < s->n_slots) {
        slot = s->n_used++;
    } else {
        while ((slot = s->ops->victim(s->policy, not_lent, s)) == K3_NO_SLOT)
            release_oldest(s);
        s->slot_of[s->key_of[slot]] = NONE;
    }
    s->key_of[slot] = key;
    s->slot_of[key] = slot;
    s->ops->admitted(s->policy, slot, key);
    lend(s, slot);
    return false;
}

int k3_sim_policy(const struct k3_demands *d, const struct k3_policy_ops *ops, double half_life, uint32_t n_slots,
                  size_t from, uint64_t *hits, struct k3_err *err)
{
    struct slots s = { .ops = ops, .n_slots = n_slots };
    size_t at = 0, longest = 0;

    for (size_t g = 0; g < d->n_groups; g++) {
        size_t n = d->group[g].end - (g ? d->group[g - 1].end : 0);

        longest = n > longest ? n : longest;
    }
    s.policy = half_life > 0 ? k3_lfru_create(n_slots, d->n_keys, half_life) : ops->create(n_slots, d->n_keys);
    s.slot_of = malloc(((size_t)d->n_keys + 1) * sizeof(*s.slot_of));
    s.key_of = malloc(((size_t)n_slots + 1) * sizeof(*s.key_of));
    s.lent = calloc((size_t)n_slots + 1, 1);
    s.order = malloc((longest + 1) * sizeof(*s.order));
    *hits = 0;
    if (s.policy && s.slot_of && s.key_of && s.lent && s.order) {
        memset(s.slot_of, 0xff, d->n_keys * sizeof(*s.slot_of));
        for (size_t g = 0; g < d->n_groups; g++) {
            for (; at < d->group[g].end; at++)
                *hits += demand(&s, d->key[at]) && at >= from;
            while (s.first_order < s.n_order)
                release_oldest(&s);
            s.first_order = s.n_order = 0;
        }
    } else {
        at = SIZE_MAX;
    }
    if (s.policy)
        ops->destroy(s.policy);
    free(s.slot_of);
    free(s.key_of);
    free(s.lent);
    free(s.order);
    return at == SIZE_MAX ? no_memory("slots", n_slots, err) : 0;
}

/* ---- a pinned set ---- */

struct counted { uint64_t n; uint32_t key; };

static int most_first(const void *a, const void *b)
{
    const struct counted *x = a, *y = b;

    if (x->n != y->n)
        return x->n > y->n ? -1 : 1;
    return (x->key > y->key) - (x->key < y->key);
}

int k3_sim_pinned(const struct k3_demands *d, uint32_t n_slots, size_t learn, size_t from, uint64_t *hits,
                  struct k3_err *err)
{
    struct counted *c = malloc(((size_t)d->n_keys + 1) * sizeof(*c));
    uint8_t *state = calloc((size_t)d->n_keys + 1, 1); /* 1 of the set, 2 and read */
    uint32_t n = n_slots > d->top_k ? n_slots - d->top_k : 0;

    if (!c || !state) {
        free(c);
        free(state);
        return no_memory("experts", d->n_keys, err);
    }
    for (uint32_t k = 0; k < d->n_keys; k++)
        c[k] = (struct counted){ 0, k };
    for (size_t i = 0; i < learn; i++)
        c[d->key[i]].n++;
    qsort(c, d->n_keys, sizeof(*c), most_first);
    for (uint32_t i = 0; i < n && i < d->n_keys && c[i].n; i++)
        state[c[i].key] = 1;
    *hits = 0;
    for (size_t i = 0; i < d->n; i++) {
        *hits += state[d->key[i]] == 2 && i >= from;
        if (state[d->key[i]] == 1)
            state[d->key[i]] = 2;
    }
    free(c);
    free(state);
    return 0;
}

/* ---- Belady ---- */

struct later { size_t next; uint32_t key; }; /* a heap with the farthest on top; stale ones are passed over */

static void heap_push(struct later *h, size_t *n, struct later e)
{
    size_t i = (*n)++;

    for (; i > 0 && h[(i - 1) / 2].next < e.next; i = (i - 1) / 2)
        h[i] = h[(i - 1) / 2];
    h[i] = e;
}

static struct later heap_pop(struct later *h, size_t *n)
{
    struct later top = h[0], last = h[--*n];
    size_t i = 0, child;

    while ((child = 2 * i + 1) < *n) {
        if (child + 1 < *n && h[child + 1].next > h[child].next)
            child++;
        if (h[child].next <= last.next)
            break;
        h[i] = h[child];
        i = child;
    }
    h[i] = last;
    return top;
}

int k3_sim_belady(const struct k3_demands *d, uint32_t n_slots, size_t from, uint64_t *hits, struct k3_err *err)
{
    size_t *next = malloc((d->n + 1) * sizeof(*next));
    size_t *due = malloc(((size_t)d->n_keys + 1) * sizeof(*due)); /* of what is cached: its next demand; else 0 */
    struct later *heap = malloc((d->n + 1) * sizeof(*heap));
    size_t n_heap = 0, n_cached = 0;

    *hits = 0;
    if (!next || !due || !heap) {
        free(next);
        free(due);
        free(heap);
        return no_memory("demands", d->n, err);
    }
    for (uint32_t k = 0; k < d->n_keys; k++)
        due[k] = SIZE_MAX; /* never again */
    for (size_t i = d->n; i-- > 0;) {
        next[i] = due[d->key[i]];
        due[d->key[i]] = i;
    }
    memset(due, 0, d->n_keys * sizeof(*due));
    for (size_t i = 0; i < d->n; i++) {
        uint32_t key = d->key[i];

        if (due[key]) {
            *hits += i >= from;
        } else if (n_cached < n_slots) {
            n_cached++;
        } else {
            struct later e;

            do
                e = heap_pop(heap, &n_heap);
            while (due[e.key] != e.next);
            due[e.key] = 0;
        }
        due[key] = next[i];
        heap_push(heap, &n_heap, (struct later){ next[i], key });
    }
    free(next);
    free(due);
    free(heap);
    return 0;
}
