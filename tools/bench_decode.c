/* k3-bench decode: how near the time of a pass comes to its limit, max(bytes read / raw rate, arithmetic).
 *
 * Raw reads and decoding alternate.  The three daemons are the real ones; sequences of random tokens are submitted to
 * k3-computed, and the passes after the first token of each count (the one before is the prefill).  Bytes, passes and times
 * are the daemons' own counters; arithmetic is the time of the passes without their waits.
 *
 * With --against: how many tokens a second two numbers of sequences make, in windows that alternate. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/daemon.h"
#include "ipc/msg.h"
#include "k3-computed/cpus.h"
#include "tools/bench_decode.h"

#define PROMPT 4u

struct counts {
    uint64_t at_ns, passes, tokens, pass_ns, trunk_wait_ns, expert_wait_ns, arithmetic_ns, trunk_bytes, expert_bytes;
};

static void count(const struct k3_decode *b, struct counts *c)
{
    *c = (struct counts){
        .at_ns = k3_now_ns(),
        .passes = k3_stats_value(&b->computed, "passes"),
        .tokens = k3_stats_value(&b->computed, "tokens_generated"),
        .pass_ns = k3_stats_value(&b->computed, "pass_ns"),
        .trunk_wait_ns = k3_stats_value(&b->computed, "trunk_wait_ns"),
        .expert_wait_ns = k3_stats_value(&b->computed, "expert_wait_ns"),
        .arithmetic_ns = k3_stats_value(&b->computed, "arithmetic_ns"),
        .trunk_bytes = k3_stats_value(&b->setup.trunk, "read_bytes"),
        .expert_bytes = k3_stats_value(&b->setup.expert, "read_bytes"),
    };
}

/* ---- requests ---- */

static int call(struct k3_decode *b, cJSON *request, cJSON **reply, struct k3_err *err)
{
    int rc = k3_client_call(b->client, request, 60000, reply, err);
    const cJSON *text;

    cJSON_Delete(request);
    if (rc < 0 || cJSON_IsTrue(cJSON_GetObjectItem(*reply, "ok")))
        return rc;
    text = cJSON_GetObjectItem(*reply, "error");
    rc = k3_fail(err, -EPROTO, "k3-computed: %s", cJSON_IsString(text) ? text->valuestring : "refused");
    cJSON_Delete(*reply);
    *reply = NULL;
    return rc;
}

static cJSON *command(const char *cmd, const char *id)
{
    cJSON *o = cJSON_CreateObject();

    cJSON_AddStringToObject(o, "cmd", cmd);
    cJSON_AddStringToObject(o, "id", id);
    return o;
}

static void id_of(const struct k3_decode *b, uint32_t window, uint32_t sequence, char out[33])
{
    snprintf(out, 33, "%016" PRIx64 "%08x%08x", b->seed, window, sequence);
}

static int submit(struct k3_decode *b, uint32_t window, uint32_t sequence, struct k3_err *err)
{
    uint64_t random = (uint64_t)window * 1000003u + sequence + 1;
    cJSON *s, *ids, *reply = NULL;
    char id[33];
    int rc;

    id_of(b, window, sequence, id);
    s = command("submit", id);
    ids = cJSON_AddArrayToObject(s, "prompt_ids");
    for (uint32_t i = 0; i < PROMPT; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        cJSON_AddItemToArray(ids, cJSON_CreateNumber((double)((random >> 33) % b->setup.model->cfg.vocab)));
    }
    cJSON_AddNumberToObject(s, "max_tokens", b->tokens);
    cJSON_AddNumberToObject(s, "temperature", 0);
    cJSON_AddNumberToObject(s, "top_p", 1);
    cJSON_AddNumberToObject(s, "top_k", 0);
    cJSON_AddNumberToObject(s, "min_p", 0);
    cJSON_AddStringToObject(s, "seed", "1");
    cJSON_AddArrayToObject(s, "stop_ids"); /* nothing ends it but its length */
    rc = call(b, s, &reply, err);
    cJSON_Delete(reply);
    return rc;
}

