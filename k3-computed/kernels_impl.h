/* k3-computed/kernels_impl.h: private to the kernel files: the parts of the vector sets that live
 * in files of their own. */
#ifndef K3_COMPUTED_KERNELS_IMPL_H
#define K3_COMPUTED_KERNELS_IMPL_H

#include "k3-computed/kernels.h"

extern const struct k3_kernels k3_kernels_avx2, k3_kernels_avx512;

#define K3_DECLARE_MUL(set)                                                                        \
    void k3_##set##_mul_f32(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,      \
                            const float *x, size_t ldx, size_t n_rows);                            \
    void k3_##set##_mul_f16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,      \
                            const float *x, size_t ldx, size_t n_rows);                            \
    void k3_##set##_mul_bf16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,     \
                             const float *x, size_t ldx, size_t n_rows);                           \
    void k3_##set##_mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,   \
                              size_t n_out, size_t n_cols, const float *x, size_t ldx,             \
                              size_t n_rows);                                                      \
    float k3_##set##_dot(const float *a, const float *b, size_t n);
K3_DECLARE_MUL(avx2)
K3_DECLARE_MUL(avx512)
#undef K3_DECLARE_MUL

/* How many of n items the next block takes when a block holds at most `most`: the blocks differ by
 * at most one. */
static inline size_t k3_block_share(size_t n, size_t most)
{
    size_t n_blocks = (n + most - 1) / most;
    return n_blocks ? (n + n_blocks - 1) / n_blocks : most;
}

/* W rows that stay in the second-level cache while the blocks of x rows pass over them, a multiple
 * of `step`. */
static inline size_t k3_rows_in_cache(size_t row_bytes, size_t step)
{
    size_t n = row_bytes ? (size_t)256 * 1024 / row_bytes / step * step : step;
    return n < step ? step : n;
}

#endif
