/* Header lines of a hub's replies.  Lines that make no sense are as good as absent. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "tools/fetch.h"

static bool is_hex(const char *s, size_t n)
{
    return strspn(s, "0123456789abcdefABCDEF") == n && strlen(s) == n;
}

/* "bytes FIRST-LAST/TOTAL" */
static bool range(const char *value, uint64_t *first, uint64_t *total)
{
    char text[80], *dash, *slash;
    uint64_t last;

    if (strncasecmp(value, "bytes ", 6) != 0 || strlen(value + 6) >= sizeof(text))
        return false;
    strcpy(text, value + 6);
    dash = strchr(text, '-');
    slash = strchr(text, '/');
    if (!dash || !slash || slash < dash)
        return false;
    *dash = *slash = 0;
    return k3_parse_u64(text, 0, UINT64_MAX, first) == 0 && k3_parse_u64(dash + 1, *first, UINT64_MAX, &last) == 0 &&
           k3_parse_u64(slash + 1, 1, UINT64_MAX, total) == 0 && last < *total;
}

void k3_fetch_head_line(struct k3_fetch_head *h, const char *line, size_t len_bytes)
{
    char text[1024], *value;
    size_t n;

    if (len_bytes >= 5 && !strncasecmp(line, "HTTP/", 5)) {
        *h = (struct k3_fetch_head){ .has_length = false };
        return;
    }
    while (len_bytes && (line[len_bytes - 1] == '\n' || line[len_bytes - 1] == '\r' || line[len_bytes - 1] == ' ' ||
                         line[len_bytes - 1] == '\t'))
        len_bytes--;
    if (len_bytes >= sizeof(text) || memchr(line, 0, len_bytes))
        return;
    memcpy(text, line, len_bytes);
    text[len_bytes] = 0;
    value = strchr(text, ':');
    if (!value)
        return;
    *value++ = 0;
    value += strspn(value, " \t");
    n = strlen(value);
    if (!strcasecmp(text, "content-length"))
        h->has_length = k3_parse_u64(value, 0, UINT64_MAX, &h->length_bytes) == 0;
    else if (!strcasecmp(text, "x-linked-size"))
        h->has_linked_size = k3_parse_u64(value, 0, UINT64_MAX, &h->linked_bytes) == 0;
    else if (!strcasecmp(text, "content-range"))
        h->has_range = range(value, &h->range_first, &h->range_total);
    else if (!strcasecmp(text, "etag") && n < sizeof(h->etag))
        strcpy(h->etag, value);
    else if (!strcasecmp(text, "x-linked-etag") && n < sizeof(h->linked_etag))
        strcpy(h->linked_etag, value);
    else if (!strcasecmp(text, "x-repo-commit") && is_hex(value, 40))
        strcpy(h->commit, value);
}

/* The sum that an entity tag is: 64 hex digits SHA-256, 40 the SHA-1 of a git blob, with or without W/ and quotes. */
static enum k3_fetch_sum sum_of_etag(const char *etag, char out[65])
{
    char text[K3_FETCH_ETAG_BYTES];
    size_t n;

    if (!strncmp(etag, "W/", 2))
        etag += 2;
    n = strlen(etag);
    if (n >= 2 && etag[0] == '"' && etag[n - 1] == '"') {
        etag++;
        n -= 2;
    }
    if (n != 64 && n != 40)
        return K3_FETCH_NO_SUM;
    memcpy(text, etag, n);
    text[n] = 0;
    if (!is_hex(text, n))
        return K3_FETCH_NO_SUM;
    for (size_t i = 0; i <= n; i++)
        out[i] = (char)(text[i] >= 'A' && text[i] <= 'F' ? text[i] + 32 : text[i]);
    return n == 64 ? K3_FETCH_SHA256 : K3_FETCH_GIT_SHA1;
}

void k3_fetch_head_said(const struct k3_fetch_head *h, bool redirect, struct k3_fetch_said *out)
{
    *out = (struct k3_fetch_said){ .has_size = h->has_linked_size, .size_bytes = h->linked_bytes };
    if (!out->has_size && !redirect) {
        out->has_size = h->has_length;
        out->size_bytes = h->length_bytes;
    }
    out->kind = sum_of_etag(h->linked_etag[0] ? h->linked_etag : h->etag, out->sum);
}

bool k3_fetch_etag_strong(const char *etag)
{
    size_t n = strlen(etag);

    if (n < 2 || etag[0] != '"' || etag[n - 1] != '"')
        return false;
    for (size_t i = 1; i + 1 < n; i++)
        if ((unsigned char)etag[i] <= 0x20 || etag[i] == '"' || (unsigned char)etag[i] >= 0x7f)
            return false;
    return true;
}
