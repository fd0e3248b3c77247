/* constrain/: which texts a schema allows, which it does not; that every walk through the mask ends in a valid value; that the mask
 * says of each id what the machine says of its bytes. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "constrain/machine.h"
#include "tests/unit/json_valid.h"

#define RELEASED_RANKS "../shared/data"
#define ENDING_BYTES 20000

static struct k3_walk *w;
static struct k3_vocab *v;

static int setup(void **state)
{
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    if (k3_walk_new(&w, &err) < 0 || k3_vocab_open(&v, "run/demo-model", &err) < 0)
        fail_msg("%s", err.text);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    k3_walk_free(w);
    k3_vocab_free(v);
    return 0;
}

/* schema NULL: any object. */
static struct k3_grammar *grammar(const char *schema)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_grammar *g = NULL;

    if ((schema ? k3_grammar_schema(&g, schema, strlen(schema), &err) : k3_grammar_object(&g, &err)) < 0)
        fail_msg("%s: %s", schema, err.text);
    return g;
}

static struct k3_machine *machine(const struct k3_grammar *g)
{
    struct k3_machine *m = NULL;

    assert_int_equal(k3_machine_new(&m, g, NULL), 0);
    return m;
}

/* -1: not allowed from some byte on; 0: a beginning; 1: a whole value. */
static int verdict(const struct k3_grammar *g, const char *text, size_t len)
{
    struct k3_machine *m = machine(g);
    int rc = 1, whole;

    for (size_t i = 0; i < len && rc == 1; i++)
        rc = k3_machine_feed(m, w, text + i, 1);
    whole = rc == 1 ? k3_machine_complete(m) : -1;
    k3_machine_free(m);
    m = machine(g); /* the same in one piece */
    assert_int_equal(k3_machine_feed(m, w, text, len), rc);
    assert_true(rc == 0 || k3_machine_complete(m) == (whole == 1));
    assert_true(k3_machine_bytes(m) <= K3_MACHINE_STATE_BYTES);
    k3_machine_free(m);
    return whole;
}

#define PERSON "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":3},\"age\":{\"type\":[\"integer\",\"null\"]}," \
               "\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"ab\",\"\\u00e9\\\"\"]},\"minItems\":1,\"maxItems\":2}},\"required\":[\"name\",\"tags\"]," \
               "\"additionalProperties\":false}"
#define X64 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
#define LONG X64 X64 X64 X64 /* as a name in a $ref */
#define LIST "{\"$ref\":\"#/$defs/node\",\"$defs\":{\"node\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"anyOf\":[{\"$ref\":" \
             "\"#/$defs/node\"},{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"],\"additionalProperties\":false}}}"
#define SHAPES "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"circle\"},\"r\":{\"type\":\"number\"}},\"required\":[\"kind\",\"r\"]}," \
               "{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"square\"},\"a\":{\"type\":\"number\"}},\"required\":[\"kind\",\"a\"]}]}"

