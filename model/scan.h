/* model/scan.h: a JSON scanner that holds no tree.  Safetensors headers and the shard index of the released model are
 * 75 and 60 MB of JSON; a tree of them would cost ten times that.
 *
 * The text is one buffer, or a file read through a window (fill).  Every function skips white space first and
 * returns 0, -EPROTO (not JSON, or not what was asked for) or -EIO (the file could not be read). */
#ifndef K3_MODEL_SCAN_H
#define K3_MODEL_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct k3_scan {
    const char *p, *end;  /* what is left of the window */
    const char *base;     /* where the window begins */
    uint64_t base_bytes;  /* its place in the text */
    char *buf;            /* file only: the window, owned by the caller */
    size_t buf_bytes;
    int fd;               /* -1: the buffer is all */
    bool failed;          /* a read failed */
};

void k3_scan_text(struct k3_scan *s, const char *text, size_t len_bytes);
void k3_scan_fd(struct k3_scan *s, int fd, char *buf, size_t buf_bytes);

int k3_scan_peek(struct k3_scan *s);         /* next byte after white space, -1 at the end */
bool k3_scan_is(struct k3_scan *s, char c);  /* takes c if it comes next */
int k3_scan_want(struct k3_scan *s, char c); /* takes c */
/* A string, unescaped, with a final 0.  -ENAMETOOLONG when it does not fit; a NUL inside is refused. */
int k3_scan_string(struct k3_scan *s, char *out, size_t cap, size_t *len_bytes);
/* An object of strings: each member to visit, which returns 0 to go on; what else it returns ends it and is returned.  Names longer than
 * 1,023 bytes and values longer than 511 are refused as k3_scan_string does. */
int k3_scan_strings(struct k3_scan *s, int (*visit)(void *arg, const char *name, const char *value), void *arg);
int k3_scan_u64(struct k3_scan *s, uint64_t *out); /* a non-negative whole number without fraction or exponent */
int k3_scan_skip(struct k3_scan *s);               /* any value, at most 64 levels deep */
uint64_t k3_scan_at(const struct k3_scan *s);      /* byte position, for words */

#endif
