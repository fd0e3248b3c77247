/* k3-computed/engine.c and sequence.c on the demo model: answers, continuation, sharing of passes, polling. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "ipc/daemon.h"
#include "tests/unit/engine_world.h"

static struct k3_ew ew;
static struct k3_ew_answer a, b;

static int close_engine(void **state)
{
    (void)state;
    k3_ew_close(&ew);
    return 0;
}

/* ---- answers ----------------------------------------------------------------------------------------------------------- */

static void answers_what_is_expected(void **state)
{
    static char text[1 << 16];
    const uint32_t stop[] = { 1282 };
    FILE *f = fopen(DEMO_DIR "/expected.json", "re");
    cJSON *expected, *one;
    unsigned n = 0;

    (void)state;
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof(text) - 1, f) > 0);
    fclose(f);
    assert_non_null(expected = cJSON_Parse(text));
    k3_ew_open(&ew, &k3_ew_demo, 2, 16, 128);
    cJSON_ArrayForEach(one, expected) {
        const cJSON *prompt = cJSON_GetObjectItem(one, "prompt_ids"), *right = cJSON_GetObjectItem(one, "generated_ids");
        uint32_t ids[128], n_ids = 0, n_right = (uint32_t)cJSON_GetArraySize(right), i = 0;
        bool stops = cJSON_GetArrayItem(right, (int)n_right - 1)->valueint == 1282; /* else it is only a beginning */
        struct k3_submit s;
        const cJSON *id;

        cJSON_ArrayForEach(id, prompt)
            ids[n_ids++] = (uint32_t)id->valueint;
        s = k3_ew_submit(++n, ids, n_ids);
        s.stop = stop;
        s.n_stop = 1;
        s.max_tokens = stops ? 128 - n_ids : n_right;
        s.logits = true;
        k3_ew_ask(&ew, &s, &a);
        assert_true(a.has_logits);
        cJSON_ArrayForEach(id, right)
            assert_int_equal(a.token[i++], id->valueint);
        assert_int_equal(a.n_tokens, i); /* the stop id is a token of the answer */
        assert_string_equal(a.end, stops ? "stop" : "length");
        assert_int_equal(a.stop_id, stops ? 1282 : -1);
    }
    assert_true(n >= 4);
    cJSON_Delete(expected);
}

static void length_ends_it(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, K3_EW_N_FRANCE);

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    s.max_tokens = 3;
    k3_ew_ask(&ew, &s, &a);
    assert_string_equal(a.state, "ended");
    assert_string_equal(a.end, "length");
    assert_int_equal(a.n_tokens, 3);
    s = k3_ew_submit(2, k3_ew_france, K3_EW_N_FRANCE);
    s.max_tokens = 64 - K3_EW_N_FRANCE; /* fills --ctx to the last position */
    k3_ew_ask(&ew, &s, &a);
    assert_string_equal(a.end, "length");
    assert_int_equal(a.n_tokens, 64 - K3_EW_N_FRANCE);
}

static void repeat_is_harmless(void **state)
{
    struct k3_submit s = k3_ew_sampled(5);
    struct k3_err err = K3_ERR_INIT;
    bool known = false;
    cJSON *reply;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 8, 64);
    k3_ew_ask(&ew, &s, &a);
    s.max_tokens = 1; /* not even looked at */
    s.n_prompt = 0;
    assert_int_equal(k3_engine_submit(ew.e, &s, true, &known, &err), 0);
    assert_true(known);
    assert_int_equal(k3_ew_run(&ew), 0);
    k3_ew_answer(&ew, s.id, &b);
    k3_ew_same(&a, &b);
    s = k3_ew_sampled(6);
    assert_int_equal(k3_engine_submit(ew.e, &s, true, &known, &err), -ESHUTDOWN); /* draining refuses what is new */
    assert_non_null(strstr(err.text, "draining"));
    reply = cJSON_CreateObject();
    assert_int_equal(k3_engine_poll(ew.e, s.id, 0, -1, 0, reply, &err), -ENOENT);
    cJSON_Delete(reply);
}

