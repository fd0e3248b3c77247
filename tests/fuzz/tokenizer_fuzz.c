/* Fuzz target: a vocabulary file, a tokenizer config, text to encode and ids to decode, all from the input.
 *
 * The first byte chooses; the rest is cut in two at the first 0xff 0x00:
 *   0   ranks file, config file: parse, then encode the config's text with what came out
 *   1   text for the demo-like vocabulary of all bytes and some merges: encode, decode, compare; chat; the answer parser
 *   2   a journal */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/answer.h"
#include "k3-router/chat.h"
#include "k3-router/journal.h"
#include "k3-router/tokenizer.h"
#include "tests/fuzz/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void files(const char *a, size_t n_a, const char *b, size_t n_b)
{
    struct k3_tokenizer *t = NULL;
    struct k3_ids ids = { 0 };
    struct k3_err err = K3_ERR_INIT;

    if (k3_tokenizer_parse(&t, a, n_a, "ranks", b, n_b, "config", &err) == 0) {
        k3_tokenizer_encode_special(t, b, n_b, &ids, &err);
        k3_ids_free(&ids);
        k3_tokenizer_close(t);
    } else if (!err.text[0]) {
        abort();
    }
}

static int swallow(void *arg, enum k3_channel channel, const char *text, size_t len)
{
    (void)arg;
    (void)channel;
    if (k3_utf8_check(text, len) < len)
        abort();
    return 0;
}

static void text(const struct k3_tokenizer *t, const char *a, size_t n_a, const char *b, size_t n_b)
{
    static const char *const stop[] = { "ab", "STOP", "\xe2\x9c\x93" };
    struct k3_text part = { a, n_a };
    struct k3_chat_message m = { .role = K3_CHAT_ASSISTANT, .parts = &part, .n_parts = 1, .reasoning = { b, n_b },
                                 .name = { b, n_b } };
    struct k3_chat_opts o = { .thinking = true, .effort = "low" };
    struct k3_ids ids = { 0 };
    struct k3_buf back = { 0 };
    struct k3_chat *c = NULL;
    struct k3_answer answer;

    if (k3_tokenizer_encode(t, a, n_a, &ids, NULL) == 0) {
        for (size_t i = 0; i < ids.n; i++)
            if (ids.id[i] >= k3_tokenizer_base(t))
                abort();
        if (k3_tokenizer_decode(t, ids.id, ids.n, 0, &back, NULL) < 0 || back.len_bytes != n_a ||
            (n_a && memcmp(back.bytes, a, n_a) != 0))
            abort();
    } else if (k3_utf8_check(a, n_a) == n_a) {
        abort();
    }
    ids.n = 0;
    if (k3_chat_open(&c, t, NULL) < 0)
        abort();
    k3_chat_render(c, &m, 1, &o, &ids, NULL);
    k3_chat_close(c);
    /* The bytes as generated ids: from 0xc0 on they are special ids, so tags arise. */
    k3_answer_open(&answer, t, K3_ANSWER_CHAT, n_b & 1, stop, 3, swallow, NULL);
    for (size_t i = 0; i < n_a; i++) {
        uint8_t v = (uint8_t)a[i];
        if (k3_answer_feed(&answer, v >= 0xc0 ? k3_tokenizer_base(t) + (v & 7) : v) < 0)
            abort();
    }
    if (k3_answer_finish(&answer) < 0)
        abort();
    k3_answer_close(&answer);
    k3_ids_free(&ids);
    k3_buf_free(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct k3_tokenizer *t;
    const char *a = (const char *)data + 1, *b;
    size_t n_a, n_b, good;
    struct k3_journal_data journal;

    if (!t)
        t = fuzz_vocabulary();
    if (len < 1)
        return 0;
    b = memmem(a, len - 1, "\xff", 2);
    n_a = b ? (size_t)(b - a) : len - 1;
    n_b = b ? len - 1 - n_a - 2 : 0;
    b = b ? b + 2 : a + n_a;
    switch (data[0] % 3) {
    case 0:
        files(a, n_a, b, n_b);
        break;
    case 1:
        text(t, a, n_a, b, n_b);
        break;
    default:
        k3_journal_parse(&journal, a, n_a, "0123456789abcdef0123456789abcdef", "journal", &good, NULL);
        k3_journal_data_free(&journal);
    }
    return 0;
}
