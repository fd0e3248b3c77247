/* How --trunk-gb divides into ring and pins. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "k3-trunkd/trunkd.h"

#define RING_DEFAULT_BYTES ((uint64_t)256 << 20)

static bool all_pinned(const struct k3_model *m, uint32_t align_bytes, uint64_t budget_bytes,
                       uint8_t *pinned)
{
    k3_pins_choose(m, align_bytes, budget_bytes, pinned);
    return m->n_pieces == 0 || !memchr(pinned, 0, m->n_pieces);
}

int k3_trunkd_budget(const struct k3_model *m, uint32_t align_bytes, uint64_t trunk_bytes,
                     uint32_t ring_mb, uint64_t *ring_bytes, uint8_t *pinned, struct k3_err *err)
{
    uint64_t ring = (uint64_t)ring_mb << 20, twice;

    if (ring_mb == 0) {
        /* When everything can be pinned nothing streams, and the ring is the one page that the
         * layout has. */
        if (trunk_bytes >= K3_HUGE_BYTES &&
            all_pinned(m, align_bytes, trunk_bytes - K3_HUGE_BYTES, pinned)) {
            *ring_bytes = K3_HUGE_BYTES;
            return 0;
        }
        twice = m->trunk_bytes < RING_DEFAULT_BYTES ? 2 * m->trunk_bytes : RING_DEFAULT_BYTES;
        ring = (twice + K3_HUGE_BYTES - 1) / K3_HUGE_BYTES * K3_HUGE_BYTES;
        if (ring > RING_DEFAULT_BYTES)
            ring = RING_DEFAULT_BYTES;
        if (ring < K3_HUGE_BYTES)
            ring = K3_HUGE_BYTES;
    }
    if (trunk_bytes < ring)
        return k3_refuse(
            err, -EINVAL,
            "--trunk-gb %.4g (%" PRIu64 " bytes) is less than its ring of %" PRIu64
            " bytes needs: give at least --trunk-gb %.4f, or a smaller --ring-mb (now %" PRIu64 ")",
            (double)trunk_bytes / 1e9, trunk_bytes, ring, ((double)ring + 5e4) / 1e9, ring >> 20);
    if (all_pinned(m, align_bytes, trunk_bytes - ring, pinned))
        ring = K3_HUGE_BYTES;
    *ring_bytes = ring;
    return 0;
}

void k3_trunkd_pins_prefix(const struct k3_model *m, uint32_t align_bytes, uint8_t *pinned)
{
    uint64_t budget_bytes = 0;

    for (int take = 0; take < 2; take++)
        for (size_t i = 0; i < m->n_pieces; i++) {
            uint64_t a = align_bytes, first = m->pieces[i].off_bytes / a * a;
            uint64_t cost = (m->pieces[i].off_bytes + m->pieces[i].len_bytes + a - 1) / a * a - first;

            if (!take) {
                budget_bytes += pinned[i] ? cost : 0;
                continue;
            }
            if (cost > budget_bytes)
                budget_bytes = 0; /* a prefix has no gaps */
            pinned[i] = cost <= budget_bytes;
            budget_bytes -= pinned[i] ? cost : 0;
        }
}
