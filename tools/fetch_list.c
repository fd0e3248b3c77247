/* Which files a model has, from its index.  Names in it come from outside: they become file names only when they are
 * plain ones. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/scan.h"
#include "tools/fetch.h"

#define WINDOW_BYTES (256u << 10)

static bool plain(const char *s, size_t len, size_t cap)
{
    if (len == 0 || len >= cap || s[0] == '.')
        return false;
    for (size_t i = 0; i < len; i++)
        if (!((s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z') || (s[i] >= '0' && s[i] <= '9') ||
              s[i] == '.' || s[i] == '_' || s[i] == '-'))
            return false;
    return true;
}

static bool ends_in(const char *name, const char *with)
{
    size_t n = strlen(name), k = strlen(with);

    return n > k && !strcmp(name + n - k, with);
}

bool k3_fetch_name_ok(const char *name)
{
    static const char *const ours[] = { ".part", ".part.tag", ".wrong" };

    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        if (ends_in(name, ours[i]))
            return false;
    return plain(name, strlen(name), K3_FETCH_NAME_BYTES) && strncmp(name, "k3-fetch.", 9) != 0;
}

bool k3_fetch_repo_ok(const char *repo)
{
    const char *slash = strchr(repo, '/');

    if (!slash)
        return plain(repo, strlen(repo), 97);
    return plain(repo, (size_t)(slash - repo), 97) && plain(slash + 1, strlen(slash + 1), 97);
}

int k3_fetch_add(struct k3_fetch_files *l, const char *name, bool optional, struct k3_err *err)
{
    if (!k3_fetch_name_ok(name))
        return k3_refuse(err, -EINVAL, "\"%.200s\" is no plain file name", name);
    for (size_t i = l->n; i-- > 0;) /* tensors of a shard follow each other: the last ones first */
        if (!strcmp(l->f[i].name, name)) {
            l->f[i].optional &= optional;
            return 0;
        }
    if (l->n == K3_FETCH_MAX_FILES)
        return k3_refuse(err, -E2BIG, "more than %d files", K3_FETCH_MAX_FILES);
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 128;
        struct k3_fetch_file *f = realloc(l->f, cap * sizeof(*f));

        if (!f)
            return k3_fail(err, -ENOMEM, "no memory for %zu files", cap);
        l->f = f;
        l->cap = cap;
    }
    l->f[l->n] = (struct k3_fetch_file){ .optional = optional };
    strcpy(l->f[l->n].name, name); /* its length was checked */
    l->n++;
    return 0;
}

void k3_fetch_files_free(struct k3_fetch_files *l)
{
    free(l->f);
    *l = (struct k3_fetch_files){ .f = NULL };
}

/* Whether text inference with the first n_layers layers reads this tensor: not the vision parts, not a later layer. */
static bool wanted(const char *tensor, uint32_t n_layers)
{
    const char *at = strstr(tensor, "layers.");
    uint64_t layer;
    char digits[8];
    size_t n;

    if (n_layers == 0)
        return true;
    if (!strncmp(tensor, "vision_tower.", 13) || !strncmp(tensor, "mm_projector.", 13))
        return false;
    if (!at || (at != tensor && at[-1] != '.'))
        return true;
    n = strspn(at + 7, "0123456789");
    if (n == 0 || n >= sizeof(digits))
        return true;
    memcpy(digits, at + 7, n);
    digits[n] = 0;
    return k3_parse_u64(digits, 0, UINT32_MAX, &layer) < 0 || layer < n_layers;
}

struct shards {
    struct k3_fetch_files *l;
    uint32_t n_layers;
    struct k3_err *err;
};

static int add_shard(void *arg, const char *tensor, const char *file)
{
    struct shards *m = arg;

    if (!k3_fetch_name_ok(file) || !ends_in(file, ".safetensors")) {
        k3_refuse(m->err, -EINVAL, K3_FETCH_INDEX " puts a tensor into \"%.200s\": that is no name of a shard", file);
        return -ECANCELED;
    }
    return wanted(tensor, m->n_layers) && k3_fetch_add(m->l, file, false, m->err) < 0 ? -ECANCELED : 0;
}

/* The functions below return what k3_scan_* do, or -ECANCELED: err is filled. */
static int scan_metadata(struct k3_scan *s, uint64_t *total_bytes)
{
    char key[64];
    int rc = k3_scan_want(s, '{');

    if (rc < 0 || k3_scan_is(s, '}'))
        return rc;
    do {
        if ((rc = k3_scan_string(s, key, sizeof(key), NULL)) < 0 || (rc = k3_scan_want(s, ':')) < 0 ||
            (rc = strcmp(key, "total_size") ? k3_scan_skip(s) : k3_scan_u64(s, total_bytes)) < 0)
            return rc;
    } while (k3_scan_is(s, ','));
    return k3_scan_want(s, '}');
}

