/* k3-plan: what an instance of k3 will take and how fast it can be, before anything is loaded (plan.h). */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/device.h"
#include "ipc/parse.h"
#include "k3-computed/team.h"
#include "k3-computed/engine.h"
#include "k3-computed/kernels.h"
#include "k3-expertd/policy.h"
#include "shm/segment.h"
#include "tools/plan.h"

#define SHM_DIR "/dev/shm"

struct cmdline {
    const char *model, *instance, *preset, *memory, *trunk_gb, *cache_gb, *trunk_device, *presets, *memory_from, *root, *shm;
    const char *policy, *kernels, *verify, *io_block, *numa_trunk, *numa_expert, *numa_compute, *http;
    struct k3_str_list expert_devices;
    struct k3_plan_opts plan;
    uint32_t layers, reserve_fd, prefetch, io_depth;
    double rate;
    bool force_threads, hugetlb, list, table, shell, released;
};

static bool parse(struct cmdline *c, int argc, char **argv, int *status)
{
    struct k3_plan_opts *o = &c->plan;
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &c->model, "DIR", "the checkpoint; without one the released shape is assumed" },
        { "instance", K3_OPT_STRING, &c->instance, "NAME", "instance name (default \"default\")" },
        { "preset", K3_OPT_STRING, &c->preset, "NAME", "budgets by name, or auto: what there is, less 2 GB and 2%" },
        { "list-presets", K3_OPT_FLAG, &c->list, NULL, "print the presets" },
        { "memory", K3_OPT_STRING, &c->memory, "SIZE", "promise: the peak of the whole family stays under it (8G)" },
        { "trunk-gb", K3_OPT_STRING, &c->trunk_gb, "X", "memory for the trunk in 10^9 bytes" },
        { "cache-gb", K3_OPT_STRING, &c->cache_gb, "X", "memory for routed experts in 10^9 bytes" },
        { "ring-mb", K3_OPT_U32, &o->ring_mb, "N", "size of the trunk ring in MiB, an even number", 2, 1 << 20 },
        { "ctx", K3_OPT_U32, &o->ctx, "N", "positions of one sequence (default 4096)", 1, 1u << 24 },
        { "sequences", K3_OPT_U32, &o->sequences, "N", "sequences at the same time (default 1)", 1, K3_SEQUENCES_MAX },
        { "snapshots", K3_OPT_U32, &o->snapshots, "N", "beginnings of conversations to keep (default: by the memory)", 0,
          K3_SNAPSHOTS_MAX },
        { "batch-rows", K3_OPT_U32, &o->batch_rows, "N", "rows of one pass at most (default: by the memory)", 1,
          K3_BATCH_ROWS_MAX },
        { "threads", K3_OPT_U32, &o->threads, "N", "threads of a pass (default: one a core, fewer under a quota)", 1, 1024 },
        { "layers", K3_OPT_U32, &c->layers, "N", "only the first N layers", 1, K3_MAX_LAYERS },
        { "trunk-device", K3_OPT_STRING, &c->trunk_device, "DIR", "the trunk's shards are read here" },
        { "expert-device", K3_OPT_LIST, &c->expert_devices, "DIR", "directory with shards of experts" },
        { "memory-from", K3_OPT_STRING, &c->memory_from, "HOW",
          "shm, memfd or hugetlb (default: shm, memfd where /dev/shm is too small)" },
        { "hugetlb", K3_OPT_FLAG, &c->hugetlb, NULL, "the same as --memory-from hugetlb" },
        { "http", K3_OPT_STRING, &c->http, "ADDR:PORT", "k3-router serves there, and needs memory for what clients send" },
        { "rate", K3_OPT_DOUBLE, &c->rate, "X", "take X GB/s for every drive and measure none", 1e-6, 1e6 },
        { "table", K3_OPT_FLAG, &c->table, NULL, "print a table from 2G to 512G" },
        { "shell", K3_OPT_FLAG, &c->shell, NULL, "KEY=VALUE lines, then the plan behind \"# \"" },
        { "presets", K3_OPT_STRING, &c->presets, "FILE", "where the presets are (default: found beside k3-run)" },
        { "reserve-fd", K3_OPT_U32, &c->reserve_fd, "N", "open descriptor of the instance's reservation, to be filled in", 3,
          1 << 20 },
        { "root", K3_OPT_STRING, &c->root, "DIR", "look for proc/ and sys/ below it (tests)" },
        { "shm-dir", K3_OPT_STRING, &c->shm, "DIR", "where segments and reservations are (default " SHM_DIR "; tests)" },
        /* What k3-run takes and no plan needs, so that its options can be given as they are. */
        { "force-threads", K3_OPT_FLAG, &c->force_threads, NULL, "as k3-run takes it; so are the following" },
        { "policy", K3_OPT_STRING, &c->policy, "NAME", "no part of the plan" },
        { "prefetch", K3_OPT_U32, &c->prefetch, "N", "no part of the plan", 0, 65535 },
        { "kernels", K3_OPT_STRING, &c->kernels, "NAME", "no part of the plan, but refused as k3-computed does" },
        { "verify", K3_OPT_STRING, &c->verify, "WHEN", "no part of the plan" },
        { "io-depth", K3_OPT_U32, &c->io_depth, "N", "no part of the plan", 1, 256 },
        { "io-block", K3_OPT_STRING, &c->io_block, "SIZE", "no part of the plan" },
        { "numa-trunk", K3_OPT_STRING, &c->numa_trunk, "N", "no part of the plan" },
        { "numa-expert", K3_OPT_STRING, &c->numa_expert, "N", "no part of the plan" },
        { "numa-compute", K3_OPT_STRING, &c->numa_compute, "N", "no part of the plan" },
        { NULL },
    };

    return k3_opts_parse(table, "k3-plan",
                         "what an instance takes in memory, and how fast its drives let it be, before anything is loaded",
                         argc, argv, NULL, status);
}

