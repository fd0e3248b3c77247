/* k3-computed/engine_prefix.c on the demo model: what is not computed again, and that no bit of an answer depends on it. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/computed.h"
#include "tests/unit/engine_world.h"

#define CTX 400u

static struct k3_ew ew;
static struct k3_ew_answer a, b;

static int close_engine(void **state)
{
    (void)state;
    k3_ew_close(&ew);
    k3_ew_snapshots = 0;
    return 0;
}

static void open_engine(uint32_t n_sequences, uint32_t rows, uint32_t n_snapshots)
{
    k3_ew_snapshots = n_snapshots;
    k3_ew_open(&ew, &k3_ew_demo, n_sequences, rows, CTX);
}

static long cached(const char *id)
{
    cJSON *reply = cJSON_CreateObject();
    struct k3_err err = K3_ERR_INIT;
    long n;

    assert_int_equal(k3_engine_poll(ew.e, id, 0, -1, 0, reply, &err), 0);
    n = (long)cJSON_GetNumberValue(cJSON_GetObjectItem(reply, "cached"));
    cJSON_Delete(reply);
    return n;
}

static void same(const struct k3_ew_answer *x, const struct k3_ew_answer *y)
{
    k3_ew_same(x, y);
    assert_int_equal(x->has_logits, y->has_logits);
    assert_true(x->logits_hash == y->logits_hash);
}

/* The same request where nothing was before. */
static void ask_afresh(const struct k3_submit *s, struct k3_ew_answer *out)
{
    static struct k3_ew other;
    uint32_t snapshots = k3_ew_snapshots;

    k3_ew_snapshots = 0;
    k3_ew_open(&other, &k3_ew_demo, 1, 64, CTX);
    k3_ew_ask(&other, s, out);
    assert_int_equal(k3_ew_stat(&other, K3_CS_CACHED_TOKENS), 0);
    k3_ew_close(&other);
    k3_ew_snapshots = snapshots;
}

/* Asks; n_cached positions of the prompt are there, all others are computed, and the answer is that of a fresh engine. */
static void ask(struct k3_submit *s, long n_cached)
{
    static struct k3_ew_answer fresh;
    uint64_t before = k3_ew_stat(&ew, K3_CS_PROMPT_TOKENS), hits = k3_ew_stat(&ew, K3_CS_PREFIX_HITS);
    uint64_t all = k3_ew_stat(&ew, K3_CS_CACHED_TOKENS);

    k3_ew_ask(&ew, s, &a);
    assert_int_equal(cached(s->id), n_cached);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_PROMPT_TOKENS) - before, s->n_prompt - n_cached);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_CACHED_TOKENS) - all, n_cached);
    assert_int_equal(k3_ew_stat(&ew, K3_CS_PREFIX_HITS) - hits, n_cached > 0);
    ask_afresh(s, &fresh);
    same(&a, &fresh);
}

static struct k3_submit submit(unsigned id, const uint32_t *prompt, uint32_t n_prompt)
{
    struct k3_submit s = k3_ew_submit(id, prompt, n_prompt);

    s.max_tokens = 6;
    s.logits = true;
    return s;
}

static struct k3_submit with_point(struct k3_submit s, uint32_t n)
{
    s.point[s.n_points++] = n;
    return s;
}

/* ---- conversations ----------------------------------------------------------------------------------------------------- */

static uint32_t talk[CTX]; /* prompt, answer, next message */

/* After a prompt of n_prompt from `from` and the answer in a: both, and n_more ids. */
static uint32_t go_on(const uint32_t *from, uint32_t n_prompt, uint32_t n_more)
{
    memmove(talk, from, n_prompt * sizeof(*talk));
    memcpy(talk + n_prompt, a.token, a.n_tokens * sizeof(*talk));
    memcpy(talk + n_prompt + a.n_tokens, k3_ew_long + 50, n_more * sizeof(*talk));
    return n_prompt + a.n_tokens + n_more;
}

static void a_conversation_goes_on_in_its_slot(void **state)
{
    uint32_t n = 40;

    (void)state;
    open_engine(1, 64, 0); /* without a snapshot: the slot itself is enough */
    memcpy(talk, k3_ew_long, n * sizeof(*talk));
    for (unsigned turn = 0; turn < 4; turn++) {
        struct k3_submit s = submit(turn, talk, n);

        ask(&s, turn ? (long)n - 11 : 0); /* all but the new message, and the last token, which never ran */
        n = go_on(talk, n, 10);
    }
    /* Another conversation takes the slot; what was there is gone. */
    struct k3_submit s = submit(10, k3_ew_france, K3_EW_N_FRANCE);
    ask(&s, 0);
    s = submit(11, talk, n);
    ask(&s, 0);
}

