/* The producer with a backend that this test plays: order, room, short and failed reads, seeks. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/trunk_fix.h"

#define N_MAX K3_IO_DEPTH_MAX

struct fake_io {
    struct k3_io io;
    struct k3_io_req *req[N_MAX]; /* with the backend, in the order of submission */
    unsigned n;
    struct k3_io_req *ready; /* what the next wait returns */
    uint64_t n_submitted;
};
struct rig {
    struct k3_tf t;
    struct k3_trunkd d;
    struct fake_io fake;
    uint64_t rng;
};

static struct rig *rig_of(struct k3_io *io)
{
    return (struct rig *)(void *)((char *)io - offsetof(struct rig, fake));
}

static void fake_submit(struct k3_io *io, struct k3_io_req *req)
{
    struct fake_io *f = (struct fake_io *)(void *)io;
    struct rig *g = rig_of(io);
    struct k3_read *r = (struct k3_read *)(void *)req;

    assert_true(f->n < io->depth);
    f->req[f->n++] = req;
    f->n_submitted++;
    if (r->kind == K3_READ_STREAM) { /* the rule of shm/trunk.h */
        const struct k3_layout *l = &g->d.layout;
        uint64_t consumed = atomic_load(&g->d.ctl->b.consumed);

        assert_true(r->block.pos + r->len_bytes <=
                    consumed - consumed % l->align_bytes + l->ring_bytes);
        assert_true(r->buf >= g->d.ring && r->buf + r->len_bytes <= g->d.ring + 2 * l->ring_bytes);
    }
    assert_int_equal(req->off_bytes % g->d.layout.align_bytes, 0);
    assert_int_equal((uintptr_t)req->buf % g->d.layout.align_bytes, 0);
    assert_int_equal(req->len_bytes % g->d.layout.align_bytes, 0);
}

static int fake_wait(struct k3_io *io, uint64_t timeout_ns, struct k3_io_req **done)
{
    struct fake_io *f = (struct fake_io *)(void *)io;

    (void)timeout_ns;
    *done = f->ready;
    f->ready = NULL;
    return 0;
}

static void fake_close(struct k3_io *io)
{
    (void)io;
}

static const struct k3_io_ops fake_ops = { .name = "fake", .submit = fake_submit, .wait = fake_wait, .close = fake_close };

/* Completes request i of those in flight with res (bytes really put there) and lets the daemon
 * look. */
static void complete(struct rig *g, unsigned i, int64_t res)
{
    struct k3_io_req *req = g->fake.req[i];
    struct k3_read *r = (struct k3_read *)(void *)req;
    struct k3_err err = K3_ERR_INIT;

    if (res > (int64_t)req->len_bytes)
        res = req->len_bytes;
    if (res > 0) { /* nothing past the end of the file */
        uint64_t size = g->t.m->files[r->file].len_bytes;

        if (req->off_bytes + (uint64_t)res > size)
            res = req->off_bytes < size ? (int64_t)(size - req->off_bytes) : 0;
        k3_tf_bytes(&g->t, r->file, req->off_bytes, req->buf, (size_t)res);
    }
    memmove(&g->fake.req[i], &g->fake.req[i + 1], (--g->fake.n - i) * sizeof(g->fake.req[0]));
    req->res = (int32_t)res;
    req->next = g->fake.ready;
    g->fake.ready = req;
    assert_int_equal(k3_reads_wait(&g->d, &err), 0);
}

#define ALL INT32_MAX

/* A second copy of every file, in memory: another drive. */
static char copies[64];

static void add_copies(struct rig *g)
{
    char command[256];

    snprintf(copies, sizeof(copies), "/dev/shm/k3-t-copies-XXXXXX");
    assert_non_null(mkdtemp(copies));
    for (size_t i = 0; i < g->d.model->n_files; i++) {
        struct k3_file *f = &g->d.model->files[i];

        f->copies = calloc(1, sizeof(*f->copies));
        f->n_copies = 1;
        assert_true(asprintf(&f->copies[0], "%s/f%zu", copies, i) > 0);
        snprintf(command, sizeof(command), "cp %s %s", f->path, f->copies[0]);
        assert_int_equal(system(command), 0);
    }
}

