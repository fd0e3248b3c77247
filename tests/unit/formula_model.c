#include "tests/unit/formula_model.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t tiny_full_attn[] = { 4, 7, 8, 0 };
const struct k3_formula_shape k3_formula_tiny = {
    .hidden = 64, .layers = 8, .vocab = 96, .kda_heads = 3, .kda_dim = 8, .taps = 4, .a_log_len = 8, .mla_heads = 2,
    .q_lora = 24, .kv_lora = 16, .nope = 12, .rope = 4, .v_dim = 10, .experts = 8, .top_k = 3, .shared = 2, .latent = 64,
    .inner = 96, .dense = 80, .first_dense = 1, .block = 3, .full_attn = tiny_full_attn, .gate = true,
    .renormalize = true, .latent_norm = true, .routed_scale = 1, .lower_bound = -5, .dtype = K3_BF16,
};

enum kind { WEIGHT, EXACT, A_LOG, PACKED, SCALE }; /* EXACT: F32 in the file whatever the shape's dtype is */

struct writer {
    const struct k3_formula_shape *s;
    FILE *header, *data;
    uint64_t at;
    bool first;
};

static uint64_t key_of(const char *name)
{
    uint64_t k = 0xcbf29ce484222325u;

    for (; *name; name++)
        k = (k ^ (unsigned char)*name) * 1099511628211u;
    return k;
}

static uint64_t mix(uint64_t x)
{
    uint64_t z = x + 0x9E3779B97F4A7C15u;

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint16_t to_bf16(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static uint16_t to_f16(float f) /* truncating, normal numbers only; others become 0: any exact F16 value will do */
{
    uint32_t u;
    int e;

    memcpy(&u, &f, 4);
    e = (int)(u >> 23 & 0xff) - 112;
    return e < 1 || e > 30 ? 0 : (uint16_t)((u >> 16 & 0x8000) | (uint32_t)e << 10 | (u >> 13 & 0x3ff));
}

/* dims: "64,8" as it stands in the header. */
static void tensor(struct writer *w, enum kind kind, double base, double gain, uint64_t n, const char *dims,
                   const char *fmt, ...)
{
    static const char *const names[] = { "F32", "F16", "BF16", "U8" };
    enum k3_dtype dtype = kind == PACKED || kind == SCALE ? K3_U8 : kind == WEIGHT ? w->s->dtype : K3_F32;
    uint64_t size = dtype == K3_U8 ? 1 : dtype == K3_F32 ? 4 : 2, key;
    char name[256];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(name, sizeof(name), fmt, ap);
    va_end(ap);
    key = key_of(name);
    fprintf(w->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}", w->first ? "" : ",", name,
            names[dtype], dims, (unsigned long long)w->at, (unsigned long long)(w->at + n * size));
    w->first = false;
    w->at += n * size;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t z = mix(key + i);
        float f = (float)(base + gain * (((double)(z >> 40) - 8388608.0) / 8388608.0));
        uint16_t half = dtype == K3_F16 ? to_f16(f) : to_bf16(f);

        if (kind == A_LOG && i >= w->s->kda_heads)
            f = 0;
        if (kind == PACKED)
            fputc((int)(z >> 56), w->data);
        else if (kind == SCALE)
            fputc((int)(122 + (z >> 56) % 3), w->data);
        else if (dtype == K3_F32)
            fwrite(&f, 4, 1, w->data);
        else
            fwrite(&half, 2, 1, w->data);
    }
}

#define VEC(kind, base, gain, n, ...)                                                                                  \
    do {                                                                                                               \
        char dims_[64];                                                                                                \
        snprintf(dims_, sizeof(dims_), "%u", (unsigned)(n));                                                           \
        tensor(w, kind, base, gain, n, dims_, __VA_ARGS__);                                                            \
    } while (0)
#define MAT(kind, gain, rows, cols, ...)                                                                               \
    do {                                                                                                               \
        char dims_[64];                                                                                                \
        snprintf(dims_, sizeof(dims_), "%u,%u", (unsigned)(rows), (unsigned)(cols));                                   \
        tensor(w, kind, 0, gain, (uint64_t)(rows) * (cols), dims_, __VA_ARGS__);                                       \
    } while (0)
#define P "language_model.model."
#define A P "layers.%u.self_attn."
#define M P "layers.%u.block_sparse_moe."

