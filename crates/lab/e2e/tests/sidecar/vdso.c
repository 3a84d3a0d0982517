// A program that unmaps or moves its vDSO, before it fills memory and so gets a sidecar (unmap,
// move), or after (late-unmap, late-move), or keeps it (stay). It never asks for the time.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, BYTES = 96 << 20 };

static uint64_t *word(char *memory, size_t page) { return (uint64_t *)(memory + page * PAGE); }

static char *fill(void) {
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(2);
    for (size_t page = 0; page < BYTES / PAGE; page++) *word(memory, page) = page * 31 + 7;
    return memory;
}

static long wrong_in(char *memory) {
    long wrong = 0;
    for (size_t page = 0; page < BYTES / PAGE; page++) wrong += *word(memory, page) != page * 31 + 7;
    return wrong;
}

static void leave_vdso(int moves) {
    char line[256];
    unsigned long start = 0, end = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "[vdso]")) sscanf(line, "%lx-%lx", &start, &end);
    if (maps) fclose(maps);
    size_t bytes = end - start;
    if (!bytes) exit(3);
    if (!moves) {
        if (munmap((void *)start, bytes)) exit(4);
        return;
    }
    char *there = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int how = MREMAP_MAYMOVE | MREMAP_FIXED;
    if (mremap((void *)start, bytes, bytes, how, there) == MAP_FAILED) exit(5);
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    int is_late = !strncmp(mode, "late-", 5), moves = strstr(mode, "move") != 0;
    char *early = is_late ? fill() : 0;
    if (strcmp(mode, "stay")) leave_vdso(moves);
    char *memory = fill();
    long wrong = wrong_in(memory) + (early ? wrong_in(early) : 0);
    printf("%s: %ld wrong\n", mode, wrong);
    return 0;
}
