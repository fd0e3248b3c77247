/* k3-computed/kernels_avx512.c: the AVX-512 set: everything elementwise and everything that runs
 * along rows.  The products W x are in kernels_mul_avx512.c.  Operation by operation the same as
 * kernels_c.c; tails by masks, absent elements leave their lanes alone. */
#include <immintrin.h>
#include <math.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* The lanes that exist of the 16 beginning at i. */
INLINE __mmask16 tail_mask(size_t i, size_t n)
{
    return n - i >= LANES ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
}

INLINE __m512 widen16(__mmask16 m, const char *w, enum k3_dtype dtype)
{
    if (dtype == K3_F32)
        return _mm512_maskz_loadu_ps(m, w);
    if (dtype == K3_F16)
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, w));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, w)), 16));
}

static void split(float *y, const float *x, size_t n)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    for (size_t g = 0; g < n; g += 2 * LANES) {
        __m512 x0 = _mm512_loadu_ps(x + g), x1 = _mm512_loadu_ps(x + g + LANES);
        _mm512_storeu_ps(y + g, _mm512_permutex2var_ps(x0, even, x1));
        _mm512_storeu_ps(y + g + LANES, _mm512_permutex2var_ps(x0, odd, x1));
    }
}

/* N_VEC * 16 columns from j0, their chains held in registers over all of n_sum. */
#define N_VEC 8
INLINE void mul_t_block(float *y, const float *a, const char *m, size_t row_bytes, size_t n_sum,
                        size_t n, enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2;
    __m512 acc[N_VEC];
    __mmask16 mask[N_VEC];
#pragma GCC unroll 8
    for (size_t v = 0; v < N_VEC; v++) {
        mask[v] = v * LANES < n ? tail_mask(v * LANES, n) : 0;
        acc[v] = _mm512_maskz_loadu_ps(mask[v], y + v * LANES);
    }
    for (size_t i = 0; i < n_sum; i++) {
        __m512 ai = _mm512_set1_ps(a[i]);
#pragma GCC unroll 8
        for (size_t v = 0; v < N_VEC; v++) {
            __m512 w = widen16(mask[v], m + i * row_bytes + v * LANES * size, dtype);
            acc[v] = _mm512_fmadd_ps(ai, w, acc[v]);
        }
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < N_VEC; v++)
        _mm512_mask_storeu_ps(y + v * LANES, mask[v], acc[v]);
}

INLINE void mul_t_any(float *y, const float *a, const char *m, size_t ldm, size_t n_sum,
                      size_t n_out, enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2;
    for (size_t j = 0; j < n_out; j += N_VEC * LANES)
        mul_t_block(y + j, a, m + j * size, ldm * size, n_sum, n_out - j, dtype);
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
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i stride = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)taps));
    for (size_t c = 0; c < n; c += LANES) {
        __mmask16 m = tail_mask(c, n);
        __m512 acc = _mm512_setzero_ps();
        for (size_t t = 0; t < taps; t++) {
            const float *in = t + 1 < taps ? hist + t * ldh + c : u + c;
            __m512 tap =
                _mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, stride, w + c * taps + t, 4);
            acc = _mm512_fmadd_ps(tap, _mm512_maskz_loadu_ps(m, in), acc);
        }
        _mm512_mask_storeu_ps(y + c, m, acc);
    }
}

static void axpy(float *y, float a, const float *x, size_t n)
{
    __m512 av = _mm512_set1_ps(a);
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        __m512 yi = _mm512_maskz_loadu_ps(m, y + i);
        _mm512_mask_storeu_ps(y + i, m, _mm512_fmadd_ps(av, _mm512_maskz_loadu_ps(m, x + i), yi));
    }
}

static void add(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        __m512 ai = _mm512_maskz_loadu_ps(m, a + i);
        _mm512_mask_storeu_ps(y + i, m, _mm512_add_ps(ai, _mm512_maskz_loadu_ps(m, b + i)));
    }
}

static void scale(float *y, const float *x, float a, size_t n)
{
    __m512 av = _mm512_set1_ps(a);
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), av));
    }
}

