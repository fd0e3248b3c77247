/* k3-router/http.h: the server of --http; private to the http_*.c files.
 *
 *   http.c         start, the listening socket, the end            http_guard.c   address, keys, Host, Origin; pure
 *   http_serve.c   libmicrohttpd's callbacks: one request in       http_reply.c   what goes out, and when it may
 *   http_watch.c   connections: deadlines, gone clients, comments  http_family.c  what the daemons say; models, health, metrics
 *   http_fields.c  fields of a body, and the refusals that name them
 *   http_tokens.c  /tokenize, /detokenize                          http_ask.c     completions: prepare, run, end
 *   http_queue.c   who has to wait, and for whom                   http_shape.c, http_logprobs.c   answers as JSON
 *   http_page.c    the page: files of web/, embedded               http_machine.c what /v1/k3/stats has beside the pages
 *
 * Threads: one of libmicrohttpd (callbacks; nothing in it blocks), one that watches connections, one that asks k3-computed
 * what it is, two that prepare requests (a long prompt takes seconds to tokenize), and one for each answer that is being made.
 * One lock, h->lock, guards everything below that is not marked; it is never held over I/O that can block.
 *
 * The life of a request (struct k3_http_req):
 *   READING    -> READY      answered at once: an early refusal, or a GET          http_serve.c
 *   READING    -> PREPARING  the body is whole; the connection is suspended        http_serve.c
 *   PREPARING  -> READY      refused, or answered (tokens)                          the preparing thread
 *   PREPARING  -> QUEUED     a job that waits for its turn                          http_ask.c
 *   QUEUED     -> RUNNING    one thread of its own asks k3-computed                 http_queue.c
 *   QUEUED, RUNNING -> ENDED the answer is whole, or failed                        http_ask.c
 * A request with "n" becomes n jobs (struct k3_http_job), one after the other in the queue.  Each takes a place there, starts when
 * one is free, and holds nothing while it waits, so that no two requests can wait for each other.  The request is RUNNING from its
 * first start to its last end.  An answer that fails ends the reply, and with it the others.
 * Beside it goes `sending`: the head has been given to libmicrohttpd, and `out` is what follows.  A stream is sending from the
 * moment it is queued; a plain answer when it is whole, or after ten seconds, with white space before the JSON.
 * gone: the client has left.  It is set once, by whoever notices, and ends the work at the next look. */
#ifndef K3_ROUTER_HTTP_H
#define K3_ROUTER_HTTP_H

#include <microhttpd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "ipc/daemon.h"
#include "text/chat_json.h"
#include "k3-router/router.h"

#define K3_HTTP_BODY_MAX (64u << 20)    /* one request */
#define K3_HTTP_VALUES_MAX (2u << 20)   /* JSON values of one body: a node is 64 bytes; a prompt has at most 2^20 ids */
#define K3_HTTP_OUT_MAX (16u << 20)     /* what a client has not taken yet of a stream */
#define K3_HTTP_STOPS_MAX 16u
#define K3_HTTP_CHOICES_MAX 8u          /* n */
#define K3_HTTP_BIASES_MAX 1024u
#define K3_HTTP_BIAS_MOST 100.0
#define K3_HTTP_TEXT_LOGPROBS_MAX 5     /* of /v1/completions */
#define K3_HTTP_PATIENCE_NS 9500000000ull /* a plain answer that takes longer begins with white space, and goes on with it */

/* ---- http_guard.c: pure ------------------------------------------------------------------------------------------------ */

struct k3_http_addr { struct sockaddr_storage sa; socklen_t len; bool loopback; };
/* "127.0.0.1:8080", "[::1]:8080", "localhost:8080".  Refused: anything else. */
int k3_http_addr_parse(struct k3_http_addr *a, const char *text, struct k3_err *err);
/* "127.0.0.1:8080" or "[::1]:8080". */
const char *k3_http_addr_text(const struct k3_http_addr *a, char *out, size_t len);

struct k3_http_keys { char **key; size_t n; };
/* One key a line, at least 16 printable characters; `#` begins a comment line.  Refused: a file that others can read or
 * write, or that holds no key. */
