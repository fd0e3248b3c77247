/* no_uring EPERM|ENOSYS PROGRAM ARGUMENT...: runs the program where io_uring's system calls give that error, as in
 * containers that forbid them (seccomp).  Exits with 77 where a filter cannot be installed. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int code = argc > 2 && strcmp(argv[1], "EPERM") == 0 ? EPERM : argc > 2 && strcmp(argv[1], "ENOSYS") == 0 ? ENOSYS : 0;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, SYS_io_uring_register, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)code),
    };
    struct sock_fprog program = { sizeof(filter) / sizeof(filter[0]), filter };

    if (!code) {
        fprintf(stderr, "usage: no_uring EPERM|ENOSYS PROGRAM ARGUMENT...\n");
        return 2;
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("no_uring: seccomp");
        return 77;
    }
    if (syscall(SYS_io_uring_setup, 1, NULL) != -1 || errno != code) {
        fprintf(stderr, "no_uring: io_uring_setup is not forbidden\n");
        return 1;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 1;
}
