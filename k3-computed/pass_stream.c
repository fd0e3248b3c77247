/* k3-computed/pass_stream.c: walks the row blocks of matrices and shares the work on them among the team.  The one place
 * where a pass waits for the trunk.
 *
 * A flow is one parallel region over several matrices that do not depend on one another.  The caller fetches blocks and adds
 * their tasks; while blocks are at hand the team goes from one to the next without meeting.  Only where the next block is not
 * there yet, the caller finishes what it holds and waits for the trunk.  A dot product is never split; which worker computes
 * a result and in which block it arrives leave no trace in it. */
#include <errno.h>
#include <stdatomic.h>

#include "k3-computed/pass_private.h"

#define TILE_UNIT 4        /* rows of W; vector kernels take several rows at once */

struct block {
    const struct k3_pass_job *job;
    const struct k3_matrix *mat;
    const char *w;
    uint32_t row, n_rows; /* of the matrix */
    _Atomic uint32_t left; /* tasks */
};

struct flow {
    struct k3_pass *p;
    struct block block[K3_TRUNK_HELD];
    uint64_t first, end; /* blocks that are held; block i is block[i % K3_TRUNK_HELD] */
    uint32_t n_parts, n_x, x_rows; /* tasks of each block: n_parts * n_x, with x_rows rows of x each */
};

static void run_part(void *arg, size_t i, uint32_t worker)
{
    struct flow *f = arg;
    size_t n_tasks = (size_t)f->n_parts * f->n_x;
    struct block *b = &f->block[i / n_tasks % K3_TRUNK_HELD];
    const struct k3_pass_job *j = b->job;
    uint32_t part = (uint32_t)(i % n_tasks) % f->n_parts, x = (uint32_t)(i % n_tasks) / f->n_parts * f->x_rows;
    uint32_t step = j->unit > 1 ? j->unit : TILE_UNIT, n_steps = (b->n_rows + step - 1) / step;
    uint32_t row = (uint32_t)((uint64_t)n_steps * part / f->n_parts) * step;
    uint32_t end = (uint32_t)((uint64_t)n_steps * (part + 1) / f->n_parts) * step;
    uint32_t n_x = x < j->n_rows ? (j->n_rows - x < f->x_rows ? j->n_rows - x : f->x_rows) : 0;

    if (end > b->n_rows)
        end = b->n_rows;
    if (row < end && n_x)
        j->fn(j, b->mat, b->w + (size_t)row * b->mat->n_cols * k3_dtype_bytes(b->mat->dtype), b->row + row, end - row, x,
              n_x, worker);
    atomic_fetch_sub_explicit(&b->left, 1, memory_order_seq_cst);
}

static bool oldest_done(void *arg)
{
    struct flow *f = arg;

    return atomic_load_explicit(&f->block[f->first % K3_TRUNK_HELD].left, memory_order_seq_cst) == 0;
}

/* Helps until no more than n blocks are held. */
static void finish_to(struct flow *f, uint64_t n)
{
    struct k3_pass *p = f->p;

    while (f->end - f->first > n) {
        while (!oldest_done(f))
            if (!k3_team_help(p->team))
                k3_team_wait(p->team, oldest_done, f);
        p->src->done(p->src->self);
        f->first++;
    }
}

/* How many rows of the piece, from `row` on, to take next: with *wait only after all blocks are done. */
static uint32_t next_rows(const struct flow *f, uint32_t piece, uint32_t row, uint32_t unit, uint64_t row_bytes, bool *wait)
{
    const struct k3_pass *p = f->p;
    uint32_t left = p->m->pieces[piece].n_rows - row, n = p->src->ready ? p->src->ready(p->src->self, piece, row) : 0;
    uint64_t units = row_bytes ? p->src->block_bytes / (unit * row_bytes) : 1;
    uint32_t least = units == 0 ? unit : units * unit < left ? (uint32_t)units * unit : left;

    n = n == left ? n : n / unit * unit;
    *wait = n < least;
    return *wait ? least : n;
}

static int walk(struct flow *f, const struct k3_pass_job *j, const struct k3_matrix *mat)
{
    struct k3_pass *p = f->p;
    uint64_t row_bytes = (uint64_t)mat->n_cols * k3_dtype_bytes(mat->dtype);

    for (uint32_t i = 0; i < mat->n_pieces; i++) {
        uint32_t piece = mat->first_piece + i;

        for (uint32_t row = 0; row < p->m->pieces[piece].n_rows;) {
            struct block *b = &f->block[f->end % K3_TRUNK_HELD];
            const void *w;
            bool wait;
            uint32_t n;
            int rc;

            finish_to(f, K3_TRUNK_HELD - 1);
            n = next_rows(f, piece, row, j->unit, row_bytes, &wait);
            if (wait) {
                finish_to(f, 0);
                k3_pass_stage(p, K3_STAGE_TRUNK_WAIT);
            }
            rc = p->src->rows(p->src->self, piece, row, n, &w, p->err);
            if (wait)
                k3_pass_stage(p, k3_pass_role_stage(mat->role));
            if (rc < 0)
                return rc;
            b->job = j;
            b->mat = mat;
            b->w = w;
            b->row = p->m->pieces[piece].row + row;
            b->n_rows = n;
            atomic_store_explicit(&b->left, f->n_parts * f->n_x, memory_order_relaxed);
            f->end++;
            k3_team_add(p->team, (size_t)f->n_parts * f->n_x);
            row += n;
        }
    }
    return 0;
}

