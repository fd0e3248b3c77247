/* The resident tensors: read once, widened to fp32. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "k3-trunkd/trunkd.h"

static float widen_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 0x1fu, frac = h & 0x3ffu, bits;
    float f;

    if (exp == 0x1f) {
        bits = sign | 0x7f800000u | frac << 13;
    } else if (exp) {
        bits = sign | (exp + 112) << 23 | frac << 13;
    } else if (frac) { /* subnormal: normal in fp32 */
        for (exp = 113; !(frac & 0x400u); exp--)
            frac <<= 1;
        bits = sign | exp << 23 | (frac & 0x3ffu) << 13;
    } else {
        bits = sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

void k3_resident_widen(float *out, const void *in, enum k3_dtype dtype, size_t n)
{
    const uint8_t *p = in;

    if (dtype == K3_F32) {
        memcpy(out, in, n * 4);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        uint32_t bits;

        memcpy(&h, p + 2 * i, 2);
        if (dtype == K3_F16) {
            out[i] = widen_f16(h);
        } else {
            bits = (uint32_t)h << 16;
            memcpy(&out[i], &bits, 4);
        }
    }
}

int k3_resident_load(struct k3_trunkd *d, struct k3_err *err)
{
    const struct k3_model *m = d->model;
    struct k3_scratch scratch = { NULL, 0 };
    int rc = 0;

    for (size_t i = 0; i < m->n_residents && rc == 0; i++) {
        const struct k3_resident *r = &m->residents[i];
        uint64_t end;
        const uint8_t *bytes;

        if (r->dtype != K3_F32 && r->dtype != K3_F16 && r->dtype != K3_BF16)
            rc = k3_refuse(err, -EINVAL,
                           "resident tensor %s of layer %d has type %s, must be F32, F16 or BF16",
                           k3_resident_role_name(r->role), r->layer, k3_dtype_name(r->dtype));
        else if (__builtin_add_overflow(r->pos, (uint64_t)r->n * 4, &end) ||
                 end > m->resident_bytes || r->pos % 4)
            k3_bug("resident %zu at %llu lies outside the area", i, (unsigned long long)r->pos);
        else
            rc = k3_tfile_read(d, r->file, r->off_bytes, (uint64_t)r->n * k3_dtype_bytes(r->dtype),
                               &scratch, &bytes, err);
        if (rc == 0)
            rc = k3_tverify_resident(d, i, bytes, err);
        if (rc == 0)
            k3_resident_widen((float *)(void *)(d->data.base + d->layout.resident_off + r->pos),
                              bytes, r->dtype, r->n);
    }
    free(scratch.base);
    if (rc == 0)
        atomic_store_explicit(&d->head->resident_valid, 1, memory_order_release);
    return rc;
}
