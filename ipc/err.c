#include "ipc/err.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fill(struct k3_err *err, int code, int exit_status, const char *fmt, va_list ap)
{
    if (err) {
        err->code = code;
        err->exit_status = exit_status;
        vsnprintf(err->text, sizeof(err->text), fmt, ap);
        for (unsigned char *p = (unsigned char *)err->text; *p; p++) /* a terminal obeys them */
            if (*p < 0x20 || *p == 0x7f)
                *p = '?';
            else if (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0)
                p[0] = p[1] = '?';
    }
    return code;
}

#define K3_ERR_FUNCTION(name, status)                                                              \
    int name(struct k3_err *err, int code, const char *fmt, ...)                                   \
    {                                                                                              \
        va_list ap;                                                                                \
        va_start(ap, fmt);                                                                         \
        fill(err, code, status, fmt, ap);                                                          \
        va_end(ap);                                                                                \
        return code;                                                                               \
    }

K3_ERR_FUNCTION(k3_fail, K3_EXIT_FAILED)
K3_ERR_FUNCTION(k3_refuse, K3_EXIT_REFUSED)
K3_ERR_FUNCTION(k3_no_peer, K3_EXIT_NO_PEER)
K3_ERR_FUNCTION(k3_untrusted, K3_EXIT_UNTRUSTED)

const char *k3_read_strerror(int errnum)
{
    return errnum == EBADMSG ? "checksum is wrong: the file is damaged (see k3ctl verify)" : strerror(errnum);
}

void k3_bug(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    fputs("level=error event=bug text=\"", stderr);
    vfprintf(stderr, fmt, ap);
    fputs("\"\n", stderr);
    va_end(ap);
    abort();
}
