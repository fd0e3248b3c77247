#include "text/chat_json.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

/* ---- reading ---- */

struct reader {
    const char *p, *from, *end;
    struct k3_json *node;
    size_t n_nodes;
    char *text;             /* where the next string goes; there is always room, see k3_json_parse() */
    struct k3_json **order; /* scratch: the members of one object */
    size_t cap_order;
    struct k3_err *err;
};

static int bad(struct reader *r, const char *what)
{
    return k3_refuse(r->err, -EINVAL, "JSON: byte %zu: %s", (size_t)(r->p - r->from), what);
}

static void skip_space(struct reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t'))
        r->p++;
}

static bool take(struct reader *r, char c)
{
    if (r->p >= r->end || *r->p != c)
        return false;
    r->p++;
    return true;
}

static bool is_digit(const struct reader *r)
{
    return r->p < r->end && *r->p >= '0' && *r->p <= '9';
}

static bool hex4(const char *p, const char *end, uint32_t *out)
{
    *out = 0;
    if (end - p < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        uint32_t v = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                     : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                     : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                            : 16;
        if (v == 16)
            return false;
        *out = *out << 4 | v;
    }
    return true;
}

static void put_code_point(struct reader *r, uint32_t c)
{
    unsigned n_more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = { 0, 0xc0, 0xe0, 0xf0 };

    *r->text++ = (char)(lead[n_more] | c >> (6 * n_more));
    while (n_more-- > 0)
        *r->text++ = (char)(0x80 | (c >> (6 * n_more) & 0x3f));
}

/* Behind "\u": a pair of surrogates is one character, half of one is U+FFFD. */
static int read_u(struct reader *r)
{
    uint32_t c, low;

    if (!hex4(r->p, r->end, &c))
        return bad(r, "\\u without four hex digits");
    r->p += 4;
    if (c >= 0xd800 && c < 0xdc00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u' &&
        hex4(r->p + 2, r->end, &low) && low >= 0xdc00 && low < 0xe000) {
        r->p += 6;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    } else if (c >= 0xd800 && c < 0xe000) {
        c = 0xfffd;
    }
    put_code_point(r, c);
    return 0;
}

static int read_string(struct reader *r, struct k3_text *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *k;
    int rc = 0;

    out->bytes = r->text;
    if (!take(r, '"'))
        return bad(r, "a string is missing");
    while (rc == 0 && !take(r, '"')) {
        if (r->p >= r->end)
            return bad(r, "the string does not end");
        if ((uint8_t)*r->p < 0x20)
            return bad(r, "a control character in a string");
        if (*r->p != '\\') {
            *r->text++ = *r->p++;
        } else if (++r->p < r->end && *r->p == 'u') {
            r->p++;
            rc = read_u(r);
        } else if (r->p < r->end && *r->p && (k = strchr(from, *r->p))) {
            *r->text++ = to[k - from];
            r->p++;
        } else {
            rc = bad(r, "an unknown escape");
        }
    }
    out->len_bytes = (size_t)(r->text - out->bytes);
    *r->text++ = 0;
    return rc;
}

static int read_number(struct reader *r, struct k3_json *v)
{
    const char *from = r->p;

    take(r, '-');
    if (!is_digit(r))
        return bad(r, "no value");
    if (!take(r, '0'))
        while (is_digit(r))
            r->p++;
    if (take(r, '.')) {
        if (!is_digit(r))
            return bad(r, "a number without digits behind its point");
        while (is_digit(r))
            r->p++;
    }
    if (take(r, 'e') || take(r, 'E')) {
        if (!take(r, '+'))
            take(r, '-');
        if (!is_digit(r))
            return bad(r, "a number without digits in its exponent");
        while (is_digit(r))
            r->p++;
    }
    v->type = K3_JSON_NUMBER;
    v->text = (struct k3_text){ r->text, (size_t)(r->p - from) };
    memcpy(r->text, from, v->text.len_bytes);
    r->text += v->text.len_bytes;
    *r->text++ = 0;
    return 0;
}

