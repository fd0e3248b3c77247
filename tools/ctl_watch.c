/* k3ctl stats --watch: what the family does, again and again.
 *
 * All of it is from the pages in shared memory, the head of the trunk's control segment, k3-run's list of members and /proc; only
 * the number of layers and the rates of the drives are asked of the daemons, once for each process, and done without when
 * they do not answer.  Of a daemon that is gone its state is shown and no number. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "shm/trunk.h"
#include "tools/ctl.h"

#define INFO_MS 300
#define INFO_AGAIN_NS 5000000000u
#define BOLD "\033[1m"
#define GOOD "\033[32m"
#define WARN "\033[33m"
#define BAD "\033[31m"
#define PLAIN "\033[0m"

/* What a daemon says of itself once. */
struct asked { uint32_t pid; uint64_t at_ns; double layers, drive_bytes_per_s; bool known; };
struct member { char name[32], state[16]; unsigned restarts; int code; };

struct watch {
    const struct k3_ctl_opt *o;
    struct k3_ctl_names *names;
    struct k3_ctl_look now, before;
    struct asked asked[3]; /* trunkd, expertd, computed */
    struct member member[K3_CTL_DAEMONS];
    uint32_t n_members;
    unsigned columns;
};

static const char *const weights[] = { "k3-trunkd", "k3-expertd", "k3-computed" };

/* ---- facts ---- */

static const struct k3_ctl_sample *sample_of(const struct k3_ctl_look *l, const char *daemon)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (strcmp(l->s[i].daemon, daemon) == 0)
            return &l->s[i];
    return NULL;
}

/* Of a daemon that lives; 0 otherwise. */
static double value(const struct watch *w, const char *daemon, const char *name)
{
    const struct k3_ctl_sample *s = sample_of(&w->now, daemon);
    const struct k3_ctl_value *v = s && s->alive ? k3_ctl_find(s, name) : NULL;

    return v ? (double)v->v[0] : 0;
}

static bool alive(const struct watch *w, const char *daemon)
{
    const struct k3_ctl_sample *s = sample_of(&w->now, daemon);

    return s && s->alive;
}

static void read_members(struct watch *w)
{
    char path[600], line[512];
    FILE *f;

    w->n_members = 0;
    snprintf(path, sizeof(path), "%s/k3-run.members", w->o->rundir);
    f = fopen(path, "re");
    while (f && w->n_members < K3_CTL_DAEMONS && fgets(line, sizeof(line), f)) {
        struct member *m = &w->member[w->n_members];
        if (sscanf(line, "%31s %15s %*s %u %d", m->name, m->state, &m->restarts, &m->code) == 4)
            w->n_members++;
    }
    if (f)
        fclose(f);
}

static const struct member *member_of(const struct watch *w, const char *daemon)
{
    for (uint32_t i = 0; i < w->n_members; i++)
        if (strcmp(w->member[i].name, daemon) == 0)
            return &w->member[i];
    return NULL;
}

static double number_of(const cJSON *o, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);

    return cJSON_IsNumber(v) && v->valuedouble > 0 ? v->valuedouble : 0;
}

/* Asks those that are new. */
static void ask(struct watch *w)
{
    for (size_t i = 0; i < 3; i++) {
        const struct k3_ctl_sample *s = sample_of(&w->now, weights[i]);
        struct asked *a = &w->asked[i];
        cJSON *request, *reply = NULL;
        const cJSON *drive;

        if (!s || !s->alive || (a->pid == s->pid && (a->known || k3_now_ns() - a->at_ns < INFO_AGAIN_NS)))
            continue;
        *a = (struct asked){ .pid = s->pid, .at_ns = k3_now_ns() };
        request = cJSON_CreateObject();
        cJSON_AddStringToObject(request, "cmd", "info");
        a->known = k3_ctl_ask(w->o, weights[i], request, INFO_MS, &reply, NULL) == 0;
        a->layers = number_of(reply, "layers");
        cJSON_ArrayForEach(drive, cJSON_GetObjectItemCaseSensitive(reply, "drives"))
            a->drive_bytes_per_s += number_of(drive, "bytes_per_s");
        cJSON_Delete(reply);
        cJSON_Delete(request);
    }
}

