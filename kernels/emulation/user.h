// The host variant of CUDA C++ for kernels of programs: `RawKernel`, `RawModule` and the generated element-wise kernels
// of CuPy, compiled by g++ from the text that NVRTC would get. Every CUDA thread is a fiber (host.h); the blocks of a
// grid run one after another, so atomic operations are ordinary ones, and shared memory is static memory.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GC_USER
#include "emulation/host.h"

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict __restrict__
#define __align__(n) alignas(n)
#define __grid_constant__
#define CUPY_FOR(i, n) for (ptrdiff_t i = blockIdx.x * (ptrdiff_t)blockDim.x + threadIdx.x; i < (n); \
                            i += (ptrdiff_t)blockDim.x * gridDim.x)
constexpr int warpSize = 32;
typedef Dim dim3;

namespace host {

static u64 lanes[32 * 32];  // a word of each thread of the block, for moves inside a warp
static char* dynamic_memory;

static u32 lane() { return u32(machine->current - machine->fibers) % 32; }
static Fiber* warp() { return machine->current - lane(); }
static u64* words() { return lanes + (warp() - machine->fibers); }
static u32 warp_threads() {
    u32 first = u32(warp() - machine->fibers);
    return machine->block.threads - first < 32 ? machine->block.threads - first : 32;
}

// Return the lanes of the warp that have not ended.
static u32 living() {
    u32 found = 0;
    for (u32 i = 0; i < warp_threads(); ++i) found |= u32(warp()[i].state != DONE) << i;
    return found;
}

// Let go on the lanes at a barrier of the warp whose partners have all come.
static void settle_warp() {
    u32 waiting = 0;
    for (u32 i = 0; i < warp_threads(); ++i) waiting |= u32(warp()[i].state == TOGETHER) << i;
    for (u32 i = 0; i < warp_threads(); ++i) {
        Fiber& fiber = warp()[i];
        if (fiber.state != TOGETHER || (fiber.mask & living() & ~waiting) != 0) continue;
        for (u32 other = 0; other < warp_threads(); ++other)
            if (fiber.mask >> other & 1 && warp()[other].state == TOGETHER) warp()[other].state = RUNNABLE;
    }
}

static void warp_barrier(u32 mask) {
    machine->current->mask = mask;
    machine->current->state = TOGETHER;
    settle_warp();
    if (machine->current->state == TOGETHER) leave();
}

// A thread that has ended is awaited at no barrier: many programs return early in threads without work.
static void ended_early() {
    settle_warp();
    Block& block = machine->block;
    if (block.arrived > 0 && block.arrived == block.left) wake_all(block);
}

// Move the word of a lane to this thread; all lanes of the mask come.
template <class T> T shuffled(u32 mask, T value, u32 source, bool valid) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    memcpy(&words()[lane()], &value, sizeof(T));
    warp_barrier(mask);
    if (valid && source < warp_threads()) memcpy(&value, &words()[source], sizeof(T));
    warp_barrier(mask);
    return value;
}

inline u32 ballot(u32 mask, int vote) {
    words()[lane()] = vote != 0;
    warp_barrier(mask);
    u32 found = 0, there = living() & mask;
    for (u32 i = 0; i < 32; ++i)
        if (there >> i & 1) found |= u32(words()[i]) << i;
    warp_barrier(mask);
    return found;
}

inline u32 counted(int vote) {
    machine->block.agreed += vote != 0;
    barrier(true);
    u32 found = machine->block.agreed;
    barrier(true);
    machine->block.agreed = 0;
    barrier(true);
    return found;
}

// Call a kernel with arguments in a buffer each, of the sizes given: an integer of Python has eight bytes, and on the
// GPU a parameter of four takes the lower half.
struct UserCall {
    void** arguments;
    const u64* sizes;
};
template <class T> T taken(const UserCall& call, size_t index) {
    typename std::remove_cv<typename std::remove_reference<T>::type>::type value{};
    memcpy(static_cast<void*>(&value), call.arguments[index], call.sizes[index] < sizeof(value) ? call.sizes[index] : sizeof(value));
    return value;
}
template <auto function> struct Kernel;
template <class... P, void (*function)(P...)> struct Kernel<function> {
    static constexpr u64 parameters = sizeof...(P);
    // Bit i: parameter i is a pointer to const, so the kernel only reads there.
    static u64 constants() {
        u64 found = 0, bit = 1;
        ((found |= std::is_pointer<P>::value && std::is_const<typename std::remove_pointer<P>::type>::value ? bit : 0,
          bit <<= 1), ...);
        return found;
    }
    template <size_t... I> static void call(const UserCall& call, std::index_sequence<I...>) {
        function(taken<P>(call, I)...);
    }
    static void body(const void* given) {
        call(*static_cast<const UserCall*>(given), std::make_index_sequence<sizeof...(P)>());
    }
    static const char* run(const Dim* grid, u64 shared, void** arguments, const u64* sizes, u64 count) {
        if (count != parameters) return "the kernel has another number of parameters";
        if (u64(grid[1].x) * grid[1].y * grid[1].z > 1024) return "a block has at most 1024 threads";
        dynamic_memory = static_cast<char*>(memset(realloc(dynamic_memory, shared + 64), UNWRITTEN, shared + 64));
        UserCall call = {arguments, sizes};
        return launch(body, &call, grid[0], grid[1]);
    }
};

}  // namespace host

