#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>

#include "k3-expertd/expertd.h"

static void *bridge_main(void *arg)
{
    struct k3_bridge *b = arg;

    pthread_mutex_lock(&b->lock);
    for (;;) {
        _Atomic uint32_t *seq = b->seq, *sleepers = b->sleepers;
        uint32_t seen = b->seen;

        if (b->quit)
            break;
        if (!b->armed) {
            pthread_cond_wait(&b->moved, &b->lock);
            continue;
        }
        if (!b->give_up && k3_bell_news(seq) == seen) {
            pthread_mutex_unlock(&b->lock);
            k3_bell_wait(seq, sleepers, seen, K3_TICK_NS);
            pthread_mutex_lock(&b->lock);
            continue;
        }
        b->armed = false;
        pthread_cond_broadcast(&b->moved);
        (void)eventfd_write(b->efd, 1);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

int k3_bridge_open(struct k3_bridge *b, int efd, struct k3_err *err)
{
    int rc;

    *b = (struct k3_bridge){ .efd = efd };
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->moved, NULL);
    rc = pthread_create(&b->thread, NULL, bridge_main, b);
    if (rc)
        return k3_fail(err, -rc, "bridge thread: %s", strerror(rc));
    b->started = true;
    return 0;
}

void k3_bridge_arm(struct k3_bridge *b, _Atomic uint32_t *seq, _Atomic uint32_t *sleepers, uint32_t seen)
{
    pthread_mutex_lock(&b->lock);
    if (!b->armed) {
        b->seq = seq;
        b->sleepers = sleepers;
        b->seen = seen;
        b->armed = true;
        pthread_cond_broadcast(&b->moved);
    }
    pthread_mutex_unlock(&b->lock);
}

void k3_bridge_disarm(struct k3_bridge *b)
{
    if (!b->started)
        return;
    pthread_mutex_lock(&b->lock);
    b->give_up = true;
    while (b->armed)
        pthread_cond_wait(&b->moved, &b->lock);
    b->give_up = false;
    pthread_mutex_unlock(&b->lock);
}

void k3_bridge_close(struct k3_bridge *b)
{
    if (!b->started)
        return;
    pthread_mutex_lock(&b->lock);
    b->quit = true;
    pthread_cond_broadcast(&b->moved);
    pthread_mutex_unlock(&b->lock);
    pthread_join(b->thread, NULL);
    pthread_cond_destroy(&b->moved);
    pthread_mutex_destroy(&b->lock);
    b->started = false;
}
