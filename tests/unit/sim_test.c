#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim.h"

/* ---- traces made by hand ---- */

struct bytes { uint8_t b[65536]; size_t n; };

static void put(struct bytes *o, const void *from, size_t n)
{
    assert_true(o->n + n <= sizeof(o->b));
    memcpy(o->b + o->n, from, n);
    o->n += n;
}

static void put_record(struct bytes *o, uint32_t kind, uint32_t n)
{
    const struct k3_trace_record r = { kind, n };

    put(o, &r, sizeof(r));
}

/* Layers 1 and 2 of three, 10 experts, top 2, look-ahead 3. */
static void put_head(struct bytes *o)
{
    const struct k3_trace_head h = { .magic = K3_TRACE_MAGIC, .version = K3_TRACE_VERSION, .head_bytes = sizeof(h),
                                     .n_layers = 3, .first_moe = 1, .n_experts = 10, .top_k = 2, .look_k = 3,
                                     .expert_bytes = 1000, .trunk_bytes = 5000 };

    o->n = 0;
    put(o, &h, sizeof(h));
}

static void put_pass(struct bytes *o, uint64_t number, uint32_t n_rows, uint32_t sequence, uint32_t position)
{
    put_record(o, K3_TRACE_PASS, n_rows);
    put(o, &number, 8);
    for (uint32_t i = 0; i < n_rows; i++) {
        const uint32_t row[2] = { sequence, position + i };

        put(o, row, 8);
    }
}

static void put_ids(struct bytes *o, uint32_t kind, uint32_t layer, size_t n, const uint16_t *ids)
{
    put_record(o, kind, layer);
    put(o, ids, n * 2);
}
#define IDS(...) sizeof((uint16_t[]){ __VA_ARGS__ }) / 2, (const uint16_t[]){ __VA_ARGS__ }

static void put_two_passes(struct bytes *o)
{
    put_head(o);
    put_pass(o, 7, 2, 5, 0);
    put_ids(o, K3_TRACE_ROUTES, 1, IDS(1, 2, 2, 3));
    put_ids(o, K3_TRACE_LOOK, 2, IDS(9, 8, 7, 6, 5, 4));
    put_ids(o, K3_TRACE_ROUTES, 2, IDS(8, 9, 0, 9));
    put_record(o, K3_TRACE_END, K3_TRACE_DONE);
    put_pass(o, 8, 1, 5, 1);
    put_ids(o, K3_TRACE_ROUTES, 1, IDS(2, 4));
    put_record(o, K3_TRACE_END, K3_TRACE_CUT);
}

static void reads_what_was_written(void **state)
{
    static struct bytes o;
    struct k3_err err = K3_ERR_INIT;
    struct k3_trace t;
    struct k3_demands d;
    const uint32_t keys[] = { 11, 12, 13, 20, 28, 29, 12, 14 };

    (void)state;
    put_two_passes(&o);
    assert_int_equal(k3_trace_parse(&t, o.b, o.n, "t", &err), 0);
    assert_int_equal(t.n_passes, 2);
    assert_int_equal(t.n_rows, 3);
    assert_int_equal(t.n_layers, 3);
    assert_int_equal(t.cut_bytes, 0);
    assert_int_equal(t.pass[1].number, 8);
    assert_int_equal(t.pass[1].end, K3_TRACE_CUT);
    assert_int_equal(t.row[1].position, 1);
    assert_int_equal(t.row[1].sequence, 5);
    assert_int_equal(t.layer[0].look, K3_NO_LOOK);
    assert_int_equal(t.ids[t.layer[1].look + 5], 4);
    assert_int_equal(t.ids[t.layer[1].ids + 3], 9);
    assert_int_equal(k3_demands_build(&d, &t, &err), 0);
    assert_int_equal(d.n, 8);
    assert_memory_equal(d.key, keys, sizeof(keys));
    assert_int_equal(d.n_distinct, 7);
    assert_int_equal(d.half, 6);
    assert_int_equal(d.n_rows, 3);
    k3_demands_free(&d);
    /* (5, 1) was in the first pass already. */
    assert_int_equal(k3_trace_once(&t, &err), 0);
    assert_int_equal(k3_demands_build(&d, &t, &err), 0);
    assert_int_equal(d.n, 6);
    assert_int_equal(d.n_passes, 1);
    assert_int_equal(d.n_rows, 2);
    k3_demands_free(&d);
    k3_trace_free(&t);
}

