/* tests/unit/kernels_test.c: rules (a), (b), (d) and the elementwise kernels: every set equals
 * kernels_c.c bit for bit on awkward shapes, offsets and values, and kernels_c.c equals the formula
 * written out here. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/widen.h"
#include "tests/unit/kernel_sets.h"

static const size_t shapes[] = {0,  1,  2,  3,  7,  8,  9,   15,  16,  17,
                                31, 32, 33, 63, 64, 65, 127, 128, 576, 1000};
#define N_SHAPES (sizeof shapes / sizeof *shapes)
static const enum k3_test_kind kinds[] = {K3_TEST_PLAIN, K3_TEST_TINY, K3_TEST_SPECIAL};
static const enum k3_dtype dtypes[] = {K3_F32, K3_F16, K3_BF16};
static const char *const dtype_names[] = {"f32", "f16", "bf16"};

static const struct k3_kernels *sets[3];
static size_t n_sets;

static int find_sets(void **state)
{
    (void)state;
    n_sets = k3_test_sets(sets);
    return 0;
}

/* Exactly n bytes from malloc at an odd distance from its alignment, so that a sanitizer sees any
 * read beyond. */
struct loose {
    char *base, *at;
};
static struct loose loose_new(size_t n_bytes, size_t off)
{
    struct loose l;
    l.base = malloc(n_bytes + off ? n_bytes + off : 1);
    assert_non_null(l.base);
    l.at = l.base + off;
    return l;
}

static float *floats(size_t n)
{
    float *x = calloc(n ? n : 1, sizeof *x);
    assert_non_null(x);
    return x;
}

/* y has ldy > n_out: what lies between the rows must not be written. */
static void check_mul(enum k3_dtype dtype, size_t n_out, size_t n_cols, size_t n_rows, size_t off,
                      enum k3_test_kind kind, uint64_t *seed)
{
    size_t size = dtype == K3_F32 ? 4 : 2, ldx = n_cols + 3, ldy = n_out + 2, n_y = n_rows * ldy;
    struct loose w = loose_new(n_out * n_cols * size, off);
    float *x = floats(n_rows * ldx), *want = floats(n_y), *got = floats(n_y);
    k3_test_fill_dtype(w.at, n_out * n_cols, dtype, kind, seed);
    k3_test_fill(x, n_rows * ldx, kind, seed);
    for (size_t i = 0; i < n_y; i++)
        want[i] = 77;
    sets[0]->mul[dtype](want, ldy, w.at, n_out, n_cols, x, ldx, n_rows);
    for (size_t s = 1; s < n_sets; s++) {
        for (size_t i = 0; i < n_y; i++)
            got[i] = 77;
        sets[s]->mul[dtype](got, ldy, w.at, n_out, n_cols, x, ldx, n_rows);
        K3_ASSERT_SAME(want, got, n_y, sets[s]->name,
                       "mul %s %zu x %zu, %zu rows, offset %zu, kind %d", dtype_names[dtype], n_out,
                       n_cols, n_rows, off, kind);
    }
    free(w.base);
    free(x);
    free(want);
    free(got);
}

static void mul_sets_agree_on_column_counts(void **state)
{
    uint64_t seed = 1;
    (void)state;
    for (size_t d = 0; d < 3; d++)
        for (size_t c = 0; c < N_SHAPES; c++)
            for (size_t k = 0; k < 3; k++)
                for (size_t off = 0; off < 4; off += 1)
                    check_mul(dtypes[d], 5, shapes[c], 3, off, kinds[k], &seed);
}

static void mul_sets_agree_on_w_row_counts(void **state)
{
    uint64_t seed = 2;
    (void)state;
    for (size_t d = 0; d < 3; d++)
        for (size_t n_out = 0; n_out <= 18; n_out++)
            for (size_t n_rows = 0; n_rows <= 8; n_rows++)
                check_mul(dtypes[d], n_out, 35, n_rows, 1, K3_TEST_SPECIAL, &seed);
}

static void mul_sets_agree_on_x_row_counts(void **state)
{
    uint64_t seed = 3;
    (void)state;
    for (size_t d = 0; d < 3; d++)
        for (size_t n_rows = 1; n_rows <= 70; n_rows++)
            check_mul(dtypes[d], 9, 49, n_rows, 2, n_rows & 1 ? K3_TEST_PLAIN : K3_TEST_SPECIAL,
                      &seed);
}

