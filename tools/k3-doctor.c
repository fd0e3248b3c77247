/* k3-doctor: can this machine run the model, how fast, and with which command (doctor.h). */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/device.h"
#include "ipc/daemon.h"
#include "ipc/parse.h"
#include "k3-computed/team.h"
#include "tools/doctor.h"

struct cmdline {
    const char *model, *trunk_device, *report, *shm;
    struct k3_str_list expert_devices;
    uint32_t ctx, sequences;
    double rate;
};

void k3_doctor_say(struct k3_doctor *d, enum k3_finding f, const char *name, const char *fmt, ...)
{
    static const char *const words[] = { "ok", "slow", "BAD" };
    cJSON *o = cJSON_CreateObject();
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    printf("%-5s %-16s %s\n", words[f], name, text);
    cJSON_AddStringToObject(o, "name", name);
    cJSON_AddStringToObject(o, "result", words[f]);
    cJSON_AddStringToObject(o, "text", text);
    cJSON_AddItemToArray(d->checks, o);
    d->n_bad += f == K3_FOUND_BAD;
}

void k3_doctor_number(struct k3_doctor *d, const char *key, double value)
{
    cJSON *last = cJSON_GetArrayItem(d->checks, cJSON_GetArraySize(d->checks) - 1);

    cJSON_AddNumberToObject(last, key, value);
}

static bool parse(struct cmdline *c, int argc, char **argv, int *status)
{
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &c->model, "DIR", "the checkpoint; without one the released shape is assumed" },
        { "trunk-device", K3_OPT_STRING, &c->trunk_device, "DIR", "the trunk's shards are read here" },
        { "expert-device", K3_OPT_LIST, &c->expert_devices, "DIR", "directory with shards of experts" },
        { "ctx", K3_OPT_U32, &c->ctx, "N", "positions of one sequence (default 4096)", 1, 1u << 24 },
        { "sequences", K3_OPT_U32, &c->sequences, "N", "sequences at the same time (default 1)", 1, 256 },
        { "rate", K3_OPT_DOUBLE, &c->rate, "X", "take X GB/s for every drive", 1e-6, 1e6 },
        { "report", K3_OPT_STRING, &c->report, "FILE", "write what was found as JSON" },
        { "shm-dir", K3_OPT_STRING, &c->shm, "DIR", "where segments would be (default /dev/shm; tests)" },
        { NULL },
    };

    return k3_opts_parse(table, "k3-doctor", "can this machine run the model, how fast, and with which command", argc, argv,
                         NULL, status);
}

static int open_model(const struct cmdline *c, const char **dirs, size_t n, struct k3_model **m, struct k3_err *err)
{
    const char *all[2 + sizeof(c->expert_devices.item) / sizeof(c->expert_devices.item[0])];
    struct k3_model_opts mo = { .dirs = all };

    if (!c->model)
        return k3_plan_released(m, err);
    all[mo.n_dirs++] = c->model;
    for (size_t i = 0; i < n; i++)
        if (dirs[i] != c->model)
            all[mo.n_dirs++] = dirs[i];
    return k3_model_open(m, &mo, err);
}

static bool same_drive(const char *a, const char *b)
{
    struct k3_err ignored = K3_ERR_INIT;
    struct k3_device x, y;

    return k3_device_of(a, NULL, &x, &ignored) < 0 || k3_device_of(b, NULL, &y, &ignored) < 0 ||
           k3_device_same_drive(&x, &y);
}

/* Appends a word to a command for the shell, between single quotes where it needs them. */
static void add_word(char *command, size_t len, const char *word)
{
    const char *plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@%";
    bool quote = !*word || word[strspn(word, plain)];
    size_t at = strlen(command);

    at += (size_t)snprintf(command + at, len - at, quote ? " '" : " ");
    for (; *word && at + 6 < len; word++)
        at += (size_t)snprintf(command + at, len - at, *word == '\'' ? "'\\''" : "%c", *word);
    snprintf(command + at, len - at, quote ? "'" : "");
}

