/* --verify of k3-trunkd: right pieces pass whatever the shapes, a flipped byte stops the pass at its piece and is named,
 * the daemon lives, and no piece goes unsummed because a seek begins in its midst. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/crc32c.h"
#include "model/sums.h"
#include "tests/unit/trunk_fix.h"

static const struct k3_tf_spec small = { .seed = 31,
                                         .n_files = 3,
                                         .n_matrices = 24,
                                         .n_residents = 9,
                                         .row_bytes_max = 30000,
                                         .matrix_bytes_max = 2000000,
                                         .piece_bytes = 300000 };
/* Pieces larger than the smallest ring. */
static const struct k3_tf_spec big = { .seed = 2,
                                       .n_files = 2,
                                       .n_matrices = 3,
                                       .n_residents = 3,
                                       .row_bytes_max = 200000,
                                       .matrix_bytes_max = 16000000,
                                       .piece_bytes = K3_PIECE_BYTES };

static void put(FILE *f, uint32_t *crc, const char *text)
{
    *crc = k3_crc32c(*crc, text, strlen(text));
    assert_true(fputs(text, f) >= 0);
}

/* k3.sums of what the files ought to hold. */
static void write_sums(struct k3_tf *t)
{
    char path[128], name[K3_SUMS_LINE_BYTES], line[K3_SUMS_LINE_BYTES + 16];
    uint32_t crc = 0;
    FILE *f;

    t->m->cfg.n_layers = t->m->cfg.n_layers_model = t->m->cfg.first_dense = 1;
    snprintf(path, sizeof(path), "%s/" K3_SUMS_NAME, t->dir);
    f = fopen(path, "w");
    assert_non_null(f);
    k3_sums_head(t->m, line, sizeof(line));
    put(f, &crc, line);
    for (size_t i = 0; i < k3_sums_n_items(t->m); i++) {
        struct k3_sum_item item;
        uint8_t *bytes;

        assert_int_equal(k3_sums_item(t->m, i, &item), 0);
        bytes = malloc(item.len_bytes);
        k3_tf_bytes(t, item.part[0].file, item.part[0].off_bytes, bytes, item.len_bytes);
        k3_sums_name(t->m, i, name);
        snprintf(line, sizeof(line), "%s %08x\n", name, k3_crc32c(0, bytes, item.len_bytes));
        put(f, &crc, line);
        free(bytes);
    }
    fprintf(f, "end %zu %08x\n", 2 + k3_sums_n_items(t->m), crc);
    assert_int_equal(fclose(f), 0);
}

static void flip(const struct k3_tf *t, uint32_t file, uint64_t off_bytes)
{
    int fd = open(t->m->files[file].path, O_RDWR);
    uint8_t b;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &b, 1, (off_t)off_bytes), 1);
    b ^= 0x20;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)off_bytes), 1);
    close(fd);
}

static uint32_t file_of(const struct k3_tf *t, uint32_t piece)
{
    return t->m->matrices[t->m->pieces[piece].matrix].file;
}

/* Walks the pass from (piece, row) on without looking at the bytes; the piece that could not be had, or n_pieces.
 * Stops after n_blocks blocks. */
static uint32_t walk(struct k3_tf *t, struct k3_trunk_reader *r, uint32_t *piece, uint32_t *row, unsigned n_blocks,
                     struct k3_err *err)
{
    uint64_t limit = k3_trunk_reader_block_bytes(r);

    for (; *piece < t->m->n_pieces; ++*piece, *row = 0) {
        const struct k3_piece *p = &t->m->pieces[*piece];
        uint64_t row_bytes = p->len_bytes / p->n_rows, most = limit / row_bytes ? limit / row_bytes : 1;

        while (*row < p->n_rows) {
            uint32_t n = (uint32_t)(most < p->n_rows - *row ? most : p->n_rows - *row);
            const void *rows;

            if (n_blocks-- == 0)
                return (uint32_t)t->m->n_pieces;
            if (k3_trunk_reader_rows(r, *piece, *row, n, &rows, err) < 0)
                return *piece;
            k3_trunk_reader_done(r);
            *row += n;
        }
    }
    return (uint32_t)t->m->n_pieces;
}

static uint32_t walk_pass(struct k3_tf *t, struct k3_trunk_reader *r, struct k3_err *err)
{
    uint32_t piece = 0, row = 0;

    *err = (struct k3_err)K3_ERR_INIT;
    if (k3_trunk_reader_seek_pass(r, err) < 0)
        fail_msg("seek: %s", err->text);
    return walk(t, r, &piece, &row, UINT32_MAX, err);
}

