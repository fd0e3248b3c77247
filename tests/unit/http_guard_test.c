/* k3-router/http_guard.c and http_fields.c: addresses, keys, Host, Origin; fields and the refusals that name them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>

#include "k3-router/http.h"

static void addresses(void **state)
{
    static const struct { const char *text, *out; bool loopback; } good[] = {
        { "127.0.0.1:8080", "127.0.0.1:8080", true }, { "localhost:0", "127.0.0.1:0", true },
        { "127.3.2.1:1", "127.3.2.1:1", true },       { "0.0.0.0:65535", "0.0.0.0:65535", false },
        { "10.0.0.1:80", "10.0.0.1:80", false },      { "[::1]:80", "[::1]:80", true },
        { "[::]:80", "[::]:80", false },              { "[fe80::1]:80", "[fe80::1]:80", false },
    };
    static const char *const bad[] = { "", ":", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:8 ",
                                       "::1:80", "[127.0.0.1]:80", "[::1:80", "::1]:80", "[localhost]:80", "example.com:80",
                                       "127.1:80", "[]:80", "[::ffff:127.0.0.1:80" };
    struct k3_http_addr a;
    char text[80];

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_int_equal(k3_http_addr_parse(&a, good[i].text, NULL), 0);
        assert_string_equal(k3_http_addr_text(&a, text, sizeof(text)), good[i].out);
        assert_int_equal(a.loopback, good[i].loopback);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_true(k3_http_addr_parse(&a, bad[i], NULL) < 0);
    /* An address that only looks like this machine to some. */
    assert_int_equal(k3_http_addr_parse(&a, "[::ffff:127.0.0.1]:80", NULL), 0);
    assert_false(a.loopback);
}

static void keys(void **state)
{
    static const char file[] = "# ours\n\n0123456789abcdef\r\nfedcba9876543210xyz  \n";
    static const char *const wrong[] = { "", "0123456789abcde", "0123456789abcdefg", "1123456789abcdef", "fedcba9876543210xy", "# ours" };
    struct k3_http_keys k;

    (void)state;
    assert_int_equal(k3_http_keys_parse(&k, file, strlen(file), "f", NULL), 0);
    assert_int_equal(k.n, 2);
    assert_true(k3_http_key_ok(&k, "0123456789abcdef"));
    assert_true(k3_http_key_ok(&k, "fedcba9876543210xyz"));
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(k3_http_key_ok(&k, wrong[i]));
    k3_http_keys_free(&k);
    assert_false(k3_http_key_ok(&k, ""));
    assert_true(k3_http_keys_parse(&k, "0123456789abcdef\nshort\n", 23, "f", NULL) < 0);
    assert_true(k3_http_keys_parse(&k, "0123456789 abcdef", 17, "f", NULL) < 0);
    assert_true(k3_http_keys_parse(&k, "0123456789\0abcdef", 17, "f", NULL) < 0);
    assert_true(k3_http_keys_parse(&k, "\n#\n", 3, "f", NULL) < 0);
    assert_string_equal(k3_http_bearer("bEARER   x y"), "x y");
    assert_null(k3_http_bearer("Basic x"));
    assert_null(k3_http_bearer(NULL));
}

static void hosts_and_origins(void **state)
{
    static const char *const good[] = { "localhost", "LocalHost:1", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:80", "192.168.1.5:8080",
                                        "192.168.1.5", "box.example" };
    static const char *const bad[] = { "", ":80", "evil", "localhost.evil", "127.0.0.1.evil", "localhost:80x", "[::1", "[::2]", "192.168.1.6",
                                       "localhost:80@evil", "[::1]x", "box.example.evil" };
    struct k3_str_list names = { .item = { "box.example" }, .n = 1 }, origins = { .item = { "https://a.example" }, .n = 1 };
    struct k3_str_list all = { .item = { "*" }, .n = 1 };

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        assert_true(k3_http_host_ok(good[i], "192.168.1.5:8080", &names));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(k3_http_host_ok(bad[i], "192.168.1.5:8080", &names));
    assert_false(k3_http_host_ok(NULL, "127.0.0.1:1", &names));
    assert_true(k3_http_origin_same("http://localhost:80", "localhost:80"));
    assert_true(k3_http_origin_same("https://localhost:80", "localhost:80"));
    assert_false(k3_http_origin_same("http://localhost", "localhost:80"));
    assert_false(k3_http_origin_same("null", "localhost"));
    assert_false(k3_http_origin_same("http://", ""));
    assert_true(k3_http_origin_listed("https://a.example", &origins));
    assert_false(k3_http_origin_listed("https://a.example.evil", &origins));
    assert_false(k3_http_origin_listed("null", &origins));
    assert_true(k3_http_origin_listed("null", &all));
    assert_true(k3_http_header_names_ok("authorization, X-A_b"));
    assert_false(k3_http_header_names_ok(""));
    assert_false(k3_http_header_names_ok("a\r\nb: c"));
}