static const struct { const char *schema, *text; int verdict; } table[] = {
    /* words, numbers */
    { "true", "null", 1 }, { "true", "true", 1 }, { "true", "nul", 0 }, { "true", "nulL", -1 }, { "{}", "[]", 1 }, { "true", " 1", -1 },
    { "{\"type\":\"boolean\"}", "false", 1 }, { "{\"type\":\"boolean\"}", "null", -1 }, { "{\"type\":\"null\"}", "null", 1 },
    { "{\"type\":\"number\"}", "0", 1 }, { "{\"type\":\"number\"}", "-0.25e-12", 1 }, { "{\"type\":\"number\"}", "01", -1 },
    { "{\"type\":\"number\"}", "-", 0 }, { "{\"type\":\"number\"}", "1.", 0 }, { "{\"type\":\"number\"}", "1.e", -1 },
    { "{\"type\":\"number\"}", "+1", -1 }, { "{\"type\":\"number\"}", "1E+9", 1 }, { "{\"type\":\"number\"}", "1e999", -1 },
    { "{\"type\":\"number\"}", "123456789012345678", 1 }, { "{\"type\":\"number\"}", "1234567890123456789", -1 },
    { "{\"type\":\"number\"}", "1.12345678901234567", 1 }, { "{\"type\":\"number\"}", "1.123456789012345678", -1 },
    { "{\"type\":\"integer\"}", "-12", 1 }, { "{\"type\":\"integer\"}", "1.0", -1 }, { "{\"type\":\"integer\"}", "1e3", -1 },
    { "{\"type\":[\"integer\",\"number\"]}", "1.5", 1 }, { "{\"type\":\"number\"}", "1 ", -1 }, { "{\"type\":\"number\"}", "\"1\"", -1 },
    /* strings */
    { "{\"type\":\"string\"}", "\"\"", 1 }, { "{\"type\":\"string\"}", "\"a\\n\\u00e9\\/\"", 1 }, { "{\"type\":\"string\"}", "\"\\x\"", -1 },
    { "{\"type\":\"string\"}", "\"a\nb\"", -1 }, { "{\"type\":\"string\"}", "\"\x7f\"", 1 }, { "{\"type\":\"string\"}", "\"\\ud83d\\uDE42\"", 1 },
    { "{\"type\":\"string\"}", "\"\\ud83d\"", -1 }, { "{\"type\":\"string\"}", "\"\\ud83d\\n\"", -1 }, { "{\"type\":\"string\"}", "\"\\ud83d\\ud83d\"", -1 },
    { "{\"type\":\"string\"}", "\"\\ude42\"", -1 }, { "{\"type\":\"string\"}", "\"\\uD7ff\\uE000\"", 1 }, { "{\"type\":\"string\"}", "\"\\u12g4\"", -1 },
    { "{\"type\":\"string\"}", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\"", 1 }, { "{\"type\":\"string\"}", "\"\xc0\xaf\"", -1 },
    { "{\"type\":\"string\"}", "\"\xed\xa0\x80\"", -1 }, { "{\"type\":\"string\"}", "\"\xf4\x90\x80\x80\"", -1 }, { "{\"type\":\"string\"}", "\"\xe2\x82\"", -1 },
    { "{\"type\":\"string\"}", "\"\x80\"", -1 }, { "{\"type\":\"string\"}", "\"\xe0\x9f\x80\"", -1 }, { "{\"type\":\"string\"}", "\"\xf0\x8f\x80\x80\"", -1 },
    { "{\"minLength\":2,\"maxLength\":2}", "\"ab\"", 1 }, { "{\"minLength\":2,\"maxLength\":2}", "\"a\"", -1 },
    { "{\"minLength\":2,\"maxLength\":2}", "\"abc", -1 }, { "{\"maxLength\":2}", "\"\xf0\x9f\x99\x82\\ud83d\\ude42\"", 1 }, { "{\"maxLength\":0}", "\"\"", 1 },
    /* arrays */
    { "{\"type\":\"array\"}", "[1, \"a\", [], {}]", 1 }, { "{\"type\":\"array\"}", "[1,]", -1 }, { "{\"type\":\"array\"}", "[,", -1 },
    { "{\"items\":{\"type\":\"integer\"}}", "[1,2]", 1 }, { "{\"items\":{\"type\":\"integer\"}}", "[1,\"", -1 }, { "{\"items\":false}", "[]", 1 },
    { "{\"items\":false}", "[1", -1 }, { "{\"minItems\":1}", "[]", -1 }, { "{\"minItems\":1,\"maxItems\":1}", "[1]", 1 }, { "{\"maxItems\":1}", "[1,", -1 },
    { "{\"maxItems\":0}", "[1", -1 }, { "{\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"number\"}],\"items\":false}", "[\"a\",1]", 1 },
    { "{\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"number\"}],\"items\":false}", "[\"a\"]", 1 },
    { "{\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"number\"}],\"items\":false}", "[\"a\",1,", -1 },
    { "{\"prefixItems\":[{\"type\":\"string\"}],\"minItems\":2}", "[\"a\"]", -1 }, { "{\"prefixItems\":[{\"type\":\"string\"}],\"minItems\":2}", "[\"a\",null]", 1 },
    { "{\"prefixItems\":[{\"type\":\"string\"}]}", "[1", -1 },
    /* white space */
    { "true", "[\n        1,\n    2\n]", -1 }, { "true", "[\n    1,\n    2\n]", 1 }, { "true", "[ 1, 2 ]", 1 }, { "true", "[  1", -1 }, { "true", "[1 ,", -1 },
    { "true", "{\"a\": 1,\n\t\"b\": {\n\t\t\"c\": 2\n\t}\n}", 1 }, { "true", "{\"a\" :", -1 }, { "true", "{\"a\":\n", -1 }, { "true", "{\"a\":  ", -1 },
    { "true", "[\n\n", -1 }, { "true", "[] ", -1 }, { "true", "\n[", -1 }, { "true", "[\r\n", -1 }, { "{\"required\":[\"a\"]}", "{ }", -1 },
    { "{\"items\":{\"minItems\":2}}", "[[1 ", -1 },
    /* objects */
    { NULL, "{}", 1 }, { NULL, "{\"a\": {\"b\": [null]}, \"c\": \"d\"}", 1 }, { NULL, "[", -1 }, { NULL, "{\"a\":1,}", -1 }, { NULL, "{a", -1 },
    { NULL, "{\"a\":1,\"a\":", -1 }, { NULL, "{\"a\":1,\"ab\":2,\"\":3,\"b\":{\"a\":1}}", 1 }, { NULL, "{\"a\\u0062\"", -1 }, { NULL, "{\"\xc3\xa9\":1}", 1 },
    { NULL, "{\"\xc3\"", -1 }, { NULL, "{\"a\":1", 0 },
    { PERSON, "{\"name\":\"Bo\",\"age\":3,\"tags\":[\"ab\",\"a\"]}", 1 }, { PERSON, "{\"name\":\"Bo\",\"tags\":[\"\xc3\xa9\\\"\"]}", 1 },
    { PERSON, "{\"name\":\"Bo\",\"age\":null,\"tags\":[\"a\"]}", 1 }, { PERSON, "{\"name\":\"Bo\",\"age\":\"", -1 }, { PERSON, "{\"age\"", -1 },
    { PERSON, "{\"name\":\"\"", -1 }, { PERSON, "{\"name\":\"Bo\"}", -1 }, { PERSON, "{\"name\":\"Bo\",\"x", -1 }, { PERSON, "{\"name\":\"Bo\",\"name", -1 },
    { PERSON, "{\"name\":\"Bo\",\"tags\":[\"a\"],\"age\":3}", -1 }, { PERSON, "{\"name\":\"Bo\",\"tags\":[\"a\"],", -1 }, { PERSON, "{}", -1 },
    { PERSON, "{\"name\":\"Bo\",\"tags\":[\"b", -1 }, { PERSON, "{\"name\":\"Bo\",\"tags\":[]", -1 }, { PERSON, "{\"name\":\"Bo\",\"tags\":[\"a\",\"a\",", -1 },
    { "{\"properties\":{\"a\":true},\"additionalProperties\":{\"type\":\"integer\"}}", "{\"a\":\"x\",\"b\":1,\"c\":2}", 1 },
    { "{\"properties\":{\"a\":true},\"additionalProperties\":{\"type\":\"integer\"}}", "{\"b\":1,\"a\":", -1 },
    { "{\"properties\":{\"a\":true},\"additionalProperties\":{\"type\":\"integer\"}}", "{\"b\":\"", -1 },
    { "{\"properties\":{\"a\":true,\"b\":true},\"required\":[\"b\"],\"additionalProperties\":true}", "{\"z", -1 },
    { "{\"properties\":{\"a\":true,\"b\":true},\"required\":[\"b\"],\"additionalProperties\":true}", "{\"a\":1,\"b\":2,\"z\":3}", 1 },
    { "{\"properties\":{\"a\":true,\"b\":true},\"required\":[\"b\"],\"additionalProperties\":true}", "{\"bb\":3", -1 },
    { "{\"properties\":{\"a\":true},\"required\":[\"x\",\"x\",\"y\"]}", "{\"x\":1,\"y\":2}", 1 }, { "{\"properties\":{\"a\":true},\"required\":[\"x\"]}", "{\"a\":1}", -1 },
    { "{\"properties\":{\"a\":false,\"b\":true}}", "{\"a", -1 }, { "{\"properties\":{\"a\":false,\"b\":true}}", "{\"b\":1}", 1 },
    { "{\"properties\":{\"a\":false},\"additionalProperties\":true}", "{\"a\"", -1 }, { "{\"properties\":{\"q\\\"\\n\":true}}", "{\"q\\\"\\n\":1}", 1 },
    /* alternatives */
    { "{\"enum\":[1,12,\"1\",null,{\"a\":[1]},1.5]}", "12", 1 }, { "{\"enum\":[1,12,\"1\",null]}", "1", 1 }, { "{\"enum\":[1,12,\"1\",null]}", "13", -1 },
    { "{\"items\":{\"enum\":[1,12,123]}}", "[1,12,123]", 1 }, { "{\"items\":{\"enum\":[1,12,123]}}", "[12 ]", 1 }, { "{\"items\":{\"enum\":[12,123]}}", "[1,", -1 },
    { "{\"enum\":[1,12,\"1\",null,{\"a\":[1]}]}", "{\"a\":[1]}", 1 }, { "{\"enum\":[{\"a\":[1]}]}", "{\"a\": ", -1 }, { "{\"const\":\"x\"}", "\"x\"", 1 },
    { "{\"const\":\"x\"}", "\"xx", -1 }, { "{\"type\":\"string\",\"enum\":[\"a\",1]}", "1", -1 }, { "{\"type\":[\"integer\"],\"enum\":[\"a\",1.0,2.5]}", "1.0", 1 },
    { "{\"type\":\"integer\",\"enum\":[2.5,1]}", "2", -1 }, { SHAPES, "{\"kind\":\"circle\",\"r\":1}", 1 }, { SHAPES, "{\"kind\":\"square\",\"a\":1}", 1 },
    { SHAPES, "{\"kind\":\"square\",\"r", -1 }, { SHAPES, "{\"kind\":\"c", 0 }, { "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "1.5", 1 },
    { "{\"items\":{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"number\"},{\"type\":\"integer\"}]}}", "[1,1.5,2]", 1 },
    { "{\"anyOf\":[{\"items\":{\"type\":\"string\"}},{\"items\":{\"type\":\"null\"}}]}", "[null,\"", -1 },
    { "{\"allOf\":[{\"type\":\"null\"}],\"description\":\"d\"}", "null", 1 },
    /* recursion */
    { LIST, "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}", 1 }, { LIST, "{\"v\":1,\"next\":{\"v\":2,\"next\":1", -1 },
    { "{\"anyOf\":[{\"type\":\"null\"},{\"$ref\":\"#\"}]}", "null", 1 }, { "{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}", "[[],[[]]]", 1 },
    { "{\"properties\":{\"a\":{\"$ref\":\"#/properties/b\"},\"b\":{\"type\":\"null\"}}}", "{\"a\":null}", 1 },
    { "{\"$defs\":{\"a/b~c\":{\"type\":\"null\"}},\"$ref\":\"#/$defs/a~1b~0c\"}", "null", 1 },
    { "{\"$defs\":{\"" LONG "\":{\"type\":\"null\"},\"" LONG "b\":{\"const\":1}},\"$ref\":\"#/$defs/" LONG "b\"}", "1", 1 },
    { "{\"anyOf\":[{\"type\":\"null\"},{\"properties\":{\"a\":{\"$ref\":\"#/anyOf/1\"}},\"required\":[\"a\"]}]}", "{\"a", -1 }, /* it would never end */
};

static void allows_what_the_table_says(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        struct k3_grammar *g = grammar(table[i].schema);
        int got = verdict(g, table[i].text, strlen(table[i].text));

        if (got != table[i].verdict)
            fail_msg("%s: %s is %d, not %d", table[i].schema, table[i].text, got, table[i].verdict);
        if (got == 1) { /* what is allowed is valid */
            cJSON *s = cJSON_Parse(table[i].schema ? table[i].schema : "{\"type\":\"object\"}"), *x = cJSON_Parse(table[i].text);

            if (!x || !json_valid(x, s, s))
                fail_msg("%s: %s is no value of it", table[i].schema, table[i].text);
            cJSON_Delete(s);
            cJSON_Delete(x);
        }
        k3_grammar_free(g);
    }
}

