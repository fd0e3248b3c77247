/* tests/unit/trunk_fix.h: checkpoints for the trunk tests: a struct k3_model made by hand over real
 * files of random bytes (matrices of any size at any offset), daemons in child processes, and the
 * comparison with the file. */
#ifndef K3_TESTS_TRUNK_FIX_H
#define K3_TESTS_TRUNK_FIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "k3-trunkd/trunkd.h"
#include "model/model.h"
#include "shm/trunk.h"

struct k3_tf_spec {
    uint64_t seed;
    uint32_t n_files, n_matrices, n_residents;
    uint32_t row_bytes_max; /* rows are 2..row_bytes_max bytes (even) */
    uint32_t matrix_bytes_max;
    uint32_t piece_bytes; /* at most K3_PIECE_BYTES */
    const char *base;     /* directory under which the files go; NULL: /tmp */
};
struct k3_tf {
    char dir[64], instance[33], rundir[512];
    struct k3_tf_spec spec;
    struct k3_model *m;
    uint64_t rng;
};

uint64_t k3_tf_random(uint64_t *state); /* splitmix64 */
uint64_t k3_tf_below(uint64_t *state, uint64_t n);

/* Makes files, model, run directory.  Asserts on failure. */
void k3_tf_open(struct k3_tf *t, const struct k3_tf_spec *spec);
void k3_tf_close(struct k3_tf *t);                           /* removes all, segments too */
void k3_tf_write_file(const struct k3_tf *t, uint32_t file); /* (again) */
struct k3_model *k3_tf_model(const struct k3_tf *t);         /* a copy of its own */
/* What a file holds. */
void k3_tf_bytes(const struct k3_tf *t, uint32_t file, uint64_t off_bytes, void *out,
                 size_t len_bytes);

/* Options of a daemon for this checkpoint, quiet. */
struct k3_trunkd_opt k3_tf_opt(const struct k3_tf *t);
/* --trunk-gb for a ring of ring_mb and a share (of 256) of the trunk pinned. */
uint64_t k3_tf_trunk_bytes(const struct k3_tf *t, uint32_t ring_mb, unsigned share);
/* Runs a daemon in a child process, its log in DIR/log.  Does not wait for readiness. */
pid_t k3_tf_start(const struct k3_tf *t, const struct k3_trunkd_opt *opt);
pid_t k3_tf_start_after(const struct k3_tf *t, const struct k3_trunkd_opt *opt,
                        void (*before)(void)); /* in the child */
bool k3_tf_wait_ready(const struct k3_tf *t, pid_t pid);
int k3_tf_stop(pid_t pid);  /* SIGTERM; the exit status */
void k3_tf_kill(pid_t pid); /* SIGKILL and reap */
bool k3_tf_log_has(const struct k3_tf *t, const char *text);

uint64_t k3_tf_stat(const struct k3_tf *t, const char *name); /* of the living daemon's page */

struct k3_trunk_reader *k3_tf_reader(const struct k3_tf *t, uint32_t generation);
/* k3_trunk_reader_seek_pass() and _next_pass(); fail with their words. */
void k3_tf_begin(struct k3_trunk_reader *r);
void k3_tf_next(struct k3_trunk_reader *r);
/* Compares rows with the file; fails naming the first difference. */
void k3_tf_check_rows(const struct k3_tf *t, uint32_t piece, uint32_t row, uint32_t n_rows,
                      const void *rows);
/* One pass in row blocks of random size; every block is compared after `nap_us`.  Stops before
 * piece `until`. */
void k3_tf_walk(struct k3_tf *t, struct k3_trunk_reader *r, size_t until, unsigned nap_us);
void k3_tf_check_resident(const struct k3_tf *t, const float *resident);

#endif
