/* Who may ask: the address, the keys, Host and Origin.  Nothing here depends on the server. */
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text/file.h"
#include "k3-router/http.h"

#define KEY_MIN 16u
#define KEY_FILE_MAX (1u << 16)

/* An address without brackets: the family, or 0. */
static int parse_ip(const char *text, struct k3_http_addr *a, uint16_t port)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a->sa;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a->sa;

    memset(&a->sa, 0, sizeof(a->sa));
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        a->len = sizeof(*v4);
        a->loopback = ntohl(v4->sin_addr.s_addr) >> 24 == 127;
        return AF_INET;
    }
    if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        a->len = sizeof(*v6);
        a->loopback = IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
        return AF_INET6;
    }
    return 0;
}

int k3_http_addr_parse(struct k3_http_addr *a, const char *text, struct k3_err *err)
{
    const char *colon = strrchr(text, ':');
    char host[64];
    size_t len = colon ? (size_t)(colon - text) : 0;
    bool bracket = len >= 2 && text[0] == '[' && text[len - 1] == ']';
    uint64_t port;
    int family = 0;

    if (colon && len < sizeof(host) && k3_parse_u64(colon + 1, 0, 65535, &port) == 0) {
        memcpy(host, text + bracket, len - 2 * bracket);
        host[len - 2 * bracket] = 0;
        family = parse_ip(strcmp(host, "localhost") == 0 && !bracket ? "127.0.0.1" : host, a, (uint16_t)port);
    }
    if (family == 0 || (family == AF_INET6) != bracket)
        return k3_refuse(err, -EINVAL, "--http %.80s: must be ADDR:PORT, as 127.0.0.1:8080 or [::1]:8080", text);
    return 0;
}

const char *k3_http_addr_text(const struct k3_http_addr *a, char *out, size_t len)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&a->sa;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&a->sa;
    char host[INET6_ADDRSTRLEN] = "";

    if (a->sa.ss_family == AF_INET) {
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
        snprintf(out, len, "%s:%u", host, ntohs(v4->sin_port));
    } else {
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
        snprintf(out, len, "[%s]:%u", host, ntohs(v6->sin6_port));
    }
    return out;
}

/* ---- keys ---- */

static int add_key(struct k3_http_keys *k, const char *line, size_t len, const char *name, size_t n_line, struct k3_err *err)
{
    char **more;

    for (size_t i = 0; i < len; i++)
        if (line[i] <= ' ' || line[i] > '~')
            return k3_refuse(err, -EINVAL, "%s line %zu: a key has only printable ASCII characters and no blanks", name, n_line);
    if (len < KEY_MIN)
        return k3_refuse(err, -EINVAL, "%s line %zu: a key of %zu characters; at least %u (openssl rand -hex 24 makes one)", name,
                         n_line, len, KEY_MIN);
    more = realloc(k->key, (k->n + 1) * sizeof(*more));
    if (more)
        k->key = more;
    if (!more || !(k->key[k->n] = strndup(line, len)))
        return k3_fail(err, -ENOMEM, "%s: no memory", name);
    k->n++;
    return 0;
}

int k3_http_keys_parse(struct k3_http_keys *k, const char *text, size_t len_bytes, const char *name, struct k3_err *err)
{
    size_t n_line = 0;
    int rc = 0;

    *k = (struct k3_http_keys){ 0 };
    for (size_t at = 0, end; at < len_bytes && rc == 0; at = end + 1) {
        const char *nl = memchr(text + at, '\n', len_bytes - at);
        size_t len;

        end = nl ? (size_t)(nl - text) : len_bytes;
        len = end - at;
        n_line++;
        while (len && (text[at + len - 1] == '\r' || text[at + len - 1] == ' '))
            len--;
        if (len && text[at] != '#')
            rc = add_key(k, text + at, len, name, n_line, err);
    }
    if (rc == 0 && k->n == 0)
        rc = k3_refuse(err, -EINVAL, "%s: holds no key; write one on a line of its own", name);
    if (rc < 0)
        k3_http_keys_free(k);
    return rc;
}

