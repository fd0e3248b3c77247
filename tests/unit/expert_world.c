#include "expert_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "model/names.h"

#define KEEP_MAX 64

uint64_t k3_xw_random(struct k3_xw *w, uint64_t below)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random % below;
}

/* ---- the checkpoint ---- */

struct out_tensor {
    char name[K3_NAME_BYTES];
    const char *dtype;
    uint32_t shape[K3_MAX_DIMS], n_dims;
    uint64_t len_bytes;
    const uint8_t *bytes; /* NULL: zeros */
    size_t place;         /* SIZE_MAX: none to note */
};
struct out_list { struct out_tensor *at; size_t n, cap; };

static struct out_tensor *add(struct out_list *l, const char *dtype, uint32_t width, const uint32_t *shape, uint32_t n)
{
    struct out_tensor *t;

    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 256;
        l->at = realloc(l->at, l->cap * sizeof(*l->at));
        assert_non_null(l->at);
    }
    t = &l->at[l->n++];
    *t = (struct out_tensor){ .dtype = dtype, .n_dims = n, .len_bytes = width, .place = SIZE_MAX };
    for (uint32_t i = 0; i < n; i++) {
        t->shape[i] = shape[i];
        t->len_bytes *= shape[i];
    }
    return t;
}

void k3_xw_shard_path(const struct k3_xw *w, uint32_t file, char *out, size_t len)
{
    snprintf(out, len, "%s/model-%05u-of-%06u.safetensors", w->dir[file % 2], file + 1, w->shape.n_files + 1);
}

static void write_all(FILE *f, const void *data, size_t len)
{
    assert_int_equal(fwrite(data, 1, len, f), len);
}

/* A gap of odd length now and then: offsets of all alignments. */
static void write_shard(struct k3_xw *w, uint32_t file, const struct out_list *l)
{
    static const uint8_t zeros[4096];
    char path[160], *head = NULL;
    size_t head_len = 0;
    FILE *h = open_memstream(&head, &head_len), *f;
    uint64_t at = 0, n;

    k3_xw_shard_path(w, file, path, sizeof(path));
    fputc('{', h);
    for (size_t i = 0; i < l->n; i++) {
        struct out_tensor *t = &l->at[i];

        fprintf(h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "", t->name, t->dtype);
        for (uint32_t d = 0; d < t->n_dims; d++)
            fprintf(h, "%s%u", d ? "," : "", t->shape[d]);
        fprintf(h, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", at, at + t->len_bytes);
        at += t->len_bytes;
    }
    fputc('}', h);
    while (ftell(h) % 8)
        fputc(' ', h);
    fclose(h);
    n = head_len;
    f = fopen(path, "w");
    assert_non_null(f);
    write_all(f, &n, sizeof(n));
    write_all(f, head, head_len);
    free(head);
    at = 8 + n;
    for (size_t i = 0; i < l->n; i++) {
        struct out_tensor *t = &l->at[i];

        if (t->place != SIZE_MAX) {
            w->place[t->place].file = file;
            w->place[t->place].off_bytes = at;
        }
        if (t->bytes)
            write_all(f, t->bytes, t->len_bytes);
        for (uint64_t left = t->bytes ? 0 : t->len_bytes; left; left -= left < 4096 ? left : 4096)
            write_all(f, zeros, left < 4096 ? left : 4096);
        at += t->len_bytes;
    }
    assert_int_equal(fclose(f), 0);
}

static void write_config(struct k3_xw *w)
{
    const struct k3_xw_shape *s = &w->shape;
    char path[160];
    FILE *f;

    snprintf(path, sizeof(path), "%s/config.json", w->dir[0]);
    f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"hidden_size\":32,\"num_hidden_layers\":%u,\"vocab_size\":64,\"rms_norm_eps\":1e-05,"
               "\"tie_word_embeddings\":false,\"num_attention_heads\":2,\"q_lora_rank\":16,\"kv_lora_rank\":16,"
               "\"qk_nope_head_dim\":12,\"qk_rope_head_dim\":4,\"v_head_dim\":10,\"mla_use_output_gate\":true,"
               "\"num_experts\":%u,\"num_experts_per_token\":%u,\"num_shared_experts\":2,"
               "\"routed_expert_hidden_size\":%u,\"moe_intermediate_size\":%u,\"routed_scaling_factor\":1.0,"
               "\"moe_renormalize\":true,\"latent_moe_use_norm\":true,\"first_k_dense_replace\":%u,"
               "\"intermediate_size\":64,\"attn_res_block_size\":3,\"kda_num_heads\":2,\"kda_head_dim\":16,"
               "\"short_conv_kernel_size\":4,\"gate_lower_bound\":-5.0,\"full_attn_layers\":[2],"
               "\"situ_beta\":4.0,\"situ_linear_beta\":25.0}\n",
            s->n_layers, s->n_experts, s->top_k, s->latent, s->inner, K3_XW_DENSE);
    assert_int_equal(fclose(f), 0);
}

