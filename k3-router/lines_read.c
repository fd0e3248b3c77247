#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "k3-router/lines.h"
#include "model/crc32c.h"

/* Bytes of the line that the block has.  A carriage return is held back until it is known what follows it. */
static int take(struct k3_line_reader *in, struct k3_line *line, const char *bytes, size_t len_bytes)
{
    size_t room = line->len_bytes < in->max_bytes ? in->max_bytes - (size_t)line->len_bytes : 0;

    line->crc = k3_crc32c(line->crc, bytes, len_bytes);
    line->len_bytes += len_bytes;
    return k3_buf_append(&line->text, bytes, len_bytes < room ? len_bytes : room);
}

static int fill(struct k3_line_reader *in, struct k3_err *err)
{
    ssize_t n;

    while ((n = read(in->fd, in->block, sizeof(in->block))) < 0) {
        if (errno != EINTR)
            return k3_fail(err, -errno, "%s: %s", in->name, strerror(errno));
        if (in->stop && in->stop(in->arg))
            return -EINTR;
    }
    in->n = (size_t)n;
    in->next = 0;
    return n > 0;
}

int k3_line_next(struct k3_line_reader *in, struct k3_line *line, struct k3_err *err)
{
    bool cr = false, any = false;
    int rc = 0;

    *line = (struct k3_line){ .index = in->index, .at_bytes = in->at_bytes };
    while (!line->ended) {
        const char *from, *eol;
        size_t len;

        if (in->next == in->n && (rc = fill(in, err)) <= 0)
            break;
        from = in->block + in->next;
        eol = memchr(from, '\n', in->n - in->next);
        len = eol ? (size_t)(eol - from) : in->n - in->next;
        any = true;
        in->next += len + (eol != NULL);
        in->at_bytes += len + (eol != NULL);
        if (cr && len)
            rc = take(in, line, "\r", 1);
        if (len)
            cr = from[len - 1] == '\r';
        if (rc >= 0 && len)
            rc = take(in, line, from, len - cr);
        line->ended = eol != NULL;
        if (rc < 0) {
            k3_fail(err, rc, "%s: no memory for line %llu", in->name, (unsigned long long)in->index + 1);
            break;
        }
    }
    if (rc < 0 || !any) {
        k3_buf_free(&line->text);
        return rc < 0 ? rc : 0;
    }
    in->index++;
    return 1;
}

uint64_t k3_lines_count(int fd)
{
    char block[65536];
    off_t at = lseek(fd, 0, SEEK_CUR);
    struct stat st;
    uint64_t lines = 0;
    char last = '\n';
    ssize_t n;

    if (at < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        return 0;
    while ((n = pread(fd, block, sizeof(block), at)) > 0) {
        for (const char *p = block; (p = memchr(p, '\n', (size_t)(block + n - p))); p++)
            lines++;
        last = block[n - 1];
        at += n;
    }
    return n < 0 ? 0 : lines + (last != '\n');
}
