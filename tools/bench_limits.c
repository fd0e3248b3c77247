/* The limits of arithmetic: which loop reads fastest here, and how fast it is now. */
#include "tools/bench_limits.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-computed/kernels.h"

#define TASK_BYTES (896u << 10) /* of one thread's reading at a time; its streams are no power of two apart */
#define CHOOSE_BYTES 2000000000u
#define CHOOSE_ROUNDS 3
#define FMA_ROUNDS 100000u /* a quarter of a millisecond */

struct k3_bench_limits {
    struct k3_team *team;
    bool avx512;
    struct k3_span *task;
    size_t n_tasks;
    const struct k3_bench_read_loop *loops, *loop;
    double fma_task_s; /* about */
    _Atomic uint64_t sink, flop;
};

static void read_task(void *arg, size_t i, uint32_t worker)
{
    struct k3_bench_limits *l = arg;

    (void)worker;
    atomic_fetch_xor_explicit(&l->sink, l->loop->read(l->task[i].at, l->task[i].len_bytes), memory_order_relaxed);
}

static void fma_task(void *arg, size_t i, uint32_t worker)
{
    struct k3_bench_limits *l = arg;
    uint64_t flop;
    float sum = l->avx512 ? k3_bench_fma_avx512(FMA_ROUNDS, &flop) : k3_bench_fma_avx2(FMA_ROUNDS, &flop);

    (void)i;
    (void)worker;
    atomic_fetch_add_explicit(&l->flop, flop, memory_order_relaxed);
    atomic_fetch_xor_explicit(&l->sink, sum > 0, memory_order_relaxed);
}

static double timed(struct k3_bench_limits *l, k3_team_fn *fn, size_t n)
{
    uint64_t t0 = k3_now_ns();

    k3_team_run(l->team, n, 1, fn, l);
    return (double)(k3_now_ns() - t0 + 1) / 1e9;
}

double k3_bench_limits_read(struct k3_bench_limits *l, uint64_t most_bytes)
{
    uint64_t bytes = 0;
    size_t n = 0;

    while (n < l->n_tasks && (n == 0 || bytes < most_bytes))
        bytes += l->task[n++].len_bytes;
    return (double)bytes / timed(l, read_task, n);
}

double k3_bench_limits_fma(struct k3_bench_limits *l, double seconds)
{
    uint32_t threads = k3_team_size(l->team);
    size_t n = (size_t)(seconds / l->fma_task_s) + 1;
    double t;

    atomic_store_explicit(&l->flop, 0, memory_order_relaxed);
    t = timed(l, fma_task, n * threads);
    return (double)atomic_load_explicit(&l->flop, memory_order_relaxed) / t;
}

static void choose(struct k3_bench_limits *l)
{
    double best = 0;
    const struct k3_bench_read_loop *chosen = l->loops;

    for (int round = 0; round < CHOOSE_ROUNDS; round++)
        for (int i = 0; i < K3_BENCH_N_READS; i++) {
            double rate;

            l->loop = &l->loops[i];
            rate = k3_bench_limits_read(l, CHOOSE_BYTES);
            if (rate > best) {
                best = rate;
                chosen = l->loop;
            }
        }
    l->loop = chosen;
}

/* Cuts the spans into tasks; with out NULL it only counts. */
static size_t cut(const struct k3_span *spans, size_t n_spans, struct k3_span *out)
{
    size_t n = 0;

    for (size_t s = 0; s < n_spans; s++)
        for (size_t at = 0; spans[s].len_bytes - at >= K3_BENCH_READ_UNIT;) {
            size_t left = spans[s].len_bytes - at, len = left < TASK_BYTES ? left / K3_BENCH_READ_UNIT * K3_BENCH_READ_UNIT
                                                                           : TASK_BYTES;

            if (out)
                out[n] = (struct k3_span){ (const char *)spans[s].at + at, len };
            n++;
            at += len;
        }
    return n;
}

int k3_bench_limits_open(struct k3_bench_limits **out, struct k3_team *team, const struct k3_span *spans, size_t n_spans,
                         struct k3_err *err)
{
    const char *best = k3_kernels_get("auto")->name;
    struct k3_bench_limits *l;
    uint64_t flop;

    if (strcmp(best, "c") == 0)
        return k3_refuse(err, -ENOTSUP, "the limits are measured with AVX2 or AVX-512, and this CPU has neither");
    l = calloc(1, sizeof(*l));
    if (!l)
        return k3_fail(err, -ENOMEM, "no memory for the limits");
    l->team = team;
    l->avx512 = strcmp(best, "avx512") == 0;
    l->loops = l->avx512 ? k3_bench_reads_avx512 : k3_bench_reads_avx2;
    l->n_tasks = cut(spans, n_spans, NULL);
    l->task = calloc(l->n_tasks + 1, sizeof(*l->task));
    if (!l->task || l->n_tasks == 0) {
        int rc = l->task ? k3_refuse(err, -EINVAL, "the weights are too small to measure how fast they can be read")
                         : k3_fail(err, -ENOMEM, "no memory for %zu parts to read", l->n_tasks);

        k3_bench_limits_close(l);
        return rc;
    }
    cut(spans, n_spans, l->task);
    (void)(l->avx512 ? k3_bench_fma_avx512(FMA_ROUNDS, &flop) : k3_bench_fma_avx2(FMA_ROUNDS, &flop)); /* warms up */
    l->fma_task_s = timed(l, fma_task, 4 * k3_team_size(team)) / 4;
    choose(l);
    *out = l;
    return 0;
}

void k3_bench_limits_close(struct k3_bench_limits *l)
{
    if (l)
        free(l->task);
    free(l);
}

const char *k3_bench_limits_text(const struct k3_bench_limits *l, char out[64])
{
    int n = snprintf(out, 64, "%s, %u stream%s a thread", l->avx512 ? "avx512" : "avx2", l->loop->streams,
                     l->loop->streams == 1 ? "" : "s");

    if (l->loop->ahead_bytes)
        snprintf(out + n, (size_t)(64 - n), ", prefetched %u bytes ahead", l->loop->ahead_bytes);
    return out;
}
