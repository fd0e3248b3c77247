/* computed's end of the expert rings (shm/expert.h).
 *
 * Entries are the experts of the layers that were begun, in list order:
 *   WAITING -> SENT     credit was there                          pump
 *   SENT    -> DONE     a completion came with its slot           pop_all
 *   SENT    -> FAILED   ... with an error                          pop_all
 *   SENT    -> WAITING  expertd died before it answered           attach
 *   DONE    -> HANDED   returned by next                          k3_expert_client_next
 *   DONE, HANDED, FAILED, WAITING -> GONE                         release_entry
 * An entry that is DONE or HANDED holds the mapping of the arena that its slot lies in: a new expertd that could not take
 * that arena over has another one, and then two are mapped until the last slot of the old one is released. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "model/names.h"
#include "shm/expert_ring.h"

#define EXPERTD "k3-expertd"
#define TICK_NS 20000000ull
#define REFUSAL_NS 2000000000ull /* a successor holds the lock a moment before it removes what a dead one left */

struct arena {
    struct k3_seg seg;
    struct k3_guard *guard; /* while it is current, when it has no name; else NULL */
    uint32_t refs; /* one of the client while current, one of each DONE or HANDED entry */
    uint64_t slot_bytes, slots_off_bytes;
};
enum entry_state { WAITING, SENT, DONE, FAILED, HANDED, GONE };
struct entry {
    enum entry_state state;
    uint16_t layer, expert;
    struct arena *arena;
    struct k3_expert_cpl cpl; /* checked copy */
};
struct k3_expert_client {
    const struct k3_model *m;
    char instance[40], rundir[512];
    uint32_t generation, counter;
    struct k3_seg ctl;
    struct k3_expert_ends ends;
    struct arena *arena;
    bool attached;
    uint64_t attach;
    uint32_t n_slots;
    _Atomic uint32_t n_slots_told; /* the same, for other threads */
    uint64_t len_bytes[K3_EXPERT_TENSORS];
    struct entry *entry;
    uint32_t n_entries, cap, next_send, next_out;
    uint32_t first_id;       /* id of entry[0] */
    uint32_t n_sent, n_held; /* SENT; DONE or HANDED in the current arena: together the credit in use */
    _Atomic bool *stop;
    struct k3_expert_client_counts counts;
};

static bool stopping(const struct k3_expert_client *c)
{
    return c->stop && atomic_load_explicit(c->stop, memory_order_acquire);
}

static void arena_put(struct arena *a)
{
    if (!a || --a->refs)
        return;
    k3_guard_close(a->guard);
    k3_seg_close(&a->seg);
    free(a);
}

static void ring_bell(struct k3_expert_client *c)
{
    k3_bell_ring(&c->ends.ctl->b.bell, &c->ends.ctl->a.sleepers);
}

/* ---- entries ---- */

static void release_entry(struct k3_expert_client *c, struct entry *e)
{
    if (e->state == DONE || e->state == HANDED) {
        if (c->attached && e->arena == c->arena) {
            struct k3_expert_rel rel = { .attach = c->attach, .slot = e->cpl.slot };

            if (k3_expert_ring_push(&c->ends.rel, &rel) < 0) /* cannot be full: the next attach sets it right */
                c->attached = false;
        }
        if (e->arena == c->arena)
            c->n_held--;
        arena_put(e->arena);
        e->arena = NULL;
    } else if (e->state == SENT) {
        c->n_sent--;
    }
    e->state = GONE;
}

