#include "constrain/constraint.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOOLS_MAX 4096u
#define NAME_BYTES_MAX 1024u
#define KEY_BYTES_MAX 256u

enum phase {
    P_THINK, P_BETWEEN, P_RESPONSE, P_AFTER, P_TOOLS, P_CALL, P_VALUE, P_AFTER_TOOLS, P_ENDED, P_OVER
};
enum control { C_EOS, C_END_OF_MSG, C_OPEN, C_CLOSE, C_SEP, N_CONTROLS };
static const char *const control_name[N_CONTROLS] = { "eos", "end_of_msg", "open", "close", "sep" };

/* A tag is a sequence of parts: one of some literals, or a key that goes on to the quote with which the next part begins. */
enum part { T_THINK, T_RESPONSE, T_TOOLS, T_MESSAGE, T_CALL, T_ARGUMENT, T_CALL_OPEN, T_INDEX, T_KEY, T_TYPE, T_NONE };
static const struct k3_literal word[] = { /* up to T_ARGUMENT */
    { "think", 5 }, { "response", 8 }, { "tools", 5 }, { "message", 7 }, { "call", 4 }, { "argument", 8 },
};
static const struct k3_literal argument_open = { "argument key=\"", 14 };
static const struct k3_literal type_word[] = {
#define TYPE(name) { "\" type=\"" name "\"", sizeof("\" type=\"" name "\"") - 1 }
    TYPE("array"), TYPE("boolean"), TYPE("null"), TYPE("number"), TYPE("object"), TYPE("string"),
#undef TYPE
};

static const struct move { uint8_t from, marker, part[3], to; } moves[] = {
    { P_THINK, C_CLOSE, { T_THINK, T_NONE, T_NONE }, P_BETWEEN },
    { P_BETWEEN, C_OPEN, { T_RESPONSE, T_NONE, T_NONE }, P_RESPONSE },
    { P_RESPONSE, C_CLOSE, { T_RESPONSE, T_NONE, T_NONE }, P_AFTER },
    { P_AFTER, C_OPEN, { T_TOOLS, T_NONE, T_NONE }, P_TOOLS },
    { P_AFTER, C_CLOSE, { T_MESSAGE, T_NONE, T_NONE }, P_ENDED },
    { P_TOOLS, C_OPEN, { T_CALL_OPEN, T_INDEX, T_NONE }, P_CALL },
    { P_TOOLS, C_CLOSE, { T_TOOLS, T_NONE, T_NONE }, P_AFTER_TOOLS },
    { P_CALL, C_OPEN, { T_ARGUMENT, T_KEY, T_TYPE }, P_VALUE },
    { P_CALL, C_CLOSE, { T_CALL, T_NONE, T_NONE }, P_TOOLS },
    { P_VALUE, C_CLOSE, { T_ARGUMENT, T_NONE, T_NONE }, P_CALL },
    { P_AFTER_TOOLS, C_CLOSE, { T_MESSAGE, T_NONE, T_NONE }, P_ENDED },
};

/* How far a tag has been read: literals first to last of its part agree with pos bytes. */
struct tag { const struct move *move; uint8_t n_parts; uint32_t first, last, pos; };

struct k3_constraint {
    const struct k3_vocab *v;
    uint32_t n_vocab;
    uint32_t control[N_CONTROLS];
    struct k3_grammar *g;       /* NULL: the response is free */
    struct k3_machine *m;
    struct k3_literal *tool;    /* `call tool="NAME" index="`, sorted */
    char *tool_text;
    uint32_t n_tools;
    size_t tool_bytes;
    bool must_call, one_call;

    enum phase phase;
    struct tag tag;             /* move NULL: not in a tag */
    struct k3_literal index;    /* of the call that may be opened: digits and a quote */
    char index_text[16];
    uint32_t n_calls;
    bool begun;                 /* the response has text */
};

/* ---- tags ---- */

static const struct k3_literal *literals(const struct k3_constraint *c, const struct move *move, uint8_t part, uint32_t *n)
{
    uint8_t kind = move->part[part];

    *n = 1;
    if (kind == T_CALL_OPEN) {
        *n = c->n_tools;
        return c->tool;
    }
    if (kind == T_INDEX)
        return &c->index;
    if (kind == T_TYPE) {
        *n = sizeof(type_word) / sizeof(type_word[0]);
        return type_word;
    }
    return kind == T_ARGUMENT && move->marker == C_OPEN ? &argument_open : &word[kind];
}

static bool tag_whole(const struct tag *t)
{
    return t->n_parts == 3 || t->move->part[t->n_parts] == T_NONE;
}

