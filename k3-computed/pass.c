/* k3-computed/pass.c: one pass over the model, layer by layer for all rows (spec/model.md 0.2).
 *
 * Results are the same bits for any number of rows, threads, row-block size and kernel set: every
 * value that leaves an operator is computed from one row (and its sequence's state) in one order,
 * written in ops.h and kernels.h; work is divided only between values. */
#include "k3-computed/pass.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "k3-computed/pass_private.h"

#define LINE 64u

/* ---- buffers ---- */

struct carver {
    char *base; /* NULL: only the sum is wanted */
    uint64_t bytes;
    bool overflow;
};

/* n * m elements of `size` bytes. */
static void *carve(struct carver *v, uint64_t n, uint64_t m, uint64_t size)
{
    uint64_t bytes, at = v->bytes;

    if (__builtin_mul_overflow(n, m, &bytes) || __builtin_mul_overflow(bytes, size, &bytes) ||
        __builtin_add_overflow(bytes, LINE - 1, &bytes) ||
        __builtin_add_overflow(v->bytes, bytes / LINE * LINE, &v->bytes))
        v->overflow = true;
    return v->base ? v->base + at : NULL;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void carve_all(struct k3_pass *p, struct carver *v, const struct k3_config *c, uint64_t rows)
{
    uint64_t h = c->hidden, layers = (uint64_t)c->n_layers + 1;
    uint64_t snaps = ((uint64_t)c->n_layers + c->res_block - 1) / c->res_block;
    uint64_t u_floats =
        larger(larger(k3_pass_kda_floats(c), k3_pass_mla_floats(c)), k3_pass_mlp_floats(c));

    carve(v, 1, 1, sizeof(*p));
    p->u_floats = u_floats;
    p->n_snaps_max = (uint32_t)snaps;
    p->matrix = carve(v, layers, K3_N_ROLES, sizeof(*p->matrix));
    p->resident = carve(v, layers, K3_N_RESIDENT_ROLES, sizeof(*p->resident));
    p->snap = carve(v, snaps * rows, h, sizeof(float));
    p->prefix = carve(v, rows, h, sizeof(float));
    p->x = carve(v, rows, h, sizeof(float));
    p->y = carve(v, rows, h, sizeof(float));
    p->u = carve(v, rows, u_floats, sizeof(float));
    p->f = carve(v, 1, h, sizeof(float));
    p->ids = carve(v, rows, c->top_k, sizeof(*p->ids));
    p->weights = carve(v, rows, c->top_k, sizeof(*p->weights));
    p->first = carve(v, (uint64_t)c->n_experts + 2, 1, sizeof(*p->first));
    p->pair = carve(v, rows, c->top_k, sizeof(*p->pair));
    p->distinct = carve(v, c->n_experts, 1, sizeof(*p->distinct));
    p->seg = carve(v, rows, 1, sizeof(*p->seg));
}

uint64_t k3_pass_bytes(const struct k3_config *c, uint32_t max_rows)
{
    struct carver v = { NULL, 0, false };
    struct k3_pass p;

    carve_all(&p, &v, c, max_rows);
    return v.overflow ? UINT64_MAX : v.bytes;
}

static uint64_t scratch_floats(const struct k3_config *c, uint32_t ctx)
{
    uint64_t n = larger(k3_pass_kda_scratch(c), larger(k3_pass_mla_scratch(c, ctx), c->n_experts));

    return (n + LINE - 1) / LINE * LINE; /* workers do not share a cache line */
}

uint64_t k3_pass_thread_bytes(const struct k3_config *c, uint32_t ctx)
{
    return scratch_floats(c, ctx) * sizeof(float);
}

static void *map_bytes(uint64_t bytes)
{
    void *at = bytes > SIZE_MAX / 2 ? MAP_FAILED
                                    : mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (at == MAP_FAILED)
        return NULL;
    madvise(at, (size_t)bytes, MADV_HUGEPAGE); /* a product walks over rows that lie whole pages apart; small ones do, too */
    return at;
}

/* ---- new and free ---- */

/* A head of kv_b is the smallest unit of a row block, so pieces may not cut one. */
static int check_heads(const struct k3_model *m, struct k3_err *err)
{
    uint32_t head_rows = m->cfg.qk_nope + m->cfg.v_dim;

    for (size_t i = 0; i < m->n_matrices; i++) {
        const struct k3_matrix *mat = &m->matrices[i];

        if (mat->role != K3_W_MLA_KVB)
            continue;
        for (uint32_t n = 0; n < mat->n_pieces; n++)
            if (m->pieces[mat->first_piece + n].n_rows % head_rows)
                return k3_refuse(err, -ENOTSUP,
                                 "layer %d: a head of kv_b_proj (%u rows of %u) is larger than %u "
                                 "bytes and cannot be "
                                 "streamed whole",
                                 mat->layer, head_rows, mat->n_cols, K3_PIECE_BYTES);
    }
    return 0;
}

static void find_tensors(struct k3_pass *p)
{
    const struct k3_config *c = p->c;

    for (uint32_t l = 0; l <= c->n_layers; l++) {
        int layer = l < c->n_layers ? (int)l : -1;

        for (int r = 0; r < K3_N_ROLES; r++)
            p->matrix[(size_t)l * K3_N_ROLES + r] = (int32_t)k3_model_matrix(p->m, layer, r);
        for (int r = 0; r < K3_N_RESIDENT_ROLES; r++)
            p->resident[(size_t)l * K3_N_RESIDENT_ROLES + r] =
                (int32_t)k3_model_resident(p->m, layer, r);
    }
}

int k3_pass_new(struct k3_pass **out, const struct k3_model *m, const struct k3_kernels *k,
                struct k3_team *team, uint32_t max_rows, struct k3_err *err)
{
    uint64_t bytes = k3_pass_bytes(&m->cfg, max_rows);
    struct carver v = { NULL, 0, false };
    struct k3_pass *p;
    int rc;

    if (max_rows == 0)
        return k3_refuse(err, -EINVAL, "a pass of 0 rows: give --batch-rows of at least 1");
    if ((rc = check_heads(m, err)) < 0)
        return rc;
    v.base = map_bytes(bytes);
    if (!v.base)
        return k3_fail(err, -ENOMEM,
                       "buffers of a pass of %u rows: no %llu bytes of memory; lower --batch-rows",
                       max_rows, (unsigned long long)bytes);
    p = (struct k3_pass *)v.base;
    p->len_bytes = bytes;
    p->m = m;
    p->c = &m->cfg;
    p->k = k;
    p->team = team;
    p->max_rows = max_rows;
    carve_all(p, &v, &m->cfg, max_rows);
    find_tensors(p);
    *out = p;
    return 0;
}

static void free_scratch(struct k3_pass *p)
{
    if (p->scratch)
        munmap(p->scratch, (size_t)(p->scratch_floats * sizeof(float) * k3_team_size(p->team)));
    p->scratch = NULL;
    p->scratch_floats = 0;
}

void k3_pass_free(struct k3_pass *p)
{
    if (!p)
        return;
    free_scratch(p);
    munmap(p, (size_t)p->len_bytes);
}

const float *k3_pass_resident(const struct k3_pass *p, uint32_t layer, enum k3_resident_role role)
{
    int32_t index = p->resident[(size_t)layer * K3_N_RESIDENT_ROLES + role];

    if (index < 0)
        k3_bug("layer %u has no %s", layer, k3_resident_role_name(role));
    return p->src->resident + p->m->residents[index].pos / sizeof(float);
}

/* ---- one pass ---- */

/* All that can be refused is refused here, before any state is touched. */
static int check_rows(struct k3_pass *p, const struct k3_row *rows, uint32_t n_rows,
                      struct k3_err *err)
{
    const struct k3_config *c = p->c;

    if (n_rows == 0 || n_rows > p->max_rows)
        return k3_fail(err, -EINVAL, "pass of %u rows: there is room for 1 to %u", n_rows,
                       p->max_rows);
    p->n_segs = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        const struct k3_row *r = &rows[i];
        struct k3_pass_seg *seg = p->n_segs ? &p->seg[p->n_segs - 1] : NULL;

        if (r->token >= c->vocab)
            return k3_refuse(err, -EINVAL, "token id %u: the vocabulary has ids 0 to %u", r->token,
                             c->vocab - 1);
        if (!seg || seg->state != r->state) {
            for (uint32_t s = 0; s < p->n_segs; s++)
                if (p->seg[s].state == r->state)
                    return k3_fail(err, -EINVAL,
                                   "rows of one sequence are not adjacent in the pass (row %u)", i);
            if (r->state->spoilt)
                return k3_fail(err, -EINVAL,
                               "row %u: the state was spoilt by a failed pass; reset it first", i);
            if (r->state->len_bytes != k3_state_bytes(c, r->state->ctx))
                return k3_fail(err, -EINVAL, "row %u: the state belongs to another model", i);
            seg = &p->seg[p->n_segs++];
            *seg = (struct k3_pass_seg){ r->state, i, 0 };
        }
        if (r->position != r->state->positions + seg->n_rows)
            return k3_fail(err, -EINVAL, "row %u has position %u where the sequence is at %u", i,
                           r->position, r->state->positions + seg->n_rows);
        if (r->position >= r->state->ctx)
            return k3_refuse(err, -ENOSPC,
                             "position %u: the context has room for %u; give more --ctx",
                             r->position, r->state->ctx);
        if (r->keep && (r->keep == r->state || r->keep->ctx <= r->position ||
                        r->keep->len_bytes != k3_state_bytes(c, r->keep->ctx)))
            return k3_fail(err, -EINVAL, "row %u: the state to keep is its own, too small or of another model", i);
        seg->n_rows++;
    }
    return 0;
}

