/* k3-router/parse_out.c and answer.c: calls of tools in generated ids, whole and broken, as they are streamed; and 100,000
 * outputs with faults. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

#include "k3-router/answer.h"
#include "tests/unit/vocab.h"

#define O "<|open|>"
#define C "<|close|>"
#define S "<|sep|>"
#define E C "message" S "<|end_of_msg|>"
#define CALL(rest, inside) O "call " rest S inside C "call" S
#define F(inside) CALL("tool=\"f\" index=\"1\"", inside)
#define ARG(rest, value) O "argument " rest S value C "argument" S
#define TEXT(key, value) ARG("key=\"" key "\" type=\"string\"", value)
#define JSON(text) O "json type=\"object\"" S text C "json" S
#define TOOLS(inside) O "tools" S inside C "tools" S

/* All that was told, in order: text of channels as it is with T or R before each change, calls as "[name arguments]", lost
 * ones as "[name arguments!". */
struct told { struct k3_buf log; enum k3_channel channel; bool any, in_call; uint32_t n_begun; size_t n_fragments; };

static int on_text(void *arg, enum k3_channel channel, const char *text, size_t len_bytes)
{
    struct told *s = arg;

    assert_true(len_bytes > 0);
    assert_false(s->in_call);
    assert_int_equal(k3_utf8_check(text, len_bytes), len_bytes);
    if (!s->any || channel != s->channel)
        k3_buf_puts(&s->log, channel == K3_OUT_THINK ? "T:" : "R:");
    s->any = true;
    s->channel = channel;
    return k3_buf_append(&s->log, text, len_bytes);
}

static int on_call(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes)
{
    struct told *s = arg;

    assert_int_equal(k3_utf8_check(text, len_bytes), len_bytes);
    assert_int_equal(s->in_call, event != K3_CALL_BEGIN);
    s->any = false;
    switch (event) {
    case K3_CALL_BEGIN:
        assert_int_equal(index, s->n_begun++);
        assert_true(len_bytes > 0);
        s->in_call = true;
        k3_buf_puts(&s->log, "[");
        k3_buf_append(&s->log, text, len_bytes);
        return k3_buf_puts(&s->log, " ");
    case K3_CALL_ARGUMENTS:
        assert_true(len_bytes > 0);
        assert_int_equal(index, s->n_begun - 1);
        s->n_fragments++;
        return k3_buf_append(&s->log, text, len_bytes);
    default:
        assert_int_equal(index, s->n_begun - 1);
        s->in_call = false;
        return k3_buf_puts(&s->log, event == K3_CALL_END ? "]" : "!");
    }
}

/* Ids of a script: specials where they are spelled; bytewise: every byte an id of its own. */
static void script(const struct k3_tokenizer *t, const char *text, bool bytewise, struct k3_ids *out)
{
    struct k3_ids whole = { 0 };
    uint32_t of_byte[256] = { 0 };
    const char *bytes;
    size_t n;

    out->n = 0;
    assert_int_equal(k3_tokenizer_encode_special(t, text, strlen(text), bytewise ? &whole : out, NULL), 0);
    for (uint32_t id = 0; bytewise && id < k3_tokenizer_base(t); id++) {
        bytes = k3_tokenizer_bytes(t, id, &n);
        if (n == 1)
            of_byte[(uint8_t)*bytes] = id;
    }
    for (size_t i = 0; i < whole.n; i++) {
        bytes = k3_tokenizer_bytes(t, whole.id[i], &n);
        if (whole.id[i] >= k3_tokenizer_base(t))
            k3_ids_push(out, whole.id[i]);
        else
            for (size_t k = 0; k < n; k++)
                k3_ids_push(out, of_byte[(uint8_t)bytes[k]]);
    }
    k3_ids_free(&whole);
}

