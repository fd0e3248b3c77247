/* Fuzz target: what k3-router reads of files and lines: a line of --json-lines, of the file of --out, a conversation of /load,
 * a history.
 *
 * A refusal has words of one line.  What was taken of a conversation can be written, and taken again, and gives the same ids. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/lines.h"
#include "k3-router/terminal.h"
#include "tests/fuzz/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void check_refusal(const struct k3_err *err)
{
    if (!err->text[0] || strchr(err->text, '\n'))
        abort();
}

static void try_body(struct k3_router *r, const char *text, size_t len)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_line_body b;
    struct k3_prompt p;

    k3_prompt_init(&p, r);
    if (k3_line_body(&b, r, text, len, &p, &err) < 0)
        check_refusal(&err);
    else if (p.ids.n == 0)
        abort();
    k3_ids_free(&p.ids);
    k3_line_body_free(&b);
}

static void try_talk(struct k3_router *r, const char *text, size_t len)
{
    struct k3_text user = { "x", 1 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_talk t = { 0 }, again = { 0 };
    struct k3_ids a = { 0 }, b = { 0 };
    struct k3_buf json = { 0 };
    bool thinking = true;

    if (k3_talk_parse(&t, r->chat, text, len, &err) < 0) {
        check_refusal(&err);
        return;
    }
    if (k3_talk_json(&t, &json) < 0 || k3_talk_parse(&again, r->chat, json.bytes, json.len_bytes, NULL) < 0 ||
        k3_talk_render(&t, r->chat, user, NULL, &thinking, &a, NULL) < 0 ||
        k3_talk_render(&again, r->chat, user, NULL, &thinking, &b, NULL) < 0 || a.n != b.n ||
        memcmp(a.id, b.id, a.n * sizeof(*a.id)) != 0)
        abort();
    k3_talk_free(&t);
    k3_talk_free(&again);
    k3_ids_free(&a);
    k3_ids_free(&b);
    k3_buf_free(&json);
}

static void count(void *arg, struct k3_text entry)
{
    size_t *n = arg;

    *n += strlen(entry.bytes) == entry.len_bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct k3_router r;
    struct k3_lines_done done;
    size_t n = 0;

    if (!r.t) {
        r.t = fuzz_vocabulary();
        if (k3_chat_open(&r.chat, r.t, NULL) < 0)
            abort();
        r.opt.top_k = UINT32_MAX;
        r.mode = K3_ANSWER_CHAT;
    }
    if (len == 0)
        return 0;
    switch (data[0] % 4) {
    case 0: try_body(&r, (const char *)data + 1, len - 1); break;
    case 1: k3_lines_out_parse(&done, (const char *)data + 1, len - 1); break;
    case 2: try_talk(&r, (const char *)data + 1, len - 1); break;
    default:
        if (k3_history_parse((const char *)data + 1, len - 1, count, &n) != n)
            abort();
    }
    return 0;
}
