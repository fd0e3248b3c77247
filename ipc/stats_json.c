#include "ipc/stats_json.h"

#include <inttypes.h>
#include <stdio.h>

#include "ipc/daemon.h"

const char *k3_daemon_state_name(uint32_t state)
{
    static const char *const name[] = { "starting", "ready", "draining", "stopped", "failed" };

    return state < sizeof(name) / sizeof(name[0]) ? name[state] : "unknown";
}

/* A cJSON number is a double and loses digits above 2^53; the text of the integer does not. */
static void add_u64(cJSON *to, const char *name, uint64_t v)
{
    char text[24];

    snprintf(text, sizeof(text), "%" PRIu64, v);
    cJSON_AddRawToObject(to, name, text);
}

static void add_histogram(const _Atomic uint64_t *v, cJSON *to)
{
    cJSON *buckets;
    uint64_t count = 0;

    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        count += atomic_load_explicit(&v[b], memory_order_relaxed);
    add_u64(to, "count", count);
    add_u64(to, "sum", atomic_load_explicit(&v[K3_HIST_BUCKETS], memory_order_relaxed));
    buckets = cJSON_AddObjectToObject(to, "buckets");
    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++) {
        uint64_t n = atomic_load_explicit(&v[b], memory_order_relaxed);
        char bound[32];

        if (n == 0)
            continue;
        snprintf(bound, sizeof(bound), "%" PRIu64, b ? (((uint64_t)1 << (b - 1)) - 1) * 2 + 1 : 0);
        add_u64(buckets, bound, n);
    }
}

void k3_stats_json(const struct k3_stats *s, cJSON *to)
{
    static const char *const kind[] = { "counter", "gauge", "histogram" };
    const struct k3_stats_page *p = s->page;
    uint64_t beat = atomic_load_explicit(&p->heartbeat_ns, memory_order_relaxed), now = k3_now_ns();
    cJSON *stats;

    cJSON_AddStringToObject(to, "daemon", p->daemon);
    cJSON_AddStringToObject(to, "instance", p->instance);
    cJSON_AddNumberToObject(to, "pid", p->pid);
    cJSON_AddNumberToObject(to, "generation", p->generation);
    cJSON_AddStringToObject(
        to, "state", k3_daemon_state_name(atomic_load_explicit(&p->state, memory_order_relaxed)));
    add_u64(to, "start_unix_ns", p->start_unix_ns);
    add_u64(to, "heartbeat_age_ns", now > beat ? now - beat : 0);
    stats = cJSON_AddObjectToObject(to, "stats");
    for (uint32_t i = 0; i < p->n_entries; i++) {
        const struct k3_stat_entry *e = &s->entry[i];
        cJSON *o = cJSON_AddObjectToObject(stats, e->name);

        cJSON_AddStringToObject(o, "kind", kind[e->kind]);
        cJSON_AddStringToObject(o, "unit", e->unit);
        if (e->kind == K3_HISTOGRAM)
            add_histogram(&s->value[e->value], o);
        else
            add_u64(o, "value", atomic_load_explicit(&s->value[e->value], memory_order_relaxed));
    }
}
