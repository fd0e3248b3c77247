/* tests/unit/vocab.h: the vocabularies that the router's tests use.  cmocka.h must be included before. */
#ifndef K3_TESTS_VOCAB_H
#define K3_TESTS_VOCAB_H

#include <unistd.h>

#include "text/file.h"
#include "k3-router/tokenizer.h"
#include "tests/unit/jsonl.h"

#define RELEASED_RANKS "../shared/data/tiktoken.model"
#define DEMO_DIR "run/demo-model"

static inline void vocab_line(struct k3_buf *b, const char *token, size_t len, unsigned rank)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    for (size_t i = 0; i < len; i += 3) {
        unsigned v = 0, have = len - i < 3 ? (unsigned)(len - i) : 3;
        char out[4];
        for (unsigned k = 0; k < 3; k++)
            v = v << 8 | (k < have ? (unsigned char)token[i + k] : 0);
        for (unsigned k = 0; k < 4; k++)
            out[k] = k <= have ? digit[v >> (18 - 6 * k) & 63] : '=';
        k3_buf_append(b, out, 4);
    }
    k3_buf_printf(b, " %u\n", rank);
}

/* The 256 bytes in GPT-2's order (spec/text.md 1.2). */
static inline void vocab_bytes(struct k3_buf *b)
{
    static const struct { int from, to; } range[] = { { 33, 126 }, { 161, 172 }, { 174, 255 },
                                                      { 0, 32 },   { 127, 160 }, { 173, 173 } };
    unsigned rank = 0;

    for (size_t i = 0; i < 6; i++)
        for (int c = range[i].from; c <= range[i].to; c++) {
            char byte = (char)c;
            vocab_line(b, &byte, 1, rank++);
        }
}

/* The tiny vocabulary of spec/text.md 2.4; its special 268 is <|open|>. */
static inline void vocab_tiny(struct k3_buf *b)
{
    static const char *const token[] = { "he", "ll", "lo", "hell", "aa", "aaa", "ab", "abab", "bc", " h", " he", "世" };

    vocab_bytes(b);
    for (unsigned i = 0; i < 12; i++)
        vocab_line(b, token[i], strlen(token[i]), 256 + i);
}

static const char vocab_tiny_config[] = "{\"added_tokens_decoder\":{\"268\":{\"content\":\"<|open|>\"}}}";

static inline struct k3_tokenizer *vocab_parse(const char *ranks, size_t len, const char *config)
{
    struct k3_tokenizer *t = NULL;
    struct k3_err err = K3_ERR_INIT;

    if (k3_tokenizer_parse(&t, ranks, len, "ranks", config, config ? strlen(config) : 0, "config", &err) < 0)
        fail_msg("%s", err.text);
    return t;
}

/* The names that K3's own config gives (spec/text.md 1.3); the released ranks come without a config file. */
static inline struct k3_tokenizer *vocab_released(void)
{
    static const char config[] =
        "{\"added_tokens_decoder\":{\"163584\":{\"content\":\"[BOS]\"},\"163585\":{\"content\":\"[EOS]\"},"
        "\"163586\":{\"content\":\"<|end_of_msg|>\"},\"163587\":{\"content\":\"<|open|>\"},"
        "\"163588\":{\"content\":\"<|close|>\"},\"163589\":{\"content\":\"<|sep|>\"},"
        "\"163590\":{\"content\":\"[start_header_id]\"},\"163591\":{\"content\":\"[end_header_id]\"},"
        "\"163593\":{\"content\":\"[EOT]\"},\"163602\":{\"content\":\"<|media_begin|>\"},"
        "\"163603\":{\"content\":\"<|media_content|>\"},\"163604\":{\"content\":\"<|media_end|>\"},"
        "\"163605\":{\"content\":\"<|media_pad|>\"},\"163649\":{\"content\":\"<osagent_mode>\"},"
        "\"163838\":{\"content\":\"[UNK]\"},\"163839\":{\"content\":\"[PAD]\"}}}";
    struct k3_buf b = { 0 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_tokenizer *t;

    if (access(RELEASED_RANKS, R_OK) != 0)
        return NULL;
    if (k3_file_read(&b, RELEASED_RANKS, 1u << 30, &err) < 0)
        fail_msg("%s", err.text);
    t = vocab_parse(b.bytes, b.len_bytes, config);
    k3_buf_free(&b);
    return t;
}

static inline struct k3_tokenizer *vocab_demo(void)
{
    struct k3_tokenizer *t = NULL;
    struct k3_err err = K3_ERR_INIT;

    if (k3_tokenizer_open(&t, DEMO_DIR, &err) < 0)
        fail_msg("%s", err.text);
    return t;
}

static inline void assert_ids(const struct k3_ids *got, const struct k3_ids *want, const char *what)
{
    struct k3_buf a = { 0 }, b = { 0 };

    k3_buf_json_ids(&a, got);
    k3_buf_json_ids(&b, want);
    if (a.len_bytes != b.len_bytes || memcmp(a.bytes, b.bytes, a.len_bytes) != 0)
        fail_msg("%s: %.*s where %.*s is right", what, (int)a.len_bytes, a.bytes, (int)b.len_bytes, b.bytes);
    k3_buf_free(&a);
    k3_buf_free(&b);
}

/* want: "[1,2,3]" */
static inline void assert_ids_text(const struct k3_ids *got, const char *want, const char *what)
{
    struct k3_ids w = { 0 };

    jsonl_ids(want, &w);
    assert_ids(got, &w, what);
    k3_ids_free(&w);
}

static inline uint32_t vocab_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

#endif
