#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ipc/mem_info.h"
#include "k3-expertd/expertd.h"

#define SEG_CTL "expert"
#define SEG_DATA "expertdata"

const struct k3_stat_def k3_expertd_stat_defs[K3_XS_N] = {
    [K3_XS_DEMANDS] = { "demands", "count", "experts demanded by computed", K3_COUNTER },
    [K3_XS_HITS] = { "hits", "count", "demands whose expert was resident", K3_COUNTER },
    [K3_XS_MISSES] = { "misses", "count", "demands whose expert had to be read or was being read", K3_COUNTER },
    [K3_XS_JOINED] = { "joined", "count", "misses whose expert was being read already", K3_COUNTER },
    [K3_XS_PREFETCHES] = { "prefetches", "count", "experts that computed announced", K3_COUNTER },
    [K3_XS_PREFETCH_HITS] = { "prefetch_hits", "count", "demands whose read a prefetch had begun", K3_COUNTER },
    [K3_XS_PREFETCH_DROPPED] = { "prefetch_dropped", "count", "prefetches for which no slot was free", K3_COUNTER },
    [K3_XS_READ_BYTES] = { "read_bytes", "bytes", "bytes read from the expert files", K3_COUNTER },
    [K3_XS_READS] = { "reads", "count", "blocks read", K3_COUNTER },
    [K3_XS_READ_NS] = { "read_ns", "ns", "time of one block, from submission to completion", K3_HISTOGRAM },
    [K3_XS_DEMAND_NS] = { "demand_ns", "ns", "time of one demand, from seeing it to its completion", K3_HISTOGRAM },
    [K3_XS_IN_FLIGHT] = { "in_flight", "count", "blocks being read now", K3_GAUGE },
    [K3_XS_EVICTIONS] = { "evictions", "count", "experts that had to give up their slot", K3_COUNTER },
    [K3_XS_SLOTS] = { "slots", "count", "slots of the arena", K3_GAUGE },
    [K3_XS_SLOTS_READY] = { "slots_ready", "count", "slots that hold an expert", K3_GAUGE },
    [K3_XS_SLOTS_LENT] = { "slots_lent", "count", "slots that computed holds", K3_GAUGE },
    [K3_XS_SLOT_BYTES] = { "slot_bytes", "bytes", "size of one slot", K3_GAUGE },
    [K3_XS_QUEUED] = { "queued", "count", "demands that wait for a slot", K3_GAUGE },
    [K3_XS_ERRORS] = { "errors", "count", "experts that could not be read", K3_COUNTER },
    [K3_XS_RETRIES] = { "retries", "count", "reads repeated after an error or a short read", K3_COUNTER },
    [K3_XS_ATTACHES] = { "attaches", "count", "times that a computed attached", K3_COUNTER },
    [K3_XS_STALE_DROPPED] = { "stale_dropped", "count", "ring entries of an earlier attach", K3_COUNTER },
    [K3_XS_TAKEN_OVER] = { "taken_over", "count", "experts taken over from the dead predecessor", K3_GAUGE },
    [K3_XS_RENEWED] = { "renewed", "count", "slots that the dead predecessor was reading into", K3_GAUGE },
    [K3_XS_PROTOCOL_ERRORS] = { "protocol_errors", "count", "ring entries or indices that cannot be", K3_COUNTER },
    [K3_XS_HUGE_BYTES] = { "huge_bytes", "bytes", "part of the arena in 2 MiB pages", K3_GAUGE },
    [K3_XS_LOCKED_BYTES] = { "locked_bytes", "bytes", "of the arena that cannot be swapped", K3_GAUGE },
    [K3_XS_SWAPPED_BYTES] = { "swapped_bytes", "bytes", "of the arena that lie in swap", K3_GAUGE },
    [K3_XS_MAJOR_FAULTS] = { "major_faults", "count", "pages that had to be read back from a disk", K3_COUNTER },
    [K3_XS_VERIFIED_BYTES] = { "verified_bytes", "bytes", "compared with their checksums", K3_COUNTER },
    [K3_XS_VERIFY_FAILURES] = { "verify_failures", "count", "experts that were not what their checksum says", K3_COUNTER },
};

