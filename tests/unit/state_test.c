/* tests/unit/state_test.c: k3-computed/state.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/pass_private.h"

static struct k3_config released(void)
{
    static struct k3_config c;

    memset(&c, 0, sizeof(c));
    c.n_layers = c.n_layers_model = 93;
    c.kda_heads = 96;
    c.kda_dim = 128;
    c.conv_taps = 4;
    c.kv_lora = 512;
    c.qk_rope = 64;
    for (uint32_t l = 0; l < 93; l++)
        c.kind[l] = l % 4 == 3 || l == 92 ? K3_MLA : K3_KDA;
    return c;
}

static struct k3_config odd(void)
{
    struct k3_config c = released();

    c.n_layers = 5;
    c.kda_heads = 3;
    c.kda_dim = 7;
    c.conv_taps = 3;
    c.kv_lora = 13;
    c.qk_rope = 5;
    return c;
}

static void bytes_of_the_released_shape(void **state)
{
    struct k3_config c = released();
    uint64_t b0 = 464633856u + 55296u * 4096ull, b = k3_state_bytes(&c, 4096);

    (void)state;
    assert_true(b >= b0 && b <= b0 + 2 * 4096); /* spec/model.md 7.1; header and the last page */
    assert_int_equal(k3_state_bytes(&c, 8192) - b, 55296u * 4096ull);
    assert_int_equal(k3_state_kv_bytes(&c), 55296);
    c.n_layers = 3; /* no MLA layer */
    assert_int_equal(k3_state_kv_bytes(&c), 0);
}

static void bytes_are_what_is_mapped(void **state)
{
    struct k3_config c = odd();
    struct k3_state *s = NULL;

    (void)state;
    assert_int_equal(k3_state_new(&s, &c, 11, NULL), 0);
    assert_int_equal(s->len_bytes, k3_state_bytes(&c, 11));
    k3_state_free(s);
    k3_state_free(NULL);
}

/* Every layer's floats are its own, inside the mapping, and zero where a sequence begins. */
static void layers_do_not_overlap(void **state)
{
    struct k3_config c = odd();
    struct k3_state *s = NULL;
    size_t kda = 3 * 7 * 7 + 3 * (3 * 2 * 7), kv = 11 * 18;

    (void)state;
    assert_int_equal(k3_state_new(&s, &c, 11, NULL), 0);
    assert_int_equal(k3_state_positions(s), 0);
    for (uint32_t l = 0; l < 5; l++) {
        size_t n = c.kind[l] == K3_KDA ? kda : kv;

        assert_true((char *)(s->layer[l] + n) <= (char *)s + s->len_bytes);
        assert_int_equal((uintptr_t)s->layer[l] % 64, 0);
        for (size_t i = 0; i < n; i++) {
            assert_true(s->layer[l][i] == 0);
            s->layer[l][i] = (float)(l + 1);
        }
    }
    for (uint32_t l = 0; l < 5; l++)
        for (size_t i = 0; i < (c.kind[l] == K3_KDA ? kda : kv); i++)
            assert_true(s->layer[l][i] == (float)(l + 1));
    assert_int_equal(k3_state_tail(s, 0, 2) + 3 * 2 * 7 - k3_state_s(s, 0), kda);
    s->positions = 9;
    s->spoilt = true;
    k3_state_reset(s);
    assert_int_equal(k3_state_positions(s), 0);
    assert_false(s->spoilt);
    for (uint32_t l = 0; l < 5; l++)
        for (size_t i = 0; c.kind[l] == K3_KDA && i < kda; i++)
            assert_true(s->layer[l][i] == 0);
    k3_state_free(s);
}

/* A copy has all KDA layers and the latent rows so far, also where its context is another, and stays what it is when the
 * original goes on. */
static void copies(void **state)
{
    static const uint32_t ctx[] = { 11, 9, 300 };
    struct k3_config c = odd();
    struct k3_state *a = NULL, *b = NULL;
    size_t n, rows = 9 * (size_t)(c.kv_lora + c.qk_rope) * sizeof(float);
    uint32_t n_mla = 0;

    (void)state;
    for (size_t k = 0; k < sizeof(ctx) / sizeof(ctx[0]); k++) {
        unsigned char *at;

        assert_int_equal(k3_state_new(&a, &c, 11, NULL), 0);
        assert_int_equal(k3_state_new(&b, &c, ctx[k], NULL), 0);
        at = (unsigned char *)a->kda;
        n = a->len_bytes - (size_t)(at - (unsigned char *)a);
        for (size_t i = 0; i < n; i++)
            at[i] = (unsigned char)(i * 31 + 7);
        a->positions = 9;
        b->spoilt = true;
        k3_state_copy(b, a);
        assert_int_equal(a->kda_bytes, b->kda_bytes);
        assert_memory_equal(b->kda, a->kda, a->kda_bytes);
        for (uint32_t l = 0; l < c.n_layers; l++)
            if (c.kind[l] == K3_MLA) {
                assert_memory_equal(b->layer[l], a->layer[l], rows);
                n_mla++;
            }
        assert_int_equal(k3_state_positions(b), 9);
        assert_false(b->spoilt);
        memset(a->kda, 0, n);
        a->positions = 0;
        assert_int_equal(k3_state_positions(b), 9);
        assert_int_equal(((unsigned char *)b->kda)[1], 38);
        k3_state_free(a);
        k3_state_free(b);
    }
    assert_int_equal(n_mla, 3);
}

static void impossible_sizes_are_refused(void **state)
{
    struct k3_config c = released();
    struct k3_state *s = NULL;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_int_equal(k3_state_new(&s, &c, 0, &err), -22);
    assert_non_null(strstr(err.text, "--ctx"));
    c.kda_heads = c.kda_dim = 0xffffffffu;
    assert_true(k3_state_bytes(&c, 1) == UINT64_MAX);
    assert_true(k3_state_new(&s, &c, 1, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    c = released();
    c.kv_lora = 0xffffffffu;
    assert_true(k3_state_new(&s, &c, 0xffffffffu, &err) < 0);
    assert_null(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_of_the_released_shape),
        cmocka_unit_test(bytes_are_what_is_mapped),
        cmocka_unit_test(layers_do_not_overlap),
        cmocka_unit_test(copies),
        cmocka_unit_test(impossible_sizes_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
