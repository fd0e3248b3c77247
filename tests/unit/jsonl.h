/* tests/unit/jsonl.h: reads the test data files and the probe's input: lines of JSON whose strings may hold NUL, which
 * cJSON cannot give back.  Test code: anything unexpected ends the program. */
#ifndef K3_TESTS_JSONL_H
#define K3_TESTS_JSONL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/buf.h"

static inline void jsonl_die(const char *what, const char *line)
{
    fprintf(stderr, "test data: %s: %s\n", what, line);
    exit(2);
}

static inline unsigned jsonl_hex4(const char *p)
{
    char digits[5] = { p[0], p[1], p[2], p[3], 0 };
    return (unsigned)strtoul(digits, NULL, 16);
}

static inline void jsonl_put_cp(struct k3_buf *b, uint32_t c)
{
    char u[4];
    size_t n = 0;

    if (c < 0x80) {
        u[n++] = (char)c;
    } else if (c < 0x800) {
        u[n++] = (char)(0xc0 | c >> 6);
    } else if (c < 0x10000) {
        u[n++] = (char)(0xe0 | c >> 12);
        u[n++] = (char)(0x80 | (c >> 6 & 0x3f));
    } else {
        u[n++] = (char)(0xf0 | c >> 18);
        u[n++] = (char)(0x80 | (c >> 12 & 0x3f));
        u[n++] = (char)(0x80 | (c >> 6 & 0x3f));
    }
    if (c >= 0x80)
        u[n++] = (char)(0x80 | (c & 0x3f));
    k3_buf_append(b, u, n);
}

/* p points at the opening quote; returns the byte after the closing one.  out is replaced. */
static inline const char *jsonl_string(const char *p, struct k3_buf *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *line = p, *k;

    out->len_bytes = 0;
    if (*p++ != '"')
        jsonl_die("no string", line);
    for (; *p && *p != '"'; p++) {
        if (*p != '\\') {
            k3_buf_append(out, p, 1);
        } else if (*++p == 'u') {
            uint32_t c = jsonl_hex4(p + 1);
            p += 4;
            if (c >= 0xd800 && c < 0xdc00 && p[1] == '\\' && p[2] == 'u') {
                c = 0x10000 + ((c - 0xd800) << 10) + (jsonl_hex4(p + 3) - 0xdc00);
                p += 6;
            }
            jsonl_put_cp(out, c);
        } else if (*p && (k = strchr(from, *p))) {
            k3_buf_append(out, &to[k - from], 1);
        } else {
            jsonl_die("bad escape", line);
        }
    }
    if (*p != '"')
        jsonl_die("unterminated string", line);
    return p + 1;
}

/* The value of "key": in line; dies when there is none. */
static inline const char *jsonl_value(const char *line, const char *key)
{
    char want[64];
    const char *p;

    snprintf(want, sizeof(want), "\"%s\":", key);
    p = strstr(line, want);
    if (!p)
        jsonl_die(key, line);
    return p + strlen(want);
}

static inline void jsonl_ids(const char *p, struct k3_ids *out)
{
    char *end;

    out->n = 0;
    if (*p++ != '[')
        jsonl_die("no array", p);
    while (*p != ']') {
        k3_ids_push(out, (uint32_t)strtoul(p, &end, 10));
        if (end == p)
            jsonl_die("no number", p);
        p = *end == ',' ? end + 1 : end;
    }
}

#endif
