/* k3-computed/computed.h: the daemon's own struct and the prototypes between its files (private here).
 *
 *   options.c  the command line            open.c   model, kernels, memory, peers, engine
 *   serve.c    requests as JSON, the loop  constrain.c  the constraint of a request
 *   shm_source.c, embed.c   where the weights come from */
#ifndef K3_COMPUTED_COMPUTED_H
#define K3_COMPUTED_COMPUTED_H

#include <pthread.h>

#include "ipc/daemon.h"
#include "ipc/msg.h"
#include "k3-computed/engine.h"
#include "k3-computed/kernels.h"
#include "k3-computed/shm_source.h"
#include "k3-computed/team.h"

struct k3_computed_options {
    struct k3_daemon_opts daemon;
    const char *model, *kernels;
    struct k3_str_list devices;
    uint32_t numa_node;
    uint32_t ctx, sequences, batch_rows, threads, layers, prefetch; /* threads 0: the cores allowed; layers 0: all */
    uint32_t requests_mb, snapshots;
    bool force_threads;
};
#define K3_BATCH_ROWS 512u /* by hand; k3-run gives what the plan says */
#define K3_COMPUTED_OPTIONS_INIT                                                                            \
    { .daemon = K3_DAEMON_OPTS_INIT, .kernels = "auto", .ctx = 4096, .sequences = 1, \
      .requests_mb = 256, .numa_node = K3_NODE_ANY }

struct k3_computed {
    struct k3_computed_options opt;
    struct k3_model *model;
    const struct k3_kernels *kernels;
    struct k3_daemon *daemon;
    struct k3_cpus cpus;   /* when it started */
    struct k3_team *team;
    struct k3_pass *pass;
    struct k3_shm_source *source;
    struct k3_tracer *tracer;
    struct k3_engine *engine;
    struct k3_server *server;
    struct k3_meter meter;
    _Atomic bool abort;    /* ends the waits of the source: a stop, or a pass that nobody wants any more */
    _Atomic bool stop;     /* ends the engine */
    pthread_mutex_t vocab_lock;
    struct k3_vocab *vocab; /* the lock; NULL until a request has a constraint */
    uint64_t seen_expertd; /* generations met, at the last tick */
    char model_path[4096]; /* absolute: whoever asks may be in another directory */
};
#define K3_COMPUTED_INIT { .opt = K3_COMPUTED_OPTIONS_INIT, .vocab_lock = PTHREAD_MUTEX_INITIALIZER }

/* true: the program ends now with *status. */
bool k3_computed_options(struct k3_computed_options *o, int argc, char **argv, int *status);
/* 0: a first request could be served.  1: it was stopped while waiting for its peers. */
int k3_computed_open(struct k3_computed *c, struct k3_err *err);
int k3_computed_serve(struct k3_computed *c, struct k3_err *err);
void k3_computed_close(struct k3_computed *c); /* safe after any partial open */

/* One request of computed.sock (ipc/msg.h); arg is a struct k3_computed.  serve.c */
void k3_computed_answer(void *arg, const char *cmd, const cJSON *request, cJSON *reply);
/* The fields of a submit, types and ranges checked; the arrays are the caller's, to be freed.  serve.c */
int k3_computed_submit_parse(const cJSON *request, struct k3_submit *out, struct k3_err *err);
void k3_computed_submit_free(struct k3_submit *s);
/* Makes s->constraint from the member of the request, when there is one, and takes it to where the generated ids end.  constrain.c */
int k3_computed_constrain(struct k3_computed *c, const cJSON *request, struct k3_submit *s, struct k3_err *err);
/* Control requests of its own: trace {action:"start", file:"absolute", lookahead:bool?} and {action:"stop", file?}.
 * serve.c */
int k3_computed_ctl(void *arg, const char *cmd, const cJSON *request, cJSON *reply, struct k3_err *err);
/* MoE layers that another layer comes before, and those of them whose gate is pinned.  serve.c */
void k3_computed_gates(const struct k3_computed *c, uint32_t *n_pinned, uint32_t *n);
/* Fields of `info`.  open.c */
void k3_computed_info(void *arg, cJSON *reply);
/* The model's digest as 64 hex digits and a NUL. */
void k3_computed_digest(const struct k3_computed *c, char out[65]);
/* Logs what the trunk reader notices.  serve.c */
void k3_computed_notice(void *arg, const char *event, const char *text);
/* Stats of the source, heartbeat, log lines about peers; on the engine's thread.  serve.c */
void k3_computed_tick(void *arg);

#endif
