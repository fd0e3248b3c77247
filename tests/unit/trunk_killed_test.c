/* What a SIGKILL of the producer, or of the consumer, leaves: nothing that computes with a wrong
 * byte. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/trunk_fix.h"

static const struct k3_tf_spec spec = { .seed = 31,
                                        .n_files = 3,
                                        .n_matrices = 12,
                                        .n_residents = 9,
                                        .row_bytes_max = 60000,
                                        .matrix_bytes_max = 4000000,
                                        .piece_bytes = 1500000 };

struct notices {
    int n_gone, n_back;
};

static void count_notice(void *arg, const char *event, const char *text)
{
    struct notices *n = arg;

    (void)text;
    n->n_gone += strcmp(event, "trunkd_gone") == 0;
    n->n_back += strcmp(event, "trunkd_back") == 0;
}

/* A process of its own that keeps a trunkd alive and kills it n_kills times at random moments.  It
 * says each kill on the pipe and then waits until it is killed itself, the last daemon with it. */
static pid_t start_killer(const struct k3_tf *t, const struct k3_trunkd_opt *opt, int n_kills,
                          unsigned most_ms, int *news_fd)
{
    int p[2];
    pid_t pid;

    assert_int_equal(pipe2(p, O_CLOEXEC), 0);
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        uint64_t rng = 99;
        struct k3_trunkd_opt o = *opt;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        o.common.supervised = true; /* the last daemon leaves with this process */
        for (int i = 0; i < n_kills; i++) {
            pid_t daemon = k3_tf_start(t, &o);

            if (k3_tf_below(&rng, 4)) /* else perhaps while it starts */
                k3_tf_wait_ready(t, daemon);
            usleep((useconds_t)(1000 * k3_tf_below(&rng, most_ms)));
            k3_tf_kill(daemon);
            if (write(p[1], "k", 1) != 1)
                _exit(1);
            usleep((useconds_t)(1000 * k3_tf_below(&rng, 40)));
        }
        (void)k3_tf_start(t, &o);
        for (;;)
            pause();
    }
    close(p[1]);
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    *news_fd = p[0];
    return pid;
}

static void stop_killer(const struct k3_tf *t, pid_t pid, int news_fd)
{
    k3_tf_kill(pid);
    close(news_fd);
    for (int i = 0; i < 500 && k3_lock_alive(t->rundir, K3_TRUNKD_NAME); i++)
        usleep(20000); /* the daemon sees that its parent is gone */
    assert_false(k3_lock_alive(t->rundir, K3_TRUNKD_NAME));
}

static void killed_twenty_times(void **state)
{
    static const struct {
        unsigned share;
        const char *io;
        uint32_t ring_mb;
        unsigned nap_us;
    } with[] = {
        { 0, "uring", 2, 300 },
        { 128, "uring", 8, 100 },
        { 128, "pread", 4, 300 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(with) / sizeof(with[0]); i++) {
        struct k3_tf t;
        struct k3_trunkd_opt opt;
        struct k3_trunk_reader *r;
        struct k3_trunk_reader_counts counts;
        struct notices notices = { 0, 0 };
        struct k3_err err = K3_ERR_INIT;
        const float *resident;
        int news_fd, n_kills = 0, n_passes = 0, after = 2;
        pid_t pid;

        k3_tf_open(&t, &spec);
        opt = k3_tf_opt(&t);
        opt.io = with[i].io;
        opt.ring_mb = with[i].ring_mb;
        opt.io_block_bytes = 256 << 10;
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, with[i].ring_mb, with[i].share);
        pid = start_killer(&t, &opt, 20, 250, &news_fd);
        r = k3_tf_reader(&t, 1);
        k3_trunk_reader_set_notice(r, count_notice, &notices);
        assert_int_equal(k3_trunk_reader_resident(r, &resident, &err), 0);
        k3_tf_begin(r);
        while (n_kills < 20 || after-- > 0) { /* and two passes undisturbed */
            char c[32];
            ssize_t n = read(news_fd, c, sizeof(c));

            n_kills += n > 0 ? (int)n : 0;
            k3_tf_walk(&t, r, t.m->n_pieces, with[i].nap_us);
            n_passes++;
            if (k3_tf_below(&t.rng, 4) == 0)
                k3_tf_begin(r);
            else
                k3_tf_next(r);
        }
        k3_tf_check_resident(&t, resident);
        k3_trunk_reader_counts(r, &counts);
        print_message("share %u/256 %s: %d passes, %llu reattached, %d gone\n", with[i].share,
                      with[i].io, n_passes, (unsigned long long)counts.reattached, notices.n_gone);
        assert_in_range(counts.reattached, 5,
                        20); /* deaths that no wait saw are no business of the consumer */
        assert_int_equal(notices.n_back, counts.reattached);
        assert_int_equal(counts.ring_bytes + counts.pinned_bytes,
                         (uint64_t)n_passes * t.m->trunk_bytes);
        k3_trunk_reader_close(r);
        stop_killer(&t, pid, news_fd);
        k3_tf_close(&t);
    }
}

