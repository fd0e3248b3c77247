/* k3-computed/kernels.h: the arithmetic primitives, three times: plain C (kernels_c.c, reads like
 * the formula), AVX2 (kernels_avx2.c) and AVX-512 (kernels_avx512.c).  Bit-equal to each other on
 * every input: the numeric contract of design.md section 5, whose letters are quoted here.  Not
 * allowed inside: libm, reciprocal estimates, reduce intrinsics, FTZ/DAZ, contraction by the
 * compiler (-ffp-contract=off; fma only where written).
 *
 * Weight pointers need no alignment at all.  All sizes may be any number including 0 and odd ones.
 * y aliases nothing where nothing is said.
 *
 * Inf and NaN: the sets agree in every result that is not NaN and in which results are NaN; the
 * sign and payload of a NaN may differ, except that exp, sigmoid and tanh give 0x7fc00000 for every
 * NaN. */
#ifndef K3_COMPUTED_KERNELS_H
#define K3_COMPUTED_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "model/index.h"

struct k3_kernels {
    const char *name; /* "c", "avx2", "avx512" */

    /* (b) y[r*ldy + o] = dot(w row o, x row r): 16 lanes, lane i mod 16 from +0 by fma in ascending
     * i, a missing tail element is absent; tree l+8, l+4, l+2, l+1.  w: n_out rows of n_cols
     * elements of the dtype (index: enum k3_dtype; F32, F16, BF16; U8 is NULL), contiguous, widened
     * exactly.  x: n_rows rows, ldx floats apart. */
    void (*mul[K3_N_DTYPES])(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                             const float *x, size_t ldx, size_t n_rows);
    /* (c) MXFP4 (spec/model.md 5): packed n_cols/2 and scale n_cols/32 bytes a row; n_cols a
     * multiple of 32.  Weight = exact fp32 E2M1 * 2^(s-127), -0 for code 8; s = 255 decodes to +0
     * for all codes.  Group of 32: columns 2j in lane j, then columns 2j+1 in lane j.  Tree as (b).
     * x comes split: in each group of 32 the columns 0, 2, .. 30, then 1, 3, .. 31. */
    void (*mul_mxfp4)(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                      size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows);
    /* Splits x for mul_mxfp4: n floats, a multiple of 32; y may be x. */
    void (*split)(float *y, const float *x, size_t n);
    /* (b) on two fp32 vectors. */
    float (*dot)(const float *a, const float *b, size_t n);
    /* (d) y[j] = fma chain over i = 0..n_sum-1, ascending, of a[i] * m[i][j], beginning with the
     * y[j] given.  m: n_sum rows of n_out elements of the dtype, rows ldm elements apart. */
    void (*mul_t[K3_N_DTYPES])(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                               size_t n_out);
    /* The convolution of ops.h: y[c] = fma chain over t = 0..taps-1, ascending, from +0, of
     * w[c*taps+t] * in_t[c], where in_t is row t of hist for t < taps-1 (rows ldh floats apart),
     * and u for the last tap.  y is none of u, hist, w. */
    void (*conv)(float *y, const float *u, const float *hist, size_t ldh, const float *w, size_t n,
                 size_t taps);
    /* y[i] = fma(a, x[i], y[i]) */
    void (*axpy)(float *y, float a, const float *x, size_t n);
    /* y = a + b, y = x * a, y = a * b elementwise; y may be any of the inputs. */
    void (*add)(float *y, const float *a, const float *b, size_t n);
    void (*scale)(float *y, const float *x, float a, size_t n);
    void (*mul_vec)(float *y, const float *a, const float *b, size_t n);
    /* (f) elementwise; y may be x.  Each lane repeats the scalar k3_expf / k3_sigmoidf / k3_tanhf
     * operation by operation. */
    void (*exp)(float *y, const float *x, size_t n);
    void (*sigmoid)(float *y, const float *x, size_t n);
    void (*tanh)(float *y, const float *x, size_t n);
    void (*silu)(float *y, const float *x, size_t n); /* x * sigmoid(x) */
    /* SiTU (spec/model.md 4.8): y = ((beta * tanh(g/beta)) * sigmoid(g)) * (lin * tanh(u/lin)).
     * y may be g or u. */
    void (*situ)(float *y, const float *g, const float *u, size_t n, float beta, float lin);
    /* One step of the KDA recurrence of one head (spec/model.md 4.4 step 7); S is [dk][dv],
     * updated.  o may be v.  scratch: dv floats.
     *   S_ij = alpha_i * S_ij (rounded)
     *   u_j = chain fma(k_i, S_ij) from +0, i ascending
     *   d_j = beta * (v_j - u_j)
     *   S_ij = fma(k_i, d_j, S_ij)
     *   o_j = chain fma(q_i, S_ij) from +0, i ascending */
    void (*kda_step)(float *S, float *o, const float *q, const float *k, const float *v,
                     const float *alpha, float beta, size_t dk, size_t dv, float *scratch);
    /* Exact maximum, -inf for n = 0; NaN elements are skipped; +0 is above -0. */
    float (*max)(const float *x, size_t n);
};

/* The scalar definitions of rule (f); kernels_c.c.  Errors: exp 1, sigmoid 2.5, tanh 2 units in
 * the last place at most, also where the result is subnormal; exp(+inf) = +inf, exp(-inf) = +0. */
float k3_expf(float x);
float k3_sigmoidf(float x);
float k3_tanhf(float x);

#define K3_MUL_BATCH_ROWS 5u   /* of x, from which on W no longer streams by */
#define K3_MUL_CHUNK_ROWS 64u /* of W that are multiplied at a time with that many rows of x; fewer fetch x more often */
/* How many rows of x of n_cols floats to multiply with a matrix at a time, so that they stay in the last-level cache while
 * the matrix passes by. */
uint32_t k3_mul_x_rows(size_t n_cols);

extern const struct k3_kernels k3_kernels_c;
/* NULL when this CPU (cpuid) lacks the instructions. name NULL or "auto": the best there is. */
const struct k3_kernels *k3_kernels_get(const char *name);
/* The same for --kernels NAME; refused with words. */
int k3_kernels_find(const struct k3_kernels **out, const char *name, struct k3_err *err);

#endif
