/* tools/pack.h: copies the trunk of a checkpoint into one file in the order of a pass (model/pack.h). */
#ifndef K3_TOOLS_PACK_H
#define K3_TOOLS_PACK_H

#include "model/pack.h"

struct k3_pack_opts {
    const char *model, *out; /* directories */
    uint32_t n_layers;       /* 0 = all */
};
struct k3_pack_done {
    uint64_t file_bytes, kept_bytes; /* kept: from an earlier run that was stopped */
    size_t n_matrices, n_residents;
    bool was_there;  /* complete before: nothing was done */
    bool with_sums;  /* compared with k3.sums on the way */
};
/* Writes OUT/trunk.k3pack, by way of OUT/trunk.k3pack.part, from which a later call goes on.  Refused (exit 2): no room,
 * with what is needed and what there is, and nothing is left behind; a packed trunk of another model in OUT.  Exit 4: a
 * shard that cannot be read or is not what k3.sums says (the part is kept). */
int k3_pack_write(const struct k3_pack_opts *o, struct k3_pack_done *done, struct k3_err *err);

#endif
