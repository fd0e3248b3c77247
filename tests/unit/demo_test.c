/* tests/unit/demo_test.c: the pass on the trained demo model against its expected.json: greedy ids
 * and leading logits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "tests/unit/pass_world.h"

#define DIR "run/demo-model"
#define MAX_IDS 96

static cJSON *expected;
static struct k3_world world;

static int open_demo(void **state)
{
    FILE *f = fopen(DIR "/expected.json", "r");
    static char text[1 << 16];

    (void)state;
    if (!f)
        return 0; /* not run from the project's root: the tests skip */
    text[fread(text, 1, sizeof(text) - 1, f)] = 0;
    fclose(f);
    expected = cJSON_Parse(text);
    k3_world_open(&world, DIR);
    return expected ? 0 : -1;
}

static int close_demo(void **state)
{
    (void)state;
    if (expected)
        k3_world_close(&world);
    cJSON_Delete(expected);
    return 0;
}

static uint32_t read_ids(const cJSON *entry, const char *name, uint32_t *ids)
{
    const cJSON *list = cJSON_GetObjectItem(entry, name), *item;
    uint32_t n = 0;

    assert_true(cJSON_GetArraySize(list) > 0 && cJSON_GetArraySize(list) <= MAX_IDS);
    cJSON_ArrayForEach (item, list)
        ids[n++] = (uint32_t)item->valuedouble;
    return n;
}

/* One prompt: prefilled at_once rows a pass, then answered greedily. */
static void answer(struct k3_runner *r, const cJSON *entry, uint32_t at_once)
{
    uint32_t vocab = world.m->cfg.vocab, prompt[MAX_IDS], want[MAX_IDS];
    uint32_t n_prompt = read_ids(entry, "prompt_ids", prompt),
             n_want = read_ids(entry, "generated_ids", want);
    const cJSON *pair;
    struct k3_state *s = k3_world_state(&world, 2 * MAX_IDS);
    float *logits = calloc((size_t)MAX_IDS * vocab, sizeof(float));
    const float *last = logits + (size_t)(n_prompt - 1) * vocab;

    assert_non_null(logits);
    k3_runner_feed(r, s, prompt, n_prompt, at_once, logits, NULL);
    assert_true(cJSON_GetArraySize(cJSON_GetObjectItem(entry, "first_logits")) == 10);
    cJSON_ArrayForEach (pair, cJSON_GetObjectItem(entry, "first_logits")) {
        uint32_t id = (uint32_t)cJSON_GetArrayItem(pair, 0)->valuedouble;
        double value = cJSON_GetArrayItem(pair, 1)->valuedouble;

        if (!(fabs(last[id] - value) <= 1e-4))
            fail_msg("logit of %u is %.9g, should be %.9g", id, last[id], value);
    }
    for (uint32_t n = 0; n < n_want; n++) {
        uint32_t id = k3_world_argmax(last, vocab);

        assert_int_equal(id, want[n]);
        k3_runner_feed(r, s, &id, 1, 1, logits, NULL);
        last = logits;
    }
    free(logits);
    k3_state_free(s);
}

static void answers_and_leading_logits(void **state)
{
    const cJSON *entry;
    struct k3_runner r;
    uint32_t n = 0;

    (void)state;
    if (!expected)
        skip();
    assert_true(
        k3_runner_open(&r, &world, (struct k3_world_opts){ .threads = 2, .kernels = "auto" }));
    cJSON_ArrayForEach (entry, expected)
        answer(&r, entry, n++ % 2 ? 64 : 7);
    assert_int_equal(n, 13);
    k3_runner_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(answers_and_leading_logits) };

    return cmocka_run_group_tests(tests, open_demo, close_demo);
}
