/* Reads config.json in the released nested form and in the flat form (spec/model.md 1).  Fields are one table; every
 * problem is collected, so that one run names them all. */
#include "model/config.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_WIDTH (1u << 20)       /* a row of F32 then is at most 4 MiB, half a piece */
#define MAX_VOCAB (1u << 24)
#define MAX_CONFIG_BYTES (16u << 20)

enum kind { UINT, FLOAT, BOOL };
enum place { TEXT, LINEAR }; /* text_config, text_config.linear_attn_config; flat: both are the top */

struct problems {
    char text[860];
    char missing[2][560]; /* by place: all 29 fields fit, even when every one is missing */
    size_t len, n, n_unlisted;
};

static void problem(struct problems *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void problem(struct problems *p, const char *fmt, ...)
{
    char one[300];
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(one, sizeof(one), fmt, ap);
    va_end(ap);
    if (n >= (int)sizeof(one))
        n = sizeof(one) - 1;
    p->n++;
    if (p->len + (size_t)n + 3 > sizeof(p->text)) {
        p->n_unlisted++;
        return;
    }
    p->len += (size_t)sprintf(p->text + p->len, "%s%s", p->len ? "; " : "", one);
}

/* Missing fields are many when one is: they share one list, put in front by list_missing(). */
static void missing(struct problems *p, enum place place, const char *name)
{
    char *to = p->missing[place];
    size_t len = strlen(to);

    snprintf(to + len, sizeof(p->missing[0]) - len, "%s%s", len ? ", " : "", name);
    p->n++;
}

static void list_missing(struct problems *p, bool nested)
{
    static const char *const where[] = { " in text_config", " in text_config.linear_attn_config" };
    char all[2 * sizeof(p->missing[0]) + sizeof(p->text) + 128] = "";
    size_t len = 0;

    for (int i = 0; i < 2; i++)
        if (p->missing[i][0])
            len += (size_t)sprintf(all + len, "%smissing%s: %s", len ? "; " : "", nested ? where[i] : "", p->missing[i]);
    if (p->text[0])
        len += (size_t)sprintf(all + len, "%s%s", len ? "; " : "", p->text);
    if (len >= sizeof(p->text))
        strcpy(all + sizeof(p->text) - 5, " ...");
    strcpy(p->text, all);
}

/* How a value reads in an error message. */
static const char *shown(const cJSON *v, char buf[64])
{
    if (cJSON_IsNumber(v))
        snprintf(buf, 64, "%.15g", v->valuedouble);
    else if (cJSON_IsString(v))
        snprintf(buf, 64, "\"%.40s\"", v->valuestring);
    else
        snprintf(buf, 64, "%s", cJSON_IsBool(v)     ? (cJSON_IsTrue(v) ? "true" : "false")
                                : cJSON_IsArray(v)  ? "an array"
                                : cJSON_IsObject(v) ? "an object"
                                                    : "null");
    return buf;
}

/* The member of an object; one that occurs twice is a contradiction. */
static const cJSON *member(struct problems *p, const cJSON *obj, const char *path, const char *name)
{
    const cJSON *v, *found = NULL;

    cJSON_ArrayForEach(v, obj) {
        if (!v->string || strcmp(v->string, name))
            continue;
        if (found && p)
            problem(p, "%s%s is given twice", path, name);
        if (found)
            break;
        found = v;
    }
    return found;
}

struct field {
    const char *nested, *flat;
    enum place place;
    enum kind kind;
    size_t off;
    double min, max;
};
#define AT(f) offsetof(struct k3_config, f)

static const struct field fields[] = {
    { "hidden_size", "hidden_size", TEXT, UINT, AT(hidden), 1, MAX_WIDTH },
    { "num_hidden_layers", "num_hidden_layers", TEXT, UINT, AT(n_layers_model), 1, K3_MAX_LAYERS },
    { "vocab_size", "vocab_size", TEXT, UINT, AT(vocab), 1, MAX_VOCAB },
    { "rms_norm_eps", "rms_norm_eps", TEXT, FLOAT, AT(rms_eps), 1e-30, 1 },
    { "activation_situ_beta", "situ_beta", TEXT, FLOAT, AT(situ_beta), 1e-6, 1e6 },
    { "activation_situ_linear_beta", "situ_linear_beta", TEXT, FLOAT, AT(situ_linear_beta), 1e-6, 1e6 },
    { "num_attention_heads", "num_attention_heads", TEXT, UINT, AT(mla_heads), 1, 65536 },
    { "q_lora_rank", "q_lora_rank", TEXT, UINT, AT(q_lora), 1, MAX_WIDTH },
    { "kv_lora_rank", "kv_lora_rank", TEXT, UINT, AT(kv_lora), 1, MAX_WIDTH },
    { "qk_nope_head_dim", "qk_nope_head_dim", TEXT, UINT, AT(qk_nope), 1, 65536 },
    { "qk_rope_head_dim", "qk_rope_head_dim", TEXT, UINT, AT(qk_rope), 1, 65536 },
    { "v_head_dim", "v_head_dim", TEXT, UINT, AT(v_dim), 1, 65536 },
    { "mla_use_output_gate", "mla_use_output_gate", TEXT, BOOL, AT(mla_gate), 0, 0 },
    { "num_heads", "kda_num_heads", LINEAR, UINT, AT(kda_heads), 1, 65536 },
    { "head_dim", "kda_head_dim", LINEAR, UINT, AT(kda_dim), 1, 65536 },
    { "short_conv_kernel_size", "short_conv_kernel_size", LINEAR, UINT, AT(conv_taps), 1, 16 },
    { "gate_lower_bound", "gate_lower_bound", LINEAR, FLOAT, AT(gate_lower_bound), -80, -1e-6 },
    { "intermediate_size", "intermediate_size", TEXT, UINT, AT(dense_inter), 1, MAX_WIDTH },
    { "first_k_dense_replace", "first_k_dense_replace", TEXT, UINT, AT(first_dense), 0, K3_MAX_LAYERS },
    { "num_experts", "num_experts", TEXT, UINT, AT(n_experts), 1, 65535 },
    { "num_experts_per_token", "num_experts_per_token", TEXT, UINT, AT(top_k), 1, 65535 },
    { "num_shared_experts", "num_shared_experts", TEXT, UINT, AT(n_shared), 1, 1024 },
    { "moe_intermediate_size", "moe_intermediate_size", TEXT, UINT, AT(moe_inter), 1, MAX_WIDTH },
    { "routed_expert_hidden_size", "routed_expert_hidden_size", TEXT, UINT, AT(latent), 1, MAX_WIDTH },
    { "latent_moe_use_norm", "latent_moe_use_norm", TEXT, BOOL, AT(latent_norm), 0, 0 },
    { "moe_renormalize", "moe_renormalize", TEXT, BOOL, AT(renormalize), 0, 0 },
    { "routed_scaling_factor", "routed_scaling_factor", TEXT, FLOAT, AT(routed_scale), 1e-6, 1e6 },
    { "attn_res_block_size", "attn_res_block_size", TEXT, UINT, AT(res_block), 1, K3_MAX_LAYERS },
};

/* Kinds of which there is one; absent means that one, another value is refused.  json is a literal. */
static const struct { enum place place; const char *name; const char *json; } kinds[] = {
    { TEXT, "hidden_act", "\"situ\"" },
    { TEXT, "mla_use_nope", "true" },
    { LINEAR, "use_full_rank_gate", "true" },
    { TEXT, "moe_layer_freq", "1" },
    { TEXT, "moe_router_activation_func", "\"sigmoid\"" },
    { TEXT, "num_expert_group", "1" },
    { TEXT, "topk_group", "1" },
    { TEXT, "topk_method", "\"noaux_tc\"" },
    { TEXT, "tie_word_embeddings", "false" },
    { TEXT, "model_type", "\"kimi_linear\"" },
};

struct source {
    struct problems *p;
    const cJSON *top, *text, *linear; /* flat: text == linear == top */
    bool nested;
};

static const char *prefix(const struct source *s, enum place place)
{
    return !s->nested ? "" : place == TEXT ? "text_config." : "text_config.linear_attn_config.";
}

static const cJSON *look(const struct source *s, enum place place, const char *name)
{
    return member(s->p, place == TEXT ? s->text : s->linear, prefix(s, place), name);
}

static bool whole(const cJSON *v, double min, double max)
{
    return cJSON_IsNumber(v) && v->valuedouble >= min && v->valuedouble <= max && floor(v->valuedouble) == v->valuedouble;
}

static void read_field(const struct source *s, const struct field *f, struct k3_config *c)
{
    const char *name = s->nested ? f->nested : f->flat, *pre = prefix(s, f->place);
    const cJSON *v = look(s, f->place, name);
    char *to = (char *)c + f->off, buf[64];

    if (!v)
        missing(s->p, s->nested ? f->place : TEXT, name);
    else if (f->kind == BOOL && cJSON_IsBool(v))
        *(bool *)to = cJSON_IsTrue(v);
    else if (f->kind == BOOL)
        problem(s->p, "%s%s is %s, must be true or false", pre, name, shown(v, buf));
    else if (f->kind == UINT && whole(v, f->min, f->max))
        *(uint32_t *)to = (uint32_t)v->valuedouble;
    else if (f->kind == UINT)
        problem(s->p, "%s%s is %s, must be a whole number from %.0f to %.0f", pre, name, shown(v, buf), f->min, f->max);
    else if (cJSON_IsNumber(v) && v->valuedouble >= f->min && v->valuedouble <= f->max)
        *(float *)to = (float)v->valuedouble;
    else
        problem(s->p, "%s%s is %s, must be a number from %g to %g", pre, name, shown(v, buf), f->min, f->max);
}

static bool same(const cJSON *v, const char *json)
{
    if (json[0] == '"')
        return cJSON_IsString(v) && strlen(v->valuestring) == strlen(json) - 2 &&
               !strncmp(v->valuestring, json + 1, strlen(json) - 2);
    if (json[0] == 't' || json[0] == 'f')
        return cJSON_IsBool(v) && cJSON_IsTrue(v) == (json[0] == 't');
    return cJSON_IsNumber(v) && v->valuedouble == atof(json);
}

static void read_kinds(const struct source *s, const struct k3_config *c)
{
    const cJSON *v;
    char buf[64];

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        v = look(s, kinds[i].place, kinds[i].name);
        if (v && !cJSON_IsNull(v) && !same(v, kinds[i].json))
            problem(s->p, "%s%s is %s, only %s is supported", prefix(s, kinds[i].place), kinds[i].name, shown(v, buf),
                    kinds[i].json);
    }
    v = s->nested ? member(s->p, s->top, "", "tie_word_embeddings") : NULL;
    if (v && !cJSON_IsFalse(v))
        problem(s->p, "tie_word_embeddings is %s, only false is supported", shown(v, buf));
    v = look(s, TEXT, "num_key_value_heads");
    if (v && c->mla_heads && !(cJSON_IsNumber(v) && v->valuedouble == c->mla_heads))
        problem(s->p, "%snum_key_value_heads is %s, must equal num_attention_heads %u", prefix(s, TEXT), shown(v, buf),
                c->mla_heads);
}

