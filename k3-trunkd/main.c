/* k3-trunkd: reads the dense trunk from disk and hands it to k3-computed as an endless stream. */
#include "k3-trunkd/trunkd.h"

int main(int argc, char **argv)
{
    struct k3_trunkd d = K3_TRUNKD_INIT;
    struct k3_err err = K3_ERR_INIT;
    int rc;

    if (k3_trunkd_options(&d.opt, argc, argv, &rc)) /* help, version or bad usage: done */
        return rc;
    rc = k3_trunkd_open(&d, &err);
    if (rc == 0)
        rc = k3_trunkd_serve(&d, &err); /* says ready, then loops until SIGTERM */
    if (rc < 0)
        k3_log_err(&err, "trunkd_stopped");
    k3_trunkd_close(&d); /* safe after any partial open */
    return k3_exit_status(rc, &err);
}
