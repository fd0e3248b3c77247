/* k3-computed/kernels_avx2.c: the AVX2 (and FMA, F16C) set: everything elementwise and everything
 * that runs along rows. The products W x are in kernels_mul_avx2.c.  Operation by operation the
 * same as kernels_c.c.  Tails of elementwise functions go through a padded copy (elements do not
 * see one another). */
#include <immintrin.h>
#include <math.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 8

INLINE __m256 load_n(const float *x, size_t n)
{
    float padded[LANES] = {0};
    if (n >= LANES)
        return _mm256_loadu_ps(x);
    memcpy(padded, x, n * sizeof *x);
    return _mm256_loadu_ps(padded);
}

INLINE void store_n(float *y, size_t n, __m256 v)
{
    float padded[LANES];
    if (n >= LANES) {
        _mm256_storeu_ps(y, v);
        return;
    }
    _mm256_storeu_ps(padded, v);
    memcpy(y, padded, n * sizeof *y);
}

INLINE __m256 widen8(const char *w, enum k3_dtype dtype)
{
    if (dtype == K3_F32)
        return _mm256_loadu_ps((const float *)w);
    __m128i h = _mm_loadu_si128((const __m128i_u *)w);
    if (dtype == K3_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* Sixteen floats: elements 0, 2, .. 14 (which 0x88) or 1, 3, .. 15 (0xdd). */
#define EVERY_OTHER(x0, x1, which)                                                                 \
    _mm256_castpd_ps(                                                                              \
        _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(x0, x1, which)), 0xd8))

static void split(float *y, const float *x, size_t n)
{
    for (size_t g = 0; g < n; g += 4 * LANES) {
        __m256 in[4];
        for (size_t i = 0; i < 4; i++)
            in[i] = _mm256_loadu_ps(x + g + i * LANES);
        for (size_t i = 0; i < 2; i++) {
            _mm256_storeu_ps(y + g + i * LANES, EVERY_OTHER(in[2 * i], in[2 * i + 1], 0x88));
            _mm256_storeu_ps(y + g + (2 + i) * LANES, EVERY_OTHER(in[2 * i], in[2 * i + 1], 0xdd));
        }
    }
}

/* 8 * N_VEC whole columns, their chains held in registers over all of n_sum. */
INLINE void mul_t_block(float *y, const float *a, const char *m, size_t row_bytes, size_t n_sum,
                        const size_t n_vec, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2;
    __m256 acc[8];
#pragma GCC unroll 8
    for (size_t v = 0; v < n_vec; v++)
        acc[v] = _mm256_loadu_ps(y + v * LANES);
    for (size_t i = 0; i < n_sum; i++) {
        __m256 ai = _mm256_set1_ps(a[i]);
#pragma GCC unroll 8
        for (size_t v = 0; v < n_vec; v++)
            acc[v] =
                _mm256_fmadd_ps(ai, widen8(m + i * row_bytes + v * LANES * size, dtype), acc[v]);
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < n_vec; v++)
        _mm256_storeu_ps(y + v * LANES, acc[v]);
}

INLINE void mul_t_any(float *y, const float *a, const char *m, size_t ldm, size_t n_sum,
                      size_t n_out, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2;
    size_t j = 0;
    for (; j + 8 * LANES <= n_out; j += 8 * LANES)
        mul_t_block(y + j, a, m + j * size, ldm * size, n_sum, 8, dtype);
    for (; j + LANES <= n_out; j += LANES)
        mul_t_block(y + j, a, m + j * size, ldm * size, n_sum, 1, dtype);
    for (; j < n_out; j++)
        for (size_t i = 0; i < n_sum; i++)
            y[j] = __builtin_fmaf(a[i], k3_widen_at(m, i * ldm + j, dtype), y[j]);
}

static void mul_t_f32(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                      size_t n_out)
{
    mul_t_any(y, a, m, ldm, n_sum, n_out, K3_F32);
}

static void mul_t_f16(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                      size_t n_out)
{
    mul_t_any(y, a, m, ldm, n_sum, n_out, K3_F16);
}

static void mul_t_bf16(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                       size_t n_out)
{
    mul_t_any(y, a, m, ldm, n_sum, n_out, K3_BF16);
}

static void conv(float *y, const float *u, const float *hist, size_t ldh, const float *w, size_t n,
                 size_t taps)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i stride = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)taps));
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        __m256 acc = _mm256_setzero_ps();
        for (size_t t = 0; t < taps; t++) {
            const float *in = t + 1 < taps ? hist + t * ldh + c : u + c;
            acc = _mm256_fmadd_ps(_mm256_i32gather_ps(w + c * taps + t, stride, 4),
                                  _mm256_loadu_ps(in), acc);
        }
        _mm256_storeu_ps(y + c, acc);
    }
    for (; c < n; c++) {
        float acc = 0;
        for (size_t t = 0; t < taps; t++)
            acc = __builtin_fmaf(w[c * taps + t], t + 1 < taps ? hist[t * ldh + c] : u[c], acc);
        y[c] = acc;
    }
}

