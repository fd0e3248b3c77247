/* The page: the files of web/, which are part of the program.  A path is one of the table's or it is none, so there is no
 * file system behind it that a path could lead out of. */
#include <string.h>

#include "k3-router/http.h"

/* Nothing from elsewhere, nothing inline, no text that becomes code; no other page around it. */
#define CSP                                                                                                      \
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "        \
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

const struct k3_web_file *k3_http_page_find(const char *path)
{
    for (size_t i = 0; i < k3_n_web_files; i++)
        if (strcmp(k3_web_files[i].path, path) == 0)
            return &k3_web_files[i];
    return NULL;
}

void k3_http_get_page(struct k3_http_req *q)
{
    const struct k3_web_file *f = q->file;

    if (k3_http_tag_listed(MHD_lookup_connection_value(q->mhd, MHD_HEADER_KIND, "If-None-Match"), f->etag))
        k3_http_reply(q, 304, NULL);
    else if (k3_buf_append(&q->out, (const char *)f->bytes, f->len_bytes) < 0)
        k3_http_error(q, 500, NULL, NULL, "no memory for the reply");
    else
        k3_http_reply(q, 200, f->type);
}

void k3_http_page_headers(const struct k3_http_req *q, struct MHD_Response *r)
{
    MHD_add_response_header(r, "Cache-Control", "no-cache"); /* may be kept, and is asked for each time */
    if (q->status == 200 || q->status == 304)
        MHD_add_response_header(r, "ETag", q->file->etag);
    MHD_add_response_header(r, "Content-Security-Policy", CSP);
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cross-Origin-Opener-Policy", "same-origin");
    MHD_add_response_header(r, "Cross-Origin-Resource-Policy", "same-origin");
}
