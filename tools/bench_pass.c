/* k3-bench pass: one pass, again and again from the same state, with every weight that it touches in memory, against
 * max(bytes touched / memory rate, FLOP / peak); and where its time goes.
 *
 * The weight daemons are the real ones: the whole trunk is pinned, the arena holds all experts that the pass can ask for.  The
 * pass runs in this process, on the source that k3-computed has, so that its stages can be read.  Both limits are measured
 * before and after each pass; the memory rate over the trunk itself, where it lies. */
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-computed/engine.h"
#include "k3-computed/kernels.h"
#include "k3-computed/pass.h"
#include "k3-computed/sampling.h"
#include "k3-computed/shm_source.h"
#include "tools/bench.h"
#include "tools/bench_limits.h"

#define PROMPT_DECODE 16u /* positions before the pass when it decodes */
#define ROWS_LEAST 64u    /* buffers of the pass: for the prompt */
#define WARM_MOST 6       /* passes until nothing is read any more */
#define READ_BYTES 4000000000u /* of one measurement of the memory rate */
#define FMA_S 0.1
#define FMA_SHARE 0.03 /* of a long pass */
#define FMA_MOST_S 1.0

struct pair {
    double read, peak; /* bytes and FLOP a second */
    double pass_s, limit_s, greedy_s, draw_s;
    struct k3_pass_times t;
};

struct bench_pass {
    struct k3_bench_setup setup;
    uint32_t rows, sequences, prompt, pairs, threads;
    const char *kernels;
    bool decode, force_threads, tsv;

    const struct k3_kernels *k;
    struct k3_team *team;
    struct k3_pass *pass;
    struct k3_meter meter;
    struct k3_shm_source *source;
    struct k3_bench_limits *limits;
    struct k3_sampler *sampler;
    struct k3_state **state, **before; /* before: what the pass begins with; none where that is the empty state */
    struct k3_row *row;
    float *logits;
    uint32_t n_logits;
    char doing[64]; /* what the pass is for */
    uint64_t bytes_read; /* by the daemons during the measured passes */
};

/* ---- opening ---- */

static uint64_t add(uint64_t a, uint64_t n, uint64_t bytes)
{
    uint64_t all;

    return __builtin_mul_overflow(n, bytes, &all) || __builtin_add_overflow(a, all, &all) ? UINT64_MAX : all;
}

/* Everything together, before any of it is taken: the daemons only look at their own part. */
static int check_memory(const struct bench_pass *b, struct k3_err *err)
{
    const struct k3_bench_setup *s = &b->setup;
    const struct k3_config *c = &s->model->cfg;
    uint32_t ctx = b->prompt + b->rows / b->sequences, max_rows = b->rows < ROWS_LEAST ? ROWS_LEAST : b->rows;
    uint64_t need = s->trunk_bytes + s->cache_bytes + s->model->resident_bytes;
    char what[96];

    need = add(need, b->sequences * (b->prompt ? 2 : 1), k3_state_bytes(c, ctx));
    need = add(need, 1, k3_pass_bytes(c, max_rows));
    need = add(need, b->threads, k3_pass_thread_bytes(c, ctx));
    need = add(need, b->sequences, (uint64_t)c->vocab * sizeof(float));
    snprintf(what, sizeof(what), " to have all in memory (trunk %.3f, experts %.3f)", (double)s->trunk_bytes / 1e9,
             (double)s->cache_bytes / 1e9);
    return k3_bench_memory_check(need, what, "lower --layers, --rows, --sequences or --prompt, or use a smaller model", err);
}

static int open_rows(struct bench_pass *b, struct k3_err *err)
{
    const struct k3_config *c = &b->setup.model->cfg;
    uint32_t each = b->rows / b->sequences, max_rows = b->rows < ROWS_LEAST ? ROWS_LEAST : b->rows;
    int rc = k3_pass_new(&b->pass, b->setup.model, b->k, b->team, max_rows, err);

    b->state = calloc(b->sequences, sizeof(*b->state));
    b->before = calloc(b->sequences, sizeof(*b->before));
    b->row = calloc(max_rows, sizeof(*b->row));
    b->n_logits = b->sequences; /* of the last row of each */
    b->logits = calloc((size_t)b->n_logits * c->vocab, sizeof(float));
    if (rc == 0 && (!b->state || !b->before || !b->row || !b->logits))
        rc = k3_fail(err, -ENOMEM, "no memory for %u rows", b->rows);
    for (uint32_t s = 0; s < b->sequences && rc == 0; s++) {
        rc = k3_state_new(&b->state[s], c, b->prompt + each, err);
        if (rc == 0 && b->prompt)
            rc = k3_state_new(&b->before[s], c, b->prompt + each, err);
        if (rc == 0)
            rc = k3_state_touch(b->state[s], err);
    }
    return rc < 0 ? rc : k3_sampler_new(&b->sampler, c->vocab, err);
}

