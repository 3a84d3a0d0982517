// Memory with access rights other than read and write:
// protections settle RIGHTS LIMIT_MIB | toggle SECONDS THREADS | deny SECONDS 0
// settle: a large range is filled, gets its access rights, and must be far soon; then all of it is
// read, and run.
// toggle: threads keep changing the access rights of pieces, as just-in-time compilers do, while
// others read, write, run code, and make children. A write where none is allowed must fail,
// whatever Farpool does at that moment.
// deny: code must stay unchanged when the program may make no more memory executable (PR_SET_MDWE),
// and memory is short.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MOST_THREADS = 16, BYTES = 96 << 20, PIECE = 64 * PAGE, PIECES = BYTES / PIECE };
enum { STEP_US = 20000, PATIENCE_STEPS = 1500 };
static const int BOTH = PROT_READ | PROT_WRITE;
extern char **environ;

static unsigned char *memory;
static int zeros;  // A file.
static time_t end;
static long wrong;

static int rights(const char *text) {
    return (strchr(text, 'r') ? PROT_READ : 0) | (strchr(text, 'w') ? PROT_WRITE : 0) |
           (strchr(text, 'x') ? PROT_EXEC : 0);
}

// mov eax, NUMBER; ret, then the same number in the rest of the page.
static void write_page(unsigned char *at, uint32_t number) {
    for (uint32_t *word = (uint32_t *)at; word < (uint32_t *)(at + PAGE); word++) *word = number;
    at[0] = 0xb8;
    memcpy(at + 1, &number, 4);
    at[5] = 0xc3;
}

static int is_right(unsigned char *at, uint32_t number, int protection) {
    if (protection & PROT_EXEC && ((uint32_t(*)(void))at)() != number) return 0;
    if (protection == PROT_NONE) return 1;
    for (uint32_t *word = (uint32_t *)at + 2; word < (uint32_t *)(at + PAGE); word++)
        if (*word != number) return 0;
    return 1;
}

// Whether the kernel refuses to write where the program may not.
static int refuses(unsigned char *at, int protection) {
    return protection & PROT_WRITE || (read(zeros, at, PAGE) < 0 && errno == EFAULT);
}

static void check(unsigned char *at, uint32_t number, int protection, const char *when) {
    int is_refused = refuses(at, protection);
    if (is_refused && is_right(at, number, protection)) return;
    fprintf(stderr, "page %zu %s%s\n", (size_t)(at - memory) / PAGE, when, is_refused ? "" : " was written to");
    __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
}

static long anonymous_mib(void) {
    char line[256];
    long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status)) sscanf(line, "RssAnon: %ld", &kib);
    fclose(status);
    return kib >> 10;
}

static void settle(int protection, long limit_mib) {
    for (size_t at = 0; at < BYTES; at += PAGE) write_page(memory + at, at / PAGE * 3);
    if (mprotect(memory, BYTES, protection)) exit(2);
    int steps = 0;
    while (anonymous_mib() > limit_mib && steps++ < PATIENCE_STEPS) usleep(STEP_US);
    if (steps > PATIENCE_STEPS) printf("%ld MiB stay\n", anonymous_mib());
    for (size_t at = 0; at < BYTES; at += PAGE) check(memory + at, at / PAGE * 3, protection, "settled");
    if (mprotect(memory, BYTES, BOTH)) exit(2);
    for (size_t at = 0; at < BYTES; at += PAGE) check(memory + at, at / PAGE * 3, BOTH, "in the end");
}