static int compare_keys(const struct k3_json *a, const struct k3_json *b)
{
    size_t n = a->key.len_bytes < b->key.len_bytes ? a->key.len_bytes : b->key.len_bytes;
    int d = n ? memcmp(a->key.bytes, b->key.bytes, n) : 0;

    return d ? d : (a->key.len_bytes > b->key.len_bytes) - (a->key.len_bytes < b->key.len_bytes);
}

/* Members of one object: nodes lie in the order in which they were read. */
static int by_key(const void *x, const void *y)
{
    const struct k3_json *a = *(struct k3_json *const *)x, *b = *(struct k3_json *const *)y;
    int d = compare_keys(a, b);

    return d ? d : (a > b) - (a < b);
}

/* Equal keys: the first takes the value of the last, the others go. */
static int drop_equal_keys(struct reader *r, struct k3_json *o)
{
    size_t n = 0, i, k;
    struct k3_json *m, *next, *last = NULL;

    if (o->n < 2)
        return 0;
    if (o->n > r->cap_order) {
        free(r->order);
        r->cap_order = 2 * o->n;
        r->order = calloc(r->cap_order, sizeof(*r->order));
        if (!r->order) {
            r->cap_order = 0;
            return k3_fail(r->err, -ENOMEM, "JSON: no memory");
        }
    }
    for (m = (struct k3_json *)o->child; m; m = (struct k3_json *)m->next)
        r->order[n++] = m;
    qsort(r->order, n, sizeof(*r->order), by_key);
    for (i = 0; i < n; i = k) {
        for (k = i + 1; k < n && compare_keys(r->order[i], r->order[k]) == 0; k++)
            r->order[k]->key.bytes = NULL; /* a key that was read is never NULL */
        if (k > i + 1) {
            m = r->order[k - 1];
            r->order[i]->type = m->type;
            r->order[i]->text = m->text;
            r->order[i]->child = m->child;
            r->order[i]->n = m->n;
        }
    }
    for (m = (struct k3_json *)o->child; m; m = next) {
        next = (struct k3_json *)m->next;
        if (!m->key.bytes) {
            last->next = next; /* the first member is never a repetition */
            o->n--;
        } else {
            last = m;
        }
    }
    return 0;
}

static int read_value(struct reader *r, struct k3_json *v, unsigned depth);

static int read_children(struct reader *r, struct k3_json *v, unsigned depth)
{
    bool object = *r->p++ == '{';
    char close = object ? '}' : ']';
    const struct k3_json **link = &v->child;
    int rc = 0;

    v->type = object ? K3_JSON_OBJECT : K3_JSON_ARRAY;
    if (depth >= K3_JSON_DEPTH_MAX)
        return bad(r, "nested too deeply");
    skip_space(r);
    if (take(r, close))
        return 0;
    do {
        struct k3_json *c = &r->node[r->n_nodes++];
        memset(c, 0, sizeof(*c));
        skip_space(r);
        if (object) {
            rc = read_string(r, &c->key);
            skip_space(r);
            if (rc == 0 && !take(r, ':'))
                rc = bad(r, "a colon is missing");
        }
        if (rc == 0)
            rc = read_value(r, c, depth + 1);
        *link = c;
        link = &c->next;
        v->n++;
        skip_space(r);
    } while (rc == 0 && take(r, ','));
    if (rc == 0 && !take(r, close))
        rc = bad(r, object ? "a comma or } is missing" : "a comma or ] is missing");
    return rc == 0 && object ? drop_equal_keys(r, v) : rc;
}

static int read_value(struct reader *r, struct k3_json *v, unsigned depth)
{
    static const char *const word[] = { "null", "false", "true" };

    skip_space(r);
    if (r->p >= r->end)
        return bad(r, "a value is missing");
    if (*r->p == '{' || *r->p == '[')
        return read_children(r, v, depth);
    if (*r->p == '"') {
        v->type = K3_JSON_STRING;
        return read_string(r, &v->text);
    }
    for (int i = K3_JSON_NULL; i <= K3_JSON_TRUE; i++) {
        size_t n = strlen(word[i]);
        if ((size_t)(r->end - r->p) >= n && memcmp(r->p, word[i], n) == 0) {
            r->p += n;
            v->type = (enum k3_json_type)i;
            return 0;
        }
    }
    return read_number(r, v);
}