static void kda(struct writer *w, uint32_t l)
{
    const struct k3_formula_shape *s = w->s;
    uint32_t width = s->kda_heads * s->kda_dim;
    static const char *const convs[] = { "q", "k", "v" };

    VEC(A_LOG, 0, 1, s->a_log_len, A "A_log", l);
    VEC(EXACT, 0, 2, width, A "dt_bias", l);
    for (int i = 0; i < 3; i++) {
        char dims[64];

        snprintf(dims, sizeof(dims), "%u,1,%u", width, s->taps);
        tensor(w, EXACT, 0, .5, (uint64_t)width * s->taps, dims, A "%s_conv1d.weight", l, convs[i]);
        MAT(WEIGHT, .25, width, s->hidden, A "%s_proj.weight", l, convs[i]);
    }
    VEC(EXACT, 1, .25, s->kda_dim, A "o_norm.weight", l);
    MAT(WEIGHT, .25, s->kda_dim, s->hidden, A "f_a_proj.weight", l);
    MAT(WEIGHT, .5, width, s->kda_dim, A "f_b_proj.weight", l);
    MAT(WEIGHT, .25, s->kda_heads, s->hidden, A "b_proj.weight", l);
    MAT(WEIGHT, .25, width, s->hidden, A "g_proj.weight", l);
    MAT(WEIGHT, .5, s->hidden, width, A "o_proj.weight", l);
}

static void mla(struct writer *w, uint32_t l)
{
    const struct k3_formula_shape *s = w->s;

    MAT(WEIGHT, .25, s->q_lora, s->hidden, A "q_a_proj.weight", l);
    VEC(WEIGHT, 1, .25, s->q_lora, A "q_a_layernorm.weight", l);
    MAT(WEIGHT, .5, s->mla_heads * (s->nope + s->rope), s->q_lora, A "q_b_proj.weight", l);
    MAT(WEIGHT, .25, s->kv_lora + s->rope, s->hidden, A "kv_a_proj_with_mqa.weight", l);
    VEC(WEIGHT, 1, .25, s->kv_lora, A "kv_a_layernorm.weight", l);
    MAT(WEIGHT, .5, s->mla_heads * (s->nope + s->v_dim), s->kv_lora, A "kv_b_proj.weight", l);
    MAT(WEIGHT, .5, s->hidden, s->mla_heads * s->v_dim, A "o_proj.weight", l);
    if (s->gate)
        MAT(WEIGHT, .25, s->mla_heads * s->v_dim, s->hidden, A "g_proj.weight", l);
}

static void moe(struct writer *w, uint32_t l)
{
    const struct k3_formula_shape *s = w->s;
    uint32_t sh = s->shared * s->inner;

    MAT(WEIGHT, .25, s->experts, s->hidden, M "gate.weight", l);
    VEC(EXACT, 0, .25, s->experts, M "gate.e_score_correction_bias", l);
    MAT(WEIGHT, .5, s->latent, s->hidden, M "routed_expert_down_proj.weight", l);
    MAT(WEIGHT, .25, s->hidden, s->latent, M "routed_expert_up_proj.weight", l);
    if (s->latent_norm)
        VEC(WEIGHT, 1, .25, s->latent, M "routed_expert_norm.weight", l);
    MAT(WEIGHT, .5, sh, s->hidden, M "shared_experts.gate_proj.weight", l);
    MAT(WEIGHT, .5, sh, s->hidden, M "shared_experts.up_proj.weight", l);
    MAT(WEIGHT, .125, s->hidden, sh, M "shared_experts.down_proj.weight", l);
    for (uint32_t e = 0; e < s->experts; e++)
        for (uint32_t i = 1; i <= 3; i++) {
            uint32_t rows = i == 2 ? s->latent : s->inner, cols = i == 2 ? s->inner : s->latent;

            MAT(PACKED, 0, rows, cols / 2, M "experts.%u.w%u.weight_packed", l, e, i);
            MAT(SCALE, 0, rows, cols / 32, M "experts.%u.w%u.weight_scale", l, e, i);
        }
}

