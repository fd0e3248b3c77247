/* k3-computed/team.c: the threads of a pass, and how many CPUs there are for them. */
#include "k3-computed/team.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE 64
#define THREADS_MAX 4096u

/* One job at a time.  A worker joins a job while it is open; the caller closes it when no index is
 * left to hand out and waits for those that have joined, never for one that is still waking up. fn
 * .. chunk    caller   plain; before the job opens (O, release); workers read after joining (J,
 * acquire) next           all      relaxed: it hands out indices and orders nothing; 0 before O
 *   word           all      number of the job | OPEN | workers in it.  O, C (close): caller.  J, L
 * (leave, release): workers bell           workers  counter of news: rung by the one that leaves a
 * closed job last; the caller sleeps on it The caller changes the fields only when the job is
 * closed and empty, and nobody joins a closed job.  The number of the job wraps; a worker that
 * slept through exactly that many may miss one, which the others then do. */
#define ACTIVE 0xffffu
#define OPEN 0x10000u
#define ONE_JOB 0x20000u

struct k3_team {
    uint32_t n_threads;
    uint32_t n_started; /* workers that run: worker number 1 .. n_started */
    struct k3_team_member *members;
    k3_team_fn *fn;
    void *arg;
    size_t n, chunk;
    _Alignas(LINE) _Atomic uint32_t word; /* workers sleep on it */
    _Atomic bool stop;
    _Alignas(LINE) _Atomic uint32_t bell;
    _Alignas(LINE) _Atomic size_t next;
};

struct k3_team_member {
    struct k3_team *team;
    pthread_t thread;
    uint32_t worker;
};

static void wait_on(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static void work(struct k3_team *t, uint32_t worker)
{
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&t->next, t->chunk, memory_order_relaxed);
        size_t end = i + t->chunk;

        if (i >= t->n)
            return;
        if (end > t->n)
            end = t->n;
        for (; i < end; i++)
            t->fn(t->arg, i, worker);
    }
}

/* Joins the job that is open, unless it is the one numbered `last`; sleeps until there is one.
 * false: the team ends. */
static bool join_job(struct k3_team *t, uint32_t last, uint32_t *number)
{
    uint32_t word = atomic_load_explicit(&t->word, memory_order_acquire); /* stop is seen with it */

    for (;;) {
        if (atomic_load_explicit(&t->stop, memory_order_relaxed))
            return false;
        if (!(word & OPEN) || (word & ~(ACTIVE | OPEN)) == last) {
            wait_on(&t->word, word);
            word = atomic_load_explicit(&t->word, memory_order_acquire);
        } else if (atomic_compare_exchange_weak_explicit(&t->word, &word, word + 1,
                                                         memory_order_acquire, /* J */
                                                         memory_order_acquire)) {
            *number = word & ~(ACTIVE | OPEN);
            return true;
        }
    }
}

static void *member_main(void *arg)
{
    struct k3_team_member *m = arg;
    struct k3_team *t = m->team;
    uint32_t number = 0; /* no job has it at the start: the first is ONE_JOB */

    while (join_job(t, number, &number)) {
        uint32_t before;

        work(t, m->worker);
        before = atomic_fetch_sub_explicit(&t->word, 1, memory_order_release); /* L */
        if (!(before & OPEN) && (before & ACTIVE) == 1) {
            atomic_fetch_add_explicit(&t->bell, 1, memory_order_release);
            wake(&t->bell, 1);
        }
    }
    return NULL;
}

int k3_team_new(struct k3_team **out, uint32_t n_threads, struct k3_err *err)
{
    struct k3_team *t;

    if (n_threads == 0)
        n_threads = k3_cpus_allowed();
    if (n_threads > THREADS_MAX)
        return k3_refuse(err, -EINVAL, "team of %u threads: at most %u", n_threads, THREADS_MAX);
    t = aligned_alloc(LINE, sizeof(*t)); /* sizeof is a multiple of its alignment */
    if (!t)
        return k3_fail(err, -ENOMEM, "team of %u threads: no memory", n_threads);
    memset(t, 0, sizeof(*t));
    t->n_threads = n_threads;
    t->members = calloc(n_threads, sizeof(*t->members));
    if (!t->members) {
        k3_team_free(t);
        return k3_fail(err, -ENOMEM, "team of %u threads: no memory", n_threads);
    }
    for (uint32_t w = 1; w < n_threads; w++) {
        struct k3_team_member *m = &t->members[w];
        int rc;

        m->team = t;
        m->worker = w;
        rc = pthread_create(&m->thread, NULL, member_main, m);
        if (rc != 0) {
            k3_team_free(t);
            return k3_fail(err, -rc,
                           "thread %u of %u could not be started: %s; give fewer --threads", w + 1,
                           n_threads, strerror(rc));
        }
        t->n_started = w;
    }
    *out = t;
    return 0;
}

