/* k3.sums.  Every line that can come is known beforehand, but for its CRC: so it is made and compared, and only the CRC
 * is parsed. */
#include "model/sums.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/crc32c.h"
#include "model/names.h"

#define BUF_BYTES (64u << 10)
#define HEX_BYTES 8

/* ---- items ---- */

size_t k3_sums_n_experts(const struct k3_model *m)
{
    const struct k3_config *c = &m->cfg;

    return c->n_layers > c->first_dense ? (size_t)(c->n_layers - c->first_dense) * c->n_experts : 0;
}

static uint64_t embed_bytes(const struct k3_model *m)
{
    return (uint64_t)m->cfg.vocab * m->cfg.hidden * k3_dtype_bytes(m->embed_dtype);
}

size_t k3_sums_n_embed(const struct k3_model *m)
{
    return (embed_bytes(m) + K3_SUMS_EMBED_BYTES - 1) / K3_SUMS_EMBED_BYTES;
}

size_t k3_sums_n_items(const struct k3_model *m)
{
    return m->n_pieces + m->n_residents + k3_sums_n_experts(m) + k3_sums_n_embed(m);
}

size_t k3_sums_expert_key(const struct k3_model *m, uint32_t layer, uint32_t expert)
{
    return (size_t)(layer - m->cfg.first_dense) * m->cfg.n_experts + expert;
}

/* Kind and number within it. */
static enum k3_sum_kind kind_of(const struct k3_model *m, size_t i, size_t *in_kind)
{
    const size_t n[] = { m->n_pieces, m->n_residents, k3_sums_n_experts(m) };
    int kind = K3_SUM_PIECE;

    while (kind < K3_SUM_EMBED && i >= n[kind])
        i -= n[kind++];
    *in_kind = i;
    return (enum k3_sum_kind)kind;
}

static int expert_parts(const struct k3_model *m, size_t key, struct k3_sum_item *out)
{
    struct k3_expert_place p;
    int rc = k3_model_expert(m, m->cfg.first_dense + (uint32_t)(key / m->cfg.n_experts),
                             (uint32_t)(key % m->cfg.n_experts), &p);

    if (rc < 0)
        return rc;
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        uint32_t n_rows, n_cols, r = p.tensor_range[t];

        k3_names_expert_shape(&m->cfg, t, &n_rows, &n_cols);
        out->part[t] = (struct k3_sum_part){ p.range[r].off_bytes + p.tensor_off[t], (uint64_t)n_rows * n_cols,
                                             p.range[r].file };
    }
    out->n_parts = K3_EXPERT_TENSORS;
    return 0;
}

int k3_sums_item(const struct k3_model *m, size_t i, struct k3_sum_item *out)
{
    int rc = 0;

    *out = (struct k3_sum_item){ .n_parts = 1 };
    out->kind = kind_of(m, i, &out->i);
    if (out->kind == K3_SUM_PIECE) {
        const struct k3_piece *p = &m->pieces[out->i];

        out->part[0] = (struct k3_sum_part){ p->off_bytes, p->len_bytes, m->matrices[p->matrix].file };
    } else if (out->kind == K3_SUM_RESIDENT) {
        const struct k3_resident *r = &m->residents[out->i];

        out->part[0] = (struct k3_sum_part){ r->off_bytes, (uint64_t)r->n * k3_dtype_bytes(r->dtype), r->file };
    } else if (out->kind == K3_SUM_EXPERT) {
        rc = expert_parts(m, out->i, out);
    } else {
        uint64_t at = (uint64_t)out->i * K3_SUMS_EMBED_BYTES, left = embed_bytes(m) - at;

        out->part[0] = (struct k3_sum_part){ m->embed_off_bytes + at,
                                             left < K3_SUMS_EMBED_BYTES ? left : K3_SUMS_EMBED_BYTES, m->embed_file };
    }
    for (uint32_t k = 0; k < out->n_parts; k++)
        out->len_bytes += out->part[k].len_bytes;
    return rc;
}

