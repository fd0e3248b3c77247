/* tools/doctor_machine.c: what the machine and its kernel are like (doctor.h). */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "ipc/parse.h"
#include "k3-computed/kernels.h"
#include "k3-computed/team.h"
#include "model/schedule.h"
#include "shm/segment.h"
#include "tools/doctor.h"

bool k3_doctor_version(const char *release, unsigned *major, unsigned *minor)
{
    return sscanf(release, "%u.%u", major, minor) == 2;
}

static bool in_path(const char *program)
{
    const char *path = getenv("PATH");
    char *copy = strdup(path ? path : ""), *save = NULL, full[4096];
    bool found = false;

    for (char *d = copy ? strtok_r(copy, ":", &save) : NULL; d && !found; d = strtok_r(NULL, ":", &save)) {
        snprintf(full, sizeof(full), "%s/%s", d, program);
        found = access(full, X_OK) == 0;
    }
    free(copy);
    return found;
}

static void toolchain(struct k3_doctor *d)
{
    bool cc = in_path("gcc") || in_path("cc"), mk = in_path("make");

    if (cc && mk)
        k3_doctor_say(d, K3_FOUND_OK, "toolchain", "a C compiler and make are there");
    else
        k3_doctor_say(d, K3_FOUND_SLOW, "toolchain", "%s missing: needed to build k3, not to run it",
                      cc ? "make is" : mk ? "a C compiler is" : "a C compiler and make are");
}

static void kernel(struct k3_doctor *d)
{
    struct utsname u;
    unsigned major, minor;

    if (uname(&u) != 0 || !k3_doctor_version(u.release, &major, &minor))
        k3_doctor_say(d, K3_FOUND_SLOW, "kernel", "its version is not known; k3 needs Linux 5.15");
    else if (major < 5 || (major == 5 && minor < 15))
        k3_doctor_say(d, K3_FOUND_BAD, "kernel", "Linux %s: k3 needs 5.15 or newer", u.release);
    else if (major < 6 || (major == 6 && minor < 1))
        k3_doctor_say(d, K3_FOUND_SLOW, "kernel", "Linux %s: from 6.1 on, memory under direct reads can be made contiguous",
                      u.release);
    else
        k3_doctor_say(d, K3_FOUND_OK, "kernel", "Linux %s", u.release);
}

static void uring(struct k3_doctor *d)
{
    struct io_uring ring;
    int rc = io_uring_queue_init(8, &ring, 0);

    if (rc < 0) {
        k3_doctor_say(d, K3_FOUND_SLOW, "io_uring", "the kernel refuses it (%s): k3 reads with threads, about as fast",
                      strerror(-rc));
        return;
    }
    io_uring_queue_exit(&ring);
    k3_doctor_say(d, K3_FOUND_OK, "io_uring", "a ring could be set up");
}

static void memlock(struct k3_doctor *d)
{
    struct rlimit r;

    if (getrlimit(RLIMIT_MEMLOCK, &r) != 0)
        k3_doctor_say(d, K3_FOUND_SLOW, "memlock", "its limit is not known");
    else if (r.rlim_cur == RLIM_INFINITY)
        k3_doctor_say(d, K3_FOUND_OK, "memlock", "no limit: buffers can be registered and locked");
    else
        k3_doctor_say(d, r.rlim_cur < (rlim_t)1 << 30 ? K3_FOUND_SLOW : K3_FOUND_OK, "memlock",
                      "%.1f MB: what is beyond is not locked, and may be swapped where there is swap (ulimit -l)",
                      (double)r.rlim_cur / 1e6);
}

