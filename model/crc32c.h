/* model/crc32c.h: CRC32C (Castagnoli; RFC 3720), the checksum of pieces, experts and packed trunks. */
#ifndef K3_MODEL_CRC32C_H
#define K3_MODEL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The CRC of what had the CRC `crc` (0 for nothing) followed by these bytes.  Uses what the CPU has; results are
 * equal. */
uint32_t k3_crc32c(uint32_t crc, const void *data, size_t len_bytes);

/* *crc: of len_bytes of a file from off_bytes on, read through buf.  -ENODATA when it ends before, else negative errno. */
int k3_crc32c_file(int fd, uint64_t off_bytes, uint64_t len_bytes, void *buf, size_t buf_bytes, uint32_t *crc);

/* The two ways, for tests: plain C, and the CPU's instruction in three streams (only where k3_crc32c_has_sse42()). */
uint32_t k3_crc32c_c(uint32_t crc, const void *data, size_t len_bytes);
uint32_t k3_crc32c_sse42(uint32_t crc, const void *data, size_t len_bytes);
int k3_crc32c_has_sse42(void);

#endif
