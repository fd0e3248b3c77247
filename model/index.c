/* The tensors of a checkpoint: one growing array, one string area, one hash.  Arrays grow by an eighth, so that the
 * promise of 150 bytes a tensor (40 + a name of 77 + hash of 8.5) also holds while they grow. */
#include "model/index.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "model/index_private.h"
#include "model/scan.h"

#define NAME_MAX_BYTES 1024

/* A tensor's code is its place here.  The first K3_N_DTYPES are those of enum k3_dtype; the rest is
 * not computed with and known by its width, for the check of its length, and by its name, for the
 * error where such a tensor is used. */
static const struct { const char *name; uint8_t width; } dtypes[] = {
    [K3_F32] = { "F32", 4 }, [K3_F16] = { "F16", 2 }, [K3_BF16] = { "BF16", 2 }, [K3_U8] = { "U8", 1 },
    { "F64", 8 }, { "I64", 8 }, { "U64", 8 }, { "I32", 4 }, { "U32", 4 }, { "I16", 2 }, { "U16", 2 },
    { "I8", 1 },  { "BOOL", 1 },
};
#define N_DTYPE_NAMES (sizeof(dtypes) / sizeof(dtypes[0]))

size_t k3_dtype_bytes(enum k3_dtype dtype)
{
    return (unsigned)dtype < K3_N_DTYPES ? dtypes[dtype].width : 0;
}

const char *k3_dtype_name(enum k3_dtype dtype)
{
    return (unsigned)dtype < N_DTYPE_NAMES ? dtypes[dtype].name : "of an unknown dtype";
}

struct k3_index *k3_index_new(void)
{
    return calloc(1, sizeof(struct k3_index));
}

void k3_index_close(struct k3_index *ix)
{
    if (!ix)
        return;
    for (size_t i = 0; i < ix->n_files; i++)
        k3_file_free(&ix->files[i]);
    free(ix->files);
    free(ix->tensors);
    free(ix->names);
    free(ix->slots);
    free(ix->list_path);
    free(ix);
}

const char *k3_index_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

int k3_index_add_file(struct k3_index *ix, const char *path, uint64_t len_bytes, uint64_t dev, uint64_t ino,
                      struct k3_err *err)
{
    if (ix->n_files > UINT16_MAX)
        return k3_refuse(err, -E2BIG, "more than %u safetensors files; at most that many can be opened",
                         UINT16_MAX + 1u);
    if (ix->n_files == ix->cap_files) {
        size_t cap = ix->cap_files ? ix->cap_files * 2 : 8;
        struct k3_file *p = reallocarray(ix->files, cap, sizeof(*p));

        if (!p)
            return k3_fail(err, -ENOMEM, "no memory for a list of %zu files", cap);
        ix->files = p;
        ix->cap_files = cap;
    }
    ix->files[ix->n_files] = (struct k3_file){ strdup(path), len_bytes, dev, ino, NULL, 0 };
    if (!ix->files[ix->n_files].path)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    ix->n_files++;
    return 0;
}

void k3_file_free(struct k3_file *f)
{
    for (uint32_t i = 0; i < f->n_copies; i++)
        free(f->copies[i]);
    free(f->copies);
    free(f->path);
    *f = (struct k3_file){ NULL };
}

static int add_copy(struct k3_file *f, const char *path, struct k3_err *err)
{
    char **more = reallocarray(f->copies, f->n_copies + 1u, sizeof(*more));

    if (!more)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    f->copies = more;
    f->copies[f->n_copies] = strdup(path);
    if (!f->copies[f->n_copies])
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    f->n_copies++;
    return 0;
}

int k3_file_copy(struct k3_file *out, const struct k3_file *from, struct k3_err *err)
{
    int rc = 0;

    *out = *from;
    out->copies = NULL;
    out->n_copies = 0;
    out->path = strdup(from->path);
    if (!out->path)
        rc = k3_fail(err, -ENOMEM, "no memory for a file name");
    for (uint32_t i = 0; i < from->n_copies && rc == 0; i++)
        rc = add_copy(out, from->copies[i], err);
    if (rc < 0)
        k3_file_free(out);
    return rc;
}

int k3_index_add_copy(struct k3_index *ix, size_t file, const char *path, struct k3_err *err)
{
    return add_copy(&ix->files[file], path, err);
}

static const char *file_name(const struct k3_index *ix, uint16_t file)
{
    return file < ix->n_files ? ix->files[file].path : "safetensors header";
}

