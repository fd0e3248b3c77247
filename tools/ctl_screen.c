/* A full screen by plain ANSI: the alternate screen, no cursor, keys without echo.  SIGINT and its like only set flags and are
 * blocked outside the wait, so that whatever ends the program, the terminal is put back first. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "tools/ctl.h"

#define ENTER "\033[?1049h\033[?25l\033[2J"
#define LEAVE "\033[0m\033[?25h\033[?1049l"

static volatile sig_atomic_t ended, resized, suspended;
static struct termios cooked;
static sigset_t waited;

static void on_signal(int number)
{
    if (number == SIGWINCH)
        resized = 1;
    else if (number == SIGTSTP)
        suspended = 1;
    else
        ended = 1;
}

static void measure(struct k3_screen *s)
{
    struct winsize ws = { 0 };

    s->columns = 80;
    s->rows = 24;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &ws) == 0 && ws.ws_col && ws.ws_row) {
        s->columns = ws.ws_col;
        s->rows = ws.ws_row;
    }
}

static void enter(struct k3_screen *s)
{
    struct termios raw;

    s->keys = tcgetattr(STDIN_FILENO, &cooked) == 0;
    if (s->keys) {
        raw = cooked;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        raw.c_cc[VMIN] = 1;
        raw.c_cc[VTIME] = 0;
        tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    }
    fputs(ENTER, stdout);
    fflush(stdout);
}

static void leave(struct k3_screen *s)
{
    fputs(LEAVE, stdout);
    fflush(stdout);
    if (s->keys)
        tcsetattr(STDIN_FILENO, TCSADRAIN, &cooked);
}

void k3_screen_open(struct k3_screen *s)
{
    static const int caught[] = { SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGTSTP };
    const char *term = getenv("TERM"), *no = getenv("NO_COLOR");
    struct sigaction sa = { .sa_handler = on_signal };
    sigset_t set;

    *s = (struct k3_screen){ .full = isatty(STDOUT_FILENO) && term && *term && strcmp(term, "dumb") != 0 };
    s->colours = s->full && !(no && *no);
    measure(s);
    sigemptyset(&set);
    for (size_t i = 0; i < (s->full ? 5 : 3); i++) {
        sigaction(caught[i], &sa, NULL);
        sigaddset(&set, caught[i]);
    }
    sigprocmask(SIG_BLOCK, &set, &waited);
    for (size_t i = 0; i < 5; i++)
        sigdelset(&waited, caught[i]);
    if (s->full)
        enter(s);
}

/* One line, cut at the width; an escape sequence has none. */
static const char *put_line(const struct k3_screen *s, const char *p)
{
    unsigned column = 0;

    for (; *p && *p != '\n'; p++) {
        if (*p == '\033') {
            size_t n = strcspn(p, "m") + 1;
            if (s->colours)
                fwrite(p, 1, n, stdout);
            p += n - 1;
        } else if (column < s->columns) {
            putchar(*p);
            column++;
        }
    }
    return *p ? p + 1 : p;
}

void k3_screen_show(struct k3_screen *s, const char *text)
{
    unsigned row = 0, columns = s->columns;

    if (!s->full)
        s->columns = UINT32_MAX;
    else
        fputs("\033[H", stdout);
    while (*text && (!s->full || row < s->rows)) {
        if (s->full && row)
            fputs("\r\n", stdout);
        text = put_line(s, text);
        fputs(s->full ? "\033[0m\033[K" : "\n", stdout);
        row++;
    }
    fputs(s->full ? "\033[J" : "\n", stdout);
    s->columns = columns;
    fflush(stdout);
}

static void suspend(struct k3_screen *s)
{
    leave(s);
    raise(SIGSTOP);
    suspended = 0;
    enter(s);
    resized = 1;
}

/* True for "q", and when nobody can press it any more. */
static bool quit_key(struct k3_screen *s)
{
    char c = 0;
    ssize_t n = read(STDIN_FILENO, &c, 1);

    if (n == 0)
        s->keys = false;
    return c == 'q' || c == 'Q' || (n < 0 && errno == EIO);
}

enum k3_screen_event k3_screen_wait(struct k3_screen *s, double seconds)
{
    uint64_t until = k3_now_ns() + (uint64_t)(seconds * 1e9);

    for (;;) {
        uint64_t now = k3_now_ns(), left = until > now ? until - now : 0;
        struct timespec timeout = { (time_t)(left / 1000000000u), (long)(left % 1000000000u) };
        struct pollfd in = { .fd = s->full && s->keys ? STDIN_FILENO : -1, .events = POLLIN };
        int n = ppoll(&in, 1, &timeout, &waited);

        if (ended || (n > 0 && quit_key(s)) || ferror(stdout))
            return K3_SCREEN_QUIT;
        if (suspended)
            suspend(s);
        if (resized) {
            resized = 0;
            measure(s);
            return K3_SCREEN_RESIZED;
        }
        if (left == 0)
            return K3_SCREEN_TICK;
    }
}

void k3_screen_close(struct k3_screen *s)
{
    if (s->full)
        leave(s);
    s->full = false;
}
