/* k3-computed/options.c: the command line of k3-computed. */
#include <stdio.h>
#include <string.h>

#include "k3-computed/computed.h"

bool k3_computed_options(struct k3_computed_options *o, int argc, char **argv, int *status)
{
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &o->model, "DIR", "directory of the checkpoint (config.json, *.safetensors)", 0, 0 },
        { "device", K3_OPT_LIST, &o->devices, "DIR", "further directory with shards", 0, 0 },
        { "ctx", K3_OPT_U32, &o->ctx, "N", "positions of one sequence (default 4096)", 1, 1u << 24 },
        { "sequences", K3_OPT_U32, &o->sequences, "N", "sequences with state at the same time, more requests queue "
          "(default 1)", 1, K3_SEQUENCES_MAX },
        { "snapshots", K3_OPT_U32, &o->snapshots, "N", "beginnings of conversations that are kept, each as large as a sequence "
          "(default 0)", 0, K3_SNAPSHOTS_MAX },
        { "batch-rows", K3_OPT_U32, &o->batch_rows, "N", "rows of one pass at most (default 512, or --ctx where that is less)", 1,
          K3_BATCH_ROWS_MAX },
        { "threads", K3_OPT_U32, &o->threads, "N", "threads of a pass (default: one a core, fewer under a quota)", 1, 1024 },
        { "force-threads", K3_OPT_FLAG, &o->force_threads, NULL, "allow more threads than cores", 0, 0 },
        { "requests-mb", K3_OPT_U32, &o->requests_mb, "N", "memory for requests and answers until they are forgotten, in MiB "
          "(default 256)", 1, 1 << 20 },
        { "layers", K3_OPT_U32, &o->layers, "N", "run the first N layers only (a partial download)", 1, K3_MAX_LAYERS },
        { "prefetch", K3_OPT_U32, &o->prefetch, "N", "tell k3-expertd N experts of each row and layer a layer early, guessed with "
          "the pinned router gates (default 0: off; top_k pays where the experts' drive is the slow one)", 0, 65535 },
        { "kernels", K3_OPT_STRING, &o->kernels, "NAME", "auto, c, avx2 or avx512 (equal results; default auto)", 0, 0 },
        K3_NUMA_OPT_ROW(&o->numa_node),
        K3_DAEMON_OPT_ROWS(&o->daemon),
        { NULL },
    };

    if (k3_opts_parse(table, "k3-computed", "runs the forward pass and answers requests with tokens", argc, argv, NULL,
                      status))
        return true;
    if (o->batch_rows == 0) /* not given */
        o->batch_rows = o->ctx < K3_BATCH_ROWS ? o->ctx : K3_BATCH_ROWS;
    if (!o->model) {
        fprintf(stderr, "k3-computed: --model is missing: give the directory of a checkpoint\n");
        *status = K3_EXIT_REFUSED;
        return true;
    }
    return false;
}
