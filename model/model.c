/* Builds what one daemon keeps of a checkpoint from config and index; the index is dropped before this returns. */
#include "model/model.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_private.h"
#include "model/names.h"
#include "model/pack.h"

#define EVEN_ROWS 16 /* pieces hold a multiple of so many rows where they can: matrix kernels work on row groups */

void k3_build_find(struct k3_build *b, const char *name, const struct k3_tensor **out)
{
    *out = k3_index_find(b->ix, name);
    if (!*out && b->n_missing++ == 0)
        snprintf(b->first_missing, sizeof(b->first_missing), "%s", name);
}

int k3_build_file(struct k3_build *b, const struct k3_tensor *t, uint16_t *out, struct k3_err *err)
{
    struct k3_model *m = b->m;
    const struct k3_file *from = k3_index_file(b->ix, t->file);

    if (b->file_map[t->file] == UINT16_MAX) {
        if (m->n_files == UINT16_MAX)
            return k3_refuse(err, -E2BIG, "more than %u safetensors files in use", UINT16_MAX - 1u);
        if (k3_file_copy(&m->files[m->n_files], from, err) < 0)
            return -ENOMEM;
        b->file_map[t->file] = (uint16_t)m->n_files++;
    }
    *out = b->file_map[t->file];
    return 0;
}

const char *k3_build_shape(const struct k3_tensor *t, char out[64])
{
    size_t n = (size_t)snprintf(out, 64, "[");

    for (uint32_t i = 0; i < t->n_dims && i < K3_MAX_DIMS; i++)
        n += (size_t)snprintf(out + n, 64 - n, "%s%u", i ? ", " : "", t->shape[i]);
    snprintf(out + n, 64 - n, t->n_dims > K3_MAX_DIMS ? ", ...]" : "]");
    return out;
}

static int check_plain(const struct k3_build *b, const struct k3_tensor *t, struct k3_err *err)
{
    if (t->dtype == K3_F32 || t->dtype == K3_F16 || t->dtype == K3_BF16)
        return 0;
    return k3_refuse(err, -EINVAL, "tensor %s is %s, must be BF16, F16 or F32", k3_index_name(b->ix, t),
                     k3_dtype_name(t->dtype));
}

/* A matrix that is MXFP4 by its names would count as missing under its plain one: say what it is. */
static int check_not_packed(const struct k3_build *b, const char *name, struct k3_err *err)
{
    char packed[K3_NAME_BYTES + 8];

    snprintf(packed, sizeof(packed), "%s_packed", name);
    if (!k3_index_find(b->ix, packed))
        return 0;
    return k3_refuse(err, -EINVAL, "tensor %s: only routed experts may be MXFP4; %s must be BF16, F16 or F32", packed,
                     name);
}

static int wrong_shape(const struct k3_build *b, const struct k3_tensor *t, const char *want, struct k3_err *err)
{
    char shape[64];

    return k3_refuse(err, -EINVAL, "tensor %s has shape %s, by config.json it must be %s", k3_index_name(b->ix, t),
                     k3_build_shape(t, shape), want);
}

/* Rows of a piece.  kv_b is cut at heads while one fits; else pieces are of nearly equal size. */
static uint32_t piece_rows(const struct k3_config *c, const struct k3_matrix *x, uint64_t row_bytes)
{
    uint64_t unit = EVEN_ROWS, n_units, max_units, n_pieces;

    if (x->role == K3_W_MLA_KVB && (c->qk_nope + c->v_dim) * row_bytes <= K3_PIECE_BYTES)
        unit = c->qk_nope + c->v_dim;
    else if (unit * row_bytes > K3_PIECE_BYTES)
        unit = 1;
    n_units = (x->n_rows + unit - 1) / unit;
    max_units = K3_PIECE_BYTES / (unit * row_bytes);
    if (max_units == 0)
        k3_bug("a row of %" PRIu64 " bytes is longer than a piece", row_bytes);
    n_pieces = (n_units + max_units - 1) / max_units;
    return (uint32_t)((n_units + n_pieces - 1) / n_pieces * unit);
}

