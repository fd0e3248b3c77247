/* k3-bench kernels, the rest: what a pass computes besides matrices, on one thread with its data where a pass has it, and what
 * that makes of a token of the released model whose weights are all in memory. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/daemon.h"
#include "k3-computed/ops.h"
#include "k3-computed/sampling.h"
#include "tools/bench_kernels.h"

/* The released model (spec/model.md 2). */
#define HIDDEN 7168u
#define DIM 128u /* of a KDA head */
#define HEADS 96u
#define TAPS 4u
#define LATENT 512u
#define ROPE 64u
#define EXPERTS 896u
#define TOP_K 16u
#define VOCAB 163840u
#define N_KDA 69u
#define N_MLA 24u
#define N_LAYERS 93u
#define N_MOE 92u
#define TOKEN_BYTES (111.11e9 + 25.83e9) /* trunk with lm_head, experts: as k3-plan counts them */

#define POSITIONS 32768u /* of the context that is attended to */
#define SOURCES 9u       /* the most that an attention residual mixes: eight snapshots and the prefix */
#define STATES 16u       /* heads of KDA state taken in turn: 1 MiB */
#define RUN_S 0.005      /* of one measurement */

static_assert(K3_ATTEND_QUERIES * (LATENT + ROPE) <= HIDDEN && HEADS % K3_ATTEND_QUERIES == 0, "a and y hold the queries");

struct ops {
    const struct k3_kernels *k;
    float *a, *b, *c, *y, *kv, *states, *scratch;
    struct k3_sampler *sampler;
    struct k3_sampling how;
    size_t turn;
    int failed;
};

static void kda_step(struct ops *o)
{
    float *s = o->states + o->turn++ % STATES * DIM * DIM;

    o->k->kda_step(s, o->y, o->a, o->b, o->c, o->c + DIM, 0.5f, DIM, DIM, o->scratch);
}
static void conv(struct ops *o)
{
    k3_shortconv(o->k, o->y, o->a, o->scratch, o->b, DIM, TAPS);
}
static void rmsnorm(struct ops *o)
{
    k3_rmsnorm(o->k, o->y, o->a, o->b, HIDDEN, 1e-5f);
}
static void attnres(struct ops *o)
{
    const float *from[SOURCES];

    for (uint32_t i = 0; i < SOURCES; i++)
        from[i] = o->kv + (size_t)i * HIDDEN;
    k3_attnres(o->k, o->y, from, SOURCES, o->b, HIDDEN, 1e-5f, NULL);
}
static void route(struct ops *o)
{
    uint16_t ids[TOP_K];
    float weights[TOP_K];

    k3_route(o->k, ids, weights, o->a, o->b, EXPERTS, TOP_K, 1, 1, o->scratch);
}
static void situ(struct ops *o)
{
    o->k->situ(o->y, o->a, o->b, 3072, 4, 25);
}
static void attend(struct ops *o)
{
    size_t n_seen[K3_ATTEND_QUERIES]; /* heads of one row, as a pass that decodes takes them */

    for (uint32_t i = 0; i < K3_ATTEND_QUERIES; i++)
        n_seen[i] = POSITIONS;
    k3_attend(o->k, o->y, o->a, K3_ATTEND_QUERIES, o->kv, LATENT + ROPE, n_seen, LATENT, ROPE, 0.07f, o->scratch);
}
static void pick(struct ops *o)
{
    struct k3_err err = K3_ERR_INIT;
    uint32_t token;

    if (k3_sampler_pick(o->sampler, o->kv, &o->how, 0, &token, &err) < 0)
        o->failed = 1;
}

/* Everything but drawing is shared by the threads. */
static int line(struct k3_bench_arith *b, struct ops *o, const char *name, void (*op)(struct ops *), double bytes, uint32_t calls,
                bool shared, struct k3_err *err)
{
    double ns[64], share[64];
    char spread[64], rate[32] = "-";
    uint64_t n = 1;

    for (int i = -1; i < (int)b->pairs && !k3_bench_stop; i++) {
        double read = k3_bench_limits_read(b->limits, 64u << 20), s;
        uint64_t t0 = k3_now_ns();

        for (uint64_t c = 0; c < n; c++)
            op(o);
        s = (double)(k3_now_ns() - t0 + 1) / 1e9 / (double)n;
        if (i < 0) { /* the call -1 warms up and says how many of them take RUN_S */
            n = (uint64_t)(RUN_S / s) + 1;
            continue;
        }
        ns[i] = s * 1e9;
        share[i] = 100 * s * calls / (shared ? k3_team_size(b->team) : 1) / (TOKEN_BYTES / read);
    }
    if (k3_bench_stop)
        return k3_fail(err, -ECANCELED, "stopped");
    if (o->failed)
        return k3_fail(err, -EDOM, "%s failed", name);
    if (bytes > 0)
        snprintf(rate, sizeof(rate), "%.1f GB/s", bytes / k3_bench_median(ns, b->pairs));
    printf("%-36s %12.0f ns %13s %6u  %s %%\n", name, k3_bench_median(ns, b->pairs), rate, calls,
           k3_bench_spread(share, b->pairs, spread));
    fflush(stdout);
    return 0;
}

