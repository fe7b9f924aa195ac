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
#include <atomic>
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
    memcpy(static_cast<void*>(&value), call.arguments[index], std::min<size_t>(call.sizes[index], sizeof(value)));
    return value;
}
template <auto function> struct Kernel;
template <class... P, void (*function)(P...)> struct Kernel<function> {
    static constexpr int parameters = sizeof...(P);
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
    static const char* run(const Dim* grid, u64 shared, void** arguments, const u64* sizes) {
        if (u64(grid[1].x) * grid[1].y * grid[1].z > 1024) return "a block has at most 1024 threads";
        const u64 room = shared + ARENA;  // what lies behind is watched
        dynamic_memory = static_cast<char*>(memset(granted(realloc(dynamic_memory, room)), UNWRITTEN, room));
        UserCall call = {arguments, sizes};
        const char* told = launch(body, &call, grid[0], grid[1]);
        const char* end = dynamic_memory + room;
        const bool kept = std::all_of(end - ARENA + 64, end, [](char one) { return one == char(UNWRITTEN); });
        return told != nullptr || kept ? told : "a write behind the dynamic shared memory, see shared_mem";
    }
};

}  // namespace host

#define GC_USER_ENTRY(number, ...)                                                                              \
    extern "C" const char* gc_user_##number(const Dim* gc_1, u64 gc_2, void** gc_3, const u64* gc_4) {           \
        return host::Kernel<__VA_ARGS__>::run(gc_1, gc_2, gc_3, gc_4); /* a kernel may be called `a` */           \
    }                                                                                                            \
    extern "C" int gc_parameters_##number() { return host::Kernel<__VA_ARGS__>::parameters; }                    \
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
    u32 source = host::lane() ^ u32(other);
    return host::shuffled(mask, value, source, source / width <= host::lane() / width);
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

#define atomicAdd_block atomicAdd
#define atomicAdd_system atomicAdd
#define atomicCAS_block atomicCAS
#define GC_WARP_SUM(name, expression)                                                                    \
    template <class T> T name(u32 mask, T value) {                                                       \
        T all[32], found = T();                                                                          \
        u32 there = 0;                                                                                   \
        for (int i = 0; i < 32; ++i) all[i] = host::shuffled(mask, value, i, mask >> i & 1);             \
        for (int i = 0; i < 32; ++i)                                                                     \
            if (mask >> i & 1) found = there++ == 0 ? all[i] : T(expression);                            \
        return found;                                                                                    \
    }
GC_WARP_SUM(__reduce_add_sync, found + all[i])
GC_WARP_SUM(__reduce_min_sync, all[i] < found ? all[i] : found)
GC_WARP_SUM(__reduce_max_sync, found < all[i] ? all[i] : found)
template <class T> u32 __match_any_sync(u32 mask, T value) {
    u32 found = 0;
    for (int i = 0; i < 32; ++i) found |= u32(host::shuffled(mask, value, i, true) == value && mask >> i & 1) << i;
    return found;
}

namespace cuda {
namespace std = ::std;
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
template <class T, thread_scope scope = thread_scope_system> struct atomic_ref {
    T& at;
    explicit atomic_ref(T& place) : at(place) {}
    template <class... M> T load(M...) const { return at; }
    template <class... M> void store(T value, M...) const { at = value; }
    template <class... M> T exchange(T value, M...) const { return atomicExch(&at, value); }
    template <class... M> T fetch_add(T value, M...) const { return atomicAdd(&at, value); }
    template <class... M> T fetch_sub(T value, M...) const { return atomicSub(&at, value); }
    template <class... M> T fetch_min(T value, M...) const { return atomicMin(&at, value); }
    template <class... M> T fetch_max(T value, M...) const { return atomicMax(&at, value); }
    template <class... M> bool compare_exchange_strong(T& expected, T value, M...) const {
        T compared = expected;
        return (expected = atomicCAS(&at, compared, value)) == compared;
    }
    template <class... M> bool compare_exchange_weak(T& expected, T value, M...) const {
        return compare_exchange_strong(expected, value);
    }
};
}  // namespace cuda