/* Over what is multiplied: the pinned pieces, where the daemon has them. */
static int open_limits(struct bench_pass *b, struct k3_err *err)
{
    const struct k3_model *m = b->setup.model;
    struct k3_source *src = k3_shm_source_get(b->source);
    struct k3_span *span = calloc(m->n_pieces + 1, sizeof(*span));
    int rc = span ? 0 : k3_fail(err, -ENOMEM, "no memory for the limits");

    for (size_t i = 0; i < m->n_pieces && rc == 0; i++) {
        span[i] = (struct k3_span){ src->pinned(src->self, (uint32_t)i), m->pieces[i].len_bytes };
        if (!span[i].at)
            rc = k3_fail(err, -EPROTO, "piece %zu of the trunk is not in memory", i);
    }
    if (rc == 0)
        rc = k3_bench_limits_open(&b->limits, b->team, span, m->n_pieces, err);
    free(span);
    return rc;
}

/* ---- passes ---- */

static uint32_t token(const struct bench_pass *b, uint32_t sequence, uint32_t position)
{
    uint64_t x = ((uint64_t)sequence << 32 | position) * 6364136223846793005u + 1442695040888963407u;

    x ^= x >> 29;
    return (uint32_t)(x * 0x9e3779b97f4a7c15u >> 33) % b->setup.model->cfg.vocab;
}

static int run(struct bench_pass *b, uint32_t n_rows, struct k3_err *err)
{
    struct k3_pass_hooks hooks = { .progress = k3_bench_on_layer, .arg = b->doing };

    return k3_pass_run(b->pass, k3_shm_source_get(b->source), b->row, n_rows, b->logits, &hooks, err);
}

/* The positions before the pass, in passes of their own. */
static int feed(struct bench_pass *b, struct k3_err *err)
{
    int rc = 0;

    for (uint32_t s = 0; s < b->sequences; s++) {
        for (uint32_t at = 0; at < b->prompt && rc == 0;) {
            uint32_t n = b->prompt - at < ROWS_LEAST ? b->prompt - at : ROWS_LEAST;

            snprintf(b->doing, sizeof(b->doing), "sequence %u of %u: position %u of %u", s + 1, b->sequences, at, b->prompt);
            for (uint32_t i = 0; i < n; i++)
                b->row[i] = (struct k3_row){ b->state[s], token(b, s, at + i), at + i, false };
            rc = run(b, n, err);
            at += n;
        }
        if (rc == 0 && b->prompt)
            k3_state_copy(b->before[s], b->state[s]);
    }
    return rc;
}

static void rows_of_pass(struct bench_pass *b)
{
    uint32_t each = b->rows / b->sequences;

    for (uint32_t i = 0; i < b->rows; i++) {
        uint32_t s = i / each, position = b->prompt + i % each;

        b->row[i] = (struct k3_row){ b->state[s], token(b, s, position), position, i % each == each - 1 };
    }
}

static void restore(struct bench_pass *b)
{
    for (uint32_t s = 0; s < b->sequences; s++)
        if (b->before[s])
            k3_state_copy(b->state[s], b->before[s]);
        else
            k3_state_reset(b->state[s]);
}

static uint64_t bytes_read(const struct bench_pass *b)
{
    return k3_stats_value(&b->setup.trunk, "read_bytes") + k3_stats_value(&b->setup.expert, "read_bytes");
}

static int warm_up(struct bench_pass *b, struct k3_err *err)
{
    uint64_t before, after = bytes_read(b);
    int left = WARM_MOST, rc;

    do {
        snprintf(b->doing, sizeof(b->doing), "the first passes read the weights into memory");
        before = after;
        restore(b);
        rc = run(b, b->rows, err);
        after = bytes_read(b);
    } while (rc == 0 && after != before && --left);
    if (rc == 0 && after != before)
        return k3_fail(err, -EPROTO, "after %d passes one still reads %" PRIu64 " bytes", WARM_MOST, after - before);
    return rc;
}

