/* text/chat_json.c: what is JSON and what is not, and how values are written again (spec/text.md 1.9, 3.5). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/chat_json.h"
#include "tests/unit/vocab.h"

static void written(const char *json, size_t len_bytes, enum k3_json_style style, struct k3_buf *out)
{
    struct k3_json_doc d;
    struct k3_err err = K3_ERR_INIT;

    out->len_bytes = 0;
    if (k3_json_parse(&d, json, len_bytes, &err) < 0)
        fail_msg("%s: %s", json, err.text);
    assert_int_equal(k3_json_write(out, d.node, style), 0);
    k3_json_free(&d);
}

static void is_written(const char *json, enum k3_json_style style, const char *want)
{
    struct k3_buf b = { 0 };

    written(json, strlen(json), style, &b);
    if (b.len_bytes != strlen(want) || memcmp(b.bytes, want, b.len_bytes) != 0)
        fail_msg("%s: \"%.*s\" where \"%s\" is right", json, (int)b.len_bytes, b.bytes, want);
    k3_buf_free(&b);
}

/* Right sides: what Python 3 prints with json.dumps(json.loads(x), ensure_ascii=False). */
static void test_numbers(void **state)
{
    static const char *const c[][2] = {
        { "0", "0" }, { "-0", "0" }, { "7", "7" }, { "-12", "-12" },
        { "123456789012345678901234567890", "123456789012345678901234567890" },
        { "9007199254740993", "9007199254740993" },
        { "0.0", "0.0" }, { "-0.0", "-0.0" }, { "1.0", "1.0" }, { "1.50", "1.5" }, { "100000.0", "100000.0" },
        { "1e2", "100.0" }, { "1E-5", "1e-05" }, { "0.0001", "0.0001" }, { "0.00012", "0.00012" }, { "0.00001", "1e-05" },
        { "1e15", "1000000000000000.0" }, { "9999999999999998.0", "9999999999999998.0" }, { "1e16", "1e+16" },
        { "123456789012345678.0", "1.2345678901234568e+17" }, { "0.1", "0.1" },
        { "0.1000000000000000055511151231257827", "0.1" }, { "0.30000000000000004", "0.30000000000000004" },
        { "5e-324", "5e-324" }, { "2.2250738585072014e-308", "2.2250738585072014e-308" },
        { "1.7976931348623157e308", "1.7976931348623157e+308" }, { "-1.25e+100", "-1.25e+100" },
        { "5.684341886080801486968994140625e-14", "5.684341886080802e-14" }, /* 2^-44: the nearest 16 digits do not read back */
        { "9.5367431640625e-07", "9.5367431640625e-07" }, { "9007199254740992.0", "9007199254740992.0" },
        { "1234.5678", "1234.5678" }, { "12345678901234.5", "12345678901234.5" },
        { "1e999", "1e999" }, /* Python: Infinity, which is no JSON */
    };

    (void)state;
    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++)
        is_written(c[i][0], K3_JSON_SPACED, c[i][1]);
}

/* Significant digits of a written real. */
static int n_digits(const char *text)
{
    char digit[64];
    int n = 0, zeros = 0;

    for (; *text && *text != 'e'; text++)
        if (*text >= '0' && *text <= '9' && (n || *text != '0'))
            digit[n++] = *text;
    while (zeros < n && digit[n - 1 - zeros] == '0')
        zeros++;
    return n - zeros;
}

/* Random doubles, among them powers of two: what is written reads back as the same double, and no shorter text does. */
static void test_reals_read_back(void **state)
{
    struct k3_buf b = { 0 };
    uint64_t seed = 11, bits;
    char text[64];
    double v;

    (void)state;
    for (int i = 0; i < 20000; i++) {
        bits = (uint64_t)vocab_random(&seed) << 42 ^ (uint64_t)vocab_random(&seed) << 21 ^ vocab_random(&seed);
        if (i % 4 == 0)
            bits &= 0xfff0000000000000u;
        memcpy(&v, &bits, sizeof(v));
        if ((bits >> 52 & 0x7ff) == 0x7ff)
            continue;
        snprintf(text, sizeof(text), "%.17e", v);
        written(text, strlen(text), K3_JSON_SORTED, &b);
        k3_buf_append(&b, "", 1);
        if (strtod(b.bytes, NULL) != v)
            fail_msg("%s is written as %s", text, b.bytes);
        for (int n = 1; n < n_digits(b.bytes); n++) {
            snprintf(text, sizeof(text), "%.*e", n - 1, v);
            if (strtod(text, NULL) == v)
                fail_msg("%s is written as %s", text, b.bytes);
        }
    }
    k3_buf_free(&b);
}

static void test_styles(void **state)
{
    static const char json[] = " {\"b\" : [ 1 , \"two\", false ,null], \"a\":{\"z\":{},\"\\u00e9\":[],\"Z\":true} } ";

    (void)state;
    is_written(json, K3_JSON_SPACED, "{\"b\": [1, \"two\", false, null], \"a\": {\"z\": {}, \"é\": [], \"Z\": true}}");
    is_written(json, K3_JSON_SORTED, "{\"a\":{\"Z\":true,\"z\":{},\"é\":[]},\"b\":[1,\"two\",false,null]}");
    is_written("{\"\xf0\x9f\x98\x80\":1,\"\xef\xbf\xbf\":2,\"a\":3,\"\":4,\"aa\":5}", K3_JSON_SORTED,
               "{\"\":4,\"a\":3,\"aa\":5,\"\xef\xbf\xbf\":2,\"\xf0\x9f\x98\x80\":1}");
}