static void run(const struct k3_tokenizer *t, bool thinking, uint32_t max_calls, const struct k3_ids *ids, struct told *s,
                uint32_t *n_dropped)
{
    struct k3_out o;

    k3_out_open(&o, t, thinking, on_text, s);
    k3_out_calls(&o, max_calls, on_call);
    for (size_t i = 0; i < ids->n; i++)
        assert_int_equal(k3_out_feed(&o, ids->id[i]), 0);
    assert_int_equal(k3_out_finish(&o), 0);
    assert_false(s->in_call);
    *n_dropped = o.n_dropped;
    k3_out_close(&o);
}

static void is_told(const struct k3_tokenizer *t, const char *what, bool thinking, uint32_t max_calls, const char *text,
                    const char *want, unsigned n_dropped)
{
    struct k3_ids ids = { 0 };

    for (int bytewise = 0; bytewise < 2; bytewise++) {
        struct told s = { 0 };
        uint32_t dropped;
        script(t, text, bytewise, &ids);
        run(t, thinking, max_calls, &ids, &s, &dropped);
        if (s.log.len_bytes != strlen(want) || memcmp(s.log.bytes ? s.log.bytes : "", want, s.log.len_bytes) != 0)
            fail_msg("%s%s: \"%.*s\" where \"%s\" is right", what, bytewise ? " (bytewise)" : "", (int)s.log.len_bytes,
                     s.log.bytes, want);
        if (dropped != n_dropped)
            fail_msg("%s: %u ids dropped, %u expected", what, dropped, n_dropped);
        k3_buf_free(&s.log);
    }
    k3_ids_free(&ids);
}

struct shape { const char *what, *ids, *told; unsigned n_dropped; };

static void all_told(const struct shape *c, size_t n)
{
    struct k3_tokenizer *t = vocab_demo();

    for (size_t i = 0; i < n; i++)
        is_told(t, c[i].what, false, UINT32_MAX, c[i].ids, c[i].told, c[i].n_dropped);
    k3_tokenizer_close(t);
}

static void test_values(void **state)
{
    static const struct shape c[] = {
        { "no arguments", TOOLS(F("")) E, "[f {}]", 0 },
        { "a string", TOOLS(F(TEXT("k", "a \"b\"\n\\é🙂"))) E, "[f {\"k\":\"a \\\"b\\\"\\n\\\\é🙂\"}]", 0 },
        { "an empty string", TOOLS(F(TEXT("k", ""))) E, "[f {\"k\":\"\"}]", 0 },
        { "a string that looks like JSON", TOOLS(F(TEXT("k", "{\"a\":1}"))) E, "[f {\"k\":\"{\\\"a\\\":1}\"}]", 0 },
        { "other types", TOOLS(F(ARG("key=\"n\" type=\"number\"", "12345678901234567890.50") ARG("key=\"b\" type=\"boolean\"",
          "true") ARG("key=\"z\" type=\"null\"", "null") ARG("key=\"a\" type=\"array\"", "[1, \"two\"]")
          ARG("key=\"o\" type=\"object\"", " {\"k\": \"é\"} "))) E,
          "[f {\"n\":12345678901234567890.50,\"b\":true,\"z\":null,\"a\":[1, \"two\"],\"o\": {\"k\": \"é\"} }]", 0 },
        { "no JSON: a string", TOOLS(F(ARG("key=\"n\" type=\"number\"", "1.2.3\"") ARG("key=\"o\" type=\"object\"", "{\"a\":1")
          ARG("key=\"z\" type=\"null\"", "") ARG("key=\"x\" type=\"number\"", "NaN"))) E,
          "[f {\"n\":\"1.2.3\\\"\",\"o\":\"{\\\"a\\\":1\",\"z\":\"\",\"x\":\"NaN\"}]", 0 },
        { "no JSON and nothing before it", TOOLS(F(ARG("key=\"z\" type=\"null\"", ""))) E, "[f {\"z\":\"\"}]", 0 },
        { "the type that the model chose", TOOLS(F(ARG("key=\"n\" type=\"object\"", "7") ARG("key=\"u\" type=\"weird\"", "8")
          ARG("key=\"m\"", "x"))) E, "[f {\"n\":7,\"u\":8,\"m\":\"x\"}]", 0 },
        { "json element", TOOLS(F(JSON("{\"a\": [1]}"))) E, "[f {\"a\": [1]}]", 0 },
        { "json element, empty", TOOLS(F(JSON(" \n"))) E, "[f {}]", 0 },
        { "json element that is none", TOOLS(F(JSON("{\"a\": 1"))) E, "[f {\"json\":\"{\\\"a\\\": 1\"}]", 0 },
        { "json element of no object", TOOLS(F(JSON("[1]"))) E, "[f {\"json\":\"[1]\"}]", 0 },
        { "json element with arguments", TOOLS(F(JSON("{\"a\":1}") TEXT("k", "v") JSON("{}"))) E, "[f {\"a\":1}]", 0 },
        { "arguments with a json element", TOOLS(F(TEXT("k", "v") JSON("{\"a\":1}") TEXT("l", "w"))) E,
          "[f {\"k\":\"v\",\"l\":\"w\"}]", 0 },
        { "a stray sep", TOOLS(F(TEXT("k", "a" S))) E, "[f {\"k\":\"a\"}]", 1 },
        { "markers in a value", TOOLS(F(TEXT("k", "a" O "b" S "c" C "d" S "e"))) E, "[f {\"k\":\"abcde\"}]", 0 },
        { "other specials in a value", TOOLS(F(TEXT("k", "a[BOS]b"))) E, "[f {\"k\":\"ab\"}]", 1 },
    };

    (void)state;
    all_told(c, sizeof(c) / sizeof(c[0]));
}

