/* k3-computed/sequence.c: the slots with state, and how the rows of a pass are shared among them (engine.h). */
#include <errno.h>
#include <stdlib.h>

#include "k3-computed/engine.h"

int k3_seqs_open(struct k3_seqs *s, uint32_t n, const struct k3_config *c, uint32_t ctx, struct k3_err *err)
{
    s->n = 0;
    if (n > K3_SEQUENCES_MAX)
        return k3_refuse(err, -EINVAL, "%u sequences: at most %u", n, K3_SEQUENCES_MAX);
    s->slot = calloc(n, sizeof(*s->slot));
    if (!s->slot)
        return k3_fail(err, -ENOMEM, "no memory for %u sequences", n);
    for (; s->n < n; s->n++) {
        int rc = k3_state_new(&s->slot[s->n].state, c, ctx, err);

        if (rc < 0)
            return rc; /* k3_seqs_close frees what is there */
        rc = k3_state_touch(s->slot[s->n].state, err);
        s->slot[s->n].held = rc == 0 ? calloc(ctx, sizeof(*s->slot[s->n].held)) : NULL;
        if (rc == 0 && !s->slot[s->n].held)
            rc = k3_fail(err, -ENOMEM, "no memory for the ids of %u positions; lower --ctx", ctx);
        if (rc < 0) {
            k3_state_free(s->slot[s->n].state);
            return rc;
        }
    }
    return 0;
}

void k3_seqs_close(struct k3_seqs *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        k3_state_free(s->slot[i].state);
        free(s->slot[i].held);
    }
    free(s->slot);
    s->slot = NULL;
    s->n = 0;
}

void k3_seqs_rows(const uint32_t *n_left, uint32_t n, uint32_t n_budget, uint32_t *n_rows)
{
    uint32_t n_open = 0;

    for (uint32_t i = 0; i < n; i++) {
        n_rows[i] = n_left[i] && n_budget ? 1 : 0;
        n_budget -= n_rows[i];
        n_open += n_left[i] > n_rows[i] ? 1 : 0;
    }
    while (n_budget && n_open) {
        uint32_t n_part = n_budget / n_open ? n_budget / n_open : 1;

        n_open = 0;
        for (uint32_t i = 0; i < n && n_budget; i++) {
            uint32_t n_more = n_left[i] - n_rows[i];

            n_more = n_more < n_part ? n_more : n_part;
            n_more = n_more < n_budget ? n_more : n_budget;
            n_rows[i] += n_more;
            n_budget -= n_more;
            n_open += n_left[i] > n_rows[i] ? 1 : 0;
        }
    }
}

static int served_before(const void *a, const void *b)
{
    const struct k3_seq *x = *(struct k3_seq *const *)a, *y = *(struct k3_seq *const *)b;

    if (x->last_pass != y->last_pass)
        return x->last_pass < y->last_pass ? -1 : 1;
    return x->admitted < y->admitted ? -1 : x->admitted > y->admitted;
}

uint32_t k3_seqs_plan(struct k3_seqs *s, uint32_t n_budget)
{
    struct k3_seq *order[K3_SEQUENCES_MAX];
    uint32_t n_left[K3_SEQUENCES_MAX], n_rows[K3_SEQUENCES_MAX], n = 0, n_sum = 0;

    for (uint32_t i = 0; i < s->n; i++) {
        s->slot[i].n_rows = 0;
        if (s->slot[i].request)
            order[n++] = &s->slot[i];
    }
    if (n == 0)
        return 0;
    qsort(order, n, sizeof(order[0]), served_before);
    for (uint32_t i = 0; i < n; i++)
        n_left[i] = k3_request_n_run(order[i]->request) - order[i]->n_done;
    k3_seqs_rows(n_left, n, n_budget, n_rows);
    for (uint32_t i = 0; i < n; i++) {
        order[i]->n_rows = n_rows[i];
        n_sum += n_rows[i];
    }
    return n_sum;
}
