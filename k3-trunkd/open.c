/* From options to a published stream, and back. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/mem_info.h"
#include "k3-trunkd/trunkd.h"
#include "model/pack.h"

const struct k3_stat_def k3_trunkd_stats[K3_TS_N] = {
    [K3_TS_READ_BYTES] = { "read_bytes", "bytes", "read from the weight files", K3_COUNTER },
    [K3_TS_READS] = { "reads", "count", "reads that came back", K3_COUNTER },
    [K3_TS_READ_NS] = { "read_ns", "ns", "from submission to completion of a read", K3_HISTOGRAM },
    [K3_TS_IN_FLIGHT] = { "in_flight", "count", "reads in flight", K3_GAUGE },
    [K3_TS_RETRIES] = { "retries", "count",
                        "reads sent again: short, interrupted or refused O_DIRECT", K3_COUNTER },
    [K3_TS_RING_PRODUCED_BYTES] = { "ring_produced_bytes", "bytes",
                                    "by which the end of the stream has moved, with page slack",
                                    K3_COUNTER },
    [K3_TS_RING_WRAPS] = { "ring_wraps", "count",
                           "times the stream passed a multiple of the ring size", K3_COUNTER },
    [K3_TS_PASSES] = { "passes", "count", "passes whose last streamed byte was produced",
                       K3_COUNTER },
    [K3_TS_RING_FULL_WAITS] = { "ring_full_waits", "count",
                                "times nothing was read because the ring was full", K3_COUNTER },
    [K3_TS_RING_FULL_WAIT_NS] = { "ring_full_wait_ns", "ns",
                                  "time without a read because the ring was full", K3_COUNTER },
    [K3_TS_ROOM_NS] = { "room_ns", "ns",
                        "time with something to read and room for it, while the full depth is wanted",
                        K3_COUNTER },
    [K3_TS_ROOM_AT_DEPTH_NS] = { "room_at_depth_ns", "ns",
                                 "part of room_ns in which the drive had its full depth in flight",
                                 K3_COUNTER },
    [K3_TS_SEEKS] = { "seeks", "count", "seeks done", K3_COUNTER },
    [K3_TS_ERRORS] = { "errors", "count",
                       "stops of the stream and pinned pieces that could not be read", K3_COUNTER },
    [K3_TS_PINNED_LOADED_BYTES] = { "pinned_loaded_bytes", "bytes",
                                    "of pinned pieces that are in memory", K3_GAUGE },
    [K3_TS_PINNED_BYTES] = { "pinned_bytes", "bytes", "of all pinned pieces", K3_GAUGE },
    [K3_TS_RING_BYTES] = { "ring_bytes", "bytes", "size of the ring", K3_GAUGE },
    [K3_TS_STREAM_PASS_BYTES] = { "stream_pass_bytes", "bytes", "length of one pass in the stream",
                                  K3_GAUGE },
    [K3_TS_RESIDENT_BYTES] = { "resident_bytes", "bytes", "of resident tensors in fp32", K3_GAUGE },
    [K3_TS_HUGE_BYTES] = { "huge_bytes", "bytes", "of ring and pinned area in 2 MiB pages",
                           K3_GAUGE },
    [K3_TS_LOCKED_BYTES] = { "locked_bytes", "bytes", "of the data segment that cannot be swapped",
                             K3_GAUGE },
    [K3_TS_SWAPPED_BYTES] = { "swapped_bytes", "bytes", "of the data segment that lie in swap",
                              K3_GAUGE },
    [K3_TS_MAJOR_FAULTS] = { "major_faults", "count", "pages that had to be read back from a disk",
                             K3_COUNTER },
    [K3_TS_VERIFIED_BYTES] = { "verified_bytes", "bytes", "compared with their checksums", K3_COUNTER },
    [K3_TS_VERIFY_FAILURES] = { "verify_failures", "count", "pieces and small tensors that were not what their checksum says",
                                K3_COUNTER },
    [K3_TS_REGISTERED_BYTES] = { "registered_bytes", "bytes",
                                 "of ring (both views) and pinned area registered with io_uring",
                                 K3_GAUGE },
};

static void add_info(const struct k3_trunkd *d, cJSON *reply)
{
    uint32_t n_direct = atomic_load_explicit(&d->files.n_direct, memory_order_relaxed);
    cJSON_AddStringToObject(reply, "model", d->opt.model);
    cJSON_AddNumberToObject(reply, "layers", d->model->cfg.n_layers);
    cJSON_AddNumberToObject(reply, "pieces", (double)d->layout.n_pieces);
    cJSON_AddNumberToObject(reply, "pieces_pinned", (double)d->layout.n_pinned);
    cJSON_AddNumberToObject(reply, "pinned_bytes", (double)d->layout.pinned_payload_bytes);
    cJSON_AddNumberToObject(reply, "ring_bytes", (double)d->layout.ring_bytes);
    cJSON_AddNumberToObject(reply, "stream_pass_bytes", (double)d->layout.pass_bytes);
    cJSON_AddNumberToObject(reply, "resident_bytes", (double)d->model->resident_bytes);
    cJSON_AddNumberToObject(reply, "data_bytes", (double)d->layout.data_bytes);
    cJSON_AddNumberToObject(reply, "huge_bytes",
                            (double)atomic_load_explicit(&d->huge_bytes, memory_order_relaxed));
    k3_mem_info(&d->mem, &d->data, reply);
    cJSON_AddNumberToObject(
        reply, "registered_bytes",
        (double)atomic_load_explicit(&d->registered_bytes, memory_order_relaxed));
    cJSON_AddStringToObject(reply, "io", d->io->ops->name);
    k3_io_files_info(&d->files, d->stream.block_bytes, reply);
    cJSON_AddNumberToObject(reply, "align_bytes", d->layout.align_bytes);
    cJSON_AddNumberToObject(reply, "files", d->files.n_used);
    cJSON_AddNumberToObject(reply, "files_direct", n_direct);
    cJSON_AddBoolToObject(reply, "direct", n_direct == d->files.n_used);
    cJSON_AddBoolToObject(reply, "taken_over", d->taken_over);
    cJSON_AddBoolToObject(reply, "shared_drive", d->opt.shared_drive);
    cJSON_AddStringToObject(reply, "verify", k3_verify_how(&d->verify));
    if (!d->verify.sums && !d->opt.verify)
        cJSON_AddStringToObject(reply, "verify_note", K3_VERIFY_NOTE);
}

/* Runs on the control thread. */
static void info(void *arg, cJSON *reply)
{
    struct k3_trunkd *d = arg;

    pthread_mutex_lock(&d->info_lock);
    if (d->opened)
        add_info(d, reply);
    pthread_mutex_unlock(&d->info_lock);
}

