/* k3-computed/pass_private.h: shared by pass*.c, state.c and tests that look into a state. */
#ifndef K3_COMPUTED_PASS_PRIVATE_H
#define K3_COMPUTED_PASS_PRIVATE_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/daemon.h"
#include "k3-computed/ops.h"
#include "k3-computed/pass.h"

struct k3_state {
    uint64_t len_bytes;
    uint32_t ctx, n_layers, kv_width;
    uint32_t positions;
    bool spoilt; /* a pass failed half-way: refused until k3_state_reset() */
    uint64_t s_floats, tail_floats;
    uint64_t kda_bytes;
    float *kda;
    /* KDA: S [heads][dim key][dim value], then for q, k, v the last projections
     * [heads][taps-1][dim], oldest first (head by head, so that one task owns all of a head).  MLA:
     * rows [ctx][kv_lora + qk_rope]: the latent after its norm, then the shared key. */
    float *layer[K3_MAX_LAYERS];
};

static inline float *k3_state_s(struct k3_state *s, uint32_t layer)
{
    return s->layer[layer];
}
/* which: 0 q, 1 k, 2 v */
static inline float *k3_state_tail(struct k3_state *s, uint32_t layer, uint32_t which)
{
    return s->layer[layer] + s->s_floats + which * s->tail_floats;
}
static inline float *k3_state_kv(struct k3_state *s, uint32_t layer)
{
    return s->layer[layer];
}

struct k3_pass_seg { /* the rows of one sequence in this pass */
    struct k3_state *state;
    uint32_t row, n_rows;
};

struct k3_pass {
    const struct k3_model *m;
    const struct k3_config *c;
    const struct k3_kernels *k;
    struct k3_team *team;
    uint64_t len_bytes; /* of the mapping that this struct begins */
    uint32_t max_rows;
    uint32_t n_snaps_max; /* pushes of one pass */

    /* Indices into m->matrices and m->residents, -1 = none; row n_layers holds the model level. */
    int32_t *matrix;   /* [n_layers + 1][K3_N_ROLES] */
    int32_t *resident; /* [n_layers + 1][K3_N_RESIDENT_ROLES] */

    /* Row buffers, [row][width] for max_rows rows. */
    float *snap;   /* [n_snaps_max][max_rows][hidden] */
    float *prefix; /* running residual of the current block */
    float *x;      /* mixed, then normed: what the matrices multiply */
    float *y;      /* output of attention or MLP */
    float *u;      /* u_floats a row: whatever the operator at work needs */
    float *f;      /* [hidden]: norm * proj of the mix at work */
    uint64_t u_floats;

    /* Routing of the layer at work. */
    uint16_t *ids;  /* [row][top_k], ascending */
    float *weights; /* [row][top_k] */
    uint32_t *first; /* [n_experts + 2]: pairs of expert e are first[e] up to first[e + 1] */
    uint32_t *pair;  /* [rows * top_k]: index into ids and weights; rows ascending in an expert */
    uint16_t *distinct; /* experts chosen by some row, ascending */

    struct k3_pass_seg *seg; /* [max_rows] */

    /* Per worker; grown when a state with a longer context comes. */
    float *scratch;
    uint64_t scratch_floats; /* one worker's part */

    /* The pass at work. */
    struct k3_source *src;
    const struct k3_row *rows;
    const struct k3_pass_hooks *hooks;
    struct k3_err *err;
    uint32_t n_rows, n_segs, n_snaps;
    uint32_t next_matrix; /* schedule order is kept, or it is our bug */
    uint32_t n_logits; /* rows that want logits */
    bool experts_open;
    struct k3_pass_times times;
    enum k3_stage stage; /* the one at work, since stage_ns */
    uint64_t stage_ns;
};

/* pass_times.c.  From here on the time belongs to `stage`; on the thread that runs the pass. */
void k3_pass_stage(struct k3_pass *p, enum k3_stage stage);
enum k3_stage k3_pass_role_stage(enum k3_role role);
/* What is about to be multiplied or walked, as bytes and FLOP of its stage (pass.h): the embedding rows; a matrix by all rows
 * (lm_head: by those that want logits); an expert by n_rows; the states of all sequences in a KDA layer, an MLA layer. */
void k3_pass_count_embed(struct k3_pass *p);
void k3_pass_count_matrix(struct k3_pass *p, const struct k3_matrix *mat);
void k3_pass_count_expert(struct k3_pass *p, uint32_t n_rows);
void k3_pass_count_kda(struct k3_pass *p);
void k3_pass_count_latent(struct k3_pass *p);

