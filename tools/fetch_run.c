/* A whole repository: which files, is there room, who fetches which, what is said at the end. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "tools/fetch.h"
#include "tools/walk.h"

#define MAX_PARALLEL 64

struct run {
    const struct k3_fetch_opts *o;
    struct k3_fetch_web web;
    struct k3_fetch_place place;
    struct k3_fetch_files files;
    struct k3_fetch_sums *sums;
    int lock_fd;
    bool locked;
    uint64_t free_bytes, there_bytes, all_bytes; /* there: by size, at the start */
    /* what the workers share */
    void (*work)(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f);
    pthread_mutex_t lock;   /* of the rest */
    size_t next, n_running;
    struct k3_err err;      /* of the first that failed */
    bool failed;            /* one failed in a way that others would */
    size_t n_bad, n_right, n_missing;
};

static _Atomic(_Atomic bool *) stop_flag; /* of the run that there is; NULL: none */

void k3_fetch_stop(void)
{
    _Atomic bool *flag = atomic_load(&stop_flag);

    if (flag)
        atomic_store(flag, true);
}

/* ---- workers ---- */

static void fail_all(struct run *r, const struct k3_err *err)
{
    pthread_mutex_lock(&r->lock);
    if (!r->failed && err->code < 0)
        r->err = *err;
    r->failed = true;
    pthread_mutex_unlock(&r->lock);
    atomic_store(&r->web.stop, true);
}

/* The first of these is what the program ends with, when nothing worse comes. */
static void fail_one(struct run *r, const struct k3_err *err)
{
    fprintf(stderr, "k3-fetch: %s\n", err->text);
    pthread_mutex_lock(&r->lock);
    if (r->n_bad++ == 0 && !r->failed)
        r->err = *err;
    pthread_mutex_unlock(&r->lock);
}

