/* tools/ctl.h: what the files of k3ctl share. */
#ifndef K3_TOOLS_CTL_H
#define K3_TOOLS_CTL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"
#include "ipc/parse.h"
#include "shm/stats.h"

#define K3_CTL_DAEMONS 16

struct k3_ctl_opt {
    const char *instance;
    char rundir[512];
    bool json, prometheus, keep, lookahead;
    double watch_s;   /* 0 = once */
    double timeout_s; /* wait */
    const char *model;  /* verify */
    uint32_t n_layers;  /* verify; 0 = all, or those of the instance */
    bool make, replace; /* verify */
    struct k3_str_list words; /* the command and what follows it */
};

/* The daemons of the instance: those asked for by name ("trunkd" or "k3-trunkd"), else the members that k3-run lists
 * in its run directory, else the three weight daemons and whatever else holds a lock or has a page. */
struct k3_ctl_names { char name[K3_CTL_DAEMONS][32]; uint32_t n; };
int k3_ctl_name(char out[32], const char *word, struct k3_err *err);
void k3_ctl_members(struct k3_ctl_names *out, const struct k3_ctl_opt *o);
void k3_ctl_with_pages(struct k3_ctl_names *out, const struct k3_ctl_opt *o);

/* One look at one page: everything is copied, so that two looks can be compared. */
struct k3_ctl_value { char name[40], unit[12], help[108]; uint32_t kind; uint64_t v[K3_HIST_BUCKETS + 1]; };
struct k3_ctl_sample {
    char daemon[32];
    uint32_t pid, generation, state;
    bool alive;             /* its lock is held */
    uint64_t at_ns;         /* CLOCK_MONOTONIC */
    uint64_t up_ns;         /* since the page was made */
    uint64_t beat_age_ns;
    uint32_t n;
    struct k3_ctl_value *value; /* owned */
};
int k3_ctl_sample(struct k3_ctl_sample *out, const struct k3_ctl_opt *o, const char *daemon, struct k3_err *err);
void k3_ctl_sample_free(struct k3_ctl_sample *s);
const struct k3_ctl_value *k3_ctl_find(const struct k3_ctl_sample *s, const char *name);
const char *k3_ctl_liveness(const struct k3_ctl_sample *s); /* "ready", "dead", "ready, no heartbeat" ... */

/* What the family did between two samples of each daemon; before NULL: since each started. */
struct k3_ctl_summary {
    uint64_t trunk_bytes, expert_bytes, seconds_ns;
    uint64_t trunk_waits, demands, hits, passes, tokens;
    uint64_t pass_ns, trunk_wait_ns, expert_wait_ns, arithmetic_ns;
    bool has_computed;
};
void k3_ctl_summarize(struct k3_ctl_summary *out, const struct k3_ctl_sample *now, uint32_t n_now,
                      const struct k3_ctl_sample *before, uint32_t n_before);
void k3_ctl_summary_json(const struct k3_ctl_summary *s, cJSON *to);

/* A look at all daemons of names, or, when no daemon was asked for by name, at all pages of the instance (then names is
 * filled).  A page that is not there is an error only when it was asked for by name.  Exit 3: there is none. */
struct k3_ctl_look { struct k3_ctl_sample s[K3_CTL_DAEMONS]; uint32_t n; };
int k3_ctl_look(struct k3_ctl_look *l, const struct k3_ctl_opt *o, struct k3_ctl_names *names, struct k3_err *err);
void k3_ctl_look_free(struct k3_ctl_look *l);

int k3_ctl_stats(const struct k3_ctl_opt *o, struct k3_err *err);
/* The table of one daemon; before NULL: rates since its start. */
void k3_ctl_print_daemon(FILE *f, const struct k3_ctl_sample *s, const struct k3_ctl_sample *before);
/* For people: "1.56 GB", "12.50 ms", "3m07s".  Each returns out. */
const char *k3_ctl_bytes(char out[32], double v);
const char *k3_ctl_ns(char out[32], double v);
const char *k3_ctl_age(char out[32], uint64_t ns);

/* stats --watch: a full screen at a terminal, else a block of text each time (ctl_watch.c).  names as for a look. */
int k3_ctl_watch(const struct k3_ctl_opt *o, struct k3_ctl_names *names, struct k3_err *err);

/* ctl_screen.c: the terminal as a full screen.  Restored by close, which is due in any case. */
struct k3_screen { bool full, colours, keys; unsigned columns, rows; };
enum k3_screen_event { K3_SCREEN_TICK, K3_SCREEN_RESIZED, K3_SCREEN_QUIT };
/* full: stdout is a terminal that can do it.  Otherwise show() prints the text and a blank line. */
void k3_screen_open(struct k3_screen *s);
/* Lines of ASCII, with colours as ESC [ .. m; what does not fit is left out. */
void k3_screen_show(struct k3_screen *s, const char *text);
/* Waits until seconds are over, the size has changed, or "q", SIGINT, SIGTERM, SIGHUP. */
enum k3_screen_event k3_screen_wait(struct k3_screen *s, double seconds);
void k3_screen_close(struct k3_screen *s);
/* What `stats --json` prints, for all pages of the instance; also of /v1/k3/stats.  The caller's; NULL after a failure. */
cJSON *k3_ctl_stats_all(const struct k3_ctl_opt *o, struct k3_err *err);
/* Text format 0.0.4; also of /metrics. */
void k3_ctl_prometheus(FILE *f, const struct k3_ctl_opt *o, const struct k3_ctl_sample *s, uint32_t n);

/* Each returns 0 or a negative errno with words; err->exit_status is the program's. */
int k3_ctl_ping(const struct k3_ctl_opt *o, struct k3_err *err);
int k3_ctl_info(const struct k3_ctl_opt *o, struct k3_err *err);
int k3_ctl_tell(const struct k3_ctl_opt *o, struct k3_err *err); /* drain, shutdown, log */
int k3_ctl_wait(const struct k3_ctl_opt *o, struct k3_err *err);
int k3_ctl_cancel(const struct k3_ctl_opt *o, struct k3_err *err);
int k3_ctl_trace(const struct k3_ctl_opt *o, struct k3_err *err); /* ctl_trace.c */

/* One control request to a daemon; *reply is the caller's.  A refusal is an error with its words and exit status. */
int k3_ctl_ask(const struct k3_ctl_opt *o, const char *daemon, cJSON *request, int timeout_ms, cJSON **reply,
               struct k3_err *err);
int k3_ctl_verify(const struct k3_ctl_opt *o, struct k3_err *err);

/* The model directory and the number of layers that the instance's trunkd says it runs.  Exit 3 when none does. */
int k3_ctl_model(const struct k3_ctl_opt *o, char *dir, size_t len_bytes, uint32_t *n_layers, struct k3_err *err);

#endif
