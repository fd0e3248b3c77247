/* tools/sim_look.c: what the look-ahead of a trace is worth: how much of it came true, and what reading ahead would have
 * saved with trunk and experts on devices of their own.
 *
 * The model of time.  The trunk device fills the ring in order; the consumer takes blocks as they are there and multiplies
 * them.  Of a layer's trunk the first part (attention, router gate) comes before the demands leave, the rest before the
 * experts are summed.  The expert device reads what is demanded, one expert after the other; in between it reads ahead,
 * the best guess first, from the end of the layer before until the demands leave.  What was not begun by then is not read,
 * what was begun is read on if it is demanded.  That is kind to reading ahead: real devices cannot stop so exactly. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim.h"

#define PARTS 16u        /* blocks of a layer's trunk */
#define BEFORE_DEMAND 11u /* of them: of the released model's layer, 0.85 of 1.2 GB */
#define NONE UINT32_MAX

void k3_sim_recall(const struct k3_trace *t, uint32_t k, struct k3_recall *out)
{
    uint32_t top_k = t->head.top_k, look_k = t->head.look_k;

    *out = (struct k3_recall){ .k = k };
    for (size_t i = 0; i < t->n_layers; i++) {
        const struct k3_trace_layer *l = &t->layer[i];
        const struct k3_trace_pass *p = &t->pass[l->pass];

        if (l->look == K3_NO_LOOK)
            continue;
        for (uint32_t r = 0; r < p->n_rows; r++) {
            if (!t->row[p->first_row + r].counted)
                continue;
            out->routed += top_k;
            out->guessed += k;
            for (uint32_t a = 0; a < top_k; a++)
                for (uint32_t b = 0; b < k; b++)
                    out->came += t->ids[l->ids + (size_t)r * top_k + a] == t->ids[l->look + (size_t)r * look_k + b];
        }
    }
}

struct device_world {
    const struct k3_trace *t;
    const struct k3_split *o;
    void *policy;
    uint32_t *slot_of, *key_of, n_used;
    uint8_t *lent;
    double *ready; /* per slot: when its bytes are there */
    double *taken; /* of the last ring blocks: when the consumer was done with them */
    size_t n_ring, block;
    double trunk_free, expert_free, now, layer_ended;
};

static bool not_lent(void *arg, uint32_t slot)
{
    return !((struct device_world *)arg)->lent[slot];
}

/* A slot for the key; NONE when all are lent. */
static uint32_t place(struct device_world *w, uint32_t key)
{
    uint32_t slot = w->n_used;

    if (slot < w->o->n_slots) {
        w->n_used++;
    } else {
        slot = k3_policy_lfru.victim(w->policy, not_lent, w);
        if (slot == K3_NO_SLOT)
            return NONE;
        w->slot_of[w->key_of[slot]] = NONE;
    }
    w->key_of[slot] = key;
    w->slot_of[key] = slot;
    return slot;
}

static void take_blocks(struct device_world *w, uint32_t n)
{
    double bytes = (double)w->t->head.trunk_bytes / w->t->head.n_layers / PARTS;

    for (uint32_t i = 0; i < n; i++, w->block++) {
        double *taken = &w->taken[w->block % w->n_ring];

        w->trunk_free = (w->trunk_free > *taken ? w->trunk_free : *taken) + bytes * (1 - w->o->pinned) / w->o->trunk_rate;
        w->now = (w->now > w->trunk_free ? w->now : w->trunk_free) + bytes / w->o->compute_rate;
        *taken = w->now;
    }
}

/* What is read between the end of the layer before and now, when the demands leave. */
static void read_ahead(struct device_world *w, const struct k3_trace_layer *l, const uint8_t *wanted, struct k3_split_result *out)
{
    const struct k3_trace_head *h = &w->t->head;
    const struct k3_trace_pass *p = &w->t->pass[l->pass];
    double read_s = (double)w->o->slot_bytes / w->o->expert_rate;
    double at = w->expert_free > w->layer_ended ? w->expert_free : w->layer_ended;

    for (uint32_t b = 0; b < w->o->k; b++)
        for (uint32_t r = 0; r < p->n_rows && at < w->now; r++) {
            uint32_t e = w->t->ids[l->look + (size_t)r * h->look_k + b], key = l->layer * h->n_experts + e, slot;

            if (!w->t->row[p->first_row + r].counted || w->slot_of[key] != NONE || (slot = place(w, key)) == NONE)
                continue;
            k3_policy_lfru.admitted(w->policy, slot, key);
            w->lent[slot] = 1; /* not to be given up before its layer */
            at += read_s;
            w->ready[slot] = at;
            out->reads++;
            out->useless += !wanted[e];
        }
    /* The one at work when the demands leave is not finished for nothing. */
    w->expert_free = at;
}

