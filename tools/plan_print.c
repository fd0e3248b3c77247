/* tools/plan_print.c: the plan as a table, as KEY=VALUE lines, and as the table of the documentation (plan.h). */
#include <inttypes.h>
#include <string.h>

#include "ipc/parse.h"
#include "tools/plan.h"

static const char *const part_names[K3_N_PLAN] = {
    [K3_PLAN_RING] = "trunk ring",
    [K3_PLAN_PINNED] = "trunk pinned",
    [K3_PLAN_RESIDENT] = "resident tensors",
    [K3_PLAN_SLOTS] = "expert slots",
    [K3_PLAN_STATE] = "state",
    [K3_PLAN_KV] = "context",
    [K3_PLAN_SNAPSHOTS] = "snapshots",
    [K3_PLAN_ROWS] = "row buffers",
    [K3_PLAN_LOGITS] = "logits, sampling",
    [K3_PLAN_SCRATCH] = "threads",
    [K3_PLAN_REQUESTS] = "requests kept",
    [K3_PLAN_INDEX] = "index",
    [K3_PLAN_LOADING] = "index while loading",
    [K3_PLAN_TABLES] = "page tables",
    [K3_PLAN_SERVER] = "server",
    [K3_PLAN_PROGRAMS] = "programs",
};

const char *k3_plan_part_name(enum k3_plan_part part)
{
    return part_names[part];
}

static void remark(char *out, size_t len, const struct k3_plan *p, enum k3_plan_part part)
{
    const struct k3_plan_opts *o = &p->opts;
    char a[K3_GROUPED_TEXT], b[K3_GROUPED_TEXT];

    out[0] = 0;
    switch (part) {
    case K3_PLAN_PINNED:
        snprintf(out, len, "%.1f%% of the trunk's %.1f MB", p->trunk_total_bytes ? 100.0 * (double)p->pinned_bytes /
                 (double)p->trunk_total_bytes : 100.0, (double)p->trunk_total_bytes / 1e6);
        break;
    case K3_PLAN_SLOTS:
        snprintf(out, len, "%s of %s experts", k3_grouped_text(a, p->n_slots), k3_grouped_text(b, p->n_experts));
        break;
    case K3_PLAN_STATE:
        snprintf(out, len, "%u sequence%s", o->sequences, o->sequences == 1 ? "" : "s");
        break;
    case K3_PLAN_KV:
        snprintf(out, len, "%s positions%s", k3_grouped_text(a, o->ctx), o->sequences == 1 ? "" : " each");
        break;
    case K3_PLAN_SNAPSHOTS:
        snprintf(out, len, "%u beginning%s of conversations", o->snapshots, o->snapshots == 1 ? "" : "s");
        break;
    case K3_PLAN_ROWS:
        snprintf(out, len, "%u row%s of a pass", o->batch_rows, o->batch_rows == 1 ? "" : "s");
        break;
    case K3_PLAN_SCRATCH:
        snprintf(out, len, "%u", o->threads);
        break;
    case K3_PLAN_LOADING:
        snprintf(out, len, "when both weight daemons restart at once");
        break;
    default:
        break;
    }
}

static void print_devices(FILE *f, const char *prefix, const struct k3_plan *p, const struct k3_plan_view *v)
{
    double total = (double)(p->trunk_read_bytes + p->expert_read_bytes), unit = total < 1e9 ? 1e6 : 1e9;

    fprintf(f, "%sa token reads  %.2f %s: trunk %.2f, experts %.2f (as if chosen at random)\n", prefix, total / unit,
            unit < 1e9 ? "MB" : "GB", (double)p->trunk_read_bytes / unit, (double)p->expert_read_bytes / unit);
    if (total <= 0) {
        fprintf(f, "%slimit          none by a drive: nothing is read once all is loaded\n", prefix);
        return;
    }
    if (!v->trunk || v->trunk->bytes_per_s <= 0) {
        fprintf(f, "%slimit          not known: the drive's rate was not measured%s%s\n", prefix, v->trunk ? ": " : "",
                v->trunk ? v->trunk->how : "");
        return;
    }
    fprintf(f, "%slimit          %.3g s/token, by the drive: ", prefix,
            k3_plan_seconds(p, v->trunk->bytes_per_s, v->experts ? v->experts->bytes_per_s : v->trunk->bytes_per_s));
    fprintf(f, "%s %.2f GB/s (%s)", v->trunk->name, v->trunk->bytes_per_s / 1e9, v->trunk->how);
    if (p->opts.split && v->experts)
        fprintf(f, ", experts %s %.2f GB/s (%s)", v->experts->name, v->experts->bytes_per_s / 1e9, v->experts->how);
    fputc('\n', f);
}

