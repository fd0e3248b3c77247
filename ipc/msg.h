/* ipc/msg.h: JSON requests over nng REQ/REP at ipc://<run dir>/<name>.  Used for every <daemon>.ctl and for
 * computed.sock.
 *
 * Every request is one JSON object with "cmd"; every reply one object with "ok": true, or "ok": false with "error"
 * (one line), "code" (K3_EXIT_*) and "errno".  A message is at most K3_MSG_MAX bytes; larger or malformed ones are
 * answered with an error, never a crash.
 *
 * computed.sock (design.md section 6).  id = 32 hex digits chosen by the client.
 *   submit  {cmd, id, prompt_ids:[..], generated_ids:[..]?, max_tokens, temperature, top_k, top_p, min_p,
 *            seed:"decimal u64", stop_ids:[..], logits:bool?, snapshot_points:[..]?, constraint:{..}?, model_digest:"hex"?,
 *            presence_penalty?, frequency_penalty?, repeat_penalty?, logit_bias:[[id, value],..]?, logprobs:0..20?}
 *           -> {ok, known, whole_model, generation, model:"dir", model_digest:"hex"}; the last two are in a refusal, too.
 *           model_digest in the request: refused (errno "ESTALE") by any other model, whose ids mean something else.
 *           A repeat of a known id is answered ok with "known": true and changes nothing.
 *           snapshot_points: up to 8 lengths of beginnings of the prompt, ascending, at which later prompts may part from this one.
 *           constraint: constrain/constraint.h; the generated ids must be such as it allows.
 *           top_k 0 = off, top_p 1 = off, min_p 0 = off, temperature 0 = greedy.  logprobs: how many of the best ids beside
 *           the token's own; absent: none.
 *   poll    {cmd, id, from, progress_from?, wait_ms?} -> {ok, events:[..], next, state:"queued|prefill|decode|ended", cached,
 *            progress:{seq, phase:"queued|prefill|decode", layer, layers, rows, position, bytes, bytes_pass,
 *            bytes_per_s, eta_s, waiting:"trunk|expert|none"}, generation}
 *           waits up to wait_ms (at most 5000) for an event with index >= from or a progress with seq > progress_from.
 *           events: {i, type:"token", token, index, logprobs:[the token's own, id, logprob, id, logprob..]?}
 *                   {i, type:"logits", n, base64}  (first generated position)
 *                   {i, type:"done", reason:"stop|length|cancelled", stop_id?}
 *                   {i, type:"error", code, message}
 *           `next` is the index after the last event told; with logprobs more may be there already: poll again.
 *           cached: ids of the prompt that were not computed again, since an earlier request had begun with them.
 *           unknown id: ok false, errno "ENOENT" (computed was restarted or the id was forgotten: submit again).
 *   cancel  {cmd, id}     forget {cmd, id}
 *
 * k3-trunkd.ctl and k3-expertd.ctl beside what every daemon answers:
 *   flow    {cmd} -> {ok, drives:[..] as in info; trunkd: ring_filled_bytes; expertd: layer_demands:[..], layer_hits:[..], one
 *           number a layer, since it started}.  Cheap enough to be asked every second. */
#ifndef K3_IPC_MSG_H
#define K3_IPC_MSG_H

#include <cjson/cJSON.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_MSG_MAX (64u << 20)

/* Server: n_contexts REP contexts, each answered by fn on one of the server's own threads (fn may block). */
struct k3_server;
typedef void k3_serve_fn(void *arg, const char *cmd, const cJSON *request, cJSON *reply);
int k3_server_open(struct k3_server **out, const char *rundir, const char *name, unsigned n_contexts,
                   k3_serve_fn *fn, void *arg, struct k3_err *err);
void k3_server_close(struct k3_server *s);
/* Fills a failure reply from err. */
void k3_reply_error(cJSON *reply, const struct k3_err *err);
/* Parses a request body; malformed: NULL and a failure reply.  What the control-message fuzz target drives. */
cJSON *k3_msg_parse(const void *data, size_t len_bytes, const char **cmd, cJSON *reply);

/* Client: one REQ socket, one call at a time.  call: sends, waits at most timeout_ms, returns the reply (caller frees with cJSON_Delete).
 * -ECONNREFUSED/-ETIMEDOUT: nobody there (exit 3).  A reply with ok false is returned as success; look at "ok". */
struct k3_client;
int k3_client_open(struct k3_client **out, const char *rundir, const char *name, struct k3_err *err);
int k3_client_call(struct k3_client *c, const cJSON *request, int timeout_ms, cJSON **reply, struct k3_err *err);
void k3_client_close(struct k3_client *c);

#endif
