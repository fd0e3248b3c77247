#include "k3-router/journal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/daemon.h"
#include "text/file.h"

#define MAGIC "k3-journal 1 "
#define MODEL "model "
#define JOURNAL_BYTES_MAX (512u << 20)
#define SYNC_NS 1000000000ull

static int make_dirs(const char *path, struct k3_err *err)
{
    char part[1024];

    if (snprintf(part, sizeof(part), "%s", path) >= (int)sizeof(part))
        return k3_refuse(err, -ENAMETOOLONG, "state directory %s: path too long", path);
    for (char *p = part + 1;; p++) {
        char was = *p;
        if (was && was != '/')
            continue;
        *p = 0;
        if (mkdir(part, 0700) < 0 && errno != EEXIST)
            return k3_refuse(err, -errno, "state directory %s: cannot make %s: %s (choose one with --state-dir)", path,
                             part, strerror(errno));
        if (!was)
            return 0;
        *p = was;
    }
}

int k3_journal_dir(char *out, size_t len, const char *given, struct k3_err *err)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    struct stat st;
    int n, rc;

    if (given) {
        n = snprintf(out, len, "%s", given);
    } else if (state && state[0] == '/') {
        n = snprintf(out, len, "%s/k3", state);
    } else {
        const struct passwd *pw = home && home[0] == '/' ? NULL : getpwuid(getuid());
        home = pw ? pw->pw_dir : home;
        if (!home || home[0] != '/')
            return k3_refuse(err, -ENOENT, "no home directory for the journals; choose a place with --state-dir");
        n = snprintf(out, len, "%s/.local/state/k3", home);
    }
    if (n <= 0 || (size_t)n >= len)
        return k3_refuse(err, -EINVAL, "state directory \"%s\": empty or too long", given ? given : "");
    rc = make_dirs(out, err);
    if (rc == 0 && (stat(out, &st) < 0 || !S_ISDIR(st.st_mode)))
        rc = k3_refuse(err, -ENOTDIR, "state directory %s: not a directory", out);
    return rc;
}

void k3_journal_new_id(char out[K3_JOURNAL_ID_LEN + 1])
{
    unsigned char raw[K3_JOURNAL_ID_LEN / 2];

    if (getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw))
        k3_bug("getrandom of %zu bytes: %s", sizeof(raw), strerror(errno));
    for (size_t i = 0; i < sizeof(raw); i++)
        sprintf(out + 2 * i, "%02x", raw[i]);
}

bool k3_journal_id_ok(const char *id)
{
    return strlen(id) == K3_JOURNAL_ID_LEN && strspn(id, "0123456789abcdef") == K3_JOURNAL_ID_LEN;
}

static int path_of(struct k3_journal *j, const char *dir, const char *id, struct k3_err *err)
{
    if (!k3_journal_id_ok(id))
        return k3_refuse(err, -EINVAL, "request id \"%s\": 32 lower-case hex digits are expected", id);
    if (snprintf(j->path, sizeof(j->path), "%s/%s.journal", dir, id) >= (int)sizeof(j->path))
        return k3_refuse(err, -ENAMETOOLONG, "state directory %s: path too long", dir);
    return 0;
}

static int put(struct k3_journal *j, const char *bytes, size_t len_bytes, bool sync, struct k3_err *err)
{
    uint64_t now = k3_now_ns();

    /* One write for a record: after a short one (disk full) the file ends in a torn line, which a reader cuts off. */
    ssize_t n = write(j->fd, bytes, len_bytes);
    if (n != (ssize_t)len_bytes)
        return k3_fail(err, n < 0 ? -errno : -ENOSPC, "journal %s: %s", j->path, n < 0 ? strerror(errno) : "disk full");
    if (sync || now - j->synced_ns >= SYNC_NS) {
        j->synced_ns = now;
        if (fdatasync(j->fd) < 0 && errno != EINVAL && errno != EROFS)
            return k3_fail(err, -errno, "journal %s: fdatasync: %s", j->path, strerror(errno));
    }
    return 0;
}

