/* k3-router/journal.h: one append-only file for each request, <state dir>/<id>.journal, so that an answer survives the
 * router and can be asked for again with --resume.  Text, one record a line:
 *
 *   k3-journal 1 ID
 *   {"submit":{..},..}      the head: what is submitted (prompt ids, parameters, seed) and how the answer is shown
 *   model {"model_digest":"HEX","model":"DIR"}   what k3-computed runs, once it has taken the request; before any token
 *   t INDEX TOKEN [LOGPROB [ID LOGPROB]..]   appended before the token is shown; with its log probabilities when they were
 *                           asked for (logprobs.h): k3-computed does not compute those of a resumed answer's tokens again
 *   end REASON [STOP_ID]    stop, length or cancelled
 *
 * A record counts when its line end is there: the last line of a file that was being written when its writer died may be
 * anything and is cut off.  Anything else that does not fit is refused.
 *
 * What reaches the disk when: every record is one write(), so it survives the death of the router at once.  The head
 * and the end are also fdatasync'ed, and in between the file is at most once a second; so a crash of the machine
 * costs at most the tokens of the last second, which are generated again, the same ones.
 *
 * The file is locked (flock) while a router writes it.  Files older than 7 days, and all but the 1,000 newest, are removed
 * when a router starts. */
#ifndef K3_ROUTER_JOURNAL_H
#define K3_ROUTER_JOURNAL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"
#include "text/buf.h"
#include "k3-router/logprobs.h"

#define K3_JOURNAL_ID_LEN 32 /* hex digits */
#define K3_JOURNAL_KEEP_S (7 * 86400)
#define K3_JOURNAL_KEEP_FILES 1000u

struct k3_journal { int fd; char path[1024]; uint64_t synced_ns; };
#define K3_JOURNAL_INIT { -1, "", 0 }

struct k3_journal_data {
    cJSON *head;
    struct k3_ids generated;
    struct k3_logprobs logprobs; /* of all tokens or of none */
    cJSON *model;    /* NULL: not submitted yet */
    char end[16];    /* "" while it has not ended */
    int64_t stop_id; /* -1 none */
};

/* The state directory: given, else $XDG_STATE_HOME/k3, else ~/.local/state/k3.  Made with its parents, 0700. */
int k3_journal_dir(char *out, size_t len, const char *given, struct k3_err *err);
/* 32 hex digits of randomness and a NUL. */
void k3_journal_new_id(char out[K3_JOURNAL_ID_LEN + 1]);
bool k3_journal_id_ok(const char *id);

/* Makes the file and writes the head.  -EEXIST when there is one of that id. */
int k3_journal_create(struct k3_journal *j, const char *dir, const char *id, const cJSON *head, struct k3_err *err);
/* Reads an existing one, cuts off a torn last line and opens it for appending.  Refused (exit 2): no such id, not a
 * journal, in use by another router.  On success data is the caller's, to be released with k3_journal_data_free(). */
int k3_journal_open(struct k3_journal *j, const char *dir, const char *id, struct k3_journal_data *data,
                    struct k3_err *err);
/* The records of a file in memory, for k3_journal_open and tests.  *good_bytes: where a torn last line begins. */
int k3_journal_parse(struct k3_journal_data *data, const char *text, size_t len_bytes, const char *id,
                     const char *name, size_t *good_bytes, struct k3_err *err);
void k3_journal_data_free(struct k3_journal_data *data);
int k3_journal_model(struct k3_journal *j, const char *digest, const char *model, struct k3_err *err);
/* l (may be NULL) has the log probabilities of it, if any were asked for. */
int k3_journal_token(struct k3_journal *j, size_t index, uint32_t token, const struct k3_logprobs *l, struct k3_err *err);
int k3_journal_end(struct k3_journal *j, const char *reason, int64_t stop_id, struct k3_err *err);
void k3_journal_close(struct k3_journal *j);
/* Removes old files.  now_s: seconds since 1970.  Returns how many. */
unsigned k3_journal_prune(const char *dir, int64_t now_s, unsigned keep_files);

#endif
