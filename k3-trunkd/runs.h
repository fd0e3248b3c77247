/* k3-trunkd/runs.h: the arithmetic of what to read next.  No I/O; tested alone.
 *
 * A run is a stretch of the stream that is also a stretch of one file: unpinned pieces that touch
 * in both.  A block is one read: whole pages of the stream inside one run.  Position and file
 * offset agree modulo A (model/schedule.h), so the same page arithmetic holds for both. */
#ifndef K3_TRUNKD_RUNS_H
#define K3_TRUNKD_RUNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "model/model.h"
#include "model/schedule.h"

#define K3_TAIL_BYTES (64u << 10) /* less is read with the block before it (spec/io.md 3) */
#define K3_IO_BLOCK_MIN (64u << 10)
#define K3_IO_BLOCK_MAX (1u << 30) /* a read's length and the kernel's own limit are below 2^31 */
#define K3_STREAM_POS_MAX ((uint64_t)1 << 62)

struct k3_run {
    uint64_t start;     /* position in the pass of its first byte */
    uint64_t off_bytes; /* of that byte in the file */
    uint64_t len_bytes;
    uint32_t file;
    uint32_t first; /* index in unpinned[] of its first piece */
};
struct k3_runs {
    struct k3_run *run;
    size_t n_runs;
    uint32_t *unpinned; /* the unpinned pieces in schedule order */
    size_t n_unpinned;
    const uint64_t *start; /* the layout's, per piece */
    uint64_t pass_bytes;
    uint32_t align_bytes;
};

struct k3_block {
    uint64_t pos;        /* stream position of the first byte read; multiple of A */
    uint64_t off_bytes;  /* of that byte in the file; multiple of A */
    uint64_t len_bytes;  /* of the read; multiple of A */
    uint64_t need_bytes; /* that many must arrive, the rest may lie past the end of the file */
    uint64_t end;        /* produced once it has arrived */
    uint64_t next;       /* where the next block is looked for */
    uint64_t pass;
    uint32_t file;
    uint32_t piece; /* schedule index of the piece at its first byte */
    bool first_of_run, last_of_pass;
};

/* Bytes of the next read when left_bytes (whole pages) remain: block_bytes, or all of it when what
 * would remain is a short tail. */
uint64_t k3_cut_bytes(uint64_t left_bytes, uint64_t block_bytes);
/* The block size that suits a ring: at most a quarter of it, so that the row block that is waited
 * for (at most half of it) and the read that brings its last byte always fit together. */
uint64_t k3_ring_block_bytes(uint64_t io_block_bytes, uint64_t ring_bytes, uint32_t align_bytes);
/* Pages [.., end) may be written when this holds (shm/trunk.h). */
bool k3_ring_has_room(uint64_t end, uint64_t consumed, uint64_t ring_bytes, uint32_t align_bytes);
/* How many multiples of unit lie in (from, to]. */
uint64_t k3_multiples_passed(uint64_t from, uint64_t to, uint64_t unit);

int k3_runs_build(struct k3_runs *out, const struct k3_model *m, const struct k3_layout *l,
                  struct k3_err *err);
void k3_runs_free(struct k3_runs *r);
/* The block that holds the first wanted byte at or after pos (any byte below K3_STREAM_POS_MAX).
 * The runs must not be empty. */
void k3_runs_block(const struct k3_runs *r, uint64_t pos, uint64_t block_bytes,
                   struct k3_block *out);

#endif
