/* tests/unit/ops_vectors_test.c: the operators and whole layers against an independent
 * implementation: every file that
 * ../shared/data/ops holds, within the tolerances of its MANIFEST.  Skipped where the folder is not
 * there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/kernel_sets.h"
#include "tests/unit/ops_json.h"
#include "tests/unit/ops_layers.h"

#define OPS "../shared/data/ops/"
#define EACH_SET(k)                                                                                \
    for (const struct k3_kernels *k, **set_ = sets; set_ < sets + n_sets && (k = *set_, 1); set_++)
#define NEAR(got, want, n, what) K3_ASSERT_NEAR(got, want, n, tol_abs, tol_rel, k->name, what)

enum {
    HEADS = 4,
    DIM = 16,
    WIDTH = HEADS * DIM,
    HIDDEN = 128,
    TAPS = 4,
    LATENT = 64,
    INTER = 48,
    EXPERTS = 8,
    EPT = 2
};

static const struct k3_kernels *sets[3];
static size_t n_sets;
static double tol_abs, tol_rel; /* 0 while there is no MANIFEST */
static struct k3_test_json j;

static int find_sets_and_tolerance(void **state)
{
    (void)state;
    n_sets = k3_test_sets(sets);
    if (k3_test_json_open(&j, OPS "MANIFEST.json") == 0) {
        const cJSON *t = cJSON_GetObjectItemCaseSensitive(j.root, "tolerance");
        tol_abs = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(t, "fp32_abs"));
        tol_rel = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(t, "fp32_rel"));
        k3_test_json_close(&j);
        if (!(tol_abs > 0 && tol_abs < 1e-3 && tol_rel > 0 && tol_rel < 1e-2)) {
            print_error(OPS "MANIFEST.json: tolerance %g + %g is not usable\n", tol_abs, tol_rel);
            return -1;
        }
    }
    return 0;
}

/* Opens a fixture; the folder's absence skips, a missing file in a folder that is there fails. */
static void open_fixture(const char *path)
{
    if (tol_abs == 0)
        skip();
    if (k3_test_json_open(&j, path) < 0)
        fail_msg("%s is missing beside its MANIFEST", path);
}

static void rmsnorm(void **state)
{
    float y[HIDDEN];
    (void)state;
    open_fixture(OPS "rmsnorm.json");
    const float *x = k3_test_json_floats(&j, 3 * HIDDEN, "in"),
                *w = k3_test_json_floats(&j, HIDDEN, "weight");
    const double *want = k3_test_json_doubles(&j, 3 * HIDDEN, "out");
    EACH_SET (k) {
        for (size_t t = 0; t < 3; t++) {
            k3_rmsnorm(k, y, x + t * HIDDEN, w, HIDDEN, (float)k3_test_json_number(&j, "eps"));
            NEAR(y, want + t * HIDDEN, HIDDEN, "rmsnorm");
        }
    }
    k3_test_json_close(&j);
}

static void situ_glu(void **state)
{
    float y[8];
    (void)state;
    open_fixture(OPS "situ_glu.json");
    const float *in = k3_test_json_floats(&j, 6 * 16, "in");
    const double *want = k3_test_json_doubles(&j, 6 * 8, "out");
    EACH_SET (k) {
        for (size_t t = 0; t < 6; t++) {
            k->situ(y, in + t * 16, in + t * 16 + 8, 8, (float)k3_test_json_number(&j, "beta"),
                    (float)k3_test_json_number(&j, "linear_beta"));
            NEAR(y, want + t * 8, 8, "situ_glu");
        }
    }
    k3_test_json_close(&j);
}

