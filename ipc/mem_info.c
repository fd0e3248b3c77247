#include "ipc/mem_info.h"

void k3_mem_info(const struct k3_mem *m, const struct k3_seg *s, cJSON *reply)
{
    cJSON_AddStringToObject(reply, "memory_from", k3_mem_from_name(s->from));
    if (m->fallback[0])
        cJSON_AddStringToObject(reply, "memory_fallback", m->fallback);
    cJSON_AddNumberToObject(reply, "locked_bytes",
                            (double)atomic_load_explicit(&m->locked_bytes, memory_order_relaxed));
    cJSON_AddNumberToObject(reply, "swapped_bytes", (double)k3_mem_swapped(s));
    cJSON_AddNumberToObject(reply, "major_faults", (double)k3_major_faults());
    if (m->numa_node < 0)
        cJSON_AddNullToObject(reply, "numa_node");
    else
        cJSON_AddNumberToObject(reply, "numa_node", m->numa_node);
}
