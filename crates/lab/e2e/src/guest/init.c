// The first process of a test's guest: fills memory, checks and rewrites it in rounds, tells on the
// serial console what it found, and switches the guest off.
//
// Words of the kernel's command line: work=MIB rounds=N, stay=1 (rounds until switched off),
// disks=N (each round writes part of the memory to /dev/vda and so on, and reads it back past all
// caches), memory=MIB (waits until the guest has that much: memory that is plugged in).
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>
#define PAGE 4096ul
#define WORDS (PAGE / 8)
// A disk is read and written in pieces of this size, from memory that can be far.
#define PIECE (64 * PAGE)
#define MODULES_MAX 16

static char line[4096];

static long argument(const char *key) {
    size_t length = strlen(key);
    for (char *at = line; (at = strstr(at, key)); at += length)
        if (at[length] == '=' && (at == line || at[-1] == ' ')) return atol(at + length + 1);
    return 0;
}

static uint64_t mix(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static uint64_t *memory;
static uint32_t *generation;
static long pages, bad;

static uint64_t word(long page, long at) {
    return mix(generation[page] * 0x9e3779b97f4a7c15ull + page * WORDS + at);
}

static void fill(long page) {
    for (size_t at = 0; at < WORDS; at++) memory[page * WORDS + at] = word(page, at);
}

static int is_right(long page) {
    for (size_t at = 0; at < WORDS; at++)
        if (memory[page * WORDS + at] != word(page, at)) return 0;
    return 1;
}

// Checks a quarter of the pages, some of them twice, and writes half of these anew.
static void round_of_memory(void) {
    static uint64_t random = 82;
    for (long step = 0; step < pages / 4; step++) {
        random = mix(random + 1);
        long page = random % pages;
        bad += !is_right(page);
        if (random >> 40 & 1) generation[page]++, fill(page);
    }
}

// Writes memory to a disk, reads it into other memory, and compares.
static void round_of_disk(int number) {
    char path[] = "/dev/vda";
    path[sizeof path - 2] += number;
    int disk = open(path, O_RDWR | O_DIRECT);
    char *copy = mmap(0, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    long pieces = pages * PAGE / PIECE;
    for (long piece = 0; piece < pieces; piece += 4) {
        char *from = (char *)memory + piece * PIECE;
        bad += pwrite(disk, from, PIECE, piece * PIECE) != PIECE;
    }
    for (long piece = 0; piece < pieces; piece += 4) {
        bad += pread(disk, copy, PIECE, piece * PIECE) != PIECE;
        bad += memcmp(copy, (char *)memory + piece * PIECE, PIECE) != 0;
    }
    munmap(copy, PIECE);
    close(disk);
}

static void load_modules(void) {
    for (int number = 0; number < MODULES_MAX; number++) {
        char path[32];
        snprintf(path, sizeof path, "/modules/%d", number);
        int file = open(path, O_RDONLY);
        if (file < 0) return;
        if (syscall(SYS_finit_module, file, "", 0)) perror(path);
        close(file);
    }
}

static void start(void) {
    mkdir("/proc", 0755), mkdir("/dev", 0755);
    mount("proc", "/proc", "proc", 0, 0);
    mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
    int console = open("/dev/ttyS0", O_RDWR);
    for (int number = 0; console >= 0 && number < 3; number++) dup2(console, number);
    setvbuf(stdout, 0, _IONBF, 0);
    int file = open("/proc/cmdline", O_RDONLY);
    long length = read(file, line, sizeof line - 1);
    line[length > 0 ? length : 0] = 0;
    load_modules();
}

static void wait_for_memory(long mib) {
    struct sysinfo system;
    for (sysinfo(&system); (long)(system.totalram >> 20) < mib; sysinfo(&system)) usleep(20000);
}

int main(void) {
    start();
    pages = argument("work") * 256;
    printf("GUEST up t=%.1f work=%ld pages\n", now(), pages);
    wait_for_memory(argument("memory"));
    memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    generation = calloc(pages, sizeof *generation);
    for (long page = 0; page < pages; page++) fill(page);
    printf("GUEST filled t=%.1f\n", now());
    for (long round = 0; round < argument("rounds") || argument("stay"); round++) {
        round_of_memory();
        for (int disk = 0; disk < argument("disks"); disk++) round_of_disk(disk);
        printf("GUEST round %ld t=%.1f bad=%ld\n", round, now(), bad);
    }
    for (long page = 0; page < pages; page++) bad += !is_right(page);
    printf("GUEST done t=%.1f pages=%ld bad=%ld\n", now(), pages, bad);
    sync();
    reboot(RB_POWER_OFF);
    for (;;) pause();
}
