/* ipc/mem_info.h: what `info` says about a daemon's data segment. */
#ifndef K3_IPC_MEM_INFO_H
#define K3_IPC_MEM_INFO_H

#include <cjson/cJSON.h>

#include "shm/data.h"

/* memory_from, memory_fallback (only when it is not what was asked for), locked_bytes, swapped_bytes, major_faults,
 * numa_node (null: anywhere). */
void k3_mem_info(const struct k3_mem *m, const struct k3_seg *s, cJSON *reply);

#endif