/* W larger than the block that is kept in the cache while the x rows pass over it. */
static void mul_sets_agree_across_cache_blocks(void **state)
{
    uint64_t seed = 4;
    (void)state;
    for (size_t d = 0; d < 3; d++) {
        check_mul(dtypes[d], 45, 7001, 8, 1, K3_TEST_PLAIN, &seed);
        check_mul(dtypes[d], 3, 70003, 7, 1, K3_TEST_PLAIN, &seed);
    }
}

/* Widths of more than one block of columns, with and without a rest, for each number of rows of x: every panel, every
 * tile at the end of a chunk, every chain that rests in between. */
static void mul_sets_agree_on_wide_rows(void **state)
{
    uint64_t seed = 7;
    (void)state;
    for (size_t d = 0; d < 3; d++)
        for (size_t n_rows = 1; n_rows <= 70; n_rows++) {
            size_t n_cols = n_rows % 3 == 0 ? 1792 : n_rows % 3 == 1 ? 1793 + n_rows % 31 : 2688 + n_rows % 17;
            check_mul(dtypes[d], 1 + n_rows * 5 % 13, n_cols, n_rows, n_rows % 4, K3_TEST_PLAIN, &seed);
        }
    for (size_t n_out = 1; n_out <= 75; n_out += 2) /* across a chunk */
        check_mul(K3_BF16, n_out, 1830, 7, 1, K3_TEST_SPECIAL, &seed);
    for (size_t d = 0; d < 3; d++)
        for (size_t n_rows = 1; n_rows <= 5; n_rows++) /* streams: whole runs of columns and what is left of them */
            for (size_t n_cols = 96; n_cols <= 161; n_cols++)
                check_mul(dtypes[d], 1 + (n_cols + n_rows) % 11, n_cols, n_rows, 1, K3_TEST_SPECIAL, &seed);
}

/* A row's result does not depend on the rows beside it, nor on how W is cut into calls. */
static void mul_does_not_see_its_neighbours(void **state)
{
    enum { N_OUT = 23, N_COLS = 161, N_ROWS = 13 };
    uint64_t seed = 5;
    uint16_t w[N_OUT * N_COLS];
    float x[N_ROWS * N_COLS], all[N_ROWS * N_OUT], one[N_ROWS * N_OUT];
    (void)state;
    k3_test_fill_dtype(w, N_OUT * N_COLS, K3_BF16, K3_TEST_PLAIN, &seed);
    k3_test_fill(x, N_ROWS * N_COLS, K3_TEST_PLAIN, &seed);
    for (size_t s = 0; s < n_sets; s++) {
        sets[s]->mul[K3_BF16](all, N_OUT, w, N_OUT, N_COLS, x, N_COLS, N_ROWS);
        for (size_t r = 0; r < N_ROWS; r++)
            for (size_t o = 0; o < N_OUT; o++)
                sets[s]->mul[K3_BF16](one + r * N_OUT + o, N_OUT, w + o * N_COLS, 1, N_COLS,
                                      x + r * N_COLS, N_COLS, 1);
        K3_ASSERT_SAME(all, one, N_ROWS * N_OUT, sets[s]->name, "one by one");
    }
}

/* Rule (b) written out for one awkward length: 37 = two full rounds and five more elements. */
static void mul_follows_the_rule(void **state)
{
    enum { N = 37 };
    uint64_t seed = 6;
    float w[N], x[N], lane[16] = {0}, got;
    (void)state;
    for (int round = 0; round < 1000; round++) {
        k3_test_fill(w, N, K3_TEST_PLAIN, &seed);
        k3_test_fill(x, N, K3_TEST_PLAIN, &seed);
        for (size_t l = 0; l < 16; l++) {
            lane[l] = fmaf(w[l + 16], x[l + 16], fmaf(w[l], x[l], 0.0f));
            if (l < 5)
                lane[l] = fmaf(w[l + 32], x[l + 32], lane[l]);
        }
        float e[8], q[4];
        for (size_t l = 0; l < 8; l++)
            e[l] = lane[l] + lane[l + 8];
        for (size_t l = 0; l < 4; l++)
            q[l] = e[l] + e[l + 4];
        float want = (q[0] + q[2]) + (q[1] + q[3]);
        for (size_t s = 0; s < n_sets; s++) {
            sets[s]->mul[K3_F32](&got, 1, w, 1, N, x, N, 1);
            K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "mul round %d", round);
            got = sets[s]->dot(w, x, N);
            K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "dot round %d", round);
        }
    }
}