static int room(struct k3_index *ix, size_t name_bytes, struct k3_err *err)
{
    if (ix->n_tensors == ix->cap_tensors) {
        size_t cap = ix->cap_tensors + ix->cap_tensors / 8 + 256;
        struct k3_tensor *p = reallocarray(ix->tensors, cap, sizeof(*p));

        if (!p)
            return k3_fail(err, -ENOMEM, "no memory for an index of %zu tensors", cap);
        ix->tensors = p;
        ix->cap_tensors = cap;
    }
    if (ix->cap_names - ix->names_bytes < name_bytes) {
        size_t cap = ix->cap_names + ix->cap_names / 8 + 16384 + name_bytes;
        char *p = cap <= UINT32_MAX ? realloc(ix->names, cap) : NULL;

        if (!p)
            return k3_fail(err, -ENOMEM, "no memory for %zu bytes of tensor names", cap);
        ix->names = p;
        ix->cap_names = cap;
    }
    return 0;
}

struct entry {
    uint64_t begin, end, n_elements;
    uint32_t shape[K3_MAX_DIMS];
    uint32_t n_dims;
    uint8_t dtype, width; /* width 0: not known */
    bool has_dtype, has_shape, has_offsets;
};

static int entry_dtype(struct k3_scan *s, struct entry *e)
{
    char text[64];
    int rc = k3_scan_string(s, text, sizeof(text), NULL);

    if (rc < 0 && rc != -ENAMETOOLONG)
        return rc;
    if (rc < 0)
        return -EPROTO;
    e->dtype = K3_DTYPE_OTHER;
    e->width = 0;
    for (size_t i = 0; i < N_DTYPE_NAMES; i++)
        if (!strcmp(text, dtypes[i].name)) {
            e->dtype = (uint8_t)i;
            e->width = dtypes[i].width;
        }
    return 0;
}

static int entry_shape(struct k3_scan *s, struct entry *e)
{
    uint64_t v;
    int rc = k3_scan_want(s, '[');

    e->n_elements = 1;
    if (rc < 0 || k3_scan_is(s, ']'))
        return rc;
    do {
        if ((rc = k3_scan_u64(s, &v)) < 0)
            return rc;
        if (v > UINT32_MAX || e->n_dims == UINT8_MAX || __builtin_mul_overflow(e->n_elements, v, &e->n_elements))
            return -EOVERFLOW;
        if (e->n_dims < K3_MAX_DIMS)
            e->shape[e->n_dims] = (uint32_t)v;
        e->n_dims++;
    } while (k3_scan_is(s, ','));
    return k3_scan_want(s, ']');
}

static int entry_offsets(struct k3_scan *s, struct entry *e)
{
    int rc = k3_scan_want(s, '[');

    if (rc == 0)
        rc = k3_scan_u64(s, &e->begin);
    if (rc == 0)
        rc = k3_scan_want(s, ',');
    if (rc == 0)
        rc = k3_scan_u64(s, &e->end);
    return rc == 0 ? k3_scan_want(s, ']') : rc;
}

/* {"dtype":..,"shape":..,"data_offsets":..} in any order, each exactly once; other keys are skipped. */
static int scan_entry(struct k3_scan *s, struct entry *e)
{
    int rc = k3_scan_want(s, '{');
    char key[64];

    memset(e, 0, sizeof(*e));
    if (rc < 0)
        return rc;
    do {
        bool *has = NULL;

        rc = k3_scan_string(s, key, sizeof(key), NULL);
        if (rc < 0 && rc != -ENAMETOOLONG)
            return rc;
        if (rc < 0)
            return -EPROTO;
        if ((rc = k3_scan_want(s, ':')) < 0)
            return rc;
        if (!strcmp(key, "dtype"))
            has = &e->has_dtype;
        else if (!strcmp(key, "shape"))
            has = &e->has_shape;
        else if (!strcmp(key, "data_offsets"))
            has = &e->has_offsets;
        if (has && *has)
            return -EPROTO;
        if (has)
            *has = true;
        rc = !has                    ? k3_scan_skip(s)
             : has == &e->has_dtype  ? entry_dtype(s, e)
             : has == &e->has_shape  ? entry_shape(s, e)
                                     : entry_offsets(s, e);
        if (rc < 0)
            return rc;
    } while (k3_scan_is(s, ','));
    rc = k3_scan_want(s, '}');
    return rc == 0 && !(e->has_dtype && e->has_shape && e->has_offsets) ? -ENOKEY : rc;
}

