#include "model/scan.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void k3_scan_text(struct k3_scan *s, const char *text, size_t len_bytes)
{
    *s = (struct k3_scan){ .p = text, .end = text + len_bytes, .base = text, .fd = -1 };
}

void k3_scan_fd(struct k3_scan *s, int fd, char *buf, size_t buf_bytes)
{
    *s = (struct k3_scan){ .p = buf, .end = buf, .base = buf, .buf = buf, .buf_bytes = buf_bytes, .fd = fd };
}

uint64_t k3_scan_at(const struct k3_scan *s)
{
    return s->base_bytes + (uint64_t)(s->p - s->base);
}

static bool refill(struct k3_scan *s)
{
    uint64_t at = k3_scan_at(s);
    ssize_t n;

    if (s->fd < 0)
        return false;
    do
        n = pread(s->fd, s->buf, s->buf_bytes, (off_t)at);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        s->failed = true;
    if (n <= 0)
        return false;
    posix_fadvise(s->fd, (off_t)at, n, POSIX_FADV_DONTNEED);
    s->base = s->p = s->buf;
    s->end = s->buf + n;
    s->base_bytes = at;
    return true;
}

static inline int get(struct k3_scan *s)
{
    if (s->p == s->end && !refill(s))
        return -1;
    return (unsigned char)*s->p++;
}

static int bad(const struct k3_scan *s)
{
    return s->failed ? -EIO : -EPROTO;
}

int k3_scan_peek(struct k3_scan *s)
{
    for (;;) {
        if (s->p == s->end && !refill(s))
            return -1;
        if (*s->p != ' ' && *s->p != '\n' && *s->p != '\r' && *s->p != '\t')
            return (unsigned char)*s->p;
        s->p++;
    }
}

bool k3_scan_is(struct k3_scan *s, char c)
{
    if (k3_scan_peek(s) != (unsigned char)c)
        return false;
    s->p++;
    return true;
}

int k3_scan_want(struct k3_scan *s, char c)
{
    return k3_scan_is(s, c) ? 0 : bad(s);
}

static int hex4(struct k3_scan *s, uint32_t *out)
{
    uint32_t v = 0;

    for (int i = 0; i < 4; i++) {
        int c = get(s), d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;

        if (c < 0 || d < 0)
            return bad(s);
        v = v << 4 | (uint32_t)d;
    }
    *out = v;
    return 0;
}

/* What follows a backslash, as UTF-8 in utf8[4]; returns its length or a negative errno. */
static int escape(struct k3_scan *s, char utf8[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = get(s);
    const char *hit = c > 0 ? strchr(from, c) : NULL;
    uint32_t v, low;

    if (hit) {
        utf8[0] = to[hit - from];
        return 1;
    }
    if (c != 'u' || hex4(s, &v) < 0 || v == 0 || (v >= 0xdc00 && v <= 0xdfff))
        return bad(s);
    if (v >= 0xd800 && v <= 0xdbff) {
        if (get(s) != '\\' || get(s) != 'u' || hex4(s, &low) < 0 || low < 0xdc00 || low > 0xdfff)
            return bad(s);
        v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
    }
    if (v < 0x80) {
        utf8[0] = (char)v;
        return 1;
    }
    if (v < 0x800) {
        utf8[0] = (char)(0xc0 | v >> 6);
        utf8[1] = (char)(0x80 | (v & 63));
        return 2;
    }
    if (v < 0x10000) {
        utf8[0] = (char)(0xe0 | v >> 12);
        utf8[1] = (char)(0x80 | (v >> 6 & 63));
        utf8[2] = (char)(0x80 | (v & 63));
        return 3;
    }
    utf8[0] = (char)(0xf0 | v >> 18);
    utf8[1] = (char)(0x80 | (v >> 12 & 63));
    utf8[2] = (char)(0x80 | (v >> 6 & 63));
    utf8[3] = (char)(0x80 | (v & 63));
    return 4;
}

int k3_scan_string(struct k3_scan *s, char *out, size_t cap, size_t *len_bytes)
{
    size_t n = 0;
    char utf8[4];

    if (!k3_scan_is(s, '"'))
        return bad(s);
    for (;;) {
        const char *from = s->p;
        int c, k = 1;

        /* plain bytes in one go: names are two thirds of a header */
        while (s->p < s->end && (unsigned char)*s->p >= 0x20 && *s->p != '"' && *s->p != '\\')
            s->p++;
        if ((size_t)(s->p - from) >= cap - n)
            return -ENAMETOOLONG;
        memcpy(out + n, from, (size_t)(s->p - from));
        n += (size_t)(s->p - from);
        c = get(s);
        if (c == '"')
            break;
        if (c < 0x20)
            return bad(s); /* the end of the text, or a raw control character */
        utf8[0] = (char)c;
        if (c == '\\' && (k = escape(s, utf8)) < 0)
            return k;
        if (n + (size_t)k >= cap)
            return -ENAMETOOLONG;
        for (int i = 0; i < k; i++)
            out[n++] = utf8[i];
    }
    out[n] = '\0';
    if (len_bytes)
        *len_bytes = n;
    return 0;
}

int k3_scan_u64(struct k3_scan *s, uint64_t *out)
{
    uint64_t v = 0;
    int c = k3_scan_peek(s), n = 0;

    while (c >= '0' && c <= '9') {
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(c - '0'), &v))
            return -EPROTO;
        if (n++ && v < 10)
            return -EPROTO; /* 01 */
        s->p++;
        c = s->p < s->end || refill(s) ? (unsigned char)*s->p : -1;
    }
    if (n == 0 || c == '.' || (c | 32) == 'e')
        return bad(s);
    *out = v;
    return 0;
}

