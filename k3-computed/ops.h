/* k3-computed/ops.h: the operators of spec/model.md 4 for one row or one head, on top of the
 * kernels.  Every order of operations is written here, once, since the numeric contract (design.md
 * section 5) makes it part of the meaning.  No allocation.  Vectors are fp32. */
#ifndef K3_COMPUTED_OPS_H
#define K3_COMPUTED_OPS_H

#include <stdint.h>

#include "k3-computed/kernels.h"

/* 4.2: r = 1/sqrt(dot(x,x)/n + eps); y[i] = (x[i] * r) * w[i].  y may be x. */
void k3_rmsnorm(const struct k3_kernels *k, float *y, const float *x, const float *w, size_t n,
                float eps);
/* 4.4 step 3 and 6: r = 1/sqrt(dot(x,x) + 1e-6); y = (x * r) [* scale when scale != 1].
 * y may be x. */
void k3_l2norm(const struct k3_kernels *k, float *y, const float *x, size_t n, float scale);
/* 4.4 step 2 for n channels and one position: acc = fma chain over taps ascending from +0;
 * y = silu(acc).  w: [n][taps]; hist: [taps-1][n], oldest first; u: the current projection.
 * Afterwards hist is shifted and ends with u.  y may be u. */
void k3_shortconv(const struct k3_kernels *k, float *y, const float *u, float *hist, const float *w,
                  size_t n, size_t taps);
/* 4.4 step 5 for one head of dim d: g = bound * sigmoid(ea * (z + bias)), alpha = k3_exp(g).
 * ea = k3_expf(A_log[head]).  alpha may be z. */
void k3_kda_decay(const struct k3_kernels *k, float *alpha, const float *z, const float *bias,
                  float ea, float bound, size_t d);
/* 4.4 step 8 for one head: y = rmsnorm(o; w, eps) * sigmoid(gate).  y may be o or gate. */
void k3_kda_gate(const struct k3_kernels *k, float *y, const float *o, const float *w,
                 const float *gate, size_t d, float eps);
/* 4.6: mixes n sources of width h.  x[s] points to source s; f[i] = norm weight * proj weight
 * (folded once).  r_s = 1/sqrt(dot(x_s,x_s)/h + eps); score_s = r_s * dot(x_s, f);
 * e_s = k3_exp(score_s - max); a_s = e_s / (sum of e, ascending); y = chain fma(a_s, x_s) from +0.
 * y is none of the sources (spec/model.md 4.6, point 6).  At least one source, at most
 * K3_MAX_LAYERS + 1.  weights (may be NULL) receives a. */
void k3_attnres(const struct k3_kernels *k, float *y, const float *const *x, size_t n,
                const float *f, size_t h, float eps, float *weights);
/* 4.7 steps 1-3 from the logits: s = sigmoid; choice by s + bias descending, ties to the lower id;
 * ids come out ascending with weights s / (sum ascending + 1e-20) * scale (renormalize) or
 * s * scale.  A choice that is NaN counts as -inf (chosen only when the others run out, and then its
 * weight is NaN).  top_k <= n.  scratch: n floats. */
void k3_route(const struct k3_kernels *k, uint16_t *ids, float *weights, const float *logits,
              const float *bias, size_t n, size_t top_k, int renormalize, float scale,
              float *scratch);
/* The first half of it: the top_k ids by choice, best first. */
void k3_choose(const struct k3_kernels *k, uint16_t *ids, const float *logits, const float *bias, size_t n,
               size_t top_k, float *scratch);
/* Rule (e), n_q queries (heads, or rows of one sequence) over the same cache, each over the positions 0..n_seen[i]-1 that it
 * sees.  q: [n_q][lat + rope], the absorbed part, then the shared part; out: [n_q][lat]; kv rows of lat + rope floats, ld floats
 * apart.  score_s = dot(q, kv_s) * scale over lat + rope; m = max; p_s = k3_exp(score_s - m); per block of 64 absolute
 * positions from +0: bp += p_s, bl = chain fma(p_s, kv_s[0..lat)); block sums added in ascending order from +0; out[m] = sum /
 * total.  n_seen >= 1, n_q at most K3_ATTEND_QUERIES; out is not q.  scratch: k3_attend_scratch(n_q, greatest n_seen, lat)
 * floats.  The queries do not see one another: company leaves no trace. */
#define K3_ATTEND_QUERIES 8
void k3_attend(const struct k3_kernels *k, float *out, const float *q, size_t n_q, const float *kv, size_t ld,
               const size_t *n_seen, size_t lat, size_t rope, float scale, float *scratch);
size_t k3_attend_scratch(size_t n_q, size_t n, size_t lat);
/* Exact widening of n elements of a plain dtype to fp32. */
void k3_widen(float *y, const void *x, enum k3_dtype dtype, size_t n);

#endif
