/* A packed trunk: what it looks like, and the redirection of an opened model to it. */
#include "model/pack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/crc32c.h"
#include "model/schedule.h"

static uint64_t up(uint64_t v, uint64_t to)
{
    return (v + to - 1) / to * to;
}

static struct k3_pack_entry of_resident(const struct k3_model *m, size_t i)
{
    const struct k3_resident *r = &m->residents[i];

    return (struct k3_pack_entry){ .kind = K3_PACK_RESIDENT, .role = r->role, .layer = r->layer,
                                   .len_bytes = (uint64_t)r->n * k3_dtype_bytes(r->dtype) };
}

static struct k3_pack_entry of_piece(const struct k3_model *m, size_t i)
{
    const struct k3_piece *p = &m->pieces[i];
    const struct k3_matrix *x = &m->matrices[p->matrix];

    return (struct k3_pack_entry){ .kind = K3_PACK_PIECE, .role = x->role, .layer = x->layer, .row = p->row,
                                   .len_bytes = p->len_bytes };
}

int k3_pack_plan(const struct k3_model *m, struct k3_pack_header *h, struct k3_pack_entry **table, struct k3_err *err)
{
    size_t n = m->n_residents + m->n_pieces;
    struct k3_pack_entry *t = calloc(n ? n : 1, sizeof(*t));
    uint64_t cursor = up(sizeof(*h) + n * sizeof(*t), K3_PAGE_BYTES);

    if (!t)
        return k3_fail(err, -ENOMEM, "no memory for a table of %zu pieces", n);
    *h = (struct k3_pack_header){ .magic = K3_PACK_MAGIC, .version = K3_PACK_VERSION, .n_entries = (uint32_t)n,
                                  .data_off_bytes = cursor, .n_layers = m->cfg.n_layers };
    if (n > K3_PACK_ENTRIES_MAX) {
        free(t);
        return k3_refuse(err, -E2BIG, "%zu pieces are more than the %u of a packed trunk", n, K3_PACK_ENTRIES_MAX);
    }
    memcpy(h->digest, m->digest, sizeof(h->digest));
    for (size_t i = 0; i < n; i++) {
        bool piece = i >= m->n_residents;

        t[i] = piece ? of_piece(m, i - m->n_residents) : of_resident(m, i);
        if (i == m->n_residents)
            cursor = up(cursor, K3_PAGE_BYTES);
        else if (!piece || t[i].row == 0)
            cursor = up(cursor, K3_PACK_ALIGN);
        t[i].off_bytes = cursor;
        cursor += t[i].len_bytes;
    }
    h->file_bytes = up(cursor, K3_PAGE_BYTES); /* so that the last direct read is a whole page */
    *table = t;
    return 0;
}

void k3_pack_seal(struct k3_pack_header *h, const struct k3_pack_entry *table)
{
    h->table_crc = memcmp(h->magic, K3_PACK_MAGIC, sizeof(h->magic))
                       ? 0
                       : k3_crc32c(0, table, (size_t)h->n_entries * sizeof(*table));
    h->header_crc = k3_crc32c(0, h, offsetof(struct k3_pack_header, header_crc));
}

/* ---- redirection ---- */

static int check_header(const struct k3_pack_header *h, const char *path, uint64_t file_bytes, struct k3_err *err)
{
    if (memcmp(h->magic, K3_PACK_MAGIC, sizeof(h->magic)))
        return k3_refuse(err, -EINVAL, "%s is not a packed trunk" K3_PACK_REMEDY, path);
    if (h->version != K3_PACK_VERSION)
        return k3_refuse(err, -EINVAL, "%s has version %u, must be %u" K3_PACK_REMEDY, path, h->version, K3_PACK_VERSION);
    if (h->header_crc != k3_crc32c(0, h, offsetof(struct k3_pack_header, header_crc)) ||
        h->n_entries > K3_PACK_ENTRIES_MAX || h->data_off_bytes % K3_PAGE_BYTES || h->data_off_bytes > h->file_bytes ||
        h->data_off_bytes < sizeof(*h) + (uint64_t)h->n_entries * sizeof(struct k3_pack_entry))
        return k3_refuse(err, -EBADMSG, "%s has a damaged header" K3_PACK_REMEDY, path);
    if (h->file_bytes != file_bytes)
        return k3_refuse(err, -ENODATA, "%s has %" PRIu64 " bytes, must have %" PRIu64 " (truncated?)" K3_PACK_REMEDY, path,
                         file_bytes, h->file_bytes);
    return 0;
}

struct walk {
    const struct k3_pack_header *h;
    const struct k3_pack_entry *table;
    const char *path;
    size_t at; /* in the table */
    uint64_t end_bytes;
};

