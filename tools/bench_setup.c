/* What the parts of k3-bench that read weights begin with. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "io/device.h"
#include "ipc/memory.h"
#include "k3-computed/shm_source.h"
#include "k3-computed/team.h"
#include "tools/bench.h"

#define READY_S 300.0
#define ATTACH_NS 30000000000ull
#define CONTROL_BYTES (2u << 20) /* of the control segments, as in the plan */

int k3_bench_memory_check(uint64_t need_bytes, const char *of_what, const char *hint, struct k3_err *err)
{
    struct k3_memory m;
    uint64_t left;
    char why[256];

    k3_memory_read("", &m);
    left = k3_memory_left(&m, why, sizeof(why));
    if (need_bytes <= left)
        return 0;
    return k3_refuse(err, -ENOMEM, "%.3f GB are needed%s, %.3f GB are available (%s): %s", (double)need_bytes / 1e9, of_what,
                     (double)left / 1e9, why, hint);
}

bool k3_bench_need_model(const char *part, const char *dir)
{
    if (!dir)
        fprintf(stderr, "k3-bench: %s: --model DIR is needed; k3-mkmodel --released --layers 8 --experts 64 --out DIR makes a "
                        "model of the real widths\n", part);
    return dir != NULL;
}

int k3_bench_model(const struct k3_bench_setup *s, struct k3_model **out, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts o = { .n_layers = s->n_layers };

    k3_model_dirs(&o, dirs, s->model_dir, &s->trunk_devices);
    return k3_model_open(out, &o, err);
}

