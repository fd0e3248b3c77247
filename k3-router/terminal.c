/* At a terminal: a conversation with line editing and history.
 *
 * Ctrl-C while an answer comes cancels that answer; at a line with text it drops the line; at an empty one it leaves at the
 * second time in a row.  Ctrl-D at an empty line leaves. */
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

#define HISTORY_LINES 1000

struct turn { struct k3_buf user, answer, thinking; };

struct terminal {
    struct k3_router *r;
    EditLine *el;
    History *history;
    char history_path[1100];
    bool interrupted; /* the line being read ended with Ctrl-C */
    struct k3_buf system;
    struct turn *turn;
    size_t n_turns, cap_turns;
};

/* libedit restarts its read after a signal, so that an interrupt would go unseen: the characters come from here instead. */
static int get_wide(EditLine *el, wchar_t *out)
{
    struct terminal *t = NULL;
    struct k3_utf8_stream s = { { 0 }, 0, 0, 0, 0 };
    struct k3_buf b = { 0 };

    el_get(el, EL_CLIENTDATA, &t);
    while (b.len_bytes == 0) {
        char c;
        ssize_t n;
        if (k3_router_interrupts) {
            t->interrupted = true;
            k3_buf_free(&b);
            return 0;
        }
        n = read(STDIN_FILENO, &c, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0 || k3_utf8_feed(&s, &c, 1, &b) < 0) {
            k3_buf_free(&b);
            return 0;
        }
    }
    *out = (wchar_t)k3_utf8_at((const uint8_t *)b.bytes);
    k3_buf_free(&b);
    return 1;
}

static char *prompt(EditLine *el)
{
    static char text[] = "> ";

    (void)el;
    return text;
}

static int open_editor(struct terminal *t, struct k3_err *err)
{
    HistEvent ev;

    /* libedit keeps wide characters; text is UTF-8 here whatever the environment's locale says. */
    if (!setlocale(LC_CTYPE, "C.UTF-8"))
        setlocale(LC_CTYPE, "");
    t->el = el_init("k3-router", stdin, stdout, stderr);
    t->history = history_init();
    if (!t->el || !t->history)
        return k3_fail(err, -ENOMEM, "line editor: no memory");
    history(t->history, &ev, H_SETSIZE, HISTORY_LINES);
    history(t->history, &ev, H_SETUNIQUE, 1);
    snprintf(t->history_path, sizeof(t->history_path), "%s/history", t->r->state_dir);
    close(open(t->history_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)); /* H_SAVE would make it for all to read */
    history(t->history, &ev, H_LOAD, t->history_path);
    el_set(t->el, EL_CLIENTDATA, t);
    el_set(t->el, EL_PROMPT, prompt);
    el_set(t->el, EL_EDITOR, "emacs");
    el_set(t->el, EL_HIST, history, t->history);
    el_wset(t->el, EL_GETCFN, get_wide);
    return 0;
}

static void drop_turns(struct terminal *t)
{
    for (size_t i = 0; i < t->n_turns; i++) {
        k3_buf_free(&t->turn[i].user);
        k3_buf_free(&t->turn[i].answer);
        k3_buf_free(&t->turn[i].thinking);
    }
    t->n_turns = 0;
}

static void say(const char *text)
{
    k3_router_write(text, strlen(text));
}

static void help(void)
{
    say("/system TEXT    a system message for this conversation (without TEXT: none); begins anew\n"
        "/reset          forget the conversation\n"
        "/think on|off   thinking before the answer\n"
        "/quit           leave (so do Ctrl-D and Ctrl-C twice)\n"
        "Ctrl-C stops the answer that is coming.  A line that begins with // is sent with one slash.\n");
}