static void test_attributes(void **state)
{
    static const struct shape c[] = {
        { "escapes", TOOLS(CALL("tool=\"we&amp;ird&quot;n\" index=\"1\"", TEXT("k&amp;&quot;y&amp;quot;&lt;", "v"))) E,
          "[we&ird\"n {\"k&\\\"y&quot;&lt;\":\"v\"}]", 0 },
        { "spaces", TOOLS(CALL("  index=\"1\"   tool = \"f\"  ", ARG("  type=\"string\"  key=\"a b\" ", "v"))) E,
          "[f {\"a b\":\"v\"}]", 0 },
        { "any characters", TOOLS(CALL("tool=\"f=1 <x>\n\"", TEXT("tool=é", "v"))) E, "[f=1 <x>\n {\"tool=é\":\"v\"}]", 0 },
        { "an empty key", TOOLS(F(TEXT("", "v"))) E, "[f {\"\":\"v\"}]", 0 },
        { "no key", TOOLS(F(ARG("type=\"string\"", "v") TEXT("k", "w"))) E, "[f {\"k\":\"w\"}]", 0 },
        { "no tool", TOOLS(CALL("index=\"1\"", TEXT("k", "v")) F("")) E, "[f {}]", 0 },
        { "an empty tool", TOOLS(CALL("tool=\"\"", TEXT("k", "v")) F("")) E, "[f {}]", 0 },
        { "not quoted", TOOLS(CALL("tool=f", "") O "call" S C "call" S F("")) E, "[f {}]", 0 },
        { "no end of the value", TOOLS(CALL("tool=\"f", "")) E, "[f {}]", 0 },
        { "the first of two", TOOLS(CALL("tool=\"f\" tool=\"g\"", "")) E, "[f {}]", 0 },
    };

    (void)state;
    all_told(c, sizeof(c) / sizeof(c[0]));
}