int k3_http_keys_load(struct k3_http_keys *k, const char *path, struct k3_err *err);
int k3_http_keys_parse(struct k3_http_keys *k, const char *text, size_t len_bytes, const char *name, struct k3_err *err);
void k3_http_keys_free(struct k3_http_keys *k);
/* Time does not depend on where a key differs. */
bool k3_http_key_ok(const struct k3_http_keys *k, const char *given);
/* The key of "Authorization: Bearer KEY"; NULL when it is of another form. */
const char *k3_http_bearer(const char *authorization);
/* Host: a loopback name or address, the address that is served, or one of names; the port does not matter. */
bool k3_http_host_ok(const char *host, const char *served, const struct k3_str_list *names);
/* Origin is that of a page from this very Host. */
bool k3_http_origin_same(const char *origin, const char *host);
/* Origin is in the list, or "*" is. */
bool k3_http_origin_listed(const char *origin, const struct k3_str_list *list);
/* A list of header names and nothing else, so that it can be echoed. */
bool k3_http_header_names_ok(const char *text);
/* The entity tag is in the list of If-None-Match (NULL: none), or the list is *; compared as weak ones are (RFC 9110 13.1.2).
 * etag: with its quotes, without a comma in it. */
bool k3_http_tag_listed(const char *list, const char *etag);

/* ---- the server ---------------------------------------------------------------------------------------------------------- */

enum k3_http_stat {
    K3_HS_REQUESTS, K3_HS_REFUSED, K3_HS_FAILED, K3_HS_BUSY, K3_HS_GONE, K3_HS_CUT, K3_HS_ANSWERS, K3_HS_PROMPT, K3_HS_GENERATED,
    K3_HS_CONNECTIONS, K3_HS_QUEUED, K3_HS_RUNNING, K3_HS_SECONDS, K3_HS_FIRST, K3_N_HS
};

/* What k3-computed says of itself. */
struct k3_http_peer {
    bool known;
    uint64_t ctx, sequences, batch_rows, vocab;
    uint64_t layers, layers_model, threads, state_bytes, buffer_bytes, thread_bytes; /* for the machine view */
    char digest[65], kernels[16];
};

/* Replies to `flow` (ipc/msg.h), kept while somebody looks; NULL: none came.  The lock. */
struct k3_http_flow { cJSON *trunk, *expert; };

/* A file of web/, made by k3-router/embed. */
struct k3_web_file { const char *path, *type, *etag; const unsigned char *bytes; size_t len_bytes; };
extern const struct k3_web_file k3_web_files[];
extern const size_t k3_n_web_files;

enum k3_http_phase {
    K3_HTTP_READING, K3_HTTP_PREPARING, K3_HTTP_QUEUED, K3_HTTP_RUNNING, K3_HTTP_READY, K3_HTTP_ENDED
};
struct k3_http_job;
struct k3_http_route;
struct k3_http_req {
    struct k3_http *h;
    struct k3_http_conn *conn;   /* NULL once libmicrohttpd has done with the request */
    struct MHD_Connection *mhd;  /* the same */
    unsigned refs;               /* libmicrohttpd's and the job's */
    enum k3_http_phase phase;
    const struct k3_http_route *route; /* NULL: no such path */
    const struct k3_web_file *file;    /* of the page; NULL: another path */
    char method[12], path[80];   /* for the log */
    char origin[256];            /* that the reply names; "" none */
    char allow_headers[512];     /* of a preflight */
    bool discard;                /* refused early: what the client still sends is thrown away */
    struct k3_buf body;          /* of libmicrohttpd's thread, then of the preparing one */
    size_t body_bytes;           /* counted in h->body_bytes */
    uint64_t body_ns;            /* the head was whole */
    int status;
    const char *type;            /* content type */
    unsigned retry_after_s;      /* 0 none */
    double eta_s;                /* negative: none */
    bool stream;                 /* server-sent events */
    bool sending, suspended;
    _Atomic bool ended; /* the reply is whole; looked at by the thread that watches, too */
    struct k3_buf out;           /* out.bytes + sent is what the client has not taken yet */
    size_t sent;
    uint64_t start_ns, out_ns;   /* out_ns: something was last added to out */
    _Atomic bool gone;           /* any thread */
    struct k3_http_job *job;     /* QUEUED and RUNNING */
    struct k3_http_req *next;    /* of those to be prepared */
    size_t kept_bytes;           /* of all its answers: ids of the prompt, log probabilities; in body_bytes after the body */
    size_t n_prompt, n_generated; /* for the log */
    const char *end;
};

