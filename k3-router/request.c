#include "k3-router/request.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "ipc/members.h"
#include "ipc/msg.h"
#include "ipc/parse.h"
#include "shm/segment.h"

#define SUBMIT_MS 10000    /* for the answer to a submit, which may be long */
#define CALL_MS 2500       /* for an answer that is due at once; a late one is asked for again */
#define POLL_MS 250        /* so that an interrupt is seen within it */
#define LOOK_NS 1000000000 /* between two looks at members that k3-run has given up */
#define RESTARTS_MOST 10   /* of k3-computed without one more token */
#define HINT 2400          /* bytes of a command that a person is told: two paths */
#define RETRY_NS 100000000 /* between two tries to reach computed */

static const char *const end_names[] = { "running", "stop", "length", "cancelled" };

const char *k3_ask_end_name(enum k3_ask_end end)
{
    return end_names[end];
}

static enum k3_ask_end end_of(const char *name)
{
    for (int i = K3_ASK_STOP; i <= K3_ASK_CANCELLED; i++)
        if (strcmp(name, end_names[i]) == 0)
            return (enum k3_ask_end)i;
    return K3_ASK_RUNNING;
}

/* cJSON would make an array of a million ids a million objects; a raw string of the numbers is one. */
static bool add_ids(cJSON *to, const char *key, const uint32_t *id, size_t n)
{
    struct k3_ids view = { (uint32_t *)id, n, n };
    struct k3_buf b = { 0 };
    bool ok = k3_buf_json_ids(&b, &view) == 0 && k3_buf_append(&b, "", 1) == 0 &&
              cJSON_AddRawToObject(to, key, b.bytes) != NULL;

    k3_buf_free(&b);
    return ok;
}

/* Only what changes something: a k3-computed or a journal without these means the same. */
static bool add_adjustments(cJSON *s, const struct k3_ask_params *p)
{
    bool ok = true;

    if (p->presence_penalty != 0)
        ok &= cJSON_AddNumberToObject(s, "presence_penalty", p->presence_penalty) != NULL;
    if (p->frequency_penalty != 0)
        ok &= cJSON_AddNumberToObject(s, "frequency_penalty", p->frequency_penalty) != NULL;
    if (p->repeat_penalty != 0 && p->repeat_penalty != 1)
        ok &= cJSON_AddNumberToObject(s, "repeat_penalty", p->repeat_penalty) != NULL;
    if (p->logit_bias)
        ok &= cJSON_AddRawToObject(s, "logit_bias", p->logit_bias) != NULL;
    if (p->n_logprobs)
        ok &= cJSON_AddNumberToObject(s, "logprobs", p->n_logprobs - 1) != NULL;
    return ok;
}

int k3_ask_new(struct k3_ask *a, struct k3_ids *prompt, const struct k3_ask_params *p, const uint32_t *stop_ids,
               size_t n_stop_ids, cJSON *shown, const char *state_dir, struct k3_err *err)
{
    char id[K3_JOURNAL_ID_LEN + 1];

    k3_journal_new_id(id);
    return k3_ask_new_as(a, id, prompt, p, stop_ids, n_stop_ids, shown, state_dir, err);
}

