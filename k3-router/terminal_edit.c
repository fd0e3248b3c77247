/* libedit reads single lines; here they become messages. */
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "text/file.h"
#include "k3-router/terminal.h"

#define HISTORY_ENTRIES 1000u
#define HISTORY_BYTES_MAX (64u << 20)
#define PASTE_ON "\033[?2004h"
#define PASTE_OFF "\033[?2004l"
#define BLOCK "\"\"\""

static volatile sig_atomic_t resized, continued, leaves;

static void on_signal(int sig)
{
    if (sig == SIGWINCH) {
        resized = 1;
    } else if (sig == SIGCONT) {
        continued = 1;
    } else { /* SIGTERM, SIGHUP */
        leaves = 1;
    }
}

bool k3_edit_leaves(void *arg)
{
    (void)arg;
    return leaves;
}

/* ---- characters ---- */

/* Lines between the beginning of the prompt and the cursor, in a terminal so wide. */
static unsigned rows_above(const struct k3_edit *e, unsigned width)
{
    const LineInfoW *info = el_wline(e->el);
    unsigned rows = 0, column = (unsigned)strlen(e->prompt);

    for (const wchar_t *p = info->buffer; p < info->cursor; p++) {
        int n = wcwidth(*p);
        if (*p == '\n' || column + (unsigned)(n > 0 ? n : 0) > width) {
            rows++;
            column = 0;
        }
        column += n > 0 ? (unsigned)n : 0;
    }
    return rows;
}

/* Between two characters: what a signal has asked for. */
static void redraw(struct k3_edit *e)
{
    char up[32] = "\r\033[J";
    struct winsize ws;
    unsigned rows;

    if (!continued && !resized)
        return;
    if (continued) /* the shell has set the terminal as it likes it */
        el_set(e->el, EL_PREP_TERM, 1);
    if (resized && ioctl(STDOUT_FILENO, TIOCGWINSZ, &ws) == 0 && ws.ws_col && (rows = rows_above(e, ws.ws_col)) > 0)
        snprintf(up, sizeof(up), "\r\033[%uA\033[J", rows);
    if (e->pastes)
        k3_router_write(up, strlen(up));
    el_resize(e->el);
    el_set(e->el, EL_REFRESH);
    continued = resized = 0;
}

/* libedit restarts its read after a signal, so that an interrupt would go unseen: the characters come from here instead. */
static int get_wide(EditLine *el, wchar_t *out)
{
    struct k3_edit *e = NULL;
    struct k3_buf b = { 0 };
    size_t n_first;

    el_get(el, EL_CLIENTDATA, &e);
    *out = e->ahead;
    e->ahead = 0;
    if (*out)
        return 1;
    while (b.len_bytes == 0) {
        char c;
        ssize_t n;
        redraw(e);
        if (k3_router_interrupts || leaves) {
            e->interrupted = !leaves;
            e->typed = (struct k3_utf8_stream){ .n = 0 };
            k3_buf_free(&b);
            return 0;
        }
        n = read(STDIN_FILENO, &c, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0 || k3_utf8_feed(&e->typed, &c, 1, &b) < 0) {
            k3_buf_free(&b);
            return 0;
        }
    }
    *out = (wchar_t)k3_utf8_at((const uint8_t *)b.bytes);
    n_first = k3_utf8_len((uint8_t)b.bytes[0]);
    if (n_first < b.len_bytes) /* U+FFFD for bytes that are no character, and the one that showed it: an Enter, say */
        e->ahead = (wchar_t)k3_utf8_at((const uint8_t *)b.bytes + n_first);
    k3_buf_free(&b);
    return 1;
}

/* What is pasted goes into the line as it is, line ends and all, and is not sent.  Other control characters are left out. */
static unsigned char paste(EditLine *el, int ch)
{
    static const wchar_t end[] = L"\033[201~";
    wchar_t *text = NULL, c, last = 0;
    size_t n = 0, cap = 0, at = 0;
    unsigned char rc = CC_REFRESH;

    (void)ch;
    while (end[at] && el_wgetc(el, &c) == 1) {
        at = c == end[at] ? at + 1 : c == end[0] ? 1 : 0;
        if (n + 2 > cap) {
            wchar_t *more = reallocarray(text, cap ? 2 * cap : 1024, sizeof(*more));
            if (!more) {
                rc = CC_ERROR;
                break;
            }
            text = more;
            cap = cap ? 2 * cap : 1024;
        }
        if (c == '\r' || (c == '\n' && last != '\r'))
            text[n++] = '\n';
        else if ((c >= ' ' && c != 0x7f) || c == '\t')
            text[n++] = c;
        last = c;
    }
    if (!end[at] && n >= 5)
        n -= 5; /* "[201~": its escape was left out */
    if (rc == CC_REFRESH && n) {
        text[n] = 0;
        if (el_winsertstr(el, text) < 0)
            rc = CC_ERROR;
    }
    free(text);
    return rc;
}

static unsigned char new_line(EditLine *el, int ch)
{
    (void)ch;
    return el_winsertstr(el, L"\n") < 0 ? CC_ERROR : CC_REFRESH;
}

