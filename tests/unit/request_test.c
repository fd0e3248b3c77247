/* k3-router/request.c against a k3-computed that says what a script tells it to: good answers, restarts, errors, and things that
 * no k3-computed should say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/msg.h"
#include "k3-router/request.h"
#include "k3-router/router.h"
#include "tests/unit/vocab.h"

static char dir[] = "/tmp/k3-request-test-XXXXXX";

/* One step for each request that is not cancel or forget: what is answered to it, and what it must be. */
struct step { const char *cmd, *reply; };
static const struct step *script;
static size_t n_script, at;
static unsigned n_cancel, n_forget;
static char last_submit[4096];
static char trouble[256];

static void serve(void *arg, const char *cmd, const cJSON *request, cJSON *reply)
{
    cJSON *out, *item;
    char *text;

    (void)arg;
    if (strcmp(cmd, "cancel") == 0 || strcmp(cmd, "forget") == 0) {
        n_cancel += strcmp(cmd, "cancel") == 0;
        n_forget += strcmp(cmd, "forget") == 0;
        cJSON_AddTrueToObject(reply, "ok");
        return;
    }
    if (at == n_script || strcmp(script[at].cmd, cmd) != 0) {
        snprintf(trouble, sizeof(trouble), "step %zu: %s", at, cmd);
        cJSON_AddFalseToObject(reply, "ok");
        return;
    }
    if (strcmp(cmd, "submit") == 0) {
        text = cJSON_PrintUnformatted(request);
        snprintf(last_submit, sizeof(last_submit), "%s", text);
        cJSON_free(text);
    }
    out = cJSON_Parse(script[at++].reply);
    if (!cJSON_IsObject(out))
        snprintf(trouble, sizeof(trouble), "step %zu: its reply is no JSON", at - 1);
    while (out && (item = out->child))
        cJSON_AddItemToObject(reply, item->string, cJSON_DetachItemViaPointer(out, item));
    cJSON_Delete(out);
}

struct seen {
    struct k3_ids ids;
    char notice[512];
    unsigned n_notices, n_progress;
    uint32_t stop_at;
    bool interrupt;
    struct k3_buf logits;
};

static int on_token(void *arg, uint32_t token)
{
    struct seen *s = arg;

    k3_ids_push(&s->ids, token);
    return s->stop_at && token == s->stop_at;
}
static void on_progress(void *arg, const struct k3_ask_progress *p)
{
    struct seen *s = arg;

    assert_string_equal(p->phase, "decode");
    assert_string_equal(p->waiting, "trunk");
    assert_true(p->layer == 3 && p->layers == 9);
    s->n_progress++;
}
static void on_notice(void *arg, const char *line)
{
    struct seen *s = arg;

    snprintf(s->notice, sizeof(s->notice), "%s", line);
    s->n_notices++;
}
static int on_logits(void *arg, const void *bytes, size_t len)
{
    struct seen *s = arg;

    return k3_buf_append(&s->logits, bytes, len);
}
static bool interrupted(void *arg)
{
    return ((struct seen *)arg)->interrupt;
}

static void new_ask(struct k3_ask *a, bool logits)
{
    static const uint32_t prompt[] = { 11, 12, 13 }, stop[] = { 2 };
    struct k3_ask_params p = { .max_tokens = 8, .seed = UINT64_MAX, .temperature = 0, .top_p = 1, .logits = logits, .constraint = "{\"start\":\"think\"}" };
    struct k3_ids ids = { 0 };
    struct k3_err err = K3_ERR_INIT;

    k3_ids_append(&ids, prompt, 3);
    if (k3_ask_new(a, &ids, &p, stop, 1, cJSON_CreateObject(), dir, &err) < 0)
        fail_msg("%s", err.text);
}

