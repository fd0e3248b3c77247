/* k3-bench io: how much of the drive reaches the memory that computed reads from.
 *
 * Four measurements alternate: raw direct reads, k3-trunkd alone, k3-expertd alone, both.  The daemons are the real ones;
 * here stands what k3-computed does with them, without the arithmetic: row blocks are asked for and given back, experts that
 * are not resident are demanded and released, and together in the order of a pass.  The ring is emptied before each window, so that what had been read ahead does
 * not count, and bytes are those that the daemons' own counters say were read. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "shm/expert.h"
#include "shm/trunk.h"
#include "tools/bench.h"

#define MAX_DEMANDS 256u
enum { RAW, TRUNK, EXPERT, BOTH, N_MODES };

struct io_bench {
    struct k3_bench_setup setup;
    uint32_t pairs;
    double seconds;
    bool tsv;

    struct k3_trunk_reader *reader;
    struct k3_expert_client *client;
    uint32_t piece;     /* the next of the pass */
    uint32_t layer;     /* of the next demands of expertd alone */
    uint32_t n_demands; /* of a layer */
    uint32_t next_expert[K3_MAX_LAYERS];
    bool demanded;
    int mode;
    _Atomic bool run; /* the consumer goes on */
    struct k3_err err;
};

/* ---- the consumers ---- */

/* All rows of the next piece, given back at once. */
static int take_piece(struct io_bench *b)
{
    const struct k3_piece *p = &b->setup.model->pieces[b->piece];
    uint64_t block = k3_trunk_reader_block_bytes(b->reader);
    uint32_t step = (uint32_t)(block / (p->len_bytes / p->n_rows));
    const void *rows;
    int rc = 0;

    if (step == 0)
        step = 1;
    for (uint32_t row = 0; row < p->n_rows && rc == 0; row += step) {
        uint32_t n = p->n_rows - row < step ? p->n_rows - row : step;

        rc = k3_trunk_reader_rows(b->reader, b->piece, row, n, &rows, &b->err);
        if (rc == 0)
            k3_trunk_reader_done(b->reader);
    }
    if (rc == 0 && ++b->piece == b->setup.model->n_pieces) {
        b->piece = 0;
        rc = k3_trunk_reader_next_pass(b->reader, &b->err);
    }
    return rc;
}

/* Demands top_k experts of a layer that have not been demanded for the longest time: a stretch of ids that goes round. */
static int begin_experts(struct io_bench *b, uint32_t layer)
{
    const struct k3_config *c = &b->setup.model->cfg;
    uint32_t n = b->n_demands;
    uint16_t want[MAX_DEMANDS];

    if (b->next_expert[layer] + n > c->n_experts)
        b->next_expert[layer] = 0;
    for (uint32_t i = 0; i < n; i++)
        want[i] = (uint16_t)(b->next_expert[layer] + i);
    b->next_expert[layer] += n;
    return k3_expert_client_begin(b->client, layer, want, n, &b->err);
}

static int take_experts(struct io_bench *b)
{
    struct k3_expert_view v;
    int rc = 0;

    for (uint32_t i = 0; i < b->n_demands && rc == 0; i++) {
        k3_trunk_reader_set_blocked(b->reader, true); /* as k3-computed does */
        rc = k3_expert_client_next(b->client, &v, &b->err);
        k3_trunk_reader_set_blocked(b->reader, false);
        if (rc == 0)
            k3_expert_client_release(b->client, &v);
    }
    return rc;
}

/* On a thread of its own while b->run: the pass of k3-computed in its order (design.md section 2): a layer's demands leave
 * after its router gate, and are waited for before its latent up. */
static void *consume(void *arg)
{
    struct io_bench *b = arg;
    int rc = 0;

    while (rc == 0 && b->run && b->mode == EXPERT) {
        rc = begin_experts(b, b->layer);
        if (rc == 0)
            rc = take_experts(b);
        b->layer = b->layer + 1 < b->setup.model->cfg.n_layers ? b->layer + 1 : b->setup.model->cfg.first_dense;
    }
    while (rc == 0 && b->run && b->mode != EXPERT) {
        const struct k3_matrix *m = &b->setup.model->matrices[b->setup.model->pieces[b->piece].matrix];
        uint32_t last = m->first_piece + m->n_pieces - 1, piece = b->piece;

        if (b->mode == BOTH && m->role == K3_W_LATENT_UP && piece == m->first_piece && b->demanded) {
            rc = take_experts(b);
            b->demanded = false;
        }
        if (rc == 0)
            rc = take_piece(b);
        if (rc == 0 && b->mode == BOTH && m->role == K3_W_ROUTER && piece == last) {
            rc = begin_experts(b, (uint32_t)m->layer);
            b->demanded = rc == 0;
        }
    }
    if (b->demanded) /* the window ends between the two */
        k3_expert_client_abandon(b->client);
    b->demanded = false;
    return NULL;
}

/* ---- one window ---- */

static uint64_t read_bytes(const struct k3_stats *s)
{
    return k3_stats_value(s, "read_bytes");
}

