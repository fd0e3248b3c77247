/* Looks at statistics pages, and what two looks say about the family. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "ipc/stats_json.h"
#include "tools/ctl.h"

#define SILENT_NS 5000000000u

int k3_ctl_sample(struct k3_ctl_sample *out, const struct k3_ctl_opt *o, const char *daemon,
                  struct k3_err *err)
{
    struct k3_stats s;
    struct timespec now;
    uint64_t unix_ns, beat;
    int rc = k3_stats_open(&s, o->instance, daemon, err);

    memset(out, 0, sizeof(*out));
    snprintf(out->daemon, sizeof(out->daemon), "%s", daemon);
    if (rc == -ENOENT)
        return k3_no_peer(err, rc,
                          "%s has no statistics page in instance \"%s\": it is not running", daemon,
                          o->instance);
    if (rc < 0)
        return rc;
    out->value = calloc(s.page->n_entries ? s.page->n_entries : 1, sizeof(*out->value));
    if (!out->value) {
        k3_stats_close(&s);
        return k3_fail(err, -ENOMEM, "no memory for %u statistics", s.page->n_entries);
    }
    out->pid = s.page->pid;
    out->generation = s.page->generation;
    out->state = atomic_load_explicit(&s.page->state, memory_order_relaxed);
    out->alive = k3_lock_alive(o->rundir, daemon);
    out->at_ns = k3_now_ns();
    clock_gettime(CLOCK_REALTIME, &now);
    unix_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    out->up_ns = unix_ns > s.page->start_unix_ns ? unix_ns - s.page->start_unix_ns : 0;
    beat = atomic_load_explicit(&s.page->heartbeat_ns, memory_order_relaxed);
    out->beat_age_ns = out->at_ns > beat ? out->at_ns - beat : 0;
    out->n = s.page->n_entries;
    for (uint32_t i = 0; i < out->n; i++) {
        struct k3_ctl_value *v = &out->value[i];
        uint32_t n = s.entry[i].kind == K3_HISTOGRAM ? K3_HIST_BUCKETS + 1 : 1;

        memcpy(v->name, s.entry[i].name, sizeof(v->name));
        memcpy(v->unit, s.entry[i].unit, sizeof(v->unit));
        memcpy(v->help, s.entry[i].help, sizeof(v->help));
        v->kind = s.entry[i].kind;
        for (uint32_t k = 0; k < n; k++)
            v->v[k] = atomic_load_explicit(&s.value[s.entry[i].value + k], memory_order_relaxed);
    }
    k3_stats_close(&s);
    return 0;
}

void k3_ctl_sample_free(struct k3_ctl_sample *s)
{
    free(s->value);
    memset(s, 0, sizeof(*s));
}

const struct k3_ctl_value *k3_ctl_find(const struct k3_ctl_sample *s, const char *name)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (strcmp(s->value[i].name, name) == 0)
            return &s->value[i];
    return NULL;
}

const char *k3_ctl_liveness(const struct k3_ctl_sample *s)
{
    if (!s->alive)
        return "dead";
    if (s->state == K3_READY && s->beat_age_ns > SILENT_NS)
        return "not responding";
    return k3_daemon_state_name(s->state);
}

/* Growth of a counter since the earlier look; all of it when the process is another one. */
static uint64_t grown(const struct k3_ctl_sample *now, const struct k3_ctl_sample *before,
                      const char *name)
{
    const struct k3_ctl_value *v = k3_ctl_find(now, name),
                              *b = before ? k3_ctl_find(before, name) : NULL;

    if (!v)
        return 0;
    if (!b || before->generation != now->generation || before->pid != now->pid || b->v[0] > v->v[0])
        return v->v[0];
    return v->v[0] - b->v[0];
}

void k3_ctl_summarize(struct k3_ctl_summary *out, const struct k3_ctl_sample *now, uint32_t n_now,
                      const struct k3_ctl_sample *before, uint32_t n_before)
{
    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < n_now; i++) {
        const struct k3_ctl_sample *s = &now[i], *b = NULL;
        uint64_t span;

        for (uint32_t k = 0; k < n_before; k++)
            if (strcmp(before[k].daemon, s->daemon) == 0)
                b = &before[k];
        span = b ? s->at_ns - b->at_ns : s->up_ns;
        if (span > out->seconds_ns)
            out->seconds_ns = span;
        if (strcmp(s->daemon, "k3-trunkd") == 0) {
            out->trunk_bytes = grown(s, b, "read_bytes");
        } else if (strcmp(s->daemon, "k3-expertd") == 0) {
            out->expert_bytes = grown(s, b, "read_bytes");
        } else if (strcmp(s->daemon, "k3-computed") == 0) {
            out->has_computed = true;
            out->trunk_waits = grown(s, b, "trunk_waits");
            out->demands = grown(s, b, "expert_demands");
            out->hits = grown(s, b, "expert_hits");
            out->passes = grown(s, b, "passes");
            out->tokens = grown(s, b, "tokens_generated");
            out->pass_ns = grown(s, b, "pass_ns");
            out->trunk_wait_ns = grown(s, b, "trunk_wait_ns");
            out->expert_wait_ns = grown(s, b, "expert_wait_ns");
            if (out->pass_ns > out->trunk_wait_ns + out->expert_wait_ns)
                out->arithmetic_ns = out->pass_ns - out->trunk_wait_ns - out->expert_wait_ns;
        }
    }
}

void k3_ctl_summary_json(const struct k3_ctl_summary *s, cJSON *to)
{
    const struct { const char *name; uint64_t v; } row[] = {
        { "trunk_read_bytes", s->trunk_bytes }, { "expert_read_bytes", s->expert_bytes },
        { "interval_ns", s->seconds_ns },       { "trunk_waits", s->trunk_waits },
        { "experts_demanded", s->demands },     { "experts_hit", s->hits },
        { "passes_done", s->passes },           { "tokens", s->tokens },
        { "time_in_passes_ns", s->pass_ns },    { "waiting_for_trunk_ns", s->trunk_wait_ns },
        { "waiting_for_experts_ns", s->expert_wait_ns }, { "computing_ns", s->arithmetic_ns },
    };

    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        char text[24];

        snprintf(text, sizeof(text), "%" PRIu64, row[i].v);
        cJSON_AddRawToObject(to, row[i].name, text);
    }
}
