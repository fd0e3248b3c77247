/* What is the same for all requests of one run: peers, tokenizer, defaults of the model. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "ipc/msg.h"
#include "text/file.h"
#include "k3-router/router.h"
#include "shm/segment.h"

#define INFO_MS 5000
#define GENERATION_FILE_MAX (1u << 20)
#define DEFAULT_TEMPERATURE 1.0 /* spec/text.md 4.1 */
#define DEFAULT_TOP_P 0.95
#define DEFAULT_EFFORT "max"

volatile sig_atomic_t k3_router_interrupts;

static void on_interrupt(int sig)
{
    (void)sig;
    k3_router_interrupts = k3_router_interrupts + 1;
}

int k3_router_write(const char *bytes, size_t len_bytes)
{
    while (len_bytes) {
        ssize_t n = write(STDOUT_FILENO, bytes, len_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        bytes += n;
        len_bytes -= (size_t)n;
    }
    return 0;
}

bool k3_router_colours(int fd)
{
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");

    return isatty(fd) && !(no && *no) && term && *term && strcmp(term, "dumb") != 0;
}

size_t k3_router_chomp(const char *text, size_t len_bytes)
{
    if (len_bytes && text[len_bytes - 1] == '\n')
        len_bytes--;
    if (len_bytes && text[len_bytes - 1] == '\r')
        len_bytes--;
    return len_bytes;
}

int k3_router_check_prompt(const char *text, size_t len_bytes, size_t base_bytes, const char *what, struct k3_err *err)
{
    size_t bad = k3_utf8_check(text, len_bytes);

    if (len_bytes == 0)
        return k3_refuse(err, -EINVAL, "%s: the prompt is empty", what);
    if (bad < len_bytes)
        return k3_refuse(err, -EILSEQ, "%s: invalid UTF-8 at byte offset %zu (0x%02x)", what, base_bytes + bad,
                         (unsigned char)text[bad]);
    return 0;
}

static int bad_key(struct k3_err *err, const char *name, const char *key, const char *want)
{
    return k3_refuse(err, -EINVAL, "%s: \"%s\" should be %s", name, key, want);
}

/* Absent: *out stays. */
static bool number(const cJSON *root, const char *key, double min, double max, double *out)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(root, key);

    if (!v || cJSON_IsNull(v))
        return true;
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= min && v->valuedouble <= max))
        return false;
    *out = v->valuedouble;
    return true;
}

static int push_eos(struct k3_ids *eos, const cJSON *v)
{
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= UINT32_MAX) ||
        v->valuedouble != (double)(uint32_t)v->valuedouble)
        return -EINVAL;
    return k3_ids_push(eos, (uint32_t)v->valuedouble);
}

int k3_generation_parse(struct k3_generation *g, const char *json, size_t len_bytes, const char *name,
                        struct k3_err *err)
{
    static const char *const efforts[] = { "low", "high", "max" };
    cJSON *root = cJSON_ParseWithLength(json, len_bytes);
    const cJSON *v, *eos = cJSON_GetObjectItemCaseSensitive(root, "eos_token_id");
    double top_k = g->top_k;
    int rc = 0;

