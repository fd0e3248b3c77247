/* k3-bench context: the time of one token at sixteen lengths of its context, with every weight in memory.  What a token touches
 * grows by the latent rows of one position with each position (exactly: the pass counts it); so should the time, on a straight line.
 *
 * One sequence is filled by real passes; at each length its state is copied.  Then the sixteen take turns, a token each, up and
 * down, so that a machine that gets slower meanwhile bends nothing.  The sequences grow by a position a turn, all of them. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-computed/engine.h"
#include "k3-computed/kernels.h"
#include "k3-computed/pass.h"
#include "k3-computed/shm_source.h"
#include "tools/bench.h"

#define LENGTHS 16u
#define TOKENS_MOST 63u
#define R2_LEAST 0.98
#define WARM 1u /* turns before those that count */

struct bench_context {
    struct k3_bench_setup setup;
    uint32_t ctx, rows, tokens, threads;
    const char *kernels;
    bool force_threads, tsv;

    const struct k3_kernels *k;
    struct k3_team *team;
    struct k3_pass *pass;
    struct k3_meter meter;
    struct k3_shm_source *source;
    struct k3_state *state[LENGTHS]; /* the last one is filled and copied into the others */
    struct k3_row *row;
    float *logits;
    char doing[64]; /* what the pass is for */
    struct length {
        uint32_t filled;               /* positions before the first token */
        double s[TOKENS_MOST], median; /* of a token */
        uint64_t state_bytes;          /* touched by the token of the middle turn */
    } at[LENGTHS];
};
struct line { double intercept_s, slope_s, r2; };

/* ---- opening ---- */

static uint32_t ctx_of(const struct bench_context *b, uint32_t i)
{
    return (uint32_t)((uint64_t)b->ctx * (i + 1) / LENGTHS);
}

static int check_memory(const struct bench_context *b, struct k3_err *err)
{
    const struct k3_bench_setup *s = &b->setup;
    const struct k3_config *c = &s->model->cfg;
    uint64_t states = 0, need;
    char what[128];

    for (uint32_t i = 0; i < LENGTHS; i++)
        states += k3_state_bytes(c, ctx_of(b, i)); /* of ctx below 2^24 and any model that opens: no overflow */
    need = states + s->trunk_bytes + s->cache_bytes + s->model->resident_bytes + k3_pass_bytes(c, b->rows) +
           b->threads * k3_pass_thread_bytes(c, b->ctx);
    snprintf(what, sizeof(what), " (states of %u lengths %.3f, trunk %.3f, experts %.3f)", LENGTHS, (double)states / 1e9,
             (double)s->trunk_bytes / 1e9, (double)s->cache_bytes / 1e9);
    return k3_bench_memory_check(need, what, "lower --ctx or --layers, or use a smaller model", err);
}

static int open_sequences(struct bench_context *b, struct k3_err *err)
{
    const struct k3_config *c = &b->setup.model->cfg;
    int rc = k3_pass_new(&b->pass, b->setup.model, b->k, b->team, b->rows, err);

    b->row = calloc(b->rows, sizeof(*b->row));
    b->logits = calloc(c->vocab, sizeof(float));
    if (rc == 0 && (!b->row || !b->logits))
        rc = k3_fail(err, -ENOMEM, "no memory for %u rows", b->rows);
    for (uint32_t i = 0; i < LENGTHS && rc == 0; i++) {
        b->at[i].filled = ctx_of(b, i) - b->tokens - WARM;
        rc = k3_state_new(&b->state[i], c, ctx_of(b, i), err);
        if (rc == 0)
            rc = k3_state_touch(b->state[i], err);
    }
    return rc;
}

/* ---- passes ---- */

/* The next n positions of a sequence in one pass. */
static int run(struct bench_context *b, struct k3_state *s, uint32_t n, bool want_logits, struct k3_err *err)
{
    struct k3_pass_hooks hooks = { .progress = k3_bench_on_layer, .arg = b->doing };
    uint32_t at = k3_state_positions(s);

    for (uint32_t i = 0; i < n; i++) {
        uint64_t x = (at + i) * 6364136223846793005u + 1442695040888963407u;

        b->row[i] = (struct k3_row){ s, (uint32_t)((x ^ x >> 29) * 0x9e3779b97f4a7c15u >> 33) % b->setup.model->cfg.vocab,
                                     at + i, want_logits && i == n - 1 };
    }
    return k3_pass_run(b->pass, k3_shm_source_get(b->source), b->row, n, b->logits, &hooks, err);
}

