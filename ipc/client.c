/* The client side of ipc/msg.h.
 *
 * nng's REQ socket reconnects and sends a request again by itself.  That is wrong here: a
 * `shutdown` whose daemon is already gone would shut down its successor.  So a connection that
 * breaks ends the call (-ECONNRESET), and the next call makes a new socket. */
#include <errno.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/msg.h"
#include "shm/segment.h"

#define NEVER_MS 3600000
#define REDIAL_MS 100

struct k3_client {
    nng_socket sock;
    nng_aio *aio;
    bool has_sock;
    _Atomic bool broken;
    char rundir[512], path[640], name[64];
};

static void pipe_gone(nng_pipe p, nng_pipe_ev ev, void *arg)
{
    struct k3_client *c = arg;

    (void)p;
    (void)ev;
    atomic_store_explicit(&c->broken, true, memory_order_release);
    nng_aio_cancel(c->aio);
}

static void disconnect(struct k3_client *c)
{
    if (c->has_sock)
        nng_close(c->sock);
    c->has_sock = false;
    atomic_store_explicit(&c->broken, false, memory_order_relaxed);
}

/* Dialling in nng tells a refused connection only by time, and a connection made and dropped to
 * find out would harm the server (see server.c).  So look at what is there: the socket's file, and
 * the lock of the daemon that serves it. */
static int look(const struct k3_client *c, struct k3_err *err)
{
    char lock[680], daemon[64];
    size_t n = strlen(c->name);

    if (access(c->path, F_OK) != 0)
        return k3_no_peer(err, -ECONNREFUSED, "nobody serves %s", c->path);
    if (n > 4 && strcmp(c->name + n - 4, ".ctl") == 0)
        snprintf(daemon, sizeof(daemon), "%.*s", (int)(n - 4), c->name);
    else if (n > 5 && strcmp(c->name + n - 5, ".sock") == 0)
        snprintf(daemon, sizeof(daemon), "k3-%.*s", (int)(n - 5), c->name);
    else
        return 0;
    snprintf(lock, sizeof(lock), "%s/%s.lock", c->rundir, daemon);
    if (access(lock, F_OK) == 0 && !k3_lock_alive(c->rundir, daemon))
        return k3_no_peer(err, -ECONNREFUSED, "nobody serves %s: %s has ended", c->path, daemon);
    return 0;
}

static int reach(struct k3_client *c, struct k3_err *err)
{
    nng_dialer dialer;
    char url[700];
    int rc;

    if (atomic_load_explicit(&c->broken, memory_order_acquire))
        disconnect(c);
    if (c->has_sock)
        return 0;
    rc = look(c, err);
    if (rc < 0)
        return rc;
    snprintf(url, sizeof(url), "ipc://%s", c->path);
    rc = nng_req0_open(&c->sock);
    c->has_sock = rc == 0;
    if (rc == 0)
        rc = nng_socket_set_ms(c->sock, NNG_OPT_REQ_RESENDTIME, NEVER_MS);
    if (rc == 0)
        rc = nng_pipe_notify(c->sock, NNG_PIPE_EV_REM_POST, pipe_gone, c);
    if (rc == 0)
        rc = nng_dialer_create(&dialer, c->sock, url);
    if (rc == 0)
        rc = nng_dialer_set_ms(dialer, NNG_OPT_RECONNMINT, REDIAL_MS);
    if (rc == 0)
        rc = nng_dialer_set_ms(dialer, NNG_OPT_RECONNMAXT, REDIAL_MS);
    if (rc == 0)
        rc = nng_dialer_set_size(dialer, NNG_OPT_RECVMAXSZ, 2 * (size_t)K3_MSG_MAX);
    /* Not blocking: a stopped daemon would hold a blocking dial for ten seconds. */
    if (rc == 0)
        rc = nng_dialer_start(dialer, NNG_FLAG_NONBLOCK);
    if (rc != 0) {
        disconnect(c);
        return k3_no_peer(err, -ECONNREFUSED, "socket %s: %s", c->path, nng_strerror(rc));
    }
    return 0;
}

