#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/engine_world.h"
#include "tools/sim.h"

static char dir[] = "/tmp/k3-trace-XXXXXX", path[128];
static struct k3_err err;

static int open_all(void **state)
{
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof(path), "%s/a.trace", dir);
    return k3_ew_open_demo(state);
}

static int close_all(void **state)
{
    unlink(path);
    rmdir(dir);
    return k3_ew_close_demo(state);
}

static void start(struct k3_ew *ew, bool lookahead)
{
    err = (struct k3_err)K3_ERR_INIT;
    unlink(path);
    if (k3_tracer_start(ew->tracer, path, lookahead, &err) < 0)
        fail_msg("%s", err.text);
}

static double stop(struct k3_ew *ew, const char *name)
{
    cJSON *reply = cJSON_CreateObject();
    double n;

    err = (struct k3_err)K3_ERR_INIT;
    if (k3_tracer_stop(ew->tracer, NULL, reply, &err) < 0)
        fail_msg("%s", err.text);
    n = cJSON_GetNumberValue(cJSON_GetObjectItem(reply, name));
    cJSON_Delete(reply);
    return n;
}

static void load(struct k3_trace *t)
{
    void *data;
    size_t n;

    assert_int_equal(k3_trace_read(path, &data, &n, &err), 0);
    if (k3_trace_parse(t, data, n, path, &err) < 0)
        fail_msg("%s", err.text);
    free(data);
}

/* The routes of the same ids without an engine. */
static uint16_t want[9][64][4];
static uint32_t want_base;

static void keep_route(void *arg, uint32_t layer, uint32_t row, const uint16_t *ids, const float *weights, uint32_t n)
{
    (void)arg;
    (void)weights;
    memcpy(want[layer][want_base + row], ids, n * sizeof(*ids));
}

static void holds_every_route(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, K3_EW_N_FRANCE);
    struct k3_pass_hooks hooks = { .route = keep_route };
    struct k3_state *plain = k3_world_state(&k3_ew_demo, 64);
    float *logits = malloc(64 * sizeof(float) * k3_ew_demo.m->cfg.vocab);
    struct k3_ew_answer a;
    struct k3_runner r;
    struct k3_trace t;
    struct k3_ew ew;
    uint32_t n_rows = 0, n_passes;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 2, 8, 64);
    start(&ew, false);
    k3_ew_must_submit(&ew, &s);
    n_passes = k3_ew_run(&ew);
    k3_ew_answer(&ew, s.id, &a);
    assert_int_equal((int)stop(&ew, "passes"), n_passes);
    k3_ew_close(&ew);

    assert_true(k3_runner_open(&r, &k3_ew_demo, (struct k3_world_opts){ .kernels = "auto" }));
    k3_runner_feed(&r, plain, k3_ew_france, K3_EW_N_FRANCE, K3_EW_N_FRANCE, logits, &hooks);
    want_base = K3_EW_N_FRANCE;
    k3_runner_feed(&r, plain, a.token, a.n_tokens - 1, a.n_tokens - 1, logits, &hooks);
    k3_runner_close(&r);
    k3_state_free(plain);
    free(logits);

    load(&t);
    assert_int_equal(t.n_passes, n_passes);
    assert_int_equal(t.head.n_layers, 9);
    assert_int_equal(t.head.first_moe, 1);
    assert_int_equal(t.head.n_experts, 32);
    assert_int_equal(t.head.top_k, 4);
    assert_int_equal(t.head.expert_bytes, k3_ew_demo.m->expert_bytes);
    assert_memory_equal(t.head.model_digest, k3_ew_demo.m->digest, 32);
    assert_int_equal(t.cut_bytes, 0);
    for (size_t i = 0; i < t.n_passes; i++) {
        const struct k3_trace_pass *p = &t.pass[i];

        assert_int_equal(p->n_layers, 8);
        assert_int_equal(p->end, K3_TRACE_DONE);
        for (uint32_t row = 0; row < p->n_rows; row++, n_rows++) {
            assert_int_equal(t.row[p->first_row + row].position, n_rows);
            assert_int_equal(t.row[p->first_row + row].sequence, t.row[0].sequence);
            for (uint32_t l = 0; l < 8; l++)
                assert_memory_equal(t.ids + t.layer[p->first_layer + l].ids + row * 4,
                                    want[t.layer[p->first_layer + l].layer][n_rows], 8);
        }
    }
    assert_int_equal(n_rows, K3_EW_N_FRANCE + a.n_tokens - 1);
    k3_trace_free(&t);
}

