/* A disk that takes SYNC_US microseconds more for each sync: to be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

#define SLOW(call)                                   \
    int call(int file) {                             \
        static int (*real)(int);                     \
        if (!real)                                   \
            real = (int (*)(int))dlsym(RTLD_NEXT, #call); \
        usleep(SYNC_US);                             \
        return real(file);                           \
    }

SLOW(fsync)
SLOW(fdatasync)
