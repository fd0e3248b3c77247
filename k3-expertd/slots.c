#include "k3-expertd/slots.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

struct waiter {
    struct k3_want want;
    uint32_t next;
};
struct fifo {
    uint32_t head, tail; /* of s->waiter */
};
struct slot { /* private truth; the shared record only mirrors it */
    uint32_t key;
    uint32_t lent;
    struct fifo waiting;
    uint8_t state;
    bool prefetched; /* brought by a prefetch and not yet demanded */
};
struct k3_slots {
    struct k3_slot_record *rec;
    uint32_t n_slots, n_layers, n_experts;
    struct slot *slot;
    uint32_t *slot_of; /* key -> slot or NONE */
    uint32_t *empty;   /* stack of EMPTY slots */
    struct waiter *waiter;
    uint32_t n_empty, n_ready, n_lent, n_queued;
    uint32_t free_waiter;
    struct fifo queue; /* demands without a slot */
    const struct k3_policy_ops *policy;
    void *policy_self;
};

static void fifo_push(struct k3_slots *s, struct fifo *f, uint32_t w)
{
    s->waiter[w].next = NONE;
    if (f->head == NONE)
        f->head = w;
    else
        s->waiter[f->tail].next = w;
    f->tail = w;
}

static uint32_t fifo_pop(struct k3_slots *s, struct fifo *f)
{
    uint32_t w = f->head;

    if (w != NONE)
        f->head = s->waiter[w].next;
    return w;
}

static void waiter_free(struct k3_slots *s, uint32_t w)
{
    s->waiter[w].next = s->free_waiter;
    s->free_waiter = w;
}

static uint32_t waiter_new(struct k3_slots *s, const struct k3_want *want)
{
    uint32_t w = s->free_waiter;

    if (w != NONE) {
        s->free_waiter = s->waiter[w].next;
        s->waiter[w].want = *want;
    }
    return w;
}

int k3_slots_open(struct k3_slots **out, struct k3_slot_record *rec, uint32_t n_slots, uint32_t n_layers,
                  uint32_t n_experts, const struct k3_policy_ops *policy, struct k3_err *err)
{
    struct k3_slots *s = calloc(1, sizeof(*s));
    size_t n_keys = (size_t)n_layers * n_experts;

    if (!s)
        return k3_fail(err, -ENOMEM, "slot table");
    s->rec = rec;
    s->n_slots = n_slots;
    s->n_layers = n_layers;
    s->n_experts = n_experts;
    s->policy = policy;
    s->slot = calloc(n_slots, sizeof(*s->slot));
    s->empty = calloc(n_slots, sizeof(*s->empty));
    s->waiter = calloc(n_slots, sizeof(*s->waiter));
    s->slot_of = malloc(n_keys ? n_keys * sizeof(*s->slot_of) : 1);
    if (n_keys < UINT32_MAX)
        s->policy_self = policy->create(n_slots, (uint32_t)n_keys);
    if (!s->slot || !s->empty || !s->waiter || !s->slot_of || !s->policy_self) {
        k3_slots_close(s);
        return k3_fail(err, -ENOMEM, "slot table for %u slots and %zu experts", n_slots, n_keys);
    }
    memset(s->slot_of, 0xff, n_keys * sizeof(*s->slot_of));
    s->free_waiter = NONE;
    for (uint32_t i = n_slots; i-- > 0;) {
        s->slot[i] = (struct slot){ .key = NONE, .waiting = { NONE, NONE }, .state = K3_SLOT_EMPTY };
        s->empty[s->n_empty++] = i; /* slot 0 is given first */
        waiter_free(s, i);
    }
    s->queue = (struct fifo){ NONE, NONE };
    *out = s;
    return 0;
}

void k3_slots_close(struct k3_slots *s)
{
    if (!s)
        return;
    if (s->policy_self)
        s->policy->destroy(s->policy_self);
    free(s->slot);
    free(s->empty);
    free(s->waiter);
    free(s->slot_of);
    free(s);
}

/* The one place where a state changes.  The exchange keeps later stores into the record behind it. */
static void move(struct k3_slots *s, uint32_t i, enum k3_slot_state to)
{
    struct slot *sl = &s->slot[i];

    if (sl->state == K3_SLOT_READY)
        s->n_ready--;
    if (to == K3_SLOT_READY)
        s->n_ready++;
    sl->state = (uint8_t)to;
    atomic_exchange_explicit(&s->rec[i].state, to, memory_order_acq_rel);
}

