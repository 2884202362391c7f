/* Counts what is done to files below a folder, over all processes, and has the nth of these calls fail or kill.
 *
 * Preloaded (LD_PRELOAD). Armed by FAULT_DIR, FAULT_NTH, FAULT_HOW and FAULT_COUNTER in the environment, or by calling
 * fault_arm. FAULT_HOW: an errno with which the call and all later ones fail (a full disk stays full), a negative one:
 * this call alone, 0: SIGKILL before the call, -1: half of what was to be written, then SIGKILL, -1000: no fault; each
 * change of names and each fsync is a line of COUNTER.log, with the file's content in COUNTER.N.
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
static char log_path[PATH_MAX];
enum { RECORD = -1000 };

void fault_arm(const char *dir, long n, int kind, const char *counter_path) {
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = real_open(counter_path, O_RDWR | O_CLOEXEC);
    counter = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    nth = n;
    how = kind;
    snprintf(log_path, sizeof log_path, "%s.log", counter_path);
    strncpy(folder, dir, sizeof folder - 1);
}

__attribute__((constructor)) static void begin(void) {
    const char *dir = getenv("FAULT_DIR"), *n = getenv("FAULT_NTH"), *kind = getenv("FAULT_HOW");
    const char *path = getenv("FAULT_COUNTER");
    if (dir && n && kind && path) fault_arm(dir, atol(n), atoi(kind), path);
}

/* Put the path of `name` in the folder `dir` (AT_FDCWD: the working folder; name NULL: `dir` itself) into `whole`. */
static const char *absolute(int dir, const char *name, char *whole) {
    char link[64];
    whole[0] = 0;
    if (name && name[0] == '/') return strncat(whole, name, PATH_MAX - 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t length = readlink(dir == AT_FDCWD ? "/proc/self/cwd" : link, whole, PATH_MAX - 1);
    whole[length < 0 ? 0 : length] = 0;
    if (name) {
        strncat(whole, "/", PATH_MAX - strlen(whole) - 1);
        strncat(whole, name, PATH_MAX - strlen(whole) - 1);
    }
    return whole;
}

static int inside(const char *path) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int below(const char *path) {
    char whole[PATH_MAX];
    return folder[0] && path && inside(absolute(AT_FDCWD, path, whole));
}

static int below_fd(int fd) {
    char whole[PATH_MAX];
    return folder[0] && inside(absolute(fd, NULL, whole));
}

static void copy(const char *path, long n) {
    char name[PATH_MAX + 32], block[1 << 16];
    snprintf(name, sizeof name, "%.*s.%ld", (int)strlen(log_path) - 4, log_path, n);
    int from = open(path, O_RDONLY), to = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (ssize_t size; (size = read(from, block, sizeof block)) > 0;)
        if (write(to, block, size) != size) abort();
    close(from);
    close(to);
}

/* Log a call that has been made: S fsync, C create, R rename, U unlink or rmdir, M mkdir. */
static void note(char kind, int dir, const char *path, int to_dir, const char *to) {
    if (how != RECORD || !folder[0]) return;
    char whole[PATH_MAX], target[PATH_MAX] = "", line[2 * PATH_MAX + 32];
    absolute(dir, path, whole);
    if (to) absolute(to_dir, to, target);
    if (!inside(to ? target : whole)) return;
    long n = __sync_add_and_fetch(counter, 1);
    if (kind == 'S' || kind == 'R') copy(to ? target : whole, n);
    int size = snprintf(line, sizeof line, "%c\t%ld\t%s\t%s\n", kind, n, whole, target);
    int file = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, line, size) != size) abort();
    close(file);
}

/* Whether this call is to fail, errno set; a kill does not return unless half of it is to be done first. */
static int due(int is_below) {
    if (!is_below || how == RECORD) return 0;
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

#define CALLER(name, ARGS, CALL, INSIDE, NOTE)                                                                         \
    int name ARGS {                                                                                                    \
        REAL(name);                                                                                                    \
        if (due(INSIDE)) {                                                                                             \
            if (how != -1) return -1;                                                                                  \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        int result = CALL;                                                                                             \
        if (!result) NOTE;                                                                                             \
        return result;                                                                                                 \
    }
CALLER(fsync, (int fd), real(fd), below_fd(fd), note('S', fd, NULL, 0, NULL))
CALLER(fdatasync, (int fd), real(fd), below_fd(fd), note('S', fd, NULL, 0, NULL))
CALLER(ftruncate, (int fd, off_t size), real(fd, size), below_fd(fd), (void)0)
CALLER(ftruncate64, (int fd, off64_t size), real(fd, size), below_fd(fd), (void)0)
CALLER(rename, (const char *from, const char *to), real(from, to), below(to), note('R', AT_FDCWD, from, AT_FDCWD, to))
CALLER(mkdir, (const char *path, mode_t mode), real(path, mode), below(path), note('M', AT_FDCWD, path, 0, NULL))
CALLER(unlink, (const char *path), real(path), 0, note('U', AT_FDCWD, path, 0, NULL))
CALLER(rmdir, (const char *path), real(path), 0, note('U', AT_FDCWD, path, 0, NULL))
CALLER(unlinkat, (int dir, const char *path, int flags), real(dir, path, flags), 0, note('U', dir, path, 0, NULL))

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
        int is_new = (flags & O_CREAT) && access(path, F_OK);                                                          \
        int file = real(path, flags, mode);                                                                            \
        if (is_new && file >= 0) note('C', AT_FDCWD, path, 0, NULL);                                                   \
        return file;                                                                                                   \
    }
OPENER(open)
OPENER(open64)
