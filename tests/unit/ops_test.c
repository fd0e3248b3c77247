/* tests/unit/ops_test.c: the operators against the vectors of spec/model.md 4, rules (e) and (g)
 * written out, and all sets bit-equal. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/ops.h"
#include "k3-computed/widen.h"
#include "tests/unit/kernel_sets.h"

/* The spec prints eight or nine digits of results computed in double: fp32 steps stay within this.
 */
#define ABS 1e-7
#define REL 2e-6
#define NEAR(got, want, n, what) K3_ASSERT_NEAR(got, want, n, ABS, REL, k->name, what)
#define EACH_SET(k)                                                                                \
    for (const struct k3_kernels *k, **set_ = sets; set_ < sets + n_sets && (k = *set_, 1); set_++)

static const struct k3_kernels *sets[3];
static size_t n_sets;

static int find_sets(void **state)
{
    (void)state;
    n_sets = k3_test_sets(sets);
    return 0;
}

static void v_rms(void **state)
{
    static const float x[4] = {.001f, .002f, -.003f, .004f}, w[4] = {1, 1, 1, 1};
    static const double want[4] = {0.23904572, 0.47809144, -0.71713717, 0.95618289};
    float y[4];
    (void)state;
    EACH_SET (k) {
        k3_rmsnorm(k, y, x, w, 4, 1e-5f);
        NEAR(y, want, 4, "V-RMS");
        memcpy(y, x, sizeof y);
        k3_rmsnorm(k, y, y, w, 4, 1e-5f);
        NEAR(y, want, 4, "V-RMS in place");
    }
}

/* Five positions in one go and split 2 + 3 with the carried history: identical bits. */
static void v_conv(void **state)
{
    static const float w[4] = {.1f, -.2f, .3f, .5f}, u[5] = {1, 2, -1, .5f, 4};
    static const double want[5] = {0.31122967, 1.0215855, -0.047502081, -0.14468385, 2.3653125};
    (void)state;
    EACH_SET (k) {
        float hist[3] = {0, 0, 0}, y[5], again[5], saved[3];
        for (size_t t = 0; t < 5; t++)
            k3_shortconv(k, y + t, u + t, hist, w, 1, 4);
        NEAR(y, want, 5, "V-CONV");
        assert_true(hist[0] == -1 && hist[1] == .5f && hist[2] == 4);
        memset(hist, 0, sizeof hist);
        for (size_t t = 0; t < 2; t++)
            k3_shortconv(k, again + t, u + t, hist, w, 1, 4);
        memcpy(saved, hist, sizeof saved);
        for (size_t t = 2; t < 5; t++) {
            again[t] = u[t];
            k3_shortconv(k, again + t, again + t, saved, w, 1, 4); /* y may be u */
        }
        K3_ASSERT_SAME(y, again, 5, k->name, "split and in place");
    }
}

/* More channels than one chunk of ops.c, odd counts, one tap, two taps. */
static void conv_of_many_channels(void **state)
{
    static const size_t counts[] = {0, 1, 255, 256, 257, 600};
    uint64_t seed = 1;
    (void)state;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (size_t taps = 1; taps <= 4; taps++) {
            static float u[3][600], w[600 * 4];
            size_t n = counts[c];
            k3_test_fill(u[0], 3 * 600, K3_TEST_PLAIN, &seed);
            k3_test_fill(w, 600 * 4, K3_TEST_PLAIN, &seed);
            EACH_SET (k) {
                static float hist[3 * 600], y[600];
                memset(hist, 0, sizeof hist);
                for (size_t t = 0; t < 3; t++) {
                    k3_shortconv(k, y, u[t], hist, w, n, taps);
                    for (size_t i = 0; i < n; i++) {
                        float acc = 0, want;
                        for (size_t j = 0; j < taps; j++)
                            acc = fmaf(w[i * taps + j],
                                       t + j + 1 < taps ? 0 : u[t + j + 1 - taps][i], acc);
                        want = acc * k3_sigmoidf(acc);
                        K3_ASSERT_SAME(&want, y + i, 1, k->name,
                                       "channel %zu of %zu, %zu taps, step %zu", i, n, taps, t);
                    }
                }
            }
        }
    }
}

