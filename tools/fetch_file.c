/* One file: what is there of it, the rest by one request or many, its sum, its name.
 *
 *     FILE.part  empty -> growing   bytes that follow what is there               take_bytes
 *                growing -> empty   sent whole again; not the file; another tag   empty
 *                full -> FILE       the sum is the announced one: fsync, rename   finish
 *                full -> empty      it is another one                             k3_fetch_one
 *     A death leaves a part that the next run goes on with: its tag is written before its first byte. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/fetch.h"

#define READ_BYTES (1u << 20)
#define MAX_WRONG 3
#define DEAR_BYTES (64u << 20) /* a part that is worth more than an fsync of its tag */
#define TAG_BYTES (K3_FETCH_ETAG_BYTES + 160)

struct part {
    const struct k3_fetch_place *place;
    const struct k3_fetch_file *f;
    struct k3_fetch_web *web;
    int fd;
    bool named;        /* has FILE.part and its tag; else only fd */
    char name[K3_FETCH_NAME_BYTES + 8], tag[K3_FETCH_NAME_BYTES + 12];
    char etag[K3_FETCH_ETAG_BYTES]; /* of what is in it; "" = none */
    uint64_t at_bytes; /* its length, all of it hashed */
    struct k3_fetch_hash *hash;
    char sha256[65];
};

static int file_fail(struct k3_err *err, const struct k3_fetch_place *p, const char *name, const char *what)
{
    int e = errno;

    if (e == ENOSPC || e == EDQUOT)
        return k3_fail(err, -e, "no room left in %s for %s; the same command goes on when there is", p->dir, name);
    return k3_fail(err, -e, "%s %s/%s: %s", what, p->dir, name, strerror(e));
}

/* ---- looking ---- */

