/* k3-router/journal.c: what comes back after a death at any byte, what is refused, pruning. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "text/file.h"
#include "k3-router/journal.h"
#include "tests/unit/vocab.h"

static char dir[] = "/tmp/k3-journal-test-XXXXXX";
static const char id[] = "0123456789abcdef0123456789abcdef";

static cJSON *head(void)
{
    return cJSON_Parse("{\"submit\":{\"prompt_ids\":[1,2,3],\"seed\":\"18446744073709551615\"},\"shown\":{\"mode\":\"raw\"}}");
}

static void path_of(char *out, size_t len, const char *name)
{
    snprintf(out, len, "%s/%s.journal", dir, name);
}

static void write_one(unsigned n_tokens, const char *end)
{
    struct k3_journal j = K3_JOURNAL_INIT;
    struct k3_err err = K3_ERR_INIT;
    cJSON *h = head();
    char path[256];

    path_of(path, sizeof(path), id);
    unlink(path);
    if (k3_journal_create(&j, dir, id, h, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(k3_journal_model(&j, "00ff", "/m/a \"b\"\n", &err), 0);
    for (unsigned i = 0; i < n_tokens; i++)
        assert_int_equal(k3_journal_token(&j, i, 1000 + i, NULL, &err), 0);
    if (end)
        assert_int_equal(k3_journal_end(&j, end, strcmp(end, "stop") == 0 ? 1282 : -1, &err), 0);
    k3_journal_close(&j);
    cJSON_Delete(h);
}

static void test_round_trip(void **state)
{
    struct k3_journal j = K3_JOURNAL_INIT;
    struct k3_journal_data d;
    struct k3_err err = K3_ERR_INIT;
    struct stat st;
    char path[256];

    (void)state;
    write_one(5, "stop");
    path_of(path, sizeof(path), id);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
    assert_int_equal(d.generated.n, 5);
    assert_int_equal(d.generated.id[4], 1004);
    assert_string_equal(d.end, "stop");
    assert_string_equal(cJSON_GetObjectItem(d.model, "model_digest")->valuestring, "00ff");
    assert_string_equal(cJSON_GetObjectItem(d.model, "model")->valuestring, "/m/a \"b\"\n");
    assert_int_equal(d.stop_id, 1282);
    assert_string_equal(cJSON_GetObjectItem(cJSON_GetObjectItem(d.head, "submit"), "seed")->valuestring,
                        "18446744073709551615");
    k3_journal_data_free(&d);
    k3_journal_close(&j);
    write_one(2, NULL);
    assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
    assert_int_equal(d.generated.n, 2);
    assert_string_equal(d.end, "");
    assert_int_equal(d.stop_id, -1);
    /* It goes on where it was. */
    assert_int_equal(k3_journal_token(&j, 2, 7, NULL, &err), 0);
    assert_int_equal(k3_journal_end(&j, "length", -1, &err), 0);
    k3_journal_data_free(&d);
    k3_journal_close(&j);
    assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
    assert_int_equal(d.generated.n, 3);
    assert_string_equal(d.end, "length");
    k3_journal_data_free(&d);
    k3_journal_close(&j);
}

static void test_logprobs(void **state)
{
    static const struct k3_logprob entry[] = { { 5, -0.1f }, { 1535, -1e-30f }, { 5, -0x1.fffffep127f }, { 6, -3 }, { 7, 0 }, { 8, -0x1p-149f } };
    static const char *const bad[] = { "t 0 5 -0.1 3\n", "t 0 5 x\n", "t 0 5 -0.1 \n", "t 0 5  -0.1\n", "t 0 5 1\n", "t 0 5 nan\n", "t 0 5 -inf\n",
                                       "t 0 5 -1 4294967296 -1\n", "t 0 5 -1 3 -1x\n", "t 0 5x\n", "t 0 5 -1\nt 1 5\n", "t 0 5\nt 1 5 -1\n",
                                       "t 0 5 -1\nt 1 5 -1 3 -1\n" };
    struct k3_logprobs l = { .n_each = 3, .n = 2, .entry = (struct k3_logprob *)(uintptr_t)entry };
    struct k3_journal j = K3_JOURNAL_INIT;
    struct k3_journal_data d;
    struct k3_err err = K3_ERR_INIT;
    struct k3_buf b = { 0 };
    size_t good;

    (void)state;
    write_one(0, NULL);
    assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
    assert_int_equal(k3_journal_token(&j, 0, 5, &l, &err), 0);
    assert_int_equal(k3_journal_token(&j, 1, 6, &l, &err), 0);
    k3_journal_data_free(&d);
    k3_journal_close(&j);
    assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
    assert_int_equal(d.generated.n, 2);
    assert_true(d.logprobs.n == 2 && d.logprobs.n_each == 3);
    assert_memory_equal(d.logprobs.entry, entry, sizeof(entry)); /* to the bit */
    k3_journal_data_free(&d);
    k3_journal_close(&j);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        b.len_bytes = 0;
        k3_buf_printf(&b, "k3-journal 1 %s\n{}\n%s", id, bad[i]);
        if (k3_journal_parse(&d, b.bytes, b.len_bytes, id, "x", &good, &err) == 0)
            fail_msg("taken: %s", bad[i]);
        k3_journal_data_free(&d);
    }
    k3_buf_free(&b);
}