static void rig_open(struct rig *g, const struct k3_tf_spec *spec, uint32_t ring_mb, unsigned share,
                     uint32_t depth)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_trunkd *d = &g->d;
    uint8_t *pinned;
    uint64_t ring_bytes;

    *g = (struct rig){ .d = K3_TRUNKD_INIT, .rng = spec->seed };
    k3_tf_open(&g->t, spec);
    d->opt = k3_tf_opt(&g->t);
    d->opt.io_depth = depth;
    d->opt.io_block_bytes = 256 << 10;
    d->opt.trunk_bytes = k3_tf_trunk_bytes(&g->t, ring_mb, share);
    d->model = k3_tf_model(&g->t);
    if (*copies)
        add_copies(g);
    pinned = calloc(1, d->model->n_pieces);
    assert_int_equal(
        k3_trunkd_budget(d->model, 4096, d->opt.trunk_bytes, ring_mb, &ring_bytes, pinned, &err),
        0);
    assert_int_equal(k3_layout_build(&d->layout, d->model, 4096, ring_bytes, pinned, &err), 0);
    free(pinned);
    assert_int_equal(k3_runs_build(&d->runs, d->model, &d->layout, &err), 0);
    assert_int_equal(k3_tfiles_open(d, &err), 0);
    assert_int_equal(
        k3_seg_create(&d->data, g->t.instance, K3_TRUNK_DATA_SEG, d->layout.data_bytes, &err), 0);
    d->head = (struct k3_trunk_data *)(void *)d->data.base;
    d->flags = (_Atomic uint32_t *)(void *)(d->data.base + d->layout.flags_off);
    assert_int_equal(
        k3_ring_map(&d->data, d->layout.ring_off, d->layout.ring_bytes, true, &d->ring, &err), 0);
    assert_int_equal(k3_seg_create(&d->ctl_seg, g->t.instance, K3_TRUNK_SEG, sizeof(*d->ctl), &err),
                     0);
    d->ctl = (struct k3_trunk_ctl *)(void *)d->ctl_seg.base;
    assert_int_equal(k3_pins_open(d, &err), 0);
    assert_int_equal(k3_reads_open(d, &err), 0);
    g->fake.io = (struct k3_io){ &fake_ops, k3_io_files_depth(&d->files), 0 };
    d->io = &g->fake.io;
    k3_stream_open(d, false);
}

static void rig_close(struct rig *g)
{
    k3_trunkd_close(&g->d);
    k3_tf_close(&g->t);
}

static void seek_to(struct rig *g, uint64_t start, uint64_t piece)
{
    struct k3_trunk_line_b *b = &g->d.ctl->b;

    atomic_store(&b->consumed, start);
    b->seek.start = start;
    b->seek.piece = piece;
    atomic_store(&b->seek.number, atomic_load(&b->seek.number) + ((uint64_t)1 << 32));
    k3_stream_seek(&g->d);
}

static uint64_t produced(const struct rig *g)
{
    return atomic_load(&g->d.ctl->a.produced);
}

/* Every byte of unpinned pieces in [from, produced) is right. */
static void check_ring(struct rig *g, uint64_t from)
{
    const struct k3_layout *l = &g->d.layout;

    if (l->pass_bytes == 0)
        return;
    for (uint64_t pass = from / l->pass_bytes; pass <= produced(g) / l->pass_bytes; pass++)
        for (size_t i = 0; i < l->n_pieces; i++) {
            uint64_t at = pass * l->pass_bytes + l->start[i],
                     end = at + g->t.m->pieces[i].len_bytes, n;
            uint32_t file = g->t.m->matrices[g->t.m->pieces[i].matrix].file;
            uint8_t want[4096];

            if (l->pinned[i] || end <= from || at >= produced(g))
                continue;
            end = end < produced(g) ? end : produced(g);
            for (uint64_t a = at > from ? at : from; a < end; a += n) {
                n = end - a < sizeof(want) ? end - a : sizeof(want);
                k3_tf_bytes(&g->t, file, g->t.m->pieces[i].off_bytes + (a - at), want, n);
                assert_memory_equal(g->d.ring + a % l->ring_bytes, want, n);
            }
        }
}

