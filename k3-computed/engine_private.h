/* k3-computed/engine_private.h: shared by engine.c and engine_poll.c. */
#ifndef K3_COMPUTED_ENGINE_PRIVATE_H
#define K3_COMPUTED_ENGINE_PRIVATE_H

#include <pthread.h>
#include <time.h>

#include "ipc/daemon.h"
#include "k3-computed/engine.h"

/* What one sequence got from a pass; written by draw(), without the lock. */
struct k3_outcome {
    bool has_token, has_logits;
    uint32_t token;
    int rc; /* the logits were not finite */
    struct k3_err err;
};

struct k3_engine {
    struct k3_engine_opts o;
    pthread_mutex_t lock;   /* everything below, but for what is marked */
    pthread_cond_t changed; /* an event or a progress: polls wait on it */
    pthread_cond_t work;    /* something is queued: the engine's thread waits on it */
    struct k3_requests requests;
    struct k3_request *queue_head, **queue_tail;
    uint32_t n_queued, n_polls_waiting;
    struct k3_seqs slots;
    uint64_t n_admitted, n_passes;
    struct k3_prefix prefix; /* the engine's thread alone */

    bool in_pass;
    uint32_t n_live;        /* sequences of the pass that have not ended meanwhile */
    uint32_t n_rows, n_most, layer;
    uint64_t pass_start_ns, layer_start_ns, layer_ns, pass_start_bytes, bytes_per_s, progress_seq;

    struct k3_sampler *sampler; /* from here on: the engine's thread alone, no lock */
    struct k3_row *rows;
    struct k3_tracer_row *row_names; /* of the rows, for the trace */
    float *logits;
    struct k3_walk *walk;    /* of constraints */
    uint64_t *allowed;       /* [vocab] bits */
    struct k3_outcome *outcome; /* one per slot */
    uint16_t *guess;         /* [n_experts]: distinct ones of a layer */
    uint8_t *guessed;        /* [n_experts] */
};

/* A deadline for pthread_cond_timedwait on the monotonic clock. */
static inline struct timespec k3_engine_in_ns(uint64_t ns)
{
    uint64_t at = k3_now_ns() + ns;

    return (struct timespec){ .tv_sec = (time_t)(at / 1000000000ull), .tv_nsec = (long)(at % 1000000000ull) };
}

static inline uint64_t k3_engine_bytes_per_s(uint64_t bytes, uint64_t ns)
{
    return ns ? (uint64_t)((double)bytes * 1e9 / (double)ns) : 0;
}

/* engine_prefix.c.  With the lock: */
/* A sequence is let go: what its state holds.  Any thread. */
void k3_engine_leave(struct k3_seq *s);
/* Looks after the sequences that have been let go. */
void k3_engine_ended(struct k3_engine *e);
/* A free slot for r, its n_done where r begins; NULL: none is free. */
struct k3_seq *k3_engine_begin(struct k3_engine *e, struct k3_request *r);
/* Marks the rows of the pass after which the sequence's state is to be kept; rows: its own. */
void k3_engine_points(struct k3_engine *e, struct k3_seq *s, struct k3_row *rows);
void k3_engine_prefix_gauges(struct k3_engine *e);
/* Without the lock, before and after a pass: states are half a gigabyte. */
void k3_engine_prepare(struct k3_engine *e);
void k3_engine_kept(struct k3_engine *e, bool done);

/* No request has this id: -ENOENT, with `advice` at the end of the line. */
int k3_engine_unknown(const char *id, const char *advice, struct k3_err *err);

#endif