/* The released experts are MXFP4; a file that says otherwise describes another format. */
static void read_quantization(const struct source *s)
{
    static const char *const want[][2] = { { "quant_method", "\"compressed-tensors\"" },
                                           { "format", "\"mxfp4-pack-quantized\"" } };
    const cJSON *q = look(s, TEXT, "quantization_config"), *v;
    char buf[64];

    if (!q || cJSON_IsNull(q))
        return;
    if (!cJSON_IsObject(q)) {
        problem(s->p, "%squantization_config is %s, must be an object", prefix(s, TEXT), shown(q, buf));
        return;
    }
    for (int i = 0; i < 2; i++) {
        v = member(s->p, q, "quantization_config.", want[i][0]);
        if (v && !same(v, want[i][1]))
            problem(s->p, "quantization_config.%s is %s, only %s is supported", want[i][0], shown(v, buf), want[i][1]);
    }
}

/* A one-based list of layers, strictly increasing within 1..n: marks them.  false: absent or wrong (said so). */
static bool read_list(const struct source *s, const char *name, uint32_t n, bool needed, uint8_t *mark)
{
    const cJSON *list = look(s, LINEAR, name), *v;
    const char *pre = prefix(s, LINEAR);
    double last = 0;
    char buf[64];

    if (!list || (!needed && cJSON_IsNull(list))) {
        if (needed)
            missing(s->p, s->nested ? LINEAR : TEXT, name);
        return false;
    }
    if (!cJSON_IsArray(list)) {
        problem(s->p, "%s%s is %s, must be an array of layer numbers", pre, name, shown(list, buf));
        return false;
    }
    cJSON_ArrayForEach(v, list) {
        if (!whole(v, 1, n)) {
            problem(s->p, "%s%s has layer %s, must be from 1 to %u", pre, name, shown(v, buf), n);
            return false;
        }
        if (v->valuedouble <= last) {
            problem(s->p, "%s%s has layer %.0f after %.0f, must increase", pre, name, v->valuedouble, last);
            return false;
        }
        last = v->valuedouble;
        mark[(uint32_t)last - 1] = 1;
    }
    return true;
}

