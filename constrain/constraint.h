/* constrain/constraint.h: which ids may come next in an answer in K3's chat format (spec/text.md 3.1, 3.9), so that its response
 * is a JSON value of a grammar, or so that it holds a call of a tool.
 *
 * The channels of a constrained answer, and what leads from one to the next (a tag is a marker, text, SEP):
 *
 *   THINK         any text                     close(think)     -> BETWEEN
 *   BETWEEN       nothing                      open(response)   -> RESPONSE
 *   RESPONSE      the JSON value; without a format any text
 *                                              close(response)  -> AFTER      the value is whole; or nothing has come and tools
 *                                                                             may be called: then a call must follow
 *   AFTER         nothing                      open(tools)      -> TOOLS      tools may be called
 *                                              close(message)   -> ENDED      no call is due
 *   TOOLS         nothing                      open(call tool="NAME" index="N") -> CALL   NAME is declared, N counts from 1
 *                                              close(tools)     -> AFTER_TOOLS            after one call
 *   CALL          nothing                      open(argument key="KEY" type="TYPE") -> VALUE
 *                                              close(call)      -> TOOLS
 *   VALUE         any text                     close(argument)  -> CALL
 *   AFTER_TOOLS   nothing                      close(message)   -> ENDED
 *   ENDED         <|end_of_msg|> or [EOS], which ends the answer
 *
 * Text is ids below the number of ranks; every id that is not named here is not allowed, wherever it stands.  So an answer ends by
 * one of the two stop ids only when it is whole; max_tokens may still cut it. */
#ifndef K3_CONSTRAIN_CONSTRAINT_H
#define K3_CONSTRAIN_CONSTRAINT_H

#include <cjson/cJSON.h>

#include "constrain/machine.h"

struct k3_constraint;

/* From the member "constraint" of a submit:
 *   start      "think" or "response": the channel that the prompt leaves open
 *   control    {"eos","end_of_msg","open","close","sep"}: ids
 *   format     "json_object" or "json_schema"; may be absent
 *   schema     of json_schema: its text
 *   tools      names of the tools that may be called; absent: none
 *   must_call  true: the answer does not end before one call
 *   one_call   true: and none after it
 * v is borrowed and must outlive it.  Refused (exit 2): anything else, and a schema that k3_grammar_schema refuses.  On success *out is the
 * caller's; k3_constraint_free accepts NULL. */
int k3_constraint_new(struct k3_constraint **out, const cJSON *spec, const struct k3_vocab *v, uint32_t n_vocab, struct k3_err *err);
void k3_constraint_free(struct k3_constraint *c);
/* What it may come to hold. */
uint64_t k3_constraint_bytes(const struct k3_constraint *c);

/* Sets the bit of every id that may come next; the others of n_vocab bits are cleared.  0 or -ENOMEM. */
int k3_constraint_mask(const struct k3_constraint *c, struct k3_walk *w, uint64_t *allowed);
/* The id has come: 1; 0 and nothing has changed: it is not allowed here; -ENOMEM. */
int k3_constraint_take(struct k3_constraint *c, struct k3_walk *w, uint32_t id);

#endif
