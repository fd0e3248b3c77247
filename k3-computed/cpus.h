/* k3-computed/cpus.h: the CPUs and physical cores that this process may use, and how many threads a pass has by default.
 *
 * A pass has one thread a core: the two hardware threads of a core share its multipliers and its caches, so a second one
 * adds nothing to matrix products and slows the other down.  A CPU quota (control groups) lowers the number, since a team
 * that meets after every job loses more to one throttled member than to a missing one. */
#ifndef K3_COMPUTED_CPUS_H
#define K3_COMPUTED_CPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_CPUS_MAX 4096u
#define K3_CPUS_NO_QUOTA UINT32_MAX

struct k3_cpus {
    uint32_t n_cpus, n_cores;        /* allowed ones; at least 1 */
    uint32_t n_quota;                /* CPUs that the quota is worth, rounded down, at least 1; or K3_CPUS_NO_QUOTA */
    uint32_t n_threads;              /* the default: cores, lowered to the quota */
    uint32_t cpu[K3_CPUS_MAX];       /* the CPUs, those of a core together */
    uint32_t core[K3_CPUS_MAX + 1];  /* core i has cpu[core[i]] up to cpu[core[i + 1]] */
};
/* root: "" or a directory with proc/ and sys/ (tests).  allowed: a list like "0-3,8", NULL: the affinity mask of the calling
 * thread.  What the kernel does not say is no limit, and a CPU without topology is a core. */
void k3_cpus_read(struct k3_cpus *out, const char *root, const char *allowed);
/* --threads and --force-threads: 0 becomes the default; more are refused unless forced. */
int k3_cpus_check(const struct k3_cpus *c, uint32_t *n_threads, bool force, struct k3_err *err);
/* The same for this process as it is now. */
int k3_threads_check(uint32_t *n_threads, bool force, struct k3_err *err);
uint32_t k3_threads_default(void);
/* n_cpus lowered by the CPU quota (version 1 or 2, rounded down, at least 1) of the control group that root/proc/self/cgroup
 * names and of all its ancestors that root/proc/self/mountinfo shows. */
uint32_t k3_cpus_quota(const char *root, uint32_t n_cpus);

#endif
