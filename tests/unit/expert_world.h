/* tests/unit/expert_world.h: a small checkpoint with a private copy of every expert's bytes, and a real k3-expertd to serve
 * it.  For the tests of the expert arena. */
#ifndef K3_TESTS_EXPERT_WORLD_H
#define K3_TESTS_EXPERT_WORLD_H

#include <sys/types.h>

#include "shm/expert.h"

#define K3_XW_DENSE 1u /* first layers without experts */

struct k3_xw_shape {
    uint32_t n_layers, n_experts, top_k, latent, inner;
    uint32_t n_files;   /* expert shards, spread over both directories */
    bool scattered;     /* the six tensors of an expert lie apart, and in different files */
    bool two_devices;   /* the second directory lies in /dev/shm */
    uint32_t seed;
};
struct k3_xw {
    struct k3_xw_shape shape;
    char dir[2][64];     /* model directory and a second device */
    char instance[33], rundir[256], log[96];
    struct k3_model *m;  /* as computed opens it: without experts */
    uint8_t *bytes;      /* the experts' tensors: what every view must equal */
    uint64_t len_bytes[K3_EXPERT_TENSORS], expert_bytes;
    struct { uint32_t file; uint64_t off_bytes; } *place; /* tensor t of expert e of layer l, in shard file */
    pid_t daemon;
    uint32_t generation; /* of the next client */
    uint64_t random;
};

/* Writes the checkpoint into new directories and opens it; fails the test when it cannot. */
void k3_xw_open(struct k3_xw *w, const struct k3_xw_shape *shape);
/* Stops the daemon and removes files, run directory and segments. */
void k3_xw_close(struct k3_xw *w);
uint64_t k3_xw_random(struct k3_xw *w, uint64_t below);
void k3_xw_shard_path(const struct k3_xw *w, uint32_t file, char *out, size_t len);

/* Starts bin/k3-expertd with these further options (NULL ends); it need not be ready yet. */
void k3_xw_daemon_start(struct k3_xw *w, const char *const *options);
void k3_xw_daemon_kill(struct k3_xw *w);      /* SIGKILL, reaped */
int k3_xw_daemon_stop(struct k3_xw *w);       /* SIGTERM; its exit status */
uint64_t k3_xw_stat(struct k3_xw *w, const char *name);
/* Waits until the value is this one; fails the test when that does not happen. */
void k3_xw_stat_wait(struct k3_xw *w, const char *name, uint64_t value);
/* Waits until a line of the daemon's log contains text. */
void k3_xw_log_wait(struct k3_xw *w, const char *text);
/* Sum of the numbers behind "key=" over the whole log. */
uint64_t k3_xw_log_sum(struct k3_xw *w, const char *key);

struct k3_expert_client *k3_xw_client(struct k3_xw *w);
/* "--cache-gb" value for n slots. */
const char *k3_xw_cache(struct k3_xw *w, uint32_t n_slots, char *out, size_t len);
/* Fails the test unless all six tensors of the view are the file's. */
void k3_xw_check_view(struct k3_xw *w, const struct k3_expert_view *v);
/* One layer through the client: begin, next, check, release in order, keeping up to n_keep views before releasing the
 * oldest. */
void k3_xw_layer(struct k3_xw *w, struct k3_expert_client *c, uint32_t layer, const uint16_t *experts,
                   uint32_t n, uint32_t n_keep);
/* n distinct ascending experts. */
void k3_xw_pick(struct k3_xw *w, uint16_t *experts, uint32_t n);

#endif
