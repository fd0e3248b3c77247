/* tools/sim_trace.c: trace files as a table of passes, rows and layers.  Every number of a file is checked. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/config.h"
#include "tools/sim.h"

static int no_memory(const char *name, struct k3_err *err)
{
    return k3_fail(err, -ENOMEM, "%s: no memory for the trace", name);
}

/* Room for n more elements. */
static bool grow(void *array, size_t *cap, size_t have, size_t n, size_t size)
{
    size_t want = *cap ? *cap : 1024;
    void *bigger;

    if (n > SIZE_MAX / 4 / size - have)
        return false;
    while (want < have + n)
        want *= 2;
    if (want == *cap)
        return true;
    memcpy(&bigger, array, sizeof(bigger));
    bigger = realloc(bigger, want * size);
    if (!bigger)
        return false;
    memcpy(array, &bigger, sizeof(bigger));
    *cap = want;
    return true;
}
#define GROW(t, what, n) grow(&(t)->what, &(t)->cap_##what, (t)->n_##what, n, sizeof(*(t)->what))
/* The arrays are named in the singular, their counts in the plural. */
#define n_pass n_passes
#define n_layer n_layers
#define n_row n_rows
#define cap_pass cap_passes
#define cap_layer cap_layers
#define cap_row cap_rows

void k3_trace_free(struct k3_trace *t)
{
    free(t->pass);
    free(t->layer);
    free(t->row);
    free(t->ids);
    memset(t, 0, sizeof(*t));
}

