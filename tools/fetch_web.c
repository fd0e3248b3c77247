/* One request to a hub, by libcurl.  A request follows redirects to other hosts for the bytes of a file; the token goes
 * to the hub alone (libcurl drops Authorization when host, port or scheme change). */
#include <curl/curl.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "tools/fetch.h"

#define MAX_HOPS 8
#define STALL_BYTES_PER_S 1024
#define CONNECT_S 30
#define MAX_WAIT_S 60.0
#define MAX_ASKED_WAIT_S 3600.0

struct k3_fetch_conn {
    struct k3_fetch_web *web;
    CURL *curl;
    struct k3_fetch_head head; /* of the reply that is coming in */
    char why[CURL_ERROR_SIZE];
    /* GET only */
    struct k3_fetch_sink *sink;
    uint64_t at_bytes;              /* where the next byte belongs */
    bool begun;
    enum k3_fetch_outcome outcome;  /* of our own callbacks; OK: nothing to complain of */
    struct k3_err *err;
};

int k3_fetch_web_init(void)
{
    return curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? 0 : -ENOMEM;
}

/* 127.x.x.x, ::1 and localhost: nobody listens on the way. */
static bool loopback(const char *host)
{
    size_t n = strspn(host, "0123456789.");

    return !strcasecmp(host, "localhost") || !strcmp(host, "[::1]") || (!strncmp(host, "127.", 4) && host[n] == 0);
}

int k3_fetch_web_base(struct k3_fetch_web *w, const char *base, bool insecure, struct k3_err *err)
{
    CURLU *u = curl_url();
    char *scheme = NULL, *host = NULL;
    size_t n = strlen(base);
    int rc = 0;

    while (n && base[n - 1] == '/')
        n--;
    if (!u || n >= sizeof(w->base) || strpbrk(base, "?#@ ") || curl_url_set(u, CURLUPART_URL, base, 0) != CURLUE_OK ||
        curl_url_get(u, CURLUPART_SCHEME, &scheme, 0) != CURLUE_OK || curl_url_get(u, CURLUPART_HOST, &host, 0) != CURLUE_OK ||
        (strcmp(scheme, "https") && strcmp(scheme, "http")))
        rc = k3_refuse(err, -EINVAL, "--base %.300s: must be https://HOST, maybe with a path", base);
    else {
        w->http_ok = !strcmp(scheme, "http");
        if (w->http_ok && !insecure && !loopback(host))
            rc = k3_refuse(err, -EINVAL, "--base %.300s: http can be read and changed on the way; https, or --insecure-http", base);
        snprintf(w->base, sizeof(w->base), "%.*s", (int)n, base);
    }
    curl_free(scheme);
    curl_free(host);
    curl_url_cleanup(u);
    return rc;
}

static int on_tick(void *arg, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    const struct k3_fetch_conn *conn = arg;

    (void)a, (void)b, (void)c, (void)d;
    return atomic_load_explicit(&conn->web->stop, memory_order_relaxed);
}

static size_t on_header(char *line, size_t one, size_t n, void *arg)
{
    struct k3_fetch_conn *c = arg;

    k3_fetch_head_line(&c->head, line, one * n);
    return one * n;
}

struct k3_fetch_conn *k3_fetch_conn_open(struct k3_fetch_web *w)
{
    struct k3_fetch_conn *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    c->web = w;
    c->curl = curl_easy_init();
    if (!c->curl) {
        free(c);
        return NULL;
    }
    return c;
}

void k3_fetch_conn_close(struct k3_fetch_conn *c)
{
    if (!c)
        return;
    curl_easy_cleanup(c->curl);
    free(c);
}

static int add_header(struct curl_slist **list, const char *line)
{
    struct curl_slist *more = curl_slist_append(*list, line);

    if (!more)
        return -ENOMEM;
    *list = more;
    return 0;
}

