/* Reads in flight: sent, looked at when they come back, sent again for what is missing. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#include "k3-trunkd/trunkd.h"

/* Completions in a row that brought nothing, before EINTR and EAGAIN count as failures. */
#define IDLE_MAX 100u

static void count(struct k3_trunkd *d, enum k3_trunkd_stat id, uint64_t v)
{
    if (d->daemon)
        k3_stat_add(k3_daemon_stats(d->daemon), id, v);
}

int k3_reads_open(struct k3_trunkd *d, struct k3_err *err)
{
    uint32_t n_reads = 2 * k3_io_files_depth(&d->files);

    d->reads = calloc(n_reads, sizeof(*d->reads));
    if (!d->reads)
        return k3_fail(err, -ENOMEM, "no memory for %u reads", n_reads);
    for (uint32_t i = n_reads; i-- > 0;) {
        d->reads[i].next = d->free_reads;
        d->free_reads = &d->reads[i];
    }
    return 0;
}

void k3_reads_close(struct k3_trunkd *d)
{
    free(d->reads);
    d->reads = d->free_reads = NULL;
}

struct k3_read *k3_read_take(struct k3_trunkd *d)
{
    struct k3_read *r = d->free_reads;

    if (r) {
        d->free_reads = r->next;
        *r = (struct k3_read){ 0 };
    }
    return r;
}

void k3_read_give(struct k3_trunkd *d, struct k3_read *r)
{
    r->next = d->free_reads;
    d->free_reads = r;
}

/* A direct read begins and ends at a page; so what is missing begins at the page of the first
 * missing byte. */
static void send_rest(struct k3_trunkd *d, struct k3_read *r)
{
    uint64_t from = r->got_bytes - r->got_bytes % d->layout.align_bytes;

    r->req.fd = d->files.file[r->file].copy[r->copy].fd;
    r->req.buf = r->buf + from;
    r->req.off_bytes = r->off_bytes + from;
    r->req.len_bytes = (uint32_t)(r->len_bytes - from);
    r->req.submit_ns = k3_now_ns();
    k3_io_sent(&d->files, r->file, r->copy, r->req.len_bytes);
    d->io->ops->submit(d->io, &r->req);
    d->n_in_flight++;
}

void k3_read_start(struct k3_trunkd *d, struct k3_read *r)
{
    send_rest(d, r);
}

/* Failed for good on this copy: once more from another one, or r is done with the error. */
static bool failed(struct k3_trunkd *d, struct k3_read *r, int errnum)
{
    int next;

    r->tried |= 1u << r->copy;
    next = k3_tfile_next(d, r->file, r->copy, r->tried, errnum);
    if (next < 0) {
        r->err = errnum;
        return r->done = true;
    }
    r->copy = (uint32_t)next;
    r->n_idle = 0;
    count(d, K3_TS_RETRIES, 1);
    send_rest(d, r);
    return false;
}

bool k3_read_complete(struct k3_trunkd *d, struct k3_read *r)
{
    int32_t res = r->req.res;
    uint64_t from = (uint64_t)(r->req.buf - r->buf);
    bool direct = d->files.file[r->file].copy[r->copy].direct;

    d->n_in_flight--;
    k3_io_back(&d->files, r->file, r->copy, r->req.len_bytes, res);
    if (d->daemon)
        k3_stat_hist(k3_daemon_stats(d->daemon), K3_TS_READ_NS, k3_now_ns() - r->req.submit_ns);
    count(d, K3_TS_READS, 1);
    if (res > 0) {
        count(d, K3_TS_READ_BYTES, (uint64_t)res);
        /* Streamed weights would only push others out of the page cache. */
        if (!direct)
            (void)posix_fadvise(r->req.fd, (off_t)r->req.off_bytes, res, POSIX_FADV_DONTNEED);
    }
    if (res >= 0 && from + (uint64_t)res > r->got_bytes) {
        r->got_bytes = from + (uint64_t)res;
        r->n_idle = 0;
    } else if (res >= 0) {
        if (r->got_bytes < r->need_bytes) /* the file has ended */
            return failed(d, r, ENODATA);
        return r->done = true;
    } else if (res == -EINVAL && direct) {
        k3_tfile_set_buffered(d, r->file, r->copy);
    } else if (res == -EINTR || res == -EAGAIN || (res == -EINVAL && r->n_idle == 0) ||
               (res == -EIO && r->n_idle == 0)) {
        /* EINVAL once more: another read of this file may have switched O_DIRECT off while this one
         * was under way. */
        if (++r->n_idle > IDLE_MAX)
            return failed(d, r, -res);
    } else {
        return failed(d, r, -res);
    }
    if (r->got_bytes >= r->need_bytes)
        return r->done = true;
    count(d, K3_TS_RETRIES, 1);
    send_rest(d, r);
    return false;
}

int k3_reads_wait(struct k3_trunkd *d, struct k3_err *err)
{
    struct k3_io_req *done, *next;
    bool stream = false;
    int rc;

    if (d->daemon)
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_IN_FLIGHT, d->n_in_flight);
    rc = d->io->ops->wait(d->io, K3_TICK_NS, &done);
    if (rc < 0)
        return k3_fail(err, rc, "%s: waiting for reads failed", d->io->ops->name);
    /* Until new reads are begun the drive has less than its depth. */
    if (done && d->room == K3_ROOM_DEPTH)
        k3_trunkd_room(d, K3_ROOM_SOME, k3_now_ns());
    for (; done; done = next) {
        struct k3_read *r = (struct k3_read *)(void *)done;

        next = done->next;
        if (!k3_read_complete(d, r))
            continue;
        if (r->kind == K3_READ_PIN)
            k3_pins_done(d, r);
        else
            stream = true; /* stays in the stream's list until its turn */
    }
    if (stream)
        k3_stream_publish(d);
    if (d->daemon)
        k3_stat_set(k3_daemon_stats(d->daemon), K3_TS_IN_FLIGHT, d->n_in_flight);
    return 0;
}