/* Wherever the file ends: what is whole is there, the rest is counted, nothing else happens. */
static void cut_anywhere(void **state)
{
    static struct bytes o;
    struct k3_err err = K3_ERR_INIT;
    struct k3_trace t;
    size_t first_end;

    (void)state;
    put_two_passes(&o);
    first_end = o.n - 8 - 8 - 4 - 8 - 16;
    for (size_t n = 0; n < o.n; n++) {
        uint8_t *copy = malloc(n + 1); /* so that a read past the end shows */
        int rc;

        memcpy(copy, o.b, n);
        rc = k3_trace_parse(&t, copy, n, "t", &err);
        free(copy);
        if (n < sizeof(struct k3_trace_head)) {
            assert_int_equal(rc, -EINVAL);
            assert_int_equal(err.exit_status, 2);
            continue;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(t.n_passes, n >= first_end);
        assert_int_equal(t.n_rows, n >= first_end ? 2 : 0);
        assert_int_equal(t.cut_bytes, n - (n >= first_end ? first_end : sizeof(struct k3_trace_head)));
        k3_trace_free(&t);
    }
}

static void refused(const struct bytes *o, const char *words)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_trace t;

    assert_int_equal(k3_trace_parse(&t, o->b, o->n, "t", &err), -EINVAL);
    assert_int_equal(err.exit_status, 2);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" has no \"%s\"", err.text, words);
}

static void damaged(void **state)
{
    static struct bytes o;
    struct k3_trace_head *h = (void *)o.b;

    (void)state;
    put_two_passes(&o);
    o.b[0] = 'K';
    refused(&o, "--raw");
    put_two_passes(&o);
    h->version = 2;
    refused(&o, "version 2");
    put_two_passes(&o);
    h->top_k = 11;
    refused(&o, "top 11");
    put_two_passes(&o);
    h->n_experts = 9;
    refused(&o, "no such expert: 9");
    put_head(&o);
    put_ids(&o, K3_TRACE_ROUTES, 1, IDS(1, 2));
    refused(&o, "outside of a pass");
    put_head(&o);
    put_pass(&o, 1, 1, 1, 0);
    put_pass(&o, 2, 1, 1, 1);
    refused(&o, "inside pass 1");
    put_head(&o);
    put_pass(&o, 1, 1, 1, 0);
    put_ids(&o, K3_TRACE_ROUTES, 1, IDS(2, 2));
    refused(&o, "do not ascend");
    put_head(&o);
    put_pass(&o, 1, 1, 1, 0);
    put_ids(&o, K3_TRACE_ROUTES, 2, IDS(1, 2));
    put_ids(&o, K3_TRACE_ROUTES, 1, IDS(1, 2));
    refused(&o, "layer out of order");
    put_head(&o);
    put_pass(&o, 1, 1, 1, 0);
    put_ids(&o, K3_TRACE_ROUTES, 3, IDS(1, 2));
    refused(&o, "layer out of order or range: 3");
    put_head(&o);
    put_record(&o, K3_TRACE_PASS, 0);
    refused(&o, "rows of a pass: 0");
    put_head(&o);
    put_record(&o, K3_TRACE_PASS, UINT32_MAX);
    refused(&o, "rows of a pass");
    put_head(&o);
    put_record(&o, 99, 0);
    refused(&o, "no such kind of record: 99");
}

/* ---- pairs ---- */

static void raw_pairs(void **state)
{
    /* Two passes over layers 1 and 2, of one and of two rows, top 2. */
    int32_t p[] = { 1, 5, 1, 3, 2, 0, 2, 1, 1, 5, 1, 3, 1, 4, 1, 3, 2, 0, 2, 1, 2, 1, 2, 2 };
    const uint32_t keys[] = { 13, 15, 20, 21, 13, 14, 21, 22 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_trace t;
    struct k3_demands d;

    (void)state;
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p), "p", 10, 2, 1000, &err), 0);
    assert_int_equal(t.n_passes, 2);
    assert_int_equal(t.n_rows, 3);
    assert_int_equal(t.head.first_moe, 1);
    assert_int_equal(t.head.n_layers, 3);
    assert_int_equal(k3_trace_once(&t, &err), 0); /* of the second pass only position 1 is new */
    assert_int_equal(k3_demands_build(&d, &t, &err), 0);
    assert_int_equal(d.n, 8);
    assert_memory_equal(d.key, keys, sizeof(keys));
    k3_demands_free(&d);
    k3_trace_free(&t);
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p) - 1, "p", 10, 2, 1000, &err), -EINVAL);
    assert_int_equal(k3_trace_parse_raw(&t, p, 0, "p", 10, 2, 1000, &err), -EINVAL);
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p), "p", 5, 2, 1000, &err), -EINVAL);
    assert_non_null(strstr(err.text, "pair 0 is (1, 5)"));
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p), "p", 10, 3, 1000, &err), -EINVAL);
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p) - 16, "p", 10, 2, 1000, &err), -EINVAL); /* a row lacks a layer */
    p[0] = -1;
    assert_int_equal(k3_trace_parse_raw(&t, p, sizeof(p), "p", 10, 2, 1000, &err), -EINVAL);
}

