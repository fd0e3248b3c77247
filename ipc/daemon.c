/* The daemon skeleton (ipc/daemon.h).
 *
 * One thread of its own (life) takes the signals, watches the parent and begins the stop, whoever
 * asked for it; the control server has two more.  state moves only forward:
 *   STARTING        -> READY      k3_daemon_ready
 *   STARTING, READY -> DRAINING   control command drain
 *   any             -> STOPPED    k3_daemon_close */
#include "ipc/daemon.h"
#include "ipc/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "ipc/msg.h"
#include "ipc/stats_json.h"

#define N_ON_STOP 8
#define CTL_CONTEXTS 2
#define WATCH_MS 1000

/* A test build may widen this point (style.md 9); the program has nothing there. */
#ifndef K3_DAEMON_POINT
#define K3_DAEMON_POINT() ((void)0)
#endif

struct k3_daemon {
    char name[32], instance[33], rundir[512];
    int lock_fd, signal_fd, event_fd;
    uint32_t generation;
    uint64_t start_ns;
    struct k3_stats stats;
    struct k3_server *ctl;
    k3_ctl_fn *ctl_fn;
    k3_info_fn *info_fn;
    void *arg;
    pthread_t life;
    bool has_life, supervised;
    pid_t parent;
    sigset_t old_mask;
    _Atomic bool stop, draining, keep, shutdown, leave;
    _Atomic uint32_t state;
    pthread_mutex_t fn_lock; /* held while ctl_fn or info_fn runs */
    bool fn_on;              /* under fn_lock */
    pthread_mutex_t on_stop_lock;
    struct { void (*fn)(void *); void *arg; } on_stop[N_ON_STOP];
    size_t n_on_stop;
};

static int level_of(const char *name)
{
    static const char *const level[] = { "error", "warn", "info", "debug" };

    for (int i = 0; i < 4; i++)
        if (strcmp(name, level[i]) == 0)
            return i;
    return -1;
}

