/* Pinned pieces: loaded once, in the order in which computed wants them, flag after the bytes. */
#include <errno.h>
#include <stdlib.h>

#include "k3-trunkd/trunkd.h"

static void stat_add(struct k3_trunkd *d, enum k3_trunkd_stat id, uint64_t v)
{
    if (d->daemon)
        k3_stat_add(k3_daemon_stats(d->daemon), id, v);
}

static uint64_t span_bytes(const struct k3_trunkd *d, size_t piece)
{
    uint64_t a = d->layout.align_bytes, head = d->layout.start[piece] % a;

    return (head + d->model->pieces[piece].len_bytes + a - 1) / a * a;
}

static bool absent(const struct k3_trunkd *d, size_t piece)
{
    return d->layout.pinned[piece] &&
           atomic_load_explicit(&d->flags[piece], memory_order_relaxed) == K3_PIECE_ABSENT;
}

int k3_pins_open(struct k3_trunkd *d, struct k3_err *err)
{
    uint64_t loaded_bytes = 0;

    d->pins.piece = -1;
    d->pins.pin = calloc(d->model->n_pieces ? d->model->n_pieces : 1, sizeof(*d->pins.pin));
    if (!d->pins.pin)
        return k3_fail(err, -ENOMEM, "no memory for the state of %zu pieces", d->model->n_pieces);
    for (size_t i = 0; i < d->model->n_pieces; i++) {
        if (atomic_load_explicit(&d->flags[i], memory_order_relaxed) == K3_PIECE_VALID)
            loaded_bytes += d->model->pieces[i].len_bytes;
        d->pins.n_todo += absent(d, i);
    }
    if (d->daemon)
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_PINNED_LOADED_BYTES, loaded_bytes);
    return 0;
}

void k3_pins_close(struct k3_trunkd *d)
{
    free(d->pins.pin);
    d->pins = (struct k3_pins){ .piece = -1 };
}

void k3_pins_seek(struct k3_trunkd *d, uint64_t pass, uint64_t piece)
{
    for (size_t i = 0; i < d->model->n_pieces; i++)
        if (atomic_load_explicit(&d->flags[i], memory_order_relaxed) & K3_PIECE_FAILED) {
            /* Ordered by K. */
            atomic_store_explicit(&d->flags[i], K3_PIECE_ABSENT, memory_order_relaxed);
            d->pins.n_todo++;
        }
    /* A piece that is half queued is finished first. */
    d->pins.cursor = piece < d->model->n_pieces ? (size_t)piece : 0;
    d->pins.pass = pass;
    d->pins.logged = false;
}

bool k3_pins_peek(struct k3_trunkd *d, uint64_t *pass, uint32_t *piece)
{
    struct k3_pins *p = &d->pins;

    if (p->piece < 0) {
        if (p->n_todo == 0)
            return false;
        while (!absent(d, p->cursor) || p->pin[p->cursor].n_blocks_left)
            if (++p->cursor == d->model->n_pieces) {
                p->cursor = 0;
                p->pass++;
            }
        *piece = (uint32_t)p->cursor;
    } else {
        *piece = (uint32_t)p->piece;
    }
    *pass = p->pass;
    return true;
}

static void begin_piece(struct k3_trunkd *d)
{
    struct k3_pins *p = &d->pins;
    uint64_t left = span_bytes(d, p->cursor);

    p->piece = (long)p->cursor;
    p->queued_bytes = 0;
    p->n_todo--;
    p->pin[p->piece] = (struct k3_pin){ 0, 0 };
    for (; left; left -= k3_cut_bytes(left, d->block_bytes))
        p->pin[p->piece].n_blocks_left++;
}

void k3_pins_start(struct k3_trunkd *d, struct k3_read *r)
{
    struct k3_pins *p = &d->pins;
    const struct k3_piece *piece;
    uint64_t a = d->layout.align_bytes, span, first, used;
    int changed;

    if (p->piece < 0)
        begin_piece(d);
    piece = &d->model->pieces[p->piece];
    span = span_bytes(d, (size_t)p->piece);
    first = d->layout.start[p->piece] - d->layout.start[p->piece] % a;
    used = d->layout.start[p->piece] % a + piece->len_bytes; /* of the span */
    r->kind = K3_READ_PIN;
    r->piece = (uint32_t)p->piece;
    r->file = d->model->matrices[piece->matrix].file;
    r->buf = d->data.base + first + p->queued_bytes;
    r->off_bytes = piece->off_bytes - piece->off_bytes % a + p->queued_bytes;
    r->len_bytes = k3_cut_bytes(span - p->queued_bytes, d->block_bytes);
    r->need_bytes = used - p->queued_bytes < r->len_bytes ? used - p->queued_bytes : r->len_bytes;
    changed = p->queued_bytes == 0 ? k3_io_check(&d->files, r->file, k3_now_ns()) : p->pin[p->piece].err;
    p->queued_bytes += r->len_bytes;
    if (p->queued_bytes == span)
        p->piece = -1; /* the cursor stays: a seek may have moved it meanwhile */
    if (changed) { /* not worth a read */
        r->err = changed;
        r->done = true;
        k3_pins_done(d, r);
        return;
    }
    k3_read_start(d, r);
}

void k3_pins_done(struct k3_trunkd *d, struct k3_read *r)
{
    struct k3_pin *pin = &d->pins.pin[r->piece];
    const struct k3_piece *piece = &d->model->pieces[r->piece];

    if (r->err && !pin->err) {
        pin->err = (uint16_t)r->err;
        stat_add(d, K3_TS_ERRORS, 1);
        if (!d->pins.logged)
            k3_log(K3_LOG_ERROR, "pin_failed", "piece=%u file=%s off=%llu errno=%d", r->piece,
                   d->model->files[r->file].path, (unsigned long long)(r->off_bytes + r->got_bytes),
                   r->err);
        d->pins.logged = true; /* a dead drive fails thousands: once until the next seek */
    }
    k3_read_give(d, r);
    if (--pin->n_blocks_left)
        return;
    if (!pin->err && !k3_tverify_pin(d, r->piece)) {
        pin->err = EBADMSG;
        stat_add(d, K3_TS_ERRORS, 1);
    }
    if (pin->err) {
        atomic_store_explicit(&d->flags[r->piece], K3_PIECE_FAILED | pin->err,
                              memory_order_release);
    } else {
        atomic_store_explicit(&d->flags[r->piece], K3_PIECE_VALID, memory_order_release);
        stat_add(d, K3_TS_PINNED_LOADED_BYTES, piece->len_bytes);
    }
    pin->err = 0;
    d->news = true;
}
