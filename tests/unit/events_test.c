/* k3-computed/events.c: what a submit is refused for, the event log as JSON, the table and its expiry. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/engine.h"

#define VOCAB 10u

static struct k3_submit sample(void)
{
    static const uint32_t prompt[] = { 1, 2, 3 };

    return (struct k3_submit){ .id = "0123456789abcdef0123456789abcdef", .prompt = prompt, .n_prompt = 3,
                               .max_tokens = 5, .sampling = { .temperature = 0, .top_p = 1 } };
}

static void refused(const struct k3_submit *s, uint32_t ctx, int code, const char *words)
{
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_submit_check(s, VOCAB, ctx, &err), code);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" does not say \"%s\"", err.text, words);
}

static void submit_is_checked(void **state)
{
    static const uint32_t bad[] = { 1, 2, 3, 10 };
    static uint32_t many[K3_MAX_STOP_IDS + 1];
    struct k3_err err = K3_ERR_INIT;
    struct k3_submit s = sample();

    (void)state;
    assert_int_equal(k3_submit_check(&s, VOCAB, 8, &err), 0); /* 3 + 5 = 8 */
    refused(&s, 7, -E2BIG, "prompt 3 + max_tokens 5 = 8 ids, --ctx is 7: give max_tokens 4 at most");
    refused(&s, 2, -E2BIG, "the prompt has 3 ids, --ctx is 2");
    s.max_tokens = UINT32_MAX;
    refused(&s, 8, -E2BIG, "= 4294967298 ids");
    s.max_tokens = 0;
    refused(&s, 8, -EINVAL, "max_tokens is 0");
    s = sample();
    s.n_prompt = 0;
    refused(&s, 8, -EINVAL, "prompt_ids is empty");
    s = sample();
    s.prompt = bad;
    s.n_prompt = 4;
    refused(&s, 20, -EINVAL, "prompt_ids[3] is 10: the vocabulary has 10 ids, 0 to 9");
    s = sample();
    s.generated = bad;
    s.n_generated = 4;
    refused(&s, 20, -EINVAL, "generated_ids[3] is 10");
    s.n_generated = 3;
    s.max_tokens = 2;
    refused(&s, 20, -EINVAL, "3 generated_ids are more than max_tokens 2");
    s = sample();
    s.stop = bad;
    s.n_stop = 4;
    refused(&s, 20, -EINVAL, "stop_ids[3] is 10");
    s.stop = many;
    s.n_stop = K3_MAX_STOP_IDS + 1;
    refused(&s, 20, -EINVAL, "257 stop_ids: at most 256");
    s = sample();
    s.n_prompt = K3_MAX_ID_BYTES / sizeof(uint32_t) + 1; /* refused before a look at them */
    refused(&s, 20, -E2BIG, "4194305 ids in one request: at most 4194304");
    s = sample();
    s.sampling.temperature = -1;
    refused(&s, 20, -EINVAL, "temperature -1");
}

static struct k3_request *make(struct k3_submit *s)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_request *r = NULL;

    assert_int_equal(k3_request_new(&r, s, VOCAB, &err), 0);
    return r;
}

static void log_is(const struct k3_request *r, uint32_t from, const char *right)
{
    cJSON *array = cJSON_CreateArray();
    char *text;

    assert_int_equal(k3_request_events(r, from, array), 0);
    text = cJSON_PrintUnformatted(array);
    assert_string_equal(text, right);
    cJSON_free(text);
    cJSON_Delete(array);
}

static void log_follows_from_the_ids(void **state)
{
    static const uint32_t generated[] = { 4, 5 };
    struct k3_submit s = sample();
    struct k3_request *r;

    (void)state;
    s.generated = generated;
    s.n_generated = 2;
    r = make(&s);
    assert_int_equal(k3_request_n_events(r), 0);
    log_is(r, 0, "[]");
    r->ids[r->n_ids++] = 6; /* what was given is not an event; the index goes on after it */
    r->ids[r->n_ids++] = 7;
    log_is(r, 0, "[{\"i\":0,\"type\":\"token\",\"token\":6,\"index\":2},{\"i\":1,\"type\":\"token\",\"token\":7,\"index\":3}]");
    log_is(r, 1, "[{\"i\":1,\"type\":\"token\",\"token\":7,\"index\":3}]");
    log_is(r, 2, "[]");
    log_is(r, UINT32_MAX, "[]");
    r->phase = K3_ENDED;
    r->end = K3_END_STOP;
    r->stop_id = 7;
    log_is(r, 2, "[{\"i\":2,\"type\":\"done\",\"reason\":\"stop\",\"stop_id\":7}]");
    r->end = K3_END_LENGTH;
    log_is(r, 2, "[{\"i\":2,\"type\":\"done\",\"reason\":\"length\"}]");
    r->end = K3_END_CANCELLED;
    log_is(r, 2, "[{\"i\":2,\"type\":\"done\",\"reason\":\"cancelled\"}]");
    r->end = K3_END_ERROR;
    r->code = 4;
    snprintf(r->message, sizeof(r->message), "shard \"7\"");
    log_is(r, 2, "[{\"i\":2,\"type\":\"error\",\"code\":4,\"message\":\"shard \\\"7\\\"\"}]");
    assert_int_equal(k3_request_n_events(r), 3);
    k3_request_free(r);
}