void k3_sums_name(const struct k3_model *m, size_t i, char out[K3_SUMS_LINE_BYTES])
{
    size_t k;

    switch (kind_of(m, i, &k)) {
    case K3_SUM_PIECE: {
        const struct k3_piece *p = &m->pieces[k];
        const struct k3_matrix *x = &m->matrices[p->matrix];

        snprintf(out, K3_SUMS_LINE_BYTES, "piece %d %s %u %u", x->layer, k3_role_name(x->role), p->row, p->len_bytes);
        break;
    }
    case K3_SUM_RESIDENT:
        snprintf(out, K3_SUMS_LINE_BYTES, "resident %d %s", m->residents[k].layer,
                 k3_resident_role_name(m->residents[k].role));
        break;
    case K3_SUM_EXPERT:
        snprintf(out, K3_SUMS_LINE_BYTES, "expert %zu %zu", m->cfg.first_dense + k / m->cfg.n_experts,
                 k % m->cfg.n_experts);
        break;
    case K3_SUM_EMBED:
        snprintf(out, K3_SUMS_LINE_BYTES, "embed %zu", k);
        break;
    }
}

/* ---- lines ---- */

struct source { /* a text in memory (fd -1), or a file read through buf */
    const char *p, *end;
    char *buf;
    int fd;
    uint64_t at_bytes; /* of the line got last, in the text */
    uint64_t next_bytes;
};

/* The next line without its newline; *line is good until the next call.  1 = a line, 0 = the end, -EPROTO = longer
 * than any line can be, or without its newline at the end of the text; or what read() said. */
static int next_line(struct source *s, const char **line, size_t *len_bytes)
{
    for (;;) {
        size_t have = (size_t)(s->end - s->p);
        const char *nl = have ? memchr(s->p, '\n', have < K3_SUMS_LINE_BYTES ? have : K3_SUMS_LINE_BYTES) : NULL;
        ssize_t n;

        if (nl) {
            *line = s->p;
            *len_bytes = (size_t)(nl - s->p);
            s->p = nl + 1;
            s->at_bytes = s->next_bytes;
            s->next_bytes += *len_bytes + 1;
            return 1;
        }
        if (have >= K3_SUMS_LINE_BYTES)
            return -EPROTO;
        if (s->fd < 0)
            return have ? -EPROTO : 0;
        if (have)
            memmove(s->buf, s->p, have);
        do
            n = read(s->fd, s->buf + have, BUF_BYTES - have);
        while (n < 0 && errno == EINTR);
        if (n < 0)
            return -errno;
        s->p = s->buf;
        s->end = s->buf + have + n;
        if (n == 0)
            return have ? -EPROTO : 0;
    }
}

/* Exactly n hexadecimal digits in lower case. */
static bool take_hex(const char *p, size_t n, uint32_t *out)
{
    *out = 0;
    for (size_t i = 0; i < n; i++) {
        const char *digits = "0123456789abcdef", *at = p[i] ? strchr(digits, p[i]) : NULL;

        if (!at)
            return false;
        *out = *out << 4 | (uint32_t)(at - digits);
    }
    return true;
}

/* A whole number in plain decimal, at most 10 digits. */
static bool take_number(const char **p, const char *end, uint64_t *out)
{
    const char *begin = *p;

    for (*out = 0; *p < end && **p >= '0' && **p <= '9' && *p - begin < 10; (*p)++)
        *out = *out * 10 + (uint64_t)(**p - '0');
    return *p > begin;
}

struct parser {
    const struct k3_model *m;
    struct source src;
    struct k3_sums *out; /* NULL: nothing is kept */
    const char *path; /* for words */
    uint64_t n_lines;
    uint32_t crc;      /* of the lines before the one looked at */
    uint32_t n_layers; /* what the text covers */
    uint8_t digest[32];
    size_t next; /* item */
};

static int damaged(const struct parser *p, struct k3_err *err, const char *what)
{
    return k3_refuse(err, -EBADMSG, "%s line %" PRIu64 ": %s; make it anew (k3ctl verify --make --replace), or remove it", p->path,
                     p->n_lines + 1, what);
}

static int get_line(struct parser *p, const char **line, size_t *n, struct k3_err *err)
{
    int rc = next_line(&p->src, line, n);

    if (rc > 0)
        return 0;
    if (rc < 0 && rc != -EPROTO)
        return k3_fail(err, rc, "reading %s: %s", p->path, strerror(-rc));
    return damaged(p, err, rc == 0 ? "the text ends here, before its last line" : "cut short, or not a line of k3.sums");
}

static void line_over(struct parser *p, const char *line, size_t n)
{
    p->crc = k3_crc32c(k3_crc32c(p->crc, line, n), "\n", 1);
    p->n_lines++;
}

