#include "k3-expertd/expertd.h"

int main(int argc, char **argv)
{
    struct k3_expertd d = K3_EXPERTD_INIT;
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (k3_expertd_options(&d.opt, argc, argv, &rc)) /* help, version or bad usage: done */
        return rc;
    rc = k3_expertd_open(&d, &err);
    if (rc == 0)
        rc = k3_expertd_serve(&d, &err); /* says ready, then loops until SIGTERM */
    if (rc < 0)
        k3_log_err(&err, "expertd_stopped");
    k3_expertd_close(&d, rc); /* safe after any partial open */
    return k3_exit_status(rc, &err);
}
