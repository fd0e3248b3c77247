/* The ring: blocks queued in stream order, published as an in-order prefix; seeks; errors at a
 * position. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "k3-trunkd/trunkd.h"

static void stat_add(struct k3_trunkd *d, enum k3_trunkd_stat id, uint64_t v)
{
    if (d->daemon && v)
        k3_stat_add(k3_daemon_stats(d->daemon), id, v);
}

void k3_stream_open(struct k3_trunkd *d, bool ring_dirty)
{
    d->stream = (struct k3_stream){ .ring_dirty = ring_dirty };
    d->stream.newest = &d->stream.oldest;
    d->stream.block_bytes = k3_ring_block_bytes(d->block_bytes, d->layout.ring_bytes,
                                                d->layout.align_bytes);
}

/* The stream has stopped at `position`, until the next seek. */
static void stop_at(struct k3_trunkd *d, int errnum, uint64_t position, uint32_t file,
                    uint64_t off_bytes, uint32_t piece)
{
    struct k3_trunk_line_a *a = &d->ctl->a;

    a->error.err = errnum;
    a->error.position = position;
    a->error.off_bytes = off_bytes;
    a->error.file = file;
    a->error.piece = piece;
    atomic_store_explicit(&a->error.set, 1, memory_order_release); /* E */
    d->stream.state = K3_STREAM_STOPPED;
    d->news = true;
    stat_add(d, K3_TS_ERRORS, 1);
    k3_log(K3_LOG_ERROR, "stream_stopped",
           "position=%" PRIu64 " file=%s off=%" PRIu64 " errno=%d text=\"%s\"", position,
           file < d->model->n_files ? d->model->files[file].path : "-", off_bytes, errnum,
           k3_read_strerror(errnum));
}

static uint64_t collapse_ring(struct k3_trunkd *d)
{
    uint64_t huge_bytes = k3_seg_collapse(d->ring, d->layout.ring_bytes);

    /* Maps the second view. */
    (void)k3_seg_collapse(d->ring + d->layout.ring_bytes, d->layout.ring_bytes);
    return huge_bytes;
}

/* Nothing of the stream is in flight: begin where computed wants to begin. */
static void seek_now(struct k3_trunkd *d, uint64_t number, uint64_t start, uint64_t piece)
{
    struct k3_trunk_line_a *a = &d->ctl->a;
    struct k3_err err = K3_ERR_INIT;
    int rc = 0;

    if (d->stream.ring_dirty) {
        rc = k3_seg_renew(&d->data, d->layout.ring_off, d->layout.ring_bytes, &err);
        if (rc == 0) {
            d->stream.ring_dirty = false;
            atomic_fetch_add_explicit(&d->huge_bytes, collapse_ring(d), memory_order_relaxed);
            k3_trunkd_register(d);
        } else {
            k3_log_err(&err, "ring_not_renewed"); /* the next seek tries again */
        }
    }
    k3_stream_full(d, false);
    if (rc == 0) {
        rc = k3_tverify_seek(d, start, &err);
        if (rc < 0)
            k3_log_err(&err, "begin_of_piece_not_read");
    }
    d->stream.next = d->stream.produced = start;
    d->stream.number = number;
    d->stream.state = K3_STREAM_RUNNING;
    atomic_store_explicit(&a->error.set, 0, memory_order_relaxed);
    atomic_store_explicit(&a->produced, start, memory_order_release);
    if (rc == 0 && start >= K3_STREAM_POS_MAX)
        rc = -EOVERFLOW;
    if (rc < 0)
        stop_at(d, -rc, start, UINT32_MAX, 0, UINT32_MAX);
    k3_pins_seek(d, d->layout.pass_bytes ? start / d->layout.pass_bytes : 0, piece);
    atomic_store_explicit(&a->acked, number, memory_order_release); /* K */
    d->news = true;
    stat_add(d, K3_TS_SEEKS, 1);
    k3_log(K3_LOG_DEBUG, "seek", "number=%" PRIu64 " start=%" PRIu64 " piece=%" PRIu64, number,
           start, piece);
}

void k3_stream_seek(struct k3_trunkd *d)
{
    struct k3_trunk_line_b *b = &d->ctl->b;
    uint64_t number = atomic_load_explicit(&b->seek.number, memory_order_acquire); /* Q' */
    uint64_t start, piece;

    if (number == d->stream.number)
        return;
    d->stream.state = K3_STREAM_SEEKING;
    if (d->stream.n_in_flight > 0)
        return;
    /* A successor of computed may be writing the next seek right now: then this acknowledges a
     * number that nobody waits for any more, and the next turn sees the new one. */
    start = __atomic_load_n(&b->seek.start, __ATOMIC_RELAXED);
    piece = __atomic_load_n(&b->seek.piece, __ATOMIC_RELAXED);
    seek_now(d, number, start, piece);
}

