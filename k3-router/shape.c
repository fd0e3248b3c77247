/* The object of --json and of a line of --lines. */
#include <errno.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

static double seconds(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0;
}

double k3_ask_rate(const struct k3_ask *a)
{
    double decode_s = seconds(a->first_ns, a->end_ns);

    return !a->resumed && decode_s > 0 ? (double)(a->generated.n - 1) / decode_s : 0;
}

static int put_text(struct k3_buf *out, const char *key, bool known, const struct k3_buf *text)
{
    int rc = k3_buf_printf(out, ",\"%s\":", key);

    return rc | (known ? k3_buf_json(out, text->bytes, text->len_bytes) : k3_buf_puts(out, "null"));
}

static int put_calls(struct k3_buf *out, const struct k3_exchange *x)
{
    const struct k3_answer *a = &x->answer;
    const char *comma = "";
    int rc = k3_buf_puts(out, ",\"tool_calls\":[");

    for (size_t i = 0; i < a->n_calls; i++) {
        if (!a->call[i].complete)
            continue;
        rc |= k3_buf_printf(out, "%s{\"id\":\"call_%.20s%04zx\",\"type\":\"function\",\"function\":{\"name\":", comma, x->ask.id,
                            i & 0xffff);
        rc |= k3_buf_json(out, a->call[i].name.bytes, a->call[i].name.len_bytes);
        rc |= k3_buf_puts(out, ",\"arguments\":");
        rc |= k3_buf_json(out, a->call[i].arguments.bytes, a->call[i].arguments.len_bytes);
        rc |= k3_buf_puts(out, "}}");
        comma = ",";
    }
    return rc | k3_buf_puts(out, "]");
}

static int put_answer(struct k3_buf *out, const struct k3_exchange *x)
{
    const struct k3_ask *a = &x->ask;
    int rc = k3_buf_puts(out, "\"prompt_ids\":");

    rc |= k3_buf_json_ids(out, &a->prompt);
    rc |= k3_buf_puts(out, ",\"generated_ids\":");
    rc |= k3_buf_json_ids(out, &a->generated);
    if (a->logprobs.n_each) {
        rc |= k3_buf_puts(out, ",\"logprobs\":");
        rc |= k3_logprobs_json(&a->logprobs, out);
    }
    rc |= put_text(out, "text", x->answer.t != NULL, &x->answer.text);
    rc |= put_text(out, "reasoning", x->answer.mode == K3_ANSWER_CHAT, &x->answer.thinking);
    rc |= put_calls(out, x);
    return rc | (a->stop_id < 0 ? k3_buf_puts(out, ",\"stop_id\":null,")
                                : k3_buf_printf(out, ",\"stop_id\":%lld,", (long long)a->stop_id));
}

static int put_usage(struct k3_buf *out, const struct k3_ask *a)
{
    return k3_buf_printf(out, ",\"usage\":{\"prompt_tokens\":%zu,\"cached_tokens\":%zu,\"completion_tokens\":%zu,"
                         "\"total_tokens\":%zu},\"seed\":\"%llu\","
                         "\"temperature\":%.10g,\"timing\":{\"first_token_s\":%.6f,\"total_s\":%.6f,\"tokens_per_s\":%.3f}",
                         a->prompt.n, a->n_cached, a->generated.n, a->prompt.n + a->generated.n, (unsigned long long)a->params.seed,
                         a->params.temperature, seconds(a->start_ns, a->first_ns),
                         seconds(a->start_ns, a->end_ns ? a->end_ns : k3_now_ns()), k3_ask_rate(a));
}

int k3_exchange_json(const struct k3_exchange *x, const struct k3_line_tag *tag, const struct k3_err *err, struct k3_buf *out)
{
    const struct k3_ask *a = &x->ask;
    bool asked = a->id[0], failed = err && err->code;
    const char *why = x->answer.n_complete && a->end != K3_ASK_CANCELLED ? "tool_calls" : k3_ask_end_name(a->end);
    int rc = k3_buf_puts(out, "{");

    if (tag)
        rc |= k3_buf_printf(out, "\"index\":%llu,\"crc\":\"%08x\",", (unsigned long long)tag->index, tag->crc);
    if (tag && tag->id)
        rc |= k3_buf_printf(out, "\"id\":%s,", tag->id);
    else if (asked)
        rc |= k3_buf_printf(out, "\"id\":\"%s\",", a->id);
    if (asked)
        rc |= put_answer(out, x);
    rc |= k3_buf_printf(out, "\"finish_reason\":\"%s\"", failed ? "error" : why);
    if (failed) {
        rc |= k3_buf_printf(out, ",\"code\":%d,\"error\":", err->exit_status);
        rc |= k3_buf_json(out, err->text, k3_utf8_check(err->text, strlen(err->text)));
    }
    if (asked)
        rc |= put_usage(out, a);
    rc |= k3_buf_puts(out, "}");
    return rc ? -ENOMEM : 0;
}
