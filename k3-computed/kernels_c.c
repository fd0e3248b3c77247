/* k3-computed/kernels_c.c: the kernels as formulas.  This file is the definition that the vector
 * sets repeat; it is never tuned.  __builtin_fmaf is one exactly rounded IEEE fma, on a CPU without
 * the instruction, too. */
#include <math.h>
#include <string.h>

#include "k3-computed/kernels.h"
#include "k3-computed/widen.h"

#define LANES 16

static float fma32(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

/* Rule (b), the tree. */
static float tree(float lane[LANES])
{
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++)
            lane[l] = lane[l] + lane[l + half];
    return lane[0];
}

static void mul_plain(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                      const float *x, size_t ldx, size_t n_rows, enum k3_dtype dtype)
{
    for (size_t o = 0; o < n_out; o++) {
        for (size_t r = 0; r < n_rows; r++) {
            float lane[LANES] = {0};
            for (size_t i = 0; i < n_cols; i++)
                lane[i % LANES] =
                    fma32(k3_widen_at(w, o * n_cols + i, dtype), x[r * ldx + i], lane[i % LANES]);
            y[r * ldy + o] = tree(lane);
        }
    }
}

static void mul_f32(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                    const float *x, size_t ldx, size_t n_rows)
{
    mul_plain(y, ldy, w, n_out, n_cols, x, ldx, n_rows, K3_F32);
}

static void mul_f16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                    const float *x, size_t ldx, size_t n_rows)
{
    mul_plain(y, ldy, w, n_out, n_cols, x, ldx, n_rows, K3_F16);
}

static void mul_bf16(float *y, size_t ldy, const void *w, size_t n_out, size_t n_cols,
                     const float *x, size_t ldx, size_t n_rows)
{
    mul_plain(y, ldy, w, n_out, n_cols, x, ldx, n_rows, K3_BF16);
}

/* Rule (c).  Byte j of a group holds column 2j in its low and column 2j+1 in its high nibble; x is
 * split. */
static void mul_mxfp4(float *y, size_t ldy, const uint8_t *packed, const uint8_t *scale,
                      size_t n_out, size_t n_cols, const float *x, size_t ldx, size_t n_rows)
{
    size_t n_groups = n_cols / 32;
    for (size_t o = 0; o < n_out; o++) {
        for (size_t r = 0; r < n_rows; r++) {
            float lane[LANES] = {0};
            for (size_t g = 0; g < n_groups; g++) {
                const uint8_t *bytes = packed + o * (n_cols / 2) + g * 16;
                const float *xg = x + r * ldx + g * 32;
                uint8_t s = scale[o * n_groups + g];
                for (size_t j = 0; j < LANES; j++)
                    lane[j] = fma32(k3_mxfp4_widen(bytes[j] & 15, s), xg[j], lane[j]);
                for (size_t j = 0; j < LANES; j++)
                    lane[j] = fma32(k3_mxfp4_widen(bytes[j] >> 4, s), xg[LANES + j], lane[j]);
            }
            y[r * ldy + o] = tree(lane);
        }
    }
}

static void split(float *y, const float *x, size_t n)
{
    for (size_t g = 0; g < n; g += 2 * LANES) {
        float both[2 * LANES];
        memcpy(both, x + g, sizeof both);
        for (size_t j = 0; j < LANES; j++) {
            y[g + j] = both[2 * j];
            y[g + LANES + j] = both[2 * j + 1];
        }
    }
}

static float dot(const float *a, const float *b, size_t n)
{
    float lane[LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % LANES] = fma32(a[i], b[i], lane[i % LANES]);
    return tree(lane);
}

/* Rule (d). */
static void mul_t_plain(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                        size_t n_out, enum k3_dtype dtype)
{
    for (size_t j = 0; j < n_out; j++)
        for (size_t i = 0; i < n_sum; i++)
            y[j] = fma32(a[i], k3_widen_at(m, i * ldm + j, dtype), y[j]);
}

static void mul_t_f32(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                      size_t n_out)
{
    mul_t_plain(y, a, m, ldm, n_sum, n_out, K3_F32);
}

static void mul_t_f16(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                      size_t n_out)
{
    mul_t_plain(y, a, m, ldm, n_sum, n_out, K3_F16);
}

static void mul_t_bf16(float *y, const float *a, const void *m, size_t ldm, size_t n_sum,
                       size_t n_out)
{
    mul_t_plain(y, a, m, ldm, n_sum, n_out, K3_BF16);
}

static void conv(float *y, const float *u, const float *hist, size_t ldh, const float *w, size_t n,
                 size_t taps)
{
    for (size_t c = 0; c < n; c++) {
        float acc = 0;
        for (size_t t = 0; t + 1 < taps; t++)
            acc = fma32(w[c * taps + t], hist[t * ldh + c], acc);
        y[c] = taps ? fma32(w[c * taps + taps - 1], u[c], acc) : acc;
    }
}

static void axpy(float *y, float a, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = fma32(a, x[i], y[i]);
}

static void add(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] + b[i];
}

static void scale(float *y, const float *x, float a, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * a;
}

static void mul_vec(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] * b[i];
}

/* Rule (f): clamp, rint, two-step fma reduction, fixed polynomial by fma, exact scaling by two
 * powers of two (one alone leaves the exponent range for subnormal results and near overflow; the
 * second multiplication rounds once). */