static inline float *k3_pass_scratch(const struct k3_pass *p, uint32_t worker)
{
    return p->scratch + worker * p->scratch_floats;
}
static inline bool k3_pass_has(const struct k3_pass *p, uint32_t layer, enum k3_role role)
{
    return p->matrix[(size_t)layer * K3_N_ROLES + role] >= 0;
}
/* A resident tensor; layer n_layers = the model level. */
const float *k3_pass_resident(const struct k3_pass *p, uint32_t layer, enum k3_resident_role role);

/* pass_stream.c */
/* One matrix of a flow.  fn gets rows [row, row + n_rows) of the matrix at w, whole multiples of `unit`, and the rows
 * [x, x + n_x) of the pass; calls for different rows run at the same time. */
struct k3_pass_job {
    struct k3_pass *p;
    enum k3_role role;
    uint32_t unit;           /* rows of W that belong together */
    uint32_t n_rows, x_rows; /* rows of x; most of them at once */
    bool few_parts;          /* a flow of larger tasks: what they share costs more than threads that wait at its end */
    void (*fn)(const struct k3_pass_job *j, const struct k3_matrix *mat, const void *w, uint32_t row, uint32_t n_rows,
               uint32_t x, uint32_t n_x, uint32_t worker);
    void *arg;
    /* of k3_pass_mul_rows */
    float *y, *gate;
    const float *x;
    size_t ldy, ldx;
};
/* y[r] = W x[r].  With gate != NULL each result is folded in at once: gate = situ(gate, y), gate laid out as y is. */
void k3_pass_mul_rows(const struct k3_pass_job *j, const struct k3_matrix *mat, const void *w, uint32_t row,
                      uint32_t n_rows, uint32_t x, uint32_t n_x, uint32_t worker);
#define K3_PASS_MUL(pass, which, to, ld_to, from, ld_from, n)                                                              \
    {                                                                                                                      \
        .p = (pass), .role = (which), .unit = 1, .n_rows = (n), .x_rows = k3_mul_x_rows(ld_from), .fn = k3_pass_mul_rows,   \
        .y = (to), .x = (from), .ldy = (ld_to), .ldx = (ld_from)                                                           \
    }
/* One parallel region over matrices that follow one another in the schedule and do not depend on one another.  Layer
 * n_layers means lm_head. */
int k3_pass_flow(struct k3_pass *p, uint32_t layer, const struct k3_pass_job *jobs, uint32_t n_jobs);
/* A flow of one product. */
int k3_pass_mul(struct k3_pass *p, uint32_t layer, enum k3_role role, float *y, size_t ldy,
                const float *x, size_t ldx, uint32_t n_rows, float *gate);
/* y[r] for the rows [row, row + n_rows) of a matrix at w, all rows of the pass; outside of the stream. */
void k3_pass_mul_block(struct k3_pass *p, const struct k3_matrix *mat, const void *w, uint32_t row, uint32_t n_rows,
                       float *y, size_t ldy, const float *x, size_t ldx);
/* How many rows of a matrix of n_out one task should take. */
uint32_t k3_pass_tile(const struct k3_pass *p, uint32_t n_out);

/* pass_res.c: row-wise work. */
/* x = AttnRes(snapshots, prefix) with the given norm and proj. */
void k3_pass_mix(struct k3_pass *p, uint32_t layer, enum k3_resident_role norm,
                 enum k3_resident_role proj);
void k3_pass_push(struct k3_pass *p);
/* y[r] = rmsnorm(x[r]) over n, rows ldx apart; y may be x. */
void k3_pass_norm(struct k3_pass *p, float *y, const float *x, size_t ld, const float *w,
                  uint32_t n, float eps);
/* y[r] += x[r], rows n apart. */
void k3_pass_add(struct k3_pass *p, float *y, const float *x, uint32_t n);

/* pass_kda.c, pass_mla.c: p->x -> out[row][hidden]; pass_moe.c: p->x -> p->y. */
int k3_pass_kda(struct k3_pass *p, uint32_t layer, float *out);
int k3_pass_mla(struct k3_pass *p, uint32_t layer, float *out);
int k3_pass_dense(struct k3_pass *p, uint32_t layer);
int k3_pass_moe(struct k3_pass *p, uint32_t layer);
/* pass_look.c: between two layers; calls hooks->look unless the gate of layer `next` is not at hand. */
#define K3_LOOK_PIECES 16u /* of a gate; with more there is no look-ahead */
void k3_pass_look(struct k3_pass *p, uint32_t next);

/* Floats of p->u that one row needs; floats of scratch that one worker needs. */
uint64_t k3_pass_kda_floats(const struct k3_config *c);
uint64_t k3_pass_mla_floats(const struct k3_config *c);
uint64_t k3_pass_mlp_floats(const struct k3_config *c);
uint64_t k3_pass_kda_scratch(const struct k3_config *c);
uint64_t k3_pass_mla_scratch(const struct k3_config *c, uint32_t ctx);

#endif
