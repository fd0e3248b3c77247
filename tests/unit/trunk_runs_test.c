/* The arithmetic of the stream: blocks, wraps, rooms, and how --trunk-gb divides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/trunk_fix.h"

static void cuts(void **state)
{
    const uint64_t block = 4u << 20, tail = K3_TAIL_BYTES;

    (void)state;
    assert_int_equal(k3_cut_bytes(0, block), 0);
    assert_int_equal(k3_cut_bytes(4096, block), 4096);
    assert_int_equal(k3_cut_bytes(block, block), block);
    assert_int_equal(k3_cut_bytes(block + tail - 4096, block), block + tail - 4096); /* absorbed */
    assert_int_equal(k3_cut_bytes(block + tail, block), block);
    assert_int_equal(k3_cut_bytes(3 * block, block), block);
}

static void ring_blocks(void **state)
{
    (void)state;
    assert_int_equal(k3_ring_block_bytes(4 << 20, 256 << 20, 4096), 4 << 20);
    assert_int_equal(k3_ring_block_bytes(4 << 20, 2 << 20, 4096), 512 << 10);
    assert_int_equal(k3_ring_block_bytes(65537, 256 << 20, 4096), 65536);
    assert_int_equal(k3_ring_block_bytes(64 << 10, 256 << 20, 128 << 10),
                     128 << 10); /* at least a page */
    /* The promise of the comment in runs.h: for all places of consumed in a page. */
    for (uint64_t ring = 2 << 20; ring <= 16 << 20; ring += 2 << 20)
        for (uint64_t consumed = 1000 * 4096; consumed < 1000 * 4096 + 4096; consumed += 5) {
            uint64_t block = k3_ring_block_bytes(4 << 20, ring, 4096);
            uint64_t last = consumed + ring / 2 - 1,
                     begin = last / 4096 * 4096; /* latest begin of its block */

            assert_true(k3_ring_has_room(begin + block + K3_TAIL_BYTES, consumed, ring, 4096));
        }
}

static void room(void **state)
{
    (void)state;
    assert_true(k3_ring_has_room(2 << 20, 0, 2 << 20, 4096));
    assert_false(
        k3_ring_has_room((2 << 20) + 4096, 4095, 2 << 20, 4096)); /* its page is still in use */
    assert_true(k3_ring_has_room((2 << 20) + 4096, 4096, 2 << 20, 4096));
    assert_false(k3_ring_has_room((2 << 20) + 4097, 8191, 2 << 20, 4096));
}

static void multiples(void **state)
{
    (void)state;
    assert_int_equal(k3_multiples_passed(0, 9, 10), 0);
    assert_int_equal(k3_multiples_passed(0, 10, 10), 1);
    assert_int_equal(k3_multiples_passed(9, 10, 10), 1);
    assert_int_equal(k3_multiples_passed(10, 19, 10), 0);
    assert_int_equal(k3_multiples_passed(5, 45, 10), 4);
    assert_int_equal(k3_multiples_passed(45, 5, 10), 0);
    assert_int_equal(k3_multiples_passed(0, 5, 0), 0);
}

/* A model without files, on the stack of the test. */
static void random_model(struct k3_model *m, uint64_t *rng, size_t n_matrices)
{
    uint64_t end[3] = { 8, 5000, 4096 };

    *m = (struct k3_model){ .n_files = 3 };
    m->matrices = calloc(n_matrices, sizeof(*m->matrices));
    m->pieces = calloc(n_matrices * 8, sizeof(*m->pieces));
    for (size_t i = 0; i < n_matrices; i++) {
        uint32_t file = (uint32_t)k3_tf_below(rng, 3),
                 n_pieces = (uint32_t)(1 + k3_tf_below(rng, 8));
        uint32_t cols = (uint32_t)(1 + k3_tf_below(rng, i % 2 ? 70000 : 300));

        if (k3_tf_below(rng, 2))
            end[file] += k3_tf_below(rng, 10000);
        m->matrices[m->n_matrices] = (struct k3_matrix){ .off_bytes = end[file],
                                                         .n_rows = n_pieces,
                                                         .n_cols = cols,
                                                         .file = (uint16_t)file,
                                                         .dtype = K3_BF16,
                                                         .layer = -1,
                                                         .role = k3_tf_below(rng, 9)
                                                                     ? K3_W_KDA_O
                                                                     : K3_W_ROUTER };
        for (uint32_t k = 0; k < n_pieces; k++) {
            m->pieces[m->n_pieces++] = (struct k3_piece){ (uint32_t)m->n_matrices, k, 1, 2 * cols,
                                                          end[file] };
            end[file] += 2 * cols;
            m->trunk_bytes += 2 * cols;
        }
        m->n_matrices++;
    }
}

static void free_model(struct k3_model *m)
{
    free(m->matrices);
    free(m->pieces);
}

/* Walks the blocks from `from` over about two passes and sees that they bring every byte of every
 * piece, from the right place, in pages that no other run's blocks touch. */
