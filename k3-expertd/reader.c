#include "k3-expertd/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"

#define PAGE ((uint64_t)K3_READER_PAGE)
#define TAIL_BYTES (64u << 10) /* a shorter rest joins the block before it: plain splitting doubles the reads */

struct load;
/* One range of an expert: blocks leave it front to back. */
struct job {
    struct load *load;
    struct job *prev, *next; /* in its queue while blocks are left */
    uint64_t off_bytes, end_bytes, need_bytes; /* whole pages of the file; need: where the tensors end */
    uint64_t pos_bytes;      /* in the slot, of off_bytes at the start */
    uint64_t first_bytes;    /* off_bytes at the start */
    uint32_t file;
    bool queued;
};
struct load { /* one expert on its way into a slot */
    struct load *next_done;
    uint32_t slot, n_jobs, blocks_out;
    bool demand;
    int status;
    uint32_t file;
    uint64_t file_off_bytes;
    uint32_t off_bytes[K3_EXPERT_TENSORS];
    struct job job[K3_EXPERT_TENSORS];
};
struct block {
    struct k3_io_req req; /* first: what comes back is the block */
    struct job *job;
    struct block *next_free;
    uint64_t off_bytes;
    uint32_t len_bytes, tries;
    uint32_t copy, tried; /* which copy of the file; those that have failed */
};
struct queue { struct job *head, *tail; };
struct k3_reader {
    const struct k3_model *m;
    struct k3_reader_opts o;
    struct k3_io *io;
    char why_pread[64]; /* io_uring was wanted */
    struct k3_io_files files;
    struct queue demand, prefetch;
    struct block *block, *free_block;
    struct load **load; /* by slot */
    struct load *done_head, *done_tail;
    uint32_t n_blocks, in_flight;
    uint64_t registered_bytes; /* of the slots */
};

static uint64_t down(uint64_t n)
{
    return n & ~(PAGE - 1);
}

static uint64_t up(uint64_t n)
{
    return (n + PAGE - 1) & ~(PAGE - 1);
}

int64_t k3_expert_slot_layout(const struct k3_expert_place *p, uint64_t slot_bytes,
                              uint64_t range_pos[K3_EXPERT_TENSORS], uint32_t off_bytes[K3_EXPERT_TENSORS])
{
    uint64_t pos = 0;

    for (uint32_t i = 0; i < p->n_ranges; i++) {
        uint64_t end;

        if (__builtin_add_overflow(p->range[i].off_bytes, p->range[i].len_bytes, &end) || end > INT64_MAX)
            return -EOVERFLOW;
        range_pos[i] = pos;
        pos += up(end) - down(p->range[i].off_bytes);
        if (pos > slot_bytes || pos > UINT32_MAX)
            return -EOVERFLOW;
    }
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        uint32_t i = p->tensor_range[t];

        if (i >= p->n_ranges || p->tensor_off[t] >= p->range[i].len_bytes)
            return -EOVERFLOW;
        off_bytes[t] = (uint32_t)(range_pos[i] + p->range[i].off_bytes % PAGE + p->tensor_off[t]);
    }
    return (int64_t)pos;
}

/* ---- files ---- */

static int open_file(struct k3_reader *r, uint32_t i, struct k3_err *err)
{
    const struct k3_file *f = &r->m->files[i];
    const char *paths[1 + K3_IO_COPIES_MAX] = { f->path };
    size_t n = 1;

    for (uint32_t c = 0; c < f->n_copies && c < K3_IO_COPIES_MAX; c++)
        paths[n++] = f->copies[c];
    return k3_io_files_add(&r->files, i, paths, n, f->len_bytes, r->o.direct, K3_READER_PAGE, err);
}

