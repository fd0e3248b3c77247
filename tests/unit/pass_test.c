/* tests/unit/pass_test.c: the numeric contract of a pass (same bits however the work is cut), its
 * errors and its counts. What the numbers should be is in formula_test.c and demo_test.c. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/pass_private.h"
#include "tests/unit/pass_world.h"

#define N_IDS 150 /* past two blocks of 64 positions */

#define N_SHAPES 5
static struct k3_mk_opts shapes[N_SHAPES];

static void make_shapes(void)
{
    struct k3_config *c;

    for (size_t i = 0; i < N_SHAPES; i++)
        shapes[i] = (struct k3_mk_opts){
            .dtype = K3_BF16, .seed = i + 1, .scatter = i % 2, .flat = i == 2
        };
    shapes[0].formula = true;
    k3_mk_config_formula(&shapes[0].cfg);

    /* Odd sizes everywhere, MLA first, top-k 1, none of the switches on, F32. */
    c = &shapes[1].cfg;
    shapes[1].dtype = K3_F32;
    k3_mk_config_small(c);
    k3_mk_config_layers(c, 5, "1,4", false, NULL);
    c->hidden = 45;
    c->vocab = 101;
    c->kda_heads = 5;
    c->kda_dim = 6;
    c->conv_taps = 3;
    c->gate_lower_bound = -3;
    c->mla_heads = 3;
    c->q_lora = 19;
    c->kv_lora = 21;
    c->qk_nope = 5;
    c->qk_rope = 3;
    c->v_dim = 7;
    c->mla_gate = c->latent_norm = c->renormalize = false;
    c->n_experts = 11;
    c->top_k = c->n_shared = 1;
    c->latent = 32;
    c->moe_inter = 64;
    c->dense_inter = 33;
    c->first_dense = c->res_block = 2;
    c->routed_scale = 2.5f;

    /* One MLA layer that is MoE, F16, no dense layer. */
    c = &shapes[2].cfg;
    shapes[2].dtype = K3_F16;
    k3_mk_config_small(c);
    k3_mk_config_layers(c, 1, "1", false, NULL);
    c->hidden = 33;
    c->vocab = 17;
    c->mla_heads = 1;
    c->q_lora = 5;
    c->kv_lora = 9;
    c->qk_nope = 4;
    c->qk_rope = 1;
    c->v_dim = 3;
    c->n_experts = 5;
    c->top_k = 2;
    c->first_dense = 0;
    c->res_block = 1;

    /* Every row goes to every expert; wide enough that a matrix has many tiles. */
    c = &shapes[3].cfg;
    k3_mk_config_small(c);
    k3_mk_config_layers(c, 3, "3", false, NULL);
    c->hidden = 160;
    c->vocab = 211;
    c->n_experts = c->top_k = 6;
    c->latent = 96;
    c->dense_inter = 320;
    c->res_block = 2;

    /* KDA and dense alone: no latent rows, no experts. */
    c = &shapes[4].cfg;
    k3_mk_config_small(c);
    k3_mk_config_layers(c, 4, "none", false, NULL);
    c->first_dense = 4;
}

static struct k3_world worlds[N_SHAPES];
static uint32_t ids[N_SHAPES][N_IDS];
/* One row a pass, one thread, plain C: what every other way is compared with. */
static float *base_logits[N_SHAPES];
static struct k3_state *base_state[N_SHAPES];

static void same_bits(const void *a, const void *b, size_t len, const char *fmt, ...)
{
    char what[256];
    va_list ap;

    if (memcmp(a, b, len) == 0)
        return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    for (size_t i = 0; i < len / 4; i++)
        if (memcmp((const float *)a + i, (const float *)b + i, 4))
            fail_msg("%s: float %zu of %zu is %.9g, should be %.9g", what, i, len / 4,
                     ((const float *)a)[i], ((const float *)b)[i]);
}

static void same_state(const struct k3_state *a, const struct k3_state *b, const char *what)
{
    assert_int_equal(a->positions, b->positions);
    assert_int_equal(a->len_bytes, b->len_bytes);
    same_bits(a->kda, b->kda, a->len_bytes - (size_t)((const char *)a->kda - (const char *)a),
              "state %s", what);
}

