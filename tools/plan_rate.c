/* tools/plan_rate.c: how fast the drives of a plan read (plan.h). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "io/calibrate.h"
#include "io/device.h"
#include "tools/plan.h"

int k3_plan_rate(const char *const *dirs, size_t n, struct k3_plan_device *out, struct k3_err *err)
{
    struct k3_device seen[65], d;
    size_t n_seen = 0;

    *out = (struct k3_plan_device){ .name = "" };
    for (size_t i = 0; i < n; i++) {
        bool known = false;
        int rc = k3_device_of(dirs[i], NULL, &d, err);
        size_t len = strlen(out->name);

        if (rc < 0)
            return rc;
        for (size_t k = 0; k < n_seen; k++)
            known = known || strcmp(seen[k].key, d.key) == 0;
        if (known || n_seen == sizeof(seen) / sizeof(seen[0]))
            continue;
        seen[n_seen++] = d;
        snprintf(out->name + len, sizeof(out->name) - len, "%s%s", len ? "+" : "", d.disk[0] ? d.disk : d.fs);
        struct k3_io_rate rate;
        struct k3_err why = K3_ERR_INIT;

        if (k3_io_rate_of_dir(dirs[i], &rate, &why) < 0) {
            snprintf(out->how, sizeof(out->how), "%.190s", why.text);
            out->bytes_per_s = out->bytes_per_s_depth1 = 0;
            return 0;
        }
        out->bytes_per_s += rate.bytes_per_s;
        out->bytes_per_s_depth1 += rate.bytes_per_s_depth1;
        snprintf(out->how, sizeof(out->how), "%s", rate.remembered ? "remembered" : "measured");
    }
    return 0;
}