float k3_expf(float x)
{
    float t, n, r, p;
    int32_t k, k1;
    if (x != x)
        return k3_bits_to_f32(K3_QNAN_BITS);
    x = x < K3_EXP_LO ? K3_EXP_LO : x;
    x = x > K3_EXP_HI ? K3_EXP_HI : x;
    t = fma32(x, K3_LOG2E, K3_RINT_MAGIC);
    n = t - K3_RINT_MAGIC;
    k = (int32_t)(k3_f32_to_bits(t) - k3_f32_to_bits(K3_RINT_MAGIC));
    r = fma32(n, -K3_LN2_HI, x);
    r = fma32(n, -K3_LN2_LO, r);
    p = K3_EXP_C7;
    p = fma32(p, r, K3_EXP_C6);
    p = fma32(p, r, K3_EXP_C5);
    p = fma32(p, r, K3_EXP_C4);
    p = fma32(p, r, K3_EXP_C3);
    p = fma32(p, r, K3_EXP_C2);
    p = fma32(p, r, 1.0f);
    p = fma32(p, r, 1.0f);
    k1 = k >> 1;
    p = p * k3_bits_to_f32((uint32_t)(k1 + 127) << 23);
    return p * k3_bits_to_f32((uint32_t)(k - k1 + 127) << 23);
}

/* 1/(1+e^-x) for x >= 0 and e^x/(1+e^x) below, so that small results keep their precision. */
float k3_sigmoidf(float x)
{
    float z = k3_expf(k3_bits_to_f32(k3_f32_to_bits(x) | 0x80000000)); /* e^-|x| */
    if (x != x)
        return k3_bits_to_f32(K3_QNAN_BITS);
    return (x < 0 ? z : 1.0f) / (1.0f + z);
}

/* On a = |x|, the sign put back: odd polynomial below 0.625, (1 - e^-2a) / (1 + e^-2a) from there
 * on. */
float k3_tanhf(float x)
{
    uint32_t sign = k3_f32_to_bits(x) & 0x80000000;
    float a = k3_bits_to_f32(k3_f32_to_bits(x) & 0x7fffffff), y;
    if (x != x)
        return k3_bits_to_f32(K3_QNAN_BITS);
    if (a < K3_TANH_SMALL) {
        float z = a * a, p = K3_TANH_C5;
        p = fma32(p, z, K3_TANH_C4);
        p = fma32(p, z, K3_TANH_C3);
        p = fma32(p, z, K3_TANH_C2);
        p = fma32(p, z, K3_TANH_C1);
        p = fma32(p, z, K3_TANH_C0);
        y = fma32(a, p * z, a);
    } else {
        float e = k3_expf(-2.0f * a);
        y = (1.0f - e) / (1.0f + e);
    }
    return k3_bits_to_f32(k3_f32_to_bits(y) | sign);
}

static void exp_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = k3_expf(x[i]);
}

static void sigmoid_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = k3_sigmoidf(x[i]);
}

static void tanh_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = k3_tanhf(x[i]);
}

static void silu_vec(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * k3_sigmoidf(x[i]);
}

static void situ_vec(float *y, const float *g, const float *u, size_t n, float beta, float lin)
{
    for (size_t i = 0; i < n; i++)
        y[i] = ((beta * k3_tanhf(g[i] / beta)) * k3_sigmoidf(g[i])) * (lin * k3_tanhf(u[i] / lin));
}

static void kda_step(float *S, float *o, const float *q, const float *k, const float *v,
                     const float *alpha, float beta, size_t dk, size_t dv, float *scratch)
{
    float *d = scratch;
    for (size_t j = 0; j < dv; j++) {
        float u = 0;
        for (size_t i = 0; i < dk; i++) {
            S[i * dv + j] = alpha[i] * S[i * dv + j];
            u = fma32(k[i], S[i * dv + j], u);
        }
        d[j] = beta * (v[j] - u);
    }
    for (size_t j = 0; j < dv; j++) {
        float out = 0;
        for (size_t i = 0; i < dk; i++) {
            S[i * dv + j] = fma32(k[i], d[j], S[i * dv + j]);
            out = fma32(q[i], S[i * dv + j], out);
        }
        o[j] = out;
    }
}

static float max_of(const float *x, size_t n)
{
    float m = -INFINITY;
    for (size_t i = 0; i < n; i++)
        if (x[i] > m || (x[i] == m && !signbit(x[i]))) /* a NaN compares false; +0 replaces -0 */
            m = x[i];
    return m;
}

const struct k3_kernels k3_kernels_c = {
    .name = "c",
    .mul = {[K3_F32] = mul_f32, [K3_F16] = mul_f16, [K3_BF16] = mul_bf16},
    .mul_mxfp4 = mul_mxfp4,
    .split = split,
    .dot = dot,
    .mul_t = {[K3_F32] = mul_t_f32, [K3_F16] = mul_t_f16, [K3_BF16] = mul_t_bf16},
    .conv = conv,
    .axpy = axpy,
    .add = add,
    .scale = scale,
    .mul_vec = mul_vec,
    .exp = exp_vec,
    .sigmoid = sigmoid_vec,
    .tanh = tanh_vec,
    .silu = silu_vec,
    .situ = situ_vec,
    .kda_step = kda_step,
    .max = max_of,
};
