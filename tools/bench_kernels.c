/* k3-bench kernels: the matrix kernels on the shapes of the released model, as a share of max(bytes / memory rate, FLOP / peak).
 * A kernel and its limits run alternately, nine pairs, in one process on one team; a pair gives one ratio, and the median
 * counts (design.md section 10). */
#include "tools/bench_kernels.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/daemon.h"
#include "k3-computed/pass.h"

#define FMA_S 0.02      /* one measurement of the peak */
#define KERNEL_S 0.1    /* about what a kernel of many rows runs for */
#define TURNS_MOST 8    /* of one that takes less: kernel and limits take turns within a pair, up to KERNEL_S / 2 */
#define ROWS_MOST 512u
#define OTHER_BYTES ((uint64_t)192 << 20) /* x and y of the largest line */
#define N_OUT_MOST (1u << 20)

enum { ONLY_BF16 = 1, ONLY_MXFP4 = 2, ONLY_OPS = 4 };

struct job {
    const struct k3_bench_arith *b;
    size_t n_out, n_cols, n_x; /* n_out: whole blocks */
    size_t block_rows;         /* a piece of the trunk, or one expert's matrix: all its packed weights, then all its scales */
    size_t tile, n_tiles;      /* rows of W of one task, tasks that a block is cut into; the last may be smaller */
    size_t x_rows, n_x_parts;
    const float *x;
    float *y;
};

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Blocks one after the other; of a block all tiles for some rows of x, then all for the next. */
struct task { size_t block, row, n_out, x, n_x; };
static struct task task_at(const struct job *j, size_t i)
{
    size_t n = j->n_tiles * j->n_x_parts, row = i % j->n_tiles * j->tile, x = i % n / j->n_tiles * j->x_rows;

    return (struct task){ i / n, row, least(j->tile, j->block_rows - row), x, least(j->x_rows, j->n_x - x) };
}

static void bf16_task(void *arg, size_t i, uint32_t worker)
{
    const struct job *j = arg;
    struct task t = task_at(j, i);
    size_t row = t.block * j->block_rows + t.row;

    (void)worker;
    j->b->k->mul[K3_BF16](j->y + t.x * j->n_out + row, j->n_out, j->b->w + row * j->n_cols * 2, t.n_out, j->n_cols,
                          j->x + t.x * j->n_cols, j->n_cols, t.n_x);
}

static void mxfp4_task(void *arg, size_t i, uint32_t worker)
{
    const struct job *j = arg;
    struct task t = task_at(j, i);
    size_t packed_bytes = j->n_cols / 2, scale_bytes = j->n_cols / 32;
    const uint8_t *matrix = j->b->w + t.block * j->block_rows * (packed_bytes + scale_bytes);

    (void)worker;
    j->b->k->mul_mxfp4(j->y + t.x * j->n_out + t.block * j->block_rows + t.row, j->n_out, matrix + t.row * packed_bytes,
                       matrix + j->block_rows * packed_bytes + t.row * scale_bytes, t.n_out, j->n_cols,
                       j->x + t.x * j->n_cols, j->n_cols, t.n_x);
}

/* How a pass cuts the work: the trunk in pieces, an expert's matrix whole and for all rows of x at once. */
static void cut(struct job *j, bool mxfp4, size_t matrix_rows)
{
    size_t threads = k3_team_size(j->b->team), most = mxfp4 ? j->n_x : k3_mul_x_rows(j->n_cols), parts;
    size_t rows = mxfp4 ? matrix_rows : K3_PIECE_BYTES / (j->n_cols * 2);

    j->n_x_parts = (j->n_x + most - 1) / most;
    j->x_rows = (j->n_x + j->n_x_parts - 1) / j->n_x_parts;
    parts = mxfp4 ? threads * K3_TASKS_PER_THREAD * (j->n_x >= K3_MANY_ROWS ? 2 : 1)
                  : k3_pass_parts((uint32_t)threads, (uint32_t)rows, (uint32_t)j->n_x, (uint32_t)j->n_x_parts);
    j->tile = rows / parts / 4 * 4;
    if (j->tile < 4)
        j->tile = 4;
    if (mxfp4)
        j->tile = (j->tile + 31) / 32 * 32;
    j->block_rows = mxfp4 ? rows : j->tile * parts;
    j->n_tiles = (j->block_rows + j->tile - 1) / j->tile;
}

