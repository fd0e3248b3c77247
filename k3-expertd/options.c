#include <stdio.h>
#include <string.h>

#include "k3-expertd/expertd.h"
#include "k3-expertd/policy.h"

#define MAX_BLOCK ((uint64_t)1 << 30)

static bool refuse(int *status, const char *text)
{
    fprintf(stderr, K3_EXPERTD_NAME ": %s\n", text);
    *status = K3_EXIT_REFUSED;
    return true;
}

static bool one_of(const char *value, const char *a, const char *b, const char *c)
{
    return strcmp(value, a) == 0 || strcmp(value, b) == 0 || strcmp(value, c) == 0;
}

bool k3_expertd_options(struct k3_expertd_opts *o, int argc, char **argv, int *status)
{
    char text[256];

    *o = (struct k3_expertd_opts){
        .common = K3_DAEMON_OPTS_INIT,
        .mem = K3_MEM_OPTS_INIT,
        .policy = "lfru",
        .io = "auto",
        .direct = "auto",
        .cache_bytes = 1000000000,
        .io_block_bytes = UINT64_MAX,
    };
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &o->model, "DIR", "the checkpoint: config.json and *.safetensors", 0, 0 },
        { "device", K3_OPT_LIST, &o->devices, "DIR", "read shards from here; several: a shard that is in more than one is read from all of them (--model's own "
          "directory may be one); what none has comes from --model",
          0, 0 },
        { "cache-gb", K3_OPT_GB, &o->cache_bytes, "X", "memory for the expert arena, in 10^9 bytes (default 1)", 0, 0 },
        { "policy", K3_OPT_STRING, &o->policy, "NAME", "whom to evict: lfru (what the fewest passes demanded, lately; default) or lru", 0, 0 },
        { "layers", K3_OPT_U32, &o->n_layers, "N", "serve the first N layers of a partial download", 1, K3_MAX_LAYERS },
        { "io-depth", K3_OPT_U32, &o->io_depth, "N",
          "blocks in flight on each drive (default 0: as measured once and remembered; see k3ctl info)", 0, 256 },
        { "io-block", K3_OPT_SIZE, &o->io_block_bytes, "SIZE", "bytes of one read (default: as measured)", 0, 0 },
        { "io", K3_OPT_STRING, &o->io, "HOW", "auto, uring or pread (default auto: uring where the kernel lets us)",
          0, 0 },
        { "direct", K3_OPT_STRING, &o->direct, "HOW",
          "auto, on or off: reads past the page cache (default auto: where the file system can)", 0, 0 },
        K3_MEM_OPT_ROWS(&o->mem),
        { "verify", K3_OPT_STRING, &o->verify, "HOW",
          "off, first or always: compare with the checkpoint's k3.sums each expert as it lands, or until it was right "
          "once (default first when there are sums)", 0, 0 },
        K3_DAEMON_OPT_ROWS(&o->common),
        { 0 },
    };

    if (k3_opts_parse(table, K3_EXPERTD_NAME, "keeps routed experts resident and lends them to k3-computed", argc,
                      argv, NULL, status))
        return true;
    if (!o->model)
        return refuse(status, "--model DIR is missing: the directory of the checkpoint");
    if (!k3_policy_find(o->policy)) {
        snprintf(text, sizeof(text), "--policy %.64s: there is no such policy; there is %s", o->policy,
                 k3_policy_names());
        return refuse(status, text);
    }
    if (o->io_block_bytes == UINT64_MAX) {
        o->io_block_bytes = 0; /* not given: as measured */
    } else if (o->io_block_bytes < K3_READER_PAGE || o->io_block_bytes > MAX_BLOCK || o->io_block_bytes % K3_READER_PAGE) {
        snprintf(text, sizeof(text), "--io-block %llu: must be a multiple of 4096, from 4K to 1G",
                 (unsigned long long)o->io_block_bytes);
        return refuse(status, text);
    }
    if (!one_of(o->io, "auto", "uring", "pread")) {
        snprintf(text, sizeof(text), "--io %.64s: must be auto, uring or pread", o->io);
        return refuse(status, text);
    }
    if (!one_of(o->direct, "auto", "on", "off")) {
        snprintf(text, sizeof(text), "--direct %.64s: must be auto, on or off", o->direct);
        return refuse(status, text);
    }
    if (o->verify && !one_of(o->verify, "off", "first", "always")) {
        snprintf(text, sizeof(text), "--verify %.64s: must be off, first or always", o->verify);
        return refuse(status, text);
    }
    return false;
}
