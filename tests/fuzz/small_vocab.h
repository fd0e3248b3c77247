/* tests/fuzz/small_vocab.h: all bytes, and some ids of more than one. */
#ifndef K3_TESTS_FUZZ_SMALL_VOCAB_H
#define K3_TESTS_FUZZ_SMALL_VOCAB_H

#include <stdlib.h>

#include "constrain/vocab.h"
#include "text/buf.h"

#define SMALL_VOCAB 266u

static inline struct k3_vocab *small_vocab(void)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    /* {"  ":  ","  "}  null  call tool="  think  response  message  ," */
    static const char *const more[] = { "eyI=", "Ijo=", "Iiwi", "In0=", "bnVsbA==", "Y2FsbCB0b29sPSI=", "dGhpbms=", "cmVzcG9uc2U=", "bWVzc2FnZQ==", "LCI=" };
    struct k3_vocab *v = NULL;
    struct k3_buf b = { 0 };

    for (unsigned c = 0; c < 256; c++)
        k3_buf_printf(&b, "%c%c== %u\n", digit[c >> 2], digit[(c & 3) << 4], c);
    for (unsigned i = 0; i < 10; i++)
        k3_buf_printf(&b, "%s %u\n", more[i], 256 + i);
    if (k3_vocab_parse(&v, b.bytes, b.len_bytes, "ranks", NULL) < 0 || v->n != SMALL_VOCAB)
        abort();
    k3_buf_free(&b);
    return v;
}

#endif
