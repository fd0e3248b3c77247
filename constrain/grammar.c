#include "constrain/grammar.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int no_memory(struct k3_err *err)
{
    return k3_fail(err, -ENOMEM, "no memory for a JSON Schema");
}

static int too_many(uint32_t n, uint32_t most, const char *what, struct k3_err *err)
{
    return n < most ? 0 : k3_refuse(err, -E2BIG, "more than %u %s in all", most, what);
}

/* Makes room for one more of size_bytes. */
static int room(void **array, size_t n, size_t *cap, size_t size_bytes)
{
    size_t more = *cap ? 2 * *cap : 16;
    void *p;

    if (n < *cap)
        return 0;
    p = reallocarray(*array, more, size_bytes);
    if (!p)
        return -ENOMEM;
    *array = p;
    *cap = more;
    return 0;
}

int k3_grammar_node(struct k3_grammar *g, struct k3_node node, uint32_t *out, struct k3_err *err)
{
    int rc = too_many(g->n_nodes, K3_SCHEMA_NODES_MAX, "schemas", err);

    if (rc < 0)
        return rc;
    if (room((void **)&g->node, g->n_nodes, &g->cap_nodes, sizeof(*g->node)) < 0)
        return no_memory(err);
    *out = g->n_nodes;
    g->node[g->n_nodes++] = node;
    return 0;
}

int k3_grammar_edge(struct k3_grammar *g, uint32_t node, struct k3_err *err)
{
    int rc = too_many(g->n_edges, K3_SCHEMA_LISTED_MAX, "alternatives and items", err);

    if (rc < 0)
        return rc;
    if (room((void **)&g->edge, g->n_edges, &g->cap_edges, sizeof(*g->edge)) < 0)
        return no_memory(err);
    g->edge[g->n_edges++] = node;
    return 0;
}

int k3_grammar_literal(struct k3_grammar *g, struct k3_literal l, struct k3_err *err)
{
    int rc = too_many(g->n_literals, K3_SCHEMA_LISTED_MAX, "values of enum and const", err);

    if (rc < 0)
        return rc;
    if (room((void **)&g->literal, g->n_literals, &g->cap_literals, sizeof(*g->literal)) < 0)
        return no_memory(err);
    g->literal[g->n_literals++] = l;
    return 0;
}

int k3_grammar_property(struct k3_grammar *g, struct k3_property p, struct k3_err *err)
{
    int rc = too_many(g->n_properties, K3_SCHEMA_LISTED_MAX, "properties", err);

    if (rc < 0)
        return rc;
    if (room((void **)&g->property, g->n_properties, &g->cap_properties, sizeof(*g->property)) < 0)
        return no_memory(err);
    g->property[g->n_properties++] = p;
    return 0;
}

int k3_grammar_own(struct k3_grammar *g, char *text, size_t len_bytes, struct k3_err *err)
{
    if (room((void **)&g->text, g->n_texts, &g->cap_texts, sizeof(*g->text)) < 0) {
        free(text);
        return no_memory(err);
    }
    g->text[g->n_texts++] = text;
    g->text_bytes += len_bytes;
    return 0;
}

void k3_grammar_free(struct k3_grammar *g)
{
    if (!g)
        return;
    for (size_t i = 0; i < g->n_texts; i++)
        free(g->text[i]);
    free(g->text);
    free(g->node);
    free(g->literal);
    free(g->property);
    free(g->key_order);
    free(g->edge);
    free(g);
}

size_t k3_grammar_bytes(const struct k3_grammar *g)
{
    return sizeof(*g) + g->cap_nodes * sizeof(*g->node) + g->cap_literals * sizeof(*g->literal) +
           g->cap_properties * sizeof(*g->property) + g->n_properties * sizeof(*g->key_order) +
           g->cap_edges * sizeof(*g->edge) + g->cap_texts * sizeof(*g->text) + g->text_bytes;
}