int k3_ask_new_as(struct k3_ask *a, const char *id, struct k3_ids *prompt, const struct k3_ask_params *p,
                  const uint32_t *stop_ids, size_t n_stop_ids, cJSON *shown, const char *state_dir, struct k3_err *err)
{
    char seed[24];
    cJSON *s = cJSON_CreateObject();

    *a = (struct k3_ask)K3_ASK_INIT;
    a->head = cJSON_CreateObject();
    a->submit = s;
    a->params = *p;
    a->params.logit_bias = NULL; /* in the head from here on */
    a->logprobs.n_each = p->n_logprobs;
    a->prompt = *prompt;
    *prompt = (struct k3_ids){ 0 };
    snprintf(a->id, sizeof(a->id), "%s", id);
    snprintf(seed, sizeof(seed), "%llu", (unsigned long long)p->seed);
    cJSON_AddItemToObject(a->head, "submit", s);
    cJSON_AddItemToObject(a->head, "shown", shown);
    cJSON_AddStringToObject(s, "cmd", "submit");
    cJSON_AddStringToObject(s, "id", a->id);
    cJSON_AddNumberToObject(s, "max_tokens", (double)p->max_tokens);
    cJSON_AddNumberToObject(s, "temperature", p->temperature);
    cJSON_AddNumberToObject(s, "top_p", p->top_p);
    cJSON_AddNumberToObject(s, "top_k", p->top_k);
    cJSON_AddNumberToObject(s, "min_p", p->min_p);
    cJSON_AddStringToObject(s, "seed", seed);
    cJSON_AddBoolToObject(s, "logits", p->logits);
    if (p->n_points && !add_ids(s, "snapshot_points", p->point, p->n_points))
        return k3_fail(err, -ENOMEM, "request: no memory");
    if (p->constraint && !cJSON_AddRawToObject(s, "constraint", p->constraint))
        return k3_fail(err, -ENOMEM, "request: no memory for its constraint");
    a->params.constraint = NULL;
    if (!add_adjustments(s, p) || !add_ids(s, "stop_ids", stop_ids, n_stop_ids) || !add_ids(s, "prompt_ids", a->prompt.id, a->prompt.n))
        return k3_fail(err, -ENOMEM, "request: no memory for %zu ids", a->prompt.n);
    return k3_journal_create(&a->journal, state_dir, a->id, a->head, err);
}

static bool get_number(const cJSON *o, const char *key, double min, double max, double *out)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);

    if (!cJSON_IsNumber(v) || !(v->valuedouble >= min && v->valuedouble <= max))
        return false;
    *out = v->valuedouble;
    return true;
}

static bool get_ids(const cJSON *array, struct k3_ids *out)
{
    const cJSON *v;

    if (!cJSON_IsArray(array))
        return false;
    cJSON_ArrayForEach(v, array)
        if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= UINT32_MAX) ||
            k3_ids_push(out, (uint32_t)v->valuedouble) < 0)
            return false;
    return true;
}

/* False: o does not name a model. */
static bool set_model(struct k3_ask_model *m, const cJSON *o)
{
    const cJSON *digest = cJSON_GetObjectItemCaseSensitive(o, "model_digest");
    const cJSON *path = cJSON_GetObjectItemCaseSensitive(o, "model");

    if (!cJSON_IsString(digest) || !cJSON_IsString(path) || !*digest->valuestring ||
        strlen(digest->valuestring) >= sizeof(m->digest))
        return false;
    strcpy(m->digest, digest->valuestring);
    snprintf(m->path, sizeof(m->path), "%s", path->valuestring);
    return true;
}

int k3_ask_resume(struct k3_ask *a, const char *id, const char *state_dir, struct k3_err *err)
{
    struct k3_journal_data data;
    const cJSON *seed;
    double max_tokens = 0, top_k = 0, top_logprobs;
    struct k3_ask_params *p = &a->params;
    int rc;

    *a = (struct k3_ask)K3_ASK_INIT;
    rc = k3_journal_open(&a->journal, state_dir, id, &data, err);
    if (rc < 0)
        return rc;
    strcpy(a->id, id);
    a->resumed = true;
    a->head = data.head;
    a->generated = data.generated;
    a->logprobs = data.logprobs;
    a->end = data.end[0] ? end_of(data.end) : K3_ASK_RUNNING;
    a->stop_id = data.stop_id;
    if (data.model)
        set_model(&a->model, data.model);
    cJSON_Delete(data.model);
    a->submit = cJSON_GetObjectItemCaseSensitive(a->head, "submit");
    seed = cJSON_GetObjectItemCaseSensitive(a->submit, "seed");
    if (!get_ids(cJSON_GetObjectItemCaseSensitive(a->submit, "prompt_ids"), &a->prompt) || a->prompt.n == 0 ||
        !get_number(a->submit, "max_tokens", 1, UINT32_MAX, &max_tokens) ||
        !get_number(a->submit, "temperature", 0, 1e9, &p->temperature) ||
        !get_number(a->submit, "top_p", 0, 1, &p->top_p) || !get_number(a->submit, "min_p", 0, 1, &p->min_p) ||
        !get_number(a->submit, "top_k", 0, UINT32_MAX, &top_k) || !cJSON_IsString(seed) ||
        k3_parse_u64(seed->valuestring, 0, UINT64_MAX, &p->seed) < 0)
        return k3_refuse(err, -EINVAL, "journal %s: its head lacks a parameter of the request", a->journal.path);
    p->max_tokens = (uint64_t)max_tokens;
    p->top_k = (uint32_t)top_k;
    if (get_number(a->submit, "logprobs", 0, K3_TOP_LOGPROBS_MAX, &top_logprobs))
        p->n_logprobs = (uint32_t)top_logprobs + 1;
    if (a->generated.n && a->logprobs.n_each != p->n_logprobs) /* of all tokens, or of none: the journal has seen to that */
        return k3_refuse(err, -EINVAL, "journal %s: its tokens have not the log probabilities that its head asks for",
                         a->journal.path);
    a->logprobs.n_each = p->n_logprobs;
    return 0;
}

