/* The loop: seeks, reads to begin, reads that end, and sleep in between. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "k3-trunkd/trunkd.h"

#define STOP_NS 500000000ull

/* How many reads may be in flight now. */
static unsigned depth_now(const struct k3_trunkd *d)
{
    /* One and not none, so that nothing can hang on a hint (spec/io.md 5). */
    if (d->opt.shared_drive &&
        atomic_load_explicit(&d->ctl->b.blocked_on_expert, memory_order_relaxed))
        return 1;
    return d->io->depth; /* a read that goes on to another copy may exceed its drive's depth, not this */
}

void k3_trunkd_room(struct k3_trunkd *d, enum k3_room room, uint64_t now_ns)
{
    uint64_t ns = now_ns > d->room_since_ns ? now_ns - d->room_since_ns : 0;

    d->room_ns += d->room != K3_ROOM_NONE ? ns : 0;
    d->room_at_depth_ns += d->room == K3_ROOM_DEPTH ? ns : 0;
    d->room = room;
    d->room_since_ns = now_ns;
    if (d->daemon) {
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_ROOM_NS, d->room_ns);
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_ROOM_AT_DEPTH_NS, d->room_at_depth_ns);
    }
}

/* Begins reads in the order in which computed will want the bytes: the stream, and before it the
 * pins that come earlier in the schedule.  While the ring is full pins go ahead.  Each goes to the
 * copy whose drive has the least to do; when that one has enough, the next read waits for it. */
void k3_trunkd_begin_reads(struct k3_trunkd *d)
{
    unsigned depth = depth_now(d);
    uint64_t now_ns = k3_now_ns();
    enum k3_room room_now = depth < d->io->depth ? K3_ROOM_NONE : K3_ROOM_DEPTH;
    bool full = false;

    while (d->n_in_flight < depth) {
        struct k3_block block;
        struct k3_read *r;
        uint64_t pin_pass;
        uint32_t pin_piece, file;
        bool room = false;
        bool stream = k3_stream_peek(d, &block, &room);
        bool pin = k3_pins_peek(d, &pin_pass, &pin_piece);
        int copy;

        full = stream && !room;
        if (pin && stream && room)
            pin = pin_pass < block.pass || (pin_pass == block.pass && pin_piece < block.piece);
        if (!pin && !(stream && room)) {
            room_now = K3_ROOM_NONE;
            break;
        }
        file = pin ? d->model->matrices[d->model->pieces[pin_piece].matrix].file : block.file;
        copy = k3_io_choose(&d->files, file, 0, true, now_ns);
        if (copy < 0)
            break;
        r = k3_read_take(d);
        if (!r) { /* finished ones still wait for an older one */
            room_now = depth < d->io->depth ? K3_ROOM_NONE : K3_ROOM_SOME;
            break;
        }
        r->copy = (uint32_t)copy;
        if (pin)
            k3_pins_start(d, r);
        else
            k3_stream_start(d, r, &block);
    }
    k3_trunkd_room(d, room_now, now_ns);
    k3_stream_full(d, full && d->n_in_flight == 0);
}

/* Ends a sleep on line B's bell without ringing it, since that line is computed's.  Should the loop
 * be just about to sleep, its tick ends it. */
static void wake(void *arg)
{
    struct k3_trunkd *d = arg;

    (void)syscall(SYS_futex, (uint32_t *)(void *)&d->ctl->b.bell, FUTEX_WAKE, INT_MAX, NULL, NULL,
                  0);
}

static void look_at_memory(struct k3_trunkd *d)
{
    struct k3_stats *s = k3_daemon_stats(d->daemon);
    uint64_t swapped_bytes, major_faults;

    if (!k3_mem_look(&d->mem, &d->data, &swapped_bytes, &major_faults))
        return;
    k3_stat_set(s, K3_TS_SWAPPED_BYTES, swapped_bytes);
    k3_stat_set(s, K3_TS_MAJOR_FAULTS, major_faults);
}

int k3_trunkd_serve(struct k3_trunkd *d, struct k3_err *err)
{
    struct k3_trunk_line_a *a = &d->ctl->a;
    struct k3_trunk_line_b *b = &d->ctl->b;
    uint64_t until_ns;
    int rc = 0;

    k3_daemon_on_stop(d->daemon, wake, d);
    k3_daemon_ready(d->daemon);
    while (rc == 0 && !k3_daemon_stopping(d->daemon)) {
        uint32_t seen = k3_bell_news(&b->bell); /* before the conditions are looked at */

        k3_daemon_beat(d->daemon);
        look_at_memory(d);
        k3_stream_seek(d);
        k3_trunkd_begin_reads(d);
        if (d->news) {
            d->news = false;
            k3_bell_ring(&a->bell, &b->sleepers);
        }
        if (d->n_in_flight > 0)
            rc = k3_reads_wait(d, err);
        else
            (void)k3_bell_wait(&b->bell, &a->sleepers, seen, K3_TICK_NS);
        if (d->news) {
            d->news = false;
            k3_bell_ring(&a->bell, &b->sleepers);
        }
    }
    /* What is in flight may land; a drive that takes longer is not waited for. */
    until_ns = k3_now_ns() + STOP_NS;
    while (rc == 0 && d->n_in_flight > 0 && k3_now_ns() < until_ns)
        rc = k3_reads_wait(d, err);
    return rc;
}
