/* k3-computed/kernels_mul_avx2.c: the products W x of rules (b) and (c) with two ymm registers of
 * eight lanes per dot product.  A tile of NO rows of W and NX rows of x is swept twice, a half of
 * the lanes each time: so there are registers for all its chains, each weight is widened once per
 * tile, and each x loaded once.  NO and NX are compile-time constants.  kernels_mul.c walks. */
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
#define MAX_X 4
#define TILE_ROWS(nx) ((nx) < 3 ? 4 : 3) /* of W: its chains, weights and one vector of x take 16 registers at most */
#define RUN 256 /* columns of a stream at a time */

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

/* One half of the lanes, over n columns, a multiple of 16: `no` rows of W, row_bytes from one another, against nx rows of x.
 * ahead: how far ahead of their use weights are fetched, 0 not at all. */
INLINE void sweep(__m256 chain[MAX_O][MAX_X], const char *w, size_t row_bytes, const float *x, size_t ldx, size_t n,
                  size_t ahead, const size_t no, const size_t nx, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2;
    __m256 acc[MAX_O][MAX_X], wo[MAX_O];
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            acc[o][r] = chain[o][r];
    for (size_t i = 0; i < n; i += LANES) {
        if (ahead && i * size % 64 == 0)
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++)
                _mm_prefetch(w + o * row_bytes + i * size + ahead, _MM_HINT_T0);
#pragma GCC unroll 8
        for (size_t o = 0; o < no; o++)
            wo[o] = widen8(w + o * row_bytes + i * size, dtype);
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++) {
            __m256 xr = _mm256_loadu_ps(x + r * ldx + i);
#pragma GCC unroll 8
            for (size_t o = 0; o < no; o++)
                acc[o][r] = _mm256_fmadd_ps(wo[o], xr, acc[o][r]);
        }
    }
#pragma GCC unroll 8
    for (size_t o = 0; o < no; o++)
#pragma GCC unroll 8
        for (size_t r = 0; r < nx; r++)
            chain[o][r] = acc[o][r];
}

/* Rows o, o + apart, .. of the chunk at w, over the columns of the part, `run` of them at a time. */
INLINE void tile(const struct k3_mul_part *p, const char *w, size_t o, size_t apart, size_t run, size_t ahead,
                 const size_t no, const size_t nx, const enum k3_dtype dtype)
{
    const size_t size = dtype == K3_F32 ? 4 : 2, row_bytes = p->n_cols * size;
    size_t full = p->end / LANES * LANES;
    __m256 half[2][MAX_O][MAX_X];
    w += o * row_bytes;
    for (size_t n = 0; n < no; n++)
        for (size_t r = 0; r < nx; r++)
            for (size_t h = 0; h < 2; h++)
                half[h][n][r] = p->begin ? _mm256_load_ps(p->rest + ((o + n) * nx + r) * LANES + h * 8) : _mm256_setzero_ps();
    for (size_t i = p->begin; i < full; i += run) {
        size_t n = full - i < run ? full - i : run;
        sweep(half[0], w + i * size, apart * row_bytes, p->x + i, p->ldx, n, ahead, no, nx, dtype);
        sweep(half[1], w + (i + 8) * size, apart * row_bytes, p->x + i + 8, p->ldx, n, 0, no, nx, dtype);
    }
    for (size_t n = 0; n < no; n++)
        for (size_t r = 0; r < nx; r++) {
            __m256 acc[2] = {half[0][n][r], half[1][n][r]};
            if (full < p->end)
                tail_lanes(acc, w + n * apart * row_bytes + full * size, p->x + r * p->ldx + full, p->end - full, dtype);
            if (p->end == p->n_cols)
                p->y[r * p->ldy + o + n * apart] = tree(acc[0], acc[1]);
            else
                for (size_t h = 0; h < 2; h++)
                    _mm256_store_ps(p->rest + ((o + n) * nx + r) * LANES + h * 8, acc[h]);
        }
}

/* n_out rows of W at w against nx rows of x.  W may lie in memory: the next tile's weights are fetched. */
INLINE void strip(const struct k3_mul_part *p, const char *w, size_t n_out, const size_t nx,
                  const enum k3_dtype dtype, const int in_memory)
{
    const size_t no = TILE_ROWS(nx), ahead = in_memory ? no * p->n_cols * (dtype == K3_F32 ? 4 : 2) : 0;
    size_t o = 0;
    for (; o + no <= n_out; o += no)
        tile(p, w, o, 1, p->n_cols, ahead, no, nx, dtype);
    for (; o < n_out; o++)
        tile(p, w, o, 1, p->n_cols, 0, 1, nx, dtype);
}

/* The same over all columns at once.  A tile's rows are far apart: with tile after tile each of them is one stream through
 * memory, which is read fastest so. */
