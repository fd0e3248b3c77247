/* Values.  Formula: spec/model.md 8.2.  Random: word j of a tensor is mix(key + j), a counter generator, so any part of
 * any tensor can be made alone; four elements of a word look up a bell curve of 4,096 steps.  2 GB/s on one core. */
#include <math.h>
#include <string.h>

#include "tools/mkmodel.h"

#define BELL 4096

static float bell[BELL]; /* quantiles of the standard normal distribution */

uint64_t k3_mk_fnv(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;

    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 1099511628211u;
    return h;
}

uint64_t k3_mk_mix(uint64_t x)
{
    uint64_t z = x + 0x9E3779B97F4A7C15u;

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint16_t k3_mk_bf16(float v)
{
    uint32_t u;

    memcpy(&u, &v, sizeof(u));
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

uint16_t k3_mk_f16(float v)
{
    uint32_t u, sign, rest, shift;
    int32_t exp;

    memcpy(&u, &v, sizeof(u));
    sign = u >> 16 & 0x8000;
    exp = (int32_t)(u >> 23 & 255) - 112; /* biased as F16 */
    rest = (u & 0x7fffff) | 0x800000;
    if (exp >= 31)
        return (uint16_t)(sign | 0x7c00);
    if (exp < -10)
        return (uint16_t)sign;
    shift = exp > 0 ? 13 : (uint32_t)(14 - exp);
    u = (exp > 0 ? (uint32_t)exp << 10 : 0) + ((rest >> shift) & (exp > 0 ? 0x3ff : 0x7ff));
    rest &= (1u << shift) - 1;
    u += rest > 1u << (shift - 1) || (rest == 1u << (shift - 1) && (u & 1)); /* may carry into the exponent */
    return (uint16_t)(sign | u);
}

/* Inverse of the normal distribution function by bisection; 4,096 values, once. */
static double quantile(double p)
{
    double lo = -8, hi = 8;

    for (int i = 0; i < 60; i++) {
        double mid = (lo + hi) / 2;

        if (0.5 * erfc(-mid / sqrt(2)) < p)
            lo = mid;
        else
            hi = mid;
    }
    return (lo + hi) / 2;
}

void k3_mk_fill_init(void)
{
    for (int i = 0; i < BELL; i++)
        bell[i] = (float)quantile((i + 0.5) / BELL);
}

static void put(uint8_t *out, size_t i, uint8_t dtype, float v)
{
    uint16_t half;

    if (dtype == K3_F32) {
        memcpy(out + 4 * i, &v, 4);
        return;
    }
    half = dtype == K3_BF16 ? k3_mk_bf16(v) : k3_mk_f16(v);
    memcpy(out + 2 * i, &half, 2);
}

static void formula_bytes(const struct k3_mk_tensor *t, uint64_t first, size_t n, uint8_t *out)
{
    size_t width = k3_dtype_bytes(t->dtype);

    for (size_t i = 0; i < n / width; i++) {
        uint64_t at = first / width + i, r = k3_mk_mix(t->key + at);

        if (t->values == K3_MK_PACKED)
            out[i] = (uint8_t)(r >> 56);
        else if (t->values == K3_MK_SCALE)
            out[i] = (uint8_t)(122 + (r >> 56) % 3);
        else if (at >= t->n_used)
            put(out, i, t->dtype, 0);
        else
            put(out, i, t->dtype,
                (float)((double)t->formula_base +
                        (double)t->formula_gain * ((double)((int64_t)(r >> 40) - (1 << 23)) / (double)(1 << 23))));
    }
}

/* first is a multiple of 64, so of 8 bytes: words begin with it. */
static void random_u8(const struct k3_mk_tensor *t, uint64_t key, uint64_t first, size_t n, uint8_t *out)
{
    uint8_t base = t->values == K3_MK_SCALE ? (uint8_t)t->sigma : 0;

    for (size_t i = 0; i < n; i += 8) {
        uint64_t w = k3_mk_mix(key + (first + i) / 8);

        if (t->values == K3_MK_SCALE) /* two neighbouring exponents */
            w = (w & 0x0101010101010101u) + 0x0101010101010101u * base;
        memcpy(out + i, &w, n - i < 8 ? n - i : 8);
    }
}

/* F32 gets jitter below the steps of the curve, so that all bits of its mantissa are used. */
static float random_value(const struct k3_mk_tensor *t, uint32_t bits16)
{
    return t->mean + t->sigma * (bell[bits16 >> 4] + 1e-4f * (float)(bits16 & 15));
}

static void random_floats(const struct k3_mk_tensor *t, uint64_t key, uint64_t first, size_t n, uint8_t *out)
{
    size_t width = k3_dtype_bytes(t->dtype), n_elements = n / width;
    uint64_t at = first / width; /* a multiple of 4 */

    for (size_t i = 0; i < n_elements; i += 4) {
        uint64_t w = k3_mk_mix(key + (at + i) / 4);

        for (size_t k = 0; k < 4 && i + k < n_elements; k++)
            put(out, i + k, t->dtype,
                at + i + k < t->n_used ? random_value(t, (uint32_t)(w >> (16 * k)) & 0xffff) : 0);
    }
}

static void random_halves(const struct k3_mk_tensor *t, uint64_t key, uint64_t first, size_t n, uint8_t *out)
{
    uint16_t curve[BELL];
    uint64_t at = first / 8;

    for (int i = 0; i < BELL; i++) {
        float v = t->mean + t->sigma * bell[i];
        curve[i] = t->dtype == K3_BF16 ? k3_mk_bf16(v) : k3_mk_f16(v);
    }
    for (size_t i = 0; i < n; i += 8) {
        uint64_t w = k3_mk_mix(key + at + i / 8);
        uint64_t v = (uint64_t)curve[w >> 4 & 0xfff] | (uint64_t)curve[w >> 20 & 0xfff] << 16 |
                     (uint64_t)curve[w >> 36 & 0xfff] << 32 | (uint64_t)curve[w >> 52] << 48;

        memcpy(out + i, &v, n - i < 8 ? n - i : 8);
    }
}

void k3_mk_fill(const struct k3_mk_plan *p, const struct k3_mk_tensor *t, uint64_t first, size_t n, uint8_t *out)
{
    uint64_t key = k3_mk_mix(t->key ^ k3_mk_mix(p->opts.seed));

    if (p->opts.formula)
        formula_bytes(t, first, n, out);
    else if (t->values != K3_MK_FLOAT)
        random_u8(t, key, first, n, out);
    else if (t->dtype == K3_F32 || t->n_used != UINT32_MAX)
        random_floats(t, key, first, n, out);
    else
        random_halves(t, key, first, n, out);
}
