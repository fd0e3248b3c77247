/* model/model.c, names.c, experts.c: what is kept of a checkpoint, what is refused, and the full released shape. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "model/model_private.h"
#include "model/names.h"
#include "model/schedule.h"
#include "tests/unit/model_files.h"

static int open_one(const char *dir, uint32_t n_layers, bool experts, struct k3_model **out, struct k3_err *err)
{
    struct k3_model_opts o = { .dirs = &dir, .n_dirs = 1, .n_layers = n_layers, .want_experts = experts };

    return k3_model_open(out, &o, err);
}

static struct k3_model *must_open(const char *dir, uint32_t n_layers, bool experts)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *m = NULL;

    if (open_one(dir, n_layers, experts, &m, &err) < 0)
        fail_msg("%s", err.text);
    return m;
}

static void refused(const char *dir, uint32_t n_layers, const char *words)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *m = NULL;

    if (open_one(dir, n_layers, false, &m, &err) == 0)
        fail_msg("was opened, should say: %s", words);
    assert_null(m);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" is not in: %s", words, err.text);
}

/* What holds for every model: order, pieces, look-ups. */
static void check_model(const struct k3_model *m)
{
    uint64_t trunk = 0, pos = 0;
    size_t piece = 0;
    int layer = 0;

    for (size_t i = 0; i < m->n_matrices; i++) {
        const struct k3_matrix *x = m->matrices + i;
        uint64_t row_bytes = x->n_cols * k3_dtype_bytes(x->dtype), head = m->cfg.qk_nope + m->cfg.v_dim;
        uint32_t row = 0;

        if (i > 0 && x->layer == m->matrices[i - 1].layer)
            assert_true(x->role > m->matrices[i - 1].role);
        else if (i > 0)
            assert_int_equal(x->layer, layer + 1 < (int)m->cfg.n_layers ? ++layer : -1);
        assert_int_equal(k3_model_matrix(m, x->layer, x->role), i);
        assert_int_equal(x->first_piece, piece);
        for (uint32_t k = 0; k < x->n_pieces; k++, piece++) {
            const struct k3_piece *p = m->pieces + piece;

            assert_int_equal(p->matrix, i);
            assert_int_equal(p->row, row);
            assert_true(p->n_rows > 0 && p->len_bytes <= K3_PIECE_BYTES);
            assert_int_equal(p->len_bytes, p->n_rows * row_bytes);
            assert_int_equal(p->off_bytes, x->off_bytes + row * row_bytes);
            if (x->role == K3_W_MLA_KVB && head * row_bytes <= K3_PIECE_BYTES)
                assert_int_equal(p->n_rows % head, 0);
            row += p->n_rows;
            trunk += p->len_bytes;
        }
        assert_int_equal(row, x->n_rows);
    }
    assert_int_equal(m->matrices[m->n_matrices - 1].role, K3_W_LM_HEAD);
    assert_int_equal(piece, m->n_pieces);
    assert_int_equal(trunk, m->trunk_bytes);
    for (size_t i = 0; i < m->n_residents; i++) {
        const struct k3_resident *r = m->residents + i;

        assert_int_equal(k3_model_resident(m, r->layer, r->role), i);
        assert_int_equal(r->pos % 64, 0);
        assert_true(r->pos >= pos);
        pos = r->pos + 4ull * r->n;
        assert_int_equal(r->n, k3_names_resident_len(&m->cfg, r->role));
    }
    assert_true(m->resident_bytes >= pos && m->resident_bytes < pos + 64);
    assert_int_equal(k3_model_resident(m, -1, K3_R_Q_CONV), -1);
    assert_int_equal(k3_model_resident(m, 10000, K3_R_INPUT_NORM), -1);
    assert_int_equal(k3_model_matrix(m, 0, K3_W_LM_HEAD), -1);
    assert_int_equal(k3_model_matrix(m, 10000, K3_W_KDA_Q), -1);
}

