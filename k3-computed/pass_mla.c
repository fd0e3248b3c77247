/* k3-computed/pass_mla.c: a gated MLA layer (spec/model.md 4.5), always in the absorbed form: the
 * cache holds the latent and the shared key, kv_b is folded into the query and applied to the mixed
 * latents, head by head as it streams by. */
#include <string.h>

#include "k3-computed/pass_private.h"

#define ROWS_AT_ONCE 16 /* rows of one task: the head's W is read once for all of them */

uint64_t k3_pass_mla_floats(const struct k3_config *c)
{
    uint64_t heads = c->mla_heads;

    /* bottleneck, q, latent and shared key, head outputs, gate */
    return c->q_lora + heads * ((uint64_t)c->qk_nope + c->qk_rope) + c->kv_lora + c->qk_rope +
           2 * heads * c->v_dim;
}

uint64_t k3_pass_mla_scratch(const struct k3_config *c, uint32_t ctx)
{
    return (uint64_t)c->kv_lora + c->qk_rope + (uint64_t)ROWS_AT_ONCE * c->kv_lora +
           k3_attend_scratch(ctx, c->kv_lora);
}

struct mla_job {
    struct k3_pass *p;
    uint32_t layer;
    float *kv; /* [row][kv_lora + qk_rope] as projected */
    const float *kv_norm;
    const float *q;  /* [row][heads][qk_nope + qk_rope] */
    float *o, *gate; /* [row][heads][v_dim] */
    float scale;
    /* of the block of heads at work */
    const char *w;
    enum k3_dtype dtype;
    size_t head_bytes;
    uint32_t head, n_heads, rows_at_once;
};

static void append_row(void *arg, size_t row, uint32_t worker)
{
    const struct mla_job *j = arg;
    const struct k3_pass *p = j->p;
    const struct k3_config *c = p->c;
    size_t lat = c->kv_lora, width = lat + c->qk_rope;
    const float *from = j->kv + row * width;
    float *to = k3_state_kv(p->rows[row].state, j->layer) + p->rows[row].position * width;

    (void)worker;
    /* The shared key is neither normed nor rotated. */
    k3_rmsnorm(p->k, to, from, j->kv_norm, lat, c->latent_eps);
    memcpy(to + lat, from + lat, c->qk_rope * sizeof(float));
}

/* One head for a few rows: q_abs = W_K^T q_c; attend; o = W_V o_lat. */
static void mla_head(void *arg, size_t i, uint32_t worker)
{
    const struct mla_job *j = arg;
    struct k3_pass *p = j->p;
    const struct k3_config *c = p->c;
    size_t lat = c->kv_lora, rope = c->qk_rope, nope = c->qk_nope, width = lat + rope;
    size_t nth = i % j->n_heads, head = j->head + nth;
    uint32_t r0 = (uint32_t)(i / j->n_heads) * j->rows_at_once;
    uint32_t n = p->n_rows - r0 < j->rows_at_once ? p->n_rows - r0 : j->rows_at_once;
    const char *wk = j->w + nth * j->head_bytes;
    const char *wv = wk + nope * lat * k3_dtype_bytes(j->dtype);
    float *q_abs = k3_pass_scratch(p, worker), *o_lat = q_abs + width,
          *tmp = o_lat + ROWS_AT_ONCE * lat;

    for (uint32_t r = 0; r < n; r++) {
        const struct k3_row *row = &p->rows[r0 + r];
        const float *q = j->q + ((r0 + r) * (size_t)c->mla_heads + head) * (nope + rope);

        memset(q_abs, 0, lat * sizeof(float));
        p->k->mul_t[j->dtype](q_abs, q, wk, lat, nope, lat);
        memcpy(q_abs + lat, q + nope, rope * sizeof(float));
        k3_attend(p->k, o_lat + r * lat, q_abs, k3_state_kv(row->state, j->layer), width,
                  (size_t)row->position + 1, lat, rope, j->scale, tmp);
    }
    p->k->mul[j->dtype](j->o + (r0 * (size_t)c->mla_heads + head) * c->v_dim,
                        (size_t)c->mla_heads * c->v_dim, wv, c->v_dim, lat, o_lat, lat, n);
}

