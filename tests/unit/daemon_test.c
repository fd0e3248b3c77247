/* tests/unit/daemon_test.c: ipc/daemon.c and ipc/log.c.  The daemon is this program again, with
 * "daemon" as its first argument, since a process with nng's threads cannot fork. */
static void widen(void);
#define K3_DAEMON_POINT() widen()
#include "ipc/daemon.c"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "ipc/msg.h"

#define INSTANCE "t-daemon"
#define NAME "k3-testd"

static char dir[64], rundir[128];

static void nap_ms(long ms)
{
    nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, NULL);
}

/* After the skeleton's thread has begun the stop: the main thread may close all meanwhile. */
static void widen(void)
{
    nap_ms(10);
}

/* ---- the daemon ---- */

static const struct k3_stat_def defs[] = { { "beats", "count", "turns of the loop", K3_COUNTER } };
static _Atomic int woken;
static int wake_fd[2];

static int own_command(void *arg, const char *cmd, const cJSON *request, cJSON *reply,
                       struct k3_err *err)
{
    (void)arg;
    (void)request;
    if (strcmp(cmd, "own") != 0)
        return k3_refuse(err, -ENOSYS, "no command %s", cmd);
    cJSON_AddStringToObject(reply, "own", "yes");
    return 0;
}

static void own_info(void *arg, cJSON *reply)
{
    cJSON_AddStringToObject(reply, "arg", arg);
}

static void wake(void *arg)
{
    (void)arg;
    atomic_fetch_add(&woken, 1);
    if (write(wake_fd[1], "x", 1) != 1)
        abort();
}

static int daemon_main(int argc, char **argv)
{
    struct k3_daemon_opts opts = K3_DAEMON_OPTS_INIT;
    const struct k3_opt table[] = { K3_DAEMON_OPT_ROWS(&opts), { NULL } };
    struct k3_daemon *d;
    struct k3_err err = K3_ERR_INIT;
    int rc, status;

    if (k3_opts_parse(table, NAME, "a test", argc, argv, NULL, &status))
        return status;
    rc = k3_daemon_open(&d, NAME, &opts, defs, 1, own_command, own_info, (void *)"mine", &err);
    if (rc < 0) {
        k3_log_err(&err, "testd_stopped");
        return k3_exit_status(rc, &err);
    }
    if (pipe2(wake_fd, O_CLOEXEC) != 0)
        return 1;
    k3_daemon_on_stop(d, wake, NULL);
    k3_daemon_ready(d);
    while (!k3_daemon_stopping(d)) {
        k3_stat_add(k3_daemon_stats(d), 0, 1);
        k3_daemon_beat(d);
        /* Woken by on_stop alone: without it this daemon hangs, and the deadline shows it. */
        poll(&(struct pollfd){ wake_fd[0], POLLIN, 0 }, 1, -1);
    }
    if (atomic_load(&woken) != 1)
        return 9;
    status = k3_daemon_keep(d) ? 7 : 0;
    k3_daemon_ctl_end(d);
    k3_daemon_close(d);
    return status;
}

/* ---- the tests ---- */

static pid_t start(const char *log, const char *const *more)
{
    char *argv[16] = { "daemon_test", "daemon", "--instance", INSTANCE };
    pid_t pid;
    int n = 4;

    for (; more && *more; more++)
        argv[n++] = (char *)*more;
    argv[n] = NULL;
    pid = vfork();
    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

        dup2(fd, 2);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    assert_true(pid > 0);
    return pid;
}

static int wait_end(pid_t pid)
{
    int status;

    for (int i = 0; i < 4000; i++) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        nap_ms(5);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    fail_msg("the daemon did not end");
    return -1;
}

