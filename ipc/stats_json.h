/* ipc/stats_json.h: a stats page as JSON, for the control command `stats` and for k3ctl. */
#ifndef K3_IPC_STATS_JSON_H
#define K3_IPC_STATS_JSON_H

#include <cjson/cJSON.h>

#include "shm/stats.h"

const char *k3_daemon_state_name(uint32_t state);
/* Adds daemon, instance, pid, generation, state, start_unix_ns, heartbeat_age_ns and "stats": {name: {kind, unit, value}
 * or, for histograms, {kind, unit, count, sum, buckets: {"<upper bound>": n}}}.  Integers have all their digits. */
void k3_stats_json(const struct k3_stats *s, cJSON *to);

#endif
