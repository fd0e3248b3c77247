/* Which tensors a checkpoint has, in which shard and where in it.  Orderly layout as in the released files: layer L in
 * shard L + 1, F32 before BF16 before U8, names in string order within each (spec/model.md 3.6). */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/names.h"
#include "tools/mkmodel.h"

/* gain: of the formula.  scale: random weights have sigma scale / sqrt(columns), so outputs of unit inputs have about
 * that size. */
static const struct { float gain, scale; } matrices[K3_N_ROLES] = {
    [K3_W_KDA_Q] = { .25f, 1 },       [K3_W_KDA_K] = { .25f, 1 },        [K3_W_KDA_V] = { .25f, 1 },
    [K3_W_KDA_FA] = { .25f, 1 },      [K3_W_KDA_FB] = { .5f, 1 },        [K3_W_KDA_B] = { .25f, 1 },
    [K3_W_KDA_G] = { .25f, 1 },       [K3_W_KDA_O] = { .5f, 1 },         [K3_W_MLA_QA] = { .25f, 1 },
    [K3_W_MLA_QB] = { .5f, 1.5f },    [K3_W_MLA_KVA] = { .25f, 1 },      [K3_W_MLA_KVB] = { .5f, 1 },
    [K3_W_MLA_G] = { .25f, 1 },       [K3_W_MLA_O] = { .5f, 1.5f },      [K3_W_DENSE_GATE] = { .5f, 1.5f },
    [K3_W_DENSE_UP] = { .5f, 1.5f },  [K3_W_DENSE_DOWN] = { .25f, 1 },   [K3_W_ROUTER] = { .25f, 1.5f },
    [K3_W_LATENT_DOWN] = { .5f, 1 },  [K3_W_SHARED_GATE] = { .5f, 1.5f },[K3_W_SHARED_UP] = { .5f, 1.5f },
    [K3_W_SHARED_DOWN] = { .125f, 1 },[K3_W_LATENT_UP] = { .25f, 1 },    [K3_W_LM_HEAD] = { .25f, 2 },
};

/* F32 in the released files; the rest is BF16. */
static bool is_f32(enum k3_resident_role role)
{
    return (role >= K3_R_Q_CONV && role <= K3_R_O_NORM) || role == K3_R_ROUTER_BIAS;
}

static int add(struct k3_mk_plan *p, const char *name, struct k3_mk_tensor t, struct k3_err *err)
{
    size_t name_bytes = strlen(name) + 1;
    uint64_t len_bytes = k3_dtype_bytes(t.dtype);

    if (p->n_tensors == p->cap_tensors) {
        size_t cap = p->cap_tensors + p->cap_tensors / 2 + 1024;
        struct k3_mk_tensor *grown = reallocarray(p->tensors, cap, sizeof(*grown));

        if (!grown)
            return k3_fail(err, -ENOMEM, "no memory for %zu tensors", cap);
        p->tensors = grown;
        p->cap_tensors = cap;
    }
    if (p->cap_names - p->names_bytes < name_bytes) {
        size_t cap = p->cap_names + p->cap_names / 2 + 65536;
        char *grown = cap <= UINT32_MAX ? realloc(p->names, cap) : NULL;

        if (!grown)
            return k3_fail(err, -ENOMEM, "no memory for %zu bytes of names", cap);
        p->names = grown;
        p->cap_names = cap;
    }
    for (uint32_t i = 0; i < t.n_dims; i++)
        if (__builtin_mul_overflow(len_bytes, (uint64_t)t.shape[i], &len_bytes))
            return k3_refuse(err, -EINVAL, "tensor %s is too large", name);
    t.len_bytes = len_bytes;
    t.key = k3_mk_fnv(name);
    t.name_off = (uint32_t)p->names_bytes;
    memcpy(p->names + p->names_bytes, name, name_bytes);
    p->names_bytes += name_bytes;
    p->total_bytes += len_bytes;
    p->tensors[p->n_tensors++] = t;
    return 0;
}

static int add_matrix(struct k3_mk_plan *p, int layer, enum k3_role role, uint16_t shard, struct k3_err *err)
{
    struct k3_mk_tensor t = { .shard = shard, .dtype = p->opts.dtype, .n_dims = 2, .n_used = UINT32_MAX };
    char name[K3_NAME_BYTES];

    k3_names_matrix(name, layer, role);
    k3_names_matrix_shape(&p->opts.cfg, role, &t.shape[0], &t.shape[1]);
    t.formula_gain = matrices[role].gain;
    t.sigma = matrices[role].scale / sqrtf((float)t.shape[1]);
    return add(p, name, t, err);
}

static int add_resident(struct k3_mk_plan *p, int layer, enum k3_resident_role role, uint16_t shard,
                        struct k3_err *err)
{
    const struct k3_config *c = &p->opts.cfg;
    struct k3_mk_tensor t = { .shard = shard, .n_used = UINT32_MAX };
    char name[K3_NAME_BYTES];

