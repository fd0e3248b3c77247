/* model/index*.c and scan.c: headers, shards on disk, the list of tensors, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "model/scan.h"
#include "tests/unit/model_files.h"

#define A64 "\"a\":{\"dtype\":\"F32\",\"shape\":[4,4],\"data_offsets\":[0,64]}"

/* Parses one header with 256 bytes of data behind it; the JSON is copied to its exact size for ASan. */
static int parse(const char *json, size_t n, struct k3_index **out, struct k3_err *err)
{
    struct k3_index *ix = k3_index_new();
    char *copy = malloc(n ? n : 1);
    int rc;

    memcpy(copy, json, n);
    rc = k3_index_parse_header(ix, 0, copy, n, 1000, 1256, err);
    if (rc == 0)
        rc = k3_index_sort(ix, err);
    free(copy);
    if (rc == 0 && out)
        *out = ix;
    else
        k3_index_close(ix);
    return rc;
}

static void refused(const char *json, const char *words)
{
    struct k3_err err = K3_ERR_INIT;

    if (parse(json, strlen(json), NULL, &err) == 0)
        fail_msg("accepted: %s", json);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_null(strchr(err.text, '\n'));
    if (!strstr(err.text, words))
        fail_msg("\"%s\" is not in: %s", words, err.text);
}

static void good_header(void **state)
{
    (void)state;
    static const char json[] =
        " { \"__metadata__\" : {\"format\":\"pt\",\"x\":{\"deep\":[1,2.5e-3,null,true,\"\\ud83d\\ude00\"]}},\n"
        "\"b\\u0041\\\\\\u00e9\":{\"data_offsets\":[64,72],\"other\":[{\"k\":[]},{}],\"shape\":[2,2],\"dtype\":\"BF16\"},"
        A64 ", \"empty\":{\"dtype\":\"U8\",\"shape\":[0,7],\"data_offsets\":[10,10]},"
        "\"scalar\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[72,74]},"
        "\"odd\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[80,90]},"
        "\"ids\":{\"dtype\":\"I64\",\"shape\":[1,1,1,1,1,2],\"data_offsets\":[96,112]}}   ";
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;
    const struct k3_tensor *t;

    if (parse(json, strlen(json), &ix, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(k3_index_n_tensors(ix), 6);
    t = k3_index_find(ix, "bA\\\xc3\xa9");
    assert_non_null(t);
    assert_int_equal(t->off_bytes, 1064);
    assert_int_equal(t->len_bytes, 8);
    assert_int_equal(t->dtype, K3_BF16);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->shape[1], 2);
    assert_string_equal(k3_index_name(ix, t), "bA\\\xc3\xa9");
    assert_int_equal(k3_index_find(ix, "scalar")->n_dims, 0);
    assert_int_equal(k3_index_find(ix, "odd")->dtype, K3_DTYPE_OTHER);
    assert_int_equal(k3_index_find(ix, "ids")->n_dims, 6);
    assert_null(k3_index_find(ix, "__metadata__"));
    assert_null(k3_index_find(ix, "nothing"));
    k3_index_close(ix);
    assert_int_equal(parse("{}", 2, &ix, &err), 0);
    assert_int_equal(k3_index_n_tensors(ix), 0);
    assert_null(k3_index_find(ix, "a"));
    k3_index_close(ix);
}

static void bad_headers(void **state)
{
    (void)state;
    static const struct { const char *json, *words; } cases[] = {
        { "", "not a safetensors header" },
        { "[]", "not a safetensors header" },
        { "{", "not a safetensors header" },
        { "{" A64, "not a safetensors header" },
        { "{" A64 ",}", "not a safetensors header" },
        { "{" A64 "}x", "not a safetensors header" },
        { "{" A64 " " A64 "}", "not a safetensors header" },
        { "{\"a\":1}", "tensor a is followed by" },
        { "{\"a\\u0000b\":{}}", "not a safetensors header" },
        { "{\"a\\ud800\":{}}", "not a safetensors header" },
        { "{\"a\\x\":{}}", "not a safetensors header" },
        { "{\"a\nb\":{}}", "not a safetensors header" },
        { "{\"a\":{}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4]}}", "tensor a needs dtype, shape and data_offsets" },
        { "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", "tensor a" },
        { "{\"a\":{\"dtype\":3,\"shape\":[4],\"data_offsets\":[0,16]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4.0],\"data_offsets\":[0,16]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[04],\"data_offsets\":[0,16]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16,32]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,18446744073709551616]}}", "tensor a" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296],\"data_offsets\":[0,16]}}", "shape that is too large" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967295,4294967295,4294967295],\"data_offsets\":[0,16]}}",
          "shape that is too large" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967295,4294967295],\"data_offsets\":[0,16]}}", "tensor a has 16 bytes" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,12]}}",
          "tensor a has 12 bytes, but its shape and dtype need 4 elements of 4" },
        { "{\"a\":{\"dtype\":\"I64\",\"shape\":[4],\"data_offsets\":[0,16]}}", "tensor a has 16 bytes" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]}}", "tensor a has data_offsets [16, 0]" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[241,257]}}", "[241, 257], but the file has 256 bytes" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[18446744073709551614,18446744073709551615]}}",
          "but the file has 256 bytes" },
        { "{" A64 ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[63,67]}}", "tensors a and b overlap" },
        { "{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[100,104]}," A64
          ",\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[5,6]}}", "tensors a and c overlap" },
        { "{" A64 "," A64 "}", "tensors a and a overlap" },
        { "{" A64 ",\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[64,68]}}", "tensor a occurs twice" },
        { "{" A64 ",\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[64,68]}}", "tensor a occurs twice" },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        refused(cases[i].json, cases[i].words);
}