/* Waits until the sequence has `tokens` tokens, or with 0 until it has ended. */
static int wait_tokens(struct k3_decode *b, uint32_t window, uint32_t sequence, uint32_t tokens, struct k3_err *err)
{
    uint32_t from = tokens ? tokens - 1 : b->tokens;
    char id[33];

    id_of(b, window, sequence, id);
    for (;;) {
        cJSON *p = command("poll", id), *reply = NULL;
        const cJSON *next, *state, *event;
        bool there;
        int rc;

        if (k3_bench_stop) {
            cJSON_Delete(p);
            return k3_fail(err, -ECANCELED, "stopped");
        }
        cJSON_AddNumberToObject(p, "from", from);
        cJSON_AddNumberToObject(p, "wait_ms", 1000);
        rc = call(b, p, &reply, err);
        if (rc < 0)
            return rc;
        next = cJSON_GetObjectItem(reply, "next");
        state = cJSON_GetObjectItem(reply, "state");
        there = cJSON_IsNumber(next) && next->valuedouble > from;
        cJSON_ArrayForEach(event, cJSON_GetObjectItem(reply, "events"))
        {
            const cJSON *type = cJSON_GetObjectItem(event, "type"), *text = cJSON_GetObjectItem(event, "message");

            if (rc == 0 && cJSON_IsString(type) && strcmp(type->valuestring, "error") == 0)
                rc = k3_fail(err, -EIO, "k3-computed: %s", cJSON_IsString(text) ? text->valuestring : "error");
        }
        if (rc == 0 && !there && cJSON_IsString(state) && strcmp(state->valuestring, "ended") == 0)
            rc = k3_fail(err, -EPROTO, "a sequence ended before its %u tokens", b->tokens);
        cJSON_Delete(reply);
        if (rc < 0 || there)
            return rc;
        if (window == 0)
            k3_bench_progress("warming up: the first passes load what is pinned");
        else
            k3_bench_progress("window %u: waiting for %s", window, tokens ? "the prefill" : "the last token");
    }
}

/* n_sequences: what happens between the first token of the last of them and the end of all; tokens a second up to the end of
 * the first one, since until then all take part in every pass. */
static int decode(struct k3_decode *b, uint32_t window, uint32_t n_sequences, struct k3_decode_window *w, struct k3_err *err)
{
    struct counts c0, all = { 0 }, c1;
    double n;
    int rc = 0;

    for (uint32_t s = 0; s < n_sequences && rc == 0; s++)
        rc = submit(b, window, s, err);
    for (uint32_t s = 0; s < n_sequences && rc == 0; s++)
        rc = wait_tokens(b, window, s, 1, err);
    if (rc < 0)
        return rc;
    count(b, &c0);
    for (uint32_t s = 0; s < n_sequences && rc == 0; s++) {
        rc = wait_tokens(b, window, s, 0, err);
        if (s == 0)
            count(b, &all);
    }
    if (rc < 0)
        return rc;
    count(b, &c1);
    for (uint32_t s = 0; s < n_sequences && rc == 0; s++) {
        cJSON *reply = NULL;
        char id[33];

        id_of(b, window, s, id);
        rc = call(b, command("forget", id), &reply, err);
        cJSON_Delete(reply);
    }
    n = (double)(c1.passes - c0.passes);
    if (rc == 0 && (n < 1 || (b->against && all.passes == c0.passes)))
        return k3_fail(err, -EPROTO, "no pass between the first tokens and the last: give more --tokens");
    w->pass_s = (double)(c1.pass_ns - c0.pass_ns) / 1e9 / n;
    w->wall_s = (double)(c1.at_ns - c0.at_ns) / 1e9 / n;
    w->arithmetic_s = (double)(c1.arithmetic_ns - c0.arithmetic_ns) / 1e9 / n;
    w->trunk_wait_s = (double)(c1.trunk_wait_ns - c0.trunk_wait_ns) / 1e9 / n;
    w->expert_wait_s = (double)(c1.expert_wait_ns - c0.expert_wait_ns) / 1e9 / n;
    w->bytes = (double)(c1.trunk_bytes - c0.trunk_bytes + c1.expert_bytes - c0.expert_bytes) / n;
    w->limit_s = w->bytes / w->raw > w->arithmetic_s ? w->bytes / w->raw : w->arithmetic_s;
    w->tokens_per_s = (double)(all.tokens - c0.tokens) * 1e9 / (double)(all.at_ns - c0.at_ns + 1);
    return rc;
}

/* ---- the report ---- */

