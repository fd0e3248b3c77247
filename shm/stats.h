/* shm/stats.h: a daemon's stats page, "/k3.<uid>.<instance>.<daemon>.stats".  Describes itself: every entry carries
 * its name, unit and help, so a reader needs nothing from the daemon's code, and works while the daemon is busy,
 * stopped or dead.  One writer process; values are relaxed 64-bit atomics (several threads may add).
 *   magic .. n_entries, entries' names   daemon   plain, complete before the page gets its name
 *   state, heartbeat_ns                  daemon   relaxed
 *   values                               daemon   relaxed */
#ifndef K3_SHM_STATS_H
#define K3_SHM_STATS_H

#include <stdatomic.h>
#include <stdint.h>

#include "ipc/err.h"
#include "shm/segment.h"

#define K3_STATS_MAGIC 0x6b337374u
#define K3_STATS_VERSION 1u
#define K3_HIST_BUCKETS 64

enum k3_stat_kind { K3_COUNTER = 0, K3_GAUGE = 1, K3_HISTOGRAM = 2 };
enum k3_daemon_state { K3_STARTING = 0, K3_READY = 1, K3_DRAINING = 2, K3_STOPPED = 3, K3_FAILED = 4 };

struct k3_stat_def { /* an array of these, in a daemon's private header, indexed by an enum of its own */
    const char *name; /* Prometheus style, e.g. "read_bytes" */
    const char *unit; /* "bytes", "ns", "count", "1" ... */
    const char *help;
    enum k3_stat_kind kind;
};
struct k3_stat_entry {
    char name[40], unit[12], help[108];
    uint32_t kind;
    uint32_t value; /* index of the first of its values: 1, or for histograms K3_HIST_BUCKETS buckets then sum */
};
struct k3_stats_page {
    uint32_t magic, version;
    uint32_t n_entries, n_values;
    uint32_t pid, generation;
    char daemon[32], instance[40];
    uint64_t start_unix_ns;
    _Atomic uint32_t state;
    _Atomic uint64_t heartbeat_ns; /* CLOCK_MONOTONIC */
    uint64_t entries_off, values_off;
};
struct k3_stats { struct k3_seg seg; struct k3_stats_page *page; struct k3_stat_entry *entry; _Atomic uint64_t *value; };

/* Daemon side.  The page of a predecessor is replaced.  destroy unlinks it. */
int k3_stats_create(struct k3_stats *s, const char *instance, const char *daemon, uint32_t generation,
                    const struct k3_stat_def *defs, uint32_t n_defs, struct k3_err *err);
void k3_stats_destroy(struct k3_stats *s, const char *instance, const char *daemon);
void k3_stat_add(struct k3_stats *s, uint32_t id, uint64_t v); /* counter or gauge; s->page NULL is a no-op */
void k3_stat_set(struct k3_stats *s, uint32_t id, uint64_t v);
void k3_stat_hist(struct k3_stats *s, uint32_t id, uint64_t v); /* bucket = number of bits of v */
void k3_stats_beat(struct k3_stats *s, enum k3_daemon_state state);

/* Reader side: maps read-only and checks every number in the page before use.  -ENOENT when there is none. */
int k3_stats_open(struct k3_stats *s, const char *instance, const char *daemon, struct k3_err *err);
void k3_stats_close(struct k3_stats *s);
uint64_t k3_stats_value(const struct k3_stats *s, const char *name); /* 0 when absent */

#endif
