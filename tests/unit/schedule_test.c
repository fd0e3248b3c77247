/* model/schedule.c: pins and positions.  The page rules of design.md sections 2 and 3, checked piece by piece. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/schedule.h"
#include "shm/trunk.h"
#include "tests/unit/model_files.h"

#define RING (2u << 20)

static struct k3_model *formula, *scattered, *released;

static uint64_t up(uint64_t v, uint64_t to)
{
    return (v + to - 1) / to * to;
}

static uint64_t cost(const struct k3_model *m, size_t i, uint32_t a)
{
    return up(m->pieces[i].off_bytes % a + m->pieces[i].len_bytes, a);
}

static uint64_t pinned_cost(const struct k3_model *m, const uint8_t *pinned, uint32_t a)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < m->n_pieces; i++)
        sum += pinned[i] ? cost(m, i, a) : 0;
    return sum;
}

static bool is_gate(const struct k3_model *m, size_t i)
{
    return m->matrices[m->pieces[i].matrix].role == K3_W_ROUTER;
}

static void check_layout(const struct k3_model *m, const struct k3_layout *l)
{
    uint64_t a = l->align_bytes, stream_page = 0, pinned_end = l->pinned_off, payload = 0;
    const struct k3_piece *last = NULL;
    size_t n_pinned = 0, last_i = 0;

    for (size_t i = 0; i < m->n_pieces; i++) {
        const struct k3_piece *p = m->pieces + i;
        uint64_t first = l->start[i] / a, end = up(l->start[i] + p->len_bytes, a) / a;

        assert_int_equal(l->start[i] % a, p->off_bytes % a); /* direct reads land in place */
        if (l->pinned[i]) {
            assert_true(first * a >= pinned_end);
            pinned_end = end * a;
            payload += p->len_bytes;
            n_pinned++;
            continue;
        }
        if (last && m->matrices[last->matrix].file == m->matrices[p->matrix].file &&
            last->off_bytes + last->len_bytes == p->off_bytes)
            assert_int_equal(l->start[i], l->start[last_i] + last->len_bytes);
        else
            assert_true(first == stream_page); /* a new run: pages of its own, right after the last one's */
        stream_page = end;
        last = p;
        last_i = i;
    }
    assert_int_equal(l->pass_bytes, stream_page * a);
    assert_int_equal(l->n_pinned, n_pinned);
    assert_int_equal(l->pinned_payload_bytes, payload);
    assert_true(pinned_end <= l->pinned_off + l->pinned_bytes);
    assert_int_equal(l->n_pieces, m->n_pieces);
    /* the data segment: head, flags, resident | pinned | ring */
    assert_true(l->flags_off >= sizeof(struct k3_trunk_data) && l->flags_off % 64 == 0);
    assert_true(l->resident_off >= l->flags_off + 4 * m->n_pieces && l->resident_off % 64 == 0);
    assert_true(l->pinned_off >= l->resident_off + m->resident_bytes);
    assert_int_equal(l->pinned_off % K3_HUGE_BYTES, 0);
    assert_int_equal(l->ring_off, l->pinned_off + l->pinned_bytes);
    assert_int_equal(l->ring_off % K3_HUGE_BYTES, 0);
    assert_int_equal(l->data_bytes, l->ring_off + l->ring_bytes);
}

static void positions(void **state)
{
    (void)state;
    struct k3_model *const models[] = { formula, scattered, released };

    for (int k = 0; k < 3; k++)
        for (uint32_t a = 4096; a <= 65536; a *= 4)
            for (int part = 0; part <= 4; part++) {
                struct k3_model *m = models[k];
                struct k3_err err = K3_ERR_INIT;
                uint8_t *pinned = malloc(m->n_pieces);
                struct k3_layout l;

                k3_pins_choose(m, a, m->trunk_bytes / 4 * (uint64_t)part + (part == 4 ? m->n_pieces * 2ull * a : 0), pinned);
                if (k3_layout_build(&l, m, a, 64 * RING, pinned, &err) < 0)
                    fail_msg("%s", err.text);
                check_layout(m, &l);
                assert_int_equal(l.pass_bytes == 0, part == 4);
                k3_layout_free(&l);
                free(pinned);
            }
}