/* Neither the trace nor the look-ahead changes an answer; what it saw ahead is mostly what came. */
static void changes_no_bit(void **state)
{
    struct k3_ew_answer plain[3], traced[3];
    uint32_t hit = 0, all = 0;
    struct k3_trace t;

    (void)state;
    for (int look = 0; look < 3; look++) {
        struct k3_ew ew;

        k3_ew_open(&ew, &k3_ew_demo, 3, 16, 400);
        if (look)
            start(&ew, look == 2);
        for (unsigned i = 0; i < 3; i++) {
            struct k3_submit s = i ? k3_ew_sampled(i + 1) : k3_ew_submit(1, k3_ew_long, 100);

            s.logits = true;
            k3_ew_must_submit(&ew, &s);
        }
        k3_ew_run(&ew);
        for (unsigned i = 0; i < 3; i++) {
            struct k3_submit s = k3_ew_submit(i + 1, NULL, 0);

            k3_ew_answer(&ew, s.id, look ? &traced[i] : &plain[i]);
            if (look) {
                k3_ew_same(&plain[i], &traced[i]);
                assert_true(plain[i].has_logits && plain[i].logits_hash == traced[i].logits_hash);
            }
        }
        if (look)
            stop(&ew, "passes");
        k3_ew_close(&ew);
    }
    load(&t);
    assert_int_equal(t.head.look_k, 16);
    for (size_t i = 0; i < t.n_layers; i++) {
        const struct k3_trace_layer *l = &t.layer[i];

        assert_int_not_equal(l->look, K3_NO_LOOK); /* layer 0 is dense and looks ahead as well */
        for (uint32_t row = 0; row < t.pass[l->pass].n_rows; row++)
            for (uint32_t a = 0; a < 4; a++, all++)
                for (uint32_t b = 0; b < 4; b++)
                    hit += t.ids[l->ids + row * 4 + a] == t.ids[l->look + row * 16 + b];
    }
    print_message("# %u of %u were seen ahead\n", hit, all);
    assert_true(all > 3000 && hit * 10 > all * 4); /* by chance it would be an eighth */
    k3_trace_free(&t);
}

static void stop_in_pass(struct k3_ew *ew)
{
    stop(ew, "passes");
}

static void a_stop_cuts_the_pass(void **state)
{
    struct k3_submit s = k3_ew_submit(1, k3_ew_france, K3_EW_N_FRANCE);
    struct k3_ew_answer a;
    struct k3_trace t;
    struct k3_ew ew;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 64, 64);
    ew.act_at = 5;
    ew.act = stop_in_pass;
    start(&ew, true);
    k3_ew_ask(&ew, &s, &a);
    assert_string_equal(a.end, "length");
    load(&t);
    assert_int_equal(t.n_passes, 1);
    assert_int_equal(t.pass[0].end, K3_TRACE_CUT);
    assert_in_range(t.pass[0].n_layers, 2, 5);
    assert_int_equal(t.cut_bytes, 0);
    k3_trace_free(&t);
    start(&ew, false); /* and another one after it */
    s = k3_ew_submit(2, k3_ew_france, 3);
    k3_ew_ask(&ew, &s, &a);
    assert_true(stop(&ew, "passes") > 3);
    load(&t);
    assert_int_equal(t.pass[0].n_layers, 8);
    k3_trace_free(&t);
    k3_ew_close(&ew);
}

static void refusals(void **state)
{
    cJSON *reply = cJSON_CreateObject();
    struct stat st;
    struct k3_ew ew;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 8, 64);
    err = (struct k3_err)K3_ERR_INIT;
    assert_int_equal(k3_tracer_stop(ew.tracer, NULL, reply, &err), -ENOENT);
    assert_int_equal(err.exit_status, 2);
    assert_int_equal(k3_tracer_start(ew.tracer, "a.trace", false, &err), -EINVAL);
    assert_int_equal(k3_tracer_start(ew.tracer, "/no/such/dir/a", false, &err), -ENOENT);
    assert_int_equal(err.exit_status, 2);
    start(&ew, false);
    assert_int_equal(k3_tracer_start(ew.tracer, "/tmp/other", false, &err), -EBUSY);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(k3_tracer_stop(ew.tracer, "/tmp/other", reply, &err), -ENOENT);
    assert_int_equal((int)stop(&ew, "passes"), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, sizeof(struct k3_trace_head));
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(k3_tracer_start(ew.tracer, path, false, &err), -EEXIST);
    assert_int_equal(err.exit_status, 2);
    cJSON_Delete(reply);
    k3_ew_close(&ew);
}

/* The disk is full: a state and words, the answers go on, and what is whole in the file can be used. */
static void no_space(void **state)
{
    struct rlimit old, small;
    cJSON *info = cJSON_CreateObject(), *reply = cJSON_CreateObject();
    struct k3_ew_answer a, b;
    struct k3_submit s = k3_ew_submit(1, k3_ew_long, 200);
    struct k3_trace t;
    struct k3_ew ew;

    (void)state;
    k3_ew_open(&ew, &k3_ew_demo, 1, 16, 400);
    k3_ew_ask(&ew, &s, &a);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 10000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    start(&ew, true);
    s = k3_ew_submit(2, k3_ew_long, 200);
    k3_ew_ask(&ew, &s, &b);
    for (int i = 0; i < 1000; i++) {
        cJSON_Delete(info);
        info = cJSON_CreateObject();
        k3_tracer_info(ew.tracer, info);
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(info, "state")), "failed") == 0)
            break;
        usleep(10000);
    }
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(info, "state")), "failed");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(info, "error")), strerror(EFBIG));
    err = (struct k3_err)K3_ERR_INIT;
    assert_int_equal(k3_tracer_stop(ew.tracer, NULL, reply, &err), -EIO);
    assert_int_equal(err.exit_status, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    k3_ew_same(&a, &b);
    load(&t);
    assert_true(t.n_passes >= 1 && t.cut_bytes > 0);
    k3_trace_free(&t);
    start(&ew, false); /* and again */
    stop(&ew, "passes");
    cJSON_Delete(info);
    cJSON_Delete(reply);
    k3_ew_close(&ew);
}

