/* tests/unit/plan_test.c: tools/plan*.c on the released shape, which needs no files. */
#include "tools/plan.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/engine.h"
#include "k3-expertd/expertd.h"

#define GIB ((uint64_t)1 << 30)

static struct k3_model *m;

static struct k3_plan_opts opts(uint64_t memory_bytes)
{
    return (struct k3_plan_opts){ .memory_bytes = memory_bytes, .trunk_bytes = K3_PLAN_UNSET, .cache_bytes = K3_PLAN_UNSET,
                                  .ctx = 4096, .sequences = 1, .threads = 8, .snapshots = K3_PLAN_CHOOSE };
}

static struct k3_plan_machine machine(uint64_t left_bytes)
{
    return (struct k3_plan_machine){ .left_bytes = left_bytes, .why = "MemAvailable", .shm_bytes = K3_MEMORY_NONE };
}

static uint64_t sum_of(const struct k3_plan *p)
{
    uint64_t n = 0;

    for (int i = 0; i < K3_N_PLAN; i++)
        n += p->part[i];
    return n;
}

static void the_promise_is_kept_and_used(void **state)
{
    static const uint32_t sizes[] = { 2, 3, 4, 8, 16, 64, 128, 512 };
    struct k3_plan_machine mc = machine(1024 * GIB);
    struct k3_err err = K3_ERR_INIT;
    uint64_t before = UINT64_MAX;

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct k3_plan_opts o = opts(sizes[i] * GIB);
        struct k3_plan p;

        assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
        assert_true(p.sum_bytes == sum_of(&p));
        assert_true(p.sum_bytes <= sizes[i] * GIB);
        assert_true((double)p.sum_bytes >= .97 * (double)(sizes[i] * GIB));
        assert_true(p.part[K3_PLAN_STATE] + p.part[K3_PLAN_KV] == k3_state_bytes(&m->cfg, 4096));
        assert_true(p.part[K3_PLAN_ROWS] == k3_pass_bytes(&m->cfg, p.opts.batch_rows));
        assert_true(p.trunk_read_bytes + p.expert_read_bytes < before); /* more memory, fewer reads */
        before = p.trunk_read_bytes + p.expert_read_bytes;
    }
}

/* What a prompt costs: 512 tokens are one pass wherever there are 8 GiB. */
static void rows_of_a_pass_by_the_memory(void **state)
{
    static const struct { uint32_t gib, sequences, rows; } is[] = {
        { 2, 1, 128 }, { 4, 1, 256 }, { 8, 1, 512 }, { 16, 1, 1024 }, { 24, 1, 1024 }, { 64, 1, 2048 }, { 512, 1, 2048 },
        { 4, 2, 256 }, { 16, 2, 512 }, { 64, 8, 512 },
    };
    struct k3_plan_machine mc = machine(1024 * GIB);
    struct k3_plan p;

    (void)state;
    for (size_t i = 0; i < sizeof(is) / sizeof(is[0]); i++) {
        struct k3_plan_opts o = opts(is[i].gib * GIB);

        o.sequences = is[i].sequences;
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
        if (p.opts.batch_rows != is[i].rows)
            fail_msg("%u GiB, %u sequences: %u rows instead of %u", is[i].gib, is[i].sequences, p.opts.batch_rows, is[i].rows);
        assert_int_equal(p.part[K3_PLAN_ROWS], k3_pass_bytes(&m->cfg, is[i].rows));
        assert_true(p.part[K3_PLAN_ROWS] <= is[i].gib * GIB / 24);
        assert_true(p.sum_bytes <= is[i].gib * GIB);
        o.batch_rows = 100; /* given */
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
        assert_int_equal(p.opts.batch_rows, 100);
        assert_int_equal(p.part[K3_PLAN_ROWS], k3_pass_bytes(&m->cfg, 100));
        o.batch_rows = 0;
        o.trunk_bytes = p.trunk_bytes; /* budgets that were given leave less: the rows give way */
        o.cache_bytes = p.cache_bytes;
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
        assert_in_range(p.opts.batch_rows, 64, is[i].rows);
        assert_true(p.sum_bytes <= is[i].gib * GIB);
        o.trunk_bytes = o.cache_bytes = K3_PLAN_UNSET;
        o.ctx = 128; /* no more rows than there are positions */
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
        assert_int_equal(p.opts.batch_rows, 128);
    }
}

