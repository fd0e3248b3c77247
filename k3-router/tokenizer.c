#include "k3-router/tokenizer.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "k3-router/bpe.h"
#include "text/file.h"
#include "text/utf8.h"

#define CONFIG_FILE_MAX (64u << 20)

struct k3_tokenizer {
    struct k3_ranks ranks;
    struct k3_split *split;
    char *special[K3_N_SPECIALS];
    size_t special_bytes[K3_N_SPECIALS];
    bool special_lead[256]; /* a spelling begins with this byte */
};

static const struct { uint32_t above; const char *name; } markers[] = {
    { K3_SP_END_OF_MSG, "<|end_of_msg|>" }, { K3_SP_OPEN, "<|open|>" },
    { K3_SP_CLOSE, "<|close|>" },           { K3_SP_SEP, "<|sep|>" },
};

static int parse_ranks(struct k3_ranks *r, const char *text, size_t len_bytes, const char *name, struct k3_err *err)
{
    uint32_t a = 0, b = 0;
    int rc = k3_ranks_parse(&r->bytes, &r->off, &r->n, text, len_bytes, name, err);

    if (rc < 0)
        return rc;
    rc = k3_ranks_build(r, &a, &b);
    if (rc == -EEXIST)
        return k3_refuse(err, rc, "%s line %u: the same token as line %u", name, b + 1, a + 1);
    if (rc == -ENOENT)
        return k3_refuse(err, rc, "%s: %u ranks and none is the single byte 0x%02x; every byte must be a token", name,
                         r->n, a);
    return rc < 0 ? k3_fail(err, rc, "%s: no memory for %u ranks", name, r->n) : 0;
}

static int set_special(struct k3_tokenizer *t, const cJSON *entry, const char *name, struct k3_err *err)
{
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(entry, "content");
    uint64_t base = t->ranks.n, id;

    if (k3_parse_u64(entry->string, 0, UINT32_MAX, &id) < 0 || id < base || id >= base + K3_N_SPECIALS)
        return k3_refuse(err, -EINVAL, "%s: added_tokens_decoder \"%s\" is not a special id; with %llu ranks they are %llu"
                         " to %llu", name, entry->string, (unsigned long long)base, (unsigned long long)base,
                         (unsigned long long)base + K3_N_SPECIALS - 1);
    if (!cJSON_IsString(content) || !*content->valuestring)
        return k3_refuse(err, -EINVAL, "%s: added_tokens_decoder \"%s\" has no string \"content\"", name, entry->string);
    free(t->special[id - base]);
    t->special[id - base] = strdup(content->valuestring);
    return t->special[id - base] ? 0 : k3_fail(err, -ENOMEM, "%s: no memory", name);
}

static int set_specials(struct k3_tokenizer *t, const char *json, size_t len_bytes, const char *name,
                        struct k3_err *err)
{
    const char *end = NULL;
    cJSON *root = json ? cJSON_ParseWithLengthOpts(json, len_bytes, &end, 0) : NULL;
    const cJSON *table = cJSON_GetObjectItemCaseSensitive(root, "added_tokens_decoder"), *entry;
    int rc = 0;

