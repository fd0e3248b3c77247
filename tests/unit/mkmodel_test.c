/* tools/mkmodel_*.c: the formula of spec/model.md 8.2, the released layout of 3.1 to 3.6, random values, writing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/model_files.h"

#define TOP "language_model.model."
#define MOE TOP "layers.1.block_sparse_moe."

static struct k3_mk_plan plan_of(const struct k3_mk_opts *o)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan p;

    k3_mk_fill_init();
    if (k3_mk_plan_build(&p, o, &err) < 0)
        fail_msg("%s", err.text);
    return p;
}

static const struct k3_mk_tensor *find(const struct k3_mk_plan *p, const char *name)
{
    for (size_t i = 0; i < p->n_tensors; i++)
        if (!strcmp(k3_mk_name(p, p->tensors + i), name))
            return p->tensors + i;
    fail_msg("no tensor %s", name);
    return NULL;
}

static float widen(uint16_t bf16)
{
    uint32_t u = (uint32_t)bf16 << 16;
    float v;

    memcpy(&v, &u, 4);
    return v;
}

static void formula_values(void **state)
{
    (void)state;
    static const struct { const char *name; uint64_t key; uint8_t dtype; double value[4]; } cases[] = {
        { TOP "embed_tokens.weight", 0xdec43c721d10b8a6, K3_BF16, { 0.46484375, 0.265625, 0.96484375, 0.85546875 } },
        { "language_model.lm_head.weight", 0xf6d56a1e5034d7bd, K3_BF16, { 0.201171875, -0.12890625, -0.171875, 0.0473632812 } },
        { TOP "norm.weight", 0x4ef4b031da406a34, K3_BF16, { 1.1640625, 0.91796875, 0.9921875, 1.25 } },
        { TOP "layers.0.self_attn.A_log", 0x948dd92744663b4a, K3_F32, { 0.559907794, 0.34618032, -0.135530472, 0 } },
        { TOP "layers.0.self_attn.dt_bias", 0x4a7df28f275b9730, K3_F32, { -1.12475944, 0.464437008, -1.54116273, -1.35684848 } },
        { TOP "layers.3.self_attn.kv_b_proj.weight", 0xf424786cabe5fe3b, K3_BF16,
          { -0.408203125, 0.033203125, 0.390625, -0.45703125 } },
        { MOE "gate.e_score_correction_bias", 0xb66ec5adfc7f55e5, K3_F32,
          { -0.0657549202, 0.202789247, -0.0229890347, 0.13301456 } },
    };
    static const uint8_t packed[] = { 147, 78, 213, 40, 249, 40, 23, 24 };
    static const uint8_t scales[] = { 123, 124, 122, 123, 122, 123, 122, 123 };
    struct k3_mk_opts o = k3_test_formula();
    struct k3_mk_plan p = plan_of(&o);
    uint8_t bytes[64];

    assert_int_equal(k3_mk_mix(0), 0xe220a8397b1dcdaf);
    assert_int_equal(k3_mk_mix(1), 0x910a2dec89025cc1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct k3_mk_tensor *t = find(&p, cases[i].name);
        float f[4];
        uint16_t h[4];

        assert_int_equal(t->key, cases[i].key);
        assert_int_equal(t->dtype, cases[i].dtype);
        k3_mk_fill(&p, t, 0, 4 * k3_dtype_bytes(t->dtype), bytes);
        memcpy(f, bytes, sizeof(f));
        memcpy(h, bytes, sizeof(h));
        for (int k = 0; k < 4; k++) {
            double v = (double)(t->dtype == K3_F32 ? f[k] : widen(h[k]));

            assert_true(fabs(v - cases[i].value[k]) <= 6e-9 * fabs(cases[i].value[k])); /* nine digits: one float */
        }
    }
    assert_int_equal(find(&p, TOP "layers.0.self_attn.A_log")->shape[0], 8);
    assert_int_equal(find(&p, MOE "experts.0.w1.weight_packed")->key, 0xb80f2ee9b47d2d01);
    k3_mk_fill(&p, find(&p, MOE "experts.0.w1.weight_packed"), 0, 8, bytes);
    assert_memory_equal(bytes, packed, 8);
    assert_int_equal(find(&p, MOE "experts.0.w1.weight_scale")->key, 0xa3c5beb8aaa1b751);
    k3_mk_fill(&p, find(&p, MOE "experts.0.w1.weight_scale"), 0, 8, bytes);
    assert_memory_equal(bytes, scales, 8);
    k3_mk_plan_free(&p);
}

