/* Records, below one folder, what is made, named, and synced, by every process that has this library
   preloaded; and stands still for ever at the n-th such call, as if the power were gone, or refuses
   what it is asked for from the n-th such request on, as a full disk does.

   WATERSMEET_FORGETFUL=FOLDER:JOURNAL:STATE, where STATE is a file of eight 64-bit numbers that all
   processes share: how many calls there were, at which one the power goes (0: never), and whether it
   is gone; which requests may be refused (the bits below), how many of them there were,
   from which one on they are refused, with which error, and how many were. Each line of the journal is a letter and paths, divided by tabs:

     O  a file is opened for writing      C  a file that was written is closed
     F  a file or folder was synced       M  a folder is made
     R  old and new name of a file        L  old and new name of a file that gets a second one
     U  a file or folder is removed */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 65536
#define STATE_BYTES 64

/* What may be refused: a file is opened; one is made, or gets a name; something is written. Before
   it is refused, a part may be written. */
enum { OPENS = 1, MAKES = 2, WRITES = 4, IN_PART = 8 };
enum { CALLS, CUT_AT, IS_CUT, REFUSED_KINDS, REQUESTS, REFUSED_FROM, REFUSED_WITH, REFUSALS };

static char folder[PATH_MAX];
static size_t folder_length;
static int journal = -1;
static volatile uint64_t *state;
static char *written[FILES];