static void check_pin(struct rig *g, size_t i)
{
    const struct k3_piece *p = &g->t.m->pieces[i];
    uint8_t *want = malloc(p->len_bytes);

    k3_tf_bytes(&g->t, g->t.m->matrices[p->matrix].file, p->off_bytes, want, p->len_bytes);
    assert_memory_equal(g->d.data.base + g->d.layout.start[i], want, p->len_bytes);
    free(want);
}

static const struct k3_tf_spec spec = { .seed = 71,
                                        .n_files = 2,
                                        .n_matrices = 12,
                                        .row_bytes_max = 40000,
                                        .matrix_bytes_max = 900000,
                                        .piece_bytes = 700000 };

/* Stream and pins are begun in the order in which a pass wants them, from where the seek says. */
static void begun_in_schedule_order(void **state)
{
    static struct rig g;
    uint64_t key = 0;
    unsigned n_pins = 0, n_stream = 0;

    (void)state;
    for (int from = 0; from < 2; from++) {
        size_t first;

        rig_open(&g, &spec, 64, 128, 4);
        first = from ? g.t.m->n_pieces / 2 : 0;
        while (g.d.layout.pinned[first])
            first++;
        seek_to(&g, 3 * g.d.layout.pass_bytes + g.d.layout.start[first], first);
        assert_int_equal(atomic_load(&g.d.ctl->a.acked), atomic_load(&g.d.ctl->b.seek.number));
        key = 0;
        while (produced(&g) < 4 * g.d.layout.pass_bytes - 4096 || g.d.pins.n_todo) {
            uint64_t before = g.fake.n_submitted;

            k3_trunkd_begin_reads(&g.d);
            for (; before < g.fake.n_submitted; before++) {
                struct k3_read *r = (struct k3_read *)(void *)
                                        g.fake.req[g.fake.n - (g.fake.n_submitted - before)];
                uint64_t pass = r->kind == K3_READ_STREAM ? r->block.pass : 3 + (r->piece < first);
                uint64_t now = pass << 32 | r->piece;

                if (r->kind == K3_READ_STREAM)
                    n_stream++;
                else
                    n_pins++;
                assert_true(now >= key);
                key = now;
            }
            complete(&g, 0, ALL);
        }
        check_ring(&g, 3 * g.d.layout.pass_bytes + g.d.layout.start[first]);
        rig_close(&g);
    }
    assert_true(n_pins > 8 && n_stream > 8);
}

/* Completions in any order, cut anywhere, interrupted now and then: an in-order prefix of right
 * bytes all the same. */
static void any_order_of_completions(void **state)
{
    static struct rig g;

    (void)state;
    for (int direct = 0; direct < 2; direct++)
        for (unsigned share = 0; share <= 128; share += 128) {
            uint64_t last = 0, from = 0, n_steps = 0;

            rig_open(&g, &spec, 2, share, 8);
            for (size_t i = 0; i < g.t.m->n_files; i++)
                g.d.files.file[i].copy[0].direct = direct;
            seek_to(&g, 0, 0);
            while (produced(&g) < 3 * g.d.layout.pass_bytes) {
                unsigned i;
                int64_t res;

                k3_trunkd_begin_reads(&g.d);
                if (g.fake.n == 0 || k3_tf_below(&g.rng, 3) == 0) { /* consume a little, or all */
                    from = g.fake.n ? from + k3_tf_below(&g.rng, produced(&g) - from + 1)
                                    : produced(&g);
                    check_ring(&g, from);
                    atomic_store(&g.d.ctl->b.consumed, from);
                    continue;
                }
                i = (unsigned)k3_tf_below(&g.rng, g.fake.n);
                res = (int64_t)k3_tf_below(&g.rng, g.fake.req[i]->len_bytes + 1);
                if (direct)
                    res -= res % 512;
                switch (k3_tf_below(&g.rng, 6)) {
                case 0:
                    res = -EINTR;
                    break;
                case 1:
                    res = -EAGAIN;
                    break;
                case 2:
                    res = res ? res : 512;
                    break;
                default:
                    res = ALL;
                }
                complete(&g, i, res);
                assert_true(produced(&g) >= last);
                last = produced(&g);
                if (++n_steps % 16 == 0)
                    check_ring(&g, from);
                assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
            }
            while (g.fake.n)
                complete(&g, 0, ALL);
            for (size_t i = 0; i < g.t.m->n_pieces; i++)
                if (g.d.layout.pinned[i]) {
                    assert_int_equal(atomic_load(&g.d.flags[i]), K3_PIECE_VALID);
                    check_pin(&g, i);
                }
            rig_close(&g);
        }
}

