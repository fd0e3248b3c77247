/* k3-computed/kernels_mul.c: the order in which the vector sets walk over a product, so that each
 * weight comes from memory once and x from the first-level cache.
 *
 *   chunk   rows of W that stay in the second-level cache while all rows of x pass by
 *   panel   rows of x of one tile
 *   block   columns; the panel's x of one block stays in the first-level cache while the chunk
 *           passes by, and the chains rest in memory between two blocks; the chunk's last tile fetches
 *           the x of the next block as it uses its own for the last time */
#include "k3-computed/kernels_impl.h"

#define CHUNK_BYTES ((size_t)512 << 10)
#define CHUNK_ROWS 64
#define X_BYTES ((size_t)6 << 20)
#define X_ROWS 126
#define BLOCK 896 /* a multiple of 32; not a power of two, since rows of x lie whole pages apart */

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

uint32_t k3_mul_x_rows(size_t n_cols)
{
    size_t n = n_cols ? X_BYTES / (n_cols * sizeof(float)) / K3_MUL_MAX_X * K3_MUL_MAX_X : X_ROWS;
    return (uint32_t)(n < K3_MUL_MAX_X ? K3_MUL_MAX_X : least(n, X_ROWS));
}

void k3_mul_walk(const struct k3_mul_strips *s, float *y, size_t ldy, const char *w, size_t n_out,
                 size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    _Alignas(64) float rest[CHUNK_ROWS * K3_MUL_MAX_X * 16];
    size_t nx = k3_mul_panel(n_rows, s->max_x), row_bytes = n_cols * s->size;
    size_t chunk = chunk_rows(row_bytes, CHUNK_ROWS), block = n_cols < 2 * BLOCK ? n_cols : BLOCK;

    if (n_rows && n_rows <= s->stream_x) {
        struct k3_mul_part p = {y, ldy, NULL, x, ldx, n_cols, 0, n_cols, NULL};
        s->stream(&p, w, n_out, n_rows);
        return;
    }
    for (size_t o = 0; o < n_out; o += chunk) {
        for (size_t r = 0; r < n_rows; r += nx) {
            struct k3_mul_part p = {y + r * ldy + o, ldy, rest, x + r * ldx, ldx, n_cols, 0, 0, NULL};
            const float *next_panel = r + nx < n_rows ? p.x + nx * ldx : x;
            do { /* once for n_cols 0, too: y is +0 then */
                p.end = p.begin + least(n_cols - p.begin, block);
                p.next_x = p.end < n_cols ? p.x + p.end : next_panel;
                (r ? s->again : s->first)(&p, w + o * row_bytes, least(n_out - o, chunk), least(n_rows - r, nx));
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
