// Loads ./plugin.so with RTLD_DEEPBIND, as PHP loads its extensions, and passes memory both ways.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    enum { BLOCKS = 96, BYTES = 1 << 20 };
    void *plugin = dlopen("./plugin.so", RTLD_NOW | RTLD_DEEPBIND);
    if (!plugin) return puts(dlerror()), 2;
    char *(*make)(size_t, int) = (char *(*)(size_t, int))dlsym(plugin, "plugin_make");
    void (*give_back)(void *) = (void (*)(void *))dlsym(plugin, "plugin_free");
    char *made[BLOCKS];
    long wrong = 0;
    for (int i = 0; i < BLOCKS; i++) made[i] = make(BYTES, i);
    for (int i = 0; i < BLOCKS; i++) {
        for (int at = 0; at < BYTES; at += 1024) wrong += made[i][at] != i;
        free(made[i]);
        give_back(memset(malloc(100 + i), 1, 100 + i));
    }
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
