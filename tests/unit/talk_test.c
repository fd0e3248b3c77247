/* k3-router/talk.c: a conversation gives the ids that its messages give, a file of it gives it again, bad files are refused and
 * change nothing; and the entries of a history file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>

#include "k3-router/talk.h"
#include "k3-router/terminal.h"
#include "tests/unit/vocab.h"

struct world { struct k3_tokenizer *t; struct k3_chat *chat; char dir[64], path[96]; };

static int open_world(void **state)
{
    static struct world w;
    struct k3_err err = K3_ERR_INIT;

    w.t = vocab_demo();
    assert_int_equal(k3_chat_open(&w.chat, w.t, &err), 0);
    strcpy(w.dir, "/tmp/k3-talk-XXXXXX");
    assert_non_null(mkdtemp(w.dir));
    snprintf(w.path, sizeof(w.path), "%s/talk", w.dir);
    *state = &w;
    return 0;
}

static int close_world(void **state)
{
    struct world *w = *state;
    char command[96];

    k3_chat_close(w->chat);
    k3_tokenizer_close(w->t);
    snprintf(command, sizeof(command), "rm -rf %s", w->dir);
    return system(command);
}

static struct k3_text text(const char *s)
{
    return (struct k3_text){ s, strlen(s) };
}

/* Three turns, with everything that JSON has to escape. */
static const char system_text[] = "Be \"brief\".\n\\", user_text[] = "What\tis\nthe capital of <|open|>?\x01", answer_text[] = "Österreich: Wien.",
                  reasoning_text[] = "Let me\nthink </think>";

static void fill(struct k3_talk *t)
{
    assert_int_equal(k3_talk_reset(t, text(system_text)), 0);
    assert_int_equal(k3_talk_add(t, "user", text(user_text), text("")), 0);
    assert_int_equal(k3_talk_add(t, "assistant", text(answer_text), text(reasoning_text)), 0);
}

