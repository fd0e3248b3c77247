/* Any bytes as a safetensors header; the first two say how much data follows it.  What is accepted must lie in the
 * file, be found under its name, and not overlap. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/index.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct k3_index *ix, uint64_t begin, uint64_t end)
{
    size_t n = k3_index_n_tensors(ix);

    for (size_t i = 0; i < n; i++) {
        const struct k3_tensor *t = k3_index_at(ix, i);

        if (t->off_bytes < begin || t->len_bytes > end - t->off_bytes || k3_index_find(ix, k3_index_name(ix, t)) != t)
            abort();
        for (size_t k = 0; k < i && n < 64; k++) {
            const struct k3_tensor *o = k3_index_at(ix, k);

            if (t->len_bytes && o->len_bytes && t->off_bytes < o->off_bytes + o->len_bytes &&
                o->off_bytes < t->off_bytes + t->len_bytes)
                abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix;
    uint64_t begin, end;
    int rc;

    if (size < 2)
        return 0;
    begin = 8 + (uint64_t)size - 2;
    end = begin + data[0] + 256u * data[1];
    ix = k3_index_new();
    if (!ix)
        return 0;
    rc = k3_index_parse_header(ix, 0, (const char *)data + 2, size - 2, begin, end, &err);
    if (rc == 0)
        rc = k3_index_sort(ix, &err);
    if (rc == 0)
        check(ix, begin, end);
    else if (err.exit_status != K3_EXIT_REFUSED || !err.text[0])
        abort();
    k3_index_close(ix);
    return 0;
}
