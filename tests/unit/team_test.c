/* tests/unit/team_test.c: k3-computed/team.c. */
#include "k3-computed/team.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#define N_MAX 10007

struct job {
    _Atomic uint32_t done[N_MAX];
    _Atomic uint32_t by[64];
    uint32_t size;
};

static void mark(void *arg, size_t i, uint32_t worker)
{
    struct job *j = arg;

    if (worker < j->size)
        atomic_fetch_add(&j->by[worker], 1);
    atomic_fetch_add(&j->done[i], 1);
}

static void every_index_once(void **state)
{
    static struct job j;
    static const size_t sizes[] = { 0, 1, 2, 3, 7, 64, 1000, N_MAX };

    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct k3_team *t = NULL;

        assert_int_equal(k3_team_new(&t, threads, NULL), 0);
        assert_int_equal(k3_team_size(t), threads);
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
            for (size_t chunk = 0; chunk <= 300; chunk = chunk * 2 + 1) {
                uint32_t total = 0;

                memset(&j, 0, sizeof(j));
                j.size = threads;
                k3_team_run(t, sizes[s], chunk, mark, &j);
                for (size_t i = 0; i < N_MAX; i++)
                    assert_int_equal(atomic_load(&j.done[i]), i < sizes[s]);
                for (uint32_t w = 0; w < threads; w++)
                    total += atomic_load(&j.by[w]);
                assert_int_equal(total, sizes[s]); /* no worker number beyond the team */
            }
        k3_team_free(t);
    }
}

static void add_plain(void *arg, size_t i, uint32_t worker)
{
    uint64_t *sum = arg;

    (void)worker;
    sum[i]++; /* plain memory: what one job wrote, the next must see, whoever runs it */
}

static void many_jobs_in_a_row(void **state)
{
    struct k3_team *t = NULL;
    uint64_t sum[5] = { 0 };

    (void)state;
    assert_int_equal(k3_team_new(&t, 3, NULL), 0);
    for (int n = 0; n < 20000; n++)
        k3_team_run(t, 5, 1, add_plain, sum);
    for (int i = 0; i < 5; i++)
        assert_int_equal(sum[i], 20000);
    k3_team_free(t);
}

/* A job that grows: tasks of round n + 1 are added while those of round n run; a round's sums are read when it is done. */
struct growing {
    _Atomic uint32_t left;
    uint64_t sum[7];
};

static void add_and_leave(void *arg, size_t i, uint32_t worker)
{
    struct growing *g = arg;

    add_plain(g->sum, i % 7, worker);
    atomic_fetch_sub(&g->left, 1);
}

static bool round_done(void *arg)
{
    return atomic_load(&((struct growing *)arg)->left) == 0;
}

static void a_job_grows(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 4; threads++) {
        struct k3_team *t = NULL;
        struct growing g = { 0 };

        assert_int_equal(k3_team_new(&t, threads, NULL), 0);
        for (uint64_t job = 0; job < 500; job++) {
            k3_team_begin(t, add_and_leave, &g);
            for (int round = 0; round < 4; round++) {
                atomic_store(&g.left, 7);
                k3_team_add(t, 7);
                if (round % 2)
                    assert_true(k3_team_help(t) || threads > 1);
                while (threads == 1 && k3_team_help(t))
                    ;
                k3_team_wait(t, round_done, &g);
                for (int i = 0; i < 7; i++)
                    assert_int_equal(g.sum[i], job * 5 + (uint64_t)round + 1);
            }
            atomic_store(&g.left, 7);
            k3_team_add(t, 7);
            k3_team_end(t);
            assert_true(round_done(&g));
        }
        k3_team_free(t);
    }
}

static void nothing(void *arg, size_t i, uint32_t worker)
{
    (void)arg;
    (void)i;
    (void)worker;
}

/* A team that ends at once, or just after a job, while its threads are anywhere between waking and
 * sleeping. */
static void ends_at_any_moment(void **state)
{
    (void)state;
    for (int n = 0; n < 600; n++) {
        struct k3_team *t = NULL;

        assert_int_equal(k3_team_new(&t, 4, NULL), 0);
        for (int jobs = n % 3; jobs > 0; jobs--)
            k3_team_run(t, 8, 1, nothing, NULL);
        k3_team_free(t);
    }
}

static void too_many_threads_are_refused(void **state)
{
    struct k3_team *t = NULL;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_true(k3_team_new(&t, 100000, &err) < 0);
    assert_null(t);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
}