int k3_trace_read(const char *path, void **data, size_t *len_bytes, struct k3_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = 0;
    struct stat st;
    uint8_t *to = NULL;
    size_t have = 0;

    if (fd < 0 || fstat(fd, &st) < 0)
        rc = k3_refuse(err, -errno, "trace %s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = k3_refuse(err, -EINVAL, "trace %s: not a regular file", path);
    else if (!(to = malloc((size_t)st.st_size + 1)))
        rc = k3_fail(err, -ENOMEM, "trace %s: no memory for its %lld bytes", path, (long long)st.st_size);
    while (rc == 0 && have < (size_t)st.st_size) {
        ssize_t n = read(fd, to + have, (size_t)st.st_size - have);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = k3_fail(err, -errno, "trace %s: %s at offset %zu", path, strerror(errno), have);
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    if (fd >= 0)
        close(fd);
    if (rc < 0) {
        free(to);
        return rc;
    }
    *data = to;
    *len_bytes = have;
    return 0;
}

/* ---- our own format ---- */

struct parse {
    struct k3_trace *t;
    const uint8_t *data;
    size_t len_bytes, at;
    const char *name;
    struct k3_err *err;
    struct k3_trace_pass pass; /* the one that is open; n_rows 0: none */
    struct { size_t rows, layers, ids; } before; /* where it began */
    size_t pass_at, look;
    uint32_t next_layer, look_layer;
};

static int check_head(struct parse *p)
{
    struct k3_trace_head *h = &p->t->head;

    if (p->len_bytes < sizeof(*h) || memcmp(p->data, K3_TRACE_MAGIC, sizeof(h->magic)) != 0)
        return k3_refuse(p->err, -EINVAL,
                         "%s: not a trace of k3ctl trace (%zu bytes, no \"" K3_TRACE_MAGIC "\" at the start); a file of (layer, "
                         "expert) pairs needs --raw", p->name, p->len_bytes);
    memcpy(h, p->data, sizeof(*h));
    if (h->version != K3_TRACE_VERSION || h->head_bytes != sizeof(*h))
        return k3_refuse(p->err, -EINVAL, "%s: version %u of the trace format, head of %u bytes; this program reads version "
                         "%u, head of %zu bytes", p->name, h->version, h->head_bytes, K3_TRACE_VERSION, sizeof(*h));
    if (h->n_layers == 0 || h->n_layers > K3_MAX_LAYERS || h->first_moe >= h->n_layers || h->n_experts == 0 ||
        h->n_experts > UINT16_MAX || h->top_k == 0 || h->top_k > h->n_experts || h->look_k > h->n_experts)
        return k3_refuse(p->err, -EINVAL, "%s: damaged head: %u layers, experts from layer %u, %u experts, top %u, look-ahead "
                         "%u", p->name, h->n_layers, h->first_moe, h->n_experts, h->top_k, h->look_k);
    p->at = sizeof(*h);
    return 0;
}

static int damaged(struct parse *p, const char *what, uint64_t value)
{
    return k3_refuse(p->err, -EINVAL, "%s: damaged at offset %zu: %s %llu", p->name, p->at, what,
                     (unsigned long long)value);
}

static int parse_pass(struct parse *p, uint32_t n_rows, const uint8_t *from)
{
    struct k3_trace *t = p->t;

    if (p->pass.n_rows)
        return damaged(p, "a pass begins inside pass", p->pass.number);
    if (!GROW(t, row, n_rows))
        return no_memory(p->name, p->err);
    p->before.rows = t->n_rows;
    p->before.layers = t->n_layers;
    p->before.ids = t->n_ids;
    p->pass_at = p->at;
    p->pass = (struct k3_trace_pass){ .first_row = t->n_rows, .first_layer = t->n_layers, .n_rows = n_rows };
    memcpy(&p->pass.number, from, sizeof(p->pass.number));
    for (uint32_t i = 0; i < n_rows; i++) {
        struct k3_trace_row *r = &t->row[t->n_rows++];

        memcpy(&r->sequence, from + 8 + i * 8, 4);
        memcpy(&r->position, from + 12 + i * 8, 4);
        r->counted = true;
    }
    p->next_layer = t->head.first_moe;
    p->look = K3_NO_LOOK;
    return 0;
}

/* ROUTES or LOOK of the pass at work. */
static int parse_ids(struct parse *p, uint32_t kind, uint32_t layer, const uint8_t *from)
{
    struct k3_trace *t = p->t;
    bool routes = kind == K3_TRACE_ROUTES;
    uint32_t k = routes ? t->head.top_k : t->head.look_k;
    size_t n = (size_t)p->pass.n_rows * k;

    if (!GROW(t, ids, n) || !GROW(t, layer, 1))
        return no_memory(p->name, p->err);
    memcpy(t->ids + t->n_ids, from, n * 2);
    for (size_t i = 0; i < n; i++) {
        const uint16_t *id = &t->ids[t->n_ids + i];

        if (*id >= t->head.n_experts)
            return damaged(p, "no such expert:", *id);
        if (routes && i % k && id[0] <= id[-1])
            return damaged(p, "experts of a row do not ascend:", *id);
    }
    if (routes) {
        t->layer[t->n_layers++] = (struct k3_trace_layer){
            .pass = (uint32_t)t->n_passes, .layer = layer, .ids = t->n_ids,
            .look = p->look_layer == layer ? p->look : K3_NO_LOOK };
        p->pass.n_layers++;
        p->next_layer = layer + 1;
        p->look = K3_NO_LOOK;
    } else {
        p->look = t->n_ids;
        p->look_layer = layer;
    }
    t->n_ids += n;
    return 0;
}

/* 1: the file ends inside the record. */
static int parse_record(struct parse *p)
{
    const struct k3_trace_head *h = &p->t->head;
    struct k3_trace_record r;
    size_t left = p->len_bytes - p->at, body;
    const uint8_t *from = p->data + p->at + sizeof(r);
    int rc;

    if (left < sizeof(r))
        return 1;
    memcpy(&r, p->data + p->at, sizeof(r));
    left -= sizeof(r);
    if (r.kind < K3_TRACE_PASS || r.kind > K3_TRACE_END)
        return damaged(p, "no such kind of record:", r.kind);
    if (r.kind == K3_TRACE_PASS && (r.n == 0 || r.n > K3_TRACE_ROWS_MAX))
        return damaged(p, "rows of a pass:", r.n);
    if (r.kind != K3_TRACE_PASS && p->pass.n_rows == 0)
        return damaged(p, "outside of a pass: a record of kind", r.kind);
    if ((r.kind == K3_TRACE_ROUTES || r.kind == K3_TRACE_LOOK) && (r.n < p->next_layer || r.n >= h->n_layers))
        return damaged(p, "layer out of order or range:", r.n);
    if (r.kind == K3_TRACE_LOOK && (h->look_k == 0 || p->look != K3_NO_LOOK))
        return damaged(p, "look-ahead that cannot be here, layer", r.n);
    if (r.kind == K3_TRACE_END && r.n > K3_TRACE_CUT)
        return damaged(p, "no such end of a pass:", r.n);
    body = r.kind == K3_TRACE_PASS     ? 8 + (size_t)r.n * 8
           : r.kind == K3_TRACE_END    ? 0
           : r.kind == K3_TRACE_ROUTES ? (size_t)p->pass.n_rows * h->top_k * 2
                                       : (size_t)p->pass.n_rows * h->look_k * 2;
    if (left < body)
        return 1;
    if (r.kind == K3_TRACE_PASS) {
        rc = parse_pass(p, r.n, from);
    } else if (r.kind == K3_TRACE_END) {
        if (!GROW(p->t, pass, 1))
            return no_memory(p->name, p->err);
        p->pass.end = r.n;
        p->t->pass[p->t->n_passes++] = p->pass;
        p->pass.n_rows = 0;
        rc = 0;
    } else {
        rc = parse_ids(p, r.kind, r.n, from);
    }
    p->at += sizeof(r) + body;
    return rc;
}

int k3_trace_parse(struct k3_trace *out, const void *data, size_t len_bytes, const char *name, struct k3_err *err)
{
    struct k3_trace t = { .n_passes = 0 };
    struct parse p = { .t = &t, .data = data, .len_bytes = len_bytes, .name = name, .err = err };
    int rc = check_head(&p);

    while (rc == 0 && p.at < len_bytes)
        rc = parse_record(&p);
    if (rc < 0) {
        k3_trace_free(&t);
        return rc;
    }
    if (p.pass.n_rows) { /* its rest was never written */
        t.cut_bytes = len_bytes - p.pass_at;
        t.n_rows = p.before.rows;
        t.n_layers = p.before.layers;
        t.n_ids = p.before.ids;
    } else if (rc == 1) {
        t.cut_bytes = len_bytes - p.at;
    }
    *out = t;
    return 0;
}

/* ---- pairs ---- */

static int raw_layer(struct k3_trace *t, uint32_t layer, const int32_t *pair, size_t n_pairs)
{
    if (!GROW(t, layer, 1) || !GROW(t, ids, n_pairs))
        return -ENOMEM;
    t->layer[t->n_layers++] = (struct k3_trace_layer){ .pass = (uint32_t)t->n_passes, .layer = layer, .ids = t->n_ids,
                                                       .look = K3_NO_LOOK };
    for (size_t i = 0; i < n_pairs; i++)
        t->ids[t->n_ids++] = (uint16_t)pair[2 * i + 1];
    return 0;
}

static int raw_pass_end(struct k3_trace *t, struct k3_trace_pass *p)
{
    if (!GROW(t, pass, 1) || !GROW(t, row, p->n_rows))
        return -ENOMEM;
    for (uint32_t i = 0; i < p->n_rows; i++)
        t->row[t->n_rows++] = (struct k3_trace_row){ .position = i, .counted = true };
    p->n_layers = (uint32_t)(t->n_layers - p->first_layer);
    p->number = t->n_passes;
    t->pass[t->n_passes++] = *p;
    *p = (struct k3_trace_pass){ .first_row = t->n_rows, .first_layer = t->n_layers };
    return 0;
}

int k3_trace_parse_raw(struct k3_trace *out, const void *data, size_t len_bytes, const char *name, uint32_t n_experts,
                       uint32_t top_k, uint64_t expert_bytes, struct k3_err *err)
{
    struct k3_trace t = { .head = { .n_experts = n_experts, .top_k = top_k, .expert_bytes = expert_bytes,
                                    .first_moe = UINT32_MAX } };
    struct k3_trace_pass pass = { .n_rows = 0 };
    const int32_t *pair = data; /* from malloc, or a copy of a fuzzer: aligned */
    size_t n = len_bytes / 8, begin = 0;
    uint32_t before = 0;
    int rc = 0;

    if (len_bytes == 0 || len_bytes % 8)
        return k3_refuse(err, -EINVAL, "%s: %zu bytes are no whole number of (layer, expert) pairs of 8 bytes", name,
                         len_bytes);
    if (len_bytes >= 8 && memcmp(data, K3_TRACE_MAGIC, 8) == 0)
        return k3_refuse(err, -EINVAL, "%s: a trace of k3ctl trace, not pairs: leave out --raw", name);
    for (size_t i = 0; i < n; i++)
        if (pair[2 * i] < 0 || pair[2 * i] >= K3_MAX_LAYERS || pair[2 * i + 1] < 0 || pair[2 * i + 1] >= (int64_t)n_experts)
            return k3_refuse(err, -EINVAL, "%s: pair %zu is (%d, %d): there are layers 0 to %d and experts 0 to %u", name, i,
                             pair[2 * i], pair[2 * i + 1], K3_MAX_LAYERS - 1, n_experts - 1);
    while (rc == 0 && begin < n) {
        uint32_t layer = (uint32_t)pair[2 * begin];
        size_t end = begin;

        while (end < n && (uint32_t)pair[2 * end] == layer)
            end++;
        if (pass.n_rows && layer <= before)
            rc = raw_pass_end(&t, &pass);
        if (rc == 0 && ((end - begin) % top_k || (end - begin) / top_k > K3_TRACE_ROWS_MAX ||
                        (pass.n_rows && (end - begin) / top_k != pass.n_rows))) {
            k3_trace_free(&t);
            return k3_refuse(err, -EINVAL, "%s: %zu pairs of layer %u from pair %zu on: no %u experts for each of %u rows",
                             name, end - begin, layer, begin, top_k, pass.n_rows);
        }
        pass.n_rows = (uint32_t)((end - begin) / top_k);
        if (rc == 0)
            rc = raw_layer(&t, layer, pair + 2 * begin, end - begin);
        t.head.n_layers = layer + 1 > t.head.n_layers ? layer + 1 : t.head.n_layers;
        t.head.first_moe = layer < t.head.first_moe ? layer : t.head.first_moe;
        before = layer;
        begin = end;
    }
    if (rc == 0)
        rc = raw_pass_end(&t, &pass);
    if (rc < 0) {
        k3_trace_free(&t);
        return no_memory(name, err);
    }
    *out = t;
    return 0;
}

/* ---- every position once ---- */

struct seen { uint32_t sequence, position; size_t row; };

static int by_position(const void *a, const void *b)
{
    const struct seen *x = a, *y = b;

    if (x->sequence != y->sequence)
        return x->sequence < y->sequence ? -1 : 1;
    if (x->position != y->position)
        return x->position < y->position ? -1 : 1;
    return (x->row > y->row) - (x->row < y->row);
}

int k3_trace_once(struct k3_trace *t, struct k3_err *err)
{
    struct seen *s = malloc((t->n_rows + 1) * sizeof(*s));

    if (!s)
        return k3_fail(err, -ENOMEM, "no memory for %zu rows", t->n_rows);
    for (size_t i = 0; i < t->n_rows; i++)
        s[i] = (struct seen){ t->row[i].sequence, t->row[i].position, i };
    qsort(s, t->n_rows, sizeof(*s), by_position);
    for (size_t i = 1; i < t->n_rows; i++)
        if (s[i].sequence == s[i - 1].sequence && s[i].position == s[i - 1].position)
            t->row[s[i].row].counted = false;
    free(s);
    return 0;
}