int k3_grammar_new(struct k3_grammar **out, struct k3_err *err)
{
    static const struct k3_literal words[] = { { "false", 5 }, { "null", 4 }, { "true", 4 } };
    static const struct k3_node any[K3_N_ANY] = {
        [K3_ANY_VALUE] = { .kind = K3_NODE_UNION, .n = K3_N_ANY - 1 },
        [K3_ANY_STRING] = { .kind = K3_NODE_STRING, .max = UINT32_MAX },
        [K3_ANY_NUMBER] = { .kind = K3_NODE_NUMBER },
        [K3_ANY_WORD] = { .kind = K3_NODE_LITERALS, .n = 3 },
        [K3_ANY_ARRAY] = { .kind = K3_NODE_ARRAY, .max = UINT32_MAX, .rest = K3_ANY_VALUE },
        [K3_ANY_OBJECT] = { .kind = K3_NODE_OBJECT, .rest = K3_ANY_VALUE },
    };
    struct k3_grammar *g = calloc(1, sizeof(*g));
    uint32_t unused;
    int rc = g ? 0 : no_memory(err);

    for (uint32_t i = 0; i < K3_N_ANY && rc == 0; i++)
        rc = k3_grammar_node(g, any[i], &unused, err);
    for (uint32_t i = K3_ANY_STRING; i < K3_N_ANY && rc == 0; i++)
        rc = k3_grammar_edge(g, i, err);
    for (uint32_t i = 0; i < 3 && rc == 0; i++)
        rc = k3_grammar_literal(g, words[i], err);
    if (rc < 0) {
        k3_grammar_free(g);
        return rc;
    }
    *out = g;
    return 0;
}

int k3_grammar_object(struct k3_grammar **out, struct k3_err *err)
{
    struct k3_grammar *g = NULL;
    int rc = k3_grammar_new(&g, err);

    if (rc < 0)
        return rc;
    g->root = K3_ANY_OBJECT;
    rc = k3_grammar_finish(g, err);
    if (rc == 0)
        *out = g;
    else
        k3_grammar_free(g);
    return rc;
}

/* ---- finish ---- */

static int by_bytes(const void *a, const void *b)
{
    const struct k3_literal *x = a, *y = b;
    uint32_t n = x->len_bytes < y->len_bytes ? x->len_bytes : y->len_bytes;
    int d = memcmp(x->bytes, y->bytes, n);

    return d ? d : (x->len_bytes > y->len_bytes) - (x->len_bytes < y->len_bytes);
}

static int by_key(const void *a, const void *b, void *property)
{
    const struct k3_property *p = property;

    return by_bytes(&p[*(const uint32_t *)a].key, &p[*(const uint32_t *)b].key);
}

static void sort_literals(struct k3_grammar *g, struct k3_node *node)
{
    struct k3_literal *l = g->literal + node->first;
    uint32_t n = 0;

    qsort(l, node->n, sizeof(*l), by_bytes);
    for (uint32_t i = 0; i < node->n; i++)
        if (n == 0 || by_bytes(&l[n - 1], &l[i]) != 0)
            l[n++] = l[i];
    node->n = n;
}

static void order_properties(struct k3_grammar *g, const struct k3_node *node)
{
    struct k3_property *p = g->property + node->first;
    uint32_t *order = g->key_order + node->first, stop = node->n;

    for (uint32_t i = node->n; i-- > 0;) {
        if (p[i].required)
            stop = i;
        p[i].stop = stop;
        order[i] = i;
    }
    qsort_r(order, node->n, sizeof(*order), by_key, p);
}

/* Replaces the alternatives of a union by those of the unions among them, each once.  seen, todo: [n_nodes]. */
static int flatten(struct k3_grammar *g, uint32_t u, uint32_t *seen, uint32_t *todo, struct k3_err *err)
{
    uint32_t n_todo = 0, first = g->n_edges, id;
    int rc = 0;

    todo[n_todo++] = u;
    seen[u] = u;
    while (n_todo && rc == 0) {
        const struct k3_node *at = &g->node[todo[--n_todo]];

        if (at->kind != K3_NODE_UNION) {
            rc = k3_grammar_edge(g, todo[n_todo], err);
            continue;
        }
        for (uint32_t i = at->n; i-- > 0;) { /* the first comes out first */
            id = g->edge[at->first + i];
            if (seen[id] != u) {
                seen[id] = u;
                todo[n_todo++] = id;
            }
        }
    }
    if (rc == 0) {
        g->node[u].height = 0; /* marks it as done; heights come later */
        g->node[u].max = first;
        g->node[u].min = g->n_edges - first;
    }
    return rc;
}

