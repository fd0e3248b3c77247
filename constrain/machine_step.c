#include "constrain/machine_private.h"

#include <errno.h>
#include <string.h>

#define INDENT_MAX 200u
#define INTEGER_DIGITS_MAX 18u
#define FRACTION_DIGITS_MAX 17u
#define EXPONENT_DIGITS_MAX 2u

/* ---- what may come ---- */

static unsigned depth_of(const struct frame *f)
{
    return f ? f->depth : 0;
}

/* A value of node can be begun inside f and brought to its end. */
static bool fits(const struct k3_grammar *g, uint32_t node, const struct frame *f)
{
    return g->node[node].height + depth_of(f) <= K3_NEST_MAX;
}

/* The node of item number i, or K3_NO_NODE. */
static uint32_t item_node(const struct k3_grammar *g, const struct frame *f, uint32_t i)
{
    const struct k3_node *n = &g->node[f->node];
    uint32_t item = i < n->n ? g->edge[n->first + i] : n->rest;

    return i < n->max && item != K3_NO_NODE && fits(g, item, f) ? item : K3_NO_NODE;
}

/* The first required property that has not come, or the number of properties. */
static uint32_t stop_of(const struct k3_grammar *g, const struct frame *f)
{
    const struct k3_node *n = &g->node[f->node];

    return f->n < n->n ? g->property[n->first + f->n].stop : n->n;
}

static bool may_come(const struct k3_grammar *g, const struct frame *f, uint32_t property)
{
    const struct k3_node *n = &g->node[f->node];
    uint32_t stop = stop_of(g, f);

    return property >= f->n && property < n->n && property <= stop && fits(g, g->property[n->first + property].node, f);
}

static bool declared_may_come(const struct k3_grammar *g, const struct frame *f)
{
    uint32_t n = g->node[f->node].n, stop = stop_of(g, f);

    for (uint32_t i = f->n; i < n && i <= stop; i++)
        if (may_come(g, f, i))
            return true;
    return false;
}

static bool free_may_come(const struct k3_grammar *g, const struct frame *f)
{
    const struct k3_node *n = &g->node[f->node];

    return n->rest != K3_NO_NODE && stop_of(g, f) == n->n && f->n_keys < K3_FREE_KEYS_MAX && fits(g, n->rest, f);
}

static bool free_key_is_new(const struct k3_grammar *g, const struct frame *f, uint64_t hash)
{
    const struct k3_node *n = &g->node[f->node];

    for (const struct key *k = f->keys; k; k = k->next)
        if (k->hash == hash)
            return false;
    for (uint32_t i = 0; i < n->n; i++)
        if (g->property[n->first + i].hash == hash)
            return false;
    return true;
}

/* ---- steps ---- */

/* A copy of f; the caller changes it before anybody looks. */
static struct frame *frame(struct k3_walk *w, const struct frame *f)
{
    struct frame *p = k3_arena_take(&w->arena, sizeof(*p));

    if (p)
        *p = *f;
    else
        w->rc = -ENOMEM;
    return p;
}

/* White space where it is allowed: t stays where it is.  True: byte is white space. */
static bool white(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    unsigned indent = 4 * depth_of(t->top) < INDENT_MAX ? 4 * depth_of(t->top) : INDENT_MAX;
    struct thread next = *t;

    if (byte != ' ' && byte != '\t' && byte != '\n')
        return false;
    if (t->n_ws == 0 && byte != '\t')
        next.n_ws = byte == ' ' ? 1 : 2;
    else if (t->n_ws >= 2 && byte != '\n' && t->n_ws < 2 + indent)
        next.n_ws++;
    else
        return true;
    k3_walk_put(w, &next);
    return true;
}

/* A value inside f is done. */
static void done(struct k3_walk *w, const struct frame *f)
{
    struct thread t = { .mode = f ? M_AFTER : M_DONE, .top = f };

    if (f && w->g->node[f->node].kind == K3_NODE_ARRAY) {
        struct frame *p = frame(w, f);

        if (!p)
            return;
        p->n++;
        t.top = p;
    }
    k3_walk_put(w, &t);
}

/* The literals of one list: l[i], or the keys of p in that order. */
struct list { const struct k3_literal *l; const struct k3_property *p; const uint32_t *order; };

/* The byte at pos of literal i; -1: it ends before.  Literals of a range that is sorted and alike up to pos are sorted by it. */
static int byte_at(const struct list *list, uint32_t i, uint32_t pos)
{
    const struct k3_literal *l = list->l ? &list->l[i] : &list->p[list->order[i]].key;

    return l->len_bytes > pos ? (uint8_t)l->bytes[pos] : -1;
}

