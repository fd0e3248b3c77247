/* k3-router/lines_read.c, lines_body.c, lines_out.c: what a line is, what a JSON line may say, and the file of --out after any
 * death of its writer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "k3-router/lines.h"
#include "model/crc32c.h"
#include "tests/unit/vocab.h"

/* ---- lines ---- */

/* Reads all lines of a text that comes in pieces of step bytes; gives "LENGTH:TEXT|" of each. */
static void read_all(const char *bytes, size_t len_bytes, size_t step, size_t max_bytes, struct k3_buf *out)
{
    struct k3_line_reader *in = calloc(1, sizeof(*in));
    struct k3_err err = K3_ERR_INIT;
    struct k3_line line;
    int pipe_fd[2], rc;
    pid_t pid;

    assert_int_equal(pipe(pipe_fd), 0);
    pid = fork();
    if (pid == 0) {
        for (size_t at = 0; at < len_bytes; at += step)
            if (write(pipe_fd[1], bytes + at, len_bytes - at < step ? len_bytes - at : step) < 0)
                _exit(1);
        _exit(0);
    }
    close(pipe_fd[1]);
    *in = (struct k3_line_reader){ .fd = pipe_fd[0], .name = "test", .max_bytes = max_bytes };
    out->len_bytes = 0;
    while ((rc = k3_line_next(in, &line, &err)) > 0) {
        k3_buf_printf(out, "%llu:", (unsigned long long)line.len_bytes);
        k3_buf_append(out, line.text.bytes, line.text.len_bytes);
        k3_buf_puts(out, "|");
        if (line.len_bytes <= max_bytes)
            assert_int_equal(line.crc, k3_crc32c(0, line.text.bytes, line.text.len_bytes));
        k3_buf_free(&line.text);
    }
    assert_int_equal(rc, 0);
    close(pipe_fd[0]);
    free(in);
    k3_buf_append(out, "", 1);
}

static void ends_of_lines(void **state)
{
    static const struct { const char *text, *want; } row[] = {
        { "", "" },
        { "a", "1:a|" },
        { "a\n", "1:a|" },
        { "\n", "0:|" },
        { "a\nb", "1:a|1:b|" },
        { "a\r\nb\r\n", "1:a|1:b|" },
        { "a\rb\n", "3:a\rb|" },
        { "a\r\r\n", "2:a\r|" },
        { "\r\n\r\n", "0:|0:|" },
        { "a\r", "1:a|" },
        { "a\n\nb\n\n", "1:a|0:|1:b|0:|" },
    };
    struct k3_buf b = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
        for (size_t step = 1; step < 4; step++) {
            read_all(row[i].text, strlen(row[i].text), step, 100, &b);
            if (strcmp(b.bytes, row[i].want) != 0)
                fail_msg("\"%s\" in steps of %zu gives %s", row[i].text, step, b.bytes);
        }
    read_all("a\0b\n\0", 5, 2, 100, &b);
    assert_memory_equal(b.bytes, "3:a\0b|1:\0|", 11);
    read_all("abcdef\ngh\n", 10, 3, 4, &b); /* too long: its length is known, its text is cut */
    assert_string_equal(b.bytes, "6:abcd|2:gh|");
    k3_buf_free(&b);
}

/* ---- JSON lines ---- */

static struct k3_router router;

static void body(const char *text, const char *why, struct k3_prompt *p, struct k3_line_body *b)
{
    struct k3_err err = K3_ERR_INIT;
    int rc;

    *p = (struct k3_prompt){ .temperature = -1, .min_p = -1, .top_k = UINT32_MAX, .thinking = true };
    rc = k3_line_body(b, &router, text, strlen(text), p, &err);
    if (!why && rc < 0)
        fail_msg("%s: %s", text, err.text);
    if (why && (rc >= 0 || err.exit_status != K3_EXIT_REFUSED || !strstr(err.text, why) || strchr(err.text, '\n')))
        fail_msg("%s: %d, exit %d, \"%s\" and not \"%s\"", text, rc, err.exit_status, err.text, why);
}

