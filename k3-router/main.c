/* k3-router: turns text into tokens for k3-computed and its tokens into text. */
#include <locale.h>
#include <stdio.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "k3-router/http.h"

int main(int argc, char **argv)
{
    struct k3_router r = { 0 };
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (k3_router_options(&r.opt, argc, argv, &rc))
        return rc;
    rc = k3_router_open(&r, &err);
    if (rc == 0) {
        if (r.opt.http)
            rc = k3_router_http(&r, &err);
        else if (r.opt.lines)
            rc = k3_router_lines(&r, &err);
        else if (!r.opt.resume && !r.opt.ids && !r.opt.json && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO))
            rc = k3_router_terminal(&r, &err);
        else
            rc = k3_router_oneshot(&r, &err);
    }
    if (rc < 0 && err.text[0])
        fprintf(stderr, "k3-router: %s\n", err.text);
    k3_router_close(&r);
    return k3_exit_status(rc, &err);
}
