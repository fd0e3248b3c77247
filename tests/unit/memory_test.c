/* tests/unit/memory_test.c: ipc/memory.c on recorded trees, and the promises of ipc/reserve.c. */
#include "ipc/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/model_files.h"

static char root[64];

static void put(const char *path, const char *text)
{
    k3_test_put_tree(root, path, text);
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

#define MEMINFO "MemTotal:       16384000 kB\nMemFree:          100 kB\nMemAvailable:    8192000 kB\nBuffers:  1 kB\n"
#define LEFT (8192000ull * 1024)

static void texts(void **state)
{
    (void)state;
    assert_true(k3_meminfo_bytes(MEMINFO, "MemAvailable") == LEFT);
    assert_true(k3_meminfo_bytes(MEMINFO, "Mem") == K3_MEMORY_NONE);
    assert_true(k3_meminfo_bytes("MemAvailable: x kB\n", "MemAvailable") == K3_MEMORY_NONE);
    assert_true(k3_meminfo_bytes("MemAvailable: 5 MB\n", "MemAvailable") == K3_MEMORY_NONE);
    assert_true(k3_meminfo_bytes("MemAvailable: 99999999999999999999 kB\n", "MemAvailable") == K3_MEMORY_NONE);
    assert_true(k3_memstat_bytes("a 1\ninactive_file 77\n", "inactive_file") == 77);
    assert_true(k3_memstat_bytes("total_inactive_file 77\n", "inactive_file") == K3_MEMORY_NONE);
    assert_true(k3_limit_bytes("max\n") == K3_MEMORY_NONE);
    assert_true(k3_limit_bytes("") == K3_MEMORY_NONE);
    assert_true(k3_limit_bytes("9223372036854771712\n") == K3_MEMORY_NONE); /* version 1 without a limit */
    assert_true(k3_limit_bytes("12 34\n") == K3_MEMORY_NONE);
    assert_true(k3_limit_bytes("4096\n") == 4096);
}

static void places(void **state)
{
    struct k3_cgroup_place p[2];

    (void)state;
    /* both versions mounted, the one of version 1 with the limits */
    assert_int_equal(k3_cgroup_places("4:memory:/a/b\n3:cpu,cpuacct:/\n0::/u\n",
                                      "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
                                      "31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", p), 2);
    assert_int_equal(p[0].version, 1);
    assert_string_equal(p[0].leaf, "/sys/fs/cgroup/memory/a/b");
    assert_string_equal(p[0].top, "/sys/fs/cgroup/memory");
    assert_int_equal(p[1].version, 2);
    assert_string_equal(p[1].leaf, "/sys/fs/cgroup/unified/u");
    /* a container: only a part of the hierarchy is mounted */
    assert_int_equal(k3_cgroup_places("4:cpu,memory:/docker/c1/inner\n",
                                      "30 25 0:26 /docker/c1 /sys/fs/cgroup/mem rw - cgroup cgroup rw,cpu,memory\n", p), 1);
    assert_string_equal(p[0].leaf, "/sys/fs/cgroup/mem/inner");
    /* a name space: the mount begins above what we may see */
    assert_int_equal(k3_cgroup_places("0::/\n", "30 25 0:26 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n", p), 1);
    assert_string_equal(p[0].leaf, "/sys/fs/cgroup");
    assert_int_equal(k3_cgroup_places("0::/../x\n", "30 25 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n", p), 1);
    assert_string_equal(p[0].leaf, "/sys/fs/cgroup");
    /* of two mounts the one that shows our group; a space in its name */
    assert_int_equal(k3_cgroup_places("0::/a\n", "1 1 0:2 /b /x rw - cgroup2 c rw\n2 1 0:2 /a /my\\040groups rw - cgroup2 c rw\n",
                                      p), 1);
    assert_string_equal(p[0].leaf, "/my groups");
    assert_int_equal(k3_cgroup_places("4:cpu:/a\n", "1 1 0:2 / /x rw - cgroup c rw,cpu\n", p), 0);
    assert_int_equal(k3_cgroup_places("", "", p), 0);
}

static void every_ancestor_counts(void **state)
{
    struct k3_memory m;
    char why[256];

    (void)state;
    put("/proc/meminfo", MEMINFO);
    k3_memory_read(root, &m);
    assert_true(m.total_bytes == 16384000ull * 1024 && m.group_bytes == K3_MEMORY_NONE);
    assert_true(k3_memory_left(&m, why, sizeof(why)) == LEFT);
    assert_string_equal(why, "MemAvailable");

    put("/proc/self/cgroup", "0::/app/k3\n");
    put("/proc/self/mountinfo", "31 25 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/app/k3/memory.max", "max\n");
    put("/sys/fs/cgroup/app/k3/memory.current", "1000\n");
    put("/sys/fs/cgroup/app/memory.max", "3000000000\n");
    put("/sys/fs/cgroup/app/memory.current", "1500000000\n");
    put("/sys/fs/cgroup/app/memory.stat", "anon 1\nfile 5\ninactive_file 500000000\nactive_file 7\n");
    k3_memory_read(root, &m);
    assert_true(m.group_bytes == 2000000000);
    assert_true(m.group_limit_bytes == 3000000000);
    assert_true(k3_memory_left(&m, why, sizeof(why)) == 2000000000);
    assert_string_equal(why, "memory.max of /sys/fs/cgroup/app");
    put("/sys/fs/cgroup/app/k3/memory.high", "1500\n");
    k3_memory_read(root, &m);
    assert_true(k3_memory_left(&m, why, sizeof(why)) == 500);
    assert_string_equal(why, "memory.high of /sys/fs/cgroup/app/k3");
    put("/sys/fs/cgroup/app/k3/memory.current", "9999\n"); /* above it already */
    k3_memory_read(root, &m);
    assert_true(k3_memory_left(&m, why, sizeof(why)) == 0);
}

static void version_one(void **state)
{
    struct k3_memory m;
    char why[256];

    (void)state;
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "7:pids:/x\n4:memory:/docker/c\n0::/\n");
    put("/proc/self/mountinfo", "31 25 0:27 /docker/c /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                "32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "700000000\n");
    put("/sys/fs/cgroup/memory/memory.stat", "inactive_file 5\ntotal_inactive_file 100000000\n");
    k3_memory_read(root, &m);
    assert_true(k3_memory_left(&m, why, sizeof(why)) == 1400000000);
    assert_string_equal(why, "memory.limit_in_bytes of /sys/fs/cgroup/memory");
}

