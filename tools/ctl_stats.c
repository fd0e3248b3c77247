/* k3ctl stats: the table, --json, --prometheus.  Reads pages, asks nobody.  --watch of the table is in ctl_watch.c. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "ipc/stats_json.h"
#include "tools/ctl.h"

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

const char *k3_ctl_bytes(char out[32], double v)
{
    if (v >= 1e9)
        snprintf(out, 32, "%.2f GB", v / 1e9);
    else if (v >= 1e6)
        snprintf(out, 32, "%.2f MB", v / 1e6);
    else if (v >= 1e3)
        snprintf(out, 32, "%.1f kB", v / 1e3);
    else
        snprintf(out, 32, "%.0f B", v);
    return out;
}

const char *k3_ctl_ns(char out[32], double v)
{
    if (v >= 1e10)
        snprintf(out, 32, "%.1f s", v / 1e9);
    else if (v >= 1e5)
        snprintf(out, 32, "%.2f ms", v / 1e6);
    else
        snprintf(out, 32, "%.4f ms", v / 1e6);
    return out;
}

const char *k3_ctl_age(char out[32], uint64_t ns)
{
    uint64_t s = ns / 1000000000u;

    if (s < 60)
        snprintf(out, 32, "%.1f s", (double)ns / 1e9);
    else if (s < 3600)
        snprintf(out, 32, "%" PRIu64 "m%02us", s / 60, (unsigned)(s % 60));
    else
        snprintf(out, 32, "%" PRIu64 "h%02um", s / 3600, (unsigned)(s / 60 % 60));
    return out;
}

static const char *human(char out[32], const char *unit, double v)
{
    if (strcmp(unit, "bytes") == 0)
        return k3_ctl_bytes(out, v);
    if (strcmp(unit, "ns") == 0)
        return k3_ctl_ns(out, v);
    snprintf(out, 32, "%.0f", v);
    return out;
}

/* Upper bound of the bucket that holds the given share of all values. */
static double quantile(const uint64_t *bucket, uint64_t count, double share)
{
    uint64_t seen = 0;

    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++) {
        seen += bucket[b];
        if (seen > 0 && (double)seen >= share * (double)count)
            return b ? (double)(((uint64_t)1 << (b - 1)) - 1) * 2 + 1 : 0;
    }
    return 0;
}

static void print_histogram(FILE *f, const struct k3_ctl_value *v)
{
    uint64_t count = 0;
    char mean[32], half[32], most[32];

    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        count += v->v[b];
    if (count == 0) {
        fprintf(f, "  %-24s %14s  %s\n", v->name, "none", v->help);
        return;
    }
    fprintf(f, "  %-24s %14s  mean, half up to %s, 99%% up to %s, %" PRIu64 " times; %s\n", v->name,
           human(mean, v->unit, (double)v->v[K3_HIST_BUCKETS] / (double)count),
           human(half, v->unit, quantile(v->v, count, 0.5)),
           human(most, v->unit, quantile(v->v, count, 0.99)), count, v->help);
}

static void print_value(FILE *f, const struct k3_ctl_value *v, const struct k3_ctl_value *before,
                        double seconds)
{
    char text[32], rate[48] = "", number[32];
    double grown = (double)v->v[0];

    if (before && before->v[0] <= v->v[0])
        grown -= (double)before->v[0];
    if (v->kind == K3_COUNTER && seconds > 0) {
        if (strcmp(v->unit, "bytes") == 0)
            snprintf(rate, sizeof(rate), "%s/s", k3_ctl_bytes(number, grown / seconds));
        else if (strcmp(v->unit, "ns") == 0)
            snprintf(rate, sizeof(rate), "%.1f %%", grown / seconds / 1e7);
        else
            snprintf(rate, sizeof(rate), "%.1f/s", grown / seconds);
    }
    fprintf(f, "  %-24s %14s %13s  %s\n", v->name, human(text, v->unit, (double)v->v[0]), rate,
           v->help);
}

