#include "ipc/parse.h"

#include <errno.h>
#include <inttypes.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/daemon.h"

int k3_parse_u64(const char *text, uint64_t min, uint64_t max, uint64_t *out)
{
    uint64_t v = 0;

    if (!*text)
        return -EINVAL;
    for (const char *p = text; *p; p++) {
        if (*p < '0' || *p > '9')
            return -EINVAL;
        if (__builtin_mul_overflow(v, 10u, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*p - '0'), &v))
            return -ERANGE;
    }
    if (v < min || v > max)
        return -ERANGE;
    *out = v;
    return 0;
}

int k3_parse_double(const char *text, double min, double max, double *out)
{
    char *end;
    double v;

    /* strtod also takes white space, hexadecimal, inf and nan. */
    if (!*text || strspn(text, "0123456789.eE+-") != strlen(text))
        return -EINVAL;
    v = strtod(text, &end);
    if (*end || end == text)
        return -EINVAL;
    if (!isfinite(v) || v < min || v > max)
        return -ERANGE;
    *out = v;
    return 0;
}

int k3_parse_size(const char *text, uint64_t *out_bytes)
{
    char digits[32];
    size_t n = strspn(text, "0123456789"), n_part = 0;
    const char *part = text + n;
    uint64_t whole = 0, of_suffix = 0, scale = 1;
    unsigned shift = 0;
    int rc;

    if (*part == '.') {
        n_part = strspn(++part, "0123456789");
        if (n_part == 0 || n_part > 9) /* so that what follows cannot overflow */
            return -EINVAL;
    }
    if (n == 0 || n >= sizeof(digits))
        return n ? -ERANGE : -EINVAL;
    switch (part[n_part]) {
    case 'K': case 'k': shift = 10; break;
    case 'M': case 'm': shift = 20; break;
    case 'G': case 'g': shift = 30; break;
    case 0: break;
    default: return -EINVAL;
    }
    if ((shift && part[n_part + 1]) || (n_part && !shift))
        return -EINVAL;
    memcpy(digits, text, n);
    digits[n] = 0;
    rc = k3_parse_u64(digits, 0, UINT64_MAX >> shift, &whole);
    for (size_t i = 0; i < n_part; i++, scale *= 10)
        of_suffix = 10 * of_suffix + (uint64_t)(part[i] - '0');
    if (rc == 0)
        *out_bytes = (whole << shift) + (of_suffix << shift) / scale;
    return rc;
}

const char *k3_size_text(char out[K3_SIZE_TEXT], uint64_t bytes)
{
    double b = (double)bytes;

    if (bytes < 1000)
        snprintf(out, K3_SIZE_TEXT, "%u byte%s", (unsigned)bytes, bytes == 1 ? "" : "s");
    else if (b < 999.95e3)
        snprintf(out, K3_SIZE_TEXT, "%.1f kB", b / 1e3);
    else if (b < 999.95e6)
        snprintf(out, K3_SIZE_TEXT, "%.1f MB", b / 1e6);
    else
        snprintf(out, K3_SIZE_TEXT, "%.2f GB", b / 1e9);
    return out;
}

const char *k3_grouped_text(char out[K3_GROUPED_TEXT], uint64_t n)
{
    char digits[24];
    size_t len = (size_t)snprintf(digits, sizeof(digits), "%" PRIu64, n), at = 0;

    for (size_t i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0)
            out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

/* ---- option tables ---- */

static size_t edit_distance(const char *a, size_t n_a, const char *b)
{
    size_t n_b = strlen(b), row[64];

    if (n_a >= 64 || n_b >= 64)
        return SIZE_MAX;
    for (size_t j = 0; j <= n_b; j++)
        row[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);

            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n_b];
}

static const char *nearest(const struct k3_opt *table, const char *name, size_t len)
{
    const char *best = NULL;
    size_t best_distance = (len + 1) / 3 + 1; /* farther than a third of the letters is no help */

    for (const struct k3_opt *o = table; o->name; o++) {
        size_t d = edit_distance(name, len, o->name);

        if (len >= 3 && strncmp(o->name, name, len) == 0)
            d = 1;
        if (d < best_distance) {
            best_distance = d;
            best = o->name;
        }
    }
    return best;
}