static void add_trunk(struct out_list *l, const struct k3_config *c)
{
    for (int layer = -1; layer < (int)c->n_layers; layer++) {
        for (uint32_t r = 0; r < K3_N_ROLES; r++) {
            uint32_t shape[2];

            if (!k3_names_has_matrix(c, layer, r))
                continue;
            k3_names_matrix_shape(c, r, &shape[0], &shape[1]);
            k3_names_matrix(add(l, "BF16", 2, shape, 2)->name, layer, r);
        }
        for (uint32_t r = 0; r < K3_N_RESIDENT_ROLES; r++) {
            uint32_t shape[K3_MAX_DIMS], n;

            if (!k3_names_has_resident(c, layer, r))
                continue;
            n = k3_names_resident_shape(c, r, shape);
            k3_names_resident(add(l, "F32", 4, shape, n)->name, layer, r);
        }
    }
    strcpy(add(l, "BF16", 2, (uint32_t[]){ c->vocab, c->hidden }, 2)->name, K3_EMBED_NAME);
}

static void add_experts(struct k3_xw *w, struct out_list *shard, const struct k3_config *c)
{
    uint8_t *bytes = w->bytes;
    size_t n = 0;

    for (uint32_t layer = K3_XW_DENSE; layer < c->n_layers; layer++)
        for (uint32_t e = 0; e < c->n_experts; e++) {
            uint32_t file = (uint32_t)k3_xw_random(w, w->shape.n_files);

            for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
                struct out_tensor *o;
                uint32_t shape[2];

                if (w->shape.scattered)
                    file = (uint32_t)k3_xw_random(w, w->shape.n_files);
                k3_names_expert_shape(c, t, &shape[0], &shape[1]);
                o = add(&shard[file], "U8", 1, shape, 2);
                k3_names_expert(o->name, (int)layer, e, t);
                o->bytes = bytes;
                o->place = n++;
                bytes += o->len_bytes;
            }
        }
}

/* Whole experts (or, when scattered, tensors) in random order. */
static void shuffle(struct k3_xw *w, struct out_list *l)
{
    size_t unit = w->shape.scattered ? 1 : K3_EXPERT_TENSORS;

    for (size_t i = l->n / unit; i > 1; i--) {
        size_t j = k3_xw_random(w, i);

        for (size_t k = 0; k < unit; k++) {
            struct out_tensor swap = l->at[(i - 1) * unit + k];

            l->at[(i - 1) * unit + k] = l->at[j * unit + k];
            l->at[j * unit + k] = swap;
        }
    }
}

