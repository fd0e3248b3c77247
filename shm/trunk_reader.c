/* The consumer's side of the trunk stream (shm/trunk.h).
 *
 * One thing is waited for at a time (struct want), in one loop (wait_for), which also finds out
 * that trunkd has died, attaches to its successor and seeks to what is wanted.  Until the successor
 * has acknowledged that seek, nothing in its segment but valid pinned pieces is believed. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ipc/daemon.h"
#include "shm/trunk_link.h"

#define TICK_NS 50000000ull /* between looks at the lock and the segment's name: microseconds */
#define NAP_NS 20000000     /* between tries to attach */
/* Tries in a row, 2 s: a successor holds the lock a moment before it removes the old segment. */
#define REFUSALS_BELIEVED 100
#define BLOCK_COMFORT_BYTES (1u << 20)
#define READY_PART 8 /* of the ring at most in one block, so that trunkd gets room while it is multiplied */
#define TRUNKD "k3-trunkd"
#define NO_SEEK 1u /* never acknowledged: real numbers are at least 2^32 */

struct k3_trunk_reader {
    char instance[40], rundir[512];
    const struct k3_model *m;
    uint32_t generation;
    struct k3_trunk_link link;
    bool attached; /* link is a generation that we have not found dead and replaced */
    bool gone_said;
    bool acked;      /* trunkd has acknowledged `number` */
    bool begun;      /* a pass has been begun: the first is pass 0 */
    uint64_t number; /* our last seek in this link, or NO_SEEK */
    uint8_t *resident_map; /* the data segment's head, at one address for the reader's life */
    uint64_t resident_map_bytes;
    dev_t resident_dev;
    ino_t resident_ino;
    /* where the consumer is */
    uint64_t pass;
    size_t piece; /* next wanted block lies at or after (piece, row) */
    uint32_t row;
    uint64_t produced; /* a.produced as last seen under this seek */
    struct { bool ring; uint64_t end; } held[K3_TRUNK_HELD]; /* a queue: the oldest at held[first_held] */
    uint32_t first_held, n_held;
    _Atomic bool *stop;
    k3_trunk_notice_fn *notice;
    void *notice_arg;
    struct k3_trunk_reader_counts counts;
};

struct want {
    enum { WANT_ACK, WANT_RESIDENT, WANT_ROWS } what;
    size_t piece; /* of rows; where they lie is the link's affair: a new one may move them */
    uint32_t row, n_rows;
};

static void nap(void)
{
    nanosleep(&(struct timespec){ 0, NAP_NS }, NULL);
}

static void notice(struct k3_trunk_reader *r, const char *event, const char *text)
{
    if (r->notice)
        r->notice(r->notice_arg, event, text);
}

static bool stopping(const struct k3_trunk_reader *r)
{
    return r->stop && atomic_load_explicit(r->stop, memory_order_relaxed);
}

static int cancelled(struct k3_err *err)
{
    return k3_fail(err, -ECANCELED, "stopped while waiting for " TRUNKD);
}

static uint64_t row_bytes(const struct k3_trunk_reader *r, size_t piece)
{
    const struct k3_piece *p = &r->m->pieces[piece];

    return p->n_rows ? p->len_bytes / p->n_rows : 0;
}

/* ---- seek ---- */

/* Stream position of the next unpinned byte at or after (piece, row) of the current pass. */
static uint64_t position_of(const struct k3_trunk_reader *r, size_t piece, uint32_t row)
{
    const struct k3_layout *l = &r->link.layout;

    for (; piece < l->n_pieces; piece++, row = 0)
        if (!l->pinned[piece])
            return r->pass * l->pass_bytes + l->start[piece] + row * row_bytes(r, piece);
    return (r->pass + 1) * l->pass_bytes;
}

