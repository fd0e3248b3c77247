/* Completions: a body becomes a job, the job waits for its turn, and a thread of its own asks k3-computed. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "k3-router/chat_request.h"
#include "k3-router/http.h"
#include "shm/segment.h"

#define TEXT_MAX_TOKENS 16u   /* of /v1/completions, as its documentation has it */
#define CHAT_MAX_TOKENS 4096u /* when k3-computed does not say how long a sequence may be */
#define PRUNE_EVERY 200u
#define RETRY_NS 100000000l

/* ---- hooks: all on the job's own thread ---- */

static void send_piece(struct k3_http_job *j, int rc)
{
    struct k3_http *h = j->q->h;

    pthread_mutex_lock(&h->lock);
    if (rc)
        atomic_store(&j->q->gone, true); /* no memory: a hole in the stream would be worse than its end */
    else
        k3_http_send(j->q, j->piece.bytes, j->piece.len_bytes);
    pthread_mutex_unlock(&h->lock);
    j->piece.len_bytes = 0;
}

static int on_text(void *arg, enum k3_channel channel, const char *text, size_t len_bytes)
{
    struct k3_http_job *j = arg;

    if (j->c.stream)
        send_piece(j, k3_http_chunk_text(j, channel, text, len_bytes));
    return 0;
}

static int on_call(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes)
{
    struct k3_http_job *j = arg;

    if (j->c.stream && (event == K3_CALL_BEGIN || event == K3_CALL_ARGUMENTS))
        send_piece(j, k3_http_chunk_call(j, event, index, text, len_bytes));
    return 0;
}

static int on_token(void *arg, uint32_t token)
{
    struct k3_http_job *j = arg;

    if (j->api == K3_HTTP_CHAT && j->answer.out.state == K3_OUT_IN_THINK)
        j->n_reasoning++;
    pthread_mutex_lock(&j->q->h->lock);
    j->progress.n_tokens = j->ask.generated.n;
    j->q->n_generated++;
    pthread_mutex_unlock(&j->q->h->lock);
    return k3_answer_feed(&j->answer, token);
}

static void on_progress(void *arg, const struct k3_ask_progress *p)
{
    struct k3_http_job *j = arg;

    pthread_mutex_lock(&j->q->h->lock);
    snprintf(j->progress.phase, sizeof(j->progress.phase), "%s", p->phase);
    snprintf(j->progress.waiting, sizeof(j->progress.waiting), "%s", strcmp(p->waiting, "none") ? p->waiting : "");
    j->progress.layer = p->layer;
    j->progress.layers = p->layers;
    j->progress.bytes_per_s = p->bytes_per_s;
    j->progress.eta_s = p->eta_s;
    pthread_mutex_unlock(&j->q->h->lock);
}

static void on_notice(void *arg, const char *line)
{
    struct k3_http_job *j = arg;

    if (j->c.stream)
        send_piece(j, k3_buf_printf(&j->piece, ": %s\n\n", line));
}

static bool stopping(void *arg)
{
    const struct k3_http_job *j = arg;
    bool stop;

    pthread_mutex_lock(&j->q->h->lock);
    stop = j->q->h->stopping;
    pthread_mutex_unlock(&j->q->h->lock);
    return stop;
}

/* Nobody wants the answer any more: its client has gone, or another answer to the same request has failed.  When it is the
 * server that stops, the journals are to be resumed. */
static bool on_interrupted(void *arg)
{
    const struct k3_http_job *j = arg;

    return atomic_load(&j->q->gone) || (atomic_load(&j->first->closed) && !stopping(arg));
}

/* ---- the end of a job ---- */

/* Lets go of one; the last one lets go of all. */
static void job_release(struct k3_http_job *j)
{
    struct k3_http_job *first = j->first;
    struct k3_http_req *q = j->q;
    bool last;

    pthread_mutex_lock(&q->h->lock);
    last = --first->n_refs == 0;
    pthread_mutex_unlock(&q->h->lock);
    if (!last)
        return;
    for (unsigned i = 0; i < first->c.n; i++) {
        k3_answer_close(&first[i].answer);
        k3_ask_free(&first[i].ask);
        k3_buf_free(&first[i].piece);
    }
    k3_http_common_free(&first->c);
    k3_buf_free(&first->constraint);
    free(first);
    k3_http_req_unref(q);
}