static int check_entry(const struct k3_index *ix, uint16_t file, const char *name, const struct entry *e,
                       uint64_t data_bytes, struct k3_err *err)
{
    uint64_t want;

    if (e->begin > e->end || e->end > data_bytes)
        return k3_refuse(err, -EINVAL,
                         "%s: tensor %s has data_offsets [%" PRIu64 ", %" PRIu64 "], but the file has %" PRIu64
                         " bytes of data (truncated?)", file_name(ix, file), name, e->begin, e->end, data_bytes);
    if (e->width && (__builtin_mul_overflow(e->n_elements, (uint64_t)e->width, &want) || want != e->end - e->begin))
        return k3_refuse(err, -EINVAL,
                         "%s: tensor %s has %" PRIu64 " bytes, but its shape and dtype need %" PRIu64 " elements of %u",
                         file_name(ix, file), name, e->end - e->begin, e->n_elements, e->width);
    return 0;
}

static int header_error(const struct k3_index *ix, uint16_t file, const struct k3_scan *s, const char *name, int rc,
                        struct k3_err *err)
{
    const char *what = rc == -ENOKEY         ? "needs dtype, shape and data_offsets"
                       : rc == -EOVERFLOW    ? "has a shape that is too large"
                       : rc == -ENAMETOOLONG ? "is followed by a name of more than 1023 bytes"
                                             : "is followed by something that is not a safetensors header";

    return k3_refuse(err, -EINVAL, "%s: header byte %" PRIu64 ": tensor %s %s", file_name(ix, file), k3_scan_at(s),
                     *name ? name : "(none yet)", what);
}

static int by_offset(const void *a, const void *b)
{
    const struct k3_tensor *x = *(const struct k3_tensor *const *)a, *y = *(const struct k3_tensor *const *)b;

    return x->off_bytes != y->off_bytes ? (x->off_bytes < y->off_bytes ? -1 : 1)
                                        : (x->len_bytes > y->len_bytes) - (x->len_bytes < y->len_bytes);
}

static int overlap(const struct k3_index *ix, const struct k3_tensor *a, const struct k3_tensor *b,
                   struct k3_err *err)
{
    return k3_refuse(err, -EINVAL,
                     "%s: tensors %s and %s overlap: file bytes %" PRIu64 "..%" PRIu64 " and %" PRIu64 "..%" PRIu64,
                     file_name(ix, a->file), k3_index_name(ix, a), k3_index_name(ix, b), a->off_bytes,
                     a->off_bytes + a->len_bytes, b->off_bytes, b->off_bytes + b->len_bytes);
}

