/* tests/unit/ops_layers.c: see ops_layers.h; the steps are numbered as in spec/model.md 4.4, 4.5
 * and 4.7. */
#include "tests/unit/ops_layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Zeroed floats from one malloc; a test program just dies without memory. */
static float *floats(size_t n)
{
    float *x = calloc(n, sizeof *x);
    if (!x)
        abort();
    return x;
}

/* y[n][n_out] = x[n][n_in] W^T */
static void linear(const struct k3_kernels *k, float *y, const float *w, size_t n_out, size_t n_in,
                   const float *x, size_t n)
{
    k->mul[K3_F32](y, n_out, w, n_out, n_in, x, n_in, n);
}

void k3_test_kda_layer(const struct k3_kernels *k, const struct k3_test_kda *w, float *y,
                       const float *x, size_t n, float *S, float *hist)
{
    size_t width = w->heads * w->dim, hist_size = (w->taps - 1) * width, d = w->dim;
    float *buf = floats(n * (5 * width + d + w->heads) + 2 * width + d),
          *scratch = buf + n * (5 * width + d + w->heads);
    float *qkv[3] = {buf, buf + n * width, buf + 2 * n * width}, *z = buf + 3 * n * width,
          *gate = z + n * width;
    float *low = gate + n * width, *beta = low + n * d, *alpha = scratch + d, *out = alpha + width;
    const float *proj[3] = {w->q, w->k, w->v}, *conv[3] = {w->q_conv, w->k_conv, w->v_conv};
    for (size_t i = 0; i < 3; i++) {
        linear(k, qkv[i], proj[i], width, w->hidden, x, n); /* 1 */
        for (size_t t = 0; t < n; t++) { /* 2 */
            float *u = qkv[i] + t * width;
            k3_shortconv(k, u, u, hist + i * hist_size, conv[i], width, w->taps);
        }
    }
    linear(k, beta, w->b, w->heads, w->hidden, x, n);
    k->sigmoid(beta, beta, n * w->heads); /* 4 */
    linear(k, low, w->f_a, d, w->hidden, x, n);
    linear(k, z, w->f_b, width, d, low, n);
    linear(k, gate, w->g, width, w->hidden, x, n);
    for (size_t t = 0; t < n; t++) {
        for (size_t h = 0; h < w->heads; h++) {
            size_t at = t * width + h * d;
            float *q = qkv[0] + at, *key = qkv[1] + at;
            k3_l2norm(k, q, q, d, 1.0f / sqrtf((float)d)); /* 3, 6 */
            k3_l2norm(k, key, key, d, 1.0f);
            k3_kda_decay(k, alpha + h * d, z + at, w->dt_bias + h * d, k3_expf(w->a_log[h]),
                         w->bound, d); /* 5 */
            k->kda_step(S + h * d * d, out + h * d, q, key, qkv[2] + at, alpha + h * d,
                        beta[t * w->heads + h], d, d, scratch); /* 7 */
            k3_kda_gate(k, out + h * d, out + h * d, w->o_norm, gate + at, d, w->eps); /* 8 */
        }
        linear(k, y + t * w->hidden, w->o, w->hidden, width, out, 1); /* 9 */
    }
    free(buf);
}