/* Tells trunkd to go on at (r->piece, r->row).  No row block is held. */
static void seek(struct k3_trunk_reader *r)
{
    struct k3_trunk_line_a *a = &r->link.ctl->a;
    struct k3_trunk_line_b *b = &r->link.ctl->b;
    uint64_t start = position_of(r, r->piece, r->row);
    uint64_t last = atomic_load_explicit(&b->seek.number, memory_order_relaxed);

    if (last >> 32 != r->generation)
        last = (uint64_t)r->generation << 32;
    r->number = last + 1;
    r->acked = false;
    r->produced = start;
    atomic_store_explicit(&b->blocked_on_expert, 0, memory_order_relaxed);
    atomic_store_explicit(&b->consumed, start, memory_order_release); /* C */
    __atomic_store_n(&b->seek.start, start, __ATOMIC_RELAXED);
    __atomic_store_n(&b->seek.piece, (uint64_t)r->piece, __ATOMIC_RELAXED);
    atomic_store_explicit(&b->seek.number, r->number, memory_order_release); /* Q */
    k3_bell_ring(&b->bell, &a->sleepers);
    r->counts.seeks++;
}

static void consume(struct k3_trunk_reader *r, uint64_t position)
{
    atomic_store_explicit(&r->link.ctl->b.consumed, position, memory_order_release); /* C */
    k3_bell_ring(&r->link.ctl->b.bell, &r->link.ctl->a.sleepers);
}

/* ---- what is wanted ---- */

static const char *file_path(const struct k3_trunk_reader *r, uint32_t file)
{
    return file < r->m->n_files ? r->m->files[file].path : "(no file)";
}

static int stream_error(const struct k3_trunk_reader *r, struct k3_err *err)
{
    const struct k3_trunk_line_a *a = &r->link.ctl->a;

    return k3_untrusted(
        err, -EIO, "trunk stream stopped at position %" PRIu64 ": %s at offset %" PRIu64 ": %s",
        a->error.position, file_path(r, a->error.file), a->error.off_bytes,
        k3_read_strerror(a->error.err));
}

static int pinned_error(const struct k3_trunk_reader *r, size_t piece, uint32_t flag,
                        struct k3_err *err)
{
    const struct k3_piece *p = &r->m->pieces[piece];

    return k3_untrusted(
        err, -EIO, "pinned piece %zu could not be read: %s at offset %" PRIu64 ", %u bytes: %s",
        piece, file_path(r, r->m->matrices[p->matrix].file), p->off_bytes, p->len_bytes,
        k3_read_strerror((int)(flag & ~K3_PIECE_FAILED)));
}

static uint64_t want_end(const struct k3_trunk_reader *r, const struct want *w)
{
    const struct k3_layout *l = &r->link.layout;

    return r->pass * l->pass_bytes + l->start[w->piece] +
           (uint64_t)(w->row + w->n_rows) * row_bytes(r, w->piece);
}

/* Looks how far trunkd is.  false: further than the ring allows, which is not believed. */
static bool see_produced(struct k3_trunk_reader *r, uint64_t *produced, uint64_t *consumed)
{
    *produced = atomic_load_explicit(&r->link.ctl->a.produced, memory_order_acquire); /* T' */
    *consumed = atomic_load_explicit(&r->link.ctl->b.consumed, memory_order_relaxed); /* only we store it */
    if (*produced > *consumed && *produced - *consumed > r->link.layout.ring_bytes)
        return false;
    r->produced = *produced;
    return true;
}

static int look_stream(struct k3_trunk_reader *r, const struct want *w, struct k3_err *err)
{
    const struct k3_trunk_line_a *a = &r->link.ctl->a;
    uint64_t end = want_end(r, w), produced, consumed;

    if (r->produced >= end)
        return 0;
    if (!see_produced(r, &produced, &consumed))
        return k3_fail(err, -EPROTO,
                       TRUNKD " says that %" PRIu64 " bytes are produced, but %" PRIu64
                              " are consumed and the ring holds %" PRIu64,
                       produced, consumed, r->link.layout.ring_bytes);
    if (r->produced >= end)
        return 0;
    if (!atomic_load_explicit(&a->error.set, memory_order_acquire)) /* E' */
        return -EAGAIN;
    /* It was stored before the error. */
    r->produced = atomic_load_explicit(&a->produced, memory_order_acquire);
    return r->produced >= end ? 0 : stream_error(r, err);
}

