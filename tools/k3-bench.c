/* k3-bench: measures what k3 does as a share of this machine's limits. */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "tools/bench.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} parts[] = {
    { "kernels", k3_bench_kernels, "the arithmetic kernels against memory rate and FMA peak" },
    { "pass", k3_bench_pass, "a pass with all weights in memory against max(bytes / memory rate, FLOP / peak), and its stages" },
    { "context", k3_bench_context, "the time of one token at sixteen lengths of its context" },
    { "io", k3_bench_io, "raw device, k3-trunkd alone, k3-expertd alone, both together" },
    { "decode", k3_bench_decode, "the time of a pass against max(bytes / raw rate, arithmetic)" },
    { "sweep", k3_bench_sweep, "tokens per second over splits of a fixed memory, and over a ladder of totals" },
};
#define N_PARTS (sizeof(parts) / sizeof(*parts))

volatile sig_atomic_t k3_bench_stop;
_Atomic bool k3_bench_abort;

static void on_signal(int sig)
{
    k3_bench_stop = sig;
    atomic_store(&k3_bench_abort, true);
}

void k3_bench_catch(void)
{
    struct sigaction stop = { .sa_handler = on_signal };

    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGHUP, &stop, NULL);
    signal(SIGPIPE, SIG_IGN); /* main() says what could not be written, after all is put away */
}

void k3_bench_nap(double seconds)
{
    struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };

    nanosleep(&t, NULL);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

void k3_bench_sort(double *v, size_t n)
{
    qsort(v, n, sizeof(*v), ascending);
}

double k3_bench_median(const double *v, size_t n)
{
    double sorted[64];

    if (n == 0 || n > 64)
        return NAN;
    memcpy(sorted, v, n * sizeof(*v));
    k3_bench_sort(sorted, n);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

const char *k3_bench_spread(const double *v, size_t n, char out[64])
{
    double least = v[0], greatest = v[0];

    for (size_t i = 1; i < n; i++) {
        least = v[i] < least ? v[i] : least;
        greatest = v[i] > greatest ? v[i] : greatest;
    }
    snprintf(out, 64, "%.3f (%.3f to %.3f)", k3_bench_median(v, n), least, greatest);
    return out;
}

void k3_bench_progress(const char *fmt, ...)
{
    static uint64_t last_ns;
    static bool shown;
    uint64_t now_ns = k3_now_ns();
    bool terminal = isatty(2);
    va_list ap;

    if (!fmt) {
        if (shown && terminal)
            fputs("\r\033[K", stderr);
        shown = false;
        return;
    }
    if (shown && now_ns - last_ns < (terminal ? 1000000000ull : 10000000000ull))
        return;
    last_ns = now_ns;
    shown = true;
    fputs(terminal ? "\r\033[Kk3-bench: " : "k3-bench: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    if (!terminal)
        fputc('\n', stderr);
    fflush(stderr);
}

int k3_bench_on_layer(void *doing, uint32_t layer, uint32_t n_layers)
{
    k3_bench_progress("%s, layer %u of %u", (const char *)doing, layer + 1, n_layers);
    return k3_bench_stop ? -ECANCELED : 0;
}

int k3_bench_end(int rc, const struct k3_err *err)
{
    k3_bench_progress(NULL);
    if (rc < 0 && k3_bench_stop) { /* what stopped then is of no interest */
        fprintf(stderr, "k3-bench: stopped by SIG%s\n", sigabbrev_np(k3_bench_stop));
        return K3_EXIT_FAILED;
    }
    if (rc < 0)
        fprintf(stderr, "k3-bench: %s\n", err->text);
    return k3_exit_status(rc, err);
}

static void usage(FILE *to)
{
    fprintf(to, "k3-bench: measures what k3 does as a share of this machine's limits\n"
                "usage: k3-bench [PART] [options]     (PART --help lists its options; default %s)\n\n", parts[0].name);
    for (size_t i = 0; i < N_PARTS; i++)
        fprintf(to, "  %-10s %s\n", parts[i].name, parts[i].what);
    fprintf(to, "\nExit status: 0 done, 1 failed, 2 usage or a refused configuration.\n");
}

static int run(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "--";
    if (strcmp(word, "--help") == 0) {
        usage(stdout);
        return 0;
    }
    if (word[0] == '-')
        return parts[0].run(argc, argv);
    for (size_t i = 0; i < N_PARTS; i++)
        if (strcmp(word, parts[i].name) == 0)
            return parts[i].run(argc - 1, argv + 1);
    fprintf(stderr, "k3-bench: \"%s\": what it measures is", word);
    for (size_t i = 0; i < N_PARTS; i++)
        fprintf(stderr, "%s %s", i ? "," : "", parts[i].name);
    fputc('\n', stderr);
    return K3_EXIT_REFUSED;
}

int main(int argc, char **argv)
{
    int status = run(argc, argv);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        fputs("k3-bench: the result could not be written: the disk is full, or the reader has gone\n", stderr);
        return K3_EXIT_FAILED;
    }
    return status;
}
