#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "k3-expertd/slots.h"

#define LAYERS 8u
#define EXPERTS 16u

static const uint32_t offs[K3_EXPERT_TENSORS] = { 1, 2, 3, 4, 5, 6 };

static struct k3_slots *open_slots(struct k3_slot_record *rec, uint32_t n)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_slots *s = NULL;

    memset(rec, 0, n * sizeof(*rec));
    assert_int_equal(k3_slots_open(&s, rec, n, LAYERS, EXPERTS, k3_policy_find("lru"), &err), 0);
    return s;
}

static struct k3_given demand(struct k3_slots *s, uint32_t id, uint16_t layer, uint16_t expert)
{
    struct k3_given g;

    assert_int_equal(k3_slots_demand(s, &(struct k3_want){ .id = id, .layer = layer, .expert = expert }, &g), 0);
    return g;
}

/* Demand and the whole read: the slot, lent once. */
static uint32_t load(struct k3_slots *s, uint32_t id, uint16_t layer, uint16_t expert)
{
    struct k3_given g = demand(s, id, layer, expert);
    struct k3_want w;

    assert_int_equal(g.answer, K3_ANSWER_READ);
    k3_slots_loaded(s, g.slot, offs);
    assert_true(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(w.id, id);
    assert_false(k3_slots_take_waiter(s, g.slot, &w));
    return g.slot;
}

static uint32_t state_of(const struct k3_slot_record *r)
{
    return atomic_load_explicit(&r->state, memory_order_relaxed);
}

static void records_follow(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    struct k3_given g = demand(s, 1, 3, 5);
    struct k3_want w;

    (void)state;
    assert_int_equal(g.answer, K3_ANSWER_READ);
    assert_int_equal(g.slot, 0);
    assert_false(g.evicted);
    assert_int_equal(state_of(&rec[0]), K3_SLOT_READING);
    assert_int_equal(rec[0].layer, 3);
    assert_int_equal(rec[0].expert, 5);
    assert_int_equal(rec[0].lent, 0);
    k3_slots_loaded(s, 0, offs);
    assert_int_equal(state_of(&rec[0]), K3_SLOT_READY);
    assert_memory_equal(rec[0].off_bytes, offs, sizeof(offs));
    assert_true(k3_slots_take_waiter(s, 0, &w));
    assert_int_equal(rec[0].lent, 1);
    assert_int_equal(k3_slots_n_lent(s), 1);
    assert_int_equal(k3_slots_release(s, 0), 0);
    assert_int_equal(rec[0].lent, 0);
    assert_int_equal(k3_slots_release(s, 0), -EPROTO);
    assert_int_equal(k3_slots_release(s, 1), -EPROTO);
    assert_int_equal(k3_slots_release(s, 2), -EPROTO);
    assert_int_equal(k3_slots_release(s, UINT32_MAX), -EPROTO);
    assert_int_equal(k3_slots_n_ready(s), 1);
    k3_slots_close(s);
}

static void hit_lends_again(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    uint32_t slot = load(s, 1, 0, 0);
    struct k3_given g = demand(s, 2, 0, 0);

    (void)state;
    assert_int_equal(g.answer, K3_ANSWER_HIT);
    assert_int_equal(g.slot, slot);
    assert_int_equal(rec[slot].lent, 2);
    assert_int_equal(k3_slots_n_lent(s), 1);
    assert_int_equal(k3_slots_release(s, slot), 0);
    assert_int_equal(k3_slots_n_lent(s), 1);
    assert_int_equal(k3_slots_release(s, slot), 0);
    assert_int_equal(k3_slots_n_lent(s), 0);
    assert_int_equal(k3_slots_release(s, slot), -EPROTO);
    k3_slots_close(s);
}

static void same_expert_joins(void **state)
{
    struct k3_slot_record rec[3];
    struct k3_slots *s = open_slots(rec, 3);
    struct k3_given g = demand(s, 1, 2, 2), h = demand(s, 2, 2, 2);
    struct k3_want w;

    (void)state;
    assert_int_equal(h.answer, K3_ANSWER_JOINED);
    assert_int_equal(h.slot, g.slot);
    k3_slots_loaded(s, g.slot, offs);
    assert_true(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(w.id, 1);
    assert_true(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(w.id, 2);
    assert_false(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(rec[g.slot].lent, 2);
    k3_slots_close(s);
}

static void prefetch_becomes_the_demand(void **state)
{
    struct k3_slot_record rec[3];
    struct k3_slots *s = open_slots(rec, 3);
    struct k3_given p, g;
    struct k3_want w;

    (void)state;
    k3_slots_prefetch(s, 1, 1, &p);
    assert_int_equal(p.answer, K3_ANSWER_READ);
    k3_slots_prefetch(s, 1, 1, &g);
    assert_int_equal(g.answer, K3_ANSWER_KNOWN);
    g = demand(s, 9, 1, 1);
    assert_int_equal(g.answer, K3_ANSWER_JOINED);
    assert_int_equal(g.slot, p.slot);
    assert_true(g.prefetched);
    k3_slots_loaded(s, p.slot, offs);
    assert_true(k3_slots_take_waiter(s, p.slot, &w));
    assert_int_equal(w.id, 9);
    g = demand(s, 10, 1, 1);
    assert_int_equal(g.answer, K3_ANSWER_HIT);
    assert_false(g.prefetched); /* counted once */

    k3_slots_prefetch(s, 1, 2, &p);
    k3_slots_loaded(s, p.slot, offs);
    assert_false(k3_slots_take_waiter(s, p.slot, &w));
    assert_int_equal(rec[p.slot].lent, 0);
    g = demand(s, 11, 1, 2);
    assert_int_equal(g.answer, K3_ANSWER_HIT);
    assert_true(g.prefetched);
    k3_slots_close(s);
}

static void lent_is_never_a_victim(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    uint32_t a = load(s, 1, 0, 0), b = load(s, 2, 0, 1);
    struct k3_given g;
    struct k3_want w;

    (void)state;
    k3_slots_prefetch(s, 0, 2, &g);
    assert_int_equal(g.answer, K3_ANSWER_DROPPED);
    assert_int_equal(k3_slots_release(s, b), 0); /* the newer one: it must go all the same */
    g = demand(s, 3, 0, 2);
    assert_int_equal(g.answer, K3_ANSWER_READ);
    assert_int_equal(g.slot, b);
    assert_true(g.evicted);
    assert_int_equal(rec[a].expert, 0);
    k3_slots_loaded(s, b, offs);
    assert_true(k3_slots_take_waiter(s, b, &w));
    k3_slots_close(s);
}

static void oldest_is_the_victim(void **state)
{
    struct k3_slot_record rec[3];
    struct k3_slots *s = open_slots(rec, 3);
    uint32_t slot[3];
    struct k3_given g;

    (void)state;
    for (uint16_t i = 0; i < 3; i++) {
        slot[i] = load(s, i, 1, i);
        k3_slots_release(s, slot[i]);
    }
    g = demand(s, 5, 1, 0); /* a hit makes it the newest */
    assert_int_equal(g.answer, K3_ANSWER_HIT);
    k3_slots_release(s, g.slot);
    assert_int_equal(demand(s, 6, 1, 7).slot, slot[1]);
    assert_int_equal(demand(s, 7, 1, 8).slot, slot[2]);
    k3_slots_close(s);
}

static void all_lent_queues(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    uint32_t a = load(s, 1, 0, 0), b = load(s, 2, 0, 1);
    struct k3_given g, h;
    struct k3_want w;

    (void)state;
    assert_int_equal(demand(s, 3, 0, 2).answer, K3_ANSWER_QUEUED);
    assert_int_equal(demand(s, 4, 0, 2).answer, K3_ANSWER_QUEUED);
    assert_int_equal(k3_slots_n_queued(s), 2);
    assert_false(k3_slots_retry(s, &w, &g));
    k3_slots_release(s, b);
    k3_slots_prefetch(s, 3, 3, &h); /* the free slot belongs to the demand */
    assert_int_equal(h.answer, K3_ANSWER_DROPPED);
    assert_true(k3_slots_retry(s, &w, &g));
    assert_int_equal(w.id, 3);
    assert_int_equal(g.answer, K3_ANSWER_READ);
    assert_int_equal(g.slot, b);
    assert_true(k3_slots_retry(s, &w, &h)); /* the second finds it on its way: never read twice */
    assert_int_equal(w.id, 4);
    assert_int_equal(h.answer, K3_ANSWER_JOINED);
    assert_false(k3_slots_retry(s, &w, &h));
    assert_int_equal(k3_slots_n_queued(s), 0);
    assert_int_equal(rec[a].lent, 1);
    k3_slots_close(s);
}

static void hit_passes_the_queue(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    uint32_t a = load(s, 1, 0, 0);
    struct k3_given g;

    (void)state;
    load(s, 2, 0, 1);
    assert_int_equal(demand(s, 3, 0, 2).answer, K3_ANSWER_QUEUED);
    g = demand(s, 4, 0, 0);
    assert_int_equal(g.answer, K3_ANSWER_HIT);
    assert_int_equal(g.slot, a);
    k3_slots_close(s);
}

static void broken_credit_is_told(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    struct k3_given g;

    (void)state;
    demand(s, 1, 0, 0);
    demand(s, 2, 0, 1);
    assert_int_equal(k3_slots_demand(s, &(struct k3_want){ .layer = 0, .expert = 2 }, &g), -EPROTO);
    assert_int_equal(k3_slots_demand(s, &(struct k3_want){ .layer = LAYERS, .expert = 0 }, &g), -EPROTO);
    assert_int_equal(k3_slots_demand(s, &(struct k3_want){ .layer = 0, .expert = EXPERTS }, &g), -EPROTO);
    k3_slots_close(s);
}

static void failed_read_frees_the_slot(void **state)
{
    struct k3_slot_record rec[1];
    struct k3_slots *s = open_slots(rec, 1);
    struct k3_given g = demand(s, 1, 4, 4);
    struct k3_want w;

    (void)state;
    assert_true(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(rec[0].lent, 0); /* not lent: the slot is not READY */
    k3_slots_failed(s, g.slot);
    assert_int_equal(state_of(&rec[0]), K3_SLOT_EMPTY);
    g = demand(s, 2, 4, 4);
    assert_int_equal(g.answer, K3_ANSWER_READ);
    assert_false(g.evicted);
    k3_slots_close(s);
}

static void attach_says_what_is_held(void **state)
{
    struct k3_slot_record rec[4];
    struct k3_slots *s = open_slots(rec, 4);
    uint32_t a = load(s, 1, 0, 0), b = load(s, 2, 0, 1), c = load(s, 3, 0, 2);
    struct k3_given g = demand(s, 4, 0, 3);
    struct k3_want w;

    (void)state;
    assert_int_equal(k3_slots_attach(s, (uint32_t[]){ b, b }, 2), 0);
    assert_int_equal(rec[a].lent, 0);
    assert_int_equal(rec[b].lent, 2);
    assert_int_equal(rec[c].lent, 0);
    k3_slots_loaded(s, g.slot, offs); /* the read goes on; nobody waits for it any more */
    assert_false(k3_slots_take_waiter(s, g.slot, &w));
    assert_int_equal(demand(s, 5, 0, 3).answer, K3_ANSWER_HIT);
    assert_int_equal(k3_slots_attach(s, NULL, 0), 0);
    assert_int_equal(k3_slots_n_lent(s), 0);
    assert_int_equal(k3_slots_attach(s, (uint32_t[]){ 4, UINT32_MAX }, 2), 2);
    for (uint32_t i = 0; i < 4; i++) /* no waiter was lost */
        demand(s, 10 + i, 1, (uint16_t)i);
    assert_int_equal(k3_slots_attach(s, (uint32_t[]){ 0 }, 1), 1); /* READING is not held by anybody */
    k3_slots_close(s);
}

static void attach_drops_the_queue(void **state)
{
    struct k3_slot_record rec[2];
    struct k3_slots *s = open_slots(rec, 2);
    struct k3_given g;
    struct k3_want w;

    (void)state;
    load(s, 1, 0, 0);
    load(s, 2, 0, 1);
    demand(s, 3, 0, 2);
    demand(s, 4, 0, 3);
    k3_slots_attach(s, NULL, 0);
    assert_int_equal(k3_slots_n_queued(s), 0);
    assert_false(k3_slots_retry(s, &w, &g));
    assert_int_equal(demand(s, 5, 0, 4).answer, K3_ANSWER_READ);
    assert_int_equal(demand(s, 6, 0, 5).answer, K3_ANSWER_READ);
    k3_slots_close(s);
}

static void takes_over(void **state)
{
    struct k3_slot_record rec[4];
    struct k3_slots *s = open_slots(rec, 4);

    (void)state;
    assert_true(k3_slots_adopt(s, 2, 5, 6, offs, 1));
    assert_false(k3_slots_adopt(s, 1, 5, 6, offs, 0)); /* twice the same expert */
    assert_false(k3_slots_adopt(s, 3, LAYERS, 0, offs, 0));
    k3_slots_adopted(s);
    assert_int_equal(k3_slots_n_ready(s), 1);
    assert_int_equal(k3_slots_n_lent(s), 1);
    assert_int_equal(state_of(&rec[1]), K3_SLOT_EMPTY);
    assert_int_equal(state_of(&rec[2]), K3_SLOT_READY);
    assert_int_equal(state_of(&rec[3]), K3_SLOT_EMPTY);
    assert_int_equal(k3_slots_attach(s, (uint32_t[]){ 2 }, 1), 0);
    assert_int_equal(demand(s, 1, 5, 6).answer, K3_ANSWER_HIT);
    assert_int_equal(rec[2].lent, 2);
    for (uint16_t i = 0; i < 3; i++) {
        struct k3_given g = demand(s, 2 + i, 0, i);

        assert_int_equal(g.answer, K3_ANSWER_READ);
        assert_int_not_equal(g.slot, 2);
    }
    k3_slots_close(s);
}

/* A client that keeps its credit, with reads that end in any order, badly at times: every demand is answered, no slot is
 * given to two experts, none that is lent changes hands, no expert is read while it is resident or on its way. */
static void random_traffic(void **state)
{
    enum { N = 5, OUT = 5 };
    struct { uint32_t id; uint32_t slot; uint16_t layer, expert; bool lent; } out[OUT];
    uint32_t n_out = 0, next_id = 1, answered = 0, reading[N], n_reading = 0;
    struct k3_slot_record rec[N];
    struct k3_slots *s = open_slots(rec, N);
    struct k3_given g;
    struct k3_want w;

    (void)state;
    srand(3);
#define STARTED(layer_, expert_)                                                                    \
    do {                                                                                            \
        for (uint32_t q_ = 0; q_ < N; q_++)                                                           \
            if (q_ != g.slot && state_of(&rec[q_]) != K3_SLOT_EMPTY)                                  \
                assert_false(rec[q_].layer == (layer_) && rec[q_].expert == (expert_));              \
        for (uint32_t q_ = 0; q_ < n_out; q_++)                                                       \
            assert_false(out[q_].lent && out[q_].slot == g.slot);                                    \
        reading[n_reading++] = g.slot;                                                               \
    } while (0)
    for (int step = 0; step < 300000; step++) {
        uint32_t what = (uint32_t)rand() % 8;

        if (what < 3 && n_out < OUT) {
            w = (struct k3_want){ .id = next_id++, .layer = (uint16_t)(rand() % 2), .expert = (uint16_t)(rand() % 6) };
            out[n_out].id = w.id;
            out[n_out].layer = w.layer;
            out[n_out].expert = w.expert;
            out[n_out].lent = false;
            n_out++;
            assert_int_equal(k3_slots_demand(s, &w, &g), 0);
            if (g.answer == K3_ANSWER_HIT) {
                out[n_out - 1].lent = true;
                out[n_out - 1].slot = g.slot;
                answered++;
            } else if (g.answer == K3_ANSWER_READ) {
                STARTED(w.layer, w.expert);
            }
        } else if (what == 3) {
            uint32_t layer = (uint32_t)rand() % 2, expert = (uint32_t)rand() % 6;

            k3_slots_prefetch(s, layer, expert, &g);
            if (g.answer == K3_ANSWER_READ)
                STARTED(layer, expert);
        } else if (what < 6 && n_reading) {
            uint32_t k = (uint32_t)rand() % n_reading, slot = reading[k];
            bool well = rand() % 10 != 0;

            reading[k] = reading[--n_reading];
            if (well)
                k3_slots_loaded(s, slot, offs);
            while (k3_slots_take_waiter(s, slot, &w)) {
                uint32_t i = 0;

                while (i < n_out && out[i].id != w.id)
                    i++;
                assert_true(i < n_out && !out[i].lent);
                assert_int_equal(out[i].layer, rec[slot].layer);
                assert_int_equal(out[i].expert, rec[slot].expert);
                answered++;
                if (well) {
                    out[i].lent = true;
                    out[i].slot = slot;
                } else {
                    out[i] = out[--n_out];
                }
            }
            if (!well)
                k3_slots_failed(s, slot);
        } else if (n_out) {
            uint32_t i = (uint32_t)rand() % n_out;

            if (out[i].lent) {
                assert_int_equal(rec[out[i].slot].layer, out[i].layer);
                assert_int_equal(rec[out[i].slot].expert, out[i].expert);
                assert_int_equal(state_of(&rec[out[i].slot]), K3_SLOT_READY);
                assert_int_equal(k3_slots_release(s, out[i].slot), 0);
                out[i] = out[--n_out];
            }
        }
        while (k3_slots_retry(s, &w, &g)) {
            uint32_t i = 0;

            while (i < n_out && out[i].id != w.id)
                i++;
            assert_true(i < n_out);
            if (g.answer == K3_ANSWER_HIT) {
                out[i].lent = true;
                out[i].slot = g.slot;
                answered++;
            } else if (g.answer == K3_ANSWER_READ) {
                STARTED(w.layer, w.expert);
            }
        }
        /* The credit's promise: with nothing being read, nothing waits. */
        if (n_reading == 0)
            assert_int_equal(k3_slots_n_queued(s), 0);
    }
    assert_true(answered > 30000);
    k3_slots_close(s);
}

static void no_experts_at_all(void **state)
{
    struct k3_slot_record rec[1] = { 0 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_slots *s = NULL;
    struct k3_given g;

    (void)state;
    assert_int_equal(k3_slots_open(&s, rec, 1, 1, 0, k3_policy_find("lru"), &err), 0);
    k3_slots_prefetch(s, 0, 0, &g);
    assert_int_equal(g.answer, K3_ANSWER_DROPPED);
    k3_slots_close(s);
    k3_slots_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_follow),
        cmocka_unit_test(hit_lends_again),
        cmocka_unit_test(same_expert_joins),
        cmocka_unit_test(prefetch_becomes_the_demand),
        cmocka_unit_test(lent_is_never_a_victim),
        cmocka_unit_test(oldest_is_the_victim),
        cmocka_unit_test(all_lent_queues),
        cmocka_unit_test(hit_passes_the_queue),
        cmocka_unit_test(broken_credit_is_told),
        cmocka_unit_test(failed_read_frees_the_slot),
        cmocka_unit_test(attach_says_what_is_held),
        cmocka_unit_test(attach_drops_the_queue),
        cmocka_unit_test(takes_over),
        cmocka_unit_test(random_traffic),
        cmocka_unit_test(no_experts_at_all),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