static void v_l2(void **state)
{
    static const float x[4] = {3e-4f, 4e-4f, 0, 0}, zero[4] = {0, 0, 0, 0};
    static const double want[4] = {0.26832816, 0.35777088, 0, 0};
    static const double half[4] = {0.13416408, 0.17888544, 0, 0}, none[4] = {0, 0, 0, 0};
    float y[4];
    (void)state;
    EACH_SET (k) {
        k3_l2norm(k, y, x, 4, 1.0f);
        NEAR(y, want, 4, "V-L2");
        k3_l2norm(k, y, x, 4, 0.5f);
        NEAR(y, half, 4, "V-L2 with scale");
        k3_l2norm(k, y, zero, 4, 1.0f);
        NEAR(y, none, 4, "V-L2 of zero");
    }
}

static void v_decay(void **state)
{
    static const float a_log[5] = {.7f, 0, -.4684f, 1.0066f, 1}, sum[5] = {-1.2f, 0, 2, -.5f, 3};
    static const double want[5] = {0.663906245, 0.082084999, 0.020481470, 0.362546738, 0.006747632};
    (void)state;
    EACH_SET (k) {
        for (size_t i = 0; i < 5; i++) {
            float bias = .25f, z = sum[i] - bias, alpha;
            k3_kda_decay(k, &alpha, &z, &bias, k3_expf(a_log[i]), -5.0f, 1);
            K3_ASSERT_NEAR(&alpha, &want[i], 1, ABS, 5e-6, k->name, "V-DECAY %zu", i);
        }
    }
}

static void v_kda(void **state)
{
    static const float q[3][2] = {{1, 0}, {.6f, .8f}, {0, 1}},
                       key[3][2] = {{.6f, .8f}, {.8f, -.6f}, {1, 0}};
    static const float v[3][2] = {{1, 2}, {3, -1}, {-2, .5f}},
                       g[3][2] = {{-.1f, -1}, {-2, -.5f}, {-.3f, -.7f}};
    static const float beta[3] = {.5f, .9f, .25f};
    static const double want_o[3][2] = {
        {0.21213203, 0.42426407}, {0.15446759, 0.30893518}, {-0.50509729, 0.31711021}};
    static const double want_S[4] = {0.76792324, -0.13944638, -0.71431544, 0.44846156};
    (void)state;
    EACH_SET (k) {
        float S[4] = {0}, o[2], scratch[2];
        for (size_t t = 0; t < 3; t++) {
            float qs[2], alpha[2];
            k->scale(qs, q[t], 0.70710678f, 2);
            k->exp(alpha, g[t], 2);
            k->kda_step(S, o, qs, key[t], v[t], alpha, beta[t], 2, 2, scratch);
            NEAR(o, want_o[t], 2, "V-KDA output");
        }
        NEAR(S, want_S, 4, "V-KDA state");
    }
}

static void v_gnorm(void **state)
{
    static const float w[4] = {1, 1.5f, .5f, 1}, o[4] = {.5f, -1, 2, .25f}, gate[4] = {0, 2, -1, 4};
    static const double want[4] = {0.21692964, -1.146426, 0.23336546, 0.2130279};
    float y[4];
    (void)state;
    EACH_SET (k) {
        k3_kda_gate(k, y, o, w, gate, 4, 1e-5f);
        NEAR(y, want, 4, "V-GNORM");
        memcpy(y, o, sizeof y);
        k3_kda_gate(k, y, y, w, gate, 4, 1e-5f);
        NEAR(y, want, 4, "V-GNORM over o");
        memcpy(y, gate, sizeof y);
        k3_kda_gate(k, y, o, w, y, 4, 1e-5f);
        NEAR(y, want, 4, "V-GNORM over the gate");
    }
}

