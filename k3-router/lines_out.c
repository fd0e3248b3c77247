#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "k3-router/lines.h"

#define LINE_BYTES_MAX (1u << 30)
#define HEAD "{\"index\":"
#define NEXT ",\"crc\":\""

static bool get_u64(const struct k3_json *o, const char *key, uint64_t max, uint64_t *out)
{
    const struct k3_json *v = k3_json_get(o, key);

    return v && v->type == K3_JSON_NUMBER && k3_parse_u64(v->text.bytes, 0, max, out) == 0;
}

static bool get_crc(const struct k3_json *v, uint32_t *out)
{
    if (!v || v->type != K3_JSON_STRING || v->text.len_bytes != 8 || strspn(v->text.bytes, "0123456789abcdef") != 8)
        return false;
    *out = (uint32_t)strtoul(v->text.bytes, NULL, 16);
    return true;
}

bool k3_lines_out_parse(struct k3_lines_done *done, const char *text, size_t len_bytes)
{
    struct k3_json_doc d = { 0 };
    const struct k3_json *reason;
    uint64_t code = 0;
    bool ok;

    if (k3_json_parse(&d, text, len_bytes, NULL) < 0)
        return false;
    reason = k3_json_get(d.node, "finish_reason");
    ok = get_u64(d.node, "index", UINT64_MAX, &done->index) && get_crc(k3_json_get(d.node, "crc"), &done->crc) && reason &&
         reason->type == K3_JSON_STRING;
    if (ok && k3_text_is(reason->text, "error"))
        ok = get_u64(d.node, "code", 255, &code) && code != 0;
    done->code = (uint8_t)code;
    k3_json_free(&d);
    return ok;
}

/* What a write that was cut short leaves: the beginning of a line of ours, or zeros where blocks never reached the disk. */
static bool torn(const struct k3_line *line)
{
    const char *text = line->text.bytes, *zero = memchr(text, 0, line->text.len_bytes);
    size_t len = zero ? (size_t)(zero - text) : line->text.len_bytes, at;

    if (line->ended && !zero)
        return false;
    if (len <= strlen(HEAD))
        return memcmp(text, HEAD, len) == 0;
    for (at = strlen(HEAD); at < len && text[at] >= '0' && text[at] <= '9';)
        at++;
    len -= at;
    return memcmp(text, HEAD, strlen(HEAD)) == 0 && memcmp(text + at, NEXT, len < strlen(NEXT) ? len : strlen(NEXT)) == 0;
}

static int add(struct k3_lines_out *o, size_t *cap, const struct k3_lines_done *d)
{
    if (o->n_done == *cap) {
        struct k3_lines_done *more = realloc(o->done, (*cap ? 2 * *cap : 256) * sizeof(*more));
        if (!more)
            return -ENOMEM;
        o->done = more;
        *cap = *cap ? 2 * *cap : 256;
    }
    o->done[o->n_done++] = *d;
    return 0;
}

static int by_index(const void *a, const void *b)
{
    const struct k3_lines_done *x = a, *y = b;

    return x->index < y->index ? -1 : x->index > y->index;
}

static int read_done(struct k3_lines_out *o, struct k3_err *err)
{
    struct k3_line_reader *in = calloc(1, sizeof(*in));
    struct k3_lines_done d;
    struct k3_line line = { 0 }, bad = { 0 };
    size_t cap = 0;
    bool any_bad = false;
    int rc = in ? 1 : k3_fail(err, -ENOMEM, "--out %s: no memory", o->path);

    if (in)
        *in = (struct k3_line_reader){ .fd = o->fd, .name = o->path, .max_bytes = LINE_BYTES_MAX };
    while (rc > 0 && !any_bad && (rc = k3_line_next(in, &line, err)) > 0) {
        if (line.ended && k3_lines_out_parse(&d, line.text.bytes ? line.text.bytes : "", line.text.len_bytes)) {
            o->end_bytes = in->at_bytes;
            if (add(o, &cap, &d) < 0)
                rc = k3_fail(err, -ENOMEM, "--out %s: no memory", o->path);
            k3_buf_free(&line.text);
        } else {
            any_bad = true;
            bad = line;
            line.text = (struct k3_buf){ 0 };
        }
    }
    if (any_bad) {
        rc = bad.text.len_bytes && torn(&bad) ? k3_line_next(in, &line, err) : 1; /* only the last line can be torn */
        if (rc > 0)
            rc = k3_refuse(err, -EINVAL, "--out %s: line %llu is no answer of --lines; name another file", o->path,
                           (unsigned long long)bad.index + 1);
        k3_buf_free(&line.text);
        k3_buf_free(&bad.text);
    }
    free(in);
    return rc;
}

