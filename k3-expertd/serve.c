/* The life of a request: attach -> rings -> slots -> reader -> completion -> release.
 *
 * The loop sleeps in one of two ways.  Nothing in flight: on the client's bell, directly.  Reads in flight: on the eventfd
 * that io_uring (or a pread thread) writes for every block, and the bridge for the bell; so a resident expert is lent
 * at once, whatever is being read. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include "k3-expertd/expertd.h"

static void count(struct k3_expertd *d, enum k3_expertd_stat id)
{
    k3_stat_add(k3_daemon_stats(d->daemon), id, 1);
}

/* ---- completions ---- */

static int complete(struct k3_expertd *d, const struct k3_want *w, struct k3_expert_cpl *c)
{
    int rc;

    c->attach = d->attach;
    c->id = w->id;
    c->layer = w->layer;
    c->expert = w->expert;
    rc = k3_expert_ring_push(&d->ends.cpl, c);
    if (rc < 0) /* full: the client has more outstanding than its credit; or its index cannot be */
        return -EPROTO;
    d->rang = true;
    k3_stat_hist(k3_daemon_stats(d->daemon), K3_XS_DEMAND_NS, k3_now_ns() - w->seen_ns);
    return 0;
}

/* The slot is lent already (the record says so before the client can know). */
static int lend(struct k3_expertd *d, const struct k3_want *w, uint32_t slot, bool hit)
{
    struct k3_expert_cpl c = { .slot = slot, .hit = hit };

    memcpy(c.off_bytes, k3_slots_offsets(d->slots, slot), sizeof(c.off_bytes));
    return complete(d, w, &c);
}

static int fail_waiters(struct k3_expertd *d, const struct k3_read_done *r)
{
    struct k3_expert_cpl c = { .slot = UINT32_MAX, .status = r->status, .file = r->file,
                               .file_off_bytes = r->file_off_bytes };
    struct k3_want w;
    int rc = 0;

    while (k3_slots_take_waiter(d->slots, r->slot, &w))
        if (rc == 0)
            rc = complete(d, &w, &c);
    k3_slots_failed(d->slots, r->slot);
    return rc;
}

static void log_failed(struct k3_expertd *d, const struct k3_read_done *r)
{
    uint32_t layer, expert;

    k3_slots_expert(d->slots, r->slot, &layer, &expert);
    k3_log(K3_LOG_WARN, "expert_read_failed", "layer=%u expert=%u file=%s off=%" PRIu64 " error=\"%s\"", layer, expert,
           r->file < d->model->n_files ? d->model->files[r->file].path : "?", r->file_off_bytes,
           k3_read_strerror(-r->status));
    count(d, K3_XS_ERRORS);
}

static int read_over(struct k3_expertd *d, struct k3_read_done *r)
{
    struct k3_want w;
    int rc = 0;

    if (r->status == 0)
        k3_xverify_read(d, r);
    if (r->status < 0) {
        log_failed(d, r);
        return fail_waiters(d, r);
    }
    k3_slots_loaded(d->slots, r->slot, r->off_bytes);
    while (k3_slots_take_waiter(d->slots, r->slot, &w))
        if (rc == 0)
            rc = lend(d, &w, r->slot, false);
    return rc;
}

/* ---- requests ---- */

static int start_read(struct k3_expertd *d, uint32_t layer, uint32_t expert, const struct k3_given *g, bool demand)
{
    int rc = k3_reader_start(d->reader, g->slot, layer, expert, demand);

    if (g->evicted)
        count(d, K3_XS_EVICTIONS);
    if (rc < 0) {
        struct k3_read_done r = { .slot = g->slot, .status = rc, .file = UINT32_MAX };

        return read_over(d, &r);
    }
    return 0;
}