const cJSON *k3_ask_shown(const struct k3_ask *a)
{
    return cJSON_GetObjectItemCaseSensitive(a->head, "shown");
}

void k3_ask_free(struct k3_ask *a)
{
    k3_journal_close(&a->journal);
    cJSON_Delete(a->head);
    k3_ids_free(&a->prompt);
    k3_ids_free(&a->generated);
    k3_logprobs_free(&a->logprobs);
    *a = (struct k3_ask)K3_ASK_INIT;
}

/* ---- the run ---- */

struct run {
    struct k3_ask *a;
    const struct k3_ask_peer *peer;
    const struct k3_ask_hooks *h;
    struct k3_client *client;
    uint64_t lost_ns;      /* since when nobody answers; 0 = somebody does */
    bool running;          /* computed has had the request, by what this run heard */
    bool contact;          /* somebody has answered: this run, or one before it */
    bool noticed;          /* the outage has had its line */
    bool gone;             /* it has said that it is shutting down */
    bool waits;            /* computed waits for weights */
    uint64_t looked_ns;    /* at the members that k3-run has given up */
    double from;           /* of poll */
    size_t n_then;         /* tokens when computed was last started anew, and how often that was with no token since */
    unsigned n_restarts;
};

static bool interrupted(const struct run *r)
{
    return r->h->interrupted && r->h->interrupted(r->h->arg);
}

static void notice(struct run *r, const char *what)
{
    char line[256];

    if (r->noticed || !r->h->notice)
        return;
    r->noticed = true;
    snprintf(line, sizeof(line), "k3-computed %s; %zu tokens are safe", what, r->a->generated.n);
    r->h->notice(r->h->arg, line);
}

/* How to start what the request needs. */
static const char *up_hint(const struct run *r, char *out, size_t len)
{
    const struct k3_ask_peer *p = r->peer;
    const char *model = r->a->model.path[0] ? r->a->model.path : p->model;

    snprintf(out, len, "run/k3-run up --instance %s%s%s", p->instance, model ? " --model " : "", model ? model : "");
    return out;
}

/* How to go on with it later.  The journal knows the instance; it is named for the person. */
static const char *resume_hint(const struct run *r, char *out, size_t len)
{
    const struct k3_ask_peer *p = r->peer;
    bool named = strcmp(p->instance, "default") != 0;

    snprintf(out, len, "k3-router%s%s%s%s --resume %s", named ? " --instance " : "", named ? p->instance : "",
             p->state_dir ? " --state-dir " : "", p->state_dir ? p->state_dir : "", r->a->id);
    return out;
}

