#include "model/ranks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Ids travel as int32 in places (JSON of clients, sampling); a vocabulary near that is a broken file. */
#define RANKS_MAX (1u << 28)

static int base64_digit(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes len characters (strict: whole groups, padding only at the end, no stray bits).  Bytes written, or -1. */
static long base64_decode(const char *in, size_t len, char *out)
{
    size_t pad = 0, n = 0;

    if (len == 0 || len % 4)
        return -1;
    while (pad < 2 && in[len - 1 - pad] == '=')
        pad++;
    for (size_t i = 0; i < len; i += 4) {
        size_t keep = i + 4 == len ? 3 - pad : 3;
        uint32_t v = 0;
        for (size_t k = 0; k < 4; k++) {
            int d = k <= keep ? base64_digit(in[i + k]) : 0;
            if (d < 0)
                return -1;
            v = v << 6 | (uint32_t)d;
        }
        if (keep < 3 && v & ((1u << (24 - 8 * keep)) - 1))
            return -1;
        for (size_t k = 0; k < keep; k++)
            out[n++] = (char)(v >> (16 - 8 * k));
    }
    return (long)n;
}

/* One line without its line end: base64, a space, the decimal rank, which must be `want`. */
static int parse_line(char *bytes, uint32_t *off, const char *line, size_t len, uint32_t want, const char *name,
                      struct k3_err *err)
{
    const char *space = memchr(line, ' ', len);
    size_t digits, line_no = (size_t)want + 1;
    uint64_t rank = 0;
    long n;

    if (!space)
        return k3_refuse(err, -EINVAL, "%s line %zu: no space; a line is BASE64 RANK", name, line_no);
    digits = len - (size_t)(space - line) - 1;
    for (size_t i = 1; i <= digits; i++) {
        if (space[i] < '0' || space[i] > '9' || digits > 10)
            return k3_refuse(err, -EINVAL, "%s line %zu: \"%.*s\" is not a rank; a line is BASE64 RANK", name, line_no,
                             (int)(digits > 40 ? 40 : digits), space + 1);
        rank = rank * 10 + (uint64_t)(space[i] - '0');
    }
    if (digits == 0 || rank != want)
        return k3_refuse(err, -EINVAL, "%s line %zu: rank %.*s where %u is due; ranks go 0, 1, 2, ... in file order",
                         name, line_no, (int)digits, space + 1, want);
    if ((size_t)(space - line) > K3_TOKEN_BYTES_MAX / 3 * 4)
        return k3_refuse(err, -EINVAL, "%s line %zu: a token of more than %u bytes", name, line_no, K3_TOKEN_BYTES_MAX);
    n = base64_decode(line, (size_t)(space - line), bytes + off[want]);
    if (n <= 0)
        return k3_refuse(err, -EINVAL, "%s line %zu: \"%.*s\" is not the base64 of a token", name, line_no,
                         (int)(space - line > 40 ? 40 : space - line), line);
    off[want + 1] = off[want] + (uint32_t)n;
    return 0;
}

int k3_ranks_parse(char **bytes, uint32_t **off, uint32_t *n, const char *text, size_t len_bytes, const char *name,
                   struct k3_err *err)
{
    size_t n_lines = 0;
    int rc;

    for (const char *p = text; p < text + len_bytes; p++, n_lines++)
        if (!(p = memchr(p, '\n', len_bytes - (size_t)(p - text)))) {
            n_lines++;
            break;
        }
    if (n_lines == 0)
        return k3_refuse(err, -EINVAL, "%s: empty; one line BASE64 RANK for each token is expected", name);
    if (n_lines > RANKS_MAX || len_bytes > K3_RANKS_FILE_MAX)
        return k3_refuse(err, -EFBIG, "%s: %zu lines in %zu bytes; at most %u ranks", name, n_lines, len_bytes, RANKS_MAX);
    *bytes = malloc(len_bytes); /* base64 is longer than what it stands for */
    *off = calloc(n_lines + 1, sizeof(**off));
    if (!*bytes || !*off)
        return k3_fail(err, -ENOMEM, "%s: no memory for %zu ranks", name, n_lines);
    for (size_t at = 0; *n < n_lines; ++*n) {
        const char *eol = memchr(text + at, '\n', len_bytes - at);
        size_t len = (eol ? (size_t)(eol - text) : len_bytes) - at, next = at + len + 1;
        if (eol && len && text[at + len - 1] == '\r')
            len--;
        rc = parse_line(*bytes, *off, text + at, len, *n, name, err);
        if (rc < 0)
            return rc;
        at = next;
    }
    return 0;
}
