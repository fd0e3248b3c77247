/* Which copy of a file is read: the least busy drive, good before bad. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/files.h"

#define LEN 20000
#define SEC 1000000000ull

struct rig {
    char dir[2][64]; /* on two file systems */
    char path[2][96];
    struct k3_io_files fs;
};

static void put(const char *path, size_t len)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    for (size_t i = 0; i < len; i++)
        fputc((int)(i % 251), f);
    fclose(f);
}

static void rig_open(struct rig *g)
{
    const char *paths[2] = { g->path[0], g->path[1] };
    struct k3_err err = K3_ERR_INIT;

    snprintf(g->dir[0], sizeof(g->dir[0]), "/tmp/k3-t-files-XXXXXX");
    snprintf(g->dir[1], sizeof(g->dir[1]), "/dev/shm/k3-t-files-XXXXXX");
    for (int i = 0; i < 2; i++) {
        assert_non_null(mkdtemp(g->dir[i]));
        snprintf(g->path[i], sizeof(g->path[i]), "%s/f", g->dir[i]);
        put(g->path[i], LEN);
    }
    assert_int_equal(k3_io_files_open(&g->fs, 2, &err), 0);
    if (k3_io_files_add(&g->fs, 0, paths, 2, LEN, "auto", 4096, &err) < 0 ||
        k3_io_files_add(&g->fs, 1, paths + 1, 1, LEN, "auto", 4096, &err) < 0)
        fail_msg("%s", err.text);
    k3_io_files_rates(&g->fs, 2, 1 << 20);
}

static void rig_close(struct rig *g)
{
    k3_io_files_close(&g->fs);
    for (int i = 0; i < 2; i++) {
        unlink(g->path[i]);
        rmdir(g->dir[i]);
    }
}

static void the_least_busy_drive(void **state)
{
    struct rig g;

    (void)state;
    rig_open(&g);
    assert_int_equal(g.fs.n_drives, 2);
    assert_int_equal(g.fs.n_used, 3);
    assert_int_equal(k3_io_files_depth(&g.fs), 4);
    assert_int_equal(g.fs.drive[0].rate.depth, 2);
    assert_string_equal(g.fs.drive[0].rate_from, "given");
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 0);
    k3_io_sent(&g.fs, 0, 0, 1000);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    k3_io_sent(&g.fs, 1, 0, 5000); /* another file, on the same drive as copy 1 */
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 0);
    k3_io_sent(&g.fs, 0, 0, 1000); /* the first drive has its two */
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, false, SEC), 0);
    k3_io_sent(&g.fs, 0, 1, 10);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), -1);
    assert_int_equal(k3_io_choose(&g.fs, 1, 0, true, SEC), -1);
    k3_io_back(&g.fs, 1, 0, 5000, 4096);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    k3_io_back(&g.fs, 0, 0, 1000, 1000);
    k3_io_back(&g.fs, 0, 0, 1000, -EIO);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 0);
    assert_int_equal(g.fs.drive[0].read_bytes, 1000);
    assert_int_equal(g.fs.drive[0].reads, 2);
    assert_int_equal(g.fs.drive[1].read_bytes, 4096);
    rig_close(&g);
}

static void good_before_bad(void **state)
{
    struct rig g;

    (void)state;
    rig_open(&g);
    assert_true(k3_io_set_bad(&g.fs, 0, 0, SEC));
    assert_false(k3_io_set_bad(&g.fs, 0, 0, SEC)); /* said once */
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    k3_io_sent(&g.fs, 0, 1, 1000); /* however busy the good one is */
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    k3_io_sent(&g.fs, 0, 1, 1000);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), -1); /* waited for */
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, false, SEC), 1);
    assert_int_equal(k3_io_choose(&g.fs, 0, 2, false, SEC), 0); /* the good one has been tried */
    assert_int_equal(k3_io_choose(&g.fs, 0, 3, false, SEC), -1);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC + K3_IO_BAD_NS), 0); /* after a while again */
    assert_true(k3_io_set_bad(&g.fs, 0, 0, SEC + K3_IO_BAD_NS));
    assert_true(k3_io_set_bad(&g.fs, 0, 1, SEC + K3_IO_BAD_NS));
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC + K3_IO_BAD_NS), 0); /* both: any */
    rig_close(&g);
}

static void a_copy_of_another_size(void **state)
{
    struct rig g;

    (void)state;
    rig_open(&g);
    assert_int_equal(k3_io_check(&g.fs, 0, SEC), 0);
    assert_int_equal(truncate(g.path[0], 100), 0);
    assert_int_equal(k3_io_check(&g.fs, 0, SEC), 0);
    assert_int_equal(k3_io_choose(&g.fs, 0, 0, true, SEC), 1);
    assert_int_equal(truncate(g.path[1], 100), 0);
    assert_int_equal(k3_io_check(&g.fs, 0, SEC), ESTALE);
    assert_int_equal(k3_io_check(&g.fs, 1, SEC), ESTALE);
    rig_close(&g);
}

static void refused(void **state)
{
    const char *none = "/tmp/k3-t-no-such-file", *paths[40];
    struct k3_err err = K3_ERR_INIT;
    struct k3_io_files fs;
    struct rig g;

    (void)state;
    rig_open(&g);
    for (size_t i = 0; i < 40; i++)
        paths[i] = g.path[0];
    assert_int_equal(k3_io_files_open(&fs, 3, &err), 0);
    assert_int_equal(k3_io_files_add(&fs, 0, &none, 1, LEN, "auto", 4096, &err), -ENOENT);
    assert_non_null(strstr(err.text, none));
    assert_int_equal(k3_io_files_add(&fs, 1, paths, 1, LEN + 1, "off", 4096, &err), -ESTALE);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "20000 bytes, was 20001"));
    assert_int_equal(k3_io_files_add(&fs, 2, paths, 40, LEN, "off", 4096, &err), -E2BIG);
    k3_io_files_close(&fs);
    k3_io_files_close(&fs); /* a closed one */
    rig_close(&g);
}

static void drives_without_a_rate_have_the_defaults(void **state)
{
    struct rig g;

    (void)state;
    rig_open(&g); /* files too small to measure */
    k3_io_files_rates(&g.fs, 0, 0);
    assert_int_equal(g.fs.drive[1].rate.depth, K3_IO_DEPTH_DEFAULT);
    assert_int_equal(g.fs.drive[1].rate.block_bytes, K3_IO_BLOCK_DEFAULT);
    assert_string_equal(g.fs.drive[1].rate_from, "default");
    k3_io_files_rates(&g.fs, 5, 0); /* one given, the other as it is */
    assert_int_equal(g.fs.drive[1].rate.depth, 5);
    assert_int_equal(g.fs.drive[1].rate.block_bytes, K3_IO_BLOCK_DEFAULT);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_busy_drive),
        cmocka_unit_test(good_before_bad),
        cmocka_unit_test(a_copy_of_another_size),
        cmocka_unit_test(refused),
        cmocka_unit_test(drives_without_a_rate_have_the_defaults),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