static void long_and_deep(void **state)
{
    (void)state;
    char json[4000], deep[400];
    struct k3_err err = K3_ERR_INIT;

    snprintf(json, sizeof(json), "{\"%0*d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1023, 0);
    assert_int_equal(parse(json, strlen(json), NULL, &err), 0);
    snprintf(json, sizeof(json), "{\"%0*d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1024, 0);
    refused(json, "name of more than 1023 bytes");
    for (int depth = 64; depth <= 65; depth++) {
        memset(deep, '[', (size_t)depth);
        memset(deep + depth, ']', (size_t)depth);
        deep[2 * depth] = '\0';
        snprintf(json, sizeof(json), "{\"__metadata__\":%s}", deep);
        assert_int_equal(parse(json, strlen(json), NULL, &err) == 0, depth == 64);
    }
}

static void every_cut_is_refused(void **state)
{
    (void)state;
    static const char json[] = "{\"__metadata__\":{\"a\":[1,{\"b\":null}]}," A64 "}";

    for (size_t n = 0; n < strlen(json); n++) {
        struct k3_err err = K3_ERR_INIT;

        assert_int_not_equal(parse(json, n, NULL, &err), 0);
        assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    }
}

static void window_does_not_matter(void **state)
{
    (void)state;
    static const char json[] = " {\"weight\\u005fmap\" : [ 12345678901, \"\\u00e4\\\"x\", {\"k\" : [true,false,null,-1.5e+3]} ] } ";
    char dir[64], path[128], window[64], text[64];

    k3_test_dir(dir);
    k3_test_put_text(dir, "x", json);
    snprintf(path, sizeof(path), "%s/x", dir);
    for (size_t n = 1; n <= sizeof(window); n++) {
        int fd = open(path, O_RDONLY);
        struct k3_scan s;
        uint64_t v;

        k3_scan_fd(&s, fd, window, n);
        assert_int_equal(k3_scan_want(&s, '{'), 0);
        assert_int_equal(k3_scan_string(&s, text, sizeof(text), NULL), 0);
        assert_string_equal(text, "weight_map");
        assert_int_equal(k3_scan_want(&s, ':'), 0);
        assert_int_equal(k3_scan_want(&s, '['), 0);
        assert_int_equal(k3_scan_u64(&s, &v), 0);
        assert_int_equal(v, 12345678901);
        assert_int_equal(k3_scan_want(&s, ','), 0);
        assert_int_equal(k3_scan_string(&s, text, sizeof(text), NULL), 0);
        assert_string_equal(text, "\xc3\xa4\"x");
        assert_int_equal(k3_scan_want(&s, ','), 0);
        assert_int_equal(k3_scan_skip(&s), 0);
        assert_int_equal(k3_scan_want(&s, ']'), 0);
        assert_int_equal(k3_scan_want(&s, '}'), 0);
        assert_int_equal(k3_scan_peek(&s), -1);
        assert_int_equal(k3_scan_at(&s), strlen(json));
        close(fd);
    }
    k3_test_dir_remove(dir);
}

/* ---- shards on disk ---- */

static int open_dir(const char *dir, struct k3_index **out, struct k3_err *err)
{
    return k3_index_open(out, &dir, 1, err);
}

static void dir_refused(const char *dir, const char *words, const char *words2)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;

    if (open_dir(dir, &ix, &err) == 0)
        fail_msg("was opened, should say: %s", words);
    assert_null(ix);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, words) || !strstr(err.text, words2))
        fail_msg("\"%s\" or \"%s\" is not in: %s", words, words2, err.text);
}

