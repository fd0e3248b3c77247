/* One request and its answer: parameters from the prompt and the model, text to stdout as it comes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

#define DEFAULT_MAX_TOKENS 4096u /* when k3-computed does not say how long a sequence may be */
#define DIM "\033[2m"
#define UNDIM "\033[0m"

int k3_exchange_prompt(const struct k3_router *r, const char *text, size_t len_bytes, struct k3_ids *out,
                       struct k3_err *err)
{
    struct k3_text user = { text, len_bytes }, system = { r->opt.system, r->opt.system ? strlen(r->opt.system) : 0 };
    struct k3_chat_message m[2] = { { .role = K3_CHAT_SYSTEM, .parts = &system, .n_parts = 1 },
                                    { .role = K3_CHAT_USER, .parts = &user, .n_parts = 1 } };
    struct k3_chat_opts o = { .thinking = r->thinking, .effort = r->gen.effort };

    if (r->mode == K3_ANSWER_RAW)
        return k3_tokenizer_encode(r->t, text, len_bytes, out, err);
    return r->opt.system ? k3_chat_render(r->chat, m, 2, &o, out, err)
                         : k3_chat_render(r->chat, m + 1, 1, &o, out, err);
}

int k3_router_stop_ids(const struct k3_router *r, struct k3_ids *out, struct k3_err *err)
{
    int rc = k3_ids_append(out, r->gen.eos.id, r->gen.eos.n);

    for (uint32_t above = K3_SP_EOS; r->t && above <= K3_SP_END_OF_MSG && rc == 0; above++) {
        uint32_t id = k3_tokenizer_base(r->t) + above;
        size_t i = 0;
        while (i < out->n && out->id[i] != id)
            i++;
        if (i == out->n)
            rc = k3_ids_push(out, id);
    }
    return rc < 0 ? k3_fail(err, rc, "request: no memory") : 0;
}

void k3_prompt_init(struct k3_prompt *p, const struct k3_router *r)
{
    const struct k3_router_opts *o = &r->opt;

    *p = (struct k3_prompt){ .thinking = r->thinking, .max_calls = o->json || o->lines ? UINT32_MAX : 0, .stop = o->stop.item,
                             .n_stop = o->stop.n, .max_tokens = o->max_tokens, .temperature = o->temperature,
                             .top_p = o->top_p, .min_p = o->min_p, .top_k = o->top_k, .seeded = o->seed != NULL };
    if (o->seed)
        k3_parse_u64(o->seed, 0, UINT64_MAX, &p->seed); /* options.c has checked it */
}

static int parameters(const struct k3_router *r, const struct k3_prompt *o, struct k3_ask_params *p, struct k3_err *err)
{
    bool greedy = r->mode != K3_ANSWER_CHAT;

    p->temperature = o->temperature >= 0 ? o->temperature : greedy ? 0 : r->gen.temperature;
    p->top_p = o->top_p > 0 ? o->top_p : r->gen.top_p;
    p->min_p = o->min_p >= 0 ? o->min_p : r->gen.min_p;
    p->top_k = o->top_k != UINT32_MAX ? o->top_k : r->gen.top_k;
    p->logits = r->opt.logits != NULL;
    p->max_tokens = o->max_tokens;
    if (!p->max_tokens) /* a prompt that fills the context is refused by k3-computed, with both numbers */
        p->max_tokens = !r->ctx ? DEFAULT_MAX_TOKENS : o->ids.n < r->ctx ? r->ctx - o->ids.n : 1;
    p->seed = o->seed;
    if (!o->seeded && getrandom(&p->seed, sizeof(p->seed), 0) != (ssize_t)sizeof(p->seed))
        return k3_fail(err, -errno, "seed: getrandom: %s", strerror(errno));
    return 0;
}

/* ---- showing ---- */

/* A terminal obeys what it is sent, and a model may generate escape sequences: there, control characters but line feed and
 * tab are shown as U+FFFD (a carriage return not at all).  Anything else gets the text as it is. */
static int write_safely(const char *text, size_t len_bytes)
{
    struct k3_buf b = { 0 };
    int rc = 0;

    for (size_t i = 0, n; i < len_bytes && rc == 0; i += n) {
        uint32_t cp = k3_utf8_at((const uint8_t *)text + i);
        n = k3_utf8_len((uint8_t)text[i]);
        if (cp == '\r')
            continue;
        if ((cp < 0x20 && cp != '\n' && cp != '\t') || (cp >= 0x7f && cp < 0xa0))
            rc = k3_buf_puts(&b, "\xef\xbf\xbd");
        else
            rc = k3_buf_append(&b, text + i, n);
    }
    if (rc == 0)
        rc = k3_router_write(b.bytes, b.len_bytes);
    k3_buf_free(&b);
    return rc;
}

