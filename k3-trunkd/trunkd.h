/* k3-trunkd/trunkd.h: private to k3-trunkd: the daemon's struct, its stats, what its files offer
 * one another. The contract with computed is shm/trunk.h; where the bytes lie is model/schedule.h.
 */
#ifndef K3_TRUNKD_TRUNKD_H
#define K3_TRUNKD_TRUNKD_H

#include <pthread.h>

#include "io/files.h"
#include "io/io.h"
#include "ipc/daemon.h"
#include "k3-trunkd/runs.h"
#include "model/model.h"
#include "model/schedule.h"
#include "model/verify.h"
#include "shm/trunk.h"

#define K3_TRUNKD_NAME "k3-trunkd"
#define K3_TRUNK_SEG "trunk"
#define K3_TRUNK_DATA_SEG "trunkdata"
#define K3_IO_DEPTH_MAX 256u

struct k3_trunkd_opt {
    struct k3_daemon_opts common;
    const char *model;
    struct k3_mem_opts mem;
    struct k3_str_list devices; /* looked for shards before the model directory */
    uint64_t trunk_bytes;       /* --trunk-gb: pinned area and ring */
    uint32_t ring_mb;           /* 0 = default */
    uint32_t n_layers;          /* 0 = all */
    uint32_t io_depth;       /* 0: as calibrated */
    uint64_t io_block_bytes; /* 0: as calibrated */
    bool shared_drive;
    const char *io;     /* "auto", "uring", "pread" */
    const char *direct; /* "auto", "on", "off" */
    const char *verify; /* "off", "first", "always"; NULL: first when there are sums */
    bool pins_prefix;
};
#define K3_TRUNKD_OPT_INIT                                                                         \
    {                                                                                              \
        K3_DAEMON_OPTS_INIT, NULL, K3_MEM_OPTS_INIT, { { NULL }, 0 }, 1000000000u, 0, 0, 0, 0, false, "auto",        \
            "auto"                                                                                 \
    }

enum k3_trunkd_stat {
    K3_TS_READ_BYTES,
    K3_TS_READS,
    K3_TS_READ_NS,
    K3_TS_IN_FLIGHT,
    K3_TS_RETRIES,
    K3_TS_RING_PRODUCED_BYTES,
    K3_TS_RING_WRAPS,
    K3_TS_PASSES,
    K3_TS_RING_FULL_WAITS,
    K3_TS_RING_FULL_WAIT_NS,
    K3_TS_ROOM_NS,
    K3_TS_ROOM_AT_DEPTH_NS,
    K3_TS_SEEKS,
    K3_TS_ERRORS,
    K3_TS_PINNED_LOADED_BYTES,
    K3_TS_PINNED_BYTES,
    K3_TS_RING_BYTES,
    K3_TS_STREAM_PASS_BYTES,
    K3_TS_RESIDENT_BYTES,
    K3_TS_HUGE_BYTES,
    K3_TS_LOCKED_BYTES,
    K3_TS_SWAPPED_BYTES,
    K3_TS_MAJOR_FAULTS,
    K3_TS_VERIFIED_BYTES,
    K3_TS_VERIFY_FAILURES,
    K3_TS_REGISTERED_BYTES,
    K3_TS_N
};
extern const struct k3_stat_def k3_trunkd_stats[K3_TS_N];

enum k3_read_kind { K3_READ_STREAM, K3_READ_PIN };
struct k3_read { /* one read; lives in k3_trunkd.reads */
    struct k3_io_req req;
    enum k3_read_kind kind;
    uint32_t file, piece;
    uint32_t copy, tried; /* which copy of the file; those that have failed */
    uint8_t *buf;                              /* of the whole range */
    uint64_t off_bytes, len_bytes, need_bytes; /* of the whole range */
    uint64_t got_bytes;                        /* from its beginning */
    uint32_t n_idle;                           /* completions in a row that brought nothing */
    int err;                                   /* positive errno once it has failed for good */
    bool done;
    struct k3_block block; /* stream */
    struct k3_read *next;  /* in the free list, or in stream order */
};

/* The states of the stream; all moves are in stream.c.
 *
 *     WAITING, RUNNING, STOPPED -> SEEKING   a new seek number is seen: nothing more is queued
 *     SEEKING -> RUNNING   none of its reads is in flight: ring renewed if it must be, acked
 *     RUNNING -> STOPPED   a failed read has become the oldest: error published; a seek tries again
 */
