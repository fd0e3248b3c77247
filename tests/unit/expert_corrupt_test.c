/* What one side does when the other breaks the rules: nothing out of bounds, one line that says so, and it goes on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "expert_world.h"
#include "shm/expert_ring.h"

#define N_SLOTS 6u

static const struct k3_xw_shape shape = { .n_layers = 3, .n_experts = 12, .top_k = 3, .latent = 64, .inner = 64,
                                          .n_files = 2, .seed = 4 };

/* ---- a broken client, the real daemon ---- */

struct raw {
    struct k3_seg seg;
    struct k3_expert_ends ends;
    uint64_t attach;
};

static void raw_open(struct k3_xw *w, struct raw *r)
{
    struct k3_err err = K3_ERR_INIT;

    *r = (struct raw){ .seg = K3_SEG_INIT, .attach = (uint64_t)++w->generation << 32 | 1 };
    if (k3_seg_open(&r->seg, w->instance, "expert", true, &err) < 0 ||
        k3_expert_ends_open(&r->ends, &r->seg, false, &err) < 0)
        fail_msg("%s", err.text);
}

static void raw_ring(struct raw *r)
{
    k3_bell_ring(&r->ends.ctl->b.bell, &r->ends.ctl->a.sleepers);
}

static void raw_attach(struct raw *r)
{
    r->ends.ctl->b.n_held = 0;
    atomic_store_explicit(&r->ends.ctl->b.attach, r->attach, memory_order_release);
    raw_ring(r);
    for (int i = 0; i < 5000; i++) {
        if (atomic_load_explicit(&r->ends.ctl->a.attached, memory_order_acquire) == r->attach)
            return;
        nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    }
    fail_msg("no answer to an attach");
}

static void raw_request(struct raw *r, uint16_t layer, uint16_t expert, uint16_t kind)
{
    struct k3_expert_req rq = { .attach = r->attach, .id = 1, .layer = layer, .expert = expert, .kind = kind };

    assert_int_equal(k3_expert_ring_push(&r->ends.req, &rq), 0);
}

enum wrong {
    HELD_EMPTY, REQ_TAIL, REL_TAIL, CPL_HEAD, RELEASE_NOT_LENT, RELEASE_NO_SLOT, BAD_KIND, PREFETCH_NO_EXPERT, HELD_TOO_MANY,
    HELD_NO_SLOT, CREDIT, N_WRONG
};

static void do_wrong(struct raw *r, enum wrong what)
{
    struct k3_expert_ctl *c = r->ends.ctl;

    if (what != HELD_TOO_MANY && what != HELD_NO_SLOT && what != HELD_EMPTY)
        raw_attach(r);
    switch (what) {
    case REQ_TAIL:
        atomic_fetch_add_explicit(&c->req.tail, 1000000, memory_order_release);
        break;
    case REL_TAIL:
        atomic_fetch_sub_explicit(&c->rel.tail, 1, memory_order_release);
        break;
    case CPL_HEAD:
        atomic_fetch_add_explicit(&c->cpl.head, 77, memory_order_release);
        raw_request(r, 1, 0, K3_DEMAND);
        break;
    case RELEASE_NOT_LENT:
        k3_expert_ring_push(&r->ends.rel, &(struct k3_expert_rel){ .attach = r->attach, .slot = 1 });
        break;
    case RELEASE_NO_SLOT:
        k3_expert_ring_push(&r->ends.rel, &(struct k3_expert_rel){ .attach = r->attach, .slot = UINT32_MAX });
        break;
    case BAD_KIND:
        raw_request(r, 1, 0, 7);
        break;
    case PREFETCH_NO_EXPERT:
        raw_request(r, UINT16_MAX, UINT16_MAX, K3_PREFETCH);
        break;
    case HELD_TOO_MANY:
        c->b.n_held = UINT32_MAX;
        atomic_store_explicit(&c->b.attach, r->attach, memory_order_release);
        break;
    case HELD_NO_SLOT:
    case HELD_EMPTY:
        r->ends.held[0] = what == HELD_NO_SLOT ? 0x80000000u : N_SLOTS - 1;
        c->b.n_held = 1;
        atomic_store_explicit(&c->b.attach, r->attach, memory_order_release);
        break;
    case CREDIT: /* more demands than slots, none released */
        for (uint16_t e = 0; e < 12; e++) {
            raw_request(r, 1, e, K3_DEMAND);
            raw_request(r, 2, e, K3_DEMAND);
        }
        break;
    default:
        break;
    }
    raw_ring(r);
}

