#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "model/schedule.h"

static const char *const demo[] = { "run/demo-model" };

static struct k3_model *open_demo(uint32_t n_layers, bool experts)
{
    struct k3_model_opts o = { .dirs = demo, .n_dirs = 1, .n_layers = n_layers, .want_experts = experts };
    struct k3_err err = K3_ERR_INIT;
    struct k3_model *m = NULL;
    int rc = k3_model_open(&m, &o, &err);

    if (rc < 0)
        fail_msg("%s", err.text);
    return m;
}

static void demo_opens(void **state)
{
    (void)state;
    struct k3_model *m = open_demo(0, true);
    struct k3_expert_place place;
    uint64_t sum = 0;

    assert_int_equal(m->cfg.n_layers, 9);
    assert_int_equal(m->cfg.kind[3], K3_MLA);
    assert_int_equal(m->n_files, 4);
    for (size_t i = 0; i < m->n_pieces; i++)
        sum += m->pieces[i].len_bytes;
    assert_int_equal(sum, m->trunk_bytes);
    assert_int_equal(m->matrices[m->n_matrices - 1].role, K3_W_LM_HEAD);
    assert_int_equal(m->expert_bytes, 3 * (64 * 32 / 2 + 64 * 32 / 32));
    assert_int_equal(k3_model_expert(m, 0, 0, &place), -2);
    for (uint32_t l = 1; l < 9; l++)
        for (uint32_t e = 0; e < 32; e++) {
            assert_int_equal(k3_model_expert(m, l, e, &place), 0);
            assert_int_equal(place.n_ranges, 1);
        }
    assert_int_equal(k3_model_expert(m, 1, 32, &place), -2);
    for (size_t i = 0; i < m->n_matrices; i++)
        assert_int_equal(k3_model_matrix(m, m->matrices[i].layer, m->matrices[i].role), i);
    for (size_t i = 0; i < m->n_residents; i++)
        assert_int_equal(k3_model_resident(m, m->residents[i].layer, m->residents[i].role), i);
    printf("%zu matrices %zu pieces trunk %lu resident %lu slot %lu align %u\n", m->n_matrices, m->n_pieces,
           m->trunk_bytes, m->resident_bytes, m->expert_slot_bytes, k3_model_dio_align(m));
    k3_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(demo_opens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
