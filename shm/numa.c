/* The NUMA part of shm/data.h. */
#include <errno.h>
#include <numa.h>
#include <stdio.h>
#include <string.h>

#include "shm/data.h"

static void list_nodes(char *out, size_t len)
{
    size_t at = 0;

    out[0] = 0;
    for (int i = 0; i <= numa_max_node(); i++)
        if (numa_bitmask_isbitset(numa_all_nodes_ptr, (unsigned)i) && at < len)
            at += (size_t)snprintf(out + at, len - at, "%s%d", at ? " " : "", i);
}

int k3_numa_go(int node, struct k3_err *err)
{
    bool has_numa = numa_available() >= 0;
    char nodes[128] = "0";

    if (node < 0)
        return 0;
    if (has_numa)
        list_nodes(nodes, sizeof(nodes));
    if (has_numa ? node > numa_max_node() || !numa_bitmask_isbitset(numa_all_nodes_ptr, (unsigned)node)
                 : node > 0)
        return k3_refuse(err, -EINVAL, "--numa-node %d: there is no such node; there is %s", node, nodes);
    if (!has_numa)
        return 0;
    /* Both best effort: a container may forbid them, and a node may have no CPUs. */
    (void)numa_run_on_node(node);
    numa_set_preferred(node);
    return 0;
}