static void gate_of_a_wide_head(void **state)
{
    enum { D = 600 };
    static float o[D], w[D], gate[D], y[D];
    uint64_t seed = 2;
    (void)state;
    k3_test_fill(o, D, K3_TEST_PLAIN, &seed);
    k3_test_fill(w, D, K3_TEST_PLAIN, &seed);
    k3_test_fill(gate, D, K3_TEST_PLAIN, &seed);
    EACH_SET (k) {
        float r = 1.0f / sqrtf(k->dot(o, o, D) / D + 1e-5f);
        k3_kda_gate(k, y, o, w, gate, D, 1e-5f);
        for (size_t i = 0; i < D; i++) {
            float want = ((o[i] * r) * w[i]) * k3_sigmoidf(gate[i]);
            K3_ASSERT_SAME(&want, y + i, 1, k->name, "channel %zu", i);
        }
    }
}

/* The absorbed form: fold WK into q by mul_t, attend over latents, WV by mul. */
static void v_mla(void **state)
{
    static const float kv[2][3] = {{1, -.5f, .3f}, {.25f, .75f, -1.2f}}, q_c[2] = {.7f, -.4f};
    static const float wk[2][2] = {{.2f, .4f}, {-.6f, .1f}}, wv[2][2] = {{1, .5f}, {-.3f, .8f}};
    static const double want_q[2] = {0.38, 0.24}, want_lat[2] = {0.78992531, -0.14987552};
    static const double want_o[2] = {0.71498755, -0.35687801};
    (void)state;
    EACH_SET (k) {
        float q[3] = {0, 0, 1.1f}, lat[2], o[2], scratch[4];
        assert_int_equal(k3_attend_scratch(1, 2, 2), 4);
        k->mul_t[K3_F32](q, q_c, wk, 2, 2, 2);
        NEAR(q, want_q, 2, "V-MLA q_abs");
        k3_attend(k, lat, q, 1, kv[0], 3, (size_t[]){ 2 }, 2, 1, 0.57735027f, scratch);
        NEAR(lat, want_lat, 2, "V-MLA o_lat");
        k->mul[K3_F32](o, 2, wv, 2, 2, lat, 2, 1);
        NEAR(o, want_o, 2, "V-MLA o");
    }
}

/* Rule (e) written out, around the ends of its blocks of 64, with and without gaps between the
 * rows. */
static void attend_follows_the_rule(void **state)
{
    enum { LAT = 19, ROPE = 5, LD = LAT + ROPE + 3, MAX_N = 200 };
    static const size_t counts[] = {1, 2, 63, 64, 65, 127, 128, 129, 200};
    static float kv[MAX_N * LD], scratch[MAX_N + LAT];
    float q[LAT + ROPE], want[LAT], got[LAT];
    uint64_t seed = 3;
    (void)state;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (size_t ld = LAT + ROPE; ld <= LD; ld += 3) {
            size_t n = counts[c];
            float p[MAX_N], m = -INFINITY, total = 0;
            k3_test_fill(kv, MAX_N * LD, K3_TEST_PLAIN, &seed);
            k3_test_fill(q, LAT + ROPE, K3_TEST_PLAIN, &seed);
            for (size_t s = 0; s < n; s++) {
                p[s] = k3_kernels_c.dot(q, kv + s * ld, LAT + ROPE) * 3.0f;
                m = p[s] > m ? p[s] : m;
            }
            for (size_t i = 0; i < LAT; i++)
                want[i] = 0;
            for (size_t s0 = 0; s0 < n; s0 += 64) {
                float block_p = 0, block[LAT] = {0};
                for (size_t s = s0; s < n && s < s0 + 64; s++) {
                    p[s] = k3_expf(p[s] - m);
                    block_p += p[s];
                    for (size_t i = 0; i < LAT; i++)
                        block[i] = fmaf(p[s], kv[s * ld + i], block[i]);
                }
                total += block_p;
                for (size_t i = 0; i < LAT; i++)
                    want[i] += block[i];
            }
            for (size_t i = 0; i < LAT; i++)
                want[i] /= total;
            EACH_SET (k) {
                k3_attend(k, got, q, 1, kv, ld, &n, LAT, ROPE, 3.0f, scratch);
                K3_ASSERT_SAME(want, got, LAT, k->name, "%zu positions, rows %zu apart", n, ld);
            }
        }
    }
}