/* The last bytes of the reply.  status 0: all answers are whole. */
static void end_reply(struct k3_http_job *j, int status, const char *text, const char *end)
{
    struct k3_http_req *q = j->q;
    struct k3_http *h = q->h;
    int rc;

    j->piece.len_bytes = 0;
    if (j->c.stream)
        rc = status ? k3_http_chunk_error(j, status, text) : k3_http_chunk_end(j);
    else
        rc = status ? k3_http_error_json(&j->piece, status, NULL, NULL, text) : k3_http_whole(j);
    pthread_mutex_lock(&h->lock);
    q->end = end;
    q->job = NULL;
    q->phase = K3_HTTP_ENDED;
    if (rc)
        atomic_store(&q->gone, true);
    if (j->c.stream || q->sending || q->status) {
        k3_http_send(q, j->piece.bytes, j->piece.len_bytes);
    } else {
        if (status)
            k3_http_error(q, status, NULL, NULL, "%s", text);
        else if (k3_buf_append(&q->out, j->piece.bytes, j->piece.len_bytes) < 0)
            k3_http_error(q, 500, NULL, NULL, "no memory for the reply");
        else
            k3_http_reply(q, 200, "application/json");
    }
    k3_http_end(q);
    pthread_mutex_unlock(&h->lock);
}

/* The end of one answer, and with the last one, or one that has failed, of the reply.  status 0: the answer is whole. */
static void finish(struct k3_http_job *j, int status, const char *text, const char *end)
{
    struct k3_http_job *first = j->first;
    struct k3_http *h = j->q->h;
    bool close;

    if (j->c.stream && !status)
        send_piece(j, k3_http_chunk_last(j)); /* nothing when the reply is closed */
    pthread_mutex_lock(&h->lock);
    j->state = K3_HTTP_JOB_ENDED;
    first->n_left--;
    close = !atomic_load(&first->closed) && (status || first->n_left == 0);
    if (close)
        atomic_store(&first->closed, true);
    if (close && !h->stopping) /* else whoever stops has them */
        k3_http_unqueue(first);
    pthread_mutex_unlock(&h->lock);
    if (close)
        end_reply(j, status, text, end);
}

void k3_http_job_drop(struct k3_http_job *j, bool cancelled)
{
    if (cancelled)
        k3_journal_end(&j->ask.journal, k3_ask_end_name(K3_ASK_CANCELLED), -1, NULL);
    else
        finish(j, 503, "the server stops; ask again later", "stopped");
    job_release(j);
}

static void account(struct k3_http_job *j)
{
    const struct k3_ask *a = &j->ask;
    struct k3_http *h = j->q->h;
    struct k3_stats *s = k3_daemon_stats(h->daemon);
    double seconds;

    k3_stat_add(s, K3_HS_GENERATED, a->generated.n);
    if (a->first_ns)
        k3_stat_hist(s, K3_HS_FIRST, a->first_ns - a->start_ns);
    if (!a->end_ns)
        return;
    k3_stat_hist(s, K3_HS_SECONDS, a->end_ns - a->start_ns);
    seconds = (double)(a->end_ns - a->start_ns) / 1e9;
    pthread_mutex_lock(&h->lock);
    h->answer_s = h->answer_s > 0 ? 0.75 * h->answer_s + 0.25 * seconds : seconds;
    pthread_mutex_unlock(&h->lock);
}

/* ---- one job ---- */

/* One that is being restarted is worth waiting for; k3_ask_run takes its absence for an answer. */
static void await_peer(struct k3_http_job *j)
{
    static const struct timespec pause = { 0, RETRY_NS };
    const struct k3_router *r = j->q->h->r;
    uint64_t until = k3_now_ns() + r->opt.wait_s * 1000000000ull;

    while (!k3_lock_alive(r->rundir, "k3-computed") && !on_interrupted(j) && !stopping(j) && k3_now_ns() < until)
        nanosleep(&pause, NULL);
}

