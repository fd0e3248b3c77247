/* tests/unit/keeper_test.c: shm/keeper.c, shm/data.c and k3-keeper/keep.c; the memfd part of shm/segment.c. */
#include "k3-keeper/keeper.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm/data.h"

#define INSTANCE "t-keeper"
#define MIB ((uint64_t)1 << 20)

static char dir[64], rundir[128]; /* XDG_RUNTIME_DIR and the run directory of this test */

static struct k3_seg made(const char *what, uint64_t len_bytes)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_seg s;

    if (k3_seg_create_from(&s, INSTANCE, what, len_bytes, K3_MEM_MEMFD, -1, &err) < 0)
        fail_msg("%s", err.text);
    return s;
}
static struct k3_keeper_msg message(enum k3_keeper_op op, const char *name, uint64_t len_bytes)
{
    struct k3_keeper_msg m = { .magic = K3_KEEPER_MAGIC, .version = K3_KEEPER_VERSION, .op = op,
                               .len_bytes = len_bytes };

    snprintf(m.name, sizeof(m.name), "%s", name);
    return m;
}
static bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }
static bool same_file(int a, int b)
{
    struct stat x, y;

    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

/* ---- memfds ---- */

static void memfd_segment(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_seg s, t;
    struct k3_data_place at;
    struct stat st;
    int fd;

    (void)state;
    s = made("trunkdata", 4 * MIB);
    assert_int_equal(fstat(s.fd, &st), 0);
    assert_true((uint64_t)st.st_blocks * 512 >= 4 * MIB); /* reserved */
    assert_int_equal(ftruncate(s.fd, 0), -1);             /* nobody can take its pages away */
    assert_int_equal(ftruncate(s.fd, 8 * MIB), -1);
    s.base[0] = 1;
    s.base[4 * MIB - 1] = 2;
    assert_int_equal(k3_seg_renew(&s, 2 * MIB, 2 * MIB, &err), 0); /* a seal does not forbid that */
    assert_int_equal(s.base[0], 1);
    assert_int_equal(s.base[4 * MIB - 1], 0);

    k3_data_place(&at, &s);
    fd = dup(s.fd);
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", fd, 4 * MIB, false, &err), 0);
    assert_int_equal(t.base[0], 1);
    assert_int_equal(t.from, K3_MEM_MEMFD);
    assert_true(k3_data_is_at(&t, &at));
    k3_seg_close(&t);
    assert_false(is_open(fd));
    assert_false(k3_data_is_at(&t, &at));
    t = made("trunkdata", 4 * MIB);
    assert_false(k3_data_is_at(&t, &at)); /* same name, another one */
    k3_seg_close(&t);
    at.from = K3_MEM_SHM;
    assert_false(k3_data_is_at(&s, &at));
    k3_seg_close(&s);
}

static void what_is_no_segment(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_seg s, t;
    int fd;

    (void)state;
    fd = open("/dev/null", O_RDWR);
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", fd, 4096, false, &err), -EPROTO);
    assert_false(is_open(fd));
    fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 8192), 0);
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", fd, 4096, false, &err), -EPROTO);
    assert_false(is_open(fd));
    s = made("trunkdata", 8192);
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", dup(s.fd), 8193, false, &err), -EPROTO);
    assert_non_null(strstr(err.text, "8193"));
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", dup(s.fd), 0, false, &err), -EPROTO);
    assert_int_equal(k3_seg_adopt(&t, INSTANCE, "trunkdata", dup(s.fd), UINT64_MAX, false, &err), -EPROTO);
    k3_seg_close(&s);
}

/* More than the machine has: refused by name before a page is taken. */
static void more_than_there_is(void **state)
{
    struct k3_err err = K3_ERR_INIT;
    struct k3_seg s;

    (void)state;
    assert_int_equal(k3_seg_create_from(&s, INSTANCE, "trunkdata", (uint64_t)1 << 50, K3_MEM_MEMFD, -1, &err), -ENOMEM);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "of memory are left ("));
    assert_non_null(strstr(err.text, "--trunk-gb"));
    assert_int_equal(s.fd, -1);
}

static uint64_t free_huge_pages(void)
{
    unsigned long n = 0;
    FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "r");

    if (f) {
        if (fscanf(f, "%lu", &n) != 1)
            n = 0;
        fclose(f);
    }
    return n;
}

