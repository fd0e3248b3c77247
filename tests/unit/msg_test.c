/* tests/unit/msg_test.c: ipc/msg.c, server.c, client.c. */
#include "ipc/msg.h"

#include <errno.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "ipc/daemon.h"

static char dir[64];

static void nap_ms(long ms)
{
    nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, NULL);
}

/* echo: returns "text"; nap: sleeps "ms"; fail: an error reply; else unknown. */
static void serve(void *arg, const char *cmd, const cJSON *request, cJSON *reply)
{
    struct k3_err err = K3_ERR_INIT;

    if (arg)
        __atomic_fetch_add((int *)arg, 1, __ATOMIC_SEQ_CST);
    if (strcmp(cmd, "echo") == 0) {
        cJSON_AddStringToObject(reply, "text",
                                cJSON_GetStringValue(cJSON_GetObjectItem(request, "text")));
    } else if (strcmp(cmd, "nap") == 0) {
        nap_ms((long)cJSON_GetNumberValue(cJSON_GetObjectItem(request, "ms")));
    } else {
        k3_refuse(&err, -ENOENT, "no such thing as \"%s\"", cmd);
        k3_reply_error(reply, &err);
    }
}

static cJSON *request(const char *cmd, const char *name, const char *text, double number)
{
    cJSON *r = cJSON_CreateObject();

    cJSON_AddStringToObject(r, "cmd", cmd);
    if (text)
        cJSON_AddStringToObject(r, name, text);
    else if (name)
        cJSON_AddNumberToObject(r, name, number);
    return r;
}

static int call(struct k3_client *c, cJSON *r, int timeout_ms, cJSON **reply, struct k3_err *err)
{
    int rc = k3_client_call(c, r, timeout_ms, reply, err);

    cJSON_Delete(r);
    return rc;
}

static void echo(struct k3_client *c, const char *text)
{
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply = NULL;

    /* A minute, since a sanitizer takes its time for 20 MB. */
    if (call(c, request("echo", "text", text, 0), 60000, &reply, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok")));
    assert_string_equal(cJSON_GetObjectItem(reply, "text")->valuestring, text);
    cJSON_Delete(reply);
}

static void parse_requests(void **state)
{
    static const struct {
        const char *text;
        size_t len;
    } bad[] = {
        { "", 0 },
        { "x", 1 },
        { "{", 1 },
        { "[]", 2 },
        { "7", 1 },
        { "{}", 2 },
        { "{\"cmd\":7}", 9 },
        { "{\"cmd\":null}", 12 },
        { "{\"cmd\":\"a\"} x", 13 },
        { "{\"cmd\":\"a\"}{}", 13 },
        { "\0\0\0\0", 4 },
        { "{\"cmd\":\"a\"", 10 },
        { "\xff\xfe", 2 },
        { "{\"Cmd\":\"a\"}", 11 },
    };
    const char *cmd;
    cJSON *reply, *r;
    char *deep = malloc(100001);

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        reply = cJSON_CreateObject();
        assert_null(k3_msg_parse(bad[i].text, bad[i].len, &cmd, reply));
        assert_true(cJSON_IsFalse(cJSON_GetObjectItem(reply, "ok")));
        assert_int_equal(cJSON_GetObjectItem(reply, "code")->valueint, K3_EXIT_REFUSED);
        assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "EBADMSG");
        assert_null(strchr(cJSON_GetObjectItem(reply, "error")->valuestring, '\n'));
        cJSON_Delete(reply);
    }
    reply = cJSON_CreateObject();
    r = k3_msg_parse("{\"cmd\":\"a\"}\n\0", 13, &cmd, reply); /* a C client may send its NUL */
    assert_non_null(r);
    assert_string_equal(cmd, "a");
    cJSON_Delete(r);
    cJSON_Delete(reply);

    memset(deep, '[', 100000); /* deep nesting must not eat the stack */
    reply = cJSON_CreateObject();
    assert_null(k3_msg_parse(deep, 100000, &cmd, reply));
    cJSON_Delete(reply);
    free(deep);

    reply = cJSON_CreateObject();
    assert_null(k3_msg_parse("x", (size_t)K3_MSG_MAX + 1, &cmd, reply)); /* not even looked at */
    assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "EMSGSIZE");
    cJSON_Delete(reply);
}

static void round_trips(void **state)
{
    struct k3_server *s;
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    struct stat st;
    char path[128], *big = malloc(20000001);
    cJSON *reply;

    (void)state;
    assert_int_equal(k3_server_open(&s, dir, "s", 3, serve, NULL, &err), 0);
    snprintf(path, sizeof(path), "%s/s", dir);
    assert_int_equal(stat(path, &st), 0);
    assert_true(S_ISSOCK(st.st_mode));
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
    for (int i = 0; i < 200; i++)
        echo(c, "hello");
    memset(big, 'b', 20000000);
    big[20000000] = 0;
    echo(c, big);
    assert_int_equal(call(c, request("nothing", NULL, NULL, 0), 5000, &reply, &err), 0);
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(reply, "ok")));
    assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "ENOENT");
    assert_string_equal(cJSON_GetObjectItem(reply, "error")->valuestring,
                        "no such thing as \"nothing\"");
    cJSON_Delete(reply);
    k3_client_close(c);
    k3_server_close(s);
    assert_int_equal(access(path, F_OK), -1);
    free(big);
}