static void formula_totals(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_formula();
    struct k3_mk_plan p = plan_of(&o);
    uint64_t by_dtype[K3_N_DTYPES] = { 0 };

    for (size_t i = 0; i < p.n_tensors; i++)
        by_dtype[p.tensors[i].dtype] += p.tensors[i].len_bytes;
    assert_int_equal(p.n_tensors, 542);
    assert_int_equal(p.total_bytes, 1382896);
    assert_int_equal(by_dtype[K3_BF16], 827760);
    assert_int_equal(by_dtype[K3_F32], 6784);
    assert_int_equal(by_dtype[K3_U8], 548352);
    k3_mk_plan_free(&p);
}

/* spec/model.md 3.1, 3.5 and 3.6: sizes of all 96 files, headers, the list, and where things lie. */
static void released_layout(void **state)
{
    (void)state;
    static const struct { const char *name; uint32_t shard; uint64_t off; } places[] = {
        { TOP "layers.0.self_attn.A_log", 0, 0 },
        { TOP "layers.0.mlp.up_proj.weight", 0, 969538560 },
        { TOP "layers.0.self_attn.v_proj.weight", 0, 2165052416 },
        { MOE "gate.e_score_correction_bias", 1, 0 },
        { MOE "gate.weight", 1, 643584 },
        { MOE "shared_experts.up_proj.weight", 1, 292417024 },
        { TOP "layers.1.self_attn.q_proj.weight", 1, 915422720 },
        { MOE "experts.0.w1.weight_packed", 1, 1267744256 },
        { MOE "experts.0.w1.weight_scale", 1, 1267744256 + 5505024 },
        { MOE "experts.0.w3.weight_scale", 1, 1267744256 + 17203200 },
        { MOE "experts.1.w1.weight_packed", 1, 1267744256 + 17547264 },
        { MOE "experts.10.w1.weight_packed", 1, 1267744256 + 2 * 17547264 },  /* string order: 0, 1, 10, 100, 101 */
        { MOE "experts.101.w1.weight_packed", 1, 1267744256 + 4 * 17547264ull },
        { TOP "layers.3.self_attn.kv_b_proj.weight", 3, 564362752 },
        { TOP "layers.92.self_attn.q_b_proj.weight", 92, 787712512 },
    };
    struct k3_mk_opts o = { .dtype = K3_BF16, .sparse = true, .vision = true };
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan p;
    uint64_t files = 0;
    char name[64], *text;
    size_t len;
    FILE *f;

    k3_mk_config_released(&o.cfg);
    p = plan_of(&o);
    assert_int_equal(p.n_tensors, 497220);
    assert_int_equal(p.total_bytes, 1560860324864);
    assert_int_equal(p.n_shards, 96);
    for (uint32_t s = 0; s < 96; s++) {
        bool mla = s % 4 == 3 || s == 92;
        uint64_t want = s == 0    ? 2341216112
                        : s == 93 ? 4697664072
                        : s == 94 ? 92289328
                        : s == 95 ? 802448352
                        : s < 10  ? (mla ? 16567501776 : 16990911504)
                                  : (mla ? 16567507176 : 16990916912);
        size_t n = s == 0 ? 23 : s == 93 ? 5 : s == 94 ? 3 : s == 95 ? 165 : mla ? 5398 : 5404;

        assert_int_equal(k3_mk_header(&p, s, &text, &len, &err), 0);
        free(text);
        assert_int_equal(len + p.shards[s].data_bytes, want);
        assert_int_equal(p.shards[s].n, n);
        files += len + p.shards[s].data_bytes;
        if (s == 0)
            assert_int_equal(len, 2928);
    }
    assert_int_equal(files, 1560936091448);
    k3_mk_shard_name(&p, 6, name);
    assert_string_equal(name, "model-00007-of-000096.safetensors");
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        const struct k3_mk_tensor *t = find(&p, places[i].name);

        assert_int_equal(t->shard, places[i].shard);
        assert_int_equal(t->off_bytes, places[i].off);
    }
    f = open_memstream(&text, &len);
    assert_int_equal(k3_mk_list(&p, f), 0);
    fclose(f);
    assert_int_equal(len, 59764096);
    free(text);
    k3_mk_plan_free(&p);
}