static int given(struct k3_expertd *d, const struct k3_want *w, const struct k3_given *g)
{
    if (g->answer == K3_ANSWER_QUEUED)
        return 0;
    count(d, g->answer == K3_ANSWER_HIT ? K3_XS_HITS : K3_XS_MISSES);
    if (g->answer == K3_ANSWER_HIT)
        k3_expertd_count_layer(d, w->layer, true);
    if (g->prefetched)
        count(d, K3_XS_PREFETCH_HITS);
    if (g->answer == K3_ANSWER_HIT)
        return lend(d, w, g->slot, true);
    if (g->answer == K3_ANSWER_READ)
        return start_read(d, w->layer, w->expert, g, true);
    count(d, K3_XS_JOINED);
    k3_reader_promote(d->reader, g->slot);
    return 0;
}

static bool has_expert(const struct k3_expertd *d, uint32_t layer, uint32_t expert)
{
    const struct k3_config *c = &d->model->cfg;

    return layer >= c->first_dense && layer < c->n_layers && expert < c->n_experts;
}

static int demand(struct k3_expertd *d, const struct k3_expert_req *rq)
{
    const struct k3_want w = { .id = rq->id, .layer = rq->layer, .expert = rq->expert, .seen_ns = k3_now_ns() };
    struct k3_given g;
    int rc;

    count(d, K3_XS_DEMANDS);
    if (!has_expert(d, rq->layer, rq->expert)) {
        struct k3_expert_cpl c = { .slot = UINT32_MAX, .status = -ENOENT, .file = UINT32_MAX };

        k3_log(K3_LOG_WARN, "no_such_expert", "layer=%u expert=%u", rq->layer, rq->expert);
        count(d, K3_XS_ERRORS);
        return complete(d, &w, &c);
    }
    k3_expertd_count_layer(d, rq->layer, false);
    rc = k3_slots_demand(d->slots, &w, &g);
    return rc < 0 ? rc : given(d, &w, &g);
}

static int prefetch(struct k3_expertd *d, const struct k3_expert_req *rq)
{
    struct k3_given g;

    count(d, K3_XS_PREFETCHES);
    if (!has_expert(d, rq->layer, rq->expert))
        return -EPROTO;
    k3_slots_prefetch(d->slots, rq->layer, rq->expert, &g);
    if (g.answer == K3_ANSWER_DROPPED)
        count(d, K3_XS_PREFETCH_DROPPED);
    return g.answer == K3_ANSWER_READ ? start_read(d, rq->layer, rq->expert, &g, false) : 0;
}

/* Releases first: a request that needs a slot finds it free. */
static int take_releases(struct k3_expertd *d)
{
    struct k3_expert_rel rel;
    int rc;

    while ((rc = k3_expert_ring_pop(&d->ends.rel, &rel)) == 0) {
        if (rel.attach != d->attach) {
            count(d, K3_XS_STALE_DROPPED);
            continue;
        }
        rc = k3_slots_release(d->slots, rel.slot);
        if (rc < 0)
            return rc;
    }
    return rc == -EAGAIN ? 0 : rc;
}

static int take_requests(struct k3_expertd *d)
{
    struct k3_expert_req rq;
    int rc;

    while ((rc = k3_expert_ring_pop(&d->ends.req, &rq)) == 0) {
        if (rq.attach != d->attach) {
            count(d, K3_XS_STALE_DROPPED);
            continue;
        }
        rc = take_releases(d);
        if (rc == 0)
            rc = rq.kind == K3_DEMAND ? demand(d, &rq) : rq.kind == K3_PREFETCH ? prefetch(d, &rq) : -EPROTO;
        if (rc < 0)
            return rc;
    }
    return rc == -EAGAIN ? 0 : rc;
}

static int retry_queued(struct k3_expertd *d)
{
    struct k3_want w;
    struct k3_given g;
    int rc = 0;

    while (rc == 0 && k3_slots_retry(d->slots, &w, &g))
        rc = given(d, &w, &g);
    return rc;
}

/* ---- attach ---- */

