/* The trunk stream from end to end: a daemon in a child process, the reader here, every byte
 * compared with the file. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/trunk_fix.h"

static const struct k3_tf_spec small = { .seed = 1,
                                         .n_files = 3,
                                         .n_matrices = 24,
                                         .n_residents = 9,
                                         .row_bytes_max = 30000,
                                         .matrix_bytes_max = 2000000,
                                         .piece_bytes = 300000 };
/* Pieces four times the smallest ring. */
static const struct k3_tf_spec big = { .seed = 2,
                                       .n_files = 2,
                                       .n_matrices = 3,
                                       .n_residents = 3,
                                       .row_bytes_max = 900000,
                                       .matrix_bytes_max = 16000000,
                                       .piece_bytes = K3_PIECE_BYTES };

static void passes_with(struct k3_tf *t, const struct k3_trunkd_opt *opt, int n_passes)
{
    pid_t pid = k3_tf_start(t, opt);
    struct k3_trunk_reader *r = k3_tf_reader(t, 1);
    struct k3_trunk_reader_counts counts;
    struct k3_err err = K3_ERR_INIT;
    const float *resident;

    assert_int_equal(k3_trunk_reader_resident(r, &resident, &err), 0);
    k3_tf_check_resident(t, resident);
    k3_tf_begin(r);
    for (int i = 0; i < n_passes; i++) {
        k3_tf_walk(t, r, t->m->n_pieces, 0);
        k3_tf_next(r);
    }
    k3_trunk_reader_counts(r, &counts);
    assert_int_equal(counts.ring_bytes + counts.pinned_bytes,
                     (uint64_t)n_passes * t->m->trunk_bytes);
    assert_int_equal(counts.seeks, 1);
    assert_int_equal(counts.reattached, 0);
    assert_int_equal(counts.pinned_bytes,
                     (uint64_t)n_passes * k3_trunk_reader_layout(r)->pinned_payload_bytes);
    assert_int_equal(k3_tf_stat(t, "errors"), 0);
    assert_int_equal(k3_tf_stat(t, "pinned_loaded_bytes"), k3_tf_stat(t, "pinned_bytes"));
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
}

static void pieces_larger_than_the_ring(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;

    (void)state;
    k3_tf_open(&t, &big);
    opt = k3_tf_opt(&t);
    passes_with(&t, &opt, 4);
    k3_tf_close(&t);
}

static void random_shapes_pins_and_backends(void **state)
{
    static const char *const io[] = { "uring", "pread" }, *const direct[] = { "auto", "off" };

    (void)state;
    for (uint64_t seed = 10; seed < 22; seed++) {
        struct k3_tf_spec spec = small;
        struct k3_trunkd_opt opt;
        struct k3_tf t;

        spec.seed = seed;
        if (seed % 3 == 0) { /* a toy: many passes lie in the ring at once */
            spec.row_bytes_max = 700;
            spec.matrix_bytes_max = 5000;
            spec.piece_bytes = 2000;
        }
        k3_tf_open(&t, &spec);
        opt = k3_tf_opt(&t);
        opt.ring_mb = seed % 2 ? 2 : 4;
        opt.io = io[seed / 2 % 2];
        opt.direct = direct[seed / 4 % 2];
        opt.io_block_bytes = seed % 5 == 0 ? K3_IO_BLOCK_MIN : 4 << 20;
        opt.io_depth = seed % 4 == 1 ? 1 : 8;
        for (unsigned share = 0; share <= 256; share += 128) {
            opt.trunk_bytes = k3_tf_trunk_bytes(&t, opt.ring_mb, share);
            passes_with(&t, &opt, 3);
        }
        k3_tf_close(&t);
    }
}

static void no_io_uring(void)
{
    const struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog prog = { sizeof(code) / sizeof(code[0]), (struct sock_filter *)code };

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) != 0)
        _exit(99);
}

/* A kernel or container without io_uring: pread, said in one line; asked for by name it is refused.
 */
static void falls_back_to_pread(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    int status;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &small);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start_after(&t, &opt, no_io_uring);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    assert_true(
        k3_tf_log_has(&t, "event=io_fallback io=pread reason=\"Function not implemented\""));
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    opt.io = "uring";
    pid = k3_tf_start_after(&t, &opt, no_io_uring);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == K3_EXIT_REFUSED);
    k3_tf_close(&t);
}

static void files_on_tmpfs(void **state)
{
    struct k3_tf_spec spec = small;
    struct k3_trunkd_opt opt;
    struct k3_tf t;

    (void)state;
    spec.base = "/dev/shm";
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    passes_with(&t, &opt, 2);
    k3_tf_close(&t);
}