/* ---- the checkpoint and the size of the arena ---- */

static int open_model(struct k3_expertd *d, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts o = { .n_layers = d->opt.n_layers, .want_experts = true,
                               .no_pack = true /* the trunk is not ours */ };

    k3_model_dirs(&o, dirs, d->opt.model, &d->opt.devices);
    return k3_model_open(&d->model, &o, err);
}

static int size_arena(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_arena_size size;
    int rc = k3_expertd_budget(d->model, d->opt.cache_bytes, &size, err);

    d->n_experts_all = size.n_experts_all;
    d->slot_bytes = size.slot_bytes;
    d->n_slots = size.n_slots;
    d->slots_off_bytes = size.slots_off_bytes;
    d->data_bytes = size.data_bytes;
    return rc;
}

/* ---- the arena ---- */

static struct k3_slot_record *records(const struct k3_expertd *d)
{
    return (struct k3_slot_record *)(d->data.base + K3_ARENA_RECORDS_OFF);
}

/* A dead predecessor's direct reads may still land in a slot that it was reading into. */
static int renew_reading(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_slot_record *rec = records(d);

    for (uint32_t i = 0; i < d->n_slots; i++) {
        uint32_t state = atomic_load_explicit(&rec[i].state, memory_order_acquire);
        int rc;

        if (state == K3_SLOT_READY || state == K3_SLOT_EMPTY)
            continue;
        rc = k3_seg_renew(&d->data, d->slots_off_bytes + i * d->slot_bytes, d->slot_bytes, err);
        if (rc < 0)
            return rc;
        d->n_renewed++;
        rec[i].lent = 0;
        atomic_store_explicit(&rec[i].state, K3_SLOT_EMPTY, memory_order_release);
    }
    return 0;
}

static int new_arena(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_arena_head *h;
    int rc;

    rc = k3_data_create(&d->mem, &d->data, d->data_bytes, err);
    if (rc < 0)
        return rc;
    if (d->mem.fallback[0])
        k3_log(K3_LOG_WARN, "memory_fallback", "asked=%s got=%s text=\"%s\"", d->opt.mem.from,
               k3_mem_from_name(d->data.from), d->mem.fallback);
    h = (struct k3_arena_head *)d->data.base;
    h->magic = K3_ARENA_MAGIC;
    h->version = K3_EXPERT_VERSION;
    h->n_slots = d->n_slots;
    h->slot_bytes = d->slot_bytes;
    memcpy(h->model_digest, d->model->digest, sizeof(h->model_digest));
    return k3_data_publish(&d->mem, &d->data, err);
}

static int open_arena(struct k3_expertd *d, bool *taken_over, struct k3_err *err)
{
    const char *why = "other_size_or_model";
    int rc;

    k3_mem_name(&d->mem, k3_daemon_instance(d->daemon), k3_daemon_rundir(d->daemon), SEG_DATA);
    *taken_over = false;
    rc = k3_data_take(&d->mem, &d->data, err);
    if (rc == -ECONNREFUSED)
        return rc; /* no k3-keeper: there is no other way */
    if (rc == 0 && k3_arena_matches(&d->data, d->n_slots, d->slot_bytes, d->data_bytes, d->model->digest)) {
        int renewed = renew_reading(d, err);

        if (renewed < 0 && renewed != -ENOTSUP)
            return renewed;
        if (renewed == 0) {
            *taken_over = true;
            return k3_data_guard(&d->mem, &d->data, err);
        }
        d->n_renewed = 0;
        why = "read_into_parts_of_reserved_huge_pages";
    }
    if (rc == 0)
        k3_log(K3_LOG_INFO, "arena_not_taken_over", "segment=%s why=%s", d->data.name, why);
    k3_seg_close(&d->data);
    return new_arena(d, err);
}

