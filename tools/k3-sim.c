/* k3-sim: replays a trace of expert routes through caches of any size. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "ipc/parse.h"
#include "tools/sim.h"

#define N_SIZES 32
#define N_COLUMNS 12
#define QUIET_NS 2000000000ull

static const char summary[] =
    "what the expert cache would have hit\n"
    "  TRACE was made by k3ctl trace start, or is a file of (layer, expert) pairs (--raw).  The demands are those of\n"
    "  k3-computed: every expert of a layer once in each pass, ascending.  Columns: the policies of k3-expertd; a set of\n"
    "  experts pinned by how often they are demanded; Belady's optimum, which no policy can exceed.";

struct column {
    char name[24];
    const struct k3_policy_ops *ops; /* NULL: pinned or belady */
    double half_life;
    bool pinned;
};

struct sim {
    const char *path, *slots_text, *gb_text, *pinned_text, *half_text, *svg;
    bool raw, once, lookahead;
    double trunk_gbs, expert_gbs, compute_gbs, pinned_share;
    uint64_t ring_bytes, trunk_bytes;
    uint32_t n_experts, top_k;
    uint64_t slot_bytes;

    struct k3_trace trace;
    struct k3_demands d;
    uint32_t slots[N_SIZES];
    size_t n_sizes, n_columns, from, learn;
    struct column column[N_COLUMNS];
    uint64_t hits[N_COLUMNS][N_SIZES];
};

/* ---- options ---- */

/* Calls fn for every item of "a,b,c". */
static int each(struct sim *s, const char *option, const char *text,
                int (*fn)(struct sim *s, const char *option, const char *item, struct k3_err *err), struct k3_err *err)
{
    char item[64];
    int rc = 0;

    while (rc == 0) {
        size_t n = strcspn(text, ",");

        if (n >= sizeof(item))
            return k3_refuse(err, -EINVAL, "%s %.40s...: not a number", option, text);
        memcpy(item, text, n);
        item[n] = 0;
        rc = fn(s, option, item, err);
        if (!text[n])
            break;
        text += n + 1;
    }
    return rc;
}

static int add_size(struct sim *s, const char *option, uint64_t n, struct k3_err *err)
{
    if (s->n_sizes == N_SIZES)
        return k3_refuse(err, -E2BIG, "%s: more than %d sizes", option, N_SIZES);
    s->slots[s->n_sizes++] = (uint32_t)n;
    return 0;
}

static int add_slots(struct sim *s, const char *option, const char *item, struct k3_err *err)
{
    uint64_t n;

    if (k3_parse_u64(item, 1, 100000000, &n) < 0)
        return k3_refuse(err, -EINVAL, "%s %s: must be whole numbers from 1 to 100000000, separated by commas", option, item);
    return add_size(s, option, n, err);
}

static int add_gb(struct sim *s, const char *option, const char *item, struct k3_err *err)
{
    double gb, n;

    if (k3_parse_double(item, 0, 1e6, &gb) < 0)
        return k3_refuse(err, -EINVAL, "%s %s: must be numbers of 10^9 bytes, separated by commas", option, item);
    n = gb * 1e9 / (double)s->slot_bytes;
    if (n < 1 || n > 1e8)
        return k3_refuse(err, -EINVAL, "%s %s: is %.3g slots of %llu bytes; there must be 1 to 100000000 (--slot-bytes)", option,
                         item, n, (unsigned long long)s->slot_bytes);
    return add_size(s, option, (uint64_t)n, err);
}

static int add_half(struct sim *s, const char *option, const char *item, struct k3_err *err)
{
    struct column *c = &s->column[s->n_columns];

    if (s->n_columns + 2 >= N_COLUMNS)
        return k3_refuse(err, -E2BIG, "%s: at most %d half-lives", option, N_COLUMNS - 4);
    *c = (struct column){ .ops = &k3_policy_lfru };
    if (k3_parse_double(item, 1e-3, 1e6, &c->half_life) < 0)
        return k3_refuse(err, -EINVAL, "%s %s: must be numbers of passes from 0.001 to 1000000, separated by commas", option,
                         item);
    snprintf(c->name, sizeof(c->name), "lfru:%g", c->half_life);
    s->n_columns++;
    return 0;
}

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

