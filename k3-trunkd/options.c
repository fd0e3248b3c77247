#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "k3-trunkd/trunkd.h"

static bool usage(int *status, const char *fmt, const char *value)
{
    fprintf(stderr, K3_TRUNKD_NAME ": ");
    fprintf(stderr, fmt, value);
    fputc('\n', stderr);
    *status = K3_EXIT_REFUSED;
    return true;
}

static bool one_of(const char *value, const char *a, const char *b, const char *c)
{
    return strcmp(value, a) == 0 || strcmp(value, b) == 0 || strcmp(value, c) == 0;
}

bool k3_trunkd_options(struct k3_trunkd_opt *o, int argc, char **argv, int *status)
{
    const char *pins = "spread";
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &o->model, "DIR", "the checkpoint: config.json and *.safetensors",
          0, 0 },
        { "device", K3_OPT_LIST, &o->devices, "DIR",
          "read shards from here; several: a shard that is in more than one is read from all of them "
          "(--model's own directory may be one); what none has comes from --model",
          0, 0 },
        { "trunk-gb", K3_OPT_GB, &o->trunk_bytes, "X",
          "memory for the trunk in 10^9 bytes: the ring, and what is left of it pinned (default 1)",
          0, 0 },
        { "ring-mb", K3_OPT_U32, &o->ring_mb, "N",
          "ring in MiB, an even number (default 256, or twice the trunk if that is less)", 2,
          1 << 20 },
        { "layers", K3_OPT_U32, &o->n_layers, "N", "only the first N layers (partial downloads)", 1,
          K3_MAX_LAYERS },
        { "io-depth", K3_OPT_U32, &o->io_depth, "N",
          "reads in flight on each drive (default 0: as measured once and remembered; see k3ctl info)", 0,
          K3_IO_DEPTH_MAX },
        { "io-block", K3_OPT_SIZE, &o->io_block_bytes, "SIZE",
          "bytes of one read, 64K to 1G (default: as measured)", 0, 0 },
        { "shared-drive", K3_OPT_FLAG, &o->shared_drive, NULL,
          "the drive also serves k3-expertd: one read in flight while computed waits for an expert",
          0, 0 },
        { "io", K3_OPT_STRING, &o->io, "HOW",
          "auto, uring or pread (default auto: uring where the kernel lets us)", 0, 0 },
        { "direct", K3_OPT_STRING, &o->direct, "HOW",
          "auto, on or off: reads past the page cache (default auto: where the file system can)", 0,
          0 },
        K3_MEM_OPT_ROWS(&o->mem),
        { "verify", K3_OPT_STRING, &o->verify, "HOW",
          "off, first or always: compare with the checkpoint's k3.sums each piece as it lands, or "
          "until it was right once (default first when there are sums)",
          0, 0 },
        { "pins", K3_OPT_STRING, &pins, "HOW",
          "spread or prefix; prefix is slower and only for k3-bench (default spread)", 0, 0 },
        K3_DAEMON_OPT_ROWS(&o->common),
        { NULL },
    };
    char text[32];

    o->io_block_bytes = UINT64_MAX;
    if (k3_opts_parse(table, K3_TRUNKD_NAME,
                      "reads the dense trunk from disk and streams it to k3-computed", argc, argv,
                      NULL, status))
        return true;
    if (!o->model)
        return usage(status,
                     "--model DIR is needed: the directory with config.json and *.safetensors%s",
                     "");
    snprintf(text, sizeof(text), "%" PRIu64, o->io_block_bytes);
    if (o->io_block_bytes == UINT64_MAX)
        o->io_block_bytes = 0; /* not given: as measured */
    else if (o->io_block_bytes < K3_IO_BLOCK_MIN || o->io_block_bytes > K3_IO_BLOCK_MAX)
        return usage(status, "--io-block %s: must be 64K to 1G", text);
    snprintf(text, sizeof(text), "%" PRIu32, o->ring_mb);
    if (o->ring_mb % 2)
        return usage(status,
                     "--ring-mb %s: must be an even number, since a ring is whole 2 MiB pages",
                     text);
    if (!one_of(o->io, "auto", "uring", "pread"))
        return usage(status, "--io \"%s\": must be auto, uring or pread", o->io);
    if (!one_of(o->direct, "auto", "on", "off"))
        return usage(status, "--direct \"%s\": must be auto, on or off", o->direct);
    if (o->verify && !one_of(o->verify, "off", "first", "always"))
        return usage(status, "--verify \"%s\": must be off, first or always", o->verify);
    o->pins_prefix = strcmp(pins, "prefix") == 0;
    if (!o->pins_prefix && strcmp(pins, "spread") != 0)
        return usage(status, "--pins \"%s\": must be spread or prefix", pins);
    return false;
}
