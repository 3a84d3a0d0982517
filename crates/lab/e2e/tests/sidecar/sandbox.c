// Applies a seccomp filter that allows almost nothing to all its threads, while part of its memory
// is far.
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#define BYTES (96ul << 20)

static volatile int is_idle;

static void *idle(void *unused) {
    is_idle = 1;
    for (;;) pause();
    return unused;
}

int main(void) {
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < BYTES; at += 4096) *(uint64_t *)(memory + at) = at * 5 + 1;
    pthread_t other;
    pthread_create(&other, 0, idle, 0);
    // The C library makes its own calls at a thread's start, and ends the program if they are
    // refused.
    while (!is_idle) {}
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof rules / sizeof *rules, rules};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter)) return 2;
    long wrong = 0;
    for (int round = 0; round < 2; round++)
        for (size_t at = 0; at < BYTES; at += 4096) wrong += *(uint64_t *)(memory + at) != at * 5 + 1;
    syscall(SYS_write, 1, wrong ? "bad\n" : "ok\n", wrong ? 4 : 3);
    syscall(SYS_exit_group, wrong != 0);
}