/* What changes while the family works, for those who look every second: `flow` of ipc/msg.h. */
static int control(void *arg, const char *cmd, const cJSON *request, cJSON *reply, struct k3_err *err)
{
    struct k3_trunkd *d = arg;

    (void)request;
    if (strcmp(cmd, "flow") != 0)
        return k3_refuse(err, -ENOSYS, "%s knows no command \"%.40s\"", K3_TRUNKD_NAME, cmd);
    pthread_mutex_lock(&d->info_lock);
    if (d->opened) {
        uint64_t consumed = atomic_load_explicit(&d->ctl->b.consumed, memory_order_relaxed);
        uint64_t produced = atomic_load_explicit(&d->ctl->a.produced, memory_order_relaxed);

        k3_io_files_info(&d->files, d->stream.block_bytes, reply);
        cJSON_AddNumberToObject(reply, "ring_filled_bytes", produced > consumed ? (double)(produced - consumed) : 0);
    }
    pthread_mutex_unlock(&d->info_lock);
    return 0;
}

static void set_opened(struct k3_trunkd *d, bool opened)
{
    pthread_mutex_lock(&d->info_lock);
    d->opened = opened;
    pthread_mutex_unlock(&d->info_lock);
}

static int open_model(struct k3_trunkd *d, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts mo = { .n_layers = d->opt.n_layers };
    int rc;

    if (d->model)
        return 0;
    k3_model_dirs(&mo, dirs, d->opt.model, &d->opt.devices);
    rc = k3_model_open(&d->model, &mo, err);
    return rc < 0 ? rc : k3_pack_check_source(d->model, &mo, err);
}