static void a_flag_comes_after_all_blocks_of_its_piece(void **state)
{
    static struct rig g;

    (void)state;
    rig_open(&g, &spec, 2, 256, 16);
    k3_trunkd_begin_reads(&g.d); /* before any seek: pins only */
    while (g.fake.n) {
        complete(&g, g.fake.n - 1, ALL); /* the youngest first */
        for (size_t i = 0; i < g.t.m->n_pieces; i++)
            if (atomic_load(&g.d.flags[i]) == K3_PIECE_VALID)
                check_pin(&g, i);
        k3_trunkd_begin_reads(&g.d);
    }
    for (size_t i = 0; i < g.t.m->n_pieces; i++)
        assert_int_equal(atomic_load(&g.d.flags[i]), K3_PIECE_VALID);
    rig_close(&g);
}

static void nothing_streams_before_the_first_seek(void **state)
{
    static struct rig g;

    (void)state;
    rig_open(&g, &spec, 2, 0, 8);
    k3_stream_seek(&g.d);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 0);
    rig_close(&g);
}

static void a_seek_waits_for_reads_in_flight(void **state)
{
    static struct rig g;
    uint64_t acked, number, start;

    (void)state;
    rig_open(&g, &spec, 2, 0, 4);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_true(g.fake.n >= 3);
    acked = atomic_load(&g.d.ctl->a.acked);
    start = 5 * g.d.layout.pass_bytes + 12345;
    seek_to(&g, start, 0);
    number = atomic_load(&g.d.ctl->b.seek.number);
    while (g.fake.n) {
        uint64_t n_submitted = g.fake.n_submitted;

        assert_int_equal(atomic_load(&g.d.ctl->a.acked), acked);
        complete(&g, g.fake.n - 1, ALL);
        if (g.fake.n) {
            k3_stream_seek(&g.d);
            k3_trunkd_begin_reads(&g.d);
            assert_int_equal(g.fake.n_submitted, n_submitted); /* nothing more for the old place */
        }
    }
    k3_stream_seek(&g.d);
    assert_int_equal(atomic_load(&g.d.ctl->a.acked), number);
    assert_int_equal(produced(&g), start);
    k3_trunkd_begin_reads(&g.d);
    while (g.fake.n)
        complete(&g, 0, ALL);
    assert_true(produced(&g) > start);
    check_ring(&g, start);
    rig_close(&g);
}

static void impossible_seeks(void **state)
{
    static struct rig g;

    (void)state;
    rig_open(&g, &spec, 2, 128, 4);
    seek_to(&g, UINT64_MAX - 5, UINT64_MAX);
    assert_int_equal(atomic_load(&g.d.ctl->a.acked), atomic_load(&g.d.ctl->b.seek.number));
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 1);
    assert_int_equal(g.d.ctl->a.error.err, EOVERFLOW);
    k3_trunkd_begin_reads(&g.d); /* pins go on */
    while (g.fake.n)
        complete(&g, 0, ALL);
    seek_to(&g, 100, 0);
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    /* consumed beyond what was produced makes no room */
    atomic_store(&g.d.ctl->b.consumed, (uint64_t)1 << 50);
    for (int i = 0; i < 100; i++) {
        struct k3_block b;
        bool room;

        if (!k3_stream_peek(&g.d, &b, &room) || !room)
            break;
        assert_true(b.pos + b.len_bytes <= g.d.layout.ring_bytes);
        g.d.stream.next = b.next;
    }
    rig_close(&g);
}

