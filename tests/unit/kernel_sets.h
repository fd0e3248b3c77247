/* tests/unit/kernel_sets.h: the three kernel sets side by side, and inputs for them. */
#ifndef K3_TESTS_KERNEL_SETS_H
#define K3_TESTS_KERNEL_SETS_H

#include <stddef.h>
#include <stdint.h>

#include "k3-computed/kernels.h"

/* The sets that this CPU runs, the plain C one first; returns how many. */
size_t k3_test_sets(const struct k3_kernels *out[3]);

/* A small counter generator with a state of the caller's: the same numbers in every run. */
uint32_t k3_test_random(uint64_t *state);

enum k3_test_kind {
    K3_TEST_PLAIN, /* about -1..1 */
    K3_TEST_TINY, /* subnormal and next to it, so that sums and products are, too */
    K3_TEST_SPECIAL, /* every bit pattern class: zeros of both signs, subnormals, huge, inf, NaN
                        among plain ones */
};
void k3_test_fill(float *x, size_t n, enum k3_test_kind kind, uint64_t *state);
/* The same for n elements of a dtype; F16 and BF16 patterns are cut from the fp32 ones or drawn
 * from all bits. */
void k3_test_fill_dtype(void *w, size_t n, enum k3_dtype dtype, enum k3_test_kind kind,
                        uint64_t *state);

/* Index of the first element where a and b are neither bit-equal nor both NaN; n when there is
 * none. */
size_t k3_test_first_difference(const float *a, const float *b, size_t n);
/* Index of the first element with |got - want| > abs + rel * |want| (or NaN); n when there is none.
 */
size_t k3_test_first_far(const float *got, const double *want, size_t n, double abs, double rel);

/* For cmocka programs: fail, naming the set, the place and the two values. */
#define K3_ASSERT_SAME(a, b, n, set, ...)                                                          \
    do {                                                                                           \
        const float *a_ = (a), *b_ = (b);                                                          \
        size_t n_ = (n), at_ = k3_test_first_difference(a_, b_, n_);                               \
        if (at_ < n_) {                                                                            \
            print_error(__VA_ARGS__);                                                              \
            fail_msg(": element %zu of %zu is %a in set c, %a in set %s", at_, n_, a_[at_],        \
                     b_[at_], (set));                                                              \
        }                                                                                          \
    } while (0)
#define K3_ASSERT_NEAR(got, want, n, abs, rel, set, ...)                                           \
    do {                                                                                           \
        const float *got_ = (got);                                                                 \
        const double *want_ = (want);                                                              \
        size_t n_ = (n), at_ = k3_test_first_far(got_, want_, n_, (abs), (rel));                   \
        if (at_ < n_) {                                                                            \
            print_error(__VA_ARGS__);                                                              \
            fail_msg(": element %zu of %zu is %.9g in set %s, want %.9g", at_, n_, got_[at_],      \
                     (set), want_[at_]);                                                           \
        }                                                                                          \
    } while (0)

#endif
