/* k3-computed/trace.h: writes down which experts the rows of every pass are routed to (trace_file.h), for k3-sim.
 *
 * Two sides.  The thread that runs passes puts records into a buffer of some megabytes; it waits only while that is full,
 * because the disk is slower than the routes come, and drops nothing.  Server threads start and stop.  A thread of the
 * trace writes.
 *
 *   OFF -> ON       k3_tracer_start        the next pass is the first in the file
 *   ON -> CLOSING   k3_tracer_stop         the pass at work is cut off
 *   CLOSING -> OFF  all is written
 *   ON -> FAILED    the file cannot be written (ENOSPC): one line in the log, the passes go on; until the next start or stop */
#ifndef K3_COMPUTED_TRACE_H
#define K3_COMPUTED_TRACE_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "k3-computed/trace_file.h"
#include "model/model.h"

struct k3_tracer;
/* m is borrowed.  stop: ends a wait for a slow disk, and with it the trace.  max_rows: of a pass. */
int k3_tracer_new(struct k3_tracer **out, const struct k3_model *m, uint32_t max_rows, _Atomic bool *stop,
                  struct k3_err *err);
void k3_tracer_free(struct k3_tracer *t); /* NULL is fine; writes what is in the buffer */

/* Any thread.  path: absolute, must not exist.  Exit 2: a trace runs already, the path. */
int k3_tracer_start(struct k3_tracer *t, const char *path, bool lookahead, struct k3_err *err);
/* path NULL: whichever runs.  Returns when the file is complete, adding its facts to reply.  Exit 2: none runs, or another;
 * exit 1: it failed meanwhile, in words. */
int k3_tracer_stop(struct k3_tracer *t, const char *path, cJSON *reply, struct k3_err *err);
void k3_tracer_info(struct k3_tracer *t, cJSON *to); /* state, file, passes, bytes, lookahead, error */

/* The thread that runs passes.  begin: false when this pass is not recorded.  *look_k: how many experts the look-ahead is to
 * pick, 0 none.  Routes come row by row. */
struct k3_tracer_row { uint32_t sequence, position; };
bool k3_tracer_begin(struct k3_tracer *t, uint64_t pass, const struct k3_tracer_row *rows, uint32_t n_rows,
                     uint32_t *look_k);
/* ids[row * k + i], best first; k is at least the look_k of begin, the rest is passed over. */
void k3_tracer_look(struct k3_tracer *t, uint32_t layer, const uint16_t *ids, uint32_t k);
void k3_tracer_route(struct k3_tracer *t, uint32_t layer, uint32_t row, const uint16_t *ids);
void k3_tracer_end(struct k3_tracer *t, enum k3_trace_end end);

#endif
