/* k3-keeper/keeper.h: private to k3-keeper: what it holds, and the daemon's struct.  The protocol is shm/keeper.h. */
#ifndef K3_KEEPER_KEEPER_H
#define K3_KEEPER_KEEPER_H

#include <pthread.h>

#include "ipc/daemon.h"
#include "shm/keeper.h"

#define K3_KEEPER_CLIENTS 32

enum k3_keeper_stat { K3_PS_SEGMENTS, K3_PS_BYTES, K3_PS_STORES, K3_PS_FETCHES, K3_PS_DROPS, K3_PS_REFUSED, K3_PS_N };
extern const struct k3_stat_def k3_keeper_stats[K3_PS_N];

struct k3_kept {
    char name[40]; /* empty: a free place */
    int fd;
    uint64_t len_bytes;
};
struct k3_keep { /* keep.c: no sockets here */
    struct k3_kept seg[K3_KEEPER_SEGS];
    uint64_t settled_ns; /* CLOCK_MONOTONIC: from then on what is not here does not exist */
};
/* Does what a checked message asks for and makes it the answer.  fd (-1 none) came with it and is kept or closed; the
 * return value is the descriptor that goes with the answer (still ours), or -1. */
int k3_keep_answer(struct k3_keep *k, struct k3_keeper_msg *m, int fd, uint64_t now_ns);
void k3_keep_close(struct k3_keep *k);

struct k3_keeper {
    struct k3_daemon_opts opt;
    struct k3_daemon *daemon;
    int listen_fd, wake_fd;
    int client[K3_KEEPER_CLIENTS]; /* -1 free */
    char path[600];
    pthread_mutex_t lock; /* guards keep: info runs on the control thread */
    struct k3_keep keep;
};

int k3_keeper_open(struct k3_keeper *k, struct k3_err *err);
int k3_keeper_serve(struct k3_keeper *k, struct k3_err *err); /* says ready, then loops until SIGTERM */
void k3_keeper_close(struct k3_keeper *k);

#endif
