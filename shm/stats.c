#include "shm/stats.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define HIST_VALUES (K3_HIST_BUCKETS + 1u) /* buckets, then the sum */
#define MAX_ENTRIES 1024u

static uint32_t kind_values(uint32_t kind)
{
    return kind == K3_HISTOGRAM ? HIST_VALUES : 1;
}

static void page_name(char *out, size_t len, const char *daemon)
{
    snprintf(out, len, "%s.stats", daemon);
}

int k3_stats_create(struct k3_stats *s, const char *instance, const char *daemon,
                    uint32_t generation, const struct k3_stat_def *defs, uint32_t n_defs,
                    struct k3_err *err)
{
    char what[64];
    uint64_t entries_off = (sizeof(struct k3_stats_page) + 63) & ~(uint64_t)63, values_off;
    struct k3_stats_page *p;
    struct timespec now;
    uint32_t n_values = 0;
    int rc;

    memset(s, 0, sizeof(*s));
    s->seg.fd = -1;
    for (uint32_t i = 0; i < n_defs; i++) {
        if (strlen(defs[i].name) >= sizeof(s->entry->name) ||
            strlen(defs[i].unit) >= sizeof(s->entry->unit) ||
            strlen(defs[i].help) >= sizeof(s->entry->help))
            return k3_fail(err, -ENAMETOOLONG,
                           "statistic %s of %s: name, unit or help does not fit its page",
                           defs[i].name, daemon);
        n_values += kind_values(defs[i].kind);
    }
    values_off = (entries_off + n_defs * sizeof(struct k3_stat_entry) + 63) & ~(uint64_t)63;
    page_name(what, sizeof(what), daemon);
    rc = k3_seg_create(&s->seg, instance, what,
                       values_off + (n_values ? n_values : 1) * sizeof(uint64_t), err);
    if (rc < 0)
        return rc;
    p = (struct k3_stats_page *)s->seg.base;
    s->entry = (struct k3_stat_entry *)(s->seg.base + entries_off);
    s->value = (_Atomic uint64_t *)(s->seg.base + values_off);
    p->magic = K3_STATS_MAGIC;
    p->version = K3_STATS_VERSION;
    p->n_entries = n_defs;
    p->n_values = n_values;
    p->pid = (uint32_t)getpid();
    p->generation = generation;
    snprintf(p->daemon, sizeof(p->daemon), "%s", daemon);
    snprintf(p->instance, sizeof(p->instance), "%s", instance);
    clock_gettime(CLOCK_REALTIME, &now);
    p->start_unix_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    p->entries_off = entries_off;
    p->values_off = values_off;
    for (uint32_t i = 0, v = 0; i < n_defs; i++) {
        struct k3_stat_entry *e = &s->entry[i];

        snprintf(e->name, sizeof(e->name), "%s", defs[i].name);
        snprintf(e->unit, sizeof(e->unit), "%s", defs[i].unit);
        snprintf(e->help, sizeof(e->help), "%s", defs[i].help);
        e->kind = defs[i].kind;
        e->value = v;
        v += kind_values(e->kind);
    }
    s->page = p;
    k3_stats_beat(s, K3_STARTING);
    rc = k3_seg_publish(&s->seg, err);
    if (rc < 0)
        k3_stats_close(s);
    return rc;
}

void k3_stats_destroy(struct k3_stats *s, const char *instance, const char *daemon)
{
    char what[64];

    if (!s->page)
        return;
    page_name(what, sizeof(what), daemon);
    if (k3_seg_is_current(&s->seg))
        k3_seg_unlink(instance, what);
    k3_stats_close(s);
}

void k3_stat_add(struct k3_stats *s, uint32_t id, uint64_t v)
{
    if (s->page)
        atomic_fetch_add_explicit(&s->value[s->entry[id].value], v, memory_order_relaxed);
}

void k3_stat_set(struct k3_stats *s, uint32_t id, uint64_t v)
{
    if (s->page)
        atomic_store_explicit(&s->value[s->entry[id].value], v, memory_order_relaxed);
}

