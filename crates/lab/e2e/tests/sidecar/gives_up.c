// A program that drops privileges once its memory is filled: gives_up WHAT MIB
// WHAT is user, group, filter or root. Prints "filled". On SIGUSR1 it drops them and prints "given
// up"; on each SIGUSR2 it checks all pages and prints "checked N wrong". SIGTERM ends it.
#define _GNU_SOURCE
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { PAGE = 4096, NOBODY = 65534 };

static int give_up(const char *what) {
    if (!strcmp(what, "group")) return setgroups(0, 0) || setgid(NOBODY) || setuid(NOBODY);
    if (!strcmp(what, "user")) return setuid(NOBODY);
    if (!strcmp(what, "root")) return chroot("/proc") || chdir("/") || setuid(NOBODY);
    struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {.len = 1, .filter = all};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

int main(int count, char **words) {
    if (count != 3) return 64;
    size_t pages = (size_t)atoi(words[2]) << 8;
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    sigaddset(&waited, SIGUSR2);
    sigprocmask(SIG_BLOCK, &waited, 0);
    char *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < pages; page++) *(uint64_t *)(memory + page * PAGE) = page + 1;
    puts("filled");
    for (;;) {
        fflush(stdout);
        int got = 0;
        sigwait(&waited, &got);
        if (got == SIGUSR1) {
            if (give_up(words[1])) return 3;
            puts("given up");
            continue;
        }
        size_t wrong = 0;
        for (size_t page = 0; page < pages; page++) wrong += *(uint64_t *)(memory + page * PAGE) != page + 1;
        printf("checked %zu wrong\n", wrong);
    }
}
