/* The expert arena, both ends: a real k3-expertd, every byte compared with what was written into the shards. */
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
#include <sys/wait.h>
#include <time.h>
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
    for (uint32_t layer = K3_XW_DENSE; layer < N_LAYERS; layer++)
        k3_xw_layer(w, c, layer, e, N_EXPERTS, n_keep);
    for (uint32_t layer = K3_XW_DENSE; layer < N_LAYERS; layer++)
        k3_xw_layer(w, c, layer, e, N_EXPERTS, n_slots < 16 ? n_slots : 16);
    k3_expert_client_counts(c, &after);
    assert_int_equal(after.demands - before.demands, 2 * (N_LAYERS - K3_XW_DENSE) * N_EXPERTS);
    if (n_slots == (N_LAYERS - K3_XW_DENSE) * N_EXPERTS)
        assert_int_equal(after.hits - before.hits, (N_LAYERS - K3_XW_DENSE) * N_EXPERTS);
    for (uint32_t i = 0; i < n_random; i++) {
        uint32_t n = 1 + (uint32_t)k3_xw_random(w, i % 8 ? TOP_K : N_EXPERTS);

        k3_xw_pick(w, e, n);
        k3_xw_layer(w, c, K3_XW_DENSE + (uint32_t)k3_xw_random(w, N_LAYERS - K3_XW_DENSE), e, n, n_keep);
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
    run(&plain, (N_LAYERS - K3_XW_DENSE) * N_EXPERTS, 3000, NULL);
}

static void scattered_experts(void **state)
{
    struct k3_xw_shape s = plain;

    (void)state;
    s.scattered = true;
    s.seed = 2;
    run(&s, TOP_K, 1000, NULL);
    s.two_devices = true;
    run(&s, 30, 1000, (const char *const[]){ "--io-block", "4K", "--io-depth", "3", NULL });
}

static void two_devices(void **state)
{
    struct k3_xw_shape s = plain;

    (void)state;
    s.two_devices = true;
    run(&s, 12, 1000, NULL);
}

static void ways_of_reading_are_equal(void **state)
{
    (void)state;
    run(&plain, 9, 500, (const char *const[]){ "--io", "uring", NULL });
    run(&plain, 9, 500, (const char *const[]){ "--io", "pread", NULL });
    run(&plain, 9, 500, (const char *const[]){ "--direct", "off", NULL });
    run(&plain, 9, 500, (const char *const[]){ "--direct", "off", "--io", "pread", "--io-block", "8K", NULL });
    run(&plain, 9, 500, (const char *const[]){ "--io-depth", "1", "--io-block", "32K", NULL });
    run(&plain, 9, 500, (const char *const[]){ "--io-depth", "64", "--io-block", "4K", NULL });
}

static void top_1(void **state)
{
    struct k3_xw_shape s = plain;

    (void)state;
    s.top_k = 1;
    run(&s, 1, 1000, NULL);
}

static void wait_for_stat(struct k3_xw *w, const char *name, uint64_t least)
{
    for (int i = 0; i < 2000 && k3_xw_stat(w, name) < least; i++)
        usleep(5000);
    assert_true(k3_xw_stat(w, name) >= least);
}

