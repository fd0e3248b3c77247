#include "model/names.h"

#include <stdio.h>
#include <string.h>

#define LAYERS "language_model.model.layers."
#define MODEL "language_model.model."

/* Where a tensor occurs. */
enum where { ALL, KDA, MLA, MLA_GATED, DENSE, MOE, MOE_NORMED, TOP };

static const struct { const char *name, *suffix; enum where where; } matrices[K3_N_ROLES] = {
    [K3_W_KDA_Q] = { "kda_q", "self_attn.q_proj.weight", KDA },
    [K3_W_KDA_K] = { "kda_k", "self_attn.k_proj.weight", KDA },
    [K3_W_KDA_V] = { "kda_v", "self_attn.v_proj.weight", KDA },
    [K3_W_KDA_FA] = { "kda_f_a", "self_attn.f_a_proj.weight", KDA },
    [K3_W_KDA_FB] = { "kda_f_b", "self_attn.f_b_proj.weight", KDA },
    [K3_W_KDA_B] = { "kda_b", "self_attn.b_proj.weight", KDA },
    [K3_W_KDA_G] = { "kda_g", "self_attn.g_proj.weight", KDA },
    [K3_W_KDA_O] = { "kda_o", "self_attn.o_proj.weight", KDA },
    [K3_W_MLA_QA] = { "mla_q_a", "self_attn.q_a_proj.weight", MLA },
    [K3_W_MLA_QB] = { "mla_q_b", "self_attn.q_b_proj.weight", MLA },
    [K3_W_MLA_KVA] = { "mla_kv_a", "self_attn.kv_a_proj_with_mqa.weight", MLA },
    [K3_W_MLA_KVB] = { "mla_kv_b", "self_attn.kv_b_proj.weight", MLA },
    [K3_W_MLA_G] = { "mla_g", "self_attn.g_proj.weight", MLA_GATED },
    [K3_W_MLA_O] = { "mla_o", "self_attn.o_proj.weight", MLA },
    [K3_W_DENSE_GATE] = { "dense_gate", "mlp.gate_proj.weight", DENSE },
    [K3_W_DENSE_UP] = { "dense_up", "mlp.up_proj.weight", DENSE },
    [K3_W_DENSE_DOWN] = { "dense_down", "mlp.down_proj.weight", DENSE },
    [K3_W_ROUTER] = { "router", "block_sparse_moe.gate.weight", MOE },
    [K3_W_LATENT_DOWN] = { "latent_down", "block_sparse_moe.routed_expert_down_proj.weight", MOE },
    [K3_W_SHARED_GATE] = { "shared_gate", "block_sparse_moe.shared_experts.gate_proj.weight", MOE },
    [K3_W_SHARED_UP] = { "shared_up", "block_sparse_moe.shared_experts.up_proj.weight", MOE },
    [K3_W_SHARED_DOWN] = { "shared_down", "block_sparse_moe.shared_experts.down_proj.weight", MOE },
    [K3_W_LATENT_UP] = { "latent_up", "block_sparse_moe.routed_expert_up_proj.weight", MOE },
    [K3_W_LM_HEAD] = { "lm_head", "language_model.lm_head.weight", TOP },
};

