/* tests/fuzz/http_fuzz.c: what a client of --http writes.  The first byte says what the rest is: a body, whose fields are
 * taken or refused with a valid error object; an address; a file of keys; a Host, an Origin or a list of header names. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/http.h"
#include "tests/fuzz/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void body(const char *text, size_t len)
{
    static struct k3_router r = { .gen = { .temperature = 1, .top_p = 1 } };
    static struct k3_http h = { .r = &r, .name = "m" };
    struct k3_http_req q = { .h = &h };
    struct k3_http_common c = { .n_stop = 0 };
    struct k3_json_doc doc = { 0 }, error = { 0 }, bias = { 0 };
    struct k3_ids ids = { 0 };
    const struct k3_json *tokens;
    int rc;

    if (!r.t)
        r.t = fuzz_vocabulary();
    if (k3_buf_append(&q.body, text, len) < 0)
        abort();
    rc = k3_http_body(&q, &doc);
    if (rc == 0)
        rc = k3_http_known(&q, doc.node, k3_http_common_fields, NULL);
    if (rc == 0)
        rc = k3_http_get_common(&q, doc.node, &c);
    if (rc == 0)
        rc = (len % 2 ? k3_http_get_chat_logprobs : k3_http_get_text_logprobs)(&q, doc.node, &c);
    if (rc == 0 && (c.n < 1 || c.n > K3_HTTP_CHOICES_MAX || c.params.n_logprobs > K3_TOP_LOGPROBS_MAX + 1))
        abort();
    if (rc == 0 && c.logit_bias) { /* what is made of it is JSON, or k3-computed gets none */
        if (k3_json_parse(&bias, c.logit_bias, strlen(c.logit_bias), NULL) < 0 || bias.node->type != K3_JSON_ARRAY)
            abort();
        k3_json_free(&bias);
    }
    if (rc == 0 && (c.params.top_p <= 0 || c.params.temperature < 0 || !c.model))
        abort();
    tokens = rc == 0 ? k3_json_value(doc.node, "metadata") : NULL; /* any member that may be anything */
    if (tokens && tokens->type == K3_JSON_ARRAY)
        rc = k3_http_get_ids(&q, tokens, "metadata", 1000, &ids);
    if (rc < 0 && (q.status < 400 || k3_json_parse(&error, q.out.bytes, q.out.len_bytes, NULL) < 0 ||
                   !k3_json_get(k3_json_get(error.node, "error"), "message")))
        abort();
    k3_json_free(&error);
    k3_json_free(&doc);
    k3_ids_free(&ids);
    k3_http_common_free(&c);
    k3_buf_free(&q.body);
    k3_buf_free(&q.out);
}

static void address(const char *text)
{
    struct k3_http_addr a, b;
    char out[80];

    if (k3_http_addr_parse(&a, text, NULL) == 0 &&
        (k3_http_addr_parse(&b, k3_http_addr_text(&a, out, sizeof(out)), NULL) < 0 || a.loopback != b.loopback))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_str_list list = { .item = { "a.example" }, .n = 1 };
    struct k3_http_keys keys;
    char *text;

    if (size == 0 || !(text = malloc(size)))
        return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    switch (data[0] % 4) {
    case 0: body(text, size - 1); break;
    case 1: address(text); break;
    case 2:
        if (k3_http_keys_parse(&keys, text, size - 1, "f", NULL) == 0 && (keys.n == 0 || !k3_http_key_ok(&keys, keys.key[keys.n - 1])))
            abort();
        k3_http_keys_free(&keys);
        break;
    default:
        k3_http_host_ok(text, "10.0.0.1:80", &list);
        k3_http_origin_same(text, "a.example");
        k3_http_origin_listed(text, &list);
        k3_http_bearer(text);
        k3_http_tag_listed(text, "\"0123\"");
        if (strstr(text, "..") && k3_http_page_find(text))
            abort();
        if (k3_http_header_names_ok(text) && strpbrk(text, "\r\n:"))
            abort();
    }
    free(text);
    return 0;
}