static void report(const struct k3_decode *b, const struct k3_decode_window *w)
{
    double share[64], raw[64], pass[64], arithmetic[64], reading[64], bytes[64], trunk[64], expert[64];
    char spread[64], pinned[K3_SIZE_TEXT], all[K3_SIZE_TEXT], cache[K3_SIZE_TEXT];

    for (uint32_t i = 0; i < b->pairs; i++) {
        share[i] = w[i].pass_s / w[i].limit_s;
        raw[i] = w[i].raw;
        pass[i] = w[i].pass_s;
        arithmetic[i] = w[i].arithmetic_s;
        reading[i] = w[i].bytes / w[i].raw;
        bytes[i] = w[i].bytes;
        trunk[i] = w[i].trunk_wait_s;
        expert[i] = w[i].expert_wait_s;
    }
    printf("%u sequence%s, %s pinned of %s, pins %s, cache %s\n", b->sequences, b->sequences == 1 ? "" : "s",
           k3_size_text(pinned, b->pinned_bytes), k3_size_text(all, b->all_bytes), b->setup.pins ? b->setup.pins : "spread",
           k3_size_text(cache, b->setup.cache_bytes));
    printf("%-28s %8.3f GB\n", "read by a pass", k3_bench_median(bytes, b->pairs) / 1e9);
    printf("%-28s %8.3f GB/s  depth %u, blocks of %u KiB\n", "raw device", k3_bench_median(raw, b->pairs) / 1e9,
           b->setup.rate.depth, b->setup.rate.block_bytes >> 10);
    printf("%-28s %8.3f s\n", "reading alone (bytes / raw)", k3_bench_median(reading, b->pairs));
    printf("%-28s %8.3f s\n", "arithmetic", k3_bench_median(arithmetic, b->pairs));
    printf("%-28s %8.3f s\n", "waiting for the trunk", k3_bench_median(trunk, b->pairs));
    printf("%-28s %8.3f s\n", "waiting for experts", k3_bench_median(expert, b->pairs));
    printf("%-28s %8.3f s     %s of the larger\n", "a pass", k3_bench_median(pass, b->pairs),
           k3_bench_spread(share, b->pairs, spread));
    printf("median (least to greatest) of %u alternating windows of %u pass%s\n", b->pairs, b->tokens - 1,
           b->tokens == 2 ? "" : "es");
    if (!b->tsv)
        return;
    printf("window\traw_bytes_per_s\tbytes\tpass_s\twall_s\tarithmetic_s\ttrunk_wait_s\texpert_wait_s\n");
    for (uint32_t i = 0; i < b->pairs; i++)
        printf("%u\t%.0f\t%.0f\t%.6f\t%.6f\t%.6f\t%.6f\t%.6f\n", i + 1, w[i].raw, w[i].bytes, w[i].pass_s, w[i].wall_s,
               w[i].arithmetic_s, w[i].trunk_wait_s, w[i].expert_wait_s);
}

static void report_against(const struct k3_decode *b, const struct k3_decode_window *w)
{
    static const char *const plural[2] = { "", "s" };
    double ratio[64], tokens[64], pass[64], arithmetic[64], trunk[64], expert[64];
    uint32_t n[2] = { b->sequences, b->against };
    char spread[64];

    printf("%-16s %12s %10s %12s %14s %14s\n", "in each pass", "tokens/s", "a pass s", "arithmetic s", "trunk wait s",
           "expert wait s");
    for (uint32_t side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < b->pairs; i++) {
            const struct k3_decode_window *at = &w[2 * i + side];

            tokens[i] = at->tokens_per_s;
            pass[i] = at->pass_s;
            arithmetic[i] = at->arithmetic_s;
            trunk[i] = at->trunk_wait_s;
            expert[i] = at->expert_wait_s;
            ratio[i] = w[2 * i].tokens_per_s / w[2 * i + 1].tokens_per_s;
        }
        printf("%3u %-12.*s %12.4f %10.4f %12.4f %14.4f %14.4f\n", n[side], n[side] == 1 ? 8 : 9, "sequences",
               k3_bench_median(tokens, b->pairs), k3_bench_median(pass, b->pairs), k3_bench_median(arithmetic, b->pairs),
               k3_bench_median(trunk, b->pairs), k3_bench_median(expert, b->pairs));
    }
    printf("tokens per second of %u sequence%s / of %u: %s, median (least to greatest) of %u alternating pairs\n", n[0],
           plural[n[0] != 1], n[1], k3_bench_spread(ratio, b->pairs, spread), b->pairs);
    if (!b->tsv)
        return;
    printf("pair\tsequences\ttokens_per_s\tbytes\tpass_s\twall_s\tarithmetic_s\ttrunk_wait_s\texpert_wait_s\n");
    for (uint32_t i = 0; i < 2 * b->pairs; i++)
        printf("%u\t%u\t%.6f\t%.0f\t%.6f\t%.6f\t%.6f\t%.6f\t%.6f\n", i / 2 + 1, n[i % 2], w[i].tokens_per_s, w[i].bytes,
               w[i].pass_s, w[i].wall_s, w[i].arithmetic_s, w[i].trunk_wait_s, w[i].expert_wait_s);
}