/* The connection is kept, everything else of the last request is forgotten.  *headers is the caller's to free. */
static int prepare(struct k3_fetch_conn *c, struct curl_slist **headers)
{
    struct k3_fetch_web *w = c->web;
    const char *protocols = w->http_ok ? "http,https" : "https";
    char line[sizeof(w->token) + 32];
    CURL *e = c->curl;
    bool ok;

    curl_easy_reset(e);
    c->head = (struct k3_fetch_head){ .has_length = false };
    c->why[0] = 0;
    /* A sum is one of the file's own bytes: nothing may be compressed on the way. */
    if (add_header(headers, "Accept-Encoding: identity") < 0)
        return -ENOMEM;
    if (w->token[0]) {
        snprintf(line, sizeof(line), "Authorization: Bearer %s", w->token);
        if (add_header(headers, line) < 0)
            return -ENOMEM;
    }
    ok = curl_easy_setopt(e, CURLOPT_ERRORBUFFER, c->why) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_USERAGENT, "k3-fetch/" K3_VERSION) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, protocols) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_REDIR_PROTOCOLS_STR, protocols) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_LOW_SPEED_LIMIT, (long)STALL_BYTES_PER_S) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_LOW_SPEED_TIME, (long)w->stall_s) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_NOPROGRESS, 0L) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_XFERINFOFUNCTION, on_tick) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_XFERINFODATA, c) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, on_header) == CURLE_OK &&
         curl_easy_setopt(e, CURLOPT_HEADERDATA, c) == CURLE_OK;
    return ok ? 0 : -ENOMEM;
}

static char *url_of(const struct k3_fetch_conn *c, const char *name)
{
    char *revision = curl_easy_escape(c->curl, c->web->revision, 0), *url = NULL;

    if (!revision || asprintf(&url, "%s/%s/resolve/%s/%s", c->web->base, c->web->repo, revision, name) < 0)
        url = NULL;
    curl_free(revision);
    return url;
}

/* Scheme, host and port of a URL, as one text; the caller frees it with free(). */
static char *origin_of(const char *url)
{
    CURLU *u = curl_url();
    char *scheme = NULL, *host = NULL, *port = NULL, *out = NULL;

    if (u && curl_url_set(u, CURLUPART_URL, url, 0) == CURLUE_OK && curl_url_get(u, CURLUPART_SCHEME, &scheme, 0) == CURLUE_OK &&
        curl_url_get(u, CURLUPART_HOST, &host, 0) == CURLUE_OK &&
        curl_url_get(u, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) == CURLUE_OK &&
        asprintf(&out, "%s://%s:%s", scheme, host, port) < 0)
        out = NULL;
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_url_cleanup(u);
    return out;
}

static bool same_origin(const char *a, const char *b)
{
    char *x = origin_of(a), *y = origin_of(b);
    bool same = x && y && !strcasecmp(x, y);

    free(x);
    free(y);
    return same;
}

/* What libcurl says of a transfer that did not end well. */
static enum k3_fetch_outcome failed(struct k3_fetch_conn *c, const char *name, CURLcode code, struct k3_err *err)
{
    const char *why = c->why[0] ? c->why : curl_easy_strerror(code);

    if (atomic_load(&c->web->stop))
        return K3_FETCH_STOP;
    switch (code) {
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT:
        k3_refuse(err, -EPROTO, "%s: %s (only %s)", name, why, c->web->http_ok ? "http and https" : "https; see --insecure-http");
        return K3_FETCH_FATAL;
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_OUT_OF_MEMORY:
        k3_fail(err, -EPROTO, "%s: %s", name, why);
        return K3_FETCH_FATAL;
    case CURLE_OPERATION_TIMEDOUT:
        k3_fail(err, -ETIMEDOUT, "%s: nothing came for %.0f s (%s)", name, c->web->stall_s, why);
        return K3_FETCH_AGAIN;
    default:
        k3_fail(err, -EIO, "%s: %s", name, why);
        return K3_FETCH_AGAIN;
    }
}

