// Allocations of the engine that fail when a test says so: loaded before the C++ library.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> left{-1};   // how many succeed before the next fails; negative: all do
static std::atomic<long> failed{0};

extern "C" void fail_after(long count) {
    failed = 0;
    left = count;
}

// Returns whether an allocation has failed since, and lets all others succeed.
extern "C" int has_failed() {
    left = -1;
    return failed.load() != 0;
}

// Whether the engine allocates: no other object of the process has its entry.
static bool is_engines(void* caller) {
    Dl_info found;
    if (dladdr(caller, &found) == 0 || found.dli_fname == nullptr) return false;
    void* object = dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (object == nullptr) return false;
    const bool has_entry = dlsym(object, "PyInit__engine") != nullptr;
    dlclose(object);
    return has_entry;
}

static void* allocated(std::size_t nbytes, void* caller) {
    if (left.load() >= 0 && is_engines(caller) && left.fetch_sub(1) == 0) {
        failed = 1;
        throw std::bad_alloc();
    }
    void* start = std::malloc(nbytes == 0 ? 1 : nbytes);
    if (start == nullptr) throw std::bad_alloc();
    return start;
}

void* operator new(std::size_t nbytes) { return allocated(nbytes, __builtin_return_address(0)); }
void* operator new[](std::size_t nbytes) { return allocated(nbytes, __builtin_return_address(0)); }
void operator delete(void* start) noexcept { std::free(start); }
void operator delete[](void* start) noexcept { std::free(start); }
void operator delete(void* start, std::size_t) noexcept { std::free(start); }
void operator delete[](void* start, std::size_t) noexcept { std::free(start); }