/* Runs a through the script.  Everything in it must be used. */
static int run_ask(struct k3_ask *a, const struct step *steps, size_t n, struct seen *s, struct k3_err *err)
{
    struct k3_ask_hooks h = { s, on_token, on_progress, on_notice, on_logits, interrupted };
    struct k3_ask_peer peer = { dir, "t-request", 1, NULL, NULL };
    struct k3_server *server = NULL;
    int rc;

    script = steps;
    n_script = n;
    at = 0;
    n_cancel = n_forget = 0;
    trouble[0] = 0;
    *err = (struct k3_err)K3_ERR_INIT;
    assert_int_equal(k3_server_open(&server, dir, "computed.sock", 2, serve, NULL, err), 0);
    rc = k3_ask_run(a, &peer, &h, err);
    k3_server_close(server);
    if (trouble[0])
        fail_msg("%s", trouble);
    assert_int_equal(at, n);
    return rc;
}

static void seen_free(struct seen *s)
{
    k3_ids_free(&s->ids);
    k3_buf_free(&s->logits);
}

#define MODEL "\"model\":\"/m/first\",\"model_digest\":\"1111111122222222\""
#define OTHER "\"model\":\"/m/other\",\"model_digest\":\"3333333344444444\""
#define OK "{\"ok\":true," MODEL "}"
#define EVENTS(next, list) "{\"ok\":true,\"next\":" #next ",\"events\":[" list "]}"
#define TOKEN(index, id) "{\"type\":\"token\",\"index\":" #index ",\"token\":" #id "}"
#define STOP "{\"type\":\"done\",\"reason\":\"stop\",\"stop_id\":2}"
#define UNKNOWN "{\"ok\":false,\"errno\":\"ENOENT\",\"error\":\"unknown\",\"code\":1}"
#define N(a) (sizeof(a) / sizeof((a)[0]))

static void test_answer(void **state)
{
    static const struct step steps[] = {
        { "submit", OK },
        { "poll", "{\"ok\":true,\"next\":0,\"events\":[],\"progress\":{\"seq\":1,\"phase\":\"decode\",\"layer\":3,\"layers\":9,"
                  "\"waiting\":\"trunk\"}}" },
        { "poll", EVENTS(1, TOKEN(0, 7)) },
        { "poll", EVENTS(4, TOKEN(1, 8) "," TOKEN(2, 2) "," STOP) },
    };
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a, again;
    char id[K3_JOURNAL_ID_LEN + 1];

    (void)state;
    new_ask(&a, false);
    assert_int_equal(run_ask(&a, steps, N(steps), &s, &err), 0);
    assert_ids_text(&s.ids, "[7,8,2]", "tokens");
    assert_int_equal(a.end, K3_ASK_STOP);
    assert_int_equal(a.stop_id, 2);
    assert_int_equal(n_forget, 1);
    assert_int_equal(n_cancel, 0);
    assert_int_equal(s.n_progress, 1);
    assert_int_equal(s.n_notices, 0);
    assert_non_null(strstr(last_submit, "\"prompt_ids\":[11,12,13]"));
    assert_non_null(strstr(last_submit, "\"seed\":\"18446744073709551615\""));
    assert_non_null(strstr(last_submit, "\"stop_ids\":[2]"));
    assert_null(strstr(last_submit, "generated_ids"));
    assert_null(strstr(last_submit, "model_digest")); /* any model may begin */
    strcpy(id, a.id);
    k3_ask_free(&a);
    /* From the journal alone, nobody there. */
    s.ids.n = 0;
    assert_int_equal(k3_ask_resume(&again, id, dir, &err), 0);
    assert_int_equal(again.params.seed, UINT64_MAX);
    assert_non_null(cJSON_GetObjectItem(cJSON_GetObjectItem(again.submit, "constraint"), "start"));
    assert_int_equal(k3_ask_run(&again, &(struct k3_ask_peer){ "/nonexistent", "x", 0, NULL, NULL },
                                &(struct k3_ask_hooks){ &s, on_token, NULL, NULL, NULL, NULL }, &err), 0);
    assert_ids_text(&s.ids, "[7,8,2]", "from the journal");
    k3_ask_free(&again);
    seen_free(&s);
}

