/* constrain/grammar.h: a set of JSON values as a graph of nodes, and the compiler that makes one from a JSON Schema.
 *
 * A node is a set of values; nodes name each other by index, so that recursion ($ref) is a cycle.  Every node knows how
 * deep its shallowest value nests (height), and a machine never begins a value that cannot be ended within
 * K3_NEST_MAX levels: whatever has been begun can be completed.
 *
 * What the values look like (narrower than JSON, so that any answer ends and any reader reads it):
 *   members     in the order of the schema's properties, further ones behind them, no key twice, keys of further members
 *               without escapes
 *   numbers     at most 18 digits, 17 behind the point, 2 in the exponent
 *   strings     valid UTF-8; no half of a surrogate pair
 *   enum, const without white space inside
 *   white space one space, or a line end and at most four spaces or tabs for each array and object that is open: behind an opening
 *               bracket or a comma and before a closing bracket; one space behind a colon.  Nowhere else */
#ifndef K3_CONSTRAIN_GRAMMAR_H
#define K3_CONSTRAIN_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_NEST_MAX 64u             /* arrays and objects inside one another */
#define K3_SCHEMA_BYTES_MAX (1u << 20)
#define K3_SCHEMA_NODES_MAX 20000u
#define K3_SCHEMA_LISTED_MAX 100000u /* enum values, properties, alternatives: of all nodes together */
#define K3_NO_NODE UINT32_MAX
#define K3_NO_VALUE 255u            /* height of a node without a value */

enum k3_node_kind {
    K3_NODE_UNION, K3_NODE_STRING, K3_NODE_NUMBER, K3_NODE_INTEGER, K3_NODE_LITERALS, K3_NODE_ARRAY, K3_NODE_OBJECT
};

/* A byte string that is a value, or a key with its quotes. */
struct k3_literal { const char *bytes; uint32_t len_bytes; };

struct k3_property {
    struct k3_literal key;
    uint64_t hash;     /* of the key's characters, as k3_key_hash has it */
    uint32_t node;
    uint32_t stop;     /* the first required property from this one on, or the number of properties */
    bool required;
};

/*              first, n                                        min, max     rest
 *   UNION      edge[]: alternatives, none of them a UNION
 *   STRING                                                     code points
 *   LITERALS   literal[]: sorted by bytes
 *   ARRAY      edge[]: the first items                         items        the items behind them, or K3_NO_NODE
 *   OBJECT     property[]: in order; key_order[]: by key                    further members, or K3_NO_NODE */
struct k3_node {
    uint8_t kind, height;
    uint32_t first, n, min, max, rest;
};

struct k3_grammar {
    struct k3_node *node;
    struct k3_literal *literal;
    struct k3_property *property;
    uint32_t *key_order; /* of each OBJECT: indices below n, sorted by key; beside property */
    uint32_t *edge;
    uint32_t n_nodes, n_literals, n_properties, n_edges, root;
    size_t cap_nodes, cap_literals, cap_properties, cap_edges;
    char **text;         /* what literals point into */
    size_t n_texts, cap_texts, text_bytes;
};

/* Any JSON object. */
int k3_grammar_object(struct k3_grammar **out, struct k3_err *err);
/* schema: JSON, borrowed.  -EINVAL (exit 2): a keyword that is not supported, with its name, place and the list of those that are;
 * values that no schema has there; a schema without values; more than the limits above.  -ENOMEM.  On success *out is the
 * caller's. */
int k3_grammar_schema(struct k3_grammar **out, const char *schema, size_t len_bytes, struct k3_err *err);
void k3_grammar_free(struct k3_grammar *g); /* accepts NULL */
size_t k3_grammar_bytes(const struct k3_grammar *g);

#define K3_KEY_HASH 14695981039346656037ull /* of the empty key */
static inline uint64_t k3_key_hash(uint64_t h, uint8_t byte)
{
    h = (h ^ byte) * 1099511628211ull;
    return h ^ h >> 29;
}

/* grammar.c, for schema.c: all return a negative errno when there is no memory or a limit is passed. */
int k3_grammar_new(struct k3_grammar **out, struct k3_err *err);
int k3_grammar_node(struct k3_grammar *g, struct k3_node node, uint32_t *out, struct k3_err *err);
int k3_grammar_edge(struct k3_grammar *g, uint32_t node, struct k3_err *err);
int k3_grammar_literal(struct k3_grammar *g, struct k3_literal l, struct k3_err *err);
int k3_grammar_property(struct k3_grammar *g, struct k3_property p, struct k3_err *err);
/* Takes text over, also on failure. */
int k3_grammar_own(struct k3_grammar *g, char *text, size_t len_bytes, struct k3_err *err);
/* Sorts, flattens unions, finds heights.  -EINVAL when the root has no value. */
int k3_grammar_finish(struct k3_grammar *g, struct k3_err *err);

/* Nodes that every grammar begins with. */
enum { K3_ANY_VALUE, K3_ANY_STRING, K3_ANY_NUMBER, K3_ANY_WORD, K3_ANY_ARRAY, K3_ANY_OBJECT, K3_N_ANY };

#endif
