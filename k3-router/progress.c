#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

/* Nothing is shown for so long after other output, so that a fast answer does not flicker. */
#define QUIET_NS 400000000ull

/* Below unfinished text the line goes one row further down: IND and RI make sure that there is one (scrolling when need be)
 * and keep the column, DECSC and DECRC bring the cursor back. */
#define BELOW "\033D\033M\0337\033[B\r\033[K"
#define BACK "\0338"

struct k3_progress_line { uint64_t due_ns; bool shown, below; };

struct k3_progress_line *k3_progress_open(unsigned delay_ms)
{
    const char *term = getenv("TERM");
    bool able = isatty(STDERR_FILENO) && term && *term && strcmp(term, "dumb") != 0;
    struct k3_progress_line *p = able ? calloc(1, sizeof(*p)) : NULL;

    if (p)
        p->due_ns = k3_now_ns() + delay_ms * 1000000ull;
    return p;
}

static void put(const char *bytes, size_t len_bytes)
{
    ssize_t n = write(STDERR_FILENO, bytes, len_bytes);

    (void)n; /* a progress line that cannot be shown is no error */
}

void k3_progress_text(struct k3_progress_line *p, const char *line, bool below)
{
    struct winsize ws = { 0 };
    size_t width, n = strlen(line);

    if (!p || k3_now_ns() < p->due_ns)
        return;
    width = ioctl(STDERR_FILENO, TIOCGWINSZ, &ws) == 0 && ws.ws_col > 20 ? ws.ws_col : 80;
    if (n > width - 1)
        n = width - 1;
    put(below ? BELOW : "\r\033[K", below ? strlen(BELOW) : 4);
    put(line, n);
    if (below)
        put(BACK, strlen(BACK));
    p->shown = true;
    p->below = below;
}

void k3_progress_show(struct k3_progress_line *p, const struct k3_ask_progress *w, size_t n_tokens, bool below)
{
    char line[256];
    size_t n;

    if (!p)
        return;
    n = (size_t)snprintf(line, sizeof(line), "%.16s", w->phase);
    if (w->layers > 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  layer %.0f/%.0f", w->layer, w->layers);
    if (n_tokens)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  %zu tokens", n_tokens);
    if (w->bytes_per_s > 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  %.2f GB/s", w->bytes_per_s / 1e9);
    if (w->eta_s >= 1)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  ETA %.0f s", w->eta_s);
    if (strcmp(w->waiting, "none") != 0)
        snprintf(line + n, sizeof(line) - n, "  (waiting for %.16s)", w->waiting);
    k3_progress_text(p, line, below);
}

void k3_progress_erase(struct k3_progress_line *p)
{
    uint64_t quiet_ns = k3_now_ns() + QUIET_NS;

    if (!p)
        return;
    if (p->shown)
        put(p->below ? BELOW BACK : "\r\033[K", p->below ? strlen(BELOW BACK) : 4);
    p->shown = false;
    if (p->due_ns < quiet_ns)
        p->due_ns = quiet_ns;
}

void k3_progress_close(struct k3_progress_line *p)
{
    k3_progress_erase(p);
    free(p);
}
