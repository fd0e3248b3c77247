/* A packed trunk: what is read back through it is what the shards hold; whatever is changed in its header or table is
 * refused; a disk that fills up leaves nothing behind; an interrupted copy is gone on with. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/crc32c.h"
#include "model/pack.h"
#include "model/schedule.h"
#include "tests/unit/model_files.h"
#include "tools/pack.h"

/* A disk: these take the place of the C library's. */
static atomic_int writes_left = -1, write_fails_with; /* -1: all succeed */
static int no_fallocate;

ssize_t pwrite(int fd, const void *data, size_t n, off_t off)
{
    if (atomic_load(&writes_left) >= 0 && atomic_fetch_sub(&writes_left, 1) <= 0) {
        atomic_store(&writes_left, 0);
        errno = write_fails_with;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, data, n, off);
}

int fallocate(int fd, int mode, off_t off, off_t n)
{
    if (no_fallocate) {
        errno = no_fallocate;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, off, n);
}

struct world {
    char dir[64], model[128], out[128], pack[160], part[160];
};

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof(*w));
    struct k3_mk_opts o = k3_test_formula();

    k3_test_dir(w->dir);
    k3_test_make(&o, w->dir, "m", w->model);
    snprintf(w->out, sizeof(w->out), "%s/out", w->dir);
    assert_int_equal(mkdir(w->out, 0700), 0);
    snprintf(w->pack, sizeof(w->pack), "%s/" K3_PACK_NAME, w->out);
    snprintf(w->part, sizeof(w->part), "%s/" K3_PACK_PART, w->out);
    writes_left = -1;
    no_fallocate = 0;
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;

    writes_left = -1;
    no_fallocate = 0;
    k3_test_dir_remove(w->dir);
    free(w);
    return 0;
}

static int write_pack(const struct world *w, struct k3_pack_done *done, struct k3_err *err)
{
    struct k3_pack_opts o = { .model = w->model, .out = w->out };

    *err = (struct k3_err)K3_ERR_INIT;
    return k3_pack_write(&o, done, err);
}

static int open_with(const struct world *w, uint32_t n_layers, bool packed, struct k3_model **m, struct k3_err *err)
{
    const char *dirs[2] = { w->model, w->out };
    struct k3_model_opts mo = { .dirs = dirs, .n_dirs = packed ? 2 : 1, .n_layers = n_layers };

    *m = NULL;
    *err = (struct k3_err)K3_ERR_INIT;
    return k3_model_open(m, &mo, err);
}

static void check_range(const struct k3_model *a, uint16_t a_file, uint64_t a_off, const struct k3_model *b, uint16_t b_file,
                        uint64_t b_off, size_t n)
{
    uint8_t *x = malloc(n), *y = malloc(n);
    int fx = open(a->files[a_file].path, O_RDONLY), fy = open(b->files[b_file].path, O_RDONLY);

    assert_int_equal(pread(fx, x, n, (off_t)a_off), n);
    assert_int_equal(pread(fy, y, n, (off_t)b_off), n);
    assert_memory_equal(x, y, n);
    close(fx);
    close(fy);
    free(x);
    free(y);
}