/* ---- one line ---- */

struct line {
    double read[64], peak[64], bytes_per_s[64], flop_per_s[64], share[64], fma_share[64];
};

static void print_line(const struct k3_bench_arith *b, const struct job *j, bool mxfp4, bool memory, const struct line *l)
{
    char share[64], fma[64];

    printf("%-6s %5zu %6zu %9.1f %9.1f %10.1f %9.1f  %-6s %s", mxfp4 ? "mxfp4" : "bf16", j->n_x, j->n_cols,
           k3_bench_median(l->bytes_per_s, b->pairs) / 1e9, k3_bench_median(l->read, b->pairs) / 1e9,
           k3_bench_median(l->flop_per_s, b->pairs) / 1e9, k3_bench_median(l->peak, b->pairs) / 1e9, memory ? "memory" : "FMA",
           k3_bench_spread(l->share, b->pairs, share));
    if (j->n_x >= 5 && memory)
        printf("  FMA %s", k3_bench_spread(l->fma_share, b->pairs, fma));
    putchar('\n');
    fflush(stdout);
}

static int line(struct k3_bench_arith *b, bool mxfp4, size_t n_x, size_t n_cols, size_t matrix_rows, const float *x,
                struct k3_err *err)
{
    struct job j = { .b = b, .n_cols = n_cols, .n_x = n_x, .x = x };
    size_t row_bytes = mxfp4 ? n_cols / 2 + n_cols / 32 : n_cols * 2, most;
    struct line l = { 0 };
    double bytes, flop, memory_s = 0, fma_s = 0;
    size_t y_bytes;
    int turns = 1;

    /* All of the buffer, but no more than takes KERNEL_S at the peak; whole blocks. */
    cut(&j, mxfp4, matrix_rows);
    j.n_out = b->w_bytes / row_bytes;
    most = (size_t)(KERNEL_S * k3_bench_limits_fma(b->limits, FMA_S) / (2.0 * (double)n_cols * (double)n_x));
    if (j.n_out > most)
        j.n_out = most;
    if (j.n_out > N_OUT_MOST)
        j.n_out = N_OUT_MOST;
    j.n_out = (j.n_out + j.block_rows - 1) / j.block_rows * j.block_rows;
    while (j.n_out > j.block_rows && j.n_out * row_bytes > b->w_bytes)
        j.n_out -= j.block_rows;
    y_bytes = j.n_out * n_x * sizeof(float);
    if (j.n_out * row_bytes > b->w_bytes || !(j.y = k3_bench_memory(y_bytes)))
        return k3_fail(err, -ENOMEM, "no memory for %zu rows of weights by %zu", j.n_out, n_x);
    bytes = (double)(j.n_out * row_bytes);
    flop = 2.0 * (double)n_cols * (double)j.n_out * (double)n_x;
    for (int i = -1; i < (int)b->pairs && !k3_bench_stop; i++) {
        double s = 0;

        memory_s = fma_s = 0;
        for (int t = 0; t < turns; t++) {
            uint64_t t0;

            fma_s += flop / k3_bench_limits_fma(b->limits, FMA_S / turns) / turns;
            memory_s += bytes / k3_bench_limits_read(b->limits, UINT64_MAX) / turns;
            t0 = k3_now_ns();
            k3_team_run(b->team, j.n_out / j.block_rows * j.n_tiles * j.n_x_parts, 1, mxfp4 ? mxfp4_task : bf16_task, &j);
            s += (double)(k3_now_ns() - t0) / 1e9 / turns;
        }
        if (i < 0) { /* the pair -1 warms up, and says how often */
            turns = (int)(KERNEL_S / 2 / s) + 1;
            turns = turns > TURNS_MOST ? TURNS_MOST : turns;
            continue;
        }
        l.read[i] = bytes / memory_s;
        l.peak[i] = flop / fma_s;
        l.bytes_per_s[i] = bytes / s;
        l.flop_per_s[i] = flop / s;
        l.share[i] = (memory_s > fma_s ? memory_s : fma_s) / s;
        l.fma_share[i] = fma_s / s;
    }
    munmap(j.y, y_bytes);
    if (k3_bench_stop)
        return k3_fail(err, -ECANCELED, "stopped");
    print_line(b, &j, mxfp4, memory_s > fma_s, &l);
    return 0;
}

