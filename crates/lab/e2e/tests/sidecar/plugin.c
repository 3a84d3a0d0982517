// A plugin that allocates for its host, and frees what its host allocated.
#include <stdlib.h>
#include <string.h>
char *plugin_make(size_t size, int byte) { return memset(malloc(size), byte, size); }
void plugin_free(void *block) { free(block); }
