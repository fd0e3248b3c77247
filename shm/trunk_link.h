/* shm/trunk_link.h: one attachment of computed to one generation of trunkd: the mappings and the
 * layout, checked. Private to shm/trunk_*.c. */
#ifndef K3_SHM_TRUNK_LINK_H
#define K3_SHM_TRUNK_LINK_H

#include <sys/types.h>

#include "shm/trunk.h"

struct k3_trunk_link {
    struct k3_seg ctl_seg, data;
    struct k3_guard *guard; /* of a data segment that has no name; else NULL */
    struct k3_trunk_ctl *ctl;
    const struct k3_trunk_data *head;
    const _Atomic uint32_t *flags;
    uint8_t *ring;
    struct k3_layout layout;
    dev_t data_dev;
    ino_t data_ino;
};
#define K3_TRUNK_LINK_INIT                                                                         \
    {                                                                                              \
        .ctl_seg = K3_SEG_INIT, .data = K3_SEG_INIT                                                \
    }

/* 0; -ENOENT: nobody there, or between two generations: try again later; anything else is a refusal
 * with words, which may still be owed to a segment that is just being replaced: believe it when it
 * comes again. */
int k3_trunk_link_open(struct k3_trunk_link *out, const char *instance, const char *rundir,
                       const struct k3_model *m, struct k3_err *err);
void k3_trunk_link_close(struct k3_trunk_link *l);

#endif
