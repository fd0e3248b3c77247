/* k3-computed/prefix.c: the store of snapshots (prefix.h). */
#include "k3-computed/prefix.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int k3_prefix_open(struct k3_prefix *p, uint32_t n, const struct k3_config *c, uint32_t ctx, struct k3_err *err)
{
    *p = (struct k3_prefix){ .n = 0 };
    if (n > K3_SNAPSHOTS_MAX)
        return k3_refuse(err, -EINVAL, "%u snapshots: at most %u", n, K3_SNAPSHOTS_MAX);
    p->item = calloc(n ? n : 1, sizeof(*p->item));
    if (!p->item)
        return k3_fail(err, -ENOMEM, "no memory for %u snapshots", n);
    for (; p->n < n; p->n++) {
        struct k3_snapshot *s = &p->item[p->n];
        int rc = k3_state_new(&s->state, c, ctx, err);

        if (rc == 0)
            rc = k3_state_touch(s->state, err);
        s->ids = rc == 0 ? malloc(ctx * sizeof(*s->ids)) : NULL;
        if (rc == 0 && !s->ids)
            rc = k3_fail(err, -ENOMEM, "no memory for the ids of %u positions; lower --ctx", ctx);
        if (rc < 0) {
            k3_state_free(s->state);
            return rc;
        }
        memset(s->ids, 0, ctx * sizeof(*s->ids)); /* touched now */
    }
    return 0;
}

void k3_prefix_close(struct k3_prefix *p)
{
    for (uint32_t i = 0; i < p->n; i++) {
        k3_state_free(p->item[i].state);
        free(p->item[i].ids);
    }
    free(p->item);
    *p = (struct k3_prefix){ .n = 0 };
}

uint64_t k3_prefix_bytes(const struct k3_config *c, uint32_t ctx, uint32_t n)
{
    uint64_t one = k3_state_bytes(c, ctx), all;

    if (__builtin_add_overflow(one, (uint64_t)ctx * sizeof(uint32_t) + sizeof(struct k3_snapshot), &one) ||
        __builtin_mul_overflow(one, (uint64_t)n, &all))
        return UINT64_MAX;
    return all;
}

static bool begins_with(const uint32_t *ids, uint32_t n, const struct k3_snapshot *s)
{
    return s->n && s->n <= n && memcmp(s->ids, ids, s->n * sizeof(*ids)) == 0;
}

struct k3_snapshot *k3_prefix_find(const struct k3_prefix *p, const uint32_t *ids, uint32_t n_max)
{
    struct k3_snapshot *best = NULL;

    for (uint32_t i = 0; i < p->n; i++) {
        struct k3_snapshot *s = &p->item[i];

        if (s->n > (best ? best->n : 0) && begins_with(ids, n_max, s))
            best = s;
    }
    return best;
}

struct k3_snapshot *k3_prefix_exact(const struct k3_prefix *p, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < p->n; i++) {
        struct k3_snapshot *s = &p->item[i];

        if (n && (s->n_coming ? s->n_coming : s->n) == n && memcmp(s->ids, ids, n * sizeof(*ids)) == 0)
            return s;
    }
    return NULL;
}

struct k3_snapshot *k3_prefix_room(const struct k3_prefix *p, const uint32_t *but, uint32_t n_but)
{
    struct k3_snapshot *best = NULL;

    for (uint32_t i = 0; i < p->n; i++) {
        struct k3_snapshot *s = &p->item[i];

        if (s->n_busy || (best && best->n == 0) || begins_with(but, n_but, s))
            continue;
        if (!best || s->n == 0 || s->used < best->used)
            best = s;
    }
    return best;
}

struct k3_snapshot *k3_prefix_progress(const struct k3_prefix *p, uint64_t of)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (p->item[i].n && p->item[i].progress && p->item[i].of == of)
            return &p->item[i];
    return NULL;
}

void k3_prefix_clear(struct k3_snapshot *s)
{
    s->n = s->n_coming = 0;
    s->of = 0;
    s->progress = false;
}

void k3_prefix_begin(struct k3_snapshot *s, const uint32_t *ids, uint32_t n, uint64_t of)
{
    k3_prefix_clear(s);
    memcpy(s->ids, ids, n * sizeof(*ids));
    s->n_coming = n;
    s->of = of;
    s->n_busy++;
}

void k3_prefix_settle(struct k3_prefix *p, struct k3_snapshot *s, bool filled)
{
    uint32_t n = s->n_coming;

    s->n_busy--;
    s->n_coming = 0;
    if (!filled) {
        k3_prefix_clear(s);
        return;
    }
    s->n = n;
    k3_prefix_touch(p, s);
}

void k3_prefix_touch(struct k3_prefix *p, struct k3_snapshot *s)
{
    s->used = ++p->stamp;
}