static cJSON *ask(const char *cmd, const char *name, const char *value)
{
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    cJSON *r = cJSON_CreateObject(), *reply = NULL;
    int rc;

    cJSON_AddStringToObject(r, "cmd", cmd);
    if (name && strcmp(value, "true") == 0)
        cJSON_AddBoolToObject(r, name, true);
    else if (name)
        cJSON_AddStringToObject(r, name, value);
    assert_int_equal(k3_client_open(&c, rundir, NAME ".ctl", &err), 0);
    rc = k3_client_call(c, r, 10000, &reply, &err);
    cJSON_Delete(r);
    k3_client_close(c);
    if (rc < 0)
        fail_msg("%s: %s", cmd, err.text);
    return reply;
}

static void wait_ready(void)
{
    for (int i = 0; i < 2000; i++) {
        if (k3_lock_alive(rundir, NAME)) {
            struct k3_stats s;
            struct k3_err err = K3_ERR_INIT;

            if (k3_stats_open(&s, INSTANCE, NAME, &err) == 0) {
                bool ready = atomic_load(&s.page->state) == K3_READY;

                k3_stats_close(&s);
                if (ready)
                    return;
            }
        }
        nap_ms(5);
    }
    fail_msg("the daemon is not ready");
}

static char *slurp(const char *path)
{
    static char text[65536];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;

    if (f)
        fclose(f);
    text[n] = 0;
    return text;
}

static const char *log_path(void)
{
    static char path[128];

    snprintf(path, sizeof(path), "%s/log", dir);
    unlink(path);
    return path;
}

static void expect(const cJSON *reply, const char *name, const char *value)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(reply, name);

    assert_true(cJSON_IsString(v));
    assert_string_equal(v->valuestring, value);
}

static void nothing_left(void)
{
    struct k3_stats s;
    struct k3_err err = K3_ERR_INIT;
    char path[200];

    assert_int_equal(k3_stats_open(&s, INSTANCE, NAME, &err), -ENOENT);
    snprintf(path, sizeof(path), "%s/" NAME ".ctl", rundir);
    assert_int_equal(access(path, F_OK), -1);
    assert_false(k3_lock_alive(rundir, NAME));
}

static void whole_life(void **state)
{
    const char *log = log_path();
    pid_t pid = start(log, NULL);
    cJSON *r;
    char *text;

    (void)state;
    wait_ready();
    r = ask("ping", NULL, NULL);
    assert_int_equal(cJSON_GetObjectItem(r, "pid")->valueint, pid);
    expect(r, "state", "ready");
    cJSON_Delete(r);
    r = ask("info", NULL, NULL);
    expect(r, "version", K3_VERSION);
    expect(r, "instance", INSTANCE);
    expect(r, "arg", "mine");
    assert_true(cJSON_GetObjectItem(r, "generation")->valueint >= 1);
    assert_string_equal(cJSON_GetArrayItem(cJSON_GetObjectItem(r, "options"), 1)->valuestring,
                        "--instance");
    cJSON_Delete(r);
    r = ask("stats", NULL, NULL);
    assert_true(
        cJSON_GetObjectItem(cJSON_GetObjectItem(cJSON_GetObjectItem(r, "stats"), "beats"), "value")
            ->valuedouble > 0);
    cJSON_Delete(r);
    r = ask("own", NULL, NULL);
    expect(r, "own", "yes");
    cJSON_Delete(r);
    r = ask("else", NULL, NULL);
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(r, "ok")));
    expect(r, "errno", "ENOSYS");
    cJSON_Delete(r);
    r = ask("log", "level", "loud");
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(r, "ok")));
    cJSON_Delete(r);
    r = ask("log", "level", "error");
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(r, "ok")));
    cJSON_Delete(r);
    r = ask("drain", NULL, NULL); /* not logged any more */
    cJSON_Delete(r);
    r = ask("ping", NULL, NULL);
    expect(r, "state", "draining");
    cJSON_Delete(r);
    r = ask("shutdown", NULL, NULL);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(r, "ok")));
    cJSON_Delete(r);
    assert_int_equal(wait_end(pid), 0);
    nothing_left();
    text = slurp(log);
    assert_non_null(strstr(text, "level=info event=ready daemon=" NAME));
    assert_null(strstr(text, "event=draining"));
    assert_null(strstr(text, "event=stopped"));
}

