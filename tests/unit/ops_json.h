/* tests/unit/ops_json.h: the operator fixtures of ../shared/data: one JSON object whose arrays are
 * either plain lists or {shape, data}. */
#ifndef K3_TESTS_OPS_JSON_H
#define K3_TESTS_OPS_JSON_H

#include <stddef.h>

#include <cjson/cJSON.h>

struct k3_test_json {
    cJSON *root;
    float *array[256];
    size_t n_arrays;
};

/* 0, or -1 when the file is not there (a test then skips).  A file that is there and is not JSON
 * ends the program with a message.  Close frees every array given out. */
int k3_test_json_open(struct k3_test_json *j, const char *path);
void k3_test_json_close(struct k3_test_json *j);

/* The array of n numbers called by the format; another length or a missing one ends the program. */
float *k3_test_json_floats(struct k3_test_json *j, size_t n, const char *name_fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The same as doubles, for expected values; freed by close as well. */
double *k3_test_json_doubles(struct k3_test_json *j, size_t n, const char *name_fmt, ...)
    __attribute__((format(printf, 3, 4)));
double k3_test_json_number(const struct k3_test_json *j, const char *name);

#endif
