// Memory with known contents, and threads that wait in known places: held MIB
// Prints "ready" when all memory is filled, and "checked, N wrong" on SIGUSR1. SIGTERM ends it.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t *held_words;
size_t held_count;

static uint64_t word(size_t index) { return (index + 1) * 0x9e3779b97f4a7c15ul; }

void __attribute__((noinline)) waiting_thread(void) {
    for (;;) pause();
}

static void *work(void *argument) {
    waiting_thread();
    return argument;
}

void __attribute__((noinline)) resting_main(sigset_t *waited) {
    for (;;) {
        int number;
        sigwait(waited, &number);
        if (number == SIGTERM) exit(0);
        size_t wrong = 0;
        for (size_t i = 0; i < held_count; i++) wrong += held_words[i] != word(i);
        printf("checked, %zu wrong\n", wrong);
        fflush(stdout);
    }
}

int main(int count, char **words) {
    if (count < 2) return 64;
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    sigaddset(&waited, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &waited, 0);
    size_t bytes = (size_t)atoi(words[1]) << 20;
    held_count = bytes / sizeof *held_words;
    held_words = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (held_words == MAP_FAILED) return 1;
    for (size_t i = 0; i < held_count; i++) held_words[i] = word(i);
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, work, 0)) return 1;
    }
    puts("ready");
    fflush(stdout);
    resting_main(&waited);
}