static void run(struct k3_http_job *j)
{
    const struct k3_router *r = j->q->h->r;
    struct k3_ask_hooks hooks = { .arg = j, .token = on_token, .progress = on_progress, .notice = on_notice,
                                  .interrupted = on_interrupted, .leave = stopping };
    struct k3_ask_peer peer = { r->rundir, r->instance, r->opt.wait_s, r->opt.model, r->opt.state_dir };
    struct k3_err err = K3_ERR_INIT;
    int rc, flush;

    await_peer(j);
    rc = k3_ask_run(&j->ask, &peer, &hooks, &err);
    flush = k3_answer_finish(&j->answer);
    if (rc == 0 && flush < 0)
        rc = k3_fail(&err, flush, "the end of the answer: %s", strerror(-flush));
    account(j);
    if (rc < 0 && err.exit_status != K3_EXIT_REFUSED)
        k3_log(K3_LOG_WARN, "answer_failed", "id=%s text=\"%.400s\"", j->ask.id, err.text);
    if (rc < 0)
        finish(j, k3_http_status_of(&err), err.text, "failed");
    else
        finish(j, 0, NULL, j->ask.end == K3_ASK_CANCELLED ? "client_gone" : k3_http_finish_reason(j));
}

void *k3_http_job_thread(void *arg)
{
    struct k3_http_job *j = arg;
    struct k3_http *h = j->q->h;

    run(j);
    job_release(j);
    pthread_mutex_lock(&h->lock);
    h->n_running--;
    k3_http_dispatch(h);
    pthread_cond_broadcast(&h->news);
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* ---- preparing ---- */

/* The context must hold prompt and answer.  Fills in max_tokens where it was not given. */
static int check_context(struct k3_http_req *q, struct k3_http_job *j, size_t n_prompt)
{
    uint64_t ctx, given = j->c.params.max_tokens, *max = &given, otherwise = j->api == K3_HTTP_TEXT ? TEXT_MAX_TOKENS : CHAT_MAX_TOKENS, left;
    const char *text = "the prompt has %zu tokens, the answer may have %llu: together more than the %llu of this server's context";

    pthread_mutex_lock(&q->h->lock);
    ctx = q->h->peer.ctx;
    pthread_mutex_unlock(&q->h->lock);
    left = n_prompt < ctx ? ctx - n_prompt : 0;
    if (ctx && (left == 0 || (*max != UINT64_MAX && *max > left))) {
        k3_http_error(q, 400, left ? "max_tokens" : j->api == K3_HTTP_CHAT ? "messages" : "prompt", "context_length_exceeded", text,
                      n_prompt, (unsigned long long)(*max == UINT64_MAX || *max == 0 ? 1 : *max), (unsigned long long)ctx);
        return -EINVAL;
    }
    if (*max == UINT64_MAX || (*max == 0 && j->api == K3_HTTP_CHAT))
        *max = ctx ? left : CHAT_MAX_TOKENS;
    else if (*max == 0)
        *max = ctx && left < otherwise ? left : otherwise;
    for (unsigned i = 0; i < j->c.n; i++)
        j[i].c.params.max_tokens = given;
    return 0;
}

/* What the answers need until their reply is whole, or refused when that can never be there. */
static int keep(struct k3_http_req *q, const struct k3_http_job *j, size_t n_prompt)
{
    const struct k3_ask_params *p = &j->c.params;
    uint64_t each = n_prompt * sizeof(uint32_t) + p->max_tokens * p->n_logprobs * sizeof(struct k3_logprob);

    bool room;

    q->kept_bytes = j->c.n * each;
    pthread_mutex_lock(&q->h->lock);
    room = !p->n_logprobs || q->h->body_bytes + q->kept_bytes <= q->h->half_bytes;
    pthread_mutex_unlock(&q->h->lock);
    if (room)
        return 0;
    if (q->kept_bytes <= q->h->half_bytes) {
        k3_http_error(q, 503, NULL, NULL, "too many large requests at once; try again");
        return -EAGAIN;
    }
    k3_http_error(q, 400, "logprobs", "invalid_value", "logprobs: those of %u answers of %llu tokens may take %zu MiB; there are %zu MiB "
                  "(half of --http-mb): ask for fewer tokens", j->c.n, (unsigned long long)p->max_tokens, q->kept_bytes >> 20,
                  q->h->half_bytes >> 20);
    return -EINVAL;
}

static cJSON *shown(const struct k3_http_job *j)
{
    const struct k3_router *r = j->q->h->r;
    cJSON *o = cJSON_CreateObject(), *texts = cJSON_AddArrayToObject(o, "stop");

    cJSON_AddStringToObject(o, "mode", j->api == K3_HTTP_CHAT ? "chat" : "raw");
    cJSON_AddBoolToObject(o, "thinking", j->thinking);
    cJSON_AddBoolToObject(o, "http", true);
    cJSON_AddStringToObject(o, "model", r->model_dir);
    cJSON_AddStringToObject(o, "instance", r->instance);
    for (size_t i = 0; i < j->c.n_stop; i++)
        cJSON_AddItemToArray(texts, cJSON_CreateString(j->c.stop[i]));
    return o;
}

static void prune(struct k3_http *h)
{
    bool due;

    pthread_mutex_lock(&h->lock);
    due = ++h->n_asked % PRUNE_EVERY == 0;
    pthread_mutex_unlock(&h->lock);
    if (due)
        k3_journal_prune(h->r->state_dir, time(NULL), K3_JOURNAL_KEEP_FILES);
}

/* The journal, and all that the job needs.  A negative return: k3_http_error is still due. */
static int make_ask(struct k3_http_job *j, const struct k3_ids *prompt, struct k3_err *err)
{
    struct k3_router *r = j->q->h->r;
    struct k3_ask_params params = j->c.params;
    struct k3_ids stop = { 0 }, own = { 0 };
    int rc = k3_router_stop_ids(r, &stop, err);

    params.seed += j->index; /* docs/user/serving.md promises it */
    if (rc == 0 && k3_ids_append(&own, prompt->id, prompt->n) < 0)
        rc = k3_fail(err, -ENOMEM, "no memory for %zu ids", prompt->n);
    if (j->api == K3_HTTP_CHAT) {
        params.n_points = k3_chat_points(r->chat, prompt, params.point);
    } else if (prompt->n > 1) { /* all but the row that always runs */
        params.n_points = 1;
        params.point[0] = (uint32_t)prompt->n - 1;
    }
    params.constraint = j->first->constraint.len_bytes > 1 ? j->first->constraint.bytes : NULL; /* a NUL is always there */
    if (rc == 0)
        rc = k3_ask_new(&j->ask, &own, &params, stop.id, stop.n, shown(j), r->state_dir, err);
    k3_ids_free(&own);
    k3_ids_free(&stop);
    if (rc < 0)
        return rc;
    k3_answer_open(&j->answer, r->t, j->api == K3_HTTP_CHAT ? K3_ANSWER_CHAT : K3_ANSWER_RAW, j->thinking,
                   (const char *const *)j->c.stop, j->c.n_stop, on_text, j);
    if (j->api == K3_HTTP_CHAT)
        k3_answer_calls(&j->answer, j->max_calls, on_call);
    if (j->c.params.n_logprobs)
        k3_answer_want_ids(&j->answer);
    if (j->c.stream && k3_http_chunk_first(j))
        return k3_fail(err, -ENOMEM, "no memory");
    return 0;
}

/* The one job becomes the first of c.n; -ENOMEM after the refusal has been written into q: there is one then. */
static int multiply(struct k3_http_req *q, struct k3_http_job **j)
{
    struct k3_http_job *one = *j, *all = calloc(one->c.n, sizeof(*all));

    if (!all) {
        one->c.n = 1;
        k3_http_error(q, 503, NULL, NULL, "no memory");
        return -ENOMEM;
    }
    for (unsigned i = 0; i < one->c.n; i++) {
        all[i] = *one;
        all[i].first = all;
        all[i].index = i;
    }
    all->n_left = all->n_refs = one->c.n;
    free(one);
    *j = all;
    return 0;
}

static int make_asks(struct k3_http_job *first, const struct k3_ids *prompt, struct k3_err *err)
{
    uint64_t *seed = &first->c.params.seed;
    int rc = 0;

    if (!first->c.seeded && getrandom(seed, sizeof(*seed), 0) != (ssize_t)sizeof(*seed))
        return k3_fail(err, -errno, "seed: getrandom: %s", strerror(errno));
    for (unsigned i = 0; i < first->c.n && rc == 0; i++) {
        first[i].c.params.seed = *seed;
        rc = make_ask(&first[i], prompt, err);
    }
    for (unsigned i = 0; i < first->c.n && rc < 0; i++) /* those that have a journal */
        if (first[i].ask.journal.fd >= 0)
            k3_journal_end(&first[i].ask.journal, k3_ask_end_name(K3_ASK_CANCELLED), -1, NULL);
    return rc;
}

/* j and what it holds are the caller's no more. */
static void admit(struct k3_http_req *q, struct k3_http_job *j, const struct k3_ids *prompt)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_http *h = q->h;
    unsigned n = j->c.n;
    int rc = multiply(q, &j);

    if (rc == 0)
        rc = check_context(q, j, prompt->n);
    if (rc == 0)
        rc = keep(q, j, prompt->n);
    if (rc == 0 && (rc = k3_http_reserve(q, n)) == 0) {
        pthread_mutex_lock(&h->lock);
        for (unsigned i = 0; i < n && h->peer.digest[0]; i++)
            snprintf(j[i].fingerprint, sizeof(j[i].fingerprint), "k3-%.16s", h->peer.digest);
        pthread_mutex_unlock(&h->lock);
        rc = make_asks(j, prompt, &err);
        if (rc == 0) {
            k3_http_count(h, K3_HS_ANSWERS, n);
            k3_http_count(h, K3_HS_PROMPT, n * prompt->n);
            k3_http_enqueue(j);
            prune(h);
            return;
        }
        pthread_mutex_lock(&h->lock);
        h->n_reserved -= n;
        k3_http_error(q, k3_http_status_of(&err), NULL, NULL, "%s", err.text);
        pthread_mutex_unlock(&h->lock);
    }
    pthread_mutex_lock(&h->lock);
    q->refs++; /* that job_release lets go */
    j->n_refs = 1;
    pthread_mutex_unlock(&h->lock);
    job_release(j);
}

