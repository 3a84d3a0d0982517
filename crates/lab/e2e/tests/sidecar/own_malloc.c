// The executable's own allocator, with a lock that it holds while it maps memory.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define HEAD 16ul

static atomic_flag lock = ATOMIC_FLAG_INIT;
static char *free_from, *free_to;

// The size is kept in the word before the block.
void *aligned_alloc(size_t align, size_t size) {
    if (align < HEAD) align = HEAD;
    while (atomic_flag_test_and_set(&lock)) {}
    size_t wanted = size + align + HEAD;
    if (wanted > (size_t)(free_to - free_from)) {
        size_t bytes = (wanted + (2ul << 20)) & ~4095ul;
        free_from = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        free_to = free_from + bytes;
    }
    char *block = (char *)(((uintptr_t)free_from + HEAD + align - 1) & ~(align - 1));
    ((size_t *)block)[-1] = size;
    free_from = block + size;
    atomic_flag_clear(&lock);
    return block;
}
void *malloc(size_t size) { return aligned_alloc(HEAD, size); }
void *memalign(size_t align, size_t size) { return aligned_alloc(align, size); }
void free(void *block) { (void)block; }
void *calloc(size_t count, size_t size) { return memset(malloc(count * size), 0, count * size); }
size_t malloc_usable_size(void *block) { return ((size_t *)block)[-1]; }
void *realloc(void *old, size_t size) {
    char *block = malloc(size);
    if (old) memcpy(block, old, size < malloc_usable_size(old) ? size : malloc_usable_size(old));
    return block;
}
int posix_memalign(void **result, size_t align, size_t size) {
    *result = aligned_alloc(align, size);
    return 0;
}

int main(void) {
    enum { BLOCKS = 1600, BYTES = 64 << 10 };
    static unsigned char *blocks[BLOCKS];
    int wrong = 0;
    for (int i = 0; i < BLOCKS; i++) blocks[i] = memset(malloc(BYTES), i * 7 % 251, BYTES);
    for (int i = 0; i < BLOCKS; i++)
        for (int at = 0; at < BYTES; at += 1024) wrong += blocks[i][at] != i * 7 % 251;
    return write(1, wrong ? "bad\n" : "ok\n", wrong ? 4 : 3) < 0 || wrong;
}