static void entity_tags(void **state)
{
    static const char *const listed[] = { "\"ab\"", "W/\"ab\"", "\"x\", \"ab\"", "\"x\",W/\"ab\",\"y\"", " , \"ab\" ,", "*", "\"x\", *" };
    static const char *const others[] = { "", " ", ",", "\"a\"", "\"abc\"", "ab", "\"ab", "\"ab\"x", "x\"ab\"", "w/\"ab\"", "W/", "\"x\"" };

    (void)state;
    assert_false(k3_http_tag_listed(NULL, "\"ab\""));
    for (size_t i = 0; i < sizeof(listed) / sizeof(listed[0]); i++)
        assert_true(k3_http_tag_listed(listed[i], "\"ab\""));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        assert_false(k3_http_tag_listed(others[i], "\"ab\""));
}

static void files_of_the_page(void **state)
{
    (void)state;
    assert_true(k3_n_web_files > 3);
    assert_non_null(k3_http_page_find("/"));
    for (size_t i = 0; i < k3_n_web_files; i++) {
        const struct k3_web_file *f = &k3_web_files[i];

        assert_ptr_equal(k3_http_page_find(f->path), f);
        assert_true(f->len_bytes > 0 && strlen(f->etag) == 34 && f->etag[0] == '"');
    }
    assert_null(k3_http_page_find(""));
    assert_null(k3_http_page_find("/web/"));
    assert_null(k3_http_page_find("/web/app.js/"));
    assert_null(k3_http_page_find("/web/../web/app.js"));
}

static void values_are_counted(void **state)
{
    (void)state;
    assert_int_equal(k3_http_count_values("[1,2,3]", 7), 4);
    assert_int_equal(k3_http_count_values("\"a,b,[{\\\",\"", 11), 1);
    assert_int_equal(k3_http_count_values("{\"a\":[]}", 8), 3);
    assert_int_equal(k3_http_count_values("\"\\", 2), 1);
    assert_int_equal(k3_http_count_values("", 0), 1);
}

/* The fields of a body, or the refusal in q.out. */
static int common(struct k3_http_req *q, struct k3_http_common *c, const char *body)
{
    struct k3_json_doc doc = { 0 };
    int rc;

    q->out.len_bytes = q->body.len_bytes = 0;
    assert_int_equal(k3_buf_puts(&q->body, body), 0);
    *c = (struct k3_http_common){ .n_stop = 0 };
    rc = k3_http_body(q, &doc);
    if (rc == 0)
        rc = k3_http_get_common(q, doc.node, c);
    k3_json_free(&doc);
    assert_int_equal(k3_buf_append(&q->out, "", 1), 0);
    return rc;
}

static void numbers(void **state)
{
    static const struct { const char *body, *param; } bad[] = {
        { "{\"seed\":9223372036854775808}", "seed" }, { "{\"seed\":1e300}", "seed" },     { "{\"top_k\":1e10}", "top_k" },
        { "{\"max_tokens\":16777217}", "max_tokens" }, { "{\"temperature\":1e999}", "temperature" }, { "{\"n\":1.0000001}", "n" },
        { "{\"stop\":\"a\\u0000\"}", "stop" },        { "{\"stop\":[[]]}", "stop" },
    };
    struct k3_router r = { .gen = { .temperature = 0.5, .top_p = 0.25, .min_p = 0.125, .top_k = 7 } };
    struct k3_http h = { .r = &r, .name = "m" };
    struct k3_http_req q = { .h = &h };
    struct k3_http_common c;
    char want[64];

    (void)state;
    assert_int_equal(common(&q, &c, "{}"), 0); /* what the model says */
    assert_true(c.params.temperature == 0.5 && c.params.top_p == 0.25 && c.params.min_p == 0.125 && c.params.top_k == 7);
    assert_true(!c.seeded && c.params.max_tokens == 0 && !c.stream);
    assert_string_equal(c.model, "\"m\"");
    k3_http_common_free(&c);
    assert_int_equal(common(&q, &c, "{\"seed\":9007199254740993,\"max_tokens\":1.2e1,\"top_k\":-1,\"n\":1.0,\"stop\":[\"a\",\"b\"],\"temperature\":0}"), 0);
    assert_true(c.seeded && c.params.seed == 9007199254740993u); /* more digits than a double has */
    assert_true(c.params.max_tokens == 12 && c.params.top_k == 0 && c.params.temperature == 0 && c.n_stop == 2);
    k3_http_common_free(&c);
    assert_int_equal(common(&q, &c, "{\"seed\":-1,\"max_tokens\":-1}"), 0);
    assert_true(c.params.seed == UINT64_MAX && c.params.max_tokens == UINT64_MAX);
    k3_http_common_free(&c);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_true(common(&q, &c, bad[i].body) < 0);
        snprintf(want, sizeof(want), "\"param\":\"%s\"", bad[i].param);
        assert_non_null(strstr(q.out.bytes, want));
        assert_int_equal(q.status, 400);
        k3_http_common_free(&c);
    }
    k3_buf_free(&q.out);
    k3_buf_free(&q.body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses), cmocka_unit_test(keys), cmocka_unit_test(hosts_and_origins),
        cmocka_unit_test(entity_tags),
        cmocka_unit_test(files_of_the_page), cmocka_unit_test(values_are_counted), cmocka_unit_test(numbers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
