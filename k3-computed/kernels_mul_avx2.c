/* k3-computed/kernels_mul_avx2.c: the products W x of rules (b) and (c) with two ymm registers of
 * eight lanes per dot product.  A tile of NO rows of W and NX rows of x keeps its chains in
 * registers (two for each pair of rows, sixteen registers in all), so each weight is widened once
 * per tile.  NO and NX are compile-time constants. */
#include <immintrin.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* Rule (b), the tree: l + (l+8), + (l+4), + (l+2), + (l+1). */
INLINE float tree(__m256 lo, __m256 hi)
{
    __m256 s8 = _mm256_add_ps(lo, hi);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
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

#define MAX_O 4
#define MAX_X 3

/* The elements past the last whole sixteen, each in its own lane; the other lanes stay as they are.
 */
INLINE void tail_lanes(__m256 acc[2], const char *w, const float *x, size_t n,
                       const enum k3_dtype dtype)
{
    float lane[LANES];
    _mm256_storeu_ps(lane, acc[0]);
    _mm256_storeu_ps(lane + 8, acc[1]);
    for (size_t i = 0; i < n; i++)
        lane[i] = __builtin_fmaf(k3_widen_at(w, i, dtype), x[i], lane[i]);
    acc[0] = _mm256_loadu_ps(lane);
    acc[1] = _mm256_loadu_ps(lane + 8);
}

INLINE void tile(float *y, size_t ldy, const char *w, size_t n_cols, const float *x, size_t ldx,
                 const size_t no, const size_t nx, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2, row_bytes = n_cols * size;
    size_t full = n_cols / LANES * LANES;
    __m256 acc[MAX_O][MAX_X][2], wo[MAX_O];
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[o][r][0] = acc[o][r][1] = _mm256_setzero_ps();
    for (size_t i = 0; i < full; i += LANES) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; half++) {
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++)
                wo[o] = widen8(w + o * row_bytes + (i + half * 8) * size, dtype);
#pragma GCC unroll 8
            for (size_t r = 0; r < nx; r++) {
                __m256 xr = _mm256_loadu_ps(x + r * ldx + i + half * 8);
#pragma GCC unroll 8
                for (size_t o = 0; o < no; o++)
                    acc[o][r][half] = _mm256_fmadd_ps(wo[o], xr, acc[o][r][half]);
            }
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++) {
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++) {
            if (full < n_cols)
                tail_lanes(acc[o][r], w + o * row_bytes + full * size, x + r * ldx + full,
                           n_cols - full, dtype);
            y[r * ldy + o] = tree(acc[o][r][0], acc[o][r][1]);
        }
    }
}

/* All rows of W in [w, n_out) against a block of nx x rows. */
INLINE void strip(float *y, size_t ldy, const char *w, size_t n_out, size_t n_cols, const float *x,
                  size_t ldx, const size_t nx, const enum k3_dtype dtype)
{
    const size_t row_bytes = n_cols * (dtype == K3_F32 ? 4 : 2), step = nx == 1 ? 4 : 2;
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
        default: strip(y, ldy, w, n_out, n_cols, x, ldx, 3, dtype); break;                         \
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
    size_t o_step = k3_rows_in_cache(n_cols * size, 4), nx = k3_block_share(n_rows, MAX_X);
    if (n_rows <= MAX_X)
        o_step = n_out;
    for (size_t o = 0; o < n_out; o += o_step) {
        size_t no = n_out - o < o_step ? n_out - o : o_step;
        for (size_t r = 0; r < n_rows; r += nx)
            strips(y + r * ldy + o, ldy, w + o * n_cols * size, no, n_cols, x + r * ldx, ldx,
                   n_rows - r < nx ? n_rows - r : nx);
    }
}

void k3_avx2_mul_f32(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                     const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 4, strips_f32);
}

void k3_avx2_mul_f16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                     const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 2, strips_f16);
}

void k3_avx2_mul_bf16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                      const float *x, size_t ldx, size_t n_rows)
{
    mul(y, ldy, w, n_out, n_cols, x, ldx, n_rows, 2, strips_bf16);
}

float k3_avx2_dot(const float *a, const float *b, size_t n)
{
    float y;
    tile(&y, 1, (const char *)a, n, b, n, 1, 1, K3_F32);
    return y;
}