// Cooperative groups of a block: the block itself, and tiles of a warp. `this_grid` is not here, as blocks run one
// after another.
namespace cooperative_groups {
struct thread_block {
    static void sync() { __syncthreads(); }
    static u32 thread_rank() { return u32(host::machine->current - host::machine->fibers); }
    static u32 size() { return host::machine->block.threads; }
    static u32 num_threads() { return size(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }
template <u32 N, class = thread_block> struct thread_block_tile {
    static_assert(N <= 32 && (N & (N - 1)) == 0, "a tile is a part of a warp");
    static u32 thread_rank() { return host::lane() % N; }
    static constexpr u32 size() { return N; }
    static constexpr u32 num_threads() { return N; }
    static u32 meta_group_rank() { return thread_block::thread_rank() / N; }
    static u32 meta_group_size() { return (thread_block::size() + N - 1) / N; }
    static u32 mask() { return (N == 32 ? ~0u : (1u << N % 32) - 1) << host::lane() / N * N; }
    static void sync() { __syncwarp(mask()); }
    template <class T> static T shfl(T value, int source) { return __shfl_sync(mask(), value, source, N); }
    template <class T> static T shfl_up(T value, u32 delta) { return __shfl_up_sync(mask(), value, delta, N); }
    template <class T> static T shfl_down(T value, u32 delta) { return __shfl_down_sync(mask(), value, delta, N); }
    template <class T> static T shfl_xor(T value, int other) { return __shfl_xor_sync(mask(), value, other, N); }
    static int any(int vote) { return __any_sync(mask(), vote); }
    static int all(int vote) { return __all_sync(mask(), vote); }
    static u32 ballot(int vote) { return __ballot_sync(mask(), vote) >> host::lane() / N * N; }
};
template <u32 N, class G> thread_block_tile<N> tiled_partition(const G&) { return {}; }
template <class G> void sync(const G& group) { group.sync(); }
template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class G, class T, class Op> T reduce(const G& tile, T value, Op op) {
    for (int other = G::size() / 2; other > 0; other /= 2) value = op(value, tile.shfl_xor(value, other));
    return value;
}
}  // namespace cooperative_groups

// ---------------------------------------------------------------- numbers and vectors

template <class To, class From> To gc_bits(From value) {
    To found;
    memcpy(&found, &value, sizeof(To));
    return found;
}
#define GC_UNARY(name, To, From, expression) inline To name(From x) { return expression; }
GC_UNARY(__float_as_int, int, float, gc_bits<int>(x)) GC_UNARY(__float_as_uint, u32, float, gc_bits<u32>(x))
GC_UNARY(__int_as_float, float, int, gc_bits<float>(x)) GC_UNARY(__uint_as_float, float, u32, gc_bits<float>(x))
GC_UNARY(__double_as_longlong, long long, double, gc_bits<long long>(x))
GC_UNARY(__longlong_as_double, double, long long, gc_bits<double>(x))
GC_UNARY(__float2int_rn, int, float, int(rintf(x))) GC_UNARY(__float2int_rz, int, float, int(x))
GC_UNARY(__float2int_rd, int, float, int(floorf(x))) GC_UNARY(__float2int_ru, int, float, int(ceilf(x)))
GC_UNARY(__double2int_rn, int, double, int(rint(x))) GC_UNARY(__int2float_rn, float, int, float(x))
GC_UNARY(__fsqrt_rn, float, float, sqrtf(x)) GC_UNARY(__frcp_rn, float, float, 1 / x)
GC_UNARY(sinpi, double, double, sin(M_PI * x)) GC_UNARY(cospi, double, double, cos(M_PI * x))
GC_UNARY(sinpif, float, float, float(sinpi(x))) GC_UNARY(cospif, float, float, float(cospi(x)))
#define GC_BINARY(name, T, expression) inline T name(T x, T y) { return expression; }
GC_BINARY(__fadd_rn, float, x + y) GC_BINARY(__fmul_rn, float, x * y) GC_BINARY(__fdiv_rn, float, x / y)
GC_BINARY(__dadd_rn, double, x + y) GC_BINARY(__dmul_rn, double, x * y) GC_BINARY(__fsub_rn, float, x - y)
GC_BINARY(__umulhi, u32, u32(u64(x) * y >> 32)) GC_BINARY(__mulhi, int, int((long long)(x) * y >> 32))
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline u32 __brev(u32 x) {
    u32 found = 0;
    for (int i = 0; i < 32; ++i) found |= (x >> i & 1) << (31 - i);
    return found;
}
template <class T> T __ldg(const T* place) { return *place; }
#define __ldcg __ldg
#define __ldcs __ldg
template <class T> void __stcs(T* place, T value) { *place = value; }
template <class A, class B> auto min(A a, B b) -> typename std::common_type<A, B>::type { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) -> typename std::common_type<A, B>::type { return a < b ? b : a; }
#define GC_FAST(name) inline float __##name##f(float x) { return name##f(x); }
GC_FAST(exp) GC_FAST(log) GC_FAST(log2) GC_FAST(log10) GC_FAST(sin) GC_FAST(cos) GC_FAST(tan)
GC_BINARY(__powf, float, powf(x, y)) GC_BINARY(__fdividef, float, x / y)
GC_UNARY(__saturatef, float, float, x < 0 ? 0 : x > 1 ? 1 : x) GC_UNARY(rsqrtf, float, float, 1 / sqrtf(x))
GC_UNARY(rsqrt, double, double, 1 / sqrt(x)) GC_UNARY(rsqrt, float, float, 1 / sqrtf(x))
inline double erfcinv(double y) {
    double low = -28, high = 28;  // erfc falls from 2 to 0 between these
    for (int i = 0; i < 64; ++i) (erfc((low + high) / 2) > y ? low : high) = (low + high) / 2;
    return (low + high) / 2;
}
GC_UNARY(erfinv, double, double, erfcinv(1 - x)) GC_UNARY(normcdf, double, double, erfc(-x / sqrt(2.0)) / 2)
GC_UNARY(normcdfinv, double, double, -sqrt(2.0) * erfcinv(2 * x)) GC_UNARY(erfcinvf, float, float, float(erfcinv(x)))
GC_UNARY(erfinvf, float, float, float(erfinv(x))) GC_UNARY(normcdff, float, float, float(normcdf(x)))
GC_UNARY(normcdfinvf, float, float, float(normcdfinv(x)))
GC_UNARY(__popc, int, u32, __builtin_popcount(x)) GC_UNARY(__popcll, int, u64, __builtin_popcountll(x))
GC_UNARY(__clz, int, int, x == 0 ? 32 : __builtin_clz(x)) GC_UNARY(__ffs, int, int, __builtin_ffs(x))
GC_UNARY(__clzll, int, long long, x == 0 ? 64 : __builtin_clzll(x)) GC_BINARY(__mul24, int, x * y)
GC_UNARY(__ffsll, int, long long, __builtin_ffsll(x))
inline u64 gc_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + now.tv_nsec;
}
inline long long clock64() { return gc_nanoseconds(); }
inline clock_t clock() noexcept { return clock_t(gc_nanoseconds()); }
inline void __trap() { host::fault("a trap", 0); }
#undef assert
#define assert(...) ((__VA_ARGS__) ? (void)0 : host::fault("an assertion failed: " #__VA_ARGS__, 0))
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
typedef float2 cuFloatComplex, cuComplex;
typedef double2 cuDoubleComplex;
#define GC_COMPLEX(C, T, f)                                                                                     \
    inline T cuCreal##f(C a) { return a.x; }                                                                    \
    inline T cuCimag##f(C a) { return a.y; }                                                                    \
    inline T cuCabs##f(C a) { return std::hypot(a.x, a.y); }                                                    \
    inline C cuConj##f(C a) { return {a.x, -a.y}; }                                                             \
    inline C cuCadd##f(C a, C b) { return {a.x + b.x, a.y + b.y}; }                                             \
    inline C cuCsub##f(C a, C b) { return {a.x - b.x, a.y - b.y}; }                                             \
    inline C cuCmul##f(C a, C b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }                     \
    inline C cuCfma##f(C a, C b, C c) { return cuCadd##f(cuCmul##f(a, b), c); }                                 \
    inline C cuCdiv##f(C a, C b) {                                                                              \
        T s = b.x * b.x + b.y * b.y;                                                                            \
        return {(a.x * b.x + a.y * b.y) / s, (a.y * b.x - a.x * b.y) / s};                                      \
    }
