/* ipc/memory.c: what the machine and the control groups leave (memory.h). */
#include "ipc/memory.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ipc/parse.h"

#define TEXT_MAX (256u << 10) /* a mountinfo of a host with many containers is some ten KB */

/* ---- texts -------------------------------------------------------------------------------------------------------- */

/* The digits at p; false when there are none or they do not fit. */
static bool digits(const char *p, uint64_t *out, const char **end)
{
    uint64_t n = 0;

    if (!isdigit((unsigned char)*p))
        return false;
    for (; isdigit((unsigned char)*p); p++)
        if (__builtin_mul_overflow(n, 10u, &n) || __builtin_add_overflow(n, (uint64_t)(*p - '0'), &n))
            return false;
    *out = n;
    *end = p;
    return true;
}

static const char *next_line(const char *p)
{
    p = strchr(p, '\n');
    return p ? p + 1 : NULL;
}

/* What follows `key` and `after` at the beginning of some line; NULL when no line begins so. */
static const char *after_key(const char *text, const char *key, char after)
{
    size_t len = strlen(key);

    for (const char *p = text; p; p = next_line(p))
        if (strncmp(p, key, len) == 0 && p[len] == after)
            return p + len + 1;
    return NULL;
}

uint64_t k3_meminfo_bytes(const char *text, const char *key)
{
    const char *p = after_key(text, key, ':');
    uint64_t kb;

    if (!p)
        return K3_MEMORY_NONE;
    p += strspn(p, " \t");
    if (!digits(p, &kb, &p) || strncmp(p, " kB", 3) != 0 || kb > UINT64_MAX / 2048)
        return K3_MEMORY_NONE;
    return kb * 1024;
}

uint64_t k3_memstat_bytes(const char *text, const char *key)
{
    const char *p = after_key(text, key, ' ');
    uint64_t n;

    return p && digits(p, &n, &p) && (*p == '\n' || !*p) ? n : K3_MEMORY_NONE;
}

uint64_t k3_limit_bytes(const char *text)
{
    uint64_t n;

    return digits(text, &n, &text) && (*text == '\n' || !*text) && n < (uint64_t)1 << 60 ? n : K3_MEMORY_NONE;
}

/* True when the comma-separated list of len bytes has the word. */
static bool list_has(const char *list, size_t len, const char *word)
{
    size_t n = strlen(word);

    for (size_t at = 0; at < len;) {
        size_t item = 0;

        while (at + item < len && list[at + item] != ',')
            item++;
        if (item == n && memcmp(list + at, word, n) == 0)
            return true;
        at += item + 1;
    }
    return false;
}

/* The path of this process in the memory hierarchy of a version: "4:memory:/a" (1), "0::/a" (2). */
static bool group_path(const char *cgroup, int version, char *out, size_t cap)
{
    for (const char *p = cgroup; p; p = next_line(p)) {
        size_t line = strcspn(p, "\n");
        const char *list = memchr(p, ':', line), *path;

        if (!list)
            continue;
        list++;
        path = memchr(list, ':', line - (size_t)(list - p));
        if (!path || path[1] != '/')
            continue;
        if (version == 2 ? path != list || strncmp(p, "0:", 2) != 0 : !list_has(list, (size_t)(path - list), "memory"))
            continue;
        line -= (size_t)(path + 1 - p);
        if (line >= cap)
            continue;
        memcpy(out, path + 1, line);
        out[line] = 0;
        return true;
    }
    return false;
}

/* Takes the next field of a mountinfo line, \040 and the like undone.  False at the end of the line or when it is too long. */
static bool mount_field(const char **p, char *out, size_t cap)
{
    size_t n = 0;
    const char *s = *p;

    while (*s == ' ')
        s++;
    if (!*s || *s == '\n')
        return false;
    for (; *s && *s != ' ' && *s != '\n'; s++) {
        char c = *s;

        if (c == '\\' && s[1] >= '0' && s[1] <= '3' && s[2] >= '0' && s[2] <= '7' && s[3] >= '0' && s[3] <= '7') {
            c = (char)((s[1] - '0') * 64 + (s[2] - '0') * 8 + (s[3] - '0'));
            s += 3;
        }
        if (n + 1 >= cap || !c)
            return false;
        out[n++] = c;
    }
    out[n] = 0;
    *p = s;
    return true;
}

/* A mount of the memory hierarchy of that version?  Fills its root in the hierarchy and its mount point. */
static bool group_mount(const char *line, int version, char *root, size_t root_cap, char *point, size_t point_cap)
{
    char field[4096];
    const char *p = line;

    for (int i = 0; i < 3; i++) /* id, parent, device */
        if (!mount_field(&p, field, sizeof(field)))
            return false;
    if (!mount_field(&p, root, root_cap) || !mount_field(&p, point, point_cap))
        return false;
    do /* options, optional fields up to the dash */
        if (!mount_field(&p, field, sizeof(field)))
            return false;
    while (strcmp(field, "-") != 0);
    if (!mount_field(&p, field, sizeof(field)) || strcmp(field, version == 2 ? "cgroup2" : "cgroup") != 0)
        return false;
    return version == 2 || (mount_field(&p, field, sizeof(field)) && mount_field(&p, field, sizeof(field)) &&
                            list_has(field, strlen(field), "memory"));
}

/* What of path lies below root; NULL when it does not, or leads out of what can be seen. */
static const char *below(const char *path, const char *root)
{
    size_t len = strlen(root);
    const char *rest;

    if (len && root[len - 1] == '/')
        len--;
    if (strncmp(path, root, len) != 0 || (path[len] && path[len] != '/'))
        return NULL;
    rest = path + len;
    for (const char *p = strstr(rest, "/.."); p; p = strstr(p + 1, "/.."))
        if (!p[3] || p[3] == '/')
            return NULL;
    return strcmp(rest, "/") == 0 ? "" : rest;
}

