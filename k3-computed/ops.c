/* k3-computed/ops.c: the operators of spec/model.md 4 from the kernels; ops.h says every order. */
#include "k3-computed/ops.h"

#include <math.h>
#include <string.h>

#include "ipc/err.h"
#include "k3-computed/widen.h"
#include "model/config.h"

/* Elementwise operators that need a temporary go through one of this many floats on the stack. */
#define CHUNK 256
/* Rule (e): absolute positions that are summed from +0 before they join the total. */
#define ATTEND_BLOCK 64
#define ATTEND_COLS 128
#define ATTEND_MOST K3_ATTEND_QUERIES
/* 1 + one snapshot a layer at most (spec/model.md 4.6). */
#define MAX_SOURCES (K3_MAX_LAYERS + 1)

static float inverse_rms(const struct k3_kernels *k, const float *x, size_t n, float eps)
{
    return 1.0f / sqrtf(k->dot(x, x, n) / (float)n + eps);
}

void k3_rmsnorm(const struct k3_kernels *k, float *y, const float *x, const float *w, size_t n,
                float eps)
{
    float r = inverse_rms(k, x, n, eps);
    k->scale(y, x, r, n);
    k->mul_vec(y, y, w, n);
}

void k3_l2norm(const struct k3_kernels *k, float *y, const float *x, size_t n, float scale)
{
    float r = 1.0f / sqrtf(k->dot(x, x, n) + 1e-6f);
    k->scale(y, x, r, n);
    if (scale != 1.0f)
        k->scale(y, y, scale, n);
}

void k3_shortconv(const struct k3_kernels *k, float *y, const float *u, float *hist, const float *w,
                  size_t n, size_t taps)
{
    float acc[CHUNK];
    for (size_t c = 0; c < n; c += CHUNK) {
        size_t n_here = n - c < CHUNK ? n - c : CHUNK, bytes = n_here * sizeof *u;
        k->conv(acc, u + c, hist + c, n, w + c * taps, n_here, taps);
        for (size_t t = 0; t + 2 < taps; t++)
            memcpy(hist + t * n + c, hist + (t + 1) * n + c, bytes);
        if (taps > 1)
            memcpy(hist + (taps - 2) * n + c, u + c, bytes);
        k->silu(y + c, acc, n_here); /* last: y may be u */
    }
}

void k3_kda_decay(const struct k3_kernels *k, float *alpha, const float *z, const float *bias,
                  float ea, float bound, size_t d)
{
    k->add(alpha, z, bias, d);
    k->scale(alpha, alpha, ea, d);
    k->sigmoid(alpha, alpha, d);
    k->scale(alpha, alpha, bound, d);
    k->exp(alpha, alpha, d);
}

void k3_kda_gate(const struct k3_kernels *k, float *y, const float *o, const float *w,
                 const float *gate, size_t d, float eps)
{
    float r = inverse_rms(k, o, d, eps), open[CHUNK];
    for (size_t i = 0; i < d; i += CHUNK) {
        size_t n = d - i < CHUNK ? d - i : CHUNK;
        k->sigmoid(open, gate + i, n);
        k->scale(y + i, o + i, r, n);
        k->mul_vec(y + i, y + i, w + i, n);
        k->mul_vec(y + i, y + i, open, n);
    }
}

void k3_attnres(const struct k3_kernels *k, float *y, const float *const *x, size_t n,
                const float *f, size_t h, float eps, float *weights)
{
    float local[MAX_SOURCES], *a = weights ? weights : local;
    float m, sum = 0;
    if (n > MAX_SOURCES)
        k3_bug("attention residual over %zu sources, at most %d", n, MAX_SOURCES);
    for (size_t s = 0; s < n; s++)
        a[s] = inverse_rms(k, x[s], h, eps) * k->dot(x[s], f, h);
    m = k->max(a, n);
    for (size_t s = 0; s < n; s++)
        a[s] = a[s] - m;
    k->exp(a, a, n);
    for (size_t s = 0; s < n; s++)
        sum = sum + a[s];
    memset(y, 0, h * sizeof *y);
    for (size_t s = 0; s < n; s++) {
        a[s] = a[s] / sum;
        k->axpy(y, a[s], x[s], h);
    }
}

static float choice_of(const float *s, const float *bias, size_t e)
{
    float c = s[e] + bias[e];
    return c != c ? -INFINITY : c;
}

void k3_choose(const struct k3_kernels *k, uint16_t *ids, const float *logits, const float *bias, size_t n,
               size_t top_k, float *scratch)
{
    float *s = scratch;
    size_t n_chosen = 0;
    k->sigmoid(s, logits, n);
    /* ids: the best so far by descending choice.  Only a strictly greater choice moves ahead, and e
     * ascends: ties keep the lower id. */
    for (size_t e = 0; e < n; e++) {
        float c = choice_of(s, bias, e);
        size_t at = n_chosen;
        while (at > 0 && c > choice_of(s, bias, ids[at - 1]))
            at--;
        if (at >= top_k)
            continue;
        if (n_chosen < top_k)
            n_chosen++;
        memmove(ids + at + 1, ids + at, (n_chosen - 1 - at) * sizeof *ids);
        ids[at] = (uint16_t)e;
    }
}