static void test_order(void **state)
{
    static const struct shape c[] = {
        { "text and two calls", "hi" C "response" S TOOLS(F("") CALL("tool=\"g\"", TEXT("k", "v"))) E, "R:hi[f {}][g {\"k\":\"v\"}]",
          0 },
        { "text between", TOOLS("\n" F("x" TEXT("k", "v") "y") "z") E, "[f {\"k\":\"v\"}]", 0 },
        { "a second tools", TOOLS(F("")) "\n" TOOLS(F("")) E, "[f {}][f {}]", 0 },
        { "calls behind tools", TOOLS("") F("") E, "[f {}]", 0 },
        { "text behind tools", TOOLS(F("")) "hi" E, "[f {}]R:hi", 0 },
        { "tools inside the response", "a" O "tools" S F("") C "tools" S "b" E, "R:a[f {}]R:b", 0 },
        { "argument not closed", TOOLS(F(O "argument key=\"a\" type=\"string\"" S "x" O "argument key=\"b\" type=\"number\"" S
          "1")) E, "[f {\"a\":\"x\",\"b\":1}]", 0 },
        { "closed by the other name", TOOLS(F(O "argument key=\"a\" type=\"string\"" S "x" C "json" S)) E, "[f {\"a\":\"x\"}]", 0 },
        { "tools not closed", O "tools" S F("") E, "[f {}]", 0 },
        { "cut behind a call", O "tools" S F(""), "[f {}]", 0 },
        { "cut in a call", O "tools" S O "call tool=\"f\"" S, "[f !", 0 },
        { "cut in a string", O "tools" S O "call tool=\"f\"" S O "argument key=\"a\" type=\"string\"" S "xy", "[f {\"a\":\"xy!", 0 },
        { "cut in a number", O "tools" S O "call tool=\"f\"" S O "argument key=\"a\" type=\"number\"" S "12", "[f {\"a\":!", 0 },
        { "cut in the tag that ends a call", O "tools" S O "call tool=\"f\"" S C "call", "[f !", 0 },
        { "message ends in a call", O "tools" S O "call tool=\"f\"" S E, "[f !", 0 },
        { "[EOS] in a value", O "tools" S O "call tool=\"f\"" S O "argument key=\"a\"" S "x[EOS]", "[f {\"a\":!", 0 },
        { "tools end in a call", O "tools" S O "call tool=\"f\"" S C "tools" S "hi" E, "[f !R:hi", 0 },
        { "a call in a call", TOOLS(O "call tool=\"f\"" S CALL("tool=\"g\"", "")) E, "[f ![g {}]", 0 },
        { "a call in a value", TOOLS(O "call tool=\"f\"" S O "argument key=\"a\" type=\"string\"" S "x" CALL("tool=\"g\"", "")) E,
          "[f {\"a\":\"x![g {}]", 0 },
        { "response in a call", O "tools" S O "call tool=\"f\"" S O "response" S "hi" E, "[f !R:hi", 0 },
        { "thinking in a value", O "tools" S O "call tool=\"f\"" S O "argument key=\"a\" type=\"string\"" S "x" O "think" S "hm" C
          "think" S E, "[f {\"a\":\"x!T:hm", 0 },
        { "tags without meaning", TOOLS(C "argument" S C "call" S F(C "argument" S C "think" S C "response" S O "tools" S O
          "message" S) TEXT("k", "v")) E, "[f {}]", 9 },
        { "a call in the response", "a" O "call tool=\"f\"" S "b" E, "R:ab", 1 },
        { "an unknown tag among calls", TOOLS(O "thing" S F(O "thing" S) C "thing" S) E, "[f {}]", 0 },
    };
    struct k3_tokenizer *t = vocab_demo();

    (void)state;
    all_told(c, sizeof(c) / sizeof(c[0]));
    is_told(t, "tools without closing think", true, UINT32_MAX, "hm" TOOLS(F(TEXT("k", "v"))) E, "T:hm[f {\"k\":\"v\"}]", 0);
    k3_tokenizer_close(t);
}

static void test_how_many(void **state)
{
    static const char three[] = "a" TOOLS(O "call tool=\"e\"" S F(TEXT("k", "v")) CALL("tool=\"g\"", "")) "b" E;
    struct k3_tokenizer *t = vocab_demo();

    (void)state;
    is_told(t, "all", false, UINT32_MAX, three, "R:a[e ![f {\"k\":\"v\"}][g {}]R:b", 0);
    is_told(t, "tool_choice none", false, 0, three, "R:ab", 0);
    is_told(t, "parallel_tool_calls false", false, 1, three, "R:a[e ![f {\"k\":\"v\"}]R:b", 0);
    k3_tokenizer_close(t);
}

