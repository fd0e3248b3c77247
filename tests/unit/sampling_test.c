/* k3-computed/sampling.c: each filter, ties, reproducibility, the distribution, and that greedy is the argmax. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/sampling.h"

static const struct k3_sampling plain = { .temperature = 1, .top_p = 1 };

static uint32_t pick(const float *logits, uint32_t n, struct k3_sampling p, uint64_t index)
{
    struct k3_sampler *s = NULL;
    struct k3_err err = K3_ERR_INIT;
    uint32_t token = UINT32_MAX;

    assert_int_equal(k3_sampler_new(&s, n, &err), 0);
    assert_int_equal(k3_sampler_pick(s, logits, &p, index, &token, &err), 0);
    k3_sampler_free(s);
    return token;
}

/* Which ids come out in n_draws draws. */
static void histogram(const float *logits, uint32_t n, struct k3_sampling p, uint32_t n_draws, uint32_t *hits)
{
    struct k3_sampler *s = NULL;
    struct k3_err err = K3_ERR_INIT;

    memset(hits, 0, n * sizeof(*hits));
    assert_int_equal(k3_sampler_new(&s, n, &err), 0);
    for (uint32_t i = 0; i < n_draws; i++) {
        uint32_t token;

        assert_int_equal(k3_sampler_pick(s, logits, &p, i, &token, &err), 0);
        assert_true(token < n);
        hits[token]++;
    }
    k3_sampler_free(s);
}

static void make_logits(float *logits, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        logits[i] = (float)(12 * k3_sampling_uniform(seed, i) - 6);
}

static void exp_is_exact_enough(void **state)
{
    (void)state;
    assert_true(k3_sampling_exp(0) == 1);
    assert_true(k3_sampling_exp(-0.0) == 1);
    assert_true(k3_sampling_exp(-INFINITY) == 0);
    assert_true(k3_sampling_exp(-746) == 0);
    for (uint64_t i = 0; i < 200000; i++) {
        double x = -700 * k3_sampling_uniform(5, i), right = exp(x);

        if (i % 2)
            x /= 700, right = exp(x);
        assert_true(fabs(k3_sampling_exp(x) - right) <= 4.5e-16 * right);
    }
    for (double x = -745; x < -700; x += 0.37) /* subnormals: one unit of the last place there is */
        assert_true(fabs(k3_sampling_exp(x) - exp(x)) <= fmax(0x1p-1074, 4.5e-16 * exp(x)));
}

static void uniform_is_pinned_and_even(void **state)
{
    uint32_t cell[64] = { 0 };
    double chi = 0;

    (void)state;
    for (uint64_t i = 0; i < 64000; i++) {
        double u = k3_sampling_uniform(i % 8, i / 8);

        assert_true(u >= 0 && u < 1);
        cell[(int)(u * 64)]++;
    }
    for (int i = 0; i < 64; i++)
        chi += (cell[i] - 1000.0) * (cell[i] - 1000.0) / 1000.0;
    assert_true(chi < 103.4); /* 63 degrees of freedom, p = 0.001 */
    /* Computed by an independent program from the formula; part of the promise that a seed keeps its tokens. */
    assert_true(k3_sampling_uniform(0, 0) == 0x1.2086089bfcf34p-2);
    assert_true(k3_sampling_uniform(42, 7) == 0x1.90147a81a0f5cp-3);
    assert_true(k3_sampling_uniform(UINT64_MAX, UINT64_MAX) == 0x1.6ff0d52b2dbfcp-3);
}

