/* io/device.c on recorded sysfs trees (tests/data/sysfs-*) and on this machine. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/device.h"

#define EXT4 0xef53
#define XFS 0x58465342

static struct k3_device read_as(const char *tree, unsigned maj, unsigned min, uint64_t magic)
{
    struct k3_device d;
    char sysfs[64];

    snprintf(sysfs, sizeof(sysfs), "tests/data/sysfs-%s", tree);
    assert_int_equal(access(sysfs, R_OK), 0);
    memset(&d, 0x5a, sizeof(d)); /* nothing may be left as it was */
    k3_device_read(makedev(maj, min), magic, "", sysfs, &d);
    return d;
}

static void whole_drive_and_partition(void **state)
{
    struct k3_device disk = read_as("two-nodes", 259, 0, EXT4);
    struct k3_device part = read_as("two-nodes", 259, 2, EXT4), other_fs;

    (void)state;
    assert_string_equal(disk.name, "nvme0n1");
    assert_string_equal(disk.fs, "ext4");
    assert_string_equal(disk.disk, "nvme0n1");
    assert_int_equal(disk.numa_node, 0);
    assert_false(disk.rotational || disk.network || disk.memory || disk.overlay);
    assert_string_equal(disk.key, "ext4:disk:eui.0025384b21b1a001");
    assert_string_equal(part.name, "nvme0n1p2");
    assert_string_equal(part.disk, "nvme0n1");
    assert_int_equal(part.numa_node, 0);
    assert_string_equal(part.key, disk.key); /* one drive, one rate */
    other_fs = read_as("two-nodes", 259, 2, XFS);
    assert_string_equal(other_fs.fs, "xfs");
    assert_string_not_equal(other_fs.key, part.key);
    assert_true(k3_device_same_drive(&disk, &part) && k3_device_same_drive(&part, &other_fs));
}

static void the_second_node(void **state)
{
    struct k3_device a = read_as("two-nodes", 259, 4, EXT4), b = read_as("two-nodes", 259, 5, EXT4);
    struct k3_device first = read_as("two-nodes", 259, 0, EXT4);

    (void)state;
    assert_string_equal(a.disk, "nvme1n1");
    assert_int_equal(a.numa_node, 1);
    assert_int_equal(b.numa_node, 1);
    /* Their names are longer than a key and differ only at the end. */
    assert_int_equal(strlen(a.key), sizeof(a.key) - 1);
    assert_string_not_equal(a.key, b.key);
    assert_false(k3_device_same_drive(&a, &b) || k3_device_same_drive(&first, &a));
}

static void mapped_drives(void **state)
{
    struct k3_device both = read_as("two-nodes", 253, 0, XFS);
    struct k3_device crypt = read_as("two-nodes", 253, 1, EXT4);
    struct k3_device stacked = read_as("two-nodes", 253, 2, EXT4);
    struct k3_device raid = read_as("two-nodes", 9, 127, EXT4);
    struct k3_device on_raid = read_as("two-nodes", 259, 7, EXT4);
    struct k3_device loop = read_as("two-nodes", 253, 3, EXT4);

    (void)state;
    assert_string_equal(both.name, "dm-0");
    assert_string_equal(both.disk, "dm-0"); /* over two drives */
    assert_int_equal(both.numa_node, 1);    /* of one node */
    assert_string_equal(both.key, "xfs:disk:LVM-qY0s6UyTd1Sx0000models");
    assert_string_equal(crypt.disk, "nvme0n1");
    assert_int_equal(crypt.numa_node, 0);
    assert_string_equal(stacked.disk, "nvme0n1");
    assert_string_equal(stacked.key, "ext4:disk:dm-2-3749600000"); /* no identity but name and size */
    assert_int_equal(raid.numa_node, -1); /* over drives of two nodes */
    assert_string_equal(raid.disk, "md127");
    assert_string_equal(on_raid.name, "md127p1");
    assert_string_equal(on_raid.disk, "md127");
    assert_string_equal(on_raid.key, raid.key);
    assert_int_equal(loop.numa_node, -1); /* a tree that leads back to itself ends */
}

static void a_drive_with_several_controllers(void **state)
{
    struct k3_device d = read_as("two-nodes", 259, 6, EXT4);

    (void)state;
    assert_string_equal(d.disk, "nvme3n1");
    assert_int_equal(d.numa_node, 1);
}

static void a_box_of_one_node(void **state)
{
    struct k3_device d = read_as("one-node", 254, 1, EXT4);

    (void)state;
    assert_string_equal(d.name, "vda1");
    assert_string_equal(d.disk, "vda");
    assert_int_equal(d.numa_node, -1);
    assert_string_equal(d.key, "ext4:disk:177663636226523");
}

