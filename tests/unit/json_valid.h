/* tests/unit/json_valid.h: a plain validator of JSON values against a JSON Schema, with nothing in common with constrain/.
 * Knows the keywords that constrain/ knows; both sides are trees of cJSON. */
#ifndef K3_TESTS_JSON_VALID_H
#define K3_TESTS_JSON_VALID_H

#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline const cJSON *json_target(const cJSON *root, const char *ref)
{
    char path[512], *save = NULL;
    const cJSON *v = root;

    strncpy(path, ref + 1, sizeof(path) - 1);
    path[sizeof(path) - 1] = 0;
    for (char *part = strtok_r(path, "/", &save); part && v; part = strtok_r(NULL, "/", &save))
        v = cJSON_IsArray(v) ? cJSON_GetArrayItem(v, atoi(part)) : cJSON_GetObjectItemCaseSensitive(v, part);
    return v;
}

static inline bool json_is_type(const cJSON *v, const char *type)
{
    return (strcmp(type, "null") == 0 && cJSON_IsNull(v)) || (strcmp(type, "boolean") == 0 && cJSON_IsBool(v)) ||
           (strcmp(type, "string") == 0 && cJSON_IsString(v)) || (strcmp(type, "array") == 0 && cJSON_IsArray(v)) ||
           (strcmp(type, "object") == 0 && cJSON_IsObject(v)) || (strcmp(type, "number") == 0 && cJSON_IsNumber(v)) ||
           (strcmp(type, "integer") == 0 && cJSON_IsNumber(v) && v->valuedouble == floor(v->valuedouble));
}

static inline size_t json_characters(const char *s)
{
    size_t n = 0;

    for (; *s; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static inline double json_number(const cJSON *schema, const char *name, double otherwise)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(schema, name);

    return v ? v->valuedouble : otherwise;
}

static inline bool json_valid(const cJSON *v, const cJSON *s, const cJSON *root);

static inline bool json_valid_object(const cJSON *v, const cJSON *s, const cJSON *root)
{
    const cJSON *properties = cJSON_GetObjectItemCaseSensitive(s, "properties"), *m, *name;
    const cJSON *more = cJSON_GetObjectItemCaseSensitive(s, "additionalProperties");

    cJSON_ArrayForEach(name, cJSON_GetObjectItemCaseSensitive(s, "required"))
        if (!cJSON_GetObjectItemCaseSensitive(v, name->valuestring))
            return false;
    cJSON_ArrayForEach(m, v) {
        const cJSON *p = cJSON_GetObjectItemCaseSensitive(properties, m->string);

        for (const cJSON *w = m->next; w; w = w->next)
            if (strcmp(w->string, m->string) == 0)
                return false; /* twice */
        if (!json_valid(m, p ? p : more, root))
            return false;
    }
    return true;
}

static inline bool json_valid_array(const cJSON *v, const cJSON *s, const cJSON *root)
{
    const cJSON *first = cJSON_GetObjectItemCaseSensitive(s, "prefixItems"), *rest = cJSON_GetObjectItemCaseSensitive(s, "items"), *item;
    int i = 0, n = cJSON_GetArraySize(v);

    if (n < json_number(s, "minItems", 0) || n > json_number(s, "maxItems", 1e9))
        return false;
    cJSON_ArrayForEach(item, v) {
        if (!json_valid(item, i < cJSON_GetArraySize(first) ? cJSON_GetArrayItem(first, i) : rest, root))
            return false;
        i++;
    }
    return true;
}

/* s NULL: anything. */
static inline bool json_valid(const cJSON *v, const cJSON *s, const cJSON *root)
{
    const cJSON *k, *one;
    bool any = false;

    if (!s || cJSON_IsTrue(s))
        return true;
    if (cJSON_IsFalse(s))
        return false;
    if ((k = cJSON_GetObjectItemCaseSensitive(s, "$ref")) && !json_valid(v, json_target(root, k->valuestring), root))
        return false;
    cJSON_ArrayForEach(one, cJSON_GetObjectItemCaseSensitive(s, "allOf"))
        if (!json_valid(v, one, root))
            return false;
    if ((k = cJSON_GetObjectItemCaseSensitive(s, "anyOf"))) {
        cJSON_ArrayForEach(one, k)
            any = any || json_valid(v, one, root);
        if (!any)
            return false;
    }
    if ((k = cJSON_GetObjectItemCaseSensitive(s, "const")) && !cJSON_Compare(k, v, true))
        return false;
    if ((k = cJSON_GetObjectItemCaseSensitive(s, "enum"))) {
        any = false;
        cJSON_ArrayForEach(one, k)
            any |= cJSON_Compare(one, v, true);
        if (!any)
            return false;
    }
    if ((k = cJSON_GetObjectItemCaseSensitive(s, "type"))) {
        any = cJSON_IsString(k) && json_is_type(v, k->valuestring);
        if (cJSON_IsArray(k))
            cJSON_ArrayForEach(one, k)
                any |= json_is_type(v, one->valuestring);
        if (!any)
            return false;
    }
    if (cJSON_IsString(v))
        return json_characters(v->valuestring) >= json_number(s, "minLength", 0) && json_characters(v->valuestring) <= json_number(s, "maxLength", 1e9);
    if (cJSON_IsObject(v))
        return json_valid_object(v, s, root);
    return !cJSON_IsArray(v) || json_valid_array(v, s, root);
}

#endif
