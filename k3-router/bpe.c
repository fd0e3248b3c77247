#include "k3-router/bpe.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Up to here a scan over a flat array beats a heap. */
#define FLAT_BYTES 96u

static uint32_t hash_bytes(const char *bytes, size_t len_bytes)
{
    uint64_t h = 0x9e3779b97f4a7c15ull ^ len_bytes, w;

    for (; len_bytes >= 8; bytes += 8, len_bytes -= 8) {
        memcpy(&w, bytes, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    w = 0;
    memcpy(&w, bytes, len_bytes);
    h = (h ^ w) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
    h *= 0xc4ceb9fe1a85ec53ull;
    return (uint32_t)(h >> 32);
}

uint32_t k3_ranks_find(const struct k3_ranks *r, const char *bytes, size_t len_bytes)
{
    uint32_t h;

    if (len_bytes > r->longest_bytes || len_bytes == 0)
        return K3_NO_RANK;
    h = hash_bytes(bytes, len_bytes);
    for (uint32_t i = h & r->mask; r->slot[i]; i = (i + 1) & r->mask) {
        uint32_t id = r->slot[i] - 1;
        if (r->hash[i] == h && r->off[id + 1] - r->off[id] == len_bytes &&
            memcmp(r->bytes + r->off[id], bytes, len_bytes) == 0)
            return id;
    }
    return K3_NO_RANK;
}

int k3_ranks_build(struct k3_ranks *r, uint32_t *a, uint32_t *b)
{
    size_t n_slots = 1024;

    while (n_slots < 2 * (size_t)r->n)
        n_slots *= 2;
    r->mask = (uint32_t)(n_slots - 1);
    r->slot = calloc(n_slots, sizeof(*r->slot));
    r->hash = calloc(n_slots, sizeof(*r->hash));
    if (!r->slot || !r->hash)
        return -ENOMEM;
    for (uint32_t id = 0; id < r->n; id++) {
        const char *p = r->bytes + r->off[id];
        uint32_t len_bytes = r->off[id + 1] - r->off[id], h = hash_bytes(p, len_bytes), i = h & r->mask;

        if (len_bytes > r->longest_bytes)
            r->longest_bytes = len_bytes;
        *a = k3_ranks_find(r, p, len_bytes);
        if (*a != K3_NO_RANK) {
            *b = id;
            return -EEXIST;
        }
        while (r->slot[i])
            i = (i + 1) & r->mask;
        r->slot[i] = id + 1;
        r->hash[i] = h;
    }
    for (unsigned c = 0; c < 256; c++) {
        char byte = (char)c;
        if (k3_ranks_find(r, &byte, 1) == K3_NO_RANK) {
            *a = c;
            return -ENOENT;
        }
    }
    return 0;
}

void k3_ranks_free(struct k3_ranks *r)
{
    free(r->bytes);
    free(r->off);
    free(r->slot);
    free(r->hash);
    *r = (struct k3_ranks){ 0 };
}

struct part { uint32_t start, rank; }; /* rank of this part together with the next one */

static int merge_flat(const struct k3_ranks *r, const char *piece, size_t len_bytes, struct k3_ids *out)
{
    struct part part[FLAT_BYTES + 1];
    size_t n = len_bytes; /* part[n] is the end */

    for (size_t i = 0; i <= n; i++)
        part[i] = (struct part){ (uint32_t)i, i + 2 <= n ? k3_ranks_find(r, piece + i, 2) : K3_NO_RANK };
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (part[i].rank < part[best].rank)
                best = i;
        if (part[best].rank == K3_NO_RANK)
            break;
        memmove(&part[best + 1], &part[best + 2], (n - best - 1) * sizeof(part[0]));
        n--;
        for (size_t i = best ? best - 1 : 0; i <= best; i++)
            part[i].rank = i + 2 <= n ? k3_ranks_find(r, piece + part[i].start, part[i + 2].start - part[i].start)
                                      : K3_NO_RANK;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t id = k3_ranks_find(r, piece + part[i].start, part[i + 1].start - part[i].start);
        if (k3_ids_push(out, id) < 0)
            return -ENOMEM;
    }
    return 0;
}

/* Heap of candidate merges, least (rank, left position) first.  An entry is stale when its two parts are no longer what they
 * were; then their joint length differs, which is looked at when it is taken out. */
struct cand { uint64_t key; uint32_t len_bytes; };

static void heap_push(struct cand *heap, size_t *n, struct cand c)
{
    size_t i = (*n)++;

    while (i > 0 && heap[(i - 1) / 2].key > c.key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = c;
}

static struct cand heap_pop(struct cand *heap, size_t *n)
{
    struct cand top = heap[0], last = heap[--*n];
    size_t i = 0;

    for (size_t k; (k = 2 * i + 1) < *n; i = k) {
        if (k + 1 < *n && heap[k + 1].key < heap[k].key)
            k++;
        if (last.key <= heap[k].key)
            break;
        heap[i] = heap[k];
    }
    heap[i] = last;
    return top;
}

static int merge_heap(const struct k3_ranks *r, const char *piece, size_t len_bytes, struct k3_ids *out)
{
    uint32_t n = (uint32_t)len_bytes, *next = NULL, *prev = NULL;
    struct cand *heap = NULL;
    size_t n_heap = 0;
    int rc = -ENOMEM;

    if (len_bytes > UINT32_MAX / 4)
        return -ENOMEM;
    /* next[i]: where the part that begins at i ends; 0 when none begins there.  Every merge adds at most two candidates and
     * there are fewer than n merges. */
    next = malloc(((size_t)n + 1) * sizeof(*next));
    prev = malloc(((size_t)n + 1) * sizeof(*prev));
    heap = malloc(3 * (size_t)n * sizeof(*heap));
    if (!next || !prev || !heap)
        goto out;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rank = i + 2 <= n ? k3_ranks_find(r, piece + i, 2) : K3_NO_RANK;
        next[i] = i + 1;
        prev[i] = i ? i - 1 : UINT32_MAX;
        if (rank != K3_NO_RANK)
            heap_push(heap, &n_heap, (struct cand){ (uint64_t)rank << 32 | i, 2 });
    }
    next[n] = 0;
    while (n_heap) {
        struct cand c = heap_pop(heap, &n_heap);
        uint32_t i = (uint32_t)c.key, mid = next[i], end;

        if (mid == 0 || mid >= n || next[mid] - i != c.len_bytes)
            continue;
        end = next[mid];
        next[i] = end;
        next[mid] = 0;
        if (end < n)
            prev[end] = i;
        for (int side = 0; side < 2; side++) {
            uint32_t left = side ? i : prev[i], stop, rank;
            if (left == UINT32_MAX || next[left] >= n)
                continue;
            stop = next[next[left]];
            rank = k3_ranks_find(r, piece + left, stop - left);
            if (rank != K3_NO_RANK)
                heap_push(heap, &n_heap, (struct cand){ (uint64_t)rank << 32 | left, stop - left });
        }
    }
    rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i = next[i])
        rc = k3_ids_push(out, k3_ranks_find(r, piece + i, next[i] - i));
out:
    free(next);
    free(prev);
    free(heap);
    return rc;
}

int k3_bpe_merge(const struct k3_ranks *r, const char *piece, size_t len_bytes, int heap, struct k3_ids *out)
{
    return heap || len_bytes > FLAT_BYTES ? merge_heap(r, piece, len_bytes, out)
                                          : merge_flat(r, piece, len_bytes, out);
}

int k3_bpe_encode(const struct k3_ranks *r, const char *piece, size_t len_bytes, struct k3_ids *out)
{
    uint32_t id = k3_ranks_find(r, piece, len_bytes);

    return id != K3_NO_RANK ? k3_ids_push(out, id) : k3_bpe_merge(r, piece, len_bytes, 0, out);
}