INLINE void strip_streams(const struct k3_mul_part *p, const char *w, size_t n_out, const size_t nx,
                          const enum k3_dtype dtype)
{
    const size_t streams = nx < 4 ? 4 : 3;
    size_t apart = n_out / streams;
    for (size_t o = 0; o < apart; o++)
        tile(p, w, o, apart, RUN, K3_MUL_AHEAD, streams, nx, dtype);
    for (size_t o = apart * streams; o < n_out; o++)
        tile(p, w, o, 1, RUN, K3_MUL_AHEAD, 1, nx, dtype);
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
        default: strip(p, w, n_out, 4, dtype, ahead); break;                                       \
        }                                                                                          \
    }
STRIPS(first_strips_f32, K3_F32, 1)
STRIPS(strips_f32, K3_F32, 0)
STRIPS(first_strips_f16, K3_F16, 1)
STRIPS(strips_f16, K3_F16, 0)
STRIPS(first_strips_bf16, K3_BF16, 1)
STRIPS(strips_bf16, K3_BF16, 0)

K3_DEFINE_MUL(avx2, f32, 4, MAX_X)
K3_DEFINE_MUL(avx2, f16, 2, MAX_X)
K3_DEFINE_MUL(avx2, bf16, 2, MAX_X)

float k3_avx2_dot(const float *a, const float *b, size_t n)
{
    float y;
    struct k3_mul_part p = {&y, 1, NULL, b, n, n, 0, n, NULL};
    tile(&p, (const char *)a, 0, 1, n, 0, 1, 1, K3_F32);
    return y;
}

/* Rule (c).  All weights are exact in bf16, so a group is two byte look-ups by nibble, in the tables
 * of its scale (k3_mxfp4_byte_tables): low bytes, high bytes.  The packed bytes are spread so that
 * the weights come out in order when bytes and zeros are put next to each other; that keeps most of
 * the work off the two units that can shuffle or shift.  x comes split (kernels.h). */
#define MAX_X4 4
typedef __m256 mxfp4_chains[MAX_X4][2];

/* even[h], odd[h]: lanes 8h to 8h+7 of columns 2j and 2j+1. */
INLINE void weights(__m256 even[2], __m256 odd[2], const uint8_t *packed, uint8_t scale)
{
    const __m256i spread =
        _mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14,
                         15, 4, 5, 6, 7, 12, 13, 14, 15);
    const __m256i nibble = _mm256_setr_epi64x(0, 4, 0, 4), zero = _mm256_setzero_si256();
    const uint8_t *tables = k3_mxfp4_byte_tables[scale];
    __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)tables));
    __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(tables + 16)));
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)packed));
    __m256i codes = _mm256_and_si256(
        _mm256_srlv_epi64(_mm256_shuffle_epi8(bytes, spread), nibble), _mm256_set1_epi8(15));
    low = _mm256_shuffle_epi8(low, codes);
    high = _mm256_shuffle_epi8(high, codes);
    __m256i e = _mm256_unpacklo_epi8(low, high), o = _mm256_unpackhi_epi8(low, high);
    even[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, e));
    even[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, e));
    odd[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, o));
    odd[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, o));
}

/* One group of one row of W against nx rows of x. */
INLINE void group(mxfp4_chains acc, const uint8_t *packed, uint8_t scale, const float *x, size_t ldx, const size_t nx)
{
    __m256 even[2], odd[2];
    weights(even, odd, packed, scale);
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
#pragma GCC unroll 2
        for (size_t h = 0; h < 2; h++) {
            const float *xr = x + r * ldx + h * 8;
            acc[r][h] = _mm256_fmadd_ps(even[h], _mm256_loadu_ps(xr), acc[r][h]);
            acc[r][h] = _mm256_fmadd_ps(odd[h], _mm256_loadu_ps(xr + LANES), acc[r][h]);
        }
}

INLINE void clear(mxfp4_chains acc, const size_t nx)
{
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
}

INLINE void store_sums(float *y, size_t ldy, size_t apart, mxfp4_chains acc[MAX_O], const size_t no, const size_t nx)
{
#pragma GCC unroll 8
    for (size_t r = 0; r < nx; r++)
#pragma GCC unroll 8
        for (size_t n = 0; n < no; n++)
            y[r * ldy + n * apart] = tree(acc[n][r][0], acc[n][r][1]);
}

#define MXFP4_STREAMS(nx) ((nx) == 1 ? 3 : (nx) == 2 ? 2 : 1)
#include "k3-computed/kernels_mxfp4.h"

void k3_avx2_mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                       size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    k3_mul_walk_mxfp4(strips_mxfp4, MAX_X4, y, ldy, packed, scale, n_out, n_cols, x, ldx, n_rows);
}
