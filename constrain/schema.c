/* From a JSON Schema to a grammar.  Every place of the text that is a schema becomes one node; places are worked through from
 * a list, so a chain of $ref takes no stack. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "constrain/grammar.h"
#include "text/chat_json.h"

#define ITEMS_MAX 2147483647u /* of minItems and the like */
#define KEYS_MAX 1000u        /* properties of one object; names of one required */
#define QUOTE_BYTES 40
#define PLACE_BYTES 300

enum keyword {
    KW_TYPE, KW_ENUM, KW_CONST, KW_ANY_OF, KW_ALL_OF, KW_REF, KW_PROPERTIES, KW_REQUIRED, KW_ADDITIONAL, KW_ITEMS,
    KW_PREFIX_ITEMS, KW_MIN_ITEMS, KW_MAX_ITEMS, KW_MIN_LENGTH, KW_MAX_LENGTH, N_KEYWORDS
};
static const char *const keyword_name[N_KEYWORDS] = {
    "type", "enum", "const", "anyOf", "allOf", "$ref", "properties", "required", "additionalProperties", "items", "prefixItems",
    "minItems", "maxItems", "minLength", "maxLength",
};
/* They describe; no value depends on them. */
static const char *const annotation[] = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated", "readOnly",
    "writeOnly",
};
static const char supported[] =
    "type, enum, const, anyOf, allOf of one schema, $ref to a place in the schema, properties, required, additionalProperties, items, "
    "prefixItems, minItems, maxItems, minLength, maxLength, and title, description, default, examples, $schema, $id, $comment, $defs, "
    "definitions, deprecated, readOnly, writeOnly";

enum type { T_NULL, T_BOOLEAN, T_INTEGER, T_NUMBER, T_STRING, T_ARRAY, T_OBJECT, N_TYPES };
static const char *const type_name[N_TYPES] = { "null", "boolean", "integer", "number", "string", "array", "object" };

struct todo { const struct k3_json *schema; uint32_t node; };
struct compiler {
    struct k3_grammar *g;
    struct k3_err *err;
    const struct k3_json *root;
    uint32_t *node_of; /* by place: index of the k3_json; K3_NO_NODE: none yet */
    struct todo *todo;
    size_t n_todo;
};

/* ---- places and refusals ---- */

/* One more than the highest index of a place (places that equal keys have dropped leave holes). */
static size_t count(const struct k3_json *root, const struct k3_json *v)
{
    size_t most = (size_t)(v - root) + 1;

    for (const struct k3_json *c = v->child; c; c = c->next) {
        size_t n = count(root, c);

        most = n > most ? n : most;
    }
    return most;
}

/* The JSON pointer of a place below v, behind what out has; false: it is not there. */
static bool place(const struct k3_json *v, const struct k3_json *wanted, char *out, size_t at)
{
    size_t i = 0;

    if (v == wanted)
        return true;
    for (const struct k3_json *c = v->child; c; c = c->next, i++) {
        int n = v->type == K3_JSON_ARRAY
                    ? snprintf(out + at, PLACE_BYTES - at, "/%zu", i)
                    : snprintf(out + at, PLACE_BYTES - at, "/%.*s", (int)(c->key.len_bytes < 64 ? c->key.len_bytes : 64), c->key.bytes);
        size_t end = n < 0 || (size_t)n >= PLACE_BYTES - at ? PLACE_BYTES - 1 : at + (size_t)n;

        if (place(c, wanted, out, end))
            return true;
        out[at] = 0;
    }
    return false;
}

