/* k3-computed/widen.h: exact widening of one stored element to fp32, and the constants of rule (f),
 * shared by the three kernel sets and ops.c.  Pointers to weights need no alignment. */
#ifndef K3_COMPUTED_WIDEN_H
#define K3_COMPUTED_WIDEN_H

#include <stdint.h>
#include <string.h>

#include "model/index.h"

static inline float k3_bits_to_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t k3_f32_to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float k3_bf16_widen(uint16_t h)
{
    return k3_bits_to_f32((uint32_t)h << 16);
}

/* A NaN comes out quiet, as from vcvtph2ps. */
static inline float k3_f16_widen(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31)
        return k3_bits_to_f32(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact */
        float magnitude = (float)mantissa * 0x1p-24f;
        return k3_bits_to_f32(sign | k3_f32_to_bits(magnitude));
    }
    return k3_bits_to_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Element i of a plain dtype (F32, F16, BF16). */
static inline float k3_widen_at(const void *w, size_t i, enum k3_dtype dtype)
{
    uint16_t h;
    float f;
    if (dtype == K3_F32) {
        memcpy(&f, (const char *)w + i * sizeof f, sizeof f);
        return f;
    }
    memcpy(&h, (const char *)w + i * sizeof h, sizeof h);
    return dtype == K3_F16 ? k3_f16_widen(h) : k3_bf16_widen(h);
}

/* 2^(s-127) exactly, subnormal for s = 0; 0 for s = 255, which OCP calls NaN (spec/model.md 5). */
static inline float k3_e8m0_widen(uint8_t s)
{
    return k3_bits_to_f32(s == 255 ? 0 : s == 0 ? 0x00400000 : (uint32_t)s << 23);
}

/* The weight of rule (c).  A group with s = 255 is all +0, also where the code's sign bit is set.
 */
static inline float k3_mxfp4_widen(unsigned code, uint8_t s)
{
    static const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float magnitude =
        e2m1[code & 7] * k3_e8m0_widen(s); /* exact: two significant bits, not below 2^-128 */
    return code & 8 && s != 255 ? -magnitude : magnitude;
}

/* Rule (f): the constants of exp and tanh.  Polynomials: Remez fits rounded coefficient by
 * coefficient. */
#define K3_EXP_LO (-104.0f) /* e^-104 < 2^-150 rounds to 0 */
#define K3_EXP_HI 89.0f /* e^89 > FLT_MAX */
#define K3_LOG2E 0x1.715476p+0f
#define K3_RINT_MAGIC 0x1.8p23f /* adding it rounds to an integer, ties to even, for |x| < 2^22 */
#define K3_LN2_HI 0x1.62e43p-1f
#define K3_LN2_LO (-0x1.05c61p-29f)
/* (e^r - 1 - r) / r^2 on |r| <= ln2/2: relative error of e^r 2^-33 */
#define K3_EXP_C2 0x1p-1f
#define K3_EXP_C3 0x1.555554p-3f
#define K3_EXP_C4 0x1.5554e8p-5f
#define K3_EXP_C5 0x1.11130ep-7f
#define K3_EXP_C6 0x1.6d4cbcp-10f
#define K3_EXP_C7 0x1.9dfba4p-13f
/* tanh: (tanh(a)/a - 1) / a^2 in z = a^2 for a < 0.625: relative error 2^-32 */
#define K3_TANH_SMALL 0.625f
#define K3_TANH_C0 (-0x1.555554p-2f)
#define K3_TANH_C1 0x1.11107ap-3f
#define K3_TANH_C2 (-0x1.b9f188p-5f)
#define K3_TANH_C3 0x1.63a55p-6f
#define K3_TANH_C4 (-0x1.0c5ecep-7f)
#define K3_TANH_C5 0x1.1a27fep-9f
#define K3_QNAN_BITS 0x7fc00000u

#endif