int k3_journal_create(struct k3_journal *j, const char *dir, const char *id, const cJSON *head, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    char *text;
    int rc = path_of(j, dir, id, err);

    if (rc < 0)
        return rc;
    text = cJSON_PrintUnformatted(head);
    if (!text || k3_buf_printf(&b, MAGIC "%s\n", id) < 0 || k3_buf_puts(&b, text) < 0 || k3_buf_puts(&b, "\n") < 0)
        rc = k3_fail(err, -ENOMEM, "journal %s: no memory", j->path);
    cJSON_free(text);
    if (rc == 0) {
        j->fd = open(j->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
        if (j->fd < 0)
            rc = k3_fail(err, -errno, "journal %s: %s", j->path, strerror(errno));
        else if (flock(j->fd, LOCK_EX | LOCK_NB) < 0)
            rc = k3_fail(err, -errno, "journal %s: lock: %s", j->path, strerror(errno));
        else
            rc = put(j, b.bytes, b.len_bytes, true, err);
    }
    k3_buf_free(&b);
    if (rc < 0)
        k3_journal_close(j);
    return rc;
}

static bool parse_model(struct k3_journal_data *data, const char *json, size_t len)
{
    if (data->model || data->generated.n || data->end[0])
        return false;
    data->model = cJSON_ParseWithLength(json, len);
    return cJSON_IsString(cJSON_GetObjectItemCaseSensitive(data->model, "model_digest")) &&
           cJSON_IsString(cJSON_GetObjectItemCaseSensitive(data->model, "model"));
}

#define RECORD_MAX 1024u /* bytes of a line, but for head and model: a token with 21 log probabilities has 600 at most */

/* t INDEX TOKEN [log probabilities] */
static bool parse_token(struct k3_journal_data *data, const char *line)
{
    unsigned long index, token;
    int at = 0;

    if (sscanf(line, "t %lu %lu%n", &index, &token, &at) != 2 || index != data->generated.n || token > UINT32_MAX)
        return false;
    if (line[at] ? data->logprobs.n != data->generated.n || !k3_logprobs_parse(&data->logprobs, (uint32_t)token, line + at)
                 : data->logprobs.n > 0)
        return false;
    return k3_ids_push(&data->generated, (uint32_t)token) == 0;
}

/* One whole line after the head, without its line end.  False: it is not a record. */
static bool parse_record(struct k3_journal_data *data, const char *line, size_t len)
{
    char copy[RECORD_MAX], reason[16], rest;
    long long stop_id = -1;
    int n;

    if (len > strlen(MODEL) && memcmp(line, MODEL, strlen(MODEL)) == 0)
        return parse_model(data, line + strlen(MODEL), len - strlen(MODEL));
    if (len >= sizeof(copy) || data->end[0])
        return false;
    memcpy(copy, line, len);
    copy[len] = 0;
    if (strlen(copy) != len)
        return false;
    if (copy[0] == 't')
        return parse_token(data, copy);
    n = sscanf(copy, "end %15s %lld%c", reason, &stop_id, &rest);
    if ((n != 1 && n != 2) || (strcmp(reason, "stop") && strcmp(reason, "length") && strcmp(reason, "cancelled")) ||
        stop_id > UINT32_MAX)
        return false;
    strcpy(data->end, reason);
    data->stop_id = stop_id < 0 ? -1 : stop_id;
    return true;
}

int k3_journal_parse(struct k3_journal_data *data, const char *text, size_t len_bytes, const char *id,
                     const char *name, size_t *good_bytes, struct k3_err *err)
{
    size_t at = 0, line_no = 0;

    *data = (struct k3_journal_data){ .stop_id = -1 };
    while (at < len_bytes) {
        const char *line = text + at, *eol = memchr(line, '\n', len_bytes - at);
        size_t len = eol ? (size_t)(eol - line) : 0;
        bool ok;

        if (!eol)
            break; /* torn */
        line_no++;
        if (line_no == 1) {
            ok = len == strlen(MAGIC) + K3_JOURNAL_ID_LEN && memcmp(line, MAGIC, strlen(MAGIC)) == 0 &&
                 memcmp(line + strlen(MAGIC), id, K3_JOURNAL_ID_LEN) == 0;
        } else if (line_no == 2) {
            data->head = cJSON_ParseWithLength(line, len);
            ok = cJSON_IsObject(data->head);
        } else {
            ok = parse_record(data, line, len);
        }
        if (!ok)
            return k3_refuse(err, -EINVAL, "journal %s line %zu: not a record of request %s", name, line_no, id);
        at += len + 1;
    }
    *good_bytes = at;
    if (line_no < 2)
        return k3_refuse(err, -EINVAL, "journal %s: cut off in its head; the request was never submitted", name);
    return 0;
}

int k3_journal_open(struct k3_journal *j, const char *dir, const char *id, struct k3_journal_data *data,
                    struct k3_err *err)
{
    struct k3_buf b = { 0 };
    size_t good = 0;
    int rc = path_of(j, dir, id, err);

    *data = (struct k3_journal_data){ .stop_id = -1 };
    if (rc < 0)
        return rc;
    j->fd = open(j->path, O_RDWR | O_APPEND | O_CLOEXEC);
    if (j->fd < 0 && errno == ENOENT)
        return k3_refuse(err, -ENOENT, "no request %s in %s; its journals are named ID.journal", id, dir);
    if (j->fd < 0)
        return k3_refuse(err, -errno, "journal %s: %s", j->path, strerror(errno));
    if (flock(j->fd, LOCK_EX | LOCK_NB) < 0)
        rc = k3_refuse(err, -EBUSY, "request %s is being shown by another k3-router", id);
    if (rc == 0)
        rc = k3_file_read_fd(&b, j->fd, j->path, JOURNAL_BYTES_MAX, err);
    if (rc == 0)
        rc = k3_journal_parse(data, b.bytes, b.len_bytes, id, j->path, &good, err);
    if (rc == 0 && good < b.len_bytes && ftruncate(j->fd, (off_t)good) < 0)
        rc = k3_fail(err, -errno, "journal %s: cutting off a torn line: %s", j->path, strerror(errno));
    k3_buf_free(&b);
    if (rc < 0) {
        k3_journal_data_free(data);
        k3_journal_close(j);
    }
    return rc;
}

void k3_journal_data_free(struct k3_journal_data *data)
{
    cJSON_Delete(data->head);
    cJSON_Delete(data->model);
    k3_ids_free(&data->generated);
    k3_logprobs_free(&data->logprobs);
    *data = (struct k3_journal_data){ .stop_id = -1 };
}

int k3_journal_model(struct k3_journal *j, const char *digest, const char *model, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    int rc = k3_buf_puts(&b, MODEL "{\"model_digest\":");

    rc |= k3_buf_json(&b, digest, strlen(digest));
    rc |= k3_buf_puts(&b, ",\"model\":");
    rc |= k3_buf_json(&b, model, strlen(model));
    rc |= k3_buf_puts(&b, "}\n");
    rc = rc ? k3_fail(err, -ENOMEM, "journal %s: no memory", j->path) : put(j, b.bytes, b.len_bytes, true, err);
    k3_buf_free(&b);
    return rc;
}

int k3_journal_token(struct k3_journal *j, size_t index, uint32_t token, const struct k3_logprobs *l, struct k3_err *err)
{
    struct k3_buf b = { 0 };
    int rc = k3_buf_printf(&b, "t %zu %u", index, token);

    if (l && l->n_each)
        rc |= k3_logprobs_put(l, index, &b);
    rc |= k3_buf_puts(&b, "\n");
    rc = rc ? k3_fail(err, -ENOMEM, "journal %s: no memory", j->path) : put(j, b.bytes, b.len_bytes, false, err);
    k3_buf_free(&b);
    return rc;
}

int k3_journal_end(struct k3_journal *j, const char *reason, int64_t stop_id, struct k3_err *err)
{
    char line[64];
    int n = stop_id < 0 ? snprintf(line, sizeof(line), "end %s\n", reason)
                        : snprintf(line, sizeof(line), "end %s %lld\n", reason, (long long)stop_id);

    return put(j, line, (size_t)n, true, err);
}

void k3_journal_close(struct k3_journal *j)
{
    if (j->fd >= 0)
        close(j->fd);
    j->fd = -1;
}

struct old { int64_t mtime_s; char name[K3_JOURNAL_ID_LEN + 16]; };

static int newest_first(const void *a, const void *b)
{
    const struct old *x = a, *y = b;

    return x->mtime_s != y->mtime_s ? (x->mtime_s < y->mtime_s ? 1 : -1) : strcmp(x->name, y->name);
}

unsigned k3_journal_prune(const char *dir, int64_t now_s, unsigned keep_files)
{
    struct old *old = NULL;
    size_t n = 0, cap = 0;
    unsigned removed = 0;
    DIR *d = opendir(dir);

    for (struct dirent *e; d && (e = readdir(d));) {
        char id[K3_JOURNAL_ID_LEN + 1];
        struct stat st;
        if (strlen(e->d_name) != K3_JOURNAL_ID_LEN + 8 || strcmp(e->d_name + K3_JOURNAL_ID_LEN, ".journal") != 0)
            continue;
        memcpy(id, e->d_name, K3_JOURNAL_ID_LEN);
        id[K3_JOURNAL_ID_LEN] = 0;
        if (!k3_journal_id_ok(id) || fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (n == cap) {
            struct old *p = realloc(old, (cap = cap ? 2 * cap : 64) * sizeof(*p));
            if (!p)
                break;
            old = p;
        }
        old[n].mtime_s = st.st_mtim.tv_sec;
        strcpy(old[n++].name, e->d_name);
    }
    if (n)
        qsort(old, n, sizeof(*old), newest_first);
    for (size_t i = 0; i < n; i++)
        if (i >= keep_files || old[i].mtime_s < now_s - K3_JOURNAL_KEEP_S)
            removed += unlinkat(dirfd(d), old[i].name, 0) == 0;
    free(old);
    if (d)
        closedir(d);
    return removed;
}
