#include "k3-router/talk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-router/chat_request.h"
#include "text/file.h"

void k3_talk_free(struct k3_talk *t)
{
    for (size_t i = 0; i < t->n; i++)
        k3_buf_free(&t->message[i]);
    free(t->message);
    *t = (struct k3_talk){ 0 };
}

/* The buffer moves into t, or is freed. */
static int push(struct k3_talk *t, struct k3_buf *message)
{
    if (t->n == t->cap) {
        struct k3_buf *more = reallocarray(t->message, t->cap + 16, sizeof(*more));
        if (!more) {
            k3_buf_free(message);
            return -ENOMEM;
        }
        t->message = more;
        t->cap += 16;
    }
    t->message[t->n++] = *message;
    return 0;
}

int k3_talk_add(struct k3_talk *t, const char *role, struct k3_text content, struct k3_text reasoning)
{
    struct k3_buf b = { 0 };
    int rc = k3_buf_printf(&b, "{\"role\":\"%s\",\"content\":", role);

    rc |= k3_buf_json(&b, content.bytes, content.len_bytes);
    if (reasoning.len_bytes) {
        rc |= k3_buf_puts(&b, ",\"reasoning_content\":");
        rc |= k3_buf_json(&b, reasoning.bytes, reasoning.len_bytes);
    }
    rc |= k3_buf_puts(&b, "}");
    if (rc) {
        k3_buf_free(&b);
        return -ENOMEM;
    }
    return push(t, &b);
}

int k3_talk_reset(struct k3_talk *t, struct k3_text system)
{
    k3_talk_free(t);
    return system.len_bytes ? k3_talk_add(t, "system", system, (struct k3_text){ 0 }) : 0;
}

static int put_messages(const struct k3_talk *t, struct k3_buf *out)
{
    int rc = 0;

    for (size_t i = 0; i < t->n; i++) {
        rc |= k3_buf_puts(out, i ? ",\n" : "");
        rc |= k3_buf_append(out, t->message[i].bytes, t->message[i].len_bytes);
    }
    return rc;
}

int k3_talk_json(const struct k3_talk *t, struct k3_buf *out)
{
    int rc = k3_buf_puts(out, "{\"messages\":[\n");

    rc |= put_messages(t, out);
    return rc | k3_buf_puts(out, "\n]}\n");
}

int k3_talk_render(const struct k3_talk *t, const struct k3_chat *c, struct k3_text user, const char *effort, bool *thinking,
                   struct k3_ids *out, struct k3_err *err)
{
    struct k3_chat_opts defaults = { .thinking = *thinking, .effort = effort };
    struct k3_chat_request q = { 0 };
    struct k3_json_doc d = { 0 };
    struct k3_buf b = { 0 };
    int rc = k3_buf_puts(&b, "{\"messages\":[");

    rc |= put_messages(t, &b);
    rc |= k3_buf_printf(&b, "%s{\"role\":\"user\",\"content\":", t->n ? "," : "");
    rc |= k3_buf_json(&b, user.bytes, user.len_bytes);
    rc |= k3_buf_puts(&b, "}]}");
    rc = rc ? k3_fail(err, -ENOMEM, "conversation: no memory") : k3_json_parse(&d, b.bytes, b.len_bytes, err);
    if (rc == 0)
        rc = k3_chat_request_read(&q, d.node, &defaults, err);
    if (rc == 0)
        rc = k3_chat_request_render(&q, c, out, err);
    *thinking = q.starts_thinking;
    k3_chat_request_free(&q);
    k3_json_free(&d);
    k3_buf_free(&b);
    return rc;
}

int k3_talk_parse(struct k3_talk *t, const struct k3_chat *c, const char *bytes, size_t len_bytes, struct k3_err *err)
{
    struct k3_text ask = { "?", 1 }; /* what comes next must be able to follow */
    const struct k3_json *list, *tools;
    struct k3_talk got = { 0 };
    struct k3_ids ids = { 0 };
    struct k3_json_doc d = { 0 };
    bool thinking = true;
    int rc = k3_json_parse(&d, len_bytes ? bytes : "", len_bytes, err);

    if (rc < 0)
        return rc;
    list = d.node->type == K3_JSON_ARRAY ? d.node : k3_json_get(d.node, "messages");
    tools = k3_json_value(d.node, "tools");
    if (!list || list->type != K3_JSON_ARRAY)
        rc = k3_refuse(err, -EINVAL, "no conversation: an object with \"messages\" is expected");
    else if (tools && !(tools->type == K3_JSON_ARRAY && tools->n == 0))
        rc = k3_refuse(err, -EINVAL, "it declares tools, and at a terminal there are none");
    for (const struct k3_json *v = rc == 0 ? list->child : NULL; v && rc == 0; v = v->next) {
        struct k3_buf b = { 0 };
        if (k3_json_write(&b, v, K3_JSON_SPACED) < 0 || push(&got, &b) < 0)
            rc = k3_fail(err, -ENOMEM, "conversation: no memory");
    }
    if (rc == 0)
        rc = k3_talk_render(&got, c, ask, NULL, &thinking, &ids, err);
    if (rc == 0) {
        k3_talk_free(t);
        *t = got;
        got = (struct k3_talk){ 0 };
    }
    k3_talk_free(&got);
    k3_ids_free(&ids);
    k3_json_free(&d);
    return rc;
}

/* ---- files ---- */

static int write_whole(int fd, const struct k3_buf *b)
{
    for (size_t at = 0; at < b->len_bytes;) {
        ssize_t n = write(fd, b->bytes + at, b->len_bytes - at);
        if (n < 0 && errno != EINTR)
            return -errno;
        at += n > 0 ? (size_t)n : 0;
    }
    return fsync(fd) < 0 ? -errno : 0;
}

int k3_talk_save(const struct k3_talk *t, const char *path, bool replace, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    char *temp = NULL;
    int fd, rc = k3_talk_json(t, &b);

    if (rc || asprintf(&temp, "%s.XXXXXX", path) < 0) {
        k3_buf_free(&b);
        return k3_fail(err, -ENOMEM, "%s: no memory", path);
    }
    fd = mkostemp(temp, O_CLOEXEC);
    rc = fd < 0 ? -errno : write_whole(fd, &b);
    if (fd >= 0 && close(fd) < 0 && rc == 0)
        rc = -errno;
    if (rc == 0 && (replace ? rename(temp, path) : link(temp, path)) < 0)
        rc = -errno;
    if (fd >= 0 && (rc < 0 || !replace))
        unlink(temp);
    if (rc == -EEXIST)
        k3_refuse(err, rc, "%s: there is a file already", path);
    else if (rc < 0)
        k3_refuse(err, rc, "%s: %s", path, strerror(-rc));
    free(temp);
    k3_buf_free(&b);
    return rc;
}

int k3_talk_load(struct k3_talk *t, const struct k3_chat *c, const char *path, struct k3_err *err)
{
    struct k3_err why = K3_ERR_INIT;
    struct k3_buf b = { 0 };
    int rc = k3_file_read(&b, path, K3_TALK_BYTES_MAX, err);

    if (rc == 0) {
        rc = k3_talk_parse(t, c, b.bytes, b.len_bytes, &why);
        if (rc < 0)
            k3_refuse(err, rc, "%s: %.900s", path, why.text);
    }
    k3_buf_free(&b);
    return rc;
}