static void errors_stop_at_a_position(void **state)
{
    static struct rig g;
    struct k3_read *r;
    uint64_t pos, got;

    (void)state;
    rig_open(&g, &spec, 8, 0, 8);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_true(g.fake.n >= 5);
    r = (struct k3_read *)(void *)g.fake.req[2];
    pos = r->block.pos;
    got = 8192;
    complete(&g, 2, -EIO); /* once more */
    assert_int_equal(g.fake.n, 8);
    assert_ptr_equal(g.fake.req[7], &r->req);
    complete(&g, 7, (int64_t)got);
    assert_ptr_equal(g.fake.req[7], &r->req);
    assert_int_equal(g.fake.req[7]->off_bytes, r->off_bytes + got); /* only the rest */
    complete(&g, 7, -EIO);
    complete(&g, 7, -EIO);
    assert_int_equal(g.fake.n, 7); /* given up; but older ones are still in flight */
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    complete(&g, 6, ALL);
    complete(&g, 1, ALL);
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    assert_int_equal(produced(&g), 0);
    complete(&g, 0, ALL);
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 1);
    assert_int_equal(g.d.ctl->a.error.err, EIO);
    assert_int_equal(g.d.ctl->a.error.position, pos + got);
    assert_int_equal(produced(&g), pos + got); /* all that came is there */
    assert_int_equal(g.d.ctl->a.error.off_bytes, r->off_bytes + got);
    check_ring(&g, 0);
    while (g.fake.n)
        complete(&g, 0, ALL);
    assert_int_equal(produced(&g), pos + got); /* what was behind it is dropped */
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 0);
    seek_to(&g, pos, 0); /* tries again */
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    k3_trunkd_begin_reads(&g.d);
    while (g.fake.n)
        complete(&g, g.fake.n - 1, ALL);
    assert_true(produced(&g) > pos + got);
    check_ring(&g, pos);
    rig_close(&g);
}

static void gives_up_when_nothing_moves(void **state)
{
    static struct rig g;
    unsigned n = 0;

    (void)state;
    rig_open(&g, &spec, 2, 0, 1);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    while (!atomic_load(&g.d.ctl->a.error.set) && n++ < 10000)
        complete(&g, 0, n % 2 ? -EAGAIN : -EINTR);
    assert_in_range(n, 50, 1000);
    assert_int_equal(g.fake.n, 0);
    rig_close(&g);
}

static void the_end_of_the_file(void **state)
{
    static struct rig g;
    struct k3_read *r;

    (void)state;
    /* One matrix at the end of its file: the last page is read short, and that is enough. */
    rig_open(&g,
             &(struct k3_tf_spec){ .seed = 5,
                                   .n_files = 1,
                                   .n_matrices = 1,
                                   .row_bytes_max = 4000,
                                   .matrix_bytes_max = 9000,
                                   .piece_bytes = 100000 },
             2, 0, 1);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 1);
    r = (struct k3_read *)(void *)g.fake.req[0];
    assert_true(r->off_bytes + r->len_bytes > g.t.m->files[0].len_bytes);
    complete(&g, 0, ALL); /* cut by complete() */
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    assert_true(produced(&g) >= g.d.layout.start[0] + g.t.m->pieces[0].len_bytes);
    check_ring(&g, 0);
    /* One byte less is not enough. */
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    r = (struct k3_read *)(void *)g.fake.req[0];
    complete(&g, 0, (int64_t)r->need_bytes - 1);
    assert_int_equal(g.fake.n, 1);
    complete(&g, 0,
             (int64_t)((r->need_bytes - 1) % 4096)); /* the same again: the file ends there */
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 1);
    assert_int_equal(g.d.ctl->a.error.err, ENODATA);
    assert_int_equal(g.d.ctl->a.error.off_bytes, r->off_bytes + r->need_bytes - 1);
    rig_close(&g);
}

static void a_changed_size_is_an_error(void **state)
{
    static struct rig g;
    FILE *f;

    (void)state;
    rig_open(&g, &spec, 2, 128, 8);
    for (size_t i = 0; i < g.t.m->n_files; i++) {
        f = fopen(g.t.m->files[i].path, "a");
        assert_int_equal(fputc('x', f), 'x');
        fclose(f);
    }
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 0); /* not worth a read */
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 1);
    assert_int_equal(g.d.ctl->a.error.err, ESTALE);
    for (size_t i = 0; i < g.t.m->n_pieces; i++)
        if (g.d.layout.pinned[i])
            assert_int_equal(atomic_load(&g.d.flags[i]), K3_PIECE_FAILED | ESTALE);
    for (uint32_t i = 0; i < g.t.m->n_files; i++)
        k3_tf_write_file(&g.t, i);
    seek_to(&g, 0, 0);
    for (int i = 0; i < 1000; i++) {
        k3_trunkd_begin_reads(&g.d);
        if (g.fake.n == 0)
            break;
        complete(&g, 0, ALL);
    }
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    for (size_t i = 0; i < g.t.m->n_pieces; i++)
        if (g.d.layout.pinned[i])
            assert_int_equal(atomic_load(&g.d.flags[i]), K3_PIECE_VALID);
    rig_close(&g);
}