/* ---- all of them ---- */

void *k3_bench_memory(size_t n)
{
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return NULL;
    madvise(p, n, MADV_HUGEPAGE);
    return p;
}

static int matrices(struct k3_bench_arith *b, uint32_t only, uint32_t only_rows, struct k3_err *err)
{
    static const size_t rows[] = { 1, 2, 3, 4, 8, 16, 64, ROWS_MOST };
    /* Columns of spec/model.md 2: hidden, KDA width, dense and shared inner width, latent, q_lora; of the experts, with the
     * rows of such a matrix.  The first of each kind are those of most of the weights. */
    static const struct { bool mxfp4, every; size_t n_cols, matrix_rows; } shape[] = {
        { false, true, 7168, 0 },  { false, true, 12288, 0 }, { false, false, 33792, 0 },  { false, false, 6144, 0 },
        { false, false, 3584, 0 }, { false, false, 1536, 0 }, { true, true, 3584, 3072 },  { true, true, 3072, 3584 },
    };
    size_t x_floats = (size_t)ROWS_MOST * 33792;
    float *x = k3_bench_memory(x_floats * sizeof(float));
    int rc = x ? 0 : k3_fail(err, -ENOMEM, "no memory for %u rows", ROWS_MOST);

    for (size_t i = 0; rc == 0 && i < x_floats; i++)
        x[i] = (float)(i % 17) * 0.125f - 1.0f;
    if (rc == 0)
        printf("%-6s %5s %6s %9s %9s %10s %9s  %-6s %s\n", "weight", "rows", "cols", "GB/s", "limit", "GFLOPS", "peak", "bound",
               "share of the limit");
    for (size_t s = 0; s < sizeof(shape) / sizeof(*shape); s++)
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows) && rc == 0; i++) {
            bool ends = rows[i] == 1 || rows[i] == ROWS_MOST;

            if ((only_rows && rows[i] != only_rows) || (!shape[s].every && !ends && !only_rows) ||
                !(only & (shape[s].mxfp4 ? ONLY_MXFP4 : ONLY_BF16)))
                continue;
            rc = line(b, shape[s].mxfp4, rows[i], shape[s].n_cols, shape[s].matrix_rows, x, err);
        }
    if (x)
        munmap(x, x_floats * sizeof(float));
    return rc;
}

static void fill(uint64_t *w, size_t n)
{
    uint64_t seed = 1;

    for (size_t i = 0; i < n; i++) {
        if (i % (1 << 20) == 0 && k3_bench_stop)
            return;
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        w[i] = (seed & 0x813f813f813f813fu) | 0x3c403c403c403c40u;
    }
}

