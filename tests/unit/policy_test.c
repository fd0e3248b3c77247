#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "k3-expertd/policy.h"

static bool any(void *arg, uint32_t slot)
{
    (void)arg;
    (void)slot;
    return true;
}

static bool not_in(void *arg, uint32_t slot)
{
    const uint64_t *mask = arg;

    return !(*mask >> slot & 1);
}

static void names(void **state)
{
    (void)state;
    assert_non_null(k3_policy_find("lru"));
    assert_null(k3_policy_find("LRU"));
    assert_null(k3_policy_find(""));
    assert_ptr_equal(k3_policy_find("lfru"), &k3_policy_lfru);
    assert_string_equal(k3_policy_names(), "lru, lfru");
}

static void oldest_goes_first(void **state)
{
    const struct k3_policy_ops *p = k3_policy_find("lru");
    void *l = p->create(4, 100, 8);

    (void)state;
    assert_non_null(l);
    for (uint32_t i = 0; i < 4; i++)
        p->admitted(l, i, 10 + i);
    assert_int_equal(p->victim(l, any, NULL), 0);
    p->touched(l, 0, 10);
    assert_int_equal(p->victim(l, any, NULL), 1);
    p->admitted(l, 1, 50);
    p->touched(l, 2, 12);
    p->touched(l, 2, 12);
    assert_int_equal(p->victim(l, any, NULL), 3);
    p->destroy(l);
}

static void skips_what_may_not_go(void **state)
{
    const struct k3_policy_ops *p = k3_policy_find("lru");
    void *l = p->create(3, 100, 8);
    uint64_t lent = 1;

    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        p->admitted(l, i, i);
    assert_int_equal(p->victim(l, not_in, &lent), 1);
    lent = 3;
    assert_int_equal(p->victim(l, not_in, &lent), 2);
    lent = 7;
    assert_int_equal(p->victim(l, not_in, &lent), K3_NO_SLOT);
    lent = 6;
    assert_int_equal(p->victim(l, not_in, &lent), 0);
    p->destroy(l);
}

/* Against a list of times. */
static void random_history(void **state)
{
    const struct k3_policy_ops *p = k3_policy_find("lru");
    enum { N = 17 };
    uint64_t used[N], now = 0;
    void *l = p->create(N, 1000, 8);

    (void)state;
    srand(7);
    for (uint32_t i = 0; i < N; i++) {
        p->admitted(l, i, i);
        used[i] = now++;
    }
    for (int i = 0; i < 100000; i++) {
        uint32_t slot = (uint32_t)rand() % N, want = K3_NO_SLOT;
        uint64_t lent = (uint64_t)rand() & (uint64_t)rand();

        for (uint32_t s = 0; s < N; s++)
            if (!(lent >> s & 1) && (want == K3_NO_SLOT || used[s] < used[want]))
                want = s;
        assert_int_equal(p->victim(l, not_in, &lent), want);
        (rand() % 2 ? p->touched : p->admitted)(l, slot, slot);
        used[slot] = now++;
    }
    p->destroy(l);
}

static const struct k3_policy_ops *const all[2] = { NULL, &k3_policy_lfru };
static const struct k3_policy_ops *policy(int i)
{
    return all[i] ? all[i] : k3_policy_find("lru");
}

static void one_slot(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct k3_policy_ops *p = policy(i);
        void *l = p->create(1, 1, 1);

        p->admitted(l, 0, 0);
        p->touched(l, 0, 0);
        assert_int_equal(p->victim(l, any, NULL), 0);
        p->destroy(l);
        p->destroy(NULL);
    }
}

static void frequent_stays(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    void *l = p->create(3, 100, 50); /* a half-life of 100 demands */

    (void)state;
    p->admitted(l, 0, 10);
    for (int i = 0; i < 5; i++)
        p->touched(l, 0, 10);
    p->admitted(l, 1, 11);
    p->admitted(l, 2, 12);
    assert_int_equal(p->victim(l, any, NULL), 1); /* once, and the longest ago */
    /* A scan of experts that never return goes through the other slots. */
    for (uint32_t key = 20; key < 60; key++) {
        uint32_t slot = p->victim(l, any, NULL);

        assert_int_not_equal(slot, 0);
        p->admitted(l, slot, key);
    }
    p->destroy(l);
}

