/* A JSON Schema, to a grammar; then the shortest way to a value of it, by the mask, which cJSON must read. */
#include <cjson/cJSON.h>
#include <stdint.h>
#include <string.h>

#include "constrain/machine.h"
#include "tests/fuzz/small_vocab.h"

#define STEPS_MAX 3000

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct k3_vocab *v;
static struct k3_walk *w;

/* Of the ids that are allowed the one byte that is nearest to an end. */
static int ending(const uint64_t *allowed)
{
    static const char prefer[] = "\"}]:0123456789eaEnultrfsbcdghijkmopqvwxyz,-{[ ";

    for (const char *p = prefer; *p; p++)
        if (k3_bit(allowed, (uint8_t)*p))
            return (uint8_t)*p;
    for (int byte = 0; byte < 256; byte++)
        if (k3_bit(allowed, (uint32_t)byte))
            return byte;
    return -1;
}

static void walk(const struct k3_grammar *g)
{
    static char text[STEPS_MAX + 1];
    struct k3_machine *m = NULL;
    size_t len = 0;

    if (k3_machine_new(&m, g, NULL) < 0)
        abort();
    for (; !k3_machine_complete(m) && len < STEPS_MAX; len++) {
        uint64_t allowed[SMALL_VOCAB / 64 + 1] = { 0 };
        int byte;

        if (k3_machine_mask(m, w, v, allowed) < 0 || (byte = ending(allowed)) < 0)
            abort(); /* a dead end */
        text[len] = (char)byte;
        if (k3_machine_feed(m, w, text + len, 1) != 1 || k3_machine_bytes(m) > K3_MACHINE_STATE_BYTES)
            abort();
    }
    if (len < STEPS_MAX) { /* else a long minLength or the like */
        cJSON *x;

        text[len] = 0;
        x = cJSON_Parse(text);
        if (!x)
            abort();
        cJSON_Delete(x);
    }
    k3_machine_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_grammar *g = NULL;

    if (!v)
        v = small_vocab();
    if (!w && k3_walk_new(&w, NULL) < 0)
        abort();
    if (k3_grammar_schema(&g, (const char *)data, size, &err) < 0) {
        if (!err.text[0] || strchr(err.text, '\n'))
            abort(); /* refused without words */
        return 0;
    }
    walk(g);
    k3_grammar_free(g);
    return 0;
}