static void ends_by_signal_or_request(void **state)
{
    static const int signals[] = { SIGTERM, SIGINT, SIGHUP };
    const char *log = log_path();
    cJSON *r;
    pid_t pid;

    (void)state;
    for (int i = 0; i < 3; i++) {
        pid = start(log, NULL);
        wait_ready();
        kill(pid, signals[i]);
        kill(pid, SIGTERM); /* impatience changes nothing */
        assert_int_equal(wait_end(pid), 0);
        nothing_left();
    }
    pid = start(log, NULL);
    wait_ready();
    r = ask("shutdown", "keep", "true");
    cJSON_Delete(r);
    assert_int_equal(wait_end(pid), 7);
    nothing_left();
    assert_non_null(strstr(slurp(log), "event=stopping daemon=" NAME " why=SIGINT"));
}

/* The end of a daemon that is asked to shut down crosses the answer to the request in every
 * possible way. */
static void shuts_down_every_time(void **state)
{
    const char *log = log_path();

    (void)state;
    for (int i = 0; i < 60; i++) {
        pid_t pid = start(log, NULL);

        wait_ready();
        cJSON_Delete(ask("shutdown", NULL, NULL));
        assert_int_equal(wait_end(pid), 0);
    }
}

/* Killed: the page stays readable, the successor takes everything over and counts one generation
 * more. */
static void killed(void **state)
{
    const char *log = log_path();
    struct k3_stats s;
    struct k3_err err = K3_ERR_INIT;
    pid_t pid = start(log, NULL);
    uint32_t gen;

    (void)state;
    wait_ready();
    kill(pid, SIGKILL);
    assert_int_equal(wait_end(pid), 128 + SIGKILL);
    assert_int_equal(k3_stats_open(&s, INSTANCE, NAME, &err), 0);
    assert_int_equal(s.page->pid, pid);
    gen = s.page->generation;
    k3_stats_close(&s);
    pid = start(log, NULL);
    for (int i = 0; i < 2000; i++) { /* the old page says ready, too */
        if (k3_stats_open(&s, INSTANCE, NAME, &err) == 0) {
            bool fresh = s.page->generation == gen + 1 && atomic_load(&s.page->state) == K3_READY;

            k3_stats_close(&s);
            if (fresh)
                break;
        }
        nap_ms(5);
    }
    cJSON_Delete(ask("ping", NULL, NULL));
    kill(pid, SIGTERM);
    assert_int_equal(wait_end(pid), 0);
    assert_int_equal(k3_stats_open(&s, INSTANCE, NAME, &err), -ENOENT);
}

static void second_one_is_refused(void **state)
{
    const char *log = log_path();
    pid_t pid = start(log, NULL), other;
    char want[64];
    cJSON *r;

    (void)state;
    wait_ready();
    other = start(log, NULL);
    assert_int_equal(wait_end(other), 2);
    snprintf(want, sizeof(want), "as pid %d", (int)pid);
    assert_non_null(strstr(slurp(log), want));
    r = ask("ping", NULL, NULL); /* the first one was not disturbed */
    assert_int_equal(cJSON_GetObjectItem(r, "pid")->valueint, pid);
    cJSON_Delete(r);
    kill(pid, SIGTERM);
    assert_int_equal(wait_end(pid), 0);
}

static void bad_options(void **state)
{
    static const char *const level[] = { "--log-level", "loud", NULL }, *const instance[] = {
        "--instance", "a/b", NULL
    };
    const char *log = log_path();

    (void)state;
    assert_int_equal(wait_end(start(log, level)), 2);
    assert_non_null(strstr(slurp(log), "must be error, warn, info or debug"));
    assert_int_equal(wait_end(start(log, instance)), 2);
    assert_non_null(strstr(slurp(log), "instance name 'a/b'"));
}