static void test_restarts(void **state)
{
    static const struct step steps[] = {
        { "submit", OK },
        { "poll", EVENTS(2, TOKEN(0, 7) "," TOKEN(1, 8)) },
        { "poll", UNKNOWN }, /* a new k3-computed */
        { "submit", OK },
        { "poll", EVENTS(1, TOKEN(2, 9)) },
        { "poll", EVENTS(2, "{\"type\":\"error\",\"code\":3,\"message\":\"shutting down\"}") },
        { "submit", "{\"ok\":true,\"known\":true," MODEL "}" }, /* still the old one */
        { "poll", EVENTS(2, TOKEN(2, 9) ",{\"type\":\"error\",\"code\":3,\"message\":\"shutting down\"}") },
        { "submit", "{\"ok\":false,\"code\":3,\"error\":\"draining\"}" },
        { "submit", OK },
        { "poll", EVENTS(1, "{\"type\":\"done\",\"reason\":\"length\"}") },
    };
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a;

    (void)state;
    new_ask(&a, false);
    if (run_ask(&a, steps, N(steps), &s, &err) < 0)
        fail_msg("%s", err.text);
    assert_ids_text(&s.ids, "[7,8,9]", "tokens");
    assert_int_equal(a.end, K3_ASK_LENGTH);
    assert_int_equal(s.n_notices, 2);
    assert_string_equal(s.notice, "k3-computed went away; waiting for it; 3 tokens are safe");
    assert_non_null(strstr(last_submit, "\"generated_ids\":[7,8,9]"));
    assert_non_null(strstr(last_submit, "\"constraint\":{\"start\":\"think\"}"));
    assert_non_null(strstr(last_submit, "\"model_digest\":\"1111111122222222\""));
    k3_ask_free(&a);
    seen_free(&s);
}

static void test_logits_once(void **state)
{
    static const struct step steps[] = {
        { "submit", OK },
        { "poll", EVENTS(2, "{\"type\":\"logits\",\"n\":2,\"base64\":\"AACAPwAAAMA=\"}," TOKEN(0, 7)) },
        { "poll", UNKNOWN },
        { "submit", OK },
        { "poll", EVENTS(1, STOP) },
    };
    static const float want[] = { 1.0f, -2.0f };
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a;

    (void)state;
    new_ask(&a, true);
    assert_int_equal(run_ask(&a, steps, N(steps), &s, &err), 0);
    assert_int_equal(s.logits.len_bytes, sizeof(want));
    assert_memory_equal(s.logits.bytes, want, sizeof(want));
    assert_non_null(strstr(last_submit, "\"logits\":false")); /* they are there: not asked for again */
    k3_ask_free(&a);
    seen_free(&s);
}

#define TOKEN_P(index, id, probs) "{\"type\":\"token\",\"index\":" #index ",\"token\":" #id ",\"logprobs\":" probs "}"

static void new_ask_with_logprobs(struct k3_ask *a)
{
    struct k3_ask_params p = { .max_tokens = 8, .top_p = 1, .n_logprobs = 2, .presence_penalty = 0.5, .frequency_penalty = -1,
                               .repeat_penalty = 1.25, .logit_bias = "[[5,-100],[6,0.25]]" };
    struct k3_ids ids = { 0 };
    struct k3_err err = K3_ERR_INIT;

    k3_ids_push(&ids, 11);
    assert_int_equal(k3_ask_new(a, &ids, &p, NULL, 0, cJSON_CreateObject(), dir, &err), 0);
}