/* The first of [a, b) whose byte is not below least. */
static uint32_t first_from(const struct list *list, uint32_t a, uint32_t b, uint32_t pos, int least)
{
    while (a < b) {
        uint32_t i = a + (b - a) / 2;

        if (byte_at(list, i, pos) < least)
            a = i + 1;
        else
            b = i;
    }
    return a;
}

/* The literals of t that have this byte next stay in its range; false: none. */
static bool narrow(const struct list *list, struct thread *t, uint8_t byte)
{
    uint32_t from = first_from(list, t->a, t->b, t->pos, byte);

    t->b = first_from(list, from, t->b, t->pos, byte + 1);
    t->a = from;
    t->pos++;
    return t->a < t->b;
}

static bool literal_whole(const struct k3_grammar *g, const struct thread *t)
{
    return g->literal[g->node[t->node].first + t->a].len_bytes == t->pos;
}

/* The value inside f is done, and byte is what comes behind it. */
static void end_before(struct k3_walk *w, const struct frame *f, uint8_t byte)
{
    struct level *out = w->out, behind = { .first = out->first + out->n }; /* for a moment: its place is that of the next thread */
    struct thread t;

    w->out = &behind;
    done(w, f);
    w->out = out;
    if (behind.n == 0)
        return;
    t = w->thread[behind.first];
    k3_thread_step(w, &t, byte);
}

static void step_literal(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    struct list list = { .l = w->g->literal + w->g->node[t->node].first };
    struct thread next = *t;

    if (narrow(&list, &next, byte)) {
        if (literal_whole(w->g, &next) && next.b == next.a + 1)
            done(w, t->top);
        else
            k3_walk_put(w, &next);
    } else if (t->pos && literal_whole(w->g, t)) { /* a number; others go on with more digits */
        end_before(w, t->top, byte);
    }
}

static void begin(struct k3_walk *w, const struct frame *top, uint32_t node, uint8_t byte)
{
    const struct k3_node *n = &w->g->node[node];
    struct thread t = { .top = top, .node = node };

    if (!fits(w->g, node, top))
        return;
    if (n->kind == K3_NODE_UNION) {
        for (uint32_t i = 0; i < n->n; i++)
            begin(w, top, w->g->edge[n->first + i], byte);
    } else if (n->kind == K3_NODE_STRING && byte == '"') {
        t.mode = M_STRING;
        k3_walk_put(w, &t);
    } else if (n->kind == K3_NODE_LITERALS) {
        t.mode = M_LITERAL;
        t.b = n->n;
        step_literal(w, &t, byte);
    } else if (n->kind == K3_NODE_NUMBER || n->kind == K3_NODE_INTEGER) {
        t.mode = M_NUMBER;
        t.at = byte == '-' ? N_MINUS : byte == '0' ? N_ZERO : N_DIGITS;
        t.a = 1;
        if (byte == '-' || (byte >= '0' && byte <= '9'))
            k3_walk_put(w, &t);
    } else if ((n->kind == K3_NODE_ARRAY && byte == '[') || (n->kind == K3_NODE_OBJECT && byte == '{')) {
        struct frame f = { .up = top, .node = node, .depth = (uint16_t)(depth_of(top) + 1), .n_keys = top ? top->n_keys : 0 };

        t = (struct thread){ .mode = byte == '[' ? M_ARRAY_FIRST : M_OBJECT_FIRST, .top = frame(w, &f) };
        if (t.top)
            k3_walk_put(w, &t);
    }
}

static bool is_hex(uint8_t byte)
{
    return (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'f') || (byte >= 'A' && byte <= 'F');
}

/* The first byte of a character of more than one; what may follow it (RFC 3629). */
static bool lead(struct thread *t, uint8_t byte)
{
    if (byte < 0xc2 || byte > 0xf4)
        return false;
    t->at = S_MORE;
    t->left = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    t->low = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    t->high = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    return true;
}