static int fill(struct bench_context *b, struct k3_err *err)
{
    struct k3_state *s = b->state[LENGTHS - 1];
    int rc = 0;

    for (uint32_t i = 0; i < LENGTHS && rc == 0; i++) {
        for (uint32_t at; rc == 0 && (at = k3_state_positions(s)) < b->at[i].filled;) {
            uint32_t left = b->at[i].filled - at;

            snprintf(b->doing, sizeof(b->doing), "the context is filled: position %u of %u", at, b->at[LENGTHS - 1].filled);
            rc = run(b, s, left < b->rows ? left : b->rows, false, err);
        }
        if (rc == 0 && i < LENGTHS - 1)
            k3_state_copy(b->state[i], s);
    }
    return rc;
}

static int measure(struct bench_context *b, struct k3_err *err)
{
    int rc = 0;

    for (uint32_t turn = 0; turn < b->tokens + WARM && rc == 0; turn++)
        for (uint32_t n = 0; n < LENGTHS && rc == 0; n++) {
            uint32_t i = turn % 2 ? LENGTHS - 1 - n : n;
            struct k3_pass_times t;

            snprintf(b->doing, sizeof(b->doing), "turn %u of %u", turn + 1, b->tokens + WARM);
            rc = run(b, b->state[i], 1, true, err);
            k3_pass_times(b->pass, &t);
            if (turn < WARM)
                continue;
            b->at[i].s[turn - WARM] = (double)t.total_ns / 1e9;
            if (turn == WARM + b->tokens / 2)
                b->at[i].state_bytes = t.state_bytes;
        }
    for (uint32_t i = 0; i < LENGTHS && rc == 0; i++)
        b->at[i].median = k3_bench_median(b->at[i].s, b->tokens);
    return rc;
}

/* ---- the report ---- */

/* Positions that the token of the middle turn attends to. */
static uint32_t positions(const struct bench_context *b, uint32_t i)
{
    return b->at[i].filled + WARM + b->tokens / 2 + 1;
}

static struct line least_squares(const struct bench_context *b)
{
    double mean_x = 0, mean_y = 0, xx = 0, xy = 0, yy = 0;

    for (uint32_t i = 0; i < LENGTHS; i++) {
        mean_x += (double)positions(b, i) / LENGTHS;
        mean_y += b->at[i].median / LENGTHS;
    }
    for (uint32_t i = 0; i < LENGTHS; i++) {
        double x = (double)positions(b, i) - mean_x, y = b->at[i].median - mean_y;

        xx += x * x;
        xy += x * y;
        yy += y * y;
    }
    return (struct line){ mean_y - xy / xx * mean_x, xy / xx, yy > 0 ? xy * xy / (xx * yy) : 1 };
}

static int check_bytes(const struct bench_context *b, struct k3_err *err)
{
    uint64_t each = k3_state_kv_bytes(&b->setup.model->cfg);

    for (uint32_t i = 1; i < LENGTHS; i++)
        if (b->at[i].state_bytes - b->at[0].state_bytes != each * (positions(b, i) - positions(b, 0)))
            return k3_fail(err, -EPROTO, "a token at %u positions touches %" PRIu64 " bytes of state, at %u %" PRIu64 ": not %"
                           PRIu64 " more for each position", positions(b, i), b->at[i].state_bytes, positions(b, 0),
                           b->at[0].state_bytes, each);
    return 0;
}

