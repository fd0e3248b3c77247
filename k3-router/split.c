/* The split of text into pieces (spec/text.md 1.4) and the chunking of the reference encoder (1.6).
 *
 * No input makes the match fail or take long: a chunk holds no run of more than 25,000 code points that are all white space
 * or all not, every alternative ends within one run of each kind, and each is tried by one greedy walk and one walk
 * back.  So a match takes time and stack in proportion to at most 50,001 code points; the limits below lie far above. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <errno.h>
#include <stdlib.h>

#include "k3-router/tokenizer.h"
#include "k3-router/unicode16.h"
#include "text/utf8.h"

#define SLICE_CPS 400000u
#define RUN_CPS 25000u
#define JIT_STACK_BYTES (32u << 20)
#define MATCH_LIMIT 100000000u

/* White space as Rust's \s has it (PCRE2's \s under UCP has U+180E in addition), letters, Han by Script (a bare \p{Han}
 * is Script_Extensions in PCRE2 and would glue Chinese punctuation to words). */
#define W "\\x{09}-\\x{0d}\\x{85}\\p{Z}"
#define L "\\p{L}" K3_NEW_HAN K3_NEW_UPPER K3_NEW_LOWER K3_NEW_LETTER
#define N "\\p{N}" K3_NEW_NUMBER
#define BOTH "\\p{Lm}\\p{Lo}\\p{M}" K3_NEW_LETTER K3_NEW_MARK
#define HAN "[\\p{sc:Han}" K3_NEW_HAN "]"
#define PREFIX "[^\\r\\n" L N "]?"
#define UPPER "(?:(?!" HAN ")[\\p{Lu}\\p{Lt}" K3_NEW_UPPER BOTH "])"
#define LOWER "(?:(?!" HAN ")[\\p{Ll}" K3_NEW_LOWER BOTH "])"
#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
static const char pattern[] =
    HAN "+"
    "|" PREFIX UPPER "*" LOWER "+" CONTRACTION
    "|" PREFIX UPPER "+" LOWER "*" CONTRACTION
    "|[" N "]{1,3}"
    "| ?[^" W L N "]+[\\r\\n]*"
    "|[" W "]*[\\r\\n]+"
    "|[" W "]+(?![^" W "])"
    "|[" W "]+";

struct k3_split { pcre2_code *code; };

int k3_split_open(struct k3_split **out, struct k3_err *err)
{
    struct k3_split *s = calloc(1, sizeof(*s));
    PCRE2_UCHAR text[200] = "";
    PCRE2_SIZE where = 0;
    int code = 0;

    if (!s)
        return k3_fail(err, -ENOMEM, "split pattern: no memory");
    s->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_START_OPTIMIZE, &code, &where, NULL);
    if (!s->code) {
        pcre2_get_error_message(code, text, sizeof(text));
        free(s);
        return k3_fail(err, -EINVAL, "split pattern: this libpcre2 refuses it at %zu (%s); 10.40 or newer is needed",
                       (size_t)where, (const char *)text);
    }
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* where there is no JIT the interpreter finds the same pieces */
    *out = s;
    return 0;
}

void k3_split_close(struct k3_split *s)
{
    if (s)
        pcre2_code_free(s->code);
    free(s);
}

int k3_split_pieces(const struct k3_split *s, const char *text, size_t len_bytes, k3_piece_fn *fn, void *arg,
                    struct k3_err *err)
{
    pcre2_match_data *md = pcre2_match_data_create(1, NULL);
    pcre2_match_context *mc = pcre2_match_context_create(NULL);
    pcre2_jit_stack *js = NULL;
    int rc = md && mc ? 0 : k3_fail(err, -ENOMEM, "split: no memory");

    if (rc == 0)
        pcre2_set_match_limit(mc, MATCH_LIMIT);
    for (size_t at = 0, end; at < len_bytes && rc == 0; at = end) {
        int n = pcre2_match(s->code, (PCRE2_SPTR)text, len_bytes, at, PCRE2_NO_UTF_CHECK, md, mc);
        if (n == PCRE2_ERROR_JIT_STACKLIMIT && !js) { /* a long piece; most fit the small stack that comes with JIT */
            js = pcre2_jit_stack_create(JIT_STACK_BYTES / 8, JIT_STACK_BYTES, NULL);
            pcre2_jit_stack_assign(mc, NULL, js);
            n = pcre2_match(s->code, (PCRE2_SPTR)text, len_bytes, at, PCRE2_NO_UTF_CHECK, md, mc);
        }
        if (n < 0 || (end = pcre2_get_ovector_pointer(md)[1]) <= at) {
            rc = k3_fail(err, -EIO, "split: libpcre2 error %d at byte %zu of %zu", n, at, len_bytes);
            break;
        }
        rc = fn(arg, text + at, end - at);
        if (rc == -ENOMEM)
            k3_fail(err, rc, "tokenizer: no memory at byte %zu of %zu", at, len_bytes);
    }
    pcre2_jit_stack_free(js);
    pcre2_match_context_free(mc);
    pcre2_match_data_free(md);
    return rc;
}

size_t k3_split_chunk(const char *text, size_t len_bytes, size_t *slice_left)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t at = 0, run = 0;
    bool was = false;

    if (*slice_left == 0)
        *slice_left = SLICE_CPS;
    while (at < len_bytes && *slice_left) {
        bool space = k3_utf8_is_space(k3_utf8_at(p + at), true);
        if (at && space == was) {
            if (++run > RUN_CPS)
                break; /* the cut lies just before this one */
        } else {
            run = 1;
            was = space;
        }
        at += k3_utf8_len(p[at]);
        --*slice_left;
    }
    return at;
}
