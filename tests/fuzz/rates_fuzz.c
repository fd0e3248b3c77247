/* The file of remembered drives: what is believed of it lies within bounds, and it can always be written anew. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "io/calibrate.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct k3_io_rate some = { 8, 4u << 20, 3e9, 1e9, false };
    char *text = malloc(size + 1), *again;
    struct k3_io_rate r;

    memcpy(text, data, size);
    text[size] = '\0';
    if (k3_io_rates_find(text, "k", 1000000000, &r) == 0 &&
        (r.depth < 1 || r.depth > 256 || r.block_bytes < 65536 || !(r.bytes_per_s > 0)))
        abort();
    again = k3_io_rates_with(text, "new", &some, 1000000000);
    if (!again || k3_io_rates_find(again, "new", 1000000000, &r) != 0 || r.depth != 8)
        abort();
    free(again);
    free(text);
    return 0;
}
