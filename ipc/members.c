#include "ipc/members.h"

#include <stdio.h>
#include <string.h>

bool k3_member_given_up(const char *rundir, const char *daemon, int *exit_status)
{
    char path[600], line[512], name[32], state[16];
    bool failed = false;
    int code;
    FILE *f;

    snprintf(path, sizeof(path), "%s/k3-run.members", rundir);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "%31s %15s %*s %*s %d", name, state, &code) == 3 && strcmp(name, daemon) == 0 &&
            strcmp(state, "failed") == 0) {
            failed = true;
            *exit_status = code;
        }
    if (f)
        fclose(f);
    return failed;
}

void k3_member_last_error(char *out, size_t len, const char *rundir, const char *daemon)
{
    char path[600], line[2048], *text;
    FILE *f;

    out[0] = 0;
    snprintf(path, sizeof(path), "%s/%s.log", rundir, daemon);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, "level=error ", 12) == 0) {
            line[strcspn(line, "\n")] = 0;
            text = strstr(line, " text=\"");
            snprintf(out, len, "%.1000s", text ? text + 7 : line);
            if (text)
                out[strcspn(out, "\"")] = 0;
        }
    if (f)
        fclose(f);
}
