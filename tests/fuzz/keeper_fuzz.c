/* Messages to k3-keeper: any bytes, with and without a descriptor, in any order.  No descriptor may be lost. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "k3-keeper/keeper.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct k3_keep k = { .settled_ns = 0 };
    struct k3_seg seg = K3_SEG_INIT;
    int s[2], first = dup(0), last;

    close(first);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, s) != 0 ||
        k3_seg_create_from(&seg, "t-fuzz", "trunkdata", 8192, K3_MEM_MEMFD, -1, NULL) != 0)
        abort();
    /* One byte says how long the message is and whether a descriptor comes with it; magic and version are given to most,
     * or nothing would get past them. */
    while (len > 1) {
        size_t n = *data & 0x7f;
        bool with_fd = *data & 0x80;
        struct k3_keeper_msg m = { .magic = K3_KEEPER_MAGIC, .version = K3_KEEPER_VERSION };
        int fd, out;

        data++;
        len--;
        n = n > len ? len : n;
        if (n == sizeof(m) - 8)
            memcpy(&m.op, data, n);
        if (n == sizeof(m) - 8 ? k3_keeper_send(s[0], &m, with_fd ? seg.fd : -1) < 0
                               : n > 0 && send(s[0], data, n, MSG_NOSIGNAL) < 0)
            abort();
        data += n;
        len -= n;
        if (k3_keeper_recv(s[1], &m, &fd) != 0)
            continue;
        out = k3_keep_answer(&k, &m, fd, 1);
        if (out >= 0 && (m.status != 0 || m.len_bytes == 0 || m.len_bytes > 8192 || fcntl(out, F_GETFD) < 0))
            abort();
        if (m.status > 0)
            abort();
    }
    k3_keep_close(&k);
    k3_seg_close(&seg);
    close(s[0]);
    close(s[1]);
    last = dup(0);
    if (last != first)
        abort();
    close(last);
    return 0;
}
