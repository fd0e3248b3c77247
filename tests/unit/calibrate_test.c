/* Which cell is chosen, what is remembered of drives, and one real measurement. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/calibrate.h"

#define MIB (1u << 20)

/* ---- the choice ---- */

/* A drive: reads of `latency` seconds each, up to `most` bytes a second together. */
static size_t curve(struct k3_io_cell *cell, double latency, double most)
{
    size_t n = 0;

    for (uint32_t bytes = MIB; bytes <= 64 * MIB; bytes *= 2)
        for (uint32_t block = MIB; block <= 4 * MIB; block *= 4) {
            double rate;

            if (bytes < block)
                continue;
            rate = bytes / (latency + block / most);
            cell[n++] = (struct k3_io_cell){ bytes / block, block, rate < most ? rate : most };
        }
    return n;
}

static void the_least_that_fills_the_drive(void **state)
{
    struct k3_io_cell cell[14];
    struct k3_io_rate r;
    size_t n = curve(cell, 1e-3, 7e9);

    (void)state;
    assert_true(k3_io_rate_choose(cell, n, &r)); /* 4 ms of 7 GB/s are 28 MB */
    assert_int_equal(r.depth, 8);
    assert_int_equal(r.block_bytes, 4 * MIB);
    assert_true(r.bytes_per_s == 7e9);
    assert_true(r.bytes_per_s_depth1 < 3e9 && r.bytes_per_s_depth1 > 2e9);
    n = curve(cell, 5e-3, 8e9); /* one that needs much in flight */
    assert_true(k3_io_rate_choose(cell, n, &r));
    assert_int_equal((uint64_t)r.depth * r.block_bytes, 64 * MIB);
    n = curve(cell, 1e-4, 5e8); /* fills soon: few bytes are 4 ms */
    assert_true(k3_io_rate_choose(cell, n, &r));
    assert_int_equal(r.depth, 2);
    assert_int_equal(r.block_bytes, MIB);
    n = curve(cell, 1e-5, 1e8); /* and one read is enough for this one: rate 99% at depth 1 */
    assert_true(k3_io_rate_choose(cell, n, &r));
    assert_int_equal(r.depth, 1);
    assert_int_equal(r.block_bytes, MIB);
    assert_true(r.bytes_per_s_depth1 == r.bytes_per_s);
}

static void faster_than_can_be_kept_in_flight(void **state)
{
    struct k3_io_cell cell[14];
    struct k3_io_rate r;
    size_t n = curve(cell, 1e-6, 4e10);

    (void)state;
    assert_true(k3_io_rate_choose(cell, n, &r)); /* the most, of the largest blocks */
    assert_int_equal(r.depth, 16);
    assert_int_equal(r.block_bytes, 4 * MIB);
}

/* One cell that was disturbed, and one that had luck, do not decide. */
static void noise(void **state)
{
    struct k3_io_cell cell[14];
    struct k3_io_rate r;
    size_t n = curve(cell, 1e-3, 7e9);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = (uint64_t)cell[i].depth * cell[i].block_bytes;

        if (bytes == 32 * MIB)
            cell[i].bytes_per_s *= 0.6;
        if (bytes == 16 * MIB && cell[i].depth == 16)
            cell[i].bytes_per_s *= 1.1;
    }
    assert_true(k3_io_rate_choose(cell, n, &r));
    assert_int_equal(r.depth, 8);
    assert_int_equal(r.block_bytes, 4 * MIB);
}

static void cells_that_were_not_measured(void **state)
{
    struct k3_io_cell cell[14];
    struct k3_io_rate r;
    size_t n = curve(cell, 1e-3, 2e8);

    (void)state;
    for (size_t i = 4; i < n; i++)
        cell[i].bytes_per_s = 0;
    assert_true(k3_io_rate_choose(cell, n, &r));
    assert_true(r.depth * (uint64_t)r.block_bytes <= 4 * MIB);
    for (size_t i = 0; i < n; i++)
        cell[i].bytes_per_s = 0;
    assert_false(k3_io_rate_choose(cell, n, &r));
}