static void read_layers(const struct source *s, struct k3_config *c)
{
    uint8_t mla[K3_MAX_LAYERS] = { 0 }, kda[K3_MAX_LAYERS] = { 0 };
    /* without a number of layers (a fault of its own) the lists are still looked at */
    uint32_t n = c->n_layers_model ? c->n_layers_model : K3_MAX_LAYERS;
    bool has_mla = read_list(s, "full_attn_layers", n, true, mla), has_kda = read_list(s, "kda_layers", n, false, kda);

    for (uint32_t i = 0; i < c->n_layers_model && has_mla && has_kda; i++)
        if (mla[i] == kda[i]) {
            problem(s->p, "layer %u is in %s of full_attn_layers and kda_layers, must be in exactly one", i + 1,
                    mla[i] ? "both" : "neither");
            break;
        }
    for (uint32_t i = 0; i < c->n_layers_model; i++)
        c->kind[i] = mla[i] ? K3_MLA : K3_KDA;
}

static int64_t read_id(const struct source *s, const char *name, uint32_t vocab)
{
    const cJSON *top = member(s->nested ? s->p : NULL, s->top, "", name), *text = look(s, TEXT, name), *v;
    char buf[64], buf2[64];

    if (cJSON_IsNull(top))
        top = NULL;
    if (cJSON_IsNull(text))
        text = NULL;
    v = top ? top : text;
    if (!v)
        return -1;
    if (top && text && !cJSON_Compare(top, text, true)) {
        problem(s->p, "%s is %s at the top and %s in text_config", name, shown(top, buf), shown(text, buf2));
        return -1;
    }
    if (!vocab)
        return -1; /* a fault of its own, and no bound for this one */
    if (whole(v, 0, (double)vocab - 1))
        return (int64_t)v->valuedouble;
    problem(s->p, "%s is %s, must be a token id below vocab_size %u", name, shown(v, buf), vocab);
    return -1;
}