bool k3_stream_peek(const struct k3_trunkd *d, struct k3_block *out, bool *room)
{
    uint64_t consumed;

    if (d->stream.state != K3_STREAM_RUNNING || d->runs.n_runs == 0 ||
        d->stream.next >= K3_STREAM_POS_MAX)
        return false;
    k3_runs_block(&d->runs, d->stream.next, d->stream.block_bytes, out);
    consumed = atomic_load_explicit(&d->ctl->b.consumed, memory_order_acquire); /* C' */
    if (consumed > d->stream.produced) /* not there yet: left out, or a seek is on its way */
        consumed = d->stream.produced;
    *room = k3_ring_has_room(out->pos + out->len_bytes, consumed, d->layout.ring_bytes,
                             d->layout.align_bytes);
    return true;
}

void k3_stream_start(struct k3_trunkd *d, struct k3_read *r, const struct k3_block *b)
{
    r->kind = K3_READ_STREAM;
    r->block = *b;
    r->file = b->file;
    r->piece = b->piece;
    r->buf = d->ring + b->pos % d->layout.ring_bytes; /* contiguous: the ring is mapped twice */
    r->off_bytes = b->off_bytes;
    r->len_bytes = b->len_bytes;
    r->need_bytes = b->need_bytes;
    d->stream.next = b->next;
    r->next = NULL;
    *d->stream.newest = r;
    d->stream.newest = &r->next;
    d->stream.n_in_flight++;
    if (b->first_of_run)
        r->err = k3_io_check(&d->files, r->file, k3_now_ns());
    if (r->err) {
        r->done = true;
        k3_stream_publish(d);
    } else {
        k3_read_start(d, r);
    }
}

void k3_stream_publish(struct k3_trunkd *d)
{
    struct k3_stream *s = &d->stream;
    uint64_t produced = s->produced, failed_end = 0, failed_off = UINT64_MAX;
    struct k3_read *failed = NULL;

    while (s->oldest && s->oldest->done) {
        struct k3_read *r = s->oldest;
        uint64_t got_end = r->block.pos + r->got_bytes;

        s->oldest = r->next;
        if (!s->oldest)
            s->newest = &s->oldest;
        s->n_in_flight--;
        if (s->state != K3_STREAM_STOPPED &&
            !failed) { /* what was queued behind a failed read is dropped */
            if (got_end > r->block.end)
                got_end = r->block.end;
            if (got_end > produced) {
                uint32_t bad_piece = 0;

                produced = k3_tverify_prefix(d, got_end, &bad_piece);
                if (produced < got_end) {
                    const struct k3_piece *p = &d->model->pieces[bad_piece];

                    r->err = EBADMSG;
                    r->piece = bad_piece;
                    r->file = d->model->matrices[p->matrix].file;
                    failed_off = p->off_bytes;
                    got_end = produced;
                }
            }
            if (r->err) {
                failed = r;
                failed_end = got_end;
                continue; /* given back below */
            }
            stat_add(d, K3_TS_PASSES, r->block.last_of_pass);
        }
        k3_read_give(d, r);
    }
    if (produced != s->produced) {
        stat_add(d, K3_TS_RING_WRAPS,
                 k3_multiples_passed(s->produced, produced, d->layout.ring_bytes));
        stat_add(d, K3_TS_RING_PRODUCED_BYTES, produced - s->produced);
        s->produced = produced;
        atomic_store_explicit(&d->ctl->a.produced, produced, memory_order_release); /* T */
        d->news = true;
    }
    if (failed) { /* after T: whoever sees the error sees all that came before it */
        stop_at(d, failed->err, failed_end > produced ? failed_end : produced, failed->file,
                failed_off < UINT64_MAX ? failed_off
                                        : failed->off_bytes + (failed_end - failed->block.pos),
                failed->piece);
        k3_read_give(d, failed);
    }
}

void k3_stream_full(struct k3_trunkd *d, bool full)
{
    uint64_t now = full || d->stream.full_since_ns ? k3_now_ns() : 0;

    if (d->stream.full_since_ns)
        stat_add(d, K3_TS_RING_FULL_WAIT_NS, now - d->stream.full_since_ns);
    else if (full)
        stat_add(d, K3_TS_RING_FULL_WAITS, 1);
    d->stream.full_since_ns = full ? now : 0;
}