static void tag_part(const struct k3_constraint *c, struct tag *t)
{
    uint32_t n;

    t->first = t->pos = 0;
    if (tag_whole(t) || t->move->part[t->n_parts] == T_KEY)
        return;
    literals(c, t->move, t->n_parts, &n);
    t->last = n - 1;
}

static bool tag_step(const struct k3_constraint *c, struct tag *t, uint8_t byte)
{
    const struct k3_literal *l;
    uint32_t n;

    if (tag_whole(t))
        return false;
    if (t->move->part[t->n_parts] == T_KEY && byte != '"')
        return byte >= 0x20 && t->pos++ < KEY_BYTES_MAX;
    if (t->move->part[t->n_parts] == T_KEY) {
        if (t->pos == 0)
            return false;
        t->n_parts++;
        tag_part(c, t);
    }
    l = literals(c, t->move, t->n_parts, &n);
    while (t->first < t->last && (uint8_t)l[t->first].bytes[t->pos] < byte) /* none ends before another that begins like it */
        t->first++;
    while (t->last > t->first && (uint8_t)l[t->last].bytes[t->pos] > byte)
        t->last--;
    if ((uint8_t)l[t->first].bytes[t->pos] != byte)
        return false;
    if (++t->pos == l[t->first].len_bytes) {
        t->n_parts++;
        tag_part(c, t);
    }
    return true;
}

struct tags { const struct k3_constraint *c; struct tag *behind; };

static bool tag_level(void *arg, uint32_t level, uint8_t byte)
{
    struct tags *t = arg;

    t->behind[level + 1] = t->behind[level];
    return tag_step(t->c, &t->behind[level + 1], byte);
}

static int tag_mask(const struct k3_constraint *c, uint64_t *allowed)
{
    struct tags t = { c, malloc((c->v->longest_bytes + (size_t)2) * sizeof(*t.behind)) };

    if (!t.behind)
        return -ENOMEM;
    t.behind[0] = c->tag;
    k3_vocab_walk(c->v, tag_level, &t, allowed);
    free(t.behind);
    return 0;
}

/* ---- phases ---- */

static bool response_whole(const struct k3_constraint *c)
{
    return !c->m || k3_machine_complete(c->m);
}

static bool may_move(const struct k3_constraint *c, const struct move *move)
{
    if (move->from != c->phase)
        return false;
    if (move->from == P_RESPONSE)
        return response_whole(c) || (!c->begun && c->n_tools);
    if (move->from == P_AFTER && move->marker == C_OPEN)
        return c->n_tools > 0;
    if (move->from == P_AFTER) /* AFTER has no calls behind it */
        return !c->must_call && response_whole(c);
    if (move->from == P_TOOLS && move->marker == C_OPEN)
        return !(c->one_call && c->n_calls);
    return move->from != P_TOOLS || c->n_calls;
}

static const struct move *move_by(const struct k3_constraint *c, enum control marker)
{
    for (size_t i = 0; i < sizeof(moves) / sizeof(moves[0]); i++)
        if (moves[i].marker == marker && may_move(c, &moves[i]))
            return &moves[i];
    return NULL;
}

static bool free_text(const struct k3_constraint *c)
{
    return c->phase == P_THINK || c->phase == P_VALUE || (c->phase == P_RESPONSE && !c->m);
}

int k3_constraint_mask(const struct k3_constraint *c, struct k3_walk *w, uint64_t *allowed)
{
    memset(allowed, 0, (c->n_vocab + 63ull) / 64 * sizeof(*allowed));
    if (c->tag.move && !tag_whole(&c->tag))
        return tag_mask(c, allowed);
    if (c->tag.move) {
        k3_bit_set(allowed, c->control[C_SEP]);
        return 0;
    }
    if (c->phase == P_ENDED) {
        k3_bit_set(allowed, c->control[C_END_OF_MSG]);
        k3_bit_set(allowed, c->control[C_EOS]);
    }
    for (int marker = C_OPEN; marker <= C_CLOSE; marker++)
        if (move_by(c, (enum control)marker))
            k3_bit_set(allowed, c->control[marker]);
    if (free_text(c))
        for (uint32_t id = 0; id < c->v->n; id++)
            k3_bit_set(allowed, id);
    return c->phase == P_RESPONSE && c->m ? k3_machine_mask(c->m, w, c->v, allowed) : 0;
}

