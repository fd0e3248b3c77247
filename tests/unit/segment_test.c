/* tests/unit/segment_test.c: shm/segment.c and shm/lock.c. */
#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define INSTANCE "t-segment"
#define MIB ((uint64_t)1 << 20)

static char dir[64]; /* XDG_RUNTIME_DIR of this test */

static char *shm_path(const char *what)
{
    static char path[256];
    char name[128];

    k3_seg_name(name, sizeof(name), INSTANCE, what);
    snprintf(path, sizeof(path), "/dev/shm%s", name);
    return path;
}

static void instance_names(void **state)
{
    static const char *const bad[] = { "",    "a.b", "a/b", "../x",
                                       "a b", "ä",   "a\n", "123456789012345678901234567890123" };
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(k3_instance_check(bad[i], &err), -EINVAL);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_null(strchr(err.text, '\n'));
    }
    assert_int_equal(k3_instance_check("A-z_09", &err), 0);
    assert_int_equal(k3_instance_check("12345678901234567890123456789012", &err), 0);
}

static void create_publish_open(void **state)
{
    struct k3_seg a, b, c;
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    (void)state;
    assert_int_equal(k3_seg_open(&b, INSTANCE, "ctl", false, &err), -ENOENT);
    assert_string_equal(err.text, "");
    assert_int_equal(k3_seg_create(&a, INSTANCE, "ctl", 5000, &err), 0);
    assert_int_equal(a.base[0], 0);
    assert_int_equal(a.base[4999], 0);
    assert_int_equal(access(shm_path("ctl"), F_OK), -1); /* no name before it is complete */
    assert_false(k3_seg_is_current(&a));
    strcpy((char *)a.base, "one");
    assert_int_equal(k3_seg_publish(&a, &err), 0);
    assert_true(k3_seg_is_current(&a));
    assert_int_equal(stat(shm_path("ctl"), &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_true((uint64_t)st.st_blocks * 512 >= 5000); /* reserved, not sparse */

    assert_int_equal(k3_seg_open(&b, INSTANCE, "ctl", true, &err), 0);
    assert_string_equal((char *)b.base, "one");
    assert_int_equal(b.len_bytes, 5000);

    /* The next generation replaces the name; the old mapping lives on and is known to be old. */
    assert_int_equal(k3_seg_create(&c, INSTANCE, "ctl", 8192, &err), 0);
    strcpy((char *)c.base, "two");
    assert_int_equal(k3_seg_publish(&c, &err), 0);
    assert_false(k3_seg_is_current(&b));
    assert_string_equal((char *)b.base, "one");
    k3_seg_close(&b);
    assert_null(b.base);
    assert_int_equal(k3_seg_open(&b, INSTANCE, "ctl", false, &err), 0);
    assert_string_equal((char *)b.base, "two");
    k3_seg_unlink(INSTANCE, "ctl");
    k3_seg_unlink(INSTANCE, "ctl");
    assert_false(k3_seg_is_current(&b));
    k3_seg_close(&a);
    k3_seg_close(&b);
    k3_seg_close(&c);
    k3_seg_close(&c);
}

/* A maker that is killed before it publishes leaves nothing; one killed between link and rename
 * leaves a name that the next maker removes. */
static void killed_maker(void **state)
{
    struct k3_seg s;
    struct k3_err err = K3_ERR_INIT;
    char half[300];
    int status, fd;
    pid_t child = fork();

    (void)state;
    if (child == 0) {
        if (k3_seg_create(&s, INSTANCE, "data", 4 * MIB, NULL) != 0)
            _exit(1);
        raise(SIGKILL);
    }
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(access(shm_path("data"), F_OK), -1);
    snprintf(half, sizeof(half), "%s.new", shm_path("data"));
    fd = open(half, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(k3_seg_create(&s, INSTANCE, "data", 4096, &err), 0);
    assert_int_equal(k3_seg_publish(&s, &err), 0);
    assert_true(k3_seg_is_current(&s));
    assert_int_equal(access(half, F_OK), -1);
    k3_seg_unlink(INSTANCE, "data");
    k3_seg_close(&s);
}

static void refusals(void **state)
{
    struct k3_seg s;
    struct k3_err err = K3_ERR_INIT;
    struct statvfs fs;
    uint64_t too_much;
    int fd;

    (void)state;
    assert_int_equal(statvfs("/dev/shm", &fs), 0);
    too_much = (uint64_t)fs.f_blocks * fs.f_frsize + (uint64_t)1000000000;
    assert_int_equal(k3_seg_create(&s, INSTANCE, "trunkdata", too_much, &err), -ENOSPC);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, " GB, /dev/shm has "));
    assert_non_null(strstr(err.text, "--trunk-gb"));
    assert_int_equal(s.fd, -1);
    assert_int_equal(k3_seg_create(&s, INSTANCE, "expertdata", too_much, &err), -ENOSPC);
    assert_non_null(strstr(err.text, "--cache-gb"));
    assert_int_equal(k3_seg_create(&s, INSTANCE, "x", 0, &err), -EINVAL);
    assert_int_equal(k3_seg_create(&s, INSTANCE, "x", UINT64_MAX, &err), -EINVAL);

    /* What stands under our name but is none of ours. */
    fd = open(shm_path("x"), O_CREAT | O_RDWR, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(k3_seg_open(&s, INSTANCE, "x", false, &err), -EPROTO);
    unlink(shm_path("x"));
    assert_int_equal(symlink("/etc/passwd", shm_path("x")), 0);
    assert_int_equal(k3_seg_open(&s, INSTANCE, "x", false, &err), -ELOOP);
    unlink(shm_path("x"));
}

static void ring_is_mapped_twice(void **state)
{
    struct k3_seg s;
    struct k3_err err = K3_ERR_INIT;
    uint8_t *ring = NULL, *reader = NULL;
    uint64_t len = 4 * MIB, off = 2 * MIB;

    (void)state;
    assert_int_equal(k3_seg_create(&s, INSTANCE, "ring", off + len, &err), 0);
    assert_int_equal((uintptr_t)s.base % (2 * MIB), 0);
    assert_int_equal(k3_ring_map(&s, off, len, true, &ring, &err), 0);
    assert_int_equal((uintptr_t)ring % (2 * MIB), 0);
    assert_int_equal(k3_ring_map(&s, off, len, false, &reader, &err), 0);
    for (uint64_t i = 0; i < len; i += 1000)
        ring[i] = (uint8_t)(i * 7);
    for (uint64_t i = 0; i < len; i += 1000) {
        assert_int_equal(ring[len + i], (uint8_t)(i * 7));
        assert_int_equal(reader[len + i], (uint8_t)(i * 7));
        assert_int_equal(s.base[off + i], (uint8_t)(i * 7));
    }
    memcpy(ring + len - 3, "wrapped", 7); /* across the seam */
    assert_memory_equal(ring, "pped", 4);
    assert_int_equal(k3_ring_map(&s, off, len + 4096, true, &reader, &err), -EINVAL);
    assert_int_equal(k3_ring_map(&s, 1, 4096, true, &reader, &err), -EINVAL);
    assert_int_equal(k3_ring_map(&s, UINT64_MAX - 4095, 4096, true, &reader, &err), -EINVAL);
    assert_int_equal(k3_ring_map(&s, 0, 0, true, &reader, &err), -EINVAL);
    k3_ring_unmap(ring, len);
    k3_ring_unmap(NULL, len);
    k3_seg_close(&s);
}

/* Bytes that another process wrote before are gone afterwards, in every mapping, and the space
 * stays reserved. */
static void renewed_range_is_new(void **state)
{
    struct k3_seg s;
    struct k3_err err = K3_ERR_INIT;
    struct stat before, after;

    (void)state;
    assert_int_equal(k3_seg_create(&s, INSTANCE, "renew", 8 * MIB, &err), 0);
    memset(s.base, 0xaa, s.len_bytes);
    assert_int_equal(fstat(s.fd, &before), 0);
    assert_int_equal(k3_seg_renew(&s, 2 * MIB, 4 * MIB, &err), 0);
    assert_int_equal(fstat(s.fd, &after), 0);
    assert_true(before.st_blocks == after.st_blocks);
    assert_true(before.st_size == after.st_size);
    assert_int_equal(s.base[2 * MIB - 1], 0xaa);
    for (uint64_t i = 2 * MIB; i < 6 * MIB; i += 512)
        assert_int_equal(s.base[i], 0);
    assert_int_equal(s.base[6 * MIB], 0xaa);
    assert_int_equal(k3_seg_renew(&s, 0, 0, &err), 0);
    assert_int_equal(k3_seg_renew(&s, 100, 4096, &err), -EINVAL);
    assert_int_equal(k3_seg_renew(&s, 8 * MIB, 4096, &err), -EINVAL);
    assert_int_equal(k3_seg_renew(&s, 4096, UINT64_MAX, &err), -EINVAL);
    k3_seg_close(&s);
}

static void collapse_keeps_bytes(void **state)
{
    struct k3_seg s;
    struct k3_err err = K3_ERR_INIT;
    uint64_t huge, len = 16 * MIB;

    (void)state;
    assert_int_equal(k3_seg_create(&s, INSTANCE, "huge", len, &err), 0);
    for (uint64_t i = 0; i < len; i += 4096)
        s.base[i] = (uint8_t)(i >> 12);
    huge = k3_seg_collapse(s.base, len);
    assert_true(huge <= len && huge % (2 * MIB) == 0);
    print_message("%llu of %llu bytes in huge pages\n", (unsigned long long)huge,
                  (unsigned long long)len);
    for (uint64_t i = 0; i < len; i += 4096)
        assert_int_equal(s.base[i], (uint8_t)(i >> 12));
    k3_seg_close(&s);
}

static void run_directory(void **state)
{
    char path[256], want[256];
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    (void)state;
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, false, &err), -ENOENT);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), 0);
    snprintf(want, sizeof(want), "%s/k3/" INSTANCE, dir);
    assert_string_equal(path, want);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, false, &err), 0);
    chmod(path, 0755);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), -EPERM);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    rmdir(path);
    assert_int_equal(symlink("/tmp", path), 0);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), -EPERM);
    unlink(path);
    assert_int_equal(k3_rundir(path, sizeof(path), "a/b", true, &err), -EINVAL);
    setenv("XDG_RUNTIME_DIR",
           "/tmp/a-path-that-is-much-too-long-for-the-path-of-a-socket/in-a-directory-of-the-run",
           1);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), -ENAMETOOLONG);
    setenv("XDG_RUNTIME_DIR", "not-absolute", 1);
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, false, &err) == 0 ? 0 : -ENOENT,
                     access(path, F_OK) == 0 ? 0 : -ENOENT);
    assert_int_equal(strncmp(path, "/tmp/k3-", 8), 0);
    setenv("XDG_RUNTIME_DIR", dir, 1);
}