static int open_worlds(void **state)
{
    (void)state;
    make_shapes();
    for (size_t i = 0; i < N_SHAPES; i++) {
        struct k3_runner r;
        uint32_t vocab = shapes[i].cfg.vocab;

        k3_world_make(&worlds[i], &shapes[i]);
        for (uint32_t t = 0; t < N_IDS; t++)
            ids[i][t] = (t * 7919 + t * t % 13 + 5) % vocab;
        base_logits[i] = calloc((size_t)N_IDS * vocab, sizeof(float));
        base_state[i] = k3_world_state(&worlds[i], N_IDS);
        if (!k3_runner_open(&r, &worlds[i], (struct k3_world_opts){ 0 }))
            return -1;
        k3_runner_feed(&r, base_state[i], ids[i], N_IDS, 1, base_logits[i], NULL);
        k3_runner_close(&r);
    }
    return 0;
}

static int close_worlds(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        k3_state_free(base_state[i]);
        free(base_logits[i]);
        k3_world_close(&worlds[i]);
    }
    return 0;
}

/* A base line of NaN or of one value would compare equal to anything wrong. */
static void base_lines_are_alive(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        uint32_t vocab = shapes[i].cfg.vocab;
        float *l = base_logits[i];

        for (size_t n = 0; n < (size_t)N_IDS * vocab; n++)
            assert_true(l[n] > -1e4f && l[n] < 1e4f);
        assert_memory_not_equal(l, l + vocab, vocab * sizeof(float));
        assert_memory_not_equal(l + (N_IDS - 2) * vocab, l + (N_IDS - 1) * vocab,
                                vocab * sizeof(float));
    }
}

static void feed_and_compare(size_t shape, struct k3_world_opts o, uint32_t at_once, uint32_t n)
{
    struct k3_world *w = &worlds[shape];
    uint32_t vocab = shapes[shape].cfg.vocab;
    struct k3_runner r;
    struct k3_state *s;
    float *logits;
    char what[128];

    if (!k3_runner_open(&r, w, o))
        return; /* this CPU lacks the instructions */
    snprintf(what, sizeof(what), "shape %zu %s threads %u blocks %llu rows %u", shape,
             o.kernels ? o.kernels : "c", o.threads, (unsigned long long)o.block_bytes, at_once);
    s = k3_world_state(w, N_IDS);
    logits = calloc((size_t)n * vocab, sizeof(float));
    assert_non_null(logits);
    k3_runner_feed(&r, s, ids[shape], n, at_once, logits, NULL);
    same_bits(logits, base_logits[shape], (size_t)n * vocab * sizeof(float), "%s", what);
    if (n == N_IDS)
        same_state(s, base_state[shape], what);
    free(logits);
    k3_state_free(s);
    k3_runner_close(&r);
}

static void any_split_of_a_prompt(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++)
        for (uint32_t at_once = 2; at_once <= 64; at_once = at_once < 8 ? at_once + 1 : at_once * 2)
            feed_and_compare(i, (struct k3_world_opts){ .kernels = "auto" }, at_once, N_IDS);
}

static void any_threads_and_kernels(void **state)
{
    static const char *const kernels[] = { "c", "avx2", "avx512" };

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++)
        for (int k = 0; k < 3; k++)
            for (uint32_t threads = 1; threads <= 3; threads++)
                feed_and_compare(i, (struct k3_world_opts){ threads, kernels[k], 3000, 20 }, 7, 14);
}

static void any_block_size(void **state)
{
    /* 1: row by row, head by head */
    static const uint64_t blocks[] = { 1, 200, 4096, 1 << 20, 1ull << 40 };

    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++)
        for (int b = 0; b < 5; b++)
            for (uint32_t threads = 1; threads <= 2; threads++)
                for (uint32_t rows = 1; rows <= 10; rows += 9)
                    feed_and_compare(i, (struct k3_world_opts){ threads, "auto", blocks[b], 10 },
                                     rows, 10);
}