static void nests_no_deeper_than_it_can_close(void **state)
{
    struct k3_grammar *g = grammar("true"), *list = grammar(LIST);
    char text[1000] = "";

    (void)state;
    for (unsigned i = 0; i < K3_NEST_MAX; i++)
        strcat(text, "[");
    assert_int_equal(verdict(g, text, strlen(text)), 0);
    strcat(text, "1");
    assert_int_equal(verdict(g, text, strlen(text)), 0);
    text[K3_NEST_MAX] = '[';
    assert_int_equal(verdict(g, text, strlen(text)), -1);
    text[0] = 0;
    for (unsigned i = 0; i < K3_NEST_MAX; i++)
        strcat(text, "{\"v\":1,\"next\":");
    assert_int_equal(verdict(list, text, strlen(text)), 0);
    strcat(text, "{");
    assert_int_equal(verdict(list, text, strlen(text)), -1);
    k3_grammar_free(g);
    k3_grammar_free(list);
}

static void holds_little_of_an_object_with_many_members(void **state)
{
    struct k3_grammar *g = grammar("{\"anyOf\":[{\"additionalProperties\":true},{\"additionalProperties\":{\"type\":\"integer\"}}]}");
    struct k3_machine *m = machine(g);
    char member[40];
    int rc = k3_machine_feed(m, w, "{", 1);

    (void)state;
    for (unsigned i = 0; i < K3_FREE_KEYS_MAX; i++) {
        snprintf(member, sizeof(member), "%s\"k%u\":%u", i ? "," : "", i, i);
        assert_int_equal(rc = k3_machine_feed(m, w, member, strlen(member)), 1);
    }
    assert_int_equal(k3_machine_feed(m, w, ",", 1), 0);
    assert_int_equal(k3_machine_feed(m, w, "}", 1), 1);
    assert_true(k3_machine_complete(m));
    assert_true(k3_machine_bytes(m) <= K3_MACHINE_STATE_BYTES);
    k3_machine_free(m);
    k3_grammar_free(g);
}