static int skip_string(struct k3_scan *s)
{
    char utf8[4];

    if (!k3_scan_is(s, '"'))
        return bad(s);
    for (;;) {
        int c = get(s);

        if (c == '"')
            return 0;
        if (c < 0x20 || (c == '\\' && escape(s, utf8) < 0))
            return bad(s);
    }
}

static int skip_number(struct k3_scan *s)
{
    int n_digits = 0;

    k3_scan_is(s, '-');
    for (;;) {
        int c = s->p < s->end || refill(s) ? (unsigned char)*s->p : -1;

        if (c >= '0' && c <= '9')
            n_digits++;
        else if (c != '.' && c != '-' && c != '+' && c != 'e' && c != 'E')
            break;
        s->p++;
    }
    return n_digits ? 0 : bad(s);
}

static int skip_word(struct k3_scan *s, const char *word)
{
    for (; *word; word++)
        if (get(s) != *word)
            return bad(s);
    return 0;
}

static int skip_plain(struct k3_scan *s)
{
    switch (k3_scan_peek(s)) {
    case '"':
        return skip_string(s);
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    default:
        return skip_number(s);
    }
}

int k3_scan_skip(struct k3_scan *s)
{
    char open[64];
    int depth = 0, rc;

    for (;;) {
        /* one value: open a container that has a member, or take a plain value or an empty container */
        int c = k3_scan_peek(s);

        if (c == '{' || c == '[') {
            if (depth == (int)sizeof(open))
                return -EPROTO;
            s->p++;
            open[depth++] = (char)c;
            if (k3_scan_is(s, c == '{' ? '}' : ']')) {
                depth--;
            } else {
                if (c == '{' && ((rc = skip_string(s)) < 0 || (rc = k3_scan_want(s, ':')) < 0))
                    return rc;
                continue;
            }
        } else if ((rc = skip_plain(s)) < 0) {
            return rc;
        }
        /* after a value: close what ends here, or go on to the next member */
        while (depth && k3_scan_is(s, open[depth - 1] == '{' ? '}' : ']'))
            depth--;
        if (depth == 0)
            return 0;
        if ((rc = k3_scan_want(s, ',')) < 0)
            return rc;
        if (open[depth - 1] == '{' && ((rc = skip_string(s)) < 0 || (rc = k3_scan_want(s, ':')) < 0))
            return rc;
    }
}

int k3_scan_strings(struct k3_scan *s, int (*visit)(void *arg, const char *name, const char *value), void *arg)
{
    char name[1024], value[512];
    int rc = k3_scan_want(s, '{');

    if (rc < 0 || k3_scan_is(s, '}'))
        return rc;
    do {
        if ((rc = k3_scan_string(s, name, sizeof(name), NULL)) < 0 || (rc = k3_scan_want(s, ':')) < 0 ||
            (rc = k3_scan_string(s, value, sizeof(value), NULL)) < 0 || (rc = visit(arg, name, value)) != 0)
            return rc;
    } while (k3_scan_is(s, ','));
    return k3_scan_want(s, '}');
}
