/* tools/bench.h: what the parts of k3-bench share.  Every ratio is of two measurements of the same run that alternate, and
 * the median of nine counts (design.md section 10), since a shared drive can halve within seconds. */
#ifndef K3_TOOLS_BENCH_H
#define K3_TOOLS_BENCH_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "io/calibrate.h"
#include "ipc/parse.h"
#include "model/model.h"
#include "shm/stats.h"

#define K3_BENCH_PAIRS 9

/* Each parses its own options (argv[0] is its name) and returns the exit status. */
int k3_bench_kernels(int argc, char **argv);
int k3_bench_io(int argc, char **argv);
int k3_bench_decode(int argc, char **argv);
int k3_bench_sweep(int argc, char **argv);
int k3_bench_pass(int argc, char **argv);
int k3_bench_context(int argc, char **argv);

/* Set by SIGINT and SIGTERM once they are caught: what runs ends, the daemons too, and nothing is left. */
extern volatile sig_atomic_t k3_bench_stop;
extern _Atomic bool k3_bench_abort; /* the same, for waits that look at such a flag */
void k3_bench_catch(void);
void k3_bench_nap(double seconds);

void k3_bench_sort(double *v, size_t n); /* ascending */
double k3_bench_median(const double *v, size_t n);
/* "0.987 (0.951 to 1.012)": median, least, greatest. */
const char *k3_bench_spread(const double *v, size_t n, char out[64]);
/* Progress on stderr, over the line before at a terminal; at most one a second.  NULL takes the line away. */
void k3_bench_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Refused when need_bytes are more than this process can get: "NEED are needed OF_WHAT, LEFT are available (why): HINT". */
int k3_bench_memory_check(uint64_t need_bytes, const char *of_what, const char *hint, struct k3_err *err);
/* For struct k3_pass_hooks: progress within a pass, and its end when this is to stop.  doing: what the pass is for. */
int k3_bench_on_layer(void *doing, uint32_t layer, uint32_t n_layers);
/* Says why it ended when rc < 0; the exit status. */
int k3_bench_end(int rc, const struct k3_err *err);

/* ---- bench_raw.c: what the drive gives with nothing in between ---- */

struct k3_bench_raw;
struct k3_bench_raw_opts {
    uint32_t depth, block_bytes; /* block: whole pages */
    uint64_t memory_bytes;       /* what it reads into, one block after the other: as large as the ring */
};
/* Direct reads of the trunk's bytes, in file order, over and over, into contiguous memory (spec/io.md 1) of the size of the
 * trunk's ring: a few blocks would stay in the processor's cache, where a ring does not, and a drive that is served from
 * the memory of a host is faster into that.  Refused where
 * the file system has no direct reads, since that would measure the page cache.  m must outlive it. */
int k3_bench_raw_open(struct k3_bench_raw **out, const struct k3_model *m, const struct k3_bench_raw_opts *o,
                      struct k3_err *err);
void k3_bench_raw_close(struct k3_bench_raw *r);
/* Reads for about `seconds`; *bytes_per_s. */
int k3_bench_raw_run(struct k3_bench_raw *r, double seconds, double *bytes_per_s, struct k3_err *err);
uint64_t k3_bench_raw_huge_bytes(const struct k3_bench_raw *r, uint64_t *of_bytes);

/* ---- bench_family.c: daemons of an instance of the benchmark's own ---- */

struct k3_bench_family {
    char instance[33], rundir[512], bin[4000];
    struct k3_member { const char *name; pid_t pid; } member[4];
    uint32_t n_members;
};
/* Makes the run directory of an instance "bench-PID"; programs are those beside k3-bench. */
int k3_bench_family_open(struct k3_bench_family *f, struct k3_err *err);
/* Starts bin/NAME with these options (NULL-terminated) and --instance; its log goes to <run dir>/NAME.log. */
int k3_bench_family_start(struct k3_bench_family *f, const char *name, const char *const *options, struct k3_err *err);
/* Waits until NAME is ready; when it ends first, the last line of its log is the error. */
int k3_bench_family_wait(struct k3_bench_family *f, const char *name, double seconds, struct k3_err *err);
int k3_bench_family_stats(const struct k3_bench_family *f, const char *name, struct k3_stats *out, struct k3_err *err);
/* Ends all, removes segments and run directory. */
void k3_bench_family_close(struct k3_bench_family *f);