/* What a conversation costs: an eighth of the memory at most, three a sequence, and none where that is too little for one. */
static void snapshots_by_the_memory(void **state)
{
    static const struct { uint32_t gib, sequences, ctx, snapshots; } is[] = {
        { 2, 1, 4096, 0 }, { 4, 1, 4096, 0 }, { 8, 1, 4096, 1 }, { 12, 1, 4096, 2 }, { 16, 1, 4096, 3 }, { 64, 1, 4096, 3 },
        { 8, 4, 4096, 1 }, { 64, 4, 4096, 12 }, { 16, 1, 65536, 0 }, { 64, 1, 65536, 2 },
    };
    struct k3_plan_machine mc = machine(1024 * GIB);
    struct k3_err err = K3_ERR_INIT;
    struct k3_plan p;
    struct k3_plan_opts o;

    (void)state;
    for (size_t i = 0; i < sizeof(is) / sizeof(is[0]); i++) {
        o = opts(is[i].gib * GIB);
        o.sequences = is[i].sequences;
        o.ctx = is[i].ctx;
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
        if (p.opts.snapshots != is[i].snapshots)
            fail_msg("%u GiB, %u sequences of %u: %u snapshots instead of %u", is[i].gib, is[i].sequences, is[i].ctx,
                     p.opts.snapshots, is[i].snapshots);
        assert_true(p.part[K3_PLAN_SNAPSHOTS] == k3_prefix_bytes(&m->cfg, is[i].ctx, is[i].snapshots));
        assert_true(p.part[K3_PLAN_SNAPSHOTS] <= is[i].gib * GIB / 8);
        assert_true(p.sum_bytes == sum_of(&p) && p.sum_bytes <= is[i].gib * GIB);
    }
    o = opts(3 * GIB); /* given: as many as that */
    o.snapshots = 2;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_int_equal(p.opts.snapshots, 2);
    assert_true(p.sum_bytes <= 3 * GIB);
    o.snapshots = 9; /* or a word on what would fit */
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "--snapshots 9, --ctx 4096"));
    assert_non_null(strstr(err.text, "--snapshots 2"));
    o = opts(8 * GIB); /* budgets that were given leave less: the snapshot gives way */
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    o.trunk_bytes = p.trunk_bytes + 300000000;
    o.cache_bytes = p.cache_bytes;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_int_equal(p.opts.snapshots, 0);
    assert_true(p.sum_bytes <= 8 * GIB);
    o = opts(4 * GIB); /* sequences come first */
    o.sequences = 4;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_int_equal(p.opts.snapshots, 0);
}

static void trunk_first_then_experts(void **state)
{
    struct k3_plan_machine mc = machine(1024 * GIB);
    struct k3_plan_opts o = opts(64 * GIB);
    struct k3_plan p;

    (void)state;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_in_range(p.n_slots, 16, 40); /* the least, and what a piece of the trunk did not fit into */
    assert_true(p.pinned_bytes > 60000000000);
    assert_non_null(strstr(p.reason, "share a device"));
    o.split = true;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_true(p.part[K3_PLAN_RING] == 256u << 20);
    assert_true(p.pinned_bytes < 100000000);
    assert_true(p.n_slots > 3000);
    assert_non_null(strstr(p.reason, "different devices"));
    /* at the same time: the slower of the two counts */
    assert_true(k3_plan_seconds(&p, 1e9, 1e9) < (double)(p.trunk_read_bytes + p.expert_read_bytes) / 1e9);
    o.split = false;
    o.memory_bytes = 200 * GIB;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_true(p.pinned_bytes == p.trunk_total_bytes && p.trunk_read_bytes == 0);
    assert_true(p.n_slots > 5000);
    /* what was given stays */
    o.trunk_bytes = 10000000000;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_true(p.trunk_bytes == o.trunk_bytes && p.n_slots > 10000);
    o.cache_bytes = 20000000000;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_true(p.trunk_bytes == o.trunk_bytes && p.cache_bytes == o.cache_bytes);
}