/* Drawing is no part of a pass: greedy, then with every filter. */
static int draw(struct bench_pass *b, struct pair *p, struct k3_err *err)
{
    static const struct k3_sampling how[2] = { { .temperature = 0, .top_p = 1 },
                                               { .temperature = 1, .top_p = 0.95, .min_p = 0.01, .seed = 1 } };
    double *to[2] = { &p->greedy_s, &p->draw_s };
    uint32_t vocab = b->setup.model->cfg.vocab, drawn;
    int rc = 0;

    for (int h = 0; h < 2; h++) {
        uint64_t t0 = k3_now_ns();

        for (uint32_t i = 0; i < b->n_logits && rc == 0; i++)
            rc = k3_sampler_pick(b->sampler, b->logits + (size_t)i * vocab, &how[h], 0, &drawn, err);
        *to[h] = (double)(k3_now_ns() - t0) / 1e9;
    }
    return rc;
}

static int measure(struct bench_pass *b, struct pair *pair, struct k3_err *err)
{
    struct k3_pass_times warm;
    double fma_at_once_s, read, peak;
    int rc = 0;

    k3_pass_times(b->pass, &warm);
    fma_at_once_s = FMA_SHARE * (double)warm.total_ns / 1e9;
    fma_at_once_s = fma_at_once_s < FMA_S ? FMA_S : fma_at_once_s > FMA_MOST_S ? FMA_MOST_S : fma_at_once_s;
    peak = k3_bench_limits_fma(b->limits, fma_at_once_s);
    for (uint32_t i = 0; i < b->pairs && rc == 0; i++) {
        struct pair *p = &pair[i];
        double memory_s, fma_s;
        uint64_t before;

        snprintf(b->doing, sizeof(b->doing), "pair %u of %u", i + 1, b->pairs);
        restore(b); /* first, so that what follows takes it out of the caches again */
        read = k3_bench_limits_read(b->limits, READ_BYTES);
        before = bytes_read(b);
        rc = run(b, b->rows, err);
        b->bytes_read += bytes_read(b) - before;
        k3_pass_times(b->pass, &p->t);
        p->pass_s = (double)p->t.total_ns / 1e9;
        p->read = (read + k3_bench_limits_read(b->limits, READ_BYTES)) / 2; /* before and after the pass */
        p->peak = peak;
        peak = k3_bench_limits_fma(b->limits, fma_at_once_s);
        p->peak = (p->peak + peak) / 2;
        memory_s = (double)(p->t.weight_bytes + p->t.state_bytes) / p->read;
        fma_s = (double)p->t.flop / p->peak;
        p->limit_s = memory_s > fma_s ? memory_s : fma_s;
        if (rc == 0)
            rc = draw(b, p, err);
        if (rc == 0 && k3_bench_stop)
            rc = k3_fail(err, -ECANCELED, "stopped");
    }
    if (rc == 0 && b->bytes_read)
        rc = k3_fail(err, -EPROTO, "%" PRIu64 " bytes were read during the measured passes: the weights do not stay in memory",
                     b->bytes_read);
    return rc;
}

/* ---- the report ---- */

/* The pair whose multiple of the limit is the median one (of an even number the greater of the two). */
static const struct pair *median_pair(const struct bench_pass *b, const struct pair *pair)
{
    for (uint32_t i = 0; i < b->pairs; i++) {
        uint32_t below = 0;

        for (uint32_t j = 0; j < b->pairs; j++) {
            double x = pair[j].pass_s * pair[i].limit_s, y = pair[i].pass_s * pair[j].limit_s;

            below += x < y || (x == y && j < i);
        }
        if (below == b->pairs / 2)
            return &pair[i];
    }
    return pair;
}

static void stage_table(const struct pair *p)
{
    uint64_t sum_ns = 0;
    uint32_t so_far = 0;

    printf("\n%-24s %9s %8s %9s %10s %8s %9s %9s\n", "stage", "ms", "share", "GB", "GFLOP", "GB/s", "GFLOPS", "of limit");
    for (int i = 0; i < K3_N_STAGES; i++) {
        const struct k3_stage_times *t = &p->t.stage[i];
        double s = (double)(t->ns ? t->ns : 1) / 1e9, memory_s = (double)t->bytes / p->read, fma_s = (double)t->flop / p->peak;
        uint32_t upto;

        sum_ns += t->ns;
        upto = (uint32_t)((double)sum_ns / (double)p->t.total_ns * 1000 + 0.5); /* so that the column sums to 100.0 */
        printf("%-24s %9.3f %6.1f %%", k3_stage_name(i), s * 1e3, (double)(upto - so_far) / 10);
        so_far = upto;
        if (i == K3_STAGE_EMBED || (!t->bytes && !t->flop))
            printf(" %9s %10s %8s %9s %9s\n", "-", "-", "-", "-", "-");
        else
            printf(" %9.3f %10.2f %8.1f %9.1f %7.1f %%\n", (double)t->bytes / 1e9, (double)t->flop / 1e9,
                   (double)t->bytes / s / 1e9, (double)t->flop / s / 1e9, 100 * (memory_s > fma_s ? memory_s : fma_s) / s);
    }
    printf("%-24s %9.3f %6.1f %% %9.3f %10.2f %8.1f %9.1f %7.1f %%\n", "the pass", p->pass_s * 1e3, (double)so_far / 10,
           (double)(p->t.weight_bytes + p->t.state_bytes) / 1e9, (double)p->t.flop / 1e9,
           (double)(p->t.weight_bytes + p->t.state_bytes) / p->pass_s / 1e9, (double)p->t.flop / p->pass_s / 1e9,
           100 * p->limit_s / p->pass_s);
}

