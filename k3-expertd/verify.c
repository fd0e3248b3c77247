#include <errno.h>
#include <inttypes.h>

#include "k3-expertd/expertd.h"
#include "model/crc32c.h"
#include "model/names.h"

int k3_xverify_open(struct k3_expertd *d, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts mo = { .n_layers = d->opt.n_layers };

    k3_model_dirs(&mo, dirs, d->opt.model, &d->opt.devices);
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        uint32_t n_rows, n_cols;

        k3_names_expert_shape(&d->model->cfg, t, &n_rows, &n_cols);
        d->tensor_bytes[t] = (uint64_t)n_rows * n_cols;
    }
    return k3_verify_open(&d->verify, d->model, &mo, K3_SUMS_EXPERTS, k3_sums_n_experts(d->model), d->opt.verify, err);
}

void k3_xverify_read(struct k3_expertd *d, struct k3_read_done *r)
{
    const uint8_t *slot = d->data.base + d->slots_off_bytes + r->slot * d->slot_bytes;
    struct k3_stats *st = k3_daemon_stats(d->daemon);
    struct k3_sum_item item;
    uint32_t layer, expert, crc = 0;
    size_t key;

    if (!d->verify.sums)
        return;
    k3_slots_expert(d->slots, r->slot, &layer, &expert);
    key = k3_sums_expert_key(d->model, layer, expert);
    /* Right once says nothing of the next read when that may go to another copy. */
    if (!d->verify.always && d->verify.checked[key] && !k3_reader_has_copies(d->reader))
        return;
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++)
        crc = k3_crc32c(crc, slot + r->off_bytes[t], d->tensor_bytes[t]);
    k3_stat_add(st, K3_XS_VERIFIED_BYTES, d->model->expert_bytes);
    if (crc == d->verify.sums->expert[key]) {
        d->verify.checked[key] = 1;
        return;
    }
    d->verify.checked[key] = 0;
    k3_stat_add(st, K3_XS_VERIFY_FAILURES, 1);
    r->status = -EBADMSG;
    r->file = UINT32_MAX;
    if (k3_sums_item(d->model, d->model->n_pieces + d->model->n_residents + key, &item) == 0) {
        r->file = item.part[0].file;
        r->file_off_bytes = item.part[0].off_bytes;
        k3_reader_wrong(d->reader, &item, d->verify.sums->expert[key]);
    }
}
