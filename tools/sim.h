/* tools/sim.h: the parts of k3-sim: traces, the demands that follow from them, replay, plot. */
#ifndef K3_TOOLS_SIM_H
#define K3_TOOLS_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"
#include "k3-computed/trace_file.h"
#include "k3-expertd/policy.h"

/* ---- traces (sim_trace.c) ---- */

#define K3_NO_LOOK SIZE_MAX
struct k3_trace_row { uint32_t sequence, position; bool counted; };
struct k3_trace_layer { /* one layer of one pass */
    uint32_t pass, layer;
    size_t ids, look; /* into ids[]: top_k (look_k) for each row of the pass; look may be K3_NO_LOOK */
};
struct k3_trace_pass {
    uint64_t number;
    size_t first_row, first_layer;
    uint32_t n_rows, n_layers, end; /* end: enum k3_trace_end */
};
struct k3_trace {
    struct k3_trace_head head;
    struct k3_trace_pass *pass;
    struct k3_trace_layer *layer;
    struct k3_trace_row *row;
    uint16_t *ids;
    size_t n_passes, n_layers, n_rows, n_ids;
    size_t cap_passes, cap_layers, cap_rows, cap_ids;
    uint64_t cut_bytes; /* of an unfinished pass at the end of the file, left out */
};
/* From the bytes of a trace file; `name` is for the words of errors.  On success *out is the caller's, to be released with
 * k3_trace_free().  -EINVAL (exit 2): not a trace, or a damaged one; names the offset. */
int k3_trace_parse(struct k3_trace *out, const void *data, size_t len_bytes, const char *name, struct k3_err *err);
/* The pairs of int32 (layer, expert) of ../shared/spec/model.md 8.1.4: for each pass, for each layer, for each row, top_k
 * pairs.  Every pass begins anew at position 0 of one sequence. */
int k3_trace_parse_raw(struct k3_trace *out, const void *data, size_t len_bytes, const char *name, uint32_t n_experts,
                       uint32_t top_k, uint64_t expert_bytes, struct k3_err *err);
/* Reads a whole regular file; *data is the caller's, to be freed. */
int k3_trace_read(const char *path, void **data, size_t *len_bytes, struct k3_err *err);
void k3_trace_free(struct k3_trace *t); /* safe on one that is all zeros */
/* Counts each (sequence, position) only where it is first; later rows of it are passed over. */
int k3_trace_once(struct k3_trace *t, struct k3_err *err);

/* ---- demands (sim_replay.c) ---- */

/* As the family makes them: of each layer of a pass every expert that some row was routed to, once, ascending. */
struct k3_demand_group { uint32_t pass, layer; size_t end; /* first demand of the next */ };
struct k3_demands {
    uint32_t *key; /* layer * n_experts + expert */
    struct k3_demand_group *group;
    size_t n, n_groups, n_passes, n_rows; /* passes and rows that count */
    size_t half;                          /* first demand of the second half of the passes */
    uint32_t n_keys, n_distinct, top_k;
};
int k3_demands_build(struct k3_demands *out, const struct k3_trace *t, struct k3_err *err);
void k3_demands_free(struct k3_demands *d);

/* ---- replay (sim_replay.c): the hits among the demands [from, n), with an empty cache before demand 0 ---- */

/* Through the daemon's policy, with its rules: an expert of the layer at work is no victim until it is released, and it is
 * released when a slot is needed or the layer is over.  half_life > 0: lfru by frequency alone with that half-life in passes. */
int k3_sim_policy(const struct k3_demands *d, const struct k3_policy_ops *ops, double half_life, uint32_t n_slots,
                  size_t from, uint64_t *hits, struct k3_err *err);
/* The most often demanded of [0, learn) stay; the other slots, top_k, only pass experts through.  An expert of the set
 * is read at its first demand. */
int k3_sim_pinned(const struct k3_demands *d, uint32_t n_slots, size_t learn, size_t from, uint64_t *hits,
                  struct k3_err *err);
/* Belady: whose next demand is farthest goes.  No policy that must give every demand a slot has more hits over the whole. */
int k3_sim_belady(const struct k3_demands *d, uint32_t n_slots, size_t from, uint64_t *hits, struct k3_err *err);

/* ---- look-ahead (sim_look.c) ---- */

struct k3_recall { uint32_t k; uint64_t routed, guessed, came; }; /* over rows and layers that have a look-ahead */
/* k: the best guesses of each row, at most look_k. */
void k3_sim_recall(const struct k3_trace *t, uint32_t k, struct k3_recall *out);

/* Trunk and experts on devices of their own, lfru, reading the best k guesses of each row ahead.  Rates in bytes/s;
 * compute_rate: weights multiplied; pinned: share of the trunk that is not read. */
struct k3_split { uint32_t n_slots, k; uint64_t slot_bytes, ring_bytes; double trunk_rate, expert_rate, compute_rate, pinned; };
struct k3_split_result { double seconds; uint64_t passes, demands, reads, useless; };
int k3_sim_split(const struct k3_trace *t, const struct k3_split *o, struct k3_split_result *out, struct k3_err *err);

/* ---- plot (sim_svg.c) ---- */

struct k3_plot {
    const char *title, *x_label, *y_label;
    const char *const *name;   /* of each line */
    const double *x;           /* [n_x], ascending, > 0: a logarithmic axis */
    const double *y;           /* [n_lines][n_x], percent */
    size_t n_lines, n_x;
};
/* Writes an SVG; the caller checks the stream. */
void k3_plot_write(FILE *f, const struct k3_plot *p);

#endif