static void heads_block(void *arg, const struct k3_matrix *mat, const void *w, uint32_t row,
                        uint32_t n_rows)
{
    struct mla_job *j = arg;
    struct k3_pass *p = j->p;
    uint32_t head_rows = p->c->qk_nope + p->c->v_dim, parts;
    uint32_t tasks = k3_team_size(p->team) * 4;

    j->w = w;
    j->dtype = mat->dtype;
    j->head = row / head_rows;
    j->n_heads = n_rows / head_rows;
    j->head_bytes = (size_t)head_rows * mat->n_cols * k3_dtype_bytes(mat->dtype);
    parts = (tasks + j->n_heads - 1) / j->n_heads;
    j->rows_at_once = (p->n_rows + parts - 1) / parts;
    if (j->rows_at_once > ROWS_AT_ONCE)
        j->rows_at_once = ROWS_AT_ONCE;
    k3_team_run(p->team, (size_t)j->n_heads * ((p->n_rows + j->rows_at_once - 1) / j->rows_at_once),
                1, mla_head, j);
}

static void gate_row(void *arg, size_t row, uint32_t worker)
{
    const struct mla_job *j = arg;
    size_t n = (size_t)j->p->c->mla_heads * j->p->c->v_dim;
    float *o = j->o + row * n, *g = j->gate + row * n;

    (void)worker;
    j->p->k->sigmoid(g, g, n);
    j->p->k->mul_vec(o, o, g, n);
}

int k3_pass_mla(struct k3_pass *p, uint32_t layer, float *out)
{
    const struct k3_config *c = p->c;
    size_t h = c->hidden, n = p->max_rows, head = (size_t)c->qk_nope + c->qk_rope,
           width = (size_t)c->kv_lora + c->qk_rope;
    size_t q_width = c->mla_heads * head, o_width = (size_t)c->mla_heads * c->v_dim;
    float *qa = p->u, *q = qa + n * c->q_lora, *kv = q + n * q_width, *o = kv + n * width,
          *gate = o + n * o_width;
    struct mla_job j = {
        .p = p,
        .layer = layer,
        .kv = kv,
        .kv_norm = k3_pass_resident(p, layer, K3_R_KVA_NORM),
        .q = q,
        .o = o,
        .gate = gate,
        .scale = 1.0f / __builtin_sqrtf((float)head), /* the shared part counts in the scale */
    };
    int rc;

    if ((rc = k3_pass_mul(p, layer, K3_W_MLA_QA, qa, c->q_lora, p->x, h, p->n_rows, NULL)) < 0)
        return rc;
    k3_pass_norm(p, qa, qa, c->q_lora, k3_pass_resident(p, layer, K3_R_QA_NORM), c->q_lora,
                 c->latent_eps);
    if ((rc = k3_pass_mul(p, layer, K3_W_MLA_QB, q, q_width, qa, c->q_lora, p->n_rows, NULL)) < 0 ||
        (rc = k3_pass_mul(p, layer, K3_W_MLA_KVA, kv, width, p->x, h, p->n_rows, NULL)) < 0)
        return rc;
    k3_pass_stage(p, K3_STAGE_LATENT);
    k3_pass_count_latent(p);
    k3_team_run(p->team, p->n_rows, 4, append_row, &j);
    /* All rows are in the cache now; each sees its own sequence up to itself. */
    if ((rc = k3_pass_blocks(p, layer, K3_W_MLA_KVB, c->qk_nope + c->v_dim, heads_block, &j)) < 0)
        return rc;
    if (c->mla_gate) {
        if ((rc = k3_pass_mul(p, layer, K3_W_MLA_G, gate, o_width, p->x, h, p->n_rows, NULL)) < 0)
            return rc;
        k3_pass_stage(p, K3_STAGE_LATENT);
        k3_team_run(p->team, p->n_rows, 1, gate_row, &j);
    }
    return k3_pass_mul(p, layer, K3_W_MLA_O, out, h, o, o_width, p->n_rows, NULL);
}