static double cpu_seconds(void)
{
    struct rusage r;

    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static void slow_first(void *arg, size_t i, uint32_t worker)
{
    (void)arg;
    (void)worker;
    if (i == 0)
        usleep(200000);
}

static void waiting_costs_no_cpu(void **state)
{
    struct k3_team *t = NULL;
    double before;

    (void)state;
    assert_int_equal(k3_team_new(&t, 4, NULL), 0);
    k3_team_run(t, 4, 1, slow_first, NULL);
    before = cpu_seconds();
    usleep(200000);                         /* the team waits for a job */
    k3_team_run(t, 4, 1, slow_first, NULL); /* three wait for the fourth */
    assert_true(cpu_seconds() - before < 0.1);
    k3_team_free(t);
}

struct placed {
    const struct k3_cpus *c;
    _Atomic uint32_t right, wrong;
};

static void on_core(void *arg, size_t i, uint32_t worker)
{
    struct placed *p = arg;
    cpu_set_t set;

    (void)i;
    usleep(1000); /* so that every worker gets an index */
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1 && CPU_ISSET(p->c->cpu[worker], &set))
        atomic_fetch_add(&p->right, 1);
    else
        atomic_fetch_add(&p->wrong, 1);
}

/* One core per worker, each CPU a core of its own; the caller's mask comes back. */
static void bound_where_every_core_has_one_thread(void **state)
{
    static const uint32_t runs = 40;
    struct k3_cpus c, other;
    cpu_set_t before, after;
    struct k3_team *t = NULL;
    struct placed p = { .c = &c };

    (void)state;
    k3_cpus_read(&c, "/nonexistent", NULL);
    assert_int_equal(c.n_cores, c.n_cpus);
    assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
    if (c.n_cores > 32)
        skip();
    assert_int_equal(k3_team_new(&t, c.n_cores, NULL), 0);
    assert_false(k3_team_pinned(t));
    assert_true(k3_team_pin(t, &c));
    assert_true(k3_team_pinned(t));
    assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
    assert_true(CPU_EQUAL(&before, &after)); /* not before its first job: what is started until then inherits nothing */
    k3_team_run(t, runs * c.n_cores, 1, on_core, &p);
    assert_int_equal(atomic_load(&p.wrong), 0);
    assert_int_equal(atomic_load(&p.right), runs * c.n_cores);
    k3_team_free(t);
    assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
    assert_true(CPU_EQUAL(&before, &after));

    /* Fewer threads than cores, more, or a quota: the kernel places them. */
    other = c;
    other.n_cores++;
    assert_int_equal(k3_team_new(&t, c.n_cores, NULL), 0);
    assert_false(k3_team_pin(t, &other));
    other.n_cores = c.n_cores;
    other.n_quota = c.n_cores - (c.n_cores > 1);
    assert_int_equal(k3_team_pin(t, &other), c.n_cores == 1);
    k3_team_free(t);
    assert_int_equal(k3_team_new(&t, c.n_cores + 1, NULL), 0);
    assert_false(k3_team_pin(t, &c));
    k3_team_run(t, 8, 1, nothing, NULL);
    assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
    assert_true(CPU_EQUAL(&before, &after));
    k3_team_free(t);
}

/* A bound team spins between jobs; everything that holds of a team holds of it. */
static void a_bound_team_works_and_sleeps(void **state)
{
    struct k3_cpus c;
    struct k3_team *t = NULL;
    uint64_t sum[64] = { 0 };
    double before, used = 1;

    (void)state;
    k3_cpus_read(&c, "/nonexistent", NULL);
    if (c.n_cores > 32)
        skip();
    for (int n = 0; n < 300; n++) {
        assert_int_equal(k3_team_new(&t, c.n_cores, NULL), 0);
        assert_true(k3_team_pin(t, &c));
        for (int jobs = n % 3; jobs > 0; jobs--)
            k3_team_run(t, 8, 1, nothing, NULL);
        k3_team_free(t);
    }
    assert_int_equal(k3_team_new(&t, c.n_cores, NULL), 0);
    assert_true(k3_team_pin(t, &c));
    for (int n = 0; n < 20000; n++) {
        if (n % 1000 == 0)
            usleep(500); /* long enough to fall asleep */
        k3_team_run(t, 64, 1, add_plain, sum);
    }
    for (int i = 0; i < 64; i++)
        assert_int_equal(sum[i], 20000);
    /* What waiting for a drive between jobs looks like.  A team that spins takes a second or more of each second; one that
     * sleeps may take some by bad luck, on a busy machine, but not three times. */
    for (int try = 0; try < 3 && used >= 0.1; try++) {
        before = cpu_seconds();
        for (int n = 0; n < 100; n++) {
            k3_team_run(t, 8, 1, nothing, NULL);
            usleep(10000);
        }
        used = cpu_seconds() - before;
    }
    assert_true(used < 0.1);
    k3_team_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_once),     cmocka_unit_test(many_jobs_in_a_row),
        cmocka_unit_test(a_job_grows),
        cmocka_unit_test(ends_at_any_moment),   cmocka_unit_test(too_many_threads_are_refused),
        cmocka_unit_test(waiting_costs_no_cpu), cmocka_unit_test(bound_where_every_core_has_one_thread),
        cmocka_unit_test(a_bound_team_works_and_sleeps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