__attribute__((constructor)) static void begin(void) {
    const char *said = getenv("WATERSMEET_FORGETFUL");
    if (!said) return;
    char copy[3 * PATH_MAX];
    snprintf(copy, sizeof copy, "%s", said);
    char *rest = copy;
    snprintf(folder, sizeof folder, "%s", strsep(&rest, ":"));
    folder_length = strlen(folder);
    journal = syscall(SYS_openat, AT_FDCWD, strsep(&rest, ":"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    int shared = syscall(SYS_openat, AT_FDCWD, rest, O_RDWR | O_CLOEXEC, 0666);
    void *mapped = mmap(NULL, STATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    syscall(SYS_close, shared);
    state = mapped == MAP_FAILED ? NULL : mapped;
}

/* The absolute path in `out`, and whether it is below the folder. */
static int is_below(int at, const char *path, char *out) {
    if (!state || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX] = "";
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return !strncmp(out, folder, folder_length) && (out[folder_length] == '/' || !out[folder_length]);
}

static void stand_still(void) {
    for (;;) pause();
}

/* Before a call: the power may be gone, or goes now. */
static void step(void) {
    if (state[IS_CUT]) stand_still();
    uint64_t number = __sync_add_and_fetch(&state[CALLS], 1);
    if (state[CUT_AT] && number >= state[CUT_AT]) {
        state[IS_CUT] = 1;
        stand_still();
    }
}

/* Whether a request of a kind is refused; `errno` says why. */
static int is_refused(unsigned kind) {
    if (!(state[REFUSED_KINDS] & kind)) return 0;
    if (__sync_add_and_fetch(&state[REQUESTS], 1) < state[REFUSED_FROM]) return 0;
    __sync_add_and_fetch(&state[REFUSALS], 1);
    errno = (int)state[REFUSED_WITH];
    return 1;
}

/* After it. */
static void note(char what, const char *one, const char *other) {
    int failure = errno;
    char line[2 * PATH_MAX + 4];
    int length = snprintf(line, sizeof line, "%c\t%s%s%s\n", what, one, other ? "\t" : "", other ? other : "");
    if (!state[IS_CUT] && syscall(SYS_write, journal, line, (size_t)length) < 0) abort();
    errno = failure;
}

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

static int opened(int descriptor, int is_written, const char *path) {
    if (descriptor >= 0 && descriptor < FILES && is_written) {
        note('O', path, NULL);
        free(written[descriptor]);
        written[descriptor] = strdup(path);
    }
    return descriptor;
}

#define MAKES_ONE(flags) (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE)

#define OPEN(name, parameters, call, at)                                                   \
    int name parameters {                                                                  \
        mode_t mode = 0;                                                                   \
        if (MAKES_ONE(flags)) {                                               \
            va_list more;                                                                  \
            va_start(more, flags);                                                         \
            mode = va_arg(more, mode_t);                                                   \
            va_end(more);                                                                  \
        }                                                                                  \
        char full[PATH_MAX];                                                               \
        int is_here = is_below(at, path, full);                                            \
        int is_written = is_here && (flags & (O_WRONLY | O_RDWR | O_CREAT));               \
        if (is_here && is_refused(MAKES_ONE(flags) ? OPENS | MAKES : OPENS)) return -1; \
        if (is_written) step();                                                            \
        return opened(call, is_written, full);                                             \
    }

OPEN(open, (const char *path, int flags, ...), REAL(open)(path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), REAL(open64)(path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), REAL(openat)(at, path, flags, mode), at)
OPEN(openat64, (int at, const char *path, int flags, ...), REAL(openat64)(at, path, flags, mode), at)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int descriptor) {
    char *path = NULL;
    if (descriptor >= 0 && descriptor < FILES && (path = written[descriptor])) {
        written[descriptor] = NULL;
        step();
    }
    int result = REAL(close)(descriptor);
    if (path) {
        note('C', path, NULL);
        free(path);
    }
    return result;
}

/* Something is written to a descriptor: all of it, the half, or nothing. */
#define WRITTEN(name, parameters, whole, part)                                       \
    ssize_t name parameters {                                                        \
        int is_here = descriptor >= 0 && descriptor < FILES && written[descriptor];   \
        if (!is_here || !is_refused(WRITES)) return whole;                           \
        if (!(state[REFUSED_KINDS] & IN_PART) || state[REFUSALS] > 1) return -1;     \
        return part;                                                                 \
    }

WRITTEN(write, (int descriptor, const void *from, size_t size), REAL(write)(descriptor, from, size),
        REAL(write)(descriptor, from, (size + 1) / 2))
WRITTEN(pwrite, (int descriptor, const void *from, size_t size, off_t at),
        REAL(pwrite)(descriptor, from, size, at), REAL(pwrite)(descriptor, from, (size + 1) / 2, at))
WRITTEN(pwrite64, (int descriptor, const void *from, size_t size, off64_t at),
        REAL(pwrite64)(descriptor, from, size, at), REAL(pwrite64)(descriptor, from, (size + 1) / 2, at))
WRITTEN(writev, (int descriptor, const struct iovec *from, int count),
        REAL(writev)(descriptor, from, count), REAL(writev)(descriptor, from, 1))

static int synced(int descriptor, int (*call)(int)) {
    char link[64], path[PATH_MAX], full[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = state ? readlink(link, path, sizeof path - 1) : -1;
    int is_here = 0;
    if (length >= 0) {
        path[length] = 0;
        is_here = is_below(AT_FDCWD, path, full);
    }
    if (is_here) step();
    int result = call(descriptor);
    if (is_here && !result) note('F', full, NULL);
    return result;
}

int fsync(int descriptor) { return synced(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, REAL(fdatasync)); }

static int named(char what, int from, const char *one, int to, const char *other, char *first, char *second) {
    int is_here = is_below(from, one, first) | is_below(to, other, second);
    if (is_here) step();
    return is_here ? what : 0;
}

#define NAMED(name, letter, parameters, call, from, one, to, other)            \
    int name parameters {                                                     \
        char first[PATH_MAX], second[PATH_MAX];                               \
        int is_here = named(letter, from, one, to, other, first, second);     \
        if (is_here && is_refused(MAKES)) return -1;                          \
        int result = call;                                                    \
        if (is_here && !result) note(letter, first, second);                  \
        return result;                                                        \
    }

NAMED(rename, 'R', (const char *one, const char *other), REAL(rename)(one, other), AT_FDCWD, one, AT_FDCWD, other)
NAMED(renameat, 'R', (int from, const char *one, int to, const char *other),
      REAL(renameat)(from, one, to, other), from, one, to, other)
NAMED(renameat2, 'R', (int from, const char *one, int to, const char *other, unsigned flags),
      REAL(renameat2)(from, one, to, other, flags), from, one, to, other)
NAMED(link, 'L', (const char *one, const char *other), REAL(link)(one, other), AT_FDCWD, one, AT_FDCWD, other)
NAMED(linkat, 'L', (int from, const char *one, int to, const char *other, int flags),
      REAL(linkat)(from, one, to, other, flags), from, one, to, other)

#define CHANGED(name, letter, parameters, call, at, path)    \
    int name parameters {                                   \
        char full[PATH_MAX];                                \
        int is_here = is_below(at, path, full);             \
        if (is_here) step();                                \
        if (is_here && letter == 'M' && is_refused(MAKES)) return -1; \
        int result = call;                                  \
        if (is_here && !result) note(letter, full, NULL);   \
        return result;                                      \
    }

CHANGED(unlink, 'U', (const char *path), REAL(unlink)(path), AT_FDCWD, path)
CHANGED(unlinkat, 'U', (int at, const char *path, int flags), REAL(unlinkat)(at, path, flags), at, path)
CHANGED(remove, 'U', (const char *path), REAL(remove)(path), AT_FDCWD, path)
CHANGED(rmdir, 'U', (const char *path), REAL(rmdir)(path), AT_FDCWD, path)
CHANGED(mkdir, 'M', (const char *path, mode_t mode), REAL(mkdir)(path, mode), AT_FDCWD, path)
CHANGED(mkdirat, 'M', (int at, const char *path, mode_t mode), REAL(mkdirat)(at, path, mode), at, path)