/* One completion, which is input: every number in it is checked before it is believed. */
static int take(struct k3_expert_client *c, const struct k3_expert_cpl *cpl, struct k3_err *err)
{
    uint32_t i = cpl->id - c->first_id;
    struct entry *e;

    if (cpl->attach != c->attach)
        return 0; /* for a predecessor, or for us before we attached anew */
    e = i < c->n_entries ? &c->entry[i] : NULL;
    if (!e || e->state != SENT || e->layer != cpl->layer || e->expert != cpl->expert)
        return k3_fail(err, -EPROTO, "completion %u of layer %u expert %u answers no demand", cpl->id, cpl->layer,
                       cpl->expert);
    if (cpl->status == 0) {
        if (cpl->slot >= c->n_slots)
            return k3_fail(err, -EPROTO, "completion %u names slot %u of %u", cpl->id, cpl->slot, c->n_slots);
        for (int t = 0; t < K3_EXPERT_TENSORS; t++)
            if (c->len_bytes[t] > c->arena->slot_bytes ||
                cpl->off_bytes[t] > c->arena->slot_bytes - c->len_bytes[t])
                return k3_fail(err, -EPROTO, "completion %u: tensor %d at %u leaves its slot of %" PRIu64 " bytes",
                               cpl->id, t, cpl->off_bytes[t], c->arena->slot_bytes);
        e->arena = c->arena;
        c->arena->refs++;
        c->n_held++;
        c->counts.hits += cpl->hit != 0;
    }
    c->counts.demands++;
    c->n_sent--;
    e->cpl = *cpl;
    e->state = cpl->status == 0 ? DONE : FAILED;
    return 0;
}

static int pop_all(struct k3_expert_client *c, struct k3_err *err)
{
    struct k3_expert_cpl cpl;
    int rc;

    while ((rc = k3_expert_ring_pop(&c->ends.cpl, &cpl)) == 0) {
        rc = take(c, &cpl, err);
        if (rc < 0)
            return rc;
    }
    return rc == -EAGAIN ? 0 : k3_fail(err, rc, "completion ring of %s: index out of range", c->ctl.name);
}

/* Sends demands in list order as far as the credit goes. */
static int pump(struct k3_expert_client *c, struct k3_err *err)
{
    bool sent = false;
    int rc = 0;

    while (c->attached && c->next_send < c->n_entries && c->n_sent + c->n_held < c->n_slots) {
        struct entry *e = &c->entry[c->next_send];
        struct k3_expert_req rq = { .attach = c->attach, .id = c->first_id + c->next_send, .layer = e->layer,
                                    .expert = e->expert, .kind = K3_DEMAND };

        if (e->state == WAITING) {
            rc = k3_expert_ring_push(&c->ends.req, &rq);
            if (rc < 0) {
                k3_fail(err, rc, "request ring of %s: %s", c->ctl.name,
                        rc == -EPROTO ? "index out of range" : "full in spite of the credit");
                break;
            }
            e->state = SENT;
            c->n_sent++;
            sent = true;
        }
        c->next_send++;
    }
    if (sent)
        ring_bell(c);
    return rc;
}

/* ---- attach ---- */

static void detach(struct k3_expert_client *c)
{
    c->attached = false;
    k3_seg_close(&c->ctl);
    c->ends = (struct k3_expert_ends){ 0 };
}

static struct arena *arena_open(struct k3_expert_client *c, const struct k3_expert_ends *ends, int *code,
                                struct k3_err *err)
{
    struct arena *a = calloc(1, sizeof(*a));

    if (!a) {
        *code = k3_fail(err, -ENOMEM, "arena");
        return NULL;
    }
    a->refs = 1;
    a->slot_bytes = ends->slot_bytes;
    a->slots_off_bytes = ends->slots_off_bytes;
    *code = k3_data_open(&a->seg, c->instance, c->rundir, "expertdata", &ends->data, err); /* read-only: one writer */
    if (*code == 0 && a->seg.from != K3_MEM_SHM)
        *code = k3_guard_open(&a->guard, c->rundir, &a->seg, "expertdata", false, err);
    if (*code == 0 &&
        k3_arena_matches(&a->seg, ends->n_slots, ends->slot_bytes, ends->data_bytes, c->m->digest))
        return a;
    if (*code == 0)
        *code = -EAGAIN; /* the next generation is at work between the two segments */
    arena_put(a);
    return NULL;
}