static void help(const struct k3_opt *table, const char *program, const char *summary,
                 const struct k3_str_list *operands)
{
    printf("%s: %s\nusage: %s [options]%s%s\n\n", program, summary, program, operands ? " " : "",
           !operands ? "" : operands->name ? operands->name : "[operands]");
    for (const struct k3_opt *o = table; o->name; o++) {
        char left[64];

        snprintf(left, sizeof(left), "--%s%s%s", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
        printf("  %-24s %s%s\n", left, o->help, o->kind == K3_OPT_LIST ? " (repeatable)" : "");
    }
    printf("  %-24s %s\n  %-24s %s\n", "--help", "this text", "--version", "the version");
}

static int bad_number(const char *program, const struct k3_opt *o, const char *value,
                      const char *what)
{
    fprintf(stderr, "%s: --%s %s: must be %s", program, o->name, value, what);
    if (o->max > 0 && o->max < 1e15)
        fprintf(stderr, " from %.15g to %.15g", o->min, o->max);
    else if (o->min > 0)
        fprintf(stderr, " of at least %.15g", o->min);
    fputc('\n', stderr);
    return K3_EXIT_REFUSED;
}

static int store_value(const struct k3_opt *o, const char *program, const char *value)
{
    double high = o->max > 0 ? o->max : HUGE_VAL, d;
    uint64_t whole = UINT64_MAX, u;

    if (o->max > 0 && o->max < 18446744073709551615.0)
        whole = (uint64_t)o->max;
    switch (o->kind) {
    case K3_OPT_FLAG:
        break;
    case K3_OPT_STRING:
        *(const char **)o->to = value;
        break;
    case K3_OPT_LIST: {
        struct k3_str_list *l = o->to;

        if (l->n == sizeof(l->item) / sizeof(l->item[0])) {
            fprintf(stderr, "%s: --%s: given more than %zu times\n", program, o->name, l->n);
            return K3_EXIT_REFUSED;
        }
        l->item[l->n++] = value;
        break;
    }
    case K3_OPT_U32:
        if (whole > UINT32_MAX)
            whole = UINT32_MAX;
        if (k3_parse_u64(value, (uint64_t)o->min, whole, &u) < 0)
            return bad_number(program, o, value, "a whole number");
        *(uint32_t *)o->to = (uint32_t)u;
        break;
    case K3_OPT_U64:
        if (k3_parse_u64(value, (uint64_t)o->min, whole, &u) < 0)
            return bad_number(program, o, value, "a whole number");
        *(uint64_t *)o->to = u;
        break;
    case K3_OPT_DOUBLE:
        if (k3_parse_double(value, o->min, high, &d) < 0)
            return bad_number(program, o, value, "a number");
        *(double *)o->to = d;
        break;
    case K3_OPT_SIZE:
        if (k3_parse_size(value, &u) < 0 || u < (uint64_t)o->min || u > whole)
            return bad_number(program, o, value,
                              "bytes with an optional suffix K, M or G, a number");
        *(uint64_t *)o->to = u;
        break;
    case K3_OPT_GB:
        if (k3_parse_double(value, o->min > 0 ? o->min : 0, high < 9e9 ? high : 9e9, &d) < 0)
            return bad_number(program, o, value, "a number of gigabytes (10^9 bytes)");
        *(uint64_t *)o->to = (uint64_t)llround(d * 1e9);
        break;
    }
    return 0;
}

/* A descriptor that the caller closed would go to the next file that is opened, and the log into a
 * segment or the answer into the journal.  Input is empty then, output fails. */
static void fill_standard_descriptors(void)
{
    static const int flags[] = { O_RDONLY, O_RDONLY, O_RDWR };

    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", flags[fd]) != fd)
            return; /* no /dev/null: nothing else to take */
}

bool k3_opts_parse(const struct k3_opt *table, const char *program, const char *summary, int argc,
                   char **argv, struct k3_str_list *operands, int *status)
{
    bool options_over = false;

    fill_standard_descriptors();
    *status = K3_EXIT_REFUSED;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *eq, *value = NULL;
        const struct k3_opt *o;
        size_t len;

        if (options_over || arg[0] != '-' || !arg[1]) {
            if (!operands) {
                fprintf(stderr, "%s: unexpected operand \"%s\"; see %s --help\n", program, arg,
                        program);
                return true;
            }
            if (operands->n == sizeof(operands->item) / sizeof(operands->item[0])) {
                fprintf(stderr, "%s: more than %zu operands\n", program, operands->n);
                return true;
            }
            operands->item[operands->n++] = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            options_over = true;
            continue;
        }
        if (strcmp(arg, "--help") == 0) {
            help(table, program, summary, operands);
            *status = fflush(stdout) == 0 ? K3_EXIT_OK : K3_EXIT_FAILED;
            return true;
        }
        if (strcmp(arg, "--version") == 0) {
            printf("%.*s %s\n", (int)strcspn(program, " "), program, K3_VERSION);
            *status = fflush(stdout) == 0 ? K3_EXIT_OK : K3_EXIT_FAILED;
            return true;
        }
        if (arg[1] != '-') {
            fprintf(stderr,
                    "%s: unknown option \"%s\"; options begin with two dashes, see %s --help\n",
                    program, arg, program);
            return true;
        }
        arg += 2;
        eq = strchr(arg, '=');
        len = eq ? (size_t)(eq - arg) : strlen(arg);
        for (o = table; o->name; o++)
            if (strlen(o->name) == len && strncmp(o->name, arg, len) == 0)
                break;
        if (!o->name) {
            const char *hint = nearest(table, arg, len);

            if (hint)
                fprintf(stderr, "%s: unknown option --%.*s; did you mean --%s?\n", program,
                        (int)len, arg, hint);
            else
                fprintf(stderr, "%s: unknown option --%.*s; see %s --help\n", program, (int)len, arg,
                        program);
            return true;
        }
        if (o->kind == K3_OPT_FLAG) {
            if (eq) {
                fprintf(stderr, "%s: --%s takes no value, got \"%s\"\n", program, o->name, eq + 1);
                return true;
            }
            *(bool *)o->to = true;
            continue;
        }
        if (eq) {
            value = eq + 1;
        } else if (i + 1 < argc) {
            value = argv[++i];
        } else {
            fprintf(stderr, "%s: --%s needs a value (%s)\n", program, o->name,
                    o->arg ? o->arg : "VALUE");
            return true;
        }
        if (store_value(o, program, value) != 0)
            return true;
    }
    *status = K3_EXIT_OK;
    return false;
}
