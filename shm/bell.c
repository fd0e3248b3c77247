#include "shm/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A test build may widen the lettered points (style.md 9); the program has nothing there. */
#ifndef K3_BELL_POINT
#define K3_BELL_POINT(letter) ((void)0)
#endif

int k3_bell_wait(_Atomic uint32_t *seq, _Atomic uint32_t *sleepers, uint32_t seen,
                 uint64_t timeout_ns)
{
    struct timespec ts = { (time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u) };
    int rc = 0;

    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);    /* S: either S sees R, */
    K3_BELL_POINT('S');                                              /*    or R sees S      */
    if (atomic_load_explicit(seq, memory_order_seq_cst) == seen) {
        /* FUTEX_WAIT without PRIVATE: the word is shared between processes.  The kernel compares
         * once more. */
        if (syscall(SYS_futex, (uint32_t *)(void *)seq, FUTEX_WAIT, seen, &ts, NULL, 0) != 0)
            rc = -errno;
    }
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
    return rc == -ETIMEDOUT ? rc : 0;
}

void k3_bell_ring(_Atomic uint32_t *seq, _Atomic uint32_t *sleepers)
{
    atomic_fetch_add_explicit(seq, 1, memory_order_seq_cst); /* R */
    K3_BELL_POINT('R');
    if (atomic_load_explicit(sleepers, memory_order_seq_cst) != 0)
        syscall(SYS_futex, (uint32_t *)(void *)seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
