/* tests/unit/formula_test.c: the pass on the model of spec/model.md 8.2 against the numbers printed
 * there. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "k3-computed/pass_private.h"
#include "tests/unit/pass_world.h"

static const uint32_t prompt[7] = { 5, 17, 63, 2, 90, 41, 8 };
static const uint32_t greedy[8] = { 74, 15, 88, 66, 18, 6, 6, 12 };
static const double after_layer[9][6] = {
    /* max, sum, h[0..3]; the last row is the final mix */
    { 10.173385484, -5.646849433, 1.663423365, -1.824515252, 0.036439344, 0.320405404 },
    { 12.016384956, -14.573016474, -0.604232374, -1.238353909, -5.248035057, -3.021494128 },
    { 15.559636787, -24.271908692, -7.357732222, 7.715765539, -3.893973384, -1.907901296 },
    { 7.533895518, -1.227778350, 2.486114322, -4.492966601, 2.306374012, 0.456525253 },
    { 13.245454932, 32.109577934, 0.964161169, -5.918590559, 3.360090376, 5.697532036 },
    { 15.151295033, 46.017236160, 1.630574235, -6.522374792, 1.854566839, 5.901688245 },
    { 7.928699487, -10.847075627, 6.611111425, -5.609280369, 1.675733667, -2.938495034 },
    { 12.258062656, -22.339887630, 12.188581943, -3.974045324, 0.110496395, -6.191427696 },
    { 7.731066183, -12.560819228, -0.021113246, 1.753820672, -1.444123668, -1.798390863 },
};
static const struct {
    uint16_t id;
    double weight;
} routes[8][3] = {
    /* of layers 1..7, descending biased score */
    { { 0, 0 } },
    { { 4, 0.402920310 }, { 1, 0.301992534 }, { 3, 0.295087156 } },
    { { 4, 0.422086206 }, { 7, 0.404451050 }, { 3, 0.173462744 } },
    { { 1, 0.378657721 }, { 2, 0.353893559 }, { 6, 0.267448721 } },
    { { 2, 0.345182912 }, { 3, 0.288178291 }, { 6, 0.366638797 } },
    { { 3, 0.393583877 }, { 4, 0.280836893 }, { 5, 0.325579230 } },
    { { 4, 0.431147324 }, { 6, 0.247251743 }, { 0, 0.321600933 } },
    { { 6, 0.374175083 }, { 5, 0.341462708 }, { 1, 0.284362209 } },
};
static const struct {
    uint32_t argmax;
    double logit, sum, l2;
} at_position[7] = {
    { 6, 3.110139542, 11.241718853, 11.720959885 },
    { 2, 2.737253464, 24.396154320, 11.302996346 },
    { 75, 3.294352985, -3.057599833, 12.031005781 },
    { 19, 3.434711350, 1.708862611, 11.119744825 },
    { 87, 2.160600133, -14.329414236, 10.962137753 },
    { 8, 3.519227879, -13.713840069, 12.118696988 },
    { 74, 2.295377104, -9.210575985, 11.006342102 },
};
static const double last_logits[96] = {
    1.200257,  -1.714221, -0.436946, -0.540619, 1.132166,  -0.590791, 0.552287,  0.048769,
    1.639290,  1.055629,  -0.876821, 1.691430,  -1.690833, -0.023141, 0.909290,  0.795147,
    -0.483419, -0.998668, -0.225792, 1.298407,  -0.765057, -0.264565, 1.248332,  0.200600,
    -1.641690, -1.192014, -0.422785, -1.983790, 1.313214,  -0.201685, 1.749402,  0.351173,
    0.958059,  0.591533,  -2.063902, 0.126216,  -1.051880, -1.920260, 1.269450,  -0.855259,
    0.901750,  -0.632934, -0.000630, 0.432204,  0.751716,  -0.742585, -0.116650, 1.655780,
    -0.763213, -0.595513, -0.139297, -2.512766, -1.268325, -1.541946, 1.401945,  0.082150,
    1.656912,  -2.087372, -0.441327, 1.079825,  0.670928,  -1.941131, -0.975263, 0.683268,
    -2.847672, -0.905430, 1.031066,  -1.145627, 1.760521,  -0.212222, -0.279094, 0.202994,
    -0.641646, -0.559402, 2.295377,  -1.425548, -0.008368, 0.920135,  -0.591022, 0.661597,
    1.552155,  0.422420,  -0.482077, 1.016265,  0.292247,  -0.153880, -0.628380, 0.277145,
    -1.556243, -0.813258, 1.070826,  0.415723,  0.561521,  -1.706612, 0.133635,  -1.611759,
};
static const struct {
    uint32_t layer;
    double sum, max, s123, s132;
} kda_state[5] = {
    { 0, 0.380831271, 0.214057681, -0.015516186, 0.037630101 },
    { 1, -0.031024159, 0.562431756, 0.035230422, -0.014488390 },
    { 2, 1.707809985, 0.457668389, 0.259751130, -0.056763699 },
    { 4, 0.784541708, 0.371583715, 0.058429173, -0.013212878 },
    { 5, 0.004492242, 0.269015650, -0.044990984, -0.016914220 },
};

