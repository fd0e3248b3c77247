#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

struct k3_progress_line { uint64_t due_ns; bool shown; };

struct k3_progress_line *k3_progress_open(unsigned delay_ms)
{
    struct k3_progress_line *p = isatty(STDERR_FILENO) ? calloc(1, sizeof(*p)) : NULL;

    if (p)
        p->due_ns = k3_now_ns() + delay_ms * 1000000ull;
    return p;
}

static void put(const char *bytes, size_t len_bytes)
{
    ssize_t n = write(STDERR_FILENO, bytes, len_bytes);

    (void)n; /* a progress line that cannot be shown is no error */
}

void k3_progress_show(struct k3_progress_line *p, const struct k3_ask_progress *w, size_t n_tokens)
{
    char line[256];
    struct winsize ws = { 0 };
    size_t width, n;

    if (!p || k3_now_ns() < p->due_ns)
        return;
    width = ioctl(STDERR_FILENO, TIOCGWINSZ, &ws) == 0 && ws.ws_col > 20 ? ws.ws_col : 80;
    n = (size_t)snprintf(line, sizeof(line), "%s", w->phase);
    if (w->layers > 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  layer %.0f/%.0f", w->layer, w->layers);
    if (n_tokens)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  %zu tokens", n_tokens);
    if (w->bytes_per_s > 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  %.2f GB/s", w->bytes_per_s / 1e9);
    if (w->eta_s > 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  ETA %.0f s", w->eta_s);
    if (strcmp(w->waiting, "none") != 0)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "  (waiting for %.16s)", w->waiting);
    if (n > width - 1)
        n = width - 1;
    put("\r\033[K", 4);
    put(line, n);
    p->shown = true;
}

void k3_progress_erase(struct k3_progress_line *p)
{
    if (p && p->shown)
        put("\r\033[K", 4);
    if (p)
        p->shown = false;
}

void k3_progress_close(struct k3_progress_line *p)
{
    k3_progress_erase(p);
    free(p);
}
