/* Where the experts lie.  82,432 of them: the usual one is a single run whose six tensors lie at the same relative
 * offsets as its neighbours', 16 bytes; anything else goes to the odd table, 96 bytes. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_private.h"
#include "model/names.h"

#define PAGE 4096u
#define ODD UINT16_MAX

struct run_entry {
    uint64_t off_bytes; /* start of the run; with ODD: number in the odd table */
    uint16_t file, pattern;
};
struct pattern {
    uint32_t off[K3_EXPERT_TENSORS];
};
struct odd_entry {
    uint64_t off_bytes[K3_EXPERT_TENSORS];
    uint16_t file[K3_EXPERT_TENSORS];
};

struct k3_expert_table {
    int16_t layer_slot[K3_MAX_LAYERS]; /* row of the layer, -1 none */
    struct run_entry *runs;            /* n_layers rows of n_experts */
    struct pattern *patterns;
    struct odd_entry *odd;
    uint64_t len_bytes[K3_EXPERT_TENSORS];
    size_t n_experts, n_runs, n_patterns, n_odd, cap_odd;
};

void k3_experts_free(struct k3_expert_table *t)
{
    if (!t)
        return;
    free(t->runs);
    free(t->patterns);
    free(t->odd);
    free(t);
}

size_t k3_experts_bytes(const struct k3_expert_table *t)
{
    return t ? sizeof(*t) + t->n_runs * sizeof(*t->runs) + t->n_patterns * sizeof(*t->patterns) +
                   t->cap_odd * sizeof(*t->odd)
             : 0;
}

static struct k3_expert_table *new_table(const struct k3_config *c)
{
    struct k3_expert_table *t = calloc(1, sizeof(*t));
    uint32_t n_rows, n_cols;
    size_t n = 0;

    if (!t)
        return NULL;
    for (uint32_t l = 0; l < K3_MAX_LAYERS; l++)
        t->layer_slot[l] = l < c->n_layers && !k3_layer_is_dense(c, l) ? (int16_t)n++ : -1;
    for (uint32_t i = 0; i < K3_EXPERT_TENSORS; i++) {
        k3_names_expert_shape(c, i, &n_rows, &n_cols);
        t->len_bytes[i] = (uint64_t)n_rows * n_cols;
    }
    t->n_experts = c->n_experts;
    t->n_runs = n * c->n_experts;
    t->runs = t->n_runs ? calloc(t->n_runs, sizeof(*t->runs)) : NULL;
    if (t->n_runs && !t->runs) {
        k3_experts_free(t);
        return NULL;
    }
    return t;
}

/* One run without gaps in one file?  Fills its start and the relative offsets. */
static bool is_run(const struct k3_tensor *const ts[K3_EXPERT_TENSORS], uint64_t *start, struct pattern *p)
{
    uint64_t lo = UINT64_MAX, hi = 0, sum = 0;

    for (int i = 0; i < K3_EXPERT_TENSORS; i++) {
        if (ts[i]->file != ts[0]->file)
            return false;
        lo = ts[i]->off_bytes < lo ? ts[i]->off_bytes : lo;
        hi = ts[i]->off_bytes + ts[i]->len_bytes > hi ? ts[i]->off_bytes + ts[i]->len_bytes : hi;
        sum += ts[i]->len_bytes;
    }
    /* No two tensors overlap (checked by the index), so six that fill the span exactly have no gap. */
    if (hi - lo != sum || sum > UINT32_MAX)
        return false;
    for (int i = 0; i < K3_EXPERT_TENSORS; i++)
        p->off[i] = (uint32_t)(ts[i]->off_bytes - lo);
    *start = lo;
    return true;
}