static void greedy_is_the_argmax(void **state)
{
    enum { N = 1000 };
    static float logits[N];
    struct k3_sampling greedy = { .temperature = 0, .top_p = 1, .top_k = 3, .seed = 9 };

    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        uint32_t best = 0;

        make_logits(logits, N, seed);
        for (uint32_t i = 1; i < N; i++)
            if (logits[i] > logits[best])
                best = i;
        assert_int_equal(pick(logits, N, greedy, seed), best);
        assert_int_equal(pick(logits, N, (struct k3_sampling){ 1, 1, 0, 1, seed }, 3), best);       /* top-k 1 */
        assert_int_equal(pick(logits, N, (struct k3_sampling){ 1, 1e-9, 0, 0, seed }, 3), best);    /* top-p 0+ */
        assert_int_equal(pick(logits, N, (struct k3_sampling){ 1, 1, 1, 0, seed }, 3), best);       /* min-p 1 */
        assert_int_equal(pick(logits, N, (struct k3_sampling){ 1e-300, 1, 0, 0, seed }, 3), best);  /* cold */
    }
}

static void ties_go_to_the_lower_id(void **state)
{
    const float logits[] = { -1, 0.0f, 2, -0.0f, 2, 2, 1 };
    const float zeros[] = { -3, -0.0f, 0.0f, -4 };
    uint32_t hits[7];

    (void)state;
    assert_int_equal(pick(logits, 7, (struct k3_sampling){ 0, 1, 0, 0, 0 }, 0), 2);
    assert_int_equal(pick(logits, 7, (struct k3_sampling){ 1, 1, 0, 1, 0 }, 0), 2);
    histogram(logits, 7, (struct k3_sampling){ 1, 1, 0, 2, 0 }, 2000, hits); /* two of the three equal ones: 2 and 4 */
    assert_int_equal(hits[2] + hits[4], 2000);
    assert_true(hits[2] > 800 && hits[4] > 800);
    assert_int_equal(pick(zeros, 4, (struct k3_sampling){ 0, 1, 0, 0, 0 }, 0), 1); /* -0 equals +0 */
    assert_int_equal(pick(zeros, 4, (struct k3_sampling){ 1, 1, 0, 1, 0 }, 0), 1);
}

static void filters_keep_what_they_say(void **state)
{
    /* weights 8 4 2 1 1 (of 16), shuffled */
    const float logits[] = { logf(1), logf(8), logf(2), logf(1), logf(4) };
    uint32_t hits[5];

    (void)state;
    histogram(logits, 5, plain, 16000, hits);
    assert_true(abs((int)hits[1] - 8000) < 300 && abs((int)hits[4] - 4000) < 300 && hits[0] > 800 && hits[3] > 800);

    histogram(logits, 5, (struct k3_sampling){ 1, 1, 0, 3, 1 }, 4000, hits); /* top-k 3: 8 4 2 */
    assert_int_equal(hits[1] + hits[4] + hits[2], 4000);
    assert_true(hits[2] > 400);
    histogram(logits, 5, (struct k3_sampling){ 1, 1, 0, 4, 1 }, 4000, hits); /* the fourth: id 0, not 3 */
    assert_true(hits[0] > 100 && hits[3] == 0);

    histogram(logits, 5, (struct k3_sampling){ 1, 0.74, 0, 0, 1 }, 4000, hits); /* 8 + 4 = 0.75 of all */
    assert_int_equal(hits[1] + hits[4], 4000);
    assert_true(hits[4] > 1000);
    histogram(logits, 5, (struct k3_sampling){ 1, 0.76, 0, 0, 1 }, 4000, hits);
    assert_int_equal(hits[1] + hits[4] + hits[2], 4000);
    assert_true(hits[2] > 300);
    histogram(logits, 5, (struct k3_sampling){ 1, 0.66, 0, 2, 1 }, 4000, hits); /* of the top two 8 is 0.67 */
    assert_int_equal(hits[1], 4000);
    histogram(logits, 5, (struct k3_sampling){ 1, 0.68, 0, 2, 1 }, 4000, hits);
    assert_true(hits[4] > 1000);

    histogram(logits, 5, (struct k3_sampling){ 1, 1, 0.2, 0, 1 }, 4000, hits); /* 1.6 of 8: 8 4 2 */
    assert_int_equal(hits[1] + hits[4] + hits[2], 4000);
    assert_true(hits[2] > 400);
    histogram(logits, 5, (struct k3_sampling){ 1, 1, 0.3, 0, 1 }, 4000, hits); /* 2.4: 8 4 */
    assert_int_equal(hits[1] + hits[4], 4000);
    histogram(logits, 5, (struct k3_sampling){ 2, 1, 0.3, 0, 1 }, 4000, hits); /* temperature comes first: 1 .71 .5 .35 .35 */
    assert_true(hits[0] > 300 && hits[3] > 300);
}

