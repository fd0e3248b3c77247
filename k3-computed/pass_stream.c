/* k3-computed/pass_stream.c: walks the row blocks of a matrix and multiplies them, the team sharing
 * the rows.  The one place where a pass waits for the trunk.  A dot product is never split; which
 * worker computes a result and in which block it arrives leave no trace in it. */
#include <errno.h>

#include "k3-computed/pass_private.h"

#define TASKS_PER_THREAD \
    4               /* enough to even out threads of unequal speed, few enough to keep tiles wide */
#define TILE_UNIT 4 /* rows of W; vector kernels take several rows at once */
#define TILE_MAX 64

uint32_t k3_pass_tile(const struct k3_pass *p, uint32_t n_out)
{
    uint32_t tasks = k3_team_size(p->team) * TASKS_PER_THREAD;
    uint32_t tile = n_out / tasks / TILE_UNIT * TILE_UNIT;

    return tile < TILE_UNIT ? TILE_UNIT : tile > TILE_MAX ? TILE_MAX : tile;
}

int k3_pass_blocks(struct k3_pass *p, uint32_t layer, enum k3_role role, uint32_t unit,
                   k3_pass_block_fn *fn, void *arg)
{
    int32_t index = p->matrix[(size_t)layer * K3_N_ROLES + role];
    const struct k3_matrix *mat;
    uint64_t unit_bytes, units;

    if (index < 0 || (uint32_t)index != p->next_matrix)
        k3_bug("pass asks for %s of layer %u (matrix %d) where the schedule has matrix %u",
               k3_role_name(role), layer, index, p->next_matrix);
    p->next_matrix++;
    mat = &p->m->matrices[index];
    k3_pass_count_matrix(p, mat);
    unit_bytes = (uint64_t)unit * mat->n_cols * k3_dtype_bytes(mat->dtype);
    units = unit_bytes ? p->src->block_bytes / unit_bytes : 1;
    if (units == 0)
        units = 1;
    for (uint32_t i = 0; i < mat->n_pieces; i++) {
        const struct k3_piece *piece = &p->m->pieces[mat->first_piece + i];

        for (uint32_t row = 0; row < piece->n_rows;) {
            uint32_t left = piece->n_rows - row;
            uint32_t n = units * unit < left ? (uint32_t)(units * unit) : left;
            const void *w;
            int rc;

            k3_pass_stage(p, K3_STAGE_TRUNK_WAIT);
            rc = p->src->rows(p->src->self, mat->first_piece + i, row, n, &w, p->err);
            k3_pass_stage(p, k3_pass_role_stage(role));
            if (rc < 0)
                return rc;
            fn(arg, mat, w, piece->row + row, n);
            p->src->done(p->src->self);
            row += n;
        }
    }
    return 0;
}

struct mul_job {
    struct k3_pass *p;
    float *y, *gate;
    const float *x;
    size_t ldy, ldx;
    uint32_t n_rows;
    /* of the block at work */
    const char *w;
    void (*mul)(float *, size_t, const void *, size_t, size_t, const float *, size_t, size_t);
    size_t n_cols, row_bytes;
    uint32_t out, n_out, tile, n_tiles, x_rows;
};

static void mul_tile(void *arg, size_t i, uint32_t worker)
{
    const struct mul_job *j = arg;
    const struct k3_config *c = j->p->c;
    uint32_t o = (uint32_t)(i % j->n_tiles) * j->tile;
    uint32_t r = (uint32_t)(i / j->n_tiles) * j->x_rows;
    uint32_t n_out = j->n_out - o < j->tile ? j->n_out - o : j->tile;
    uint32_t n_rows = j->n_rows - r < j->x_rows ? j->n_rows - r : j->x_rows;
    float *y = j->y + r * j->ldy + j->out + o;

    (void)worker;
    j->mul(y, j->ldy, j->w + o * j->row_bytes, n_out, j->n_cols, j->x + r * j->ldx, j->ldx, n_rows);
    if (!j->gate)
        return;
    for (uint32_t n = 0; n < n_rows; n++) {
        float *g = j->gate + (r + n) * j->ldy + j->out + o;

        j->p->k->situ(g, g, y + n * j->ldy, n_out, c->situ_beta, c->situ_linear_beta);
    }
}

static void mul_block(void *arg, const struct k3_matrix *mat, const void *w, uint32_t row,
                      uint32_t n_rows)
{
    struct mul_job *j = arg;
    uint32_t threads = k3_team_size(j->p->team), parts = 1;

    j->w = w;
    j->mul = j->p->k->mul[mat->dtype];
    j->n_cols = mat->n_cols;
    j->row_bytes = (size_t)mat->n_cols * k3_dtype_bytes(mat->dtype);
    j->out = row;
    j->n_out = n_rows;
    j->tile = k3_pass_tile(j->p, n_rows);
    j->n_tiles = (n_rows + j->tile - 1) / j->tile;
    /* A block of few rows (small matrix, small block limit) is shared by dividing the x rows as
     * well. */
    if (j->n_tiles < threads)
        parts = (threads + j->n_tiles - 1) / j->n_tiles;
    j->x_rows = (j->n_rows + parts - 1) / parts;
    k3_team_run(j->p->team, (size_t)j->n_tiles * ((j->n_rows + j->x_rows - 1) / j->x_rows), 1,
                mul_tile, j);
}

void k3_pass_mul_block(struct k3_pass *p, const struct k3_matrix *mat, const void *w, uint32_t row, uint32_t n_rows,
                       float *y, size_t ldy, const float *x, size_t ldx)
{
    struct mul_job j = { .p = p, .y = y, .x = x, .ldy = ldy, .ldx = ldx, .n_rows = p->n_rows };

    mul_block(&j, mat, w, row, n_rows);
}

int k3_pass_mul(struct k3_pass *p, uint32_t layer, enum k3_role role, float *y, size_t ldy,
                const float *x, size_t ldx, uint32_t n_rows, float *gate)
{
    struct mul_job j = {
        .p = p, .y = y, .gate = gate, .x = x, .ldy = ldy, .ldx = ldx, .n_rows = n_rows
    };

    return k3_pass_blocks(p, layer, role, 1, mul_block, &j);
}