static void check_experts(const struct k3_model *m, uint32_t n_ranges)
{
    struct k3_expert_place place;

    for (uint32_t l = 0; l < m->cfg.n_layers; l++)
        for (uint32_t e = 0; e < m->cfg.n_experts; e++) {
            uint64_t sum = 0, span = 0;

            if (k3_layer_is_dense(&m->cfg, l)) {
                assert_int_equal(k3_model_expert(m, l, e, &place), -ENOENT);
                continue;
            }
            assert_int_equal(k3_model_expert(m, l, e, &place), 0);
            if (n_ranges)
                assert_int_equal(place.n_ranges, n_ranges);
            for (uint32_t i = 0; i < place.n_ranges; i++) {
                assert_true(place.range[i].file < m->n_files);
                assert_true(place.range[i].off_bytes + place.range[i].len_bytes <=
                            m->files[place.range[i].file].len_bytes);
                sum += place.range[i].len_bytes;
                span += (place.range[i].off_bytes + place.range[i].len_bytes + 4095) / 4096 * 4096 -
                        place.range[i].off_bytes / 4096 * 4096;
            }
            assert_int_equal(sum, m->expert_bytes);
            assert_true(span <= m->expert_slot_bytes);
        }
    assert_int_equal(k3_model_expert(m, m->cfg.n_layers - 1, m->cfg.n_experts, &place), -ENOENT);
    assert_int_equal(k3_model_expert(m, m->cfg.n_layers, 0, &place), -ENOENT);
    assert_int_equal(k3_model_expert(m, 70000, 0, &place), -ENOENT);
}

static void demo(void **state)
{
    (void)state;
    struct k3_model *m = must_open("run/demo-model", 0, true);

    check_model(m);
    check_experts(m, 1);
    assert_int_equal(m->cfg.n_layers, 9);
    assert_int_equal(m->n_files, 4);
    assert_int_equal(m->expert_bytes, 3 * (64 * 32 / 2 + 64 * 32 / 32));
    assert_int_equal(k3_model_dio_align(m) % 4096, 0);
    k3_model_close(m);
    k3_model_close(NULL);
}

/* Every tensor of the formula model is where the model says: its bytes are those of its formula. */
static void check_bytes(const struct k3_model *m, const struct k3_mk_plan *p, uint16_t file, uint64_t off_bytes,
                        uint64_t len_bytes, const char *name)
{
    uint8_t *have = malloc(len_bytes), *want = malloc(len_bytes);
    const struct k3_mk_tensor *t = NULL;
    FILE *f = fopen(m->files[file].path, "r");

    for (size_t i = 0; i < p->n_tensors && !t; i++)
        t = strcmp(k3_mk_name(p, p->tensors + i), name) ? NULL : p->tensors + i;
    assert_non_null(t);
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)off_bytes, SEEK_SET), 0);
    assert_int_equal(fread(have, len_bytes, 1, f), 1);
    k3_mk_fill(p, t, 0, len_bytes, want);
    assert_memory_equal(have, want, len_bytes);
    fclose(f);
    free(have);
    free(want);
}

static void check_all_bytes(const struct k3_model *m, const struct k3_mk_opts *o)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_expert_place e;
    struct k3_mk_plan p;
    char name[K3_NAME_BYTES];

    assert_int_equal(k3_mk_plan_build(&p, o, &err), 0);
    for (size_t i = 0; i < m->n_matrices; i++) {
        const struct k3_matrix *x = m->matrices + i;

        k3_names_matrix(name, x->layer, x->role);
        check_bytes(m, &p, x->file, x->off_bytes, (uint64_t)x->n_rows * x->n_cols * k3_dtype_bytes(x->dtype), name);
    }
    for (size_t i = 0; i < m->n_residents; i++) {
        const struct k3_resident *r = m->residents + i;

        k3_names_resident(name, r->layer, r->role);
        check_bytes(m, &p, r->file, r->off_bytes, r->n * k3_dtype_bytes(r->dtype), name);
    }
    check_bytes(m, &p, m->embed_file, m->embed_off_bytes,
                (uint64_t)m->cfg.vocab * m->cfg.hidden * k3_dtype_bytes(m->embed_dtype), K3_EMBED_NAME);
    for (uint32_t l = 1; l < m->cfg.n_layers; l++)
        for (uint32_t x = 0; x < m->cfg.n_experts; x++)
            for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
                uint32_t rows, cols;

                assert_int_equal(k3_model_expert(m, l, x, &e), 0);
                k3_names_expert(name, (int)l, x, t);
                k3_names_expert_shape(&m->cfg, t, &rows, &cols);
                check_bytes(m, &p, e.range[e.tensor_range[t]].file,
                            e.range[e.tensor_range[t]].off_bytes + e.tensor_off[t], (uint64_t)rows * cols, name);
            }
    k3_mk_plan_free(&p);
}

