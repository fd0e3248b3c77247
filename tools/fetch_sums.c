/* k3-fetch.sha256: lines "HEX  FILE", as sha256sum writes and reads them. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/fetch.h"

#define NEW_NAME K3_FETCH_SUMS ".new"

struct line { char sum[65], name[K3_FETCH_NAME_BYTES]; };
struct k3_fetch_sums {
    const struct k3_fetch_place *place;
    pthread_mutex_t lock; /* of all below */
    struct line *l;
    size_t n;
    int64_t mtime_ns; /* of the list as it was found; 0: there was none */
};

static struct line *find(const struct k3_fetch_sums *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (!strcmp(s->l[i].name, name))
            return &s->l[i];
    return NULL;
}

static int put(struct k3_fetch_sums *s, const char *name, const char *sum)
{
    struct line *at = find(s, name);

    if (!at) {
        struct line *more = realloc(s->l, (s->n + 1) * sizeof(*more));

        if (!more)
            return -ENOMEM;
        s->l = more;
        at = &more[s->n++];
        snprintf(at->name, sizeof(at->name), "%s", name);
    }
    snprintf(at->sum, sizeof(at->sum), "%s", sum);
    return 0;
}

static int read_lines(struct k3_fetch_sums *s, FILE *in)
{
    char text[64 + 2 + K3_FETCH_NAME_BYTES + 2];

    while (s->n < K3_FETCH_MAX_FILES && fgets(text, sizeof(text), in)) {
        size_t n = strcspn(text, "\n");

        if (text[n] != '\n' || n < 67 || strspn(text, "0123456789abcdef") != 64 || text[64] != ' ' || text[65] != ' ')
            continue;
        text[n] = text[64] = 0;
        if (k3_fetch_name_ok(text + 66) && put(s, text + 66, text) < 0)
            return -ENOMEM;
    }
    return 0;
}

int k3_fetch_sums_open(struct k3_fetch_sums **out, const struct k3_fetch_place *p, struct k3_err *err)
{
    struct k3_fetch_sums *s = calloc(1, sizeof(*s));
    int fd = openat(p->dir_fd, K3_FETCH_SUMS, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = s ? 0 : -ENOMEM;
    FILE *in = fd < 0 ? NULL : fdopen(fd, "r");
    struct stat st;

    if (s) {
        s->place = p;
        pthread_mutex_init(&s->lock, NULL);
    }
    if (rc == 0 && in && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        s->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
        rc = read_lines(s, in);
    }
    if (in)
        fclose(in);
    else if (fd >= 0)
        close(fd);
    if (rc < 0) {
        k3_fetch_sums_close(s);
        return k3_fail(err, rc, "no memory for " K3_FETCH_SUMS);
    }
    *out = s;
    return 0;
}

bool k3_fetch_sums_has(struct k3_fetch_sums *s, const char *name, const char *sha256, int64_t mtime_ns)
{
    const struct line *at;
    bool has;

    pthread_mutex_lock(&s->lock);
    at = find(s, name);
    has = at && !strcmp(at->sum, sha256) && mtime_ns <= s->mtime_ns;
    pthread_mutex_unlock(&s->lock);
    return has;
}

static int write_list(const struct k3_fetch_sums *s)
{
    int fd = openat(s->place->dir_fd, NEW_NAME, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644), bad = 0;
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");

    if (!f) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    for (size_t i = 0; i < s->n; i++)
        fprintf(f, "%s  %s\n", s->l[i].sum, s->l[i].name);
    bad = fflush(f) != 0 || fsync(fd) != 0;
    bad |= fclose(f) != 0;
    return bad || renameat(s->place->dir_fd, NEW_NAME, s->place->dir_fd, K3_FETCH_SUMS) != 0 ? -1 : 0;
}

int k3_fetch_sums_set(struct k3_fetch_sums *s, const char *name, const char *sha256, struct k3_err *err)
{
    int rc;

    pthread_mutex_lock(&s->lock);
    rc = put(s, name, sha256);
    if (rc == 0 && write_list(s) < 0)
        rc = -errno;
    pthread_mutex_unlock(&s->lock);
    return rc < 0 ? k3_fail(err, rc, "writing %s/" K3_FETCH_SUMS ": %s", s->place->dir, strerror(-rc)) : 0;
}

void k3_fetch_sums_close(struct k3_fetch_sums *s)
{
    if (!s)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s->l);
    free(s);
}
