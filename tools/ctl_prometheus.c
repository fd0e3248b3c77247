/* k3ctl stats --prometheus: k3_<daemon>_<name>{instance="..."}, text format 0.0.4. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/ctl.h"

static void print_help(const char *text)
{
    for (; *text; text++) {
        if (*text == '\\' || *text == '\n')
            putchar('\\');
        putchar(*text == '\n' ? 'n' : *text);
    }
}

static void print_histogram(const char *name, const char *instance, const struct k3_ctl_value *v)
{
    uint64_t seen = 0;
    unsigned last = 0;

    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        if (v->v[b])
            last = b;
    for (unsigned b = 0; b <= last && b < K3_HIST_BUCKETS - 1; b++) {
        seen += v->v[b];
        printf("%s_bucket{instance=\"%s\",le=\"%" PRIu64 "\"} %" PRIu64 "\n", name, instance,
               b ? (((uint64_t)1 << (b - 1)) - 1) * 2 + 1 : 0, seen);
    }
    seen = 0;
    for (unsigned b = 0; b < K3_HIST_BUCKETS; b++)
        seen += v->v[b];
    printf("%s_bucket{instance=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name, instance, seen);
    printf("%s_sum{instance=\"%s\"} %" PRIu64 "\n", name, instance, v->v[K3_HIST_BUCKETS]);
    printf("%s_count{instance=\"%s\"} %" PRIu64 "\n", name, instance, seen);
}

void k3_ctl_prometheus(const struct k3_ctl_opt *o, const struct k3_ctl_sample *s, uint32_t n)
{
    static const char *const kind[] = { "counter", "gauge", "histogram" };

    puts("# HELP k3_up whether the daemon holds its lock\n# TYPE k3_up gauge");
    for (uint32_t i = 0; i < n; i++)
        printf("k3_up{instance=\"%s\",daemon=\"%s\"} %d\n", o->instance, s[i].daemon, s[i].alive);
    puts("# HELP k3_generation how often the daemon was started\n# TYPE k3_generation gauge");
    for (uint32_t i = 0; i < n; i++)
        printf("k3_generation{instance=\"%s\",daemon=\"%s\"} %u\n", o->instance, s[i].daemon,
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
            printf("# HELP %s ", name);
            print_help(v->help);
            printf(" (%s)\n# TYPE %s %s\n", v->unit, name, kind[v->kind]);
            if (v->kind == K3_HISTOGRAM)
                print_histogram(name, o->instance, v);
            else
                printf("%s{instance=\"%s\"} %" PRIu64 "\n", name, o->instance, v->v[0]);
        }
}