/* Opens what lies under the names now.  -EAGAIN and -ENOENT: not there yet. */
static int open_segments(struct k3_expert_client *c, struct k3_err *err)
{
    struct k3_expert_ends ends;
    struct arena *a = NULL;
    struct k3_seg ctl;
    int rc;

    if (!k3_lock_alive(c->rundir, EXPERTD))
        return -ENOENT; /* what a dead one left is not for attaching */
    rc = k3_seg_open(&ctl, c->instance, "expert", true, err);
    if (rc < 0)
        return rc;
    rc = k3_expert_ends_open(&ends, &ctl, false, err);
    if (rc == 0 && memcmp(ends.ctl->model_digest, c->m->digest, sizeof(c->m->digest)) != 0)
        rc = k3_refuse(err, -ESTALE, "k3-expertd (generation %u) serves another checkpoint than k3-computed has open: "
                       "give both the same --model and --layers", ends.generation);
    if (rc == 0 && c->arena && k3_data_is_at(&c->arena->seg, &ends.data) &&
        k3_arena_matches(&c->arena->seg, ends.n_slots, ends.slot_bytes, ends.data_bytes, c->m->digest)) {
        a = c->arena;
        a->refs++;
    } else if (rc == 0) {
        a = arena_open(c, &ends, &rc, err);
    }
    /* Both segments are of one generation if the first is still the one with the name. */
    if (rc == 0 && !k3_seg_is_current(&ctl))
        rc = -EAGAIN;
    if (rc < 0) {
        arena_put(a);
        k3_seg_close(&ctl);
        return rc;
    }
    if (c->arena && c->arena != a) { /* views of it may still be held */
        k3_guard_close(c->arena->guard);
        c->arena->guard = NULL;
    }
    arena_put(c->arena);
    c->arena = a;
    c->ctl = ctl;
    c->ends = ends;
    c->n_slots = ends.n_slots;
    atomic_store_explicit(&c->n_slots_told, ends.n_slots, memory_order_relaxed);
    return 0;
}

/* A: what we hold, then the number.  Demands without an answer will be sent again. */
static int announce(struct k3_expert_client *c, struct k3_err *err)
{
    struct k3_expert_ctl *ctl = c->ends.ctl;
    struct k3_expert_cpl old;
    uint32_t n_held = 0;
    int rc;

    while ((rc = k3_expert_ring_pop(&c->ends.cpl, &old)) == 0)
        ; /* a dead predecessor's completions, so that the ring has room */
    if (rc != -EAGAIN)
        return k3_fail(err, rc, "completion ring of %s: index out of range", c->ctl.name);
    do
        c->attach = (uint64_t)c->generation << 32 | ++c->counter;
    while (c->attach == 0 || c->attach == atomic_load_explicit(&ctl->a.attached, memory_order_acquire) ||
           c->attach == atomic_load_explicit(&ctl->b.attach, memory_order_relaxed));
    c->n_sent = c->n_held = 0;
    c->next_send = c->n_entries;
    for (uint32_t i = c->n_entries; i-- > 0;) {
        struct entry *e = &c->entry[i];

        if (e->state == SENT)
            e->state = WAITING;
        if (e->state == WAITING)
            c->next_send = i;
        if ((e->state == DONE || e->state == HANDED) && e->arena == c->arena) {
            if (n_held == c->n_slots)
                return k3_fail(err, -EPROTO, "more slots held than the %u there are", c->n_slots);
            c->ends.held[n_held++] = e->cpl.slot;
        }
    }
    c->n_held = n_held;
    ctl->b.n_held = n_held;
    atomic_store_explicit(&ctl->b.attach, c->attach, memory_order_release); /* A */
    ring_bell(c);
    return 0;
}

static int wait_tick(uint64_t until_ns)
{
    struct timespec ts = { 0, TICK_NS / 4 };

    if (k3_now_ns() >= until_ns)
        return -ETIMEDOUT;
    nanosleep(&ts, NULL);
    return 0;
}

