/* mountinfo, as a container may show it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "io/device.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1), out[64];

    memcpy(text, data, size);
    text[size] = '\0';
    for (uint64_t id = 0; id < 40; id++)
        if (k3_mount_source(text, id, out, sizeof(out)) && !memchr(out, 0, sizeof(out)))
            abort();
    free(text);
    return 0;
}