/* A missing tail element is absent: fma(0, 0, -0) would turn a lane's -0 into +0. */
static void missing_elements_leave_their_lane_alone(void **state)
{
    float w[17], x[17], got, want = -0.0f;
    (void)state;
    for (size_t i = 0; i < 17; i++) { /* each product is -2^-150 or less: every lane rounds to -0 */
        w[i] = -0x1p-100f;
        x[i] = 0x1p-100f;
    }
    for (size_t s = 0; s < n_sets; s++) {
        sets[s]->mul[K3_F32](&got, 1, w, 1, 17, x, 17, 1);
        K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "mul");
    }
}

/* Rule (a): products and sums in the subnormal range are kept, so neither FTZ nor DAZ is on. */
static void subnormals_are_kept(void **state)
{
    float w = 0x1p-149f, x = 1.0f, got, want = 0x1p-149f;
    float a = 0x1p-126f, b = -0x1.8p-127f, sum, want_sum = 0x1p-128f;
    (void)state;
    for (size_t s = 0; s < n_sets; s++) {
        sets[s]->mul[K3_F32](&got, 1, &w, 1, 1, &x, 1, 1);
        K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "mul");
        sets[s]->add(&sum, &a, &b, 1);
        K3_ASSERT_SAME(&want_sum, &sum, 1, sets[s]->name, "add");
    }
}

/* All 65536 patterns of both 16-bit types, each times one: the widened value itself, or NaN. */
static void widening_is_exact(void **state)
{
    float one = 1.0f, got, want;
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint16_t h = (uint16_t)bits;
        int e = h >> 10 & 31;
        double m = h & 1023, f16 = e == 0 ? ldexp(m, -24) : ldexp(m + 1024, e - 25);
        if (e == 31)
            f16 = m != 0 ? NAN : INFINITY;
        want = (float)(h & 0x8000 ? -f16 : f16) +
               0.0f; /* the chain begins with +0: -0 comes out as +0 */
        for (size_t s = 0; s < n_sets; s++) {
            sets[s]->mul[K3_F16](&got, 1, &h, 1, 1, &one, 1, 1);
            K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "f16 %04x", bits);
        }
        want = k3_bits_to_f32(bits << 16) + 0.0f;
        for (size_t s = 0; s < n_sets; s++) {
            sets[s]->mul[K3_BF16](&got, 1, &h, 1, 1, &one, 1, 1);
            K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "bf16 %04x", bits);
        }
    }
}

static void dot_sets_agree(void **state)
{
    uint64_t seed = 7;
    float *a = floats(1000), *b = floats(1001);
    (void)state;
    for (size_t c = 0; c < N_SHAPES; c++) {
        for (size_t k = 0; k < 3; k++) {
            k3_test_fill(a, shapes[c], kinds[k], &seed);
            k3_test_fill(b + 1, shapes[c], kinds[k], &seed);
            float want = sets[0]->dot(a, b + 1, shapes[c]);
            for (size_t s = 1; s < n_sets; s++) {
                float got = sets[s]->dot(a, b + 1, shapes[c]);
                K3_ASSERT_SAME(&want, &got, 1, sets[s]->name, "dot of %zu, kind %d", shapes[c],
                               kinds[k]);
            }
        }
    }
    free(a);
    free(b);
}

/* Rule (d). */
static void mul_t_sets_agree(void **state)
{
    static const size_t sums[] = {0, 1, 2, 17, 64, 128};
    uint64_t seed = 8;
    (void)state;
    for (size_t d = 0; d < 3; d++) {
        for (size_t c = 0; c < N_SHAPES; c++) {
            for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
                enum k3_test_kind kind = kinds[(c + i) % 3];
                size_t n = shapes[c], n_sum = sums[i], ldm = n + 5,
                       size = dtypes[d] == K3_F32 ? 4 : 2;
                struct loose m = loose_new(n_sum * ldm * size, 1);
                float *a = floats(n_sum), *y0 = floats(n), *want = floats(n), *got = floats(n);
                k3_test_fill_dtype(m.at, n_sum * ldm, dtypes[d], kind, &seed);
                k3_test_fill(a, n_sum, kind, &seed);
                k3_test_fill(y0, n, kind, &seed);
                memcpy(want, y0, n * sizeof *y0);
                sets[0]->mul_t[dtypes[d]](want, a, m.at, ldm, n_sum, n);
                for (size_t s = 1; s < n_sets; s++) {
                    memcpy(got, y0, n * sizeof *y0);
                    sets[s]->mul_t[dtypes[d]](got, a, m.at, ldm, n_sum, n);
                    K3_ASSERT_SAME(want, got, n, sets[s]->name,
                                   "mul_t %s, %zu sums, %zu outputs, kind %d", dtype_names[d],
                                   n_sum, n, kind);
                }
                free(m.base);
                free(a);
                free(y0);
                free(want);
                free(got);
            }
        }
    }
}