/* auto where it fits, else the floor; false when there is none. */
static bool choose(struct k3_plan *p, const struct k3_model *m, struct k3_plan_opts *o, const struct k3_plan_machine *mc,
                   char *how, size_t len, struct k3_err *err)
{
    struct k3_err ignored = K3_ERR_INIT;

    if (k3_plan_make(p, m, o, mc, &ignored) == 0) {
        snprintf(how, len, "--preset auto");
        return true;
    }
    o->memory_bytes = mc->left_bytes > mc->promised_bytes ? (mc->left_bytes - mc->promised_bytes) / 20 * 19 : 0;
    o->memory_bytes = o->memory_bytes >> 20 << 20;
    snprintf(how, len, "--memory %" PRIu64 "M", o->memory_bytes >> 20);
    return k3_plan_make(p, m, o, mc, err) == 0;
}

static void advise(struct k3_doctor *d, const struct cmdline *c, const struct k3_model *m, const struct k3_doctor_speed *s,
                   const char *const *dirs, size_t n)
{
    struct k3_plan_opts o = { .memory_bytes = K3_PLAN_UNSET, .trunk_bytes = K3_PLAN_UNSET, .cache_bytes = K3_PLAN_UNSET,
                              .ctx = c->ctx, .sequences = c->sequences, .snapshots = K3_PLAN_CHOOSE, .threads = k3_threads_default() };
    struct k3_plan_machine mc = { .promised_bytes = 0 };
    struct k3_err err = K3_ERR_INIT;
    struct k3_memory memory;
    struct k3_plan p;
    char how[64], command[16384];
    double drive, work, touched_experts, limit;
    uint64_t size;
    cJSON *advice = cJSON_AddObjectToObject(d->report, "advice");

    k3_memory_read("", &memory);
    mc.left_bytes = k3_memory_left(&memory, mc.why, sizeof(mc.why));
    mc.promised_bytes = k3_reserve_others("", c->shm, "", &mc.n_others);
    k3_memory_shm(c->shm, &mc.shm_bytes, &size);
    o.split = n > 1;
    for (size_t i = 1; i < n; i++)
        o.split = o.split && !same_drive(dirs[0], dirs[i]);
    if (!choose(&p, m, &o, &mc, how, sizeof(how), &err)) {
        k3_doctor_say(d, K3_FOUND_BAD, "plan", "%s", err.text);
        return;
    }
    k3_doctor_say(d, K3_FOUND_OK, "plan", "%s: %.2f GB, %.1f%% of the trunk pinned, %" PRIu64 " of %" PRIu64 " experts; %s", how,
                  (double)p.sum_bytes / 1e9, p.trunk_total_bytes ? 100.0 * (double)p.pinned_bytes / (double)p.trunk_total_bytes
                                                                 : 100.0, p.n_slots, p.n_experts, p.reason);
    snprintf(command, sizeof(command), "run/k3-run up --model");
    add_word(command, sizeof(command), c->model ? c->model : "DIR");
    snprintf(command + strlen(command), sizeof(command) - strlen(command), " %s", how);
    if (c->trunk_device) {
        snprintf(command + strlen(command), sizeof(command) - strlen(command), " --trunk-device");
        add_word(command, sizeof(command), c->trunk_device);
    }
    for (size_t i = 0; i < c->expert_devices.n; i++) {
        snprintf(command + strlen(command), sizeof(command) - strlen(command), " --expert-device");
        add_word(command, sizeof(command), c->expert_devices.item[i]);
    }
    if (c->ctx != 4096)
        snprintf(command + strlen(command), sizeof(command) - strlen(command), " --ctx %u", c->ctx);
    if (c->sequences != 1)
        snprintf(command + strlen(command), sizeof(command) - strlen(command), " --sequences %u", c->sequences);
    drive = k3_plan_seconds(&p, s->trunk.bytes_per_s, s->experts.bytes_per_s);
    touched_experts = (double)m->cfg.top_k * (double)(m->cfg.n_layers - m->cfg.first_dense) * (double)m->expert_bytes;
    work = (double)m->trunk_bytes / s->bf16_bytes_per_s + touched_experts / s->mxfp4_bytes_per_s;
    limit = drive > work ? drive : work;
    printf("\n");
    if (p.trunk_read_bytes + p.expert_read_bytes > 0 && s->trunk.bytes_per_s <= 0)
        printf("expected    at least %.3g s/token by arithmetic; the drive's rate is not known (--rate X gives it, in GB/s), and it "
               "reads %.2f GB a token\n", work, (double)(p.trunk_read_bytes + p.expert_read_bytes) / 1e9);
    else
        printf("expected    at least %.3g s/token; %s binds (drive %.3g s, arithmetic %.3g s)\n", limit,
               drive > work ? "the drive" : "arithmetic", drive, work);
    printf("command     %s\n", command);
    cJSON_AddStringToObject(advice, "command", command);
    cJSON_AddStringToObject(advice, "binds", s->trunk.bytes_per_s <= 0 && p.trunk_read_bytes ? "unknown" : drive > work ? "drive"
                                                                                                                       : "arithmetic");
    cJSON_AddNumberToObject(advice, "s_per_token", limit);
    cJSON_AddNumberToObject(advice, "drive_s", drive);
    cJSON_AddNumberToObject(advice, "arithmetic_s", work);
    cJSON_AddNumberToObject(advice, "promised_bytes", (double)p.sum_bytes);
    cJSON_AddNumberToObject(advice, "read_bytes_per_token", (double)(p.trunk_read_bytes + p.expert_read_bytes));
}