/* The states that rows want kept, after the pass. */
static void keep_states(const struct k3_pass *p, bool spoilt)
{
    for (uint32_t i = 0; i < p->n_rows; i++) {
        const struct k3_row *r = &p->rows[i];

        if (!r->keep)
            continue;
        if (!spoilt)
            k3_state_copy_latent(r->keep, r->state, r->position + 1);
        r->keep->positions = spoilt ? 0 : r->position + 1;
        r->keep->spoilt = spoilt;
    }
}

static int grow_scratch(struct k3_pass *p, struct k3_err *err)
{
    uint32_t ctx = 0;
    uint64_t floats;

    for (uint32_t s = 0; s < p->n_segs; s++)
        if (p->seg[s].state->ctx > ctx)
            ctx = p->seg[s].state->ctx;
    floats = scratch_floats(p->c, ctx);
    if (floats <= p->scratch_floats)
        return 0;
    free_scratch(p);
    p->scratch = map_bytes(floats * sizeof(float) * k3_team_size(p->team));
    if (!p->scratch)
        return k3_fail(err, -ENOMEM,
                       "no memory for %u threads of %llu bytes; lower --threads or --ctx",
                       k3_team_size(p->team), (unsigned long long)(floats * sizeof(float)));
    p->scratch_floats = floats;
    return 0;
}