static void broken_shards(void **state)
{
    (void)state;
    uint64_t lengths[] = { 1ull << 63, UINT64_MAX, UINT64_MAX - 7, 200u << 20, 1000, 57 };
    char dir[64], *whole;
    size_t n;

    k3_test_dir(dir);
    dir_refused(dir, "no *.safetensors file in", dir);
    dir_refused("/tmp/k3-no-such-directory", "/tmp/k3-no-such-directory", "No such file");
    k3_test_put(dir, "a.safetensors", "", 0);
    dir_refused(dir, "a.safetensors has 0 bytes", "at least 8");
    k3_test_put(dir, "a.safetensors", "1234567", 7);
    dir_refused(dir, "a.safetensors has 7 bytes", "at least 8");
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char file[64] = { 0 }, words[64];

        memcpy(file, &lengths[i], 8);
        k3_test_put(dir, "a.safetensors", file, sizeof(file));
        snprintf(words, sizeof(words), "header length %llu", (unsigned long long)lengths[i]);
        dir_refused(dir, words, "beyond the file, which has 64 bytes");
    }
    k3_test_put_shard(dir, "a.safetensors", "{\"a\":{\"dtype\":\"U8\",\"shape\":[9000],\"data_offsets\":[0,9000]}}", 9000);
    whole = k3_test_get(dir, "a.safetensors", &n);
    for (size_t cut = 1; cut < n; cut = cut == 1 ? 4096 : cut == 4096 ? n / 2 : n) {
        k3_test_put(dir, "a.safetensors", whole, n - cut);
        dir_refused(dir, "tensor a has data_offsets [0, 9000]", "truncated?");
    }
    k3_test_put(dir, "a.safetensors", whole, 30);
    dir_refused(dir, "header length 64 is beyond the file, which has 30 bytes", "a.safetensors");
    k3_test_put(dir, "a.safetensors", whole, n);
    k3_test_put_shard(dir, "b.safetensors", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    dir_refused(dir, "tensor a occurs twice: in ", "b.safetensors");
    free(whole);
    k3_test_dir_remove(dir);
}

