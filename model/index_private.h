/* model/index_private.h: the inside of an index, shared by index.c, index_open.c and index_list.c alone. */
#ifndef K3_MODEL_INDEX_PRIVATE_H
#define K3_MODEL_INDEX_PRIVATE_H

#include "model/index.h"

struct k3_index {
    struct k3_tensor *tensors;
    size_t n_tensors, cap_tensors;
    char *names; /* all names, each with its final 0 */
    size_t names_bytes, cap_names;
    uint32_t *slots; /* hash of names: tensor number + 1, 0 = free; made by k3_index_sort() */
    size_t n_slots;  /* power of two */
    struct k3_file *files;
    size_t n_files, cap_files;
    char *list_path; /* model.safetensors.index.json, NULL when there is none */
};

/* Compares the list with what the headers say (index_list.c). */
int k3_index_list_check(const struct k3_index *ix, struct k3_err *err);

#endif