static void a_refused_direct_read_goes_on_buffered(void **state)
{
    static struct rig g;
    uint32_t n_direct;

    (void)state;
    rig_open(&g, &spec, 2, 0, 4);
    if (atomic_load(&g.d.files.n_direct) == 0)
        skip(); /* this file system has no O_DIRECT at all */
    n_direct = atomic_load(&g.d.files.n_direct);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_true(fcntl(g.d.files.file[((struct k3_read *)(void *)g.fake.req[0])->file].copy[0].fd, F_GETFL) &
                O_DIRECT);
    for (int i = 0; i < 4; i++)
        complete(&g, 0, -EINVAL); /* all four of them, sent before the first came back */
    assert_int_equal(g.fake.n, 4);
    assert_true(atomic_load(&g.d.files.n_direct) < n_direct);
    assert_false(fcntl(g.d.files.file[((struct k3_read *)(void *)g.fake.req[0])->file].copy[0].fd, F_GETFL) &
                 O_DIRECT);
    while (g.fake.n)
        complete(&g, 0, ALL);
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    check_ring(&g, 0);
    rig_close(&g);
}

static void one_read_while_computed_waits_for_an_expert(void **state)
{
    static struct rig g;

    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        rig_open(&g, &spec, 8, 100, 8);
        g.d.opt.shared_drive = shared;
        seek_to(&g, 0, 0);
        atomic_store(&g.d.ctl->b.blocked_on_expert, 1);
        k3_trunkd_begin_reads(&g.d);
        assert_int_equal(g.fake.n, shared ? 1 : 8);
        atomic_store(&g.d.ctl->b.blocked_on_expert, 0);
        k3_trunkd_begin_reads(&g.d);
        assert_int_equal(g.fake.n, 8);
        atomic_store(&g.d.ctl->b.blocked_on_expert, 1);
        complete(&g, 0, ALL);
        k3_trunkd_begin_reads(&g.d);
        assert_int_equal(g.fake.n, shared ? 7 : 8);
        rig_close(&g);
    }
}

static void pins_go_ahead_while_the_ring_is_full(void **state)
{
    static struct rig g;

    (void)state;
    rig_open(&g, &spec, 2, 128, 8);
    seek_to(&g, 0, 0);
    for (;;) { /* nothing is consumed */
        k3_trunkd_begin_reads(&g.d);
        if (g.fake.n == 0)
            break;
        complete(&g, (unsigned)k3_tf_below(&g.rng, g.fake.n), ALL);
    }
    assert_in_range(produced(&g), 1, g.d.layout.ring_bytes);
    assert_int_equal(g.d.pins.n_todo, 0);
    for (size_t i = 0; i < g.t.m->n_pieces; i++)
        if (g.d.layout.pinned[i])
            assert_int_equal(atomic_load(&g.d.flags[i]), K3_PIECE_VALID);
    rig_close(&g);
}