static void axpy(float *y, float a, const float *x, size_t n)
{
    __m256 av = _mm256_set1_ps(a);
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, _mm256_fmadd_ps(av, load_n(x + i, n - i), load_n(y + i, n - i)));
}

static void add(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, _mm256_add_ps(load_n(a + i, n - i), load_n(b + i, n - i)));
}

static void scale(float *y, const float *x, float a, size_t n)
{
    __m256 av = _mm256_set1_ps(a);
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, _mm256_mul_ps(load_n(x + i, n - i), av));
}

static void mul_vec(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, _mm256_mul_ps(load_n(a + i, n - i), load_n(b + i, n - i)));
}

/* Rule (f): the steps of k3_expf, k3_sigmoidf and k3_tanhf in kernels_c.c, in their order. */
INLINE __m256 qnan_where(__m256 x, __m256 y)
{
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(y, _mm256_castsi256_ps(_mm256_set1_epi32(K3_QNAN_BITS)), nan);
}

INLINE __m256 power_of_2(__m256i k)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23));
}

INLINE __m256 exp8(__m256 x0)
{
    const __m256 lo = _mm256_set1_ps(K3_EXP_LO), hi = _mm256_set1_ps(K3_EXP_HI);
    const __m256 magic = _mm256_set1_ps(K3_RINT_MAGIC), one = _mm256_set1_ps(1.0f);
    __m256 x = _mm256_blendv_ps(x0, lo, _mm256_cmp_ps(x0, lo, _CMP_LT_OQ));
    x = _mm256_blendv_ps(x, hi, _mm256_cmp_ps(x, hi, _CMP_GT_OQ));
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(K3_LOG2E), magic);
    __m256 n = _mm256_sub_ps(t, magic);
    __m256i k = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(magic));
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-K3_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-K3_LN2_LO), r);
    __m256 p = _mm256_set1_ps(K3_EXP_C7);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(K3_EXP_C6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(K3_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(K3_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(K3_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(K3_EXP_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i k1 = _mm256_srai_epi32(k, 1);
    p = _mm256_mul_ps(p, power_of_2(k1));
    p = _mm256_mul_ps(p, power_of_2(_mm256_sub_epi32(k, k1)));
    return qnan_where(x0, p);
}

INLINE __m256 sigmoid8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    __m256 z = exp8(_mm256_or_ps(x, sign));
    __m256 negative = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ);
    __m256 y = _mm256_div_ps(_mm256_blendv_ps(one, z, negative), _mm256_add_ps(one, z));
    return qnan_where(x, y);
}

INLINE __m256 tanh8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    __m256 a = _mm256_andnot_ps(sign, x);
    __m256 z = _mm256_mul_ps(a, a);
    __m256 p = _mm256_set1_ps(K3_TANH_C5);
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(K3_TANH_C4));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(K3_TANH_C3));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(K3_TANH_C2));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(K3_TANH_C1));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(K3_TANH_C0));
    __m256 small = _mm256_fmadd_ps(a, _mm256_mul_ps(p, z), a);
    __m256 e = exp8(_mm256_mul_ps(_mm256_set1_ps(-2.0f), a));
    __m256 large = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    __m256 is_small = _mm256_cmp_ps(a, _mm256_set1_ps(K3_TANH_SMALL), _CMP_LT_OQ);
    __m256 y = _mm256_or_ps(_mm256_blendv_ps(large, small, is_small), _mm256_and_ps(x, sign));
    return qnan_where(x, y);
}

static void exp_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, exp8(load_n(x + i, n - i)));
}

static void sigmoid_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, sigmoid8(load_n(x + i, n - i)));
}

static void tanh_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        store_n(y + i, n - i, tanh8(load_n(x + i, n - i)));
}

static void silu_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __m256 xi = load_n(x + i, n - i);
        store_n(y + i, n - i, _mm256_mul_ps(xi, sigmoid8(xi)));
    }
}

static void situ_vec(float *y, const float *g, const float *u, size_t n, float beta, float lin)
{
    const __m256 b = _mm256_set1_ps(beta), l = _mm256_set1_ps(lin);
    for (size_t i = 0; i < n; i += LANES) {
        __m256 gi = load_n(g + i, n - i), ui = load_n(u + i, n - i);
        __m256 gate = _mm256_mul_ps(_mm256_mul_ps(b, tanh8(_mm256_div_ps(gi, b))), sigmoid8(gi));
        __m256 up = _mm256_mul_ps(l, tanh8(_mm256_div_ps(ui, l)));
        store_n(y + i, n - i, _mm256_mul_ps(gate, up));
    }
}

/* n_vec vectors of columns of S from S, of rows dv floats apart, so that the chains u and o stay in
 * registers. */
