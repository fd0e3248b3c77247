#include "shm/data.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define KEEPER_NS 5000000000ull
#define LOOK_NS 10000000000ull
#define HUGE_BYTES ((uint64_t)2 << 20)

void k3_data_place(struct k3_data_place *out, const struct k3_seg *s)
{
    struct stat st = { 0 };

    (void)fstat(s->fd, &st); /* of our own descriptor */
    *out = (struct k3_data_place){ .from = s->from, .dev = st.st_dev, .ino = st.st_ino };
}

bool k3_data_is_at(const struct k3_seg *s, const struct k3_data_place *at)
{
    struct k3_data_place p;

    if (s->fd < 0)
        return false;
    k3_data_place(&p, s);
    return p.from == at->from && p.dev == at->dev && p.ino == at->ino;
}

int k3_data_open(struct k3_seg *s, const char *instance, const char *rundir, const char *what,
                 const struct k3_data_place *at, struct k3_err *err)
{
    uint64_t len_bytes;
    int rc, fd;

    *s = (struct k3_seg)K3_SEG_INIT;
    if (at->from == K3_MEM_SHM) {
        rc = k3_seg_open(s, instance, what, false, err);
    } else {
        rc = k3_keeper_fetch(rundir, what, &fd, &len_bytes);
        if (rc == -ECONNREFUSED || rc == -EAGAIN)
            rc = -ENOENT;
        if (rc < 0 && rc != -ENOENT)
            return k3_fail(err, rc, "segment %s of instance %s: " K3_KEEPER_NAME ": %s", what, instance,
                           strerror(-rc));
        if (rc == 0)
            rc = k3_seg_adopt(s, instance, what, fd, len_bytes, false, err);
    }
    if (rc == 0 && !k3_data_is_at(s, at)) {
        k3_seg_close(s);
        rc = -ENOENT;
    }
    return rc;
}

/* ---- the owner's side ---- */

int k3_mem_open(struct k3_mem *m, const struct k3_mem_opts *o, struct k3_err *err)
{
    *m = (struct k3_mem){ .numa_node = o->numa_node == K3_NODE_ANY ? -1 : (int)o->numa_node };
    for (m->asked = K3_MEM_SHM; m->asked <= K3_MEM_HUGETLB; m->asked++)
        if (strcmp(o->from, k3_mem_from_name(m->asked)) == 0)
            return k3_numa_go(m->numa_node, err);
    return k3_refuse(err, -EINVAL, "--memory-from %.40s: must be shm, memfd or hugetlb", o->from);
}

void k3_mem_name(struct k3_mem *m, const char *instance, const char *rundir, const char *what)
{
    snprintf(m->instance, sizeof(m->instance), "%s", instance);
    snprintf(m->rundir, sizeof(m->rundir), "%s", rundir);
    snprintf(m->what, sizeof(m->what), "%s", what);
}

void k3_mem_close(struct k3_mem *m)
{
    k3_guard_close(m->guard);
    m->guard = NULL;
}

/* False when there is no more time to wait for the keeper. */
static bool nap_until(uint64_t until_ns)
{
    nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
    return k3_now_ns() < until_ns;
}

static int no_keeper(const struct k3_mem *m, int code, struct k3_err *err)
{
    if (code == -ECONNREFUSED)
        return k3_no_peer(err, code,
                          "--memory-from %s: no " K3_KEEPER_NAME " answers in %s: start it first ("
                          K3_KEEPER_NAME " --instance %s), or use --memory-from shm",
                          k3_mem_from_name(m->asked), m->rundir, m->instance);
    return k3_fail(err, code, "segment %s: " K3_KEEPER_NAME ": %s", m->what, strerror(-code));
}

int k3_data_take(struct k3_mem *m, struct k3_seg *s, struct k3_err *err)
{
    uint64_t until_ns = k3_now_ns() + KEEPER_NS, len_bytes;
    int rc, fd;

    *s = (struct k3_seg)K3_SEG_INIT;
    if (m->asked == K3_MEM_SHM) {
        (void)k3_keeper_drop(m->rundir, m->what); /* of a predecessor that was given another option */
        return k3_seg_open(s, m->instance, m->what, true, err);
    }
    k3_seg_unlink(m->instance, m->what);
    while ((rc = k3_keeper_fetch(m->rundir, m->what, &fd, &len_bytes)) == -ECONNREFUSED ||
           rc == -EAGAIN)
        if (!nap_until(until_ns))
            break;
    if (rc == -ENOENT)
        return rc;
    if (rc < 0)
        return no_keeper(m, rc, err);
    rc = k3_seg_adopt(s, m->instance, m->what, fd, len_bytes, true, err);
    if (rc == 0 && s->from == K3_MEM_HUGETLB && m->asked != K3_MEM_HUGETLB) {
        k3_seg_close(s);
        rc = -ENOENT;
    }
    return rc;
}

