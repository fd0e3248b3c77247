/* k3-router/router.h: private to the program.  options.c the command line, setup.c what is the same for all its requests,
 * exchange.c one prompt and its answer, oneshot.c and lines.c not at a terminal, terminal.c at one, progress.c the line that
 * says how far a pass is, shape.c the object of --json. */
#ifndef K3_ROUTER_ROUTER_H
#define K3_ROUTER_ROUTER_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/daemon.h"
#include "ipc/err.h"
#include "ipc/parse.h"
#include "k3-router/answer.h"
#include "k3-router/chat.h"
#include "k3-router/request.h"

#define K3_PROMPT_BYTES_MAX (64u << 20)

struct k3_router_opts {
    const char *instance, *model, *ids, *system, *think, *effort, *logits, *resume, *state_dir, *out;
    bool chat, raw, lines, json_lines, json;
    double temperature, top_p, min_p; /* negative = not given */
    uint64_t max_tokens;              /* 0 = the rest of the context */
    const char *seed;                 /* NULL = a random one */
    uint32_t top_k, parallel, wait_s; /* parallel 0 = not given */
    struct k3_str_list stop;
    /* --http */
    const char *http, *api_key_file, *served_name;
    struct k3_str_list cors, allow_host;
    uint32_t queue, connections, http_mb, ping_s, client_timeout_s;
    struct k3_daemon_opts daemon;
};

/* Defaults that come with a model: generation_config.json. */
struct k3_generation {
    double temperature, top_p, min_p;
    uint32_t top_k;
    bool thinking;
    const char *effort; /* NULL = no effort message */
    struct k3_ids eos;
};

struct k3_router {
    struct k3_router_opts opt;
    char instance[64];
    char rundir[512], model_dir[1024], state_dir[1000];
    char model_digest[65];         /* of the model that k3-computed named; "" = --model or a journal did */
    uint64_t ctx;                  /* of k3-computed; 0 = it does not say */
    uint32_t sequences;            /* the same */
    struct k3_tokenizer *t;        /* NULL: none needed and none there */
    struct k3_chat *chat;
    struct k3_generation gen;
    enum k3_answer_mode mode;
    bool thinking;
};

/* Set by SIGINT, cleared by whoever acts on it. */
extern volatile sig_atomic_t k3_router_interrupts;

/* options.c: true when the program should end with *status. */
bool k3_router_options(struct k3_router_opts *o, int argc, char **argv, int *status);

/* setup.c */
int k3_router_open(struct k3_router *r, struct k3_err *err);
/* The tokenizer and the defaults from model_dir.  k3_router_open() does it, but for --resume, where the journal names the
 * model. */
/* Sets instance and rundir.  absent_ok: it need not have been started. */
int k3_router_find(struct k3_router *r, const char *instance, bool absent_ok, struct k3_err *err);
int k3_router_open_model(struct k3_router *r, struct k3_err *err);
void k3_router_close(struct k3_router *r);
/* From here on SIGINT is counted and no longer ends the program. */
void k3_router_catch_interrupts(void);
/* The same of another signal. */
void k3_router_catch(int sig);
/* text, len: one prompt without its line end.  Refused: empty, not UTF-8 (the offset counts from base_bytes). */
int k3_router_check_prompt(const char *text, size_t len_bytes, size_t base_bytes, const char *what, struct k3_err *err);
/* Length without one trailing line end. */
size_t k3_router_chomp(const char *text, size_t len_bytes);
int k3_generation_parse(struct k3_generation *g, const char *json, size_t len_bytes, const char *name,
                        struct k3_err *err);

/* ---- exchange.c: one request and its answer ---- */

/* What is asked, and how. */
struct k3_prompt {
    struct k3_ids ids;
    bool thinking;                    /* the ids leave the think channel open */
    uint32_t max_calls;               /* of tools; 0: none is wanted */
    const char *const *stop;          /* borrowed, must outlive the exchange */
    size_t n_stop;
    uint64_t max_tokens;              /* 0 = the rest of the context */
    double temperature, top_p, min_p; /* negative (top_p: 0) = as the model says */
    uint32_t top_k;                   /* UINT32_MAX = as the model says */
    bool seeded;                      /* else a random seed */
    uint64_t seed;
    const char *id; /* NULL: of a new request.  Else: goes on with the journal of this id, or begins it */
};
/* All but the ids, as the options say.  To be freed with k3_ids_free(&p->ids). */
void k3_prompt_init(struct k3_prompt *p, const struct k3_router *r);