    while (root && end < json + len_bytes && strchr(" \t\r\n", *end) && *end)
        end++;
    if (root && end < json + len_bytes) {
        cJSON_Delete(root);
        return k3_refuse(err, -EINVAL, "%s: something follows the JSON object at byte %zu", name, (size_t)(end - json));
    }
    if (json && !root)
        rc = k3_refuse(err, -EINVAL, "%s: not JSON at byte %zu", name, end ? (size_t)(end - json) : 0);
    else if (json && !cJSON_IsObject(table))
        rc = k3_refuse(err, -EINVAL, "%s: no object \"added_tokens_decoder\"", name);
    if (rc == 0)
        cJSON_ArrayForEach(entry, table)
            if ((rc = set_special(t, entry, name, err)) < 0)
                break;
    cJSON_Delete(root);
    for (uint32_t i = 0; i < K3_N_SPECIALS && rc == 0; i++) {
        if (!t->special[i] && asprintf(&t->special[i], "<|reserved_token_%u|>", t->ranks.n + i) < 0) {
            t->special[i] = NULL;
            return k3_fail(err, -ENOMEM, "%s: no memory", name);
        }
        t->special_bytes[i] = strlen(t->special[i]);
        t->special_lead[(uint8_t)t->special[i][0]] = true;
        for (uint32_t k = 0; k < i; k++)
            if (strcmp(t->special[k], t->special[i]) == 0)
                return k3_refuse(err, -EEXIST, "%s: ids %u and %u have the same name \"%s\"", name, t->ranks.n + k,
                                 t->ranks.n + i, t->special[i]);
    }
    return rc;
}

