#include "k3-expertd/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"

#define PAGE ((uint64_t)K3_READER_PAGE)
#define TAIL_BYTES (64u << 10) /* a shorter rest joins the block before it: plain splitting doubles the reads */

struct file {
    int fd, fd_direct; /* -1 none */
    uint32_t device;
    bool direct;
};
struct load;
/* One range of an expert: blocks leave it front to back. */
struct job {
    struct load *load;
    struct job *prev, *next; /* in its device's queue while blocks are left */
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
};
struct queue { struct job *head, *tail; };
struct device {
    uint64_t dev;
    struct queue demand, prefetch;
    uint32_t in_flight;
};
struct k3_reader {
    const struct k3_model *m;
    struct k3_reader_opts o;
    struct k3_io *io;
    char why_pread[64]; /* io_uring was wanted */
    struct file *file; /* m->n_files */
    struct device *device;
    struct block *block, *free_block;
    struct load **load; /* by slot */
    struct load *done_head, *done_tail;
    uint32_t n_devices, n_blocks, in_flight, n_used;
    _Atomic uint32_t n_direct; /* info looks at it from another thread */
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

static int device_of(struct k3_reader *r, uint64_t dev)
{
    uint32_t i;
    struct device *more;

    for (i = 0; i < r->n_devices; i++)
        if (r->device[i].dev == dev)
            return (int)i;
    more = realloc(r->device, (r->n_devices + 1) * sizeof(*more));
    if (!more)
        return -ENOMEM;
    r->device = more;
    r->device[i] = (struct device){ .dev = dev };
    r->n_devices++;
    return (int)i;
}

/* Direct reads work when one of them does: some file systems accept the flag and refuse the read. */
static int open_direct(const char *path, void *page)
{
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);

    if (fd >= 0 && pread(fd, page, PAGE, 0) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static int open_file(struct k3_reader *r, uint32_t i, void *page, struct k3_err *err)
{
    const struct k3_file *kf = &r->m->files[i];
    struct file *f = &r->file[i];
    struct stat st;
    int rc;

    f->fd = open(kf->path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 || fstat(f->fd, &st) != 0)
        return k3_refuse(err, -errno, "open expert file %s: %s", kf->path, strerror(errno));
    if ((uint64_t)st.st_size != kf->len_bytes)
        return k3_refuse(err, -ESTALE, "expert file %s: %" PRIu64 " bytes when its header was read, now %" PRIu64,
                         kf->path, kf->len_bytes, (uint64_t)st.st_size);
    rc = device_of(r, (uint64_t)st.st_dev);
    if (rc < 0)
        return k3_fail(err, rc, "table of devices");
    f->device = (uint32_t)rc;
    if (r->o.direct)
        f->fd_direct = open_direct(kf->path, page);
    f->direct = f->fd_direct >= 0;
    if (!f->direct)
        posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM);
    r->n_used++;
    atomic_fetch_add_explicit(&r->n_direct, f->direct, memory_order_relaxed);
    return 0;
}

static int open_files(struct k3_reader *r, struct k3_err *err)
{
    const struct k3_config *c = &r->m->cfg;
    struct k3_expert_place p;
    uint64_t range_pos[K3_EXPERT_TENSORS];
    uint32_t off_bytes[K3_EXPERT_TENSORS];
    void *page = NULL;
    int rc = 0;

    r->file = malloc((r->m->n_files + 1) * sizeof(*r->file));
    if (!r->file || posix_memalign(&page, PAGE, PAGE) != 0)
        return k3_fail(err, -ENOMEM, "table of %zu files", r->m->n_files);
    for (size_t i = 0; i < r->m->n_files; i++)
        r->file[i] = (struct file){ .fd = -1, .fd_direct = -1 };
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
                else if (r->file[p.range[i].file].fd < 0)
                    rc = open_file(r, p.range[i].file, page, err);
        }
    free(page);
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
    r->n_blocks = o->depth * (r->n_devices ? r->n_devices : 1);
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
    *out = r;
    return 0;
fail:
    k3_reader_close(r);
    return rc;
}

/* ---- queues ---- */

static struct queue *queue_of(struct k3_reader *r, const struct job *j)
{
    struct device *d = &r->device[r->file[j->file].device];

