#include "k3-computed/sampling.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* A candidate is one number that sorts like (logit descending, id ascending): the logit's bits, mapped so that unsigned order
 * is falling value, above the id. */
struct k3_sampler {
    uint32_t vocab;
    uint32_t n_all;   /* candidates: those that are allowed */
    uint32_t n_heap;  /* key[0..n_heap): binary heap, smallest first */
                      /* key[n_heap..n_all): what was taken from it, the first taken at the very end */
    uint64_t *key;
    double *weight;   /* by id */
    float *adjusted;  /* by id: the logits that a request's bias and penalties make */
    uint32_t *count;  /* by id: how often the answer holds it; all 0 between calls */
};

static int check_penalties(const struct k3_sampling *p, struct k3_err *err)
{
    if (!(fabs(p->presence_penalty) <= K3_PENALTY_MOST))
        return k3_refuse(err, -EINVAL, "presence_penalty %g: it must lie between -2 and 2", p->presence_penalty);
    if (!(fabs(p->frequency_penalty) <= K3_PENALTY_MOST))
        return k3_refuse(err, -EINVAL, "frequency_penalty %g: it must lie between -2 and 2", p->frequency_penalty);
    if (!(p->repeat_penalty >= 0 && p->repeat_penalty <= K3_REPEAT_PENALTY_MOST))
        return k3_refuse(err, -EINVAL, "repeat_penalty %g: it must lie above 0 (1: off) and at most at %g", p->repeat_penalty,
                         K3_REPEAT_PENALTY_MOST);
    return 0;
}

static int check_bias(const struct k3_sampling *p, uint32_t vocab, struct k3_err *err)
{
    if (p->n_bias > K3_BIASES_MAX)
        return k3_refuse(err, -EINVAL, "logit_bias has %u entries: at most %u", p->n_bias, K3_BIASES_MAX);
    for (uint32_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].id >= vocab)
            return k3_refuse(err, -EINVAL, "logit_bias names id %u: the vocabulary has %u ids, 0 to %u", p->bias[i].id, vocab,
                             vocab - 1);
        if (!(fabs(p->bias[i].value) <= K3_BIAS_MOST))
            return k3_refuse(err, -EINVAL, "logit_bias of id %u is %g: it must lie between -100 and 100", p->bias[i].id,
                             p->bias[i].value);
        for (uint32_t k = 0; k < i; k++)
            if (p->bias[k].id == p->bias[i].id)
                return k3_refuse(err, -EINVAL, "logit_bias names id %u twice", p->bias[i].id);
    }
    return 0;
}

int k3_sampling_check(const struct k3_sampling *p, uint32_t vocab, struct k3_err *err)
{
    int rc;

    if (!(p->temperature >= 0) || !isfinite(p->temperature))
        return k3_refuse(err, -EINVAL, "temperature %g: it must be 0 (greedy) or a positive number", p->temperature);
    if (!(p->top_p > 0 && p->top_p <= 1))
        return k3_refuse(err, -EINVAL, "top_p %g: it must lie above 0 and at most at 1 (off)", p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1))
        return k3_refuse(err, -EINVAL, "min_p %g: it must lie between 0 (off) and 1", p->min_p);
    if (p->n_logprobs > 1 && p->n_logprobs - 1 > (vocab < K3_TOP_LOGPROBS_MAX ? vocab : K3_TOP_LOGPROBS_MAX))
        return k3_refuse(err, -EINVAL, "the logprobs of the best %u ids: at most %u, and of %u ids", p->n_logprobs - 1,
                         K3_TOP_LOGPROBS_MAX, vocab);
    rc = check_penalties(p, err);
    return rc < 0 ? rc : check_bias(p, vocab, err);
}

uint64_t k3_sampler_bytes(uint32_t vocab)
{
    return (uint64_t)vocab * (sizeof(uint64_t) + sizeof(double) + sizeof(float) + sizeof(uint32_t)) + sizeof(struct k3_sampler);
}