/* Attaches to whichever expertd lives, or will; until_ns UINT64_MAX waits for ever (k3-run restarts the dead). */
static int attach(struct k3_expert_client *c, uint64_t until_ns, struct k3_err *err)
{
    uint64_t refused_since_ns = 0;
    int rc;

    for (;;) {
        if (stopping(c))
            return k3_fail(err, -ECANCELED, "stopped while waiting for k3-expertd");
        if (!c->ctl.base) {
            rc = open_segments(c, err);
            if (rc == 0 || rc == -EAGAIN || rc == -ENOENT) {
                refused_since_ns = 0;
            } else {
                if (refused_since_ns == 0)
                    refused_since_ns = k3_now_ns();
                if (k3_now_ns() - refused_since_ns < REFUSAL_NS && wait_tick(until_ns) == 0)
                    continue;
            }
            if (rc == -EAGAIN || rc == -ENOENT) {
                if (wait_tick(until_ns) < 0)
                    return k3_no_peer(err, -ETIMEDOUT, "no k3-expertd serves instance %s: start it, or see its log",
                                      c->instance);
                continue;
            }
            if (rc == 0)
                rc = announce(c, err);
            if (rc < 0) {
                detach(c);
                return rc;
            }
        }
        uint32_t seen = k3_bell_news(&c->ends.ctl->a.bell);

        if (atomic_load_explicit(&c->ends.ctl->a.attached, memory_order_acquire) == c->attach) {
            c->attached = true;
            return 0;
        }
        if (k3_bell_wait(&c->ends.ctl->a.bell, &c->ends.ctl->b.sleepers, seen, TICK_NS) == -ETIMEDOUT) {
            if (!k3_seg_is_current(&c->ctl))
                detach(c);
            else if (k3_now_ns() >= until_ns)
                return k3_no_peer(err, -ETIMEDOUT, "k3-expertd of instance %s does not answer an attach", c->instance);
        }
    }
}

int k3_expert_client_open(struct k3_expert_client **out, const char *instance, const char *rundir,
                          const struct k3_model *m, uint32_t generation, uint64_t timeout_ns, struct k3_err *err)
{
    struct k3_expert_client *c;
    uint64_t now_ns = k3_now_ns(), until_ns = now_ns + timeout_ns < now_ns ? UINT64_MAX : now_ns + timeout_ns;
    int rc;

    rc = k3_instance_check(instance, err);
    if (rc < 0)
        return rc;
    c = calloc(1, sizeof(*c));
    if (!c)
        return k3_fail(err, -ENOMEM, "expert client");
    c->m = m;
    c->generation = generation;
    c->ctl = (struct k3_seg)K3_SEG_INIT;
    memcpy(c->instance, instance, strlen(instance) + 1);
    if (strlen(rundir) >= sizeof(c->rundir)) {
        rc = k3_fail(err, -ENAMETOOLONG, "run directory %.100s...", rundir);
        goto fail;
    }
    memcpy(c->rundir, rundir, strlen(rundir) + 1);
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        uint32_t n_rows, n_cols;

        k3_names_expert_shape(&m->cfg, t, &n_rows, &n_cols);
        c->len_bytes[t] = (uint64_t)n_rows * n_cols;
    }
    rc = attach(c, until_ns, err);
    if (rc < 0)
        goto fail;
    *out = c;
    return 0;
fail:
    k3_expert_client_close(c);
    return rc;
}

void k3_expert_client_close(struct k3_expert_client *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; i < c->n_entries; i++)
        release_entry(c, &c->entry[i]);
    if (c->attached)
        ring_bell(c);
    detach(c);
    arena_put(c->arena);
    free(c->entry);
    free(c);
}

uint32_t k3_expert_client_slots(const struct k3_expert_client *c)
{
    return atomic_load_explicit(&c->n_slots_told, memory_order_relaxed);
}

/* Looks whether expertd is still the one that we attached to; if it was followed by another, what it had completed
 * is taken first, then everything without an answer waits to be sent again. */
static int look_at_peer(struct k3_expert_client *c, struct k3_err *err)
{
    int rc = 0;

    if (c->ctl.base && !k3_seg_is_current(&c->ctl)) {
        rc = pop_all(c, err);
        detach(c);
    }
    return rc;
}

static int reattach(struct k3_expert_client *c, struct k3_err *err)
{
    int rc;

    if (c->attached)
        return 0;
    detach(c);
    rc = attach(c, UINT64_MAX, err);
    if (rc == 0)
        c->counts.reattached++;
    return rc;
}

