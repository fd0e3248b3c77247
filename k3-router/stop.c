#include "k3-router/stop.h"

#include <string.h>

/* At text[at]: 1 = a stop text stands here, -1 = one could still come to stand here, 0 = none. */
static int match_at(const struct k3_stop *s, size_t at)
{
    size_t left = s->held.len_bytes - at;
    int rc = 0;

    for (size_t i = 0; i < s->n; i++) {
        size_t len = strlen(s->text[i]);
        if (len <= left && memcmp(s->held.bytes + at, s->text[i], len) == 0)
            return 1;
        if (len > left && memcmp(s->held.bytes + at, s->text[i], left) == 0)
            rc = -1;
    }
    return rc;
}

int k3_stop_feed(struct k3_stop *s, const char *text, size_t len_bytes, struct k3_buf *out)
{
    size_t at = 0;
    int rc, m = 0;

    if (s->hit)
        return 0;
    if (s->n == 0)
        return k3_buf_append(out, text, len_bytes);
    rc = k3_buf_append(&s->held, text, len_bytes);
    while (rc == 0 && at < s->held.len_bytes && (m = match_at(s, at)) == 0)
        at++;
    if (rc == 0)
        rc = k3_buf_append(out, s->held.bytes, at);
    if (rc < 0)
        return rc;
    s->hit = at < s->held.len_bytes && m > 0;
    s->held.len_bytes -= at;
    if (s->held.len_bytes)
        memmove(s->held.bytes, s->held.bytes + at, s->held.len_bytes);
    return 0;
}

int k3_stop_flush(struct k3_stop *s, struct k3_buf *out)
{
    int rc = s->hit ? 0 : k3_buf_append(out, s->held.bytes, s->held.len_bytes);

    s->held.len_bytes = 0;
    return rc;
}

void k3_stop_free(struct k3_stop *s)
{
    k3_buf_free(&s->held);
}