static void shared_memory(struct k3_doctor *d, const char *dir)
{
    uint64_t free_bytes, size_bytes;
    char left[K3_SIZE_TEXT], size[K3_SIZE_TEXT];
    bool known = access(dir, W_OK) == 0;

    k3_memory_shm(dir, &free_bytes, &size_bytes);
    if (!known)
        k3_doctor_say(d, K3_FOUND_BAD, "/dev/shm", "%s cannot be written: %s", dir, strerror(errno));
    else if (size_bytes == K3_MEMORY_NONE)
        k3_doctor_say(d, K3_FOUND_OK, "/dev/shm", "no limit of its own");
    else
        k3_doctor_say(d, free_bytes < (uint64_t)2 << 30 ? K3_FOUND_SLOW : K3_FOUND_OK, "/dev/shm",
                      "%s free of %s%s", k3_size_text(left, free_bytes), k3_size_text(size, size_bytes),
                      free_bytes < (uint64_t)2 << 30 ? ": weights will lie in memfds (--memory-from memfd)" : "");
    if (known && size_bytes != K3_MEMORY_NONE)
        k3_doctor_number(d, "free_bytes", (double)free_bytes);
}

static void huge_pages(struct k3_doctor *d)
{
    const uint64_t len = 4 * K3_HUGE_BYTES;
    struct k3_err ignored = K3_ERR_INIT;
    struct k3_seg memory;
    uint64_t got = 0;

    if (k3_seg_create_from(&memory, "doctor", "pages", len, K3_MEM_MEMFD, -1, &ignored) == 0)
        got = k3_seg_collapse(memory.base, len);
    k3_seg_close(&memory);
    if (got == len)
        k3_doctor_say(d, K3_FOUND_OK, "huge pages", "shared memory can be made contiguous");
    else
        k3_doctor_say(d, K3_FOUND_SLOW, "huge pages",
                      "shared memory stays in small pages: direct reads can be much slower (Linux 6.1, or --hugetlb)");
}

static void groups(struct k3_doctor *d)
{
    char limit[K3_SIZE_TEXT], left[K3_SIZE_TEXT];
    struct k3_memory m;

    k3_memory_read("", &m);
    if (m.group_bytes == K3_MEMORY_NONE)
        k3_doctor_say(d, K3_FOUND_OK, "control group", "no memory limit");
    else
        k3_doctor_say(d, K3_FOUND_OK, "control group", "%s of %s is %s, %s of it left", m.group_limit, m.group_dir,
                      k3_size_text(limit, m.group_limit_bytes), k3_size_text(left, m.group_bytes));
    if (m.available_bytes == K3_MEMORY_NONE)
        k3_doctor_say(d, K3_FOUND_SLOW, "memory", "how much is available is not known (/proc/meminfo)");
    else
        k3_doctor_say(d, K3_FOUND_OK, "memory", "%.2f GB available of %.2f GB", (double)m.available_bytes / 1e9,
                      (double)m.total_bytes / 1e9);
}

static void cpu(struct k3_doctor *d)
{
    const char *name = k3_kernels_get("auto")->name;
    struct k3_cpus c;

    k3_cpus_read(&c, "", NULL);
    k3_doctor_say(d, strcmp(name, "c") == 0 ? K3_FOUND_SLOW : K3_FOUND_OK, "CPU", "%u CPU%s on %u core%s allowed, %u thread%s "
                  "of a pass, kernels %s%s", c.n_cpus, c.n_cpus == 1 ? "" : "s", c.n_cores, c.n_cores == 1 ? "" : "s",
                  c.n_threads, c.n_threads == 1 ? "" : "s", name,
                  strcmp(name, "c") == 0 ? ": no AVX2 here, arithmetic will be slow" : "");
    k3_doctor_number(d, "cpus", c.n_cpus);
    k3_doctor_number(d, "cores", c.n_cores);
    k3_doctor_number(d, "threads", c.n_threads);
}

void k3_doctor_machine(struct k3_doctor *d, const char *shm_dir)
{
    toolchain(d);
    kernel(d);
    uring(d);
    memlock(d);
    shared_memory(d, shm_dir);
    huge_pages(d);
    groups(d);
    cpu(d);
}
