/* tests/unit/expf_test.c: rule (f).  k3_expf, k3_sigmoidf and k3_tanhf against long double, and
 * every set against them bit for bit, on patterns spread over all 2^32 (tests/probe/expf_all.c
 * compares all of them). */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/widen.h"
#include "tests/unit/kernel_sets.h"

#define BLOCK 4096

static const struct k3_kernels *sets[3];
static size_t n_sets;

static int find_sets(void **state)
{
    (void)state;
    n_sets = k3_test_sets(sets);
    return 0;
}

/* Distance of got from the real number `want` in units of the last place of fp32 at want (2^-149
 * when subnormal). */
static double ulps(float got, long double want)
{
    int e;
    if (fabsl(want) >=
        (long double)FLT_MAX + 0x1p103L) /* half a unit above the largest: rounds to inf */
        return isinf(got) && (got > 0) == (want > 0) ? 0 : INFINITY;
    frexpl(want, &e);
    if (want == 0 || e < -125)
        e = -125;
    return (double)(fabsl((long double)got - want) / ldexpl(1, e - 24));
}

static long double exp_true(long double x)
{
    return expl(x);
}

static long double sigmoid_true(long double x)
{
    return x < 0 ? expl(x) / (1 + expl(x)) : 1 / (1 + expl(-x));
}

static long double tanh_true(long double x)
{
    return tanhl(x);
}

/* Worst distance over patterns first, first + step, ...; step is odd, so that all exponents and
 * mantissas come by. */
static double worst_ulps(float (*f)(float), long double (*f_true)(long double), uint32_t first,
                         uint32_t step)
{
    double worst = 0;
    for (uint64_t bits = first; bits <= UINT32_MAX; bits += step) {
        float x = k3_bits_to_f32((uint32_t)bits), got;
        double d;
        if (x != x)
            continue;
        got = f(x);
        d = isinf(x) ? (got == f_true(x) ? 0 : INFINITY) : ulps(got, f_true(x));
        if (!(d <= worst))
            worst = d;
    }
    return worst;
}

/* Densely where the functions bend: n values in [lo, hi]. */
static double worst_ulps_in(float (*f)(float), long double (*f_true)(long double), double lo,
                            double hi, size_t n)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        float x = (float)(lo + (hi - lo) * (double)i / (double)n);
        double d = ulps(f(x), f_true(x));
        if (!(d <= worst))
            worst = d;
    }
    return worst;
}

static void check_error(const char *name, float (*f)(float), long double (*f_true)(long double),
                        double most)
{
    double all = worst_ulps(f, f_true, 0, 4099), near = worst_ulps_in(f, f_true, -1, 1, 200000);
    double far = worst_ulps_in(f, f_true, -110, 100, 400000);
    double worst = fmax(all, fmax(near, far));
    print_message("%s: at most %.3f ulp\n", name, worst);
    if (!(worst <= most))
        fail_msg("%s: %.3f ulp over all patterns, %.3f in -1..1, %.3f in -110..100; at most %.2f "
                 "allowed",
                 name, all, near, far, most);
}

static void exp_is_accurate(void **state)
{
    (void)state;
    check_error("exp", k3_expf, exp_true, 1.0);
}

static void sigmoid_is_accurate(void **state)
{
    (void)state;
    check_error("sigmoid", k3_sigmoidf, sigmoid_true, 2.5);
}

static void tanh_is_accurate(void **state)
{
    (void)state;
    check_error("tanh", k3_tanhf, tanh_true, 2.0);
}

static uint32_t bits_of(float (*f)(float), uint32_t bits)
{
    return k3_f32_to_bits(f(k3_bits_to_f32(bits)));
}