    k3_names_resident(name, layer, role);
    t.dtype = is_f32(role) ? K3_F32 : p->opts.dtype;
    t.n_dims = (uint8_t)k3_names_resident_shape(c, role, t.shape);
    t.formula_base = 1; /* norms, unless said below */
    t.formula_gain = .25f;
    t.mean = 1;
    t.sigma = .1f;
    switch (role) {
    case K3_R_ATTN_RES_PROJ:
    case K3_R_MLP_RES_PROJ:
    case K3_R_OUT_RES_PROJ:
        t.formula_base = t.mean = 0;
        t.sigma = 1 / sqrtf((float)c->hidden);
        break;
    case K3_R_Q_CONV:
    case K3_R_K_CONV:
    case K3_R_V_CONV:
        t.formula_base = t.mean = 0;
        t.formula_gain = t.sigma = .5f;
        break;
    case K3_R_A_LOG: /* the released one is as long as a head is wide, and zero after the heads */
        t.formula_base = 0;
        t.formula_gain = 1;
        t.mean = .3f;
        t.sigma = .4f;
        t.n_used = c->kda_heads;
        t.shape[0] = c->kda_heads > c->kda_dim ? c->kda_heads : c->kda_dim;
        break;
    case K3_R_DT_BIAS:
        t.formula_base = t.mean = 0;
        t.formula_gain = 2;
        t.sigma = 1;
        break;
    case K3_R_ROUTER_BIAS:
        t.formula_base = t.mean = 0;
        t.formula_gain = .25f;
        t.sigma = .05f;
        break;
    default:
        break;
    }
    return add(p, name, t, err);
}

/* E2M1 codes drawn evenly have a mean square of 8.5625, two neighbouring exponents b and b + 1 one of 2.5 * 4^b: b is
 * what makes the variance of a weight about 1 / columns. */
static float scale_byte(uint32_t n_cols)
{
    return roundf(127 - log2f(8.5625f * 2.5f * (float)n_cols) / 2);
}

static int add_experts(struct k3_mk_plan *p, int layer, uint16_t shard, struct k3_err *err)
{
    const struct k3_config *c = &p->opts.cfg;
    char name[K3_NAME_BYTES];
    int rc = 0;

    for (uint32_t e = 0; e < c->n_experts; e++)
        for (uint32_t i = 0; i < K3_EXPERT_TENSORS && rc == 0; i++) {
            struct k3_mk_tensor t = { .shard = shard, .dtype = K3_U8, .n_dims = 2, .n_used = UINT32_MAX };

            k3_names_expert(name, layer, e, i);
            k3_names_expert_shape(c, i, &t.shape[0], &t.shape[1]);
            t.values = i % 2 ? K3_MK_SCALE : K3_MK_PACKED;
            t.sigma = i % 2 ? scale_byte(t.shape[1] * 32) : 0;
            rc = add(p, name, t, err);
        }
    return rc;
}

static int add_layer(struct k3_mk_plan *p, int layer, uint16_t shard, struct k3_err *err)
{
    const struct k3_config *c = &p->opts.cfg;
    int rc = 0;

    for (int r = 0; r < K3_N_ROLES && rc == 0; r++)
        if (k3_names_has_matrix(c, layer, r))
            rc = add_matrix(p, layer, r, shard, err);
    for (int r = 0; r < K3_N_RESIDENT_ROLES && rc == 0; r++)
        if (k3_names_has_resident(c, layer, r))
            rc = add_resident(p, layer, r, shard, err);
    if (rc == 0 && layer >= 0 && !k3_layer_is_dense(c, (uint32_t)layer))
        rc = add_experts(p, layer, shard, err);
    if (rc == 0 && layer < 0) {
        struct k3_mk_tensor t = { .shard = shard, .dtype = p->opts.dtype, .n_dims = 2, .n_used = UINT32_MAX,
                                  .shape = { c->vocab, c->hidden }, .formula_gain = 1, .sigma = 1 };
        rc = add(p, K3_EMBED_NAME, t, err);
    }
    return rc;
}

