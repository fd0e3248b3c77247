/* Fuzz target: a journal, in memory.  What is taken has log probabilities for all of its tokens or for none, and what is written
 * of them is read as the same. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/journal.h"

#define ID "0123456789abcdef0123456789abcdef"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void again(const struct k3_logprobs *l)
{
    struct k3_logprobs copy = { 0 };
    struct k3_buf b = { 0 };

    for (size_t i = 0; i < l->n; i++) {
        b.len_bytes = 0;
        if (k3_logprobs_put(l, i, &b) || k3_buf_append(&b, "", 1) || !k3_logprobs_parse(&copy, k3_logprobs_at(l, i)->id, b.bytes))
            abort();
    }
    if (copy.n != l->n || (l->n && memcmp(copy.entry, l->entry, l->n * l->n_each * sizeof(*l->entry)) != 0))
        abort();
    k3_logprobs_free(&copy);
    k3_buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char head[] = "k3-journal 1 " ID "\n{}\n";
    struct k3_err err = K3_ERR_INIT;
    struct k3_journal_data d;
    struct k3_buf b = { 0 };
    size_t good;

    /* The first byte: the rest follows a good head, or is all. */
    if (size && (data[0] & 1) && k3_buf_puts(&b, head) < 0)
        abort();
    if (size > 1 && k3_buf_append(&b, data + 1, size - 1) < 0)
        abort();
    if (k3_journal_parse(&d, b.bytes ? b.bytes : "", b.len_bytes, ID, "x", &good, &err) == 0) {
        if (good > b.len_bytes || (d.logprobs.n && d.logprobs.n != d.generated.n))
            abort();
        again(&d.logprobs);
    } else if (!err.text[0]) {
        abort(); /* refused without words */
    }
    k3_journal_data_free(&d);
    k3_buf_free(&b);
    return 0;
}