/* The entry of what comes next; entries of layers that do not run are passed over. */
static int next_entry(struct walk *w, const struct k3_model *m, const struct k3_pack_entry *want, bool follows,
                      const struct k3_pack_entry **out, struct k3_err *err)
{
    const struct k3_pack_entry *e;

    while (w->at < w->h->n_entries && w->table[w->at].layer >= (int32_t)m->cfg.n_layers)
        w->at++;
    e = &w->table[w->at];
    if (w->at == w->h->n_entries || e->kind != want->kind || e->role != want->role || e->layer != want->layer ||
        e->row != want->row || e->len_bytes != want->len_bytes)
        return k3_refuse(err, -EBADMSG, "%s: entry %zu of its table is not what this model has there" K3_PACK_REMEDY, w->path, w->at);
    if (e->off_bytes < w->end_bytes || e->len_bytes > w->h->file_bytes || e->off_bytes > w->h->file_bytes - e->len_bytes ||
        (follows ? e->off_bytes != w->end_bytes : e->off_bytes % K3_PACK_ALIGN != 0))
        return k3_refuse(err, -EBADMSG, "%s: entry %zu of its table lies at %" PRIu64 ", where it cannot be" K3_PACK_REMEDY, w->path,
                         w->at, e->off_bytes);
    w->end_bytes = e->off_bytes + e->len_bytes;
    w->at++;
    *out = e;
    return 0;
}

static int redirect(struct k3_model *m, struct walk *w, uint16_t file, struct k3_err *err)
{
    const struct k3_pack_entry *e;
    int rc = 0;

    for (size_t i = 0; i < m->n_residents && rc == 0; i++) {
        struct k3_pack_entry want = of_resident(m, i);

        rc = next_entry(w, m, &want, false, &e, err);
        if (rc < 0)
            break;
        m->residents[i].file = file;
        m->residents[i].off_bytes = e->off_bytes;
        m->pack_crc[i] = e->crc;
    }
    for (size_t i = 0; i < m->n_pieces && rc == 0; i++) {
        struct k3_pack_entry want = of_piece(m, i);
        struct k3_matrix *x = &m->matrices[m->pieces[i].matrix];

        rc = next_entry(w, m, &want, want.row != 0, &e, err);
        if (rc < 0)
            break;
        if (want.row == 0) {
            x->file = file;
            x->off_bytes = e->off_bytes;
        }
        m->pieces[i].off_bytes = e->off_bytes;
        m->pack_crc[m->n_residents + i] = e->crc;
    }
    return rc;
}

int k3_pack_apply(struct k3_model *m, const char *path, const void *head, size_t head_bytes, uint64_t file_bytes,
                  const uint8_t digest[32], struct k3_err *err)
{
    size_t n = m->n_residents + m->n_pieces;
    struct k3_pack_header h;
    struct walk w = { .h = &h, .path = path };
    struct k3_file *files;
    int rc;

    if (head_bytes < sizeof(h))
        return k3_refuse(err, -EINVAL, "%s has %zu bytes, too few for a packed trunk" K3_PACK_REMEDY, path, head_bytes);
    memcpy(&h, head, sizeof(h));
    if ((rc = check_header(&h, path, file_bytes, err)) < 0)
        return rc;
    w.table = (const struct k3_pack_entry *)(const void *)((const uint8_t *)head + sizeof(h));
    w.end_bytes = h.data_off_bytes;
    if (head_bytes < sizeof(h) + (size_t)h.n_entries * sizeof(*w.table) ||
        h.table_crc != k3_crc32c(0, w.table, (size_t)h.n_entries * sizeof(*w.table)))
        return k3_refuse(err, -EBADMSG, "%s has a damaged table" K3_PACK_REMEDY, path);
    if (h.n_layers < m->cfg.n_layers)
        return k3_refuse(err, -ESTALE, "%s has %u layers, %u are to run" K3_PACK_REMEDY, path, h.n_layers, m->cfg.n_layers);
    if (memcmp(h.digest, digest, sizeof(h.digest)) || h.n_layers > m->cfg.n_layers_model)
        return k3_refuse(err, -ESTALE, "%s is of another model (digest %02x%02x%02x%02x..., this one has %02x%02x%02x%02x...)"
                         K3_PACK_REMEDY, path, h.digest[0], h.digest[1], h.digest[2], h.digest[3], digest[0], digest[1], digest[2],
                         digest[3]);
    if (m->n_files >= UINT16_MAX)
        return k3_refuse(err, -E2BIG, "more than %u files in use", UINT16_MAX - 1u);
    files = reallocarray(m->files, m->n_files + 1, sizeof(*files));
    if (files)
        m->files = files;
    m->pack_crc = calloc(n ? n : 1, sizeof(*m->pack_crc));
    if (!files || !m->pack_crc)
        return k3_fail(err, -ENOMEM, "no memory for a packed trunk of %zu pieces", n);
    files[m->n_files] = (struct k3_file){ .path = strdup(path), .len_bytes = file_bytes };
    if (!files[m->n_files].path)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    m->n_files++;
    return redirect(m, &w, (uint16_t)(m->n_files - 1), err);
}

