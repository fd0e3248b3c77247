/* k3-computed/pass_moe.c: the MLPs: dense (spec/model.md 4.9) and LatentMoE (4.7).  Order: router;
 * the demands leave; latent down and the shared experts are multiplied while they are read; then
 * each distinct expert once, ascending, for the rows that chose it; latent up.  The one place where
 * a pass waits for an expert. */
#include <string.h>

#include "k3-computed/pass_private.h"

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

uint64_t k3_pass_mlp_floats(const struct k3_config *c)
{
    uint64_t dense = c->first_dense ? 2 * (uint64_t)c->dense_inter : 0;
    /* z and the weighted sum stay; router logits, shared gate and up, one expert's rows, routed
     * output share a place. */
    uint64_t part = max_u64(c->n_experts, 2 * (uint64_t)c->n_shared * c->moe_inter);

    part = max_u64(part, 2 * (uint64_t)c->latent + 2 * (uint64_t)c->moe_inter);
    part = max_u64(part, c->hidden);
    return max_u64(dense, c->first_dense < c->n_layers ? 2 * (uint64_t)c->latent + part : 0);
}

int k3_pass_dense(struct k3_pass *p, uint32_t layer)
{
    size_t h = p->c->hidden, inter = p->c->dense_inter;
    float *gate = p->u, *up = gate + p->max_rows * inter;
    int rc;

    if ((rc = k3_pass_mul(p, layer, K3_W_DENSE_GATE, gate, inter, p->x, h, p->n_rows, NULL)) < 0 ||
        (rc = k3_pass_mul(p, layer, K3_W_DENSE_UP, up, inter, p->x, h, p->n_rows, gate)) < 0)
        return rc;
    return k3_pass_mul(p, layer, K3_W_DENSE_DOWN, p->y, h, gate, inter, p->n_rows, NULL);
}

struct moe_job {
    struct k3_pass *p;
    const float *logits, *bias;
    float *acc;
    /* of the expert at work */
    const struct k3_expert_view *view;
    const uint32_t *pair;
    uint32_t n, tile;
    const float *x;
    float *g, *up, *d;
};

static void route_row(void *arg, size_t row, uint32_t worker)
{
    const struct moe_job *j = arg;
    const struct k3_pass *p = j->p;
    const struct k3_config *c = p->c;

    k3_route(p->k, p->ids + row * c->top_k, p->weights + row * c->top_k,
             j->logits + row * c->n_experts, j->bias, c->n_experts, c->top_k, c->renormalize,
             c->routed_scale, k3_pass_scratch(p, worker));
}

/* Turns ids by row into rows by expert; returns the number of distinct experts. */
static uint32_t sort_pairs(struct k3_pass *p)
{
    uint32_t n_pairs = p->n_rows * p->c->top_k, n_experts = p->c->n_experts, n = 0;
    uint32_t *first = p->first;

    /* first[e + 1]: where the next pair of e goes; in the end where those of e + 1 begin. */
    memset(first, 0, ((size_t)n_experts + 2) * sizeof(*first));
    for (uint32_t i = 0; i < n_pairs; i++)
        first[p->ids[i] + 2]++;
    for (uint32_t e = 0; e < n_experts; e++) {
        if (first[e + 2])
            p->distinct[n++] = (uint16_t)e;
        first[e + 2] += first[e + 1];
    }
    for (uint32_t i = 0; i < n_pairs; i++)
        p->pair[first[p->ids[i] + 1]++] = i;
    return n;
}

/* One tile of the inner width: g = situ(w1 x, w3 x), split for w2. */
static void expert_inner(void *arg, size_t i, uint32_t worker)
{
    const struct moe_job *j = arg;
    const struct k3_config *c = j->p->c;
    const struct k3_kernels *k = j->p->k;
    size_t lat = c->latent, inter = c->moe_inter, o = i * j->tile,
           n_out = inter - o < j->tile ? inter - o : j->tile;
    size_t packed = o * (lat / 2), scale = o * (lat / 32);
    const uint8_t *const *t = j->view->tensor;

    (void)worker;
    k->mul_mxfp4(j->g + o, inter, t[0] + packed, t[1] + scale, n_out, lat, j->x, lat, j->n);
    k->mul_mxfp4(j->up + o, inter, t[4] + packed, t[5] + scale, n_out, lat, j->x, lat, j->n);
    for (uint32_t r = 0; r < j->n; r++) {
        float *g = j->g + r * inter + o;

        k->situ(g, g, j->up + r * inter + o, n_out, c->situ_beta, c->situ_linear_beta);
        k->split(g, g, n_out);
    }
}

/* One tile of the latent width: acc[row] = fma(weight, w2 g, acc[row]). */
static void expert_outer(void *arg, size_t i, uint32_t worker)
{
    const struct moe_job *j = arg;
    const struct k3_config *c = j->p->c;
    const struct k3_kernels *k = j->p->k;
    size_t lat = c->latent, inter = c->moe_inter, o = i * j->tile,
           n_out = lat - o < j->tile ? lat - o : j->tile;
    const uint8_t *const *t = j->view->tensor;

    (void)worker;
    k->mul_mxfp4(j->d + o, lat, t[2] + o * (inter / 2), t[3] + o * (inter / 32), n_out, inter, j->g,
                 inter, j->n);
    for (uint32_t r = 0; r < j->n; r++) {
        uint32_t pair = j->pair[r];

        k->axpy(j->acc + (pair / c->top_k) * lat + o, j->p->weights[pair], j->d + r * lat + o,
                n_out);
    }
}