static void check_blocks(const struct k3_model *m, const struct k3_layout *l,
                         const struct k3_runs *runs, uint64_t from, uint64_t block_bytes)
{
    uint64_t until = (from / l->pass_bytes + 2) * l->pass_bytes, produced = from, last_page_end = 0;
    uint64_t pos = from;
    size_t i = 0; /* next piece of pass `pass` to be completed */
    uint64_t pass = from / l->pass_bytes;
    struct k3_block b = { .next = 0 };

    while (i < m->n_pieces &&
           (l->pinned[i] || pass * l->pass_bytes + l->start[i] + m->pieces[i].len_bytes <= from))
        i++;
    if (i == m->n_pieces) { /* from lies in the slack after the last */
        i = 0;
        pass++;
    }
    while (pos < until) {
        k3_runs_block(runs, pos, block_bytes, &b);
        assert_int_equal(b.pos % l->align_bytes, 0);
        assert_int_equal(b.off_bytes % l->align_bytes, 0);
        assert_int_equal(b.len_bytes % l->align_bytes, 0);
        assert_in_range(b.len_bytes, 1, block_bytes + K3_TAIL_BYTES - 1);
        assert_in_range(b.need_bytes, 1, b.len_bytes);
        assert_true(b.pos >= last_page_end); /* pages disjoint, in order */
        assert_true(b.end > produced && b.end > pos);
        assert_int_equal(b.end, b.pos + b.need_bytes);
        assert_int_equal(b.next, b.pos + b.len_bytes);
        assert_int_equal(b.pass, b.pos / l->pass_bytes);
        last_page_end = b.pos + b.len_bytes;
        produced = b.end;
        pos = b.next;
        /* Pieces that this block completes, and the part of each that lies in it. */
        for (;;) {
            uint64_t start;

            if (i == m->n_pieces) {
                i = 0;
                pass++;
                assert_true(b.last_of_pass);
                break;
            }
            if (l->pinned[i]) {
                i++;
                continue;
            }
            start = pass * l->pass_bytes + l->start[i];
            if (start < b.end) { /* (part of) it is in this block: the offsets agree */
                assert_int_equal(m->matrices[m->pieces[i].matrix].file, b.file);
                assert_int_equal((int64_t)(start - b.pos),
                                 (int64_t)(m->pieces[i].off_bytes - b.off_bytes));
            }
            if (start + m->pieces[i].len_bytes > produced) {
                /* The next block must go on with it: nothing of it is left out. */
                assert_true(start >= b.end || produced == b.pos + b.len_bytes);
                break;
            }
            i++;
        }
        assert_true(b.piece < m->n_pieces && !l->pinned[b.piece]);
    }
    assert_true(produced >= until - l->align_bytes);
}

static void blocks_bring_every_byte(void **state)
{
    uint64_t rng = 5;

    (void)state;
    for (int n = 0; n < 60; n++) {
        struct k3_model m;
        struct k3_layout l;
        struct k3_runs runs;
        struct k3_err err = K3_ERR_INIT;
        uint8_t *pinned;
        uint32_t align = n % 4 == 3 ? 65536 : 4096;

        random_model(&m, &rng, 1 + k3_tf_below(&rng, 30));
        pinned = calloc(1, m.n_pieces);
        if (n % 3) /* some pins, but never all */
            k3_pins_choose(&m, align, m.trunk_bytes * (n % 3) / 4, pinned);
        pinned[k3_tf_below(&rng, m.n_pieces)] = 0;
        assert_int_equal(k3_layout_build(&l, &m, align, 2 << 20, pinned, &err), 0);
        assert_int_equal(k3_runs_build(&runs, &m, &l, &err), 0);
        for (int k = 0; k < 20; k++) {
            uint64_t block = (uint64_t)align << k3_tf_below(&rng, 5);

            check_blocks(&m, &l, &runs, k ? k3_tf_below(&rng, 5 * l.pass_bytes) : 0,
                         block < 65536 ? 65536 : block);
        }
        k3_runs_free(&runs);
        k3_layout_free(&l);
        free(pinned);
        free_model(&m);
    }
}