static void huge_page_segment(void **state)
{
    struct k3_mem_opts o = { "hugetlb", K3_NODE_ANY };
    struct k3_err err = K3_ERR_INIT;
    struct k3_mem m;
    struct k3_seg s;
    uint64_t len = 3 * MIB; /* not whole pages */

    (void)state;
    assert_int_equal(k3_mem_open(&m, &o, &err), 0);
    if (free_huge_pages() < 2) { /* then it is a memfd, and it says why */
        assert_true(k3_seg_create_from(&s, INSTANCE, "expertdata", len, K3_MEM_HUGETLB, -1, &err) < 0);
        assert_int_equal(k3_data_create(&m, &s, len, &err), 0);
        assert_int_equal(s.from, K3_MEM_MEMFD);
        assert_string_not_equal(m.fallback, "");
        k3_seg_close(&s);
        return;
    }
    assert_int_equal(k3_data_create(&m, &s, len, &err), 0);
    assert_int_equal(s.from, K3_MEM_HUGETLB);
    assert_string_equal(m.fallback, "");
    assert_int_equal(s.len_bytes, len);
    memset(s.base, 0xaa, len);
    assert_true(k3_seg_collapse(s.base, len) >= 2 * MIB); /* counted as huge */
    /* Whole pages can be renewed, parts cannot. */
    assert_int_equal(k3_seg_renew(&s, 0, 4096, &err), -ENOTSUP);
    assert_int_equal(s.base[0], 0xaa);
    assert_int_equal(k3_seg_renew(&s, 0, 2 * MIB, &err), 0);
    assert_int_equal(s.base[0], 0);
    assert_int_equal(s.base[2 * MIB], 0xaa);
    k3_seg_close(&s);
    assert_true(free_huge_pages() >= 2); /* unmapped and given back */
}

/* ---- what k3-keeper keeps ---- */

static int answer(struct k3_keep *k, enum k3_keeper_op op, const char *name, uint64_t len_bytes, int fd, uint64_t now,
                  int *out)
{
    struct k3_keeper_msg m = message(op, name, len_bytes);
    int o = k3_keep_answer(k, &m, fd, now);

    if (out)
        *out = o;
    else
        assert_int_equal(o, -1);
    assert_int_equal(m.op, op);
    if (o >= 0)
        assert_int_equal(m.len_bytes, 4096);
    return m.status;
}

static void store_fetch_drop(void **state)
{
    struct k3_keep k = { .settled_ns = 100 };
    struct k3_seg a = made("trunkdata", 4096), b = made("trunkdata", 4096);
    int fd = dup(a.fd), again = dup(b.fd), out;

    (void)state;
    /* Not there yet; and later: not there. */
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 99, NULL), -EAGAIN);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 100, NULL), -ENOENT);
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4096, fd, 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 0, &out), 0);
    assert_true(same_file(out, a.fd));
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "expertdata", 0, -1, 100, NULL), -ENOENT);
    /* A guest never replaces what the owner stored; the owner does. */
    assert_int_equal(answer(&k, K3_KEEPER_STORE_ABSENT, "trunkdata", 4096, dup(b.fd), 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 0, &out), 0);
    assert_true(same_file(out, a.fd));
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4096, again, 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 0, &out), 0);
    assert_true(same_file(out, b.fd));
    assert_false(is_open(fd)); /* the first one is let go */
    assert_int_equal(answer(&k, K3_KEEPER_DROP, "trunkdata", 0, -1, 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_DROP, "trunkdata", 0, -1, 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 100, NULL), -ENOENT);
    assert_false(is_open(again));
    assert_int_equal(answer(&k, K3_KEEPER_STORE_ABSENT, "trunkdata", 4096, dup(b.fd), 0, NULL), 0);
    assert_int_equal(answer(&k, K3_KEEPER_FETCH, "trunkdata", 0, -1, 0, &out), 0);
    k3_keep_close(&k);
    assert_false(is_open(out));
    k3_seg_close(&a);
    k3_seg_close(&b);
}