void k3_test_mla_layer(const struct k3_kernels *k, const struct k3_test_mla *w, float *y,
                       const float *x, size_t n, float *cache)
{
    size_t row = w->kv_lora + w->rope, q_width = w->nope + w->rope, o_width = w->heads * w->v_dim;
    float *buf = floats(n * (w->q_lora + w->heads * q_width + o_width) + o_width + 2 * row +
                        k3_attend_scratch(1, n, w->kv_lora));
    float *a = buf, *q = a + n * w->q_lora, *gate = q + n * w->heads * q_width,
          *o = gate + n * o_width;
    float *absorbed = o + o_width, *lat = absorbed + row, *scratch = lat + row;
    float scale = 1.0f / sqrtf((float)q_width);
    linear(k, a, w->q_a, w->q_lora, w->hidden, x, n); /* 1 */
    for (size_t t = 0; t < n; t++)
        k3_rmsnorm(k, a + t * w->q_lora, a + t * w->q_lora, w->q_a_norm, w->q_lora, w->eps);
    linear(k, q, w->q_b, w->heads * q_width, w->q_lora, a, n);
    linear(k, cache, w->kv_a, row, w->hidden, x, n); /* 2 */
    for (size_t t = 0; t < n; t++)
        k3_rmsnorm(k, cache + t * row, cache + t * row, w->kv_a_norm, w->kv_lora, w->eps);
    linear(k, gate, w->g, o_width, w->hidden, x, n);
    k->sigmoid(gate, gate, n * o_width);
    for (size_t t = 0; t < n; t++) {
        for (size_t h = 0; h < w->heads; h++) { /* 3 to 5, absorbed */
            const float *qh = q + (t * w->heads + h) * q_width;
            const float *wk = w->kv_b + h * (w->nope + w->v_dim) * w->kv_lora,
                        *wv = wk + w->nope * w->kv_lora;
            memset(absorbed, 0, w->kv_lora * sizeof *absorbed);
            k->mul_t[K3_F32](absorbed, qh, wk, w->kv_lora, w->nope, w->kv_lora);
            memcpy(absorbed + w->kv_lora, qh + w->nope, w->rope * sizeof *absorbed);
            k3_attend(k, lat, absorbed, 1, cache, row, (size_t[]){ t + 1 }, w->kv_lora, w->rope, scale, scratch);
            linear(k, o + h * w->v_dim, wv, w->v_dim, w->kv_lora, lat, 1);
        }
        k->mul_vec(o, o, gate + t * o_width, o_width); /* 6 */
        linear(k, y + t * w->hidden, w->o, w->hidden, o_width, o, 1);
    }
    free(buf);
}

static void mlp(const struct k3_kernels *k, const struct k3_test_moe *w, float *y, const float *w1,
                const float *w3, const float *w2, size_t n_in, size_t inter, const float *x,
                float *scratch)
{
    float *g = scratch, *u = scratch + inter;
    linear(k, g, w1, inter, n_in, x, 1);
    linear(k, u, w3, inter, n_in, x, 1);
    k->situ(g, g, u, inter, w->beta, w->lin);
    linear(k, y, w2, n_in, inter, g, 1);
}

void k3_test_moe_layer(const struct k3_kernels *k, const struct k3_test_moe *w, float *y,
                       const float *x, size_t n)
{
    size_t inter = w->inter > w->shared_inter ? w->inter : w->shared_inter;
    float *buf = floats(2 * w->n_experts + 3 * w->latent + w->hidden + 2 * inter), *logits = buf,
          *s = logits + w->n_experts;
    float *z = s + w->n_experts, *d = z + w->latent, *acc = d + w->latent,
          *shared = acc + w->latent;
    float *scratch = shared + w->hidden, weights[16];
    uint16_t ids[16];
    for (size_t t = 0; t < n; t++) {
        const float *xt = x + t * w->hidden;
        float *yt = y + t * w->hidden;
        linear(k, logits, w->gate, w->n_experts, w->hidden, xt, 1); /* 1 to 3 */
        k3_route(k, ids, weights, logits, w->bias, w->n_experts, w->top_k, 1, 1.0f, s);
        linear(k, z, w->down, w->latent, w->hidden, xt, 1); /* 4 */
        memset(acc, 0, w->latent * sizeof *acc);
        for (size_t i = 0; i < w->top_k; i++) { /* 5, 6 */
            mlp(k, w, d, w->w1[ids[i]], w->w3[ids[i]], w->w2[ids[i]], w->latent, w->inter, z,
                scratch);
            k->axpy(acc, weights[i], d, w->latent);
        }
        k3_rmsnorm(k, acc, acc, w->norm, w->latent, w->eps);
        linear(k, yt, w->up, w->hidden, w->latent, acc, 1);
        mlp(k, w, shared, w->shared_w1, w->shared_w3, w->shared_w2, w->hidden, w->shared_inter, xt,
            scratch); /* 7 */
        k->add(yt, yt, shared, w->hidden); /* 8 */
    }
    free(buf);
}
