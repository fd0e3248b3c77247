#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "ipc/memory.h"

#define SHM_DIR "/dev/shm"
#define HUGE_BYTES ((uint64_t)2 << 20)
#define RENEW_MAX_MS 20000u
#define RESERVE_MAX_MS 2000u
#define HUGETLBFS_MAGIC 0x958458f6
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

int k3_instance_check(const char *instance, struct k3_err *err)
{
    size_t len = strlen(instance);

    if (len < 1 || len > 32 ||
        strspn(instance, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") != len)
        return k3_refuse(err, -EINVAL,
                         "instance name \"%.64s\": must be 1 to 32 characters of A-Z a-z 0-9 _ -",
                         instance);
    return 0;
}

void k3_seg_name(char *out, size_t len, const char *instance, const char *what)
{
    snprintf(out, len, "/k3.%u.%s.%s", (unsigned)geteuid(), instance, what);
}

static void seg_path(char *out, size_t len, const char *name)
{
    snprintf(out, len, SHM_DIR "%s", name);
}

/* The option that makes a segment smaller, for the refusal. */
static const char *shrink_hint(const char *what)
{
    if (strncmp(what, "trunk", 5) == 0)
        return "lower --trunk-gb or --ring-mb";
    if (strncmp(what, "expert", 6) == 0)
        return "lower --cache-gb";
    return "free some of it";
}

static const char *human(char *out, size_t len, uint64_t bytes)
{
    if (bytes >= 100000000u)
        snprintf(out, len, "%.2f GB", (double)bytes / 1e9);
    else
        snprintf(out, len, "%" PRIu64 " bytes", bytes);
    return out;
}

static int fallocate_all(int fd, uint64_t off_bytes, uint64_t len_bytes)
{
    int rc;

    do
        rc = posix_fallocate(fd, (off_t)off_bytes, (off_t)len_bytes);
    while (rc == EINTR);
    return -rc;
}

static const char *what_of(const char *name)
{
    const char *what = name;

    /* "/k3.<uid>.<instance>.<what>": neither uid nor instance holds a dot. */
    for (int dots = 0; dots < 3 && what; dots++) {
        what = strchr(what, '.');
        if (what)
            what++;
    }
    return what ? what : "";
}

/* No file system limits a memfd: without this its reservation would end in the OOM killer.  The same
 * for a /dev/shm that is larger than what is left. */
static int check_memory(const char *name, uint64_t len_bytes, struct k3_err *err)
{
    struct k3_memory m;
    char asked[32], there[32], why[2100];
    uint64_t left;

    k3_memory_read("", &m);
    left = k3_memory_left(&m, why, sizeof(why));
    if (left == K3_MEMORY_NONE || len_bytes <= left)
        return 0;
    return k3_refuse(err, -ENOMEM, "segment %s: asked for %s, %s of memory are left (%.200s); %s",
                     name, human(asked, sizeof(asked), len_bytes),
                     human(there, sizeof(there), left), why, shrink_hint(what_of(name)));
}

static int refuse_size(struct k3_err *err, int code, const char *name, uint64_t len_bytes)
{
    struct statvfs fs;
    char asked[32], there[32], whole[32];
    const char *what = what_of(name);

    if (statvfs(SHM_DIR, &fs) != 0)
        return k3_refuse(err, code, "segment %s: cannot reserve %s in " SHM_DIR ": %s; %s", name,
                         human(asked, sizeof(asked), len_bytes), strerror(-code),
                         shrink_hint(what));
    return k3_refuse(err, code,
                     "segment %s: asked for %s, " SHM_DIR
                     " has %s free of %s; %s, enlarge " SHM_DIR " or use --memory-from memfd",
                     name, human(asked, sizeof(asked), len_bytes),
                     human(there, sizeof(there), (uint64_t)fs.f_bavail * fs.f_frsize),
                     human(whole, sizeof(whole), (uint64_t)fs.f_blocks * fs.f_frsize),
                     shrink_hint(what));
}

uint8_t *k3_reserve_aligned(uint64_t len_bytes)
{
    uint8_t *raw, *at;
    uint64_t whole, head;

    if (__builtin_add_overflow(len_bytes, HUGE_BYTES, &whole))
        return NULL;
    raw = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    at = (uint8_t *)(((uintptr_t)raw + HUGE_BYTES - 1) & ~(uintptr_t)(HUGE_BYTES - 1));
    head = (uint64_t)(at - raw);
    if (head)
        munmap(raw, head);
    len_bytes = (len_bytes + 4095) & ~(uint64_t)4095;
    if (whole - head > len_bytes)
        munmap(at + len_bytes, whole - head - len_bytes);
    return at;
}

/* The length of a mapping, which for hugetlb memory is whole pages. */
static uint64_t map_len(const struct k3_seg *s)
{
    return s->from == K3_MEM_HUGETLB ? (s->len_bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES
                                     : s->len_bytes;
}

static int map_whole(struct k3_seg *s, bool writable, struct k3_err *err)
{
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    uint64_t map_bytes = map_len(s);
    void *p;

    if (map_bytes >= HUGE_BYTES) {
        uint8_t *at = k3_reserve_aligned(map_bytes);

        if (!at)
            return k3_fail(err, -ENOMEM, "segment %s: no address space for %" PRIu64 " bytes",
                           s->name, map_bytes);
        p = mmap(at, map_bytes, prot, MAP_SHARED | MAP_FIXED, s->fd, 0);
        if (p == MAP_FAILED) {
            int code = -errno;

            munmap(at, map_bytes);
            return k3_fail(err, code, "segment %s: mmap of %" PRIu64 " bytes: %s", s->name,
                           map_bytes, strerror(-code));
        }
    } else {
        p = mmap(NULL, map_bytes, prot, MAP_SHARED, s->fd, 0);
        if (p == MAP_FAILED)
            return k3_fail(err, -errno, "segment %s: mmap of %" PRIu64 " bytes: %s", s->name,
                           map_bytes, strerror(errno));
    }
    s->base = p;
    return 0;
}

const char *k3_mem_from_name(enum k3_mem_from from)
{
    return from == K3_MEM_MEMFD ? "memfd" : from == K3_MEM_HUGETLB ? "hugetlb" : "shm";
}

/* A file without a name.  In /dev/shm it gets one when it is published: a maker that dies before
 * leaves nothing behind. */
static int nameless_file(struct k3_seg *s, struct k3_err *err)
{
    if (s->from == K3_MEM_SHM) {
        s->fd = open(SHM_DIR, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (s->fd < 0)
            return k3_fail(err, -errno, "segment %s: cannot make a file in " SHM_DIR ": %s",
                           s->name, strerror(errno));
        return 0;
    }
    s->fd = memfd_create(s->name + 1,
                         MFD_CLOEXEC | MFD_ALLOW_SEALING |
                             (s->from == K3_MEM_HUGETLB ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
    if (s->fd < 0)
        return k3_fail(err, -errno, "segment %s: cannot make a %s: %s", s->name,
                       k3_mem_from_name(s->from), strerror(errno));
    return 0;
}

/* Preferred, not bound: what the node has no room for comes from another one instead of ending in
 * the OOM killer.  The pages are taken by the reservation, so the policy must be there before it.
 * Best effort: a container may forbid it, and the memory works as well without. */
static void prefer_node(const struct k3_seg *s, int node)
{
    unsigned long mask[16] = { 0 };

    if (node < 0 || (size_t)node >= sizeof(mask) * 8)
        return;
    mask[node / (8 * sizeof(*mask))] |= 1ul << (node % (8 * sizeof(*mask)));
    (void)mbind(s->base, map_len(s), MPOL_PREFERRED, mask, sizeof(mask) * 8 + 1, 0);
}

int k3_seg_create_from(struct k3_seg *s, const char *instance, const char *what, uint64_t len_bytes,
                       enum k3_mem_from from, int numa_node, struct k3_err *err)
{
    struct statvfs fs;
    int rc;

    *s = (struct k3_seg)K3_SEG_INIT;
    s->from = from;
    if (len_bytes == 0 || len_bytes > INT64_MAX - HUGE_BYTES)
        return k3_fail(err, -EINVAL, "segment %s: impossible length %" PRIu64, what, len_bytes);
    k3_seg_name(s->name, sizeof(s->name), instance, what);
    if (from == K3_MEM_SHM && statvfs(SHM_DIR, &fs) == 0 && fs.f_blocks > 0 &&
        (uint64_t)fs.f_bavail * fs.f_frsize < len_bytes)
        return refuse_size(err, -ENOSPC, s->name, len_bytes);
    rc = from != K3_MEM_HUGETLB && len_bytes >= HUGE_BYTES ? check_memory(s->name, len_bytes, err) : 0;
    if (rc == 0)
        rc = nameless_file(s, err);
    if (rc < 0)
        return rc;
    s->len_bytes = len_bytes;
    if (ftruncate(s->fd, (off_t)map_len(s)) != 0) {
        rc = k3_fail(err, -errno, "segment %s: %" PRIu64 " bytes: %s", s->name, len_bytes,
                     strerror(errno));
        goto fail;
    }
    rc = map_whole(s, true, err);
    if (rc < 0)
        goto fail;
    prefer_node(s, numa_node);
    rc = fallocate_all(s->fd, 0, map_len(s));
    if (rc < 0) {
        if (from == K3_MEM_SHM)
            rc = refuse_size(err, rc, s->name, len_bytes);
        else
            rc = k3_refuse(err, rc, "segment %s: cannot reserve %" PRIu64 " bytes of %s: %s; %s",
                           s->name, len_bytes, k3_mem_from_name(from), strerror(-rc),
                           shrink_hint(what));
        goto fail;
    }
    /* Nobody can take the pages away from under a mapping (SIGBUS), not even the owner. */
    if (from != K3_MEM_SHM &&
        fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        rc = k3_fail(err, -errno, "segment %s: cannot seal it: %s", s->name, strerror(errno));
        goto fail;
    }
    return 0;
fail:
    k3_seg_close(s);
    return rc;
}

int k3_seg_create(struct k3_seg *s, const char *instance, const char *what, uint64_t len_bytes,
                  struct k3_err *err)
{
    return k3_seg_create_from(s, instance, what, len_bytes, K3_MEM_SHM, -1, err);
}

int k3_seg_adopt(struct k3_seg *s, const char *instance, const char *what, int fd,
                 uint64_t len_bytes, bool writable, struct k3_err *err)
{
    int seals = fcntl(fd, F_GET_SEALS), rc;
    struct statfs fs;
    struct stat st;

    *s = (struct k3_seg)K3_SEG_INIT;
    s->fd = fd;
    k3_seg_name(s->name, sizeof(s->name), instance, what);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) != 0 || fstatfs(fd, &fs) != 0) {
        rc = k3_fail(err, -EPROTO, "segment %s: what was handed over is no sealed memfd", s->name);
    } else if (len_bytes == 0 || len_bytes > INT64_MAX - HUGE_BYTES ||
               (uint64_t)st.st_size < len_bytes) {
        rc = k3_fail(err, -EPROTO, "segment %s: %" PRIu64 " bytes of a memfd of %lld", s->name,
                     len_bytes, (long long)st.st_size);
    } else {
        s->from = (unsigned long)fs.f_type == HUGETLBFS_MAGIC ? K3_MEM_HUGETLB : K3_MEM_MEMFD;
        s->len_bytes = len_bytes;
        rc = map_whole(s, writable, err);
    }
    if (rc < 0)
        k3_seg_close(s);
    return rc;
}

int k3_seg_publish(struct k3_seg *s, struct k3_err *err)
{
    char self[64], path[sizeof(s->name) + 16], tmp[sizeof(path) + 8];
    int rc;

    snprintf(self, sizeof(self), "/proc/self/fd/%d", s->fd);
    seg_path(path, sizeof(path), s->name);
    snprintf(tmp, sizeof(tmp), "%s.new", path);
    /* linkat cannot replace a name and rename can.  A ".new" that is there was left by a maker that
     * died between the two; the daemon's lock keeps two live makers apart. */
    rc = linkat(AT_FDCWD, self, AT_FDCWD, tmp, AT_SYMLINK_FOLLOW);
    if (rc != 0 && errno == EEXIST) {
        unlink(tmp);
        rc = linkat(AT_FDCWD, self, AT_FDCWD, tmp, AT_SYMLINK_FOLLOW);
    }
    if (rc != 0)
        return k3_fail(err, -errno, "segment %s: cannot name it: %s", s->name, strerror(errno));
    if (rename(tmp, path) != 0) {
        rc = k3_fail(err, -errno, "segment %s: cannot name it: %s", s->name, strerror(errno));
        unlink(tmp);
        return rc;
    }
    return 0;
}

int k3_seg_open(struct k3_seg *s, const char *instance, const char *what, bool writable,
                struct k3_err *err)
{
    char path[sizeof(s->name) + 16];
    struct stat st;
    int rc;

    *s = (struct k3_seg)K3_SEG_INIT;
    k3_seg_name(s->name, sizeof(s->name), instance, what);
    seg_path(path, sizeof(path), s->name);
    s->fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
    if (s->fd < 0) {
        if (errno == ENOENT)
            return -ENOENT;
        return k3_fail(err, -errno, "segment %s: %s", s->name, strerror(errno));
    }
    if (fstat(s->fd, &st) != 0)
        rc = k3_fail(err, -errno, "segment %s: %s", s->name, strerror(errno));
    else if (!S_ISREG(st.st_mode) || st.st_uid != geteuid())
        rc = k3_refuse(err, -EPERM, "segment %s: owned by uid %u, must be a file of uid %u",
                       s->name, (unsigned)st.st_uid, (unsigned)geteuid());
    else if (st.st_size <= 0)
        rc = k3_fail(err, -EPROTO, "segment %s: empty", s->name);
    else {
        s->len_bytes = (uint64_t)st.st_size;
        rc = map_whole(s, writable, err);
    }
    if (rc < 0)
        k3_seg_close(s);
    return rc;
}

void k3_seg_close(struct k3_seg *s)
{
    if (s->base)
        munmap(s->base, map_len(s));
    if (s->fd >= 0)
        close(s->fd);
    *s = (struct k3_seg)K3_SEG_INIT;
}

void k3_seg_unlink(const char *instance, const char *what)
{
    char name[128], path[160];

    k3_seg_name(name, sizeof(name), instance, what);
    seg_path(path, sizeof(path), name);
    unlink(path);
}

bool k3_seg_is_current(const struct k3_seg *s)
{
    char path[sizeof(s->name) + 16];
    struct stat named, ours;

    if (s->fd < 0)
        return false;
    seg_path(path, sizeof(path), s->name);
    return stat(path, &named) == 0 && fstat(s->fd, &ours) == 0 && named.st_ino == ours.st_ino &&
           named.st_dev == ours.st_dev;
}

int k3_seg_renew(struct k3_seg *s, uint64_t off_bytes, uint64_t len_bytes, struct k3_err *err)
{
    uint64_t end;
    int rc;

    if (__builtin_add_overflow(off_bytes, len_bytes, &end) || end > s->len_bytes ||
        off_bytes % 4096 || (len_bytes % 4096 && end != s->len_bytes))
        return k3_fail(err, -EINVAL,
                       "segment %s: cannot renew [%" PRIu64 ", +%" PRIu64 ") of %" PRIu64 " bytes",
                       s->name, off_bytes, len_bytes, s->len_bytes);
    if (len_bytes == 0)
        return 0;
    /* Of a reserved huge page that lies only partly in the range that part is zeroed, the page stays,
     * and nothing says when the reads in flight into it have landed. */
    if (s->from == K3_MEM_HUGETLB && (off_bytes % HUGE_BYTES || len_bytes % HUGE_BYTES))
        return k3_fail(err, -ENOTSUP,
                       "segment %s: [%" PRIu64 ", +%" PRIu64 ") is not whole 2 MiB pages", s->name,
                       off_bytes, len_bytes);
    for (unsigned waited_ms = 0;; waited_ms++) {
        const struct timespec ms = { 0, 1000000 };
        off_t left;

        do
            rc = fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off_bytes,
                           (off_t)len_bytes);
        while (rc != 0 && errno == EINTR);
        if (rc != 0)
            return k3_fail(err, -errno, "segment %s: punching [%" PRIu64 ", +%" PRIu64 "): %s",
                           s->name, off_bytes, len_bytes, strerror(errno));
        if (s->from == K3_MEM_HUGETLB)
            break;
        /* A huge page that lies only partly in the range cannot be split while a read is in flight
         * into it: its part is zeroed, stays in place, and the read still lands there.  So punch
         * until nothing is left. */
        left = lseek(s->fd, (off_t)off_bytes, SEEK_DATA);
        if (left < 0 || (uint64_t)left >= end)
            break;
        if (waited_ms >= RENEW_MAX_MS)
            return k3_fail(err, -EBUSY,
                           "segment %s: a read is still in flight at %" PRIu64 " after %u ms",
                           s->name, (uint64_t)left, waited_ms);
        nanosleep(&ms, NULL);
    }
    /* A punched page is free only when the last read into it has landed. */
    for (unsigned waited_ms = 0;; waited_ms++) {
        rc = fallocate_all(s->fd, off_bytes, len_bytes);
        if (rc != -ENOSPC || waited_ms >= RESERVE_MAX_MS)
            break;
        nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    }
    if (rc < 0)
        return refuse_size(err, rc, s->name, len_bytes);
    return 0;
}

uint64_t k3_smaps_sum(FILE *f, uint64_t addr, uint64_t len_bytes, const char *key)
{
    uint64_t lo = 0, hi = 0, sum = 0;
    size_t key_len = strlen(key);
    char line[512];

    while (fgets(line, sizeof(line), f)) {
        uint64_t a, b, kb;

        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &a, &b) == 2) {
            lo = a;
            hi = b;
        } else if (lo < addr + len_bytes && hi > addr && strncmp(line, key, key_len) == 0 &&
                   sscanf(line + key_len, "%" SCNu64 " kB", &kb) == 1 && kb <= UINT64_MAX / 2048) {
            sum += kb * 1024;
        }
    }
    return sum;
}

static uint64_t own_smaps(const void *addr, uint64_t len_bytes, const char *key)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    uint64_t sum = 0;

    if (!f)
        return 0;
    sum = k3_smaps_sum(f, (uint64_t)(uintptr_t)addr, len_bytes, key);
    fclose(f);
    return sum < len_bytes ? sum : len_bytes;
}