/* Bytes of the ring that are read and not yet used, its size, and how far the pass is in the stream.  False: no trunkd. */
static bool ring(const struct watch *w, double *filled, double *size, double *through)
{
    struct k3_seg seg = K3_SEG_INIT;
    const struct k3_trunk_ctl *c;
    uint64_t produced, consumed;
    bool ok;

    if (!alive(w, "k3-trunkd") || k3_seg_open(&seg, w->o->instance, "trunk", false, NULL) < 0)
        return false;
    c = (const struct k3_trunk_ctl *)seg.base;
    ok = seg.len_bytes >= sizeof(*c) && c->magic == K3_TRUNK_MAGIC && c->version == K3_TRUNK_VERSION && c->ring_bytes > 0;
    if (ok) {
        consumed = atomic_load_explicit(&c->b.consumed, memory_order_relaxed);
        produced = atomic_load_explicit(&c->a.produced, memory_order_relaxed);
        *size = (double)c->ring_bytes;
        *filled = produced > consumed ? (double)(produced - consumed) : 0;
        *filled = *filled > *size ? *size : *filled;
        *through = c->pass_bytes ? (double)(consumed % c->pass_bytes) / (double)c->pass_bytes : 0;
    }
    k3_seg_close(&seg);
    return ok;
}

/* Memory of a process that is its own (shared segments are counted by their owners' pages); 0: not known. */
static double own_bytes(uint32_t pid)
{
    char path[64], line[256];
    unsigned long kb = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%u/status", pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "RssAnon: %lu", &kb) == 1)
            break;
    if (f)
        fclose(f);
    return (double)kb * 1024;
}

/* ---- lines ---- */