static void shortconv(void **state)
{
    (void)state;
    open_fixture(OPS "shortconv.json");
    const float *w = k3_test_json_floats(&j, WIDTH * TAPS, "weight"),
                *in = k3_test_json_floats(&j, 5 * WIDTH, "in");
    const float *next = k3_test_json_floats(&j, WIDTH, "in_next");
    const double *out = k3_test_json_doubles(&j, 5 * WIDTH, "out"),
                 *out_next = k3_test_json_doubles(&j, WIDTH, "out_next");
    const double *after =
        k3_test_json_doubles(&j, WIDTH * (TAPS - 1), "state_after"); /* [channel][tap] */
    EACH_SET (k) {
        float y[WIDTH], hist[TAPS - 1][WIDTH] = {{0}};
        for (size_t t = 0; t < 5; t++) {
            k3_shortconv(k, y, in + t * WIDTH, hist[0], w, WIDTH, TAPS);
            NEAR(y, out + t * WIDTH, WIDTH, "shortconv");
        }
        for (size_t c = 0; c < WIDTH; c++)
            for (size_t t = 0; t + 1 < TAPS; t++)
                NEAR(&hist[t][c], &after[c * (TAPS - 1) + t], 1, "shortconv history");
        k3_shortconv(k, y, next, hist[0], w, WIDTH, TAPS);
        NEAR(y, out_next, WIDTH, "shortconv next");
    }
    k3_test_json_close(&j);
}

static void kda_decay(void **state)
{
    float alpha[DIM];
    (void)state;
    open_fixture(OPS "kda_decay.json");
    const float *z = k3_test_json_floats(&j, 4 * WIDTH, "z"),
                *a_log = k3_test_json_floats(&j, HEADS, "A_log");
    const float *bias = k3_test_json_floats(&j, WIDTH, "dt_bias");
    const double *want = k3_test_json_doubles(&j, 4 * WIDTH, "alpha");
    EACH_SET (k) {
        for (size_t t = 0; t < 4; t++) {
            for (size_t h = 0; h < HEADS; h++) {
                k3_kda_decay(k, alpha, z + t * WIDTH + h * DIM, bias + h * DIM, k3_expf(a_log[h]),
                             (float)k3_test_json_number(&j, "lower_bound"), DIM);
                NEAR(alpha, want + t * WIDTH + h * DIM, DIM, "kda_decay");
            }
        }
    }
    k3_test_json_close(&j);
}

static void kda_recurrence(const char *path, size_t n)
{
    open_fixture(path);
    const float *q = k3_test_json_floats(&j, n * WIDTH, "q"),
                *key = k3_test_json_floats(&j, n * WIDTH, "k");
    const float *v = k3_test_json_floats(&j, n * WIDTH, "v"),
                *alpha = k3_test_json_floats(&j, n * WIDTH, "alpha");
    const float *beta = k3_test_json_floats(&j, n * HEADS, "beta");
    const double *out = k3_test_json_doubles(&j, n * WIDTH, "out");
    const double *state_out = k3_test_json_doubles(&j, WIDTH * DIM, "state_out");
    EACH_SET (k) {
        float S[HEADS][DIM * DIM] = {{0}}, qn[DIM], o[DIM], scratch[DIM];
        for (size_t t = 0; t < n; t++) {
            for (size_t h = 0; h < HEADS; h++) {
                size_t i = t * WIDTH + h * DIM;
                k->scale(qn, q + i, (float)k3_test_json_number(&j, "q_scale"), DIM);
                k->kda_step(S[h], o, qn, key + i, v + i, alpha + i, beta[t * HEADS + h], DIM, DIM,
                            scratch);
                NEAR(o, out + i, DIM, path);
            }
        }
        NEAR(S[0], state_out, WIDTH * DIM, path);
    }
    k3_test_json_close(&j);
}

static void kda_recurrence_of_1(void **state)
{
    (void)state;
    kda_recurrence(OPS "kda_recur1.json", 1);
}

static void kda_recurrence_of_8(void **state)
{
    (void)state;
    kda_recurrence(OPS "kda_recur8.json", 8);
}