static int add_pieces(struct k3_model *m, uint32_t matrix, struct k3_err *err)
{
    struct k3_matrix *x = m->matrices + matrix;
    uint64_t row_bytes = (uint64_t)x->n_cols * k3_dtype_bytes(x->dtype);
    uint32_t step = piece_rows(&m->cfg, x, row_bytes);
    size_t n = (x->n_rows + (size_t)step - 1) / step;
    struct k3_piece *grown = reallocarray(m->pieces, m->n_pieces + n, sizeof(*grown));

    if (!grown || m->n_pieces + n > UINT32_MAX)
        return k3_fail(err, -ENOMEM, "no memory for %zu pieces", m->n_pieces + n);
    m->pieces = grown;
    x->first_piece = (uint32_t)m->n_pieces;
    x->n_pieces = (uint32_t)n;
    for (uint32_t row = 0; row < x->n_rows; row += step) {
        uint32_t n_rows = x->n_rows - row < step ? x->n_rows - row : step;

        m->pieces[m->n_pieces++] = (struct k3_piece){
            .matrix = matrix, .row = row, .n_rows = n_rows, .len_bytes = (uint32_t)(n_rows * row_bytes),
            .off_bytes = x->off_bytes + row * row_bytes,
        };
        m->trunk_bytes += n_rows * row_bytes;
    }
    return 0;
}

static int add_matrix(struct k3_build *b, int layer, enum k3_role role, struct k3_err *err)
{
    struct k3_model *m = b->m;
    struct k3_matrix x = { .layer = (int16_t)layer, .role = (uint8_t)role };
    const struct k3_tensor *t;
    char name[K3_NAME_BYTES], want[32];
    int rc;

    k3_names_matrix(name, layer, role);
    k3_names_matrix_shape(&m->cfg, role, &x.n_rows, &x.n_cols);
    k3_build_find(b, name, &t);
    if (!t)
        return check_not_packed(b, name, err);
    if ((rc = check_plain(b, t, err)) < 0)
        return rc;
    snprintf(want, sizeof(want), "[%u, %u]", x.n_rows, x.n_cols);
    if (t->n_dims != 2 || t->shape[0] != x.n_rows || t->shape[1] != x.n_cols)
        return wrong_shape(b, t, want, err);
    if ((rc = k3_build_file(b, t, &x.file, err)) < 0)
        return rc;
    x.off_bytes = t->off_bytes;
    x.dtype = t->dtype;
    m->matrices[m->n_matrices] = x;
    k3_sha256_add_text(&b->digest, name);
    for (int i = 0; i < 5; i++)
        k3_sha256_add_u64(&b->digest, (uint64_t[]){ x.file, x.off_bytes, x.dtype, x.n_rows, x.n_cols }[i]);
    return add_pieces(m, (uint32_t)m->n_matrices++, err);
}

/* [n], [1, n] and so on: dimensions of 1 do not matter.  A_log may be longer than the heads. */
static bool resident_fits(const struct k3_tensor *t, enum k3_resident_role role, const uint32_t *want, uint32_t n_want)
{
    uint32_t have[K3_MAX_DIMS], n = 0, k = 0;

    if (t->n_dims > K3_MAX_DIMS)
        return false;
    for (uint32_t i = 0; i < t->n_dims; i++)
        if (t->shape[i] != 1)
            have[n++] = t->shape[i];
    if (role == K3_R_A_LOG)
        return (n == 0 && want[0] == 1) || (n == 1 && have[0] >= want[0]);
    for (uint32_t i = 0; i < n_want; i++)
        if (want[i] != 1 && (k >= n || have[k++] != want[i]))
            return false;
    return k == n;
}

