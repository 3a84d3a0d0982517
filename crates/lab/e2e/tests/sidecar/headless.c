// Fills memory in a second thread, waits until FILE exists if it is given, and makes PASSES passes
// over the memory, while the first thread has ended or stays: headless MIB PASSES ends|stays [FILE]
// Prints how long the passes took, in ms, the average resident memory meanwhile, in MiB, and how
// many pages were wrong.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static long bytes, passes;
static const char *gate;

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static long resident_mib(void) {
    long mapped = 0, pages = 0;
    FILE *file = fopen("/proc/thread-self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &mapped, &pages) != 2) exit(2);
    fclose(file);
    return pages >> 8;
}

static void *works(void *unused) {
    volatile long *memory =
        mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(3);
    for (long at = 0; at < bytes; at += 4096) memory[at / 8] = at * 31 + 7;
    printf("filled\n");
    fflush(stdout);
    while (gate && access(gate, F_OK)) usleep(1000);
    double began = now_ms();
    long sum = 0, looks = 0, wrong = 0;
    for (long pass = 0; pass < passes; pass++)
        for (long at = 0; at < bytes; at += 4096) {
            wrong += memory[at / 8] != at * 31 + 7;
            if (at % (1 << 20) == 0) sum += resident_mib(), looks++;
        }
    printf("took %.0f held %ld wrong %ld\n", now_ms() - began, sum / looks, wrong);
    exit(0);
}

int main(int count, char **words) {
    if (count < 4) return 1;
    bytes = atol(words[1]) << 20, passes = atol(words[2]), gate = words[4];
    pthread_t thread;
    if (pthread_create(&thread, 0, works, 0)) return 4;
    if (strcmp(words[3], "ends")) pthread_join(thread, 0);
    pthread_exit(0);
}
