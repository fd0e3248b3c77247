/* k3-computed/state.c: what a sequence carries from pass to pass.  One mapping: this header, then
 * the KDA layers (all of them together, so that a reset is one sweep), then the latent rows of the
 * MLA layers, which need no clearing: only rows below the sequence's positions are ever read. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "k3-computed/pass_private.h"

#define STATE_PAGE 4096u
#define LINE_FLOATS 16u /* every layer's part begins on a cache line */

struct layout {
    uint64_t kda_floats, kv_floats; /* per layer, whole cache lines */
    uint64_t head_bytes, total_bytes;
    uint32_t n_kda, n_mla;
};

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* false when the sizes do not fit in 64 bits. */
static bool plan(struct layout *l, const struct k3_config *c, uint32_t ctx)
{
    uint64_t s, conv, kda, kv, n;

    memset(l, 0, sizeof(*l));
    for (uint32_t i = 0; i < c->n_layers; i++)
        *(c->kind[i] == K3_KDA ? &l->n_kda : &l->n_mla) += 1;
    if (__builtin_mul_overflow((uint64_t)c->kda_heads * c->kda_dim, (uint64_t)c->kda_dim, &s) ||
        __builtin_mul_overflow((uint64_t)c->kda_heads * c->kda_dim,
                               3 * (uint64_t)(c->conv_taps - 1), &conv) ||
        __builtin_add_overflow(s, conv, &kda) ||
        __builtin_mul_overflow((uint64_t)c->kv_lora + c->qk_rope, (uint64_t)ctx, &kv) ||
        kda > UINT64_MAX / 8 || kv > UINT64_MAX / 8)
        return false;
    l->kda_floats = round_up(kda, LINE_FLOATS);
    l->kv_floats = round_up(kv, LINE_FLOATS);
    l->head_bytes = round_up(sizeof(struct k3_state), 64);
    if (__builtin_mul_overflow(l->kda_floats, (uint64_t)l->n_kda, &kda) ||
        __builtin_mul_overflow(l->kv_floats, (uint64_t)l->n_mla, &kv) ||
        __builtin_add_overflow(kda, kv, &n) || n > UINT64_MAX / 8)
        return false;
    l->total_bytes = round_up(l->head_bytes + n * sizeof(float), STATE_PAGE);
    return true;
}

uint64_t k3_state_bytes(const struct k3_config *c, uint32_t ctx)
{
    struct layout l;

    return plan(&l, c, ctx) ? l.total_bytes : UINT64_MAX;
}

uint64_t k3_state_kv_bytes(const struct k3_config *c)
{
    uint64_t n_mla = 0;

    for (uint32_t i = 0; i < c->n_layers; i++)
        n_mla += c->kind[i] == K3_MLA;
    return n_mla * ((uint64_t)c->kv_lora + c->qk_rope) * sizeof(float);
}

int k3_state_new(struct k3_state **out, const struct k3_config *c, uint32_t ctx, struct k3_err *err)
{
    struct k3_state *s;
    struct layout l;
    float *kda, *kv;

    if (ctx == 0)
        return k3_refuse(err, -EINVAL, "context of 0 positions: give --ctx of at least 1");
    if (!plan(&l, c, ctx) || l.total_bytes > SIZE_MAX / 2)
        return k3_refuse(err, -EOVERFLOW,
                         "state of one sequence with %u positions is too large for this machine",
                         ctx);
    s = mmap(NULL, (size_t)l.total_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
             0);
    if (s == MAP_FAILED)
        return k3_fail(
            err, -errno,
            "state of one sequence with %u positions: no %llu bytes of memory; lower --ctx", ctx,
            (unsigned long long)l.total_bytes);
    s->len_bytes = l.total_bytes;
    s->ctx = ctx;
    s->n_layers = c->n_layers;
    s->kv_width = c->kv_lora + c->qk_rope;
    s->s_floats = (uint64_t)c->kda_heads * c->kda_dim * c->kda_dim;
    s->tail_floats = (uint64_t)c->kda_heads * c->kda_dim * (c->conv_taps - 1);
    s->kda_bytes = l.kda_floats * l.n_kda * sizeof(float);
    kda = (float *)((char *)s + l.head_bytes);
    kv = kda + l.kda_floats * l.n_kda;
    s->kda = kda;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        if (c->kind[i] == K3_KDA) {
            s->layer[i] = kda;
            kda += l.kda_floats;
        } else {
            s->layer[i] = kv;
            kv += l.kv_floats;
        }
    }
    *out = s;
    return 0;
}

int k3_state_touch(struct k3_state *s, struct k3_err *err)
{
    if (madvise(s, (size_t)s->len_bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno == ENOMEM || errno == EFAULT)
        return k3_fail(
            err, -ENOMEM,
            "state of one sequence with %u positions: no %llu bytes of memory; lower --ctx", s->ctx,
            (unsigned long long)s->len_bytes);
    for (uint64_t i = 0; i < s->len_bytes; i += STATE_PAGE) { /* a kernel before 5.14 */
        volatile char *page = (volatile char *)s + i;

        *page = *page;
    }
    return 0;
}

void k3_state_free(struct k3_state *s)
{
    if (s)
        munmap(s, (size_t)s->len_bytes);
}

void k3_state_reset(struct k3_state *s)
{
    memset(s->kda, 0, (size_t)s->kda_bytes);
    s->positions = 0;
    s->spoilt = false;
}

void k3_state_copy_latent(struct k3_state *to, const struct k3_state *from, uint32_t n_positions)
{
    if (to->n_layers != from->n_layers || to->kda_bytes != from->kda_bytes || to->kv_width != from->kv_width ||
        to->ctx < n_positions)
        k3_bug("%u positions copied to a state of %u, or of another model", n_positions, to->ctx);
    for (uint32_t i = 0; i < from->n_layers; i++) /* the MLA layers come behind all KDA layers */
        if ((const char *)from->layer[i] >= (const char *)from->kda + from->kda_bytes)
            memcpy(to->layer[i], from->layer[i], (size_t)n_positions * from->kv_width * sizeof(float));
}

void k3_state_copy(struct k3_state *to, const struct k3_state *from)
{
    k3_state_copy_latent(to, from, from->positions);
    memcpy(to->kda, from->kda, (size_t)from->kda_bytes);
    to->positions = from->positions;
    to->spoilt = from->spoilt;
}

uint32_t k3_state_positions(const struct k3_state *s)
{
    return s->positions;
}
