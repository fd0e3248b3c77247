#include "text/buf.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int reserve(struct k3_buf *b, size_t more_bytes)
{
    size_t need, cap = b->cap_bytes ? b->cap_bytes : 256;
    char *p;

    if (__builtin_add_overflow(b->len_bytes, more_bytes, &need))
        return -ENOMEM;
    if (need <= b->cap_bytes)
        return 0;
    while (cap < need)
        if (__builtin_mul_overflow(cap, (size_t)2, &cap))
            return -ENOMEM;
    p = realloc(b->bytes, cap);
    if (!p)
        return -ENOMEM;
    b->bytes = p;
    b->cap_bytes = cap;
    return 0;
}

int k3_buf_append(struct k3_buf *b, const void *bytes, size_t len_bytes)
{
    if (len_bytes == 0)
        return 0;
    if (reserve(b, len_bytes) < 0)
        return -ENOMEM;
    memcpy(b->bytes + b->len_bytes, bytes, len_bytes);
    b->len_bytes += len_bytes;
    return 0;
}

int k3_buf_puts(struct k3_buf *b, const char *text)
{
    return k3_buf_append(b, text, strlen(text));
}

int k3_buf_printf(struct k3_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    int n;

    va_start(ap, fmt);
    va_copy(again, ap);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n >= 0 && reserve(b, (size_t)n + 1) == 0) {
        vsnprintf(b->bytes + b->len_bytes, (size_t)n + 1, fmt, again);
        b->len_bytes += (size_t)n;
    } else {
        n = -1;
    }
    va_end(again);
    return n < 0 ? -ENOMEM : 0;
}

int k3_buf_json(struct k3_buf *b, const char *text, size_t len_bytes)
{
    size_t from = 0;
    int rc = k3_buf_puts(b, "\"");

    for (size_t i = 0; i < len_bytes && rc == 0; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f)
            continue;
        rc = k3_buf_append(b, text + from, i - from);
        from = i + 1;
        if (rc == 0 && (c == '"' || c == '\\'))
            rc = k3_buf_printf(b, "\\%c", c);
        else if (rc == 0 && c == '\n')
            rc = k3_buf_puts(b, "\\n");
        else if (rc == 0)
            rc = k3_buf_printf(b, "\\u%04x", c);
    }
    if (rc == 0)
        rc = k3_buf_append(b, text + from, len_bytes - from);
    return rc ? rc : k3_buf_puts(b, "\"");
}

int k3_buf_json_ids(struct k3_buf *b, const struct k3_ids *ids)
{
    int rc = k3_buf_puts(b, "[");

    for (size_t i = 0; i < ids->n && rc == 0; i++)
        rc = k3_buf_printf(b, i ? ",%u" : "%u", ids->id[i]);
    return rc ? rc : k3_buf_puts(b, "]");
}

void k3_buf_free(struct k3_buf *b)
{
    free(b->bytes);
    *b = (struct k3_buf){ 0 };
}

int k3_ids_append(struct k3_ids *v, const uint32_t *id, size_t n)
{
    size_t need, cap = v->cap ? v->cap : 64, len_bytes;
    uint32_t *p;

    if (n == 0)
        return 0;
    if (__builtin_add_overflow(v->n, n, &need))
        return -ENOMEM;
    if (need > v->cap) {
        while (cap < need)
            if (__builtin_mul_overflow(cap, (size_t)2, &cap))
                return -ENOMEM;
        if (__builtin_mul_overflow(cap, sizeof(*p), &len_bytes))
            return -ENOMEM;
        p = realloc(v->id, len_bytes);
        if (!p)
            return -ENOMEM;
        v->id = p;
        v->cap = cap;
    }
    memcpy(v->id + v->n, id, n * sizeof(*id));
    v->n = need;
    return 0;
}

int k3_ids_push(struct k3_ids *v, uint32_t id)
{
    return k3_ids_append(v, &id, 1);
}

void k3_ids_free(struct k3_ids *v)
{
    free(v->id);
    *v = (struct k3_ids){ 0 };
}
