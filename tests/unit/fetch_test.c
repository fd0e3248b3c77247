/* k3-fetch: names and shards of an index, sizes of the released model, header lines. */
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tools/fetch.h"

static void test_names(void **state)
{
    static const char *const good[] = { "config.json", "a", "model-00001-of-000096.safetensors", "LICENSE", "a..b" };
    static const char *const bad[] = { "", ".", "..", ".hidden", "../a", "a/b", "a\\b", "a b", "a\n", "\xc3\xa4", "a.part", "a.part.tag",
                                       "a.wrong", "k3-fetch.lock", "k3-fetch.sha256", "a?b", "a%2fb" };
    char longest[K3_FETCH_NAME_BYTES + 1];

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        assert_true(k3_fetch_name_ok(good[i]));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(k3_fetch_name_ok(bad[i]));
    memset(longest, 'x', sizeof(longest));
    longest[K3_FETCH_NAME_BYTES] = 0;
    assert_false(k3_fetch_name_ok(longest));
    longest[K3_FETCH_NAME_BYTES - 1] = 0;
    assert_true(k3_fetch_name_ok(longest));
    assert_true(k3_fetch_repo_ok("moonshotai/Kimi-K3"));
    assert_false(k3_fetch_repo_ok("a/b/c"));
    assert_false(k3_fetch_repo_ok("../b"));
    assert_false(k3_fetch_repo_ok("a/.."));
    assert_false(k3_fetch_repo_ok("a/"));
}

/* The names of the shards, one behind the other, or the words of the refusal behind "!". */
static void shards(const char *json, uint32_t n_layers, char *out, size_t cap)
{
    struct k3_fetch_files l = { .f = NULL };
    struct k3_err err = K3_ERR_INIT;

    out[0] = 0;
    if (k3_fetch_list_shards(&l, -1, json, strlen(json), n_layers, &err) < 0)
        snprintf(out, cap, "!%s", err.text);
    else
        for (size_t i = 0; i < l.n; i++)
            snprintf(out + strlen(out), cap - strlen(out), "%s ", l.f[i].name);
    k3_fetch_files_free(&l);
}

static void test_index(void **state)
{
    static const char map[] = "{\"metadata\":{\"total_size\":7,\"x\":[1]},\"weight_map\":{\"model.layers.0.a\":\"a.safetensors\","
                              "\"model.layers.1.a\":\"b.safetensors\",\"model.layers.10.a\":\"c.safetensors\",\"lm_head\":\"a.safetensors\","
                              "\"vision_tower.layers.0.x\":\"d.safetensors\"}}";
    static const char *const bad[] = {
        "", "[]", "{}", "{\"weight_map\":{}}", "{\"weight_map\":{\"a\":7}}", "{\"weight_map\":{\"a\":\"b.safetensors\"}", "{\"weight_map\":{\"a\":\"b.safetensors\"}} x",
        "{\"weight_map\":{\"a\":\"../b.safetensors\"}}", "{\"weight_map\":{\"a\":\"/b.safetensors\"}}", "{\"weight_map\":{\"a\":\"b.bin\"}}",
        "{\"weight_map\":{\"a\":\"b\\u0000.safetensors\"}}", "{\"weight_map\":{\"a\":\".safetensors\"}}",
    };
    char out[2048];

    (void)state;
    shards(map, 0, out, sizeof(out));
    assert_string_equal(out, "a.safetensors b.safetensors c.safetensors d.safetensors ");
    shards(map, 1, out, sizeof(out));
    assert_string_equal(out, "a.safetensors ");
    shards(map, 2, out, sizeof(out));
    assert_string_equal(out, "a.safetensors b.safetensors ");
    shards(map, 11, out, sizeof(out));
    assert_string_equal(out, "a.safetensors b.safetensors c.safetensors ");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        shards(bad[i], 0, out, sizeof(out));
        if (out[0] != '!' || !out[1])
            fail_msg("%s was taken", bad[i]);
    }
}

