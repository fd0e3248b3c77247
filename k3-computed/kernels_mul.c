/* k3-computed/kernels_mul.c: the order in which the vector sets walk over a product, so that each
 * weight comes from memory once and x from the first-level cache.
 *
 *   chunk   rows of W that stay in the second-level cache while all rows of x pass by
 *   panel   rows of x of one tile
 *   block   columns; the panel's x of one block stays in the first-level cache while the chunk
 *           passes by, and the chains rest in memory between two blocks */
#include "k3-computed/kernels_impl.h"

#define CHUNK_BYTES ((size_t)512 << 10)
#define CHUNK_ROWS 64
#define BLOCK 896     /* a multiple of 32; not a power of two, since rows of x lie whole pages apart */

size_t k3_mul_panel(size_t n, size_t most)
{
    size_t n_panels = (n + most - 1) / most;
    return n_panels ? (n + n_panels - 1) / n_panels : most;
}

static size_t chunk_rows(size_t row_bytes, size_t most)
{
    size_t n = row_bytes ? CHUNK_BYTES / row_bytes / 8 * 8 : most;
    return n < 8 ? 8 : n > most ? most : n;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

void k3_mul_walk(const struct k3_mul_strips *s, float *y, size_t ldy, const char *w, size_t n_out,
                 size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    _Alignas(64) float rest[CHUNK_ROWS * K3_MUL_MAX_X * 16];
    size_t nx = k3_mul_panel(n_rows, s->max_x), row_bytes = n_cols * s->size;
    size_t chunk = chunk_rows(row_bytes, CHUNK_ROWS);
    size_t block = n_cols < 2 * BLOCK ? n_cols : BLOCK;

    if (n_rows && n_rows <= s->stream_x) {
        struct k3_mul_part p = {y, ldy, NULL, x, ldx, n_cols, 0, n_cols};
        s->stream(&p, w, n_out, n_rows);
        return;
    }
    for (size_t o = 0; o < n_out; o += chunk) {
        size_t no = least(n_out - o, chunk);
        for (size_t r = 0; r < n_rows; r += nx) {
            struct k3_mul_part p = {y + r * ldy + o, ldy, rest, x + r * ldx, ldx, n_cols, 0, 0};
            do { /* once for n_cols 0, too: y is +0 then */
                p.end = p.begin + least(n_cols - p.begin, block);
                (r ? s->again : s->first)(&p, w + o * row_bytes, no, least(n_rows - r, nx));
                p.begin = p.end;
            } while (p.end < n_cols);
        }
    }
}

void k3_mul_walk_mxfp4(k3_mxfp4_strips_fn *strips, size_t max_x, float *y, size_t ldy,
                       const uint8_t *packed, const uint8_t *scale, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows)
{
    size_t n_groups = n_cols / 32, nx = k3_mul_panel(n_rows, max_x);
    size_t chunk = chunk_rows(n_cols / 2, SIZE_MAX);
    for (size_t o = 0; o < n_out; o += chunk)
        for (size_t r = 0; r < n_rows; r += nx)
            strips(y + r * ldy + o, ldy, packed + o * (n_cols / 2), scale + o * n_groups,
                   least(n_out - o, chunk), n_groups, x + r * ldx, ldx, least(n_rows - r, nx));
}