static void mul_vec(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        __m512 ai = _mm512_maskz_loadu_ps(m, a + i);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(ai, _mm512_maskz_loadu_ps(m, b + i)));
    }
}

/* Rule (f): the steps of k3_expf, k3_sigmoidf and k3_tanhf in kernels_c.c, in their order. */
INLINE __m512 qnan_where(__m512 x, __m512 y)
{
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(nan, y, _mm512_castsi512_ps(_mm512_set1_epi32(K3_QNAN_BITS)));
}

INLINE __m512 power_of_2(__m512i k)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(k, _mm512_set1_epi32(127)), 23));
}

INLINE __m512 exp16(__m512 x0)
{
    const __m512 lo = _mm512_set1_ps(K3_EXP_LO), hi = _mm512_set1_ps(K3_EXP_HI);
    const __m512 magic = _mm512_set1_ps(K3_RINT_MAGIC), one = _mm512_set1_ps(1.0f);
    __m512 x = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x0, lo, _CMP_LT_OQ), x0, lo);
    x = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, hi, _CMP_GT_OQ), x, hi);
    __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(K3_LOG2E), magic);
    __m512 n = _mm512_sub_ps(t, magic);
    __m512i k = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_castps_si512(magic));
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-K3_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-K3_LN2_LO), r);
    __m512 p = _mm512_set1_ps(K3_EXP_C7);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(K3_EXP_C6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(K3_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(K3_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(K3_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(K3_EXP_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i k1 = _mm512_srai_epi32(k, 1);
    p = _mm512_mul_ps(p, power_of_2(k1));
    p = _mm512_mul_ps(p, power_of_2(_mm512_sub_epi32(k, k1)));
    return qnan_where(x0, p);
}

INLINE __m512 sigmoid16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    __m512 z = exp16(_mm512_or_ps(x, sign));
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 y = _mm512_div_ps(_mm512_mask_blend_ps(negative, one, z), _mm512_add_ps(one, z));
    return qnan_where(x, y);
}

INLINE __m512 tanh16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    __m512 a = _mm512_andnot_ps(sign, x);
    __m512 z = _mm512_mul_ps(a, a);
    __m512 p = _mm512_set1_ps(K3_TANH_C5);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(K3_TANH_C4));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(K3_TANH_C3));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(K3_TANH_C2));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(K3_TANH_C1));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(K3_TANH_C0));
    __m512 small = _mm512_fmadd_ps(a, _mm512_mul_ps(p, z), a);
    __m512 e = exp16(_mm512_mul_ps(_mm512_set1_ps(-2.0f), a));
    __m512 large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    __mmask16 is_small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(K3_TANH_SMALL), _CMP_LT_OQ);
    __m512 y = _mm512_or_ps(_mm512_mask_blend_ps(is_small, large, small), _mm512_and_ps(x, sign));
    return qnan_where(x, y);
}

static void exp_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        _mm512_mask_storeu_ps(y + i, m, exp16(_mm512_maskz_loadu_ps(m, x + i)));
    }
}

static void sigmoid_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        _mm512_mask_storeu_ps(y + i, m, sigmoid16(_mm512_maskz_loadu_ps(m, x + i)));
    }
}

static void tanh_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        _mm512_mask_storeu_ps(y + i, m, tanh16(_mm512_maskz_loadu_ps(m, x + i)));
    }
}

static void silu_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        __m512 xi = _mm512_maskz_loadu_ps(m, x + i);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(xi, sigmoid16(xi)));
    }
}

static void situ_vec(float *y, const float *g, const float *u, size_t n, float beta, float lin)
{
    const __m512 b = _mm512_set1_ps(beta), l = _mm512_set1_ps(lin);
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 m = tail_mask(i, n);
        __m512 gi = _mm512_maskz_loadu_ps(m, g + i), ui = _mm512_maskz_loadu_ps(m, u + i);
        __m512 gate = _mm512_mul_ps(_mm512_mul_ps(b, tanh16(_mm512_div_ps(gi, b))), sigmoid16(gi));
        __m512 up = _mm512_mul_ps(l, tanh16(_mm512_div_ps(ui, l)));
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(gate, up));
    }
}

