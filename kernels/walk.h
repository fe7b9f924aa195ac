// How the kernels walk over arrays: by words of 16 bytes where all addresses allow it, several of them at once.
//
// A grid of one thread, by which training converts gradients on a CPU, takes plain loops, which compilers vectorise.
#pragma once

#include "dialect.h"

#if defined(__CUDACC__)
GC_DEV bool is_alone() { return false; }
#else
GC_DEV bool is_alone() { return blockDim.x == 1 && gridDim.x == 1; }
#endif

// Which elements lie in whole words. Those before the first word and after the last are edges.
struct Layout {
    u64 head, words, edges;
};

// `differences` has a bit wherever an address differs from dst.
template <class T> GC_DEV Layout layout_of(u64 dst, u64 differences, u64 count) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 gap = (0 - dst) % sizeof(Word), head = gap / sizeof(T);
    if (differences % sizeof(Word) != 0 || gap % sizeof(T) != 0 || head > count) return {count, 0, count};
    const u64 words = (count - head) / PER_WORD;
    return {head, words, count - words * PER_WORD};
}

// Where units lie, in bytes from the beginning of an array: evenly spaced, or outside of the words.
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

// The units that a thread handles at once: `apart` from each other, as many as threads lie between them.
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

// Calls job(batch) for the batches that are the thread's share of `count` units. The blocks take tiles of AT_ONCE units
// for each thread in turn, and what fills no tile, unit by unit. blockDim.x is a power of two.
template <u32 AT_ONCE, class Job> GC_DEV void for_batches(u64 count, const Job& job) {
    const u64 threads = blockDim.x, tile = threads * AT_ONCE, tiled = count & ~(tile - 1);
    GC_ROLLED
    for (u64 first = blockIdx.x * tile + threadIdx.x; first < tiled; first += gridDim.x * tile)
        job(Batch<AT_ONCE>{first, threads});
    GC_ROLLED
    for (u64 first = tiled + blockIdx.x * threads + threadIdx.x; first < count; first += gridDim.x * threads)
        job(Batch<1>{first, threads});
}
