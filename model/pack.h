/* model/pack.h: a packed trunk, the file trunk.k3pack that k3-pack writes into a trunk device: the trunk's matrices and
 * resident tensors in the order in which a pass wants them, byte for byte as in the shards.
 *
 *   header     struct k3_pack_header, little-endian
 *   table      n_entries of struct k3_pack_entry: the resident tensors, then the pieces in schedule order
 *   data       from data_off_bytes on; every matrix begins at a multiple of 64, its pieces follow one another
 * While it is written it is trunk.k3pack.part, with another magic and the state of each entry. */
#ifndef K3_MODEL_PACK_H
#define K3_MODEL_PACK_H

#include <assert.h>

#include "model/model.h"

#define K3_PACK_NAME "trunk.k3pack"
#define K3_PACK_PART K3_PACK_NAME ".part"
#define K3_PACK_VERSION 1u
#define K3_PACK_MAGIC "k3pack\n"      /* 8 bytes with the final 0 */
#define K3_PACK_PART_MAGIC "k3part\n"
#define K3_PACK_ENTRIES_MAX (1u << 22)
#define K3_PACK_ALIGN 64u

struct k3_pack_header {
    char magic[8];
    uint32_t version, n_entries;
    uint64_t data_off_bytes, file_bytes;
    uint8_t digest[32]; /* of the checkpoint that was packed, with n_layers layers */
    uint32_t n_layers;
    uint32_t table_crc;  /* CRC32C of the table; 0 in a part */
    uint32_t header_crc; /* of what comes before */
    uint32_t zero;
};
static_assert(sizeof(struct k3_pack_header) == 80, "the layout is the file's: bump K3_PACK_VERSION");

enum k3_pack_kind { K3_PACK_RESIDENT = 0, K3_PACK_PIECE = 1 };
struct k3_pack_entry {
    uint16_t kind, role; /* enum k3_role or enum k3_resident_role */
    int32_t layer;       /* -1: the model level */
    uint32_t row;        /* first row of a piece */
    uint32_t done;       /* in a part: 1 = its bytes are written */
    uint64_t off_bytes, len_bytes;
    uint32_t crc; /* CRC32C of its bytes */
    uint32_t zero;
};
static_assert(sizeof(struct k3_pack_entry) == 40, "the layout is the file's: bump K3_PACK_VERSION");

/* What a packed trunk of m (from its shards) looks like: header without CRCs, and the table (to be freed), without CRCs.
 * Entry i < n_residents is resident i, the others are the pieces. */
int k3_pack_plan(const struct k3_model *m, struct k3_pack_header *h, struct k3_pack_entry **table, struct k3_err *err);
/* Sets header_crc, and table_crc unless the header is a part's. */
void k3_pack_seal(struct k3_pack_header *h, const struct k3_pack_entry *table);

/* Redirects the matrices and residents of m to the packed trunk of a directory among opts->dirs, when there is one (the
 * devices are looked at first), and keeps its CRCs.  Refused (exit 2): one of another model, truncated, damaged, and a
 * device that has nothing but a half-written one.  The digest of m stays.  Called by k3_model_open(). */
int k3_pack_find(struct k3_model *m, const struct k3_model_opts *opts, struct k3_err *err);

/* ---- pack_source.c: whether a packed trunk has the bytes of this model; the digest knows only names and sizes ---- */

struct k3_sums;
#define K3_PACK_REMEDY "; pack it anew (remove it, then k3-pack), or leave this directory out"

/* Reads from the shards one piece and one resident tensor of every role, in the middle of those that `have` marks (NULL:
 * all), and compares: at most 8 MiB each.  crc, have: by entry of the table.  0: equal; 1: entry *differs is not; else an
 * error of reading. */
int k3_pack_sample(const struct k3_model *shards, const uint32_t *crc, const uint8_t *have, size_t *differs, struct k3_err *err);
/* m: opened with opts, its trunk packed (else 0).  Refused (exit 2): it differs from the shards.  0 also where these are not there. */
int k3_pack_check_source(const struct k3_model *m, const struct k3_model_opts *opts, struct k3_err *err);
/* The same against the sums of the checkpoint, every entry. */
int k3_pack_check_sums(const struct k3_model *m, const struct k3_sums *sums, struct k3_err *err);

/* ---- pack.c ---- */

/* k3_pack_find() for header and table in memory (head_bytes of them) of a file of file_bytes.  digest: what the checkpoint has
 * with the header's number of layers. */
int k3_pack_apply(struct k3_model *m, const char *path, const void *head, size_t head_bytes, uint64_t file_bytes,
                  const uint8_t digest[32], struct k3_err *err);

#endif
