/* ipc/members.h: what k3-run says of its members, in the run directory. */
#ifndef K3_IPC_MEMBERS_H
#define K3_IPC_MEMBERS_H

#include <stdbool.h>
#include <stddef.h>

/* True when k3-run has given the member up; *exit_status is what it left with. */
bool k3_member_given_up(const char *rundir, const char *daemon, int *exit_status);

/* The reason that a daemon gave last, from the log that k3-run keeps of it; "" when none. */
void k3_member_last_error(char *out, size_t len, const char *rundir, const char *daemon);

#endif
