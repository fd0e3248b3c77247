/* tests/probe/pass_probe.c: runs a checkpoint without daemons and prints one JSON object, for
 * comparison with other implementations (tests/reference) and with what the family answers.
 *
 *   logits         one vector for each prompt position (--logits all), or for the last alone
 *   step_logits    with --logits all: the vector from which each generated id was taken
 *   generated_ids  --steps greedy ids
 *   layers         --dump-layers: residual stream of the last prompt position after each layer,
 * then after the final mix routes         --dump-routes: layer, position, ids and weights of the
 * prompt, in the order of the passes times          sums over all passes, in seconds;
 * distinct_experts, routed_rows */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/parse.h"
#include "k3-computed/pass.h"
#include "tests/unit/file_source.h"

struct probe {
    const char *model, *ids_text, *kernels, *logits_kind;
    uint32_t steps, batch_rows, threads, layers;
    uint64_t block_bytes;
    bool dump_layers, dump_routes;

    struct k3_model *m;
    struct k3_file_source *file;
    struct k3_team *team;
    struct k3_pass *pass;
    struct k3_state *state;
    uint32_t *ids, n_ids;
    float *logits; /* [batch_rows][vocab] */
    bool in_prompt, first;
    uint32_t base;  /* position of row 0 of the pass at work */
    float *layer_h; /* [layers + 1][hidden] of the last row */
    char *routes;
    size_t routes_len;
    FILE *routes_out;
    char *text; /* printed when all went well */
    size_t text_len;
    FILE *out;
    struct k3_pass_times sum;
};

static void print_float(FILE *f, float x)
{
    if (isfinite(x))
        fprintf(f, "%.9g", x);
    else
        fputs("null", f);
}

static void print_vector(FILE *f, const float *x, size_t n)
{
    fputc('[', f);
    for (size_t i = 0; i < n; i++) {
        if (i)
            fputc(',', f);
        print_float(f, x[i]);
    }
    fputc(']', f);
}

static void on_layer(void *arg, uint32_t layer, const float *h, uint32_t n_rows)
{
    struct probe *p = arg;
    size_t width = p->m->cfg.hidden;

    if (p->in_prompt)
        memcpy(p->layer_h + layer * width, h + (n_rows - 1) * width, width * sizeof(float));
}

static void on_route(void *arg, uint32_t layer, uint32_t row, const uint16_t *ids,
                     const float *weights, uint32_t n)
{
    struct probe *p = arg;
    FILE *f = p->routes_out;

    if (!p->in_prompt)
        return;
    fprintf(f, "%s\n  {\"layer\":%u,\"position\":%u,\"ids\":[", ftell(f) ? "," : "", layer,
            p->base + row);
    for (uint32_t i = 0; i < n; i++)
        fprintf(f, "%s%u", i ? "," : "", ids[i]);
    fputs("],\"weights\":", f);
    print_vector(f, weights, n);
    fputc('}', f);
}

static int read_ids(struct probe *p, struct k3_err *err)
{
    size_t n = 1;
    char *text, *word, *save = NULL;

    for (const char *c = p->ids_text; *c; c++)
        n += *c == ',';
    p->ids = calloc(n, sizeof(*p->ids));
    text = strdup(p->ids_text);
    if (!p->ids || !text) {
        free(text);
        return k3_fail(err, -ENOMEM, "ids");
    }
    for (word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        uint64_t id;

        if (k3_parse_u64(word, 0, UINT32_MAX, &id) < 0) {
            int rc = k3_refuse(err, -EINVAL, "--ids: \"%s\" is not a token id", word);

            free(text);
            return rc;
        }
        p->ids[p->n_ids++] = (uint32_t)id;
    }
    free(text);
    return p->n_ids ? 0 : k3_refuse(err, -EINVAL, "--ids: there must be at least one");
}