#define GC_USER_ENTRY(number, ...)                                                                              \
    extern "C" const char* gc_user_##number(const Dim* grid, u64 shared, void** a, const u64* sizes, u64 count) { \
        return host::Kernel<__VA_ARGS__>::run(grid, shared, a, sizes, count);                                    \
    }                                                                                                            \
    extern "C" u64 gc_constants_##number() { return host::Kernel<__VA_ARGS__>::constants(); }
#define GC_DYNAMIC(T, name) T* name = reinterpret_cast<T*>((u64(host::dynamic_memory) + 15) / 16 * 16)

// ---------------------------------------------------------------- barriers, votes, shuffles, atomic operations

inline int __syncthreads_count(int vote) { return int(host::counted(vote)); }
inline int __syncthreads_or(int vote) { return !host::barrier(vote == 0); }
inline void __syncwarp(u32 mask = ~0u) { host::warp_barrier(mask); }
inline u32 __activemask() { return host::living(); }
inline u32 __ballot_sync(u32 mask, int vote) { return host::ballot(mask, vote); }
inline int __any_sync(u32 mask, int vote) { return host::ballot(mask, vote) != 0; }
inline int __all_sync(u32 mask, int vote) { return host::ballot(mask, !vote) == 0; }
template <class T> T __shfl_sync(u32 mask, T value, int source, int width = 32) {
    u32 first = host::lane() / width * width;
    return host::shuffled(mask, value, first + u32(source) % width, true);
}
template <class T> T __shfl_up_sync(u32 mask, T value, u32 delta, int width = 32) {
    return host::shuffled(mask, value, host::lane() - delta, host::lane() % width >= delta);
}
template <class T> T __shfl_down_sync(u32 mask, T value, u32 delta, int width = 32) {
    return host::shuffled(mask, value, host::lane() + delta, host::lane() % width + delta < u32(width));
}
template <class T> T __shfl_xor_sync(u32 mask, T value, int other, int width = 32) {
    return host::shuffled(mask, value, host::lane() ^ u32(other), (host::lane() ^ u32(other)) / width <= host::lane() / width);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(u32) {}

#define GC_ATOMIC(name, expression)                              \
    template <class T, class U> T name(T* place, U operand) {    \
        T old = *place, value = T(operand);                      \
        *place = T(expression);                                  \
        return old;                                              \
    }
GC_ATOMIC(atomicAdd, old + value)
GC_ATOMIC(atomicSub, old - value)
GC_ATOMIC(atomicExch, value)
GC_ATOMIC(atomicMin, value < old ? value : old)
GC_ATOMIC(atomicMax, value > old ? value : old)
GC_ATOMIC(atomicAnd, old & value)
GC_ATOMIC(atomicOr, old | value)
GC_ATOMIC(atomicXor, old ^ value)
GC_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
GC_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <class T, class U, class V> T atomicCAS(T* place, U compared, V value) {
    T old = *place;
    if (old == T(compared)) *place = T(value);
    return old;
}

// ---------------------------------------------------------------- numbers and vectors

template <class To, class From> To gc_bits(From value) {
    To found;
    memcpy(&found, &value, sizeof(To));
    return found;
}
inline int __float_as_int(float x) { return gc_bits<int>(x); }
inline u32 __float_as_uint(float x) { return gc_bits<u32>(x); }
inline float __int_as_float(int x) { return gc_bits<float>(x); }
inline float __uint_as_float(u32 x) { return gc_bits<float>(x); }
inline long long __double_as_longlong(double x) { return gc_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return gc_bits<double>(x); }
template <class T> T __ldg(const T* place) { return *place; }
template <class A, class B> auto min(A a, B b) -> typename std::common_type<A, B>::type { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) -> typename std::common_type<A, B>::type { return a < b ? b : a; }
#define GC_FAST(name) inline float __##name##f(float x) { return name##f(x); }
GC_FAST(exp) GC_FAST(log) GC_FAST(log2) GC_FAST(log10) GC_FAST(sin) GC_FAST(cos) GC_FAST(tan)
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double normcdf(double x) { return erfc(-x / sqrt(2.0)) / 2; }
inline double erfcinv(double y) {
    double low = -28, high = 28;  // erfc falls from 2 to 0 between these
    for (int i = 0; i < 64; ++i) (erfc((low + high) / 2) > y ? low : high) = (low + high) / 2;
    return (low + high) / 2;
}
inline double erfinv(double y) { return erfcinv(1 - y); }
inline double normcdfinv(double y) { return -sqrt(2.0) * erfcinv(2 * y); }
inline float erfcinvf(float y) { return float(erfcinv(y)); }
inline float erfinvf(float y) { return float(erfinv(y)); }
inline float normcdff(float x) { return float(normcdf(x)); }
inline float normcdfinvf(float y) { return float(normcdfinv(y)); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mul24(int a, int b) { return a * b; }
inline u64 gc_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + now.tv_nsec;
}
inline long long clock64() { return gc_nanoseconds(); }
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
template <class T> using complex = std::complex<T>;
namespace thrust { template <class T> using complex = std::complex<T>; }

#define GC_VECTORS(T, name)                                                                     \
    struct name##1 { T x; };                                                                    \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                          \
    struct name##3 { T x, y, z; };                                                              \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };          \
    inline name##1 make_##name##1(T x) { return {x}; }                                          \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                  \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                          \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
GC_VECTORS(signed char, char) GC_VECTORS(unsigned char, uchar) GC_VECTORS(short, short) GC_VECTORS(unsigned short, ushort)
GC_VECTORS(int, int) GC_VECTORS(unsigned, uint) GC_VECTORS(long long, longlong) GC_VECTORS(unsigned long long, ulonglong)
GC_VECTORS(float, float) GC_VECTORS(double, double)
typedef float2 cuFloatComplex;
typedef double2 cuDoubleComplex;

// Half precision: stored in 16 bits, computed in float32, as most programs do.
struct __half {
    _Float16 bits;
    __half() = default;
    template <class T, class = typename std::enable_if<std::is_arithmetic<T>::value>::type> __half(T x) : bits(_Float16(float(x))) {}
    operator float() const { return float(bits); }
    __half& operator+=(__half x) { return *this = float(*this) + float(x); }
    __half& operator-=(__half x) { return *this = float(*this) - float(x); }
    __half& operator*=(__half x) { return *this = float(*this) * float(x); }
};
typedef __half half, float16;
inline __half __float2half(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __hadd(__half a, __half b) { return float(a) + float(b); }
inline __half __hmul(__half a, __half b) { return float(a) * float(b); }
inline __half __hfma(__half a, __half b, __half c) { return float(a) * float(b) + float(c); }

// An array of an element-wise kernel or a kernel in carray.cuh's manner: elements by number in C order, or by index.
template <class T> struct CArray {
    T* data;
    ptrdiff_t count;
    int axes;
    const ptrdiff_t *lengths, *steps;  // steps in bytes
    ptrdiff_t size() const { return count; }
    const ptrdiff_t* shape() const { return lengths; }
    const ptrdiff_t* strides() const { return steps; }
    T& operator[](const ptrdiff_t* index) const {
        ptrdiff_t place = 0;
        for (int axis = 0; axis < axes; ++axis) place += steps[axis] * index[axis];
        return *(T*)((char*)data + place);
    }
    template <class I, class = typename std::enable_if<std::is_integral<I>::value>::type> T& operator[](I number) const {
        ptrdiff_t place = 0, left = ptrdiff_t(number);
        for (int axis = axes; axis-- > 0; left /= lengths[axis]) place += steps[axis] * (left % lengths[axis]);
        return *(T*)((char*)data + place);
    }
};
struct CIndexer {
    ptrdiff_t count;
    int axes;
    const ptrdiff_t* lengths;
    ptrdiff_t index[32];
    ptrdiff_t size() const { return count; }
    const ptrdiff_t* shape() const { return lengths; }
    const ptrdiff_t* get() const { return index; }
    void set(ptrdiff_t number) {
        for (int axis = axes; axis-- > 0; number /= lengths[axis]) index[axis] = number % lengths[axis];
    }
};
