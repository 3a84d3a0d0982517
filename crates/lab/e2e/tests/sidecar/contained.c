// Runs a command under a seccomp filter like a container's: contained plain|no-code COMMAND ...
// no-code: mprotect may not make memory executable.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
// The next statement applies to this number only.
#define ONLY(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1)
#define REFUSE BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

int main(int count, char **arguments) {
    struct sock_filter rules[] = {
        LOAD(nr),
        ONLY(SYS_mount), REFUSE,
        ONLY(SYS_umount2), REFUSE,
        ONLY(SYS_unshare), REFUSE,
        ONLY(SYS_setns), REFUSE,
        ONLY(SYS_bpf), REFUSE,
        ONLY(SYS_perf_event_open), REFUSE,
        ONLY(SYS_userfaultfd), REFUSE,
        ONLY(SYS_keyctl), REFUSE,
        ONLY(SYS_open_by_handle_at), REFUSE,
        // The rules up to here apply to both modes; `plain` ends here.
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 1, 0), ALLOW,
        LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1), REFUSE,
        ALLOW,
    };
    unsigned short all = sizeof rules / sizeof *rules;
    if (count < 3) return 64;
    if (strcmp(arguments[1], "no-code")) rules[all - 6] = (struct sock_filter)ALLOW;
    struct sock_fprog filter = {all, rules};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter)) {
        perror("seccomp");
        return 2;
    }
    execvp(arguments[2], arguments + 2);
    perror(arguments[2]);
    return 3;
}
