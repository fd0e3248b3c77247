/* Takes generated ids apart into channels and calls (spec/text.md 3.14).  A tag is an OPEN or CLOSE id, the bytes of ordinary
 * ids, a SEP id; the model quoting "<|close|>" in prose makes ordinary ids and is text.
 *
 *   THINK    -> BETWEEN   close(think)
 *   THINK    -> RESPONSE, TOOLS   open(response), open(tools) without a close: real models do this
 *   BETWEEN  -> THINK, RESPONSE, TOOLS   open of that
 *   BETWEEN  -> RESPONSE  text that is not white space
 *   RESPONSE -> BETWEEN   close(response)
 *   RESPONSE -> TOOLS, THINK   open of that
 *   TOOLS    -> BETWEEN   close(tools)
 *   TOOLS, BETWEEN -> CALL   open(call)
 *   CALL     -> VALUE     open(argument), open(json)
 *   VALUE    -> CALL      close(argument), close(json); open of the next one and close(call) do it, too
 *   CALL     -> TOOLS     close(call): the call is complete
 *   CALL, VALUE -> CALL, BETWEEN, THINK, RESPONSE   any other tag that leads there: the call is lost
 *   any      -> END       close(message), <|end_of_msg|>, [EOS]; a call that is open is lost
 * A tag with an unknown name, or one that is not ended within 64 ids, is text of the channel without its markers.  A known
 * tag that has no meaning where it stands, and any other special id, is dropped and counted.  Text in TOOLS and CALL is
 * dropped.
 *
 * The arguments of a call are told as they come: a string piece by piece, any other value when it is whole, because one that
 * is no JSON becomes a string.  A json element is told whole; one that holds no object becomes {"json":"its text"}, so that
 * what a client gets is an object in any case. */
#include "k3-router/chat.h"

#include <errno.h>
#include <string.h>

void k3_out_open(struct k3_out *o, const struct k3_tokenizer *t, bool thinking, k3_out_fn *fn, void *arg)
{
    *o = (struct k3_out){ .t = t, .fn = fn, .arg = arg, .first = true,
                          .state = thinking ? K3_OUT_IN_THINK : K3_OUT_IN_RESPONSE };
}

void k3_out_calls(struct k3_out *o, uint32_t max_calls, k3_call_fn *fn)
{
    o->max_calls = max_calls;
    o->call_fn = fn;
}

void k3_out_ids(struct k3_out *o, k3_out_id_fn *fn)
{
    o->id_fn = fn;
}

void k3_out_close(struct k3_out *o)
{
    k3_ids_free(&o->tag_index);
    k3_buf_free(&o->tag);
    k3_buf_free(&o->text);
    k3_buf_free(&o->value);
    k3_buf_free(&o->json);
}

/* ---- arguments ---- */

static int tell_call(struct k3_out *o, enum k3_call_event event, const char *text, size_t len_bytes)
{
    return o->call_told ? o->call_fn(o->arg, event, o->n_begun - 1, text, len_bytes) : 0;
}

/* What has been put together in o->json. */
static int tell_json(struct k3_out *o)
{
    size_t n = o->json.len_bytes;

    o->json.len_bytes = 0;
    return n ? tell_call(o, K3_CALL_ARGUMENTS, o->json.bytes, n) : 0;
}

static int put_string(struct k3_out *o, const struct k3_buf *text)
{
    int rc = k3_buf_puts(&o->json, "\"");

    if (rc == 0)
        rc = k3_json_escape(&o->json, text->bytes, text->len_bytes);
    return rc ? rc : k3_buf_puts(&o->json, "\"");
}

/* Whole characters of the value. */
static int value_text(struct k3_out *o)
{
    int rc = 0;

    if (o->kind == K3_VALUE_STRING)
        rc = k3_json_escape(&o->json, o->text.bytes, o->text.len_bytes);
    else if (o->kind != K3_VALUE_DROPPED)
        rc = k3_buf_append(&o->value, o->text.bytes, o->text.len_bytes);
    o->text.len_bytes = 0;
    return rc ? rc : tell_json(o);
}