/* Tensors first.. belong to one file.  Headers are mostly written in the order of offsets: then nothing is sorted. */
static int check_overlap(const struct k3_index *ix, size_t first, struct k3_err *err)
{
    size_t n = ix->n_tensors - first, k = 0;
    const struct k3_tensor *t, **order;
    bool sorted = true;
    uint64_t end = 0;
    int rc = 0;

    if (n == 0)
        return 0;
    t = ix->tensors + first;
    for (size_t i = 0; i < n && sorted; i++) {
        sorted = t[i].len_bytes == 0 || t[i].off_bytes >= end;
        end = t[i].len_bytes ? t[i].off_bytes + t[i].len_bytes : end;
    }
    if (sorted)
        return 0;
    order = malloc(n * sizeof(*order));
    if (!order)
        return k3_fail(err, -ENOMEM, "no memory to sort %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        if (t[i].len_bytes)
            order[k++] = t + i;
    qsort(order, k, sizeof(*order), by_offset);
    for (size_t i = 1; i < k && rc == 0; i++)
        if (order[i]->off_bytes < order[i - 1]->off_bytes + order[i - 1]->len_bytes)
            rc = overlap(ix, order[i - 1], order[i], err);
    free(order);
    return rc;
}

int k3_index_parse_header(struct k3_index *ix, uint16_t file, const char *json, size_t len_bytes,
                          uint64_t data_off_bytes, uint64_t file_bytes, struct k3_err *err)
{
    char name[NAME_MAX_BYTES] = "";
    size_t first = ix->n_tensors, name_bytes;
    struct k3_scan s;
    struct entry e;
    int rc;

    if (data_off_bytes > file_bytes)
        return k3_refuse(err, -EINVAL, "%s: data would begin at byte %" PRIu64 " of %" PRIu64, file_name(ix, file),
                         data_off_bytes, file_bytes);
    k3_scan_text(&s, json, len_bytes);
    if ((rc = k3_scan_want(&s, '{')) < 0)
        return header_error(ix, file, &s, name, rc, err);
    if (!k3_scan_is(&s, '}')) {
        do {
            if ((rc = k3_scan_string(&s, name, sizeof(name), &name_bytes)) < 0 || (rc = k3_scan_want(&s, ':')) < 0)
                return header_error(ix, file, &s, rc == -ENAMETOOLONG ? "" : name, rc, err);
            if (!strcmp(name, "__metadata__")) {
                if ((rc = k3_scan_skip(&s)) < 0)
                    return header_error(ix, file, &s, name, rc, err);
                continue;
            }
            if ((rc = scan_entry(&s, &e)) < 0)
                return header_error(ix, file, &s, name, rc, err);
            if ((rc = check_entry(ix, file, name, &e, file_bytes - data_off_bytes, err)) < 0 ||
                (rc = room(ix, name_bytes + 1, err)) < 0)
                return rc;
            ix->tensors[ix->n_tensors++] = (struct k3_tensor){
                .off_bytes = data_off_bytes + e.begin, .len_bytes = e.end - e.begin,
                .shape = { e.shape[0], e.shape[1], e.shape[2], e.shape[3] },
                .name_off = (uint32_t)ix->names_bytes, .file = file, .dtype = e.dtype, .n_dims = (uint8_t)e.n_dims,
            };
            memcpy(ix->names + ix->names_bytes, name, name_bytes + 1);
            ix->names_bytes += name_bytes + 1;
        } while (k3_scan_is(&s, ','));
        if ((rc = k3_scan_want(&s, '}')) < 0)
            return header_error(ix, file, &s, name, rc, err);
    }
    if (k3_scan_peek(&s) != -1)
        return header_error(ix, file, &s, name, -EPROTO, err);
    return check_overlap(ix, first, err);
}

size_t k3_index_n_tensors(const struct k3_index *ix)
{
    return ix->n_tensors;
}

const struct k3_tensor *k3_index_at(const struct k3_index *ix, size_t i)
{
    return ix->tensors + i;
}

const char *k3_index_name(const struct k3_index *ix, const struct k3_tensor *t)
{
    return ix->names + t->name_off;
}

size_t k3_index_n_files(const struct k3_index *ix)
{
    return ix->n_files;
}

const struct k3_file *k3_index_file(const struct k3_index *ix, size_t i)
{
    return ix->files + i;
}

size_t k3_index_bytes(const struct k3_index *ix)
{
    return ix->cap_tensors * sizeof(*ix->tensors) + ix->cap_names + ix->n_slots * sizeof(*ix->slots) +
           ix->cap_files * sizeof(*ix->files);
}

static uint64_t hash(const char *name)
{
    uint64_t h = 0x9e3779b97f4a7c15u, w;
    size_t n = strlen(name);

    for (; n >= 8; n -= 8, name += 8) {
        memcpy(&w, name, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    w = 0;
    memcpy(&w, name, n);
    h = (h ^ w ^ (uint64_t)n << 56) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 29;
}

int k3_index_sort(struct k3_index *ix, struct k3_err *err)
{
    size_t n_slots = 16;

    while (n_slots < ix->n_tensors + ix->n_tensors / 2)
        n_slots *= 2;
    if (ix->n_tensors >= UINT32_MAX / 2)
        return k3_refuse(err, -E2BIG, "%zu tensors are more than an index holds", ix->n_tensors);
    free(ix->slots);
    ix->slots = calloc(n_slots, sizeof(*ix->slots));
    ix->n_slots = ix->slots ? n_slots : 0;
    if (!ix->slots)
        return k3_fail(err, -ENOMEM, "no memory for a table of %zu names", n_slots);
    for (size_t i = 0; i < ix->n_tensors; i++) {
        const char *name = ix->names + ix->tensors[i].name_off;
        size_t at = hash(name) & (n_slots - 1);

        for (; ix->slots[at]; at = (at + 1) & (n_slots - 1)) {
            const struct k3_tensor *other = ix->tensors + ix->slots[at] - 1;

            if (!strcmp(ix->names + other->name_off, name))
                return k3_refuse(err, -EEXIST, "tensor %s occurs twice: in %s and in %s; each name may occur once",
                                 name, file_name(ix, other->file), file_name(ix, ix->tensors[i].file));
        }
        ix->slots[at] = (uint32_t)i + 1;
    }
    return 0;
}

const struct k3_tensor *k3_index_find(const struct k3_index *ix, const char *name)
{
    if (!ix->n_slots)
        return NULL;
    for (size_t at = hash(name) & (ix->n_slots - 1); ix->slots[at]; at = (at + 1) & (ix->n_slots - 1)) {
        const struct k3_tensor *t = ix->tensors + ix->slots[at] - 1;

        if (!strcmp(ix->names + t->name_off, name))
            return t;
    }
    return NULL;
}