/* spec/model.md 3.4; text inference skips them, but the released model has them. */
static int add_vision(struct k3_mk_plan *p, uint16_t shard, struct k3_err *err)
{
    static const struct { const char *name; uint8_t tower, n_dims; uint32_t shape[4]; } once[] = {
        { "mm_projector.proj.0.weight", 0, 2, { 4096, 4096 } },
        { "mm_projector.proj.2.weight", 0, 2, { 7168, 4096 } },
        { "mm_projector.post_norm.weight", 0, 1, { 7168 } },
        { "vision_tower.patch_embed.proj.weight", 1, 4, { 1024, 3, 14, 14 } },
        { "vision_tower.patch_embed.pos_emb.weight", 1, 3, { 64, 64, 1024 } },
        { "vision_tower.encoder.final_layernorm.weight", 1, 1, { 1024 } },
    }, block[] = {
        { "norm0.weight", 1, 1, { 1024 } },      { "norm1.weight", 1, 1, { 1024 } },
        { "wqkv.weight", 1, 2, { 4608, 1024 } }, { "wo.weight", 1, 2, { 1024, 1536 } },
        { "mlp.fc0.weight", 1, 2, { 4096, 1024 } }, { "mlp.fc1.weight", 1, 2, { 1024, 4096 } },
    };
    struct k3_mk_tensor t = { .dtype = K3_BF16, .n_used = UINT32_MAX, .sigma = .02f };
    char name[K3_NAME_BYTES];
    int rc = 0;

    for (size_t i = 0; i < sizeof(once) / sizeof(once[0]) && rc == 0; i++) {
        t.shard = (uint16_t)(shard + once[i].tower);
        t.n_dims = once[i].n_dims;
        memcpy(t.shape, once[i].shape, sizeof(t.shape));
        rc = add(p, once[i].name, t, err);
    }
    for (int b = 0; b < 27; b++)
        for (size_t i = 0; i < sizeof(block) / sizeof(block[0]) && rc == 0; i++) {
            t.n_dims = block[i].n_dims;
            memcpy(t.shape, block[i].shape, sizeof(t.shape));
            snprintf(name, sizeof(name), "vision_tower.encoder.blocks.%d.%s", b, block[i].name);
            rc = add(p, name, t, err);
        }
    return rc;
}

static int dtype_rank(uint8_t dtype)
{
    return dtype == K3_F32 ? 0 : dtype == K3_U8 ? 2 : 1;
}

static int orderly(const void *a, const void *b, void *arg)
{
    const struct k3_mk_plan *p = arg;
    const struct k3_mk_tensor *x = p->tensors + *(const uint32_t *)a, *y = p->tensors + *(const uint32_t *)b;

    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    if (dtype_rank(x->dtype) != dtype_rank(y->dtype))
        return dtype_rank(x->dtype) - dtype_rank(y->dtype);
    return strcmp(p->names + x->name_off, p->names + y->name_off);
}

static uint64_t shuffle_key(const struct k3_mk_plan *p, const struct k3_mk_tensor *t, uint64_t salt)
{
    return k3_mk_mix(t->key ^ k3_mk_mix(p->opts.seed + salt));
}

static int scattered(const void *a, const void *b, void *arg)
{
    const struct k3_mk_plan *p = arg;
    const struct k3_mk_tensor *x = p->tensors + *(const uint32_t *)a, *y = p->tensors + *(const uint32_t *)b;
    uint64_t kx = shuffle_key(p, x, 1), ky = shuffle_key(p, y, 1);

    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    return kx < ky ? -1 : kx > ky;
}

static int place(struct k3_mk_plan *p, struct k3_err *err)
{
    p->order = calloc(p->n_tensors, sizeof(*p->order));
    p->shards = calloc(p->n_shards, sizeof(*p->shards));
    if (!p->order || !p->shards)
        return k3_fail(err, -ENOMEM, "no memory for the order of %zu tensors", p->n_tensors);
    for (size_t i = 0; i < p->n_tensors; i++) {
        p->order[i] = (uint32_t)i;
        if (p->opts.scatter)
            p->tensors[i].shard = (uint16_t)(shuffle_key(p, p->tensors + i, 2) % p->n_shards);
    }
    qsort_r(p->order, p->n_tensors, sizeof(*p->order), p->opts.scatter ? scattered : orderly, p);
    for (size_t i = 0; i < p->n_tensors; i++) {
        struct k3_mk_tensor *t = p->tensors + p->order[i];
        struct k3_mk_shard *s = p->shards + t->shard;

        if (s->n++ == 0)
            s->first = i;
        t->off_bytes = s->data_bytes;
        s->data_bytes += t->len_bytes;
    }
    return 0;
}

int k3_mk_plan_build(struct k3_mk_plan *p, const struct k3_mk_opts *opts, struct k3_err *err)
{
    uint32_t n_layers = opts->cfg.n_layers, n_text = opts->n_shards ? opts->n_shards : n_layers + 1;
    int rc = 0;

    memset(p, 0, sizeof(*p));
    p->opts = *opts;
    p->n_shards = n_text + (opts->vision ? 2 : 0);
    if (!opts->scatter && n_text > n_layers + 1)
        return k3_refuse(err, -EINVAL, "--shards %u: %u layers make at most %u shards", n_text, n_layers, n_layers + 1);
    for (uint32_t l = 0; l < n_layers && rc == 0; l++)
        rc = add_layer(p, (int)l, (uint16_t)((uint64_t)l * (n_text - 1) / n_layers), err);
    if (rc == 0)
        rc = add_layer(p, -1, (uint16_t)(n_text - 1), err);
    if (rc == 0 && opts->vision)
        rc = add_vision(p, (uint16_t)n_text, err);
    if (rc == 0)
        rc = place(p, err);
    if (rc < 0)
        k3_mk_plan_free(p);
    return rc;
}