static int window(struct io_bench *b, int mode, double *bytes_per_s, struct k3_err *err)
{
    uint64_t ring_bytes = k3_stats_value(&b->setup.trunk, "ring_bytes"), t0, t1, n0, n1, p0;
    pthread_t consumer;
    bool has_trunk = mode == TRUNK || mode == BOTH, has_expert = mode == EXPERT || mode == BOTH;
    int rc = 0;

    if (mode == RAW)
        return k3_bench_raw_run(b->setup.raw, b->seconds, bytes_per_s, err);
    b->run = true;
    b->mode = mode;
    p0 = k3_stats_value(&b->setup.trunk, "ring_produced_bytes");
    if (pthread_create(&consumer, NULL, consume, b) != 0)
        return k3_fail(err, -EAGAIN, "no thread");
    k3_bench_nap(0.1);
    if (has_trunk) /* until the stream is past all that had been read ahead */
        for (int left = 20000; left > 0 && !k3_bench_stop && b->err.code == 0 &&
                               k3_stats_value(&b->setup.trunk, "ring_produced_bytes") - p0 < 2 * ring_bytes;
             left--)
            k3_bench_nap(0.001);
    t0 = k3_now_ns();
    n0 = (has_trunk ? read_bytes(&b->setup.trunk) : 0) + (has_expert ? read_bytes(&b->setup.expert) : 0);
    k3_bench_nap(b->seconds);
    n1 = (has_trunk ? read_bytes(&b->setup.trunk) : 0) + (has_expert ? read_bytes(&b->setup.expert) : 0);
    t1 = k3_now_ns();
    b->run = false;
    pthread_join(consumer, NULL);
    if (b->err.code < 0) {
        rc = b->err.code;
        *err = b->err;
    }
    *bytes_per_s = (double)(n1 - n0) / ((double)(t1 - t0) / 1e9);
    k3_bench_idle(&b->setup);
    if (rc == 0 && k3_bench_stop)
        rc = k3_fail(err, -ECANCELED, "stopped");
    return rc;
}

/* ---- the report ---- */

struct result {
    double rate[N_MODES][K3_BENCH_PAIRS * 4];
    uint64_t room_ns, at_depth_ns; /* of the windows of trunkd alone */
};

static void report(const struct io_bench *b, const struct result *r)
{
    double trunk[64], expert[64], both[64];
    char spread[64];
    uint64_t of, huge = k3_bench_raw_huge_bytes(b->setup.raw, &of);

    for (uint32_t i = 0; i < b->pairs; i++) {
        double better = r->rate[TRUNK][i] > r->rate[EXPERT][i] ? r->rate[TRUNK][i] : r->rate[EXPERT][i];

        trunk[i] = r->rate[TRUNK][i] / r->rate[RAW][i];
        expert[i] = r->rate[EXPERT][i] / r->rate[RAW][i];
        both[i] = r->rate[BOTH][i] / better;
    }
    printf("%-22s %8.2f GB/s  depth %u, blocks of %u KiB, %" PRIu64 " of %" PRIu64 " MiB contiguous\n", "raw device",
           k3_bench_median(r->rate[RAW], b->pairs) / 1e9, b->setup.rate.depth, b->setup.rate.block_bytes >> 10, huge >> 20, of >> 20);
    printf("%-22s %8.2f GB/s  %s of raw\n", "k3-trunkd alone", k3_bench_median(r->rate[TRUNK], b->pairs) / 1e9,
           k3_bench_spread(trunk, b->pairs, spread));
    printf("%-22s %8.2f GB/s  %s of raw\n", "k3-expertd alone", k3_bench_median(r->rate[EXPERT], b->pairs) / 1e9,
           k3_bench_spread(expert, b->pairs, spread));
    printf("%-22s %8.2f GB/s  %s of the better alone\n", "both together", k3_bench_median(r->rate[BOTH], b->pairs) / 1e9,
           k3_bench_spread(both, b->pairs, spread));
    if (r->room_ns)
        printf("%-22s %8.1f %%     of the time that the ring had room (k3-trunkd alone)\n", "full depth in flight",
               100.0 * (double)r->at_depth_ns / (double)r->room_ns);
    printf("median (least to greatest) of %u alternating rounds of %.1f s each\n", b->pairs, b->seconds);
    if (!b->tsv)
        return;
    printf("round\traw\ttrunkd\texpertd\tboth\n");
    for (uint32_t i = 0; i < b->pairs; i++)
        printf("%u\t%.0f\t%.0f\t%.0f\t%.0f\n", i + 1, r->rate[RAW][i], r->rate[TRUNK][i], r->rate[EXPERT][i],
               r->rate[BOTH][i]);
}