static int open_files(struct k3_reader *r, struct k3_err *err)
{
    const struct k3_config *c = &r->m->cfg;
    struct k3_expert_place p;
    uint64_t range_pos[K3_EXPERT_TENSORS];
    uint32_t off_bytes[K3_EXPERT_TENSORS];
    int rc = k3_io_files_open(&r->files, r->m->n_files, err);

    for (uint32_t layer = c->first_dense; layer < c->n_layers && rc == 0; layer++)
        for (uint32_t e = 0; e < c->n_experts && rc == 0; e++) {
            rc = k3_model_expert(r->m, layer, e, &p);
            if (rc < 0) {
                k3_refuse(err, rc, "layer %u expert %u is not in the model", layer, e);
                break;
            }
            if (k3_expert_slot_layout(&p, r->o.slot_bytes, range_pos, off_bytes) < 0)
                rc = k3_refuse(err, -EOVERFLOW, "layer %u expert %u does not fit a slot of %" PRIu64 " bytes", layer, e,
                               r->o.slot_bytes);
            for (uint32_t i = 0; i < p.n_ranges && rc == 0; i++)
                if (p.range[i].file >= r->m->n_files)
                    rc = k3_fail(err, -EPROTO, "layer %u expert %u is in file %u of %zu", layer, e, p.range[i].file,
                                 r->m->n_files);
                else if (r->files.file[p.range[i].file].n_copies == 0)
                    rc = open_file(r, p.range[i].file, err);
        }
    if (rc == 0)
        k3_io_files_rates(&r->files, r->o.depth, r->o.block_bytes);
    return rc;
}

int k3_reader_open(struct k3_reader **out, const struct k3_model *m, const struct k3_reader_opts *o,
                   struct k3_err *err)
{
    struct k3_reader *r = calloc(1, sizeof(*r));
    int rc;

    if (!r)
        return k3_fail(err, -ENOMEM, "reader");
    r->m = m;
    r->o = *o;
    rc = open_files(r, err);
    if (rc < 0)
        goto fail;
    r->n_blocks = k3_io_files_depth(&r->files);
    r->block = calloc(r->n_blocks, sizeof(*r->block));
    r->load = calloc(o->n_slots, sizeof(struct load *));
    if (!r->block || !r->load) {
        rc = k3_fail(err, -ENOMEM, "table of %u blocks in flight", r->n_blocks);
        goto fail;
    }
    for (uint32_t i = r->n_blocks; i-- > 0;) {
        r->block[i].next_free = r->free_block;
        r->free_block = &r->block[i];
    }
    rc = k3_io_open(&r->io, o->io, r->n_blocks, o->efd, r->why_pread, err);
    if (rc < 0)
        goto fail;
    r->registered_bytes =
        k3_io_register(r->io, &(struct k3_io_range){ o->slots, o->n_slots * o->slot_bytes }, 1);
    *out = r;
    return 0;
fail:
    k3_reader_close(r);
    return rc;
}

/* ---- queues ---- */

static struct queue *queue_of(struct k3_reader *r, const struct job *j)
{
    return j->load->demand ? &r->demand : &r->prefetch;
}

static void enqueue(struct k3_reader *r, struct job *j)
{
    struct queue *q = queue_of(r, j);

    j->prev = q->tail;
    j->next = NULL;
    if (q->tail)
        q->tail->next = j;
    else
        q->head = j;
    q->tail = j;
    j->queued = true;
}

static void dequeue(struct k3_reader *r, struct job *j)
{
    struct queue *q = queue_of(r, j);

    if (!j->queued)
        return;
    *(j->prev ? &j->prev->next : &q->head) = j->next;
    *(j->next ? &j->next->prev : &q->tail) = j->prev;
    j->queued = false;
}

