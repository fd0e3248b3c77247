/* tests/unit/cpus_test.c: k3-computed/cpus.c on recorded trees of /sys and /proc. */
#include "k3-computed/cpus.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/model_files.h"

static char root[64];
static struct k3_cpus c;

static void put(const char *path, const char *text)
{
    k3_test_put_tree(root, path, text);
}

static void siblings(uint32_t cpu, const char *list)
{
    char path[128];

    snprintf(path, sizeof(path), "sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", cpu);
    put(path, list);
}

static int make_root(void **state)
{
    (void)state;
    k3_test_dir(root);
    return 0;
}

static int remove_root(void **state)
{
    (void)state;
    k3_test_dir_remove(root);
    return 0;
}

static void cores_are(const char *allowed, uint32_t n_cpus, uint32_t n_cores, const uint32_t *first)
{
    k3_cpus_read(&c, root, allowed);
    assert_int_equal(c.n_cpus, n_cpus);
    assert_int_equal(c.n_cores, n_cores);
    assert_int_equal(c.core[0], 0);
    assert_int_equal(c.core[n_cores], n_cpus);
    for (uint32_t i = 0; i < n_cores; i++)
        assert_int_equal(c.cpu[c.core[i]], first[i]);
}

static void siblings_far_apart(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 8; i++) { /* 8 CPUs on 4 cores, numbered as large servers do */
        char list[16];

        snprintf(list, sizeof(list), "%u,%u\n", i % 4, i % 4 + 4);
        siblings(i, list);
    }
    cores_are("0-7", 8, 4, (uint32_t[]){ 0, 1, 2, 3 });
    assert_int_equal(c.n_threads, 4);
    assert_int_equal(c.n_quota, K3_CPUS_NO_QUOTA);
    assert_int_equal(c.cpu[c.core[1] + 1], 5); /* the other CPU of the second core */
    cores_are("2-5", 4, 4, (uint32_t[]){ 4, 5, 2, 3 }); /* no two of one core: all count */
    assert_int_equal(c.n_threads, 4);
    cores_are("3,7", 2, 1, (uint32_t[]){ 3 });
    assert_int_equal(c.n_threads, 1);
}

static void siblings_side_by_side(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        char list[16];

        snprintf(list, sizeof(list), "%u-%u\n", i / 2 * 2, i / 2 * 2 + 1);
        siblings(i, list);
    }
    siblings(6, "6\n"); /* and two small cores of one thread each */
    siblings(7, "7\n");
    cores_are("0-7", 8, 5, (uint32_t[]){ 0, 2, 4, 6, 7 });
    cores_are("1,3,6-7", 4, 4, (uint32_t[]){ 1, 3, 6, 7 });
    cores_are("5", 1, 1, (uint32_t[]){ 5 });
}

static void without_topology_each_cpu_is_a_core(void **state)
{
    (void)state;
    cores_are("0-2,64", 4, 4, (uint32_t[]){ 0, 1, 2, 64 });
    siblings(1, "garbage\n");
    cores_are("0-2,64", 4, 4, (uint32_t[]){ 0, 1, 2, 64 });
    cores_are("", 1, 1, (uint32_t[]){ 0 });
    k3_cpus_read(&c, root, "0-4294967295"); /* a list without sense ends somewhere */
    assert_int_equal(c.n_cpus, K3_CPUS_MAX);
}

static void quota_of_all_ancestors(void **state)
{
    (void)state;
    put("proc/self/cgroup", "12:cpuset:/\n4:cpu,cpuacct:/box/x\n0::/a/b\n");
    put("proc/self/mountinfo",
        "30 25 0:27 / /v2 rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        "33 25 0:29 /box /v1 rw - cgroup cgroup rw,cpu,cpuacct\n"
        "34 25 0:30 / /none rw - cgroup cgroup rw,cpuset\n");
    assert_int_equal(k3_cpus_quota(root, 64), 64); /* no file: no limit */
    put("v2/a/b/cpu.max", "max 100000\n");
    assert_int_equal(k3_cpus_quota(root, 64), 64);
    put("v2/cpu.max", "4800000 100000\n"); /* root of the mount: 48 */
    assert_int_equal(k3_cpus_quota(root, 64), 48);
    put("v2/a/cpu.max", "1250000 100000\n"); /* parent: 12.5 */
    assert_int_equal(k3_cpus_quota(root, 64), 12);
    put("v1/x/cpu.cfs_quota_us", "-1\n");
    put("v1/x/cpu.cfs_period_us", "50000\n");
    assert_int_equal(k3_cpus_quota(root, 64), 12);
    put("v1/x/cpu.cfs_quota_us", "450000\n"); /* version 1, path below the mount's root: 9 */
    assert_int_equal(k3_cpus_quota(root, 64), 9);
    k3_cpus_read(&c, root, "0-3");
    assert_int_equal(c.n_threads, 4);
    assert_int_equal(c.n_quota, 9);
    k3_cpus_read(&c, root, "0-15");
    assert_int_equal(c.n_threads, 9);
    assert_int_equal(c.n_cores, 16);
    put("v2/a/b/cpu.max", "20000 100000\n"); /* a fifth of a CPU */
    assert_int_equal(k3_cpus_quota(root, 64), 1);
    assert_int_equal(k3_cpus_quota("/nonexistent", 64), 64);
}

static void too_many_threads_are_refused(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    uint32_t n = 0;

    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        siblings(i, i < 2 ? "0-1\n" : "2-3\n");
    k3_cpus_read(&c, root, "0-3");
    assert_int_equal(k3_cpus_check(&c, &n, false, &err), 0);
    assert_int_equal(n, 2); /* the default is one a core */
    assert_int_equal(k3_cpus_check(&c, &n, false, &err), 0);
    n = 3;
    assert_true(k3_cpus_check(&c, &n, false, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "--threads 3: this process may use 2 cores (4 CPUs); "));
    assert_non_null(strstr(err.text, "--force-threads"));
    assert_int_equal(k3_cpus_check(&c, &n, true, &err), 0);
    assert_int_equal(n, 3);
    c.n_quota = c.n_threads = 1;
    n = 2;
    assert_true(k3_cpus_check(&c, &n, false, &err) < 0);
    assert_non_null(strstr(err.text, "2 cores (4 CPUs) with a quota worth 1; "));
    n = 0;
    assert_int_equal(k3_cpus_check(&c, &n, false, &err), 0);
    assert_int_equal(n, 1);
}

static void this_machine_has_some(void **state)
{
    (void)state;
    k3_cpus_read(&c, "", NULL);
    assert_in_range(c.n_cpus, 1, (unsigned)sysconf(_SC_NPROCESSORS_CONF));
    assert_in_range(c.n_cores, 1, c.n_cpus);
    assert_in_range(k3_threads_default(), 1, c.n_cores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(siblings_far_apart, make_root, remove_root),
        cmocka_unit_test_setup_teardown(siblings_side_by_side, make_root, remove_root),
        cmocka_unit_test_setup_teardown(without_topology_each_cpu_is_a_core, make_root, remove_root),
        cmocka_unit_test_setup_teardown(quota_of_all_ancestors, make_root, remove_root),
        cmocka_unit_test_setup_teardown(too_many_threads_are_refused, make_root, remove_root),
        cmocka_unit_test(this_machine_has_some),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