int k3_json_parse(struct k3_json_doc *d, const char *bytes, size_t len_bytes, struct k3_err *err)
{
    struct reader r = { .p = bytes, .from = bytes, .end = bytes + len_bytes, .err = err };
    size_t good = k3_utf8_check(bytes, len_bytes), n_nodes = 1;
    int rc;

    *d = (struct k3_json_doc){ 0 };
    if (good < len_bytes)
        return k3_refuse(err, -EILSEQ, "JSON: byte %zu is not UTF-8", good);
    /* Every child has one of these before it.  A string grows by no escape and has its quotes' room for the NUL;
     * a number has the byte behind it, or the one that is added here. */
    for (size_t i = 0; i < len_bytes; i++)
        n_nodes += bytes[i] == '[' || bytes[i] == ',' || bytes[i] == '{';
    d->node = n_nodes <= SIZE_MAX / sizeof(*d->node) ? malloc(n_nodes * sizeof(*d->node)) : NULL;
    d->text = malloc(len_bytes + 1);
    rc = d->node && d->text ? 0 : k3_fail(err, -ENOMEM, "JSON: no memory");
    if (rc == 0) {
        r.node = d->node;
        r.text = d->text;
        r.n_nodes = 1;
        memset(r.node, 0, sizeof(*r.node));
        rc = read_value(&r, r.node, 0);
        skip_space(&r);
        if (rc == 0 && r.p < r.end)
            rc = bad(&r, "something behind the value");
    }
    free(r.order);
    if (rc < 0)
        k3_json_free(d);
    return rc;
}

void k3_json_free(struct k3_json_doc *d)
{
    free(d->node);
    free(d->text);
    *d = (struct k3_json_doc){ 0 };
}

/* ---- looking ---- */

const struct k3_json *k3_json_get(const struct k3_json *o, const char *key)
{
    if (!o || o->type != K3_JSON_OBJECT)
        return NULL;
    for (o = o->child; o; o = o->next)
        if (k3_text_is(o->key, key))
            return o;
    return NULL;
}

const struct k3_json *k3_json_value(const struct k3_json *o, const char *key)
{
    const struct k3_json *v = k3_json_get(o, key);

    return v && v->type != K3_JSON_NULL ? v : NULL;
}

bool k3_text_is(struct k3_text t, const char *text)
{
    return t.len_bytes == strlen(text) && memcmp(t.bytes ? t.bytes : "", text, t.len_bytes) == 0;
}

bool k3_text_is_blank(struct k3_text t)
{
    const uint8_t *p = (const uint8_t *)t.bytes;

    for (size_t i = 0; i < t.len_bytes; i += k3_utf8_len(p[i]))
        if (!k3_utf8_is_space(k3_utf8_at(p + i), true))
            return false;
    return true;
}

/* ---- writing ---- */

int k3_json_escape(struct k3_buf *out, const char *text, size_t len_bytes)
{
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    size_t done = 0;
    int rc = 0;

    for (size_t i = 0; i < len_bytes && rc == 0; i++) {
        char c = text[i];
        const char *k = c ? strchr(from, c) : NULL;
        if ((uint8_t)c >= 0x20 && !k)
            continue;
        rc = k3_buf_append(out, text + done, i - done);
        done = i + 1;
        if (rc == 0)
            rc = k ? k3_buf_printf(out, "\\%c", to[k - from]) : k3_buf_printf(out, "\\u%04x", (unsigned)(uint8_t)c);
    }
    return rc || len_bytes == done ? rc : k3_buf_append(out, text + done, len_bytes - done);
}

static int write_string(struct k3_buf *out, struct k3_text t)
{
    int rc = k3_buf_puts(out, "\"");

    if (rc == 0)
        rc = k3_json_escape(out, t.bytes, t.len_bytes);
    return rc ? rc : k3_buf_puts(out, "\"");
}

#define REAL_TEXT 32
/* d.ddde±xx with n digits, 1 to 17: the one nearest to v or, when that does not read back as v, the next one away from zero.
 * Below a power of two the doubles are twice as dense, so the nearest of few digits can miss where that one does not. */