static void long_prompt_on_every_kernel_set(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++) {
        feed_and_compare(i, (struct k3_world_opts){ 2, "avx2", 0, 64 }, 64, N_IDS);
        feed_and_compare(i, (struct k3_world_opts){ 3, "avx512", 3000, 64 }, 33, N_IDS);
    }
}

/* Four sequences at different places share passes, each with a slice of its own length. */
static void beside_other_sequences(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            static const uint32_t step[4] = { 5, 1, 13, 3 };
            uint32_t vocab = shapes[i].cfg.vocab, at[4] = { 0 };
            struct k3_state *s[4];
            float *logits = calloc(64 * (size_t)vocab, sizeof(float));
            struct k3_runner r;

            assert_non_null(logits);
            assert_true(k3_runner_open(
                &r, &worlds[i], (struct k3_world_opts){ .threads = threads, .kernels = "auto" }));
            for (int q = 0; q < 4; q++)
                s[q] = k3_world_state(&worlds[i], N_IDS);
            for (int pass = 0; pass < 14; pass++) {
                struct k3_row rows[64];
                uint32_t n = 0;

                /* Sequence q begins in pass q and may end before the others. */
                for (int q = 0; q < 4; q++)
                    for (uint32_t k = 0; pass >= q && k < step[q] && at[q] + k < N_IDS; k++)
                        rows[n++] = (struct k3_row){ s[q], ids[i][at[q] + k], at[q] + k, true };
                k3_runner_run(&r, rows, n, logits, NULL);
                for (uint32_t k = 0; k < n; k++)
                    same_bits(logits + (size_t)k * vocab,
                              base_logits[i] + (size_t)rows[k].position * vocab,
                              vocab * sizeof(float), "shape %zu pass %d row %u", i, pass, k);
                for (int q = 0; q < 4; q++)
                    at[q] = k3_state_positions(s[q]);
            }
            assert_int_equal(at[0], 70);
            for (int q = 0; q < 4; q++)
                k3_state_free(s[q]);
            free(logits);
            k3_runner_close(&r);
        }
}

/* A state that is kept in passing is that of passes that end there, and whoever goes on from it gets the same bits. */
static void kept_in_passing(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SHAPES; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            static const uint32_t at[3] = { 1, 17, 40 };
            uint32_t vocab = shapes[i].cfg.vocab;
            struct k3_state *s = k3_world_state(&worlds[i], N_IDS), *other = k3_world_state(&worlds[i], N_IDS), *kept[3];
            float *logits = calloc(64 * (size_t)vocab, sizeof(float));
            struct k3_row rows[64];
            struct k3_runner r;

            assert_non_null(logits);
            assert_true(k3_runner_open(&r, &worlds[i], (struct k3_world_opts){ .threads = threads, .kernels = "auto" }));
            for (uint32_t p = 0; p < 60; p++)
                rows[p] = p < 12 ? (struct k3_row){ other, ids[i][p], p, false } : (struct k3_row){ s, ids[i][p - 12], p - 12, true };
            for (int k = 0; k < 3; k++)
                rows[12 + at[k] - 1].keep = kept[k] = k3_world_state(&worlds[i], N_IDS);
            k3_runner_run(&r, rows, 60, logits, NULL);
            same_bits(logits, base_logits[i], 48 * (size_t)vocab * sizeof(float), "shape %zu, %u threads", i, threads);
            for (int k = 0; k < 3; k++) {
                k3_state_reset(other);
                k3_runner_feed(&r, other, ids[i], at[k], 64, logits, NULL);
                assert_int_equal(k3_state_positions(kept[k]), at[k]);
                same_bits(kept[k]->kda, other->kda, other->kda_bytes, "shape %zu, kept at %u", i, at[k]);
                k3_runner_feed(&r, kept[k], ids[i] + at[k], 50, 64, logits, NULL);
                same_bits(logits, base_logits[i] + (size_t)at[k] * vocab, 50 * (size_t)vocab * sizeof(float),
                          "shape %zu, from %u on", i, at[k]);
                k3_state_free(kept[k]);
            }
            k3_state_free(s);
            k3_state_free(other);
            free(logits);
            k3_runner_close(&r);
        }
}

