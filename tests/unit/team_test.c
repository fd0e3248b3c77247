/* tests/unit/team_test.c: k3-computed/team.c. */
#include "k3-computed/team.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define N_MAX 10007

struct job {
    _Atomic uint32_t done[N_MAX];
    _Atomic uint32_t by[64];
    uint32_t size;
};

static void mark(void *arg, size_t i, uint32_t worker)
{
    struct job *j = arg;

    if (worker < j->size)
        atomic_fetch_add(&j->by[worker], 1);
    atomic_fetch_add(&j->done[i], 1);
}

static void every_index_once(void **state)
{
    static struct job j;
    static const size_t sizes[] = { 0, 1, 2, 3, 7, 64, 1000, N_MAX };

    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct k3_team *t = NULL;

        assert_int_equal(k3_team_new(&t, threads, NULL), 0);
        assert_int_equal(k3_team_size(t), threads);
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (size_t chunk = 0; chunk <= 300; chunk = chunk * 2 + 1) {
                uint32_t total = 0;

                memset(&j, 0, sizeof(j));
                j.size = threads;
                k3_team_run(t, sizes[s], chunk, mark, &j);
                for (size_t i = 0; i < N_MAX; i++)
                    assert_int_equal(atomic_load(&j.done[i]), i < sizes[s]);
                for (uint32_t w = 0; w < threads; w++)
                    total += atomic_load(&j.by[w]);
                assert_int_equal(total, sizes[s]); /* no worker number beyond the team */
            }
        k3_team_free(t);
    }
}

static void add_plain(void *arg, size_t i, uint32_t worker)
{
    uint64_t *sum = arg;

    (void)worker;
    sum[i]++; /* plain memory: what one job wrote, the next must see, whoever runs it */
}

static void many_jobs_in_a_row(void **state)
{
    struct k3_team *t = NULL;
    uint64_t sum[5] = { 0 };

    (void)state;
    assert_int_equal(k3_team_new(&t, 3, NULL), 0);
    for (int n = 0; n < 20000; n++)
        k3_team_run(t, 5, 1, add_plain, sum);
    for (int i = 0; i < 5; i++)
        assert_int_equal(sum[i], 20000);
    k3_team_free(t);
}

static void nothing(void *arg, size_t i, uint32_t worker)
{
    (void)arg;
    (void)i;
    (void)worker;
}

/* A team that ends at once, or just after a job, while its threads are anywhere between waking and
 * sleeping. */
static void ends_at_any_moment(void **state)
{
    (void)state;
    for (int n = 0; n < 600; n++) {
        struct k3_team *t = NULL;

        assert_int_equal(k3_team_new(&t, 4, NULL), 0);
        for (int jobs = n % 3; jobs > 0; jobs--)
            k3_team_run(t, 8, 1, nothing, NULL);
        k3_team_free(t);
    }
}

static void too_many_threads_are_refused(void **state)
{
    struct k3_team *t = NULL;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_true(k3_team_new(&t, 100000, &err) < 0);
    assert_null(t);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
}

static double cpu_seconds(void)
{
    struct rusage r;

    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static void slow_first(void *arg, size_t i, uint32_t worker)
{
    (void)arg;
    (void)worker;
    if (i == 0)
        usleep(200000);
}

static void waiting_costs_no_cpu(void **state)
{
    struct k3_team *t = NULL;
    double before;

    (void)state;
    assert_int_equal(k3_team_new(&t, 4, NULL), 0);
    k3_team_run(t, 4, 1, slow_first, NULL);
    before = cpu_seconds();
    usleep(200000);                         /* the team waits for a job */
    k3_team_run(t, 4, 1, slow_first, NULL); /* three wait for the fourth */
    assert_true(cpu_seconds() - before < 0.1);
    k3_team_free(t);
}

static void put(const char *dir, const char *name, const char *text)
{
    char path[512];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void make_dir(const char *dir, const char *name)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void quota_of_all_ancestors(void **state)
{
    char dir[] = "/tmp/k3-team-XXXXXX", cgroup[64], mounts[64], text[512];

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(cgroup, sizeof(cgroup), "%s/cgroup", dir);
    snprintf(mounts, sizeof(mounts), "%s/mounts", dir);
    make_dir(dir, "v2");
    make_dir(dir, "v2/a");
    make_dir(dir, "v2/a/b");
    make_dir(dir, "v1");
    make_dir(dir, "v1/x");
    put(dir, "cgroup", "12:cpuset:/\n4:cpu,cpuacct:/box/x\n0::/a/b\n");
    snprintf(text, sizeof(text),
             "30 25 0:27 / %s/v2 rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
             "33 25 0:29 /box %s/v1 rw - cgroup cgroup rw,cpu,cpuacct\n"
             "34 25 0:30 / %s/none rw - cgroup cgroup rw,cpuset\n",
             dir, dir, dir);
    put(dir, "mounts", text);

    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 64); /* no file: no limit */
    put(dir, "v2/a/b/cpu.max", "max 100000\n");
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 64);
    put(dir, "v2/cpu.max", "4800000 100000\n"); /* root of the mount: 48 */
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 48);
    put(dir, "v2/a/cpu.max", "1250000 100000\n"); /* parent: 12.5 */
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 12);
    put(dir, "v1/x/cpu.cfs_quota_us", "-1\n");
    put(dir, "v1/x/cpu.cfs_period_us", "50000\n");
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 12);
    put(dir, "v1/x/cpu.cfs_quota_us", "450000\n"); /* version 1, path below the mount's root: 9 */
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 9);
    put(dir, "v2/a/b/cpu.max", "20000 100000\n"); /* a fifth of a CPU */
    assert_int_equal(k3_team_quota(cgroup, mounts, 64), 1);
    assert_int_equal(k3_team_quota("/nonexistent", mounts, 64), 64);
    assert_int_equal(k3_team_quota(cgroup, "/nonexistent", 64), 64);

    snprintf(text, sizeof(text), "rm -r %s", dir);
    assert_int_equal(system(text), 0);
}

static void some_cpu_is_allowed(void **state)
{
    (void)state;
    assert_in_range(k3_cpus_allowed(), 1, (unsigned)sysconf(_SC_NPROCESSORS_CONF));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_once),     cmocka_unit_test(many_jobs_in_a_row),
        cmocka_unit_test(ends_at_any_moment),   cmocka_unit_test(too_many_threads_are_refused),
        cmocka_unit_test(waiting_costs_no_cpu), cmocka_unit_test(quota_of_all_ancestors),
        cmocka_unit_test(some_cpu_is_allowed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