int k3_tokenizer_parse(struct k3_tokenizer **out, const char *ranks, size_t ranks_bytes, const char *ranks_name,
                       const char *config_json, size_t config_bytes, const char *config_name, struct k3_err *err)
{
    struct k3_tokenizer *t = calloc(1, sizeof(*t));
    int rc = t ? k3_split_open(&t->split, err) : k3_fail(err, -ENOMEM, "%s: no memory", ranks_name);

    if (rc == 0)
        rc = parse_ranks(&t->ranks, ranks, ranks_bytes, ranks_name, err);
    if (rc == 0)
        rc = set_specials(t, config_json, config_bytes, config_json ? config_name : ranks_name, err);
    if (rc < 0) {
        k3_tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

static int check_markers(const struct k3_tokenizer *t, const char *name, struct k3_err *err)
{
    for (size_t i = 0; i < sizeof(markers) / sizeof(markers[0]); i++)
        if (strcmp(t->special[markers[i].above], markers[i].name) != 0)
            return k3_refuse(err, -EINVAL, "%s: id %u is named \"%s\" and should be \"%s\"; is this the config of another"
                             " model (K2 has the same ranks)?", name, t->ranks.n + markers[i].above,
                             t->special[markers[i].above], markers[i].name);
    return 0;
}

int k3_tokenizer_open(struct k3_tokenizer **out, const char *dir, struct k3_err *err)
{
    struct k3_buf ranks = { 0 }, config = { 0 };
    char ranks_name[1024], config_name[1024];
    struct k3_tokenizer *t = NULL;
    int rc;

    snprintf(ranks_name, sizeof(ranks_name), "%s/tiktoken.model", dir);
    snprintf(config_name, sizeof(config_name), "%s/tokenizer_config.json", dir);
    rc = k3_file_read(&ranks, ranks_name, K3_RANKS_FILE_MAX, err);
    if (rc == 0)
        rc = k3_file_read(&config, config_name, CONFIG_FILE_MAX, err);
    if (rc == 0)
        rc = k3_tokenizer_parse(&t, ranks.bytes, ranks.len_bytes, ranks_name, config.len_bytes ? config.bytes : "",
                                config.len_bytes, config_name, err);
    if (rc == 0)
        rc = check_markers(t, config_name, err);
    if (rc == 0)
        *out = t;
    else
        k3_tokenizer_close(t);
    k3_buf_free(&ranks);
    k3_buf_free(&config);
    return rc;
}

void k3_tokenizer_close(struct k3_tokenizer *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < K3_N_SPECIALS; i++)
        free(t->special[i]);
    k3_split_close(t->split);
    k3_ranks_free(&t->ranks);
    free(t);
}

uint32_t k3_tokenizer_base(const struct k3_tokenizer *t)
{
    return t->ranks.n;
}

uint32_t k3_tokenizer_n_vocab(const struct k3_tokenizer *t)
{
    return t->ranks.n + K3_N_SPECIALS;
}

struct encode { const struct k3_tokenizer *t; struct k3_ids *out; };

static int encode_piece(void *arg, const char *piece, size_t len_bytes)
{
    struct encode *e = arg;

    return k3_bpe_encode(&e->t->ranks, piece, len_bytes, e->out);
}

/* The first special spelling in text: its offset and id; len_bytes when there is none.  No name is a prefix of another in
 * K3's list; should one be, the longer wins. */
static size_t find_special(const struct k3_tokenizer *t, const char *text, size_t len_bytes, uint32_t *which)
{
    for (size_t at = 0; at < len_bytes; at++) {
        size_t best = 0;
        if (!t->special_lead[(uint8_t)text[at]])
            continue;
        for (uint32_t i = 0; i < K3_N_SPECIALS; i++)
            if (t->special_bytes[i] > best && t->special_bytes[i] <= len_bytes - at &&
                memcmp(text + at, t->special[i], t->special_bytes[i]) == 0) {
                best = t->special_bytes[i];
                *which = i;
            }
        if (best)
            return at;
    }
    return len_bytes;
}

static int encode(const struct k3_tokenizer *t, const char *text, size_t len_bytes, bool specials, struct k3_ids *out,
                  struct k3_err *err)
{
    size_t bad = k3_utf8_check(text, len_bytes), slice_left = 0;
    struct encode e = { t, out };
    int rc = 0;

    if (bad < len_bytes)
        return k3_refuse(err, -EILSEQ, "text: invalid UTF-8 at byte offset %zu (0x%02x)", bad, (uint8_t)text[bad]);
    while (len_bytes && rc == 0) {
        size_t chunk = k3_split_chunk(text, len_bytes, &slice_left);
        for (size_t at = 0; at < chunk && rc == 0;) {
            uint32_t which = 0;
            size_t n = specials ? find_special(t, text + at, chunk - at, &which) : chunk - at;
            rc = k3_split_pieces(t->split, text + at, n, encode_piece, &e, err);
            at += n;
            if (rc == 0 && at < chunk) {
                rc = k3_ids_push(out, t->ranks.n + which);
                at += t->special_bytes[which];
            }
        }
        text += chunk;
        len_bytes -= chunk;
    }
    return rc;
}

int k3_tokenizer_encode(const struct k3_tokenizer *t, const char *text, size_t len_bytes, struct k3_ids *out,
                        struct k3_err *err)
{
    return encode(t, text, len_bytes, false, out, err);
}

int k3_tokenizer_encode_special(const struct k3_tokenizer *t, const char *text, size_t len_bytes, struct k3_ids *out,
                                struct k3_err *err)
{
    return encode(t, text, len_bytes, true, out, err);
}

const char *k3_tokenizer_bytes(const struct k3_tokenizer *t, uint32_t id, size_t *len_bytes)
{
    const struct k3_ranks *r = &t->ranks;

    if (id < r->n) {
        *len_bytes = r->off[id + 1] - r->off[id];
        return r->bytes + r->off[id];
    }
    if (id - r->n >= K3_N_SPECIALS)
        return NULL;
    *len_bytes = t->special_bytes[id - r->n];
    return t->special[id - r->n];
}

int k3_tokenizer_decode(const struct k3_tokenizer *t, const uint32_t *ids, size_t n, int with_specials,
                        struct k3_buf *out, struct k3_err *err)
{
    for (size_t i = 0; i < n; i++) {
        size_t len_bytes = 0;
        const char *bytes = k3_tokenizer_bytes(t, ids[i], &len_bytes);
        if (!bytes)
            return k3_refuse(err, -EINVAL, "token id %u is outside the vocabulary of %u", ids[i],
                             k3_tokenizer_n_vocab(t));
        if ((ids[i] < t->ranks.n || with_specials) && k3_buf_append(out, bytes, len_bytes) < 0)
            return k3_fail(err, -ENOMEM, "decode: no memory");
    }
    return 0;
}