/* A name or key of more ids than a tag may have otherwise. */
static void test_long_names(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_buf ids = { 0 }, want = { 0 };

    (void)state;
    k3_buf_puts(&ids, O "tools" S O "call tool=\"");
    k3_buf_puts(&want, "[");
    for (int i = 0; i < 256; i++) {
        k3_buf_printf(&ids, "%c", 'a' + i % 26);
        k3_buf_printf(&want, "%c", 'a' + i % 26);
    }
    k3_buf_puts(&ids, "\" index=\"1\"" S C "call" S E);
    k3_buf_append(&ids, "", 1);
    k3_buf_puts(&want, " {}]");
    k3_buf_append(&want, "", 1);
    is_told(t, "long name", false, 1, ids.bytes, want.bytes, 0);
    k3_buf_free(&ids);
    k3_buf_free(&want);
    k3_tokenizer_close(t);
}

/* Bytes that are no character, and half of one at the end of a value: U+FFFD, in strings and in what becomes one. */
static void test_half_characters(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ids ids = { 0 }, cut = { 0 };
    struct told s = { 0 };
    uint32_t dropped;

    (void)state;
    script(t, TOOLS(F(TEXT("a", "x🙂") ARG("key=\"b\" type=\"object\"", "🙂🙂"))) E, true, &ids);
    for (size_t i = 0; i < ids.n; i++) { /* the last byte before a CLOSE goes when it is one of the character */
        size_t n;
        const char *bytes = k3_tokenizer_bytes(t, ids.id[i], &n);
        if (!((uint8_t)*bytes == 0x82 && i + 1 < ids.n && ids.id[i + 1] == k3_tokenizer_base(t) + K3_SP_CLOSE))
            k3_ids_push(&cut, ids.id[i]);
    }
    assert_int_equal(cut.n, ids.n - 2);
    run(t, false, 1, &cut, &s, &dropped);
    k3_buf_append(&s.log, "", 1);
    assert_string_equal(s.log.bytes, "[f {\"a\":\"x\xef\xbf\xbd\",\"b\":\"🙂\xef\xbf\xbd\"}]");
    k3_buf_free(&s.log);
    k3_ids_free(&ids);
    k3_ids_free(&cut);
    k3_tokenizer_close(t);
}

/* A string is told as it comes, not at its end. */
static void test_no_silence(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ids ids = { 0 };
    struct told s = { 0 };
    struct k3_out o;
    size_t n;

    (void)state;
    script(t, O "tools" S O "call tool=\"write\"" S O "argument key=\"text\" type=\"string\"" S, false, &ids);
    k3_out_open(&o, t, false, on_text, &s);
    k3_out_calls(&o, UINT32_MAX, on_call);
    for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(k3_out_feed(&o, ids.id[i]), 0);
    assert_int_equal(s.n_fragments, 1); /* {"text":" */
    script(t, "line 1\nline 2\n", true, &ids);
    for (size_t i = 0; i < ids.n; i++) {
        n = s.n_fragments;
        assert_int_equal(k3_out_feed(&o, ids.id[i]), 0);
        assert_int_equal(s.n_fragments, n + 1);
    }
    assert_int_equal(k3_out_finish(&o), 0);
    k3_out_close(&o);
    k3_ids_free(&ids);
    k3_buf_free(&s.log);
    k3_tokenizer_close(t);
}

/* ---- the answer ---- */

