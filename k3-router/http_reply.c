/* What goes out: whole replies, error objects, and bodies that are made while they are sent. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "k3-router/http.h"

#define BLOCK_BYTES 32768u

static const char *error_type(int status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 503: return "unavailable_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

static int put_text_or_null(struct k3_buf *b, const char *text)
{
    return text ? k3_buf_json(b, text, k3_utf8_check(text, strlen(text))) : k3_buf_puts(b, "null");
}

int k3_http_error_json(struct k3_buf *b, int status, const char *param, const char *code, const char *text)
{
    int rc = k3_buf_puts(b, "{\"error\":{\"message\":");

    rc |= put_text_or_null(b, text);
    rc |= k3_buf_printf(b, ",\"type\":\"%s\",\"param\":", error_type(status));
    rc |= put_text_or_null(b, param);
    rc |= k3_buf_puts(b, ",\"code\":");
    rc |= put_text_or_null(b, code);
    rc |= k3_buf_puts(b, "}}");
    return rc ? -ENOMEM : 0;
}

int k3_http_status_of(const struct k3_err *err)
{
    return err->exit_status == K3_EXIT_REFUSED ? 400 : err->exit_status == K3_EXIT_NO_PEER ? 503 : 500;
}

void k3_http_reply(struct k3_http_req *q, int status, const char *type)
{
    q->status = status;
    q->type = type;
    q->ended = true;
}

void k3_http_error(struct k3_http_req *q, int status, const char *param, const char *code, const char *fmt, ...)
{
    char text[1200];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    q->out.len_bytes = 0;
    if (k3_http_error_json(&q->out, status, param, code, text) < 0 || k3_buf_puts(&q->out, "\n") < 0)
        q->out.len_bytes = 0; /* no memory: the status must do */
    if ((status == 429 || status == 503) && q->retry_after_s == 0)
        q->retry_after_s = 5;
    k3_http_reply(q, status, "application/json");
}

/* ---- bodies that grow ---- */

void k3_http_wake(struct k3_http_req *q)
{
    if (q->suspended && q->mhd) {
        q->suspended = false;
        MHD_resume_connection(q->mhd);
    }
}

void k3_http_ready(struct k3_http_req *q)
{
    q->phase = K3_HTTP_READY;
    k3_http_wake(q);
}

void k3_http_send(struct k3_http_req *q, const char *bytes, size_t len_bytes)
{
    if (q->ended || atomic_load(&q->gone))
        return;
    if (q->sent > q->out.len_bytes / 2) { /* what has been taken makes room */
        memmove(q->out.bytes, q->out.bytes + q->sent, q->out.len_bytes - q->sent);
        q->out.len_bytes -= q->sent;
        q->sent = 0;
    }
    /* A plain reply comes in one piece, however slow its reader is. */
    if ((q->stream && q->out.len_bytes - q->sent + len_bytes > K3_HTTP_OUT_MAX) || k3_buf_append(&q->out, bytes, len_bytes) < 0)
        atomic_store(&q->gone, true); /* it does not read */
    q->out_ns = k3_now_ns();
    k3_http_wake(q);
}

void k3_http_end(struct k3_http_req *q)
{
    q->ended = true;
    k3_http_wake(q);
}

/* libmicrohttpd wants bytes. */
static ssize_t read_out(void *cls, uint64_t pos, char *buf, size_t max)
{
    struct k3_http_req *q = cls;
    bool waits = false;
    size_t n;

    (void)pos;
    pthread_mutex_lock(&q->h->lock);
    n = q->out.len_bytes - q->sent;
    if (atomic_load(&q->gone) || (q->h->leaving && n == 0 && !q->ended)) {
        pthread_mutex_unlock(&q->h->lock);
        return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    if (n > max)
        n = max;
    if (n) {
        memcpy(buf, q->out.bytes + q->sent, n);
        q->sent += n;
    } else if (!q->ended) {
        MHD_suspend_connection(q->mhd);
        q->suspended = waits = true;
    }
    pthread_mutex_unlock(&q->h->lock);
    return n ? (ssize_t)n : waits ? 0 : MHD_CONTENT_READER_END_OF_STREAM;
}

static void add_headers(const struct k3_http_req *q, struct MHD_Response *r)
{
    char number[32];

    if (q->type)
        MHD_add_response_header(r, "Content-Type", q->type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (q->file)
        k3_http_page_headers(q, r);
    else
        MHD_add_response_header(r, "Cache-Control", q->stream ? "no-cache" : "no-store");
    if (q->stream)
        MHD_add_response_header(r, "X-Accel-Buffering", "no");
    if (q->eta_s >= 0) {
        snprintf(number, sizeof(number), "%.0f", q->eta_s);
        MHD_add_response_header(r, "X-K3-ETA", number);
    }
    if (q->retry_after_s) {
        snprintf(number, sizeof(number), "%u", q->retry_after_s);
        MHD_add_response_header(r, "Retry-After", number);
    }
    if (q->status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (q->origin[0]) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", q->origin);
        MHD_add_response_header(r, "Access-Control-Expose-Headers", "X-K3-ETA, Retry-After");
        MHD_add_response_header(r, "Vary", "Origin");
    }
}

enum MHD_Result k3_http_queue_reply(struct k3_http_req *q)
{
    struct MHD_Response *r;
    enum MHD_Result ok;
    bool grows;

    pthread_mutex_lock(&q->h->lock);
    grows = !q->ended || q->stream;
    q->sending = true;
    pthread_mutex_unlock(&q->h->lock);
    if (grows) {
        r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_out, q, NULL);
    } else {
        r = MHD_create_response_from_buffer(q->out.len_bytes, q->out.bytes ? q->out.bytes : "",
                                            q->out.bytes ? MHD_RESPMEM_MUST_FREE : MHD_RESPMEM_PERSISTENT);
        if (r)
            q->out = (struct k3_buf){ 0 };
    }
    if (!r)
        return MHD_NO;
    add_headers(q, r);
    if (q->status == 405 || q->status == 204)
        MHD_add_response_header(r, "Allow", k3_http_methods(q));
    if (q->status == 204 && q->origin[0]) {
        MHD_add_response_header(r, "Access-Control-Allow-Methods", k3_http_methods(q));
        MHD_add_response_header(r, "Access-Control-Allow-Headers",
                                q->allow_headers[0] ? q->allow_headers : "Authorization, Content-Type");
        MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    }
    ok = MHD_queue_response(q->mhd, (unsigned)q->status, r);
    MHD_destroy_response(r);
    return ok;
}