static void poke(struct k3_daemon *d)
{
    uint64_t one = 1;

    while (write(d->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

static void begin_stop(struct k3_daemon *d, const char *why)
{
    if (atomic_exchange_explicit(&d->stop, true, memory_order_acq_rel))
        return;
    k3_log(K3_LOG_INFO, "stopping", "daemon=%s why=%s", d->name, why);
    pthread_mutex_lock(&d->on_stop_lock);
    for (size_t i = 0; i < d->n_on_stop; i++)
        d->on_stop[i].fn(d->on_stop[i].arg);
    pthread_mutex_unlock(&d->on_stop_lock);
}

static bool orphaned(const struct k3_daemon *d)
{
    return d->supervised && getppid() != d->parent;
}

static void *life(void *arg)
{
    struct k3_daemon *d = arg;

    for (;;) {
        struct pollfd p[2] = { { d->signal_fd, POLLIN, 0 }, { d->event_fd, POLLIN, 0 } };
        struct signalfd_siginfo si;
        uint64_t n;

        (void)poll(p, 2, d->supervised ? WATCH_MS : -1);
        /* The news is taken first and the flags are looked at afterwards: a poke between the two
         * wakes poll again. */
        while (read(d->event_fd, &n, sizeof(n)) == sizeof(n))
            ;
        if (atomic_load_explicit(&d->leave, memory_order_acquire))
            return NULL;
        if (atomic_load_explicit(&d->shutdown, memory_order_acquire))
            begin_stop(d, "shutdown");
        K3_DAEMON_POINT();
        while (read(d->signal_fd, &si, sizeof(si)) == sizeof(si))
            begin_stop(d, orphaned(d) ? "parent_gone" : si.ssi_signo == SIGTERM ? "SIGTERM" :
                          si.ssi_signo == SIGINT ? "SIGINT" : "SIGHUP");
        if (orphaned(d))
            begin_stop(d, "parent_gone");
    }
}

/* ---- control commands ---- */

static void add_command_line(cJSON *to)
{
    char text[8192];
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
    cJSON *list = cJSON_AddArrayToObject(to, "options");

    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return;
    text[n] = 0;
    for (char *p = text + strlen(text) + 1; p < text + n; p += strlen(p) + 1)
        cJSON_AddItemToArray(list, cJSON_CreateString(p));
}

static void info(struct k3_daemon *d, cJSON *reply)
{
    cJSON_AddStringToObject(reply, "daemon", d->name);
    cJSON_AddStringToObject(reply, "version", K3_VERSION);
    cJSON_AddStringToObject(reply, "build", K3_BUILD);
    cJSON_AddStringToObject(reply, "instance", d->instance);
    cJSON_AddStringToObject(reply, "rundir", d->rundir);
    cJSON_AddNumberToObject(reply, "pid", getpid());
    cJSON_AddNumberToObject(reply, "generation", d->generation);
    cJSON_AddNumberToObject(reply, "uptime_s", (double)(k3_now_ns() - d->start_ns) / 1e9);
    cJSON_AddStringToObject(
        reply, "state",
        k3_daemon_state_name(atomic_load_explicit(&d->state, memory_order_acquire)));
    add_command_line(reply);
    pthread_mutex_lock(&d->fn_lock);
    if (d->info_fn && d->fn_on)
        d->info_fn(d->arg, reply);
    pthread_mutex_unlock(&d->fn_lock);
}

static int set_level(const cJSON *request, cJSON *reply, struct k3_err *err)
{
    const cJSON *level = cJSON_GetObjectItemCaseSensitive(request, "level");
    int n = cJSON_IsString(level) ? level_of(level->valuestring) : -1;

    if (n < 0)
        return k3_refuse(err, -EINVAL, "log level %.40s: must be error, warn, info or debug",
                         cJSON_IsString(level) ? level->valuestring : "(none)");
    k3_log_level_set((enum k3_log_level)n);
    cJSON_AddStringToObject(reply, "level", level->valuestring);
    return 0;
}

static void move_state(struct k3_daemon *d, uint32_t from, uint32_t to)
{
    atomic_compare_exchange_strong_explicit(&d->state, &from, to, memory_order_acq_rel,
                                            memory_order_acquire);
    k3_daemon_beat(d);
}

static void control(void *arg, const char *cmd, const cJSON *request, cJSON *reply)
{
    struct k3_daemon *d = arg;
    struct k3_err err = K3_ERR_INIT;
    int rc = 0;

    if (strcmp(cmd, "ping") == 0) {
        cJSON_AddStringToObject(reply, "daemon", d->name);
        cJSON_AddNumberToObject(reply, "pid", getpid());
        cJSON_AddNumberToObject(reply, "generation", d->generation);
        cJSON_AddStringToObject(
            reply, "state",
            k3_daemon_state_name(atomic_load_explicit(&d->state, memory_order_acquire)));
    } else if (strcmp(cmd, "info") == 0) {
        info(d, reply);
    } else if (strcmp(cmd, "stats") == 0) {
        k3_stats_json(&d->stats, reply);
    } else if (strcmp(cmd, "drain") == 0) {
        atomic_store_explicit(&d->draining, true, memory_order_release);
        move_state(d, K3_STARTING, K3_DRAINING);
        move_state(d, K3_READY, K3_DRAINING);
        k3_log(K3_LOG_INFO, "draining", "daemon=%s", d->name);
    } else if (strcmp(cmd, "shutdown") == 0) {
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(request, "keep")))
            atomic_store_explicit(&d->keep, true, memory_order_release);
        atomic_store_explicit(&d->shutdown, true, memory_order_release);
        poke(d);
    } else if (strcmp(cmd, "log") == 0) {
        rc = set_level(request, reply, &err);
    } else if (d->ctl_fn) {
        pthread_mutex_lock(&d->fn_lock);
        if (d->fn_on)
            rc = d->ctl_fn(d->arg, cmd, request, reply, &err);
        else
            rc = k3_no_peer(&err, -EAGAIN, "%s is starting or stopping", d->name);
        pthread_mutex_unlock(&d->fn_lock);
    } else {
        rc = k3_refuse(&err, -ENOSYS, "%s knows no command \"%.40s\"", d->name, cmd);
    }
    if (rc < 0)
        k3_reply_error(reply, &err);
}

/* ---- open and close ---- */

static int take_signals(struct k3_daemon *d, struct k3_err *err)
{
    static const int wanted[] = { SIGTERM, SIGINT, SIGHUP };
    sigset_t set;

    sigemptyset(&set);
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        struct sigaction old;

        /* nohup and a shell's background jobs ignore SIGHUP or SIGINT on purpose.  SIGTERM always
         * counts. */
        if (wanted[i] != SIGTERM && sigaction(wanted[i], NULL, &old) == 0 &&
            old.sa_handler == SIG_IGN)
            continue;
        sigaddset(&set, wanted[i]);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    /* Before any thread is made: all of them inherit the mask, and only the signalfd sees the
     * signals. */
    pthread_sigmask(SIG_BLOCK, &set, &d->old_mask);
    d->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    d->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->signal_fd < 0 || d->event_fd < 0)
        return k3_fail(err, -errno, "%s: signalfd or eventfd: %s", d->name, strerror(errno));
    return 0;
}

