/* k3-computed/team.c: the threads of a pass. */
#include "k3-computed/team.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define LINE 64
#define THREADS_MAX 4096u

/* One job at a time.  A worker joins a job while it is open; the caller closes it when no index is left to hand out and waits
 * for those that have joined, never for one that is still waking up.
 *
 *   field        writer    order
 *   fn .. chunk  caller    plain; before the job opens (O); workers read after joining (J)
 *   next         all       relaxed: it hands out indices and orders nothing; 0 before O
 *   word         all       number of the job | OPEN | workers in it.  O (open), C (close): caller.  J (join), L (leave): workers
 *   sleepers     workers   workers that sleep on word or are about to (S); either S sees O, or O sees S and wakes
 *   bell         workers   counter of news: rung by the one that leaves a closed job last; the caller sleeps on it
 *
 * The caller changes the fields only when the job is closed and empty, and nobody joins a closed job.  The number of the job
 * wraps; a worker that slept through exactly that many may miss one, which the others then do. */
#define ACTIVE 0xffffu
#define OPEN 0x10000u
#define ONE_JOB 0x20000u

struct k3_team {
    uint32_t n_threads;
    uint32_t n_started; /* workers that run: worker number 1 .. n_started */
    struct k3_team_member *members;
    cpu_set_t *own;     /* pinned: the core of worker 0, until it is set */
    cpu_set_t *before;  /* the caller's mask before it was pinned */
    size_t set_bytes;
    bool pinned, caller_pinned; /* the caller's */
    _Atomic bool spins;         /* before the first job at the latest; relaxed, since it changes no result */
    k3_team_fn *fn;
    void *arg;
    size_t n, chunk;
    _Alignas(LINE) _Atomic uint32_t word; /* workers sleep on it */
    _Atomic bool stop;
    _Alignas(LINE) _Atomic uint32_t sleepers;
    _Alignas(LINE) _Atomic uint32_t bell;
    _Alignas(LINE) _Atomic size_t next;
};

struct k3_team_member {
    struct k3_team *team;
    pthread_t thread;
    uint32_t worker;
};

static void wait_on(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static void work(struct k3_team *t, uint32_t worker)
{
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&t->next, t->chunk, memory_order_relaxed);
        size_t end = i + t->chunk;

        if (i >= t->n)
            return;
        if (end > t->n)
            end = t->n;
        for (; i < end; i++)
            t->fn(t->arg, i, worker);
    }
}

/* Looks for about K3_TEAM_SPIN_NS whether the word changes: the next job of a pass mostly follows at once, and to be woken
 * takes longer than that.  True: it did. */
static bool spin(const _Atomic uint32_t *word, uint32_t value)
{
    uint64_t until_ns = k3_now_ns() + K3_TEAM_SPIN_NS;

    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load_explicit(word, memory_order_relaxed) != value)
                return true;
            __builtin_ia32_pause();
        }
    } while (k3_now_ns() < until_ns);
    return false;
}

/* Joins the job that is open, unless it is the one numbered `last`; sleeps until there is one.
 * false: the team ends. */
static bool join_job(struct k3_team *t, uint32_t last, uint32_t *number)
{
    uint32_t word = atomic_load_explicit(&t->word, memory_order_acquire); /* stop is seen with it */
    bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);

    for (;;) {
        if (atomic_load_explicit(&t->stop, memory_order_relaxed))
            return false;
        if (!(word & OPEN) || (word & ~(ACTIVE | OPEN)) == last) {
            if (may_spin) {
                may_spin = spin(&t->word, word); /* once without news it sleeps */
            } else {
                atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst); /* S */
                if (atomic_load_explicit(&t->word, memory_order_seq_cst) == word)
                    wait_on(&t->word, word);
                atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
            }
            word = atomic_load_explicit(&t->word, memory_order_acquire);
        } else if (atomic_compare_exchange_weak_explicit(&t->word, &word, word + 1,
                                                         memory_order_acquire, /* J */
                                                         memory_order_acquire)) {
            *number = word & ~(ACTIVE | OPEN);
            return true;
        }
    }
}

static void *member_main(void *arg)
{
    struct k3_team_member *m = arg;
    struct k3_team *t = m->team;
    uint32_t number = 0; /* no job has it at the start: the first is ONE_JOB */

    while (join_job(t, number, &number)) {
        uint32_t before;

        work(t, m->worker);
        before = atomic_fetch_sub_explicit(&t->word, 1, memory_order_release); /* L */
        if (!(before & OPEN) && (before & ACTIVE) == 1) {
            atomic_fetch_add_explicit(&t->bell, 1, memory_order_release);
            wake(&t->bell, 1);
        }
    }
    return NULL;
}