/* ---- walks through the mask ---- */

static uint64_t seed = 1;

static uint32_t random_below(uint32_t n)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((seed >> 33) % n);
}

static const char *const walked[] = {
    NULL, "true", PERSON, LIST, SHAPES,
    "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"},\"b\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}},\"ab\":{\"type\":\"string\",\"minLength\":3}},"
    "\"additionalProperties\":{\"type\":\"boolean\"}}",
    "{\"prefixItems\":[{\"type\":\"number\"},{\"enum\":[1,12,\"a\\\"b\"]},{\"type\":[\"string\",\"null\"],\"maxLength\":4}],\"items\":{\"anyOf\":[{\"type\":\"integer\"},"
    "{\"type\":\"array\",\"items\":{\"type\":\"boolean\"}}]},\"minItems\":4}",
};

/* The byte that is nearest to an end. */
static int ending_byte(const struct k3_machine *m)
{
    static const char prefer[] = "\"}]:0123456789eaEnultrfsbcdghijkmopqvwxyz,-{[ \\";
    uint64_t allowed[64] = { 0 };
    char byte;

    assert_true(v->n <= 64 * 64);
    assert_int_equal(k3_machine_mask(m, w, v, allowed), 0);
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < (pass ? 256 : (int)strlen(prefer)); i++) {
            byte = pass ? (char)i : prefer[i];
            for (uint32_t id = 0; id < v->n; id++) {
                size_t len;
                const char *bytes = k3_vocab_token(v, id, &len);

                if (len == 1 && bytes[0] == byte && k3_bit(allowed, id))
                    return (uint8_t)byte;
            }
        }
    return -1;
}