/* What cannot be kept is refused before anything is touched; what a failed pass was to keep is spoilt. */
static void kept_badly(void **state)
{
    struct k3_state *s = k3_world_state(&worlds[1], N_IDS), *keep = k3_world_state(&worlds[1], 3);
    struct k3_state *alien = k3_world_state(&worlds[0], N_IDS);
    struct k3_err err = K3_ERR_INIT;
    struct k3_row rows[5];
    struct k3_runner r;

    (void)state;
    assert_true(k3_runner_open(&r, &worlds[1], (struct k3_world_opts){ 0 }));
    for (uint32_t p = 0; p < 5; p++)
        rows[p] = (struct k3_row){ s, ids[1][p], p, false };
    rows[3].keep = keep; /* room for three */
    assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 5, NULL, NULL, &err), -EINVAL);
    rows[3].keep = s;
    assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 5, NULL, NULL, &err), -EINVAL);
    rows[3].keep = alien;
    assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 5, NULL, NULL, &err), -EINVAL);
    assert_false(s->spoilt || keep->spoilt || alien->spoilt);
    rows[3].keep = NULL;
    rows[2].keep = keep;
    k3_file_source_fail_block(r.file, 9);
    assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 5, NULL, NULL, &err), -EIO);
    assert_true(s->spoilt && keep->spoilt);
    k3_state_reset(s);
    k3_runner_run(&r, rows, 5, NULL, NULL);
    assert_false(keep->spoilt);
    assert_int_equal(k3_state_positions(keep), 3);
    k3_state_free(s);
    k3_state_free(keep);
    k3_state_free(alien);
    k3_runner_close(&r);
}

static void rows_that_want_no_logits(void **state)
{
    uint32_t vocab = shapes[1].cfg.vocab;
    float *logits = calloc(64 * (size_t)vocab, sizeof(float));
    struct k3_state *s = k3_world_state(&worlds[1], N_IDS);
    struct k3_file_source_counts before, skipped, with;
    struct k3_row rows[9];
    struct k3_runner r;

    (void)state;
    assert_non_null(logits);
    assert_true(k3_runner_open(&r, &worlds[1], (struct k3_world_opts){ 0 }));
    for (uint32_t p = 0; p < 9; p++)
        rows[p] = (struct k3_row){ s, ids[1][p], p, false };
    k3_file_source_counts(r.file, &before);
    k3_runner_run(&r, rows, 9, NULL, NULL); /* none: lm_head is not even read */
    k3_file_source_counts(r.file, &skipped);
    for (uint32_t p = 0; p < 9; p++)
        rows[p] = (struct k3_row){ s, ids[1][9 + p], 9 + p, p == 2 || p == 3 || p == 8 };
    k3_runner_run(&r, rows, 9, logits, NULL); /* some: packed in row order */
    k3_file_source_counts(r.file, &with);
    same_bits(logits, base_logits[1] + 11 * vocab, 2 * vocab * sizeof(float), "rows 2 and 3");
    same_bits(logits + 2 * vocab, base_logits[1] + 17 * vocab, vocab * sizeof(float), "row 8");
    assert_int_equal(with.block_bytes - skipped.block_bytes, worlds[1].m->trunk_bytes);
    assert_int_equal(skipped.block_bytes - before.block_bytes,
                     worlds[1].m->trunk_bytes - 4ull * vocab * shapes[1].cfg.hidden);
    assert_int_equal(with.passes, 2);
    free(logits);
    k3_state_free(s);
    k3_runner_close(&r);
}