static void locks(void **state)
{
    char path[256], text[64] = "", file[300];
    struct k3_err err = K3_ERR_INIT;
    uint32_t gen = 0;
    int fd = -1, fd2 = -1, status, to[2];
    pid_t child;
    FILE *f;

    (void)state;
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), 0);
    assert_false(k3_lock_alive(path, "k3-x"));
    assert_int_equal(k3_lock_take(&fd, &gen, path, "k3-x", &err), 0);
    assert_int_equal(gen, 1);
    assert_true(k3_lock_alive(path, "k3-x"));
    k3_lock_drop(&fd);
    assert_int_equal(fd, -1);
    assert_false(k3_lock_alive(path, "k3-x"));
    assert_int_equal(k3_lock_take(&fd, &gen, path, "k3-x", &err), 0);
    assert_int_equal(gen, 2);

    /* Another process is refused, told who has it, and counts nothing. */
    assert_int_equal(pipe(to), 0);
    child = fork();
    if (child == 0) {
        close(fd); /* the lock belongs to the open file, which the child shares */
        _exit(k3_lock_take(&fd2, &gen, path, "k3-x", &err) == -EBUSY &&
                      err.exit_status == K3_EXIT_REFUSED && strstr(err.text, "already running")
                  ? 0
                  : 1);
    }
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    snprintf(file, sizeof(file), "%s/k3-x.lock", path);
    f = fopen(file, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    fclose(f);
    snprintf(file, sizeof(file), "2 %d\n", (int)getpid());
    assert_string_equal(text, file);
    k3_lock_drop(&fd);

    /* The kernel drops the lock of a killed process. */
    child = fork();
    if (child == 0) {
        if (k3_lock_take(&fd, &gen, path, "k3-x", NULL) != 0 || write(to[1], "x", 1) != 1)
            _exit(1);
        pause();
    }
    assert_int_equal(read(to[0], text, 1), 1);
    assert_true(k3_lock_alive(path, "k3-x"));
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    assert_false(k3_lock_alive(path, "k3-x"));
    assert_int_equal(k3_lock_take(&fd, &gen, path, "k3-x", &err), 0);
    assert_int_equal(gen, 4);

    /* A lock whose file was removed is not the lock of this name. */
    snprintf(file, sizeof(file), "%s/k3-x.lock", path);
    unlink(file);
    assert_false(k3_lock_alive(path, "k3-x"));
    assert_int_equal(k3_lock_take(&fd2, &gen, path, "k3-x", &err), 0);
    assert_int_equal(gen, 1);
    k3_lock_drop(&fd);
    k3_lock_drop(&fd2);

    /* What is in the file is input. */
    f = fopen(file, "w");
    fputs("4294967295 rubbish", f);
    fclose(f);
    assert_int_equal(k3_lock_take(&fd, &gen, path, "k3-x", &err), 0);
    assert_int_equal(gen, 1);
    k3_lock_drop(&fd);
    close(to[0]);
    close(to[1]);
    unlink(file);
    rmdir(path);
}