static void set_lent(struct k3_slots *s, uint32_t i, uint32_t lent)
{
    struct slot *sl = &s->slot[i];

    s->n_lent += (lent != 0) - (sl->lent != 0);
    sl->lent = lent;
    s->rec[i].lent = lent;
}

static void forget_expert(struct k3_slots *s, uint32_t i)
{
    s->slot_of[s->slot[i].key] = NONE;
    s->slot[i].key = NONE;
    s->slot[i].prefetched = false;
}

static void name_expert(struct k3_slots *s, uint32_t i, uint32_t key)
{
    s->slot[i].key = key;
    s->slot_of[key] = i;
    s->rec[i].layer = (uint16_t)(key / s->n_experts);
    s->rec[i].expert = (uint16_t)(key % s->n_experts);
}

bool k3_slots_adopt(struct k3_slots *s, uint32_t slot, uint32_t layer, uint32_t expert, const uint32_t *off_bytes,
                    uint32_t lent)
{
    uint32_t key;

    if (layer >= s->n_layers || expert >= s->n_experts || s->slot_of[layer * s->n_experts + expert] != NONE) {
        set_lent(s, slot, 0);
        move(s, slot, K3_SLOT_EMPTY);
        return false;
    }
    key = layer * s->n_experts + expert;
    name_expert(s, slot, key);
    memcpy(s->rec[slot].off_bytes, off_bytes, sizeof(s->rec[slot].off_bytes));
    set_lent(s, slot, lent);
    s->policy->admitted(s->policy_self, slot, key);
    move(s, slot, K3_SLOT_READY);
    return true;
}

void k3_slots_adopted(struct k3_slots *s)
{
    s->n_empty = 0;
    for (uint32_t i = s->n_slots; i-- > 0;)
        if (s->slot[i].state == K3_SLOT_EMPTY)
            s->empty[s->n_empty++] = i;
}

/* A held slot is never a victim: computed has raw pointers into it until its release arrives. */
static bool may_evict(void *arg, uint32_t i)
{
    const struct k3_slots *s = arg;

    return s->slot[i].state == K3_SLOT_READY && s->slot[i].lent == 0;
}

/* A slot for an expert that has none.  NONE when every slot is lent or being read. */
static uint32_t give(struct k3_slots *s, uint32_t key, bool prefetch, bool *evicted)
{
    uint32_t i;

    *evicted = false;
    if (s->n_empty) {
        i = s->empty[--s->n_empty];
    } else {
        i = s->policy->victim(s->policy_self, may_evict, s);
        if (i == K3_NO_SLOT)
            return NONE;
        move(s, i, K3_SLOT_EMPTY);
        forget_expert(s, i);
        *evicted = true;
    }
    name_expert(s, i, key);
    s->slot[i].prefetched = prefetch;
    s->policy->admitted(s->policy_self, i, key);
    move(s, i, K3_SLOT_READING);
    return i;
}

/* Tries to answer a demand; false when no slot can be had. */
static bool answer(struct k3_slots *s, const struct k3_want *want, uint32_t waiter, struct k3_given *out)
{
    uint32_t key = (uint32_t)want->layer * s->n_experts + want->expert;
    uint32_t i = s->slot_of[key];

    *out = (struct k3_given){ .slot = i };
    if (i == NONE) {
        i = give(s, key, false, &out->evicted);
        if (i == NONE)
            return false;
        out->slot = i;
        out->answer = K3_ANSWER_READ;
        fifo_push(s, &s->slot[i].waiting, waiter);
        return true;
    }
    out->prefetched = s->slot[i].prefetched;
    s->slot[i].prefetched = false;
    s->policy->touched(s->policy_self, i, key);
    if (s->slot[i].state == K3_SLOT_READY) {
        out->answer = K3_ANSWER_HIT;
        set_lent(s, i, s->slot[i].lent + 1);
        waiter_free(s, waiter);
    } else {
        out->answer = K3_ANSWER_JOINED;
        fifo_push(s, &s->slot[i].waiting, waiter);
    }
    return true;
}

int k3_slots_demand(struct k3_slots *s, const struct k3_want *want, struct k3_given *out)
{
    uint32_t waiter;

    if (want->layer >= s->n_layers || want->expert >= s->n_experts)
        return -EPROTO;
    waiter = waiter_new(s, want);
    if (waiter == NONE)
        return -EPROTO;
    /* What finds its expert resident or on its way needs no slot of its own, and so may pass the queue: the credit
     * still leaves a slot for each that waits. */
    if ((s->n_queued == 0 || s->slot_of[(uint32_t)want->layer * s->n_experts + want->expert] != NONE) &&
        answer(s, want, waiter, out))
        return 0;
    *out = (struct k3_given){ .answer = K3_ANSWER_QUEUED, .slot = NONE };
    fifo_push(s, &s->queue, waiter);
    s->n_queued++;
    return 0;
}

