/* tokenize_probe [--special|--pieces] RANKS_FILE: reads JSON strings from stdin, one a line, and prints for each the ids as a
 * JSON array (or the pieces).  Compared with other tokenizers by tests/node. */
#include <unistd.h>

#include "text/file.h"
#include "k3-router/tokenizer.h"
#include "tests/unit/jsonl.h"

static int put_piece(void *arg, const char *piece, size_t len_bytes)
{
    struct k3_buf *b = arg;

    if (b->len_bytes > 1)
        k3_buf_puts(b, ",");
    return k3_buf_json(b, piece, len_bytes);
}

int main(int argc, char **argv)
{
    const char *mode = argc == 3 ? argv[1] : "", *name = argc == 3 ? argv[2] : argv[1];
    int special = strcmp(mode, "--special") == 0, pieces = strcmp(mode, "--pieces") == 0, rc;
    struct k3_buf ranks = { 0 }, text = { 0 }, out = { 0 };
    struct k3_tokenizer *t = NULL;
    struct k3_split *split = NULL;
    struct k3_err err = K3_ERR_INIT;
    struct k3_ids ids = { 0 };
    size_t cap = 0;
    char *line = NULL;

    if (argc < 2 || argc > 3 || (argc == 3 && !special && !pieces)) {
        fprintf(stderr, "usage: tokenize_probe [--special|--pieces] RANKS_FILE\n");
        return 2;
    }
    rc = k3_file_read(&ranks, name, 1u << 30, &err);
    if (rc == 0)
        rc = k3_tokenizer_parse(&t, ranks.bytes, ranks.len_bytes, name, NULL, 0, NULL, &err);
    if (rc == 0)
        rc = k3_split_open(&split, &err);
    while (rc == 0 && getline(&line, &cap, stdin) > 0) {
        jsonl_string(line, &text);
        ids.n = out.len_bytes = 0;
        if (pieces) {
            k3_buf_puts(&out, "[");
            rc = k3_split_pieces(split, text.bytes, text.len_bytes, put_piece, &out, &err);
            k3_buf_puts(&out, "]");
        } else {
            rc = special ? k3_tokenizer_encode_special(t, text.bytes, text.len_bytes, &ids, &err)
                         : k3_tokenizer_encode(t, text.bytes, text.len_bytes, &ids, &err);
            k3_buf_json_ids(&out, &ids);
        }
        if (rc == 0)
            printf("%.*s\n", (int)out.len_bytes, out.bytes);
    }
    if (rc < 0)
        fprintf(stderr, "tokenize_probe: %s\n", err.text);
    free(line);
    k3_buf_free(&ranks);
    k3_buf_free(&text);
    k3_buf_free(&out);
    k3_ids_free(&ids);
    k3_split_close(split);
    k3_tokenizer_close(t);
    return rc < 0 ? 2 : 0;
}