enum k3_stream_state { K3_STREAM_WAITING, K3_STREAM_RUNNING, K3_STREAM_SEEKING, K3_STREAM_STOPPED };
struct k3_stream {
    enum k3_stream_state state;
    bool ring_dirty;   /* a predecessor's reads may still land in it: renewed at the first seek */
    uint64_t next;     /* position where the next block is looked for */
    uint64_t produced; /* our copy of a.produced */
    uint64_t number;   /* last seek acknowledged */
    uint64_t block_bytes;
    struct k3_read *oldest, **newest; /* in flight, stream order */
    unsigned n_in_flight;
    uint64_t full_since_ns; /* 0: not waiting for room */
};

struct k3_pin { /* per piece while it is being loaded */
    uint16_t n_blocks_left;
    uint16_t err;
};
struct k3_pins {
    struct k3_pin *pin;
    size_t n_todo;         /* pinned, absent, not begun */
    size_t cursor;         /* where the next one is looked for; wraps */
    uint64_t pass;         /* of cursor: grows when it wraps */
    long piece;            /* being queued, or -1 */
    uint64_t queued_bytes; /* of that piece's span */
    bool logged;           /* a failure, since the last seek */
};

struct k3_tsummed { /* of the stream, with --verify */
    uint64_t pos; /* it is summed up to here */
    uint32_t crc; /* of the piece in which pos lies, from its beginning */
};

/* Whether the drives are kept busy, for the counters room_ns and room_at_depth_ns: NONE there is nothing to read now, or
 * less than full depth is wanted; SOME there is, and a drive that has it could take more; DEPTH that drive has its full
 * depth. */
enum k3_room { K3_ROOM_NONE, K3_ROOM_SOME, K3_ROOM_DEPTH };

struct k3_trunkd {
    struct k3_trunkd_opt opt;
    struct k3_daemon *daemon;
    struct k3_model *model;
    struct k3_layout layout;
    struct k3_runs runs;
    struct k3_io_files files;
    uint64_t block_bytes; /* of one read: the largest that a drive wants */
    struct k3_seg ctl_seg, data;
    struct k3_mem mem; /* what data is made of */
    bool owns_names; /* the segments' names are ours to remove */
    struct k3_trunk_ctl *ctl;
    struct k3_trunk_data *head;
    _Atomic uint32_t *flags;
    uint8_t *ring;
    struct k3_io *io;
    struct k3_read *reads; /* twice the drives' depth: finished ones wait here for an older one */
    struct k3_read *free_reads;
    unsigned n_in_flight;
    enum k3_room room; /* since room_since_ns */
    uint64_t room_since_ns, room_ns, room_at_depth_ns;
    struct k3_stream stream;
    struct k3_pins pins;
    struct k3_verify verify; /* a mark per piece */
    struct k3_tsummed summed;
    bool news; /* something was published since computed's bell was rung last */
    /* for info, which runs on the control thread */
    bool taken_over;
    _Atomic uint64_t huge_bytes, registered_bytes;
    pthread_mutex_t info_lock; /* guards opened: info looks at nothing unless it is set */
    bool opened;
};
#define K3_TRUNKD_INIT                                                                             \
    {                                                                                              \
        .opt = K3_TRUNKD_OPT_INIT, .ctl_seg = K3_SEG_INIT, .data = K3_SEG_INIT,                    \
        .pins = { .piece = -1 }, .info_lock = PTHREAD_MUTEX_INITIALIZER                            \
    }

/* options.c */
bool k3_trunkd_options(struct k3_trunkd_opt *o, int argc, char **argv, int *status);

/* budget.c: how --trunk-gb divides into ring and pins.  pinned: n_pieces bytes, filled.  Pure. */
int k3_trunkd_budget(const struct k3_model *m, uint32_t align_bytes, uint64_t trunk_bytes,
                     uint32_t ring_mb, uint64_t *ring_bytes, uint8_t *pinned, struct k3_err *err);

/* Pins the first pieces of the schedule instead of those that are pinned, in no more bytes: only to measure what spreading
 * them is worth (k3-bench decode --pins prefix). */
void k3_trunkd_pins_prefix(const struct k3_model *m, uint32_t align_bytes, uint8_t *pinned);

/* open.c.  A model that is already there (tests) is used and then owned. */
int k3_trunkd_open(struct k3_trunkd *d, struct k3_err *err);
/* Registers with the queue what reads land in: the pinned area, and the ring unless a predecessor's reads may still land
 * in it, since registered pages would be left behind by its renewal. */
void k3_trunkd_register(struct k3_trunkd *d);
void k3_trunkd_close(struct k3_trunkd *d);

