/* ipc/err.h: one error, with words.  A library fills it and returns; whoever owns the event loop logs it once.
 *
 * Functions return 0 or a negative errno.  `exit_status` is what a program should leave with when this error
 * ends it (design.md section 9): 1 failed, 2 refused configuration or usage, 3 no peer, 4 output not to be
 * trusted. */
#ifndef K3_IPC_ERR_H
#define K3_IPC_ERR_H

#include <stdarg.h>

#define K3_EXIT_OK 0
#define K3_EXIT_FAILED 1
#define K3_EXIT_REFUSED 2
#define K3_EXIT_NO_PEER 3
#define K3_EXIT_UNTRUSTED 4

struct k3_err {
    int code;        /* negative errno, 0 when empty */
    int exit_status; /* K3_EXIT_* */
    char text[1024]; /* one line, no newline; names what was asked, what there is and what to do */
};
#define K3_ERR_INIT { 0, 0, "" }

/* All four fill err (NULL allowed) and return `code`, which must be negative. */
int k3_fail(struct k3_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int k3_refuse(struct k3_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int k3_no_peer(struct k3_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int k3_untrusted(struct k3_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* strerror() of what became of a read of weights (positive); EBADMSG: its bytes are not what their checksum says. */
const char *k3_read_strerror(int errnum);

/* Our own invariant broke: says so on stderr and aborts; the supervisor restarts us. */
void k3_bug(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));

#endif
