/* k3-computed/pass_res.c: what is done row by row on the residual stream: attention residuals
 * (spec/model.md 4.6), norms, sums. */
#include <string.h>

#include "k3-computed/pass_private.h"

struct row_job {
    struct k3_pass *p;
    float *y;
    const float *x, *w;
    size_t ld;
    uint32_t n;
    float eps;
};

static void mix_row(void *arg, size_t row, uint32_t worker)
{
    const struct k3_pass *p = ((struct row_job *)arg)->p;
    size_t h = p->c->hidden;
    const float *from[K3_MAX_LAYERS + 1];
    uint32_t n = 0;

    (void)worker;
    for (; n < p->n_snaps; n++)
        from[n] = p->snap + (n * (size_t)p->max_rows + row) * h;
    from[n++] = p->prefix + row * h;
    /* Into x: the prefix is a source itself and has to survive the mix. */
    k3_attnres(p->k, p->x + row * h, from, n, p->f, h, p->c->rms_eps, NULL);
}

void k3_pass_mix(struct k3_pass *p, uint32_t layer, enum k3_resident_role norm,
                 enum k3_resident_role proj)
{
    struct row_job j = { .p = p };

    k3_pass_stage(p, K3_STAGE_RES);
    /* Folded anew for each call: 7168 products against 5.3 MB that would have to stay in memory. */
    p->k->mul_vec(p->f, k3_pass_resident(p, layer, norm), k3_pass_resident(p, layer, proj),
                  p->c->hidden);
    k3_team_run(p->team, p->n_rows, 1, mix_row, &j);
}

static void push_row(void *arg, size_t row, uint32_t worker)
{
    const struct k3_pass *p = ((struct row_job *)arg)->p;
    size_t h = p->c->hidden;

    (void)worker;
    memcpy(p->snap + (p->n_snaps * (size_t)p->max_rows + row) * h, p->prefix + row * h,
           h * sizeof(float));
}

void k3_pass_push(struct k3_pass *p)
{
    struct row_job j = { .p = p };

    k3_pass_stage(p, K3_STAGE_RES);
    k3_team_run(p->team, p->n_rows, 4, push_row, &j);
    p->n_snaps++;
}

static void norm_row(void *arg, size_t row, uint32_t worker)
{
    const struct row_job *j = arg;

    (void)worker;
    k3_rmsnorm(j->p->k, j->y + row * j->ld, j->x + row * j->ld, j->w, j->n, j->eps);
}

void k3_pass_norm(struct k3_pass *p, float *y, const float *x, size_t ld, const float *w,
                  uint32_t n, float eps)
{
    struct row_job j = { .p = p, .y = y, .x = x, .w = w, .ld = ld, .n = n, .eps = eps };

    k3_pass_stage(p, K3_STAGE_NORM);
    k3_team_run(p->team, p->n_rows, 4, norm_row, &j);
}

static void add_row(void *arg, size_t row, uint32_t worker)
{
    const struct row_job *j = arg;
    float *y = j->y + row * j->n;

    (void)worker;
    j->p->k->add(y, y, j->x + row * j->n, j->n);
}

void k3_pass_add(struct k3_pass *p, float *y, const float *x, uint32_t n)
{
    struct row_job j = { .p = p, .y = y, .x = x, .n = n };

    k3_pass_stage(p, K3_STAGE_NORM);
    k3_team_run(p->team, p->n_rows, 8, add_row, &j);
}