static void a_body_is_honoured(void **state)
{
    struct k3_line_body b;
    struct k3_prompt p;

    (void)state;
    body("{\"id\":\"a\\\"b\",\"prompt\":\"Hello!\",\"max_tokens\":7,\"temperature\":0.5,\"top_p\":0.25,\"top_k\":3,\"min_p\":0,"
         "\"seed\":18446744073709551615,\"stop\":[\"x\",\"yz\"],\"model\":\"any\"}", NULL, &p, &b);
    assert_string_equal(b.id.bytes, "\"a\\\"b\"");
    assert_int_equal(p.max_tokens, 7);
    assert_true(p.temperature == 0.5 && p.top_p == 0.25 && p.min_p == 0);
    assert_int_equal(p.top_k, 3);
    assert_true(p.seeded && p.seed == UINT64_MAX);
    assert_int_equal(p.n_stop, 2);
    assert_string_equal(p.stop[1], "yz");
    assert_true(p.ids.n > 0);
    k3_ids_free(&p.ids);
    k3_line_body_free(&b);
    body("{\"id\":12,\"messages\":[{\"role\":\"user\",\"content\":\"Hello!\"}],\"stop\":\"x\",\"reasoning_effort\":\"none\","
         "\"tool_choice\":\"none\"}", NULL, &p, &b);
    assert_string_equal(b.id.bytes, "12");
    assert_false(p.seeded);
    assert_false(p.thinking);
    assert_int_equal(p.max_calls, 0);
    k3_ids_free(&p.ids);
    k3_line_body_free(&b);
}

static void a_bad_body_is_refused_by_name(void **state)
{
    static const struct { const char *text, *why; } row[] = {
        { "{", "JSON" },
        { "[]", "a JSON object is expected" },
        { "{}", "either \"messages\" or \"prompt\"" },
        { "{\"prompt\":\"x\",\"messages\":[]}", "either \"messages\" or \"prompt\"" },
        { "{\"prompt\":\"\"}", "prompt: the prompt is empty" },
        { "{\"prompt\":1}", "prompt: must be a text" },
        { "{\"prompt\":\"x\",\"stream\":true}", "\"stream\": --json-lines" },
        { "{\"prompt\":\"x\",\"tools\":[]}", "\"tools\": --json-lines with \"prompt\"" },
        { "{\"prompt\":\"x\",\"id\":[]}", "id: must be" },
        { "{\"prompt\":\"x\",\"seed\":-1}", "seed: must be a whole number" },
        { "{\"prompt\":\"x\",\"seed\":1.5}", "seed: must be a whole number" },
        { "{\"prompt\":\"x\",\"max_tokens\":0}", "max_tokens: must be a whole number from 1" },
        { "{\"prompt\":\"x\",\"top_p\":0}", "top_p: must be a number" },
        { "{\"prompt\":\"x\",\"temperature\":\"hot\"}", "temperature: must be a number" },
        { "{\"prompt\":\"x\",\"stop\":\"\"}", "stop: must be a text" },
        { "{\"prompt\":\"x\",\"stop\":[1]}", "stop: must be a text" },
        { "{\"prompt\":\"x\",\"stop\":\"a\\u0000\"}", "without NUL" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"foo\":1}", "\"foo\"" },
        { "{\"messages\":[{\"role\":\"nobody\",\"content\":\"x\"}]}", "messages[0].role" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"response_format\":{\"type\":\"json_object\"}}", "response_format" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
          "\"tool_choice\":\"required\"}", "tool_choice" },
    };
    struct k3_line_body b;
    struct k3_prompt p;

    (void)state;
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        body(row[i].text, row[i].why, &p, &b);
        k3_ids_free(&p.ids);
        k3_line_body_free(&b);
    }
    router.mode = K3_ANSWER_RAW;
    body("{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", "absent with --raw", &p, &b);
    k3_ids_free(&p.ids);
    k3_line_body_free(&b);
    router.mode = K3_ANSWER_CHAT;
}

