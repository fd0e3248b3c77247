/* k3-computed/kernels_mul_avx512.c: the products W x of rules (b) and (c) with one zmm register of
 * sixteen lanes per dot product.  A tile of NO rows of W and NX rows of x keeps NO * NX chains in
 * registers, so each weight is widened once per tile and each x loaded once; NO and NX are
 * compile-time constants, every tile body is unrolled. */
#include <immintrin.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* Rule (b), the tree: l + (l+8), + (l+4), + (l+2), + (l+1). */
INLINE float tree(__m512 acc)
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps(acc, 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

INLINE __m512 widen16(const char *w, enum k3_dtype dtype)
{
    if (dtype == K3_F32)
        return _mm512_loadu_ps(w);
    if (dtype == K3_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)w));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)w)), 16));
}

INLINE __m512 widen_masked(__mmask16 m, const char *w, enum k3_dtype dtype)
{
    if (dtype == K3_F32)
        return _mm512_maskz_loadu_ps(m, w);
    if (dtype == K3_F16)
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, w));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, w)), 16));
}

#define MAX_O 8
#define MAX_X 6

INLINE void tile(float *y, size_t ldy, const char *w, size_t n_cols, const float *x, size_t ldx,
                 const size_t no, const size_t nx, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2, row_bytes = n_cols * size;
    size_t full = n_cols / LANES * LANES;
    __m512 acc[MAX_O][MAX_X], wo[MAX_O];
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[o][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < full; i += LANES) {
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            wo[o] = widen16(w + o * row_bytes + i * size, dtype);
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            __m512 xr = _mm512_loadu_ps(x + r * ldx + i);
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++)
                acc[o][r] = _mm512_fmadd_ps(wo[o], xr, acc[o][r]);
        }
    }
    if (full < n_cols) {
        __mmask16 m = (__mmask16)((1u << (n_cols - full)) - 1);
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            wo[o] = widen_masked(m, w + o * row_bytes + full * size, dtype);
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            __m512 xr = _mm512_maskz_loadu_ps(m, x + r * ldx + full);
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++)
                acc[o][r] = _mm512_mask3_fmadd_ps(wo[o], xr, acc[o][r], m);
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            y[r * ldy + o] = tree(acc[o][r]);
}

/* All rows of W in [w, n_out) against a block of nx x rows. */
INLINE void strip(float *y, size_t ldy, const char *w, size_t n_out, size_t n_cols, const float *x,
                  size_t ldx, const size_t nx, const enum k3_dtype dtype)
{
    const size_t row_bytes = n_cols * (dtype == K3_F32 ? 4 : 2), step = nx == 1 ? 8 : 4;
    size_t o = 0;
    for (; o + step <= n_out; o += step)
        tile(y + o, ldy, w + o * row_bytes, n_cols, x, ldx, step, nx, dtype);
    for (; o < n_out; o++)
        tile(y + o, ldy, w + o * row_bytes, n_cols, x, ldx, 1, nx, dtype);
}

#define STRIPS(name, dtype)                                                                        \
    static void name(float *y, size_t ldy, const char *w, size_t n_out, size_t n_cols,             \
                     const float *x, size_t ldx, size_t nx)                                        \
    {                                                                                              \
        switch (nx) {                                                                              \
        case 1: strip(y, ldy, w, n_out, n_cols, x, ldx, 1, dtype); break;                          \
        case 2: strip(y, ldy, w, n_out, n_cols, x, ldx, 2, dtype); break;                          \
        case 3: strip(y, ldy, w, n_out, n_cols, x, ldx, 3, dtype); break;                          \
        case 4: strip(y, ldy, w, n_out, n_cols, x, ldx, 4, dtype); break;                          \
        case 5: strip(y, ldy, w, n_out, n_cols, x, ldx, 5, dtype); break;                          \
        default: strip(y, ldy, w, n_out, n_cols, x, ldx, 6, dtype); break;                         \
        }                                                                                          \
    }
STRIPS(strips_f32, K3_F32)
STRIPS(strips_f16, K3_F16)
STRIPS(strips_bf16, K3_BF16)

typedef void strips_fn(float *, size_t, const char *, size_t, size_t, const float *, size_t,
                       size_t);

