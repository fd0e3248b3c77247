/* k3-mkmodel: makes a checkpoint: the formula model, random ones of any shape, and the released shape. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "tools/mkmodel.h"

#define UNSET UINT32_MAX

struct cmdline {
    bool formula, released, sparse, scatter, flat, no_gate, no_norm, no_renorm;
    const char *out, *full_attn, *shards, *dtype;
    uint64_t seed;
    double eps, bound, situ, situ_linear, scale;
    uint32_t layers, hidden, vocab, kda_heads, kda_dim, taps, mla_heads, q_lora, kv_lora, qk_nope, qk_rope, v_dim;
    uint32_t dense_inter, first_dense, experts, top_k, shared, moe_inter, latent, res_block, bos, eos, pad;
};

static bool parse(struct cmdline *c, int argc, char **argv, int *status)
{
    const double w = 1 << 20;
    const struct k3_opt table[] = {
        { "out", K3_OPT_STRING, &c->out, "DIR", "the directory to make; it must not be there" },
        { "formula", K3_OPT_FLAG, &c->formula, NULL, "the tiny model whose every value is a formula" },
        { "released", K3_OPT_FLAG, &c->released, NULL, "the released widths; with --layers and --experts a part of it" },
        { "layers", K3_OPT_U32, &c->layers, "N", "layers (9)", 1, K3_MAX_LAYERS },
        { "experts", K3_OPT_U32, &c->experts, "N", "routed experts of a layer (32)", 1, 65535 },
        { "full-attn", K3_OPT_STRING, &c->full_attn, "LIST", "MLA layers counted from 1, as 4,8; or none (every fourth and the last)" },
        { "seed", K3_OPT_U64, &c->seed, "N", "seed of the random values (1)" },
        { "sparse", K3_OPT_FLAG, &c->sparse, NULL, "headers only; the weights are holes and read as zeros" },
        { "scatter", K3_OPT_FLAG, &c->scatter, NULL, "tensors in random order in random shards" },
        { "shards", K3_OPT_STRING, &c->shards, "N", "number of shards, or per-layer (the default)" },
        { "dtype", K3_OPT_STRING, &c->dtype, "TYPE",
          "type of the matrices: bf16 (the default), f16 or f32" },
        { "flat", K3_OPT_FLAG, &c->flat, NULL, "config.json in the flat form" },
        { "hidden", K3_OPT_U32, &c->hidden, "N", "residual width (128)", 1, w },
        { "vocab", K3_OPT_U32, &c->vocab, "N", "rows of embedding and lm_head; no tokenizer is made (512)", 1, 1 << 24 },
        { "kda-heads", K3_OPT_U32, &c->kda_heads, "N", "KDA heads (4)", 1, 65536 },
        { "kda-dim", K3_OPT_U32, &c->kda_dim, "N", "width of a KDA head (32)", 1, 65536 },
        { "conv-taps", K3_OPT_U32, &c->taps, "N", "taps of the short convolution (4)", 1, 16 },
        { "gate-lower-bound", K3_OPT_DOUBLE, &c->bound, "X", "lower bound of the decay (-5)", -80, 0 },
        { "mla-heads", K3_OPT_U32, &c->mla_heads, "N", "MLA heads (4)", 1, 65536 },
        { "q-lora", K3_OPT_U32, &c->q_lora, "N", "width of the MLA query bottleneck (64)", 1, w },
        { "kv-lora", K3_OPT_U32, &c->kv_lora, "N", "width of the MLA latent (32)", 1, w },
        { "qk-nope", K3_OPT_U32, &c->qk_nope, "N", "content part of an MLA head (24)", 1, 65536 },
        { "qk-rope", K3_OPT_U32, &c->qk_rope, "N", "shared-key part of an MLA head (8)", 1, 65536 },
        { "v-dim", K3_OPT_U32, &c->v_dim, "N", "value part of an MLA head (32)", 1, 65536 },
        { "no-mla-gate", K3_OPT_FLAG, &c->no_gate, NULL, "MLA without its output gate" },
        { "dense-inter", K3_OPT_U32, &c->dense_inter, "N", "inner width of a dense layer (256)", 1, w },
        { "first-dense", K3_OPT_U32, &c->first_dense, "N", "number of dense layers at the start (1)", 0, K3_MAX_LAYERS },
        { "top-k", K3_OPT_U32, &c->top_k, "N", "experts of a row (4)", 1, 65535 },
        { "shared-experts", K3_OPT_U32, &c->shared, "N", "shared experts (2)", 1, 1024 },
        { "moe-inter", K3_OPT_U32, &c->moe_inter, "N", "inner width of an expert, a multiple of 32 (64)", 1, w },
        { "latent", K3_OPT_U32, &c->latent, "N", "latent width of the experts, a multiple of 32 (64)", 1, w },
        { "no-latent-norm", K3_OPT_FLAG, &c->no_norm, NULL, "no norm on the sum of the experts" },
        { "no-renormalize", K3_OPT_FLAG, &c->no_renorm, NULL, "router weights not divided by their sum" },
        { "routed-scale", K3_OPT_DOUBLE, &c->scale, "X", "routed_scaling_factor (1)", 1e-6, 1e6 },
        { "res-block", K3_OPT_U32, &c->res_block, "N", "layers between two snapshots (3)", 1, K3_MAX_LAYERS },
        { "eps", K3_OPT_DOUBLE, &c->eps, "X", "rms_norm_eps (1e-5)", 1e-30, 1 },
        { "situ-beta", K3_OPT_DOUBLE, &c->situ, "X", "cap of the gate branch (4)", 1e-6, 1e6 },
        { "situ-linear-beta", K3_OPT_DOUBLE, &c->situ_linear, "X", "cap of the up branch (25)", 1e-6, 1e6 },
        { "bos", K3_OPT_U32, &c->bos, "ID", "bos_token_id (none)", 0, 1 << 24 },
        { "eos", K3_OPT_U32, &c->eos, "ID", "eos_token_id (none)", 0, 1 << 24 },
        { "pad", K3_OPT_U32, &c->pad, "ID", "pad_token_id (none)", 0, 1 << 24 },
        { NULL },
    };

    return k3_opts_parse(table, "k3-mkmodel",
                         "makes a checkpoint in the released file layout\n"
                         "  No tokenizer is made: ask such a model with k3-router --ids.\n"
                         "  In brackets: what is taken when it is not given, without --formula and --released.",
                         argc, argv, NULL, status);
}

static void set(uint32_t *to, uint32_t v)
{
    if (v != UNSET)
        *to = v;
}

static void set_float(float *to, double v)
{
    if (v != 0)
        *to = (float)v;
}

static int configure(struct k3_config *f, const struct cmdline *c, struct k3_err *err)
{
    uint32_t n_layers;

    if (c->formula)
        k3_mk_config_formula(f);
    else if (c->released)
        k3_mk_config_released(f);
    else
        k3_mk_config_small(f);
    set(&f->hidden, c->hidden);
    set(&f->kda_heads, c->kda_heads);
    set(&f->kda_dim, c->kda_dim);
    set(&f->conv_taps, c->taps);
    set(&f->mla_heads, c->mla_heads);
    set(&f->q_lora, c->q_lora);
    set(&f->kv_lora, c->kv_lora);
    set(&f->qk_nope, c->qk_nope);
    set(&f->qk_rope, c->qk_rope);
    set(&f->v_dim, c->v_dim);
    set(&f->dense_inter, c->dense_inter);
    set(&f->n_experts, c->experts);
    set(&f->n_shared, c->shared);
    set(&f->moe_inter, c->moe_inter);
    set(&f->latent, c->latent);
    set(&f->res_block, c->res_block);
    set_float(&f->rms_eps, c->eps);
    set_float(&f->gate_lower_bound, c->bound);
    set_float(&f->situ_beta, c->situ);
    set_float(&f->situ_linear_beta, c->situ_linear);
    set_float(&f->routed_scale, c->scale);
    f->mla_gate = !c->no_gate;
    f->latent_norm = !c->no_norm;
    f->renormalize = !c->no_renorm;
    if (c->vocab != UNSET && c->vocab != f->vocab) {
        f->vocab = c->vocab;
        f->bos = f->eos = f->pad = -1; /* those of the full vocabulary mean nothing here */
    }
    f->bos = c->bos != UNSET ? (int64_t)c->bos : f->bos;
    f->eos = c->eos != UNSET ? (int64_t)c->eos : f->eos;
    f->pad = c->pad != UNSET ? (int64_t)c->pad : f->pad;
    /* fewer experts than the shape's top-k: all of them, unless --top-k asks for what cannot be */
    f->top_k = c->top_k != UNSET ? c->top_k : f->top_k < f->n_experts ? f->top_k : f->n_experts;
    n_layers = c->layers != UNSET ? c->layers : f->n_layers;
    f->first_dense = c->first_dense != UNSET      ? c->first_dense
                     : f->first_dense <= n_layers ? f->first_dense
                                                  : n_layers;
    if (c->full_attn || n_layers != f->n_layers)
        return k3_mk_config_layers(f, n_layers, c->full_attn, !c->released || n_layers == 93, err);
    return 0;
}