/* 0: there; -EAGAIN: not yet; anything else ends the wait. */
static int look(struct k3_trunk_reader *r, const struct want *w, struct k3_err *err)
{
    const struct k3_trunk_line_a *a = &r->link.ctl->a;
    uint32_t flag;

    if (!r->acked)
        r->acked = atomic_load_explicit(&a->acked, memory_order_acquire) == r->number; /* K' */
    switch (w->what) {
    case WANT_ACK:
        return r->acked ? 0 : -EAGAIN;
    case WANT_RESIDENT:
        return atomic_load_explicit(&r->link.head->resident_valid, memory_order_acquire) ? 0
                                                                                         : -EAGAIN;
    case WANT_ROWS:
        if (!r->link.layout.pinned[w->piece])
            return r->acked ? look_stream(r, w, err) : -EAGAIN;
        flag = atomic_load_explicit(&r->link.flags[w->piece], memory_order_acquire);
        if (flag == K3_PIECE_VALID)
            return 0;
        return (flag & K3_PIECE_FAILED) && r->acked ? pinned_error(r, w->piece, flag, err)
                                                    : -EAGAIN;
    }
    return -EAGAIN;
}

/* ---- attach ---- */

/* The address of the resident area was given away; so the new segment's head is mapped over the old
 * one's. */
static int map_resident(struct k3_trunk_reader *r, struct k3_err *err)
{
    const struct k3_trunk_link *l = &r->link;
    uint64_t len_bytes = l->layout.pinned_off;
    void *at = r->resident_map;

    if (at && r->resident_dev == l->data_dev && r->resident_ino == l->data_ino)
        return 0;
    if (at && len_bytes != r->resident_map_bytes)
        return k3_fail(err, -EPROTO, "resident area of %" PRIu64 " bytes, was %" PRIu64, len_bytes,
                       r->resident_map_bytes);
    if (!at) /* aligned, so that the next one may be of huge pages */
        r->resident_map = at = k3_reserve_aligned(len_bytes);
    if (!at)
        return k3_fail(err, -ENOMEM, "segment %s: no address space for the resident area",
                       l->data.name);
    r->resident_map_bytes = len_bytes;
    at = mmap(at, len_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, l->data.fd, 0);
    if (at == MAP_FAILED)
        return k3_fail(err, -errno, "segment %s: mmap of the resident area: %s", l->data.name,
                       strerror(errno));
    r->resident_dev = l->data_dev;
    r->resident_ino = l->data_ino;
    return 0;
}

/* One try to attach to whatever has the name now.  On success the old link is gone and a seek is on
 * its way. */
static int attach(struct k3_trunk_reader *r, struct k3_err *err)
{
    struct k3_trunk_link link = K3_TRUNK_LINK_INIT;
    int rc;

    if (!k3_lock_alive(r->rundir, TRUNKD))
        return -ENOENT;
    rc = k3_trunk_link_open(&link, r->instance, r->rundir, r->m, err);
    if (rc < 0)
        return rc;
    k3_trunk_link_close(&r->link);
    r->link = link;
    r->attached = true;
    r->gone_said = false;
    r->acked = false;
    r->number = NO_SEEK;
    return 0;
}

/* A tick has passed: is trunkd still there, and is it still the one that we are attached to? */
static void check_peer(struct k3_trunk_reader *r)
{
    bool alive = k3_lock_alive(r->rundir, TRUNKD);
    char text[96];

    if (alive && k3_seg_is_current(&r->link.ctl_seg))
        return;
    if (!r->gone_said) {
        snprintf(text, sizeof(text), "generation=%u pass=%" PRIu64 " piece=%zu row=%u",
                 r->link.ctl->generation, r->pass, r->piece, r->row);
        notice(r, "trunkd_gone", text);
        r->gone_said = true;
    }
    if (alive) {
        r->attached = false;
        r->acked = false;
        r->number = NO_SEEK;
    }
}