/* The file cut at every byte: the records before the cut come back, the torn line goes, and appending gives a good file. */
static void test_torn_at_every_byte(void **state)
{
    struct k3_buf whole = { 0 };
    struct k3_err err = K3_ERR_INIT;
    char path[256];
    size_t head_bytes;

    (void)state;
    write_one(4, "cancelled");
    path_of(path, sizeof(path), id);
    assert_int_equal(k3_file_read(&whole, path, 1 << 20, &err), 0);
    head_bytes = (size_t)((char *)memchr((char *)memchr(whole.bytes, '\n', whole.len_bytes) + 1, '\n', whole.len_bytes) -
                          whole.bytes) + 1;
    for (size_t cut = 0; cut <= whole.len_bytes; cut++)
        for (int garbage = 0; garbage < 2; garbage++) {
            struct k3_journal j = K3_JOURNAL_INIT;
            struct k3_journal_data d;
            size_t n_lines = 0;
            int fd = open(path, O_WRONLY | O_TRUNC), rc;
            assert_int_equal(write(fd, whole.bytes, cut), cut);
            if (garbage) /* blocks that a crash left as zeros */
                assert_int_equal(write(fd, "\0\0\0t 9", 6), 6);
            close(fd);
            for (size_t i = head_bytes; i < cut; i++)
                n_lines += whole.bytes[i] == '\n';
            n_lines -= n_lines > 0; /* the model's */
            rc = k3_journal_open(&j, dir, id, &d, &err);
            if (cut < head_bytes) {
                assert_true(rc < 0 && err.exit_status == K3_EXIT_REFUSED);
                continue;
            }
            assert_int_equal(rc, 0);
            assert_int_equal(d.generated.n, n_lines < 4 ? n_lines : 4);
            assert_string_equal(d.end, n_lines == 5 ? "cancelled" : "");
            k3_journal_data_free(&d);
            if (n_lines < 5) {
                size_t n = n_lines;
                assert_int_equal(k3_journal_token(&j, n, 42, NULL, &err), 0);
                k3_journal_close(&j);
                assert_int_equal(k3_journal_open(&j, dir, id, &d, &err), 0);
                assert_int_equal(d.generated.n, n + 1);
                assert_int_equal(d.generated.id[n], 42);
                k3_journal_data_free(&d);
            }
            k3_journal_close(&j);
        }
    k3_buf_free(&whole);
}