static void distribution_is_right(void **state)
{
    enum { N = 40, DRAWS = 40000 };
    const double temperature[] = { 0.7, 1, 1.6 };
    static float logits[N];
    static uint32_t hits[N];

    (void)state;
    for (int t = 0; t < 3; t++) {
        double sum = 0, chi = 0;

        make_logits(logits, N, 77 + (uint64_t)t);
        for (int i = 0; i < N; i++)
            logits[i] /= 2;
        for (int i = 0; i < N; i++)
            sum += exp(logits[i] / temperature[t]);
        histogram(logits, N, (struct k3_sampling){ temperature[t], 1, 0, 0, 1234 }, DRAWS, hits);
        for (int i = 0; i < N; i++) {
            double right = DRAWS * exp(logits[i] / temperature[t]) / sum;

            chi += (hits[i] - right) * (hits[i] - right) / right;
        }
        assert_true(chi < 72.1); /* 39 degrees of freedom, p = 0.001 */
        assert_true(chi > 15);   /* and not suspiciously even */
    }
}

/* The definition, slowly: a full sort, totals in ascending id. */
struct ranked { float logit; uint32_t id; double weight; };
static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;

    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->id < y->id ? -1 : 1;
}

static double total_by_id(const struct ranked *r, uint32_t n, uint32_t vocab)
{
    double sum = 0;

    for (uint32_t id = 0; id < vocab; id++)
        for (uint32_t i = 0; i < n; i++)
            if (r[i].id == id)
                sum += r[i].weight;
    return sum;
}

static uint32_t slow_pick(const float *logits, uint32_t n, struct k3_sampling p, uint64_t index)
{
    struct ranked r[300];
    uint32_t kept = p.top_k && p.top_k < n ? p.top_k : n;
    double sum = 0, total;

    for (uint32_t i = 0; i < n; i++)
        r[i] = (struct ranked){ logits[i], i, 0 };
    qsort(r, n, sizeof(r[0]), by_rank);
    for (uint32_t i = 0; i < n; i++)
        r[i].weight = k3_sampling_exp(((double)r[i].logit - (double)r[0].logit) / p.temperature);
    total = total_by_id(r, kept, n);
    for (uint32_t i = 0; i < kept && p.top_p < 1; i++) {
        sum += r[i].weight;
        if (sum >= p.top_p * total) {
            kept = i + 1;
            break;
        }
    }
    for (uint32_t i = 0; i < kept; i++)
        if (r[i].weight < p.min_p) {
            kept = i;
            break;
        }
    total = total_by_id(r, kept, n);
    sum = 0;
    for (uint32_t i = 0; i < kept; i++)
        if ((sum += r[i].weight) > k3_sampling_uniform(p.seed, index) * total)
            return r[i].id;
    return r[kept - 1].id;
}

static void equals_the_definition(void **state)
{
    enum { N = 300 };
    static float logits[N];

    (void)state;
    for (uint64_t i = 0; i < 400; i++) {
        struct k3_sampling p = { .temperature = 0.2 + 2 * k3_sampling_uniform(1, i), .seed = i,
                                 .top_p = i % 3 ? 0.05 + 0.95 * k3_sampling_uniform(2, i) : 1,
                                 .min_p = i % 4 ? 0 : k3_sampling_uniform(3, i) / 4,
                                 .top_k = i % 5 < 2 ? 0 : (uint32_t)(1 + 320 * k3_sampling_uniform(4, i)) };

        make_logits(logits, N, 1000 + i);
        for (int j = 0; j < N; j += 3)
            logits[j] = roundf(logits[j]); /* many ties */
        assert_int_equal(pick(logits, N, p, i), slow_pick(logits, N, p, i));
    }
}

