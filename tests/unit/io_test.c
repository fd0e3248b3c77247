/* Both queues of reads: everything that was submitted comes back once, with the file's bytes or an errno. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"

#define N 24u
#define BLOCK 16384u
#define FILE_BYTES (N * BLOCK - 100u) /* the last one is short */
#define TICK_NS 100000000ull

static const char *const ways[] = { "uring", "pread" };

struct rig {
    struct k3_io *io;
    int fd, efd;
    uint8_t *buf;
    struct k3_io_req req[N];
};

static uint8_t byte_at(uint64_t off)
{
    return (uint8_t)(off * 31 + off / 253);
}

/* False where the kernel has no io_uring. */
static bool rig_open(struct rig *g, const char *how, unsigned depth)
{
    char path[] = "/tmp/k3-t-io-XXXXXX", why[64];
    struct k3_err err = K3_ERR_INIT;
    uint8_t *all = malloc(FILE_BYTES);
    int rc;

    *g = (struct rig){ .efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) };
    rc = k3_io_open(&g->io, how, depth, g->efd, why, &err);
    if (rc < 0) {
        assert_string_equal(how, "uring");
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        free(all);
        close(g->efd);
        return false;
    }
    assert_string_equal(why, "");
    assert_string_equal(g->io->ops->name, strcmp(how, "uring") ? "pread" : "io_uring");
    for (uint64_t i = 0; i < FILE_BYTES; i++)
        all[i] = byte_at(i);
    g->fd = mkstemp(path);
    assert_true(g->fd >= 0);
    assert_int_equal(write(g->fd, all, FILE_BYTES), FILE_BYTES);
    unlink(path);
    free(all);
    g->buf = calloc(N, BLOCK);
    return true;
}

static void rig_close(struct rig *g)
{
    k3_io_close(g->io);
    close(g->fd);
    close(g->efd);
    free(g->buf);
}

static void submit(struct rig *g, unsigned i, int fd)
{
    g->req[i] = (struct k3_io_req){ .fd = fd, .len_bytes = BLOCK, .buf = g->buf + i * BLOCK,
                                    .off_bytes = (uint64_t)i * BLOCK, .res = -1234 };
    g->io->ops->submit(g->io, &g->req[i]);
}

static unsigned check_list(struct rig *g, struct k3_io_req *done)
{
    unsigned n = 0;

    for (; done; done = done->next, n++) {
        size_t i = (size_t)(done - g->req);
        uint32_t want = i + 1 < N ? BLOCK : BLOCK - 100;

        assert_true(i < N);
        assert_int_equal(done->res, want);
        for (uint32_t k = 0; k < want; k++)
            if (done->buf[k] != byte_at(i * BLOCK + k))
                fail_msg("block %zu differs at %u", i, k);
        done->res = -1; /* a second time would be seen */
    }
    return n;
}

static void all_come_back(void **state)
{
    (void)state;
    for (size_t w = 0; w < 2; w++)
        for (unsigned depth = 1; depth <= N; depth += 7) {
            unsigned next = 0, back = 0;
            struct rig g;

            if (!rig_open(&g, ways[w], depth))
                continue;
            while (back < N) {
                struct k3_io_req *done;

                while (next < N && next - back < depth)
                    submit(&g, next++, g.fd);
                assert_int_equal(g.io->ops->wait(g.io, TICK_NS, &done), 0);
                back += check_list(&g, done);
            }
            rig_close(&g);
        }
}

static void the_eventfd_tells(void **state)
{
    (void)state;
    for (size_t w = 0; w < 2; w++) {
        struct k3_io_req *done;
        unsigned back = 0;
        eventfd_t count;
        struct rig g;

        if (!rig_open(&g, ways[w], N))
            continue;
        g.io->ops->reap(g.io, &done);
        assert_null(done);
        for (unsigned i = 0; i < N; i++)
            submit(&g, i, g.fd);
        g.io->ops->flush(g.io);
        while (back < N) {
            struct pollfd p = { g.efd, POLLIN, 0 };

            assert_int_equal(poll(&p, 1, 10000), 1);
            assert_int_equal(eventfd_read(g.efd, &count), 0);
            g.io->ops->reap(g.io, &done);
            back += check_list(&g, done);
        }
        rig_close(&g);
    }
}