static void do_layer(struct device_world *w, const struct k3_trace_layer *l, uint8_t *wanted, struct k3_split_result *out)
{
    const struct k3_trace_head *h = &w->t->head;
    const struct k3_trace_pass *p = &w->t->pass[l->pass];
    double read_s = (double)w->o->slot_bytes / w->o->expert_rate, demanded;

    memset(wanted, 0, h->n_experts);
    for (uint32_t r = 0; r < p->n_rows; r++)
        for (uint32_t i = 0; w->t->row[p->first_row + r].counted && i < h->top_k; i++)
            wanted[w->t->ids[l->ids + (size_t)r * h->top_k + i]] = 1;
    take_blocks(w, BEFORE_DEMAND);
    if (w->o->k && l->look != K3_NO_LOOK)
        read_ahead(w, l, wanted, out);
    demanded = w->now;
    take_blocks(w, PARTS - BEFORE_DEMAND);
    for (uint32_t e = 0; e < h->n_experts; e++) {
        uint32_t key = l->layer * h->n_experts + e, slot;

        if (!wanted[e])
            continue;
        out->demands++;
        slot = w->slot_of[key];
        if (slot != NONE) {
            k3_policy_lfru.touched(w->policy, slot, key);
        } else {
            if ((slot = place(w, key)) == NONE) { /* what has been summed goes */
                memset(w->lent, 0, w->o->n_slots);
                slot = place(w, key);
            }
            k3_policy_lfru.admitted(w->policy, slot, key);
            w->expert_free = (w->expert_free > demanded ? w->expert_free : demanded) + read_s;
            w->ready[slot] = w->expert_free;
            out->reads++;
        }
        w->lent[slot] = 1;
        w->now = (w->now > w->ready[slot] ? w->now : w->ready[slot]) + (double)w->o->slot_bytes / w->o->compute_rate;
    }
    memset(w->lent, 0, w->o->n_slots);
    w->layer_ended = w->now;
}

int k3_sim_split(const struct k3_trace *t, const struct k3_split *o, struct k3_split_result *out, struct k3_err *err)
{
    double block_bytes = (double)t->head.trunk_bytes / t->head.n_layers / PARTS;
    size_t n_keys = (size_t)t->head.n_layers * t->head.n_experts;
    struct device_world w = { .t = t, .o = o, .n_ring = (size_t)((double)o->ring_bytes / block_bytes) };
    uint8_t *wanted = calloc((size_t)t->head.n_experts + 1, 1);
    int rc = 0;

    *out = (struct k3_split_result){ 0 };
    w.n_ring = w.n_ring ? w.n_ring : 1;
    w.policy = k3_policy_lfru.create(o->n_slots, (uint32_t)n_keys);
    w.slot_of = malloc((n_keys + 1) * sizeof(*w.slot_of));
    w.key_of = malloc(((size_t)o->n_slots + 1) * sizeof(*w.key_of));
    w.lent = calloc((size_t)o->n_slots + 1, 1);
    w.ready = calloc((size_t)o->n_slots + 1, sizeof(*w.ready));
    w.taken = calloc(w.n_ring, sizeof(*w.taken));
    if (!wanted || !w.policy || !w.slot_of || !w.key_of || !w.lent || !w.ready || !w.taken) {
        rc = k3_fail(err, -ENOMEM, "no memory for %u slots", o->n_slots);
    } else {
        memset(w.slot_of, 0xff, n_keys * sizeof(*w.slot_of));
        for (size_t i = 0; i < t->n_passes; i++) {
            const struct k3_trace_pass *p = &t->pass[i];
            bool counted = false;

            for (uint32_t r = 0; r < p->n_rows; r++)
                counted |= t->row[p->first_row + r].counted;
            if (!counted)
                continue;
            take_blocks(&w, PARTS * t->head.first_moe);
            w.layer_ended = w.now;
            for (uint32_t l = 0; l < p->n_layers; l++)
                do_layer(&w, &t->layer[p->first_layer + l], wanted, out);
            out->passes++;
        }
        out->seconds = w.now;
    }
    if (w.policy)
        k3_policy_lfru.destroy(w.policy);
    free(wanted);
    free(w.slot_of);
    free(w.key_of);
    free(w.lent);
    free(w.ready);
    free(w.taken);
    return rc;
}
