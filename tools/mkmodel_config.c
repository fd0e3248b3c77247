/* Shapes, and config.json as the released files have it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "tools/mkmodel.h"

static const struct k3_config released = {
    .hidden = 7168, .vocab = 163840, .rms_eps = 1e-5f, .latent_eps = 1e-5f, .situ_beta = 4, .situ_linear_beta = 25,
    .kda_heads = 96, .kda_dim = 128, .conv_taps = 4, .gate_lower_bound = -5,
    .mla_heads = 96, .q_lora = 1536, .kv_lora = 512, .qk_nope = 128, .qk_rope = 64, .v_dim = 128, .mla_gate = true,
    .dense_inter = 33792, .first_dense = 1, .n_experts = 896, .top_k = 16, .n_shared = 2, .moe_inter = 3072,
    .latent = 3584, .latent_norm = true, .renormalize = true, .routed_scale = 1, .res_block = 12,
    .bos = 163584, .eos = 163586, .pad = 163839,
};

void k3_mk_config_released(struct k3_config *c)
{
    *c = released;
    k3_mk_config_layers(c, 93, NULL, true, NULL);
}

void k3_mk_config_formula(struct k3_config *c)
{
    *c = released;
    c->hidden = 64;
    c->vocab = 96;
    c->kda_heads = 3;
    c->kda_dim = 8;
    c->mla_heads = 2;
    c->q_lora = 24;
    c->kv_lora = 16;
    c->qk_nope = 12;
    c->qk_rope = 4;
    c->v_dim = 10;
    c->dense_inter = 80;
    c->n_experts = 8;
    c->top_k = 3;
    c->moe_inter = 96;
    c->latent = 64;
    c->res_block = 3;
    c->bos = c->eos = c->pad = -1;
    k3_mk_config_layers(c, 8, "4,7,8", false, NULL);
}

void k3_mk_config_small(struct k3_config *c)
{
    *c = released;
    c->hidden = 128;
    c->vocab = 512;
    c->kda_heads = 4;
    c->kda_dim = 32;
    c->mla_heads = 4;
    c->q_lora = 64;
    c->kv_lora = 32;
    c->qk_nope = 24;
    c->qk_rope = 8;
    c->v_dim = 32;
    c->dense_inter = 256;
    c->n_experts = 32;
    c->top_k = 4;
    c->moe_inter = 64;
    c->latent = 64;
    c->res_block = 3;
    c->bos = c->eos = c->pad = -1;
    k3_mk_config_layers(c, 9, NULL, true, NULL);
}

static int from_list(struct k3_config *c, const char *list, struct k3_err *err)
{
    char copy[4096], *save = NULL;
    uint64_t last = 0, v;

    if (strlen(list) >= sizeof(copy))
        return k3_refuse(err, -EINVAL, "--full-attn is longer than %zu bytes", sizeof(copy) - 1);
    strcpy(copy, list);
    if (!strcmp(list, "none"))
        return 0;
    for (char *at = strtok_r(copy, ",", &save); at; at = strtok_r(NULL, ",", &save)) {
        if (k3_parse_u64(at, 1, c->n_layers, &v) < 0 || v <= last)
            return k3_refuse(err, -EINVAL, "--full-attn %s: \"%s\" must be a layer from 1 to %u, in ascending order", list,
                             at, c->n_layers);
        c->kind[v - 1] = K3_MLA;
        last = v;
    }
    return last ? 0 : k3_refuse(err, -EINVAL, "--full-attn is empty; \"none\" means no MLA layer");
}

int k3_mk_config_layers(struct k3_config *c, uint32_t n_layers, const char *full_attn, bool last, struct k3_err *err)
{
    if (n_layers < 1 || n_layers > K3_MAX_LAYERS)
        return k3_refuse(err, -EINVAL, "--layers %u must be from 1 to %u", n_layers, K3_MAX_LAYERS);
    c->n_layers = c->n_layers_model = n_layers;
    memset(c->kind, K3_KDA, sizeof(c->kind));
    if (full_attn)
        return from_list(c, full_attn, err);
    for (uint32_t i = 3; i < n_layers; i += 4)
        c->kind[i] = K3_MLA;
    if (last)
        c->kind[n_layers - 1] = K3_MLA;
    return 0;
}

/* The shortest decimal that reads back as the same float. */
static const char *shortest(float v, char buf[32])
{
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(buf, 32, "%.*g", digits, (double)v);
        if (strtof(buf, NULL) == v)
            break;
    }
    return buf;
}

static void put_layers(FILE *f, const struct k3_config *c, enum k3_layer_kind kind)
{
    const char *comma = "";

    fputc('[', f);
    for (uint32_t i = 0; i < c->n_layers; i++)
        if (c->kind[i] == kind) {
            fprintf(f, "%s%u", comma, i + 1);
            comma = ", ";
        }
    fputc(']', f);
}

static const char *yes(bool v)
{
    return v ? "true" : "false";
}

static void put_ids(FILE *f, const struct k3_config *c, const char *indent)
{
    const struct { const char *name; int64_t id; } ids[] = { { "bos", c->bos }, { "eos", c->eos }, { "pad", c->pad } };

    for (int i = 0; i < 3; i++)
        if (ids[i].id >= 0)
            fprintf(f, "%s\"%s_token_id\": %lld,\n", indent, ids[i].name, (long long)ids[i].id);
}

