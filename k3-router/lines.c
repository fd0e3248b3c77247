/* --lines: a reader, up to --parallel workers, and one object a line.
 *
 *   a line read -> a job at the end of the list         the main thread, which waits while --parallel jobs are not done
 *   job taken   -> run by a worker                      one exchange, one connection to k3-computed
 *   job done    -> stdout: printed once all before it are; --out: written at once
 * A line that cannot be asked gives an object with "error"; the others go on.  On stdout so does one whose request fails.  In
 * the file of --out only what would come out the same again is written; what is left the next run does, with the tokens of
 * the journals, whose ids are made of the file, the line and the options. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-router/lines.h"
#include "model/sha256.h"

#define DEFAULT_PARALLEL 4u
#define PARALLEL_MAX 64u
#define UNPRINTED_MAX 1024u /* answers that wait for an earlier one */
#define PROGRESS_NS 250000000ull
#define NOTICE_NS 2000000000ull /* one word of an outage that all workers meet */

struct job {
    struct job *next;
    struct k3_line line;
    bool taken, done, unwritten; /* unwritten: --out could not take it */
    struct k3_buf out; /* the object with its line end; empty: nothing to write */
    struct k3_err err;
};

struct lines {
    struct k3_router *r;
    struct k3_lines_out *file; /* NULL: stdout */
    struct k3_exchange_watch watch;
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct job *head, *tail;
    uint32_t n_jobs, n_undone, parallel;
    bool eof;
    atomic_bool stop;        /* nothing more is begun, and what runs is left to its journal */
    struct k3_err failed;    /* why it stops */
    struct k3_err first;     /* the first failure in order of the lines */
    uint64_t first_index;
    /* for the person */
    struct k3_progress_line *progress;
    uint64_t total, n_before, n_answered, n_left, n_tokens, start_ns, shown_ns, noticed_ns;
    char pass[48];
};

static bool leaving(void *arg)
{
    struct lines *l = arg;

    return atomic_load(&l->stop) || (l->file && k3_router_interrupts);
}

/* ---- what the person sees; with the lock ---- */

static void show_progress(struct lines *l, bool now)
{
    uint64_t done = l->n_before + l->n_answered, at = k3_now_ns(), left;
    char text[200], total[24] = "";
    size_t n;
    double s;

    if (!l->progress || (!now && at - l->shown_ns < PROGRESS_NS))
        return;
    l->shown_ns = at;
    if (l->total)
        snprintf(total, sizeof(total), "/%llu", (unsigned long long)l->total);
    n = (size_t)snprintf(text, sizeof(text), "%llu%s lines  %u running  %llu tokens%s", (unsigned long long)done, total,
                         l->n_undone, (unsigned long long)l->n_tokens, l->pass);
    left = l->total > done ? l->total - done : 0;
    if (l->n_answered && left) {
        s = (double)(at - l->start_ns) / 1e9 / (double)l->n_answered * (double)left;
        if (s < 120)
            snprintf(text + n, sizeof(text) - n, "  ETA %.0f s", s);
        else
            snprintf(text + n, sizeof(text) - n, "  ETA %.0f h %02.0f min", (double)(uint64_t)(s / 3600),
                     (double)((uint64_t)(s / 60) % 60));
    }
    k3_progress_text(l->progress, text, false);
}

static void on_progress(void *arg, const struct k3_ask_progress *p)
{
    struct lines *l = arg;

    pthread_mutex_lock(&l->lock);
    if (p->layers > 0)
        snprintf(l->pass, sizeof(l->pass), "  layer %.0f/%.0f  %.2f GB/s", p->layer, p->layers, p->bytes_per_s / 1e9);
    show_progress(l, false);
    pthread_mutex_unlock(&l->lock);
}

static void on_token(void *arg)
{
    struct lines *l = arg;

    pthread_mutex_lock(&l->lock);
    l->n_tokens++;
    pthread_mutex_unlock(&l->lock);
}