static int open_layout(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_model *m = d->model;
    uint32_t align_bytes = k3_model_dio_align(m);
    uint8_t *pinned = calloc(m->n_pieces ? m->n_pieces : 1, 1);
    uint64_t ring_bytes = 0;
    int rc;

    if (!pinned)
        return k3_fail(err, -ENOMEM, "no memory for the pinned set of %zu pieces", m->n_pieces);
    rc = k3_trunkd_budget(m, align_bytes, d->opt.trunk_bytes, d->opt.ring_mb, &ring_bytes, pinned,
                          err);
    if (rc == 0 && d->opt.pins_prefix)
        k3_trunkd_pins_prefix(m, align_bytes, pinned);
    if (rc == 0)
        rc = k3_layout_build(&d->layout, m, align_bytes, ring_bytes, pinned, err);
    free(pinned);
    if (rc == 0)
        rc = k3_runs_build(&d->runs, m, &d->layout, err);
    return rc;
}

static bool data_is_ours(const struct k3_trunkd *d, const struct k3_seg *s)
{
    const struct k3_trunk_data *h = (const struct k3_trunk_data *)(const void *)s->base;

    return s->len_bytes == d->layout.data_bytes && h->magic == K3_TRUNK_DATA_MAGIC &&
           h->version == K3_TRUNK_VERSION &&
           memcmp(h->layout_digest, d->layout.digest, sizeof(h->layout_digest)) == 0;
}

/* A dead predecessor's reads may still land in pinned pieces that it did not finish. */
static int renew_absent_pins(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_layout *l = &d->layout;
    uint64_t a = l->align_bytes;
    int rc = 0;

    for (size_t i = 0; i < l->n_pieces && rc == 0; i++) {
        uint64_t first = l->start[i] - l->start[i] % a;
        uint64_t end = (l->start[i] + d->model->pieces[i].len_bytes + a - 1) / a * a;

        if (!l->pinned[i] ||
            atomic_load_explicit(&d->flags[i], memory_order_acquire) == K3_PIECE_VALID)
            continue;
        atomic_store_explicit(&d->flags[i], K3_PIECE_ABSENT, memory_order_relaxed);
        rc = k3_seg_renew(&d->data, first, end - first, err);
    }
    return rc;
}

static void point_into(struct k3_trunkd *d)
{
    d->head = (struct k3_trunk_data *)(void *)d->data.base;
    d->flags = (_Atomic uint32_t *)(void *)(d->data.base + d->layout.flags_off);
}