/* ---- bench_setup.c: a model, the raw drive and the two weight daemons, for io, decode and sweep ---- */

struct k3_bench_setup {
    /* options */
    const char *model_dir, *pins, *policy; /* pins, policy NULL: the daemons' own */
    struct k3_str_list trunk_devices, expert_devices;
    uint64_t trunk_bytes, cache_bytes, io_block_bytes; /* io_block_bytes, io_depth 0: as measured for the drive */
    uint32_t ring_mb, io_depth, n_layers;              /* ring_mb 0: the daemon's own */
    bool no_raw;                                       /* nothing is compared with the drive */
    /* what stands */
    struct k3_model *model;
    struct k3_io_rate rate;
    struct k3_bench_raw *raw;
    struct k3_bench_family family;
    struct k3_stats trunk, expert;
};
#define K3_BENCH_OPT_ROWS(s)                                                                                             \
    { "model", K3_OPT_STRING, &(s)->model_dir, "DIR", "the checkpoint: config.json and *.safetensors", 0, 0 },              \
    { "trunk-device", K3_OPT_LIST, &(s)->trunk_devices, "DIR", "where the trunk's shards are looked for first", 0, 0 },     \
    { "expert-device", K3_OPT_LIST, &(s)->expert_devices, "DIR", "a directory with shards of experts", 0, 0 },              \
    { "layers", K3_OPT_U32, &(s)->n_layers, "N", "only the first N layers", 1, K3_MAX_LAYERS },                             \
    { "io-depth", K3_OPT_U32, &(s)->io_depth, "N", "reads in flight (default: as measured for the drive)", 1, 256 },        \
    { "io-block", K3_OPT_SIZE, &(s)->io_block_bytes, "SIZE", "bytes of one read (default: as measured)", 0, 0 }
#define K3_BENCH_THREAD_ROWS(n, force)                                                                                    \
    { "threads", K3_OPT_U32, n, "N", "threads of a pass (default: one a physical core)", 1, 1024 },                        \
    { "force-threads", K3_OPT_FLAG, force, NULL, "allow more threads than cores", 0, 0 }

bool k3_bench_need_model(const char *part, const char *dir); /* false: said that --model is missing */
uint64_t k3_bench_n_experts(const struct k3_model *m); /* of all layers that run */
int k3_bench_model(const struct k3_bench_setup *s, struct k3_model **out, struct k3_err *err);
/* Model, depth and block, raw reader, an instance without members.  k3_bench_close() also after a failure. */
int k3_bench_open(struct k3_bench_setup *s, struct k3_err *err);
/* k3-trunkd and k3-expertd, without waiting for them.  Where /dev/shm is too small their memory is that of memfds, and a
 * k3-keeper is there, too. */
int k3_bench_start_weights(struct k3_bench_setup *s, struct k3_err *err);
int k3_bench_wait(struct k3_bench_setup *s, struct k3_err *err);          /* for all members; then their stats are open */
void k3_bench_idle(const struct k3_bench_setup *s); /* until nobody reads: the ring is full, no expert is wanted */
void k3_bench_close(struct k3_bench_setup *s);
/* Budgets with which nothing is read twice: the whole trunk pinned, n_choices experts of every layer (at most all). */
void k3_bench_resident(struct k3_bench_setup *s, uint64_t n_choices);
/* For passes in this process: starts the weight daemons and waits for them, a team of `threads` bound as that of k3-computed,
 * the way to the weights.  Both are the caller's, after a failure, too (NULL where there is none).  Refused where the trunk is
 * not pinned. */
struct k3_team;
struct k3_shm_source;
struct k3_meter;
int k3_bench_start_passes(struct k3_bench_setup *s, uint32_t threads, struct k3_meter *meter, struct k3_team **team,
                          struct k3_shm_source **source, struct k3_err *err);
/* Appends --device DIR for each; the new count. */
size_t k3_bench_devices(const char **argv, size_t n, const struct k3_str_list *devices);

#endif