static void test_answer(void **state)
{
    static const char *const stop[] = { "STOP" };
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ids ids = { 0 };
    struct k3_answer a;

    (void)state;
    for (int hit = 0; hit < 2; hit++) {
        struct told s = { 0 };
        script(t, hit ? "say STOP" TOOLS(F("")) E : "say STO" TOOLS(F(TEXT("k", "STOP")) O "call tool=\"g\"" S) "P" E, false, &ids);
        k3_answer_open(&a, t, K3_ANSWER_CHAT, false, stop, 1, on_text, &s);
        k3_answer_calls(&a, UINT32_MAX, on_call);
        for (size_t i = 0; i < ids.n; i++)
            assert_true(k3_answer_feed(&a, ids.id[i]) >= 0);
        assert_int_equal(k3_answer_finish(&a), 0);
        k3_buf_append(&s.log, "", 1);
        assert_string_equal(s.log.bytes, hit ? "R:say " : "R:say STO[f {\"k\":\"STOP\"}][g !R:P");
        assert_int_equal(a.n_calls, hit ? 0 : 2);
        assert_int_equal(a.n_complete, hit ? 0 : 1);
        if (!hit) {
            assert_true(a.call[0].complete);
            assert_false(a.call[1].complete);
            assert_true(k3_text_is((struct k3_text){ a.call[0].name.bytes, a.call[0].name.len_bytes }, "f"));
            assert_true(k3_text_is((struct k3_text){ a.call[0].arguments.bytes, a.call[0].arguments.len_bytes },
                                   "{\"k\":\"STOP\"}"));
        }
        k3_answer_close(&a);
        k3_buf_free(&s.log);
    }
    /* Who does not ask for calls hears of none. */
    script(t, "a" TOOLS(F(TEXT("k", "v"))) "b" E, false, &ids);
    k3_answer_open(&a, t, K3_ANSWER_CHAT, false, NULL, 0, NULL, NULL);
    for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(k3_answer_feed(&a, ids.id[i]), 0);
    assert_int_equal(k3_answer_finish(&a), 0);
    assert_int_equal(a.n_calls, 0);
    assert_true(k3_text_is((struct k3_text){ a.text.bytes, a.text.len_bytes }, "ab"));
    k3_answer_close(&a);
    k3_ids_free(&ids);
    k3_tokenizer_close(t);
}

/* ---- outputs with faults ---- */

/* No ordinary id of these scripts has '<' or '|' in it, so that either in the output is a leak. */
static const char *const whole[] = {
    "hm" C "think" S O "response" S "hi there" C "response" S E,
    "let me see" C "think" S O "response" S "" C "response" S TOOLS(F(TEXT("path", "a.txt") ARG("key=\"n\" type=\"number\"", "3"))) E,
    "x" C "think" S O "response" S "doing" C "response" S
    TOOLS(F(TEXT("k", "v \"q\" é🙂\n")) CALL("tool=\"g\" index=\"2\"", ARG("key=\"o\" type=\"object\"", "{\"a\": [1, true, null]}")
          ARG("key=\"z\" type=\"null\"", "null"))) E,
    C "think" S O "response" S C "response" S TOOLS(F(JSON("{\"a\": 1, \"b\": {\"c\": \"d\"}}")) F("")) E,
    "just text, [1, 2], {\"a\": \"b\"}" C "response" S E,
};

static void swap_ids(uint32_t *a, uint32_t *b)
{
    uint32_t c = *a;

    *a = *b;
    *b = c;
}

/* One fault: an id lost, doubled, exchanged, put in, a piece repeated, the end cut off. */
static void mutate(const struct k3_tokenizer *t, const struct k3_ids *plain, uint64_t *seed, struct k3_ids *v)
{
    uint32_t base = k3_tokenizer_base(t), at = v->n ? vocab_random(seed) % (uint32_t)v->n : 0;
    uint32_t special = base + (vocab_random(seed) % 4 ? 1 + vocab_random(seed) % 5 : vocab_random(seed) % K3_N_SPECIALS);
    uint32_t id = vocab_random(seed) % 2 ? special : plain->id[vocab_random(seed) % plain->n];
    struct k3_ids tail = { 0 };

    if (v->n == 0) {
        k3_ids_push(v, id);
        return;
    }
    switch (vocab_random(seed) % 7) {
    case 0:
        memmove(v->id + at, v->id + at + 1, (--v->n - at) * sizeof(id));
        break;
    case 1:
        v->id[at] = id;
        break;
    case 2:
        swap_ids(&v->id[at], &v->id[vocab_random(seed) % v->n]);
        break;
    case 3:
        v->n = at;
        break;
    case 4: /* a piece again, somewhere */
        k3_ids_append(&tail, v->id + at, v->n - at);
        v->n = vocab_random(seed) % (v->n + 1);
        k3_ids_append(v, tail.id, tail.n);
        break;
    default:
        k3_ids_append(&tail, v->id + at, v->n - at);
        v->n = at;
        k3_ids_push(v, id);
        k3_ids_append(v, tail.id, tail.n);
    }
    k3_ids_free(&tail);
}