static void mul_t_follows_the_rule(void **state)
{
    float a[3] = {0x1.000002p0f, 3.0f, -1.0f}, m[3][2] = {{1, 0.1f}, {0.1f, 7}, {0.3f, -0x1p-30f}},
          y[2];
    (void)state;
    for (size_t s = 0; s < n_sets; s++) {
        float want[2] = {fmaf(a[2], m[2][0], fmaf(a[1], m[1][0], fmaf(a[0], m[0][0], 0.7f))),
                         fmaf(a[2], m[2][1], fmaf(a[1], m[1][1], fmaf(a[0], m[0][1], -0.7f)))};
        y[0] = 0.7f;
        y[1] = -0.7f;
        sets[s]->mul_t[K3_F32](y, a, m, 2, 3, 2);
        K3_ASSERT_SAME(want, y, 2, sets[s]->name, "mul_t");
    }
}

static void conv_sets_agree(void **state)
{
    uint64_t seed = 9;
    (void)state;
    for (size_t c = 0; c < N_SHAPES; c++) {
        for (size_t taps = 1; taps <= 5; taps++) {
            enum k3_test_kind kind = kinds[(c + taps) % 3];
            size_t n = shapes[c], ldh = n + 1;
            float *u = floats(n), *hist = floats((taps - 1) * ldh), *w = floats(n * taps),
                  *want = floats(n);
            float *got = floats(n);
            k3_test_fill(u, n, kind, &seed);
            k3_test_fill(hist, (taps - 1) * ldh, kind, &seed);
            k3_test_fill(w, n * taps, kind, &seed);
            sets[0]->conv(want, u, hist, ldh, w, n, taps);
            for (size_t i = 0; i < n; i++) {
                float acc = 0;
                for (size_t t = 0; t < taps; t++)
                    acc = fmaf(w[i * taps + t], t + 1 < taps ? hist[t * ldh + i] : u[i], acc);
                K3_ASSERT_SAME(&acc, want + i, 1, "c", "conv by formula, channel %zu of %zu", i, n);
            }
            for (size_t s = 1; s < n_sets; s++) {
                sets[s]->conv(got, u, hist, ldh, w, n, taps);
                K3_ASSERT_SAME(want, got, n, sets[s]->name, "conv of %zu with %zu taps", n, taps);
            }
            free(u);
            free(hist);
            free(w);
            free(want);
            free(got);
        }
    }
}

/* One function over all that maps vectors to a vector, op by op; `in_place` 1 writes over a, 2 over
 * b. */
enum { AXPY, ADD, SCALE, MUL_VEC, EXP, SIGMOID, TANH, SILU, SITU, N_ELEMENTWISE };
static void elementwise(const struct k3_kernels *k, int op, float *y, const float *a,
                        const float *b, size_t n, float c)
{
    switch (op) {
    case AXPY: k->axpy(y, c, a, n); break;
    case ADD: k->add(y, a, b, n); break;
    case SCALE: k->scale(y, a, c, n); break;
    case MUL_VEC: k->mul_vec(y, a, b, n); break;
    case EXP: k->exp(y, a, n); break;
    case SIGMOID: k->sigmoid(y, a, n); break;
    case TANH: k->tanh(y, a, n); break;
    case SILU: k->silu(y, a, n); break;
    default: k->situ(y, a, b, n, 4.0f, 25.0f); break;
    }
}

