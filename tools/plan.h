/* tools/plan.h: the memory plan of an instance (design.md section 8): every part of what the family takes together, shared
 * pages once, its peak while members start or restart included; and what a token then reads.  The sizes come from the
 * functions with which the daemons size themselves.
 *
 *   plan.c        parts, the division between trunk and experts, refusals          pure but for the model's files
 *   plan_print.c  the table, KEY=VALUE lines, the table of the documentation
 *   plan_rate.c   what the drives read a second
 *   plan_model.c  the released shape without files                 plan_presets.c  run/presets */
#ifndef K3_TOOLS_PLAN_H
#define K3_TOOLS_PLAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"
#include "ipc/memory.h"
#include "model/model.h"

enum k3_plan_part {
    K3_PLAN_RING, K3_PLAN_PINNED, K3_PLAN_RESIDENT, K3_PLAN_SLOTS, K3_PLAN_STATE, K3_PLAN_KV, K3_PLAN_SNAPSHOTS, K3_PLAN_ROWS,
    K3_PLAN_LOGITS, K3_PLAN_SCRATCH, K3_PLAN_REQUESTS, K3_PLAN_INDEX, K3_PLAN_LOADING, K3_PLAN_TABLES,
    K3_PLAN_SERVER, K3_PLAN_PROGRAMS, K3_N_PLAN
};

#define K3_PLAN_AUTO_BYTES 2000000000ull /* auto keeps back this and a fiftieth */

struct k3_preset { char name[32]; double trunk_gb, cache_gb; };
#define K3_MAX_PRESETS 32
struct k3_presets { struct k3_preset item[K3_MAX_PRESETS]; size_t n; };
/* Reads "NAME TRUNK_GB CACHE_GB" lines; '#' begins a comment.  Refused with the line: anything else, "auto", a name twice. */
int k3_presets_parse(struct k3_presets *out, const char *text, const char *path, struct k3_err *err);
int k3_presets_read(struct k3_presets *out, const char *path, struct k3_err *err);
const struct k3_preset *k3_presets_find(const struct k3_presets *p, const char *name);

#define K3_PLAN_UNSET UINT64_MAX
#define K3_PLAN_CHOOSE UINT32_MAX
struct k3_plan_opts {
    uint64_t memory_bytes, trunk_bytes, cache_bytes; /* K3_PLAN_UNSET: not given */
    const struct k3_preset *preset;                  /* NULL: none */
    bool auto_preset;                                /* --preset auto was asked for by name */
    uint32_t ring_mb, batch_rows;                    /* 0: the plan chooses */
    uint32_t ctx, sequences, threads;
    uint32_t snapshots;                              /* K3_PLAN_CHOOSE: the plan does */
    uint32_t requests_mb;                            /* for requests that computed keeps; the plan chooses */
    uint32_t http_mb;                                /* for what clients send to a server; the plan chooses */
    bool http;                                       /* there is a server */
    bool split;                                      /* trunk and experts are read from different devices */
};
/* What is there; K3_MEMORY_NONE where it is not known or without end. */
struct k3_plan_machine {
    uint64_t left_bytes;     /* k3_memory_left */
    char why[256];           /* what says so */
    uint64_t promised_bytes; /* to n_others other instances, and not taken yet */
    uint32_t n_others;
    uint64_t shm_bytes;      /* free in /dev/shm */
};

struct k3_plan {
    struct k3_plan_opts opts;         /* batch_rows, ring_mb and snapshots filled in */
    uint64_t part[K3_N_PLAN];
    uint64_t sum_bytes;               /* the promise: of all parts */
    uint64_t limit_bytes;             /* what it had to fit into */
    uint64_t segment_bytes;           /* of it in shared memory */
    uint64_t trunk_bytes, cache_bytes; /* --trunk-gb and --cache-gb of the daemons */
    uint64_t n_slots, n_experts;
    uint64_t trunk_total_bytes, pinned_bytes; /* weights, without page slack */
    uint64_t trunk_read_bytes, expert_read_bytes; /* of one token; experts as if they were chosen at random */
    bool memfd;                       /* /dev/shm is too small for the segments */
    char reason[256];                 /* why trunk and experts share it so */
    char note[4][256];
    uint32_t n_notes;
};

/* The plan for a model.  Refused (exit 2): it does not fit, with what is missing and what would fit; budgets below the
 * floor; --memory beyond what there is. */
int k3_plan_make(struct k3_plan *out, const struct k3_model *m, const struct k3_plan_opts *opts,
                 const struct k3_plan_machine *machine, struct k3_err *err);
/* All of what the model can use: everything pinned, every expert resident. */
uint64_t k3_plan_most_bytes(const struct k3_plan *p, const struct k3_model *m);

/* Seconds of one token that the devices need; one rate is used for both when they are the same device. */
double k3_plan_seconds(const struct k3_plan *p, double trunk_bytes_per_s, double expert_bytes_per_s);

struct k3_plan_device { char name[64], how[200]; double bytes_per_s, bytes_per_s_depth1; };
/* Measures, or remembers, the drives of these directories; several drives are read at once and their rates added up.  A
 * rate of 0 when it cannot be told: `how` says why then.  Refused: a directory that cannot be looked at. */
int k3_plan_rate(const char *const *dirs, size_t n, struct k3_plan_device *out, struct k3_err *err);
struct k3_plan_view { /* what the table shows besides the plan */
    const char *instance, *model;
    const struct k3_model *m;
    const struct k3_plan_machine *machine;
    const struct k3_plan_device *trunk, *experts; /* NULL: nothing is read, or not measured */
};
const char *k3_plan_part_name(enum k3_plan_part part);
void k3_plan_print(FILE *f, const char *prefix, const struct k3_plan *p, const struct k3_plan_view *v);
void k3_plan_shell(FILE *f, const struct k3_plan *p, const char *memory_from); /* KEY=VALUE lines for k3-run */
/* The table of the documentation: from 2 GB to 512 GB, one row each. */
int k3_plan_table(FILE *f, const struct k3_model *m, const struct k3_plan_opts *opts, struct k3_err *err);

/* The released shape, from no files at all (sizes and places as k3-mkmodel --released would make them).  *out is the caller's. */
int k3_plan_released(struct k3_model **out, struct k3_err *err);

#endif
