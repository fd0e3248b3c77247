/* libmicrohttpd's callbacks: a request comes in, is looked at, and is answered or handed on.  All of this runs on the one
 * thread of libmicrohttpd, except k3_http_prepare_thread. */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "k3-router/http.h"

#define DISCARD_MAX (1u << 20)   /* a refused body that is read to its end, so that the refusal arrives */
#define COST_PER_BYTE 6u         /* memory to understand a body of text, see prepare_cost */
#define USER_TIMEOUT_MS 300000u  /* a peer that acknowledges nothing */

struct k3_http_route {
    const char *path;
    bool post, open; /* open: needs no key */
    void (*fn)(struct k3_http_req *q);
};
static const struct k3_http_route routes[] = {
    { "/v1/models", false, false, k3_http_get_models },
    { "/models", false, false, k3_http_get_models },
    { "/health", false, true, k3_http_get_health },
    { "/v1/health", false, true, k3_http_get_health },
    { "/metrics", false, false, k3_http_get_metrics },
    { "/v1/k3/stats", false, false, k3_http_get_stats },
    { "/props", false, false, k3_http_get_props },
    { "/v1/completions", true, false, k3_http_post_completions },
    { "/completions", true, false, k3_http_post_completions },
    { "/v1/chat/completions", true, false, k3_http_post_chat },
    { "/chat/completions", true, false, k3_http_post_chat },
    { "/tokenize", true, false, k3_http_post_tokenize },
    { "/detokenize", true, false, k3_http_post_detokenize },
};
/* /v1/models/ID */
static const struct k3_http_route one_model = { "/v1/models/{id}", false, false, NULL };
#define ONE_MODEL "/v1/models/"
/* / and /web/FILE: what the page is made of needs no key; it asks for one. */
static const struct k3_http_route page = { "/web/{file}", false, true, k3_http_get_page };

static const struct k3_http_route *find_route(const char *path)
{
    size_t len = strlen(path);

    if (len > 1 && path[len - 1] == '/')
        len--;
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++)
        if (strlen(routes[i].path) == len && strncmp(routes[i].path, path, len) == 0)
            return &routes[i];
    return strncmp(path, ONE_MODEL, strlen(ONE_MODEL)) == 0 && path[strlen(ONE_MODEL)] ? &one_model : NULL;
}

const char *k3_http_methods(const struct k3_http_req *q)
{
    return !q->route ? "GET, POST, OPTIONS" : q->route->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
}

void k3_http_req_unref(struct k3_http_req *q)
{
    struct k3_http *h = q->h;
    bool last;

    pthread_mutex_lock(&h->lock);
    last = --q->refs == 0;
    if (last)
        h->body_bytes -= q->body_bytes;
    pthread_mutex_unlock(&h->lock);
    if (!last)
        return;
    k3_buf_free(&q->body);
    k3_buf_free(&q->out);
    free(q);
}

/* ---- the head ---- */

/* Never what a client wrote beyond these letters: it goes to the log. */
static void log_path(char *out, size_t len, const char *path)
{
    size_t i = 0;

    for (; path[i] && i < len - 1; i++)
        out[i] = strchr("/_.-", path[i]) || (path[i] >= '0' && path[i] <= '9') || (path[i] >= 'a' && path[i] <= 'z') ||
                         (path[i] >= 'A' && path[i] <= 'Z') ? path[i] : '?';
    out[i] = 0;
}

static const char *header(const struct k3_http_req *q, const char *name)
{
    return MHD_lookup_connection_value(q->mhd, MHD_HEADER_KIND, name);
}

/* Pages that are not ours have no business here, whatever a browser sends for them. */
static bool check_origin(struct k3_http_req *q)
{
    const struct k3_router_opts *o = &q->h->r->opt;
    const char *origin = header(q, "Origin"), *host = header(q, "Host");

    if (q->h->keys.n == 0 && !k3_http_host_ok(host, q->h->addr_text, &o->allow_host)) {
        k3_http_error(q, 403, NULL, "host_not_allowed", "Host \"%.100s\" is not this server; --allow-host NAME allows it",
                      host ? host : "");
        return false;
    }
    if (!origin || k3_http_origin_same(origin, host))
        return true;
    if (k3_http_origin_listed(origin, &o->cors) && strlen(origin) < sizeof(q->origin)) {
        strcpy(q->origin, origin);
        return true;
    }
    k3_http_error(q, 403, NULL, "origin_not_allowed", "pages of %.100s may not ask this server; --cors ORIGIN allows it", origin);
    return false;
}

