// Random memory calls against a plain model: memory_calls SEED STEPS THREADS FORKS
// Each thread has its own 16 MiB of addresses, and knows what each page there holds. Now and then
// the first thread touches other memory, so that theirs is moved out. With FORKS, children continue
// the calls, and check all pages. A wrong page, or a write to a page that is not writable, is
// reported and ends the program with 9.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { PAGE = 4096, PAGES = 4096, MOST_THREADS = 8, PRESSED = 48 << 20, PRESS = 18 << 20, LAST = 511 };
enum state { HOLE, OPEN, CLOSED, FIXED, CODE, JIT, POURED, STATES };
static const int ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS, BOTH = PROT_READ | PROT_WRITE;
static const int RIGHTS[STATES] = {0, BOTH, PROT_NONE, PROT_READ, PROT_READ | PROT_EXEC, BOTH | PROT_EXEC, PROT_WRITE};

struct page {
    uint32_t stamp;  // 0: zeros
    uint8_t state, is_free;  // is_free: it may be zeros instead (MADV_FREE)
};

struct window {
    char *base;
    uint64_t random;
    long step;
    uint32_t next_stamp;
    int thread;
    struct page pages[PAGES];
};

static unsigned long seed;
static long steps;
static int forks;
static volatile char *pressing;
static int zeros;  // A file.

static uint64_t draw(struct window *own, uint64_t below) {
    uint64_t x = own->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    own->random = x;
    return (x >> 11) % below;
}

static uint64_t *words(struct window *own, int page) { return (uint64_t *)(own->base + (size_t)page * PAGE); }

// The processor allows reading wherever writing is allowed.
static int is_readable(enum state state) { return RIGHTS[state] != PROT_NONE; }

static int is_writable(enum state state) { return RIGHTS[state] & PROT_WRITE; }

static int holds(uint64_t *words, uint32_t stamp) {
    if (!stamp) return !words[0] && !words[1] && !words[100] && !words[LAST];
    return words[0] == stamp && words[1] == ~(uint64_t)stamp && words[LAST] == stamp * 7ul;
}

static void die(struct window *own, const char *what) {
    fprintf(stderr, "seed %lu thread %d step %ld: %s: %s\n", seed, own->thread, own->step, what, strerror(errno));
    _exit(3);
}

static void check(struct window *own, int first, int count, const char *when) {
    for (int at = first; at < first + count; at++) {
        struct page *page = &own->pages[at];
        if (!is_readable(page->state) || holds(words(own, at), page->stamp)) continue;
        if (page->is_free && holds(words(own, at), 0)) {
            page->stamp = page->is_free = 0;
            continue;
        }
        printf("WRONG: seed %lu thread %d step %ld, %s: page %d is %lx %lx, not of %x\n", seed, own->thread,
               own->step, when, at, words(own, at)[0], words(own, at)[LAST], page->stamp);
        fflush(stdout);
        _exit(9);
    }
}

static void touch(struct window *own, int first, int count) {
    check(own, first, count, "before a write");
    for (int at = first; at < first + count; at++) {
        if (!is_writable(own->pages[at].state)) continue;
        uint32_t stamp = ++own->next_stamp;
        words(own, at)[0] = stamp, words(own, at)[1] = ~(uint64_t)stamp, words(own, at)[LAST] = stamp * 7ul;
        own->pages[at].stamp = stamp, own->pages[at].is_free = 0;
    }
}

static void becomes(struct window *own, int first, int count, enum state state) {
    for (int at = first; at < first + count; at++) own->pages[at] = (struct page){0, state, 0};
}