static void the_floor(void **state)
{
    struct k3_plan_machine mc = machine(1024 * GIB);
    struct k3_plan_opts o = opts(1800000000);
    struct k3_err err = K3_ERR_INIT;
    struct k3_plan p;
    const char *at;

    (void)state;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0); /* under 2 GB with 4096 positions */
    o.memory_bytes = 1350000000;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0); /* a smaller ring, fewer rows; and it says so */
    assert_true(p.part[K3_PLAN_RING] < 256u << 20);
    assert_true(p.n_notes == 1 && strstr(p.note[0], "ring of"));
    o.memory_bytes = 1000000000;
    o.sequences = 2;
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "less than the"));
    at = strstr(err.text, "--memory "); /* the first is what was asked for, the last what would fit */
    at = strstr(at + 1, "--memory ");
    assert_non_null(at);
    o.memory_bytes = strtoull(at + strlen("--memory "), NULL, 10) << 20;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    /* a context that would fit is named, too */
    o = opts(2 * GIB);
    o.ctx = 1 << 20;
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0);
    at = strstr(err.text, "what would fit: --ctx ");
    assert_non_null(at);
    o.ctx = (uint32_t)strtoul(at + strlen("what would fit: --ctx "), NULL, 10);
    assert_true(o.ctx >= 4096);
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    o = opts(2 * GIB);
    o.ctx = 1 << 24;
    o.sequences = 256;
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0); /* no overflow */
}

static void the_machine_binds(void **state)
{
    struct k3_plan_machine mc = machine(16 * GIB);
    struct k3_plan_opts o = opts(17 * GIB);
    struct k3_err err = K3_ERR_INIT;
    struct k3_plan p;
    uint64_t first;

    (void)state;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), -ENOMEM);
    assert_non_null(strstr(err.text, "more than there is: 17.18 GB are available (MemAvailable)"));
    assert_non_null(strstr(err.text, "--memory 16384M"));
    o = opts(K3_PLAN_UNSET); /* auto */
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.sum_bytes <= 16 * GIB - 2000000000 - 16 * GIB / 50);
    assert_true(p.sum_bytes > 14 * GIB - 16 * GIB / 50 - 100000000);
    /* a second one at the same time gets what the first left */
    first = p.sum_bytes;
    mc.promised_bytes = first;
    mc.n_others = 1;
    if (k3_plan_make(&p, m, &o, &mc, &err) == 0)
        assert_true(first + p.sum_bytes <= 16 * GIB);
    else
        assert_non_null(strstr(err.text, "promised to 1 other instance"));
    mc.promised_bytes = 9 * GIB;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.sum_bytes <= 7 * GIB - 2000000000);
    /* budgets that are too large say by how much, and what would fit */
    o.trunk_bytes = 16000000000;
    o.cache_bytes = 1000000000;
    mc.promised_bytes = 0;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), -ENOMEM);
    assert_non_null(strstr(err.text, "are missing; what would fit: --trunk-gb "));
    o.trunk_bytes = (uint64_t)(strtod(strstr(err.text, "fit: --trunk-gb ") + 16, NULL) * 1e9);
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    o.trunk_bytes = 1000000; /* less than the ring */
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0);
    assert_non_null(strstr(err.text, "--trunk-gb 0.001"));
    o.trunk_bytes = 1000000000;
    o.cache_bytes = 1000000;
    assert_true(k3_plan_make(&p, m, &o, &mc, &err) < 0);
    assert_non_null(strstr(err.text, "--cache-gb 0.001"));
}

static void small_shm(void **state)
{
    struct k3_plan_machine mc = machine(16 * GIB);
    struct k3_plan_opts o = opts(2 * GIB);
    struct k3_plan p;

    (void)state;
    mc.shm_bytes = 64u << 20;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_true(p.memfd);
    mc.shm_bytes = 8 * GIB;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, NULL), 0);
    assert_false(p.memfd);
}