static void enough_to_be_believed(void **state)
{
    struct k3_io_cell cell[14];
    size_t n = curve(cell, 1e-3, 7e9);

    (void)state;
    assert_true(k3_io_rate_enough(cell, n));
    for (size_t i = 0; i < n; i++)
        if ((uint64_t)cell[i].depth * cell[i].block_bytes > 8 * MIB)
            cell[i].bytes_per_s = 0;
    assert_false(k3_io_rate_enough(cell, n)); /* a fast drive, and the time ran out */
    n = curve(cell, 1e-3, 1.5e8);             /* a disk that turns */
    for (size_t i = 0; i < n; i++)
        if ((uint64_t)cell[i].depth * cell[i].block_bytes > 4 * MIB)
            cell[i].bytes_per_s = 0;
    assert_true(k3_io_rate_enough(cell, n));
    for (size_t i = 0; i < n; i++)
        cell[i].bytes_per_s = 0;
    assert_false(k3_io_rate_enough(cell, n));
}

/* ---- what is remembered ---- */

#define NOW 1000000000
static const struct k3_io_rate some = { 8, 4 * MIB, 3e9, 1e9, false };

static void found_again(void **state)
{
    struct k3_io_rate r = { 0 }, other = { 2, MIB, 5e8, 4e8, false };
    char *a = k3_io_rates_with("", "ext4:disk:a", &some, NOW), *b, *c;

    (void)state;
    assert_int_equal(k3_io_rates_find("", "ext4:disk:a", NOW, &r), -ENOENT);
    assert_int_equal(k3_io_rates_find(a, "ext4:disk:a", NOW, &r), 0);
    assert_true(r.depth == 8 && r.block_bytes == 4 * MIB && r.bytes_per_s == 3e9 && r.bytes_per_s_depth1 == 1e9);
    assert_true(r.remembered);
    assert_int_equal(k3_io_rates_find(a, "ext4:disk:b", NOW, &r), -ENOENT);
    assert_int_equal(k3_io_rates_find(a, "ext4:disk", NOW, &r), -ENOENT);
    b = k3_io_rates_with(a, "xfs:disk:b", &other, NOW);
    c = k3_io_rates_with(b, "ext4:disk:a", &other, NOW + 5); /* in the place of the old line */
    assert_int_equal(k3_io_rates_find(c, "xfs:disk:b", NOW, &r), 0);
    assert_int_equal(k3_io_rates_find(c, "ext4:disk:a", NOW, &r), 0);
    assert_int_equal(r.depth, 2);
    assert_ptr_equal(strstr(strstr(c, "ext4:disk:a") + 1, "ext4:disk:a"), NULL);
    free(a);
    free(b);
    free(c);
}

static void too_old(void **state)
{
    const int64_t day = 86400;
    struct k3_io_rate r;
    char *a = k3_io_rates_with("", "k", &some, NOW), *b;

    (void)state;
    assert_int_equal(k3_io_rates_find(a, "k", NOW + K3_IO_RATE_DAYS * day, &r), 0);
    assert_int_equal(k3_io_rates_find(a, "k", NOW + K3_IO_RATE_DAYS * day + 1, &r), -ENOENT);
    assert_int_equal(k3_io_rates_find(a, "k", NOW - day, &r), 0);
    assert_int_equal(k3_io_rates_find(a, "k", NOW - day - 1, &r), -ENOENT); /* a clock that was wrong */
    b = k3_io_rates_with(a, "l", &some, NOW + 100 * day);
    assert_null(strstr(b, "\nk ")); /* it does not grow for ever */
    free(a);
    free(b);
}

