/* A trace file, from its bytes to demands and a replay; as one of our own, and as pairs. */
#include <stdlib.h>
#include <string.h>

#include "tools/sim.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(struct k3_trace *t)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_demands d;
    uint64_t hits, best;

    for (size_t i = 0; i < t->n_layers; i++) {
        const struct k3_trace_layer *l = &t->layer[i];
        uint32_t n_rows = t->pass[l->pass].n_rows;

        if (l->layer >= t->head.n_layers || l->ids + (size_t)n_rows * t->head.top_k > t->n_ids ||
            (l->look != K3_NO_LOOK && l->look + (size_t)n_rows * t->head.look_k > t->n_ids))
            abort();
    }
    if (k3_trace_once(t, &err) < 0 || k3_demands_build(&d, t, &err) < 0)
        abort();
    if (k3_sim_policy(&d, &k3_policy_lfru, 0, 5, 0, &hits, &err) < 0 || k3_sim_belady(&d, 5, 0, &best, &err) < 0 ||
        hits > best)
        abort();
    k3_demands_free(&d);
    k3_trace_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    void *copy = malloc(size + 1); /* aligned */
    struct k3_trace t;

    memcpy(copy, data, size);
    if (k3_trace_parse(&t, copy, size, "fuzz", &err) == 0)
        use(&t);
    else if (!err.text[0])
        abort();
    if (k3_trace_parse_raw(&t, copy, size, "fuzz", 16, 2, 1000, &err) == 0)
        use(&t);
    free(copy);
    return 0;
}