int k3_client_open(struct k3_client **out, const char *rundir, const char *name, struct k3_err *err)
{
    struct k3_client *c = calloc(1, sizeof(*c));

    *out = NULL;
    if (!c || nng_aio_alloc(&c->aio, NULL, NULL) != 0) {
        free(c);
        return k3_fail(err, -ENOMEM, "client of %s: no memory", name);
    }
    snprintf(c->path, sizeof(c->path), "%s/%s", rundir, name);
    snprintf(c->rundir, sizeof(c->rundir), "%s", rundir);
    snprintf(c->name, sizeof(c->name), "%s", name);
    *out = c;
    return 0;
}

static int trouble(struct k3_client *c, int rc, int timeout_ms, struct k3_err *err)
{
    bool broken = atomic_load_explicit(&c->broken, memory_order_acquire);

    disconnect(c); /* a late answer must not meet the next request */
    if (broken)
        return k3_no_peer(err, -ECONNRESET, "%s: the connection broke before the answer", c->path);
    if (rc == NNG_ETIMEDOUT)
        return k3_no_peer(err, -ETIMEDOUT, "%s: no answer within %d ms", c->path, timeout_ms);
    return k3_no_peer(err, -EIO, "%s: %s", c->path, nng_strerror(rc));
}

int k3_client_call(struct k3_client *c, const cJSON *request, int timeout_ms, cJSON **reply,
                   struct k3_err *err)
{
    char *text;
    nng_msg *msg = NULL;
    size_t len;
    int rc;

    *reply = NULL;
    text = cJSON_PrintUnformatted(request);
    if (!text)
        return k3_fail(err, -ENOMEM, "request to %s: no memory", c->name);
    len = strlen(text);
    if (len > K3_MSG_MAX) {
        cJSON_free(text);
        return k3_refuse(err, -EMSGSIZE, "request of %zu bytes to %s: at most %u", len, c->name,
                         K3_MSG_MAX);
    }
    rc = reach(c, err);
    if (rc < 0) {
        cJSON_free(text);
        return rc;
    }
    rc = nng_msg_alloc(&msg, 0);
    if (rc == 0)
        rc = nng_msg_append(msg, text, len);
    cJSON_free(text);
    if (rc != 0) {
        nng_msg_free(msg);
        return k3_fail(err, -ENOMEM, "request to %s: no memory", c->name);
    }
    nng_aio_set_timeout(c->aio, timeout_ms);
    nng_aio_set_msg(c->aio, msg);
    nng_send_aio(c->sock, c->aio);
    nng_aio_wait(c->aio);
    rc = nng_aio_result(c->aio);
    if (rc != 0) {
        nng_msg_free(msg);
        return trouble(c, rc, timeout_ms, err);
    }
    nng_recv_aio(c->sock, c->aio);
    /* A pipe that broke between the two calls had nothing to cancel. */
    if (atomic_load_explicit(&c->broken, memory_order_acquire))
        nng_aio_cancel(c->aio);
    nng_aio_wait(c->aio);
    rc = nng_aio_result(c->aio);
    if (rc != 0)
        return trouble(c, rc, timeout_ms, err);
    msg = nng_aio_get_msg(c->aio);
    *reply = cJSON_ParseWithLength(nng_msg_body(msg), nng_msg_len(msg));
    nng_msg_free(msg);
    if (!cJSON_IsObject(*reply)) {
        cJSON_Delete(*reply);
        *reply = NULL;
        disconnect(c);
        return k3_fail(err, -EPROTO, "%s: the answer is not a JSON object", c->path);
    }
    return 0;
}

void k3_client_close(struct k3_client *c)
{
    if (!c)
        return;
    disconnect(c);
    nng_aio_free(c->aio);
    free(c);
}
