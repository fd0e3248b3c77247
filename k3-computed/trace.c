#include "k3-computed/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define BUFFER_BYTES (4u << 20)

enum state { OFF, ON, CLOSING, FAILED };

struct k3_tracer {
    const struct k3_model *m;
    _Atomic bool *stop;
    pthread_mutex_t lock; /* all up to the mark */
    pthread_cond_t data, room;
    enum state state;
    char path[4096], error[512];
    int fd;
    pthread_t thread;
    bool has_thread, open_pass; /* open_pass: the last record is not an END */
    uint8_t *buffer;
    uint64_t cap_bytes, put_bytes, written_bytes; /* put and written: ever, of this file */
    uint64_t n_passes;
    uint32_t look_k, session;

    /* the thread that runs passes alone */
    bool recording;
    uint32_t of_session, n_rows, pass_look_k;
    uint8_t *stage; /* one record */
    size_t stage_bytes;
};

static uint32_t look_of(const struct k3_config *c)
{
    uint64_t k = 4ull * c->top_k;

    k = k < c->n_experts ? k : c->n_experts;
    return (uint32_t)(k < 4ull * c->latent ? k : 4ull * c->latent); /* the pass has that much room */
}

int k3_tracer_new(struct k3_tracer **out, const struct k3_model *m, uint32_t max_rows, _Atomic bool *stop,
                  struct k3_err *err)
{
    struct k3_tracer *t = calloc(1, sizeof(*t));
    uint64_t width = 2ull * look_of(&m->cfg), stage_bytes;
    pthread_condattr_t monotonic;

    if (!t)
        return k3_fail(err, -ENOMEM, "no memory for the trace");
    width = width > 2ull * m->cfg.top_k ? width : 2ull * m->cfg.top_k;
    stage_bytes = 64 + max_rows * (width > 8 ? width : 8);
    t->m = m;
    t->stop = stop;
    t->fd = -1;
    t->cap_bytes = BUFFER_BYTES + stage_bytes;
    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&t->data, &monotonic);
    pthread_cond_init(&t->room, &monotonic);
    pthread_condattr_destroy(&monotonic);
    t->stage = malloc(stage_bytes);
    if (!t->stage) {
        k3_tracer_free(t);
        return k3_fail(err, -ENOMEM, "no memory for the trace");
    }
    *out = t;
    return 0;
}

/* ---- the thread that writes ---- */

static void failed(struct k3_tracer *t, const char *why)
{
    t->state = FAILED;
    snprintf(t->error, sizeof(t->error), "%s", why);
    k3_log(K3_LOG_WARN, "trace_failed", "file=\"%s\" bytes=%llu error=\"%s\"", t->path,
           (unsigned long long)t->written_bytes, why);
    pthread_cond_broadcast(&t->room);
    pthread_cond_broadcast(&t->data);
}