/* Through one mapping, in 2 MiB pages: collapsed ones, or reserved ones. */
static uint64_t pmd_mapped(const void *addr, uint64_t len_bytes)
{
    uint64_t bytes = own_smaps(addr, len_bytes, "ShmemPmdMapped:");

    if (bytes == 0)
        bytes = own_smaps(addr, len_bytes, "Shared_Hugetlb:");
    return bytes ? bytes : own_smaps(addr, len_bytes, "Private_Hugetlb:");
}

uint64_t k3_seg_swapped(const void *addr, uint64_t len_bytes)
{
    return own_smaps(addr, len_bytes, "Swap:");
}

uint64_t k3_seg_lock(void *addr, uint64_t len_bytes)
{
    return len_bytes && mlock(addr, len_bytes) == 0 ? len_bytes : 0;
}

uint64_t k3_seg_collapse(void *addr, uint64_t len_bytes)
{
    uint8_t *p = addr;

    /* One call may stop at the first range that fails; so each GiB gets a call of its own. */
    for (uint64_t off = 0; off < len_bytes; off += (uint64_t)1 << 30) {
        uint64_t n = len_bytes - off < ((uint64_t)1 << 30) ? len_bytes - off : (uint64_t)1 << 30;

        if (madvise(p + off, n, MADV_COLLAPSE) != 0 && errno == EAGAIN)
            (void)madvise(p + off, n, MADV_COLLAPSE);
    }
    if (madvise(addr, len_bytes, MADV_POPULATE_WRITE) != 0) /* refused on a read-only mapping */
        (void)madvise(addr, len_bytes, MADV_POPULATE_READ);
    return pmd_mapped(addr, len_bytes);
}