static void elementwise_sets_agree(void **state)
{
    uint64_t seed = 10;
    float a[1001], b[1001], y0[1001], want[1001], got[1001], copy[1001];
    (void)state;
    for (int op = 0; op < N_ELEMENTWISE; op++) {
        for (size_t c = 0; c < N_SHAPES; c++) {
            for (size_t k = 0; k < 3; k++) {
                size_t n = shapes[c];
                float by;
                k3_test_fill(a, n + 1, kinds[k], &seed);
                k3_test_fill(b, n + 1, kinds[k], &seed);
                k3_test_fill(y0, n + 1, kinds[k], &seed);
                k3_test_fill(&by, 1, kinds[k], &seed);
                memcpy(want, y0, sizeof want);
                elementwise(sets[0], op, want, a, b, n, by);
                for (size_t s = 0; s < n_sets; s++) {
                    memcpy(got, y0, sizeof got);
                    elementwise(sets[s], op, got, a, b, n, by);
                    K3_ASSERT_SAME(want, got, n + 1, sets[s]->name, "op %d of %zu, kind %zu", op, n,
                                   k);
                    if (op == AXPY)
                        continue;
                    memcpy(copy, a, sizeof copy);
                    elementwise(sets[s], op, copy, copy, b, n, by);
                    K3_ASSERT_SAME(want, copy, n, sets[s]->name, "op %d of %zu over its input", op,
                                   n);
                    if (op != ADD && op != MUL_VEC && op != SITU)
                        continue;
                    memcpy(copy, b, sizeof copy);
                    elementwise(sets[s], op, copy, a, copy, n, by);
                    K3_ASSERT_SAME(want, copy, n, sets[s]->name,
                                   "op %d of %zu over its second input", op, n);
                }
            }
        }
    }
}

static void elementwise_follows_the_formula(void **state)
{
    uint64_t seed = 11;
    float a[257], b[257], y[257];
    (void)state;
    for (size_t k = 0; k < 3; k++) {
        k3_test_fill(a, 257, kinds[k], &seed);
        k3_test_fill(b, 257, kinds[k], &seed);
        for (size_t s = 0; s < n_sets; s++) {
            for (int op = 0; op < N_ELEMENTWISE; op++) {
                float want[257];
                memcpy(y, b, sizeof y);
                elementwise(sets[s], op, y, a, b, 257, 0.3f);
                for (size_t i = 0; i < 257; i++) {
                    float g = a[i], u = b[i];
                    want[i] = op == AXPY      ? fmaf(0.3f, g, u)
                              : op == ADD     ? g + u
                              : op == SCALE   ? g * 0.3f
                              : op == MUL_VEC ? g * u
                              : op == EXP     ? k3_expf(g)
                              : op == SIGMOID ? k3_sigmoidf(g)
                              : op == TANH    ? k3_tanhf(g)
                              : op == SILU    ? g * k3_sigmoidf(g)
                                              : ((4.0f * k3_tanhf(g / 4.0f)) * k3_sigmoidf(g)) *
                                                 (25.0f * k3_tanhf(u / 25.0f));
                }
                K3_ASSERT_SAME(want, y, 257, sets[s]->name, "op %d by formula, kind %zu", op, k);
            }
        }
    }
}

static void kda_step_sets_agree(void **state)
{
    static const size_t dims[][2] = {{0, 0},  {1, 1},  {2, 2},  {3, 17},    {16, 16},
                                     {5, 31}, {33, 8}, {7, 65}, {128, 128}, {64, 100}};
    uint64_t seed = 12;
    (void)state;
    for (size_t c = 0; c < sizeof dims / sizeof *dims; c++) {
        for (size_t kind = 0; kind < 3; kind++) {
            size_t dk = dims[c][0], dv = dims[c][1];
            float *in = floats(3 * dk + dv), *S0 = floats(dk * dv), *S = floats(dk * dv),
                  *want_S = floats(dk * dv);
            float *o = floats(dv), *want_o = floats(dv), *scratch = floats(dv), beta;
            const float *q = in, *k = in + dk, *alpha = in + 2 * dk, *v = in + 3 * dk;
            k3_test_fill(in, 3 * dk + dv, kinds[kind], &seed);
            k3_test_fill(S0, dk * dv, kinds[kind], &seed);
            k3_test_fill(&beta, 1, kinds[kind], &seed);
            memcpy(want_S, S0, dk * dv * sizeof *S);
            for (size_t j = 0; j < dv;
                 j++) { /* spec/model.md 4.4 step 7, the orders of kernels.h */
                float u = 0, out = 0;
                for (size_t i = 0; i < dk; i++) {
                    want_S[i * dv + j] = alpha[i] * want_S[i * dv + j];
                    u = fmaf(k[i], want_S[i * dv + j], u);
                }
                u = beta * (v[j] - u);
                for (size_t i = 0; i < dk; i++) {
                    want_S[i * dv + j] = fmaf(k[i], u, want_S[i * dv + j]);
                    out = fmaf(q[i], want_S[i * dv + j], out);
                }
                want_o[j] = out;
            }
            for (size_t s = 0; s < n_sets; s++) {
                memcpy(S, S0, dk * dv * sizeof *S);
                memcpy(o, v, dv * sizeof *o); /* o may be v */
                sets[s]->kda_step(S, o, q, k, o, alpha, beta, dk, dv, scratch);
                K3_ASSERT_SAME(want_S, S, dk * dv, sets[s]->name,
                               "S of kda_step %zu x %zu, kind %zu", dk, dv, kind);
                K3_ASSERT_SAME(want_o, o, dv, sets[s]->name, "o of kda_step %zu x %zu, kind %zu",
                               dk, dv, kind);
            }
            free(in);
            free(S0);
            free(S);
            free(want_S);
            free(o);
            free(want_o);
            free(scratch);
        }
    }
}

