// A plugin that allocates memory for its host, and frees memory that its host allocated.
#include <stdlib.h>
#include <string.h>
char *plugin_make(size_t size, int byte) { return memset(malloc(size), byte, size); }
void plugin_free(void *block) { free(block); }