/* Four vectors of columns of S at a time, so that the chains u and o stay in registers. */
#define KDA_VEC 4
static void kda_step(float *S, float *o, const float *q, const float *k, const float *v,
                     const float *alpha, float beta, size_t dk, size_t dv, float *scratch)
{
    (void)scratch;
    for (size_t j = 0; j < dv; j += KDA_VEC * LANES) {
        __m512 u[KDA_VEC], out[KDA_VEC];
        __mmask16 m[KDA_VEC];
#pragma GCC unroll 4
        for (size_t b = 0; b < KDA_VEC; b++) {
            m[b] = j + b * LANES < dv ? tail_mask(j + b * LANES, dv) : 0;
            u[b] = _mm512_setzero_ps();
            out[b] = _mm512_setzero_ps();
        }
        for (size_t i = 0; i < dk; i++) {
            __m512 ki = _mm512_set1_ps(k[i]), ai = _mm512_set1_ps(alpha[i]);
#pragma GCC unroll 4
            for (size_t b = 0; b < KDA_VEC; b++) {
                float *s = S + i * dv + j + b * LANES;
                __m512 si = _mm512_mul_ps(ai, _mm512_maskz_loadu_ps(m[b], s));
                _mm512_mask_storeu_ps(s, m[b], si);
                u[b] = _mm512_fmadd_ps(ki, si, u[b]);
            }
        }
#pragma GCC unroll 4
        for (size_t b = 0; b < KDA_VEC; b++) {
            __m512 vj = _mm512_maskz_loadu_ps(m[b], v + j + b * LANES);
            u[b] = _mm512_mul_ps(_mm512_set1_ps(beta), _mm512_sub_ps(vj, u[b])); /* now d */
        }
        for (size_t i = 0; i < dk; i++) {
            __m512 ki = _mm512_set1_ps(k[i]), qi = _mm512_set1_ps(q[i]);
#pragma GCC unroll 4
            for (size_t b = 0; b < KDA_VEC; b++) {
                float *s = S + i * dv + j + b * LANES;
                __m512 si = _mm512_fmadd_ps(ki, u[b], _mm512_maskz_loadu_ps(m[b], s));
                _mm512_mask_storeu_ps(s, m[b], si);
                out[b] = _mm512_fmadd_ps(qi, si, out[b]);
            }
        }
#pragma GCC unroll 4
        for (size_t b = 0; b < KDA_VEC; b++)
            _mm512_mask_storeu_ps(o + j + b * LANES, m[b], out[b]);
    }
}

/* On integers whose signed order is the order of the floats: negative ones with the magnitude bits
 * flipped. */
static float max_of(const float *x, size_t n)
{
    const __m512i minus_inf = _mm512_castps_si512(_mm512_set1_ps(-INFINITY)),
                  magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i m = _mm512_xor_si512(minus_inf, magnitude);
    int32_t lane[LANES], top;
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 present = tail_mask(i, n);
        __m512 xi = _mm512_maskz_loadu_ps(present, x + i);
        __mmask16 take = _mm512_mask_cmp_ps_mask(present, xi, xi, _CMP_ORD_Q);
        __m512i bits = _mm512_castps_si512(xi);
        __m512i key =
            _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitude));
        m = _mm512_mask_max_epi32(m, take, m, key);
    }
    _mm512_storeu_si512(lane, m);
    top = lane[0];
    for (size_t l = 1; l < LANES; l++)
        top = lane[l] > top ? lane[l] : top;
    return k3_bits_to_f32((uint32_t)(top < 0 ? top ^ 0x7fffffff : top));
}

const struct k3_kernels k3_kernels_avx512 = {
    .name = "avx512",
    .mul = {[K3_F32] = k3_avx512_mul_f32,
            [K3_F16] = k3_avx512_mul_f16,
            [K3_BF16] = k3_avx512_mul_bf16},
    .mul_mxfp4 = k3_avx512_mul_mxfp4,
    .split = split,
    .dot = k3_avx512_dot,
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
