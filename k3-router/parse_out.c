/* Takes generated ids apart into channels (spec/text.md 3.14).  A tag is an OPEN or CLOSE id, the bytes of ordinary ids, a SEP
 * id; the model quoting "<|close|>" in prose makes ordinary ids and is text.
 *
 *   THINK    -> BETWEEN   close(think)
 *   THINK    -> RESPONSE, TOOLS   open(response), open(tools) without a close: real models do this
 *   BETWEEN  -> THINK, RESPONSE, TOOLS   open of that
 *   BETWEEN  -> RESPONSE  text that is not white space
 *   RESPONSE -> BETWEEN   close(response)
 *   RESPONSE -> TOOLS, THINK   open of that
 *   TOOLS    -> BETWEEN   close(tools)
 *   any      -> END       close(message), <|end_of_msg|>, [EOS]
 * A tag with an unknown name, or one that is not ended within 64 ids, is text of the channel without its markers.  A known
 * tag that has no meaning where it stands, and any other special id, is dropped and counted. */
#include "k3-router/chat.h"

#include <errno.h>
#include <string.h>

void k3_out_open(struct k3_out *o, const struct k3_tokenizer *t, bool thinking, k3_out_fn *fn, void *arg)
{
    *o = (struct k3_out){ .t = t, .fn = fn, .arg = arg, .first = true,
                          .state = thinking ? K3_OUT_IN_THINK : K3_OUT_IN_RESPONSE };
}

void k3_out_close(struct k3_out *o)
{
    k3_buf_free(&o->tag);
    k3_buf_free(&o->text);
}

static int emit(struct k3_out *o)
{
    size_t n = o->text.len_bytes;

    o->text.len_bytes = 0;
    if (n == 0 || (o->state != K3_OUT_IN_THINK && o->state != K3_OUT_IN_RESPONSE))
        return 0;
    return o->fn(o->arg, o->state == K3_OUT_IN_THINK ? K3_OUT_THINK : K3_OUT_RESPONSE, o->text.bytes, n);
}

static bool is_blank(const char *bytes, size_t len_bytes)
{
    for (size_t i = 0; i < len_bytes; i++)
        if (!strchr(" \t\r\n\v\f", bytes[i]) || !bytes[i])
            return false;
    return true;
}

static int put(struct k3_out *o, const char *bytes, size_t len_bytes)
{
    if (len_bytes == 0)
        return 0;
    if (o->state == K3_OUT_BETWEEN && !is_blank(bytes, len_bytes))
        o->state = K3_OUT_IN_RESPONSE;
    if (o->state != K3_OUT_IN_THINK && o->state != K3_OUT_IN_RESPONSE)
        return 0;
    if (k3_utf8_feed(&o->utf8, bytes, len_bytes, &o->text) < 0)
        return -ENOMEM;
    return emit(o);
}

/* Leaves the channel: an unfinished character at its end becomes one U+FFFD of that channel. */
static int move(struct k3_out *o, enum k3_out_state to)
{
    int rc = k3_utf8_flush(&o->utf8, &o->text);

    if (rc == 0)
        rc = emit(o);
    o->state = to;
    return rc;
}

/* The tag turned out to be none: its bytes are text. */
static int tag_is_text(struct k3_out *o)
{
    int rc;

    o->marker = 0;
    rc = put(o, o->tag.bytes, o->tag.len_bytes);
    o->tag.len_bytes = 0;
    return rc;
}

static bool tag_is(const struct k3_out *o, const char *name)
{
    size_t n = strlen(name);

    return o->tag.len_bytes >= n && memcmp(o->tag.bytes, name, n) == 0 &&
           (o->tag.len_bytes == n || o->tag.bytes[n] == ' ');
}

static int tag_done(struct k3_out *o, bool first)
{
    bool opens = o->marker == K3_SP_OPEN;
    enum k3_out_state s = o->state;
    int rc = 0;

    if (tag_is(o, "message")) {
        if (!opens)
            rc = move(o, K3_OUT_END);
        else
            o->n_dropped++;
    } else if (tag_is(o, "think") || tag_is(o, "response") || tag_is(o, "tools")) {
        enum k3_out_state own = tag_is(o, "think")      ? K3_OUT_IN_THINK
                                : tag_is(o, "response") ? K3_OUT_IN_RESPONSE
                                                        : K3_OUT_IN_TOOLS;
        if (opens && s != own)
            rc = move(o, own);
        else if (!opens && s == own)
            rc = move(o, K3_OUT_BETWEEN);
        else if (!(opens && first)) /* an echo of the channel's opening as the very first ids is usual */
            o->n_dropped++;
    } else if (tag_is(o, "call") || tag_is(o, "argument") || tag_is(o, "json")) {
        if (s != K3_OUT_IN_TOOLS)
            o->n_dropped++;
    } else {
        return tag_is_text(o);
    }
    o->marker = 0;
    o->tag.len_bytes = 0;
    return rc;
}

int k3_out_feed(struct k3_out *o, uint32_t id)
{
    uint32_t base = k3_tokenizer_base(o->t), above = id - base;
    size_t len_bytes = 0;
    const char *bytes = k3_tokenizer_bytes(o->t, id, &len_bytes);
    int rc = 0;

    if (!bytes)
        return -EINVAL;
    if (o->state == K3_OUT_END)
        return 0;
    if (id < base && !o->marker) {
        o->first = false;
        return put(o, bytes, len_bytes);
    }
    if (id < base) {
        if (k3_buf_append(&o->tag, bytes, len_bytes) < 0)
            return -ENOMEM;
        return ++o->n_tag_ids > K3_TAG_IDS_MAX ? tag_is_text(o) : 0;
    }
    if (above == K3_SP_SEP && o->marker) {
        rc = tag_done(o, o->first);
        o->first = false;
        return rc;
    }
    if (above == K3_SP_OPEN || above == K3_SP_CLOSE) {
        rc = o->marker ? tag_is_text(o) : 0;
        o->marker = above;
        o->n_tag_ids = 0;
        return rc;
    }
    if (above == K3_SP_END_OF_MSG || above == K3_SP_EOS) {
        rc = o->marker ? tag_is_text(o) : 0;
        return rc < 0 ? rc : move(o, K3_OUT_END);
    }
    o->n_dropped++;
    return 0;
}

int k3_out_finish(struct k3_out *o)
{
    int rc = 0;

    if (o->state == K3_OUT_END)
        return 0;
    /* Cut off inside a tag: nearly always the closing one, at the token limit.  Its name is no text. */
    o->marker = 0;
    o->tag.len_bytes = 0;
    rc = move(o, K3_OUT_END);
    return rc;
}