static void *nap_call(void *arg)
{
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply = NULL;

    (void)arg;
    if (k3_client_open(&c, dir, "s", &err) == 0 &&
        call(c, request("nap", "ms", NULL, 1500), 20000, &reply, &err) == 0)
        cJSON_Delete(reply);
    k3_client_close(c);
    return NULL;
}

/* A long poll in one context does not hold up a request in another. */
static void contexts_do_not_block_one_another(void **state)
{
    struct k3_server *s;
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    pthread_t t;
    int n = 0;
    uint64_t begin;

    (void)state;
    assert_int_equal(k3_server_open(&s, dir, "s", 2, serve, &n, &err), 0);
    assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
    assert_int_equal(pthread_create(&t, NULL, nap_call, NULL), 0);
    while (__atomic_load_n(&n, __ATOMIC_SEQ_CST) == 0)
        nap_ms(5);
    begin = k3_now_ns();
    echo(c, "meanwhile");
    assert_true(k3_now_ns() - begin < 1200000000u);
    pthread_join(t, NULL);
    k3_client_close(c);
    k3_server_close(s);
}

static void nobody_there(void **state)
{
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    char path[128];
    cJSON *reply;
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd;
    uint32_t gen;
    uint64_t begin = k3_now_ns();

    (void)state;
    assert_int_equal(k3_client_open(&c, dir, "k3-t.ctl", &err), 0);
    assert_int_equal(call(c, request("echo", "text", "x", 0), 5000, &reply, &err), -ECONNREFUSED);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    /* The socket of a killed daemon is still there, and its lock's file, too. */
    snprintf(path, sizeof(path), "%s/k3-t.ctl", dir);
    strcpy(a.sun_path, path);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    close(fd);
    assert_int_equal(k3_lock_take(&fd, &gen, dir, "k3-t", &err), 0);
    k3_lock_drop(&fd);
    assert_int_equal(call(c, request("echo", "text", "x", 0), 5000, &reply, &err), -ECONNREFUSED);
    assert_non_null(strstr(err.text, "k3-t has ended"));
    assert_true(k3_now_ns() - begin < 2000000000u);
    k3_client_close(c);
    snprintf(path, sizeof(path), "%s/k3-t.lock", dir);
    unlink(path);
    /* A server takes the stale socket's place. */
    {
        struct k3_server *s;

        assert_int_equal(k3_server_open(&s, dir, "k3-t.ctl", 1, serve, NULL, &err), 0);
        assert_int_equal(k3_client_open(&c, dir, "k3-t.ctl", &err), 0);
        echo(c, "fresh");
        k3_client_close(c);
        k3_server_close(s);
    }
}

static void no_answer_in_time(void **state)
{
    struct k3_server *s;
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply;
    uint64_t begin;

    (void)state;
    assert_int_equal(k3_server_open(&s, dir, "s", 1, serve, NULL, &err), 0);
    assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
    begin = k3_now_ns();
    assert_int_equal(call(c, request("nap", "ms", NULL, 800), 200, &reply, &err), -ETIMEDOUT);
    assert_in_range(k3_now_ns() - begin, 190000000, 790000000);
    echo(c, "later"); /* the late answer is not taken for this one's */
    k3_client_close(c);
    k3_server_close(s);
}

static void *kill_soon(void *arg)
{
    nap_ms(300);
    kill(*(pid_t *)arg, SIGKILL);
    return NULL;
}

/* A server process that is killed in the middle of a call: the caller hears of it at once, and the
 * request is not sent a second time to its successor. */