static void presets(void **state)
{
    struct k3_plan_machine mc = machine(512 * GIB);
    struct k3_plan_opts o = opts(K3_PLAN_UNSET);
    struct k3_presets all;
    struct k3_err err = K3_ERR_INIT;
    struct k3_plan p;

    (void)state;
    assert_int_equal(k3_presets_read(&all, "run/presets", &err), 0);
    assert_int_equal(all.n, 6);
    o.preset = k3_presets_find(&all, "desktop");
    assert_non_null(o.preset);
    assert_null(k3_presets_find(&all, "auto"));
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.trunk_bytes == 16000000000 && p.cache_bytes == 10000000000);
    o.cache_bytes = 5000000000; /* options override */
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.trunk_bytes == 16000000000 && p.cache_bytes == 5000000000);
    o.cache_bytes = K3_PLAN_UNSET;
    o.memory_bytes = 8 * GIB; /* the smaller binds */
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.sum_bytes <= 8 * GIB && strstr(p.note[0], "--memory binds"));
    o.memory_bytes = 100 * GIB;
    assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    assert_true(p.trunk_bytes == 16000000000 && strstr(p.note[0], "preset binds"));
    for (size_t i = 0; i < all.n; i++) { /* each is a plan, with its floor */
        o = opts(K3_PLAN_UNSET);
        o.preset = &all.item[i];
        assert_int_equal(k3_plan_make(&p, m, &o, &mc, &err), 0);
    }
    assert_true(p.pinned_bytes < p.trunk_total_bytes); /* max: 110 of 111 GB */

    assert_int_equal(k3_presets_parse(&all, "# x\n\n a 1 2 # y\nb 0.5 3", "f", &err), 0);
    assert_int_equal(all.n, 2);
    static const char *const bad[] = { "a 1\n", "a 1 2 3\n", "a x 2\n", "a -1 2\n", "a 0 2\n", "a 1 nan\n", "auto 1 2\n",
                                       "a 1 2\na 1 2\n", "a/b 1 2\n" };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_true(k3_presets_parse(&all, bad[i], "f", &err) < 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, "f line "));
    }
}

/* A model that is smaller than the memory takes what it can use. */
static void a_small_model_is_capped(void **state)
{
    static const char *const dirs[] = { "run/demo-model" };
    const struct k3_model_opts mo = { .dirs = dirs, .n_dirs = 1 };
    struct k3_plan_machine mc = machine(16 * GIB);
    struct k3_plan_opts o = opts(8 * GIB);
    struct k3_model *demo;
    struct k3_plan p;

    (void)state;
    assert_int_equal(k3_model_open(&demo, &mo, NULL), 0);
    assert_int_equal(k3_plan_make(&p, demo, &o, &mc, NULL), 0);
    assert_true(p.sum_bytes < 120000000);
    assert_int_equal(p.opts.batch_rows, 2048); /* small rows */
    assert_true(p.trunk_read_bytes + p.expert_read_bytes == 0);
    assert_true(p.n_notes == 1 && strstr(p.note[0], "can use no more than"));
    o = opts(K3_PLAN_UNSET);
    o.trunk_bytes = 64000000000;
    assert_int_equal(k3_plan_make(&p, demo, &o, &mc, NULL), 0); /* it takes no more than it is */
    k3_model_close(demo);
}

static int open_released(void **state)
{
    (void)state;
    return k3_plan_released(&m, NULL);
}
static int close_released(void **state)
{
    (void)state;
    k3_model_close(m);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_promise_is_kept_and_used), cmocka_unit_test(rows_of_a_pass_by_the_memory),
        cmocka_unit_test(snapshots_by_the_memory),
        cmocka_unit_test(trunk_first_then_experts),
        cmocka_unit_test(the_floor),                    cmocka_unit_test(the_machine_binds),
        cmocka_unit_test(small_shm),                    cmocka_unit_test(presets),
        cmocka_unit_test(a_small_model_is_capped),
    };

    return cmocka_run_group_tests(tests, open_released, close_released);
}