static int take_gb(const char *name, const char *text, uint64_t *out, struct k3_err *err)
{
    double x;

    if (!text)
        return 0;
    if (k3_parse_double(text, 0, 9e9, &x) < 0 || x <= 0)
        return k3_refuse(err, -EINVAL, "--%s %.64s: must be a number of gigabytes (10^9 bytes) above 0", name, text);
    *out = (uint64_t)(x * 1e9 + .5);
    return 0;
}

static int take_sizes(struct cmdline *c, struct k3_err *err)
{
    struct k3_plan_opts *o = &c->plan;
    const struct k3_kernels *k;
    uint64_t block_bytes;
    int rc;

    if (c->memory && (k3_parse_size(c->memory, &o->memory_bytes) < 0 || o->memory_bytes == 0))
        return k3_refuse(err, -EINVAL, "--memory %.64s: must be a number of bytes above 0, with an optional suffix K, M or G (8G, 1.5G)",
                         c->memory);
    if ((rc = take_gb("trunk-gb", c->trunk_gb, &o->trunk_bytes, err)) < 0 ||
        (rc = take_gb("cache-gb", c->cache_gb, &o->cache_bytes, err)) < 0)
        return rc;
    if (o->ring_mb % 2)
        return k3_refuse(err, -EINVAL, "--ring-mb %u: must be an even number, since a ring is whole 2 MiB pages", o->ring_mb);
    if (c->hugetlb && c->memory_from && strcmp(c->memory_from, "hugetlb") != 0)
        return k3_refuse(err, -EINVAL, "--hugetlb and --memory-from %.64s are two different ways; give one of them",
                         c->memory_from);
    o->http = c->http != NULL;
    if (c->hugetlb)
        c->memory_from = "hugetlb";
    if (c->memory_from && strcmp(c->memory_from, "shm") && strcmp(c->memory_from, "memfd") && strcmp(c->memory_from, "hugetlb"))
        return k3_refuse(err, -EINVAL, "--memory-from %.64s: must be shm, memfd or hugetlb", c->memory_from);
    if (c->policy && !k3_policy_find(c->policy))
        return k3_refuse(err, -EINVAL, "--policy %.64s: there is no such policy; there are %s", c->policy, k3_policy_names());
    if (c->io_block && (k3_parse_size(c->io_block, &block_bytes) < 0 || block_bytes < 64u << 10 || block_bytes > 1u << 30 ||
                        block_bytes % 4096))
        return k3_refuse(err, -EINVAL, "--io-block %.64s: must be a multiple of 4K, from 64K to 1G", c->io_block);
    if (c->verify && strcmp(c->verify, "off") && strcmp(c->verify, "first") && strcmp(c->verify, "always"))
        return k3_refuse(err, -EINVAL, "--verify %.64s: must be off, first or always", c->verify);
    rc = k3_kernels_find(&k, c->kernels, err);
    if (rc == 0)
        rc = k3_threads_check(&o->threads, c->force_threads, err);
    if (rc < 0)
        return rc;
    return k3_instance_check(c->instance, err);
}

