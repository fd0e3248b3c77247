#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "shm/expert_ring.h"

#define N 8u

struct pair {
    struct k3_ring_index index;
    struct k3_expert_rel entry[N];
    struct k3_expert_ring in, out;
};

static void open_pair(struct pair *p, uint32_t start)
{
    memset(p, 0, sizeof(*p));
    atomic_store_explicit(&p->index.head, start, memory_order_relaxed);
    atomic_store_explicit(&p->index.tail, start, memory_order_relaxed);
    k3_expert_ring_producer(&p->in, &p->index, p->entry, N, sizeof(p->entry[0]));
    k3_expert_ring_consumer(&p->out, &p->index, p->entry, N, sizeof(p->entry[0]));
}

static int push(struct pair *p, uint32_t slot)
{
    return k3_expert_ring_push(&p->in, &(struct k3_expert_rel){ .attach = 7, .slot = slot });
}

static void in_order_and_full(void **state)
{
    struct pair p;
    struct k3_expert_rel r;
    uint32_t n_in = 0, n_out = 0;

    (void)state;
    open_pair(&p, UINT32_MAX - 11); /* the free-running indices wrap in between */
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), -EAGAIN);
    for (int round = 0; round < 40; round++) {
        while (n_in - n_out < N)
            assert_int_equal(push(&p, n_in++), 0);
        assert_int_equal(push(&p, 99), -EAGAIN);
        assert_int_equal(k3_expert_ring_fill(&p.in), N);
        for (int i = 0; i <= round % (int)N; i++) {
            assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
            assert_int_equal(r.slot, n_out++);
        }
    }
    while (n_out < n_in) {
        assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
        assert_int_equal(r.slot, n_out++);
    }
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), -EAGAIN);
}

static void peers_index_is_checked(void **state)
{
    struct pair p;
    struct k3_expert_rel r;

    (void)state;
    for (uint32_t bad = 1; bad; bad <<= 1) {
        open_pair(&p, 1000);
        atomic_store_explicit(&p.index.tail, 1000 + N + bad, memory_order_relaxed);
        assert_int_equal(k3_expert_ring_pop(&p.out, &r), -EPROTO);
        open_pair(&p, 1000);
        atomic_store_explicit(&p.index.tail, 1000 - bad, memory_order_relaxed); /* back in time */
        assert_int_equal(k3_expert_ring_pop(&p.out, &r), -EPROTO);
        open_pair(&p, 1000);
        atomic_store_explicit(&p.index.head, 1000 + bad, memory_order_relaxed); /* past the tail */
        assert_int_equal(push(&p, 1), -EPROTO);
        open_pair(&p, 1000);
        atomic_store_explicit(&p.index.head, 1000 - N - bad, memory_order_relaxed);
        assert_int_equal(push(&p, 1), -EPROTO);
    }
}

/* What an end stores it never reads back: somebody who writes over it cannot make it repeat or skip. */
static void own_index_is_private(void **state)
{
    struct pair p;
    struct k3_expert_rel r;

    (void)state;
    open_pair(&p, 0);
    assert_int_equal(push(&p, 1), 0);
    assert_int_equal(push(&p, 2), 0);
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
    atomic_store_explicit(&p.index.head, 0, memory_order_relaxed);
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
    assert_int_equal(r.slot, 2);
    atomic_store_explicit(&p.index.tail, 1, memory_order_relaxed);
    assert_int_equal(push(&p, 3), 0);
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
    assert_int_equal(r.slot, 3);
}

