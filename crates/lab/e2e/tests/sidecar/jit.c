// Generates code in memory that was far, as a just-in-time compiler does, runs it, and idles until
// SIGTERM.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#define BYTES (64ul << 20)
#define PAGE 4096ul

// mov eax, NUMBER; ret
static void write_function(unsigned char *at, uint32_t number) {
    at[0] = 0xb8;
    memcpy(at + 1, &number, 4);
    at[5] = 0xc3;
}

static long wrong(unsigned char *code) {
    long count = 0;
    for (size_t at = 0; at < BYTES; at += PAGE) {
        uint32_t (*function)(void) = (uint32_t (*)(void))(code + at);
        count += function() != at / PAGE * 3;
    }
    return count;
}

int main(void) {
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigprocmask(SIG_BLOCK, &ends, 0);
    unsigned char *code = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < BYTES; at += PAGE) write_function(code + at, at / PAGE * 3);
    mprotect(code, BYTES, PROT_READ | PROT_EXEC);
    long bad = wrong(code);
    printf("settled\n");
    fflush(stdout);
    int signal = 0;
    sigwait(&ends, &signal);
    bad += wrong(code);
    printf("%ld wrong\n", bad);
    return bad != 0;
}