static int routed_experts(struct k3_pass *p, uint32_t n_distinct, const float *z, float *acc,
                          float *part)
{
    const struct k3_config *c = p->c;
    size_t lat = c->latent, inter = c->moe_inter, n = p->max_rows;
    float *x = part, *d = x + n * lat, *g = d + n * lat, *up = g + n * inter;
    struct moe_job j = { .p = p, .acc = acc, .x = x, .g = g, .up = up, .d = d };

    memset(acc, 0, p->n_rows * lat * sizeof(float));
    for (uint32_t i = 0; i < n_distinct; i++) {
        struct k3_expert_view view;
        uint32_t e = p->distinct[i], tasks;
        int rc;

        k3_pass_stage(p, K3_STAGE_EXPERT_WAIT);
        rc = p->src->expert_next(p->src->self, &view, p->err);
        k3_pass_stage(p, K3_STAGE_EXPERTS);
        if (rc < 0)
            return rc;
        if (view.expert != e)
            k3_bug("expert %u came where expert %u was asked for", view.expert, e);
        j.view = &view;
        j.pair = p->pair + p->first[e];
        j.n = p->first[e + 1] - p->first[e];
        k3_pass_count_expert(p, j.n);
        for (uint32_t r = 0; r < j.n; r++)
            p->k->split(x + r * lat, z + (j.pair[r] / c->top_k) * lat, lat);
        tasks = j.n < K3_MANY_ROWS ? 1 : 2;
        j.tile = (k3_pass_tile(p, c->moe_inter / tasks) + 31) / 32 * 32; /* whole groups, to split them */
        k3_team_run(p->team, (inter + j.tile - 1) / j.tile, 1, expert_inner, &j);
        j.tile = k3_pass_tile(p, c->latent / tasks);
        k3_team_run(p->team, (lat + j.tile - 1) / j.tile, 1, expert_outer, &j);
        p->src->expert_release(p->src->self, &view);
        p->times.routed_rows += j.n;
    }
    p->times.distinct_experts += n_distinct;
    p->experts_open = false;
    return 0;
}

int k3_pass_moe(struct k3_pass *p, uint32_t layer)
{
    const struct k3_config *c = p->c;
    size_t h = c->hidden, lat = c->latent, sh = (size_t)c->n_shared * c->moe_inter,
           n = p->max_rows;
    float *z = p->u, *acc = z + n * lat, *part = acc + n * lat;
    float *gate = part, *up = gate + n * sh;
    struct moe_job j = { .p = p,
                         .logits = part,
                         .bias = k3_pass_resident(p, layer, K3_R_ROUTER_BIAS) };
    const struct k3_pass_job first[2] = { K3_PASS_MUL(p, K3_W_LATENT_DOWN, z, lat, p->x, h, p->n_rows),
                                          K3_PASS_MUL(p, K3_W_SHARED_GATE, gate, sh, p->x, h, p->n_rows) };
    uint32_t n_distinct;
    int rc;

    if ((rc = k3_pass_mul(p, layer, K3_W_ROUTER, part, c->n_experts, p->x, h, p->n_rows, NULL)) < 0)
        return rc;
    k3_team_run(p->team, p->n_rows, 1, route_row, &j);
    n_distinct = sort_pairs(p);
    if (p->hooks && p->hooks->route)
        for (uint32_t r = 0; r < p->n_rows; r++)
            p->hooks->route(p->hooks->arg, layer, r, p->ids + r * c->top_k,
                            p->weights + r * c->top_k, c->top_k);
    if ((rc = p->src->experts_begin(p->src->self, layer, p->distinct, n_distinct, p->err)) < 0)
        return rc;
    p->experts_open = true;
    if ((rc = k3_pass_flow(p, layer, first, 2)) < 0 ||
        (rc = k3_pass_mul(p, layer, K3_W_SHARED_UP, up, sh, p->x, h, p->n_rows, gate)) < 0 ||
        (rc = k3_pass_mul(p, layer, K3_W_SHARED_DOWN, p->y, h, gate, sh, p->n_rows, NULL)) < 0 ||
        (rc = routed_experts(p, n_distinct, z, acc, part)) < 0)
        return rc;
    if (c->latent_norm)
        k3_pass_norm(p, acc, acc, lat, k3_pass_resident(p, layer, K3_R_EXPERT_NORM), c->latent,
                     c->rms_eps);
    if ((rc = k3_pass_mul(p, layer, K3_W_LATENT_UP, part, h, acc, lat, p->n_rows, NULL)) < 0)
        return rc;
    k3_pass_add(p, p->y, part, c->hidden); /* shared + routed */
    return 0;
}
