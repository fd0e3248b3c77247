/* k3ctl ping, info, drain, shutdown, log, wait, cancel: what needs an answer from a daemon. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/daemon.h"
#include "ipc/members.h"
#include "ipc/msg.h"
#include "tools/ctl.h"

#define ANSWER_MS 3000
#define LOOK_MS 50

static int call(const struct k3_ctl_opt *o, const char *socket, cJSON *request, int timeout_ms,
                cJSON **reply, struct k3_err *err)
{
    struct k3_client *c;
    int rc = k3_client_open(&c, o->rundir, socket, err);

    if (rc == 0)
        rc = k3_client_call(c, request, timeout_ms, reply, err);
    k3_client_close(c);
    if (rc == 0 && !cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(*reply, "ok"))) {
        const cJSON *text = cJSON_GetObjectItemCaseSensitive(*reply, "error");
        const cJSON *code = cJSON_GetObjectItemCaseSensitive(*reply, "code");

        rc = k3_fail(err, -EREMOTEIO, "%s",
                     cJSON_IsString(text) ? text->valuestring : "refused without words");
        if (err && cJSON_IsNumber(code) && code->valueint > 0 && code->valueint < 256)
            err->exit_status = code->valueint;
        cJSON_Delete(*reply);
        *reply = NULL;
    }
    return rc;
}

int k3_ctl_ask(const struct k3_ctl_opt *o, const char *daemon, cJSON *request, int timeout_ms,
               cJSON **reply, struct k3_err *err)
{
    char socket[48];

    snprintf(socket, sizeof(socket), "%s.ctl", daemon);
    return call(o, socket, request, timeout_ms, reply, err);
}

static cJSON *command(const char *cmd)
{
    cJSON *r = cJSON_CreateObject();

    cJSON_AddStringToObject(r, "cmd", cmd);
    return r;
}

/* The daemons that the command line means: the word at `at`, or all members. */
static int chosen(struct k3_ctl_names *out, const struct k3_ctl_opt *o, size_t at,
                  struct k3_err *err)
{
    if (o->words.n <= at) {
        k3_ctl_members(out, o);
        return 0;
    }
    out->n = 1;
    return k3_ctl_name(out->name[0], o->words.item[at], err);
}

static const char *string_of(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);

    return cJSON_IsString(v) ? v->valuestring : "?";
}

static double number_of(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);

    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

/* Every daemon is asked, whatever the ones before it said; the first failure is the result. */
static void first_failure(struct k3_err *err, int *rc, int this_rc, const struct k3_err *this_err)
{
    if (this_rc < 0 && *rc == 0) {
        *rc = this_rc;
        *err = *this_err;
    }
}

int k3_ctl_ping(const struct k3_ctl_opt *o, struct k3_err *err)
{
    struct k3_ctl_names names;
    cJSON *all = cJSON_CreateObject(), *request = command("ping");
    int rc = chosen(&names, o, 1, err), result = rc;

    for (uint32_t i = 0; i < names.n && result == 0; i++) {
        struct k3_err e = K3_ERR_INIT;
        cJSON *reply;
        uint64_t begin = k3_now_ns();

        rc = k3_ctl_ask(o, names.name[i], request, ANSWER_MS, &reply, &e);
        if (rc == 0 && o->json)
            cJSON_AddItemToObject(all, names.name[i], reply);
        else if (rc == 0) {
            printf("%s state=%s pid=%.0f generation=%.0f ms=%.2f\n", names.name[i],
                   string_of(reply, "state"), number_of(reply, "pid"),
                   number_of(reply, "generation"), (double)(k3_now_ns() - begin) / 1e6);
            cJSON_Delete(reply);
        } else if (!o->json)
            printf("%s state=%s\n", names.name[i],
                   k3_lock_alive(o->rundir, names.name[i]) ? "silent" : "dead");
    }
    /* The lines are for people; the status is for scripts. */
    for (uint32_t i = 0; i < names.n && result == 0; i++)
        if (!k3_lock_alive(o->rundir, names.name[i]))
            result = k3_no_peer(err, -ESRCH, "%s is not running in instance \"%s\"", names.name[i],
                                o->instance);
    if (o->json) {
        char *text = cJSON_Print(all);

        puts(text ? text : "{}");
        cJSON_free(text);
    }
    cJSON_Delete(request);
    cJSON_Delete(all);
    return result;
}

int k3_ctl_info(const struct k3_ctl_opt *o, struct k3_err *err)
{
    struct k3_ctl_names names;
    cJSON *all = cJSON_CreateObject(), *request = command("info");
    int rc = chosen(&names, o, 1, err), result = rc;

    for (uint32_t i = 0; i < names.n && rc == 0; i++) {
        struct k3_err e = K3_ERR_INIT;
        cJSON *reply;
        int one = k3_ctl_ask(o, names.name[i], request, ANSWER_MS, &reply, &e);

        first_failure(err, &result, one, &e);
        if (one == 0) {
            cJSON_DeleteItemFromObjectCaseSensitive(reply, "ok");
            cJSON_AddItemToObject(all, names.name[i], reply);
        }
    }
    if (rc == 0) {
        char *text = cJSON_Print(all);

        puts(text ? text : "{}");
        cJSON_free(text);
    }
    cJSON_Delete(request);
    cJSON_Delete(all);
    return result;
}