/* ---- replay ---- */

/* n demands in groups of at most g, keys ascending in a group. */
static void random_demands(struct k3_demands *d, uint32_t n, uint32_t n_keys, uint32_t g)
{
    *d = (struct k3_demands){ .n_keys = n_keys, .top_k = 1 };
    d->key = malloc(n * sizeof(*d->key));
    d->group = malloc(n * sizeof(*d->group));
    while (d->n < n) {
        uint32_t left = 1 + (uint32_t)rand() % g;

        for (uint32_t k = 0; k < n_keys && left && d->n < n; k++)
            if ((uint32_t)rand() % n_keys < 2) {
                d->key[d->n++] = k;
                left--;
            }
        if (d->n > (d->n_groups ? d->group[d->n_groups - 1].end : 0))
            d->group[d->n_groups++] = (struct k3_demand_group){ .end = d->n };
    }
    d->half = n / 2;
}

/* The most hits of any choice of victims, by trying all of them.  cached: bits of keys. */
static uint32_t brute(const struct k3_demands *d, size_t at, uint32_t cached, uint32_t n_slots)
{
    uint32_t bit, best = 0;

    if (at == d->n)
        return 0;
    bit = 1u << d->key[at];
    if (cached & bit)
        return 1 + brute(d, at + 1, cached, n_slots);
    if ((uint32_t)__builtin_popcount(cached) < n_slots)
        return brute(d, at + 1, cached | bit, n_slots);
    for (uint32_t k = 0; k < d->n_keys; k++)
        if (cached >> k & 1) {
            uint32_t h = brute(d, at + 1, (cached & ~(1u << k)) | bit, n_slots);

            best = h > best ? h : best;
        }
    return best;
}

static void belady_is_the_best(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    uint32_t gained = 0;

    (void)state;
    srand(3);
    for (int i = 0; i < 400; i++) {
        uint32_t n_slots = 1 + (uint32_t)rand() % 4;
        struct k3_demands d;
        uint64_t hits, lru;

        random_demands(&d, 14, 6, 3);
        assert_int_equal(k3_sim_belady(&d, n_slots, 0, &hits, &err), 0);
        assert_int_equal(hits, brute(&d, 0, 0, n_slots));
        assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, n_slots, 0, &lru, &err), 0);
        gained += hits > lru;
        k3_demands_free(&d);
    }
    assert_true(gained > 100);
}

static void nobody_beats_belady(void **state)
{
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    srand(5);
    for (int i = 0; i < 60; i++) {
        struct k3_demands d;
        uint64_t lru, lfru, pinned, belady, whole = 0;
        uint8_t seen[100] = { 0 };

        random_demands(&d, 3000, 100, 8);
        for (size_t n = 0; n < d.n; n++) {
            whole += seen[d.key[n]];
            seen[d.key[n]] = 1;
        }
        for (uint32_t n_slots = 1; n_slots <= 128; n_slots *= 2) {
            assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, n_slots, 0, &lru, &err), 0);
            assert_int_equal(k3_sim_policy(&d, &k3_policy_lfru, 0, n_slots, 0, &lfru, &err), 0);
            assert_int_equal(k3_sim_pinned(&d, n_slots, d.n, 0, &pinned, &err), 0);
            assert_int_equal(k3_sim_belady(&d, n_slots, 0, &belady, &err), 0);
            assert_true(lru <= belady && lfru <= belady && pinned <= belady);
            if (n_slots == 128) {
                assert_int_equal(lru, whole);
                assert_int_equal(lfru, whole);
                assert_int_equal(pinned, whole);
                assert_int_equal(belady, whole);
            }
        }
        k3_demands_free(&d);
    }
}

