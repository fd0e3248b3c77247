/* k3-router/tokenizer.c: the published ids of spec/text.md 2, bad files, modes, decoding. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdbool.h>
#include <time.h>

#include "tests/unit/vocab.h"

static struct k3_tokenizer *released;

static void encode(const struct k3_tokenizer *t, const char *text, size_t len, bool special, struct k3_ids *out)
{
    struct k3_err err = K3_ERR_INIT;

    out->n = 0;
    if ((special ? k3_tokenizer_encode_special(t, text, len, out, &err) : k3_tokenizer_encode(t, text, len, out, &err)) < 0)
        fail_msg("%s", err.text);
}

static void expect(const struct k3_tokenizer *t, const char *text, bool special, const char *ids)
{
    struct k3_ids got = { 0 };

    encode(t, text, strlen(text), special, &got);
    assert_ids_text(&got, ids, text);
    k3_ids_free(&got);
}

static uint64_t fnv(uint64_t h, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        h = (h ^ (v >> (8 * i) & 0xff)) * 0x100000001b3ull;
    return h;
}
#define FNV 0xcbf29ce484222325ull

static void test_published_ids(void **state)
{
    FILE *f = fopen("tests/data/text_ids.jsonl", "r");
    struct k3_buf text = { 0 }, back = { 0 };
    struct k3_ids got = { 0 }, want = { 0 };
    struct k3_err err = K3_ERR_INIT;
    char *line = NULL;
    size_t cap = 0, n = 0;

    (void)state;
    if (!released)
        skip();
    assert_non_null(f);
    while (getline(&line, &cap, f) > 0) {
        jsonl_string(jsonl_value(line, "t"), &text);
        jsonl_ids(jsonl_value(line, "ids"), &want);
        encode(released, text.bytes, text.len_bytes, false, &got);
        assert_ids(&got, &want, line);
        back.len_bytes = 0;
        assert_int_equal(k3_tokenizer_decode(released, got.id, got.n, 1, &back, &err), 0);
        assert_int_equal(back.len_bytes, text.len_bytes);
        if (text.len_bytes)
            assert_memory_equal(back.bytes, text.bytes, text.len_bytes);
        n++;
    }
    assert_int_equal(n, 125);
    fclose(f);
    free(line);
    k3_buf_free(&text);
    k3_buf_free(&back);
    k3_ids_free(&got);
    k3_ids_free(&want);
}

static void test_markers_in_text(void **state)
{
    (void)state;
    if (!released)
        skip();
    expect(released, "<|open|>", false, "[27,91,4454,91,29]");
    expect(released, "<|close|>", false, "[27,91,10794,91,29]");
    expect(released, "<|sep|>", false, "[27,91,40433,91,29]");
    expect(released, "<|end_of_msg|>", false, "[27,91,517,5118,14222,91,29]");
    expect(released, "<|media_pad|>", false, "[27,91,13634,49974,91,29]");
    expect(released, "a <|open|> b [BOS] c", true, "[64,220,163587,291,220,163584,275]");
    expect(released, "literal <|open|> and <|end_of_msg|> and [BOS] here", true,
           "[82319,220,163587,316,220,163586,316,220,163584,2397]");
    expect(released, "<|reserved_token_163592|>[PAD]", true, "[163592,163839]");
}

static void test_decode_only(void **state)
{
    static const uint32_t plain[] = { 3, 4, 5, 6, 7 };
    static const uint32_t special[] = { 163584, 163585, 163586, 163587, 163588, 163589, 163838, 163839 };
    static const char names[] = "[BOS][EOS]<|end_of_msg|><|open|><|close|><|sep|>[UNK][PAD]";
    static const uint32_t beyond[] = { 163840 };
    struct k3_buf b = { 0 };
    struct k3_err err = K3_ERR_INIT;
    size_t len;

    (void)state;
    if (!released)
        skip();
    assert_int_equal(k3_tokenizer_decode(released, plain, 5, 0, &b, &err), 0);
    assert_int_equal(b.len_bytes, 5);
    assert_memory_equal(b.bytes, "$%&'(", 5);
    expect(released, "$%&'(", false, "[3,4,5,87720]");
    b.len_bytes = 0;
    assert_int_equal(k3_tokenizer_decode(released, special, 8, 1, &b, &err), 0);
    assert_int_equal(b.len_bytes, strlen(names));
    assert_memory_equal(b.bytes, names, strlen(names));
    b.len_bytes = 0;
    assert_int_equal(k3_tokenizer_decode(released, special, 8, 0, &b, &err), 0);
    assert_int_equal(b.len_bytes, 0);
    assert_int_equal(k3_tokenizer_decode(released, beyond, 1, 0, &b, &err), -EINVAL);
    assert_non_null(strstr(err.text, "163840"));
    assert_null(k3_tokenizer_bytes(released, 163840, &len));
    assert_int_equal(k3_tokenizer_base(released), 163584);
    assert_int_equal(k3_tokenizer_n_vocab(released), 163840);
    k3_buf_free(&b);
}

static void test_long_inputs(void **state)
{
    static const struct { const char *unit; size_t times; const char *tail; size_t n_ids; uint64_t fnv; } c[] = {
        { "QUJDRA", 5000, "", 19999, 0x349522e5d4f2b123 }, { " ", 30000, "end", 121, 0x92ab61b14bb54561 },
        { "word ", 6000, "", 6001, 0xecb553eaadb387aa },   { "word ", 100000, "", 100002, 0x3935f7828fab30a1 },
        { "a", 25001, "", 3126, 0xaeb077ec9c03b22e },      { " ", 25001, "", 100, 0x73a7566b071d3a87 },
        { "\U0001F642", 25001, "", 50002, 0x63d6538735388801 },
        { "a ", 200000, "b", 200002, 0x59c1be934dfcd242 },
    };
    struct k3_buf b = { 0 };
    struct k3_ids got = { 0 };

    (void)state;
    if (!released)
        skip();
    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) {
        uint64_t h = FNV;
        b.len_bytes = 0;
        for (size_t k = 0; k < c[i].times; k++)
            k3_buf_puts(&b, c[i].unit);
        k3_buf_puts(&b, c[i].tail);
        encode(released, b.bytes, b.len_bytes, false, &got);
        for (size_t k = 0; k < got.n; k++)
            h = fnv(h, got.id[k]);
        assert_int_equal(got.n, c[i].n_ids);
        assert_int_equal(h, c[i].fnv);
    }
    k3_buf_free(&b);
    k3_ids_free(&got);
}

static void test_combinatorial_corpus(void **state)
{
    static const char *const f[] = {
        "", "a", "A", "Ab", "ABCd", "é", "e\u0301", "汉", "漢字", "한", "ह", "ا", "0", "12", "1234", " ", "  ", "\t", "\n",
        "\r\n", "\u00a0", "!", "...", "🙂", "👩‍💻", "'s", "<|open|>", "[BOS]",
    };
    static const struct { size_t n; uint64_t h; } want[2] = { { 98026, 0x11e13c50d8d5c7e8 },
                                                              { 84294, 0x14d850fe1958bc7a } };
    struct k3_ids got = { 0 };
    char text[128];

    (void)state;
    if (!released)
        skip();
    for (int special = 0; special < 2; special++) {
        uint64_t h = FNV;
        size_t total = 0;
        for (size_t i = 0; i < 28 * 28 * 28; i++) {
            int n = snprintf(text, sizeof(text), "%s%s%s", f[i / 784], f[i / 28 % 28], f[i % 28]);
            encode(released, text, (size_t)n, special, &got);
            h = fnv(h, (uint32_t)got.n);
            for (size_t k = 0; k < got.n; k++)
                h = fnv(h, got.id[k]);
            total += got.n;
        }
        assert_int_equal(total, want[special].n);
        assert_int_equal(h, want[special].h);
    }
    k3_ids_free(&got);
}

static void test_tiny_vocabulary(void **state)
{
    struct k3_buf b = { 0 };
    struct k3_tokenizer *t;

    (void)state;
    vocab_tiny(&b);
    t = vocab_parse(b.bytes, b.len_bytes, vocab_tiny_config);
    expect(t, "hello", false, "[259,78]");
    expect(t, "hello hello", false, "[259,78,220,259,78]");
    expect(t, "aaaa", false, "[260,260]");
    expect(t, "aaaaa", false, "[260,261]");
    expect(t, "ababab", false, "[263,262]");
    expect(t, "abc", false, "[262,66]");
    expect(t, "abcabc", false, "[262,66,262,66]");
    expect(t, "世界", false, "[160,116,244,163,243,234]");
    expect(t, "世", false, "[267]");
    expect(t, "a<|open|>b", false, "[64,27,91,78,79,68,77,91,29,65]");
    expect(t, "a<|open|>b", true, "[64,268,65]");
    k3_tokenizer_close(t);
    k3_buf_free(&b);
}

/* Every text that could tempt the encoder, put together at random: no id from base on ever comes out in text mode. */
static void test_text_mode_never_yields_specials(void **state)
{
    static const char *const bait[] = { "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]", "[PAD]",
                                        "<|reserved_token_1290|>", "<|", "|>", "open", "[", "]", " ", "\n", "message" };
    struct k3_tokenizer *t = vocab_demo();
    struct k3_buf b = { 0 }, back = { 0 };
    struct k3_ids got = { 0 };
    struct k3_err err = K3_ERR_INIT;
    uint64_t seed = 7;
    size_t n_special = 0;

    (void)state;
    for (int i = 0; i < 2000; i++) {
        b.len_bytes = back.len_bytes = 0;
        for (uint32_t k = 0; k < 8; k++)
            k3_buf_puts(&b, bait[vocab_random(&seed) % 16]);
        encode(t, b.bytes, b.len_bytes, false, &got);
        for (size_t k = 0; k < got.n; k++)
            assert_true(got.id[k] < k3_tokenizer_base(t));
        encode(t, b.bytes, b.len_bytes, true, &got);
        for (size_t k = 0; k < got.n; k++)
            n_special += got.id[k] >= k3_tokenizer_base(t);
        assert_int_equal(k3_tokenizer_decode(t, got.id, got.n, 1, &back, &err), 0);
        assert_int_equal(back.len_bytes, b.len_bytes);
        assert_memory_equal(back.bytes, b.bytes, b.len_bytes);
    }
    assert_true(n_special > 1000);
    k3_tokenizer_close(t);
    k3_buf_free(&b);
    k3_buf_free(&back);
    k3_ids_free(&got);
}

