/* The expert arena, both ends: a real k3-expertd, every byte compared with what was written into the shards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "expert_world.h"

#define N_EXPERTS 24u
#define N_LAYERS 6u
#define TOP_K 4u

static const struct k3_xw_shape plain = { .n_layers = N_LAYERS, .n_experts = N_EXPERTS, .top_k = TOP_K,
                                            .latent = 256, .inner = 160, .n_files = 3, .seed = 1 };

static void all_experts(uint16_t *e)
{
    for (uint16_t i = 0; i < N_EXPERTS; i++)
        e[i] = i;
}

/* Everything that one layer of 64 rows can ask for, with hits and misses of every mix. */
static void exercise(struct k3_xw *w, struct k3_expert_client *c, uint32_t n_slots, uint32_t n_random)
{
    struct k3_expert_client_counts before, after;
    uint16_t e[N_EXPERTS];
    uint32_t n_keep = n_slots < 3 ? n_slots : 3;

    all_experts(e);
    k3_expert_client_counts(c, &before);
    for (uint32_t layer = K3_TEST_DENSE; layer < N_LAYERS; layer++)
        k3_xw_layer(w, c, layer, e, N_EXPERTS, n_keep);
    for (uint32_t layer = K3_TEST_DENSE; layer < N_LAYERS; layer++)
        k3_xw_layer(w, c, layer, e, N_EXPERTS, n_slots < 16 ? n_slots : 16);
    k3_expert_client_counts(c, &after);
    assert_int_equal(after.demands - before.demands, 2 * (N_LAYERS - K3_TEST_DENSE) * N_EXPERTS);
    if (n_slots == (N_LAYERS - K3_TEST_DENSE) * N_EXPERTS)
        assert_int_equal(after.hits - before.hits, (N_LAYERS - K3_TEST_DENSE) * N_EXPERTS);
    for (uint32_t i = 0; i < n_random; i++) {
        uint32_t n = 1 + (uint32_t)k3_xw_random(w, i % 8 ? TOP_K : N_EXPERTS);

        k3_xw_pick(w, e, n);
        k3_xw_layer(w, c, K3_TEST_DENSE + (uint32_t)k3_xw_random(w, N_LAYERS - K3_TEST_DENSE), e, n, n_keep);
    }
}

static void run(const struct k3_xw_shape *shape, uint32_t n_slots, uint32_t n_random, const char *const *options)
{
    const char *argv[16] = { "--cache-gb" };
    struct k3_xw w;
    struct k3_expert_client *c;
    char cache[32];
    int n = 2;

    k3_xw_open(&w, shape);
    argv[1] = k3_xw_cache(&w, n_slots, cache, sizeof(cache));
    while (options && *options)
        argv[n++] = *options++;
    k3_xw_daemon_start(&w, argv);
    c = k3_xw_client(&w);
    assert_int_equal(k3_expert_client_slots(c), n_slots);
    exercise(&w, c, n_slots, n_random);
    assert_int_equal(k3_xw_stat(&w, "protocol_errors"), 0);
    assert_int_equal(k3_xw_stat(&w, "errors"), 0);
    assert_int_equal(k3_xw_stat(&w, "demands"), k3_xw_stat(&w, "hits") + k3_xw_stat(&w, "misses"));
    assert_true(k3_xw_stat(&w, "read_bytes") > 0);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

static void minimum_arena(void **state)
{
    (void)state;
    run(&plain, TOP_K, 2000, (const char *const[]){ "--io-block", "16K", NULL });
}

static void middling_arena(void **state)
{
    (void)state;
    run(&plain, 40, 3000, NULL);
}

static void all_resident(void **state)
{
    (void)state;
    run(&plain, (N_LAYERS - K3_TEST_DENSE) * N_EXPERTS, 3000, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(minimum_arena),
        cmocka_unit_test(middling_arena),
        cmocka_unit_test(all_resident),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
