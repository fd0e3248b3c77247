/* io/device.h: on which drive a file or a directory lies, and what sysfs knows of that drive. */
#ifndef K3_IO_DEVICE_H
#define K3_IO_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ipc/err.h"

struct k3_device {
    dev_t dev;      /* of the block device; st_dev where there is none */
    char name[32];  /* of the block device, as in /sys/class/block ("nvme0n1p2"); "" none */
    char disk[32];  /* the drive below partitions, dm and md, when it is one; else as name */
    char fs[16];    /* "ext4", "xfs", "tmpfs", ..; "0x..." (the magic number) when not known */
    int numa_node;  /* of the drive; -1 unknown, also when the drives below differ */
    bool rotational;
    bool network;   /* nfs, cifs, ceph, 9p, .. */
    bool memory;    /* tmpfs, ramfs: no drive */
    bool overlay;   /* a stack of directories: the drive below is not known */
    char key[96];   /* stable over restarts, no white space; the same for all partitions of a drive
                     * that have the same file system */
};

/* Fills *out for the file or directory `path`.  sysfs: NULL is "/sys"; tests give a recorded tree.
 * What sysfs does not say stays unknown: that is no error.  Refused: path cannot be looked at. */
int k3_device_of(const char *path, const char *sysfs, struct k3_device *out, struct k3_err *err);

/* The same from what stat and statfs said.  source: what is mounted ("/dev/nvme0n1p2",
 * "server:/models"); "" when that is not known. */
void k3_device_read(dev_t dev, uint64_t fs_magic, const char *source, const char *sysfs,
                    struct k3_device *out);

/* Whether reads of the two wait for each other: partitions of one drive do. */
bool k3_device_same_drive(const struct k3_device *a, const struct k3_device *b);

/* The source of the mount `mount_id` in the text of a /proc/PID/mountinfo, with its escapes
 * resolved.  False when there is no such line; out is "" then. */
bool k3_mount_source(const char *mountinfo, uint64_t mount_id, char *out, size_t out_bytes);

#endif
