/* shm/trunk.h: the trunk stream from k3-trunkd (producer) to k3-computed (the one consumer).  design.md section 3.
 *
 * Control segment "trunk": new with every generation of trunkd.
 *   field                    writer     order
 *   magic .. digest, table   trunkd     plain; complete before the segment gets its name, constant afterwards
 *   a.produced               trunkd     T   store-release after the bytes [.., produced) are in the ring; T' acquire
 *   a.acked                  trunkd     K   store-release after produced = seek start was stored;     K' acquire
 *   a.error.*                trunkd     E   fields plain, then error.set store-release;               E' acquire
 *   a.bell, b.bell                          shm/bell.h (R, S); each sleepers count lies on the waiter's line
 *   b.consumed               computed   C   store-release after the last use of the bytes below it;   C' acquire
 *   b.seek.{start,piece,..}  computed   plain, then b.seek.number store-release Q;                    Q' acquire
 *   b.blocked_on_expert      computed   relaxed; a hint
 * Positions are bytes of the endless stream and only grow, but for a seek.
 * trunkd may write ring bytes of pages [a, b) only when b <= rounddown(consumed, A) + ring size.
 * computed trusts produced, error and ring only while acked == its own seek number.
 *
 * trunkd dies before T: the bytes past produced are never looked at.   After T: they are right, and they stay.
 * trunkd restarts: new control segment, generation + 1; the data segment is taken over when the layout digest agrees.
 *   Valid pieces and the resident area stay.  Everything that may have had a read in flight (the ring, pinned pieces
 *   without their flag) is renewed (k3_seg_renew) - the ring only after the first seek of that generation, since until
 *   then computed may be multiplying a row block in it.  computed seeks only when it holds no row block.
 *   hugetlb memory: pieces are no whole 2 MiB pages and cannot be renewed; so a segment with a pinned piece that has no
 *   flag is not taken over, but made anew.
 * computed dies: its successor seeks with its own generation; nothing to mend.
 *
 * Data segment "trunkdata" (shm/data.h says where it can be, model/schedule.h gives the offsets): struct k3_trunk_data, one flag per piece, the
 * resident area, the pinned area, the ring. */
#ifndef K3_SHM_TRUNK_H
#define K3_SHM_TRUNK_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "model/schedule.h"
#include "shm/bell.h"
#include "shm/data.h"
#include "shm/segment.h"

#define K3_TRUNK_MAGIC 0x6b337472u
#define K3_TRUNK_VERSION 2u

struct k3_trunk_line_a { /* written by trunkd */
    alignas(K3_LINE) _Atomic uint64_t produced;
    _Atomic uint64_t acked;             /* seek number last done */
    _Atomic uint32_t bell;              /* rung by trunkd: produced, acked, a flag or error moved */
    _Atomic uint32_t sleepers;          /* trunkd sleeping on b.bell */
    alignas(K3_LINE) struct {
        _Atomic uint32_t set;           /* 1 = the stream has stopped at position */
        int32_t err;                    /* positive errno */
        uint64_t position;
        uint64_t off_bytes;             /* in the file */
        uint32_t file;                  /* index in the model's files */
        uint32_t piece;
    } error;
};

struct k3_trunk_line_b { /* written by computed */
    alignas(K3_LINE) _Atomic uint64_t consumed;
    _Atomic uint32_t bell;              /* rung by computed: consumed or seek moved */
    _Atomic uint32_t sleepers;          /* computed sleeping on a.bell */
    _Atomic uint32_t blocked_on_expert; /* 1 while computed waits for an expert */
    alignas(K3_LINE) struct {
        _Atomic uint64_t number;        /* generation of computed << 32 | counter; never 0 */
        uint64_t start;                 /* stream position; any byte */
        uint64_t piece;                 /* schedule index of the first piece that computed wants next: pinned pieces
                                         * that are absent are loaded from here on, in schedule order, wrapping */
    } seek;
};

struct k3_trunk_ctl {
    uint32_t magic, version;
    uint32_t generation;  /* of trunkd */
    uint32_t align_bytes; /* A */
    uint64_t pass_bytes, ring_bytes, data_bytes;
    uint64_t n_pieces;
    uint64_t table_off;   /* struct k3_trunk_entry[n_pieces] in this segment */
    struct k3_data_place data; /* where the data segment is */
    uint8_t model_digest[32];
    uint8_t layout_digest[32];
    struct k3_trunk_line_a a;
    struct k3_trunk_line_b b;
};
struct k3_trunk_entry {
    uint64_t start; /* as in struct k3_layout */
    uint64_t pinned;
};
static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock hidden in libatomic is not shared between processes");
static_assert(offsetof(struct k3_trunk_ctl, a) % K3_LINE == 0, "the layout is protocol: bump version");