/* One file per layer and everything in schedule order would be one run; here neighbours in the file are few, but kept. */
static void overhead(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_layout l;

    assert_int_equal(k3_layout_build(&l, released, 4096, 64 * RING, NULL, &err), 0);
    /* design.md section 3: 5 MB a pass of K3's 93 layers; 8 layers here */
    assert_true(l.pass_bytes > released->trunk_bytes && l.pass_bytes - released->trunk_bytes < 500000);
    k3_layout_free(&l);
}

static void budgets(void **state)
{
    (void)state;
    struct k3_model *m = released;
    uint8_t *pinned = malloc(m->n_pieces);
    uint64_t all = 0, gates = 0, largest = 0;

    for (size_t i = 0; i < m->n_pieces; i++) {
        all += cost(m, i, 4096);
        gates += is_gate(m, i) ? cost(m, i, 4096) : 0;
        largest = cost(m, i, 4096) > largest ? cost(m, i, 4096) : largest;
    }
    assert_true(gates > 0);
    for (uint64_t budget = 0; budget < all + 2 * largest; budget += all / 37 + 1) {
        uint64_t used, smallest_left = UINT64_MAX;

        k3_pins_choose(m, 4096, budget, pinned);
        used = pinned_cost(m, pinned, 4096);
        assert_true(used <= budget);
        for (size_t i = 0; i < m->n_pieces; i++) {
            if (!pinned[i] && cost(m, i, 4096) < smallest_left)
                smallest_left = cost(m, i, 4096);
            if (budget >= gates && is_gate(m, i))
                assert_int_equal(pinned[i], 1);
            if (budget < gates && !is_gate(m, i) && pinned[i]) /* only what no gate fits into any more */
                assert_true(cost(m, i, 4096) < largest);
        }
        assert_true(used == all || used + smallest_left > budget); /* nothing more would have fitted */
    }
    k3_pins_choose(m, 4096, all, pinned);
    assert_int_equal(pinned_cost(m, pinned, 4096), all);
    k3_pins_choose(m, 4096, UINT64_MAX, pinned);
    assert_int_equal(pinned_cost(m, pinned, 4096), all);
    free(pinned);
}

/* Up to any point of the pass the pinned share of the bytes is about the same. */
static void spread_evenly(void **state)
{
    (void)state;
    struct k3_model *m = released;
    uint8_t *pinned = malloc(m->n_pieces);
    double all = 0, gates = 0;

    for (size_t i = 0; i < m->n_pieces; i++) {
        all += is_gate(m, i) ? 0 : (double)m->pieces[i].len_bytes;
        gates += is_gate(m, i) ? (double)cost(m, i, 4096) : 0;
    }
    for (double share = 0.1; share < 0.95; share += 0.2) {
        double passed = 0, taken = 0, worst = 0;

        k3_pins_choose(m, 4096, (uint64_t)(share * all + gates), pinned);
        for (size_t i = 0; i < m->n_pieces; i++) {
            if (is_gate(m, i))
                continue;
            passed += (double)m->pieces[i].len_bytes;
            taken += pinned[i] ? (double)m->pieces[i].len_bytes : 0;
            if (taken - share * passed > worst)
                worst = taken - share * passed;
            if (share * passed - taken > worst)
                worst = share * passed - taken;
        }
        assert_true(worst < 3.0 * K3_PIECE_BYTES); /* spec/io.md 6: groups of up to 128 MB are as good as single pieces */
    }
    free(pinned);
}

static void refusals(void **state)
{
    (void)state;
    struct k3_layout l;
    struct k3_err err = K3_ERR_INIT;

    assert_true(k3_layout_build(&l, formula, 4096, 0, NULL, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "ring of 0 bytes must be a multiple of 2 MiB"));
    assert_true(k3_layout_build(&l, formula, 4096, RING + 4096, NULL, &err) < 0);
    assert_non_null(strstr(err.text, "ring of 2101248 bytes must be a multiple of 2 MiB"));
    assert_true(k3_layout_build(&l, formula, 1000, RING, NULL, &err) < 0);
    assert_non_null(strstr(err.text, "page alignment is 1000"));
    assert_int_equal(k3_layout_build(&l, formula, 4096, RING, NULL, &err), 0);
    k3_layout_free(&l);
    k3_layout_free(&l); /* twice is harmless */
    /* a released kv_b head is 256 KiB, a row of the dense down projection 67,584 bytes */
    assert_int_equal(k3_layout_build(&l, released, 4096, RING, NULL, &err), 0);
    k3_layout_free(&l);
}

