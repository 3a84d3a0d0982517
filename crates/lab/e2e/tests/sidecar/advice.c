// Memory with advice about children, locked memory, or memory that is populated at once:
// advice wipe|leave-out|lock|populate-map|populate-advice
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define MB (1ul << 20)
#define BYTES (96 * MB)
// A limit of 32 MiB, a tenth of it, and 32 MiB.
#define ALLOWED (67 * MB)
#define PAGE 4096ul

static const char *mode;

static int is(const char *name) { return !strcmp(mode, name); }

static uint64_t word(size_t at) { return at * 31 + 1; }

static long wrong(char *memory, size_t from, size_t to) {
    long count = 0;
    for (size_t at = from; at < to; at += PAGE) count += *(uint64_t *)(memory + at) != word(at);
    return count;
}

static long of_child(char *memory) {
    long count = 0;
    for (size_t at = 0; is("wipe") && at < BYTES / 2; at += PAGE) count += *(uint64_t *)(memory + at) != 0;
    return count + wrong(memory, BYTES / 2, BYTES);
}

// Checks everything until populated memory fits the limit, for at most 30 s.
static long wrong_until_it_fits(char *memory) {
    long count = 0, resident = BYTES;
    for (time_t begin = time(0); resident > (long)ALLOWED && time(0) - begin < 30;) {
        count += wrong(memory, 0, BYTES);
        FILE *statm = fopen("/proc/self/statm", "r");
        if (fscanf(statm, "%*d %ld", &resident) != 1) return -1;
        fclose(statm);
        resident *= PAGE;
    }
    return count + (resident > (long)ALLOWED);
}

int main(int count, char **words) {
    mode = count > 1 ? words[1] : "wipe";
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (is("populate-map") ? MAP_POPULATE : 0);
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    int refused = is("populate-advice") && madvise(memory, BYTES, MADV_POPULATE_WRITE);
    for (size_t at = 0; at < BYTES; at += PAGE) *(uint64_t *)(memory + at) = word(at);
    if (is("wipe")) refused |= madvise(memory, BYTES / 2, MADV_WIPEONFORK);
    if (is("leave-out")) refused |= madvise(memory, BYTES / 2, MADV_DONTFORK);
    if (is("lock")) refused |= mlock(memory, BYTES / 2);
    long bad = is("populate-map") || is("populate-advice") ? wrong_until_it_fits(memory) : 0;
    int status = 0;
    pid_t child = fork();
    if (!child) _exit(of_child(memory) != 0);
    waitpid(child, &status, 0);
    bad += wrong(memory, 0, BYTES) + wrong(memory, 0, BYTES);
    printf("refused %d, child %x, %ld wrong\n", refused, status, bad);
    return bad || status || refused;
}