static const struct { const char *name, *suffix; enum where where; } residents[K3_N_RESIDENT_ROLES] = {
    [K3_R_INPUT_NORM] = { "input_norm", "input_layernorm.weight", ALL },
    [K3_R_POST_NORM] = { "post_norm", "post_attention_layernorm.weight", ALL },
    [K3_R_ATTN_RES_NORM] = { "attn_res_norm", "self_attention_res_norm.weight", ALL },
    [K3_R_ATTN_RES_PROJ] = { "attn_res_proj", "self_attention_res_proj.weight", ALL },
    [K3_R_MLP_RES_NORM] = { "mlp_res_norm", "mlp_res_norm.weight", ALL },
    [K3_R_MLP_RES_PROJ] = { "mlp_res_proj", "mlp_res_proj.weight", ALL },
    [K3_R_Q_CONV] = { "q_conv", "self_attn.q_conv1d.weight", KDA },
    [K3_R_K_CONV] = { "k_conv", "self_attn.k_conv1d.weight", KDA },
    [K3_R_V_CONV] = { "v_conv", "self_attn.v_conv1d.weight", KDA },
    [K3_R_A_LOG] = { "A_log", "self_attn.A_log", KDA },
    [K3_R_DT_BIAS] = { "dt_bias", "self_attn.dt_bias", KDA },
    [K3_R_O_NORM] = { "o_norm", "self_attn.o_norm.weight", KDA },
    [K3_R_QA_NORM] = { "q_a_norm", "self_attn.q_a_layernorm.weight", MLA },
    [K3_R_KVA_NORM] = { "kv_a_norm", "self_attn.kv_a_layernorm.weight", MLA },
    [K3_R_ROUTER_BIAS] = { "router_bias", "block_sparse_moe.gate.e_score_correction_bias", MOE },
    [K3_R_EXPERT_NORM] = { "expert_norm", "block_sparse_moe.routed_expert_norm.weight", MOE_NORMED },
    [K3_R_FINAL_NORM] = { "final_norm", MODEL "norm.weight", TOP },
    [K3_R_OUT_RES_NORM] = { "out_res_norm", MODEL "output_attn_res_norm.weight", TOP },
    [K3_R_OUT_RES_PROJ] = { "out_res_proj", MODEL "output_attn_res_proj.weight", TOP },
};

static const char *const expert_suffix[K3_EXPERT_TENSORS] = {
    "w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale", "w3.weight_packed", "w3.weight_scale",
};

const char *k3_role_name(enum k3_role role)
{
    return (unsigned)role < K3_N_ROLES ? matrices[role].name : "?";
}

const char *k3_resident_role_name(enum k3_resident_role role)
{
    return (unsigned)role < K3_N_RESIDENT_ROLES ? residents[role].name : "?";
}

static bool has(const struct k3_config *c, int layer, enum where where)
{
    bool mla, dense;

    if (layer < 0 || where == TOP)
        return layer < 0 && where == TOP;
    mla = c->kind[layer] == K3_MLA;
    dense = k3_layer_is_dense(c, (uint32_t)layer);
    switch (where) {
    case KDA:
        return !mla;
    case MLA:
        return mla;
    case MLA_GATED:
        return mla && c->mla_gate;
    case DENSE:
        return dense;
    case MOE:
        return !dense;
    case MOE_NORMED:
        return !dense && c->latent_norm;
    default:
        return true;
    }
}

bool k3_names_has_matrix(const struct k3_config *c, int layer, enum k3_role role)
{
    return has(c, layer, matrices[role].where);
}

bool k3_names_has_resident(const struct k3_config *c, int layer, enum k3_resident_role role)
{
    return has(c, layer, residents[role].where);
}

static void full_name(char *out, int layer, const char *suffix)
{
    if (layer < 0)
        snprintf(out, K3_NAME_BYTES, "%s", suffix);
    else
        snprintf(out, K3_NAME_BYTES, LAYERS "%d.%s", layer, suffix);
}

void k3_names_matrix(char out[K3_NAME_BYTES], int layer, enum k3_role role)
{
    full_name(out, layer, matrices[role].suffix);
}

void k3_names_resident(char out[K3_NAME_BYTES], int layer, enum k3_resident_role role)
{
    full_name(out, layer, residents[role].suffix);
}

void k3_names_expert(char out[K3_NAME_BYTES], int layer, uint32_t expert, uint32_t tensor)
{
    snprintf(out, K3_NAME_BYTES, LAYERS "%d.block_sparse_moe.experts.%u.%s", layer, expert, expert_suffix[tensor]);
}