static int run(struct k3_bench_arith *b, uint32_t threads, uint32_t only, uint32_t only_rows, struct k3_err *err)
{
    char text[64];
    int rc = k3_bench_memory_check(b->w_bytes + OTHER_BYTES, "", "give a smaller --weights-mb", err);

    if (rc == 0)
        rc = k3_team_new(&b->team, threads, err);
    if (rc < 0)
        return rc;
    (void)k3_team_pin(b->team, NULL);
    b->w = k3_bench_memory(b->w_bytes);
    if (!b->w)
        return k3_fail(err, -ENOMEM, "no memory for %zu bytes of weights", b->w_bytes);
    fill((uint64_t *)b->w, b->w_bytes / 8);
    if (k3_bench_stop)
        return k3_fail(err, -ECANCELED, "stopped");
    rc = k3_bench_limits_open(&b->limits, b->team, &(struct k3_span){ b->w, b->w_bytes }, 1, err);
    if (rc < 0)
        return rc;
    printf("%s kernels, %u thread%s, %.2f GB of weights; limits: %s; median (least to greatest) of %u alternating pairs\n",
           b->k->name, k3_team_size(b->team), k3_team_size(b->team) == 1 ? "" : "s", (double)b->w_bytes / 1e9,
           k3_bench_limits_text(b->limits, text), b->pairs);
    if (only & (ONLY_BF16 | ONLY_MXFP4))
        rc = matrices(b, only, only_rows, err);
    if (rc == 0 && (only & ONLY_OPS))
        rc = k3_bench_ops(b, err);
    return rc;
}

static bool rows_known(uint32_t rows)
{
    return rows == 0 || rows == 1 || rows == 2 || rows == 3 || rows == 4 || rows == 8 || rows == 16 || rows == 64 ||
           rows == ROWS_MOST;
}

int k3_bench_kernels(int argc, char **argv)
{
    struct k3_bench_arith b = { .pairs = K3_BENCH_PAIRS };
    struct k3_err err = K3_ERR_INIT;
    const char *kernels = "auto", *only = "all";
    uint32_t threads = 0, weights_mb = 512, rows = 0, what;
    bool force = false;
    int status, rc;
    struct k3_opt table[] = {
        { "kernels", K3_OPT_STRING, &kernels, "NAME", "auto (the best of this CPU), c, avx2 or avx512; the limits stay those of the best", 0, 0 },
        K3_BENCH_THREAD_ROWS(&threads, &force),
        { "pairs", K3_OPT_U32, &b.pairs, "N", "alternating pairs of each line (default 9; fewer are for trying)", 1,
          K3_BENCH_PAIRS * 4 },
        { "only", K3_OPT_STRING, &only, "PART", "bf16, mxfp4, ops (what is no matrix) or all (default)", 0, 0 },
        { "rows", K3_OPT_U32, &rows, "N", "rows of x: 1, 2, 3, 4, 8, 16, 64 or 512 alone (default: all)", 1, ROWS_MOST },
        { "weights-mb", K3_OPT_U32, &weights_mb, "N", "MiB of weights, much more than the caches (default 512)", 16, 65536 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench kernels", "the arithmetic kernels as a share of this machine's limits", argc, argv,
                      NULL, &status))
        return status;
    what = strcmp(only, "bf16") == 0    ? ONLY_BF16
           : strcmp(only, "mxfp4") == 0 ? ONLY_MXFP4
           : strcmp(only, "ops") == 0   ? ONLY_OPS
           : strcmp(only, "all") == 0   ? ONLY_BF16 | ONLY_MXFP4 | ONLY_OPS
                                        : 0;
    rc = k3_kernels_find(&b.k, kernels, &err);
    if (rc == 0 && !what)
        rc = k3_refuse(&err, -EINVAL, "--only %s: must be bf16, mxfp4, ops or all", only);
    if (rc == 0 && !rows_known(rows))
        rc = k3_refuse(&err, -EINVAL, "--rows %u: must be 1, 2, 3, 4, 8, 16, 64 or 512", rows);
    if (rc == 0)
        rc = k3_threads_check(&threads, force, &err);
    b.w_bytes = (size_t)weights_mb << 20;
    k3_bench_catch();
    if (rc == 0)
        rc = run(&b, threads, what, rows, &err);
    k3_bench_limits_close(b.limits);
    k3_team_free(b.team);
    if (b.w)
        munmap(b.w, b.w_bytes);
    return k3_bench_end(rc, &err);
}