/* All of it pinned: P is 0, no byte goes through the ring. */
static void all_pinned_reads_once(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    unsigned n_slow = 0;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &small);
    opt = k3_tf_opt(&t);
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 256);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    assert_int_equal(k3_trunk_reader_layout(r)->pass_bytes, 0);
    k3_tf_begin(r);
    for (int i = 0; i < 5; i++) {
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
        k3_tf_next(r);
    }
    assert_in_range(k3_tf_stat(&t, "read_bytes"), t.m->trunk_bytes,
                    t.m->trunk_bytes + 8192 * t.m->n_pieces);
    assert_int_equal(k3_tf_stat(&t, "ring_produced_bytes"), 0);
    /* The bells ring both ways: without, most seeks would take a tick of one side or the other. */
    for (int i = 0; i < 40; i++) {
        uint64_t since_ns = k3_now_ns();

        k3_tf_begin(r);
        n_slow += k3_now_ns() - since_ns > 40000000;
    }
    assert_in_range(n_slow, 0, 19);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void ring_wraps_and_runs_ahead(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    pid_t pid;
    uint64_t pass_bytes;

    (void)state;
    k3_tf_open(&t, &big);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    pass_bytes = k3_trunk_reader_layout(r)->pass_bytes;
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    k3_tf_next(r);
    usleep(300000); /* it fills the ring with the next pass and stops */
    assert_in_range(k3_tf_stat(&t, "ring_produced_bytes"), pass_bytes + 1, pass_bytes + (2 << 20));
    assert_int_equal(k3_tf_stat(&t, "ring_wraps"), k3_tf_stat(&t, "ring_produced_bytes") >> 21);
    assert_int_equal(k3_tf_stat(&t, "in_flight"), 0);
    assert_int_equal(k3_tf_stat(&t, "passes"), 1);
    assert_true(k3_tf_stat(&t, "ring_full_waits") > 0);
    assert_true(k3_tf_stat(&t, "ring_full_wait_ns") > 0);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void seeks_in_the_middle(void **state)
{
    struct k3_trunk_reader_counts before, after;

    (void)state;
    for (unsigned share = 0; share <= 256; share += 128) {
        struct k3_tf t;
        struct k3_trunkd_opt opt;
        struct k3_trunk_reader *r;
        pid_t pid;

        k3_tf_open(&t, &small);
        opt = k3_tf_opt(&t);
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, share);
        pid = k3_tf_start(&t, &opt);
        r = k3_tf_reader(&t, 7);
        k3_tf_begin(r);
        for (int i = 0; i < 25; i++) {
            k3_tf_walk(&t, r, k3_tf_below(&t.rng, t.m->n_pieces + 1), 0);
            if (k3_tf_below(&t.rng, 3) == 0)
                k3_tf_begin(r); /* forced */
            else
                k3_tf_next(r);
        }
        /* After a complete pass the next one costs no seek, after half a pass of streamed pieces it
         * does. */
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
        k3_trunk_reader_counts(r, &before);
        k3_tf_next(r);
        k3_tf_walk(&t, r, t.m->n_pieces / 2, 0);
        k3_trunk_reader_counts(r, &after);
        assert_int_equal(after.seeks, before.seeks);
        k3_tf_next(r);
        k3_trunk_reader_counts(r, &after);
        assert_int_equal(after.seeks, before.seeks + (share < 256));
        k3_trunk_reader_close(r);
        /* A successor of this consumer begins anew. */
        r = k3_tf_reader(&t, 8);
        k3_tf_begin(r);
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
        k3_trunk_reader_close(r);
        assert_int_equal(k3_tf_stop(pid), 0);
        k3_tf_close(&t);
    }
}

/* Blocks may be left out as long as the order holds: more than a ring of them. */
static void leaves_pieces_out(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &small);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    for (int i = 0; i < 4; i++) {
        for (uint32_t piece = (uint32_t)k3_tf_below(&t.rng, 9); piece < t.m->n_pieces;
             piece += 1 + (uint32_t)k3_tf_below(&t.rng, t.m->n_pieces / 3)) {
            const void *rows;
            uint32_t row = (uint32_t)k3_tf_below(&t.rng, t.m->pieces[piece].n_rows);

            if (k3_trunk_reader_rows(r, piece, row, 1, &rows, &err) < 0)
                fail_msg("%s", err.text);
            k3_tf_check_rows(&t, piece, row, 1, rows);
            k3_trunk_reader_done(r);
        }
        k3_tf_next(r);
    }
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void misuse_is_refused(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    const void *rows;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &small);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    assert_int_equal(k3_trunk_reader_rows(r, (uint32_t)t.m->n_pieces, 0, 1, &rows, &err), -EINVAL);
    assert_int_equal(k3_trunk_reader_rows(r, 0, 0, t.m->pieces[0].n_rows + 1, &rows, &err),
                     -EINVAL);
    assert_int_equal(k3_trunk_reader_rows(r, 0, UINT32_MAX, 2, &rows, &err), -EINVAL);
    for (uint32_t i = 1; i <= K3_TRUNK_HELD; i++) {
        while (i > 1 && k3_trunk_reader_ready(r, i, 0) == 0) /* else it would not be waited for */
            nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
        assert_int_equal(k3_trunk_reader_rows(r, i, 0, 1, &rows, &err), 0);
    }
    assert_int_equal(k3_trunk_reader_ready(r, K3_TRUNK_HELD + 1, 0), 0);
    assert_int_equal(k3_trunk_reader_rows(r, K3_TRUNK_HELD + 1, 0, 1, &rows, &err), -EINVAL);
    assert_non_null(strstr(err.text, "not done"));
    for (uint32_t i = 0; i < K3_TRUNK_HELD; i++)
        k3_trunk_reader_done(r);
    assert_int_equal(k3_trunk_reader_rows(r, 0, 0, 1, &rows, &err), -EINVAL); /* backwards */
    assert_non_null(strstr(err.text, "schedule order"));
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

