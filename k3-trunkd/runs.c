#include "k3-trunkd/runs.h"

#include <errno.h>
#include <stdlib.h>

static uint64_t round_down(uint64_t v, uint64_t unit)
{
    return v - v % unit;
}

static uint64_t round_up(uint64_t v, uint64_t unit)
{
    return round_down(v + unit - 1, unit);
}

uint64_t k3_cut_bytes(uint64_t left_bytes, uint64_t block_bytes)
{
    return left_bytes < block_bytes + K3_TAIL_BYTES ? left_bytes : block_bytes;
}

uint64_t k3_ring_block_bytes(uint64_t io_block_bytes, uint64_t ring_bytes, uint32_t align_bytes)
{
    uint64_t block = io_block_bytes < ring_bytes / 4 ? io_block_bytes : ring_bytes / 4;

    block = round_down(block, align_bytes);
    return block ? block : align_bytes;
}

bool k3_ring_has_room(uint64_t end, uint64_t consumed, uint64_t ring_bytes, uint32_t align_bytes)
{
    return end <= round_down(consumed, align_bytes) + ring_bytes;
}

uint64_t k3_multiples_passed(uint64_t from, uint64_t to, uint64_t unit)
{
    return unit && to > from ? to / unit - from / unit : 0;
}

int k3_runs_build(struct k3_runs *out, const struct k3_model *m, const struct k3_layout *l,
                  struct k3_err *err)
{
    struct k3_run *run = NULL;

    *out = (struct k3_runs){ .start = l->start,
                             .pass_bytes = l->pass_bytes,
                             .align_bytes = l->align_bytes };
    out->run = calloc(m->n_pieces + 1, sizeof(*out->run));
    out->unpinned = calloc(m->n_pieces + 1, sizeof(*out->unpinned));
    if (!out->run || !out->unpinned) {
        k3_runs_free(out);
        return k3_fail(err, -ENOMEM, "no memory for the runs of %zu pieces", m->n_pieces);
    }
    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct k3_piece *p = &m->pieces[i];
        uint32_t file = m->matrices[p->matrix].file;

        if (l->pinned[i])
            continue;
        if (run && run->file == file && run->off_bytes + run->len_bytes == p->off_bytes &&
            run->start + run->len_bytes == l->start[i]) {
            run->len_bytes += p->len_bytes;
        } else {
            run = &out->run[out->n_runs++];
            *run = (struct k3_run){ l->start[i], p->off_bytes, p->len_bytes, file,
                                    (uint32_t)out->n_unpinned };
            if (run->start % l->align_bytes != run->off_bytes % l->align_bytes)
                k3_bug("piece %zu starts at %llu for offset %llu: not the same within a page", i,
                       (unsigned long long)run->start, (unsigned long long)run->off_bytes);
        }
        out->unpinned[out->n_unpinned++] = (uint32_t)i;
    }
    return 0;
}

void k3_runs_free(struct k3_runs *r)
{
    free(r->run);
    free(r->unpinned);
    *r = (struct k3_runs){ 0 };
}

/* The first run that ends after q, or n_runs. */
static size_t run_after(const struct k3_runs *r, uint64_t q)
{
    size_t lo = 0, hi = r->n_runs;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (r->run[mid].start + r->run[mid].len_bytes > q)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* The last piece of the run that starts at or before q. */
static uint32_t piece_at(const struct k3_runs *r, size_t i_run, uint64_t q)
{
    size_t lo = r->run[i_run].first,
           hi = i_run + 1 < r->n_runs ? r->run[i_run + 1].first : r->n_unpinned;

    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;

        if (r->start[r->unpinned[mid]] <= q)
            lo = mid;
        else
            hi = mid;
    }
    return r->unpinned[lo];
}

void k3_runs_block(const struct k3_runs *r, uint64_t pos, uint64_t block_bytes,
                   struct k3_block *out)
{
    uint64_t pass = pos / r->pass_bytes, q = pos % r->pass_bytes, a = r->align_bytes, page, first,
             end;
    size_t i = run_after(r, q);
    const struct k3_run *run;

    if (i == r->n_runs) { /* in the last page's slack */
        pass++;
        q = 0;
        i = 0;
    }
    run = &r->run[i];
    first = round_down(run->start, a);
    page = q > first ? round_down(q, a) : first;
    end = run->start + run->len_bytes;
    out->pass = pass;
    out->file = run->file;
    out->off_bytes = round_down(run->off_bytes, a) + (page - first);
    out->len_bytes = k3_cut_bytes(round_up(end, a) - page, block_bytes);
    out->pos = pass * r->pass_bytes + page;
    out->next = out->pos + out->len_bytes;
    if (page + out->len_bytes < end)
        end = page + out->len_bytes;
    out->need_bytes = end - page;
    out->end = pass * r->pass_bytes + end;
    out->piece = piece_at(r, i, q > page ? q : page);
    out->first_of_run = page == first;
    out->last_of_pass = i + 1 == r->n_runs && end == run->start + run->len_bytes;
}
