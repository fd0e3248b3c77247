#include "tests/unit/file_source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-computed/ops.h"

struct k3_file_source {
    struct k3_source src;
    const struct k3_model *m;
    int *fd;
    float *resident;
    struct { char *bytes; size_t cap; } block[K3_TRUNK_HELD]; /* as large as the largest asked for so far */
    uint32_t n_asked, first_held, n_held, n_ready; /* n_ready: what source_ready said last */
    uint32_t piece, row; /* where the stream is */
    uint32_t layer, n_experts, next_expert;
    uint16_t *experts;
    char *expert;
    bool expert_held, experts_open;
    void **pinned; /* per piece; NULL: none is */
    uint64_t fail_block, fail_expert;
    struct k3_file_source_counts counts;
};

static int read_at(struct k3_file_source *f, uint16_t file, uint64_t off_bytes, void *to,
                   uint64_t n, struct k3_err *err)
{
    char *p = to;

    while (n > 0) {
        ssize_t got = pread(f->fd[file], p, n, (off_t)off_bytes);

        if (got <= 0)
            return k3_untrusted(err, got < 0 ? -errno : -EIO,
                                "%s: %llu bytes at %llu could not be read", f->m->files[file].path,
                                (unsigned long long)n, (unsigned long long)off_bytes);
        p += got;
        off_bytes += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return 0;
}

static int source_rows(void *self, uint32_t piece, uint32_t row, uint32_t n_rows, const void **rows,
                       struct k3_err *err)
{
    struct k3_file_source *f = self;
    const struct k3_config *c = &f->m->cfg;
    const struct k3_piece *p = &f->m->pieces[piece];
    const struct k3_matrix *mat = &f->m->matrices[p->matrix];
    uint32_t unit = mat->role == K3_W_MLA_KVB ? c->qk_nope + c->v_dim : 1;
    uint64_t row_bytes = (uint64_t)mat->n_cols * k3_dtype_bytes(mat->dtype), n = row_bytes * n_rows;
    uint64_t off = p->off_bytes + row_bytes * row;
    uint32_t slot;
    char *to;

    if (f->n_held == K3_TRUNK_HELD || (f->n_held && n_rows > f->n_ready))
        k3_bug("a block of %s is asked for while %u are held and %u rows are ready", k3_role_name(mat->role), f->n_held,
               f->n_ready);
    if (piece != f->piece || row != f->row)
        k3_bug("piece %u row %u is asked for, the stream is at piece %u row %u", piece, row,
               f->piece, f->row);
    if (n_rows == 0 || n_rows > p->n_rows - row || n_rows % unit ||
        (n > f->src.block_bytes && n_rows > unit && n_rows > f->n_ready))
        k3_bug("block of %u rows (%llu bytes) of %s", n_rows, (unsigned long long)n,
               k3_role_name(mat->role));
    if (f->fail_block && --f->fail_block == 0)
        return k3_untrusted(err, -EIO, "%s of layer %d could not be read (asked for by the test)",
                            k3_role_name(mat->role), mat->layer);
    f->n_ready = 0;
    slot = (f->first_held + f->n_held) % K3_TRUNK_HELD;
    if (n + 64 > f->block[slot].cap) {
        free(f->block[slot].bytes);
        f->block[slot].cap = n + 64;
        f->block[slot].bytes = malloc(n + 64);
        if (!f->block[slot].bytes)
            return k3_fail(err, -ENOMEM, "block of %llu bytes", (unsigned long long)n);
    }
    to = f->block[slot].bytes + off % 64; /* as misaligned as the ring would have it */
    if (read_at(f, mat->file, off, to, n, err) < 0)
        return err ? err->code : -EIO;
    f->n_held++;
    f->row += n_rows;
    if (f->row == p->n_rows) {
        f->piece++;
        f->row = 0;
    }
    f->counts.blocks++;
    f->counts.block_bytes += n;
    *rows = to;
    return 0;
}

static void source_done(void *self)
{
    struct k3_file_source *f = self;

    if (!f->n_held)
        k3_bug("done without a block");
    memset(f->block[f->first_held].bytes, 0xff, f->block[f->first_held].cap); /* NaN in every dtype */
    f->first_held = (f->first_held + 1) % K3_TRUNK_HELD;
    f->n_held--;
}

/* Sometimes nothing, sometimes a few rows, sometimes all of the piece: whatever a stream may have. */
static uint32_t source_ready(void *self, uint32_t piece, uint32_t row)
{
    struct k3_file_source *f = self;
    uint32_t left = f->m->pieces[piece].n_rows - row;

    f->n_asked = f->n_asked * 1103515245u + 12345u;
    switch (f->n_asked >> 16 & 3) {
    case 0: f->n_ready = 0; break;
    case 1: f->n_ready = (left + 2) / 3; break;
    default: f->n_ready = left;
    }
    return f->n_ready;
}

static int source_next_pass(void *self, struct k3_err *err)
{
    struct k3_file_source *f = self;

    (void)err;
    if (f->n_held || f->experts_open)
        k3_bug("the pass ends while a block or a layer's experts are held");
    f->piece = f->row = 0;
    f->counts.passes++;
    return 0;
}

static int source_failed_pass(void *self, struct k3_err *err)
{
    struct k3_file_source *f = self;

    (void)err;
    if (f->n_held || f->experts_open)
        k3_bug("the pass is given up while a block or a layer's experts are held");
    f->piece = f->row = 0;
    f->counts.failed_passes++;
    return 0;
}

static int source_experts_begin(void *self, uint32_t layer, const uint16_t *experts, uint32_t n,
                                struct k3_err *err)
{
    struct k3_file_source *f = self;

    (void)err;
    if (f->experts_open || n == 0 || n > f->m->cfg.n_experts)
        k3_bug("%u experts of layer %u begun", n, layer);
    for (uint32_t i = 0; i < n; i++)
        if (experts[i] >= f->m->cfg.n_experts || (i && experts[i] <= experts[i - 1]))
            k3_bug("expert %u of layer %u is out of order", experts[i], layer);
    memcpy(f->experts, experts, n * sizeof(*experts));
    f->layer = layer;
    f->n_experts = n;
    f->next_expert = 0;
    f->experts_open = true;
    return 0;
}

static int source_expert_next(void *self, struct k3_expert_view *out, struct k3_err *err)
{
    struct k3_file_source *f = self;
    struct k3_expert_place place;
    uint64_t at[K3_EXPERT_TENSORS], bytes = 0;
    uint16_t e;
    int rc;

    if (!f->experts_open || f->expert_held || f->next_expert == f->n_experts)
        k3_bug("expert %u of %u asked for in layer %u", f->next_expert, f->n_experts, f->layer);
    e = f->experts[f->next_expert++];
    if (f->fail_expert && --f->fail_expert == 0)
        return k3_untrusted(err, -EIO,
                            "expert %u of layer %u could not be read (asked for by the test)", e,
                            f->layer);
    if ((rc = k3_model_expert(f->m, f->layer, e, &place)) < 0)
        return k3_fail(err, rc, "expert %u of layer %u is nowhere", e, f->layer);
    for (uint32_t i = 0; i < place.n_ranges; i++) {
        at[i] = bytes;
        bytes += place.range[i].len_bytes;
    }
    f->expert = malloc(bytes);
    if (!f->expert)
        return k3_fail(err, -ENOMEM, "expert of %llu bytes", (unsigned long long)bytes);
    for (uint32_t i = 0; i < place.n_ranges; i++)
        if ((rc = read_at(f, place.range[i].file, place.range[i].off_bytes, f->expert + at[i],
                          place.range[i].len_bytes, err)) < 0)
            return rc;
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++)
        out->tensor[t] =
            (const uint8_t *)f->expert + at[place.tensor_range[t]] + place.tensor_off[t];
    out->slot = 0;
    out->layer = f->layer;
    out->expert = e;
    out->hit = false;
    f->expert_held = true;
    f->counts.experts++;
    return 0;
}