static bool place_of(const char *cgroup, const char *mountinfo, int version, struct k3_cgroup_place *out)
{
    char path[1024], root[1024], point[sizeof(out->top)];
    bool found = false;

    if (!group_path(cgroup, version, path, sizeof(path)))
        return false;
    for (const char *p = mountinfo; p; p = next_line(p)) {
        const char *rest;

        if (!group_mount(p, version, root, sizeof(root), point, sizeof(point)) || point[0] != '/')
            continue;
        rest = below(path, root);
        if (!rest && found)
            continue;
        out->version = version;
        snprintf(out->top, sizeof(out->top), "%s", point);
        snprintf(out->leaf, sizeof(out->leaf), "%s%s", point, rest ? rest : "");
        found = true;
        if (rest)
            break;
    }
    return found;
}

size_t k3_cgroup_places(const char *cgroup, const char *mountinfo, struct k3_cgroup_place out[2])
{
    size_t n = 0;

    for (int version = 1; version <= 2; version++)
        n += place_of(cgroup, mountinfo, version, &out[n]) ? 1 : 0;
    return n;
}

/* ---- files -------------------------------------------------------------------------------------------------------- */

/* The text of a file, to be freed; NULL when there is none. */
static char *read_text(const char *root, const char *dir, const char *name)
{
    char path[4096];
    char *text;
    size_t n = 0;
    int fd;

    if (snprintf(path, sizeof(path), "%s%s/%s", root, dir, name) >= (int)sizeof(path))
        return NULL;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    text = malloc(TEXT_MAX);
    while (text && n < TEXT_MAX - 1) {
        ssize_t got = read(fd, text + n, TEXT_MAX - 1 - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    if (text)
        text[n] = 0;
    close(fd);
    return text;
}

static uint64_t read_limit(const char *root, const char *dir, const char *name)
{
    char *text = read_text(root, dir, name);
    uint64_t n = text ? k3_limit_bytes(text) : K3_MEMORY_NONE;

    free(text);
    return n;
}

/* Usage without the file pages that the kernel drops first. */
static uint64_t read_usage(const char *root, const char *dir, int version)
{
    uint64_t used = read_limit(root, dir, version == 2 ? "memory.current" : "memory.usage_in_bytes");
    char *text = used == K3_MEMORY_NONE ? NULL : read_text(root, dir, "memory.stat");
    uint64_t cache = text ? k3_memstat_bytes(text, version == 2 ? "inactive_file" : "total_inactive_file") : 0;

    free(text);
    if (used == K3_MEMORY_NONE || cache == K3_MEMORY_NONE)
        return used;
    return used > cache ? used - cache : 0;
}

static void look_at_group(const char *root, const char *dir, int version, struct k3_memory *m)
{
    static const char *const names[2][2] = { { "memory.limit_in_bytes", NULL }, { "memory.max", "memory.high" } };

    for (int i = 0; i < 2; i++) {
        const char *name = names[version - 1][i];
        uint64_t limit = name ? read_limit(root, dir, name) : K3_MEMORY_NONE, used, left;

        if (limit == K3_MEMORY_NONE)
            continue;
        used = read_usage(root, dir, version);
        if (used == K3_MEMORY_NONE)
            continue;
        left = limit > used ? limit - used : 0;
        if (left >= m->group_bytes)
            continue;
        m->group_bytes = left;
        m->group_limit_bytes = limit;
        snprintf(m->group_limit, sizeof(m->group_limit), "%s", name);
        snprintf(m->group_dir, sizeof(m->group_dir), "%s", dir);
    }
}

static void read_groups(const char *root, struct k3_memory *m)
{
    char *cgroup = read_text(root, "/proc/self", "cgroup"), *mounts = read_text(root, "/proc/self", "mountinfo");
    struct k3_cgroup_place place[2];
    size_t n = cgroup && mounts ? k3_cgroup_places(cgroup, mounts, place) : 0;

    free(cgroup);
    free(mounts);
    for (size_t i = 0; i < n; i++) {
        size_t top = strlen(place[i].top);
        char *dir = place[i].leaf;

        for (;;) {
            char *slash = strrchr(dir, '/');

            look_at_group(root, dir, place[i].version, m);
            if (strlen(dir) <= top || !slash)
                break;
            *slash = 0;
        }
    }
}

void k3_memory_read(const char *root, struct k3_memory *out)
{
    char *text = read_text(root, "/proc", "meminfo");

    *out = (struct k3_memory){ .total_bytes = K3_MEMORY_NONE, .available_bytes = K3_MEMORY_NONE,
                               .group_bytes = K3_MEMORY_NONE, .group_limit_bytes = K3_MEMORY_NONE };
    if (text) {
        out->total_bytes = k3_meminfo_bytes(text, "MemTotal");
        out->available_bytes = k3_meminfo_bytes(text, "MemAvailable");
    }
    free(text);
    read_groups(root, out);
}

uint64_t k3_memory_left(const struct k3_memory *m, char *why, size_t len)
{
    if (m->group_bytes < m->available_bytes) {
        snprintf(why, len, "%s of %s", m->group_limit, m->group_dir);
        return m->group_bytes;
    }
    snprintf(why, len, "MemAvailable");
    return m->available_bytes;
}

void k3_memory_shm(const char *dir, uint64_t *free_bytes, uint64_t *size_bytes)
{
    struct statvfs fs;

    *free_bytes = *size_bytes = K3_MEMORY_NONE;
    if (statvfs(dir, &fs) != 0 || fs.f_blocks == 0) /* a tmpfs of no limit says 0 blocks */
        return;
    *free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    *size_bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
}
