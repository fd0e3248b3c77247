#include "k3-router/answer.h"

#include <errno.h>
#include <stdlib.h>

/* New response or raw text that has passed the stop texts. */
static int show(struct k3_answer *a)
{
    int rc = k3_buf_append(&a->text, a->shown.bytes, a->shown.len_bytes);

    if (rc == 0 && a->shown.len_bytes && a->fn)
        rc = a->fn(a->arg, K3_OUT_RESPONSE, a->shown.bytes, a->shown.len_bytes);
    a->shown.len_bytes = 0;
    return rc;
}

static int on_text(void *arg, enum k3_channel channel, const char *text, size_t len_bytes)
{
    struct k3_answer *a = arg;
    int rc;

    if (channel == K3_OUT_THINK) {
        rc = k3_buf_append(&a->thinking, text, len_bytes);
        return rc == 0 && a->fn ? a->fn(a->arg, channel, text, len_bytes) : rc;
    }
    a->fed_bytes += len_bytes;
    for (size_t i = 0; i < len_bytes; i++)
        a->fed_chars += ((unsigned char)text[i] & 0xc0) != 0x80;
    rc = k3_stop_feed(&a->stop, text, len_bytes, &a->shown);
    return rc < 0 ? rc : show(a);
}

static struct k3_answer_call *new_call(struct k3_answer *a)
{
    struct k3_answer_call *more = reallocarray(a->call, a->n_calls + 1, sizeof(*more));

    if (!more)
        return NULL;
    a->call = more;
    more[a->n_calls] = (struct k3_answer_call){ 0 };
    return &more[a->n_calls++];
}

static int on_call(void *arg, enum k3_call_event event, uint32_t index, const char *text, size_t len_bytes)
{
    struct k3_answer *a = arg;
    struct k3_answer_call *c;
    int rc = 0;

    if (a->stop.hit) /* the answer is over */
        return 0;
    if (event == K3_CALL_BEGIN) { /* no stop text reaches over a call: what was held back comes before it */
        rc = k3_stop_flush(&a->stop, &a->shown);
        if (rc == 0)
            rc = show(a);
        c = new_call(a);
        if (rc == 0)
            rc = c ? k3_buf_append(&c->name, text, len_bytes) : -ENOMEM;
    } else {
        c = &a->call[index];
        if (event == K3_CALL_ARGUMENTS)
            rc = k3_buf_append(&c->arguments, text, len_bytes);
        c->complete = event == K3_CALL_END;
        a->n_complete += c->complete;
    }
    return rc == 0 && a->call_fn ? a->call_fn(a->arg, event, index, text, len_bytes) : rc;
}

void k3_answer_calls(struct k3_answer *a, uint32_t max_calls, k3_call_fn *fn)
{
    a->call_fn = fn;
    if (a->mode == K3_ANSWER_CHAT)
        k3_out_calls(&a->out, max_calls, on_call);
}

static int on_id(void *arg, enum k3_channel channel, size_t index)
{
    struct k3_answer *a = arg;
    struct k3_answer_ids *v = &a->ids[channel];

    if (v->n == v->cap) {
        size_t cap = v->cap ? 2 * v->cap : 64;
        struct k3_answer_id *more = reallocarray(v->id, cap, sizeof(*more));

        if (!more)
            return -ENOMEM;
        v->id = more;
        v->cap = cap;
    }
    v->id[v->n++] = channel == K3_OUT_THINK ? (struct k3_answer_id){ index, a->thinking.len_bytes, 0 }
                                            : (struct k3_answer_id){ index, a->fed_bytes, a->fed_chars };
    return 0;
}

void k3_answer_want_ids(struct k3_answer *a)
{
    a->wants_ids = true;
    if (a->mode == K3_ANSWER_CHAT)
        k3_out_ids(&a->out, on_id);
}

const struct k3_answer_id *k3_answer_take_id(struct k3_answer *a, enum k3_channel channel)
{
    size_t shown = channel == K3_OUT_THINK ? a->thinking.len_bytes : a->text.len_bytes;
    struct k3_answer_ids *v = &a->ids[channel];

    return v->n_taken < v->n && v->id[v->n_taken].at_bytes < shown ? &v->id[v->n_taken++] : NULL;
}

void k3_answer_open(struct k3_answer *a, const struct k3_tokenizer *t, enum k3_answer_mode mode, bool thinking,
                    const char *const *stop, size_t n_stop, k3_out_fn *fn, void *arg)
{
    *a = (struct k3_answer){ .t = t, .mode = mode, .stop = { .text = stop, .n = n_stop }, .fn = fn, .arg = arg };
    if (mode == K3_ANSWER_CHAT)
        k3_out_open(&a->out, t, thinking, on_text, a);
}

int k3_answer_feed(struct k3_answer *a, uint32_t id)
{
    size_t len_bytes = 0, n;
    const char *bytes;
    int rc = 0;

    a->n_fed++;
    if (a->mode == K3_ANSWER_CHAT) {
        rc = k3_out_feed(&a->out, id);
    } else if (a->t) {
        bytes = k3_tokenizer_bytes(a->t, id, &len_bytes);
        if (!bytes)
            return -EINVAL;
        if (id < k3_tokenizer_base(a->t) && a->wants_ids)
            rc = on_id(a, K3_OUT_RESPONSE, a->n_fed - 1);
        if (rc == 0 && id < k3_tokenizer_base(a->t)) /* special ids have no text */
            rc = k3_utf8_feed(&a->utf8, bytes, len_bytes, &a->scratch);
        n = a->scratch.len_bytes;
        a->scratch.len_bytes = 0;
        if (rc == 0 && n)
            rc = on_text(a, K3_OUT_RESPONSE, a->scratch.bytes, n);
    }
    return rc < 0 ? rc : a->stop.hit;
}

int k3_answer_finish(struct k3_answer *a)
{
    int rc = 0;
    size_t n;

    if (a->mode == K3_ANSWER_CHAT) {
        rc = k3_out_finish(&a->out);
    } else {
        rc = k3_utf8_flush(&a->utf8, &a->scratch);
        n = a->scratch.len_bytes;
        a->scratch.len_bytes = 0;
        if (rc == 0 && n)
            rc = on_text(a, K3_OUT_RESPONSE, a->scratch.bytes, n);
    }
    if (rc == 0)
        rc = k3_stop_flush(&a->stop, &a->shown);
    return rc < 0 ? rc : show(a);
}

void k3_answer_close(struct k3_answer *a)
{
    if (a->mode == K3_ANSWER_CHAT)
        k3_out_close(&a->out);
    for (size_t i = 0; i < a->n_calls; i++) {
        k3_buf_free(&a->call[i].name);
        k3_buf_free(&a->call[i].arguments);
    }
    free(a->call);
    free(a->ids[0].id);
    free(a->ids[1].id);
    k3_stop_free(&a->stop);
    k3_buf_free(&a->text);
    k3_buf_free(&a->thinking);
    k3_buf_free(&a->scratch);
    k3_buf_free(&a->shown);
}
