#include "io/device.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define LEVELS_MAX 8 /* of dm on md on dm ..: sysfs is input, and might be a loop */
#define NODE_UNKNOWN (-1)

static const struct fs_kind {
    uint64_t magic;
    const char *name;
    bool network, memory, overlay;
} fs_kinds[] = {
    { 0xef53, "ext4" },
    { 0x58465342, "xfs" },
    { 0x9123683e, "btrfs" },
    { 0xf2f52010, "f2fs" },
    { 0xca451a4e, "bcachefs" },
    { 0x2fc12fc1, "zfs" },
    { 0x65735546, "fuse" },
    { 0x73717368, "squashfs" },
    { 0xe0f5e1e2, "erofs" },
    { 0x4d44, "vfat" },
    { 0x2011bab0, "exfat" },
    { 0x5346544e, "ntfs" },
    { 0x7366746e, "ntfs3" },
    { 0x3153464a, "jfs" },
    { 0x52654973, "reiserfs" },
    { 0x01021994, "tmpfs", .memory = true },
    { 0x858458f6, "ramfs", .memory = true },
    { 0x958458f6, "hugetlbfs", .memory = true },
    { 0x794c7630, "overlay", .overlay = true },
    { 0x61756673, "aufs", .overlay = true },
    { 0x6969, "nfs", .network = true },
    { 0x517b, "smb", .network = true },
    { 0xff534d42, "cifs", .network = true },
    { 0xfe534d42, "smb2", .network = true },
    { 0x00c36400, "ceph", .network = true },
    { 0x01021997, "9p", .network = true },
    { 0x5346414f, "afs", .network = true },
    { 0x6b414653, "afs", .network = true },
    { 0x0bd00bd0, "lustre", .network = true },
    { 0x47504653, "gpfs", .network = true },
    { 0x19830326, "beegfs", .network = true },
};

/* ---- sysfs ---- */

/* The first line of dir/name without its end; false when it cannot be read. */
static bool read_line(const char *dir, const char *name, char *out, size_t out_bytes)
{
    char path[PATH_MAX];
    ssize_t n;
    int fd;

    out[0] = '\0';
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return false;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    n = read(fd, out, out_bytes - 1);
    close(fd);
    out[n > 0 ? n : 0] = '\0';
    out[strcspn(out, "\n")] = '\0';
    return n > 0;
}

static bool read_number(const char *dir, const char *name, long *out)
{
    char text[32], *end;

    if (!read_line(dir, name, text, sizeof(text)))
        return false;
    errno = 0;
    *out = strtol(text, &end, 10);
    return errno == 0 && end != text && *end == '\0';
}

static bool exists(const char *dir, const char *name)
{
    char path[PATH_MAX];

    return snprintf(path, sizeof(path), "%s/%s", dir, name) < (int)sizeof(path) &&
           access(path, F_OK) == 0;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

/* One directory up, not above root; false at the top. */
static bool go_up(char *path, const char *root)
{
    char *slash = strrchr(path, '/');

    if (!slash || (size_t)(slash - path) <= strlen(root))
        return false;
    *slash = '\0';
    return true;
}

struct drives { /* what lies below a block device */
    const char *root;
    int n;
    char disk[32]; /* of the first */
    int node;
    bool differ; /* the nodes, or the disks */
    bool nodes_differ;
};

static void note_drive(struct drives *d, const char *disk, int node)
{
    if (d->n++ == 0) {
        snprintf(d->disk, sizeof(d->disk), "%.31s", disk);
        d->node = node;
        return;
    }
    d->differ |= strcmp(d->disk, disk) != 0;
    d->nodes_differ |= d->node != node;
}

static int node_upwards(const char *from, const char *root)
{
    char dir[PATH_MAX];
    long node;

    snprintf(dir, sizeof(dir), "%s", from);
    do {
        if (read_number(dir, "numa_node", &node) && node >= 0 && node < INT_MAX)
            return (int)node;
    } while (go_up(dir, root));
    return NODE_UNKNOWN;
}

/* An NVMe drive with multipath hangs below nvme-subsystem, which links to its controllers. */
static int node_of_controllers(const char *disk, const char *root)
{
    char dir[PATH_MAX], entry[PATH_MAX + 256], real[PATH_MAX];
    int node = NODE_UNKNOWN;
    bool first = true;
    struct dirent *e;
    DIR *d;

    snprintf(dir, sizeof(dir), "%s", disk);
    if (!go_up(dir, root) || strncmp(base_name(dir), "nvme-subsys", 11) != 0 || !(d = opendir(dir)))
        return NODE_UNKNOWN;
    while ((e = readdir(d))) {
        int n;

        if (strncmp(e->d_name, "nvme", 4) != 0 ||
            e->d_name[4 + strspn(e->d_name + 4, "0123456789")] != '\0')
            continue;
        snprintf(entry, sizeof(entry), "%s/%s", dir, e->d_name);
        if (!realpath(entry, real) || strncmp(real, root, strlen(root)) != 0)
            continue;
        n = node_upwards(real, root);
        node = first || n == node ? n : NODE_UNKNOWN;
        if (n != node)
            break;
        first = false;
    }
    closedir(d);
    return node;
}

/* Walks from a block device down to the drives that hold its bytes. */
static void find_drives(struct drives *d, const char *block, int level)
{
    char dir[PATH_MAX], slaves[PATH_MAX + 16], entry[PATH_MAX + 512], real[PATH_MAX];
    bool below = false;
    struct dirent *e;
    DIR *s;
    int node;

    snprintf(dir, sizeof(dir), "%s", block);
    if (exists(dir, "partition") && !go_up(dir, d->root))
        return;
    snprintf(slaves, sizeof(slaves), "%s/slaves", dir);
    s = level < LEVELS_MAX ? opendir(slaves) : NULL;
    while (s && (e = readdir(s))) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(entry, sizeof(entry), "%s/%s", slaves, e->d_name);
        if (!realpath(entry, real) || strncmp(real, d->root, strlen(d->root)) != 0)
            continue;
        below = true;
        find_drives(d, real, level + 1);
    }
    if (s)
        closedir(s);
    if (below)
        return;
    node = node_upwards(dir, d->root);
    note_drive(d, base_name(dir), node >= 0 ? node : node_of_controllers(dir, d->root));
}