void k3_mk_plan_free(struct k3_mk_plan *p)
{
    free(p->tensors);
    free(p->names);
    free(p->order);
    free(p->shards);
    memset(p, 0, sizeof(*p));
}

const char *k3_mk_name(const struct k3_mk_plan *p, const struct k3_mk_tensor *t)
{
    return p->names + t->name_off;
}

void k3_mk_shard_name(const struct k3_mk_plan *p, uint32_t shard, char out[64])
{
    snprintf(out, 64, "model-%05u-of-%06u.safetensors", shard + 1, p->n_shards);
}

/* What another writer might do: keys in another order, white space, an escape in a name. */
static void put_odd_entry(FILE *f, const char *name, const struct k3_mk_tensor *t, const char *shape, uint64_t how)
{
    const char *dtype = k3_dtype_name(t->dtype);

    if (how % 3 == 0)
        fprintf(f, "\"%s\": { \"shape\": [%s], \"data_offsets\": [ %" PRIu64 ", %" PRIu64 " ],\n \"dtype\": \"%s\" }", name,
                shape, t->off_bytes, t->off_bytes + t->len_bytes, dtype);
    else if (how % 3 == 1)
        fprintf(f, "\"\\u%04x%s\":{\"data_offsets\":[%" PRIu64 ",%" PRIu64 "],\"dtype\":\"%s\",\"shape\":[%s]}",
                (unsigned)name[0], name + 1, t->off_bytes, t->off_bytes + t->len_bytes, dtype, shape);
    else
        fprintf(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", name, dtype, shape,
                t->off_bytes, t->off_bytes + t->len_bytes);
}

static void put_entry(FILE *f, const struct k3_mk_plan *p, const struct k3_mk_tensor *t)
{
    const char *dtype = k3_dtype_name(t->dtype);
    char shape[64];
    int n = 0;

    for (uint32_t i = 0; i < t->n_dims; i++)
        n += snprintf(shape + n, sizeof(shape) - (size_t)n, "%s%u", i ? "," : "", t->shape[i]);
    if (p->opts.scatter)
        put_odd_entry(f, k3_mk_name(p, t), t, shape, shuffle_key(p, t, 3));
    else
        fprintf(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", k3_mk_name(p, t),
                dtype, shape, t->off_bytes, t->off_bytes + t->len_bytes);
}

int k3_mk_header(const struct k3_mk_plan *p, uint32_t shard, char **out, size_t *len_bytes, struct k3_err *err)
{
    const struct k3_mk_shard *s = p->shards + shard;
    size_t len = 0;
    char *text = NULL;
    FILE *f = open_memstream(&text, &len);

    if (!f)
        return k3_fail(err, -ENOMEM, "no memory for a header");
    fprintf(f, "%8s{%s", "", p->opts.scatter ? "\"__metadata__\":{\"format\":\"pt\",\"made by\":\"k3\\\\mkmodel\"}" : "");
    for (size_t i = 0; i < s->n; i++) {
        /* scatter: backwards, so that the order of names is not that of offsets */
        size_t at = s->first + (p->opts.scatter ? s->n - 1 - i : i);

        if (i || p->opts.scatter)
            fputc(',', f);
        put_entry(f, p, p->tensors + p->order[at]);
    }
    fputc('}', f);
    fflush(f);
    while (len % 8) {
        fputc(' ', f);
        fflush(f);
    }
    if (fclose(f) != 0) {
        free(text);
        return k3_fail(err, -ENOMEM, "no memory for a header");
    }
    for (int i = 0; i < 8; i++)
        text[i] = (char)((len - 8) >> (8 * i));
    *out = text;
    *len_bytes = len;
    return 0;
}

int k3_mk_list(const struct k3_mk_plan *p, FILE *f)
{
    char file[64];

    fprintf(f, "{\n  \"metadata\": {\n    \"total_size\": %" PRIu64 "\n  },\n  \"weight_map\": {", p->total_bytes);
    for (size_t i = 0; i < p->n_tensors; i++) {
        k3_mk_shard_name(p, p->tensors[i].shard, file);
        fprintf(f, "%s\n    \"%s\": \"%s\"", i ? "," : "", k3_mk_name(p, p->tensors + i), file);
    }
    fprintf(f, "\n  }\n}");
    return ferror(f) ? -1 : 0;
}