/* What a client wrote becomes part of a line of ours. */
static void printable(char *text)
{
    for (; *text; text++)
        if ((uint8_t)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

/* "what" at PLACE says. */
__attribute__((format(printf, 4, 5))) static int refuse(struct compiler *c, const struct k3_json *at, const char *what, const char *fmt,
                                                        ...)
{
    char where[PLACE_BYTES] = "", says[200], name[QUOTE_BYTES + 1];
    va_list ap;

    place(c->root, at, where, 0);
    printable(where);
    snprintf(name, sizeof(name), "%s", what);
    printable(name);
    va_start(ap, fmt);
    vsnprintf(says, sizeof(says), fmt, ap);
    va_end(ap);
    return k3_refuse(c->err, -EINVAL, "\"%s\" at %s %s", name, where[0] ? where : "/", says);
}

static int unsupported(struct compiler *c, const struct k3_json *at, const char *what)
{
    int rc = refuse(c, at, what, "is not supported; supported: ");
    size_t n = strlen(c->err->text);

    snprintf(c->err->text + n, sizeof(c->err->text) - n, "%s", supported);
    return rc;
}

/* ---- nodes of places ---- */

static int node_of(struct compiler *c, const struct k3_json *v, uint32_t *out)
{
    uint32_t *known = &c->node_of[v - c->root];
    int rc;

    if (v->type == K3_JSON_TRUE) {
        *out = K3_ANY_VALUE;
        return 0;
    }
    if (*known == K3_NO_NODE) {
        if (v->type != K3_JSON_OBJECT && v->type != K3_JSON_FALSE)
            return refuse(c, v, "schema", "is neither an object nor true nor false");
        rc = k3_grammar_node(c->g, (struct k3_node){ .kind = K3_NODE_LITERALS, .rest = K3_NO_NODE }, known, c->err); /* no value */
        if (rc < 0)
            return rc;
        if (v->type == K3_JSON_OBJECT)
            c->todo[c->n_todo++] = (struct todo){ v, *known };
    }
    *out = *known;
    return 0;
}

/* A list of one node: what the place means, under another name. */
static int alias(struct compiler *c, const struct k3_json *v, struct k3_node *out)
{
    uint32_t node;
    int rc = node_of(c, v, &node);

    *out = (struct k3_node){ .kind = K3_NODE_UNION, .first = c->g->n_edges, .n = 1, .rest = K3_NO_NODE };
    return rc < 0 ? rc : k3_grammar_edge(c->g, node, c->err);
}

static int list(struct compiler *c, const struct k3_json *array, struct k3_node *out)
{
    uint32_t node;
    int rc = 0;

    out->first = c->g->n_edges;
    for (const struct k3_json *v = array->child; v && rc == 0; v = v->next, out->n++) {
        rc = node_of(c, v, &node);
        if (rc == 0)
            rc = k3_grammar_edge(c->g, node, c->err);
    }
    return rc;
}

/* One step of a JSON pointer, the len bytes at p, against a key: ~1 is a slash, ~0 a tilde, any other ~ is nothing. */
static bool step_is(const char *p, size_t len, struct k3_text key)
{
    size_t k = 0, i = 0;

    for (; k < len && i < key.len_bytes; k++, i++) {
        char byte = p[k];

        if (byte == '~') {
            if (++k == len || (p[k] != '0' && p[k] != '1'))
                return false;
            byte = p[k] == '1' ? '/' : '~';
        }
        if (byte != key.bytes[i])
            return false;
    }
    return k == len && i == key.len_bytes;
}

/* The member or item that the step names. */
static const struct k3_json *child_named(const struct k3_json *v, const char *p, size_t len)
{
    char index[24];
    size_t i = 0;

    for (const struct k3_json *c = v->child; c; c = c->next, i++) {
        struct k3_text key = c->key;

        if (v->type == K3_JSON_ARRAY)
            key = (struct k3_text){ index, (size_t)snprintf(index, sizeof(index), "%zu", i) };
        if (step_is(p, len, key))
            return c;
    }
    return NULL;
}

static int reference(struct compiler *c, const struct k3_json *at, const struct k3_json *ref, struct k3_node *out)
{
    const struct k3_json *v = c->root;
    const char *p = ref->text.bytes, *end = p + ref->text.len_bytes;

    if (ref->type != K3_JSON_STRING || p == end || *p != '#' || (p + 1 < end && p[1] != '/'))
        return refuse(c, at, "$ref", "is not supported in this form; write \"#\" or \"#/$defs/NAME\"");
    for (p++; p < end && v;) {
        const char *slash = memchr(p + 1, '/', (size_t)(end - p - 1)), *stop = slash ? slash : end;

        v = child_named(v, p + 1, (size_t)(stop - p - 1));
        p = stop;
    }
    return v ? alias(c, v, out) : refuse(c, at, "$ref", "names a place that is not in the schema");
}

/* ---- keywords ---- */

static int whole(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, enum keyword which, uint32_t otherwise,
                 uint32_t *out)
{
    const struct k3_json *v = kw[which];
    double d = v && v->type == K3_JSON_NUMBER ? strtod(v->text.bytes, NULL) : -1;

    *out = otherwise;
    if (!v)
        return 0;
    if (!(d >= 0 && d <= ITEMS_MAX) || d != floor(d))
        return refuse(c, at, keyword_name[which], "must be a whole number from 0 to %u", ITEMS_MAX);
    *out = (uint32_t)d;
    return 0;
}

static int string_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, struct k3_node *out)
{
    int rc = whole(c, at, kw, KW_MIN_LENGTH, 0, &out->min);

    out->kind = K3_NODE_STRING;
    return rc < 0 ? rc : whole(c, at, kw, KW_MAX_LENGTH, UINT32_MAX, &out->max);
}

static int array_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, struct k3_node *out)
{
    int rc = whole(c, at, kw, KW_MIN_ITEMS, 0, &out->min);

    out->kind = K3_NODE_ARRAY;
    out->rest = K3_ANY_VALUE;
    if (rc == 0)
        rc = whole(c, at, kw, KW_MAX_ITEMS, UINT32_MAX, &out->max);
    if (rc == 0 && kw[KW_ITEMS] && kw[KW_ITEMS]->type == K3_JSON_ARRAY)
        return refuse(c, at, "items", "is an array; write prefixItems");
    if (rc == 0 && kw[KW_PREFIX_ITEMS] && (kw[KW_PREFIX_ITEMS]->type != K3_JSON_ARRAY || kw[KW_PREFIX_ITEMS]->n == 0))
        return refuse(c, at, "prefixItems", "must be an array of schemas");
    if (rc == 0 && kw[KW_ITEMS])
        rc = node_of(c, kw[KW_ITEMS], &out->rest);
    return rc == 0 && kw[KW_PREFIX_ITEMS] ? list(c, kw[KW_PREFIX_ITEMS], out) : rc;
}

