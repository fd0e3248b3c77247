/* tests/unit/model_files.h: throw-away directories with checkpoints, for the tests of model/ and k3-mkmodel. */
#ifndef K3_TESTS_MODEL_FILES_H
#define K3_TESTS_MODEL_FILES_H

#include "model/index.h"
#include "tools/mkmodel.h"

/* A new empty directory under /tmp; remove takes it away with all that is in it.  Both abort on failure. */
void k3_test_dir(char out[64]);
void k3_test_dir_remove(const char *dir);
void k3_test_put(const char *dir, const char *name, const void *data, size_t len_bytes);
void k3_test_put_text(const char *dir, const char *name, const char *text);
/* The same at a path of several steps; the directories are made. */
void k3_test_put_tree(const char *dir, const char *path, const char *text);
/* A whole file, with a 0 after it; to be freed. */
char *k3_test_get(const char *dir, const char *name, size_t *len_bytes);
/* A safetensors file: header JSON padded to 8, and n zero bytes of data. */
void k3_test_put_shard(const char *dir, const char *name, const char *json, size_t data_bytes);

/* Options for the formula model and for a small random one. */
struct k3_mk_opts k3_test_formula(void);
struct k3_mk_opts k3_test_small(void);
/* Makes DIR/NAME. */
void k3_test_make(const struct k3_mk_opts *o, const char *dir, const char *name, char path[128]);
/* Replaces the first `from` in a text by `to`; the result is to be freed.  Aborts when there is none. */
char *k3_test_replace(const char *text, const char *from, const char *to);

#endif