static void company_changes_nothing(void **state)
{
    static struct k3_ew_answer alone[6];

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 512);
    for (unsigned i = 0; i < 6; i++) {
        struct k3_submit s = k3_ew_sampled(i);

        k3_ew_ask(&ew, &s, &alone[i]);
        assert_int_equal(alone[i].n_tokens, 12);
    }
    assert_memory_not_equal(alone[0].token, alone[1].token, sizeof(alone[0].token)); /* seeds matter */
    k3_ew_close(&ew);
    for (uint32_t rows = 1; rows <= 16; rows += 5) { /* more sequences than rows, too; the sixth queues */
        struct k3_submit crowd = k3_ew_submit(99, k3_ew_long, 300);

        k3_ew_open(&ew, &k3_ew_demo, 5, rows, 512);
        for (unsigned i = 0; i < 6; i++) {
            struct k3_submit s = k3_ew_sampled(i);

            k3_ew_must_submit(&ew, &s);
            if (i == 2)
                k3_ew_must_submit(&ew, &crowd);
        }
        k3_ew_run(&ew);
        for (unsigned i = 0; i < 6; i++) {
            struct k3_submit s = k3_ew_sampled(i);

            k3_ew_answer(&ew, s.id, &a);
            k3_ew_same(&a, &alone[i]);
        }
        if (rows < 16)
            k3_ew_close(&ew);
    }
}

static void continuation_is_identical(void **state)
{
    const uint32_t *generated;
    uint64_t hash;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 7, 64);
    struct k3_submit s = k3_ew_sampled(1);
    s.logits = true;
    k3_ew_ask(&ew, &s, &a);
    assert_true(a.has_logits);
    hash = a.logits_hash;
    generated = a.token;
    for (uint32_t n = 0; n <= a.n_tokens; n++) {
        snprintf(s.id, sizeof(s.id), "%032x", 0xc000 + n);
        s.generated = generated;
        s.n_generated = n;
        k3_ew_ask(&ew, &s, &b);
        assert_int_equal(b.n_tokens, a.n_tokens - n);
        assert_memory_equal(b.token, a.token + n, b.n_tokens * sizeof(b.token[0]));
        if (b.n_tokens)
            assert_int_equal(b.first_index, n);
        assert_string_equal(b.end, "length");
        assert_true(b.has_logits && b.logits_hash == hash);
    }
    /* Nothing left to do and no logits asked for: done at once, without a pass. */
    s = k3_ew_sampled(2);
    s.generated = generated;
    s.n_generated = s.max_tokens;
    k3_ew_must_submit(&ew, &s);
    k3_ew_answer(&ew, s.id, &b);
    assert_string_equal(b.end, "length");
    s = k3_ew_sampled(3);
    s.generated = s.stop = generated;
    s.n_generated = 1;
    s.n_stop = 1;
    k3_ew_must_submit(&ew, &s);
    k3_ew_answer(&ew, s.id, &b);
    assert_string_equal(b.end, "stop");
    assert_int_equal(b.stop_id, generated[0]);
    assert_int_equal(k3_ew_run(&ew), 0);
    /* The same, and its logits are wanted: only then a pass, and no token. */
    s.id[0] = 'd';
    s.logits = true;
    k3_ew_ask(&ew, &s, &b);
    assert_string_equal(b.end, "stop");
    assert_int_equal(b.n_tokens, 0);
    assert_true(b.has_logits && b.logits_hash == hash);
}

/* The log probabilities of the tokens that a poll from 0 on tells, as text. */
static cJSON *logprobs_of(const char *id)
{
    cJSON *reply = cJSON_CreateObject(), *all = cJSON_CreateArray(), *event;
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_engine_poll(ew.e, id, 0, -1, 0, reply, &err), 0);
    cJSON_ArrayForEach(event, cJSON_GetObjectItem(reply, "events"))
        if (cJSON_GetObjectItem(event, "token"))
            cJSON_AddItemToArray(all, cJSON_DetachItemFromObject(event, "logprobs"));
    cJSON_Delete(reply);
    return all;
}