/* One id at random of those allowed. */
static uint32_t random_id(const struct k3_machine *m)
{
    uint64_t allowed[64] = { 0 };
    uint32_t n = 0, which;

    assert_int_equal(k3_machine_mask(m, w, v, allowed), 0);
    for (uint32_t id = 0; id < v->n; id++)
        n += k3_bit(allowed, id);
    if (n == 0)
        return UINT32_MAX;
    which = random_below(n);
    for (uint32_t id = 0;; id++)
        if (k3_bit(allowed, id) && which-- == 0)
            return id;
}

static void every_walk_ends_in_a_valid_value(void **state)
{
    (void)state;
    for (size_t k = 0; k < 60 * sizeof(walked) / sizeof(walked[0]); k++) {
        const char *schema = walked[k % (sizeof(walked) / sizeof(walked[0]))];
        struct k3_grammar *g = grammar(schema);
        struct k3_machine *m = machine(g);
        static char text[2 * ENDING_BYTES];
        size_t len = 0, n;
        cJSON *s, *x;

        for (unsigned i = random_below(80); i > 0; i--) {
            uint32_t id = random_id(m);
            const char *bytes;

            if (id == UINT32_MAX)
                break;
            bytes = k3_vocab_token(v, id, &n);
            memcpy(text + len, bytes, n);
            len += n;
            assert_int_equal(k3_machine_feed(m, w, bytes, n), 1);
        }
        while (!k3_machine_complete(m)) {
            int byte = ending_byte(m);
            char c = (char)byte;

            if (byte < 0 || len > ENDING_BYTES)
                fail_msg("%s: %.*s has no end", schema, (int)len, text);
            text[len++] = c;
            assert_int_equal(k3_machine_feed(m, w, &c, 1), 1);
        }
        text[len] = 0;
        s = cJSON_Parse(schema ? schema : "{\"type\":\"object\"}");
        x = cJSON_Parse(text);
        if (!x || !json_valid(x, s, s))
            fail_msg("%s: %s is no value of it", schema, text);
        cJSON_Delete(s);
        cJSON_Delete(x);
        k3_machine_free(m);
        k3_grammar_free(g);
    }
}

