/* Whether a packed trunk has the bytes of this model (pack.h). */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/crc32c.h"
#include "model/pack.h"
#include "model/sums.h"

#define N_ROLES (K3_N_RESIDENT_ROLES + K3_N_ROLES)

/* Of entry i of a table: the residents' roles, then those of matrices. */
static uint32_t role_of(const struct k3_model *m, size_t i)
{
    return i < m->n_residents ? m->residents[i].role
                              : K3_N_RESIDENT_ROLES + m->matrices[m->pieces[i - m->n_residents].matrix].role;
}

/* Its number among the things that have sums: there the pieces come first. */
static size_t sum_of(const struct k3_model *m, size_t i)
{
    return i < m->n_residents ? m->n_pieces + i : i - m->n_residents;
}

static int read_crc(const struct k3_model *m, size_t i, uint8_t *buf, uint32_t *crc, struct k3_err *err)
{
    struct k3_sum_item item;
    const char *path;
    int fd, rc = k3_sums_item(m, sum_of(m, i), &item);

    if (rc < 0)
        return k3_fail(err, rc, "entry %zu of a packed trunk has no place in the shards", i);
    path = m->files[item.part[0].file].path;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return k3_fail(err, -errno, "%s: %s", path, strerror(errno));
    rc = k3_crc32c_file(fd, item.part[0].off_bytes, item.len_bytes, buf, K3_PIECE_BYTES, crc);
    if (rc < 0)
        k3_fail(err, rc, "%s at %" PRIu64 ": %s", path, item.part[0].off_bytes,
                rc == -ENODATA ? "the file ends before" : strerror(-rc));
    (void)posix_fadvise(fd, (off_t)item.part[0].off_bytes, (off_t)item.len_bytes, POSIX_FADV_DONTNEED);
    close(fd);
    return rc;
}

int k3_pack_sample(const struct k3_model *shards, const uint32_t *crc, const uint8_t *have, size_t *differs, struct k3_err *err)
{
    size_t n = shards->n_residents + shards->n_pieces, of_role[N_ROLES] = { 0 }, seen[N_ROLES] = { 0 };
    uint8_t *buf = malloc(K3_PIECE_BYTES);
    int rc = 0;

    if (!buf)
        return k3_fail(err, -ENOMEM, "no memory for a piece");
    for (size_t i = 0; i < n; i++)
        of_role[role_of(shards, i)] += !have || have[i];
    for (size_t i = 0; i < n && rc == 0; i++) {
        uint32_t role = role_of(shards, i), there = 0;

        if ((have && !have[i]) || seen[role]++ != of_role[role] / 2)
            continue;
        rc = read_crc(shards, i, buf, &there, err);
        if (rc == 0 && there != crc[i]) {
            *differs = i;
            rc = 1;
        }
    }
    free(buf);
    return rc;
}

static const char *pack_path(const struct k3_model *m)
{
    return m->files[m->n_pieces ? m->matrices[m->pieces[0].matrix].file : m->residents[0].file].path;
}

static int refuse(const struct k3_model *m, size_t i, const char *of, struct k3_err *err)
{
    char name[K3_SUMS_LINE_BYTES];

    k3_sums_name(m, sum_of(m, i), name);
    return k3_refuse(err, -ESTALE, "%s is of another model of the same shape: its \"%s\" is not that of %s" K3_PACK_REMEDY,
                     pack_path(m), name, of);
}

int k3_pack_check_source(const struct k3_model *m, const struct k3_model_opts *opts, struct k3_err *err)
{
    struct k3_err ignored = K3_ERR_INIT;
    struct k3_model_opts o = *opts;
    struct k3_model *shards;
    size_t differs;
    int rc;

    if (!m->pack_crc)
        return 0;
    o.no_pack = true;
    o.want_experts = false;
    if (k3_model_open(&shards, &o, &ignored) < 0)
        return 0; /* nothing to compare with */
    rc = k3_pack_sample(shards, m->pack_crc, NULL, &differs, err);
    k3_model_close(shards);
    return rc == 1 ? refuse(m, differs, "the shards", err) : rc;
}

int k3_pack_check_sums(const struct k3_model *m, const struct k3_sums *sums, struct k3_err *err)
{
    for (size_t i = 0; m->pack_crc && i < m->n_residents + m->n_pieces; i++)
        if (m->pack_crc[i] != (i < m->n_residents ? sums->resident[i] : sums->piece[i - m->n_residents]))
            return refuse(m, i, K3_SUMS_NAME, err);
    return 0;
}