/* What tells this drive from others, also after names have changed. */
static void identity(const char *disk_dir, char *out, size_t out_bytes)
{
    static const char *const files[] = { "wwid",          "device/wwid", "serial",
                                         "device/serial", "dm/uuid",     "md/uuid" };
    char size[32] = "";

    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
        if (read_line(disk_dir, files[i], out, out_bytes))
            return;
    (void)read_line(disk_dir, "size", size, sizeof(size));
    snprintf(out, out_bytes, "%.31s-%s", base_name(disk_dir), size);
}

static void add_key(struct k3_device *out, const char *text)
{
    size_t n = strlen(out->key);

    for (; *text && n + 1 < sizeof(out->key); text++)
        out->key[n++] = isgraph((unsigned char)*text) ? *text : '_';
    out->key[n] = '\0';
}

/* A long identity keeps its end in the key as a number, so that two do not become one. */
static void make_key(struct k3_device *out, const char *what, const char *id)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    char tail[24];

    out->key[0] = '\0';
    add_key(out, out->fs);
    add_key(out, ":");
    add_key(out, what);
    add_key(out, ":");
    if (strlen(out->key) + strlen(id) < sizeof(out->key)) {
        add_key(out, id);
        return;
    }
    for (const char *p = id; *p; p++)
        h = (h ^ (unsigned char)*p) * 0x100000001b3u;
    snprintf(tail, sizeof(tail), "#%016" PRIx64, h);
    add_key(out, id);
    out->key[sizeof(out->key) - 1 - strlen(tail)] = '\0';
    add_key(out, tail);
}

static bool read_block(struct k3_device *out, const char *root)
{
    char link[PATH_MAX + 64], dir[PATH_MAX], id[256];
    struct drives d = { .root = root, .node = NODE_UNKNOWN };
    long rotational;

    snprintf(link, sizeof(link), "%s/dev/block/%u:%u", root, major(out->dev), minor(out->dev));
    if (!realpath(link, dir) || strncmp(dir, root, strlen(root)) != 0)
        return false;
    snprintf(out->name, sizeof(out->name), "%.31s", base_name(dir));
    find_drives(&d, dir, 0);
    if (exists(dir, "partition"))
        (void)go_up(dir, root);
    out->rotational = read_number(dir, "queue/rotational", &rotational) && rotational == 1;
    out->numa_node = d.nodes_differ ? NODE_UNKNOWN : d.node;
    snprintf(out->disk, sizeof(out->disk), "%.31s", d.n && !d.differ ? d.disk : base_name(dir));
    identity(dir, id, sizeof(id));
    make_key(out, "disk", id);
    return true;
}

/* ---- all of it ---- */

void k3_device_read(dev_t dev, uint64_t fs_magic, const char *source, const char *sysfs,
                    struct k3_device *out)
{
    const struct fs_kind *kind = NULL;
    char root[PATH_MAX], number[32];
    struct stat st;