/* An outage: waits a little.  0: try again.  Negative: it has lasted for too long. */
static int pause_lost(struct run *r, struct k3_err *err)
{
    static const struct timespec pause = { 0, RETRY_NS };
    const struct k3_ask_peer *p = r->peer;
    char up[HINT], resume[HINT];

    if (r->lost_ns == 0)
        r->lost_ns = k3_now_ns();
    if (k3_now_ns() - r->lost_ns >= p->wait_s * 1000000000ull)
        return k3_no_peer(err, -ETIMEDOUT, "k3-computed of instance \"%s\" did not come back within %u s; start it with: "
                          "%s, then go on with: %s", p->instance, p->wait_s, up_hint(r, up, sizeof(up)),
                          resume_hint(r, resume, sizeof(resume)));
    nanosleep(&pause, NULL);
    return 0;
}

/* Nobody answered.  0: try again.  Negative: give up. */
static int lost(struct run *r, struct k3_err *err)
{
    const struct k3_ask_peer *p = r->peer;
    int code = err->code;
    bool alive = k3_lock_alive(p->rundir, "k3-computed");
    char up[HINT];

    if (!r->contact && !alive)
        return k3_no_peer(err, code, "k3-computed of instance \"%s\" is not running (nobody serves %s/computed.sock);"
                          " start it with: %s", p->instance, p->rundir, up_hint(r, up, sizeof(up)));
    if (code == -ETIMEDOUT && alive) /* it is only busy: never acted on */
        return 0;
    if (!alive)
        notice(r, "went away; waiting for it");
    return pause_lost(r, err);
}

/* A reply with ok false, as an error of ours. */
static int refused(const cJSON *reply, struct k3_err *err)
{
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(reply, "error");
    double code = K3_EXIT_FAILED;

    get_number(reply, "code", 1, 4, &code);
    k3_fail(err, -EREMOTEIO, "k3-computed: %s", cJSON_IsString(text) ? text->valuestring : "refused without words");
    err->exit_status = (int)code;
    return err->code;
}

static bool is_ok(const cJSON *reply)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok"));
}

/* One call; *reply is NULL when nobody answered and it is to be tried again. */
static int call(struct run *r, const cJSON *request, int timeout_ms, cJSON **reply, struct k3_err *err)
{
    int rc = k3_client_call(r->client, request, timeout_ms, reply, err);

    if (rc == 0) {
        r->contact = true;
        return 0;
    }
    *reply = NULL;
    return err->exit_status == K3_EXIT_NO_PEER ? lost(r, err) : rc;
}

/* Nothing that this model says may be added to the answer. */
static int other_model(const struct run *r, const struct k3_ask_model *now, struct k3_err *err)
{
    const struct k3_ask *a = r->a;
    char up[HINT], resume[HINT];
    int rc = k3_refuse(err, -ESTALE, "request %s was begun by the model %s (digest %.8s), but k3-computed of instance \"%s\""
                       " runs %s (digest %.8s), which cannot finish it; %zu tokens are safe; start the first one with: %s,"
                       " then go on with: %s", a->id, a->model.path, a->model.digest, r->peer->instance, now->path,
                       now->digest, a->generated.n, up_hint(r, up, sizeof(up)), resume_hint(r, resume, sizeof(resume)));

    if (r->running)
        err->exit_status = K3_EXIT_UNTRUSTED;
    return rc;
}

/* The digest of the only model for which the ids mean something; "" when it is not known. */
static const char *expected(const struct run *r)
{
    return r->a->model.digest[0] || !r->peer->digest ? r->a->model.digest : r->peer->digest;
}

/* A reply to submit names the model: the first one decides. */
static int check_model(struct run *r, const cJSON *reply, struct k3_err *err)
{
    struct k3_ask *a = r->a;
    struct k3_ask_model now = { "", "" };

    if (!set_model(&now, reply))
        return is_ok(reply) ? k3_fail(err, -EPROTO, "k3-computed: a reply to submit without model_digest and model") : 0;
    if (a->model.digest[0])
        return strcmp(a->model.digest, now.digest) == 0 ? 0 : other_model(r, &now, err);
    if (expected(r)[0] && strcmp(expected(r), now.digest) != 0)
        return k3_refuse(err, -ESTALE, "k3-computed of instance \"%s\" runs another model by now, %s; start k3-router again",
                         r->peer->instance, now.path);
    if (!is_ok(reply))
        return 0;
    if (a->generated.n)
        return k3_refuse(err, -EINVAL, "journal %s: %zu tokens, and no word of the model that they are from",
                         a->journal.path, a->generated.n);
    a->model = now;
    return k3_journal_model(&a->journal, now.digest, now.path, err);
}