static void report(const struct bench_context *b)
{
    uint64_t each = k3_state_kv_bytes(&b->setup.model->cfg);
    struct line l = least_squares(b);
    char bytes[K3_GROUPED_TEXT];

    printf("a token after N positions, all weights in memory; %s kernels, %u thread%s, medians of %u tokens in turn\n", b->k->name,
           k3_team_size(b->team), k3_team_size(b->team) == 1 ? "" : "s", b->tokens);
    printf("%9s %12s %12s %12s\n", "positions", "state MB", "ms", "line, ms");
    for (uint32_t i = 0; i < LENGTHS; i++)
        printf("%9u %12.3f %12.4f %12.4f\n", positions(b, i), (double)b->at[i].state_bytes / 1e6, b->at[i].median * 1e3,
               (l.intercept_s + l.slope_s * positions(b, i)) * 1e3);
    printf("%-26s exactly %s bytes a position\n", "bytes touched", k3_grouped_text(bytes, each));
    printf("%-26s %.3f ms and %.3f ns a position (%.2f GB/s of latent KV)\n", "time", l.intercept_s * 1e3, l.slope_s * 1e9,
           l.slope_s > 0 ? (double)each / l.slope_s / 1e9 : 0);
    printf("%-26s %.4f\n", "R^2 of the line", l.r2);
    if (l.r2 < R2_LEAST)
        printf("%-26s too few tokens (--tokens), or other work beside it: measure again\n", "below 0.98, not straight");
    if (!b->tsv)
        return;
    printf("\npositions\tstate_bytes\tmedian_s");
    for (uint32_t n = 0; n < b->tokens; n++)
        printf("\ttoken_%u_s", n + 1);
    putchar('\n');
    for (uint32_t i = 0; i < LENGTHS; i++) {
        printf("%u\t%" PRIu64 "\t%.9f", positions(b, i), b->at[i].state_bytes, b->at[i].median);
        for (uint32_t n = 0; n < b->tokens; n++)
            printf("\t%.9f", b->at[i].s[n]);
        putchar('\n');
    }
}

/* ---- all of it ---- */

static int measure_all(struct bench_context *b, struct k3_err *err)
{
    int rc = k3_bench_open(&b->setup, err);

    if (rc == 0 && k3_state_kv_bytes(&b->setup.model->cfg) == 0)
        rc = k3_refuse(err, -EINVAL, "%s: the %u layers that run have no latent attention, so no token depends on its context",
                       b->setup.model_dir, b->setup.model->cfg.n_layers);
    if (rc == 0) {
        k3_bench_resident(&b->setup, (uint64_t)b->rows * b->setup.model->cfg.top_k);
        rc = check_memory(b, err);
    }
    if (rc == 0)
        rc = k3_bench_start_passes(&b->setup, b->threads, &b->meter, &b->team, &b->source, err);
    if (rc == 0)
        rc = open_sequences(b, err);
    if (rc == 0)
        rc = fill(b, err);
    if (rc == 0)
        rc = measure(b, err);
    k3_bench_progress(NULL);
    if (rc == 0)
        rc = check_bytes(b, err);
    if (rc == 0)
        report(b);
    return rc;
}

int k3_bench_context(int argc, char **argv)
{
    struct bench_context b = { .setup = { .policy = "lru", .no_raw = true }, .ctx = 32768, .rows = 512, .tokens = TOKENS_MOST,
                               .kernels = "auto" };
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        K3_BENCH_OPT_ROWS(&b.setup),
        { "ctx", K3_OPT_U32, &b.ctx, "N", "the longest context (default 32768)", 1024, 1 << 20 },
        { "rows", K3_OPT_U32, &b.rows, "N", "rows of a pass that fills it (default 512)", 1, K3_BATCH_ROWS_MAX },
        { "tokens", K3_OPT_U32, &b.tokens, "N", "tokens at each length (default 63; fewer are for trying)", 1, TOKENS_MOST },
        K3_BENCH_THREAD_ROWS(&b.threads, &b.force_threads),
        { "kernels", K3_OPT_STRING, &b.kernels, "NAME", "auto (the best of this CPU), c, avx2 or avx512", 0, 0 },
        { "tsv", K3_OPT_FLAG, &b.tsv, NULL, "print every token, separated by tabs", 0, 0 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench context", "the time of one token at sixteen lengths of its context", argc, argv, NULL,
                      &status))
        return status;
    if (!k3_bench_need_model("context", b.setup.model_dir))
        return K3_EXIT_REFUSED;
    rc = k3_kernels_find(&b.k, b.kernels, &err);
    if (rc == 0)
        rc = k3_threads_check(&b.threads, b.force_threads, &err);
    if (rc == 0)
        rc = measure_all(&b, &err);
    for (uint32_t i = 0; i < LENGTHS; i++)
        k3_state_free(b.state[i]);
    free(b.row);
    free(b.logits);
    k3_pass_free(b.pass);
    k3_shm_source_close(b.source);
    k3_team_free(b.team);
    k3_bench_close(&b.setup);
    return k3_bench_end(rc, &err);
}