static int lines(struct k3_bench_arith *b, struct ops *o, struct k3_err *err)
{
    const double f = sizeof(float);
    const struct {
        const char *name;
        void (*op)(struct ops *);
        double bytes; /* 0: memory is not what it waits for */
        uint32_t calls;
        bool shared;
    } ops[] = {
        { "KDA step of a head", kda_step, 2 * f * DIM * DIM, N_KDA * HEADS, true },
        { "convolution of a head, q or k or v", conv, f * DIM * (2 * TAPS + 1), N_KDA * HEADS * 3, true },
        { "attention, heads together, at 32768", attend, f * POSITIONS * (LATENT + ROPE), N_MLA * HEADS / K3_ATTEND_QUERIES,
          true },
        { "RMS norm of a row", rmsnorm, 3 * f * HIDDEN, 2 * N_LAYERS, true },
        { "attention residual of 9 sources", attnres, f * SOURCES * HIDDEN, 2 * N_LAYERS, true },
        { "router: 16 of 896", route, 2 * f * EXPERTS, N_MOE, true },
        { "SiTU of 3072", situ, 3 * f * 3072, N_MOE * (TOP_K + 2), true },
        { "drawing of 163840, greedy", pick, 0, 1, false },
        { "drawing of 163840, top-p and min-p", pick, 0, 1, false },
    };
    int rc = 0;

    printf("\n%-36s %15s %13s %6s  %s\n", "not a matrix, one thread", "a call", "data", "calls",
           "share of a token");
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops) && rc == 0; i++) {
        o->how = i + 1 < sizeof(ops) / sizeof(*ops)
                     ? (struct k3_sampling){ .temperature = 0, .top_p = 1 }
                     : (struct k3_sampling){ .temperature = 1, .top_p = 0.95, .min_p = 0.01, .seed = 1 };
        rc = line(b, o, ops[i].name, ops[i].op, ops[i].bytes, ops[i].calls, ops[i].shared, err);
    }
    if (rc == 0)
        printf("share of a token: the time of its calls, divided by the threads where they share them, of the time in which memory "
               "gives its %.0f GB of weights; over 100 %% they take longer than that\n", TOKEN_BYTES / 1e9);
    return rc;
}

int k3_bench_ops(struct k3_bench_arith *b, struct k3_err *err)
{
    size_t kv_floats = (size_t)POSITIONS * (LATENT + ROPE), scratch_floats = k3_attend_scratch(K3_ATTEND_QUERIES, POSITIONS, LATENT) + HIDDEN;
    size_t n = 4 * HIDDEN + kv_floats + (size_t)STATES * DIM * DIM + scratch_floats;
    float *all = k3_bench_memory(n * sizeof(float)), *at = all;
    struct ops o = { .k = b->k };
    uint64_t seed = 1;
    int rc;

    if (!all)
        return k3_fail(err, -ENOMEM, "no memory for a context of %u positions", POSITIONS);
    for (size_t i = 0; i < n; i++) { /* in [-1, 1); the weights of a residual and the decay are below 1 then */
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        all[i] = (float)((int32_t)(seed >> 40) - (1 << 23)) * 0x1p-23f;
    }
    o.a = at, at += HIDDEN;
    o.b = at, at += HIDDEN;
    o.c = at, at += HIDDEN;
    o.y = at, at += HIDDEN;
    o.kv = at, at += kv_floats;
    o.states = at, at += (size_t)STATES * DIM * DIM;
    o.scratch = at;
    rc = k3_sampler_new(&o.sampler, VOCAB, err);
    if (rc == 0)
        rc = lines(b, &o, err);
    k3_sampler_free(o.sampler);
    munmap(all, n * sizeof(float));
    return rc;
}
