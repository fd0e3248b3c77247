#include "constrain/machine_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* k3_step_fn over a walk. */
static bool step_level(void *arg, uint32_t level, uint8_t byte)
{
    struct k3_walk *w = arg;
    struct level *from;

    if (w->rc == 0 && !k3_walk_levels(w, (size_t)level + 1))
        w->rc = -ENOMEM;
    if (w->rc < 0)
        return false;
    from = &w->level[level];
    w->out = from + 1;
    k3_arena_release(&w->arena, from->mark);
    *w->out = (struct level){ .first = from->first + from->n };
    for (uint32_t i = 0; i < from->n; i++) {
        struct thread t = w->thread[from->first + i]; /* the array may move */

        k3_thread_step(w, &t, byte);
    }
    w->out->mark = k3_arena_mark(&w->arena);
    return w->rc == 0 && w->out->n > 0;
}

static int walk_from(struct k3_walk *w, const struct k3_machine *m)
{
    w->g = m->g;
    w->rc = 0;
    w->arena.at = NULL;
    if (!k3_walk_threads(w, m->n) || !k3_walk_levels(w, 0))
        return -ENOMEM;
    memcpy(w->thread, m->thread, m->n * sizeof(*m->thread));
    w->level[0] = (struct level){ .first = 0, .n = m->n, .mark = k3_arena_mark(&w->arena) };
    return 0;
}

/* ---- the machine ---- */

int k3_machine_new(struct k3_machine **out, const struct k3_grammar *g, struct k3_err *err)
{
    struct k3_machine *m = calloc(1, sizeof(*m));

    if (!m)
        return k3_fail(err, -ENOMEM, "no memory for a constraint");
    m->g = g;
    m->n = 1;
    m->thread[0] = (struct thread){ .mode = M_VALUE, .node = g->root };
    *out = m;
    return 0;
}

void k3_machine_free(struct k3_machine *m)
{
    if (!m)
        return;
    k3_arena_free(&m->kept);
    k3_arena_free(&m->other);
    free(m);
}

size_t k3_machine_bytes(const struct k3_machine *m)
{
    return sizeof(*m) + k3_arena_bytes(&m->kept) + k3_arena_bytes(&m->other);
}

/* What is held must stay small: of many threads with much behind them the first ones are enough. */
static bool too_much(const struct arena *a)
{
    return k3_arena_bytes(a) > (K3_MACHINE_STATE_BYTES - sizeof(struct k3_machine)) / 2;
}

/* The threads of end become those of m. */
static int keep_threads(struct k3_machine *m, const struct k3_walk *w, const struct level *end)
{
    struct arena used = m->kept;

    m->other.at = NULL;
    m->n = 0;
    for (uint32_t i = 0; i < end->n; i++) {
        struct mark before = k3_arena_mark(&m->other);
        struct thread *t = &m->thread[i];

        *t = w->thread[end->first + i];
        if (t->top && !(t->top = k3_frame_keep(&m->other, t->top)))
            return -ENOMEM;
        if (i && too_much(&m->other)) {
            k3_arena_release(&m->other, before);
            k3_arena_trim(&m->other);
            break;
        }
        m->n++;
    }
    m->kept = m->other;
    m->other = used;
    return 1;
}

int k3_machine_feed(struct k3_machine *m, struct k3_walk *w, const char *bytes, size_t len_bytes)
{
    int rc = walk_from(w, m);

    for (size_t i = 0; i < len_bytes && rc == 0; i++)
        if (!step_level(w, (uint32_t)i, (uint8_t)bytes[i]))
            return w->rc;
    if (rc < 0 || len_bytes == 0)
        return rc < 0 ? rc : 1;
    return keep_threads(m, w, &w->level[len_bytes]);
}

bool k3_machine_complete(const struct k3_machine *m)
{
    for (uint32_t i = 0; i < m->n; i++) {
        const struct thread *t = &m->thread[i];

        if (t->mode == M_DONE || (!t->top && k3_thread_whole(m->g, t)))
            return true;
    }
    return false;
}

int k3_machine_mask(const struct k3_machine *m, struct k3_walk *w, const struct k3_vocab *v, uint64_t *allowed)
{
    int rc = walk_from(w, m);

    if (rc == 0)
        k3_vocab_walk(v, step_level, w, allowed);
    return rc < 0 ? rc : w->rc;
}