static void test_demo_raw_prompts(void **state)
{
    struct k3_tokenizer *t = vocab_demo();

    (void)state;
    expect(t, "", false, "[]");
    expect(t, "The capital of Italy is", false, "[295,319,268,1153,262]");
    expect(t, "The currency of Norway is", false, "[295,332,268,1181,387,262]");
    expect(t, "What is", false, "[288,262]");
    assert_int_equal(k3_tokenizer_base(t), 1280);
    k3_tokenizer_close(t);
}

static void test_invalid_utf8(void **state)
{
    struct k3_tokenizer *t = vocab_demo();
    struct k3_ids got = { 0 };
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_int_equal(k3_tokenizer_encode(t, "abc\xff", 4, &got, &err), -EILSEQ);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "offset 3"));
    assert_non_null(strstr(err.text, "0xff"));
    assert_int_equal(k3_tokenizer_encode(t, "\xe4\xbd", 2, &got, &err), -EILSEQ);
    k3_tokenizer_close(t);
    k3_ids_free(&got);
}

/* ---- bad files ---- */

static void refuse(const char *ranks, size_t len, const char *config, const char *words)
{
    struct k3_tokenizer *t = NULL;
    struct k3_err err = K3_ERR_INIT;

    assert_true(k3_tokenizer_parse(&t, ranks, len, "R", config, config ? strlen(config) : 0, "C", &err) < 0);
    assert_null(t);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" does not say \"%s\"", err.text, words);
}