/* What the counters room_ns and room_at_depth_ns add up. */
static void the_time_at_full_depth(void **state)
{
    static struct rig g;
    uint64_t room_ns, at_depth_ns;

    (void)state;
    rig_open(&g, &spec, 2, 0, 4);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.d.room, K3_ROOM_NONE); /* nobody wants anything */
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 4);
    assert_int_equal(g.d.room, K3_ROOM_DEPTH);
    complete(&g, 3, ALL);
    assert_int_equal(g.d.room, K3_ROOM_SOME); /* until the next is begun */
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.d.room, K3_ROOM_DEPTH);
    while (g.fake.n > 1) { /* none can begin: the finished ones wait for the oldest */
        complete(&g, 1, ALL);
        k3_trunkd_begin_reads(&g.d);
    }
    assert_true(g.d.room == K3_ROOM_SOME || g.d.room == K3_ROOM_NONE);
    while (g.fake.n) { /* and now the ring fills up */
        complete(&g, 0, ALL);
        k3_trunkd_begin_reads(&g.d);
    }
    assert_int_equal(g.d.room, K3_ROOM_NONE);
    g.d.opt.shared_drive = true;
    atomic_store(&g.d.ctl->b.consumed, produced(&g));
    atomic_store(&g.d.ctl->b.blocked_on_expert, 1);
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 1);
    assert_int_equal(g.d.room, K3_ROOM_NONE); /* full depth is not wanted now */
    complete(&g, 0, ALL);
    room_ns = g.d.room_ns;
    at_depth_ns = g.d.room_at_depth_ns;
    assert_true(at_depth_ns > 0 && room_ns >= at_depth_ns);
    k3_trunkd_room(&g.d, K3_ROOM_DEPTH, 1000);
    k3_trunkd_room(&g.d, K3_ROOM_SOME, 1300);
    k3_trunkd_room(&g.d, K3_ROOM_NONE, 1350);
    k3_trunkd_room(&g.d, K3_ROOM_NONE, 9999);
    assert_int_equal(g.d.room_ns - room_ns, 350);
    assert_int_equal(g.d.room_at_depth_ns - at_depth_ns, 300);
    rig_close(&g);
}

static uint32_t copy_in_flight(const struct rig *g, unsigned i)
{
    return ((const struct k3_read *)(const void *)g->fake.req[i])->copy;
}

static void copies_begin(struct rig *g, unsigned share)
{
    copies[0] = '?';
    rig_open(g, &spec, 8, share, 4);
    assert_int_equal(g->d.files.n_drives, 2);
    seek_to(g, 0, 0);
    k3_trunkd_begin_reads(&g->d);
}

static void copies_end(struct rig *g)
{
    char command[128];

    rig_close(g);
    snprintf(command, sizeof(command), "rm -rf '%s'", copies);
    assert_int_equal(system(command), 0);
    copies[0] = '\0';
}

/* Two drives that hold the same files: each block goes to the one that has less to do. */
static void two_drives_share_the_reads(void **state)
{
    static struct rig g;
    unsigned n[2] = { 0, 0 };

    (void)state;
    for (unsigned share = 0; share <= 256; share += 256) { /* all streamed, all pinned */
        copies_begin(&g, share);
        assert_int_equal(g.fake.n, 8); /* four on each */
        for (unsigned i = 0; i < 8; i++)
            n[copy_in_flight(&g, i)]++;
        assert_true(n[0] == n[1]);
        /* One drive is three times as fast: it gets more, and the bytes are right all the same. */
        for (unsigned step = 0; produced(&g) < g.d.layout.pass_bytes || g.d.pins.n_todo; step++) {
            unsigned i;

            for (i = 0; i + 1 < g.fake.n && copy_in_flight(&g, i) != (step % 4 == 0); i++)
                ;
            n[copy_in_flight(&g, i)]++;
            complete(&g, i, ALL);
            check_ring(&g, 0);
            atomic_store(&g.d.ctl->b.consumed, produced(&g));
            k3_trunkd_begin_reads(&g.d);
            if (share == 0 && produced(&g) > g.d.layout.pass_bytes / 2)
                break;
        }
        assert_true(n[0] > n[1]);
        n[0] = n[1] = 0;
        while (g.fake.n)
            complete(&g, 0, ALL);
        assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
        copies_end(&g);
    }
}

/* A copy that fails, for whatever reason, is replaced by the other one, and then left alone. */
static void the_other_copy_is_tried(void **state)
{
    static const int wrong[] = { -EIO, -ENXIO, -EBADF, 0 };
    static struct rig g;

    (void)state;
    for (size_t w = 0; w < sizeof(wrong) / sizeof(wrong[0]); w++) {
        unsigned n_bad = 0;

        copies_begin(&g, 100);
        while (g.fake.n && produced(&g) < g.d.layout.pass_bytes - 4096) {
            n_bad += copy_in_flight(&g, 0) == 0;
            complete(&g, 0, copy_in_flight(&g, 0) == 0 ? wrong[w] : ALL);
            check_ring(&g, 0);
            atomic_store(&g.d.ctl->b.consumed, produced(&g));
            k3_trunkd_begin_reads(&g.d);
        }
        assert_in_range(n_bad, 1, 16); /* what was under way of two files, with EIO twice; no more since */
        assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
        while (g.fake.n)
            complete(&g, 0, ALL);
        copies_end(&g);
    }
}

