/* k3-computed/open.c: model, kernels, memory, peers, engine; and what `info` says about them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/memory.h"
#include "ipc/parse.h"
#include "k3-computed/computed.h"

static int open_model(struct k3_computed *c, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts o = { .n_layers = c->opt.layers };

    k3_model_dirs(&o, dirs, c->opt.model, &c->opt.devices);
    if (!realpath(c->opt.model, c->model_path))
        snprintf(c->model_path, sizeof(c->model_path), "%s", c->opt.model); /* the model's own words are better */
    return k3_model_open(&c->model, &o, err);
}

static int check_prefetch(const struct k3_computed *c, struct k3_err *err)
{
    const struct k3_config *cfg = &c->model->cfg;
    uint64_t most = cfg->n_experts < 4ull * cfg->latent ? cfg->n_experts : 4ull * cfg->latent;

    if (c->opt.prefetch <= most)
        return 0;
    return k3_refuse(err, -EINVAL, "--prefetch %u: a layer of this model has %u experts; give at most %llu (its top_k is %u)",
                     c->opt.prefetch, cfg->n_experts, (unsigned long long)most, cfg->top_k);
}

/* ---- memory ------------------------------------------------------------------------------------------------------------ */

static uint64_t add(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* State and buffers are private memory, which the kernel promises without having it: compare before taking it. */
static int check_memory(const struct k3_computed *c, struct k3_err *err)
{
    const struct k3_config *cfg = &c->model->cfg;
    uint64_t state = k3_state_bytes(cfg, c->opt.ctx), thread = k3_pass_thread_bytes(cfg, c->opt.ctx);
    uint64_t need, all, left;
    struct k3_memory memory;
    char why[256], snapshots[40] = "";

    if (state > UINT64_MAX / K3_SEQUENCES_MAX / 2 || thread > UINT64_MAX / 1024 / 2)
        all = UINT64_MAX;
    else
        all = add(k3_engine_bytes(cfg, c->opt.ctx, c->opt.sequences, c->opt.batch_rows), thread * c->opt.threads);
    need = add(add(all, k3_pass_bytes(cfg, c->opt.batch_rows)), k3_prefix_bytes(cfg, c->opt.ctx, c->opt.snapshots));
    k3_memory_read("", &memory);
    left = k3_memory_left(&memory, why, sizeof(why));
    if (need <= left)
        return 0;
    if (c->opt.snapshots)
        snprintf(snapshots, sizeof(snapshots), " and %u snapshot%s", c->opt.snapshots, c->opt.snapshots == 1 ? "" : "s");
    return k3_refuse(err, -ENOMEM, "%.3f GB are needed for %u sequence%s%s of --ctx %u (%.3f GB each) and %u row%s, %.3f GB "
                     "are available (%s): lower --ctx, --sequences%s or --batch-rows", (double)need * 1e-9, c->opt.sequences,
                     c->opt.sequences == 1 ? "" : "s", snapshots, c->opt.ctx, (double)state * 1e-9, c->opt.batch_rows,
                     c->opt.batch_rows == 1 ? "" : "s", (double)left * 1e-9, why, c->opt.snapshots ? ", --snapshots" : "");
}

/* ---- peers ------------------------------------------------------------------------------------------------------------- */

/* Tries again while nobody is there; a mismatch is an error at once.  Says once whom it waits for. */
static int attach(struct k3_computed *c, const char *peer, enum k3_waiting what,
                  int (*try)(struct k3_shm_source *, uint64_t, struct k3_err *), struct k3_err *err)
{
    bool said = false;
    int rc;

    k3_stat_set(k3_daemon_stats(c->daemon), K3_CS_WAITING, what);
    for (;;) {
        *err = (struct k3_err)K3_ERR_INIT;
        rc = try(c->source, K3_TICK_NS, err);
        if (rc == 0 || err->exit_status != K3_EXIT_NO_PEER)
            break;
        if (k3_daemon_stopping(c->daemon))
            return k3_fail(err, -ECANCELED, "stopped while waiting for %s", peer);
        if (!said)
            k3_log(K3_LOG_INFO, "waiting", "for=%s", peer);
        said = true;
        k3_daemon_beat(c->daemon);
    }
    k3_stat_set(k3_daemon_stats(c->daemon), K3_CS_WAITING, K3_WAIT_NONE);
    return rc;
}

static bool has_experts(const struct k3_config *cfg)
{
    return cfg->n_layers > cfg->first_dense;
}

/* Waits for both peers and for the resident tensors. */
static int attach_all(struct k3_computed *c, struct k3_err *err)
{
    int rc = attach(c, "k3-trunkd", K3_WAIT_TRUNK, k3_shm_source_attach_trunk, err);

    if (rc == 0 && has_experts(&c->model->cfg))
        rc = attach(c, "k3-expertd", K3_WAIT_EXPERT, k3_shm_source_attach_expert, err);
    if (rc < 0)
        return rc;
    k3_stat_set(k3_daemon_stats(c->daemon), K3_CS_WAITING, K3_WAIT_TRUNK);
    rc = k3_shm_source_begin(c->source, err);
    k3_stat_set(k3_daemon_stats(c->daemon), K3_CS_WAITING, K3_WAIT_NONE);
    return rc;
}

/* On the skeleton's thread. */
static void on_stop(void *arg)
{
    struct k3_computed *c = arg;

    atomic_store(&c->stop, true);
    atomic_store(&c->abort, true);
}

static int open_source(struct k3_computed *c, struct k3_err *err)
{
    struct k3_shm_source_opts o = {
        .m = c->model, .instance = k3_daemon_instance(c->daemon), .rundir = k3_daemon_rundir(c->daemon),
        .generation = k3_daemon_generation(c->daemon), .stop = &c->abort, .meter = &c->meter,
        .notice = k3_computed_notice, .notice_arg = c,
    };

    return k3_shm_source_open(&c->source, &o, err);
}

static int open_engine(struct k3_computed *c, struct k3_err *err)
{
    struct k3_engine_opts o = {
        .m = c->model, .pass = c->pass, .source = k3_shm_source_get(c->source), .stats = k3_daemon_stats(c->daemon),
        .tracer = c->tracer, .prefetch = c->opt.prefetch, .meter = &c->meter, .abort = &c->abort, .stop = &c->stop, .ctx = c->opt.ctx,
        .n_sequences = c->opt.sequences, .n_snapshots = c->opt.snapshots, .batch_rows = c->opt.batch_rows,
        .generation = k3_daemon_generation(c->daemon), .kept_bytes_max = (uint64_t)c->opt.requests_mb << 20,
        .tick = k3_computed_tick, .arg = c,
    };

    return k3_engine_open(&c->engine, &o, err);
}

int k3_computed_open(struct k3_computed *c, struct k3_err *err)
{
    /* First: the default of --threads is the node's cores, and memory and threads inherit the node. */
    int rc = k3_numa_go(c->opt.numa_node == K3_NODE_ANY ? -1 : (int)c->opt.numa_node, err);

    if (rc == 0)
        rc = k3_kernels_find(&c->kernels, c->opt.kernels, err);
    if (rc == 0)
        k3_cpus_read(&c->cpus, "", NULL);
    if (rc == 0)
        rc = k3_cpus_check(&c->cpus, &c->opt.threads, c->opt.force_threads, err);
    if (rc == 0)
        rc = open_model(c, err);
    if (rc == 0)
        rc = check_prefetch(c, err);
    if (rc == 0)
        rc = check_memory(c, err);
    if (rc == 0)
        rc = k3_daemon_open(&c->daemon, "k3-computed", &c->opt.daemon, k3_computed_stat_defs, K3_N_CS,
                            k3_computed_ctl, k3_computed_info, c, err);
    if (rc < 0)
        return rc;
    k3_daemon_on_stop(c->daemon, on_stop, c);
    rc = k3_team_new(&c->team, c->opt.threads, err);
    if (rc == 0)
        (void)k3_team_pin(c->team, &c->cpus);
    if (rc == 0)
        rc = k3_pass_new(&c->pass, c->model, c->kernels, c->team, c->opt.batch_rows, err);
    if (rc == 0)
        rc = open_source(c, err);
    if (rc == 0)
        rc = k3_tracer_new(&c->tracer, c->model, c->opt.batch_rows, &c->stop, err);
    if (rc == 0)
        rc = open_engine(c, err); /* takes all memory, before the wait for others */
    if (rc == 0)
        rc = attach_all(c, err);
    return rc < 0 && atomic_load(&c->stop) ? 1 : rc;
}

void k3_computed_close(struct k3_computed *c)
{
    k3_server_close(c->server);
    k3_daemon_ctl_end(c->daemon);
    k3_engine_close(c->engine);
    k3_tracer_free(c->tracer);
    k3_shm_source_close(c->source);
    k3_pass_free(c->pass);
    k3_team_free(c->team);
    k3_model_close(c->model);
    k3_vocab_free(c->vocab);
    k3_daemon_close(c->daemon);
}

/* ---- info -------------------------------------------------------------------------------------------------------------- */

void k3_computed_digest(const struct k3_computed *c, char out[65])
{
    for (size_t i = 0; i < sizeof(c->model->digest); i++)
        sprintf(out + 2 * i, "%02x", c->model->digest[i]);
}

void k3_computed_info(void *arg, cJSON *reply)
{
    const struct k3_computed *c = arg;
    const struct k3_config *cfg = &c->model->cfg;
    const struct k3_layout *l = k3_shm_source_layout(c->source);
    cJSON *layout = cJSON_AddObjectToObject(reply, "layout");
    char digest[65];
    char latent[96], bytes[K3_GROUPED_TEXT];

    k3_computed_digest(c, digest);
    cJSON_AddStringToObject(reply, "model", c->model_path);
    cJSON_AddStringToObject(reply, "model_digest", digest);
    cJSON_AddNumberToObject(reply, "layers", cfg->n_layers);
    cJSON_AddNumberToObject(reply, "layers_model", cfg->n_layers_model);
    cJSON_AddBoolToObject(reply, "whole_model", cfg->n_layers == cfg->n_layers_model);
    cJSON_AddNumberToObject(reply, "vocab", cfg->vocab);
    cJSON_AddStringToObject(reply, "kernels", c->kernels->name);
    cJSON_AddNumberToObject(reply, "threads", k3_team_size(c->team));
    cJSON_AddBoolToObject(reply, "threads_pinned", k3_team_pinned(c->team));
    cJSON_AddNumberToObject(reply, "cores", c->cpus.n_cores);
    cJSON_AddNumberToObject(reply, "cpus", c->cpus.n_cpus);
    if (c->cpus.n_quota == K3_CPUS_NO_QUOTA)
        cJSON_AddNullToObject(reply, "cpu_quota");
    else
        cJSON_AddNumberToObject(reply, "cpu_quota", c->cpus.n_quota);
    if (c->opt.numa_node == K3_NODE_ANY)
        cJSON_AddNullToObject(reply, "numa_node");
    else
        cJSON_AddNumberToObject(reply, "numa_node", c->opt.numa_node);
    cJSON_AddNumberToObject(reply, "batch_rows", c->opt.batch_rows);
    cJSON_AddNumberToObject(reply, "ctx", c->opt.ctx);
    cJSON_AddNumberToObject(reply, "sequences", c->opt.sequences);
    cJSON_AddNumberToObject(reply, "snapshots", c->opt.snapshots);
    cJSON_AddNumberToObject(reply, "state_bytes", (double)k3_state_bytes(cfg, c->opt.ctx));
    snprintf(latent, sizeof(latent), "%s bytes a position", k3_grouped_text(bytes, k3_state_kv_bytes(cfg)));
    cJSON_AddStringToObject(reply, "latent_kv", latent);
    cJSON_AddNumberToObject(reply, "buffer_bytes", (double)k3_pass_bytes(cfg, c->opt.batch_rows));
    cJSON_AddNumberToObject(reply, "thread_bytes", (double)k3_pass_thread_bytes(cfg, c->opt.ctx));
    cJSON_AddNumberToObject(reply, "prefetch", c->opt.prefetch);
    cJSON_AddNumberToObject(reply, "expert_slots", k3_shm_source_slots(c->source));
    k3_tracer_info(c->tracer, cJSON_AddObjectToObject(reply, "trace"));
    cJSON_AddNumberToObject(layout, "align_bytes", l->align_bytes);
    cJSON_AddNumberToObject(layout, "pass_bytes", (double)l->pass_bytes);
    cJSON_AddNumberToObject(layout, "ring_bytes", (double)l->ring_bytes);
    cJSON_AddNumberToObject(layout, "pieces", (double)l->n_pieces);
    cJSON_AddNumberToObject(layout, "pinned_pieces", (double)l->n_pinned);
    cJSON_AddNumberToObject(layout, "pinned_bytes", (double)l->pinned_payload_bytes);
    cJSON_AddNumberToObject(layout, "trunk_bytes", (double)c->model->trunk_bytes);
}