static void damaged(void **state)
{
    static const char *const bad[] = {
        "k3 devices 2\nk 8 4194304 3 1 1000000000\n",
        "k 8 4194304 3 1 1000000000\n",
        "k3 devices 1\nk 8 4194304 3 1 1000000000", /* no end */
        "k3 devices 1\nk 8 4194304 3 1\n",
        "k3 devices 1\nk 8 4194304 3 1 1000000000 7\n",
        "k3 devices 1\nk 0 4194304 3 1 1000000000\n",
        "k3 devices 1\nk 257 4194304 3 1 1000000000\n",
        "k3 devices 1\nk -8 4194304 3 1 1000000000\n",
        "k3 devices 1\nk 8 4194305 3 1 1000000000\n",
        "k3 devices 1\nk 8 4096 3 1 1000000000\n",
        "k3 devices 1\nk 8 4194304 nan 1 1000000000\n",
        "k3 devices 1\nk 8 4194304 -3 1 1000000000\n",
        "k3 devices 1\nk 8 4194304 3 inf 1000000000\n",
        "k3 devices 1\nk 8 4194304 3 1 1000000000\n\n",
        "k3 devices 1\nk 8 4194304 3 1 1000000000\nx",
        "?",
    };
    struct k3_io_rate r;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char *a;

        if (k3_io_rates_find(bad[i], "k", NOW, &r) != -EPROTO)
            fail_msg("text %zu was believed", i);
        a = k3_io_rates_with(bad[i], "new", &some, NOW);
        assert_int_equal(k3_io_rates_find(a, "new", NOW, &r), 0);
        assert_int_equal(k3_io_rates_find(a, "k", NOW, &r), -ENOENT);
        free(a);
    }
}

/* ---- a real drive ---- */

static char dir[64];

static int open_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "build/t-calibrate-XXXXXX"); /* beside the programs: /tmp may be memory */
    return mkdtemp(dir) ? 0 : -1;
}

static int close_dir(void **state)
{
    char command[128];

    (void)state;
    unsetenv("XDG_CACHE_HOME");
    snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    return system(command);
}

static const char *in_dir(const char *name)
{
    static char path[3][128];
    static int at;

    at = (at + 1) % 3;
    snprintf(path[at], sizeof(path[at]), "%s/%s", dir, name);
    return path[at];
}

static void make_file(const char *path, size_t mib)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    uint8_t *block = malloc(MIB);

    assert_true(fd >= 0);
    for (size_t i = 0; i < MIB; i++)
        block[i] = (uint8_t)(i * 7 + i / 255);
    for (size_t i = 0; i < mib; i++)
        assert_int_equal(write(fd, block, MIB), MIB);
    assert_int_equal(fsync(fd), 0);
    close(fd);
    free(block);
}

static void put_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* The machine may be too busy to measure now: then once more. */
static int get(const char *const *files, struct k3_io_rate *out, struct k3_err *err)
{
    int rc = -ETIME;

    for (int i = 0; i < 60 && rc == -ETIME; i++) {
        rc = k3_io_rate_get(files, 1, out, err);
        if (rc == -ETIME) {
            assert_int_equal(out->depth, K3_IO_DEPTH_DEFAULT);
            assert_true(out->bytes_per_s == 0);
        }
    }
    return rc;
}

