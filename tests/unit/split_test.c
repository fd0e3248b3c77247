/* k3-router/split.c: pieces (spec/text.md 2.3), chunks (1.6), and that no long run fails or takes long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <time.h>

#include "tests/unit/vocab.h"

static struct k3_split *split;

static int put_piece(void *arg, const char *piece, size_t len_bytes)
{
    struct k3_buf *b = arg;

    if (b->len_bytes)
        k3_buf_puts(b, "|");
    return k3_buf_append(b, piece, len_bytes);
}

static void pieces(const char *text, size_t len, struct k3_buf *out)
{
    struct k3_err err = K3_ERR_INIT;

    out->len_bytes = 0;
    if (k3_split_pieces(split, text, len, put_piece, out, &err) < 0)
        fail_msg("%s", err.text);
}

static void test_published_pieces(void **state)
{
    FILE *f = fopen("tests/data/text_pieces.jsonl", "r");
    struct k3_buf text = { 0 }, one = { 0 }, want = { 0 }, got = { 0 };
    char *line = NULL;
    size_t cap = 0, n = 0;

    (void)state;
    assert_non_null(f);
    while (getline(&line, &cap, f) > 0) {
        const char *p = jsonl_value(line, "pieces") + 1;
        jsonl_string(jsonl_value(line, "t"), &text);
        want.len_bytes = 0;
        while (*p == '"') {
            p = jsonl_string(p, &one);
            put_piece(&want, one.bytes, one.len_bytes);
            p += *p == ',';
        }
        pieces(text.bytes, text.len_bytes, &got);
        assert_int_equal(got.len_bytes, want.len_bytes);
        assert_memory_equal(got.bytes, want.bytes, got.len_bytes);
        n++;
    }
    assert_int_equal(n, 56);
    fclose(f);
    free(line);
    k3_buf_free(&text);
    k3_buf_free(&one);
    k3_buf_free(&want);
    k3_buf_free(&got);
}

static void is(const char *text, const char *want)
{
    struct k3_buf got = { 0 };

    pieces(text, strlen(text), &got);
    if (got.len_bytes != strlen(want) || memcmp(got.bytes, want, got.len_bytes) != 0)
        fail_msg("\"%s\": %.*s where %s is right", text, (int)got.len_bytes, got.bytes, want);
    k3_buf_free(&got);
}

static void test_rules(void **state)
{
    (void)state;
    is("a   b", "a|  | b");
    is(" 7", " |7");
    is("\tx", "\tx");
    is("\t!", "\t|!");
    is("中、文", "中|、|文"); /* Script, not Script_Extensions */
    is("ab\u180e c", "ab|\u180e| c"); /* U+180E is no white space */
    is("x\u3000y", "x|\u3000y");
    is("I'LLx", "I'LL|x");
    is("it'\u017f", "it'\u017f");
}

struct count { size_t n, bytes; };
static int count_piece(void *arg, const char *piece, size_t len_bytes)
{
    struct count *c = arg;

    (void)piece;
    c->n++;
    c->bytes += len_bytes;
    return 0;
}

/* The longest runs that the chunking lets through, of every class and of classes that make an alternative walk back:
 * they tile the text, and each takes a fraction of a second. */
static void test_long_runs(void **state)
{
    static const char *const unit[] = { "a", "A", "Aa", "aA", "é", "ह", "中", "\u0301", "!", "🙂", "\n", " ", "\t", "\r\n",
                                        " \n", "7", "٣", "'s", "ʰ", "ǅ", " a", "a ", "\u00a0", "! ", "!\n", "〇",
                                        "a\u0301", "A中", "\x1c", "\x01" };
    struct k3_buf b = { 0 };

    (void)state;
    for (size_t u = 0; u < sizeof(unit) / sizeof(unit[0]); u++)
        for (size_t v = 0; v < sizeof(unit) / sizeof(unit[0]); v++) {
            struct count c = { 0, 0 };
            struct k3_err err = K3_ERR_INIT;
            struct timespec t0, t1;
            size_t times = u == v ? 25000 : 12500;
            b.len_bytes = 0;
            for (size_t i = 0; i < times; i++)
                k3_buf_puts(&b, unit[u]);
            for (size_t i = 0; i < times; i++)
                k3_buf_puts(&b, unit[v]);
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t0);
            if (k3_split_pieces(split, b.bytes, b.len_bytes, count_piece, &c, &err) < 0)
                fail_msg("%s x %s: %s", unit[u], unit[v], err.text);
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t1);
            assert_int_equal(c.bytes, b.len_bytes);
            if (t1.tv_sec - t0.tv_sec > 5)
                fail_msg("%s x %s: over 5 s", unit[u], unit[v]);
        }
    k3_buf_free(&b);
}

static size_t chunk_lens(const char *text, size_t len, size_t *out, size_t max)
{
    size_t n = 0, left = 0;

    while (len) {
        size_t k = k3_split_chunk(text, len, &left);
        assert_true(k > 0 && k <= len && n < max);
        out[n++] = k;
        text += k;
        len -= k;
    }
    return n;
}

static void test_chunks(void **state)
{
    struct k3_buf b = { 0 };
    size_t len[64], n;

    (void)state;
    assert_int_equal(chunk_lens("", 0, len, 64), 0);
    assert_int_equal(chunk_lens("ab c", 4, len, 64), 1);
    for (size_t i = 0; i < 25000; i++)
        k3_buf_puts(&b, "a");
    assert_int_equal(chunk_lens(b.bytes, b.len_bytes, len, 64), 1);
    k3_buf_puts(&b, " "); /* another class begins: no cut */
    assert_int_equal(chunk_lens(b.bytes, b.len_bytes, len, 64), 1);
    b.len_bytes -= 1;
    k3_buf_puts(&b, "ab ");
    n = chunk_lens(b.bytes, b.len_bytes, len, 64);
    assert_int_equal(n, 2);
    assert_int_equal(len[0], 25000);
    /* The cut keeps all since the last cut together, not only the run; U+001C counts as space here. */
    b.len_bytes = 0;
    k3_buf_puts(&b, "é \x1c");
    for (size_t i = 0; i < 25001; i++)
        k3_buf_puts(&b, "é");
    n = chunk_lens(b.bytes, b.len_bytes, len, 64);
    assert_int_equal(n, 2);
    assert_int_equal(len[0], 4 + 50000);
    b.len_bytes = 0;
    for (size_t i = 0; i < 12501; i++)
        k3_buf_puts(&b, " \x1c");
    n = chunk_lens(b.bytes, b.len_bytes, len, 64);
    assert_int_equal(n, 2);
    assert_int_equal(len[0], 25000);
    /* Slices of 400,000 code points. */
    b.len_bytes = 0;
    for (size_t i = 0; i < 250000; i++)
        k3_buf_puts(&b, "世 ");
    n = chunk_lens(b.bytes, b.len_bytes, len, 64);
    assert_int_equal(n, 2);
    assert_int_equal(len[0], 200000 * 4);
    k3_buf_free(&b);
}

static int setup(void **state)
{
    (void)state;
    return k3_split_open(&split, NULL);
}

static int teardown(void **state)
{
    (void)state;
    k3_split_close(split);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_pieces), cmocka_unit_test(test_rules), cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_chunks),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
