/* tools/plan.c: parts, the division between trunk and experts, refusals (plan.h). */
#include "tools/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "k3-computed/engine.h"
#include "k3-computed/pass.h"
#include "k3-expertd/expertd.h"
#include "k3-trunkd/trunkd.h"

#define MB 1000000ull

/* What programs take besides their data, measured as the sum of PSS without segments and state (docs/user/memory.md):
 * three daemons, one k3-router with the released tokenizer, k3-run's supervisor, a k3ctl. */
#define PROGRAM_BYTES (40 * MB)
#define TENSOR_BYTES 150u     /* of the index, while it is there (model/index.h) */
#define PIECE_BYTES 96u       /* what trunkd and computed keep of a piece, together */
#define EXPERT_BYTES 64u      /* what expertd keeps of an expert, its policy included */
#define SLOT_BYTES 160u       /* of a slot: its table, its ring entries */
#define PART_OF_REQUESTS 64u  /* kept requests take this part of the weights' memory */
#define PART_OF_HTTP 32u      /* what clients send takes this part of the limit */
/* A pass reads the trunk once and each expert that one of its rows chose once; of the released shape 64 rows choose 68% of a
 * layer's experts, 512 all of them.  So a prompt of 512 tokens costs 1.6 TB of reads in one pass and 8.8 TB in eight,
 * while the 0.3 GB of its buffers, pinned, would save 0.3 of some 130 GB of every other token.  Beyond 512 rows a pass
 * only gets longer for the others in it, so that is for a single sequence. */
#define ROWS_DEFAULT 64u
#define ROWS_SHARED 512u
#define ROWS_MOST 2048u
#define PART_OF_ROWS 24u
#define SMALL_ROWS_BYTES (16u << 20)
/* A snapshot of the released shape with 4,096 positions is 0.7 GB: pinned instead, that would save half a percent of what a token
 * reads, while a history of 512 tokens that has to be computed again reads as much as twelve tokens.  Three of a sequence: of a
 * conversation its history and its end, and one for what comes between. */
#define PART_OF_SNAPSHOTS 8u
#define SNAPSHOTS_OF_SEQUENCE 3u

static uint64_t sum(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX / 4 || b > UINT64_MAX / 4 ? UINT64_MAX / 4 : a + b;
}

static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t n;

    return __builtin_mul_overflow(a, b, &n) || n > UINT64_MAX / 4 ? UINT64_MAX / 4 : n;
}

