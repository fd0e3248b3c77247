/* constrain/machine.h: a machine over bytes that accepts exactly the JSON texts of a grammar (grammar.h).
 *
 * It is in a set of threads: one for each way in which the bytes so far can be read (anyOf).  A thread is a mode and a
 * stack of frames, one for each array and object that is open.  Frames never change, so threads share them.
 *
 * From every state that is reached the text can be completed: a thread that has no way to an end is never made.  More than
 * K3_THREADS_MAX threads are not kept; what the others would have allowed is then not possible, and all that is, is valid. */
#ifndef K3_CONSTRAIN_MACHINE_H
#define K3_CONSTRAIN_MACHINE_H

#include "constrain/grammar.h"
#include "constrain/vocab.h"

#define K3_THREADS_MAX 64u
#define K3_FREE_KEYS_MAX 1024u           /* further members of all open objects together */
#define K3_MACHINE_STATE_BYTES (96u << 10) /* what a machine may hold between two tokens, besides its grammar */

/* Scratch of one thread of the program; grows to what the longest token needs. */
struct k3_walk;
int k3_walk_new(struct k3_walk **out, struct k3_err *err);
void k3_walk_free(struct k3_walk *w);

struct k3_machine;
/* g is borrowed.  At the beginning of the value. */
int k3_machine_new(struct k3_machine **out, const struct k3_grammar *g, struct k3_err *err);
void k3_machine_free(struct k3_machine *m);
size_t k3_machine_bytes(const struct k3_machine *m);

/* Takes bytes: 1; or 0 and nothing has changed: they are not allowed here; -ENOMEM. */
int k3_machine_feed(struct k3_machine *m, struct k3_walk *w, const char *bytes, size_t len_bytes);
/* The value is whole as it is (a number may still go on). */
bool k3_machine_complete(const struct k3_machine *m);
/* Sets the bit of every id whose bytes k3_machine_feed would take.  allowed: v->n bits at least.  0 or -ENOMEM. */
int k3_machine_mask(const struct k3_machine *m, struct k3_walk *w, const struct k3_vocab *v, uint64_t *allowed);

#endif
