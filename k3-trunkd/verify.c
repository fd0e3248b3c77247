/* --verify: the sum of every piece as it lands.  The stream is summed up to where it is about to be published, block by
 * block, so that the bytes are still warm; a pinned piece before its flag is set. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "k3-trunkd/trunkd.h"
#include "model/crc32c.h"

static void stat_add(const struct k3_trunkd *d, enum k3_trunkd_stat id, uint64_t v)
{
    if (d->daemon && v)
        k3_stat_add(k3_daemon_stats(d->daemon), id, v);
}

int k3_tverify_open(struct k3_trunkd *d, struct k3_err *err)
{
    const char *dirs[K3_MODEL_DIRS];
    struct k3_model_opts mo = { .n_layers = d->opt.n_layers };

    k3_model_dirs(&mo, dirs, d->opt.model, &d->opt.devices);
    return k3_verify_open(&d->verify, d->model, &mo, K3_SUMS_TRUNK, d->model->n_pieces, d->opt.verify,
                          err);
}

/* Right once says nothing of the next read when that may go to another copy. */
static bool wanted(const struct k3_trunkd *d, size_t piece)
{
    uint32_t file = d->model->matrices[d->model->pieces[piece].matrix].file;

    return d->verify.always || !d->verify.checked[piece] || d->files.file[file].n_copies > 1;
}

/* Of several copies the wrong ones are named, and left alone while there is another. */
static void blame(struct k3_trunkd *d, uint32_t file, uint64_t off_bytes, uint64_t len_bytes,
                  uint32_t crc)
{
    uint32_t wrong =
        k3_io_wrong_copies(&d->files, file, &off_bytes, &len_bytes, 1, crc, k3_now_ns());

    for (uint32_t c = 0; c < d->files.file[file].n_copies; c++)
        if (wrong >> c & 1)
            k3_log(K3_LOG_ERROR, "copy_wrong", "file=%s off=%" PRIu64,
                   d->files.file[file].copy[c].path, off_bytes);
}

/* The end of a piece: whether it is right. */
static bool is_right(struct k3_trunkd *d, uint32_t piece, uint32_t crc)
{
    const struct k3_piece *p = &d->model->pieces[piece];

    if (crc == d->verify.sums->piece[piece]) {
        d->verify.checked[piece] = 1;
        return true;
    }
    d->verify.checked[piece] = 0;
    stat_add(d, K3_TS_VERIFY_FAILURES, 1);
    k3_log(K3_LOG_ERROR, "piece_wrong",
           "piece=%u file=%s off=%" PRIu64 " bytes=%u crc=%08x want=%08x", piece,
           d->model->files[d->model->matrices[p->matrix].file].path, p->off_bytes, p->len_bytes,
           crc, d->verify.sums->piece[piece]);
    blame(d, d->model->matrices[p->matrix].file, p->off_bytes, p->len_bytes,
          d->verify.sums->piece[piece]);
    return false;
}

/* The first unpinned piece that ends after position q of a pass; n_unpinned when there is none. */
static size_t piece_after(const struct k3_trunkd *d, uint64_t q)
{
    const struct k3_runs *r = &d->runs;
    size_t lo = 0, hi = r->n_unpinned;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (r->start[r->unpinned[mid]] + d->model->pieces[r->unpinned[mid]].len_bytes > q)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

int k3_tverify_seek(struct k3_trunkd *d, uint64_t start, struct k3_err *err)
{
    struct k3_scratch scratch = { NULL, 0 };
    uint64_t q, begin;
    const struct k3_piece *p;
    const uint8_t *bytes;
    size_t k;
    int rc;

    d->summed.pos = start;
    d->summed.crc = 0;
    if (!d->verify.sums || d->runs.n_unpinned == 0)
        return 0;
    q = start % d->layout.pass_bytes;
    k = piece_after(d, q);
    if (k == d->runs.n_unpinned)
        return 0;
    begin = d->runs.start[d->runs.unpinned[k]];
    if (begin >= q || !wanted(d, d->runs.unpinned[k]))
        return 0;
    /* In the midst of a piece: what comes before was read in an earlier life, or for an earlier seek. */
    p = &d->model->pieces[d->runs.unpinned[k]];
    rc = k3_tfile_read(d, d->model->matrices[p->matrix].file, p->off_bytes, q - begin, &scratch,
                       &bytes, err);
    if (rc == 0)
        d->summed.crc = k3_crc32c(0, bytes, q - begin);
    free(scratch.base);
    return rc;
}

uint64_t k3_tverify_prefix(struct k3_trunkd *d, uint64_t end, uint32_t *bad_piece)
{
    struct k3_tsummed *v = &d->summed;
    uint64_t entry = v->pos, pass_bytes = d->layout.pass_bytes;

    if (!d->verify.sums)
        return end;
    while (v->pos < end) {
        uint64_t base = v->pos - v->pos % pass_bytes, begin, piece_end, from, to;
        size_t k = piece_after(d, v->pos % pass_bytes);
        uint32_t piece;

        if (k == d->runs.n_unpinned) { /* in the last page's slack */
            base += pass_bytes;
            k = 0;
        }
        piece = d->runs.unpinned[k];
        begin = base + d->runs.start[piece];
        piece_end = begin + d->model->pieces[piece].len_bytes;
        from = begin > v->pos ? begin : v->pos;
        if (from >= end)
            break;
        to = piece_end < end ? piece_end : end;
        if (wanted(d, piece)) {
            if (from == begin)
                v->crc = 0;
            v->crc = k3_crc32c(v->crc, d->ring + from % d->layout.ring_bytes, to - from);
            stat_add(d, K3_TS_VERIFIED_BYTES, to - from);
            if (to == piece_end && !is_right(d, piece, v->crc)) {
                *bad_piece = piece;
                return begin > entry ? begin : entry;
            }
        }
        v->pos = to;
    }
    v->pos = end;
    return end;
}

bool k3_tverify_pin(struct k3_trunkd *d, uint32_t piece)
{
    uint32_t len_bytes = d->model->pieces[piece].len_bytes;

    if (!d->verify.sums)
        return true;
    stat_add(d, K3_TS_VERIFIED_BYTES, len_bytes);
    return is_right(d, piece, k3_crc32c(0, d->data.base + d->layout.start[piece], len_bytes));
}

int k3_tverify_resident(struct k3_trunkd *d, size_t i, const uint8_t *bytes, struct k3_err *err)
{
    const struct k3_resident *r = &d->model->residents[i];
    uint64_t len_bytes = (uint64_t)r->n * k3_dtype_bytes(r->dtype);
    uint32_t crc;

    if (!d->verify.sums)
        return 0;
    crc = k3_crc32c(0, bytes, len_bytes);
    stat_add(d, K3_TS_VERIFIED_BYTES, len_bytes);
    if (crc == d->verify.sums->resident[i])
        return 0;
    stat_add(d, K3_TS_VERIFY_FAILURES, 1);
    return k3_untrusted(err, -EBADMSG,
                        "%s at offset %" PRIu64 ": %s of layer %d (%" PRIu64
                        " bytes) has CRC %08x, " K3_SUMS_NAME
                        " says %08x: the file is damaged; fetch it again, or see k3ctl verify",
                        d->model->files[r->file].path, r->off_bytes,
                        k3_resident_role_name(r->role), r->layer, len_bytes, crc,
                        d->verify.sums->resident[i]);
}