static void test_logprobs(void **state)
{
    static const struct step steps[] = {
        { "submit", OK },
        { "poll", EVENTS(1, TOKEN_P(0, 7, "[-0.5,7,-0.5]")) },
        { "poll", UNKNOWN }, /* a new k3-computed says nothing of the first token any more */
        { "submit", OK },
        { "poll", EVENTS(1, TOKEN_P(1, 8, "[-2.25,3,-0.125]") "," STOP) },
    };
    static const struct k3_logprob right[] = { { 7, -0.5f }, { 7, -0.5f }, { 8, -2.25f }, { 3, -0.125f } };
    static const char *const bad[] = { "[-0.5]", "[-0.5,7]", "[-0.5,7,-0.5,8,-1]", "[0.5,7,-1]", "[-0.5,-7,-1]", "[-0.5,\"7\",-1]", "[-1e99,7,-1]",
                                       "{}", "null" };
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a;
    char id[K3_JOURNAL_ID_LEN + 1], reply[300];

    (void)state;
    new_ask_with_logprobs(&a);
    if (run_ask(&a, steps, N(steps), &s, &err) < 0)
        fail_msg("%s", err.text);
    assert_non_null(strstr(last_submit, "\"presence_penalty\":0.5,\"frequency_penalty\":-1,\"repeat_penalty\":1.25,"
                                        "\"logit_bias\":[[5,-100],[6,0.25]],\"logprobs\":1"));
    assert_int_equal(a.logprobs.n, 2);
    assert_memory_equal(a.logprobs.entry, right, sizeof(right));
    strcpy(id, a.id);
    k3_ask_free(&a);
    assert_int_equal(k3_ask_resume(&a, id, dir, &err), 0); /* the journal has them all */
    assert_true(a.logprobs.n == 2 && a.params.n_logprobs == 2);
    assert_memory_equal(a.logprobs.entry, right, sizeof(right));
    k3_ask_free(&a);
    for (size_t i = 0; i < N(bad); i++) {
        struct step wrong[] = { { "submit", OK }, { "poll", reply } };

        snprintf(reply, sizeof(reply), EVENTS(1, TOKEN_P(0, 7, "%s")), bad[i]);
        new_ask_with_logprobs(&a);
        assert_true(run_ask(&a, wrong, 2, &s, &err) < 0);
        assert_non_null(strstr(err.text, "without the log probabilities"));
        assert_int_equal(a.generated.n, 0); /* nothing of it is kept */
        k3_ask_free(&a);
    }
    seen_free(&s);
}

static void test_stop_hook_and_interrupt(void **state)
{
    static const struct step steps[] = { { "submit", OK }, { "poll", EVENTS(3, TOKEN(0, 7) "," TOKEN(1, 8) "," TOKEN(2, 9)) } };
    struct seen s = { .stop_at = 8 }, t = { .interrupt = true };
    struct k3_err err;
    struct k3_ask a, b;
    char id[K3_JOURNAL_ID_LEN + 1];

    (void)state;
    new_ask(&a, false);
    assert_int_equal(run_ask(&a, steps, N(steps), &s, &err), 0);
    assert_ids_text(&s.ids, "[7,8]", "tokens");
    assert_int_equal(a.end, K3_ASK_STOP);
    assert_int_equal(a.stop_id, -1);
    assert_true(n_cancel == 1 && n_forget == 1);
    k3_ask_free(&a);
    new_ask(&a, false);
    assert_int_equal(run_ask(&a, NULL, 0, &t, &err), 0);
    assert_int_equal(a.end, K3_ASK_CANCELLED);
    assert_true(n_cancel == 1 && n_forget == 1);
    strcpy(id, a.id);
    k3_ask_free(&a);
    assert_int_equal(k3_ask_resume(&b, id, dir, &err), 0);
    assert_int_equal(b.end, K3_ASK_CANCELLED);
    k3_ask_free(&b);
    seen_free(&s);
    seen_free(&t);
}

static void fails(const struct step *steps, size_t n, int exit_status, const char *words)
{
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a;

    new_ask(&a, false);
    assert_true(run_ask(&a, steps, n, &s, &err) < 0);
    if (err.exit_status != exit_status || !strstr(err.text, words))
        fail_msg("\"%s\" with exit %d, where \"%s\" with %d is right", err.text, err.exit_status, words, exit_status);
    assert_int_equal(a.end, K3_ASK_RUNNING); /* so it can be resumed */
    k3_ask_free(&a);
    seen_free(&s);
}
#define FAILS(exit_status, words, ...)                                                                                       \
    fails((const struct step[]){ __VA_ARGS__ }, N(((const struct step[]){ __VA_ARGS__ })), exit_status, words)