#define TOLERANCE 1e-4 /* spec/model.md 8.3 */

static void close_to(double got, double want, double tolerance, const char *what, uint32_t a,
                     uint32_t b)
{
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s (%u, %u): %.9g, should be %.9g", what, a, b, got, want);
}

struct seen {
    float h[9][64]; /* of the last row */
    uint16_t ids[8][3];
    float weights[8][3];
    uint32_t n_rows;
};

static void layer_out(void *arg, uint32_t layer, const float *h, uint32_t n_rows)
{
    struct seen *s = arg;

    memcpy(s->h[layer], h + (n_rows - 1) * 64, sizeof(s->h[0]));
    s->n_rows = n_rows;
}

static void route(void *arg, uint32_t layer, uint32_t row, const uint16_t *ids,
                  const float *weights, uint32_t n)
{
    struct seen *s = arg;

    assert_int_equal(n, 3);
    if (row == 6) {
        memcpy(s->ids[layer], ids, sizeof(s->ids[0]));
        memcpy(s->weights[layer], weights, sizeof(s->weights[0]));
    }
}

static int open_world(void **state)
{
    static struct k3_world w;

    k3_world_formula(&w);
    *state = &w;
    return 0;
}

static int close_world(void **state)
{
    k3_world_close(*state);
    return 0;
}

static void layers_and_routes(void **state)
{
    struct k3_runner r;
    struct seen s;
    struct k3_pass_hooks hooks = { .arg = &s, .layer_out = layer_out, .route = route };
    struct k3_state *st = k3_world_state(*state, 16);
    float logits[7 * 96];

    assert_true(k3_runner_open(&r, *state, (struct k3_world_opts){ 0 }));
    k3_runner_feed(&r, st, prompt, 7, 7, logits, &hooks);
    assert_int_equal(s.n_rows, 7);
    for (uint32_t l = 0; l < 9; l++) {
        double max = 0, sum = 0;

        for (int i = 0; i < 64; i++) {
            sum += s.h[l][i];
            max = fmax(max, fabsf(s.h[l][i]));
        }
        close_to(max, after_layer[l][0], TOLERANCE, "max |h| after layer", l, 0);
        close_to(sum, after_layer[l][1], TOLERANCE * 5, "sum of h after layer", l, 0);
        for (uint32_t i = 0; i < 4; i++)
            close_to(s.h[l][i], after_layer[l][2 + i], TOLERANCE, "h after layer", l, i);
    }
    for (uint32_t l = 1; l < 8; l++)
        for (uint32_t i = 0; i < 3; i++) {
            int at = -1;

            assert_true(i == 0 || s.ids[l][i] > s.ids[l][i - 1]);
            for (int k = 0; k < 3; k++)
                if (s.ids[l][k] == routes[l][i].id)
                    at = k;
            assert_int_not_equal(at, -1);
            close_to(s.weights[l][at], routes[l][i].weight, 1e-5, "weight of expert in layer",
                     routes[l][i].id, l);
        }
    k3_runner_close(&r);
    k3_state_free(st);
}