static void when_all_copies_fail(void **state)
{
    static struct rig g;

    (void)state;
    copies_begin(&g, 0);
    while (g.fake.n)
        complete(&g, 0, -ENXIO);
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 1);
    assert_int_equal(g.d.ctl->a.error.err, ENXIO);
    assert_int_equal(produced(&g), 0);
    seek_to(&g, 0, 0); /* once more, from whichever */
    k3_trunkd_begin_reads(&g.d);
    assert_int_equal(g.fake.n, 8);
    while (g.fake.n)
        complete(&g, 0, ALL);
    assert_true(produced(&g) > 0);
    check_ring(&g, 0);
    copies_end(&g);
}

static void a_copy_that_changed_its_size(void **state)
{
    static struct rig g;

    (void)state;
    copies_begin(&g, 100);
    while (g.fake.n)
        complete(&g, 0, ALL);
    for (size_t i = 0; i < g.d.model->n_files; i++)
        assert_int_equal(truncate(g.d.model->files[i].copies[0], 10), 0);
    seek_to(&g, 0, 0);
    k3_trunkd_begin_reads(&g.d);
    while (g.fake.n) {
        struct k3_read *r = (struct k3_read *)(void *)g.fake.req[0];

        /* The drive of the bad copy gives nothing: the read goes to the other one. */
        complete(&g, 0, r->copy == 1 ? 0 : ALL);
        k3_trunkd_begin_reads(&g.d);
    }
    assert_int_equal(atomic_load(&g.d.ctl->a.error.set), 0);
    assert_true(produced(&g) > 0);
    check_ring(&g, 0);
    copies_end(&g);
}

static void widening(void **state)
{
    const uint16_t h[] = { 0x0000, 0x8000, 0x3c00, 0xc000, 0x7bff, 0x0400,
                           0x03ff, 0x0001, 0x7c00, 0xfc00, 0x3555 };
    const float want[] = { 0.0f,         -0.0f,    1.0f,     -2.0f,     65504.0f,   0x1p-14f,
                           0x1.ff8p-15f, 0x1p-24f, INFINITY, -INFINITY, 0x1.554p-2f };
    const uint16_t b[] = { 0x3f80, 0xff80, 0x0001 };
    float out[11];

    (void)state;
    k3_resident_widen(out, h, K3_F16, 11);
    assert_memory_equal(out, want, sizeof(want));
    k3_resident_widen(out, (const uint8_t *)b, K3_BF16, 3);
    assert_true(out[0] == 1.0f && out[1] == -INFINITY && out[2] == 0x1p-133f);
    k3_resident_widen(out, want, K3_F32, 11);
    assert_memory_equal(out, want, sizeof(want));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(begun_in_schedule_order),
        cmocka_unit_test(any_order_of_completions),
        cmocka_unit_test(a_flag_comes_after_all_blocks_of_its_piece),
        cmocka_unit_test(nothing_streams_before_the_first_seek),
        cmocka_unit_test(a_seek_waits_for_reads_in_flight),
        cmocka_unit_test(impossible_seeks),
        cmocka_unit_test(errors_stop_at_a_position),
        cmocka_unit_test(gives_up_when_nothing_moves),
        cmocka_unit_test(the_end_of_the_file),
        cmocka_unit_test(a_changed_size_is_an_error),
        cmocka_unit_test(a_refused_direct_read_goes_on_buffered),
        cmocka_unit_test(one_read_while_computed_waits_for_an_expert),
        cmocka_unit_test(pins_go_ahead_while_the_ring_is_full),
        cmocka_unit_test(the_time_at_full_depth),
        cmocka_unit_test(two_drives_share_the_reads),
        cmocka_unit_test(the_other_copy_is_tried),
        cmocka_unit_test(when_all_copies_fail),
        cmocka_unit_test(a_copy_that_changed_its_size),
        cmocka_unit_test(widening),
    };

    k3_log_open("trunk_reads_test", K3_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
