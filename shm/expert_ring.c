#include "shm/expert_ring.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define HUGE_BYTES ((uint64_t)2 << 20)

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

static void ring_init(struct k3_expert_ring *r, struct k3_ring_index *shm, void *entry, uint32_t n_entries,
                      uint32_t entry_bytes)
{
    *r = (struct k3_expert_ring){ .shm = shm, .entry = entry, .n_entries = n_entries, .entry_bytes = entry_bytes };
}

void k3_expert_ring_producer(struct k3_expert_ring *r, struct k3_ring_index *shm, void *entry, uint32_t n_entries,
                             uint32_t entry_bytes)
{
    ring_init(r, shm, entry, n_entries, entry_bytes);
    r->mine = atomic_load_explicit(&shm->tail, memory_order_acquire);
}

void k3_expert_ring_consumer(struct k3_expert_ring *r, struct k3_ring_index *shm, void *entry, uint32_t n_entries,
                             uint32_t entry_bytes)
{
    ring_init(r, shm, entry, n_entries, entry_bytes);
    r->mine = atomic_load_explicit(&shm->head, memory_order_acquire);
}

int64_t k3_expert_ring_fill(const struct k3_expert_ring *r)
{
    uint32_t fill = r->mine - atomic_load_explicit(&r->shm->head, memory_order_acquire); /* H' */

    return fill > r->n_entries ? -EPROTO : (int64_t)fill;
}

int k3_expert_ring_push(struct k3_expert_ring *r, const void *entry)
{
    int64_t fill = k3_expert_ring_fill(r);

    if (fill < 0)
        return (int)fill;
    if (fill == r->n_entries)
        return -EAGAIN;
    memcpy(r->entry + (size_t)(r->mine & (r->n_entries - 1)) * r->entry_bytes, entry, r->entry_bytes);
    r->mine++;
    atomic_store_explicit(&r->shm->tail, r->mine, memory_order_release); /* T */
    return 0;
}

int k3_expert_ring_pop(struct k3_expert_ring *r, void *entry)
{
    uint32_t fill = atomic_load_explicit(&r->shm->tail, memory_order_acquire) - r->mine; /* T' */

    if (fill > r->n_entries)
        return -EPROTO;
    if (fill == 0)
        return -EAGAIN;
    memcpy(entry, r->entry + (size_t)(r->mine & (r->n_entries - 1)) * r->entry_bytes, r->entry_bytes);
    r->mine++;
    atomic_store_explicit(&r->shm->head, r->mine, memory_order_release); /* H */
    return 0;
}

uint64_t k3_expert_ctl_layout(struct k3_expert_ctl *c)
{
    uint64_t end = round_up(sizeof(*c), K3_LINE);
    uint64_t n = 64;

    /* Twice the credit: half for demands, half for prefetches (dropped beyond half) or a dead client's leavings. */
    while (n < 2 * (uint64_t)c->n_slots)
        n *= 2;
    c->n_entries = (uint32_t)n;
    c->req_off = end;
    end = round_up(end + n * sizeof(struct k3_expert_req), K3_LINE);
    c->cpl_off = end;
    end = round_up(end + n * sizeof(struct k3_expert_cpl), K3_LINE);
    c->rel_off = end;
    end = round_up(end + n * sizeof(struct k3_expert_rel), K3_LINE);
    c->held_off = end;
    return round_up(end + (uint64_t)c->n_slots * sizeof(uint32_t), 4096);
}

int k3_arena_layout(uint32_t n_slots, uint64_t slot_bytes, uint64_t *slots_off_bytes, uint64_t *data_bytes)
{
    uint64_t off = round_up(K3_ARENA_RECORDS_OFF + (uint64_t)n_slots * sizeof(struct k3_slot_record), HUGE_BYTES);
    uint64_t len;

    if (__builtin_mul_overflow(n_slots, slot_bytes, &len) || __builtin_add_overflow(len, off, &len) ||
        len > INT64_MAX - HUGE_BYTES)
        return -EOVERFLOW;
    *slots_off_bytes = off;
    *data_bytes = round_up(len, HUGE_BYTES);
    return 0;
}