static struct k3_http_job *new_job(struct k3_http_req *q, enum k3_http_api api)
{
    struct k3_http_job *j = calloc(1, sizeof(*j));

    if (!j) {
        k3_http_error(q, 503, NULL, NULL, "no memory");
        return NULL;
    }
    j->q = q;
    j->first = j;
    j->api = api;
    j->ask = (struct k3_ask)K3_ASK_INIT;
    j->created = time(NULL);
    return j;
}

/* known: refuses fields that this path has not; make_prompt: makes the ids, and what of the job depends on them. */
static void post(struct k3_http_req *q, enum k3_http_api api, int (*known)(struct k3_http_req *q, const struct k3_json *o),
                 int (*make_prompt)(struct k3_http_req *q, const struct k3_json *o, struct k3_http_job *j, struct k3_ids *out))
{
    struct k3_http_job *j = new_job(q, api);
    struct k3_json_doc doc = { 0 };
    struct k3_ids prompt = { 0 };
    int rc;

    if (!j)
        return;
    rc = k3_http_body(q, &doc);
    if (rc == 0)
        rc = known(q, doc.node);
    if (rc == 0)
        rc = k3_http_get_common(q, doc.node, &j->c);
    if (rc == 0)
        rc = (api == K3_HTTP_CHAT ? k3_http_get_chat_logprobs : k3_http_get_text_logprobs)(q, doc.node, &j->c);
    if (rc == 0)
        rc = make_prompt(q, doc.node, j, &prompt);
    k3_json_free(&doc);
    if (rc == 0) {
        admit(q, j, &prompt);
    } else {
        k3_http_common_free(&j->c);
        k3_buf_free(&j->constraint);
        free(j);
    }
    k3_ids_free(&prompt);
}

