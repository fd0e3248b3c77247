/* tests/unit/pass_world.h: a model in a temporary directory (or any directory) and passes over it,
 * for pass tests. */
#ifndef K3_TESTS_PASS_WORLD_H
#define K3_TESTS_PASS_WORLD_H

#include "k3-computed/pass.h"
#include "tests/unit/file_source.h"
#include "tools/mkmodel.h"

struct k3_world {
    char dir[64];
    char parent[32]; /* of a made model: removed at close, with all below */
    struct k3_model *m;
};
/* All end the program with words when something fails. */
void k3_world_make(struct k3_world *w, const struct k3_mk_opts *opts);
void k3_world_formula(struct k3_world *w); /* the model of spec/model.md 8.2 */
void k3_world_open(struct k3_world *w, const char *dir);
void k3_world_close(struct k3_world *w);

struct k3_world_opts { /* zeros: one thread, plain C, 1 MiB blocks, 64 rows */
    uint32_t threads;
    const char *kernels;
    uint64_t block_bytes;
    uint32_t max_rows;
};
struct k3_runner {
    struct k3_world *w;
    struct k3_file_source *file;
    struct k3_team *team;
    struct k3_pass *pass;
};
/* false: this CPU lacks the kernels. */
bool k3_runner_open(struct k3_runner *r, struct k3_world *w, struct k3_world_opts o);
void k3_runner_close(struct k3_runner *r);
/* One pass; ends the program when it fails. */
void k3_runner_run(struct k3_runner *r, const struct k3_row *rows, uint32_t n, float *logits,
                   const struct k3_pass_hooks *hooks);
/* ids appended to one sequence in passes of `at_once` rows; logits of every row. */
void k3_runner_feed(struct k3_runner *r, struct k3_state *s, const uint32_t *ids, uint32_t n,
                    uint32_t at_once, float *logits, const struct k3_pass_hooks *hooks);
struct k3_state *k3_world_state(struct k3_world *w, uint32_t ctx);
uint32_t k3_world_argmax(const float *logits, uint32_t n);

#endif