static void note(struct k3_plan *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(struct k3_plan *p, const char *fmt, ...)
{
    va_list ap;

    if (p->n_notes == sizeof(p->note) / sizeof(p->note[0]))
        return;
    va_start(ap, fmt);
    vsnprintf(p->note[p->n_notes++], sizeof(p->note[0]), fmt, ap);
    va_end(ap);
}

/* ---- parts -------------------------------------------------------------------------------------------------------- */

static uint32_t n_moe_layers(const struct k3_config *c)
{
    return c->n_layers > c->first_dense ? c->n_layers - c->first_dense : 0;
}

static uint64_t n_experts(const struct k3_model *m)
{
    return (uint64_t)n_moe_layers(&m->cfg) * m->cfg.n_experts;
}

static uint64_t n_tensors(const struct k3_model *m)
{
    return m->n_matrices + m->n_residents + 6 * (uint64_t)m->cfg.n_experts * n_moe_layers(&m->cfg) + 1024;
}

/* Everything that does not depend on how much trunk and how many experts there are. */
static void fill_fixed(struct k3_plan *p, const struct k3_model *m)
{
    const struct k3_config *c = &m->cfg;
    const struct k3_plan_opts *o = &p->opts;
    uint64_t states = times(o->sequences, k3_state_bytes(c, o->ctx)), engine;
    uint64_t kv = times(times(k3_state_kv_bytes(c), o->ctx), o->sequences);

    engine = states < UINT64_MAX / 4 ? k3_engine_bytes(c, o->ctx, o->sequences, o->batch_rows) - states : 0;
    p->part[K3_PLAN_KV] = kv < states ? kv : states;
    p->part[K3_PLAN_STATE] = states - p->part[K3_PLAN_KV];
    p->part[K3_PLAN_SNAPSHOTS] = sum(k3_prefix_bytes(c, o->ctx, o->snapshots), 0);
    p->part[K3_PLAN_ROWS] = sum(k3_pass_bytes(c, o->batch_rows), 0);
    p->part[K3_PLAN_LOGITS] = engine;
    p->part[K3_PLAN_SCRATCH] = times(o->threads, sum(k3_pass_thread_bytes(c, o->ctx), 64u << 10)); /* and its stack */
    p->part[K3_PLAN_REQUESTS] = (uint64_t)o->requests_mb << 20;
    /* Both weight daemons may be restarting at the same time, with their segments in place. */
    p->part[K3_PLAN_LOADING] = 2 * (TENSOR_BYTES * n_tensors(m) + 2 * MB);
    p->part[K3_PLAN_SERVER] = o->http ? (uint64_t)o->http_mb << 20 : 0;
    p->part[K3_PLAN_PROGRAMS] = PROGRAM_BYTES;
}

static int fill_trunk(struct k3_plan *p, const struct k3_model *m, uint64_t trunk_bytes, struct k3_err *err)
{
    uint32_t align_bytes = k3_model_dio_align(m);
    uint8_t *pinned = calloc(m->n_pieces ? m->n_pieces : 1, 1);
    struct k3_layout l = { 0 };
    uint64_t ring_bytes;
    int rc = pinned ? k3_trunkd_budget(m, align_bytes, trunk_bytes, p->opts.ring_mb, &ring_bytes, pinned, err)
                    : k3_fail(err, -ENOMEM, "no memory for the pinned set of %zu pieces", m->n_pieces);

    if (rc == 0)
        rc = k3_layout_build(&l, m, align_bytes, ring_bytes, pinned, err);
    free(pinned);
    if (rc < 0)
        return rc;
    p->trunk_bytes = trunk_bytes;
    p->trunk_total_bytes = m->trunk_bytes;
    p->pinned_bytes = l.pinned_payload_bytes;
    p->trunk_read_bytes = l.pass_bytes;
    p->part[K3_PLAN_RING] = l.ring_bytes;
    p->part[K3_PLAN_PINNED] = l.ring_off - l.pinned_off;
    p->part[K3_PLAN_RESIDENT] = l.pinned_off;
    k3_layout_free(&l);
    return 0;
}

static int fill_experts(struct k3_plan *p, const struct k3_model *m, uint64_t cache_bytes, struct k3_err *err)
{
    struct k3_arena_size size;
    uint64_t wanted = (uint64_t)n_moe_layers(&m->cfg) * m->cfg.top_k;
    int rc = k3_expertd_budget(m, cache_bytes, &size, err);

    if (rc < 0)
        return rc;
    p->cache_bytes = cache_bytes;
    p->n_slots = size.n_slots;
    p->n_experts = size.n_experts_all;
    p->part[K3_PLAN_SLOTS] = size.data_bytes;
    /* As if experts were chosen at random, which is the least that a cache saves. */
    p->expert_read_bytes = size.n_experts_all ? (uint64_t)((double)wanted * (double)size.slot_bytes *
                                                           (double)(size.n_experts_all - size.n_slots) /
                                                           (double)size.n_experts_all)
                                              : 0;
    return 0;
}

/* What follows from the other parts. */
static void fill_rest(struct k3_plan *p, const struct k3_model *m)
{
    uint64_t data, private = 0;

    data = sum(sum(p->part[K3_PLAN_RING], p->part[K3_PLAN_PINNED]), sum(p->part[K3_PLAN_RESIDENT], p->part[K3_PLAN_SLOTS]));
    for (int i = K3_PLAN_STATE; i <= K3_PLAN_REQUESTS; i++)
        private = sum(private, p->part[i]);
    p->part[K3_PLAN_INDEX] = sum(times(PIECE_BYTES, m->n_pieces),
                                 sum(times(EXPERT_BYTES, n_experts(m)), times(SLOT_BYTES, p->n_slots)));
    /* 8 bytes for each 4 KiB page and process: where the kernel gives 2 MiB pages it is less. */
    p->part[K3_PLAN_TABLES] = sum(data / 256, sum(p->part[K3_PLAN_RING] / 256, private / 512)) + MB;
    p->segment_bytes = data + 2 * MB; /* and the control segments */
    p->sum_bytes = 0;
    for (int i = 0; i < K3_N_PLAN; i++)
        p->sum_bytes = sum(p->sum_bytes, p->part[i]);
}

static int fill(struct k3_plan *p, const struct k3_model *m, uint64_t trunk_bytes, uint64_t cache_bytes, struct k3_err *err)
{
    int rc = fill_trunk(p, m, trunk_bytes, err);

    if (rc == 0)
        rc = fill_experts(p, m, cache_bytes, err);
    if (rc < 0)
        return rc;
    fill_fixed(p, m);
    fill_rest(p, m);
    return 0;
}

/* ---- least and most ----------------------------------------------------------------------------------------------- */

static uint64_t least_cache(const struct k3_model *m)
{
    return m->expert_slot_bytes * (n_moe_layers(&m->cfg) ? m->cfg.top_k : 1);
}

static uint64_t most_cache(const struct k3_model *m)
{
    uint64_t n = n_experts(m);

    return m->expert_slot_bytes * (n ? n : 1);
}

/* Room for every piece in its own pages, and the ring that is there even then. */
static uint64_t most_trunk(const struct k3_plan *p, const struct k3_model *m)
{
    uint64_t a = k3_model_dio_align(m), ring = (uint64_t)p->opts.ring_mb << 20, n = ring ? ring : K3_HUGE_BYTES;

    for (size_t i = 0; i < m->n_pieces; i++)
        n += (m->pieces[i].off_bytes % a + m->pieces[i].len_bytes + a - 1) / a * a;
    return n;
}

/* The ring alone. */
static uint64_t least_trunk(const struct k3_plan *p, const struct k3_model *m)
{
    uint64_t ring = (uint64_t)p->opts.ring_mb << 20, all = most_trunk(p, m);

    if (ring == 0)
        ring = (uint64_t)256 << 20;
    return all < ring ? all : ring;
}

uint64_t k3_plan_most_bytes(const struct k3_plan *p, const struct k3_model *m)
{
    struct k3_plan most = *p;

    return fill(&most, m, most_trunk(p, m), most_cache(m), NULL) == 0 ? most.sum_bytes : UINT64_MAX;
}

/* weights: memory that could be theirs. */
static void choose_snapshots(struct k3_plan *p, const struct k3_model *m, uint64_t weights, uint64_t limit_bytes)
{
    uint64_t most = weights / PART_OF_SNAPSHOTS, n = (uint64_t)SNAPSHOTS_OF_SEQUENCE * p->opts.sequences;

    if (most < SMALL_ROWS_BYTES)
        most = limit_bytes / PART_OF_ROWS < SMALL_ROWS_BYTES ? limit_bytes / PART_OF_ROWS : SMALL_ROWS_BYTES;
    most /= k3_prefix_bytes(&m->cfg, p->opts.ctx, 1);
    n = n < K3_SNAPSHOTS_MAX ? n : K3_SNAPSHOTS_MAX;
    p->opts.snapshots = (uint32_t)(most < n ? most : n);
}

/* What the plan may choose and what was not given. */
static void choose(struct k3_plan *p, const struct k3_model *m, uint64_t limit_bytes, bool given)
{
    uint64_t weights = sum(most_trunk(p, m), most_cache(m)), most;
    uint32_t rows = p->opts.sequences > 1 ? ROWS_SHARED : ROWS_MOST;

    weights = weights < limit_bytes ? weights : limit_bytes;
    most = weights / PART_OF_REQUESTS;
    p->opts.requests_mb = (uint32_t)(most >> 20 < 16 ? 16 : most >> 20 > 256 ? 256 : most >> 20);
    most = limit_bytes / PART_OF_HTTP;
    p->opts.http_mb = (uint32_t)(most >> 20 < 32 ? 32 : most >> 20 > 512 ? 512 : most >> 20);
    if (p->opts.snapshots == K3_PLAN_CHOOSE)
        choose_snapshots(p, m, weights, limit_bytes);
    if (given)
        return;
    p->opts.batch_rows = ROWS_DEFAULT;
    most = weights / PART_OF_ROWS;
    if (most < SMALL_ROWS_BYTES) /* of a small model they cost nothing */
        most = limit_bytes / PART_OF_ROWS < SMALL_ROWS_BYTES ? limit_bytes / PART_OF_ROWS : SMALL_ROWS_BYTES;
    while (p->opts.batch_rows < rows && p->opts.batch_rows < p->opts.ctx &&
           k3_pass_bytes(&m->cfg, 2 * p->opts.batch_rows) <= most)
        p->opts.batch_rows *= 2;
}

/* Budgets that were given come before snapshots and rows that were not. */
static int fill_given(struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *given, uint64_t trunk_bytes,
                      uint64_t cache_bytes, uint64_t limit_bytes, struct k3_err *err)
{
    int rc = fill(p, m, trunk_bytes, cache_bytes, err);

    while (rc == 0 && p->sum_bytes > limit_bytes && given->snapshots == K3_PLAN_CHOOSE && p->opts.snapshots) {
        p->opts.snapshots /= 2;
        rc = fill(p, m, trunk_bytes, cache_bytes, err);
    }
    while (rc == 0 && p->sum_bytes > limit_bytes && given->batch_rows == 0 && p->opts.batch_rows > ROWS_DEFAULT) {
        p->opts.batch_rows /= 2;
        rc = fill(p, m, trunk_bytes, cache_bytes, err);
    }
    return rc;
}

/* The floor into the limit: first as it is, then without snapshots, then with a smaller ring and fewer rows, where those were not
 * given. */
static int fill_floor(struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *given, uint64_t limit_bytes,
                      struct k3_err *err)
{
    static const struct { uint32_t ring_mb, rows; } steps[] = { { 0, 0 }, { 0, 64 }, { 128, 64 }, { 128, 16 }, { 64, 16 }, { 64, 4 },
                                                                { 32, 4 }, { 32, 1 }, { 16, 1 }, { 8, 1 }, { 4, 1 } };
    uint64_t whole_bytes = most_trunk(p, m); /* a ring that is larger than the trunk makes nothing smaller */
    uint32_t rows = p->opts.batch_rows;
    int rc = 0;

    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        struct k3_plan_opts *o = &p->opts;
        struct k3_plan smaller = *p;

        o->ring_mb = given->ring_mb ? given->ring_mb : (uint64_t)steps[i].ring_mb << 20 < whole_bytes ? steps[i].ring_mb : 0;
        o->batch_rows = given->batch_rows || steps[i].rows == 0 ? rows : steps[i].rows;
        rc = fill(p, m, least_trunk(p, m), least_cache(m), i == 0 ? err : NULL);
        if (rc == 0 && p->sum_bytes > limit_bytes && given->snapshots == K3_PLAN_CHOOSE && o->snapshots) {
            o->snapshots = 0;
            rc = fill(p, m, least_trunk(p, m), least_cache(m), err);
        }
        if (rc < 0 && i > 0) { /* a ring smaller than two rows: what was before is the least */
            *p = smaller;
            return 0;
        }
        if (rc < 0 || p->sum_bytes <= limit_bytes) {
            if (rc == 0 && i > 0)
                note(p, "so little memory: a ring of %u MiB and %u row%s of a pass", (unsigned)(p->part[K3_PLAN_RING] >> 20),
                     o->batch_rows, o->batch_rows == 1 ? "" : "s");
            return rc;
        }
    }
    return 0;
}

