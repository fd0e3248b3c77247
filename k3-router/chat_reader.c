#include "k3-router/chat_reader.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void k3_chat_at(struct k3_chat_reader *r, const char *fmt, ...)
{
    va_list ap;

    if (r->rc < 0)
        return;
    va_start(ap, fmt);
    vsnprintf(r->q->param, sizeof(r->q->param), fmt, ap);
    va_end(ap);
}

void k3_chat_bad(struct k3_chat_reader *r, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    if (r->rc < 0)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    r->rc = k3_refuse(r->err, -EINVAL, "%s: %s", r->q->param, text);
}

const char *k3_chat_quote(struct k3_chat_reader *r, struct k3_text t)
{
    size_t n = t.len_bytes;

    if (n > K3_CHAT_QUOTE_BYTES)
        for (n = K3_CHAT_QUOTE_BYTES; n > 0 && ((uint8_t)t.bytes[n] & 0xc0) == 0x80; n--)
            ;
    for (size_t i = 0; i < n; i++)
        r->quoted[i] = (uint8_t)t.bytes[i] < 0x20 || t.bytes[i] == 0x7f ? '?' : t.bytes[i];
    strcpy(r->quoted + n, n < t.len_bytes ? "..." : "");
    return r->quoted;
}

/* ---- memory ---- */

void k3_chat_no_memory(struct k3_chat_reader *r)
{
    if (r->rc == 0)
        r->rc = k3_fail(r->err, -ENOMEM, "chat request: no memory");
}

void k3_chat_own(struct k3_chat_reader *r, void *p)
{
    struct k3_chat_request *q = r->q;

    if (!p)
        return;
    if (q->n_owned == q->cap_owned) {
        size_t cap = q->cap_owned ? 2 * q->cap_owned : 64;
        void **more = reallocarray(q->owned, cap, sizeof(*more));
        if (!more) {
            free(p);
            k3_chat_no_memory(r);
            return;
        }
        q->owned = more;
        q->cap_owned = cap;
    }
    q->owned[q->n_owned++] = p;
}

void *k3_chat_many(struct k3_chat_reader *r, size_t n, size_t size_bytes)
{
    void *p;

    if (r->rc < 0 || n == 0)
        return NULL;
    p = calloc(n, size_bytes);
    if (!p)
        k3_chat_no_memory(r);
    k3_chat_own(r, p);
    return r->rc < 0 ? NULL : p;
}

struct k3_text k3_chat_json_text(struct k3_chat_reader *r, const struct k3_json *v, enum k3_json_style style)
{
    struct k3_buf b = { 0 };

    if (r->rc == 0 && k3_json_write(&b, v, style) < 0)
        k3_chat_no_memory(r);
    k3_chat_own(r, b.bytes);
    return r->rc < 0 ? (struct k3_text){ 0 } : (struct k3_text){ b.bytes, b.len_bytes };
}

/* ---- members ---- */

struct k3_text k3_chat_optional_string(struct k3_chat_reader *r, const struct k3_json *v)
{
    if (!v || v->type == K3_JSON_NULL)
        return (struct k3_text){ 0 };
    if (v->type != K3_JSON_STRING) {
        k3_chat_bad(r, "not a string");
        return (struct k3_text){ 0 };
    }
    return v->text;
}

bool k3_chat_optional_bool(struct k3_chat_reader *r, const struct k3_json *v, bool otherwise)
{
    if (!v || v->type == K3_JSON_NULL)
        return otherwise;
    if (v->type != K3_JSON_FALSE && v->type != K3_JSON_TRUE)
        k3_chat_bad(r, "neither true nor false");
    return v->type == K3_JSON_TRUE;
}

void k3_chat_only_members(struct k3_chat_reader *r, const struct k3_json *o, const char *where, const char *const *known, size_t n)
{
    for (const struct k3_json *m = o->child; m && r->rc == 0; m = m->next) {
        size_t i = 0;
        while (i < n && !k3_text_is(m->key, known[i]))
            i++;
        if (i == n) {
            k3_chat_at(r, "%s.%s", where, k3_chat_quote(r, m->key));
            k3_chat_bad(r, "not known here");
        }
    }
}

int k3_chat_by_name(const void *x, const void *y)
{
    const struct k3_text *a = x, *b = y;
    int d = memcmp(a->bytes, b->bytes, a->len_bytes < b->len_bytes ? a->len_bytes : b->len_bytes);

    return d ? d : (a->len_bytes > b->len_bytes) - (a->len_bytes < b->len_bytes);
}