    if (!cJSON_IsObject(root))
        rc = k3_refuse(err, -EINVAL, "%s: not a JSON object", name);
    else if (!number(root, "temperature", 0, 100, &g->temperature))
        rc = bad_key(err, name, "temperature", "a number from 0 to 100");
    else if (!number(root, "top_p", 1e-9, 1, &g->top_p))
        rc = bad_key(err, name, "top_p", "a number over 0 up to 1");
    else if (!number(root, "min_p", 0, 1, &g->min_p))
        rc = bad_key(err, name, "min_p", "a number from 0 to 1");
    else if (!number(root, "top_k", 0, 1u << 30, &top_k))
        rc = bad_key(err, name, "top_k", "a whole number from 0");
    g->top_k = (uint32_t)top_k;
    if (rc == 0 && eos && !cJSON_IsArray(eos) && push_eos(&g->eos, eos) < 0)
        rc = bad_key(err, name, "eos_token_id", "a token id or an array of them");
    if (rc == 0 && cJSON_IsArray(eos))
        cJSON_ArrayForEach(v, eos)
            if (rc == 0 && push_eos(&g->eos, v) < 0)
                rc = bad_key(err, name, "eos_token_id", "a token id or an array of them");
    if (rc == 0 && (v = cJSON_GetObjectItemCaseSensitive(root, "thinking"))) {
        if (!cJSON_IsBool(v))
            rc = bad_key(err, name, "thinking", "true or false");
        g->thinking = cJSON_IsTrue(v);
    }
    if (rc == 0 && (v = cJSON_GetObjectItemCaseSensitive(root, "thinking_effort"))) {
        g->effort = NULL;
        for (size_t i = 0; i < 3; i++)
            if (cJSON_IsString(v) && strcmp(v->valuestring, efforts[i]) == 0)
                g->effort = efforts[i];
        if (!g->effort && !cJSON_IsNull(v))
            rc = bad_key(err, name, "thinking_effort", "low, high, max or null");
    }
    cJSON_Delete(root);
    return rc;
}

static int read_generation(struct k3_router *r, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    char path[1100];
    int rc = 0;

    r->gen = (struct k3_generation){ .temperature = DEFAULT_TEMPERATURE, .top_p = DEFAULT_TOP_P, .thinking = true,
                                     .effort = DEFAULT_EFFORT };
    snprintf(path, sizeof(path), "%s/generation_config.json", r->model_dir);
    if (access(path, F_OK) == 0) {
        rc = k3_file_read(&b, path, GENERATION_FILE_MAX, err);
        if (rc == 0)
            rc = k3_generation_parse(&r->gen, b.len_bytes ? b.bytes : "", b.len_bytes, path, err);
    }
    k3_buf_free(&b);
    return rc;
}

/* What k3-computed says of itself.  Nobody there is no error yet: with --model the submit will say it, with what to do. */
static int ask_info(struct k3_router *r)
{
    struct k3_client *c = NULL;
    cJSON *request = cJSON_CreateObject(), *reply = NULL;
    const cJSON *v, *digest;

    cJSON_AddStringToObject(request, "cmd", "info");
    if (k3_client_open(&c, r->rundir, "k3-computed.ctl", NULL) == 0 &&
        k3_client_call(c, request, INFO_MS, &reply, NULL) == 0) {
        v = cJSON_GetObjectItemCaseSensitive(reply, "model");
        digest = cJSON_GetObjectItemCaseSensitive(reply, "model_digest");
        if (cJSON_IsString(v) && !r->model_dir[0]) {
            snprintf(r->model_dir, sizeof(r->model_dir), "%s", v->valuestring);
            if (cJSON_IsString(digest))
                snprintf(r->model_digest, sizeof(r->model_digest), "%s", digest->valuestring);
        }
        v = cJSON_GetObjectItemCaseSensitive(reply, "ctx");
        if (cJSON_IsNumber(v) && v->valuedouble >= 1 && v->valuedouble <= 1e9)
            r->ctx = (uint64_t)v->valuedouble;
        v = cJSON_GetObjectItemCaseSensitive(reply, "sequences");
        if (cJSON_IsNumber(v) && v->valuedouble >= 1 && v->valuedouble <= 1e6)
            r->sequences = (uint32_t)v->valuedouble;
    }
    cJSON_Delete(reply);
    cJSON_Delete(request);
    k3_client_close(c);
    return 0;
}

