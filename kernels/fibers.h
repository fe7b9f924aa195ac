// What a kernel sees of the CPU when ranks meet in it: it is one of several under way, every CUDA thread a fiber, and a
// fiber that waits for another rank lets others run. In the place of host.h; the scheduler says how they take turns.
#pragma once

#if !defined(__CUDACC__)

#define GC_FIBERS

typedef unsigned int u32;
typedef unsigned long long u64;

struct Dim {
    u32 x, y, z;
};

extern "C" {

// Where the fiber is that runs.
struct Place {
    Dim thread, block, threads, blocks;
};
typedef void (*Body)(const void* arguments);

const Place* gc_place();
// Returns once all threads of the block are here; whether all voted for it.
bool gc_barrier(bool vote);
// Lets others run: this one waits for something.
void gc_pause();
// A place where another rank may come in between: with random turns it sometimes does.
void gc_between();
// A random bit, or 0 where turns are not random.
u32 gc_coin();
u64 gc_clock();
// The block's array that is declared at this place of the text.
void* gc_shared(u32 place, u64 bytes);
// Remembers the first fault of a world.
void gc_fault(const char* what, u64 address);

// Runs a grid to its end and returns null, or the text of its first fault, which the thread's next one overwrites.
const char* gc_run(Body body, const void* arguments, u32 blocks, u32 threads);

}

namespace host {

constexpr u64 ARENA = 48 << 10;  // the shared memory that every GPU grants to a block

inline void* shared(u32 place, u64 bytes) { return gc_shared(place, bytes); }
inline void fault(const char* what, u64 address) { gc_fault(what, address); }

}  // namespace host

#define threadIdx (gc_place()->thread)
#define blockIdx (gc_place()->block)
#define blockDim (gc_place()->threads)
#define gridDim (gc_place()->blocks)

inline void __syncthreads() { gc_barrier(true); }
inline int __syncthreads_and(int vote) { return gc_barrier(vote != 0); }

// As host.h has it; name_thread(&arguments) is what one thread does, for gc_launch().
#define GC_ENTRY(name, Arguments, ...)                                                             \
    extern "C" void name##_thread(const void* a) { __VA_ARGS__(*static_cast<const Arguments*>(a)); } \
    extern "C" const char* name(u32 blocks, u32 threads, const Arguments* a) {                     \
        return gc_run(name##_thread, a, blocks, threads);                                          \
    }

#if !defined(GC_SCHEDULER_ELSEWHERE)
#include "fibers_scheduler.h"
#endif

#endif
