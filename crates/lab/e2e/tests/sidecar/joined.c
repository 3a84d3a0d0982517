// Threads that end after their descriptors have not been touched for long. Joining them must
// return.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 8, PAGE = 4096, BYTES = 64 << 20, ROUNDS = 3 };
static volatile int is_over;

// Makes a system call without touching the C library's memory, as errno and cancellation would.
static long raw(long number, long first, long second) {
#if defined(__x86_64__)
    long answer;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(number), "D"(first), "S"(second)
                     : "rcx", "r11", "memory");
    return answer;
#else
    return syscall(number, first, second);
#endif
}

__attribute__((noinline)) static void wait_and_end(volatile char *below) {
    static const struct timespec step = {0, 1000000};
    below[0] = 0;
    while (!is_over) raw(SYS_nanosleep, (long)&step, 0);
    raw(SYS_exit, 0, 0);
}

// The descriptor lies above the stack. Its page is not touched any more.
static void *work(void *nothing) {
    volatile char away[4 * PAGE];
    wait_and_end(away);
    return nothing;
}

int main(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], 0, work, 0)) return 2;
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (int round = 0; round < ROUNDS; round++)
        for (size_t at = 0; at < BYTES; at += PAGE) memory[at] += 1;
    is_over = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
    long wrong = 0;
    for (size_t at = 0; at < BYTES; at += PAGE) wrong += memory[at] != ROUNDS;
    printf("joined, %ld wrong\n", wrong);
}
