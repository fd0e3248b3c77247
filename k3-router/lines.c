/* --lines: a reader, up to --parallel workers, answers printed in the order of the prompts.
 *
 *   a line read -> a job at the end of the list         the main thread, which waits while --parallel jobs are not printed
 *   job taken   -> run by a worker                      one exchange, one connection to k3-computed
 *   job done    -> printed once all before it are       by the worker that finds it at the head of the list
 * A line that cannot be asked, or whose request fails, gives an object with "error"; the others go on. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "k3-router/router.h"

#define DEFAULT_PARALLEL 4u

struct job {
    struct job *next;
    long long index;
    size_t at_bytes; /* offset of the line in stdin */
    char *line;
    size_t len_bytes;
    bool taken, done;
    struct k3_buf out;
    struct k3_err err;
};

struct lines {
    struct k3_router *r;
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct job *head, *tail;
    uint32_t n_jobs, parallel;
    bool eof;
    int write_rc;
    struct k3_err first; /* the first failure in order of the lines */
};

static int ask(struct lines *l, struct job *j)
{
    struct k3_exchange x = { .r = l->r, .ask = K3_ASK_INIT };
    struct k3_ids prompt = { 0 };
    char what[48];
    int rc;

    snprintf(what, sizeof(what), "line %lld of stdin", j->index + 1);
    rc = k3_router_check_prompt(j->line, j->len_bytes, j->at_bytes, what, &j->err);
    if (rc == 0)
        rc = k3_exchange_prompt(l->r, j->line, j->len_bytes, &prompt, &j->err);
    if (rc == 0) {
        rc = k3_exchange_new(&x, l->r, &prompt, &j->err);
        x.stops_at_interrupt = true;
        if (rc == 0)
            rc = k3_exchange_run(&x, &j->err);
    }
    if (rc == 0 && x.ask.end == K3_ASK_CANCELLED)
        rc = k3_fail(&j->err, -ECANCELED, "cancelled after %zu tokens", x.ask.generated.n);
    if (k3_exchange_json(&x, j->index, rc < 0 ? &j->err : NULL, &j->out) < 0 || k3_buf_puts(&j->out, "\n") < 0)
        rc = k3_fail(&j->err, -ENOMEM, "%s: no memory for its answer", what);
    k3_ids_free(&prompt);
    k3_exchange_close(&x);
    return rc;
}

static void job_free(struct job *j)
{
    free(j->line);
    k3_buf_free(&j->out);
    free(j);
}

/* Holds the lock: so nothing is printed out of order. */
static void print_done(struct lines *l)
{
    while (l->head && l->head->done) {
        struct job *j = l->head;
        if (j->err.code && !l->first.code)
            l->first = j->err;
        if (l->write_rc == 0)
            l->write_rc = k3_router_write(j->out.bytes, j->out.len_bytes);
        l->head = j->next;
        if (!l->head)
            l->tail = NULL;
        l->n_jobs--;
        job_free(j);
    }
}

static void *work(void *arg)
{
    struct lines *l = arg;

    pthread_mutex_lock(&l->lock);
    for (;;) {
        struct job *j = l->head;
        while (j && j->taken)
            j = j->next;
        if (!j && l->eof)
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
        print_done(l);
        pthread_cond_broadcast(&l->news);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static int read_lines(struct lines *l, struct k3_err *err)
{
    char *line = NULL;
    size_t cap = 0, at = 0;
    long long index = 0;
    ssize_t n;
    int rc = 0;

    while (rc == 0 && !k3_router_interrupts && (n = getline(&line, &cap, stdin)) > 0) {
        struct job *j = calloc(1, sizeof(*j));
        size_t len = k3_router_chomp(line, (size_t)n);

        if (!j || (size_t)n > K3_PROMPT_BYTES_MAX) {
            free(j);
            rc = k3_refuse(err, -EFBIG, "line %lld of stdin: %zd bytes; at most %u", index + 1, n, K3_PROMPT_BYTES_MAX);
            break;
        }
        *j = (struct job){ .index = index++, .at_bytes = at, .line = line, .len_bytes = len };
        line = NULL;
        cap = 0;
        at += (size_t)n;
        pthread_mutex_lock(&l->lock);
        while (l->n_jobs >= l->parallel && l->write_rc == 0)
            pthread_cond_wait(&l->news, &l->lock);
        if (l->tail)
            l->tail->next = j;
        else
            l->head = j;
        l->tail = j;
        l->n_jobs++;
        rc = l->write_rc;
        pthread_cond_broadcast(&l->news);
        pthread_mutex_unlock(&l->lock);
        if (rc < 0)
            k3_fail(err, rc, "stdout: %s", strerror(-rc));
    }
    if (rc == 0 && index == 0)
        rc = k3_refuse(err, -EINVAL, "stdin: no line, so no prompt");
    free(line);
    return rc;
}

int k3_router_lines(struct k3_router *r, struct k3_err *err)
{
    struct lines l = { .r = r, .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER,
                       .parallel = r->opt.parallel ? r->opt.parallel : DEFAULT_PARALLEL };
    pthread_t worker[64];
    uint32_t n = 0;
    int rc = 0;

    if (isatty(STDIN_FILENO))
        fprintf(stderr, "k3-router: reading prompts from the terminal, one a line; end with Ctrl-D\n");
    k3_router_catch_interrupts();
    while (n < l.parallel && pthread_create(&worker[n], NULL, work, &l) == 0)
        n++;
    if (n == 0)
        return k3_fail(err, -EAGAIN, "--parallel %u: no thread could be started", l.parallel);
    rc = read_lines(&l, err);
    pthread_mutex_lock(&l.lock);
    l.eof = true;
    pthread_cond_broadcast(&l.news);
    pthread_mutex_unlock(&l.lock);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(worker[i], NULL);
    if (rc == 0 && l.write_rc < 0)
        rc = k3_fail(err, l.write_rc, "stdout: %s", strerror(-l.write_rc));
    if (rc == 0 && l.first.code) {
        *err = l.first;
        rc = l.first.code;
    }
    return rc;
}
