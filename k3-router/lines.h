/* k3-router/lines.h: private to --lines.  lines.c who answers which line when, lines_read.c lines of stdin, lines_body.c a line
 * that is JSON, lines_out.c the file of --out. */
#ifndef K3_ROUTER_LINES_H
#define K3_ROUTER_LINES_H

#include "k3-router/chat_request.h"
#include "k3-router/router.h"

/* ---- lines_read.c ---- */

struct k3_line {
    uint64_t index;     /* from 0 */
    uint64_t at_bytes;  /* where it begins */
    uint64_t len_bytes; /* all of it, without the line end; more than is in text when it is too long */
    uint32_t crc;       /* CRC32C of that */
    struct k3_buf text; /* at most the limit; may hold NUL.  The owner frees it */
    bool ended;         /* by a line feed; false only for the last one */
};
struct k3_line_reader {
    int fd;
    const char *name;
    size_t max_bytes;        /* of a line that is kept */
    bool (*stop)(void *arg); /* looked at when a read is interrupted; may be NULL */
    void *arg;
    char block[65536];
    size_t n, next;          /* bytes in block, the first one not taken */
    uint64_t index, at_bytes;
};
/* 1: a line, whose text is the caller's; 0: the end; -EINTR: stopped; else the errno of the read, with words.  "\n" and "\r\n"
 * end a line, and the end of the input ends one that is not empty. */
int k3_line_next(struct k3_line_reader *in, struct k3_line *line, struct k3_err *err);
/* Lines of a regular file from its current offset on; 0: not known (a pipe). */
uint64_t k3_lines_count(int fd);

/* ---- lines_body.c ---- */

/* What a JSON line asks for.  p (from k3_prompt_init) gets what the line says; what it points to lives in b, which is to be
 * freed in any case.  Refused (exit 2) by words that name the member. */
struct k3_line_body {
    struct k3_json_doc doc;
    struct k3_chat_request chat;
    char *stop[16];
    size_t n_stop;
    struct k3_buf id; /* JSON with a NUL behind it, or empty */
};
int k3_line_body(struct k3_line_body *b, const struct k3_router *r, const char *text, size_t len_bytes, struct k3_prompt *p,
                 struct k3_err *err);
void k3_line_body_free(struct k3_line_body *b);

/* ---- lines_out.c ---- */

/* The file of --out: whole lines only, each written once, in the order in which the answers end.
 *
 * Crash table.
 *   before the line is written       its journal has the tokens; the next run goes on with them, under the same id
 *   in the middle of the write       a torn last line, which the next run cuts off; then as above
 *   written, the journal still there the next run passes over the line; the journal is removed like all old ones
 *   power cut                        fdatasync comes before the journal is removed, so one of the two is there */
struct k3_lines_done { uint64_t index; uint32_t crc; uint8_t code; }; /* code: of an error object, else 0 */
struct k3_lines_out {
    int fd;
    const char *path;
    char salt[600];             /* of the ids of requests: the file's real path, device and inode */
    uint64_t end_bytes;         /* of the whole lines */
    struct k3_lines_done *done; /* sorted by index */
    size_t n_done;
};
#define K3_LINES_OUT_INIT { .fd = -1 }
/* Opens or makes the file, locks it, reads what is answered in it and cuts off a torn last line.  Refused: no regular file, in
 * use by another k3-router, or with a line that is no answer of --lines. */
int k3_lines_out_open(struct k3_lines_out *o, const char *path, struct k3_err *err);
/* One whole line of such a file.  False: it is none. */
bool k3_lines_out_parse(struct k3_lines_done *done, const char *text, size_t len_bytes);
/* What is known of a line of the input when the file was opened; NULL: it is not answered. */
const struct k3_lines_done *k3_lines_out_find(const struct k3_lines_out *o, uint64_t index);
/* Appends a line with its end, and returns when it is on the disk.  After a failure the file ends as before. */
int k3_lines_out_write(struct k3_lines_out *o, const char *bytes, size_t len_bytes, struct k3_err *err);
void k3_lines_out_close(struct k3_lines_out *o);

#endif
