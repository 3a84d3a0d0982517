// Threads that keep changing and checking their parts of the memory: verify MIB THREADS
// Prints "ready" when all memory is filled. On SIGUSR1 it prints "checked" when every thread has
// begun and ended a pass over its part since. SIGTERM does the same, then prints "ends" and ends. A
// wrong word ends it at once with 9.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#define WORDS 512ul
#define MOST 16

static size_t pages_each;
static int threads;
static atomic_ulong passes[MOST];
static atomic_ulong asked[MOST];

static uint64_t word(size_t page, uint64_t version) {
    return (page + 1) * 0x9e3779b97f4a7c15ul ^ version;
}

static void *work(void *argument) {
    long own = (long)argument;
    size_t bytes = pages_each * WORDS * 8;
    uint64_t *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t version = 0;; version++) {
        for (size_t page = 0; page < pages_each; page++) {
            uint64_t *words = memory + page * WORDS;
            size_t middle = 1 + page % (WORDS - 2);
            uint64_t old = version ? word(page, version - 1 + own) : 0;
            if (words[0] != old || words[middle] != old || words[WORDS - 1] != old) {
                printf("WRONG: page %zu of thread %ld in pass %lu: %lx %lx %lx, not %lx\n", page, own,
                       (unsigned long)version, words[0], words[middle], words[WORDS - 1], old);
                fflush(stdout);
                _exit(9);
            }
            words[0] = words[middle] = words[WORDS - 1] = word(page, version + own);
        }
        atomic_fetch_add(&passes[own], 1);
    }
    return 0;
}

// Waits until every thread has ended `count` more passes. With 2, each has begun and ended one.
static void await_passes(unsigned long count) {
    for (int i = 0; i < threads; i++) asked[i] = atomic_load(&passes[i]) + count;
    for (int i = 0; i < threads; i++)
        while (atomic_load(&passes[i]) < asked[i]) usleep(1000);
}

int main(int count, char **words) {
    if (count < 3) return 64;
    threads = atoi(words[2]);
    if (threads < 1 || threads > MOST) return 64;
    pages_each = ((size_t)atoi(words[1]) << 8) / threads;
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    sigaddset(&waited, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &waited, 0);
    pthread_t thread;
    for (long i = 0; i < threads; i++) pthread_create(&thread, 0, work, (void *)i);
    await_passes(1);
    printf("ready\n");
    fflush(stdout);
    for (int signal = 0; signal != SIGTERM;) {
        sigwait(&waited, &signal);
        await_passes(2);
        printf("checked\n");
        fflush(stdout);
    }
    printf("ends\n");
    return 0;
}
