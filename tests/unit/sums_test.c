/* k3.sums: what is written is read back; whatever is changed in it is refused; half of it can be gone on with. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/crc32c.h"
#include "model/sums.h"
#include "tests/unit/model_files.h"

struct world {
    char dir[64], path[128];
    const char *dirs[1];
    struct k3_model_opts mo;
    struct k3_model *m;
    char *text; /* sums of it, the CRC of item i being fake(i) */
    size_t len_bytes;
};

static uint32_t fake(size_t i)
{
    return (uint32_t)(i + 1) * 2654435761u;
}

static void add(struct world *w, const char *line)
{
    size_t n = strlen(line);

    w->text = realloc(w->text, w->len_bytes + n + 1);
    assert_non_null(w->text);
    memcpy(w->text + w->len_bytes, line, n + 1);
    w->len_bytes += n;
}

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof(*w));
    struct k3_mk_opts o = k3_test_formula();
    struct k3_err err = K3_ERR_INIT;
    char head[128], name[K3_SUMS_LINE_BYTES], line[K3_SUMS_LINE_BYTES + 16];

    k3_test_dir(w->dir);
    k3_test_make(&o, w->dir, "m", w->path);
    w->dirs[0] = w->path;
    w->mo = (struct k3_model_opts){ .dirs = w->dirs, .n_dirs = 1, .want_experts = true };
    if (k3_model_open(&w->m, &w->mo, &err) < 0)
        fail_msg("%s", err.text);
    k3_sums_head(w->m, head, sizeof(head));
    add(w, head);
    for (size_t i = 0; i < k3_sums_n_items(w->m); i++) {
        k3_sums_name(w->m, i, name);
        snprintf(line, sizeof(line), "%s %08x\n", name, fake(i));
        add(w, line);
    }
    snprintf(line, sizeof(line), "end %zu %08x\n", 2 + k3_sums_n_items(w->m), k3_crc32c(0, w->text, w->len_bytes));
    add(w, line);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;

    k3_model_close(w->m);
    k3_test_dir_remove(w->dir);
    free(w->text);
    free(w);
    return 0;
}

static int parse(const struct world *w, const char *text, size_t n, struct k3_sums **out, struct k3_err *err)
{
    *out = NULL;
    *err = (struct k3_err)K3_ERR_INIT;
    return k3_sums_parse(out, w->m, K3_SUMS_ALL, text, n, w->m->digest, w->m->cfg.n_layers, err);
}

static void test_whole(void **state)
{
    const struct world *w = *state;
    struct k3_sums *s;
    struct k3_err err;
    size_t i = 0;

    assert_int_equal(parse(w, w->text, w->len_bytes, &s, &err), 0);
    for (size_t k = 0; k < w->m->n_pieces; k++)
        assert_int_equal(s->piece[k], fake(i++));
    for (size_t k = 0; k < w->m->n_residents; k++)
        assert_int_equal(s->resident[k], fake(i++));
    for (uint32_t l = w->m->cfg.first_dense; l < w->m->cfg.n_layers; l++)
        for (uint32_t e = 0; e < w->m->cfg.n_experts; e++)
            assert_int_equal(s->expert[k3_sums_expert_key(w->m, l, e)], fake(i++));
    for (size_t k = 0; k < k3_sums_n_embed(w->m); k++)
        assert_int_equal(s->embed[k], fake(i++));
    assert_int_equal(i, k3_sums_n_items(w->m));
    assert_true(k3_sums_n_experts(w->m) > 0);
    k3_sums_free(s);
    /* only what is asked for takes memory */
    assert_int_equal(k3_sums_parse(&s, w->m, K3_SUMS_EXPERTS, w->text, w->len_bytes, w->m->digest, w->m->cfg.n_layers,
                                   &err), 0);
    assert_null(s->piece);
    assert_null(s->resident);
    assert_null(s->embed);
    assert_int_equal(s->expert[0], fake(w->m->n_pieces + w->m->n_residents));
    k3_sums_free(s);
}

