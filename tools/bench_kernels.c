/* k3-bench kernels: each kernel and its limit run alternately, nine pairs, in one process on one team; a pair gives one ratio, and
 * the median counts (design.md section 10).  Limits: reading memory for one row of x, fused multiply-add for many rows. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/daemon.h"
#include "k3-computed/kernels.h"
#include "k3-computed/team.h"
#include "tools/bench.h"
#include "tools/bench_limits.h"

#define PAIRS K3_BENCH_PAIRS
#define N_COLS 7168u /* hidden width of the released model */
#define TILE 64u     /* rows of W of one task, as a pass has them */

struct bench {
    const struct k3_kernels *k;
    struct k3_team *team;
    size_t w_bytes, n_rows_w, row_bytes, n_x;
    uint8_t *w;
    float *x, *y;
    bool mxfp4;
    uint64_t rounds;
    _Atomic uint64_t flop, sink;
};

static void read_part(void *arg, size_t i, uint32_t worker)
{
    struct bench *b = arg;
    size_t part = TILE * b->row_bytes, n = part / 512 * 512;
    const uint8_t *at = b->w + i * part;

    (void)worker;
    b->sink ^= strcmp(b->k->name, "avx512") == 0 ? k3_bench_read_avx512(at, n) : k3_bench_read_avx2(at, n);
}

static void fma_part(void *arg, size_t i, uint32_t worker)
{
    struct bench *b = arg;
    uint64_t flop;
    float sum = strcmp(b->k->name, "avx512") == 0 ? k3_bench_fma_avx512(b->rounds, &flop)
                                                  : k3_bench_fma_avx2(b->rounds, &flop);

    (void)i;
    (void)worker;
    b->flop += flop;
    b->sink += sum > 0;
}

static void kernel_part(void *arg, size_t i, uint32_t worker)
{
    struct bench *b = arg;
    const uint8_t *w = b->w + i * TILE * b->row_bytes;
    float *y = b->y + i * TILE;

    (void)worker;
    if (b->mxfp4)
        b->k->mul_mxfp4(y, b->n_rows_w, w, w + TILE * (N_COLS / 2), TILE, N_COLS, b->x, N_COLS, b->n_x);
    else
        b->k->mul[K3_BF16](y, b->n_rows_w, w, TILE, N_COLS, b->x, N_COLS, b->n_x);
}

static double timed(struct bench *b, k3_team_fn *fn, size_t n)
{
    uint64_t t0 = k3_now_ns();

    k3_team_run(b->team, n, 1, fn, b);
    return (double)(k3_now_ns() - t0) / 1e9;
}

/* One line: the kernel's rate, its limit's, and the median of nine alternating ratios with the least and the greatest. */
static void kernel(struct bench *b, bool mxfp4, size_t n_x)
{
    size_t limit_tasks = k3_team_size(b->team) * 4, tasks;
    double ratio[PAIRS], rate[PAIRS], limit[PAIRS];
    bool memory = n_x == 1;
    const char *unit = memory ? "GB/s" : "GFLOPS";

    b->mxfp4 = mxfp4;
    b->n_x = n_x;
    b->row_bytes = mxfp4 ? N_COLS / 2 + N_COLS / 32 : N_COLS * 2;
    b->n_rows_w = b->w_bytes / b->row_bytes / TILE * TILE;
    if (!memory) /* about as long as the kernel: fewer rows of W, since arithmetic takes longer than reading */
        b->n_rows_w = b->n_rows_w / n_x / TILE * TILE + TILE;
    tasks = b->n_rows_w / TILE;
    for (int i = -1; i < PAIRS; i++) { /* the pair -1 warms up */
        double bytes = (double)(tasks * TILE * b->row_bytes), t, l;

        b->flop = 0;
        l = memory ? bytes / timed(b, read_part, tasks) : 0;
        if (!memory) {
            double s = timed(b, fma_part, limit_tasks);
            l = (double)b->flop / s;
        }
        t = timed(b, kernel_part, tasks);
        if (i < 0)
            continue;
        limit[i] = l / 1e9;
        rate[i] = (memory ? bytes : 2.0 * N_COLS * (double)(b->n_rows_w * n_x)) / t / 1e9;
        ratio[i] = rate[i] / limit[i];
    }
    k3_bench_sort(ratio, PAIRS);
    k3_bench_sort(rate, PAIRS);
    k3_bench_sort(limit, PAIRS);
    printf("%-6s %4zu %s %9.1f %9.1f %-7s %5.1f %%  (%.1f to %.1f)\n", mxfp4 ? "mxfp4" : "bf16", n_x,
           memory ? "rows  read " : "rows  fma  ", rate[PAIRS / 2], limit[PAIRS / 2], unit, 100 * ratio[PAIRS / 2],
           100 * ratio[0], 100 * ratio[PAIRS - 1]);
    fflush(stdout);
}

