/* CRC32C by the CPU's instruction.  It takes three cycles and a new one can begin in each, so three neighbouring
 * stretches run side by side; a CRC is moved over the stretches behind it by a table of what that many zero bytes do
 * to each of its four bytes. */
#include "model/crc32c.h"

#include <nmmintrin.h>
#include <pthread.h>
#include <string.h>

#define LONG_BYTES 8192u /* of one of three stretches; multiples of 8 */
#define SHORT_BYTES 256u

static uint32_t shift_long[4][256], shift_short[4][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Zero bytes act on a CRC linearly: the columns are what they do to each bit. */
static void fill_one(uint32_t shift[4][256], uint32_t len_bytes)
{
    uint32_t column[32];

    for (int bit = 0; bit < 32; bit++) {
        uint64_t c = 1u << bit;

        for (uint32_t i = 0; i < len_bytes; i += 8)
            c = _mm_crc32_u64(c, 0);
        column[bit] = (uint32_t)c;
    }
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t v = 0; v < 256; v++) {
            shift[byte][v] = 0;
            for (int bit = 0; bit < 8; bit++)
                if (v >> bit & 1)
                    shift[byte][v] ^= column[8 * byte + bit];
        }
}

static void fill(void)
{
    fill_one(shift_long, LONG_BYTES);
    fill_one(shift_short, SHORT_BYTES);
}

static uint64_t moved(const uint32_t shift[4][256], uint64_t crc)
{
    return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24 & 0xff];
}

static uint64_t word(const uint8_t *p)
{
    uint64_t w;

    memcpy(&w, p, sizeof(w));
    return w;
}

static uint64_t three(uint64_t crc, const uint8_t *p, uint32_t stretch_bytes, const uint32_t shift[4][256])
{
    uint64_t b = 0, c = 0;

    for (const uint8_t *end = p + stretch_bytes; p < end; p += 8) {
        crc = _mm_crc32_u64(crc, word(p));
        b = _mm_crc32_u64(b, word(p + stretch_bytes));
        c = _mm_crc32_u64(c, word(p + 2 * (size_t)stretch_bytes));
    }
    crc = moved(shift, crc) ^ b;
    return moved(shift, crc) ^ c;
}

uint32_t k3_crc32c_sse42(uint32_t crc, const void *data, size_t len_bytes)
{
    const uint8_t *p = data;
    uint64_t c = (uint32_t)~crc;

    pthread_once(&once, fill);
    for (; len_bytes >= 3 * LONG_BYTES; len_bytes -= 3 * LONG_BYTES, p += 3 * LONG_BYTES)
        c = three(c, p, LONG_BYTES, (const uint32_t(*)[256])shift_long);
    for (; len_bytes >= 3 * SHORT_BYTES; len_bytes -= 3 * SHORT_BYTES, p += 3 * SHORT_BYTES)
        c = three(c, p, SHORT_BYTES, (const uint32_t(*)[256])shift_short);
    for (; len_bytes >= 8; len_bytes -= 8, p += 8)
        c = _mm_crc32_u64(c, word(p));
    while (len_bytes--)
        c = _mm_crc32_u8((uint32_t)c, *p++);
    return ~(uint32_t)c;
}