int k3_team_new(struct k3_team **out, uint32_t n_threads, struct k3_err *err)
{
    struct k3_team *t;

    if (n_threads == 0) {
        struct k3_cpus c;
        int rc;

        k3_cpus_read(&c, "", NULL);
        rc = k3_team_new(out, c.n_threads, err);
        if (rc == 0)
            (void)k3_team_pin(*out, &c);
        return rc;
    }
    if (n_threads > THREADS_MAX)
        return k3_refuse(err, -EINVAL, "team of %u threads: at most %u", n_threads, THREADS_MAX);
    t = aligned_alloc(LINE, sizeof(*t)); /* sizeof is a multiple of its alignment */
    if (!t)
        return k3_fail(err, -ENOMEM, "team of %u threads: no memory", n_threads);
    memset(t, 0, sizeof(*t));
    t->n_threads = n_threads;
    t->members = calloc(n_threads, sizeof(*t->members));
    if (!t->members) {
        k3_team_free(t);
        return k3_fail(err, -ENOMEM, "team of %u threads: no memory", n_threads);
    }
    for (uint32_t w = 1; w < n_threads; w++) {
        struct k3_team_member *m = &t->members[w];
        int rc;

        m->team = t;
        m->worker = w;
        rc = pthread_create(&m->thread, NULL, member_main, m);
        if (rc != 0) {
            k3_team_free(t);
            return k3_fail(err, -rc,
                           "thread %u of %u could not be started: %s; give fewer --threads", w + 1,
                           n_threads, strerror(rc));
        }
        t->n_started = w;
    }
    *out = t;
    return 0;
}

void k3_team_free(struct k3_team *t)
{
    if (!t)
        return;
    if (t->n_started) {
        atomic_store_explicit(&t->stop, true, memory_order_relaxed);
        /* A new word, so that nobody falls asleep on the old one. */
        atomic_fetch_add_explicit(&t->word, ONE_JOB, memory_order_seq_cst);
        wake(&t->word, INT_MAX);
        for (uint32_t w = 1; w <= t->n_started; w++)
            pthread_join(t->members[w].thread, NULL);
    }
    if (t->caller_pinned)
        sched_setaffinity(0, t->set_bytes, t->before);
    CPU_FREE(t->own);
    CPU_FREE(t->before);
    free(t->members);
    free(t);
}

/* ---- pinning ---- */

static void set_of_core(cpu_set_t *set, size_t set_bytes, const struct k3_cpus *c, uint32_t core)
{
    CPU_ZERO_S(set_bytes, set);
    for (uint32_t i = c->core[core]; i < c->core[core + 1]; i++)
        CPU_SET_S(c->cpu[i], set_bytes, set);
}

bool k3_team_pin(struct k3_team *t, const struct k3_cpus *c)
{
    if (t->pinned || t->n_threads != c->n_cores || c->n_quota < c->n_cores)
        return t->pinned;
    t->set_bytes = CPU_ALLOC_SIZE(K3_CPUS_MAX);
    t->own = CPU_ALLOC(K3_CPUS_MAX);
    t->before = CPU_ALLOC(K3_CPUS_MAX);
    if (!t->own || !t->before || sched_getaffinity(0, t->set_bytes, t->before) < 0)
        return false; /* it runs as well as the kernel places it */
    for (uint32_t w = t->n_started; ; w--) {
        set_of_core(t->own, t->set_bytes, c, w);
        if (w == 0) /* the caller's, by its first job */
            break;
        if (pthread_setaffinity_np(t->members[w].thread, t->set_bytes, t->own) != 0) {
            for (; w <= t->n_started; w++)
                pthread_setaffinity_np(t->members[w].thread, t->set_bytes, t->before);
            return false;
        }
    }
    t->pinned = true;
    atomic_store_explicit(&t->spins, t->n_threads > 1, memory_order_relaxed);
    return true;
}

bool k3_team_pinned(const struct k3_team *t)
{
    return t->pinned;
}

uint32_t k3_team_size(const struct k3_team *t)
{
    return t->n_threads;
}

void k3_team_run(struct k3_team *t, size_t n, size_t chunk, k3_team_fn *fn, void *arg)
{
    size_t helpers;
    uint32_t word;

    if (t->pinned && !t->caller_pinned)
        t->caller_pinned = sched_setaffinity(0, t->set_bytes, t->own) == 0;
    if (chunk == 0)
        chunk = 1;
    if (t->n_threads == 1 || n <= chunk) { /* waking the others would cost more than it gives */
        for (size_t i = 0; i < n; i++)
            fn(arg, i, 0);
        return;
    }
    t->fn = fn;
    t->arg = arg;
    t->n = n;
    t->chunk = chunk;
    atomic_store_explicit(&t->next, 0, memory_order_relaxed);
    word = atomic_load_explicit(&t->word, memory_order_relaxed); /* closed and empty: ours alone */
    atomic_store_explicit(&t->word, (word + ONE_JOB) | OPEN, memory_order_seq_cst); /* O */
    helpers = (n - 1) / chunk; /* chunks besides our first */
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst) != 0)
        wake(&t->word, helpers < t->n_started ? (int)helpers : (int)t->n_started);
    work(t, 0);
    atomic_fetch_and_explicit(&t->word, ~OPEN, memory_order_relaxed); /* C */
    for (bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);; may_spin = false) {
        uint32_t seen = atomic_load_explicit(&t->bell, memory_order_acquire);

        if ((atomic_load_explicit(&t->word, memory_order_acquire) & ACTIVE) == 0) /* pairs with L */
            return;
        if (!may_spin || !spin(&t->bell, seen))
            wait_on(&t->bell, seen);
    }
}
