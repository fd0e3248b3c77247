/* tests/unit/stats_test.c: shm/stats.c and ipc/stats_json.c. */
#include "shm/stats.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "ipc/stats_json.h"

#define INSTANCE "t-stats"

enum { BYTES, LEVEL, TIME, N_DEFS };
static const struct k3_stat_def defs[N_DEFS] = {
    [BYTES] = { "read_bytes", "bytes", "bytes read", K3_COUNTER },
    [LEVEL] = { "level", "1", "a level", K3_GAUGE },
    [TIME] = { "time_ns", "ns", "a time", K3_HISTOGRAM },
};

static void write_and_read(void **state)
{
    struct k3_stats w, r;
    struct k3_err err = K3_ERR_INIT;
    cJSON *j = cJSON_CreateObject(), *s;
    char *text;

    (void)state;
    assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), -ENOENT);
    assert_int_equal(k3_stats_create(&w, INSTANCE, "k3-t", 7, defs, N_DEFS, &err), 0);
    k3_stat_add(&w, BYTES, ((uint64_t)1 << 60) + 1);
    k3_stat_add(&w, BYTES, 2);
    k3_stat_set(&w, LEVEL, 5);
    k3_stat_set(&w, LEVEL, 4);
    k3_stat_hist(&w, TIME, 0);
    k3_stat_hist(&w, TIME, 1);
    k3_stat_hist(&w, TIME, 1023);
    k3_stat_hist(&w, TIME, 1024);
    k3_stat_hist(&w, TIME, UINT64_MAX);
    k3_stats_beat(&w, K3_READY);

    assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), 0);
    assert_true(k3_stats_value(&r, "read_bytes") == ((uint64_t)1 << 60) + 3);
    assert_int_equal(k3_stats_value(&r, "level"), 4);
    assert_int_equal(k3_stats_value(&r, "absent"), 0);
    assert_int_equal(r.page->pid, getpid());
    assert_int_equal(r.page->generation, 7);
    assert_string_equal(r.page->daemon, "k3-t");
    assert_int_equal(atomic_load(&r.page->state), K3_READY);
    assert_string_equal(r.entry[TIME].help, "a time");
    assert_int_equal(atomic_load(&r.value[r.entry[TIME].value + 0]), 1);
    assert_int_equal(atomic_load(&r.value[r.entry[TIME].value + 1]), 1);
    assert_int_equal(atomic_load(&r.value[r.entry[TIME].value + 10]), 1);
    assert_int_equal(atomic_load(&r.value[r.entry[TIME].value + 11]), 1);
    assert_int_equal(atomic_load(&r.value[r.entry[TIME].value + 63]), 1);

    k3_stats_json(&r, j);
    text = cJSON_PrintUnformatted(j);
    assert_non_null(strstr(
        text,
        "\"read_bytes\":{\"kind\":\"counter\",\"unit\":\"bytes\",\"value\":1152921504606846979}"));
    s = cJSON_GetObjectItem(cJSON_GetObjectItem(j, "stats"), "time_ns");
    assert_non_null(strstr(text, "\"1023\":1,\"2047\":1"));
    assert_string_equal(cJSON_GetObjectItem(s, "count")->valuestring, "5");
    assert_string_equal(cJSON_GetObjectItem(j, "state")->valuestring, "ready");
    cJSON_free(text);
    cJSON_Delete(j);

    k3_stats_destroy(&w, INSTANCE, "k3-t");
    assert_int_equal(k3_stats_value(&r, "level"), 4); /* the mapping outlives the name */
    k3_stats_close(&r);
    assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), -ENOENT);
    k3_stat_add(&w, BYTES, 1); /* without a page: nothing happens */
    k3_stat_set(&w, BYTES, 1);
    k3_stat_hist(&w, TIME, 1);
    k3_stats_beat(&w, K3_READY);
    k3_stats_destroy(&w, INSTANCE, "k3-t");
}

/* A successor's page replaces the old one, and its predecessor does not unlink it. */
static void replaced(void **state)
{
    struct k3_stats a, b, r;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_int_equal(k3_stats_create(&a, INSTANCE, "k3-t", 1, defs, N_DEFS, &err), 0);
    assert_int_equal(k3_stats_create(&b, INSTANCE, "k3-t", 2, defs, N_DEFS, &err), 0);
    k3_stats_destroy(&a, INSTANCE, "k3-t");
    assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), 0);
    assert_int_equal(r.page->generation, 2);
    k3_stats_close(&r);
    k3_stats_destroy(&b, INSTANCE, "k3-t");
}

