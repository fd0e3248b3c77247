#include "tests/unit/engine_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct k3_world k3_ew_demo;
const uint32_t k3_ew_france[K3_EW_N_FRANCE] = { 1283, 367, 377,  375, 359,  1,    1285, 288, 262, 264,
                                                319,  268, 1055, 30,  1284, 367,  1285, 1282, 1283, 367,
                                                377,  375, 373,  1,   1285, 1283, 366,  1285 };
uint32_t k3_ew_long[300], k3_ew_snapshots;

static void die(const char *what, const char *text)
{
    fprintf(stderr, "%s: %s\n", what, text);
    abort();
}

int k3_ew_open_demo(void **state)
{
    (void)state;
    if (access(DEMO_DIR "/config.json", R_OK) != 0)
        die(DEMO_DIR, "is not there: run the tests at the top of the tree");
    k3_world_open(&k3_ew_demo, DEMO_DIR);
    for (uint32_t i = 0; i < 300; i++)
        k3_ew_long[i] = i * 37 % 1200;
    return 0;
}

int k3_ew_close_demo(void **state)
{
    (void)state;
    k3_world_close(&k3_ew_demo);
    return 0;
}

static uint64_t clock_of(void *arg)
{
    struct k3_ew *ew = arg;

    return ew->now_ns;
}

static void tick(void *arg)
{
    struct k3_ew *ew = arg;

    if (++ew->n_ticks == ew->act_at)
        ew->act(ew);
}

static struct k3_ew *open_world; /* the one that runs: the source's self is the file source's */

static int spoiling_rows(void *self, uint32_t piece, uint32_t row, uint32_t n_rows, const void **rows,
                         struct k3_err *err)
{
    struct k3_ew *ew = open_world;
    int rc = k3_file_source(ew->run.file)->rows(self, piece, row, n_rows, rows, err);

    if (rc == 0 && ew->nan_logits && ew->w->m->matrices[ew->w->m->pieces[piece].matrix].role == K3_W_LM_HEAD)
        memset((void *)(uintptr_t)*rows, 0xff, 4); /* a NaN in every dtype; the block is the file source's own copy */
    return rc;
}

void k3_ew_open(struct k3_ew *ew, struct k3_world *w, uint32_t n_sequences, uint32_t batch_rows, uint32_t ctx)
{
    k3_ew_open_team(ew, w, n_sequences, batch_rows, ctx, 1);
}

uint64_t k3_ew_stat(const struct k3_ew *ew, enum k3_computed_stat stat)
{
    return ew->value[ew->entry[stat].value];
}

void k3_ew_open_team(struct k3_ew *ew, struct k3_world *w, uint32_t n_sequences, uint32_t batch_rows, uint32_t ctx,
                     uint32_t threads)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_engine_opts o;

    memset(ew, 0, sizeof(*ew));
    ew->w = w;
    for (uint32_t i = 0; i < K3_N_CS; i++)
        ew->entry[i].value = i * (K3_HIST_BUCKETS + 1);
    ew->stats = (struct k3_stats){ .page = &ew->page, .entry = ew->entry, .value = ew->value };
    if (!k3_runner_open(&ew->run, w, (struct k3_world_opts){ .threads = threads, .max_rows = batch_rows, .kernels = "auto" }))
        die("runner", "no kernels");
    k3_file_source_pin_gates(ew->run.file);
    if (k3_tracer_new(&ew->tracer, w->m, batch_rows, &ew->stop, &err) < 0)
        die("tracer", err.text);
    ew->source = *k3_file_source(ew->run.file);
    ew->source.rows = spoiling_rows;
    ew->outer = open_world;
    open_world = ew;
    o = (struct k3_engine_opts){ .m = w->m, .pass = ew->run.pass, .source = &ew->source, .stats = &ew->stats,
                                 .meter = &ew->meter, .abort = &ew->abort, .stop = &ew->stop, .ctx = ctx,
                                 .n_sequences = n_sequences, .batch_rows = batch_rows, .generation = 3,
                                 .n_snapshots = k3_ew_snapshots,
                                 .tracer = ew->tracer, .now_ns = clock_of, .tick = tick, .arg = ew };
    if (k3_engine_open(&ew->e, &o, &err) < 0)
        die("engine", err.text);
}

void k3_ew_close(struct k3_ew *ew)
{
    k3_engine_close(ew->e);
    k3_tracer_free(ew->tracer);
    k3_runner_close(&ew->run);
    open_world = ew->outer;
}

