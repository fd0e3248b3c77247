/* The log of ipc/daemon.h: one event, one line, one write. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"

static struct {
    char program[32];
    _Atomic int level;
} log_state = { "", K3_LOG_INFO };

static const char *const level_name[] = { "error", "warn", "info", "debug" };

void k3_log_open(const char *program, enum k3_log_level level)
{
    snprintf(log_state.program, sizeof(log_state.program), "%s", program);
    k3_log_level_set(level);
    /* Whoever read stderr may go away (closed terminal, ended pipe); that is no reason to die. */
    signal(SIGPIPE, SIG_IGN);
}

void k3_log_level_set(enum k3_log_level level)
{
    atomic_store_explicit(&log_state.level, (int)level, memory_order_relaxed);
}

static void append(char *line, size_t len, size_t *at, const char *fmt, va_list ap)
{
    int n = vsnprintf(line + *at, len - *at, fmt, ap);

    if (n > 0)
        *at += (size_t)n < len - *at ? (size_t)n : len - *at - 1;
}

static void append_f(char *line, size_t len, size_t *at, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    append(line, len, at, fmt, ap);
    va_end(ap);
}

void k3_log(enum k3_log_level level, const char *event, const char *fmt, ...)
{
    char line[2048], tail[96];
    struct timespec now;
    struct tm tm;
    size_t at = 0;
    va_list ap;

    if ((int)level > atomic_load_explicit(&log_state.level, memory_order_relaxed))
        return;
    append_f(line, sizeof(line) - sizeof(tail), &at, "level=%s event=%s", level_name[level], event);
    if (fmt && *fmt) {
        append_f(line, sizeof(line) - sizeof(tail), &at, " ");
        va_start(ap, fmt);
        append(line, sizeof(line) - sizeof(tail), &at, fmt, ap);
        va_end(ap);
    }
    for (size_t i = 0; i < at; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?'; /* a name from a file must not forge a second line */
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    append_f(line, sizeof(line), &at, " at=%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ\n",
             tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec,
             now.tv_nsec / 1000000);
    while (write(STDERR_FILENO, line, at) < 0 && errno == EINTR)
        ;
}

void k3_log_err(const struct k3_err *err, const char *event)
{
    char text[sizeof(err->text)];

    snprintf(text, sizeof(text), "%s", err->text);
    for (char *p = text; *p; p++)
        if (*p == '"')
            *p = '\'';
    k3_log(K3_LOG_ERROR, event, "exit=%d text=\"%s\"", k3_exit_status(-1, err), text);
}

int k3_exit_status(int rc, const struct k3_err *err)
{
    if (rc >= 0)
        return K3_EXIT_OK;
    return err && err->exit_status ? err->exit_status : K3_EXIT_FAILED;
}

uint64_t k3_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
