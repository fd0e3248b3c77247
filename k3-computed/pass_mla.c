/* k3-computed/pass_mla.c: a gated MLA layer (spec/model.md 4.5), always in the absorbed form: the
 * cache holds the latent and the shared key, kv_b is folded into the query and applied to the mixed
 * latents, head by head as it streams by. */
#include <string.h>

#include "k3-computed/pass_private.h"

#define QUERIES K3_ATTEND_QUERIES
#define ABSORB_COLS 128

uint64_t k3_pass_mla_floats(const struct k3_config *c)
{
    uint64_t heads = c->mla_heads;

    /* bottleneck, q, latent and shared key, head outputs, gate */
    return c->q_lora + heads * ((uint64_t)c->qk_nope + c->qk_rope) + c->kv_lora + c->qk_rope +
           2 * heads * c->v_dim;
}

uint64_t k3_pass_mla_scratch(const struct k3_config *c, uint32_t ctx)
{
    return QUERIES * (2 * (uint64_t)c->kv_lora + c->qk_rope) + k3_attend_scratch(QUERIES, ctx, c->kv_lora);
}

struct mla_job {
    struct k3_pass *p;
    uint32_t layer;
    float *kv; /* [row][kv_lora + qk_rope] as projected */
    const float *kv_norm;
    const float *q;  /* [row][heads][qk_nope + qk_rope] */
    float *o, *gate; /* [row][heads][v_dim] */
    float scale;
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

/* A query of one head and one row. */
struct query {
    const char *wk; /* of its head: W_K [qk_nope][kv_lora], then W_V [v_dim][kv_lora] */
    size_t head, row;
};

/* q_abs = W_K^T q_c, then the shared part. */
static void absorb(const struct mla_job *j, float *q_abs, const struct query *at, size_t n, enum k3_dtype dtype)
{
    const struct k3_config *c = j->p->c;
    size_t lat = c->kv_lora, rope = c->qk_rope, nope = c->qk_nope, width = lat + rope;

    for (size_t i = 0; i < n; i++)
        memset(q_abs + i * width, 0, lat * sizeof(float));
    for (size_t m = 0; m < lat; m += ABSORB_COLS) /* these columns of W_K stay in the cache for all rows of a head */
        for (size_t i = 0; i < n; i++) {
            const float *q = j->q + (at[i].row * c->mla_heads + at[i].head) * (nope + rope);

            j->p->k->mul_t[dtype](q_abs + i * width + m, q, at[i].wk + m * k3_dtype_bytes(dtype), lat, nope,
                                  lat - m < ABSORB_COLS ? lat - m : ABSORB_COLS);
            if (m == 0)
                memcpy(q_abs + i * width + lat, q + nope, rope * sizeof(float));
        }
}

/* Queries of one sequence: absorb, attend, o = W_V o_lat. */
static void attend(const struct mla_job *j, const struct query *at, size_t n, enum k3_dtype dtype, uint32_t worker)
{
    struct k3_pass *p = j->p;
    const struct k3_config *c = p->c;
    size_t lat = c->kv_lora, width = lat + c->qk_rope, o_row = (size_t)c->mla_heads * c->v_dim;
    float *q_abs = k3_pass_scratch(p, worker), *o_lat = q_abs + QUERIES * width, *tmp = o_lat + QUERIES * lat;
    struct k3_state *state = p->rows[at[0].row].state;
    size_t n_seen[QUERIES];

    absorb(j, q_abs, at, n, dtype);
    for (size_t i = 0; i < n; i++)
        n_seen[i] = (size_t)p->rows[at[i].row].position + 1;
    k3_attend(p->k, o_lat, q_abs, n, k3_state_kv(state, j->layer), width, n_seen, lat, c->qk_rope, j->scale, tmp);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && at[end].head == at[i].head; end++)
            ; /* rows of a head follow one another */
        p->k->mul[dtype](j->o + at[i].row * o_row + at[i].head * c->v_dim, o_row,
                         at[i].wk + c->qk_nope * lat * k3_dtype_bytes(dtype), c->v_dim, lat, o_lat + i * lat, lat, end - i);
    }
}

/* Some heads of the block for some rows. */
static void attend_heads(const struct k3_pass_job *job, const struct k3_matrix *mat, const void *w, uint32_t row,
                         uint32_t n_rows, uint32_t x, uint32_t n_x, uint32_t worker)
{
    const struct mla_job *j = job->arg;
    const struct k3_pass *p = j->p;
    size_t head_bytes = (size_t)job->unit * mat->n_cols * k3_dtype_bytes(mat->dtype);

    for (uint32_t r = x, end; r < x + n_x; r = end) { /* rows of one sequence */
        struct query at[QUERIES];
        size_t n = 0;

        for (end = r + 1; end < x + n_x && p->rows[end].state == p->rows[r].state; end++)
            ;
        for (uint32_t head = 0; head < n_rows / job->unit; head++)
            for (uint32_t i = r; i < end; i++) {
                at[n++] = (struct query){ (const char *)w + head * head_bytes, row / job->unit + head, i };
                if (n == QUERIES || (i + 1 == end && head + 1 == n_rows / job->unit)) {
                    attend(j, at, n, mat->dtype, worker);
                    n = 0;
                }
            }
    }
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
    const struct k3_pass_job down[2] = { K3_PASS_MUL(p, K3_W_MLA_QB, q, q_width, qa, c->q_lora, p->n_rows),
                                         K3_PASS_MUL(p, K3_W_MLA_KVA, kv, width, p->x, h, p->n_rows) };
    /* Few rows: several heads to a task, which read the cache together. */
    const struct k3_pass_job heads = { .p = p, .role = K3_W_MLA_KVB, .unit = c->qk_nope + c->v_dim, .n_rows = p->n_rows,
                                       .x_rows = 2 * QUERIES, .few_parts = p->n_rows < QUERIES, .fn = attend_heads, .arg = &j };
    int rc;

    if ((rc = k3_pass_mul(p, layer, K3_W_MLA_QA, qa, c->q_lora, p->x, h, p->n_rows, NULL)) < 0)
        return rc;
    k3_pass_norm(p, qa, qa, c->q_lora, k3_pass_resident(p, layer, K3_R_QA_NORM), c->q_lora,
                 c->latent_eps);
    if ((rc = k3_pass_flow(p, layer, down, 2)) < 0)
        return rc;
    k3_pass_stage(p, K3_STAGE_LATENT);
    k3_pass_count_latent(p);
    k3_team_run(p->team, p->n_rows, 4, append_row, &j);
    /* All rows are in the cache now; each sees its own sequence up to itself. */
    if ((rc = k3_pass_flow(p, layer, &heads, 1)) < 0)
        return rc;
    if (c->mla_gate) {
        if ((rc = k3_pass_mul(p, layer, K3_W_MLA_G, gate, o_width, p->x, h, p->n_rows, NULL)) < 0)
            return rc;
        k3_pass_stage(p, K3_STAGE_LATENT);
        k3_team_run(p->team, p->n_rows, 1, gate_row, &j);
    }
    return k3_pass_mul(p, layer, K3_W_MLA_O, out, h, o, o_width, p->n_rows, NULL);
}
