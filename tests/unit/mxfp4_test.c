/* tests/unit/mxfp4_test.c: rule (c): the weight is the exact E2M1 * 2^(s-127), each group is two
 * steps, every set equals kernels_c.c bit for bit; the bytes of the released checkpoint
 * (spec/model.md 5) decode to their published values. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/widen.h"
#include "tests/unit/kernel_sets.h"
#include "tests/unit/ops_json.h"

static const struct k3_kernels *sets[3];
static size_t n_sets;

static int find_sets(void **state)
{
    (void)state;
    n_sets = k3_test_sets(sets);
    return 0;
}

static const double e2m1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6};

/* All codes under all scales, also subnormal ones (2^-128 at the least), through the widening and
 * through every set. */
/* mul_mxfp4 of x in the order of the columns. */
static void product(const struct k3_kernels *k, float *y, size_t ldy, const uint8_t *packed,
                    const uint8_t *scale, size_t n_out, size_t n_cols, const float *x, size_t ldx,
                    size_t n_rows)
{
    float *split = malloc((n_rows * n_cols + 1) * sizeof *split);
    assert_non_null(split);
    for (size_t r = 0; r < n_rows; r++)
        k->split(split + r * n_cols, x + r * ldx, n_cols);
    k->mul_mxfp4(y, ldy, packed, scale, n_out, n_cols, split, n_cols, n_rows);
    free(split);
}

static void every_code_and_scale_is_exact(void **state)
{
    (void)state;
    for (unsigned s = 0; s < 256; s++) {
        uint8_t packed[16 * 16] = {0}, scale[16];
        float x[32 * 32] = {0}, y[32 * 16];
        for (unsigned code = 0; code < 16; code++) {
            float want = s == 255 ? 0.0f : (float)ldexp(e2m1[code], (int)s - 127),
                  got = k3_mxfp4_widen(code, (uint8_t)s);
            if (s < 253) /* 2^126 * 4 and more overflows to inf, which no checkpoint holds */
                assert_true(s == 255 || (double)want == ldexp(e2m1[code], (int)s - 127));
            K3_ASSERT_SAME(&want, &got, 1, "widen", "code %u, scale %u", code, s);
            scale[code] = (uint8_t)s;
            memset(packed + code * 16, (int)(code * 17), 16); /* row `code` holds nothing else */
        }
        for (size_t i = 0; i < 32; i++)
            x[i * 32 + i] =
                1.0f; /* y[i][code] = weight at column i, chain from +0: -0 comes out as +0 */
        for (size_t k = 0; k < n_sets; k++) {
            product(sets[k], y, 16, packed, scale, 16, 32, x, 32, 32);
            for (size_t i = 0; i < 32; i++) {
                for (unsigned code = 0; code < 16; code++) {
                    float want = (s == 255 ? 0.0f : (float)ldexp(e2m1[code], (int)s - 127)) + 0.0f;
                    if (isinf(want)) /* inf * 0 at the other columns */
                        continue;
                    K3_ASSERT_SAME(&want, &y[i * 16 + code], 1, sets[k]->name,
                                   "code %u, scale %u, column %zu", code, s, i);
                }
            }
        }
    }
}

/* The rule written out: lane j takes column 2j, then column 2j+1, of group after group. */
static float by_the_rule(const uint8_t *packed, const uint8_t *scale, size_t n_cols, const float *x)
{
    float lane[16] = {0}, e[8], q[4];
    for (size_t g = 0; g < n_cols / 32; g++) {
        for (size_t c = 0; c < 32; c++) {
            uint8_t byte = packed[g * 16 + c / 2];
            unsigned code = c % 2 ? byte >> 4 : byte & 15;
            float w = scale[g] == 255 ? 0.0f : (float)ldexp(e2m1[code], scale[g] - 127);
            lane[c / 2] = fmaf(w, x[g * 32 + c], lane[c / 2]);
        }
    }
    for (size_t l = 0; l < 8; l++)
        e[l] = lane[l] + lane[l + 8];
    for (size_t l = 0; l < 4; l++)
        q[l] = e[l] + e[l + 4];
    return (q[0] + q[2]) + (q[1] + q[3]);
}

