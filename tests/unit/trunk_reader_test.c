/* The consumer against a producer that this test plays: what it may believe, and when. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/trunk_fix.h"

static const struct k3_tf_spec spec = { .seed = 91,
                                        .n_files = 1,
                                        .n_matrices = 6,
                                        .n_residents = 2,
                                        .row_bytes_max = 9000,
                                        .matrix_bytes_max = 200000,
                                        .piece_bytes = 60000 };

/* A trunkd without a daemon: lock, layout, segments. */
struct stage {
    struct k3_tf t;
    struct k3_layout layout;
    struct k3_seg ctl_seg, data;
    struct k3_trunk_ctl *ctl;
    _Atomic uint32_t *flags;
    int lock_fd;
    uint32_t generation;
    size_t pinned_piece, ring_piece;
};

static void publish_ctl(struct stage *s)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_trunk_entry *table;

    assert_int_equal(k3_seg_create(&s->ctl_seg, s->t.instance, K3_TRUNK_SEG,
                                   sizeof(*s->ctl) + s->layout.n_pieces * sizeof(*table), &err),
                     0);
    s->ctl = (struct k3_trunk_ctl *)(void *)s->ctl_seg.base;
    *s->ctl = (struct k3_trunk_ctl){ .magic = K3_TRUNK_MAGIC,
                                     .version = K3_TRUNK_VERSION,
                                     .generation = s->generation,
                                     .align_bytes = s->layout.align_bytes,
                                     .pass_bytes = s->layout.pass_bytes,
                                     .ring_bytes = s->layout.ring_bytes,
                                     .data_bytes = s->layout.data_bytes,
                                     .n_pieces = s->layout.n_pieces,
                                     .table_off = sizeof(*s->ctl) };
    k3_data_place(&s->ctl->data, &s->data);
    memcpy(s->ctl->model_digest, s->t.m->digest, 32);
    memcpy(s->ctl->layout_digest, s->layout.digest, 32);
    table = (struct k3_trunk_entry *)(void *)(s->ctl_seg.base + s->ctl->table_off);
    for (size_t i = 0; i < s->layout.n_pieces; i++)
        table[i] = (struct k3_trunk_entry){ s->layout.start[i], s->layout.pinned[i] };
}

static void stage_open(struct stage *s)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_trunk_data *head;
    uint8_t *pinned;

    *s = (struct stage){ .ctl_seg = K3_SEG_INIT, .data = K3_SEG_INIT };
    k3_tf_open(&s->t, &spec);
    pinned = calloc(1, s->t.m->n_pieces);
    for (size_t i = 1; i < s->t.m->n_pieces; i += 2)
        pinned[i] = 1;
    s->pinned_piece = 1;
    s->ring_piece = 2;
    assert_int_equal(k3_layout_build(&s->layout, s->t.m, 4096, 2 << 20, pinned, &err), 0);
    free(pinned);
    assert_int_equal(k3_lock_take(&s->lock_fd, &s->generation, s->t.rundir, K3_TRUNKD_NAME, &err),
                     0);
    assert_int_equal(
        k3_seg_create(&s->data, s->t.instance, K3_TRUNK_DATA_SEG, s->layout.data_bytes, &err), 0);
    head = (struct k3_trunk_data *)(void *)s->data.base;
    head->magic = K3_TRUNK_DATA_MAGIC;
    head->version = K3_TRUNK_VERSION;
    memcpy(head->layout_digest, s->layout.digest, 32);
    atomic_store(&head->resident_valid, 1);
    s->flags = (_Atomic uint32_t *)(void *)(s->data.base + s->layout.flags_off);
    assert_int_equal(k3_seg_publish(&s->data, &err), 0);
    publish_ctl(s);
    assert_int_equal(k3_seg_publish(&s->ctl_seg, &err), 0);
}

static void stage_close(struct stage *s)
{
    k3_seg_close(&s->ctl_seg);
    k3_seg_close(&s->data);
    k3_layout_free(&s->layout);
    k3_lock_drop(&s->lock_fd);
    k3_tf_close(&s->t);
}

/* The next generation: segment, not yet published. */
static void stage_next(struct stage *s)
{
    struct k3_err err = K3_ERR_INIT;

    k3_lock_drop(&s->lock_fd);
    assert_int_equal(k3_lock_take(&s->lock_fd, &s->generation, s->t.rundir, K3_TRUNKD_NAME, &err),
                     0);
    k3_seg_unlink(s->t.instance, K3_TRUNK_SEG);
    k3_seg_close(&s->ctl_seg);
    publish_ctl(s);
}

