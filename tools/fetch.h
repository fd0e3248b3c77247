/* tools/fetch.h: k3-fetch, which downloads a model repository from a hub.
 *
 * A hub has BASE/REPO/resolve/REV/FILE.  HEAD of that announces size and sum of a file; GET leads to its bytes, often by
 * way of another host.  Whatever a hub says is untrusted: names, sizes and headers are checked, bytes count only when
 * they have the announced sum.
 *
 * What lies in the directory, and who may find it half done after a death:
 *     FILE            complete and right: renamed from FILE.part after fsync
 *     FILE.part       its first bytes; only ever appended to, or emptied
 *     FILE.part.tag   what FILE.part is a part of: announced sum and size, and the ETag of the server that sent it
 *     FILE.wrong      was FILE, and had not the announced sum
 *     k3-fetch.sha256 sums of complete files, as sha256sum -c reads them; replaced whole by rename
 *     k3-fetch.lock   there while a k3-fetch runs; a lock by flock, so a death leaves it harmless */
#ifndef K3_TOOLS_FETCH_H
#define K3_TOOLS_FETCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "ipc/parse.h"

#define K3_FETCH_BASE "https://huggingface.co"
#define K3_FETCH_REPO "moonshotai/Kimi-K3"
#define K3_FETCH_INDEX "model.safetensors.index.json"
#define K3_FETCH_SUMS "k3-fetch.sha256"
#define K3_FETCH_LOCK "k3-fetch.lock"
#define K3_FETCH_NAME_BYTES 128 /* with its final 0; suffixes of ours are added to it */
#define K3_FETCH_ETAG_BYTES 256
#define K3_FETCH_MAX_FILES 4096
#define K3_FETCH_INDEX_MAX (1u << 30) /* bytes of an index: that of the released model has 60 MB */

enum k3_fetch_sum { K3_FETCH_NO_SUM, K3_FETCH_GIT_SHA1, K3_FETCH_SHA256 };
/* What a hub announces of a file. */
struct k3_fetch_said {
    bool has_size;
    uint64_t size_bytes;
    enum k3_fetch_sum kind;
    char sum[65]; /* hex, lower case */
};
enum k3_fetch_state { K3_FETCH_MISSING, K3_FETCH_PART, K3_FETCH_HERE, K3_FETCH_ABSENT };
struct k3_fetch_file {
    char name[K3_FETCH_NAME_BYTES];
    bool optional; /* may be absent from the hub */
    struct k3_fetch_said said;
    enum k3_fetch_state state; /* by size alone: as it was found */
    uint64_t part_bytes;       /* of FILE.part */
};
struct k3_fetch_files {
    struct k3_fetch_file *f;
    size_t n, cap;
    uint64_t total_size_bytes; /* of the index: bytes of all tensors; 0 when it does not say */
};

/* ---- fetch_list.c: which files; no I/O but reading the index ---- */

/* A plain file name: letters, digits, "._-", no leading dot. */
bool k3_fetch_name_ok(const char *name);
bool k3_fetch_repo_ok(const char *repo); /* OWNER/NAME, or NAME */
/* Adds a file once.  -EINVAL for a name that is none, -E2BIG, -ENOMEM, with words. */
int k3_fetch_add(struct k3_fetch_files *l, const char *name, bool optional, struct k3_err *err);
/* The shards that the index's weight_map names: all, or with n_layers those that hold what the first n_layers layers
 * need.  fd: read from its offset on; text: a buffer instead, fd is -1.  -EINVAL with words for a text that is no index
 * or has a name that is none. */
int k3_fetch_list_shards(struct k3_fetch_files *l, int fd, const char *text, size_t len_bytes, uint32_t n_layers,
                         struct k3_err *err);
/* Bytes of a shard of the released model; 0: it has no such file. */
uint64_t k3_fetch_released_bytes(const char *name);
/* Whether the announced sizes can be true: those of the released repository to the byte; of another one the shards
 * together hold its tensors (all: the list is that of the whole model). */
int k3_fetch_check_sizes(const struct k3_fetch_files *l, const char *repo, bool all, struct k3_err *err);
void k3_fetch_files_free(struct k3_fetch_files *l);

/* ---- fetch_head.c: header lines ---- */

struct k3_fetch_head {
    uint64_t length_bytes, linked_bytes, range_first, range_total;
    bool has_length, has_linked_size, has_range;
    char etag[K3_FETCH_ETAG_BYTES], linked_etag[K3_FETCH_ETAG_BYTES]; /* as sent, with quotes; "" = none */
    char commit[41];                                                  /* X-Repo-Commit, 40 hex digits */
};
/* One line of a reply, with or without its line end.  A status line forgets what was before it. */
void k3_fetch_head_line(struct k3_fetch_head *h, const char *line, size_t len_bytes);
/* Size and sum, of X-Linked-* where there are such, else of Content-Length and ETag.  redirect: the length is that of the
 * redirect's own body and says nothing. */
void k3_fetch_head_said(const struct k3_fetch_head *h, bool redirect, struct k3_fetch_said *out);
bool k3_fetch_etag_strong(const char *etag); /* usable in If-Range */

/* ---- fetch_hash.c ---- */

struct k3_fetch_hash;
/* SHA-256 always, that of a git blob (of which size_bytes is part) only for that kind.  NULL: no memory. */
struct k3_fetch_hash *k3_fetch_hash_begin(enum k3_fetch_sum kind, uint64_t size_bytes);
void k3_fetch_hash_add(struct k3_fetch_hash *h, const void *bytes, size_t n);
/* To be called once.  git_sha1: "" when it was not wanted. */
void k3_fetch_hash_end(struct k3_fetch_hash *h, char sha256[65], char git_sha1[41]);
void k3_fetch_hash_free(struct k3_fetch_hash *h); /* NULL is fine */

