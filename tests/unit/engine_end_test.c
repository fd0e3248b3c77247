/* k3-computed/engine.c: how requests end: cancelled, forgotten, expired, failed, stopped. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/engine_world.h"

static struct k3_ew ew;
static struct k3_ew_answer a, b;

static int close_engine(void **state)
{
    (void)state;
    k3_ew_close(&ew);
    return 0;
}

/* ---- cancelling, forgetting, expiring ---------------------------------------------------------------------------------- */

static void cancel_act(struct k3_ew *w)
{
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_engine_cancel(w->e, w->act_id, &err), 0);
}

static void forget_act(struct k3_ew *w)
{
    struct k3_err err = K3_ERR_INIT;

    assert_int_equal(k3_engine_forget(w->e, w->act_id, &err), 0);
}

static void cancel_ends_the_pass_within_a_layer(void **state)
{
    struct k3_submit s = k3_ew_sampled(1), other = k3_ew_sampled(2);
    struct k3_file_source_counts counts;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_must_submit(&ew, &s);
    k3_ew_must_submit(&ew, &other);
    ew.act_at = 3;
    ew.act = cancel_act;
    ew.act_id = s.id;
    assert_int_equal(k3_engine_step(ew.e), 1);
    assert_int_equal(ew.n_ticks, 4); /* layers 0, 1, 2, then the end of the pass */
    k3_file_source_counts(ew.run.file, &counts);
    assert_int_equal(counts.failed_passes, 1);
    k3_ew_answer(&ew, s.id, &a);
    assert_string_equal(a.end, "cancelled");
    assert_int_equal(a.n_tokens, 0);
    assert_false(ew.abort);
    assert_int_equal(k3_engine_cancel(ew.e, s.id, &err), 0); /* again: nothing */
    k3_ew_run(&ew); /* the next one gets the slot, with clean state */
    k3_ew_answer(&ew, other.id, &a);
    k3_ew_close(&ew);
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_ask(&ew, &other, &b);
    k3_ew_same(&a, &b);
    assert_int_equal(k3_engine_cancel(ew.e, s.id, &err), -ENOENT);
}

static void cancel_leaves_the_others_alone(void **state)
{
    struct k3_submit s = k3_ew_sampled(1), other = k3_ew_sampled(2);
    struct k3_file_source_counts counts;

    (void)state;
    for (int forget = 0; forget < 2; forget++) {
        k3_ew_open(&ew, &k3_ew_demo, 2, 64, 64);
        k3_ew_must_submit(&ew, &s);
        k3_ew_must_submit(&ew, &other);
        ew.act_at = 3;
        ew.act = forget ? forget_act : cancel_act;
        ew.act_id = s.id;
        assert_int_equal(k3_engine_step(ew.e), 1);
        if (forget) { /* the id is free at once */
            struct k3_submit again = k3_ew_sampled(7);

            memcpy(again.id, s.id, sizeof(s.id));
            k3_ew_must_submit(&ew, &again);
        } else {
            k3_ew_answer(&ew, s.id, &a);
            assert_string_equal(a.end, "cancelled");
        }
        k3_ew_run(&ew);
        k3_file_source_counts(ew.run.file, &counts);
        assert_int_equal(counts.failed_passes, 0);
        k3_ew_answer(&ew, other.id, forget ? &b : &a);
        k3_ew_close(&ew);
    }
    k3_ew_same(&a, &b);
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_ask(&ew, &other, &b);
    k3_ew_same(&a, &b);
}

static void cancel_reaches_the_queue(void **state)
{
    struct k3_submit s[4];
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    for (unsigned i = 0; i < 4; i++) {
        s[i] = k3_ew_submit(i, k3_ew_france, 4);
        s[i].max_tokens = 1;
        k3_ew_must_submit(&ew, &s[i]);
    }
    assert_int_equal(k3_engine_cancel(ew.e, s[1].id, &err), 0); /* middle, then the last */
    assert_int_equal(k3_engine_cancel(ew.e, s[3].id, &err), 0);
    s[1].id[0] = 'a';
    k3_ew_must_submit(&ew, &s[1]); /* the tail is where it should be */
    assert_int_equal(k3_ew_run(&ew), 3);
    k3_ew_answer(&ew, s[3].id, &a);
    assert_string_equal(a.end, "cancelled");
    k3_ew_answer(&ew, s[2].id, &a);
    assert_string_equal(a.end, "length");
    k3_ew_answer(&ew, s[1].id, &a);
    assert_string_equal(a.end, "length");
}