/* Queries that attend together get what each gets alone, however much each sees. */
static void attend_does_not_see_its_neighbours(void **state)
{
    enum { LAT = 200, ROPE = 9, LD = LAT + ROPE, MAX_N = 300, N_Q = K3_ATTEND_QUERIES };
    static const size_t n_seen[N_Q] = { 1, 300, 64, 65, 128, 37, 299, 192 };
    static float kv[MAX_N * LD], q[N_Q * LD], all[N_Q * LAT], one[LAT], scratch[N_Q * (MAX_N + LAT)];
    uint64_t seed = 4;
    (void)state;
    k3_test_fill(kv, MAX_N * LD, K3_TEST_PLAIN, &seed);
    k3_test_fill(q, N_Q * LD, K3_TEST_PLAIN, &seed);
    EACH_SET (k) {
        for (size_t n_q = 1; n_q <= N_Q; n_q++) {
            k3_attend(k, all, q, n_q, kv, LD, n_seen, LAT, ROPE, 0.3f, scratch);
            for (size_t i = 0; i < n_q; i++) {
                k3_attend(&k3_kernels_c, one, q + i * LD, 1, kv, LD, n_seen + i, LAT, ROPE, 0.3f, scratch);
                K3_ASSERT_SAME(one, all + i * LAT, LAT, k->name, "query %zu of %zu", i, n_q);
            }
        }
    }
}

static void v_res(void **state)
{
    static const float x0[4] = {2, 0, -2, 0}, x1[4] = {.1f, .2f, .3f, .4f}, x2[4] = {10, -10, 0, 5};
    static const float *const x[3] = {x0, x1, x2};
    static const float f[4] = {.5f, .5f, -.5f, 1};
    static const double want_a[3] = {0.39668335, 0.41547583, 0.18784082};
    static const double want_y[4] = {2.7133225, -1.7953131, -0.66872394, 1.1053945},
                        want_one[4] = {10, -10, 0, 5};
    (void)state;
    EACH_SET (k) {
        float a[3], y[4], again[4];
        k3_attnres(k, y, x, 3, f, 4, 1e-5f, a);
        NEAR(a, want_a, 3, "V-RES weights");
        NEAR(y, want_y, 4, "V-RES");
        k3_attnres(k, again, x, 3, f, 4, 1e-5f, NULL);
        K3_ASSERT_SAME(y, again, 4, k->name, "without weights");
        k3_attnres(k, y, x + 2, 1, f, 4, 1e-5f, a); /* one source: the identity */
        NEAR(y, want_one, 4, "one source");
        assert_true(a[0] == 1.0f);
    }
}

static void attnres_follows_the_rule(void **state)
{
    enum { N = 9, H = 147 };
    static float x[N][H], f[H];
    const float *px[N];
    uint64_t seed = 4;
    float e[N], m = -INFINITY, sum = 0, want[H] = {0}, got[H];
    const struct k3_kernels *c = &k3_kernels_c;
    (void)state;
    k3_test_fill(x[0], N * H, K3_TEST_PLAIN, &seed);
    k3_test_fill(f, H, K3_TEST_PLAIN, &seed);
    for (size_t s = 0; s < N; s++) {
        px[s] = x[s];
        e[s] = (1.0f / sqrtf(c->dot(x[s], x[s], H) / H + 1e-5f)) * c->dot(x[s], f, H);
        m = e[s] > m ? e[s] : m;
    }
    for (size_t s = 0; s < N; s++) {
        e[s] = k3_expf(e[s] - m);
        sum += e[s];
    }
    for (size_t s = 0; s < N; s++)
        for (size_t i = 0; i < H; i++)
            want[i] = fmaf(e[s] / sum, x[s][i], want[i]);
    EACH_SET (k) {
        k3_attnres(k, got, px, N, f, H, 1e-5f, NULL);
        K3_ASSERT_SAME(want, got, H, k->name, "attnres");
    }
}