static void disks_that_turn(void **state)
{
    struct k3_device a = read_as("rotational", 8, 1, EXT4), b = read_as("rotational", 8, 16, EXT4);

    (void)state;
    assert_true(a.rotational);
    assert_int_equal(a.numa_node, 0);
    assert_string_equal(a.disk, "sda");
    assert_null(strpbrk(a.key, " \t\n"));
    assert_non_null(strstr(a.key, "WD-WCC7K0000001"));
    assert_false(b.rotational);
    assert_string_equal(b.key, "ext4:disk:sdb-976773168");
}

static void what_is_no_drive(void **state)
{
    struct k3_device d;

    (void)state;
    k3_device_read(makedev(0, 25), 0x01021994, "tmpfs", "tests/data/sysfs-one-node", &d);
    assert_true(d.memory);
    assert_string_equal(d.fs, "tmpfs");
    assert_string_equal(d.name, "");
    k3_device_read(makedev(0, 40), 0x6969, "server:/models", "tests/data/sysfs-one-node", &d);
    assert_true(d.network && !d.memory);
    assert_string_equal(d.key, "nfs:source:server:/models");
    k3_device_read(makedev(0, 41), 0x794c7630, "overlay", "tests/data/sysfs-one-node", &d);
    assert_true(d.overlay);
    k3_device_read(makedev(0, 42), 0x12345, "", "tests/data/sysfs-one-node", &d);
    assert_string_equal(d.fs, "0x00012345");
    assert_string_equal(d.key, "0x00012345:source:0:42");
    assert_int_equal(d.numa_node, -1);
    /* A number that sysfs does not know, and no sysfs at all. */
    k3_device_read(makedev(99, 1), EXT4, "", "tests/data/sysfs-one-node", &d);
    assert_string_equal(d.key, "ext4:source:99:1");
    k3_device_read(makedev(254, 1), EXT4, "", "tests/data/no-such-tree", &d);
    assert_string_equal(d.name, "");
    assert_int_equal(d.numa_node, -1);
}

static void mounts(void **state)
{
    const char *text = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
                       "nonsense\n"
                       "30 22 0:28 / /models rw shared:2 master:1 - btrfs /dev/nvme0n1p2 rw,ssd\n"
                       "31 22 0:29 / /a\\040b rw - nfs4 server:/a\\040b rw\n"
                       "32 22 0:30 / /x rw - tmpfs\n"
                       "33 22 0:31 / /y rw";
    char out[32], small[4];

    (void)state;
    assert_true(k3_mount_source(text, 22, out, sizeof(out)));
    assert_string_equal(out, "/dev/sda1");
    assert_true(k3_mount_source(text, 30, out, sizeof(out)));
    assert_string_equal(out, "/dev/nvme0n1p2");
    assert_true(k3_mount_source(text, 31, out, sizeof(out)));
    assert_string_equal(out, "server:/a b");
    assert_true(k3_mount_source(text, 22, small, sizeof(small)));
    assert_string_equal(small, "/de");
    for (uint64_t id = 32; id < 36; id++) {
        assert_false(k3_mount_source(text, id, out, sizeof(out)));
        assert_string_equal(out, "");
    }
}

static void on_this_machine(void **state)
{
    struct k3_device shm, root, again;
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    (void)state;
    assert_int_equal(k3_device_of("/dev/shm", NULL, &shm, &err), 0);
    assert_true(shm.memory);
    assert_int_equal(k3_device_of("tests", NULL, &root, &err), 0);
    assert_int_equal(k3_device_of("tests/unit/device_test.c", NULL, &again, &err), 0);
    assert_int_equal(stat("tests", &st), 0);
    assert_true(root.dev == st.st_dev || major(st.st_dev) == 0);
    assert_true(*root.key && *root.fs);
    assert_string_equal(root.key, again.key);
    assert_int_equal(k3_device_of("tests/no-such-file", NULL, &root, &err), -ENOENT);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "tests/no-such-file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_drive_and_partition),
        cmocka_unit_test(the_second_node),
        cmocka_unit_test(mapped_drives),
        cmocka_unit_test(a_drive_with_several_controllers),
        cmocka_unit_test(a_box_of_one_node),
        cmocka_unit_test(disks_that_turn),
        cmocka_unit_test(what_is_no_drive),
        cmocka_unit_test(mounts),
        cmocka_unit_test(on_this_machine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