/* Beside k3-run: run/presets of a checkout, or share/k3/run/presets of an installation. */
static int read_presets(const struct cmdline *c, struct k3_presets *out, struct k3_err *err)
{
    static const char *const places[] = { "../run/presets", "../share/k3/run/presets", "../../../run/presets" };
    char exe[4096], path[4200];
    ssize_t n;

    if (c->presets)
        return k3_presets_read(out, c->presets, err);
    n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    if (n > 0) {
        exe[n] = 0;
        *strrchr(exe, '/') = 0;
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
            snprintf(path, sizeof(path), "%s/%s", exe, places[i]);
            if (access(path, R_OK) == 0)
                return k3_presets_read(out, path, err);
        }
    }
    return k3_refuse(err, -ENOENT, "the file of presets is not beside this program; give --presets FILE");
}

static int choose_preset(struct cmdline *c, struct k3_presets *all, struct k3_err *err)
{
    char names[512] = "";
    int rc;

    if (!c->preset && !c->list)
        return 0;
    rc = read_presets(c, all, err);
    if (rc < 0 || c->list)
        return rc;
    if (strcmp(c->preset, "auto") == 0) {
        c->plan.auto_preset = true;
        return 0;
    }
    c->plan.preset = k3_presets_find(all, c->preset);
    if (c->plan.preset)
        return 0;
    for (size_t i = 0; i < all->n; i++)
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s, ", all->item[i].name);
    return k3_refuse(err, -EINVAL, "--preset %.64s: there is no such preset; there are %sauto", c->preset, names);
}

static void list_presets(const struct k3_presets *all)
{
    printf("%-16s %10s %10s   GB for the trunk and for experts\n", "PRESET", "TRUNK", "CACHE");
    for (size_t i = 0; i < all->n; i++)
        printf("%-16s %10g %10g\n", all->item[i].name, all->item[i].trunk_gb, all->item[i].cache_gb);
    printf("%-16s %10s %10s   what there is, less 2 GB and 2%%\n", "auto", "-", "-");
}

static int open_model(struct cmdline *c, struct k3_model **m, struct k3_err *err)
{
    const char *dirs[2 + sizeof(c->expert_devices.item) / sizeof(c->expert_devices.item[0])];
    struct k3_model_opts mo = { .dirs = dirs, .n_layers = c->layers };

    if (!c->model) {
        if (c->layers || c->trunk_device || c->expert_devices.n)
            return k3_refuse(err, -EINVAL, "--layers, --trunk-device and --expert-device need --model DIR");
        return k3_plan_released(m, err);
    }
    dirs[mo.n_dirs++] = c->model;
    if (c->trunk_device)
        dirs[mo.n_dirs++] = c->trunk_device;
    for (size_t i = 0; i < c->expert_devices.n; i++)
        if (!c->trunk_device || strcmp(c->expert_devices.item[i], c->trunk_device) != 0) /* one directory may serve both */
            dirs[mo.n_dirs++] = c->expert_devices.item[i];
    return k3_model_open(m, &mo, err);
}

/* Trunk and experts are read at the same time when no expert directory lies on the trunk's drive. */
static int find_split(struct cmdline *c, struct k3_err *err)
{
    const char *trunk = c->trunk_device ? c->trunk_device : c->model;
    const char *const *experts = c->expert_devices.n ? c->expert_devices.item : &c->model;
    size_t n = c->expert_devices.n ? c->expert_devices.n : 1;
    struct k3_device a, b;
    int rc;

    if (!trunk || (!c->trunk_device && !c->expert_devices.n))
        return 0;
    rc = k3_device_of(trunk, NULL, &a, err);
    c->plan.split = true;
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = k3_device_of(experts[i], NULL, &b, err);
        if (rc == 0 && k3_device_same_drive(&a, &b))
            c->plan.split = false;
    }
    return rc;
}

static int measure(const struct cmdline *c, struct k3_plan_device dev[2], struct k3_err *err)
{
    const char *trunk = c->trunk_device ? c->trunk_device : c->model;
    int rc;

    if (c->rate > 0) {
        for (int i = 0; i < 2; i++)
            dev[i] = (struct k3_plan_device){ "every drive", "given", c->rate * 1e9, c->rate * 1e9 };
        return 0;
    }
    rc = k3_plan_rate(&trunk, 1, &dev[0], err);
    if (rc == 0)
        rc = k3_plan_rate(c->expert_devices.n ? c->expert_devices.item : &c->model,
                          c->expert_devices.n ? c->expert_devices.n : 1, &dev[1], err);
    return rc;
}

