/* k3-computed/cpus.c: the CPUs and cores that this process may use, and the quota of its control groups (cpus.h). */
#include "k3-computed/cpus.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- quota ---- */

static bool read_line(const char *path, char *buf, size_t size)
{
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(buf, (int)size, f);

    if (f)
        fclose(f);
    if (ok)
        buf[strcspn(buf, "\n")] = 0;
    return ok;
}

static void lower_to(uint32_t *cpus, long long quota, long long period)
{
    long long whole;

    if (quota <= 0 || period <= 0)
        return;
    whole = quota / period;
    if (whole < 1)
        whole = 1;
    if (whole < *cpus)
        *cpus = (uint32_t)whole;
}

/* The quota of one cgroup directory, of either version; a missing file is no limit. */
static void quota_of_dir(const char *dir, uint32_t *cpus)
{
    char path[PATH_MAX + 32], buf[128];
    long long quota = 0, period = 0;

    snprintf(path, sizeof(path), "%s/cpu.max", dir);
    if (read_line(path, buf, sizeof(buf))) {
        if (sscanf(buf, "%lld %lld", &quota, &period) == 2) /* "max 100000" is no limit */
            lower_to(cpus, quota, period);
        return;
    }
    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
    if (!read_line(path, buf, sizeof(buf)) || sscanf(buf, "%lld", &quota) != 1)
        return;
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
    if (read_line(path, buf, sizeof(buf)) && sscanf(buf, "%lld", &period) == 1)
        lower_to(cpus, quota, period);
}

static bool list_has(const char *list, const char *word)
{
    size_t len = strlen(word);

    for (const char *p = list; *p;) {
        size_t n = strcspn(p, ",");

        if (n == len && memcmp(p, word, len) == 0)
            return true;
        p += n + (p[n] == ',');
    }
    return false;
}

/* The path of this process in one hierarchy: version 2 ("0::/a/b") or the version 1 controller
 * "cpu". */
static bool own_path(const char *cgroup_file, bool v2, char *path, size_t size)
{
    FILE *f = fopen(cgroup_file, "re");
    char *line = NULL;
    size_t cap = 0;
    bool found = false;

    while (f && !found && getline(&line, &cap, f) > 0) {
        char *list = strchr(line, ':');
        char *where = list ? strchr(list + 1, ':') : NULL;

        if (!where)
            continue;
        *where++ = 0;
        where[strcspn(where, "\n")] = 0;
        list++;
        if (v2 ? *list == 0 : list_has(list, "cpu"))
            found = (size_t)snprintf(path, size, "%s", where) < size;
    }
    free(line);
    if (f)
        fclose(f);
    return found;
}

/* Lowers *cpus by the quota of our cgroup and of all its ancestors below one mount point. */
static void quota_below(const char *top, const char *mount, const char *root, const char *own, uint32_t *cpus)
{
    char dir[PATH_MAX];
    size_t base = strlen(top) + strlen(mount), root_len = strcmp(root, "/") == 0 ? 0 : strlen(root);

    /* A mount in a container shows the part below root alone; a path outside of it cannot be seen.
     */
    if (strncmp(own, root, root_len) == 0 && (own[root_len] == '/' || own[root_len] == 0))
        own += root_len;
    else
        own = "";
    if ((size_t)snprintf(dir, sizeof(dir), "%s%s%s", top, mount, own) >= sizeof(dir))
        return;
    for (;;) {
        char *slash;

        quota_of_dir(dir, cpus);
        slash = strrchr(dir, '/');
        if (strlen(dir) <= base || !slash || (size_t)(slash - dir) < base)
            return;
        *slash = 0;
    }
}

uint32_t k3_cpus_quota(const char *top, uint32_t n_cpus)
{
    char cgroup_file[PATH_MAX], mountinfo_file[PATH_MAX];
    char *line = NULL;
    size_t cap = 0;
    FILE *f;

    snprintf(cgroup_file, sizeof(cgroup_file), "%s/proc/self/cgroup", top);
    snprintf(mountinfo_file, sizeof(mountinfo_file), "%s/proc/self/mountinfo", top);
    f = fopen(mountinfo_file, "re");

    while (f && getline(&line, &cap, f) > 0) {
        /* id parent major:minor root mount-point options [fields] - type source super-options */
        char root[PATH_MAX], mount[PATH_MAX], type[32], super[1024], own[PATH_MAX];
        char *dash = strstr(line, " - ");
        bool v2;

        if (!dash || sscanf(line, "%*s %*s %*s %4095s %4095s", root, mount) != 2)
            continue;
        super[0] = 0;
        if (sscanf(dash + 3, "%31s %*s %1023s", type, super) < 1)
            continue;
        v2 = strcmp(type, "cgroup2") == 0;
        if (!v2 && (strcmp(type, "cgroup") != 0 || !list_has(super, "cpu")))
            continue;
        if (own_path(cgroup_file, v2, own, sizeof(own)))
            quota_below(top, mount, root, own, &n_cpus);
    }
    free(line);
    if (f)
        fclose(f);
    return n_cpus;
}

