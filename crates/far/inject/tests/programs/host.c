// Host programs of the tests: host MODE [NUMBER]. Each prints "ready", acts by its mode, and ends
// with "ok" or "bad: why". Modes that wait for the test end at the end of their input.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WAIT_MS 400

static char *self;
static volatile sig_atomic_t usr1, chld;

static void on_usr1(int s) { usr1++; }
static void on_chld(int s) { chld++; }

static void say(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
}

static int verdict(int is_ok, const char *why) {
    printf(is_ok ? "ok\n" : "bad: %s errno %d\n", why, errno);
    fflush(stdout);
    return !is_ok;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static int input_ended(void) {
    struct pollfd p = {0, POLLIN, 0};
    return poll(&p, 1, 0) > 0;
}

// Makes a call that should end by its timeout, not before and not with EINTR.
static int timed(const char *mode) {
    struct timespec t = {0, WAIT_MS * 1000000L}, left;
    say("ready");
    double start = now_ms();
    long rc = 0, expected = 0;
    if (!strcmp(mode, "nanosleep")) rc = nanosleep(&t, &left);
    if (!strcmp(mode, "poll")) rc = poll(0, 0, WAIT_MS);
    if (!strcmp(mode, "futex")) {
        int word = 0;
        rc = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &t, 0, 0);
        if (rc == -1 && errno == ETIMEDOUT) rc = 0;
    }
    if (!strcmp(mode, "epoll")) {
        struct epoll_event e;
        rc = epoll_wait(epoll_create1(0), &e, 1, WAIT_MS);
    }
    if (!strcmp(mode, "recv")) {
        int ends[2];
        char byte;
        struct timeval patience = {0, WAIT_MS * 1000};
        socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
        setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        rc = recv(ends[0], &byte, 1, 0);
        if (rc == -1 && errno == EAGAIN) rc = 0;
    }
    if (!strcmp(mode, "sigtimedwait")) {
        sigset_t s;
        sigemptyset(&s);
        sigaddset(&s, SIGUSR2);
        rc = sigtimedwait(&s, 0, &t);
        if (rc == -1 && errno == EAGAIN) rc = 0;
    }
    double took = now_ms() - start;
    if (took < WAIT_MS - 1) return verdict(0, "it ended early");
    return verdict(rc == expected, mode);
}

static int waits(const char *mode) {
    char byte = 0;
    if (!strcmp(mode, "read")) {
        say("ready");
        return verdict(read(0, &byte, 1) == 1 && byte == 'x', "read");
    }
    if (!strcmp(mode, "epoll_read")) {
        struct epoll_event e = {EPOLLIN};
        int p = epoll_create1(0);
        epoll_ctl(p, EPOLL_CTL_ADD, 0, &e);
        say("ready");
        return verdict(epoll_wait(p, &e, 1, -1) == 1, "epoll_wait");
    }
    sigset_t block, old, wait;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    sigprocmask(SIG_BLOCK, &block, 0);
    struct sigaction a = {.sa_handler = on_usr1};
    sigaction(SIGUSR1, &a, 0);
    sigfillset(&wait);
    sigdelset(&wait, SIGUSR1);
    sigdelset(&wait, SIGTERM);
    say("ready");
    int rc = sigsuspend(&wait), e = errno;
    sigprocmask(SIG_BLOCK, 0, &old);
    int is_mask_right = sigismember(&old, SIGUSR1) && !sigismember(&old, SIGUSR2) && !sigismember(&old, SIGINT);
    return verdict(rc == -1 && e == EINTR && usr1 == 1 && is_mask_right, "sigsuspend");
}

// Waits for all children, of any kind: only its own may be seen, and one SIGCHLD.
static int parent(void) {
    struct sigaction a = {.sa_handler = on_chld};
    sigaction(SIGCHLD, &a, 0);
    pid_t child = fork();
    if (!child) {
        char byte;
        while (read(0, &byte, 1) > 0);
        _exit(7);
    }
    say("ready");
    int status, foreign = 0, own = 0;
    for (;;) {
        pid_t p = wait4(-1, &status, __WALL, 0);
        if (p == -1 && errno == EINTR) continue;
        if (p == -1) break;
        if (p == child && WIFEXITED(status) && WEXITSTATUS(status) == 7) own++;
        else foreign++;
    }
    return verdict(errno == ECHILD && foreign == 0 && own == 1 && chld == 1, "foreign child or SIGCHLD");
}

static uint64_t churn(uint64_t *words, size_t n, uint64_t seed, double *sum) {
    uint64_t wrong = 0;
    double x = 1.5;
    for (size_t i = 0; i < n; i++) words[i] = seed ^ (i * 0x9E3779B97F4A7C15ull);
    for (size_t i = 0; i < n; i++) {
        wrong += words[i] != (seed ^ (i * 0x9E3779B97F4A7C15ull));
        x = x * 0.999 + (double)(i & 7);
    }
    if (*sum == 0) *sum = x;
    wrong += *sum != x;
    return wrong;
}

