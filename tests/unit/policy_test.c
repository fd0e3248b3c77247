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
    void *l = p->create(4, 100);

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
    void *l = p->create(3, 100);
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
    void *l = p->create(N, 1000);

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
        void *l = p->create(1, 1);

        p->admitted(l, 0, 0);
        p->touched(l, 0, 0);
        assert_int_equal(p->victim(l, any, NULL), 0);
        p->destroy(l);
        p->destroy(NULL);
    }
}

/* One demand through a policy with slots 0..n-1; true: it was there. */
static bool demand(const struct k3_policy_ops *p, void *l, uint32_t *key_of, uint32_t n, uint32_t key)
{
    uint32_t s = 0;

    while (s < n && key_of[s] != key)
        s++;
    if (s < n) {
        p->touched(l, s, key);
        return true;
    }
    s = p->victim(l, any, NULL);
    assert_in_range(s, 0, n - 1);
    key_of[s] = key;
    p->admitted(l, s, key);
    return false;
}

static void frequent_stays(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    uint32_t key_of[3] = { UINT32_MAX, UINT32_MAX, UINT32_MAX };
    void *l = k3_lfru_create(3, 100, 20);

    (void)state;
    for (int i = 0; i < 5; i++) /* five rounds */
        demand(p, l, key_of, 3, 10);
    /* A scan of experts that never return goes through the other slots. */
    for (uint32_t key = 20; key < 60; key++)
        assert_false(demand(p, l, key_of, 3, key));
    assert_true(demand(p, l, key_of, 3, 10));
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
    for (int i = 0; i < 30; i++)
        p->touched(l, 1, 2);
    assert_int_equal(p->victim(l, any, NULL), 0); /* often, but three half-lives ago */
    p->destroy(l);
}

static void remembers_the_evicted(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    void *l = k3_lfru_create(2, 100, 1000);

    (void)state;
    for (int i = 0; i < 3; i++)
        p->admitted(l, 0, 7); /* evicted each time */
    p->admitted(l, 1, 8);
    p->admitted(l, 0, 9);
    p->touched(l, 0, 9);
    p->admitted(l, 1, 7); /* back, with its past, against two demands */
    assert_int_equal(p->victim(l, any, NULL), 0);
    p->destroy(l);
}

/* Among equals the one that had its turn last goes; what waits for its turn is not taken for less. */
static void of_equals_the_latest(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    void *l = k3_lfru_create(3, 100, 8);

    (void)state;
    for (int round = 0; round < 400; round++)
        for (uint32_t s = 0; s < 3; s++)
            p->touched(l, s, s + 1);
    p->touched(l, 0, 1); /* one more round has come to key 2 */
    p->touched(l, 1, 2);
    assert_int_equal(p->victim(l, any, NULL), 1);
    p->destroy(l);
}

/* Against the sums of the definition. */
static void lfru_random_history(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    enum { N = 19, KEYS = 60 };
    const double half = 37;
    double weight[KEYS] = { 0 };
    uint32_t key_of[N], last_round[KEYS] = { 0 }, round = 0, key_before = 0;
    uint32_t n_at[KEYS] = { 0 }, now = 0, different = 0;
    void *l = k3_lfru_create(N, KEYS, half);

    (void)state;
    srand(11);
    memset(key_of, 0xff, sizeof(key_of));
    for (int t = 0; t < 50000; t++) {
        uint64_t lent = (uint64_t)rand() & (t % 3 ? (uint64_t)rand() : UINT64_MAX);
        uint32_t key = (uint32_t)rand() % KEYS * ((uint32_t)rand() % KEYS) / KEYS, slot = UINT32_MAX;
        double least = 1e300;
        uint32_t want = K3_NO_SLOT, got;

        for (uint32_t s = 0; s < N; s++) {
            uint32_t k = key_of[s];
            double w = k == UINT32_MAX ? -1 : weight[k] * (last_round[k] < round ? exp2(1 / half) : 1);

            if (!(lent >> s & 1) && (w < least - 1e-5 * fabs(least) ||
                                     (w < least + 1e-5 * fabs(least) && w > 0 && n_at[k] > n_at[key_of[want]]))) {
                least = w;
                want = s;
            }
        }
        got = p->victim(l, not_in, &lent);
        assert_true((got == K3_NO_SLOT) == (want == K3_NO_SLOT));
        assert_true(got == K3_NO_SLOT || !(lent >> got & 1));
        different += got != want; /* only by the rounding of scores */
        for (uint32_t s = 0; s < N; s++)
            if (key_of[s] == key)
                slot = s;
        if (slot == UINT32_MAX && got == K3_NO_SLOT)
            continue;
        if (now == 0 || key <= key_before) {
            round++;
            for (uint32_t k = 0; k < KEYS; k++)
                weight[k] *= exp2(-1 / half);
        }
        key_before = key;
        weight[key] += 1;
        last_round[key] = round;
        n_at[key] = ++now;
        if (slot != UINT32_MAX) {
            p->touched(l, slot, key);
        } else {
            p->admitted(l, got, key);
            key_of[got] = key;
        }
    }
    print_message("# %u of 50000 differ\n", different);
    assert_true(different < 50);
    p->destroy(l);
}

