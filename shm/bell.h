/* shm/bell.h: a futex doorbell between two processes.  The two words lie on different cache lines, so that every
 * line keeps a single writer: `seq` on the ringer's line, `sleepers` on the waiter's.
 *
 *   R  ringer:  seq += 1 (seq_cst), after its news is published; then reads sleepers (seq_cst), wakes if not 0
 *   S  waiter:  sleepers += 1 (seq_cst), then re-reads seq (seq_cst): either S sees R, or R sees S
 * A waiter reads seq, then looks at its condition, then sleeps on the value read (style.md section 4).
 * A dead sleeper leaves sleepers too high: costs a wake, never loses one. */
#ifndef K3_SHM_BELL_H
#define K3_SHM_BELL_H

#include <stdatomic.h>
#include <stdint.h>

/* Step 1: the news counter, to be read before the condition is looked at. */
static inline uint32_t k3_bell_news(_Atomic uint32_t *seq)
{
    return atomic_load_explicit(seq, memory_order_acquire);
}
/* Step 3: sleeps until seq != seen, at most timeout_ns (> 0).  0, or -ETIMEDOUT.  EINTR and EAGAIN count as 0. */
int k3_bell_wait(_Atomic uint32_t *seq, _Atomic uint32_t *sleepers, uint32_t seen, uint64_t timeout_ns);
void k3_bell_ring(_Atomic uint32_t *seq, _Atomic uint32_t *sleepers);

#endif