/* --supervised: the daemon leaves when its parent, here a process in between, is killed. */
static void leaves_with_its_parent(void **state)
{
    static const char *const supervised[] = { "--supervised", NULL };
    const char *log = log_path();
    pid_t between;
    int status;
    uint64_t begin;

    (void)state;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* so that the orphan's new parent is not init */
    between = fork();                 /* forks and execs only: safe beside nng's threads */
    if (between == 0) {
        start(log, supervised);
        pause();
        _exit(0);
    }
    wait_ready();
    kill(between, SIGKILL);
    waitpid(between, &status, 0);
    begin = k3_now_ns();
    while (k3_lock_alive(rundir, NAME) && k3_now_ns() - begin < 10000000000u)
        nap_ms(20);
    nothing_left();
    while (waitpid(-1, &status, WNOHANG) > 0)
        ;
}

/* Whoever reads its log goes away: it lives on. */
static void closed_stderr(void **state)
{
    pid_t pid;
    int to[2];
    cJSON *r;

    (void)state;
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    pid = vfork();
    if (pid == 0) {
        char *argv[] = { "daemon_test", "daemon", "--instance", INSTANCE, NULL };

        signal(SIGPIPE, SIG_DFL);
        dup2(to[1], 2);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    close(to[1]);
    wait_ready();
    close(to[0]);
    r = ask("drain", NULL, NULL); /* logs a line into the broken pipe */
    cJSON_Delete(r);
    r = ask("ping", NULL, NULL);
    expect(r, "state", "draining");
    cJSON_Delete(r);
    kill(pid, SIGTERM);
    assert_int_equal(wait_end(pid), 0);
}

/* One event is one line, whatever is in the operands, and the line is whole. */
static void log_lines(void **state)
{
    char path[128], *text, huge[5000];
    struct k3_err err = K3_ERR_INIT;
    int saved = dup(2), fd;

    (void)state;
    snprintf(path, sizeof(path), "%s/lines", dir);
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(fd, 2);
    k3_log(K3_LOG_WARN, "odd", "name=%s n=%d", "two\nlines\r\x1b[31m", 5);
    k3_log(K3_LOG_DEBUG, "hidden", "x=1");
    memset(huge, 'h', sizeof(huge) - 1);
    huge[sizeof(huge) - 1] = 0;
    k3_log(K3_LOG_INFO, "huge", "text=%s", huge);
    k3_refuse(&err, -EINVAL, "a \"quoted\" word\nand more");
    k3_log_err(&err, "refused");
    k3_log(K3_LOG_INFO, "plain", NULL);
    dup2(saved, 2);
    close(saved);
    close(fd);
    text = slurp(path);
    assert_non_null(strstr(text, "level=warn event=odd name=two?lines??[31m n=5 at=20"));
    assert_null(strstr(text, "hidden"));
    assert_non_null(
        strstr(text, "level=error event=refused exit=2 text=\"a 'quoted' word?and more\" at="));
    assert_non_null(strstr(text, "level=info event=plain at="));
    {
        int lines = 0;

        for (char *p = text; (p = strchr(p, '\n')) != NULL; p++)
            lines++;
        assert_int_equal(lines, 4);
    }
    unlink(path);
}

static int set_up(void **state)
{
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    k3_log_open("daemon_test", K3_LOG_INFO);
    strcpy(dir, "/tmp/k3-daemon-test-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    setenv("XDG_RUNTIME_DIR", dir, 1);
    return k3_rundir(rundir, sizeof(rundir), INSTANCE, true, &err);
}

static int tear_down(void **state)
{
    char cmd[160];

    (void)state;
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
    return system(cmd);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_life),
        cmocka_unit_test(ends_by_signal_or_request),
        cmocka_unit_test(shuts_down_every_time),
        cmocka_unit_test(killed),
        cmocka_unit_test(second_one_is_refused),
        cmocka_unit_test(bad_options),
        cmocka_unit_test(leaves_with_its_parent),
        cmocka_unit_test(closed_stderr),
        cmocka_unit_test(log_lines),
    };

    if (argc > 1 && strcmp(argv[1], "daemon") == 0)
        return daemon_main(argc - 1, argv + 1);
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
