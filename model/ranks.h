/* model/ranks.h: the bytes of every token, from tiktoken.model (spec/text.md 1.2). */
#ifndef K3_MODEL_RANKS_H
#define K3_MODEL_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/err.h"

#define K3_RANKS_FILE_MAX (1u << 30)
#define K3_TOKEN_BYTES_MAX 4096u /* the released vocabulary's longest has 256 */

/* Token i is (*bytes)[(*off)[i] .. (*off)[i + 1]).  *n must be 0.  The caller frees *bytes and *off in any case.  Refused (exit 2,
 * with the line of the file that is called name): what is not BASE64 RANK with ranks 0, 1, 2, ...; two tokens may be equal.
 * -ENOMEM. */
int k3_ranks_parse(char **bytes, uint32_t **off, uint32_t *n, const char *text, size_t len_bytes, const char *name,
                   struct k3_err *err);

#endif
