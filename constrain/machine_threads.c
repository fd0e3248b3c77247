#include "constrain/machine_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES 4096u

/* ---- memory of frames: given back all at once, from a mark on ---- */

void *k3_arena_take(struct arena *a, size_t n)
{
    struct chunk *c = a->at, *next;
    void *p;

    n = (n + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!c || c->len_bytes - c->used_bytes < n) {
        next = c ? c->next : a->first;
        if (!next) {
            next = malloc(sizeof(*next) + CHUNK_BYTES);
            if (!next)
                return NULL;
            *next = (struct chunk){ .len_bytes = CHUNK_BYTES };
            *(c ? &c->next : &a->first) = next;
        }
        next->used_bytes = 0;
        a->at = c = next;
    }
    p = (char *)c->bytes + c->used_bytes;
    c->used_bytes += n;
    return p;
}

struct mark k3_arena_mark(const struct arena *a)
{
    return (struct mark){ a->at, a->at ? a->at->used_bytes : 0 };
}

void k3_arena_release(struct arena *a, struct mark m)
{
    a->at = m.at;
    if (m.at)
        m.at->used_bytes = m.used_bytes;
}

void k3_arena_trim(struct arena *a)
{
    struct chunk **rest = a->at ? &a->at->next : &a->first;
    struct arena behind = { .first = *rest };

    *rest = NULL;
    k3_arena_free(&behind);
}

void k3_arena_free(struct arena *a)
{
    for (struct chunk *c = a->first, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    *a = (struct arena){ NULL, NULL };
}

size_t k3_arena_bytes(const struct arena *a)
{
    size_t n = 0;

    for (const struct chunk *c = a->first; c; c = c->next)
        n += sizeof(*c) + c->len_bytes;
    return n;
}

/* ---- sets of threads ---- */

int k3_walk_new(struct k3_walk **out, struct k3_err *err)
{
    *out = calloc(1, sizeof(**out));
    return *out ? 0 : k3_fail(err, -ENOMEM, "no memory for a walk over the vocabulary");
}

void k3_walk_free(struct k3_walk *w)
{
    if (!w)
        return;
    k3_arena_free(&w->arena);
    free(w->thread);
    free(w->level);
    free(w);
}

/* Room for one more thread, one more level. */
bool k3_walk_threads(struct k3_walk *w, size_t n)
{
    size_t cap = w->cap_threads ? 2 * w->cap_threads : 2 * K3_THREADS_MAX;
    struct thread *p;

    if (n < w->cap_threads)
        return true;
    p = reallocarray(w->thread, cap, sizeof(*p));
    if (!p)
        return false;
    w->thread = p;
    w->cap_threads = cap;
    return true;
}

bool k3_walk_levels(struct k3_walk *w, size_t n)
{
    size_t cap = w->cap_levels ? 2 * w->cap_levels : 64;
    struct level *p;

    if (n < w->cap_levels)
        return true;
    p = reallocarray(w->level, cap, sizeof(*p));
    if (!p)
        return false;
    w->level = p;
    w->cap_levels = cap;
    return true;
}

static bool same_keys(const struct key *a, const struct key *b)
{
    for (; a != b; a = a->next, b = b->next)
        if (!a || !b || a->hash != b->hash)
            return false;
    return true;
}

static bool same_frames(const struct frame *a, const struct frame *b)
{
    for (; a != b; a = a->up, b = b->up)
        if (!a || !b || a->node != b->node || a->n != b->n || a->n_keys != b->n_keys || !same_keys(a->keys, b->keys))
            return false;
    return true;
}

static bool same_thread(const struct thread *a, const struct thread *b)
{
    return a->mode == b->mode && a->at == b->at && a->node == b->node && a->a == b->a && a->b == b->b && a->pos == b->pos &&
           a->hash == b->hash && a->n_ws == b->n_ws && a->left == b->left && a->low == b->low && a->high == b->high &&
           same_frames(a->top, b->top);
}

void k3_walk_put(struct k3_walk *w, const struct thread *t)
{
    struct level *out = w->out;

    for (uint32_t i = 0; i < out->n; i++)
        if (same_thread(&w->thread[out->first + i], t))
            return;
    if (out->n >= K3_THREADS_MAX || w->rc < 0)
        return;
    if (!k3_walk_threads(w, out->first + out->n)) {
        w->rc = -ENOMEM;
        return;
    }
    w->thread[out->first + out->n++] = *t;
}

/* ---- what is kept of them ---- */

static const struct key *keep_keys(struct arena *a, const struct key *k)
{
    const struct key *first = NULL, **link = &first;

    for (; k; k = k->next) {
        struct key *p;

        if (k->copy) {
            *link = k->copy;
            return first;
        }
        p = k3_arena_take(a, sizeof(*p));
        if (!p)
            return NULL;
        *p = (struct key){ .hash = k->hash };
        ((struct key *)(uintptr_t)k)->copy = p;
        *link = p;
        link = &p->next;
    }
    return first;
}

const struct frame *k3_frame_keep(struct arena *a, const struct frame *f)
{
    const struct frame *first = NULL, **link = &first;

    for (; f; f = f->up) {
        struct frame *p;

        if (f->copy) {
            *link = f->copy;
            return first;
        }
        p = k3_arena_take(a, sizeof(*p));
        if (!p)
            return NULL;
        *p = *f;
        p->copy = NULL;
        p->up = NULL;
        p->keys = keep_keys(a, f->keys);
        if (f->keys && !p->keys)
            return NULL;
        ((struct frame *)(uintptr_t)f)->copy = p;
        *link = p;
        link = &p->up;
    }
    return first;
}

