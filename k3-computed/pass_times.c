/* k3-computed/pass_times.c: where the time of a pass goes and what it has to touch (struct k3_pass_times). */
#include "k3-computed/pass_private.h"

static const char *const names[K3_N_STAGES] = {
    [K3_STAGE_EMBED] = "embedding",
    [K3_STAGE_RES] = "attention residuals",
    [K3_STAGE_NORM] = "norms and sums",
    [K3_STAGE_PROJ] = "attention projections",
    [K3_STAGE_KDA] = "KDA recurrence",
    [K3_STAGE_LATENT] = "latent attention",
    [K3_STAGE_ROUTER] = "router",
    [K3_STAGE_MLP] = "shared experts, dense",
    [K3_STAGE_EXPERTS] = "routed experts",
    [K3_STAGE_LM_HEAD] = "lm_head",
    [K3_STAGE_OTHER] = "other",
    [K3_STAGE_TRUNK_WAIT] = "waiting for the trunk",
    [K3_STAGE_EXPERT_WAIT] = "waiting for experts",
};

const char *k3_stage_name(enum k3_stage stage)
{
    return stage < K3_N_STAGES ? names[stage] : "?";
}

enum k3_stage k3_pass_role_stage(enum k3_role role)
{
    switch (role) {
    case K3_W_MLA_KVB:
        return K3_STAGE_LATENT;
    case K3_W_ROUTER:
        return K3_STAGE_ROUTER;
    case K3_W_LM_HEAD:
        return K3_STAGE_LM_HEAD;
    default:
        return role < K3_W_DENSE_GATE ? K3_STAGE_PROJ : K3_STAGE_MLP;
    }
}

void k3_pass_stage(struct k3_pass *p, enum k3_stage stage)
{
    uint64_t now_ns = k3_now_ns();

    p->times.stage[p->stage].ns += now_ns - p->stage_ns;
    p->stage = stage;
    p->stage_ns = now_ns;
}

static void count(struct k3_pass *p, enum k3_stage stage, uint64_t bytes, uint64_t flop)
{
    p->times.stage[stage].bytes += bytes;
    p->times.stage[stage].flop += flop;
}

void k3_pass_count_embed(struct k3_pass *p)
{
    uint64_t bytes = (uint64_t)p->n_rows * p->c->hidden * k3_dtype_bytes(p->m->embed_dtype);

    count(p, K3_STAGE_EMBED, bytes, 0);
    p->times.weight_bytes += bytes;
}

void k3_pass_count_matrix(struct k3_pass *p, const struct k3_matrix *mat)
{
    uint64_t n = (uint64_t)mat->n_rows * mat->n_cols, bytes = n * k3_dtype_bytes(mat->dtype);

    count(p, k3_pass_role_stage(mat->role), bytes, 2 * n * (mat->role == K3_W_LM_HEAD ? p->n_logits : p->n_rows));
    p->times.weight_bytes += bytes;
}

void k3_pass_count_expert(struct k3_pass *p, uint32_t n_rows)
{
    const struct k3_config *c = p->c;

    count(p, K3_STAGE_EXPERTS, p->m->expert_bytes, 2 * 3 * (uint64_t)c->latent * c->moe_inter * n_rows);
    p->times.weight_bytes += p->m->expert_bytes;
}

void k3_pass_count_kda(struct k3_pass *p)
{
    const struct k3_config *c = p->c;
    uint64_t width = (uint64_t)c->kda_heads * c->kda_dim;
    uint64_t floats = width * c->kda_dim + 3 * width * (c->conv_taps - 1);
    uint64_t bytes = p->n_segs * 2 * floats * sizeof(float);

    count(p, K3_STAGE_KDA, bytes, p->n_rows * (7 * width * c->kda_dim + 6 * width * c->conv_taps));
    p->times.state_bytes += bytes;
}

void k3_pass_count_latent(struct k3_pass *p)
{
    const struct k3_config *c = p->c;
    uint64_t width = (uint64_t)c->kv_lora + c->qk_rope, bytes = 0, seen = 0;

    for (uint32_t s = 0; s < p->n_segs; s++) {
        const struct k3_pass_seg *seg = &p->seg[s];
        uint64_t before = seg->state->positions, n = seg->n_rows;

        bytes += (before + n) * width * sizeof(float);
        seen += n * before + n * (n + 1) / 2; /* row i of them sees before + i + 1 positions */
    }
    count(p, K3_STAGE_LATENT, bytes, seen * c->mla_heads * 2 * (width + c->kv_lora));
    p->times.state_bytes += bytes;
}

void k3_pass_times(const struct k3_pass *p, struct k3_pass_times *out)
{
    *out = p->times;
    out->trunk_wait_ns = out->stage[K3_STAGE_TRUNK_WAIT].ns;
    out->expert_wait_ns = out->stage[K3_STAGE_EXPERT_WAIT].ns;
    for (int i = 0; i < K3_N_STAGES; i++)
        out->flop += out->stage[i].flop;
}