/* The tiny vocabulary with line number `line` (1-based) replaced. */
static void refuse_line(size_t line, const char *with, const char *words)
{
    struct k3_buf b = { 0 }, out = { 0 };
    const char *p, *end;
    size_t n = 0;

    vocab_tiny(&b);
    for (p = b.bytes; p < b.bytes + b.len_bytes; p = end + 1) {
        end = memchr(p, '\n', b.len_bytes);
        if (++n == line)
            k3_buf_puts(&out, with);
        else
            k3_buf_append(&out, p, (size_t)(end - p + 1));
    }
    refuse(out.bytes, out.len_bytes, NULL, words);
    k3_buf_free(&b);
    k3_buf_free(&out);
}

static void test_bad_ranks(void **state)
{
    struct k3_buf b = { 0 };

    (void)state;
    refuse("", 0, NULL, "empty");
    refuse_line(3, "Iw==\n", "line 3: no space");
    refuse_line(3, "Iw== 3\n", "line 3: rank 3 where 2 is due");
    refuse_line(3, "Iw== \n", "line 3: rank  where 2 is due");
    refuse_line(3, "Iw== 2x\n", "line 3: \"2x\" is not a rank");
    refuse_line(3, "Iw== -2\n", "line 3: \"-2\" is not a rank");
    refuse_line(3, "Iw== 99999999999999999999\n", "line 3: \"99999999999999999999\" is not a rank");
    refuse_line(3, "Iw= 2\n", "line 3: \"Iw=\" is not the base64");
    refuse_line(3, "I*== 2\n", "line 3: \"I*==\" is not the base64");
    refuse_line(3, "==== 2\n", "line 3: \"====\" is not the base64");
    refuse_line(3, "Ix== 2\n", "line 3: \"Ix==\" is not the base64"); /* stray bits */
    refuse_line(3, " 2\n", "line 3: \"\" is not the base64");
    refuse_line(3, "\n", "line 3: no space");
    refuse_line(3, "", "line 3: rank 3 where 2 is due"); /* a line that is missing */
    refuse_line(3, "IQ== 2\n", "line 3: the same token as line 1");
    refuse_line(260, "aGVsbGhlbGw= 259\n*", "line 261: \"*YWE=\" is not the base64");
    refuse_line(2, "aGVsbGhlbGw= 1\n", "none is the single byte 0x22");
    vocab_tiny(&b);
    refuse(b.bytes, b.len_bytes / 2, NULL, "line 141: rank  where 140 is due");
    k3_buf_free(&b);
}