/* Without --slots and --gb: twelve, from what one layer of one token needs to all that the trace ever demands. */
static void default_sizes(struct sim *s)
{
    double lo = s->d.top_k, hi = s->d.n_distinct > s->d.top_k ? s->d.n_distinct : s->d.top_k + 1;

    for (int i = 0; i < 12; i++)
        s->slots[s->n_sizes++] = (uint32_t)(lo * pow(hi / lo, i / 11.0) + 0.5);
}

static int choose_sizes(struct sim *s, struct k3_err *err)
{
    size_t n = 0;
    int rc = 0;

    if (s->slots_text)
        rc = each(s, "--slots", s->slots_text, add_slots, err);
    if (rc == 0 && s->gb_text)
        rc = each(s, "--gb", s->gb_text, add_gb, err);
    if (rc == 0 && s->n_sizes == 0)
        default_sizes(s);
    qsort(s->slots, s->n_sizes, sizeof(*s->slots), ascending);
    for (size_t i = 0; i < s->n_sizes; i++)
        if (i == 0 || s->slots[i] != s->slots[n - 1])
            s->slots[n++] = s->slots[i];
    s->n_sizes = n;
    return rc;
}

static int choose_columns(struct sim *s, struct k3_err *err)
{
    int rc = 0;

    s->column[s->n_columns++] = (struct column){ .name = "lru", .ops = k3_policy_find("lru") };
    s->column[s->n_columns++] = (struct column){ .name = "lfru", .ops = &k3_policy_lfru };
    if (s->half_text)
        rc = each(s, "--half-life", s->half_text, add_half, err);
    s->column[s->n_columns++] = (struct column){ .name = "pinned", .pinned = true };
    s->column[s->n_columns++] = (struct column){ .name = "belady" };
    return rc;
}

/* ---- work ---- */

static int load(struct sim *s, struct k3_err *err)
{
    size_t len_bytes;
    void *data;
    int rc = k3_trace_read(s->path, &data, &len_bytes, err);

    if (rc < 0)
        return rc;
    if (s->raw)
        rc = k3_trace_parse_raw(&s->trace, data, len_bytes, s->path, s->n_experts, s->top_k, s->slot_bytes, err);
    else
        rc = k3_trace_parse(&s->trace, data, len_bytes, s->path, err);
    free(data);
    if (rc < 0)
        return rc;
    if (!s->slot_bytes)
        s->slot_bytes = s->trace.head.expert_bytes;
    if (!s->slot_bytes)
        return k3_refuse(err, -EINVAL, "%s: does not say how large an expert is: give --slot-bytes", s->path);
    if (s->trace.n_rows == 0)
        return k3_refuse(err, -ENODATA, "%s: holds no whole pass (%llu bytes of one that was cut off)", s->path,
                         (unsigned long long)s->trace.cut_bytes);
    if (s->once)
        rc = k3_trace_once(&s->trace, err);
    if (rc == 0)
        rc = k3_demands_build(&s->d, &s->trace, err);
    if (rc == 0 && s->d.n == 0)
        rc = k3_refuse(err, -ENODATA, "%s: holds no expert demand", s->path);
    return rc;
}

static int replay(struct sim *s, struct k3_err *err)
{
    uint64_t begin = k3_now_ns(), said = begin;
    int rc = 0;

    for (size_t i = 0; i < s->n_sizes && rc == 0; i++)
        for (size_t c = 0; c < s->n_columns && rc == 0; c++) {
            const struct column *col = &s->column[c];

            if (col->ops)
                rc = k3_sim_policy(&s->d, col->ops, col->half_life, s->slots[i], s->from, &s->hits[c][i], err);
            else if (col->pinned)
                rc = k3_sim_pinned(&s->d, s->slots[i], s->learn, s->from, &s->hits[c][i], err);
            else
                rc = k3_sim_belady(&s->d, s->slots[i], s->from, &s->hits[c][i], err);
            if (k3_now_ns() - said > QUIET_NS) {
                said = k3_now_ns();
                fprintf(stderr, "k3-sim: %zu of %zu replays after %.0f s\n", i * s->n_columns + c + 1,
                        s->n_sizes * s->n_columns, (double)(said - begin) / 1e9);
            }
        }
    return rc;
}