static void killed_server(void **state)
{
    struct k3_server *s;
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply;
    int to[2], n = 0, status;
    char byte;
    pid_t child;
    pthread_t killer;
    uint64_t begin;

    (void)state;
    assert_int_equal(pipe(to), 0);
    child = fork();
    if (child == 0) {
        if (k3_server_open(&s, dir, "s", 1, serve, NULL, &err) != 0 || write(to[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    assert_int_equal(read(to[0], &byte, 1), 1);
    assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
    echo(c, "alive");
    begin = k3_now_ns();
    assert_int_equal(pthread_create(&killer, NULL, kill_soon, &child), 0);
    assert_int_equal(call(c, request("nap", "ms", NULL, 60000), 30000, &reply, &err), -ECONNRESET);
    assert_true(k3_now_ns() - begin < 10000000000u);
    pthread_join(killer, NULL);
    assert_int_equal(err.exit_status, K3_EXIT_NO_PEER);
    waitpid(child, &status, 0);
    assert_int_equal(k3_server_open(&s, dir, "s", 1, serve, &n, &err), 0);
    nap_ms(600);
    assert_int_equal(__atomic_load_n(&n, __ATOMIC_SEQ_CST), 0);
    echo(c, "successor"); /* the same client goes on */
    assert_int_equal(__atomic_load_n(&n, __ATOMIC_SEQ_CST), 1);
    k3_client_close(c);
    k3_server_close(s);
    close(to[0]);
    close(to[1]);
}

/* Sends raw bytes as one message through an nng REQ socket and returns the parsed answer. */
static cJSON *send_raw(const void *data, size_t len)
{
    nng_socket sock;
    char url[128];
    void *answer = NULL;
    size_t n = 0;
    cJSON *reply;

    snprintf(url, sizeof(url), "ipc://%s/s", dir);
    assert_int_equal(nng_req0_open(&sock), 0);
    assert_int_equal(nng_socket_set_ms(sock, NNG_OPT_RECVTIMEO, 120000), 0);
    assert_int_equal(nng_dial(sock, url, NULL, 0), 0);
    assert_int_equal(nng_send(sock, (void *)data, len, 0), 0);
    assert_int_equal(nng_recv(sock, &answer, &n, NNG_FLAG_ALLOC), 0);
    reply = cJSON_ParseWithLength(answer, n);
    nng_free(answer, n);
    nng_close(sock);
    return reply;
}

static void oversized_and_malformed(void **state)
{
    struct k3_server *s;
    struct k3_client *c;
    struct k3_err err = K3_ERR_INIT;
    size_t len = (size_t)K3_MSG_MAX + 1000;
    char *big = malloc(len);
    cJSON *reply;
    int n = 0;

    (void)state;
    assert_non_null(big);
    memset(big, ' ', len);
    assert_int_equal(k3_server_open(&s, dir, "s", 1, serve, &n, &err), 0);
    reply = send_raw(big, len);
    assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "EMSGSIZE");
    cJSON_Delete(reply);
    reply = send_raw("{\"cmd\":", 7);
    assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "EBADMSG");
    cJSON_Delete(reply);
    reply = send_raw("", 0);
    assert_string_equal(cJSON_GetObjectItem(reply, "errno")->valuestring, "EBADMSG");
    cJSON_Delete(reply);
    assert_int_equal(n, 0); /* none of it reached the daemon */
    assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
    memset(big, 'x', len);
    big[len - 1] = 0;
    assert_int_equal(call(c, request("echo", "text", big, 0), 5000, &reply, &err), -EMSGSIZE);
    echo(c, "still there");
    k3_client_close(c);
    k3_server_close(s);
    free(big);
}

static int raw_connection(void)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(a.sun_path, sizeof(a.sun_path), "%s/s", dir);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    return fd;
}

/* A peer that closes before its handshake: nng's listener would never accept again.  The keeper
 * makes a new one. */
static void broken_handshakes(void **state)
{
    static const char nonsense[] = "GET / HTTP/1.1\r\n\r\n";
    struct k3_server *s;
    struct k3_client *c, *old;
    struct k3_err err = K3_ERR_INIT;
    cJSON *reply = NULL;
    uint64_t begin;
    int fd;

    (void)state;
    assert_int_equal(k3_server_open(&s, dir, "s", 1, serve, NULL, &err), 0);
    assert_int_equal(k3_client_open(&old, dir, "s", &err), 0);
    echo(old, "before");
    for (int i = 0; i < 3; i++) {
        int rc = -1;

        fd = raw_connection();
        if (i == 1)
            assert_int_equal(send(fd, nonsense, sizeof(nonsense), MSG_NOSIGNAL), sizeof(nonsense));
        if (i == 2)
            nap_ms(100);
        close(fd);
        begin = k3_now_ns();
        while (rc < 0 && k3_now_ns() - begin < 15000000000u) {
            assert_int_equal(k3_client_open(&c, dir, "s", &err), 0);
            rc = call(c, request("echo", "text", "x", 0), 500, &reply, &err);
            if (rc == 0)
                cJSON_Delete(reply);
            k3_client_close(c);
            if (rc < 0)
                nap_ms(20);
        }
        if (rc < 0)
            fail_msg("after broken handshake %d: %s", i, err.text);
    }
    k3_client_close(old);
    k3_server_close(s);
}

static void server_that_cannot_listen(void **state)
{
    struct k3_server *s = (void *)1;
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_true(k3_server_open(&s, "/nonexistent-directory", "s", 2, serve, NULL, &err) < 0);
    assert_null(s);
    assert_non_null(strstr(err.text, "/nonexistent-directory/s"));
}

static int set_up(void **state)
{
    (void)state;
    signal(SIGPIPE, SIG_IGN);
    k3_log_open("msg_test", K3_LOG_ERROR);
    strcpy(dir, "/tmp/k3-msg-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parse_requests),
        /* First of those with nng: it forks, and nng has threads. */
        cmocka_unit_test(killed_server),
        cmocka_unit_test(round_trips),
        cmocka_unit_test(contexts_do_not_block_one_another),
        cmocka_unit_test(nobody_there),
        cmocka_unit_test(no_answer_in_time),
        cmocka_unit_test(oversized_and_malformed),
        cmocka_unit_test(broken_handshakes),
        cmocka_unit_test(server_that_cannot_listen),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