static void prefetch_then_demand(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c;
    struct k3_expert_client_counts n;
    uint16_t e[8] = { 0, 3, 4, 9, 11, 17, 20, 23 };
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 16, cache, sizeof(cache)), NULL });
    c = k3_xw_client(&w);
    k3_expert_client_prefetch(c, 0, e, 8); /* a dense layer: nothing */
    k3_expert_client_prefetch(c, 2, e, 8);
    wait_for_stat(&w, "slots_ready", 8);
    assert_int_equal(k3_xw_stat(&w, "prefetches"), 8);
    k3_xw_layer(&w, c, 2, e, 8, 8);
    k3_expert_client_counts(c, &n);
    assert_int_equal(n.hits, 8);
    assert_int_equal(k3_xw_stat(&w, "prefetch_hits"), 8);

    /* At once: whatever the demand finds of the prefetch, every expert is read once. */
    for (uint32_t round = 0; round < 200; round++) {
        uint64_t bytes = k3_xw_stat(&w, "read_bytes");
        uint32_t layer = 1 + round % 5;

        k3_xw_pick(&w, e, 8);
        k3_expert_client_prefetch(c, layer, e, 8);
        k3_xw_layer(&w, c, layer, e, 8, 4);
        assert_true(k3_xw_stat(&w, "read_bytes") - bytes <= 8 * w.m->expert_slot_bytes);
    }

    /* No slot free: dropped, and the demands are served all the same. */
    uint16_t all[N_EXPERTS], other[N_EXPERTS];
    struct k3_expert_view v[16];
    struct k3_err err = K3_ERR_INIT;

    all_experts(all);
    memcpy(other, all, sizeof(other));
    assert_int_equal(k3_expert_client_begin(c, 3, all, N_EXPERTS, &err), 0);
    for (int i = 0; i < 16; i++)
        assert_int_equal(k3_expert_client_next(c, &v[i], &err), 0);
    uint64_t dropped = k3_xw_stat(&w, "prefetch_dropped");
    k3_expert_client_prefetch(c, 4, other, 5);
    wait_for_stat(&w, "prefetch_dropped", dropped + 5);
    assert_int_equal(k3_expert_client_next(c, &v[0], &err), -EDEADLK);
    for (int i = 0; i < 16; i++) {
        k3_xw_check_view(&w, &v[i]);
        k3_expert_client_release(c, &v[i]);
    }
    k3_expert_client_abandon(c);
    k3_xw_layer(&w, c, 4, all, N_EXPERTS, 1);
    assert_int_equal(k3_xw_stat(&w, "protocol_errors"), 0);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

/* A computed that dies (here: its memory is simply forgotten) leaves slots lent and demands queued. */
static void new_client_finds_all_slots(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c;
    struct k3_expert_view v;
    struct k3_err err = K3_ERR_INIT;
    uint16_t e[N_EXPERTS];
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, TOP_K, cache, sizeof(cache)), NULL });
    all_experts(e);
    for (uint32_t i = 0; i < 30; i++) {
        pid_t pid = fork();
        int status;

        w.generation++;
        if (pid == 0) {
            uint32_t layer = 1 + i % 5, n = i % (TOP_K + 1);

            w.generation--;
            c = k3_xw_client(&w);
            if (k3_expert_client_begin(c, layer, e, N_EXPERTS, &err) < 0)
                _exit(1);
            while (n--)
                if (k3_expert_client_next(c, &v, &err) < 0)
                    _exit(1);
            _exit(0); /* nothing released, nothing closed */
        }
        waitpid(pid, &status, 0);
        assert_int_equal(status, 0);
    }
    c = k3_xw_client(&w);
    k3_xw_stat_wait(&w, "slots_lent", 0);
    exercise(&w, c, TOP_K, 200);
    assert_int_equal(k3_xw_stat(&w, "attaches"), 31);
    assert_int_equal(k3_xw_stat(&w, "protocol_errors"), 0);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

static void abandon_in_the_middle(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c;
    struct k3_err err = K3_ERR_INIT;
    uint16_t e[N_EXPERTS];
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)), NULL });
    c = k3_xw_client(&w);
    for (uint32_t i = 0; i < 500; i++) {
        uint32_t n = 1 + (uint32_t)k3_xw_random(&w, N_EXPERTS), layer = 1 + (uint32_t)k3_xw_random(&w, 5);
        uint32_t take = (uint32_t)k3_xw_random(&w, n < 6 ? n + 1 : 7);
        struct k3_expert_view v;

        k3_xw_pick(&w, e, n);
        assert_int_equal(k3_expert_client_begin(c, layer, e, n, &err), 0);
        while (take--) {
            assert_int_equal(k3_expert_client_next(c, &v, &err), 0);
            k3_xw_check_view(&w, &v);
            if (k3_xw_random(&w, 2))
                k3_expert_client_release(c, &v);
        }
        k3_expert_client_abandon(c);
        k3_expert_client_abandon(c);
    }
    exercise(&w, c, 6, 100);
    k3_xw_daemon_kill(&w); /* and with nobody there it does not hang */
    k3_xw_pick(&w, e, 5);
    assert_int_equal(k3_expert_client_begin(c, 1, e, 5, &err), 0);
    k3_expert_client_abandon(c);
    k3_expert_client_close(c);
    k3_xw_close(&w);
}

