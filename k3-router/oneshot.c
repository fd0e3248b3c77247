/* One prompt from stdin (or ids from the command line, or an earlier request), one answer on stdout. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "text/file.h"
#include "k3-router/router.h"

#define PROGRESS_DELAY_MS 2000

static int parse_ids(const char *text, uint64_t n_vocab, struct k3_ids *out, struct k3_err *err)
{
    if (!*text)
        return k3_refuse(err, -EINVAL, "--ids: the prompt is empty");
    for (const char *p = text;; p++) {
        size_t len = strcspn(p, ",");
        char number[24];
        uint64_t id;

        snprintf(number, sizeof(number), "%.*s", (int)(len > 23 ? 23 : len), p);
        if (k3_parse_u64(number, 0, n_vocab - 1, &id) < 0)
            return k3_refuse(err, -EINVAL, "--ids: \"%s\" is not a token id from 0 to %llu", number,
                             (unsigned long long)n_vocab - 1);
        if (k3_ids_push(out, (uint32_t)id) < 0)
            return k3_fail(err, -ENOMEM, "--ids: no memory");
        p += len;
        if (!*p)
            return 0;
    }
}

static int read_prompt(struct k3_router *r, struct k3_ids *out, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    int rc;

    if (r->opt.ids)
        return parse_ids(r->opt.ids, r->t ? k3_tokenizer_n_vocab(r->t) : 1ull << 32, out, err);
    if (isatty(STDIN_FILENO))
        fprintf(stderr, "k3-router: reading the prompt from the terminal; end with Ctrl-D\n");
    rc = k3_file_read_fd(&b, STDIN_FILENO, "stdin", K3_PROMPT_BYTES_MAX, err);
    if (rc == 0) {
        b.len_bytes = k3_router_chomp(b.bytes, b.len_bytes);
        rc = k3_router_check_prompt(b.bytes, b.len_bytes, 0, "stdin", err);
    }
    if (rc == 0)
        rc = k3_exchange_prompt(r, b.bytes, b.len_bytes, out, err);
    k3_buf_free(&b);
    return rc;
}

/* What is left to print when the request has ended, well or not. */
static int print_end(const struct k3_exchange *x, const struct k3_err *failed)
{
    struct k3_buf b = { 0 };
    int rc = 0;

    if (x->r->opt.json && x->ask.id[0])
        rc = k3_exchange_json(x, NULL, failed, &b);
    else if (!x->r->t && !failed)
        for (size_t i = 0; i < x->ask.generated.n; i++)
            rc |= k3_buf_printf(&b, i ? ",%u" : "%u", x->ask.generated.id[i]);
    if (rc == 0 && (b.len_bytes || x->any_text || !failed))
        rc = k3_buf_puts(&b, "\n");
    if (rc == 0)
        rc = k3_router_write(b.bytes, b.len_bytes);
    k3_buf_free(&b);
    return rc;
}

int k3_router_oneshot(struct k3_router *r, struct k3_err *err)
{
    struct k3_exchange x = { .r = r, .ask = K3_ASK_INIT };
    struct k3_prompt prompt;
    int rc, out;

    k3_prompt_init(&prompt, r);
    rc = r->opt.resume ? 0 : read_prompt(r, &prompt.ids, err);
    k3_router_catch_interrupts(); /* not before: an interrupt while the prompt is read ends the program */
    if (rc == 0)
        rc = r->opt.resume ? k3_exchange_resume(&x, r, r->opt.resume, err) : k3_exchange_new(&x, r, &prompt, err);
    if (rc == 0) {
        x.live = !r->opt.json;
        x.thinking_live = x.live && isatty(STDOUT_FILENO);
        x.stops_at_interrupt = true;
        x.progress = k3_progress_open(PROGRESS_DELAY_MS);
        rc = k3_exchange_run(&x, err);
        out = print_end(&x, rc < 0 ? err : NULL);
        k3_progress_close(x.progress);
        if (rc == 0 && out < 0)
            rc = k3_fail(err, out, "stdout: %s", strerror(-out));
        if (rc == 0 && x.ask.end == K3_ASK_CANCELLED)
            rc = k3_fail(err, -ECANCELED, "cancelled after %zu tokens", x.ask.generated.n);
    }
    k3_ids_free(&prompt.ids);
    k3_exchange_close(&x);
    return rc;
}
