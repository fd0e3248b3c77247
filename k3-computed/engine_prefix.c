/* k3-computed/engine_prefix.c: where a request begins, and what is kept of what is computed (prefix.h). */
#include <string.h>

#include "k3-computed/engine_private.h"

/* ---- where it begins; with the lock ------------------------------------------------------------------------------------ */

void k3_engine_leave(struct k3_seq *s)
{
    s->n_held = s->spoilt ? 0 : s->n_done;
    memcpy(s->held, s->request->ids, s->n_held * sizeof(*s->held));
    s->ended = true;
}

void k3_engine_ended(struct k3_engine *e)
{
    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];
        struct k3_snapshot *progress = s->ended ? k3_prefix_progress(&e->prefix, s->admitted) : NULL;

        if (s->ended)
            s->used = ++e->prefix.stamp;
        s->ended = false;
        if (progress && s->n_held >= progress->n)
            k3_prefix_clear(progress);
        else if (progress)
            progress->progress = false; /* all that is left of it: a snapshot like others */
    }
}

/* How many ids of r a state may hold that it begins with: at least one row runs, and every row whose logits are wanted. */
static uint32_t n_reusable(const struct k3_request *r)
{
    uint32_t n = k3_request_n_run(r);

    return (r->logits && !r->has_logits && r->n_prompt < n ? r->n_prompt : n) - 1;
}

static struct k3_seq *longest_slot(const struct k3_engine *e, const uint32_t *ids, uint32_t n_max)
{
    struct k3_seq *best = NULL;

    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];

        if (!s->request && s->n_held > (best ? best->n_held : 0) && s->n_held <= n_max &&
            memcmp(s->held, ids, s->n_held * sizeof(*ids)) == 0)
            best = s;
    }
    return best;
}

/* The free slot whose state is worth least. */
static struct k3_seq *oldest_slot(const struct k3_engine *e)
{
    struct k3_seq *best = NULL;

    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];

        if (s->request || (best && best->n_held == 0))
            continue;
        if (!best || s->n_held == 0 || s->used < best->used)
            best = s;
    }
    return best;
}

/* The next snapshot to fill, taken from whatever it held. */
static struct k3_snapshot *take_room(struct k3_engine *e, const uint32_t *but, uint32_t n_but)
{
    struct k3_snapshot *x = k3_prefix_room(&e->prefix, but, n_but);

    if (x && x->n)
        k3_stat_add(e->o.stats, K3_CS_SNAPSHOTS_EVICTED, 1);
    if (x)
        k3_prefix_clear(x);
    return x;
}

/* What a free slot holds goes into a snapshot, if that is older: they change places.  NULL: it stays where it is. */
static struct k3_snapshot *move_out(struct k3_engine *e, struct k3_seq *s)
{
    struct k3_snapshot *x = k3_prefix_room(&e->prefix, NULL, 0);
    struct k3_state *state = s->state;
    uint32_t *ids = s->held;

    if (s->n_held == 0 || !x || (x->n && x->used > s->used) || k3_prefix_exact(&e->prefix, s->held, s->n_held))
        return NULL;
    x = take_room(e, NULL, 0);
    s->state = x->state;
    s->held = x->ids;
    x->state = state;
    x->ids = ids;
    x->n = s->n_held;
    x->used = s->used;
    s->n_held = 0;
    s->dirty = true;
    return x;
}

struct k3_seq *k3_engine_begin(struct k3_engine *e, struct k3_request *r)
{
    uint32_t n_max = n_reusable(r);
    struct k3_seq *s = longest_slot(e, r->ids, n_max);
    struct k3_snapshot *from = k3_prefix_find(&e->prefix, r->ids, n_max);

    if (s && (!from || s->n_held >= from->n)) {
        s->used = ++e->prefix.stamp;
        s->n_done = s->n_held;
        /* A pass that is cut short would spoil it, so a copy goes on; but the only snapshot is better used for a point. */
        from = e->prefix.n > 1 ? move_out(e, s) : NULL;
    } else {
        s = oldest_slot(e);
        if (!s)
            return NULL;
        if (from)
            from->n_busy++; /* not for the slot's own state */
        move_out(e, s);
        if (from)
            from->n_busy--;
        s->n_done = from ? from->n : 0;
    }
    if (from) {
        from->n_busy++; /* until it is copied */
        k3_prefix_touch(&e->prefix, from);
    }
    s->from = from;
    s->n_kept = from ? from->n : 0;
    s->spoilt = false;
    r->n_cached = s->n_done < r->n_prompt ? s->n_done : r->n_prompt;
    k3_stat_add(e->o.stats, K3_CS_PREFIX_HITS, s->n_done ? 1 : 0);
    k3_stat_add(e->o.stats, K3_CS_CACHED_TOKENS, r->n_cached);
    return s;
}