static int write_report(const struct k3_doctor *d, const char *path, struct k3_err *err)
{
    char *text = cJSON_Print(d->report);
    FILE *f = text ? fopen(path, "we") : NULL;
    int rc = 0;

    if (!text)
        return k3_fail(err, -ENOMEM, "no memory for the report");
    if (!f || fprintf(f, "%s\n", text) < 0 || fflush(f) != 0)
        rc = k3_fail(err, errno ? -errno : -EIO, "--report %s: %s%s", path, strerror(errno),
                     errno == ENOENT ? ": make its directory first" : "");
    if (f)
        fclose(f);
    cJSON_free(text);
    return rc;
}

static int examine(struct k3_doctor *d, const struct cmdline *c, struct k3_err *err)
{
    const char *dirs[1 + sizeof(c->expert_devices.item) / sizeof(c->expert_devices.item[0])];
    struct k3_doctor_speed speed = { .bf16_bytes_per_s = 0 };
    struct k3_model *m = NULL;
    size_t n = 0;
    int rc;

    if (!c->model && (c->trunk_device || c->expert_devices.n))
        return k3_refuse(err, -EINVAL, "--trunk-device and --expert-device need --model DIR");
    if (c->model)
        dirs[n++] = c->trunk_device ? c->trunk_device : c->model;
    for (size_t i = 0; i < c->expert_devices.n; i++)
        dirs[n++] = c->expert_devices.item[i];
    if (c->trunk_device && !c->expert_devices.n)
        dirs[n++] = c->model;
    rc = open_model(c, dirs, n, &m, err);
    if (rc < 0)
        return rc;
    k3_doctor_machine(d, c->shm);
    printf("%-5s %-16s %s, %u layer%s\n", "ok", "model", c->model ? c->model : "the released shape is assumed (no --model)",
           m->cfg.n_layers, m->cfg.n_layers == 1 ? "" : "s");
    if (c->rate > 0)
        speed.trunk = speed.experts = (struct k3_plan_device){ "every drive", "given", c->rate * 1e9, c->rate * 1e9 };
    else
        rc = k3_doctor_drives(d, dirs, n, &speed, err);
    if (rc == 0)
        rc = k3_doctor_kernels(d, &speed, err);
    if (rc == 0)
        advise(d, c, m, &speed, dirs, n);
    k3_model_close(m);
    return rc;
}

int main(int argc, char **argv)
{
    struct cmdline c = { .ctx = 4096, .sequences = 1, .shm = "/dev/shm" };
    struct k3_doctor d = { .report = NULL };
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (parse(&c, argc, argv, &rc))
        return rc;
    d.report = cJSON_CreateObject();
    setvbuf(stdout, NULL, _IOLBF, 0); /* each line when it is known: a drive takes a second */
    d.checks = cJSON_AddArrayToObject(d.report, "checks");
    cJSON_AddStringToObject(d.report, "version", K3_VERSION);
    rc = examine(&d, &c, &err);
    cJSON_AddBoolToObject(d.report, "can_run", rc == 0 && d.n_bad == 0);
    if (rc == 0 && c.report)
        rc = write_report(&d, c.report, &err);
    cJSON_Delete(d.report);
    if (rc < 0) {
        fprintf(stderr, "k3-doctor: %s\n", err.text);
        return err.exit_status;
    }
    if (d.n_bad)
        printf("\nthis machine cannot run the model: see the lines marked BAD\n");
    return d.n_bad ? K3_EXIT_FAILED : 0;
}