/* A connection, from accept to close. */
struct k3_http_conn {
    struct k3_http_conn *next, *prev;
    int fd;
    struct k3_http_req *req; /* NULL between requests */
    uint64_t idle_ns;        /* since when it is between requests */
    uint64_t line_ns;        /* the request line was there; 0: not yet */
    bool cut;
};

struct k3_http {
    struct k3_router *r;
    struct k3_daemon *daemon;
    struct MHD_Daemon *mhd;
    int listen_fd;                /* -1: libmicrohttpd has it, or there is none */
    struct k3_http_addr addr;
    char addr_text[80], name[128]; /* of the model */
    int64_t created;              /* seconds since 1970 */
    struct k3_http_keys keys;
    pthread_mutex_t lock;
    pthread_cond_t news;          /* something to prepare, an answer less, the end */
    struct k3_http_conn *conns;
    unsigned n_conns;
    struct k3_http_req *prepare_head, **prepare_tail;
    struct k3_http_job *queue_head, **queue_tail;
    struct k3_http_job *left;     /* whose clients have gone while they waited; a preparing thread ends them */
    unsigned n_queued, n_running, n_reserved; /* n_reserved: being prepared, with a place in the queue */
    /* Half of --http-mb is for bodies, the other half for what is made of them before they are submitted. */
    size_t half_bytes, body_bytes, prepare_bytes;
    struct k3_http_peer peer;
    struct k3_http_flow flow;
    uint64_t looked_ns, flow_ns;  /* when somebody last asked for statistics, and the daemons were; 0 never */
    double answer_s;              /* mean of the last answers; 0: none yet */
    uint64_t n_asked;             /* journals since the last pruning */
    bool stopping;                /* no more answers are begun, those that run are left */
    bool leaving;                 /* the threads end */
    pthread_t watch, peer_thread, prepare[2];
    unsigned n_threads;           /* of these four that run */
};

/* http.c */
int k3_router_http(struct k3_router *r, struct k3_err *err);

/* http_serve.c: the callbacks. */
enum MHD_Result k3_http_access(void *cls, struct MHD_Connection *mhd, const char *url, const char *method, const char *version,
                               const char *data, size_t *data_bytes, void **con_cls);
void k3_http_completed(void *cls, struct MHD_Connection *mhd, void **con_cls, enum MHD_RequestTerminationCode why);
void k3_http_connection(void *cls, struct MHD_Connection *mhd, void **socket_context, enum MHD_ConnectionNotificationCode why);
void *k3_http_line(void *cls, const char *uri, struct MHD_Connection *mhd);
void *k3_http_prepare_thread(void *arg);
void k3_http_req_unref(struct k3_http_req *q); /* without the lock */
/* What the path of q takes, as in Allow. */
const char *k3_http_methods(const struct k3_http_req *q);

