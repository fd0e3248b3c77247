/* tools/walk.h: reads everything of a checkpoint that has a sum, with several threads, and hands the sums on in order.
 * For k3ctl verify and k3-pack. */
#ifndef K3_TOOLS_WALK_H
#define K3_TOOLS_WALK_H

#include "model/sums.h"

struct k3_walk_result {
    size_t item;
    uint32_t crc;
    int status;         /* 0, or the negative errno of a read (then crc is nothing) */
    uint16_t file;      /* where that was */
    uint64_t off_bytes;
};
struct k3_walk {
    const struct k3_model *m; /* with experts, when experts are among the items */
    size_t first, end;        /* items, of k3_sums_item() */
    const uint8_t *skip;      /* NULL, or by item: 1 = not read, no result */
    unsigned n_threads;       /* at least 1 */
    void *arg;
    /* On a thread of the walk, for each item that could be read; may be NULL.  Bytes of all parts, one behind the
     * other.  Negative errno: becomes the item's status. */
    int (*bytes)(void *arg, const struct k3_sum_item *item, size_t i, const void *bytes, uint32_t crc);
    /* On the caller's thread, in the order of the items.  A negative return ends the walk. */
    int (*result)(void *arg, const struct k3_walk_result *r, struct k3_err *err);
    /* On the caller's thread, a few times a second; may be NULL.  done_bytes: of items handed to result.  A negative
     * return ends the walk. */
    int (*tick)(void *arg, uint64_t done_bytes, struct k3_err *err);
};
/* 0, or what result or tick returned, or -ENOMEM and the like with words.  When it returns no thread is left. */
int k3_walk(const struct k3_walk *w, struct k3_err *err);

/* After a rename in it: the new name is on the disk, too.  0 or negative errno (errno is set). */
int k3_sync_dir(const char *dir);

/* "12.3 of 108.8 GB, 2.9 GB/s, 34 s left" on stderr, from the third second on: at a terminal in place, elsewhere a line
 * every ten seconds. */
struct k3_progress {
    const char *program, *what; /* "k3-pack", "copied" */
    uint64_t total_bytes, skipped_bytes; /* skipped: done before this run, not part of the rate */
    uint64_t began_ns, shown_ns;
    bool shown;
};
void k3_progress_begin(struct k3_progress *p, const char *program, const char *what, uint64_t total_bytes,
                       uint64_t skipped_bytes);
void k3_progress_tick(struct k3_progress *p, uint64_t done_bytes); /* since the beginning, without skipped */
void k3_progress_end(struct k3_progress *p);

#endif
