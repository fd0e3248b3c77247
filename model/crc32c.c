/* CRC32C in plain C, eight bytes a step by eight tables; and the choice of the faster way. */
#include "model/crc32c.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define POLY 0x82f63b78u /* x^32 + x^28 + ... reflected */

static uint32_t table[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;

        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? c >> 1 ^ POLY : c >> 1;
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            table[t][i] = table[t - 1][i] >> 8 ^ table[0][table[t - 1][i] & 0xff];
}

uint32_t k3_crc32c_c(uint32_t crc, const void *data, size_t len_bytes)
{
    const uint8_t *p = data;

    pthread_once(&once, fill);
    crc = ~crc;
    for (; len_bytes >= 8; len_bytes -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = table[7][crc & 0xff] ^ table[6][crc >> 8 & 0xff] ^ table[5][crc >> 16 & 0xff] ^ table[4][crc >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    while (len_bytes--)
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 0xff];
    return ~crc;
}

int k3_crc32c_has_sse42(void)
{
    return __builtin_cpu_supports("sse4.2") != 0;
}

uint32_t k3_crc32c(uint32_t crc, const void *data, size_t len_bytes)
{
    return k3_crc32c_has_sse42() ? k3_crc32c_sse42(crc, data, len_bytes) : k3_crc32c_c(crc, data, len_bytes);
}

int k3_crc32c_file(int fd, uint64_t off_bytes, uint64_t len_bytes, void *buf, size_t buf_bytes, uint32_t *crc)
{
    *crc = 0;
    while (len_bytes) {
        ssize_t n = pread(fd, buf, len_bytes < buf_bytes ? (size_t)len_bytes : buf_bytes, (off_t)off_bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -ENODATA;
        *crc = k3_crc32c(*crc, buf, (size_t)n);
        off_bytes += (uint64_t)n;
        len_bytes -= (uint64_t)n;
    }
    return 0;
}