#define K3_TRUNK_DATA_MAGIC 0x6b337464u
enum k3_piece_flag { K3_PIECE_ABSENT = 0, K3_PIECE_VALID = 1 }; /* else 0x80000000 | errno: could not be read */
#define K3_PIECE_FAILED 0x80000000u
struct k3_trunk_data { /* head of the data segment; written by trunkd */
    uint32_t magic, version;
    uint8_t layout_digest[32];
    _Atomic uint32_t resident_valid; /* store-release after the resident area is complete */
    /* at flags_off: _Atomic uint32_t flag[n_pieces], each stored (release) after the piece's bytes */
};

/* ---- consumer side (shm/trunk_reader.c), used by computed alone ------------------------------------------------ */

#define K3_TRUNK_HELD 4u
struct k3_trunk_reader;
struct k3_trunk_wait_stats { uint64_t waits, wait_ns; };

/* Waits (at most timeout_ns, ticking) for a trunkd of this instance, compares the model digest, rebuilds the layout
 * from its published pinned set, compares the layout digest, maps everything.  A mismatch is refused by name (exit 2).
 * `generation` is computed's own.  m must outlive the reader.  No seek is done: call k3_trunk_reader_seek_pass(). */
int k3_trunk_reader_open(struct k3_trunk_reader **out, const char *instance, const char *rundir,
                         const struct k3_model *m, uint32_t generation, uint64_t timeout_ns, struct k3_err *err);
void k3_trunk_reader_close(struct k3_trunk_reader *r);
const struct k3_layout *k3_trunk_reader_layout(const struct k3_trunk_reader *r);
/* Waits for resident_valid; returns the resident area (fp32). */
int k3_trunk_reader_resident(struct k3_trunk_reader *r, const float **out, struct k3_err *err);

/* Rows [row, row + n_rows) of piece `piece` of the current pass (rows counted within the piece): waits until they
 * are there and returns their address, contiguous, valid until k3_trunk_reader_done() or the next seek.  If trunkd dies
 * meanwhile it reattaches to the next generation and seeks to where it waits.
 * Blocks of one pass must be asked for in schedule order.  While blocks are held (K3_TRUNK_HELD at most) nothing is waited
 * for: only what k3_trunk_reader_ready() has found may be asked for then (else -EINVAL).  Errors: -EIO with words and exit 4 (the stream or the piece
 * could not be read; position, file and offset named); -ECANCELED when *stop (may be NULL) became true. */
int k3_trunk_reader_rows(struct k3_trunk_reader *r, uint32_t piece, uint32_t row, uint32_t n_rows,
                         const void **rows, struct k3_err *err);
/* How many rows from (piece, row) on are there now: to the end of the piece, but of the ring no more than an eighth. */
uint32_t k3_trunk_reader_ready(struct k3_trunk_reader *r, uint32_t piece, uint32_t row);
/* The whole piece when it is pinned and loaded already, else NULL.  Does not wait; valid until the next call of rows. */
const void *k3_trunk_reader_pinned(const struct k3_trunk_reader *r, uint32_t piece);
/* The oldest block that is held is no longer needed: consumed moves to its end. */
void k3_trunk_reader_done(struct k3_trunk_reader *r);
/* Ends the current pass and begins the next at its first piece.  If all pieces were consumed this costs nothing;
 * otherwise (abandoned, lm_head skipped) it seeks. */
int k3_trunk_reader_next_pass(struct k3_trunk_reader *r, struct k3_err *err);
/* Forces a seek to the start of the next pass: first attach, after an error. */
int k3_trunk_reader_seek_pass(struct k3_trunk_reader *r, struct k3_err *err);
/* Largest block (bytes) worth asking for at once: at most half the ring, 1 MiB for comfort. */
uint64_t k3_trunk_reader_block_bytes(const struct k3_trunk_reader *r);
void k3_trunk_reader_set_stop(struct k3_trunk_reader *r, _Atomic bool *stop);
void k3_trunk_reader_set_blocked(struct k3_trunk_reader *r, bool blocked_on_expert);
/* Called on the reader's thread with one line for the log when trunkd is found dead (event "trunkd_gone"; once per
 * death) and when the next generation is attached ("trunkd_back"). */
typedef void k3_trunk_notice_fn(void *arg, const char *event, const char *text);
void k3_trunk_reader_set_notice(struct k3_trunk_reader *r, k3_trunk_notice_fn *fn, void *arg);
struct k3_trunk_reader_counts { uint64_t waits, wait_ns, reattached, ring_bytes, pinned_bytes, seeks; };
void k3_trunk_reader_counts(const struct k3_trunk_reader *r, struct k3_trunk_reader_counts *out);

#endif
