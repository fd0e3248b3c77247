/* model/config.c: both forms, every field, every contradiction, all faults in one line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/model_files.h"

/* Parses and expects exit 2 with every part of `parts` in the words. */
static void refused(const char *json, const char *const *parts, size_t n)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    int rc = k3_config_parse(&c, json, strlen(json), 0, &err);

    if (rc == 0)
        fail_msg("was accepted, should say: %s", parts[0]);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_null(strchr(err.text, '\n'));
    for (size_t i = 0; i < n; i++)
        if (!strstr(err.text, parts[i]))
            fail_msg("\"%s\" is not in: %s", parts[i], err.text);
}

static char *released(void)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    char *json;

    k3_mk_config_released(&c);
    if (k3_mk_config_json(&c, false, &json, &err) < 0)
        fail_msg("%s", err.text);
    return json;
}

static void released_form(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c, want;
    char *json = released();
    uint32_t n_mla = 0;

    assert_int_equal(k3_config_parse(&c, json, strlen(json), 0, &err), 0);
    k3_mk_config_released(&want);
    assert_memory_equal(&c, &want, sizeof(c));
    for (uint32_t i = 0; i < c.n_layers; i++) {
        bool mla = i % 4 == 3 || i == 92; /* spec/model.md 2 */

        assert_int_equal(c.kind[i], mla ? K3_MLA : K3_KDA);
        n_mla += mla;
    }
    assert_int_equal(n_mla, 24);
    assert_int_equal(c.eos, 163586);
    assert_true(k3_layer_is_dense(&c, 0));
    assert_false(k3_layer_is_dense(&c, 1));
    free(json);
}

