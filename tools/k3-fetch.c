/* k3-fetch: downloads a model repository from a hub, and takes nothing that has not the sum that the hub announces. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "model/config.h"
#include "tools/fetch.h"

static void on_signal(int signal_number)
{
    (void)signal_number;
    k3_fetch_stop();
}

static void catch_signals(void)
{
    struct sigaction a = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    static const int ends[] = { SIGINT, SIGTERM, SIGHUP };

    sigemptyset(&a.sa_mask);
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        sigaction(ends[i], &a, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit of the file size is refused in words */
}

int main(int argc, char **argv)
{
    const char *hub = getenv("HF_ENDPOINT");
    struct k3_fetch_opts o = { .repo = K3_FETCH_REPO, .revision = "main", .base = hub && *hub ? hub : K3_FETCH_BASE,
                               .env_token = getenv("HF_TOKEN"), .parallel = 8, .retries = 10, .stall_s = 30, .delay_s = 1 };
    const struct k3_opt table[] = {
        { "out", K3_OPT_STRING, &o.out, "DIR", "the directory that gets the files; made when it is not there", 0, 0 },
        { "repo", K3_OPT_STRING, &o.repo, "OWNER/NAME", "the repository (default " K3_FETCH_REPO ")", 0, 0 },
        { "revision", K3_OPT_STRING, &o.revision, "REV", "branch, tag or commit (default main)", 0, 0 },
        { "base", K3_OPT_STRING, &o.base, "URL", "the hub (default $HF_ENDPOINT, else " K3_FETCH_BASE ")", 0, 0 },
        { "layers", K3_OPT_U32, &o.n_layers, "N", "only the shards that the first N layers need", 1, K3_MAX_LAYERS },
        { "also", K3_OPT_LIST, &o.also, "FILE", "a further file of the repository", 0, 0 },
        { "list", K3_OPT_FLAG, &o.list, NULL, "say what there is and what would be fetched, and write nothing", 0, 0 },
        { "verify", K3_OPT_FLAG, &o.verify, NULL, "compare what is there with the hub's sums, and write nothing", 0, 0 },
        { "parallel", K3_OPT_U32, &o.parallel, "N", "files at the same time, a connection each (default 8)", 1, 64 },
        { "retries", K3_OPT_U32, &o.retries, "N", "tries in a row that bring nothing (default 10)", 0, 1000 },
        { "retry-delay", K3_OPT_DOUBLE, &o.delay_s, "S", "before the second try; then twice as long each time, up to 60 (default 1)", 0.001, 60 },
        { "stall", K3_OPT_DOUBLE, &o.stall_s, "S", "a connection that brings less than 1 kB/s for so long is given up (default 30)", 1, 3600 },
        { "token-file", K3_OPT_STRING, &o.token_file, "FILE", "the token for the hub (default $HF_TOKEN); mode 600", 0, 0 },
        { "insecure-http", K3_OPT_FLAG, &o.insecure_http, NULL, "allow a hub of http:// on another machine", 0, 0 },
        { "unsummed", K3_OPT_FLAG, &o.unsummed, NULL, "take files without an announced sum by their size", 0, 0 },
        { NULL },
    };
    struct k3_err err = K3_ERR_INIT;
    int rc, status;

    if (k3_opts_parse(table, "k3-fetch",
                      "downloads a model; takes nothing that has not the sum that the hub announces\n"
                      "  When stopped, or when the network was, the same command goes on where it was.",
                      argc, argv, NULL, &status))
        return status;
    if (!k3_fetch_repo_ok(o.repo))
        rc = k3_refuse(&err, -EINVAL, "--repo %.200s: must be OWNER/NAME", o.repo);
    else if (!o.revision[0] || strlen(o.revision) > 100)
        rc = k3_refuse(&err, -EINVAL, "--revision: must be a branch, tag or commit");
    else if (o.list && o.verify)
        rc = k3_refuse(&err, -EINVAL, "--list and --verify exclude each other");
    else if (!o.out && !o.list)
        rc = k3_refuse(&err, -EINVAL, "--out DIR is needed");
    else {
        catch_signals();
        rc = k3_fetch_run(&o, &err);
    }
    if ((fflush(stdout) != 0 || ferror(stdout)) && rc >= 0)
        rc = k3_fail(&err, -EIO, "stdout cannot be written");
    if (rc < 0)
        fprintf(stderr, "k3-fetch: %s\n", err.text);
    return k3_exit_status(rc, &err);
}
