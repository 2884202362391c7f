/* Counts what is done to files below a folder, over all processes, and has the nth of these calls fail or kill.
 *
 * Preloaded (LD_PRELOAD). Armed by FAULT_DIR, FAULT_NTH, FAULT_HOW and FAULT_COUNTER in the environment, or by calling
 * fault_arm. FAULT_HOW: an errno with which the call and all later ones fail (a full disk stays full), a negative one:
 * this call alone, 0: SIGKILL before the call, -1: half of what was to be written, then SIGKILL.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long nth;
static int how;
static long *counter;

void fault_arm(const char *dir, long n, int kind, const char *counter_path) {
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = real_open(counter_path, O_RDWR | O_CLOEXEC);
    counter = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    nth = n;
    how = kind;
    strncpy(folder, dir, sizeof folder - 1);
}

__attribute__((constructor)) static void begin(void) {
    const char *dir = getenv("FAULT_DIR"), *n = getenv("FAULT_NTH"), *kind = getenv("FAULT_HOW");
    const char *path = getenv("FAULT_COUNTER");
    if (dir && n && kind && path) fault_arm(dir, atol(n), atoi(kind), path);
}

static int below(const char *path) {
    size_t length = strlen(folder);
    if (!length || !path) return 0;
    char whole[PATH_MAX];
    if (path[0] != '/') {
        if (!getcwd(whole, sizeof whole)) return 0;
        strncat(whole, "/", sizeof whole - strlen(whole) - 1);
        strncat(whole, path, sizeof whole - strlen(whole) - 1);
        path = whole;
    }
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int below_fd(int fd) {
    if (!folder[0]) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

/* Whether this call is to fail, errno set; a kill does not return unless half of it is to be done first. */
static int due(int inside) {
    if (!inside) return 0;
    long n = __sync_add_and_fetch(counter, 1);
    if (n < nth || (n > nth && how <= 0)) return 0;
    if (how == 0) kill(getpid(), SIGKILL);
    errno = abs(how);
    return 1;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

#define WRITER(name, ARGS, CALL, HALF)                                                                                 \
    ssize_t name ARGS {                                                                                                \
        REAL(name);                                                                                                    \
        if (due(below_fd(fd))) {                                                                                       \
            if (how != -1) return -1;                                                                                  \
            HALF;                                                                                                      \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        return CALL;                                                                                                   \
    }
WRITER(write, (int fd, const void *data, size_t count), real(fd, data, count), real(fd, data, count / 2))
WRITER(pwrite, (int fd, const void *data, size_t count, off_t at), real(fd, data, count, at),
       real(fd, data, count / 2, at))
WRITER(pwrite64, (int fd, const void *data, size_t count, off64_t at), real(fd, data, count, at),
       real(fd, data, count / 2, at))

#define CALLER(name, ARGS, CALL, INSIDE)                                                                               \
    int name ARGS {                                                                                                    \
        REAL(name);                                                                                                    \
        if (due(INSIDE)) {                                                                                             \
            if (how != -1) return -1;                                                                                  \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        return CALL;                                                                                                   \
    }
CALLER(fsync, (int fd), real(fd), below_fd(fd))
CALLER(fdatasync, (int fd), real(fd), below_fd(fd))
CALLER(ftruncate, (int fd, off_t size), real(fd, size), below_fd(fd))
CALLER(ftruncate64, (int fd, off64_t size), real(fd, size), below_fd(fd))
CALLER(rename, (const char *from, const char *to), real(from, to), below(to))
CALLER(mkdir, (const char *path, mode_t mode), real(path, mode), below(path))

#define OPENER(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                       \
        REAL(name);                                                                                                    \
        mode_t mode = 0;                                                                                               \
        if (flags & O_CREAT) {                                                                                         \
            va_list more;                                                                                              \
            va_start(more, flags);                                                                                     \
            mode = va_arg(more, mode_t);                                                                               \
            va_end(more);                                                                                              \
        }                                                                                                              \
        if ((flags & O_CREAT) && due(below(path))) {                                                                   \
            if (how != -1) return -1;                                                                                  \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        return real(path, flags, mode);                                                                                \
    }
OPENER(open)
OPENER(open64)