INLINE void kda_block(float *S, float *o, const float *q, const float *k, const float *v,
                      const float *alpha, float beta, size_t dk, size_t dv, const size_t n_vec)
{
    __m256 u[4], out[4];
#pragma GCC unroll 4
    for (size_t b = 0; b < n_vec; b++)
        u[b] = out[b] = _mm256_setzero_ps();
    for (size_t i = 0; i < dk; i++) {
        __m256 ki = _mm256_set1_ps(k[i]), ai = _mm256_set1_ps(alpha[i]);
#pragma GCC unroll 4
        for (size_t b = 0; b < n_vec; b++) {
            float *s = S + i * dv + b * LANES;
            __m256 si = _mm256_mul_ps(ai, _mm256_loadu_ps(s));
            _mm256_storeu_ps(s, si);
            u[b] = _mm256_fmadd_ps(ki, si, u[b]);
        }
    }
#pragma GCC unroll 4
    for (size_t b = 0; b < n_vec; b++) /* now d */
        u[b] = _mm256_mul_ps(_mm256_set1_ps(beta),
                             _mm256_sub_ps(_mm256_loadu_ps(v + b * LANES), u[b]));
    for (size_t i = 0; i < dk; i++) {
        __m256 ki = _mm256_set1_ps(k[i]), qi = _mm256_set1_ps(q[i]);
#pragma GCC unroll 4
        for (size_t b = 0; b < n_vec; b++) {
            float *s = S + i * dv + b * LANES;
            __m256 si = _mm256_fmadd_ps(ki, u[b], _mm256_loadu_ps(s));
            _mm256_storeu_ps(s, si);
            out[b] = _mm256_fmadd_ps(qi, si, out[b]);
        }
    }
#pragma GCC unroll 4
    for (size_t b = 0; b < n_vec; b++)
        _mm256_storeu_ps(o + b * LANES, out[b]);
}

static void kda_step(float *S, float *o, const float *q, const float *k, const float *v,
                     const float *alpha, float beta, size_t dk, size_t dv, float *scratch)
{
    size_t j = 0;
    (void)scratch;
    for (; j + 4 * LANES <= dv; j += 4 * LANES)
        kda_block(S + j, o + j, q, k, v + j, alpha, beta, dk, dv, 4);
    for (; j + LANES <= dv; j += LANES)
        kda_block(S + j, o + j, q, k, v + j, alpha, beta, dk, dv, 1);
    for (; j < dv; j++) {
        float u = 0, out = 0, d;
        for (size_t i = 0; i < dk; i++) {
            S[i * dv + j] = alpha[i] * S[i * dv + j];
            u = __builtin_fmaf(k[i], S[i * dv + j], u);
        }
        d = beta * (v[j] - u);
        for (size_t i = 0; i < dk; i++) {
            S[i * dv + j] = __builtin_fmaf(k[i], d, S[i * dv + j]);
            out = __builtin_fmaf(q[i], S[i * dv + j], out);
        }
        o[j] = out;
    }
}

/* On integers whose signed order is the order of the floats: negative ones with the magnitude bits
 * flipped.  A NaN counts as -inf, which is where the search begins. */
static float max_of(const float *x, size_t n)
{
    const __m256 minus_inf = _mm256_set1_ps(-INFINITY);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_xor_si256(_mm256_castps_si256(minus_inf), magnitude);
    int32_t lane[LANES], top;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 xi = _mm256_loadu_ps(x + i);
        __m256i bits = _mm256_castps_si256(
            _mm256_blendv_ps(xi, minus_inf, _mm256_cmp_ps(xi, xi, _CMP_UNORD_Q)));
        m = _mm256_max_epi32(
            m, _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), magnitude)));
    }
    _mm256_storeu_si256((__m256i_u *)lane, m);
    top = lane[0];
    for (size_t l = 1; l < LANES; l++)
        top = lane[l] > top ? lane[l] : top;
    for (; i < n; i++) {
        int32_t bits = (int32_t)k3_f32_to_bits(x[i]), key = bits < 0 ? bits ^ 0x7fffffff : bits;
        if (x[i] == x[i] && key > top)
            top = key;
    }
    return k3_bits_to_f32((uint32_t)(top < 0 ? top ^ 0x7fffffff : top));
}

const struct k3_kernels k3_kernels_avx2 = {
    .name = "avx2",
    .mul = {[K3_F32] = k3_avx2_mul_f32, [K3_F16] = k3_avx2_mul_f16, [K3_BF16] = k3_avx2_mul_bf16},
    .mul_mxfp4 = k3_avx2_mul_mxfp4,
    .split = split,
    .dot = k3_avx2_dot,
    .mul_t = {[K3_F32] = mul_t_f32, [K3_F16] = mul_t_f16, [K3_BF16] = mul_t_bf16},
    .conv = conv,
    .axpy = axpy,
    .add = add,
    .scale = scale,
    .mul_vec = mul_vec,
    .exp = exp_vec,
    .sigmoid = sigmoid_vec,
    .tanh = tanh_vec,
    .silu = silu_vec,
    .situ = situ_vec,
    .kda_step = kda_step,
    .max = max_of,
};
