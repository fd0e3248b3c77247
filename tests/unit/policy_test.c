#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
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
    assert_non_null(strstr(k3_policy_names(), "lru"));
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

static void one_slot(void **state)
{
    const struct k3_policy_ops *p = k3_policy_find("lru");
    void *l = p->create(1, 1);

    (void)state;
    p->admitted(l, 0, 0);
    p->touched(l, 0, 0);
    assert_int_equal(p->victim(l, any, NULL), 0);
    p->destroy(l);
    p->destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(oldest_goes_first),
        cmocka_unit_test(skips_what_may_not_go),
        cmocka_unit_test(random_history),
        cmocka_unit_test(one_slot),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