static int choose_rate(struct k3_bench_setup *s, struct k3_err *err)
{
    const char *dir = s->trunk_devices.n ? s->trunk_devices.item[0] : s->model_dir;
    uint64_t block_bytes = s->io_block_bytes;
    struct k3_err why = K3_ERR_INIT;

    s->rate = (struct k3_io_rate){ .depth = K3_IO_DEPTH_DEFAULT, .block_bytes = K3_IO_BLOCK_DEFAULT };
    if (!s->io_depth || !block_bytes) {
        struct k3_device drive;

        if (k3_device_of(dir, NULL, &drive, &why) < 0 || k3_io_rate_remembered(&drive, &s->rate) < 0)
            k3_bench_progress("measuring how many reads keep the drive busy");
        (void)k3_io_rate_of_dir(dir, &s->rate, &why); /* the defaults stay where it cannot be measured */
    }
    if (s->io_depth)
        s->rate.depth = s->io_depth;
    if (block_bytes && (block_bytes < 65536 || block_bytes > 1u << 30 || block_bytes % 4096))
        return k3_refuse(err, -EINVAL, "--io-block: must be a multiple of 4096, from 64K to 1G");
    if (block_bytes)
        s->rate.block_bytes = (uint32_t)block_bytes;
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

int k3_bench_open(struct k3_bench_setup *s, struct k3_err *err)
{
    struct k3_bench_raw_opts raw;
    int rc;

    s->trunk = s->expert = (struct k3_stats){ .seg = K3_SEG_INIT };
    rc = k3_bench_model(s, &s->model, err);
    if (rc == 0)
        rc = choose_rate(s, err);
    raw = (struct k3_bench_raw_opts){ s->rate.depth, s->rate.block_bytes, (uint64_t)(s->ring_mb ? s->ring_mb : 256) << 20 };
    if (rc == 0 && !s->no_raw)
        rc = k3_bench_raw_open(&s->raw, s->model, &raw, err);
    if (rc == 0)
        rc = k3_bench_family_open(&s->family, err);
    return rc;
}

static uint64_t all_pinned_bytes(const struct k3_model *m)
{
    return m->trunk_bytes + 2 * (uint64_t)k3_model_dio_align(m) * m->n_pieces + 2 * K3_HUGE_BYTES;
}

uint64_t k3_bench_n_experts(const struct k3_model *m)
{
    return m->cfg.n_layers > m->cfg.first_dense ? (uint64_t)(m->cfg.n_layers - m->cfg.first_dense) * m->cfg.n_experts : 0;
}

/* As k3-plan chooses it, by the most that the segments can take. */
static const char *memory_from(const struct k3_bench_setup *s)
{
    const struct k3_model *m = s->model;
    uint64_t trunk = all_pinned_bytes(m) + ((uint64_t)(s->ring_mb ? s->ring_mb : 256) << 20);
    uint64_t experts = (k3_bench_n_experts(m) + 1) * m->expert_slot_bytes, free_bytes, size_bytes;

    trunk = trunk < s->trunk_bytes ? trunk : s->trunk_bytes;
    experts = experts < s->cache_bytes ? experts : s->cache_bytes;
    k3_memory_shm("/dev/shm", &free_bytes, &size_bytes);
    return trunk + experts + m->resident_bytes + CONTROL_BYTES > free_bytes ? "memfd" : "shm";
}

int k3_bench_start_weights(struct k3_bench_setup *s, struct k3_err *err)
{
    char trunk_gb[32], cache_gb[32], ring[16], depth[16], block[16], layers[16];
    const char *from = memory_from(s);
    const char *common[] = { "--model", s->model_dir, "--layers", layers, "--io-depth", depth, "--io-block", block,
                             "--memory-from", from };
    const char *argv[2 * sizeof(s->trunk_devices.item) / sizeof(char *) + 24];
    size_t n_common = sizeof(common) / sizeof(*common), n = n_common;
    int rc = 0;

    snprintf(trunk_gb, sizeof(trunk_gb), "%.9f", (double)s->trunk_bytes / 1e9);
    snprintf(cache_gb, sizeof(cache_gb), "%.9f", (double)s->cache_bytes / 1e9);
    snprintf(ring, sizeof(ring), "%u", s->ring_mb);
    snprintf(depth, sizeof(depth), "%u", s->rate.depth);
    snprintf(block, sizeof(block), "%u", s->rate.block_bytes);
    snprintf(layers, sizeof(layers), "%u", s->model->cfg.n_layers);
    memcpy(argv, common, sizeof(common));
    argv[n++] = "--trunk-gb", argv[n++] = trunk_gb, argv[n++] = "--shared-drive";
    if (s->ring_mb)
        argv[n++] = "--ring-mb", argv[n++] = ring;
    if (s->pins)
        argv[n++] = "--pins", argv[n++] = s->pins;
    n = k3_bench_devices(argv, n, &s->trunk_devices);
    argv[n] = NULL;
    if (strcmp(from, "memfd") == 0) {
        rc = k3_bench_family_start(&s->family, "k3-keeper", &argv[n], err);
        if (rc == 0)
            rc = k3_bench_family_wait(&s->family, "k3-keeper", READY_S, err);
    }
    if (rc == 0)
        rc = k3_bench_family_start(&s->family, "k3-trunkd", argv, err);
    n = n_common;
    argv[n++] = "--cache-gb", argv[n++] = cache_gb;
    if (s->policy)
        argv[n++] = "--policy", argv[n++] = s->policy;
    n = k3_bench_devices(argv, n, &s->expert_devices);
    argv[n] = NULL;
    return rc < 0 ? rc : k3_bench_family_start(&s->family, "k3-expertd", argv, err);
}

int k3_bench_wait(struct k3_bench_setup *s, struct k3_err *err)
{
    struct k3_bench_family *f = &s->family;
    int rc = 0;

    for (uint32_t i = 0; i < f->n_members && rc == 0; i++)
        rc = k3_bench_family_wait(f, f->member[i].name, READY_S, err);
    if (rc == 0)
        rc = k3_bench_family_stats(f, "k3-trunkd", &s->trunk, err);
    if (rc == 0)
        rc = k3_bench_family_stats(f, "k3-expertd", &s->expert, err);
    return rc;
}

void k3_bench_resident(struct k3_bench_setup *s, uint64_t n_choices)
{
    const struct k3_model *m = s->model;
    uint64_t n_layers = m->cfg.n_layers - m->cfg.first_dense, n = n_choices;

    if (n > m->cfg.n_experts)
        n = m->cfg.n_experts;
    s->trunk_bytes = all_pinned_bytes(m);
    s->cache_bytes = n_layers ? (n * n_layers + 1) * m->expert_slot_bytes : m->expert_slot_bytes + (1 << 20);
}

static int open_source(struct k3_shm_source **out, const struct k3_bench_setup *s, struct k3_meter *meter, struct k3_err *err)
{
    struct k3_shm_source_opts o = {
        .m = s->model, .instance = s->family.instance, .rundir = s->family.rundir, .generation = 1, .stop = &k3_bench_abort,
        .meter = meter,
    };
    const struct k3_layout *l;
    int rc = k3_shm_source_open(out, &o, err);

    if (rc == 0)
        rc = k3_shm_source_attach_trunk(*out, ATTACH_NS, err);
    if (rc == 0 && s->model->cfg.n_layers > s->model->cfg.first_dense)
        rc = k3_shm_source_attach_expert(*out, ATTACH_NS, err);
    if (rc == 0)
        rc = k3_shm_source_begin(*out, err);
    if (rc < 0)
        return rc;
    l = k3_shm_source_layout(*out);
    if (l->n_pinned != l->n_pieces)
        return k3_fail(err, -EPROTO, "%zu of %zu pieces of the trunk are pinned", l->n_pinned, l->n_pieces);
    return 0;
}

int k3_bench_start_passes(struct k3_bench_setup *s, uint32_t threads, struct k3_meter *meter, struct k3_team **team,
                          struct k3_shm_source **source, struct k3_err *err)
{
    int rc = k3_bench_start_weights(s, err);

    if (rc == 0)
        rc = k3_bench_wait(s, err);
    if (rc == 0)
        rc = k3_team_new(team, threads, err);
    if (rc == 0)
        (void)k3_team_pin(*team, NULL);
    return rc == 0 ? open_source(source, s, meter, err) : rc;
}

void k3_bench_idle(const struct k3_bench_setup *s)
{
    for (int quiet = 0, left = 5000; quiet < 5 && left > 0 && !k3_bench_stop; left--) {
        quiet = k3_stats_value(&s->trunk, "in_flight") || k3_stats_value(&s->expert, "in_flight") ? 0 : quiet + 1;
        k3_bench_nap(0.001);
    }
}

void k3_bench_close(struct k3_bench_setup *s)
{
    k3_bench_progress(NULL);
    k3_stats_close(&s->trunk);
    k3_stats_close(&s->expert);
    k3_bench_family_close(&s->family);
    k3_bench_raw_close(s->raw);
    k3_model_close(s->model);
    s->raw = NULL;
    s->model = NULL;
}
