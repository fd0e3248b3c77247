#include "tests/unit/pass_world.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int rc, const struct k3_err *err)
{
    if (rc < 0) {
        fprintf(stderr, "%s (%d)\n", err->text, rc);
        abort();
    }
}

void k3_world_open(struct k3_world *w, const char *dir)
{
    struct k3_err err = K3_ERR_INIT;

    memset(w, 0, sizeof(*w));
    snprintf(w->dir, sizeof(w->dir), "%s", dir);
    must(k3_file_source_model(&w->m, dir, 0, &err), &err);
}

void k3_world_make(struct k3_world *w, const struct k3_mk_opts *opts)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan plan = { 0 };
    char parent[] = "/tmp/k3-pass-XXXXXX", dir[64];

    if (!mkdtemp(parent))
        abort();
    snprintf(dir, sizeof(dir), "%s/model", parent);
    must(k3_mk_plan_build(&plan, opts, &err), &err);
    k3_mk_fill_init();
    must(k3_mk_write(&plan, dir, &err), &err);
    k3_mk_plan_free(&plan);
    k3_world_open(w, dir);
    strcpy(w->parent, parent);
}

void k3_world_formula(struct k3_world *w)
{
    struct k3_mk_opts opts = { .formula = true, .dtype = K3_BF16 };

    k3_mk_config_formula(&opts.cfg);
    k3_world_make(w, &opts);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

void k3_world_close(struct k3_world *w)
{
    k3_model_close(w->m);
    if (w->parent[0])
        nftw(w->parent, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

bool k3_runner_open(struct k3_runner *r, struct k3_world *w, struct k3_world_opts o)
{
    const struct k3_kernels *k = k3_kernels_get(o.kernels ? o.kernels : "c");
    struct k3_err err = K3_ERR_INIT;

    memset(r, 0, sizeof(*r));
    if (!k)
        return false;
    r->w = w;
    must(k3_file_source_open(&r->file, w->m, o.block_bytes ? o.block_bytes : 1 << 20, &err), &err);
    must(k3_team_new(&r->team, o.threads ? o.threads : 1, &err), &err);
    must(k3_pass_new(&r->pass, w->m, k, r->team, o.max_rows ? o.max_rows : 64, &err), &err);
    return true;
}

void k3_runner_close(struct k3_runner *r)
{
    k3_pass_free(r->pass);
    k3_team_free(r->team);
    k3_file_source_close(r->file);
}

void k3_runner_run(struct k3_runner *r, const struct k3_row *rows, uint32_t n, float *logits,
                   const struct k3_pass_hooks *hooks)
{
    struct k3_err err = K3_ERR_INIT;

    must(k3_pass_run(r->pass, k3_file_source(r->file), rows, n, logits, hooks, &err), &err);
}

void k3_runner_feed(struct k3_runner *r, struct k3_state *s, const uint32_t *ids, uint32_t n,
                    uint32_t at_once, float *logits, const struct k3_pass_hooks *hooks)
{
    struct k3_row rows[64];
    uint32_t base = k3_state_positions(s);

    for (uint32_t done = 0; done < n;) {
        uint32_t now = n - done < at_once ? n - done : at_once;

        for (uint32_t i = 0; i < now; i++)
            rows[i] = (struct k3_row){ s, ids[done + i], base + done + i, true };
        k3_runner_run(r, rows, now, logits + (size_t)done * r->w->m->cfg.vocab, hooks);
        done += now;
    }
}

struct k3_state *k3_world_state(struct k3_world *w, uint32_t ctx)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_state *s = NULL;

    must(k3_state_new(&s, &w->m->cfg, ctx, &err), &err);
    return s;
}

uint32_t k3_world_argmax(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}
