// Keeps moving its memory to addresses where other memory has just been, and prints how many words
// were wrong. With children, they do this instead, while the end of their parent makes the pager
// fetch all their pages at once. Usage: nomad MIB CHILDREN
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PARTS = 32, ROUNDS = 3000 };

static size_t part_bytes;
static char *parts[PARTS];

static uint64_t word(int part, size_t at) { return ((uint64_t)(part + 1) << 32 | at) * 0x9e3779b97f4a7c15u; }

static char *map(void) {
    char *got = mmap(0, part_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) perror("mmap"), exit(3);
    return got;
}

static long move_about(void) {
    for (int round = 0; round < ROUNDS; round++) {
        int part = round % PARTS;
        char *to = map();
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        char *got = mremap(parts[part], part_bytes, part_bytes, flags, to);
        if (got != to) perror("mremap"), exit(3);
        parts[part] = to;
    }
    long wrong = 0;
    for (int part = 0; part < PARTS; part++)
        for (size_t at = 0; at < part_bytes; at += PAGE) wrong += *(uint64_t *)(parts[part] + at) != word(part, at);
    return wrong;
}

int main(int count, char **words) {
    if (count < 3) return 64;
    part_bytes = ((size_t)atoi(words[1]) << 20) / PARTS;
    for (int part = 0; part < PARTS; part++) {
        parts[part] = map();
        for (size_t at = 0; at < part_bytes; at += PAGE) *(uint64_t *)(parts[part] + at) = word(part, at);
    }
    int children = atoi(words[2]);
    for (int child = 0; child < children; child++)
        if (fork() == 0) {
            printf("%ld wrong\n", move_about());
            return 0;
        }
    if (children == 0) printf("%ld wrong\n", move_about());
    return 0;
}