/* True when the line was a command.  *quit: leave. */
static bool command(struct terminal *t, const char *line, bool *quit)
{
    const char *arg;

    if (line[0] != '/' || line[1] == '/')
        return false;
    arg = line + strcspn(line, " ");
    arg += strspn(arg, " ");
    if (strcmp(line, "/quit") == 0) {
        *quit = true;
    } else if (strcmp(line, "/help") == 0) {
        help();
    } else if (strcmp(line, "/reset") == 0) {
        drop_turns(t);
        say("(a new conversation)\n");
    } else if (strncmp(line, "/system", 7) == 0 && (line[7] == ' ' || !line[7])) {
        t->system.len_bytes = 0;
        k3_buf_puts(&t->system, arg);
        drop_turns(t);
        say(*arg ? "(a new conversation with this system message)\n" : "(a new conversation without a system message)\n");
    } else if (strcmp(line, "/think on") == 0 || strcmp(line, "/think off") == 0) {
        t->r->thinking = strcmp(arg, "on") == 0;
        say(t->r->thinking ? "(thinking is on)\n" : "(thinking is off)\n");
    } else if (strcmp(line, "/think") == 0 || strncmp(line, "/think ", 7) == 0) {
        say("/think on or /think off\n");
    } else {
        say("There is no such command; /help lists them.\n");
    }
    return true;
}

static struct k3_text text_of(const struct k3_buf *b)
{
    return (struct k3_text){ b->bytes, b->len_bytes };
}

/* The whole conversation with the new message as prompt ids. */
static int render(struct terminal *t, const char *line, size_t len_bytes, struct k3_ids *out, struct k3_err *err)
{
    struct k3_text last = { line, len_bytes }, system = text_of(&t->system);
    struct k3_chat_opts o = { .thinking = t->r->thinking, .effort = t->r->gen.effort };
    struct k3_chat_message *m = calloc(2 * t->n_turns + 2, sizeof(*m));
    struct k3_text *parts = calloc(2 * t->n_turns + 1, sizeof(*parts));
    size_t n = 0;
    int rc = m && parts ? 0 : k3_fail(err, -ENOMEM, "conversation: no memory");

    if (t->r->mode == K3_ANSWER_RAW) {
        rc = k3_tokenizer_encode(t->r->t, line, len_bytes, out, err);
    } else if (rc == 0) {
        if (system.len_bytes)
            m[n++] = (struct k3_chat_message){ .role = K3_CHAT_SYSTEM, .parts = &system, .n_parts = 1 };
        for (size_t i = 0; i < t->n_turns; i++) {
            parts[2 * i] = text_of(&t->turn[i].user);
            parts[2 * i + 1] = text_of(&t->turn[i].answer);
            m[n++] = (struct k3_chat_message){ .role = K3_CHAT_USER, .parts = &parts[2 * i], .n_parts = 1 };
            m[n++] = (struct k3_chat_message){ .role = K3_CHAT_ASSISTANT, .parts = &parts[2 * i + 1], .n_parts = 1,
                                               .reasoning = text_of(&t->turn[i].thinking) };
        }
        m[n++] = (struct k3_chat_message){ .role = K3_CHAT_USER, .parts = &last, .n_parts = 1 };
        rc = k3_chat_render(t->r->chat, m, n, &o, out, err);
    }
    free(parts);
    free(m);
    return rc;
}

/* Keeps what was said, also when the answer was cut short: the person has seen it.  The buffers of x move here. */
static int remember(struct terminal *t, const char *line, size_t len_bytes, struct k3_exchange *x)
{
    struct turn *p;

    if (t->r->mode == K3_ANSWER_RAW)
        return 0;
    if (t->n_turns == t->cap_turns) {
        p = realloc(t->turn, (t->cap_turns + 16) * sizeof(*p));
        if (!p)
            return -ENOMEM;
        t->turn = p;
        t->cap_turns += 16;
    }
    p = &t->turn[t->n_turns];
    *p = (struct turn){ .answer = x->answer.text, .thinking = x->answer.thinking };
    x->answer.text = x->answer.thinking = (struct k3_buf){ 0 };
    if (k3_buf_append(&p->user, line, len_bytes) < 0)
        return -ENOMEM;
    t->n_turns++;
    return 0;
}

