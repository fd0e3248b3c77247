#include "k3-router/logprobs.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* Room for one more token; NULL without memory. */
static struct k3_logprob *room(struct k3_logprobs *l)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 16;
        struct k3_logprob *more = reallocarray(l->entry, cap * l->n_each, sizeof(*more));

        if (!more)
            return NULL;
        l->entry = more;
        l->cap = cap;
    }
    return l->entry + l->n * l->n_each;
}

static bool good(double logprob)
{
    return logprob <= 0 && isfinite((float)logprob);
}

int k3_logprobs_take(struct k3_logprobs *l, uint32_t token, const cJSON *array)
{
    struct k3_logprob *to;
    const cJSON *v;
    uint32_t n = 0;

    if (!cJSON_IsArray(array) || cJSON_GetArraySize(array) != (int)(2 * l->n_each - 1))
        return -EPROTO;
    to = room(l);
    if (!to)
        return -ENOMEM;
    to[0].id = token;
    cJSON_ArrayForEach(v, array) {
        bool id = n % 2 == 1;

        if (!cJSON_IsNumber(v) || (id ? !(v->valuedouble >= 0 && v->valuedouble <= UINT32_MAX) : !good(v->valuedouble)))
            return -EPROTO;
        if (id)
            to[(n + 1) / 2].id = (uint32_t)v->valuedouble;
        else
            to[n / 2].value = (float)v->valuedouble;
        n++;
    }
    l->n++;
    return 0;
}

static bool number(const char **text, double *out)
{
    char *end;

    if (**text != ' ' || (*text)[1] == ' ')
        return false;
    *out = strtod(*text, &end);
    if (end == *text || (*end && *end != ' '))
        return false;
    *text = end;
    return true;
}

bool k3_logprobs_parse(struct k3_logprobs *l, uint32_t token, const char *text)
{
    struct k3_logprob e[K3_TOP_LOGPROBS_MAX + 1] = { { token, 0 } }, *to;
    double id, value;
    uint32_t n = 1;

    if (!number(&text, &value) || !good(value))
        return false;
    e[0].value = (float)value;
    for (; *text && n <= K3_TOP_LOGPROBS_MAX; n++) {
        if (!number(&text, &id) || !(id >= 0 && id <= UINT32_MAX) || !number(&text, &value) || !good(value))
            return false;
        e[n] = (struct k3_logprob){ (uint32_t)id, (float)value };
    }
    if (*text || (l->n && n != l->n_each))
        return false;
    l->n_each = n;
    to = room(l);
    if (!to)
        return false;
    for (uint32_t i = 0; i < n; i++)
        to[i] = e[i];
    l->n++;
    return true;
}

int k3_logprobs_put(const struct k3_logprobs *l, size_t i, struct k3_buf *out)
{
    const struct k3_logprob *e = l->entry + i * l->n_each;
    int rc = k3_buf_printf(out, " %.9g", (double)e[0].value);

    for (uint32_t k = 1; k < l->n_each; k++)
        rc |= k3_buf_printf(out, " %u %.9g", e[k].id, (double)e[k].value);
    return rc;
}

int k3_logprobs_json(const struct k3_logprobs *l, struct k3_buf *out)
{
    int rc = k3_buf_puts(out, "[");

    for (size_t i = 0; i < l->n; i++) {
        const struct k3_logprob *e = k3_logprobs_at(l, i);

        rc |= k3_buf_printf(out, "%s{\"logprob\":%.9g,\"top\":[", i ? "," : "", (double)e[0].value);
        for (uint32_t k = 1; k < l->n_each; k++)
            rc |= k3_buf_printf(out, "%s[%u,%.9g]", k > 1 ? "," : "", e[k].id, (double)e[k].value);
        rc |= k3_buf_puts(out, "]}");
    }
    return rc | k3_buf_puts(out, "]");
}

void k3_logprobs_free(struct k3_logprobs *l)
{
    free(l->entry);
    *l = (struct k3_logprobs){ 0 };
}