static void bar(FILE *f, double share, unsigned width)
{
    unsigned n = (unsigned)((share < 0 ? 0 : share > 1 ? 1 : share) * width + 0.5);

    putc('[', f);
    for (unsigned i = 0; i < width; i++)
        putc(i < n ? '#' : '.', f);
    putc(']', f);
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static void put_head(const struct watch *w, FILE *f, const struct k3_ctl_summary *s)
{
    double seconds = (double)s->seconds_ns / 1e9;
    char clock[16] = "";
    time_t t = time(NULL);
    struct tm tm;

    if (localtime_r(&t, &tm))
        strftime(clock, sizeof(clock), "%H:%M:%S", &tm);
    fprintf(f, BOLD "k3 \"%s\"" PLAIN "  %s  %s %.1f s\n\n", w->o->instance, clock,
            w->before.n ? "the last" : "since the start,", seconds);
}

static void put_tokens(const struct watch *w, FILE *f, const struct k3_ctl_summary *s)
{
    double seconds = (double)s->seconds_ns / 1e9;
    char pass[32];

    fprintf(f, BOLD "tokens  %8.2f /s" PLAIN "  %.0f in all   passes %.2f /s, %s each   rows %.0f\n",
            seconds > 0 ? (double)s->tokens / seconds : 0, value(w, "k3-computed", "tokens_generated"),
            seconds > 0 ? (double)s->passes / seconds : 0,
            s->passes ? k3_ctl_ns(pass, (double)s->pass_ns / (double)s->passes) : "-", value(w, "k3-computed", "pass_rows"));
    fprintf(f, "answers %.0f running, %.0f queued, %.0f positions held\n", value(w, "k3-computed", "sequences_running"),
            value(w, "k3-computed", "sequences_queued"), value(w, "k3-computed", "positions"));
}

static void put_pass(const struct watch *w, FILE *f, const struct k3_ctl_summary *s)
{
    static const char *const waits[] = { "", "  waits for trunk", "  waits for experts" };
    double layer = value(w, "k3-computed", "layer"), layers = w->asked[2].layers, waiting = value(w, "k3-computed", "waiting");
    unsigned width = w->columns > 60 ? w->columns - 50 : 10;

    fprintf(f, "pass    ");
    bar(f, layers > 0 ? layer / layers : 0, width < 60 ? width : 60);
    if (layer < 1)
        fprintf(f, " idle\n");
    else if (layers > 0)
        fprintf(f, " layer %.0f/%.0f%s\n", layer, layers, waiting < 3 ? waits[(int)waiting] : "");
    else
        fprintf(f, " layer %.0f%s\n", layer, waiting < 3 ? waits[(int)waiting] : "");
    fprintf(f, "time    %.0f %% waiting for trunk, %.0f %% for experts, %.0f %% arithmetic\n",
            percent((double)s->trunk_wait_ns, (double)s->pass_ns), percent((double)s->expert_wait_ns, (double)s->pass_ns),
            percent((double)s->arithmetic_ns, (double)s->pass_ns));
}

static void put_ring(const struct watch *w, FILE *f)
{
    unsigned width = w->columns > 60 ? w->columns - 50 : 10;
    double filled, size, through;
    char a[32], b[32];

    if (!ring(w, &filled, &size, &through)) {
        fprintf(f, "ring    k3-trunkd is not there\n");
        return;
    }
    fprintf(f, "ring    ");
    bar(f, filled / size, width < 60 ? width : 60);
    fprintf(f, " %s of %s read ahead\n", k3_ctl_bytes(a, filled), k3_ctl_bytes(b, size));
}

static void put_drive(const struct watch *w, FILE *f, const char *label, size_t daemon, double bytes_per_s)
{
    double most = w->asked[daemon].drive_bytes_per_s;
    char a[32], b[32];

    fprintf(f, "%s", label);
    if (!alive(w, weights[daemon])) {
        fprintf(f, "%s is not there\n", weights[daemon]);
        return;
    }
    fprintf(f, "%10s/s", k3_ctl_bytes(a, bytes_per_s));
    if (most > 0)
        fprintf(f, ", %.0f %% of the %s/s of its drives", percent(bytes_per_s, most), k3_ctl_bytes(b, most));
    fprintf(f, ", %.0f in flight\n", value(w, weights[daemon], "in_flight"));
}

static void put_experts(const struct watch *w, FILE *f, const struct k3_ctl_summary *s)
{
    fprintf(f, "experts %.1f %% hits (%" PRIu64 " of %" PRIu64 "), %.0f of %.0f slots hold one, %.0f evictions\n",
            percent((double)s->hits, (double)s->demands), s->hits, s->demands, value(w, "k3-expertd", "slots_ready"),
            value(w, "k3-expertd", "slots"), value(w, "k3-expertd", "evictions"));
}

static void put_memory(const struct watch *w, FILE *f)
{
    double arena = value(w, "k3-expertd", "slots") * value(w, "k3-expertd", "slot_bytes"), own = 0,
           swapped = value(w, "k3-trunkd", "swapped_bytes") + value(w, "k3-expertd", "swapped_bytes");
    char a[32], b[32], c[32], d[32], e[32];

    for (uint32_t i = 0; i < w->now.n; i++)
        own += w->now.s[i].alive ? own_bytes(w->now.s[i].pid) : 0;
    fprintf(f, "memory  trunk %s pinned, %s ring, %s resident; experts %s;\n",
            k3_ctl_bytes(a, value(w, "k3-trunkd", "pinned_bytes")), k3_ctl_bytes(b, value(w, "k3-trunkd", "ring_bytes")),
            k3_ctl_bytes(c, value(w, "k3-trunkd", "resident_bytes")), k3_ctl_bytes(d, arena));
    fprintf(f, "        the processes' own %s", k3_ctl_bytes(e, own));
    if (swapped > 0)
        fprintf(f, "; " BAD "%s in swap" PLAIN, k3_ctl_bytes(a, swapped));
    fprintf(f, "\n\n");
}

/* What became of a daemon, in one or two words. */
static const char *state_of(const struct watch *w, const char *daemon, const struct k3_ctl_sample *s, char out[40])
{
    const struct member *m = member_of(w, daemon);

    if (s && s->alive)
        snprintf(out, 40, "%s", k3_ctl_liveness(s));
    else if (m && strcmp(m->state, "failed") == 0)
        snprintf(out, 40, "failed (exit %d)", m->code);
    else if (m)
        snprintf(out, 40, "gone, restarting");
    else
        snprintf(out, 40, "gone");
    return out;
}

static void put_daemon(const struct watch *w, FILE *f, const char *daemon)
{
    const struct k3_ctl_sample *s = sample_of(&w->now, daemon);
    const struct member *m = member_of(w, daemon);
    bool here = s && s->alive, well;
    char state[40], up[32], beat[32], own[32];

    state_of(w, daemon, s, state);
    well = here && strcmp(state, "ready") == 0;
    fprintf(f, "%-12s%s%-18s" PLAIN, daemon, well ? GOOD : here ? WARN : BAD, state);
    if (here)
        fprintf(f, "%8u %10s %7s %10s", s->pid, k3_ctl_age(up, s->up_ns), k3_ctl_age(beat, s->beat_age_ns),
                k3_ctl_bytes(own, own_bytes(s->pid)));
    else
        fprintf(f, "%8s %10s %7s %10s", "-", "-", "-", "-");
    if (m)
        fprintf(f, " %8u", m->restarts);
    putc('\n', f);
}

/* All daemons that k3-run means to run, and whatever else has a page. */
static void put_daemons(const struct watch *w, FILE *f)
{
    fprintf(f, BOLD "%-12s%-18s%8s %10s %7s %10s %8s" PLAIN "\n", "DAEMON", "STATE", "PID", "UP", "BEAT", "OWN MEMORY", "RESTARTS");
    for (uint32_t i = 0; i < w->n_members; i++)
        put_daemon(w, f, w->member[i].name);
    for (uint32_t i = 0; i < w->now.n; i++)
        if (!member_of(w, w->now.s[i].daemon))
            put_daemon(w, f, w->now.s[i].daemon);
}

static void put_family(const struct watch *w, FILE *f)
{
    struct k3_ctl_summary s;
    struct k3_ctl_sample living[K3_CTL_DAEMONS];
    uint32_t n = 0;
    double seconds;

    for (uint32_t i = 0; i < w->now.n; i++)
        if (w->now.s[i].alive)
            living[n++] = w->now.s[i];
    k3_ctl_summarize(&s, living, n, w->before.n ? w->before.s : NULL, w->before.n);
    seconds = (double)s.seconds_ns / 1e9;
    put_head(w, f, &s);
    if (alive(w, "k3-computed")) {
        put_tokens(w, f, &s);
        put_pass(w, f, &s);
    } else {
        fprintf(f, "tokens  k3-computed is not there\n");
    }
    put_ring(w, f);
    put_drive(w, f, "trunk   ", 0, seconds > 0 ? (double)s.trunk_bytes / seconds : 0);
    put_drive(w, f, "experts ", 1, seconds > 0 ? (double)s.expert_bytes / seconds : 0);
    if (alive(w, "k3-computed") && alive(w, "k3-expertd"))
        put_experts(w, f, &s);
    put_memory(w, f);
    put_daemons(w, f);
}

/* One daemon: all of its numbers. */
static void put_one(const struct watch *w, FILE *f)
{
    const char *daemon = w->names->name[0];
    const struct k3_ctl_sample *s = sample_of(&w->now, daemon);
    char state[40];

    if (s && s->alive)
        k3_ctl_print_daemon(f, s, sample_of(&w->before, daemon));
    else
        fprintf(f, "%s  " BAD "%s" PLAIN "\n", daemon, state_of(w, daemon, s, state));
}

static int show(struct watch *w, struct k3_screen *screen, struct k3_err *err)
{
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);

    if (!f)
        return k3_fail(err, -ENOMEM, "stats --watch: no memory");
    w->columns = screen->full ? screen->columns : 80;
    if (w->o->words.n > 1)
        put_one(w, f);
    else
        put_family(w, f);
    if (screen->full)
        fprintf(f, "\nq leaves\n");
    if (fclose(f) != 0) {
        free(text);
        return k3_fail(err, -ENOMEM, "stats --watch: no memory");
    }
    k3_screen_show(screen, text);
    free(text);
    return 0;
}