static int attach_again(struct k3_trunk_reader *r, unsigned *n_refused, struct k3_err *err)
{
    struct k3_err refusal = K3_ERR_INIT;
    char text[64];
    int rc = attach(r, &refusal);

    if (rc == 0) {
        *n_refused = 0;
        r->counts.reattached++;
        snprintf(text, sizeof(text), "generation=%u", r->link.ctl->generation);
        notice(r, "trunkd_back", text);
        seek(r);
        return 0;
    }
    if (rc != -ENOENT && ++*n_refused >= REFUSALS_BELIEVED) {
        if (err)
            *err = refusal;
        return rc;
    }
    nap();
    return 0;
}

/* Waits until w is there. */
static int wait_for(struct k3_trunk_reader *r, const struct want *w, struct k3_err *err)
{
    uint64_t since_ns = 0;
    unsigned n_refused = 0;
    int rc;

    for (;;) {
        uint32_t seen = k3_bell_news(&r->link.ctl->a.bell);

        rc = look(r, w, err);
        if (rc == 0 && r->resident_map &&
            (r->resident_ino != r->link.data_ino || r->resident_dev != r->link.data_dev)) {
            /* A new data segment: not used before its resident area is complete. */
            static const struct want resident = { .what = WANT_RESIDENT };

            rc = look(r, &resident, err);
            if (rc == 0)
                rc = map_resident(r, err);
        }
        if (rc != -EAGAIN)
            break;
        if (!since_ns) {
            since_ns = k3_now_ns();
            r->counts.waits++;
        }
        if (stopping(r)) {
            rc = cancelled(err);
            break;
        }
        if (!r->attached)
            rc = attach_again(r, &n_refused, err);
        else if (k3_bell_wait(&r->link.ctl->a.bell, &r->link.ctl->b.sleepers, seen, TICK_NS) ==
                 -ETIMEDOUT)
            check_peer(r);
        if (rc != -EAGAIN && rc < 0)
            break;
    }
    if (since_ns)
        r->counts.wait_ns += k3_now_ns() - since_ns;
    return rc;
}

/* ---- the interface ---- */

int k3_trunk_reader_open(struct k3_trunk_reader **out, const char *instance, const char *rundir,
                         const struct k3_model *m, uint32_t generation, uint64_t timeout_ns,
                         struct k3_err *err)
{
    struct k3_trunk_reader *r;
    struct k3_err why = K3_ERR_INIT;
    uint64_t until_ns = k3_now_ns() + timeout_ns;
    unsigned n_refused = 0;
    int rc = k3_instance_check(instance, err);

    if (rc < 0)
        return rc;
    r = calloc(1, sizeof(*r));
    if (!r)
        return k3_fail(err, -ENOMEM, "no memory for the trunk reader");
    r->link = (struct k3_trunk_link)K3_TRUNK_LINK_INIT;
    r->m = m;
    r->generation = generation;
    snprintf(r->instance, sizeof(r->instance), "%s", instance);
    if ((size_t)snprintf(r->rundir, sizeof(r->rundir), "%s", rundir) >= sizeof(r->rundir)) {
        rc = k3_fail(err, -ENAMETOOLONG, "run directory %.100s...: too long", rundir);
        goto fail;
    }
    while ((rc = attach(r, &why)) < 0) {
        if (rc == -ENOENT)
            n_refused = 0;
        else if (++n_refused >= REFUSALS_BELIEVED) {
            if (err)
                *err = why;
            goto fail;
        }
        if (k3_now_ns() >= until_ns && rc == -ENOENT) {
            rc = k3_no_peer(err, -ENOENT,
                            TRUNKD " of instance %s is not there (waited %.1f s, run directory %s)",
                            instance, (double)timeout_ns / 1e9, rundir);
            goto fail;
        }
        nap();
    }
    *out = r;
    return 0;
fail:
    k3_trunk_reader_close(r);
    return rc;
}

void k3_trunk_reader_close(struct k3_trunk_reader *r)
{
    if (!r)
        return;
    k3_trunk_link_close(&r->link);
    if (r->resident_map)
        munmap(r->resident_map, r->resident_map_bytes);
    free(r);
}