/* The successor must not touch the ring before the consumer's seek: it may be multiplying a block
 * that lies there. */
static void a_held_block_survives_take_over(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    const void *rows;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, 3, 0);
    assert_int_equal(k3_trunk_reader_rows(r, 3, 0, 1, &rows, &err), 0);
    k3_tf_kill(pid);
    pid = k3_tf_start(&t, &opt);
    assert_true(k3_tf_wait_ready(&t, pid));
    usleep(300000);
    k3_tf_check_rows(&t, 3, 0, 1, rows);
    assert_true(k3_tf_log_has(&t, "taken_over=1"));
    k3_trunk_reader_done(r);
    for (uint32_t i = 4; i < t.m->n_pieces; i++) {
        assert_int_equal(k3_trunk_reader_rows(r, i, 0, 1, &rows, &err), 0);
        k3_tf_check_rows(&t, i, 0, 1, rows);
        k3_trunk_reader_done(r);
    }
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

/* The bytes after the end of a file, in the page that holds it, are the only ones of the ring that
 * no (buffered) read writes.  So they tell whether the ring was renewed: not before the consumer's
 * seek, certainly after it. */
static void the_ring_is_renewed_at_the_first_seek(void **state)
{
    const struct k3_tf_spec one = { .seed = 77,
                                    .n_files = 1,
                                    .n_matrices = 3,
                                    .n_residents = 1,
                                    .row_bytes_max = 3000,
                                    .matrix_bytes_max = 90000,
                                    .piece_bytes = 40000 };
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_seg data = K3_SEG_INIT;
    const struct k3_layout *l;
    struct k3_err err = K3_ERR_INIT;
    uint64_t end;
    uint8_t *ring;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &one);
    opt = k3_tf_opt(&t);
    opt.direct = "off"; /* a direct read fills the file's last page with what is on the disk behind
                           its end */
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    l = k3_trunk_reader_layout(r);
    end = l->start[t.m->n_pieces - 1] +
          t.m->pieces[t.m->n_pieces - 1].len_bytes; /* of the file, too */
    assert_true(end % 4096 != 0);
    k3_tf_kill(pid);
    assert_int_equal(k3_seg_open(&data, t.instance, K3_TRUNK_DATA_SEG, true, &err), 0);
    ring = data.base + l->ring_off;
    memset(ring, 0xaa, l->ring_bytes); /* what a dead daemon's reads may do at any time */
    pid = k3_tf_start(&t, &opt);
    assert_true(k3_tf_wait_ready(&t, pid));
    usleep(200000);
    assert_int_equal(ring[0], 0xaa);
    assert_int_equal(ring[end], 0xaa);
    assert_int_equal(ring[l->ring_bytes - 1], 0xaa);
    k3_tf_next(r); /* finds the new one and seeks to the beginning of pass 1 */
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    end += 2 * l->pass_bytes;
    assert_int_equal(ring[end % l->ring_bytes], 0);
    assert_true(k3_tf_log_has(&t, "taken_over=1"));
    k3_seg_close(&data);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

/* Pinned pieces and resident tensors stay: the successor reads none of them again. */
static void pins_survive(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    const float *resident;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 256);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    assert_int_equal(k3_trunk_reader_resident(r, &resident, &err), 0);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    k3_tf_kill(pid);
    k3_tf_next(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0); /* with nobody there: all is in memory */
    pid = k3_tf_start(&t, &opt);
    assert_true(k3_tf_wait_ready(&t, pid));
    assert_int_equal(k3_tf_stat(&t, "pinned_loaded_bytes"), t.m->trunk_bytes);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    assert_int_equal(k3_tf_stat(&t, "read_bytes"), 0);
    k3_tf_check_resident(&t, resident);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static ino_t data_inode(const struct k3_tf *t)
{
    struct k3_seg data = K3_SEG_INIT;
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    assert_int_equal(k3_seg_open(&data, t->instance, K3_TRUNK_DATA_SEG, false, &err), 0);
    assert_int_equal(fstat(data.fd, &st), 0);
    k3_seg_close(&data);
    return st.st_ino;
}

