/* k3-computed/engine.c: what sequences have to do with one another: whole prompts in one pass, fairness, and results that do
 * not depend on company. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/engine_world.h"

static struct k3_ew ew;
static struct k3_ew_answer a, b;

static int close_engine(void **state)
{
    (void)state;
    k3_ew_close(&ew);
    return 0;
}

/* ---- one pass for many rows -------------------------------------------------------------------------------------------- */

static void a_prompt_goes_through_the_model_in_one_pass(void **state)
{
    const struct k3_config *c = &k3_ew_demo.m->cfg;
    struct k3_submit s = k3_ew_submit(1, k3_ew_long, 300);
    struct k3_file_source_counts n;
    uint32_t passes;

    (void)state;
    s.max_tokens = 1;
    s.logits = true;
    k3_ew_open_team(&ew, &k3_ew_demo, 1, 512, 512, 2);
    k3_ew_must_submit(&ew, &s);
    assert_int_equal(k3_ew_run(&ew), 1);
    k3_ew_answer(&ew, s.id, &a);
    assert_string_equal(a.end, "length");
    k3_file_source_counts(ew.run.file, &n);
    assert_int_equal(n.passes, 1);
    assert_int_equal(n.block_bytes, k3_ew_demo.m->trunk_bytes); /* all of it, once */
    /* 300 rows choose every expert of a layer, each is asked for once. */
    assert_int_equal(n.experts, (c->n_layers - c->first_dense) * (uint64_t)c->n_experts);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_DISTINCT_EXPERTS), n.experts);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_PROMPT_TOKENS), 300);
    k3_ew_close(&ew);
    k3_ew_open(&ew, &k3_ew_demo, 1, 7, 512); /* 43 passes say the same */
    k3_ew_must_submit(&ew, &s);
    passes = k3_ew_run(&ew);
    assert_int_equal(passes, 43);
    k3_ew_answer(&ew, s.id, &b);
    k3_ew_same(&a, &b);
    assert_true(a.has_logits && a.logits_hash == b.logits_hash);
}

static void prompts_of_several_share_one_pass(void **state)
{
    struct k3_file_source_counts n;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 8, 512, 64);
    for (unsigned i = 0; i < 8; i++) {
        struct k3_submit s = k3_ew_submit(i, k3_ew_long + i, 20 + i);

        s.max_tokens = 1;
        k3_ew_must_submit(&ew, &s);
    }
    assert_int_equal(k3_ew_run(&ew), 1);
    k3_file_source_counts(ew.run.file, &n);
    assert_int_equal(n.block_bytes, k3_ew_demo.m->trunk_bytes);
    assert_int_equal(n.experts, k3_ew_stat(&ew, K3_CS_DISTINCT_EXPERTS));
    assert_int_equal(k3_ew_stat(&ew, K3_CS_MOST), 8);
}

/* ---- fairness ---------------------------------------------------------------------------------------------------------- */

static void answers_go_on_while_long_prompts_are_read(void **state)
{
    uint32_t n_passes = 0;
    struct k3_submit s[5];

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 5, 12, 512);
    for (unsigned i = 0; i < 3; i++) {
        s[i] = k3_ew_submit(i, k3_ew_france, 4);
        s[i].max_tokens = 200;
        k3_ew_must_submit(&ew, &s[i]);
    }
    assert_int_equal(k3_engine_step(ew.e), 1);
    for (unsigned i = 3; i < 5; i++) {
        s[i] = k3_ew_submit(i, k3_ew_long, 300);
        s[i].max_tokens = 1;
        k3_ew_must_submit(&ew, &s[i]);
    }
    do {
        assert_int_equal(k3_engine_step(ew.e), 1);
        n_passes++;
        for (unsigned i = 0; i < 3; i++) {
            k3_ew_answer(&ew, s[i].id, &a);
            assert_int_equal(a.n_tokens, 1 + n_passes); /* one in every pass */
        }
        k3_ew_answer(&ew, s[3].id, &a);
        k3_ew_answer(&ew, s[4].id, &b);
    } while (!a.end[0] || !b.end[0]);
    /* Nine rows a pass are left for the two: 4.5 each. */
    assert_int_equal(n_passes, 600 / 9 + 1);
}

/* ---- latent KV --------------------------------------------------------------------------------------------------------- */

/* The bytes of latent KV that one token touches are (position + 1) times those of a position: exactly, at any length. */
static void kv_bytes_of_a_token_grow_exactly_linearly(void **state)
{
    uint64_t per_position = k3_state_kv_bytes(&k3_ew_demo.m->cfg), at[16], kda = 0;
    struct k3_submit s = k3_ew_submit(1, k3_ew_long, 2);
    uint32_t n_len = 0;

    (void)state;
    assert_true(per_position > 0);
    k3_ew_open(&ew, &k3_ew_demo, 1, 1, 300);
    s.max_tokens = 290;
    k3_ew_must_submit(&ew, &s);
    for (uint32_t position = 0; n_len < 16; position++) {
        uint64_t before = k3_ew_stat(&ew, K3_CS_KV_BYTES);
        struct k3_pass_times t;

        assert_int_equal(k3_engine_step(ew.e), 1);
        k3_pass_times(ew.run.pass, &t);
        if (position == 0)
            kda = t.state_bytes - per_position;
        if (position % 18 != 17)
            continue;
        at[n_len] = k3_ew_stat(&ew, K3_CS_KV_BYTES) - before;
        assert_int_equal(at[n_len], (position + 1) * per_position);
        assert_int_equal(t.state_bytes, kda + at[n_len]); /* and what a pass says of itself */
        if (n_len)
            assert_int_equal(at[n_len] - at[n_len - 1], 18 * per_position);
        n_len++;
    }
    /* A pass of many rows: each counts for itself. */
    k3_ew_close(&ew);
    k3_ew_open(&ew, &k3_ew_demo, 1, 300, 300);
    s = k3_ew_submit(2, k3_ew_long, 200);
    s.max_tokens = 1;
    k3_ew_must_submit(&ew, &s);
    k3_ew_run(&ew);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_KV_BYTES), 200 * 201 / 2 * per_position);
}