static void no_leak(const struct k3_buf *b, const struct k3_ids *ids)
{
    for (size_t i = 0; i < b->len_bytes; i++)
        if (b->bytes[i] == '<' || b->bytes[i] == '|') {
            struct k3_buf text = { 0 };
            k3_buf_json_ids(&text, ids);
            fail_msg("a marker in \"%.*s\" of %.*s", (int)b->len_bytes, b->bytes, (int)text.len_bytes, text.bytes);
        }
}

/* What the whole answer says is what was told piece by piece, and complete calls have JSON objects. */
static void check_answer(const struct k3_answer *a, const struct told *told, const struct k3_ids *ids)
{
    struct k3_json_doc d;
    size_t n_complete = 0;

    no_leak(&a->text, ids);
    no_leak(&a->thinking, ids);
    no_leak(&told->log, ids);
    assert_int_equal(a->n_calls, told->n_begun);
    assert_false(told->in_call);
    for (size_t i = 0; i < a->n_calls; i++) {
        const struct k3_buf *json = &a->call[i].arguments;
        if (!a->call[i].complete)
            continue;
        n_complete++;
        if (k3_json_parse(&d, json->bytes, json->len_bytes, NULL) < 0)
            fail_msg("arguments: %.*s", (int)json->len_bytes, json->bytes);
        assert_int_equal(d.node->type, K3_JSON_OBJECT);
        k3_json_free(&d);
    }
    assert_int_equal(a->n_complete, n_complete);
}

static void test_faults(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ids from[5] = { 0 }, plain = { 0 }, v = { 0 };
    uint64_t seed = 2026;
    size_t n_complete = 0, n_lost = 0, n;

    (void)state;
    for (size_t i = 0; i < 5; i++)
        script(t, whole[i], i == 2, &from[i]);
    for (uint32_t id = 0; id < k3_tokenizer_base(t); id++) {
        const char *bytes = k3_tokenizer_bytes(t, id, &n);
        if (!memchr(bytes, '<', n) && !memchr(bytes, '|', n))
            k3_ids_push(&plain, id);
    }
    for (int round = 0; round < 100000; round++) {
        struct told told = { 0 };
        struct k3_answer a;
        uint32_t which = vocab_random(&seed) % 5;
        v.n = 0;
        k3_ids_append(&v, from[which].id, from[which].n);
        for (uint32_t k = vocab_random(&seed) % 6; k > 0; k--)
            mutate(t, &plain, &seed, &v);
        k3_answer_open(&a, t, K3_ANSWER_CHAT, which != 4, NULL, 0, on_text, &told);
        k3_answer_calls(&a, round % 8 ? UINT32_MAX : 1, on_call);
        for (size_t i = 0; i < v.n; i++)
            assert_int_equal(k3_answer_feed(&a, v.id[i]), 0);
        assert_int_equal(k3_answer_finish(&a), 0);
        check_answer(&a, &told, &v);
        n_complete += a.n_complete;
        n_lost += a.n_calls - a.n_complete;
        k3_answer_close(&a);
        k3_buf_free(&told.log);
    }
    assert_true(n_complete > 30000); /* the faults leave many calls whole, */
    assert_true(n_lost > 3000);      /* and break many */
    for (size_t i = 0; i < 5; i++)
        k3_ids_free(&from[i]);
    k3_ids_free(&plain);
    k3_ids_free(&v);
    k3_tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),   cmocka_unit_test(test_attributes), cmocka_unit_test(test_order),
        cmocka_unit_test(test_how_many), cmocka_unit_test(test_long_names), cmocka_unit_test(test_no_silence),
        cmocka_unit_test(test_half_characters), cmocka_unit_test(test_answer), cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