static void test_every_change(void **state)
{
    const struct world *w = *state;
    char *text = malloc(w->len_bytes + 64);
    struct k3_sums *s;
    struct k3_err err;

    for (size_t i = 0; i < w->len_bytes; i++) {
        memcpy(text, w->text, w->len_bytes);
        text[i] ^= (char)(1 << i % 7);
        if (parse(w, text, w->len_bytes, &s, &err) == 0)
            fail_msg("byte %zu changed and not noticed", i);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        assert_non_null(strstr(err.text, "k3.sums"));
    }
    memcpy(text, w->text, w->len_bytes);
    for (size_t n = 0; n < w->len_bytes; n++) {
        assert_true(parse(w, text, n, &s, &err) < 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    }
    memcpy(text + w->len_bytes, "x", 1);
    assert_true(parse(w, text, w->len_bytes + 1, &s, &err) < 0);
    assert_non_null(strstr(err.text, "follows"));
    memset(text, 'a', w->len_bytes);
    assert_true(parse(w, text, w->len_bytes, &s, &err) < 0);
    free(text);
}

static void test_another_model(void **state)
{
    const struct world *w = *state;
    uint8_t digest[32];
    struct k3_sums *s = NULL;
    struct k3_err err = K3_ERR_INIT;

    memcpy(digest, w->m->digest, 32);
    digest[31] ^= 1;
    assert_int_equal(k3_sums_parse(&s, w->m, K3_SUMS_ALL, w->text, w->len_bytes, digest, w->m->cfg.n_layers, &err),
                     -ESTALE);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "another model"));
    assert_non_null(strstr(err.text, "k3ctl verify --make"));
}

static struct k3_model *open_layers(const struct world *w, uint32_t n_layers, struct k3_model_opts *mo)
{
    struct k3_model *m = NULL;
    struct k3_err err = K3_ERR_INIT;

    *mo = w->mo;
    mo->n_layers = n_layers;
    if (k3_model_open(&m, mo, &err) < 0)
        fail_msg("%s", err.text);
    return m;
}

/* From a file: of all layers, used by a run of fewer; and the other way round. */
static void test_layers(void **state)
{
    const struct world *w = *state;
    struct k3_model_opts mo;
    struct k3_sums *s = NULL;
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *few = open_layers(w, 3, &mo);
    char head[128], name[K3_SUMS_LINE_BYTES], line[K3_SUMS_LINE_BYTES];
    size_t i = 0;

    assert_int_equal(k3_sums_open(&s, few, &mo, K3_SUMS_ALL, &err), -ENOENT);
    assert_null(s);
    k3_test_put(w->path, "k3.sums", w->text, w->len_bytes);
    if (k3_sums_open(&s, few, &mo, K3_SUMS_ALL, &err) < 0)
        fail_msg("%s", err.text);
    /* The layers' pieces are the same; what lies at the model level comes behind those of all layers. */
    for (size_t k = 0; k < few->n_pieces; k++)
        if (few->matrices[few->pieces[k].matrix].layer >= 0)
            assert_int_equal(s->piece[k], fake(i++));
    assert_int_equal(s->piece[few->n_pieces - 1], fake(w->m->n_pieces - 1));
    assert_int_equal(s->resident[few->n_residents - 1], fake(w->m->n_pieces + w->m->n_residents - 1));
    assert_int_equal(s->expert[0], fake(w->m->n_pieces + w->m->n_residents));
    assert_int_equal(s->embed[0], fake(k3_sums_n_items(w->m) - 1));
    k3_sums_free(s);
    s = NULL;
    /* Of a few layers. */
    {
        struct world of_few = { 0 };

        k3_sums_head(few, head, sizeof(head));
        add(&of_few, head);
        for (i = 0; i < k3_sums_n_items(few); i++) {
            k3_sums_name(few, i, name);
            snprintf(line, sizeof(line), "%.120s %08x\n", name, fake(i));
            add(&of_few, line);
        }
        snprintf(line, sizeof(line), "end %zu %08x\n", 2 + k3_sums_n_items(few), k3_crc32c(0, of_few.text, of_few.len_bytes));
        add(&of_few, line);
        k3_test_put(w->path, "k3.sums", of_few.text, of_few.len_bytes);
        free(of_few.text);
    }
    assert_int_equal(k3_sums_open(&s, few, &mo, K3_SUMS_ALL, &err), 0);
    k3_sums_free(s);
    assert_int_equal(k3_sums_open(&s, w->m, &w->mo, K3_SUMS_ALL, &err), -ESTALE);
    assert_non_null(strstr(err.text, "covers 3 layers, 8 are to run"));
    k3_model_close(few);
    /* A digest that is not that of so many layers. */
    few = open_layers(w, 2, &mo);
    {
        char *other = k3_test_replace(w->text, "layers 8", "layers 7");

        k3_test_put_text(w->path, "k3.sums", other);
        free(other);
    }
    assert_int_equal(k3_sums_open(&s, few, &mo, K3_SUMS_ALL, &err), -ESTALE);
    assert_non_null(strstr(err.text, "another model"));
    k3_model_close(few);
}

