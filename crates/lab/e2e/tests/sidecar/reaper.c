// A subreaper, to which orphans below it are reparented, without children of its own: reaper MIB
// Prints "filled". On each SIGUSR1 it checks all pages and prints "N children M signals". SIGTERM
// ends it.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { PAGE = 4096 };

static volatile sig_atomic_t signals;

static void note(int signal) { signals += signal == SIGCHLD; }

int main(int count, char **words) {
    if (count != 2 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) return 64;
    struct sigaction action = {.sa_handler = note, .sa_flags = SA_RESTART};
    sigaction(SIGCHLD, &action, 0);
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    sigprocmask(SIG_BLOCK, &waited, 0);
    size_t pages = (size_t)atoi(words[1]) << 8;
    char *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < pages; page++) *(uint64_t *)(memory + page * PAGE) = page + 1;
    puts("filled");
    for (;;) {
        fflush(stdout);
        int got;
        sigwait(&waited, &got);
        int children = waitpid(-1, 0, WNOHANG) >= 0 || errno != ECHILD;
        for (size_t page = 0; page < pages; page++)
            if (*(uint64_t *)(memory + page * PAGE) != page + 1) return 9;
        printf("%d children %d signals\n", children, (int)signals);
    }
}
