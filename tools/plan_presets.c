/* tools/plan_presets.c: run/presets. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "tools/plan.h"

#define FILE_MAX (64u << 10)

static bool good_name(const char *name)
{
    size_t n = strlen(name);

    return n >= 1 && n < 32 && strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == n &&
           strcmp(name, "auto") != 0;
}

/* One line, which is cut in pieces. */
static int take_line(struct k3_presets *out, char *line, const char *path, unsigned number, struct k3_err *err)
{
    struct k3_preset *p = &out->item[out->n];
    char *word[4], *save = NULL;
    size_t n = 0;

    line[strcspn(line, "#")] = 0;
    for (char *w = strtok_r(line, " \t\r", &save); w && n < 4; w = strtok_r(NULL, " \t\r", &save))
        word[n++] = w;
    if (n == 0)
        return 0;
    if (n != 3 || !good_name(word[0]) || k3_parse_double(word[1], 1e-6, 1e6, &p->trunk_gb) < 0 ||
        k3_parse_double(word[2], 1e-6, 1e6, &p->cache_gb) < 0)
        return k3_refuse(err, -EINVAL, "%s line %u: must be NAME TRUNK_GB CACHE_GB", path, number);
    if (k3_presets_find(out, word[0]))
        return k3_refuse(err, -EEXIST, "%s line %u: preset %s is there twice", path, number, word[0]);
    if (out->n + 1 == K3_MAX_PRESETS)
        return k3_refuse(err, -E2BIG, "%s line %u: more than %u presets", path, number, K3_MAX_PRESETS - 1);
    strcpy(p->name, word[0]);
    out->n++;
    return 0;
}

int k3_presets_parse(struct k3_presets *out, const char *text, const char *path, struct k3_err *err)
{
    unsigned number = 0;
    int rc = 0;

    out->n = 0;
    while (*text && rc == 0) {
        size_t len = strcspn(text, "\n");
        char line[256];

        number++;
        if (len >= sizeof(line))
            return k3_refuse(err, -EINVAL, "%s line %u: longer than %zu characters", path, number, sizeof(line) - 1);
        memcpy(line, text, len);
        line[len] = 0;
        rc = take_line(out, line, path, number, err);
        text += len + (text[len] == '\n');
    }
    return rc;
}

int k3_presets_read(struct k3_presets *out, const char *path, struct k3_err *err)
{
    char *text;
    FILE *f = fopen(path, "re");
    size_t n;
    int rc;

    if (!f)
        return k3_refuse(err, -errno, "presets %s: %s", path, strerror(errno));
    text = malloc(FILE_MAX);
    n = text ? fread(text, 1, FILE_MAX - 1, f) : 0;
    rc = !text       ? k3_fail(err, -ENOMEM, "no memory for %s", path)
         : ferror(f) ? k3_fail(err, -EIO, "presets %s: cannot be read", path)
                     : 0;
    fclose(f);
    if (rc == 0) {
        text[n] = 0;
        rc = k3_presets_parse(out, text, path, err);
    }
    free(text);
    return rc;
}

const struct k3_preset *k3_presets_find(const struct k3_presets *p, const char *name)
{
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->item[i].name, name) == 0)
            return &p->item[i];
    return NULL;
}