static void kda_weights(struct k3_test_kda *w, const char *pre, const char *proj, const char *conv,
                        const char *norm)
{
    *w = (struct k3_test_kda){
        .hidden = HIDDEN, .heads = HEADS, .dim = DIM, .taps = TAPS, .bound = -5.0f, .eps = 1e-5f};
    w->q = k3_test_json_floats(&j, WIDTH * HIDDEN, "%sq_proj%s", pre, norm);
    w->k = k3_test_json_floats(&j, WIDTH * HIDDEN, "%sk_proj%s", pre, norm);
    w->v = k3_test_json_floats(&j, WIDTH * HIDDEN, "%sv_proj%s", pre, norm);
    w->g = k3_test_json_floats(&j, WIDTH * HIDDEN, "%sg_proj%s", pre, norm);
    w->o = k3_test_json_floats(&j, WIDTH * HIDDEN, "%so_proj%s", pre, norm);
    w->b = k3_test_json_floats(&j, HEADS * HIDDEN, "%sb_proj%s", pre, norm);
    w->f_a = k3_test_json_floats(&j, DIM * HIDDEN, "%sf_a%s", pre, proj);
    w->f_b = k3_test_json_floats(&j, WIDTH * DIM, "%sf_b%s", pre, proj);
    w->q_conv = k3_test_json_floats(&j, WIDTH * TAPS, "%sq_%s", pre, conv);
    w->k_conv = k3_test_json_floats(&j, WIDTH * TAPS, "%sk_%s", pre, conv);
    w->v_conv = k3_test_json_floats(&j, WIDTH * TAPS, "%sv_%s", pre, conv);
    w->a_log = k3_test_json_floats(&j, HEADS, "%sA_log", pre);
    w->dt_bias = k3_test_json_floats(&j, WIDTH, "%sdt_bias", pre);
    w->o_norm = k3_test_json_floats(&j, DIM, "%so_norm%s", pre, norm);
}

static void kda_layer(const char *path, size_t n)
{
    struct k3_test_kda w;
    open_fixture(path);
    kda_weights(&w, "", "", "conv", "");
    const float *x = k3_test_json_floats(&j, n * HIDDEN, "in");
    const double *out = k3_test_json_doubles(&j, n * HIDDEN, "out");
    const double *state_out = k3_test_json_doubles(&j, WIDTH * DIM, "state_out");
    EACH_SET (k) {
        for (size_t split = 0; split < n;
             split++) { /* whole, then in two calls with carried state: identical bits */
            static float y[8 * HIDDEN], whole[8 * HIDDEN];
            float S[WIDTH * DIM] = {0}, hist[3 * (TAPS - 1) * WIDTH] = {0};
            if (split)
                k3_test_kda_layer(k, &w, y, x, split, S, hist);
            k3_test_kda_layer(k, &w, y + split * HIDDEN, x + split * HIDDEN, n - split, S, hist);
            NEAR(y, out, n * HIDDEN, path);
            NEAR(S, state_out, WIDTH * DIM, path);
            if (split == 0)
                memcpy(whole, y, sizeof whole);
            K3_ASSERT_SAME(whole, y, n * HIDDEN, k->name, "%s split at %zu", path, split);
        }
    }
    k3_test_json_close(&j);
}

static void kda_layer_of_1(void **state)
{
    (void)state;
    kda_layer(OPS "kda_layer1.json", 1);
}

static void kda_layer_of_8(void **state)
{
    (void)state;
    kda_layer(OPS "kda_layer8.json", 8);
}

static void router(void **state)
{
    (void)state;
    open_fixture(OPS "router.json");
    const float *gate = k3_test_json_floats(&j, EXPERTS * HIDDEN, "gate_weight");
    const float *bias = k3_test_json_floats(&j, EXPERTS, "bias"),
                *x = k3_test_json_floats(&j, 6 * HIDDEN, "in");
    const float *want_ids = k3_test_json_floats(&j, 6 * EPT, "topk_idx");
    const double *want = k3_test_json_doubles(&j, 6 * EPT, "topk_weight");
    EACH_SET (k) {
        for (size_t t = 0; t < 6; t++) {
            float logits[EXPERTS], scratch[EXPERTS], w[EPT];
            uint16_t ids[EPT];
            k->mul[K3_F32](logits, EXPERTS, gate, EXPERTS, HIDDEN, x + t * HIDDEN, HIDDEN, 1);
            k3_route(k, ids, w, logits, bias, EXPERTS, EPT, 1, 1.0f, scratch);
            for (size_t i = 0; i < EPT;
                 i++) { /* the fixture lists them by descending choice, ours ascend by id */
                size_t at = ids[i] == (uint16_t)want_ids[t * EPT] ? 0 : 1;
                assert_int_equal(ids[i], want_ids[t * EPT + at]);
                NEAR(&w[i], &want[t * EPT + at], 1, "router");
            }
        }
    }
    k3_test_json_close(&j);
}