/* Against a list in order of use; groups of one, so that nothing is lent when a victim is sought. */
static void lru_is_lru(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_demands d;
    enum { SLOTS = 9 };
    uint32_t list[SLOTS], n = 0;
    uint64_t want = 0, late = 0, hits;

    (void)state;
    srand(9);
    random_demands(&d, 2000, 30, 1);
    for (size_t i = 0; i < d.n; i++) {
        uint32_t k = 0;

        while (k < n && list[k] != d.key[i])
            k++;
        want += k < n;
        late += k < n && i >= 1000;
        if (k == n)
            k = n < SLOTS ? n++ : n - 1;
        memmove(list + 1, list, k * sizeof(*list));
        list[0] = d.key[i];
    }
    assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, SLOTS, 0, &hits, &err), 0);
    assert_int_equal(hits, want);
    assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, SLOTS, 1000, &hits, &err), 0);
    assert_int_equal(hits, late);
    k3_demands_free(&d);
}

/* What the layer at work was given is no victim, as in the daemon: the next layer's expert must go. */
static void lent_slots_stay(void **state)
{
    uint32_t key[] = { 1, 2, 11, 12, 1, 2, 11, 12, 13 };
    struct k3_demand_group group[] = { { .end = 2 }, { .end = 4 }, { .end = 6 }, { .end = 9 } };
    struct k3_demands d = { .key = key, .group = group, .n = 9, .n_groups = 4, .n_keys = 20, .top_k = 2 };
    struct k3_err err = K3_ERR_INIT;
    uint64_t hits;

    (void)state;
    assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, 4, 0, &hits, &err), 0);
    assert_int_equal(hits, 4);
    assert_int_equal(k3_sim_policy(&d, k3_policy_find("lru"), 0, 1, 0, &hits, &err), 0); /* released early: no deadlock */
    assert_int_equal(hits, 0);
}

static void pinned_by_hand(void **state)
{
    uint32_t key[] = { 1, 2, 1, 3, 1, 2, 4, 4, 4, 4 };
    struct k3_demand_group group[] = { { .end = 10 } };
    struct k3_demands d = { .key = key, .group = group, .n = 10, .n_groups = 1, .n_keys = 5, .top_k = 1, .half = 6 };
    struct k3_err err = K3_ERR_INIT;
    uint64_t hits;

    (void)state;
    assert_int_equal(k3_sim_pinned(&d, 2, 10, 0, &hits, &err), 0); /* one is pinned: 4 */
    assert_int_equal(hits, 3);
    assert_int_equal(k3_sim_pinned(&d, 3, 10, 0, &hits, &err), 0); /* 4 and 1 */
    assert_int_equal(hits, 5);
    assert_int_equal(k3_sim_pinned(&d, 3, 6, 6, &hits, &err), 0); /* by the first half: 1 and 2 */
    assert_int_equal(hits, 0);
    assert_int_equal(k3_sim_pinned(&d, 1, 10, 0, &hits, &err), 0);
    assert_int_equal(hits, 0);
}

/* ---- look-ahead ---- */

static bool near(double a, double b)
{
    return a > b * 0.999 && a < b * 1.001;
}

static void recall_by_hand(void **state)
{
    static struct bytes o;
    struct k3_err err = K3_ERR_INIT;
    struct k3_recall r;
    struct k3_trace t;

    (void)state;
    put_two_passes(&o); /* seen ahead: 9 8 7 and 6 5 4; came: 8 9 and 0 9; the second pass has none */
    assert_int_equal(k3_trace_parse(&t, o.b, o.n, "t", &err), 0);
    k3_sim_recall(&t, 3, &r);
    assert_int_equal(r.routed, 4);
    assert_int_equal(r.guessed, 6);
    assert_int_equal(r.came, 2);
    k3_sim_recall(&t, 1, &r);
    assert_int_equal(r.came, 1);
    k3_trace_free(&t);
}

/* One layer with experts after one without, one expert a pass, always another one; guesses right or wrong. */
static void make_split(struct k3_trace *t, uint32_t n_passes, bool right)
{
    static struct bytes o;
    struct k3_err err = K3_ERR_INIT;
    const struct k3_trace_head h = { .magic = K3_TRACE_MAGIC, .version = K3_TRACE_VERSION, .head_bytes = sizeof(h),
                                     .n_layers = 2, .first_moe = 1, .n_experts = 1000, .top_k = 1, .look_k = 1,
                                     .expert_bytes = 1000000, .trunk_bytes = 32000000 };

    o.n = 0;
    put(&o, &h, sizeof(h));
    for (uint32_t i = 0; i < n_passes; i++) {
        put_pass(&o, i, 1, 1, i);
        put_ids(&o, K3_TRACE_LOOK, 1, IDS((uint16_t)(right ? i : 999 - i)));
        put_ids(&o, K3_TRACE_ROUTES, 1, IDS((uint16_t)i));
        put_record(&o, K3_TRACE_END, K3_TRACE_DONE);
    }
    if (k3_trace_parse(t, o.b, o.n, "t", &err) < 0)
        fail_msg("%s", err.text);
}