static int open_all(struct probe *p, struct k3_err *err)
{
    const struct k3_kernels *k = k3_kernels_get(p->kernels);
    int rc;

    if (!k)
        return k3_refuse(err, -ENOTSUP, "--kernels %s: not on this CPU; auto, c, avx2 or avx512",
                         p->kernels);
    if (strcmp(p->logits_kind, "all") != 0 && strcmp(p->logits_kind, "last") != 0)
        return k3_refuse(err, -EINVAL, "--logits %s: all or last", p->logits_kind);
    if ((rc = read_ids(p, err)) < 0 ||
        (rc = k3_file_source_model(&p->m, p->model, p->layers, err)) < 0 ||
        (rc = k3_file_source_open(&p->file, p->m, p->block_bytes, err)) < 0 ||
        (rc = k3_team_new(&p->team, p->threads, err)) < 0 ||
        (rc = k3_pass_new(&p->pass, p->m, k, p->team, p->batch_rows, err)) < 0 ||
        (rc = k3_state_new(&p->state, &p->m->cfg, p->n_ids + p->steps, err)) < 0)
        return rc;
    p->logits = calloc((size_t)p->batch_rows * p->m->cfg.vocab, sizeof(float));
    p->layer_h = calloc((size_t)(p->m->cfg.n_layers + 1) * p->m->cfg.hidden, sizeof(float));
    p->routes_out = open_memstream(&p->routes, &p->routes_len);
    p->out = open_memstream(&p->text, &p->text_len);
    return p->logits && p->layer_h && p->routes_out && p->out ? 0
                                                              : k3_fail(err, -ENOMEM, "buffers");
}

static void close_all(struct probe *p)
{
    if (p->routes_out)
        fclose(p->routes_out);
    free(p->routes);
    if (p->out)
        fclose(p->out);
    free(p->text);
    free(p->layer_h);
    free(p->logits);
    free(p->ids);
    k3_state_free(p->state);
    k3_pass_free(p->pass);
    k3_team_free(p->team);
    k3_file_source_close(p->file);
    k3_model_close(p->m);
}

static int one_pass(struct probe *p, const uint32_t *ids, uint32_t n, bool all, bool last,
                    struct k3_err *err)
{
    struct k3_pass_hooks hooks = { .arg = p,
                                   .layer_out = p->dump_layers ? on_layer : NULL,
                                   .route = p->dump_routes ? on_route : NULL };
    struct k3_row *rows = calloc(n, sizeof(*rows));
    struct k3_pass_times t;
    int rc;

    if (!rows)
        return k3_fail(err, -ENOMEM, "rows");
    p->base = k3_state_positions(p->state);
    for (uint32_t i = 0; i < n; i++)
        rows[i] = (struct k3_row){ p->state, ids[i], p->base + i, all || (last && i == n - 1) };
    rc = k3_pass_run(p->pass, k3_file_source(p->file), rows, n, p->logits, &hooks, err);
    k3_pass_times(p->pass, &t);
    p->sum.total_ns += t.total_ns;
    p->sum.trunk_wait_ns += t.trunk_wait_ns;
    p->sum.expert_wait_ns += t.expert_wait_ns;
    p->sum.distinct_experts += t.distinct_experts;
    p->sum.routed_rows += t.routed_rows;
    free(rows);
    return rc;
}

static void print_step(struct probe *p, const float *logits)
{
    fputs(p->first ? "\n  " : ",\n  ", p->out);
    print_vector(p->out, logits, p->m->cfg.vocab);
    p->first = false;
}

/* The prompt, then greedy steps. */
static int run(struct probe *p, struct k3_err *err)
{
    bool all = strcmp(p->logits_kind, "all") == 0;
    uint32_t vocab = p->m->cfg.vocab, *out = calloc(p->steps + 1u, sizeof(*out));
    const float *last = p->logits;
    int rc = 0;

    if (!out)
        return k3_fail(err, -ENOMEM, "generated ids");
    p->in_prompt = p->first = true;
    fputs("{\"logits\":[", p->out);
    for (uint32_t done = 0; done < p->n_ids && rc == 0;) {
        uint32_t n = p->n_ids - done < p->batch_rows ? p->n_ids - done : p->batch_rows;

        rc = one_pass(p, p->ids + done, n, all, done + n == p->n_ids, err);
        done += n;
        for (uint32_t i = 0; rc == 0 && i < n && (all || done == p->n_ids); i++) {
            last = p->logits + (size_t)i * vocab;
            print_step(p, last);
            if (!all)
                break;
        }
    }
    p->in_prompt = false;
    p->first = true;
    fprintf(p->out, "]%s", all ? ",\n\"step_logits\":[" : "");
    for (uint32_t s = 0; s < p->steps && rc == 0; s++) {
        if (all)
            print_step(p, last);
        for (uint32_t i = 1; i < vocab; i++)
            if (last[i] > last[out[s]])
                out[s] = i;
        if (s + 1 < p->steps)
            rc = one_pass(p, &out[s], 1, true, true, err);
        last = p->logits;
    }
    fprintf(p->out, "%s,\n\"generated_ids\":[", all ? "]" : "");
    for (uint32_t s = 0; s < p->steps; s++)
        fprintf(p->out, "%s%u", s ? "," : "", out[s]);
    free(out);
    fputs("]", p->out);
    return rc;
}