/* The fields that both forms have under one name. */
static void put_common(FILE *f, const struct k3_config *c, const char *in)
{
    char buf[32];

    fprintf(f, "%s\"hidden_size\": %u,\n%s\"num_hidden_layers\": %u,\n%s\"vocab_size\": %u,\n", in, c->hidden, in,
            c->n_layers, in, c->vocab);
    fprintf(f, "%s\"rms_norm_eps\": %s,\n%s\"tie_word_embeddings\": false,\n", in, shortest(c->rms_eps, buf), in);
    fprintf(f, "%s\"num_attention_heads\": %u,\n%s\"q_lora_rank\": %u,\n%s\"kv_lora_rank\": %u,\n", in, c->mla_heads, in,
            c->q_lora, in, c->kv_lora);
    fprintf(f, "%s\"qk_nope_head_dim\": %u,\n%s\"qk_rope_head_dim\": %u,\n%s\"v_head_dim\": %u,\n", in, c->qk_nope, in,
            c->qk_rope, in, c->v_dim);
    fprintf(f, "%s\"mla_use_output_gate\": %s,\n%s\"intermediate_size\": %u,\n", in, yes(c->mla_gate), in,
            c->dense_inter);
    fprintf(f, "%s\"first_k_dense_replace\": %u,\n%s\"num_experts\": %u,\n%s\"num_experts_per_token\": %u,\n", in,
            c->first_dense, in, c->n_experts, in, c->top_k);
    fprintf(f, "%s\"num_shared_experts\": %u,\n%s\"moe_intermediate_size\": %u,\n%s\"routed_expert_hidden_size\": %u,\n",
            in, c->n_shared, in, c->moe_inter, in, c->latent);
    fprintf(f, "%s\"latent_moe_use_norm\": %s,\n%s\"moe_renormalize\": %s,\n", in, yes(c->latent_norm), in,
            yes(c->renormalize));
    fprintf(f, "%s\"routed_scaling_factor\": %s,\n%s\"attn_res_block_size\": %u", in, shortest(c->routed_scale, buf), in,
            c->res_block);
}

static void put_flat(FILE *f, const struct k3_config *c)
{
    char b1[32], b2[32], b3[32];

    fprintf(f, "{\n");
    put_ids(f, c, "  ");
    put_common(f, c, "  ");
    fprintf(f, ",\n  \"kda_num_heads\": %u,\n  \"kda_head_dim\": %u,\n  \"short_conv_kernel_size\": %u,\n", c->kda_heads,
            c->kda_dim, c->conv_taps);
    fprintf(f, "  \"gate_lower_bound\": %s,\n  \"situ_beta\": %s,\n  \"situ_linear_beta\": %s,\n",
            shortest(c->gate_lower_bound, b1), shortest(c->situ_beta, b2), shortest(c->situ_linear_beta, b3));
    fprintf(f, "  \"full_attn_layers\": ");
    put_layers(f, c, K3_MLA);
    fprintf(f, "\n}\n");
}

static void put_nested(FILE *f, const struct k3_config *c)
{
    char b1[32], b2[32];

    fprintf(f, "{\n  \"architectures\": [\"KimiK3ForConditionalGeneration\"],\n  \"model_type\": \"kimi_k3\",\n");
    fprintf(f, "  \"dtype\": \"bfloat16\",\n");
    put_ids(f, c, "  ");
    fprintf(f, "  \"tie_word_embeddings\": false,\n  \"text_config\": {\n    \"model_type\": \"kimi_linear\",\n");
    put_ids(f, c, "    ");
    put_common(f, c, "    ");
    fprintf(f, ",\n    \"hidden_act\": \"situ\",\n    \"activation_situ_beta\": %s,\n", shortest(c->situ_beta, b1));
    fprintf(f, "    \"activation_situ_linear_beta\": %s,\n    \"mla_use_nope\": true,\n", shortest(c->situ_linear_beta, b1));
    fprintf(f, "    \"moe_layer_freq\": 1,\n    \"moe_router_activation_func\": \"sigmoid\",\n");
    fprintf(f, "    \"num_key_value_heads\": %u,\n    \"linear_attn_config\": {\n", c->mla_heads);
    fprintf(f, "      \"num_heads\": %u,\n      \"head_dim\": %u,\n      \"short_conv_kernel_size\": %u,\n", c->kda_heads,
            c->kda_dim, c->conv_taps);
    fprintf(f, "      \"gate_lower_bound\": %s,\n      \"use_full_rank_gate\": true,\n      \"full_attn_layers\": ",
            shortest(c->gate_lower_bound, b2));
    put_layers(f, c, K3_MLA);
    fprintf(f, ",\n      \"kda_layers\": ");
    put_layers(f, c, K3_KDA);
    fprintf(f, "\n    },\n    \"quantization_config\": {\n      \"quant_method\": \"compressed-tensors\",\n");
    fprintf(f, "      \"format\": \"mxfp4-pack-quantized\",\n      \"quantization_status\": \"compressed\"\n    }\n  }\n}\n");
}

int k3_mk_config_json(const struct k3_config *c, bool flat, char **out, struct k3_err *err)
{
    struct k3_config back;
    size_t len_bytes = 0;
    FILE *f = open_memstream(out, &len_bytes);
    int rc;

    if (!f)
        return k3_fail(err, -ENOMEM, "no memory for config.json");
    if (flat)
        put_flat(f, c);
    else
        put_nested(f, c);
    if (fclose(f) != 0)
        return k3_fail(err, -ENOMEM, "no memory for config.json");
    rc = k3_config_parse(&back, *out, len_bytes, 0, err);
    if (rc < 0) {
        free(*out);
        *out = NULL;
    }
    return rc;
}