static void tokens_bring_their_logprobs(void **state)
{
    static const uint32_t generated[] = { 4 };
    struct k3_bias bias[] = { { 3, 1 } };
    struct k3_submit s = sample();
    uint64_t without;
    struct k3_request *r;

    (void)state;
    s.generated = generated;
    s.n_generated = 1;
    s.max_tokens = 600;
    without = k3_request_bytes(&s, VOCAB);
    s.sampling.n_logprobs = 3;
    s.sampling.bias = bias;
    s.sampling.n_bias = 1;
    assert_int_equal(k3_request_bytes(&s, VOCAB) - without, 599 * 3 * sizeof(struct k3_logprob) + sizeof(bias));
    r = make(&s);
    assert_int_equal(r->kept_bytes, k3_request_bytes(&s, VOCAB));
    bias[0].id = 9; /* the request has its own */
    assert_int_equal(r->sampling.bias[0].id, 3);
    for (uint32_t i = 0; i < 599; i++) {
        r->logprobs[3 * i] = (struct k3_logprob){ 6, -1.5f - (float)i };
        r->logprobs[3 * i + 1] = (struct k3_logprob){ 2, -0.1f };
        r->logprobs[3 * i + 2] = (struct k3_logprob){ 9, -1e-30f };
        r->ids[r->n_ids++] = 6;
    }
    r->phase = K3_ENDED;
    r->end = K3_END_LENGTH;
    assert_int_equal(k3_request_n_events(r), 600);
    log_is(r, 598, "[{\"i\":598,\"type\":\"token\",\"token\":6,\"index\":599,\"logprobs\":[-599.5,2,-0.100000001,9,-1e-30]},"
                   "{\"i\":599,\"type\":\"done\",\"reason\":\"length\"}]");
    /* A reply has so many, and the next one goes on. */
    assert_int_equal(k3_request_n_told(r, 0), K3_POLL_LOGPROBS_MAX);
    assert_int_equal(k3_request_n_told(r, 256), 512);
    assert_int_equal(k3_request_n_told(r, 512), 600);
    assert_int_equal(k3_request_n_told(r, UINT32_MAX), 600);
    k3_request_free(r);
}

static void logits_are_base64(void **state)
{
    /* of 4, 8 and 12 bytes, so with two, one and no '='; little endian */
    static const char *const right[] = { "AACAPw==", "AACAPwAAAMA=", "AACAPwAAAMDbD0lA" };
    static const float x[] = { 1, -2, 3.14159274f };
    struct k3_submit s = sample();
    char text[128];

    (void)state;
    s.logits = true;
    for (uint32_t n = 1; n <= 3; n++) {
        struct k3_request *r = make(&s);

        memcpy(r->logits, x, n * sizeof(x[0]));
        r->n_logits = n;
        log_is(r, 0, "[]"); /* not yet filled */
        r->has_logits = true;
        r->ids[r->n_ids++] = 9;
        snprintf(text, sizeof(text), "[{\"i\":0,\"type\":\"logits\",\"n\":%u,\"base64\":\"%s\"},"
                 "{\"i\":1,\"type\":\"token\",\"token\":9,\"index\":0}]", n, right[n - 1]);
        log_is(r, 0, text);
        k3_request_free(r);
    }
}

static void stop_ids_are_known(void **state)
{
    static const uint32_t stop[] = { 7, 0 };
    struct k3_submit s = sample();
    struct k3_request *r;

    (void)state;
    s.stop = stop;
    s.n_stop = 2;
    r = make(&s);
    assert_true(k3_request_is_stop(r, 7) && k3_request_is_stop(r, 0));
    assert_false(k3_request_is_stop(r, 1));
    k3_request_free(r);
}

static void table_finds_and_expires(void **state)
{
    enum { N = 600 };
    struct k3_requests t = { .n = 0 };
    struct k3_seq slot = { .n_done = 0 };
    struct k3_submit s = sample();
    struct k3_request *held;

    (void)state;
    for (unsigned i = 0; i < N; i++) {
        struct k3_request *r;

        snprintf(s.id, sizeof(s.id), "%032x", i);
        assert_null(k3_requests_find(&t, s.id));
        r = make(&s);
        if (i % 2) {
            r->phase = K3_ENDED;
            r->ended_ns = i;
        }
        k3_requests_add(&t, r);
        assert_ptr_equal(k3_requests_find(&t, s.id), r);
    }
    assert_int_equal(t.n, N);
    assert_int_equal(t.kept_bytes, N * k3_request_bytes(&s, VOCAB));
    k3_requests_expire(&t, K3_KEEP_NS);
    assert_int_equal(t.n, N);
    k3_requests_expire(&t, K3_KEEP_NS + 199); /* 1, 3, .. 199 */
    assert_int_equal(t.n, N - 100);
    assert_null(k3_requests_find(&t, "000000000000000000000000000000c7"));
    assert_non_null(k3_requests_find(&t, "000000000000000000000000000000c9"));
    k3_requests_expire(&t, UINT64_MAX);
    assert_int_equal(t.n, N / 2); /* what has not ended stays for ever */
    assert_int_equal(t.kept_bytes, N / 2 * k3_request_bytes(&s, VOCAB));

    held = k3_requests_find(&t, "00000000000000000000000000000000"); /* a pass still reads it: not freed */
    held->slot = &slot;
    k3_requests_remove(&t, held);
    assert_null(k3_requests_find(&t, "00000000000000000000000000000000"));
    assert_true(held->forgotten);
    k3_request_free(held);

    assert_false(k3_requests_unfetched(&t));
    held = k3_requests_find(&t, "00000000000000000000000000000002");
    held->phase = K3_ENDED;
    assert_true(k3_requests_unfetched(&t));
    held->fetched = true;
    assert_false(k3_requests_unfetched(&t));
    k3_requests_free(&t);
    assert_int_equal(t.n, 0);
    assert_int_equal(t.kept_bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(submit_is_checked), cmocka_unit_test(log_follows_from_the_ids), cmocka_unit_test(tokens_bring_their_logprobs),
        cmocka_unit_test(logits_are_base64), cmocka_unit_test(stop_ids_are_known),
        cmocka_unit_test(table_finds_and_expires),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
