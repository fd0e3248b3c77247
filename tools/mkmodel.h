/* tools/mkmodel.h: the parts of k3-mkmodel: a plan (which tensor, in which shard, where), values, and writing.
 *
 * Values are functions of (tensor name, seed, element), so they do not depend on shards, order or layout: a scattered
 * model computes the same as an orderly one. */
#ifndef K3_TOOLS_MKMODEL_H
#define K3_TOOLS_MKMODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"
#include "model/model.h"

struct k3_mk_opts {
    struct k3_config cfg; /* n_layers == n_layers_model */
    bool formula;         /* the values of spec/model.md 8.2 instead of random ones */
    bool vision;          /* with projector and vision tower shards, as in the full released model */
    bool sparse;          /* headers only; the data is a hole and reads as zeros */
    bool scatter;         /* tensors in random order in random shards, headers in yet another order */
    bool flat;            /* config.json in the flat form */
    uint8_t dtype;        /* of what is BF16 in the released files */
    uint32_t n_shards;    /* 0: a shard for each layer and one for the model level */
    uint64_t seed;
};

/* What the values of a tensor are like. */
enum k3_mk_values { K3_MK_FLOAT, K3_MK_PACKED, K3_MK_SCALE };

struct k3_mk_tensor {
    uint64_t off_bytes; /* in the shard's data area */
    uint64_t len_bytes;
    uint64_t key;        /* FNV-1a of the name */
    uint32_t name_off;
    uint32_t shape[K3_MAX_DIMS];
    uint32_t n_used;     /* elements from here on are 0 (A_log); UINT32_MAX: all are used */
    float formula_base, formula_gain; /* base + gain * r, r uniform in [-1, 1) */
    float mean, sigma;                /* random: a bell curve.  K3_MK_SCALE: sigma is the exponent byte */
    uint16_t shard;
    uint8_t dtype, n_dims, values;
};

struct k3_mk_shard {
    size_t first, n;      /* in order[] : its tensors by offset */
    uint64_t data_bytes;
};

struct k3_mk_plan {
    struct k3_mk_opts opts;
    struct k3_mk_tensor *tensors; /* in schedule-like order: layers, then the model level */
    size_t n_tensors, cap_tensors;
    char *names;
    size_t names_bytes, cap_names;
    uint32_t *order; /* tensors of shard 0 by offset, then those of shard 1, ... */
    struct k3_mk_shard *shards;
    uint32_t n_shards;
    uint64_t total_bytes; /* of tensors */
};

/* mkmodel_config.c */
void k3_mk_config_formula(struct k3_config *c);
void k3_mk_config_released(struct k3_config *c);
void k3_mk_config_small(struct k3_config *c);
/* n layers; MLA where the one-based list says ("4,8", "none"), or with NULL at every fourth layer, and the last when
 * `last` is true. */
int k3_mk_config_layers(struct k3_config *c, uint32_t n_layers, const char *full_attn, bool last, struct k3_err *err);
/* The text of config.json, to be freed; checked by reading it back. */
int k3_mk_config_json(const struct k3_config *c, bool flat, char **out, struct k3_err *err);

/* mkmodel_plan.c */
int k3_mk_plan_build(struct k3_mk_plan *p, const struct k3_mk_opts *opts, struct k3_err *err);
void k3_mk_plan_free(struct k3_mk_plan *p);
const char *k3_mk_name(const struct k3_mk_plan *p, const struct k3_mk_tensor *t);
void k3_mk_shard_name(const struct k3_mk_plan *p, uint32_t shard, char out[64]);
/* Length (8 bytes) and JSON of a shard's header, to be freed; *len_bytes is where the data begins. */
int k3_mk_header(const struct k3_mk_plan *p, uint32_t shard, char **out, size_t *len_bytes, struct k3_err *err);
/* The text of model.safetensors.index.json goes to f. */
int k3_mk_list(const struct k3_mk_plan *p, FILE *f);

/* mkmodel_fill.c */
uint64_t k3_mk_fnv(const char *name);
uint64_t k3_mk_mix(uint64_t x);
void k3_mk_fill_init(void); /* once, before the first fill and before threads */
/* Bytes [first, first + n) of a tensor.  first is a multiple of 64. */
void k3_mk_fill(const struct k3_mk_plan *p, const struct k3_mk_tensor *t, uint64_t first, size_t n, uint8_t *out);
uint16_t k3_mk_bf16(float v); /* to nearest, ties to even */
uint16_t k3_mk_f16(float v);

/* mkmodel_write.c: makes the directory `out`; nothing is there under that name before all of it is. */
int k3_mk_write(const struct k3_mk_plan *p, const char *out, struct k3_err *err);

#endif