static void test_released(void **state)
{
    struct k3_fetch_files l = { .f = NULL };
    struct k3_err err = K3_ERR_INIT;
    uint64_t sum = 0;
    char name[64];

    (void)state;
    for (unsigned i = 0; i <= 97; i++) {
        snprintf(name, sizeof(name), "model-%05u-of-000096.safetensors", i);
        sum += k3_fetch_released_bytes(name);
        if (i >= 1 && i <= 96) {
            assert_int_equal(k3_fetch_add(&l, name, false, &err), 0);
            l.f[l.n - 1].said.size_bytes = k3_fetch_released_bytes(name);
        } else
            assert_int_equal(k3_fetch_released_bytes(name), 0);
    }
    assert_true(sum == 1560936091448); /* of all files of the release */
    assert_int_equal(k3_fetch_released_bytes("model-1-of-000096.safetensors"), 0);
    assert_int_equal(k3_fetch_released_bytes("model-00001-of-000096.safetensors.x"), 0);
    l.total_size_bytes = 1560860324864;
    assert_int_equal(k3_fetch_check_sizes(&l, K3_FETCH_REPO, true, &err), 0);
    l.f[7].said.size_bytes++;
    assert_int_equal(k3_fetch_check_sizes(&l, K3_FETCH_REPO, true, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "model-00008-of-000096"));
    assert_int_equal(k3_fetch_check_sizes(&l, "other/one", true, &err), 0);
    l.total_size_bytes = sum + 2;
    assert_int_equal(k3_fetch_check_sizes(&l, "other/one", true, &err), -EBADMSG);
    assert_int_equal(k3_fetch_check_sizes(&l, "other/one", false, &err), 0); /* a part of it */
    l.f[7].said.size_bytes = UINT64_MAX;
    assert_int_equal(k3_fetch_check_sizes(&l, "other/one", true, &err), -EOVERFLOW);
    k3_fetch_files_free(&l);
}

static struct k3_fetch_head head_of(const char *lines)
{
    struct k3_fetch_head h = { .has_length = false };

    while (*lines) {
        size_t n = strcspn(lines, "\n") + 1;

        k3_fetch_head_line(&h, lines, n);
        lines += n;
    }
    return h;
}

static void test_head(void **state)
{
    static const char a64[] = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    static const char a40[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    struct k3_fetch_head h;
    struct k3_fetch_said said;
    char text[1024];

    (void)state;
    snprintf(text, sizeof(text), "HTTP/1.1 302 Found\r\nContent-Length: 10\r\nETag: \"%s\"\r\nx-linked-size: 77\r\n"
             "X-Linked-ETag:\t\"%s\" \r\nX-Repo-Commit: %s\r\n", a40, a64, a40);
    h = head_of(text);
    k3_fetch_head_said(&h, true, &said);
    assert_true(said.has_size && said.size_bytes == 77 && said.kind == K3_FETCH_SHA256);
    assert_int_equal(strspn(said.sum, "a"), 64);
    assert_string_equal(h.commit, a40);
    snprintf(text, sizeof(text), "HTTP/1.1 302 x\r\nX-Linked-Size: 5\r\nHTTP/1.1 200 OK\r\ncontent-length: 10\r\nETag: W/\"%s\"\r\n", a40);
    h = head_of(text); /* what the earlier reply said is forgotten */
    k3_fetch_head_said(&h, false, &said);
    assert_true(said.has_size && said.size_bytes == 10 && said.kind == K3_FETCH_GIT_SHA1);
    k3_fetch_head_said(&h, true, &said);
    assert_false(said.has_size);
    h = head_of("HTTP/2 200\r\nContent-Length: -1\r\nX-Linked-Size: 1e3\r\nETag: \"abc\"\r\nX-Repo-Commit: ../../x\r\nContent-Range: bytes 5-9/9\r\n");
    k3_fetch_head_said(&h, false, &said);
    assert_true(!said.has_size && said.kind == K3_FETCH_NO_SUM && !h.commit[0] && !h.has_range);
    h = head_of("HTTP/2 206\r\nContent-Range: bytes 5-8/9\r\n");
    assert_true(h.has_range && h.range_first == 5 && h.range_total == 9);
    h = head_of("HTTP/2 206\r\nContent-Range: bytes 5-8/*\r\n");
    assert_false(h.has_range);
    assert_true(k3_fetch_etag_strong("\"abc\""));
    assert_false(k3_fetch_etag_strong("W/\"abc\""));
    assert_false(k3_fetch_etag_strong("\"a\r\nX: y\""));
    assert_false(k3_fetch_etag_strong("\""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_released),
        cmocka_unit_test(test_head),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