static bool is_mapped(ino_t inode)
{
    unsigned long long at;
    char line[1024];
    bool mapped = false;
    FILE *f = fopen("/proc/self/maps", "r");

    while (f && fgets(line, sizeof(line), f))
        mapped |= sscanf(line, "%*s %*s %*s %*s %llu", &at) == 1 && at == inode;
    if (f)
        fclose(f);
    return mapped;
}

/* A normal stop removes the data segment: its successor's is another one, and the address of the
 * residents stays. */
static void a_new_data_segment_keeps_the_resident_address(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_err err = K3_ERR_INIT;
    const float *resident;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 128);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    assert_int_equal(k3_trunk_reader_resident(r, &resident, &err), 0);
    for (int i = 0; i < 3; i++) {
        ino_t old;

        k3_tf_begin(r);
        k3_tf_walk(&t, r, t.m->n_pieces / 2, 0);
        old = data_inode(&t);
        assert_true(is_mapped(old));
        assert_int_equal(k3_tf_stop(pid), 0);
        /* Other pins and another ring: the reader goes by what the new one says. */
        opt.ring_mb = i == 0 ? 4 : 2;
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, opt.ring_mb, i == 1 ? 256 : 60);
        pid = k3_tf_start(&t, &opt);
        k3_tf_begin(r);
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
        k3_tf_check_resident(&t, resident);
        assert_false(is_mapped(old)); /* nothing is held twice */
        k3_tf_next(r);
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
    }
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

/* The same sizes and pins, but of another model: not one byte of it is taken over. */
static void another_model_takes_nothing_over(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 256);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    k3_trunk_reader_close(r);
    k3_tf_kill(pid);
    t.spec.seed++; /* other bytes */
    t.m->digest[5] ^= 1;
    for (uint32_t i = 0; i < t.m->n_files; i++)
        k3_tf_write_file(&t, i);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 2);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    assert_false(k3_tf_log_has(&t, "taken_over=1"));
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

/* What a kill leaves must not confuse a start with other options. */
static void other_options_after_a_kill(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_tf_begin(r);
    for (unsigned i = 0; i < 4; i++) {
        k3_tf_walk(&t, r, 4 + i, 0);
        k3_tf_kill(pid);
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 64 * i);
        pid = k3_tf_start(&t, &opt);
        k3_tf_begin(r);
        k3_tf_walk(&t, r, t.m->n_pieces, 0);
        k3_tf_next(r);
    }
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void *stop_soon(void *arg)
{
    usleep(700000);
    atomic_store_explicit((_Atomic bool *)arg, true, memory_order_relaxed);
    return NULL;
}