static void adjusted_answers_continue_too(void **state)
{
    const struct k3_bias bias[] = { { 295, 3 }, { 262, -100 } };
    cJSON *whole, *rest;
    struct k3_submit s;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 7, 64);
    s = k3_ew_sampled(1);
    k3_ew_ask(&ew, &s, &b); /* without any of it: other tokens */
    s = k3_ew_sampled(2);
    s.sampling.seed = 4711 + 1;
    s.sampling.presence_penalty = 1;
    s.sampling.frequency_penalty = 0.5;
    s.sampling.repeat_penalty = 1.5;
    s.sampling.bias = bias;
    s.sampling.n_bias = 2;
    s.sampling.n_logprobs = 4;
    k3_ew_ask(&ew, &s, &a);
    assert_int_equal(a.n_tokens, 12);
    assert_memory_not_equal(a.token, b.token, sizeof(a.token[0]) * 12);
    whole = logprobs_of(s.id);
    assert_int_equal(cJSON_GetArraySize(whole), 12);
    for (uint32_t n = 1; n < 12; n += 3) { /* the counts are those of the ids, wherever they come from */
        snprintf(s.id, sizeof(s.id), "%032x", 0xc100 + n);
        s.generated = a.token;
        s.n_generated = n;
        k3_ew_ask(&ew, &s, &b);
        assert_int_equal(b.n_tokens, 12 - n);
        assert_memory_equal(b.token, a.token + n, b.n_tokens * sizeof(b.token[0]));
        rest = logprobs_of(s.id);
        for (uint32_t i = n; i < 12; i++)
            assert_string_equal(cJSON_GetArrayItem(rest, (int)(i - n))->valuestring, cJSON_GetArrayItem(whole, (int)i)->valuestring);
        cJSON_Delete(rest);
    }
    cJSON_Delete(whole);
    /* They are of the model: the same first token has the same whatever is asked for. */
    s = k3_ew_submit(0xc200, k3_ew_france, 12);
    s.max_tokens = 1;
    s.sampling.n_logprobs = 21;
    k3_ew_ask(&ew, &s, &a);
    whole = logprobs_of(s.id);
    snprintf(s.id, sizeof(s.id), "%032x", 0xc201);
    s.sampling.bias = &(struct k3_bias){ a.token[0], 100 };
    s.sampling.n_bias = 1;
    s.sampling.temperature = 1;
    k3_ew_ask(&ew, &s, &b);
    assert_int_equal(b.token[0], a.token[0]);
    rest = logprobs_of(s.id);
    assert_string_equal(whole->child->valuestring, rest->child->valuestring);
    cJSON_Delete(whole);
    cJSON_Delete(rest);
}

/* ---- sharing ----------------------------------------------------------------------------------------------------------- */

static void rows_are_shared_fairly(void **state)
{
    static const struct { uint32_t n, left[5], budget, right[5]; } c[] = {
        { 1, { 1 }, 64, { 1 } },                          { 1, { 100 }, 64, { 64 } },
        { 2, { 1, 100 }, 64, { 1, 63 } },                 { 2, { 100, 100 }, 64, { 32, 32 } },
        { 3, { 100, 5, 100 }, 64, { 30, 5, 29 } },        { 5, { 1, 1, 1, 1, 500 }, 8, { 1, 1, 1, 1, 4 } },
        { 5, { 500, 1, 1, 1, 1 }, 5, { 1, 1, 1, 1, 1 } }, { 5, { 500, 1, 1, 1, 1 }, 3, { 1, 1, 1, 0, 0 } },
        { 3, { 0, 3, 3 }, 64, { 0, 3, 3 } },              { 3, { 9, 9, 9 }, 7, { 3, 2, 2 } },
        { 2, { 5, 5 }, 0, { 0, 0 } },                     { 3, { 2, 50, 50 }, 10, { 2, 4, 4 } },
    };
    uint32_t rows[5];

    (void)state;
    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) {
        k3_seqs_rows(c[i].left, c[i].n, c[i].budget, rows);
        for (uint32_t k = 0; k < c[i].n; k++)
            if (rows[k] != c[i].right[k])
                fail_msg("case %zu: sequence %u gets %u rows instead of %u", i, k, rows[k], c[i].right[k]);
    }
}

