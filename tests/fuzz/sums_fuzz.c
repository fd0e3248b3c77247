/* Any bytes as k3.sums of a small model.  What is accepted has every line, with the CRC that it says. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/sums.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct k3_matrix matrices[2] = {
    { .n_rows = 4, .n_cols = 8, .layer = 0, .role = K3_W_KDA_Q, .dtype = K3_BF16, .first_piece = 0, .n_pieces = 2 },
    { .n_rows = 2, .n_cols = 8, .layer = -1, .role = K3_W_LM_HEAD, .dtype = K3_BF16, .first_piece = 2, .n_pieces = 1 },
};
static struct k3_piece pieces[3] = { { 0, 0, 2, 32, 0 }, { 0, 2, 2, 32, 32 }, { 1, 0, 2, 32, 64 } };
static struct k3_resident residents[1] = { { .n = 8, .layer = 1, .role = K3_R_INPUT_NORM, .dtype = K3_BF16 } };
static struct k3_model model = {
    .cfg = { .hidden = 8, .n_layers = 2, .n_layers_model = 4, .vocab = 4, .first_dense = 1, .n_experts = 2 },
    .matrices = matrices, .n_matrices = 2, .pieces = pieces, .n_pieces = 3,
    .residents = residents, .n_residents = 1, .embed_dtype = K3_BF16,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_sums *s = NULL;
    uint32_t n_layers = size && data[size - 1] == '\n' ? 2 : 4;
    char line[K3_SUMS_LINE_BYTES + 16];

    if (k3_sums_parse(&s, &model, K3_SUMS_ALL, (const char *)data, size, model.digest, n_layers, &err) < 0) {
        if (err.exit_status != K3_EXIT_REFUSED || !err.text[0] || s)
            abort();
        return 0;
    }
    for (size_t i = 0; i < k3_sums_n_items(&model); i++) {
        char name[K3_SUMS_LINE_BYTES];
        uint32_t crc = i < 3 ? s->piece[i] : i < 4 ? s->resident[i - 3] : i < 6 ? s->expert[i - 4] : s->embed[i - 6];

        k3_sums_name(&model, i, name);
        snprintf(line, sizeof(line), "\n%.120s %08x\n", name, crc);
        if (!memmem(data, size, line, strlen(line)))
            abort();
    }
    k3_sums_free(s);
    return 0;
}