/* Guesses of half, one, two and four times top_k, as far as the trace holds them; and none. */
static int look_ahead(struct sim *s, struct k3_err *err)
{
    uint32_t k = s->d.top_k, ks[] = { 0, k / 2 ? k / 2 : 1, k, 2 * k, 4 * k }, before = UINT32_MAX;

    if (s->trunk_bytes)
        s->trace.head.trunk_bytes = s->trunk_bytes;
    printf("%s: look-ahead; trunk %.3g GB a pass at %.3g GB/s, %.3g of it pinned, ring %.3g GB; experts %.3g GB a layer and row at "
           "%.3g GB/s; arithmetic %.3g GB/s\n", s->path, (double)s->trace.head.trunk_bytes / 1e9, s->trunk_gbs, s->pinned_share,
           (double)s->ring_bytes / 1e9, k * (double)s->slot_bytes / 1e9, s->expert_gbs, s->compute_gbs);
    printf("%7s %7s %10s %10s | %9s %9s %10s %10s %8s\n", "slots", "guesses", "recall %", "useless %", "reads", "useless",
           "s/pass", "of none", "GB/pass");
    for (size_t i = 0; i < s->n_sizes; i++) {
        double none = 0;

        for (size_t n = 0; n < sizeof(ks) / sizeof(*ks); n++) {
            struct k3_split o = { .n_slots = s->slots[i], .k = ks[n], .slot_bytes = s->slot_bytes, .ring_bytes = s->ring_bytes,
                                  .trunk_rate = s->trunk_gbs * 1e9, .expert_rate = s->expert_gbs * 1e9,
                                  .compute_rate = s->compute_gbs * 1e9, .pinned = s->pinned_share };
            struct k3_split_result r;
            struct k3_recall c;
            int rc;

            if (ks[n] > s->trace.head.look_k || ks[n] == before)
                continue;
            before = ks[n];
            k3_sim_recall(&s->trace, ks[n], &c);
            rc = k3_sim_split(&s->trace, &o, &r, err);
            if (rc < 0)
                return rc;
            none = n ? none : r.seconds;
            printf("%7u %7u %10.2f %10.2f | %9llu %9llu %10.4g %10.4f %8.3g\n", o.n_slots, ks[n],
                   c.routed ? 100.0 * (double)c.came / (double)c.routed : 0,
                   c.guessed ? 100.0 - 100.0 * (double)c.came / (double)c.guessed : 0, (unsigned long long)r.reads,
                   (unsigned long long)r.useless, r.seconds / (double)r.passes, r.seconds / none,
                   (double)r.reads * (double)s->slot_bytes / 1e9 / (double)r.passes);
        }
    }
    return 0;
}

static double percent(const struct sim *s, size_t c, size_t i)
{
    return 100.0 * (double)s->hits[c][i] / (double)(s->d.n - s->from);
}

static void print(const struct sim *s)
{
    const struct k3_trace_head *h = &s->trace.head;
    double n = (double)(s->d.n - s->from), rows = (double)s->d.n_rows * n / (double)s->d.n;

    printf("%s: %u layers of %u experts, top %u; %zu passes, %zu rows, %zu demands of %u different experts%s\n", s->path,
           h->n_layers - h->first_moe, h->n_experts, h->top_k, s->d.n_passes, s->d.n_rows, s->d.n, s->d.n_distinct,
           s->once ? ", every position once" : "");
    if (s->trace.cut_bytes)
        printf("the file ends inside a pass: its %llu bytes are left out\n", (unsigned long long)s->trace.cut_bytes);
    printf("slot: %.3f MB; pinned: the most demanded of the %s; hits counted in the %s\n", (double)s->slot_bytes / 1e6,
           s->learn < s->d.n ? "first half of the passes" : "whole trace", s->from ? "second half" : "whole trace");
    for (int what = 0; what < 2; what++) {
        printf("\n%s\n%9s %9s", what ? "GB read for each row" : "hits, % of the demands", "slots", "GB");
        for (size_t c = 0; c < s->n_columns; c++)
            printf(" %9s", s->column[c].name);
        printf("\n");
        for (size_t i = 0; i < s->n_sizes; i++) {
            printf("%9u %9.3f", s->slots[i], (double)s->slots[i] * (double)s->slot_bytes / 1e9);
            for (size_t c = 0; c < s->n_columns; c++)
                if (what)
                    printf(" %9.4g", (n - (double)s->hits[c][i]) * (double)s->slot_bytes / 1e9 / rows);
                else
                    printf(" %9.2f", percent(s, c, i));
            printf("\n");
        }
    }
}