/* http_reply.c.  All with the lock held, but for those on q's own thread before it is READY. */
/* The whole reply; out has the body. */
void k3_http_reply(struct k3_http_req *q, int status, const char *type);
/* An error object (spec/text.md 5.6).  param, code: NULL for null. */
void k3_http_error(struct k3_http_req *q, int status, const char *param, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* The same into a buffer: {"error":{...}}. */
int k3_http_error_json(struct k3_buf *b, int status, const char *param, const char *code, const char *text);
/* What an error of ours is over HTTP: 400, 503 or 500. */
int k3_http_status_of(const struct k3_err *err);
/* READY, and libmicrohttpd goes on with it. */
void k3_http_ready(struct k3_http_req *q);
/* Adds to what is sent. */
void k3_http_send(struct k3_http_req *q, const char *bytes, size_t len_bytes);
void k3_http_end(struct k3_http_req *q);
void k3_http_wake(struct k3_http_req *q);
/* Gives the reply to libmicrohttpd; on its thread, without the lock. */
enum MHD_Result k3_http_queue_reply(struct k3_http_req *q);

/* http_watch.c */
void *k3_http_watch_thread(void *arg);

/* http_family.c */
void *k3_http_peer_thread(void *arg);
/* 0, or -EAGAIN with the reason why nothing can be asked now. */
int k3_http_family_ready(const struct k3_http *h, char *why, size_t len);
void k3_http_get_models(struct k3_http_req *q);
void k3_http_get_model(struct k3_http_req *q, const char *id);
void k3_http_get_health(struct k3_http_req *q);
void k3_http_get_metrics(struct k3_http_req *q);
void k3_http_get_stats(struct k3_http_req *q);
void k3_http_get_props(struct k3_http_req *q);
extern const struct k3_stat_def k3_http_stat_defs[K3_N_HS];
static inline void k3_http_count(struct k3_http *h, enum k3_http_stat what, uint64_t n)
{
    k3_stat_add(k3_daemon_stats(h->daemon), what, n);
}

/* http_machine.c */
/* The thread that asks k3-computed asks the weight daemons for their flow, once a second while somebody looks. */
void k3_http_machine_ask(struct k3_http *h, uint64_t now_ns);
/* Adds `now_ns` and `machine` to the statistics (docs/user/serving.md). */
void k3_http_machine_add(struct k3_http *h, cJSON *root);
void k3_http_flow_free(struct k3_http_flow *f);

/* http_page.c */
/* The file of exactly this path; NULL: none. */
const struct k3_web_file *k3_http_page_find(const char *path);
void k3_http_get_page(struct k3_http_req *q);
/* Headers that only the page has. */
void k3_http_page_headers(const struct k3_http_req *q, struct MHD_Response *r);

/* http_fields.c: readers of one field.  0, or -EINVAL after the refusal has been written into q. */
/* Upper bound of the values in a JSON text. */
size_t k3_http_count_values(const char *text, size_t len_bytes);
/* The body, which is an object.  The caller's after 0. */
int k3_http_body(struct k3_http_req *q, struct k3_json_doc *doc);
int k3_http_field_refused(struct k3_http_req *q, const char *name, const char *want);
int k3_http_get_bool(struct k3_http_req *q, const struct k3_json *o, const char *name, bool *out);
int k3_http_get_number(struct k3_http_req *q, const struct k3_json *o, const char *name, double min, double max, double *out);
int k3_http_get_whole(struct k3_http_req *q, const struct k3_json *o, const char *name, int64_t min, int64_t max, int64_t *out);
/* Ids below n_vocab. */
int k3_http_get_ids(struct k3_http_req *q, const struct k3_json *array, const char *name, uint32_t n_vocab, struct k3_ids *out);
/* Every member is in one of the lists (NULL ends one), or it is refused by name. */
int k3_http_known(struct k3_http_req *q, const struct k3_json *o, const char *const *honoured, const char *const *ignored);

/* What /v1/completions and /v1/chat/completions have in common. */
struct k3_http_common {
    struct k3_ask_params params;      /* max_tokens 0: not given */
    bool stream, include_usage, seeded;
    char *stop[K3_HTTP_STOPS_MAX];    /* owned; no NUL in them */
    size_t n_stop;
    unsigned n;                       /* answers */
    char *logit_bias;                 /* of params; owned */
    char *model;                      /* JSON string with its quotes, of the reply; owned */
};
extern const char *const k3_http_common_fields[], *const k3_http_ignored_fields[];
int k3_http_get_common(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *out);
/* logprobs and top_logprobs, which the two have in different forms. */
int k3_http_get_chat_logprobs(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c);
int k3_http_get_text_logprobs(struct k3_http_req *q, const struct k3_json *o, struct k3_http_common *c);
void k3_http_common_free(struct k3_http_common *c);

/* http_tokens.c */
void k3_http_post_tokenize(struct k3_http_req *q);
void k3_http_post_detokenize(struct k3_http_req *q);

/* ---- answers ------------------------------------------------------------------------------------------------------------- */

enum k3_http_api { K3_HTTP_TEXT, K3_HTTP_CHAT };
enum k3_http_job_state { K3_HTTP_JOB_WAITS, K3_HTTP_JOB_RUNS, K3_HTTP_JOB_ENDED };
/* One answer, which is a request to k3-computed.  All answers to one request lie in an array.  Its own thread's (before: the
 * preparing one's, after: that of the last one to end), but for what is marked. */
struct k3_http_job {
    struct k3_http_req *q;     /* the array has a reference */
    struct k3_http_job *first; /* of the array */
    unsigned index;            /* in it */
    struct k3_http_job *next;  /* in the queue, or of those that have left it */
    enum k3_http_api api;
    struct k3_http_common c;   /* owned by the first; what it points to is the same for all */
    struct k3_ask ask;
    struct k3_answer answer;
    bool thinking;             /* the prompt leaves the think channel open */
    uint32_t max_calls;
    struct k3_buf constraint;  /* of the answer, as JSON; empty: none */
    size_t n_reasoning;        /* tokens */
    int64_t created;           /* seconds since 1970 */
    char fingerprint[24];      /* "" not known */
    struct k3_buf piece;       /* scratch: one chunk */
    enum k3_http_job_state state; /* the lock */
    struct { char phase[16], waiting[16]; double layer, layers, bytes_per_s, eta_s; size_t n_tokens; } progress; /* the lock */
    /* Of the first one, for all: */
    unsigned n_left, n_refs;   /* the lock: those that have not ended; those that somebody still looks at */
    _Atomic bool closed;       /* the reply is whole, or has failed */
};

/* http_ask.c */
void k3_http_post_completions(struct k3_http_req *q);
void k3_http_post_chat(struct k3_http_req *q);
/* As k3_http_known, with the members that make a prompt and those in `also`. */
int k3_http_chat_known(struct k3_http_req *q, const struct k3_json *o, const char *const *also);
/* The prompt's ids of a body with "messages". */
int k3_http_chat_ids(struct k3_http_req *q, const struct k3_json *o, struct k3_ids *out);
/* The thread of one answer; arg is its job. */
void *k3_http_job_thread(void *arg);
/* Of one that never ran, without the lock.  cancelled: its journal says so; else it can be resumed. */
void k3_http_job_drop(struct k3_http_job *j, bool cancelled);

/* http_queue.c */
/* Takes n places in the queue, or refuses: 0, or -EINVAL and -EAGAIN after the refusal has been written into q. */
int k3_http_reserve(struct k3_http_req *q, unsigned n);
/* The answers to a request, with the places that they have. */
void k3_http_enqueue(struct k3_http_job *first);
/* With the lock: starts what has its turn. */
void k3_http_dispatch(struct k3_http *h);
/* With the lock: the answers to a request that still wait lose their places; a preparing thread ends them. */
void k3_http_unqueue(struct k3_http_job *first);
/* With the lock: the client of a request has gone. */
void k3_http_job_leave(struct k3_http_req *q);
/* With the lock: one line on how far it is, for a comment. */
void k3_http_job_line(const struct k3_http_req *q, char *out, size_t len);

/* http_orphans.c: once, before this server's first answer. */
void k3_http_orphans(const struct k3_router *r);

/* http_shape.c: chunks and bodies.  All fill j->piece; 0 or -ENOMEM. */
int k3_http_chunk_first(struct k3_http_job *j);
int k3_http_chunk_text(struct k3_http_job *j, enum k3_channel channel, const char *text, size_t len_bytes);
int k3_http_chunk_call(struct k3_http_job *j, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes);
int k3_http_chunk_last(struct k3_http_job *j); /* finish_reason */
int k3_http_chunk_end(struct k3_http_job *j);  /* usage of all answers, [DONE] */
int k3_http_chunk_error(struct k3_http_job *j, int status, const char *text);
int k3_http_whole(struct k3_http_job *j);      /* all answers */
const char *k3_http_finish_reason(const struct k3_http_job *j);

/* http_logprobs.c: the value of "logprobs" of a chunk with text of this channel, or of a whole answer; 0 or -ENOMEM. */
int k3_http_put_logprobs(struct k3_http_job *j, enum k3_channel channel);
int k3_http_put_all_logprobs(struct k3_http_job *j);

#endif
