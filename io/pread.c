#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "io/io.h"

/* spec/io.md 2: 1 to 32 threads of pread equal io_uring, on one drive; there may be a few drives. */
#define THREADS_MAX 64u

struct pread_io {
    struct k3_io io;
    pthread_mutex_t lock; /* guards the lists and stop */
    pthread_cond_t work, news;
    struct k3_io_req *todo, **todo_tail, *done, **done_tail;
    bool stop;
    int efd;
    pthread_t thread[THREADS_MAX];
};

static void *pread_thread(void *arg)
{
    struct pread_io *p = arg;

    pthread_mutex_lock(&p->lock);
    for (;;) {
        struct k3_io_req *req = p->todo;
        ssize_t n;

        if (!req) {
            if (p->stop)
                break;
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        p->todo = req->next;
        if (!p->todo)
            p->todo_tail = &p->todo;
        pthread_mutex_unlock(&p->lock);
        n = pread(req->fd, req->buf, req->len_bytes, (off_t)req->off_bytes);
        req->res = n < 0 ? -errno : (int32_t)n;
        req->next = NULL;
        pthread_mutex_lock(&p->lock);
        *p->done_tail = req;
        p->done_tail = &req->next;
        pthread_cond_signal(&p->news);
        if (p->efd >= 0)
            (void)eventfd_write(p->efd, 1);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void pread_submit(struct k3_io *io, struct k3_io_req *req)
{
    struct pread_io *p = (struct pread_io *)io;

    req->next = NULL;
    pthread_mutex_lock(&p->lock);
    *p->todo_tail = req;
    p->todo_tail = &req->next;
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

/* A thread was woken by each submit. */
static void pread_flush(struct k3_io *io)
{
    (void)io;
}

static void take_done(struct pread_io *p, struct k3_io_req **done)
{
    *done = p->done;
    p->done = NULL;
    p->done_tail = &p->done;
}

static void pread_reap(struct k3_io *io, struct k3_io_req **done)
{
    struct pread_io *p = (struct pread_io *)io;

    pthread_mutex_lock(&p->lock);
    take_done(p, done);
    pthread_mutex_unlock(&p->lock);
}

static int pread_wait(struct k3_io *io, uint64_t timeout_ns, struct k3_io_req **done)
{
    struct pread_io *p = (struct pread_io *)io;
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_ns / 1000000000u);
    until.tv_nsec += (long)(timeout_ns % 1000000000u);
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&p->lock);
    while (!p->done)
        if (pthread_cond_timedwait(&p->news, &p->lock, &until) == ETIMEDOUT)
            break;
    take_done(p, done);
    pthread_mutex_unlock(&p->lock);
    return 0;
}

static void pread_close(struct k3_io *io)
{
    struct pread_io *p = (struct pread_io *)io;

    pthread_mutex_lock(&p->lock);
    p->stop = true;
    p->todo = NULL; /* what no thread has begun is not read any more */
    p->todo_tail = &p->todo;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < p->io.n_threads; i++)
        pthread_join(p->thread[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->news);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static const struct k3_io_ops pread_ops = { "pread", pread_submit, pread_flush, pread_wait, pread_reap,
                                            NULL, pread_close };

int k3_io_pread_open(struct k3_io **out, unsigned depth, int efd)
{
    struct pread_io *p = calloc(1, sizeof(*p));
    pthread_condattr_t monotonic;
    pthread_attr_t attr;
    sigset_t all, old;
    int rc = 0;

    if (!p)
        return -ENOMEM;
    p->io.ops = &pread_ops;
    p->io.depth = depth;
    p->efd = efd;
    p->todo_tail = &p->todo;
    p->done_tail = &p->done;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 256 << 10);
    sigfillset(&all); /* signals belong to the daemon's skeleton */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (rc == 0 && p->io.n_threads < THREADS_MAX && p->io.n_threads < depth) {
        rc = -pthread_create(&p->thread[p->io.n_threads], &attr, pread_thread, p);
        if (rc == 0)
            p->io.n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (p->io.n_threads == 0) {
        pread_close(&p->io);
        return rc;
    }
    *out = &p->io;
    return 0;
}