static void daemon_survives(void **state)
{
    struct k3_xw w;
    uint16_t e[12];
    char cache[32];

    (void)state;
    k3_xw_open(&w, &shape);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, N_SLOTS, cache, sizeof(cache)), NULL });
    k3_xw_log_wait(&w, "event=ready");
    for (uint16_t i = 0; i < 12; i++)
        e[i] = i;
    for (uint32_t what = 0; what < N_WRONG; what++) {
        struct k3_expert_client *c;
        struct raw r;

        raw_open(&w, &r);
        do_wrong(&r, what);
        for (int i = 0; i < 4000 && k3_seg_is_current(&r.seg); i++)
            nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
        if (k3_seg_is_current(&r.seg))
            fail_msg("wrong %u went unnoticed", what);
        k3_seg_close(&r.seg);
        c = k3_xw_client(&w);
        k3_xw_layer(&w, c, 1, e, what % 2 ? 12 : 1, 1);
        k3_expert_client_close(c);
        k3_xw_stat_wait(&w, "slots_lent", 0);
        k3_xw_stat_wait(&w, "protocol_errors", what + 1);
    }
    k3_xw_log_wait(&w, "event=protocol_broken");
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

/* A demand for what is no expert is an error for that demand, no more. */
static void no_such_expert(void **state)
{
    struct k3_expert_cpl cpl;
    struct k3_xw w;
    struct raw r;
    char cache[32];

    (void)state;
    k3_xw_open(&w, &shape);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, N_SLOTS, cache, sizeof(cache)), NULL });
    k3_xw_log_wait(&w, "event=ready");
    raw_open(&w, &r);
    raw_attach(&r);
    raw_request(&r, 0, 0, K3_DEMAND); /* a dense layer */
    raw_request(&r, 3, 0, K3_DEMAND);
    raw_request(&r, 1, 12, K3_DEMAND);
    r.attach--; /* an entry of an earlier attach: dropped */
    raw_request(&r, 1, 1, K3_DEMAND);
    r.attach++;
    raw_request(&r, 1, 1, K3_DEMAND);
    raw_ring(&r);
    for (int n = 0, i = 0; n < 4 && i < 5000; i++) {
        if (k3_expert_ring_pop(&r.ends.cpl, &cpl) == 0) {
            assert_int_equal(cpl.status, n < 3 ? -ENOENT : 0);
            n++;
        } else {
            nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
        }
        if (i == 4999)
            fail_msg("%d of 4 completions came", n);
    }
    assert_int_equal(k3_xw_stat(&w, "stale_dropped"), 1);
    assert_int_equal(k3_xw_stat(&w, "protocol_errors"), 0);
    k3_seg_close(&r.seg);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

/* ---- a broken daemon, the real client ---- */

enum lie { TRUTH, SLOT_NONE, OFFSET_OUT, OFFSET_WRAPS, OTHER_ID, OTHER_EXPERT, TWICE, TAIL, STALE_FIRST, ERROR_NO_FILE, N_LIES };
struct fake {
    struct k3_xw *w;
    struct k3_seg ctl, data;
    struct k3_expert_ends ends;
    enum lie lie;
    _Atomic bool quit;
};

static void fake_open(struct fake *f)
{
    struct k3_expert_ctl *c, head = { .n_slots = N_SLOTS };
    struct k3_arena_head *h;
    uint64_t slots_off, data_bytes, slot_bytes = f->w->m->expert_slot_bytes;
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_arena_layout(N_SLOTS, slot_bytes, &slots_off, &data_bytes), 0);
    if (k3_seg_create(&f->data, f->w->instance, "expertdata", data_bytes, &err) < 0 ||
        k3_seg_create(&f->ctl, f->w->instance, "expert", k3_expert_ctl_layout(&head), &err) < 0)
        fail_msg("%s", err.text);
    h = (struct k3_arena_head *)f->data.base;
    *h = (struct k3_arena_head){ .magic = K3_ARENA_MAGIC, .version = K3_EXPERT_VERSION, .n_slots = N_SLOTS, .slot_bytes = slot_bytes };
    memcpy(h->model_digest, f->w->m->digest, 32);
    c = (struct k3_expert_ctl *)f->ctl.base;
    c->magic = K3_EXPERT_MAGIC;
    c->version = K3_EXPERT_VERSION;
    c->n_slots = N_SLOTS;
    c->slot_bytes = slot_bytes;
    c->slots_off = slots_off;
    c->data_bytes = data_bytes;
    k3_data_place(&c->data, &f->data);
    k3_expert_ctl_layout(c);
    memcpy(c->model_digest, f->w->m->digest, 32);
    if (k3_expert_ends_open(&f->ends, &f->ctl, true, &err) < 0 || k3_seg_publish(&f->data, &err) < 0 ||
        k3_seg_publish(&f->ctl, &err) < 0)
        fail_msg("%s", err.text);
}