/* ---- completions ---- */

static int text_prompt(struct k3_http_req *q, const struct k3_json *o, struct k3_http_job *j, struct k3_ids *out)
{
    static const char want[] = "a text, an array of token ids, or an array of one of these";
    const struct k3_tokenizer *t = q->h->r->t;
    const struct k3_json *v = k3_json_value(o, "prompt");
    struct k3_err err = K3_ERR_INIT;
    int rc = 0;

    (void)j;
    if (v && v->type == K3_JSON_ARRAY && v->n == 1 && v->child->type != K3_JSON_NUMBER)
        v = v->child;
    else if (v && v->type == K3_JSON_ARRAY && v->n > 1 && v->child->type != K3_JSON_NUMBER)
        return k3_http_field_refused(q, "prompt", "a single one; this server answers one prompt a request");
    if (!v || (v->type != K3_JSON_STRING && v->type != K3_JSON_ARRAY))
        return k3_http_field_refused(q, "prompt", want);
    if (v->type == K3_JSON_ARRAY)
        rc = k3_http_get_ids(q, v, "prompt", k3_tokenizer_n_vocab(t), out);
    else if ((rc = k3_tokenizer_encode(t, v->text.bytes, v->text.len_bytes, out, &err)) < 0)
        k3_http_error(q, k3_http_status_of(&err), "prompt", NULL, "%s", err.text);
    if (rc == 0 && out->n == 0)
        rc = k3_http_field_refused(q, "prompt", "not empty");
    return rc;
}

