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
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define LINE 64
#define THREADS_MAX 4096u

/* One job at a time.  A worker joins a job while it is open and stays until there is nothing left to take and nothing will be
 * added; the caller closes it then and waits for those that have joined, never for one that is still waking up.
 *
 *   field         writer    order
 *   fn arg chunk  caller    plain; before the job opens (O); workers read after joining (J)
 *   n             caller    indices below it may be taken; stored with release, so that a taker sees what was written before
 *   next          all       relaxed: the first index not taken
 *   complete      caller    nothing will be added; a taker that misses what was added just before leaves it to the caller
 *   word          all       number of the job | OPEN | workers in it.  O (open), C (close): caller.  J (join), L (leave): workers
 *   news          caller    changes after each O, add, complete and stop; workers sleep on it
 *   sleepers      workers   those that sleep on news or are about to (S); either S sees the news, or the news see S and wake
 *   bell          workers   rung by the one that leaves a closed job last, and after a task while the caller waits for one
 *   caller_waits  caller    either a task's end is seen by the caller, or the end sees this and rings
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
    _Atomic bool spins;         /* relaxed: a worker may start before it is known, and it changes no result */
    k3_team_fn *fn;
    void *arg;
    size_t chunk;
    _Alignas(LINE) _Atomic uint32_t word;
    _Atomic uint32_t news;
    _Atomic bool stop, complete, caller_waits;
    _Atomic size_t n;
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

/* Looks for about K3_TEAM_SPIN_NS whether the word changes: the next job of a pass mostly follows at once, and to be woken
 * takes as long.  True: it changed. */
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

static void sleep_on_news(struct k3_team *t, uint32_t seen, bool *may_spin)
{
    if (*may_spin && spin(&t->news, seen))
        return;
    *may_spin = false; /* once without news it sleeps */
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst); /* S */
    if (atomic_load_explicit(&t->news, memory_order_seq_cst) == seen)
        wait_on(&t->news, seen);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
}

static void tell(struct k3_team *t, size_t n_wanted)
{
    atomic_fetch_add_explicit(&t->news, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst) != 0)
        wake(&t->news, n_wanted < t->n_started ? (int)n_wanted : (int)t->n_started);
}

static void ring(struct k3_team *t)
{
    atomic_fetch_add_explicit(&t->bell, 1, memory_order_release);
    wake(&t->bell, 1);
}

/* Takes a chunk and runs it; false: there is none. */
static bool work(struct k3_team *t, uint32_t worker)
{
    size_t i = atomic_load_explicit(&t->next, memory_order_relaxed), n, end;

    do {
        n = atomic_load_explicit(&t->n, memory_order_acquire);
        if (i >= n)
            return false;
        end = n - i < t->chunk ? n : i + t->chunk;
    } while (!atomic_compare_exchange_weak_explicit(&t->next, &i, end, memory_order_relaxed, memory_order_relaxed));
    for (; i < end; i++)
        t->fn(t->arg, i, worker);
    return true;
}

/* Joins the job that is open, unless it is the one numbered `last`; sleeps until there is one.
 * false: the team ends. */
static bool join_job(struct k3_team *t, uint32_t last, uint32_t *number)
{
    bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);

    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->news, memory_order_acquire); /* word and stop are seen with it */
        uint32_t word = atomic_load_explicit(&t->word, memory_order_acquire);

        if (atomic_load_explicit(&t->stop, memory_order_relaxed))
            return false;
        if (!(word & OPEN) || (word & ~(ACTIVE | OPEN)) == last) {
            sleep_on_news(t, seen, &may_spin);
        } else if (atomic_compare_exchange_weak_explicit(&t->word, &word, word + 1,
                                                         memory_order_acquire, /* J */
                                                         memory_order_acquire)) {
            *number = word & ~(ACTIVE | OPEN);
            return true;
        }
    }
}

static void work_until_complete(struct k3_team *t, uint32_t worker)
{
    bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);

    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->news, memory_order_acquire);

        if (work(t, worker)) {
            may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);
            if (atomic_load_explicit(&t->caller_waits, memory_order_seq_cst))
                ring(t);
        } else if (atomic_load_explicit(&t->complete, memory_order_acquire)) {
            return;
        } else {
            sleep_on_news(t, seen, &may_spin);
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

        work_until_complete(t, m->worker);
        before = atomic_fetch_sub_explicit(&t->word, 1, memory_order_release); /* L */
        if (!(before & OPEN) && (before & ACTIVE) == 1)
            ring(t);
    }
    return NULL;
}

/* What a product keeps on the stack (kernels_mul.c) is most of it. */
#define STACK_BYTES ((size_t)1 << 20)