static void attnres(void **state)
{
    enum { SOURCES = 9 };
    float f[HIDDEN], y[HIDDEN];
    (void)state;
    open_fixture(OPS "attnres.json");
    const float *prefix = k3_test_json_floats(&j, 4 * HIDDEN, "prefix_sum");
    const float *blocks = k3_test_json_floats(&j, 4 * (SOURCES - 1) * HIDDEN, "block_residual");
    const float *proj = k3_test_json_floats(&j, HIDDEN, "proj_weight"),
                *norm = k3_test_json_floats(&j, HIDDEN, "norm_weight");
    const double *fold = k3_test_json_doubles(&j, HIDDEN, "fold_hint"),
                 *want = k3_test_json_doubles(&j, 4 * HIDDEN, "out");
    EACH_SET (k) {
        k->mul_vec(f, norm, proj, HIDDEN);
        NEAR(f, fold, HIDDEN, "fold");
        for (size_t t = 0; t < 4; t++) {
            const float *x[SOURCES];
            for (size_t s = 0; s + 1 < SOURCES; s++)
                x[s] = blocks + (t * (SOURCES - 1) + s) * HIDDEN;
            x[SOURCES - 1] = prefix + t * HIDDEN;
            k3_attnres(k, y, x, SOURCES, f, HIDDEN, (float)k3_test_json_number(&j, "eps"), NULL);
            NEAR(y, want + t * HIDDEN, HIDDEN, "attnres");
        }
    }
    k3_test_json_close(&j);
}

static void mla_weights(struct k3_test_mla *w, const char *pre)
{
    *w = (struct k3_test_mla){.hidden = HIDDEN,
                              .heads = HEADS,
                              .q_lora = 64,
                              .kv_lora = 32,
                              .nope = 24,
                              .rope = 8,
                              .v_dim = 16,
                              .eps = 1e-5f};
    w->q_a = k3_test_json_floats(&j, 64 * HIDDEN, "%sq_a_proj_weight", pre);
    w->q_a_norm = k3_test_json_floats(&j, 64, "%sq_a_layernorm_weight", pre);
    w->q_b = k3_test_json_floats(&j, HEADS * 32 * 64, "%sq_b_proj_weight", pre);
    w->kv_a = k3_test_json_floats(&j, 40 * HIDDEN, "%skv_a_proj_with_mqa_weight", pre);
    w->kv_a_norm = k3_test_json_floats(&j, 32, "%skv_a_layernorm_weight", pre);
    w->kv_b = k3_test_json_floats(&j, HEADS * 40 * 32, "%skv_b_proj_weight", pre);
    w->g = k3_test_json_floats(&j, 64 * HIDDEN, "%sg_proj_weight", pre);
    w->o = k3_test_json_floats(&j, HIDDEN * 64, "%so_proj_weight", pre);
}

static void mla(void **state)
{
    enum { N = 6, ROW = 40 };
    struct k3_test_mla w;
    (void)state;
    open_fixture(OPS "mla.json");
    mla_weights(&w, "");
    const float *x = k3_test_json_floats(&j, N * HIDDEN, "in");
    const double *out = k3_test_json_doubles(&j, N * HIDDEN, "out"),
                 *latent = k3_test_json_doubles(&j, N * 32, "kv_latent");
    const double *k_rope = k3_test_json_doubles(&j, N * 8, "k_rope");
    EACH_SET (k) {
        float y[N * HIDDEN], cache[N * ROW];
        k3_test_mla_layer(k, &w, y, x, N, cache);
        for (size_t t = 0; t < N; t++) {
            NEAR(cache + t * ROW, latent + t * 32, 32, "mla latent");
            NEAR(cache + t * ROW + 32, k_rope + t * 8, 8, "mla shared key");
        }
        NEAR(y, out, N * HIDDEN, "mla");
    }
    k3_test_json_close(&j);
}