static void each_expert_once_a_layer(void **state)
{
    const size_t i = 3;
    uint32_t vocab = shapes[i].cfg.vocab, moe = shapes[i].cfg.n_layers - shapes[i].cfg.first_dense;
    float *logits = calloc(64 * (size_t)vocab, sizeof(float));
    struct k3_state *s = k3_world_state(&worlds[i], N_IDS);
    struct k3_file_source_counts c;
    struct k3_pass_times t;
    struct k3_runner r;

    (void)state;
    assert_true(k3_runner_open(&r, &worlds[i], (struct k3_world_opts){ .threads = 2 }));
    k3_runner_feed(&r, s, ids[i], 64, 64, logits, NULL);
    k3_file_source_counts(r.file, &c);
    k3_pass_times(r.pass, &t);
    assert_int_equal(c.experts, moe * shapes[i].cfg.n_experts);
    assert_int_equal(t.distinct_experts, c.experts);
    assert_int_equal(t.routed_rows, 64 * shapes[i].cfg.top_k * moe);
    assert_true(t.trunk_wait_ns > 0 && t.expert_wait_ns > 0);
    assert_true(t.trunk_wait_ns + t.expert_wait_ns < t.total_ns);
    same_bits(logits, base_logits[i], 64 * (size_t)vocab * sizeof(float), "64 rows");
    free(logits);
    k3_state_free(s);
    k3_runner_close(&r);
}

/* Shape 1 (F32): two sequences in one pass, at 4 and 0 positions, 3 and 2 rows, two of them with logits. */
static void stages_have_all_of_a_pass(void **state)
{
    const struct k3_config *c = &shapes[1].cfg;
    const struct k3_model *m = worlds[1].m;
    uint64_t head = 4ull * c->vocab * c->hidden, ns = 0, bytes = 0, flop;
    float *logits = calloc(4 * (size_t)c->vocab, sizeof(float));
    struct k3_state *a = k3_world_state(&worlds[1], N_IDS), *b = k3_world_state(&worlds[1], N_IDS);
    struct k3_file_source_counts before, after;
    struct k3_pass_times t;
    struct k3_row rows[5];
    struct k3_runner r;

    (void)state;
    assert_non_null(logits);
    assert_true(k3_runner_open(&r, &worlds[1], (struct k3_world_opts){ .threads = 2 }));
    k3_runner_feed(&r, a, ids[1], 4, 4, logits, NULL);
    for (uint32_t i = 0; i < 5; i++)
        rows[i] = (struct k3_row){ i < 3 ? a : b, ids[1][i], i < 3 ? 4 + i : i - 3, i == 2 || i == 4 };
    k3_file_source_counts(r.file, &before);
    k3_runner_run(&r, rows, 5, logits, NULL);
    k3_file_source_counts(r.file, &after);
    k3_pass_times(r.pass, &t);
    for (int i = 0; i < K3_N_STAGES; i++) {
        ns += t.stage[i].ns;
        bytes += t.stage[i].bytes;
        assert_true(t.stage[i].ns > 0); /* this shape has all of them */
        for (int other = 0; other < i; other++)
            assert_string_not_equal(k3_stage_name(i), k3_stage_name(other));
    }
    assert_int_equal(ns, t.total_ns);
    assert_int_equal(t.stage[K3_STAGE_TRUNK_WAIT].ns, t.trunk_wait_ns);
    assert_int_equal(t.stage[K3_STAGE_EXPERT_WAIT].ns, t.expert_wait_ns);
    assert_int_equal(bytes, t.weight_bytes + t.state_bytes);
    assert_int_equal(t.weight_bytes, after.block_bytes - before.block_bytes +
                                         (after.experts - before.experts) * m->expert_bytes + 5 * 4ull * c->hidden);
    /* Two sequences, three KDA layers: S and tails, read and written; two MLA layers: 7 and 2 latent rows. */
    assert_int_equal(t.stage[K3_STAGE_KDA].bytes, 2 * 3 * 2 * (5 * 6 * 6 + 3 * 2 * 5 * 6) * 4);
    assert_int_equal(t.state_bytes - t.stage[K3_STAGE_KDA].bytes, 2 * (7 + 2) * (21 + 3) * 4);
    flop = 2 * (m->trunk_bytes - head) / 4 * 5 + 2 * head / 4 * 2;
    flop += 3 * 5 * 6 * 32 * 64;                         /* three MoE layers, top-k 1 */
    flop += 3 * 5 * (7 * 5 * 6 * 6 + 6 * 3 * 5 * 6);     /* recurrence and convolution */
    flop += 2 * (5 + 6 + 7 + 1 + 2) * 3 * 2 * (24 + 21); /* positions seen, heads */
    assert_int_equal(t.flop, flop);
    free(logits);
    k3_state_free(a);
    k3_state_free(b);
    k3_runner_close(&r);
}