/* *due: stays true when nobody answered and it is to be tried again. */
static int submit(struct run *r, bool *due, struct k3_err *err)
{
    struct k3_ask *a = r->a;
    cJSON *reply = NULL;
    int rc = 0;

    cJSON_DeleteItemFromObjectCaseSensitive(a->submit, "generated_ids");
    if (a->generated.n && !add_ids(a->submit, "generated_ids", a->generated.id, a->generated.n))
        return k3_fail(err, -ENOMEM, "request: no memory for %zu ids", a->generated.n);
    cJSON_DeleteItemFromObjectCaseSensitive(a->submit, "model_digest");
    if (expected(r)[0])
        cJSON_AddStringToObject(a->submit, "model_digest", expected(r));
    if (a->has_logits)
        cJSON_ReplaceItemInObjectCaseSensitive(a->submit, "logits", cJSON_CreateFalse());
    rc = call(r, a->submit, SUBMIT_MS, &reply, err);
    if (rc == 0 && reply)
        rc = check_model(r, reply, err);
    if (rc == 0 && reply && !is_ok(reply)) {
        rc = refused(reply, err);
        if (err->exit_status == K3_EXIT_NO_PEER && (r->running || a->resumed)) /* it is shutting down */
            rc = pause_lost(r, err);
    } else if (rc == 0 && reply) {
        r->running = true;
        r->from = 0;
        *due = false;
    }
    cJSON_Delete(reply);
    return rc;
}

/* cancel, forget: one try, the answer does not matter. */
static void tell(struct run *r, const char *cmd)
{
    cJSON *request = cJSON_CreateObject(), *reply = NULL;

    cJSON_AddStringToObject(request, "cmd", cmd);
    cJSON_AddStringToObject(request, "id", r->a->id);
    k3_client_call(r->client, request, CALL_MS, &reply, NULL);
    cJSON_Delete(reply);
    cJSON_Delete(request);
}

static int finish(struct run *r, enum k3_ask_end end, int64_t stop_id, struct k3_err *err)
{
    int rc = k3_journal_end(&r->a->journal, k3_ask_end_name(end), stop_id, err);

    r->a->end = end;
    r->a->stop_id = stop_id;
    r->a->end_ns = k3_now_ns();
    return rc;
}

static int take_token(struct run *r, const cJSON *event, struct k3_err *err)
{
    struct k3_ask *a = r->a;
    double index, token;
    int rc;

    if (!get_number(event, "index", 0, UINT32_MAX, &index) || !get_number(event, "token", 0, UINT32_MAX, &token))
        return k3_fail(err, -EPROTO, "k3-computed: a token event without index or token");
    if (index < (double)a->generated.n) {
        if (a->generated.id[(size_t)index] != (uint32_t)token)
            return k3_untrusted(err, -EPROTO, "request %s: token %.0f is %.0f now and was %u before a restart", a->id, index,
                                token, a->generated.id[(size_t)index]);
        return 0;
    }
    if (index > (double)a->generated.n)
        return k3_fail(err, -EPROTO, "k3-computed: token %.0f where %zu is due", index, a->generated.n);
    rc = a->logprobs.n_each ? k3_logprobs_take(&a->logprobs, (uint32_t)token, cJSON_GetObjectItemCaseSensitive(event, "logprobs"))
                            : 0;
    if (rc < 0)
        return k3_fail(err, rc, "k3-computed: token %.0f %s", index, rc == -ENOMEM ? "finds no memory for its log probabilities"
                       : "without the log probabilities that were asked for");
    rc = k3_journal_token(&a->journal, a->generated.n, (uint32_t)token, &a->logprobs, err);
    if (rc == 0 && (rc = k3_ids_push(&a->generated, (uint32_t)token)) < 0)
        k3_fail(err, rc, "request: no memory");
    if (rc < 0)
        return rc;
    if (!a->first_ns)
        a->first_ns = k3_now_ns();
    r->noticed = false; /* it goes on: another outage is worth another line */
    rc = r->h->token(r->h->arg, (uint32_t)token);
    if (rc > 0) {
        tell(r, "cancel");
        return finish(r, K3_ASK_STOP, -1, err);
    }
    return rc < 0 ? k3_fail(err, rc, "request: showing token %zu failed", a->generated.n - 1) : 0;
}

