/* k3-computed/kernels.c: which set of kernels this CPU can run. */
#include "k3-computed/kernels.h"

#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "k3-computed/kernels_impl.h"
#include "k3-computed/widen.h"

_Alignas(64) float k3_mxfp4_tables[256][16];
_Alignas(64) uint8_t k3_mxfp4_byte_tables[256][32];

static void fill_tables(void)
{
    for (unsigned s = 0; s < 256; s++)
        for (unsigned code = 0; code < 16; code++) {
            float w = k3_mxfp4_widen(code, (uint8_t)s);
            uint32_t bits = k3_f32_to_bits(w);

            k3_mxfp4_tables[s][code] = w;
            k3_mxfp4_byte_tables[s][code] = (uint8_t)(bits >> 16);
            k3_mxfp4_byte_tables[s][16 + code] = (uint8_t)(bits >> 24);
        }
}

/* clang 14 knows no __builtin_cpu_supports("f16c").  F16C needs no more of the system than AVX does. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx = 0, edx;

    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

/* __builtin_cpu_supports also asks the operating system (xgetbv) whether the registers are saved. */
static bool has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct k3_kernels *k3_kernels_get(const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    bool best = name == NULL || strcmp(name, "auto") == 0;

    pthread_once(&once, fill_tables);
    if ((best || strcmp(name, "avx512") == 0) && has_avx512())
        return &k3_kernels_avx512;
    if ((best || strcmp(name, "avx2") == 0) && has_avx2())
        return &k3_kernels_avx2;
    if (best || strcmp(name, "c") == 0)
        return &k3_kernels_c;
    return NULL;
}

int k3_kernels_find(const struct k3_kernels **out, const char *name, struct k3_err *err)
{
    *out = k3_kernels_get(name);
    if (*out)
        return 0;
    if (strcmp(name, "avx2") && strcmp(name, "avx512"))
        return k3_refuse(err, -EINVAL, "--kernels %.64s: there are auto, c, avx2 and avx512", name);
    return k3_refuse(err, -ENOTSUP, "--kernels %s: this CPU lacks these instructions; use --kernels auto (here: %s)", name,
                     k3_kernels_get("auto")->name);
}
