/* tests/unit/bell_test.c: shm/bell.c between two processes, with sleeps at its lettered points. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static bool sleepy;
static void point(void)
{
    static unsigned n;

    /* The kernel's timer slack makes this 50 microseconds or more: far longer than the window of
     * any race. */
    if (sleepy && ++n % 3 == 0)
        nanosleep(&(struct timespec){ 0, 1000 }, NULL);
}
#define K3_BELL_POINT(letter) point()
#include "shm/bell.c"

#define TICK_NS 300000000u

struct side { /* one cache line each, as in the contracts */
    _Alignas(64) _Atomic uint64_t count; /* how far this side is */
    _Atomic uint64_t at_ns;              /* when it moved last */
    _Atomic uint32_t bell, sleepers;     /* sleepers: this side on the other's bell */
};
struct pipe2 { struct side producer, consumer; _Atomic uint32_t lost; };

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Waits until other->count >= want.  False when a wake-up was lost: the news was there for most of
 * a tick that was slept through. */
static bool wait_for(struct side *self, struct side *other, uint64_t want, bool swapped)
{
    for (;;) {
        uint32_t seen = 0;
        int rc;

        if (!swapped)
            seen = k3_bell_news(&other->bell);
        point();
        if (atomic_load_explicit(&other->count, memory_order_acquire) >= want)
            return true;
        point();
        if (swapped)
            seen = k3_bell_news(&other->bell);
        rc = k3_bell_wait(&other->bell, &self->sleepers, seen, TICK_NS);
        if (rc == -ETIMEDOUT && atomic_load_explicit(&other->count, memory_order_acquire) >= want &&
            now_ns() - atomic_load(&other->at_ns) > TICK_NS / 2)
            return false;
    }
}

static void move_to(struct side *self, struct side *other, uint64_t count, bool stamp)
{
    if (stamp)
        atomic_store(&self->at_ns, now_ns());
    atomic_store_explicit(&self->count, count, memory_order_release);
    k3_bell_ring(&self->bell, &other->sleepers);
}

/* The producer is at most `window` ahead; the consumer waits for each.  Returns the number of lost
 * wake-ups seen. */
static uint32_t run(uint64_t n, uint64_t window, bool swapped)
{
    struct pipe2 *p =
        mmap(NULL, sizeof(*p), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint32_t lost;
    pid_t child;
    int status;

    assert_true(p != MAP_FAILED);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        for (uint64_t i = 1; i <= n && !atomic_load(&p->lost); i++) {
            if (!wait_for(&p->consumer, &p->producer, i, swapped))
                atomic_fetch_add(&p->lost, 1);
            move_to(&p->consumer, &p->producer, i, sleepy || i % 64 == 0);
        }
        _exit(0);
    }
    for (uint64_t i = 1; i <= n && !atomic_load(&p->lost); i++) {
        if (i > window && !wait_for(&p->producer, &p->consumer, i - window, swapped))
            atomic_fetch_add(&p->lost, 1);
        move_to(&p->producer, &p->consumer, i, sleepy || i % 64 == 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    lost = atomic_load(&p->lost);
    if (!lost) {
        assert_int_equal(atomic_load(&p->producer.count), n);
        assert_int_equal(atomic_load(&p->consumer.count), n);
        assert_int_equal(atomic_load(&p->producer.sleepers), 0);
        assert_int_equal(atomic_load(&p->consumer.sleepers), 0);
    }
    munmap(p, sizeof(*p));
    return lost;
}

/* A million from each side. */
static void two_million_rings(void **state)
{
    (void)state;
    sleepy = false;
    assert_int_equal(run(200000, 64, false), 0);
    assert_int_equal(run(800000, 4096, false), 0);
}

static void ping_pong(void **state)
{
    (void)state;
    sleepy = false;
    assert_int_equal(run(20000, 1, false), 0);
}

static void sleeps_between_the_steps(void **state)
{
    (void)state;
    sleepy = true;
    assert_int_equal(run(4000, 1, false), 0);
    assert_int_equal(run(4000, 2, false), 0);
}

/* The same run notices when the waiter reads the news after it has looked at the condition. */
static void swapped_steps_are_noticed(void **state)
{
    (void)state;
    sleepy = true;
    assert_true(run(20000, 1, true) > 0);
}

static void waits_only_so_long(void **state)
{
    _Atomic uint32_t bell = 7, sleepers = 0;
    uint64_t begin = now_ns();

    (void)state;
    sleepy = false;
    assert_int_equal(k3_bell_wait(&bell, &sleepers, 7, 30000000), -ETIMEDOUT);
    assert_in_range(now_ns() - begin, 30000000, 2000000000);
    begin = now_ns();
    assert_int_equal(k3_bell_wait(&bell, &sleepers, 6, 5000000000u), 0); /* news: does not sleep */
    assert_true(now_ns() - begin < 2000000000u);
    assert_int_equal(atomic_load(&sleepers), 0);
}

/* A waiter that was killed leaves its count; the other's rings still arrive. */
static void dead_sleeper(void **state)
{
    struct pipe2 *p =
        mmap(NULL, sizeof(*p), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child;
    int status;

    (void)state;
    sleepy = false;
    assert_true(p != MAP_FAILED);
    child = fork();
    if (child == 0) {
        k3_bell_wait(&p->producer.bell, &p->consumer.sleepers, 0, 60000000000u);
        _exit(0);
    }
    while (atomic_load(&p->consumer.sleepers) == 0)
        nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    assert_int_equal(atomic_load(&p->consumer.sleepers), 1);
    child = fork();
    if (child == 0)
        _exit(wait_for(&p->consumer, &p->producer, 1, false) ? 0 : 1);
    nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
    move_to(&p->producer, &p->consumer, 1, true);
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    munmap(p, sizeof(*p));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waits_only_so_long),       cmocka_unit_test(two_million_rings),
        cmocka_unit_test(ping_pong),                cmocka_unit_test(sleeps_between_the_steps),
        cmocka_unit_test(swapped_steps_are_noticed), cmocka_unit_test(dead_sleeper),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