static int parse_head(struct parser *p, struct k3_err *err)
{
    static const char first[] = K3_SUMS_NAME " 1", model[] = "model ", layers[] = " layers ";
    const char *line, *at;
    uint64_t n_layers;
    size_t n;
    int rc = get_line(p, &line, &n, err);

    if (rc < 0)
        return rc;
    if (n != sizeof(first) - 1 || memcmp(line, first, n))
        return damaged(p, err, "must be \"" K3_SUMS_NAME " 1\"; this is no such file, or of another version");
    line_over(p, line, n);
    if ((rc = get_line(p, &line, &n, err)) < 0)
        return rc;
    if (n < 6 + 64 + 8 + 1 || memcmp(line, model, 6) || memcmp(line + 6 + 64, layers, 8))
        return damaged(p, err, "must be \"model DIGEST layers N\"");
    for (size_t i = 0; i < 32; i++) {
        uint32_t byte;

        if (!take_hex(line + 6 + 2 * i, 2, &byte))
            return damaged(p, err, "the model's digest must be 64 hexadecimal digits");
        p->digest[i] = (uint8_t)byte;
    }
    at = line + 6 + 64 + 8;
    if (!take_number(&at, line + n, &n_layers) || at != line + n || n_layers < 1 || n_layers > K3_MAX_LAYERS)
        return damaged(p, err, "the number of layers cannot be");
    p->n_layers = (uint32_t)n_layers;
    line_over(p, line, n);
    return 0;
}

/* A line of a layer that does not run here: "piece|resident|expert LAYER ... CRC". */
static bool of_other_layer(const struct parser *p, const char *line, size_t n)
{
    const char *at = memchr(line, ' ', n), *end = line + n;
    uint64_t layer;
    uint32_t crc;
    size_t word = at ? (size_t)(at - line) : 0;

    if (!((word == 5 && !memcmp(line, "piece", 5)) || (word == 8 && !memcmp(line, "resident", 8)) ||
          (word == 6 && !memcmp(line, "expert", 6))))
        return false;
    at++;
    return take_number(&at, end, &layer) && at < end && *at == ' ' && layer >= p->m->cfg.n_layers &&
           layer < p->n_layers && n > HEX_BYTES && line[n - HEX_BYTES - 1] == ' ' &&
           take_hex(end - HEX_BYTES, HEX_BYTES, &crc);
}

static void keep(struct parser *p, uint32_t crc)
{
    size_t i;
    enum k3_sum_kind kind = kind_of(p->m, p->next, &i);
    uint32_t *to;

    if (!p->out)
        return;
    to = kind == K3_SUM_PIECE      ? p->out->piece
         : kind == K3_SUM_RESIDENT ? p->out->resident
         : kind == K3_SUM_EXPERT   ? p->out->expert
                                   : p->out->embed;
    if (to)
        to[i] = crc;
}

/* 1 = the line of the next item, taken; 0 = one to pass over; -EBADMSG = neither. */
static int parse_item(struct parser *p, const char *line, size_t n)
{
    char name[K3_SUMS_LINE_BYTES];
    size_t len;
    uint32_t crc;

    if (p->next < k3_sums_n_items(p->m)) {
        k3_sums_name(p->m, p->next, name);
        len = strlen(name);
        if (n == len + 1 + HEX_BYTES && !memcmp(line, name, len) && line[len] == ' ' &&
            take_hex(line + len + 1, HEX_BYTES, &crc)) {
            keep(p, crc);
            p->next++;
            return 1;
        }
    }
    return of_other_layer(p, line, n) ? 0 : -EBADMSG;
}

static int parse_end(struct parser *p, const char *line, size_t n, struct k3_err *err)
{
    const char *at = line + 4, *end = line + n;
    uint64_t n_lines;
    uint32_t crc;

    if (!take_number(&at, end, &n_lines) || end - at != 1 + HEX_BYTES || *at != ' ' || !take_hex(at + 1, HEX_BYTES, &crc))
        return damaged(p, err, "must be \"end LINES CRC\"");
    if (n_lines != p->n_lines || crc != p->crc)
        return damaged(p, err, "the CRC or number of the lines before it is another: something was changed");
    if (p->src.p < p->src.end || next_line(&p->src, &line, &n) != 0) {
        p->n_lines++;
        return damaged(p, err, "something follows the last line");
    }
    return 0;
}

