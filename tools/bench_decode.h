/* tools/bench_decode.h: decoding by an instance of the benchmark's own, for `decode` and `sweep`. */
#ifndef K3_TOOLS_BENCH_DECODE_H
#define K3_TOOLS_BENCH_DECODE_H

#include "tools/bench.h"

struct k3_decode {
    struct k3_bench_setup setup;
    uint32_t pairs, sequences, tokens, threads, prefetch;
    uint32_t against; /* 0, or the sequences of every second window: then nothing is compared with the drive */
    double seconds;
    bool force_threads, tsv;
    bool must_read; /* a pass is compared with its reading: refused where it would read nothing */

    struct k3_client *client;
    struct k3_stats computed;
    uint64_t seed, pinned_bytes, all_bytes;
};

struct k3_decode_window {
    double raw;                            /* bytes per second, just before */
    double pass_s, wall_s, arithmetic_s;   /* of one pass */
    double trunk_wait_s, expert_wait_s;    /* of the pass that are not arithmetic */
    double bytes;                          /* read by one pass, of trunk and experts */
    double limit_s;                        /* max(bytes / raw, arithmetic) */
    double tokens_per_s;                   /* while all sequences decode */
};
#define K3_DECODE_DEFAULT                                                                                        \
    { .setup = { .trunk_bytes = 1000000000u, .cache_bytes = 1000000000u }, .pairs = K3_BENCH_PAIRS, .sequences = 1, \
      .tokens = 4, .seconds = 2 }

/* Starts the daemons with what d says, measures d->pairs windows into w, ends the daemons.  With d->against twice as many:
 * w[2i] of d->sequences, w[2i + 1] of d->against. */
int k3_decode_measure(struct k3_decode *d, struct k3_decode_window *w, struct k3_err *err);
/* The rows of an option table that decode and sweep have in common. */
#define K3_DECODE_OPT_ROWS(d)                                                                                            \
    K3_BENCH_OPT_ROWS(&(d)->setup),                                                                                          \
    { "ring-mb", K3_OPT_U32, &(d)->setup.ring_mb, "N", "ring in MiB (default: the daemon's)", 2, 1 << 20 },                 \
    { "policy", K3_OPT_STRING, &(d)->setup.policy, "NAME", "whom the expert cache evicts", 0, 0 },                          \
    { "sequences", K3_OPT_U32, &(d)->sequences, "N", "sequences in each pass (default 1)", 1, 256 },                        \
    { "tokens", K3_OPT_U32, &(d)->tokens, "N", "tokens of each sequence in a window (default 4)", 2, 10000 },               \
    K3_BENCH_THREAD_ROWS(&(d)->threads, &(d)->force_threads),                                                              \
    { "prefetch", K3_OPT_U32, &(d)->prefetch, "N", "guesses of each row that are read a layer early (default: none)", 1, 65535 }

#endif