static void check(size_t n_out, size_t n_cols, size_t n_rows, enum k3_test_kind kind,
                  uint64_t *seed)
{
    size_t ldx = n_cols + 1, ldy = n_out + 3, n_y = n_rows * ldy, n_packed = n_out * n_cols / 2,
           n_scales = n_out * n_cols / 32;
    uint8_t *packed = malloc(n_packed + 1), *scale = malloc(n_scales + 1), *p = packed + 1;
    float *x = malloc((n_rows * ldx + 1) * sizeof *x), *want = malloc((n_y + 1) * sizeof *want);
    float *got = malloc((n_y + 1) * sizeof *got);
    assert_true(packed && scale && x && want && got);
    for (size_t i = 0; i < n_packed; i++)
        p[i] = (uint8_t)k3_test_random(seed);
    for (size_t i = 0; i < n_scales; i++) {
        uint32_t draw = k3_test_random(seed);
        scale[i] = (uint8_t)(kind == K3_TEST_PLAIN  ? 118 + draw % 6
                             : kind == K3_TEST_TINY ? draw % 4
                                                    : (draw & 256 ? draw
                                                       : draw % 2 ? 255
                                                                  : 0));
    }
    k3_test_fill(x, n_rows * ldx, kind, seed);
    for (size_t i = 0; i < n_y; i++)
        want[i] = 77;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t o = 0; o < n_out; o++)
            want[r * ldy + o] =
                by_the_rule(p + o * n_cols / 2, scale + o * (n_cols / 32), n_cols, x + r * ldx);
    for (size_t k = 0; k < n_sets; k++) {
        for (size_t i = 0; i < n_y; i++)
            got[i] = 77;
        product(sets[k], got, ldy, p, scale, n_out, n_cols, x, ldx, n_rows);
        K3_ASSERT_SAME(want, got, n_y, sets[k]->name, "%zu x %zu, %zu rows, kind %d", n_out, n_cols,
                       n_rows, kind);
    }
    free(packed);
    free(scale);
    free(x);
    free(want);
    free(got);
}

static void sets_follow_the_rule(void **state)
{
    static const size_t cols[] = {0, 32, 64, 96, 128, 576, 992};
    static const enum k3_test_kind kinds[] = {K3_TEST_PLAIN, K3_TEST_TINY, K3_TEST_SPECIAL};
    uint64_t seed = 1;
    (void)state;
    for (size_t k = 0; k < 3; k++) {
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
            check(5, cols[c], 3, kinds[k], &seed);
        for (size_t n_out = 0; n_out <= 18; n_out++)
            for (size_t n_rows = 0; n_rows <= 6; n_rows++)
                check(n_out, 64, n_rows, kinds[k], &seed);
        for (size_t n_rows = 1; n_rows <= 70; n_rows++) {
            check(9, 32, n_rows, kinds[k], &seed);
            check(1 + n_rows * 5 % 13, 32 * (1 + n_rows % 23), n_rows, kinds[k], &seed);
        }
        check(150, 3584, 5, kinds[k], &seed); /* more of W than one cache block */
    }
}

static void split_takes_every_other_column(void **state)
{
    float x[96], apart[96];
    (void)state;
    for (size_t i = 0; i < 96; i++)
        x[i] = (float)i;
    for (size_t k = 0; k < n_sets; k++) {
        float same[96];
        memcpy(same, x, sizeof same);
        sets[k]->split(apart, x, 96);
        sets[k]->split(same, same, 96);
        for (size_t i = 0; i < 96; i++)
            assert_true(apart[i] == (float)(i / 32 * 32 + i % 16 * 2 + i / 16 % 2));
        assert_memory_equal(apart, same, sizeof same);
    }
}

/* Code 8 is -0 and a group with scale 255 is +0: seen in a lane that holds -0 (each product rounds
 * to -0). */
static void signs_of_zero_weights(void **state)
{
    uint8_t packed[32], scale[2] = {0, 127};
    float x[64], got, want;
    (void)state;
    memset(packed, 0x99, 16); /* -0.5 * 2^-127 */
    for (size_t i = 0; i < 64; i++)
        x[i] = i < 32 ? 0x1p-60f : 1.0f;
    for (size_t k = 0; k < n_sets; k++) {
        memset(packed + 16, 0x88, 16);
        scale[1] = 127;
        want = -0.0f;
        product(sets[k], &got, 1, packed, scale, 1, 64, x, 64, 1);
        assert_int_equal(k3_f32_to_bits(got), k3_f32_to_bits(want));
        scale[1] = 255;
        want = 0.0f;
        for (unsigned code = 0; code < 16; code++) {
            memset(packed + 16, (int)(code * 17), 16);
            product(sets[k], &got, 1, packed, scale, 1, 64, x, 64, 1);
            assert_int_equal(k3_f32_to_bits(got), k3_f32_to_bits(want));
        }
    }
}

