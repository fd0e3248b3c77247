/* shm/data.h: the data segments of k3-trunkd and k3-expertd, wherever their memory comes from.
 *
 *   shm       a named segment in /dev/shm
 *   memfd     for a /dev/shm that is too small: a memfd that k3-keeper keeps (shm/keeper.h); no size limit of a file
 *             system, so MemAvailable is looked at first
 *   hugetlb   the same of reserved 2 MiB pages (vm.nr_hugepages); where there are too few, a memfd
 * A control segment says where its data segment is (struct k3_data_place), complete before the control segment has its
 * name.  Two of one name are told apart by device and inode. */
#ifndef K3_SHM_DATA_H
#define K3_SHM_DATA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "shm/keeper.h"
#include "shm/segment.h"

struct k3_data_place { /* in control segments; written by the owner */
    uint32_t from; /* enum k3_mem_from */
    uint32_t pad;
    uint64_t dev, ino;
};
void k3_data_place(struct k3_data_place *out, const struct k3_seg *s);
bool k3_data_is_at(const struct k3_seg *s, const struct k3_data_place *at);

/* The reader's side, read-only.  -ENOENT without words: it is not there, or another one has its name, or k3-keeper is
 * not there just now; try again later. */
int k3_data_open(struct k3_seg *s, const char *instance, const char *rundir, const char *what,
                 const struct k3_data_place *at, struct k3_err *err);

/* ---- the owner's side ---- */

#define K3_NODE_ANY UINT32_MAX
struct k3_mem_opts {
    const char *from;   /* "shm", "memfd" or "hugetlb" */
    uint32_t numa_node; /* K3_NODE_ANY */
};
#define K3_MEM_OPTS_INIT { "shm", K3_NODE_ANY }
#define K3_NUMA_OPT_ROW(node)                                                                                  \
    { "numa-node", K3_OPT_U32, node, "N", "memory and threads on this NUMA node (default: anywhere)", 0, 1023 }
/* Rows for a struct k3_opt table. */
#define K3_MEM_OPT_ROWS(o)                                                                                     \
    { "memory-from", K3_OPT_STRING, &(o)->from, "HOW",                                                         \
      "shm, memfd or hugetlb: what the data segment is made of (default shm; the others need k3-keeper)", 0, 0 }, \
    K3_NUMA_OPT_ROW(&(o)->numa_node)

struct k3_mem {
    enum k3_mem_from asked;
    int numa_node; /* -1 anywhere */
    char instance[40], rundir[512], what[40];
    struct k3_guard *guard;
    char fallback[256]; /* why it is not what was asked for; empty when it is */
    _Atomic uint64_t locked_bytes;
    uint64_t looked_ns;
};
/* Checks both options (exit 2) and goes to the node: to be called before any thread is made. */
int k3_mem_open(struct k3_mem *m, const struct k3_mem_opts *o, struct k3_err *err);
/* Where the segment belongs; before the calls below. */
void k3_mem_name(struct k3_mem *m, const char *instance, const char *rundir, const char *what);
void k3_mem_close(struct k3_mem *m); /* the segment stays */

/* What a predecessor left, writable: 0, or -ENOENT.  Waits at most 5 s for k3-keeper (exit 3).  One that is made of
 * something else than what was asked for is let go. */
int k3_data_take(struct k3_mem *m, struct k3_seg *s, struct k3_err *err);
/* A new zeroed one; an older one is let go first, so that the two are never held at once. */
int k3_data_create(struct k3_mem *m, struct k3_seg *s, uint64_t len_bytes, struct k3_err *err);
/* Makes it findable: a name in /dev/shm, or in k3-keeper. */
int k3_data_publish(struct k3_mem *m, const struct k3_seg *s, struct k3_err *err);
/* The same for one that was taken. */
int k3_data_guard(struct k3_mem *m, const struct k3_seg *s, struct k3_err *err);
void k3_data_drop(struct k3_mem *m); /* it will not be found any more */

/* mlock, added to locked_bytes; renewed ranges stay locked. */
void k3_mem_lock(struct k3_mem *m, void *addr, uint64_t len_bytes);
/* At most every 10 s: true, with the bytes of s that are in swap and the major faults of this process so far.  The
 * mappings are only walked while the machine has something in swap. */
bool k3_mem_look(struct k3_mem *m, const struct k3_seg *s, uint64_t *swapped_bytes, uint64_t *major_faults);
uint64_t k3_mem_swapped(const struct k3_seg *s);
uint64_t k3_major_faults(void);

/* NUMA (shm/numa.c).  Binds this thread, and all that it makes afterwards, to the CPUs of the node, and prefers its
 * memory.  -1: nothing.  A node that is not there is refused (exit 2), naming those there are.  A node without CPUs gives
 * memory alone; a kernel without NUMA has node 0. */
int k3_numa_go(int node, struct k3_err *err);

#endif