/* y = attention(x), then prefix = y or prefix + y. */
static int attention(struct k3_pass *p, uint32_t layer, bool boundary)
{
    /* At a boundary the prefix has been pushed and is empty: the output becomes the new one. */
    float *out = boundary ? p->prefix : p->y;
    int rc = p->c->kind[layer] == K3_KDA ? k3_pass_kda(p, layer, out) : k3_pass_mla(p, layer, out);

    if (rc == 0 && !boundary)
        k3_pass_add(p, p->prefix, p->y, p->c->hidden);
    return rc;
}

static int run_layer(struct k3_pass *p, uint32_t layer)
{
    const struct k3_config *c = p->c;
    bool boundary = layer % c->res_block == 0;
    const float *from = p->prefix;
    int rc;

    if (p->n_snaps) { /* not in layer 0 */
        k3_pass_mix(p, layer, K3_R_ATTN_RES_NORM, K3_R_ATTN_RES_PROJ);
        from = p->x;
    }
    if (boundary) /* mixed first, without the new snapshot; the raw prefix is what is pushed */
        k3_pass_push(p);
    k3_pass_norm(p, p->x, from, c->hidden, k3_pass_resident(p, layer, K3_R_INPUT_NORM), c->hidden,
                 c->rms_eps);
    rc = attention(p, layer, boundary);
    if (rc < 0)
        return rc;
    k3_pass_mix(p, layer, K3_R_MLP_RES_NORM, K3_R_MLP_RES_PROJ);
    k3_pass_norm(p, p->x, p->x, c->hidden, k3_pass_resident(p, layer, K3_R_POST_NORM), c->hidden,
                 c->rms_eps);
    rc = k3_layer_is_dense(c, layer) ? k3_pass_dense(p, layer) : k3_pass_moe(p, layer);
    if (rc < 0)
        return rc;
    k3_pass_add(p, p->prefix, p->y, c->hidden);
    return 0;
}