void k3_ctl_print_daemon(FILE *f, const struct k3_ctl_sample *s, const struct k3_ctl_sample *before)
{
    char up[32];
    double seconds;

    if (before && (before->generation != s->generation || before->pid != s->pid))
        before = NULL;
    seconds = (double)(before ? s->at_ns - before->at_ns : s->up_ns) / 1e9;
    fprintf(f, "%s  %s  pid %u  generation %u  started %s ago", s->daemon, k3_ctl_liveness(s), s->pid,
           s->generation, k3_ctl_age(up, s->up_ns));
    if (s->alive)
        fprintf(f, "  heartbeat %s ago", k3_ctl_age(up, s->beat_age_ns));
    putc('\n', f);
    for (uint32_t i = 0; i < s->n; i++) {
        const struct k3_ctl_value *v = &s->value[i];

        if (v->kind == K3_HISTOGRAM)
            print_histogram(f, v);
        else
            print_value(f, v, before ? k3_ctl_find(before, v->name) : NULL, seconds);
    }
}

static double share(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

static void print_summary(const struct k3_ctl_opt *o, const struct k3_ctl_summary *s)
{
    char all[32], trunk[32], expert[32], rate[32], pass[32];
    double seconds = (double)s->seconds_ns / 1e9,
           bytes = (double)s->trunk_bytes + (double)s->expert_bytes;

    printf("family \"%s\", since the start, %.1f s\n", o->instance, seconds);
    printf("  read from disk    %s (trunk %s, experts %s), %s/s\n", k3_ctl_bytes(all, bytes),
           k3_ctl_bytes(trunk, (double)s->trunk_bytes), k3_ctl_bytes(expert, (double)s->expert_bytes),
           k3_ctl_bytes(rate, seconds > 0 ? bytes / seconds : 0));
    if (!s->has_computed)
        return;
    printf("  waits for trunk   %" PRIu64 "\n", s->trunk_waits);
    printf("  expert hits       %.1f %% (%" PRIu64 " of %" PRIu64 ")\n", share(s->hits, s->demands),
           s->hits, s->demands);
    printf("  tokens            %" PRIu64 "\n", s->tokens);
    printf("  passes            %" PRIu64 ", %s each; while in a pass %s/s are read\n", s->passes,
           k3_ctl_ns(pass, s->passes ? (double)s->pass_ns / (double)s->passes : 0),
           k3_ctl_bytes(rate, s->pass_ns ? bytes / ((double)s->pass_ns / 1e9) : 0));
    printf("  time of a pass    %.1f %% waiting for trunk, %.1f %% waiting for experts, %.1f %% "
           "arithmetic\n",
           share(s->trunk_wait_ns, s->pass_ns), share(s->expert_wait_ns, s->pass_ns),
           share(s->arithmetic_ns, s->pass_ns));
}

/* ---- JSON: the pages once more, as ipc/stats_json.h has them ---- */

static cJSON *make_json(const struct k3_ctl_opt *o, const struct k3_ctl_names *names,
                        const struct k3_ctl_summary *sum, struct k3_err *err)
{
    cJSON *root = cJSON_CreateObject(), *daemons;
    int rc = 0;

    cJSON_AddStringToObject(root, "instance", o->instance);
    daemons = cJSON_AddObjectToObject(root, "daemons");
    for (uint32_t i = 0; i < names->n && rc == 0; i++) {
        struct k3_stats s;

        rc = k3_stats_open(&s, o->instance, names->name[i], err);
        if (rc == 0) {
            cJSON *d = cJSON_AddObjectToObject(daemons, names->name[i]);

            cJSON_AddBoolToObject(d, "alive", k3_lock_alive(o->rundir, names->name[i]));
            k3_stats_json(&s, d);
            k3_stats_close(&s);
        } else if (rc == -ENOENT) {
            rc = 0; /* left between two looks */
        }
    }
    if (sum)
        k3_ctl_summary_json(sum, cJSON_AddObjectToObject(root, "summary"));
    if (rc == 0)
        return root;
    cJSON_Delete(root);
    return NULL;
}

static int print_json(const struct k3_ctl_opt *o, const struct k3_ctl_names *names,
                      const struct k3_ctl_summary *sum, struct k3_err *err)
{
    cJSON *root = make_json(o, names, sum, err);
    char *text = !root ? NULL : o->watch_s > 0 ? cJSON_PrintUnformatted(root) : cJSON_Print(root);

    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(root);
    return root ? 0 : err->code;
}

void k3_ctl_look_free(struct k3_ctl_look *l)
{
    for (uint32_t i = 0; i < l->n; i++)
        k3_ctl_sample_free(&l->s[i]);
    l->n = 0;
}

int k3_ctl_look(struct k3_ctl_look *l, const struct k3_ctl_opt *o, struct k3_ctl_names *names,
                struct k3_err *err)
{
    bool all = o->words.n < 2;

    l->n = 0;
    if (all)
        k3_ctl_with_pages(names, o);
    if (names->n == 0)
        return k3_no_peer(err, -ENOENT,
                          "instance \"%s\" has no statistics pages: no daemon is running; start it with: "
                          "run/k3-run up --instance %s", o->instance, o->instance);
    for (uint32_t i = 0; i < names->n; i++) {
        int rc = k3_ctl_sample(&l->s[l->n], o, names->name[i], err);

        if (rc == 0)
            l->n++;
        else if (!all || rc != -ENOENT)
            return rc;
    }
    return 0;
}

/* One look in the form that was asked for. */
static int print_look(const struct k3_ctl_opt *o, const struct k3_ctl_look *now, const struct k3_ctl_look *before,
                      const struct k3_ctl_names *names, struct k3_err *err)
{
    bool all = o->words.n < 2;
    struct k3_ctl_summary sum;

    k3_ctl_summarize(&sum, now->s, now->n, before->n ? before->s : NULL, before->n);
    if (o->json)
        return print_json(o, names, all ? &sum : NULL, err);
    if (o->prometheus) {
        k3_ctl_prometheus(stdout, o, now->s, now->n);
        return 0;
    }
    if (all)
        print_summary(o, &sum);
    for (uint32_t i = 0; i < now->n; i++)
        k3_ctl_print_daemon(stdout, &now->s[i], NULL);
    return 0;
}

int k3_ctl_stats(const struct k3_ctl_opt *o, struct k3_err *err)
{
    struct k3_ctl_look now = { .n = 0 }, before = { .n = 0 };
    struct k3_ctl_names names = { .n = 0 };
    int rc = 0;

    if (o->words.n > 1) {
        rc = k3_ctl_name(names.name[0], o->words.item[1], err);
        names.n = 1;
        if (rc < 0)
            return rc;
    }
    if (o->watch_s > 0 && !o->json && !o->prometheus)
        return k3_ctl_watch(o, &names, err);
    if (o->watch_s > 0) {
        signal(SIGINT, on_signal);
        signal(SIGTERM, on_signal);
    }
    do {
        rc = k3_ctl_look(&now, o, &names, err);
        if (rc == 0)
            rc = print_look(o, &now, &before, &names, err);
        k3_ctl_look_free(&before);
        before = now;
        now.n = 0;
        if (rc < 0 || o->watch_s <= 0 || interrupted || fflush(stdout) != 0 || ferror(stdout))
            break;
        nanosleep(&(struct timespec){ (time_t)o->watch_s,
                                      (long)((o->watch_s - (double)(time_t)o->watch_s) * 1e9) },
                  NULL);
    } while (!interrupted);
    k3_ctl_look_free(&now);
    k3_ctl_look_free(&before);
    return rc;
}

cJSON *k3_ctl_stats_all(const struct k3_ctl_opt *o, struct k3_err *err)
{
    struct k3_ctl_look now = { .n = 0 };
    struct k3_ctl_names names = { .n = 0 };
    struct k3_ctl_summary sum;
    cJSON *root = NULL;

    if (k3_ctl_look(&now, o, &names, err) == 0) {
        k3_ctl_summarize(&sum, now.s, now.n, NULL, 0);
        root = make_json(o, &names, &sum, err);
    }
    k3_ctl_look_free(&now);
    return root;
}