static int add_property(struct compiler *c, struct k3_text name, uint32_t node, bool required)
{
    struct k3_property p = { .hash = K3_KEY_HASH, .node = node, .required = required };
    struct k3_buf b = { 0 };
    int rc;

    if (k3_buf_puts(&b, "\"") < 0 || k3_json_escape(&b, name.bytes, name.len_bytes) < 0 || k3_buf_puts(&b, "\"") < 0) {
        k3_buf_free(&b);
        return k3_fail(c->err, -ENOMEM, "no memory for a JSON Schema");
    }
    for (size_t i = 0; i < name.len_bytes; i++)
        p.hash = k3_key_hash(p.hash, (uint8_t)name.bytes[i]);
    p.key = (struct k3_literal){ b.bytes, (uint32_t)b.len_bytes };
    rc = k3_grammar_own(c->g, b.bytes, b.cap_bytes, c->err);
    return rc < 0 ? rc : k3_grammar_property(c->g, p, c->err);
}

static bool same(struct k3_text a, struct k3_text b)
{
    return a.len_bytes == b.len_bytes && memcmp(a.bytes, b.bytes, a.len_bytes) == 0;
}

static bool is_required(const struct k3_json *required, struct k3_text name)
{
    for (const struct k3_json *v = required ? required->child : NULL; v; v = v->next)
        if (same(v->text, name))
            return true;
    return false;
}

static int check_object(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw)
{
    const struct k3_json *properties = kw[KW_PROPERTIES], *required = kw[KW_REQUIRED];

    if (properties && (properties->type != K3_JSON_OBJECT || properties->n > KEYS_MAX))
        return refuse(c, at, "properties", "must be an object of at most %u schemas", KEYS_MAX);
    if (required && (required->type != K3_JSON_ARRAY || required->n > KEYS_MAX))
        return refuse(c, at, "required", "must be an array of at most %u names", KEYS_MAX);
    for (const struct k3_json *v = required ? required->child : NULL; v; v = v->next)
        if (v->type != K3_JSON_STRING)
            return refuse(c, at, "required", "must be an array of names");
    return 0;
}