/* ---- layers ---- */

/* Drops the entries that are over and makes room for n more. */
static int make_room(struct k3_expert_client *c, uint32_t n, struct k3_err *err)
{
    struct entry *more;
    uint32_t gone = 0;

    while (gone < c->n_entries && c->entry[gone].state == GONE)
        gone++;
    if (gone)
        memmove(c->entry, c->entry + gone, (c->n_entries - gone) * sizeof(*c->entry));
    c->n_entries -= gone;
    c->first_id += gone;
    c->next_send -= gone < c->next_send ? gone : c->next_send;
    c->next_out -= gone < c->next_out ? gone : c->next_out;
    if (c->n_entries + n <= c->cap)
        return 0;
    more = realloc(c->entry, (c->n_entries + n) * sizeof(*more));
    if (!more)
        return k3_fail(err, -ENOMEM, "list of %u experts", c->n_entries + n);
    c->entry = more;
    c->cap = c->n_entries + n;
    return 0;
}

int k3_expert_client_begin(struct k3_expert_client *c, uint32_t layer, const uint16_t *experts, uint32_t n,
                           struct k3_err *err)
{
    const struct k3_config *cfg = &c->m->cfg;
    int rc;

    if (layer >= cfg->n_layers || k3_layer_is_dense(cfg, layer))
        return k3_fail(err, -EINVAL, "layer %u has no experts: layers %u to %u have", layer, cfg->first_dense,
                       cfg->n_layers - 1);
    for (uint32_t i = 0; i < n; i++)
        if (experts[i] >= cfg->n_experts || (i && experts[i] <= experts[i - 1]))
            return k3_fail(err, -EINVAL, "layer %u: expert %u in place %u, must be ascending and below %u", layer,
                           experts[i], i, cfg->n_experts);
    if (c->next_out < c->n_entries)
        return k3_fail(err, -EBUSY, "layer %u begun while layer %u has experts to come", layer,
                       c->entry[c->next_out].layer);
    rc = make_room(c, n, err);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < n; i++)
        c->entry[c->n_entries++] = (struct entry){ .state = WAITING, .layer = (uint16_t)layer, .expert = experts[i] };
    return pump(c, err);
}

static int hand_out(struct k3_expert_client *c, struct entry *e, struct k3_expert_view *out, struct k3_err *err)
{
    c->next_out++;
    if (e->state == FAILED) {
        const char *path = e->cpl.file < c->m->n_files ? c->m->files[e->cpl.file].path : "(no file)";

        c->counts.errors++;
        e->state = GONE;
        return k3_untrusted(err, -EIO, "layer %u expert %u could not be read: %s at offset %" PRIu64 ": %s", e->layer,
                            e->expert, path, e->cpl.file_off_bytes, k3_read_strerror(-e->cpl.status));
    }
    e->state = HANDED;
    *out = (struct k3_expert_view){ .slot = e->cpl.slot, .layer = e->layer, .expert = e->expert,
                                    .hit = e->cpl.hit != 0 };
    for (int t = 0; t < K3_EXPERT_TENSORS; t++)
        out->tensor[t] = e->arena->seg.base + e->arena->slots_off_bytes + e->cpl.slot * e->arena->slot_bytes +
                         e->cpl.off_bytes[t];
    return 0;
}

