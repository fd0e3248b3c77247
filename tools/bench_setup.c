/* What the parts of k3-bench that read weights begin with. */
#include <errno.h>
#include <stdio.h>

#include "tools/bench.h"

bool k3_bench_need_model(const char *part, const char *dir)
{
    if (!dir)
        fprintf(stderr, "k3-bench: %s: --model DIR is needed; k3-mkmodel --released --layers 8 --experts 64 --out DIR makes a "
                        "model of the real widths\n", part);
    return dir != NULL;
}

int k3_bench_model(const char *dir, const struct k3_str_list *devices, uint32_t n_layers, struct k3_model **out,
                   struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts o = { .n_layers = n_layers };

    k3_model_dirs(&o, dirs, dir, devices);
    return k3_model_open(out, &o, err);
}

int k3_bench_rate(const char *dir, uint32_t depth, uint64_t block_bytes, struct k3_io_rate *out, struct k3_err *err)
{
    struct k3_err why = K3_ERR_INIT;

    *out = (struct k3_io_rate){ .depth = K3_IO_DEPTH_DEFAULT, .block_bytes = K3_IO_BLOCK_DEFAULT };
    if (!depth || !block_bytes) {
        k3_bench_progress("measuring how many reads keep the drive busy");
        (void)k3_io_rate_of_dir(dir, out, &why); /* the defaults stay where it cannot be measured */
    }
    if (depth)
        out->depth = depth;
    if (block_bytes && (block_bytes < 65536 || block_bytes > 1u << 30 || block_bytes % 4096))
        return k3_refuse(err, -EINVAL, "--io-block: must be a multiple of 4096, from 64K to 1G");
    if (block_bytes)
        out->block_bytes = (uint32_t)block_bytes;
    return 0;
}

size_t k3_bench_devices(const char **argv, size_t n, const struct k3_str_list *devices)
{
    for (size_t i = 0; i < devices->n; i++) {
        argv[n++] = "--device";
        argv[n++] = devices->item[i];
    }
    return n;
}
