/* Answers whose server was killed: their clients are gone, so k3-computed need not go on with them.  The journals stay, and
 * --resume submits again what they hold. */
#include <dirent.h>
#include <string.h>

#include "ipc/msg.h"
#include "k3-router/http.h"
#include "shm/segment.h"

#define FORGET_MS 2500

/* Begun by a server of this instance and not ended; in use by nobody, or it could not be opened. */
static bool is_orphan(const struct k3_router *r, const char *id)
{
    struct k3_journal j = K3_JOURNAL_INIT;
    struct k3_journal_data d;
    const cJSON *shown, *instance;
    bool orphan;

    if (k3_journal_open(&j, r->state_dir, id, &d, NULL) < 0)
        return false;
    shown = cJSON_GetObjectItemCaseSensitive(d.head, "shown");
    instance = cJSON_GetObjectItemCaseSensitive(shown, "instance");
    orphan = !d.end[0] && d.model && cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(shown, "http")) && cJSON_IsString(instance) &&
             strcmp(instance->valuestring, r->instance) == 0;
    k3_journal_data_free(&d);
    k3_journal_close(&j);
    return orphan;
}

static bool forget(struct k3_client *c, const char *id)
{
    cJSON *request = cJSON_CreateObject(), *reply = NULL;
    bool told;

    cJSON_AddStringToObject(request, "cmd", "forget");
    cJSON_AddStringToObject(request, "id", id);
    told = k3_client_call(c, request, FORGET_MS, &reply, NULL) == 0;
    if (told && cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok")))
        k3_log(K3_LOG_WARN, "orphan_ended", "id=%s text=\"its server was killed; k3-router --resume goes on with it\"", id);
    cJSON_Delete(reply);
    cJSON_Delete(request);
    return told;
}

void k3_http_orphans(const struct k3_router *r)
{
    struct k3_client *c = NULL;
    DIR *d = opendir(r->state_dir);
    struct dirent *e;
    bool there = d && k3_lock_alive(r->rundir, "k3-computed") && k3_client_open(&c, r->rundir, "computed.sock", NULL) == 0;

    while (there && (e = readdir(d)) != NULL) {
        char id[K3_JOURNAL_ID_LEN + 1];

        if (strlen(e->d_name) != K3_JOURNAL_ID_LEN + strlen(".journal"))
            continue;
        memcpy(id, e->d_name, K3_JOURNAL_ID_LEN);
        id[K3_JOURNAL_ID_LEN] = 0;
        if (k3_journal_id_ok(id) && is_orphan(r, id))
            there = forget(c, id);
    }
    if (d)
        closedir(d);
    k3_client_close(c);
}