int k3_sampler_new(struct k3_sampler **out, uint32_t vocab, struct k3_err *err)
{
    struct k3_sampler *s = calloc(1, sizeof(*s));

    if (s) {
        s->vocab = vocab;
        s->key = calloc(vocab, sizeof(*s->key));
        s->weight = calloc(vocab, sizeof(*s->weight));
        s->adjusted = calloc(vocab, sizeof(*s->adjusted));
        s->count = calloc(vocab, sizeof(*s->count));
    }
    if (!s || !s->key || !s->weight || !s->adjusted || !s->count) {
        k3_sampler_free(s);
        return k3_fail(err, -ENOMEM, "no memory for a sampler of %u ids", vocab);
    }
    *out = s;
    return 0;
}

void k3_sampler_free(struct k3_sampler *s)
{
    if (!s)
        return;
    free(s->key);
    free(s->weight);
    free(s->adjusted);
    free(s->count);
    free(s);
}

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection in which every bit reaches every bit. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

double k3_sampling_uniform(uint64_t seed, uint64_t token_index)
{
    /* The seed is mixed before the index joins, so that seeds 1, 2, 3.. are not shifted copies of one stream. */
    uint64_t z = mix(mix(seed + 0x9e3779b97f4a7c15ull) + token_index * 0x9e3779b97f4a7c15ull);

    return (double)(z >> 11) * 0x1p-53;
}

/* Plain mul and add, no fma: without hardware fma the C library's takes 100 ns, and 163,840 candidates make 2 million of
 * them.  Equal on every machine all the same, since nothing contracts (-ffp-contract=off). */
double k3_sampling_exp(double x)
{
    static const double log2_e = 0x1.71547652b82fep0;
    static const double ln2_hi = 0x1.62e42feep-1; /* 33 bits: times any k here exact */
    static const double ln2_lo = 0x1.a39ef35793c76p-33;
    static const double inv_fact[] = {            /* 1/13! .. 1/2! */
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
        1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0,
    };
    double r, p;
    int64_t k;
    uint64_t bits;

    if (!(x > -745.2))
        return 0;
    k = (int64_t)(x * log2_e - 0.5); /* x <= 0: truncation rounds to nearest */
    r = (x - (double)k * ln2_hi) - (double)k * ln2_lo;
    p = inv_fact[0];
    for (size_t i = 1; i < sizeof(inv_fact) / sizeof(inv_fact[0]); i++)
        p = p * r + inv_fact[i];
    p = 1 + (r + r * r * p);
    if (k >= -1000) {
        bits = (uint64_t)(1023 + k) << 52;
        memcpy(&r, &bits, sizeof(r));
        return p * r;
    }
    bits = (uint64_t)(1023 + k + 200) << 52; /* in two steps: the second rounds once, into the subnormals */
    memcpy(&r, &bits, sizeof(r));
    return p * r * 0x1p-200;
}

/* x = m * 2^e with m in [sqrt(1/2), sqrt(2)); with t = (m-1)/(m+1), log m = 2 (t + t^3/3 + t^5/5 + ..), t^2 < 0.0295. */
double k3_sampling_log(double x)
{
    static const double ln2_hi = 0x1.62e42feep-1, ln2_lo = 0x1.a39ef35793c76p-33; /* as in k3_sampling_exp */
    double m, t, t2, p = 1.0 / 23;
    uint64_t bits;
    int64_t e;

    memcpy(&bits, &x, sizeof(bits));
    e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    memcpy(&m, &bits, sizeof(m));
    if (m > 0x1.6a09e667f3bcdp0) {
        m *= 0.5;
        e++;
    }
    t = (m - 1) / (m + 1);
    t2 = t * t;
    for (int k = 21; k >= 3; k -= 2)
        p = p * t2 + 1.0 / k;
    return (double)e * ln2_hi + (2 * t + (2 * t * (t2 * p) + (double)e * ln2_lo));
}

