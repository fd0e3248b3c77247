/* CRC32C: the published vectors (RFC 3720 B.4), both ways equal on every length and alignment, and in parts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/crc32c.h"

typedef uint32_t crc_fn(uint32_t crc, const void *data, size_t len_bytes);

/* One bit at a time, as the definition says. */
static uint32_t by_bits(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    while (n--) {
        crc ^= *p++;
        for (int i = 0; i < 8; i++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void check_vectors(crc_fn *crc)
{
    uint8_t up[32], down[32], b[32];
    /* An iSCSI SCSI Read (10) command PDU. */
    static const uint8_t pdu[48] = {
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0,
        0, 0, 0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
    };

    for (int i = 0; i < 32; i++) {
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    memset(b, 0, sizeof(b));
    assert_int_equal(crc(0, b, 32), 0x8a9136aau);
    memset(b, 0xff, sizeof(b));
    assert_int_equal(crc(0, b, 32), 0x62a8ab43u);
    assert_int_equal(crc(0, up, 32), 0x46dd794eu);
    assert_int_equal(crc(0, down, 32), 0x113fdb5cu);
    assert_int_equal(crc(0, pdu, 48), 0xd9963a56u);
    assert_int_equal(crc(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(crc(0, "", 0), 0);
    assert_int_equal(crc(0x12345678u, "", 0), 0x12345678u);
}

static void test_vectors(void **state)
{
    (void)state;
    check_vectors(k3_crc32c_c);
    check_vectors(k3_crc32c);
    if (k3_crc32c_has_sse42())
        check_vectors(k3_crc32c_sse42);
}

static uint8_t *noise(size_t n)
{
    uint8_t *p = malloc(n);
    uint32_t s = 1;

    assert_non_null(p);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)((s = s * 1664525u + 1013904223u) >> 24);
    return p;
}

static void test_equal(void **state)
{
    /* around each step of the three streams: 8, 3 * 256, 3 * 8192, and both at once */
    static const size_t around[] = { 0, 8, 256, 768, 776, 1536, 8192, 24576, 25344, 25352, 49152, 100000 };
    size_t n = 110000;
    uint8_t *p = noise(n);

    (void)state;
    for (size_t i = 0; i < sizeof(around) / sizeof(around[0]); i++)
        for (size_t d = 0; d < 18; d++)
            for (size_t at = 0; at < 9; at += 4) {
                size_t len = around[i] + d < 9 ? d : around[i] + d - 9;
                uint32_t want = by_bits(77, p + at, len);

                assert_int_equal(k3_crc32c_c(77, p + at, len), want);
                assert_int_equal(k3_crc32c(77, p + at, len), want);
                if (k3_crc32c_has_sse42())
                    assert_int_equal(k3_crc32c_sse42(77, p + at, len), want);
            }
    free(p);
}

static void test_parts(void **state)
{
    size_t n = 100000, at = 0, step = 1;
    uint8_t *p = noise(n);
    uint32_t whole = k3_crc32c(0, p, n), parts = 0;

    (void)state;
    while (at < n) {
        size_t len = step < n - at ? step : n - at;

        parts = k3_crc32c(parts, p + at, len);
        at += len;
        step = step * 3 + 1;
    }
    assert_int_equal(parts, whole);
    p[n / 2] ^= 0x10;
    assert_int_not_equal(k3_crc32c(0, p, n), whole);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_equal),
        cmocka_unit_test(test_parts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
