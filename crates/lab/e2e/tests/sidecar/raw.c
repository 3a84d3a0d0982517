// Memory calls that bypass the C library. Every page is checked: raw MODE MIB
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#define PAGE 4096ul
#define WORDS (PAGE / 8)

static size_t pages;

static uint64_t word(size_t page, uint64_t version) {
    return (page + 1) * 0x9e3779b97f4a7c15ul + version;
}

static char *map(void *at, size_t length) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
    char *got = (char *)syscall(SYS_mmap, at, length, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (got == MAP_FAILED) exit(3);
    return got;
}

static void fill(char *at, uint64_t version) {
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = (uint64_t *)(at + page * PAGE);
        words[0] = words[WORDS - 1] = word(page, version);
    }
}

static long wrong(char *at, uint64_t version) {
    long count = 0;
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = (uint64_t *)(at + page * PAGE);
        count += words[0] != word(page, version) || words[WORDS - 1] != word(page, version);
    }
    return count;
}

static long not_zero(char *at) {
    long count = 0;
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = (uint64_t *)(at + page * PAGE);
        count += words[0] || words[WORDS - 1];
    }
    return count;
}

static long discard(char *at) {
    syscall(SYS_madvise, at, pages * PAGE, MADV_DONTNEED);
    long count = not_zero(at);
    fill(at, 2);
    return count + wrong(at, 2);
}

static long move(char *at) {
    char *to = map(0, pages * PAGE);
    size_t bytes = pages * PAGE;
    char *got = (char *)syscall(SYS_mremap, at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    return got != to || wrong(to, 1);
}

static long replace(char *at) {
    map(at, pages * PAGE);
    long count = not_zero(at);
    fill(at, 3);
    return count + wrong(at, 3);
}

// Unmaps memory and maps it again at the same address, while part of the old memory is far.
static long again(char *at) {
    long count = 0;
    for (int round = 0; round < 4; round++) {
        syscall(SYS_munmap, at, pages * PAGE);
        map(at, pages * PAGE);
        count += not_zero(at);
        fill(at, 10 + round);
        char *other = map(0, pages * PAGE / 4);
        memset(other, 1, pages * PAGE / 4);
        count += wrong(at, 10 + round);
        syscall(SYS_munmap, other, pages * PAGE / 4);
    }
    return count;
}

static long child(char *at) {
    long *of_child = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *of_child = -1;
    long pid = syscall(SYS_fork);
    if (!pid) {
        long count = wrong(at, 1);
        fill(at, 4);
        *of_child = count + wrong(at, 4);
        _exit(0);
    }
    waitpid(pid, 0, 0);
    return wrong(at, 1) + labs(*of_child);
}

int main(int count, char **words) {
    if (count < 3) return 64;
    const char *mode = words[1];
    pages = (size_t)atoi(words[2]) << 8;
    char *at = map(0, pages * PAGE);
    fill(at, 1);
    long bad = wrong(at, 1);
    if (!strcmp(mode, "discard")) bad += discard(at);
    if (!strcmp(mode, "move")) bad += move(at);
    if (!strcmp(mode, "replace")) bad += replace(at);
    if (!strcmp(mode, "again")) bad += again(at);
    if (!strcmp(mode, "fork")) bad += child(at);
    if (!strcmp(mode, "exec") && !bad) execl("/proc/self/exe", "raw", "plain", words[2], (char *)0);
    printf("%s: %ld wrong\n", mode, bad);
    return bad != 0;
}