static void misuse_is_told(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c;
    struct k3_expert_view v;
    struct k3_err err = K3_ERR_INIT;
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)), NULL });
    c = k3_xw_client(&w);
    assert_int_equal(k3_expert_client_begin(c, 0, (uint16_t[]){ 1 }, 1, &err), -EINVAL);
    assert_int_equal(k3_expert_client_begin(c, N_LAYERS, (uint16_t[]){ 1 }, 1, &err), -EINVAL);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ N_EXPERTS }, 1, &err), -EINVAL);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ 2, 2 }, 2, &err), -EINVAL);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ 3, 2 }, 2, &err), -EINVAL);
    assert_int_equal(k3_expert_client_next(c, &v, &err), -ENOENT);
    assert_int_equal(k3_expert_client_begin(c, 1, NULL, 0, &err), 0);
    assert_int_equal(k3_expert_client_next(c, &v, &err), -ENOENT);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ 2, 3 }, 2, &err), 0);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ 2, 3 }, 2, &err), -EBUSY);
    assert_int_equal(k3_expert_client_next(c, &v, &err), 0);
    k3_expert_client_release(c, &v);
    k3_expert_client_release(c, &v); /* twice is once */
    assert_int_equal(k3_expert_client_next(c, &v, &err), 0);
    k3_expert_client_release(c, &v);
    exercise(&w, c, 6, 20);
    assert_int_equal(k3_xw_stat(&w, "protocol_errors"), 0);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

static void stop_ends_a_wait(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c;
    struct k3_expert_view v;
    struct k3_err err = K3_ERR_INIT;
    _Atomic bool stop = false;
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)), NULL });
    c = k3_xw_client(&w);
    k3_expert_client_set_stop(c, &stop);
    k3_xw_daemon_kill(&w);
    assert_int_equal(k3_expert_client_begin(c, 1, (uint16_t[]){ 2, 3 }, 2, &err), 0);
    atomic_store_explicit(&stop, true, memory_order_release);
    assert_int_equal(k3_expert_client_next(c, &v, &err), -ECANCELED);
    k3_expert_client_abandon(c);
    atomic_store_explicit(&stop, false, memory_order_release);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", cache, NULL });
    exercise(&w, c, 6, 20); /* and goes on afterwards */
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

static void nobody_there(void **state)
{
    struct k3_xw w;
    struct k3_expert_client *c = NULL;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    k3_xw_open(&w, &plain);
    assert_int_equal(k3_expert_client_open(&c, w.instance, w.rundir, w.m, 1, 50000000, &err), -ETIMEDOUT);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    assert_null(c);
    k3_xw_close(&w);
}

static void other_checkpoint_is_refused(void **state)
{
    struct k3_xw_shape s = plain;
    struct k3_xw w, other;
    struct k3_expert_client *c = NULL;
    struct k3_err err = K3_ERR_INIT;
    char cache[32];

    (void)state;
    k3_xw_open(&w, &plain);
    s.seed = 99; /* the same shape, other places in the shards */
    k3_xw_open(&other, &s);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)), NULL });
    k3_xw_log_wait(&w, "event=ready");
    assert_int_equal(k3_expert_client_open(&c, w.instance, w.rundir, other.m, 1, 5000000000, &err), -ESTALE);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "--model"));
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&other);
    k3_xw_close(&w);
}

struct opening {
    struct k3_expert_client *c;
    struct k3_xw *at;
    const struct k3_model *m;
    struct k3_err err;
    int rc;
};
static void *open_client(void *arg)
{
    struct opening *o = arg;

    o->rc = k3_expert_client_open(&o->c, o->at->instance, o->at->rundir, o->m, 1, 20000000000ull, &o->err);
    return NULL;
}

/* Everything was killed and comes up with another model: the new expertd holds the lock a moment before it replaces what
 * the dead one left, and that must not be taken for the new one's word. */
