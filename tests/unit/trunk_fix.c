#include "tests/unit/trunk_fix.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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

#include "model/sha256.h"

uint64_t k3_tf_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t k3_tf_below(uint64_t *state, uint64_t n)
{
    return k3_tf_random(state) % n;
}

static uint64_t word_at(const struct k3_tf *t, uint32_t file, uint64_t i)
{
    uint64_t s = t->spec.seed * 1000003u + ((uint64_t)file << 40) + i;

    return k3_tf_random(&s);
}

void k3_tf_bytes(const struct k3_tf *t, uint32_t file, uint64_t off_bytes, void *out,
                 size_t len_bytes)
{
    uint8_t *p = out;

    while (len_bytes) {
        uint64_t w = word_at(t, file, off_bytes / 8);
        size_t skip = off_bytes % 8, n = 8 - skip < len_bytes ? 8 - skip : len_bytes;

        memcpy(p, (uint8_t *)&w + skip, n);
        p += n;
        off_bytes += n;
        len_bytes -= n;
    }
}

void k3_tf_write_file(const struct k3_tf *t, uint32_t file)
{
    size_t chunk = 1 << 20;
    uint8_t *buf = malloc(chunk);
    FILE *f = fopen(t->m->files[file].path, "r+"); /* the inode stays */

    if (!f)
        f = fopen(t->m->files[file].path, "w");
    assert_non_null(f);
    for (uint64_t at = 0; at < t->m->files[file].len_bytes; at += chunk) {
        size_t n = t->m->files[file].len_bytes - at < chunk ? t->m->files[file].len_bytes - at
                                                            : chunk;

        k3_tf_bytes(t, file, at, buf, n);
        assert_int_equal(fwrite(buf, 1, n, f), n);
    }
    assert_int_equal(fflush(f), 0);
    assert_int_equal(ftruncate(fileno(f), (off_t)t->m->files[file].len_bytes), 0);
    fclose(f);
    free(buf);
}

static uint64_t add_matrix(struct k3_tf *t, uint32_t file, uint64_t at)
{
    struct k3_model *m = t->m;
    struct k3_matrix *x = &m->matrices[m->n_matrices];
    uint32_t row_bytes = 2 * (uint32_t)(1 + k3_tf_below(&t->rng, t->spec.row_bytes_max / 2)),
             rows_per_piece;

    *x = (struct k3_matrix){ .off_bytes = at,
                             .file = (uint16_t)file,
                             .dtype = K3_BF16,
                             .layer = -1,
                             .n_cols = row_bytes / 2,
                             .first_piece = (uint32_t)m->n_pieces };
    x->n_rows = (uint32_t)(1 + k3_tf_below(&t->rng, t->spec.matrix_bytes_max / row_bytes + 1));
    x->role = k3_tf_below(&t->rng, 8) == 0 ? K3_W_ROUTER : K3_W_KDA_Q;
    rows_per_piece = t->spec.piece_bytes / row_bytes ? t->spec.piece_bytes / row_bytes : 1;
    for (uint32_t row = 0; row < x->n_rows; row += rows_per_piece) {
        uint32_t n = x->n_rows - row < rows_per_piece ? x->n_rows - row : rows_per_piece;

        m->pieces = realloc(m->pieces, (m->n_pieces + 1) * sizeof(*m->pieces));
        m->pieces[m->n_pieces++] = (struct k3_piece){ (uint32_t)m->n_matrices, row, n,
                                                      n * row_bytes,
                                                      at + (uint64_t)row * row_bytes };
        m->trunk_bytes += (uint64_t)n * row_bytes;
        x->n_pieces++;
    }
    m->n_matrices++;
    return at + (uint64_t)x->n_rows * row_bytes;
}

static void make_model(struct k3_tf *t)
{
    const struct k3_tf_spec *s = &t->spec;
    struct k3_model *m = t->m = calloc(1, sizeof(*m));
    uint64_t *end = calloc(s->n_files, sizeof(*end));
    uint32_t file = 0;
    struct k3_sha256 d;

    m->n_files = s->n_files;
    m->files = calloc(s->n_files, sizeof(*m->files));
    m->matrices = calloc(s->n_matrices, sizeof(*m->matrices));
    m->residents = calloc(s->n_residents + 1, sizeof(*m->residents));
    for (uint32_t i = 0; i < s->n_files; i++)
        end[i] = 8 + k3_tf_below(&t->rng, 5000);
    for (uint32_t i = 0; i < s->n_residents; i++) {
        struct k3_resident *r = &m->residents[i];
        uint32_t f = (uint32_t)k3_tf_below(&t->rng, s->n_files);

        *r = (struct k3_resident){ .off_bytes = end[f],
                                   .file = (uint16_t)f,
                                   .pos = m->resident_bytes,
                                   .dtype = K3_BF16,
                                   .n = (uint32_t)(1 + k3_tf_below(&t->rng, 5000)),
                                   .layer = -1 };
        end[f] += r->n * 2;
        m->resident_bytes += (r->n * 4 + 63) / 64 * 64;
        m->n_residents++;
    }
    for (uint32_t i = 0; i < s->n_matrices; i++) {
        if (k3_tf_below(&t->rng, 4) == 0)
            file = (uint32_t)k3_tf_below(&t->rng, s->n_files);
        if (k3_tf_below(&t->rng, 2) == 0) /* else it touches the one before it: a run */
            end[file] += 1 + k3_tf_below(&t->rng, 9000);
        end[file] = add_matrix(t, file, end[file]);
    }
    k3_sha256_init(&d);
    for (uint32_t i = 0; i < s->n_files; i++) {
        struct stat st;

        m->files[i].len_bytes = end[i]; /* the last page is read short */
        assert_true(asprintf(&m->files[i].path, "%s/f%u", t->dir, i) > 0);
        k3_tf_write_file(t, i);
        assert_int_equal(stat(m->files[i].path, &st), 0);
        k3_sha256_add_u64(&d, end[i]);
    }
    k3_sha256_add_u64(&d, s->seed);
    k3_sha256_end(&d, m->digest);
    free(end);
}

