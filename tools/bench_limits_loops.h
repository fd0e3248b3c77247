/* tools/bench_limits_loops.h: the loops of bench_limits.h, for the vector type of the file that includes it:
 * V, V_FLOATS, V_LOAD(p), V_ZERO, V_XOR(a, b), V_STORE(p, v); F, F_SET(x), F_FMA(a, b, c), F_STORE(p, v); CHAINS. */

#define UNROLL 4 /* vectors of a stream, one after the other */

static inline __attribute__((always_inline)) uint64_t read_streams(const char *p, size_t n, size_t streams, size_t ahead)
{
    size_t part = n / streams;
    V acc[UNROLL];
    uint64_t out[sizeof(V) / sizeof(uint64_t)], sum = 0;

#pragma GCC unroll 8
    for (size_t u = 0; u < UNROLL; u++)
        acc[u] = V_ZERO;
    for (size_t i = 0; i < part; i += UNROLL * sizeof(V))
#pragma GCC unroll 8
        for (size_t s = 0; s < streams; s++) {
            const char *at = p + s * part + i;

#pragma GCC unroll 8
            for (size_t u = 0; u < UNROLL; u++) {
                if (ahead && u * sizeof(V) % 64 == 0)
                    _mm_prefetch(at + u * sizeof(V) + ahead, _MM_HINT_T0);
                acc[u] = V_XOR(acc[u], V_LOAD(at + u * sizeof(V)));
            }
        }
    V_STORE(out, V_XOR(V_XOR(acc[0], acc[1]), V_XOR(acc[2], acc[3])));
    for (size_t i = 0; i < sizeof(out) / sizeof(*out); i++)
        sum ^= out[i];
    return sum;
}

#define READ(name, streams, ahead)                      \
    static uint64_t name(const void *p, size_t n)       \
    {                                                   \
        return read_streams(p, n, streams, ahead);      \
    }
READ(read_1, 1, 0)
READ(read_2, 2, 0)
READ(read_4, 4, 0)
READ(read_8, 8, 0)
READ(read_1_ahead, 1, 4096)
READ(read_2_ahead, 2, 2048)
READ(read_4_ahead, 4, 2048)
READ(read_8_ahead, 8, 1024)
#define READ_LOOPS                                                                                                     \
    { { 1, 0, read_1 }, { 2, 0, read_2 }, { 4, 0, read_4 }, { 8, 0, read_8 }, { 1, 4096, read_1_ahead },               \
      { 2, 2048, read_2_ahead }, { 4, 2048, read_4_ahead }, { 8, 1024, read_8_ahead } }

static inline __attribute__((always_inline)) float fma_chains(uint64_t rounds, uint64_t *flop)
{
    F acc[CHAINS], x = F_SET(0.999f), y = F_SET(0.001f);
    float out[V_FLOATS], sum = 0;

#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++)
        acc[i] = F_SET((float)i);
    for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16 /* else the chains lie in memory and not in registers */
        for (int i = 0; i < CHAINS; i++)
            acc[i] = F_FMA(acc[i], x, y);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
        F_STORE(out, acc[i]);
        for (size_t l = 0; l < V_FLOATS; l++)
            sum += out[l];
    }
    *flop = rounds * CHAINS * 2 * V_FLOATS;
    return sum;
}