static void test_resume(void **state)
{
    const struct world *w = *state;
    char path[64] = "/tmp/k3-sums-XXXXXX";
    int fd = mkstemp(path);
    size_t last = 0;

    assert_true(fd >= 0);
    for (size_t n = 0; n <= w->len_bytes; n += n % 97 ? 1 : 13) {
        struct k3_err err = K3_ERR_INIT;
        uint64_t end_bytes;
        size_t n_items;
        uint32_t crc;

        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, w->text, n, 0), n);
        if (n % 5 == 0) /* a machine that stopped: zeros follow */
            assert_int_equal(ftruncate(fd, (off_t)n + 300), 0);
        lseek(fd, 0, SEEK_SET);
        assert_int_equal(k3_sums_resume(fd, w->m, &n_items, &end_bytes, &crc, &err), 0);
        assert_true(end_bytes <= n && n_items >= last);
        assert_int_equal(crc, k3_crc32c(0, w->text, end_bytes));
        if (end_bytes) /* the very line that item n_items has follows, or the last line */
            assert_int_equal(w->text[end_bytes - 1], '\n');
        if (end_bytes && n_items < k3_sums_n_items(w->m)) {
            char name[K3_SUMS_LINE_BYTES];

            k3_sums_name(w->m, n_items, name);
            assert_memory_equal(w->text + end_bytes, name, strlen(name));
        }
        last = n_items;
    }
    assert_int_equal(last, k3_sums_n_items(w->m));
    close(fd);
    unlink(path);
}

/* The parts of all items: each byte of pieces, residents, experts and embedding once. */
static void test_items(void **state)
{
    const struct world *w = *state;
    uint64_t bytes = 0, want = w->m->trunk_bytes + k3_sums_n_experts(w->m) * w->m->expert_bytes;
    struct k3_sum_item item;

    for (size_t i = 0; i < w->m->n_residents; i++)
        want += (uint64_t)w->m->residents[i].n * k3_dtype_bytes(w->m->residents[i].dtype);
    want += (uint64_t)w->m->cfg.vocab * w->m->cfg.hidden * k3_dtype_bytes(w->m->embed_dtype);
    for (size_t i = 0; i < k3_sums_n_items(w->m); i++) {
        assert_int_equal(k3_sums_item(w->m, i, &item), 0);
        assert_int_equal(item.n_parts, item.kind == K3_SUM_EXPERT ? 6 : 1);
        for (uint32_t k = 0; k < item.n_parts; k++)
            assert_true(item.part[k].off_bytes + item.part[k].len_bytes <= w->m->files[item.part[k].file].len_bytes);
        bytes += item.len_bytes;
    }
    assert_int_equal(bytes, want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),        cmocka_unit_test(test_every_change), cmocka_unit_test(test_another_model),
        cmocka_unit_test(test_layers),       cmocka_unit_test(test_resume),       cmocka_unit_test(test_items),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