static void special_values(void **state)
{
    static const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001,
                                    0xff800001, 0x7fffffff, 0xffffffff};
    const uint32_t inf = 0x7f800000, minus_inf = 0xff800000;
    (void)state;
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        assert_int_equal(bits_of(k3_expf, nans[i]), 0x7fc00000);
        assert_int_equal(bits_of(k3_sigmoidf, nans[i]), 0x7fc00000);
        assert_int_equal(bits_of(k3_tanhf, nans[i]), 0x7fc00000);
    }
    assert_int_equal(bits_of(k3_expf, inf), inf);
    assert_int_equal(bits_of(k3_expf, minus_inf), 0);
    assert_int_equal(bits_of(k3_expf, 0), 0x3f800000);
    assert_int_equal(bits_of(k3_expf, 0x80000000), 0x3f800000);
    assert_true(isfinite(k3_expf(88.722f)));
    assert_true(isinf(k3_expf(88.723f)));
    assert_true(isinf(k3_expf(FLT_MAX)));
    assert_int_equal(k3_f32_to_bits(k3_expf(-103.9f)), 1); /* the smallest subnormal */
    assert_int_equal(k3_f32_to_bits(k3_expf(-104.1f)), 0);
    assert_int_equal(k3_f32_to_bits(k3_expf(-FLT_MAX)), 0);
    assert_int_equal(bits_of(k3_sigmoidf, inf), 0x3f800000);
    assert_int_equal(bits_of(k3_sigmoidf, minus_inf), 0);
    assert_int_equal(bits_of(k3_sigmoidf, 0), 0x3f000000);
    assert_int_equal(bits_of(k3_sigmoidf, 0x80000000), 0x3f000000);
    assert_true(k3_sigmoidf(-100.0f) > 0); /* e^-100 is subnormal and kept */
    assert_int_equal(bits_of(k3_tanhf, inf), 0x3f800000);
    assert_int_equal(bits_of(k3_tanhf, minus_inf), 0xbf800000);
    assert_int_equal(bits_of(k3_tanhf, 0), 0);
    assert_int_equal(bits_of(k3_tanhf, 0x80000000), 0x80000000);
    for (uint32_t bits = 1; bits < 0x39000000;
         bits += 1234567) { /* tanh x = x below 2^-13: |x|^3/3 < half a unit */
        assert_int_equal(bits_of(k3_tanhf, bits), bits);
        assert_int_equal(bits_of(k3_tanhf, bits | 0x80000000), bits | 0x80000000);
    }
}

/* Bounds that the gates rely on: alpha <= 1, sigmoid and |tanh| never above 1, all three monotonic
 * across their seams. */
static void ranges_and_seams(void **state)
{
    (void)state;
    for (uint64_t bits = 0x80000000; bits <= 0xff800000; bits += 9973)
        assert_true(k3_expf(k3_bits_to_f32((uint32_t)bits)) <= 1.0f);
    for (uint64_t bits = 0; bits <= 0x7f800000; bits += 9973) {
        float x = k3_bits_to_f32((uint32_t)bits);
        assert_true(k3_sigmoidf(x) <= 1.0f && k3_sigmoidf(x) >= 0.5f);
        assert_true(k3_tanhf(x) <= 1.0f && k3_tanhf(x) >= 0.0f);
        assert_true(k3_tanhf(-x) == -k3_tanhf(x));
    }
    for (float x = 0.6249f; x < 0.6251f;
         x = nextafterf(x, 1)) /* where tanh changes its method: no step back by more than 2 ulp */
        assert_true(k3_tanhf(nextafterf(x, 1)) - k3_tanhf(x) >= -2 * 0x1p-24f);
}

/* Every set repeats the scalar functions bit for bit, NaN patterns included: 4 million patterns and
 * every exponent's ends. */
static void check_block(const float *x, size_t n)
{
    static float want[3][BLOCK], got[BLOCK];
    sets[0]->exp(want[0], x, n);
    sets[0]->sigmoid(want[1], x, n);
    sets[0]->tanh(want[2], x, n);
    for (size_t s = 1; s < n_sets; s++) {
        for (int f = 0; f < 3; f++) {
            (f == 0 ? sets[s]->exp : f == 1 ? sets[s]->sigmoid : sets[s]->tanh)(got, x, n);
            if (memcmp(want[f], got, n * sizeof *got) == 0)
                continue;
            for (size_t i = 0; i < n; i++)
                if (k3_f32_to_bits(want[f][i]) != k3_f32_to_bits(got[i]))
                    fail_msg("%s of %08x is %08x in set c, %08x in set %s",
                             f == 0   ? "exp"
                             : f == 1 ? "sigmoid"
                                      : "tanh",
                             k3_f32_to_bits(x[i]), k3_f32_to_bits(want[f][i]),
                             k3_f32_to_bits(got[i]), sets[s]->name);
        }
    }
}

static void sets_agree(void **state)
{
    static float x[BLOCK];
    size_t n = 0;
    (void)state;
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 1021) {
        x[n++] = k3_bits_to_f32((uint32_t)bits);
        if (n == BLOCK) {
            check_block(x, n);
            n = 0;
        }
    }
    check_block(x, n);
    n = 0;
    for (uint32_t high = 0; high < 512; high++) {
        for (int d = -4; d < 4; d++)
            x[n++] = k3_bits_to_f32((high << 23) + (uint32_t)d);
        if (n == BLOCK) {
            check_block(x, n);
            n = 0;
        }
    }
    check_block(x, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(special_values),      cmocka_unit_test(exp_is_accurate),
        cmocka_unit_test(sigmoid_is_accurate), cmocka_unit_test(tanh_is_accurate),
        cmocka_unit_test(ranges_and_seams),    cmocka_unit_test(sets_agree),
    };
    return cmocka_run_group_tests_name("expf", tests, find_sets, NULL);
}
