/* k3-computed/kernels_impl.h: private to the kernel files: the parts of the vector sets that live
 * in files of their own. */
#ifndef K3_COMPUTED_KERNELS_IMPL_H
#define K3_COMPUTED_KERNELS_IMPL_H

#include "k3-computed/kernels.h"

extern const struct k3_kernels k3_kernels_avx2, k3_kernels_avx512;

/* Rule (c): the weights of the sixteen codes for each scale.  As fp32, and as bf16, which holds them
 * exactly, too (two significant bits, not below 2^-128), cut into bytes: sixteen low ones, then
 * sixteen high ones.  Filled by k3_kernels_get(). */
extern float k3_mxfp4_tables[256][16];
extern uint8_t k3_mxfp4_byte_tables[256][32];

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

#define K3_MUL_MAX_X 6 /* the widest panel of any set */
#define K3_MUL_AHEAD 1024 /* bytes of a stream of weights that are fetched before their use */

/* A panel of x against a chunk of W, for the columns [begin, end). */
struct k3_mul_part {
    float *y; /* of the chunk's first row of W and the panel's first row of x */
    size_t ldy;
    float *rest; /* chains between two blocks: [row of W][row of x][lane], aligned to 64 */
    const float *x;
    size_t ldx, n_cols, begin, end; /* begin is a multiple of 32; at 0 the chains begin from +0, at
                                       end == n_cols they become y */
    const float *next_x; /* of the panel after this one in the walk, ldx floats apart, too */
};
/* All n_out rows of W of the chunk at w against nx rows of x. */
typedef void k3_mul_strips_fn(const struct k3_mul_part *p, const char *w, size_t n_out, size_t nx);
struct k3_mul_strips {
    k3_mul_strips_fn *stream;        /* fewer than K3_MUL_BATCH_ROWS rows of x: all columns at once */
    k3_mul_strips_fn *first, *again; /* more: for W that may lie in memory; that is in the cache */
    size_t max_x, size;              /* rows of x of a panel at most; bytes of a weight */
};
typedef void k3_mxfp4_strips_fn(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                                size_t n_out, size_t n_groups, const float *x, size_t ldx,
                                size_t nx);

/* kernels_mul.c */
void k3_mul_walk(const struct k3_mul_strips *s, float *y, size_t ldy, const char *w, size_t n_out,
                 size_t n_cols, const float *x, size_t ldx, size_t n_rows);
void k3_mul_walk_mxfp4(k3_mxfp4_strips_fn *strips, size_t max_x, float *y, size_t ldy,
                       const uint8_t *packed, const uint8_t *scale, size_t n_out, size_t n_cols,
                       const float *x, size_t ldx, size_t n_rows);
/* The product of a dtype from its strips, stream_NAME, first_strips_NAME and strips_NAME. */
#define K3_DEFINE_MUL(set, name, size, max_x)                                                      \
    void k3_##set##_mul_##name(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,   \
                               const float *x, size_t ldx, size_t n_rows)                          \
    {                                                                                              \
        static const struct k3_mul_strips s = {stream_##name, first_strips_##name, strips_##name,  \
                                               max_x, size};                                       \
        k3_mul_walk(&s, y, ldy, w, n_out, n_cols, x, ldx, n_rows);                                 \
    }

#endif