static bool check_key(struct k3_http_req *q)
{
    const char *key = k3_http_bearer(header(q, "Authorization"));

    if (q->h->keys.n == 0 || (q->route && q->route->open))
        return true;
    if (!key)
        key = header(q, "X-Api-Key");
    if (key && k3_http_key_ok(&q->h->keys, key))
        return true;
    k3_http_error(q, 401, NULL, "invalid_api_key", key ? "the API key is not one of this server's"
                  : "this server needs an API key: Authorization: Bearer KEY");
    return false;
}

static void too_costly(struct k3_http_req *q, size_t body_bytes, size_t cost_bytes)
{
    k3_http_error(q, 413, NULL, "body_too_large", "to understand this body of %zu bytes may take %zu MiB; there are %zu MiB (half of "
                  "--http-mb)", body_bytes, cost_bytes >> 20, q->h->half_bytes >> 20);
}

static bool check_length(struct k3_http_req *q)
{
    const char *length = header(q, "Content-Length");
    uint64_t n = 0;

    if (length && k3_parse_u64(length, 0, K3_HTTP_BODY_MAX, &n) == -ERANGE) {
        k3_http_error(q, 413, NULL, "body_too_large", "the body has %.20s bytes; at most %u", length, K3_HTTP_BODY_MAX);
        return false;
    }
    if (n > q->h->half_bytes / COST_PER_BYTE) { /* known now, and not only when all of it is here */
        too_costly(q, n, COST_PER_BYTE * n);
        return false;
    }
    return true;
}

/* True: the body is wanted.  Else the reply is in q, or GET is to be called. */
static bool look_at_head(struct k3_http_req *q)
{
    bool get = strcmp(q->method, "GET") == 0 || strcmp(q->method, "HEAD") == 0, post = strcmp(q->method, "POST") == 0;
    const char *names;

    if (!check_origin(q))
        return false;
    if (strcmp(q->method, "OPTIONS") == 0) {
        names = header(q, "Access-Control-Request-Headers");
        if (names && k3_http_header_names_ok(names))
            strcpy(q->allow_headers, names);
        k3_http_reply(q, 204, NULL);
    } else if (!check_key(q)) {
        return false;
    } else if (!q->route) {
        k3_http_error(q, 404, NULL, NULL, "there is no %s %s", q->method, q->path);
    } else if (q->route->post ? !post : !get) {
        k3_http_error(q, 405, NULL, NULL, "%s takes %s", q->route->path, k3_http_methods(q));
    } else {
        return q->route->post && check_length(q);
    }
    return false;
}

static struct k3_http_req *new_request(struct k3_http *h, struct MHD_Connection *mhd, const char *url, const char *method)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct k3_http_req *q = calloc(1, sizeof(*q));

    if (!q || !info || !info->socket_context) {
        free(q);
        return NULL;
    }
    q->h = h;
    q->mhd = mhd;
    q->refs = 1;
    q->eta_s = -1;
    q->end = "";
    q->start_ns = q->body_ns = k3_now_ns();
    q->file = k3_http_page_find(url);
    q->route = q->file ? &page : find_route(url);
    snprintf(q->method, sizeof(q->method), "%s", method);
    if (q->route)
        snprintf(q->path, sizeof(q->path), "%s", q->route->path);
    else
        log_path(q->path, sizeof(q->path), url);
    pthread_mutex_lock(&h->lock);
    q->conn = info->socket_context;
    q->conn->req = q;
    pthread_mutex_unlock(&h->lock);
    k3_http_count(h, K3_HS_REQUESTS, 1);
    return q;
}

/* ---- the body ---- */

static void take_body(struct k3_http_req *q, const char *data, size_t n)
{
    struct k3_http *h = q->h;
    bool room;

    if (q->discard || q->ended)
        return;
    pthread_mutex_lock(&h->lock);
    room = h->body_bytes + n <= h->half_bytes;
    if (room) {
        h->body_bytes += n;
        q->body_bytes += n;
    }
    pthread_mutex_unlock(&h->lock);
    if (q->body.len_bytes + n > K3_HTTP_BODY_MAX)
        k3_http_error(q, 413, NULL, "body_too_large", "the body has more than %u bytes", K3_HTTP_BODY_MAX);
    else if (!room || k3_buf_append(&q->body, data, n) < 0)
        k3_http_error(q, 503, NULL, NULL, "too many large requests at once; try again");
    else
        return;
    k3_buf_free(&q->body);
}

