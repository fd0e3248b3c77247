/* k3-computed/team.h: one team of pthreads; futex waits, no spinning. */
#ifndef K3_COMPUTED_TEAM_H
#define K3_COMPUTED_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

struct k3_team;
/* n_threads includes the caller.  0 = the CPUs that the affinity mask and the cgroup quota allow. */
int k3_team_new(struct k3_team **out, uint32_t n_threads, struct k3_err *err);
void k3_team_free(struct k3_team *t);
uint32_t k3_team_size(const struct k3_team *t);
/* Runs fn(arg, i, worker) for all i in [0, n), distributed over the team by an atomic counter in chunks; returns when all
 * are done.  Called from one thread only, never nested.  The results must not depend on which worker ran what. */
typedef void k3_team_fn(void *arg, size_t i, uint32_t worker);
void k3_team_run(struct k3_team *t, size_t n, size_t chunk, k3_team_fn *fn, void *arg);
uint32_t k3_cpus_allowed(void);
/* --threads and --force-threads: 0 becomes the CPUs allowed; more than those are refused unless forced. */
int k3_threads_check(uint32_t *n_threads, bool force, struct k3_err *err);
/* n_cpus lowered by the CPU quota (version 1 or 2, rounded down, at least 1) of the cgroup that cgroup_file
 * (/proc/self/cgroup) names and of all its ancestors that mountinfo_file (/proc/self/mountinfo) shows. */
uint32_t k3_team_quota(const char *cgroup_file, const char *mountinfo_file, uint32_t n_cpus);

#endif