int k3_reader_start(struct k3_reader *r, uint32_t slot, uint32_t layer, uint32_t expert, bool demand)
{
    struct load *l = calloc(1, sizeof(*l));
    struct k3_expert_place p;
    uint64_t range_pos[K3_EXPERT_TENSORS];
    int64_t rc;

    if (!l)
        return -ENOMEM;
    rc = k3_model_expert(r->m, layer, expert, &p);
    if (rc == 0)
        rc = k3_expert_slot_layout(&p, r->o.slot_bytes, range_pos, l->off_bytes);
    if (rc < 0) {
        free(l);
        return (int)rc;
    }
    if (r->load[slot])
        k3_bug("slot %u is being read already", slot);
    r->load[slot] = l;
    l->slot = slot;
    l->demand = demand;
    l->n_jobs = p.n_ranges;
    for (uint32_t i = 0; i < p.n_ranges; i++) {
        struct job *j = &l->job[i];

        j->load = l;
        j->file = p.range[i].file;
        j->off_bytes = j->first_bytes = down(p.range[i].off_bytes);
        j->need_bytes = p.range[i].off_bytes + p.range[i].len_bytes;
        j->end_bytes = up(j->need_bytes);
        j->pos_bytes = range_pos[i];
        enqueue(r, j);
    }
    return 0;
}

void k3_reader_promote(struct k3_reader *r, uint32_t slot)
{
    struct load *l = r->load[slot];
    bool waits[K3_EXPERT_TENSORS];

    if (!l || l->demand)
        return;
    for (uint32_t i = 0; i < l->n_jobs; i++) {
        waits[i] = l->job[i].queued;
        dequeue(r, &l->job[i]);
    }
    l->demand = true;
    for (uint32_t i = 0; i < l->n_jobs; i++)
        if (waits[i])
            enqueue(r, &l->job[i]);
}

/* ---- blocks ---- */

static const struct k3_io_copy *copy_of(const struct k3_reader *r, const struct block *b)
{
    return &r->files.file[b->job->file].copy[b->copy];
}

static void send_block(struct k3_reader *r, struct block *b)
{
    struct job *j = b->job;

    b->req.fd = copy_of(r, b)->fd;
    b->req.buf = r->o.slots + j->load->slot * r->o.slot_bytes + j->pos_bytes + (b->off_bytes - j->first_bytes);
    b->req.len_bytes = b->len_bytes;
    b->req.off_bytes = b->off_bytes;
    b->req.submit_ns = k3_now_ns();
    k3_io_sent(&r->files, j->file, b->copy, b->len_bytes);
    r->io->ops->submit(r->io, &b->req);
}

static void cut_block(struct k3_reader *r, struct job *j, uint32_t copy)
{
    struct block *b = r->free_block;
    uint64_t left = j->end_bytes - j->off_bytes;
    uint64_t len = r->files.drive[r->files.file[j->file].copy[copy].drive].rate.block_bytes;

    if (left <= len || left - len < TAIL_BYTES)
        len = left;
    r->free_block = b->next_free;
    *b = (struct block){ .job = j, .off_bytes = j->off_bytes, .len_bytes = (uint32_t)len, .copy = copy };
    j->off_bytes += len;
    if (j->off_bytes == j->end_bytes)
        dequeue(r, j);
    j->load->blocks_out++;
    r->in_flight++;
    send_block(r, b);
}

/* In the order of the queue; what waits for a busy drive does not hold up what another could read. */
static void send_queue(struct k3_reader *r, const struct queue *q, uint64_t now_ns)
{
    struct job *next;

    for (struct job *j = q->head; j && r->in_flight < r->n_blocks; j = next) {
        int copy = k3_io_choose(&r->files, j->file, 0, true, now_ns);

        next = j->next;
        if (copy < 0)
            continue;
        cut_block(r, j, (uint32_t)copy);
        if (j->queued)
            next = j;
    }
}

void k3_reader_submit(struct k3_reader *r)
{
    uint64_t now_ns = k3_now_ns();

    send_queue(r, &r->demand, now_ns);
    send_queue(r, &r->prefetch, now_ns);
    r->io->ops->flush(r->io);
    k3_stat_set(r->o.stats, r->o.stat_in_flight, r->in_flight);
}

