// Makes one call to the system fail, for tests: preloaded, and armed in a forked child.
//
// Only calls about files below a given root count. From the n-th call on, either every call that
// takes room fails with ENOSPC (a disk that is full), or the n-th call alone fails with EIO.

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static long armed = 0, calls = 0, hits = 0;
static bool stays_full = false;

extern "C" void fault_arm(const char* below, long n, int full) {
    std::snprintf(root, sizeof root, "%s", below);
    armed = n, calls = 0, hits = 0, stays_full = full != 0;
}
extern "C" long fault_hits() { return hits; }

static bool below_root(const char* path) {
    if (path == nullptr) return false;
    return path[0] != '/' || std::strncmp(path, root, std::strlen(root)) == 0;
}

static bool is_ours(int fd) {
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return false;
    path[length] = 0;
    return below_root(path);
}

// Whether this call is to fail; `takes_room`: a full disk refuses it.
static bool fails(bool ours, bool takes_room) {
    if (!armed || !ours) return false;
    ++calls;
    bool now = stays_full ? calls >= armed && takes_room : calls == armed;
    if (now) ++hits, errno = stays_full ? ENOSPC : EIO;
    return now;
}

template <typename F>
static F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

extern "C" ssize_t write(int fd, const void* data, size_t size) {
    static auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
    return fails(armed && is_ours(fd), true) ? -1 : real(fd, data, size);
}
extern "C" ssize_t writev(int fd, const struct iovec* parts, int count) {
    static auto real = next<ssize_t (*)(int, const struct iovec*, int)>("writev");
    return fails(armed && is_ours(fd), true) ? -1 : real(fd, parts, count);
}
extern "C" ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
    static auto real = next<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
    return fails(armed && is_ours(fd), true) ? -1 : real(fd, data, size, at);
}
extern "C" int fsync(int fd) {
    static auto real = next<int (*)(int)>("fsync");
    return fails(armed && is_ours(fd), true) ? -1 : real(fd);
}
extern "C" int ftruncate64(int fd, off64_t size) {
    static auto real = next<int (*)(int, off64_t)>("ftruncate64");
    return fails(armed && is_ours(fd), false) ? -1 : real(fd, size);
}
extern "C" int rename(const char* from, const char* to) {
    static auto real = next<int (*)(const char*, const char*)>("rename");
    return fails(below_root(to), false) ? -1 : real(from, to);
}
extern "C" int mkdir(const char* path, mode_t mode) {
    static auto real = next<int (*)(const char*, mode_t)>("mkdir");
    return fails(below_root(path), true) ? -1 : real(path, mode);
}
extern "C" int open64(const char* path, int flags, ...) {
    static auto real = next<int (*)(const char*, int, ...)>("open64");
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    bool creates = (flags & O_CREAT) && access(path, F_OK) != 0;
    return fails(creates && below_root(path), true) ? -1 : real(path, flags, mode);
}