const struct k3_layout *k3_trunk_reader_layout(const struct k3_trunk_reader *r)
{
    return &r->link.layout;
}

int k3_trunk_reader_resident(struct k3_trunk_reader *r, const float **out, struct k3_err *err)
{
    static const struct want resident = { .what = WANT_RESIDENT };
    int rc = wait_for(r, &resident, err);

    if (rc == 0)
        rc = map_resident(r, err);
    if (rc == 0)
        *out = (const float *)(const void *)(r->resident_map + r->link.layout.resident_off);
    return rc;
}

int k3_trunk_reader_rows(struct k3_trunk_reader *r, uint32_t piece, uint32_t row, uint32_t n_rows,
                         const void **rows, struct k3_err *err)
{
    struct want w = { .what = WANT_ROWS, .piece = piece, .row = row, .n_rows = n_rows };
    const struct k3_layout *l = &r->link.layout;
    uint64_t len_bytes, begin, end;
    bool in_ring;
    int rc;

    if (piece >= r->m->n_pieces || n_rows == 0 || row >= r->m->pieces[piece].n_rows ||
        n_rows > r->m->pieces[piece].n_rows - row)
        return k3_fail(err, -EINVAL, "rows %u+%u of piece %u: there is no such block", row, n_rows,
                       piece);
    if (r->n_held == K3_TRUNK_HELD)
        return k3_fail(err, -EINVAL,
                       "rows %u+%u of piece %u asked for while %u blocks before are not done", row,
                       n_rows, piece, r->n_held);
    if (piece < r->piece || (piece == r->piece && row < r->row))
        return k3_fail(
            err, -EINVAL,
            "rows %u+%u of piece %u asked for after piece %zu row %u: not schedule order", row,
            n_rows, piece, r->piece, r->row);
    len_bytes = n_rows * row_bytes(r, piece);
    if (!l->pinned[piece] && len_bytes > l->ring_bytes / 2)
        return k3_fail(err, -EINVAL,
                       "a row block of %" PRIu64
                       " bytes does not fit into half the ring of %" PRIu64 " bytes",
                       len_bytes, l->ring_bytes);
    r->piece = piece;
    r->row = row;
    if (!l->pinned[piece] && r->acked && r->n_held == 0) {
        begin = want_end(r, &w) - len_bytes;
        /* What lies before the block is not wanted any more: makes room when blocks were left out.
         */
        if (atomic_load_explicit(&r->link.ctl->b.consumed, memory_order_relaxed) < begin)
            consume(r, begin);
    }
    /* A wait may end in another trunkd's ring, which the blocks that are held are not in. */
    rc = r->n_held ? look(r, &w, err) : wait_for(r, &w, err);
    if (rc == -EAGAIN)
        return k3_fail(err, -EINVAL, "rows %u+%u of piece %u are not there yet, and %u blocks are held",
                       row, n_rows, piece, r->n_held);
    if (rc < 0)
        return rc;
    l = &r->link.layout;
    in_ring = !l->pinned[piece];
    end = want_end(r, &w);
    r->held[(r->first_held + r->n_held) % K3_TRUNK_HELD].ring = in_ring;
    r->held[(r->first_held + r->n_held) % K3_TRUNK_HELD].end = end;
    r->n_held++;
    if (in_ring)
        *rows = r->link.ring + (end - len_bytes) % l->ring_bytes;
    else
        *rows = r->link.data.base + l->start[piece] + row * row_bytes(r, piece);
    *(in_ring ? &r->counts.ring_bytes : &r->counts.pinned_bytes) += len_bytes;
    r->row = row + n_rows;
    if (r->row == r->m->pieces[piece].n_rows) {
        r->piece++;
        r->row = 0;
    }
    return 0;
}