static void frequency_is_forgotten(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    void *l = k3_lfru_create(2, 100, 10);

    (void)state;
    p->admitted(l, 0, 1);
    for (int i = 0; i < 50; i++)
        p->touched(l, 0, 1);
    p->admitted(l, 1, 2);
    for (int i = 0; i < 20; i++)
        p->touched(l, 1, 2);
    assert_int_equal(p->victim(l, any, NULL), 0); /* often, but two half-lives ago */
    p->destroy(l);
}

static void remembers_the_evicted(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    void *l = k3_lfru_create(2, 100, 1000);

    (void)state;
    for (int i = 0; i < 3; i++)
        p->admitted(l, 0, 7); /* evicted each time by an expert seen once */
    p->admitted(l, 1, 8);
    p->admitted(l, 0, 9);
    p->admitted(l, 1, 7); /* back, with its past */
    p->touched(l, 0, 9);
    assert_int_equal(p->victim(l, any, NULL), 0); /* two demands against four */
    p->destroy(l);
}

/* Against the sums of the definition. */
static void lfru_random_history(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    enum { N = 19, KEYS = 60 };
    const double half = 37;
    double weight[KEYS] = { 0 };
    uint32_t key_of[N];
    void *l = k3_lfru_create(N, KEYS, half);

    (void)state;
    srand(11);
    for (uint32_t s = 0; s < N; s++)
        key_of[s] = UINT32_MAX;
    for (int t = 0; t < 50000; t++) {
        uint64_t lent = (uint64_t)rand() & (t % 3 ? (uint64_t)rand() : UINT64_MAX);
        uint32_t key = (uint32_t)rand() % KEYS * ((uint32_t)rand() % KEYS) / KEYS, slot = UINT32_MAX;
        double least = HUGE_VAL;
        uint32_t want = K3_NO_SLOT, got;

        for (uint32_t s = 0; s < N; s++) {
            double w = key_of[s] == UINT32_MAX ? -1 : weight[key_of[s]];

            if (!(lent >> s & 1) && w < least) {
                least = w;
                want = s;
            }
        }
        got = p->victim(l, not_in, &lent);
        if (got != want) /* equal but for rounding */
            assert_true(got != K3_NO_SLOT && want != K3_NO_SLOT && !(lent >> got & 1) &&
                        fabs(weight[key_of[got]] - least) < 1e-9 * least);
        for (uint32_t s = 0; s < N; s++)
            if (key_of[s] == key)
                slot = s;
        for (uint32_t k = 0; k < KEYS; k++)
            weight[k] *= exp2(-1 / half);
        weight[key] += 1;
        if (slot != UINT32_MAX) {
            p->touched(l, slot, key);
        } else if (got != K3_NO_SLOT) {
            p->admitted(l, got, key);
            key_of[got] = key;
        } else {
            weight[key] -= 1; /* nothing was demanded after all */
            for (uint32_t k = 0; k < KEYS; k++)
                weight[k] *= exp2(1 / half);
        }
    }
    p->destroy(l);
}

/* A cache far below one round of demands, some of which return every time and some never: lru hits nothing. */
static void smaller_than_a_round(void **state)
{
    uint32_t hits[2] = { 0, 0 };
    enum { SLOTS = 16, ROUND = 40, STEADY = 8 };

    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct k3_policy_ops *p = policy(i);
        uint32_t key_of[SLOTS], next = STEADY;
        void *l = p->create(SLOTS, 10000, ROUND);

        memset(key_of, 0xff, sizeof(key_of));
        for (int round = 0; round < 100; round++)
            for (uint32_t d = 0; d < ROUND; d++) {
                uint32_t key = d % 5 == 0 ? d / 5 : next++, s = 0;

                while (s < SLOTS && key_of[s] != key)
                    s++;
                if (s < SLOTS) {
                    hits[i]++;
                    p->touched(l, s, key);
                } else {
                    s = p->victim(l, any, NULL);
                    key_of[s] = key;
                    p->admitted(l, s, key);
                }
            }
        p->destroy(l);
    }
    assert_int_equal(hits[0], 0);
    assert_true(hits[1] >= 90 * STEADY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(oldest_goes_first),
        cmocka_unit_test(skips_what_may_not_go),
        cmocka_unit_test(random_history),
        cmocka_unit_test(one_slot),
        cmocka_unit_test(frequent_stays),
        cmocka_unit_test(frequency_is_forgotten),
        cmocka_unit_test(remembers_the_evicted),
        cmocka_unit_test(lfru_random_history),
        cmocka_unit_test(smaller_than_a_round),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