/* Rounds of ascending keys: the first of every five steps wants the same expert each time, the others a new one. */
static void play_rounds(uint32_t hits[2], uint32_t n_slots, uint32_t n_steps)
{
    hits[0] = hits[1] = 0;
    for (int i = 0; i < 2; i++) {
        uint32_t key_of[200];
        void *l = policy(i)->create(n_slots, n_steps * 200);

        memset(key_of, 0xff, sizeof(key_of));
        for (uint32_t round = 0; round < 100; round++)
            for (uint32_t d = 0; d < n_steps; d++)
                hits[i] += demand(policy(i), l, key_of, n_slots, d * 200 + (d % 5 ? round + 1 : 0));
        policy(i)->destroy(l);
    }
}

static void smaller_than_a_round(void **state)
{
    uint32_t hits[2];

    (void)state;
    play_rounds(hits, 16, 40);
    assert_int_equal(hits[0], 0);
    assert_true(hits[1] >= 90 * 8);
    play_rounds(hits, 50, 40); /* larger: lru finds all that there is to find, and lfru as much */
    assert_int_equal(hits[0], 99 * 8);
    assert_int_equal(hits[1], 99 * 8);
}

/* Six in ten experts stay from one round to the next and never return once they have gone: only recency tells.  Then four in
 * ten demands are of the same few, the others never return: frequency tells more.  lfru is near the better one in both. */
static void near_the_better(void **state)
{
    enum { SLOTS = 24, ROUND = 20, KEYS = 4000 };
    uint32_t hits[2][2] = { { 0 } };

    (void)state;
    for (int text = 0; text < 2; text++)
        for (int i = 0; i < 2; i++) {
            uint32_t key_of[SLOTS], now[ROUND] = { 0 };
            void *l = policy(i)->create(SLOTS, ROUND * KEYS);

            memset(key_of, 0xff, sizeof(key_of));
            srand(21);
            for (uint32_t round = 0; round < 1500; round++)
                for (uint32_t d = 0; d < ROUND; d++) {
                    uint32_t r = (uint32_t)rand();

                    if (text == 0)
                        now[d] = r % 10 < 6 ? now[d] : round + 1; /* most stay a while */
                    else
                        now[d] = r % 10 < 4 ? 0 : r / 16 % (KEYS - 1) + 1;
                    hits[text][i] += demand(policy(i), l, key_of, SLOTS, d * KEYS + now[d]);
                }
            policy(i)->destroy(l);
        }
    print_message("# recency: lru %u, lfru %u; frequency: lru %u, lfru %u\n", hits[0][0], hits[0][1], hits[1][0],
                  hits[1][1]);
    assert_true(hits[0][1] * 100 > hits[0][0] * 93);
    assert_true(hits[1][1] * 10 > hits[1][0] * 15);
}

/* The same 40 experts every round through 30 slots: lru loses each before its turn. */
static void a_cycle(void **state)
{
    uint32_t hits[2] = { 0, 0 };

    (void)state;
    for (int i = 0; i < 2; i++) {
        uint32_t key_of[30];
        void *l = policy(i)->create(30, 40);

        memset(key_of, 0xff, sizeof(key_of));
        for (uint32_t d = 0; d < 100 * 40; d++)
            hits[i] += demand(policy(i), l, key_of, 30, d % 40);
        policy(i)->destroy(l);
    }
    assert_int_equal(hits[0], 0);
    assert_true(hits[1] >= 95 * 29);
}

/* A cache larger than a round, and a change of mind: what was frequent must not stay. */
static void larger_than_a_round(void **state)
{
    const struct k3_policy_ops *p = &k3_policy_lfru;
    enum { SLOTS = 30, ROUND = 20 };
    uint32_t key_of[SLOTS], misses = 0;
    void *l = p->create(SLOTS, 2000);

    (void)state;
    memset(key_of, 0xff, sizeof(key_of));
    for (uint32_t round = 0; round < 200; round++)
        for (uint32_t d = 0; d < ROUND; d++)
            misses += !demand(p, l, key_of, SLOTS, d + (round < 100 ? 0 : 1000));
    assert_int_equal(misses, 2 * ROUND);
    p->destroy(l);
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
        cmocka_unit_test(of_equals_the_latest),
        cmocka_unit_test(a_cycle),
        cmocka_unit_test(near_the_better),
        cmocka_unit_test(lfru_random_history),
        cmocka_unit_test(smaller_than_a_round),
        cmocka_unit_test(larger_than_a_round),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