static void refuse(const char *text, const char *words)
{
    struct k3_journal_data d;
    struct k3_err err = K3_ERR_INIT;
    size_t good;

    assert_true(k3_journal_parse(&d, text, strlen(text), id, "J", &good, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" does not say \"%s\"", err.text, words);
    k3_journal_data_free(&d);
}

#define HEAD "k3-journal 1 0123456789abcdef0123456789abcdef\n{\"submit\":{}}\n"

#define MODEL "model {\"model_digest\":\"00\",\"model\":\"/m\"}\n"

static void test_refusals(void **state)
{
    struct k3_journal j = K3_JOURNAL_INIT;
    struct k3_journal_data d;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    refuse("k3-journal 2 0123456789abcdef0123456789abcdef\n{}\n", "line 1");
    refuse("k3-journal 1 0123456789abcdef0123456789abcdee\n{}\n", "line 1");
    refuse("hello\n", "line 1");
    refuse("k3-journal 1 0123456789abcdef0123456789abcdef\n[]\n", "line 2");
    refuse("k3-journal 1 0123456789abcdef0123456789abcdef\n", "cut off in its head");
    refuse("", "cut off in its head");
    refuse(HEAD "t 1 5\n", "line 3");
    refuse(HEAD "t 0 5\nt 0 5\n", "line 4");
    refuse(HEAD "t 0 4294967296\n", "line 3");
    refuse(HEAD "t 0 5 6\n", "line 3");
    refuse(HEAD "end\n", "line 3");
    refuse(HEAD "end running\n", "line 3");
    refuse(HEAD "end stop 1\nt 0 5\n", "line 4");
    refuse(HEAD "\n", "line 3");
    refuse(HEAD "model {\"model_digest\":\"00\"}\n", "line 3");
    refuse(HEAD "model nothing\n", "line 3");
    refuse(HEAD MODEL MODEL, "line 4");
    refuse(HEAD "t 0 5\n" MODEL, "line 4");
    assert_int_equal(k3_journal_open(&j, dir, "ffffffffffffffffffffffffffffffff", &d, &err), -ENOENT);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_int_equal(k3_journal_open(&j, dir, "../../etc/passwd", &d, &err), -EINVAL);
    assert_int_equal(k3_journal_open(&j, dir, "0123456789ABCDEF0123456789ABCDEF", &d, &err), -EINVAL);
}

static void test_one_writer(void **state)
{
    struct k3_journal a = K3_JOURNAL_INIT, b = K3_JOURNAL_INIT;
    struct k3_journal_data d, e;
    struct k3_err err = K3_ERR_INIT;
    cJSON *h = head();

    (void)state;
    write_one(1, NULL);
    assert_int_equal(k3_journal_open(&a, dir, id, &d, &err), 0);
    assert_int_equal(k3_journal_open(&b, dir, id, &e, &err), -EBUSY);
    assert_int_equal(k3_journal_create(&b, dir, id, h, &err), -EEXIST);
    k3_journal_close(&a);
    assert_int_equal(k3_journal_open(&b, dir, id, &e, &err), 0);
    k3_journal_close(&b);
    k3_journal_data_free(&d);
    k3_journal_data_free(&e);
    cJSON_Delete(h);
}

static void touch(const char *name, int64_t mtime_s)
{
    struct timespec ts[2] = { { mtime_s, 0 }, { mtime_s, 0 } };
    char path[256];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    assert_int_equal(futimens(fd, ts), 0);
    close(fd);
}

static bool there(const char *name)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

static void test_prune(void **state)
{
    const int64_t now = 2000000000, day = 86400;
    char name[64];

    (void)state;
    write_one(0, NULL);
    snprintf(name, sizeof(name), "%s.journal", id);
    assert_int_equal(k3_journal_prune(dir, time(NULL), 1000), 0);
    unlinkat(open(dir, O_RDONLY), name, 0);
    for (int i = 0; i < 12; i++) {
        snprintf(name, sizeof(name), "%032x.journal", i);
        touch(name, now - i * day);
    }
    touch("history", now - 100 * day);
    touch("0123.journal", now - 100 * day);
    assert_int_equal(k3_journal_prune(dir, now, 5), 7);
    for (int i = 0; i < 12; i++) {
        snprintf(name, sizeof(name), "%032x.journal", i);
        assert_int_equal(there(name), i < 5);
    }
    assert_true(there("history") && there("0123.journal"));
    assert_int_equal(k3_journal_prune(dir, now + 4 * day, 1000), 1); /* the one of eight days */
    assert_int_equal(k3_journal_prune(dir, now + 100 * day, 1000), 4);
    assert_int_equal(k3_journal_prune("/nonexistent", now, 5), 0);
}

static void test_state_dir(void **state)
{
    char deep[256], out[256];
    struct k3_err err = K3_ERR_INIT;
    struct stat st;

    (void)state;
    snprintf(deep, sizeof(deep), "%s/a/b", dir);
    assert_int_equal(k3_journal_dir(out, sizeof(out), deep, &err), 0);
    assert_string_equal(out, deep);
    assert_int_equal(stat(deep, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    setenv("XDG_STATE_HOME", deep, 1);
    assert_int_equal(k3_journal_dir(out, sizeof(out), NULL, &err), 0);
    assert_string_equal(out + strlen(deep), "/k3");
    touch("file", 1);
    snprintf(deep, sizeof(deep), "%s/file", dir);
    assert_true(k3_journal_dir(out, sizeof(out), deep, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    snprintf(deep, sizeof(deep), "%s/file/x", dir);
    assert_true(k3_journal_dir(out, sizeof(out), deep, &err) < 0);
    assert_true(k3_journal_dir(out, sizeof(out), "", &err) < 0);
}

static void test_ids_differ(void **state)
{
    char a[K3_JOURNAL_ID_LEN + 1], b[K3_JOURNAL_ID_LEN + 1];

    (void)state;
    k3_journal_new_id(a);
    k3_journal_new_id(b);
    assert_true(k3_journal_id_ok(a) && k3_journal_id_ok(b));
    assert_string_not_equal(a, b);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    char command[128];

    (void)state;
    snprintf(command, sizeof(command), "rm -rf %s", dir);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_logprobs), cmocka_unit_test(test_torn_at_every_byte), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_one_writer), cmocka_unit_test(test_prune), cmocka_unit_test(test_state_dir),
        cmocka_unit_test(test_ids_differ),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