static void long_prompts_starve_nobody(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, K3_EW_N_FRANCE), big = k3_ew_submit(2, k3_ew_long, 300);
    struct k3_submit small = k3_ew_submit(3, k3_ew_france, 9);
    uint32_t n, passes = 0;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 3, 16, 512);
    k3_ew_must_submit(&ew, &s);
    do
        assert_int_equal(k3_engine_step(ew.e), 1);
    while (k3_ew_answer(&ew, s.id, &a), a.n_tokens < 2);
    k3_ew_must_submit(&ew, &big);
    k3_ew_must_submit(&ew, &small);
    n = a.n_tokens;
    while (k3_ew_answer(&ew, small.id, &b), b.n_tokens == 0) {
        assert_int_equal(k3_engine_step(ew.e), 1);
        k3_ew_answer(&ew, s.id, &a);
        assert_int_equal(a.n_tokens, ++n); /* the running answer gets a token in every pass */
        passes++;
    }
    assert_true(passes <= 2); /* 9 ids at 7 rows a pass, though 300 came before them */
    k3_ew_answer(&ew, big.id, &a);
    assert_int_equal(a.n_tokens, 0);
    k3_ew_run(&ew);
    k3_ew_answer(&ew, big.id, &a);
    assert_int_equal(a.n_tokens, 16);
}

static void more_sequences_than_rows_take_turns(void **state)
{
    uint32_t last[3] = { 0 };

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 3, 2, 64);
    for (unsigned i = 0; i < 3; i++) {
        struct k3_submit s = k3_ew_submit(i, k3_ew_france, 2);

        k3_ew_must_submit(&ew, &s);
    }
    for (int pass = 0; pass < 12; pass++) {
        assert_int_equal(k3_engine_step(ew.e), 1);
        for (unsigned i = 0; i < 3 && pass >= 4; i++) { /* by now all decode: nobody waits for more than one pass */
            struct k3_submit s = k3_ew_submit(i, k3_ew_france, 2);

            k3_ew_answer(&ew, s.id, &a);
            if (pass % 2 == 0) {
                assert_true(a.n_tokens > last[i]);
                last[i] = a.n_tokens;
            }
        }
    }
}

static void queue_is_first_come_first_served(void **state)
{
    struct k3_submit s[3];
    cJSON *reply = cJSON_CreateObject();
    struct k3_err err = K3_ERR_INIT;
    const cJSON *progress;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    for (unsigned i = 0; i < 3; i++) {
        s[i] = k3_ew_submit(7 - i, k3_ew_france, K3_EW_N_FRANCE);
        s[i].max_tokens = 2;
        k3_ew_must_submit(&ew, &s[i]);
    }
    assert_int_equal(k3_engine_poll(ew.e, s[2].id, 0, -1, 0, reply, &err), 0);
    progress = cJSON_GetObjectItem(reply, "progress");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(progress, "phase")), "queued");
    assert_int_equal(cJSON_GetObjectItem(progress, "ahead")->valueint, 2);
    assert_int_equal(cJSON_GetObjectItem(reply, "generation")->valueint, 3);
    cJSON_Delete(reply);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(k3_engine_step(ew.e), 1);
        k3_ew_answer(&ew, s[i].id, &a);
        assert_string_equal(a.state, "decode");
        assert_int_equal(k3_engine_step(ew.e), 1);
        k3_ew_answer(&ew, s[i].id, &a);
        assert_string_equal(a.end, "length");
        for (unsigned k = i + 1; k < 3; k++) {
            k3_ew_answer(&ew, s[k].id, &a);
            assert_string_equal(a.state, "queued");
        }
    }
    assert_int_equal(k3_engine_step(ew.e), 0);
}

