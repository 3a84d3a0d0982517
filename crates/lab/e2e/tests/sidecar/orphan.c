// Forks and ends. The child, which outlives it, checks all inherited memory and writes the result
// to a file. Usage: orphan MIB DELAY_US FILE
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };

int main(int count, char **words) {
    if (count < 4) return 64;
    size_t pages = (size_t)atoi(words[1]) * 256;
    char *at = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < pages; page++) *(uint64_t *)(at + page * PAGE) = page * 7919 + 1;
    if (fork()) {
        usleep(atol(words[2]));
        _exit(0);
    }
    long wrong = 0;
    for (int round = 0; round < 2; round++)
        for (size_t page = 0; page < pages; page++)
            wrong += *(uint64_t *)(at + page * PAGE) != page * 7919 + 1;
    FILE *file = fopen(words[3], "w");
    if (!file) return 3;
    fprintf(file, "%ld wrong\n", wrong);
    return fclose(file) != 0;
}
