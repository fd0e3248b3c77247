/* model/model.h: what one daemon keeps of a checkpoint: config, files, the matrices in schedule order, their
 * pieces, the resident tensors, the embedding's place, and for expertd the experts' places.
 * Built from the index (model/index.h), which is dropped before k3_model_open() returns. */
#ifndef K3_MODEL_MODEL_H
#define K3_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "ipc/parse.h"
#include "model/config.h"
#include "model/index.h"

/* Streamed matrices, in the order in which a layer consumes them (design.md section 2). */
enum k3_role {
    /* KDA */
    K3_W_KDA_Q, K3_W_KDA_K, K3_W_KDA_V, K3_W_KDA_FA, K3_W_KDA_FB, K3_W_KDA_B, K3_W_KDA_G, K3_W_KDA_O,
    /* MLA */
    K3_W_MLA_QA, K3_W_MLA_QB, K3_W_MLA_KVA, K3_W_MLA_KVB, K3_W_MLA_G, K3_W_MLA_O,
    /* dense MLP */
    K3_W_DENSE_GATE, K3_W_DENSE_UP, K3_W_DENSE_DOWN,
    /* MoE: the routed experts happen after SHARED_DOWN and before LATENT_UP */
    K3_W_ROUTER, K3_W_LATENT_DOWN, K3_W_SHARED_GATE, K3_W_SHARED_UP, K3_W_SHARED_DOWN, K3_W_LATENT_UP,
    K3_W_LM_HEAD,
    K3_N_ROLES
};
const char *k3_role_name(enum k3_role role);

/* Resident tensors: widened to fp32 once, by role, never by size. */
enum k3_resident_role {
    K3_R_INPUT_NORM, K3_R_POST_NORM, K3_R_ATTN_RES_NORM, K3_R_ATTN_RES_PROJ, K3_R_MLP_RES_NORM, K3_R_MLP_RES_PROJ,
    K3_R_Q_CONV, K3_R_K_CONV, K3_R_V_CONV, K3_R_A_LOG, K3_R_DT_BIAS, K3_R_O_NORM,   /* KDA */
    K3_R_QA_NORM, K3_R_KVA_NORM,                                                   /* MLA */
    K3_R_ROUTER_BIAS, K3_R_EXPERT_NORM,                                             /* MoE */
    K3_R_FINAL_NORM, K3_R_OUT_RES_NORM, K3_R_OUT_RES_PROJ,                          /* model level, layer -1 */
    K3_N_RESIDENT_ROLES
};
const char *k3_resident_role_name(enum k3_resident_role role);

struct k3_matrix {
    uint64_t off_bytes; /* absolute in the file */
    uint32_t n_rows, n_cols;
    int16_t layer; /* -1 for lm_head */
    uint16_t file;
    uint8_t role;  /* enum k3_role */
    uint8_t dtype; /* F32, F16 or BF16 */
    uint32_t first_piece, n_pieces;
};

struct k3_piece { /* whole rows of one matrix, at most K3_PIECE_BYTES */
    uint32_t matrix;
    uint32_t row, n_rows;
    uint32_t len_bytes;
    uint64_t off_bytes; /* absolute in the matrix's file */
};
#define K3_PIECE_BYTES (8u << 20) /* a piece of MLA kv_b holds whole heads while a head fits */

struct k3_resident {
    uint64_t off_bytes; /* in the file */
    uint64_t pos;       /* byte offset in the resident area, 64-byte aligned */
    uint32_t n;         /* elements; fp32 in the area */
    int16_t layer;
    uint16_t file;
    uint8_t role, dtype;
};

#define K3_EXPERT_TENSORS 6 /* w1 packed, w1 scale, w2 packed, w2 scale, w3 packed, w3 scale */
struct k3_expert_place { /* 1 range when the six tensors are contiguous in the file, else 6 */
    uint32_t n_ranges;
    struct { uint16_t file; uint64_t off_bytes; uint64_t len_bytes; } range[K3_EXPERT_TENSORS];
    uint32_t tensor_range[K3_EXPERT_TENSORS]; /* which range holds tensor t */
    uint32_t tensor_off[K3_EXPERT_TENSORS];   /* offset of tensor t from the start of its range */
};

struct k3_model {
    struct k3_config cfg;
    struct k3_file *files;
    size_t n_files;
    struct k3_matrix *matrices; /* schedule order; all layers, then lm_head */
    size_t n_matrices;
    struct k3_piece *pieces;
    size_t n_pieces;
    struct k3_resident *residents; /* layer by layer in role order, then model level */
    size_t n_residents;
    uint64_t resident_bytes; /* size of the resident area */
    uint64_t trunk_bytes;    /* sum of piece lengths: one pass without pins */
    /* token embedding: row i at embed_off_bytes + i * hidden * width */
    uint16_t embed_file;
    uint8_t embed_dtype;
    uint64_t embed_off_bytes;
    /* expert places; only with want_experts.  layer_slot[L] = row of layer L in the table or -1 */
    struct k3_expert_table *experts;
    uint64_t expert_bytes;      /* sum of the six tensor lengths */
    uint64_t expert_slot_bytes; /* largest sum of page-rounded spans over all experts (4096-byte pages);
                                 * known to every daemon, not only with want_experts */
    uint32_t *pack_crc; /* NULL, or the trunk is a packed one (model/pack.h): residents, then pieces */
    uint8_t digest[32]; /* the same for a packed trunk and for its shards; of config, matrices, residents, tensor names, files' base names and sizes, offsets */
};

struct k3_model_opts {
    const char *const *dirs; /* model directory first, then device directories: a shard is read from all devices that
                              * have it (k3_file.copies), from the model directory when none has */
    size_t n_dirs;
    uint32_t n_layers; /* --layers; 0 = all */
    bool want_experts;
    bool partial_experts_ok; /* reserved, false */
    bool no_pack; /* the trunk is taken from the shards even where a packed one lies (model/pack.h) */
};

/* The model directory and then the devices, as dirs of *o.  `dirs` is the caller's and must live as long as *o is used. */
#define K3_MODEL_DIRS (1 + sizeof(((struct k3_str_list *)0)->item) / sizeof(const char *))
void k3_model_dirs(struct k3_model_opts *o, const char *dirs[K3_MODEL_DIRS], const char *model,
                   const struct k3_str_list *devices);

/* Opens a checkpoint.  Refuses (exit 2, one line): what config and index refuse; a missing tensor (the first is
 * named, with the number of others), a wrong dtype or shape (named, with what would be right); MXFP4 decided by
 * the names present.  vision_tower.* and mm_projector.* and layers beyond n_layers are skipped.  Matrices accept
 * BF16, F32, F16.  On success *out is the caller's; k3_model_close() accepts NULL. */
int k3_model_open(struct k3_model **out, const struct k3_model_opts *opts, struct k3_err *err);
/* The same from an index whose files need not be there (plans, tests): sizes and places, nothing can be read.  ix is
 * closed in any case. */
int k3_model_of_index(struct k3_model **out, const struct k3_config *cfg, struct k3_index *ix, struct k3_err *err);
void k3_model_close(struct k3_model *m);

/* The place of one expert (want_experts).  layer is 0-based and MoE.  -ENOENT when there is none. */
int k3_model_expert(const struct k3_model *m, uint32_t layer, uint32_t expert, struct k3_expert_place *out);

/* Index of a resident in m->residents; -1 when the layer has none of that role. */
long k3_model_resident(const struct k3_model *m, int layer, enum k3_resident_role role);
/* Index of a matrix in m->matrices; -1 when there is none. */
long k3_model_matrix(const struct k3_model *m, int layer, enum k3_role role);

#endif