/* ---- promises ----------------------------------------------------------------------------------------------------- */

static void promise_text(void **state)
{
    (void)state;
    assert_true(k3_reserve_parse("k3 plan 1\npromised 2147483648\n") == 2147483648u);
    assert_true(k3_reserve_parse("") == 0);
    assert_true(k3_reserve_parse("k3 plan 1\npromised 2147483648") == 0); /* half written */
    assert_true(k3_reserve_parse("k3 plan 1\npromised -5\n") == 0);
    assert_true(k3_reserve_parse("k3 plan 1\npromised 99999999999999999999\n") == 0);
    assert_true(k3_reserve_parse("k3 plan 2\npromised 5\n") == 0);
}

/* A process that holds a promise until it is told to end. */
struct holder { pid_t pid; int in, out; };
static struct holder hold(const char *instance, uint64_t bytes)
{
    int a[2], b[2];
    char c = 0;

    assert_int_equal(pipe(a) + pipe(b), 0);
    struct holder h = { .pid = fork(), .in = a[1], .out = b[0] };
    if (h.pid == 0) {
        struct k3_reservation r;

        close(a[1]);
        if (k3_reserve_open(&r, root, instance, NULL) < 0 || k3_reserve_write(&r, bytes, NULL) < 0)
            _exit(1);
        (void)!write(b[1], "x", 1);
        (void)!read(a[0], &c, 1);
        _exit(0);
    }
    close(a[0]);
    close(b[1]);
    assert_int_equal(read(h.out, &c, 1), 1);
    return h;
}
static void let_go(struct holder *h)
{
    (void)!write(h->in, "x", 1);
    close(h->in);
    close(h->out);
    waitpid(h->pid, NULL, 0);
}