static int scan_index(struct k3_scan *s, struct k3_fetch_files *l, uint32_t n_layers, bool *map, struct k3_err *err)
{
    char key[64];
    int rc = k3_scan_want(s, '{');

    if (rc < 0 || k3_scan_is(s, '}'))
        return rc;
    do {
        if ((rc = k3_scan_string(s, key, sizeof(key), NULL)) < 0 || (rc = k3_scan_want(s, ':')) < 0)
            return rc;
        if (!strcmp(key, "weight_map")) {
            *map = true;
            rc = k3_scan_strings(s, add_shard, &(struct shards){ l, n_layers, err });
        } else if (!strcmp(key, "metadata") && k3_scan_peek(s) == '{')
            rc = scan_metadata(s, &l->total_size_bytes);
        else
            rc = k3_scan_skip(s);
        if (rc < 0)
            return rc;
    } while (k3_scan_is(s, ','));
    rc = k3_scan_want(s, '}');
    return rc == 0 && k3_scan_peek(s) != -1 ? -EPROTO : rc;
}

int k3_fetch_list_shards(struct k3_fetch_files *l, int fd, const char *text, size_t len_bytes, uint32_t n_layers,
                         struct k3_err *err)
{
    char *window = fd < 0 ? NULL : malloc(WINDOW_BYTES);
    size_t before = l->n;
    struct k3_scan s;
    bool map = false;
    int rc;

    if (fd >= 0 && !window)
        return k3_fail(err, -ENOMEM, "no memory to read " K3_FETCH_INDEX);
    if (fd < 0)
        k3_scan_text(&s, text, len_bytes);
    else
        k3_scan_fd(&s, fd, window, WINDOW_BYTES);
    rc = scan_index(&s, l, n_layers, &map, err);
    if (rc == -ECANCELED)
        rc = -EINVAL;
    else if (rc < 0)
        rc = k3_refuse(err, rc == -EIO ? -EIO : -EINVAL,
                       K3_FETCH_INDEX " %s at byte %" PRIu64 "; it must map tensor names to files under weight_map",
                       rc == -EIO ? "cannot be read" : "is not a list of tensors", k3_scan_at(&s));
    else if (!map || l->n == before)
        rc = k3_refuse(err, -EINVAL, K3_FETCH_INDEX " names no shard under weight_map");
    free(window);
    return rc;
}

/* ---- sizes ---- */

uint64_t k3_fetch_released_bytes(const char *name)
{
    unsigned shard;
    char again[40];

    if (sscanf(name, "model-%5u-of-000096.safetensors", &shard) != 1 || shard < 1 || shard > 96)
        return 0;
    snprintf(again, sizeof(again), "model-%05u-of-000096.safetensors", shard);
    if (strcmp(name, again))
        return 0;
    switch (shard) { /* layer L is shard L + 1 */
    case 1: return 2341216112;  /* the dense layer */
    case 93: return 16567507176; /* latent attention, out of turn */
    case 94: return 4697664072; /* embedding, lm_head */
    case 95: return 92289328;
    case 96: return 802448352;
    }
    /* One of four layers has latent attention, the others KDA; the header is longer where L has two digits. */
    if (shard % 4 == 0)
        return shard <= 10 ? 16567501776 : 16567507176;
    return shard <= 10 ? 16990911504 : 16990916912;
}

int k3_fetch_check_sizes(const struct k3_fetch_files *l, const char *repo, bool all, struct k3_err *err)
{
    bool released = !strcmp(repo, K3_FETCH_REPO);
    uint64_t sum = 0;

    for (size_t i = 0; i < l->n; i++) {
        const struct k3_fetch_file *f = &l->f[i];
        uint64_t want = k3_fetch_released_bytes(f->name);

        if (!ends_in(f->name, ".safetensors"))
            continue;
        if (released && f->said.size_bytes != want)
            return k3_untrusted(err, -EBADMSG, "%s: the hub announces %" PRIu64 " bytes, the released %s %s%" PRIu64, f->name,
                                f->said.size_bytes, repo, want ? "has " : "has no such file: ", want);
        if (__builtin_add_overflow(sum, f->said.size_bytes, &sum))
            return k3_untrusted(err, -EOVERFLOW, "the hub announces more bytes than there can be");
    }
    if (all && sum < l->total_size_bytes)
        return k3_untrusted(err, -EBADMSG, "the hub announces shards of %" PRIu64 " bytes together, " K3_FETCH_INDEX
                            " tensors of %" PRIu64, sum, l->total_size_bytes);
    return 0;
}