/* What was said for one request alone is not in the next prompt: that begins at the point before it. */
static void the_end_of_the_history_is_kept_in_passing(void **state)
{
    static uint32_t other[60];
    struct k3_submit s;

    (void)state;
    memcpy(other, k3_ew_long, 50 * sizeof(*other));
    memcpy(other + 50, k3_ew_france, 10 * sizeof(*other));
    for (uint32_t rows = 7; rows <= 64; rows += 57) {
        open_engine(1, rows, 1);
        s = with_point(submit(1, k3_ew_long, 60), 50);
        ask(&s, 0);
        if (rows == 64) /* no pass more than without: the prompt, and a token each */
            assert_int_equal(k3_ew_stat(&ew, K3_CS_PASSES), 6);
        s = submit(2, other, 60);
        ask(&s, 50);
        assert_int_equal(k3_ew_stat(&ew, K3_CS_SNAPSHOTS), 1);
        s = submit(3, k3_ew_long + 1, 60); /* the same ids, but not from the beginning */
        ask(&s, 0);
        if (rows == 7)
            k3_ew_close(&ew);
    }
}

/* A prompt that is there whole: one row runs all the same, and the logits are its own. */
static void the_same_prompt_again_runs_one_row(void **state)
{
    struct k3_submit s = with_point(with_point(submit(1, k3_ew_long, 80), 79), 80);

    (void)state;
    open_engine(1, 64, 4);
    ask(&s, 0);
    s.id[0] = '1';
    ask(&s, 79);
    s.logits = false; /* generated ids, too: only the last of them runs */
    s.id[0] = '2';
    s.n_generated = 4;
    memcpy(talk, a.token, a.n_tokens * sizeof(*talk));
    s.generated = talk;
    k3_ew_ask(&ew, &s, &b);
    assert_int_equal(cached(s.id), 80);
    assert_int_equal(b.n_tokens, 2);
    assert_memory_equal(b.token, talk + 4, 2 * sizeof(*talk));
    s.logits = true; /* and with the logits of the first: from there on */
    s.id[0] = '3';
    k3_ew_ask(&ew, &s, &b);
    assert_int_equal(cached(s.id), 79);
    assert_true(b.logits_hash == a.logits_hash);
}

/* One slot and two conversations in turn: each finds what the other had to make room for. */
static void conversations_take_turns(void **state)
{
    static uint32_t one[CTX], two[CTX];
    uint32_t n_one = 40, n_two = 30;

    (void)state;
    open_engine(1, 64, 3);
    memcpy(one, k3_ew_long, n_one * sizeof(*one));
    memcpy(two, k3_ew_france, K3_EW_N_FRANCE * sizeof(*two));
    for (unsigned turn = 0; turn < 3; turn++) {
        struct k3_submit s = submit(2 * turn, one, n_one);

        ask(&s, turn ? (long)n_one - 11 : 0);
        n_one = go_on(one, n_one, 10);
        memcpy(one, talk, sizeof(talk));
        s = submit(2 * turn + 1, two, n_two);
        ask(&s, turn ? (long)n_two - 6 : 0);
        n_two = go_on(two, n_two, 5);
        memcpy(two, talk, sizeof(talk));
    }
}

/* With two slots and one snapshot the oldest of three conversations has to go. */
static void the_oldest_is_forgotten(void **state)
{
    struct k3_submit s[4];
    long at[4];

    (void)state;
    open_engine(2, 64, 1);
    for (unsigned i = 0; i < 4; i++) {
        s[i] = submit(i, k3_ew_long + 30 * i, 30);
        s[i].max_tokens = 1; /* so that all of the prompt is what is held */
        at[i] = i ? 30 : 0;
        ask(&s[i], 0);
    }
    assert_int_equal(k3_ew_stat(&ew, K3_CS_SNAPSHOTS_EVICTED), 1);
    for (unsigned i = 4; i-- > 0;) { /* the last ones first: they are in slots */
        memcpy(talk, s[i].prompt, 30 * sizeof(*talk));
        memcpy(talk + 30, k3_ew_france, 5 * sizeof(*talk));
        struct k3_submit next = submit(10 + i, talk, 35);
        ask(&next, at[i]);
    }
}

