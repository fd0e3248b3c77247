/* tests/unit/engine_world.h: an engine over the demo model with weights from files, for the engine's tests.  One thread:
 * k3_engine_step() is called by the test, and whatever is to happen in the middle of a pass is done by `tick`, which the
 * engine calls after every layer without its lock. */
#ifndef K3_TESTS_ENGINE_WORLD_H
#define K3_TESTS_ENGINE_WORLD_H

#include "k3-computed/engine.h"
#include "tests/unit/pass_world.h"

#define DEMO_DIR "run/demo-model"

/* Setup and teardown of a group of tests; without the demo model nothing can be tested. */
extern struct k3_world k3_ew_demo;
int k3_ew_open_demo(void **state);
int k3_ew_close_demo(void **state);

/* Prompts. */
#define K3_EW_N_FRANCE 28u
extern const uint32_t k3_ew_france[K3_EW_N_FRANCE]; /* "What is the capital of France?" as a chat turn */
extern uint32_t k3_ew_long[300];

struct k3_ew {
    struct k3_world *w;
    struct k3_runner run;
    struct k3_source source; /* in front of the file source: can spoil lm_head */
    struct k3_engine *e;
    struct k3_tracer *tracer;
    struct k3_stats stats; /* a page of its own, private memory */
    struct k3_stats_page page;
    struct k3_stat_entry entry[K3_N_CS];
    _Atomic uint64_t value[K3_N_CS * (K3_HIST_BUCKETS + 1)];
    struct k3_meter meter;
    _Atomic bool abort, stop;
    uint64_t now_ns;       /* the settable clock */
    bool nan_logits;       /* lm_head gives NaN */
    uint32_t n_ticks, act_at; /* act(arg) at that tick; 0 = never */
    void (*act)(struct k3_ew *ew);
    const char *act_id;
    struct k3_ew *outer;   /* the one that was open before; open and close are nested */
};
extern uint32_t k3_ew_snapshots; /* of engines opened from now on; 0 at first */
/* All end the program when something fails. */
void k3_ew_open(struct k3_ew *ew, struct k3_world *w, uint32_t n_sequences, uint32_t batch_rows, uint32_t ctx);
/* The same with a team of `threads`; k3_ew_open: 1. */
void k3_ew_open_team(struct k3_ew *ew, struct k3_world *w, uint32_t n_sequences, uint32_t batch_rows, uint32_t ctx,
                     uint32_t threads);
void k3_ew_close(struct k3_ew *ew);
uint64_t k3_ew_stat(const struct k3_ew *ew, enum k3_computed_stat stat);
/* Steps until there is nothing to do; returns the number of passes. */
uint32_t k3_ew_run(struct k3_ew *ew);

/* id: a small number; greedy, max_tokens 16, no stop ids unless changed. */
struct k3_submit k3_ew_submit(unsigned id, const uint32_t *prompt, uint32_t n_prompt);
/* Warm sampling with a seed of its own, 12 tokens. */
struct k3_submit k3_ew_sampled(unsigned id);
void k3_ew_must_submit(struct k3_ew *ew, const struct k3_submit *s);
/* What a poll from index 0 without waiting shows. */
struct k3_ew_answer {
    char state[12], end[12]; /* end: "" while it runs, the reason, or "error" */
    uint32_t token[512], n_tokens, first_index;
    bool has_logits;
    uint64_t logits_hash;
    long stop_id;
    int code;
    char message[1024];
};
void k3_ew_answer(struct k3_ew *ew, const char *id, struct k3_ew_answer *a);
/* Fails the test unless both ended the same way with the same tokens. */
void k3_ew_same(const struct k3_ew_answer *x, const struct k3_ew_answer *y);
/* Submits, runs to the end and takes the answer. */
void k3_ew_ask(struct k3_ew *ew, const struct k3_submit *s, struct k3_ew_answer *a);

#endif