static int make_salt(struct k3_lines_out *o, const struct stat *st, struct k3_err *err)
{
    char *real = realpath(o->path, NULL);
    int n = real ? snprintf(o->salt, sizeof(o->salt), "%llu:%llu:%s", (unsigned long long)st->st_dev,
                            (unsigned long long)st->st_ino, strlen(real) < 512 ? real : real + strlen(real) - 511)
                 : -1;

    free(real);
    return n < 0 ? k3_fail(err, -errno, "--out %s: %s", o->path, strerror(errno)) : 0;
}

int k3_lines_out_open(struct k3_lines_out *o, const char *path, struct k3_err *err)
{
    struct stat st;
    int rc;

    *o = (struct k3_lines_out){ .fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0666), .path = path };
    if (o->fd < 0)
        return k3_refuse(err, -errno, "--out %s: %s", path, strerror(errno));
    if (fstat(o->fd, &st) < 0 || !S_ISREG(st.st_mode))
        return k3_refuse(err, -EINVAL, "--out %s: not a file", path);
    if (flock(o->fd, LOCK_EX | LOCK_NB) < 0)
        return k3_refuse(err, -EBUSY, "--out %s: in use by another k3-router", path);
    rc = make_salt(o, &st, err);
    if (rc == 0)
        rc = read_done(o, err);
    if (rc == 0 && fstat(o->fd, &st) == 0 && (uint64_t)st.st_size > o->end_bytes &&
        ftruncate(o->fd, (off_t)o->end_bytes) < 0)
        rc = k3_fail(err, -errno, "--out %s: cutting off a torn line: %s", path, strerror(errno));
    if (rc < 0)
        return rc;
    if (o->n_done)
        qsort(o->done, o->n_done, sizeof(*o->done), by_index);
    for (size_t i = 1; i < o->n_done; i++)
        if (o->done[i].index == o->done[i - 1].index)
            return k3_refuse(err, -EEXIST, "--out %s: two answers to line %llu; name another file", path,
                             (unsigned long long)o->done[i].index + 1);
    return 0;
}

const struct k3_lines_done *k3_lines_out_find(const struct k3_lines_out *o, uint64_t index)
{
    struct k3_lines_done key = { .index = index };

    return o->n_done ? bsearch(&key, o->done, o->n_done, sizeof(key), by_index) : NULL;
}

int k3_lines_out_write(struct k3_lines_out *o, const char *bytes, size_t len_bytes, struct k3_err *err)
{
    size_t at = 0;
    int rc = 0;

    while (at < len_bytes && rc == 0) {
        ssize_t n = write(o->fd, bytes + at, len_bytes - at);
        if (n < 0 && errno != EINTR)
            rc = -errno;
        if (n > 0)
            at += (size_t)n;
    }
    if (rc == 0 && fdatasync(o->fd) < 0)
        rc = -errno;
    if (rc == 0) {
        o->end_bytes += len_bytes;
        return 0;
    }
    return k3_fail(err, rc, "--out %s: %s%s", o->path, strerror(-rc),
                   ftruncate(o->fd, (off_t)o->end_bytes) < 0 ? " (its last line is torn; the next run cuts it off)" : "");
}

void k3_lines_out_close(struct k3_lines_out *o)
{
    if (o->fd >= 0)
        close(o->fd);
    free(o->done);
    *o = (struct k3_lines_out)K3_LINES_OUT_INIT;
}
