/* tests/unit/kernel_sets.c: see kernel_sets.h. */
#include "tests/unit/kernel_sets.h"

#include <math.h>
#include <string.h>

#include "k3-computed/widen.h"

size_t k3_test_sets(const struct k3_kernels *out[3])
{
    static const char *const names[3] = {"c", "avx2", "avx512"};
    size_t n = 0;
    for (size_t i = 0; i < 3; i++) {
        const struct k3_kernels *k = k3_kernels_get(names[i]);
        if (k)
            out[n++] = k;
    }
    return n;
}

uint32_t k3_test_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32 ^ z);
}

static float plain(uint64_t *state)
{
    return (float)(int32_t)k3_test_random(state) * 0x1p-31f;
}

static float special(uint64_t *state)
{
    static const uint32_t bits[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001,
                                    0x007fffff, 0x807fffff, 0x00800000, 0x7f7fffff,
                                    0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                    0x7f800001, 0xffc01234, 0x3f800000, 0xbf800000};
    uint32_t draw = k3_test_random(state);
    if (draw % 8 == 0)
        return k3_bits_to_f32(bits[draw >> 8 & 15]);
    if (draw % 8 == 1)
        return k3_bits_to_f32(k3_test_random(state));
    return plain(state);
}

void k3_test_fill(float *x, size_t n, enum k3_test_kind kind, uint64_t *state)
{
    for (size_t i = 0; i < n; i++)
        x[i] = kind == K3_TEST_PLAIN ? plain(state)
               : kind == K3_TEST_TINY
                   ? plain(state) * (k3_test_random(state) & 1 ? 0x1p-72f : 0x1p-64f)
                   : special(state);
}

void k3_test_fill_dtype(void *w, size_t n, enum k3_dtype dtype, enum k3_test_kind kind,
                        uint64_t *state)
{
    for (size_t i = 0; i < n; i++) {
        float f;
        uint16_t h;
        k3_test_fill(&f, 1, kind, state);
        if (dtype == K3_F32) {
            memcpy((char *)w + i * sizeof f, &f, sizeof f);
            continue;
        }
        h = (uint16_t)(k3_f32_to_bits(f) >> 16);
        if (dtype == K3_F16) {
            h = (uint16_t)k3_test_random(state);
            if (kind == K3_TEST_PLAIN) /* finite, below 2 */
                h &= 0xbfff;
            else if (kind == K3_TEST_TINY) /* zeros and subnormals */
                h &= 0x83ff;
        }
        memcpy((char *)w + i * sizeof h, &h, sizeof h);
    }
}

size_t k3_test_first_difference(const float *a, const float *b, size_t n)
{
    size_t i = 0;
    while (i < n &&
           (k3_f32_to_bits(a[i]) == k3_f32_to_bits(b[i]) || (a[i] != a[i] && b[i] != b[i])))
        i++;
    return i;
}

size_t k3_test_first_far(const float *got, const double *want, size_t n, double abs, double rel)
{
    size_t i = 0;
    while (i < n && fabs(got[i] - want[i]) <= abs + rel * fabs(want[i]))
        i++;
    return i;
}