static int parse_body(struct parser *p, struct k3_err *err)
{
    size_t n_items = k3_sums_n_items(p->m), n;
    char name[K3_SUMS_LINE_BYTES], what[2 * K3_SUMS_LINE_BYTES];
    const char *line;
    int rc;

    for (;;) {
        if ((rc = get_line(p, &line, &n, err)) < 0)
            return rc;
        if (p->next == n_items && n > 4 && !memcmp(line, "end ", 4))
            return parse_end(p, line, n, err);
        if (parse_item(p, line, n) < 0) {
            if (p->next < n_items)
                k3_sums_name(p->m, p->next, name);
            else
                snprintf(name, sizeof(name), "end");
            snprintf(what, sizeof(what), "must be \"%s CRC\", is \"%.*s\"", name, (int)(n < 60 ? n : 60), line);
            return damaged(p, err, what);
        }
        line_over(p, line, n);
    }
}

/* ---- open ---- */

void k3_sums_free(struct k3_sums *s)
{
    if (!s)
        return;
    free(s->piece);
    free(s->resident);
    free(s->expert);
    free(s->embed);
    free(s);
}

static bool take_memory(uint32_t **to, bool wanted, size_t n)
{
    if (wanted)
        *to = calloc(n ? n : 1, sizeof(**to));
    return !wanted || *to;
}

static struct k3_sums *new_sums(const struct k3_model *m, unsigned want)
{
    struct k3_sums *s = calloc(1, sizeof(*s));

    if (s && take_memory(&s->piece, want & K3_SUMS_TRUNK, m->n_pieces) &&
        take_memory(&s->resident, want & K3_SUMS_TRUNK, m->n_residents) &&
        take_memory(&s->expert, want & K3_SUMS_EXPERTS, k3_sums_n_experts(m)) &&
        take_memory(&s->embed, want & K3_SUMS_EMBED, k3_sums_n_embed(m)))
        return s;
    k3_sums_free(s);
    return NULL;
}

int k3_sums_of_pack(struct k3_sums **out, const struct k3_model *m, struct k3_err *err)
{
    struct k3_sums *s = new_sums(m, K3_SUMS_TRUNK);

    if (!s)
        return k3_fail(err, -ENOMEM, "no memory for checksums");
    memcpy(s->resident, m->pack_crc, m->n_residents * sizeof(*s->resident));
    memcpy(s->piece, m->pack_crc + m->n_residents, m->n_pieces * sizeof(*s->piece));
    *out = s;
    return 0;
}

static int check_digest(const struct parser *p, const uint8_t digest[32], struct k3_err *err)
{
    char theirs[17], ours[17];

    if (p->n_layers < p->m->cfg.n_layers)
        return k3_refuse(err, -ESTALE, "%s covers %u layers, %u are to run: make it anew (k3ctl verify --make --replace), or remove it",
                         p->path, p->n_layers, p->m->cfg.n_layers);
    if (!memcmp(p->digest, digest, sizeof(p->digest)))
        return 0;
    for (int i = 0; i < 8; i++) {
        sprintf(theirs + 2 * i, "%02x", p->digest[i]);
        sprintf(ours + 2 * i, "%02x", digest[i]);
    }
    return k3_refuse(err, -ESTALE,
                     "%s is of another model (digest %s..., this one has %s...): make it anew (k3ctl verify --make --replace), or "
                     "remove it", p->path, theirs, ours);
}

int k3_sums_parse(struct k3_sums **out, const struct k3_model *m, unsigned want, const char *text, size_t len_bytes,
                  const uint8_t digest[32], uint32_t n_layers, struct k3_err *err)
{
    struct parser p = { .m = m, .path = K3_SUMS_NAME, .out = new_sums(m, want),
                        .src = { .p = text, .end = text + len_bytes, .fd = -1 } };
    int rc = p.out ? parse_head(&p, err) : k3_fail(err, -ENOMEM, "no memory for checksums");

    if (rc == 0 && p.n_layers != n_layers)
        rc = k3_refuse(err, -ESTALE, "%s covers %u layers, must be %u", p.path, p.n_layers, n_layers);
    if (rc == 0)
        rc = check_digest(&p, digest, err);
    if (rc == 0)
        rc = parse_body(&p, err);
    if (rc < 0)
        k3_sums_free(p.out);
    else
        *out = p.out;
    return rc;
}

