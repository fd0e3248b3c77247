#include "constrain/vocab.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/file.h"
#include "model/ranks.h"

struct ranks { char *bytes; uint32_t *off, n; };

static int by_token(const void *a, const void *b, void *arg)
{
    const struct ranks *r = arg;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    uint32_t nx = r->off[x + 1] - r->off[x], ny = r->off[y + 1] - r->off[y];
    int d = memcmp(r->bytes + r->off[x], r->bytes + r->off[y], nx < ny ? nx : ny);

    return d ? d : nx != ny ? (nx > ny) - (nx < ny) : (x > y) - (x < y);
}

/* The entries from the sorted ids on. */
static void fill(struct k3_vocab *v, const struct ranks *r)
{
    const char *before = "";
    uint32_t n_before = 0, off = 0;

    for (uint32_t i = 0; i < v->n; i++) {
        uint32_t id = v->id[i], n = r->off[id + 1] - r->off[id], alike = 0;

        memcpy(v->bytes + off, r->bytes + r->off[id], n);
        while (alike < n && alike < n_before && v->bytes[off + alike] == before[alike])
            alike++;
        v->at[id] = i;
        v->off[i] = off;
        v->alike[i] = (uint16_t)alike;
        before = v->bytes + off;
        n_before = n;
        v->longest_bytes = n > v->longest_bytes ? n : v->longest_bytes;
        off += n;
    }
    v->off[v->n] = off;
}

static int check(const struct k3_vocab *v, const char *name, struct k3_err *err)
{
    bool single[256] = { false };

    for (uint32_t i = 0; i < v->n; i++) {
        uint32_t n = v->off[i + 1] - v->off[i];

        if (n == 1)
            single[(uint8_t)v->bytes[v->off[i]]] = true;
        if (i && n == v->alike[i] && n == v->off[i] - v->off[i - 1])
            return k3_refuse(err, -EEXIST, "%s line %u: the same token as line %u", name, v->id[i] + 1, v->id[i - 1] + 1);
    }
    for (unsigned c = 0; c < 256; c++)
        if (!single[c])
            return k3_refuse(err, -ENOENT, "%s: none of %u ranks is the single byte 0x%02x; every byte must be a token", name, v->n, c);
    return 0;
}

static int sort(struct k3_vocab *v, const struct ranks *r, const char *name, struct k3_err *err)
{
    v->n = r->n;
    v->id = malloc(v->n * sizeof(*v->id));
    v->at = malloc(v->n * sizeof(*v->at));
    v->off = malloc((v->n + (size_t)1) * sizeof(*v->off));
    v->alike = malloc(v->n * sizeof(*v->alike));
    v->bytes = malloc(r->off[r->n]);
    if (!v->id || !v->at || !v->off || !v->alike || !v->bytes)
        return k3_fail(err, -ENOMEM, "%s: no memory for %u tokens", name, v->n);
    for (uint32_t i = 0; i < v->n; i++)
        v->id[i] = i;
    qsort_r(v->id, v->n, sizeof(*v->id), by_token, (void *)(uintptr_t)r);
    fill(v, r);
    return check(v, name, err);
}

int k3_vocab_parse(struct k3_vocab **out, const char *ranks, size_t len_bytes, const char *name, struct k3_err *err)
{
    struct k3_vocab *v = calloc(1, sizeof(*v));
    struct ranks r = { NULL, NULL, 0 };
    int rc = v ? k3_ranks_parse(&r.bytes, &r.off, &r.n, ranks, len_bytes, name, err) : k3_fail(err, -ENOMEM, "%s: no memory", name);

    if (rc == 0)
        rc = sort(v, &r, name, err);
    free(r.bytes);
    free(r.off);
    if (rc == 0)
        *out = v;
    else
        k3_vocab_free(v);
    return rc;
}

int k3_vocab_open(struct k3_vocab **out, const char *dir, struct k3_err *err)
{
    struct k3_buf file = { 0 };
    char name[4200];
    int rc;

    snprintf(name, sizeof(name), "%s/tiktoken.model", dir);
    rc = k3_file_read(&file, name, K3_RANKS_FILE_MAX, err);
    if (rc == 0)
        rc = k3_vocab_parse(out, file.bytes, file.len_bytes, name, err);
    k3_buf_free(&file);
    return rc;
}

void k3_vocab_free(struct k3_vocab *v)
{
    if (!v)
        return;
    free(v->id);
    free(v->at);
    free(v->off);
    free(v->alike);
    free(v->bytes);
    free(v);
}

uint64_t k3_vocab_bytes(uint32_t n_vocab)
{
    /* 14 of id, at, off, alike; 8 of text.  While it is read: the file (base64, number; a growing buffer may be twice that),
     * its bytes, which take no more than the file, and their places: once, when nothing else is drawn. */
    return (uint64_t)n_vocab * (14 + 8 + 2 * 18 + 18 + 4);
}

void k3_vocab_walk(const struct k3_vocab *v, k3_step_fn *step, void *arg, uint64_t *allowed)
{
    uint32_t alive = 0; /* the states behind 0 .. alive bytes of the entry last looked at are there */

    for (uint32_t i = 0; i < v->n; i++) {
        uint32_t n = v->off[i + 1] - v->off[i], level = v->alike[i];
        const char *bytes = v->bytes + v->off[i];

        if (level > alive) /* it has the byte that was not allowed */
            continue;
        while (level < n && step(arg, level, (uint8_t)bytes[level]))
            level++;
        alive = level;
        if (level == n)
            k3_bit_set(allowed, v->id[i]);
    }
}
