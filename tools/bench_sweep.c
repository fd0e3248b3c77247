/* k3-bench sweep: tokens per second over the splits of a fixed memory between trunk and experts, and over a ladder of totals.
 *
 * Prints one line for each cell and repetition, separated by tabs, then the spread of each cell.  The repetitions are rounds
 * over all cells, so that a slow minute of the drive does not fall on one cell alone. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-computed/cpus.h"
#include "tools/bench_decode.h"

#define MAX_CELLS 64
#define MAX_REPEATS 16

struct cell {
    double total_gb, share;
    double tokens_per_s[MAX_REPEATS];
    uint32_t n;
    char refused[200];
};
struct sweep {
    struct k3_decode base;
    double total_gb;
    const char *ladder;
    uint32_t repeats;
    struct k3_model *model; /* for the plan's share */
    struct cell cell[MAX_CELLS];
    uint32_t n_cells, n_lines;
    const char *last_refused; /* of the cell that was refused last; NULL: none */
};

static const double shares[] = { 0.10, 0.25, 0.60, 0.86 };

static void add(struct sweep *s, double total_gb, double share)
{
    if (s->n_cells < MAX_CELLS)
        s->cell[s->n_cells++] = (struct cell){ .total_gb = total_gb, .share = share };
}

/* "2,4,8": the totals of the ladder, each split at the share that the plan would take: all that the trunk can use. */
static bool add_ladder(struct sweep *s, const char *text)
{
    while (*text) {
        char number[32];
        size_t n = strcspn(text, ",");
        double gb;

        if (n == 0 || n >= sizeof(number))
            return false;
        memcpy(number, text, n);
        number[n] = 0;
        if (k3_parse_double(number, 0.001, 100000, &gb) < 0)
            return false;
        add(s, gb, NAN);
        text += n + (text[n] == ',');
    }
    return true;
}

static const char *share_text(const struct cell *c, char out[16])
{
    if (isnan(c->share))
        return "plan";
    snprintf(out, 16, "%.2f", c->share);
    return out;
}

/* But for their numbers, which are those of the cell. */
static bool same_words(const char *a, const char *b)
{
    static const char *const number = "0123456789.";

    for (;; a++, b++) {
        a += strspn(a, number);
        b += strspn(b, number);
        if (*a != *b || !*a)
            return *a == *b;
    }
}

/* The others go on.  A reason that several have is said once. */
static void refuse_cell(struct sweep *s, struct cell *c, const char *why)
{
    char share[16];

    snprintf(c->refused, sizeof(c->refused), "%.190s", why);
    k3_bench_progress(NULL);
    fprintf(stderr, "k3-bench: refused: %g GB, trunk's share %s: %s\n", c->total_gb, share_text(c, share),
            s->last_refused && same_words(s->last_refused, c->refused) ? "the same" : why);
    s->last_refused = c->refused;
}

static int run_cell(struct sweep *s, struct cell *c, uint32_t repeat, struct k3_err *err)
{
    struct k3_decode d = s->base;
    struct k3_decode_window w = { 0 };
    double share = c->share, rate;
    int rc;

    if (isnan(share)) { /* trunk first: the experts keep what one layer of all rows may need at once, at least */
        const struct k3_model *m = s->model;
        double slots = (double)m->cfg.top_k * (double)m->expert_slot_bytes * 1.001;

        share = 1 - slots / (c->total_gb * 1e9);
        if (share * c->total_gb * 1e9 > (double)m->trunk_bytes * 1.001 + 3e8)
            share = ((double)m->trunk_bytes * 1.001 + 3e8) / (c->total_gb * 1e9);
        if (share <= 0) {
            refuse_cell(s, c, "not even one layer's experts fit");
            return 0;
        }
    }
    d.pairs = 1;
    d.setup.trunk_bytes = (uint64_t)(share * c->total_gb * 1e9);
    d.setup.cache_bytes = (uint64_t)(c->total_gb * 1e9) - d.setup.trunk_bytes;
    rc = k3_decode_measure(&d, &w, err);
    if (rc < 0 && err->exit_status == K3_EXIT_REFUSED && !k3_bench_stop) { /* a budget that is too small for its part */
        refuse_cell(s, c, err->text);
        *err = (struct k3_err)K3_ERR_INIT;
        return 0;
    }
    if (rc < 0)
        return rc;
    rate = d.sequences / w.wall_s;
    c->tokens_per_s[c->n++] = rate;
    if (s->n_lines++ == 0)
        printf("total_gb\ttrunk_share\trepeat\ttokens_per_s\tpass_s\tlimit_s\tarithmetic_s\tbytes_per_pass\traw_bytes_per_s\n");
    printf("%g\t%.3f\t%u\t%.4f\t%.4f\t%.4f\t%.4f\t%.0f\t%.0f\n", c->total_gb, share, repeat + 1, rate, w.wall_s,
           w.limit_s, w.arithmetic_s, w.bytes, w.raw);
    fflush(stdout);
    return 0;
}