static void what_is_not_kept(void **state)
{
    struct k3_keep k = { .settled_ns = 0 };
    struct k3_seg a = made("trunkdata", 4096);
    int fd = open("/dev/null", O_RDONLY);
    char name[8] = "a";

    (void)state;
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4096, -1, 0, NULL), -EINVAL);
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4096, fd, 0, NULL), -EINVAL);
    assert_false(is_open(fd));
    fd = dup(a.fd);
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4097, fd, 0, NULL), -EINVAL); /* longer than it is */
    assert_false(is_open(fd));
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 0, dup(a.fd), 0, NULL), -EINVAL);
    fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(answer(&k, K3_KEEPER_STORE, "trunkdata", 4096, fd, 0, NULL), -EINVAL);
    assert_false(is_open(fd));
    fd = dup(a.fd); /* nobody asked for it */
    assert_int_equal(answer(&k, K3_KEEPER_DROP, "trunkdata", 0, fd, 0, NULL), 0);
    assert_false(is_open(fd));
    for (int i = 0; i < K3_KEEPER_SEGS; i++, name[0]++)
        assert_int_equal(answer(&k, K3_KEEPER_STORE, name, 4096, dup(a.fd), 0, NULL), 0);
    fd = dup(a.fd);
    assert_int_equal(answer(&k, K3_KEEPER_STORE, name, 4096, fd, 0, NULL), -ENOSPC);
    assert_false(is_open(fd));
    k3_keep_close(&k);
    k3_seg_close(&a);
}

/* ---- messages ---- */

static void messages(void **state)
{
    struct k3_keeper_msg m = message(K3_KEEPER_STORE, "trunkdata", 4096), got, bad;
    int s[2], fd, null = open("/dev/null", O_RDONLY);

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, s), 0);
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), -EAGAIN);
    assert_int_equal(k3_keeper_send(s[0], &m, null), 0);
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), 0);
    assert_memory_equal(&got, &m, sizeof(m));
    assert_true(same_file(fd, null) && fd != null);
    assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
    close(fd);
    assert_int_equal(k3_keeper_send(s[0], &m, -1), 0);
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), 0);
    assert_int_equal(fd, -1);

    assert_int_equal(write(s[0], &m, sizeof(m) - 1), sizeof(m) - 1); /* short */
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), -EPROTO);
    for (int i = 0; i < 7; i++) {
        bad = m;
        switch (i) {
        case 0: bad.magic++; break;
        case 1: bad.version++; break;
        case 2: bad.op = 0; break;
        case 3: bad.op = K3_KEEPER_DROP + 1; break;
        case 4: bad.name[0] = 0; break;
        case 5: memset(bad.name, 'a', sizeof(bad.name)); break;
        case 6: bad.name[20] = 'x'; break; /* after the end */
        }
        assert_int_equal(k3_keeper_send(s[0], &bad, null), 0);
        assert_int_equal(k3_keeper_recv(s[1], &got, &fd), -EPROTO);
        assert_int_equal(fd, -1); /* and what came with it is closed */
    }
    strcpy(bad.name, "../x");
    assert_int_equal(k3_keeper_check(&bad), -EPROTO);
    close(s[0]);
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), -EPIPE);
    close(s[1]);
    close(null);
}

/* Two descriptors where one is due: both are closed. */
static void two_descriptors(void **state)
{
    struct k3_keeper_msg m = message(K3_KEEPER_STORE, "trunkdata", 4096), got;
    struct iovec v = { &m, sizeof(m) };
    union { struct cmsghdr head; char space[CMSG_SPACE(2 * sizeof(int))]; } c = { .space = { 0 } };
    struct msghdr h = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof(c.space) };
    int s[2], fd, two[2] = { 0, 1 }, before, after;

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s), 0);
    c.head.cmsg_level = SOL_SOCKET;
    c.head.cmsg_type = SCM_RIGHTS;
    c.head.cmsg_len = CMSG_LEN(sizeof(two));
    memcpy(CMSG_DATA(&c.head), two, sizeof(two));
    before = dup(0);
    close(before);
    assert_int_equal(sendmsg(s[0], &h, 0), sizeof(m));
    assert_int_equal(k3_keeper_recv(s[1], &got, &fd), -EPROTO);
    after = dup(0);
    assert_int_equal(after, before); /* none is left open */
    close(after);
    close(s[0]);
    close(s[1]);
}

/* ---- with a keeper that lives and dies ---- */

