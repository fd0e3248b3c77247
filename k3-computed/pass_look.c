/* k3-computed/pass_look.c: a guess at the next layer's experts: its router gate on the residual stream as it is before its
 * attention, through the mix and the norm that its MLP will use.  Between two layers p->x and p->u hold nothing, so the
 * guess leaves no trace in the result. */
#include "k3-computed/pass_private.h"

struct look_job {
    const struct k3_pass *p;
    const float *logits, *bias;
    uint16_t *ids;
    uint32_t k;
};

static void look_row(void *arg, size_t row, uint32_t worker)
{
    const struct look_job *j = arg;
    const struct k3_config *c = j->p->c;

    k3_choose(j->p->k, j->ids + row * j->k, j->logits + row * c->n_experts, j->bias, c->n_experts, j->k,
              k3_pass_scratch(j->p, worker));
}

void k3_pass_look(struct k3_pass *p, uint32_t next)
{
    const struct k3_config *c = p->c;
    const struct k3_matrix *gate;
    struct look_job j = { .p = p, .k = p->hooks->look_k };
    const void *w[K3_LOOK_PIECES];
    float *logits = p->u;
    int32_t index = p->matrix[(size_t)next * K3_N_ROLES + K3_W_ROUTER];

    if (!p->src->pinned || index < 0)
        return;
    gate = &p->m->matrices[index];
    if (gate->n_pieces > K3_LOOK_PIECES)
        return;
    for (uint32_t i = 0; i < gate->n_pieces; i++)
        if (!(w[i] = p->src->pinned(p->src->self, gate->first_piece + i)))
            return;
    if (c->n_experts + (j.k + 1) / 2 > p->u_floats || j.k > c->n_experts)
        k3_bug("look-ahead of %u experts: rows have %llu floats", j.k, (unsigned long long)p->u_floats);
    k3_pass_mix(p, next, K3_R_MLP_RES_NORM, K3_R_MLP_RES_PROJ);
    k3_pass_norm(p, p->x, p->x, c->hidden, k3_pass_resident(p, next, K3_R_POST_NORM), c->hidden, c->rms_eps);
    k3_pass_stage(p, K3_STAGE_ROUTER);
    k3_pass_count_matrix(p, gate);
    for (uint32_t i = 0; i < gate->n_pieces; i++) {
        const struct k3_piece *piece = &p->m->pieces[gate->first_piece + i];

        k3_pass_mul_block(p, gate, w[i], piece->row, piece->n_rows, logits, c->n_experts, p->x, c->hidden);
    }
    j.logits = logits;
    j.bias = k3_pass_resident(p, next, K3_R_ROUTER_BIAS);
    j.ids = (uint16_t *)(logits + (size_t)p->n_rows * c->n_experts);
    k3_team_run(p->team, p->n_rows, 1, look_row, &j);
    p->hooks->look(p->hooks->arg, next, j.ids, p->n_rows, j.k);
}
