/* tests/fuzz/msg_fuzz.c: control messages.  Whatever the bytes are, k3_msg_parse() gives either a request with a command
 * or a failure reply with one line of words. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/msg.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *cmd = NULL;
    cJSON *reply = cJSON_CreateObject(), *r = k3_msg_parse(data, size, &cmd, reply);

    if (r) {
        char *text = cJSON_PrintUnformatted(r);

        if (!cmd || strlen(cmd) > size || cJSON_HasObjectItem(reply, "ok") || !text)
            abort();
        cJSON_free(text);
    } else {
        const char *error = cJSON_GetStringValue(cJSON_GetObjectItem(reply, "error"));

        if (!cJSON_IsFalse(cJSON_GetObjectItem(reply, "ok")) || !error || !*error || strchr(error, '\n'))
            abort();
    }
    cJSON_Delete(r);
    cJSON_Delete(reply);
    return 0;
}
