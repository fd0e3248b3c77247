/* k3ctl: looks at and commands each daemon of an instance on its own. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "model/config.h"
#include "tools/ctl.h"

static const char summary[] =
    "looks at and commands the daemons of an instance\n"
    "  stats [DAEMON]         counters, from the pages in shared memory alone: also of dead "
    "daemons;\n"
    "                         --watch: the family at work\n"
    "  ping [DAEMON]          who answers\n"
    "  wait                   until every member is ready\n"
    "  info [DAEMON]          version, options and what each daemon says of itself\n"
    "  drain [DAEMON]         take no new work, until it is started anew (k3-run restart)\n"
    "  shutdown [DAEMON]      leave in order (k3-run starts it anew; to stop the family: k3-run "
    "down)\n"
    "  log LEVEL [DAEMON]     error, warn, info or debug\n"
    "  cancel ID              end a request\n"
    "  trace start FILE       k3-computed writes down which experts every row is routed to, for "
    "k3-sim\n"
    "  trace stop [FILE]      until now\n"
    "  verify                 reads a whole checkpoint and compares it with its k3.sums (--make: "
    "writes\n"
    "                         k3.sums; goes on where it was stopped).  Needs no daemon when --model "
    "is given";

static const struct command {
    const char *name;
    uint32_t min_words, max_words; /* after the command */
    int (*run)(const struct k3_ctl_opt *o, struct k3_err *err);
    const char *options; /* its own, beside --instance; each with a blank behind it */
} commands[] = {
    { "stats", 0, 1, k3_ctl_stats, "watch json prometheus " },
    { "ping", 0, 1, k3_ctl_ping, "json " },
    { "wait", 0, 0, k3_ctl_wait, "timeout " },
    { "info", 0, 1, k3_ctl_info, "json " },
    { "drain", 0, 1, k3_ctl_tell, "" },
    { "shutdown", 0, 1, k3_ctl_tell, "keep " },
    { "log", 1, 2, k3_ctl_tell, "" },
    { "cancel", 1, 1, k3_ctl_cancel, "" },
    { "trace", 1, 2, k3_ctl_trace, "lookahead " },
    { "verify", 0, 0, k3_ctl_verify, "model layers make replace " },
};

static int usage(const char *text, const char *word)
{
    fprintf(stderr, "k3ctl: ");
    fprintf(stderr, text, word);
    fprintf(stderr, "; commands are stats, ping, wait, info, drain, shutdown, log, cancel, trace, "
            "verify\n");
    return K3_EXIT_REFUSED;
}

/* The first option given that the command would pass over; NULL when there is none. */
static const char *useless_option(const struct command *c, const struct k3_ctl_opt *o)
{
    const struct { const char *name; bool given; } given[] = {
        { "watch ", o->watch_s > 0 }, { "json ", o->json },        { "prometheus ", o->prometheus },
        { "keep ", o->keep },         { "timeout ", o->timeout_s >= 0 },
        { "model ", o->model },       { "layers ", o->n_layers },
        { "make ", o->make }, { "replace ", o->replace },         { "lookahead ", o->lookahead },
    };

    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++)
        if (given[i].given && !strstr(c->options, given[i].name))
            return given[i].name;
    return NULL;
}

/* "--watch" may stand alone; the option table knows only options with a value. */
static void default_watch(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        double seconds;

        if (strcmp(argv[i], "--") == 0)
            return;
        if (strcmp(argv[i], "--watch") == 0 &&
            (i + 1 == argc || k3_parse_double(argv[i + 1], -1e9, 1e9, &seconds) != 0))
            argv[i] = "--watch=1";
    }
}

int main(int argc, char **argv)
{
    struct k3_ctl_opt o = { .instance = "default", .timeout_s = -1, .words.name = "COMMAND [ARGUMENT]" };
    struct k3_err err = K3_ERR_INIT;
    const struct k3_opt table[] = {
        { "instance", K3_OPT_STRING, &o.instance, "NAME", "instance name (default \"default\")", 0,
          0 },
        { "watch", K3_OPT_DOUBLE, &o.watch_s, "S",
          "stats: again every S seconds (default 1), with rates; a full\nscreen at a terminal (q leaves)", 0.05, 86400 },
        { "json", K3_OPT_FLAG, &o.json, NULL, "stats, ping, info: one JSON object", 0, 0 },
        { "prometheus", K3_OPT_FLAG, &o.prometheus, NULL, "stats: Prometheus text format", 0, 0 },
        { "timeout", K3_OPT_DOUBLE, &o.timeout_s, "S", "wait: at most S seconds (default 60)", 0,
          1e6 },
        { "keep", K3_OPT_FLAG, &o.keep, NULL, "shutdown: leave the segments for the successor", 0,
          0 },
        { "model", K3_OPT_STRING, &o.model, "DIR",
          "verify: the checkpoint (default: that of the running instance)", 0, 0 },
        { "layers", K3_OPT_U32, &o.n_layers, "N", "verify: only the first N layers", 1,
          K3_MAX_LAYERS },
        { "make", K3_OPT_FLAG, &o.make, NULL, "verify: write k3.sums into the checkpoint", 0, 0 },
        { "replace", K3_OPT_FLAG, &o.replace, NULL, "verify --make: also where there is one", 0, 0 },
        { "lookahead", K3_OPT_FLAG, &o.lookahead, NULL,
          "trace start: also what the next layer's gate picks a layer earlier", 0, 0 },
        { NULL },
    };
    const struct command *c = NULL;
    const char *useless;
    int rc, status;

    default_watch(argc, argv);
    if (k3_opts_parse(table, "k3ctl", summary, argc, argv, &o.words, &status))
        return status;
    if (o.words.n == 0)
        return usage("a command is missing%s", "");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(commands[i].name, o.words.item[0]) == 0)
            c = &commands[i];
    if (!c)
        return usage("unknown command \"%s\"", o.words.item[0]);
    if (o.words.n - 1 < c->min_words)
        return usage("\"%s\" needs an argument, see --help", c->name);
    if (o.words.n - 1 > c->max_words)
        return usage("unexpected \"%s\"", o.words.item[1 + c->max_words]);
    useless = useless_option(c, &o);
    if (useless) {
        fprintf(stderr, "k3ctl: %s does not take --%.*s; see --help\n", c->name,
                (int)strlen(useless) - 1, useless);
        return K3_EXIT_REFUSED;
    }
    if (o.timeout_s < 0)
        o.timeout_s = 60;
    if (o.json && o.prometheus)
        return usage("--json and --prometheus exclude each other%s", "");
    rc = k3_rundir(o.rundir, sizeof(o.rundir), o.instance, false, &err);
    if (rc == -ENOENT)
        k3_no_peer(&err, rc, "instance \"%s\" is not running (no directory %s); %sstart it with: "
                   "run/k3-run up --instance %s", o.instance, o.rundir,
                   c->run == k3_ctl_verify ? "give the checkpoint with --model DIR, or " : "", o.instance);
    /* Pages can be read without a run directory, it is worth waiting for, and files need none; the
     * rest needs the sockets in it. */
    if (rc == 0 || (rc == -ENOENT && (c->run == k3_ctl_stats || c->run == k3_ctl_wait)) ||
        (c->run == k3_ctl_verify && o.model))
        rc = c->run(&o, &err);
    if (rc < 0)
        fprintf(stderr, "k3ctl: %s\n", err.text);
    if ((fflush(stdout) != 0 || ferror(stdout)) && rc >= 0) {
        fprintf(stderr, "k3ctl: stdout cannot be written\n");
        return K3_EXIT_FAILED;
    }
    return k3_exit_status(rc, &err);
}