/* The caller works, too; its stack may grow as far as the limit of the process says. */
static int caller_stack(struct k3_err *err)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= STACK_BYTES)
        return 0;
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < STACK_BYTES)
        return k3_refuse(err, -EINVAL, "the stack may have %llu KiB, %zu are needed: give a larger limit (ulimit -Hs)",
                         (unsigned long long)limit.rlim_max >> 10, STACK_BYTES >> 10);
    limit.rlim_cur = STACK_BYTES;
    return setrlimit(RLIMIT_STACK, &limit) == 0 ? 0 : k3_fail(err, -errno, "the stack limit cannot be raised: %s", strerror(errno));
}

static int start(struct k3_team_member *m)
{
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);

    if (rc != 0)
        return rc;
    rc = pthread_attr_setstacksize(&attr, STACK_BYTES);
    if (rc == 0)
        rc = pthread_create(&m->thread, &attr, member_main, m);
    pthread_attr_destroy(&attr);
    return rc;
}

int k3_team_new(struct k3_team **out, uint32_t n_threads, struct k3_err *err)
{
    struct k3_team *t;
    int rc = caller_stack(err);

    if (rc < 0)
        return rc;
    if (n_threads == 0)
        n_threads = k3_threads_default();
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

        m->team = t;
        m->worker = w;
        rc = start(m);
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
        tell(t, t->n_started);
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
    struct k3_cpus here;

    if (!c) {
        k3_cpus_read(&here, "", NULL);
        c = &here;
    }
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

static void open_job(struct k3_team *t, size_t n, size_t chunk, bool complete, k3_team_fn *fn, void *arg)
{
    uint32_t word = atomic_load_explicit(&t->word, memory_order_relaxed); /* closed and empty: ours alone */

    t->fn = fn;
    t->arg = arg;
    t->chunk = chunk;
    atomic_store_explicit(&t->n, n, memory_order_relaxed);
    atomic_store_explicit(&t->next, 0, memory_order_relaxed);
    atomic_store_explicit(&t->complete, complete, memory_order_relaxed);
    atomic_store_explicit(&t->word, (word + ONE_JOB) | OPEN, memory_order_release); /* O */
}

/* The bell is seen before what is waited for. */
static void wait_for_bell(struct k3_team *t, uint32_t seen, bool *may_spin)
{
    if (!*may_spin || !spin(&t->bell, seen))
        wait_on(&t->bell, seen);
    *may_spin = false;
}

/* Nothing is left to take. */
static void close_job(struct k3_team *t)
{
    bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);

    atomic_fetch_and_explicit(&t->word, ~OPEN, memory_order_relaxed); /* C */
    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->bell, memory_order_acquire);

        if ((atomic_load_explicit(&t->word, memory_order_acquire) & ACTIVE) == 0) /* pairs with L */
            return;
        wait_for_bell(t, seen, &may_spin);
    }
}

static void pin_caller(struct k3_team *t)
{
    if (t->pinned && !t->caller_pinned)
        t->caller_pinned = sched_setaffinity(0, t->set_bytes, t->own) == 0;
}

void k3_team_run(struct k3_team *t, size_t n, size_t chunk, k3_team_fn *fn, void *arg)
{
    pin_caller(t);
    if (chunk == 0)
        chunk = 1;
    if (t->n_threads == 1 || n <= chunk) { /* waking the others would cost more than it gives */
        for (size_t i = 0; i < n; i++)
            fn(arg, i, 0);
        return;
    }
    open_job(t, n, chunk, true, fn, arg);
    tell(t, (n - 1) / chunk); /* chunks besides our first */
    while (work(t, 0))
        ;
    close_job(t);
}

void k3_team_begin(struct k3_team *t, k3_team_fn *fn, void *arg)
{
    pin_caller(t);
    open_job(t, 0, 1, false, fn, arg);
}

void k3_team_add(struct k3_team *t, size_t n)
{
    size_t before = atomic_load_explicit(&t->n, memory_order_relaxed);

    atomic_store_explicit(&t->n, before + n, memory_order_release);
    tell(t, n);
}

bool k3_team_help(struct k3_team *t)
{
    return work(t, 0);
}

void k3_team_wait(struct k3_team *t, bool (*done)(void *arg), void *arg)
{
    bool may_spin = atomic_load_explicit(&t->spins, memory_order_relaxed);

    if (done(arg))
        return;
    atomic_store_explicit(&t->caller_waits, true, memory_order_seq_cst);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->bell, memory_order_acquire);

        if (done(arg))
            break;
        wait_for_bell(t, seen, &may_spin);
    }
    atomic_store_explicit(&t->caller_waits, false, memory_order_relaxed);
}

void k3_team_end(struct k3_team *t)
{
    while (work(t, 0))
        ;
    atomic_store_explicit(&t->complete, true, memory_order_release);
    tell(t, t->n_started);
    close_job(t);
}