static int plot(const struct sim *s, FILE *f, struct k3_err *err)
{
    const char *name[N_COLUMNS];
    double x[N_SIZES], y[N_COLUMNS * N_SIZES];
    char title[160];
    const char *file = strrchr(s->path, '/');
    struct k3_plot p = { .title = title, .x_label = "expert cache, GB (10^9 bytes), logarithmic",
                         .y_label = "demands that hit, %", .name = name, .x = x, .y = y, .n_lines = s->n_columns,
                         .n_x = s->n_sizes };
    int failed;

    snprintf(title, sizeof(title), "Expert cache on %.60s%s, %zu demands", file ? file + 1 : s->path,
             s->once ? ", every position once" : "", s->d.n - s->from);
    for (size_t i = 0; i < s->n_sizes; i++)
        x[i] = (double)s->slots[i] * (double)s->slot_bytes / 1e9;
    for (size_t c = 0; c < s->n_columns; c++) {
        name[c] = s->column[c].name;
        for (size_t i = 0; i < s->n_sizes; i++)
            y[c * s->n_sizes + i] = percent(s, c, i);
    }
    k3_plot_write(f, &p);
    failed = ferror(f);
    if (fclose(f) != 0 || failed) {
        unlink(s->svg);
        return k3_fail(err, -EIO, "--svg %s: could not be written: %s", s->svg, strerror(errno));
    }
    return 0;
}

static int run(struct sim *s, struct k3_err *err)
{
    bool half = strcmp(s->pinned_text, "first-half") == 0;
    FILE *svg = NULL;
    int rc;

    if (!half && strcmp(s->pinned_text, "whole") != 0)
        return k3_refuse(err, -EINVAL, "--pinned %.64s: must be whole or first-half", s->pinned_text);
    if (!s->raw && (s->n_experts || s->top_k))
        return k3_refuse(err, -EINVAL, "--experts and --top-k are for --raw: a trace says them itself");
    if (s->raw) {
        s->n_experts = s->n_experts ? s->n_experts : 896;
        s->top_k = s->top_k ? s->top_k : 16;
        s->slot_bytes = s->slot_bytes ? s->slot_bytes : 17547264; /* of the released model */
        if (s->top_k > s->n_experts)
            return k3_refuse(err, -EINVAL, "--top-k %u: there are %u experts (--experts)", s->top_k, s->n_experts);
    }
    rc = choose_columns(s, err);
    if (rc == 0)
        rc = load(s, err);
    if (rc == 0)
        rc = choose_sizes(s, err);
    if (rc == 0 && s->lookahead && s->trace.head.look_k == 0)
        rc = k3_refuse(err, -ENODATA, "--lookahead: %s holds none: k3ctl trace start --lookahead makes one", s->path);
    if (s->lookahead)
        return rc == 0 ? look_ahead(s, err) : rc;
    s->learn = half ? s->d.half : s->d.n;
    s->from = half ? s->d.half : 0;
    if (rc == 0 && s->from >= s->d.n)
        rc = k3_refuse(err, -ENODATA, "--pinned first-half: %s has no second half to count in", s->path);
    if (rc == 0 && s->svg && !(svg = fopen(s->svg, "we"))) /* before the work */
        rc = k3_refuse(err, -errno, "--svg %s: %s", s->svg, strerror(errno));
    if (rc == 0)
        rc = replay(s, err);
    if (rc == 0)
        print(s);
    if (rc == 0 && svg)
        return plot(s, svg, err);
    if (svg) {
        fclose(svg);
        unlink(s->svg);
    }
    return rc;
}

