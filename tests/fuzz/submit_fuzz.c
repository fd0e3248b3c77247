/* A submit of computed.sock, from the bytes of a message to a queued request. */
#include <stdlib.h>
#include <string.h>

#include "k3-computed/computed.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cJSON *reply = cJSON_CreateObject(), *request, *events = cJSON_CreateArray();
    struct k3_err err = K3_ERR_INIT;
    struct k3_request *r = NULL;
    struct k3_submit s;
    const char *cmd;

    request = k3_msg_parse(data, size, &cmd, reply);
    if (request && k3_computed_submit_parse(request, &s, &err) == 0) {
        if (k3_submit_check(&s, 1536, 4096, &err) == 0) {
            if (strlen(s.id) != K3_ID_LEN || k3_request_new(&r, &s, 1536, &err) < 0 || r->n_ids > 4096)
                abort();
            while (r->n_ids - r->n_prompt < r->max_tokens) /* the room that was promised */
                r->ids[r->n_ids++] = 0;
            k3_request_events(r, 0, events);
            k3_request_free(r);
        }
        k3_computed_submit_free(&s);
    } else if (request && (err.code == 0 || !err.text[0])) {
        abort(); /* refused without words */
    }
    cJSON_Delete(request);
    cJSON_Delete(reply);
    cJSON_Delete(events);
    return 0;
}