/* ---- the file of --out ---- */

#define ONE "{\"index\":0,\"crc\":\"00000001\",\"text\":\"x\",\"finish_reason\":\"stop\"}\n"
#define TWO "{\"index\":5,\"crc\":\"ffffffff\",\"finish_reason\":\"error\",\"code\":2,\"error\":\"why\"}\n"

static char path[64];

static void put_file(const char *bytes, size_t len_bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

    assert_true(fd >= 0 && write(fd, bytes, len_bytes) == (ssize_t)len_bytes);
    close(fd);
}

static void assert_file(const char *want)
{
    struct k3_buf b = { 0 };

    assert_int_equal(k3_file_read(&b, path, 1 << 20, NULL), 0);
    k3_buf_append(&b, "", 1);
    assert_string_equal(b.bytes, want);
    k3_buf_free(&b);
}

static void a_torn_line_is_cut_off(void **state)
{
    static const char tail[] = ONE;
    static const char zeros[] = "\0\0\0\0\0\0\n";
    static const char *const others[] = { "{\"index\":7,\"mine\":1}", "{\"index\":\"a\"}", "{\"a\":1}", "[" };
    struct k3_lines_out o, other;
    struct k3_err err = K3_ERR_INIT;
    struct k3_buf b = { 0 };

    (void)state;
    for (size_t cut = 0; cut < sizeof(tail) - 1; cut++) { /* every place at which a write can end */
        b.len_bytes = 0;
        k3_buf_puts(&b, TWO);
        k3_buf_append(&b, tail, cut);
        put_file(b.bytes, b.len_bytes);
        if (k3_lines_out_open(&o, path, &err) < 0)
            fail_msg("%zu: %s", cut, err.text);
        assert_null(k3_lines_out_find(&o, 0));
        assert_int_equal(k3_lines_out_find(&o, 5)->code, 2);
        assert_int_equal(k3_lines_out_find(&o, 5)->crc, 0xffffffff);
        assert_file(TWO);
        assert_int_equal(k3_lines_out_open(&other, path, &err), -EBUSY);
        k3_lines_out_close(&other);
        assert_int_equal(k3_lines_out_write(&o, ONE, strlen(ONE), &err), 0);
        k3_lines_out_close(&o);
        assert_file(TWO ONE);
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) { /* the text of somebody else, without a line end */
        put_file(others[i], strlen(others[i]));
        assert_int_equal(k3_lines_out_open(&o, path, &err), -EINVAL);
        k3_lines_out_close(&o);
        assert_file(others[i]);
    }
    for (size_t n = 1; n < sizeof(zeros); n++) { /* blocks that never reached the disk */
        b.len_bytes = 0;
        k3_buf_puts(&b, ONE);
        k3_buf_append(&b, zeros + sizeof(zeros) - 1 - n, n);
        if (n > 1) { /* a line end alone is none of ours */
            put_file(b.bytes, b.len_bytes);
            assert_int_equal(k3_lines_out_open(&o, path, &err), 0);
            assert_int_equal(o.n_done, 1);
            k3_lines_out_close(&o);
            assert_file(ONE);
        }
    }
    k3_buf_free(&b);
}