static void look(const struct cmdline *c, struct k3_plan_machine *mc)
{
    struct k3_memory memory;
    uint64_t size;

    k3_memory_read(c->root, &memory);
    *mc = (struct k3_plan_machine){ .promised_bytes = 0 };
    mc->left_bytes = k3_memory_left(&memory, mc->why, sizeof(mc->why));
    mc->promised_bytes = k3_reserve_others(c->root, c->shm, c->instance, &mc->n_others);
    k3_memory_shm(c->shm, &mc->shm_bytes, &size);
}

/* Looking, planning and promising are one step, with no other k3-plan between. */
static int plan(struct cmdline *c, const struct k3_model *m, struct k3_plan *p, struct k3_plan_machine *mc, struct k3_err *err)
{
    struct k3_reservation r = K3_RESERVATION_INIT;
    int dir = -1, rc = 0;

    if (c->reserve_fd)
        rc = k3_reserve_adopt(&r, (int)c->reserve_fd, c->shm, c->instance, err);
    if (rc == 0 && c->reserve_fd)
        rc = k3_reserve_begin(&dir, c->shm, err);
    if (rc == 0) {
        look(c, mc);
        rc = k3_plan_make(p, m, &c->plan, mc, err);
        if (rc == 0 && p->memfd && c->memory_from && strcmp(c->memory_from, "shm") == 0)
            rc = k3_refuse(err, -ENOSPC, "--memory-from shm: the segments take %.3f GB, %s has %.3f GB free; what would fit: "
                           "--memory-from memfd", (double)p->segment_bytes / 1e9, c->shm, (double)mc->shm_bytes / 1e9);
    }
    if (rc == 0 && c->reserve_fd)
        rc = k3_reserve_write(&r, p->sum_bytes, err);
    k3_reserve_end(&dir);
    k3_reserve_close(&r, false);
    return rc;
}

static int run(struct cmdline *c, struct k3_err *err)
{
    struct k3_presets presets;
    struct k3_model *m = NULL;
    struct k3_plan p;
    struct k3_plan_machine mc;
    struct k3_plan_device dev[2] = { { .name = "" } };
    bool measured = false;
    int rc = take_sizes(c, err);

    if (rc == 0)
        rc = choose_preset(c, &presets, err);
    if (rc < 0)
        return rc;
    if (c->list) {
        list_presets(&presets);
        return 0;
    }
    rc = find_split(c, err);
    if (rc == 0)
        rc = open_model(c, &m, err);
    if (rc == 0 && c->table) {
        rc = k3_plan_table(stdout, m, &c->plan, err);
        k3_model_close(m);
        return rc;
    }
    if (rc == 0)
        rc = plan(c, m, &p, &mc, err);
    if (rc == 0 && (c->model || c->rate > 0) && p.trunk_read_bytes + p.expert_read_bytes > 0) {
        rc = measure(c, dev, err);
        measured = true;
    }
    if (rc == 0) {
        const struct k3_plan_view v = { c->instance, c->model ? c->model : "the released shape", m, &mc,
                                        measured ? &dev[0] : NULL, measured ? &dev[1] : NULL };

        if (!c->memory_from)
            c->memory_from = p.memfd ? "memfd" : "shm";
        if (c->shell)
            k3_plan_shell(stdout, &p, c->memory_from);
        k3_plan_print(stdout, c->shell ? "# " : "", &p, &v);
    }
    k3_model_close(m);
    return rc;
}

int main(int argc, char **argv)
{
    struct cmdline c = {
        .instance = "default", .root = "", .shm = SHM_DIR,
        .plan = { .memory_bytes = K3_PLAN_UNSET, .trunk_bytes = K3_PLAN_UNSET, .cache_bytes = K3_PLAN_UNSET, .ctx = 4096,
                  .sequences = 1, .snapshots = K3_PLAN_CHOOSE },
    };
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (parse(&c, argc, argv, &rc))
        return rc;
    rc = run(&c, &err);
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = k3_fail(&err, -EIO, "cannot write the plan");
    if (rc < 0)
        fprintf(stderr, "k3-plan: %s\n", err.text);
    return rc < 0 ? err.exit_status : 0;
}