/* Whether the refusal can wait for the end of the request: a reply before that ends the connection, and the client may never
 * see it. */
static bool worth_discarding(const struct k3_http_req *q)
{
    const char *length = header(q, "Content-Length");
    uint64_t n = 0;

    return !header(q, "Transfer-Encoding") && (!length || k3_parse_u64(length, 0, DISCARD_MAX, &n) == 0);
}

static void get(struct k3_http_req *q, const char *url)
{
    if (q->route == &one_model)
        k3_http_get_model(q, url + strlen(ONE_MODEL));
    else
        q->route->fn(q);
}

static enum MHD_Result first_look(struct k3_http_req *q, const char *url)
{
    if (look_at_head(q))
        return MHD_YES; /* the body, please; libmicrohttpd says 100 Continue where it was asked */
    if (!q->ended)
        get(q, url);
    q->discard = worth_discarding(q);
    if (q->discard)
        return MHD_YES;
    q->phase = K3_HTTP_READY;
    return k3_http_queue_reply(q);
}

enum MHD_Result k3_http_access(void *cls, struct MHD_Connection *mhd, const char *url, const char *method, const char *version,
                               const char *data, size_t *data_bytes, void **con_cls)
{
    struct k3_http *h = cls;
    struct k3_http_req *q = *con_cls;
    enum MHD_Result rc = MHD_YES;

    (void)version;
    (void)data;
    if (!q) {
        q = *con_cls = new_request(h, mhd, url, method);
        return q ? first_look(q, url) : MHD_NO;
    }
    if (*data_bytes) {
        take_body(q, data, *data_bytes);
        *data_bytes = 0;
        return MHD_YES;
    }
    pthread_mutex_lock(&h->lock);
    if (h->leaving) /* nobody would take it, and none may be suspended any more */
        atomic_store(&q->gone, true);
    if (q->phase == K3_HTTP_READING && !q->ended && !atomic_load(&q->gone)) {
        q->phase = K3_HTTP_PREPARING;
        q->refs++;
        *h->prepare_tail = q;
        h->prepare_tail = &q->next;
        MHD_suspend_connection(mhd);
        q->suspended = true;
        pthread_cond_broadcast(&h->news);
        pthread_mutex_unlock(&h->lock);
        return MHD_YES;
    }
    if (q->phase == K3_HTTP_READING)
        q->phase = K3_HTTP_READY;
    if (atomic_load(&q->gone))
        rc = MHD_NO;
    pthread_mutex_unlock(&h->lock);
    return rc == MHD_NO ? rc : k3_http_queue_reply(q);
}

/* Memory that the body's values, messages, text and ids take until the request is submitted, besides the body: measured as 5.4
 * times a body of text, and 74 bytes a value where there are many. */
static size_t prepare_cost(const struct k3_http_req *q)
{
    return COST_PER_BYTE * q->body.len_bytes + 80 * k3_http_count_values(q->body.bytes, q->body.len_bytes);
}

static void prepare(struct k3_http_req *q)
{
    struct k3_http *h = q->h;
    size_t cost = prepare_cost(q);

    if (cost > h->half_bytes) {
        too_costly(q, q->body.len_bytes, cost);
        return;
    }
    pthread_mutex_lock(&h->lock);
    while (h->prepare_bytes + cost > h->half_bytes) /* the other thread is at a large one */
        pthread_cond_wait(&h->news, &h->lock);
    h->prepare_bytes += cost;
    pthread_mutex_unlock(&h->lock);
    if (!atomic_load(&q->gone))
        q->route->fn(q);
    pthread_mutex_lock(&h->lock);
    h->prepare_bytes -= cost;
    pthread_cond_broadcast(&h->news);
    pthread_mutex_unlock(&h->lock);
}