static void drop_expert(struct k3_file_source *f)
{
    free(f->expert);
    f->expert = NULL;
    f->expert_held = false;
    if (f->next_expert == f->n_experts)
        f->experts_open = false;
}

static void source_expert_release(void *self, const struct k3_expert_view *v)
{
    struct k3_file_source *f = self;

    if (!f->expert_held || v->expert != f->experts[f->next_expert - 1])
        k3_bug("release of expert %u, which is not held", v->expert);
    drop_expert(f);
}

static void source_experts_abandon(void *self)
{
    struct k3_file_source *f = self;

    if (!f->experts_open || f->expert_held)
        k3_bug("abandon with nothing begun or with an expert held");
    f->next_expert = f->n_experts;
    drop_expert(f);
    f->counts.abandoned++;
}

static int source_embed(void *self, uint32_t token, float *out, struct k3_err *err)
{
    struct k3_file_source *f = self;
    const struct k3_model *m = f->m;
    size_t row_bytes = m->cfg.hidden * k3_dtype_bytes(m->embed_dtype);
    char *row = malloc(row_bytes);
    int rc = row ? read_at(f, m->embed_file, m->embed_off_bytes + token * (uint64_t)row_bytes, row,
                           row_bytes, err)
                 : -ENOMEM;

    if (rc == 0)
        k3_widen(out, row, m->embed_dtype, m->cfg.hidden);
    free(row);
    return rc;
}