/* 1: the value is JSON, of an object where it must be one; 0: it is not. */
static int value_is_json(const struct k3_out *o, bool object)
{
    struct k3_json_doc d;
    int rc = k3_json_parse(&d, o->value.bytes ? o->value.bytes : "", o->value.len_bytes, NULL);
    bool good = rc == 0 && (!object || d.node->type == K3_JSON_OBJECT);

    k3_json_free(&d);
    return rc == -ENOMEM ? rc : good;
}

static int finish_json(struct k3_out *o)
{
    bool whole = o->kind == K3_VALUE_WHOLE;
    int rc;

    if (whole && k3_text_is_blank((struct k3_text){ o->value.bytes, o->value.len_bytes }))
        return k3_buf_puts(&o->json, "{}");
    rc = value_is_json(o, whole);
    if (rc < 0)
        return rc;
    if (rc > 0)
        return k3_buf_append(&o->json, o->value.bytes, o->value.len_bytes);
    rc = whole ? k3_buf_puts(&o->json, "{\"json\":") : 0;
    if (rc == 0)
        rc = put_string(o, &o->value);
    return rc == 0 && whole ? k3_buf_puts(&o->json, "}") : rc;
}

static int finish_value(struct k3_out *o)
{
    int rc = k3_utf8_flush(&o->utf8, &o->text);

    if (rc == 0)
        rc = value_text(o);
    if (rc == 0 && o->kind == K3_VALUE_STRING)
        rc = k3_buf_puts(&o->json, "\"");
    else if (rc == 0 && o->kind != K3_VALUE_DROPPED)
        rc = finish_json(o);
    o->value.len_bytes = 0;
    o->state = K3_OUT_IN_CALL;
    return rc ? rc : tell_json(o);
}

/* Attribute of the tag in whole characters, appended to out; *found: there is one. */
static int attribute(const struct k3_out *o, const char *name, struct k3_buf *out, bool *found)
{
    const char *p = o->tag.bytes, *end = p + o->tag.len_bytes;
    struct k3_utf8_stream utf8 = { 0 };
    int rc = 0;

    *found = false;
    while (p < end && *p != ' ')
        p++;
    while (!*found && rc == 0) {
        const char *key, *key_end;
        while (p < end && *p == ' ')
            p++;
        for (key = p; p < end && *p != ' ' && *p != '='; p++)
            ;
        key_end = p;
        while (p < end && (*p == ' ' || *p == '='))
            p++;
        if (p >= end || *p++ != '"')
            return 0;
        *found = (size_t)(key_end - key) == strlen(name) && memcmp(key, name, strlen(name)) == 0;
        for (; p < end && *p != '"' && rc == 0; p++) {
            bool quot = end - p >= 6 && memcmp(p, "&quot;", 6) == 0, amp = end - p >= 5 && memcmp(p, "&amp;", 5) == 0;
            if (*found)
                rc = k3_utf8_feed(&utf8, quot ? "\"" : p, 1, out);
            p += quot ? 5 : amp ? 4 : 0;
        }
        p += p < end;
    }
    return rc ? rc : k3_utf8_flush(&utf8, out);
}

/* The tag opens an argument. */
static int begin_argument(struct k3_out *o)
{
    struct k3_buf key = { 0 }, type = { 0 };
    bool has_key, has_type;
    int rc = attribute(o, "key", &key, &has_key);

    if (rc == 0)
        rc = attribute(o, "type", &type, &has_type);
    if (rc == 0 && has_key && !o->call_whole) {
        bool string = k3_text_is((struct k3_text){ type.bytes, type.len_bytes }, "string");
        o->kind = string ? K3_VALUE_STRING : K3_VALUE_JSON;
        rc = k3_buf_puts(&o->json, o->n_arguments++ ? "," : "{");
        if (rc == 0)
            rc = put_string(o, &key);
        if (rc == 0)
            rc = k3_buf_puts(&o->json, string ? ":\"" : ":");
    }
    k3_buf_free(&key);
    k3_buf_free(&type);
    return rc ? rc : tell_json(o);
}

