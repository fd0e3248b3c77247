/* k3-computed/shm_source.h: the weights of the program: trunk rows from the stream of k3-trunkd, experts from the slots
 * of k3-expertd, embedding rows from the file.  Implements k3-computed/source.h.
 *
 * Used by one thread.  The meter and the stop flag may be looked at and set by any.
 *
 * Seek.  After a failed or cancelled pass the stream has to begin anew.  That is done before the first row block of the
 * next pass and not at once: the stop flag that cancelled the pass would cancel the seek too, and a trunkd that ran ahead
 * over a file that cannot be read would fail the next pass with an error that may be mended by then. */
#ifndef K3_COMPUTED_SHM_SOURCE_H
#define K3_COMPUTED_SHM_SOURCE_H

#include "k3-computed/engine.h"
#include "k3-computed/source.h"
#include "shm/expert.h"
#include "shm/trunk.h"

struct k3_shm_source_opts {
    const struct k3_model *m;
    const char *instance, *rundir;
    uint32_t generation;    /* of computed */
    _Atomic bool *stop;     /* ends every wait with -ECANCELED */
    struct k3_meter *meter;
    k3_trunk_notice_fn *notice; /* a death of trunkd and its return, on the thread that runs passes */
    void *notice_arg;
};

struct k3_shm_source;
/* Opens the embedding; attaches to nobody yet. */
int k3_shm_source_open(struct k3_shm_source **out, const struct k3_shm_source_opts *opts, struct k3_err *err);
void k3_shm_source_close(struct k3_shm_source *s);
/* Each waits at most timeout_ns and may be repeated after exit status 3 (no peer).  A model without MoE layers needs no
 * expertd. */
int k3_shm_source_attach_trunk(struct k3_shm_source *s, uint64_t timeout_ns, struct k3_err *err);
int k3_shm_source_attach_expert(struct k3_shm_source *s, uint64_t timeout_ns, struct k3_err *err);
/* Waits for the resident tensors and seeks to the first pass. */
int k3_shm_source_begin(struct k3_shm_source *s, struct k3_err *err);

struct k3_source *k3_shm_source_get(struct k3_shm_source *s);
const struct k3_layout *k3_shm_source_layout(const struct k3_shm_source *s);
uint32_t k3_shm_source_slots(const struct k3_shm_source *s);
struct k3_shm_counts {
    struct k3_trunk_reader_counts trunk;
    struct k3_expert_client_counts expert;
};
void k3_shm_source_counts(const struct k3_shm_source *s, struct k3_shm_counts *out);

/* Embedding rows (embed.c). */
struct k3_embed;
int k3_embed_open(struct k3_embed **out, const struct k3_model *m, struct k3_err *err);
void k3_embed_close(struct k3_embed *e);
/* hidden floats.  A row that cannot be read: -EIO, exit 4, naming file, offset and errno. */
int k3_embed_row(struct k3_embed *e, uint32_t token, float *out, struct k3_err *err);

#endif