static void on_notice(void *arg, const char *line)
{
    struct lines *l = arg;
    uint64_t now = k3_now_ns();

    pthread_mutex_lock(&l->lock);
    if (!l->noticed_ns || now - l->noticed_ns > NOTICE_NS) {
        k3_progress_erase(l->progress);
        fprintf(stderr, "k3-router: %s\n", line);
    }
    l->noticed_ns = now;
    pthread_mutex_unlock(&l->lock);
}

/* ---- one line ---- */

/* The same line of the same input for the same file gives the same id, so that its journal is found again. */
static void request_id(const struct lines *l, const struct k3_line *line, const struct k3_prompt *p,
                       char out[K3_JOURNAL_ID_LEN + 1])
{
    const struct k3_router_opts *o = &l->r->opt;
    struct k3_sha256 s;
    uint8_t digest[32];
    char options[400];

    snprintf(options, sizeof(options), "%d %d %d %d %s %llu %llu %.17g %.17g %.17g %u", l->r->mode, o->json_lines, p->thinking,
             o->system != NULL, l->r->gen.effort ? l->r->gen.effort : "none", (unsigned long long)p->seed,
             (unsigned long long)p->max_tokens, p->temperature, p->top_p, p->min_p, p->top_k);
    k3_sha256_init(&s);
    k3_sha256_add_text(&s, l->file->salt);
    k3_sha256_add_text(&s, options);
    k3_sha256_add_text(&s, o->system ? o->system : "");
    for (size_t i = 0; i < p->n_stop; i++)
        k3_sha256_add_text(&s, p->stop[i]);
    k3_sha256_add_u64(&s, line->index);
    k3_sha256_add(&s, line->text.bytes, line->text.len_bytes);
    k3_sha256_end(&s, digest);
    for (size_t i = 0; i < K3_JOURNAL_ID_LEN / 2; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

/* From the line to what is asked. */
static int read_line(struct lines *l, struct job *j, struct k3_prompt *p, struct k3_line_body *body)
{
    const struct k3_line *line = &j->line;
    struct k3_err why = K3_ERR_INIT;
    char what[48];
    int rc;

    snprintf(what, sizeof(what), "line %llu of stdin", (unsigned long long)line->index + 1);
    if (line->len_bytes > line->text.len_bytes)
        return k3_refuse(&j->err, -EFBIG, "%s: %llu bytes; at most %u", what, (unsigned long long)line->len_bytes,
                         K3_PROMPT_BYTES_MAX);
    rc = k3_router_check_prompt(line->text.bytes, line->text.len_bytes, (size_t)line->at_bytes, what, &j->err);
    if (rc < 0)
        return rc;
    if (!l->r->opt.json_lines)
        return k3_exchange_prompt(l->r, line->text.bytes, line->text.len_bytes, &p->ids, &j->err);
    rc = k3_line_body(body, l->r, line->text.bytes, line->text.len_bytes, p, &why);
    if (rc < 0) {
        j->err = why;
        snprintf(j->err.text, sizeof(j->err.text), "%s: %.900s", what, why.text);
    }
    return rc;
}

/* Would it come out the same again?  Else it is left to another run. */
static bool is_final(const struct k3_err *e, int rc)
{
    return rc == 0 || (e->exit_status == K3_EXIT_REFUSED && rc != -ESTALE && rc != -EBUSY);
}

/* After this no further line can fare better. */
static bool is_fatal(const struct lines *l, const struct k3_err *e, int rc)
{
    return l->file && rc < 0 && (e->exit_status == K3_EXIT_NO_PEER || rc == -ESTALE);
}

static void write_line(struct lines *l, struct job *j, const struct k3_exchange *x)
{
    struct k3_err err = K3_ERR_INIT;
    int rc;

    pthread_mutex_lock(&l->lock); /* one at a time */
    rc = k3_lines_out_write(l->file, j->out.bytes, j->out.len_bytes, &err);
    if (rc < 0 && !l->failed.code)
        l->failed = err;
    if (rc < 0) {
        atomic_store(&l->stop, true);
        j->unwritten = true;
    }
    pthread_mutex_unlock(&l->lock);
    if (rc == 0 && x->ask.journal.path[0])
        unlink(x->ask.journal.path);
}

static void ask(struct lines *l, struct job *j)
{
    struct k3_exchange x = { .r = l->r, .ask = K3_ASK_INIT };
    struct k3_line_tag tag = { j->line.index, j->line.crc, NULL };
    struct k3_line_body body = { 0 };
    struct k3_prompt p;
    char id[K3_JOURNAL_ID_LEN + 1];
    int rc;

    k3_prompt_init(&p, l->r);
    if (l->file)
        p.seeded = true; /* a run that goes on must not roll the dice again */
    p.seed += p.seeded ? j->line.index : 0;
    rc = read_line(l, j, &p, &body);
    tag.id = body.id.len_bytes ? body.id.bytes : NULL;
    if (rc == 0 && l->file) {
        request_id(l, &j->line, &p, id);
        p.id = id;
    }
    if (rc == 0) {
        rc = k3_exchange_new(&x, l->r, &p, &j->err);
        x.stops_at_interrupt = !l->file;
        x.expects_peer = l->r->ctx != 0;
        x.watch = &l->watch;
        if (rc == 0)
            rc = k3_exchange_run(&x, &j->err);
    }
    if (rc == 0)
        j->err = (struct k3_err)K3_ERR_INIT; /* the words of an outage that is over */
    if (rc == 0 && x.ask.end == K3_ASK_CANCELLED)
        rc = k3_fail(&j->err, -ECANCELED, "cancelled after %zu tokens", x.ask.generated.n);
    if ((!l->file || is_final(&j->err, rc)) &&
        (k3_exchange_json(&x, &tag, rc < 0 ? &j->err : NULL, &j->out) < 0 || k3_buf_puts(&j->out, "\n") < 0)) {
        rc = k3_fail(&j->err, -ENOMEM, "line %llu of stdin: no memory for its answer", (unsigned long long)j->line.index + 1);
        j->out.len_bytes = 0;
    }
    if (l->file && j->out.len_bytes)
        write_line(l, j, &x);
    pthread_mutex_lock(&l->lock);
    if (is_fatal(l, &j->err, rc)) {
        if (!l->failed.code && !k3_router_interrupts)
            l->failed = j->err;
        atomic_store(&l->stop, true);
    } else if (l->file && !j->out.len_bytes) {
        k3_progress_erase(l->progress);
        fprintf(stderr, "k3-router: line %llu of stdin: %s\n", (unsigned long long)j->line.index + 1, j->err.text);
    }
    pthread_mutex_unlock(&l->lock);
    k3_ids_free(&p.ids);
    k3_exchange_close(&x);
    k3_line_body_free(&body);
}

/* ---- the list; with the lock ---- */

static void job_free(struct job *j)
{
    k3_buf_free(&j->line.text);
    k3_buf_free(&j->out);
    free(j);
}

static void note_failure(struct lines *l, uint64_t index, const struct k3_err *e)
{
    if (e->code && (!l->first.code || index < l->first_index)) {
        l->first = *e;
        l->first_index = index;
    }
}

static void settle(struct lines *l, struct job *j)
{
    note_failure(l, j->line.index, &j->err);
    if (l->file && (!j->out.len_bytes || j->unwritten))
        l->n_left++;
    else
        l->n_answered++;
    if (!l->file && !l->failed.code) {
        int rc;
        k3_progress_erase(l->progress);
        rc = k3_router_write(j->out.bytes, j->out.len_bytes);
        if (rc < 0) {
            k3_fail(&l->failed, rc, "stdout: %s", strerror(-rc));
            atomic_store(&l->stop, true);
        }
    }
    l->n_jobs--;
    job_free(j);
}

/* Takes jobs that are done off the list: for stdout the first ones, for a file any. */
static void settle_done(struct lines *l)
{
    struct job **p = &l->head, *last = NULL;

    while (*p && ((*p)->done || l->file)) {
        struct job *j = *p;
        if (!j->done) {
            last = j;
            p = &j->next;
            continue;
        }
        *p = j->next;
        settle(l, j);
    }
    if (!*p)
        l->tail = last;
}

static void *work(void *arg)
{
    struct lines *l = arg;

    pthread_mutex_lock(&l->lock);
    for (;;) {
        struct job *j = l->head;
        while (j && j->taken)
            j = j->next;
        if ((!j && l->eof) || leaving(l))
            break;
        if (!j) {
            pthread_cond_wait(&l->news, &l->lock);
            continue;
        }
        j->taken = true;
        pthread_mutex_unlock(&l->lock);
        ask(l, j);
        pthread_mutex_lock(&l->lock);
        j->done = true;
        l->n_undone--;
        settle_done(l);
        show_progress(l, true);
        pthread_cond_broadcast(&l->news);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static bool stop_reading(void *arg)
{
    const struct lines *l = arg;

    return k3_router_interrupts || atomic_load(&l->stop);
}

static int enqueue(struct lines *l, struct k3_line *line, struct k3_err *err)
{
    struct job *j = calloc(1, sizeof(*j));

    if (!j) {
        k3_buf_free(&line->text);
        return k3_fail(err, -ENOMEM, "line %llu of stdin: no memory", (unsigned long long)line->index + 1);
    }
    j->line = *line;
    pthread_mutex_lock(&l->lock);
    while ((l->n_undone >= l->parallel || l->n_jobs >= UNPRINTED_MAX) && !leaving(l))
        pthread_cond_wait(&l->news, &l->lock);
    if (l->tail)
        l->tail->next = j;
    else
        l->head = j;
    l->tail = j;
    l->n_jobs++;
    l->n_undone++;
    pthread_cond_broadcast(&l->news);
    pthread_mutex_unlock(&l->lock);
    return 0;
}

/* In *d what the file has of the line, or NULL.  Negative: the file is of another input. */
static int find(struct lines *l, const struct k3_line *line, const struct k3_lines_done **d, struct k3_err *err)
{
    *d = l->file ? k3_lines_out_find(l->file, line->index) : NULL;
    if (*d && (*d)->crc != line->crc)
        return k3_refuse(err, -EINVAL, "--out %s: its answer to line %llu is of another text than that line of stdin; name another "
                         "file", l->file->path, (unsigned long long)line->index + 1);
    return 0;
}

/* 1: the line is answered in the file; 0: it is not; negative: the file is of another input. */
static int answered(struct lines *l, const struct k3_line *line, struct k3_err *err)
{
    const struct k3_lines_done *d;
    struct k3_err was = K3_ERR_INIT;
    int rc = find(l, line, &d, err);

    if (!d || rc < 0)
        return rc;
    pthread_mutex_lock(&l->lock);
    l->n_before++;
    if (d->code) {
        k3_refuse(&was, -EREMOTEIO, "line %llu of stdin has failed before; its line in %s says why",
                  (unsigned long long)line->index + 1, l->file->path);
        was.exit_status = d->code;
        note_failure(l, line->index, &was);
    }
    pthread_mutex_unlock(&l->lock);
    return 1;
}

/* Where stdin can be read twice, the file is known to be of this input before anything gets into it. */
static int check_input(struct lines *l, struct k3_err *err)
{
    off_t begin = lseek(STDIN_FILENO, 0, SEEK_CUR);
    struct k3_line_reader *in;
    const struct k3_lines_done *d;
    struct k3_line line;
    int rc = 1;

    if (!l->total || l->file->n_done == 0 || begin < 0)
        return 0;
    in = calloc(1, sizeof(*in));
    if (!in)
        return k3_fail(err, -ENOMEM, "stdin: no memory");
    *in = (struct k3_line_reader){ .fd = STDIN_FILENO, .name = "stdin", .stop = stop_reading, .arg = l };
    while (rc > 0 && (rc = k3_line_next(in, &line, err)) > 0)
        if (find(l, &line, &d, err) < 0)
            rc = err->code;
    free(in);
    if (lseek(STDIN_FILENO, begin, SEEK_SET) < 0 && rc == 0)
        rc = k3_fail(err, -errno, "stdin: %s", strerror(errno));
    return rc;
}

static int read_lines(struct lines *l, struct k3_err *err)
{
    struct k3_line_reader *in = calloc(1, sizeof(*in));
    struct k3_line line;
    int rc = in ? 1 : k3_fail(err, -ENOMEM, "stdin: no memory");

    if (in)
        *in = (struct k3_line_reader){ .fd = STDIN_FILENO, .name = "stdin", .max_bytes = K3_PROMPT_BYTES_MAX,
                                       .stop = stop_reading, .arg = l };
    while (rc > 0 && !stop_reading(l) && (rc = k3_line_next(in, &line, err)) > 0) {
        int was = answered(l, &line, err);
        if (was != 0)
            k3_buf_free(&line.text);
        if (was == 0)
            was = enqueue(l, &line, err) < 0 ? -ENOMEM : 1;
        rc = was;
    }
    if (rc == 0 && in->index == 0)
        rc = k3_refuse(err, -EINVAL, "stdin: no line, so no prompt");
    free(in);
    return rc < 0 && rc != -EINTR ? rc : 0;
}

/* ---- all of it ---- */

/* What the program says and leaves with. */
static int conclude(struct lines *l, int rc, struct k3_err *err)
{
    if (rc == 0 && l->failed.code) {
        *err = l->failed;
        rc = l->failed.code;
    }
    if (l->file && (l->failed.code || k3_router_interrupts || l->n_left))
        fprintf(stderr, "k3-router: %llu lines are answered in %s; the same command again does the rest\n",
                (unsigned long long)l->n_before + l->n_answered, l->file->path);
    if (rc == 0 && l->file && k3_router_interrupts)
        rc = k3_fail(err, -EINTR, "stopped");
    if (rc == 0 && l->first.code) {
        *err = l->first;
        rc = l->first.code;
    }
    return rc;
}

static int run(struct lines *l, struct k3_err *err)
{
    pthread_t worker[PARALLEL_MAX];
    uint32_t n = 0;
    int rc;

    while (n < l->parallel && pthread_create(&worker[n], NULL, work, l) == 0)
        n++;
    if (n == 0)
        return k3_fail(err, -EAGAIN, "--parallel %u: no thread could be started", l->parallel);
    rc = read_lines(l, err);
    pthread_mutex_lock(&l->lock);
    l->eof = true;
    if (rc < 0 && l->file)
        atomic_store(&l->stop, true);
    pthread_cond_broadcast(&l->news);
    pthread_mutex_unlock(&l->lock);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(worker[i], NULL);
    while (l->head) { /* never begun */
        struct job *j = l->head;
        l->head = j->next;
        job_free(j);
    }
    k3_progress_close(l->progress);
    return conclude(l, rc, err);
}

int k3_router_lines(struct k3_router *r, struct k3_err *err)
{
    uint32_t often = r->sequences > DEFAULT_PARALLEL ? r->sequences : DEFAULT_PARALLEL;
    struct lines l = { .r = r, .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER, .start_ns = k3_now_ns(),
                       .parallel = r->opt.parallel ? r->opt.parallel : often < PARALLEL_MAX ? often : PARALLEL_MAX,
                       .total = k3_lines_count(STDIN_FILENO), .progress = k3_progress_open(500) };
    struct k3_lines_out file = K3_LINES_OUT_INIT;
    int rc = r->opt.out ? k3_lines_out_open(&file, r->opt.out, err) : 0;

    l.watch = (struct k3_exchange_watch){ &l, on_progress, on_notice, on_token, leaving };
    if (r->opt.out)
        l.file = &file;
    if (isatty(STDIN_FILENO))
        fprintf(stderr, "k3-router: reading prompts from the terminal, one a line; end with Ctrl-D\n");
    k3_router_catch_interrupts();
    if (l.file)
        k3_router_catch(SIGTERM); /* in order: k3-computed forgets what nobody waits for */
    if (rc == 0 && l.file)
        rc = check_input(&l, err);
    if (rc == 0)
        rc = run(&l, err);
    k3_lines_out_close(&file);
    return rc;
}