static void other_files_are_left_alone(void **state)
{
    static const char *const text[] = {
        "important",
        "important\n",
        "\n",
        "{}\n",
        "{\"index\":-1,\"crc\":\"00000001\",\"finish_reason\":\"stop\"}\n",
        "{\"index\":0,\"crc\":\"1\",\"finish_reason\":\"stop\"}\n",
        "{\"index\":0,\"crc\":\"00000001\"}\n",
        "{\"index\":0,\"crc\":\"00000001\",\"finish_reason\":\"error\"}\n",
        ONE "{\"index\":1,\n" TWO,
        ONE "{\"index\":1,\n",
        ONE ONE,
    };
    struct k3_lines_out o;

    (void)state;
    for (size_t i = 0; i < sizeof(text) / sizeof(text[0]); i++) {
        struct k3_err err = K3_ERR_INIT;
        put_file(text[i], strlen(text[i]));
        if (k3_lines_out_open(&o, path, &err) >= 0 || err.exit_status != K3_EXIT_REFUSED)
            fail_msg("%s is taken", text[i]);
        k3_lines_out_close(&o);
        assert_file(text[i]);
    }
    {
        struct k3_err err = K3_ERR_INIT;
        assert_int_equal(k3_lines_out_open(&o, "/dev/null", &err), -EINVAL);
        k3_lines_out_close(&o);
        assert_int_equal(k3_lines_out_open(&o, "/nonexistent/x", &err), -ENOENT);
        k3_lines_out_close(&o);
    }
}

/* ---- the object ---- */

static void an_object_has_the_calls_that_are_complete(void **state)
{
    struct k3_answer_call call[2] = { { .complete = false }, { .complete = true } };
    struct k3_exchange x = { .ask = K3_ASK_INIT };
    struct k3_line_tag tag = { 3, 0xab, "\"mine\"" };
    struct k3_buf b = { 0 };
    struct k3_json_doc d;
    const struct k3_json *calls, *v;

    (void)state;
    strcpy(x.ask.id, "0123456789abcdef0123456789abcdef");
    x.ask.end = K3_ASK_STOP;
    k3_buf_puts(&call[0].name, "torn");
    k3_buf_puts(&call[1].name, "f");
    k3_buf_puts(&call[1].arguments, "{\"a\":1}");
    k3_answer_open(&x.answer, router.t, K3_ANSWER_CHAT, false, NULL, 0, NULL, NULL);
    x.answer.call = call;
    x.answer.n_calls = 2;
    x.answer.n_complete = 1;
    assert_int_equal(k3_exchange_json(&x, &tag, NULL, &b), 0);
    assert_int_equal(k3_json_parse(&d, b.bytes, b.len_bytes, NULL), 0);
    calls = k3_json_get(d.node, "tool_calls");
    assert_int_equal(calls->n, 1);
    assert_true(k3_text_is(k3_json_get(calls->child, "id")->text, "call_0123456789abcdef01230001"));
    v = k3_json_get(calls->child, "function");
    assert_true(k3_text_is(k3_json_get(v, "name")->text, "f"));
    assert_true(k3_text_is(k3_json_get(v, "arguments")->text, "{\"a\":1}"));
    assert_true(k3_text_is(k3_json_get(d.node, "finish_reason")->text, "tool_calls"));
    assert_true(k3_text_is(k3_json_get(d.node, "id")->text, "mine"));
    assert_true(k3_text_is(k3_json_get(d.node, "crc")->text, "000000ab"));
    x.answer.call = NULL;
    x.answer.n_calls = 0;
    k3_answer_close(&x.answer);
    for (size_t i = 0; i < 2; i++) {
        k3_buf_free(&call[i].name);
        k3_buf_free(&call[i].arguments);
    }
    k3_json_free(&d);
    k3_buf_free(&b);
}

static int open_world(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    int fd;

    (void)state;
    router.t = vocab_demo();
    assert_int_equal(k3_chat_open(&router.chat, router.t, &err), 0);
    router.mode = K3_ANSWER_CHAT;
    router.thinking = true;
    strcpy(path, "/tmp/k3-lines-XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    unlink(path);
    k3_chat_close(router.chat);
    k3_tokenizer_close(router.t);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_of_lines),          cmocka_unit_test(a_body_is_honoured),
        cmocka_unit_test(a_bad_body_is_refused_by_name), cmocka_unit_test(a_torn_line_is_cut_off),
        cmocka_unit_test(other_files_are_left_alone), cmocka_unit_test(an_object_has_the_calls_that_are_complete),
    };

    return cmocka_run_group_tests(tests, open_world, close_world);
}