static void right_ones_pass(void **state)
{
    static const char *const how[] = { "first", "always", NULL };

    (void)state;
    for (unsigned i = 0; i < 9; i++) {
        struct k3_tf_spec spec = i % 3 == 2 ? big : small;
        struct k3_trunkd_opt opt;
        struct k3_tf t;
        struct k3_trunk_reader *r;
        struct k3_err err;
        const float *resident;
        uint64_t resident_bytes = 0, once;
        pid_t pid;

        spec.seed += i;
        k3_tf_open(&t, &spec);
        write_sums(&t);
        opt = k3_tf_opt(&t);
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, i % 4 * 80);
        opt.verify = how[i % 3];
        pid = k3_tf_start(&t, &opt);
        r = k3_tf_reader(&t, 1);
        assert_int_equal(k3_trunk_reader_resident(r, &resident, &err), 0);
        for (int pass = 0; pass < 3; pass++) {
            err = (struct k3_err)K3_ERR_INIT;
            assert_int_equal(k3_trunk_reader_seek_pass(r, &err), 0);
            k3_tf_walk(&t, r, t.m->n_pieces, 0);
        }
        for (size_t k = 0; k < t.m->n_residents; k++)
            resident_bytes += 2 * t.m->residents[k].n;
        once = t.m->trunk_bytes + resident_bytes;
        assert_int_equal(k3_tf_stat(&t, "verify_failures"), 0);
        /* `first` also sums twice what it had begun when a seek came. */
        if (opt.verify && strcmp(opt.verify, "always") == 0)
            assert_true(k3_tf_stat(&t, "verified_bytes") >=
                        once + 2 * (t.m->trunk_bytes - k3_trunk_reader_layout(r)->pinned_payload_bytes));
        else
            assert_in_range(k3_tf_stat(&t, "verified_bytes"), once, once + 3 * K3_PIECE_BYTES);
        k3_trunk_reader_close(r);
        assert_int_equal(k3_tf_stop(pid), 0);
        k3_tf_close(&t);
    }
}

static void check_words(const struct k3_tf *t, const struct k3_err *err, uint32_t file, uint64_t off_bytes)
{
    char off[40];

    snprintf(off, sizeof(off), "offset %" PRIu64, off_bytes);
    if (err->exit_status != K3_EXIT_UNTRUSTED || !strstr(err->text, t->m->files[file].path) ||
        !strstr(err->text, off) ||
        !strstr(err->text, "checksum"))
        fail_msg("%d: %s; must be 4 and name %s %s", err->exit_status, err->text, t->m->files[file].path, off);
}

static void a_flipped_byte(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 12; i++) {
        struct k3_tf_spec spec = i % 4 == 3 ? big : small;
        struct k3_trunkd_opt opt;
        struct k3_tf t;
        struct k3_trunk_reader *r;
        struct k3_err err;
        uint32_t victim, got;
        uint64_t at;
        pid_t pid;

        spec.seed += 100 + i;
        k3_tf_open(&t, &spec);
        write_sums(&t);
        victim = (uint32_t)k3_tf_below(&t.rng, t.m->n_pieces);
        at = i % 3 == 0 ? 0 : i % 3 == 1 ? t.m->pieces[victim].len_bytes - 1 : t.m->pieces[victim].len_bytes / 2;
        flip(&t, file_of(&t, victim), t.m->pieces[victim].off_bytes + at);
        opt = k3_tf_opt(&t);
        opt.trunk_bytes = k3_tf_trunk_bytes(&t, 2, i % 2 ? 0 : 256);
        opt.verify = i % 2 ? "always" : "first";
        pid = k3_tf_start(&t, &opt);
        r = k3_tf_reader(&t, 1);
        got = walk_pass(&t, r, &err);
        assert_int_equal(got, victim);
        check_words(&t, &err, file_of(&t, victim), t.m->pieces[victim].off_bytes);
        assert_true(k3_tf_stat(&t, "verify_failures") >= 1);
        assert_true(k3_tf_log_has(&t, "event=piece_wrong"));
        /* The same again; then the file is repaired, and the same daemon goes on. */
        assert_int_equal(walk_pass(&t, r, &err), victim);
        k3_tf_write_file(&t, file_of(&t, victim));
        if (walk_pass(&t, r, &err) != t.m->n_pieces)
            fail_msg("%s", err.text);
        k3_trunk_reader_close(r);
        assert_int_equal(k3_tf_stop(pid), 0);
        k3_tf_close(&t);
    }
}

