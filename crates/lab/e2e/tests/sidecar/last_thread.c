// The first thread ends with pthread_exit while another thread continues, or joins it (forks):
// last_thread returns|exits|forks|ends
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define BYTES (80l << 20)

static const char *mode;
static unsigned char *memory;
static pthread_t first;

static long wrong(void) {
    long count = 0;
    for (long at = 0; at < BYTES; at += 4096) count += memory[at]++ != 1;
    return count;
}

static void *last(void *unused) {
    if (strcmp(mode, "forks")) pthread_join(first, 0);
    long count = wrong();
    int status = 0;
    if (!strcmp(mode, "forks")) {
        pid_t child = fork();
        if (!child) return memory[5]++, unused;
        waitpid(child, &status, 0);
    }
    printf("%ld wrong, child %x\n", count, status);
    fflush(stdout);
    if (!strcmp(mode, "exits")) exit(0);
    if (!strcmp(mode, "ends")) pthread_exit(0);
    return 0;
}

int main(int count, char **words) {
    mode = count > 1 ? words[1] : "returns";
    memory = malloc(BYTES);
    memset(memory, 1, BYTES);
    first = pthread_self();
    pthread_t other;
    pthread_create(&other, 0, last, 0);
    if (!strcmp(mode, "forks")) return pthread_join(other, 0);
    pthread_exit(0);
}