static uint32_t most_sequences(const struct k3_decode *b)
{
    return b->against > b->sequences ? b->against : b->sequences;
}

static int refuse_unread(const struct k3_decode *b, struct k3_err *err)
{
    const struct k3_bench_setup *s = &b->setup;
    char pinned[K3_SIZE_TEXT], all[K3_SIZE_TEXT];

    return k3_refuse(err, -EINVAL, "with --trunk-gb %g and --cache-gb %g a pass reads nothing to compare it with: %s of the trunk's %s "
                     "are pinned, the cache has %" PRIu64 " slots for %" PRIu64 " experts; give less --trunk-gb, or a larger model",
                     (double)s->trunk_bytes / 1e9, (double)s->cache_bytes / 1e9,
                     k3_size_text(pinned, k3_stats_value(&s->trunk, "pinned_bytes")), k3_size_text(all, s->model->trunk_bytes),
                     k3_stats_value(&s->expert, "slots"), k3_bench_n_experts(s->model));
}

/* What the budgets tell before anything is measured. */
static int check_reads(const struct k3_decode *b, struct k3_err *err)
{
    const struct k3_bench_setup *s = &b->setup;

    if (!b->must_read || k3_stats_value(&s->trunk, "pinned_bytes") < s->model->trunk_bytes ||
        k3_stats_value(&s->expert, "slots") < k3_bench_n_experts(s->model))
        return 0;
    return refuse_unread(b, err);
}

static int windows(struct k3_decode *b, struct k3_decode_window *w, struct k3_err *err)
{
    uint32_t n = b->against ? 2 * b->pairs : b->pairs;
    struct k3_decode_window warm = { .raw = 1 };
    int rc;

    rc = check_reads(b, err);
    if (rc < 0)
        return rc;
    k3_bench_progress("warming up: the first passes load what is pinned");
    rc = decode(b, 0, most_sequences(b), &warm, err);
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        k3_bench_progress("window %u of %u", i + 1, n);
        k3_bench_idle(&b->setup);
        w[i].raw = 1;
        if (!b->against)
            rc = k3_bench_raw_run(b->setup.raw, b->seconds, &w[i].raw, err);
        if (rc == 0)
            rc = decode(b, i + 1, b->against && i % 2 ? b->against : b->sequences, &w[i], err);
        if (rc == 0 && b->must_read && w[i].bytes <= 0)
            rc = refuse_unread(b, err);
    }
    return rc;
}

/* ---- opening and closing ---- */

static int start_computed(struct k3_decode *b, struct k3_err *err)
{
    struct k3_bench_setup *s = &b->setup;
    char layers[16], sequences[16], ctx[16], threads[16], rows[16], prefetch[16];
    const char *argv[2 * sizeof(s->trunk_devices.item) / sizeof(char *) + 16];
    uint32_t most = most_sequences(b);
    size_t n = 0;

    snprintf(layers, sizeof(layers), "%u", s->model->cfg.n_layers);
    snprintf(sequences, sizeof(sequences), "%u", most);
    snprintf(ctx, sizeof(ctx), "%u", PROMPT + b->tokens);
    snprintf(threads, sizeof(threads), "%u", b->threads);
    snprintf(prefetch, sizeof(prefetch), "%u", b->prefetch);
    snprintf(rows, sizeof(rows), "%u", most * PROMPT < 64 ? 64 : most * PROMPT);
    argv[n++] = "--model", argv[n++] = s->model_dir, argv[n++] = "--layers", argv[n++] = layers;
    argv[n++] = "--sequences", argv[n++] = sequences, argv[n++] = "--ctx", argv[n++] = ctx;
    argv[n++] = "--batch-rows", argv[n++] = rows;
    if (b->threads)
        argv[n++] = "--threads", argv[n++] = threads;
    if (b->force_threads)
        argv[n++] = "--force-threads";
    if (b->prefetch)
        argv[n++] = "--prefetch", argv[n++] = prefetch;
    n = k3_bench_devices(argv, n, &s->trunk_devices);
    argv[n] = NULL;
    return k3_bench_family_start(&s->family, "k3-computed", argv, err);
}