/* ---- errors ---- */

static void a_failed_read_spoils_and_is_repaired(void **state)
{
    uint32_t vocab = shapes[0].cfg.vocab;
    float logits[7 * 96];
    struct k3_state *s = k3_world_state(&worlds[0], N_IDS);
    struct k3_file_source_counts c;
    struct k3_err err = K3_ERR_INIT;
    struct k3_row rows[7];
    struct k3_runner r;
    uint64_t n_blocks, n_experts, failures = 0;

    (void)state;
    assert_true(k3_runner_open(&r, &worlds[0], (struct k3_world_opts){ .threads = 2 }));
    for (uint32_t p = 0; p < 7; p++)
        rows[p] = (struct k3_row){ s, ids[0][p], p, true };
    k3_runner_run(&r, rows, 7, logits, NULL);
    k3_file_source_counts(r.file, &c);
    n_blocks = c.blocks;
    n_experts = c.experts;
    for (uint64_t nth = 1; nth <= n_blocks + n_experts; nth += 3) {
        if (nth <= n_blocks)
            k3_file_source_fail_block(r.file, nth);
        else
            k3_file_source_fail_expert(r.file, nth - n_blocks);
        k3_state_reset(s);
        assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 7, logits, NULL, &err),
                         -EIO);
        assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
        assert_non_null(strstr(err.text, "asked for by the test"));
        failures++;
        k3_file_source_counts(r.file, &c);
        assert_int_equal(c.failed_passes, failures);
        if (nth > n_blocks)
            assert_true(c.abandoned > 0);
        /* The spoilt state is refused, and nothing is read for it. */
        assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), rows, 7, logits, NULL, &err),
                         -EINVAL);
        assert_non_null(strstr(err.text, "spoilt"));
        k3_file_source_counts(r.file, &c);
        assert_int_equal(c.failed_passes, failures);
    }
    k3_state_reset(s);
    k3_runner_run(&r, rows, 7, logits, NULL);
    same_bits(logits, base_logits[0], 7 * vocab * sizeof(float), "after %llu failures",
              (unsigned long long)failures);
    k3_state_free(s);
    k3_runner_close(&r);
}

static int cancel_at_three(void *arg, uint32_t layer, uint32_t n_layers)
{
    ++*(int *)arg;
    assert_int_equal(n_layers, 8);
    return layer == 3 ? -ECANCELED : 0;
}

static void progress_cancels(void **state)
{
    int calls = 0;
    struct k3_pass_hooks hooks = { .arg = &calls, .progress = cancel_at_three };
    struct k3_state *s = k3_world_state(&worlds[0], 8);
    struct k3_row row = { s, 1, 0, true };
    struct k3_err err = K3_ERR_INIT;
    struct k3_file_source_counts c;
    float logits[96];
    struct k3_runner r;

    (void)state;
    assert_true(k3_runner_open(&r, &worlds[0], (struct k3_world_opts){ 0 }));
    assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), &row, 1, logits, &hooks, &err),
                     -ECANCELED);
    assert_int_equal(calls, 4);
    assert_true(s->spoilt);
    k3_file_source_counts(r.file, &c);
    assert_int_equal(c.failed_passes, 1);
    k3_state_free(s);
    k3_runner_close(&r);
}