static void moe_weights(struct k3_test_moe *w, const char *pre)
{
    *w = (struct k3_test_moe){.hidden = HIDDEN,
                              .latent = LATENT,
                              .inter = INTER,
                              .shared_inter = 2 * INTER,
                              .n_experts = EXPERTS,
                              .top_k = EPT,
                              .eps = 1e-5f,
                              .beta = 4.0f,
                              .lin = 25.0f};
    w->gate = k3_test_json_floats(&j, EXPERTS * HIDDEN, "%sgate_weight", pre);
    w->bias = k3_test_json_floats(&j, EXPERTS, "%se_score_correction_bias", pre);
    w->down = k3_test_json_floats(&j, LATENT * HIDDEN, "%sdown_weight", pre);
    w->up = k3_test_json_floats(&j, HIDDEN * LATENT, "%sup_weight", pre);
    w->norm = k3_test_json_floats(&j, LATENT, "%snorm_weight", pre);
    for (size_t e = 0; e < EXPERTS; e++) {
        w->w1[e] = k3_test_json_floats(&j, INTER * LATENT, "%sexperts_%zu_w1_weight", pre, e);
        w->w3[e] = k3_test_json_floats(&j, INTER * LATENT, "%sexperts_%zu_w3_weight", pre, e);
        w->w2[e] = k3_test_json_floats(&j, LATENT * INTER, "%sexperts_%zu_w2_weight", pre, e);
    }
    w->shared_w1 = k3_test_json_floats(&j, 2 * INTER * HIDDEN, "%sshared_w1_weight", pre);
    w->shared_w3 = k3_test_json_floats(&j, 2 * INTER * HIDDEN, "%sshared_w3_weight", pre);
    w->shared_w2 = k3_test_json_floats(&j, HIDDEN * 2 * INTER, "%sshared_w2_weight", pre);
}

static void moe(void **state)
{
    struct k3_test_moe w;
    (void)state;
    open_fixture(OPS "moe.json");
    moe_weights(&w, "");
    const float *x = k3_test_json_floats(&j, 3 * HIDDEN, "in");
    const double *out = k3_test_json_doubles(&j, 3 * HIDDEN, "out");
    EACH_SET (k) {
        float y[3 * HIDDEN];
        k3_test_moe_layer(k, &w, y, x, 3);
        /* Outputs reach 178, and element 197 is a difference of such: the fixture's own weights in
         * double precision miss its fp32 result there by 1.25 of the MANIFEST's tolerance. */
        K3_ASSERT_NEAR(y, out, 3 * HIDDEN, 2 * tol_abs, tol_rel, k->name, "moe");
    }
    k3_test_json_close(&j);
}

/* A whole decoder layer, the placement of spec/model.md 0.2.  N positions, two snapshots before it.
 */
enum { N = 4 };
static void mix(const struct k3_kernels *k, float *h, const float *snapshots, size_t n_snapshots,
                const float *p, const char *which)
{
    const float *norm = k3_test_json_floats(&j, HIDDEN, "%s_norm_weight", which);
    const float *proj = k3_test_json_floats(&j, HIDDEN, "%s_proj_weight", which);
    float f[HIDDEN];
    k->mul_vec(f, norm, proj, HIDDEN);
    for (size_t t = 0; t < N; t++) {
        const float *x[4];
        size_t n = 0;
        for (; n < n_snapshots; n++)
            x[n] = snapshots + (t * n_snapshots + n) * HIDDEN;
        if (p)
            x[n++] = p + t * HIDDEN;
        k3_attnres(k, h + t * HIDDEN, x, n, f, HIDDEN, 1e-5f, NULL);
    }
}

