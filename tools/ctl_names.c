/* Which daemons there are in an instance. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/ctl.h"

/* The keeper and a router that serves may be named, and are members where k3-run lists it, but not every instance has them. */
static const char *const weight_daemons[] = { "k3-trunkd", "k3-expertd", "k3-computed", "k3-keeper", "k3-router" };
#define N_WEIGHT 3
#define N_NAMED 5

int k3_ctl_name(char out[32], const char *word, struct k3_err *err)
{
    for (int i = 0; i < N_NAMED; i++)
        if (strcmp(word, weight_daemons[i]) == 0 || strcmp(word, weight_daemons[i] + 3) == 0) {
            snprintf(out, 32, "%s", weight_daemons[i]);
            return 0;
        }
    return k3_refuse(err, -EINVAL, "daemon \"%.40s\": must be trunkd, expertd, computed, router or keeper", word);
}

static void add(struct k3_ctl_names *l, const char *name, size_t len)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (strlen(l->name[i]) == len && strncmp(l->name[i], name, len) == 0)
            return;
    if (l->n == K3_CTL_DAEMONS || len >= sizeof(l->name[0]))
        return;
    memcpy(l->name[l->n], name, len);
    l->name[l->n++][len] = 0;
}

void k3_ctl_members(struct k3_ctl_names *out, const struct k3_ctl_opt *o)
{
    char path[600], line[512];
    FILE *f;

    out->n = 0;
    snprintf(path, sizeof(path), "%s/k3-run.members", o->rundir);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        size_t len = strcspn(line, " \n");

        if (len)
            add(out, line, len);
    }
    if (f)
        fclose(f);
    if (out->n == 0)
        for (int i = 0; i < N_WEIGHT; i++)
            add(out, weight_daemons[i], strlen(weight_daemons[i]));
}

void k3_ctl_with_pages(struct k3_ctl_names *out, const struct k3_ctl_opt *o)
{
    char prefix[64];
    DIR *d = opendir("/dev/shm");
    struct dirent *e;
    size_t n;
    struct k3_ctl_names found = { .n = 0 };

    out->n = 0;
    snprintf(prefix, sizeof(prefix), "k3.%u.%s.", (unsigned)geteuid(), o->instance);
    n = strlen(prefix);
    while (d && (e = readdir(d)) != NULL) {
        size_t len = strlen(e->d_name);

        if (len > n + 6 && strncmp(e->d_name, prefix, n) == 0 &&
            strcmp(e->d_name + len - 6, ".stats") == 0)
            add(&found, e->d_name + n, len - n - 6);
    }
    if (d)
        closedir(d);
    for (int i = 0; i < N_WEIGHT; i++) /* in the order of the data */
        for (uint32_t k = 0; k < found.n; k++)
            if (strcmp(found.name[k], weight_daemons[i]) == 0)
                add(out, weight_daemons[i], strlen(weight_daemons[i]));
    for (uint32_t k = 0; k < found.n; k++)
        add(out, found.name[k], strlen(found.name[k]));
}
