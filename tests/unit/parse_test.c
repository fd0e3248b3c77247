/* tests/unit/parse_test.c: ipc/parse.c. */
#include "ipc/parse.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void whole_numbers(void **state)
{
    static const char *const bad[] = {
        "", " 1", "1 ", "+1", "-1", "0x10", "1e3", "abc", "1.0", "1K"
    };
    uint64_t v = 99;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(k3_parse_u64(bad[i], 0, UINT64_MAX, &v), -EINVAL);
    assert_int_equal(v, 99);
    assert_int_equal(k3_parse_u64("18446744073709551616", 0, UINT64_MAX, &v), -ERANGE);
    assert_int_equal(k3_parse_u64("99999999999999999999999", 0, UINT64_MAX, &v), -ERANGE);
    assert_int_equal(k3_parse_u64("4", 5, 10, &v), -ERANGE);
    assert_int_equal(k3_parse_u64("11", 5, 10, &v), -ERANGE);
    assert_int_equal(k3_parse_u64("18446744073709551615", 0, UINT64_MAX, &v), 0);
    assert_true(v == UINT64_MAX);
    assert_int_equal(k3_parse_u64("007", 5, 10, &v), 0);
    assert_int_equal(v, 7);
}

static void real_numbers(void **state)
{
    static const char *const bad[] = { "",     "nan", "inf", "0x1p3", "1,5", "1.5 ",
                                       " 1.5", "1e",  "--1", "1.5.2", "e5" };
    double v = 99;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(k3_parse_double(bad[i], -1e9, 1e9, &v), -EINVAL);
    assert_int_equal(k3_parse_double("1e999", -1e300, 1e300, &v), -ERANGE);
    assert_int_equal(k3_parse_double("2.5", 0, 2, &v), -ERANGE);
    assert_true(v == 99);
    assert_int_equal(k3_parse_double("-2.5e-1", -1, 1, &v), 0);
    assert_true(v == -0.25);
}

static void sizes(void **state)
{
    static const char *const bad[] = {
        "", "K", "1KB", "1.5", "1.G", ".5G", "1.5.1G", "1,5G", "1.5e1G", "1.5GB", "1.0000000000G", "-1", "1 G", "8T", "0x1", "G1", "1GG"
    };
    uint64_t v = 99;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(k3_parse_size(bad[i], &v), -EINVAL);
    assert_int_equal(k3_parse_size("17179869184G", &v), -ERANGE);
    assert_int_equal(k3_parse_size("99999999999999999999999999999999999", &v), -ERANGE);
    assert_int_equal(v, 99);
    assert_int_equal(k3_parse_size("123", &v), 0);
    assert_int_equal(v, 123);
    assert_int_equal(k3_parse_size("64K", &v), 0);
    assert_int_equal(v, 65536);
    assert_int_equal(k3_parse_size("8g", &v), 0);
    assert_true(v == (uint64_t)8 << 30);
    assert_int_equal(k3_parse_size("17179869183G", &v), 0);
    assert_int_equal(k3_parse_size("1.3G", &v), 0);
    assert_true(v == 1395864371); /* .2, rounded down */
    assert_int_equal(k3_parse_size("0.25k", &v), 0);
    assert_int_equal(v, 256);
    assert_int_equal(k3_parse_size("1.50M", &v), 0);
    assert_int_equal(v, 3 << 19);
    assert_int_equal(k3_parse_size("0.999999999K", &v), 0);
    assert_int_equal(v, 1023);
    assert_int_equal(k3_parse_size("17179869183.999999999G", &v), 0);
    assert_true(v == UINT64_MAX - 1);
}

/* ---- option tables: run with stdout and stderr caught in files ---- */

struct values {
    bool flag;
    const char *text;
    struct k3_str_list list, operands;
    uint32_t u32;
    uint64_t u64, size, gb;
    double real;
};
static char out[4096], err[4096];

static void slurp(FILE *f, char *to, size_t len)
{
    size_t n;

    fflush(f);
    rewind(f);
    n = fread(to, 1, len - 1, f);
    to[n] = 0;
    fclose(f);
}

/* Parses a command line given as words with single blanks.  *ends: what k3_opts_parse returned. */
static int parse(struct values *v, bool with_operands, const char *line, bool *ends)
{
    static char copy[8192];
    static char *argv[512];
    const struct k3_opt table[] = {
        { "model", K3_OPT_STRING, &v->text, "DIR", "a text", 0, 0 },
        { "flag", K3_OPT_FLAG, &v->flag, NULL, "a flag", 0, 0 },
        { "device", K3_OPT_LIST, &v->list, "DIR", "a list", 0, 0 },
        { "ring-mb", K3_OPT_U32, &v->u32, "N", "a number", 2, 100 },
        { "seed", K3_OPT_U64, &v->u64, "N", "a number", 0, 0 },
        { "top-p", K3_OPT_DOUBLE, &v->real, "X", "a number", 0, 1 },
        { "io-block", K3_OPT_SIZE, &v->size, "SIZE", "a size", 4096, 0 },
        { "trunk-gb", K3_OPT_GB, &v->gb, "X", "a size", 0, 0 },
        { NULL },
    };
    int argc = 0, status = 99, old_out = dup(1), old_err = dup(2);
    FILE *fo = tmpfile(), *fe = tmpfile();

    memset(v, 0, sizeof(*v));
    snprintf(copy, sizeof(copy), "prog %s", line);
    for (char *p = strtok(copy, " "); p; p = strtok(NULL, " "))
        argv[argc++] = strcmp(p, "''") == 0 ? "" : p;
    argv[argc] = NULL;
    fflush(stdout);
    fflush(stderr);
    dup2(fileno(fo), 1);
    dup2(fileno(fe), 2);
    *ends = k3_opts_parse(table, "prog", "does things", argc, argv,
                          with_operands ? &v->operands : NULL, &status);
    fflush(stdout);
    fflush(stderr);
    dup2(old_out, 1);
    dup2(old_err, 2);
    close(old_out);
    close(old_err);
    slurp(fo, out, sizeof(out));
    slurp(fe, err, sizeof(err));
    return status;
}

