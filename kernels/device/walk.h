// Loops over arrays for the kernels: words of 16 bytes if all addresses allow words, several words at once per
// thread.
//
// On a CPU, training converts gradients with a grid of a single thread. Kernels then use plain loops instead,
// vectorised by the compiler (`is_alone`).
#pragma once

#include "device/dialect.h"

// Return whether the grid has a single thread. Constant on a GPU, so the plain loop is not even compiled there.
#if defined(__CUDACC__)
GC_DEV bool is_alone() { return false; }
#else
GC_DEV bool is_alone() { return blockDim.x == 1 && gridDim.x == 1; }
#endif

// The division of an array: `head` elements before the first word, then `words`. Elements outside words are `edges`.
struct Layout {
    u64 head, words, edges;
};

// Return the layout of `count` elements at `dst`. `differences` has a bit set wherever some other address differs
// from `dst`: words need the same alignment in all arrays. Otherwise all elements are edges.
template <class T> GC_DEV Layout layout_of(u64 dst, u64 differences, u64 count) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 gap = (0 - dst) % sizeof(Word), head = gap / sizeof(T);
    if (differences % sizeof(Word) != 0 || gap % sizeof(T) != 0 || head > count) return {count, 0, count};
    const u64 words = (count - head) / PER_WORD;
    return {head, words, count - words * PER_WORD};
}

// The offset of unit i in bytes from the beginning of an array: evenly spaced (words), or before and after the words.
struct Evenly {
    u64 start, step;
    GC_DEV u64 operator()(u64 i) const { return start + i * step; }
};
template <class T> struct Edges {
    u64 head, skipped;
    GC_DEV u64 operator()(u64 i) const { return (i < head ? i : i + skipped) * sizeof(T); }
};
template <class T> GC_DEV Evenly words_of(const Layout& layout) { return {layout.head * sizeof(T), sizeof(Word)}; }
template <class T> GC_DEV Edges<T> edges_of(const Layout& layout) {
    return {layout.head, layout.words * (sizeof(Word) / sizeof(T))};
}

// The units handled at once by a thread: `first`, `first` + `apart`, ... With `apart` the number of threads,
// neighbouring threads access neighbouring units. All reads are issued before the first use, to overlap memory
// latency.
template <u32 AT_ONCE> struct Batch {
    u64 first, apart;

    template <class Unit, class Place>
    GC_DEV void read(Unit (&units)[AT_ONCE], const void* from, const Place& place) const {
        GC_UNROLL
        for (u32 i = 0; i < AT_ONCE; ++i)
            units[i] = load<Unit>(address_of(from) + place(first + i * apart));
    }
    template <class Unit, class Place>
    GC_DEV void write(void* to, const Unit (&units)[AT_ONCE], const Place& place) const {
        GC_UNROLL
        for (u32 i = 0; i < AT_ONCE; ++i)
            store<Unit>(address_of(to) + place(first + i * apart), units[i]);
    }
};

// Call job(batch) for this thread's share of `count` units. Blocks take tiles in turn, AT_ONCE units per thread; the
// rest is done unit by unit. blockDim.x and AT_ONCE are powers of two: `tiled` is computed with a mask.
template <u32 AT_ONCE, class Job> GC_DEV void for_batches(u64 count, const Job& job) {
    const u64 threads = blockDim.x, tile = threads * AT_ONCE, tiled = count & ~(tile - 1);
    GC_ROLLED
    for (u64 first = blockIdx.x * tile + threadIdx.x; first < tiled; first += gridDim.x * tile)
        job(Batch<AT_ONCE>{first, threads});
    GC_ROLLED
    for (u64 first = tiled + blockIdx.x * threads + threadIdx.x; first < count; first += gridDim.x * threads)
        job(Batch<1>{first, threads});
}