static void limits_are_refused(void **state)
{
    struct k3_submit s = k3_ew_submit(0, k3_ew_france, 2);
    struct k3_err err = K3_ERR_INIT;
    bool known;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 1u << 20);
    for (unsigned i = 0; i < K3_MAX_QUEUED; i++) {
        s = k3_ew_submit(i, k3_ew_france, 2);
        k3_ew_must_submit(&ew, &s);
    }
    s = k3_ew_submit(K3_MAX_QUEUED, k3_ew_france, 2);
    assert_int_equal(k3_engine_submit(ew.e, &s, false, &known, &err), -EAGAIN);
    assert_non_null(strstr(err.text, "1024 requests are queued, the limit is 1024"));
    for (unsigned i = 0; i < K3_MAX_QUEUED; i++) {
        s = k3_ew_submit(i, k3_ew_france, 2);
        assert_int_equal(k3_engine_forget(ew.e, s.id, &err), 0);
    }
    for (unsigned i = 0; i <= K3_MAX_QUEUED; i++) { /* 4 MB of room each */
        s = k3_ew_submit(i, k3_ew_france, 2);
        s.max_tokens = (1u << 20) - 2;
        if (k3_engine_submit(ew.e, &s, false, &known, &err) < 0)
            break;
        assert_true(i < 64);
    }
    assert_non_null(strstr(err.text, "the limit is 268435456: forget ended ones"));
    s = k3_ew_submit(5000, k3_ew_france, 0);
    assert_int_equal(k3_engine_submit(ew.e, &s, false, &known, &err), -EINVAL);
}

/* ---- polling ----------------------------------------------------------------------------------------------------------- */

static void *run_engine(void *arg)
{
    k3_engine_run(arg);
    return NULL;
}

static void polls_wait_for_news(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, K3_EW_N_FRANCE);
    uint32_t n_tokens = 0, n_progress = 0, from = 0;
    struct k3_err err = K3_ERR_INIT;
    double seq = 0;
    uint64_t start;
    cJSON *reply;
    pthread_t thread;
    bool over = false;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 4, 64);
    k3_ew_must_submit(&ew, &s);
    reply = cJSON_CreateObject(); /* nothing runs yet: waits its time, then says what there is */
    start = k3_now_ns();
    assert_int_equal(k3_engine_poll(ew.e, s.id, 0, 0, 120, reply, &err), 0);
    assert_true(k3_now_ns() - start >= 110000000ull);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(reply, "state")), "queued");
    cJSON_Delete(reply);
    assert_int_equal(pthread_create(&thread, NULL, run_engine, ew.e), 0);
    for (int i = 0; !over && i < 10000; i++) {
        const cJSON *events, *progress, *event;

        reply = cJSON_CreateObject();
        assert_int_equal(k3_engine_poll(ew.e, s.id, from, (int64_t)seq, 5000, reply, &err), 0);
        events = cJSON_GetObjectItem(reply, "events");
        progress = cJSON_GetObjectItem(reply, "progress");
        over = strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(reply, "state")), "ended") == 0;
        assert_true(over || cJSON_GetArraySize(events) > 0 || cJSON_GetObjectItem(progress, "seq")->valuedouble > seq);
        if (progress) {
            assert_true(cJSON_GetObjectItem(progress, "layer")->valueint < 9);
            assert_int_equal(cJSON_GetObjectItem(progress, "layers")->valueint, 9);
            seq = cJSON_GetObjectItem(progress, "seq")->valuedouble;
            n_progress++;
        }
        cJSON_ArrayForEach(event, events) {
            assert_int_equal(cJSON_GetObjectItem(event, "i")->valueint, from);
            from++;
            n_tokens += cJSON_HasObjectItem(event, "token");
        }
        assert_int_equal(cJSON_GetObjectItem(reply, "next")->valueint, from);
        cJSON_Delete(reply);
    }
    assert_true(over && n_tokens == 16);
    assert_true(n_progress > 0); /* a busy machine lets this thread look seldom */
    k3_engine_wait_fetched(ew.e, 10000000000ull); /* its end has just been taken: returns at once */
    start = k3_now_ns(); /* an ended one never makes a poll wait */
    reply = cJSON_CreateObject();
    assert_int_equal(k3_engine_poll(ew.e, s.id, from, -1, 5000, reply, &err), 0);
    assert_true(k3_now_ns() - start < 2000000000ull);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(reply, "events")), 0);
    cJSON_Delete(reply);
    ew.stop = true;
    ew.abort = true;
    pthread_join(thread, NULL);
}