int k3_fetch_look(const struct k3_fetch_place *p, struct k3_fetch_file *f, struct k3_err *err)
{
    char part[K3_FETCH_NAME_BYTES + 8];
    struct stat st;

    f->state = K3_FETCH_MISSING;
    f->part_bytes = 0;
    if (fstatat(p->dir_fd, f->name, &st, 0) == 0) {
        if (!S_ISREG(st.st_mode))
            return k3_refuse(err, -EINVAL, "%s/%s is no regular file", p->dir, f->name);
        if ((uint64_t)st.st_size == f->said.size_bytes) {
            f->state = K3_FETCH_HERE;
            return 0;
        }
    } else if (errno != ENOENT)
        return file_fail(err, p, f->name, "looking at");
    snprintf(part, sizeof(part), "%s.part", f->name);
    if (fstatat(p->dir_fd, part, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 &&
        (uint64_t)st.st_size <= f->said.size_bytes) {
        f->state = K3_FETCH_PART;
        f->part_bytes = (uint64_t)st.st_size;
    }
    return 0;
}

/* All bytes from the beginning of fd into h, at most max_bytes.  -EINTR without words when stop is set. */
static int hash_fd(int fd, uint64_t max_bytes, struct k3_fetch_hash *h, struct k3_fetch_web *w, uint64_t *got_bytes)
{
    char *buf = malloc(READ_BYTES);
    int rc = buf ? 0 : -ENOMEM;

    *got_bytes = 0;
    while (rc == 0 && *got_bytes < max_bytes) {
        uint64_t left = max_bytes - *got_bytes;
        ssize_t n = pread(fd, buf, left < READ_BYTES ? (size_t)left : READ_BYTES, (off_t)*got_bytes);

        if (n == 0)
            break;
        if (n < 0)
            rc = errno == EINTR ? 0 : -errno;
        else {
            k3_fetch_hash_add(h, buf, (size_t)n);
            *got_bytes += (uint64_t)n;
        }
        if (atomic_load_explicit(&w->stop, memory_order_relaxed))
            rc = -EINTR;
    }
    free(buf);
    return rc;
}

static bool right(const struct k3_fetch_said *said, const char *sha256, const char *git_sha1)
{
    return said->kind == K3_FETCH_NO_SUM || !strcmp(said->sum, said->kind == K3_FETCH_SHA256 ? sha256 : git_sha1);
}

int k3_fetch_compare(const struct k3_fetch_place *p, struct k3_fetch_web *w, const struct k3_fetch_file *f, char sha256[65],
                     char git_sha1[41], struct k3_err *err)
{
    struct k3_fetch_hash *h = k3_fetch_hash_begin(f->said.kind, f->said.size_bytes);
    int fd = openat(p->dir_fd, f->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;
    uint64_t got_bytes;

    if (fd < 0 || !h)
        rc = h ? file_fail(err, p, f->name, "opening") : k3_fail(err, -ENOMEM, "no memory for a sum");
    else {
        rc = hash_fd(fd, UINT64_MAX, h, w, &got_bytes);
        if (rc < 0) {
            errno = -rc;
            file_fail(err, p, f->name, "reading");
        } else {
            k3_fetch_hash_end(h, sha256, git_sha1);
            rc = got_bytes == f->said.size_bytes && right(&f->said, sha256, git_sha1);
        }
    }
    if (fd >= 0)
        close(fd);
    k3_fetch_hash_free(h);
    return rc;
}

/* ---- the tag ---- */

static int tag_head(const struct k3_fetch_said *said, char *out, size_t cap)
{
    return snprintf(out, cap, "k3-fetch 1\n%d %s %" PRIu64 "\n", (int)said->kind, said->sum[0] ? said->sum : "-", said->size_bytes);
}

/* Whether FILE.part is of this file; then its etag is known.  Without a sum only an ETag can tell. */
static bool tag_read(struct part *t)
{
    char text[TAG_BYTES], head[TAG_BYTES];
    int fd = openat(t->place->dir_fd, t->tag, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int n_head = tag_head(&t->f->said, head, sizeof(head));
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    char *etag;

    if (fd >= 0)
        close(fd);
    if (n < n_head + 1 || memcmp(text, head, (size_t)n_head) != 0 || text[n - 1] != '\n')
        return false;
    text[n - 1] = 0;
    etag = text + n_head;
    if (k3_fetch_etag_strong(etag) && strlen(etag) < sizeof(t->etag))
        strcpy(t->etag, etag);
    return t->etag[0] || t->f->said.kind != K3_FETCH_NO_SUM;
}

static int write_all(int fd, const void *bytes, size_t n)
{
    const char *at = bytes;

    while (n) {
        ssize_t k = write(fd, at, n);

        if (k < 0 && errno != EINTR)
            return -1;
        if (k > 0) {
            at += k;
            n -= (size_t)k;
        }
    }
    return 0;
}

static int tag_write(struct part *t, struct k3_err *err)
{
    char text[TAG_BYTES];
    int n, fd;

    if (!t->named)
        return 0;
    n = tag_head(&t->f->said, text, sizeof(text));
    n += snprintf(text + n, sizeof(text) - (size_t)n, "%s\n", t->etag[0] ? t->etag : "-");
    fd = openat(t->place->dir_fd, t->tag, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd < 0 || write_all(fd, text, (size_t)n) < 0 || (t->f->said.size_bytes >= DEAR_BYTES && fsync(fd) != 0)) {
        file_fail(err, t->place, t->tag, "writing");
        if (fd >= 0)
            close(fd);
        return -EIO;
    }
    close(fd);
    return 0;
}

/* ---- the part ---- */

static int empty(struct part *t, struct k3_err *err)
{
    atomic_fetch_sub(&t->web->new_bytes, t->at_bytes);
    t->at_bytes = 0;
    t->etag[0] = 0;
    k3_fetch_hash_free(t->hash);
    t->hash = k3_fetch_hash_begin(t->f->said.kind, t->f->said.size_bytes);
    if (!t->hash)
        return k3_fail(err, -ENOMEM, "no memory for a sum");
    if (ftruncate(t->fd, 0) != 0 || lseek(t->fd, 0, SEEK_SET) != 0)
        return file_fail(err, t->place, t->f->name, "emptying the part of");
    return 0;
}

static int take_begin(void *arg, uint64_t at_bytes, const char *etag, struct k3_err *err)
{
    struct part *t = arg;

    if (at_bytes != t->at_bytes && empty(t, err) < 0)
        return -1;
    if (t->at_bytes == 0) {
        snprintf(t->etag, sizeof(t->etag), "%s", k3_fetch_etag_strong(etag) ? etag : "");
        return tag_write(t, err);
    }
    return 0;
}

static int take_bytes(void *arg, const void *bytes, size_t n, struct k3_err *err)
{
    struct part *t = arg;

    if (write_all(t->fd, bytes, n) < 0)
        return file_fail(err, t->place, t->f->name, "writing the part of");
    k3_fetch_hash_add(t->hash, bytes, n);
    t->at_bytes += n;
    atomic_fetch_add_explicit(&t->web->new_bytes, n, memory_order_relaxed);
    return 0;
}

/* Opens FILE.part and reads what is there. */
static int part_open(struct part *t, struct k3_err *err)
{
    struct stat st;
    int rc;

    snprintf(t->name, sizeof(t->name), "%s.part", t->f->name);
    snprintf(t->tag, sizeof(t->tag), "%s.part.tag", t->f->name);
    t->fd = openat(t->place->dir_fd, t->name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (t->fd < 0 || fstat(t->fd, &st) != 0)
        return file_fail(err, t->place, t->name, "opening");
    if (!S_ISREG(st.st_mode))
        return k3_refuse(err, -EINVAL, "%s/%s is no regular file", t->place->dir, t->name);
    if (st.st_size == 0 || (uint64_t)st.st_size > t->f->said.size_bytes || !tag_read(t)) {
        t->at_bytes = t->f->part_bytes; /* what was counted as there already */
        return empty(t, err);
    }
    t->hash = k3_fetch_hash_begin(t->f->said.kind, t->f->said.size_bytes);
    if (!t->hash)
        return k3_fail(err, -ENOMEM, "no memory for a sum");
    rc = hash_fd(t->fd, (uint64_t)st.st_size, t->hash, t->web, &t->at_bytes);
    if (rc < 0) {
        errno = -rc;
        return file_fail(err, t->place, t->name, "reading");
    }
    if (lseek(t->fd, (off_t)t->at_bytes, SEEK_SET) < 0)
        return file_fail(err, t->place, t->name, "reading");
    return 0;
}

/* The part is full: whether it is right, in 1 or 0. */
static int finish(struct part *t, struct k3_err *err)
{
    char git_sha1[41];

    k3_fetch_hash_end(t->hash, t->sha256, git_sha1);
    if (!right(&t->f->said, t->sha256, git_sha1)) {
        k3_untrusted(err, -EBADMSG, "%s: what came has the sum %s, the hub announces %s", t->f->name,
                     t->f->said.kind == K3_FETCH_SHA256 ? t->sha256 : git_sha1, t->f->said.sum);
        return 0;
    }
    if (!t->named)
        return 1;
    if (fsync(t->fd) != 0 || renameat(t->place->dir_fd, t->name, t->place->dir_fd, t->f->name) != 0 ||
        (unlinkat(t->place->dir_fd, t->tag, 0) != 0 && errno != ENOENT) || fsync(t->place->dir_fd) != 0)
        return file_fail(err, t->place, t->f->name, "completing");
    return 1;
}

static enum k3_fetch_outcome once(struct k3_fetch_conn *c, struct part *t, double *wait_s, struct k3_err *err)
{
    struct k3_fetch_sink sink = { .arg = t, .from_bytes = t->at_bytes, .size_bytes = t->f->said.size_bytes,
                                  .begin = take_begin, .bytes = take_bytes };

    strcpy(sink.etag, t->etag);
    return k3_fetch_get(c, t->f->name, &sink, wait_s, err);
}

/* Requests until the part is full and right. */
static enum k3_fetch_outcome fill(struct k3_fetch_conn *c, struct part *t, struct k3_err *err)
{
    uint64_t most_bytes = t->at_bytes;
    uint32_t try = 0, n_wrong = 0;

    for (;;) {
        enum k3_fetch_outcome outcome = K3_FETCH_OK;
        double wait_s = 0;

        if (t->at_bytes < t->f->said.size_bytes || (t->at_bytes == 0 && n_wrong + try == 0))
            outcome = once(c, t, &wait_s, err);
        if (outcome == K3_FETCH_OK) {
            int rc = finish(t, err);

            if (rc != 0)
                return rc > 0 ? K3_FETCH_OK : K3_FETCH_FATAL;
            outcome = K3_FETCH_WRONG;
        }
        if (outcome == K3_FETCH_NONE)
            k3_fail(err, -ENOENT, "%s: the hub announced it and has it no more", t->f->name);
        if (outcome != K3_FETCH_AGAIN && outcome != K3_FETCH_WRONG)
            return outcome == K3_FETCH_NONE ? K3_FETCH_FATAL : outcome;
        if (outcome == K3_FETCH_WRONG) {
            struct k3_err why = *err;

            if (empty(t, err) < 0)
                return K3_FETCH_FATAL;
            *err = why;
            if (++n_wrong == MAX_WRONG)
                return K3_FETCH_WRONG;
        } else if (t->at_bytes > most_bytes) {
            most_bytes = t->at_bytes;
            try = 0;
        }
        if (outcome == K3_FETCH_AGAIN && ++try > t->web->retries)
            return K3_FETCH_FATAL;
        k3_fetch_wait(t->web, t->f->name, try ? try - 1 : 0, wait_s, err);
        if (atomic_load(&t->web->stop))
            return K3_FETCH_STOP;
    }
}

/* FILE as it is: OK when it is right, AGAIN when it is to be fetched. */
static enum k3_fetch_outcome there_already(struct part *t, struct k3_err *err)
{
    char wrong[K3_FETCH_NAME_BYTES + 8], git_sha1[41];
    struct stat st;
    int rc = 0;

    if (fstatat(t->place->dir_fd, t->f->name, &st, 0) != 0)
        return K3_FETCH_AGAIN;
    if ((uint64_t)st.st_size == t->f->said.size_bytes) {
        rc = k3_fetch_compare(t->place, t->web, t->f, t->sha256, git_sha1, err);
        if (rc < 0)
            return rc == -EINTR ? K3_FETCH_STOP : K3_FETCH_FATAL;
        if (rc == 1)
            return K3_FETCH_OK;
        atomic_fetch_sub(&t->web->new_bytes, t->f->said.size_bytes);
        atomic_fetch_add(&t->web->aside_bytes, t->f->said.size_bytes);
    }
    snprintf(wrong, sizeof(wrong), "%s.wrong", t->f->name);
    fprintf(stderr, "k3-fetch: %s has %s than the hub announces: now %s, and fetched again\n", t->f->name,
            (uint64_t)st.st_size == t->f->said.size_bytes ? "another sum" : "another size", wrong);
    if (renameat(t->place->dir_fd, t->f->name, t->place->dir_fd, wrong) != 0) {
        file_fail(err, t->place, t->f->name, "setting aside");
        return K3_FETCH_FATAL;
    }
    return K3_FETCH_AGAIN;
}

enum k3_fetch_outcome k3_fetch_one(struct k3_fetch_conn *c, struct k3_fetch_web *w, const struct k3_fetch_place *p,
                                   const struct k3_fetch_file *f, char sha256[65], struct k3_err *err)
{
    struct part t = { .place = p, .f = f, .web = w, .fd = -1, .named = true };
    enum k3_fetch_outcome outcome = there_already(&t, err);

    if (outcome == K3_FETCH_AGAIN) {
        outcome = K3_FETCH_FATAL;
        if (part_open(&t, err) == 0)
            outcome = fill(c, &t, err);
        else if (atomic_load(&w->stop))
            outcome = K3_FETCH_STOP;
    }
    if (t.fd >= 0) {
        if (outcome != K3_FETCH_OK)
            (void)fsync(t.fd); /* what is there is to be there after a power cut, too */
        close(t.fd);
    }
    k3_fetch_hash_free(t.hash);
    strcpy(sha256, t.sha256);
    return outcome;
}

enum k3_fetch_outcome k3_fetch_into(struct k3_fetch_conn *c, struct k3_fetch_web *w, const struct k3_fetch_place *p,
                                    const struct k3_fetch_file *f, int fd, struct k3_err *err)
{
    struct part t = { .place = p, .f = f, .web = w, .fd = fd };
    enum k3_fetch_outcome outcome = K3_FETCH_FATAL;

    if (empty(&t, err) == 0)
        outcome = fill(c, &t, err);
    k3_fetch_hash_free(t.hash);
    return outcome;
}