uint32_t k3_ew_run(struct k3_ew *ew)
{
    uint32_t n = 0;

    while (k3_engine_step(ew->e) > 0)
        if (++n > 5000)
            die("engine", "does not come to an end");
    return n;
}

struct k3_submit k3_ew_submit(unsigned id, const uint32_t *prompt, uint32_t n_prompt)
{
    struct k3_submit s = { .prompt = prompt, .n_prompt = n_prompt, .max_tokens = 16,
                           .sampling = { .temperature = 0, .top_p = 1 } };

    snprintf(s.id, sizeof(s.id), "%032x", id);
    return s;
}

struct k3_submit k3_ew_sampled(unsigned id)
{
    struct k3_submit s = k3_ew_submit(id, k3_ew_france, 12);

    s.sampling = (struct k3_sampling){ .temperature = 1.3, .top_p = 0.98, .top_k = 200, .seed = 4711 + id };
    s.max_tokens = 12;
    return s;
}

void k3_ew_must_submit(struct k3_ew *ew, const struct k3_submit *s)
{
    struct k3_submit own = *s;
    struct k3_err err = K3_ERR_INIT;
    bool known;

    if (k3_engine_submit(ew->e, &own, false, &known, &err) < 0)
        die("submit", err.text);
    if (known)
        die("submit", "known already");
}

static const char *string_of(const cJSON *o, const char *name)
{
    const char *s = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, name));

    return s ? s : "";
}
static double number_of(const cJSON *o, const char *name)
{
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(o, name);

    if (!cJSON_IsNumber(n))
        die("event without number", name);
    return n->valuedouble;
}

void k3_ew_answer(struct k3_ew *ew, const char *id, struct k3_ew_answer *a)
{
    cJSON *reply = cJSON_CreateObject(), *event;
    struct k3_err err = K3_ERR_INIT;
    uint32_t i = 0;

    memset(a, 0, sizeof(*a));
    a->stop_id = -1;
    if (k3_engine_poll(ew->e, id, 0, -1, 0, reply, &err) < 0)
        die("poll", err.text);
    snprintf(a->state, sizeof(a->state), "%s", string_of(reply, "state"));
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(reply, "events")) {
        const char *type = string_of(event, "type");

        if (number_of(event, "i") != i++ || a->end[0])
            die("events", "out of order");
        if (strcmp(type, "token") == 0) {
            if (a->n_tokens == 0)
                a->first_index = (uint32_t)number_of(event, "index");
            if (number_of(event, "index") != a->first_index + a->n_tokens)
                die("events", "token out of order");
            a->token[a->n_tokens++] = (uint32_t)number_of(event, "token");
        } else if (strcmp(type, "logits") == 0) {
            if (a->n_tokens || number_of(event, "n") != ew->w->m->cfg.vocab)
                die("events", "logits after a token or of a wrong size");
            a->has_logits = true;
            a->logits_hash = 14695981039346656037ull;
            for (const char *p = string_of(event, "base64"); *p; p++)
                a->logits_hash = (a->logits_hash ^ (unsigned char)*p) * 1099511628211ull;
        } else if (strcmp(type, "done") == 0) {
            snprintf(a->end, sizeof(a->end), "%s", string_of(event, "reason"));
            if (strcmp(a->end, "stop") == 0)
                a->stop_id = (long)number_of(event, "stop_id");
        } else {
            snprintf(a->end, sizeof(a->end), "%s", type);
            a->code = (int)number_of(event, "code");
            snprintf(a->message, sizeof(a->message), "%s", string_of(event, "message"));
        }
    }
    if (number_of(reply, "next") != i)
        die("poll", "next is not the number of events");
    cJSON_Delete(reply);
}

void k3_ew_ask(struct k3_ew *ew, const struct k3_submit *s, struct k3_ew_answer *a)
{
    k3_ew_must_submit(ew, s);
    k3_ew_run(ew);
    k3_ew_answer(ew, s->id, a);
}

void k3_ew_same(const struct k3_ew_answer *x, const struct k3_ew_answer *y)
{
    if (strcmp(x->end, y->end) != 0 || x->n_tokens != y->n_tokens)
        die("answers differ in end or length", x->end);
    if (memcmp(x->token, y->token, x->n_tokens * sizeof(x->token[0])) != 0)
        die("answers differ", "in a token");
}