/* Inside a character; true: still allowed. */
static bool inside(struct thread *t, uint8_t byte)
{
    uint8_t lower = byte | 0x20;

    switch (t->at) {
    case S_MORE:
        if (byte < t->low || byte > t->high)
            return false;
        t->low = 0x80;
        t->high = 0xbf;
        if (--t->left == 0)
            t->at = t->low = t->high = 0;
        return true;
    case S_ESCAPE:
        t->at = byte == 'u' ? S_HEX : S_PLAIN;
        t->left = byte == 'u' ? 4 : 0;
        return byte == 'u' || (byte && strchr("\"\\/bfnrt", byte));
    case S_HEX: /* d8..db begin a pair, dc..df must not stand alone */
        if (!is_hex(byte) || (t->left == 3 && t->low == 1 && lower >= 'c' && byte > '9'))
            return false;
        if (t->left == 4)
            t->low = lower == 'd';
        else if (t->left == 3)
            t->low = t->low == 1 && (byte >= '8') ? 2 : 0;
        if (--t->left == 0) {
            t->at = t->low == 2 ? S_LOW_ESCAPE : S_PLAIN;
            t->low = 0;
        }
        return true;
    case S_LOW_ESCAPE:
        t->at = S_LOW_U;
        return byte == '\\';
    case S_LOW_U:
        t->at = S_LOW_HEX;
        t->left = 4;
        return byte == 'u';
    default: /* S_LOW_HEX: dc00 to dfff */
        if (!is_hex(byte) || (t->left == 4 && lower != 'd') || (t->left == 3 && (byte <= '9' || lower < 'c')))
            return false;
        if (--t->left == 0)
            t->at = S_PLAIN;
        return true;
    }
}

static void step_string(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    const struct k3_node *n = &w->g->node[t->node];
    struct thread next = *t;

    if (t->at != S_PLAIN) {
        if (inside(&next, byte))
            k3_walk_put(w, &next);
        return;
    }
    if (byte == '"') {
        if (t->a >= n->min)
            done(w, t->top);
        return;
    }
    if (t->a >= n->max || byte < 0x20)
        return;
    if (n->max != UINT32_MAX || t->a < n->min) /* else the number is of no interest, and equal states stay equal */
        next.a++;
    if (byte == '\\')
        next.at = S_ESCAPE;
    else if (byte >= 0x80 && !lead(&next, byte))
        return;
    k3_walk_put(w, &next);
}

static bool number_whole(const struct thread *t)
{
    return t->at == N_ZERO || t->at == N_DIGITS || t->at == N_FRACTION || t->at == N_EXPONENT;
}

/* The number goes on with this byte. */
static bool number_next(struct thread *t, bool integer, uint8_t byte)
{
    static const uint8_t then[] = { [N_MINUS] = N_DIGITS,   [N_DIGITS] = N_DIGITS, [N_POINT] = N_FRACTION, [N_FRACTION] = N_FRACTION,
                                    [N_E] = N_EXPONENT, [N_E_SIGN] = N_EXPONENT, [N_EXPONENT] = N_EXPONENT };
    static const uint32_t most[] = { [N_DIGITS] = INTEGER_DIGITS_MAX, [N_FRACTION] = FRACTION_DIGITS_MAX, [N_EXPONENT] = EXPONENT_DIGITS_MAX };
    uint8_t was = t->at;

    if (byte >= '0' && byte <= '9') {
        if (was == N_ZERO)
            return false;
        t->at = was == N_MINUS && byte == '0' ? N_ZERO : then[was];
        t->a = t->at == was ? t->a + 1 : 1;
        return t->at == N_ZERO || t->a <= most[t->at];
    }
    if (integer)
        return false;
    if (byte == '.' && (was == N_ZERO || was == N_DIGITS))
        t->at = N_POINT;
    else if ((byte | 0x20) == 'e' && (was == N_ZERO || was == N_DIGITS || was == N_FRACTION))
        t->at = N_E;
    else if ((byte == '+' || byte == '-') && was == N_E)
        t->at = N_E_SIGN;
    else
        return false;
    return true;
}

static void step_number(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    struct thread next = *t;

    if (number_next(&next, w->g->node[t->node].kind == K3_NODE_INTEGER, byte)) {
        k3_walk_put(w, &next);
    } else if (number_whole(t)) {
        end_before(w, t->top, byte);
    }
}

/* A quote where a key may begin. */
static void begin_key(struct k3_walk *w, const struct frame *f)
{
    struct thread t = { .mode = M_DECLARED, .top = f, .b = w->g->node[f->node].n, .pos = 1 };

    if (declared_may_come(w->g, f))
        k3_walk_put(w, &t);
    t = (struct thread){ .mode = M_FREE, .top = f, .hash = K3_KEY_HASH };
    if (free_may_come(w->g, f))
        k3_walk_put(w, &t);
}

static void key_done(struct k3_walk *w, const struct frame *f, uint32_t n, const struct key *free_key, uint32_t node)
{
    struct thread t = { .mode = M_COLON, .node = node };
    struct frame *p = frame(w, f);

    if (!p)
        return;
    p->n = n;
    if (free_key) {
        p->keys = free_key;
        p->n_keys++;
    }
    t.top = p;
    k3_walk_put(w, &t);
}