/* A required name that is no property is one of the further members; it stands behind the others. */
static int further_required(struct compiler *c, const struct k3_json *const *kw, struct k3_node *out)
{
    const struct k3_json *required = kw[KW_REQUIRED];
    uint32_t node = kw[KW_ADDITIONAL] ? out->rest : K3_ANY_VALUE;
    int rc = 0;

    for (const struct k3_json *v = required ? required->child : NULL; v && rc == 0; v = v->next) {
        bool named = false;

        for (const struct k3_json *w = kw[KW_PROPERTIES] ? kw[KW_PROPERTIES]->child : NULL; w && !named; w = w->next)
            named = same(w->key, v->text);
        for (const struct k3_json *w = required->child; w != v && !named; w = w->next)
            named = same(w->text, v->text);
        if (!named) {
            rc = add_property(c, v->text, node, true);
            out->n++;
        }
    }
    return rc;
}

static int object_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, struct k3_node *out)
{
    uint32_t node;
    int rc = check_object(c, at, kw);

    out->kind = K3_NODE_OBJECT;
    out->rest = kw[KW_PROPERTIES] ? K3_NO_NODE : K3_ANY_VALUE;
    if (rc == 0 && kw[KW_ADDITIONAL])
        rc = node_of(c, kw[KW_ADDITIONAL], &out->rest);
    out->first = c->g->n_properties;
    for (const struct k3_json *v = kw[KW_PROPERTIES] ? kw[KW_PROPERTIES]->child : NULL; v && rc == 0; v = v->next, out->n++) {
        rc = node_of(c, v, &node);
        if (rc == 0)
            rc = add_property(c, v->key, node, is_required(kw[KW_REQUIRED], v->key));
    }
    return rc < 0 ? rc : further_required(c, kw, out);
}

static int words_node(struct compiler *c, enum type type, struct k3_node *out)
{
    int rc = 0;

    *out = (struct k3_node){ .kind = K3_NODE_LITERALS, .first = c->g->n_literals, .n = type == T_NULL ? 1 : 2 };
    if (type == T_NULL)
        return k3_grammar_literal(c->g, (struct k3_literal){ "null", 4 }, c->err);
    rc = k3_grammar_literal(c->g, (struct k3_literal){ "true", 4 }, c->err);
    return rc < 0 ? rc : k3_grammar_literal(c->g, (struct k3_literal){ "false", 5 }, c->err);
}

static int typed_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, enum type type,
                      struct k3_node *out)
{
    *out = (struct k3_node){ .rest = K3_NO_NODE };
    switch (type) {
    case T_STRING:
        return string_node(c, at, kw, out);
    case T_ARRAY:
        return array_node(c, at, kw, out);
    case T_OBJECT:
        return object_node(c, at, kw, out);
    case T_NUMBER:
    case T_INTEGER:
        out->kind = type == T_NUMBER ? K3_NODE_NUMBER : K3_NODE_INTEGER;
        return 0;
    default:
        return words_node(c, type, out);
    }
}

/* ---- type ---- */

static int one_type(struct compiler *c, const struct k3_json *at, const struct k3_json *v, uint32_t *types)
{
    for (int t = 0; v->type == K3_JSON_STRING && t < N_TYPES; t++)
        if (k3_text_is(v->text, type_name[t])) {
            *types |= 1u << t;
            return 0;
        }
    return refuse(c, at, "type", "must be null, boolean, integer, number, string, array or object, or a list of these");
}

/* The types that the schema allows; without the keyword those that its other keywords speak of; 0: all. */
static int types_of(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, uint32_t *types)
{
    const struct k3_json *v = kw[KW_TYPE];
    int rc = 0;

    *types = 0;
    if (v && v->type == K3_JSON_ARRAY && v->n) {
        for (v = v->child; v && rc == 0; v = v->next)
            rc = one_type(c, at, v, types);
    } else if (v) {
        rc = one_type(c, at, v, types);
    } else {
        if (kw[KW_PROPERTIES] || kw[KW_REQUIRED] || kw[KW_ADDITIONAL])
            *types |= 1u << T_OBJECT;
        if (kw[KW_ITEMS] || kw[KW_PREFIX_ITEMS] || kw[KW_MIN_ITEMS] || kw[KW_MAX_ITEMS])
            *types |= 1u << T_ARRAY;
        if (kw[KW_MIN_LENGTH] || kw[KW_MAX_LENGTH])
            *types |= 1u << T_STRING;
    }
    if (*types & 1u << T_NUMBER)
        *types &= ~(1u << T_INTEGER);
    return rc;
}