int k3_ring_map(const struct k3_seg *s, uint64_t off_bytes, uint64_t len_bytes, bool writable,
                uint8_t **out, struct k3_err *err)
{
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    uint64_t end, twice;
    uint8_t *at;

    if (__builtin_add_overflow(off_bytes, len_bytes, &end) ||
        __builtin_add_overflow(len_bytes, len_bytes, &twice) || end > s->len_bytes ||
        len_bytes == 0 || off_bytes % 4096 || len_bytes % 4096)
        return k3_fail(err, -EINVAL,
                       "segment %s: no ring at [%" PRIu64 ", +%" PRIu64 ") of %" PRIu64 " bytes",
                       s->name, off_bytes, len_bytes, s->len_bytes);
    at = k3_reserve_aligned(twice);
    if (!at)
        return k3_fail(err, -ENOMEM, "segment %s: no address space for a ring of %" PRIu64 " bytes",
                       s->name, len_bytes);
    for (int i = 0; i < 2; i++)
        if (mmap(at + (uint64_t)i * len_bytes, len_bytes, prot, MAP_SHARED | MAP_FIXED, s->fd,
                 (off_t)off_bytes) == MAP_FAILED) {
            int code = -errno;

            munmap(at, twice);
            return k3_fail(err, code, "segment %s: mmap of the ring: %s", s->name, strerror(-code));
        }
    *out = at;
    return 0;
}

void k3_ring_unmap(uint8_t *addr, uint64_t len_bytes)
{
    if (addr)
        munmap(addr, 2 * len_bytes);
}