/* Probing never makes a taker fail: it retries for half a second. */
static void probes_do_not_disturb(void **state)
{
    char path[256];
    struct k3_err err = K3_ERR_INIT;
    pid_t child;
    int status, fd;
    uint32_t gen;
    char file[300];

    (void)state;
    assert_int_equal(k3_rundir(path, sizeof(path), INSTANCE, true, &err), 0);
    child = fork();
    if (child == 0) {
        for (;;)
            k3_lock_alive(path, "k3-y");
    }
    for (int i = 0; i < 200; i++) {
        assert_int_equal(k3_lock_take(&fd, &gen, path, "k3-y", &err), 0);
        assert_int_equal(gen, i + 1);
        k3_lock_drop(&fd);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    snprintf(file, sizeof(file), "%s/k3-y.lock", path);
    unlink(file);
    rmdir(path);
}

static int set_up(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/k3-segment-test-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    return setenv("XDG_RUNTIME_DIR", dir, 1);
}

static int tear_down(void **state)
{
    char k3[80];

    (void)state;
    snprintf(k3, sizeof(k3), "%s/k3", dir);
    rmdir(k3);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(instance_names),       cmocka_unit_test(create_publish_open),
        cmocka_unit_test(killed_maker),         cmocka_unit_test(refusals),
        cmocka_unit_test(ring_is_mapped_twice), cmocka_unit_test(renewed_range_is_new),
        cmocka_unit_test(collapse_keeps_bytes), cmocka_unit_test(run_directory),
        cmocka_unit_test(locks),                cmocka_unit_test(probes_do_not_disturb),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