static void ring_a(struct stage *s)
{
    k3_bell_ring(&s->ctl->a.bell, &s->ctl->b.sleepers);
}

static uint64_t seek_number(const struct stage *s)
{
    return atomic_load_explicit(&s->ctl->b.seek.number, memory_order_acquire);
}

static void wait_for_seek(const struct stage *s, uint64_t other_than)
{
    for (int i = 0; i < 2000 && seek_number(s) == other_than; i++)
        usleep(5000);
    assert_int_not_equal(seek_number(s), other_than);
}

static void ack(struct stage *s)
{
    uint64_t start = __atomic_load_n(&s->ctl->b.seek.start, __ATOMIC_RELAXED);

    atomic_store_explicit(&s->ctl->a.error.set, 0, memory_order_relaxed);
    atomic_store_explicit(&s->ctl->a.produced, start, memory_order_release);
    atomic_store_explicit(&s->ctl->a.acked, seek_number(s), memory_order_release);
    ring_a(s);
}

static void produce(struct stage *s, uint64_t to)
{
    atomic_store_explicit(&s->ctl->a.produced, to, memory_order_release);
    ring_a(s);
}

/* One call of the reader on a thread of its own. */
struct call {
    struct k3_trunk_reader *r;
    enum { CALL_SEEK_PASS, CALL_NEXT_PASS, CALL_ROWS } what;
    uint32_t piece;
    const void *rows;
    struct k3_err err;
    int rc;
    _Atomic bool ended;
    pthread_t thread;
};

static void *run_call(void *arg)
{
    struct call *c = arg;

    switch (c->what) {
    case CALL_SEEK_PASS:
        c->rc = k3_trunk_reader_seek_pass(c->r, &c->err);
        break;
    case CALL_NEXT_PASS:
        c->rc = k3_trunk_reader_next_pass(c->r, &c->err);
        break;
    case CALL_ROWS:
        c->rc = k3_trunk_reader_rows(c->r, c->piece, 0, 1, &c->rows, &c->err);
        break;
    }
    atomic_store(&c->ended, true);
    return NULL;
}

static void call(struct call *c, struct k3_trunk_reader *r, int what, size_t piece)
{
    *c = (struct call){ .r = r, .what = what, .piece = (uint32_t)piece };
    assert_int_equal(pthread_create(&c->thread, NULL, run_call, c), 0);
}

static void still_waits(const struct call *c)
{
    usleep(150000); /* three of its ticks */
    assert_false(atomic_load(&c->ended));
}

static void ends_with(struct call *c, int rc)
{
    for (int i = 0; i < 2000 && !atomic_load(&c->ended); i++)
        usleep(5000);
    if (!atomic_load(&c->ended))
        fail_msg("the reader still waits");
    pthread_join(c->thread, NULL);
    if (c->rc != rc)
        fail_msg("returned %d (%s), want %d", c->rc, c->err.text, rc);
}

static uint64_t end_of(const struct stage *s, uint64_t pass, size_t piece)
{
    const struct k3_piece *p = &s->t.m->pieces[piece];

    return pass * s->layout.pass_bytes + s->layout.start[piece] + p->len_bytes / p->n_rows;
}

static struct k3_trunk_reader *begun(struct stage *s, uint32_t generation)
{
    struct k3_trunk_reader *r = k3_tf_reader(&s->t, generation);
    struct call c;

    call(&c, r, CALL_SEEK_PASS, 0);
    wait_for_seek(s, 0);
    ack(s);
    ends_with(&c, 0);
    return r;
}

