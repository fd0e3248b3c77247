/* constrain/constraint.c: the channels of a constrained answer, id by id, on the demo model's vocabulary; walks end in whole answers. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "constrain/constraint.h"
#include "k3-router/chat.h"
#include "tests/unit/vocab.h"

#define CONTROL "\"control\":{\"eos\":1281,\"end_of_msg\":1282,\"open\":1283,\"close\":1284,\"sep\":1285}"
#define N_VOCAB 1536u

static struct k3_tokenizer *t;
static struct k3_vocab *v;
static struct k3_walk *w;

static int setup(void **state)
{
    (void)state;
    t = vocab_demo();
    assert_int_equal(k3_vocab_open(&v, DEMO_DIR, NULL), 0);
    assert_int_equal(k3_walk_new(&w, NULL), 0);
    assert_int_equal(k3_tokenizer_base(t), 1280);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    k3_tokenizer_close(t);
    k3_vocab_free(v);
    k3_walk_free(w);
    return 0;
}

static struct k3_constraint *constraint(const char *spec)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_constraint *c = NULL;
    cJSON *o = cJSON_Parse(spec);

    if (k3_constraint_new(&c, o, v, N_VOCAB, &err) < 0)
        fail_msg("%s: %s", spec, err.text);
    cJSON_Delete(o);
    return c;
}

/* The ids of a text in which <open>, <close>, <sep>, <eom>, <eos> and <pad> are special ids. */
static void ids_of(const char *text, struct k3_ids *out)
{
    static const struct { const char *name; uint32_t id; } special[] = {
        { "<open>", 1283 }, { "<close>", 1284 }, { "<sep>", 1285 }, { "<eom>", 1282 }, { "<eos>", 1281 }, { "<pad>", 1535 },
    };

    while (*text) {
        size_t n = 0, k = 0;

        for (k = 0; k < 6 && strncmp(text, special[k].name, strlen(special[k].name)); k++)
            ;
        if (k < 6) {
            k3_ids_push(out, special[k].id);
            text += strlen(special[k].name);
            continue;
        }
        do
            n++;
        while (text[n] && text[n] != '<');
        assert_int_equal(k3_tokenizer_encode(t, text, n, out, NULL), 0);
        text += n;
    }
}

/* Takes the ids of text: true, or the mask does not have one of them.  Mask and take must agree. */
static bool takes(struct k3_constraint *c, const char *text)
{
    struct k3_ids ids = { 0 };
    bool all = true;

    ids_of(text, &ids);
    for (size_t i = 0; i < ids.n && all; i++) {
        uint64_t allowed[N_VOCAB / 64];

        assert_int_equal(k3_constraint_mask(c, w, allowed), 0);
        all = k3_bit(allowed, ids.id[i]);
        assert_int_equal(k3_constraint_take(c, w, ids.id[i]), all);
    }
    k3_ids_free(&ids);
    return all;
}

#define THINK_END "<close>think<sep><open>response<sep>"
#define END "<close>response<sep><close>message<sep><eom>"
#define TOOLS ",\"tools\":[\"get_weather\",\"get\",\"a&b\\\"\"]"