/* Before the first text of a channel.  Thinking is dim, or in brackets where there are no colours, and ends with an empty line. */
static int show_channel(const struct k3_exchange *x, enum k3_channel channel)
{
    bool colours = k3_router_colours(STDOUT_FILENO);
    const char *text = channel == K3_OUT_THINK ? (colours ? DIM : "[thinking] ")
                       : !x->any_shown         ? ""
                                               : (colours ? UNDIM "\n\n" : "\n[answer]\n");

    return k3_router_write(text, strlen(text));
}

static int show(void *arg, enum k3_channel channel, const char *text, size_t len_bytes)
{
    struct k3_exchange *x = arg;
    int rc = 0;

    if (!x->live || (channel == K3_OUT_THINK && !x->thinking_live))
        return 0;
    k3_progress_erase(x->progress);
    if (x->thinking_live && (!x->any_shown || channel != x->shown))
        rc = show_channel(x, channel);
    x->shown = channel;
    x->any_shown = true;
    if (rc == 0)
        rc = x->stdout_tty ? write_safely(text, len_bytes) : k3_router_write(text, len_bytes);
    x->line_open = text[len_bytes - 1] != '\n';
    x->any_text = true;
    return rc;
}

static int on_token(void *arg, uint32_t token)
{
    struct k3_exchange *x = arg;

    if (x->watch && x->watch->token)
        x->watch->token(x->watch->arg);
    return k3_answer_feed(&x->answer, token);
}

static void on_progress(void *arg, const struct k3_ask_progress *p)
{
    struct k3_exchange *x = arg;

    if (x->watch && x->watch->progress)
        x->watch->progress(x->watch->arg, p);
    k3_progress_show(x->progress, p, x->ask.generated.n, x->line_open && x->stdout_tty);
}

static void on_notice(void *arg, const char *line)
{
    struct k3_exchange *x = arg;

    if (x->watch && x->watch->notice) {
        x->watch->notice(x->watch->arg, line);
        return;
    }
    k3_progress_erase(x->progress);
    fprintf(stderr, "%sk3-router: %s\n", x->line_open && x->stdout_tty ? "\n" : "", line);
}

static int on_logits(void *arg, const void *bytes, size_t len_bytes)
{
    struct k3_exchange *x = arg;
    const char *p = bytes;
    int fd = open(x->r->opt.logits, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), rc = fd < 0 ? -errno : 0;

    while (rc == 0 && len_bytes) {
        ssize_t n = write(fd, p, len_bytes);
        if (n < 0 && errno != EINTR)
            rc = -errno;
        if (n > 0) {
            p += n;
            len_bytes -= (size_t)n;
        }
    }
    if (fd >= 0 && close(fd) < 0 && rc == 0)
        rc = -errno;
    if (rc < 0)
        fprintf(stderr, "k3-router: --logits %s: %s\n", x->r->opt.logits, strerror(-rc));
    return rc;
}

static bool interrupted(void *arg)
{
    const struct k3_exchange *x = arg;

    return x->stops_at_interrupt && k3_router_interrupts != 0;
}

static bool leave(void *arg)
{
    const struct k3_exchange *x = arg;

    return x->watch && x->watch->leave && x->watch->leave(x->watch->arg);
}

/* ---- life ---- */

/* What --resume needs to show the answer. */
static cJSON *shown(const struct k3_router *r, const struct k3_prompt *p)
{
    static const char *const mode[] = { "chat", "raw", "ids" };
    cJSON *o = cJSON_CreateObject(), *texts = cJSON_AddArrayToObject(o, "stop");

    cJSON_AddStringToObject(o, "mode", mode[r->mode]);
    cJSON_AddBoolToObject(o, "thinking", r->mode == K3_ANSWER_CHAT && p->thinking);
    cJSON_AddStringToObject(o, "model", r->model_dir);
    cJSON_AddStringToObject(o, "instance", r->instance);
    for (size_t i = 0; i < p->n_stop; i++)
        cJSON_AddItemToArray(texts, cJSON_CreateString(p->stop[i]));
    return o;
}

/* The journal of p->id.  1: there is none to go on with, and a new one can be made. */
static int go_on(struct k3_exchange *x, const struct k3_prompt *p, struct k3_err *err)
{
    char path[1100];
    int rc = k3_ask_resume(&x->ask, p->id, x->r->state_dir, err);

    if (rc == 0 && x->ask.end != K3_ASK_CANCELLED)
        return 0;
    if (rc < 0 && rc != -ENOENT && rc != -EINVAL)
        return rc;
    /* Cut off in its head, or cancelled by somebody else: of no use. */
    k3_ask_free(&x->ask);
    snprintf(path, sizeof(path), "%s/%s.journal", x->r->state_dir, p->id);
    unlink(path);
    *err = (struct k3_err)K3_ERR_INIT;
    return 1;
}

