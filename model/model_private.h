/* model/model_private.h: shared by model.c and experts.c alone. */
#ifndef K3_MODEL_MODEL_PRIVATE_H
#define K3_MODEL_MODEL_PRIVATE_H

#include "model/model.h"
#include "model/sha256.h"

/* While building: the index, what was missing so far, the files in use. */
struct k3_build {
    struct k3_model *m;
    struct k3_index *ix;
    struct k3_sha256 digest;
    char first_missing[192];
    uint64_t n_missing;
    uint16_t *file_map; /* index file -> model file, UINT16_MAX not yet used */
};

/* Finds a tensor; a missing one is counted (returns 0 and *out NULL). */
void k3_build_find(struct k3_build *b, const char *name, const struct k3_tensor **out);
/* Number of the tensor's file in the model (the file is added at its first use). */
int k3_build_file(struct k3_build *b, const struct k3_tensor *t, uint16_t *out, struct k3_err *err);
/* "[3072, 1792]" */
const char *k3_build_shape(const struct k3_tensor *t, char out[64]);

/* Walks all experts: checks them, fills expert_bytes and expert_slot_bytes, adds to the digest, and keeps the table when
 * keep is true. */
int k3_experts_build(struct k3_build *b, bool keep, struct k3_err *err);
void k3_experts_free(struct k3_expert_table *t);
size_t k3_experts_bytes(const struct k3_expert_table *t);

#endif
