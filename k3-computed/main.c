/* k3-computed: owns sequences and their state, runs passes over the model and draws tokens. */
#include "k3-computed/computed.h"

int main(int argc, char **argv)
{
    struct k3_computed c = K3_COMPUTED_INIT;
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (k3_computed_options(&c.opt, argc, argv, &rc)) /* help, version or bad usage: done */
        return rc;
    rc = k3_computed_open(&c, &err);
    if (rc == 0)
        rc = k3_computed_serve(&c, &err); /* says ready, then loops until SIGTERM */
    if (rc < 0)
        k3_log_err(&err, "computed_stopped");
    k3_computed_close(&c);
    return k3_exit_status(rc, &err);
}