int k3_decode_measure(struct k3_decode *b, struct k3_decode_window *w, struct k3_err *err)
{
    struct k3_bench_setup *s = &b->setup;
    int rc;

    s->no_raw = b->against != 0;
    rc = k3_bench_open(s, err);
    b->seed = k3_now_ns();
    b->client = NULL;
    b->computed = (struct k3_stats){ .seg = K3_SEG_INIT };
    if (rc == 0)
        rc = k3_bench_start_weights(s, err);
    if (rc == 0)
        rc = start_computed(b, err);
    if (rc == 0)
        rc = k3_bench_wait(s, err);
    if (rc == 0)
        rc = k3_bench_family_stats(&s->family, "k3-computed", &b->computed, err);
    if (rc == 0)
        rc = k3_client_open(&b->client, s->family.rundir, "computed.sock", err);
    if (rc == 0)
        rc = windows(b, w, err);
    if (rc == 0) {
        b->pinned_bytes = k3_stats_value(&s->trunk, "pinned_bytes");
        b->all_bytes = s->model->trunk_bytes;
    }
    k3_client_close(b->client);
    k3_stats_close(&b->computed);
    k3_bench_close(s);
    return rc;
}

int k3_bench_decode(int argc, char **argv)
{
    struct k3_decode b = K3_DECODE_DEFAULT;
    struct k3_decode_window w[2 * K3_BENCH_PAIRS * 4] = { 0 };
    struct k3_err err = K3_ERR_INIT;
    int status, rc;
    const struct k3_opt table[] = {
        K3_DECODE_OPT_ROWS(&b),
        { "trunk-gb", K3_OPT_GB, &b.setup.trunk_bytes, "X", "memory for the trunk in 10^9 bytes (default 1)", 0, 0 },
        { "cache-gb", K3_OPT_GB, &b.setup.cache_bytes, "X", "memory for experts in 10^9 bytes (default 1)", 0, 0 },
        { "against", K3_OPT_U32, &b.against, "N",
          "alternate with windows of N sequences and print the ratio of tokens per second, instead of the limit", 1, 256 },
        { "pins", K3_OPT_STRING, &b.setup.pins, "HOW", "spread (default) or prefix, to see what spreading is worth", 0, 0 },
        { "seconds", K3_OPT_DOUBLE, &b.seconds, "S", "length of the raw part of a window (default 2)", 0.05, 600 },
        { "pairs", K3_OPT_U32, &b.pairs, "N", "alternating windows (default 9; fewer are for trying)", 1,
          K3_BENCH_PAIRS * 4 },
        { "tsv", K3_OPT_FLAG, &b.tsv, NULL, "print every window, separated by tabs", 0, 0 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };

    if (k3_opts_parse(table, "k3-bench decode", "the time of a pass against max(bytes / raw rate, arithmetic)", argc, argv,
                      NULL, &status))
        return status;
    if (!k3_bench_need_model("decode", b.setup.model_dir))
        return K3_EXIT_REFUSED;
    if (b.setup.pins && strcmp(b.setup.pins, "spread") && strcmp(b.setup.pins, "prefix")) {
        fprintf(stderr, "k3-bench: --pins %s: must be spread or prefix\n", b.setup.pins);
        return K3_EXIT_REFUSED;
    }
    b.must_read = !b.against;
    rc = k3_threads_check(&b.threads, b.force_threads, &err);
    if (rc == 0)
        rc = k3_decode_measure(&b, w, &err);
    if (rc == 0 && b.against)
        report_against(&b, w);
    else if (rc == 0)
        report(&b, w);
    return k3_bench_end(rc, &err);
}
