/* model/names.h: the tensors of a checkpoint by role: which layer has which, their names and shapes
 * (spec/model.md 3.2, 3.3).  One table each; the loader and k3-mkmodel both use them. */
#ifndef K3_MODEL_NAMES_H
#define K3_MODEL_NAMES_H

#include "model/model.h"

#define K3_NAME_BYTES 160
#define K3_EMBED_NAME "language_model.model.embed_tokens.weight"

/* layer -1 is the model level.  The has functions hold for layers of any number below n_layers_model. */
bool k3_names_has_matrix(const struct k3_config *c, int layer, enum k3_role role);
bool k3_names_has_resident(const struct k3_config *c, int layer, enum k3_resident_role role);
void k3_names_matrix(char out[K3_NAME_BYTES], int layer, enum k3_role role);
void k3_names_resident(char out[K3_NAME_BYTES], int layer, enum k3_resident_role role);
void k3_names_expert(char out[K3_NAME_BYTES], int layer, uint32_t expert, uint32_t tensor);

void k3_names_matrix_shape(const struct k3_config *c, enum k3_role role, uint32_t *n_rows, uint32_t *n_cols);
/* Elements that are used; and the shape in the released files ([1, H] projections, [P, 1, taps] convolutions). */
uint32_t k3_names_resident_len(const struct k3_config *c, enum k3_resident_role role);
uint32_t k3_names_resident_shape(const struct k3_config *c, enum k3_resident_role role, uint32_t shape[K3_MAX_DIMS]);
/* Tensor t of an expert: rows and bytes of a row (U8). */
void k3_names_expert_shape(const struct k3_config *c, uint32_t tensor, uint32_t *n_rows, uint32_t *n_cols);
/* Bytes of the six tensors of an expert. */
uint64_t k3_names_expert_bytes(const struct k3_config *c);

#endif