static void takes_what_the_table_says(void **state)
{
    static const struct { const char *spec, *good, *bad; } table[] = { /* bad: not behind good */
        { "\"start\":\"think\",\"format\":\"json_object\"", "Hm, {<close>think<sep><open>response<sep>{\"a\": 1}" END, "<eom>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "", "<eom>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so", "<open>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so", "<pad>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so<close>", "response" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so<close>think", "<close>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so<close>thi", "<sep>" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so<close>think<sep>", "x" },
        { "\"start\":\"think\",\"format\":\"json_object\"", "so<close>think<sep><open>", "tools" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "{\"a\": [", "<close>" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "", "<close>" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "{}", "x" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "{}", "<eos>" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "{}<close>response<sep>", "<open>" },
        { "\"start\":\"response\",\"format\":\"json_object\"", "{}<close>response<sep><close>message<sep><eos>", "x" },
        { "\"start\":\"response\",\"format\":\"json_schema\",\"schema\":\"{\\\"type\\\":\\\"integer\\\"}\"", "12" END, "" },
        { "\"start\":\"response\",\"format\":\"json_schema\",\"schema\":\"{\\\"type\\\":\\\"integer\\\"}\"", "12", "." },
        /* with tools: a value, a value and calls, or calls alone */
        { "\"start\":\"response\",\"format\":\"json_object\"" TOOLS, "{}" END, "" },
        { "\"start\":\"response\",\"format\":\"json_object\"" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><close>call<sep>"
          "<close>tools<sep><close>message<sep><eom>", "" },
        { "\"start\":\"response\",\"format\":\"json_object\"" TOOLS, "<close>response<sep>", "<close>" },
        { "\"start\":\"response\",\"format\":\"json_object\"" TOOLS, "{}<close>response<sep><open>tools<sep>", "<close>" },
        { "\"start\":\"response\",\"format\":\"json_object\"" TOOLS, "{", "<close>" },
        /* a call must come */
        { "\"start\":\"think\",\"must_call\":true" TOOLS, "Hm" THINK_END "So be it.<close>response<sep><open>tools<sep><open>call tool=\"get_weather\" index=\"1\"<sep>"
          "<open>argument key=\"city of\" type=\"string\"<sep>{Ros<close>argument<sep><open>argument key=\"n\" type=\"number\"<sep>1<close>argument<sep><close>call<sep>"
          "<open>call tool=\"a&amp;b&quot;\" index=\"2\"<sep><close>call<sep><close>tools<sep><close>message<sep><eom>", "x" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "Yes<close>response<sep>", "<close>" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep>", "<close>" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep>", "x" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get_", "x" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get", "x" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"", "2" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep>", "<eom>" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><open>", "json" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><open>argument key=\"", "\"" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS, "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><open>argument key=\"x", "<sep>" },
        { "\"start\":\"response\",\"must_call\":true" TOOLS,
          "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><open>argument key=\"x\" type=\"", "date" },
        { "\"start\":\"response\",\"must_call\":true,\"one_call\":true" TOOLS,
          "<close>response<sep><open>tools<sep><open>call tool=\"get\" index=\"1\"<sep><close>call<sep>", "<open>" },
        { "\"start\":\"response\",\"must_call\":true,\"tools\":[\"get\"]", "<close>response<sep><open>tools<sep><open>call tool=\"get", "_" },
        { "\"start\":\"response\",\"must_call\":true,\"format\":\"json_object\"" TOOLS, "{}<close>response<sep>", "<close>" },
        { "\"start\":\"response\",\"must_call\":true,\"format\":\"json_object\"" TOOLS, "", "x" },
        { "\"start\":\"response\",\"must_call\":true,\"one_call\":false" TOOLS, "free text, {", "<eom>" },
    };
    char spec[1000];

    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        struct k3_constraint *c;

        snprintf(spec, sizeof(spec), "{" CONTROL ",%s}", table[i].spec);
        c = constraint(spec);
        if (!takes(c, table[i].good))
            fail_msg("%s does not take %s", table[i].spec, table[i].good);
        if (*table[i].bad && takes(c, table[i].bad))
            fail_msg("%s takes %s behind %s", table[i].spec, table[i].bad, table[i].good);
        k3_constraint_free(c);
    }
}

struct told { char text[8000]; unsigned n_calls, n_ended; bool named; };

static int on_text(void *arg, enum k3_channel channel, const char *text, size_t len)
{
    struct told *told = arg;

    if (channel == K3_OUT_RESPONSE && strlen(told->text) + len < sizeof(told->text))
        strncat(told->text, text, len);
    return 0;
}

static int on_call(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len)
{
    struct told *told = arg;
    struct k3_text name = { text, len };

    (void)index;
    if (event == K3_CALL_BEGIN) {
        told->n_calls++;
        told->named &= k3_text_is(name, "get") || k3_text_is(name, "get_weather") || k3_text_is(name, "a&b\"");
    }
    told->n_ended += event == K3_CALL_END;
    return 0;
}

