// Two threads that allocate, resize and free blocks of many sizes in random order, and check every block's bytes.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 8000, STEPS = 20000, THREADS = 2 };

struct block { unsigned char *at; unsigned bytes; };

static void fill(struct block *block, unsigned slot) {
    for (unsigned k = 0; k < block->bytes; k++) block->at[k] = slot + k;
}

static long wrong_in(const struct block *block, unsigned bytes, unsigned slot) {
    long wrong = 0;
    for (unsigned k = 0; k < bytes; k++) wrong += block->at[k] != (unsigned char)(slot + k);
    return wrong;
}

static void *work(void *argument) {
    struct block *blocks = calloc(SLOTS, sizeof *blocks);
    uint64_t x = 88172645463325252u + (uint64_t)argument * 7919;
    long wrong = 0;
    for (int step = 0; step < STEPS; step++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        unsigned slot = x % SLOTS, bytes = 16 + (x >> 20) % ((x >> 50) % 40 == 0 ? 60000 : 4000);
        struct block *block = &blocks[slot];
        wrong += wrong_in(block, block->bytes, slot);
        if (block->at && x >> 60 & 1) {
            block->at = realloc(block->at, bytes);
            wrong += wrong_in(block, block->bytes < bytes ? block->bytes : bytes, slot);
        } else {
            free(block->at);
            block->at = malloc(bytes);
        }
        block->bytes = bytes;
        fill(block, slot);
    }
    for (unsigned slot = 0; slot < SLOTS; slot++) wrong += wrong_in(&blocks[slot], blocks[slot].bytes, slot);
    return (void *)wrong;
}

int main(void) {
    pthread_t threads[THREADS];
    long wrong = 0;
    for (long n = 0; n < THREADS; n++) pthread_create(&threads[n], 0, work, (void *)n);
    for (int n = 0; n < THREADS; n++) {
        void *found;
        pthread_join(threads[n], &found);
        wrong += (long)found;
    }
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