static void orderly_and_scattered(void **state)
{
    (void)state;
    static const uint8_t types[] = { K3_BF16, K3_F32, K3_F16 };
    char dir[64], path[128];

    k3_test_dir(dir);
    for (int i = 0; i < 6; i++) {
        struct k3_mk_opts o = k3_test_formula();
        struct k3_model *m;

        o.dtype = types[i % 3];
        o.scatter = i >= 3;
        o.n_shards = i == 4 ? 3 : 0;
        k3_test_make(&o, dir, (char[]){ 'a', (char)('a' + i), 0 }, path);
        m = must_open(path, 0, true);
        assert_int_equal(m->n_files, i == 4 ? 3 : 9);
        assert_int_equal(m->matrices[0].dtype, o.dtype);
        check_model(m);
        check_experts(m, o.scatter ? 0 : 1);
        check_all_bytes(m, &o);
        k3_model_close(m);
    }
    k3_test_dir_remove(dir);
}

static void awkward_shapes(void **state)
{
    (void)state;
    char dir[64], path[128];

    k3_test_dir(dir);
    for (int i = 0; i < 4; i++) {
        struct k3_mk_opts o = k3_test_small();
        struct k3_model *m;

        o.cfg.hidden = 63;
        o.cfg.kda_heads = 1 + (uint32_t)i;
        o.cfg.kda_dim = 7;
        o.cfg.qk_nope = 5;
        o.cfg.v_dim = 3;
        o.cfg.latent_norm = i & 1;
        o.cfg.mla_gate = i & 2;
        o.cfg.n_experts = 3;
        o.cfg.top_k = 1;
        o.cfg.first_dense = (uint32_t)i;
        assert_int_equal(k3_mk_config_layers(&o.cfg, i == 1 ? 1 : 5, i == 2 ? "1,2" : i == 3 ? "none" : NULL, true, NULL), 0);
        k3_test_make(&o, dir, (char[]){ 'a', (char)('a' + i), 0 }, path);
        m = must_open(path, 0, true);
        check_model(m);
        check_experts(m, 1);
        assert_true(m->expert_slot_bytes >= m->expert_bytes);
        k3_model_close(m);
    }
    k3_test_dir_remove(dir);
}

/* A changed header of one shard of the formula model; the same length, so offsets stay. */
static void edit(const char *path, uint32_t shard, const char *from, const char *to)
{
    char name[64], *data, *at;
    size_t n;

    snprintf(name, sizeof(name), "model-%05u-of-000009.safetensors", shard);
    data = k3_test_get(path, name, &n);
    at = memmem(data, n, from, strlen(from));
    if (!at || strlen(from) != strlen(to))
        fail_msg("cannot edit \"%s\" in %s", from, name);
    memcpy(at, to, strlen(to));
    k3_test_put(path, name, data, n);
    free(data);
}

