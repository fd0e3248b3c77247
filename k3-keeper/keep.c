/* What is kept: at most one memfd a name. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "k3-keeper/keeper.h"

static struct k3_kept *find(struct k3_keep *k, const char *name)
{
    for (int i = 0; i < K3_KEEPER_SEGS; i++)
        if (strcmp(k->seg[i].name, name) == 0)
            return &k->seg[i];
    return NULL;
}

static void forget(struct k3_kept *s)
{
    if (s->name[0])
        close(s->fd);
    *s = (struct k3_kept){ .fd = -1 };
}

/* A memfd that cannot shrink, so that nobody's mapping loses its pages; only memfds have seals. */
static int check_memfd(int fd, uint64_t len_bytes)
{
    int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    struct stat st;

    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &st) == 0 && len_bytes > 0 &&
                   (uint64_t)st.st_size >= len_bytes
               ? 0
               : -EINVAL;
}

static int store(struct k3_keep *k, const struct k3_keeper_msg *m, int *fd)
{
    struct k3_kept *s = find(k, m->name);
    int rc = check_memfd(*fd, m->len_bytes);

    if (rc < 0)
        return rc;
    if (s && m->op == K3_KEEPER_STORE_ABSENT)
        return 0;
    if (!s)
        s = find(k, "");
    if (!s)
        return -ENOSPC;
    forget(s);
    memcpy(s->name, m->name, sizeof(s->name));
    s->fd = *fd;
    s->len_bytes = m->len_bytes;
    *fd = -1;
    return 0;
}

int k3_keep_answer(struct k3_keep *k, struct k3_keeper_msg *m, int fd, uint64_t now_ns)
{
    struct k3_kept *s = find(k, m->name);
    int out = -1;

    switch (m->op) {
    case K3_KEEPER_STORE:
    case K3_KEEPER_STORE_ABSENT:
        m->status = store(k, m, &fd);
        break;
    case K3_KEEPER_FETCH:
        m->status = s ? 0 : now_ns < k->settled_ns ? -EAGAIN : -ENOENT;
        m->len_bytes = s ? s->len_bytes : 0;
        out = s ? s->fd : -1;
        break;
    default: /* K3_KEEPER_DROP */
        m->status = 0;
        if (s)
            forget(s);
    }
    if (fd >= 0)
        close(fd);
    return out;
}

void k3_keep_close(struct k3_keep *k)
{
    for (int i = 0; i < K3_KEEPER_SEGS; i++)
        forget(&k->seg[i]);
}