static void seeds_keep_their_tokens(void **state)
{
    /* Pinned: computed by an independent program.  A change here breaks every journal. */
    static const uint32_t right[] = { 34, 53, 62, 17, 12, 60, 24, 43 };
    static float logits[64];
    uint32_t token[8];

    (void)state;
    for (uint32_t i = 0; i < 64; i++)
        logits[i] = (float)(i * 37 % 64) / 16;
    for (uint32_t i = 0; i < 8; i++) {
        struct k3_sampling p = { 0.8, 0.9, 0.01, 50, 20240607 };

        token[i] = pick(logits, 64, p, i);
        assert_int_equal(token[i], pick(logits, 64, p, i)); /* depends on nothing but its arguments */
    }
    assert_memory_equal(token, right, sizeof(right));
}

static void other_seeds_and_indices_differ(void **state)
{
    static float logits[4096];
    uint32_t n_same_index = 0, n_same_seed = 0;

    (void)state;
    for (uint32_t i = 0; i < 200; i++) {
        struct k3_sampling p = plain;
        uint32_t a, b, c;

        p.seed = i;
        a = pick(logits, 4096, p, i);
        b = pick(logits, 4096, p, i + 1);
        p.seed = i + 1;
        c = pick(logits, 4096, p, i);
        n_same_index += a == b;
        n_same_seed += a == c;
    }
    assert_true(n_same_index < 5 && n_same_seed < 5);
}

static void not_finite_is_never_a_token(void **state)
{
    const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
    struct k3_sampler *s = NULL;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_int_equal(k3_sampler_new(&s, 8, &err), 0);
    for (int b = 0; b < 4; b++)
        for (int at = 0; at < 8; at++)
            for (int t = 0; t < 2; t++) {
                float logits[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
                struct k3_sampling p = { t, 1, 0, 0, 0 };
                uint32_t token;

                logits[at] = bad[b];
                assert_int_equal(k3_sampler_pick(s, logits, &p, 0, &token, &err), -EDOM);
                assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
                assert_non_null(strstr(err.text, "logits are not finite"));
            }
    k3_sampler_free(s);
}

static void released_vocabulary(void **state)
{
    enum { N = 163840 };
    float *logits = malloc(N * sizeof(*logits));
    struct k3_sampler *s = NULL;
    struct k3_err err = K3_ERR_INIT;
    uint32_t token;

    (void)state;
    assert_non_null(logits);
    make_logits(logits, N, 3);
    logits[100000] = 20;
    assert_int_equal(k3_sampler_new(&s, N, &err), 0);
    for (uint64_t i = 0; i < 20; i++) {
        assert_int_equal(k3_sampler_pick(s, logits, &(struct k3_sampling){ 1, 0.95, 0, 0, i }, i, &token, &err), 0);
        if (i == 0)
            assert_int_equal(token, 100000); /* e^20 against 163839 / 12 * e^6 */
        assert_int_equal(k3_sampler_pick(s, logits, &(struct k3_sampling){ 3, 1, 0, 0, i }, i, &token, &err), 0);
        assert_true(token < N);
    }
    k3_sampler_free(s);
    free(logits);
}

/* ---- bias, penalties, log probabilities ---------------------------------------------------------------------------------- */

static struct k3_sampler *sampler(uint32_t n)
{
    struct k3_sampler *s = NULL;
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_sampler_new(&s, n, &err), 0);
    return s;
}