static void test_failures(void **state)
{
    (void)state;
    FAILS(4, "layer 3: read failed", { "submit", OK },
          { "poll", EVENTS(1, "{\"type\":\"error\",\"code\":4,\"message\":\"layer 3: read failed\"}") });
    FAILS(1, "no memory", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"error\",\"code\":1,\"message\":\"no memory\"}") });
    FAILS(1, "without words", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"error\"}") });
    FAILS(2, "--ctx is 4", { "submit", "{\"ok\":false,\"code\":2,\"errno\":\"EINVAL\",\"error\":\"--ctx is 4\"}" });
    FAILS(3, "draining", { "submit", "{\"ok\":false,\"code\":3,\"error\":\"draining\"}" });
    FAILS(1, "without words", { "submit", "{\"ok\":false}" });
    FAILS(1, "token 1 where 0 is due", { "submit", OK }, { "poll", EVENTS(1, TOKEN(1, 7)) });
    FAILS(4, "token 0 is 8 now and was 7", { "submit", OK }, { "poll", EVENTS(1, TOKEN(0, 7)) }, { "poll", UNKNOWN },
          { "submit", OK }, { "poll", EVENTS(1, TOKEN(0, 8)) });
    FAILS(1, "without index or token", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"token\",\"index\":0}") });
    FAILS(1, "without index or token", { "submit", OK },
          { "poll", EVENTS(1, "{\"type\":\"token\",\"index\":0,\"token\":4294967296}") });
    FAILS(1, "without a type", { "submit", OK }, { "poll", EVENTS(1, "{}") });
    FAILS(1, "known reason", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"done\",\"reason\":\"bored\"}") });
    FAILS(1, "bytes of logits", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"logits\",\"n\":2,\"base64\":\"AACAPw==\"}") });
    FAILS(1, "bytes of logits", { "submit", OK }, { "poll", EVENTS(1, "{\"type\":\"logits\",\"n\":1,\"base64\":\"A*CAPw==\"}") });
}