void k3_engine_points(struct k3_engine *e, struct k3_seq *s, struct k3_row *rows)
{
    const struct k3_request *r = s->request;

    for (uint32_t i = r->n_points; i-- > 0;) { /* the longest first: there may be no room for all */
        uint32_t n = r->point[i];
        struct k3_snapshot *x;

        if (n <= s->n_done || n > s->n_done + s->n_rows)
            continue;
        x = k3_prefix_exact(&e->prefix, r->ids, n);
        if (x) {
            k3_prefix_touch(&e->prefix, x);
            continue;
        }
        x = take_room(e, NULL, 0);
        if (!x)
            return;
        k3_prefix_begin(x, r->ids, n, s->admitted);
        rows[n - s->n_done - 1].keep = x->state;
    }
}

void k3_engine_prefix_gauges(struct k3_engine *e)
{
    const struct k3_config *c = &e->o.m->cfg;
    uint64_t n = 0, bytes = 0, kv = k3_state_kv_bytes(c), fixed = k3_state_bytes(c, e->o.ctx) - kv * e->o.ctx;

    for (uint32_t i = 0; i < e->prefix.n; i++)
        if (e->prefix.item[i].n) {
            n++;
            bytes += fixed + kv * e->prefix.item[i].n;
        }
    k3_stat_set(e->o.stats, K3_CS_SNAPSHOTS, n);
    k3_stat_set(e->o.stats, K3_CS_SNAPSHOT_BYTES, bytes);
}

/* ---- before and after a pass; without the lock ------------------------------------------------------------------------- */

void k3_engine_prepare(struct k3_engine *e)
{
    for (uint32_t i = 0; i < e->slots.n; i++) {
        struct k3_seq *s = &e->slots.slot[i];

        if (s->from) { /* also of one that has no rows yet, or has been cancelled meanwhile */
            k3_state_copy(s->state, s->from->state);
            s->from->n_busy--;
            s->from = NULL;
        } else if (s->n_rows && s->n_done == 0 && s->dirty) {
            k3_state_reset(s->state);
            s->dirty = false;
        }
    }
}

/* What all passes so far have computed of a sequence whose next pass may be cut short. */
static void keep_progress(struct k3_engine *e, struct k3_seq *s)
{
    const struct k3_request *r = s->request;
    uint32_t n = s->n_done + s->n_rows;
    struct k3_snapshot *x;

    if (n <= s->n_kept || (n >= k3_request_n_run(r) && n - s->n_kept < K3_PREFIX_STEP))
        return;
    x = k3_prefix_exact(&e->prefix, r->ids, n);
    if (x) { /* of an earlier request that began alike */
        k3_prefix_touch(&e->prefix, x);
        s->n_kept = n;
        return;
    }
    x = k3_prefix_progress(&e->prefix, s->admitted);
    if (!x)
        x = take_room(e, r->ids, n);
    if (!x)
        return;
    k3_prefix_begin(x, r->ids, n, s->admitted);
    x->progress = true;
    k3_state_copy(x->state, s->state);
    k3_prefix_settle(&e->prefix, x, true);
    s->n_kept = n;
}

void k3_engine_kept(struct k3_engine *e, bool done)
{
    for (uint32_t i = 0; i < e->prefix.n; i++) {
        struct k3_snapshot *x = &e->prefix.item[i];

        if (!x->n_coming)
            continue;
        k3_prefix_settle(&e->prefix, x, done);
        for (uint32_t k = 0; done && k < e->slots.n; k++) {
            struct k3_seq *s = &e->slots.slot[k];

            if (s->n_rows && s->admitted == x->of && s->n_kept < x->n)
                s->n_kept = x->n;
        }
    }
    for (uint32_t i = 0; done && i < e->slots.n; i++)
        if (e->slots.slot[i].n_rows)
            keep_progress(e, &e->slots.slot[i]);
}