static void half_floats(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        double m = h & 0x3ff, v;
        uint32_t e = h >> 10 & 31;

        if (e == 31)
            continue;
        v = ldexp(e ? m + 1024 : m, (int)(e ? e : 1) - 25);
        v = h & 0x8000 ? -v : v;
        assert_int_equal(k3_mk_f16((float)v), h);
        /* just below, at and just above the middle to the next one: to nearest, ties to even */
        if (e < 30 || (h & 0x3ff) < 0x3ff) {
            double step = ldexp(1, (int)(e ? e : 1) - 25), mid = fabs(v) + step / 2;
            uint32_t up = (h & 0x7fff) + 1, down = h & 0x7fff, even = down & 1 ? up : down;

            assert_int_equal(k3_mk_f16((float)mid), even);
            assert_int_equal(k3_mk_f16(nextafterf((float)mid, 0)), down);
            assert_int_equal(k3_mk_f16(nextafterf((float)mid, 1e9f)), up);
        }
    }
    assert_int_equal(k3_mk_f16(65520), 0x7c00);
    assert_int_equal(k3_mk_f16(1e30f), 0x7c00);
    assert_int_equal(k3_mk_f16(-1e-30f), 0x8000);
    assert_int_equal(k3_mk_bf16(1.00390625f), 0x3f80);  /* a tie: to even, down */
    assert_int_equal(k3_mk_bf16(1.01171875f), 0x3f82);  /* a tie: to even, up */
    assert_int_equal(k3_mk_bf16(-1.00390637f), 0xbf81); /* above the tie */
}

/* Any part made alone is the same part of the whole. */
static void parts_equal_whole(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct k3_mk_opts o = i ? k3_test_small() : k3_test_formula();
        struct k3_mk_plan p;

        o.dtype = i == 2 ? K3_F32 : i == 3 ? K3_F16 : K3_BF16;
        p = plan_of(&o);
        for (size_t k = 0; k < p.n_tensors; k += 7) {
            const struct k3_mk_tensor *t = p.tensors + k;
            uint8_t *whole = malloc(t->len_bytes), *part = malloc(t->len_bytes);

            k3_mk_fill(&p, t, 0, t->len_bytes, whole);
            for (uint64_t at = 0; at < t->len_bytes; at += 192)
                k3_mk_fill(&p, t, at, t->len_bytes - at < 192 ? t->len_bytes - at : 192, part + at);
            assert_memory_equal(whole, part, t->len_bytes);
            free(whole);
            free(part);
        }
        k3_mk_plan_free(&p);
    }
}

static void moments(const struct k3_mk_plan *p, const char *name, double *mean, double *sigma)
{
    const struct k3_mk_tensor *t = find(p, name);
    uint16_t *h = malloc(t->len_bytes);
    size_t n = t->len_bytes / 2;
    double s1 = 0, s2 = 0;

    k3_mk_fill(p, t, 0, t->len_bytes, (uint8_t *)h);
    for (size_t i = 0; i < n; i++) {
        double v = (double)widen(h[i]);

        assert_true(isfinite(v));
        s1 += v;
        s2 += v * v;
    }
    free(h);
    *mean = s1 / (double)n;
    *sigma = sqrt(s2 / (double)n - *mean * *mean);
}

static void random_values(void **state)
{
    (void)state;
    static const double e2m1[] = { 0, .5, 1, 1.5, 2, 3, 4, 6 };
    struct k3_mk_opts o = k3_test_small(), other = o;
    struct k3_mk_plan p = plan_of(&o), q;
    const struct k3_mk_tensor *t = find(&p, MOE "experts.3.w1.weight_packed");
    uint8_t packed[64 * 32], scale[64 * 2], packed2[64 * 32];
    double mean, sigma, sum = 0;

    moments(&p, TOP "layers.0.self_attn.q_proj.weight", &mean, &sigma);
    assert_true(fabs(mean) < 0.02 / sqrt(128) * 3 && fabs(sigma * sqrt(128) - 1) < 0.03);
    moments(&p, TOP "embed_tokens.weight", &mean, &sigma);
    assert_true(fabs(mean) < 0.02 && fabs(sigma - 1) < 0.02);
    moments(&p, TOP "norm.weight", &mean, &sigma);
    assert_true(fabs(mean - 1) < 0.05);
    /* experts: the variance of a weight is about 1 / columns, within the factor that powers of two leave */
    assert_int_equal(t->len_bytes, sizeof(packed));
    k3_mk_fill(&p, t, 0, sizeof(packed), packed);
    k3_mk_fill(&p, find(&p, MOE "experts.3.w1.weight_scale"), 0, sizeof(scale), scale);
    for (size_t r = 0; r < 64; r++)
        for (size_t c = 0; c < 64; c++) {
            uint8_t b = packed[r * 32 + c / 2], nibble = c & 1 ? b >> 4 : b & 15;
            double v = e2m1[nibble & 7] * ldexp(1, scale[r * 2 + c / 32] - 127);

            sum += v * v;
        }
    sum = sum / (64 * 64) * 64; /* variance times columns */
    assert_true(sum > 0.45 && sum < 2.2);
    /* another seed is another model, the same seed the same, whatever the layout */
    other.scatter = true;
    q = plan_of(&other);
    k3_mk_fill(&q, find(&q, MOE "experts.3.w1.weight_packed"), 0, sizeof(packed2), packed2);
    assert_memory_equal(packed, packed2, sizeof(packed));
    k3_mk_plan_free(&q);
    other.seed = 2;
    q = plan_of(&other);
    k3_mk_fill(&q, find(&q, MOE "experts.3.w1.weight_packed"), 0, sizeof(packed2), packed2);
    assert_memory_not_equal(packed, packed2, sizeof(packed));
    k3_mk_plan_free(&q);
    k3_mk_plan_free(&p);
}