/* The first group of the real row of spec/model.md 5. */
static void first_group_of_the_released_row(void **state)
{
    static const uint8_t packed[16] = {0x16, 0xb9, 0xce, 0x23, 0x85, 0xab, 0x9b, 0xa2,
                                       0xbc, 0x88, 0x0b, 0xa1, 0xc5, 0x89, 0x99, 0x98};
    static const float want[32] = {
        0.0625f,     0.0078125f,  -0.0078125f, -0.0234375f, -0.0625f,   -0.03125f,   0.0234375f,
        0.015625f,   0.046875f,   -0.0f,       -0.0234375f, -0.015625f, -0.0234375f, -0.0078125f,
        0.015625f,   -0.015625f,  -0.03125f,   -0.0234375f, -0.0f,      -0.0f,       -0.0234375f,
        0.0f,        0.0078125f,  -0.015625f,  0.046875f,   -0.03125f,  -0.0078125f, -0.0f,
        -0.0078125f, -0.0078125f, -0.0f,       -0.0078125f};
    uint8_t scale = 121;
    float ones[32], got;
    (void)state;
    for (size_t c = 0; c < 32; c++) {
        got = k3_mxfp4_widen(c % 2 ? packed[c / 2] >> 4 : packed[c / 2] & 15, scale);
        assert_int_equal(k3_f32_to_bits(got), k3_f32_to_bits(want[c]));
        ones[c] = 1.0f;
    }
    for (size_t k = 0; k < n_sets; k++) {
        product(sets[k], &got, 1, packed, &scale, 1, 32, ones, 32, 1);
        assert_true(got == -0.140625f);
    }
}

enum { ROWS = 64, COLS = 3584, GROUPS = COLS / 32 };
static void released_rows_decode_exactly(void **state)
{
    static uint8_t packed[ROWS * COLS / 2], scale[ROWS * GROUPS];
    static float unit[32 * 32], y[32 * ROWS], ones[2 * COLS], sums[2 * ROWS];
    static const double want_sums[3][2] = {
        {0.78515625, 3.6796875}, {-0.36328125, -3.0625}, {-0.08203125, 3.12109375}};
    static const size_t want_rows[3] = {0, 1, 63};
    struct k3_test_json j;
    const float *p, *s, *want;
    (void)state;
    if (k3_test_json_open(&j, "../shared/data/mxfp4-released.json") < 0)
        skip();
    p = k3_test_json_floats(&j, sizeof packed, "packed");
    s = k3_test_json_floats(&j, sizeof scale, "scales");
    want = k3_test_json_floats(&j, ROWS * COLS, "expected");
    for (size_t i = 0; i < sizeof packed; i++)
        packed[i] = (uint8_t)p[i];
    for (size_t i = 0; i < sizeof scale; i++)
        scale[i] = (uint8_t)s[i];
    for (size_t i = 0; i < ROWS * COLS; i++) {
        float got = k3_mxfp4_widen(i % 2 ? packed[i / 2] >> 4 : packed[i / 2] & 15, scale[i / 32]);
        assert_true(got == want[i]);
    }
    for (size_t i = 0; i < 32; i++)
        unit[i * 32 + i] = 1.0f;
    for (size_t i = 0; i < COLS; i++) {
        ones[i] = 1.0f;
        ones[COLS + i] = (float)(i % 7) - 3.0f;
    }
    for (size_t k = 0; k < n_sets; k++) {
        for (size_t g = 0; g < GROUPS;
             g++) { /* group g of all rows as a matrix of 32 columns, times the unit matrix */
            uint8_t group[ROWS * 16], group_scale[ROWS];
            for (size_t o = 0; o < ROWS; o++) {
                memcpy(group + o * 16, packed + o * COLS / 2 + g * 16, 16);
                group_scale[o] = scale[o * GROUPS + g];
            }
            product(sets[k], y, ROWS, group, group_scale, ROWS, 32, unit, 32, 32);
            for (size_t c = 0; c < 32; c++)
                for (size_t o = 0; o < ROWS; o++)
                    assert_true(y[c * ROWS + o] == want[o * COLS + g * 32 + c]);
        }
        product(sets[k], sums, ROWS, packed, scale, ROWS, COLS, ones, COLS, 2);
        for (size_t i = 0; i < 3;
             i++) { /* every partial sum is a multiple of 2^-9 below 2^6: exact in fp32 */
            assert_true(sums[want_rows[i]] == want_sums[i][0]);
            assert_true(sums[ROWS + want_rows[i]] == want_sums[i][1]);
        }
    }
    k3_test_json_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_and_scale_is_exact),
        cmocka_unit_test(sets_follow_the_rule),
        cmocka_unit_test(split_takes_every_other_column),
        cmocka_unit_test(signs_of_zero_weights),
        cmocka_unit_test(first_group_of_the_released_row),
        cmocka_unit_test(released_rows_decode_exactly),
    };
    return cmocka_run_group_tests_name("mxfp4", tests, find_sets, NULL);
}
