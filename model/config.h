/* model/config.h: what a config.json says, checked.  spec/model.md 1 (nested and flat form). */
#ifndef K3_MODEL_CONFIG_H
#define K3_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_MAX_LAYERS 512

enum k3_layer_kind { K3_KDA = 0, K3_MLA = 1 };

struct k3_config {
    uint32_t hidden;         /* residual width H */
    uint32_t n_layers_model; /* num_hidden_layers of the file */
    uint32_t n_layers;       /* layers that run: n_layers_model, or what --layers N left */
    uint32_t vocab;
    float rms_eps;
    float latent_eps; /* q_a/kv_a layernorm; equal to rms_eps (spec/model.md 9.1) */
    float situ_beta, situ_linear_beta;

    uint32_t kda_heads, kda_dim, conv_taps;
    float gate_lower_bound;

    uint32_t mla_heads, q_lora, kv_lora, qk_nope, qk_rope, v_dim;
    bool mla_gate;

    uint32_t dense_inter; /* layers below first_dense */
    uint32_t first_dense; /* first_k_dense_replace */
    uint32_t n_experts, top_k, n_shared;
    uint32_t moe_inter;    /* routed expert inner width; the shared MLP is n_shared times as wide */
    uint32_t latent;       /* routed_expert_hidden_size */
    bool latent_norm;      /* routed_expert_norm present and used */
    bool renormalize;      /* divide the chosen weights by their sum */
    float routed_scale;
    uint32_t res_block;    /* attn_res_block_size */

    int64_t bos, eos, pad; /* -1 when the file does not say */
    uint8_t kind[K3_MAX_LAYERS]; /* enum k3_layer_kind, 0-based */
};

static inline bool k3_layer_is_dense(const struct k3_config *c, uint32_t layer)
{
    return layer < c->first_dense;
}

/* Reads and checks config.json text.  Every missing or contradictory field is collected and named in one
 * error (exit status 2).  n_layers_limit 0 = all; otherwise the first N run (refused when N > the model's). */
int k3_config_parse(struct k3_config *out, const char *json, size_t len_bytes, uint32_t n_layers_limit,
                    struct k3_err *err);
/* The same from DIR/config.json. */
int k3_config_read(struct k3_config *out, const char *dir, uint32_t n_layers_limit, struct k3_err *err);

#endif