/* ---- words -------------------------------------------------------------------------------------------------------- */

/* "23.1 GB are available (MemAvailable, less 8.1 GB promised to 1 other instance)" */
static void there_is(char *out, size_t len, const struct k3_plan_machine *mc, uint64_t left)
{
    char a[K3_SIZE_TEXT], b[K3_SIZE_TEXT];

    if (mc->promised_bytes)
        snprintf(out, len, "%s are available (%s, less %s promised to %u other instance%s)", k3_size_text(a, left), mc->why,
                 k3_size_text(b, mc->promised_bytes), mc->n_others, mc->n_others == 1 ? "" : "s");
    else
        snprintf(out, len, "%s are available (%s)", k3_size_text(a, left), mc->why);
}

static bool fits_with(const struct k3_model *m, struct k3_plan_opts o, const struct k3_plan *p, uint64_t limit)
{
    struct k3_plan q = { .opts = o };

    q.opts.requests_mb = p->opts.requests_mb;
    q.opts.http_mb = p->opts.http_mb;
    if (q.opts.batch_rows == 0)
        q.opts.batch_rows = ROWS_DEFAULT;
    if (q.opts.snapshots == K3_PLAN_CHOOSE)
        q.opts.snapshots = 0;
    return fill_floor(&q, m, &o, limit, NULL) == 0 && q.sum_bytes <= limit;
}

