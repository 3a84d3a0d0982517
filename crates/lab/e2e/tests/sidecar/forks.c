// A tree of forked children, each of which checks inherited memory while it changes its own memory:
// drops, moves, unmaps and maps again, writes, forks, execs. Prints how many pages were wrong in
// total. Usage: forks MIB DEPTH SEED
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PARTS = 8 };

// A part of memory: its address, and the contents of its pages (0: zeros).
struct part { char *at; uint64_t mark; };

static struct part parts[PARTS];
static size_t part_pages;
static uint64_t state;
static long *wrong;

static uint64_t dice(uint64_t sides) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % sides;
}

static uint64_t word(uint64_t mark, size_t page) {
    return mark ? (mark << 32 | (page + 1)) * 0x9e3779b97f4a7c15u : 0;
}

static char *map(char *at) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
    char *got = mmap(at, part_pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (got == MAP_FAILED) perror("mmap"), exit(3);
    return got;
}

static void fill(struct part *part, uint64_t mark) {
    part->mark = mark;
    for (size_t page = 0; page < part_pages; page++) {
        uint64_t *words = (uint64_t *)(part->at + page * PAGE);
        words[0] = words[511] = word(mark, page);
    }
}

static void check(struct part *part) {
    size_t first = dice(part_pages);
    for (size_t n = 0; n < part_pages; n++) {
        size_t page = (first + n) % part_pages;
        uint64_t *words = (uint64_t *)(part->at + page * PAGE);
        if (words[0] != word(part->mark, page) || words[511] != word(part->mark, page)) {
            // Printed at once, as the process that prints the total may be killed.
            if (__atomic_fetch_add(wrong, 1, __ATOMIC_SEQ_CST) == 0)
                dprintf(1, "WRONG: page %zu of part %td, mark %lu, process %d below %d: %lx %lx\n", page, part - parts,
                        part->mark, getpid(), getppid(), words[0], words[511]);
        }
    }
}

static void change(struct part *part, uint64_t mark) {
    switch (dice(6)) {
    case 0:
        madvise(part->at, part_pages * PAGE, MADV_DONTNEED);
        part->mark = 0;
        break;
    case 1: {
        char *to = map(0);
        char *got = mremap(part->at, part_pages * PAGE, part_pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        if (got != to) perror("mremap"), exit(3);
        part->at = to;
        break;
    }
    case 2:
        munmap(part->at, part_pages * PAGE);
        map(part->at);
        part->mark = 0;
        break;
    case 3: map(part->at), part->mark = 0; break;
    case 4: fill(part, mark); break;
    default: check(part);
    }
}

static void live(int depth) {
    for (int step = 0; step < 6; step++) {
        pid_t children[2] = {0, 0};
        if (depth > 0 && dice(3) == 0)
            for (int n = 0; n < 2; n++) {
                children[n] = fork();
                if (children[n] < 0) perror("fork"), exit(3);
                if (children[n] == 0) {
                    state += getpid() * 7919 + n;
                    if (dice(4) == 0) execl("/bin/true", "true", (char *)0);
                    live(depth - 1);
                    _exit(0);
                }
            }
        change(&parts[dice(PARTS)], getpid() + 1000 * (step + 1));
        for (int n = 0; n < 2; n++) {
            int status = 0;
            if (children[n] && (waitpid(children[n], &status, 0) != children[n] || status)) {
                fprintf(stderr, "a child ended with %x\n", status);
                __atomic_fetch_add(wrong, 1 << 20, __ATOMIC_SEQ_CST);
            }
        }
    }
    for (int n = 0; n < PARTS; n++) check(&parts[n]);
}

int main(int count, char **words) {
    if (count < 4) return 64;
    part_pages = (size_t)atoi(words[1]) * 256 / PARTS;
    state = strtoull(words[3], 0, 10) * 0x9e3779b97f4a7c15u + 1;
    wrong = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int n = 0; n < PARTS; n++) parts[n].at = map(0), fill(&parts[n], n + 1);
    live(atoi(words[2]));
    printf("%ld wrong\n", *wrong);
    return *wrong != 0;
}