static void product(struct problems *p, const char *what, uint64_t a, uint64_t b)
{
    if (a * b > MAX_WIDTH)
        problem(p, "%s is %llu, must be at most %u", what, (unsigned long long)(a * b), MAX_WIDTH);
}

static void check_together(struct problems *p, const struct k3_config *c)
{
    if (c->top_k && c->n_experts && c->top_k > c->n_experts)
        problem(p, "num_experts_per_token is %u, must be at most num_experts %u", c->top_k, c->n_experts);
    if (c->latent % 32)
        problem(p, "routed_expert_hidden_size is %u, must be a multiple of 32", c->latent);
    if (c->moe_inter % 32)
        problem(p, "moe_intermediate_size is %u, must be a multiple of 32", c->moe_inter);
    if (c->n_layers_model && c->first_dense > c->n_layers_model)
        problem(p, "first_k_dense_replace is %u, must be at most num_hidden_layers %u", c->first_dense,
                c->n_layers_model);
    product(p, "KDA heads times head_dim", c->kda_heads, c->kda_dim);
    product(p, "num_attention_heads times (qk_nope_head_dim + qk_rope_head_dim)", c->mla_heads,
            (uint64_t)c->qk_nope + c->qk_rope);
    product(p, "num_attention_heads times (qk_nope_head_dim + v_head_dim)", c->mla_heads,
            (uint64_t)c->qk_nope + c->v_dim);
    product(p, "num_shared_experts times moe_intermediate_size", c->n_shared, c->moe_inter);
}

static void find_objects(struct source *s)
{
    const cJSON *type = member(s->p, s->top, "", "model_type");
    char buf[64];

    s->text = member(s->p, s->top, "", "text_config");
    s->nested = s->text || type;
    if (type && !same(type, "\"kimi_k3\""))
        problem(s->p, "model_type is %s, only \"kimi_k3\" is supported", shown(type, buf));
    if (!s->nested) {
        s->text = s->linear = s->top;
        return;
    }
    if (!cJSON_IsObject(s->text)) {
        problem(s->p, "text_config is %s, must be an object", s->text ? shown(s->text, buf) : "missing");
        s->text = NULL;
        return;
    }
    s->linear = member(s->p, s->text, "text_config.", "linear_attn_config");
    if (!cJSON_IsObject(s->linear)) {
        problem(s->p, "text_config.linear_attn_config is %s, must be an object",
                s->linear ? shown(s->linear, buf) : "missing");
        s->linear = NULL;
    }
}