static int base64_digit(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *p = c ? strchr(digits, c) : NULL;

    return p ? (int)(p - digits) : -1;
}

static int take_logits(struct run *r, const cJSON *event, struct k3_err *err)
{
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(event, "base64");
    struct k3_buf b = { 0 };
    uint32_t bits = 0, n_bits = 0;
    double n;
    int rc = 0;

    if (!cJSON_IsString(text) || !get_number(event, "n", 1, UINT32_MAX, &n))
        return k3_fail(err, -EPROTO, "k3-computed: a logits event without n or base64");
    for (const char *p = text->valuestring; *p && *p != '=' && rc == 0; p++) {
        int d = base64_digit(*p);
        if (d < 0)
            rc = -EPROTO;
        bits = bits << 6 | (uint32_t)d;
        n_bits += 6;
        if (n_bits >= 8 && rc == 0) {
            char byte = (char)(bits >> (n_bits -= 8));
            rc = k3_buf_append(&b, &byte, 1);
        }
    }
    if (rc < 0 || b.len_bytes != (size_t)n * sizeof(float))
        rc = k3_fail(err, -EPROTO, "k3-computed: %zu bytes of logits where %.0f floats are due", b.len_bytes, n);
    else if (!r->a->has_logits && r->h->logits && (rc = r->h->logits(r->h->arg, b.bytes, b.len_bytes)) < 0)
        k3_fail(err, rc, "the logits could not be written");
    r->a->has_logits = true;
    k3_buf_free(&b);
    return rc;
}

static int take_end(struct run *r, const cJSON *event, struct k3_err *err)
{
    const cJSON *reason = cJSON_GetObjectItemCaseSensitive(event, "reason");
    enum k3_ask_end end = cJSON_IsString(reason) ? end_of(reason->valuestring) : K3_ASK_RUNNING;
    double stop_id = -1;

    if (end == K3_ASK_RUNNING)
        return k3_fail(err, -EPROTO, "k3-computed: a done event without a known reason");
    get_number(event, "stop_id", 0, UINT32_MAX, &stop_id);
    return finish(r, end, (int64_t)stop_id, err);
}

static int take_events(struct run *r, const cJSON *events, struct k3_err *err)
{
    const cJSON *e, *type, *text;
    double code = K3_EXIT_FAILED;
    int rc = 0;

    cJSON_ArrayForEach(e, events) {
        if (interrupted(r) || (r->h->leave && r->h->leave(r->h->arg))) /* showing can take as long as its reader wants; the rest is not wanted */
            return 0;
        type = cJSON_GetObjectItemCaseSensitive(e, "type");
        if (!cJSON_IsString(type)) {
            rc = k3_fail(err, -EPROTO, "k3-computed: an event without a type");
        } else if (strcmp(type->valuestring, "token") == 0) {
            rc = take_token(r, e, err);
        } else if (strcmp(type->valuestring, "logits") == 0) {
            rc = take_logits(r, e, err);
        } else if (strcmp(type->valuestring, "done") == 0) {
            rc = take_end(r, e, err);
        } else if (strcmp(type->valuestring, "error") == 0) {
            text = cJSON_GetObjectItemCaseSensitive(e, "message");
            get_number(e, "code", 1, 4, &code);
            if (code == K3_EXIT_NO_PEER) { /* it is shutting down: its successor gets what there is */
                r->gone = true;
                return 0;
            }
            rc = k3_fail(err, -EREMOTEIO, "%s", cJSON_IsString(text) ? text->valuestring : "failed without words");
            err->exit_status = (int)code;
        }
        if (rc < 0 || r->a->end != K3_ASK_RUNNING)
            return rc;
    }
    return 0;
}

