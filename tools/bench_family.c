/* Daemons of an instance of the benchmark's own. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <dirent.h>

#include "ipc/daemon.h"
#include "tools/bench.h"

#define MAX_OPTIONS 64

int k3_bench_family_open(struct k3_bench_family *f, struct k3_err *err)
{
    ssize_t n;
    char *slash;

    memset(f, 0, sizeof(*f));
    k3_bench_catch();
    snprintf(f->instance, sizeof(f->instance), "bench-%d", (int)getpid());
    n = readlink("/proc/self/exe", f->bin, sizeof(f->bin) - 1);
    if (n <= 0)
        return k3_fail(err, -errno, "/proc/self/exe: %s", strerror(errno));
    f->bin[n] = 0;
    slash = strrchr(f->bin, '/');
    if (slash)
        *slash = 0;
    return k3_rundir(f->rundir, sizeof(f->rundir), f->instance, true, err);
}

int k3_bench_family_start(struct k3_bench_family *f, const char *name, const char *const *options, struct k3_err *err)
{
    char program[4100], log[600];
    const char *argv[MAX_OPTIONS + 5];
    size_t n = 0;
    pid_t pid, parent = getpid();

    if (f->n_members == sizeof(f->member) / sizeof(*f->member))
        k3_bug("too many members");
    snprintf(program, sizeof(program), "%s/%s", f->bin, name);
    snprintf(log, sizeof(log), "%s/%s.log", f->rundir, name);
    argv[n++] = program;
    argv[n++] = "--instance";
    argv[n++] = f->instance;
    argv[n++] = "--supervised";
    for (; *options && n < MAX_OPTIONS + 4; options++)
        argv[n++] = *options;
    argv[n] = NULL;
    pid = fork();
    if (pid < 0)
        return k3_fail(err, -errno, "fork: %s", strerror(errno));
    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600), null = open("/dev/null", O_RDWR);

        if (fd < 0 || null < 0 || getppid() != parent)
            _exit(1);
        dup2(null, 0);
        dup2(null, 1);
        dup2(fd, 2);
        execv(program, (char *const *)argv);
        dprintf(2, "text=\"%s: %s\"\n", program, strerror(errno));
        _exit(1);
    }
    f->member[f->n_members].name = name;
    f->member[f->n_members++].pid = pid;
    return 0;
}

static struct k3_member *member(struct k3_bench_family *f, const char *name)
{
    for (uint32_t i = 0; i < f->n_members; i++)
        if (strcmp(f->member[i].name, name) == 0)
            return &f->member[i];
    k3_bug("%s was not started", name);
}

/* The words of the last error line of a member's log. */
static void last_words(const struct k3_bench_family *f, const char *name, char *out, size_t len)
{
    char log[600], line[1200], *text, *end;
    FILE *in;

    snprintf(log, sizeof(log), "%s/%s.log", f->rundir, name);
    snprintf(out, len, "no reason given");
    in = fopen(log, "re");
    while (in && fgets(line, sizeof(line), in)) {
        text = strstr(line, "text=\"");
        if (!text && strchr(line, ':') && !strstr(line, "event=")) { /* said before it had a log */
            line[strcspn(line, "\n")] = 0;
            snprintf(out, len, "%.*s", (int)len - 1, line);
        } else if (text) {
            text += strlen("text=\"");
            end = strrchr(text, '"');
            if (end)
                *end = 0;
            snprintf(out, len, "%.*s", (int)len - 1, text);
        }
    }
    if (in)
        fclose(in);
}

int k3_bench_family_wait(struct k3_bench_family *f, const char *name, double seconds, struct k3_err *err)
{
    struct k3_member *m = member(f, name);
    uint64_t until_ns = k3_now_ns() + (uint64_t)(seconds * 1e9);
    char words[900];
    int status;

    for (;;) {
        struct k3_stats s;
        struct k3_err ignored = K3_ERR_INIT;
        bool ready = false;

        if (k3_stats_open(&s, f->instance, name, &ignored) == 0) {
            ready = atomic_load(&s.page->state) == K3_READY && s.page->pid == (uint32_t)m->pid;
            k3_stats_close(&s);
        }
        if (ready)
            return 0;
        if (waitpid(m->pid, &status, WNOHANG) == m->pid) {
            m->pid = 0;
            last_words(f, name, words, sizeof(words));
            if (WIFEXITED(status) && WEXITSTATUS(status) == K3_EXIT_REFUSED)
                return k3_refuse(err, -EINVAL, "%s", words);
            return k3_fail(err, -ECHILD, "%s ended: %s", name, words);
        }
        if (k3_bench_stop)
            return k3_fail(err, -ECANCELED, "stopped");
        if (k3_now_ns() > until_ns)
            return k3_fail(err, -ETIMEDOUT, "%s is not ready after %.0f s; its log is %s/%s.log", name, seconds, f->rundir,
                           name);
        k3_bench_progress("waiting for %s", name);
        k3_bench_nap(0.02);
    }
}

int k3_bench_family_stats(const struct k3_bench_family *f, const char *name, struct k3_stats *out, struct k3_err *err)
{
    int rc = k3_stats_open(out, f->instance, name, err);

    return rc == -ENOENT ? k3_no_peer(err, rc, "%s has no statistics page: it has ended", name) : rc;
}

static void remove_all(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            (void)unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
    (void)rmdir(dir);
}

void k3_bench_family_close(struct k3_bench_family *f)
{
    static const char *const segments[] = { "trunk", "trunkdata", "expert", "expertdata" };
    char *slash;

    for (uint32_t i = f->n_members; i-- > 0;)
        if (f->member[i].pid > 0)
            kill(f->member[i].pid, SIGTERM);
    for (uint32_t i = f->n_members; i-- > 0;) {
        int left = 500; /* 10 s */

        if (f->member[i].pid <= 0)
            continue;
        while (waitpid(f->member[i].pid, NULL, WNOHANG) == 0) {
            if (left-- == 0)
                kill(f->member[i].pid, SIGKILL);
            k3_bench_nap(0.02);
        }
    }
    f->n_members = 0;
    if (!f->rundir[0])
        return;
    for (size_t i = 0; i < sizeof(segments) / sizeof(*segments); i++) /* of a member that had to be killed */
        k3_seg_unlink(f->instance, segments[i]);
    remove_all(f->rundir);
    slash = strrchr(f->rundir, '/');
    if (slash) { /* the common directory, when it is empty */
        *slash = 0;
        (void)rmdir(f->rundir);
    }
    f->rundir[0] = 0;
}
