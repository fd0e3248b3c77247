/* k3-computed/sampling.h: from one vector of logits to one token (design.md section 5 h).
 *
 * Candidates are ordered by (logit descending, id ascending); every filter keeps a prefix of that order:
 *   1. temperature   weight_i = exp((logit_i - max) / temperature), so the first candidate weighs exactly 1
 *   2. top-k         the first top_k candidates
 *   3. top-p         of these the shortest prefix whose weights reach top_p of the weight of all of these
 *   4. min-p         of these the prefix before the first candidate that weighs less than min_p
 *   5. draw          u in [0,1): the first candidate at which the running sum of weights exceeds u * total
 * Temperature 0 is greedy: the first candidate, without any of this.
 *
 * The same logits, parameters, seed and token index give the same token on every machine: everything is IEEE double
 * add, mul and div in a fixed order (totals in ascending id, running sums in candidate order), the exponential is our
 * own, and u depends on (seed, token index) alone. */
#ifndef K3_COMPUTED_SAMPLING_H
#define K3_COMPUTED_SAMPLING_H

#include <stdint.h>

#include "ipc/err.h"

struct k3_sampling {
    double temperature; /* 0 = greedy */
    double top_p;       /* (0, 1]; 1 = off */
    double min_p;       /* [0, 1]; 0 = off */
    uint32_t top_k;     /* 0 = off */
    uint64_t seed;
    const uint64_t *allowed; /* a bit for each id: only these are candidates; NULL: all are */
};

/* -EINVAL and exit 2 with the name of the parameter, its value and what would be right. */
int k3_sampling_check(const struct k3_sampling *p, struct k3_err *err);

struct k3_sampler; /* scratch for one vocabulary; used by one thread at a time */
int k3_sampler_new(struct k3_sampler **out, uint32_t vocab, struct k3_err *err);
void k3_sampler_free(struct k3_sampler *s);
uint64_t k3_sampler_bytes(uint32_t vocab);

/* token_index counts the generated tokens of the answer from 0.  -EDOM with words and exit 4 when a logit is not
 * finite, allowed or not: never a token then.  -ENOENT when no id is allowed. */
int k3_sampler_pick(struct k3_sampler *s, const float *logits, const struct k3_sampling *p, uint64_t token_index,
                    uint32_t *token, struct k3_err *err);

/* 53 random bits as a double in [0, 1). */
double k3_sampling_uniform(uint64_t seed, uint64_t token_index);
/* e^x for x <= 0 (0 below -745.2); within 2 ulp, exactly 1 at 0. */
double k3_sampling_exp(double x);

#endif
