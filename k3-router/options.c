#include <stdio.h>
#include <string.h>

#include "ipc/daemon.h"
#include "k3-router/router.h"

#define NOT_GIVEN (-1.0)

static bool usage(int *status, const char *what)
{
    fprintf(stderr, "k3-router: %s (k3-router --help lists the options)\n", what);
    *status = K3_EXIT_REFUSED;
    return true;
}

bool k3_router_options(struct k3_router_opts *o, int argc, char **argv, int *status)
{
    const char *top_p = NULL;
    const struct k3_opt table[] = {
        { "instance", K3_OPT_STRING, &o->instance, "NAME", "instance name (default: \"default\"; with --resume the request's)", 0, 0 },
        { "model", K3_OPT_STRING, &o->model, "DIR",
          "where the tokenizer is (default: the model that k3-computed runs)", 0, 0 },
        { "chat", K3_OPT_FLAG, &o->chat, NULL, "the prompt is a user's message (the default)", 0, 0 },
        { "raw", K3_OPT_FLAG, &o->raw, NULL, "the prompt is text to be continued; greedy by default", 0, 0 },
        { "ids", K3_OPT_STRING, &o->ids, "1,2,3", "the prompt is these token ids; greedy by default", 0, 0 },
        { "system", K3_OPT_STRING, &o->system, "TEXT", "a system message before the prompt", 0, 0 },
        { "think", K3_OPT_STRING, &o->think, "on|off", "thinking before the answer (default: as the model says)", 0, 0 },
        { "effort", K3_OPT_STRING, &o->effort, "LEVEL", "low, high, max or none (no effort message)", 0, 0 },
        { "max-tokens", K3_OPT_U64, &o->max_tokens, "N", "length of the answer (default: the rest of the context)", 1,
          1u << 24 },
        { "temperature", K3_OPT_DOUBLE, &o->temperature, "X", "0 is greedy (default: as the model says, else 1.0)", 0, 100 },
        { "top-p", K3_OPT_STRING, &top_p, "X", "over 0 up to 1 (default: as the model says, else 0.95)", 0, 0 },
        { "top-k", K3_OPT_U32, &o->top_k, "N", "0 is off (default)", 0, 1u << 30 },
        { "min-p", K3_OPT_DOUBLE, &o->min_p, "X", "0 is off (default)", 0, 1 },
        { "seed", K3_OPT_STRING, &o->seed, "N", "of the sampling (default: a random one, which is recorded; with --out 0).  --lines: of the\n"
          "first line, the next one has the next number", 0, 0 },
        { "stop", K3_OPT_LIST, &o->stop, "TEXT", "ends the answer before this text", 0, 0 },
        { "lines", K3_OPT_FLAG, &o->lines, NULL, "one prompt a line, one JSON object a line, in the same order", 0, 0 },
        { "json-lines", K3_OPT_FLAG, &o->json_lines, NULL, "--lines whose lines are JSON: {\"messages\":[..]} or {\"prompt\":\"..\"}, \"id\", sampling\n"
          "(docs/user/terminal.md)", 0, 0 },
        { "out", K3_OPT_STRING, &o->out, "FILE", "with --lines: append each object to FILE as its answer ends; started again, does\n"
          "only what is missing in it", 0, 0 },
        { "parallel", K3_OPT_U32, &o->parallel, "N", "prompts at once with --lines, answers at once with --http (default: the sequences of\n"
          "k3-computed; --lines: at least 4)", 1, 64 },
        { "json", K3_OPT_FLAG, &o->json, NULL, "print one JSON object at the end instead of text as it comes", 0, 0 },
        { "logits", K3_OPT_STRING, &o->logits, "FILE", "write the float32 logits of the first generated position", 0, 0 },
        { "resume", K3_OPT_STRING, &o->resume, "ID", "show an earlier request's answer and go on with it", 0, 0 },
        { "state-dir", K3_OPT_STRING, &o->state_dir, "DIR",
          "journals and history (default $XDG_STATE_HOME/k3 or ~/.local/state/k3)", 0, 0 },
        { "wait", K3_OPT_U32, &o->wait_s, "S", "seconds to wait for a k3-computed that went away (default 60)", 0, 86400 },
        { "http", K3_OPT_STRING, &o->http, "ADDR:PORT", "serve the OpenAI API there, until SIGTERM (docs/user/serving.md); port 0: any", 0, 0 },
        { "api-key-file", K3_OPT_STRING, &o->api_key_file, "FILE", "with --http: keys, one a line; needed where others can connect", 0, 0 },
        { "allow-host", K3_OPT_LIST, &o->allow_host, "NAME", "with --http and no keys: a further name in Host", 0, 0 },
        { "cors", K3_OPT_LIST, &o->cors, "ORIGIN", "with --http: pages of this origin may ask (* all)", 0, 0 },
        { "queue", K3_OPT_U32, &o->queue, "N", "with --http: requests that wait; more get 429 (default 32)", 0, 1000 },
        { "connections", K3_OPT_U32, &o->connections, "N", "with --http: at most (default 256)", 1, 10000 },
        { "http-mb", K3_OPT_U32, &o->http_mb, "N", "with --http: memory for requests that are being read and understood (default 1024)", 8, 1 << 16 },
        { "ping", K3_OPT_U32, &o->ping_s, "S", "with --http: a comment in a stream that is silent for so long (default 5; 0 none)", 0, 3600 },
        { "client-timeout", K3_OPT_U32, &o->client_timeout_s, "S", "with --http: for a client to send its request, or to take bytes\n"
          "(default 60)", 1, 3600 },
        { "served-name", K3_OPT_STRING, &o->served_name, "NAME", "with --http: of the model (default: its directory's)", 0, 0 },
        { "log-level", K3_OPT_STRING, &o->daemon.log_level, "LEVEL", "with --http: error, warn, info or debug", 0, 0 },
        { "supervised", K3_OPT_FLAG, &o->daemon.supervised, NULL, "with --http: leave when the parent process ends", 0, 0 },
        { NULL, K3_OPT_FLAG, NULL, NULL, NULL, 0, 0 },
    };
    uint64_t seed;

    *o = (struct k3_router_opts){ .temperature = NOT_GIVEN, .top_p = NOT_GIVEN,
                                  .min_p = NOT_GIVEN, .top_k = UINT32_MAX, .wait_s = 60, .queue = 32, .connections = 256, .http_mb = 1024,
                                  .ping_s = 5, .client_timeout_s = 60, .daemon = K3_DAEMON_OPTS_INIT };
    if (k3_opts_parse(table, "k3-router",
                      "asks k3-computed and shows the answer.  The whole of stdin is one prompt (without one trailing line\n"
                      "end); at a terminal it is a conversation, whose commands /help lists.", argc, argv, NULL, status))
        return true;
    if (o->chat + o->raw + (o->ids != NULL) + (o->resume != NULL) > 1)
        return usage(status, "--chat, --raw, --ids and --resume exclude one another");
    o->lines |= o->json_lines;
    if (o->out && !o->lines)
        return usage(status, "--out goes with --lines or --json-lines");
    if (o->json_lines && o->system)
        return usage(status, "--system does not go with --json-lines; a message with \"role\":\"system\" does");
    if (o->lines && (o->ids || o->resume || o->logits))
        return usage(status, "--lines does not go with --ids, --resume or --logits");
    if (o->http && (o->chat || o->raw || o->ids || o->resume || o->lines || o->json || o->system || o->logits || o->stop.n))
        return usage(status, "--http serves; it does not go with --chat, --raw, --ids, --resume, --lines, --json, --system, "
                     "--logits or --stop");
    if (!o->http && (o->api_key_file || o->cors.n || o->allow_host.n || o->served_name || o->daemon.supervised))
        return usage(status, "--api-key-file, --allow-host, --cors, --served-name and --supervised go with --http only");
    if (o->served_name && (!*o->served_name || strlen(o->served_name) > 100 ||
                           k3_utf8_check(o->served_name, strlen(o->served_name)) < strlen(o->served_name)))
        return usage(status, "--served-name: 1 to 100 bytes of UTF-8");
    if (o->system && (o->raw || o->ids))
        return usage(status, "--system goes with --chat only");
    if ((o->think || o->effort) && (o->raw || o->ids))
        return usage(status, "--think and --effort go with --chat only");
    if (o->think && strcmp(o->think, "on") != 0 && strcmp(o->think, "off") != 0)
        return usage(status, "--think: on or off");
    if (o->effort && strcmp(o->effort, "low") != 0 && strcmp(o->effort, "high") != 0 &&
        strcmp(o->effort, "max") != 0 && strcmp(o->effort, "none") != 0)
        return usage(status, "--effort: low, high, max or none");
    if (top_p && (k3_parse_double(top_p, 0, 1, &o->top_p) < 0 || o->top_p == 0)) {
        fprintf(stderr, "k3-router: --top-p %s: must be a number over 0 up to 1\n", top_p);
        *status = K3_EXIT_REFUSED;
        return true;
    }
    if (o->seed && k3_parse_u64(o->seed, 0, UINT64_MAX, &seed) < 0)
        return usage(status, "--seed: a number from 0 to 2^64-1");
    if (o->system && k3_utf8_check(o->system, strlen(o->system)) < strlen(o->system))
        return usage(status, "--system: not valid UTF-8");
    for (size_t i = 0; i < o->stop.n; i++) {
        if (!*o->stop.item[i])
            return usage(status, "--stop: an empty text would stop before the first character");
        if (k3_utf8_check(o->stop.item[i], strlen(o->stop.item[i])) < strlen(o->stop.item[i]))
            return usage(status, "--stop: not valid UTF-8");
    }
    return false;
}