static void test_equal_keys(void **state)
{
    (void)state;
    is_written("{\"a\":1,\"b\":2,\"a\":[3],\"c\":4,\"a\":{\"x\":5,\"x\":6},\"c\":7}", K3_JSON_SPACED,
               "{\"a\": {\"x\": 6}, \"b\": 2, \"c\": 7}");
    is_written("{\"\":1,\"\":2}", K3_JSON_SPACED, "{\"\": 2}");
    is_written("{\"a\\u0000\":1,\"a\":2}", K3_JSON_SPACED, "{\"a\\u0000\": 1, \"a\": 2}");
}

static void test_strings(void **state)
{
    struct k3_json_doc d;
    static const char want[] = "a\0b\x7f";

    (void)state;
    is_written("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\\u007f\\u2028\"", K3_JSON_SPACED,
               "\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\xe2\x80\xa8\"");
    is_written("\"\\ud83d\\ude42 \\uD83D\\uDE42\"", K3_JSON_SPACED, "\"🙂 🙂\"");
    is_written("\"\\ud83d\"", K3_JSON_SPACED, "\"\xef\xbf\xbd\"");
    is_written("\"\\ude42\\ud83d\\ud83dx\\ud83d\\n\\ud83d\\u0041\"", K3_JSON_SPACED,
               "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdx\xef\xbf\xbd\\n\xef\xbf\xbd"
               "A\"");
    assert_int_equal(k3_json_parse(&d, "\"a\\u0000b\\u007f\"", 16, NULL), 0);
    assert_int_equal(d.node->text.len_bytes, 4);
    assert_memory_equal(d.node->text.bytes, want, 5);
    k3_json_free(&d);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {
        "", " ", "nul", "nulls", "tru", "NaN", "Infinity", "-", "+1", "01", "-01", "1.", ".5", "1e", "1e+", "0x1", "1 2",
        "\"", "\"a", "\"\\", "\"\\\"", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"a\nb\"", "\"\t\"", "'a'", "[", "[1", "[1,",
        "[1,]", "[,1]", "[1 2]", "]", "{", "{a:1}", "{\"a\"", "{\"a\":", "{\"a\" 1}", "{\"a\":1,", "{\"a\":1,}", "{1:2}",
        "{\"a\":1 \"b\":2}", "{}{}", "[1}", "{\"a\":1]", "\xef\xbb\xbf{}", "// x\n1", "\"\\ud83d\\u\"",
    };
    struct k3_err err = K3_ERR_INIT;
    struct k3_json_doc d;
    char deep[2 * K3_JSON_DEPTH_MAX + 2];

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int rc = k3_json_parse(&d, bad[i], strlen(bad[i]), &err);
        if (rc != -EINVAL || !strstr(err.text, "JSON: byte "))
            fail_msg("%s: %d, \"%s\"", bad[i], rc, err.text);
        assert_null(d.node);
    }
    assert_int_equal(k3_json_parse(&d, "\"a\0b\"", 5, &err), -EINVAL);
    assert_int_equal(k3_json_parse(&d, "[1]\0", 4, &err), -EINVAL);
    assert_int_equal(k3_json_parse(&d, "\"a\xff\"", 4, &err), -EILSEQ);
    assert_string_equal(err.text, "JSON: byte 2 is not UTF-8");
    assert_int_equal(k3_json_parse(&d, "\"\xed\xa0\x80\"", 5, &err), -EILSEQ); /* a surrogate in UTF-8 */
    memset(deep, '[', sizeof(deep));
    memset(deep + K3_JSON_DEPTH_MAX, ']', K3_JSON_DEPTH_MAX);
    assert_int_equal(k3_json_parse(&d, deep, 2 * K3_JSON_DEPTH_MAX, &err), 0);
    k3_json_free(&d);
    deep[K3_JSON_DEPTH_MAX] = '[';
    assert_int_equal(k3_json_parse(&d, deep, 2 * K3_JSON_DEPTH_MAX + 2, &err), -EINVAL);
    assert_non_null(strstr(err.text, "nested too deeply"));
}

static void test_looking(void **state)
{
    static const char json[] = "{\"a\":null,\"b\":\"x\",\"c\":[1,2,3]}";
    struct k3_json_doc d;

    (void)state;
    assert_int_equal(k3_json_parse(&d, json, strlen(json), NULL), 0);
    assert_int_equal(k3_json_get(d.node, "a")->type, K3_JSON_NULL);
    assert_null(k3_json_value(d.node, "a"));
    assert_true(k3_text_is(k3_json_value(d.node, "b")->text, "x"));
    assert_int_equal(k3_json_get(d.node, "c")->n, 3);
    assert_null(k3_json_get(d.node, "C"));
    assert_null(k3_json_get(k3_json_get(d.node, "c"), "a"));
    assert_null(k3_json_get(NULL, "a"));
    assert_true(k3_text_is_blank((struct k3_text){ " \t\xe3\x80\x80\x1c", 6 }));
    assert_false(k3_text_is_blank((struct k3_text){ " \xe2\x80\x8b", 4 })); /* ZERO WIDTH SPACE is none */
    k3_json_free(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),    cmocka_unit_test(test_reals_read_back), cmocka_unit_test(test_styles),
        cmocka_unit_test(test_equal_keys), cmocka_unit_test(test_strings),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_looking),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
