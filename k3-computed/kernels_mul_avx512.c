/* k3-computed/kernels_mul_avx512.c: the products W x of rules (b) and (c) with one zmm register of
 * sixteen lanes per dot product.  A tile of NO rows of W and NX rows of x keeps NO * NX chains in
 * registers, so each weight is widened once per tile and each x loaded once; NO and NX are
 * compile-time constants, every tile body is unrolled.  kernels_mul.c walks. */
#include <immintrin.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define MAX_O 4
#define MAX_X 6

/* Rule (b), the tree: l + (l+8), + (l+4), + (l+2), + (l+1). */
INLINE float tree(__m512 acc)
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps(acc, 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* The tree of sixteen chains at once, addition by addition the same: sum 4 i + k stands in lane 4 k + i. */
INLINE __m512 tree16(const __m512 a[16])
{
    __m512 s8[8], s4[4], s2[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* l + (l+8) of two chains */
        s8[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x44),
                              _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* + (l+4) of four */
        s4[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s8[2 * i], s8[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(s8[2 * i], s8[2 * i + 1], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) { /* + (l+2) of eight */
        __m512d p = _mm512_castps_pd(s4[2 * i]), q = _mm512_castps_pd(s4[2 * i + 1]);
        s2[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(s2[0], s2[1], 0x88), _mm512_shuffle_ps(s2[0], s2[1], 0xdd));
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

/* y[r * ldy + i * apart] = the sum of acc[i][r]. */
INLINE void store_sums(float *y, size_t ldy, size_t apart, __m512 acc[MAX_O][MAX_X], const size_t no, const size_t nx)
{
    if (no < 4 || nx == 1) {
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
#pragma GCC unroll 8
            for (size_t i = 0; i < no; i++)
                y[r * ldy + i * apart] = tree(acc[i][r]);
        return;
    }
#pragma GCC unroll 2
    for (size_t r0 = 0; r0 < nx; r0 += 4) { /* four rows of x, or what is left of them more than once */
        __m512 a[16];
        float sum[16];
#pragma GCC unroll 16
        for (size_t i = 0; i < 16; i++)
            a[i] = acc[i / 4][r0 + i % 4 < nx ? r0 + i % 4 : nx - 1];
        _mm512_storeu_ps(sum, tree16(a));
        for (size_t r = r0; r < nx && r < r0 + 4; r++)
#pragma GCC unroll 4
            for (size_t i = 0; i < 4; i++)
                y[r * ldy + i * apart] = sum[(r - r0) * 4 + i];
    }
}

INLINE void load_chains(__m512 acc[MAX_O][MAX_X], const struct k3_mul_part *p, size_t o, const size_t no,
                        const size_t nx)
{
#pragma GCC unroll 8
    for (size_t i = 0; i < no; i++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[i][r] = p->begin ? _mm512_load_ps(p->rest + ((o + i) * nx + r) * LANES)
                                 : _mm512_setzero_ps();
}

INLINE void store_chains(__m512 acc[MAX_O][MAX_X], const struct k3_mul_part *p, size_t o, const size_t no,
                         const size_t nx)
{
    if (p->end < p->n_cols) {
#pragma GCC unroll 8
        for (size_t i = 0; i < no; i++)
#pragma GCC unroll 8
            for (size_t r = 0; r < nx; r++)
                _mm512_store_ps(p->rest + ((o + i) * nx + r) * LANES, acc[i][r]);
        return;
    }
    store_sums(p->y + o, p->ldy, 1, acc, no, nx);
}

/* Rows [o, o + no) of the chunk at w.  w_ahead, x_ahead: fetches the weights of the next tile, the x of the next panel. */
INLINE void tile(const struct k3_mul_part *p, const char *w, size_t o, const size_t no, const size_t nx,
                 const enum k3_dtype dtype, const int w_ahead, const int x_ahead)
{
    const size_t size = dtype == K3_F32 ? 4 : 2, row_bytes = p->n_cols * size, ldx = p->ldx;
    size_t full = p->end / LANES * LANES;
    const float *x = p->x;
    __m512 acc[MAX_O][MAX_X], wo[MAX_O];
    w += o * row_bytes;
    load_chains(acc, p, o, no, nx);
    for (size_t i = p->begin; i < full; i += LANES) {
#pragma GCC unroll 8
        for (size_t n = 0; n < no; n++)
            wo[n] = widen16(w + n * row_bytes + i * size, dtype);
        if (w_ahead && i % (64 / size) == 0)
#pragma GCC unroll 8
            for (size_t n = 0; n < no; n++)
                _mm_prefetch(w + (no + n) * row_bytes + i * size, _MM_HINT_T0);
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            __m512 xr = _mm512_loadu_ps(x + r * ldx + i);
            if (x_ahead)
                _mm_prefetch(p->next_x + r * ldx + (i - p->begin), _MM_HINT_T0);
#pragma GCC unroll 8
            for (size_t n = 0; n < no; n++)
                acc[n][r] = _mm512_fmadd_ps(wo[n], xr, acc[n][r]);
        }
    }
    if (full < p->end) {
        __mmask16 m = (__mmask16)((1u << (p->end - full)) - 1);
#pragma GCC unroll 8
        for (size_t n = 0; n < no; n++)
            wo[n] = widen_masked(m, w + n * row_bytes + full * size, dtype);
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            __m512 xr = _mm512_maskz_loadu_ps(m, x + r * ldx + full);
#pragma GCC unroll 8
            for (size_t n = 0; n < no; n++)
                acc[n][r] = _mm512_mask3_fmadd_ps(wo[n], xr, acc[n][r], m);
        }
    }
    store_chains(acc, p, o, no, nx);
}

#define STREAMS 4
#define RUN 32 /* columns of one stream at a time */

/* Rows o, o + apart, o + 2 apart, .. of W, over all columns.  With tile after tile each of them is one stream through memory,
 * which is read fastest so. */
INLINE void tile_streams(const struct k3_mul_part *p, const char *w, size_t o, size_t apart, const size_t nx,
                         const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2, row_bytes = p->n_cols * size, ldx = p->ldx;
    size_t i = 0, whole = p->n_cols / RUN * RUN, full = p->n_cols / LANES * LANES;
    const float *x = p->x;
    __m512 acc[MAX_O][MAX_X];
    w += o * row_bytes;
#pragma GCC unroll 8
    for (size_t n = 0; n < STREAMS; n++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[n][r] = _mm512_setzero_ps();
    for (; i < whole; i += RUN) {
#pragma GCC unroll 8
        for (size_t n = 0; n < STREAMS; n++) {
            const char *at = w + n * apart * row_bytes + i * size;
#pragma GCC unroll 8
            for (size_t u = 0; u < RUN; u += LANES) {
                __m512 wn = widen16(at + u * size, dtype);
                if (u * size % 64 == 0)
                    _mm_prefetch(at + u * size + K3_MUL_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
                for (size_t r = 0; r < nx; r++)
                    acc[n][r] = _mm512_fmadd_ps(wn, _mm512_loadu_ps(x + r * ldx + i + u), acc[n][r]);
            }
        }
    }
    for (; i < p->n_cols; i += LANES) {
        __mmask16 m = i < full ? 0xffff : (__mmask16)((1u << (p->n_cols - full)) - 1);
#pragma GCC unroll 8
        for (size_t n = 0; n < STREAMS; n++) {
            __m512 wn = widen_masked(m, w + n * apart * row_bytes + i * size, dtype);
#pragma GCC unroll 8
            for (size_t r = 0; r < nx; r++)
                acc[n][r] = _mm512_mask3_fmadd_ps(wn, _mm512_maskz_loadu_ps(m, x + r * ldx + i), acc[n][r], m);
        }
    }
    store_sums(p->y + o, p->ldy, apart, acc, STREAMS, nx);
}

/* n_out rows of W at w against nx rows of x. */
INLINE void strip(const struct k3_mul_part *p, const char *w, size_t n_out, const size_t nx,
                  const enum k3_dtype dtype, const int ahead)
{
    size_t o = 0;
    for (; o + 8 <= n_out; o += 4)
        tile(p, w, o, 4, nx, dtype, ahead, 0);
    for (; o + 4 <= n_out; o += 4)
        tile(p, w, o, 4, nx, dtype, ahead, 1);
    for (; o < n_out; o++)
        tile(p, w, o, 1, nx, dtype, 0, 0);
}

INLINE void strip_streams(const struct k3_mul_part *p, const char *w, size_t n_out, const size_t nx,
                          const enum k3_dtype dtype)
{
    size_t apart = n_out / STREAMS;
    for (size_t o = 0; o < apart; o++)
        tile_streams(p, w, o, apart, nx, dtype);
    for (size_t o = apart * STREAMS; o < n_out; o++)
        tile(p, w, o, 1, nx, dtype, 0, 0);
}

#define STREAMING(name, dtype)                                                                                             \
    static void name(const struct k3_mul_part *p, const char *w, size_t n_out, size_t nx)                                  \
    {                                                                                                                      \
        switch (nx) {                                                                                                      \
        case 1: strip_streams(p, w, n_out, 1, dtype); break;                                                               \
        case 2: strip_streams(p, w, n_out, 2, dtype); break;                                                               \
        case 3: strip_streams(p, w, n_out, 3, dtype); break;                                                               \
        default: strip_streams(p, w, n_out, 4, dtype); break;                                                              \
        }                                                                                                                  \
    }
STREAMING(stream_f32, K3_F32)
STREAMING(stream_f16, K3_F16)
STREAMING(stream_bf16, K3_BF16)

#define STRIPS(name, dtype, ahead)                                                                 \
    static void name(const struct k3_mul_part *p, const char *w, size_t n_out, size_t nx)          \
    {                                                                                              \
        switch (nx) {                                                                              \
        case 1: strip(p, w, n_out, 1, dtype, ahead); break;                                        \
        case 2: strip(p, w, n_out, 2, dtype, ahead); break;                                        \
        case 3: strip(p, w, n_out, 3, dtype, ahead); break;                                        \
        case 4: strip(p, w, n_out, 4, dtype, ahead); break;                                        \
        case 5: strip(p, w, n_out, 5, dtype, ahead); break;                                        \
        default: strip(p, w, n_out, 6, dtype, ahead); break;                                       \
        }                                                                                          \
    }
STRIPS(first_strips_f32, K3_F32, 1)
STRIPS(strips_f32, K3_F32, 0)
STRIPS(first_strips_f16, K3_F16, 1)
STRIPS(strips_f16, K3_F16, 0)
STRIPS(first_strips_bf16, K3_BF16, 1)
STRIPS(strips_bf16, K3_BF16, 0)

K3_DEFINE_MUL(avx512, f32, 4, MAX_X)
K3_DEFINE_MUL(avx512, f16, 2, MAX_X)
K3_DEFINE_MUL(avx512, bf16, 2, MAX_X)

float k3_avx512_dot(const float *a, const float *b, size_t n)
{
    float y;
    struct k3_mul_part p = {&y, 1, NULL, b, n, n, 0, n, NULL};
    tile(&p, (const char *)a, 0, 1, 1, K3_F32, 0, 0);
    return y;
}

/* Rule (c).  The sixteen weights of a group's scale (k3_mxfp4_tables) are looked up by nibble;
 * vpermps uses the low four bits of each index alone.  x comes split (kernels.h).  Loading the
 * table takes no vector unit, where multiplying one by the scale did: eight rows of x, 85% of the
 * peak instead of 72%. */
#define MAX_X4 4
typedef __m512 mxfp4_chains[MAX_X]; /* as store_sums takes them */

/* One group of one row of W against nx rows of x. */
INLINE void group(mxfp4_chains acc, const uint8_t *packed, uint8_t scale, const float *x, size_t ldx, const size_t nx)
{
    __m512 table = _mm512_load_ps(k3_mxfp4_tables[scale]);
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)packed));
    __m512 even = _mm512_permutexvar_ps(code, table);
    __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), table);
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
        acc[r] = _mm512_fmadd_ps(even, _mm512_loadu_ps(x + r * ldx), acc[r]);
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
        acc[r] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(x + r * ldx + LANES), acc[r]);
}

INLINE void clear(mxfp4_chains acc, const size_t nx)
{
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
        acc[r] = _mm512_setzero_ps();
}

#define MXFP4_STREAMS(nx) STREAMS
#include "k3-computed/kernels_mxfp4.h"

void k3_avx512_mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                         size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    k3_mul_walk_mxfp4(strips_mxfp4, MAX_X4, y, ldy, packed, scale, n_out, n_cols, x, ldx, n_rows);
}