static void living_promises_count(void **state)
{
    struct k3_reservation r;
    struct k3_err err = K3_ERR_INIT;
    struct holder a = hold("a", 5000000), b = hold("b", 7000000);
    char path[256];
    uint32_t n;

    (void)state;
    assert_true(k3_reserve_others("", root, "c", &n) == 12000000);
    assert_int_equal(n, 2);
    assert_true(k3_reserve_others("", root, "a", &n) == 7000000); /* not one's own */
    /* what has been taken is no longer asked for: the segments */
    snprintf(path, sizeof(path), "/k3.%u.a.trunkdata", (unsigned)geteuid());
    {
        char *text = malloc(2000001);

        memset(text, 'x', 2000000);
        text[2000000] = 0;
        put(path, text);
        free(text);
    }
    uint64_t others = k3_reserve_others("", root, "c", &n);

    assert_in_range(others, 12000000 - 2010000, 12000000 - 2000000);
    assert_int_equal(k3_reserve_open(&r, root, "a", &err), -EBUSY);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    let_go(&a);
    let_go(&b);
    assert_true(k3_reserve_others("", root, "c", &n) == 0); /* what the dead left */
    assert_int_equal(n, 0);
    assert_int_equal(k3_reserve_open(&r, root, "a", &err), 0); /* and it is in nobody's way */
    k3_reserve_close(&r, true);
    snprintf(path, sizeof(path), "%s/k3.%u.a.plan", root, (unsigned)geteuid());
    assert_int_equal(access(path, F_OK), -1);
}

/* The processes of an instance, on a recorded /proc. */
static void private_memory_is_taken(void **state)
{
    struct holder a = hold("a", 9000000);
    uint32_t n;
    FILE *f;
    char path[256];

    (void)state;
    put("/proc/17/comm", "k3-computed\n");
    put("/proc/17/cmdline", "");
    snprintf(path, sizeof(path), "%s/proc/17/cmdline", root);
    f = fopen(path, "w");
    fwrite("k3-computed\0--instance\0a\0--x", 1, 28, f);
    fclose(f);
    put("/proc/17/status", "Name: x\nRssAnon:\t    1000 kB\nRssFile: 5 kB\nRssShmem:\t     2000 kB\n");
    put("/proc/18/comm", "k3-computed\n");
    put("/proc/18/cmdline", "k3-computed");
    put("/proc/18/status", "RssAnon:\t    3000 kB\n");
    assert_true(k3_reserve_others(root, root, "c", &n) == 9000000 - 3000 * 1024);
    let_go(&a);
}

static void a_descriptor_is_handed_on(void **state)
{
    struct k3_reservation r, again, other;
    struct k3_err err = K3_ERR_INIT;
    uint32_t n;
    int fd;

    (void)state;
    assert_int_equal(k3_reserve_open(&r, root, "a", &err), 0);
    assert_int_equal(k3_reserve_adopt(&again, dup(r.fd), root, "a", &err), 0);
    assert_int_equal(k3_reserve_write(&again, 4096, &err), 0);
    k3_reserve_close(&again, false); /* the lock stays with r */
    assert_true(k3_reserve_others("", root, "b", &n) == 4096);
    fd = open("/dev/null", O_RDONLY);
    assert_int_equal(k3_reserve_adopt(&other, fd, root, "a", &err), -EINVAL);
    close(fd);
    assert_int_equal(k3_reserve_begin(&fd, root, &err), 0);
    k3_reserve_end(&fd);
    assert_int_equal(fd, -1);
    k3_reserve_clean(root, "a"); /* in use: it stays */
    assert_true(k3_reserve_others("", root, "b", &n) == 4096);
    k3_reserve_close(&r, false);
    k3_reserve_clean(root, "a");
    snprintf(r.path, sizeof(r.path), "%s/k3.%u.a.plan", root, (unsigned)geteuid());
    assert_int_equal(access(r.path, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts),
        cmocka_unit_test(places),
        cmocka_unit_test_setup_teardown(every_ancestor_counts, make_root, remove_root),
        cmocka_unit_test_setup_teardown(version_one, make_root, remove_root),
        cmocka_unit_test(promise_text),
        cmocka_unit_test_setup_teardown(living_promises_count, make_root, remove_root),
        cmocka_unit_test_setup_teardown(private_memory_is_taken, make_root, remove_root),
        cmocka_unit_test_setup_teardown(a_descriptor_is_handed_on, make_root, remove_root),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
