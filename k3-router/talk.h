/* k3-router/talk.h: a conversation as it is kept at a terminal, saved and loaded: messages in the OpenAI shape, each as JSON, so
 * that one checker (chat_request.h) stands between any of them and the prompt. */
#ifndef K3_ROUTER_TALK_H
#define K3_ROUTER_TALK_H

#include "k3-router/chat.h"

#define K3_TALK_BYTES_MAX (64u << 20) /* of a file */

struct k3_talk { struct k3_buf *message; size_t n, cap; }; /* {0} is empty */

/* reasoning (assistant) may be empty.  -ENOMEM leaves all as it was. */
int k3_talk_add(struct k3_talk *t, const char *role, struct k3_text content, struct k3_text reasoning);
/* No message is left, but system (when it is not empty). */
int k3_talk_reset(struct k3_talk *t, struct k3_text system);
/* The prompt of all messages and, last, user.  *thinking: in, the default; out, the channel that the prompt leaves open. */
int k3_talk_render(const struct k3_talk *t, const struct k3_chat *c, struct k3_text user, const char *effort, bool *thinking,
                   struct k3_ids *out, struct k3_err *err);
/* {"messages":[...]}, a message a line. */
int k3_talk_json(const struct k3_talk *t, struct k3_buf *out);
/* The other way: that, or a bare array of messages.  Other members are passed over; tools are refused, as nobody is there to be
 * called.  After a refusal *t is as before. */
int k3_talk_parse(struct k3_talk *t, const struct k3_chat *c, const char *bytes, size_t len_bytes, struct k3_err *err);
/* The file is there whole or not at all, mode 0600.  Refused when there is one, unless replace. */
int k3_talk_save(const struct k3_talk *t, const char *path, bool replace, struct k3_err *err);
int k3_talk_load(struct k3_talk *t, const struct k3_chat *c, const char *path, struct k3_err *err);
void k3_talk_free(struct k3_talk *t);

#endif