static void test_same_bytes(void **state)
{
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;

    if (write_pack(w, &done, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_not_equal(access(w->part, F_OK), 0);
    for (uint32_t n_layers = 0; n_layers <= 8; n_layers += 3) { /* of all layers, for fewer */
        struct k3_model *m, *p;
        struct k3_layout lm, lp;

        assert_int_equal(open_with(w, n_layers, false, &m, &err), 0);
        if (open_with(w, n_layers, true, &p, &err) < 0)
            fail_msg("%s", err.text);
        assert_non_null(p->pack_crc);
        assert_memory_equal(m->digest, p->digest, 32);
        assert_int_equal(m->n_pieces, p->n_pieces);
        for (size_t i = 0; i < m->n_pieces; i++) {
            const struct k3_matrix *x = &p->matrices[p->pieces[i].matrix];

            assert_string_equal(p->files[x->file].path, w->pack);
            check_range(m, m->matrices[m->pieces[i].matrix].file, m->pieces[i].off_bytes, p, x->file, p->pieces[i].off_bytes,
                        p->pieces[i].len_bytes);
            assert_int_equal(x->off_bytes % 64, 0);
            if (p->pieces[i].row == 0)
                assert_int_equal(x->off_bytes, p->pieces[i].off_bytes);
        }
        for (size_t i = 0; i < m->n_residents; i++)
            check_range(m, m->residents[i].file, m->residents[i].off_bytes, p, p->residents[i].file, p->residents[i].off_bytes,
                        p->residents[i].n * k3_dtype_bytes(p->residents[i].dtype));
        /* A trunkd and a computed of which only one reads the pack are told apart. */
        assert_int_equal(k3_layout_build(&lm, m, 4096, K3_HUGE_BYTES, NULL, &err), 0);
        assert_int_equal(k3_layout_build(&lp, p, 4096, K3_HUGE_BYTES, NULL, &err), 0);
        assert_memory_not_equal(lm.digest, lp.digest, 32);
        k3_layout_free(&lm);
        k3_layout_free(&lp);
        k3_model_close(m);
        k3_model_close(p);
    }
    assert_int_equal(write_pack(w, &done, &err), 0);
    assert_true(done.was_there);
}

static void test_every_change(void **state)
{
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;
    struct k3_model *m;
    size_t n, head;
    char *all;

    assert_int_equal(write_pack(w, &done, &err), 0);
    all = k3_test_get(w->out, K3_PACK_NAME, &n);
    head = sizeof(struct k3_pack_header) + ((struct k3_pack_header *)(void *)all)->n_entries * sizeof(struct k3_pack_entry);
    assert_true(head > 4000 && head < n);
    for (size_t i = 0; i < head; i += i < 100 ? 1 : 37) {
        if (i >= offsetof(struct k3_pack_header, zero) && i < sizeof(struct k3_pack_header))
            continue;
        all[i] ^= 8;
        k3_test_put(w->out, K3_PACK_NAME, all, n);
        if (open_with(w, 0, true, &m, &err) == 0)
            fail_msg("byte %zu changed and not noticed", i);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, w->pack));
        assert_non_null(strstr(err.text, "k3-pack"));
        all[i] ^= 8;
    }
    for (size_t k = 0; k < n; k += k < head ? 1001 : 100003) {
        k3_test_put(w->out, K3_PACK_NAME, all, k);
        assert_true(open_with(w, 0, true, &m, &err) < 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, w->pack));
    }
    free(all);
}

/* CRCs that fit what was changed: the table itself is checked, too. */
static void test_hostile_table(void **state)
{
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;
    struct k3_model *m;
    struct k3_pack_header *h;
    struct k3_pack_entry *t;
    size_t n;
    char *all;

    assert_int_equal(write_pack(w, &done, &err), 0);
    for (int how = 0; how < 9; how++) {
        all = k3_test_get(w->out, K3_PACK_NAME, &n);
        h = (struct k3_pack_header *)(void *)all;
        t = (struct k3_pack_entry *)(void *)(all + sizeof(*h));
        switch (how) {
        case 0: t[5].off_bytes = 0; break;                          /* in the header */
        case 1: t[5].off_bytes = UINT64_MAX - 63; break;            /* wraps */
        case 2: t[5].off_bytes = h->file_bytes - 64; break;         /* what follows lies before */
        case 3: t[5].len_bytes++; break;
        case 4: t[h->n_entries - 1].off_bytes += 32; break;         /* not aligned */
        case 5: t[5].layer = 7; break;
        case 6: h->n_entries--; break;
        case 7: t[150].row += 1; break;
        case 8: h->n_layers = 9; break;
        }
        k3_pack_seal(h, t);
        k3_test_put(w->out, "x", all, n);
        assert_int_equal(rename(w->pack, w->part), 0);
        k3_test_put(w->out, K3_PACK_NAME, all, n);
        if (open_with(w, 0, true, &m, &err) == 0)
            fail_msg("way %d not noticed", how);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_int_equal(rename(w->part, w->pack), 0);
        free(all);
    }
}