static void norm_rows(const struct k3_kernels *k, float *y, const float *x, const char *weight)
{
    const float *w = k3_test_json_floats(&j, HIDDEN, "%s", weight);
    for (size_t t = 0; t < N; t++)
        k3_rmsnorm(k, y + t * HIDDEN, x + t * HIDDEN, w, HIDDEN, 1e-5f);
}

static void layer(const char *path, int is_mla)
{
    struct k3_test_kda kda;
    struct k3_test_mla mla_w;
    struct k3_test_moe moe_w;
    size_t n_after = 2;
    open_fixture(path);
    const float *in = k3_test_json_floats(&j, N * HIDDEN, "in");
    const float *before = k3_test_json_floats(&j, N * 2 * HIDDEN, "block_residual_in");
    const double *out = k3_test_json_doubles(&j, N * HIDDEN, "out");
    if ((int)k3_test_json_number(&j, "layer_idx") %
            (int)k3_test_json_number(&j, "attn_res_block_size") ==
        0)
        n_after = 3; /* a boundary: this layer pushes its prefix */
    const double *want_after = k3_test_json_doubles(&j, N * n_after * HIDDEN, "block_residual_out");
    if (is_mla)
        mla_weights(&mla_w, "self_attn_");
    else
        kda_weights(&kda, "self_attn_", "_proj_weight", "conv1d_weight", "_weight");
    moe_weights(&moe_w, "mlp_");
    EACH_SET (k) {
        float h[N * HIDDEN], x[N * HIDDEN], a[N * HIDDEN], after[N * 3 * HIDDEN], p[N * HIDDEN];
        float S[WIDTH * DIM] = {0}, hist[3 * (TAPS - 1) * WIDTH] = {0}, cache[N * 40];
        mix(k, h, before, 2, in, "self_attention_res");
        for (size_t t = 0; t < N; t++) {
            memcpy(after + t * n_after * HIDDEN, before + t * 2 * HIDDEN,
                   2 * HIDDEN * sizeof *after);
            if (n_after == 3)
                memcpy(after + (t * 3 + 2) * HIDDEN, in + t * HIDDEN, HIDDEN * sizeof *after);
        }
        NEAR(after, want_after, N * n_after * HIDDEN, path);
        norm_rows(k, x, h, "input_layernorm_weight");
        if (is_mla)
            k3_test_mla_layer(k, &mla_w, a, x, N, cache);
        else
            k3_test_kda_layer(k, &kda, a, x, N, S, hist);
        if (n_after == 3)
            memcpy(p, a, sizeof p);
        else
            k->add(p, in, a, N * HIDDEN);
        mix(k, h, after, n_after, p, "mlp_res");
        norm_rows(k, x, h, "post_attention_layernorm_weight");
        k3_test_moe_layer(k, &moe_w, a, x, N);
        k->add(p, p, a, N * HIDDEN);
        NEAR(p, out, N * HIDDEN, path);
    }
    k3_test_json_close(&j);
}

static void layer_with_kda(void **state)
{
    (void)state;
    layer(OPS "layer_kda.json", 0);
}

static void layer_with_mla(void **state)
{
    (void)state;
    layer(OPS "layer_mla.json", 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm),
        cmocka_unit_test(situ_glu),
        cmocka_unit_test(shortconv),
        cmocka_unit_test(kda_decay),
        cmocka_unit_test(kda_recurrence_of_1),
        cmocka_unit_test(kda_recurrence_of_8),
        cmocka_unit_test(kda_layer_of_1),
        cmocka_unit_test(kda_layer_of_8),
        cmocka_unit_test(router),
        cmocka_unit_test(attnres),
        cmocka_unit_test(mla),
        cmocka_unit_test(moe),
        cmocka_unit_test(layer_with_kda),
        cmocka_unit_test(layer_with_mla),
    };
    return cmocka_run_group_tests_name("ops_vectors", tests, find_sets_and_tolerance, NULL);
}