static void nothing_asked_changes_nothing(void **state)
{
    const float logits[4] = { 1, 2, 3, 4 };
    const uint32_t generated[] = { 3, 3 };
    struct k3_sampling p = plain;
    struct k3_sampler *s = sampler(4);

    (void)state;
    assert_ptr_equal(k3_sampler_adjust(s, logits, &p, generated, 2), logits);
    p.repeat_penalty = 1;
    assert_ptr_equal(k3_sampler_adjust(s, logits, &p, generated, 2), logits);
    p.presence_penalty = p.frequency_penalty = 2;
    p.repeat_penalty = 3;
    assert_ptr_equal(k3_sampler_adjust(s, logits, &p, generated, 0), logits); /* no answer yet */
    k3_sampler_free(s);
}

static void adjusted_by_hand(void **state)
{
    const float logits[8] = { 1, -2, 3, -4, 5, 0.5f, 3.0e38f, -3.0e38f };
    const uint32_t generated[] = { 3, 0, 3, 6, 3, 7, 2 };
    const struct k3_bias bias[] = { { 5, -100 }, { 2, 1 }, { 1, 100 } };
    struct k3_sampling p = plain;
    struct k3_sampler *s = sampler(8);
    const float *a;

    (void)state;
    p.presence_penalty = 0.25;
    p.frequency_penalty = 0.5;
    p.repeat_penalty = 2;
    p.bias = bias;
    p.n_bias = 3;
    for (int again = 0; again < 2; again++) { /* nothing is left over from the last time */
        a = k3_sampler_adjust(s, logits, &p, generated, 7);
        assert_true(a[0] == -0.25f); /* 1/2 - 0.5 - 0.25 */
        assert_true(a[1] == 98);
        assert_true(a[2] == 1.25f);  /* (3 + 1)/2 - 0.75 */
        assert_true(a[3] == -9.75f); /* -4*2 - 3*0.5 - 0.25 */
        assert_true(a[4] == 5);      /* the prompt may have had it: only the answer counts */
        assert_true(a[5] == -99.5f);
        assert_true(a[6] == 1.5e38f);
        assert_true(a[7] == -0x1.fffffep127f); /* kept finite */
    }
    p.repeat_penalty = 0;
    p.n_bias = 0;
    p.presence_penalty = -2; /* negative ones make repetition likelier */
    p.frequency_penalty = -1;
    a = k3_sampler_adjust(s, logits, &p, generated, 7);
    assert_true(a[0] == 4 && a[3] == 1 && a[4] == 5 && a[1] == -2);
    k3_sampler_free(s);
}

static uint32_t adjusted_pick(struct k3_sampler *s, const float *logits, const struct k3_sampling *p, uint32_t index)
{
    struct k3_err err = K3_ERR_INIT;
    uint32_t token;

    assert_int_equal(k3_sampler_pick(s, k3_sampler_adjust(s, logits, p, NULL, 0), p, index, &token, &err), 0);
    return token;
}

static void bias_bans_and_forces(void **state)
{
    enum { N = 64 };
    static float logits[N];
    static const uint32_t right[] = { 34, 53, 62, 17, 12, 60, 24, 43 }; /* as in seeds_keep_their_tokens */
    const struct k3_bias ban[] = { { 34, -100 }, { 62, -100 } }, force = { 1, 100 }, none = { 5, 0 };
    struct k3_sampler *s = sampler(N);

    (void)state;
    for (uint32_t i = 0; i < N; i++)
        logits[i] = (float)(i * 37 % 64) / 16;
    for (uint32_t i = 0; i < 2000; i++) {
        struct k3_sampling p = { 0.8, 0.9, 0.01, 50, 20240607 };
        uint32_t token;

        p.bias = ban;
        p.n_bias = 2;
        token = adjusted_pick(s, logits, &p, i);
        assert_true(token != 34 && token != 62);
        p.n_bias = 1;
        p.bias = &force;
        assert_int_equal(adjusted_pick(s, logits, &p, i), 1);
        p.bias = &none;
        assert_true(i >= 8 || adjusted_pick(s, logits, &p, i) == right[i]);
    }
    k3_sampler_free(s);
}

