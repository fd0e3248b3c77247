/* Fuzz target: generated ids to channels and calls.
 *
 * The first byte: bit 0 thinking, bit 1 at most one call.  Then a byte below 0xc0 is that byte as an id; from 0xc0 to 0xf7 it
 * is one of eight special ids; 0xf8 and above write the name of a tag.  Text is UTF-8; a complete call has an object. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/answer.h"
#include "tests/fuzz/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static int on_text(void *arg, enum k3_channel channel, const char *text, size_t len)
{
    (void)arg;
    (void)channel;
    if (len == 0 || k3_utf8_check(text, len) < len)
        abort();
    return 0;
}

static int on_call(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len)
{
    bool *in_call = arg;

    (void)index;
    if (*in_call != (event != K3_CALL_BEGIN) || k3_utf8_check(text, len) < len)
        abort();
    *in_call = event == K3_CALL_BEGIN || event == K3_CALL_ARGUMENTS;
    return 0;
}

static void feed(struct k3_answer *a, const struct k3_tokenizer *t, uint8_t v)
{
    static const char *const name[] = {
        "call tool=\"f\"", "argument key=\"k\" type=\"string\"", "argument key=\"k\" type=\"object\"", "json", "call", "argument",
        "tools", "response",
    };
    const char *p = v >= 0xf8 ? name[v - 0xf8] : "";

    if (v < 0xf8 && k3_answer_feed(a, v >= 0xc0 ? k3_tokenizer_base(t) + (v & 7) : v) < 0)
        abort();
    for (; *p; p++)
        if (k3_answer_feed(a, (uint8_t)*p) < 0)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct k3_tokenizer *t;
    static const char *const stop[] = { "ab", "STOP" };
    struct k3_answer a;
    bool in_call = false;

    if (!t)
        t = fuzz_vocabulary();
    if (len < 1)
        return 0;
    k3_answer_open(&a, t, K3_ANSWER_CHAT, data[0] & 1, stop, data[0] & 4 ? 2 : 0, on_text, &in_call);
    k3_answer_want_ids(&a);
    k3_answer_calls(&a, data[0] & 2 ? 1 : UINT32_MAX, on_call);
    for (size_t i = 1; i < len; i++)
        feed(&a, t, data[i]);
    for (int c = 0; c < 2; c++) /* in order, and each of a fed id */
        for (const struct k3_answer_id *id, *last = NULL; (id = k3_answer_take_id(&a, (enum k3_channel)c)) != NULL; last = id)
            if (id->index >= a.n_fed || (last && (id->index <= last->index || id->at_bytes < last->at_bytes)))
                abort();
    if (k3_answer_finish(&a) < 0 || (in_call && !a.stop.hit))
        abort();
    for (size_t i = 0; i < a.n_calls; i++) {
        struct k3_json_doc d;
        const struct k3_buf *json = &a.call[i].arguments;
        if (!a.call[i].complete)
            continue;
        if (k3_json_parse(&d, json->bytes, json->len_bytes, NULL) < 0 || d.node->type != K3_JSON_OBJECT)
            abort();
        k3_json_free(&d);
    }
    k3_answer_close(&a);
    return 0;
}
