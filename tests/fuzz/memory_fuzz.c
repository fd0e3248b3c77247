/* Any bytes as what the kernel and other instances say about memory: a number or none, and places that lie under their
 * mount points. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_cgroup_place place[2];
    char *text = malloc(size + 1), *second;
    size_t n;

    memcpy(text, data, size);
    text[size] = 0;
    k3_meminfo_bytes(text, "MemAvailable");
    k3_memstat_bytes(text, "inactive_file");
    if (k3_limit_bytes(text) >= (uint64_t)1 << 60 && k3_limit_bytes(text) != K3_MEMORY_NONE)
        abort();
    if (k3_reserve_parse(text) > (uint64_t)1 << 60)
        abort();
    second = strchr(text, '\t'); /* the rest is the other file */
    if (second)
        *second++ = 0;
    n = k3_cgroup_places(text, second ? second : text, place);
    for (size_t i = 0; i < n; i++)
        if (place[i].top[0] != '/' || strncmp(place[i].leaf, place[i].top, strlen(place[i].top)) != 0)
            abort();
    free(text);
    return 0;
}