static size_t n_entries(const char *dir)
{
    DIR *d = opendir(dir);
    size_t n = 0;

    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

static void writing(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_small();
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan p;
    char dir[64], path[128], *header, *file, name[64];
    size_t n, header_bytes;

    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    p = plan_of(&o);
    assert_int_equal(n_entries(dir), 1); /* the temporary name is gone */
    assert_int_equal(n_entries(path), p.n_shards + 2);
    for (uint32_t s = 0; s < p.n_shards; s++) { /* every byte of every shard */
        k3_mk_shard_name(&p, s, name);
        file = k3_test_get(path, name, &n);
        assert_int_equal(k3_mk_header(&p, s, &header, &header_bytes, &err), 0);
        assert_int_equal(header_bytes % 8, 0);
        assert_int_equal(n, header_bytes + p.shards[s].data_bytes);
        assert_memory_equal(file, header, header_bytes);
        for (size_t i = 0; i < p.shards[s].n; i++) {
            const struct k3_mk_tensor *t = p.tensors + p.order[p.shards[s].first + i];
            uint8_t *want = malloc(t->len_bytes);

            k3_mk_fill(&p, t, 0, t->len_bytes, want);
            assert_memory_equal(file + header_bytes + t->off_bytes, want, t->len_bytes);
            free(want);
        }
        free(header);
        free(file);
    }
    assert_int_equal(k3_mk_write(&p, path, &err), -EEXIST);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "is there already"));
    assert_true(k3_mk_write(&p, "/tmp/k3-no-such-directory/m", &err) < 0);
    assert_non_null(strstr(err.text, "in one that is there already"));
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_true(k3_mk_write(&p, "", &err) < 0);
    p.total_bytes = 1ull << 60;
    strcat(path, "2");
    assert_int_equal(k3_mk_write(&p, path, &err), -ENOSPC);
    assert_non_null(strstr(err.text, " free, the model needs 1152921504."));
    assert_int_equal(n_entries(dir), 1);
    k3_mk_plan_free(&p);
    k3_test_dir_remove(dir);
}

static void shards_and_layers(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_small();
    struct k3_err err = K3_ERR_INIT;
    struct k3_mk_plan p;

    for (o.n_shards = 1; o.n_shards <= o.cfg.n_layers + 1; o.n_shards++) {
        p = plan_of(&o);
        assert_int_equal(p.n_shards, o.n_shards);
        for (uint32_t s = 0; s < p.n_shards; s++)
            assert_true(p.shards[s].n > 0);
        k3_mk_plan_free(&p);
    }
    assert_true(k3_mk_plan_build(&p, &o, &err) < 0);
    assert_non_null(strstr(err.text, "9 layers make at most 10 shards"));
    assert_true(k3_mk_config_layers(&o.cfg, 8, "4,9", false, &err) < 0);
    assert_non_null(strstr(err.text, "\"9\" must be a layer from 1 to 8"));
    assert_true(k3_mk_config_layers(&o.cfg, 8, "4,4", false, &err) < 0);
    assert_true(k3_mk_config_layers(&o.cfg, 8, "", false, &err) < 0);
    assert_true(k3_mk_config_layers(&o.cfg, 0, NULL, false, &err) < 0);
    o.cfg = k3_test_small().cfg;
    o.cfg.top_k = 33;
    char *json = NULL;
    assert_true(k3_mk_config_json(&o.cfg, false, &json, &err) < 0);
    assert_non_null(strstr(err.text, "num_experts_per_token is 33, must be at most num_experts 32"));
    assert_null(json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formula_values),    cmocka_unit_test(formula_totals), cmocka_unit_test(released_layout),
        cmocka_unit_test(half_floats),       cmocka_unit_test(parts_equal_whole),
        cmocka_unit_test(random_values),     cmocka_unit_test(writing),        cmocka_unit_test(shards_and_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