/* Places the READY experts of a predecessor into the slot table.  Offsets are computed anew, not believed; a record that
 * names no expert leaves its slot empty. */
static void adopt(struct k3_expertd *d)
{
    struct k3_slot_record *rec = records(d);
    uint64_t range_pos[K3_EXPERT_TENSORS];
    uint32_t off_bytes[K3_EXPERT_TENSORS] = { 0 };
    struct k3_expert_place p;

    for (uint32_t i = 0; i < d->n_slots; i++) {
        uint32_t layer = rec[i].layer, expert = rec[i].expert;

        if (atomic_load_explicit(&rec[i].state, memory_order_acquire) != K3_SLOT_READY)
            continue;
        if (k3_model_expert(d->model, layer, expert, &p) < 0 ||
            k3_expert_slot_layout(&p, d->slot_bytes, range_pos, off_bytes) < 0)
            layer = UINT32_MAX;
        if (k3_slots_adopt(d->slots, i, layer, expert, off_bytes, rec[i].lent))
            d->n_adopted++;
        else
            k3_log(K3_LOG_WARN, "record_dropped", "slot=%u layer=%u expert=%u", i, rec[i].layer, rec[i].expert);
    }
    k3_slots_adopted(d->slots);
}

int k3_expertd_publish(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_expert_ctl *c, head = { .n_slots = d->n_slots };
    uint64_t len_bytes = k3_expert_ctl_layout(&head);
    struct k3_seg old = d->ctl;
    int rc;

    k3_bridge_disarm(&d->bridge);
    d->ctl = (struct k3_seg)K3_SEG_INIT;
    rc = k3_seg_create(&d->ctl, k3_daemon_instance(d->daemon), SEG_CTL, len_bytes, err);
    if (rc < 0)
        goto out;
    c = (struct k3_expert_ctl *)d->ctl.base;
    c->magic = K3_EXPERT_MAGIC;
    c->version = K3_EXPERT_VERSION;
    c->generation = k3_daemon_generation(d->daemon);
    c->n_slots = d->n_slots;
    c->slot_bytes = d->slot_bytes;
    k3_expert_ctl_layout(c);
    c->slots_off = d->slots_off_bytes;
    k3_data_place(&c->data, &d->data);
    c->data_bytes = d->data_bytes;
    memcpy(c->model_digest, d->model->digest, sizeof(c->model_digest));
    rc = k3_expert_ends_open(&d->ends, &d->ctl, true, err);
    if (rc == 0)
        rc = k3_seg_publish(&d->ctl, err);
    d->attach = 0;
    d->published = rc == 0;
out:
    k3_seg_close(&old);
    return rc;
}

/* ---- open and close ---- */

static void info(void *arg, cJSON *reply)
{
    struct k3_expertd *d = arg;
    const struct k3_io_files *fs = k3_reader_files(d->reader);
    uint32_t n_direct = atomic_load_explicit(&fs->n_direct, memory_order_relaxed);

    cJSON_AddStringToObject(reply, "model", d->opt.model);
    cJSON_AddStringToObject(reply, "policy", d->opt.policy);
    k3_mem_info(&d->mem, &d->data, reply);
    cJSON_AddStringToObject(reply, "io", k3_reader_how(d->reader));
    cJSON_AddNumberToObject(reply, "files", fs->n_used);
    cJSON_AddNumberToObject(reply, "files_direct", n_direct);
    cJSON_AddNumberToObject(reply, "devices", fs->n_drives);
    k3_io_files_info(fs, k3_io_files_block_bytes(fs), reply);
    cJSON_AddNumberToObject(reply, "slots", d->n_slots);
    cJSON_AddNumberToObject(reply, "slot_bytes", (double)d->slot_bytes);
    cJSON_AddNumberToObject(reply, "arena_bytes", (double)d->data_bytes);
    cJSON_AddNumberToObject(reply, "huge_bytes",
                            (double)k3_stats_value(k3_daemon_stats(d->daemon), "huge_bytes"));
    cJSON_AddNumberToObject(reply, "registered_bytes", (double)k3_reader_registered_bytes(d->reader));
    cJSON_AddNumberToObject(reply, "experts", (double)d->n_experts_all);
    cJSON_AddNumberToObject(reply, "taken_over", d->n_adopted);
    cJSON_AddStringToObject(reply, "verify", k3_verify_how(&d->verify));
    if (!d->verify.sums && !d->opt.verify)
        cJSON_AddStringToObject(reply, "verify_note", K3_VERIFY_NOTE);
}

