/* ipc/parse.h: strict numbers and sizes, and the option table of every program. */
#ifndef K3_IPC_PARSE_H
#define K3_IPC_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

/* Whole string must be used.  -EINVAL, -ERANGE; no words. */
int k3_parse_u64(const char *text, uint64_t min, uint64_t max, uint64_t *out);
int k3_parse_double(const char *text, double min, double max, double *out); /* finite only */
/* "8G", "512M", "64K", "123": suffixes are powers of 1024.  With a suffix also "1.3G", to nine decimals; part of a byte is
 * left out. */
int k3_parse_size(const char *text, uint64_t *out_bytes);
/* The other way, for people: "1.56 GB", "43.7 MB", "4.2 kB", "512 bytes" (powers of 1000).  Returns out. */
#define K3_SIZE_TEXT 24
const char *k3_size_text(char out[K3_SIZE_TEXT], uint64_t bytes);
/* "55,296".  Returns out. */
#define K3_GROUPED_TEXT 32
const char *k3_grouped_text(char out[K3_GROUPED_TEXT], uint64_t n);

enum k3_opt_kind {
    K3_OPT_FLAG,   /* bool *       --name                                  */
    K3_OPT_STRING, /* const char **  last one wins                          */
    K3_OPT_LIST,   /* struct k3_str_list *  repeatable                       */
    K3_OPT_U32,    /* uint32_t *   within min..max                          */
    K3_OPT_U64,    /* uint64_t *   within min..max                          */
    K3_OPT_DOUBLE, /* double *     within min..max                          */
    K3_OPT_SIZE,   /* uint64_t *   bytes, suffix K M G; "1.5M"               */
    K3_OPT_GB,     /* uint64_t *   bytes, given in 10^9 bytes ("2.5")        */
};
struct k3_str_list {
    const char *item[64];
    size_t n;
    const char *name; /* of operands, in --help: "TRACE"; NULL: not said */
};
struct k3_opt {
    const char *name; /* without "--"; NULL ends the table */
    enum k3_opt_kind kind;
    void *to;
    const char *arg;  /* shown in --help: "DIR", "N" */
    const char *help;
    double min, max;  /* numbers only; max 0 = no limit */
};
/* Parses argv, after filling closed standard descriptors, so: before any file is opened.  Handles --help (to stdout) and
 * --version.  "--name value" and "--name=value".  Operands are allowed only when operands is not NULL.  program: as it is
 * called, "k3-bench io" for a part.  Returns true when the program should end now with *status (help: 0; bad usage: 2,
 * one line on stderr). */
bool k3_opts_parse(const struct k3_opt *table, const char *program, const char *summary, int argc, char **argv,
                   struct k3_str_list *operands, int *status);

#endif
