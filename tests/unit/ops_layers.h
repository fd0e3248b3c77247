/* tests/unit/ops_layers.h: whole layers composed from the kernels and operators, in fp32, with
 * plain weights: for the fixtures of ../shared/data/ops.  The pass of the program
 * (k3-computed/pass.h) is not involved. */
#ifndef K3_TESTS_OPS_LAYERS_H
#define K3_TESTS_OPS_LAYERS_H

#include "k3-computed/ops.h"

/* All weights row-major fp32; shapes as in spec/model.md 3.2. */
struct k3_test_kda {
    size_t hidden, heads, dim, taps;
    float bound, eps;
    const float *q, *k, *v, *f_a, *f_b, *b, *g, *o, *q_conv, *k_conv, *v_conv, *a_log, *dt_bias,
        *o_norm;
};
struct k3_test_mla {
    size_t hidden, heads, q_lora, kv_lora, nope, rope, v_dim;
    float eps;
    const float *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b, *g, *o;
};
struct k3_test_moe {
    size_t hidden, latent, inter, shared_inter, n_experts, top_k;
    float eps, beta, lin;
    const float *gate, *bias, *down, *up, *norm, *w1[16], *w3[16], *w2[16], *shared_w1, *shared_w3,
        *shared_w2;
};

/* x, y: [n][hidden].  S: [heads][dim][dim], hist: three times [taps-1][heads*dim], both carried on.
 */
void k3_test_kda_layer(const struct k3_kernels *k, const struct k3_test_kda *w, float *y,
                       const float *x, size_t n, float *S, float *hist);
/* cache: [n][kv_lora + rope], filled here from position 0 on. */
void k3_test_mla_layer(const struct k3_kernels *k, const struct k3_test_mla *w, float *y,
                       const float *x, size_t n, float *cache);
void k3_test_moe_layer(const struct k3_kernels *k, const struct k3_test_moe *w, float *y,
                       const float *x, size_t n);

#endif