void *k3_http_prepare_thread(void *arg)
{
    struct k3_http *h = arg;

    pthread_mutex_lock(&h->lock);
    for (;;) {
        struct k3_http_req *q = h->prepare_head;
        struct k3_http_job *left = h->left;

        if (left) {
            h->left = left->next;
            pthread_mutex_unlock(&h->lock);
            k3_http_job_drop(left, true);
            pthread_mutex_lock(&h->lock);
            continue;
        }
        if (h->leaving)
            break;
        if (!q) {
            pthread_cond_wait(&h->news, &h->lock);
            continue;
        }
        h->prepare_head = q->next;
        if (!h->prepare_head)
            h->prepare_tail = &h->prepare_head;
        pthread_mutex_unlock(&h->lock);
        prepare(q);
        k3_buf_free(&q->body);
        pthread_mutex_lock(&h->lock);
        h->body_bytes -= q->body_bytes;
        q->body_bytes = q->kept_bytes; /* what is left of it */
        h->body_bytes += q->body_bytes;
        if (q->phase == K3_HTTP_PREPARING)
            k3_http_ready(q);
        pthread_mutex_unlock(&h->lock);
        k3_http_req_unref(q);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* ---- the end of a request, and connections ---- */

static void log_request(struct k3_http_req *q, enum MHD_RequestTerminationCode why)
{
    double seconds = (double)(k3_now_ns() - q->start_ns) / 1e9;
    const char *end = q->end;
    bool watching; /* somebody looks at the page: a line a second would be too much */

    if (why != MHD_REQUEST_TERMINATED_COMPLETED_OK)
        end = why == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED ? "client_silent" : why == MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN
              ? "server_stops" : "client_gone";
    if (strncmp(end, "client", 6) == 0)
        k3_http_count(q->h, K3_HS_GONE, 1);
    if (q->status >= 400)
        k3_http_count(q->h, q->status == 429 ? K3_HS_BUSY : q->status < 500 ? K3_HS_REFUSED : K3_HS_FAILED, 1);
    if (q->status == 0)
        q->status = 499; /* nobody was left to be told */
    watching = q->status < 400 && q->route && (q->route == &page || q->route->fn == k3_http_get_stats);
    k3_log(watching ? K3_LOG_DEBUG : K3_LOG_INFO, "request", "method=%s path=%s status=%d prompt=%zu generated=%zu seconds=%.3f%s%s", q->method, q->path,
           q->status, q->n_prompt, q->n_generated, seconds, end[0] ? " end=" : "", end);
}

void k3_http_completed(void *cls, struct MHD_Connection *mhd, void **con_cls, enum MHD_RequestTerminationCode why)
{
    struct k3_http *h = cls;
    struct k3_http_req *q = *con_cls;

    (void)mhd;
    if (!q)
        return;
    *con_cls = NULL;
    pthread_mutex_lock(&h->lock);
    if (q->phase != K3_HTTP_READY && q->phase != K3_HTTP_ENDED)
        atomic_store(&q->gone, true);
    if (q->conn) {
        q->conn->req = NULL;
        q->conn->idle_ns = k3_now_ns();
        q->conn->line_ns = 0;
    }
    q->conn = NULL;
    q->mhd = NULL;
    q->suspended = false;
    log_request(q, why);
    if (atomic_load(&q->gone))
        k3_http_job_leave(q);
    pthread_mutex_unlock(&h->lock);
    k3_http_req_unref(q);
}

static void opened(struct k3_http *h, struct MHD_Connection *mhd, void **socket_context)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct k3_http_conn *c = info ? calloc(1, sizeof(*c)) : NULL;
    unsigned timeout_ms = USER_TIMEOUT_MS;

    *socket_context = c;
    if (!c)
        return; /* its requests are refused */
    c->fd = (int)info->connect_fd;
    setsockopt(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
    c->idle_ns = k3_now_ns();
    pthread_mutex_lock(&h->lock);
    c->next = h->conns;
    if (c->next)
        c->next->prev = c;
    h->conns = c;
    h->n_conns++;
    pthread_mutex_unlock(&h->lock);
}

static void closed(struct k3_http *h, void **socket_context)
{
    struct k3_http_conn *c = *socket_context;

    *socket_context = NULL;
    if (!c)
        return;
    pthread_mutex_lock(&h->lock);
    if (c->req)
        c->req->conn = NULL;
    if (c->prev)
        c->prev->next = c->next;
    else
        h->conns = c->next;
    if (c->next)
        c->next->prev = c->prev;
    h->n_conns--;
    pthread_mutex_unlock(&h->lock);
    free(c);
}

void k3_http_connection(void *cls, struct MHD_Connection *mhd, void **socket_context, enum MHD_ConnectionNotificationCode why)
{
    if (why == MHD_CONNECTION_NOTIFY_STARTED)
        opened(cls, mhd, socket_context);
    else
        closed(cls, socket_context);
}

void *k3_http_line(void *cls, const char *uri, struct MHD_Connection *mhd)
{
    struct k3_http *h = cls;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct k3_http_conn *c = info ? info->socket_context : NULL;

    (void)uri;
    pthread_mutex_lock(&h->lock);
    if (c)
        c->line_ns = k3_now_ns();
    pthread_mutex_unlock(&h->lock);
    return NULL; /* the request's con_cls */
}