/* Greedy with penalties, followed by hand: logits 4 3 2.5 0, frequency 0.6, presence 0.5. */
static void penalties_pick_by_hand(void **state)
{
    /* 4 3 2.5 -> 0 | 2.9 3 2.5 -> 1 | 2.9 1.9 2.5 -> 0 | 2.3 1.9 2.5 -> 2 | 2.3 1.9 1.4 -> 0 | 1.7 1.9 1.4 -> 1 | 1.7 1.3 1.4 -> 0 */
    static const uint32_t right[] = { 0, 1, 0, 2, 0, 1, 0 };
    const float logits[4] = { 4, 3, 2.5f, 0 };
    struct k3_sampling p = { .temperature = 0, .top_p = 1, .frequency_penalty = 0.6, .presence_penalty = 0.5 };
    struct k3_sampler *s = sampler(4);
    struct k3_err err = K3_ERR_INIT;
    uint32_t generated[7];

    (void)state;
    for (uint32_t i = 0; i < 7; i++) {
        assert_int_equal(k3_sampler_pick(s, k3_sampler_adjust(s, logits, &p, generated, i), &p, i, &generated[i], &err), 0);
        assert_int_equal(generated[i], right[i]);
    }
    k3_sampler_free(s);
}

static void not_finite_stays_so(void **state)
{
    const float logits[4] = { 1, NAN, 2, 3 };
    const uint32_t generated[] = { 1, 3 };
    const struct k3_bias bias = { 1, 100 };
    struct k3_sampling p = { .top_p = 1, .presence_penalty = 1, .bias = &bias };
    struct k3_sampler *s = sampler(4);
    struct k3_err err = K3_ERR_INIT;
    uint32_t token;

    (void)state;
    for (; p.n_bias < 2; p.n_bias++)
        assert_int_equal(k3_sampler_pick(s, k3_sampler_adjust(s, logits, &p, generated, 2), &p, 2, &token, &err), -EDOM);
    assert_non_null(strstr(err.text, "id 1"));
    k3_sampler_free(s);
}

static void log_is_exact_enough(void **state)
{
    (void)state;
    assert_true(k3_sampling_log(1) == 0);
    for (uint64_t i = 0; i < 200000; i++) {
        double u = k3_sampling_uniform(6, i), x = i % 3 == 0 ? 1 + u : i % 3 == 1 ? 1 + 163840 * u : 1 + u * u * u * 1e-9;

        assert_true(fabs(k3_sampling_log(x) - log(x)) <= 4.5e-16 * log(x));
    }
}

static void logprobs_are_log_softmax(void **state)
{
    enum { N = 20 };
    float logits[N];
    struct k3_logprob all[N + 1], few[4], one;
    struct k3_sampler *s = sampler(N);
    double sum = 0, norm = 0;

    (void)state;
    make_logits(logits, N, 12);
    logits[7] = logits[3]; /* equal: the lower id first */
    for (int i = 0; i < N; i++)
        norm += exp((double)logits[i]);
    k3_sampler_logprobs(s, logits, 5, all, N + 1);
    for (int i = 1; i <= N; i++) {
        sum += exp((double)all[i].value);
        assert_true(fabs(all[i].value - (logits[all[i].id] - log(norm))) < 1e-6);
        assert_true(i == 1 || all[i].value < all[i - 1].value || (all[i].value == all[i - 1].value && all[i].id > all[i - 1].id));
    }
    assert_true(fabs(sum - 1) < 1e-6);
    assert_int_equal(all[0].id, 5);
    k3_sampler_logprobs(s, logits, 7, few, 4); /* the best of few are the best of all, to the bit */
    assert_memory_equal(few + 1, all + 1, 3 * sizeof(few[0]));
    k3_sampler_logprobs(s, logits, 7, &one, 1);
    assert_memory_equal(&one, few, sizeof(one));
    for (int i = 1; i <= N; i++)
        if (all[i].id == 7)
            assert_memory_equal(&one, &all[i], sizeof(one));
    k3_sampler_free(s);
}

