/* k3-computed/pass.h: one pass over the model for a batch of rows (design.md section 5, spec/model.md 0.2 and 4). */
#ifndef K3_COMPUTED_PASS_H
#define K3_COMPUTED_PASS_H

#include <stdbool.h>
#include <stdint.h>

#include "k3-computed/kernels.h"
#include "k3-computed/source.h"
#include "k3-computed/team.h"

/* How a pass cuts its products into tasks; k3-bench kernels measures them cut in the same way. */
#define K3_TASKS_PER_THREAD 8u /* of a block or an expert: enough to even out threads of unequal speed */
#define K3_FEW_TASKS 2u        /* of a block per thread, at least */
#define K3_MANY_ROWS 16u       /* of one expert: tasks half as large, since each is long enough */

/* Into how many parts the rows of W of a block are cut: a task for each of them and of the n_x parts of the n_rows rows of x. */
uint32_t k3_pass_parts(uint32_t threads, uint32_t block_rows, uint32_t n_rows, uint32_t n_x);

/* What a sequence carries from pass to pass: per KDA layer S [heads][dim][dim] and three convolution tails, per MLA layer the
 * latent rows [ctx][kv_lora + qk_rope].  State after n positions; it cannot be rolled back. */
struct k3_state;
int k3_state_new(struct k3_state **out, const struct k3_config *c, uint32_t ctx, struct k3_err *err);
/* Makes the kernel provide all its pages now, so that out of memory is an error at the start.  -ENOMEM. */
int k3_state_touch(struct k3_state *s, struct k3_err *err);
void k3_state_free(struct k3_state *s);
void k3_state_reset(struct k3_state *s);
/* to becomes what from is.  Both of the same model; to has room for the positions of from. */
void k3_state_copy(struct k3_state *to, const struct k3_state *from);
/* Of it only the latent rows of the first n_positions; the rest of `to` is not touched. */
void k3_state_copy_latent(struct k3_state *to, const struct k3_state *from, uint32_t n_positions);
uint32_t k3_state_positions(const struct k3_state *s);
uint64_t k3_state_bytes(const struct k3_config *c, uint32_t ctx);
/* Of it the latent rows of one position, over all MLA layers: 55,296 for the released shape (spec/model.md 4.5). */
uint64_t k3_state_kv_bytes(const struct k3_config *c);

struct k3_row {
    struct k3_state *state;
    uint32_t token;
    uint32_t position;   /* must equal the state's positions plus the rows of the same state before it in this pass */
    bool want_logits;
    /* NULL, or a state of the same model, of no sequence of this pass and of no other row: it becomes what the sequence's state is
     * after this row.  Nothing is computed for it, and the numbers are those of a pass that ends here.  Spoilt when the pass fails. */
    struct k3_state *keep;
};

/* Looks into a pass; every member may be NULL.  Runs on the thread that runs the pass. */
struct k3_pass_hooks {
    void *arg;
    /* After layer `layer` (n_layers: after the final mix) the residual stream of all rows: h[row * hidden]. */
    void (*layer_out)(void *arg, uint32_t layer, const float *h, uint32_t n_rows);
    /* Routes of one row in one layer: ids ascending. */
    void (*route)(void *arg, uint32_t layer, uint32_t row, const uint16_t *ids, const float *weights, uint32_t n);
    /* Before layer `layer` begins: the look_k experts that its gate picks for each row on the residual stream so far, best
     * first, ids[row * look_k + i].  Only where the gate is at hand (source.h, pinned); changes nothing in the result.
     * look_k 0: never; at most n_experts and 4 * latent. */
    void (*look)(void *arg, uint32_t layer, const uint16_t *ids, uint32_t n_rows, uint32_t k);
    uint32_t look_k;
    /* Called at every layer begin; non-zero aborts the pass with that code (-ECANCELED). */
    int (*progress)(void *arg, uint32_t layer, uint32_t n_layers);
};

struct k3_pass; /* buffers for up to max_rows rows */
int k3_pass_new(struct k3_pass **out, const struct k3_model *m, const struct k3_kernels *k, struct k3_team *team,
                uint32_t max_rows, struct k3_err *err);
void k3_pass_free(struct k3_pass *p);
uint64_t k3_pass_bytes(const struct k3_config *c, uint32_t max_rows);
/* Besides those, each thread of the team needs this much for contexts of ctx positions; allocated by the first pass. */
uint64_t k3_pass_thread_bytes(const struct k3_config *c, uint32_t ctx);

/* Runs one pass.  rows of one state are adjacent and ascending.  logits: one vector of vocab floats for each row with
 * want_logits, in row order.  lm_head is skipped when no row wants logits.  On error (weights, cancel) every state of the pass
 * is spoilt (k3_state_reset and prefill anew), and the source has been told failed_pass.
 * Refused before anything is touched, states unharmed: a token or position out of range, rows in the wrong order. */
int k3_pass_run(struct k3_pass *p, struct k3_source *src, const struct k3_row *rows, uint32_t n_rows, float *logits,
                const struct k3_pass_hooks *hooks, struct k3_err *err);

/* What a pass is doing.  At any time it is in exactly one stage, the waits included. */
enum k3_stage {
    K3_STAGE_EMBED,      /* embedding rows */
    K3_STAGE_RES,        /* attention residuals: mixes and snapshots (spec/model.md 4.6) */
    K3_STAGE_NORM,       /* RMS norms and sums of the residual stream */
    K3_STAGE_PROJ,       /* matrices of the attention layers: q, k, v, f, b, g, o; q_a, q_b, kv_a, g, o */
    K3_STAGE_KDA,        /* convolution, decay, recurrence, gate (4.4) */
    K3_STAGE_LATENT,     /* latent rows appended, kv_b folded into the query, attention, output of the heads, gate (4.5) */
    K3_STAGE_ROUTER,     /* router gate, top-k, rows sorted by expert, experts asked for; look-ahead */
    K3_STAGE_MLP,        /* shared experts, latent down and up, dense MLP */
    K3_STAGE_EXPERTS,    /* routed experts */
    K3_STAGE_LM_HEAD,
    K3_STAGE_OTHER,      /* checks, hooks, end of the pass */
    K3_STAGE_TRUNK_WAIT, /* for a row block */
    K3_STAGE_EXPERT_WAIT,
    K3_N_STAGES
};
const char *k3_stage_name(enum k3_stage stage);

/* What the last pass took, and what it had to touch.  stage[].ns sum to total_ns.  After a failed pass: up to the failure.
 *   bytes  what has to come from memory at least once: weights of the rows and experts multiplied (embedding rows in
 *          K3_STAGE_EMBED), and of the states: for every sequence and KDA layer S and the convolution tails, read and
 *          written, for every sequence and MLA layer the latent rows from 0 to its last position
 *   flop   2 for each multiply-add of the matrices (rows of x that were multiplied), and by formula for each row of the
 *          recurrence 7 dim^2 a head + 6 taps a channel, of attention 2 (2 kv_lora + qk_rope) a head and position */
struct k3_pass_times {
    uint64_t total_ns, trunk_wait_ns, expert_wait_ns;
    uint64_t distinct_experts, routed_rows;
    uint64_t weight_bytes, state_bytes, flop; /* sums over the stages */
    struct k3_stage_times { uint64_t ns, bytes, flop; } stage[K3_N_STAGES];
};
void k3_pass_times(const struct k3_pass *p, struct k3_pass_times *out);

#endif
