/* constrain/schema.c: what it refuses, and with which words. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "constrain/grammar.h"

static void refused(const char *schema, size_t len, const char *words)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_grammar *g = NULL;
    int rc = k3_grammar_schema(&g, schema, len, &err);

    if (rc == 0 || err.exit_status != K3_EXIT_REFUSED || !strstr(err.text, words) || strlen(err.text) > 900)
        fail_msg("%.*s: %d \"%s\", not with \"%s\"", (int)(len < 200 ? len : 200), schema, rc, err.text, words);
    assert_null(g);
}

static void names_keyword_and_place(void **state)
{
    static const struct { const char *schema, *words; } table[] = {
        { "{\"properties\":{\"x\":{\"type\":\"string\",\"pattern\":\"a\"}}}", "\"pattern\" at /properties/x is not supported; supported: type, enum" },
        { "{\"format\":\"date\"}", "\"format\" at / is not supported" },
        { "{\"anyOf\":[{},{\"minimum\":1}]}", "\"minimum\" at /anyOf/1 is not" },
        { "{\"oneOf\":[{}]}", "\"oneOf\" at / is not" },
        { "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"uniqueItems\":true}}}", "\"uniqueItems\" at /$defs/a is not" },
        { "{\"a\\nb\":1}", "\"a?b\" at / is not" },
        { "{\"type\":\"text\"}", "\"type\" at / must be null, boolean" },
        { "{\"type\":[]}", "\"type\" at / must be" },
        { "{\"type\":[\"string\",1]}", "\"type\" at / must be" },
        { "{\"properties\":[]}", "\"properties\" at / must be" },
        { "{\"required\":[1]}", "\"required\" at / must be" },
        { "{\"required\":\"a\"}", "\"required\" at / must be" },
        { "{\"properties\":{\"a\":1}}", "\"schema\" at /properties/a is neither" },
        { "{\"items\":[{}]}", "write prefixItems" },
        { "{\"prefixItems\":[]}", "\"prefixItems\" at / must" },
        { "{\"minItems\":-1}", "\"minItems\" at / must be a whole number" },
        { "{\"minLength\":1.5}", "\"minLength\" at / must be a whole number" },
        { "{\"maxLength\":1e99}", "\"maxLength\" at / must be a whole number" },
        { "{\"maxItems\":\"1\"}", "\"maxItems\" at / must be a whole number" },
        { "{\"enum\":[]}", "\"enum\" at / must" },
        { "{\"enum\":1}", "\"enum\" at / must" },
        { "{\"anyOf\":[]}", "\"anyOf\" at / must" },
        { "{\"anyOf\":[{}],\"type\":\"object\"}", "\"anyOf\" at / beside \"type\" is not supported" },
        { "{\"enum\":[1],\"minLength\":1}", "\"enum\" at / beside \"minLength\" is not supported" },
        { "{\"enum\":[1],\"const\":1}", "\"enum\" at / beside \"const\" is not supported" },
        { "{\"allOf\":[{},{}]}", "\"allOf\" at / is supported with one schema" },
        { "{\"$ref\":\"#/$defs/b\",\"$defs\":{\"a\":{}}}", "\"$ref\" at / names a place that is not in the schema" },
        { "{\"$ref\":\"#/$defs/a~2\",\"$defs\":{\"a~\":{}}}", "\"$ref\" at / names a place that is not in the schema" },
        { "{\"$ref\":\"#/$defs/a~\",\"$defs\":{\"a~\":{}}}", "\"$ref\" at / names a place that is not in the schema" },
        { "{\"$ref\":\"other.json\"}", "\"$ref\" at / is not supported in this form" },
        { "{\"$ref\":\"#a\"}", "\"$ref\" at / is not supported in this form" },
        { "{\"$ref\":1}", "\"$ref\" at / is not supported in this form" },
        { "{\"$ref\":\"#\"}", "no JSON value matches the schema" },
        { "{\"required\":[\"a\"],\"properties\":{\"a\":{\"$ref\":\"#\"}}}", "no JSON value matches" },
        { "{\"required\":[\"a\"],\"additionalProperties\":false}", "no JSON value matches" },
        { "{\"minLength\":2,\"maxLength\":1}", "no JSON value matches" },
        { "{\"minItems\":2,\"maxItems\":1}", "no JSON value matches" },
        { "{\"minItems\":1,\"items\":false}", "no JSON value matches" },
        { "{\"type\":\"integer\",\"enum\":[\"a\"]}", "no JSON value matches" },
        { "false", "no JSON value matches" },
        { "1", "neither an object nor true nor false" },
        { "{\"type\":", "JSON: byte" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        refused(table[i].schema, strlen(table[i].schema), table[i].words);
}

/* head, n times part (with %u), tail. */
static char *repeat(const char *head, const char *part, unsigned n, const char *tail, size_t *len)
{
    char *out = malloc(strlen(head) + n * (strlen(part) + 10) + strlen(tail) + 1), *p = stpcpy(out, head);

    for (unsigned i = 0; i < n; i++)
        p += sprintf(p, part, i);
    p = stpcpy(p, tail);
    *len = (size_t)(p - out);
    return out;
}

static void holds_to_its_limits(void **state)
{
    static const struct { const char *head, *part, *tail, *words; unsigned n; } table[] = {
        { "{\"properties\":{\"a\":{}", ",\"%u\":{}", "}}", "at most 1000 schemas", 1000 },
        { "{\"required\":[\"a\"", ",\"%u\"", "]}", "at most 1000 names", 1000 },
        { "{\"enum\":[0", ",1%u", "]}", "more than 100000 values", 100000 },
        { "{\"anyOf\":[true", ",{\"const\":%u}", "]}", "more than 20000 schemas", 20000 },
        { "{\"title\":\"", "%u", "\"}", "at most 1048576", 300000 },
    };
    size_t len;

    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        char *schema = repeat(table[i].head, table[i].part, table[i].n, table[i].tail, &len);

        refused(schema, len, table[i].words);
        free(schema);
    }
}

static void a_long_chain_of_references_takes_no_stack(void **state)
{
    struct k3_grammar *g = NULL;
    struct k3_err err = K3_ERR_INIT;
    size_t len;
    char *schema = repeat("{\"$ref\":\"#/$defs/0\",\"$defs\":{", "\"%1$u\":{\"$ref\":\"#/$defs/n%1$u\"},\"n%1$u\":{\"type\":\"null\"},", 2000, "\"z\":true}}", &len);

    (void)state;
    if (k3_grammar_schema(&g, schema, len, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(k3_grammar_bytes(g) < 1 << 20);
    k3_grammar_free(g);
    free(schema);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_keyword_and_place),
        cmocka_unit_test(holds_to_its_limits),
        cmocka_unit_test(a_long_chain_of_references_takes_no_stack),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
