/* model/sums.h: k3.sums, the checksums of a checkpoint (k3ctl verify --make writes it, the weight daemons read it).
 *
 * A text beside config.json, in a fixed order; every CRC is CRC32C in eight hexadecimal digits:
 *   k3.sums 1
 *   model DIGEST layers N               of struct k3_model; N layers are covered
 *   piece LAYER ROLE ROW BYTES CRC      of the trunk, in schedule order; LAYER -1 is the model level
 *   resident LAYER ROLE CRC             as in the file, not widened
 *   expert LAYER EXPERT CRC             over the six tensors, in the order of model/model.h
 *   embed BLOCK CRC                     of the token embedding, K3_SUMS_EMBED_BYTES each, the last one shorter
 *   end LINES CRC                       lines and CRC of all that comes before this one
 * Sums of N layers also serve a run of fewer. */
#ifndef K3_MODEL_SUMS_H
#define K3_MODEL_SUMS_H

#include "model/model.h"

#define K3_SUMS_NAME "k3.sums"
#define K3_SUMS_EMBED_BYTES (8u << 20)
#define K3_SUMS_LINE_BYTES 160

/* ---- what has a sum: items, numbered in the order of the lines ---- */

enum k3_sum_kind { K3_SUM_PIECE, K3_SUM_RESIDENT, K3_SUM_EXPERT, K3_SUM_EMBED };
struct k3_sum_part { uint64_t off_bytes, len_bytes; uint16_t file; };
struct k3_sum_item {
    enum k3_sum_kind kind;
    size_t i;      /* of its kind: piece, resident, expert key (k3_sums_expert_key), embedding block */
    uint32_t n_parts;
    struct k3_sum_part part[K3_EXPERT_TENSORS]; /* the CRC is over these, in this order */
    uint64_t len_bytes;                         /* of all parts */
};
size_t k3_sums_n_items(const struct k3_model *m);
size_t k3_sums_n_experts(const struct k3_model *m);
size_t k3_sums_n_embed(const struct k3_model *m);
/* (layer - first dense layer) * n_experts + expert; the layer must have experts. */
size_t k3_sums_expert_key(const struct k3_model *m, uint32_t layer, uint32_t expert);
/* Item i < k3_sums_n_items().  The parts of an expert need a model with want_experts: -ENOENT without. */
int k3_sums_item(const struct k3_model *m, size_t i, struct k3_sum_item *out);
/* "piece 3 kda_q 0 8388608": the line of item i without its CRC. */
void k3_sums_name(const struct k3_model *m, size_t i, char out[K3_SUMS_LINE_BYTES]);

/* ---- reading ---- */

enum { K3_SUMS_TRUNK = 1, K3_SUMS_EXPERTS = 2, K3_SUMS_EMBED = 4, K3_SUMS_ALL = 7 };
struct k3_sums {
    uint32_t *piece, *resident, *expert, *embed; /* by index; NULL when not asked for */
};
/* Reads k3.sums of opts->dirs[0], keeping 4 bytes for each thing asked for (`want`).  m was opened with opts.
 * -ENOENT with words when there is none.  Refused (exit 2): sums of another model, damaged, cut short, of fewer layers.
 * On success *out is the caller's; k3_sums_free() accepts NULL. */
int k3_sums_open(struct k3_sums **out, const struct k3_model *m, const struct k3_model_opts *opts, unsigned want,
                 struct k3_err *err);
void k3_sums_free(struct k3_sums *s);

/* The sums that a packed trunk has of itself (m->pack_crc): pieces and residents. */
int k3_sums_of_pack(struct k3_sums **out, const struct k3_model *m, struct k3_err *err);

/* The same from a text, whose digest must be `digest` if it covers n_layers layers (any other number is refused). */
int k3_sums_parse(struct k3_sums **out, const struct k3_model *m, unsigned want, const char *text, size_t len_bytes,
                  const uint8_t digest[32], uint32_t n_layers, struct k3_err *err);

/* ---- writing ---- */

/* The first two lines. */
int k3_sums_head(const struct k3_model *m, char *out, size_t len_bytes);
/* What a half-written text of this very model (k3.sums.part) already has: the number of whole items from the first
 * on, and where they end in the file with the CRC of all before.  Nothing usable: 0 items and 0 bytes. */
int k3_sums_resume(int fd, const struct k3_model *m, size_t *n_items, uint64_t *end_bytes, uint32_t *crc,
                   struct k3_err *err);

#endif