static int types_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, struct k3_node *out)
{
    uint32_t types, made[N_TYPES], n = 0;
    int rc = types_of(c, at, kw, &types);

    if (rc == 0 && types == 0) {
        *out = (struct k3_node){ .kind = K3_NODE_UNION, .first = c->g->n_edges, .n = 1 };
        return k3_grammar_edge(c->g, K3_ANY_VALUE, c->err);
    }
    for (int t = 0; t < N_TYPES && rc == 0; t++) {
        if (!(types & 1u << t))
            continue;
        rc = typed_node(c, at, kw, (enum type)t, out);
        if (types == 1u << t)
            return rc;
        if (rc == 0)
            rc = k3_grammar_node(c->g, *out, &made[n++], c->err);
    }
    *out = (struct k3_node){ .kind = K3_NODE_UNION, .first = c->g->n_edges, .n = n };
    for (uint32_t i = 0; i < n && rc == 0; i++)
        rc = k3_grammar_edge(c->g, made[i], c->err);
    return rc;
}

/* ---- enum and const ---- */

static bool has_type(const struct k3_json *v, uint32_t types)
{
    static const enum type type_of[] = {
        [K3_JSON_NULL] = T_NULL,     [K3_JSON_FALSE] = T_BOOLEAN, [K3_JSON_TRUE] = T_BOOLEAN,  [K3_JSON_NUMBER] = T_NUMBER,
        [K3_JSON_STRING] = T_STRING, [K3_JSON_ARRAY] = T_ARRAY,   [K3_JSON_OBJECT] = T_OBJECT,
    };
    double d = v->type == K3_JSON_NUMBER ? strtod(v->text.bytes, NULL) : 0.5;

    return types == 0 || types & 1u << type_of[v->type] || (types & 1u << T_INTEGER && d == floor(d));
}

static int value_literal(struct compiler *c, const struct k3_json *v)
{
    struct k3_buf b = { 0 };
    int rc;

    if (k3_json_write(&b, v, K3_JSON_SORTED) < 0) {
        k3_buf_free(&b);
        return k3_fail(c->err, -ENOMEM, "no memory for a JSON Schema");
    }
    rc = k3_grammar_own(c->g, b.bytes, b.cap_bytes, c->err);
    return rc < 0 ? rc : k3_grammar_literal(c->g, (struct k3_literal){ b.bytes, (uint32_t)b.len_bytes }, c->err);
}

static int values_node(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, struct k3_node *out)
{
    const struct k3_json *listed = kw[KW_ENUM];
    uint32_t types;
    int rc = types_of(c, at, kw, &types);

    *out = (struct k3_node){ .kind = K3_NODE_LITERALS, .first = c->g->n_literals, .rest = K3_NO_NODE };
    if (rc == 0 && listed && (listed->type != K3_JSON_ARRAY || listed->n == 0))
        return refuse(c, at, "enum", "must be an array with at least one value");
    for (const struct k3_json *v = listed ? listed->child : kw[KW_CONST]; v && rc == 0; v = listed ? v->next : NULL)
        if (has_type(v, types)) {
            rc = value_literal(c, v);
            out->n++;
        }
    return rc;
}

/* ---- one schema ---- */

static bool is_annotation(struct k3_text key)
{
    for (size_t i = 0; i < sizeof(annotation) / sizeof(annotation[0]); i++)
        if (k3_text_is(key, annotation[i]))
            return true;
    return false;
}

static int keywords(struct compiler *c, const struct k3_json *at, const struct k3_json **kw)
{
    char name[QUOTE_BYTES + 1];

    for (const struct k3_json *m = at->child; m; m = m->next) {
        int k = 0;

        while (k < N_KEYWORDS && !k3_text_is(m->key, keyword_name[k]))
            k++;
        if (k < N_KEYWORDS) {
            kw[k] = m;
        } else if (!is_annotation(m->key)) {
            snprintf(name, sizeof(name), "%.*s", (int)(m->key.len_bytes < QUOTE_BYTES ? m->key.len_bytes : QUOTE_BYTES), m->key.bytes);
            return unsupported(c, at, name);
        }
    }
    return 0;
}