/* The digest of the model with another number of layers. */
static int digest_of(const struct k3_model_opts *opts, uint32_t n_layers, uint8_t out[32], struct k3_err *err)
{
    struct k3_model_opts o = *opts;
    struct k3_model *m;
    int rc;

    o.n_layers = n_layers;
    o.want_experts = false;
    o.no_pack = true;
    rc = k3_model_open(&m, &o, err);
    if (rc < 0)
        return rc;
    memcpy(out, m->digest, sizeof(m->digest));
    k3_model_close(m);
    return 0;
}

static int open_text(const char *path, struct k3_err *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO in its place is refused, not waited for */

    if (fd < 0)
        return k3_refuse(err, -errno, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return k3_refuse(err, -EINVAL, "%s is not a regular file", path);
    }
    return fd;
}

static int check_model(struct parser *p, const struct k3_model_opts *opts, struct k3_err *err)
{
    struct k3_err inner = K3_ERR_INIT;
    uint8_t digest[32];
    int rc;

    memcpy(digest, p->m->digest, sizeof(digest));
    if (p->n_layers <= p->m->cfg.n_layers)
        return check_digest(p, digest, err);
    if (p->n_layers > p->m->cfg.n_layers_model)
        return k3_refuse(err, -ESTALE, "%s covers %u layers, the model has %u: it is of another model; remove it", p->path,
                         p->n_layers, p->m->cfg.n_layers_model);
    rc = digest_of(opts, p->n_layers, digest, &inner);
    if (rc < 0)
        return k3_refuse(err, rc, "%s covers %u layers, %u are to run, and whether it is of this model cannot be told: %.500s",
                         p->path, p->n_layers, p->m->cfg.n_layers, inner.text);
    return check_digest(p, digest, err);
}

int k3_sums_open(struct k3_sums **out, const struct k3_model *m, const struct k3_model_opts *opts, unsigned want,
                 struct k3_err *err)
{
    struct parser p = { .m = m, .src = { .fd = -1 } };
    char *path;
    int rc;

    if (asprintf(&path, "%s/%s", opts->dirs[0], K3_SUMS_NAME) < 0)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    p.path = path;
    rc = p.src.fd = open_text(path, err);
    if (rc >= 0) {
        p.src.p = p.src.end = p.src.buf = malloc(BUF_BYTES);
        p.out = new_sums(m, want);
        rc = p.src.buf && p.out ? parse_head(&p, err) : k3_fail(err, -ENOMEM, "no memory for checksums");
    }
    if (rc == 0)
        rc = check_model(&p, opts, err);
    if (rc == 0)
        rc = parse_body(&p, err);
    if (p.src.fd >= 0)
        close(p.src.fd);
    free(p.src.buf);
    free(path);
    if (rc < 0)
        k3_sums_free(p.out);
    else
        *out = p.out;
    return rc;
}

/* ---- writing ---- */

int k3_sums_head(const struct k3_model *m, char *out, size_t len_bytes)
{
    char hex[65];

    for (size_t i = 0; i < sizeof(m->digest); i++)
        sprintf(hex + 2 * i, "%02x", m->digest[i]);
    return snprintf(out, len_bytes, K3_SUMS_NAME " 1\nmodel %s layers %u\n", hex, m->cfg.n_layers);
}

int k3_sums_resume(int fd, const struct k3_model *m, size_t *n_items, uint64_t *end_bytes, uint32_t *crc,
                   struct k3_err *err)
{
    struct parser p = { .m = m, .path = K3_SUMS_NAME ".part", .src = { .fd = fd } };
    struct k3_err ignored = K3_ERR_INIT;
    const char *line;
    size_t n;

    *n_items = 0;
    *end_bytes = 0;
    *crc = 0;
    p.src.p = p.src.end = p.src.buf = malloc(BUF_BYTES);
    if (!p.src.buf)
        return k3_fail(err, -ENOMEM, "no memory for checksums");
    if (parse_head(&p, &ignored) == 0 && p.n_layers == m->cfg.n_layers &&
        !memcmp(p.digest, m->digest, sizeof(p.digest))) {
        *end_bytes = p.src.next_bytes;
        *crc = p.crc;
        while (next_line(&p.src, &line, &n) == 1 && parse_item(&p, line, n) == 1) {
            line_over(&p, line, n);
            *end_bytes = p.src.next_bytes;
            *crc = p.crc;
        }
        *n_items = p.next;
    }
    free(p.src.buf);
    return 0;
}