/* Faster than any disk: nothing is lost. */
static void more_than_the_buffer(void **state)
{
    enum { ROWS = 2000, PASSES = 60 };
    static struct k3_tracer_row rows[ROWS];
    static uint16_t look[ROWS * 16];
    _Atomic bool no = false;
    struct k3_tracer *tracer;
    struct k3_trace t;
    struct k3_ew ew = { 0 };
    uint32_t look_k;

    (void)state;
    err = (struct k3_err)K3_ERR_INIT;
    assert_int_equal(k3_tracer_new(&tracer, k3_ew_demo.m, ROWS, &no, &err), 0);
    ew.tracer = tracer;
    start(&ew, true);
    for (uint32_t pass = 0; pass < PASSES; pass++) {
        for (uint32_t i = 0; i < ROWS; i++)
            rows[i] = (struct k3_tracer_row){ pass, i };
        assert_true(k3_tracer_begin(tracer, pass, rows, ROWS, &look_k));
        assert_int_equal(look_k, 16);
        for (uint32_t layer = 1; layer < 9; layer++) {
            for (uint32_t i = 0; i < ROWS * 16; i++)
                look[i] = (uint16_t)((i + pass + layer) % 32);
            k3_tracer_look(tracer, layer, look, 16);
            for (uint32_t i = 0; i < ROWS; i++) {
                uint16_t first = (uint16_t)((i + layer * pass) % 29);

                k3_tracer_route(tracer, layer, i,
                                (const uint16_t[]){ first, (uint16_t)(first + 1), (uint16_t)(first + 2),
                                                    (uint16_t)(first + 3) });
            }
        }
        k3_tracer_end(tracer, K3_TRACE_DONE);
    }
    assert_true(stop(&ew, "bytes") > 4 * (4 << 20));
    k3_tracer_free(tracer);
    load(&t);
    assert_int_equal(t.n_passes, PASSES);
    assert_int_equal(t.cut_bytes, 0);
    assert_int_equal(t.n_layers, PASSES * 8);
    for (size_t i = 0; i < t.n_layers; i++) {
        const struct k3_trace_layer *l = &t.layer[i];

        for (uint32_t row = 0; row < ROWS; row += 7) {
            assert_int_equal(t.ids[l->ids + row * 4 + 1], (row + l->layer * l->pass) % 29 + 1);
            assert_int_equal(t.ids[l->look + row * 16 + 3], (row * 16 + 3 + l->pass + l->layer) % 32);
        }
    }
    k3_trace_free(&t);
}

/* Stops and starts at any moment of many passes: every file is whole. */
static struct k3_tracer *shared;
static _Atomic bool quit;

static void *passes(void *arg)
{
    const struct k3_tracer_row row = { 1, 2 };
    uint32_t look_k;

    (void)arg;
    for (uint64_t pass = 0; !quit; pass++) {
        k3_tracer_begin(shared, pass, &row, 1, &look_k);
        for (uint32_t layer = 1; layer < 9; layer++)
            k3_tracer_route(shared, layer, 0, (const uint16_t[]){ 1, 2, 3, 4 });
        k3_tracer_end(shared, K3_TRACE_DONE);
    }
    return NULL;
}

static void stopped_at_any_moment(void **state)
{
    _Atomic bool no = false;
    struct k3_ew ew = { 0 };
    uint64_t n_passes = 0;
    pthread_t thread;

    (void)state;
    err = (struct k3_err)K3_ERR_INIT;
    assert_int_equal(k3_tracer_new(&shared, k3_ew_demo.m, 1, &no, &err), 0);
    ew.tracer = shared;
    assert_int_equal(pthread_create(&thread, NULL, passes, NULL), 0);
    for (int i = 0; i < 300; i++) {
        struct k3_trace t;
        double n;

        start(&ew, false);
        usleep((unsigned)rand() % 300);
        n = stop(&ew, "passes");
        load(&t);
        assert_int_equal(t.cut_bytes, 0);
        assert_int_equal(t.n_passes, (int)n);
        n_passes += t.n_passes;
        k3_trace_free(&t);
    }
    quit = true;
    pthread_join(thread, NULL);
    k3_tracer_free(shared);
    assert_true(n_passes > 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_every_route), cmocka_unit_test(changes_no_bit),
        cmocka_unit_test(a_stop_cuts_the_pass), cmocka_unit_test(refusals),
        cmocka_unit_test(stopped_at_any_moment), cmocka_unit_test(no_space), cmocka_unit_test(more_than_the_buffer),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
