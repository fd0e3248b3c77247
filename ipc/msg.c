/* What both sides of ipc/msg.h share: requests are checked here before anything looks at them. */
#include "ipc/msg.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

void k3_reply_error(cJSON *reply, const struct k3_err *err)
{
    const char *name = strerrorname_np(-err->code);

    cJSON_DeleteItemFromObjectCaseSensitive(reply, "ok");
    cJSON_AddBoolToObject(reply, "ok", false);
    cJSON_AddStringToObject(reply, "error", err->text);
    cJSON_AddNumberToObject(reply, "code", err->exit_status ? err->exit_status : K3_EXIT_FAILED);
    cJSON_AddStringToObject(reply, "errno", name ? name : "EIO");
}

cJSON *k3_msg_parse(const void *data, size_t len_bytes, const char **cmd, cJSON *reply)
{
    struct k3_err err = K3_ERR_INIT;
    const char *end = NULL, *text = data;
    cJSON *root = NULL, *c;

    *cmd = NULL;
    if (len_bytes > K3_MSG_MAX) {
        k3_refuse(&err, -EMSGSIZE, "message of %zu bytes: at most %u are taken", len_bytes,
                  K3_MSG_MAX);
        goto bad;
    }
    if (len_bytes == 0) {
        k3_refuse(&err, -EBADMSG, "empty message: a JSON object with \"cmd\" is expected");
        goto bad;
    }
    root = cJSON_ParseWithLengthOpts(text, len_bytes, &end, false);
    if (!root) {
        k3_refuse(&err, -EBADMSG, "message of %zu bytes is not JSON (byte %td)", len_bytes,
                  end ? end - text : 0);
        goto bad;
    }
    while (end < text + len_bytes &&
           (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t' || *end == 0))
        end++;
    if (end != text + len_bytes) {
        k3_refuse(&err, -EBADMSG, "message has something after its JSON object (byte %td)",
                  end - text);
        goto bad;
    }
    if (!cJSON_IsObject(root)) {
        k3_refuse(&err, -EBADMSG, "message is not a JSON object");
        goto bad;
    }
    c = cJSON_GetObjectItemCaseSensitive(root, "cmd");
    if (!cJSON_IsString(c)) {
        k3_refuse(&err, -EBADMSG, "message has no \"cmd\" string");
        goto bad;
    }
    *cmd = c->valuestring;
    return root;
bad:
    cJSON_Delete(root);
    k3_reply_error(reply, &err);
    return NULL;
}