static void successor_goes_on(void **state)
{
    struct pair p;
    struct k3_expert_rel r;

    (void)state;
    open_pair(&p, 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(push(&p, i), 0);
    assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
    k3_expert_ring_producer(&p.in, &p.index, p.entry, N, sizeof(p.entry[0]));
    k3_expert_ring_consumer(&p.out, &p.index, p.entry, N, sizeof(p.entry[0]));
    assert_int_equal(push(&p, 5), 0);
    for (uint32_t i = 1; i < 6; i++) {
        assert_int_equal(k3_expert_ring_pop(&p.out, &r), 0);
        assert_int_equal(r.slot, i);
    }
}

#define MESSAGES 200000u
struct shared {
    struct pair p;
    _Atomic uint32_t bell, sleepers, bell_back, sleepers_back;
};

static void *produce(void *arg)
{
    struct shared *s = arg;

    for (uint32_t i = 0; i < MESSAGES;) {
        uint32_t seen = k3_bell_news(&s->bell_back);
        int rc = push(&s->p, i);

        if (rc == -EAGAIN) {
            k3_bell_wait(&s->bell_back, &s->sleepers_back, seen, 2000000000ull);
            continue;
        }
        if (rc < 0)
            return (void *)1;
        i++;
        k3_bell_ring(&s->bell, &s->sleepers);
    }
    return NULL;
}

static void two_threads(void **state)
{
    struct shared *s = aligned_alloc(K3_LINE, (sizeof(*s) + K3_LINE - 1) / K3_LINE * K3_LINE);
    struct k3_expert_rel r;
    pthread_t t;
    void *bad = NULL;

    (void)state;
    memset(s, 0, sizeof(*s));
    open_pair(&s->p, 0);
    assert_int_equal(pthread_create(&t, NULL, produce, s), 0);
    for (uint32_t i = 0; i < MESSAGES;) {
        uint32_t seen = k3_bell_news(&s->bell);
        int rc = k3_expert_ring_pop(&s->p.out, &r);

        if (rc == -EAGAIN) {
            assert_int_equal(k3_bell_wait(&s->bell, &s->sleepers, seen, 2000000000ull), 0); /* none is lost */
            continue;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(r.slot, i);
        i++;
        k3_bell_ring(&s->bell_back, &s->sleepers_back);
    }
    pthread_join(t, &bad);
    assert_null(bad);
    free(s);
}

/* ---- the control segment ---- */

static struct k3_seg new_ctl(uint32_t n_slots, uint64_t slot_bytes)
{
    struct k3_expert_ctl head = { .n_slots = n_slots }, *c;
    struct k3_seg seg = K3_SEG_INIT;

    seg.len_bytes = k3_expert_ctl_layout(&head);
    seg.base = aligned_alloc(4096, seg.len_bytes);
    assert_non_null(seg.base);
    memset(seg.base, 0, seg.len_bytes);
    c = (struct k3_expert_ctl *)seg.base;
    c->magic = K3_EXPERT_MAGIC;
    c->version = K3_EXPERT_VERSION;
    c->n_slots = n_slots;
    k3_expert_ctl_layout(c);
    c->slot_bytes = slot_bytes;
    assert_int_equal(k3_arena_layout(n_slots, slot_bytes, &c->slots_off, &c->data_bytes), 0);
    return seg;
}

static void layouts_have_room(void **state)
{
    static const uint32_t sizes[] = { 1, 2, 16, 31, 32, 33, 1000, 82432 };

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct k3_seg seg = new_ctl(sizes[i], 12288);
        struct k3_expert_ctl *c = (struct k3_expert_ctl *)seg.base;
        struct k3_expert_ends e;
        struct k3_err err = K3_ERR_INIT;

        assert_true(c->n_entries >= 2 * sizes[i]);
        assert_int_equal(c->n_entries & (c->n_entries - 1), 0);
        assert_int_equal(c->slots_off % (2 << 20), 0);
        assert_true(c->slots_off >= K3_ARENA_RECORDS_OFF + sizes[i] * sizeof(struct k3_slot_record));
        assert_true(c->data_bytes >= c->slots_off + sizes[i] * 12288ull);
        for (int owner = 0; owner < 2; owner++)
            if (k3_expert_ends_open(&e, &seg, owner, &err) < 0)
                fail_msg("%s", err.text);
        assert_int_equal(e.n_slots, sizes[i]);
        free(seg.base);
    }
}

static void bad_segments_are_refused(void **state)
{
    (void)state;
#define BREAK(change)                                                                               \
    do {                                                                                            \
        struct k3_seg seg = new_ctl(16, 12288);                                                     \
        struct k3_expert_ctl *c __attribute__((unused)) = (struct k3_expert_ctl *)seg.base;          \
        struct k3_expert_ends e;                                                                    \
        struct k3_err err = K3_ERR_INIT;                                                            \
        uint8_t *base = seg.base;                                                                   \
        change;                                                                                     \
        assert_int_equal(k3_expert_ends_open(&e, &seg, false, &err), -EPROTO);                      \
        assert_true(strlen(err.text) > 20);                                                         \
        assert_null(e.ctl);                                                                         \
        free(base);                                                                                 \
    } while (0)
    BREAK(seg.len_bytes = sizeof(*c) - 1);
    BREAK(seg.len_bytes = 4095);
    BREAK(c->magic++);
    BREAK(c->version++);
    BREAK(c->n_slots = 0);
    BREAK(c->n_slots = 64);
    BREAK(c->n_slots = UINT32_MAX);
    BREAK(c->n_entries = 16);
    BREAK(c->n_entries = 63);
    BREAK(c->n_entries = 0x80000000u);
    BREAK(c->req_off = 8);
    BREAK(c->req_off = seg.len_bytes);
    BREAK(c->req_off = UINT64_MAX - 7);
    BREAK(c->cpl_off += 1);
    BREAK(c->cpl_off = seg.len_bytes - 8);
    BREAK(c->rel_off = UINT64_MAX & ~7ull);
    BREAK(c->held_off = seg.len_bytes - 32);
    BREAK(c->slot_bytes = 0);
    BREAK(c->slot_bytes = UINT64_MAX);
    BREAK(c->slots_off += 4096);
    BREAK(c->data_bytes -= 4096);
}

static void arena_sizes_do_not_wrap(void **state)
{
    uint64_t off, len;

    (void)state;
    assert_int_equal(k3_arena_layout(UINT32_MAX, UINT64_MAX, &off, &len), -EOVERFLOW);
    assert_int_equal(k3_arena_layout(2, UINT64_MAX / 2, &off, &len), -EOVERFLOW);
    assert_int_equal(k3_arena_layout(1, INT64_MAX, &off, &len), -EOVERFLOW);
    assert_int_equal(k3_arena_layout(1, 4096, &off, &len), 0);
    assert_int_equal(off, 2 << 20);
    assert_int_equal(len, 4 << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_and_full),
        cmocka_unit_test(peers_index_is_checked),
        cmocka_unit_test(own_index_is_private),
        cmocka_unit_test(successor_goes_on),
        cmocka_unit_test(two_threads),
        cmocka_unit_test(layouts_have_room),
        cmocka_unit_test(bad_segments_are_refused),
        cmocka_unit_test(arena_sizes_do_not_wrap),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
