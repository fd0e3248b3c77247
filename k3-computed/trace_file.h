/* k3-computed/trace_file.h: the file that `k3ctl trace` makes: which experts each row of each pass was routed to.
 *
 * Everything is little-endian and without padding.  A head, then records, each beginning with struct k3_trace_record:
 *   PASS    n = rows of the pass; u64 number of the pass; then for each row u32 sequence, u32 position
 *   LOOK    n = layer; for each row look_k u16: the experts that this layer's gate picked on the hidden state of the layer
 *           before, best first.  Only with look_k > 0, only where the gate was at hand; before the layer's ROUTES
 *   ROUTES  n = layer; for each row top_k u16, ascending
 *   END     n = enum k3_trace_end
 * Layers of a pass ascend.  A sequence is numbered by its admission to state and never computes a position twice; what is
 * submitted again is another sequence.  A file without END at its end was cut off: its last pass is not to be used. */
#ifndef K3_COMPUTED_TRACE_FILE_H
#define K3_COMPUTED_TRACE_FILE_H

#include <assert.h>
#include <stdint.h>

#define K3_TRACE_MAGIC "k3trace"
#define K3_TRACE_VERSION 1u
#define K3_TRACE_ROWS_MAX 65536u

struct k3_trace_head {
    char magic[8];
    uint32_t version, head_bytes;
    uint32_t n_layers, first_moe; /* layers first_moe..n_layers-1 have experts */
    uint32_t n_experts, top_k;
    uint32_t look_k, pad;         /* 0: without look-ahead */
    uint64_t expert_bytes;        /* of one expert's tensors */
    uint64_t trunk_bytes;         /* of one pass */
    uint8_t model_digest[32];
};
static_assert(sizeof(struct k3_trace_head) == 88, "the file format: bump K3_TRACE_VERSION");

enum k3_trace_kind { K3_TRACE_PASS = 1, K3_TRACE_LOOK, K3_TRACE_ROUTES, K3_TRACE_END };
enum k3_trace_end { K3_TRACE_DONE, K3_TRACE_FAILED, K3_TRACE_CUT /* by `trace stop` */ };
struct k3_trace_record { uint32_t kind, n; };

#endif
