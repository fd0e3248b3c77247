/* tools/doctor_speed.c: drives and kernels, measured (doctor.h). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/device.h"
#include "ipc/daemon.h"
#include "k3-computed/kernels.h"
#include "k3-computed/team.h"
#include "tools/doctor.h"

#define N_COLS 7168u
#define TILE 64u
#define W_ROWS 4096u /* 58 MB of bf16: more than a cache */
#define ROUNDS 5
#define ROTATING_BYTES_PER_S 0.5e9 /* no rotating disk reads as fast as this */

/* Does some weight file of the directory take O_DIRECT?  -ENOENT: there is none. */
static int takes_direct(const char *dir)
{
    char path[4096];
    struct dirent *e;
    DIR *d = opendir(dir);
    int rc = -ENOENT;

    while (d && rc == -ENOENT && (e = readdir(d))) {
        const char *dot = strrchr(e->d_name, '.');
        int fd;

        if (!dot || (strcmp(dot, ".safetensors") != 0 && strcmp(dot, ".k3pack") != 0))
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
        rc = fd >= 0 ? 0 : -errno;
        if (fd >= 0)
            close(fd);
    }
    if (d)
        closedir(d);
    return rc;
}

static int drive(struct k3_doctor *d, const char *dir, struct k3_plan_device *out, struct k3_err *err)
{
    struct k3_device dev;
    char name[160], node[32] = "";
    int rc = k3_device_of(dir, NULL, &dev, err), direct = takes_direct(dir);
    const char *spins = "";
    bool slow;

    if (rc == 0)
        rc = k3_plan_rate(&dir, 1, out, err);
    if (rc < 0)
        return rc;
    snprintf(name, sizeof(name), "drive of %.128s", dir);
    if (dev.numa_node >= 0)
        snprintf(node, sizeof(node), ", node %d", dev.numa_node);
    /* The kernel takes a virtual drive for a rotating one when the host does not say: what was measured decides. */
    slow = dev.rotational && out->bytes_per_s < ROTATING_BYTES_PER_S;
    if (dev.rotational)
        spins = slow ? ", a rotating disk" : ", rotational=1 says the kernel, but too fast for a rotating disk";
    slow = slow || dev.network || dev.memory || dev.overlay || direct < 0;
    k3_doctor_say(d, slow || out->bytes_per_s <= 0 ? K3_FOUND_SLOW : K3_FOUND_OK, name, "%s, %s%s%s%s%s%s; direct reads: %s",
                  dev.disk[0] ? dev.disk : "no drive", dev.fs, node, spins,
                  dev.network ? ", over a network" : "", dev.memory ? ", in memory" : "",
                  dev.overlay ? ", a stack of directories" : "", direct == 0 ? "yes" : direct == -ENOENT ? "no weight file to try"
                                                                                                          : "no");
    if (out->bytes_per_s > 0)
        k3_doctor_say(d, K3_FOUND_OK, "its rate", "%.2f GB/s, one read at a time %.2f GB/s (%s)", out->bytes_per_s / 1e9,
                      out->bytes_per_s_depth1 / 1e9, out->how);
    else
        k3_doctor_say(d, K3_FOUND_SLOW, "its rate", "not known: %s", out->how[0] ? out->how : "not measured");
    k3_doctor_number(d, "bytes_per_s", out->bytes_per_s);
    k3_doctor_number(d, "bytes_per_s_depth1", out->bytes_per_s_depth1);
    return 0;
}

int k3_doctor_drives(struct k3_doctor *d, const char *const *dirs, size_t n, struct k3_doctor_speed *out, struct k3_err *err)
{
    struct k3_plan_device one;
    int rc = 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = drive(d, dirs[i], &one, err);
        if (i == 0)
            out->trunk = one;
    }
    if (rc == 0 && n > 0)
        rc = k3_plan_rate(n > 1 ? dirs + 1 : dirs, n > 1 ? n - 1 : 1, &out->experts, err);
    return rc;
}

struct work {
    const struct k3_kernels *k;
    uint8_t *w;
    float *x, *y;
    bool mxfp4;
};

static void multiply(void *arg, size_t i, uint32_t worker)
{
    struct work *b = arg;
    size_t row_bytes = b->mxfp4 ? N_COLS / 2 + N_COLS / 32 : N_COLS * 2;
    const uint8_t *w = b->w + i * TILE * row_bytes;

    (void)worker;
    if (b->mxfp4)
        b->k->mul_mxfp4(b->y + i * TILE, W_ROWS, w, w + TILE * (N_COLS / 2), TILE, N_COLS, b->x, N_COLS, 1);
    else
        b->k->mul[K3_BF16](b->y + i * TILE, W_ROWS, w, TILE, N_COLS, b->x, N_COLS, 1);
}

static double best_rate(struct k3_team *team, struct work *b)
{
    double bytes = (double)W_ROWS * (b->mxfp4 ? N_COLS / 2 + N_COLS / 32 : N_COLS * 2), best = 0;

    for (int i = 0; i < ROUNDS; i++) {
        uint64_t t0 = k3_now_ns();
        double rate;

        k3_team_run(team, W_ROWS / TILE, 1, multiply, b);
        rate = bytes / ((double)(k3_now_ns() - t0 + 1) / 1e9);
        best = rate > best ? rate : best;
    }
    return best;
}

int k3_doctor_kernels(struct k3_doctor *d, struct k3_doctor_speed *out, struct k3_err *err)
{
    const size_t w_bytes = (size_t)W_ROWS * N_COLS * 2;
    struct work b = { .k = k3_kernels_get("auto") };
    struct k3_team *team = NULL;
    int rc = k3_team_new(&team, 0, err);

    if (rc < 0)
        return rc;
    (void)k3_team_pin(team, NULL);
    b.w = mmap(NULL, w_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    b.x = calloc(N_COLS, sizeof(*b.x));
    b.y = calloc(W_ROWS, sizeof(*b.y));
    if (b.w == MAP_FAILED || !b.x || !b.y) {
        rc = k3_fail(err, -ENOMEM, "no memory to measure the kernels with");
    } else {
        memset(b.w, 0x3c, w_bytes); /* ordinary numbers in both formats */
        for (uint32_t i = 0; i < N_COLS; i++)
            b.x[i] = 1;
        out->bf16_bytes_per_s = best_rate(team, &b);
        b.mxfp4 = true;
        out->mxfp4_bytes_per_s = best_rate(team, &b);
        k3_doctor_say(d, K3_FOUND_OK, "arithmetic", "one row: bf16 %.1f GB/s, MXFP4 %.1f GB/s with %u thread%s",
                      out->bf16_bytes_per_s / 1e9, out->mxfp4_bytes_per_s / 1e9, k3_team_size(team),
                      k3_team_size(team) == 1 ? "" : "s");
        k3_doctor_number(d, "bf16_bytes_per_s", out->bf16_bytes_per_s);
        k3_doctor_number(d, "mxfp4_bytes_per_s", out->mxfp4_bytes_per_s);
    }
    if (b.w != MAP_FAILED)
        munmap(b.w, w_bytes);
    free(b.x);
    free(b.y);
    k3_team_free(team);
    return rc;
}