static void a_seek_waits_for_its_own_number(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;

    (void)state;
    stage_open(&s);
    produce(&s, 999999); /* of nobody's seek */
    atomic_store(&s.ctl->a.acked, (uint64_t)1 << 32 | 7);
    r = k3_tf_reader(&s.t, 5);
    call(&c, r, CALL_SEEK_PASS, 0);
    wait_for_seek(&s, 0);
    assert_int_equal(seek_number(&s) >> 32, 5);
    assert_int_equal(s.ctl->b.seek.start, s.layout.start[0]);
    assert_int_equal(s.ctl->b.seek.piece, 0);
    still_waits(&c);
    ack(&s);
    ends_with(&c, 0);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

static void rows_wait_for_their_last_byte(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;

    (void)state;
    stage_open(&s);
    r = begun(&s, 1);
    call(&c, r, CALL_ROWS, 0);
    produce(&s, end_of(&s, 0, 0) - 1);
    still_waits(&c);
    produce(&s, end_of(&s, 0, 0));
    ends_with(&c, 0);
    k3_trunk_reader_done(r);
    assert_int_equal(atomic_load(&s.ctl->b.consumed), end_of(&s, 0, 0));
    /* pinned: not before its flag, whatever is produced */
    call(&c, r, CALL_ROWS, s.pinned_piece);
    still_waits(&c);
    atomic_store_explicit(&s.flags[s.pinned_piece], K3_PIECE_VALID, memory_order_release);
    ring_a(&s);
    ends_with(&c, 0);
    k3_trunk_reader_done(r);
    assert_int_equal(atomic_load(&s.ctl->b.consumed), end_of(&s, 0, 0));
    k3_trunk_reader_close(r);
    stage_close(&s);
}

static void more_than_the_ring_holds_is_not_believed(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;

    (void)state;
    stage_open(&s);
    r = begun(&s, 1);
    produce(&s, s.layout.start[0] + s.layout.ring_bytes + 1); /* start[0] is consumed */
    call(&c, r, CALL_ROWS, 0);
    ends_with(&c, -EPROTO);
    produce(&s, s.layout.start[0] + s.layout.ring_bytes);
    call(&c, r, CALL_ROWS, 0);
    ends_with(&c, 0);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

static void an_error_counts_only_behind_what_was_produced(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;
    uint64_t number;

    (void)state;
    stage_open(&s);
    r = begun(&s, 1);
    produce(&s, end_of(&s, 0, 0));
    s.ctl->a.error.err = EIO;
    s.ctl->a.error.position = end_of(&s, 0, 0);
    s.ctl->a.error.off_bytes = 4711;
    s.ctl->a.error.file = 0;
    atomic_store_explicit(&s.ctl->a.error.set, 1, memory_order_release);
    ring_a(&s);
    call(&c, r, CALL_ROWS, 0); /* before the position: there */
    ends_with(&c, 0);
    k3_trunk_reader_done(r);
    call(&c, r, CALL_ROWS, s.ring_piece);
    ends_with(&c, -EIO);
    assert_int_equal(c.err.exit_status, K3_EXIT_UNTRUSTED);
    assert_non_null(strstr(c.err.text, s.t.m->files[0].path));
    assert_non_null(strstr(c.err.text, "4711"));
    /* a file index from nowhere is not followed */
    s.ctl->a.error.file = 12345;
    call(&c, r, CALL_ROWS, s.ring_piece);
    ends_with(&c, -EIO);
    /* the next pass seeks, and the old error says nothing about it */
    number = seek_number(&s);
    call(&c, r, CALL_SEEK_PASS, 0);
    wait_for_seek(&s, number);
    still_waits(&c);
    ack(&s);
    ends_with(&c, 0);
    assert_int_equal(atomic_load(&s.ctl->b.consumed), s.layout.pass_bytes + s.layout.start[0]);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

/* Nothing in a new generation's segment counts before it has acknowledged our seek: not produced,
 * not an error, not a failed pin; but a valid pin does. */
static void a_new_generation_must_acknowledge_first(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct k3_trunk_reader_counts counts;
    struct k3_err err = K3_ERR_INIT;
    struct call c;

    (void)state;
    stage_open(&s);
    r = begun(&s, 1);
    produce(&s, end_of(&s, 0, 0));
    call(&c, r, CALL_ROWS, 0);
    ends_with(&c, 0);
    k3_trunk_reader_done(r);
    call(&c, r, CALL_ROWS, s.ring_piece);
    still_waits(&c);
    stage_next(&s);
    atomic_store(&s.ctl->a.produced, s.layout.ring_bytes);
    atomic_store(&s.ctl->a.error.set, 1);
    s.ctl->a.error.err = EIO;
    assert_int_equal(k3_seg_publish(&s.ctl_seg, &err), 0);
    wait_for_seek(&s, 0);
    still_waits(&c);
    assert_int_equal(s.ctl->b.seek.start, s.layout.start[s.ring_piece]); /* where it waits */
    assert_int_equal(s.ctl->b.seek.piece, s.ring_piece);
    assert_int_equal(atomic_load(&s.ctl->b.consumed), s.layout.start[s.ring_piece]);
    ack(&s);
    still_waits(&c);
    produce(&s, end_of(&s, 0, s.ring_piece));
    ends_with(&c, 0);
    k3_trunk_reader_done(r);
    /* waiting for a pin */
    call(&c, r, CALL_ROWS, s.pinned_piece + 2);
    still_waits(&c);
    stage_next(&s);
    atomic_store(&s.flags[s.pinned_piece + 2], K3_PIECE_FAILED | EIO);
    assert_int_equal(k3_seg_publish(&s.ctl_seg, &err), 0);
    wait_for_seek(&s, 0);
    still_waits(&c);
    assert_int_equal(s.ctl->b.seek.piece, s.pinned_piece + 2);
    assert_int_equal(s.ctl->b.seek.start,
                     s.layout.start[s.pinned_piece + 3]); /* the next unpinned byte */
    ack(&s);
    ends_with(&c, -EIO);
    assert_non_null(strstr(c.err.text, "pinned piece"));
    atomic_store(&s.flags[s.pinned_piece + 2], K3_PIECE_ABSENT);
    call(&c, r, CALL_ROWS, s.pinned_piece + 2);
    still_waits(&c);
    stage_next(&s);
    assert_int_equal(k3_seg_publish(&s.ctl_seg, &err), 0);
    wait_for_seek(&s, 0);
    atomic_store_explicit(&s.flags[s.pinned_piece + 2], K3_PIECE_VALID, memory_order_release);
    ring_a(&s);
    ends_with(&c, 0); /* not acknowledged, but valid is valid */
    k3_trunk_reader_counts(r, &counts);
    assert_int_equal(counts.reattached, 3);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

/* A pass that was left early: no seek when the stream has run ahead far enough, a seek when not. */
static void next_pass_seeks_only_when_it_must(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;
    uint64_t number;

    (void)state;
    stage_open(&s);
    r = begun(&s, 1);
    number = seek_number(&s);
    produce(&s, s.layout.pass_bytes + 100);
    call(&c, r, CALL_NEXT_PASS, 0);
    ends_with(&c, 0);
    assert_int_equal(seek_number(&s), number);
    assert_int_equal(atomic_load(&s.ctl->b.consumed), s.layout.pass_bytes);
    call(&c, r, CALL_NEXT_PASS, 0);
    wait_for_seek(&s, number);
    assert_int_equal(s.ctl->b.seek.start, 2 * s.layout.pass_bytes + s.layout.start[0]);
    ack(&s);
    ends_with(&c, 0);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

/* A second computed with the same generation number (its counter was lost) must not take an old
 * acknowledgement for its own. */
static void numbers_go_on_after_a_predecessor(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct call c;
    uint64_t number;

    (void)state;
    stage_open(&s);
    k3_trunk_reader_close(begun(&s, 1));
    number = seek_number(&s);
    r = k3_tf_reader(&s.t, 1);
    call(&c, r, CALL_SEEK_PASS, 0);
    wait_for_seek(&s, number);
    still_waits(&c);
    ack(&s);
    ends_with(&c, 0);
    k3_trunk_reader_close(r);
    stage_close(&s);
}

/* A segment that is there, with a lock that nobody holds, is a dead one. */
static void a_dead_daemons_segment_is_not_attached_to(void **state)
{
    struct stage s;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    stage_open(&s);
    k3_lock_drop(&s.lock_fd);
    assert_int_equal(k3_trunk_reader_open(&r, s.t.instance, s.t.rundir, s.t.m, 1, 200000000, &err),
                     -ENOENT);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    stage_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_seek_waits_for_its_own_number),
        cmocka_unit_test(rows_wait_for_their_last_byte),
        cmocka_unit_test(more_than_the_ring_holds_is_not_believed),
        cmocka_unit_test(an_error_counts_only_behind_what_was_produced),
        cmocka_unit_test(a_new_generation_must_acknowledge_first),
        cmocka_unit_test(next_pass_seeks_only_when_it_must),
        cmocka_unit_test(numbers_go_on_after_a_predecessor),
        cmocka_unit_test(a_dead_daemons_segment_is_not_attached_to),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