int k3_ctl_model(const struct k3_ctl_opt *o, char *dir, size_t len_bytes, uint32_t *n_layers,
                 struct k3_err *err)
{
    cJSON *request = command("info"), *reply;
    int rc = k3_ctl_ask(o, "k3-trunkd", request, ANSWER_MS, &reply, err);

    cJSON_Delete(request);
    if (rc < 0)
        return rc;
    snprintf(dir, len_bytes, "%s", string_of(reply, "model"));
    *n_layers = (uint32_t)number_of(reply, "layers");
    cJSON_Delete(reply);
    return 0;
}

int k3_ctl_tell(const struct k3_ctl_opt *o, struct k3_err *err)
{
    const char *cmd = o->words.item[0];
    bool is_log = strcmp(cmd, "log") == 0;
    struct k3_ctl_names names;
    cJSON *request = command(cmd);
    int rc = chosen(&names, o, is_log ? 2 : 1, err), result = rc;

    if (is_log)
        cJSON_AddStringToObject(request, "level", o->words.item[1]);
    if (o->keep)
        cJSON_AddBoolToObject(request, "keep", true);
    for (uint32_t i = 0; i < names.n && rc == 0; i++) {
        struct k3_err e = K3_ERR_INIT;
        cJSON *reply;
        int one = k3_ctl_ask(o, names.name[i], request, ANSWER_MS, &reply, &e);

        first_failure(err, &result, one, &e);
        if (one == 0) {
            printf("%s: %s\n", names.name[i], is_log ? o->words.item[1] : cmd);
            cJSON_Delete(reply);
        }
    }
    cJSON_Delete(request);
    return result;
}

int k3_ctl_cancel(const struct k3_ctl_opt *o, struct k3_err *err)
{
    const char *id = o->words.item[1];
    cJSON *request, *reply;
    int rc;

    if (strlen(id) != 32 || strspn(id, "0123456789abcdefABCDEF") != 32)
        return k3_refuse(err, -EINVAL, "id \"%.64s\": must be 32 hexadecimal digits", id);
    request = command("cancel");
    cJSON_AddStringToObject(request, "id", id);
    rc = call(o, "computed.sock", request, ANSWER_MS, &reply, err);
    cJSON_Delete(request);
    if (rc == 0) {
        printf("%s: cancelled\n", id);
        cJSON_Delete(reply);
    }
    return rc;
}

/* ---- wait ---- */

static bool is_ready(const struct k3_ctl_opt *o, const char *daemon, const cJSON *ping)
{
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply;
    bool ready;

    if (!k3_lock_alive(o->rundir, daemon) || k3_ctl_ask(o, daemon, (cJSON *)ping, 500, &reply, &err) < 0)
        return false;
    ready = strcmp(string_of(reply, "state"), "ready") == 0;
    cJSON_Delete(reply);
    return ready;
}

int k3_ctl_wait(const struct k3_ctl_opt *o, struct k3_err *err)
{
    uint64_t deadline = k3_now_ns() + (uint64_t)(o->timeout_s * 1e9);
    cJSON *ping = command("ping");
    int rc = -EAGAIN;

    while (rc == -EAGAIN) {
        struct k3_ctl_names names;
        char why[1024];
        uint32_t waiting;
        int code = K3_EXIT_FAILED;

        k3_ctl_members(&names, o);
        rc = 0;
        waiting = names.n;
        for (uint32_t i = 0; i < names.n && rc == 0; i++) {
            if (k3_member_given_up(o->rundir, names.name[i], &code)) {
                k3_member_last_error(why, sizeof(why), o->rundir, names.name[i]);
                rc = k3_fail(err, -ECHILD, "%s failed: %s", names.name[i],
                             why[0] ? why : "its log says no reason");
                err->exit_status = code > 0 ? code : K3_EXIT_FAILED;
            } else if (waiting == names.n && !is_ready(o, names.name[i], ping)) {
                waiting = i;
            }
        }
        if (rc < 0 || waiting == names.n)
            break;
        rc = -EAGAIN;
        if (k3_now_ns() >= deadline) {
            bool alive = k3_lock_alive(o->rundir, names.name[waiting]);

            k3_member_last_error(why, sizeof(why), o->rundir, names.name[waiting]);
            rc = k3_no_peer(err, -ETIMEDOUT, "%s is %s after %.15g s%s%s", names.name[waiting],
                            alive ? "not ready" : "not running", o->timeout_s, why[0] ? ": " : "",
                            why);
            break;
        }
        nanosleep(&(struct timespec){ 0, LOOK_MS * 1000000 }, NULL);
    }
    cJSON_Delete(ping);
    return rc;
}
