/* /tokenize and /detokenize, each in the form of llama.cpp and in that of vLLM. */
#include <errno.h>
#include <string.h>

#include "k3-router/http.h"

static void done(struct k3_http_req *q, int rc)
{
    if (rc || k3_buf_puts(&q->out, "\n"))
        k3_http_error(q, 503, NULL, NULL, "no memory for the reply");
    else
        k3_http_reply(q, 200, "application/json");
}

static int put_piece(const struct k3_tokenizer *t, struct k3_buf *b, uint32_t id)
{
    size_t len;
    const char *bytes = k3_tokenizer_bytes(t, id, &len);
    int rc;

    if (k3_utf8_check(bytes, len) == len)
        return k3_buf_json(b, bytes, len);
    rc = k3_buf_puts(b, "[");
    for (size_t i = 0; i < len; i++)
        rc |= k3_buf_printf(b, i ? ",%u" : "%u", (unsigned char)bytes[i]);
    return rc | k3_buf_puts(b, "]");
}

static int put_tokens(struct k3_http_req *q, const struct k3_ids *ids, bool pieces, bool count)
{
    struct k3_buf *b = &q->out;
    uint64_t ctx;
    int rc;

    pthread_mutex_lock(&q->h->lock);
    ctx = q->h->peer.ctx;
    pthread_mutex_unlock(&q->h->lock);
    rc = k3_buf_puts(b, "{");
    if (count)
        rc |= k3_buf_printf(b, "\"count\":%zu,\"max_model_len\":%llu,", ids->n, (unsigned long long)ctx);
    rc |= k3_buf_puts(b, "\"tokens\":");
    if (!pieces) {
        rc |= k3_buf_json_ids(b, ids);
    } else {
        rc |= k3_buf_puts(b, "[");
        for (size_t i = 0; i < ids->n && !rc; i++) {
            rc |= k3_buf_printf(b, "%s{\"id\":%u,\"piece\":", i ? "," : "", ids->id[i]);
            rc |= put_piece(q->h->r->t, b, ids->id[i]);
            rc |= k3_buf_puts(b, "}");
        }
        rc |= k3_buf_puts(b, "]");
    }
    return rc | k3_buf_puts(b, "}");
}

static int encode(struct k3_http_req *q, const char *name, const struct k3_json *text, bool special, struct k3_ids *out)
{
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (text->type != K3_JSON_STRING)
        return k3_http_field_refused(q, name, "a text");
    rc = special ? k3_tokenizer_encode_special(q->h->r->t, text->text.bytes, text->text.len_bytes, out, &err)
                 : k3_tokenizer_encode(q->h->r->t, text->text.bytes, text->text.len_bytes, out, &err);
    if (rc < 0)
        k3_http_error(q, k3_http_status_of(&err), name, NULL, "%s", err.text);
    return rc;
}

void k3_http_post_tokenize(struct k3_http_req *q)
{
    /* add_special: this tokenizer adds no ids by itself, so there is nothing to leave out. */
    static const char *const llama[] = { "content", "add_special", "parse_special", "with_pieces", NULL };
    static const char *const vllm[] = { "model", "prompt", "add_special_tokens", NULL };
    struct k3_json_doc doc = { 0 };
    struct k3_ids ids = { 0 };
    const struct k3_json *o, *content, *prompt, *messages;
    bool special = false, pieces = false, any = false;
    int rc = k3_http_body(q, &doc);

    if (rc < 0)
        return;
    o = doc.node;
    content = k3_json_value(o, "content");
    prompt = k3_json_value(o, "prompt");
    messages = k3_json_value(o, "messages");
    if ((content != NULL) + (prompt != NULL) + (messages != NULL) != 1) {
        k3_http_error(q, 400, "content", "missing_parameter", "one of content, prompt and messages is needed");
        rc = -EINVAL;
    }
    if (rc == 0)
        rc = messages ? k3_http_chat_known(q, o, vllm) : k3_http_known(q, o, content ? llama : vllm, NULL);
    if (rc == 0)
        rc = k3_http_get_bool(q, o, "parse_special", &special);
    if (rc == 0)
        rc = k3_http_get_bool(q, o, "with_pieces", &pieces);
    if (rc == 0)
        rc = k3_http_get_bool(q, o, content ? "add_special" : "add_special_tokens", &any);
    if (rc == 0)
        rc = messages ? k3_http_chat_ids(q, o, &ids)
                      : encode(q, content ? "content" : "prompt", content ? content : prompt, special, &ids);
    if (rc == 0)
        done(q, put_tokens(q, &ids, pieces, !content));
    k3_ids_free(&ids);
    k3_json_free(&doc);
}

void k3_http_post_detokenize(struct k3_http_req *q)
{
    static const char *const known[] = { "tokens", "model", NULL };
    const struct k3_tokenizer *t = q->h->r->t;
    struct k3_json_doc doc = { 0 };
    struct k3_utf8_stream utf8 = { .n = 0 };
    struct k3_buf bytes = { 0 }, text = { 0 };
    struct k3_ids ids = { 0 };
    const struct k3_json *tokens;
    int rc = k3_http_body(q, &doc);

    if (rc < 0)
        return;
    tokens = k3_json_value(doc.node, "tokens");
    rc = k3_http_known(q, doc.node, known, NULL);
    if (rc == 0 && (!tokens || tokens->type != K3_JSON_ARRAY))
        rc = k3_http_field_refused(q, "tokens", "an array of token ids");
    if (rc == 0)
        rc = k3_http_get_ids(q, tokens, "tokens", k3_tokenizer_n_vocab(t), &ids);
    if (rc == 0) {
        rc = k3_tokenizer_decode(t, ids.id, ids.n, true, &bytes, NULL);
        if (rc == 0)
            rc = k3_utf8_feed(&utf8, bytes.bytes, bytes.len_bytes, &text) | k3_utf8_flush(&utf8, &text);
        /* both names: that of llama.cpp and that of vLLM */
        for (int i = 0; i < 2 && rc == 0; i++)
            rc = k3_buf_puts(&q->out, i ? ",\"prompt\":" : "{\"content\":") |
                 k3_buf_json(&q->out, text.bytes ? text.bytes : "", text.len_bytes);
        done(q, rc ? rc : k3_buf_puts(&q->out, "}"));
    }
    k3_ids_free(&ids);
    k3_buf_free(&bytes);
    k3_buf_free(&text);
    k3_json_free(&doc);
}