uint32_t k3_pass_parts(uint32_t threads, uint32_t block_rows, uint32_t n_rows, uint32_t n_x)
{
    uint32_t most = threads * K3_TASKS_PER_THREAD / n_x, least = (threads * K3_FEW_TASKS + n_x - 1) / n_x;
    uint32_t n = n_rows < K3_MUL_BATCH_ROWS ? most : (block_rows + K3_MUL_CHUNK_ROWS - 1) / K3_MUL_CHUNK_ROWS;

    n = n > most ? most : n;
    return n < least ? least : n;
}

/* Parts of a block of the flow, whose n_rows rows of x are cut into n_x parts. */
static uint32_t flow_parts(const struct k3_pass *p, const struct k3_pass_job *j, uint32_t n_rows, uint32_t n_x)
{
    uint32_t threads = k3_team_size(p->team), n = threads * K3_TASKS_PER_THREAD / n_x;

    if (j->fn == k3_pass_mul_rows)
        return k3_pass_parts(threads, K3_PIECE_BYTES / (uint32_t)(j->ldx * sizeof(uint16_t)), n_rows, n_x);
    return j->few_parts || n < threads * K3_FEW_TASKS ? threads * K3_FEW_TASKS : n;
}

int k3_pass_flow(struct k3_pass *p, uint32_t layer, const struct k3_pass_job *jobs, uint32_t n_jobs)
{
    struct flow f = { .p = p };
    uint32_t most = UINT32_MAX, n_rows = 0;
    int rc = 0;

    for (uint32_t i = 0; i < n_jobs; i++) {
        n_rows = jobs[i].n_rows > n_rows ? jobs[i].n_rows : n_rows;
        most = jobs[i].x_rows < most ? jobs[i].x_rows : most;
    }
    f.n_x = (n_rows + most - 1) / most;
    f.x_rows = f.n_x ? (n_rows + f.n_x - 1) / f.n_x : 0;
    f.n_parts = f.n_x ? flow_parts(p, &jobs[0], n_rows, f.n_x) : 1;
    k3_team_begin(p->team, run_part, &f);
    for (uint32_t i = 0; i < n_jobs && rc == 0; i++) {
        int32_t index = p->matrix[(size_t)layer * K3_N_ROLES + jobs[i].role];

        if (index < 0 || (uint32_t)index != p->next_matrix)
            k3_bug("pass asks for %s of layer %u (matrix %d) where the schedule has matrix %u",
                   k3_role_name(jobs[i].role), layer, index, p->next_matrix);
        p->next_matrix++;
        k3_pass_count_matrix(p, &p->m->matrices[index]);
        k3_pass_stage(p, k3_pass_role_stage(jobs[i].role));
        rc = walk(&f, &jobs[i], &p->m->matrices[index]);
    }
    finish_to(&f, 0);
    k3_team_end(p->team);
    return rc;
}

void k3_pass_mul_rows(const struct k3_pass_job *j, const struct k3_matrix *mat, const void *w, uint32_t row,
                      uint32_t n_rows, uint32_t x, uint32_t n_x, uint32_t worker)
{
    const struct k3_config *c = j->p->c;
    float *y = j->y + x * j->ldy + row;

    (void)worker;
    j->p->k->mul[mat->dtype](y, j->ldy, w, n_rows, mat->n_cols, j->x + x * j->ldx, j->ldx, n_x);
    if (!j->gate)
        return;
    for (uint32_t n = 0; n < n_x; n++) {
        float *g = j->gate + (x + n) * j->ldy + row;

        j->p->k->situ(g, g, y + n * j->ldy, n_rows, c->situ_beta, c->situ_linear_beta);
    }
}

int k3_pass_mul(struct k3_pass *p, uint32_t layer, enum k3_role role, float *y, size_t ldy,
                const float *x, size_t ldx, uint32_t n_rows, float *gate)
{
    struct k3_pass_job j = K3_PASS_MUL(p, role, y, ldy, x, ldx, n_rows);

    j.gate = gate;
    return k3_pass_flow(p, layer, &j, 1);
}

/* ---- a matrix outside of the stream ---- */

struct block_job {
    const struct k3_pass_job *j;
    const struct k3_matrix *mat;
    const char *w;
    uint32_t row, n_rows, tile;
};

static void block_tile(void *arg, size_t i, uint32_t worker)
{
    const struct block_job *b = arg;
    uint32_t o = (uint32_t)i * b->tile, n = b->n_rows - o < b->tile ? b->n_rows - o : b->tile;

    k3_pass_mul_rows(b->j, b->mat, b->w + (size_t)o * b->mat->n_cols * k3_dtype_bytes(b->mat->dtype), b->row + o, n, 0,
                     b->j->n_rows, worker);
}

uint32_t k3_pass_tile(const struct k3_pass *p, uint32_t n_out)
{
    uint32_t tile = n_out / (k3_team_size(p->team) * K3_TASKS_PER_THREAD) / TILE_UNIT * TILE_UNIT;

    return tile < TILE_UNIT ? TILE_UNIT : tile;
}

void k3_pass_mul_block(struct k3_pass *p, const struct k3_matrix *mat, const void *w, uint32_t row, uint32_t n_rows,
                       float *y, size_t ldy, const float *x, size_t ldx)
{
    struct k3_pass_job j = K3_PASS_MUL(p, mat->role, y, ldy, x, ldx, p->n_rows);
    struct block_job b = { .j = &j, .mat = mat, .w = w, .row = row, .n_rows = n_rows, .tile = k3_pass_tile(p, n_rows) };

    k3_team_run(p->team, (n_rows + b.tile - 1) / b.tile, 1, block_tile, &b);
}