static void step_declared(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    const struct k3_node *n = &w->g->node[t->top->node];
    const struct k3_property *p = w->g->property + n->first;
    const uint32_t *order = w->g->key_order + n->first;
    struct list list = { .p = p, .order = order };
    struct thread next = *t;
    bool alive = false;

    if (!narrow(&list, &next, byte))
        return;
    if (p[order[next.a]].key.len_bytes == next.pos) { /* its quote: no other key goes on behind it */
        if (may_come(w->g, t->top, order[next.a]))
            key_done(w, t->top, order[next.a] + 1, NULL, p[order[next.a]].node);
        return;
    }
    for (uint32_t i = next.a; i < next.b && !alive; i++)
        alive = may_come(w->g, t->top, order[i]);
    if (alive)
        k3_walk_put(w, &next);
}

static void step_free(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    const struct k3_node *n = &w->g->node[t->top->node];
    struct thread next = *t;
    struct key *k;

    if (t->at == S_PLAIN && byte == '"') {
        if (!free_key_is_new(w->g, t->top, t->hash))
            return;
        k = k3_arena_take(&w->arena, sizeof(*k));
        if (!k) {
            w->rc = -ENOMEM;
            return;
        }
        *k = (struct key){ .next = t->top->keys, .hash = t->hash };
        key_done(w, t->top, n->n, k, n->rest);
        return;
    }
    if (t->at == S_PLAIN ? byte < 0x20 || byte == '\\' || (byte >= 0x80 && !lead(&next, byte)) : !inside(&next, byte))
        return;
    next.hash = k3_key_hash(t->hash, byte);
    k3_walk_put(w, &next);
}

static void step_after(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    const struct frame *f = t->top;
    const struct k3_node *n = &w->g->node[f->node];
    bool array = n->kind == K3_NODE_ARRAY, may_end = array ? f->n >= n->min : stop_of(w->g, f) == n->n;
    struct thread next = { .top = f, .mode = array ? M_VALUE : M_KEY };

    if (may_end && byte == (array ? ']' : '}')) {
        done(w, f->up);
    } else if (byte != ',') {
        if (may_end) /* behind white space only the bracket can come */
            white(w, t, byte);
    } else if (t->n_ws == 0 && array) {
        next.node = item_node(w->g, f, f->n);
        if (next.node != K3_NO_NODE)
            k3_walk_put(w, &next);
    } else if (t->n_ws == 0 && (declared_may_come(w->g, f) || free_may_come(w->g, f))) {
        k3_walk_put(w, &next);
    }
}

static void step_first(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    const struct frame *f = t->top;
    const struct k3_node *n = &w->g->node[f->node];
    uint32_t item;

    if (white(w, t, byte))
        return;
    if (t->mode == M_OBJECT_FIRST) {
        if (byte == '"')
            begin_key(w, f);
        else if (byte == '}' && stop_of(w->g, f) == n->n)
            done(w, f->up);
    } else if (byte == ']') {
        if (n->min == 0)
            done(w, f->up);
    } else if ((item = item_node(w->g, f, 0)) != K3_NO_NODE) {
        begin(w, f, item, byte);
    }
}

static void step_value(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    bool member = t->top && w->g->node[t->top->node].kind == K3_NODE_OBJECT;
    struct thread next = *t;

    if (member && byte == ' ' && t->n_ws == 0) {
        next.n_ws = 1;
        k3_walk_put(w, &next);
    } else if (!t->top || member || !white(w, t, byte)) {
        begin(w, t->top, t->node, byte);
    }
}

void k3_thread_step(struct k3_walk *w, const struct thread *t, uint8_t byte)
{
    struct thread next;

    switch (t->mode) {
    case M_VALUE:
        step_value(w, t, byte);
        break;
    case M_STRING:
        step_string(w, t, byte);
        break;
    case M_NUMBER:
        step_number(w, t, byte);
        break;
    case M_LITERAL:
        step_literal(w, t, byte);
        break;
    case M_ARRAY_FIRST:
    case M_OBJECT_FIRST:
        step_first(w, t, byte);
        break;
    case M_KEY:
        if (!white(w, t, byte) && byte == '"')
            begin_key(w, t->top);
        break;
    case M_DECLARED:
        step_declared(w, t, byte);
        break;
    case M_FREE:
        step_free(w, t, byte);
        break;
    case M_COLON:
        next = (struct thread){ .mode = M_VALUE, .top = t->top, .node = t->node };
        if (byte == ':')
            k3_walk_put(w, &next);
        break;
    case M_AFTER:
        step_after(w, t, byte);
        break;
    default: /* M_DONE */
        break;
    }
}

bool k3_thread_whole(const struct k3_grammar *g, const struct thread *t)
{
    return (t->mode == M_NUMBER && number_whole(t)) || (t->mode == M_LITERAL && literal_whole(g, t));
}