/* What a status other than the wanted ones means. */
static enum k3_fetch_outcome refused(struct k3_fetch_conn *c, const char *name, long status, const char *url, double *wait_s,
                                     struct k3_err *err)
{
    curl_off_t after = 0;

    if ((status == 401 || status == 403) && same_origin(url, c->web->base)) {
        k3_fail(err, -EACCES, "the hub refuses %s of %s (%ld): %s", name, c->web->repo, status,
                c->web->token[0] ? "the token may not read it" : "it may need a token (--token-file or HF_TOKEN)");
        return K3_FETCH_FATAL;
    }
    if (status == 404 || status == 410)
        return K3_FETCH_NONE;
    k3_fail(err, -EIO, "%s: the server answers %ld", name, status);
    /* 401, 403 of another host: an address that was valid for some time; 416: the part is longer than the file. */
    if (status == 416)
        return K3_FETCH_WRONG;
    if (status >= 500 || status == 408 || status == 425 || status == 429 || status == 401 || status == 403) {
        if (curl_easy_getinfo(c->curl, CURLINFO_RETRY_AFTER, &after) == CURLE_OK && after > 0)
            *wait_s = (double)after;
        return K3_FETCH_AGAIN;
    }
    return K3_FETCH_FATAL;
}

/* ---- HEAD ---- */

