/* k3-router/bpe.c: the two forms of the merge against the definition, and its time on long pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdbool.h>
#include <time.h>

#include "k3-router/bpe.h"
#include "tests/unit/vocab.h"

/* The rank table of a tokenizer, rebuilt from its tokens. */
static struct k3_ranks ranks_of(const struct k3_tokenizer *t)
{
    struct k3_ranks r = { .n = k3_tokenizer_base(t) };
    uint32_t a, b;

    r.off = calloc((size_t)r.n + 1, sizeof(*r.off));
    for (uint32_t id = 0; id < r.n; id++) {
        size_t len = 0;
        k3_tokenizer_bytes(t, id, &len);
        r.off[id + 1] = r.off[id] + (uint32_t)len;
    }
    r.bytes = malloc(r.off[r.n]);
    for (uint32_t id = 0; id < r.n; id++) {
        size_t len = 0;
        const char *bytes = k3_tokenizer_bytes(t, id, &len);
        memcpy(r.bytes + r.off[id], bytes, len);
    }
    assert_int_equal(k3_ranks_build(&r, &a, &b), 0);
    return r;
}

/* spec/text.md 1.5, word by word. */
static void merge_by_definition(const struct k3_ranks *r, const char *piece, size_t len, struct k3_ids *out)
{
    size_t start[512], n = len;

    for (size_t i = 0; i <= len; i++)
        start[i] = i;
    for (;;) {
        uint32_t best = K3_NO_RANK;
        size_t at = 0;
        for (size_t i = 0; i + 2 <= n; i++) {
            uint32_t rank = k3_ranks_find(r, piece + start[i], start[i + 2] - start[i]);
            if (rank < best) {
                best = rank;
                at = i;
            }
        }
        if (best == K3_NO_RANK)
            break;
        for (size_t i = at + 1; i < n; i++)
            start[i] = start[i + 1];
        n--;
    }
    for (size_t i = 0; i < n; i++)
        k3_ids_push(out, k3_ranks_find(r, piece + start[i], start[i + 1] - start[i]));
}

static void compare(const struct k3_ranks *r, const char *const *unit, size_t n_units, int rounds)
{
    struct k3_ids flat = { 0 }, heap = { 0 }, want = { 0 };
    struct k3_buf b = { 0 };
    uint64_t seed = 11;

    for (int i = 0; i < rounds; i++) {
        uint32_t n = 1 + vocab_random(&seed) % 60;
        b.len_bytes = flat.n = heap.n = want.n = 0;
        for (uint32_t k = 0; k < n; k++) {
            const char *u = unit[vocab_random(&seed) % n_units];
            char byte = (char)vocab_random(&seed);
            if (u)
                k3_buf_puts(&b, u);
            else
                k3_buf_append(&b, &byte, 1);
        }
        assert_int_equal(k3_bpe_merge(r, b.bytes, b.len_bytes, 0, &flat), 0);
        assert_int_equal(k3_bpe_merge(r, b.bytes, b.len_bytes, 1, &heap), 0);
        merge_by_definition(r, b.bytes, b.len_bytes, &want);
        assert_ids(&flat, &want, "flat");
        assert_ids(&heap, &want, "heap");
    }
    k3_ids_free(&flat);
    k3_ids_free(&heap);
    k3_ids_free(&want);
    k3_buf_free(&b);
}

static void test_against_definition(void **state)
{
    static const char *const tiny[] = { "a", "b", "c", "h", "e", "l", "o", " ", "hell", "世" };
    static const char *const words[] = { " the", "capital", "ing", "s", "k3", "T", "e", "r", "on", NULL, "é", "!!", "  " };
    struct k3_buf b = { 0 };
    struct k3_tokenizer *t;
    struct k3_ranks r;

    (void)state;
    vocab_tiny(&b);
    t = vocab_parse(b.bytes, b.len_bytes, NULL);
    r = ranks_of(t);
    compare(&r, tiny, 10, 3000);
    k3_ranks_free(&r);
    k3_tokenizer_close(t);
    k3_buf_free(&b);
    t = vocab_demo();
    r = ranks_of(t);
    compare(&r, words, 13, 3000);
    k3_ranks_free(&r);
    k3_tokenizer_close(t);
}

/* 100,000 bytes is the longest piece there is (25,000 code points of four bytes); a quadratic merge takes minutes. */
static void test_long_pieces(void **state)
{
    static const char *const unit[] = { "a", "ab", "hello", "aab", "\xf0", "the capital of " };
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ranks r = ranks_of(t);
    struct k3_ids out = { 0 };
    struct k3_buf b = { 0 };

    (void)state;
    for (size_t u = 0; u < 6; u++) {
        struct timespec t0, t1;
        size_t total = 0;
        b.len_bytes = out.n = 0;
        while (b.len_bytes < 100000)
            k3_buf_puts(&b, unit[u]);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t0);
        assert_int_equal(k3_bpe_encode(&r, b.bytes, b.len_bytes, &out), 0);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t1);
        for (size_t i = 0; i < out.n; i++)
            total += r.off[out.id[i] + 1] - r.off[out.id[i]];
        assert_int_equal(total, b.len_bytes);
        if (t1.tv_sec - t0.tv_sec > 3)
            fail_msg("%s: over 3 s", unit[u]);
    }
    k3_ids_free(&out);
    k3_buf_free(&b);
    k3_ranks_free(&r);
    k3_tokenizer_close(t);
}

static void test_table(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ranks r = ranks_of(t);

    (void)state;
    for (uint32_t id = 0; id < r.n; id++)
        assert_int_equal(k3_ranks_find(&r, r.bytes + r.off[id], r.off[id + 1] - r.off[id]), id);
    assert_int_equal(k3_ranks_find(&r, "", 0), K3_NO_RANK);
    assert_int_equal(k3_ranks_find(&r, "\xff\xfe", 2), K3_NO_RANK);
    k3_ranks_free(&r);
    k3_tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_definition), cmocka_unit_test(test_long_pieces), cmocka_unit_test(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