static void read_all(struct source *s, struct k3_config *c)
{
    find_objects(s);
    if (!s->text)
        return;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].place == TEXT || s->linear)
            read_field(s, &fields[i], c);
    read_kinds(s, c);
    read_quantization(s);
    if (s->linear)
        read_layers(s, c);
    c->latent_eps = c->rms_eps;
    c->bos = read_id(s, "bos_token_id", c->vocab);
    c->eos = read_id(s, "eos_token_id", c->vocab);
    c->pad = read_id(s, "pad_token_id", c->vocab);
    check_together(s->p, c);
    list_missing(s->p, s->nested);
}

int k3_config_parse(struct k3_config *out, const char *json, size_t len_bytes, uint32_t n_layers_limit,
                    struct k3_err *err)
{
    const char *end = NULL;
    cJSON *top = len_bytes ? cJSON_ParseWithLengthOpts(json, len_bytes, &end, false) : NULL;
    struct problems p = { .len = 0 };
    struct source s = { .p = &p, .top = top };
    struct k3_config c = { .bos = -1 };

    while (top && end < json + len_bytes && strchr(" \t\r\n", *end) && *end)
        end++;
    if (!cJSON_IsObject(top) || end != json + len_bytes) {
        cJSON_Delete(top);
        return k3_refuse(err, -EINVAL, "config.json (%zu bytes) is not a JSON object", len_bytes);
    }
    read_all(&s, &c);
    cJSON_Delete(top);
    if (p.n == 0 && n_layers_limit > c.n_layers_model)
        problem(&p, "%u layers were asked for, num_hidden_layers is %u", n_layers_limit, c.n_layers_model);
    if (p.n == 1)
        return k3_refuse(err, -EINVAL, "config.json: %s", p.text);
    if (p.n_unlisted)
        return k3_refuse(err, -EINVAL, "config.json has %zu faults: %s; and %zu more", p.n, p.text, p.n_unlisted);
    if (p.n)
        return k3_refuse(err, -EINVAL, "config.json has %zu faults: %s", p.n, p.text);
    c.n_layers = n_layers_limit ? n_layers_limit : c.n_layers_model;
    *out = c;
    return 0;
}

static int read_file(const char *path, char **out, size_t *len_bytes, struct k3_err *err)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO would wait for its writer */
    struct stat st;
    ssize_t n = 0;
    size_t have = 0;
    char *text;

    if (fd < 0)
        return k3_refuse(err, -errno, "%s: %s; a model directory holds config.json and the shards", path,
                         strerror(errno));
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > MAX_CONFIG_BYTES) {
        close(fd);
        return k3_refuse(err, -EINVAL, "%s is not a regular file of at most %u bytes", path, MAX_CONFIG_BYTES);
    }
    text = malloc((size_t)st.st_size + 1);
    while (text && have < (size_t)st.st_size &&
           ((n = read(fd, text + have, (size_t)st.st_size - have)) > 0 || (n < 0 && errno == EINTR)))
        have += n > 0 ? (size_t)n : 0;
    close(fd);
    if (!text)
        return k3_fail(err, -ENOMEM, "no memory to read %s", path);
    if (n < 0) {
        free(text);
        return k3_fail(err, -EIO, "%s cannot be read", path);
    }
    *out = text;
    *len_bytes = have;
    return 0;
}

int k3_config_read(struct k3_config *out, const char *dir, uint32_t n_layers_limit, struct k3_err *err)
{
    struct k3_err inner = K3_ERR_INIT;
    size_t len_bytes = 0;
    char *path, *text = NULL;
    int rc;

    if (asprintf(&path, "%s/config.json", dir) < 0)
        return k3_fail(err, -ENOMEM, "no memory for a file name");
    rc = read_file(path, &text, &len_bytes, err);
    if (rc == 0 && (rc = k3_config_parse(out, text, len_bytes, n_layers_limit, &inner)) < 0)
        k3_refuse(err, rc, "%s: %s", dir, inner.text);
    free(text);
    free(path);
    return rc;
}