static int open_data(struct k3_trunkd *d, struct k3_err *err)
{
    int rc;

    k3_mem_name(&d->mem, k3_daemon_instance(d->daemon), k3_daemon_rundir(d->daemon),
                K3_TRUNK_DATA_SEG);
    rc = k3_data_take(&d->mem, &d->data, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (rc == 0 && data_is_ours(d, &d->data)) {
        point_into(d);
        rc = renew_absent_pins(d, err);
        if (rc < 0 && rc != -ENOTSUP)
            return rc;
        d->taken_over = d->owns_names = rc == 0;
    }
    if (d->taken_over)
        return k3_data_guard(&d->mem, &d->data, err);
    k3_seg_close(&d->data);
    rc = k3_data_create(&d->mem, &d->data, d->layout.data_bytes, err);
    if (rc < 0)
        return rc;
    point_into(d);
    if (d->mem.fallback[0])
        k3_log(K3_LOG_WARN, "memory_fallback", "asked=%s got=%s text=\"%s\"", d->opt.mem.from,
               k3_mem_from_name(d->data.from), d->mem.fallback);
    d->head->magic = K3_TRUNK_DATA_MAGIC;
    d->head->version = K3_TRUNK_VERSION;
    memcpy(d->head->layout_digest, d->layout.digest, sizeof(d->head->layout_digest));
    rc = k3_data_publish(&d->mem, &d->data, err);
    d->owns_names = rc == 0;
    return rc;
}

/* 2 MiB pages for what direct reads land in, before the first of them (spec/io.md 1).  A ring that
 * was taken over is left alone until the first seek. */
static void collapse(struct k3_trunkd *d)
{
    const struct k3_layout *l = &d->layout;
    uint64_t huge_bytes = 0, want = l->ring_off - l->pinned_off;

    if (want)
        huge_bytes = k3_seg_collapse(d->data.base + l->pinned_off, want);
    if (!d->taken_over) {
        huge_bytes += k3_seg_collapse(d->ring, l->ring_bytes);
        (void)k3_seg_collapse(d->ring + l->ring_bytes, l->ring_bytes);
        want += l->ring_bytes;
    }
    /* After that, since locking takes the pages as they are.  The ring keeps it when it is renewed. */
    k3_mem_lock(&d->mem, d->data.base, l->ring_off);
    k3_mem_lock(&d->mem, d->ring, l->ring_bytes);
    atomic_store_explicit(&d->huge_bytes, huge_bytes, memory_order_relaxed);
    if (huge_bytes < want)
        k3_log(K3_LOG_WARN, "small_pages",
               "huge_bytes=%" PRIu64 " want=%" PRIu64
               " text=\"direct reads into scattered pages can be much slower\"",
               huge_bytes, want);
}

static int open_io(struct k3_trunkd *d, struct k3_err *err)
{
    char reason[64];
    int rc = k3_io_open(&d->io, d->opt.io, k3_io_files_depth(&d->files), -1, reason, err);

    if (rc < 0)
        return rc;
    if (strcmp(d->opt.io, "pread") == 0)
        snprintf(reason, sizeof(reason), "--io pread");
    if (!*reason &&
        atomic_load_explicit(&d->files.n_direct, memory_order_relaxed) == d->files.n_used)
        return k3_reads_open(d, err);
    k3_log(K3_LOG_WARN, "io_fallback", "io=%s reason=\"%s\" files=%u files_direct=%u",
           d->io->ops->name, reason, d->files.n_used,
           atomic_load_explicit(&d->files.n_direct, memory_order_relaxed));
    return k3_reads_open(d, err);
}

void k3_trunkd_register(struct k3_trunkd *d)
{
    const struct k3_layout *l = &d->layout;
    struct k3_io_range range[2];
    size_t n = 0;
    uint64_t bytes;

    if (!d->stream.ring_dirty)
        range[n++] = (struct k3_io_range){ d->ring, 2 * l->ring_bytes };
    if (l->ring_off > l->pinned_off)
        range[n++] = (struct k3_io_range){ d->data.base + l->pinned_off, l->ring_off - l->pinned_off };
    bytes = k3_io_register(d->io, range, n);
    atomic_store_explicit(&d->registered_bytes, bytes, memory_order_relaxed);
    if (d->daemon)
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_REGISTERED_BYTES, bytes);
}

static int open_ctl(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_layout *l = &d->layout;
    uint64_t table_off = sizeof(struct k3_trunk_ctl);
    struct k3_trunk_entry *table;
    int rc = k3_seg_create(&d->ctl_seg, k3_daemon_instance(d->daemon), K3_TRUNK_SEG,
                           table_off + l->n_pieces * sizeof(struct k3_trunk_entry), err);

    if (rc < 0)
        return rc;
    d->ctl = (struct k3_trunk_ctl *)(void *)d->ctl_seg.base;
    d->ctl->magic = K3_TRUNK_MAGIC;
    d->ctl->version = K3_TRUNK_VERSION;
    d->ctl->generation = k3_daemon_generation(d->daemon);
    d->ctl->align_bytes = l->align_bytes;
    d->ctl->pass_bytes = l->pass_bytes;
    d->ctl->ring_bytes = l->ring_bytes;
    d->ctl->data_bytes = l->data_bytes;
    d->ctl->n_pieces = l->n_pieces;
    d->ctl->table_off = table_off;
    k3_data_place(&d->ctl->data, &d->data);
    memcpy(d->ctl->model_digest, d->model->digest, sizeof(d->ctl->model_digest));
    memcpy(d->ctl->layout_digest, l->digest, sizeof(d->ctl->layout_digest));
    table = (struct k3_trunk_entry *)(void *)(d->ctl_seg.base + table_off);
    for (size_t i = 0; i < l->n_pieces; i++)
        table[i] = (struct k3_trunk_entry){ l->start[i], l->pinned[i] };
    k3_stream_open(d, d->taken_over);
    k3_trunkd_register(d);
    return k3_seg_publish(&d->ctl_seg, err);
}