static void test_line_ends(void **state)
{
    struct k3_buf b = { 0 }, crlf = { 0 };
    struct k3_tokenizer *t;

    (void)state;
    vocab_tiny(&b);
    t = vocab_parse(b.bytes, b.len_bytes - 1, vocab_tiny_config); /* no last newline */
    expect(t, "世", false, "[267]");
    k3_tokenizer_close(t);
    for (size_t i = 0; i < b.len_bytes; i++)
        k3_buf_append(&crlf, b.bytes[i] == '\n' ? "\r\n" : &b.bytes[i], b.bytes[i] == '\n' ? 2 : 1);
    t = vocab_parse(crlf.bytes, crlf.len_bytes, NULL);
    expect(t, "hello世", false, "[259,78,267]");
    k3_tokenizer_close(t);
    k3_buf_free(&b);
    k3_buf_free(&crlf);
}

static void test_bad_config(void **state)
{
    struct k3_buf b = { 0 };

    (void)state;
    vocab_tiny(&b);
    refuse(b.bytes, b.len_bytes, "", "not JSON");
    refuse(b.bytes, b.len_bytes, "{", "not JSON");
    refuse(b.bytes, b.len_bytes, "{} x", "something follows");
    refuse(b.bytes, b.len_bytes, "{}", "added_tokens_decoder");
    refuse(b.bytes, b.len_bytes, "[]", "added_tokens_decoder");
    refuse(b.bytes, b.len_bytes, "{\"added_tokens_decoder\":{\"267\":{\"content\":\"x\"}}}", "\"267\"");
    refuse(b.bytes, b.len_bytes, "{\"added_tokens_decoder\":{\"524\":{\"content\":\"x\"}}}", "268 to 523");
    refuse(b.bytes, b.len_bytes, "{\"added_tokens_decoder\":{\"x\":{\"content\":\"x\"}}}", "\"x\"");
    refuse(b.bytes, b.len_bytes, "{\"added_tokens_decoder\":{\"270\":{\"content\":7}}}", "\"270\" has no string");
    refuse(b.bytes, b.len_bytes, "{\"added_tokens_decoder\":{\"270\":{\"content\":\"\"}}}", "\"270\" has no string");
    refuse(b.bytes, b.len_bytes,
           "{\"added_tokens_decoder\":{\"270\":{\"content\":\"x\"},\"271\":{\"content\":\"x\"}}}", "ids 270 and 271");
    k3_buf_free(&b);
}

