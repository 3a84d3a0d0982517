// Forks on SIGUSR1 and prints how that ended. Every page of the child and of the child's child must
// hold what it held before; a process that finds a wrong page ends. Usage: births MIB [waits]; with
// `waits`, the child checks its pages after SIGUSR2, and has no child. Prints "ready", then "ended
// S T": the status of the child, and of its child (-1: unknown), and WRONG for a wrong word.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#define WORDS 512ul

static size_t pages;
static uint64_t *memory;
static int *grandchild;

static uint64_t word(size_t page) { return (page + 1) * 0x9e3779b97f4a7c15ul; }

static void check(const char *who, int backwards) {
    for (size_t n = 0; n < pages; n++) {
        size_t page = backwards ? pages - 1 - n : n;
        uint64_t *words = memory + page * WORDS;
        if (words[0] != word(page) || words[WORDS - 1] != word(page)) {
            dprintf(1, "WRONG: page %zu of the %s: %lx %lx\n", page, who, words[0], words[WORDS - 1]);
            _exit(9);
        }
    }
}

static int end_of(pid_t pid) {
    int status = -1;
    return waitpid(pid, &status, 0) == pid ? status : -1;
}

int main(int count, char **words) {
    if (count < 2) return 64;
    pages = (size_t)atoi(words[1]) << 8;
    grandchild = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memory = mmap(0, pages * WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || grandchild == MAP_FAILED) return 3;
    *grandchild = -1;
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    sigaddset(&waited, SIGUSR2);
    sigprocmask(SIG_BLOCK, &waited, 0);
    for (size_t page = 0; page < pages; page++) memory[page * WORDS] = memory[page * WORDS + WORDS - 1] = word(page);
    printf("ready\n");
    fflush(stdout);
    int signal;
    sigwait(&waited, &signal);
    pid_t child = fork();
    if (child == 0 && count > 2) {
        sigwait(&waited, &signal);
        check("child", 0);
        _exit(0);
    }
    if (child == 0) {
        pid_t below = fork();
        if (below == 0) check("child's child", 1), _exit(0);
        if (below > 0) check("child", 0), *grandchild = end_of(below);
        _exit(below < 0);
    }
    if (child < 0) return 4;
    int status = end_of(child);
    printf("ended %x %x\n", status, *grandchild);
    fflush(stdout);
    return status != 0;
}
