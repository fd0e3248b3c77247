/* The JSON of answers: chunks of a stream and whole replies (spec/text.md 5.2, 5.3). */
#include <errno.h>
#include <string.h>

#include "k3-router/http.h"

const char *k3_http_finish_reason(const struct k3_http_job *j)
{
    return j->answer.n_complete && j->max_calls ? "tool_calls" : j->ask.end == K3_ASK_LENGTH ? "length" : "stop";
}

static int put_head(struct k3_http_job *j, const char *object)
{
    struct k3_buf *b = &j->piece;
    int rc = k3_buf_printf(b, "{\"id\":\"%s-%s\",\"object\":\"%s\",\"created\":%lld,\"model\":%s",
                           j->api == K3_HTTP_CHAT ? "chatcmpl" : "cmpl", j->first->ask.id, object, (long long)j->created, j->c.model);

    if (j->fingerprint[0])
        rc |= k3_buf_printf(b, ",\"system_fingerprint\":\"%s\"", j->fingerprint);
    return rc;
}

static int put_json(struct k3_buf *b, const struct k3_buf *text)
{
    return k3_buf_json(b, text->bytes ? text->bytes : "", text->len_bytes);
}

/* Of all answers; the prompt, which they share, counts once. */
static int put_usage(struct k3_http_job *j)
{
    const struct k3_ask *a = &j->first->ask;
    size_t n = 0, n_reasoning = 0;

    for (unsigned i = 0; i < j->c.n; i++) {
        n += j->first[i].ask.generated.n;
        n_reasoning += j->first[i].n_reasoning;
    }
    return k3_buf_printf(&j->piece, "\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%zu,\"total_tokens\":%zu,"
                         "\"cached_tokens\":%zu,\"prompt_tokens_details\":{\"cached_tokens\":%zu}," /* Moonshot's place, OpenAI's */
                         "\"completion_tokens_details\":{\"reasoning_tokens\":%zu}}", a->prompt.n, n,
                         a->prompt.n + n, a->n_cached, a->n_cached, n_reasoning);
}

static double per_s(size_t n, double ms)
{
    return ms > 0 ? (double)n * 1000 / ms : 0;
}

/* As llama.cpp has them: programs that measure read these.  Of several answers: from the first start and the first token to the
 * last end, and the tokens of all. */
static int put_timings(struct k3_http_job *j)
{
    uint64_t start = UINT64_MAX, first = UINT64_MAX, end = 0;
    size_t n_prompt = j->first->ask.prompt.n, n_cached = j->first->ask.n_cached, n = 0;
    double prompt_ms, rest_ms;

    for (unsigned i = 0; i < j->c.n; i++) {
        const struct k3_ask *a = &j->first[i].ask;
        uint64_t a_first = a->first_ns ? a->first_ns : a->end_ns;

        n += a->generated.n;
        start = a->start_ns < start ? a->start_ns : start;
        first = a_first < first ? a_first : first;
        end = a->end_ns > end ? a->end_ns : end;
    }
    prompt_ms = first > start ? (double)(first - start) / 1e6 : 0;
    rest_ms = end > first ? (double)(end - first) / 1e6 : 0;
    return k3_buf_printf(&j->piece, "\"timings\":{\"cache_n\":%zu,\"prompt_n\":%zu,\"prompt_ms\":%.3f,\"prompt_per_second\":%.3f,"
                         "\"predicted_n\":%zu,\"predicted_ms\":%.3f,\"predicted_per_second\":%.3f}", n_cached,
                         n_prompt - n_cached, prompt_ms, per_s(n_prompt - n_cached, prompt_ms), n, rest_ms, per_s(n ? n - 1 : 0, rest_ms));
}

/* ---- chunks ---- */

