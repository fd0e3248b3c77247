/* k3ctl stats --prometheus: k3_<daemon>_<name>{instance="..."}, text format 0.0.4. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/ctl.h"

static void print_help(FILE *f, const char *text)
{
    for (; *text; text++) {
        if (*text == '\\' || *text == '\n')
            putc('\\', f);
        putc(*text == '\n' ? 'n' : *text, f);
    }
}

static void print_histogram(FILE *f, const char *name, const char *instance, const struct k3_ctl_value *v)
{
    uint64_t seen = 0;
    unsigned last = 0;

    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        if (v->v[b])
            last = b;
    for (unsigned b = 0; b <= last && b < K3_HIST_BUCKETS - 1; b++) {
        seen += v->v[b];
        fprintf(f, "%s_bucket{instance=\"%s\",le=\"%" PRIu64 "\"} %" PRIu64 "\n", name, instance,
               b ? (((uint64_t)1 << (b - 1)) - 1) * 2 + 1 : 0, seen);
    }
    seen = 0;
    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        seen += v->v[b];
    fprintf(f, "%s_bucket{instance=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name, instance, seen);
    fprintf(f, "%s_sum{instance=\"%s\"} %" PRIu64 "\n", name, instance, v->v[K3_HIST_BUCKETS]);
    fprintf(f, "%s_count{instance=\"%s\"} %" PRIu64 "\n", name, instance, seen);
}

void k3_ctl_prometheus(FILE *f, const struct k3_ctl_opt *o, const struct k3_ctl_sample *s, uint32_t n)
{
    static const char *const kind[] = { "counter", "gauge", "histogram" };

    fputs("# HELP k3_up whether the daemon holds its lock\n# TYPE k3_up gauge\n", f);
    for (uint32_t i = 0; i < n; i++)
        fprintf(f, "k3_up{instance=\"%s\",daemon=\"%s\"} %d\n", o->instance, s[i].daemon, s[i].alive);
    fputs("# HELP k3_generation how often the daemon was started\n# TYPE k3_generation gauge\n", f);
    for (uint32_t i = 0; i < n; i++)
        fprintf(f, "k3_generation{instance=\"%s\",daemon=\"%s\"} %u\n", o->instance, s[i].daemon,
               s[i].generation);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < s[i].n; k++) {
            const struct k3_ctl_value *v = &s[i].value[k];
            char name[96];

            snprintf(name, sizeof(name), "k3_%s_%s",
                     strncmp(s[i].daemon, "k3-", 3) == 0 ? s[i].daemon + 3 : s[i].daemon, v->name);
            for (char *p = name; *p; p++)
                if (*p == '-' || *p == '.')
                    *p = '_';
            fprintf(f, "# HELP %s ", name);
            print_help(f, v->help);
            fprintf(f, " (%s)\n# TYPE %s %s\n", v->unit, name, kind[v->kind]);
            if (v->kind == K3_HISTOGRAM)
                print_histogram(f, name, o->instance, v);
            else
                fprintf(f, "%s{instance=\"%s\"} %" PRIu64 "\n", name, o->instance, v->v[0]);
        }
}
