/* k3-computed/engine.h: requests, sequences, passes.  One thread runs passes (k3_engine_run or _step); any number of server
 * threads submit, poll, cancel and forget.  One mutex; it is not held while a pass runs or a token is drawn.
 *
 *   file         what it knows
 *   events.c     a request, its event log as JSON, the table of all requests, expiry
 *   sequence.c   the slots with state, and how the rows of a pass are shared among them
 *   engine.c     the life of a request, one pass after the other
 *   engine_poll.c what a poll answers: events, and how far the pass is
 *   engine_prefix.c  what is kept of computed prompts and where a request begins (prefix.h)
 *
 * A request:
 *   QUEUED  -> PREFILL  a slot is free, first come first served     engine_admit
 *   PREFILL -> DECODE   its first new token is drawn                engine_publish
 *   any     -> ENDED    stop id, max_tokens, cancel, error, stop    request_end
 * Ended requests keep their events until k3_engine_forget or K3_KEEP_NS after the end.
 *
 * The rows of a pass (k3_seqs_rows, the fairness rule): running sequences are taken in the order in which they had
 * their last row, the longest waiting first.  Each gets one row while rows are left: the next token of an answer or the
 * next id of a prompt.  What remains is shared among the unfinished prompts in equal parts, and what one of them cannot use goes
 * to the others.  So while there are no more sequences than --batch-rows every one moves on in every pass, and a long prompt
 * slows a short one by no more than its equal part; with more sequences than rows they take turns.  A queued request takes
 * no rows and delays nobody. */
#ifndef K3_COMPUTED_ENGINE_H
#define K3_COMPUTED_ENGINE_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "constrain/constraint.h"
#include "k3-computed/pass.h"
#include "k3-computed/prefix.h"
#include "k3-computed/sampling.h"
#include "k3-computed/trace.h"
#include "shm/stats.h"

#define K3_ID_LEN 32                           /* hex digits */
#define K3_MAX_QUEUED 1024u
#define K3_SEQUENCES_MAX 256u
#define K3_BATCH_ROWS_MAX 4096u                /* rows of a pass */
#define K3_MAX_STOP_IDS 256u
#define K3_MAX_POINTS 8u
#define K3_MAX_ID_BYTES (16u << 20)            /* token ids of one submit, as uint32_t */
#define K3_KEEP_NS (3600ull * 1000000000ull)
#define K3_KEPT_BYTES_MAX (256ull << 20)       /* memory of all requests together, unless the options say otherwise */
#define K3_POLL_WAIT_MAX_MS 5000u
#define K3_CONTEXTS 32u                        /* requests answered at the same time */
#define K3_POLLS_WAITING_MAX 24u               /* further polls wait 100 ms at most, so that a submit finds a context */

/* ---- requests (events.c) ---------------------------------------------------------------------------------------- */

enum k3_phase { K3_QUEUED, K3_PREFILL, K3_DECODE, K3_ENDED };
enum k3_end { K3_END_NONE, K3_END_STOP, K3_END_LENGTH, K3_END_CANCELLED, K3_END_ERROR };

/* What a client asks for; all pointers are borrowed (that of sampling.bias, too), but for the constraint: a request that is queued
 * takes it over. */
struct k3_submit {
    char id[K3_ID_LEN + 1]; /* lower case */
    const uint32_t *prompt, *generated, *stop;
    uint32_t n_prompt, n_generated, n_stop;
    uint32_t max_tokens; /* of the whole answer, generated ones included */
    struct k3_sampling sampling;
    struct k3_constraint *constraint; /* behind the generated ids; NULL: any id may come */
    bool logits;
    uint32_t point[K3_MAX_POINTS], n_points; /* lengths of beginnings of the prompt that are worth keeping, ascending */
};

/* The event log is implied by the ids: [logits] token.. [end]; a token brings its log probabilities when they were asked for.  The logits come before the first token, the end is last;
 * so index i means the same event for ever. */