static int take_text(struct k3_constraint *c, struct k3_walk *w, uint32_t id)
{
    struct tag t = c->tag;
    size_t len_bytes;
    const char *bytes = k3_vocab_token(c->v, id, &len_bytes);
    int rc = free_text(c);

    if (t.move) {
        for (size_t i = 0; i < len_bytes; i++)
            if (!tag_step(c, &t, (uint8_t)bytes[i]))
                return 0;
        c->tag = t;
        return 1;
    }
    if (c->phase == P_RESPONSE && c->m)
        rc = k3_machine_feed(c->m, w, bytes, len_bytes);
    c->begun |= rc > 0 && c->phase == P_RESPONSE;
    return rc;
}

static void arrive(struct k3_constraint *c)
{
    const struct move *move = c->tag.move;

    c->tag.move = NULL;
    c->n_calls += move->from == P_CALL && move->to == P_TOOLS;
    c->phase = move->to;
    c->index = (struct k3_literal){ c->index_text, (uint32_t)snprintf(c->index_text, sizeof(c->index_text), "%u\"", c->n_calls + 1) };
}

int k3_constraint_take(struct k3_constraint *c, struct k3_walk *w, uint32_t id)
{
    if (id < c->v->n)
        return take_text(c, w, id);
    if (c->tag.move) {
        if (id != c->control[C_SEP] || !tag_whole(&c->tag))
            return 0;
        arrive(c);
        return 1;
    }
    if (c->phase == P_ENDED && (id == c->control[C_END_OF_MSG] || id == c->control[C_EOS])) {
        c->phase = P_OVER;
        return 1;
    }
    for (int marker = C_OPEN; marker <= C_CLOSE; marker++)
        if (id == c->control[marker] && (c->tag.move = move_by(c, (enum control)marker))) {
            c->tag.n_parts = 0;
            tag_part(c, &c->tag);
            return 1;
        }
    return 0;
}

/* ---- reading ---- */

static int get_string(const cJSON *spec, const char *name, const char **out, struct k3_err *err)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(spec, name);

    *out = cJSON_GetStringValue(v);
    return !v || *out ? 0 : k3_refuse(err, -EINVAL, "constraint: %s is not a string", name);
}

static int get_bool(const cJSON *spec, const char *name, bool *out, struct k3_err *err)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(spec, name);

    *out = cJSON_IsTrue(v);
    return !v || cJSON_IsBool(v) ? 0 : k3_refuse(err, -EINVAL, "constraint: %s is neither true nor false", name);
}

static int get_controls(struct k3_constraint *c, const cJSON *spec, uint32_t n_text, uint32_t n_vocab, struct k3_err *err)
{
    const cJSON *o = cJSON_GetObjectItemCaseSensitive(spec, "control");

    for (int i = 0; i < N_CONTROLS; i++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, control_name[i]);

        if (!cJSON_IsNumber(v) || !(v->valuedouble >= n_text && v->valuedouble < n_vocab) || v->valuedouble != floor(v->valuedouble))
            return k3_refuse(err, -EINVAL, "constraint: control.%s must be an id from %u to %u", control_name[i], n_text, n_vocab - 1);
        c->control[i] = (uint32_t)v->valuedouble;
        for (int k = 0; k < i; k++)
            if (c->control[k] == c->control[i])
                return k3_refuse(err, -EINVAL, "constraint: control.%s and control.%s are the same id", control_name[k], control_name[i]);
    }
    return 0;
}

static int get_format(struct k3_constraint *c, const cJSON *spec, struct k3_err *err)
{
    const char *format = NULL, *schema = NULL;
    int rc = get_string(spec, "format", &format, err);

    if (rc == 0)
        rc = get_string(spec, "schema", &schema, err);
    if (rc < 0 || (!format && !schema))
        return rc;
    if (!format || (strcmp(format, "json_object") && strcmp(format, "json_schema")) || (strcmp(format, "json_schema") == 0) != (schema != NULL))
        return k3_refuse(err, -EINVAL, "constraint: format must be json_object, or json_schema beside a schema");
    rc = schema ? k3_grammar_schema(&c->g, schema, strlen(schema), err) : k3_grammar_object(&c->g, err);
    return rc < 0 ? rc : k3_machine_new(&c->m, c->g, err);
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(((const struct k3_literal *)a)->bytes, ((const struct k3_literal *)b)->bytes);
}

