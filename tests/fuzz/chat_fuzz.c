/* Fuzz target: a body of /v1/chat/completions to prompt ids.
 *
 * A refusal has words and, when the body is an object, the name of a member.  The special ids of a prompt are the four
 * markers, and the text between them decodes to UTF-8.  What is written of JSON is JSON, and writing it again changes nothing. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/chat_request.h"
#include "tests/fuzz/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void write_twice(const struct k3_json *v, enum k3_json_style style)
{
    struct k3_buf once = { 0 }, again = { 0 };
    struct k3_json_doc d;

    if (k3_json_write(&once, v, style) < 0 || k3_json_parse(&d, once.bytes, once.len_bytes, NULL) < 0 ||
        k3_json_write(&again, d.node, style) < 0 || once.len_bytes != again.len_bytes ||
        memcmp(once.bytes, again.bytes, once.len_bytes) != 0)
        abort();
    k3_json_free(&d);
    k3_buf_free(&once);
    k3_buf_free(&again);
}

static void check_ids(const struct k3_tokenizer *t, const struct k3_ids *ids)
{
    struct k3_buf text = { 0 };

    for (size_t i = 0; i < ids->n; i++)
        if (ids->id[i] >= k3_tokenizer_base(t) && (ids->id[i] < k3_tokenizer_base(t) + K3_SP_END_OF_MSG ||
                                                   ids->id[i] > k3_tokenizer_base(t) + K3_SP_SEP))
            abort();
    if (k3_tokenizer_decode(t, ids->id, ids->n, 0, &text, NULL) < 0 ||
        k3_utf8_check(text.bytes, text.len_bytes) < text.len_bytes)
        abort();
    k3_buf_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct k3_tokenizer *t;
    static struct k3_chat *chat;
    static const struct k3_chat_opts defaults = { .thinking = true, .effort = "max" };
    struct k3_err err = K3_ERR_INIT;
    struct k3_chat_request q;
    struct k3_ids ids = { 0 };
    struct k3_json_doc d;
    int rc;

    if (!t) {
        t = fuzz_vocabulary();
        if (k3_chat_open(&chat, t, NULL) < 0)
            abort();
    }
    if (k3_json_parse(&d, (const char *)data, len, &err) < 0) {
        if (!err.text[0])
            abort();
        return 0;
    }
    write_twice(d.node, K3_JSON_SORTED);
    write_twice(d.node, K3_JSON_SPACED);
    rc = k3_chat_request_read(&q, d.node, &defaults, &err);
    if (rc == 0)
        rc = k3_chat_request_render(&q, chat, &ids, &err);
    if (rc == 0)
        check_ids(t, &ids);
    else if (rc != -EINVAL || !err.text[0] || k3_utf8_check(err.text, strlen(err.text)) < strlen(err.text) ||
             (d.node->type == K3_JSON_OBJECT && !q.param[0]))
        abort();
    k3_chat_request_free(&q);
    k3_json_free(&d);
    k3_ids_free(&ids);
    return 0;
}