/* The first pass whose rows fail: the error; then the file is whole again and a seek tries again.
 */
static void fails_then_recovers(struct k3_tf *t, const struct k3_trunkd_opt *opt)
{
    pid_t pid = k3_tf_start(t, opt);
    struct k3_trunk_reader *r = k3_tf_reader(t, 1);
    struct k3_err err = K3_ERR_INIT;
    uint32_t file = t->m->matrices[t->m->pieces[t->m->n_pieces - 1].matrix].file;
    const char *path = t->m->files[file].path;
    int rc = 0;

    k3_tf_begin(r);
    k3_tf_walk(t, r, t->m->n_pieces, 0);
    k3_tf_next(r);
    assert_int_equal(truncate(path, (off_t)t->m->files[file].len_bytes / 2), 0);
    for (int i = 0; i < 3 && rc == 0; i++) {
        for (uint32_t piece = 0; piece < t->m->n_pieces && rc == 0; piece++) {
            const void *rows;

            rc = k3_trunk_reader_rows(r, piece, 0, 1, &rows, &err);
            if (rc == 0) {
                k3_tf_check_rows(t, piece, 0, 1, rows);
                k3_trunk_reader_done(r);
            }
        }
        if (rc == 0)
            k3_tf_next(r);
    }
    if (opt->trunk_bytes < k3_tf_trunk_bytes(t, 2, 256)) {
        assert_int_equal(rc, -EIO);
        assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
        assert_non_null(strstr(err.text, path));
        assert_true(k3_tf_stat(t, "errors") > 0);
    } else {
        assert_int_equal(rc, 0); /* it was in memory already */
    }
    k3_tf_write_file(t, file);
    k3_tf_begin(r);
    k3_tf_walk(t, r, t->m->n_pieces, 0);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
}

static void a_truncated_file_is_an_error_at_a_position(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;

    (void)state;
    k3_tf_open(&t, &small);
    opt = k3_tf_opt(&t);
    for (unsigned share = 0; share <= 256; share += 128) {
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, share);
        opt.io = share ? "uring" : "pread";
        fails_then_recovers(&t, &opt);
    }
    k3_tf_close(&t);
}

static void a_pinned_piece_that_cannot_be_read(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    uint32_t last, file;
    const void *rows;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &small);
    last = (uint32_t)t.m->n_pieces - 1;
    file = t.m->matrices[t.m->pieces[last].matrix].file;
    opt = k3_tf_opt(&t);
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 256);
    opt.io_depth = 1;
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    assert_int_equal(truncate(t.m->files[file].path, 1),
                     0); /* most of it is still to be loaded, or fails on a seek */
    k3_tf_begin(r);
    if (k3_trunk_reader_rows(r, last, 0, 1, &rows, &err) < 0) {
        assert_int_equal(err.code, -EIO);
        assert_int_equal(err.exit_status, K3_EXIT_UNTRUSTED);
        assert_non_null(strstr(err.text, "pinned piece"));
        assert_non_null(strstr(err.text, t.m->files[file].path));
    } else {
        print_message("the pin was faster than the truncation\n");
    }
    k3_tf_write_file(&t, file);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    assert_int_equal(k3_tf_stat(&t, "pinned_loaded_bytes"), t.m->trunk_bytes);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_larger_than_the_ring),
        cmocka_unit_test(random_shapes_pins_and_backends),
        cmocka_unit_test(falls_back_to_pread),
        cmocka_unit_test(files_on_tmpfs),
        cmocka_unit_test(all_pinned_reads_once),
        cmocka_unit_test(ring_wraps_and_runs_ahead),
        cmocka_unit_test(seeks_in_the_middle),
        cmocka_unit_test(leaves_pieces_out),
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(a_truncated_file_is_an_error_at_a_position),
        cmocka_unit_test(a_pinned_piece_that_cannot_be_read),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
