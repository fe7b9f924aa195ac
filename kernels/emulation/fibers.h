// The host variant for kernels of several ranks: several grids run at once, every CUDA thread as a fiber. A fiber
// waiting for another rank lets other fibers run. Replaces host.h; the scheduler is in fibers_scheduler.h.
#pragma once

#if !defined(__CUDACC__)

#define GC_FIBERS

typedef unsigned int u32;
typedef unsigned long long u64;

struct Dim {
    u32 x, y, z;
};

extern "C" {

// The place of the running fiber: CUDA's built-in variables.
struct Place {
    Dim thread, block, threads, blocks;
};
typedef void (*Body)(const void* arguments);

const Place* gc_place();
// Wait until all threads of the block have arrived; return whether all voted true.
bool gc_barrier(bool vote);
// Wait until all threads of the row have arrived with the same action: a vote, or a move of 128 bytes between memory at
// `address` and the threads' words. Return whether all threads voted true.
enum RowAction : u32 { A_VOTE, A_LOAD, A_STORE };
bool gc_row(RowAction action, u64 address, u64* word, bool vote);
// Let other fibers run: the calling fiber waits for an event.
void gc_pause();
// Possibly let other ranks run, if turns are random: called at every synchronising access.
void gc_between();
// Return a random bit; 0 if turns are not random.
u32 gc_coin();
// Return the time in nanoseconds, or the number of turns as time.
u64 gc_clock();
// Return the block's shared array of a declaration, by its number in the source (`__COUNTER__`).
void* gc_shared(u32 place, u64 bytes);
// Remember the first fault of a world: later faults often follow from the first.
void gc_fault(const char* what, u64 address);

// Run a grid to the end. Return null, or the text of the first fault, valid until the thread's next call.
const char* gc_run(Body body, const void* arguments, u32 blocks, u32 threads);

}

namespace host {

constexpr u64 ARENA = 48 << 10;  // shared memory granted to a block by every GPU

inline void* shared(u32 place, u64 bytes) { return gc_shared(place, bytes); }
inline void fault(const char* what, u64 address) { gc_fault(what, address); }

}  // namespace host

#define threadIdx (gc_place()->thread)
#define blockIdx (gc_place()->block)
#define blockDim (gc_place()->threads)
#define gridDim (gc_place()->blocks)

inline void __syncthreads() { gc_barrier(true); }
inline int __syncthreads_and(int vote) { return gc_barrier(vote != 0); }

// As in host.h. In addition, name_thread(&arguments) runs a single thread of the kernel, for gc_launch().
#define GC_ENTRY(name, Arguments, ...)                                                             \
    extern "C" void name##_thread(const void* a) { __VA_ARGS__(*static_cast<const Arguments*>(a)); } \
    extern "C" const char* name(u32 blocks, u32 threads, const Arguments* a) {                     \
        return gc_run(name##_thread, a, blocks, threads);                                          \
    }

// Tests under ThreadSanitizer compile kernels and scheduler apart, to instrument only the kernels.
#if !defined(GC_SCHEDULER_ELSEWHERE)
#include "emulation/fibers_scheduler.h"
#endif

#endif
