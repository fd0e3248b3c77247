/* ipc/memory.h: how much memory there is: what the machine has to give, what every enclosing control group leaves, what
 * /dev/shm takes, and what other instances have been promised and not taken yet.  Looks, and changes nothing, but for
 * k3_reserve_*.
 *
 * All readers take a root directory, below which proc/ and sys/ are looked for: "" is this machine; tests record others. */
#ifndef K3_IPC_MEMORY_H
#define K3_IPC_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_MEMORY_NONE UINT64_MAX /* no limit, or not known */

/* ---- texts of the kernel; pure, for any bytes ---------------------------------------------------------------------- */

/* Bytes of the line "KEY:   N kB" of a meminfo; K3_MEMORY_NONE when it has none, or N is no number. */
uint64_t k3_meminfo_bytes(const char *text, const char *key);
/* Number after "KEY " at the beginning of a line of a memory.stat; K3_MEMORY_NONE when it has none. */
uint64_t k3_memstat_bytes(const char *text, const char *key);
/* A file of one number.  "max", an empty file, nonsense and anything from 2^60 on (how version 1 says "no limit") are
 * K3_MEMORY_NONE. */
uint64_t k3_limit_bytes(const char *text);

/* Where the memory controller of a process is seen: directory `leaf` and every one above it down to `top`, the mount
 * point.  leaf begins with top.  A mount that shows only a part of the hierarchy (a container) is taken at its root. */
struct k3_cgroup_place {
    int version; /* 1 or 2 */
    char top[1024], leaf[2048];
};
/* From the texts of /proc/self/cgroup and /proc/self/mountinfo: at most two places (version 1, version 2).  A hierarchy of
 * version 2 without memory files is a place, too: its directories just say nothing.  Returns how many. */
size_t k3_cgroup_places(const char *cgroup, const char *mountinfo, struct k3_cgroup_place out[2]);

/* ---- the machine -------------------------------------------------------------------------------------------------- */

struct k3_memory {
    uint64_t total_bytes;     /* MemTotal */
    uint64_t available_bytes; /* MemAvailable */
    uint64_t group_bytes;     /* least headroom of the control groups: limit - usage + file cache that can be dropped */
    uint64_t group_limit_bytes;
    char group_limit[32];     /* its file: "memory.max", "memory.high" or "memory.limit_in_bytes"; "" without a limit */
    char group_dir[2048];     /* its directory, without the root */
};
/* What cannot be read is K3_MEMORY_NONE; never an error. */
void k3_memory_read(const char *root, struct k3_memory *out);
/* The smaller of available and group; *why names it: "MemAvailable" or "memory.max of /a/b" (borrowed from m and buf). */
uint64_t k3_memory_left(const struct k3_memory *m, char *why, size_t len);
/* Free and whole size of the file system of dir ("/dev/shm"); K3_MEMORY_NONE when it cannot be said. */
void k3_memory_shm(const char *dir, uint64_t *free_bytes, uint64_t *size_bytes);

/* ---- reservations ------------------------------------------------------------------------------------------------- */

/* An instance's promise is the file <dir>/k3.<uid>.<instance>.plan (mode 0644; "k3 plan 1\npromised BYTES\n").  It counts as
 * long as its flock is held, by k3-run and the family's supervisor; what a crash leaves counts for nothing. */
struct k3_reservation { int fd; char path[256]; };
#define K3_RESERVATION_INIT { -1, "" }

/* "promised N" of such a text; 0 for an empty one (not planned yet) and for anything else. */
uint64_t k3_reserve_parse(const char *text);
/* Opens (makes) the file of this instance and takes its lock.  -EBUSY (exit 2) when another process has it.  dir
 * "/dev/shm"; only k3_reserve_close() closes the descriptor, which a child that inherits it keeps locked. */
int k3_reserve_open(struct k3_reservation *r, const char *dir, const char *instance, struct k3_err *err);
/* The same for a descriptor that was inherited: -EINVAL when it is not the file. */
int k3_reserve_adopt(struct k3_reservation *r, int fd, const char *dir, const char *instance, struct k3_err *err);
/* Between begin and end no other process plans: what others have been promised does not change.  *fd is closed by end. */
int k3_reserve_begin(int *fd, const char *dir, struct k3_err *err);
void k3_reserve_end(int *fd);
int k3_reserve_write(struct k3_reservation *r, uint64_t promised_bytes, struct k3_err *err);
void k3_reserve_close(struct k3_reservation *r, bool remove);
/* What this user's instance has been promised; 0 while nobody holds its file. */
uint64_t k3_reserve_promised(const char *dir, const char *instance);
/* Removes the file of an instance whose keeper died. */
void k3_reserve_clean(const char *dir, const char *instance);
/* What the living instances of all users, without `instance` of this one, were promised and have not taken yet: their
 * segments in dir and the private memory of their processes (proc below root) count as taken.  *n: how many. */
uint64_t k3_reserve_others(const char *root, const char *dir, const char *instance, uint32_t *n);

#endif