static void deny(int seconds) {
    for (size_t at = 0; at < BYTES; at += PAGE) write_page(memory + at, at / PAGE * 3);
    if (mprotect(memory, BYTES, PROT_READ | PROT_EXEC)) exit(2);
    enum { SET_MDWE = 65, REFUSE_EXEC_GAIN = 1 };
    if (prctl(SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0)) { printf("no such denial\n"); exit(77); }
    uint8_t *other = mmap(0, BYTES, BOTH, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (other == MAP_FAILED) exit(2);
    for (time_t until = time(0) + seconds; time(0) < until;)
        for (size_t at = 0; at < BYTES; at += PAGE) write_page(other + at, at / PAGE * 3);
    for (size_t at = 0; at < BYTES; at += PAGE) {
        check(memory + at, at / PAGE * 3, PROT_READ | PROT_EXEC, "code");
        check(other + at, at / PAGE * 3, BOTH, "beside code");
    }
}

// A thread's pieces: the number that each holds, and its access rights.
struct pieces {
    int thread, threads;
    uint64_t random;
    uint32_t numbers[PIECES];
    int protections[PIECES];
};

static uint64_t draw(struct pieces *own, uint64_t below) {
    uint64_t x = own->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    own->random = x;
    return (x >> 11) % below;
}

static void check_piece(struct pieces *own, size_t piece, const char *when) {
    unsigned char *start = memory + piece * PIECE;
    size_t first = draw(own, PIECE / PAGE), last = own->protections[piece] & PROT_READ ? PIECE / PAGE : first + 1;
    for (size_t page = first; page < last; page++)
        check(start + page * PAGE, own->numbers[piece], own->protections[piece], when);
}

static void make_child(struct pieces *own, size_t piece) {
    pid_t child = draw(own, 3) ? -1 : fork();
    if (!child) {
        check_piece(own, piece, "in a child");
        _exit(wrong != 0);
    }
    char *arguments[] = {"true", 0};
    if (child < 0 && posix_spawnp(&child, "true", 0, 0, arguments, environ)) exit(2);
    int status;
    if (waitpid(child, &status, 0) != child || status) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
}

static void *toggle(void *argument) {
    static const int ALL[] = {PROT_READ, PROT_READ | PROT_EXEC, PROT_READ, PROT_READ | PROT_EXEC,
                              BOTH,      BOTH | PROT_EXEC,      PROT_NONE};
    struct pieces *own = argument;
    for (size_t step = 0; time(0) < end; step++) {
        size_t piece = own->thread + own->threads * draw(own, PIECES / own->threads);
        unsigned char *start = memory + piece * PIECE;
        check_piece(own, piece, "as it stands");
        if (draw(own, 400) == 0) make_child(own, piece);
        if (draw(own, 3)) continue;
        if (mprotect(start, PIECE, BOTH)) exit(2);
        own->protections[piece] = BOTH;
        check_piece(own, piece, "before a write");
        own->numbers[piece] += PIECES;
        for (size_t page = 0; page < PIECE / PAGE; page++) write_page(start + page * PAGE, own->numbers[piece]);
        own->protections[piece] = ALL[draw(own, sizeof ALL / sizeof *ALL)];
        if (mprotect(start, PIECE, own->protections[piece])) exit(2);
    }
    return 0;
}

static void toggle_all(int seconds, int threads) {
    pthread_t ids[MOST_THREADS];
    static struct pieces pieces[MOST_THREADS];
    if (threads < 1 || threads > MOST_THREADS) exit(64);
    for (size_t at = 0; at < BYTES; at += PAGE) write_page(memory + at, at / PIECE);
    end = time(0) + seconds;
    for (int thread = 0; thread < threads; thread++) {
        struct pieces *own = &pieces[thread];
        own->thread = thread, own->threads = threads, own->random = 88172645463325252ul + thread * 977;
        for (size_t piece = 0; piece < PIECES; piece++) own->numbers[piece] = piece, own->protections[piece] = BOTH;
        if (pthread_create(&ids[thread], 0, toggle, own)) exit(2);
    }
    for (int thread = 0; thread < threads; thread++) pthread_join(ids[thread], 0);
}

int main(int count, char **arguments) {
    if (count != 4) return 64;
    zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    memory = mmap(0, BYTES, BOTH, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || zeros < 0) return 2;
    if (!strcmp(arguments[1], "settle")) settle(rights(arguments[2]), atol(arguments[3]));
    else if (!strcmp(arguments[1], "deny")) deny(atoi(arguments[2]));
    else toggle_all(atoi(arguments[2]), atoi(arguments[3]));
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