/* The disk fills up while this is written: at the first write, at the last, in between. */
static void test_no_room(void **state)
{
    static const int numbers[] = { ENOSPC, EDQUOT, EFBIG };
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;

    for (int i = 0; i < 3; i++) { /* what reserves says no */
        no_fallocate = numbers[i];
        assert_int_equal(write_pack(w, &done, &err), -ENOSPC);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_int_not_equal(access(w->part, F_OK), 0);
    }
    no_fallocate = EOPNOTSUPP;
    for (int after = 0; after < 200; after += 23) {
        write_fails_with = numbers[after % 3];
        writes_left = after;
        assert_int_equal(write_pack(w, &done, &err), -ENOSPC);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, "are needed in"));
        assert_non_null(strstr(err.text, "are free there"));
        assert_int_not_equal(access(w->part, F_OK), 0);
        assert_int_not_equal(access(w->pack, F_OK), 0);
    }
    writes_left = -1;
    assert_int_equal(write_pack(w, &done, &err), 0);
}

static void test_another_error(void **state)
{
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;

    write_fails_with = EIO;
    writes_left = 100;
    assert_int_equal(write_pack(w, &done, &err), -EIO);
    assert_int_equal(err.exit_status, K3_EXIT_FAILED);
    assert_non_null(strstr(err.text, w->part));
    assert_int_equal(access(w->part, F_OK), 0);
    writes_left = -1;
    assert_int_equal(write_pack(w, &done, &err), 0);
}

/* Parts as a stopped run leaves them: some entries done, one of them damaged since. */
static void test_goes_on(void **state)
{
    const struct world *w = *state;
    struct k3_pack_done done;
    struct k3_err err;
    size_t n, again_n;
    char *whole, *part, *again;
    struct k3_pack_header *h;
    struct k3_pack_entry *t;
    uint64_t kept = 0;

    assert_int_equal(write_pack(w, &done, &err), 0);
    whole = k3_test_get(w->out, K3_PACK_NAME, &n);
    part = k3_test_get(w->out, K3_PACK_NAME, &n);
    assert_int_equal(unlink(w->pack), 0);
    h = (struct k3_pack_header *)(void *)part;
    t = (struct k3_pack_entry *)(void *)(part + sizeof(*h));
    memcpy(h->magic, K3_PACK_PART_MAGIC, 8);
    for (uint32_t i = 0; i < h->n_entries; i++) {
        if (i % 3 == 0) {
            t[i].done = 0;
            memset(part + t[i].off_bytes, 0xee, t[i].len_bytes);
        } else if (i != 100) {
            kept += t[i].len_bytes;
        }
    }
    part[t[100].off_bytes] ^= 1; /* done, but not what its CRC says */
    k3_pack_seal(h, t);
    k3_test_put(w->out, K3_PACK_PART, part, n);
    if (write_pack(w, &done, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(done.kept_bytes, kept);
    again = k3_test_get(w->out, K3_PACK_NAME, &again_n);
    assert_int_equal(again_n, n);
    assert_memory_equal(again, whole, n);
    free(again);
    /* Of another model: nothing of it is kept. */
    assert_int_equal(unlink(w->pack), 0);
    h->digest[3] ^= 1;
    k3_pack_seal(h, t);
    k3_test_put(w->out, K3_PACK_PART, part, n);
    assert_int_equal(write_pack(w, &done, &err), 0);
    assert_int_equal(done.kept_bytes, 0);
    again = k3_test_get(w->out, K3_PACK_NAME, &again_n);
    assert_memory_equal(again, whole, n);
    free(again);
    free(whole);
    free(part);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_bytes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_every_change, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hostile_table, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_room, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_another_error, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_goes_on, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
