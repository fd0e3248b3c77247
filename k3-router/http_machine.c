/* What /v1/k3/stats has beside the pages: the model's shape, drives and their limits, hits by layer, private memory, members.
 * The weight daemons are asked on the thread that asks k3-computed, and only while somebody looks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/members.h"
#include "ipc/memory.h"
#include "ipc/msg.h"
#include "shm/segment.h"
#include "k3-router/http.h"

#define FLOW_MS 1000
#define FLOW_NS 1000000000ull
#define LOOKS_NS 5000000000ull /* after the last request for statistics nobody is asked any more */

void k3_http_flow_free(struct k3_http_flow *f)
{
    cJSON_Delete(f->trunk);
    cJSON_Delete(f->expert);
    *f = (struct k3_http_flow){ NULL, NULL };
}

/* A double would lose digits. */
static void add_ns(cJSON *to, const char *name, uint64_t ns)
{
    char text[24];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)ns);
    cJSON_AddRawToObject(to, name, text);
}

/* With the time, `at_ns`.  NULL when it does not answer, or not with that. */
static cJSON *ask_flow(const char *rundir, const char *daemon)
{
    cJSON *request = cJSON_CreateObject(), *reply = NULL;
    struct k3_client *c = NULL;
    char name[48];

    snprintf(name, sizeof(name), "%s.ctl", daemon);
    cJSON_AddStringToObject(request, "cmd", "flow");
    if (!k3_lock_alive(rundir, daemon) || k3_client_open(&c, rundir, name, NULL) < 0 ||
        k3_client_call(c, request, FLOW_MS, &reply, NULL) < 0 || !cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok"))) {
        cJSON_Delete(reply);
        reply = NULL;
    }
    if (reply)
        add_ns(reply, "at_ns", k3_now_ns());
    cJSON_Delete(request);
    k3_client_close(c);
    return reply;
}

void k3_http_machine_ask(struct k3_http *h, uint64_t now_ns)
{
    struct k3_http_flow now = { NULL, NULL }, before;
    bool wanted;

    pthread_mutex_lock(&h->lock);
    wanted = h->looked_ns && now_ns - h->looked_ns < LOOKS_NS;
    if (wanted && h->flow_ns && now_ns - h->flow_ns < FLOW_NS) {
        pthread_mutex_unlock(&h->lock);
        return;
    }
    h->flow_ns = now_ns;
    pthread_mutex_unlock(&h->lock);
    if (wanted) {
        now.trunk = ask_flow(h->r->rundir, "k3-trunkd");
        now.expert = ask_flow(h->r->rundir, "k3-expertd");
    }
    pthread_mutex_lock(&h->lock);
    before = h->flow;
    h->flow = now;
    pthread_mutex_unlock(&h->lock);
    k3_http_flow_free(&before);
}

/* ---- the reply ---- */

/* Anonymous memory of a process; negative: it is not there. */
static double private_bytes(uint32_t pid)
{
    char path[40], line[160];
    double kib = -1;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%u/status", pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "RssAnon: %lf", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib < 0 ? -1 : kib * 1024;
}

/* A member's life, whether it has a page or not. */
static void add_member(const struct k3_http *h, const char *name, cJSON *to)
{
    cJSON *o = cJSON_AddObjectToObject(to, name);
    bool alive = k3_lock_alive(h->r->rundir, name), failed;
    char reason[1024] = "";
    struct k3_stats s;
    double bytes = -1;
    int code;

    failed = !alive && k3_member_given_up(h->r->rundir, name, &code);
    if (failed)
        k3_member_last_error(reason, sizeof(reason), h->r->rundir, name);
    if (alive && k3_stats_open(&s, h->r->instance, name, NULL) == 0) {
        bytes = private_bytes(s.page->pid);
        k3_stats_close(&s);
    }
    cJSON_AddBoolToObject(o, "alive", alive);
    cJSON_AddBoolToObject(o, "failed", failed);
    cJSON_AddStringToObject(o, "reason", reason);
    if (bytes >= 0)
        cJSON_AddNumberToObject(o, "private_bytes", bytes);
    else
        cJSON_AddNullToObject(o, "private_bytes");
}

/* With the lock. */
static void add_flow(const cJSON *flow, const char *name, const char *const *keys, cJSON *to)
{
    cJSON *o = flow ? cJSON_AddObjectToObject(to, name) : cJSON_AddNullToObject(to, name);

    for (; flow && *keys; keys++)
        cJSON_AddItemToObject(o, *keys, cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(flow, *keys), true));
}

static void add_model(const struct k3_http *h, cJSON *to)
{
    const struct k3_http_peer *p = &h->peer;

    cJSON_AddStringToObject(to, "model", h->name);
    cJSON_AddBoolToObject(to, "known", p->known);
    cJSON_AddNumberToObject(to, "layers", (double)p->layers);
    cJSON_AddNumberToObject(to, "layers_model", (double)p->layers_model);
    cJSON_AddNumberToObject(to, "ctx", (double)p->ctx);
    cJSON_AddNumberToObject(to, "sequences", (double)p->sequences);
    cJSON_AddNumberToObject(to, "batch_rows", (double)p->batch_rows);
    cJSON_AddNumberToObject(to, "threads", (double)p->threads);
    cJSON_AddStringToObject(to, "kernels", p->kernels);
    cJSON_AddNumberToObject(to, "state_bytes", (double)p->state_bytes);
    cJSON_AddNumberToObject(to, "buffer_bytes", (double)p->buffer_bytes);
    cJSON_AddNumberToObject(to, "thread_bytes", (double)p->thread_bytes);
}

void k3_http_machine_add(struct k3_http *h, cJSON *root)
{
    static const char *const names[] = { "k3-trunkd", "k3-expertd", "k3-computed", "k3-router" };
    static const char *const trunk[] = { "at_ns", "drives", "ring_filled_bytes", NULL }, *const expert[] = { "at_ns", "drives", "layer_demands", "layer_hits", NULL };
    cJSON *o = cJSON_AddObjectToObject(root, "machine"), *members;
    uint64_t now_ns = k3_now_ns();

    add_ns(root, "now_ns", now_ns);
    pthread_mutex_lock(&h->lock);
    h->looked_ns = now_ns;
    add_model(h, o);
    add_flow(h->flow.trunk, "trunk", trunk, o);
    add_flow(h->flow.expert, "experts", expert, o);
    pthread_mutex_unlock(&h->lock);
    cJSON_AddNumberToObject(o, "promised_bytes", (double)k3_reserve_promised("/dev/shm", h->r->instance));
    members = cJSON_AddObjectToObject(o, "members");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        add_member(h, names[i], members);
}