/* What changes while the family works, for those who look every second: `flow` of ipc/msg.h. */
static int control(void *arg, const char *cmd, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    struct k3_expertd *d = arg;
    const struct k3_io_files *fs = k3_reader_files(d->reader);
    cJSON *demands, *hits;

    (void)request;
    if (strcmp(cmd, "flow") != 0)
        return k3_refuse(err, -ENOSYS, "%s knows no command \"%.40s\"", K3_EXPERTD_NAME, cmd);
    k3_io_files_info(fs, k3_io_files_block_bytes(fs), reply);
    demands = cJSON_AddArrayToObject(reply, "layer_demands");
    hits = cJSON_AddArrayToObject(reply, "layer_hits");
    for (uint32_t i = 0; i < d->model->cfg.n_layers; i++) {
        const struct k3_layer_count *c = &d->layer_count[i];

        cJSON_AddItemToArray(hits, cJSON_CreateNumber((double)atomic_load_explicit(&c->hits, memory_order_relaxed)));
        cJSON_AddItemToArray(demands, cJSON_CreateNumber((double)atomic_load_explicit(&c->demands, memory_order_relaxed)));
    }
    return 0;
}

static void on_stop(void *arg)
{
    struct k3_expertd *d = arg;

    (void)eventfd_write(d->efd, 1);
}

static int open_reader(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_reader_opts o = {
        .io = d->opt.io,
        .direct = d->opt.direct,
        .depth = d->opt.io_depth,
        .block_bytes = d->opt.io_block_bytes,
        .slots = d->data.base + d->slots_off_bytes,
        .slot_bytes = d->slot_bytes,
        .n_slots = d->n_slots,
        .efd = d->efd,
        .stats = k3_daemon_stats(d->daemon),
        .stat_bytes = K3_XS_READ_BYTES,
        .stat_reads = K3_XS_READS,
        .stat_read_ns = K3_XS_READ_NS,
        .stat_retries = K3_XS_RETRIES,
        .stat_in_flight = K3_XS_IN_FLIGHT,
    };
    const struct k3_io_files *fs;
    int rc = k3_reader_open(&d->reader, d->model, &o, err);

    if (rc < 0)
        return rc;
    fs = k3_reader_files(d->reader);
    if (*k3_reader_why_pread(d->reader))
        k3_log(K3_LOG_WARN, "no_io_uring", "then=pread reason=\"%s\"", k3_reader_why_pread(d->reader));
    if (strcmp(d->opt.direct, "off") != 0 && fs->n_direct < fs->n_used)
        k3_log(K3_LOG_WARN, "no_direct_reads", "files=%u of=%u then=buffered", fs->n_used - fs->n_direct, fs->n_used);
    return 0;
}

static int open_slots(struct k3_expertd *d, bool taken_over, struct k3_err *err)
{
    const struct k3_config *c = &d->model->cfg;
    int rc = k3_slots_open(&d->slots, records(d), d->n_slots, c->n_layers, c->n_experts,
                           k3_policy_find(d->opt.policy), err);

    if (rc == 0 && taken_over)
        adopt(d);
    return rc;
}