static void measured_once_and_remembered(void **state)
{
    const char *files[1];
    char shard[128], cache[256], old[512] = "";
    struct k3_err err = K3_ERR_INIT;
    struct k3_io_rate r, again;
    struct k3_device dev;
    FILE *f;
    int rc;

    (void)state;
    snprintf(shard, sizeof(shard), "%s", in_dir("a.safetensors"));
    make_file(shard, 80);
    files[0] = shard;
    assert_non_null(realpath(dir, cache));
    assert_int_equal(setenv("XDG_CACHE_HOME", cache, 1), 0);
    assert_int_equal(k3_device_of(shard, NULL, &dev, &err), 0);
    rc = get(files, &r, &err);
    if (rc == -EOPNOTSUPP)
        skip(); /* the tree lies in memory, or on something without direct reads */
    if (rc < 0)
        fail_msg("%s", err.text);
    assert_false(r.remembered);
    assert_true(r.bytes_per_s > 0 && r.depth >= 1 && r.depth <= 64);
    assert_int_equal(get(files, &again, &err), 0);
    assert_true(again.remembered && again.depth == r.depth && again.block_bytes == r.block_bytes);
    assert_int_equal(k3_io_rate_remembered(&dev, &again), 0);
    assert_int_equal(k3_io_rate_of_dir(dir, &again, &err), 0);
    assert_true(again.remembered);
    /* A damaged file: measured anew, and right afterwards. */
    put_text(in_dir("k3/devices"), "k3 devices 1\nrubbish\n");
    assert_int_equal(k3_io_rate_remembered(&dev, &again), -ENOENT);
    assert_int_equal(get(files, &again, &err), 0);
    assert_false(again.remembered);
    assert_int_equal(k3_io_rate_remembered(&dev, &again), 0);
    f = fopen(in_dir("k3/devices"), "r");
    assert_true(fread(old, 1, sizeof(old) - 1, f) > 0);
    fclose(f);
    assert_null(strstr(old, "rubbish"));
    /* No place to remember. */
    assert_int_equal(setenv("XDG_CACHE_HOME", "/proc/self", 1), 0);
    assert_int_equal(get(files, &again, &err), 0);
    assert_false(again.remembered);
}

static void holes_are_no_drive(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    const char *files[1];
    struct k3_io_rate r;
    char path[128];
    int fd, rc;

    (void)state;
    assert_int_equal(setenv("XDG_CACHE_HOME", "/proc/self", 1), 0);
    snprintf(path, sizeof(path), "%s", in_dir("holes"));
    make_file(path, 8);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)1 << 33), 0);
    close(fd);
    files[0] = path;
    rc = k3_io_rate_get(files, 1, &r, &err);
    if (rc == -EOPNOTSUPP)
        skip();
    assert_int_equal(rc, -ENODATA);
    assert_non_null(strstr(err.text, "67.1 MB"));
    assert_int_equal(r.depth, K3_IO_DEPTH_DEFAULT);
    assert_int_equal(r.block_bytes, K3_IO_BLOCK_DEFAULT);
    assert_true(r.bytes_per_s == 0);
}

static void what_cannot_be_measured(void **state)
{
    const char *memory = "/dev/shm/k3-t-calibrate", *none = "build/no-such-file", *directory = "build";
    struct k3_err err = K3_ERR_INIT;
    struct k3_io_rate r;

    (void)state;
    make_file(memory, 70);
    assert_int_equal(k3_calibrate(&memory, 1, 1000000, &r, &err), -EOPNOTSUPP);
    unlink(memory);
    assert_int_equal(k3_calibrate(&none, 1, 1000000, &r, &err), -ENOENT);
    assert_non_null(strstr(err.text, none));
    assert_true(k3_calibrate(&directory, 1, 1000000, &r, &err) < 0);
    assert_int_equal(k3_calibrate(&none, 0, 1000000, &r, &err), -ENODATA);
    assert_int_equal(k3_io_rate_of_dir("tests/data", &r, &err), -ENODATA);
    assert_int_equal(k3_io_rate_of_dir("build/no-such-dir", &r, &err), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_that_fills_the_drive),
        cmocka_unit_test(faster_than_can_be_kept_in_flight),
        cmocka_unit_test(noise),
        cmocka_unit_test(cells_that_were_not_measured),
        cmocka_unit_test(enough_to_be_believed),
        cmocka_unit_test(found_again),
        cmocka_unit_test(too_old),
        cmocka_unit_test(damaged),
        cmocka_unit_test_setup_teardown(measured_once_and_remembered, open_dir, close_dir),
        cmocka_unit_test_setup_teardown(holes_are_no_drive, open_dir, close_dir),
        cmocka_unit_test(what_cannot_be_measured),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
