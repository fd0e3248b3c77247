#include "k3-computed/shm_source.h"

#include <errno.h>
#include <stdlib.h>

struct k3_shm_source {
    struct k3_shm_source_opts o;
    struct k3_source source;
    struct k3_trunk_reader *reader;
    struct k3_expert_client *client;
    struct k3_embed *embed;
    bool seek_due;
};

static void waiting(struct k3_shm_source *s, enum k3_waiting what)
{
    atomic_store_explicit(&s->o.meter->waiting, what, memory_order_relaxed);
}

static void count_bytes(struct k3_shm_source *s, uint64_t n_bytes)
{
    atomic_fetch_add_explicit(&s->o.meter->bytes, n_bytes, memory_order_relaxed);
}

static int seek(struct k3_shm_source *s, struct k3_err *err)
{
    int rc = k3_trunk_reader_seek_pass(s->reader, err);

    s->seek_due = rc < 0;
    return rc;
}

static int source_rows(void *self, uint32_t piece, uint32_t row, uint32_t n_rows, const void **rows, struct k3_err *err)
{
    struct k3_shm_source *s = self;
    const struct k3_piece *p = &s->o.m->pieces[piece];
    int rc = 0;

    waiting(s, K3_WAIT_TRUNK);
    if (s->seek_due)
        rc = seek(s, err);
    if (rc == 0)
        rc = k3_trunk_reader_rows(s->reader, piece, row, n_rows, rows, err);
    waiting(s, K3_WAIT_NONE);
    if (rc == 0)
        count_bytes(s, (uint64_t)n_rows * (p->len_bytes / p->n_rows));
    return rc;
}

static void source_done(void *self)
{
    struct k3_shm_source *s = self;

    k3_trunk_reader_done(s->reader);
}

static uint32_t source_ready(void *self, uint32_t piece, uint32_t row)
{
    struct k3_shm_source *s = self;

    return s->seek_due ? 0 : k3_trunk_reader_ready(s->reader, piece, row);
}

static int source_next_pass(void *self, struct k3_err *err)
{
    struct k3_shm_source *s = self;

    if (s->seek_due) /* leads to the next pass anyway */
        return 0;
    return k3_trunk_reader_next_pass(s->reader, err);
}

static int source_failed_pass(void *self, struct k3_err *err)
{
    struct k3_shm_source *s = self;

    (void)err;
    s->seek_due = true;
    return 0;
}

static int source_experts_begin(void *self, uint32_t layer, const uint16_t *experts, uint32_t n, struct k3_err *err)
{
    struct k3_shm_source *s = self;

    return k3_expert_client_begin(s->client, layer, experts, n, err);
}

static int source_expert_next(void *self, struct k3_expert_view *out, struct k3_err *err)
{
    struct k3_shm_source *s = self;
    int rc;

    /* A trunkd that shares the drive steps back meanwhile (design.md section 4). */
    k3_trunk_reader_set_blocked(s->reader, true);
    waiting(s, K3_WAIT_EXPERT);
    rc = k3_expert_client_next(s->client, out, err);
    waiting(s, K3_WAIT_NONE);
    k3_trunk_reader_set_blocked(s->reader, false);
    if (rc == 0)
        count_bytes(s, s->o.m->expert_bytes);
    return rc;
}

static void source_expert_release(void *self, const struct k3_expert_view *v)
{
    struct k3_shm_source *s = self;

    k3_expert_client_release(s->client, v);
}

static void source_experts_abandon(void *self)
{
    struct k3_shm_source *s = self;

    k3_expert_client_abandon(s->client);
}

static const void *source_pinned(void *self, uint32_t piece)
{
    struct k3_shm_source *s = self;

    return k3_trunk_reader_pinned(s->reader, piece);
}

static void source_prefetch(void *self, uint32_t layer, const uint16_t *experts, uint32_t n)
{
    struct k3_shm_source *s = self;

    k3_expert_client_prefetch(s->client, layer, experts, n);
}

static int source_embed(void *self, uint32_t token, float *out, struct k3_err *err)
{
    struct k3_shm_source *s = self;

    return k3_embed_row(s->embed, token, out, err);
}

int k3_shm_source_open(struct k3_shm_source **out, const struct k3_shm_source_opts *opts, struct k3_err *err)
{
    struct k3_shm_source *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return k3_fail(err, -ENOMEM, "no memory for the weight source");
    s->o = *opts;
    s->source = (struct k3_source){
        .self = s, .m = opts->m, .rows = source_rows, .done = source_done, .ready = source_ready, .next_pass = source_next_pass,
        .failed_pass = source_failed_pass, .experts_begin = source_experts_begin, .expert_next = source_expert_next,
        .expert_release = source_expert_release, .experts_abandon = source_experts_abandon, .embed = source_embed,
        .pinned = source_pinned, .prefetch = source_prefetch,
    };
    rc = k3_embed_open(&s->embed, opts->m, err);
    if (rc < 0) {
        k3_shm_source_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void k3_shm_source_close(struct k3_shm_source *s)
{
    if (!s)
        return;
    if (s->client)
        k3_expert_client_close(s->client);
    if (s->reader)
        k3_trunk_reader_close(s->reader);
    k3_embed_close(s->embed);
    free(s);
}

int k3_shm_source_attach_trunk(struct k3_shm_source *s, uint64_t timeout_ns, struct k3_err *err)
{
    int rc = k3_trunk_reader_open(&s->reader, s->o.instance, s->o.rundir, s->o.m, s->o.generation, timeout_ns, err);

    if (rc < 0)
        return rc;
    k3_trunk_reader_set_stop(s->reader, s->o.stop);
    k3_trunk_reader_set_notice(s->reader, s->o.notice, s->o.notice_arg);
    return 0;
}

int k3_shm_source_attach_expert(struct k3_shm_source *s, uint64_t timeout_ns, struct k3_err *err)
{
    int rc = k3_expert_client_open(&s->client, s->o.instance, s->o.rundir, s->o.m, s->o.generation, timeout_ns, err);

    if (rc == 0)
        k3_expert_client_set_stop(s->client, s->o.stop);
    return rc;
}

int k3_shm_source_begin(struct k3_shm_source *s, struct k3_err *err)
{
    int rc;

    waiting(s, K3_WAIT_TRUNK);
    rc = k3_trunk_reader_resident(s->reader, &s->source.resident, err);
    s->source.block_bytes = k3_trunk_reader_block_bytes(s->reader);
    if (rc == 0)
        rc = seek(s, err);
    waiting(s, K3_WAIT_NONE);
    return rc;
}

struct k3_source *k3_shm_source_get(struct k3_shm_source *s)
{
    return &s->source;
}

const struct k3_layout *k3_shm_source_layout(const struct k3_shm_source *s)
{
    return k3_trunk_reader_layout(s->reader);
}

uint32_t k3_shm_source_slots(const struct k3_shm_source *s)
{
    return s->client ? k3_expert_client_slots(s->client) : 0;
}

void k3_shm_source_counts(const struct k3_shm_source *s, struct k3_shm_counts *out)
{
    *out = (struct k3_shm_counts){ 0 };
    k3_trunk_reader_counts(s->reader, &out->trunk);
    if (s->client)
        k3_expert_client_counts(s->client, &out->expert);
}