static void logprobs_keep_their_bits(void **state)
{
    /* Computed by an independent program with 40 digits, rounded once. */
    static const struct { uint32_t id; float value; } right[] = { { 11, -0x1.524090p+2f }, { 19, -0x1.648120p+1f }, { 38, -0x1.6c8120p+1f }, { 57, -0x1.748120p+1f } };
    static const float sure[3] = { 3.0e38f, -3.0e38f, 0 };
    static float logits[64];
    struct k3_logprob p[4];
    struct k3_sampler *s = sampler(64);

    (void)state;
    for (uint32_t i = 0; i < 64; i++)
        logits[i] = (float)(i * 37 % 64) / 16;
    k3_sampler_logprobs(s, logits, 11, p, 4);
    for (int i = 0; i < 4; i++)
        assert_true(p[i].id == right[i].id && p[i].value == right[i].value);
    k3_sampler_free(s);
    s = sampler(3);
    k3_sampler_logprobs(s, sure, 1, p, 3);
    assert_true(p[0].value == -0x1.fffffep127f && p[1].id == 0 && p[1].value == 0 && p[2].id == 2); /* finite, so JSON */
    k3_sampler_free(s);
}

static void adjustments_are_checked(void **state)
{
    static const struct k3_bias high = { 8, 0 }, twice[] = { { 1, 0 }, { 2, 0 }, { 1, 3 } }, big = { 1, 100.5 }, not_one = { 1, NAN };
    static struct k3_bias many[K3_BIASES_MAX + 1];
    static const struct { struct k3_sampling p; const char *words; } bad[] = {
        { { .top_p = 1, .presence_penalty = 2.1 }, "presence_penalty 2.1" },
        { { .top_p = 1, .presence_penalty = NAN }, "presence_penalty" },
        { { .top_p = 1, .frequency_penalty = -2.1 }, "frequency_penalty -2.1" },
        { { .top_p = 1, .frequency_penalty = INFINITY }, "frequency_penalty" },
        { { .top_p = 1, .repeat_penalty = -1 }, "repeat_penalty -1" },
        { { .top_p = 1, .repeat_penalty = 10.5 }, "repeat_penalty 10.5" },
        { { .top_p = 1, .repeat_penalty = NAN }, "repeat_penalty" },
        { { .top_p = 1, .n_logprobs = 22 }, "best 21 ids" },
        { { .top_p = 1, .n_logprobs = 10 }, "of 8 ids" },
        { { .top_p = 1, .bias = &high, .n_bias = 1 }, "id 8: the vocabulary has 8" },
        { { .top_p = 1, .bias = twice, .n_bias = 3 }, "id 1 twice" },
        { { .top_p = 1, .bias = &big, .n_bias = 1 }, "is 100.5" },
        { { .top_p = 1, .bias = &not_one, .n_bias = 1 }, "logit_bias of id 1" },
        { { .top_p = 1, .bias = many, .n_bias = K3_BIASES_MAX + 1 }, "1025 entries: at most 1024" },
    };
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(k3_sampling_check(&bad[i].p, 8, &err), -EINVAL);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        if (!strstr(err.text, bad[i].words))
            fail_msg("\"%s\" does not say \"%s\"", err.text, bad[i].words);
    }
    assert_int_equal(k3_sampling_check(&(struct k3_sampling){ .top_p = 1, .n_logprobs = 9, .presence_penalty = -2,
                                       .repeat_penalty = 10, .bias = twice, .n_bias = 2 }, 8, &err), 0);
}