int k3_exchange_new(struct k3_exchange *x, struct k3_router *r, struct k3_prompt *p, struct k3_err *err)
{
    struct k3_ask_params params = { 0 };
    struct k3_ids stop = { 0 };
    char id[K3_JOURNAL_ID_LEN + 1];
    int rc;

    *x = (struct k3_exchange){ .r = r, .ask = K3_ASK_INIT, .shown = K3_OUT_RESPONSE };
    k3_answer_open(&x->answer, r->t, r->mode, p->thinking, p->stop, p->n_stop, show, x);
    if (p->max_calls)
        k3_answer_calls(&x->answer, p->max_calls, NULL);
    rc = p->id ? go_on(x, p, err) : 1;
    if (rc > 0)
        rc = parameters(r, p, &params, err);
    if (rc == 0 && !x->ask.id[0] && r->mode == K3_ANSWER_CHAT)
        params.n_points = k3_chat_points(r->chat, &p->ids, params.point);
    if (rc == 0 && !x->ask.id[0])
        rc = k3_router_stop_ids(r, &stop, err);
    if (rc == 0 && !x->ask.id[0]) {
        k3_journal_new_id(id);
        rc = k3_ask_new_as(&x->ask, p->id ? p->id : id, &p->ids, &params, stop.id, stop.n, shown(r, p), r->state_dir, err);
    }
    k3_ids_free(&stop);
    k3_ids_free(&p->ids);
    return rc;
}

int k3_exchange_resume(struct k3_exchange *x, struct k3_router *r, const char *id, struct k3_err *err)
{
    const cJSON *shown, *mode, *model, *text, *instance;
    bool thinking;
    int rc;

    *x = (struct k3_exchange){ .r = r, .shown = K3_OUT_RESPONSE };
    rc = k3_ask_resume(&x->ask, id, r->state_dir, err);
    if (rc < 0)
        return rc;
    shown = k3_ask_shown(&x->ask);
    mode = cJSON_GetObjectItemCaseSensitive(shown, "mode");
    if (!cJSON_IsString(mode))
        return k3_refuse(err, -EINVAL, "journal %s: its head does not say how the answer is shown", x->ask.journal.path);
    r->mode = strcmp(mode->valuestring, "chat") == 0  ? K3_ANSWER_CHAT
              : strcmp(mode->valuestring, "raw") == 0 ? K3_ANSWER_RAW
                                                      : K3_ANSWER_IDS;
    instance = cJSON_GetObjectItemCaseSensitive(shown, "instance");
    if (!r->instance[0])
        rc = k3_router_find(r, cJSON_IsString(instance) ? instance->valuestring : "default", true, err);
    if (rc < 0)
        return rc;
    model = cJSON_GetObjectItemCaseSensitive(shown, "model");
    snprintf(r->model_dir, sizeof(r->model_dir), "%s",
             r->opt.model ? r->opt.model : cJSON_IsString(model) ? model->valuestring : "");
    rc = k3_router_open_model(r, err);
    if (rc < 0)
        return rc;
    thinking = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(shown, "thinking"));
    r->opt.stop.n = 0;
    cJSON_ArrayForEach(text, cJSON_GetObjectItemCaseSensitive(shown, "stop"))
        if (cJSON_IsString(text) && r->opt.stop.n < sizeof(r->opt.stop.item) / sizeof(r->opt.stop.item[0]))
            r->opt.stop.item[r->opt.stop.n++] = text->valuestring;
    k3_answer_open(&x->answer, r->t, r->mode, thinking, r->opt.stop.item, r->opt.stop.n, show, x);
    if (r->opt.json)
        k3_answer_calls(&x->answer, UINT32_MAX, NULL);
    return 0;
}

int k3_exchange_run(struct k3_exchange *x, struct k3_err *err)
{
    const struct k3_router_opts *o = &x->r->opt;
    struct k3_ask_hooks hooks = { .arg = x, .token = on_token, .notice = on_notice, .interrupted = interrupted,
                                  .logits = o->logits ? on_logits : NULL,
                                  .progress = x->progress || x->watch ? on_progress : NULL, .leave = leave };
    struct k3_ask_peer peer = { x->r->rundir, x->r->instance, o->wait_s, o->model, o->state_dir, x->expects_peer,
                                x->r->model_digest };
    int rc, flush;

    x->stdout_tty = isatty(STDOUT_FILENO);
    rc = k3_ask_run(&x->ask, &peer, &hooks, err);

    flush = k3_answer_finish(&x->answer);
    k3_progress_erase(x->progress);
    if (x->live && x->thinking_live && x->shown == K3_OUT_THINK && k3_router_colours(STDOUT_FILENO))
        k3_router_write(UNDIM, strlen(UNDIM));
    if (rc == 0 && flush < 0)
        rc = k3_fail(err, flush, "showing the end of the answer: %s", strerror(-flush));
    return rc;
}

void k3_exchange_close(struct k3_exchange *x)
{
    k3_answer_close(&x->answer);
    k3_ask_free(&x->ask);
}