int k3_expert_ends_open(struct k3_expert_ends *e, const struct k3_seg *seg, bool owner, struct k3_err *err)
{
    struct k3_expert_ctl *c = (struct k3_expert_ctl *)seg->base;
    uint32_t n_entries;
    const struct { const char *name; uint64_t off_bytes, n, width; } *a;
    uint64_t req_off, cpl_off, rel_off, held_off, slots_off, data_bytes;

    *e = (struct k3_expert_ends){ 0 };
    if (seg->len_bytes < sizeof(*c))
        return k3_fail(err, -EPROTO, "segment %s: %" PRIu64 " bytes, must be at least %zu", seg->name, seg->len_bytes,
                       sizeof(*c));
    if (c->magic != K3_EXPERT_MAGIC || c->version != K3_EXPERT_VERSION)
        return k3_fail(err, -EPROTO, "segment %s: magic %08x version %u, must be %08x version %u", seg->name, c->magic,
                       c->version, K3_EXPERT_MAGIC, K3_EXPERT_VERSION);
    e->n_slots = c->n_slots;
    e->generation = c->generation;
    e->slot_bytes = c->slot_bytes;
    n_entries = c->n_entries;
    req_off = c->req_off;
    cpl_off = c->cpl_off;
    rel_off = c->rel_off;
    held_off = c->held_off;
    if (e->n_slots == 0 || n_entries <= e->n_slots || (n_entries & (n_entries - 1)))
        return k3_fail(err, -EPROTO, "segment %s: %u slots with %u ring entries, must be a power of two above the slots",
                       seg->name, e->n_slots, n_entries);
    a = (const __typeof__(*a)[]){ { "request", req_off, n_entries, sizeof(struct k3_expert_req) },
                                  { "completion", cpl_off, n_entries, sizeof(struct k3_expert_cpl) },
                                  { "release", rel_off, n_entries, sizeof(struct k3_expert_rel) },
                                  { "held", held_off, e->n_slots, sizeof(uint32_t) } };
    for (int i = 0; i < 4; i++)
        if (a[i].off_bytes < sizeof(*c) || a[i].off_bytes % 8 || a[i].off_bytes > seg->len_bytes ||
            a[i].n * a[i].width > seg->len_bytes - a[i].off_bytes)
            return k3_fail(err, -EPROTO, "segment %s: %s array at %" PRIu64 " does not fit %" PRIu64 " bytes",
                           seg->name, a[i].name, a[i].off_bytes, seg->len_bytes);
    e->data_bytes = c->data_bytes;
    e->data = c->data;
    e->slots_off_bytes = c->slots_off;
    if (e->slot_bytes == 0 || k3_arena_layout(e->n_slots, e->slot_bytes, &slots_off, &data_bytes) < 0 ||
        slots_off != e->slots_off_bytes || data_bytes != e->data_bytes)
        return k3_fail(err, -EPROTO,
                       "segment %s: %u slots of %" PRIu64 " bytes at %" PRIu64 " in an arena of %" PRIu64
                       " bytes do not agree", seg->name, e->n_slots, e->slot_bytes, e->slots_off_bytes, e->data_bytes);
    e->ctl = c;
    e->held = (uint32_t *)(seg->base + held_off);
    (owner ? k3_expert_ring_consumer : k3_expert_ring_producer)(&e->req, &c->req, seg->base + req_off, n_entries,
                                                                 sizeof(struct k3_expert_req));
    (owner ? k3_expert_ring_producer : k3_expert_ring_consumer)(&e->cpl, &c->cpl, seg->base + cpl_off, n_entries,
                                                                 sizeof(struct k3_expert_cpl));
    (owner ? k3_expert_ring_consumer : k3_expert_ring_producer)(&e->rel, &c->rel, seg->base + rel_off, n_entries,
                                                                 sizeof(struct k3_expert_rel));
    return 0;
}

bool k3_arena_matches(const struct k3_seg *data, uint32_t n_slots, uint64_t slot_bytes, uint64_t data_bytes,
                      const uint8_t digest[32])
{
    const struct k3_arena_head *h = (const struct k3_arena_head *)data->base;

    return data->len_bytes == data_bytes && h->magic == K3_ARENA_MAGIC && h->version == K3_EXPERT_VERSION &&
           h->n_slots == n_slots && h->slot_bytes == slot_bytes && memcmp(h->model_digest, digest, 32) == 0;
}