void k3_names_matrix_shape(const struct k3_config *c, enum k3_role role, uint32_t *n_rows, uint32_t *n_cols)
{
    uint32_t h = c->hidden, p = c->kda_heads * c->kda_dim, shared = c->n_shared * c->moe_inter;
    uint32_t v = c->mla_heads * c->v_dim;
    const uint32_t shape[K3_N_ROLES][2] = {
        [K3_W_KDA_Q] = { p, h },
        [K3_W_KDA_K] = { p, h },
        [K3_W_KDA_V] = { p, h },
        [K3_W_KDA_FA] = { c->kda_dim, h },
        [K3_W_KDA_FB] = { p, c->kda_dim },
        [K3_W_KDA_B] = { c->kda_heads, h },
        [K3_W_KDA_G] = { p, h },
        [K3_W_KDA_O] = { h, p },
        [K3_W_MLA_QA] = { c->q_lora, h },
        [K3_W_MLA_QB] = { c->mla_heads * (c->qk_nope + c->qk_rope), c->q_lora },
        [K3_W_MLA_KVA] = { c->kv_lora + c->qk_rope, h },
        [K3_W_MLA_KVB] = { c->mla_heads * (c->qk_nope + c->v_dim), c->kv_lora },
        [K3_W_MLA_G] = { v, h },
        [K3_W_MLA_O] = { h, v },
        [K3_W_DENSE_GATE] = { c->dense_inter, h },
        [K3_W_DENSE_UP] = { c->dense_inter, h },
        [K3_W_DENSE_DOWN] = { h, c->dense_inter },
        [K3_W_ROUTER] = { c->n_experts, h },
        [K3_W_LATENT_DOWN] = { c->latent, h },
        [K3_W_SHARED_GATE] = { shared, h },
        [K3_W_SHARED_UP] = { shared, h },
        [K3_W_SHARED_DOWN] = { h, shared },
        [K3_W_LATENT_UP] = { h, c->latent },
        [K3_W_LM_HEAD] = { c->vocab, h },
    };

    *n_rows = shape[role][0];
    *n_cols = shape[role][1];
}

uint32_t k3_names_resident_len(const struct k3_config *c, enum k3_resident_role role)
{
    switch (role) {
    case K3_R_Q_CONV:
    case K3_R_K_CONV:
    case K3_R_V_CONV:
        return c->kda_heads * c->kda_dim * c->conv_taps;
    case K3_R_A_LOG:
        return c->kda_heads;
    case K3_R_DT_BIAS:
        return c->kda_heads * c->kda_dim;
    case K3_R_O_NORM:
        return c->kda_dim;
    case K3_R_QA_NORM:
        return c->q_lora;
    case K3_R_KVA_NORM:
        return c->kv_lora;
    case K3_R_ROUTER_BIAS:
        return c->n_experts;
    case K3_R_EXPERT_NORM:
        return c->latent;
    default:
        return c->hidden;
    }
}

uint32_t k3_names_resident_shape(const struct k3_config *c, enum k3_resident_role role, uint32_t shape[K3_MAX_DIMS])
{
    memset(shape, 0, K3_MAX_DIMS * sizeof(shape[0]));
    switch (role) {
    case K3_R_ATTN_RES_PROJ:
    case K3_R_MLP_RES_PROJ:
    case K3_R_OUT_RES_PROJ:
        shape[0] = 1;
        shape[1] = c->hidden;
        return 2;
    case K3_R_Q_CONV:
    case K3_R_K_CONV:
    case K3_R_V_CONV:
        shape[0] = c->kda_heads * c->kda_dim;
        shape[1] = 1;
        shape[2] = c->conv_taps;
        return 3;
    default:
        shape[0] = k3_names_resident_len(c, role);
        return 1;
    }
}

void k3_names_expert_shape(const struct k3_config *c, uint32_t tensor, uint32_t *n_rows, uint32_t *n_cols)
{
    bool down = tensor / 2 == 1; /* w2 */
    uint32_t cols = down ? c->moe_inter : c->latent;

    *n_rows = down ? c->latent : c->moe_inter;
    *n_cols = cols / (tensor % 2 ? 32 : 2);
}

uint64_t k3_names_expert_bytes(const struct k3_config *c)
{
    uint64_t sum = 0;
    uint32_t n_rows, n_cols;

    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        k3_names_expert_shape(c, t, &n_rows, &n_cols);
        sum += (uint64_t)n_rows * n_cols;
    }
    return sum;
}