/* Several clients against a running engine: whatever they do, every answer is that of the quiet run. */
struct client { pthread_t thread; unsigned id; struct k3_ew_answer quiet; uint32_t n_asked; const char *wrong; };

static void *client_main(void *arg)
{
    struct client *c = arg;
    struct k3_err err = K3_ERR_INIT;

    for (unsigned round = 0; round < 12 && !c->wrong; round++) {
        struct k3_submit s = k3_ew_sampled(c->id);
        uint32_t token[16], n = 0;
        bool known, ended = false;

        snprintf(s.id, sizeof(s.id), "%032x", c->id * 100 + round + 1000);
        if (k3_engine_submit(ew.e, &s, false, &known, &err) < 0 || known)
            c->wrong = "submit";
        if (round % 3 == 1)
            usleep(1000 * (round + c->id));
        if (round % 3 == 1 && k3_engine_cancel(ew.e, s.id, &err) < 0)
            c->wrong = "cancel";
        while (!ended && !c->wrong) {
            cJSON *reply = cJSON_CreateObject(), *event;

            if (k3_engine_poll(ew.e, s.id, n, -1, 1000, reply, &err) < 0)
                c->wrong = "poll";
            cJSON_ArrayForEach(event, cJSON_GetObjectItem(reply, "events"))
                if (cJSON_HasObjectItem(event, "token"))
                    token[n++ % 16] = (uint32_t)cJSON_GetObjectItem(event, "token")->valueint;
                else
                    ended = true;
            cJSON_Delete(reply);
        }
        if (n > c->quiet.n_tokens || (round % 3 != 1 && n != c->quiet.n_tokens) ||
            memcmp(token, c->quiet.token, n * sizeof(token[0])) != 0)
            c->wrong = "tokens";
        if (k3_engine_forget(ew.e, s.id, &err) < 0)
            c->wrong = "forget";
        c->n_asked++;
    }
    return NULL;
}

static void many_clients_at_once(void **state)
{
    static struct client c[6];
    pthread_t thread;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 4, 8, 64);
    for (unsigned i = 0; i < 6; i++) {
        struct k3_submit s = k3_ew_sampled(i);

        c[i].id = i;
        k3_ew_ask(&ew, &s, &c[i].quiet);
    }
    assert_int_equal(pthread_create(&thread, NULL, run_engine, ew.e), 0);
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(pthread_create(&c[i].thread, NULL, client_main, &c[i]), 0);
    for (unsigned i = 0; i < 6; i++)
        pthread_join(c[i].thread, NULL);
    ew.stop = true;
    ew.abort = true;
    pthread_join(thread, NULL);
    for (unsigned i = 0; i < 6; i++) {
        if (c[i].wrong)
            fail_msg("client %u: %s", i, c[i].wrong);
        assert_int_equal(c[i].n_asked, 12);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_shared_fairly),
        cmocka_unit_test_teardown(answers_what_is_expected, close_engine),
        cmocka_unit_test_teardown(length_ends_it, close_engine),
        cmocka_unit_test_teardown(repeat_is_harmless, close_engine),
        cmocka_unit_test_teardown(company_changes_nothing, close_engine),
        cmocka_unit_test_teardown(continuation_is_identical, close_engine),
        cmocka_unit_test_teardown(adjusted_answers_continue_too, close_engine),
        cmocka_unit_test_teardown(long_prompts_starve_nobody, close_engine),
        cmocka_unit_test_teardown(more_sequences_than_rows_take_turns, close_engine),
        cmocka_unit_test_teardown(queue_is_first_come_first_served, close_engine),
        cmocka_unit_test_teardown(limits_are_refused, close_engine),
        cmocka_unit_test_teardown(polls_wait_for_news, close_engine),
        cmocka_unit_test_teardown(many_clients_at_once, close_engine),
    };

    return cmocka_run_group_tests(tests, k3_ew_open_demo, k3_ew_close_demo);
}