/* One hop.  *next: where it redirects to on the same host, else NULL; the caller frees it. */
static enum k3_fetch_outcome ask_hop(struct k3_fetch_conn *c, const char *name, const char *url, struct k3_fetch_said *out,
                                     char commit[41], char **next, double *wait_s, struct k3_err *err)
{
    struct curl_slist *headers = NULL;
    enum k3_fetch_outcome outcome = K3_FETCH_FATAL;
    char *to = NULL;
    long status = 0;
    CURLcode code;

    *next = NULL;
    if (prepare(c, &headers) < 0 || curl_easy_setopt(c->curl, CURLOPT_URL, url) != CURLE_OK ||
        curl_easy_setopt(c->curl, CURLOPT_NOBODY, 1L) != CURLE_OK ||
        curl_easy_setopt(c->curl, CURLOPT_HTTPHEADER, headers) != CURLE_OK) {
        k3_fail(err, -ENOMEM, "no memory for a request");
        goto out;
    }
    code = curl_easy_perform(c->curl);
    if (code != CURLE_OK) {
        outcome = failed(c, name, code, err);
        goto out;
    }
    curl_easy_getinfo(c->curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(c->curl, CURLINFO_REDIRECT_URL, &to);
    if (c->head.commit[0])
        strcpy(commit, c->head.commit);
    outcome = K3_FETCH_OK;
    if (status == 200)
        k3_fetch_head_said(&c->head, false, out);
    else if (status >= 300 && status < 400 && to) {
        k3_fetch_head_said(&c->head, true, out);
        if ((!out->has_size || !c->head.linked_etag[0]) && same_origin(to, c->web->base) && !(*next = strdup(to))) {
            k3_fail(err, -ENOMEM, "no memory for a request");
            outcome = K3_FETCH_FATAL;
        }
    } else
        outcome = refused(c, name, status, url, wait_s, err);
out:
    curl_slist_free_all(headers);
    return outcome;
}

enum k3_fetch_outcome k3_fetch_ask(struct k3_fetch_conn *c, const char *name, struct k3_fetch_said *out, char commit[41],
                                   double *wait_s, struct k3_err *err)
{
    enum k3_fetch_outcome outcome = K3_FETCH_OK;
    char *url = url_of(c, name), *next = NULL, found[41] = "";
    int hops = 0;

    *wait_s = 0;
    if (!url) {
        k3_fail(err, -ENOMEM, "no memory for a request");
        return K3_FETCH_FATAL;
    }
    do {
        outcome = ask_hop(c, name, url, out, found, &next, wait_s, err);
        free(url);
        url = next;
    } while (outcome == K3_FETCH_OK && url && ++hops < MAX_HOPS);
    if (outcome == K3_FETCH_OK && url) {
        k3_fail(err, -ELOOP, "%s: more than %d redirects", name, MAX_HOPS);
        outcome = K3_FETCH_FATAL;
    } else if (outcome == K3_FETCH_OK && !out->has_size) {
        k3_fail(err, -EPROTO, "%s: the hub announces no size", name);
        outcome = K3_FETCH_FATAL;
    }
    free(url);
    if (outcome == K3_FETCH_OK && commit)
        strcpy(commit, found);
    return outcome;
}

/* ---- GET ---- */

/* The head of the reply whose body comes next: whether it is the file, and from where on. */
static void begin_body(struct k3_fetch_conn *c)
{
    struct k3_fetch_sink *s = c->sink;
    uint64_t begins = 0;
    long status = 0;

    curl_easy_getinfo(c->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status == 206) {
        begins = s->from_bytes;
        if (!c->head.has_range || c->head.range_first != begins || c->head.range_total != s->size_bytes) {
            k3_untrusted(c->err, -EBADMSG, "the server sends another range than that from %" PRIu64 " of %" PRIu64 " bytes on",
                         begins, s->size_bytes);
            c->outcome = K3_FETCH_WRONG;
            return;
        }
    } else if (status != 200) {
        c->outcome = K3_FETCH_AGAIN; /* refused() says more */
        return;
    }
    if (c->head.has_length && c->head.length_bytes != s->size_bytes - begins) {
        k3_untrusted(c->err, -EBADMSG, "the server sends %" PRIu64 " bytes where %" PRIu64 " are to come", c->head.length_bytes,
                     s->size_bytes - begins);
        c->outcome = K3_FETCH_WRONG;
        return;
    }
    c->at_bytes = begins;
    if (s->begin(s->arg, begins, c->head.etag, c->err) < 0)
        c->outcome = K3_FETCH_FATAL;
}

static size_t on_body(char *bytes, size_t one, size_t n, void *arg)
{
    struct k3_fetch_conn *c = arg;
    size_t len = one * n;

    if (!c->begun) {
        c->begun = true;
        begin_body(c);
    }
    if (c->outcome != K3_FETCH_OK)
        return CURL_WRITEFUNC_ERROR;
    if (len > c->sink->size_bytes - c->at_bytes) {
        k3_untrusted(c->err, -EBADMSG, "the server sends more than the %" PRIu64 " bytes that are announced", c->sink->size_bytes);
        c->outcome = K3_FETCH_WRONG;
    } else if (c->sink->bytes(c->sink->arg, bytes, len, c->err) < 0)
        c->outcome = K3_FETCH_FATAL;
    c->at_bytes += len;
    return c->outcome == K3_FETCH_OK ? len : CURL_WRITEFUNC_ERROR;
}

static int prepare_get(struct k3_fetch_conn *c, const char *url, struct curl_slist **headers)
{
    char line[K3_FETCH_ETAG_BYTES + 32];
    const struct k3_fetch_sink *s = c->sink;
    CURL *e = c->curl;
    int rc = prepare(c, headers);

    if (rc == 0 && s->from_bytes) {
        snprintf(line, sizeof(line), "Range: bytes=%" PRIu64 "-", s->from_bytes);
        rc = add_header(headers, line);
    }
    if (rc == 0 && s->from_bytes && s->etag[0]) {
        snprintf(line, sizeof(line), "If-Range: %s", s->etag);
        rc = add_header(headers, line);
    }
    if (rc < 0)
        return rc;
    (void)curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 512L << 10); /* only for speed, and refused after some failures */
    return curl_easy_setopt(e, CURLOPT_URL, url) == CURLE_OK && curl_easy_setopt(e, CURLOPT_HTTPHEADER, *headers) == CURLE_OK &&
           curl_easy_setopt(e, CURLOPT_FOLLOWLOCATION, 1L) == CURLE_OK &&
           curl_easy_setopt(e, CURLOPT_MAXREDIRS, (long)MAX_HOPS) == CURLE_OK &&
           curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
           curl_easy_setopt(e, CURLOPT_WRITEDATA, c) == CURLE_OK ? 0 : -ENOMEM;
}