static void add_word(char *out, size_t len, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void add_word(char *out, size_t len, const char *fmt, ...)
{
    size_t n = strlen(out);
    va_list ap;

    if (n)
        n += (size_t)snprintf(out + n, len - n, ", or ");
    if (n >= len)
        return;
    va_start(ap, fmt);
    vsnprintf(out + n, len - n, fmt, ap);
    va_end(ap);
}

/* The least --memory that is enough; what requests may keep grows with it, so it takes a few steps. */
static uint64_t least_memory(const struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *o)
{
    uint64_t to = p->sum_bytes;

    for (int i = 0; i < 8; i++) {
        struct k3_plan q = { .opts = *o };

        to = ((to >> 20) + 1) << 20;
        choose(&q, m, to, o->batch_rows != 0);
        if (fill_floor(&q, m, o, to, NULL) < 0 || q.sum_bytes <= to)
            break;
        to = q.sum_bytes;
    }
    return to;
}

/* Options with which the floor would fit. */
static int refuse_floor(struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *o, uint64_t limit,
                        const struct k3_plan_machine *mc, uint64_t left, struct k3_err *err)
{
    char words[256] = "", there[400], a[K3_SIZE_TEXT], b[K3_SIZE_TEXT], c[K3_SIZE_TEXT];
    struct k3_plan_opts less;
    const struct { const char *name; uint32_t *value; } halve[] = {
        { "--ctx", &less.ctx }, { "--sequences", &less.sequences }, { "--batch-rows", &less.batch_rows },
        { "--ring-mb", &less.ring_mb }, { "--snapshots", &less.snapshots },
    };
    char given[64] = "";

    for (size_t i = 0; i < sizeof(halve) / sizeof(*halve); i++) {
        uint32_t *v = halve[i].value;

        less = *o;
        if (v == &less.snapshots && (*v == K3_PLAN_CHOOSE || *v == 0)) /* they are gone already */
            continue;
        for (*v /= 2; *v >= 1; *v /= 2) {
            if (v == &less.ring_mb && (*v -= *v % 2) == 0) /* whole 2 MiB pages */
                break;
            if (fits_with(m, less, p, limit))
                break;
        }
        if (*v >= 1 || (v == &less.snapshots && fits_with(m, less, p, limit)))
            add_word(words, sizeof(words), "%s %u", halve[i].name, *v);
    }
    if (o->memory_bytes != K3_PLAN_UNSET) {
        uint64_t least = least_memory(p, m, o);

        if (least <= left)
            add_word(words, sizeof(words), "--memory %" PRIu64 "M", least >> 20);
    }
    there_is(there, sizeof(there), mc, left);
    if (limit < left)
        snprintf(there + strlen(there), sizeof(there) - strlen(there), ", of which the family may take %s", k3_size_text(a, limit));
    if (o->ring_mb)
        snprintf(given, sizeof(given), "--ring-mb %u, ", o->ring_mb);
    if (p->opts.snapshots)
        snprintf(given + strlen(given), sizeof(given) - strlen(given), "--snapshots %u, ", p->opts.snapshots);
    if (o->memory_bytes != K3_PLAN_UNSET)
        return k3_refuse(err, -ENOMEM, "--memory %s is %s less than the %s that this model needs at least with %s--ctx %u, "
                         "--sequences %u and %u row%s; %s%s", k3_size_text(a, limit), k3_size_text(b, p->sum_bytes - limit),
                         k3_size_text(c, p->sum_bytes), given, o->ctx, o->sequences, p->opts.batch_rows, p->opts.batch_rows == 1 ? "" : "s",
                         words[0] ? "what would fit: " : "more memory is needed", words);
    return k3_refuse(err, -ENOMEM, "this model needs at least %s with %s--ctx %u, --sequences %u and %u row%s, %s: %s are "
                     "missing; %s%s", k3_size_text(a, p->sum_bytes), given, o->ctx, o->sequences, p->opts.batch_rows,
                     p->opts.batch_rows == 1 ? "" : "s", there,
                     k3_size_text(b, p->sum_bytes - limit), words[0] ? "what would fit: " : "more memory is needed", words);
}

/* Budgets were given and are too large together. */
static int refuse_budgets(struct k3_plan *p, const struct k3_model *m, uint64_t limit, const struct k3_plan_machine *mc,
                          uint64_t left, struct k3_err *err)
{
    const struct k3_plan_opts *o = &p->opts;
    struct k3_plan q = *p;
    uint64_t over = p->sum_bytes - limit, trunk, cache, spare_trunk, spare_cache;
    char words[256] = "", there[400], a[K3_SIZE_TEXT], b[K3_SIZE_TEXT];

    /* What is more than the model has is not taken, so nothing is saved with it. */
    trunk = p->trunk_bytes < most_trunk(p, m) ? p->trunk_bytes : most_trunk(p, m);
    cache = p->cache_bytes < most_cache(m) ? p->cache_bytes : most_cache(m);
    spare_trunk = trunk > least_trunk(p, m) ? trunk - least_trunk(p, m) : 0;
    spare_cache = cache > least_cache(m) ? cache - least_cache(m) : 0;
    over += over / 128 + 8 * MB; /* page tables, rounding */
    if (o->memory_bytes == K3_PLAN_UNSET)
        over += limit / 64; /* what is available changes from one moment to the next */
    if (spare_trunk >= over)
        add_word(words, sizeof(words), "--trunk-gb %.2f", (double)((trunk - over) / (10 * MB)) / 100);
    if (spare_cache >= over)
        add_word(words, sizeof(words), "--cache-gb %.2f", (double)((cache - over) / (10 * MB)) / 100);
    if (!words[0] && spare_trunk + spare_cache >= over) { /* the trunk is worth more */
        uint64_t of_cache = over < spare_cache ? over : spare_cache;

        add_word(words, sizeof(words), "--trunk-gb %.2f with --cache-gb %.2f",
                 (double)((trunk - (over - of_cache)) / (10 * MB)) / 100, (double)((cache - of_cache) / (10 * MB) + 1) / 100);
    }
    if (fill_floor(&q, m, o, limit, NULL) == 0 && q.sum_bytes <= limit)
        add_word(words, sizeof(words), "%s",
                 o->memory_bytes != K3_PLAN_UNSET ? "--memory without --trunk-gb and --cache-gb" : "--preset auto");
    if (!words[0])
        add_word(words, sizeof(words), "fewer --sequences, a shorter --ctx");
    if (o->memory_bytes != K3_PLAN_UNSET)
        snprintf(there, sizeof(there), "--memory is %s", k3_size_text(a, limit));
    else
        there_is(there, sizeof(there), mc, left);
    return k3_refuse(err, -ENOMEM, "the plan (--trunk-gb %.4g, --cache-gb %.4g and what else is needed) takes %s, but %s: %s "
                     "are missing; what would fit: %s", (double)p->trunk_bytes / 1e9, (double)p->cache_bytes / 1e9,
                     k3_size_text(b, p->sum_bytes), there, k3_size_text((char[K3_SIZE_TEXT]){ "" }, p->sum_bytes - limit), words);
}

/* ---- the division ------------------------------------------------------------------------------------------------- */

/* Gives what is free under the limit to one of the two, up to its most; the other stays. */
static int grow(struct k3_plan *p, const struct k3_model *m, bool trunk, uint64_t limit, struct k3_err *err)
{
    uint64_t most = trunk ? most_trunk(p, m) : most_cache(m);
    uint64_t least = trunk ? p->trunk_bytes : p->n_slots * m->expert_slot_bytes;
    uint64_t step = limit > p->sum_bytes ? limit - p->sum_bytes : 0;

    for (int i = 0; i < 20 && step >= MB && least < most; i++) { /* rounding and page tables: a few steps settle it */
        struct k3_plan q = *p;
        uint64_t to = sum(least, step - step / 128);
        int rc;

        to = to < most ? to : most;
        rc = fill(&q, m, trunk ? to : p->trunk_bytes, trunk ? p->cache_bytes : to, err);
        if (rc < 0)
            return rc;
        if (q.sum_bytes > limit || q.sum_bytes == p->sum_bytes) {
            step /= 2;
            continue;
        }
        *p = q;
        least = trunk ? to : p->n_slots * m->expert_slot_bytes;
        step = limit - p->sum_bytes;
    }
    return 0;
}

static int share(struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *given, uint64_t limit,
                 const struct k3_plan_machine *mc, uint64_t left, struct k3_err *err)
{
    bool has_trunk = given->trunk_bytes != K3_PLAN_UNSET, has_cache = given->cache_bytes != K3_PLAN_UNSET;
    int rc;

    rc = fill_floor(p, m, given, limit, err);
    if (rc < 0)
        return rc;
    if (p->sum_bytes > limit)
        return refuse_floor(p, m, given, limit, mc, left, err);
    if (has_trunk || has_cache) {
        uint64_t trunk = has_trunk ? given->trunk_bytes : p->trunk_bytes, cache = has_cache ? given->cache_bytes : p->cache_bytes;

        rc = fill_given(p, m, given, trunk, cache, limit, err);
        if (rc < 0)
            return rc;
        if (p->sum_bytes > limit)
            return refuse_budgets(p, m, limit, mc, left, err);
    }
    if (given->split) {
        rc = has_cache ? 0 : grow(p, m, false, limit, err);
        if (rc == 0 && !has_trunk)
            rc = grow(p, m, true, limit, err);
        snprintf(p->reason, sizeof(p->reason), "trunk and experts are read from different devices at the same time: the ring "
                 "first, the rest to the experts");
    } else {
        rc = has_trunk ? 0 : grow(p, m, true, limit, err);
        if (rc == 0 && !has_cache)
            rc = grow(p, m, false, limit, err);
        snprintf(p->reason, sizeof(p->reason), "trunk and experts share a device: the trunk first, since each gigabyte pinned "
                 "is a gigabyte less for every token");
    }
    if (has_trunk && has_cache)
        snprintf(p->reason, sizeof(p->reason), "--trunk-gb and --cache-gb as they were given");
    else if (has_trunk)
        snprintf(p->reason, sizeof(p->reason), "--trunk-gb as it was given, the rest to the experts");
    else if (has_cache)
        snprintf(p->reason, sizeof(p->reason), "--cache-gb as it was given, the rest to the trunk");
    return rc;
}

/* What a preset and the options after it say; false when it does not fit into --memory. */
static int take_budgets(struct k3_plan *p, const struct k3_model *m, const struct k3_plan_opts *given, uint64_t limit,
                        bool *too_large, struct k3_err *err)
{
    const struct k3_preset *pre = given->preset;
    uint64_t trunk = given->trunk_bytes, cache = given->cache_bytes, most;
    int rc;

    if (trunk == K3_PLAN_UNSET)
        trunk = pre ? (uint64_t)(pre->trunk_gb * 1e9) : 1000 * MB;
    if (cache == K3_PLAN_UNSET)
        cache = pre ? (uint64_t)(pre->cache_gb * 1e9) : 1000 * MB;
    most = most_trunk(p, m);
    trunk = trunk < most ? trunk : most;
    most = most_cache(m);
    cache = cache < most ? cache : most;
    rc = fill_given(p, m, given, trunk, cache, limit, err);
    *too_large = rc == 0 && p->sum_bytes > limit;
    if (pre && given->trunk_bytes == K3_PLAN_UNSET && given->cache_bytes == K3_PLAN_UNSET)
        snprintf(p->reason, sizeof(p->reason), "preset %s (%g GB trunk, %g GB experts)", pre->name, pre->trunk_gb, pre->cache_gb);
    else if (pre)
        snprintf(p->reason, sizeof(p->reason), "preset %s (%g GB trunk, %g GB experts) and the options after it", pre->name,
                 pre->trunk_gb, pre->cache_gb);
    else
        snprintf(p->reason, sizeof(p->reason), "--trunk-gb and --cache-gb as they were given; 1 where one was not");
    return rc;
}

static int check_given(const struct k3_plan_opts *o, uint64_t left, const struct k3_plan_machine *mc, struct k3_err *err)
{
    char there[400], a[K3_SIZE_TEXT];

    if (o->memory_bytes == K3_PLAN_UNSET || o->memory_bytes <= left)
        return 0;
    there_is(there, sizeof(there), mc, left);
    return k3_refuse(err, -ENOMEM, "--memory of %s is more than there is: %s; what would fit: --memory %" PRIu64 "M, or "
                     "--preset auto", k3_size_text(a, o->memory_bytes), there, left >> 20);
}

int k3_plan_make(struct k3_plan *out, const struct k3_model *m, const struct k3_plan_opts *opts,
                 const struct k3_plan_machine *mc, struct k3_err *err)
{
    bool has_memory = opts->memory_bytes != K3_PLAN_UNSET;
    bool has_budget = opts->preset || opts->trunk_bytes != K3_PLAN_UNSET || opts->cache_bytes != K3_PLAN_UNSET;
    uint64_t left = mc->left_bytes, limit, most;
    bool too_large = false;
    char a[K3_SIZE_TEXT], b[K3_SIZE_TEXT];
    int rc;

    *out = (struct k3_plan){ .opts = *opts };
    if (left != K3_MEMORY_NONE)
        left = left > mc->promised_bytes ? left - mc->promised_bytes : 0;
    rc = check_given(opts, left, mc, err);
    if (rc < 0)
        return rc;
    limit = has_memory ? opts->memory_bytes : left;
    if (!has_memory && (!has_budget || opts->auto_preset) && left != K3_MEMORY_NONE) {
        uint64_t back = K3_PLAN_AUTO_BYTES + left / 50;

        limit = left > back ? left - back : 0;
    }
    limit = limit < UINT64_MAX / 8 ? limit : UINT64_MAX / 8;
    choose(out, m, limit, opts->batch_rows != 0);
    out->limit_bytes = limit;
    if (opts->preset || (has_budget && !has_memory && !opts->auto_preset)) {
        rc = take_budgets(out, m, opts, limit, &too_large, err);
        if (rc < 0)
            return rc;
        if (too_large && !(has_memory && opts->preset))
            return refuse_budgets(out, m, limit, mc, left, err);
        if (too_large) {
            note(out, "--memory binds, not the preset: %s would take %s, %s are promised", opts->preset->name,
                 k3_size_text(a, out->sum_bytes), k3_size_text(b, limit));
            rc = share(out, m, opts, limit, mc, left, err);
        } else if (has_memory) {
            note(out, "the preset binds, not --memory: %s takes %s of the %s allowed", opts->preset->name,
                 k3_size_text(a, out->sum_bytes), k3_size_text(b, limit));
        }
    } else {
        rc = share(out, m, opts, limit, mc, left, err);
    }
    if (rc < 0)
        return rc;
    most = k3_plan_most_bytes(out, m);
    if (out->sum_bytes >= most && has_memory && limit > most + most / 100)
        note(out, "the model can use no more than %s: the rest of the %s is not taken", k3_size_text(a, most), k3_size_text(b, limit));
    if (mc->shm_bytes != K3_MEMORY_NONE && out->segment_bytes > mc->shm_bytes)
        out->memfd = true;
    return 0;
}

double k3_plan_seconds(const struct k3_plan *p, double trunk_bytes_per_s, double expert_bytes_per_s)
{
    double t = trunk_bytes_per_s > 0 ? (double)p->trunk_read_bytes / trunk_bytes_per_s : 0;
    double e = expert_bytes_per_s > 0 ? (double)p->expert_read_bytes / expert_bytes_per_s : 0;

    return p->opts.split ? (t > e ? t : e) : t + e;
}
