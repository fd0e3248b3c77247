/* k3-computed/sampling.h: from one vector of logits to one token (design.md section 5 h).
 *
 * What a request asks for changes the logits first (k3_sampler_adjust), id by id, in double, rounded to float once:
 *   a. bias          x = logit + bias of the id
 *   b. repeat        of an id that the answer holds: x / repeat_penalty where x > 0, else x * repeat_penalty
 *   c. frequency, presence   of the same: x - n * frequency_penalty - presence_penalty, n: how often the answer holds it
 * The answer is what has been generated, not the prompt; n is counted anew from its ids each time, so it is the same after a
 * restart.  With nothing of this asked the logits are used as they are.
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
 * own, and u depends on (seed, token index) alone.
 *
 * Log probabilities (k3_sampler_logprobs) are those of the model: log softmax of the logits as they came, before bias,
 * penalties, masks, temperature and filters.  So they say what the model thinks of an id whatever the request asks for, mean
 * the same at temperature 0, and one answer's can be compared with another's.  Computed in double: (logit - max) - log(sum of
 * exp(logit - max) in ascending id), rounded to float once. */
#ifndef K3_COMPUTED_SAMPLING_H
#define K3_COMPUTED_SAMPLING_H

#include <stdint.h>

#include "ipc/err.h"

#define K3_BIASES_MAX 1024u
#define K3_BIAS_MOST 100.0
#define K3_PENALTY_MOST 2.0          /* presence and frequency: from -2 */
#define K3_REPEAT_PENALTY_MOST 10.0
#define K3_TOP_LOGPROBS_MAX 20u

struct k3_bias { uint32_t id; double value; };
struct k3_logprob { uint32_t id; float value; };

struct k3_sampling {
    double temperature; /* 0 = greedy */
    double top_p;       /* (0, 1]; 1 = off */
    double min_p;       /* [0, 1]; 0 = off */
    uint32_t top_k;     /* 0 = off */
    uint64_t seed;
    double presence_penalty, frequency_penalty; /* 0 = off */
    double repeat_penalty;      /* 1 = off; 0 = not given */
    const struct k3_bias *bias; /* each id once; borrowed */
    uint32_t n_bias;
    uint32_t n_logprobs;        /* entries for each token: its own and the n_logprobs - 1 best; 0 = none */
    const uint64_t *allowed;    /* a bit for each id: only these are candidates; NULL: all are */
};

/* -EINVAL and exit 2 with the name of the parameter, its value and what would be right. */
int k3_sampling_check(const struct k3_sampling *p, uint32_t vocab, struct k3_err *err);

struct k3_sampler; /* scratch for one vocabulary; used by one thread at a time */
int k3_sampler_new(struct k3_sampler **out, uint32_t vocab, struct k3_err *err);
void k3_sampler_free(struct k3_sampler *s);
uint64_t k3_sampler_bytes(uint32_t vocab);

/* The logits that p makes of these: `logits` itself, or the sampler's own until the next call.  What is not finite stays so.
 * generated: the n_generated ids of the answer so far. */
const float *k3_sampler_adjust(struct k3_sampler *s, const float *logits, const struct k3_sampling *p,
                               const uint32_t *generated, uint64_t n_generated);
/* token_index counts the generated tokens of the answer from 0.  -EDOM with words and exit 4 when a logit is not
 * finite, allowed or not: never a token then.  -ENOENT when no id is allowed. */
int k3_sampler_pick(struct k3_sampler *s, const float *logits, const struct k3_sampling *p, uint64_t token_index,
                    uint32_t *token, struct k3_err *err);

/* out[0]: the token's own; out[1..n): the n - 1 best in candidate order.  n from 1 to vocab + 1; every logit is finite. */
void k3_sampler_logprobs(const struct k3_sampler *s, const float *logits, uint32_t token, struct k3_logprob *out, uint32_t n);

/* 53 random bits as a double in [0, 1). */
double k3_sampling_uniform(uint64_t seed, uint64_t token_index);
/* e^x for x <= 0 (0 below -745.2); within 2 ulp, exactly 1 at 0. */
double k3_sampling_exp(double x);
/* Natural logarithm of x >= 1, finite; within 2 ulp, exactly 0 at 1. */
double k3_sampling_log(double x);

#endif
