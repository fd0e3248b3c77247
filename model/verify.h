/* model/verify.h: --verify of the weight daemons: which sums there are to compare with, and what was right already. */
#ifndef K3_MODEL_VERIFY_H
#define K3_MODEL_VERIFY_H

#include "model/sums.h"

#define K3_VERIFY_NOTE "no " K3_SUMS_NAME " in the model directory (k3ctl verify --make)"

struct k3_verify {
    struct k3_sums *sums; /* NULL: off */
    bool always;          /* else each thing until it was right once */
    uint8_t *checked;     /* per piece or per expert: it was right */
};
/* how: "off", "first" or "always", or NULL for first where there are sums and off where there are none.  want:
 * K3_SUMS_TRUNK (a packed trunk without k3.sums has its own) or K3_SUMS_EXPERTS.  m was opened with opts.  n: things to
 * keep a mark of.  Refused (exit 2): first or always without sums, and what k3_sums_open() refuses.
 * k3_verify_close() after success and failure alike. */
int k3_verify_open(struct k3_verify *v, const struct k3_model *m, const struct k3_model_opts *opts, unsigned want, size_t n,
                   const char *how, struct k3_err *err);
void k3_verify_close(struct k3_verify *v);
const char *k3_verify_how(const struct k3_verify *v); /* "off", "first", "always", for info */

#endif
