/* shm/keeper.h: how daemons hand memfds to k3-keeper and get them back.  A memfd has no name and ends with its last
 * descriptor; k3-keeper has one open for each data segment, so that a successor finds what a dead owner left.
 *
 * Socket <run dir>/keeper.sock (SOCK_SEQPACKET, mode 0600; only processes of the same user are served).  One request,
 * one answer, both struct k3_keeper_msg; a descriptor travels beside it (SCM_RIGHTS) in STORE and in the answer to FETCH.
 *   STORE         under this name; what had the name before is closed
 *   STORE_ABSENT  the same, but what is there stays (status 0 too): for k3-computed, which is no owner
 *   FETCH         -ENOENT: nothing has the name; -EAGAIN: nothing has it yet, but k3-keeper has just come back from a
 *                 death and the living have a second to store theirs again
 *   DROP          0 also when nothing had the name
 * k3-keeper dies: whoever has a segment open and a guard on it stores it again when a successor is there.  So a segment
 * is lost only when its owner, k3-computed and k3-keeper are all gone. */
#ifndef K3_SHM_KEEPER_H
#define K3_SHM_KEEPER_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "shm/segment.h"

#define K3_KEEPER_NAME "k3-keeper"
#define K3_KEEPER_SOCK "keeper.sock"
#define K3_KEEPER_MAGIC 0x6b336b70u
#define K3_KEEPER_VERSION 1u
#define K3_KEEPER_SEGS 8            /* names at once */
#define K3_KEEPER_SETTLE_NS 1000000000ull

enum k3_keeper_op { K3_KEEPER_STORE = 1, K3_KEEPER_STORE_ABSENT, K3_KEEPER_FETCH, K3_KEEPER_DROP };
struct k3_keeper_msg {
    uint32_t magic, version;
    uint32_t op;        /* enum k3_keeper_op; repeated in the answer */
    int32_t status;     /* answer: 0 or negative errno */
    uint64_t len_bytes; /* of the segment; its file may be longer (whole huge pages) */
    char name[40];      /* "trunkdata": 1 to 39 of a-z, NUL to the end */
};
static_assert(sizeof(struct k3_keeper_msg) == 64, "protocol");

/* One message with at most one descriptor (fd -1: none).  send: 0 or negative errno.  recv: 0, -EPIPE when the peer has
 * closed, -EPROTO when it is no whole message of this version (a descriptor that came with it is closed), -EAGAIN. */
int k3_keeper_send(int sock, const struct k3_keeper_msg *m, int fd);
int k3_keeper_recv(int sock, struct k3_keeper_msg *m, int *fd);
/* 0, or -EPROTO for numbers or names that cannot be. */
int k3_keeper_check(const struct k3_keeper_msg *m);

/* One request over a connection of its own; each step of it waits at most two seconds.  -ECONNREFUSED: no k3-keeper is
 * there, or it does not answer.  Else 0 or what k3-keeper answers.  No words. */
int k3_keeper_store(const char *rundir, const struct k3_seg *s, const char *what, bool if_absent);
int k3_keeper_fetch(const char *rundir, const char *what, int *fd, uint64_t *len_bytes); /* fd is the caller's */
int k3_keeper_drop(const char *rundir, const char *what);

/* A thread that stores the segment again each time a new k3-keeper is there.  It has a descriptor of its own.  NULL is
 * fine for close.  -EAGAIN, -EMFILE: no thread or descriptor to be had. */
struct k3_guard;
int k3_guard_open(struct k3_guard **out, const char *rundir, const struct k3_seg *s, const char *what, bool owner,
                  struct k3_err *err);
void k3_guard_close(struct k3_guard *g);

#endif
