/* k3_seg_renew on ranges that share their first and last huge page with neighbours: a killed reader's direct reads must not
 * reach what was renewed, and the neighbours keep their bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <liburing.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm/segment.h"

#define MIB ((size_t)1 << 20)
#define LEN (32 * MIB)
#define LO (MIB + 4096)            /* in the middle of the first huge page */
#define HI (LEN - MIB / 2 - 8192)  /* ... and of the last */

static char path[] = "/tmp/k3-t-renew-XXXXXX";

/* Submits direct reads over [LO, HI), both ends last in the queue, says so, and waits to be killed. */
static void reader(uint8_t *base, int fd, int say)
{
    static const size_t ends[] = { LO, HI - MIB };
    struct io_uring ring;
    size_t at[64], n = 0;

    if (io_uring_queue_init(64, &ring, 0) < 0)
        _exit(2);
    for (size_t o = LO + MIB; o + MIB <= HI - MIB; o += MIB)
        at[n++] = o;
    at[n++] = ends[0];
    at[n++] = ends[1];
    for (size_t i = 0; i < n; i++) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);

        io_uring_prep_read(sqe, fd, base + at[i], MIB, at[i] / MIB * MIB % (LEN / 2));
    }
    io_uring_submit(&ring);
    if (write(say, "x", 1) != 1)
        _exit(2);
    pause();
    _exit(0);
}

static void killed_reads_do_not_reach(void **state)
{
    const char *instance = "t-renew";
    struct k3_err err = K3_ERR_INIT;
    uint8_t *fill = malloc(MIB);
    int fd = mkstemp(path), direct;

    (void)state;
    assert_true(fd >= 0 && fill);
    memset(fill, 0x55, MIB);
    for (size_t i = 0; i < LEN / MIB; i++)
        assert_int_equal(write(fd, fill, MIB), MIB);
    assert_int_equal(fsync(fd), 0);
    direct = open(path, O_RDONLY | O_DIRECT);
    unlink(path);
    if (direct < 0)
        skip();
    for (int round = 0; round < 8; round++) {
        struct k3_seg s = K3_SEG_INIT;
        int pipe_fd[2];
        pid_t pid;
        char x;

        if (k3_seg_create(&s, instance, "renew", LEN, &err) < 0)
            fail_msg("%s", err.text);
        k3_seg_collapse(s.base, LEN);
        memset(s.base, 0xAA, LEN);
        assert_int_equal(pipe(pipe_fd), 0);
        pid = fork();
        if (pid == 0)
            reader(s.base, direct, pipe_fd[1]);
        assert_int_equal(read(pipe_fd[0], &x, 1), 1);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        if (k3_seg_renew(&s, LO, HI - LO, &err) < 0)
            fail_msg("%s", err.text);
        for (size_t o = LO; o < HI; o += 4096)
            if (s.base[o] != 0)
                fail_msg("round %d: byte %zu is %02x after renewal, must be 0", round, o, s.base[o]);
        memset(s.base + HI - MIB, 0xEE, MIB);
        memset(s.base + LO, 0xEE, MIB);
        nanosleep(&(struct timespec){ 0, 100000000 }, NULL);
        for (size_t o = 0; o < LEN; o++) {
            bool edge = (o >= LO && o < LO + MIB) || (o >= HI - MIB && o < HI);
            uint8_t want = edge ? 0xEE : o < LO || o >= HI ? 0xAA : 0;

            if (s.base[o] != want)
                fail_msg("round %d: byte %zu is %02x, must be %02x: a dead reader's read landed", round, o, s.base[o],
                         want);
        }
        close(pipe_fd[0]);
        close(pipe_fd[1]);
        k3_seg_close(&s);
    }
    close(direct);
    close(fd);
    free(fill);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_reads_do_not_reach),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