/* Final mix, norm and lm_head for the rows that want logits. */
static int finish(struct k3_pass *p, float *logits)
{
    const struct k3_config *c = p->c;
    size_t h = c->hidden;
    uint32_t n = p->n_logits;

    if (n == 0 && !(p->hooks && p->hooks->layer_out))
        return 0;
    k3_pass_mix(p, c->n_layers, K3_R_OUT_RES_NORM, K3_R_OUT_RES_PROJ);
    if (p->hooks && p->hooks->layer_out)
        p->hooks->layer_out(p->hooks->arg, c->n_layers, p->x, p->n_rows);
    if (n == 0)
        return 0;
    k3_pass_norm(p, p->x, p->x, h, k3_pass_resident(p, c->n_layers, K3_R_FINAL_NORM), c->hidden,
                 c->rms_eps);
    n = 0;
    for (uint32_t i = 0; i < p->n_rows; i++)
        if (p->rows[i].want_logits)
            memmove(p->x + n++ * h, p->x + i * h, h * sizeof(float));
    return k3_pass_mul(p, c->n_layers, K3_W_LM_HEAD, logits, c->vocab, p->x, h, n, NULL);
}

static int run_all(struct k3_pass *p, float *logits)
{
    const struct k3_config *c = p->c;
    const struct k3_pass_hooks *hooks = p->hooks;
    int rc;

    k3_pass_stage(p, K3_STAGE_EMBED);
    k3_pass_count_embed(p);
    for (uint32_t i = 0; i < p->n_rows; i++)
        if ((rc = p->src->embed(p->src->self, p->rows[i].token, p->prefix + (size_t)i * c->hidden,
                                p->err)) < 0)
            return rc;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        k3_pass_stage(p, K3_STAGE_OTHER);
        if (hooks && hooks->progress && (rc = hooks->progress(hooks->arg, l, c->n_layers)) != 0)
            return k3_fail(p->err, rc < 0 ? rc : -ECANCELED, "pass cancelled at layer %u of %u", l,
                           c->n_layers);
        if ((rc = run_layer(p, l)) < 0)
            return rc;
        if (hooks && hooks->layer_out)
            hooks->layer_out(hooks->arg, l, p->prefix, p->n_rows);
        if (hooks && hooks->look && hooks->look_k && l + 1 < c->n_layers && !k3_layer_is_dense(c, l + 1))
            k3_pass_look(p, l + 1);
    }
    if ((rc = finish(p, logits)) < 0)
        return rc;
    k3_pass_stage(p, K3_STAGE_OTHER);
    return p->src->next_pass(p->src->self, p->err);
}

int k3_pass_run(struct k3_pass *p, struct k3_source *src, const struct k3_row *rows,
                uint32_t n_rows, float *logits, const struct k3_pass_hooks *hooks,
                struct k3_err *err)
{
    uint64_t t0 = k3_now_ns();
    int rc;

    if ((rc = check_rows(p, rows, n_rows, err)) < 0 || (rc = grow_scratch(p, err)) < 0)
        return rc;
    p->src = src;
    p->rows = rows;
    p->n_rows = n_rows;
    p->hooks = hooks;
    p->err = err;
    p->n_snaps = 0;
    p->next_matrix = 0;
    p->experts_open = false;
    p->n_logits = 0;
    for (uint32_t i = 0; i < n_rows; i++)
        p->n_logits += rows[i].want_logits;
    memset(&p->times, 0, sizeof(p->times));
    p->stage = K3_STAGE_OTHER;
    p->stage_ns = t0;
    rc = run_all(p, logits);
    if (rc < 0) {
        struct k3_err second = K3_ERR_INIT; /* the first words are the ones that count */

        if (p->experts_open)
            src->experts_abandon(src->self);
        for (uint32_t s = 0; s < p->n_segs; s++)
            p->seg[s].state->spoilt = true;
        src->failed_pass(src->self, &second);
    } else {
        for (uint32_t s = 0; s < p->n_segs; s++)
            p->seg[s].state->positions += p->seg[s].n_rows;
    }
    keep_states(p, rc < 0);
    k3_pass_stage(p, K3_STAGE_OTHER);
    p->times.total_ns = p->stage_ns - t0;
    return rc;
}