static int find_pattern(struct k3_expert_table *t, const struct pattern *p, uint16_t *out)
{
    struct pattern *grown;

    for (size_t i = 0; i < t->n_patterns; i++)
        if (!memcmp(t->patterns + i, p, sizeof(*p))) {
            *out = (uint16_t)i;
            return 0;
        }
    grown = reallocarray(t->patterns, t->n_patterns + 1, sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    t->patterns = grown; /* at most the 720 orders of six tensors */
    t->patterns[t->n_patterns] = *p;
    *out = (uint16_t)t->n_patterns++;
    return 0;
}

static int add_odd(struct k3_expert_table *t, const struct odd_entry *o, struct run_entry *run)
{
    if (t->n_odd == t->cap_odd) {
        size_t cap = t->cap_odd + t->cap_odd / 4 + 16;
        struct odd_entry *grown = reallocarray(t->odd, cap, sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        t->odd = grown;
        t->cap_odd = cap;
    }
    t->odd[t->n_odd] = *o;
    *run = (struct run_entry){ t->n_odd++, 0, ODD };
    return 0;
}

static uint64_t span(uint64_t off_bytes, uint64_t len_bytes)
{
    return ((off_bytes + len_bytes + PAGE - 1) / PAGE - off_bytes / PAGE) * PAGE;
}

static int check_tensor(const struct k3_build *b, uint32_t tensor, const struct k3_tensor *t, struct k3_err *err)
{
    uint32_t n_rows, n_cols;
    char shape[64];

    k3_names_expert_shape(&b->m->cfg, tensor, &n_rows, &n_cols);
    if (t->dtype != K3_U8)
        return k3_refuse(err, -EINVAL, "tensor %s is %s, must be U8 (MXFP4)", k3_index_name(b->ix, t),
                         k3_dtype_name(t->dtype));
    if (t->n_dims != 2 || t->shape[0] != n_rows || t->shape[1] != n_cols)
        return k3_refuse(err, -EINVAL, "tensor %s has shape %s, by config.json it must be [%u, %u]",
                         k3_index_name(b->ix, t), k3_build_shape(t, shape), n_rows, n_cols);
    return 0;
}

/* Plain expert weights have names of their own: say so, instead of calling the MXFP4 ones missing. */
static int check_not_plain(const struct k3_build *b, uint32_t layer, uint32_t expert, struct k3_err *err)
{
    char name[K3_NAME_BYTES], *at;

    k3_names_expert(name, (int)layer, expert, 0);
    at = strstr(name, "_packed");
    *at = '\0';
    if (!k3_index_find(b->ix, name))
        return 0;
    return k3_refuse(err, -EINVAL, "tensor %s is not MXFP4; routed experts must be (%s_packed and %s_scale)", name, name,
                     name);
}

static int add_expert(struct k3_build *b, struct k3_expert_table *table, uint32_t layer, uint32_t expert,
                      struct k3_err *err)
{
    const struct k3_tensor *ts[K3_EXPERT_TENSORS];
    struct run_entry run = { 0, 0, 0 };
    struct odd_entry odd;
    struct pattern p;
    char name[K3_NAME_BYTES];
    uint64_t slot_bytes = 0, missing = b->n_missing, start;
    int rc;

    for (uint32_t i = 0; i < K3_EXPERT_TENSORS; i++) {
        k3_names_expert(name, (int)layer, expert, i);
        k3_build_find(b, name, &ts[i]);
        if (!ts[i])
            continue;
        if ((rc = check_tensor(b, i, ts[i], err)) < 0 || (rc = k3_build_file(b, ts[i], &odd.file[i], err)) < 0)
            return rc;
        odd.off_bytes[i] = ts[i]->off_bytes;
    }
    if (b->n_missing != missing)
        return check_not_plain(b, layer, expert, err);
    for (uint32_t i = 0; i < K3_EXPERT_TENSORS; i++) {
        k3_sha256_add_u64(&b->digest, odd.file[i]);
        k3_sha256_add_u64(&b->digest, odd.off_bytes[i]);
    }
    if (is_run(ts, &start, &p)) {
        slot_bytes = span(start, b->m->expert_bytes);
        run = (struct run_entry){ start, odd.file[0], 0 };
        rc = table ? find_pattern(table, &p, &run.pattern) : 0;
    } else {
        for (uint32_t i = 0; i < K3_EXPERT_TENSORS; i++)
            slot_bytes += span(ts[i]->off_bytes, ts[i]->len_bytes);
        rc = table ? add_odd(table, &odd, &run) : 0;
    }
    if (rc < 0)
        return k3_fail(err, rc, "no memory for the table of experts");
    if (table)
        table->runs[(size_t)table->layer_slot[layer] * table->n_experts + expert] = run;
    if (slot_bytes > b->m->expert_slot_bytes)
        b->m->expert_slot_bytes = slot_bytes;
    return 0;
}

int k3_experts_build(struct k3_build *b, bool keep, struct k3_err *err)
{
    const struct k3_config *c = &b->m->cfg;
    struct k3_expert_table *table = NULL;
    int rc = 0;

    b->m->expert_bytes = k3_names_expert_bytes(c);
    if (keep) {
        b->m->experts = table = new_table(c);
        if (!table)
            return k3_fail(err, -ENOMEM, "no memory for the table of experts");
    }
    for (uint32_t l = c->first_dense; l < c->n_layers && rc == 0; l++)
        for (uint32_t e = 0; e < c->n_experts && rc == 0; e++)
            rc = add_expert(b, table, l, e, err);
    if (rc == 0 && b->m->expert_slot_bytes == 0) /* no MoE layer runs: a slot that would hold one, so never 0 */
        b->m->expert_slot_bytes = span(PAGE - 1, b->m->expert_bytes);
    return rc;
}

int k3_model_expert(const struct k3_model *m, uint32_t layer, uint32_t expert, struct k3_expert_place *out)
{
    const struct k3_expert_table *t = m->experts;
    const struct run_entry *run;

    if (!t || layer >= K3_MAX_LAYERS || t->layer_slot[layer] < 0 || expert >= t->n_experts)
        return -ENOENT;
    memset(out, 0, sizeof(*out));
    run = t->runs + (size_t)t->layer_slot[layer] * t->n_experts + expert;
    if (run->pattern != ODD) {
        out->n_ranges = 1;
        out->range[0].file = run->file;
        out->range[0].off_bytes = run->off_bytes;
        out->range[0].len_bytes = m->expert_bytes;
        memcpy(out->tensor_off, t->patterns[run->pattern].off, sizeof(out->tensor_off));
        return 0;
    }
    out->n_ranges = K3_EXPERT_TENSORS;
    for (uint32_t i = 0; i < K3_EXPERT_TENSORS; i++) {
        out->range[i].file = t->odd[run->off_bytes].file[i];
        out->range[i].off_bytes = t->odd[run->off_bytes].off_bytes[i];
        out->range[i].len_bytes = t->len_bytes[i];
        out->tensor_range[i] = i;
    }
    return 0;
}