static void set_gauges(struct k3_trunkd *d)
{
    struct k3_stats *s = k3_daemon_stats(d->daemon);

    k3_stat_set(s, K3_TS_PINNED_BYTES, d->layout.pinned_payload_bytes);
    k3_stat_set(s, K3_TS_RING_BYTES, d->layout.ring_bytes);
    k3_stat_set(s, K3_TS_STREAM_PASS_BYTES, d->layout.pass_bytes);
    k3_stat_set(s, K3_TS_RESIDENT_BYTES, d->model->resident_bytes);
    k3_stat_set(s, K3_TS_LOCKED_BYTES,
                atomic_load_explicit(&d->mem.locked_bytes, memory_order_relaxed));
    k3_stat_set(s, K3_TS_HUGE_BYTES, atomic_load_explicit(&d->huge_bytes, memory_order_relaxed));
}

int k3_trunkd_open(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_layout *l = &d->layout;
    int rc = k3_mem_open(&d->mem, &d->opt.mem, err); /* first: threads inherit the node */

    if (rc == 0)
        rc = k3_daemon_open(&d->daemon, K3_TRUNKD_NAME, &d->opt.common, k3_trunkd_stats, K3_TS_N,
                            control, info, d, err);
    if (rc < 0)
        return rc;
    /* A dead predecessor's: nobody should attach to it. */
    k3_seg_unlink(k3_daemon_instance(d->daemon), K3_TRUNK_SEG);
    rc = open_model(d, err);
    if (rc == 0)
        rc = k3_tverify_open(d, err);
    if (rc == 0)
        rc = open_layout(d, err);
    if (rc == 0)
        rc = k3_tfiles_open(d, err);
    if (rc == 0)
        rc = open_data(d, err);
    if (rc == 0)
        rc = k3_ring_map(&d->data, l->ring_off, l->ring_bytes, true, &d->ring, err);
    if (rc == 0)
        collapse(d);
    if (rc == 0 && !atomic_load_explicit(&d->head->resident_valid, memory_order_acquire))
        rc = k3_resident_load(d, err);
    if (rc == 0)
        rc = k3_pins_open(d, err);
    if (rc == 0)
        rc = open_io(d, err);
    if (rc == 0)
        rc = open_ctl(d, err);
    if (rc < 0)
        return rc;
    set_gauges(d);
    set_opened(d, true);
    k3_log(K3_LOG_INFO, "trunk_open",
           "generation=%u pieces=%zu pinned=%zu pinned_bytes=%" PRIu64 " ring_bytes=%" PRIu64
           " stream_pass_bytes=%" PRIu64 " io=%s files=%u files_direct=%u huge_bytes=%" PRIu64
           " taken_over=%d",
           k3_daemon_generation(d->daemon), l->n_pieces, l->n_pinned, l->pinned_payload_bytes,
           l->ring_bytes, l->pass_bytes, d->io->ops->name, d->files.n_used,
           atomic_load_explicit(&d->files.n_direct, memory_order_relaxed),
           atomic_load_explicit(&d->huge_bytes, memory_order_relaxed), d->taken_over);
    return 0;
}

void k3_trunkd_close(struct k3_trunkd *d)
{
    bool keep = d->daemon && k3_daemon_keep(d->daemon);

    set_opened(d, false);
    k3_io_close(d->io); /* before anything that its reads land in */
    if (d->daemon && d->owns_names) {
        k3_seg_unlink(k3_daemon_instance(d->daemon), K3_TRUNK_SEG);
        if (!keep)
            k3_data_drop(&d->mem);
    }
    k3_mem_close(&d->mem);
    d->io = NULL;
    k3_reads_close(d);
    k3_pins_close(d);
    k3_verify_close(&d->verify);
    if (d->ring)
        k3_ring_unmap(d->ring, d->layout.ring_bytes);
    d->ring = NULL;
    k3_seg_close(&d->ctl_seg);
    k3_seg_close(&d->data);
    if (d->model)
        k3_tfiles_close(d);
    k3_runs_free(&d->runs);
    k3_layout_free(&d->layout);
    k3_model_close(d->model);
    d->model = NULL;
    k3_daemon_close(d->daemon); /* last: the lock says that nothing is held any more */
    d->daemon = NULL;
}
