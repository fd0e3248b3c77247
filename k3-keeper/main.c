/* k3-keeper: keeps the memfds of data segments open, so that they outlive the daemon that made them. */
#include "k3-keeper/keeper.h"

int main(int argc, char **argv)
{
    struct k3_keeper k = { .opt = K3_DAEMON_OPTS_INIT, .lock = PTHREAD_MUTEX_INITIALIZER };
    const struct k3_opt table[] = { K3_DAEMON_OPT_ROWS(&k.opt), { NULL } };
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (k3_opts_parse(table, K3_KEEPER_NAME, "keeps memfds of k3-trunkd and k3-expertd open over their deaths", argc,
                      argv, NULL, &rc))
        return rc;
    rc = k3_keeper_open(&k, &err);
    if (rc == 0)
        rc = k3_keeper_serve(&k, &err); /* says ready, then loops until SIGTERM */
    if (rc < 0)
        k3_log_err(&err, "keeper_stopped");
    k3_keeper_close(&k); /* safe after any partial open */
    return k3_exit_status(rc, &err);
}