/* ---- passes that are cut short ----------------------------------------------------------------------------------------- */

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

/* Runs s until `pass` passes are done, and cancels it in the middle of the next one. */
static void cut_short(struct k3_submit *s, uint32_t n_passes, void (*act)(struct k3_ew *))
{
    struct k3_file_source_counts before, after;

    k3_ew_must_submit(&ew, s);
    for (uint32_t i = 0; i < n_passes; i++)
        assert_int_equal(k3_engine_step(ew.e), 1);
    k3_file_source_counts(ew.run.file, &before);
    ew.act = act;
    ew.act_id = s->id;
    ew.act_at = ew.n_ticks + 5;
    assert_int_equal(k3_engine_step(ew.e), 1);
    ew.act_at = 0;
    k3_file_source_counts(ew.run.file, &after);
    assert_int_equal(after.failed_passes - before.failed_passes, 1);
}

static void a_prompt_that_was_left_goes_on_where_it_was(void **state)
{
    (void)state;
    for (uint32_t n_snapshots = 0; n_snapshots <= 2; n_snapshots++)
        for (int forget = 0; forget < 2; forget++) {
            struct k3_submit s = submit(1, k3_ew_long, 200);

            open_engine(1, 32, n_snapshots);
            cut_short(&s, 3, forget ? forget_act : cancel_act);
            s.id[0] = '1';
            ask(&s, n_snapshots ? 96 : 0);
            assert_int_equal(k3_ew_stat(&ew, K3_CS_SNAPSHOTS), n_snapshots > 0); /* the one it began at; its own has gone */
            if (n_snapshots < 2 || forget == 0)
                k3_ew_close(&ew);
        }
}

static void an_answer_that_was_stopped_is_there_for_the_most_part(void **state)
{
    struct k3_submit s = with_point(submit(1, k3_ew_long, 60), 50), next;

    (void)state;
    open_engine(1, 64, 2);
    s.max_tokens = 200;
    cut_short(&s, 100, cancel_act); /* 60 + 99 positions are done, kept were 50 and 50 + 64 or so */
    k3_ew_answer(&ew, s.id, &a);
    assert_int_equal(a.n_tokens, 100);
    next = submit(2, talk, go_on(k3_ew_long, 60, 10));
    ask(&next, 114);
    k3_ew_close(&ew);
    open_engine(1, 64, 1); /* the only snapshot stays where answers part */
    s.id[0] = '1';
    cut_short(&s, 100, cancel_act);
    k3_ew_answer(&ew, s.id, &a);
    next = submit(3, talk, go_on(k3_ew_long, 60, 10));
    ask(&next, 50);
}

/* The second turn is left in its first pass, which spoils the slot: where it began is still there. */
static void a_second_turn_that_was_left(void **state)
{
    struct k3_submit s = submit(1, k3_ew_long, 40), next;

    (void)state;
    open_engine(1, 64, 2);
    ask(&s, 0);
    next = submit(2, talk, go_on(k3_ew_long, 40, 20));
    cut_short(&next, 0, cancel_act);
    next.id[0] = '1';
    ask(&next, 45);
}

/* One that waits for its turn is let go between passes, and its state is whole. */
static void one_without_rows_is_let_go(void **state)
{
    struct k3_submit first = submit(1, k3_ew_long, 60), second = submit(2, k3_ew_france, K3_EW_N_FRANCE);

    (void)state;
    open_engine(2, 1, 0);
    k3_ew_must_submit(&ew, &first);
    k3_ew_must_submit(&ew, &second);
    for (int i = 0; i < 20; i++)
        assert_int_equal(k3_engine_step(ew.e), 1);
    ew.act = cancel_act;
    ew.act_id = second.id;
    ew.act_at = ew.n_ticks + 5; /* the first one's turn */
    assert_int_equal(k3_engine_step(ew.e), 1);
    k3_ew_run(&ew);
    second.id[0] = '1';
    ask(&second, 10);
}

