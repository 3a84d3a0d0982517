// A parent and its forked children change memory that they share, each with several threads at a
// time: they write, drop and unmap pages, and check every byte. Only a fork waits until no thread
// is changing anything. Whole runs are moved, too, if there are no forks.
// Prints how many pages were wrong in total. Usage: shares MIB FORKS CHANGES SEED
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, RUN = 16, THREADS = 3 };

// Neighbouring pages: their address, and the contents of each (0: zeros).
// `is_whole`: they are one mapping, so that they can be moved.
struct run { char *at; uint64_t marks[RUN]; int is_whole; };

static struct run *runs;
static size_t run_count, changes;
static int moves;
static uint64_t seed;
static long *wrong;
static pthread_rwlock_t forking = PTHREAD_RWLOCK_INITIALIZER;

struct worker { pthread_t thread; size_t first; uint64_t dice; };

static uint64_t roll(uint64_t *dice, uint64_t sides) {
    *dice ^= *dice << 13, *dice ^= *dice >> 7, *dice ^= *dice << 17;
    return *dice % sides;
}

static uint64_t word(struct run *run, int page, int number) {
    if (run->marks[page] == 0) return 0;
    return (run->marks[page] + (run - runs) * RUN + page) * 0x9e3779b97f4a7c15u + number;
}

static void *map(void *at, size_t bytes, int flags) {
    char *got = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (got == MAP_FAILED) perror("mmap"), exit(3);
    return got;
}

static void fill(struct run *run, int page, uint64_t mark) {
    uint64_t *words = (uint64_t *)(run->at + page * PAGE);
    run->marks[page] = mark;
    for (int number = 0; number < WORDS; number++) words[number] = word(run, page, number);
}

static void check(struct run *run, int page) {
    uint64_t *words = (uint64_t *)(run->at + page * PAGE);
    for (int number = 0; number < WORDS; number++)
        if (words[number] != word(run, page, number)) {
            __atomic_fetch_add(wrong, 1, __ATOMIC_SEQ_CST);
            return;
        }
}

static void forget(struct run *run, int first, int count) {
    for (int page = first; page < first + count; page++) run->marks[page] = 0;
}

static void change(struct run *run, uint64_t *dice) {
    int first = roll(dice, 2) ? roll(dice, RUN) : 0, count = roll(dice, 2) ? 1 + roll(dice, RUN - first) : RUN - first;
    uint64_t mark = 1 + roll(dice, 1u << 30);
    switch (roll(dice, 8)) {
    case 0:
        madvise(run->at + first * PAGE, count * PAGE, MADV_DONTNEED);
        forget(run, first, count);
        break;
    case 1:
        if (count < RUN) {
            map(run->at + first * PAGE, count * PAGE, MAP_FIXED);
            run->is_whole = 0;
        } else {
            munmap(run->at, RUN * PAGE);
            run->at = map(0, RUN * PAGE, 0);
            run->is_whole = 1;
        }
        forget(run, first, count);
        break;
    case 7: {
        // Moves to addresses that another thread may just have released.
        if (!run->is_whole || !moves) break;
        char *to = map(0, RUN * PAGE, 0);
        if (mremap(run->at, RUN * PAGE, RUN * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to) perror("mremap"), exit(3);
        run->at = to;
        break;
    }
    case 2:
    case 3:
        for (int page = first; page < first + count; page++) fill(run, page, mark);
        break;
    case 4: {
        // Dropped and written again at once.
        madvise(run->at + first * PAGE, count * PAGE, MADV_DONTNEED);
        forget(run, first, count);
        fill(run, first, mark);
        break;
    }
    default:
        for (int page = first; page < first + count; page++) check(run, page);
    }
}

static void *work(void *of) {
    struct worker *worker = of;
    for (size_t n = 0; n < changes; n++) {
        size_t place = worker->first + THREADS * roll(&worker->dice, run_count / THREADS);
        pthread_rwlock_rdlock(&forking);
        if (place < run_count) change(&runs[place], &worker->dice);
        pthread_rwlock_unlock(&forking);
    }
    return 0;
}

static void start(struct worker *workers, uint64_t dice) {
    for (int n = 0; n < THREADS; n++) {
        workers[n].first = n;
        workers[n].dice = (dice + n + 1) * 0x9e3779b97f4a7c15u;
        if (pthread_create(&workers[n].thread, 0, work, &workers[n])) exit(3);
    }
}

static void end(struct worker *workers) {
    for (int n = 0; n < THREADS; n++) pthread_join(workers[n].thread, 0);
    for (size_t place = 0; place < run_count; place++)
        for (int page = 0; page < RUN; page++) check(&runs[place], page);
}

int main(int count, char **arguments) {
    if (count < 5) return 64;
    run_count = (size_t)atoi(arguments[1]) * 256 / RUN;
    int forks = atoi(arguments[2]);
    // A fork splits mappings, and with a userfaultfd the kernel moves only one mapping at a time.
    moves = forks == 0;
    changes = strtoul(arguments[3], 0, 10), seed = strtoull(arguments[4], 0, 10);
    wrong = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    runs = map(0, run_count * sizeof *runs, 0);
    char *memory = map(0, run_count * RUN * PAGE, 0);
    for (size_t place = 0; place < run_count; place++) {
        runs[place].at = memory + place * RUN * PAGE;
        runs[place].is_whole = 1;
        for (int page = 0; page < RUN; page++) fill(&runs[place], page, 1);
    }
    struct worker workers[THREADS];
    start(workers, seed);
    for (int n = 0; n < forks; n++) {
        usleep(20000);
        pthread_rwlock_wrlock(&forking);
        pid_t child = fork();
        if (child == 0) {
            // Threads that waited for the lock are not in the child.
            forking = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
            start(workers, seed + 100 * (n + 1));
            end(workers);
            _exit(0);
        }
        pthread_rwlock_unlock(&forking);
        if (child < 0) perror("fork"), exit(3);
    }
    end(workers);
    for (int status; wait(&status) > 0;)
        if (status != 0) {
            fprintf(stderr, "a child ended with %x\n", status);
            __atomic_fetch_add(wrong, 1 << 20, __ATOMIC_SEQ_CST);
        }
    printf("%ld wrong\n", *wrong);
    return *wrong != 0;
}