static void all_tensors(struct writer *w)
{
    const struct k3_formula_shape *s = w->s;
    static const char *const norms[] = { "input_layernorm", "post_attention_layernorm", "self_attention_res_norm",
                                         "mlp_res_norm" };

    MAT(WEIGHT, 1, s->vocab, s->hidden, P "embed_tokens.weight");
    for (uint32_t l = 0; l < s->layers; l++) {
        bool full = false;

        for (const uint32_t *f = s->full_attn; *f; f++)
            full |= *f == l + 1;
        for (int i = 0; i < 4; i++)
            VEC(WEIGHT, 1, .25, s->hidden, P "layers.%u.%s.weight", l, norms[i]);
        MAT(WEIGHT, .25, 1, s->hidden, P "layers.%u.self_attention_res_proj.weight", l);
        MAT(WEIGHT, .25, 1, s->hidden, P "layers.%u.mlp_res_proj.weight", l);
        full ? mla(w, l) : kda(w, l);
        if (l < s->first_dense) {
            MAT(WEIGHT, .5, s->dense, s->hidden, P "layers.%u.mlp.gate_proj.weight", l);
            MAT(WEIGHT, .5, s->dense, s->hidden, P "layers.%u.mlp.up_proj.weight", l);
            MAT(WEIGHT, .25, s->hidden, s->dense, P "layers.%u.mlp.down_proj.weight", l);
        } else {
            moe(w, l);
        }
    }
    VEC(WEIGHT, 1, .25, s->hidden, P "norm.weight");
    VEC(WEIGHT, 1, .25, s->hidden, P "output_attn_res_norm.weight");
    MAT(WEIGHT, .25, 1, s->hidden, P "output_attn_res_proj.weight");
    MAT(WEIGHT, .25, s->vocab, s->hidden, "language_model.lm_head.weight");
}

static void config(FILE *f, const struct k3_formula_shape *s)
{
    fprintf(f,
            "{\"hidden_size\":%u,\"num_hidden_layers\":%u,\"vocab_size\":%u,\"rms_norm_eps\":1e-5,"
            "\"tie_word_embeddings\":false,\"num_attention_heads\":%u,\"q_lora_rank\":%u,\"kv_lora_rank\":%u,"
            "\"qk_nope_head_dim\":%u,\"qk_rope_head_dim\":%u,\"v_head_dim\":%u,\"mla_use_output_gate\":%s,",
            s->hidden, s->layers, s->vocab, s->mla_heads, s->q_lora, s->kv_lora, s->nope, s->rope, s->v_dim,
            s->gate ? "true" : "false");
    fprintf(f,
            "\"num_experts\":%u,\"num_experts_per_token\":%u,\"num_shared_experts\":%u,\"routed_expert_hidden_size\":%u,"
            "\"moe_intermediate_size\":%u,\"routed_scaling_factor\":%g,\"moe_renormalize\":%s,\"latent_moe_use_norm\":%s,"
            "\"first_k_dense_replace\":%u,\"intermediate_size\":%u,\"attn_res_block_size\":%u,",
            s->experts, s->top_k, s->shared, s->latent, s->inner, s->routed_scale, s->renormalize ? "true" : "false",
            s->latent_norm ? "true" : "false", s->first_dense, s->dense, s->block);
    fprintf(f,
            "\"kda_num_heads\":%u,\"kda_head_dim\":%u,\"short_conv_kernel_size\":%u,\"gate_lower_bound\":%g,"
            "\"situ_beta\":4.0,\"situ_linear_beta\":25.0,\"full_attn_layers\":[",
            s->kda_heads, s->kda_dim, s->taps, s->lower_bound);
    for (const uint32_t *l = s->full_attn; *l; l++)
        fprintf(f, "%s%u", l == s->full_attn ? "" : ",", *l);
    fprintf(f, "]}\n");
}

int k3_formula_write(const char *dir, const struct k3_formula_shape *s, struct k3_err *err)
{
    struct writer w = { .s = s, .first = true };
    char path[512], *header = NULL;
    size_t len = 0;
    uint64_t n;
    FILE *f;

    snprintf(path, sizeof(path), "%s/config.json", dir);
    f = fopen(path, "w");
    if (!f)
        return k3_fail(err, -errno, "write %s", path);
    config(f, s);
    if (fclose(f) != 0)
        return k3_fail(err, -errno, "write %s", path);

    w.data = tmpfile();
    w.header = open_memstream(&header, &len);
    if (!w.data || !w.header)
        return k3_fail(err, -ENOMEM, "temporary file");
    fputc('{', w.header);
    all_tensors(&w);
    fputc('}', w.header);
    while (ftell(w.header) % 8)
        fputc(' ', w.header);
    fclose(w.header);

    snprintf(path, sizeof(path), "%s/model-00001-of-000001.safetensors", dir);
    f = fopen(path, "w");
    if (!f)
        return k3_fail(err, -errno, "write %s", path);
    n = len;
    fwrite(&n, 8, 1, f);
    fwrite(header, 1, len, f);
    rewind(w.data);
    for (char buf[65536];;) {
        size_t got = fread(buf, 1, sizeof(buf), w.data);

        if (got == 0)
            break;
        fwrite(buf, 1, got, f);
    }
    fclose(w.data);
    free(header);
    return fclose(f) == 0 ? 0 : k3_fail(err, -errno, "write %s", path);
}