/* One message and its answer.  Failures are said and the conversation goes on, but for those of our own terminal. */
static int converse(struct terminal *t, const char *line, size_t len_bytes, struct k3_err *err)
{
    struct k3_exchange x = { .r = t->r, .ask = K3_ASK_INIT };
    struct k3_err failed = K3_ERR_INIT;
    struct k3_ids prompt_ids = { 0 };
    int rc = render(t, line, len_bytes, &prompt_ids, &failed), out = 0;

    k3_router_interrupts = 0;
    if (rc == 0)
        rc = k3_exchange_new(&x, t->r, &prompt_ids, &failed);
    if (rc == 0) {
        x.live = x.thinking_live = x.stops_at_interrupt = true;
        x.progress = k3_progress_open(300);
        rc = k3_exchange_run(&x, &failed);
        k3_progress_close(x.progress);
        if (x.any_text)
            out = k3_router_write("\n", 1);
        if (rc == 0 && x.ask.end == K3_ASK_CANCELLED)
            say("(stopped)\n");
        if (rc == 0 && x.ask.end == K3_ASK_LENGTH)
            say("(cut off at the token limit)\n");
        if (out == 0 && rc == 0)
            out = remember(t, line, len_bytes, &x);
    }
    if (rc < 0)
        fprintf(stderr, "k3-router: %s\n", failed.text);
    k3_router_interrupts = 0;
    k3_ids_free(&prompt_ids);
    k3_exchange_close(&x);
    return out < 0 ? k3_fail(err, out, "terminal: %s", strerror(-out)) : 0;
}

/* The next line without its end, or NULL to leave. */
static const char *next_line(struct terminal *t, size_t *len_bytes)
{
    bool warned = false;

    for (;;) {
        int n = 0;
        const char *line;
        const LineInfo *info;

        t->interrupted = false;
        k3_router_interrupts = 0;
        line = el_gets(t->el, &n);
        if (line && n > 0 && !t->interrupted) {
            *len_bytes = k3_router_chomp(line, (size_t)n);
            return line;
        }
        if (!t->interrupted)
            return NULL; /* Ctrl-D, or the terminal is gone */
        info = el_line(t->el);
        if (info->lastchar > info->buffer) {
            warned = false;
            say("^C\n");
        } else if (warned) {
            return NULL;
        } else {
            warned = true;
            say("^C (again, or Ctrl-D, to leave)\n");
        }
        el_reset(t->el);
    }
}

int k3_router_terminal(struct k3_router *r, struct k3_err *err)
{
    struct terminal t = { .r = r };
    struct k3_err bad = K3_ERR_INIT;
    const char *line;
    size_t len_bytes;
    bool quit = false;
    HistEvent ev;
    int rc = open_editor(&t, err);

    if (rc == 0 && r->opt.system)
        rc = k3_buf_puts(&t.system, r->opt.system);
    if (rc == 0)
        k3_router_catch_interrupts();
    while (rc == 0 && !quit && (line = next_line(&t, &len_bytes))) {
        char *copy = strndup(line, len_bytes);
        if (!copy) {
            rc = k3_fail(err, -ENOMEM, "terminal: no memory");
            break;
        }
        if (len_bytes && strspn(copy, " \t") < len_bytes) {
            history(t.history, &ev, H_ENTER, copy);
            history(t.history, &ev, H_SAVE, t.history_path);
            if (k3_router_check_prompt(copy, len_bytes, 0, "line", &bad) < 0)
                fprintf(stderr, "k3-router: %s\n", bad.text);
            else if (!command(&t, copy, &quit))
                rc = converse(&t, copy[0] == '/' ? copy + 1 : copy, copy[0] == '/' ? len_bytes - 1 : len_bytes, err);
        }
        free(copy);
    }
    if (rc == 0 && !quit)
        say("\n");
    drop_turns(&t);
    free(t.turn);
    k3_buf_free(&t.system);
    if (t.el)
        el_end(t.el);
    if (t.history)
        history_end(t.history);
    return rc;
}