static int begin(struct k3_http_job *j)
{
    int rc = k3_buf_puts(&j->piece, "data: ");

    rc |= put_head(j, j->api == K3_HTTP_CHAT ? "chat.completion.chunk" : "text_completion");
    return rc | k3_buf_printf(&j->piece, ",\"choices\":[{\"index\":%u,%s", j->index,
                              j->api == K3_HTTP_CHAT ? "\"delta\":{" : "\"text\":");
}

/* The end of a chunk with a choice.  shown: it has text of this channel; NULL: none.  reason NULL: null. */
static int end(struct k3_http_job *j, const enum k3_channel *shown, const char *reason)
{
    int rc = k3_buf_printf(&j->piece, "%s,\"logprobs\":", j->api == K3_HTTP_CHAT ? "}" : "");

    rc |= shown ? k3_http_put_logprobs(j, *shown) : k3_buf_puts(&j->piece, "null");
    rc |= k3_buf_printf(&j->piece, ",\"finish_reason\":%s%s%s}]", reason ? "\"" : "", reason ? reason : "null", reason ? "\"" : "");
    if (j->c.include_usage)
        rc |= k3_buf_puts(&j->piece, ",\"usage\":null");
    return rc | k3_buf_puts(&j->piece, "}\n\n");
}

int k3_http_chunk_first(struct k3_http_job *j)
{
    int rc = begin(j);

    rc |= k3_buf_puts(&j->piece, j->api == K3_HTTP_CHAT ? "\"role\":\"assistant\",\"content\":\"\"" : "\"\"");
    return rc | end(j, NULL, NULL);
}

int k3_http_chunk_text(struct k3_http_job *j, enum k3_channel channel, const char *text, size_t len_bytes)
{
    int rc = begin(j);

    if (j->api == K3_HTTP_CHAT)
        rc |= k3_buf_puts(&j->piece, channel == K3_OUT_THINK ? "\"reasoning_content\":" : "\"content\":");
    rc |= k3_buf_json(&j->piece, text, len_bytes);
    return rc | end(j, &channel, NULL);
}

/* 24 letters that no other call has: of the request's id, and its number. */
static int put_call_id(struct k3_http_job *j, uint32_t index)
{
    return k3_buf_printf(&j->piece, "\"id\":\"call_%.20s%04x\",\"type\":\"function\"", j->ask.id, index & 0xffff);
}

int k3_http_chunk_call(struct k3_http_job *j, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes)
{
    int rc;

    if (event == K3_CALL_END || event == K3_CALL_LOST)
        return 0; /* a client takes arguments that are no JSON for what they are: cut off */
    rc = begin(j);
    rc |= k3_buf_printf(&j->piece, "\"tool_calls\":[{\"index\":%u,", index);
    if (event == K3_CALL_BEGIN) {
        rc |= put_call_id(j, index);
        rc |= k3_buf_puts(&j->piece, ",\"function\":{\"name\":");
        rc |= k3_buf_json(&j->piece, text, len_bytes);
        rc |= k3_buf_puts(&j->piece, ",\"arguments\":\"\"}}]");
    } else {
        rc |= k3_buf_puts(&j->piece, "\"function\":{\"arguments\":");
        rc |= k3_buf_json(&j->piece, text, len_bytes);
        rc |= k3_buf_puts(&j->piece, "}}]");
    }
    return rc | end(j, NULL, NULL);
}

int k3_http_chunk_last(struct k3_http_job *j)
{
    int rc = begin(j);

    if (j->api == K3_HTTP_TEXT)
        rc |= k3_buf_puts(&j->piece, "\"\"");
    return rc | end(j, NULL, k3_http_finish_reason(j));
}

int k3_http_chunk_end(struct k3_http_job *j)
{
    int rc = 0;

    if (j->c.include_usage) {
        rc |= k3_buf_puts(&j->piece, "data: ");
        rc |= put_head(j, j->api == K3_HTTP_CHAT ? "chat.completion.chunk" : "text_completion");
        rc |= k3_buf_puts(&j->piece, ",\"choices\":[],");
        rc |= put_usage(j);
        rc |= k3_buf_puts(&j->piece, ",");
        rc |= put_timings(j);
        rc |= k3_buf_puts(&j->piece, "}\n\n");
    }
    return rc | k3_buf_puts(&j->piece, "data: [DONE]\n\n");
}

