// The dialect of the kernels: CUDA C++, compiled for GPUs by NVRTC and for CPUs by g++ from the same text.
//
// No CUDA header is needed. GC_ENTRY(name, Arguments, kernel...) defines a kernel. On the device, a launch passes
// Arguments by value. On the host, name(blocks, threads, &arguments) runs the grid and returns null, or the text of
// the first fault. The host has three variants. By default each CUDA thread is a fiber of a single grid (host.h).
// With GC_FIBERS several grids of several ranks run at once (fibers.h). With GC_PLAIN only arithmetic is defined, for
// the engine.
#pragma once

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The widest unit read or written at once by a thread.
struct alignas(16) Word {
    u32 x, y, z, w;
};

constexpr u32 ROW = 8;  // threads moving 128 bytes together

#if defined(__CUDACC__)

#define GC_DEV __device__ __forceinline__
#define GC_UNROLL _Pragma("unroll")
#define GC_ROLLED _Pragma("unroll 1")
#define GC_SHARED(T, name, n) __shared__ T name[n]
// __grid_constant__: arguments stay in constant memory; indexing an array in a copy would force the copy to local
// memory. Launch bounds (512, 1): give the registers to a single block per processor, for more loads under way.
#define GC_ENTRY(name, Arguments, ...) \
    extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ Arguments a) { __VA_ARGS__(a); }

GC_DEV u32 bits_of(float x) { return __float_as_uint(x); }
GC_DEV float float_of(u32 bits) { return __uint_as_float(bits); }
GC_DEV u64 bits_of(double x) { return __double_as_longlong(x); }
GC_DEV double double_of(u64 bits) { return __longlong_as_double(bits); }

GC_DEV float root(float x) { return sqrtf(x); }
GC_DEV double root(double x) { return ::sqrt(x); }
GC_DEV float exponential(float x) { return expf(x); }
GC_DEV double exponential(double x) { return ::exp(x); }
GC_DEV float logarithm(float x) { return logf(x); }
GC_DEV double logarithm(double x) { return ::log(x); }
GC_DEV float raised(float x, float y) { return powf(x, y); }
GC_DEV double raised(double x, double y) { return ::pow(x, y); }

template <class Unit> GC_DEV Unit load(u64 address) { return *reinterpret_cast<const Unit*>(address); }
template <class Unit> GC_DEV void store(u64 address, Unit unit) { *reinterpret_cast<Unit*>(address) = unit; }

// Explicit vector instructions: the compiler may split a word into several narrow accesses.
template <> GC_DEV Word load<Word>(u64 address) {
    Word word;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(address));
    return word;
}
template <> GC_DEV void store<Word>(u64 address, Word word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 : : "l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}

// Synchronisation between ranks, at system scope: the other rank may be on another GPU. Once load_acquire() reads the
// value of a store_release(), all writes before the store are visible.
GC_DEV u64 load_acquire(u64 address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
GC_DEV u64 load_relaxed(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
GC_DEV void store_release(u64 address, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}
GC_DEV void store_relaxed(u64 address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}
// A packet mixes data and sequence numbers: parts of four bytes arrive in any order.
GC_DEV Word load_packet(u64 address) {
    Word word;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(address) : "memory");
    return word;
}
GC_DEV void store_packet(u64 address, Word word) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 : : "l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}
// A row: ROW threads of a warp with consecutive numbers, together at the same instruction. A row moves 128 bytes from
// an address divisible by 128, each thread 16 bytes. Over NVLink and in a GPU's memory the bytes of a row become
// visible together: not promised by PTX, but the base of NCCL's LL128 protocol on the same links.
GC_DEV u32 row_mask() { return 0xFFu << (threadIdx.x & 24); }
GC_DEV bool row_all(bool vote) { return __all_sync(row_mask(), vote); }
// Bring the threads of a row together; straight code after the call keeps the threads together.
GC_DEV void gather_row() { __syncwarp(row_mask()); }
GC_DEV Word load_row(u64 address) { return load_packet(address); }
GC_DEV void store_row(u64 address, Word word) { store_packet(address, word); }
// Return the next number of a counter running from 0 to `last`, then from 0 again.
GC_DEV u32 take_ticket(u64 address, u32 last) { return atomicInc(reinterpret_cast<u32*>(address), last); }
GC_DEV void rest() { __nanosleep(20); }
GC_DEV u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

#else

#if !defined(GC_FIBERS) && !defined(GC_PLAIN)
#include "emulation/host.h"
#endif

#define GC_DEV inline __attribute__((always_inline))
#define GC_UNROLL
#define GC_ROLLED
#define GC_SHARED(T, name, n)                                                            \
    static_assert(sizeof(T) * (n) <= host::ARENA, "more than a block has");              \
    T* const name = static_cast<T*>(host::shared(__COUNTER__, sizeof(T) * (n)))

template <class To, class From> GC_DEV To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "nothing may be lost");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}
GC_DEV u32 bits_of(float x) { return same_bits<u32>(x); }
GC_DEV float float_of(u32 bits) { return same_bits<float>(bits); }
GC_DEV u64 bits_of(double x) { return same_bits<u64>(x); }
GC_DEV double double_of(u64 bits) { return same_bits<double>(bits); }

