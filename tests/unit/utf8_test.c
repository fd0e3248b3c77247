/* text/utf8.c: whole characters from token bytes (spec/text.md 1.8). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "text/utf8.h"
#include "tests/unit/vocab.h"

#define R "\xef\xbf\xbd" /* U+FFFD */

static void is(const struct k3_buf *b, const char *want, const char *what)
{
    if (b->len_bytes != strlen(want) || memcmp(b->bytes ? b->bytes : "", want, b->len_bytes) != 0)
        fail_msg("%s: \"%.*s\" where \"%s\" is right", what, (int)b->len_bytes, b->bytes ? b->bytes : "", want);
}

/* Feeds the bytes of ids one id at a time; step[i] is what comes out after id i. */
static void steps(const struct k3_tokenizer *t, const uint32_t *id, const char *const *step, size_t n)
{
    struct k3_utf8_stream s = { { 0 }, 0, 0, 0, 0 };
    struct k3_buf out = { 0 };

    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        const char *bytes = k3_tokenizer_bytes(t, id[i], &len);
        out.len_bytes = 0;
        assert_int_equal(k3_utf8_feed(&s, bytes, len, &out), 0);
        is(&out, step[i], "step");
    }
    out.len_bytes = 0;
    k3_utf8_flush(&s, &out);
    is(&out, "", "flush");
    k3_buf_free(&out);
}

static void test_published_steps(void **state)
{
    struct k3_tokenizer *t = vocab_released();

    (void)state;
    if (!t)
        skip();
    steps(t, (const uint32_t[]){ 130732, 233, 92949, 121 }, (const char *const[]){ " ", "👋", "", "\U0001F3FD" }, 4);
    steps(t, (const uint32_t[]){ 5885, 46813 }, (const char *const[]){ "", "🙂" }, 2);
    steps(t, (const uint32_t[]){ 64390, 102, 67963, 66122, 119 },
          (const char *const[]){ "", "\U0001F469", "\u200d", "", "\U0001F4BB" }, 5);
    k3_tokenizer_close(t);
}

/* Byte by byte, and all at once. */
static void both(const char *in, size_t len, const char *want)
{
    struct k3_buf a = { 0 }, b = { 0 };
    struct k3_utf8_stream s = { { 0 }, 0, 0, 0, 0 };

    k3_utf8_feed(&s, in, len, &a);
    k3_utf8_flush(&s, &a);
    for (size_t i = 0; i < len; i++)
        k3_utf8_feed(&s, in + i, 1, &b);
    k3_utf8_flush(&s, &b);
    is(&a, want, "at once");
    is(&b, want, "byte by byte");
    k3_buf_free(&a);
    k3_buf_free(&b);
}

/* One U+FFFD for each maximal ill-formed subsequence; the rows are from the Unicode standard, table 3-8 and its like. */
static void test_ill_formed(void **state)
{
    (void)state;
    both("a\xf1\x80\x80\xe1\x80\xc2" "b\x80" "c\x80\xbf" "d", 13, "a" R R R "b" R "c" R R "d");
    both("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82" "A", 9, R R R R R R R R "A");
    both("\xed\xa0\x80\xed\xbf\xbf\xed\xaf" "A", 9, R R R R R R R R "A");
    both("\xf4\x91\x92\x93\xff" "A\x80\xbf" "B", 9, R R R R R "A" R R "B");
    both("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf" "A", 9, R R R R "A");
    both("\xe2\x82", 2, R);
    both("\xf0\x9f\x99", 3, R);
    both("x\xe2\x82\xe2\x82\xac", 6, "x" R "€");
    both("\xf4\x8f\xbf\xbf\xee\x80\x80\xed\x9f\xbf", 10, "\U0010FFFF\ue000\ud7ff");
    both("", 0, "");
}

static void test_check(void **state)
{
    (void)state;
    assert_int_equal(k3_utf8_check("abc", 3), 3);
    assert_int_equal(k3_utf8_check("a\0b", 3), 3);
    assert_int_equal(k3_utf8_check("aé世🙂", 10), 10);
    assert_int_equal(k3_utf8_check("aé世🙂", 9), 6);
    assert_int_equal(k3_utf8_check("a\xc3", 2), 1);
    assert_int_equal(k3_utf8_check("\xed\xa0\x80", 3), 0);
    assert_int_equal(k3_utf8_check("ab\xc0\x80", 4), 2);
    assert_int_equal(k3_utf8_check("\xf4\x90\x80\x80", 4), 0);
    assert_int_equal(k3_utf8_check("", 0), 0);
}

/* Whatever comes in, valid UTF-8 comes out, and valid UTF-8 comes out unchanged, however it is cut. */
static void test_random(void **state)
{
    struct k3_buf out = { 0 }, text = { 0 };
    uint64_t seed = 3;

    (void)state;
    for (int round = 0; round < 20000; round++) {
        struct k3_utf8_stream s = { { 0 }, 0, 0, 0, 0 };
        uint32_t n = vocab_random(&seed) % 24;
        int valid = round % 2;
        text.len_bytes = out.len_bytes = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t c = vocab_random(&seed) >> (vocab_random(&seed) % 20 + 11);
            char byte = (char)(vocab_random(&seed) % 3 ? 0x80 | (vocab_random(&seed) & 0x7f) : vocab_random(&seed));
            if (valid)
                jsonl_put_cp(&text, c % 0x110000 - (c % 0x110000 >= 0xd800 && c % 0x110000 < 0xe000 ? 0x800 : 0));
            else
                k3_buf_append(&text, &byte, 1);
        }
        for (size_t at = 0; at < text.len_bytes;) {
            size_t k = vocab_random(&seed) % 5 + 1;
            k = k > text.len_bytes - at ? text.len_bytes - at : k;
            k3_utf8_feed(&s, text.bytes + at, k, &out);
            assert_int_equal(k3_utf8_check(out.bytes, out.len_bytes), out.len_bytes);
            at += k;
        }
        k3_utf8_flush(&s, &out);
        assert_int_equal(k3_utf8_check(out.bytes, out.len_bytes), out.len_bytes);
        if (valid) {
            assert_int_equal(out.len_bytes, text.len_bytes);
            assert_memory_equal(out.bytes ? out.bytes : "", text.bytes ? text.bytes : "", text.len_bytes);
        }
    }
    k3_buf_free(&out);
    k3_buf_free(&text);
}

static void test_spaces(void **state)
{
    static const uint32_t space[] = { 9, 10, 11, 12, 13, 0x20, 0x85, 0xa0, 0x1680, 0x2000, 0x200a, 0x2028, 0x2029,
                                      0x202f, 0x205f, 0x3000 };
    static const uint32_t none[] = { 0, 8, 14, 0x1b, 0x84, 0x180e, 0x1fff, 0x200b, 0x2060, 0x3001, 0xfeff, 'a' };
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < 16; i++)
        assert_true(k3_utf8_is_space(space[i], false));
    for (size_t i = 0; i < 12; i++)
        assert_false(k3_utf8_is_space(none[i], true));
    for (uint32_t c = 0x1c; c <= 0x1f; c++)
        assert_true(k3_utf8_is_space(c, true) && !k3_utf8_is_space(c, false));
    for (uint32_t c = 0; c < 0x110000; c++)
        n += k3_utf8_is_space(c, true);
    assert_int_equal(n, 29);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_steps), cmocka_unit_test(test_ill_formed), cmocka_unit_test(test_check),
        cmocka_unit_test(test_random), cmocka_unit_test(test_spaces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
