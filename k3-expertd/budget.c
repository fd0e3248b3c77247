/* How --cache-gb becomes slots. */
#include <errno.h>
#include <inttypes.h>

#include "k3-expertd/expertd.h"

#define MAX_SLOTS ((uint64_t)1 << 24)

int k3_expertd_budget(const struct k3_model *m, uint64_t cache_bytes, struct k3_arena_size *out, struct k3_err *err)
{
    const struct k3_config *c = &m->cfg;
    uint64_t n_layers = c->n_layers > c->first_dense ? c->n_layers - c->first_dense : 0;
    uint64_t needed = n_layers ? c->top_k : 1;
    uint64_t n;

    *out = (struct k3_arena_size){ .n_experts_all = n_layers * c->n_experts, .slot_bytes = m->expert_slot_bytes };
    n = cache_bytes / out->slot_bytes;
    if (n > out->n_experts_all)
        n = out->n_experts_all ? out->n_experts_all : 1;
    if (n < needed)
        return k3_refuse(err, -ENOSPC,
                         "--cache-gb %.4g: gives %" PRIu64 " slots of %" PRIu64 " bytes, one layer of one row needs %" PRIu64
                         "; give at least --cache-gb %.6f", (double)cache_bytes / 1e9, n, out->slot_bytes, needed,
                         (double)((needed * out->slot_bytes + 999) / 1000) / 1e6);
    if (n > MAX_SLOTS)
        n = MAX_SLOTS;
    out->n_slots = (uint32_t)n;
    if (k3_arena_layout(out->n_slots, out->slot_bytes, &out->slots_off_bytes, &out->data_bytes) < 0)
        return k3_refuse(err, -EOVERFLOW, "--cache-gb %.4g: an arena of %u slots of %" PRIu64 " bytes cannot be",
                         (double)cache_bytes / 1e9, out->n_slots, out->slot_bytes);
    return 0;
}