bool k3_slots_retry(struct k3_slots *s, struct k3_want *w, struct k3_given *out)
{
    uint32_t waiter = s->queue.head, next;

    if (waiter == NONE)
        return false;
    *w = s->waiter[waiter].want;
    next = s->waiter[waiter].next; /* answer() links the waiter elsewhere */
    if (!answer(s, w, waiter, out))
        return false;
    s->queue.head = next;
    s->n_queued--;
    return true;
}

void k3_slots_prefetch(struct k3_slots *s, uint32_t layer, uint32_t expert, struct k3_given *out)
{
    *out = (struct k3_given){ .answer = K3_ANSWER_DROPPED, .slot = NONE };
    if (layer >= s->n_layers || expert >= s->n_experts)
        return;
    if (s->slot_of[layer * s->n_experts + expert] != NONE) {
        out->answer = K3_ANSWER_KNOWN;
        return;
    }
    if (s->n_queued) /* a slot that becomes free belongs to a demand */
        return;
    out->slot = give(s, layer * s->n_experts + expert, true, &out->evicted);
    if (out->slot != NONE)
        out->answer = K3_ANSWER_READ;
}

void k3_slots_loaded(struct k3_slots *s, uint32_t slot, const uint32_t *off_bytes)
{
    if (s->slot[slot].state != K3_SLOT_READING)
        k3_bug("slot %u loaded in state %u", slot, s->slot[slot].state);
    memcpy(s->rec[slot].off_bytes, off_bytes, sizeof(s->rec[slot].off_bytes));
    move(s, slot, K3_SLOT_READY);
}

bool k3_slots_take_waiter(struct k3_slots *s, uint32_t slot, struct k3_want *w)
{
    struct slot *sl = &s->slot[slot];
    uint32_t waiter = fifo_pop(s, &sl->waiting);

    if (waiter == NONE)
        return false;
    *w = s->waiter[waiter].want;
    waiter_free(s, waiter);
    if (sl->state == K3_SLOT_READY)
        set_lent(s, slot, sl->lent + 1);
    return true;
}

void k3_slots_failed(struct k3_slots *s, uint32_t slot)
{
    if (s->slot[slot].state != K3_SLOT_READING || s->slot[slot].waiting.head != NONE)
        k3_bug("slot %u failed in state %u", slot, s->slot[slot].state);
    move(s, slot, K3_SLOT_EMPTY);
    forget_expert(s, slot);
    s->empty[s->n_empty++] = slot;
}

int k3_slots_release(struct k3_slots *s, uint32_t slot)
{
    if (slot >= s->n_slots || s->slot[slot].lent == 0)
        return -EPROTO;
    set_lent(s, slot, s->slot[slot].lent - 1);
    return 0;
}

static void drop_all(struct k3_slots *s, struct fifo *f)
{
    uint32_t w;

    while ((w = fifo_pop(s, f)) != NONE)
        waiter_free(s, w);
}

uint32_t k3_slots_attach(struct k3_slots *s, const uint32_t *held, uint32_t n_held)
{
    uint32_t n_wrong = 0;

    drop_all(s, &s->queue);
    s->n_queued = 0;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        drop_all(s, &s->slot[i].waiting);
        set_lent(s, i, 0);
    }
    for (uint32_t i = 0; i < n_held; i++) {
        uint32_t slot = held[i];

        if (slot < s->n_slots && s->slot[slot].state == K3_SLOT_READY)
            set_lent(s, slot, s->slot[slot].lent + 1);
        else
            n_wrong++;
    }
    return n_wrong;
}

uint32_t k3_slots_n_ready(const struct k3_slots *s)
{
    return s->n_ready;
}

uint32_t k3_slots_n_lent(const struct k3_slots *s)
{
    return s->n_lent;
}

uint32_t k3_slots_n_queued(const struct k3_slots *s)
{
    return s->n_queued;
}

void k3_slots_expert(const struct k3_slots *s, uint32_t slot, uint32_t *layer, uint32_t *expert)
{
    *layer = s->slot[slot].key / s->n_experts;
    *expert = s->slot[slot].key % s->n_experts;
}

const uint32_t *k3_slots_offsets(const struct k3_slots *s, uint32_t slot)
{
    return s->rec[slot].off_bytes;
}
