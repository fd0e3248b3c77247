/* tests/unit/ops_json.c: see ops_json.h. */
#include "tests/unit/ops_json.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void die(const char *what, const char *name)
{
    fprintf(stderr, "operator fixture: %s: %s\n", name, what);
    exit(1);
}

int k3_test_json_open(struct k3_test_json *j, const char *path)
{
    char *text = NULL;
    size_t len = 0;
    FILE *f = fopen(path, "r");
    memset(j, 0, sizeof *j);
    if (!f && errno == ENOENT)
        return -1;
    if (!f || getdelim(&text, &len, EOF, f) < 0)
        die("cannot be read", path);
    fclose(f);
    j->root = cJSON_Parse(text);
    free(text);
    if (!cJSON_IsObject(j->root))
        die("is not a JSON object", path);
    return 0;
}

void k3_test_json_close(struct k3_test_json *j)
{
    for (size_t i = 0; i < j->n_arrays; i++)
        free(j->array[i]);
    cJSON_Delete(j->root);
    memset(j, 0, sizeof *j);
}

static void *numbers(struct k3_test_json *j, size_t n, size_t size, const char *fmt, va_list ap)
{
    char name[128];
    const cJSON *list, *item;
    char *out = calloc(n ? n : 1, size);
    size_t i = 0;
    vsnprintf(name, sizeof name, fmt, ap);
    list = cJSON_GetObjectItemCaseSensitive(j->root, name);
    if (cJSON_IsObject(list))
        list = cJSON_GetObjectItemCaseSensitive(list, "data");
    if (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) != n)
        die("missing, or not of the length wanted", name);
    if (!out || j->n_arrays == sizeof j->array / sizeof *j->array)
        die("no room", name);
    j->array[j->n_arrays++] = (float *)(void *)out;
    cJSON_ArrayForEach(item, list)
    {
        float f = (float)item->valuedouble;
        if (!cJSON_IsNumber(item))
            die("holds something that is not a number", name);
        memcpy(out + i++ * size, size == sizeof f ? (void *)&f : (void *)&item->valuedouble, size);
    }
    return out;
}

float *k3_test_json_floats(struct k3_test_json *j, size_t n, const char *name_fmt, ...)
{
    va_list ap;
    float *x;
    va_start(ap, name_fmt);
    x = numbers(j, n, sizeof *x, name_fmt, ap);
    va_end(ap);
    return x;
}

double *k3_test_json_doubles(struct k3_test_json *j, size_t n, const char *name_fmt, ...)
{
    va_list ap;
    double *x;
    va_start(ap, name_fmt);
    x = numbers(j, n, sizeof *x, name_fmt, ap);
    va_end(ap);
    return x;
}

double k3_test_json_number(const struct k3_test_json *j, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(j->root, name);
    if (!cJSON_IsNumber(item))
        die("is not a number", name);
    return item->valuedouble;
}
