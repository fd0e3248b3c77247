#include "tests/unit/model_files.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void must(bool ok, const char *what)
{
    if (!ok) {
        perror(what);
        abort();
    }
}

void k3_test_dir(char out[64])
{
    strcpy(out, "/tmp/k3-model-test-XXXXXX");
    must(mkdtemp(out) != NULL, out);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *at)
{
    (void)st, (void)flag, (void)at;
    return remove(path);
}

void k3_test_dir_remove(const char *dir)
{
    must(nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0, dir);
}

void k3_test_put(const char *dir, const char *name, const void *data, size_t len_bytes)
{
    char path[512];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "w");
    must(f && (len_bytes == 0 || fwrite(data, len_bytes, 1, f) == 1) && fclose(f) == 0, path);
}

void k3_test_put_text(const char *dir, const char *name, const char *text)
{
    k3_test_put(dir, name, text, strlen(text));
}

void k3_test_put_tree(const char *dir, const char *path, const char *text)
{
    char full[512];

    must((size_t)snprintf(full, sizeof(full), "%s/%s", dir, path) < sizeof(full), path);
    for (char *slash = full + strlen(dir) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        must(mkdir(full, 0700) == 0 || errno == EEXIST, full);
        *slash = '/';
    }
    k3_test_put_text(dir, path, text);
}

char *k3_test_get(const char *dir, const char *name, size_t *len_bytes)
{
    char path[512], *data;
    FILE *f;
    long n = -1;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "r");
    must(f && fseek(f, 0, SEEK_END) == 0 && (n = ftell(f)) >= 0, path);
    rewind(f);
    data = malloc((size_t)n + 1);
    must(data && (n == 0 || fread(data, (size_t)n, 1, f) == 1), path);
    fclose(f);
    data[n] = '\0';
    if (len_bytes)
        *len_bytes = (size_t)n;
    return data;
}

void k3_test_put_shard(const char *dir, const char *name, const char *json, size_t data_bytes)
{
    size_t n = (strlen(json) + 7) / 8 * 8;
    char *file = calloc(1, 8 + n + data_bytes + 1);

    must(file != NULL, name);
    for (int i = 0; i < 8; i++)
        file[i] = (char)(n >> (8 * i));
    memset(file + 8, ' ', n);
    memcpy(file + 8, json, strlen(json));
    k3_test_put(dir, name, file, 8 + n + data_bytes);
    free(file);
}

struct k3_mk_opts k3_test_formula(void)
{
    struct k3_mk_opts o = { .formula = true, .dtype = K3_BF16, .seed = 1 };

    k3_mk_config_formula(&o.cfg);
    return o;
}

struct k3_mk_opts k3_test_small(void)
{
    struct k3_mk_opts o = { .dtype = K3_BF16, .seed = 1 };

    k3_mk_config_small(&o.cfg);
    return o;
}

void k3_test_make(const struct k3_mk_opts *o, const char *dir, const char *name, char path[128])
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan p;

    k3_mk_fill_init();
    snprintf(path, 128, "%s/%s", dir, name);
    if (k3_mk_plan_build(&p, o, &err) < 0 || k3_mk_write(&p, path, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    k3_mk_plan_free(&p);
}

char *k3_test_replace(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    char *out;

    if (!at) {
        fprintf(stderr, "\"%s\" is not in the text\n", from);
        abort();
    }
    must(asprintf(&out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)) >= 0, "asprintf");
    return out;
}