void k3_route(const struct k3_kernels *k, uint16_t *ids, float *weights, const float *logits,
              const float *bias, size_t n, size_t top_k, int renormalize, float scale,
              float *scratch)
{
    float *s = scratch, sum = 0, divisor;
    size_t n_chosen = top_k;
    k3_choose(k, ids, logits, bias, n, top_k, scratch);
    for (size_t i = 1; i < n_chosen; i++) { /* ascending ids from here on */
        uint16_t id = ids[i];
        size_t at = i;
        for (; at > 0 && ids[at - 1] > id; at--)
            ids[at] = ids[at - 1];
        ids[at] = id;
    }
    for (size_t i = 0; i < n_chosen; i++)
        sum = sum + s[ids[i]];
    divisor = sum + 1e-20f;
    for (size_t i = 0; i < n_chosen; i++)
        weights[i] = (renormalize ? s[ids[i]] / divisor : s[ids[i]]) * scale;
}

size_t k3_attend_scratch(size_t n_q, size_t n, size_t lat)
{
    return n_q * (n + lat);
}

/* Scores, probabilities, and the sum of p * latent of one block of positions for all queries that see it. */
static void attend_block(const struct k3_kernels *k, float *sum, const float *p, size_t ldp, const size_t *n_seen,
                         size_t n_q, const float *kv, size_t ld, size_t begin, size_t lat)
{
    memset(sum, 0, n_q * lat * sizeof *sum);
    for (size_t j = 0; j < lat; j += ATTEND_COLS) /* these columns of the block stay in the cache for all queries */
        for (size_t i = 0; i < n_q; i++) {
            size_t n = n_seen[i] < begin + ATTEND_BLOCK ? n_seen[i] - begin : ATTEND_BLOCK;

            if (n_seen[i] > begin)
                k->mul_t[K3_F32](sum + i * lat + j, p + i * ldp + begin, kv + begin * ld + j, ld, n,
                                 lat - j < ATTEND_COLS ? lat - j : ATTEND_COLS);
        }
}

static void probabilities(const struct k3_kernels *k, float *p, size_t n, float scale)
{
    float m;

    k->scale(p, p, scale, n);
    m = k->max(p, n);
    for (size_t s = 0; s < n; s++)
        p[s] = p[s] - m;
    k->exp(p, p, n);
}

void k3_attend(const struct k3_kernels *k, float *out, const float *q, size_t n_q, const float *kv, size_t ld,
               const size_t *n_seen, size_t lat, size_t rope, float scale, float *scratch)
{
    float *p = scratch, *sum, total[ATTEND_MOST] = { 0 };
    size_t width = lat + rope, n = 0;

    if (n_q > ATTEND_MOST)
        k3_bug("attention of %zu queries, at most %d", n_q, ATTEND_MOST);
    for (size_t i = 0; i < n_q; i++)
        n = n_seen[i] > n ? n_seen[i] : n;
    sum = scratch + n_q * n;
    if (ld == width) /* rows without gaps: the same dot products, several at once */
        k->mul[K3_F32](p, n, kv, n, width, q, width, n_q);
    else
        for (size_t i = 0; i < n_q; i++)
            for (size_t s = 0; s < n_seen[i]; s++)
                p[i * n + s] = k->dot(q + i * width, kv + s * ld, width);
    for (size_t i = 0; i < n_q; i++)
        probabilities(k, p + i * n, n_seen[i], scale);
    memset(out, 0, n_q * lat * sizeof *out);
    for (size_t begin = 0; begin < n; begin += ATTEND_BLOCK) {
        attend_block(k, sum, p, n, n_seen, n_q, kv, ld, begin, lat);
        for (size_t i = 0; i < n_q; i++) {
            size_t end = n_seen[i] < begin + ATTEND_BLOCK ? n_seen[i] : begin + ATTEND_BLOCK;
            float block_p = 0;

            if (n_seen[i] <= begin)
                continue;
            for (size_t s = begin; s < end; s++)
                block_p = block_p + p[i * n + s];
            total[i] = total[i] + block_p;
            k->add(out + i * lat, out + i * lat, sum + i * lat, lat);
        }
    }
    for (size_t i = 0; i < n_q; i++)
        for (size_t j = 0; j < lat; j++)
            out[i * lat + j] = out[i * lat + j] / total[i];
}

void k3_widen(float *y, const void *x, enum k3_dtype dtype, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = k3_widen_at(x, i, dtype);
}
