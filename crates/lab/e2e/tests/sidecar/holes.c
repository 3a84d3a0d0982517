// Unmaps memory and maps it again at the same address, while the rest of its memory is moved out:
// nothing else may have been mapped there meanwhile. Usage: holes MIB ROUNDS
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, HOLES = 16 };

static char *map(char *at, size_t bytes, int flags) {
    return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

int main(int count, char **words) {
    if (count < 3) return 64;
    size_t bytes = (size_t)atoi(words[1]) << 20, hole_bytes = 1 << 20;
    char *memory = map(0, bytes, 0), *holes[HOLES];
    for (int n = 0; n < HOLES; n++) holes[n] = map(0, hole_bytes, 0);
    long wrong = 0, taken = 0;
    uint64_t state = 1;
    for (long round = 1; round <= atol(words[2]); round++) {
        int n = round % HOLES;
        munmap(holes[n], hole_bytes);
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t page = (state >> 33) % (bytes / PAGE);
        uint64_t *word = (uint64_t *)(memory + page * PAGE);
        wrong += *word != 0 && *word != page + 1;
        *word = page + 1;
        if (map(holes[n], hole_bytes, MAP_FIXED_NOREPLACE) == MAP_FAILED) {
            taken += errno == EEXIST;
            holes[n] = map(0, hole_bytes, 0);
        }
        wrong += *(uint64_t *)(holes[n] + page % 256 * PAGE) != 0;
        *(uint64_t *)(holes[n] + page % 256 * PAGE) = round;
    }
    printf("%ld wrong, %ld taken\n", wrong, taken);
    return wrong || taken;
}