static void stale_segment_of_another_checkpoint(void **state)
{
    struct k3_xw_shape s = plain;
    struct k3_xw w, other, next;
    struct opening o = { .err = K3_ERR_INIT };
    pthread_t thread;
    uint32_t generation;
    char cache[32];
    int lock;

    (void)state;
    k3_xw_open(&w, &plain);
    s.seed = 99;
    k3_xw_open(&other, &s);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)), NULL });
    k3_xw_log_wait(&w, "event=ready");
    k3_xw_daemon_kill(&w);
    assert_int_equal(k3_lock_take(&lock, &generation, w.rundir, "k3-expertd", &o.err), 0);
    o.at = &w;
    o.m = other.m;
    assert_int_equal(pthread_create(&thread, NULL, open_client, &o), 0);
    nanosleep(&(struct timespec){ 0, 300000000 }, NULL);
    k3_lock_drop(&lock);
    next = other; /* its model in the place of the dead one */
    memcpy(next.instance, w.instance, sizeof(next.instance));
    memcpy(next.rundir, w.rundir, sizeof(next.rundir));
    k3_xw_daemon_start(&next, (const char *const[]){ "--cache-gb", k3_xw_cache(&next, 6, cache, sizeof(cache)), NULL });
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(o.rc, 0);
    k3_expert_client_close(o.c);
    assert_int_equal(k3_xw_daemon_stop(&next), 0);
    k3_xw_close(&other);
    k3_xw_close(&w);
}

/* A shard cut short while it is being served: its experts fail by name, all others go on. */
static void truncated_shard(void **state)
{
    struct k3_xw_shape s = plain;
    struct k3_expert_client *c;
    struct k3_xw w;
    uint32_t n_bad = 0, n_good = 0;
    char path[160], cache[32];

    (void)state;
    s.n_files = 2;
    k3_xw_open(&w, &s);
    k3_xw_daemon_start(&w, (const char *const[]){ "--cache-gb", k3_xw_cache(&w, 6, cache, sizeof(cache)),
                                                  "--io-block", "16K", NULL });
    c = k3_xw_client(&w);
    k3_xw_shard_path(&w, 1, path, sizeof(path));
    assert_int_equal(truncate(path, 1000000), 0);
    for (uint32_t layer = 1; layer < N_LAYERS; layer++)
        for (uint16_t e = 0; e < N_EXPERTS; e++) {
            size_t first = ((size_t)(layer - K3_XW_DENSE) * N_EXPERTS + e) * K3_EXPERT_TENSORS;
            bool cut = false;
            struct k3_err err = K3_ERR_INIT;
            struct k3_expert_view v;

            for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++)
                cut = cut || (w.place[first + t].file == 1 && w.place[first + t].off_bytes + w.len_bytes[t] > 1000000);
            assert_int_equal(k3_expert_client_begin(c, layer, &e, 1, &err), 0);
            if (!cut) {
                assert_int_equal(k3_expert_client_next(c, &v, &err), 0);
                k3_xw_check_view(&w, &v);
                k3_expert_client_release(c, &v);
                n_good++;
                continue;
            }
            n_bad++;
            assert_int_equal(k3_expert_client_next(c, &v, &err), -EIO);
            assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
            assert_non_null(strstr(err.text, path));
            assert_non_null(strstr(err.text, "offset"));
            k3_expert_client_abandon(c);
        }
    assert_true(n_bad > 5 && n_good > 5);
    assert_int_equal(k3_xw_stat(&w, "errors"), n_bad);
    assert_true(k3_xw_stat(&w, "retries") >= 3 * n_bad);
    k3_xw_stat_wait(&w, "slots_lent", 0);
    assert_int_equal(unlink(path), 0); /* an open file is not lost with its name */
    k3_xw_layer(&w, c, w.place[0].file == 0 ? 1 : 2, (uint16_t[]){ 0 }, 0, 1);
    k3_expert_client_close(c);
    assert_int_equal(k3_xw_daemon_stop(&w), 0);
    k3_xw_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(minimum_arena),
        cmocka_unit_test(middling_arena),
        cmocka_unit_test(all_resident),
        cmocka_unit_test(scattered_experts),
        cmocka_unit_test(two_devices),
        cmocka_unit_test(ways_of_reading_are_equal),
        cmocka_unit_test(top_1),
        cmocka_unit_test(prefetch_then_demand),
        cmocka_unit_test(new_client_finds_all_slots),
        cmocka_unit_test(abandon_in_the_middle),
        cmocka_unit_test(misuse_is_told),
        cmocka_unit_test(stop_ends_a_wait),
        cmocka_unit_test(nobody_there),
        cmocka_unit_test(other_checkpoint_is_refused),
        cmocka_unit_test(stale_segment_of_another_checkpoint),
        cmocka_unit_test(truncated_shard),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