static int measure(struct io_bench *b, struct k3_err *err)
{
    static const char *const names[N_MODES] = { "raw device", "k3-trunkd", "k3-expertd", "both" };
    struct result *r = calloc(1, sizeof(*r));
    int rc = 0;

    if (!r)
        return k3_fail(err, -ENOMEM, "no memory");
    for (int i = -1; i < (int)b->pairs && rc == 0; i++) /* the round -1 warms up */
        for (int mode = 0; mode < N_MODES && rc == 0; mode++) {
            uint64_t room = k3_stats_value(&b->setup.trunk, "room_ns"),
                     full = k3_stats_value(&b->setup.trunk, "room_at_depth_ns");
            double rate = 0;

            if (i < 0)
                k3_bench_progress("warming up: %s", names[mode]);
            else
                k3_bench_progress("round %d of %u: %s", i + 1, b->pairs, names[mode]);
            rc = window(b, mode, &rate, err);
            if (rc < 0 || i < 0)
                continue;
            r->rate[mode][i] = rate;
            if (mode == TRUNK) {
                r->room_ns += k3_stats_value(&b->setup.trunk, "room_ns") - room;
                r->at_depth_ns += k3_stats_value(&b->setup.trunk, "room_at_depth_ns") - full;
            }
        }
    k3_bench_progress(NULL);
    if (rc == 0)
        report(b, r);
    free(r);
    return rc;
}

/* ---- opening and closing ---- */

static int attach(struct io_bench *b, struct k3_err *err)
{
    struct k3_bench_family *f = &b->setup.family;
    char text[K3_SIZE_TEXT];
    int rc = k3_trunk_reader_open(&b->reader, f->instance, f->rundir, b->setup.model, 1, 10000000000ull, err);

    if (rc == 0)
        rc = k3_trunk_reader_seek_pass(b->reader, err);
    if (rc == 0)
        rc = k3_expert_client_open(&b->client, f->instance, f->rundir, b->setup.model, 1, 10000000000ull, err);
    if (rc == 0 && k3_trunk_reader_layout(b->reader)->pass_bytes < 2 * k3_stats_value(&b->setup.trunk, "ring_bytes"))
        rc = k3_refuse(err, -EINVAL, "with --trunk-gb %.3g nothing much of this trunk streams (%s): too small to measure; give less, or "
                       "k3-mkmodel --released makes a model of the real widths", (double)b->setup.trunk_bytes / 1e9,
                       k3_size_text(text, k3_trunk_reader_layout(b->reader)->pass_bytes));
    return rc;
}

static int run(struct io_bench *b, struct k3_err *err)
{
    struct k3_bench_setup *s = &b->setup;
    int rc = k3_bench_open(s, err);

    if (rc == 0) {
        const struct k3_config *c = &s->model->cfg;

        b->layer = c->first_dense;
        b->n_demands = c->top_k < MAX_DEMANDS ? c->top_k : MAX_DEMANDS;
        /* Two layers' demands: what comes again later has gone by then. */
        s->cache_bytes = 2 * c->top_k * s->model->expert_slot_bytes;
        s->policy = "lru"; /* which never keeps anything of a round that is larger than it */
        if (c->n_layers <= c->first_dense)
            rc = k3_refuse(err, -EINVAL, "this part of the model has no experts; give more --layers");
        else if ((uint64_t)(c->n_layers - c->first_dense) * (c->n_experts / c->top_k) < 4)
            rc = k3_refuse(err, -EINVAL, "%u experts in each layer are too few: the cache would hold them all", c->n_experts);
    }
    if (rc == 0)
        rc = k3_bench_start_weights(s, err);
    if (rc == 0)
        rc = k3_bench_wait(s, err);
    if (rc == 0)
        rc = attach(b, err);
    if (rc == 0)
        rc = measure(b, err);
    k3_expert_client_close(b->client);
    k3_trunk_reader_close(b->reader);
    k3_bench_close(s);
    return rc;
}

int k3_bench_io(int argc, char **argv)
{
    struct io_bench b = { .setup = { .trunk_bytes = 1000000000u, .ring_mb = 256 }, .pairs = K3_BENCH_PAIRS, .seconds = 2,
                          .err = K3_ERR_INIT };
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        K3_BENCH_OPT_ROWS(&b.setup),
        { "trunk-gb", K3_OPT_GB, &b.setup.trunk_bytes, "X", "memory for the trunk in 10^9 bytes (default 1)", 0, 0 },
        { "ring-mb", K3_OPT_U32, &b.setup.ring_mb, "N", "ring in MiB (default 256)", 2, 1 << 20 },
        { "seconds", K3_OPT_DOUBLE, &b.seconds, "S", "length of one window (default 2)", 0.05, 600 },
        { "pairs", K3_OPT_U32, &b.pairs, "N", "alternating rounds (default 9; fewer are for trying)", 1,
          K3_BENCH_PAIRS * 4 },
        { "tsv", K3_OPT_FLAG, &b.tsv, NULL, "print every round, bytes per second, separated by tabs", 0, 0 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench io", "raw device, k3-trunkd alone, k3-expertd alone, both together", argc, argv, NULL,
                      &status))
        return status;
    if (!k3_bench_need_model("io", b.setup.model_dir))
        return K3_EXIT_REFUSED;
    rc = run(&b, &err);
    return k3_bench_end(rc, &err);
}
