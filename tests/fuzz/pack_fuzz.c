/* Any bytes as header and table of a packed trunk, with the CRCs made to fit.  What is accepted leaves every piece
 * inside the file, apart from the others, and aligned. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/crc32c.h"
#include "model/pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void *copy(const void *from, size_t n)
{
    void *p = malloc(n);

    if (!p)
        abort();
    return memcpy(p, from, n);
}

static struct k3_model *model(void)
{
    static const struct k3_matrix matrices[2] = {
        { .n_rows = 4, .n_cols = 8, .layer = 0, .role = K3_W_KDA_Q, .dtype = K3_BF16, .first_piece = 0, .n_pieces = 2 },
        { .n_rows = 2, .n_cols = 8, .layer = -1, .role = K3_W_LM_HEAD, .dtype = K3_BF16, .first_piece = 2, .n_pieces = 1 },
    };
    static const struct k3_piece pieces[3] = { { 0, 0, 2, 32, 0 }, { 0, 2, 2, 32, 32 }, { 1, 0, 2, 32, 64 } };
    static const struct k3_resident residents[1] = { { .n = 8, .layer = 1, .role = K3_R_INPUT_NORM, .dtype = K3_BF16 } };
    static const struct k3_file files[1];
    struct k3_model *m = calloc(1, sizeof(*m));

    if (!m)
        abort();
    m->cfg.n_layers = 2;
    m->cfg.n_layers_model = 4;
    m->matrices = copy(matrices, sizeof(matrices));
    m->pieces = copy(pieces, sizeof(pieces));
    m->residents = copy(residents, sizeof(residents));
    m->files = copy(files, sizeof(files));
    m->n_matrices = 2;
    m->n_pieces = 3;
    m->n_residents = m->n_files = 1;
    return m;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *m = model();
    struct k3_pack_header h = { 0 };
    uint8_t *head = copy(data, size ? size : 1);
    uint64_t end;

    if (size >= sizeof(h)) {
        memcpy(&h, head, sizeof(h));
        if ((size - sizeof(h)) / sizeof(struct k3_pack_entry) >= h.n_entries) {
            h.table_crc = k3_crc32c(0, head + sizeof(h), h.n_entries * sizeof(struct k3_pack_entry));
            h.header_crc = k3_crc32c(0, &h, offsetof(struct k3_pack_header, header_crc));
            memcpy(head, &h, sizeof(h));
        }
    }
    if (k3_pack_apply(m, "trunk.k3pack", head, size, h.file_bytes, m->digest, &err) < 0) {
        if (err.exit_status != K3_EXIT_REFUSED || !err.text[0])
            abort();
    } else {
        end = h.data_off_bytes;
        if (m->residents[0].off_bytes < end || m->residents[0].off_bytes % 64 || m->residents[0].file != 1)
            abort();
        end = m->residents[0].off_bytes + 16;
        for (size_t i = 0; i < m->n_pieces; i++) {
            const struct k3_piece *p = &m->pieces[i];
            const struct k3_matrix *x = &m->matrices[p->matrix];

            if (p->off_bytes < end || x->file != 1 || x->off_bytes + p->row * 16 != p->off_bytes || x->off_bytes % 64)
                abort();
            end = p->off_bytes + p->len_bytes;
        }
        if (end > h.file_bytes)
            abort();
    }
    free(head);
    k3_model_close(m);
    return 0;
}