/* serve.c */
void k3_trunkd_begin_reads(struct k3_trunkd *d); /* as many as may be in flight now */
void k3_trunkd_room(struct k3_trunkd *d, enum k3_room room, uint64_t now_ns); /* from now on */
int k3_trunkd_serve(struct k3_trunkd *d, struct k3_err *err);

/* files.c */
int k3_tfiles_open(struct k3_trunkd *d, struct k3_err *err);
void k3_tfiles_close(struct k3_trunkd *d);
void k3_tfile_set_buffered(struct k3_trunkd *d, uint32_t file, uint32_t copy); /* O_DIRECT was refused */
/* A copy has failed with errnum: marks it.  The copy to try next, or -1; tried: bits of those that have failed. */
int k3_tfile_next(struct k3_trunkd *d, uint32_t file, uint32_t copy, uint32_t tried, int errnum);
/* Reads [off, off + len) of a file at once; *out points into scratch, which is grown as needed
 * (free() it). */
struct k3_scratch {
    uint8_t *base;
    uint64_t len_bytes;
};
int k3_tfile_read(struct k3_trunkd *d, uint32_t file, uint64_t off_bytes, uint64_t len_bytes,
                  struct k3_scratch *scratch, const uint8_t **out, struct k3_err *err);

/* resident.c: fills the resident area with fp32 and sets its flag. */
int k3_resident_load(struct k3_trunkd *d, struct k3_err *err);
/* Exact widening of n elements. */
void k3_resident_widen(float *out, const void *in, enum k3_dtype dtype, size_t n);

/* reader.c: reads in flight */
int k3_reads_open(struct k3_trunkd *d, struct k3_err *err);
void k3_reads_close(struct k3_trunkd *d);
struct k3_read *k3_read_take(struct k3_trunkd *d);          /* NULL: all in flight */
void k3_read_start(struct k3_trunkd *d, struct k3_read *r); /* the range's fields are set */
void k3_read_give(struct k3_trunkd *d, struct k3_read *r);
/* Looks at a completion.  True: r->done (with r->err when it failed); false: it was sent again for
 * the rest. */
bool k3_read_complete(struct k3_trunkd *d, struct k3_read *r);
/* Waits for completions, at most a tick, and hands each finished read to stream.c or pins.c. */
int k3_reads_wait(struct k3_trunkd *d, struct k3_err *err);

/* stream.c */
void k3_stream_open(struct k3_trunkd *d, bool ring_dirty);
/* Looks at line B's seek; moves the state.  Call each turn. */
void k3_stream_seek(struct k3_trunkd *d);
/* The next block; false when the stream is not running.  *room: it fits into the ring now. */
bool k3_stream_peek(const struct k3_trunkd *d, struct k3_block *out, bool *room);
void k3_stream_start(struct k3_trunkd *d, struct k3_read *r, const struct k3_block *b);
/* After completions: moves produced over the finished prefix. */
void k3_stream_publish(struct k3_trunkd *d);
void k3_stream_full(struct k3_trunkd *d, bool full); /* accounts for the time without room */

/* pins.c */
int k3_pins_open(struct k3_trunkd *d, struct k3_err *err);
void k3_pins_close(struct k3_trunkd *d);
/* Loads from that piece on; those that had failed are tried again. */
void k3_pins_seek(struct k3_trunkd *d, uint64_t pass, uint64_t piece);
bool k3_pins_peek(struct k3_trunkd *d, uint64_t *pass, uint32_t *piece); /* false: none to begin */
void k3_pins_start(struct k3_trunkd *d, struct k3_read *r);
void k3_pins_done(struct k3_trunkd *d, struct k3_read *r);

/* verify.c.  All is well at once when verification is off. */
int k3_tverify_open(struct k3_trunkd *d, struct k3_err *err);
/* The stream begins anew at start, which may lie within a piece: then reads that piece up to there. */
int k3_tverify_seek(struct k3_trunkd *d, uint64_t start, struct k3_err *err);
/* Sums the stream from where it was to end, which has arrived.  Returns how far it may be published: end, or less when
 * a piece that ends before is wrong. */
uint64_t k3_tverify_prefix(struct k3_trunkd *d, uint64_t end, uint32_t *bad_piece);
bool k3_tverify_pin(struct k3_trunkd *d, uint32_t piece); /* all its bytes are there */
/* bytes: as in the file.  Wrong: -EBADMSG with words, exit 4. */
int k3_tverify_resident(struct k3_trunkd *d, size_t i, const uint8_t *bytes, struct k3_err *err);

#endif