static void bad_tensors(void **state)
{
    (void)state;
    /* shard 1: layer 0 (KDA, dense), shard 2: layer 1 (KDA, MoE), shard 9: the model level */
    static const struct { uint32_t shard; const char *from, *to, *words; } cases[] = {
        { 1, "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_prox.weight",
          "tensor language_model.model.layers.0.self_attn.q_proj.weight is missing from all 9" },
        { 1, "{\"dtype\":\"BF16\",\"shape\":[24,64]", "{\"dtype\":\"BF16\",\"shape\":[64,24]",
          "has shape [64, 24], by config.json it must be [24, 64]" },
        { 1, "\"shape\":[24,1,4]", "\"shape\":[2,12,4]", "has shape [2, 12, 4], by config.json it must be [24, 1, 4]" },
        { 1, "A_log\":{\"dtype\":\"F32\",\"shape\":[8]", "A_log\":{\"dtype\":\"BF16\",\"shape\":[8", "not a safetensors header" },
        { 1, "A_log\":{\"dtype\":\"F32\"", "A_log\":{\"dtype\":\"I32\"", "A_log is I32, must be BF16, F16 or F32" },
        { 2, "experts.3.w2.weight_scale", "experts.3.w2.weight_scalx",
          "tensor language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale is missing" },
        { 2, "experts.3.w2.weight_scale\":{\"dtype\":\"U8\"", "experts.3.w2.weight_scale\":{\"dtype\":\"I8\"",
          "experts.3.w2.weight_scale is I8, must be U8 (MXFP4)" },
        { 2, "experts.3.w2.weight_packed\":{\"dtype\":\"U8\",\"shape\":[64,48]",
          "experts.3.w2.weight_packed\":{\"dtype\":\"U8\",\"shape\":[48,64]", "has shape [48, 64], by config.json it must be [64, 48]" },
        { 2, "gate.weight\"", "gate_weight\"", "block_sparse_moe.gate.weight is missing" },
        { 9, "embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[96,64]",
          "embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[64,96]", "must be [vocab_size 96, hidden_size 64]" },
        { 9, "lm_head.weight", "lm_tail.weight", "language_model.lm_head.weight is missing" },
    };
    struct k3_mk_opts o = k3_test_formula();
    char dir[64], path[128], list[192];

    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    snprintf(list, sizeof(list), "%s/model.safetensors.index.json", path);
    unlink(list); /* else it would name the edited ones first */
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        edit(path, cases[i].shard, cases[i].from, cases[i].to);
        refused(path, 0, cases[i].words);
        edit(path, cases[i].shard, cases[i].to, cases[i].from);
    }
    k3_model_close(must_open(path, 0, false));
    k3_test_dir_remove(dir);
}

/* By the names present, a matrix is MXFP4 or it is not. */
static void packed_or_plain(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_formula();
    char dir[64], path[128], list[192];

    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    snprintf(list, sizeof(list), "%s/model.safetensors.index.json", path);
    unlink(list);
    edit(path, 1, "layers.0.post_attention_layernorm.weight\"", "layers.0.mlp.up_proj.weight_packed\"      ");
    edit(path, 1, "layers.0.mlp.up_proj.weight\"", "layers.0.mlp.up_xxxx.weight\"");
    refused(path, 0, "mlp.up_proj.weight_packed: only routed experts may be MXFP4");
    k3_test_dir_remove(dir);
    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    snprintf(list, sizeof(list), "%s/model.safetensors.index.json", path);
    unlink(list);
    edit(path, 2, "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_packed\"",
         "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight\"       ");
    refused(path, 0, "experts.2.w1.weight is not MXFP4; routed experts must be");
    k3_test_dir_remove(dir);
}

static void partial_download(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_formula();
    struct k3_model *m;
    char dir[64], path[128], file[192];

    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    for (int shard = 5; shard <= 8; shard++) {
        snprintf(file, sizeof(file), "%s/model-%05d-of-000009.safetensors", path, shard);
        unlink(file);
    }
    refused(path, 0, "layers.4.self_attn.q_proj.weight (and ");
    refused(path, 0, "its file model-00005-of-000009.safetensors is not here; for part of a model use --layers");
    refused(path, 9, "9 layers were asked for");
    m = must_open(path, 4, true);
    check_model(m);
    check_experts(m, 1);
    assert_int_equal(m->cfg.n_layers, 4);
    assert_int_equal(m->n_files, 5);
    k3_model_close(m);
    m = must_open(path, 1, true); /* the dense layer alone: no expert, but a slot size that is not 0 */
    check_experts(m, 1);
    assert_true(m->expert_slot_bytes > m->expert_bytes);
    k3_model_close(m);
    k3_test_dir_remove(dir);
}

