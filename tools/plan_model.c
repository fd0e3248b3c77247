/* tools/plan_model.c: the released shape from no files. */
#include <errno.h>
#include <stdlib.h>

#include "tools/mkmodel.h"
#include "tools/plan.h"

static int add_shard(struct k3_index *ix, const struct k3_mk_plan *mk, uint32_t shard, struct k3_err *err)
{
    uint64_t file_bytes;
    size_t len_bytes;
    char name[64], *text;
    int rc = k3_mk_header(mk, shard, &text, &len_bytes, err);

    if (rc < 0)
        return rc;
    k3_mk_shard_name(mk, shard, name);
    file_bytes = len_bytes + mk->shards[shard].data_bytes;
    rc = k3_index_add_file(ix, name, file_bytes, 1, shard + 1, err);
    if (rc == 0)
        rc = k3_index_parse_header(ix, (uint16_t)shard, text + 8, len_bytes - 8, len_bytes, file_bytes, err);
    free(text);
    return rc;
}

int k3_plan_released(struct k3_model **out, struct k3_err *err)
{
    struct k3_mk_opts opts = { .dtype = K3_BF16, .sparse = true };
    struct k3_mk_plan mk = { .n_tensors = 0 };
    struct k3_index *ix = k3_index_new();
    int rc;

    if (!ix)
        return k3_fail(err, -ENOMEM, "no memory for an index");
    k3_mk_config_released(&opts.cfg);
    k3_mk_fill_init();
    rc = k3_mk_plan_build(&mk, &opts, err);
    for (uint32_t i = 0; i < mk.n_shards && rc == 0; i++)
        rc = add_shard(ix, &mk, i, err);
    k3_mk_plan_free(&mk);
    if (rc == 0)
        rc = k3_index_sort(ix, err);
    if (rc == 0)
        return k3_model_of_index(out, &opts.cfg, ix, err);
    k3_index_close(ix);
    return rc;
}