static void no_entries(void **state)
{
    struct k3_stats w, r;
    struct k3_err err = K3_ERR_INIT;
    const struct k3_stat_def long_name = { "a_name_that_is_longer_than_the_forty_bytes_there_are",
                                           "1", "", K3_COUNTER };

    (void)state;
    assert_int_equal(k3_stats_create(&w, INSTANCE, "k3-t", 1, NULL, 0, &err), 0);
    assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), 0);
    k3_stats_close(&r);
    k3_stats_destroy(&w, INSTANCE, "k3-t");
    assert_int_equal(k3_stats_create(&w, INSTANCE, "k3-t", 1, &long_name, 1, &err), -ENAMETOOLONG);
}

/* Every damaged page is refused; none is read beyond its end. */
static void damaged_pages(void **state)
{
    struct k3_stats w, r;
    struct k3_err err = K3_ERR_INIT;
    struct k3_stats_page good;
    struct k3_stat_entry entry;

    (void)state;
    assert_int_equal(k3_stats_create(&w, INSTANCE, "k3-t", 1, defs, N_DEFS, &err), 0);
    memcpy(&good, (void *)w.page, sizeof(good));
    entry = w.entry[TIME];
#define DAMAGE(what)                                                            \
    do {                                                                        \
        what;                                                                   \
        assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), -EPROTO);   \
        assert_null(r.page);                                                    \
        memcpy((void *)w.page, &good, sizeof(good));                            \
        w.entry[TIME] = entry;                                                  \
        assert_int_equal(k3_stats_open(&r, INSTANCE, "k3-t", &err), 0);         \
        k3_stats_close(&r);                                                     \
    } while (0)
    DAMAGE(w.page->magic++);
    DAMAGE(w.page->version++);
    DAMAGE(w.page->n_entries = 1025);
    DAMAGE(w.page->n_entries = UINT32_MAX);
    DAMAGE(w.page->n_values = UINT32_MAX);
    DAMAGE(w.page->n_values = 10);
    DAMAGE(w.page->entries_off = 0);
    DAMAGE(w.page->entries_off = UINT64_MAX - 7);
    DAMAGE(w.page->entries_off += 4);
    DAMAGE(w.page->values_off = UINT64_MAX - 7);
    DAMAGE(w.page->values_off = w.seg.len_bytes);
    DAMAGE(w.page->values_off = w.page->entries_off);
    DAMAGE(memset(w.page->daemon, 'x', sizeof(w.page->daemon)));
    DAMAGE(w.entry[TIME].kind = 3);
    DAMAGE(w.entry[TIME].value = 3);
    DAMAGE(w.entry[TIME].value = UINT32_MAX);
    DAMAGE(memset(w.entry[TIME].name, 'x', sizeof(entry.name)));
    DAMAGE(memset(w.entry[TIME].unit, 'x', sizeof(entry.unit)));
    DAMAGE(memset(w.entry[TIME].help, 'x', sizeof(entry.help)));
    k3_stats_destroy(&w, INSTANCE, "k3-t");
}

static void *add_many(void *arg)
{
    for (int i = 0; i < 100000; i++) {
        k3_stat_add(arg, BYTES, 3);
        k3_stat_hist(arg, TIME, 5);
    }
    return NULL;
}

static void several_threads_add(void **state)
{
    struct k3_stats w;
    struct k3_err err = K3_ERR_INIT;
    pthread_t t[3];

    (void)state;
    assert_int_equal(k3_stats_create(&w, INSTANCE, "k3-t", 1, defs, N_DEFS, &err), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&t[i], NULL, add_many, &w), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(k3_stats_value(&w, "read_bytes"), 900000);
    assert_int_equal(atomic_load(&w.value[w.entry[TIME].value + 3]), 300000);
    assert_int_equal(atomic_load(&w.value[w.entry[TIME].value + K3_HIST_BUCKETS]), 1500000);
    k3_stats_destroy(&w, INSTANCE, "k3-t");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(write_and_read), cmocka_unit_test(replaced), cmocka_unit_test(no_entries),
        cmocka_unit_test(damaged_pages),  cmocka_unit_test(several_threads_add),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
