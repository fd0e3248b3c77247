/* tests/probe/expf_all.c: exp, sigmoid and tanh of the three kernel sets compared bit for bit on
 * all 2^32 inputs.  Run by hand (a few minutes); the suite compares a sample
 * (tests/unit/expf_test.c). expf_all [THREADS]     0 all equal, 1 a difference (the first one of
 * each kind is named), 77 this CPU has no AVX2 The plain C file is compiled into this program once
 * more, with the fma instruction instead of libm's fmaf: the same source and, fma being exactly
 * rounded, the same results in a third of the time. */
#pragma GCC push_options
#pragma GCC target("fma")
#define k3_expf probe_expf
#define k3_sigmoidf probe_sigmoidf
#define k3_tanhf probe_tanhf
#define k3_kernels_c probe_kernels_c
#include "k3-computed/kernels_c.c"
#undef k3_kernels_c
#pragma GCC pop_options

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCK 4096
#define MAX_THREADS 64

struct part {
    pthread_t thread;
    uint64_t first, end; /* bit patterns */
    int n_sets;
    const struct k3_kernels *set[3];
    uint64_t n_different;
};

static void compare(struct part *p, const char *name, const struct k3_kernels *k, const float *x,
                    const float *want, const float *got)
{
    if (memcmp(want, got, BLOCK * sizeof *got) == 0)
        return;
    for (size_t i = 0; i < BLOCK; i++) {
        if (k3_f32_to_bits(want[i]) == k3_f32_to_bits(got[i]))
            continue;
        if (p->n_different++ == 0)
            printf("%s of %08x: c %08x, %s %08x\n", name, k3_f32_to_bits(x[i]),
                   k3_f32_to_bits(want[i]), k->name, k3_f32_to_bits(got[i]));
    }
}

static void *run(void *arg)
{
    struct part *p = arg;
    float x[BLOCK], want[3][BLOCK], got[BLOCK];
    for (uint64_t bits = p->first; bits < p->end; bits += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++)
            x[i] = k3_bits_to_f32((uint32_t)(bits + i));
        p->set[0]->exp(want[0], x, BLOCK);
        p->set[0]->sigmoid(want[1], x, BLOCK);
        p->set[0]->tanh(want[2], x, BLOCK);
        for (int s = 1; s < p->n_sets; s++) {
            const struct k3_kernels *k = p->set[s];
            k->exp(got, x, BLOCK);
            compare(p, "exp", k, x, want[0], got);
            k->sigmoid(got, x, BLOCK);
            compare(p, "sigmoid", k, x, want[1], got);
            k->tanh(got, x, BLOCK);
            compare(p, "tanh", k, x, want[2], got);
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static struct part part[MAX_THREADS];
    int n = argc > 1 ? atoi(argv[1]) : 1;
    uint64_t n_different = 0, n_blocks = ((uint64_t)1 << 32) / BLOCK;
    const struct k3_kernels *avx2 = k3_kernels_get("avx2"), *avx512 = k3_kernels_get("avx512");
    if (argc > 2 || n < 1 || n > MAX_THREADS) {
        fprintf(stderr, "usage: expf_all [THREADS], 1 to %d\n", MAX_THREADS);
        return 2;
    }
    if (!avx2) {
        printf("skipped: this CPU has no AVX2 and FMA\n");
        return 77;
    }
    for (int t = 0; t < n; t++) {
        struct part *p = &part[t];
        p->first = n_blocks * (uint64_t)t / (uint64_t)n * BLOCK;
        p->end = n_blocks * ((uint64_t)t + 1) / (uint64_t)n * BLOCK;
        p->n_sets = avx512 ? 3 : 2;
        p->set[0] = &probe_kernels_c;
        p->set[1] = avx2;
        p->set[2] = avx512;
        if (pthread_create(&p->thread, NULL, run, p) != 0) {
            fprintf(stderr, "thread %d of %d cannot be started\n", t, n);
            return 1;
        }
    }
    for (int t = 0; t < n; t++) {
        pthread_join(part[t].thread, NULL);
        n_different += part[t].n_different;
    }
    printf("exp, sigmoid, tanh on 2^32 inputs, sets c avx2%s: %llu differences\n",
           avx512 ? " avx512" : "", (unsigned long long)n_different);
    return n_different ? 1 : 0;
}