int main(int argc, char **argv)
{
    struct sim s = { .pinned_text = "whole", .trunk_gbs = 3, .expert_gbs = 3, .compute_gbs = 25, .ring_bytes = 256 << 20 };
    struct k3_str_list operands = { .name = "TRACE" };
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        { "raw", K3_OPT_FLAG, &s.raw, NULL, "TRACE is little-endian int32 pairs (layer, expert) without a head", 0, 0 },
        { "experts", K3_OPT_U32, &s.n_experts, "N", "--raw: experts of a layer (default 896)", 1, 65535 },
        { "top-k", K3_OPT_U32, &s.top_k, "N", "--raw: experts of a row (default 16)", 1, 65535 },
        { "once", K3_OPT_FLAG, &s.once, NULL, "count every position of a sequence once: a trace that recomputes all", 0, 0 },
        { "slots", K3_OPT_STRING, &s.slots_text, "N,N,..", "cache sizes in slots (default: twelve up to all experts)", 0, 0 },
        { "gb", K3_OPT_STRING, &s.gb_text, "X,X,..", "cache sizes in 10^9 bytes", 0, 0 },
        { "slot-bytes", K3_OPT_SIZE, &s.slot_bytes, "SIZE", "bytes of one expert (default: what the trace says; --raw: 17547264)",
          0, 0 },
        { "pinned", K3_OPT_STRING, &s.pinned_text, "SET",
          "pin by the demands of the whole trace (default), or of its first-half and count hits in the second", 0, 0 },
        { "half-life", K3_OPT_STRING, &s.half_text, "N,N,..", "more columns: lfru by frequency alone with these half-lives, in passes", 0, 0 },
        { "lookahead", K3_OPT_FLAG, &s.lookahead, NULL,
          "instead: recall of the look-ahead in the trace, and what reading ahead would save on split devices", 0, 0 },
        { "trunk-gbs", K3_OPT_DOUBLE, &s.trunk_gbs, "X", "--lookahead: rate of the trunk's device (default 3)", 1e-3, 1e6 },
        { "expert-gbs", K3_OPT_DOUBLE, &s.expert_gbs, "X", "--lookahead: rate of the experts' device (default 3)", 1e-3, 1e6 },
        { "compute-gbs", K3_OPT_DOUBLE, &s.compute_gbs, "X", "--lookahead: weights multiplied (default 25)", 1e-3, 1e6 },
        { "ring-bytes", K3_OPT_SIZE, &s.ring_bytes, "SIZE", "--lookahead: the trunk's ring (default 256M)", 0, 0 },
        { "trunk-bytes", K3_OPT_SIZE, &s.trunk_bytes, "SIZE", "--lookahead: trunk of one pass (default: what the trace says)", 0, 0 },
        { "pinned-share", K3_OPT_DOUBLE, &s.pinned_share, "X", "--lookahead: share of the trunk in memory (default 0)", 0, 1 },
        { "svg", K3_OPT_STRING, &s.svg, "FILE", "the hits as a plot", 0, 0 },
        { NULL },
    };

    if (k3_opts_parse(table, "k3-sim", summary, argc, argv, &operands, &status))
        return status;
    if (operands.n != 1) {
        fprintf(stderr, operands.n ? "k3-sim: unexpected \"%s\": one trace at a time; see k3-sim --help\n"
                                   : "k3-sim: the TRACE is missing; see k3-sim --help\n", operands.n ? operands.item[1] : "");
        return K3_EXIT_REFUSED;
    }
    s.path = operands.item[0];
    rc = run(&s, &err);
    if (rc < 0)
        fprintf(stderr, "k3-sim: %s\n", err.text);
    k3_demands_free(&s.d);
    k3_trace_free(&s.trace);
    if (fflush(stdout) != 0 && rc >= 0)
        return K3_EXIT_FAILED;
    return k3_exit_status(rc, &err);
}
