/* k3-router/request.h: one request to k3-computed, from submit to its end, over restarts of computed (ipc/msg.h).
 *
 *   NEW      -> RUNNING   submit answered ok
 *   RUNNING  -> RUNNING   poll; every token goes to the journal, then to the caller
 *   RUNNING  -> LOST      the socket is gone, or computed does not know the id: it was restarted
 *   LOST     -> RUNNING   it answers again: poll, and when it does not know the id, submit with the tokens so far
 *   LOST     -> failed    nobody came back within wait_s (exit 3); the journal keeps the tokens for --resume
 *   RUNNING  -> left      the caller leaves: forget; as failed, the journal keeps the tokens
 *   RUNNING  -> ENDED     done event, a stop text (the caller's token hook says so), or an interrupt: cancel, forget
 * A resumed request begins as LOST.
 * An answer is finished by the model that began it: its digest is in the journal and goes with every further submit.  When
 * another model answers, the request is refused (exit 2 when it is being resumed, exit 4 in mid-answer). */
#ifndef K3_ROUTER_REQUEST_H
#define K3_ROUTER_REQUEST_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "text/buf.h"
#include "k3-router/journal.h"

#define K3_ASK_POINTS 4u
struct k3_ask_params {
    uint64_t max_tokens, seed;
    double temperature, top_p, min_p;
    uint32_t top_k;
    bool logits;
    double presence_penalty, frequency_penalty, repeat_penalty; /* as the others, ipc/msg.h; repeat_penalty 0: 1 */
    const char *logit_bias; /* JSON, [[id,value],..]; NULL none; borrowed for k3_ask_new */
    uint32_t n_logprobs;    /* for each token: its own and the n_logprobs - 1 best; 0 none */
    uint32_t point[K3_ASK_POINTS], n_points; /* snapshot_points (ipc/msg.h) */
    const char *constraint; /* JSON for k3-computed (constrain/constraint.h), borrowed until the request is made; NULL: none */
};

enum k3_ask_end { K3_ASK_RUNNING, K3_ASK_STOP, K3_ASK_LENGTH, K3_ASK_CANCELLED };
const char *k3_ask_end_name(enum k3_ask_end end);

/* What an answer is computed by.  digest "": not known yet. */
struct k3_ask_model { char digest[65], path[1024]; };

struct k3_ask {
    char id[K3_JOURNAL_ID_LEN + 1];
    cJSON *submit; /* what is sent, without generated_ids; part of the journal's head */
    cJSON *head;   /* owner of submit */
    struct k3_ids prompt, generated;
    struct k3_logprobs logprobs; /* of each generated one, when asked for */
    struct k3_ask_params params;
    struct k3_journal journal;
    struct k3_ask_model model; /* of the journal: no other one goes on with the answer */
    bool resumed, has_logits;
    size_t n_cached; /* of the prompt, not computed for the first token of this run */
    enum k3_ask_end end;
    int64_t stop_id; /* -1 none */
    uint64_t start_ns, first_ns, end_ns;
};
#define K3_ASK_INIT { .journal = K3_JOURNAL_INIT, .stop_id = -1 }

/* Fills a new request (prompt is taken over), with a new id, and writes its journal.  shown: an object with what --resume
 * needs to show the answer; it becomes part of the head and is owned by it, also on failure. */
int k3_ask_new(struct k3_ask *a, struct k3_ids *prompt, const struct k3_ask_params *params, const uint32_t *stop_ids,
               size_t n_stop_ids, cJSON *shown, const char *state_dir, struct k3_err *err);
/* The same under an id of the caller's choice (32 hex digits) that has no journal yet: -EEXIST when it has. */
int k3_ask_new_as(struct k3_ask *a, const char *id, struct k3_ids *prompt, const struct k3_ask_params *params,
                  const uint32_t *stop_ids, size_t n_stop_ids, cJSON *shown, const char *state_dir, struct k3_err *err);
/* The same from a journal: prompt, params and what was generated.  Refused: see journal.h. */
int k3_ask_resume(struct k3_ask *a, const char *id, const char *state_dir, struct k3_err *err);
/* The `shown` object of the head. */
const cJSON *k3_ask_shown(const struct k3_ask *a);
void k3_ask_free(struct k3_ask *a);

struct k3_ask_progress {
    const char *phase, *waiting;
    double layer, layers, rows, position, bytes, bytes_pass, bytes_per_s, eta_s;
};
struct k3_ask_hooks {
    void *arg;
    int (*token)(void *arg, uint32_t token);                           /* 0 go on, 1 stop here, negative: give up */
    void (*progress)(void *arg, const struct k3_ask_progress *p);
    void (*notice)(void *arg, const char *line);                       /* one line for the person, no newline */
    int (*logits)(void *arg, const void *bytes, size_t len_bytes);     /* float32 of the first generated position */
    bool (*interrupted)(void *arg);                                    /* true: cancel */
    bool (*leave)(void *arg);                                          /* true: give up for now; may be NULL */
};
/* model, state_dir: what the person has named, for the hints; NULL: nothing.  seen: k3-computed was there a while ago, so one
 * that is not there now is waited for.  digest: of the model whose ids a new request has; NULL or "": not known. */
struct k3_ask_peer { const char *rundir, *instance; unsigned wait_s; const char *model, *state_dir; bool seen; const char *digest; };

/* Gives tokens that the journal already holds to the hook, then runs the request to its end; returns at once when it has
 * ended before.  Exit 3 and how to start the family when nobody is there.  After a negative return the journal is whole
 * and the request can be resumed. */
int k3_ask_run(struct k3_ask *a, const struct k3_ask_peer *peer, const struct k3_ask_hooks *hooks,
               struct k3_err *err);

#endif
