// All-reduce of a small message in packets: every rank writes all of its data to every other, each half of a packet
// with the number of the operation beside it, so that what has come is seen without a flag, a fence or another message.
//
// There are two buffers for packets. A rank that writes into one of them again has met every other in the operation in
// between, which they began only after they had read the one before. The number has 32 bits: a packet of 2^32 operations
// ago, never written over since, would be taken for a new one.
#include "peer_fold.h"

struct PacketsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count, nan_bytes;  // of the result, where a rank does not come
};

// Word `index` of an array, which may end in the middle of it and need not be aligned to words.
template <class T> GC_DEV Word gather(const PacketsArguments& a, u64 index) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    Items<T, Word> items;
    items.unit = {0, 0, 0, 0};
    GC_UNROLL
    for (u32 i = 0; i < PER_WORD; ++i)
        if (index * PER_WORD + i < a.count)
            items.item[i] = load<T>(address_of(a.src) + (index * PER_WORD + i) * sizeof(T));
    return items.unit;
}
template <class T> GC_DEV void scatter(const PacketsArguments& a, u64 index, Word word) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    Items<T, Word> items;
    items.unit = word;
    GC_UNROLL
    for (u32 i = 0; i < PER_WORD; ++i)
        if (index * PER_WORD + i < a.count)
            store<T>(address_of(a.dst) + (index * PER_WORD + i) * sizeof(T), items.item[i]);
}

// Where a word from `writer` comes in: two packets.
GC_DEV u64 packets_of(const Heap& heap, u32 owner, u32 writer, u64 epoch, u64 index) {
    const u64 buffer = epoch % 2;
    const u64 room = heap.slabs[owner] + heap.packets + (buffer * heap.ranks + writer) * heap.packet_room;
    return room + index * 2 * sizeof(Word);
}

GC_DEV void push(const Heap& heap, u64 epoch, u64 index, Word word) {
    const u32 number = u32(epoch);
    for (u32 k = 1; k < heap.ranks; ++k) {  // not all to the same one first
        const u64 there = packets_of(heap, (heap.rank + k) % heap.ranks, heap.rank, epoch, index);
        store_packet(there, {word.x, number, word.y, number});
        store_packet(there + sizeof(Word), {word.z, number, word.w, number});
    }
}

constexpr u32 AT_ONCE = 4;  // ranks whose packets are asked for together: eight loads of 16 bytes

// The words of AT_ONCE ranks from `first` on. A load takes the whole way to memory and back, so that all are under way
// before the first is looked at. In the place of this rank, and of ranks that there are not, another rank is looked at.
GC_DEV bool pull(const Heap& heap, u32 first, u64 epoch, u64 index, Word (&words)[AT_ONCE]) {
    const u32 number = u32(epoch), other = heap.rank == 0 ? 1 : 0;
    u32 writers[AT_ONCE], missing = other;
    Word low[AT_ONCE], high[AT_ONCE];
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k)
        writers[k] = first + k < heap.ranks && first + k != heap.rank ? first + k : other;
    const bool came = wait(heap, A_PACKET, missing, epoch, [&](u64& seen) {
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u64 here = packets_of(heap, heap.rank, writers[k], epoch, index);
            low[k] = load_packet(here);
            high[k] = load_packet(here + sizeof(Word));
        }
        bool all = true;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k)
            if (low[k].y != number || low[k].w != number || high[k].y != number || high[k].w != number) {
                all = false;
                missing = writers[k];
                seen = low[k].y;
            }
        return all;
    });
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k) words[k] = {low[k].x, low[k].z, high[k].x, high[k].z};
    return came;
}

// Adds up in the order of ranks, so that all of them get the same bits.
template <class T, class Op> GC_DEV bool reduce_word(const PacketsArguments& a, u64 epoch, u64 index) {
    const Word own = gather<T>(a, index);
    Wide<T> total[1][ITEMS<T, Word>];
    GC_ROLLED
    for (u32 first = 0; first < a.heap.ranks; first += AT_ONCE) {
        Word words[AT_ONCE];
        if (!pull(a.heap, first, epoch, index, words)) return false;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            Word units[1] = {first + k == a.heap.rank ? own : words[k]};
            if (first + k == 0)
                widen<T>(total[0], units[0]);
            else if (first + k < a.heap.ranks)
                combine<T, Op>(total, units);
        }
    }
    scatter<T>(a, index, narrow<T, Word>(total[0]));
    return true;
}

template <class T, class Op> GC_DEV void packets(const PacketsArguments& a) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 words = (a.count + PER_WORD - 1) / PER_WORD, step = gridDim.x * blockDim.x;
    const u64 first = take_channel(a.heap) * blockDim.x + threadIdx.x, epoch = epoch_of(a.heap);
    for (u64 index = first; index < words; index += step) push(a.heap, epoch, index, gather<T>(a, index));
    bool came = true;
    for (u64 index = first; came && index < words; index += step) came = reduce_word<T, Op>(a, epoch, index);
    if (!__syncthreads_and(came)) fill_with_nan(address_of(a.dst), a.nan_bytes);
    end_epoch(a.heap, epoch);
}