static void report(const struct bench_pass *b, const struct pair *pair)
{
    double ratio[64], read[64], peak[64], pass[64], limit[64], fma[64], greedy[64], drawn[64];
    const struct pair *m = median_pair(b, pair);
    char text[64], size[K3_SIZE_TEXT], state[K3_SIZE_TEXT];

    for (uint32_t i = 0; i < b->pairs; i++) {
        read[i] = pair[i].read / 1e9;
        peak[i] = pair[i].peak / 1e9;
        pass[i] = pair[i].pass_s * 1e3;
        limit[i] = pair[i].limit_s * 1e3;
        ratio[i] = pair[i].pass_s / pair[i].limit_s;
        fma[i] = (double)pair[i].t.flop / pair[i].pass_s / pair[i].peak;
        greedy[i] = pair[i].greedy_s * 1e3;
        drawn[i] = pair[i].draw_s * 1e3;
    }
    printf("%u row%s of %u sequence%s after %u positions; %s kernels, %u thread%s\n", b->rows, b->rows == 1 ? "" : "s",
           b->sequences, b->sequences == 1 ? "" : "s", b->prompt, b->k->name, k3_team_size(b->team),
           k3_team_size(b->team) == 1 ? "" : "s");
    printf("%-26s %s weights, %s state, %.2f GFLOP\n", "touched by a pass", k3_size_text(size, m->t.weight_bytes),
           k3_size_text(state, m->t.state_bytes), (double)m->t.flop / 1e9);
    printf("%-26s %" PRIu64 " bytes\n", "read from the drive", b->bytes_read);
    printf("%-26s %9.1f GB/s    (%s)\n", "memory read rate", k3_bench_median(read, b->pairs),
           k3_bench_limits_text(b->limits, text));
    printf("%-26s %9.1f GFLOPS\n", "FMA peak", k3_bench_median(peak, b->pairs));
    printf("%-26s %9.2f ms      (%s)\n", "limit of a pass", k3_bench_median(limit, b->pairs),
           (double)m->t.flop / m->peak < m->limit_s ? "memory" : "FMA");
    printf("%-26s %9.2f ms\n", "a pass", k3_bench_median(pass, b->pairs));
    printf("%-26s %s\n", "a pass / its limit", k3_bench_spread(ratio, b->pairs, text));
    printf("%-26s %s\n", "share of the FMA peak", k3_bench_spread(fma, b->pairs, text));
    printf("%-26s %9.3f ms greedy, %.3f ms with top-p and min-p: %.1f %% of a pass, outside of it\n", "drawing",
           k3_bench_median(greedy, b->pairs), k3_bench_median(drawn, b->pairs),
           100 * k3_bench_median(drawn, b->pairs) / k3_bench_median(pass, b->pairs));
    printf("median (least to greatest) of %u alternating pairs; the table is the median pass\n", b->pairs);
    stage_table(m);
    if (!b->tsv)
        return;
    printf("\npair\tread_bytes_per_s\tflop_per_s\tlimit_s\tpass_s\tgreedy_s\tdraw_s");
    for (int i = 0; i < K3_N_STAGES; i++)
        printf("\t%s ns", k3_stage_name(i));
    putchar('\n');
    for (uint32_t i = 0; i < b->pairs; i++) {
        printf("%u\t%.0f\t%.0f\t%.9f\t%.9f\t%.9f\t%.9f", i + 1, pair[i].read, pair[i].peak, pair[i].limit_s, pair[i].pass_s,
               pair[i].greedy_s, pair[i].draw_s);
        for (int s = 0; s < K3_N_STAGES; s++)
            printf("\t%" PRIu64, pair[i].t.stage[s].ns);
        putchar('\n');
    }
}

