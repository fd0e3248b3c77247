/* Two ways to have many reads in flight, behind one interface: io_uring, and threads with pread where there is none
 * (measured to tie; the ring spares the threads). */
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "k3-expertd/reader.h"

struct request {
    uint32_t id, len_bytes;
    int fd, res;
    void *to;
    uint64_t off_bytes;
};
struct k3_io {
    bool uring;
    struct io_uring ring;
    uint32_t unsubmitted;
    /* threads */
    int efd;
    uint32_t n_max, n_threads;
    pthread_t *thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    bool quit;
    struct request *todo, *done; /* rings of n_max */
    uint32_t todo_head, todo_tail, done_head, done_tail;
};

static bool uring_open(struct k3_io *io)
{
    struct io_uring_probe *probe;
    bool able;

    if (io_uring_queue_init(io->n_max, &io->ring, 0) < 0)
        return false;
    probe = io_uring_get_probe_ring(&io->ring);
    able = probe && io_uring_opcode_supported(probe, IORING_OP_READ);
    io_uring_free_probe(probe);
    if (!able || io_uring_register_eventfd(&io->ring, io->efd) < 0) {
        io_uring_queue_exit(&io->ring);
        return false;
    }
    return true;
}

static void *pread_thread(void *arg)
{
    struct k3_io *io = arg;
    struct request rq;
    ssize_t n;

    pthread_mutex_lock(&io->lock);
    for (;;) {
        while (io->todo_head == io->todo_tail && !io->quit)
            pthread_cond_wait(&io->work, &io->lock);
        if (io->todo_head == io->todo_tail)
            break;
        rq = io->todo[io->todo_head++ % io->n_max];
        pthread_mutex_unlock(&io->lock);
        n = pread(rq.fd, rq.to, rq.len_bytes, (off_t)rq.off_bytes);
        rq.res = n < 0 ? -errno : (int)n;
        pthread_mutex_lock(&io->lock);
        io->done[io->done_tail++ % io->n_max] = rq;
        (void)eventfd_write(io->efd, 1);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static int threads_open(struct k3_io *io, struct k3_err *err)
{
    pthread_attr_t attr;
    int rc = 0;

    io->thread = calloc(io->n_max, sizeof(*io->thread));
    io->todo = calloc(io->n_max, sizeof(*io->todo));
    io->done = calloc(io->n_max, sizeof(*io->done));
    if (!io->thread || !io->todo || !io->done)
        return k3_fail(err, -ENOMEM, "queue of %u reads", io->n_max);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 128 * 1024);
    while (io->n_threads < io->n_max && rc == 0) {
        rc = pthread_create(&io->thread[io->n_threads], &attr, pread_thread, io);
        io->n_threads += rc == 0;
    }
    pthread_attr_destroy(&attr);
    if (io->n_threads == 0)
        return k3_fail(err, -rc, "no thread to read with: %s", strerror(rc));
    return 0;
}

int k3_io_open(struct k3_io **out, bool want_uring, uint32_t n_max, int efd, bool *is_uring, struct k3_err *err)
{
    struct k3_io *io = calloc(1, sizeof(*io));
    int rc;

    if (!io)
        return k3_fail(err, -ENOMEM, "queue of reads");
    io->n_max = n_max;
    io->efd = efd;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    io->uring = want_uring && uring_open(io);
    *is_uring = io->uring;
    rc = io->uring ? 0 : threads_open(io, err);
    if (rc < 0) {
        k3_io_close(io);
        return rc;
    }
    *out = io;
    return 0;
}

void k3_io_close(struct k3_io *io)
{
    if (!io)
        return;
    if (io->uring)
        io_uring_queue_exit(&io->ring);
    pthread_mutex_lock(&io->lock);
    io->quit = true;
    pthread_cond_broadcast(&io->work);
    pthread_mutex_unlock(&io->lock);
    for (uint32_t i = 0; i < io->n_threads; i++)
        pthread_join(io->thread[i], NULL);
    pthread_cond_destroy(&io->work);
    pthread_mutex_destroy(&io->lock);
    free(io->thread);
    free(io->todo);
    free(io->done);
    free(io);
}

void k3_io_read(struct k3_io *io, uint32_t id, int fd, void *to, uint32_t len_bytes, uint64_t off_bytes)
{
    if (io->uring) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

        if (!sqe)
            k3_bug("more than %u reads in flight", io->n_max);
        io_uring_prep_read(sqe, fd, to, len_bytes, off_bytes);
        io_uring_sqe_set_data(sqe, (void *)(uintptr_t)id);
        io->unsubmitted++;
        return;
    }
    pthread_mutex_lock(&io->lock);
    io->todo[io->todo_tail++ % io->n_max] =
        (struct request){ .id = id, .len_bytes = len_bytes, .fd = fd, .to = to, .off_bytes = off_bytes };
    pthread_cond_signal(&io->work);
    pthread_mutex_unlock(&io->lock);
}

/* What the kernel does not take now (EAGAIN, EINTR) stays in the ring for the next flush. */
void k3_io_flush(struct k3_io *io)
{
    int n;

    if (!io->uring || io->unsubmitted == 0)
        return;
    n = io_uring_submit(&io->ring);
    if (n > 0)
        io->unsubmitted -= (uint32_t)n < io->unsubmitted ? (uint32_t)n : io->unsubmitted;
}

bool k3_io_reap(struct k3_io *io, uint32_t *id, int *res)
{
    bool some;

    if (io->uring) {
        struct io_uring_cqe *cqe;

        if (io_uring_peek_cqe(&io->ring, &cqe) != 0)
            return false;
        *id = (uint32_t)(uintptr_t)io_uring_cqe_get_data(cqe);
        *res = cqe->res;
        io_uring_cqe_seen(&io->ring, cqe);
        return true;
    }
    pthread_mutex_lock(&io->lock);
    some = io->done_head != io->done_tail;
    if (some) {
        struct request rq = io->done[io->done_head++ % io->n_max];

        *id = rq.id;
        *res = rq.res;
    }
    pthread_mutex_unlock(&io->lock);
    return some;
}