static enum k3_fetch_outcome get_ended(struct k3_fetch_conn *c, const char *name, CURLcode code, double *wait_s,
                                       struct k3_err *err)
{
    long status = 0;
    char *at = NULL, why[sizeof(err->text)];

    if (atomic_load(&c->web->stop))
        return K3_FETCH_STOP;
    if (c->outcome == K3_FETCH_FATAL)
        return K3_FETCH_FATAL; /* the sink's own words */
    if (c->outcome == K3_FETCH_WRONG) {
        memcpy(why, err->text, sizeof(why));
        k3_untrusted(err, -EBADMSG, "%s: %.900s", name, why);
        return K3_FETCH_WRONG;
    }
    curl_easy_getinfo(c->curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(c->curl, CURLINFO_EFFECTIVE_URL, &at);
    if ((code == CURLE_OK || c->outcome == K3_FETCH_AGAIN) && status != 200 && status != 206)
        return refused(c, name, status, at ? at : c->web->base, wait_s, err);
    if (code != CURLE_OK)
        return failed(c, name, code, err);
    if (!c->begun && c->sink->size_bytes == 0 && c->sink->begin(c->sink->arg, 0, "", err) < 0)
        return K3_FETCH_FATAL;
    if (c->begun ? c->at_bytes != c->sink->size_bytes : c->sink->size_bytes != 0) {
        k3_fail(err, -EIO, "%s: the server ended after %" PRIu64 " of %" PRIu64 " bytes", name, c->at_bytes, c->sink->size_bytes);
        return K3_FETCH_AGAIN;
    }
    return K3_FETCH_OK;
}

enum k3_fetch_outcome k3_fetch_get(struct k3_fetch_conn *c, const char *name, struct k3_fetch_sink *sink, double *wait_s,
                                   struct k3_err *err)
{
    struct curl_slist *headers = NULL;
    enum k3_fetch_outcome outcome = K3_FETCH_FATAL;
    char *url = url_of(c, name);

    *wait_s = 0;
    c->sink = sink;
    c->at_bytes = sink->from_bytes;
    c->begun = false;
    c->outcome = K3_FETCH_OK;
    c->err = err;
    if (!url || prepare_get(c, url, &headers) < 0)
        k3_fail(err, -ENOMEM, "no memory for a request");
    else
        outcome = get_ended(c, name, curl_easy_perform(c->curl), wait_s, err);
    curl_slist_free_all(headers);
    free(url);
    return outcome;
}

/* ---- waiting ---- */

void k3_fetch_wait(struct k3_fetch_web *w, const char *name, uint32_t try, double wait_s, const struct k3_err *why)
{
    double s = w->delay_s * (double)(1u << (try < 16 ? try : 16));
    uint64_t until, now = k3_now_ns();

    if (s > MAX_WAIT_S)
        s = MAX_WAIT_S;
    s *= 0.75 + 0.5 * (double)(now / 1000 % 1000) / 1000; /* so that workers do not come back together */
    if (wait_s > s)
        s = wait_s < MAX_ASKED_WAIT_S ? wait_s : MAX_ASKED_WAIT_S;
    fprintf(stderr, "%sk3-fetch: %s; trying again in %.1f s\n", isatty(STDERR_FILENO) ? "\r\033[K" : "",
            why->text[0] ? why->text : name, s);
    until = now + (uint64_t)(s * 1e9);
    while (!atomic_load(&w->stop) && k3_now_ns() < until)
        nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
}