static void load_failed(struct k3_reader *r, struct load *l, const struct block *b, int status)
{
    if (l->status == 0) {
        l->status = status;
        l->file = b->job->file;
        l->file_off_bytes = b->off_bytes;
    }
    for (uint32_t i = 0; i < l->n_jobs; i++) /* what has not left yet need not */
        dequeue(r, &l->job[i]);
}

static bool jobs_queued(const struct load *l)
{
    for (uint32_t i = 0; i < l->n_jobs; i++)
        if (l->job[i].queued)
            return true;
    return false;
}

/* The block's copy has failed: goes to another one.  False when all have. */
static bool other_copy(struct k3_reader *r, struct block *b, int errnum)
{
    const struct k3_io_file *f = &r->files.file[b->job->file];
    uint64_t now_ns = k3_now_ns();
    bool news = k3_io_set_bad(&r->files, b->job->file, b->copy, now_ns);
    int next;

    b->tried |= 1u << b->copy;
    next = k3_io_choose(&r->files, b->job->file, b->tried, false, now_ns);
    if (next < 0)
        return false;
    if (news)
        k3_log(K3_LOG_WARN, "copy_failed", "file=%s errno=%d text=\"%s\" then=%s", f->copy[b->copy].path, errnum,
               strerror(errnum), f->copy[next].path);
    b->copy = (uint32_t)next;
    b->tries = 0;
    return true;
}

/* What follows from one read: true when the block is over, false when it was sent again. */
static bool block_back(struct k3_reader *r, struct block *b)
{
    int res = b->req.res;
    struct job *j = b->job;
    const struct k3_io_copy *f = copy_of(r, b);
    bool direct = f->direct;
    uint64_t need = j->need_bytes > b->off_bytes ? j->need_bytes - b->off_bytes : 0;
    uint64_t got;

    k3_io_back(&r->files, j->file, b->copy, b->len_bytes, res);
    if (need > b->len_bytes)
        need = b->len_bytes;
    if (res >= 0 && (uint64_t)res >= need) {
        k3_stat_hist(r->o.stats, r->o.stat_read_ns, k3_now_ns() - b->req.submit_ns);
        k3_stat_add(r->o.stats, r->o.stat_reads, 1);
        k3_stat_add(r->o.stats, r->o.stat_bytes, (uint64_t)res);
        if (!direct) /* the arena is the cache: the pages need not stay a second time */
            posix_fadvise(f->fd, (off_t)b->off_bytes, b->len_bytes, POSIX_FADV_DONTNEED);
        return true;
    }
    if (j->load->status < 0)
        return true;
    if (res == -EINVAL && direct) {
        if (k3_io_set_buffered(&r->files, j->file, b->copy))
            k3_log(K3_LOG_WARN, "direct_read_refused", "file=%s then=buffered", f->path);
        send_block(r, b);
        return false;
    }
    /* Short of what is needed: go on behind the whole pages that came. */
    got = res > 0 ? down((uint64_t)res) : 0;
    b->off_bytes += got;
    b->len_bytes -= (uint32_t)got;
    k3_stat_add(r->o.stats, r->o.stat_bytes, got);
    if (got == 0 && ++b->tries >= K3_READ_TRIES && !other_copy(r, b, res < 0 ? -res : ENODATA)) {
        load_failed(r, j->load, b, res < 0 ? res : -ENODATA);
        return true;
    }
    if (res != -EINTR)
        k3_stat_add(r->o.stats, r->o.stat_retries, 1);
    send_block(r, b);
    return false;
}

static void load_over(struct k3_reader *r, struct load *l)
{
    r->load[l->slot] = NULL;
    l->next_done = NULL;
    if (r->done_tail)
        r->done_tail->next_done = l;
    else
        r->done_head = l;
    r->done_tail = l;
}