/* A daemon that is not there is shown as that. */
static void look(struct watch *w)
{
    struct k3_err nobody = K3_ERR_INIT;

    k3_ctl_look(&w->now, w->o, w->names, &nobody);
    read_members(w);
    ask(w);
}

int k3_ctl_watch(const struct k3_ctl_opt *o, struct k3_ctl_names *names, struct k3_err *err)
{
    struct watch w = { .o = o, .names = names };
    struct k3_screen screen;
    int rc = k3_ctl_look(&w.now, o, names, err); /* nothing at all is no family to watch */

    if (rc < 0)
        return rc;
    k3_ctl_look_free(&w.now);
    k3_screen_open(&screen);
    do {
        enum k3_screen_event event = K3_SCREEN_QUIT;
        uint64_t due = k3_now_ns() + (uint64_t)(o->watch_s * 1e9), now;

        look(&w);
        rc = show(&w, &screen, err);
        while (rc == 0 && (now = k3_now_ns(), event = k3_screen_wait(&screen, due > now ? (double)(due - now) / 1e9 : 0)) ==
                              K3_SCREEN_RESIZED)
            rc = show(&w, &screen, err);
        k3_ctl_look_free(&w.before);
        w.before = w.now;
        w.now.n = 0;
        if (rc < 0 || event == K3_SCREEN_QUIT)
            break;
    } while (true);
    k3_screen_close(&screen);
    k3_ctl_look_free(&w.before);
    return rc;
}