static int begin_value(struct k3_out *o, bool argument)
{
    o->kind = K3_VALUE_DROPPED;
    o->state = K3_OUT_IN_VALUE;
    if (argument)
        return begin_argument(o);
    if (o->n_arguments == 0 && !o->call_whole) {
        o->kind = K3_VALUE_WHOLE;
        o->call_whole = true;
    }
    return 0;
}

/* ---- calls ---- */

static int begin_call(struct k3_out *o)
{
    struct k3_buf name = { 0 };
    bool found;
    int rc = attribute(o, "tool", &name, &found);

    o->state = K3_OUT_IN_CALL;
    o->n_arguments = 0;
    o->call_whole = false;
    o->call_told = rc == 0 && name.len_bytes && o->call_fn && o->n_complete < o->max_calls;
    if (o->call_told) {
        o->n_begun++;
        rc = tell_call(o, K3_CALL_BEGIN, name.bytes, name.len_bytes);
    }
    k3_buf_free(&name);
    return rc;
}

static int end_call(struct k3_out *o)
{
    int rc = o->state == K3_OUT_IN_VALUE ? finish_value(o) : 0;

    if (rc == 0 && !o->call_whole)
        rc = k3_buf_puts(&o->json, o->n_arguments ? "}" : "{}");
    if (rc == 0)
        rc = tell_json(o);
    if (rc == 0)
        rc = tell_call(o, K3_CALL_END, "", 0);
    o->n_complete += o->call_told;
    o->call_told = false;
    o->state = K3_OUT_IN_TOOLS;
    return rc;
}

static int lose_call(struct k3_out *o)
{
    int rc = tell_call(o, K3_CALL_LOST, "", 0);

    o->call_told = false;
    o->value.len_bytes = 0;
    return rc;
}

/* ---- channels ---- */

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

/* index: of the ids that the bytes are of. */
static int put(struct k3_out *o, const char *bytes, size_t len_bytes, const uint32_t *index, size_t n_index)
{
    int rc = 0;

    if (len_bytes == 0)
        return 0;
    if (o->state == K3_OUT_BETWEEN && !is_blank(bytes, len_bytes))
        o->state = K3_OUT_IN_RESPONSE;
    if (o->state != K3_OUT_IN_THINK && o->state != K3_OUT_IN_RESPONSE && o->state != K3_OUT_IN_VALUE)
        return 0;
    for (size_t i = 0; rc == 0 && o->id_fn && o->state != K3_OUT_IN_VALUE && i < n_index; i++)
        rc = o->id_fn(o->arg, o->state == K3_OUT_IN_THINK ? K3_OUT_THINK : K3_OUT_RESPONSE, index[i]);
    if (rc < 0)
        return rc;
    if (k3_utf8_feed(&o->utf8, bytes, len_bytes, &o->text) < 0)
        return -ENOMEM;
    return o->state == K3_OUT_IN_VALUE ? value_text(o) : emit(o);
}

/* Leaves the channel: an unfinished character at its end becomes one U+FFFD of that channel, an unfinished call is lost. */
static int move(struct k3_out *o, enum k3_out_state to)
{
    int rc = k3_utf8_flush(&o->utf8, &o->text);

    if (rc == 0)
        rc = emit(o);
    if (rc == 0 && (o->state == K3_OUT_IN_CALL || o->state == K3_OUT_IN_VALUE))
        rc = lose_call(o);
    o->state = to;
    return rc;
}

/* ---- tags ---- */

/* The tag turned out to be none: its bytes are text. */
static int tag_is_text(struct k3_out *o)
{
    int rc;

    o->marker = 0;
    rc = put(o, o->tag.bytes, o->tag.len_bytes, o->tag_index.id, o->tag_index.n);
    o->tag.len_bytes = 0;
    return rc;
}

static bool tag_is(const struct k3_out *o, const char *name)
{
    size_t n = strlen(name);

    return o->tag.len_bytes >= n && memcmp(o->tag.bytes, name, n) == 0 &&
           (o->tag.len_bytes == n || o->tag.bytes[n] == ' ');
}

