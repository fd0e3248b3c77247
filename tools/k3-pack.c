/* k3-pack: copies the dense trunk of a checkpoint to another device in the order in which a pass reads it. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>

#include "ipc/daemon.h"
#include "tools/pack.h"

int main(int argc, char **argv)
{
    struct k3_pack_opts o = { 0 };
    struct k3_pack_done done;
    struct k3_err err = K3_ERR_INIT;
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &o.model, "DIR", "the checkpoint: config.json and *.safetensors", 0, 0 },
        { "out", K3_OPT_STRING, &o.out, "DIR", "the directory that gets " K3_PACK_NAME "; it must be there", 0, 0 },
        { "layers", K3_OPT_U32, &o.n_layers, "N", "only the first N layers (partial downloads)", 1, K3_MAX_LAYERS },
        { NULL },
    };
    int rc, status;

    if (k3_opts_parse(table, "k3-pack",
                      "copies the dense trunk to another device in the order in which a pass reads it\n"
                      "  Give the directory to k3-run up as --trunk-device.  When stopped it goes on where it was.",
                      argc, argv, NULL, &status))
        return status;
    if (!o.model || !o.out) {
        fprintf(stderr, "k3-pack: --%s DIR is needed\n", o.model ? "out" : "model");
        return K3_EXIT_REFUSED;
    }
    signal(SIGXFSZ, SIG_IGN); /* a limit of the file size is refused in words */
    rc = k3_pack_write(&o, &done, &err);
    if (rc < 0)
        fprintf(stderr, "k3-pack: %s\n", err.text);
    else if (done.was_there)
        printf("%s/" K3_PACK_NAME ": complete already (%.3f GB); remove it to pack anew\n", o.out,
               (double)done.file_bytes * 1e-9);
    else
        printf("%s/" K3_PACK_NAME ": %zu matrices and %zu small tensors, %.3f GB, %s\n", o.out, done.n_matrices,
               done.n_residents, (double)done.file_bytes * 1e-9,
               done.with_sums ? "equal to k3.sums" : "not compared: there is no k3.sums");
    return k3_exit_status(rc, &err);
}
