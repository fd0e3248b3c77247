/* Bytes to the machine of one of some schemas (the first byte says which), in pieces and as a whole: whatever it accepts cJSON
 * reads. */
#include <cjson/cJSON.h>
#include <stdint.h>
#include <string.h>

#include "constrain/machine.h"
#include "tests/fuzz/small_vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const schema[] = {
    "true", "{\"type\":\"object\"}", "{\"type\":\"string\",\"minLength\":1,\"maxLength\":3}", "{\"type\":[\"number\",\"string\"]}",
    "{\"anyOf\":[{\"items\":{\"type\":\"integer\"}},{\"items\":{\"type\":\"number\"}},{\"enum\":[1,12,\"a\",null,[1]]}]}",
    "{\"properties\":{\"a\":{\"$ref\":\"#\"},\"ab\":{\"enum\":[1,12]},\"b\":true},\"required\":[\"ab\"],\"additionalProperties\":{\"type\":\"null\"}}",
};
#define N_SCHEMAS (sizeof(schema) / sizeof(schema[0]))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct k3_grammar *g[N_SCHEMAS];
    static struct k3_vocab *v;
    static struct k3_walk *w;
    struct k3_machine *m = NULL, *whole = NULL;
    size_t which = size ? data[0] % N_SCHEMAS : 0, n = 0;
    const char *text = (const char *)data + 1;
    int took = 1;

    if (size < 2)
        return 0;
    size--;
    if (!v)
        v = small_vocab();
    if ((!w && k3_walk_new(&w, NULL) < 0) || (!g[which] && k3_grammar_schema(&g[which], schema[which], strlen(schema[which]), NULL) < 0) ||
        k3_machine_new(&m, g[which], NULL) < 0 || k3_machine_new(&whole, g[which], NULL) < 0)
        abort();
    while (n < size && took == 1) {
        uint64_t allowed[SMALL_VOCAB / 64 + 1] = { 0 };
        bool look = n % 8 == data[0] / 32u; /* a mask costs what 200 steps do */

        if (look && k3_machine_mask(m, w, v, allowed) < 0)
            abort();
        took = k3_machine_feed(m, w, text + n, 1);
        if (look && took != k3_bit(allowed, (uint8_t)text[n]))
            abort();
        n += took == 1;
    }
    if (k3_machine_feed(whole, w, text, size) != took || k3_machine_bytes(m) > K3_MACHINE_STATE_BYTES)
        abort();
    if (took == 1 && k3_machine_complete(m)) {
        const char *end = NULL;
        cJSON *x = cJSON_ParseWithLengthOpts(text, size, &end, 0);

        if (!x || end != text + size)
            abort();
        cJSON_Delete(x);
    }
    k3_machine_free(m);
    k3_machine_free(whole);
    return 0;
}