// Verifies memory and arithmetic until its input ends, inside and outside of system calls, while
// its heap grows. With NUMBER 1 it is also interrupted by a timer's signals.
static int check(int has_timer) {
    enum { N = 1 << 14, CHUNK = 65536 };
    uint64_t *words = malloc(N * 8), wrong = 0, rounds = 0;
    double sum = 0;
    struct sigaction a = {.sa_handler = on_chld};
    sigaction(SIGCHLD, &a, 0);
    if (has_timer) {
        struct itimerval every = {{0, 500}, {0, 500}};
        struct sigaction tick = {.sa_handler = on_usr1, .sa_flags = SA_RESTART};
        sigaction(SIGALRM, &tick, 0);
        setitimer(ITIMER_REAL, &every, 0);
    }
    say("ready"); // stdio's buffer is on the heap: the break is looked at afterwards
    char *first = sbrk(0), *end = first;
    while (!input_ended()) {
        wrong += churn(words, N, rounds++, &sum);
        char *p = sbrk(CHUNK);
        wrong += p != end;
        memset(p, (int)((p - first) / CHUNK), CHUNK);
        end = p + CHUNK;
        if (end - first > 64 * CHUNK) {
            for (char *q = first; q < end; q++) wrong += *q != (char)((q - first) / CHUNK);
            sbrk(-(end - first));
            end = first;
        }
    }
    printf("%lu rounds\n", rounds);
    return verdict(wrong == 0 && chld == 0, "wrong data, a moved break or SIGCHLD");
}

static void *short_thread(void *seed) {
    enum { N = 512 };
    uint64_t words[N];
    double sum = 0;
    return (void *)churn(words, N, (uintptr_t)seed, &sum);
}

static void *thread_maker(void *done) {
    uintptr_t wrong = 0;
    for (uintptr_t i = 0; !*(volatile int *)done; i++) {
        pthread_t t;
        void *result = (void *)1;
        if (pthread_create(&t, 0, short_thread, (void *)i)) continue;
        pthread_join(t, &result);
        wrong += (uintptr_t)result;
    }
    return (void *)wrong;
}

static int makers(int n) {
    pthread_t t[64];
    int done = 0;
    uintptr_t wrong = 0;
    void *result;
    for (int i = 0; i < n; i++) pthread_create(&t[i], 0, thread_maker, &done);
    say("ready");
    char byte;
    while (read(0, &byte, 1) > 0);
    *(volatile int *)&done = 1;
    for (int i = 0; i < n; i++) {
        pthread_join(t[i], &result);
        wrong += (uintptr_t)result;
    }
    return verdict(wrong == 0, "a thread computed wrong");
}

static void *sleeper(void *x) {
    for (;;) pause();
    return x;
}

static int many(int n) {
    pthread_t t;
    for (int i = 1; i < n; i++) pthread_create(&t, 0, sleeper, 0);
    say("ready");
    char byte;
    while (read(0, &byte, 1) > 0);
    return verdict(1, "");
}

// The first thread ends, and this one continues.
static void *survivor(void *x) {
    say("ready");
    char byte;
    while (read(0, &byte, 1) > 0);
    exit(verdict(1, ""));
    return x;
}

static int count_sidecar(void) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f)) n += strstr(line, "farpool-sidecar") != 0;
    return n;
}

// Acts on each byte of input: f forks and prints how many mappings of the sidecar the process and
// the child have, e executes the program again.
static int obey(void) {
    char byte;
    say("ready");
    while (read(0, &byte, 1) > 0) {
        if (byte == 'e') execl(self, self, "obey", (char *)0);
        if (byte != 'f') continue;
        int here = count_sidecar(), status;
        pid_t child = fork();
        if (!child) _exit(count_sidecar());
        waitpid(child, &status, 0);
        printf("%d mappings here, %d in the child\n", here, WEXITSTATUS(status));
        fflush(stdout);
    }
    return verdict(1, "");
}

// Prints its child's process id, and counts SIGCHLD: there must be one, when the child ends.
static int family(void) {
    struct sigaction a = {.sa_handler = on_chld};
    sigaction(SIGCHLD, &a, 0);
    pid_t child = fork();
    if (!child) {
        for (;;) pause();
    }
    say("ready");
    printf("%d\n", child);
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0 || errno == EINTR) errno = 0;
    int before = chld, status;
    kill(child, SIGTERM);
    int rc = waitpid(child, &status, 0);
    return verdict(before == 0 && rc == child && WIFSIGNALED(status) && chld == 1, "SIGCHLD of the parent");
}

// Runs under seccomp, or catches its own system calls (syscall user dispatch).
static int sealed(const char *mode) {
    static char allow_all;
    struct sock_filter allow[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
    struct sock_fprog filter = {1, allow};
    say("ready");
    if (!strcmp(mode, "strict")) prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    if (!strcmp(mode, "dispatch")) prctl(59, 1, 0, 0, &allow_all);
    if (!strcmp(mode, "filter")) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
    }
    char byte;
    while (read(0, &byte, 1) > 0);
    return verdict(1, "");
}

static int run(const char *mode, int n) {
    if (!strcmp(mode, "family")) return family();
    if (!strcmp(mode, "strict") || !strcmp(mode, "filter") || !strcmp(mode, "dispatch")) return sealed(mode);
    if (!strcmp(mode, "parent")) return parent();
    if (!strcmp(mode, "check")) return check(n);
    if (!strcmp(mode, "makers")) return makers(n);
    if (!strcmp(mode, "many")) return many(n);
    if (!strcmp(mode, "obey")) return obey();
    if (!strcmp(mode, "leaderless")) {
        pthread_t t;
        pthread_create(&t, 0, survivor, 0);
        pthread_exit(0);
    }
    if (!strcmp(mode, "vfork")) {
        if (vfork() == 0) {
            static char byte;
            say("ready");
            while (read(0, &byte, 1) > 0);
            _exit(0);
        }
        return verdict(1, "");
    }
    if (!strcmp(mode, "read") || !strcmp(mode, "epoll_read") || !strcmp(mode, "sigsuspend")) return waits(mode);
    return timed(mode);
}

int main(int c, char **v) {
    self = v[0];
    return c < 2 ? 2 : run(v[1], c > 2 ? atoi(v[2]) : 0);
}
