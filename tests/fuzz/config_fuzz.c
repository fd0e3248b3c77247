/* Any bytes as config.json: refused with words, or a configuration within its bounds. */
#include <stdint.h>
#include <stdlib.h>

#include "model/config.h"
#include "model/names.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    int rc = k3_config_parse(&c, (const char *)data, size, 0, &err);

    if (rc < 0) {
        if (err.exit_status != K3_EXIT_REFUSED || !err.text[0])
            abort();
        return 0;
    }
    if (!c.hidden || !c.n_layers || c.n_layers > K3_MAX_LAYERS || c.top_k > c.n_experts || c.latent % 32 || !(c.rms_eps > 0))
        abort();
    for (int r = 0; r < K3_N_ROLES; r++) { /* widths that fit: a row is never longer than a piece */
        uint32_t n_rows, n_cols;

        k3_names_matrix_shape(&c, r, &n_rows, &n_cols);
        if (!n_rows || !n_cols || n_cols * 4ull > K3_PIECE_BYTES)
            abort();
    }
    return 0;
}