static void *memory(size_t n)
{
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return NULL;
    madvise(p, n, MADV_HUGEPAGE);
    return p;
}

static int run(struct bench *b, uint32_t threads, struct k3_err *err)
{
    static const size_t rows[] = { 1, 4, 8, 64 };
    size_t y_floats = (b->w_bytes / (N_COLS / 2) + TILE) * 64 + 64;
    uint64_t seed = 1;
    int rc = k3_team_new(&b->team, threads, err);

    if (rc < 0)
        return rc;
    b->w = memory(b->w_bytes);
    b->x = memory(64 * N_COLS * sizeof(float));
    b->y = memory(y_floats * sizeof(float));
    if (!b->w || !b->x || !b->y)
        return k3_fail(err, -ENOMEM, "no memory for %zu bytes of weights", b->w_bytes);
    for (size_t i = 0; i < b->w_bytes / 8; i++) { /* bf16 of moderate size, any nibbles, scales near 1 */
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        ((uint64_t *)b->w)[i] = (seed & 0x81ff81ff81ff81ffu) | 0x3c003c003c003c00u;
    }
    for (size_t i = 0; i < 64 * N_COLS; i++)
        b->x[i] = (float)(i % 17) * 0.125f - 1.0f;
    printf("%s kernels, %u thread%s, %u columns, %.2f GB of weights, median of %d alternating pairs\n", b->k->name,
           k3_team_size(b->team), k3_team_size(b->team) == 1 ? "" : "s", N_COLS, (double)b->w_bytes / 1e9, PAIRS);
    printf("weight  x rows  limit    achieved     limit  unit     share\n");
    for (int m = 0; m < 2; m++)
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
            kernel(b, m, rows[i]);
    return 0;
}

int k3_bench_kernels(int argc, char **argv)
{
    struct bench b = { .rounds = 2000000, .w_bytes = 512u << 20 };
    struct k3_err err = K3_ERR_INIT;
    const char *kernels = "auto";
    uint32_t threads = 0;
    int status, rc;
    struct k3_opt table[] = {
        { "kernels", K3_OPT_STRING, &kernels, "NAME", "auto (the best of this CPU), avx2 or avx512", 0, 0 },
        { "threads", K3_OPT_U32, &threads, "N", "threads (default: the CPUs allowed)", 1, 1024 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench kernels", "the arithmetic kernels as a share of this machine's limits", argc, argv,
                      NULL, &status))
        return status;
    b.k = k3_kernels_get(kernels);
    if (!b.k || strcmp(b.k->name, "c") == 0) {
        fprintf(stderr, "k3-bench: --kernels %s: must be avx2 or avx512, and this CPU must have it\n", kernels);
        return K3_EXIT_REFUSED;
    }
    rc = run(&b, threads, &err);
    if (rc < 0)
        fprintf(stderr, "k3-bench: %s\n", err.text);
    k3_team_free(b.team);
    return k3_exit_status(rc, &err);
}