/* A row block that is more than half the smallest ring: F32 rows of 300,000 columns. */
static void large_rows(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_small();
    struct k3_model_opts mo = { .n_dirs = 1 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *m = NULL;
    struct k3_layout l;
    char dir[64], path[128];
    const char *dirs = path;

    k3_test_dir(dir);
    o.dtype = K3_F32;
    o.sparse = true;
    o.cfg.dense_inter = 300000;
    k3_mk_config_layers(&o.cfg, 1, "none", false, NULL);
    k3_test_make(&o, dir, "m", path);
    mo.dirs = &dirs;
    if (k3_model_open(&m, &mo, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(k3_layout_build(&l, m, 4096, RING, NULL, &err) < 0);
    assert_non_null(strstr(err.text, "less than two row blocks of 1200000 bytes; it must have at least 4194304"));
    assert_int_equal(k3_layout_build(&l, m, 4096, 2 * RING, NULL, &err), 0);
    k3_layout_free(&l);
    k3_model_close(m);
    k3_test_dir_remove(dir);
}

static void digest_covers(void **state)
{
    (void)state;
    struct k3_model *m = formula;
    uint8_t *pinned = calloc(m->n_pieces, 1);
    struct k3_err err = K3_ERR_INIT;
    struct k3_layout base, l;

    assert_int_equal(k3_layout_build(&base, m, 4096, RING, pinned, &err), 0);
    assert_int_equal(k3_layout_build(&l, m, 4096, RING, NULL, &err), 0); /* NULL: nothing is pinned */
    assert_memory_equal(base.digest, l.digest, 32);
    k3_layout_free(&l);
    for (int i = 0; i < 4; i++) {
        const struct k3_model *x = i == 3 ? scattered : m;

        pinned[5] = i == 0;
        assert_int_equal(k3_layout_build(&l, x, i == 1 ? 8192 : 4096, i == 2 ? 2 * RING : RING,
                                         i == 3 ? NULL : pinned, &err), 0);
        assert_memory_not_equal(base.digest, l.digest, 32);
        k3_layout_free(&l);
    }
    k3_layout_free(&base);
    free(pinned);
}

static char dir[64];

static int set_up(void **state)
{
    (void)state;
    struct k3_mk_opts o[3] = { k3_test_formula(), k3_test_formula(), { .dtype = K3_BF16, .sparse = true } };
    struct k3_model **to[] = { &formula, &scattered, &released };
    char path[128];
    const char *dirs = path;

    k3_test_dir(dir);
    o[1].scatter = true;
    k3_mk_config_released(&o[2].cfg);
    o[2].cfg.n_experts = 16; /* few tensors: headers of 8 layers at released widths, holes for weights */
    k3_mk_config_layers(&o[2].cfg, 8, NULL, false, NULL);
    for (int i = 0; i < 3; i++) {
        struct k3_model_opts mo = { .dirs = &dirs, .n_dirs = 1 };
        struct k3_err err = K3_ERR_INIT;

        k3_test_make(&o[i], dir, (char[]){ 'a', (char)('a' + i), 0 }, path);
        if (k3_model_open(to[i], &mo, &err) < 0) {
            fprintf(stderr, "%s\n", err.text);
            return -1;
        }
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    k3_model_close(formula);
    k3_model_close(scattered);
    k3_model_close(released);
    k3_test_dir_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(positions),     cmocka_unit_test(overhead), cmocka_unit_test(budgets),
        cmocka_unit_test(spread_evenly), cmocka_unit_test(refusals), cmocka_unit_test(large_rows),
        cmocka_unit_test(digest_covers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
