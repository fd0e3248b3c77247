/* k3-computed/pass_kda.c: a KDA layer (spec/model.md 4.4).  Projections for all rows first; then
 * every (sequence, head) pair is one task that walks its rows in order with its state in cache:
 * convolution, norms, decay, recurrence, gate. */
#include <string.h>

#include "k3-computed/pass_private.h"

uint64_t k3_pass_kda_floats(const struct k3_config *c)
{
    uint64_t width = (uint64_t)c->kda_heads * c->kda_dim;

    return 5 * width + c->kda_dim + c->kda_heads; /* q k v z g, bottleneck, beta */
}

uint64_t k3_pass_kda_scratch(const struct k3_config *c)
{
    return 6 * (uint64_t)c->kda_dim; /* q k v alpha o, and what kda_step needs */
}

struct kda_job {
    struct k3_pass *p;
    uint32_t layer;
    float *q, *k, *v; /* projections; the gated head outputs replace q */
    const float *z, *g, *beta;
    const float *conv[3], *a_log, *dt_bias, *o_norm;
    float q_scale;
};

/* Of the head at work: what its sequence's state is after this row. */
static void keep_head(const struct kda_job *j, struct k3_state *keep, size_t head, const float *s, float *const *tail)
{
    size_t d = j->p->c->kda_dim, tail_floats = (j->p->c->conv_taps - 1) * d;

    memcpy(k3_state_s(keep, j->layer) + head * d * d, s, d * d * sizeof(*s));
    for (uint32_t w = 0; w < 3; w++)
        memcpy(k3_state_tail(keep, j->layer, w) + head * tail_floats, tail[w], tail_floats * sizeof(*s));
}

static void kda_head(void *arg, size_t i, uint32_t worker)
{
    const struct kda_job *j = arg;
    struct k3_pass *p = j->p;
    const struct k3_config *c = p->c;
    const struct k3_pass_seg *seg = &p->seg[i / c->kda_heads];
    size_t head = i % c->kda_heads, d = c->kda_dim, width = c->kda_heads * d, taps = c->conv_taps;
    float *s = k3_state_s(seg->state, j->layer) + head * d * d;
    float *tail[3];
    float *q = k3_pass_scratch(p, worker), *k = q + d, *v = k + d, *alpha = v + d, *o = alpha + d,
          *tmp = o + d;
    /* Per head, never per channel: the file pads A_log (spec/model.md 3.8). */
    float ea = k3_expf(j->a_log[head]);

    for (int w = 0; w < 3; w++)
        tail[w] = k3_state_tail(seg->state, j->layer, w) + head * (taps - 1) * d;
    for (uint32_t n = 0; n < seg->n_rows; n++) {
        size_t row = seg->row + n, at = row * width + head * d;

        k3_shortconv(p->k, q, j->q + at, tail[0], j->conv[0] + head * d * taps, d, taps);
        k3_shortconv(p->k, k, j->k + at, tail[1], j->conv[1] + head * d * taps, d, taps);
        k3_shortconv(p->k, v, j->v + at, tail[2], j->conv[2] + head * d * taps, d, taps);
        k3_l2norm(p->k, q, q, d, j->q_scale);
        k3_l2norm(p->k, k, k, d, 1.0f);
        k3_kda_decay(p->k, alpha, j->z + at, j->dt_bias + head * d, ea, c->gate_lower_bound, d);
        p->k->kda_step(s, o, q, k, v, alpha, k3_sigmoidf(j->beta[row * c->kda_heads + head]), d, d,
                       tmp);
        k3_kda_gate(p->k, j->q + at, o, j->o_norm, j->g + at, d, c->rms_eps);
        if (p->rows[row].keep)
            keep_head(j, p->rows[row].keep, head, s, tail);
    }
}

int k3_pass_kda(struct k3_pass *p, uint32_t layer, float *out)
{
    const struct k3_config *c = p->c;
    size_t h = c->hidden, d = c->kda_dim, heads = c->kda_heads, width = heads * d, n = p->max_rows;
    float *q = p->u, *k = q + n * width, *v = k + n * width, *z = v + n * width, *g = z + n * width;
    float *fa = g + n * width, *beta = fa + n * d;
    struct kda_job j = {
        .p = p,
        .layer = layer,
        .q = q,
        .k = k,
        .v = v,
        .z = z,
        .g = g,
        .beta = beta,
        .conv = { k3_pass_resident(p, layer, K3_R_Q_CONV), k3_pass_resident(p, layer, K3_R_K_CONV),
                  k3_pass_resident(p, layer, K3_R_V_CONV) },
        .a_log = k3_pass_resident(p, layer, K3_R_A_LOG),
        .dt_bias = k3_pass_resident(p, layer, K3_R_DT_BIAS),
        .o_norm = k3_pass_resident(p, layer, K3_R_O_NORM),
        .q_scale = 1.0f / __builtin_sqrtf((float)d),
    };
    const struct k3_pass_job first[4] = { K3_PASS_MUL(p, K3_W_KDA_Q, q, width, p->x, h, p->n_rows),
                                          K3_PASS_MUL(p, K3_W_KDA_K, k, width, p->x, h, p->n_rows),
                                          K3_PASS_MUL(p, K3_W_KDA_V, v, width, p->x, h, p->n_rows),
                                          K3_PASS_MUL(p, K3_W_KDA_FA, fa, d, p->x, h, p->n_rows) };
    const struct k3_pass_job second[3] = { K3_PASS_MUL(p, K3_W_KDA_FB, z, width, fa, d, p->n_rows),
                                           K3_PASS_MUL(p, K3_W_KDA_B, beta, heads, p->x, h, p->n_rows),
                                           K3_PASS_MUL(p, K3_W_KDA_G, g, width, p->x, h, p->n_rows) };
    int rc;

    if ((rc = k3_pass_flow(p, layer, first, 4)) < 0 || (rc = k3_pass_flow(p, layer, second, 3)) < 0)
        return rc;
    k3_pass_stage(p, K3_STAGE_KDA);
    k3_pass_count_kda(p);
    k3_team_run(p->team, p->n_segs * heads, 1, kda_head, &j);
    return k3_pass_mul(p, layer, K3_W_KDA_O, out, h, q, width, p->n_rows, NULL);
}