static void *writer(void *arg)
{
    struct k3_tracer *t = arg;

    pthread_mutex_lock(&t->lock);
    while (t->state != FAILED && (t->state == ON || t->put_bytes > t->written_bytes)) {
        uint64_t at = t->written_bytes % t->cap_bytes, n = t->put_bytes - t->written_bytes;
        ssize_t done;

        if (n == 0) {
            pthread_cond_wait(&t->data, &t->lock);
            continue;
        }
        n = n < t->cap_bytes - at ? n : t->cap_bytes - at;
        pthread_mutex_unlock(&t->lock); /* nobody puts anything there meanwhile */
        done = write(t->fd, t->buffer + at, n);
        if (done < 0 && errno != EINTR)
            done = -errno;
        else if (done < 0)
            done = 0;
        pthread_mutex_lock(&t->lock);
        if (done < 0) {
            failed(t, strerror((int)-done));
            break;
        }
        t->written_bytes += (uint64_t)done;
        pthread_cond_broadcast(&t->room);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* With the lock held; state is not ON.  Leaves OFF. */
static void end_writer(struct k3_tracer *t)
{
    if (t->has_thread) {
        pthread_mutex_unlock(&t->lock);
        pthread_join(t->thread, NULL);
        pthread_mutex_lock(&t->lock);
        t->has_thread = false;
    }
    if (t->fd >= 0 && close(t->fd) < 0 && t->state == CLOSING)
        failed(t, strerror(errno));
    t->fd = -1;
    free(t->buffer);
    t->buffer = NULL;
}

void k3_tracer_free(struct k3_tracer *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    if (t->state == ON)
        t->state = CLOSING;
    pthread_cond_broadcast(&t->data);
    end_writer(t);
    pthread_mutex_unlock(&t->lock);
    pthread_cond_destroy(&t->data);
    pthread_cond_destroy(&t->room);
    pthread_mutex_destroy(&t->lock);
    free(t->stage);
    free(t);
}

/* ---- records ---- */

/* With the lock held.  false: the trace is over. */
static bool put(struct k3_tracer *t, const void *from, size_t n)
{
    uint32_t session = t->session;

    while (t->state == ON && t->session == session && t->cap_bytes - (t->put_bytes - t->written_bytes) < n) {
        uint64_t at = k3_now_ns() + K3_TICK_NS;
        struct timespec tick = { (time_t)(at / 1000000000u), (long)(at % 1000000000u) };

        if (atomic_load(t->stop)) {
            failed(t, "stopped while the disk was too slow");
            break;
        }
        pthread_cond_timedwait(&t->room, &t->lock, &tick);
    }
    if (t->state != ON || t->session != session)
        return false;
    for (size_t i = 0; i < n;) {
        uint64_t at = t->put_bytes % t->cap_bytes;
        size_t part = n - i < t->cap_bytes - at ? n - i : (size_t)(t->cap_bytes - at);

        memcpy(t->buffer + at, (const uint8_t *)from + i, part);
        t->put_bytes += part;
        i += part;
    }
    pthread_cond_signal(&t->data);
    return true;
}

static void stage(struct k3_tracer *t, const void *from, size_t n)
{
    memcpy(t->stage + t->stage_bytes, from, n);
    t->stage_bytes += n;
}

static void stage_record(struct k3_tracer *t, uint32_t kind, uint32_t n)
{
    const struct k3_trace_record r = { kind, n };

    t->stage_bytes = 0;
    stage(t, &r, sizeof(r));
}

/* Whole records only: a stop comes between two, and never between an END and the news of it. */
static void commit(struct k3_tracer *t, bool end)
{
    pthread_mutex_lock(&t->lock);
    t->recording = t->of_session == t->session && t->open_pass && put(t, t->stage, t->stage_bytes);
    if (t->recording && end) {
        t->open_pass = false;
        t->n_passes++;
    }
    pthread_mutex_unlock(&t->lock);
}

bool k3_tracer_begin(struct k3_tracer *t, uint64_t pass, const struct k3_tracer_row *rows, uint32_t n_rows,
                     uint32_t *look_k)
{
    pthread_mutex_lock(&t->lock);
    t->recording = t->state == ON;
    t->of_session = t->session;
    t->pass_look_k = t->look_k;
    t->n_rows = n_rows;
    if (t->recording) {
        stage_record(t, K3_TRACE_PASS, n_rows);
        stage(t, &pass, sizeof(pass));
        stage(t, rows, n_rows * sizeof(*rows));
        t->recording = t->open_pass = put(t, t->stage, t->stage_bytes);
    }
    *look_k = t->recording ? t->pass_look_k : 0;
    pthread_mutex_unlock(&t->lock);
    return t->recording;
}

void k3_tracer_look(struct k3_tracer *t, uint32_t layer, const uint16_t *ids, uint32_t k)
{
    if (!t->recording || !t->pass_look_k)
        return;
    stage_record(t, K3_TRACE_LOOK, layer);
    for (uint32_t row = 0; row < t->n_rows; row++)
        stage(t, ids + (size_t)row * k, t->pass_look_k * sizeof(*ids));
    commit(t, false);
}

void k3_tracer_route(struct k3_tracer *t, uint32_t layer, uint32_t row, const uint16_t *ids)
{
    if (!t->recording)
        return;
    if (row == 0)
        stage_record(t, K3_TRACE_ROUTES, layer);
    stage(t, ids, t->m->cfg.top_k * sizeof(*ids));
    if (row == t->n_rows - 1)
        commit(t, false);
}

void k3_tracer_end(struct k3_tracer *t, enum k3_trace_end end)
{
    if (!t->recording)
        return;
    stage_record(t, K3_TRACE_END, end);
    commit(t, true);
    t->recording = false;
}

/* ---- start, stop, info ---- */

int k3_tracer_start(struct k3_tracer *t, const char *path, bool lookahead, struct k3_err *err)
{
    const struct k3_config *c = &t->m->cfg;
    struct k3_trace_head h = { .magic = K3_TRACE_MAGIC, .version = K3_TRACE_VERSION, .head_bytes = sizeof(h),
                               .n_layers = c->n_layers, .first_moe = c->first_dense, .n_experts = c->n_experts,
                               .top_k = c->top_k, .look_k = lookahead ? look_of(c) : 0,
                               .expert_bytes = t->m->expert_bytes, .trunk_bytes = t->m->trunk_bytes };
    int rc = 0;

    if (c->first_dense >= c->n_layers)
        return k3_refuse(err, -ENOTSUP, "trace: this model has no experts (%u layers, all dense)", c->n_layers);
    if (path[0] != '/' || strlen(path) >= sizeof(t->path))
        return k3_refuse(err, -EINVAL, "trace file \"%.100s\": must be an absolute path of at most %zu bytes", path,
                         sizeof(t->path) - 1);
    memcpy(h.model_digest, t->m->digest, sizeof(h.model_digest));
    pthread_mutex_lock(&t->lock);
    if (t->state == ON || t->state == CLOSING) {
        rc = k3_refuse(err, -EBUSY, "a trace is being written to %s: stop it first", t->path);
        goto out;
    }
    end_writer(t);
    t->state = OFF;
    t->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (t->fd < 0) {
        rc = k3_refuse(err, -errno, "trace file %s: %s%s", path, strerror(errno),
                       errno == EEXIST ? "; nothing is overwritten, give another name" : "");
        goto out;
    }
    t->buffer = malloc(t->cap_bytes);
    if (!t->buffer) {
        rc = k3_fail(err, -ENOMEM, "no memory for the buffer of a trace (%llu bytes)", (unsigned long long)t->cap_bytes);
    } else {
        snprintf(t->path, sizeof(t->path), "%s", path);
        t->error[0] = 0;
        t->put_bytes = t->written_bytes = t->n_passes = 0;
        t->open_pass = false;
        t->look_k = h.look_k;
        t->session++;
        t->state = ON;
        put(t, &h, sizeof(h));
        rc = pthread_create(&t->thread, NULL, writer, t);
        t->has_thread = rc == 0;
        if (rc)
            rc = k3_fail(err, -rc, "thread of the trace: %s", strerror(rc));
    }
    if (rc < 0) {
        t->state = OFF;
        end_writer(t);
        unlink(path);
    }
out:
    pthread_mutex_unlock(&t->lock);
    return rc;
}

int k3_tracer_stop(struct k3_tracer *t, const char *path, cJSON *reply, struct k3_err *err)
{
    int rc = 0;

    pthread_mutex_lock(&t->lock);
    if (t->state == OFF || t->state == CLOSING) {
        rc = k3_refuse(err, -ENOENT, t->state == OFF ? "no trace is being written: trace start FILE begins one"
                                                     : "the trace is being stopped already");
    } else if (path && strcmp(path, t->path) != 0) {
        rc = k3_refuse(err, -ENOENT, "%s is not being written: the trace goes to %s", path, t->path);
    } else {
        const struct k3_trace_record cut = { K3_TRACE_END, K3_TRACE_CUT };

        if (t->state == ON && t->open_pass && put(t, &cut, sizeof(cut)))
            t->n_passes++;
        t->session++; /* what the pass at work still has to say is not for this file */
        t->open_pass = false;
        if (t->state == ON)
            t->state = CLOSING;
        pthread_cond_broadcast(&t->data);
        pthread_cond_broadcast(&t->room);
        end_writer(t);
        if (t->state == FAILED)
            rc = k3_fail(err, -EIO, "trace %s failed after %llu bytes: %s; the whole passes in it can be replayed", t->path,
                         (unsigned long long)t->written_bytes, t->error);
        t->state = OFF;
        cJSON_AddStringToObject(reply, "file", t->path);
        cJSON_AddNumberToObject(reply, "passes", (double)t->n_passes);
        cJSON_AddNumberToObject(reply, "bytes", (double)t->written_bytes);
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void k3_tracer_info(struct k3_tracer *t, cJSON *to)
{
    static const char *const name[] = { "off", "on", "closing", "failed" };

    pthread_mutex_lock(&t->lock);
    cJSON_AddStringToObject(to, "state", name[t->state]);
    if (t->state != OFF) {
        cJSON_AddStringToObject(to, "file", t->path);
        cJSON_AddNumberToObject(to, "passes", (double)t->n_passes);
        cJSON_AddNumberToObject(to, "bytes", (double)t->put_bytes);
        cJSON_AddBoolToObject(to, "lookahead", t->look_k > 0);
    }
    if (t->state == FAILED)
        cJSON_AddStringToObject(to, "error", t->error);
    pthread_mutex_unlock(&t->lock);
}