/* Asks the kernel for SIGTERM when the parent dies; the life thread compares parents as well, for a
 * parent that died before the request. */
static int watch_parent(struct k3_daemon *d, struct k3_err *err)
{
    d->parent = getppid();
    if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0)
        return k3_fail(err, -errno, "%s: PR_SET_PDEATHSIG: %s", d->name, strerror(errno));
    if (getppid() != d->parent || (d->parent == 1 && !k3_lock_alive(d->rundir, "k3-run")))
        return k3_no_peer(err, -ECHILD, "%s: --supervised, but the parent process is already gone",
                          d->name);
    return 0;
}

int k3_daemon_open(struct k3_daemon **out, const char *name, const struct k3_daemon_opts *opts,
                   const struct k3_stat_def *defs, uint32_t n_defs, k3_ctl_fn *ctl,
                   k3_info_fn *info_fn, void *arg, struct k3_err *err)
{
    struct k3_daemon *d = calloc(1, sizeof(*d));
    char sock[48];
    int rc, level = level_of(opts->log_level);

    *out = NULL;
    if (!d)
        return k3_fail(err, -ENOMEM, "%s: no memory", name);
    d->lock_fd = d->signal_fd = d->event_fd = -1;
    d->stats.seg.fd = -1;
    d->start_ns = k3_now_ns();
    d->ctl_fn = ctl;
    d->info_fn = info_fn;
    d->arg = arg;
    d->supervised = opts->supervised;
    pthread_mutex_init(&d->fn_lock, NULL);
    pthread_mutex_init(&d->on_stop_lock, NULL);
    pthread_sigmask(SIG_BLOCK, NULL, &d->old_mask);
    snprintf(d->name, sizeof(d->name), "%s", name);
    k3_log_open(name, level < 0 ? K3_LOG_INFO : (enum k3_log_level)level);
    if (level < 0)
        rc = k3_refuse(err, -EINVAL, "--log-level %.40s: must be error, warn, info or debug",
                       opts->log_level);
    else
        rc = k3_rundir(d->rundir, sizeof(d->rundir), opts->instance, true, err);
    if (rc < 0)
        goto fail;
    snprintf(d->instance, sizeof(d->instance), "%s", opts->instance);
    rc = k3_lock_take(&d->lock_fd, &d->generation, d->rundir, name, err);
    if (rc == 0)
        rc = take_signals(d, err);
    if (rc == 0 && d->supervised)
        rc = watch_parent(d, err);
    if (rc == 0)
        rc = k3_stats_create(&d->stats, d->instance, name, d->generation, defs, n_defs, err);
    if (rc < 0)
        goto fail;
    if (pthread_create(&d->life, NULL, life, d) != 0) {
        rc = k3_fail(err, -EAGAIN, "%s: cannot start a thread", name);
        goto fail;
    }
    d->has_life = true;
    snprintf(sock, sizeof(sock), "%s.ctl", name);
    rc = k3_server_open(&d->ctl, d->rundir, sock, CTL_CONTEXTS, control, d, err);
    if (rc < 0)
        goto fail;
    k3_log(K3_LOG_INFO, "starting", "daemon=%s pid=%d generation=%u instance=%s version=%s", name,
           (int)getpid(), d->generation, d->instance, K3_VERSION);
    *out = d;
    return 0;
fail:
    k3_daemon_close(d);
    return rc;
}