void k3_plan_print(FILE *f, const char *prefix, const struct k3_plan *p, const struct k3_plan_view *v)
{
    const struct k3_plan_machine *mc = v->machine;
    char text[128];

    fprintf(f, "%splan of \"%s\": %s, %u layers\n", prefix, v->instance, v->model, v->m->cfg.n_layers);
    for (int i = 0; i < K3_N_PLAN; i++) {
        remark(text, sizeof(text), p, i);
        fprintf(f, "%s  %-20s %12.1f MB%s%s\n", prefix, part_names[i], (double)p->part[i] / 1e6, text[0] ? "  " : "", text);
    }
    fprintf(f, "%s  %-20s %12.1f MB  the promise", prefix, "all together", (double)p->sum_bytes / 1e6);
    if (p->opts.memory_bytes != K3_PLAN_UNSET)
        fprintf(f, "; --memory is %.1f MB", (double)p->opts.memory_bytes / 1e6);
    fputc('\n', f);
    if (mc->left_bytes != K3_MEMORY_NONE) {
        fprintf(f, "%savailable      %.1f MB (%s)", prefix, (double)mc->left_bytes / 1e6, mc->why);
        if (mc->promised_bytes)
            fprintf(f, ", %.1f MB of it promised to %u other%s", (double)mc->promised_bytes / 1e6, mc->n_others,
                    mc->n_others == 1 ? "" : "s");
        fputc('\n', f);
    }
    fprintf(f, "%sdivision       %s\n", prefix, p->reason);
    for (uint32_t i = 0; i < p->n_notes; i++)
        fprintf(f, "%snote           %s\n", prefix, p->note[i]);
    print_devices(f, prefix, p, v);
}

void k3_plan_shell(FILE *f, const struct k3_plan *p, const char *memory_from)
{
    fprintf(f, "trunk-gb=%.9f\n", (double)p->trunk_bytes / 1e9);
    fprintf(f, "cache-gb=%.9f\n", (double)p->cache_bytes / 1e9);
    if (p->opts.ring_mb)
        fprintf(f, "ring-mb=%u\n", p->opts.ring_mb);
    fprintf(f, "batch-rows=%u\n", p->opts.batch_rows);
    fprintf(f, "snapshots=%u\n", p->opts.snapshots);
    fprintf(f, "requests-mb=%u\n", p->opts.requests_mb);
    if (p->opts.http)
        fprintf(f, "http-mb=%u\n", p->opts.http_mb);
    fprintf(f, "memory-from=%s\n", memory_from);
    fprintf(f, "split=%s\n", p->opts.split ? "yes" : "no");
    fprintf(f, "promised=%" PRIu64 "\n", p->sum_bytes);
}

int k3_plan_table(FILE *f, const struct k3_model *m, const struct k3_plan_opts *opts, struct k3_err *err)
{
    static const uint32_t gigabytes[] = { 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512 };
    static const double rates[] = { 1e9, 3e9, 7e9, 14e9 };
    const struct k3_plan_machine mc = { K3_MEMORY_NONE, "", 0, 0, K3_MEMORY_NONE };

    fprintf(f, "| `--memory` | trunk pinned | expert slots | read per token | 1 GB/s | 3 GB/s | 7 GB/s | 14 GB/s |\n");
    fprintf(f, "|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    for (size_t i = 0; i < sizeof(gigabytes) / sizeof(gigabytes[0]); i++) {
        struct k3_plan_opts o = *opts;
        struct k3_plan p;
        int rc;

        o.memory_bytes = (uint64_t)gigabytes[i] << 30;
        rc = k3_plan_make(&p, m, &o, &mc, err);
        if (rc < 0)
            return rc;
        fprintf(f, "| %uG | %.2f GB | %.2f GB | %.2f GB |", gigabytes[i], (double)p.pinned_bytes / 1e9,
                (double)p.part[K3_PLAN_SLOTS] / 1e9, (double)(p.trunk_read_bytes + p.expert_read_bytes) / 1e9);
        for (size_t k = 0; k < sizeof(rates) / sizeof(rates[0]); k++)
            fprintf(f, " %.1f s |", k3_plan_seconds(&p, rates[k], rates[k]));
        fputc('\n', f);
    }
    return 0;
}
