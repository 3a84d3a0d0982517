// Threads that allocate all the time, and a main thread that ends the program beside them.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
static void *work(void *unused) {
    for (;;) {
        char *memory = malloc(1 << 20);
        memset(memory, 1, 1 << 20);
        free(memory);
    }
    return unused;
}
int main(void) {
    pthread_t thread;
    for (int i = 0; i < 8; i++)
        if (pthread_create(&thread, 0, work, 0)) return 1;
    struct timespec pause = { 0, 100000000 };
    nanosleep(&pause, 0);
    return 0;
}