static void switch_fn(struct k3_daemon *d, bool on)
{
    pthread_mutex_lock(&d->fn_lock);
    d->fn_on = on;
    pthread_mutex_unlock(&d->fn_lock);
}

void k3_daemon_ctl_end(struct k3_daemon *d)
{
    if (d)
        switch_fn(d, false);
}

void k3_daemon_ready(struct k3_daemon *d)
{
    switch_fn(d, true);
    move_state(d, K3_STARTING, K3_READY);
    k3_log(K3_LOG_INFO, "ready", "daemon=%s pid=%d generation=%u after_ms=%llu", d->name,
           (int)getpid(), d->generation,
           (unsigned long long)((k3_now_ns() - d->start_ns) / 1000000u));
}

bool k3_daemon_stopping(const struct k3_daemon *d)
{
    return atomic_load_explicit(&d->stop, memory_order_acquire);
}

bool k3_daemon_draining(const struct k3_daemon *d)
{
    return atomic_load_explicit(&d->draining, memory_order_acquire);
}

bool k3_daemon_keep(const struct k3_daemon *d)
{
    return atomic_load_explicit(&d->keep, memory_order_acquire);
}

_Atomic bool *k3_daemon_stop_flag(struct k3_daemon *d)
{
    return &d->stop;
}

void k3_daemon_on_stop(struct k3_daemon *d, void (*fn)(void *), void *arg)
{
    bool late;

    pthread_mutex_lock(&d->on_stop_lock);
    if (d->n_on_stop == N_ON_STOP)
        k3_bug("%s: more than %d on_stop functions", d->name, N_ON_STOP);
    d->on_stop[d->n_on_stop].fn = fn;
    d->on_stop[d->n_on_stop++].arg = arg;
    late = k3_daemon_stopping(d);
    pthread_mutex_unlock(&d->on_stop_lock);
    if (late)
        fn(arg);
}

void k3_daemon_beat(struct k3_daemon *d)
{
    k3_stats_beat(&d->stats,
                  (enum k3_daemon_state)atomic_load_explicit(&d->state, memory_order_acquire));
}

void k3_daemon_close(struct k3_daemon *d)
{
    if (!d)
        return;
    k3_server_close(d->ctl);
    if (d->has_life) {
        atomic_store_explicit(&d->leave, true, memory_order_release);
        poke(d);
        pthread_join(d->life, NULL);
        k3_log(K3_LOG_INFO, "stopped", "daemon=%s pid=%d generation=%u", d->name, (int)getpid(),
               d->generation);
    }
    atomic_store_explicit(&d->state, K3_STOPPED, memory_order_release);
    k3_daemon_beat(d);
    k3_stats_destroy(&d->stats, d->instance, d->name);
    if (d->signal_fd >= 0) {
        struct signalfd_siginfo si;

        while (read(d->signal_fd, &si, sizeof(si)) == sizeof(si))
            ; /* a second SIGTERM must not end us, with another exit status, once it is let through
                 again */
        close(d->signal_fd);
    }
    if (d->event_fd >= 0)
        close(d->event_fd);
    pthread_sigmask(SIG_SETMASK, &d->old_mask, NULL);
    if (orphaned(d)) /* k3-run was killed: nobody else is left to remove it */
        k3_reserve_clean("/dev/shm", d->instance);
    k3_lock_drop(&d->lock_fd);
    pthread_mutex_destroy(&d->on_stop_lock);
    pthread_mutex_destroy(&d->fn_lock);
    free(d);
}

const char *k3_daemon_rundir(const struct k3_daemon *d)
{
    return d->rundir;
}

const char *k3_daemon_instance(const struct k3_daemon *d)
{
    return d->instance;
}

uint32_t k3_daemon_generation(const struct k3_daemon *d)
{
    return d->generation;
}

struct k3_stats *k3_daemon_stats(struct k3_daemon *d)
{
    return &d->stats;
}