void k3_stat_hist(struct k3_stats *s, uint32_t id, uint64_t v)
{
    uint32_t bucket = v ? 64u - (uint32_t)__builtin_clzll(v) : 0;

    if (!s->page)
        return;
    if (bucket >= K3_HIST_BUCKETS)
        bucket = K3_HIST_BUCKETS - 1;
    atomic_fetch_add_explicit(&s->value[s->entry[id].value + bucket], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->value[s->entry[id].value + K3_HIST_BUCKETS], v,
                              memory_order_relaxed);
}

void k3_stats_beat(struct k3_stats *s, enum k3_daemon_state state)
{
    if (!s->page)
        return;
    atomic_store_explicit(&s->page->heartbeat_ns, k3_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&s->page->state, (uint32_t)state, memory_order_relaxed);
}

static bool text_ends(const char *text, size_t len)
{
    return memchr(text, 0, len) != NULL;
}

/* The page is another process's: nothing in it is used before it is checked. */
static int check_page(const struct k3_seg *seg, struct k3_err *err)
{
    const struct k3_stats_page *p = (const struct k3_stats_page *)seg->base;
    uint64_t entries_end, values_end;

    if (seg->len_bytes < sizeof(*p) || p->magic != K3_STATS_MAGIC)
        return k3_fail(err, -EPROTO, "statistics page %s: not one of ours", seg->name);
    if (p->version != K3_STATS_VERSION)
        return k3_fail(err, -EPROTO, "statistics page %s: version %u, this program reads %u",
                       seg->name, p->version, K3_STATS_VERSION);
    if (p->n_entries > MAX_ENTRIES || p->n_values > MAX_ENTRIES * HIST_VALUES ||
        p->entries_off % 8 || p->values_off % 8 || p->entries_off < sizeof(*p) ||
        __builtin_add_overflow(p->entries_off, p->n_entries * sizeof(struct k3_stat_entry),
                               &entries_end) ||
        __builtin_add_overflow(p->values_off, p->n_values * sizeof(uint64_t), &values_end) ||
        entries_end > seg->len_bytes || values_end > seg->len_bytes ||
        p->values_off < entries_end || !text_ends(p->daemon, sizeof(p->daemon)) ||
        !text_ends(p->instance, sizeof(p->instance)))
        return k3_fail(err, -EPROTO, "statistics page %s: damaged header", seg->name);
    for (uint32_t i = 0; i < p->n_entries; i++) {
        const struct k3_stat_entry *e =
            (const struct k3_stat_entry *)(seg->base + p->entries_off) + i;

        if (!text_ends(e->name, sizeof(e->name)) || !text_ends(e->unit, sizeof(e->unit)) ||
            !text_ends(e->help, sizeof(e->help)) || e->kind > K3_HISTOGRAM ||
            e->value > p->n_values || p->n_values - e->value < kind_values(e->kind))
            return k3_fail(err, -EPROTO, "statistics page %s: damaged entry %u", seg->name, i);
    }
    return 0;
}

int k3_stats_open(struct k3_stats *s, const char *instance, const char *daemon, struct k3_err *err)
{
    char what[64];
    int rc;

    memset(s, 0, sizeof(*s));
    page_name(what, sizeof(what), daemon);
    rc = k3_seg_open(&s->seg, instance, what, false, err);
    if (rc < 0)
        return rc;
    rc = check_page(&s->seg, err);
    if (rc < 0) {
        k3_seg_close(&s->seg);
        return rc;
    }
    s->page = (struct k3_stats_page *)s->seg.base;
    s->entry = (struct k3_stat_entry *)(s->seg.base + s->page->entries_off);
    s->value = (_Atomic uint64_t *)(s->seg.base + s->page->values_off);
    return 0;
}

void k3_stats_close(struct k3_stats *s)
{
    k3_seg_close(&s->seg);
    s->page = NULL;
    s->entry = NULL;
    s->value = NULL;
}

uint64_t k3_stats_value(const struct k3_stats *s, const char *name)
{
    for (uint32_t i = 0; s->page && i < s->page->n_entries; i++)
        if (strcmp(s->entry[i].name, name) == 0)
            return atomic_load_explicit(&s->value[s->entry[i].value], memory_order_relaxed);
    return 0;
}