static void summary(const struct sweep *s)
{
    char spread[64];

    printf("# total_gb\ttrunk_share\ttokens_per_s median (least to greatest)\tspread\n");
    for (uint32_t i = 0; i < s->n_cells; i++) {
        const struct cell *c = &s->cell[i];
        double least = INFINITY, greatest = 0;
        char share[16];

        if (c->n == 0) {
            printf("# %g\t%s\t-\t%s\n", c->total_gb, share_text(c, share), c->refused);
            continue;
        }
        for (uint32_t k = 0; k < c->n; k++) {
            least = fmin(least, c->tokens_per_s[k]);
            greatest = fmax(greatest, c->tokens_per_s[k]);
        }
        printf("# %g\t%s\t%s\t%.1f %%\n", c->total_gb, share_text(c, share), k3_bench_spread(c->tokens_per_s, c->n, spread),
               100 * (greatest - least) / k3_bench_median(c->tokens_per_s, c->n));
    }
}

int k3_bench_sweep(int argc, char **argv)
{
    struct sweep s = { .base = K3_DECODE_DEFAULT, .total_gb = 4, .ladder = "2,4,8", .repeats = 3 };
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        K3_DECODE_OPT_ROWS(&s.base),
        { "total-gb", K3_OPT_DOUBLE, &s.total_gb, "X", "memory that is split 0.10, 0.25, 0.60, 0.86 (default 4)", 0.001, 100000 },
        { "ladder", K3_OPT_STRING, &s.ladder, "X,X,..", "totals in 10^9 bytes, trunk first (default 2,4,8)", 0, 0 },
        { "repeats", K3_OPT_U32, &s.repeats, "N", "rounds over all cells (default 3)", 1, MAX_REPEATS },
        { "seconds", K3_OPT_DOUBLE, &s.base.seconds, "S", "length of the raw part of a window (default 2)", 0.05, 600 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench sweep", "tokens per second over splits of a fixed memory, and over a ladder of totals",
                      argc, argv, NULL, &status))
        return status;
    if (!k3_bench_need_model("sweep", s.base.setup.model_dir))
        return K3_EXIT_REFUSED;
    for (size_t i = 0; i < sizeof(shares) / sizeof(*shares); i++)
        add(&s, s.total_gb, shares[i]);
    if (!add_ladder(&s, s.ladder)) {
        fprintf(stderr, "k3-bench: --ladder %s: must be numbers of 10^9 bytes with commas between, as 2,4,8\n", s.ladder);
        return K3_EXIT_REFUSED;
    }
    rc = k3_threads_check(&s.base.threads, s.base.force_threads, &err);
    if (rc == 0)
        rc = k3_bench_model(&s.base.setup, &s.model, &err);
    for (uint32_t r = 0; r < s.repeats && rc == 0; r++)
        for (uint32_t i = 0; i < s.n_cells && rc == 0; i++)
            if (!s.cell[i].refused[0])
                rc = run_cell(&s, &s.cell[i], r, &err);
    if (rc == 0 && s.n_lines == 0)
        rc = k3_refuse(&err, -EINVAL, "every cell was refused");
    if (rc == 0)
        summary(&s);
    k3_model_close(s.model);
    return k3_bench_end(rc, &err);
}