static bool digits_that_read_back(char text[REAL_TEXT], double v, int n)
{
    char *last;

    snprintf(text, REAL_TEXT, "%.*e", n - 1, v);
    if (strtod(text, NULL) == v)
        return true;
    last = strchr(text, 'e') - 1;
    if (*last == '9') /* the next one has fewer digits and has been tried */
        return false;
    ++*last;
    return strtod(text, NULL) == v;
}

/* The shortest decimal that reads back as v, in the form of Python's repr(). */
static int write_real(struct k3_buf *out, double v)
{
    char text[REAL_TEXT], digit[20];
    int n = 1, n_digits = 0, e, rc = 0;

    while (n < 17 && !digits_that_read_back(text, v, n))
        n++;
    if (n == 17)
        snprintf(text, sizeof(text), "%.16e", v);
    e = atoi(strchr(text, 'e') + 1);
    for (const char *p = text; *p != 'e'; p++)
        if (*p >= '0' && *p <= '9')
            digit[n_digits++] = *p;
    while (n_digits > 1 && digit[n_digits - 1] == '0')
        n_digits--;
    if (text[0] == '-')
        rc = k3_buf_puts(out, "-");
    if (rc == 0 && (e < -4 || e >= 16)) {
        rc = k3_buf_printf(out, "%c%s%.*se%c%02d", digit[0], n_digits > 1 ? "." : "", n_digits - 1, digit + 1,
                           e < 0 ? '-' : '+', abs(e));
    } else if (rc == 0 && e < 0) {
        rc = k3_buf_printf(out, "0.%.*s%.*s", -e - 1, "000", n_digits, digit);
    } else if (rc == 0 && n_digits <= e + 1) {
        rc = k3_buf_printf(out, "%.*s%.*s.0", n_digits, digit, e + 1 - n_digits, "0000000000000000");
    } else if (rc == 0) {
        rc = k3_buf_printf(out, "%.*s.%.*s", e + 1, digit, n_digits - e - 1, digit + e + 1);
    }
    return rc;
}

static int write_number(struct k3_buf *out, struct k3_text t)
{
    double v;

    if (!memchr(t.bytes, '.', t.len_bytes) && !memchr(t.bytes, 'e', t.len_bytes) && !memchr(t.bytes, 'E', t.len_bytes))
        return k3_text_is(t, "-0") ? k3_buf_puts(out, "0") : k3_buf_append(out, t.bytes, t.len_bytes);
    v = strtod(t.bytes, NULL);
    if (!isfinite(v)) /* no double is that large, and "Infinity" is no JSON */
        return k3_buf_append(out, t.bytes, t.len_bytes);
    return write_real(out, v);
}

static int write_children(struct k3_buf *out, const struct k3_json *v, enum k3_json_style style)
{
    bool object = v->type == K3_JSON_OBJECT;
    const struct k3_json **c = calloc(v->n + 1, sizeof(*c)), *m = v->child;
    int rc = c ? k3_buf_puts(out, object ? "{" : "[") : -ENOMEM;

    for (size_t i = 0; c && m; m = m->next)
        c[i++] = m;
    if (c && object && style == K3_JSON_SORTED && v->n > 1)
        qsort(c, v->n, sizeof(*c), by_key);
    for (size_t i = 0; i < v->n && rc == 0; i++) {
        if (i)
            rc = k3_buf_puts(out, style == K3_JSON_SORTED ? "," : ", ");
        if (rc == 0 && object)
            rc = write_string(out, c[i]->key);
        if (rc == 0 && object)
            rc = k3_buf_puts(out, style == K3_JSON_SORTED ? ":" : ": ");
        if (rc == 0)
            rc = k3_json_write(out, c[i], style);
    }
    free(c);
    return rc ? rc : k3_buf_puts(out, object ? "}" : "]");
}

int k3_json_write(struct k3_buf *out, const struct k3_json *v, enum k3_json_style style)
{
    switch (v->type) {
    case K3_JSON_NULL:
        return k3_buf_puts(out, "null");
    case K3_JSON_FALSE:
        return k3_buf_puts(out, "false");
    case K3_JSON_TRUE:
        return k3_buf_puts(out, "true");
    case K3_JSON_NUMBER:
        return write_number(out, v->text);
    case K3_JSON_STRING:
        return write_string(out, v->text);
    default:
        return write_children(out, v, style);
    }
}
