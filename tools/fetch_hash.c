/* Sums of a file, by libcrypto: it uses the processor's SHA instructions and comes with libcurl. */
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/fetch.h"

struct k3_fetch_hash {
    EVP_MD_CTX *sha256, *git; /* git: NULL when it is not wanted */
};

struct k3_fetch_hash *k3_fetch_hash_begin(enum k3_fetch_sum kind, uint64_t size_bytes)
{
    struct k3_fetch_hash *h = calloc(1, sizeof(*h));
    char head[40];
    int n = snprintf(head, sizeof(head), "blob %" PRIu64, size_bytes) + 1; /* with its final 0 */

    if (!h)
        return NULL;
    h->sha256 = EVP_MD_CTX_new();
    if (!h->sha256 || !EVP_DigestInit_ex(h->sha256, EVP_sha256(), NULL))
        goto fail;
    if (kind != K3_FETCH_GIT_SHA1)
        return h;
    h->git = EVP_MD_CTX_new();
    if (h->git && EVP_DigestInit_ex(h->git, EVP_sha1(), NULL) && EVP_DigestUpdate(h->git, head, (size_t)n))
        return h;
fail:
    k3_fetch_hash_free(h);
    return NULL;
}

void k3_fetch_hash_add(struct k3_fetch_hash *h, const void *bytes, size_t n)
{
    if (!EVP_DigestUpdate(h->sha256, bytes, n) || (h->git && !EVP_DigestUpdate(h->git, bytes, n)))
        k3_bug("libcrypto cannot hash");
}

static void hex(EVP_MD_CTX *of, char *out)
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;

    if (!EVP_DigestFinal_ex(of, md, &n))
        k3_bug("libcrypto cannot hash");
    for (unsigned i = 0; i < n; i++)
        sprintf(out + 2 * i, "%02x", md[i]);
}

void k3_fetch_hash_end(struct k3_fetch_hash *h, char sha256[65], char git_sha1[41])
{
    hex(h->sha256, sha256);
    git_sha1[0] = 0;
    if (h->git)
        hex(h->git, git_sha1);
}

void k3_fetch_hash_free(struct k3_fetch_hash *h)
{
    if (!h)
        return;
    EVP_MD_CTX_free(h->sha256);
    EVP_MD_CTX_free(h->git);
    free(h);
}