/* ---- cores ---- */

/* One range of a list like "0-3,8"; false at its end or where it is none. */
static bool next_range(const char **list, uint32_t *first, uint32_t *last)
{
    char *end;

    if (**list < '0' || **list > '9')
        return false;
    *first = *last = (uint32_t)strtoul(*list, &end, 10);
    if (*end == '-')
        *last = (uint32_t)strtoul(end + 1, &end, 10);
    *list = end + (*end == ',');
    return true;
}

/* The lowest CPU of the core that has `cpu`: the same number for all of them.  Without a topology each is a core. */
static uint32_t core_of(const char *root, uint32_t cpu)
{
    char path[PATH_MAX], line[4096];
    const char *list = line;
    uint32_t first, last, least = cpu;

    snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", root, cpu);
    if (read_line(path, line, sizeof(line)))
        while (next_range(&list, &first, &last))
            least = first < least ? first : least;
    return least;
}

static uint32_t cpus_in_list(const char *list, uint32_t *cpu)
{
    uint32_t n = 0, first, last;

    while (next_range(&list, &first, &last))
        for (; first <= last && n < K3_CPUS_MAX; first++)
            cpu[n++] = first;
    return n;
}

static uint32_t cpus_in_mask(uint32_t *cpu)
{
    uint32_t found = 0;

    for (int n = 1024; n <= 1 << 20 && !found; n *= 2) { /* the kernel refuses a mask smaller than its own */
        cpu_set_t *set = CPU_ALLOC(n);
        size_t size = CPU_ALLOC_SIZE(n);

        if (!set)
            break;
        if (sched_getaffinity(0, size, set) == 0)
            for (int i = 0; i < n && found < K3_CPUS_MAX; i++)
                if (CPU_ISSET_S((size_t)i, size, set))
                    cpu[found++] = (uint32_t)i;
        CPU_FREE(set);
    }
    return found;
}

struct place { uint32_t core, cpu; };

static int by_core(const void *a, const void *b)
{
    const struct place *x = a, *y = b;

    if (x->core != y->core)
        return x->core < y->core ? -1 : 1;
    return x->cpu < y->cpu ? -1 : x->cpu > y->cpu;
}

void k3_cpus_read(struct k3_cpus *out, const char *root, const char *allowed)
{
    struct place place[K3_CPUS_MAX];

    out->n_cpus = allowed ? cpus_in_list(allowed, out->cpu) : cpus_in_mask(out->cpu);
    if (out->n_cpus == 0) { /* a kernel that does not say: one there is */
        out->n_cpus = 1;
        out->cpu[0] = 0;
    }
    for (uint32_t i = 0; i < out->n_cpus; i++)
        place[i] = (struct place){ core_of(root, out->cpu[i]), out->cpu[i] };
    qsort(place, out->n_cpus, sizeof(place[0]), by_core);
    out->n_cores = 0;
    for (uint32_t i = 0; i < out->n_cpus; i++) {
        if (i == 0 || place[i].core != place[i - 1].core)
            out->core[out->n_cores++] = i;
        out->cpu[i] = place[i].cpu;
    }
    out->core[out->n_cores] = out->n_cpus;
    out->n_quota = k3_cpus_quota(root, K3_CPUS_NO_QUOTA);
    out->n_threads = out->n_cores < out->n_quota ? out->n_cores : out->n_quota;
}

int k3_cpus_check(const struct k3_cpus *c, uint32_t *n_threads, bool force, struct k3_err *err)
{
    char quota[64] = "";

    if (*n_threads == 0)
        *n_threads = c->n_threads;
    if (*n_threads <= c->n_threads || force)
        return 0;
    if (c->n_quota < c->n_cores)
        snprintf(quota, sizeof(quota), " with a quota worth %u", c->n_quota);
    return k3_refuse(err, -EINVAL, "--threads %u: this process may use %u core%s (%u CPU%s)%s; more threads only slow it down: "
                     "give at most %u (--force-threads to insist)", *n_threads, c->n_cores, c->n_cores == 1 ? "" : "s",
                     c->n_cpus, c->n_cpus == 1 ? "" : "s", quota, c->n_threads);
}

uint32_t k3_threads_default(void)
{
    struct k3_cpus c;

    k3_cpus_read(&c, "", NULL);
    return c.n_threads;
}

int k3_threads_check(uint32_t *n_threads, bool force, struct k3_err *err)
{
    struct k3_cpus c;

    k3_cpus_read(&c, "", NULL);
    return k3_cpus_check(&c, n_threads, force, err);
}
