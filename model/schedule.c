/* Where each piece lies: the stream of a pass, and the pinned area. */
#include "model/schedule.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "model/sha256.h"

#define HEAD_BYTES 4096u /* struct k3_trunk_data of shm/trunk.h lies in it */

static uint64_t up(uint64_t v, uint64_t to)
{
    return (v + to - 1) / to * to;
}

/* Whole pages that a piece owns when it stands alone. */
static uint64_t span(const struct k3_piece *p, uint32_t align)
{
    return up(p->off_bytes % align + p->len_bytes, align);
}

static bool is_gate(const struct k3_model *m, size_t i)
{
    return m->matrices[m->pieces[i].matrix].role == K3_W_ROUTER;
}

/* Spreads `budget` over the unpinned pieces of one class: a piece is taken when what should be pinned up to its
 * middle exceeds what is.  Returns the bytes taken. */
static uint64_t spread(const struct k3_model *m, uint32_t align, uint64_t budget, bool gates, uint8_t *pinned)
{
    unsigned __int128 total = 0, passed = 0;
    uint64_t taken = 0;

    for (size_t i = 0; i < m->n_pieces; i++)
        if (!pinned[i] && is_gate(m, i) == gates)
            total += span(m->pieces + i, align);
    if (total <= budget)
        budget = (uint64_t)total;
    for (size_t i = 0; i < m->n_pieces; i++) {
        uint64_t cost = span(m->pieces + i, align);

        if (pinned[i] || is_gate(m, i) != gates)
            continue;
        if ((passed + cost / 2) * budget >= (taken + (unsigned __int128)cost / 2) * total && taken + cost <= budget) {
            pinned[i] = 1;
            taken += cost;
        }
        passed += cost;
    }
    return taken;
}

void k3_pins_choose(const struct k3_model *m, uint32_t align_bytes, uint64_t budget_bytes, uint8_t *pinned)
{
    uint64_t taken;

    memset(pinned, 0, m->n_pieces);
    for (int gates = 1; gates >= 0; gates--) {
        /* again for what rounding left over, until no step fits; then the first pieces that do */
        do {
            taken = spread(m, align_bytes, budget_bytes, gates, pinned);
            budget_bytes -= taken;
        } while (taken);
        for (size_t i = 0; i < m->n_pieces; i++) {
            uint64_t cost = span(m->pieces + i, align_bytes);

            if (!pinned[i] && is_gate(m, i) == (gates != 0) && cost <= budget_bytes) {
                pinned[i] = 1;
                budget_bytes -= cost;
            }
        }
    }
}

static uint64_t largest_block(const struct k3_model *m)
{
    uint64_t largest = 0;

    for (size_t i = 0; i < m->n_matrices; i++) {
        const struct k3_matrix *x = m->matrices + i;
        uint64_t row = (uint64_t)x->n_cols * k3_dtype_bytes(x->dtype), block = row;

        if (x->role == K3_W_MLA_KVB && row * (m->cfg.qk_nope + m->cfg.v_dim) <= K3_PIECE_BYTES)
            block = row * (m->cfg.qk_nope + m->cfg.v_dim);
        largest = block > largest ? block : largest;
    }
    return largest;
}

/* Positions of the unpinned pieces (returns P) and offsets of the pinned ones, from 0. */
static void place(struct k3_layout *l, const struct k3_model *m)
{
    const struct k3_piece *last = NULL;
    uint64_t cursor = 0;

    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct k3_piece *p = m->pieces + i;
        uint64_t in_page = p->off_bytes % l->align_bytes;

        if (l->pinned[i]) {
            l->start[i] = l->pinned_off + l->pinned_bytes + in_page;
            l->pinned_bytes += span(p, l->align_bytes);
            l->pinned_payload_bytes += p->len_bytes;
            l->n_pinned++;
            continue;
        }
        if (!last || m->matrices[last->matrix].file != m->matrices[p->matrix].file ||
            last->off_bytes + last->len_bytes != p->off_bytes)
            cursor = up(cursor, l->align_bytes) + in_page;
        l->start[i] = cursor;
        cursor += p->len_bytes;
        last = p;
    }
    l->pass_bytes = up(cursor, l->align_bytes);
}

static void make_digest(struct k3_layout *l, const struct k3_model *m)
{
    struct k3_sha256 d;

    k3_sha256_init(&d);
    k3_sha256_add_text(&d, "k3 layout 1");
    k3_sha256_add(&d, m->digest, sizeof(m->digest));
    if (m->pack_crc) /* other files, whose numbers errors name */
        k3_sha256_add_text(&d, "packed");
    k3_sha256_add_u64(&d, l->align_bytes);
    k3_sha256_add_u64(&d, l->ring_bytes);
    k3_sha256_add_u64(&d, l->pass_bytes);
    k3_sha256_add(&d, l->pinned, l->n_pieces);
    for (size_t i = 0; i < l->n_pieces; i++)
        k3_sha256_add_u64(&d, l->start[i]);
    k3_sha256_end(&d, l->digest);
}

int k3_layout_build(struct k3_layout *out, const struct k3_model *m, uint32_t align_bytes, uint64_t ring_bytes,
                    const uint8_t *pinned, struct k3_err *err)
{
    struct k3_layout l = { .align_bytes = align_bytes, .ring_bytes = ring_bytes, .n_pieces = m->n_pieces };
    uint64_t block = largest_block(m);

    if (align_bytes < K3_PAGE_BYTES || align_bytes > K3_HUGE_BYTES || (align_bytes & (align_bytes - 1)))
        return k3_refuse(err, -EINVAL, "page alignment is %u, must be a power of two from %u to %u", align_bytes,
                         K3_PAGE_BYTES, K3_HUGE_BYTES);
    if (ring_bytes == 0 || ring_bytes % K3_HUGE_BYTES)
        return k3_refuse(err, -EINVAL, "ring of %" PRIu64 " bytes must be a multiple of 2 MiB and not 0 (--ring-mb)",
                         ring_bytes);
    if (ring_bytes < 2 * block)
        return k3_refuse(err, -EINVAL, "ring of %" PRIu64 " bytes is less than two row blocks of %" PRIu64
                         " bytes; it must have at least %" PRIu64 " (--ring-mb)", ring_bytes, block,
                         up(2 * block, K3_HUGE_BYTES));
    l.start = calloc(m->n_pieces + 1, sizeof(*l.start));
    l.pinned = malloc(m->n_pieces + 1);
    if (!l.start || !l.pinned) {
        k3_layout_free(&l);
        return k3_fail(err, -ENOMEM, "no memory for a layout of %zu pieces", m->n_pieces);
    }
    for (size_t i = 0; i < m->n_pieces; i++)
        l.pinned[i] = pinned && pinned[i];
    l.flags_off = HEAD_BYTES;
    l.resident_off = up(l.flags_off + m->n_pieces * sizeof(uint32_t), K3_PAGE_BYTES);
    l.pinned_off = up(l.resident_off + m->resident_bytes, K3_HUGE_BYTES);
    place(&l, m);
    l.pinned_bytes = up(l.pinned_bytes, K3_HUGE_BYTES);
    l.ring_off = l.pinned_off + l.pinned_bytes;
    l.data_bytes = l.ring_off + l.ring_bytes;
    make_digest(&l, m);
    *out = l;
    return 0;
}

void k3_layout_free(struct k3_layout *l)
{
    free(l->start);
    free(l->pinned);
    l->start = NULL;
    l->pinned = NULL;
}