static uint64_t key_of(float logit, uint32_t id)
{
    uint32_t bits;

    logit += 0.0f; /* -0 and +0 are equal logits: make them one, so that the id decides */
    memcpy(&bits, &logit, sizeof(bits));
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u; /* unsigned order = order of the values */
    return (uint64_t)~bits << 32 | id;
}

static void sift_down(uint64_t *key, uint32_t n, uint32_t i)
{
    uint64_t moved = key[i];

    for (;;) {
        uint32_t child = 2 * i + 1;

        if (child >= n)
            break;
        if (child + 1 < n && key[child + 1] < key[child])
            child++;
        if (moved < key[child])
            break;
        key[i] = key[child];
        i = child;
    }
    key[i] = moved;
}

/* Candidate number i of the order.  Only what is asked for gets sorted: usually some dozens of 163,840. */
static uint64_t candidate(struct k3_sampler *s, uint32_t i)
{
    while (s->n_all - s->n_heap <= i) {
        uint64_t top = s->key[0];

        s->n_heap--;
        s->key[0] = s->key[s->n_heap];
        if (s->n_heap > 1)
            sift_down(s->key, s->n_heap, 0);
        s->key[s->n_heap] = top;
    }
    return s->key[s->n_all - 1 - i];
}

static bool is_allowed(const uint64_t *allowed, uint32_t id)
{
    return !allowed || (allowed[id / 64] >> id % 64 & 1);
}

static double candidate_weight(struct k3_sampler *s, uint32_t i)
{
    return s->weight[(uint32_t)candidate(s, i)];
}

/* Weight of the first n_kept candidates, added in ascending id. */
static double prefix_weight(struct k3_sampler *s, const float *logits, const uint64_t *allowed, uint32_t n_kept)
{
    uint64_t last = n_kept < s->n_all ? candidate(s, n_kept - 1) : UINT64_MAX;
    double sum = 0;

    for (uint32_t id = 0; id < s->vocab; id++)
        if (is_allowed(allowed, id) && (last == UINT64_MAX || key_of(logits[id], id) <= last))
            sum += s->weight[id];
    return sum;
}

static bool finite_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static float rounded(double x)
{
    return (float)(x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x);
}

/* Steps b and c for one id that the answer holds n times. */
static double penalised(double x, const struct k3_sampling *p, uint32_t n)
{
    if (p->repeat_penalty > 0)
        x = x > 0 ? x / p->repeat_penalty : x * p->repeat_penalty;
    return x - (double)n * p->frequency_penalty - p->presence_penalty;
}

const float *k3_sampler_adjust(struct k3_sampler *s, const float *logits, const struct k3_sampling *p,
                               const uint32_t *generated, uint64_t n_generated)
{
    bool repeats = p->repeat_penalty > 0 && p->repeat_penalty != 1;
    bool penalties = n_generated && (repeats || p->presence_penalty != 0 || p->frequency_penalty != 0);

    if (!penalties && p->n_bias == 0)
        return logits;
    memcpy(s->adjusted, logits, s->vocab * sizeof(*logits));
    for (uint64_t i = 0; penalties && i < n_generated; i++)
        s->count[generated[i]]++;
    for (uint32_t i = 0; i < p->n_bias; i++) { /* bias and penalties of one id are one sum, rounded once */
        uint32_t id = p->bias[i].id;
        double x = (double)logits[id] + p->bias[i].value;

        if (!finite_bits(logits[id]))
            continue;
        s->adjusted[id] = rounded(s->count[id] ? penalised(x, p, s->count[id]) : x);
        s->count[id] = 0;
    }
    for (uint64_t i = 0; penalties && i < n_generated; i++) {
        uint32_t id = generated[i], n = s->count[id];

        s->count[id] = 0;
        if (n && finite_bits(logits[id]))
            s->adjusted[id] = rounded(penalised((double)logits[id], p, n));
    }
    return s->adjusted;
}

