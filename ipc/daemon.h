/* ipc/daemon.h: what every daemon does, once: common options, log, signals, lock, stats page, control socket,
 * readiness.
 *
 * Life:  k3_daemon_open()  run dir, lock (generation), stats page, signals, control socket; state STARTING
 *        k3_daemon_ready() state READY; "event=ready" on the log
 *        ... own loop; it looks at k3_daemon_stopping() at least every K3_TICK_NS ...
 *        k3_daemon_close() state STOPPED, page unlinked, socket closed, lock dropped
 * Common options (K3_DAEMON_OPTS): --instance NAME (default "default"), --log-level error|warn|info|debug,
 *        --supervised (leave within seconds when the parent dies). */
#ifndef K3_IPC_DAEMON_H
#define K3_IPC_DAEMON_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "ipc/parse.h"
#include "shm/stats.h"

#define K3_TICK_NS 250000000ull
#define K3_VERSION "0.1"

struct k3_daemon_opts { const char *instance, *log_level; bool supervised; };
#define K3_DAEMON_OPTS_INIT { "default", "info", false }
/* Rows for a struct k3_opt table. */
#define K3_DAEMON_OPT_ROWS(o)                                                                        \
    { "instance", K3_OPT_STRING, &(o)->instance, "NAME", "instance name (default \"default\")", 0, 0 },  \
    { "log-level", K3_OPT_STRING, &(o)->log_level, "LEVEL", "error, warn, info or debug", 0, 0 },        \
    { "supervised", K3_OPT_FLAG, &(o)->supervised, NULL, "leave when the parent process ends", 0, 0 }

struct k3_daemon;
/* Answers a control request `cmd` that the skeleton does not know (it does ping, info, stats, drain, shutdown, log).
 * Runs on a control thread: touch only atomics or take your own lock.  Fill reply; return 0 or negative errno with
 * words.  Neither this nor k3_info_fn runs before k3_daemon_ready() or after k3_daemon_ctl_end(). */
typedef int k3_ctl_fn(void *arg, const char *cmd, const cJSON *request, cJSON *reply, struct k3_err *err);
/* Adds the daemon's own fields to the answer of `info`. */
typedef void k3_info_fn(void *arg, cJSON *reply);

int k3_daemon_open(struct k3_daemon **out, const char *name, const struct k3_daemon_opts *opts,
                   const struct k3_stat_def *defs, uint32_t n_defs, k3_ctl_fn *ctl, k3_info_fn *info, void *arg,
                   struct k3_err *err);
void k3_daemon_ready(struct k3_daemon *d);
bool k3_daemon_stopping(const struct k3_daemon *d);          /* SIGTERM, SIGINT or shutdown seen */
bool k3_daemon_draining(const struct k3_daemon *d);
bool k3_daemon_keep(const struct k3_daemon *d);              /* shutdown {"keep":true}: leave segments for take-over */
_Atomic bool *k3_daemon_stop_flag(struct k3_daemon *d);
/* Called (on a signal-safe path of the skeleton's own thread) when stopping begins, to wake the main loop. */
void k3_daemon_on_stop(struct k3_daemon *d, void (*fn)(void *), void *arg);
void k3_daemon_beat(struct k3_daemon *d);                    /* heartbeat; the skeleton also beats by itself never */
/* To be called before what ctl and info look at is torn down: waits for a running one, then none is called. */
void k3_daemon_ctl_end(struct k3_daemon *d);
void k3_daemon_close(struct k3_daemon *d);                   /* NULL is fine */

const char *k3_daemon_rundir(const struct k3_daemon *d);
const char *k3_daemon_instance(const struct k3_daemon *d);
uint32_t k3_daemon_generation(const struct k3_daemon *d);
struct k3_stats *k3_daemon_stats(struct k3_daemon *d);

/* Log: one event, one line, key=value, to stderr (style.md 11).  fmt gives the pairs after event=. */
enum k3_log_level { K3_LOG_ERROR, K3_LOG_WARN, K3_LOG_INFO, K3_LOG_DEBUG };
void k3_log_open(const char *program, enum k3_log_level level);
void k3_log_level_set(enum k3_log_level level);
void k3_log(enum k3_log_level level, const char *event, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void k3_log_err(const struct k3_err *err, const char *event); /* level=error event=... text="..." exit=N */
int k3_exit_status(int rc, const struct k3_err *err);         /* 0 when rc >= 0, else err->exit_status or 1 */

uint64_t k3_now_ns(void); /* CLOCK_MONOTONIC */

#endif