static void render(const struct world *w, const struct k3_talk *t, bool think, struct k3_ids *out)
{
    struct k3_err err = K3_ERR_INIT;
    bool thinking = think;

    out->n = 0;
    if (k3_talk_render(t, w->chat, text("And Italy?"), "high", &thinking, out, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(thinking, think);
}

static void ids_are_those_of_the_messages(void **state)
{
    struct world *w = *state;
    struct k3_talk t = { 0 };
    struct k3_ids got = { 0 }, want = { 0 };
    struct k3_text part[4] = { text(system_text), text(user_text), text(answer_text), text("And Italy?") };
    struct k3_chat_message m[4] = { { .role = K3_CHAT_SYSTEM, .parts = &part[0], .n_parts = 1 },
                                    { .role = K3_CHAT_USER, .parts = &part[1], .n_parts = 1 },
                                    { .role = K3_CHAT_ASSISTANT, .parts = &part[2], .n_parts = 1, .reasoning = text(reasoning_text) },
                                    { .role = K3_CHAT_USER, .parts = &part[3], .n_parts = 1 } };
    struct k3_err err = K3_ERR_INIT;

    fill(&t);
    for (int think = 0; think < 2; think++) {
        struct k3_chat_opts o = { .thinking = think, .effort = "high" };
        want.n = 0;
        assert_int_equal(k3_chat_render(w->chat, m, 4, &o, &want, &err), 0);
        render(w, &t, think, &got);
        assert_ids(&got, &want, "a conversation");
    }
    k3_ids_free(&got);
    k3_ids_free(&want);
    k3_talk_free(&t);
}

static void a_file_gives_the_same_ids(void **state)
{
    struct world *w = *state;
    struct k3_talk t = { 0 }, again = { 0 };
    struct k3_ids got = { 0 }, want = { 0 };
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    fill(&t);
    assert_int_equal(k3_talk_save(&t, w->path, false, &err), 0);
    assert_int_equal(stat(w->path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(k3_talk_load(&again, w->chat, w->path, &err), 0);
    assert_int_equal(again.n, 3);
    render(w, &t, true, &want);
    render(w, &again, true, &got);
    assert_ids(&got, &want, "a file");
    /* One that is there stays as it is, unless it is to be replaced. */
    assert_int_equal(k3_talk_reset(&again, text("")), 0);
    assert_int_equal(k3_talk_save(&again, w->path, false, &err), -EEXIST);
    assert_non_null(strstr(err.text, "there is a file already"));
    assert_int_equal(k3_talk_load(&again, w->chat, w->path, &err), 0);
    assert_int_equal(again.n, 3);
    assert_int_equal(k3_talk_reset(&again, text("")), 0);
    assert_int_equal(k3_talk_save(&again, w->path, true, &err), 0);
    assert_int_equal(k3_talk_load(&t, w->chat, w->path, &err), 0);
    assert_int_equal(t.n, 0);
    assert_int_equal(k3_talk_save(&t, "/nonexistent/x", false, &err), -ENOENT);
    k3_ids_free(&got);
    k3_ids_free(&want);
    k3_talk_free(&t);
    k3_talk_free(&again);
}

static void what_others_write_is_read(void **state)
{
    static const char *const good[] = {
        "[]", "{\"messages\":[]}", "[{\"role\":\"user\",\"content\":\"x\"}]",
        "{\"model\":\"m\",\"temperature\":1,\"tools\":[],\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}]}",
        "[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"1\"}]",
    };
    struct world *w = *state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_talk t = { 0 };
    struct k3_ids ids = { 0 };

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        if (k3_talk_parse(&t, w->chat, good[i], strlen(good[i]), &err) < 0)
            fail_msg("%s: %s", good[i], err.text);
        render(w, &t, true, &ids);
    }
    k3_ids_free(&ids);
    k3_talk_free(&t);
}

static void bad_files_are_refused(void **state)
{
    static const struct { const char *text, *why; } bad[] = {
        { "", "JSON" },
        { "{\"messages\":[{\"role\":\"user\"", "JSON" },
        { "\"x\"", "\"messages\" is expected" },
        { "{\"messages\":{}}", "\"messages\" is expected" },
        { "[1]", "messages[0]" },
        { "[{\"role\":\"robot\",\"content\":\"x\"}]", "messages[0].role" },
        { "[{\"role\":\"user\",\"content\":1}]", "messages[0].content" },
        { "[{\"role\":\"assistant\",\"content\":\"x\",\"partial\":true}]", "messages[0].partial" },
        { "{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],\"messages\":[]}", "tools" },
        { "[{\"role\":\"user\",\"content\":\"\xff\"}]", "UTF-8" },
    };
    struct world *w = *state;
    struct k3_talk t = { 0 };

    fill(&t);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct k3_err err = K3_ERR_INIT;
        if (k3_talk_parse(&t, w->chat, bad[i].text, strlen(bad[i].text), &err) >= 0)
            fail_msg("%s is taken", bad[i].text);
        if (!strstr(err.text, bad[i].why) || strchr(err.text, '\n'))
            fail_msg("%s: \"%s\" does not say \"%s\"", bad[i].text, err.text, bad[i].why);
        assert_int_equal(t.n, 3);
    }
    k3_talk_free(&t);
}

static void collect(void *arg, struct k3_text entry)
{
    struct k3_buf *b = arg;

    k3_buf_printf(b, "%s|", entry.bytes);
}

static void history_passes_over_what_is_torn(void **state)
{
    static const char file[] = "_HiStOrY_V2_\n\"one\"\n\n\"a\\nb\"\n{}\n\"nul\\u0000\"\n\"tor\n\"last\"";
    struct k3_buf b = { 0 };

    (void)state;
    assert_int_equal(k3_history_parse(file, sizeof(file) - 1, collect, &b), 3);
    k3_buf_append(&b, "", 1);
    assert_string_equal(b.bytes, "one|a\nb|last|");
    k3_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_are_those_of_the_messages), cmocka_unit_test(a_file_gives_the_same_ids),
        cmocka_unit_test(what_others_write_is_read),     cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(history_passes_over_what_is_torn),
    };

    return cmocka_run_group_tests(tests, open_world, close_world);
}