static void refused_rows_touch_nothing(void **state)
{
    uint32_t vocab = shapes[0].cfg.vocab;
    struct k3_state *a = k3_world_state(&worlds[0], 4), *b = k3_world_state(&worlds[0], 4);
    struct k3_state *other = k3_world_state(&worlds[1], 4);
    float logits[5 * 96];
    struct k3_file_source_counts c;
    struct k3_runner r;
    struct {
        struct k3_row row[4];
        uint32_t n;
        int rc;
        const char *words;
    } bad[] = {
        { { { a, 1, 0, true } }, 0, -EINVAL, "1 to 3" },
        { { { a, 1, 0, true }, { a, 1, 1, true }, { a, 1, 2, true }, { a, 1, 3, true } },
          4,
          -EINVAL,
          "1 to 3" },
        { { { a, 96, 0, true } }, 1, -EINVAL, "0 to 95" },
        { { { a, 1, 1, true } }, 1, -EINVAL, "position 1" },
        { { { a, 1, 0, true }, { a, 1, 0, true } }, 2, -EINVAL, "position 0" },
        { { { a, 1, 0, true }, { b, 1, 0, true }, { a, 1, 1, true } }, 3, -EINVAL, "adjacent" },
        { { { other, 1, 0, true } }, 1, -EINVAL, "another model" },
    };

    (void)state;
    assert_true(k3_runner_open(&r, &worlds[0], (struct k3_world_opts){ .max_rows = 3 }));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct k3_err err = K3_ERR_INIT;

        assert_int_equal(
            k3_pass_run(r.pass, k3_file_source(r.file), bad[i].row, bad[i].n, logits, NULL, &err),
            bad[i].rc);
        if (!strstr(err.text, bad[i].words))
            fail_msg("case %zu says \"%s\"", i, err.text);
    }
    k3_file_source_counts(r.file, &c);
    assert_int_equal(c.blocks + c.failed_passes, 0);
    k3_runner_feed(&r, a, ids[0], 4, 3, logits, NULL); /* unharmed */
    same_bits(logits, base_logits[0], 4 * vocab * sizeof(float), "after refusals");
    {
        struct k3_row row = { a, 1, 4, true };
        struct k3_err err = K3_ERR_INIT;

        assert_int_equal(k3_pass_run(r.pass, k3_file_source(r.file), &row, 1, logits, NULL, &err),
                         -ENOSPC);
        assert_non_null(strstr(err.text, "--ctx"));
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    }
    k3_state_free(a);
    k3_state_free(b);
    k3_state_free(other);
    k3_runner_close(&r);
}

static void buffers_of_the_released_shape(void **state)
{
    struct k3_config c = worlds[0].m->cfg;

    (void)state;
    c.hidden = 7168;
    c.n_layers = 93;
    c.kda_heads = c.mla_heads = 96;
    c.kda_dim = c.qk_nope = c.v_dim = 128;
    c.q_lora = 1536;
    c.kv_lora = 512;
    c.qk_rope = 64;
    c.dense_inter = 33792;
    c.n_experts = 896;
    c.top_k = 16;
    c.moe_inter = 3072;
    c.latent = 3584;
    c.res_block = 12;
    assert_true(k3_pass_bytes(&c, 64) < 58000000); /* design.md section 8 */
    assert_true(k3_pass_thread_bytes(&c, 4096) < 1 << 20);
    assert_true(k3_pass_bytes(&c, 65) > k3_pass_bytes(&c, 64));
    c.hidden = c.dense_inter = 0xffffffffu;
    assert_true(k3_pass_bytes(&c, 0xffffffffu) == UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_lines_are_alive),
        cmocka_unit_test(any_split_of_a_prompt),
        cmocka_unit_test(any_threads_and_kernels),
        cmocka_unit_test(any_block_size),
        cmocka_unit_test(long_prompt_on_every_kernel_set),
        cmocka_unit_test(beside_other_sequences),
        cmocka_unit_test(kept_in_passing),
        cmocka_unit_test(kept_badly),
        cmocka_unit_test(rows_that_want_no_logits),
        cmocka_unit_test(each_expert_once_a_layer),
        cmocka_unit_test(stages_have_all_of_a_pass),
        cmocka_unit_test(a_failed_read_spoils_and_is_repaired),
        cmocka_unit_test(progress_cancels),
        cmocka_unit_test(refused_rows_touch_nothing),
        cmocka_unit_test(buffers_of_the_released_shape),
    };

    return cmocka_run_group_tests(tests, open_worlds, close_worlds);
}