int k3_router_open_model(struct k3_router *r, struct k3_err *err)
{
    char path[1100];
    int rc = read_generation(r, err);
    bool here, model_here;

    if (r->opt.effort)
        r->gen.effort = strcmp(r->opt.effort, "none") == 0 ? NULL : r->opt.effort;
    r->thinking = r->opt.think ? strcmp(r->opt.think, "on") == 0 : r->gen.thinking;
    snprintf(path, sizeof(path), "%s/tiktoken.model", r->model_dir);
    here = access(path, F_OK) == 0;
    model_here = access(r->model_dir, F_OK) == 0;
    if (rc < 0 || (r->mode == K3_ANSWER_IDS && !here && (model_here || !r->opt.model)))
        return rc; /* ids in, ids out: there is no text then */
    if (!here && model_here)
        return k3_refuse(err, -ENOENT, "%s has no tokenizer (tiktoken.model), so it takes no text; --ids 1,2,3 works, or name "
                         "a directory with its tokenizer by --model", r->model_dir);
    rc = k3_tokenizer_open(&r->t, r->model_dir, err);
    if (rc == 0)
        rc = k3_chat_open(&r->chat, r->t, err);
    return rc;
}

void k3_router_catch_interrupts(void)
{
    k3_router_catch(SIGINT);
}

void k3_router_catch(int sig)
{
    struct sigaction sa = { .sa_handler = on_interrupt };

    sigaction(sig, &sa, NULL);
}

int k3_router_find(struct k3_router *r, const char *instance, bool absent_ok, struct k3_err *err)
{
    const char *model = r->opt.model;
    int rc = k3_instance_check(instance, err);

    if (rc < 0)
        return rc;
    snprintf(r->instance, sizeof(r->instance), "%s", instance);
    rc = k3_rundir(r->rundir, sizeof(r->rundir), instance, false, err);
    if (rc == -ENOENT && absent_ok) /* the answer may be whole already */
        return 0;
    if (rc == -ENOENT) /* no such instance has ever been: the same as nobody being there */
        rc = k3_no_peer(err, rc, "instance \"%s\" is not running (there is no %s); start it with: run/k3-run up "
                        "--instance %s%s%s", instance, r->rundir, instance, model ? " --model " : "", model ? model : "");
    return rc;
}

/* Whether FILE of --logits can be written, before anything is computed.  What is there stays as it is. */
static int check_logits(const char *path, struct k3_err *err)
{
    struct stat st;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);

    if (fd >= 0) {
        unlink(path);
    } else if (errno == EEXIST && stat(path, &st) == 0) {
        if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
            return 0; /* opening a pipe is felt at its other end */
        fd = open(path, O_WRONLY | O_CLOEXEC);
    }
    if (fd < 0)
        return k3_refuse(err, -errno, "--logits %s: %s", path, strerror(errno));
    close(fd);
    return 0;
}

static void block_signals(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

int k3_router_open(struct k3_router *r, struct k3_err *err)
{
    const struct k3_router_opts *o = &r->opt;
    int rc = o->logits ? check_logits(o->logits, err) : 0;

    if (rc == 0 && (o->instance || !o->resume)) /* else its journal names the instance */
        rc = k3_router_find(r, o->instance ? o->instance : "default", o->resume || o->http, err);
    if (rc == 0)
        rc = k3_journal_dir(r->state_dir, sizeof(r->state_dir), o->state_dir, err);
    if (rc < 0)
        return rc;
    if (o->http) /* before the threads that ask k3-computed: only the daemon's own sees signals */
        block_signals();
    k3_journal_prune(r->state_dir, time(NULL), K3_JOURNAL_KEEP_FILES);
    signal(SIGPIPE, SIG_IGN);
    r->mode = o->ids ? K3_ANSWER_IDS : o->raw ? K3_ANSWER_RAW : K3_ANSWER_CHAT;
    if (o->resume)
        return 0; /* its journal names the model */
    if (o->model)
        snprintf(r->model_dir, sizeof(r->model_dir), "%s", o->model);
    ask_info(r);
    if (!r->model_dir[0]) /* one that comes up in a moment would be sent ids of whatever was guessed */
        return k3_no_peer(err, -ECONNREFUSED, "k3-computed of instance \"%s\" is not there to say which model it runs; start it "
                          "with: run/k3-run up --instance %s, or name the model: --model DIR", r->instance, r->instance);
    return k3_router_open_model(r, err);
}

void k3_router_close(struct k3_router *r)
{
    k3_chat_close(r->chat);
    k3_tokenizer_close(r->t);
    k3_ids_free(&r->gen.eos);
}
