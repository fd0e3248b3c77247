/* k3-router/chat_request.c with chat.c and parse_out.c: bodies to prompt ids (the published ids of spec/text.md 2.7), every
 * refusal, injection in every place, and turns through renderer and parser and back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

#include "k3-router/answer.h"
#include "k3-router/chat_request.h"
#include "tests/unit/vocab.h"

/* ---- rendering ---- */

/* Renders a body, or says why not: 0 or the code. */
static int try_body(const struct k3_chat *c, const char *body, size_t len_bytes, const struct k3_chat_opts *d, bool last_turn,
                    struct k3_ids *out, char param[K3_PARAM_BYTES], struct k3_err *err)
{
    struct k3_chat_request q = { 0 };
    struct k3_json_doc doc;
    int rc = k3_json_parse(&doc, body, len_bytes, err);

    out->n = 0;
    param[0] = 0;
    if (rc < 0)
        return rc;
    rc = k3_chat_request_read(&q, doc.node, d, err);
    if (rc == 0) {
        q.opts.no_generation_prompt = last_turn;
        rc = k3_chat_request_render(&q, c, out, err);
    }
    strcpy(param, q.param);
    k3_chat_request_free(&q);
    k3_json_free(&doc);
    return rc;
}


/* A line of chat_ids.jsonl is nearly a body: its "opt" are the encoder's options. */
static void one_vector(const struct k3_chat *c, const char *line)
{
    struct k3_chat_opts d = { .thinking = true };
    struct k3_json_doc doc;
    const struct k3_json *opt, *v;
    struct k3_ids got = { 0 }, want = { 0 };
    struct k3_buf body = { 0 };
    struct k3_err err = K3_ERR_INIT;
    char param[K3_PARAM_BYTES];
    static const char *const member[] = { "messages", "tools" }, *const option[] = { "tool_choice", "response_format" };

    assert_int_equal(k3_json_parse(&doc, line, strlen(line), &err), 0);
    opt = k3_json_get(doc.node, "opt");
    v = k3_json_get(opt, "thinking");
    d.thinking = !v || v->type == K3_JSON_TRUE;
    v = k3_json_value(opt, "thinking_effort");
    d.effort = v ? v->text.bytes : NULL;
    k3_buf_puts(&body, "{\"model\":\"k3\"");
    for (int i = 0; i < 4; i++) {
        const char *name = i < 2 ? member[i] : option[i - 2];
        v = k3_json_get(i < 2 ? doc.node : opt, name);
        if (v) {
            k3_buf_printf(&body, ",\"%s\":", name);
            k3_json_write(&body, v, K3_JSON_SPACED);
        }
    }
    k3_buf_puts(&body, "}");
    v = k3_json_get(opt, "add_generation_prompt");
    if (try_body(c, body.bytes, body.len_bytes, &d, v && v->type == K3_JSON_FALSE, &got, param, &err) < 0)
        fail_msg("%.60s: %s", line, err.text);
    for (v = k3_json_get(doc.node, "ids")->child; v; v = v->next)
        k3_ids_push(&want, (uint32_t)atoi(v->text.bytes));
    assert_ids(&got, &want, k3_json_get(doc.node, "name")->text.bytes);
    k3_json_free(&doc);
    k3_buf_free(&body);
    k3_ids_free(&got);
    k3_ids_free(&want);
}

static void test_published_chats(void **state)
{
    struct k3_tokenizer *t = vocab_released();
    FILE *f = fopen("tests/data/chat_ids.jsonl", "r");
    struct k3_chat *c = NULL;
    char *line = NULL;
    size_t cap = 0, n = 0;

    (void)state;
    assert_non_null(f);
    if (!t) {
        fclose(f);
        skip();
    }
    assert_int_equal(k3_chat_open(&c, t, NULL), 0);
    while (getline(&line, &cap, f) > 0) {
        one_vector(c, line);
        n++;
    }
    assert_int_equal(n, 23);
    fclose(f);
    free(line);
    k3_chat_close(c);
    k3_tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_chats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