GC_COMPLEX(cuFloatComplex, float, f) GC_COMPLEX(cuFloatComplex, float, ) GC_COMPLEX(cuDoubleComplex, double, )
GC_UNARY(cuComplexDoubleToFloat, cuFloatComplex, cuDoubleComplex, (cuFloatComplex{float(x.x), float(x.y)}))
GC_UNARY(cuComplexFloatToDouble, cuDoubleComplex, cuFloatComplex, (cuDoubleComplex{x.x, x.y}))
#define make_cuFloatComplex make_float2
#define make_cuComplex make_float2
#define make_cuDoubleComplex make_double2

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
GC_UNARY(__float2half, __half, float, x) GC_UNARY(__float2half_rn, __half, float, x)
GC_UNARY(__half2float, float, __half, x)
GC_UNARY(hexp, __half, __half, expf(x)) GC_UNARY(hsqrt, __half, __half, sqrtf(x))
GC_BINARY(__hadd, __half, float(x) + float(y)) GC_BINARY(__hsub, __half, float(x) - float(y))
GC_BINARY(__hmul, __half, float(x) * float(y)) GC_BINARY(__hdiv, __half, float(x) / float(y))
GC_BINARY(__hmax, __half, float(x) < float(y) ? y : x) GC_BINARY(__hmin, __half, float(y) < float(x) ? y : x)
inline __half __hfma(__half a, __half b, __half c) { return float(a) * float(b) + float(c); }
struct alignas(4) __half2 { __half x, y; };
typedef __half2 half2;
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

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