static void test_nobody(void **state)
{
    struct seen s = { 0 };
    struct k3_ask_hooks h = { &s, on_token, NULL, on_notice, NULL, NULL };
    struct k3_ask_peer peer = { dir, "t-request", 60, NULL, NULL };
    struct k3_err err = K3_ERR_INIT;
    struct k3_ask a;

    (void)state;
    new_ask(&a, false);
    assert_true(k3_ask_run(&a, &peer, &h, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    assert_non_null(strstr(err.text, "run/k3-run up --instance t-request"));
    assert_int_equal(s.n_notices, 0);
    k3_ask_free(&a);
    seen_free(&s);
}

/* What is in the journal now, and it must be the same afterwards. */
static void refused_without_a_trace(struct k3_ask *a, const struct step *steps, size_t n, int exit_status, size_t n_tokens)
{
    struct seen s = { 0 };
    struct k3_err err;

    assert_true(run_ask(a, steps, n, &s, &err) < 0);
    assert_int_equal(err.exit_status, exit_status);
    for (const char *const *w = (const char *const[]){ "/m/first (digest 11111111)", "/m/other (digest 33333333)",
                                                      "run/k3-run up --instance t-request --model /m/first, then",
                                                      "k3-router --instance t-request --resume ", NULL }; *w; w++)
        if (!strstr(err.text, *w))
            fail_msg("\"%s\" is not in \"%s\"", *w, err.text);
    assert_int_equal(a->generated.n, n_tokens);
    assert_int_equal(s.ids.n, n_tokens);
    assert_int_equal(a->end, K3_ASK_RUNNING);
    assert_int_equal(n_cancel + n_forget, 0);
    seen_free(&s);
}

static void test_other_model(void **state)
{
    static const struct step middle[] = { { "submit", OK }, { "poll", EVENTS(1, TOKEN(0, 7)) }, { "poll", UNKNOWN },
                                          { "submit", "{\"ok\":true," OTHER "}" } };
    static const struct step resumed[] = {
        { "poll", UNKNOWN }, { "submit", "{\"ok\":false,\"code\":2,\"errno\":\"ESTALE\",\"error\":\"x\"," OTHER "}" } };
    static const struct step in_middle[] = { { "poll", EVENTS(0, "") }, { "poll", UNKNOWN },
                                             { "submit", "{\"ok\":true," OTHER "}" } };
    static const struct step right[] = { { "poll", UNKNOWN }, { "submit", OK }, { "poll", EVENTS(1, TOKEN(1, 8) "," STOP) } };
    struct seen s = { 0 };
    struct k3_err err;
    struct k3_ask a;
    char id[K3_JOURNAL_ID_LEN + 1];

    (void)state;
    new_ask(&a, false);
    refused_without_a_trace(&a, middle, N(middle), K3_EXIT_UNTRUSTED, 1);
    strcpy(id, a.id);
    k3_ask_free(&a);
    assert_int_equal(k3_ask_resume(&a, id, dir, &err), 0);
    refused_without_a_trace(&a, resumed, N(resumed), K3_EXIT_REFUSED, 1);
    k3_ask_free(&a);
    assert_int_equal(k3_ask_resume(&a, id, dir, &err), 0);
    refused_without_a_trace(&a, in_middle, N(in_middle), K3_EXIT_UNTRUSTED, 1);
    k3_ask_free(&a);
    assert_int_equal(k3_ask_resume(&a, id, dir, &err), 0);
    assert_int_equal(run_ask(&a, right, N(right), &s, &err), 0);
    assert_ids_text(&s.ids, "[7,8]", "by the model that began it");
    k3_ask_free(&a);
    seen_free(&s);
    FAILS(1, "without model_digest", { "submit", "{\"ok\":true}" });
}

static void test_generation_config(void **state)
{
    static const struct { const char *json, *words; } bad[] = {
        { "", "not a JSON object" }, { "[]", "not a JSON object" }, { "{\"temperature\":-1}", "\"temperature\"" },
        { "{\"temperature\":\"hot\"}", "\"temperature\"" }, { "{\"top_p\":0}", "\"top_p\"" }, { "{\"min_p\":2}", "\"min_p\"" },
        { "{\"top_k\":-3}", "\"top_k\"" }, { "{\"eos_token_id\":\"x\"}", "\"eos_token_id\"" },
        { "{\"eos_token_id\":[1,-2]}", "\"eos_token_id\"" }, { "{\"eos_token_id\":1.5}", "\"eos_token_id\"" },
        { "{\"thinking\":1}", "\"thinking\"" }, { "{\"thinking_effort\":\"medium\"}", "\"thinking_effort\"" },
    };
    struct k3_generation g = { .temperature = 1, .top_p = 0.95, .thinking = true, .effort = "max" };
    struct k3_err err = K3_ERR_INIT;
    static const char all[] = "{\"eos_token_id\":[5,6],\"temperature\":0.5,\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,"
                              "\"thinking\":false,\"thinking_effort\":null,\"max_length\":9}";

    (void)state;
    assert_int_equal(k3_generation_parse(&g, "{\"eos_token_id\":4}", 18, "G", &err), 0);
    assert_true(g.temperature == 1 && g.top_p == 0.95 && g.thinking && strcmp(g.effort, "max") == 0);
    assert_int_equal(k3_generation_parse(&g, all, strlen(all), "G", &err), 0);
    assert_ids_text(&g.eos, "[4,5,6]", "eos");
    assert_true(g.temperature == 0.5 && g.top_p == 0.9 && g.top_k == 40 && g.min_p == 0.1 && !g.thinking && !g.effort);
    for (size_t i = 0; i < N(bad); i++) {
        assert_true(k3_generation_parse(&g, bad[i].json, strlen(bad[i].json), "G", &err) < 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        if (!strstr(err.text, bad[i].words))
            fail_msg("\"%s\" does not say %s", err.text, bad[i].words);
    }
    k3_ids_free(&g.eos);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    char command[128];

    (void)state;
    snprintf(command, sizeof(command), "rm -rf %s", dir);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answer), cmocka_unit_test(test_restarts), cmocka_unit_test(test_logits_once), cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_stop_hook_and_interrupt), cmocka_unit_test(test_failures), cmocka_unit_test(test_nobody),
        cmocka_unit_test(test_other_model),
        cmocka_unit_test(test_generation_config),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
