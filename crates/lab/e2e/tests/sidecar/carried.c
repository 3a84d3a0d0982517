// Far memory that is moved (mremap), to addresses for which no blade has room, or from addresses
// that stay mapped and are touched at once; far memory over which a mapping fails; and mappings
// that grow over memory that has just been unmapped: the kernel does not report the growth.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, BYTES = 48 << 20, SUPERPAGE = 16 << 20 };

// Aligned to a superpage, so that it takes no more of a quota than its size.
static char *reserve(int protection) {
    char *all = mmap(0, BYTES + SUPERPAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
    if (all == MAP_FAILED) exit(2);
    return (char *)(((uintptr_t)all + SUPERPAGE - 1) & ~(uintptr_t)(SUPERPAGE - 1));
}

static uint64_t *word(char *memory, size_t page) { return (uint64_t *)(memory + page * PAGE); }

static long wrong_in(char *memory, int is_empty) {
    long wrong = 0;
    for (size_t page = 0; page < BYTES / PAGE; page++)
        wrong += *word(memory, page) != (is_empty ? 0 : page + 1);
    return wrong;
}

// Maps more over the memory than the machine has. The kernel refuses that only after it has
// reported the unmapping of the memory.
static int fails(char *memory) {
    size_t too_much = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE * 2;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(memory, too_much, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) return 4;
    printf("%ld wrong\n", wrong_in(memory, 0));
    return 0;
}

static volatile int changes = 1;

// Keeps discarding its own memory.
static void *change(void *unused) {
    char *own = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) exit(2);
    while (changes)
        for (size_t at = 0; at < 1 << 20; at += 64 << 10) {
            own[at] = 1;
            madvise(own + at, PAGE, MADV_DONTNEED);
        }
    return unused;
}

static int fails_among_changes(char *memory) {
    pthread_t threads[6];
    for (int each = 0; each < 6; each++) pthread_create(&threads[each], 0, change, 0);
    int failed = 0;
    for (int each = 0; each < 5 && !failed; each++) failed = fails(memory);
    changes = 0;
    for (int each = 0; each < 6; each++) pthread_join(threads[each], 0);
    return failed;
}

// Memory whose upper half is unmapped and mapped again, by the process and by a child in turn.
static int regrows(void) {
    long wrong = 0;
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (int round = 0; round < 8; round++) {
        for (size_t page = 0; page < BYTES / PAGE; page++) *word(memory, page) = page + 1;
        pid_t child = round % 2 ? fork() : 0;
        if (!child) {
            if (mremap(memory, BYTES, BYTES / 2, 0) != memory) return 6;
            if (mremap(memory, BYTES / 2, BYTES, 0) != memory) return 7;
            for (size_t page = 0; page < BYTES / PAGE; page++)
                wrong += *word(memory, page) != (page < BYTES / 2 / PAGE ? page + 1 : 0);
            if (round % 2) _exit(wrong != 0);
        }
        int status = 0;
        if (child && waitpid(child, &status, 0) != child) return 5;
        wrong += status != 0;
    }
    printf("%ld wrong\n", wrong);
    return 0;
}

enum { PLACE = 8 << 20 };

// Maps memory at an address with nothing near it, and fills it.
static char *alone(int round, int flags) {
    char *at = (char *)0x200000000000 + round * ((uintptr_t)1 << 32);
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    char *memory = mmap(at, PLACE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) exit(2);
    usleep(60000);
    for (size_t page = 0; page < PLACE / PAGE; page++) *word(memory, page) = page + 1;
    return memory;
}

// Touches memory, so that all other memory is moved out.
static void squeeze(char *other) {
    for (int times = 0; times < 2; times++)
        for (size_t page = 0; page < BYTES / PAGE; page++) *word(other, page) = page + times;
}

// Memory grows over far memory while it is moved there, or, if it is a stack, over a part of it
// that was unmapped.
static int grows(char *other, int is_stack) {
    long wrong = 0;
    size_t half = PLACE / PAGE / 2;
    for (int round = 0; round < 8; round++) {
        char *place = alone(2 * round, is_stack ? MAP_GROWSDOWN : 0), *moved = alone(2 * round + 1, 0);
        munmap(moved + PLACE / 2, PLACE / 2);
        squeeze(other);
        pid_t child = round % 2 ? fork() : 0;
        if (!child) {
            // Its upper half is moved over the lower half of the memory at `place`.
            char *moves_to = place - PLACE / 2;
            int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            if (is_stack) munmap(place, PLACE / 2);
            else if (mremap(moved, PLACE / 2, PLACE, flags, moves_to) != moves_to) return 6;
            for (size_t page = 0; page < half; page++) {
                wrong += *word(place, page) != 0;
                wrong += *word(place, half + page) != half + page + 1;
                wrong += !is_stack && *word(moves_to, page) != page + 1;
            }
            if (round % 2) _exit(wrong != 0);
        }
        int status = 0;
        if (child && waitpid(child, &status, 0) != child) return 5;
        wrong += status != 0;
    }
    printf("%ld wrong\n", wrong);
    return 0;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    if (!strcmp(arguments[1], "regrows")) return regrows();
    int stays = !strcmp(arguments[1], "stays");
    char *memory = reserve(PROT_READ | PROT_WRITE), *place = reserve(PROT_NONE);
    for (size_t page = 0; page < BYTES / PAGE; page++) *word(memory, page) = page + 1;
    if (!strcmp(arguments[1], "fails")) return fails(memory);
    if (!strcmp(arguments[1], "grows-over")) return grows(memory, 0);
    if (!strcmp(arguments[1], "grows-down")) return grows(memory, 1);
    if (!strcmp(arguments[1], "fails-among-changes")) return fails_among_changes(memory);
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (stays ? MREMAP_DONTUNMAP : 0);
    if (mremap(memory, BYTES, BYTES, flags, place) != place) return 3;
    long wrong = stays ? wrong_in(memory, 1) : 0;
    printf("%ld wrong\n", wrong + wrong_in(place, 0));
}