static int add_resident(struct k3_build *b, int layer, enum k3_resident_role role, struct k3_err *err)
{
    struct k3_model *m = b->m;
    struct k3_resident r = { .layer = (int16_t)layer, .role = (uint8_t)role };
    struct k3_tensor want = { 0 };
    const struct k3_tensor *t;
    char name[K3_NAME_BYTES], words[80], shape[64];
    int rc;

    k3_names_resident(name, layer, role);
    k3_build_find(b, name, &t);
    if (!t)
        return check_not_packed(b, name, err);
    want.n_dims = (uint8_t)k3_names_resident_shape(&m->cfg, role, want.shape);
    if ((rc = check_plain(b, t, err)) < 0)
        return rc;
    snprintf(words, sizeof(words), "%s%s", k3_build_shape(&want, shape), role == K3_R_A_LOG ? " or longer" : "");
    if (!resident_fits(t, role, want.shape, want.n_dims))
        return wrong_shape(b, t, words, err);
    if ((rc = k3_build_file(b, t, &r.file, err)) < 0)
        return rc;
    r.off_bytes = t->off_bytes;
    r.dtype = t->dtype;
    r.n = k3_names_resident_len(&m->cfg, role);
    r.pos = m->resident_bytes;
    m->resident_bytes += ((uint64_t)r.n * sizeof(float) + 63) / 64 * 64;
    m->residents[m->n_residents++] = r;
    k3_sha256_add_text(&b->digest, name);
    for (int i = 0; i < 4; i++)
        k3_sha256_add_u64(&b->digest, (uint64_t[]){ r.file, r.off_bytes, r.dtype, r.n }[i]);
    return 0;
}

static int add_embedding(struct k3_build *b, struct k3_err *err)
{
    struct k3_model *m = b->m;
    const struct k3_tensor *t;
    char want[80];
    int rc;

    k3_build_find(b, K3_EMBED_NAME, &t);
    if (!t)
        return check_not_packed(b, K3_EMBED_NAME, err);
    snprintf(want, sizeof(want), "[vocab_size %u, hidden_size %u]", m->cfg.vocab, m->cfg.hidden);
    if ((rc = check_plain(b, t, err)) < 0)
        return rc;
    if (t->n_dims != 2 || t->shape[0] != m->cfg.vocab || t->shape[1] != m->cfg.hidden)
        return wrong_shape(b, t, want, err);
    if ((rc = k3_build_file(b, t, &m->embed_file, err)) < 0)
        return rc;
    m->embed_dtype = t->dtype;
    m->embed_off_bytes = t->off_bytes;
    for (int i = 0; i < 3; i++)
        k3_sha256_add_u64(&b->digest, (uint64_t[]){ m->embed_file, m->embed_off_bytes, m->embed_dtype }[i]);
    return 0;
}

static int add_all(struct k3_build *b, struct k3_err *err)
{
    const struct k3_config *c = &b->m->cfg;
    int rc = 0;

    for (int l = 0; l <= (int)c->n_layers && rc == 0; l++) {
        int layer = l < (int)c->n_layers ? l : -1;

        for (int r = 0; r < K3_N_ROLES && rc == 0; r++)
            if (k3_names_has_matrix(c, layer, r))
                rc = add_matrix(b, layer, r, err);
        for (int r = 0; r < K3_N_RESIDENT_ROLES && rc == 0; r++)
            if (k3_names_has_resident(c, layer, r))
                rc = add_resident(b, layer, r, err);
    }
    return rc == 0 ? add_embedding(b, err) : rc;
}

static int say_missing(const struct k3_build *b, struct k3_err *err)
{
    char file[256], others[64] = "";

    if (b->n_missing > 1)
        snprintf(others, sizeof(others), " (and %" PRIu64 " others)", b->n_missing - 1);
    if (k3_index_listed_in(b->ix, b->first_missing, file, sizeof(file)))
        return k3_refuse(err, -ENOENT, "tensor %s%s is missing: its file %s is not here; for part of a model use --layers",
                         b->first_missing, others, file);
    return k3_refuse(err, -ENOENT,
                     "tensor %s%s is missing from all %zu safetensors files; config.json asks for it (--layers N runs the "
                     "first N layers of a partial download)",
                     b->first_missing, others, k3_index_n_files(b->ix));
}