struct k3_request {
    struct k3_request *bucket_next, *queue_next;
    char id[K3_ID_LEN + 1];
    uint32_t *ids;                      /* prompt, then generated; room for n_prompt + max_tokens */
    uint32_t n_prompt, n_given, n_ids;  /* n_given: generated before this submit; n_ids: all known now */
    uint32_t max_tokens;
    uint32_t *stop, n_stop;
    struct k3_sampling sampling;        /* its bias is the request's own */
    struct k3_logprob *logprobs;        /* sampling.n_logprobs for each id after n_given; NULL when not asked for */
    struct k3_constraint *constraint;   /* NULL: none.  Of the engine's thread */
    float *logits;                      /* vocab floats when asked for, else NULL */
    uint32_t n_logits;
    bool has_logits;                    /* filled: event 0 */
    bool complete;                      /* nothing is to be generated: it only wants its logits */
    enum k3_phase phase;
    enum k3_end end;
    uint32_t stop_id;
    int code;                           /* of an error: K3_EXIT_* */
    char message[1024];
    uint64_t ended_ns, last_token_ns;
    uint64_t kept_bytes;
    uint32_t point[K3_MAX_POINTS], n_points;
    uint32_t n_cached;                  /* of the prompt: positions that were there when it began */
    struct k3_seq *slot;                /* while it has state; may be ended already (dropped at the end of the pass) */
    bool forgotten;                     /* free it when the slot lets go */
    bool fetched;                       /* a poll has taken its end */
};

/* Everything that can be known to be wrong before it is queued: exit 2, naming the thing, its value and the limit. */
int k3_submit_check(const struct k3_submit *s, uint32_t vocab, uint32_t ctx, struct k3_err *err);
/* Of a checked one, whose constraint it takes over.  On success *out is the caller's, until k3_requests_add. */
int k3_request_new(struct k3_request **out, struct k3_submit *sub, uint32_t vocab, struct k3_err *err);
void k3_request_free(struct k3_request *r);
/* Memory that a submit would keep. */
uint64_t k3_request_bytes(const struct k3_submit *sub, uint32_t vocab);
bool k3_request_is_stop(const struct k3_request *r, uint32_t token);
/* Ids that go through the model: all that are known, or the prompt of a complete one. */
static inline uint32_t k3_request_n_run(const struct k3_request *r)
{
    return r->complete ? r->n_prompt : r->n_ids;
}
uint32_t k3_request_n_events(const struct k3_request *r);
#define K3_POLL_LOGPROBS_MAX 256u /* tokens with log probabilities in one reply: at 20 each is 4 kB of JSON nodes for its reader */
/* The event after the last one that a reply from index `from` on has. */
uint32_t k3_request_n_told(const struct k3_request *r, uint32_t from);
/* Appends the events from index `from` on to a JSON array, up to that one.  -ENOMEM. */
int k3_request_events(const struct k3_request *r, uint32_t from, cJSON *array);

#define K3_BUCKETS 256u
struct k3_requests {
    struct k3_request *bucket[K3_BUCKETS];
    uint64_t kept_bytes;
    uint32_t n;
};
struct k3_request *k3_requests_find(const struct k3_requests *t, const char *id);
void k3_requests_add(struct k3_requests *t, struct k3_request *r);
/* Takes it out of the table and frees it, unless a slot still holds it. */
void k3_requests_remove(struct k3_requests *t, struct k3_request *r);
void k3_requests_expire(struct k3_requests *t, uint64_t now_ns); /* ended K3_KEEP_NS ago */
bool k3_requests_unfetched(const struct k3_requests *t);         /* some end has not been taken by a poll */
void k3_requests_free(struct k3_requests *t);

/* ---- sequences (sequence.c) ------------------------------------------------------------------------------------- */

struct k3_seq {
    struct k3_state *state;
    struct k3_request *request; /* NULL = free */
    uint32_t n_done;            /* positions that the state holds */
    uint32_t n_rows;            /* in the pass that runs */
    uint64_t last_pass;         /* number of the pass in which it last had a row; ties by admission */
    uint64_t admitted;
    bool dirty;                 /* reset before the next use */
    bool spoilt;                /* the last pass of this sequence failed */
    bool ended;                 /* let go, and the engine's thread has not looked yet */
    uint32_t *held, n_held;     /* without a request: the ids that the state holds; room for --ctx */
    uint64_t used;              /* without a request: stamp of prefix.h */
    struct k3_snapshot *from;   /* to be copied before the next pass; the engine's thread alone, as n_kept */
    uint32_t n_kept;            /* positions that some snapshot of this sequence holds */
};
struct k3_seqs { struct k3_seq *slot; uint32_t n; };
int k3_seqs_open(struct k3_seqs *s, uint32_t n, const struct k3_config *c, uint32_t ctx, struct k3_err *err);
void k3_seqs_close(struct k3_seqs *s);
/* The rule above.  n_left[i]: rows that sequence i could use, in the order in which they are to be served. */
void k3_seqs_rows(const uint32_t *n_left, uint32_t n, uint32_t n_budget, uint32_t *n_rows);
/* Sets n_rows of every slot; returns their sum. */
uint32_t k3_seqs_plan(struct k3_seqs *s, uint32_t n_budget);

/* ---- engine (engine.c, engine_poll.c) ---------------------------------------------------------------------------- */