static int load_resident(struct k3_file_source *f, struct k3_err *err)
{
    const struct k3_model *m = f->m;

    f->resident = calloc(1, m->resident_bytes ? m->resident_bytes : 1);
    if (!f->resident)
        return k3_fail(err, -ENOMEM, "resident area of %llu bytes",
                       (unsigned long long)m->resident_bytes);
    for (size_t i = 0; i < m->n_residents; i++) {
        const struct k3_resident *r = &m->residents[i];
        size_t bytes = r->n * k3_dtype_bytes(r->dtype);
        char *raw = malloc(bytes);
        int rc = raw ? read_at(f, r->file, r->off_bytes, raw, bytes, err)
                     : k3_fail(err, -ENOMEM, "resident tensor");

        if (rc == 0)
            k3_widen(f->resident + r->pos / sizeof(float), raw, r->dtype, r->n);
        free(raw);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int k3_file_source_open(struct k3_file_source **out, const struct k3_model *m, uint64_t block_bytes,
                        struct k3_err *err)
{
    struct k3_file_source *f = calloc(1, sizeof(*f));
    int rc;

    if (!f)
        return k3_fail(err, -ENOMEM, "file source");
    f->m = m;
    f->fd = calloc(m->n_files, sizeof(*f->fd));
    f->experts = calloc(m->cfg.n_experts + 1u, sizeof(*f->experts));
    if (!f->fd || !f->experts) {
        k3_file_source_close(f);
        return k3_fail(err, -ENOMEM, "file source");
    }
    for (size_t i = 0; i < m->n_files; i++)
        f->fd[i] = -1;
    for (size_t i = 0; i < m->n_files; i++) {
        f->fd[i] = open(m->files[i].path, O_RDONLY | O_CLOEXEC);
        if (f->fd[i] < 0) {
            rc = k3_fail(err, -errno, "open %s", m->files[i].path);
            k3_file_source_close(f);
            return rc;
        }
    }
    f->src = (struct k3_source){
        .self = f,
        .m = m,
        .block_bytes = block_bytes,
        .rows = source_rows,
        .done = source_done,
        .ready = source_ready,
        .next_pass = source_next_pass,
        .failed_pass = source_failed_pass,
        .experts_begin = source_experts_begin,
        .expert_next = source_expert_next,
        .expert_release = source_expert_release,
        .experts_abandon = source_experts_abandon,
        .embed = source_embed,
    };
    rc = load_resident(f, err);
    if (rc < 0) {
        k3_file_source_close(f);
        return rc;
    }
    f->src.resident = f->resident;
    *out = f;
    return 0;
}

void k3_file_source_close(struct k3_file_source *f)
{
    if (!f)
        return;
    for (size_t i = 0; f->fd && i < f->m->n_files; i++)
        if (f->fd[i] >= 0)
            close(f->fd[i]);
    free(f->fd);
    free(f->resident);
    for (uint32_t i = 0; i < K3_TRUNK_HELD; i++)
        free(f->block[i].bytes);
    for (size_t i = 0; f->pinned && i < f->m->n_pieces; i++)
        free(f->pinned[i]);
    free(f->pinned);
    free(f->experts);
    free(f->expert);
    free(f);
}

struct k3_source *k3_file_source(struct k3_file_source *f)
{
    return &f->src;
}

void k3_file_source_counts(const struct k3_file_source *f, struct k3_file_source_counts *out)
{
    *out = f->counts;
}

static const void *source_pinned(void *self, uint32_t piece)
{
    struct k3_file_source *f = self;

    return f->pinned[piece];
}

void k3_file_source_pin_gates(struct k3_file_source *f)
{
    f->pinned = calloc(f->m->n_pieces, sizeof(*f->pinned));
    for (size_t i = 0; f->pinned && i < f->m->n_pieces; i++) {
        const struct k3_piece *p = &f->m->pieces[i];
        struct k3_err err = K3_ERR_INIT;

        if (f->m->matrices[p->matrix].role != K3_W_ROUTER)
            continue;
        f->pinned[i] = malloc(p->len_bytes);
        if (!f->pinned[i] || read_at(f, f->m->matrices[p->matrix].file, p->off_bytes, f->pinned[i],
                                     p->len_bytes, &err) < 0)
            k3_bug("gate %zu: %s", i, err.text);
    }
    f->src.pinned = source_pinned;
}

void k3_file_source_fail_block(struct k3_file_source *f, uint64_t nth)
{
    f->fail_block = nth;
}

void k3_file_source_fail_expert(struct k3_file_source *f, uint64_t nth)
{
    f->fail_expert = nth;
}

int k3_file_source_model(struct k3_model **out, const char *dir, uint32_t n_layers,
                         struct k3_err *err)
{
    struct k3_model_opts opts = {
        .dirs = &dir, .n_dirs = 1, .n_layers = n_layers, .want_experts = true
    };

    return k3_model_open(out, &opts, err);
}
