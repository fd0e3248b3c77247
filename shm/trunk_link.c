#include "shm/trunk_link.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* The first eight hex digits of a digest. */
static const char *hex8(char out[9], const uint8_t *digest)
{
    snprintf(out, 9, "%02x%02x%02x%02x", digest[0], digest[1], digest[2], digest[3]);
    return out;
}

static int check_ctl(const struct k3_trunk_link *l, const struct k3_model *m, struct k3_err *err)
{
    const struct k3_trunk_ctl *c = l->ctl;
    uint64_t table_bytes, end;
    char ours[9], theirs[9];

    if (l->ctl_seg.len_bytes < sizeof(*c) || c->magic != K3_TRUNK_MAGIC)
        return k3_refuse(err, -EPROTO, "segment %s is not a trunk stream (%" PRIu64 " bytes)",
                         l->ctl_seg.name, l->ctl_seg.len_bytes);
    if (c->version != K3_TRUNK_VERSION)
        return k3_refuse(
            err, -EPROTO,
            "segment %s speaks version %u of the trunk stream, this program %u: start both "
            "daemons from one build",
            l->ctl_seg.name, c->version, K3_TRUNK_VERSION);
    if (memcmp(c->model_digest, m->digest, sizeof(c->model_digest)) != 0)
        return k3_refuse(
            err, -ESTALE,
            "model digest: k3-trunkd has %s, this program %s: start both with the same "
            "--model, --layers and devices",
            hex8(theirs, c->model_digest), hex8(ours, m->digest));
    if (c->n_pieces != m->n_pieces ||
        __builtin_mul_overflow(c->n_pieces, sizeof(struct k3_trunk_entry), &table_bytes) ||
        __builtin_add_overflow(c->table_off, table_bytes, &end) || end > l->ctl_seg.len_bytes ||
        c->table_off % alignof(struct k3_trunk_entry))
        return k3_refuse(err, -EPROTO,
                         "segment %s: table of %" PRIu64 " pieces at %" PRIu64 " in %" PRIu64
                         " bytes, the model has %zu pieces",
                         l->ctl_seg.name, c->n_pieces, c->table_off, l->ctl_seg.len_bytes,
                         m->n_pieces);
    if (c->align_bytes < K3_PAGE_BYTES || (c->align_bytes & (c->align_bytes - 1)) ||
        c->align_bytes > K3_HUGE_BYTES)
        return k3_refuse(err, -EPROTO,
                         "segment %s: pages of %u bytes, must be a power of two from %u to %u",
                         l->ctl_seg.name, c->align_bytes, K3_PAGE_BYTES, K3_HUGE_BYTES);
    return 0;
}

static int build_layout(struct k3_trunk_link *l, const struct k3_model *m, struct k3_err *err)
{
    const struct k3_trunk_entry *table = (const void *)(l->ctl_seg.base + l->ctl->table_off);
    uint8_t *pinned = malloc(m->n_pieces ? m->n_pieces : 1);
    char ours[9], theirs[9];
    int rc;

    if (!pinned)
        return k3_fail(err, -ENOMEM, "no memory for the pinned set of %zu pieces", m->n_pieces);
    for (size_t i = 0; i < m->n_pieces; i++)
        pinned[i] = table[i].pinned != 0;
    rc = k3_layout_build(&l->layout, m, l->ctl->align_bytes, l->ctl->ring_bytes, pinned, err);
    free(pinned);
    if (rc < 0)
        return rc;
    if (memcmp(l->layout.digest, l->ctl->layout_digest, sizeof(l->layout.digest)) != 0 ||
        l->layout.pass_bytes != l->ctl->pass_bytes || l->layout.data_bytes != l->ctl->data_bytes)
        return k3_refuse(
            err, -ESTALE,
            "layout digest: k3-trunkd has %s, this program %s: start both daemons from one "
            "build",
            hex8(theirs, l->ctl->layout_digest), hex8(ours, l->layout.digest));
    return 0;
}

static int open_data(struct k3_trunk_link *l, const char *instance, const char *rundir,
                     struct k3_err *err)
{
    const struct k3_data_place at = l->ctl->data;
    struct stat st;
    int rc = k3_data_open(&l->data, instance, rundir, "trunkdata", &at, err);

    if (rc < 0)
        return rc;
    l->head = (const struct k3_trunk_data *)(const void *)l->data.base;
    if (l->data.len_bytes < sizeof(*l->head) || l->data.len_bytes != l->layout.data_bytes ||
        l->head->magic != K3_TRUNK_DATA_MAGIC || l->head->version != K3_TRUNK_VERSION ||
        memcmp(l->head->layout_digest, l->layout.digest, sizeof(l->layout.digest)) != 0)
        return k3_refuse(err, -ESTALE,
                         "segment %s does not belong to segment %s: restart k3-trunkd",
                         l->data.name, l->ctl_seg.name);
    if (fstat(l->data.fd, &st) != 0)
        return k3_fail(err, -errno, "segment %s: %s", l->data.name, strerror(errno));
    l->data_dev = st.st_dev;
    l->data_ino = st.st_ino;
    l->flags = (const _Atomic uint32_t *)(const void *)(l->data.base + l->layout.flags_off);
    if (l->data.from != K3_MEM_SHM) {
        rc = k3_guard_open(&l->guard, rundir, &l->data, "trunkdata", false, err);
        if (rc < 0)
            return rc;
    }
    return k3_ring_map(&l->data, l->layout.ring_off, l->layout.ring_bytes, false, &l->ring, err);
}

int k3_trunk_link_open(struct k3_trunk_link *out, const char *instance, const char *rundir,
                       const struct k3_model *m, struct k3_err *err)
{
    struct k3_trunk_link l = K3_TRUNK_LINK_INIT;
    int rc = k3_seg_open(&l.ctl_seg, instance, "trunk", true, err);

    if (rc < 0)
        return rc;
    l.ctl = (struct k3_trunk_ctl *)(void *)l.ctl_seg.base;
    rc = check_ctl(&l, m, err);
    if (rc == 0)
        rc = build_layout(&l, m, err);
    if (rc == 0)
        rc = open_data(&l, instance, rundir, err);
    if (rc == 0 && !k3_seg_is_current(
                       &l.ctl_seg)) /* replaced meanwhile: the data may be of another generation */
        rc = -ENOENT;
    if (rc < 0) {
        k3_trunk_link_close(&l);
        return rc;
    }
    (void)madvise(l.ring, 2 * l.layout.ring_bytes,
                  MADV_POPULATE_READ); /* saves the faults; no error matters */
    *out = l;
    return 0;
}

void k3_trunk_link_close(struct k3_trunk_link *l)
{
    if (l->ring)
        k3_ring_unmap(l->ring, l->layout.ring_bytes);
    l->ring = NULL;
    k3_guard_close(l->guard);
    k3_seg_close(&l->data);
    k3_seg_close(&l->ctl_seg);
    k3_layout_free(&l->layout);
    *l = (struct k3_trunk_link)K3_TRUNK_LINK_INIT;
}