static void the_mask_is_what_the_machine_takes(void **state)
{
    (void)state;
    for (size_t k = 0; k < 6 * sizeof(walked) / sizeof(walked[0]); k++) {
        struct k3_grammar *g = grammar(walked[k % (sizeof(walked) / sizeof(walked[0]))]);
        static char text[ENDING_BYTES];
        struct k3_machine *m = machine(g), *again;
        uint64_t allowed[64] = { 0 };
        size_t len = 0, n;
        const char *bytes;

        for (unsigned i = random_below(20); i > 0; i--) {
            uint32_t id = random_id(m);

            if (id == UINT32_MAX)
                break;
            bytes = k3_vocab_token(v, id, &n);
            memcpy(text + len, bytes, n);
            len += n;
            assert_int_equal(k3_machine_feed(m, w, bytes, n), 1);
        }
        assert_int_equal(k3_machine_mask(m, w, v, allowed), 0);
        for (uint32_t id = 0; id < v->n; id++) {
            int takes;

            again = machine(g);
            assert_int_equal(k3_machine_feed(again, w, text, len), 1);
            bytes = k3_vocab_token(v, id, &n);
            takes = k3_machine_feed(again, w, bytes, n);
            if (takes != k3_bit(allowed, id))
                fail_msg("behind %.*s: id %u is %d, in the mask %d", (int)len, text, id, takes, k3_bit(allowed, id));
            k3_machine_free(again);
        }
        k3_machine_free(m);
        k3_grammar_free(g);
    }
}

