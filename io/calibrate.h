/* io/calibrate.h: how many reads of which size keep a drive busy, and how fast it then is.
 *
 * Drives differ by four times in where they saturate, so this is measured: direct reads into contiguous memory
 * (spec/io.md 1), best of two for each cell of a small grid.  The answer is the cell with the least bytes in flight that
 * reaches 97% of the best one, since more than that only costs latency; but at least 4 ms of reading, since a daemon on
 * a busy machine may come that late to send the next.  Measured once and remembered for each drive in the file
 * `devices` of $XDG_CACHE_HOME/k3 (else ~/.cache/k3). */
#ifndef K3_IO_CALIBRATE_H
#define K3_IO_CALIBRATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/device.h"
#include "ipc/err.h"

#define K3_IO_DEPTH_DEFAULT 8u
#define K3_IO_BLOCK_DEFAULT (4u << 20)
#define K3_CALIBRATE_NS 1000000000ull      /* at most, for one drive */
#define K3_CALIBRATE_MIN_BYTES (64u << 20) /* with less to read, a rate would be that of a cache */
#define K3_CALIBRATE_LATE_NS 4000000ull
#define K3_IO_RATE_DAYS 30 /* what is older is measured anew */

struct k3_io_rate {
    uint32_t depth, block_bytes;
    double bytes_per_s;        /* with that depth and block */
    double bytes_per_s_depth1; /* with that block, one read at a time */
    bool remembered;           /* false: measured just now */
};

/* Measures with files of one drive (their holes are left out).  Takes at most about max_ns.
 *   -ENODATA     the files hold less than K3_CALIBRATE_MIN_BYTES that are not holes
 *   -EOPNOTSUPP  their file system has no direct reads, or they are in memory
 *   -ETIME       too little was measured in that time: the machine or the drive was busy
 *   others       a file cannot be opened or read */
int k3_calibrate(const char *const *files, size_t n, uint64_t max_ns, struct k3_io_rate *out,
                 struct k3_err *err);

/* What is remembered of the drive of files[0]; else measures with `files` (all on that drive), at most
 * K3_CALIBRATE_NS, and remembers.  Two processes that ask at once do not measure at once.  Where nothing can be
 * remembered (no home, read-only) it is measured each time; a damaged file is written anew.  Errors: as
 * k3_calibrate(); the defaults above suit then, and *out holds them with rates of 0. */
int k3_io_rate_get(const char *const *files, size_t n, struct k3_io_rate *out, struct k3_err *err);

/* The same for the weight files (*.safetensors, *.k3pack) of a directory that lie on the directory's own drive. */
int k3_io_rate_of_dir(const char *dir, struct k3_io_rate *out, struct k3_err *err);

/* What is remembered of a drive, without measuring.  -ENOENT when nothing is, or it is too old. */
int k3_io_rate_remembered(const struct k3_device *dev, struct k3_io_rate *out);

/* ---- the parts, for the tests ---- */

struct k3_io_cell {
    uint32_t depth, block_bytes;
    double bytes_per_s; /* 0: not measured */
};
/* False when no cell was measured. */
bool k3_io_rate_choose(const struct k3_io_cell *cell, size_t n, struct k3_io_rate *out);

/* Enough was measured before the time ran out to be believed for long: 16 MiB in flight, or what a slow drive reads in four
 * times K3_CALIBRATE_LATE_NS.  A machine that stood still for a second would else leave a drive with one small read. */
bool k3_io_rate_enough(const struct k3_io_cell *cell, size_t n);

/* Looks for a drive in the text of a `devices` file.  0, -ENOENT (not there, or too old at now_s), -EPROTO (the text is
 * damaged anywhere: nothing of it is believed). */
int k3_io_rates_find(const char *text, const char *key, int64_t now_s, struct k3_io_rate *out);
/* The text again with one drive's line new; what is damaged or too old is left out.  The caller frees it; NULL: no
 * memory. */
char *k3_io_rates_with(const char *text, const char *key, const struct k3_io_rate *r, int64_t now_s);

#endif