static void print_dumps(struct probe *p)
{
    const struct k3_config *c = &p->m->cfg;

    if (p->dump_layers) {
        fputs(",\n\"layers\":[", p->out);
        for (uint32_t l = 0; l <= c->n_layers; l++) {
            fputs(l ? ",\n  " : "\n  ", p->out);
            print_vector(p->out, p->layer_h + (size_t)l * c->hidden, c->hidden);
        }
        fputs("]", p->out);
    }
    if (p->dump_routes) {
        fflush(p->routes_out);
        fprintf(p->out, ",\n\"routes\":[%s]", p->routes);
    }
    fprintf(p->out, ",\n\"times\":{\"total\":%.6f,\"trunk_wait\":%.6f,\"expert_wait\":%.6f,",
            (double)p->sum.total_ns / 1e9, (double)p->sum.trunk_wait_ns / 1e9,
            (double)p->sum.expert_wait_ns / 1e9);
    fprintf(p->out,
            "\"distinct_experts\":%llu,\"routed_rows\":%llu},\n\"pass_bytes\":%llu,\"state_bytes\":"
            "%llu}\n",
            (unsigned long long)p->sum.distinct_experts, (unsigned long long)p->sum.routed_rows,
            (unsigned long long)k3_pass_bytes(c, p->batch_rows),
            (unsigned long long)k3_state_bytes(c, p->n_ids + p->steps));
}

int main(int argc, char **argv)
{
    struct probe p = {
        .kernels = "auto", .logits_kind = "last", .batch_rows = 64, .block_bytes = 1 << 20
    };
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &p.model, "DIR", "checkpoint", 0, 0 },
        { "ids", K3_OPT_STRING, &p.ids_text, "N,N,..", "prompt", 0, 0 },
        { "steps", K3_OPT_U32, &p.steps, "N", "greedy ids to generate", 0, 1 << 20 },
        { "batch-rows", K3_OPT_U32, &p.batch_rows, "N", "rows of a pass (64)", 1, 1 << 16 },
        { "threads", K3_OPT_U32, &p.threads, "N", "threads (all that are allowed)", 1, 1024 },
        { "kernels", K3_OPT_STRING, &p.kernels, "NAME", "auto, c, avx2, avx512", 0, 0 },
        { "layers", K3_OPT_U32, &p.layers, "N", "run the first N layers", 0, K3_MAX_LAYERS },
        { "block-bytes", K3_OPT_SIZE, &p.block_bytes, "SIZE", "largest row block (1M)", 0, 0 },
        { "logits", K3_OPT_STRING, &p.logits_kind, "KIND", "all prompt positions, or last", 0, 0 },
        { "dump-layers", K3_OPT_FLAG, &p.dump_layers, NULL, "residual stream after each layer", 0,
          0 },
        { "dump-routes", K3_OPT_FLAG, &p.dump_routes, NULL, "routes of the prompt", 0, 0 },
        { NULL },
    };
    struct k3_err err = K3_ERR_INIT;
    int rc, status;

    if (k3_opts_parse(table, "pass_probe", "runs a checkpoint without daemons and prints JSON",
                      argc, argv, NULL, &status))
        return status;
    if (!p.model || !p.ids_text) {
        fputs("pass_probe: --model and --ids are needed\n", stderr);
        return K3_EXIT_REFUSED;
    }
    rc = open_all(&p, &err);
    if (rc == 0 && (rc = run(&p, &err)) == 0)
        print_dumps(&p);
    if (rc == 0 && (fflush(p.out) != 0 || fwrite(p.text, 1, p.text_len, stdout) != p.text_len ||
                    fflush(stdout) != 0))
        rc = k3_fail(&err, -EIO, "standard output cannot be written");
    if (rc < 0)
        fprintf(stderr, "pass_probe: %s\n", err.text);
    close_all(&p);
    return rc == 0 ? K3_EXIT_OK : err.exit_status;
}