/* K2's config has the same ranks; with it every marker would silently be text. */
static void test_markers_are_guarded(void **state)
{
    char dir[] = "/tmp/k3-tokenizer-test-XXXXXX", path[128];
    struct k3_tokenizer *t = NULL;
    struct k3_err err = K3_ERR_INIT;
    struct k3_buf b = { 0 };
    FILE *f;

    (void)state;
    assert_non_null(mkdtemp(dir));
    vocab_tiny(&b);
    snprintf(path, sizeof(path), "%s/tiktoken.model", dir);
    assert_int_equal(k3_tokenizer_open(&t, dir, &err), -ENOENT);
    assert_non_null(strstr(err.text, path));
    f = fopen(path, "w");
    fwrite(b.bytes, 1, b.len_bytes, f);
    fclose(f);
    assert_int_equal(k3_tokenizer_open(&t, dir, &err), -ENOENT);
    assert_non_null(strstr(err.text, "tokenizer_config.json"));
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    f = fopen(path, "w");
    fputs("{\"added_tokens_decoder\":{\"270\":{\"content\":\"<|im_end|>\"},\"271\":{\"content\":\"<|im_user|>\"}}}", f);
    fclose(f);
    assert_int_equal(k3_tokenizer_open(&t, dir, &err), -EINVAL);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "id 270 is named \"<|im_end|>\" and should be \"<|end_of_msg|>\""));
    f = fopen(path, "w");
    fputs("{\"added_tokens_decoder\":{\"270\":{\"content\":\"<|end_of_msg|>\"},\"271\":{\"content\":\"<|open|>\"},"
          "\"272\":{\"content\":\"<|close|>\"},\"273\":{\"content\":\"<|sep|>\"}}}", f);
    fclose(f);
    if (k3_tokenizer_open(&t, dir, &err) < 0)
        fail_msg("%s", err.text);
    k3_tokenizer_close(t);
    unlink(path);
    snprintf(path, sizeof(path), "%s/tiktoken.model", dir);
    unlink(path);
    rmdir(dir);
    k3_buf_free(&b);
}

static void test_loads_quickly(void **state)
{
    struct timespec a, b;
    struct k3_tokenizer *t;
    double s;

    (void)state;
    if (!released || strcmp(K3_BUILD, "release") != 0)
        skip();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    t = vocab_released();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    k3_tokenizer_close(t);
    s = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9;
    if (s > 0.5)
        fail_msg("163,584 ranks took %.3f s of processor time", s);
}

static int setup(void **state)
{
    (void)state;
    released = vocab_released();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    k3_tokenizer_close(released);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_ids), cmocka_unit_test(test_markers_in_text),
        cmocka_unit_test(test_decode_only), cmocka_unit_test(test_long_inputs),
        cmocka_unit_test(test_combinatorial_corpus), cmocka_unit_test(test_tiny_vocabulary),
        cmocka_unit_test(test_text_mode_never_yields_specials), cmocka_unit_test(test_demo_raw_prompts),
        cmocka_unit_test(test_invalid_utf8), cmocka_unit_test(test_bad_ranks), cmocka_unit_test(test_line_ends),
        cmocka_unit_test(test_bad_config), cmocka_unit_test(test_markers_are_guarded),
        cmocka_unit_test(test_loads_quickly),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