/* ---- all of it ---- */

static int measure_all(struct bench_pass *b, struct pair *pair, struct k3_err *err)
{
    int rc = k3_bench_open(&b->setup, err);

    if (rc == 0) {
        k3_bench_resident(&b->setup, (uint64_t)b->rows * b->setup.model->cfg.top_k); /* an expert for each choice of a pass */
        rc = check_memory(b, err);
    }
    if (rc == 0)
        rc = k3_bench_start_passes(&b->setup, b->threads, &b->meter, &b->team, &b->source, err);
    if (rc == 0)
        rc = open_rows(b, err);
    if (rc == 0)
        rc = feed(b, err);
    if (rc == 0) {
        rows_of_pass(b);
        rc = warm_up(b, err);
    }
    if (rc == 0)
        rc = open_limits(b, err);
    if (rc == 0)
        rc = measure(b, pair, err);
    k3_bench_progress(NULL);
    if (rc == 0)
        report(b, pair);
    return rc;
}

static void close_all(struct bench_pass *b)
{
    k3_bench_limits_close(b->limits);
    k3_sampler_free(b->sampler);
    for (uint32_t s = 0; s < b->sequences; s++) {
        if (b->state)
            k3_state_free(b->state[s]);
        if (b->before)
            k3_state_free(b->before[s]);
    }
    free(b->state);
    free(b->before);
    free(b->row);
    free(b->logits);
    k3_pass_free(b->pass);
    k3_shm_source_close(b->source);
    k3_team_free(b->team);
    k3_bench_close(&b->setup);
}

/* Options that do not go together; also what each leaves to the others. */
static int check(struct bench_pass *b, bool prompt_given, struct k3_err *err)
{
    int rc;

    if (b->decode && b->rows)
        return k3_refuse(err, -EINVAL, "--decode is one row of each sequence: leave out --rows");
    if (!b->rows)
        b->rows = b->sequences;
    if (b->rows % b->sequences)
        return k3_refuse(err, -EINVAL, "--rows %u: must be a multiple of --sequences %u", b->rows, b->sequences);
    if (!prompt_given)
        b->prompt = b->rows == b->sequences ? PROMPT_DECODE : 0;
    rc = k3_kernels_find(&b->k, b->kernels, err);
    return rc < 0 ? rc : k3_threads_check(&b->threads, b->force_threads, err);
}

int k3_bench_pass(int argc, char **argv)
{
    struct bench_pass b = { .setup = { .policy = "lru", .no_raw = true }, .sequences = 1, .prompt = UINT32_MAX,
                            .pairs = K3_BENCH_PAIRS, .kernels = "auto" };
    static struct pair pair[K3_BENCH_PAIRS * 4];
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        K3_BENCH_OPT_ROWS(&b.setup),
        { "rows", K3_OPT_U32, &b.rows, "N", "rows of a pass (default: one of each sequence)", 1, K3_BATCH_ROWS_MAX },
        { "decode", K3_OPT_FLAG, &b.decode, NULL, "one row of each sequence: the default when --rows is not given", 0, 0 },
        { "sequences", K3_OPT_U32, &b.sequences, "N", "sequences that share the rows (default 1)", 1, 256 },
        { "prompt", K3_OPT_U32, &b.prompt, "N", "positions of each sequence before the pass (default: 16 for one row, else 0)",
          0, 1 << 20 },
        K3_BENCH_THREAD_ROWS(&b.threads, &b.force_threads),
        { "kernels", K3_OPT_STRING, &b.kernels, "NAME", "auto (the best of this CPU), c, avx2 or avx512", 0, 0 },
        { "pairs", K3_OPT_U32, &b.pairs, "N", "alternating pairs (default 9; fewer are for trying)", 1, K3_BENCH_PAIRS * 4 },
        { "tsv", K3_OPT_FLAG, &b.tsv, NULL, "print every pair and stage, separated by tabs", 0, 0 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench pass", "a pass with all weights in memory against max(bytes / memory rate, FLOP / peak)",
                      argc, argv, NULL, &status))
        return status;
    if (!k3_bench_need_model("pass", b.setup.model_dir))
        return K3_EXIT_REFUSED;
    rc = check(&b, b.prompt != UINT32_MAX, &err);
    if (rc == 0)
        rc = measure_all(&b, pair, &err);
    close_all(&b);
    return k3_bench_end(rc, &err);
}