/* ---- any company ------------------------------------------------------------------------------------------------------- */

#define N_CROWD 32u
struct guest {
    struct k3_submit submit;
    struct k3_ew_answer alone;
    uint32_t arrives, leaves; /* tick: after a layer or at the end of a pass; leaves 0: never */
    bool came, forget, gone;
};
static struct guest guest[N_CROWD];
static uint32_t n_came, n_left;
static uint64_t seed;

static uint32_t chance(uint32_t n) /* 0 .. n - 1, the same on every run */
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static void come(struct guest *g)
{
    k3_ew_must_submit(&ew, &g->submit);
    g->came = true;
    n_came++;
}

/* Between any two layers: who has to come comes, who has to leave is cancelled or forgotten. */
static void every_tick(struct k3_ew *w)
{
    struct k3_err err = K3_ERR_INIT;

    w->act_at = w->n_ticks + 1;
    for (uint32_t i = 0; i < N_CROWD; i++) {
        struct guest *g = &guest[i];

        if (!g->came && g->arrives <= w->n_ticks)
            come(g);
        if (!g->came || g->gone || !g->leaves || g->leaves > w->n_ticks)
            continue;
        g->gone = true;
        n_left++;
        if (g->forget)
            assert_int_equal(k3_engine_forget(w->e, g->submit.id, &err), 0);
        else
            assert_int_equal(k3_engine_cancel(w->e, g->submit.id, &err), 0);
    }
}

static void make_guests(void)
{
    seed = 20240229;
    for (uint32_t i = 0; i < N_CROWD; i++) {
        struct guest *g = &guest[i];
        uint32_t at = chance(200), n = 1 + chance(i % 4 ? 30 : 99);

        g->submit = k3_ew_submit(i + 1, k3_ew_long + at, n);
        g->submit.max_tokens = 1 + chance(14);
        g->submit.logits = true;
        if (i % 2)
            g->submit.sampling = (struct k3_sampling){ .temperature = 1.1, .top_p = 0.97, .top_k = 300, .seed = i };
        k3_ew_ask(&ew, &g->submit, &g->alone);
        assert_string_equal(g->alone.end, "length");
        assert_true(g->alone.has_logits);
    }
}

static void check_guest(const struct guest *g, bool *cut)
{
    if (g->gone && g->forget)
        return;
    k3_ew_answer(&ew, g->submit.id, &a);
    assert_string_equal(a.state, "ended");
    *cut = strcmp(a.end, "cancelled") == 0;
    assert_true(*cut ? g->gone : strcmp(a.end, "length") == 0);
    if (!*cut)
        k3_ew_same(&a, &g->alone);
    /* One that was cut short is a beginning of the whole. */
    assert_true(a.n_tokens <= g->alone.n_tokens);
    assert_memory_equal(a.token, g->alone.token, a.n_tokens * sizeof(a.token[0]));
    if (a.has_logits)
        assert_true(a.logits_hash == g->alone.logits_hash);
}

static void coming_and_going_changes_nothing(void **state)
{
    static const struct { uint32_t sequences, rows, threads; } shape[] = {
        { 5, 16, 1 }, { 5, 64, 2 }, { 8, 7, 3 }, { 3, 200, 2 }, { 12, 5, 1 },
    };
    uint32_t n_cut = 0;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 512);
    make_guests();
    for (size_t k = 0; k < sizeof(shape) / sizeof(shape[0]); k++) {
        k3_ew_close(&ew);
        k3_ew_open_team(&ew, &k3_ew_demo, shape[k].sequences, shape[k].rows, 512, shape[k].threads);
        n_came = n_left = 0;
        for (uint32_t i = 0; i < N_CROWD; i++) {
            guest[i].came = guest[i].gone = false;
            guest[i].arrives = chance(900);
            guest[i].leaves = chance(3) ? 0 : guest[i].arrives + 1 + chance(150);
            guest[i].forget = chance(3) == 0;
        }
        ew.act = every_tick;
        ew.act_at = 1;
        for (uint32_t i = 0; i < N_CROWD; i++) { /* when nobody is there, the next one comes */
            if (!guest[i].came)
                come(&guest[i]);
            k3_ew_run(&ew);
        }
        assert_int_equal(n_came, N_CROWD);
        assert_true(k3_ew_stat(&ew, K3_CS_MOST) > 2);
        for (uint32_t i = 0; i < N_CROWD; i++) {
            bool cut = false;

            check_guest(&guest[i], &cut);
            n_cut += cut;
        }
    }
    assert_true(n_cut > 5); /* cancelled in mid-answer, not after it */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_prompt_goes_through_the_model_in_one_pass, close_engine),
        cmocka_unit_test_teardown(prompts_of_several_share_one_pass, close_engine),
        cmocka_unit_test_teardown(answers_go_on_while_long_prompts_are_read, close_engine),
        cmocka_unit_test_teardown(kv_bytes_of_a_token_grow_exactly_linearly, close_engine),
        cmocka_unit_test_teardown(coming_and_going_changes_nothing, close_engine),
    };

    return cmocka_run_group_tests(tests, k3_ew_open_demo, k3_ew_close_demo);
}