/* Puts id among the n best of which *n_have are there. */
static void rank(struct k3_logprob *best, uint32_t n, uint32_t *n_have, uint32_t id, float logit)
{
    uint32_t at = *n_have;

    while (at > 0 && logit > best[at - 1].value) /* ids ascend: an equal one stays in front */
        at--;
    if (at == n)
        return;
    *n_have += *n_have < n;
    memmove(best + at + 1, best + at, (*n_have - 1 - at) * sizeof(*best));
    best[at] = (struct k3_logprob){ id, logit };
}

void k3_sampler_logprobs(const struct k3_sampler *s, const float *logits, uint32_t token, struct k3_logprob *out, uint32_t n)
{
    struct k3_logprob *best = out + 1;
    uint32_t n_best = n - 1, n_have = 0;
    float max = logits[0];
    double sum = 0, log_sum;

    for (uint32_t id = 0; id < s->vocab; id++) {
        max = logits[id] > max ? logits[id] : max;
        if (n_best && (n_have < n_best || logits[id] > best[n_best - 1].value))
            rank(best, n_best, &n_have, id, logits[id]);
    }
    for (uint32_t id = 0; id < s->vocab; id++)
        sum += k3_sampling_exp((double)logits[id] - (double)max);
    log_sum = k3_sampling_log(sum);
    out[0] = (struct k3_logprob){ token, rounded((double)logits[token] - (double)max - log_sum) };
    for (uint32_t i = 0; i < n_best; i++)
        best[i].value = rounded((double)best[i].value - (double)max - log_sum);
}

int k3_sampler_pick(struct k3_sampler *s, const float *logits, const struct k3_sampling *p, uint64_t token_index,
                    uint32_t *token, struct k3_err *err)
{
    uint32_t best = UINT32_MAX, n_kept;
    double target, sum;

    for (uint32_t id = 0; id < s->vocab; id++) {
        if (!finite_bits(logits[id]))
            return k3_untrusted(err, -EDOM, "logits are not finite: id %u has %g at generated token %llu", id,
                                (double)logits[id], (unsigned long long)token_index);
        if (is_allowed(p->allowed, id) && (best == UINT32_MAX || logits[id] > logits[best]))
            best = id;
    }
    if (best == UINT32_MAX)
        return k3_fail(err, -ENOENT, "no id may come at generated token %llu: a constraint without a way on", (unsigned long long)token_index);
    *token = best;
    if (p->temperature == 0)
        return 0;

    s->n_all = 0;
    for (uint32_t id = 0; id < s->vocab; id++) {
        if (!is_allowed(p->allowed, id))
            continue;
        s->key[s->n_all++] = key_of(logits[id], id);
        s->weight[id] = k3_sampling_exp(((double)logits[id] - (double)logits[best]) / p->temperature);
    }
    s->n_heap = n_kept = s->n_all;
    for (uint32_t i = s->n_all / 2; i-- > 0;)
        sift_down(s->key, s->n_all, i);

    if (p->top_k && p->top_k < n_kept)
        n_kept = p->top_k;
    if (p->top_p < 1) {
        target = p->top_p * prefix_weight(s, logits, p->allowed, n_kept);
        sum = 0;
        for (uint32_t i = 0; i < n_kept; i++) {
            sum += candidate_weight(s, i);
            if (sum >= target)
                n_kept = i + 1; /* ends the loop */
        }
    }
    if (p->min_p > 0)
        for (uint32_t i = 1; i < n_kept; i++) /* the first weighs 1 */
            if (candidate_weight(s, i) < p->min_p)
                n_kept = i;

    target = k3_sampling_uniform(p->seed, token_index) * prefix_weight(s, logits, p->allowed, n_kept);
    sum = 0;
    for (uint32_t i = 0; i < n_kept; i++) {
        *token = (uint32_t)candidate(s, i);
        sum += s->weight[*token];
        if (sum > target)
            break; /* else rounding left the sum short of the total: the last kept candidate it is */
    }
    return 0;
}