static void good_options(void **state)
{
    struct values v;
    bool ends;

    (void)state;
    assert_int_equal(
        parse(&v, true,
              "--model a --flag --device x --device=y --ring-mb 100 --seed 18446744073709551615 "
              "--top-p=0.5 --io-block 4M --trunk-gb 2.5 word --model b -- --flag",
              &ends),
        0);
    assert_false(ends);
    assert_string_equal(v.text, "b");
    assert_true(v.flag);
    assert_int_equal(v.list.n, 2);
    assert_string_equal(v.list.item[1], "y");
    assert_int_equal(v.u32, 100);
    assert_true(v.u64 == UINT64_MAX);
    assert_true(v.real == 0.5);
    assert_int_equal(v.size, 4 << 20);
    assert_true(v.gb == 2500000000u);
    assert_int_equal(v.operands.n, 2);
    assert_string_equal(v.operands.item[0], "word");
    assert_string_equal(v.operands.item[1], "--flag");
    assert_string_equal(err, "");
}

static void help_and_version(void **state)
{
    struct values v;
    bool ends;

    (void)state;
    assert_int_equal(parse(&v, false, "--help", &ends), 0);
    assert_true(ends);
    assert_non_null(strstr(out, "--ring-mb N"));
    assert_non_null(strstr(out, "does things"));
    assert_non_null(strstr(out, "usage: prog [options]\n"));
    assert_ptr_equal(strstr(out, "(repeatable)"), strstr(out, "a list") + strlen("a list "));
    assert_string_equal(err, "");
    assert_int_equal(parse(&v, false, "--version", &ends), 0);
    assert_true(ends);
    assert_non_null(strstr(out, "prog 0."));
}

static void bad_options(void **state)
{
    static const struct { const char *line, *says; } bad[] = {
        { "--ring-md 4", "--ring-mb" },          { "--modle x", "did you mean --model" },
        { "--zzzzzzzzz", "see prog --help" },         { "--flog", "did you mean --flag" },
        { "--bogus", "--bogus; see prog --help" }, { "--sizes", "--sizes; see prog --help" },
        { "-x", "two dashes" },
        { "word", "unexpected operand" },        { "--model", "needs a value" },
        { "--flag=yes", "takes no value" },      { "--ring-mb 1", "from 2 to 100" },
        { "--ring-mb 101", "from 2 to 100" },    { "--ring-mb abc", "--ring-mb abc" },
        { "--ring-mb -3", "--ring-mb -3" },      { "--seed 18446744073709551616", "--seed" },
        { "--top-p nan", "--top-p nan" },        { "--top-p 1.5", "from 0 to 1" },
        { "--io-block 4095", "of at least 4096" }, { "--io-block 4X", "suffix" },
        { "--trunk-gb -1", "--trunk-gb -1" },    { "--trunk-gb 2G", "--trunk-gb 2G" },
        { "--ring-mb ''", "--ring-mb" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct values v;
        bool ends;

        assert_int_equal(parse(&v, false, bad[i].line, &ends), 2);
        assert_true(ends);
        assert_string_equal(out, "");
        if (!strstr(err, bad[i].says))
            fail_msg("\"%s\": \"%s\" is not in \"%s\"", bad[i].line, bad[i].says, err);
        assert_ptr_equal(strchr(err, '\n'), err + strlen(err) - 1); /* one line */
    }
}

static void sizes_for_people(void **state)
{
    static const struct { uint64_t bytes; const char *text; } is[] = {
        { 0, "0 bytes" },           { 1, "1 byte" },           { 999, "999 bytes" },      { 1000, "1.0 kB" },
        { 999949, "999.9 kB" },     { 999950, "1.0 MB" },      { 43683840, "43.7 MB" },   { 999949999, "999.9 MB" },
        { 1000000000, "1.00 GB" },  { UINT64_MAX, "18446744073.71 GB" },
    };
    char text[K3_SIZE_TEXT];

    (void)state;
    for (size_t i = 0; i < sizeof(is) / sizeof(is[0]); i++)
        assert_string_equal(k3_size_text(text, is[i].bytes), is[i].text);
}

static void numbers_for_people(void **state)
{
    static const struct { uint64_t n; const char *text; } is[] = {
        { 0, "0" }, { 999, "999" }, { 1000, "1,000" }, { 55296, "55,296" }, { 100000, "100,000" }, { 1234567, "1,234,567" },
        { UINT64_MAX, "18,446,744,073,709,551,615" },
    };
    char text[K3_GROUPED_TEXT];

    (void)state;
    for (size_t i = 0; i < sizeof(is) / sizeof(is[0]); i++)
        assert_string_equal(k3_grouped_text(text, is[i].n), is[i].text);
}

static void too_many(void **state)
{
    char line[4096] = "";
    struct values v;
    bool ends;

    (void)state;
    for (int i = 0; i < 65; i++)
        strcat(line, "--device d ");
    assert_int_equal(parse(&v, false, line, &ends), 2);
    assert_non_null(strstr(err, "more than 64"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_numbers),    cmocka_unit_test(real_numbers), cmocka_unit_test(sizes),
        cmocka_unit_test(good_options),     cmocka_unit_test(help_and_version),
        cmocka_unit_test(bad_options),      cmocka_unit_test(too_many),     cmocka_unit_test(sizes_for_people),
        cmocka_unit_test(numbers_for_people),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