/* What is not allowed is as if it were not there: the same draws as from a vocabulary without it. */
static void only_allowed_ids_are_candidates(void **state)
{
    enum { N = 300, N_HALF = N / 2 };
    static const struct k3_sampling how[] = {
        { .temperature = 0, .top_p = 1 }, { .temperature = 1, .top_p = 1 }, { .temperature = 2, .top_p = 0.9 },
        { .temperature = 1, .top_p = 1, .top_k = 7 }, { .temperature = 1.5, .top_p = 0.8, .min_p = 0.05, .top_k = 40 },
    };
    uint64_t odd[N / 64 + 1] = { 0 }, none[N / 64 + 1] = { 0 };
    float logits[N], half[N_HALF];
    struct k3_err err = K3_ERR_INIT;
    struct k3_sampler *s = NULL;
    uint32_t token;

    (void)state;
    make_logits(logits, N, 3);
    for (uint32_t i = 0; i < N; i++) {
        odd[i / 64] |= (i % 2ull) << i % 64;
        half[i / 2] = logits[i]; /* the odd one is written last */
    }
    for (size_t k = 0; k < sizeof(how) / sizeof(how[0]); k++)
        for (uint64_t index = 0; index < 400; index++) {
            struct k3_sampling p = how[k];

            p.seed = 5;
            token = pick(half, N_HALF, p, index);
            p.allowed = odd;
            assert_int_equal(pick(logits, N, p, index), 2 * token + 1);
        }
    assert_int_equal(k3_sampler_new(&s, N, &err), 0);
    assert_int_equal(k3_sampler_pick(s, logits, &(struct k3_sampling){ .top_p = 1, .allowed = none }, 4, &token, &err), -ENOENT);
    assert_non_null(strstr(err.text, "no id may come at generated token 4"));
    logits[0] = NAN; /* not allowed, and still no answer can be trusted */
    assert_int_equal(k3_sampler_pick(s, logits, &(struct k3_sampling){ .top_p = 1, .allowed = odd }, 0, &token, &err), -EDOM);
    k3_sampler_free(s);
}

static void parameters_are_checked(void **state)
{
    static const struct { struct k3_sampling p; const char *words; } bad[] = {
        { { -0.1, 1, 0, 0, 0 }, "temperature -0.1" }, { { NAN, 1, 0, 0, 0 }, "temperature" },
        { { INFINITY, 1, 0, 0, 0 }, "temperature" },  { { 1, 0, 0, 0, 0 }, "top_p 0" },
        { { 1, 1.01, 0, 0, 0 }, "top_p 1.01" },       { { 1, NAN, 0, 0, 0 }, "top_p" },
        { { 1, 1, -0.5, 0, 0 }, "min_p -0.5" },       { { 1, 1, 1.5, 0, 0 }, "min_p 1.5" },
    };
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(k3_sampling_check(&bad[i].p, 8, &err), -EINVAL);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, bad[i].words));
    }
    assert_int_equal(k3_sampling_check(&(struct k3_sampling){ 0, 1, 0, 0, 0 }, 8, &err), 0);
    assert_int_equal(k3_sampling_check(&(struct k3_sampling){ 2.5, 0.01, 1, 1, 0 }, 8, &err), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_exact_enough), cmocka_unit_test(uniform_is_pinned_and_even),
        cmocka_unit_test(greedy_is_the_argmax), cmocka_unit_test(ties_go_to_the_lower_id),
        cmocka_unit_test(filters_keep_what_they_say), cmocka_unit_test(distribution_is_right),
        cmocka_unit_test(equals_the_definition), cmocka_unit_test(seeds_keep_their_tokens),
        cmocka_unit_test(other_seeds_and_indices_differ), cmocka_unit_test(not_finite_is_never_a_token),
        cmocka_unit_test(released_vocabulary), cmocka_unit_test(only_allowed_ids_are_candidates),
        cmocka_unit_test(parameters_are_checked),
        cmocka_unit_test(nothing_asked_changes_nothing), cmocka_unit_test(adjusted_by_hand),
        cmocka_unit_test(bias_bans_and_forces), cmocka_unit_test(penalties_pick_by_hand),
        cmocka_unit_test(not_finite_stays_so), cmocka_unit_test(log_is_exact_enough),
        cmocka_unit_test(logprobs_are_log_softmax), cmocka_unit_test(logprobs_keep_their_bits),
        cmocka_unit_test(adjustments_are_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
