// A parent with much memory that counts the signals and ends of its children. It has one child,
// also with much memory.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define BYTES (80l << 20)

static volatile sig_atomic_t heard;

static void hear(int signal) { heard += signal == SIGCHLD; }

static long use(int byte) {
    char *memory = memset(malloc(BYTES), byte, BYTES);
    long wrong = 0;
    for (long at = 0; at < BYTES; at += 512) wrong += memory[at] != byte;
    return wrong;
}

int main(void) {
    struct sigaction action = {.sa_handler = hear};
    sigaction(SIGCHLD, &action, 0);
    long wrong = use(3);
    int before = heard, strangers = 0, status = 0;
    pid_t child = fork();
    if (!child) _exit(use(4) != 0);
    for (pid_t ended; (ended = waitpid(-1, &status, __WALL)) != -1 || errno == EINTR;)
        strangers += ended != child && ended != -1;
    wrong += use(5);
    printf("%ld wrong, child %x, %d signals before, %d in all, %d strangers\n", wrong, status, before, (int)heard,
           strangers);
    return wrong || before || heard != 1 || strangers || status;
}