/* `first` looks at a piece until it was right; `always` each time. */
static void after_the_first_pass(void **state)
{
    (void)state;
    for (int always = 0; always < 2; always++) {
        struct k3_trunkd_opt opt;
        struct k3_tf t;
        struct k3_trunk_reader *r;
        struct k3_err err;
        uint32_t got;
        pid_t pid;

        k3_tf_open(&t, &small);
        write_sums(&t);
        opt = k3_tf_opt(&t);
        opt.verify = always ? "always" : "first";
        pid = k3_tf_start(&t, &opt);
        r = k3_tf_reader(&t, 1);
        assert_int_equal(walk_pass(&t, r, &err), t.m->n_pieces);
        flip(&t, file_of(&t, 20), t.m->pieces[20].off_bytes);
        got = walk_pass(&t, r, &err); /* the ring may hold it from before */
        assert_true(got == t.m->n_pieces || (always && got == 20));
        got = walk_pass(&t, r, &err);
        assert_int_equal(got, always ? 20 : t.m->n_pieces);
        k3_trunk_reader_close(r);
        assert_int_equal(k3_tf_stop(pid), 0);
        k3_tf_close(&t);
    }
}

/* The daemon dies in the midst of a piece that is larger than the ring; its successor sums the piece from its
 * beginning: it passes when right, and is found wrong when the change lies before the place of the seek. */
static void a_seek_into_a_piece(void **state)
{
    (void)state;
    for (int wrong = 0; wrong < 2; wrong++) {
        struct k3_trunkd_opt opt;
        struct k3_tf t;
        struct k3_trunk_reader *r;
        struct k3_err err = K3_ERR_INIT;
        uint32_t piece = 0, row = 0, got;
        pid_t pid;

        k3_tf_open(&t, &big);
        write_sums(&t);
        opt = k3_tf_opt(&t);
        opt.verify = "always";
        pid = k3_tf_start(&t, &opt);
        r = k3_tf_reader(&t, 1);
        assert_int_equal(k3_trunk_reader_seek_pass(r, &err), 0);
        while (row == 0 || row >= t.m->pieces[piece].n_rows || t.m->pieces[piece].len_bytes < 4000000 ||
               (uint64_t)row * 2 < t.m->pieces[piece].n_rows) {
            if (row == t.m->pieces[piece].n_rows) {
                piece++;
                row = 0;
            }
            assert_true(piece < t.m->n_pieces);
            assert_int_equal(walk(&t, r, &piece, &row, 1, &err), t.m->n_pieces);
        }
        k3_tf_kill(pid);
        if (wrong)
            flip(&t, file_of(&t, piece), t.m->pieces[piece].off_bytes + 5);
        pid = k3_tf_start(&t, &opt);
        got = walk(&t, r, &piece, &row, UINT32_MAX, &err);
        if (wrong) {
            assert_int_equal(got, piece);
            check_words(&t, &err, file_of(&t, piece), t.m->pieces[piece].off_bytes);
        } else if (got != t.m->n_pieces) {
            fail_msg("%s", err.text);
        }
        k3_trunk_reader_close(r);
        assert_int_equal(k3_tf_stop(pid), 0);
        k3_tf_close(&t);
    }
}

static void a_wrong_resident(void **state)
{
    struct k3_trunkd_opt opt;
    struct k3_tf t;

    (void)state;
    k3_tf_open(&t, &small);
    write_sums(&t);
    flip(&t, t.m->residents[4].file, t.m->residents[4].off_bytes + 1);
    opt = k3_tf_opt(&t);
    {
        pid_t pid = k3_tf_start(&t, &opt);
        char off[40];
        int status = 0;

        assert_int_equal(waitpid(pid, &status, 0), pid); /* by itself */
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), K3_EXIT_UNTRUSTED);
        snprintf(off, sizeof(off), "offset %" PRIu64, t.m->residents[4].off_bytes);
        assert_true(k3_tf_log_has(&t, off));
    }
    opt.verify = "off";
    {
        pid_t pid = k3_tf_start(&t, &opt);

        assert_true(k3_tf_wait_ready(&t, pid));
        assert_int_equal(k3_tf_stop(pid), 0);
    }
    k3_tf_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_ones_pass),      cmocka_unit_test(a_flipped_byte), cmocka_unit_test(after_the_first_pass),
        cmocka_unit_test(a_seek_into_a_piece), cmocka_unit_test(a_wrong_resident),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