static void take_progress(struct run *r, const cJSON *p)
{
    const cJSON *phase = cJSON_GetObjectItemCaseSensitive(p, "phase");
    const cJSON *waiting = cJSON_GetObjectItemCaseSensitive(p, "waiting");
    struct k3_ask_progress out = { "", "none", 0, 0, 0, 0, 0, 0, 0, 0 };

    if (cJSON_IsString(waiting))
        out.waiting = waiting->valuestring;
    r->waits = strcmp(out.waiting, "none") != 0;
    if (!cJSON_IsObject(p) || !r->h->progress)
        return;
    if (cJSON_IsString(phase))
        out.phase = phase->valuestring;
    get_number(p, "layer", 0, 1e6, &out.layer);
    get_number(p, "layers", 0, 1e6, &out.layers);
    get_number(p, "rows", 0, 1e9, &out.rows);
    get_number(p, "position", 0, 1e9, &out.position);
    get_number(p, "bytes", 0, 1e18, &out.bytes);
    get_number(p, "bytes_pass", 0, 1e18, &out.bytes_pass);
    get_number(p, "bytes_per_s", 0, 1e15, &out.bytes_per_s);
    get_number(p, "eta_s", 0, 1e9, &out.eta_s);
    r->h->progress(r->h->arg, &out);
}

/* *unknown: computed does not know the id. */
static int poll_once(struct run *r, bool *unknown, struct k3_err *err)
{
    cJSON *request = cJSON_CreateObject(), *reply = NULL;
    const cJSON *what;
    double cached;
    int rc;

    cJSON_AddStringToObject(request, "cmd", "poll");
    cJSON_AddStringToObject(request, "id", r->a->id);
    cJSON_AddNumberToObject(request, "from", r->from);
    /* Without progress_from: every reply has the progress, and a reply for every layer would cost more than it tells. */
    cJSON_AddNumberToObject(request, "wait_ms", POLL_MS);
    rc = call(r, request, CALL_MS, &reply, err);
    cJSON_Delete(request);
    if (rc < 0 || !reply)
        return rc;
    if (!is_ok(reply)) {
        what = cJSON_GetObjectItemCaseSensitive(reply, "errno");
        *unknown = cJSON_IsString(what) && strcmp(what->valuestring, "ENOENT") == 0;
        rc = *unknown ? 0 : refused(reply, err);
    } else {
        r->running = true;
        if (r->a->generated.n == 0 && get_number(reply, "cached", 0, (double)r->a->prompt.n, &cached))
            r->a->n_cached = (size_t)cached;
        get_number(reply, "next", 0, 9e15, &r->from);
        rc = take_events(r, cJSON_GetObjectItemCaseSensitive(reply, "events"), err);
        if (!r->gone) {
            r->lost_ns = 0;
        } else if (rc == 0) {
            notice(r, "went away; waiting for it");
            rc = pause_lost(r, err); /* until it is gone it knows the id and only says the same again */
        }
        *unknown = r->gone;
        r->gone = false;
        if (rc == 0 && r->a->end == K3_ASK_RUNNING)
            take_progress(r, cJSON_GetObjectItemCaseSensitive(reply, "progress"));
    }
    cJSON_Delete(reply);
    return rc;
}