static void v_route(void **state)
{
    static const float logits[6] = {2, 1, 0, -1, .5f, -3}, bias[6] = {-.5f, 0, .2f, .6f, -.1f, .9f};
    static const double want[2] = {0.85009236, 0.14990764},
                        raw[2] = {0.26894142 * 2, 0.047425873 * 2};
    (void)state;
    EACH_SET (k) {
        uint16_t ids[2];
        float w[2], scratch[6];
        k3_route(k, ids, w, logits, bias, 6, 2, 1, 1.0f, scratch);
        assert_int_equal(ids[0], 3);
        assert_int_equal(ids[1], 5);
        NEAR(w, want, 2, "V-ROUTE");
        k3_route(k, ids, w, logits, bias, 6, 2, 0, 2.0f, scratch);
        NEAR(w, raw, 2, "V-ROUTE without renormalisation, scaled");
    }
}

/* Rule (g): ties go to the lower id, ids ascend, the sum ascends; against a sort written out. */
static void route_follows_the_rule(void **state)
{
    enum { N = 97 };
    uint64_t seed = 5;
    (void)state;
    for (int round = 0; round < 300; round++) {
        float logits[N], bias[N], s[N], choice[N], scratch[N], sum = 0;
        size_t top_k = 1 + k3_test_random(&seed) % (round % 10 == 0 ? N : 16);
        int taken[N] = {0};
        for (size_t e = 0; e < N; e++) { /* few distinct values: many ties */
            logits[e] = (float)(k3_test_random(&seed) % 5) - 2;
            bias[e] = (float)(k3_test_random(&seed) % 3) / 4;
            s[e] = k3_sigmoidf(logits[e]);
            choice[e] = s[e] + bias[e];
        }
        for (size_t i = 0; i < top_k; i++) {
            size_t best = N;
            for (size_t e = 0; e < N; e++)
                if (!taken[e] && (best == N || choice[e] > choice[best]))
                    best = e;
            taken[best] = 1;
        }
        for (size_t e = 0; e < N; e++)
            if (taken[e])
                sum += s[e];
        EACH_SET (k) {
            uint16_t ids[N];
            float w[N];
            size_t i = 0;
            k3_route(k, ids, w, logits, bias, N, top_k, 1, 1.5f, scratch);
            for (size_t e = 0; e < N; e++) {
                if (!taken[e])
                    continue;
                float want = s[e] / (sum + 1e-20f) * 1.5f;
                assert_int_equal(ids[i], e);
                K3_ASSERT_SAME(&want, w + i, 1, k->name, "round %d, expert %zu", round, e);
                i++;
            }
            assert_int_equal(i, top_k);
        }
    }
}

static void route_puts_nan_last(void **state)
{
    float logits[5] = {NAN, 0, -200, NAN, 1}, bias[5] = {0}, w[5], scratch[5];
    uint16_t ids[5];
    (void)state;
    EACH_SET (k) {
        k3_route(k, ids, w, logits, bias, 5, 3, 1, 1.0f, scratch);
        assert_int_equal(ids[0], 1);
        assert_int_equal(ids[1], 2);
        assert_int_equal(ids[2], 4);
        assert_true(w[0] > 0 && w[1] == 0 && w[2] > w[0]);
        k3_route(k, ids, w, logits, bias, 5, 4, 1, 1.0f,
                 scratch); /* one NaN has to be taken, and is seen */
        assert_int_equal(ids[0], 0);
        assert_true(isnan(w[0]));
    }
}

