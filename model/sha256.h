/* model/sha256.h: SHA-256, for digests of what two daemons must agree on. */
#ifndef K3_MODEL_SHA256_H
#define K3_MODEL_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct k3_sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    uint8_t block[64];
};

void k3_sha256_init(struct k3_sha256 *s);
void k3_sha256_add(struct k3_sha256 *s, const void *data, size_t len_bytes);
void k3_sha256_add_u64(struct k3_sha256 *s, uint64_t v); /* 8 bytes, little-endian */
void k3_sha256_add_text(struct k3_sha256 *s, const char *text); /* with its final 0 */
void k3_sha256_end(struct k3_sha256 *s, uint8_t out[32]);

#endif