static int flatten_all(struct k3_grammar *g, struct k3_err *err)
{
    uint32_t *seen = malloc(g->n_nodes * sizeof(*seen)), *todo = malloc(g->n_nodes * sizeof(*todo));
    int rc = seen && todo ? 0 : no_memory(err);

    if (rc == 0)
        memset(seen, 0xff, g->n_nodes * sizeof(*seen));
    for (uint32_t i = 0; i < g->n_nodes && rc == 0; i++)
        if (g->node[i].kind == K3_NODE_UNION)
            rc = flatten(g, i, seen, todo, err);
    for (uint32_t i = 0; i < g->n_nodes && rc == 0; i++) /* not before all are flat: the old edges were still needed */
        if (g->node[i].kind == K3_NODE_UNION) {
            g->node[i].first = g->node[i].max;
            g->node[i].n = g->node[i].min;
        }
    free(seen);
    free(todo);
    return rc;
}

static uint8_t higher(uint8_t a, uint8_t b)
{
    return a > b ? a : b;
}

static uint8_t height_of(const struct k3_grammar *g, const struct k3_node *n)
{
    uint8_t h = 0;

    switch (n->kind) {
    case K3_NODE_UNION:
        h = K3_NO_VALUE;
        for (uint32_t i = 0; i < n->n; i++)
            if (g->node[g->edge[n->first + i]].height < h)
                h = g->node[g->edge[n->first + i]].height;
        return h;
    case K3_NODE_STRING:
        return n->min > n->max ? K3_NO_VALUE : 0;
    case K3_NODE_LITERALS:
        return n->n ? 0 : K3_NO_VALUE;
    case K3_NODE_ARRAY:
        if (n->min > n->max)
            return K3_NO_VALUE;
        for (uint32_t i = 0; i < n->n && i < n->min; i++)
            h = higher(h, g->node[g->edge[n->first + i]].height);
        if (n->min > n->n)
            h = n->rest == K3_NO_NODE ? K3_NO_VALUE : higher(h, g->node[n->rest].height);
        break;
    case K3_NODE_OBJECT:
        for (uint32_t i = 0; i < n->n; i++)
            if (g->property[n->first + i].required)
                h = higher(h, g->node[g->property[n->first + i].node].height);
        break;
    default:
        return 0;
    }
    return h >= K3_NEST_MAX ? K3_NO_VALUE : (uint8_t)(h + 1);
}

/* Round k finds the heights up to k; what has none after the last round has no value. */
static void find_heights(struct k3_grammar *g)
{
    bool changed = true;

    for (uint32_t i = 0; i < g->n_nodes; i++)
        g->node[i].height = K3_NO_VALUE;
    while (changed) {
        changed = false;
        for (uint32_t i = 0; i < g->n_nodes; i++) {
            uint8_t h = height_of(g, &g->node[i]);

            changed |= h != g->node[i].height;
            g->node[i].height = h;
        }
    }
}

int k3_grammar_finish(struct k3_grammar *g, struct k3_err *err)
{
    int rc;

    g->key_order = malloc((g->n_properties + (size_t)1) * sizeof(*g->key_order));
    if (!g->key_order)
        return no_memory(err);
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        if (g->node[i].kind == K3_NODE_LITERALS)
            sort_literals(g, &g->node[i]);
        if (g->node[i].kind == K3_NODE_OBJECT)
            order_properties(g, &g->node[i]);
    }
    rc = flatten_all(g, err);
    if (rc < 0)
        return rc;
    find_heights(g);
    if (g->node[g->root].height == K3_NO_VALUE)
        return k3_refuse(err, -EINVAL, "no JSON value matches the schema (with at most %u arrays and objects inside one another)",
                         K3_NEST_MAX);
    return 0;
}
