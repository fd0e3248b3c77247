#include "text/utf8.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

/* Starts a sequence: false when b can begin none.  need 0 means that b is a whole character. */
static bool start(struct k3_utf8_stream *s, uint8_t b)
{
    s->lo = 0x80;
    s->hi = 0xbf;
    if (b < 0x80) {
        s->need = 0;
    } else if (b >= 0xc2 && b <= 0xdf) {
        s->need = 1;
    } else if (b >= 0xe0 && b <= 0xef) {
        s->need = 2;
        s->lo = b == 0xe0 ? 0xa0 : 0x80;
        s->hi = b == 0xed ? 0x9f : 0xbf;
    } else if (b >= 0xf0 && b <= 0xf4) {
        s->need = 3;
        s->lo = b == 0xf0 ? 0x90 : 0x80;
        s->hi = b == 0xf4 ? 0x8f : 0xbf;
    } else {
        return false;
    }
    s->tail[0] = b;
    s->n = 1;
    return true;
}

int k3_utf8_feed(struct k3_utf8_stream *s, const void *bytes, size_t len_bytes, struct k3_buf *out)
{
    const uint8_t *p = bytes;
    int rc = 0;

    for (size_t i = 0; i < len_bytes && rc == 0; i++) {
        if (s->need && (p[i] < s->lo || p[i] > s->hi)) { /* the tail can no longer become a character */
            rc = k3_utf8_flush(s, out);
            if (rc < 0)
                break;
        }
        if (s->need) {
            s->tail[s->n++] = p[i];
            s->lo = 0x80;
            s->hi = 0xbf;
            s->need--;
        } else if (!start(s, p[i])) {
            rc = k3_buf_append(out, replacement, 3);
            continue;
        }
        if (s->need == 0) {
            rc = k3_buf_append(out, s->tail, s->n);
            s->n = 0;
        }
    }
    return rc;
}

int k3_utf8_flush(struct k3_utf8_stream *s, struct k3_buf *out)
{
    int rc = s->n ? k3_buf_append(out, replacement, 3) : 0;

    memset(s, 0, sizeof(*s));
    return rc;
}

size_t k3_utf8_check(const void *text, size_t len_bytes)
{
    const uint8_t *p = text;
    struct k3_utf8_stream s = { { 0 }, 0, 0, 0, 0 };

    for (size_t i = 0; i < len_bytes;) {
        size_t k = 1;
        if (!start(&s, p[i]))
            return i;
        for (; s.need; s.need--, k++) {
            if (i + k >= len_bytes || p[i + k] < s.lo || p[i + k] > s.hi)
                return i;
            s.lo = 0x80;
            s.hi = 0xbf;
        }
        i += k;
    }
    return len_bytes;
}

uint32_t k3_utf8_at(const uint8_t *p)
{
    if (p[0] < 0x80)
        return p[0];
    if (p[0] < 0xe0)
        return (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    if (p[0] < 0xf0)
        return (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 | (uint32_t)(p[2] & 0x3f) << 6 |
           (p[3] & 0x3f);
}

bool k3_utf8_is_space(uint32_t cp, bool python)
{
    if (cp <= 0x20)
        return cp == 0x20 || (cp >= 0x09 && cp <= 0x0d) || (python && cp >= 0x1c && cp <= 0x1f);
    return cp == 0x85 || cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 ||
           cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}