static void answer(struct fake *f, const struct k3_expert_req *rq)
{
    struct k3_expert_cpl c = { .attach = rq->attach, .id = rq->id, .layer = rq->layer, .expert = rq->expert };

    switch (f->lie) {
    case SLOT_NONE: c.slot = N_SLOTS; break;
    case OFFSET_OUT: c.off_bytes[5] = (uint32_t)f->ends.slot_bytes - 1; break;
    case OFFSET_WRAPS: c.off_bytes[0] = UINT32_MAX; break;
    case OTHER_ID: c.id += 1000; break;
    case OTHER_EXPERT: c.expert++; break;
    case TWICE: k3_expert_ring_push(&f->ends.cpl, &c); break;
    case TAIL: atomic_fetch_add_explicit(&f->ends.ctl->cpl.tail, 12345, memory_order_release); return;
    case STALE_FIRST:
        c.attach--;
        c.slot = UINT32_MAX;
        k3_expert_ring_push(&f->ends.cpl, &c);
        c.attach++;
        c.slot = 0;
        break;
    case ERROR_NO_FILE:
        c.status = -ENODATA;
        c.file = UINT32_MAX;
        break;
    default: break;
    }
    k3_expert_ring_push(&f->ends.cpl, &c);
}

static void *fake_main(void *arg)
{
    struct fake *f = arg;
    struct k3_expert_ctl *c = f->ends.ctl;
    struct k3_expert_req rq;
    struct k3_expert_rel rel;

    while (!atomic_load_explicit(&f->quit, memory_order_acquire)) {
        uint32_t seen = k3_bell_news(&c->b.bell);

        atomic_store_explicit(&c->a.attached, atomic_load_explicit(&c->b.attach, memory_order_acquire),
                              memory_order_release);
        while (k3_expert_ring_pop(&f->ends.rel, &rel) == 0)
            ;
        while (k3_expert_ring_pop(&f->ends.req, &rq) == 0)
            answer(f, &rq);
        k3_bell_ring(&c->a.bell, &c->b.sleepers);
        k3_bell_wait(&c->b.bell, &c->a.sleepers, seen, 10000000);
    }
    return NULL;
}

static void client_checks_everything(void **state)
{
    static const uint16_t e[2] = { 3, 4 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_xw w;
    uint32_t generation;
    int lock = -1;

    (void)state;
    k3_xw_open(&w, &shape);
    if (k3_lock_take(&lock, &generation, w.rundir, "k3-expertd", &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t lie = TRUTH; lie < N_LIES; lie++) {
        struct fake f = { .w = &w, .ctl = K3_SEG_INIT, .data = K3_SEG_INIT, .lie = lie };
        struct k3_expert_client *c;
        struct k3_expert_view v;
        pthread_t thread;
        int rc;

        fake_open(&f);
        assert_int_equal(pthread_create(&thread, NULL, fake_main, &f), 0);
        c = k3_xw_client(&w);
        assert_int_equal(k3_expert_client_begin(c, 1, e, 2, &err), 0);
        rc = k3_expert_client_next(c, &v, &err);
        if (rc == 0 && lie == TWICE)
            rc = k3_expert_client_next(c, &v, &err);
        if (lie == TRUTH || lie == STALE_FIRST) {
            assert_int_equal(rc, 0);
            assert_int_equal(v.slot, 0);
        } else if (lie == ERROR_NO_FILE) {
            assert_int_equal(rc, -EIO);
            assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
        } else if (rc != -EPROTO) {
            fail_msg("lie %u: %d (%s)", lie, rc, err.text);
        }
        k3_expert_client_abandon(c);
        k3_expert_client_close(c);
        atomic_store_explicit(&f.quit, true, memory_order_release);
        pthread_join(thread, NULL);
        k3_seg_unlink(w.instance, "expert");
        k3_seg_unlink(w.instance, "expertdata");
        k3_seg_close(&f.ctl);
        k3_seg_close(&f.data);
    }
    k3_lock_drop(&lock);
    k3_xw_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(daemon_survives),
        cmocka_unit_test(no_such_expert),
        cmocka_unit_test(client_checks_everything),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