GC_DEV float root(float x) { return __builtin_sqrtf(x); }
GC_DEV double root(double x) { return __builtin_sqrt(x); }
GC_DEV float exponential(float x) { return __builtin_expf(x); }
GC_DEV double exponential(double x) { return __builtin_exp(x); }
GC_DEV float logarithm(float x) { return __builtin_logf(x); }
GC_DEV double logarithm(double x) { return __builtin_log(x); }
GC_DEV float raised(float x, float y) { return __builtin_powf(x, y); }
GC_DEV double raised(double x, double y) { return __builtin_pow(x, y); }

#if !defined(GC_PLAIN)

// A GPU refuses misaligned addresses, a CPU accepts them: check here, so that tests on a CPU find the fault.
template <class Unit> GC_DEV void expect_aligned(u64 address) {
    if (address % alignof(Unit) != 0) host::fault("an access that is not aligned", address);
}
template <class Unit> GC_DEV Unit load(u64 address) {
    expect_aligned<Unit>(address);
    Unit unit;
    __builtin_memcpy(&unit, reinterpret_cast<const void*>(address), sizeof(unit));
    return unit;
}
template <class Unit> GC_DEV void store(u64 address, Unit unit) {
    expect_aligned<Unit>(address);
    __builtin_memcpy(reinterpret_cast<void*>(address), &unit, sizeof(unit));
}

#endif

#if defined(GC_FIBERS)

GC_DEV u64* word_at(u64 address) {
    expect_aligned<u64>(address);
    return reinterpret_cast<u64*>(address);
}
// `gc_between` may switch to another rank: tests then meet every order of synchronising accesses.
GC_DEV u64 load_acquire(u64 address) {
    gc_between();
    return __atomic_load_n(word_at(address), __ATOMIC_ACQUIRE);
}
GC_DEV u64 load_relaxed(u64 address) { return __atomic_load_n(word_at(address), __ATOMIC_RELAXED); }
GC_DEV void store_release(u64 address, u64 value) {
    gc_between();
    __atomic_store_n(word_at(address), value, __ATOMIC_RELEASE);
}
GC_DEV void store_relaxed(u64 address, u64 value) { __atomic_store_n(word_at(address), value, __ATOMIC_RELAXED); }
// Either half may come first, with other ranks in between, as on a GPU.
GC_DEV Word load_packet(u64 address) {
    expect_aligned<Word>(address);
    const u32 first = gc_coin();
    u64 halves[2];
    halves[first] = load_relaxed(address + 8 * first);
    gc_between();
    halves[1 - first] = load_relaxed(address + 8 * (1 - first));
    Word word;
    __builtin_memcpy(&word, halves, sizeof(word));
    return word;
}
GC_DEV void store_packet(u64 address, Word word) {
    expect_aligned<Word>(address);
    const u32 first = gc_coin();
    u64 halves[2];
    __builtin_memcpy(halves, &word, sizeof(word));
    store_relaxed(address + 8 * first, halves[first]);
    gc_between();
    store_relaxed(address + 8 * (1 - first), halves[1 - first]);
}
// The row's last thread to arrive moves all 128 bytes.
GC_DEV bool row_all(bool vote) { return gc_row(A_VOTE, 0, nullptr, vote); }
GC_DEV void gather_row() {}
GC_DEV Word load_row(u64 address) {
    expect_aligned<Word>(address);
    Word word;
    gc_row(A_LOAD, address, reinterpret_cast<u64*>(&word), true);
    return word;
}
GC_DEV void store_row(u64 address, Word word) {
    expect_aligned<Word>(address);
    gc_row(A_STORE, address, reinterpret_cast<u64*>(&word), true);
}
// Relaxed, as atomicInc on a GPU.
GC_DEV u32 take_ticket(u64 address, u32 last) {
    u32* const counter = reinterpret_cast<u32*>(address);
    u32 number = __atomic_load_n(counter, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(counter, &number, number < last ? number + 1 : 0, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {}
    return number;
}
GC_DEV void rest() { gc_pause(); }
GC_DEV u64 nanoseconds() { return gc_clock(); }

#endif

#endif

GC_DEV u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }
GC_DEV void* pointer_to(u64 address) { return reinterpret_cast<void*>(address); }