    *out = (struct k3_device){ .dev = dev, .numa_node = NODE_UNKNOWN };
    for (size_t i = 0; i < sizeof(fs_kinds) / sizeof(fs_kinds[0]); i++)
        if (fs_kinds[i].magic == (fs_magic & UINT32_MAX))
            kind = &fs_kinds[i];
    if (kind) {
        snprintf(out->fs, sizeof(out->fs), "%s", kind->name);
        out->network = kind->network;
        out->memory = kind->memory;
        out->overlay = kind->overlay;
    } else {
        snprintf(out->fs, sizeof(out->fs), "0x%08x", (unsigned)(fs_magic & UINT32_MAX));
    }
    /* btrfs and the like have numbers of their own, and a block device as their source. */
    if (major(dev) == 0 && strncmp(source, "/dev/", 5) == 0 && stat(source, &st) == 0 &&
        S_ISBLK(st.st_mode))
        out->dev = st.st_rdev;
    if (!out->memory && !out->overlay && !out->network && major(out->dev) != 0 &&
        realpath(sysfs ? sysfs : "/sys", root) && read_block(out, root))
        return;
    snprintf(number, sizeof(number), "%u:%u", major(out->dev), minor(out->dev));
    make_key(out, "source", *source ? source : number);
}

/* "\040" and the like, as the kernel writes white space in mountinfo. */
static void unescape(char *s)
{
    char *to = s;

    for (; *s; s++) {
        if (s[0] == '\\' && s[1] >= '0' && s[1] <= '3' && s[2] >= '0' && s[2] <= '7' &&
            s[3] >= '0' && s[3] <= '7') {
            *to++ = (char)((s[1] - '0') << 6 | (s[2] - '0') << 3 | (s[3] - '0'));
            s += 3;
        } else {
            *to++ = *s;
        }
    }
    *to = '\0';
}

/* "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue" */
bool k3_mount_source(const char *mountinfo, uint64_t mount_id, char *out, size_t out_bytes)
{
    const char *line = mountinfo, *end;

    out[0] = '\0';
    for (; *line; line = *end ? end + 1 : end) {
        char *after;
        const char *dash, *source;
        size_t n;

        end = strchrnul(line, '\n');
        errno = 0;
        if (!isdigit((unsigned char)*line) || strtoull(line, &after, 10) != mount_id || errno)
            continue;
        dash = memmem(line, (size_t)(end - line), " - ", 3);
        if (!dash)
            return false;
        source = memchr(dash + 3, ' ', (size_t)(end - (dash + 3)));
        if (!source)
            return false;
        n = strcspn(++source, " \n");
        if (n >= out_bytes)
            n = out_bytes - 1;
        memcpy(out, source, n);
        out[n] = '\0';
        unescape(out);
        return out[0] != '\0';
    }
    return false;
}

static char *read_mountinfo(void)
{
    FILE *f = fopen("/proc/self/mountinfo", "re");
    char *text = NULL;
    size_t n = 0, got;
    FILE *to = f ? open_memstream(&text, &n) : NULL;
    char part[4096];

    while (to && (got = fread(part, 1, sizeof(part), f)) > 0)
        fwrite(part, 1, got, to);
    if (to && fclose(to) != 0) {
        free(text);
        text = NULL;
    }
    if (f)
        fclose(f);
    return text;
}

static void source_of(const char *path, char *out, size_t out_bytes)
{
    struct statx sx;
    char *text;

    out[0] = '\0';
#ifdef STATX_MNT_ID
    if (statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_MNT_ID, &sx) != 0 ||
        !(sx.stx_mask & STATX_MNT_ID))
        return;
    text = read_mountinfo();
    if (text)
        (void)k3_mount_source(text, sx.stx_mnt_id, out, out_bytes);
    free(text);
#else
    (void)path;
    (void)sx;
    (void)text;
    (void)out_bytes;
#endif
}

int k3_device_of(const char *path, const char *sysfs, struct k3_device *out, struct k3_err *err)
{
    char source[512] = "";
    struct statfs fs;
    struct stat st;

    *out = (struct k3_device){ .numa_node = NODE_UNKNOWN };
    if (stat(path, &st) != 0 || statfs(path, &fs) != 0)
        return k3_refuse(err, -errno, "%s: %s", path, strerror(errno));
    if (major(st.st_dev) == 0)
        source_of(path, source, sizeof(source));
    k3_device_read(st.st_dev, (uint64_t)fs.f_type, source, sysfs, out);
    return 0;
}

bool k3_device_same_drive(const struct k3_device *a, const struct k3_device *b)
{
    return a->dev == b->dev || (a->disk[0] && strcmp(a->disk, b->disk) == 0);
}