struct k3_model *k3_tf_model(const struct k3_tf *t)
{
    struct k3_model *m = malloc(sizeof(*m));

#define COPY(field, n)                                                                             \
    m->field = memcpy(malloc((n) * sizeof(*m->field) + 1), t->m->field, (n) * sizeof(*m->field))
    *m = *t->m;
    COPY(files, m->n_files);
    COPY(matrices, m->n_matrices);
    COPY(pieces, m->n_pieces);
    COPY(residents, m->n_residents);
#undef COPY
    for (size_t i = 0; i < m->n_files; i++)
        m->files[i].path = strdup(t->m->files[i].path);
    return m;
}

void k3_tf_open(struct k3_tf *t, const struct k3_tf_spec *spec)
{
    static int n_opened;
    struct k3_err err = K3_ERR_INIT;

    *t = (struct k3_tf){ .spec = *spec, .rng = spec->seed };
    snprintf(t->dir, sizeof(t->dir), "%s/k3-t-trunk-XXXXXX", spec->base ? spec->base : "/tmp");
    assert_non_null(mkdtemp(t->dir));
    snprintf(t->instance, sizeof(t->instance), "t-trunk-%d-%d", (int)getpid(), n_opened++);
    if (k3_rundir(t->rundir, sizeof(t->rundir), t->instance, true, &err) < 0)
        fail_msg("%s", err.text);
    make_model(t);
}

static void remove_dir(const char *dir)
{
    char command[600];

    snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
}

void k3_tf_close(struct k3_tf *t)
{
    k3_seg_unlink(t->instance, K3_TRUNK_SEG);
    k3_seg_unlink(t->instance, K3_TRUNK_DATA_SEG);
    k3_seg_unlink(t->instance, K3_TRUNKD_NAME ".stats");
    k3_model_close(t->m);
    remove_dir(t->rundir);
    remove_dir(t->dir);
}

struct k3_trunkd_opt k3_tf_opt(const struct k3_tf *t)
{
    struct k3_trunkd_opt o = K3_TRUNKD_OPT_INIT;

    o.common.instance = t->instance;
    o.model = t->dir;
    o.ring_mb = 2;
    o.trunk_bytes = k3_tf_trunk_bytes(t, 2, 0);
    return o;
}

uint64_t k3_tf_trunk_bytes(const struct k3_tf *t, uint32_t ring_mb, unsigned share)
{
    uint64_t pages = 8192u *
                     t->m->n_pieces; /* what page rounding adds at most, when all is pinned */

    return ((uint64_t)ring_mb << 20) + t->m->trunk_bytes * share / 256 + (share >= 256 ? pages : 0);
}

pid_t k3_tf_start(const struct k3_tf *t, const struct k3_trunkd_opt *opt)
{
    return k3_tf_start_after(t, opt, NULL);
}

pid_t k3_tf_start_after(const struct k3_tf *t, const struct k3_trunkd_opt *opt,
                        void (*before)(void))
{
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct k3_trunkd d = K3_TRUNKD_INIT;
        struct k3_err err = K3_ERR_INIT;
        char log[128];
        int rc, fd;

        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves no daemon behind */
        if (before)
            before();
        snprintf(log, sizeof(log), "%s/log", t->dir);
        fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) {
            dup2(fd, 2);
            dup2(fd, 1);
        }
        d.opt = *opt;
        d.model = k3_tf_model(t);
        rc = k3_trunkd_open(&d, &err);
        if (rc == 0)
            rc = k3_trunkd_serve(&d, &err);
        if (rc < 0)
            k3_log_err(&err, "trunkd_stopped");
        k3_trunkd_close(&d);
        _exit(k3_exit_status(rc, &err));
    }
    return pid;
}

static int reap(pid_t pid)
{
    int status = 0;

    while (waitpid(pid, &status, 0) < 0)
        assert_int_equal(errno, EINTR);
    return status;
}