static int options(struct k3_mk_opts *o, const struct cmdline *c, struct k3_err *err)
{
    static const struct { const char *name; uint8_t dtype; } types[] = { { "f32", K3_F32 }, { "f16", K3_F16 },
                                                                         { "bf16", K3_BF16 } };
    uint64_t n_shards = 0;
    char *json;
    int rc;

    if (!c->out)
        return k3_refuse(err, -EINVAL, "--out DIR is missing");
    if (c->formula && c->released)
        return k3_refuse(err, -EINVAL, "--formula and --released are two different models; give one of them");
    o->dtype = UINT8_MAX;
    for (int i = 0; i < 3; i++)
        if (!strcmp(c->dtype, types[i].name))
            o->dtype = types[i].dtype;
    if (o->dtype == UINT8_MAX)
        return k3_refuse(err, -EINVAL, "--dtype %s: must be f32, f16 or bf16", c->dtype);
    if (strcmp(c->shards, "per-layer") && k3_parse_u64(c->shards, 1, 65000, &n_shards) < 0)
        return k3_refuse(err, -EINVAL, "--shards %s: must be per-layer or a number from 1 to 65000",
                         c->shards);
    if ((rc = configure(&o->cfg, c, err)) < 0 || (rc = k3_mk_config_json(&o->cfg, c->flat, &json, err)) < 0)
        return rc;
    free(json);
    o->n_shards = (uint32_t)n_shards;
    o->formula = c->formula;
    o->sparse = c->sparse;
    o->scatter = c->scatter;
    o->flat = c->flat;
    o->seed = c->seed;
    /* the full released model has its projector and vision tower; text inference never opens them */
    o->vision = c->released && o->cfg.n_layers == 93 && o->cfg.n_experts == 896;
    return 0;
}

int main(int argc, char **argv)
{
    struct cmdline c = { .seed = 1, .shards = "per-layer", .dtype = "bf16" };
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_opts opts = { .seed = 0 };
    struct k3_mk_plan plan = { .n_tensors = 0 };
    int rc;

    for (uint32_t *v = &c.layers; v <= &c.pad; v++)
        *v = UNSET;
    if (parse(&c, argc, argv, &rc))
        return rc;
    k3_mk_fill_init();
    rc = options(&opts, &c, &err);
    if (rc == 0)
        rc = k3_mk_plan_build(&plan, &opts, &err);
    if (rc == 0)
        rc = k3_mk_write(&plan, c.out, &err);
    if (rc < 0)
        fprintf(stderr, "k3-mkmodel: %s\n", err.text);
    else
        printf("%s: %zu tensors, %llu bytes, %u shard%s\n", c.out, plan.n_tensors, (unsigned long long)plan.total_bytes,
               plan.n_shards, plan.n_shards == 1 ? "" : "s");
    k3_mk_plan_free(&plan);
    return rc < 0 ? err.exit_status : 0;
}