/* Blocks of W that stay in the second-level cache, under each of them all blocks of x. */
static void mul(float *y, size_t ldy, const char *w, size_t n_out, size_t n_cols, const float *x,
                size_t ldx, size_t n_rows, size_t size, strips_fn *strips)
{
    size_t o_step = k3_rows_in_cache(n_cols * size, 8), nx = k3_block_share(n_rows, MAX_X);
    if (n_rows <= MAX_X)
        o_step = n_out;
    for (size_t o = 0; o < n_out; o += o_step) {
        size_t no = n_out - o < o_step ? n_out - o : o_step;
        for (size_t r = 0; r < n_rows; r += nx)
            strips(y + r * ldy + o, ldy, w + o * n_cols * size, no, n_cols, x + r * ldx, ldx,
                   n_rows - r < nx ? n_rows - r : nx);
    }
}

void k3_avx512_mul_f32(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 4, strips_f32);
}

void k3_avx512_mul_f16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 2, strips_f16);
}

void k3_avx512_mul_bf16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                        const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 2, strips_bf16);
}

float k3_avx512_dot(const float *a, const float *b, size_t n)
{
    float y;
    tile(&y, 1, (const char *)a, n, b, n, 1, 1, K3_F32);
    return y;
}

/* Rule (c).  The sixteen E2M1 values, times the group's scale (exact), are looked up by nibble;
 * vpermps uses the low four bits of each index alone.  Columns 2j and 2j+1 of x are split once per
 * tile and group. */
#define MAX_X4 4
INLINE void tile_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                       size_t n_cols, const float *x, size_t ldx, const size_t no, const size_t nx)
{
    const __m512 e2m1 = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    size_t n_groups = n_cols / 32;
    __m512 acc[MAX_O][MAX_X4], xe[MAX_X4], xo[MAX_X4];
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[o][r] = _mm512_setzero_ps();
    for (size_t g = 0; g < n_groups; g++) {
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            const float *xr = x + r * ldx + g * 32;
            __m512 x0 = _mm512_loadu_ps(xr), x1 = _mm512_loadu_ps(xr + LANES);
            xe[r] = _mm512_permutex2var_ps(x0, even, x1);
            xo[r] = _mm512_permutex2var_ps(x0, odd, x1);
        }
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++) {
            uint8_t s = scale[o * n_groups + g];
            __m512 table =
                _mm512_maskz_mul_ps(s == 255 ? 0 : 0xffff, e2m1, _mm512_set1_ps(k3_e8m0_widen(s)));
            __m512i code = _mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i_u *)(packed + o * (n_cols / 2) + g * LANES)));
            __m512 we = _mm512_permutexvar_ps(code, table);
            __m512 wd = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), table);
#pragma GCC unroll 8
            for (size_t r = 0; r < nx; r++)
                acc[o][r] = _mm512_fmadd_ps(wd, xo[r], _mm512_fmadd_ps(we, xe[r], acc[o][r]));
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            y[r * ldy + o] = tree(acc[o][r]);
}

INLINE void strip_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                        size_t n_out, size_t n_cols, const float *x, size_t ldx, const size_t nx)
{
    const size_t step = nx == 1 ? 8 : 4;
    size_t o = 0;
    for (; o + step <= n_out; o += step)
        tile_mxfp4(y + o, ldy, packed + o * (n_cols / 2), scale + o * (n_cols / 32), n_cols, x, ldx,
                   step, nx);
    for (; o < n_out; o++)
        tile_mxfp4(y + o, ldy, packed + o * (n_cols / 2), scale + o * (n_cols / 32), n_cols, x, ldx,
                   1, nx);
}

void k3_avx512_mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                         size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    size_t o_step = k3_rows_in_cache(n_cols / 2, 8), nx = k3_block_share(n_rows, MAX_X4);
    for (size_t o = 0; o < n_out; o += o_step) {
        size_t no = n_out - o < o_step ? n_out - o : o_step;
        const uint8_t *p = packed + o * (n_cols / 2), *s = scale + o * (n_cols / 32);
        for (size_t r = 0; r < n_rows; r += nx) {
            float *yr = y + r * ldy + o;
            const float *xr = x + r * ldx;
            switch (n_rows - r < nx ? n_rows - r : nx) {
            case 1: strip_mxfp4(yr, ldy, p, s, no, n_cols, xr, ldx, 1); break;
            case 2: strip_mxfp4(yr, ldy, p, s, no, n_cols, xr, ldx, 2); break;
            case 3: strip_mxfp4(yr, ldy, p, s, no, n_cols, xr, ldx, 3); break;
            default: strip_mxfp4(yr, ldy, p, s, no, n_cols, xr, ldx, 4); break;
            }
        }
    }
}