static int look_for_attach(struct k3_expertd *d)
{
    struct k3_expert_ctl *c = d->ends.ctl;
    uint64_t attach = atomic_load_explicit(&c->b.attach, memory_order_acquire); /* A' */
    uint32_t n_held = c->b.n_held, n_wrong;
    int rc;

    if (attach == d->attach)
        return 0;
    if (n_held > d->n_slots)
        return -EPROTO;
    /* The client sends nothing between A and the answer: what lies in the rings is of earlier attaches. */
    d->attach = attach;
    rc = take_releases(d);
    if (rc == 0)
        rc = take_requests(d);
    if (rc < 0)
        return rc;
    n_wrong = k3_slots_attach(d->slots, d->ends.held, n_held);
    if (n_wrong)
        return -EPROTO;
    count(d, K3_XS_ATTACHES);
    k3_log(K3_LOG_INFO, "attached", "attach=%" PRIu64 ".%" PRIu64 " held=%u", attach >> 32, attach & UINT32_MAX,
           n_held);
    atomic_store_explicit(&c->a.attached, attach, memory_order_release);
    d->rang = true;
    return 0;
}

/* ---- the loop ---- */

static int step(struct k3_expertd *d)
{
    struct k3_read_done done;
    int rc = look_for_attach(d);

    if (rc == 0)
        rc = take_releases(d);
    if (rc == 0)
        rc = take_requests(d);
    while (rc == 0 && k3_reader_done(d->reader, &done))
        rc = read_over(d, &done);
    if (rc == 0)
        rc = retry_queued(d);
    k3_reader_submit(d->reader);
    if (d->rang) {
        d->rang = false;
        k3_bell_ring(&d->ends.ctl->a.bell, &d->ends.ctl->b.sleepers);
    }
    return rc;
}

static void show(struct k3_expertd *d)
{
    struct k3_stats *st = k3_daemon_stats(d->daemon);
    uint64_t swapped_bytes, major_faults;

    if (k3_mem_look(&d->mem, &d->data, &swapped_bytes, &major_faults)) {
        k3_stat_set(st, K3_XS_SWAPPED_BYTES, swapped_bytes);
        k3_stat_set(st, K3_XS_MAJOR_FAULTS, major_faults);
    }
    k3_stat_set(st, K3_XS_SLOTS_READY, k3_slots_n_ready(d->slots));
    k3_stat_set(st, K3_XS_SLOTS_LENT, k3_slots_n_lent(d->slots));
    k3_stat_set(st, K3_XS_QUEUED, k3_slots_n_queued(d->slots));
    k3_daemon_beat(d->daemon);
}

static void sleep_on(struct k3_expertd *d, uint32_t seen)
{
    struct k3_expert_ctl *c = d->ends.ctl;
    struct pollfd p = { d->efd, POLLIN, 0 };
    eventfd_t n;

    if (k3_reader_in_flight(d->reader) == 0) {
        k3_bell_wait(&c->b.bell, &c->a.sleepers, seen, K3_TICK_NS);
        return;
    }
    k3_bridge_arm(&d->bridge, &c->b.bell, &c->a.sleepers, seen);
    if (poll(&p, 1, (int)(K3_TICK_NS / 1000000)) > 0)
        (void)eventfd_read(d->efd, &n);
}

int k3_expertd_serve(struct k3_expertd *d, struct k3_err *err)
{
    int rc = 0;

    k3_daemon_ready(d->daemon);
    while (rc == 0 && !k3_daemon_stopping(d->daemon)) {
        uint32_t seen = k3_bell_news(&d->ends.ctl->b.bell);

        rc = step(d);
        show(d);
        if (rc == -EPROTO) {
            /* Nobody mends indices in place: a new segment, to which the client attaches as after a restart. */
            count(d, K3_XS_PROTOCOL_ERRORS);
            k3_log(K3_LOG_ERROR, "protocol_broken", "attach=%" PRIu64 " then=new_control_segment", d->attach);
            rc = k3_expertd_publish(d, err);
        } else if (rc == 0) {
            sleep_on(d, seen);
        } else {
            k3_fail(err, rc, "serving experts: %s", strerror(-rc));
        }
    }
    return rc;
}
