/* k3-computed/kernels_mxfp4.h: the product of rule (c) of a vector set.  Included once by the file of the set, after
 *
 *   INLINE, MAX_O, MAX_X4          rows of W of a tile, rows of x, at most
 *   MXFP4_STREAMS(nx)              rows of W of a tile against nx rows of x; a constant for each nx
 *   mxfp4_chains                   type: the chains of one row of W, an array by row of x
 *   clear(chains, nx)              sets them to +0
 *   group(chains, packed, scale, x, ldx, nx)          one group of one row of W against nx rows of x
 *   store_sums(y, ldy, apart, chains[], no, nx)       y[r * ldy + i * apart] = the sum of chain r of row i */

#define LINE_GROUPS 4 /* of one line of memory */
#define GROUP_BYTES 16

/* `no` rows, `apart` rows from one another: with tile after tile each is one stream through memory, which is read fastest so. */
INLINE void tile_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale, size_t n_groups, const float *x,
                       size_t ldx, size_t apart, const size_t no, const size_t nx)
{
    size_t g = 0, whole = n_groups / LINE_GROUPS * LINE_GROUPS;
    mxfp4_chains acc[MAX_O];
#pragma GCC unroll 8
    for (size_t n = 0; n < no; n++)
        clear(acc[n], nx);
    for (; g < whole; g += LINE_GROUPS) {
#pragma GCC unroll 8
        for (size_t u = 0; u < LINE_GROUPS; u++)
#pragma GCC unroll 8
            for (size_t n = 0; n < no; n++) {
                size_t at = n * apart * n_groups + g + u;
                if (u == 0)
                    _mm_prefetch(packed + at * GROUP_BYTES + K3_MUL_AHEAD, _MM_HINT_T0);
                if (u == 0 && g % 16 == 0) /* the address of each look-up waits for them */
                    _mm_prefetch(scale + at + K3_MUL_AHEAD / 4, _MM_HINT_T0);
                group(acc[n], packed + at * GROUP_BYTES, scale[at], x + (g + u) * 32, ldx, nx);
            }
    }
    for (; g < n_groups; g++)
#pragma GCC unroll 8
        for (size_t n = 0; n < no; n++) {
            size_t at = n * apart * n_groups + g;
            group(acc[n], packed + at * GROUP_BYTES, scale[at], x + g * 32, ldx, nx);
        }
    store_sums(y, ldy, apart, acc, no, nx);
}

INLINE void strip_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                        size_t n_out, size_t n_groups, const float *x, size_t ldx, const size_t nx)
{
    const size_t streams = MXFP4_STREAMS(nx);
    size_t apart = n_out / streams;
    for (size_t o = 0; o < apart; o++)
        tile_mxfp4(y + o, ldy, packed + o * n_groups * GROUP_BYTES, scale + o * n_groups, n_groups, x, ldx, apart, streams, nx);
    for (size_t o = apart * streams; o < n_out; o++)
        tile_mxfp4(y + o, ldy, packed + o * n_groups * GROUP_BYTES, scale + o * n_groups, n_groups, x, ldx, 0, 1, nx);
}

static void strips_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                         size_t n_out, size_t n_groups, const float *x, size_t ldx, size_t nx)
{
    switch (nx) {
    case 1: strip_mxfp4(y, ldy, packed, scale, n_out, n_groups, x, ldx, 1); break;
    case 2: strip_mxfp4(y, ldy, packed, scale, n_out, n_groups, x, ldx, 2); break;
    case 3: strip_mxfp4(y, ldy, packed, scale, n_out, n_groups, x, ldx, 3); break;
    default: strip_mxfp4(y, ldy, packed, scale, n_out, n_groups, x, ldx, 4); break;
    }
}
