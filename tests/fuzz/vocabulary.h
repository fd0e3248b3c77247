/* tests/fuzz/vocabulary.h: a vocabulary of all bytes, each its own id, and some merges; specials have reserved names. */
#ifndef K3_TESTS_FUZZ_VOCABULARY_H
#define K3_TESTS_FUZZ_VOCABULARY_H

#include <stdlib.h>

#include "k3-router/tokenizer.h"

static inline struct k3_tokenizer *fuzz_vocabulary(void)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static const char *const more[] = { "YWI= 256\n", "YWJj 257\n", "IGE= 258\n", "4pw= 259\n", "YWFh 260\n", "YWE= 261\n" };
    struct k3_buf b = { 0 };
    struct k3_tokenizer *t = NULL;

    for (unsigned c = 0; c < 256; c++)
        k3_buf_printf(&b, "%c%c== %u\n", digit[c >> 2], digit[(c & 3) << 4], c);
    for (unsigned i = 0; i < 6; i++)
        k3_buf_puts(&b, more[i]);
    if (k3_tokenizer_parse(&t, b.bytes, b.len_bytes, "ranks", NULL, 0, NULL, NULL) < 0)
        abort();
    k3_buf_free(&b);
    return t;
}

#endif
