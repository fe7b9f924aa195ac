// Multicast memory: memory at the same offset of all ranks, reduced or written by one access in the NVLink switch (NVLS).
//
// A reduction loads 16 bytes of every rank and combines them in an order unknown to the program; floats of 2 bytes are
// summed as float32 and rounded once. Multicast and ordinary addresses name the same memory by different ways through a
// GPU: a thread must call alias_fence() between accesses by the two ways, also if another rank's access is the other.
// Source: PTX, `multimem` and `fence.proxy.alias`.
//
// On a CPU, `group` is the address of a table: the number of ranks, then the address of every rank's memory.
#pragma once

#include "device/peer.h"
#include "device/reduce.cu"

enum Multimem : u32 { M_ADD, M_MIN, M_MAX, M_AND, M_OR, M_XOR };

#if defined(__CUDACC__)

// PTX has `multimem` with sums of narrow floats as float32 since CUDA 12.2, for Hopper and newer.
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 2))

GC_DEV void alias_fence() { asm volatile("fence.proxy.alias;" ::: "memory"); }

GC_DEV void multimem_store(u64 group, u64 offset, Word word) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 : : "l"(group + offset), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}

// A reducing load of four registers, or of two parts of 8 bytes, or of four parts of 4 bytes.
#define GC_LOAD_WORD(what)                                                                        \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." what " {%0, %1, %2, %3}, [%4];"         \
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(address) : "memory")
#define GC_LOAD_LONG(what, low, high, place)                                                       \
    {                                                                                             \
        u64 both;                                                                                 \
        asm volatile("multimem.ld_reduce.relaxed.sys.global." what " %0, [%1];"                   \
                     : "=l"(both) : "l"(place) : "memory");                                       \
        low = u32(both), high = u32(both >> 32);                                                  \
    }
#define GC_LOAD_INT(what, part, place)                                                            \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." what " %0, [%1];"                       \
                 : "=r"(part) : "l"(place) : "memory")
#define GC_LOAD_INTS(what)                                                                        \
    GC_LOAD_INT(what, word.x, address);                                                           \
    GC_LOAD_INT(what, word.y, address + 4);                                                       \
    GC_LOAD_INT(what, word.z, address + 8);                                                       \
    GC_LOAD_INT(what, word.w, address + 12)
#define GC_LOAD_LONGS(what)                                                                       \
    GC_LOAD_LONG(what, word.x, word.y, address);                                                  \
    GC_LOAD_LONG(what, word.z, word.w, address + 8)

// The reducing load of a type, chosen by the op; the host asks for no other pairs.
template <class T> struct Reduced;
template <> struct Reduced<float> {
    template <u32 OP> static GC_DEV void load(u64 address, Word& word) { GC_LOAD_WORD("add.v4.f32"); }
};
template <> struct Reduced<Float16> {
    template <u32 OP> static GC_DEV void load(u64 address, Word& word) { GC_LOAD_WORD("add.acc::f32.v4.f16x2"); }
};
template <> struct Reduced<Bfloat16> {
    template <u32 OP> static GC_DEV void load(u64 address, Word& word) { GC_LOAD_WORD("add.acc::f32.v4.bf16x2"); }
};
template <> struct Reduced<double> {
    template <u32 OP> static GC_DEV void load(u64 address, Word& word) { GC_LOAD_LONGS("add.f64"); }
};
#define GC_REDUCED(T, LOADS, bits, ordered)                                                       \
    template <> struct Reduced<T> {                                                               \
        template <u32 OP> static GC_DEV void load(u64 address, Word& word) {                      \
            if constexpr (OP == M_ADD) { LOADS("add.u" bits); }                                   \
            if constexpr (OP == M_MIN) { LOADS("min." ordered bits); }                            \
            if constexpr (OP == M_MAX) { LOADS("max." ordered bits); }                            \
            if constexpr (OP == M_AND) { LOADS("and.b" bits); }                                   \
            if constexpr (OP == M_OR) { LOADS("or.b" bits); }                                     \
            if constexpr (OP == M_XOR) { LOADS("xor.b" bits); }                                   \
        }                                                                                         \
    };
GC_REDUCED(i32, GC_LOAD_INTS, "32", "s")
GC_REDUCED(u32, GC_LOAD_INTS, "32", "u")
GC_REDUCED(i64, GC_LOAD_LONGS, "64", "s")
GC_REDUCED(u64, GC_LOAD_LONGS, "64", "u")

template <class T, class Op> GC_DEV Word multimem_load(u64 group, u64 offset) {
    Word word;
    Reduced<T>::template load<Op::MULTIMEM>(group + offset, word);
    return word;
}

#else

// Nothing is moved: the host tests the first sum of a communicator, and then does without these kernels.
GC_DEV void alias_fence() {}
GC_DEV void multimem_store(u64, u64, Word) {}
template <class T, class Op> GC_DEV Word multimem_load(u64, u64) { return {0, 0, 0, 0}; }

#endif

#else

GC_DEV void alias_fence() {}
// The address of a word in the memory of one rank. A GPU refuses other addresses than those of words: here they give the
// word before.
GC_DEV u64 place_of(u64 group, u64 number, u64 offset) {
    return load<u64>(group + (1 + number) * sizeof(u64)) + (offset & ~u64(sizeof(Word) - 1));
}
GC_DEV void multimem_store(u64 group, u64 offset, Word word) {
    for (u64 rank = 0; rank < load<u64>(group); ++rank) store<Word>(place_of(group, rank, offset), word);
}
// In the order of ranks, or in the opposite order: the program must not rely on any.
template <class T, class Op> GC_DEV Word multimem_load(u64 group, u64 offset) {
    const u64 ranks = load<u64>(group), backwards = gc_coin();
    const auto operand = [&](u64 k) { return load<Word>(place_of(group, backwards ? ranks - 1 - k : k, offset)); };
    Wide<T> total[1][ITEMS<T, Word>];
    widen<T>(total[0], operand(0));
    for (u64 k = 1; k < ranks; ++k) {
        const Word units[1] = {operand(k)};
        combine<T, Op>(total, units);
    }
    return narrow<T, Word>(total[0]);
}

#endif
