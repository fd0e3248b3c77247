/* Log probabilities in the shapes of OpenAI.  Chats: an object for each token, those of the content and, beside them, those of
 * the reasoning.  Completions: four arrays.  A token has its entry with the first piece of text that it is part of; markers, and
 * tokens of calls, have none. */
#include <errno.h>
#include <string.h>

#include "k3-router/http.h"

/* The token's text alone, with U+FFFD where its bytes are no characters; a special id's spelling. */
static int token_text(const struct k3_tokenizer *t, uint32_t id, struct k3_buf *out)
{
    struct k3_utf8_stream utf8 = { 0 };
    size_t len_bytes = 0;
    const char *bytes = k3_tokenizer_bytes(t, id, &len_bytes);
    int rc = bytes ? k3_utf8_feed(&utf8, bytes, len_bytes, out) : 0;

    return rc ? rc : k3_utf8_flush(&utf8, out);
}

static int put_text(struct k3_buf *b, const struct k3_tokenizer *t, uint32_t id)
{
    struct k3_buf text = { 0 };
    int rc = token_text(t, id, &text);

    if (rc == 0)
        rc = k3_buf_json(b, text.bytes ? text.bytes : "", text.len_bytes);
    k3_buf_free(&text);
    return rc;
}

/* Without a brace at the end.  A special id has no bytes: nobody ever sees it as text. */
static int put_entry(struct k3_buf *b, const struct k3_tokenizer *t, const struct k3_logprob *p)
{
    size_t len_bytes = 0;
    const char *bytes = k3_tokenizer_bytes(t, p->id, &len_bytes);
    int rc = k3_buf_puts(b, "{\"token\":");

    rc |= put_text(b, t, p->id);
    rc |= k3_buf_printf(b, ",\"logprob\":%.9g,\"bytes\":", (double)p->value);
    if (!bytes || p->id >= k3_tokenizer_base(t))
        return rc | k3_buf_puts(b, "null");
    for (size_t i = 0; i < len_bytes; i++)
        rc |= k3_buf_printf(b, "%s%u", i ? "," : "[", (unsigned char)bytes[i]);
    return rc | k3_buf_puts(b, "]");
}

/* The array of what has been shown of a channel and was not told before. */
static int put_chat(struct k3_http_job *j, enum k3_channel channel)
{
    const struct k3_logprobs *l = &j->ask.logprobs;
    const struct k3_tokenizer *t = j->answer.t;
    const struct k3_answer_id *id;
    struct k3_buf *b = &j->piece;
    const char *comma = "";
    int rc = k3_buf_puts(b, "[");

    while ((id = k3_answer_take_id(&j->answer, channel)) != NULL) {
        const struct k3_logprob *p = k3_logprobs_at(l, id->index);

        rc |= k3_buf_puts(b, comma);
        rc |= put_entry(b, t, p);
        rc |= k3_buf_puts(b, ",\"top_logprobs\":[");
        for (uint32_t i = 1; i < l->n_each; i++) {
            rc |= k3_buf_puts(b, i > 1 ? "," : "");
            rc |= put_entry(b, t, &p[i]);
            rc |= k3_buf_puts(b, "}");
        }
        rc |= k3_buf_puts(b, "]}");
        comma = ",";
    }
    return rc | k3_buf_puts(b, "]");
}

/* The best, and the token itself, by their texts.  Where two ids have the same text, as two broken characters have, the first
 * counts: a JSON object has a name once. */
