/* The constraint of a request (constrain/).  The bytes of the ids are read from the model's directory when the first one comes;
 * k3_engine_bytes has room for them. */
#include <errno.h>

#include "k3-computed/computed.h"

static int get_vocab(struct k3_computed *c, const struct k3_vocab **out, struct k3_err *err)
{
    int rc = 0;

    pthread_mutex_lock(&c->vocab_lock);
    if (!c->vocab)
        rc = k3_vocab_open(&c->vocab, c->model_path, err);
    if (rc == 0 && c->vocab->n > c->model->cfg.vocab) {
        rc = k3_refuse(err, -EINVAL, "%s/tiktoken.model has %u tokens, the model's vocabulary %u ids", c->model_path, c->vocab->n,
                       c->model->cfg.vocab);
        k3_vocab_free(c->vocab);
        c->vocab = NULL;
    }
    *out = c->vocab;
    pthread_mutex_unlock(&c->vocab_lock);
    return rc;
}

static int take_generated(const struct k3_submit *s, struct k3_err *err)
{
    struct k3_walk *w;
    int rc = k3_walk_new(&w, err);

    for (uint32_t i = 0; i < s->n_generated && rc == 0; i++) {
        rc = k3_constraint_take(s->constraint, w, s->generated[i]);
        if (rc == 0)
            rc = k3_refuse(err, -EINVAL, "generated_ids[%u] is %u: the constraint of the request does not allow it there", i,
                           s->generated[i]);
        else
            rc = rc < 0 ? k3_fail(err, rc, "no memory for the constraint of %u ids", s->n_generated) : 0;
    }
    k3_walk_free(w);
    return rc;
}

int k3_computed_constrain(struct k3_computed *c, const cJSON *request, struct k3_submit *s, struct k3_err *err)
{
    const cJSON *spec = cJSON_GetObjectItemCaseSensitive(request, "constraint");
    const struct k3_vocab *v;
    int rc;

    if (!spec)
        return 0;
    rc = get_vocab(c, &v, err);
    if (rc == 0)
        rc = k3_constraint_new(&s->constraint, spec, v, c->model->cfg.vocab, err);
    return rc < 0 ? rc : take_generated(s, err);
}