static void digest_config(struct k3_sha256 *d, const struct k3_config *c)
{
    const uint64_t words[] = { c->hidden, c->n_layers_model, c->n_layers, c->vocab, c->kda_heads, c->kda_dim,
                               c->conv_taps, c->mla_heads, c->q_lora, c->kv_lora, c->qk_nope, c->qk_rope, c->v_dim,
                               c->mla_gate, c->dense_inter, c->first_dense, c->n_experts, c->top_k, c->n_shared,
                               c->moe_inter, c->latent, c->latent_norm, c->renormalize, c->res_block };
    const float floats[] = { c->rms_eps, c->latent_eps, c->situ_beta, c->situ_linear_beta, c->gate_lower_bound,
                             c->routed_scale };

    k3_sha256_add_text(d, "k3 model 1");
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        k3_sha256_add_u64(d, words[i]);
    k3_sha256_add(d, floats, sizeof(floats));
    k3_sha256_add(d, c->kind, c->n_layers_model);
}

static int allocate(struct k3_build *b, struct k3_err *err)
{
    struct k3_model *m = b->m;
    size_t n_files = k3_index_n_files(b->ix), n_layers = m->cfg.n_layers;

    m->files = calloc(n_files, sizeof(*m->files));
    m->matrices = calloc(n_layers * K3_N_ROLES + 1, sizeof(*m->matrices));
    m->residents = calloc((n_layers + 1) * K3_N_RESIDENT_ROLES, sizeof(*m->residents));
    b->file_map = malloc(n_files * sizeof(*b->file_map));
    if (!m->files || !m->matrices || !m->residents || !b->file_map)
        return k3_fail(err, -ENOMEM, "no memory for a model of %zu layers", n_layers);
    memset(b->file_map, 0xff, n_files * sizeof(*b->file_map));
    return 0;
}

/* realloc to what is used; keeping the larger block when that fails is no harm. */
static void *shrink(void *p, size_t n, size_t one)
{
    void *q = n ? realloc(p, n * one) : p;

    return q ? q : p;
}

/* The devices, then the model directory. */
static int open_index(struct k3_build *b, const struct k3_model_opts *opts, struct k3_err *err)
{
    const char **dirs = malloc(opts->n_dirs * sizeof(*dirs));
    int rc;

    if (!dirs)
        return k3_fail(err, -ENOMEM, "no memory for the names of %zu directories", opts->n_dirs);
    for (size_t i = 0; i < opts->n_dirs; i++)
        dirs[i] = opts->dirs[(i + 1) % opts->n_dirs];
    rc = k3_index_open(&b->ix, dirs, opts->n_dirs, err);
    free(dirs);
    return rc;
}

/* From the configuration and the index, which are there.  opts NULL: no experts' places, no packed trunk. */
static int build(struct k3_build *b, const struct k3_model_opts *opts, struct k3_err *err)
{
    struct k3_model *m = b->m;
    int rc = allocate(b, err);

    if (rc < 0)
        return rc;
    k3_sha256_init(&b->digest);
    digest_config(&b->digest, &m->cfg);
    if ((rc = add_all(b, err)) < 0 || (rc = k3_experts_build(b, opts && opts->want_experts, err)) < 0)
        return rc;
    if (b->n_missing)
        return say_missing(b, err);
    for (size_t i = 0; i < m->n_files; i++) {
        k3_sha256_add_text(&b->digest, k3_index_base_name(m->files[i].path));
        k3_sha256_add_u64(&b->digest, m->files[i].len_bytes);
    }
    k3_sha256_end(&b->digest, m->digest);
    if (opts && !opts->no_pack && (rc = k3_pack_find(m, opts, err)) < 0)
        return rc;
    m->files = shrink(m->files, m->n_files, sizeof(*m->files));
    m->matrices = shrink(m->matrices, m->n_matrices, sizeof(*m->matrices));
    m->residents = shrink(m->residents, m->n_residents, sizeof(*m->residents));
    return 0;
}

