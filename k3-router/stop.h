/* k3-router/stop.h: stop texts, matched on the decoded text.  Text that could be the beginning of one is held back. */
#ifndef K3_ROUTER_STOP_H
#define K3_ROUTER_STOP_H

#include <stdbool.h>
#include <stddef.h>

#include "text/buf.h"

struct k3_stop {
    const char *const *text; /* not empty, valid UTF-8; borrowed */
    size_t n;
    bool hit;
    struct k3_buf held;
};
/* Appends text (whole characters).  What may be shown is appended to out.  After a hit, which is the earliest in the text,
 * everything from it on is swallowed.  0 or -ENOMEM. */
int k3_stop_feed(struct k3_stop *s, const char *text, size_t len_bytes, struct k3_buf *out);
int k3_stop_flush(struct k3_stop *s, struct k3_buf *out); /* the text has ended: what was held back is text */
void k3_stop_free(struct k3_stop *s);

#endif