static void v_situ(void **state)
{
    static const float g[8] = {1, -1, .5f, 2, 4, 10, -10, 100},
                       u[8] = {1, 2, -.25f, 5, -30, 100, 100, -1000};
    static const double want[8] = {0.715817828, -0.525828896, -0.0774021063,  8.03379612,
                                   -62.3486916, 98.5907816,   -0.00447601456, -100};
    float y[8];
    (void)state;
    EACH_SET (k) {
        k->situ(y, g, u, 8, 4.0f, 25.0f);
        NEAR(y, want, 8, "V-SITU");
    }
}

static void widen_all_dtypes(void **state)
{
    static const uint16_t bf16[4] = {0x3f80, 0xc0a0, 0x8000, 0x0001},
                          f16[4] = {0x3c00, 0xc500, 0x8000, 0x0001};
    static const float f32[4] = {1, -5, -0.0f, 0x1p-133f}, from_f16[4] = {1, -5, -0.0f, 0x1p-24f};
    char loose[17];
    float y[4];
    (void)state;
    memcpy(loose + 1, bf16, sizeof bf16);
    k3_widen(y, loose + 1, K3_BF16, 4);
    assert_memory_equal(y, f32, sizeof y);
    memcpy(loose + 1, f16, sizeof f16);
    k3_widen(y, loose + 1, K3_F16, 4);
    assert_memory_equal(y, from_f16, sizeof y);
    memcpy(loose + 1, f32, sizeof f32);
    k3_widen(y, loose + 1, K3_F32, 4);
    assert_memory_equal(y, f32, sizeof y);
}

/* Norms over awkward lengths and values: the sets agree bit for bit. */
static void norms_agree_over_the_sets(void **state)
{
    static const size_t shapes[] = {1, 15, 16, 17, 33, 127, 128, 512, 1000};
    uint64_t seed = 6;
    float x[1000], w[1000], want[1000], got[1000];
    (void)state;
    for (size_t c = 0; c < sizeof shapes / sizeof *shapes; c++) {
        for (enum k3_test_kind kind = K3_TEST_PLAIN; kind <= K3_TEST_SPECIAL; kind++) {
            size_t n = shapes[c];
            k3_test_fill(x, n, kind, &seed);
            k3_test_fill(w, n, kind, &seed);
            for (int op = 0; op < 4; op++) {
                EACH_SET (k) {
                    float *y = k == sets[0] ? want : got;
                    switch (op) {
                    case 0: k3_rmsnorm(k, y, x, w, n, 1e-5f); break;
                    case 1: k3_l2norm(k, y, x, n, 0.088388346f); break;
                    case 2: k3_kda_decay(k, y, x, w, 1.5f, -5.0f, n); break;
                    default: k3_kda_gate(k, y, x, w, w, n, 1e-5f); break;
                    }
                    if (k != sets[0])
                        K3_ASSERT_SAME(want, got, n, k->name, "op %d of %zu, kind %d", op, n, kind);
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(v_rms),
        cmocka_unit_test(v_conv),
        cmocka_unit_test(conv_of_many_channels),
        cmocka_unit_test(v_l2),
        cmocka_unit_test(v_decay),
        cmocka_unit_test(v_kda),
        cmocka_unit_test(v_gnorm),
        cmocka_unit_test(gate_of_a_wide_head),
        cmocka_unit_test(v_mla),
        cmocka_unit_test(attend_follows_the_rule),
        cmocka_unit_test(attend_does_not_see_its_neighbours),
        cmocka_unit_test(v_res),
        cmocka_unit_test(attnres_follows_the_rule),
        cmocka_unit_test(v_route),
        cmocka_unit_test(route_follows_the_rule),
        cmocka_unit_test(route_puts_nan_last),
        cmocka_unit_test(v_situ),
        cmocka_unit_test(widen_all_dtypes),
        cmocka_unit_test(norms_agree_over_the_sets),
    };
    return cmocka_run_group_tests_name("ops", tests, find_sets, NULL);
}