static void neighbours_make_one_run(void **state)
{
    struct k3_model m;
    struct k3_layout l;
    struct k3_runs runs;
    struct k3_err err = K3_ERR_INIT;
    struct k3_block b;
    uint64_t rng = 1;
    uint8_t pinned[8] = { 0, 0, 1, 0 };

    (void)state;
    random_model(&m, &rng, 1);
    m.n_pieces = 4;
    for (uint32_t i = 0; i < 4; i++)
        m.pieces[i] = (struct k3_piece){ 0, i, 1, 5000, 1000 + 5000 * i };
    assert_int_equal(k3_layout_build(&l, &m, 4096, 2 << 20, pinned, &err), 0);
    assert_int_equal(k3_runs_build(&runs, &m, &l, &err), 0);
    assert_int_equal(runs.n_runs, 2); /* 0 and 1 touch; 2 is pinned; so 3 stands alone */
    k3_runs_block(&runs, 0, 65536, &b);
    assert_int_equal(b.len_bytes, 3 * 4096); /* 1000 .. 11000 in one read */
    assert_int_equal(b.need_bytes, 11000);
    assert_int_equal(b.piece, 0);
    k3_runs_block(&runs, 7000, 65536, &b); /* from the middle: from that page on */
    assert_int_equal(b.pos, 4096);
    assert_int_equal(b.off_bytes, 4096);
    assert_int_equal(b.need_bytes, 11000 - 4096);
    assert_int_equal(b.piece, 1);
    k3_runs_block(&runs, 11000, 65536, &b); /* the slack: the next run */
    assert_int_equal(b.piece, 3);
    assert_int_equal(b.off_bytes, 16000 / 4096 * 4096);
    assert_true(b.first_of_run && b.last_of_pass);
    k3_runs_block(&runs, l.pass_bytes - 1, 65536, &b); /* the slack at the end: the next pass */
    assert_int_equal(b.pos, l.pass_bytes);
    assert_int_equal(b.pass, 1);
    k3_runs_free(&runs);
    k3_layout_free(&l);
    free_model(&m);
}

static void budget(void **state)
{
    struct k3_model m;
    struct k3_err err = K3_ERR_INIT;
    uint64_t rng = 3, ring, all = 0, pinned_bytes = 0, prefix_bytes = 0;
    uint8_t *pinned;

    (void)state;
    random_model(&m, &rng, 40);
    pinned = calloc(1, m.n_pieces);
    for (size_t i = 0; i < m.n_pieces; i++)
        all += (m.pieces[i].off_bytes % 4096 + m.pieces[i].len_bytes + 4095) / 4096 * 4096;
    assert_true(all > (4 << 20)); /* else the cases below mean nothing */
    /* below the ring: what was asked, what is needed, the option */
    assert_true(k3_trunkd_budget(&m, 4096, (2 << 20) - 1, 2, &ring, pinned, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "2097151"));
    assert_non_null(strstr(err.text, "2097152"));
    assert_non_null(strstr(err.text, "--trunk-gb 0.0021"));
    assert_true(k3_trunkd_budget(&m, 4096, 0, 0, &ring, pinned, &err) < 0);
    /* just the ring: nothing pinned */
    assert_int_equal(k3_trunkd_budget(&m, 4096, 2 << 20, 2, &ring, pinned, &err), 0);
    assert_int_equal(ring, 2 << 20);
    assert_null(memchr(pinned, 1, m.n_pieces));
    /* what is left of it is pinned, and no more */
    assert_int_equal(k3_trunkd_budget(&m, 4096, (4 << 20) + all / 2, 4, &ring, pinned, &err), 0);
    assert_int_equal(ring, 4 << 20);
    for (size_t i = 0; i < m.n_pieces; i++)
        if (pinned[i])
            pinned_bytes += (m.pieces[i].off_bytes % 4096 + m.pieces[i].len_bytes + 4095) / 4096 *
                            4096;
    assert_in_range(pinned_bytes, all / 2 - 200000, all / 2);
    /* the same bytes as a prefix, for the benchmark */
    k3_trunkd_pins_prefix(&m, 4096, pinned);
    for (size_t i = 0, end = 0; i < m.n_pieces; i++) {
        if (pinned[i])
            prefix_bytes += (m.pieces[i].off_bytes % 4096 + m.pieces[i].len_bytes + 4095) / 4096 *
                            4096;
        end |= !pinned[i];
        assert_true(!pinned[i] || !end);
    }
    assert_in_range(prefix_bytes, pinned_bytes - 200000, pinned_bytes);
    /* default ring: twice the trunk in 2 MiB pages */
    assert_int_equal(k3_trunkd_budget(&m, 4096, all, 0, &ring, pinned, &err) < 0, 1);
    memset(pinned, 0, m.n_pieces);
    assert_int_equal(k3_trunkd_budget(&m, 4096, all + (2 << 20), 0, &ring, pinned, &err), 0);
    assert_int_equal(ring, 2 << 20); /* all pinned: the one page that the layout has */
    assert_null(memchr(pinned, 0, m.n_pieces));
    /* far more than there is */
    assert_int_equal(k3_trunkd_budget(&m, 4096, (uint64_t)1 << 40, 64, &ring, pinned, &err), 0);
    assert_int_equal(ring, 2 << 20);
    assert_null(memchr(pinned, 0, m.n_pieces));
    m.trunk_bytes = (uint64_t)1 << 40; /* a large model: 256 MiB */
    assert_true(k3_trunkd_budget(&m, 4096, (2 << 20), 0, &ring, pinned, &err) < 0);
    assert_non_null(strstr(err.text, "268435456"));
    free(pinned);
    free_model(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts),
        cmocka_unit_test(ring_blocks),
        cmocka_unit_test(room),
        cmocka_unit_test(multiples),
        cmocka_unit_test(blocks_bring_every_byte),
        cmocka_unit_test(neighbours_make_one_run),
        cmocka_unit_test(budget),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
