/* SIGKILL of k3-expertd at random moments while a client works and holds slots: every byte stays right, nothing hangs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "expert_world.h"
#include "shm/stats.h"

#define N_EXPERTS 24u
#define N_LAYERS 5u
#define TOP_K 4u
#define KILLS 20

static const struct k3_xw_shape big = { .n_layers = N_LAYERS, .n_experts = N_EXPERTS, .top_k = TOP_K, .latent = 512,
                                        .inner = 512, .n_files = 3, .seed = 5 };

/* Not on the stack of a test: a test that fails leaves it while the thread is still at work. */
static struct killer {
    struct k3_xw *w;
    uint32_t slots[2]; /* of the arena, alternately */
    const char *io;
    uint64_t random;
    _Atomic bool done, quit;
    bool running;
    pthread_t thread;
} killer;
static struct k3_xw world;

static void wait_for_attach(struct k3_xw *w)
{
    for (int i = 0; i < 4000; i++) {
        struct k3_err err = K3_ERR_INIT;
        struct k3_stats s;
        bool there = false;

        if (k3_stats_open(&s, w->instance, "k3-expertd", &err) == 0) {
            there = s.page->pid == (uint32_t)w->daemon && k3_stats_value(&s, "attaches") > 0;
            k3_stats_close(&s);
        }
        if (there)
            return;
        nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
    }
}

static void *kill_and_restart(void *arg)
{
    struct killer *k = arg;
    char cache[32];

    for (int i = 1; i <= KILLS && !atomic_load_explicit(&k->quit, memory_order_acquire); i++) {
        struct timespec ts = { 0 };

        k->random = k->random * 6364136223846793005ull + 1442695040888963407ull;
        ts.tv_nsec = (long)(k->random >> 33) % 80000000;
        if (i % 5) /* else it may die before the client has found it */
            wait_for_attach(k->w);
        nanosleep(&ts, NULL);
        k3_xw_daemon_kill(k->w);
        if (i % 4 == 0)
            nanosleep(&(struct timespec){ 0, 100000000 }, NULL); /* a slow supervisor */
        k3_xw_daemon_start(k->w, (const char *const[]){ "--cache-gb",
                                                        k3_xw_cache(k->w, k->slots[i % 2], cache, sizeof(cache)), "--io-block",
                                                        "16K", "--io", k->io, NULL });
    }
    atomic_store_explicit(&k->done, true, memory_order_release);
    return NULL;
}

static int stop_killer(void **state)
{
    (void)state;
    if (!killer.running)
        return 0;
    atomic_store_explicit(&killer.quit, true, memory_order_release);
    pthread_join(killer.thread, NULL);
    killer.running = false;
    return 0;
}

static void run(const struct k3_xw_shape *shape, uint32_t even, uint32_t odd, const char *io)
{
    struct k3_expert_client_counts n;
    struct k3_expert_client *c;
    uint16_t e[N_EXPERTS];
    uint32_t layers = 0, keep = even < odd ? even : odd;
    char cache[32];

    k3_xw_open(&world, shape);
    killer = (struct killer){ .w = &world, .slots = { even, odd }, .io = io, .random = even * 1000 + odd };
    k3_xw_daemon_start(&world, (const char *const[]){ "--cache-gb", k3_xw_cache(&world, even, cache, sizeof(cache)),
                                                      "--io-block", "16K", "--io", io, NULL });
    c = k3_xw_client(&world);
    assert_int_equal(pthread_create(&killer.thread, NULL, kill_and_restart, &killer), 0);
    killer.running = true;
    while (!atomic_load_explicit(&killer.done, memory_order_acquire)) {
        uint32_t n_list = layers % 8 ? TOP_K : N_EXPERTS, layer = 1 + layers % (N_LAYERS - 1);

        k3_xw_pick(&world, e, n_list);
        if (layers % 3 == 0)
            k3_expert_client_prefetch(c, 1 + (layer % (N_LAYERS - 1)), e, n_list);
        k3_xw_layer(&world, c, layer, e, n_list, 1 + layers % keep);
        layers++;
    }
    stop_killer(NULL);
    for (uint32_t i = 0; i < 2 * N_LAYERS; i++) {
        for (uint16_t x = 0; x < N_EXPERTS; x++)
            e[x] = x;
        k3_xw_layer(&world, c, 1 + i % (N_LAYERS - 1), e, N_EXPERTS, keep);
    }
    k3_expert_client_counts(c, &n);
    print_message("layers %u demands %lu hits %lu reattached %lu\n", layers, n.demands, n.hits, n.reattached);
    assert_true(n.reattached >= KILLS / 2); /* several kills may fall into one wait */
    assert_int_equal(n.errors, 0);
    assert_int_equal(k3_xw_stat(&world, "protocol_errors"), 0);
    k3_xw_stat_wait(&world, "slots_lent", 0);
    if (even == odd) {
        print_message("taken over %lu renewed %lu\n", k3_xw_log_sum(&world, "taken_over="), k3_xw_log_sum(&world, "renewed="));
        assert_true(k3_xw_log_sum(&world, "taken_over=") > 0);
        assert_true(k3_xw_log_sum(&world, "renewed=") > 0); /* some died in the middle of a read */
    }
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&world), 0);
    k3_xw_close(&world);
}

