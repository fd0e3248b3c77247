#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "text/file.h"
#include "k3-router/terminal.h"

struct command {
    const char *name, *arguments, *help;
    int (*run)(struct k3_terminal *t, const char *arg, struct k3_err *err); /* negative: the terminal is gone */
    bool chat;                                                             /* of a conversation only, so not with --raw */
};

static void say(const char *text)
{
    k3_router_write(text, strlen(text));
}

static void complain(const char *text)
{
    fprintf(stderr, "k3-router: %s\n", text);
}

static int reset(struct k3_terminal *t, const char *said, struct k3_err *err)
{
    if (k3_talk_reset(&t->talk, (struct k3_text){ t->system.bytes, t->system.len_bytes }) < 0)
        return k3_fail(err, -ENOMEM, "terminal: no memory");
    say(said);
    return 0;
}

static int run_reset(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    (void)arg;
    return reset(t, "(a new conversation)\n", err);
}

static int run_system(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    t->system.len_bytes = 0;
    if (k3_buf_puts(&t->system, arg) < 0)
        return k3_fail(err, -ENOMEM, "terminal: no memory");
    return reset(t, *arg ? "(a new conversation with this system message)\n" : "(a new conversation without a system message)\n",
                 err);
}

static int run_think(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    (void)err;
    if (strcmp(arg, "on") == 0 || strcmp(arg, "off") == 0)
        t->r->thinking = strcmp(arg, "on") == 0;
    else if (*arg)
        say("/think on or /think off\n");
    say(t->r->thinking ? "(thinking is on)\n" : "(thinking is off)\n");
    return 0;
}

static int run_effort(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    static const char *const level[] = { "low", "high", "max" };
    char text[80];

    (void)err;
    if (strcmp(arg, "none") == 0)
        t->r->gen.effort = NULL;
    else if (*arg && strcmp(arg, level[0]) != 0 && strcmp(arg, level[1]) != 0 && strcmp(arg, level[2]) != 0)
        say("/effort low, high, max or none\n");
    for (size_t i = 0; i < 3; i++)
        if (strcmp(arg, level[i]) == 0)
            t->r->gen.effort = level[i];
    snprintf(text, sizeof(text), "(thinking effort: %s)\n", t->r->gen.effort ? t->r->gen.effort : "none is named");
    say(text);
    return 0;
}

static int run_stats(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    size_t used = t->n_prompt + t->n_generated;
    int rc = 0;

    (void)arg;
    if (t->n_answers)
        rc |= k3_buf_printf(&b, "prompt        %zu tokens, the first of the answer after %.2f s\n"
                            "answer        %zu tokens, %.2f tokens/s, seed %llu\n"
                            "all answers   %u with %zu tokens\n",
                            t->n_prompt, t->first_token_s, t->n_generated, t->rate, (unsigned long long)t->seed, t->n_answers,
                            t->n_all);
    rc |= k3_buf_printf(&b, "conversation  %zu messages", t->talk.n);
    if (t->r->ctx)
        rc |= k3_buf_printf(&b, ", %zu of %llu positions at the last answer", used, (unsigned long long)t->r->ctx);
    rc |= k3_buf_printf(&b, "\nmodel         %s\nthe family    k3ctl --instance %s stats --watch\n", t->r->model_dir, t->r->instance);
    if (rc == 0)
        k3_router_write(b.bytes, b.len_bytes);
    k3_buf_free(&b);
    return rc ? k3_fail(err, -ENOMEM, "terminal: no memory") : 0;
}

/* "~/" is the person's home, as a shell would have it.  The caller's; NULL: no memory. */
static char *path_of(const char *arg)
{
    const char *home = getenv("HOME");
    char *out = NULL;

    if (strncmp(arg, "~/", 2) != 0 || !home)
        return strdup(arg);
    return asprintf(&out, "%s%s", home, arg + 1) < 0 ? NULL : out;
}

static int run_save(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    bool replace = strncmp(arg, "-f ", 3) == 0;
    struct k3_err why = K3_ERR_INIT;
    char *path;
    int rc;

    arg += replace ? 3 + strspn(arg + 3, " ") : 0;
    if (!*arg || strcmp(arg, "-f") == 0) {
        say("/save FILE (-f FILE: also where there is one)\n");
        return 0;
    }
    path = path_of(arg);
    if (!path)
        return k3_fail(err, -ENOMEM, "terminal: no memory");
    rc = k3_talk_save(&t->talk, path, replace, &why);
    if (rc == -EEXIST)
        fprintf(stderr, "k3-router: %s; /save -f %s replaces it\n", why.text, arg);
    else if (rc < 0)
        complain(why.text);
    else
        printf("(%zu messages are in %s)\n", t->talk.n, path);
    fflush(stdout);
    free(path);
    return 0;
}

static int run_load(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    struct k3_err why = K3_ERR_INIT;
    char *path;

    if (!*arg) {
        say("/load FILE\n");
        return 0;
    }
    path = path_of(arg);
    if (!path)
        return k3_fail(err, -ENOMEM, "terminal: no memory");
    if (k3_talk_load(&t->talk, t->r->chat, path, &why) < 0)
        complain(why.text);
    else
        printf("(a conversation of %zu messages)\n", t->talk.n);
    fflush(stdout);
    free(path);
    return 0;
}