    return j->load->demand ? &d->demand : &d->prefetch;
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

static void send_block(struct k3_reader *r, struct block *b)
{
    struct job *j = b->job;
    struct file *f = &r->file[j->file];

    b->req.fd = f->direct ? f->fd_direct : f->fd;
    b->req.buf = r->o.slots + j->load->slot * r->o.slot_bytes + j->pos_bytes + (b->off_bytes - j->first_bytes);
    b->req.len_bytes = b->len_bytes;
    b->req.off_bytes = b->off_bytes;
    b->req.submit_ns = k3_now_ns();
    r->io->ops->submit(r->io, &b->req);
}

static void cut_block(struct k3_reader *r, struct device *d, struct job *j)
{
    struct block *b = r->free_block;
    uint64_t left = j->end_bytes - j->off_bytes, len = r->o.block_bytes;

    if (left <= len || left - len < TAIL_BYTES)
        len = left;
    r->free_block = b->next_free;
    *b = (struct block){ .job = j, .off_bytes = j->off_bytes, .len_bytes = (uint32_t)len };
    j->off_bytes += len;
    if (j->off_bytes == j->end_bytes)
        dequeue(r, j);
    j->load->blocks_out++;
    d->in_flight++;
    r->in_flight++;
    send_block(r, b);
}

void k3_reader_submit(struct k3_reader *r)
{
    for (uint32_t i = 0; i < r->n_devices; i++) {
        struct device *d = &r->device[i];

        while (d->in_flight < r->o.depth && (d->demand.head || d->prefetch.head))
            cut_block(r, d, d->demand.head ? d->demand.head : d->prefetch.head);
    }
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

/* What follows from one read: true when the block is over, false when it was sent again. */
static bool block_back(struct k3_reader *r, struct block *b)
{
    int res = b->req.res;
    struct job *j = b->job;
    struct file *f = &r->file[j->file];
    uint64_t need = j->need_bytes > b->off_bytes ? j->need_bytes - b->off_bytes : 0;
    uint64_t got;

    if (need > b->len_bytes)
        need = b->len_bytes;
    if (res >= 0 && (uint64_t)res >= need) {
        k3_stat_hist(r->o.stats, r->o.stat_read_ns, k3_now_ns() - b->req.submit_ns);
        k3_stat_add(r->o.stats, r->o.stat_reads, 1);
        k3_stat_add(r->o.stats, r->o.stat_bytes, (uint64_t)res);
        if (!f->direct) /* the arena is the cache: the pages need not stay a second time */
            posix_fadvise(f->fd, (off_t)b->off_bytes, b->len_bytes, POSIX_FADV_DONTNEED);
        return true;
    }
    if (j->load->status < 0)
        return true;
    if (res == -EINVAL && f->direct) {
        f->direct = false;
        atomic_fetch_sub_explicit(&r->n_direct, 1, memory_order_relaxed);
        k3_log(K3_LOG_WARN, "direct_read_refused", "file=%s then=buffered", r->m->files[j->file].path);
        send_block(r, b);
        return false;
    }
    /* Short of what is needed: go on behind the whole pages that came. */
    got = res > 0 ? down((uint64_t)res) : 0;
    b->off_bytes += got;
    b->len_bytes -= (uint32_t)got;
    k3_stat_add(r->o.stats, r->o.stat_bytes, got);
    if (got == 0 && ++b->tries >= K3_READ_TRIES) {
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
        r->device[r->file[b->job->file].device].in_flight--;
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

void k3_reader_files(const struct k3_reader *r, uint32_t *n_direct, uint32_t *n_files, uint32_t *n_devices)
{
    *n_direct = atomic_load_explicit(&r->n_direct, memory_order_relaxed);
    *n_files = r->n_used;
    *n_devices = r->n_devices;
}

/* Waits for the reads in flight without sending more; false when some are out after five seconds. */
static bool let_land(struct k3_reader *r)
{
    uint64_t until_ns = k3_now_ns() + 5000000000ull;
    const struct timespec ms = { 0, 1000000 };

    for (uint32_t i = 0; i < r->n_devices; i++)
        r->device[i].demand.head = r->device[i].prefetch.head = NULL;
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
    for (size_t i = 0; r->file && i < r->m->n_files; i++) {
        if (r->file[i].fd >= 0)
            close(r->file[i].fd);
        if (r->file[i].fd_direct >= 0)
            close(r->file[i].fd_direct);
    }
    for (uint32_t i = 0; r->load && i < r->o.n_slots; i++)
        free(r->load[i]);
    while (r->done_head) {
        struct load *l = r->done_head;

        r->done_head = l->next_done;
        free(l);
    }
    free(r->load);
    free(r->file);
    free(r->device);
    free(r->block);
    free(r);
}
