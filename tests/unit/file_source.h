/* tests/unit/file_source.h: a struct k3_source that reads the checkpoint's files directly, for
 * tests without daemons.  It is strict where the real one is trusting: blocks out of schedule
 * order, too large a block, two blocks or an expert held twice abort, and bytes given back are
 * overwritten at once so that a later use shows. */
#ifndef K3_TESTS_FILE_SOURCE_H
#define K3_TESTS_FILE_SOURCE_H

#include "k3-computed/source.h"

struct k3_file_source;
/* m must have been opened with want_experts and must outlive the source. */
int k3_file_source_open(struct k3_file_source **out, const struct k3_model *m, uint64_t block_bytes,
                        struct k3_err *err);
void k3_file_source_close(struct k3_file_source *f);
struct k3_source *k3_file_source(struct k3_file_source *f);

struct k3_file_source_counts {
    uint64_t blocks, block_bytes, experts, passes, failed_passes, abandoned;
};
void k3_file_source_counts(const struct k3_file_source *f, struct k3_file_source_counts *out);
/* Router gates are pinned from now on: the look-ahead finds them. */
void k3_file_source_pin_gates(struct k3_file_source *f);
/* The nth block (expert) from now on cannot be read; 0 = no fault. */
void k3_file_source_fail_block(struct k3_file_source *f, uint64_t nth);
void k3_file_source_fail_expert(struct k3_file_source *f, uint64_t nth);

/* Opens a model with all that the source needs. */
int k3_file_source_model(struct k3_model **out, const char *dir, uint32_t n_layers,
                         struct k3_err *err);

#endif