static void split_devices(void **state)
{
    struct k3_split o = { .n_slots = 4, .slot_bytes = 1000000, .ring_bytes = 1000, .trunk_rate = 1e9, .expert_rate = 1e9,
                          .compute_rate = 1e15 };
    struct k3_split_result r, ahead, wrong;
    struct k3_err err = K3_ERR_INIT;
    struct k3_trace t;

    (void)state;
    make_split(&t, 100, true);
    /* No ring to speak of: 32 ms of trunk and 1 ms of expert, of which the layer's rest (5 of 16 parts of 16 ms) hides all. */
    assert_int_equal(k3_sim_split(&t, &o, &r, &err), 0);
    assert_int_equal(r.passes, 100);
    assert_int_equal(r.demands, 100);
    assert_int_equal(r.reads, 100);
    assert_true(near(r.seconds, 3.2));
    /* An expert of 20 ms: 5 are hidden, 15 are waited for, in which the ring of one part takes 1 ms.  Seen ahead, 11
     * more are hidden. */
    o.expert_rate = 5e7;
    assert_int_equal(k3_sim_split(&t, &o, &r, &err), 0);
    assert_true(near(r.seconds, 100 * (0.031 + 0.015)));
    o.k = 1;
    assert_int_equal(k3_sim_split(&t, &o, &ahead, &err), 0);
    assert_int_equal(ahead.reads, 100);
    assert_int_equal(ahead.useless, 0);
    assert_true(near(ahead.seconds, 100 * (0.031 + 0.004)));
    /* A ring for all of it: then the trunk is read meanwhile, and only one of both counts. */
    o.k = 0;
    o.ring_bytes = 64000000;
    assert_int_equal(k3_sim_split(&t, &o, &r, &err), 0);
    assert_true(r.seconds < 100 * 0.0325 + 0.05);
    k3_trace_free(&t);
    /* Wrong guesses are read for nothing, and the demand waits for them. */
    make_split(&t, 100, false);
    o.ring_bytes = 1000;
    o.k = 1;
    assert_int_equal(k3_sim_split(&t, &o, &wrong, &err), 0);
    assert_int_equal(wrong.reads, 200);
    assert_int_equal(wrong.useless, 100);
    assert_true(wrong.seconds > 100 * (0.032 + 0.015));
    k3_trace_free(&t);
}

/* ---- plot ---- */

static void plot_says_what_it_shows(void **state)
{
    const char *names[] = { "lru", "<b&d>" };
    const double x[] = { 0.5, 1, 40 }, y[] = { 0, 10, 80, 5, 20, 100 };
    struct k3_plot p = { "A title", "GB", "hits, %", names, x, y, 2, 3 };
    char *text = NULL;
    size_t len = 0, opened = 0, closed = 0;
    FILE *f = open_memstream(&text, &len);

    (void)state;
    k3_plot_write(f, &p);
    fclose(f);
    assert_int_equal(strncmp(text, "<svg ", 5), 0);
    assert_non_null(strstr(text, ">A title</text>"));
    assert_non_null(strstr(text, ">GB</text>"));
    assert_non_null(strstr(text, ">hits, %</text>"));
    assert_non_null(strstr(text, ">&lt;b&amp;d&gt;</text>"));
    assert_non_null(strstr(text, ">10</text>"));
    for (const char *at = text; (at = strstr(at, "<polyline")); at++)
        opened++;
    for (const char *at = text; (at = strstr(at, "<circle")); at++)
        closed++;
    assert_int_equal(opened, 2);
    assert_int_equal(closed, 6);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    free(text);
    p.n_x = 1; /* one size is a point */
    f = open_memstream(&text, &len);
    k3_plot_write(f, &p);
    fclose(f);
    assert_null(strstr(text, "nan"));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_was_written), cmocka_unit_test(cut_anywhere),   cmocka_unit_test(damaged),
        cmocka_unit_test(raw_pairs),              cmocka_unit_test(lru_is_lru),     cmocka_unit_test(belady_is_the_best),
        cmocka_unit_test(nobody_beats_belady),    cmocka_unit_test(lent_slots_stay), cmocka_unit_test(pinned_by_hand),
        cmocka_unit_test(recall_by_hand),         cmocka_unit_test(split_devices),
        cmocka_unit_test(plot_says_what_it_shows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
