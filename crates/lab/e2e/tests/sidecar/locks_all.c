// Locks all memory while most of it is far, reads it, writes it again, and unlocks it.
// Arguments: the flags of mlockall, and `first` if memory is to be locked before any is written,
// and to stay locked; then the number of farpool's mappings is printed. Exit code 77: mlockall is
// not allowed here.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16384 };

static uint64_t word_of(size_t page, uint64_t version) {
    return page * 0x9e3779b97f4a7c15u + version;
}

static void fill(uint8_t *memory, uint64_t version) {
    for (size_t page = 0; page < PAGES; page++)
        for (size_t at = 0; at < PAGE; at += 8)
            *(uint64_t *)(memory + page * PAGE + at) = word_of(page, version);
}

static size_t wrong(const uint8_t *memory, uint64_t version) {
    size_t pages = 0;
    for (size_t page = 0; page < PAGES; page++)
        for (size_t at = 0; at < PAGE; at += 8)
            if (*(const uint64_t *)(memory + page * PAGE + at) != word_of(page, version)) {
                pages++;
                break;
            }
    return pages;
}

static int stay_locked(uint8_t *memory, int flags) {
    if (mlockall(flags)) return 77;
    fill(memory, 1);
    sleep(3);
    size_t mappings = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        mappings += strstr(line, "farpool-sidecar") != NULL;
    size_t bad = wrong(memory, 1);
    printf("%zu mappings of farpool\n%zu wrong\n", mappings, bad);
    return bad != 0;
}

int main(int count, char **words) {
    int flags = count > 1 ? atoi(words[1]) : MCL_CURRENT;
    uint8_t *memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    if (count > 2) return stay_locked(memory, flags);
    size_t bad = 0;
    for (uint64_t round = 1; round <= 3; round++) {
        // Written twice, so that the second writes find most pages far.
        fill(memory, round - 1);
        fill(memory, round);
        if (mlockall(flags)) return 77;
        bad += wrong(memory, round);
        fill(memory, round + 10);
        if (munlockall()) return 1;
        bad += wrong(memory, round + 10);
    }
    printf("%zu wrong\n", bad);
    return bad != 0;
}