/* k3-computed waits for a weight daemon however long it takes; for one that k3-run has given up nobody should. */
static int look_for_failed(struct run *r, struct k3_err *err)
{
    static const char *const weights[] = { "k3-trunkd", "k3-expertd" };
    uint64_t now = k3_now_ns();
    char why[1024];
    int code;

    if (!r->waits || now - r->looked_ns < LOOK_NS)
        return 0;
    r->looked_ns = now;
    for (size_t i = 0; i < sizeof(weights) / sizeof(weights[0]); i++) {
        if (!k3_member_given_up(r->peer->rundir, weights[i], &code))
            continue;
        k3_member_last_error(why, sizeof(why), r->peer->rundir, weights[i]);
        return k3_no_peer(err, -ECHILD, "%s has failed: %.800s; when that is mended: k3-run restart %s --instance %s; the answer waits",
                          weights[i], why[0] ? why : "its log says no reason", weights[i], r->peer->instance);
    }
    return 0;
}

/* Whoever ends again and again before the next token will not give it. */
static int was_restarted(struct run *r, struct k3_err *err)
{
    const struct k3_ask *a = r->a;
    char resume[HINT];

    notice(r, "was restarted");
    r->n_restarts = a->generated.n == r->n_then ? r->n_restarts + 1 : 1;
    r->n_then = a->generated.n;
    if (r->n_restarts < RESTARTS_MOST)
        return 0;
    return k3_no_peer(err, -EREMOTEIO, "k3-computed ended %u times while it computed this answer, without one more token; its log is "
                      "%s/k3-computed.log; %zu tokens are safe; when that is mended, go on with: %s", r->n_restarts,
                      r->peer->rundir, a->generated.n, resume_hint(r, resume, sizeof(resume)));
}

static int leave(struct run *r, struct k3_err *err)
{
    char resume[HINT];

    tell(r, "forget"); /* nobody is there to take what it would compute */
    return k3_no_peer(err, -ECANCELED, "stopped after %zu tokens, which are safe; go on with: %s", r->a->generated.n,
                      resume_hint(r, resume, sizeof(resume)));
}

static int run(struct run *r, struct k3_err *err)
{
    struct k3_ask *a = r->a;
    bool unknown = !a->resumed || !a->model.digest[0]; /* a repeated submit changes nothing, and names the model */
    bool told = false; /* of this restart; several submits may find nobody there meanwhile */
    int rc = 0;

    while (rc == 0 && a->end == K3_ASK_RUNNING) {
        if (interrupted(r)) {
            tell(r, "cancel");
            return finish(r, K3_ASK_CANCELLED, -1, err);
        }
        if (r->h->leave && r->h->leave(r->h->arg))
            return leave(r, err);
        if (!unknown) {
            told = false;
            rc = poll_once(r, &unknown, err);
            if (rc == 0 && a->end == K3_ASK_RUNNING)
                rc = look_for_failed(r, err);
            continue;
        }
        if (r->running && !told)
            rc = was_restarted(r, err);
        told = r->running;
        if (rc == 0)
            rc = submit(r, &unknown, err);
    }
    return rc;
}

int k3_ask_run(struct k3_ask *a, const struct k3_ask_peer *peer, const struct k3_ask_hooks *hooks,
               struct k3_err *err)
{
    struct run r = { .a = a, .peer = peer, .h = hooks, .contact = peer->seen };
    struct k3_err own = K3_ERR_INIT;
    bool at_stop;
    int rc = 0;

    err = err ? err : &own;
    a->start_ns = k3_now_ns();
    for (size_t i = 0; i < a->generated.n && rc == 0; i++)
        rc = hooks->token(hooks->arg, a->generated.id[i]);
    if (rc < 0)
        return k3_fail(err, rc, "request: showing the tokens of the journal failed");
    if (a->end != K3_ASK_RUNNING)
        return 0;
    at_stop = rc > 0;
    rc = k3_client_open(&r.client, peer->rundir, "computed.sock", err);
    if (rc < 0)
        return rc;
    if (at_stop) { /* the router died between the journal and the cancel */
        tell(&r, "cancel");
        rc = finish(&r, K3_ASK_STOP, -1, err);
    } else {
        rc = run(&r, err);
    }
    if (rc == 0)
        tell(&r, "forget");
    k3_client_close(r.client);
    return rc;
}
