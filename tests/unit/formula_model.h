/* tests/unit/formula_model.h: writes a checkpoint whose tensors come from their names by the generator of spec/model.md
 * 8.2, in the shape of that section or in any other. */
#ifndef K3_TESTS_FORMULA_MODEL_H
#define K3_TESTS_FORMULA_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "model/index.h"

struct k3_formula_shape {
    uint32_t hidden, layers, vocab;
    uint32_t kda_heads, kda_dim, taps, a_log_len;
    uint32_t mla_heads, q_lora, kv_lora, nope, rope, v_dim;
    uint32_t experts, top_k, shared, latent, inner, dense, first_dense, block;
    const uint32_t *full_attn; /* one-based, ends with 0 */
    bool gate, renormalize, latent_norm;
    float routed_scale, lower_bound;
    enum k3_dtype dtype; /* of what 8.2 has in BF16 */
};
extern const struct k3_formula_shape k3_formula_tiny; /* 8.2 */

/* Writes DIR/config.json and DIR/model-00001-of-000001.safetensors. */
int k3_formula_write(const char *dir, const struct k3_formula_shape *s, struct k3_err *err);

#endif
