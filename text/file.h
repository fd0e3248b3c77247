/* text/file.h: reading a whole small file. */
#ifndef K3_TEXT_FILE_H
#define K3_TEXT_FILE_H

#include <stddef.h>

#include "ipc/err.h"
#include "text/buf.h"

/* Appends the file to out.  Refused (exit 2): a file that is not there, not a file, or larger than max_bytes.  A failed read
 * is -EIO. */
int k3_file_read(struct k3_buf *out, const char *path, size_t max_bytes, struct k3_err *err);
/* The same from an open descriptor (name for texts) until its end. */
int k3_file_read_fd(struct k3_buf *out, int fd, const char *name, size_t max_bytes, struct k3_err *err);

#endif
