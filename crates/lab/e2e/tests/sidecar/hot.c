// Threads that keep discarding a small part of their memory and using it again (by madvise, or a
// new mapping over the old one), then go on to another part, and check pages of all parts. So
// memory that was discarded repeatedly is left alone later, and moved out. `far`: in each part
// there is a page that they do not touch while they work on it. `fork`: now and then a forked child
// checks everything. `move`: at three quarters of the rounds all memory is moved elsewhere, and
// changed further. SIGTERM makes the present round the last. Prints "round" after each round, and
// in the end how many words were wrong.
// Usage: hot MIB ROUNDS SEED [far] [fork] [move]
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, THREADS = 3, PART = 256, MOST_RUN = 32, CALLS = 800, FORK_EVERY = 6 };

struct worker {
    pthread_t thread;
    char *memory;
    // The contents of each page; 0: zeros.
    uint32_t *marks;
    size_t pages;
    uint64_t dice;
    uint32_t mark;
    int says;
    long wrong;
};

static volatile long rounds;
static long last_move;
static int leaves_far, forks, moves;
static pthread_rwlock_t forking = PTHREAD_RWLOCK_INITIALIZER;

static void end(int number) { rounds = number & 0; }

static uint64_t roll(struct worker *self, uint64_t sides) {
    self->dice ^= self->dice << 13, self->dice ^= self->dice >> 7, self->dice ^= self->dice << 17;
    return self->dice % sides;
}

static uint64_t word(struct worker *self, size_t page, int at) {
    uint32_t mark = self->marks[page];
    return mark ? ((uint64_t)mark << 32 | page) * 0x9e3779b97f4a7c15u + at : 0;
}

static uint64_t *words(struct worker *self, size_t page) { return (uint64_t *)(self->memory + page * PAGE); }

static void fill(struct worker *self, size_t page) {
    self->marks[page] = ++self->mark;
    for (int at = 0; at < 512; at += 73) words(self, page)[at] = word(self, page, at);
}

static void check(struct worker *self, size_t page) {
    for (int at = 0; at < 512; at += 73) self->wrong += words(self, page)[at] != word(self, page, at);
}

static void give_up(struct worker *self, size_t page, size_t count) {
    char *at = self->memory + page * PAGE;
    int failed;
    switch (roll(self, 16)) {
    case 0:
        failed = mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at;
        break;
    case 1:
        // Its access rights change for a moment, which splits the mapping.
        failed = mprotect(at, count * PAGE, PROT_READ) || madvise(at, count * PAGE, MADV_DONTNEED) ||
                 mprotect(at, count * PAGE, PROT_READ | PROT_WRITE);
        break;
    default: failed = madvise(at, count * PAGE, MADV_DONTNEED);
    }
    if (failed) perror("memory"), exit(3);
    memset(self->marks + page, 0, count * sizeof *self->marks);
}

static void change(struct worker *self, size_t part) {
    size_t last = PART - (leaves_far ? 1 : 0);
    for (int call = 0; call < CALLS; call++) {
        size_t first = roll(self, last), most = last - first, count = 1 + roll(self, most < MOST_RUN ? most : MOST_RUN);
        give_up(self, part + first, count);
        for (size_t page = part + first; page < part + first + count; page++) {
            if (roll(self, 4) == 0) check(self, page);
            if (roll(self, 8)) fill(self, page);
        }
        check(self, part + roll(self, last));
    }
}

static void check_child(struct worker *self) {
    pthread_rwlock_wrlock(&forking);
    pid_t child = fork();
    if (!child) {
        self->wrong = 0;
        for (size_t page = 0; page < self->pages; page++) check(self, page);
        _exit(self->wrong != 0);
    }
    pthread_rwlock_unlock(&forking);
    int status = 0;
    waitpid(child, &status, 0);
    self->wrong += status != 0;
}

static void move(struct worker *self) {
    size_t bytes = self->pages * PAGE;
    char *to = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // Each page is moved by a call of its own, as pages may be in several mappings.
    for (size_t part = 0; part < self->pages; part += PART) {
        char *from = self->memory + part * PAGE, *target = to + part * PAGE;
        for (size_t page = 0; page < PART; page++)
            if (mremap(from + page * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
                       target + page * PAGE) == MAP_FAILED)
                perror("mremap"), exit(3);
    }
    self->memory = to;
}

static void *work(void *argument) {
    struct worker *self = argument;
    for (size_t page = 0; page < self->pages; page++) fill(self, page);
    for (long round = 0; round < rounds; round++) {
        pthread_rwlock_rdlock(&forking);
        if (moves && round == last_move) move(self);
        change(self, roll(self, self->pages / PART) * PART);
        pthread_rwlock_unlock(&forking);
        for (int n = 0; n < PART * 4; n++) check(self, roll(self, self->pages));
        if (self->says) puts("round"), fflush(stdout);
        if (forks && round % FORK_EVERY == FORK_EVERY - 1) check_child(self);
    }
    for (size_t page = 0; page < self->pages; page++) check(self, page);
    return 0;
}

int main(int count, char **arguments) {
    if (count < 4) return 64;
    for (int n = 4; n < count; n++) {
        leaves_far |= !strcmp(arguments[n], "far");
        forks |= !strcmp(arguments[n], "fork");
        moves |= !strcmp(arguments[n], "move");
    }
    rounds = atol(arguments[2]);
    last_move = rounds * 3 / 4;
    signal(SIGTERM, end);
    struct worker workers[THREADS] = {0};
    long wrong = 0;
    for (int n = 0; n < THREADS; n++) {
        struct worker *self = &workers[n];
        self->pages = (atol(arguments[1]) << 20) / PAGE / THREADS / PART * PART;
        self->memory = mmap(0, self->pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        self->marks = calloc(self->pages, sizeof *self->marks);
        self->says = n == 0;
        self->dice = (atol(arguments[3]) * THREADS + n + 1) * 0x9e3779b97f4a7c15u;
        pthread_create(&self->thread, 0, work, self);
    }
    for (int n = 0; n < THREADS; n++) {
        pthread_join(workers[n].thread, 0);
        wrong += workers[n].wrong;
    }
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