static void a_failed_read_is_an_errno(void **state)
{
    (void)state;
    for (size_t w = 0; w < 2; w++) {
        struct k3_io_req *done = NULL;
        int dir = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        struct rig g;

        if (rig_open(&g, ways[w], 2)) {
            submit(&g, 0, dir);
            while (!done)
                assert_int_equal(g.io->ops->wait(g.io, TICK_NS, &done), 0);
            assert_int_equal(done->res, -EISDIR);
            assert_null(done->next);
            /* Nothing there: the wait ends, with nothing. */
            assert_int_equal(g.io->ops->wait(g.io, 1000, &done), 0);
            assert_null(done);
            rig_close(&g);
        }
        close(dir);
    }
}

/* Into registered memory, across the edge of it, beside it; and after it was registered anew. */
static void registered_memory(void **state)
{
    struct k3_io_req *done;
    struct rig g;

    (void)state;
    for (size_t w = 0; w < 2; w++)
        for (int round = 0; round < 3; round++) {
            struct k3_io_range range[2];
            unsigned back = 0;
            uint64_t bytes;

            if (!rig_open(&g, ways[w], N))
                continue;
            range[0] = (struct k3_io_range){ g.buf, 5 * BLOCK + 4096 };
            range[1] = (struct k3_io_range){ g.buf + 10 * BLOCK, 3 * BLOCK };
            bytes = k3_io_register(g.io, range, 2);
            if (strcmp(ways[w], "pread") == 0)
                assert_int_equal(bytes, 0);
            else
                assert_true(bytes == 0 || bytes == 8 * BLOCK + 4096);
            if (round == 1) /* with reads queued and under way */
                for (unsigned i = 0; i < N / 2; i++) {
                    submit(&g, i, g.fd);
                    if (i == N / 4)
                        g.io->ops->flush(g.io);
                }
            if (round > 0)
                assert_true(k3_io_register(g.io, &range[1], 1) <= 3 * BLOCK);
            for (unsigned i = round == 1 ? N / 2 : 0; i < N; i++)
                submit(&g, i, g.fd);
            while (back < N) {
                assert_int_equal(g.io->ops->wait(g.io, TICK_NS, &done), 0);
                back += check_list(&g, done);
            }
            assert_int_equal(k3_io_register(g.io, range, 0), 0);
            submit(&g, 0, g.fd);
            do
                assert_int_equal(g.io->ops->wait(g.io, TICK_NS, &done), 0);
            while (!done);
            assert_int_equal(check_list(&g, done), 1);
            rig_close(&g);
        }
}

/* Where the kernel lets us, as root or within the limit: a privileged run must show it. */
static void registering_works_for_root(void **state)
{
    struct k3_io_range range;
    struct rig g;

    (void)state;
    if (geteuid() != 0 || !rig_open(&g, "uring", 4))
        skip();
    range = (struct k3_io_range){ g.buf, N * BLOCK };
    assert_int_equal(k3_io_register(g.io, &range, 1), N * BLOCK);
    rig_close(&g);
}

/* Beyond RLIMIT_MEMLOCK: nothing is registered, and reads go on. */
static void no_memlock_is_no_error(void **state)
{
    struct k3_io_req *done = NULL;
    struct k3_io_range range;
    pid_t pid = fork();
    int status;

    (void)state;
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rlimit small = { 256 << 10, 256 << 10 }; /* enough for the queue itself */
        uint64_t bytes;
        struct rig g;

        if (setrlimit(RLIMIT_MEMLOCK, &small) != 0 || (geteuid() == 0 && setuid(65534) != 0) ||
            !rig_open(&g, "uring", 4))
            _exit(77);
        range = (struct k3_io_range){ g.buf, N * BLOCK };
        bytes = k3_io_register(g.io, &range, 1);
        submit(&g, 0, g.fd);
        while (!done)
            if (g.io->ops->wait(g.io, TICK_NS, &done) < 0)
                _exit(2);
        _exit(bytes == 0 && done->res == (int)BLOCK ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* A close with reads queued and under way: nothing lands after it (pread). */
static void closing_waits_for_what_is_under_way(void **state)
{
    struct rig g;

    (void)state;
    assert_true(rig_open(&g, "pread", N));
    for (unsigned i = 0; i < N; i++)
        submit(&g, i, g.fd);
    k3_io_close(g.io);
    g.io = NULL;
    memset(g.buf, 0, (size_t)N * BLOCK);
    usleep(1000);
    for (size_t i = 0; i < (size_t)N * BLOCK; i++)
        assert_int_equal(g.buf[i], 0);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_come_back),
        cmocka_unit_test(the_eventfd_tells),
        cmocka_unit_test(a_failed_read_is_an_errno),
        cmocka_unit_test(registered_memory),
        cmocka_unit_test(registering_works_for_root),
        cmocka_unit_test(no_memlock_is_no_error),
        cmocka_unit_test(closing_waits_for_what_is_under_way),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
