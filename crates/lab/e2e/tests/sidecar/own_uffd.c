// Uses userfaultfd itself, on part of its memory, while the rest is far.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#define PAGE 4096ul
#define OWN (8ul << 20)
#define OTHER (100ul << 20)

int main(void) {
    int fd = ioctl(open("/dev/userfaultfd", O_RDWR | O_CLOEXEC), USERFAULTFD_IOC_NEW, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    if (ioctl(fd, UFFDIO_API, &api)) return perror("api"), 2;
    char *other = mmap(0, OTHER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < OTHER; at += PAGE) *(uint64_t *)(other + at) = at * 3 + 7;
    char *own = mmap(0, OWN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register area = {{(uint64_t)own, OWN}, UFFDIO_REGISTER_MODE_MISSING, 0};
    if (ioctl(fd, UFFDIO_REGISTER, &area)) return perror("register"), 3;
    static char source[PAGE] __attribute__((aligned(4096)));
    for (size_t at = 0; at < OWN; at += PAGE) {
        memset(source, at / PAGE % 127, PAGE);
        struct uffdio_copy copy = {(uint64_t)own + at, (uint64_t)source, PAGE, 0, 0};
        if (ioctl(fd, UFFDIO_COPY, &copy)) return perror("copy"), 4;
    }
    long wrong = 0;
    for (int round = 0; round < 2; round++) {
        for (size_t at = 0; at < OWN; at += PAGE) wrong += own[at + 9] != (char)(at / PAGE % 127);
        for (size_t at = 0; at < OTHER; at += PAGE) wrong += *(uint64_t *)(other + at) != at * 3 + 7;
    }
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