void k3_team_free(struct k3_team *t)
{
    if (!t)
        return;
    if (t->n_started) {
        atomic_store_explicit(&t->stop, true, memory_order_relaxed);
        /* A new word, so that nobody falls asleep on the old one. */
        atomic_fetch_add_explicit(&t->word, ONE_JOB, memory_order_release);
        wake(&t->word, INT_MAX);
        for (uint32_t w = 1; w <= t->n_started; w++)
            pthread_join(t->members[w].thread, NULL);
    }
    free(t->members);
    free(t);
}

uint32_t k3_team_size(const struct k3_team *t)
{
    return t->n_threads;
}

void k3_team_run(struct k3_team *t, size_t n, size_t chunk, k3_team_fn *fn, void *arg)
{
    size_t helpers;
    uint32_t word;

    if (chunk == 0)
        chunk = 1;
    if (t->n_threads == 1 || n <= chunk) { /* waking the others would cost more than it gives */
        for (size_t i = 0; i < n; i++)
            fn(arg, i, 0);
        return;
    }
    t->fn = fn;
    t->arg = arg;
    t->n = n;
    t->chunk = chunk;
    atomic_store_explicit(&t->next, 0, memory_order_relaxed);
    word = atomic_load_explicit(&t->word, memory_order_relaxed); /* closed and empty: ours alone */
    atomic_store_explicit(&t->word, (word + ONE_JOB) | OPEN, memory_order_release); /* O */
    helpers = (n - 1) / chunk; /* chunks besides our first */
    wake(&t->word, helpers < t->n_started ? (int)helpers : (int)t->n_started);
    work(t, 0);
    atomic_fetch_and_explicit(&t->word, ~OPEN, memory_order_relaxed); /* C */
    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->bell, memory_order_acquire);

        if ((atomic_load_explicit(&t->word, memory_order_acquire) & ACTIVE) == 0) /* pairs with L */
            return;
        wait_on(&t->bell, seen);
    }
}

/* ---- CPUs ---- */

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
    /* Rounded down: a team that meets after every job loses more to one throttled member than to a
     * missing one. */
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
static void quota_below(const char *mount, const char *root, const char *own, uint32_t *cpus)
{
    char dir[PATH_MAX];
    size_t base = strlen(mount), root_len = strcmp(root, "/") == 0 ? 0 : strlen(root);

    /* A mount in a container shows the part below root alone; a path outside of it cannot be seen.
     */
    if (strncmp(own, root, root_len) == 0 && (own[root_len] == '/' || own[root_len] == 0))
        own += root_len;
    else
        own = "";
    if ((size_t)snprintf(dir, sizeof(dir), "%s%s", mount, own) >= sizeof(dir))
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

uint32_t k3_team_quota(const char *cgroup_file, const char *mountinfo_file, uint32_t n_cpus)
{
    FILE *f = fopen(mountinfo_file, "re");
    char *line = NULL;
    size_t cap = 0;

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
            quota_below(mount, root, own, &n_cpus);
    }
    free(line);
    if (f)
        fclose(f);
    return n_cpus;
}

static uint32_t cpus_in_mask(void)
{
    for (int n = 1024; n <= 1 << 20; n *= 2) { /* the kernel refuses a mask smaller than its own */
        cpu_set_t *set = CPU_ALLOC(n);
        size_t size = CPU_ALLOC_SIZE(n);
        int count = -1;

        if (!set)
            break;
        if (sched_getaffinity(0, size, set) == 0)
            count = CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (count > 0)
            return (uint32_t)count;
    }
    return 1;
}

uint32_t k3_cpus_allowed(void)
{
    return k3_team_quota("/proc/self/cgroup", "/proc/self/mountinfo", cpus_in_mask());
}

int k3_threads_check(uint32_t *n_threads, bool force, struct k3_err *err)
{
    uint32_t n_cpus = k3_cpus_allowed();

    if (*n_threads == 0)
        *n_threads = n_cpus;
    if (*n_threads > n_cpus && !force)
        return k3_refuse(err, -EINVAL, "--threads %u: this process may use %u CPUs; more threads only slow it down "
                         "(--force-threads to insist)", *n_threads, n_cpus);
    return 0;
}