/* ---- /edit ---- */

static int run_editor(const char *path)
{
    pid_t pid = fork();
    int status = 0;

    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", "exec ${VISUAL:-${EDITOR:-vi}} \"$1\"", "sh", path, (char *)NULL);
        _exit(127);
    }
    while (pid > 0 && waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -errno;
    return pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -ECHILD;
}

/* The text of the file without blanks and line ends at its end, and a NUL behind it. */
static int take_text(struct k3_buf *b, const char *path, struct k3_err *why)
{
    int rc = k3_file_read(b, path, K3_PROMPT_BYTES_MAX, why);

    while (rc == 0 && b->len_bytes && strchr(" \t\r\n", b->bytes[b->len_bytes - 1]) && b->bytes[b->len_bytes - 1])
        b->len_bytes--;
    if (rc == 0 && b->len_bytes)
        rc = k3_router_check_prompt(b->bytes, b->len_bytes, 0, "the edited message", why);
    return rc;
}

static int run_edit(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    struct k3_err why = K3_ERR_INIT;
    struct k3_buf b = { 0 };
    char path[1100];
    int fd, rc;

    snprintf(path, sizeof(path), "%s/message-XXXXXX", t->r->state_dir);
    fd = mkstemp(path);
    if (fd < 0 || write(fd, arg, strlen(arg)) != (ssize_t)strlen(arg)) {
        fprintf(stderr, "k3-router: %s: %s\n", path, strerror(errno));
        rc = 0;
    } else if (run_editor(path) < 0) {
        complain("the editor ($VISUAL, $EDITOR, else vi) failed; nothing is sent");
        rc = 0;
    } else if (take_text(&b, path, &why) < 0) {
        complain(why.text);
        rc = 0;
    } else if (b.len_bytes == 0) {
        say("(empty; nothing is sent)\n");
        rc = 0;
    } else {
        k3_edit_remember(&t->edit, b.bytes, b.len_bytes);
        k3_router_write(b.bytes, b.len_bytes);
        say("\n");
        rc = k3_terminal_converse(t, b.bytes, b.len_bytes, err);
    }
    if (fd >= 0) {
        close(fd);
        unlink(path);
    }
    k3_buf_free(&b);
    return rc;
}

static int run_quit(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    (void)arg;
    (void)err;
    t->quit = true;
    return 0;
}

static int run_help(struct k3_terminal *t, const char *arg, struct k3_err *err);

static const struct command commands[] = {
    { "/system", "[TEXT]", "begin anew with this system message (without TEXT: none)", run_system, true },
    { "/reset", "", "forget the conversation", run_reset, true },
    { "/think", "on|off", "thinking before the answer", run_think, true },
    { "/effort", "LEVEL", "how much of it: low, high, max or none", run_effort, true },
    { "/edit", "[TEXT]", "write a message with $EDITOR", run_edit, false },
    { "/save", "[-f] FILE", "the conversation as JSON (-f: replace FILE)", run_save, true },
    { "/load", "FILE", "go on with a conversation that was saved", run_load, true },
    { "/stats", "", "tokens, rates and positions", run_stats, false },
    { "/help", "", "this", run_help, false },
    { "/quit", "", "leave (so do Ctrl-D and Ctrl-C twice)", run_quit, false },
};
#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static int run_help(struct k3_terminal *t, const char *arg, struct k3_err *err)
{
    (void)t;
    (void)arg;
    (void)err;
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("%-8s%-11s%s\n", commands[i].name, commands[i].arguments, commands[i].help);
    printf("Ctrl-C stops the answer that is coming.\n"
           "A message that begins with // is sent with one slash.\n"
           "Several lines: paste them, press Alt-Enter, end a line with \\, or put \"\"\"\n"
           "before and behind them.\n");
    fflush(stdout);
    return 0;
}

int k3_terminal_command(struct k3_terminal *t, char *line, struct k3_err *err)
{
    size_t len = strcspn(line, " \t\n");
    const char *arg = line + len;
    char text[120];

    if (line[0] != '/' || line[1] == '/')
        return 0;
    arg += strspn(arg, " \t");
    for (char *end = line + strlen(line); end > arg && (end[-1] == ' ' || end[-1] == '\t'); end--)
        end[-1] = 0;
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const struct command *c = &commands[i];
        int rc;
        if (strlen(c->name) != len || strncmp(line, c->name, len) != 0)
            continue;
        if (*arg && !*c->arguments) {
            snprintf(text, sizeof(text), "%s takes nothing more\n", c->name);
            say(text);
            return 1;
        }
        if (c->chat && t->r->mode == K3_ANSWER_RAW) {
            snprintf(text, sizeof(text), "%s: with --raw there is no conversation\n", c->name);
            say(text);
            return 1;
        }
        rc = c->run(t, arg, err);
        return rc < 0 ? rc : 1;
    }
    snprintf(text, sizeof(text), "%.*s: no such command; /help lists them\n", (int)(len < 64 ? len : 64), line);
    say(text);
    return 1;
}
