/* The member "constraint" of a submit, up to a NUL, and ids of two bytes each: the mask says of each what becomes of it. */
#include <stdint.h>
#include <string.h>

#include "constrain/constraint.h"
#include "tests/fuzz/small_vocab.h"

#define N_VOCAB 300u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct k3_vocab *v;
    static struct k3_walk *w;
    const uint8_t *end = memchr(data, 0, size);
    struct k3_err err = K3_ERR_INIT;
    struct k3_constraint *c = NULL;
    cJSON *spec;

    if (!v)
        v = small_vocab();
    if (!end || (!w && k3_walk_new(&w, NULL) < 0))
        return 0;
    spec = cJSON_Parse((const char *)data);
    if (spec && k3_constraint_new(&c, spec, v, N_VOCAB, &err) < 0 && !err.text[0])
        abort(); /* refused without words */
    for (const uint8_t *p = end + 1; c && p + 2 <= data + size; p += 2) {
        uint32_t id = (p[0] | (uint32_t)p[1] << 8) % N_VOCAB, n = 0;
        uint64_t allowed[N_VOCAB / 64 + 1];

        if (k3_constraint_mask(c, w, allowed) < 0)
            abort();
        for (uint32_t i = 0; i < N_VOCAB; i++)
            n += k3_bit(allowed, i);
        if (k3_constraint_take(c, w, id) != k3_bit(allowed, id) || (n == 0 && p == end + 1))
            abort();
    }
    k3_constraint_free(c);
    cJSON_Delete(spec);
    return 0;
}
