/* Any bytes as an index and as header lines of a hub.  Names that come out are plain ones of shards, sums are hex. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tools/fetch.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void index_of(const char *text, size_t size)
{
    struct k3_fetch_files l = { .f = NULL };
    struct k3_err err = K3_ERR_INIT;

    if (k3_fetch_list_shards(&l, -1, text, size, size % 3, &err) < 0) {
        if (err.exit_status != K3_EXIT_REFUSED || !err.text[0])
            abort();
    } else if (l.n == 0)
        abort();
    for (size_t i = 0; i < l.n; i++)
        if (!k3_fetch_name_ok(l.f[i].name) || strchr(l.f[i].name, '/') || l.f[i].name[0] == '.' ||
            !strstr(l.f[i].name, ".safetensors"))
            abort();
    k3_fetch_files_free(&l);
}

static void head_of(const char *text, size_t size)
{
    struct k3_fetch_head h = { .has_length = false };
    struct k3_fetch_said said;

    for (size_t at = 0; at < size;) {
        const char *end = memchr(text + at, '\n', size - at);
        size_t n = end ? (size_t)(end - text) + 1 - at : size - at;

        k3_fetch_head_line(&h, text + at, n);
        at += n;
    }
    k3_fetch_head_said(&h, size & 1, &said);
    if (said.kind != K3_FETCH_NO_SUM && strspn(said.sum, "0123456789abcdef") != (said.kind == K3_FETCH_SHA256 ? 64u : 40u))
        abort();
    if (h.commit[0] && strspn(h.commit, "0123456789abcdefABCDEF") != 40)
        abort();
    if (k3_fetch_etag_strong(h.etag) && strpbrk(h.etag, "\r\n"))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    index_of((const char *)data, size);
    head_of((const char *)data, size);
    return 0;
}
