#include "model/verify.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/pack.h"

int k3_verify_open(struct k3_verify *v, const struct k3_model *m, const struct k3_model_opts *opts, unsigned want, size_t n,
                   const char *how, struct k3_err *err)
{
    struct k3_err open_err = K3_ERR_INIT;
    int rc;

    *v = (struct k3_verify){ NULL, false, NULL };
    if (how && strcmp(how, "off") == 0)
        return 0;
    rc = k3_sums_open(&v->sums, m, opts, want, &open_err);
    if (rc == 0 && want == K3_SUMS_TRUNK)
        rc = k3_pack_check_sums(m, v->sums, &open_err);
    if (rc == -ENOENT && want == K3_SUMS_TRUNK && m->pack_crc)
        rc = k3_sums_of_pack(&v->sums, m, &open_err);
    if (rc == -ENOENT && !how)
        return 0;
    if (rc == -ENOENT)
        return k3_refuse(err, rc, "--verify %s: %s/" K3_SUMS_NAME " is not there: make it (k3ctl verify --model %s --make), "
                         "or leave --verify out: then what has sums is compared", how, opts->dirs[0], opts->dirs[0]);
    if (rc < 0) {
        if (err)
            *err = open_err;
        return rc;
    }
    v->always = how && strcmp(how, "always") == 0;
    v->checked = calloc(n ? n : 1, 1);
    return v->checked ? 0 : k3_fail(err, -ENOMEM, "no memory to mark %zu parts of the weights as right", n);
}

void k3_verify_close(struct k3_verify *v)
{
    k3_sums_free(v->sums);
    free(v->checked);
    *v = (struct k3_verify){ NULL, false, NULL };
}

const char *k3_verify_how(const struct k3_verify *v)
{
    return !v->sums ? "off" : v->always ? "always" : "first";
}