static void the_released_vocabulary_in_its_order(void **state)
{
    struct k3_grammar *g = grammar(NULL);
    struct k3_machine *m = machine(g);
    struct k3_vocab *big = NULL;
    struct timespec from, to;
    static uint64_t allowed[163840 / 64];
    uint32_t n = 0, n_text = 0;
    size_t len;

    (void)state;
    if (access(RELEASED_RANKS "/tiktoken.model", R_OK) != 0)
        skip();
    assert_int_equal(k3_vocab_open(&big, RELEASED_RANKS, NULL), 0);
    assert_int_equal(big->n, 163584);
    assert_int_equal(big->longest_bytes, 256);
    for (uint32_t i = 1; i < big->n; i++) {
        const char *a = k3_vocab_token(big, big->id[i], &len);

        assert_true(len > big->alike[i] && a == big->bytes + big->off[i]);
        assert_true((uint8_t)a[big->alike[i]] > (uint8_t)big->bytes[big->off[i - 1] + big->alike[i]] ||
                    big->alike[i] == big->off[i] - big->off[i - 1]);
    }
    for (int inside = 0; inside < 2; inside++) { /* where structure is due, and in a string */
        assert_int_equal(inside ? k3_machine_feed(m, w, ",\"b\": \"", 7) : k3_machine_feed(m, w, "{\"a\": \"x\"", 9), 1);
        memset(allowed, 0, sizeof(allowed));
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        assert_int_equal(k3_machine_mask(m, w, big, allowed), 0);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        print_message("the mask of %u ids in %.2f ms\n", big->n,
                      1e3 * (double)(to.tv_sec - from.tv_sec) + 1e-6 * (double)(to.tv_nsec - from.tv_nsec));
    }
    for (uint32_t id = 0; id < big->n; id++) {
        const char *bytes = k3_vocab_token(big, id, &len);
        bool plain = true;

        for (size_t i = 0; i < len; i++)
            plain &= (uint8_t)bytes[i] >= 0x20 && (uint8_t)bytes[i] < 0x80 && bytes[i] != '"' && bytes[i] != '\\';
        n_text += plain;
        n += k3_bit(allowed, id);
        assert_true(!plain || k3_bit(allowed, id));
    }
    assert_true(n > n_text);
    k3_vocab_free(big);
    k3_machine_free(m);
    k3_grammar_free(g);
}

static void refuses_ranks_that_are_no_vocabulary(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_vocab *out = NULL;

    (void)state;
    assert_int_equal(k3_vocab_parse(&out, "IQ== 0\nIQ== 1\n", 14, "ranks", &err), -EEXIST);
    assert_non_null(strstr(err.text, "line 2: the same token as line 1"));
    assert_int_equal(k3_vocab_parse(&out, "IQ== 0\nIg== 1\n", 14, "ranks", &err), -ENOENT);
    assert_non_null(strstr(err.text, "single byte 0x00"));
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_int_equal(k3_vocab_open(&out, "/nowhere", &err), -ENOENT);
    assert_null(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allows_what_the_table_says),
        cmocka_unit_test(nests_no_deeper_than_it_can_close),
        cmocka_unit_test(holds_little_of_an_object_with_many_members),
        cmocka_unit_test(every_walk_ends_in_a_valid_value),
        cmocka_unit_test(the_mask_is_what_the_machine_takes),
        cmocka_unit_test(the_released_vocabulary_in_its_order),
        cmocka_unit_test(refuses_ranks_that_are_no_vocabulary),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