static int text_known(struct k3_http_req *q, const struct k3_json *o)
{
    static const char *const own[] = { "prompt", "echo", "suffix", "best_of", NULL };
    const struct k3_json *suffix = k3_json_value(o, "suffix");
    int64_t best_of = 1, wanted = 1;
    bool echo = false;
    int rc = k3_http_known(q, o, own, k3_http_common_fields);

    if (rc == 0)
        rc = k3_http_get_bool(q, o, "echo", &echo);
    if (rc == 0)
        rc = k3_http_get_whole(q, o, "best_of", 1, K3_HTTP_CHOICES_MAX, &best_of);
    if (rc == 0)
        rc = k3_http_get_whole(q, o, "n", 1, K3_HTTP_CHOICES_MAX, &wanted);
    if (rc == 0 && k3_json_value(o, "best_of") && best_of != wanted)
        rc = k3_http_field_refused(q, "best_of", "absent or the same as n; this server chooses none of several answers");
    if (rc == 0 && echo)
        rc = k3_http_field_refused(q, "echo", "false; this server has no other");
    if (rc == 0 && suffix && !(suffix->type == K3_JSON_STRING && suffix->text.len_bytes == 0))
        rc = k3_http_field_refused(q, "suffix", "absent; this server has none");
    return rc;
}

void k3_http_post_completions(struct k3_http_req *q)
{
    post(q, K3_HTTP_TEXT, text_known, text_prompt);
}

/* ---- chat ---- */

int k3_http_chat_known(struct k3_http_req *q, const struct k3_json *o, const char *const *also)
{
    int rc = 0;

    for (const struct k3_json *v = o->child; v && rc == 0; v = v->next) {
        struct k3_json member = *v;
        struct k3_json one = { .type = K3_JSON_OBJECT, .n = 1, .child = &member };

        member.next = NULL;
        if (!k3_chat_request_has(v->key))
            rc = k3_http_known(q, &one, also, NULL);
    }
    return rc;
}

static int chat_prompt(struct k3_http_req *q, const struct k3_json *o, struct k3_http_job *j, struct k3_ids *out)
{
    const struct k3_router *r = q->h->r;
    struct k3_chat_opts defaults = { .thinking = r->thinking, .effort = r->gen.effort };
    struct k3_chat_request chat = { 0 };
    struct k3_err err = K3_ERR_INIT;
    int rc = k3_chat_request_read(&chat, o, &defaults, &err);

    if (rc == 0)
        rc = k3_chat_request_render(&chat, r->chat, out, &err);
    if (rc < 0)
        k3_http_error(q, rc == -ENOMEM ? 503 : 400, chat.param[0] ? chat.param : NULL, rc == -ENOMEM ? NULL : "invalid_value", "%s",
                      err.text);
    if (j) {
        j->thinking = chat.starts_thinking;
        j->max_calls = chat.max_calls;
        if (rc == 0 && (k3_chat_request_constraint(&chat, r->t, &j->constraint) < 0 || k3_buf_append(&j->constraint, "", 1) < 0)) {
            k3_http_error(q, 503, NULL, NULL, "no memory");
            rc = -ENOMEM;
        }
    }
    k3_chat_request_free(&chat);
    return rc;
}

int k3_http_chat_ids(struct k3_http_req *q, const struct k3_json *o, struct k3_ids *out)
{
    return chat_prompt(q, o, NULL, out);
}

static int chat_known(struct k3_http_req *q, const struct k3_json *o)
{
    return k3_http_chat_known(q, o, k3_http_common_fields);
}

void k3_http_post_chat(struct k3_http_req *q)
{
    post(q, K3_HTTP_CHAT, chat_known, chat_prompt);
}