static void keeper_process(void)
{
    struct k3_keeper k = { .opt = K3_DAEMON_OPTS_INIT, .lock = PTHREAD_MUTEX_INITIALIZER };
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nobody behind */
    k.opt.instance = INSTANCE;
    k.opt.log_level = "error";
    rc = k3_keeper_open(&k, NULL);
    if (rc == 0)
        rc = k3_keeper_serve(&k, NULL);
    k3_keeper_close(&k);
    _exit(rc == 0 ? 0 : 1);
}
static pid_t start_keeper(void)
{
    pid_t pid = fork();

    if (pid == 0)
        keeper_process();
    for (int i = 0; i < 500; i++) { /* until it answers */
        if (k3_keeper_drop(rundir, "nothing") == 0)
            return pid;
        nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    }
    fail_msg("the keeper does not answer");
    return pid;
}
static void end_keeper(pid_t pid, int sig)
{
    int status;

    kill(pid, sig);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(sig == SIGKILL ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
static int fetch_soon(int *fd, uint64_t *len) /* the guards need a moment */
{
    int rc = -ENOENT;

    for (int i = 0; i < 500 && rc < 0; i++) {
        rc = k3_keeper_fetch(rundir, "trunkdata", fd, len);
        if (rc < 0)
            nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    }
    return rc;
}

static void life_of_a_keeper(void **state)
{
    struct k3_mem_opts o = { "memfd", K3_NODE_ANY };
    struct k3_data_place at;
    struct k3_guard *guest = NULL;
    struct k3_err err = K3_ERR_INIT;
    struct k3_mem owner, next;
    struct k3_seg s, r, t;
    uint64_t len;
    struct stat st;
    char path[200];
    pid_t pid;
    int fd;

    (void)state;
    assert_int_equal(k3_keeper_fetch(rundir, "trunkdata", &fd, &len), -ECONNREFUSED);
    pid = start_keeper();
    snprintf(path, sizeof(path), "%s/" K3_KEEPER_SOCK, rundir);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);

    /* The owner makes one, the reader finds it, and only the one that it is told of. */
    assert_int_equal(k3_mem_open(&owner, &o, &err), 0);
    k3_mem_name(&owner, INSTANCE, rundir, "trunkdata");
    assert_int_equal(k3_data_take(&owner, &s, &err), -ENOENT);
    assert_int_equal(k3_data_create(&owner, &s, 4 * MIB, &err), 0);
    strcpy((char *)s.base, "mine");
    k3_data_place(&at, &s);
    assert_int_equal(k3_data_open(&r, INSTANCE, rundir, "trunkdata", &at, &err), -ENOENT);
    assert_int_equal(k3_data_publish(&owner, &s, &err), 0);
    at.ino++;
    assert_int_equal(k3_data_open(&r, INSTANCE, rundir, "trunkdata", &at, &err), -ENOENT);
    at.ino--;
    assert_int_equal(k3_data_open(&r, INSTANCE, rundir, "trunkdata", &at, &err), 0);
    assert_string_equal((char *)r.base, "mine");

    /* The keeper dies: the owner stores it again. */
    end_keeper(pid, SIGKILL);
    assert_int_equal(k3_data_open(&t, INSTANCE, rundir, "trunkdata", &at, &err), -ENOENT);
    pid = start_keeper();
    assert_int_equal(fetch_soon(&fd, &len), 0);
    assert_true(same_file(fd, s.fd));
    assert_int_equal(len, 4 * MIB);
    close(fd);

    /* Owner and keeper die, the reader lives: the next owner finds it. */
    assert_int_equal(k3_guard_open(&guest, rundir, &r, "trunkdata", false, &err), 0);
    k3_mem_close(&owner); /* as death does: nothing is dropped */
    k3_seg_close(&s);
    end_keeper(pid, SIGKILL);
    pid = start_keeper();
    assert_int_equal(k3_mem_open(&next, &o, &err), 0);
    k3_mem_name(&next, INSTANCE, rundir, "trunkdata");
    assert_int_equal(k3_data_take(&next, &s, &err), 0);
    assert_string_equal((char *)s.base, "mine");
    assert_true(k3_data_is_at(&s, &at));
    assert_int_equal(k3_data_guard(&next, &s, &err), 0);

    /* A new one replaces it; the guest does not bring the old one back. */
    k3_seg_close(&s);
    assert_int_equal(k3_data_create(&next, &s, 4 * MIB, &err), 0);
    assert_int_equal(k3_data_publish(&next, &s, &err), 0);
    assert_int_equal(k3_data_open(&t, INSTANCE, rundir, "trunkdata", &at, &err), -ENOENT);
    k3_data_place(&at, &s);
    assert_int_equal(k3_data_open(&t, INSTANCE, rundir, "trunkdata", &at, &err), 0);
    k3_seg_close(&t);
    k3_guard_close(guest);

    /* An owner that leaves takes it along. */
    k3_data_drop(&next);
    k3_seg_close(&s);
    k3_seg_close(&r);
    nanosleep(&(struct timespec){ 1, 0 }, NULL); /* "not yet" is over */
    assert_int_equal(k3_keeper_fetch(rundir, "trunkdata", &fd, &len), -ENOENT);

    /* One that was asked for shm lets go of what a predecessor left here. */
    s = made("trunkdata", 4096);
    assert_int_equal(k3_keeper_store(rundir, &s, "trunkdata", false), 0);
    k3_seg_close(&s);
    o.from = "shm";
    assert_int_equal(k3_mem_open(&owner, &o, &err), 0);
    k3_mem_name(&owner, INSTANCE, rundir, "trunkdata");
    assert_int_equal(k3_data_take(&owner, &s, &err), -ENOENT);
    assert_int_equal(k3_keeper_fetch(rundir, "trunkdata", &fd, &len), -ENOENT);
    end_keeper(pid, SIGTERM);
    assert_int_equal(access(path, F_OK), -1);
}

/* A keeper that is stopped, or that speaks nonsense, holds nobody up for long and gives nothing. */
static void a_stopped_keeper(void **state)
{
    pid_t pid = start_keeper();
    uint64_t len;
    int fd;

    (void)state;
    kill(pid, SIGSTOP);
    assert_int_equal(k3_keeper_fetch(rundir, "trunkdata", &fd, &len), -ECONNREFUSED);
    kill(pid, SIGCONT);
    end_keeper(pid, SIGTERM);
}

static void options_are_checked(void **state)
{
    struct k3_mem_opts o = { "nvram", K3_NODE_ANY };
    struct k3_err err = K3_ERR_INIT;
    struct k3_mem m;

    (void)state;
    assert_int_equal(k3_mem_open(&m, &o, &err), -EINVAL);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_non_null(strstr(err.text, "must be shm, memfd or hugetlb"));
    o = (struct k3_mem_opts){ "shm", 1000 };
    assert_int_equal(k3_mem_open(&m, &o, &err), -EINVAL);
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
    assert_string_equal(strchr(err.text, ':'), ": there is no such node; there is 0");
}

static void swap_of_a_range(void **state)
{
    static const char smaps[] = "7f0000000000-7f0000200000 rw-s 00000000 00:01 3 /memfd:x (deleted)\n"
                                "Rss: 2048 kB\nSwap: 12 kB\nSwapPss: 5 kB\n"
                                "7f0000200000-7f0000400000 rw-s 00000000 00:01 3 /memfd:x (deleted)\n"
                                "Swap:               30 kB\nLocked: 7 kB\n"
                                "7f0000600000-7f0000800000 rw-p 00000000 00:00 0 \n"
                                "Swap: 500 kB\nSwap: nonsense\nSwap: 18446744073709551615 kB\n";
    FILE *f = fmemopen((void *)(uintptr_t)smaps, sizeof(smaps) - 1, "r");

    (void)state;
    assert_int_equal(k3_smaps_sum(f, 0x7f0000000000, 0x400000, "Swap:"), 42 * 1024);
    rewind(f);
    assert_int_equal(k3_smaps_sum(f, 0x7f0000200000, 1, "Swap:"), 30 * 1024);
    rewind(f);
    assert_int_equal(k3_smaps_sum(f, 0x7f0000600000, 4096, "Swap:"), 500 * 1024);
    rewind(f);
    assert_int_equal(k3_smaps_sum(f, 0x7f0000400000, 0x200000, "Swap:"), 0);
    fclose(f);
}

static int set_up(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/k3-keeper-test-XXXXXX");
    if (!mkdtemp(dir) || setenv("XDG_RUNTIME_DIR", dir, 1) != 0)
        return -1;
    return k3_rundir(rundir, sizeof(rundir), INSTANCE, true, NULL);
}
static int tear_down(void **state)
{
    char command[200];

    (void)state;
    k3_seg_unlink(INSTANCE, "k3-keeper.stats");
    snprintf(command, sizeof(command), "rm -rf %s", dir);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memfd_segment),    cmocka_unit_test(what_is_no_segment),
        cmocka_unit_test(more_than_there_is), cmocka_unit_test(huge_page_segment),
        cmocka_unit_test(store_fetch_drop), cmocka_unit_test(what_is_not_kept),
        cmocka_unit_test(messages),         cmocka_unit_test(two_descriptors),
        cmocka_unit_test(life_of_a_keeper), cmocka_unit_test(a_stopped_keeper),
        cmocka_unit_test(options_are_checked), cmocka_unit_test(swap_of_a_range),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