static void what_failed_is_not_kept(void **state)
{
    struct k3_submit s = with_point(submit(1, k3_ew_long, 60), 50), next = with_point(submit(2, k3_ew_long, 70), 50);

    (void)state;
    open_engine(1, 64, 2);
    k3_ew_must_submit(&ew, &s);
    k3_file_source_fail_block(ew.run.file, 20);
    assert_int_equal(k3_engine_step(ew.e), 1);
    k3_ew_answer(&ew, s.id, &a);
    assert_string_equal(a.end, "error");
    assert_int_equal(k3_ew_stat(&ew, K3_CS_SNAPSHOTS), 0);
    next.max_tokens = 1;
    ask(&next, 0);
    ew.nan_logits = true;
    s = submit(3, k3_ew_france, 20);
    k3_ew_ask(&ew, &s, &a);
    assert_string_equal(a.end, "error");
    ew.nan_logits = false;
    s = submit(4, k3_ew_france, K3_EW_N_FRANCE);
    ask(&s, 0);
    s = submit(5, k3_ew_long, 72);
    ask(&s, 70); /* what was whole still is: moved out of the slot, which was needed */
}

/* ---- points ------------------------------------------------------------------------------------------------------------ */

static void points_are_checked(void **state)
{
    static const struct { uint32_t n, point[3]; } bad[] = { { 1, { 0 } }, { 1, { 61 } }, { 2, { 5, 5 } }, { 3, { 9, 10, 4 } } };
    struct k3_err err = K3_ERR_INIT;
    bool known;

    (void)state;
    open_engine(1, 64, 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct k3_submit s = submit(1, k3_ew_long, 60);

        s.n_points = bad[i].n;
        memcpy(s.point, bad[i].point, sizeof(bad[i].point));
        assert_int_equal(k3_engine_submit(ew.e, &s, false, &known, &err), -EINVAL);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, "snapshot_points["));
    }
}

static void points_are_read(void **state)
{
    static const struct { const char *points; int rc, n; } c[] = {
        { "null", -EINVAL, 0 },     { "5", -EINVAL, 0 },       { "[1.5]", -EINVAL, 0 }, { "[\"1\"]", -EINVAL, 0 }, { "[-1]", -EINVAL, 0 },
        { "[4294967296]", -EINVAL, 0 }, { "[]", 0, 0 },        { "[3,9]", 0, 2 },
        { "[1,2,3,4,5,6,7,8]", 0, 8 },  { "[1,2,3,4,5,6,7,8,9]", -E2BIG, 0 },
    };
    struct k3_err err = K3_ERR_INIT;
    struct k3_submit s;
    char text[512];

    (void)state;
    open_engine(1, 64, 0); /* for the teardown */
    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) {
        cJSON *request;

        snprintf(text, sizeof(text), "{\"id\":\"%032x\",\"prompt_ids\":[1],\"max_tokens\":1,\"temperature\":0,\"top_p\":1,\"top_k\":0,"
                 "\"min_p\":0,\"seed\":\"1\",\"snapshot_points\":%s}", 1, c[i].points);
        assert_non_null(request = cJSON_Parse(text));
        assert_int_equal(k3_computed_submit_parse(request, &s, &err), c[i].rc);
        assert_int_equal(s.n_points, c[i].n);
        if (c[i].rc == 0) {
            assert_int_equal(s.point[0], c[i].n ? cJSON_GetArrayItem(cJSON_GetObjectItem(request, "snapshot_points"), 0)->valueint : 0);
            k3_computed_submit_free(&s);
        } else {
            assert_non_null(strstr(err.text, "snapshot_points"));
        }
        cJSON_Delete(request);
    }
}

/* More points than snapshots: the longest are kept.  All of them in one pass, and in a pass each. */
static void the_longest_points_are_kept(void **state)
{
    (void)state;
    for (uint32_t rows = 10; rows <= 64; rows += 54) {
        struct k3_submit s = submit(1, k3_ew_long, 60);

        open_engine(1, rows, 2);
        for (uint32_t n = 10; n <= 50; n += 10)
            s = with_point(s, n);
        ask(&s, 0);
        memcpy(talk, k3_ew_long, sizeof(k3_ew_long));
        talk[45] ^= 1;
        s = submit(2, talk, 60);
        ask(&s, 40);
        talk[35] ^= 1;
        s = submit(3, talk, 60);
        ask(&s, 0);
        if (rows == 10)
            k3_ew_close(&ew);
    }
}

/* ---- everything at once ------------------------------------------------------------------------------------------------ */