static char *prompt(EditLine *el)
{
    struct k3_edit *e = NULL;

    el_get(el, EL_CLIENTDATA, &e);
    return (char *)e->prompt;
}

/* ---- history ---- */

size_t k3_history_parse(const char *bytes, size_t len_bytes, void (*fn)(void *arg, struct k3_text entry), void *arg)
{
    size_t n = 0;

    for (size_t at = 0; at < len_bytes;) {
        const char *eol = memchr(bytes + at, '\n', len_bytes - at);
        size_t len = eol ? (size_t)(eol - bytes) - at : len_bytes - at;
        struct k3_json_doc d = { 0 };
        if (len && k3_json_parse(&d, bytes + at, len, NULL) == 0) {
            if (d.node->type == K3_JSON_STRING && d.node->text.len_bytes && !memchr(d.node->text.bytes, 0, d.node->text.len_bytes)) {
                fn(arg, d.node->text);
                n++;
            }
            k3_json_free(&d);
        }
        at += len + 1;
    }
    return n;
}

static void enter(void *arg, struct k3_text entry)
{
    HistEvent ev;

    history(arg, &ev, H_ENTER, entry.bytes); /* a NUL stands behind it */
}

static int put_entry(struct k3_buf *b, const char *text, size_t len_bytes)
{
    int rc = k3_buf_json(b, text, len_bytes);

    return rc | k3_buf_puts(b, "\n");
}

/* Opens the file and has it for itself; it is still the one of that name.  -1: it cannot be had. */
static int open_history(const char *path)
{
    struct stat st;

    for (;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd < 0)
            return -1;
        if (flock(fd, LOCK_EX) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0)
            return fd;
        close(fd); /* somebody has put a shorter one in its place */
    }
}

/* Leaves the newest entries: a new file takes the place of the old one. */
static void shorten(struct k3_edit *e)
{
    struct k3_buf b = { 0 };
    HistEvent ev;
    char temp[1200];
    int fd, rc = 0;

    for (int more = history(e->history, &ev, H_LAST); more >= 0 && rc == 0; more = history(e->history, &ev, H_PREV))
        rc = put_entry(&b, ev.str, strlen(ev.str));
    snprintf(temp, sizeof(temp), "%s.new", e->path);
    fd = rc == 0 ? open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    if (fd >= 0 && (write(fd, b.bytes, b.len_bytes) != (ssize_t)b.len_bytes || fsync(fd) < 0 || rename(temp, e->path) < 0))
        unlink(temp);
    if (fd >= 0)
        close(fd);
    k3_buf_free(&b);
}

static void load_history(struct k3_edit *e)
{
    int fd = open_history(e->path);
    struct k3_buf b = { 0 };
    struct stat st = { 0 };
    bool large;

    if (fd < 0)
        return;
    large = fstat(fd, &st) == 0 && st.st_size > HISTORY_BYTES_MAX;
    if (large)
        lseek(fd, -(off_t)HISTORY_BYTES_MAX, SEEK_END);
    if (k3_file_read_fd(&b, fd, e->path, HISTORY_BYTES_MAX, NULL) == 0 &&
        (k3_history_parse(b.bytes, b.len_bytes, enter, e->history) > 2 * HISTORY_ENTRIES || large))
        shorten(e);
    close(fd);
    k3_buf_free(&b);
}

/* A history that cannot be written is no reason not to talk. */
void k3_edit_remember(struct k3_edit *e, const char *text, size_t len_bytes)
{
    struct k3_buf b = { 0 };
    char *copy = strndup(text, len_bytes), last = '\n';
    struct stat st;
    int fd = -1;

    if (copy && strlen(copy) == len_bytes) {
        enter(e->history, (struct k3_text){ copy, len_bytes });
        fd = open_history(e->path);
    }
    if (fd >= 0) {
        if (fstat(fd, &st) < 0 || st.st_size == 0 || pread(fd, &last, 1, st.st_size - 1) != 1)
            last = '\n';
        if ((last == '\n' || k3_buf_puts(&b, "\n") == 0) && put_entry(&b, text, len_bytes) == 0 &&
            write(fd, b.bytes, b.len_bytes) > 0)
            fdatasync(fd);
        close(fd);
    }
    free(copy);
    k3_buf_free(&b);
}

/* ---- messages ---- */

