/* constrain/machine_private.h: what a machine is made of (machine.h).
 *
 *   machine.c          the machine: bytes in, mask out
 *   machine_step.c     where a byte takes a thread
 *   machine_threads.c  sets of threads, and the memory of their frames
 *
 * The modes of a thread, and what takes it from one to the next:
 *
 *   VALUE      the first byte of a value of `node`           its kind's mode; ARRAY_FIRST, OBJECT_FIRST
 *   STRING     inside a string value                         its quote: the value is done
 *   NUMBER     inside a number                               anything that does not go on with it: done, and that byte again
 *   LITERAL    inside one of literal[a .. b)                 its last byte, or as for a number
 *   ARRAY_FIRST, OBJECT_FIRST   behind the bracket           the first item or key; the closing bracket
 *   KEY        behind a comma of an object                   a quote: DECLARED and FREE at the same time
 *   DECLARED   inside a key of property key_order[a .. b)    its quote: COLON
 *   FREE       inside a key that is none of these            its quote, if no earlier key is the same: COLON
 *   COLON      behind a key                                  a colon: VALUE
 *   AFTER      behind an item or member                      a comma: VALUE or KEY; the closing bracket: the value is done
 *   DONE       the whole value is done
 * A value that is done: AFTER of the frame around it, or DONE. */
#ifndef K3_CONSTRAIN_MACHINE_PRIVATE_H
#define K3_CONSTRAIN_MACHINE_PRIVATE_H

#include "constrain/machine.h"

enum mode {
    M_VALUE, M_STRING, M_NUMBER, M_LITERAL, M_ARRAY_FIRST, M_OBJECT_FIRST, M_KEY, M_DECLARED, M_FREE, M_COLON, M_AFTER, M_DONE
};
/* Where in a character of a string. */
enum { S_PLAIN, S_ESCAPE, S_HEX, S_LOW_ESCAPE, S_LOW_U, S_LOW_HEX, S_MORE };
/* Where in a number. */
enum { N_MINUS, N_ZERO, N_DIGITS, N_POINT, N_FRACTION, N_E, N_E_SIGN, N_EXPONENT };

struct key { const struct key *next; uint64_t hash; const struct key *copy; }; /* copy: see keep() */
struct frame {
    const struct frame *up, *copy;
    const struct key *keys; /* further members so far */
    uint32_t node;
    uint32_t n;             /* array: items that are done; object: the next property */
    uint16_t depth;         /* this one included */
    uint16_t n_keys;        /* of all frames from here up */
};
struct thread {
    const struct frame *top; /* NULL: no array or object is open */
    uint64_t hash;           /* FREE */
    uint32_t node;           /* VALUE, COLON: of the value; STRING, NUMBER, LITERAL: its own */
    uint32_t a, b;           /* STRING, FREE: a characters; NUMBER: a digits; LITERAL, DECLARED: range */
    uint32_t pos;            /* LITERAL, DECLARED: bytes so far */
    uint8_t mode, at;        /* at: S_ or N_ */
    uint8_t n_ws;            /* 0: no white space; 1: a space; from 2 on: a line end and that many less 2 */
    uint8_t left, low, high; /* S_MORE: bytes to come, bounds of the next; S_HEX: left, low = 1: behind d, 2: high surrogate */
};

/* Memory that is given back all at once, from a mark on. */
struct chunk { struct chunk *next; size_t len_bytes, used_bytes; max_align_t bytes[]; };
struct arena { struct chunk *first, *at; };
struct mark { struct chunk *at; size_t used_bytes; };

/* Sets of threads, one behind each byte. */
struct level { size_t first; uint32_t n; struct mark mark; };
struct k3_walk {
    const struct k3_grammar *g;
    struct arena arena;
    struct thread *thread;
    size_t cap_threads;
    struct level *level;
    size_t cap_levels;
    struct level *out; /* the set that a step fills */
    int rc;            /* no memory: everything from then on is not allowed */
};

struct k3_machine {
    const struct k3_grammar *g;
    struct thread thread[K3_THREADS_MAX];
    uint32_t n;
    struct arena kept, other; /* what the threads point to is in kept */
};

/* machine_threads.c */
void *k3_arena_take(struct arena *a, size_t n); /* NULL: no memory */
struct mark k3_arena_mark(const struct arena *a);
void k3_arena_release(struct arena *a, struct mark m);
void k3_arena_trim(struct arena *a); /* gives back what lies behind the last that was taken */
void k3_arena_free(struct arena *a);
size_t k3_arena_bytes(const struct arena *a);
/* Room for thread number n, level number n. */
bool k3_walk_threads(struct k3_walk *w, size_t n);
bool k3_walk_levels(struct k3_walk *w, size_t n);
/* Adds t to w->out, unless it is there. */
void k3_walk_put(struct k3_walk *w, const struct thread *t);
/* Copies f and all it stands on into a, each frame and key once, however many threads share it.  The originals remember their
 * copies: they must not be used afterwards.  NULL: no memory. */
const struct frame *k3_frame_keep(struct arena *a, const struct frame *f);

/* machine_step.c */
/* Adds to w->out where byte takes t. */
void k3_thread_step(struct k3_walk *w, const struct thread *t, uint8_t byte);
/* t may end here: it is a number or a literal that is whole. */
bool k3_thread_whole(const struct k3_grammar *g, const struct thread *t);

#endif