static int channel_tag(struct k3_out *o, enum k3_out_state own, bool opens, bool first)
{
    enum k3_out_state s = o->state;
    bool in_call = s == K3_OUT_IN_CALL || s == K3_OUT_IN_VALUE;

    if (opens && s != own && !(own == K3_OUT_IN_TOOLS && in_call))
        return move(o, own);
    if (!opens && (s == own || (own == K3_OUT_IN_TOOLS && in_call)))
        return move(o, K3_OUT_BETWEEN);
    if (!(opens && first)) /* an echo of the channel's opening as the very first ids is usual */
        o->n_dropped++;
    return 0;
}

static int call_tag(struct k3_out *o, bool opens)
{
    enum k3_out_state s = o->state;
    bool in_call = s == K3_OUT_IN_CALL || s == K3_OUT_IN_VALUE;
    int rc;

    if (!opens && in_call)
        return end_call(o);
    if (!opens || !(in_call || s == K3_OUT_IN_TOOLS || s == K3_OUT_BETWEEN)) {
        o->n_dropped++;
        return 0;
    }
    rc = move(o, K3_OUT_IN_TOOLS);
    return rc ? rc : begin_call(o);
}

static int value_tag(struct k3_out *o, bool argument, bool opens)
{
    enum k3_out_state s = o->state;
    int rc = 0;

    if ((!opens && s != K3_OUT_IN_VALUE) || (opens && s != K3_OUT_IN_VALUE && s != K3_OUT_IN_CALL)) {
        o->n_dropped++;
        return 0;
    }
    if (s == K3_OUT_IN_VALUE)
        rc = finish_value(o);
    return rc == 0 && opens ? begin_value(o, argument) : rc;
}

static int tag_done(struct k3_out *o, bool first)
{
    bool opens = o->marker == K3_SP_OPEN;
    int rc = 0;

    if (tag_is(o, "message")) {
        if (!opens)
            rc = move(o, K3_OUT_END);
        else
            o->n_dropped++;
    } else if (tag_is(o, "think")) {
        rc = channel_tag(o, K3_OUT_IN_THINK, opens, first);
    } else if (tag_is(o, "response")) {
        rc = channel_tag(o, K3_OUT_IN_RESPONSE, opens, first);
    } else if (tag_is(o, "tools")) {
        rc = channel_tag(o, K3_OUT_IN_TOOLS, opens, first);
    } else if (tag_is(o, "call")) {
        rc = call_tag(o, opens);
    } else if (tag_is(o, "argument") || tag_is(o, "json")) {
        rc = value_tag(o, tag_is(o, "argument"), opens);
    } else {
        return tag_is_text(o);
    }
    o->marker = 0;
    o->tag.len_bytes = 0;
    return rc;
}

static bool tag_too_long(const struct k3_out *o)
{
    bool names = o->marker == K3_SP_OPEN && (tag_is(o, "call") || tag_is(o, "argument"));

    return o->n_tag_ids > (names ? K3_LONG_TAG_IDS_MAX : K3_TAG_IDS_MAX);
}

int k3_out_feed(struct k3_out *o, uint32_t id)
{
    uint32_t base = k3_tokenizer_base(o->t), above = id - base;
    size_t len_bytes = 0;
    const char *bytes = k3_tokenizer_bytes(o->t, id, &len_bytes);
    uint32_t index = (uint32_t)o->n_fed++;
    int rc = 0;

    if (!bytes)
        return -EINVAL;
    if (o->state == K3_OUT_END)
        return 0;
    if (id < base && !o->marker) {
        o->first = false;
        return put(o, bytes, len_bytes, &index, 1);
    }
    if (id < base) {
        if (k3_buf_append(&o->tag, bytes, len_bytes) < 0 || (o->id_fn && k3_ids_push(&o->tag_index, index) < 0))
            return -ENOMEM;
        o->n_tag_ids++;
        return tag_too_long(o) ? tag_is_text(o) : 0;
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
        o->tag_index.n = 0;
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
