/* io/files.h: the weight files, open, each in one place or in several copies, and the drives they lie on.
 *
 * A read goes, block by block, to the copy whose drive has the least bytes in flight (so that of two drives the faster
 * one gets more of them).  A copy that failed is left alone for a while as long as there is another. */
#ifndef K3_IO_FILES_H
#define K3_IO_FILES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/calibrate.h"
#include "io/device.h"
#include "ipc/err.h"

#define K3_IO_COPIES_MAX 32 /* the bits of k3_io_choose's `tried` */
#define K3_IO_BAD_NS 30000000000ull

struct k3_io_drive {
    struct k3_device about;
    struct k3_io_rate rate;
    const char *rate_from; /* "given", "remembered", "measured", "default" */
    uint32_t in_flight;    /* reads */
    uint64_t in_flight_bytes;
    _Atomic uint64_t reads, read_bytes; /* came back; info looks at them from another thread */
};
struct k3_io_copy {
    char *path;
    int fd;
    uint32_t drive;
    bool direct;           /* O_DIRECT is on */
    uint64_t bad_until_ns; /* 0: good */
};
struct k3_io_file {
    uint64_t len_bytes;
    uint32_t n_copies; /* 0: not opened */
    struct k3_io_copy *copy;
};
struct k3_io_files {
    size_t n_files;
    struct k3_io_file *file;
    uint32_t n_drives;
    struct k3_io_drive *drive;
    uint32_t n_used;           /* copies that are open */
    _Atomic uint32_t n_direct; /* of them with direct reads */
};

/* A table for n_files files, none of them open.  Release with k3_io_files_close(), which copes with a zeroed one. */
int k3_io_files_open(struct k3_io_files *fs, size_t n_files, struct k3_err *err);
void k3_io_files_close(struct k3_io_files *fs);
/* Opens all copies of file i.  direct: "auto", "on" or "off"; align_bytes: of a direct read.  Refused: a copy that
 * cannot be opened, is not len_bytes long, or has no direct reads with "on". */
int k3_io_files_add(struct k3_io_files *fs, size_t i, const char *const *paths, size_t n_paths, uint64_t len_bytes,
                    const char *direct, uint32_t align_bytes, struct k3_err *err);
/* Depth and block of every drive: what is given (not 0), else what is remembered of it, else measured, else the
 * defaults.  Call once, after the last file. */
void k3_io_files_rates(struct k3_io_files *fs, uint32_t depth, uint64_t block_bytes);
uint32_t k3_io_files_depth(const struct k3_io_files *fs);       /* of all drives together, at least 1 */
uint32_t k3_io_files_block_bytes(const struct k3_io_files *fs); /* the largest */

/* The copy to read from now: of those not in `tried` (bit c: copy c) the one whose drive has the least bytes in
 * flight; bad ones only when there is no good one.  need_room: only drives with fewer reads in flight than their depth.
 * -1: none. */
int k3_io_choose(const struct k3_io_files *fs, size_t file, uint32_t tried, bool need_room, uint64_t now_ns);
/* Account for a read that was sent, and for one that came back (res as the kernel gave it). */
void k3_io_sent(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t len_bytes);
void k3_io_back(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t len_bytes, int64_t res);
/* O_DIRECT was refused by a read: buffered from now on.  True when that is news. */
bool k3_io_set_buffered(struct k3_io_files *fs, size_t file, uint32_t copy);
/* The copy failed.  True when it had been good, so that it is worth a line in the log. */
bool k3_io_set_bad(struct k3_io_files *fs, size_t file, uint32_t copy, uint64_t now_ns);
/* n ranges of a file, one behind the other, ought to have this CRC32C, and what came did not: reads them from every copy.
 * Those that do not have it are bad; bit c of the result: copy c.  0 for a file of one copy, which is not read. */
uint32_t k3_io_wrong_copies(struct k3_io_files *fs, size_t file, const uint64_t *off_bytes, const uint64_t *len_bytes,
                            uint32_t n, uint32_t crc, uint64_t now_ns);
/* 0, or the positive errno that the file earns when no copy is any more what was opened (ESTALE: another size).  A
 * copy of another size is bad. */
int k3_io_check(struct k3_io_files *fs, size_t file, uint64_t now_ns);

/* For info: io_depth (of all drives), io_block_bytes (as given here), io_rate_from (of the first), and drives: [{name, fs,
 * numa_node, files, depth, block_bytes, bytes_per_s, rate_from, reads, read_bytes}]. */
struct cJSON;
void k3_io_files_info(const struct k3_io_files *fs, uint64_t block_bytes, struct cJSON *reply);

#endif