static void arena_is_taken_over(void **state)
{
    (void)state;
    run(&big, 12, 12, "auto");
}

static void minimum_arena_is_taken_over(void **state)
{
    (void)state;
    run(&big, TOP_K, TOP_K, "auto");
}

static void scattered_with_threads(void **state)
{
    struct k3_xw_shape s = big;

    (void)state;
    s.scattered = true;
    run(&s, 7, 7, "pread");
}

/* Another --cache-gb after each restart: the arena cannot be taken over, and the old one is used until released. */
static void arena_of_another_size(void **state)
{
    (void)state;
    run(&big, 12, 9, "auto");
}

/* What is resident stays so, held slots included, without one read. */
static void take_over_keeps_all(void **state)
{
    struct k3_expert_view v[6];
    struct k3_err err = K3_ERR_INIT;
    struct k3_expert_client *c;
    struct k3_xw w;
    uint16_t e[N_EXPERTS];
    char cache[32];

    (void)state;
    k3_xw_open(&w, &big);
    k3_xw_cache(&w, (N_LAYERS - 1) * N_EXPERTS, cache, sizeof(cache));
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", cache, NULL });
    c = k3_xw_client(&w);
    for (uint16_t x = 0; x < N_EXPERTS; x++)
        e[x] = x;
    for (uint32_t l = 1; l < N_LAYERS; l++)
        k3_xw_layer(&w, c, l, e, N_EXPERTS, 4);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(k3_expert_client_begin(c, 2, e, N_EXPERTS, &err), 0);
        for (int i = 0; i < 6; i++)
            assert_int_equal(k3_expert_client_next(c, &v[i], &err), 0);
        k3_xw_daemon_kill(&w);
        k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", cache, NULL });
        for (int i = 6; i < (int)N_EXPERTS; i++) {
            struct k3_expert_view last;

            assert_int_equal(k3_expert_client_next(c, &last, &err), 0);
            k3_xw_check_view(&w, &last);
            k3_expert_client_release(c, &last);
        }
        for (int i = 0; i < 6; i++) {
            k3_xw_check_view(&w, &v[i]);
            k3_expert_client_release(c, &v[i]);
        }
        for (uint32_t l = 1; l < N_LAYERS; l++)
            k3_xw_layer(&w, c, l, e, N_EXPERTS, 4);
        assert_int_equal(k3_xw_stat(&w, "taken_over"), (N_LAYERS - 1) * N_EXPERTS);
        assert_int_equal(k3_xw_stat(&w, "reads"), 0);
    }
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

/* Both ends die, one after the other. */
static void both_die(void **state)
{
    struct k3_expert_view v;
    struct k3_err err = K3_ERR_INIT;
    struct k3_expert_client *c;
    struct k3_xw w;
    uint16_t e[N_EXPERTS];
    char cache[32];

    (void)state;
    k3_xw_open(&w, &big);
    k3_xw_cache(&w, TOP_K, cache, sizeof(cache));
    for (uint16_t x = 0; x < N_EXPERTS; x++)
        e[x] = x;
    for (uint32_t i = 0; i < 8; i++) {
        k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", cache, "--io-block", "16K", NULL });
        c = k3_xw_client(&w);
        assert_int_equal(k3_expert_client_begin(c, 1 + i % 4, e, N_EXPERTS, &err), 0);
        for (uint32_t n = 0; n < i % TOP_K; n++)
            assert_int_equal(k3_expert_client_next(c, &v, &err), 0);
        k3_xw_daemon_kill(&w); /* slots lent, reads in flight */
        k3_expert_client_close(c);
    }
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", cache, NULL });
    c = k3_xw_client(&w);
    for (uint32_t l = 1; l < N_LAYERS; l++)
        k3_xw_layer(&w, c, l, e, N_EXPERTS, TOP_K);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(arena_is_taken_over, stop_killer),
        cmocka_unit_test_teardown(minimum_arena_is_taken_over, stop_killer),
        cmocka_unit_test_teardown(scattered_with_threads, stop_killer),
        cmocka_unit_test_teardown(arena_of_another_size, stop_killer),
        cmocka_unit_test(take_over_keeps_all),
        cmocka_unit_test(both_die),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