/* What two of these would mean together is an intersection, which a grammar of this kind has not. */
static int alone(struct compiler *c, const struct k3_json *at, const struct k3_json *const *kw, enum keyword which)
{
    bool values = which == KW_ENUM || which == KW_CONST;

    for (int k = 0; k < N_KEYWORDS; k++)
        if (kw[k] && k != (int)which && !(values && k == KW_TYPE))
            return refuse(c, at, keyword_name[which], "beside \"%s\" is not supported", keyword_name[k]);
    return 0;
}

static int compile(struct compiler *c, const struct k3_json *at, struct k3_node *out)
{
    static const enum keyword whole_meaning[] = { KW_REF, KW_ALL_OF, KW_ANY_OF, KW_ENUM, KW_CONST };
    const struct k3_json *kw[N_KEYWORDS] = { NULL };
    int rc = keywords(c, at, kw);

    for (size_t i = 0; i < sizeof(whole_meaning) / sizeof(whole_meaning[0]) && rc == 0; i++)
        if (kw[whole_meaning[i]])
            rc = alone(c, at, kw, whole_meaning[i]);
    if (rc < 0)
        return rc;
    if (kw[KW_REF])
        return reference(c, at, kw[KW_REF], out);
    if (kw[KW_ALL_OF] && (kw[KW_ALL_OF]->type != K3_JSON_ARRAY || kw[KW_ALL_OF]->n != 1))
        return refuse(c, at, "allOf", "is supported with one schema in it");
    if (kw[KW_ALL_OF])
        return alias(c, kw[KW_ALL_OF]->child, out);
    if (kw[KW_ANY_OF] && (kw[KW_ANY_OF]->type != K3_JSON_ARRAY || kw[KW_ANY_OF]->n == 0))
        return refuse(c, at, "anyOf", "must be an array of schemas");
    *out = (struct k3_node){ .kind = K3_NODE_UNION, .rest = K3_NO_NODE };
    if (kw[KW_ANY_OF])
        return list(c, kw[KW_ANY_OF], out);
    return kw[KW_ENUM] || kw[KW_CONST] ? values_node(c, at, kw, out) : types_node(c, at, kw, out);
}

static int compile_all(struct compiler *c)
{
    struct k3_node made;
    int rc = node_of(c, c->root, &c->g->root);

    while (c->n_todo && rc == 0) {
        struct todo t = c->todo[--c->n_todo];

        rc = compile(c, t.schema, &made);
        if (rc == 0)
            c->g->node[t.node] = made;
    }
    return rc < 0 ? rc : k3_grammar_finish(c->g, c->err);
}

int k3_grammar_schema(struct k3_grammar **out, const char *schema, size_t len_bytes, struct k3_err *err)
{
    struct k3_err own = K3_ERR_INIT;
    struct compiler c = { .err = err ? err : &own };
    struct k3_json_doc doc = { 0 };
    size_t n;
    int rc;

    if (len_bytes > K3_SCHEMA_BYTES_MAX)
        return k3_refuse(c.err, -E2BIG, "%zu bytes; at most %u", len_bytes, K3_SCHEMA_BYTES_MAX);
    rc = k3_json_parse(&doc, schema, len_bytes, c.err);
    if (rc < 0)
        return rc;
    c.root = doc.node;
    n = count(c.root, c.root);
    rc = k3_grammar_new(&c.g, c.err);
    if (rc == 0) {
        c.node_of = malloc(n * sizeof(*c.node_of));
        c.todo = malloc(n * sizeof(*c.todo)); /* a place is worked on once */
        if (!c.node_of || !c.todo)
            rc = k3_fail(c.err, -ENOMEM, "no memory for a JSON Schema");
    }
    if (rc == 0) {
        memset(c.node_of, 0xff, n * sizeof(*c.node_of));
        rc = compile_all(&c);
    }
    free(c.node_of);
    free(c.todo);
    k3_json_free(&doc);
    if (rc == 0)
        *out = c.g;
    else
        k3_grammar_free(c.g);
    return rc;
}