enum k3_computed_stat {
    K3_CS_PASSES, K3_CS_PASS_ROWS, K3_CS_TOKENS, K3_CS_PROMPT_TOKENS, K3_CS_PASS_NS, K3_CS_TRUNK_WAIT_NS,
    K3_CS_EXPERT_WAIT_NS, K3_CS_ARITHMETIC_NS, K3_CS_TRUNK_WAITS, K3_CS_RING_ROW_BYTES, K3_CS_PINNED_ROW_BYTES,
    K3_CS_EXPERT_DEMANDS, K3_CS_EXPERT_HITS, K3_CS_DISTINCT_EXPERTS, K3_CS_KV_BYTES, K3_CS_TRUNK_REATTACHED,
    K3_CS_EXPERT_REATTACHED, K3_CS_RUNNING, K3_CS_MOST, K3_CS_QUEUED, K3_CS_REQUESTS, K3_CS_CANCELLED, K3_CS_FAILED,
    K3_CS_POSITIONS, K3_CS_LAYER, K3_CS_WAITING, K3_CS_PASS_TIME, K3_CS_TOKEN_TIME, K3_CS_SNAPSHOTS, K3_CS_SNAPSHOT_BYTES,
    K3_CS_SNAPSHOTS_EVICTED, K3_CS_PREFIX_HITS, K3_CS_CACHED_TOKENS,
    K3_N_CS
};
extern const struct k3_stat_def k3_computed_stat_defs[K3_N_CS];

/* What the source tells while a pass runs; written by the thread that runs it, relaxed, read by anybody. */
enum k3_waiting { K3_WAIT_NONE, K3_WAIT_TRUNK, K3_WAIT_EXPERT };
struct k3_meter {
    _Atomic uint64_t bytes;   /* weights handed to the pass, ever */
    _Atomic uint32_t waiting; /* enum k3_waiting */
};

struct k3_engine_opts {
    const struct k3_model *m;
    struct k3_pass *pass;
    struct k3_source *source;
    struct k3_stats *stats;           /* never NULL; page NULL is a no-op */
    const struct k3_meter *meter;
    _Atomic bool *abort;              /* the stop flag of the source: ends the waits of the pass that runs */
    _Atomic bool *stop;               /* ends the engine; set it before *abort.  Any thread, at any time */
    struct k3_tracer *tracer;         /* borrowed; may be NULL */
    uint32_t prefetch;                /* guesses of each row that are announced to the source a layer early; 0: none */
    uint32_t ctx, n_sequences, batch_rows, generation;
    uint32_t n_snapshots;             /* prefix.h */
    uint64_t kept_bytes_max;          /* of all requests together; 0: K3_KEPT_BYTES_MAX */
    uint64_t (*now_ns)(void *arg);    /* NULL: k3_now_ns */
    void (*tick)(void *arg);          /* after every layer and K3_TICK_NS when idle, on the engine's thread; may be NULL */
    void *arg;
};
struct k3_engine;
/* Allocates the state of all sequences and the logits.  opts is copied. */
int k3_engine_open(struct k3_engine **out, const struct k3_engine_opts *opts, struct k3_err *err);
void k3_engine_close(struct k3_engine *e);
/* All of it but the snapshots (k3_prefix_bytes). */
uint64_t k3_engine_bytes(const struct k3_config *c, uint32_t ctx, uint32_t n_sequences, uint32_t batch_rows);

/* One pass: 1 when one ran, 0 when there was nothing to do, -ECANCELED when stopped (all requests have ended). */
int k3_engine_step(struct k3_engine *e);
/* Steps, sleeping while there is nothing to do, until *stop. */
void k3_engine_run(struct k3_engine *e);
/* Waits until polls have taken the end of every request, at most timeout_ns. */
void k3_engine_wait_fetched(struct k3_engine *e, uint64_t timeout_ns);

/* Checks everything that can be checked, then queues.  *known: the id was there already, nothing changed.
 * draining: refuse what is not known. */
int k3_engine_submit(struct k3_engine *e, struct k3_submit *sub, bool draining, bool *known, struct k3_err *err);
/* progress_from < 0: only events end the wait.  -ENOENT: unknown id. */
int k3_engine_poll(struct k3_engine *e, const char *id, uint32_t from, int64_t progress_from, uint32_t wait_ms,
                   cJSON *reply, struct k3_err *err);
int k3_engine_cancel(struct k3_engine *e, const char *id, struct k3_err *err); /* ended already: 0 */
/* A running request is cancelled first. */
int k3_engine_forget(struct k3_engine *e, const char *id, struct k3_err *err);

#endif