static void ended_ones_expire(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, 4), young = k3_ew_submit(2, k3_ew_france, 4);
    cJSON *reply = cJSON_CreateObject();
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_ask(&ew, &s, &a);
    ew.now_ns += K3_KEEP_NS / 2;
    k3_ew_ask(&ew, &young, &a);
    ew.now_ns += K3_KEEP_NS / 2 - 1;
    assert_int_equal(k3_engine_step(ew.e), 0);
    k3_ew_answer(&ew, s.id, &a);
    ew.now_ns++;
    assert_int_equal(k3_engine_step(ew.e), 0);
    assert_int_equal(k3_engine_poll(ew.e, s.id, 0, -1, 0, reply, &err), -ENOENT);
    assert_non_null(strstr(err.text, s.id));
    k3_ew_answer(&ew, young.id, &a);
    assert_int_equal(k3_engine_forget(ew.e, young.id, &err), 0);
    assert_int_equal(k3_engine_forget(ew.e, young.id, &err), -ENOENT);
    cJSON_Delete(reply);
}

/* ---- failing and stopping ---------------------------------------------------------------------------------------------- */

static void unreadable_weights_fail_only_that_pass(void **state)
{
    struct k3_submit s[3];

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 2, 1, 64); /* one row a pass: s[0] and s[1] take turns */
    for (unsigned i = 0; i < 3; i++) {
        s[i] = k3_ew_sampled(i);
        k3_ew_must_submit(&ew, &s[i]);
    }
    for (int i = 0; i < 5; i++)
        assert_int_equal(k3_engine_step(ew.e), 1);
    k3_file_source_fail_block(ew.run.file, 20);
    assert_int_equal(k3_engine_step(ew.e), 1); /* the pass of s[1] */
    k3_ew_answer(&ew, s[1].id, &a);
    assert_string_equal(a.end, "error");
    assert_int_equal(a.code, 4);
    assert_non_null(strstr(a.message, "could not be read"));
    k3_file_source_fail_expert(ew.run.file, 3);
    assert_int_equal(k3_engine_step(ew.e), 1); /* s[0], in an expert */
    k3_ew_answer(&ew, s[0].id, &a);
    assert_string_equal(a.end, "error");
    assert_int_equal(a.code, 4);
    k3_ew_run(&ew);
    k3_ew_answer(&ew, s[2].id, &a); /* in a slot that was spoilt */
    assert_string_equal(a.end, "length");
    k3_ew_close(&ew);
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_ask(&ew, &s[2], &b);
    k3_ew_same(&a, &b);
}

static void not_finite_logits_are_an_error(void **state)
{
    struct k3_submit s = k3_ew_sampled(1);

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    k3_ew_must_submit(&ew, &s);
    k3_engine_step(ew.e);
    k3_engine_step(ew.e);
    ew.nan_logits = true;
    k3_ew_run(&ew);
    k3_ew_answer(&ew, s.id, &a);
    assert_int_equal(a.n_tokens, 2);
    assert_string_equal(a.end, "error");
    assert_int_equal(a.code, 4);
    assert_non_null(strstr(a.message, "logits are not finite"));
    s = k3_ew_submit(2, k3_ew_france, 4);
    s.logits = true;
    k3_ew_ask(&ew, &s, &a);
    assert_string_equal(a.end, "error");
    assert_int_equal(a.n_tokens + a.has_logits, 0);
}

static void stop_act(struct k3_ew *w)
{
    w->stop = true;
    w->abort = true;
}

static void stopping_ends_everything(void **state)
{
    struct k3_submit s[3];
    struct k3_err err = K3_ERR_INIT;
    bool known;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 2, 8, 64);
    for (unsigned i = 0; i < 3; i++) {
        s[i] = k3_ew_sampled(i);
        k3_ew_must_submit(&ew, &s[i]);
    }
    ew.act = stop_act;
    ew.act_at = 15; /* in the second pass */
    assert_int_equal(k3_engine_step(ew.e), 1);
    assert_int_equal(k3_engine_step(ew.e), 1);
    assert_int_equal(ew.n_ticks, 16);
    assert_true(ew.abort);
    assert_int_equal(k3_engine_step(ew.e), -ECANCELED);
    for (unsigned i = 0; i < 3; i++) {
        k3_ew_answer(&ew, s[i].id, &a);
        assert_string_equal(a.end, "error");
        assert_int_equal(a.code, 3);
        assert_non_null(strstr(a.message, "shutting down"));
    }
    s[0] = k3_ew_sampled(9);
    assert_int_equal(k3_engine_submit(ew.e, &s[0], false, &known, &err), -ESHUTDOWN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(cancel_ends_the_pass_within_a_layer, close_engine),
        cmocka_unit_test_teardown(cancel_leaves_the_others_alone, close_engine),
        cmocka_unit_test_teardown(cancel_reaches_the_queue, close_engine),
        cmocka_unit_test_teardown(ended_ones_expire, close_engine),
        cmocka_unit_test_teardown(unreadable_weights_fail_only_that_pass, close_engine),
        cmocka_unit_test_teardown(not_finite_logits_are_an_error, close_engine),
        cmocka_unit_test_teardown(stopping_ends_everything, close_engine),
    };

    return cmocka_run_group_tests(tests, k3_ew_open_demo, k3_ew_close_demo);
}