static void not_a_file(void **state)
{
    (void)state;
    char dir[64], path[128];

    k3_test_dir(dir);
    snprintf(path, sizeof(path), "%s/x.safetensors", dir);
    assert_int_equal(mkdir(path, 0700), 0);
    dir_refused(dir, "x.safetensors is not a regular file", dir);
    rmdir(path);
    assert_int_equal(symlink("/nowhere/at/all", path), 0);
    dir_refused(dir, "x.safetensors", "No such file");
    unlink(path);
    k3_test_put_shard(dir, "a.safetensors", "{\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 8);
    snprintf(path, sizeof(path), "%s/model.safetensors.index.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20); /* a FIFO must not be waited for */
    dir_refused(dir, "model.safetensors.index.json is not a regular file", dir);
    alarm(0);
    k3_test_dir_remove(dir);
}

#define HEAD(name, n) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[" #n "],\"data_offsets\":[0," #n "]}}"

static void several_directories(void **state)
{
    (void)state;
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;
    const struct k3_file *f;
    char fast[64], other[64], model[64], path[128], command[256];

    k3_test_dir(fast);
    k3_test_dir(other);
    k3_test_dir(model);
    k3_test_put_shard(fast, "b.safetensors", HEAD("x", 8), 8);
    k3_test_put_shard(other, "b.safetensors", HEAD("x", 8), 8);
    k3_test_put_shard(model, "b.safetensors", HEAD("x", 8), 8);
    k3_test_put_shard(model, "a.safetensors", HEAD("y", 8), 8);
    k3_test_put_text(model, "notes.txt", "not a shard");
    if (k3_index_open(&ix, (const char *const[]){ fast, other, model }, 3, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(k3_index_n_files(ix), 2);
    assert_string_equal(k3_index_base_name(k3_index_file(ix, 0)->path), "a.safetensors");
    assert_int_equal(k3_index_file(ix, 0)->n_copies, 0);
    assert_int_equal(k3_index_find(ix, "x")->file, 1);
    assert_int_equal(k3_index_find(ix, "y")->file, 0);
    f = k3_index_file(ix, 1); /* in both devices; the model directory is not one */
    snprintf(path, sizeof(path), "%s/b.safetensors", fast);
    assert_string_equal(f->path, path);
    assert_int_equal(f->n_copies, 1);
    snprintf(path, sizeof(path), "%s/b.safetensors", other);
    assert_string_equal(f->copies[0], path);
    k3_index_close(ix);
    /* The model directory named as a device, too. */
    assert_int_equal(k3_index_open(&ix, (const char *const[]){ fast, model, model }, 3, &err), 0);
    assert_int_equal(k3_index_n_files(ix), 2);
    assert_int_equal(k3_index_file(ix, 0)->n_copies, 0);
    assert_int_equal(k3_index_file(ix, 1)->n_copies, 1);
    k3_index_close(ix);
    /* A link to the same file is no second drive. */
    snprintf(path, sizeof(path), "%s/b.safetensors", other);
    assert_int_equal(unlink(path), 0);
    snprintf(command, sizeof(command), "ln -s %s/b.safetensors %s/", fast, other);
    assert_int_equal(system(command), 0);
    assert_int_equal(k3_index_open(&ix, (const char *const[]){ fast, other, model }, 3, &err), 0);
    assert_int_equal(k3_index_file(ix, 1)->n_copies, 0);
    k3_index_close(ix);
    k3_test_dir_remove(fast);
    k3_test_dir_remove(other);
    k3_test_dir_remove(model);
}

static void devices_refused(const char *a, const char *b, const char *model, const char *text, const char *also)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;

    assert_true(k3_index_open(&ix, (const char *const[]){ a, b, model }, 3, &err) < 0);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    if (!strstr(err.text, text) || !strstr(err.text, also) || strchr(err.text, '\n'))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", err.text, text, also);
}

static void devices_that_cannot_be(void **state)
{
    (void)state;
    char one[64], two[64], model[64], link[80], command[256];

    k3_test_dir(one);
    k3_test_dir(two);
    k3_test_dir(model);
    k3_test_put_shard(model, "b.safetensors", HEAD("x", 8), 8);
    k3_test_put_shard(one, "b.safetensors", HEAD("x", 8), 8);
    devices_refused(one, two, model, two, "no *.safetensors"); /* nothing there */
    devices_refused(one, "/nonexistent", model, "device directory /nonexistent", "No such file");
    devices_refused(one, one, model, "are the same", one);
    snprintf(link, sizeof(link), "%s-link", one);
    snprintf(command, sizeof(command), "ln -s %s %s", one, link);
    assert_int_equal(system(command), 0);
    devices_refused(one, link, model, "are the same", link);
    unlink(link);
    k3_test_put_shard(two, "b.safetensors", HEAD("x", 9), 9); /* another size */
    devices_refused(one, two, model, one, two);
    devices_refused(one, two, model, "/b.safetensors has", "must be the same");
    k3_test_put_shard(two, "b.safetensors", HEAD("z", 8), 8); /* another header */
    devices_refused(one, two, model, "different headers", two);
    k3_test_put_shard(two, "b.safetensors", HEAD("x", 8), 8);
    k3_test_put_shard(model, "b.safetensors", HEAD("z", 8), 8); /* a device with what the model was once */
    devices_refused(one, two, model, "different headers", model);
    k3_test_dir_remove(one);
    k3_test_dir_remove(two);
    k3_test_dir_remove(model);
}

static void list_of_tensors(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_formula();
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;
    char dir[64], path[128], a[192], b[192], name[64], *list, *bad;

    k3_test_dir(dir);
    k3_test_make(&o, dir, "m", path);
    assert_int_equal(open_dir(path, &ix, &err), 0);
    assert_true(k3_index_listed_in(ix, "language_model.lm_head.weight", name, sizeof(name)));
    assert_string_equal(name, "model-00009-of-000009.safetensors");
    assert_false(k3_index_listed_in(ix, "nothing", name, sizeof(name)));
    k3_index_close(ix);

    /* two shards exchanged */
    snprintf(a, sizeof(a), "%s/model-00002-of-000009.safetensors", path);
    snprintf(b, sizeof(b), "%s/model-00003-of-000009.safetensors", path);
    assert_int_equal(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE), 0);
    dir_refused(path, "tensor language_model.model.layers.1.", "puts it in model-00002-of-000009.safetensors");
    assert_int_equal(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE), 0);

    /* a shard that is not here is no fault of the list */
    assert_int_equal(unlink(a), 0);
    ix = NULL;
    assert_int_equal(open_dir(path, &ix, &err), 0);
    assert_int_equal(k3_index_n_files(ix), 8);
    k3_index_close(ix);

    list = k3_test_get(path, "model.safetensors.index.json", NULL);
    bad = k3_test_replace(list, "layers.3.input_layernorm", "layers.3.input_norm");
    k3_test_put_text(path, "model.safetensors.index.json", bad);
    dir_refused(path, "has no tensor language_model.model.layers.3.input_norm", "puts it there");
    free(bad);
    list[strlen(list) / 2] = '\0';
    k3_test_put_text(path, "model.safetensors.index.json", list);
    dir_refused(path, "model.safetensors.index.json is not a list of tensors", "weight_map");
    k3_test_put_text(path, "model.safetensors.index.json", "{\"weight_map\":{\"a\":7}}");
    dir_refused(path, "is not a list of tensors at byte", "weight_map");
    free(list);
    k3_test_dir_remove(dir);
}

/* The pages that reading a header leaves in the page cache. */
static void no_page_cache(void **state)
{
    (void)state;
    struct k3_mk_opts o = k3_test_small();
    struct k3_err err = K3_ERR_INIT;
    struct k3_index *ix = NULL;
    char dir[64], path[128], file[192];
    unsigned char in_core[64] = { 0 };
    struct statfs fs;
    void *map;
    int fd, n = 0;

    k3_test_dir(dir);
    if (statfs(dir, &fs) < 0 || fs.f_type == 0x01021994 /* tmpfs: the page cache is the file */) {
        k3_test_dir_remove(dir);
        skip();
    }
    o.n_shards = 1;
    k3_test_make(&o, dir, "m", path);
    snprintf(file, sizeof(file), "%s/model-00001-of-000001.safetensors", path);
    fd = open(file, O_RDONLY);
    assert_int_equal(fsync(fd), 0);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    assert_int_equal(open_dir(path, &ix, &err), 0);
    k3_index_close(ix);
    map = mmap(NULL, sizeof(in_core) * 4096, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mincore(map, sizeof(in_core) * 4096, in_core), 0);
    for (size_t i = 0; i < sizeof(in_core); i++)
        n += in_core[i] & 1;
    munmap(map, sizeof(in_core) * 4096);
    close(fd);
    k3_test_dir_remove(dir);
    assert_int_equal(n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_header),
        cmocka_unit_test(bad_headers),
        cmocka_unit_test(long_and_deep),
        cmocka_unit_test(every_cut_is_refused),
        cmocka_unit_test(window_does_not_matter),
        cmocka_unit_test(broken_shards),
        cmocka_unit_test(not_a_file),
        cmocka_unit_test(several_directories),
        cmocka_unit_test(devices_that_cannot_be),
        cmocka_unit_test(list_of_tensors),
        cmocka_unit_test(no_page_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