int k3_data_create(struct k3_mem *m, struct k3_seg *s, uint64_t len_bytes, struct k3_err *err)
{
    struct k3_err why = K3_ERR_INIT;
    int rc;

    k3_data_drop(m);
    m->fallback[0] = 0;
    rc = k3_seg_create_from(s, m->instance, m->what, len_bytes, m->asked, m->numa_node,
                            m->asked == K3_MEM_HUGETLB ? &why : err);
    if (rc < 0 && m->asked == K3_MEM_HUGETLB) {
        snprintf(m->fallback, sizeof(m->fallback),
                 "%" PRIu64 " hugetlb pages of 2 MiB are not free (%s); raise vm.nr_hugepages",
                 (len_bytes + HUGE_BYTES - 1) / HUGE_BYTES, strerror(-rc));
        rc = k3_seg_create_from(s, m->instance, m->what, len_bytes, K3_MEM_MEMFD, m->numa_node, err);
    }
    return rc;
}

int k3_data_guard(struct k3_mem *m, const struct k3_seg *s, struct k3_err *err)
{
    if (s->from == K3_MEM_SHM || m->guard)
        return 0;
    if (m->asked != s->from && !m->fallback[0])
        snprintf(m->fallback, sizeof(m->fallback), "taken over from a predecessor that got no better");
    return k3_guard_open(&m->guard, m->rundir, s, m->what, true, err);
}

int k3_data_publish(struct k3_mem *m, const struct k3_seg *s, struct k3_err *err)
{
    uint64_t until_ns = k3_now_ns() + KEEPER_NS;
    struct k3_seg named = *s;
    int rc;

    if (s->from == K3_MEM_SHM)
        return k3_seg_publish(&named, err);
    while ((rc = k3_keeper_store(m->rundir, s, m->what, false)) == -ECONNREFUSED)
        if (!nap_until(until_ns))
            break;
    return rc < 0 ? no_keeper(m, rc, err) : k3_data_guard(m, s, err);
}

void k3_data_drop(struct k3_mem *m)
{
    k3_mem_close(m); /* before, or it would store it again */
    if (m->what[0] == 0)
        return;
    k3_seg_unlink(m->instance, m->what);
    if (m->asked != K3_MEM_SHM)
        (void)k3_keeper_drop(m->rundir, m->what);
}

/* ---- locked, swapped ---- */

void k3_mem_lock(struct k3_mem *m, void *addr, uint64_t len_bytes)
{
    atomic_fetch_add_explicit(&m->locked_bytes, k3_seg_lock(addr, len_bytes), memory_order_relaxed);
}

/* Is anything of the machine in swap?  True also when that cannot be read. */
static bool machine_swaps(void)
{
    uint64_t kb, total = 1, left = 0;
    char line[256];
    FILE *f = fopen("/proc/meminfo", "re");

    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "SwapTotal: %" SCNu64 " kB", &kb) == 1)
            total = kb;
        else if (sscanf(line, "SwapFree: %" SCNu64 " kB", &kb) == 1)
            left = kb;
    }
    if (f)
        fclose(f);
    return left < total;
}

uint64_t k3_mem_swapped(const struct k3_seg *s)
{
    return s->base && machine_swaps() ? k3_seg_swapped(s->base, s->len_bytes) : 0;
}

uint64_t k3_major_faults(void)
{
    struct rusage u;

    return getrusage(RUSAGE_SELF, &u) == 0 && u.ru_majflt > 0 ? (uint64_t)u.ru_majflt : 0;
}

bool k3_mem_look(struct k3_mem *m, const struct k3_seg *s, uint64_t *swapped_bytes,
                 uint64_t *major_faults)
{
    uint64_t now = k3_now_ns();

    if (m->looked_ns && now - m->looked_ns < LOOK_NS)
        return false;
    m->looked_ns = now;
    *swapped_bytes = k3_mem_swapped(s);
    *major_faults = k3_major_faults();
    return true;
}