static void *worker(void *arg)
{
    struct run *r = arg;
    struct k3_fetch_conn *c = k3_fetch_conn_open(&r->web);
    struct k3_err err = K3_ERR_INIT;

    if (!c) {
        k3_fail(&err, -ENOMEM, "no memory for a connection");
        fail_all(r, &err);
    }
    while (c && !atomic_load(&r->web.stop)) {
        size_t i;

        pthread_mutex_lock(&r->lock);
        i = r->next < r->files.n ? r->next++ : r->files.n;
        pthread_mutex_unlock(&r->lock);
        if (i == r->files.n)
            break;
        r->work(r, c, &r->files.f[i]);
    }
    k3_fetch_conn_close(c);
    pthread_mutex_lock(&r->lock);
    r->n_running--;
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static bool running(struct run *r)
{
    bool any;

    pthread_mutex_lock(&r->lock);
    any = r->n_running != 0;
    pthread_mutex_unlock(&r->lock);
    return any;
}

/* Every file through work, several at a time; p may be NULL. */
static int all_files(struct run *r, void (*work)(struct run *, struct k3_fetch_conn *, struct k3_fetch_file *),
                     struct k3_progress *p, struct k3_err *err)
{
    pthread_t thread[MAX_PARALLEL];
    size_t n = 0, want = r->files.n < r->o->parallel ? r->files.n : r->o->parallel;

    r->work = work;
    r->next = 0;
    r->n_running = want;
    while (n < want && pthread_create(&thread[n], NULL, worker, r) == 0)
        n++;
    if (n < want) {
        pthread_mutex_lock(&r->lock);
        r->n_running -= want - n;
        pthread_mutex_unlock(&r->lock);
    }
    while (running(r)) {
        nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
        if (p) {
            int64_t now = (int64_t)atomic_load(&r->web.new_bytes); /* below 0: of a file that was there and is wrong */

            k3_progress_tick(p, now > 0 ? (uint64_t)now : 0);
        }
    }
    for (size_t i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    if (n == 0)
        return k3_fail(err, -EAGAIN, "no thread could be started");
    if (r->failed) {
        *err = r->err;
        return r->err.code;
    }
    if (atomic_load(&r->web.stop))
        return k3_fail(err, -EINTR, "stopped; the same command goes on");
    return 0;
}

/* ---- what the hub announces ---- */

/* With tries.  0, -ENOENT: the hub has no such file; else with words. */
static int ask(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f, char commit[41], struct k3_err *err)
{
    for (uint32_t try = 0;; try++) {
        double wait_s;

        switch (k3_fetch_ask(c, f->name, &f->said, commit, &wait_s, err)) {
        case K3_FETCH_OK:
            if (f->said.kind == K3_FETCH_NO_SUM && !r->place.unsummed)
                return k3_untrusted(err, -EBADMSG, "%s: the hub announces no sum; --unsummed takes such files by their size", f->name);
            return 0;
        case K3_FETCH_NONE:
            return k3_refuse(err, -ENOENT, "%s/%s has no %s at revision %s", r->web.base, r->web.repo, f->name, r->web.revision);
        case K3_FETCH_STOP:
            return k3_fail(err, -EINTR, "stopped; the same command goes on");
        case K3_FETCH_AGAIN:
            break;
        default:
            return err->code;
        }
        if (try == r->web.retries)
            return err->code;
        k3_fetch_wait(&r->web, f->name, try, wait_s, err);
    }
}

static void ask_one(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f)
{
    struct k3_err err = K3_ERR_INIT;
    int rc = f->said.has_size ? 0 : ask(r, c, f, NULL, &err);

    if (rc == -ENOENT && f->optional) {
        f->state = K3_FETCH_ABSENT;
        return;
    }
    if (rc == 0 && r->place.dir_fd >= 0)
        rc = k3_fetch_look(&r->place, f, &err);
    if (rc < 0)
        fail_all(r, &err);
}

/* ---- fetching, verifying ---- */

static void fetch_one(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f)
{
    struct k3_err err = K3_ERR_INIT;
    struct stat st;
    char sha256[65];
    enum k3_fetch_outcome outcome = K3_FETCH_OK;

    if (f->state == K3_FETCH_ABSENT)
        return;
    if (f->state != K3_FETCH_HERE || f->said.kind != K3_FETCH_SHA256 || fstatat(r->place.dir_fd, f->name, &st, 0) != 0 ||
        !k3_fetch_sums_has(r->sums, f->name, f->said.sum, (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec)) {
        outcome = k3_fetch_one(c, &r->web, &r->place, f, sha256, &err);
        if (outcome == K3_FETCH_OK && k3_fetch_sums_set(r->sums, f->name, sha256, &err) < 0)
            outcome = K3_FETCH_FATAL;
    }
    if (outcome == K3_FETCH_FATAL)
        fail_all(r, &err);
    else if (outcome == K3_FETCH_WRONG)
        fail_one(r, &err);
    else if (outcome == K3_FETCH_OK) {
        pthread_mutex_lock(&r->lock);
        r->n_right++;
        pthread_mutex_unlock(&r->lock);
    }
}

static void verify_one(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f)
{
    char sha256[65], git_sha1[41];
    struct k3_err err = K3_ERR_INIT;
    struct stat st;
    int rc = 0;

    (void)c;
    if (f->state == K3_FETCH_ABSENT)
        return;
    if (f->state == K3_FETCH_HERE)
        rc = k3_fetch_compare(&r->place, &r->web, f, sha256, git_sha1, &err);
    else if (fstatat(r->place.dir_fd, f->name, &st, 0) != 0) {
        printf("missing: %s\n", f->name);
        pthread_mutex_lock(&r->lock);
        r->n_missing++;
        pthread_mutex_unlock(&r->lock);
        return;
    }
    if (rc < 0 && rc != -EINTR)
        fail_all(r, &err);
    if (rc == 0) {
        k3_untrusted(&err, -EBADMSG, "%s has another %s than the hub announces", f->name, f->state == K3_FETCH_HERE ? "sum" : "size");
        fail_one(r, &err);
    } else if (rc == 1) {
        atomic_fetch_add(&r->web.new_bytes, f->said.size_bytes);
        pthread_mutex_lock(&r->lock);
        r->n_right++;
        pthread_mutex_unlock(&r->lock);
    }
}

/* ---- the list of files ---- */

/* The index into DIR, or, when nothing may be written, from DIR if it is right there and else into memory. */
static int index_fd(struct run *r, struct k3_fetch_conn *c, struct k3_fetch_file *f, struct k3_err *err)
{
    bool look_only = r->o->list || r->o->verify;
    enum k3_fetch_outcome outcome;
    char sha256[65], git_sha1[41];
    int fd = -1;

    if (r->place.dir_fd >= 0) {
        if (k3_fetch_look(&r->place, f, err) < 0)
            return err->code;
        if (!look_only) {
            outcome = k3_fetch_one(c, &r->web, &r->place, f, sha256, err);
            if (outcome == K3_FETCH_OK && k3_fetch_sums_set(r->sums, f->name, sha256, err) < 0)
                outcome = K3_FETCH_FATAL;
            if (outcome != K3_FETCH_OK)
                return outcome == K3_FETCH_STOP ? k3_fail(err, -EINTR, "stopped; the same command goes on") : err->code;
            f->state = K3_FETCH_HERE;
        }
        if (f->state == K3_FETCH_HERE && (!look_only || k3_fetch_compare(&r->place, &r->web, f, sha256, git_sha1, err) == 1)) {
            fd = openat(r->place.dir_fd, f->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
            return fd < 0 ? k3_fail(err, -errno, "opening %s/%s: %s", r->place.dir, f->name, strerror(errno)) : fd;
        }
    }
    fd = memfd_create(K3_FETCH_INDEX, MFD_CLOEXEC);
    if (fd < 0)
        return k3_fail(err, -errno, "no memory for " K3_FETCH_INDEX ": %s", strerror(errno));
    outcome = k3_fetch_into(c, &r->web, &r->place, f, fd, err);
    atomic_store(&r->web.new_bytes, 0);
    if (outcome == K3_FETCH_OK && lseek(fd, 0, SEEK_SET) == 0)
        return fd;
    close(fd);
    return outcome == K3_FETCH_STOP ? k3_fail(err, -EINTR, "stopped") : err->code;
}

static int list_files(struct run *r, struct k3_fetch_conn *c, struct k3_err *err)
{
    static const char *const others[] = { "generation_config.json", "tiktoken.model", "tokenizer_config.json", "LICENSE" };
    struct k3_fetch_files *l = &r->files;
    char commit[41] = "";
    int fd, rc = k3_fetch_add(l, K3_FETCH_INDEX, false, err);

    if (rc == 0)
        rc = ask(r, c, &l->f[0], commit, err);
    if (rc == 0 && l->f[0].said.size_bytes > K3_FETCH_INDEX_MAX) /* it comes before room is looked for, with --list into memory */
        rc = k3_untrusted(err, -EFBIG, "the hub announces " K3_FETCH_INDEX " with %" PRIu64 " bytes; it may have %u",
                          l->f[0].said.size_bytes, K3_FETCH_INDEX_MAX);
    if (rc < 0)
        return rc;
    /* A branch may move on while files come in: all are to be of one commit. */
    if (commit[0])
        snprintf(r->web.revision, sizeof(r->web.revision), "%s", commit);
    fd = index_fd(r, c, &l->f[0], err);
    if (fd < 0)
        return fd;
    rc = k3_fetch_add(l, "config.json", false, err);
    for (size_t i = 0; rc == 0 && i < sizeof(others) / sizeof(others[0]); i++)
        rc = k3_fetch_add(l, others[i], true, err);
    for (size_t i = 0; rc == 0 && i < r->o->also.n; i++)
        rc = k3_fetch_add(l, r->o->also.item[i], false, err);
    if (rc == 0)
        rc = k3_fetch_list_shards(l, fd, NULL, 0, r->o->n_layers, err);
    close(fd);
    if (rc == 0)
        rc = all_files(r, ask_one, NULL, err);
    if (rc == 0)
        rc = k3_fetch_check_sizes(l, r->web.repo, r->o->n_layers == 0, err);
    return rc;
}

/* ---- room ---- */

static int measure(struct run *r, struct k3_err *err)
{
    struct statvfs v;

    r->all_bytes = r->there_bytes = r->free_bytes = 0;
    for (size_t i = 0; i < r->files.n; i++) {
        const struct k3_fetch_file *f = &r->files.f[i];

        if (f->state == K3_FETCH_ABSENT)
            continue;
        if (__builtin_add_overflow(r->all_bytes, f->said.size_bytes, &r->all_bytes))
            return k3_untrusted(err, -EOVERFLOW, "the hub announces more bytes than there can be");
        r->there_bytes += f->state == K3_FETCH_HERE ? f->said.size_bytes : f->part_bytes;
    }
    if (r->place.dir_fd < 0)
        return 0;
    if (fstatvfs(r->place.dir_fd, &v) != 0)
        return k3_fail(err, -errno, "looking at %s: %s", r->place.dir, strerror(errno));
    r->free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    return 0;
}

static int room(const struct run *r, struct k3_err *err)
{
    uint64_t want = r->all_bytes - r->there_bytes;
    char a[K3_GROUPED_TEXT], b[K3_GROUPED_TEXT], c[K3_GROUPED_TEXT];

    if (want <= r->free_bytes)
        return 0;
    return k3_refuse(err, -ENOSPC, "%s has room for %s bytes, %s are to be fetched: %s too few", r->place.dir,
                     k3_grouped_text(a, r->free_bytes), k3_grouped_text(b, want), k3_grouped_text(c, want - r->free_bytes));
}

/* ---- words ---- */

static void print_list(const struct run *r)
{
    static const char *const state[] = { "missing", "part", "here", "absent" };
    char a[K3_SIZE_TEXT], b[K3_SIZE_TEXT], c[K3_SIZE_TEXT];

    for (size_t i = 0; i < r->files.n; i++) {
        const struct k3_fetch_file *f = &r->files.f[i];

        if (f->state == K3_FETCH_ABSENT)
            printf("%-8s %15s  %s\n", state[f->state], "-", f->name);
        else
            printf("%-8s %15" PRIu64 "  %s\n", state[f->state], f->said.size_bytes, f->name);
    }
    printf("%s of %s, revision %s: %s are to be fetched", k3_size_text(a, r->all_bytes), r->web.repo, r->web.revision,
           k3_size_text(b, r->all_bytes - r->there_bytes));
    if (r->place.dir_fd >= 0)
        printf(", %s are free in %s", k3_size_text(c, r->free_bytes), r->place.dir);
    putchar('\n');
}

static void note_absent(const struct run *r)
{
    for (size_t i = 0; i < r->files.n; i++)
        if (r->files.f[i].state == K3_FETCH_ABSENT)
            fprintf(stderr, "k3-fetch: %s has no %s\n", r->web.repo, r->files.f[i].name);
}

/* ---- the whole ---- */

static int read_token(struct run *r, struct k3_err *err)
{
    const struct k3_fetch_opts *o = r->o;
    char *token = r->web.token;
    struct stat st;
    ssize_t n = 0;
    int fd;

    if (!o->token_file)
        snprintf(token, sizeof(r->web.token), "%s", o->env_token ? o->env_token : "");
    else {
        fd = open(o->token_file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            return k3_refuse(err, -errno, "--token-file %s: %s", o->token_file, strerror(errno));
        if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (st.st_mode & 077)) {
            close(fd);
            return k3_refuse(err, -EPERM, "--token-file %s: must be a file that only you can read (mode 600)", o->token_file);
        }
        n = read(fd, token, sizeof(r->web.token) - 1);
        close(fd);
        token[n < 0 ? 0 : n] = 0;
        token[strcspn(token, "\r\n")] = 0;
    }
    if (strlen(o->token_file || !o->env_token ? token : o->env_token) >= sizeof(r->web.token) - 1)
        return k3_refuse(err, -EINVAL, "the token is too long: %zu bytes at most", sizeof(r->web.token) - 2);
    for (const char *c = token; *c; c++)
        if (*c <= 0x20 || *c >= 0x7f)
            return k3_refuse(err, -EINVAL, "the token has blanks or other characters that none has");
    if (o->token_file && !token[0])
        return k3_refuse(err, -EINVAL, "--token-file %s: holds no token in its first line", o->token_file);
    return 0;
}

static int open_dir(struct run *r, struct k3_err *err)
{
    const struct k3_fetch_opts *o = r->o;
    bool look_only = o->list || o->verify;
    struct stat st;

    r->place.dir = o->out;
    r->place.unsummed = o->unsummed;
    if (!o->out)
        return 0;
    if (!look_only && mkdir(o->out, 0755) != 0 && errno != EEXIST)
        return k3_refuse(err, -errno, "--out %s cannot be made: %s", o->out, strerror(errno));
    r->place.dir_fd = open(o->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r->place.dir_fd < 0)
        return o->list && errno == ENOENT ? 0 : k3_refuse(err, -errno, "--out %s: %s", o->out, strerror(errno));
    if (look_only)
        return 0;
    r->lock_fd = openat(r->place.dir_fd, K3_FETCH_LOCK, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (r->lock_fd < 0)
        return k3_refuse(err, -errno, "%s cannot be written to: %s", o->out, strerror(errno));
    if (flock(r->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK
                   ? k3_refuse(err, -EBUSY, "another k3-fetch is at work in %s", o->out)
                   : k3_fail(err, -errno, "locking %s/" K3_FETCH_LOCK ": %s", o->out, strerror(errno));
    if (fstat(r->lock_fd, &st) != 0 || st.st_nlink == 0) /* it was taken away with the end of another one */
        return k3_refuse(err, -EBUSY, "another k3-fetch was at work in %s until now", o->out);
    r->locked = true;
    return k3_fetch_sums_open(&r->sums, &r->place, err);
}

static int fetch(struct run *r, struct k3_err *err)
{
    struct k3_progress p;
    char a[K3_SIZE_TEXT], b[K3_SIZE_TEXT];
    int rc = room(r, err);

    if (rc < 0)
        return rc;
    atomic_store(&r->web.new_bytes, 0);
    atomic_store(&r->web.aside_bytes, 0);
    k3_progress_begin(&p, "k3-fetch", "fetched", r->all_bytes, r->there_bytes);
    rc = all_files(r, fetch_one, &p, err);
    k3_progress_end(&p);
    if (rc == 0 && r->n_bad) {
        struct k3_err first = r->err;

        return k3_untrusted(err, -EBADMSG, "%zu of %zu files did not come as announced, the first: %.700s", r->n_bad,
                            r->n_bad + r->n_right, first.text);
    }
    if (rc == 0) {
        note_absent(r);
        printf("%s: %zu files of %s, revision %s, are complete and as announced (%s, %s of them fetched now)\n", r->place.dir,
               r->n_right, r->web.repo, r->web.revision, k3_size_text(a, r->all_bytes),
               k3_size_text(b, r->all_bytes - r->there_bytes + atomic_load(&r->web.aside_bytes)));
        printf("their sums: " K3_FETCH_SUMS ", for sha256sum -c; \"k3ctl verify --model %s --make\" makes those that the daemons check\n",
               r->place.dir);
    }
    return rc;
}

static int verify(struct run *r, struct k3_err *err)
{
    struct k3_progress p;
    char a[K3_SIZE_TEXT];
    int rc;

    atomic_store(&r->web.new_bytes, 0);
    k3_progress_begin(&p, "k3-fetch", "read", r->there_bytes, 0);
    rc = all_files(r, verify_one, &p, err);
    k3_progress_end(&p);
    if (rc < 0)
        return rc;
    if (r->n_bad)
        return k3_untrusted(err, -EBADMSG, "%zu files are wrong and %zu missing in %s; the same command without --verify fetches them",
                            r->n_bad, r->n_missing, r->place.dir);
    if (r->n_missing)
        return k3_fail(err, -ENOENT, "%zu files are missing in %s; the same command without --verify fetches them", r->n_missing,
                       r->place.dir);
    printf("%s: %zu files of %s, revision %s, are complete and as announced (%s)\n", r->place.dir, r->n_right, r->web.repo,
           r->web.revision, k3_size_text(a, r->all_bytes));
    return 0;
}

int k3_fetch_run(const struct k3_fetch_opts *o, struct k3_err *err)
{
    struct run r = { .o = o, .place = { .dir_fd = -1 }, .lock_fd = -1,
                     .web = { .repo = o->repo, .retries = o->retries, .stall_s = o->stall_s, .delay_s = o->delay_s } };
    struct k3_fetch_conn *c = NULL;
    int rc;

    pthread_mutex_init(&r.lock, NULL);
    snprintf(r.web.revision, sizeof(r.web.revision), "%s", o->revision);
    atomic_store(&stop_flag, &r.web.stop);
    rc = k3_fetch_web_init() < 0 ? k3_fail(err, -ENOMEM, "libcurl cannot start") : 0;
    if (rc == 0)
        rc = k3_fetch_web_base(&r.web, o->base, o->insecure_http, err);
    if (rc == 0)
        rc = read_token(&r, err);
    if (rc == 0)
        rc = open_dir(&r, err);
    if (rc == 0 && !(c = k3_fetch_conn_open(&r.web)))
        rc = k3_fail(err, -ENOMEM, "no memory for a connection");
    if (rc == 0)
        rc = list_files(&r, c, err);
    if (rc == 0)
        rc = measure(&r, err);
    if (rc == 0 && o->list)
        print_list(&r);
    else if (rc == 0)
        rc = o->verify ? verify(&r, err) : fetch(&r, err);
    atomic_store(&stop_flag, NULL);
    k3_fetch_conn_close(c);
    k3_fetch_sums_close(r.sums);
    k3_fetch_files_free(&r.files);
    if (r.locked)
        (void)unlinkat(r.place.dir_fd, K3_FETCH_LOCK, 0);
    if (r.lock_fd >= 0)
        close(r.lock_fd);
    if (r.place.dir_fd >= 0)
        close(r.place.dir_fd);
    pthread_mutex_destroy(&r.lock);
    return rc;
}
