/* k3ctl trace: k3-computed writes down its routes, or stops doing so. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/ctl.h"

#define START_MS 3000
#define STOP_MS 60000 /* what is in the buffer has to reach a slow disk */

/* The daemon may be in another directory. */
static int absolute(char *out, size_t len, const char *file, struct k3_err *err)
{
    size_t n = 0;

    if (!file[0])
        return k3_refuse(err, -EINVAL, "trace: the FILE is empty");
    if (file[0] != '/') {
        if (!getcwd(out, len))
            return k3_fail(err, -errno, "this directory: %s", strerror(errno));
        n = strlen(out);
    }
    if ((size_t)snprintf(out + n, len - n, "%s%s", n ? "/" : "", file) >= len - n)
        return k3_refuse(err, -ENAMETOOLONG, "trace file %.100s...: the path is longer than %zu bytes",
                         file, len - 1);
    return 0;
}

static double number(const cJSON *reply, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(reply, name);

    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

int k3_ctl_trace(const struct k3_ctl_opt *o, struct k3_err *err)
{
    const char *action = o->words.item[1], *file = o->words.n > 2 ? o->words.item[2] : NULL;
    bool start = strcmp(action, "start") == 0;
    const cJSON *name;
    cJSON *request, *reply;
    char path[4096];
    int rc;

    if (!start && strcmp(action, "stop") != 0)
        return k3_refuse(err, -EINVAL, "trace \"%.64s\": must be start FILE or stop", action);
    if (start && !file)
        return k3_refuse(err, -EINVAL, "trace start: the FILE is missing");
    if (!start && o->lookahead)
        return k3_refuse(err, -EINVAL, "trace stop does not take --lookahead");
    rc = file ? absolute(path, sizeof(path), file, err) : 0;
    if (rc < 0)
        return rc;
    request = cJSON_CreateObject();
    cJSON_AddStringToObject(request, "cmd", "trace");
    cJSON_AddStringToObject(request, "action", action);
    if (file)
        cJSON_AddStringToObject(request, "file", path);
    if (o->lookahead)
        cJSON_AddBoolToObject(request, "lookahead", true);
    rc = k3_ctl_ask(o, "k3-computed", request, start ? START_MS : STOP_MS, &reply, err);
    cJSON_Delete(request);
    if (rc < 0)
        return rc;
    name = cJSON_GetObjectItemCaseSensitive(reply, "file");
    if (start) {
        printf("%s: from the next pass on\n", path);
        if (number(reply, "gates_pinned") < number(reply, "gates"))
            printf("look-ahead for %.0f of %.0f layers: the gates of the others are not pinned\n",
                   number(reply, "gates_pinned"), number(reply, "gates"));
    } else {
        printf("%s: %.0f passes, %.0f bytes\n", cJSON_IsString(name) ? name->valuestring : "?",
               number(reply, "passes"), number(reply, "bytes"));
    }
    cJSON_Delete(reply);
    return 0;
}
