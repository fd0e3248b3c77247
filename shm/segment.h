/* shm/segment.h: named POSIX shared memory, the run directory and the kernel locks that say who is alive.
 * Data segments may be memfds instead, which have no name but one in k3-keeper: shm/data.h.
 *
 * A control segment is complete before it has its name: it is made nameless, linked under a temporary name and
 * renamed over the old one.  A data segment keeps its name and inode over take-overs.  Mode 0600; reserved with posix_fallocate before
 * use, so that a small /dev/shm is a refusal and never SIGBUS. */
#ifndef K3_SHM_SEGMENT_H
#define K3_SHM_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"

#define K3_LINE 64

enum k3_mem_from { K3_MEM_SHM = 0, K3_MEM_MEMFD = 1, K3_MEM_HUGETLB = 2 };
const char *k3_mem_from_name(enum k3_mem_from from); /* "shm", "memfd", "hugetlb" */

struct k3_seg {
    char name[128]; /* "/k3.<uid>.<instance>.<what>"; empty when closed */
    int fd;         /* -1 none */
    uint8_t *base;  /* NULL unmapped */
    uint64_t len_bytes;
    enum k3_mem_from from;
};
#define K3_SEG_INIT { "", -1, NULL, 0, K3_MEM_SHM }

/* Instance names: 1..32 of [A-Za-z0-9_-].  Refused otherwise (exit 2). */
int k3_instance_check(const char *instance, struct k3_err *err);
/* Fills out with "/k3.<uid>.<instance>.<what>". */
void k3_seg_name(char *out, size_t len, const char *instance, const char *what);

/* Makes a new zeroed segment without a name (a maker that dies leaves none), reserves and maps it rw.
 * k3_seg_publish() gives it its name, replacing an older one.  Refused, with what is free in /dev/shm and the option that
 * makes it smaller, when the reservation fails. */
int k3_seg_create(struct k3_seg *s, const char *instance, const char *what, uint64_t len_bytes, struct k3_err *err);
int k3_seg_publish(struct k3_seg *s, struct k3_err *err);
/* The same from the given kind of memory, preferably of NUMA node numa_node (-1: wherever it comes).  A memfd can
 * neither shrink nor grow (F_SEAL_SHRINK, F_SEAL_GROW) and is never given to k3_seg_publish(); hugetlb: a memfd of
 * reserved 2 MiB pages (-ENOMEM with words when there are too few). */
int k3_seg_create_from(struct k3_seg *s, const char *instance, const char *what, uint64_t len_bytes,
                       enum k3_mem_from from, int numa_node, struct k3_err *err);
/* Maps len bytes of a memfd that somebody handed over.  fd is s's afterwards, or closed on an error: -EPROTO when it is
 * no memfd, can shrink, or is shorter than len. */
int k3_seg_adopt(struct k3_seg *s, const char *instance, const char *what, int fd, uint64_t len_bytes, bool writable,
                 struct k3_err *err);
/* Opens an existing one.  writable: map read-write.  -ENOENT when there is none (no error text in that case). */
int k3_seg_open(struct k3_seg *s, const char *instance, const char *what, bool writable, struct k3_err *err);
void k3_seg_close(struct k3_seg *s);                     /* unmaps and closes; the name stays */
void k3_seg_unlink(const char *instance, const char *what); /* no error when absent */
/* True while the name still leads to the inode that s has mapped. */
bool k3_seg_is_current(const struct k3_seg *s);
/* Punches [off, off+len) and reserves it again: a killed process's direct reads no longer reach it.  The
 * mapping stays valid and reads zero.  Waits for reads in flight into huge pages that lie only partly in the range,
 * since those cannot be punched before (-EBUSY after 20 s).  -ENOTSUP: hugetlb memory, of which only whole 2 MiB pages
 * can be renewed. */
int k3_seg_renew(struct k3_seg *s, uint64_t off_bytes, uint64_t len_bytes, struct k3_err *err);
/* MADV_COLLAPSE then MADV_POPULATE_WRITE on a mapped range; best effort.  Returns the bytes that the kernel reports
 * as mapped huge (ShmemPmdMapped of the mapping). */
uint64_t k3_seg_collapse(void *addr, uint64_t len_bytes);
/* mlock on a mapped range: 0 where RLIMIT_MEMLOCK and the capabilities do not allow all of it, else len_bytes. */
uint64_t k3_seg_lock(void *addr, uint64_t len_bytes);
/* Bytes of the mappings that touch [addr, addr + len) that lie in swap now (Swap of /proc/self/smaps). */
uint64_t k3_seg_swapped(const void *addr, uint64_t len_bytes);
/* Sum over the mappings of smaps text `f` that touch [addr, addr + len) of the field `key` (e.g. "Swap:"), in bytes. */
uint64_t k3_smaps_sum(FILE *f, uint64_t addr, uint64_t len_bytes, const char *key);
/* Address space for len bytes at a multiple of 2 MiB (PROT_NONE), so that huge pages can be mapped there.  NULL: none. */
uint8_t *k3_reserve_aligned(uint64_t len_bytes);
/* Maps [off, off+len) of s twice back to back at a 2 MiB aligned address; *out gets the first copy.
 * Release with k3_ring_unmap(addr, len). */
int k3_ring_map(const struct k3_seg *s, uint64_t off_bytes, uint64_t len_bytes, bool writable, uint8_t **out,
                struct k3_err *err);
void k3_ring_unmap(uint8_t *addr, uint64_t len_bytes);

/* The run directory $XDG_RUNTIME_DIR/k3/<instance>, else /tmp/k3-<uid>/<instance>: made 0700, owner checked.  create
 * false: only the name is made and checked; -ENOENT when it is not there. */
int k3_rundir(char *out, size_t len, const char *instance, bool create, struct k3_err *err);

/* The lock <run dir>/<daemon>.lock.  Holding it (flock LOCK_EX) is what being alive means; the file holds the
 * daemon's generation counter and pid as text.  take: adds one to the counter.  -EBUSY (exit 2: the instance name is in
 * use, by which pid) when another process holds it for half a second. */
int k3_lock_take(int *fd, uint32_t *generation, const char *rundir, const char *daemon, struct k3_err *err);
void k3_lock_drop(int *fd);
/* True while some process holds it.  Probes with LOCK_SH|LOCK_NB, which is why take retries for half a second. */
bool k3_lock_alive(const char *rundir, const char *daemon);

#endif
