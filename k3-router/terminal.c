/* At a terminal: a conversation with line editing and history.
 *
 * Ctrl-C while an answer comes stops that answer, and what was said of it stays in the conversation; at a line with text it drops
 * the line; at an empty one it leaves at the second time in a row.  Ctrl-D at an empty line leaves. */
#include "k3-router/terminal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_DELAY_MS 300

static void say(const char *text)
{
    k3_router_write(text, strlen(text));
}

static struct k3_text text_of(const struct k3_buf *b)
{
    return (struct k3_text){ b->bytes, b->len_bytes };
}

/* The whole conversation with the new message. */
static int render(struct k3_terminal *t, struct k3_text user, struct k3_prompt *p, struct k3_err *err)
{
    const struct k3_router *r = t->r;

    if (r->mode == K3_ANSWER_RAW)
        return k3_tokenizer_encode(r->t, user.bytes, user.len_bytes, &p->ids, err);
    return k3_talk_render(&t->talk, r->chat, user, r->gen.effort, &p->thinking, &p->ids, err);
}

/* Keeps what was said, also when the answer was cut short: the person has seen it. */
static int remember(struct k3_terminal *t, struct k3_text user, const struct k3_exchange *x)
{
    const struct k3_ask *a = &x->ask;

    t->n_prompt = a->prompt.n;
    t->n_generated = a->generated.n;
    t->n_all += a->generated.n;
    t->n_answers++;
    t->first_token_s = a->first_ns ? (double)(a->first_ns - a->start_ns) / 1e9 : 0;
    t->rate = a->generated.n ? k3_ask_rate(a) : 0;
    t->seed = a->params.seed;
    if (t->r->mode == K3_ANSWER_RAW)
        return 0;
    if (k3_talk_add(&t->talk, "user", user, (struct k3_text){ 0 }) < 0)
        return -ENOMEM;
    return k3_talk_add(&t->talk, "assistant", text_of(&x->answer.text), text_of(&x->answer.thinking));
}

int k3_terminal_converse(struct k3_terminal *t, const char *text, size_t len_bytes, struct k3_err *err)
{
    /* A terminal that is lost is no wish to stop: the journal stays as one that --resume goes on with. */
    static const struct k3_exchange_watch watch = { .leave = k3_edit_leaves };
    struct k3_exchange x = { .r = t->r, .ask = K3_ASK_INIT };
    struct k3_err failed = K3_ERR_INIT;
    struct k3_text user = { text, len_bytes };
    struct k3_prompt p;
    int rc, out = 0;

    k3_prompt_init(&p, t->r);
    rc = render(t, user, &p, &failed);
    k3_router_interrupts = 0;
    if (rc == 0)
        rc = k3_exchange_new(&x, t->r, &p, &failed);
    if (rc == 0) {
        x.live = x.thinking_live = x.stops_at_interrupt = true;
        x.watch = &watch;
        x.progress = k3_progress_open(PROGRESS_DELAY_MS);
        rc = k3_exchange_run(&x, &failed);
        k3_progress_close(x.progress);
        if (x.any_text)
            out = k3_router_write("\n", 1);
        if (rc == 0 && x.ask.end == K3_ASK_CANCELLED)
            say("(stopped)\n");
        if (rc == 0 && x.ask.end == K3_ASK_LENGTH)
            say("(cut off at the token limit)\n");
        if (out == 0 && rc == 0)
            out = remember(t, user, &x);
    }
    if (rc < 0)
        fprintf(stderr, "k3-router: %s\n", failed.text);
    k3_router_interrupts = 0;
    k3_ids_free(&p.ids);
    k3_exchange_close(&x);
    return out < 0 ? k3_fail(err, out, "terminal: %s", strerror(-out)) : 0;
}

/* What the person has sent: a command, or a message. */
static int act(struct k3_terminal *t, struct k3_buf *b, struct k3_err *err)
{
    struct k3_err bad = K3_ERR_INIT;
    size_t skip;
    int rc;

    if (strspn(b->bytes, " \t\n") == b->len_bytes)
        return 0;
    k3_edit_remember(&t->edit, b->bytes, b->len_bytes);
    if (k3_router_check_prompt(b->bytes, b->len_bytes, 0, "message", &bad) < 0) {
        fprintf(stderr, "k3-router: %s\n", bad.text);
        return 0;
    }
    rc = k3_terminal_command(t, b->bytes, err);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    skip = b->bytes[0] == '/'; /* of two */
    return k3_terminal_converse(t, b->bytes + skip, b->len_bytes - skip, err);
}

static void greet(const struct k3_router *r)
{
    const char *name = strrchr(r->model_dir, '/');

    printf("%s", name && name[1] ? name + 1 : r->model_dir);
    if (r->ctx)
        printf(", context of %llu tokens", (unsigned long long)r->ctx);
    printf("; /help lists the commands, Ctrl-D leaves\n");
    fflush(stdout);
}

int k3_router_terminal(struct k3_router *r, struct k3_err *err)
{
    struct k3_terminal t = { .r = r };
    struct k3_buf message = { 0 };
    int rc = k3_edit_open(&t.edit, r->state_dir, err);

    if (rc == 0 && r->opt.system && (k3_buf_puts(&t.system, r->opt.system) < 0 || k3_talk_reset(&t.talk, text_of(&t.system)) < 0))
        rc = k3_fail(err, -ENOMEM, "terminal: no memory");
    if (rc == 0) {
        k3_router_catch_interrupts();
        greet(r);
    }
    while (rc == 0 && !t.quit) {
        message.len_bytes = 0;
        rc = k3_edit_read(&t.edit, &message);
        if (rc == 0)
            break;
        if (rc < 0 || k3_buf_append(&message, "", 1) < 0) {
            rc = k3_fail(err, -ENOMEM, "terminal: no memory");
            break;
        }
        message.len_bytes--; /* a NUL stands behind it */
        rc = act(&t, &message, err);
    }
    if (rc == 0 && !t.quit)
        say("\n");
    k3_buf_free(&message);
    k3_buf_free(&t.system);
    k3_talk_free(&t.talk);
    k3_edit_close(&t.edit);
    return rc;
}
