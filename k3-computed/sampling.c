#include "k3-computed/sampling.h"

#include <errno.h>
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
};

int k3_sampling_check(const struct k3_sampling *p, struct k3_err *err)
{
    if (!(p->temperature >= 0) || !isfinite(p->temperature))
        return k3_refuse(err, -EINVAL, "temperature %g: it must be 0 (greedy) or a positive number", p->temperature);
    if (!(p->top_p > 0 && p->top_p <= 1))
        return k3_refuse(err, -EINVAL, "top_p %g: it must lie above 0 and at most at 1 (off)", p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1))
        return k3_refuse(err, -EINVAL, "min_p %g: it must lie between 0 (off) and 1", p->min_p);
    return 0;
}

uint64_t k3_sampler_bytes(uint32_t vocab)
{
    return (uint64_t)vocab * (sizeof(uint64_t) + sizeof(double)) + sizeof(struct k3_sampler);
}

int k3_sampler_new(struct k3_sampler **out, uint32_t vocab, struct k3_err *err)
{
    struct k3_sampler *s = calloc(1, sizeof(*s));

    if (s) {
        s->vocab = vocab;
        s->key = calloc(vocab, sizeof(*s->key));
        s->weight = calloc(vocab, sizeof(*s->weight));
    }
    if (!s || !s->key || !s->weight) {
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