/* What opens a call of each tool, with the name as an attribute has it; all of them in c->tool_text. */
static void write_tools(struct k3_constraint *c, const cJSON *names)
{
    char *p = c->tool_text;
    const cJSON *name;
    uint32_t n = 0;

    cJSON_ArrayForEach(name, names) {
        const char *from = p;

        p = stpcpy(p, "call tool=\"");
        for (const char *s = name->valuestring; *s; s++)
            p = *s == '&' ? stpcpy(p, "&amp;") : *s == '"' ? stpcpy(p, "&quot;") : (*p = *s, p + 1);
        p = stpcpy(p, "\" index=\"");
        c->tool[c->n_tools++] = (struct k3_literal){ from, (uint32_t)(p - from) };
        p++;
    }
    qsort(c->tool, c->n_tools, sizeof(*c->tool), by_bytes);
    for (uint32_t i = 0; i < c->n_tools; i++)
        if (n == 0 || by_bytes(&c->tool[n - 1], &c->tool[i]) != 0)
            c->tool[n++] = c->tool[i];
    c->n_tools = n;
}

static int get_tools(struct k3_constraint *c, const cJSON *spec, struct k3_err *err)
{
    const cJSON *names = cJSON_GetObjectItemCaseSensitive(spec, "tools"), *name;
    size_t n = 0;

    if (names && (!cJSON_IsArray(names) || cJSON_GetArraySize(names) > (int)TOOLS_MAX))
        return k3_refuse(err, -EINVAL, "constraint: tools must be an array of at most %u names", TOOLS_MAX);
    cJSON_ArrayForEach(name, names) {
        if (!cJSON_IsString(name) || !*name->valuestring || strlen(name->valuestring) > NAME_BYTES_MAX)
            return k3_refuse(err, -EINVAL, "constraint: tools[%zu] must be a name of 1 to %u bytes", n, NAME_BYTES_MAX);
        c->tool_bytes += 6 * strlen(name->valuestring) + 32;
        n++;
    }
    if (n == 0)
        return c->must_call ? k3_refuse(err, -EINVAL, "constraint: must_call without tools") : 0;
    c->tool = calloc(n, sizeof(*c->tool));
    c->tool_text = malloc(c->tool_bytes);
    c->tool_bytes += n * sizeof(*c->tool);
    if (!c->tool || !c->tool_text)
        return k3_fail(err, -ENOMEM, "no memory for a constraint");
    write_tools(c, names);
    return 0;
}

static int get_start(struct k3_constraint *c, const cJSON *spec, struct k3_err *err)
{
    const char *start = NULL;
    int rc = get_string(spec, "start", &start, err);

    if (rc < 0)
        return rc;
    if (!start || (strcmp(start, "think") && strcmp(start, "response")))
        return k3_refuse(err, -EINVAL, "constraint: start must be think or response");
    c->phase = strcmp(start, "think") == 0 ? P_THINK : P_RESPONSE;
    return 0;
}

static int only_known(const cJSON *spec, struct k3_err *err)
{
    static const char *const known[] = { "start", "control", "format", "schema", "tools", "must_call", "one_call" };
    const cJSON *v;

    if (!cJSON_IsObject(spec))
        return k3_refuse(err, -EINVAL, "constraint is not an object");
    cJSON_ArrayForEach(v, spec) {
        size_t i = 0;

        while (i < sizeof(known) / sizeof(known[0]) && strcmp(v->string, known[i]))
            i++;
        if (i == sizeof(known) / sizeof(known[0]))
            return k3_refuse(err, -EINVAL, "constraint: %.40s is not known", v->string);
    }
    return 0;
}

int k3_constraint_new(struct k3_constraint **out, const cJSON *spec, const struct k3_vocab *v, uint32_t n_vocab, struct k3_err *err)
{
    struct k3_constraint *c = calloc(1, sizeof(*c));
    int rc = c ? only_known(spec, err) : k3_fail(err, -ENOMEM, "no memory for a constraint");

    if (rc == 0) {
        c->v = v;
        c->n_vocab = n_vocab;
        rc = get_controls(c, spec, v->n, n_vocab, err);
    }
    if (rc == 0)
        rc = get_start(c, spec, err);
    if (rc == 0)
        rc = get_bool(spec, "must_call", &c->must_call, err);
    if (rc == 0)
        rc = get_bool(spec, "one_call", &c->one_call, err);
    if (rc == 0)
        rc = get_tools(c, spec, err);
    if (rc == 0)
        rc = get_format(c, spec, err);
    if (rc < 0) {
        k3_constraint_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void k3_constraint_free(struct k3_constraint *c)
{
    if (!c)
        return;
    k3_machine_free(c->m);
    k3_grammar_free(c->g);
    free(c->tool);
    free(c->tool_text);
    free(c);
}

uint64_t k3_constraint_bytes(const struct k3_constraint *c)
{
    return sizeof(*c) + c->tool_bytes + (c->g ? k3_grammar_bytes(c->g) + K3_MACHINE_STATE_BYTES : 0);
}