int k3_http_keys_load(struct k3_http_keys *k, const char *path, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    struct stat st;
    int rc;

    if (stat(path, &st) != 0)
        return k3_refuse(err, -errno, "--api-key-file %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) || (st.st_uid != geteuid() && st.st_uid != 0) || (st.st_mode & 077))
        return k3_refuse(err, -EPERM, "--api-key-file %s: must be a file that belongs to uid %u (or root) and that nobody else can "
                         "read or write (chmod 600)", path, (unsigned)geteuid());
    rc = k3_file_read(&b, path, KEY_FILE_MAX, err);
    if (rc == 0)
        rc = k3_http_keys_parse(k, b.len_bytes ? b.bytes : "", b.len_bytes, path, err);
    if (b.bytes)
        explicit_bzero(b.bytes, b.len_bytes);
    k3_buf_free(&b);
    return rc;
}

void k3_http_keys_free(struct k3_http_keys *k)
{
    for (size_t i = 0; i < k->n; i++) {
        explicit_bzero(k->key[i], strlen(k->key[i]));
        free(k->key[i]);
    }
    free(k->key);
    *k = (struct k3_http_keys){ 0 };
}

bool k3_http_key_ok(const struct k3_http_keys *k, const char *given)
{
    size_t len = strlen(given);
    bool ok = false;

    for (size_t i = 0; i < k->n; i++) {
        size_t n = strlen(k->key[i]);
        volatile unsigned diff = n != len;

        for (size_t j = 0; j < n; j++)
            diff |= (unsigned char)k->key[i][j] ^ (unsigned char)(j < len ? given[j] : 0);
        ok |= diff == 0;
    }
    return ok;
}

const char *k3_http_bearer(const char *authorization)
{
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0)
        return NULL;
    return authorization + 7 + strspn(authorization + 7, " ");
}

/* ---- Host and Origin ---- */

/* The name of HOST or HOST:PORT, lower case, without brackets.  False: not of that form. */
static bool host_name(const char *host, char *out, size_t len)
{
    const char *end, *port;
    size_t n;

    if (host[0] == '[') {
        host++;
        end = strchr(host, ']');
        port = end ? end + 1 : NULL;
    } else {
        end = host + strcspn(host, ":");
        port = end;
    }
    if (!end || (*port && (*port != ':' || strspn(port + 1, "0123456789") != strlen(port + 1))))
        return false;
    n = (size_t)(end - host);
    if (n == 0 || n >= len)
        return false;
    for (size_t i = 0; i < n; i++)
        out[i] = (char)tolower((unsigned char)host[i]);
    out[n] = 0;
    return true;
}

bool k3_http_host_ok(const char *host, const char *served, const struct k3_str_list *names)
{
    struct k3_http_addr a;
    char name[256], own[256];

    if (!host || !host_name(host, name, sizeof(name)))
        return false;
    if (strcmp(name, "localhost") == 0 || (parse_ip(name, &a, 0) && a.loopback))
        return true;
    if (host_name(served, own, sizeof(own)) && strcmp(name, own) == 0)
        return true;
    for (size_t i = 0; i < names->n; i++)
        if (strcasecmp(name, names->item[i]) == 0)
            return true;
    return false;
}

bool k3_http_origin_same(const char *origin, const char *host)
{
    const char *at = strncmp(origin, "http://", 7) == 0 ? origin + 7 : strncmp(origin, "https://", 8) == 0 ? origin + 8 : NULL;

    return at && host && *host && strcasecmp(at, host) == 0;
}

bool k3_http_origin_listed(const char *origin, const struct k3_str_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(list->item[i], "*") == 0 || strcasecmp(list->item[i], origin) == 0)
            return true;
    return false;
}

bool k3_http_header_names_ok(const char *text)
{
    size_t n = strlen(text);

    return n > 0 && n < 512 && strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ") == n;
}

bool k3_http_tag_listed(const char *list, const char *etag)
{
    size_t len = strlen(etag);

    while (list && *list) {
        list += strspn(list, " \t,");
        if (*list == '*')
            return true;
        if (strncmp(list, "W/", 2) == 0)
            list += 2;
        if (strncmp(list, etag, len) == 0 && strchr(" \t,", list[len]))
            return true;
        list += strcspn(list, ",");
    }
    return false;
}
