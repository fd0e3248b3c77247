/* k3-computed/prefix.c: the store of snapshots, without an engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/pass_private.h"
#include "k3-computed/prefix.h"

#define CTX 8u

static struct k3_config cfg;
static struct k3_prefix p;

static int open_three(void **state)
{
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    memset(&cfg, 0, sizeof(cfg));
    cfg.n_layers = 2;
    cfg.kda_heads = cfg.kda_dim = 2;
    cfg.conv_taps = 3;
    cfg.kv_lora = 5;
    cfg.qk_rope = 2;
    cfg.kind[0] = K3_KDA;
    cfg.kind[1] = K3_MLA;
    return k3_prefix_open(&p, 3, &cfg, CTX, &err);
}

static int close_it(void **state)
{
    (void)state;
    k3_prefix_close(&p);
    return 0;
}

/* What a caller does to keep these ids. */
static struct k3_snapshot *keep(const uint32_t *ids, uint32_t n, uint64_t of)
{
    struct k3_snapshot *s = k3_prefix_room(&p, NULL, 0);

    assert_non_null(s);
    k3_prefix_begin(s, ids, n, of);
    k3_prefix_settle(&p, s, true);
    return s;
}

static void the_longest_whole_beginning_is_found(void **state)
{
    static const uint32_t a[CTX] = { 1, 2, 3, 4, 5, 6, 7, 8 }, b[CTX] = { 1, 2, 9, 4, 5, 6, 7, 8 };
    struct k3_snapshot *two, *five;

    (void)state;
    assert_null(k3_prefix_find(&p, a, CTX));
    two = keep(a, 2, 1);
    five = keep(a, 5, 1);
    assert_ptr_equal(k3_prefix_find(&p, a, CTX), five);
    assert_ptr_equal(k3_prefix_find(&p, a, 5), five);
    assert_ptr_equal(k3_prefix_find(&p, a, 4), two); /* five ids cannot be made four */
    assert_ptr_equal(k3_prefix_find(&p, b, CTX), two);
    assert_null(k3_prefix_find(&p, a, 1));
    assert_null(k3_prefix_find(&p, a + 1, CTX - 1)); /* the same ids at other positions are others */
    assert_ptr_equal(k3_prefix_exact(&p, a, 5), five);
    assert_null(k3_prefix_exact(&p, b, 5));
    assert_null(k3_prefix_exact(&p, a, 4));
    keep(b, 8, 1);
    assert_int_equal(k3_prefix_find(&p, b, CTX)->n, 8); /* room for --ctx ids */
}

static void the_least_recently_used_gives_way(void **state)
{
    static const uint32_t a[] = { 1 }, b[] = { 2 }, c[] = { 3 }, d[] = { 4 };
    struct k3_snapshot *s;

    (void)state;
    keep(a, 1, 0);
    keep(b, 1, 0);
    keep(c, 1, 0);
    k3_prefix_touch(&p, k3_prefix_find(&p, a, 1));
    keep(d, 1, 0);
    assert_null(k3_prefix_find(&p, b, 1));
    assert_non_null(k3_prefix_find(&p, a, 1));
    assert_non_null(k3_prefix_find(&p, c, 1));
    s = k3_prefix_find(&p, a, 1);
    k3_prefix_clear(s); /* an empty one comes before the oldest */
    assert_ptr_equal(k3_prefix_room(&p, NULL, 0), s);
    assert_null(k3_prefix_find(&p, a, 1));
}

static void what_is_busy_stays(void **state)
{
    static const uint32_t a[] = { 1, 1 }, b[] = { 2, 2 }, c[] = { 3, 3 };
    struct k3_snapshot *s, *reading;

    (void)state;
    reading = keep(a, 2, 0);
    keep(b, 2, 0);
    reading->n_busy++;
    s = k3_prefix_room(&p, NULL, 0);
    k3_prefix_begin(s, c, 2, 7);
    assert_null(k3_prefix_find(&p, c, 2)); /* not there yet, but known to come */
    assert_ptr_equal(k3_prefix_exact(&p, c, 2), s);
    assert_ptr_equal(k3_prefix_room(&p, NULL, 0), k3_prefix_find(&p, b, 2));
    k3_prefix_find(&p, b, 2)->n_busy++;
    assert_null(k3_prefix_room(&p, NULL, 0));
    k3_prefix_settle(&p, s, false); /* the pass failed */
    assert_null(k3_prefix_exact(&p, c, 2));
    assert_ptr_equal(k3_prefix_room(&p, NULL, 0), s);
    assert_non_null(k3_prefix_find(&p, a, 2)); /* what is read can be found, too */
}

static void beginnings_of_the_same_ids_can_stay(void **state)
{
    static const uint32_t a[] = { 1, 2, 3, 4 }, b[] = { 9, 9 };
    struct k3_snapshot *point, *other, *progress;

    (void)state;
    point = keep(a, 2, 5);
    other = keep(b, 2, 4);
    progress = keep(a, 3, 5);
    progress->progress = true;
    assert_ptr_equal(k3_prefix_progress(&p, 5), progress);
    assert_null(k3_prefix_progress(&p, 4));
    assert_ptr_equal(k3_prefix_room(&p, NULL, 0), point);
    assert_ptr_equal(k3_prefix_room(&p, a, 4), other);
    assert_ptr_equal(k3_prefix_room(&p, a, 1), point); /* what is longer than all that is to be kept */
    other->n_busy++;
    assert_null(k3_prefix_room(&p, a, 4));
    k3_prefix_clear(progress);
    assert_null(k3_prefix_progress(&p, 5));
    assert_ptr_equal(k3_prefix_room(&p, a, 4), progress); /* an empty one */
}

static void sizes(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_prefix q;

    (void)state;
    assert_int_equal(k3_prefix_bytes(&cfg, CTX, 0), 0);
    assert_int_equal(k3_prefix_bytes(&cfg, CTX, 3), 3 * (k3_state_bytes(&cfg, CTX) + 4 * CTX + sizeof(struct k3_snapshot)));
    cfg.kda_dim = 0xffffffffu; /* no overflow */
    assert_true(k3_prefix_bytes(&cfg, CTX, 3) == UINT64_MAX);
    cfg.kda_dim = 2;
    assert_int_equal(k3_prefix_open(&q, K3_SNAPSHOTS_MAX + 1, &cfg, CTX, &err), -22);
    assert_non_null(strstr(err.text, "at most 1024"));
    k3_prefix_close(&q);
    assert_int_equal(k3_prefix_open(&q, 0, &cfg, CTX, &err), 0); /* none is no error */
    assert_null(k3_prefix_room(&q, NULL, 0));
    assert_null(k3_prefix_find(&q, (const uint32_t[]){ 1 }, 1));
    k3_prefix_close(&q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_longest_whole_beginning_is_found, open_three, close_it),
        cmocka_unit_test_setup_teardown(the_least_recently_used_gives_way, open_three, close_it),
        cmocka_unit_test_setup_teardown(what_is_busy_stays, open_three, close_it),
        cmocka_unit_test_setup_teardown(beginnings_of_the_same_ids_can_stay, open_three, close_it),
        cmocka_unit_test_setup_teardown(sizes, open_three, close_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