static void flat_form(void **state)
{
    (void)state;
    /* the fixture of spec/model.md 1.3 in its loadable form */
    static const char json[] =
        "{\"hidden_size\":128,\"num_hidden_layers\":13,\"vocab_size\":256,\"rms_norm_eps\":1e-05,\"kda_num_heads\":4,"
        "\"kda_head_dim\":16,\"short_conv_kernel_size\":4,\"gate_lower_bound\":-5.0,\"num_attention_heads\":4,"
        "\"q_lora_rank\":64,\"kv_lora_rank\":32,\"qk_nope_head_dim\":24,\"qk_rope_head_dim\":8,\"v_head_dim\":16,"
        "\"mla_use_output_gate\":true,\"num_experts\":8,\"num_experts_per_token\":2,\"num_shared_experts\":2,"
        "\"routed_expert_hidden_size\":64,\"moe_intermediate_size\":64,\"routed_scaling_factor\":1.0,"
        "\"moe_renormalize\":true,\"latent_moe_use_norm\":true,\"first_k_dense_replace\":1,\"intermediate_size\":96,"
        "\"attn_res_block_size\":3,\"situ_beta\":4.0,\"situ_linear_beta\":25.0,\"full_attn_layers\":[4,8,12,13]}";
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    char *bad;

    if (k3_config_parse(&c, json, strlen(json), 0, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(c.hidden, 128);
    assert_int_equal(c.kda_heads, 4);
    assert_int_equal(c.kda_dim, 16);
    assert_int_equal(c.kind[3], K3_MLA);
    assert_int_equal(c.kind[4], K3_KDA);
    assert_int_equal(c.kind[12], K3_MLA);
    assert_true(c.situ_linear_beta == 25);
    assert_true(c.latent_eps == 1e-5f);
    assert_int_equal(c.bos, -1);
    bad = k3_test_replace(json, "\"kda_num_heads\":4,", "");
    refused(bad, (const char *const[]){ "config.json: missing: kda_num_heads" }, 1);
    free(bad);
    bad = k3_test_replace(json, "\"moe_intermediate_size\":64", "\"moe_intermediate_size\":48");
    refused(bad, (const char *const[]){ "moe_intermediate_size is 48, must be a multiple of 32" }, 1);
    free(bad);
}

static void both_forms_agree(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c, nested, flat;
    char *json;

    k3_mk_config_formula(&c);
    for (int form = 0; form < 2; form++) {
        assert_int_equal(k3_mk_config_json(&c, form == 1, &json, &err), 0);
        assert_int_equal(k3_config_parse(form ? &flat : &nested, json, strlen(json), 0, &err), 0);
        free(json);
    }
    assert_memory_equal(&nested, &flat, sizeof(flat));
}

static void every_field_is_needed(void **state)
{
    (void)state;
    static const char *const names[] = {
        "hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "activation_situ_beta",
        "activation_situ_linear_beta", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate", "num_heads", "head_dim", "short_conv_kernel_size",
        "gate_lower_bound", "full_attn_layers", "intermediate_size", "first_k_dense_replace", "num_experts",
        "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size",
        "latent_moe_use_norm", "moe_renormalize", "routed_scaling_factor", "attn_res_block_size",
    };
    size_t n = sizeof(names) / sizeof(names[0]);
    char *json = released();

    for (size_t i = 0; i < n; i++) {
        char from[64], to[64], words[96], *bad;

        snprintf(from, sizeof(from), "\"%s\":", names[i]);
        snprintf(to, sizeof(to), "\"x_%s\":", names[i]);
        bad = k3_test_replace(json, from, to);
        snprintf(words, sizeof(words), "config.json: missing in text_config");
        refused(bad, (const char *const[]){ words, names[i] }, 2);
        free(bad);
    }
    free(json);
}

static void all_faults_in_one_line(void **state)
{
    (void)state;
    char *json = released(), *a = k3_test_replace(json, "\"hidden_size\": 7168", "\"hidden_size\": 0");
    char *b = k3_test_replace(a, "\"q_lora_rank\": 1536,", "");
    char *c = k3_test_replace(b, "\"num_experts\": 896", "\"num_experts\": \"many\"");
    char *d = k3_test_replace(c, "true", "\"yes\"");

    refused(d, (const char *const[]){ "4 faults: ", "hidden_size is 0, must be a whole number from 1 to", "missing in text_config: q_lora_rank;",
                                      "num_experts is \"many\"", "mla_use_output_gate is \"yes\", must be true or false" },
            5);
    /* nothing is there: every field is named, in both forms */
    refused("{}", (const char *const[]){ "29 faults: missing: hidden_size,", " situ_beta,", " attn_res_block_size,",
                                         " full_attn_layers" }, 4);
    refused("{\"text_config\":{\"linear_attn_config\":{}}}",
            (const char *const[]){ "29 faults: missing in text_config: hidden_size,", " attn_res_block_size;",
                                   "missing in text_config.linear_attn_config: num_heads, head_dim,",
                                   ", full_attn_layers" }, 4);
    refused("{\"eos_token_id\":1e99}", (const char *const[]){ "29 faults" }, 1);
    free(json), free(a), free(b), free(c), free(d);
}

static void wrong_values(void **state)
{
    (void)state;
    static const struct { const char *from, *to, *words; } cases[] = {
        { "\"num_experts\": 896", "\"num_experts\": 0", "num_experts is 0, must be a whole number from 1 to 65535" },
        { "\"num_experts_per_token\": 16", "\"num_experts_per_token\": 897", "is 897, must be at most num_experts 896" },
        { "\"num_experts_per_token\": 16", "\"num_experts_per_token\": 0", "num_experts_per_token is 0" },
        { "[4, 8,", "[999, 8,", "full_attn_layers has layer 999, must be from 1 to 93" },
        { "[4, 8,", "[0, 8,", "full_attn_layers has layer 0" },
        { "[4, 8,", "[8, 8,", "has layer 8 after 8, must increase" },
        { "[4, 8,", "[8, 4,", "has layer 4 after 8, must increase" },
        { "[4, 8,", "[4.5, 8,", "has layer 4.5" },
        { "[4, 8,", "[\"4\", 8,", "has layer \"4\"" },
        { "[4, 8,", "[8,", "layer 4 is in neither" },
        { "[1, 2, 3, 5,", "[1, 2, 3, 4, 5,", "layer 4 is in both" },
        { "[1, 2, 3, 5,", "[1, 2, 5,", "layer 3 is in neither" },
        { "\"full_attn_layers\": [", "\"full_attn_layers\": 4, \"x\": [", "full_attn_layers is 4, must be an array" },
        { "\"routed_expert_hidden_size\": 3584", "\"routed_expert_hidden_size\": 3590", "3590, must be a multiple of 32" },
        { "\"moe_intermediate_size\": 3072", "\"moe_intermediate_size\": 3071", "3071, must be a multiple of 32" },
        { "\"hidden_size\": 7168", "\"hidden_size\": 7168.5", "hidden_size is 7168.5, must be a whole number" },
        { "\"hidden_size\": 7168", "\"hidden_size\": -1", "hidden_size is -1" },
        { "\"hidden_size\": 7168", "\"hidden_size\": 1e30", "hidden_size is 1e+30" },
        { "\"hidden_size\": 7168", "\"hidden_size\": 1e999", "hidden_size is inf" },
        { "\"hidden_size\": 7168", "\"hidden_size\": null", "hidden_size is null" },
        { "\"hidden_size\": 7168", "\"hidden_size\": [7168]", "hidden_size is an array" },
        { "\"hidden_size\": 7168", "\"hidden_size\": 7168, \"hidden_size\": 64", "hidden_size is given twice" },
        { "\"num_hidden_layers\": 93", "\"num_hidden_layers\": 513", "num_hidden_layers is 513" },
        { "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0", "rms_norm_eps is 0, must be a number from" },
        { "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e999", "rms_norm_eps is inf" },
        { "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": NaN", "is not a JSON object" },
        { "\"gate_lower_bound\": -5", "\"gate_lower_bound\": 5", "gate_lower_bound is 5" },
        { "\"first_k_dense_replace\": 1", "\"first_k_dense_replace\": 94", "94, must be at most num_hidden_layers 93" },
        { "\"num_attention_heads\": 96", "\"num_attention_heads\": 60000", "num_attention_heads times" },
        { "\"eos_token_id\": 163586", "\"eos_token_id\": 163840", "eos_token_id is 163840" },
        { "\"eos_token_id\": 163586", "\"eos_token_id\": 1", "eos_token_id is 1 at the top and 163586 in text_config" },
        /* kinds of which there is one */
        { "\"hidden_act\": \"situ\"", "\"hidden_act\": \"silu\"", "hidden_act is \"silu\", only \"situ\"" },
        { "\"mla_use_nope\": true", "\"mla_use_nope\": false", "mla_use_nope is false" },
        { "\"use_full_rank_gate\": true", "\"use_full_rank_gate\": false", "use_full_rank_gate is false" },
        { "\"moe_layer_freq\": 1", "\"moe_layer_freq\": 2", "moe_layer_freq is 2" },
        { "\"sigmoid\"", "\"softmax\"", "moe_router_activation_func is \"softmax\"" },
        { "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", "tie_word_embeddings is true" },
        { "\"num_key_value_heads\": 96", "\"num_key_value_heads\": 8", "num_key_value_heads is 8" },
        { "\"mxfp4-pack-quantized\"", "\"int4\"", "quantization_config.format is \"int4\"" },
        { "\"kimi_k3\"", "\"llama\"", "model_type is \"llama\"" },
        { "\"text_config\": {", "\"text_config\": 3, \"x\": {", "text_config is 3, must be an object" },
        { "\"text_config\":", "\"x\":", "text_config is missing" },
        { "\"linear_attn_config\":", "\"x\":", "linear_attn_config is missing" },
        { "\"model_type\": \"kimi_linear\"", "\"num_expert_group\": 8", "num_expert_group is 8" },
    };
    char *json = released();

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *bad = k3_test_replace(json, cases[i].from, cases[i].to);

        refused(bad, &cases[i].words, 1);
        free(bad);
    }
    free(json);
}

static void kinds_may_be_absent(void **state)
{
    (void)state;
    static const char *const absent[] = { "\"hidden_act\": \"situ\",", "\"mla_use_nope\": true,", "\"moe_layer_freq\": 1,",
                                          "\"use_full_rank_gate\": true,", "\"num_key_value_heads\": 96,",
                                          "\"moe_router_activation_func\": \"sigmoid\"," };
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c, want;
    char *json = released(), *next;

    for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
        next = k3_test_replace(json, absent[i], "");
        free(json);
        json = next;
    }
    next = strstr(json, ",\n      \"kda_layers\"");
    assert_non_null(next);
    memmove(next, strchr(next, ']') + 1, strlen(strchr(next, ']') + 1) + 1);
    k3_mk_config_released(&want);
    if (k3_config_parse(&c, json, strlen(json), 0, &err) < 0)
        fail_msg("%s", err.text);
    assert_memory_equal(&c, &want, sizeof(c));
    free(json);
}

static void not_json(void **state)
{
    (void)state;
    char *json = released();

    for (size_t n = 0; n + 2 < strlen(json); n += 37) {
        struct k3_err err = K3_ERR_INIT;
        struct k3_config c;
        char *cut = strndup(json, n); /* exactly n bytes and a 0: a read past the end is seen by ASan */

        assert_int_not_equal(k3_config_parse(&c, cut, n, 0, &err), 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
        free(cut);
    }
    for (int i = 0; i < 4; i++)
        refused((const char *[]){ "[]", "1", "{} x", "{}{}" }[i], (const char *const[]){ "not a JSON object" }, 1);
    free(json);
}

static void first_layers_only(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    char *json = released();

    assert_int_equal(k3_config_parse(&c, json, strlen(json), 8, &err), 0);
    assert_int_equal(c.n_layers, 8);
    assert_int_equal(c.n_layers_model, 93);
    assert_int_not_equal(k3_config_parse(&c, json, strlen(json), 94, &err), 0);
    assert_string_equal(err.text, "config.json: 94 layers were asked for, num_hidden_layers is 93");
    free(json);
}

static void no_such_directory(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    char dir[] = "/tmp/k3-config-XXXXXX", path[64];

    assert_int_not_equal(k3_config_read(&c, "/tmp/k3-no-such-directory", 0, &err), 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "/tmp/k3-no-such-directory/config.json"));
    assert_int_equal(k3_config_read(&c, "run/demo-model", 0, &err), 0);
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20); /* a FIFO must not be waited for */
    assert_int_equal(k3_config_read(&c, dir, 0, &err), -EINVAL);
    alarm(0);
    assert_non_null(strstr(err.text, "config.json is not a regular file"));
    unlink(path);
    rmdir(dir);
    assert_int_equal(c.n_experts, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(released_form),
        cmocka_unit_test(flat_form),
        cmocka_unit_test(both_forms_agree),
        cmocka_unit_test(every_field_is_needed),
        cmocka_unit_test(all_faults_in_one_line),
        cmocka_unit_test(wrong_values),
        cmocka_unit_test(kinds_may_be_absent),
        cmocka_unit_test(not_json),
        cmocka_unit_test(first_layers_only),
        cmocka_unit_test(no_such_directory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
