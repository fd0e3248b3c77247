/* tests/probe/submit_probe.c RUNDIR SOCKET: sends every line of stdin (one JSON request) and prints every reply as one
 * line.  The request {"cmd":"collect","id":..,"from":..} is done here: polls until the answer has ended and prints
 * {"tokens":[..],"events":[..],"progress":N}.  Exit 1 when nobody answers. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/msg.h"

#define TIMEOUT_MS 20000

static struct k3_client *client;

static cJSON *call(const cJSON *request)
{
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply = NULL;

    if (k3_client_call(client, request, TIMEOUT_MS, &reply, &err) < 0) {
        fprintf(stderr, "submit_probe: %s\n", err.text);
        exit(1);
    }
    return reply;
}

static void print(cJSON *reply)
{
    char *text = cJSON_PrintUnformatted(reply);

    puts(text ? text : "");
    fflush(stdout);
    cJSON_free(text);
    cJSON_Delete(reply);
}

static cJSON *collect(const cJSON *request)
{
    cJSON *poll = cJSON_CreateObject(), *out = cJSON_CreateObject(), *tokens = cJSON_AddArrayToObject(out, "tokens");
    cJSON *events = cJSON_AddArrayToObject(out, "events");
    const cJSON *from = cJSON_GetObjectItem(request, "from");
    double next = from ? from->valuedouble : 0, seq = 0, n_progress = 0;

    cJSON_AddStringToObject(poll, "cmd", "poll");
    cJSON_AddStringToObject(poll, "id", cJSON_GetStringValue(cJSON_GetObjectItem(request, "id")));
    cJSON_AddNumberToObject(poll, "wait_ms", 2000);
    for (;;) {
        cJSON *reply, *event;
        const char *state;

        cJSON_DeleteItemFromObject(poll, "from");
        cJSON_AddNumberToObject(poll, "from", next);
        cJSON_DeleteItemFromObject(poll, "progress_from");
        cJSON_AddNumberToObject(poll, "progress_from", seq);
        reply = call(poll);
        state = cJSON_GetStringValue(cJSON_GetObjectItem(reply, "state"));
        if (!state) {
            cJSON_Delete(poll);
            cJSON_Delete(out);
            return reply;
        }
        cJSON_ArrayForEach(event, cJSON_GetObjectItem(reply, "events")) {
            cJSON_AddItemToArray(events, cJSON_Duplicate(event, true));
            if (cJSON_HasObjectItem(event, "token"))
                cJSON_AddItemToArray(tokens, cJSON_CreateNumber(cJSON_GetObjectItem(event, "token")->valuedouble));
        }
        next = cJSON_GetObjectItem(reply, "next")->valuedouble;
        if (cJSON_HasObjectItem(reply, "progress")) {
            seq = cJSON_GetObjectItem(cJSON_GetObjectItem(reply, "progress"), "seq")->valuedouble;
            n_progress++;
        }
        if (strcmp(state, "ended") == 0) {
            cJSON_Delete(reply);
            cJSON_Delete(poll);
            cJSON_AddNumberToObject(out, "progress", n_progress);
            return out;
        }
        cJSON_Delete(reply);
    }
}

int main(int argc, char **argv)
{
    struct k3_err err = K3_ERR_INIT;
    char *line = NULL;
    size_t cap = 0;

    if (argc != 3) {
        fprintf(stderr, "usage: submit_probe RUNDIR SOCKET < requests\n");
        return 2;
    }
    if (k3_client_open(&client, argv[1], argv[2], &err) < 0) {
        fprintf(stderr, "submit_probe: %s\n", err.text);
        return 1;
    }
    while (getline(&line, &cap, stdin) > 0) {
        cJSON *request = cJSON_Parse(line);
        const char *cmd = cJSON_GetStringValue(cJSON_GetObjectItem(request, "cmd"));

        if (!request) {
            fprintf(stderr, "submit_probe: not JSON: %s", line);
            return 2;
        }
        print(cmd && strcmp(cmd, "collect") == 0 ? collect(request) : call(request));
        cJSON_Delete(request);
    }
    free(line);
    k3_client_close(client);
    return 0;
}