/* Rule (c).  Magnitudes, times the group's scale (exact), are looked up by the low three bits of
 * each nibble, the sign bit is put on top, except for s = 255, whose weights are all +0. shufps
 * splits the columns 2j and 2j+1 of x within 128-bit halves, so the lanes of a register stand in
 * the order 0 1 4 5 2 3 6 7; the packed bytes are put in that order, too, and the lanes back in
 * theirs before the tree. */
INLINE __m256 mxfp4_weight(__m256i code, __m256i sign_at_top, __m256 table, __m256i sign_mask)
{
    __m256 magnitude = _mm256_permutevar8x32_ps(table, code);
    return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(_mm256_and_si256(sign_at_top, sign_mask)));
}

#define MAX_X4 2
INLINE void tile_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                       size_t n_cols, const float *x, size_t ldx, const size_t no, const size_t nx)
{
    const __m256 e2m1 = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    size_t n_groups = n_cols / 32;
    __m256 acc[MAX_O][MAX_X4][2];
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[o][r][0] = acc[o][r][1] = _mm256_setzero_ps();
    for (size_t g = 0; g < n_groups; g++) {
        __m128i bytes[MAX_O];
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            bytes[o] = _mm_shuffle_epi8(
                _mm_loadu_si128((const __m128i_u *)(packed + o * (n_cols / 2) + g * 16)), order);
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; half++) {
            __m256 xe[MAX_X4], xo[MAX_X4];
#pragma GCC unroll 8
            for (size_t r = 0; r < nx; r++) {
                const float *xr = x + r * ldx + g * 32 + half * 16;
                __m256 x0 = _mm256_loadu_ps(xr), x1 = _mm256_loadu_ps(xr + 8);
                xe[r] = _mm256_shuffle_ps(x0, x1, 0x88);
                xo[r] = _mm256_shuffle_ps(x0, x1, 0xdd);
            }
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++) {
                uint8_t s = scale[o * n_groups + g];
                __m256 table = _mm256_mul_ps(e2m1, _mm256_set1_ps(k3_e8m0_widen(s)));
                __m256i sign_mask = _mm256_set1_epi32(s == 255 ? 0 : INT32_MIN);
                __m256i code =
                    _mm256_cvtepu8_epi32(half ? _mm_unpackhi_epi64(bytes[o], bytes[o]) : bytes[o]);
                __m256 we = mxfp4_weight(code, _mm256_slli_epi32(code, 28), table, sign_mask);
                __m256 wd = mxfp4_weight(_mm256_srli_epi32(code, 4), _mm256_slli_epi32(code, 24),
                                         table, sign_mask);
#pragma GCC unroll 8
                for (size_t r = 0; r < nx; r++)
                    acc[o][r][half] =
                        _mm256_fmadd_ps(wd, xo[r], _mm256_fmadd_ps(we, xe[r], acc[o][r][half]));
            }
        }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++) {
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++) {
            __m256d lo = _mm256_permute4x64_pd(_mm256_castps_pd(acc[o][r][0]), 0xd8);
            __m256d hi = _mm256_permute4x64_pd(_mm256_castps_pd(acc[o][r][1]), 0xd8);
            y[r * ldy + o] = tree(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
        }
    }
}

INLINE void strip_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                        size_t n_out, size_t n_cols, const float *x, size_t ldx, const size_t nx)
{
    const size_t step = nx == 1 ? 4 : 2;
    size_t o = 0;
    for (; o + step <= n_out; o += step)
        tile_mxfp4(y + o, ldy, packed + o * (n_cols / 2), scale + o * (n_cols / 32), n_cols, x, ldx,
                   step, nx);
    for (; o < n_out; o++)
        tile_mxfp4(y + o, ldy, packed + o * (n_cols / 2), scale + o * (n_cols / 32), n_cols, x, ldx,
                   1, nx);
}

void k3_avx2_mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                       size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    size_t o_step = k3_rows_in_cache(n_cols / 2, 4), nx = k3_block_share(n_rows, MAX_X4);
    for (size_t o = 0; o < n_out; o += o_step) {
        size_t no = n_out - o < o_step ? n_out - o : o_step;
        const uint8_t *p = packed + o * (n_cols / 2), *s = scale + o * (n_cols / 32);
        for (size_t r = 0; r < n_rows; r += nx) {
            if (n_rows - r == 1 || nx == 1)
                strip_mxfp4(y + r * ldy + o, ldy, p, s, no, n_cols, x + r * ldx, ldx, 1);
            else
                strip_mxfp4(y + r * ldy + o, ldy, p, s, no, n_cols, x + r * ldx, ldx, 2);
        }
    }
}
