/* tools/bench_decode.h: decoding by an instance of the benchmark's own, for `decode` and `sweep`. */
#ifndef K3_TOOLS_BENCH_DECODE_H
#define K3_TOOLS_BENCH_DECODE_H

#include "tools/bench.h"

struct k3_decode {
    const char *model_dir, *pins, *policy;
    struct k3_str_list trunk_devices, expert_devices;
    uint64_t trunk_bytes, cache_bytes, io_block_bytes;
    uint32_t ring_mb, io_depth, n_layers, pairs, sequences, tokens, threads, ctx;
    double seconds;
    bool tsv;

    struct k3_bench_family family;
    struct k3_model *model;
    struct k3_bench_raw *raw;
    struct k3_io_rate rate;
    struct k3_client *client;
    struct k3_stats trunk, expert, computed;
    uint64_t seed, pinned_bytes, all_bytes;
};

struct k3_decode_window {
    double raw;                            /* bytes per second, just before */
    double pass_s, wall_s, arithmetic_s;   /* of one pass */
    double bytes;                          /* read by one pass, of trunk and experts */
    double limit_s;                        /* max(bytes / raw, arithmetic) */
};
#define K3_DECODE_DEFAULT                                                                                        \
    { .trunk_bytes = 1000000000u, .cache_bytes = 1000000000u, .pairs = K3_BENCH_PAIRS, .sequences = 1, .tokens = 4, \
      .seconds = 2 }

/* Starts the daemons with what d says, measures d->pairs windows into w, ends the daemons. */
int k3_decode_measure(struct k3_decode *d, struct k3_decode_window *w, struct k3_err *err);
/* The rows of an option table that decode and sweep have in common. */
#define K3_DECODE_OPT_ROWS(d)                                                                                            \
    { "model", K3_OPT_STRING, &(d)->model_dir, "DIR", "the checkpoint: config.json and *.safetensors", 0, 0 },              \
    { "trunk-device", K3_OPT_LIST, &(d)->trunk_devices, "DIR", "where the trunk's shards are looked for first", 0, 0 },     \
    { "expert-device", K3_OPT_LIST, &(d)->expert_devices, "DIR", "a directory with shards of experts", 0, 0 },              \
    { "layers", K3_OPT_U32, &(d)->n_layers, "N", "only the first N layers", 1, K3_MAX_LAYERS },                             \
    { "ring-mb", K3_OPT_U32, &(d)->ring_mb, "N", "ring in MiB (default: the daemon's)", 2, 1 << 20 },                       \
    { "policy", K3_OPT_STRING, &(d)->policy, "NAME", "whom the expert cache evicts", 0, 0 },                                \
    { "io-depth", K3_OPT_U32, &(d)->io_depth, "N", "reads in flight (default: as measured for the drive)", 1, 256 },        \
    { "io-block", K3_OPT_SIZE, &(d)->io_block_bytes, "SIZE", "bytes of one read (default: as measured)", 0, 0 },            \
    { "sequences", K3_OPT_U32, &(d)->sequences, "N", "sequences in each pass (default 1)", 1, 256 },                        \
    { "tokens", K3_OPT_U32, &(d)->tokens, "N", "tokens of each sequence in a window (default 4)", 2, 10000 },               \
    { "threads", K3_OPT_U32, &(d)->threads, "N", "threads of a pass (default: the CPUs allowed)", 1, 1024 }

#endif