static void stop_ends_a_wait_for_a_dead_daemon(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    struct k3_trunk_reader_counts counts;
    struct k3_err err = K3_ERR_INIT;
    struct notices notices = { 0, 0 };
    _Atomic bool stop = false;
    uint64_t since_ns;
    pthread_t thread;
    const void *rows;
    pid_t pid;
    int rc = 0;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_trunk_reader_set_notice(r, count_notice, &notices);
    k3_trunk_reader_set_stop(r, &stop);
    k3_tf_begin(r);
    k3_tf_kill(pid);
    pthread_create(&thread, NULL, stop_soon, &stop);
    since_ns = k3_now_ns();
    for (uint32_t i = 0; i < t.m->n_pieces && rc == 0; i++) {
        rc = k3_trunk_reader_rows(r, i, 0, 1, &rows, &err);
        if (rc == 0)
            k3_trunk_reader_done(r);
    }
    assert_int_equal(rc, -ECANCELED);
    assert_in_range(k3_now_ns() - since_ns, 300000000, 2000000000);
    pthread_join(thread, NULL);
    assert_int_equal(notices.n_gone, 1); /* one line, however long it lasts */
    k3_trunk_reader_counts(r, &counts);
    assert_true(counts.waits > 0 && counts.wait_ns > 200000000);
    /* Not spoilt: with a daemon it goes on. */
    atomic_store_explicit(&stop, false, memory_order_relaxed);
    pid = k3_tf_start(&t, &opt);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    assert_int_equal(notices.n_back, 1);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void consumer_killed(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r;
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    opt = k3_tf_opt(&t);
    opt.shared_drive = true;
    opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, 100);
    pid = k3_tf_start(&t, &opt);
    for (uint32_t generation = 1; generation < 10; generation++) {
        pid_t consumer;

        fflush(NULL);
        consumer = fork();
        assert_true(consumer >= 0);
        if (consumer == 0) {
            r = k3_tf_reader(&t, generation);
            k3_trunk_reader_set_blocked(
                r, true); /* dies with the hint set: its successor takes it back */
            k3_tf_begin(r);
            for (;;) {
                k3_tf_walk(&t, r, t.m->n_pieces, 200);
                k3_tf_next(r);
            }
        }
        usleep((useconds_t)(1000 * (20 + k3_tf_below(&t.rng, 200))));
        assert_int_equal(waitpid(consumer, NULL, WNOHANG), 0); /* it has found no wrong byte */
        k3_tf_kill(consumer);
    }
    r = k3_tf_reader(&t, 10);
    k3_tf_begin(r);
    k3_tf_walk(&t, r, t.m->n_pieces, 0);
    k3_trunk_reader_close(r);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

static void refusals(void **state)
{
    struct k3_tf t;
    struct k3_trunkd_opt opt;
    struct k3_trunk_reader *r = NULL;
    struct k3_err err = K3_ERR_INIT;
    struct k3_seg ctl = K3_SEG_INIT;
    struct k3_trunk_ctl *c;
    char hex[9];
    pid_t pid;

    (void)state;
    k3_tf_open(&t, &spec);
    /* nobody there */
    assert_int_equal(k3_trunk_reader_open(&r, t.instance, t.rundir, t.m, 1, 300000000, &err),
                     -ENOENT);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    assert_non_null(strstr(err.text, t.instance));
    opt = k3_tf_opt(&t);
    pid = k3_tf_start(&t, &opt);
    r = k3_tf_reader(&t, 1);
    k3_trunk_reader_close(r);
    /* another model */
    t.m->digest[0] ^= 0xff;
    assert_int_equal(k3_trunk_reader_open(&r, t.instance, t.rundir, t.m, 1, 300000000, &err),
                     -ESTALE);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "model digest"));
    snprintf(hex, sizeof(hex), "%02x%02x%02x%02x", t.m->digest[0], t.m->digest[1], t.m->digest[2],
             t.m->digest[3]);
    assert_non_null(strstr(err.text, hex));
    t.m->digest[0] ^= 0xff;
    snprintf(hex, sizeof(hex), "%02x%02x%02x%02x", t.m->digest[0], t.m->digest[1], t.m->digest[2],
             t.m->digest[3]);
    assert_non_null(strstr(err.text, hex));
    /* another layout */
    assert_int_equal(k3_seg_open(&ctl, t.instance, K3_TRUNK_SEG, true, &err), 0);
    c = (struct k3_trunk_ctl *)(void *)ctl.base;
    c->layout_digest[1] ^= 1;
    assert_int_equal(k3_trunk_reader_open(&r, t.instance, t.rundir, t.m, 1, 300000000, &err),
                     -ESTALE);
    assert_non_null(strstr(err.text, "layout digest"));
    c->layout_digest[1] ^= 1;
    c->version++;
    assert_int_equal(k3_trunk_reader_open(&r, t.instance, t.rundir, t.m, 1, 300000000, &err),
                     -EPROTO);
    assert_non_null(strstr(err.text, "version"));
    c->version--;
    c->n_pieces = (uint64_t)1 << 60;
    assert_int_equal(k3_trunk_reader_open(&r, t.instance, t.rundir, t.m, 1, 300000000, &err),
                     -EPROTO);
    k3_seg_close(&ctl);
    assert_int_equal(k3_tf_stop(pid), 0);
    k3_tf_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_twenty_times),
        cmocka_unit_test(a_held_block_survives_take_over),
        cmocka_unit_test(the_ring_is_renewed_at_the_first_seek),
        cmocka_unit_test(pins_survive),
        cmocka_unit_test(a_new_data_segment_keeps_the_resident_address),
        cmocka_unit_test(another_model_takes_nothing_over),
        cmocka_unit_test(other_options_after_a_kill),
        cmocka_unit_test(stop_ends_a_wait_for_a_dead_daemon),
        cmocka_unit_test(consumer_killed),
        cmocka_unit_test(refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