static void write_checkpoint(struct k3_xw *w)
{
    uint32_t n_files = w->shape.n_files;
    struct out_list *shard = calloc(n_files + 1, sizeof(*shard));
    struct k3_err err = K3_ERR_INIT;
    struct k3_config c;
    size_t n_all;

    assert_non_null(shard);
    write_config(w);
    if (k3_config_read(&c, w->dir[0], 0, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        uint32_t n_rows, n_cols;

        k3_names_expert_shape(&c, t, &n_rows, &n_cols);
        w->len_bytes[t] = (uint64_t)n_rows * n_cols;
        w->expert_bytes += w->len_bytes[t];
    }
    n_all = (size_t)(c.n_layers - K3_XW_DENSE) * c.n_experts;
    w->bytes = malloc(n_all * w->expert_bytes + 8);
    w->place = calloc(n_all * K3_EXPERT_TENSORS + 1, sizeof(*w->place));
    assert_true(w->bytes && w->place);
    for (size_t i = 0; i < n_all * w->expert_bytes; i += 8) {
        uint64_t r = k3_xw_random(w, UINT64_MAX);

        memcpy(w->bytes + i, &r, 8);
    }
    add_experts(w, shard, &c);
    for (uint32_t i = 0; i < n_files; i++)
        shuffle(w, &shard[i]);
    add_trunk(&shard[n_files], &c);
    for (uint32_t i = 0; i <= n_files; i++) {
        write_shard(w, i, &shard[i]);
        free(shard[i].at);
    }
    free(shard);
}

/* A test that fails leaves its world open; its daemon and files go with the program. */
#define WORLDS_MAX 64
static struct k3_xw left_open[WORLDS_MAX];

static struct k3_xw *noted(const char *instance)
{
    for (int i = 0; i < WORLDS_MAX; i++)
        if (strcmp(left_open[i].instance, instance) == 0)
            return &left_open[i];
    return &left_open[0];
}

static void remove_all(struct k3_xw *w);

static void close_the_rest(void)
{
    for (int i = 0; i < WORLDS_MAX; i++)
        if (left_open[i].instance[0])
            remove_all(&left_open[i]);
}

void k3_xw_open(struct k3_xw *w, const struct k3_xw_shape *shape)
{
    static unsigned number;
    struct k3_err err = K3_ERR_INIT;

    if (number == 0)
        atexit(close_the_rest);
    *w = (struct k3_xw){ .shape = *shape, .random = 0x9e3779b97f4a7c15ull + shape->seed };
    for (int i = 0; i < 2; i++) {
        snprintf(w->dir[i], sizeof(w->dir[i]), "%s/k3-t-expert-XXXXXX",
                 i && shape->two_devices ? "/dev/shm" : "/tmp");
        assert_non_null(mkdtemp(w->dir[i]));
    }
    snprintf(w->instance, sizeof(w->instance), "t-expert-%d-%u", (int)getpid(), number++);
    snprintf(w->log, sizeof(w->log), "%s/log", w->dir[0]);
    if (k3_rundir(w->rundir, sizeof(w->rundir), w->instance, true, &err) < 0)
        fail_msg("%s", err.text);
    *noted("") = *w;
    write_checkpoint(w);
    struct k3_model_opts o = { .dirs = (const char *const[]){ w->dir[0], w->dir[1] }, .n_dirs = 2 };
    if (k3_model_open(&w->m, &o, &err) < 0)
        fail_msg("%s", err.text);
}

static void remove_tree(const char *dir)
{
    pid_t pid = fork();

    if (pid == 0) {
        execlp("rm", "rm", "-rf", "--", dir, (char *)NULL);
        _exit(127);
    }
    waitpid(pid, NULL, 0);
}

static void remove_all(struct k3_xw *w)
{
    if (w->daemon > 0) {
        kill(w->daemon, SIGKILL);
        waitpid(w->daemon, NULL, 0);
    }
    k3_seg_unlink(w->instance, "expert");
    k3_seg_unlink(w->instance, "expertdata");
    k3_seg_unlink(w->instance, "k3-expertd.stats");
    for (int i = 0; i < 2; i++)
        remove_tree(w->dir[i]);
    remove_tree(w->rundir);
}

void k3_xw_close(struct k3_xw *w)
{
    remove_all(w);
    *noted(w->instance) = (struct k3_xw){ 0 };
    k3_model_close(w->m);
    free(w->bytes);
    free(w->place);
}

/* ---- the daemon ---- */

static void program_path(char *out, size_t len)
{
    const char *bin = getenv("K3_BIN");
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (bin) {
        snprintf(out, len, "%s/k3-expertd", bin);
        return;
    }
    assert_true(n > 0);
    self[n] = 0;
    for (int up = 0; up < 2; up++) /* build/V/unit/NAME */
        *strrchr(self, '/') = 0;
    if (strcmp(strrchr(self, '/'), "/release") == 0)
        snprintf(out, len, "%s/../../bin/k3-expertd", self);
    else
        snprintf(out, len, "%s/bin/k3-expertd", self);
}

void k3_xw_daemon_start(struct k3_xw *w, const char *const *options)
{
    const char *argv[32] = { "k3-expertd", "--model", w->dir[0], "--device", w->dir[1], "--instance", w->instance };
    char path[600];
    int n = 7;

    while (options && *options) {
        assert_true(n < 31);
        argv[n++] = *options++;
    }
    argv[n] = NULL;
    program_path(path, sizeof(path));
    w->daemon = fork();
    assert_true(w->daemon >= 0);
    if (w->daemon == 0) {
        int fd = open(w->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

        dup2(fd, 1);
        dup2(fd, 2);
        execv(path, (char **)(uintptr_t)argv);
        _exit(127);
    }
    noted(w->instance)->daemon = w->daemon;
}

void k3_xw_daemon_kill(struct k3_xw *w)
{
    if (w->daemon <= 1) /* 0 and -1 are everybody */
        return;
    kill(w->daemon, SIGKILL);
    waitpid(w->daemon, NULL, 0);
    noted(w->instance)->daemon = w->daemon = 0;
}

int k3_xw_daemon_stop(struct k3_xw *w)
{
    int status = 0;

    assert_true(w->daemon > 1);
    kill(w->daemon, SIGTERM);
    waitpid(w->daemon, &status, 0);
    noted(w->instance)->daemon = w->daemon = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

uint64_t k3_xw_stat(struct k3_xw *w, const char *name)
{
    struct k3_stats s;
    struct k3_err err = K3_ERR_INIT;
    uint64_t v;

    if (k3_stats_open(&s, w->instance, "k3-expertd", &err) < 0)
        fail_msg("stats page: %s", err.text);
    v = k3_stats_value(&s, name);
    k3_stats_close(&s);
    return v;
}

void k3_xw_stat_wait(struct k3_xw *w, const char *name, uint64_t value)
{
    for (int i = 0; i < 4000 && k3_xw_stat(w, name) != value; i++)
        nanosleep(&(struct timespec){ 0, 5000000 }, NULL);
    assert_int_equal(k3_xw_stat(w, name), value);
}

uint64_t k3_xw_log_sum(struct k3_xw *w, const char *key)
{
    FILE *f = fopen(w->log, "r");
    char line[2048], *at;
    uint64_t sum = 0;

    assert_non_null(f);
    while (fgets(line, sizeof(line), f))
        if ((at = strstr(line, key)))
            sum += strtoull(at + strlen(key), NULL, 10);
    fclose(f);
    return sum;
}

void k3_xw_log_wait(struct k3_xw *w, const char *text)
{
    char line[2048];

    for (int i = 0; i < 2000; i++) {
        FILE *f = fopen(w->log, "r");
        bool found = false;

        while (f && !found && fgets(line, sizeof(line), f))
            found = strstr(line, text) != NULL;
        if (f)
            fclose(f);
        if (found)
            return;
        nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    }
    fail_msg("\"%s\" did not appear in %s", text, w->log);
}

/* ---- the client ---- */

struct k3_expert_client *k3_xw_client(struct k3_xw *w)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_expert_client *c = NULL;

    if (k3_expert_client_open(&c, w->instance, w->rundir, w->m, ++w->generation, 20000000000ull, &err) < 0)
        fail_msg("%s", err.text);
    return c;
}

const char *k3_xw_cache(struct k3_xw *w, uint32_t n_slots, char *out, size_t len)
{
    snprintf(out, len, "%.12f", ((double)n_slots + 0.5) * (double)w->m->expert_slot_bytes / 1e9);
    return out;
}

void k3_xw_check_view(struct k3_xw *w, const struct k3_expert_view *v)
{
    const uint8_t *want = w->bytes + ((uint64_t)(v->layer - K3_XW_DENSE) * w->shape.n_experts + v->expert) *
                                         w->expert_bytes;

    for (uint32_t t = 0; t < K3_EXPERT_TENSORS; t++) {
        if (memcmp(v->tensor[t], want, w->len_bytes[t]) != 0)
            fail_msg("layer %u expert %u tensor %u in slot %u differs from the file", v->layer, v->expert, t, v->slot);
        want += w->len_bytes[t];
    }
}

void k3_xw_layer(struct k3_xw *w, struct k3_expert_client *c, uint32_t layer, const uint16_t *experts,
                   uint32_t n, uint32_t n_keep)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_expert_view view[KEEP_MAX];
    uint32_t first = 0;

    assert_true(n_keep >= 1 && n_keep <= KEEP_MAX);
    if (k3_expert_client_begin(c, layer, experts, n, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < n; i++) {
        struct k3_expert_view *v = &view[i % n_keep];

        if (i - first == n_keep) {
            k3_xw_check_view(w, &view[first % n_keep]); /* still, after all this time */
            k3_expert_client_release(c, &view[first++ % n_keep]);
        }
        if (k3_expert_client_next(c, v, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(v->layer, layer);
        assert_int_equal(v->expert, experts[i]);
        k3_xw_check_view(w, v);
    }
    while (first < n) {
        k3_xw_check_view(w, &view[first % n_keep]);
        k3_expert_client_release(c, &view[first++ % n_keep]);
    }
}

void k3_xw_pick(struct k3_xw *w, uint16_t *experts, uint32_t n)
{
    uint32_t got = 0, all = w->shape.n_experts;

    for (uint32_t e = 0; e < all && got < n; e++)
        if (k3_xw_random(w, all - e) < n - got)
            experts[got++] = (uint16_t)e;
}