int k3_expert_client_next(struct k3_expert_client *c, struct k3_expert_view *out, struct k3_err *err)
{
    uint64_t start_ns = 0;
    struct entry *e;
    int rc;

    if (c->next_out == c->n_entries)
        return k3_fail(err, -ENOENT, "no expert of the layer is left");
    for (;;) {
        e = &c->entry[c->next_out];
        rc = reattach(c, err);
        if (rc == 0)
            rc = pump(c, err);
        if (rc < 0)
            break;
        uint32_t seen = k3_bell_news(&c->ends.ctl->a.bell);

        rc = pop_all(c, err);
        if (rc < 0 || e->state == DONE || e->state == FAILED)
            break;
        if (e->state == WAITING && c->n_sent == 0) {
            rc = k3_fail(err, -EDEADLK, "layer %u expert %u: all %u slots are held; release one first", e->layer,
                         e->expert, c->n_slots);
            break;
        }
        if (stopping(c)) {
            rc = k3_fail(err, -ECANCELED, "stopped while waiting for layer %u expert %u", e->layer, e->expert);
            break;
        }
        if (!start_ns)
            start_ns = k3_now_ns();
        if (k3_bell_wait(&c->ends.ctl->a.bell, &c->ends.ctl->b.sleepers, seen, TICK_NS) == -ETIMEDOUT) {
            rc = look_at_peer(c, err);
            if (rc < 0)
                break;
        }
    }
    if (start_ns) {
        c->counts.waits++;
        c->counts.wait_ns += k3_now_ns() - start_ns;
    }
    if (rc == -EPROTO)
        c->attached = false; /* attach anew before anything else is believed */
    return rc < 0 ? rc : hand_out(c, e, out, err);
}

void k3_expert_client_release(struct k3_expert_client *c, const struct k3_expert_view *v)
{
    for (uint32_t i = 0; i < c->next_out; i++) {
        struct entry *e = &c->entry[i];

        if (e->state != HANDED || e->layer != v->layer || e->expert != v->expert || e->cpl.slot != v->slot)
            continue;
        release_entry(c, e);
        /* expertd has a slot for every demand that was sent, so it need not wake for this one before the layer's last, unless
         * demands wait for credit: on a machine whose cores all compute each wake-up would stop one of them. */
        if (c->attached && (c->next_send < c->n_entries || c->n_held == 0))
            ring_bell(c);
        if (pump(c, NULL) < 0)
            c->attached = false;
        return;
    }
}

void k3_expert_client_abandon(struct k3_expert_client *c)
{
    for (uint32_t i = 0; i < c->n_entries; i++)
        if (c->entry[i].state != SENT)
            release_entry(c, &c->entry[i]);
    while (c->attached && c->n_sent) {
        uint32_t seen = k3_bell_news(&c->ends.ctl->a.bell);

        /* Nothing hangs on these any more: when there is trouble, the next attach says that nothing is held. */
        if (pop_all(c, NULL) < 0 || stopping(c) || !k3_lock_alive(c->rundir, EXPERTD) ||
            !k3_seg_is_current(&c->ctl)) {
            c->attached = false;
            break;
        }
        if (c->n_sent)
            k3_bell_wait(&c->ends.ctl->a.bell, &c->ends.ctl->b.sleepers, seen, TICK_NS);
    }
    for (uint32_t i = 0; i < c->n_entries; i++)
        release_entry(c, &c->entry[i]);
    if (c->attached)
        ring_bell(c);
    c->first_id += c->n_entries;
    c->n_entries = c->next_send = c->next_out = 0;
}

void k3_expert_client_prefetch(struct k3_expert_client *c, uint32_t layer, const uint16_t *experts, uint32_t n)
{
    const struct k3_config *cfg = &c->m->cfg;
    bool sent = false;

    if (layer >= cfg->n_layers || k3_layer_is_dense(cfg, layer))
        return;
    for (uint32_t i = 0; c->attached && i < n; i++) {
        struct k3_expert_req rq = { .attach = c->attach, .layer = (uint16_t)layer, .expert = experts[i],
                                    .kind = K3_PREFETCH };
        int64_t fill = k3_expert_ring_fill(&c->ends.req);

        if (experts[i] >= cfg->n_experts)
            continue;
        if (fill < 0 || fill > c->ends.req.n_entries / 2 || k3_expert_ring_push(&c->ends.req, &rq) < 0)
            break;
        sent = true;
    }
    if (sent)
        ring_bell(c);
}

void k3_expert_client_set_stop(struct k3_expert_client *c, _Atomic bool *stop)
{
    c->stop = stop;
}

void k3_expert_client_counts(const struct k3_expert_client *c, struct k3_expert_client_counts *out)
{
    *out = c->counts;
}
