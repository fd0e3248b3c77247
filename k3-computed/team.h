/* k3-computed/team.h: one team of pthreads; futex waits; it spins for microseconds at most. */
#ifndef K3_COMPUTED_TEAM_H
#define K3_COMPUTED_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "k3-computed/cpus.h"

struct k3_team;
/* n_threads includes the caller.  0 = the default of cpus.h. */
int k3_team_new(struct k3_team **out, uint32_t n_threads, struct k3_err *err);
void k3_team_free(struct k3_team *t);
uint32_t k3_team_size(const struct k3_team *t);
/* Runs fn(arg, i, worker) for all i in [0, n), distributed over the team by an atomic counter in chunks; returns when all
 * are done.  Called from one thread only, never nested.  The results must not depend on which worker ran what. */
typedef void k3_team_fn(void *arg, size_t i, uint32_t worker);
void k3_team_run(struct k3_team *t, size_t n, size_t chunk, k3_team_fn *fn, void *arg);

/* The same bit by bit, so that the team goes on while its caller fetches more: begin, then any number of add, help and wait,
 * then end.  Indices are handed out in ascending order, one at a time; what was written before an add is seen by its tasks. */
void k3_team_begin(struct k3_team *t, k3_team_fn *fn, void *arg);
void k3_team_add(struct k3_team *t, size_t n);
bool k3_team_help(struct k3_team *t); /* the caller runs one; false: all that were added have been begun */
/* Sleeps until done(arg), which a task makes true at its end.  What it reads must be sequentially consistent atomics. */
void k3_team_wait(struct k3_team *t, bool (*done)(void *arg), void *arg);
void k3_team_end(struct k3_team *t); /* runs what is left; returns when all are done */

/* Binds worker i to core i (all of its allowed CPUs; the thread that runs jobs is bound by its first one, and let go by
 * k3_team_free), where the team has one thread for each core of *c and no quota lowers them.  Only then is nothing chosen:
 * with fewer threads than cores two instances would both take the first cores and leave the others idle, so the kernel
 * places them.  A bound team looks for the next job for K3_TEAM_SPIN_NS before it sleeps.  c NULL: the cores of the calling thread.  False: not bound, by this rule or by the kernel. */
#define K3_TEAM_SPIN_NS 20000u
bool k3_team_pin(struct k3_team *t, const struct k3_cpus *c);
bool k3_team_pinned(const struct k3_team *t);

#endif