#define N_WALK 60u

static uint32_t next_random(uint32_t *x)
{
    *x = *x * 1664525u + 1013904223u;
    return *x >> 16;
}

/* Prompts that share beginnings of all lengths, several at once, some of them cancelled at any moment: whatever is found, every
 * answer is that of a fresh engine. */
static void no_bit_depends_on_what_was_before(void **state)
{
    static struct k3_ew_answer right[16];
    static uint32_t prompt[16][80];
    static const struct { uint32_t sequences, rows, snapshots; } shape[] = { { 1, 16, 0 }, { 3, 5, 2 }, { 2, 64, 5 }, { 4, 2, 1 } };
    uint32_t x = 2024, n_found = 0;

    (void)state;
    for (unsigned i = 0; i < 16; i++) { /* a tree: four times two ways at 20, 40, 60 and 70 */
        static const uint32_t fork[4] = { 20, 40, 60, 70 };
        struct k3_submit s = submit(i, prompt[i], 80);

        memcpy(prompt[i], k3_ew_long, sizeof(prompt[i]));
        for (unsigned bit = 0; bit < 4; bit++)
            prompt[i][fork[bit]] += i >> bit & 1;
        ask_afresh(&s, &right[i]);
    }
    for (size_t k = 0; k < sizeof(shape) / sizeof(shape[0]); k++) {
        uint32_t which[N_WALK];
        bool dropped[N_WALK] = { false };

        open_engine(shape[k].sequences, shape[k].rows, shape[k].snapshots);
        for (unsigned i = 0; i < N_WALK; i++) {
            struct k3_submit s = submit(1000 + i, prompt[which[i] = next_random(&x) % 16], 80);
            struct k3_err err = K3_ERR_INIT;

            for (uint32_t n = 20; n <= 70; n += 10)
                if (next_random(&x) % 3 == 0)
                    s = with_point(s, n);
            k3_ew_must_submit(&ew, &s);
            for (uint32_t n = next_random(&x) % 12; n; n--)
                k3_engine_step(ew.e);
            if (next_random(&x) % 4 == 0) {
                unsigned j = next_random(&x) % (i + 1);

                snprintf(s.id, sizeof(s.id), "%032x", 1000 + j);
                dropped[j] = true;
                if (next_random(&x) % 2) { /* in the middle of a pass, when one runs */
                    char id[K3_ID_LEN + 1];

                    memcpy(id, s.id, sizeof(id));
                    ew.act = cancel_act;
                    ew.act_id = id;
                    ew.act_at = ew.n_ticks + 4;
                    k3_engine_step(ew.e);
                    ew.act_at = 0;
                } else {
                    assert_int_equal(k3_engine_cancel(ew.e, s.id, &err), 0);
                }
            }
        }
        k3_ew_run(&ew);
        for (unsigned i = 0; i < N_WALK; i++) {
            char id[K3_ID_LEN + 1];

            snprintf(id, sizeof(id), "%032x", 1000 + i);
            k3_ew_answer(&ew, id, &b);
            n_found += cached(id) > 0;
            if (!dropped[i])
                same(&b, &right[which[i]]);
            else
                assert_memory_equal(b.token, right[which[i]].token, b.n_tokens * sizeof(b.token[0]));
        }
        if (k + 1 < sizeof(shape) / sizeof(shape[0]))
            k3_ew_close(&ew);
    }
    assert_true(n_found > 40); /* or nothing was tested */
}

#define TEST(f) cmocka_unit_test_teardown(f, close_engine)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_conversation_goes_on_in_its_slot),
        TEST(the_end_of_the_history_is_kept_in_passing),
        TEST(the_same_prompt_again_runs_one_row),
        TEST(conversations_take_turns),
        TEST(the_oldest_is_forgotten),
        TEST(a_prompt_that_was_left_goes_on_where_it_was),
        TEST(an_answer_that_was_stopped_is_there_for_the_most_part),
        TEST(a_second_turn_that_was_left),
        TEST(one_without_rows_is_let_go),
        TEST(what_failed_is_not_kept),
        TEST(points_are_checked),
        TEST(points_are_read),
        TEST(the_longest_points_are_kept),
        TEST(no_bit_depends_on_what_was_before),
    };

    return cmocka_run_group_tests(tests, k3_ew_open_demo, k3_ew_close_demo);
}
