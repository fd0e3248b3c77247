/* k3-router/terminal.h: private to the conversation at a terminal.  terminal.c the conversation, terminal_command.c what begins
 * with a slash, terminal_edit.c lines, several lines, history. */
#ifndef K3_ROUTER_TERMINAL_H
#define K3_ROUTER_TERMINAL_H

#include <histedit.h>

#include "k3-router/router.h"
#include "k3-router/talk.h"

/* ---- terminal_edit.c ---- */

/* Messages from the terminal.  The history file has one JSON text a message, appended before the message is acted on, so that
 * none is lost; a torn line is passed over, and the newest 1,000 are kept. */
struct k3_edit {
    EditLine *el;
    History *history;
    char path[1100];       /* of the history */
    const char *prompt;
    bool interrupted;      /* the line being read ended with Ctrl-C */
    bool pastes;           /* it is no dumb terminal: it is asked to mark what is pasted */
    struct k3_utf8_stream typed; /* a character that is not whole yet */
    wchar_t ahead;         /* what came with the one before it; 0: nothing */
};
int k3_edit_open(struct k3_edit *e, const char *state_dir, struct k3_err *err);
/* Appends the next message to out: a line, or several (a paste, lines that end in a backslash, a block between \"\"\").  1; 0: leave
 * (Ctrl-D, Ctrl-C twice, SIGTERM, SIGHUP); -ENOMEM. */
int k3_edit_read(struct k3_edit *e, struct k3_buf *out);
/* SIGTERM or SIGHUP has come: nobody sees an answer that is coming. */
bool k3_edit_leaves(void *arg);
/* Adds a message to the history. */
void k3_edit_remember(struct k3_edit *e, const char *text, size_t len_bytes);
void k3_edit_close(struct k3_edit *e);
/* Entries of a history file, oldest first, to fn; returns how many. */
size_t k3_history_parse(const char *bytes, size_t len_bytes, void (*fn)(void *arg, struct k3_text entry), void *arg);

/* ---- terminal.c ---- */

struct k3_terminal {
    struct k3_router *r;
    struct k3_edit edit;
    struct k3_talk talk;
    struct k3_buf system; /* of the conversation that /reset begins */
    bool quit;
    /* of the last answer, and of all */
    size_t n_prompt, n_generated, n_all;
    unsigned n_answers;
    double first_token_s, rate;
    uint64_t seed;
};
/* One message and its answer.  Failures are said and the conversation goes on, but for those of our own terminal. */
int k3_terminal_converse(struct k3_terminal *t, const char *text, size_t len_bytes, struct k3_err *err);

/* ---- terminal_command.c ---- */

/* 1: it was a command; 0: it is a message; negative: the terminal is gone. */
int k3_terminal_command(struct k3_terminal *t, char *line, struct k3_err *err);

#endif