/* Also bit-equal when both are NaN-free zeros: +0 is above -0. */
static void max_is_exact(void **state)
{
    uint64_t seed = 13;
    float x[1001];
    (void)state;
    for (size_t c = 0; c < N_SHAPES; c++) {
        for (size_t k = 0; k < 3; k++) {
            for (int sign = 0; sign < 2; sign++) {
                size_t n = shapes[c];
                float want = -INFINITY;
                k3_test_fill(x, n, kinds[k], &seed);
                for (size_t i = 0; i < n; i++) {
                    x[i] = sign ? -fabsf(x[i]) : x[i];
                    if (x[i] > want || (x[i] == 0 && want == 0 && !signbit(x[i])))
                        want = x[i];
                }
                for (size_t s = 0; s < n_sets; s++) {
                    float got = sets[s]->max(x, n);
                    assert_int_equal(k3_f32_to_bits(want), k3_f32_to_bits(got));
                }
            }
        }
    }
    for (size_t s = 0; s < n_sets; s++) {
        for (size_t i = 0; i < 40; i++)
            x[i] = NAN;
        assert_true(sets[s]->max(x, 40) == -INFINITY);
        assert_true(sets[s]->max(x, 0) == -INFINITY);
        for (size_t i = 0; i < 40; i++) {
            memset(x, 0xff, sizeof x); /* all NaN but one */
            x[i] = -0.0f;
            assert_int_equal(k3_f32_to_bits(sets[s]->max(x, 40)), 0x80000000);
            x[(i + 7) % 40] = 0.0f;
            assert_int_equal(k3_f32_to_bits(sets[s]->max(x, 40)), 0);
        }
    }
}

static void names_select_sets(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    const struct k3_kernels *k;

    (void)state;
    assert_int_equal(k3_kernels_find(&k, "c", &err), 0);
    assert_string_equal(k->name, "c");
    assert_int_equal(k3_kernels_find(&k, "sse9", &err), -EINVAL);
    assert_non_null(strstr(err.text, "--kernels sse9: there are auto, c, avx2 and avx512"));
    assert_int_equal(err.exit_status, 2);
    assert_string_equal(k3_kernels_get("c")->name, "c");
    assert_ptr_equal(k3_kernels_get(NULL), k3_kernels_get("auto"));
    assert_ptr_equal(k3_kernels_get("auto"), sets[n_sets - 1]);
    assert_null(k3_kernels_get("sse9"));
    assert_null(k3_kernels_get(""));
    for (size_t s = 0; s < n_sets; s++)
        assert_null(sets[s]->mul[K3_U8]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_select_sets),
        cmocka_unit_test(mul_follows_the_rule),
        cmocka_unit_test(missing_elements_leave_their_lane_alone),
        cmocka_unit_test(subnormals_are_kept),
        cmocka_unit_test(widening_is_exact),
        cmocka_unit_test(mul_sets_agree_on_column_counts),
        cmocka_unit_test(mul_sets_agree_on_w_row_counts),
        cmocka_unit_test(mul_sets_agree_on_x_row_counts),
        cmocka_unit_test(mul_sets_agree_across_cache_blocks),
        cmocka_unit_test(mul_sets_agree_on_wide_rows),
        cmocka_unit_test(mul_does_not_see_its_neighbours),
        cmocka_unit_test(dot_sets_agree),
        cmocka_unit_test(mul_t_follows_the_rule),
        cmocka_unit_test(mul_t_sets_agree),
        cmocka_unit_test(conv_sets_agree),
        cmocka_unit_test(elementwise_sets_agree),
        cmocka_unit_test(elementwise_follows_the_formula),
        cmocka_unit_test(kda_step_sets_agree),
        cmocka_unit_test(max_is_exact),
    };
    return cmocka_run_group_tests_name("kernels", tests, find_sets, NULL);
}
