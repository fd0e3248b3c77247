/* k3-expertd/reader.h: reads whole experts into slots: block by block, in the order of demand, some blocks in flight on
 * each device.  Knows files and slots' addresses; nothing of who wants what. */
#ifndef K3_EXPERTD_READER_H
#define K3_EXPERTD_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "io/files.h"
#include "io/io.h"
#include "model/model.h"
#include "model/sums.h"
#include "shm/stats.h"

#define K3_READER_PAGE 4096u
#define K3_READ_TRIES 4 /* of one block: the first and three more */

struct k3_reader_opts {
    const char *io; /* "auto", "uring", "pread" */
    const char *direct; /* "auto", "on", "off" */
    uint32_t depth;       /* blocks in flight on each drive; 0: as calibrated */
    uint64_t block_bytes; /* 0: as calibrated */
    uint8_t *slots;     /* slot i at i * slot_bytes, page-aligned */
    uint64_t slot_bytes;
    uint32_t n_slots;
    int efd;            /* written when a block has completed */
    struct k3_stats *stats;
    uint32_t stat_bytes, stat_reads, stat_read_ns, stat_retries, stat_in_flight;
};

struct k3_reader;
/* Opens every file that holds an expert of m (which must outlive the reader).  On success *out is the caller's, to be
 * released with k3_reader_close(). */
int k3_reader_open(struct k3_reader **out, const struct k3_model *m, const struct k3_reader_opts *o,
                   struct k3_err *err);
/* Waits a while for reads in flight: the slots' memory must not be reused before.  NULL is fine. */
void k3_reader_close(struct k3_reader *r);

/* Begins to read an expert; nothing of the slot is written before k3_reader_submit().  0 or negative errno. */
int k3_reader_start(struct k3_reader *r, uint32_t slot, uint32_t layer, uint32_t expert, bool demand);
/* A prefetch under way becomes a demand: what is left of it is read in demand order. */
void k3_reader_promote(struct k3_reader *r, uint32_t slot);
void k3_reader_submit(struct k3_reader *r);

struct k3_read_done {
    uint32_t slot;
    int status; /* 0 or negative errno, with where: */
    uint32_t file;
    uint64_t file_off_bytes;
    uint32_t off_bytes[K3_EXPERT_TENSORS]; /* in the slot */
};
/* An expert that came is not what its CRC says: of several copies the wrong ones are named in the log, and left alone
 * while there is another. */
void k3_reader_wrong(struct k3_reader *r, const struct k3_sum_item *item, uint32_t crc);
bool k3_reader_has_copies(const struct k3_reader *r); /* some file is there more than once */
/* One expert whose last block has arrived; false when there is none now. */
bool k3_reader_done(struct k3_reader *r, struct k3_read_done *out);
/* Blocks in flight. */
uint32_t k3_reader_in_flight(const struct k3_reader *r);
/* How it reads, for info and the log: "io_uring" or "pread"; and what is open. */
const char *k3_reader_how(const struct k3_reader *r);
const char *k3_reader_why_pread(const struct k3_reader *r); /* "" when pread was not fallen back to */
const struct k3_io_files *k3_reader_files(const struct k3_reader *r);
uint64_t k3_reader_registered_bytes(const struct k3_reader *r); /* of the slots, with io_uring */

/* Where the ranges and tensors of an expert lie in its slot: each range in whole pages of its own, at (file offset mod
 * page) in the first.  Returns the bytes used, or -EOVERFLOW when that is more than slot_bytes. */
int64_t k3_expert_slot_layout(const struct k3_expert_place *p, uint64_t slot_bytes,
                              uint64_t range_pos[K3_EXPERT_TENSORS], uint32_t off_bytes[K3_EXPERT_TENSORS]);

#endif