/* Random ids of the mask, markers first more and more often, until the answer ends; what the parser makes of it. */
static void walks_end_in_whole_answers(void **state)
{
    static const char *const spec[] = {
        "{" CONTROL ",\"start\":\"think\",\"format\":\"json_schema\",\"schema\":\"{\\\"properties\\\":{\\\"a\\\":{\\\"maxLength\\\":9},\\\"b\\\":{\\\"type\\\":\\\"null\\\"}}}\"}",
        "{" CONTROL ",\"start\":\"response\",\"must_call\":true" TOOLS "}",
        "{" CONTROL ",\"start\":\"think\",\"must_call\":true,\"one_call\":true,\"format\":\"json_schema\",\"schema\":\"{\\\"enum\\\":[1,12,\\\"x\\\"]}\"" TOOLS "}",
        "{" CONTROL ",\"start\":\"response\",\"format\":\"json_schema\",\"schema\":\"{\\\"type\\\":\\\"boolean\\\"}\"" TOOLS "}",
    };
    uint64_t random = 7;

    (void)state;
    for (unsigned k = 0; k < 200; k++) {
        struct k3_constraint *c = constraint(spec[k % 4]);
        struct told told = { .named = true };
        struct k3_out out;
        bool ended = false;
        unsigned n = 0;

        k3_out_open(&out, t, k % 4 == 0 || k % 4 == 2, on_text, &told);
        k3_out_calls(&out, UINT32_MAX, on_call);
        for (; !ended && n < 3000; n++) {
            uint64_t allowed[N_VOCAB / 64];
            uint32_t id = N_VOCAB, which, n_allowed = 0;

            assert_int_equal(k3_constraint_mask(c, w, allowed), 0);
            for (uint32_t i = 0; i < N_VOCAB; i++)
                n_allowed += k3_bit(allowed, i);
            assert_true(n_allowed > 0);
            which = vocab_random(&random) % n_allowed;
            for (uint32_t i = 0; i < N_VOCAB && id == N_VOCAB; i++)
                if (k3_bit(allowed, i) && which-- == 0)
                    id = i;
            if (vocab_random(&random) % 8 == 0 && k3_bit(allowed, 1284)) /* a close */
                id = 1284;
            assert_int_equal(k3_constraint_take(c, w, id), 1);
            assert_int_equal(k3_out_feed(&out, id), 0);
            ended = id == 1281 || id == 1282;
        }
        assert_true(ended);
        assert_int_equal(k3_out_finish(&out), 0);
        assert_int_equal(out.n_dropped, 0);
        assert_true(told.named);
        assert_int_equal(told.n_calls, told.n_ended);
        assert_true(told.n_calls >= (k % 4 == 1 || k % 4 == 2) && (k % 4 != 2 || told.n_calls == 1) && (k % 4 != 0 || told.n_calls == 0));
        if (k % 4 != 1 && (*told.text || told.n_calls == 0)) {
            cJSON *x = cJSON_Parse(told.text);

            if (!x)
                fail_msg("no JSON: %s", told.text);
            cJSON_Delete(x);
        }
        k3_out_close(&out);
        k3_constraint_free(c);
    }
}

static void refuses_what_it_does_not_know(void **state)
{
    static const struct { const char *spec, *words; } table[] = {
        { "[]", "not an object" },
        { "{" CONTROL ",\"start\":\"x\"}", "start must be" },
        { "{" CONTROL "}", "start must be" },
        { "{\"start\":\"think\"}", "control.eos must be an id from 1280 to 1535" },
        { "{\"start\":\"think\",\"control\":{\"eos\":1281,\"end_of_msg\":5}}", "control.end_of_msg must be" },
        { "{\"start\":\"think\",\"control\":{\"eos\":1281,\"end_of_msg\":1281}}", "the same id" },
        { "{\"start\":\"think\",\"control\":{\"eos\":1281.5}}", "control.eos must be" },
        { "{" CONTROL ",\"start\":\"think\",\"format\":\"xml\"}", "format must be" },
        { "{" CONTROL ",\"start\":\"think\",\"format\":\"json_schema\"}", "format must be" },
        { "{" CONTROL ",\"start\":\"think\",\"format\":\"json_object\",\"schema\":\"{}\"}", "format must be" },
        { "{" CONTROL ",\"start\":\"think\",\"format\":\"json_schema\",\"schema\":{}}", "schema is not a string" },
        { "{" CONTROL ",\"start\":\"think\",\"format\":\"json_schema\",\"schema\":\"{\\\"not\\\":{}}\"}", "\"not\" at / is not supported" },
        { "{" CONTROL ",\"start\":\"think\",\"must_call\":1}", "must_call is neither" },
        { "{" CONTROL ",\"start\":\"think\",\"must_call\":true}", "must_call without tools" },
        { "{" CONTROL ",\"start\":\"think\",\"tools\":\"a\"}", "tools must be an array" },
        { "{" CONTROL ",\"start\":\"think\",\"tools\":[\"a\",\"\"]}", "tools[1] must be a name" },
        { "{" CONTROL ",\"start\":\"think\",\"regex\":\"a\"}", "regex is not known" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        struct k3_err err = K3_ERR_INIT;
        struct k3_constraint *c = NULL;
        cJSON *o = cJSON_Parse(table[i].spec);

        assert_true(k3_constraint_new(&c, o, v, N_VOCAB, &err) < 0);
        if (err.exit_status != K3_EXIT_REFUSED || !strstr(err.text, table[i].words))
            fail_msg("%s: \"%s\", not with \"%s\"", table[i].spec, err.text, table[i].words);
        cJSON_Delete(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_what_the_table_says),
        cmocka_unit_test(walks_end_in_whole_answers),
        cmocka_unit_test(refuses_what_it_does_not_know),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