/* ---- fetch_web.c: one request ---- */

/* What all workers share. */
struct k3_fetch_web {
    char base[512];             /* no final slash */
    const char *repo;
    char revision[128];         /* as asked for; the commit once the hub has said it */
    char token[512];            /* "" = none */
    bool http_ok;               /* plain http is allowed */
    double stall_s, delay_s;
    uint32_t retries;
    _Atomic bool stop;          /* a signal came, or a worker failed for all */
    _Atomic uint64_t new_bytes;   /* for the progress: bytes that count now and did not at the start */
    _Atomic uint64_t aside_bytes; /* of files that counted at the start and were wrong */
};
enum k3_fetch_outcome {
    K3_FETCH_OK,
    K3_FETCH_AGAIN,  /* try again: err has the reason, wait_s what the server asks for */
    K3_FETCH_NONE,   /* the hub has no such file */
    K3_FETCH_WRONG,  /* what came cannot be the file: it is to be begun anew */
    K3_FETCH_STOP,   /* stop is set */
    K3_FETCH_FATAL,  /* err says why; another try would end alike */
};
struct k3_fetch_conn; /* of one worker */
int k3_fetch_web_init(void); /* once, before any thread */
/* Fills base and http_ok.  Refused: what is no plain http or https URL; http to another machine, unless insecure. */
int k3_fetch_web_base(struct k3_fetch_web *w, const char *base, bool insecure, struct k3_err *err);
struct k3_fetch_conn *k3_fetch_conn_open(struct k3_fetch_web *w);
void k3_fetch_conn_close(struct k3_fetch_conn *c); /* NULL is fine */
/* Size and sum of a file, and in commit (may be NULL) the commit that the revision means, "" when it is not said. */
enum k3_fetch_outcome k3_fetch_ask(struct k3_fetch_conn *c, const char *name, struct k3_fetch_said *out, char commit[41],
                                   double *wait_s, struct k3_err *err);
/* Where the bytes go.  Callbacks return 0 or negative with words in err, which ends the request as FATAL. */
struct k3_fetch_sink {
    void *arg;
    uint64_t from_bytes, size_bytes;     /* asked for from here on; the whole file has size_bytes */
    char etag[K3_FETCH_ETAG_BYTES];      /* for If-Range; "" = none */
    int (*begin)(void *arg, uint64_t at_bytes, const char *etag, struct k3_err *err); /* at 0: begin anew */
    int (*bytes)(void *arg, const void *bytes, size_t n, struct k3_err *err);
};
enum k3_fetch_outcome k3_fetch_get(struct k3_fetch_conn *c, const char *name, struct k3_fetch_sink *sink, double *wait_s,
                                   struct k3_err *err);
/* Waits, or until stop.  try counts from 0.  Says on stderr why and how long. */
void k3_fetch_wait(struct k3_fetch_web *w, const char *name, uint32_t try, double wait_s, const struct k3_err *why);

/* ---- fetch_file.c: one file in the directory ---- */

struct k3_fetch_place {
    int dir_fd;
    const char *dir;
    bool unsummed; /* files without an announced sum are taken */
};
/* Fills state and part_bytes. */
int k3_fetch_look(const struct k3_fetch_place *p, struct k3_fetch_file *f, struct k3_err *err);
/* Whether FILE has the announced sum: 1 yes, 0 no, negative with words.  In got what it has. */
int k3_fetch_compare(const struct k3_fetch_place *p, struct k3_fetch_web *w, const struct k3_fetch_file *f, char sha256[65],
                     char git_sha1[41], struct k3_err *err);
/* Until FILE is there and right.  OK with its sum in sha256, or STOP, NONE, FATAL (all others would end so, too), WRONG (this
 * file only: three times another sum). */
enum k3_fetch_outcome k3_fetch_one(struct k3_fetch_conn *c, struct k3_fetch_web *w, const struct k3_fetch_place *p,
                                   const struct k3_fetch_file *f, char sha256[65], struct k3_err *err);
/* The same into an open file without a name, from its beginning. */
enum k3_fetch_outcome k3_fetch_into(struct k3_fetch_conn *c, struct k3_fetch_web *w, const struct k3_fetch_place *p,
                                    const struct k3_fetch_file *f, int fd, struct k3_err *err);

/* ---- fetch_sums.c: k3-fetch.sha256 ---- */

struct k3_fetch_sums;
int k3_fetch_sums_open(struct k3_fetch_sums **out, const struct k3_fetch_place *p, struct k3_err *err);
/* Whether the file is listed with this sum and was not written since. */
bool k3_fetch_sums_has(struct k3_fetch_sums *s, const char *name, const char *sha256, int64_t mtime_ns); /* any thread */
int k3_fetch_sums_set(struct k3_fetch_sums *s, const char *name, const char *sha256, struct k3_err *err); /* any thread */
void k3_fetch_sums_close(struct k3_fetch_sums *s); /* NULL is fine */

/* ---- fetch_run.c ---- */

struct k3_fetch_opts {
    const char *repo, *revision, *base, *out, *token_file, *env_token;
    struct k3_str_list also;
    uint32_t parallel, retries, n_layers;
    double stall_s, delay_s;
    bool list, verify, insecure_http, unsummed;
};
int k3_fetch_run(const struct k3_fetch_opts *o, struct k3_err *err);
void k3_fetch_stop(void); /* from a signal handler */

#endif
