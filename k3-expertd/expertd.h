/* k3-expertd/expertd.h: the daemon's struct and what its files share. */
#ifndef K3_EXPERTD_EXPERTD_H
#define K3_EXPERTD_EXPERTD_H

#include <pthread.h>

#include "ipc/daemon.h"
#include "k3-expertd/reader.h"
#include "k3-expertd/slots.h"
#include "model/verify.h"
#include "shm/expert_ring.h"

#define K3_EXPERTD_NAME "k3-expertd"

struct k3_expertd_opts {
    struct k3_daemon_opts common;
    const char *model, *policy, *io, *direct;
    struct k3_mem_opts mem;
    const char *verify; /* "off", "first", "always"; NULL: first when there are sums */
    struct k3_str_list devices;
    uint64_t cache_bytes, io_block_bytes;
    uint32_t n_layers, io_depth;
};

enum k3_expertd_stat {
    K3_XS_DEMANDS, K3_XS_HITS, K3_XS_MISSES, K3_XS_JOINED, K3_XS_PREFETCHES, K3_XS_PREFETCH_HITS,
    K3_XS_PREFETCH_DROPPED, K3_XS_READ_BYTES, K3_XS_READS, K3_XS_READ_NS, K3_XS_DEMAND_NS, K3_XS_IN_FLIGHT,
    K3_XS_EVICTIONS, K3_XS_SLOTS, K3_XS_SLOTS_READY, K3_XS_SLOTS_LENT, K3_XS_SLOT_BYTES, K3_XS_QUEUED, K3_XS_ERRORS,
    K3_XS_RETRIES, K3_XS_ATTACHES, K3_XS_STALE_DROPPED, K3_XS_TAKEN_OVER, K3_XS_RENEWED, K3_XS_PROTOCOL_ERRORS,
    K3_XS_HUGE_BYTES, K3_XS_LOCKED_BYTES, K3_XS_SWAPPED_BYTES, K3_XS_MAJOR_FAULTS, K3_XS_VERIFIED_BYTES, K3_XS_VERIFY_FAILURES,
    K3_XS_N
};
extern const struct k3_stat_def k3_expertd_stat_defs[K3_XS_N];

/* Sleeps on the client's bell while the main loop sleeps on its eventfd (reads are in flight), and passes one ring
 * on.  bridge.c. */
struct k3_bridge {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    _Atomic uint32_t *seq, *sleepers;
    uint32_t seen;
    int efd;
    bool started, armed, give_up, quit;
};
int k3_bridge_open(struct k3_bridge *b, int efd, struct k3_err *err);
/* Once *seq != seen, efd is written.  Nothing happens when an earlier arming still waits: it sees the same ring. */
void k3_bridge_arm(struct k3_bridge *b, _Atomic uint32_t *seq, _Atomic uint32_t *sleepers, uint32_t seen);
/* Returns when the bridge no longer touches the words that it was armed with. */
void k3_bridge_disarm(struct k3_bridge *b);
void k3_bridge_close(struct k3_bridge *b);

struct k3_expertd {
    struct k3_expertd_opts opt;
    struct k3_daemon *daemon;
    struct k3_model *model;
    struct k3_seg data, ctl;
    struct k3_mem mem; /* what data is made of */
    struct k3_expert_ends ends;
    struct k3_slots *slots;
    struct k3_reader *reader;
    struct k3_bridge bridge;
    struct k3_verify verify; /* a mark per expert */
    struct k3_layer_count { _Atomic uint64_t demands, hits; } *layer_count; /* n_layers; one writer, the control thread reads */
    uint64_t tensor_bytes[K3_EXPERT_TENSORS]; /* what the sum of an expert is over */
    int efd;         /* news for the main loop: completed reads, the bridge, stop */
    uint32_t n_slots;
    uint64_t slot_bytes, slots_off_bytes, data_bytes, n_experts_all;
    uint64_t attach; /* the client's attach number that is served; 0 none */
    uint32_t n_adopted, n_renewed;
    bool published;  /* our segments have their names */
    bool rang;       /* completions were pushed since the bell was rung */
};
#define K3_EXPERTD_INIT { .data = K3_SEG_INIT, .ctl = K3_SEG_INIT, .efd = -1 }

/* options.c.  True when the program should end now with *status. */
bool k3_expertd_options(struct k3_expertd_opts *o, int argc, char **argv, int *status);
/* budget.c.  Pure.  Refused: fewer slots than one row of one layer needs. */
struct k3_arena_size {
    uint32_t n_slots;
    uint64_t slot_bytes, slots_off_bytes, data_bytes, n_experts_all;
};
int k3_expertd_budget(const struct k3_model *m, uint64_t cache_bytes, struct k3_arena_size *out, struct k3_err *err);
/* open.c */
int k3_expertd_open(struct k3_expertd *d, struct k3_err *err);
void k3_expertd_close(struct k3_expertd *d, int rc); /* rc < 0: the arena is left for the successor */
/* A new control segment over the same arena; the client sees it as a restart. */
int k3_expertd_publish(struct k3_expertd *d, struct k3_err *err);
/* A demand of a layer that has experts, or that one of them was a hit. */
static inline void k3_expertd_count_layer(struct k3_expertd *d, uint32_t layer, bool hit)
{
    struct k3_layer_count *c = &d->layer_count[layer];

    atomic_fetch_add_explicit(hit ? &c->hits : &c->demands, 1, memory_order_relaxed);
}
/* verify.c */
int k3_xverify_open(struct k3_expertd *d, struct k3_err *err);
/* Compares an expert that has landed with its sum; a wrong one becomes a failed read, with its file and offset. */
void k3_xverify_read(struct k3_expertd *d, struct k3_read_done *r);
/* serve.c: says ready, then loops until told to stop. */
int k3_expertd_serve(struct k3_expertd *d, struct k3_err *err);

#endif