int k3_http_chunk_error(struct k3_http_job *j, int status, const char *text)
{
    int rc = k3_buf_puts(&j->piece, "data: ");

    rc |= k3_http_error_json(&j->piece, status, NULL, NULL, text);
    return rc | k3_buf_puts(&j->piece, "\n\ndata: [DONE]\n\n");
}

/* ---- whole replies ---- */

static int put_calls(struct k3_http_job *j)
{
    const struct k3_answer *a = &j->answer;
    const char *comma = "";
    int rc = k3_buf_puts(&j->piece, ",\"tool_calls\":[");

    for (size_t i = 0; i < a->n_calls; i++) {
        if (!a->call[i].complete)
            continue;
        rc |= k3_buf_printf(&j->piece, "%s{", comma);
        rc |= put_call_id(j, (uint32_t)i);
        rc |= k3_buf_puts(&j->piece, ",\"function\":{\"name\":");
        rc |= put_json(&j->piece, &a->call[i].name);
        rc |= k3_buf_puts(&j->piece, ",\"arguments\":");
        rc |= put_json(&j->piece, &a->call[i].arguments);
        rc |= k3_buf_puts(&j->piece, "}}");
        comma = ",";
    }
    return rc | k3_buf_puts(&j->piece, "]");
}

static int put_message(struct k3_http_job *j)
{
    const struct k3_answer *a = &j->answer;
    bool calls = a->n_complete && j->max_calls;
    int rc = k3_buf_puts(&j->piece, "\"message\":{\"role\":\"assistant\",\"content\":");

    rc |= calls && !a->text.len_bytes ? k3_buf_puts(&j->piece, "null") : put_json(&j->piece, &a->text);
    if (j->thinking || a->thinking.len_bytes) {
        rc |= k3_buf_puts(&j->piece, ",\"reasoning_content\":");
        rc |= put_json(&j->piece, &a->thinking);
    }
    if (calls)
        rc |= put_calls(j);
    return rc | k3_buf_puts(&j->piece, "}");
}

static int put_choice(struct k3_http_job *j)
{
    int rc = k3_buf_printf(&j->piece, "{\"index\":%u,", j->index);

    if (j->api == K3_HTTP_CHAT) {
        rc |= put_message(j);
    } else {
        rc |= k3_buf_puts(&j->piece, "\"text\":");
        rc |= put_json(&j->piece, &j->answer.text);
    }
    rc |= k3_buf_puts(&j->piece, ",\"logprobs\":");
    rc |= k3_http_put_all_logprobs(j);
    return rc | k3_buf_printf(&j->piece, ",\"finish_reason\":\"%s\"}", k3_http_finish_reason(j));
}

int k3_http_whole(struct k3_http_job *j)
{
    int rc = put_head(j, j->api == K3_HTTP_CHAT ? "chat.completion" : "text_completion");

    rc |= k3_buf_puts(&j->piece, ",\"choices\":[");
    for (unsigned i = 0; i < j->c.n; i++) {
        struct k3_http_job *one = &j->first[i];

        if (one != j)
            one->piece.len_bytes = 0;
        rc |= i ? k3_buf_puts(&j->piece, ",") : 0;
        rc |= put_choice(one);
        if (one != j)
            rc |= k3_buf_append(&j->piece, one->piece.bytes, one->piece.len_bytes);
    }
    rc |= k3_buf_puts(&j->piece, "],");
    rc |= put_usage(j);
    rc |= k3_buf_puts(&j->piece, ",");
    rc |= put_timings(j);
    return rc | k3_buf_puts(&j->piece, "}\n");
}