static int put_best(struct k3_buf *b, const struct k3_tokenizer *t, const struct k3_logprob *p, uint32_t n_each)
{
    struct k3_buf text[K3_TOP_LOGPROBS_MAX + 1] = { { 0 } };
    const char *comma = "";
    int rc = k3_buf_puts(b, "{");

    for (uint32_t i = 1; i <= n_each; i++) {
        const struct k3_logprob *e = &p[i % n_each]; /* its own comes last */
        bool seen = false;

        rc |= token_text(t, e->id, &text[i - 1]);
        for (uint32_t k = 0; k < i - 1; k++)
            seen |= text[k].len_bytes == text[i - 1].len_bytes &&
                    (text[k].len_bytes == 0 || memcmp(text[k].bytes, text[i - 1].bytes, text[k].len_bytes) == 0);
        if (seen)
            continue;
        rc |= k3_buf_puts(b, comma);
        rc |= k3_buf_json(b, text[i - 1].bytes ? text[i - 1].bytes : "", text[i - 1].len_bytes);
        rc |= k3_buf_printf(b, ":%.9g", (double)e->value);
        comma = ",";
    }
    for (uint32_t i = 0; i < n_each; i++)
        k3_buf_free(&text[i]);
    return rc | k3_buf_puts(b, "}");
}

static int put_arrays(struct k3_http_job *j)
{
    const struct k3_answer_ids *ids = &j->answer.ids[K3_OUT_RESPONSE];
    const struct k3_logprobs *l = &j->ask.logprobs;
    struct k3_buf *b = &j->piece;
    size_t from = ids->n_taken;
    int rc = k3_buf_puts(b, "{\"tokens\":[");

    while (k3_answer_take_id(&j->answer, K3_OUT_RESPONSE))
        ;
    for (size_t i = from; i < ids->n_taken; i++) {
        rc |= k3_buf_puts(b, i > from ? "," : "");
        rc |= put_text(b, j->answer.t, k3_logprobs_at(l, ids->id[i].index)->id);
    }
    rc |= k3_buf_puts(b, "],\"token_logprobs\":[");
    for (size_t i = from; i < ids->n_taken; i++)
        rc |= k3_buf_printf(b, "%s%.9g", i > from ? "," : "", (double)k3_logprobs_at(l, ids->id[i].index)->value);
    rc |= k3_buf_puts(b, l->n_each > 1 ? "],\"top_logprobs\":[" : "],\"top_logprobs\":null");
    for (size_t i = from; i < ids->n_taken && l->n_each > 1; i++) {
        rc |= k3_buf_puts(b, i > from ? "," : "");
        rc |= put_best(b, j->answer.t, k3_logprobs_at(l, ids->id[i].index), l->n_each);
    }
    rc |= k3_buf_puts(b, l->n_each > 1 ? "],\"text_offset\":[" : ",\"text_offset\":[");
    for (size_t i = from; i < ids->n_taken; i++)
        rc |= k3_buf_printf(b, "%s%zu", i > from ? "," : "", ids->id[i].at_chars);
    return rc | k3_buf_puts(b, "]}");
}

int k3_http_put_logprobs(struct k3_http_job *j, enum k3_channel channel)
{
    int rc;

    if (!j->ask.logprobs.n_each)
        return k3_buf_puts(&j->piece, "null");
    if (j->api == K3_HTTP_TEXT)
        return put_arrays(j);
    rc = k3_buf_puts(&j->piece, channel == K3_OUT_THINK ? "{\"content\":[],\"reasoning_content\":" : "{\"content\":");
    rc |= put_chat(j, channel);
    return rc | k3_buf_puts(&j->piece, ",\"refusal\":null}");
}

int k3_http_put_all_logprobs(struct k3_http_job *j)
{
    int rc;

    if (!j->ask.logprobs.n_each || j->api == K3_HTTP_TEXT)
        return k3_http_put_logprobs(j, K3_OUT_RESPONSE);
    rc = k3_buf_puts(&j->piece, "{\"content\":");
    rc |= put_chat(j, K3_OUT_RESPONSE);
    if (j->thinking || j->answer.ids[K3_OUT_THINK].n) {
        rc |= k3_buf_puts(&j->piece, ",\"reasoning_content\":");
        rc |= put_chat(j, K3_OUT_THINK);
    }
    return rc | k3_buf_puts(&j->piece, ",\"refusal\":null}");
}