static void reap(struct k3_reader *r)
{
    struct k3_io_req *done, *next;

    for (r->io->ops->reap(r->io, &done); done; done = next) {
        struct block *b = (struct block *)(void *)done;
        struct load *l = b->job->load;

        next = done->next;
        if (!block_back(r, b))
            continue;
        r->in_flight--;
        b->next_free = r->free_block;
        r->free_block = b;
        if (--l->blocks_out == 0 && !jobs_queued(l))
            load_over(r, l);
    }
}

bool k3_reader_done(struct k3_reader *r, struct k3_read_done *out)
{
    struct load *l;

    if (!r->done_head)
        reap(r);
    l = r->done_head;
    if (!l)
        return false;
    r->done_head = l->next_done;
    if (!r->done_head)
        r->done_tail = NULL;
    *out = (struct k3_read_done){ .slot = l->slot, .status = l->status, .file = l->file,
                                  .file_off_bytes = l->file_off_bytes };
    memcpy(out->off_bytes, l->off_bytes, sizeof(out->off_bytes));
    free(l);
    return true;
}

bool k3_reader_has_copies(const struct k3_reader *r)
{
    for (size_t i = 0; i < r->files.n_files; i++)
        if (r->files.file[i].n_copies > 1)
            return true;
    return false;
}

void k3_reader_wrong(struct k3_reader *r, const struct k3_sum_item *item, uint32_t crc)
{
    uint64_t off_bytes[K3_EXPERT_TENSORS], len_bytes[K3_EXPERT_TENSORS];
    uint16_t file = item->part[0].file;
    uint32_t wrong;

    for (uint32_t k = 0; k < item->n_parts; k++) {
        if (item->part[k].file != file) /* one CRC over several files tells nothing about one of them */
            return;
        off_bytes[k] = item->part[k].off_bytes;
        len_bytes[k] = item->part[k].len_bytes;
    }
    wrong = k3_io_wrong_copies(&r->files, file, off_bytes, len_bytes, item->n_parts, crc, k3_now_ns());
    for (uint32_t c = 0; c < r->files.file[file].n_copies; c++)
        if (wrong >> c & 1)
            k3_log(K3_LOG_ERROR, "copy_wrong", "file=%s off=%" PRIu64, r->files.file[file].copy[c].path, off_bytes[0]);
}

uint32_t k3_reader_in_flight(const struct k3_reader *r)
{
    return r->in_flight;
}

const char *k3_reader_how(const struct k3_reader *r)
{
    return r->io->ops->name;
}

const char *k3_reader_why_pread(const struct k3_reader *r)
{
    return r->why_pread;
}

uint64_t k3_reader_registered_bytes(const struct k3_reader *r)
{
    return r->registered_bytes;
}

const struct k3_io_files *k3_reader_files(const struct k3_reader *r)
{
    return &r->files;
}

/* Waits for the reads in flight without sending more; false when some are out after five seconds. */
static bool let_land(struct k3_reader *r)
{
    uint64_t until_ns = k3_now_ns() + 5000000000ull;
    const struct timespec ms = { 0, 1000000 };

    r->demand.head = r->prefetch.head = NULL;
    for (reap(r); r->in_flight; reap(r)) {
        if (k3_now_ns() > until_ns)
            return false;
        r->io->ops->flush(r->io);
        nanosleep(&ms, NULL);
    }
    return true;
}

void k3_reader_close(struct k3_reader *r)
{
    if (!r)
        return;
    if (r->io && !let_land(r))
        return; /* the kernel still writes: the process ends with everything in place */
    k3_io_close(r->io);
    k3_io_files_close(&r->files);
    for (uint32_t i = 0; r->load && i < r->o.n_slots; i++)
        free(r->load[i]);
    while (r->done_head) {
        struct load *l = r->done_head;

        r->done_head = l->next_done;
        free(l);
    }
    free(r->load);
    free(r->block);
    free(r);
}
