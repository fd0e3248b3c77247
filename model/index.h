/* model/index.h: the tensors of a safetensors checkpoint (spec/model.md 3.1).  Lives only while loading.
 * At most 150 bytes a tensor; shard headers are read with no page cache left behind. */
#ifndef K3_MODEL_INDEX_H
#define K3_MODEL_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_MAX_DIMS 4

enum k3_dtype { K3_F32 = 0, K3_F16 = 1, K3_BF16 = 2, K3_U8 = 3, K3_N_DTYPES = 4 };
/* A name that index.c does not know.  That, and its known ones from K3_N_DTYPES on (I8, say), are
 * only an error where such a tensor is used. */
#define K3_DTYPE_OTHER 255
size_t k3_dtype_bytes(enum k3_dtype dtype);
const char *k3_dtype_name(enum k3_dtype dtype);

struct k3_file {
    char *path;         /* full path, owned */
    uint64_t len_bytes; /* size at open */
    uint64_t dev, ino;
    char **copies; /* full paths of the same file in further device directories; owned */
    uint32_t n_copies;
};

struct k3_tensor {
    uint64_t off_bytes; /* absolute offset in the file */
    uint64_t len_bytes;
    uint32_t shape[K3_MAX_DIMS];
    uint32_t name_off; /* into the index's string area */
    uint16_t file;
    uint8_t dtype; /* enum k3_dtype */
    uint8_t n_dims; /* may be above K3_MAX_DIMS: then shape holds the first four */
};

struct k3_index;

/* Opens every *.safetensors of the directories and parses all headers.  The directories are the devices, then the model
 * directory.  A shard that is in several devices is one file with copies; the model directory only gives what no device
 * has (it may also be named as a device).  Refused (exit 2, one line): a header length beyond the file, JSON that is not a
 * header, overlapping or out-of-range offsets, lengths that disagree with shape and dtype, duplicate names,
 * a truncated shard, no shard at all, a device that has none, the same device twice, a shard
 * that differs in size or header between two directories; and where a model.safetensors.index.json is there (first directory wins),
 * a tensor that it puts in another of the files that are there.  Files are in the order of their base names,
 * whatever directory they are in.  On success *out is the caller's; k3_index_close() accepts NULL. */
int k3_index_open(struct k3_index **out, const char *const *dirs, size_t n_dirs, struct k3_err *err);
void k3_index_close(struct k3_index *ix);

/* Parses one header (JSON bytes only, without the 8-byte length) into ix as file `file`; data_off_bytes is where
 * the data area begins, file_bytes the file's size.  For tests and fuzzing as well as for k3_index_open. */
int k3_index_parse_header(struct k3_index *ix, uint16_t file, const char *json, size_t len_bytes,
                          uint64_t data_off_bytes, uint64_t file_bytes, struct k3_err *err);
struct k3_index *k3_index_new(void);

size_t k3_index_n_tensors(const struct k3_index *ix);
const struct k3_tensor *k3_index_at(const struct k3_index *ix, size_t i);
const char *k3_index_name(const struct k3_index *ix, const struct k3_tensor *t);
/* Adds a file that headers may be parsed for (path is copied); its number is the number of files before. */
int k3_index_add_file(struct k3_index *ix, const char *path, uint64_t len_bytes, uint64_t dev, uint64_t ino,
                      struct k3_err *err);
/* Another path of file `file`: the same bytes on another device. */
int k3_index_add_copy(struct k3_index *ix, size_t file, const char *path, struct k3_err *err);
/* A file of its own with what `from` says, and its end. */
int k3_file_copy(struct k3_file *out, const struct k3_file *from, struct k3_err *err);
void k3_file_free(struct k3_file *f);
/* The part of a path after its last slash. */
const char *k3_index_base_name(const char *path);
/* The file in which the model.safetensors.index.json puts `name`, into out; false when nothing says so. */
bool k3_index_listed_in(const struct k3_index *ix, const char *name, char *out, size_t len_bytes);
/* Call k3_index_sort() once before find; k3_index_open() has done it.  -EEXIST names a duplicate. */
int k3_index_sort(struct k3_index *ix, struct k3_err *err);
const struct k3_tensor *k3_index_find(const struct k3_index *ix, const char *name);
size_t k3_index_n_files(const struct k3_index *ix);
const struct k3_file *k3_index_file(const struct k3_index *ix, size_t i);
size_t k3_index_bytes(const struct k3_index *ix); /* memory held, for the 150-byte promise */

#endif