/* Told from the thread that runs the exchange. */
struct k3_exchange_watch {
    void *arg;
    void (*progress)(void *arg, const struct k3_ask_progress *what);
    void (*notice)(void *arg, const char *line);
    void (*token)(void *arg);
    bool (*leave)(void *arg); /* true: give up for now, the journal keeps what there is */
};

struct k3_exchange {
    struct k3_router *r;
    struct k3_ask ask;
    struct k3_answer answer;
    struct k3_progress_line *progress; /* NULL: none */
    const struct k3_exchange_watch *watch; /* NULL: none */
    bool live;                         /* text goes to stdout as it comes */
    bool thinking_live;                /* thinking too, dimmed where the terminal has colours */
    bool stdout_tty, any_text;
    bool line_open;                    /* the text on stdout is in the middle of a line */
    bool stops_at_interrupt;
    bool expects_peer;                 /* k3-computed has been there: it is waited for */
    enum k3_channel shown;             /* channel of the last live text */
    bool any_shown;
};
/* p->ids are taken over.  After a failure, too, k3_exchange_close() is due. */
int k3_exchange_new(struct k3_exchange *x, struct k3_router *r, struct k3_prompt *p, struct k3_err *err);
int k3_exchange_resume(struct k3_exchange *x, struct k3_router *r, const char *id, struct k3_err *err);
/* Runs to the end.  0 also when it was cancelled: look at ask.end. */
int k3_exchange_run(struct k3_exchange *x, struct k3_err *err);
void k3_exchange_close(struct k3_exchange *x);
/* Prompt ids of one user message with what the options say (chat), or of plain text (raw). */
int k3_exchange_prompt(const struct k3_router *r, const char *text, size_t len_bytes, struct k3_ids *out,
                       struct k3_err *err);

/* shape.c: the object of --json (docs/user/terminal.md lists its keys), without a line end.  err with a code: the request
 * failed, and the object says so.  tag: of a line of --lines, or NULL. */
struct k3_line_tag {
    uint64_t index;     /* from 0 */
    uint32_t crc;       /* CRC32C of the line, without its end */
    const char *id;     /* JSON of the id that the line gives itself; NULL: none */
};
int k3_exchange_json(const struct k3_exchange *x, const struct k3_line_tag *tag, const struct k3_err *err,
                     struct k3_buf *out);
/* Tokens a second from the first token on.  0: one token or none, or resumed, where tokens come as fast as they are read. */
double k3_ask_rate(const struct k3_ask *a);

/* The ids that end an answer: those of generation_config.json and, with a tokenizer, [EOS] and <|end_of_msg|>. */
int k3_router_stop_ids(const struct k3_router *r, struct k3_ids *out, struct k3_err *err);

/* The ways to run that are not --http. */
int k3_router_oneshot(struct k3_router *r, struct k3_err *err);
int k3_router_lines(struct k3_router *r, struct k3_err *err);
int k3_router_terminal(struct k3_router *r, struct k3_err *err);

/* Writes all of it to stdout. */
int k3_router_write(const char *bytes, size_t len_bytes);

/* True when fd is a terminal that may get colours: not with NO_COLOR, nor TERM=dumb (or none). */
bool k3_router_colours(int fd);

/* progress.c: one line on stderr, rewritten in place and erased before other output.  Shown after delay_ms.  below: the
 * terminal's cursor stands in unfinished text; the line goes under it. */
struct k3_progress_line;
struct k3_progress_line *k3_progress_open(unsigned delay_ms); /* NULL when stderr is no terminal, or a dumb one */
void k3_progress_text(struct k3_progress_line *p, const char *line, bool below);
void k3_progress_show(struct k3_progress_line *p, const struct k3_ask_progress *what, size_t n_tokens,
                      bool below);
void k3_progress_erase(struct k3_progress_line *p);
void k3_progress_close(struct k3_progress_line *p);

#endif
