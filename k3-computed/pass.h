/* k3-computed/pass.h: one pass over the model for a batch of rows (design.md section 5, spec/model.md 0.2 and 4). */
#ifndef K3_COMPUTED_PASS_H
#define K3_COMPUTED_PASS_H

#include <stdbool.h>
#include <stdint.h>

#include "k3-computed/kernels.h"
#include "k3-computed/source.h"
#include "k3-computed/team.h"

/* What a sequence carries from pass to pass: per KDA layer S [heads][dim][dim] and three convolution tails, per MLA layer the
 * latent rows [ctx][kv_lora + qk_rope].  State after n positions; it cannot be rolled back. */
struct k3_state;
int k3_state_new(struct k3_state **out, const struct k3_config *c, uint32_t ctx, struct k3_err *err);
/* Makes the kernel provide all its pages now, so that out of memory is an error at the start.  -ENOMEM. */
int k3_state_touch(struct k3_state *s, struct k3_err *err);
void k3_state_free(struct k3_state *s);
void k3_state_reset(struct k3_state *s);
uint32_t k3_state_positions(const struct k3_state *s);
uint64_t k3_state_bytes(const struct k3_config *c, uint32_t ctx);

struct k3_row {
    struct k3_state *state;
    uint32_t token;
    uint32_t position;   /* must equal the state's positions plus the rows of the same state before it in this pass */
    bool want_logits;
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

/* Time split of the last pass. */
struct k3_pass_times { uint64_t total_ns, trunk_wait_ns, expert_wait_ns; uint64_t distinct_experts, routed_rows; };
void k3_pass_times(const struct k3_pass *p, struct k3_pass_times *out);

#endif
