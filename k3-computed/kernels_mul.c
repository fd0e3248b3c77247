/* k3-computed/kernels_mul.c: the order in which the vector sets walk over a product, so that each
 * weight comes from memory once and x from the first-level cache.
 *
 *   block   columns: a panel's x of one block stays in the first-level cache while a chunk passes by
 *   chunk   rows of W: one block of it stays in the second-level cache while a group passes by
 *   panel   rows of x of one tile; the last tile of a chunk fetches the x of the next panel as it
 *           uses its own for the last time
 *   group   panels: their chains rest in the second-level cache between two blocks */
#include "k3-computed/kernels_impl.h"

#define CHUNK_BYTES ((size_t)512 << 10)
#define GROUP_PANELS 8
#define X_BYTES ((size_t)6 << 20)
#define X_ROWS 126
#define BLOCK 896 /* a multiple of 32; not a power of two, since rows of x lie whole pages apart */

/* How many of the n that are left the next panel (or group) takes when one holds at most `most`: they differ by one. */
static size_t share(size_t n, size_t most)
{
    size_t n_shares = (n + most - 1) / most;
    return n_shares ? (n + n_shares - 1) / n_shares : most;
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

/* A chunk of n_out rows against a group of n_rows, in panels. */
static void walk_group(const struct k3_mul_strips *s, float *y, size_t ldy, const char *w, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows)
{
    _Alignas(64) float rest[GROUP_PANELS * K3_MUL_CHUNK_ROWS * K3_MUL_MAX_X * 16];
    size_t begin = 0, end, block = n_cols < 2 * BLOCK ? n_cols : BLOCK;
    do { /* once for n_cols 0, too: y is +0 then */
        end = begin + least(n_cols - begin, block);
        for (size_t r = 0, nx; r < n_rows; r += nx) {
            nx = share(n_rows - r, s->max_x);
            struct k3_mul_part p = {y + r * ldy, ldy, rest + r * K3_MUL_CHUNK_ROWS * 16, x + r * ldx, ldx, n_cols, begin, end, NULL};
            p.next_x = r + nx < n_rows ? p.x + nx * ldx + begin : x + (end < n_cols ? end : 0);
            (r ? s->again : s->first)(&p, w, n_out, nx);
        }
        begin = end;
    } while (end < n_cols);
}

void k3_mul_walk(const struct k3_mul_strips *s, float *y, size_t ldy, const char *w, size_t n_out,
                 size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    size_t group = s->max_x * share((n_rows + s->max_x - 1) / s->max_x, GROUP_PANELS);

    if (n_rows && n_rows < K3_MUL_BATCH_ROWS) {
        struct k3_mul_part p = {y, ldy, NULL, x, ldx, n_cols, 0, n_cols, NULL};
        s->stream(&p, w, n_out, n_rows);
        return;
    }
    for (size_t o = 0, chunk; o < n_out; o += chunk) {
        chunk = least(n_out - o, (share(n_out - o, K3_MUL_CHUNK_ROWS) + 3) / 4 * 4); /* whole tiles */
        for (size_t r = 0; r < n_rows; r += group)
            walk_group(s, y + r * ldy + o, ldy, w + o * n_cols * s->size, chunk, n_cols, x + r * ldx, ldx,
                       least(n_rows - r, group));
    }
}

void k3_mul_walk_mxfp4(k3_mxfp4_strips_fn *strips, size_t max_x, float *y, size_t ldy,
                       const uint8_t *packed, const uint8_t *scale, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows)
{
    size_t n_groups = n_cols / 32;
    size_t chunk = n_cols ? CHUNK_BYTES / (n_cols / 2) / 8 * 8 : n_out;
    if (chunk < 8)
        chunk = 8;
    for (size_t o = 0; o < n_out; o += chunk)
        for (size_t r = 0, nx; r < n_rows; r += nx) {
            nx = share(n_rows - r, max_x);
            strips(y + r * ldy + o, ldy, packed + o * (n_cols / 2), scale + o * n_groups,
                   least(n_out - o, chunk), n_groups, x + r * ldx, ldx, nx);
        }
}