int k3_edit_open(struct k3_edit *e, const char *state_dir, struct k3_err *err)
{
    static const int sig[] = { SIGWINCH, SIGCONT, SIGTERM, SIGHUP };
    struct sigaction sa = { .sa_handler = on_signal };
    const char *term = getenv("TERM");
    HistEvent ev;

    *e = (struct k3_edit){ .prompt = "> ", .pastes = term && *term && strcmp(term, "dumb") != 0 };
    /* libedit keeps wide characters; text is UTF-8 here whatever the environment's locale says. */
    if (!setlocale(LC_CTYPE, "C.UTF-8"))
        setlocale(LC_CTYPE, "");
    e->el = el_init("k3-router", stdin, stdout, stderr);
    e->history = history_init();
    if (!e->el || !e->history)
        return k3_fail(err, -ENOMEM, "line editor: no memory");
    history(e->history, &ev, H_SETSIZE, (int)HISTORY_ENTRIES);
    history(e->history, &ev, H_SETUNIQUE, 1);
    snprintf(e->path, sizeof(e->path), "%s/history", state_dir);
    load_history(e);
    el_set(e->el, EL_CLIENTDATA, e);
    el_set(e->el, EL_PROMPT, prompt);
    el_set(e->el, EL_EDITOR, "emacs");
    el_set(e->el, EL_HIST, history, e->history);
    el_wset(e->el, EL_GETCFN, get_wide);
    el_source(e->el, NULL); /* the person's own ~/.editrc */
    el_set(e->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(e->el, EL_ADDFN, "k3-paste", "insert what is pasted", paste);
    el_set(e->el, EL_ADDFN, "k3-new-line", "a line end within the message", new_line);
    el_set(e->el, EL_BIND, "\033[200~", "k3-paste", NULL);
    el_set(e->el, EL_BIND, "\033\r", "k3-new-line", NULL);
    el_set(e->el, EL_BIND, "\033\n", "k3-new-line", NULL);
    for (size_t i = 0; i < sizeof(sig) / sizeof(sig[0]); i++)
        sigaction(sig[i], &sa, NULL);
    return 0;
}

static void say(const char *text)
{
    k3_router_write(text, strlen(text));
}

/* One line of the editor without its end; NULL: it ended otherwise (e->interrupted, or leave). */
static const char *read_line(struct k3_edit *e, const char *text, size_t *len_bytes)
{
    const char *line;
    int n = 0;

    e->prompt = text;
    e->interrupted = false;
    k3_router_interrupts = 0;
    if (e->pastes)
        say(PASTE_ON);
    line = el_gets(e->el, &n);
    if (e->pastes)
        say(PASTE_OFF);
    if (!line || n <= 0 || e->interrupted)
        return NULL;
    *len_bytes = k3_router_chomp(line, (size_t)n);
    return line;
}

static bool has(const char *text, size_t len_bytes, const char *part, bool at_end)
{
    size_t n = strlen(part);

    return len_bytes >= n && memcmp(text + (at_end ? len_bytes - n : 0), part, n) == 0;
}

/* Does the message want a further line? */
static bool goes_on(const struct k3_buf *b)
{
    if (has(b->bytes, b->len_bytes, BLOCK, false))
        return b->len_bytes < 6 || !has(b->bytes + 3, b->len_bytes - 3, BLOCK, true);
    return has(b->bytes, b->len_bytes, "\\", true);
}

/* The text of a block: without its marks, and without the line ends beside them. */
static void strip(struct k3_buf *b)
{
    size_t from = 3, to = b->len_bytes - 3;

    if (b->len_bytes < 6 || !has(b->bytes, b->len_bytes, BLOCK, false))
        return;
    from += b->bytes[from] == '\n' && from < to;
    to -= to > from && b->bytes[to - 1] == '\n';
    memmove(b->bytes, b->bytes + from, to - from);
    b->len_bytes = to - from;
}

/* Puts together one message.  1, or 0 when the last line ended otherwise; -ENOMEM. */
static int read_message(struct k3_edit *e, struct k3_buf *b)
{
    size_t len;
    const char *line = read_line(e, "> ", &len);
    int rc = line ? k3_buf_append(b, line, len) : 0;

    while (line && rc == 0 && b->len_bytes && goes_on(b)) {
        if (!has(b->bytes, b->len_bytes, BLOCK, false))
            b->len_bytes--; /* the backslash */
        line = read_line(e, ". ", &len);
        if (line)
            rc = k3_buf_puts(b, "\n") | k3_buf_append(b, line, len);
    }
    if (rc)
        return -ENOMEM;
    if (line)
        strip(b);
    return line != NULL;
}

int k3_edit_read(struct k3_edit *e, struct k3_buf *out)
{
    bool warned = false;

    for (;;) {
        const LineInfo *info;
        int rc = read_message(e, out);

        if (rc != 0)
            return rc;
        info = el_line(e->el);
        if (e->interrupted && info->lastchar > info->buffer &&
            k3_buf_append(out, info->buffer, (size_t)(info->lastchar - info->buffer)) < 0)
            return -ENOMEM;
        if (out->len_bytes) /* it is dropped, not lost */
            k3_edit_remember(e, out->bytes, out->len_bytes);
        if (!e->interrupted)
            return 0; /* Ctrl-D, or the terminal is gone */
        if (out->len_bytes) {
            warned = false;
            say("^C\n");
        } else if (warned) {
            return 0;
        } else {
            warned = true;
            say("^C (again, or Ctrl-D, to leave)\n");
        }
        out->len_bytes = 0;
        el_reset(e->el);
    }
}

void k3_edit_close(struct k3_edit *e)
{
    if (e->el)
        el_end(e->el);
    if (e->history)
        history_end(e->history);
    *e = (struct k3_edit){ 0 };
}
