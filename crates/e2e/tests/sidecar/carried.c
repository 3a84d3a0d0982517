// Far memory that is moved (mremap), to a place that no blade has room for, or away from one that
// stays mapped and is touched at once; and far memory that is not replaced after all.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, BYTES = 48 << 20, SUPERPAGE = 16 << 20 };

// Begins where a superpage does, so that it takes no more of a quota than its size.
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

// More is mapped over the memory than the machine has: that is refused when the memory is as good
// as gone.
static int fails(char *memory) {
    size_t too_much = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE * 2;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(memory, too_much, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) return 4;
    printf("%ld wrong\n", wrong_in(memory, 0));
    return 0;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    int stays = !strcmp(arguments[1], "stays");
    char *memory = reserve(PROT_READ | PROT_WRITE), *place = reserve(PROT_NONE);
    for (size_t page = 0; page < BYTES / PAGE; page++) *word(memory, page) = page + 1;
    if (!strcmp(arguments[1], "fails")) return fails(memory);
    if (!strcmp(arguments[1], "fails-in-a-child")) {
        pid_t child = fork();
        if (!child) return fails(memory);
        int status;
        return waitpid(child, &status, 0) == child ? WEXITSTATUS(status) : 5;
    }
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (stays ? MREMAP_DONTUNMAP : 0);
    if (mremap(memory, BYTES, BYTES, flags, place) != place) return 3;
    long wrong = stays ? wrong_in(memory, 1) : 0;
    printf("%ld wrong\n", wrong + wrong_in(place, 0));
}