int k3_expertd_open(struct k3_expertd *d, struct k3_err *err)
{
    struct k3_stats *st;
    bool taken_over;
    uint64_t huge_bytes;
    int rc = k3_mem_open(&d->mem, &d->opt.mem, err); /* first: threads inherit the node */

    if (rc == 0)
        rc = open_model(d, err);
    if (rc == 0 && !(d->layer_count = calloc(d->model->cfg.n_layers, sizeof(*d->layer_count))))
        rc = k3_fail(err, -ENOMEM, "counters of %u layers", d->model->cfg.n_layers);
    if (rc == 0)
        rc = k3_xverify_open(d, err);
    if (rc == 0)
        rc = size_arena(d, err);
    if (rc == 0)
        rc = k3_daemon_open(&d->daemon, K3_EXPERTD_NAME, &d->opt.common, k3_expertd_stat_defs, K3_XS_N, control, info,
                            d, err);
    if (rc < 0)
        return rc;
    /* A dead predecessor's: nobody should attach to it, nor be refused by it while the arena is made. */
    k3_seg_unlink(k3_daemon_instance(d->daemon), SEG_CTL);
    d->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->efd < 0)
        return k3_fail(err, -errno, "eventfd: %s", strerror(errno));
    rc = open_arena(d, &taken_over, err);
    if (rc < 0)
        return rc;
    huge_bytes = k3_seg_collapse(d->data.base, d->data_bytes);
    if (huge_bytes < d->data_bytes)
        k3_log(K3_LOG_WARN, "arena_in_small_pages", "bytes=%" PRIu64 " of=%" PRIu64, d->data_bytes - huge_bytes,
               d->data_bytes);
    k3_mem_lock(&d->mem, d->data.base, d->data_bytes); /* after that: it takes the pages as they are */
    rc = open_reader(d, err);
    if (rc == 0)
        rc = open_slots(d, taken_over, err);
    if (rc == 0)
        rc = k3_bridge_open(&d->bridge, d->efd, err);
    if (rc == 0)
        rc = k3_expertd_publish(d, err);
    if (rc < 0)
        return rc;
    st = k3_daemon_stats(d->daemon);
    k3_stat_set(st, K3_XS_SLOTS, d->n_slots);
    k3_stat_set(st, K3_XS_SLOT_BYTES, d->slot_bytes);
    k3_stat_set(st, K3_XS_SLOTS_READY, k3_slots_n_ready(d->slots));
    k3_stat_set(st, K3_XS_TAKEN_OVER, d->n_adopted);
    k3_stat_set(st, K3_XS_RENEWED, d->n_renewed);
    k3_stat_set(st, K3_XS_HUGE_BYTES, huge_bytes);
    k3_stat_set(st, K3_XS_LOCKED_BYTES, atomic_load_explicit(&d->mem.locked_bytes, memory_order_relaxed));
    k3_log(K3_LOG_INFO, "arena",
           "slots=%u slot_bytes=%" PRIu64 " experts=%" PRIu64 " taken_over=%u renewed=%u huge_bytes=%" PRIu64 " io=%s",
           d->n_slots, d->slot_bytes, d->n_experts_all, d->n_adopted, d->n_renewed, huge_bytes, k3_reader_how(d->reader));
    k3_daemon_on_stop(d->daemon, on_stop, d);
    return 0;
}

void k3_expertd_close(struct k3_expertd *d, int rc)
{
    bool leave = rc < 0 && d->published;

    k3_daemon_ctl_end(d->daemon);
    k3_bridge_close(&d->bridge);
    k3_reader_close(d->reader);
    k3_slots_close(d->slots);
    k3_verify_close(&d->verify);
    if (d->daemon && d->data.base && !leave && !k3_daemon_keep(d->daemon)) {
        k3_seg_unlink(k3_daemon_instance(d->daemon), SEG_CTL);
        k3_data_drop(&d->mem);
    }
    k3_mem_close(&d->mem);
    k3_seg_close(&d->ctl);
    k3_seg_close(&d->data);
    k3_daemon_close(d->daemon);
    if (d->efd >= 0)
        close(d->efd);
    free(d->layer_count);
    k3_model_close(d->model);
}