static void logits_of_every_position(void **state)
{
    struct k3_runner r;
    struct k3_state *st = k3_world_state(*state, 7);
    float logits[7 * 96];

    assert_true(k3_runner_open(&r, *state, (struct k3_world_opts){ 0 }));
    k3_runner_feed(&r, st, prompt, 7, 7, logits, NULL);
    for (uint32_t p = 0; p < 7; p++) {
        const float *l = logits + p * 96;
        double sum = 0, squares = 0;

        for (int i = 0; i < 96; i++) {
            sum += l[i];
            squares += (double)l[i] * l[i];
        }
        assert_int_equal(k3_world_argmax(l, 96), at_position[p].argmax);
        close_to(l[at_position[p].argmax], at_position[p].logit, TOLERANCE, "largest logit at", p,
                 0);
        close_to(sum, at_position[p].sum, TOLERANCE * 5, "sum of logits at", p, 0);
        close_to(sqrt(squares), at_position[p].l2, TOLERANCE, "norm of logits at", p, 0);
    }
    for (uint32_t i = 0; i < 96; i++)
        close_to(logits[6 * 96 + i], last_logits[i], TOLERANCE, "logit", i, 6);
    k3_runner_close(&r);
    k3_state_free(st);
}

static void state_after_the_prompt(void **state)
{
    struct k3_runner r;
    struct k3_state *st = k3_world_state(*state, 7);
    float logits[7 * 96];

    assert_true(k3_runner_open(&r, *state, (struct k3_world_opts){ 0 }));
    k3_runner_feed(&r, st, prompt, 7, 3, logits, NULL);
    for (uint32_t n = 0; n < 5; n++) {
        const float *s = k3_state_s(st, kda_state[n].layer);
        double sum = 0, max = 0;

        for (int i = 0; i < 3 * 64; i++) {
            sum += s[i];
            max = fmax(max, fabsf(s[i]));
        }
        close_to(sum, kda_state[n].sum, TOLERANCE, "sum of S in layer", kda_state[n].layer, 0);
        close_to(max, kda_state[n].max, TOLERANCE, "max |S| in layer", kda_state[n].layer, 0);
        close_to(s[64 + 2 * 8 + 3], kda_state[n].s123, TOLERANCE, "S[1][2][3] in layer",
                 kda_state[n].layer, 0);
        close_to(s[64 + 3 * 8 + 2], kda_state[n].s132, TOLERANCE, "S[1][3][2] in layer",
                 kda_state[n].layer, 0);
    }
    k3_runner_close(&r);
    k3_state_free(st);
}

static void greedy_by_carried_state(void **state)
{
    struct k3_runner r;
    struct k3_state *st = k3_world_state(*state, 14);
    float logits[7 * 96];
    const float *last = logits + 6 * 96;

    assert_true(k3_runner_open(&r, *state, (struct k3_world_opts){ 0 }));
    k3_runner_feed(&r, st, prompt, 7, 7, logits, NULL);
    for (uint32_t n = 0; n < 8; n++) {
        uint32_t id = k3_world_argmax(last, 96);

        assert_int_equal(id, greedy[n]);
        if (n < 7)
            k3_runner_feed(&r, st, &id, 1, 1, logits, NULL);
        last = logits;
    }
    assert_int_equal(k3_state_positions(st), 14);
    k3_runner_close(&r);
    k3_state_free(st);
}

static void greedy_by_recomputation(void **state)
{
    struct k3_runner r;
    struct k3_state *st = k3_world_state(*state, 14);
    uint32_t ids[14];
    static float logits[14 * 96];

    assert_true(k3_runner_open(&r, *state, (struct k3_world_opts){ 0 }));
    memcpy(ids, prompt, sizeof(prompt));
    for (uint32_t n = 0; n < 8; n++) {
        uint32_t id;

        k3_state_reset(st);
        k3_runner_feed(&r, st, ids, 7 + n, 64, logits, NULL);
        id = k3_world_argmax(logits + (6 + n) * 96, 96);
        assert_int_equal(id, greedy[n]);
        if (n < 7)
            ids[7 + n] = id;
    }
    k3_runner_close(&r);
    k3_state_free(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_and_routes),       cmocka_unit_test(logits_of_every_position),
        cmocka_unit_test(state_after_the_prompt),  cmocka_unit_test(greedy_by_carried_state),
        cmocka_unit_test(greedy_by_recomputation),
    };

    return cmocka_run_group_tests(tests, open_world, close_world);
}