/* Frees what was only for building; the model goes to *out or is freed. */
static int finish(struct k3_build *b, int rc, struct k3_model **out)
{
    k3_index_close(b->ix);
    free(b->file_map);
    malloc_trim(0); /* the index was most of the heap; give it back now, not when this daemon ends */
    if (rc < 0)
        k3_model_close(b->m);
    else
        *out = b->m;
    return rc;
}

void k3_model_dirs(struct k3_model_opts *o, const char *dirs[K3_MODEL_DIRS], const char *model,
                   const struct k3_str_list *devices)
{
    o->dirs = dirs;
    o->n_dirs = 0;
    dirs[o->n_dirs++] = model;
    for (size_t i = 0; i < devices->n; i++)
        dirs[o->n_dirs++] = devices->item[i];
}

int k3_model_open(struct k3_model **out, const struct k3_model_opts *opts, struct k3_err *err)
{
    struct k3_build b = { .m = calloc(1, sizeof(*b.m)) };
    int rc;

    if (!b.m)
        return k3_fail(err, -ENOMEM, "no memory for a model");
    if (opts->n_dirs < 1)
        rc = k3_refuse(err, -EINVAL, "no model directory was given (--model DIR)");
    else if ((rc = k3_config_read(&b.m->cfg, opts->dirs[0], opts->n_layers, err)) == 0 &&
             (rc = open_index(&b, opts, err)) == 0)
        rc = build(&b, opts, err);
    return finish(&b, rc, out);
}

int k3_model_of_index(struct k3_model **out, const struct k3_config *cfg, struct k3_index *ix, struct k3_err *err)
{
    struct k3_build b = { .m = calloc(1, sizeof(*b.m)), .ix = ix };
    int rc;

    if (!b.m) {
        k3_index_close(ix);
        return k3_fail(err, -ENOMEM, "no memory for a model");
    }
    b.m->cfg = *cfg;
    rc = build(&b, NULL, err);
    return finish(&b, rc, out);
}

void k3_model_close(struct k3_model *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n_files; i++)
        k3_file_free(&m->files[i]);
    free(m->files);
    free(m->matrices);
    free(m->pieces);
    free(m->residents);
    free(m->pack_crc);
    k3_experts_free(m->experts);
    free(m);
}

/* Layers ascend, -1 is last. */
static long first_of(const void *base, size_t n, size_t one, size_t layer_off, int layer)
{
    unsigned want = (unsigned)layer; /* -1 becomes the largest */
    size_t lo = 0, hi = n;

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        int16_t at;

        memcpy(&at, (const char *)base + mid * one + layer_off, sizeof(at));
        if ((unsigned)at < want)
            lo = mid + 1;
        else
            hi = mid;
    }
    return (long)lo;
}

long k3_model_resident(const struct k3_model *m, int layer, enum k3_resident_role role)
{
    size_t i = (size_t)first_of(m->residents, m->n_residents, sizeof(*m->residents),
                                offsetof(struct k3_resident, layer), layer);

    for (; i < m->n_residents && m->residents[i].layer == layer; i++)
        if (m->residents[i].role == role)
            return (long)i;
    return -1;
}

long k3_model_matrix(const struct k3_model *m, int layer, enum k3_role role)
{
    size_t i = (size_t)first_of(m->matrices, m->n_matrices, sizeof(*m->matrices), offsetof(struct k3_matrix, layer),
                                layer);

    for (; i < m->n_matrices && m->matrices[i].layer == layer; i++)
        if (m->matrices[i].role == role)
            return (long)i;
    return -1;
}