uint32_t k3_trunk_reader_ready(struct k3_trunk_reader *r, uint32_t piece, uint32_t row)
{
    const struct k3_layout *l = &r->link.layout;
    uint64_t bytes, most = l->ring_bytes / READY_PART, begin, produced, consumed, n;
    uint32_t left;

    if (!r->attached || r->n_held == K3_TRUNK_HELD || piece >= r->m->n_pieces || row >= r->m->pieces[piece].n_rows)
        return 0;
    left = r->m->pieces[piece].n_rows - row;
    bytes = row_bytes(r, piece);
    if (l->pinned[piece])
        return k3_trunk_reader_pinned(r, piece) ? left : 0;
    begin = r->pass * l->pass_bytes + l->start[piece] + row * bytes;
    if (!r->acked || bytes == 0 || !see_produced(r, &produced, &consumed) || produced <= begin)
        return 0;
    n = (produced - begin < most ? produced - begin : most) / bytes;
    return n < left ? (uint32_t)n : left;
}

const void *k3_trunk_reader_pinned(const struct k3_trunk_reader *r, uint32_t piece)
{
    const struct k3_trunk_link *l = &r->link;

    if (!r->attached || piece >= r->m->n_pieces || !l->layout.pinned[piece] ||
        atomic_load_explicit(&l->flags[piece], memory_order_acquire) != K3_PIECE_VALID)
        return NULL;
    return l->data.base + l->layout.start[piece];
}

void k3_trunk_reader_done(struct k3_trunk_reader *r)
{
    if (r->n_held == 0)
        return;
    if (r->held[r->first_held].ring)
        consume(r, r->held[r->first_held].end);
    r->first_held = (r->first_held + 1) % K3_TRUNK_HELD;
    r->n_held--;
}

static int seek_and_wait(struct k3_trunk_reader *r, struct k3_err *err)
{
    static const struct want ack = { .what = WANT_ACK };

    if (r->attached) /* otherwise attaching seeks */
        seek(r);
    return wait_for(r, &ack, err);
}

/* The position moves first, so that a re-attachment in the middle seeks to the right place. */
static void to_next_pass(struct k3_trunk_reader *r)
{
    r->n_held = 0;
    if (r->begun)
        r->pass++;
    r->begun = true;
    r->piece = 0;
    r->row = 0;
}

int k3_trunk_reader_next_pass(struct k3_trunk_reader *r, struct k3_err *err)
{
    const struct k3_trunk_line_a *a = &r->link.ctl->a;
    bool cheap = r->begun && r->acked && r->attached;
    uint64_t left, next;

    if (stopping(r))
        return cancelled(err);
    if (cheap) {
        left = position_of(r, r->piece, r->row);
        next = (r->pass + 1) * r->link.layout.pass_bytes;
        /* What was left out is already in the ring, or there is nothing left: walk over it. */
        cheap = left == next || (!atomic_load_explicit(&a->error.set, memory_order_acquire) &&
                                 atomic_load_explicit(&a->produced, memory_order_acquire) >= next);
    }
    to_next_pass(r);
    if (!cheap)
        return seek_and_wait(r, err);
    if (r->link.layout.pass_bytes)
        consume(r, next);
    return 0;
}

int k3_trunk_reader_seek_pass(struct k3_trunk_reader *r, struct k3_err *err)
{
    to_next_pass(r);
    return seek_and_wait(r, err);
}

uint64_t k3_trunk_reader_block_bytes(const struct k3_trunk_reader *r)
{
    uint64_t half = r->link.layout.ring_bytes / 2;

    return half < BLOCK_COMFORT_BYTES ? half : BLOCK_COMFORT_BYTES;
}

void k3_trunk_reader_set_stop(struct k3_trunk_reader *r, _Atomic bool *stop)
{
    r->stop = stop;
}

void k3_trunk_reader_set_blocked(struct k3_trunk_reader *r, bool blocked_on_expert)
{
    atomic_store_explicit(&r->link.ctl->b.blocked_on_expert, blocked_on_expert,
                          memory_order_relaxed);
}

void k3_trunk_reader_set_notice(struct k3_trunk_reader *r, k3_trunk_notice_fn *fn, void *arg)
{
    r->notice = fn;
    r->notice_arg = arg;
}

void k3_trunk_reader_counts(const struct k3_trunk_reader *r, struct k3_trunk_reader_counts *out)
{
    *out = r->counts;
}