static void digests(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_formula();
    struct k3_model *a, *b;
    char dir[64], path[128], path2[128];

    k3_test_dir(dir);
    k3_test_make(&o, dir, "a", path);
    k3_test_make(&o, dir, "b", path2);
    a = must_open(path, 0, false);
    b = must_open(path2, 0, true); /* neither the directory nor want_experts matters */
    assert_memory_equal(a->digest, b->digest, 32);
    assert_int_equal(a->expert_slot_bytes, b->expert_slot_bytes);
    k3_model_close(b);
    b = must_open(path, 7, false);
    assert_memory_not_equal(a->digest, b->digest, 32);
    k3_model_close(b);
    for (int i = 0; i < 3; i++) { /* another order, another dtype, another number in config.json */
        struct k3_mk_opts x = o;

        x.scatter = i == 0;
        x.dtype = i == 1 ? K3_F16 : K3_BF16;
        x.cfg.situ_beta = i == 2 ? 5 : 4;
        k3_test_make(&x, dir, (char[]){ 'c', (char)('a' + i), 0 }, path2);
        b = must_open(path2, 0, false);
        assert_memory_not_equal(a->digest, b->digest, 32);
        k3_model_close(b);
    }
    k3_model_close(a);
    k3_test_dir_remove(dir);
}

static size_t kept_bytes(const struct k3_model *m)
{
    size_t n = sizeof(*m) + m->n_files * sizeof(*m->files) + m->n_matrices * sizeof(*m->matrices) +
               m->n_pieces * sizeof(*m->pieces) + m->n_residents * sizeof(*m->residents);

    for (size_t i = 0; i < m->n_files; i++)
        n += strlen(m->files[i].path) + 1;
    return n + k3_experts_bytes(m->experts);
}

/* All 96 shards with true headers and holes for weights: sizes and memory of the real thing. */
static void full_shape(void **state)
{
    (void)state;
    struct k3_mk_opts o = { .dtype = K3_BF16, .sparse = true, .vision = true };
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;
    struct k3_model *m;
    struct statvfs v;
    char dir[64], path[128];
    const char *dirs = path;

    k3_test_dir(dir);
    if (statvfs(dir, &v) < 0 || (uint64_t)v.f_bavail * v.f_frsize < 400u << 20) {
        k3_test_dir_remove(dir);
        skip();
    }
    k3_mk_config_released(&o.cfg);
    k3_test_make(&o, dir, "m", path);

    assert_int_equal(k3_index_open(&ix, &dirs, 1, &err), 0);
    assert_int_equal(k3_index_n_tensors(ix), 497220);
    assert_int_equal(k3_index_n_files(ix), 96);
    assert_true(k3_index_bytes(ix) <= 150 * k3_index_n_tensors(ix));
    k3_index_close(ix);

    for (int experts = 0; experts < 2; experts++) {
        struct mallinfo2 before = mallinfo2(), after;
        size_t limit = experts ? 6000000 : 1000000;

        m = must_open(path, 0, experts);
        after = mallinfo2();
        assert_true(kept_bytes(m) < limit);
        assert_true(after.uordblks + after.hblkhd - before.uordblks - before.hblkhd < limit); /* 0 under ASan */
        check_model(m);
        if (experts)
            check_experts(m, 1);
        assert_int_equal(m->n_files, 94); /* projector and tower are not opened */
        assert_int_equal(m->expert_bytes, 17547264);
        assert_int_equal(m->expert_slot_bytes, 17551360);
        /* 108,811,877,376 bytes of layers and lm_head, less what is resident by role */
        assert_int_equal(m->trunk_bytes, 108811877376 + 2348810240 - 93 * 86016ull - 69 * (3 * 196608 + 512 + 49152 + 512ull) -
                                             24 * (3072 + 1024ull) - 92 * (3584 + 7168ull));
        assert_int_equal(m->pieces[m->n_pieces - 1].off_bytes + m->pieces[m->n_pieces - 1].len_bytes,
                         m->matrices[m->n_matrices - 1].off_bytes + 2348810240);
        k3_model_close(m);
    }
    k3_test_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(demo),
        cmocka_unit_test(orderly_and_scattered),
        cmocka_unit_test(awkward_shapes),
        cmocka_unit_test(bad_tensors),
        cmocka_unit_test(packed_or_plain),
        cmocka_unit_test(partial_download),
        cmocka_unit_test(digests),
        cmocka_unit_test(full_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
