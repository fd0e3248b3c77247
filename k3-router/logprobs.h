/* k3-router/logprobs.h: log probabilities of an answer's tokens: what k3-computed says of each (ipc/msg.h), what the journal
 * keeps.  Floats that are written with nine digits come back as the same floats. */
#ifndef K3_ROUTER_LOGPROBS_H
#define K3_ROUTER_LOGPROBS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text/buf.h"

#define K3_TOP_LOGPROBS_MAX 20u

struct k3_logprob { uint32_t id; float value; };
/* n_each entries for each token: its own, then the best n_each - 1, falling.  n_each 0: none were asked for. */
struct k3_logprobs {
    uint32_t n_each;
    size_t n, cap;           /* tokens */
    struct k3_logprob *entry;
};
/* The entries of token i; NULL when there are none. */
static inline const struct k3_logprob *k3_logprobs_at(const struct k3_logprobs *l, size_t i)
{
    return i < l->n ? l->entry + i * l->n_each : NULL;
}
/* Of one more token: [own, id, logprob, ..] of an event.  -EPROTO: it is not n_each entries of finite numbers; -ENOMEM. */
int k3_logprobs_take(struct k3_logprobs *l, uint32_t token, const cJSON *array);
/* Of one more token, from what k3_logprobs_put wrote.  False: it is no such text, or memory is short.  The first one says
 * what n_each is. */
bool k3_logprobs_parse(struct k3_logprobs *l, uint32_t token, const char *text);
/* Appends " OWN ID LOGPROB ID LOGPROB.." of token i. */
int k3_logprobs_put(const struct k3_logprobs *l, size_t i, struct k3_buf *out);
/* [{"logprob":x,"top":[[id,x],..]},..] */
int k3_logprobs_json(const struct k3_logprobs *l, struct k3_buf *out);
void k3_logprobs_free(struct k3_logprobs *l);

#endif