static void map(struct window *own, int first, int count, enum state state) {
    if (mmap(words(own, first), (size_t)count * PAGE, RIGHTS[state], ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        die(own, "mmap");
    becomes(own, first, count, state);
}

static void unmap(struct window *own, int first, int count) {
    munmap(words(own, first), (size_t)count * PAGE);
    becomes(own, first, count, HOLE);
}

static int are(struct window *own, int first, int count, enum state state) {
    for (int at = first; at < first + count; at++)
        if (own->pages[at].state != state) return 0;
    return 1;
}

static int are_mapped(struct window *own, int first, int count) {
    for (int at = first; at < first + count; at++)
        if (own->pages[at].state == HOLE) return 0;
    return 1;
}

// Resizes in place, and perhaps grows again at once after shrinking.
static void resize(struct window *own, int first, int count, int new_count) {
    int more = new_count > count ? new_count - count : 0;
    if (!are_mapped(own, first, count) || first + new_count > PAGES || !are(own, first + count, more, HOLE)) return;
    char *at = (char *)words(own, first);
    enum state last = own->pages[first + count - 1].state;
    if (mremap(at, (size_t)count * PAGE, (size_t)new_count * PAGE, 0) == MAP_FAILED) return;
    if (more) return becomes(own, first + count, more, last);
    becomes(own, first + new_count, count - new_count, HOLE);
    last = own->pages[first + new_count - 1].state;
    if (draw(own, 2) && mremap(at, (size_t)new_count * PAGE, (size_t)count * PAGE, 0) != MAP_FAILED)
        becomes(own, first + new_count, count - new_count, last);
}

// Moves to addresses where other memory may be. A failure may have unmapped part of either range.
static int move(struct window *own, int from, int count, int to, int new_count, int stays) {
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (stays ? MREMAP_DONTUNMAP : 0);
    char *moved = mremap(words(own, from), (size_t)count * PAGE, (size_t)new_count * PAGE, flags, words(own, to));
    if (moved == MAP_FAILED) {
        unmap(own, to, new_count);
        unmap(own, from, count);
        return 0;
    }
    int kept = count < new_count ? count : new_count;
    struct page *held = malloc(sizeof *held * kept);
    memcpy(held, &own->pages[from], sizeof *held * kept);
    enum state state = held->state;
    becomes(own, from, count, stays ? state : HOLE);
    becomes(own, to, new_count, state);
    memcpy(&own->pages[to], held, sizeof *held * kept);
    free(held);
    return 1;
}

static void give_up(struct window *own, int first, int count) {
    if (!are_mapped(own, first, count)) return;
    int is_free = draw(own, 3) == 0;
    if (madvise(words(own, first), (size_t)count * PAGE, is_free ? MADV_FREE : MADV_DONTNEED)) die(own, "madvise");
    for (int at = first; at < first + count; at++) {
        own->pages[at].is_free = is_free;
        if (!is_free) own->pages[at].stamp = 0;
    }
}

static void protect(struct window *own, int first, int count) {
    if (!are_mapped(own, first, count)) return;
    enum state state = draw(own, 3) ? OPEN + draw(own, STATES - OPEN) : OPEN;
    if (mprotect(words(own, first), (size_t)count * PAGE, RIGHTS[state])) die(own, "mprotect");
    for (int at = first; at < first + count; at++) own->pages[at].state = state;
}

// Checks that the kernel does not write where the program may not.
static void intrude(struct window *own, int first, int count) {
    for (int at = first; at < first + count; at++) {
        struct page *page = &own->pages[at];
        if (page->state == HOLE || is_writable(page->state)) continue;
        if (read(zeros, words(own, at), PAGE) < 0 && errno == EFAULT) continue;
        printf("WRONG: seed %lu thread %d step %ld: page %d was written to\n", seed, own->thread, own->step, at);
        fflush(stdout);
        _exit(9);
    }
}

static void step(struct window *own) {
    static const int sizes[] = {1, 3, 16, 40, 64, 100, 256, 512, 700, 1024};
    static const int advices[] = {MADV_COLD, MADV_PAGEOUT, MADV_POPULATE_READ, MADV_POPULATE_WRITE,
                                  MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE, MADV_MERGEABLE};
    own->step++;
    int count = 1 + draw(own, sizes[draw(own, 10)]), first = draw(own, PAGES - count);
    int new_count = 1 + draw(own, 2 * count), to = draw(own, PAGES - 2 * count);
    int is_apart = first + count <= to || to + 2 * count <= first;
    int is_one = own->pages[first].state != HOLE && are(own, first, count, own->pages[first].state);
    switch (draw(own, 20)) {
    case 0: case 1: return map(own, first, count, OPEN);
    case 2: return map(own, first, count, CLOSED);
    case 3: return unmap(own, first, count);
    case 4: unmap(own, first, count); return map(own, first, count, OPEN);
    case 5: case 6: case 7: return touch(own, first, count);
    case 8: case 9: return check(own, first, count, "as it stands");
    case 10: case 11: return give_up(own, first, count);
    case 12: case 17: return protect(own, first, count);
    case 18: return intrude(own, first, count);
    case 13: return resize(own, first, count, new_count);
    case 14: case 15:
        if (is_apart && is_one) move(own, first, count, to, new_count, 0);
        return;
    case 16:
        if (!is_apart || !are(own, first, count, OPEN) || !move(own, first, count, to, count, 1)) return;
        if (draw(own, 2)) touch(own, first, 1 + count / 4);
        if (draw(own, 3) == 0) move(own, to, count, first, count, 0);
        return;
    default: madvise(words(own, first), (size_t)count * PAGE, advices[draw(own, 8)]);
    }
}

static void press(size_t from, size_t bytes) {
    for (size_t at = from; at < from + bytes; at += PAGE) pressing[at]++;
}

static void *work(void *argument) {
    struct window *own = argument;
    while (own->step < steps) {
        step(own);
        if (own->thread == 0 && draw(own, 80) == 0) press(draw(own, 20) << 20, PRESS);
        if (!forks || draw(own, 600)) continue;
        pid_t child = fork();
        if (!child) {
            for (int more = draw(own, 60); more > 0; more--) step(own);
            check(own, 0, PAGES, "in a child");
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 8);
    }
    check(own, 0, PAGES, "in the end");
    return 0;
}

int main(int count, char **arguments) {
    if (count != 5) return 64;
    seed = strtoul(arguments[1], 0, 10), steps = atol(arguments[2]), forks = atoi(arguments[4]);
    int threads = atoi(arguments[3]);
    if (threads < 1 || threads > MOST_THREADS) return 64;
    zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    pressing = mmap(0, PRESSED, BOTH, ANONYMOUS, -1, 0);
    if (pressing == MAP_FAILED || zeros < 0) return 2;
    press(0, PRESSED);
    pthread_t others[MOST_THREADS];
    struct window *windows[MOST_THREADS];
    for (int at = 0; at < threads; at++) {
        struct window *own = windows[at] = calloc(1, sizeof *own);
        own->base = (char *)0x200000000000 + (size_t)at * PAGES * PAGE;
        own->random = 88172645463325252ul ^ (seed * 0x9e3779b97f4a7c15ul + at * 1234567ul);
        own->thread = at, own->next_stamp = at * 50000000u;
        for (int warm = 0; warm < 9; warm++) draw(own, 2);
    }
    for (int at = 1; at < threads; at++) pthread_create(&others[at], 0, work, windows[at]);
    work(windows[0]);
    for (int at = 1; at < threads; at++) pthread_join(others[at], 0);
    puts("ok");
}