/* ---- the file ---- */

static int read_head(int fd, const char *path, uint64_t file_bytes, uint8_t **out, size_t *len_bytes, struct k3_err *err)
{
    struct k3_pack_header h;
    uint64_t n = sizeof(h), got = 0;

    if (file_bytes >= sizeof(h) && pread(fd, &h, sizeof(h), 0) == (ssize_t)sizeof(h) &&
        h.n_entries <= K3_PACK_ENTRIES_MAX)
        n += (uint64_t)h.n_entries * sizeof(struct k3_pack_entry);
    if (n > file_bytes)
        n = file_bytes;
    *out = malloc(n ? n : 1);
    if (!*out)
        return k3_fail(err, -ENOMEM, "no memory for a table of %" PRIu64 " bytes", n);
    while (got < n) {
        ssize_t r = pread(fd, *out + got, n - got, (off_t)got);

        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return k3_fail(err, r < 0 ? -errno : -ENODATA, "reading the header of %s: %s", path,
                           r < 0 ? strerror(errno) : "it ends before");
        got += (uint64_t)r;
    }
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    *len_bytes = (size_t)n;
    return 0;
}

/* The digest that the checkpoint has with the number of layers that the pack says. */
static int digest_for(const struct k3_model *m, const struct k3_model_opts *opts, const uint8_t *head, size_t head_bytes,
                      const char *path, uint8_t out[32], struct k3_err *err)
{
    struct k3_err inner = K3_ERR_INIT;
    struct k3_model_opts o = *opts;
    struct k3_model *whole;
    struct k3_pack_header h;

    memcpy(out, m->digest, sizeof(m->digest));
    if (head_bytes < sizeof(h))
        return 0;
    memcpy(&h, head, sizeof(h));
    if (h.n_layers <= m->cfg.n_layers || h.n_layers > m->cfg.n_layers_model)
        return 0;
    o.no_pack = true;
    o.want_experts = false;
    o.n_layers = h.n_layers;
    if (k3_model_open(&whole, &o, &inner) < 0)
        return k3_refuse(err, inner.code, "%s has %u layers, %u are to run, and whether it is of this model cannot be told: "
                         "%.500s", path, h.n_layers, m->cfg.n_layers, inner.text);
    memcpy(out, whole->digest, sizeof(whole->digest));
    k3_model_close(whole);
    return 0;
}

static int use(struct k3_model *m, const struct k3_model_opts *opts, const char *path, struct k3_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;
    uint8_t *head = NULL, digest[32];
    size_t head_bytes = 0;
    struct stat st;

    if (fd < 0)
        return k3_refuse(err, -errno, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        rc = k3_refuse(err, -EINVAL, "%s is not a regular file", path);
    else
        rc = read_head(fd, path, (uint64_t)st.st_size, &head, &head_bytes, err);
    close(fd);
    if (rc == 0)
        rc = digest_for(m, opts, head, head_bytes, path, digest, err);
    if (rc == 0)
        rc = k3_pack_apply(m, path, head, head_bytes, (uint64_t)st.st_size, digest, err);
    free(head);
    return rc;
}

static bool has_shards(const char *dir)
{
    static const char suffix[] = ".safetensors";
    DIR *d = opendir(dir);
    struct dirent *e;
    bool has = false;

    while (d && !has && (e = readdir(d))) {
        size_t n = strlen(e->d_name);

        has = n >= sizeof(suffix) && !strcmp(e->d_name + n - (sizeof(suffix) - 1), suffix);
    }
    if (d)
        closedir(d);
    return has;
}

/* 1: used; 0: there is none. */
static int look_in(struct k3_model *m, const struct k3_model_opts *opts, size_t i, struct k3_err *err)
{
    char *path, *part = NULL;
    int rc = 0;

    if (asprintf(&path, "%s/" K3_PACK_NAME, opts->dirs[i]) < 0)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    if (access(path, F_OK) == 0) {
        rc = use(m, opts, path, err);
        rc = rc == 0 ? 1 : rc;
    } else if (i > 0 && asprintf(&part, "%s/" K3_PACK_PART, opts->dirs[i]) >= 0 && access(part, F_OK) == 0 &&
               !has_shards(opts->dirs[i])) {
        /* Beside shards it is none of our business: somebody packs while the family runs from them. */
        rc = k3_refuse(err, -ENOENT, "%s is only half-written: finish it (k3-pack --model %s --out %s), or leave this "
                       "directory out", part, opts->dirs[0], opts->dirs[i]);
    }
    free(path);
    free(part);
    return rc;
}

int k3_pack_find(struct k3_model *m, const struct k3_model_opts *opts, struct k3_err *err)
{
    int rc = 0;

    for (size_t i = 1; i <= opts->n_dirs && rc == 0; i++)
        rc = look_in(m, opts, i % opts->n_dirs, err);
    return rc < 0 ? rc : 0;
}