int k3_tf_stop(pid_t pid)
{
    int status;

    kill(pid, SIGTERM);
    status = reap(pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void k3_tf_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    reap(pid);
}

bool k3_tf_wait_ready(const struct k3_tf *t, pid_t pid)
{
    char text[40], path[128], line[2048];

    snprintf(text, sizeof(text), " pid=%d ", (int)pid);
    snprintf(path, sizeof(path), "%s/log", t->dir);
    for (int i = 0; i < 3000; i++) {
        FILE *f = fopen(path, "r");
        bool has = false;

        while (f && !has && fgets(line, sizeof(line), f))
            has = strstr(line, "event=ready") && strstr(line, text);
        if (f)
            fclose(f);
        if (has)
            return true;
        usleep(10000);
    }
    return false;
}

bool k3_tf_log_has(const struct k3_tf *t, const char *text)
{
    char path[128], line[2048];
    bool has = false;
    FILE *f;

    snprintf(path, sizeof(path), "%s/log", t->dir);
    f = fopen(path, "r");
    while (f && !has && fgets(line, sizeof(line), f))
        has = strstr(line, text) != NULL;
    if (f)
        fclose(f);
    return has;
}

uint64_t k3_tf_stat(const struct k3_tf *t, const char *name)
{
    struct k3_stats s;
    struct k3_err err = K3_ERR_INIT;
    uint64_t v;

    if (k3_stats_open(&s, t->instance, K3_TRUNKD_NAME, &err) < 0)
        fail_msg("stats: %s", err.text);
    v = k3_stats_value(&s, name);
    k3_stats_close(&s);
    return v;
}

void k3_tf_begin(struct k3_trunk_reader *r)
{
    struct k3_err err = K3_ERR_INIT;

    if (k3_trunk_reader_seek_pass(r, &err) < 0)
        fail_msg("seek: %s", err.text);
}

void k3_tf_next(struct k3_trunk_reader *r)
{
    struct k3_err err = K3_ERR_INIT;

    if (k3_trunk_reader_next_pass(r, &err) < 0)
        fail_msg("next pass: %s", err.text);
}

struct k3_trunk_reader *k3_tf_reader(const struct k3_tf *t, uint32_t generation)
{
    struct k3_trunk_reader *r = NULL;
    struct k3_err err = K3_ERR_INIT;

    if (k3_trunk_reader_open(&r, t->instance, t->rundir, t->m, generation, 20000000000ull, &err) <
        0)
        fail_msg("reader: %s", err.text);
    return r;
}

void k3_tf_check_rows(const struct k3_tf *t, uint32_t piece, uint32_t row, uint32_t n_rows,
                      const void *rows)
{
    const struct k3_piece *p = &t->m->pieces[piece];
    uint64_t row_bytes = p->len_bytes / p->n_rows, len_bytes = n_rows * row_bytes;
    uint32_t file = t->m->matrices[p->matrix].file;
    const uint8_t *got = rows;
    uint8_t want[4096];

    for (uint64_t at = 0; at < len_bytes; at += sizeof(want)) {
        size_t n = len_bytes - at < sizeof(want) ? len_bytes - at : sizeof(want);

        k3_tf_bytes(t, file, p->off_bytes + row * row_bytes + at, want, n);
        if (memcmp(want, got + at, n) != 0)
            fail_msg("piece %u rows %u+%u: byte %" PRIu64 "..: not what file %u holds at %" PRIu64,
                     piece, row, n_rows, at, file, p->off_bytes + row * row_bytes + at);
    }
}

void k3_tf_walk(struct k3_tf *t, struct k3_trunk_reader *r, size_t until, unsigned nap_us)
{
    uint64_t limit = k3_trunk_reader_block_bytes(r);

    for (uint32_t piece = 0; piece < until; piece++) {
        const struct k3_piece *p = &t->m->pieces[piece];
        uint64_t row_bytes = p->len_bytes / p->n_rows,
                 most = limit / row_bytes ? limit / row_bytes : 1;

        for (uint32_t row = 0; row < p->n_rows;) {
            uint32_t n = (uint32_t)(1 + k3_tf_below(&t->rng, most));
            struct k3_err err = K3_ERR_INIT;
            const void *rows;

            if (n > p->n_rows - row)
                n = p->n_rows - row;
            if (k3_trunk_reader_rows(r, piece, row, n, &rows, &err) < 0)
                fail_msg("rows: %s", err.text);
            if (nap_us)
                usleep((useconds_t)k3_tf_below(&t->rng, 2 * nap_us));
            k3_tf_check_rows(t, piece, row, n, rows);
            k3_trunk_reader_done(r);
            row += n;
        }
    }
}

void k3_tf_check_resident(const struct k3_tf *t, const float *resident)
{
    for (size_t i = 0; i < t->m->n_residents; i++) {
        const struct k3_resident *r = &t->m->residents[i];

        for (uint32_t k = 0; k < r->n; k++) {
            uint32_t bits;
            uint16_t h;

            memcpy(&bits, (const uint8_t *)resident + r->pos + 4 * k, 4);
            k3_tf_bytes(t, r->file, r->off_bytes + 2 * k, &h, 2);
            if (bits != (uint32_t)h << 16)
                fail_msg("resident %zu element %u: %08x, want %08x", i, k, bits, (uint32_t)h << 16);
        }
    }
}
